//! The probe door: declared, probed and launched as three facts.
//!
//! *Declared* is the document: structure, version, variant, dims, rows. *Probed* is the plugin's own answer at these
//! shapes. *Launched* is a bind on seeded weights and one run on seeded inputs, compared with the reference.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Device, Tensor};
use serde::Serialize;
use structures_catalog::spec::{DimExpr, SpanDecl};
use structures_catalog::verify::{key_count, patterns, Case, Setting, Settled};
use structures_catalog::{dim_size, Spec};
use structures_graph::{Attrs, Layout};
use structures_loader::Plugin;
use structures_plugin_api::describe::{BindParams, Entries, FormDecl, ProbeShapes};

use crate::bind::{bind_form, Loaded};
use crate::error::Error;
use crate::host::{admitted_shapes, Host};
use crate::trial::{point_width, NamedWeight, Trial};

/// What is asked.
#[derive(Clone, Debug, Default)]
pub struct ProbeOptions {
    /// Only this plugin.
    pub plugin: Option<String>,
    /// Only this structure.
    pub structure: Option<String>,
    /// Only this form.
    pub form: Option<String>,
    /// Device, 0 is the CPU; each form's own choice when absent.
    pub device: Option<u32>,
    /// Rows to launch at.
    pub rows: Vec<u64>,
    /// Sizes of symbols.
    pub dims: BTreeMap<String, u64>,
}

/// One row of the answer.
#[derive(Clone, Debug, Serialize)]
pub struct ProbeRow {
    /// Plugin id.
    pub plugin: String,
    /// Structure.
    pub structure: String,
    /// Form.
    pub form: String,
    /// Device.
    pub device: u32,
    /// Rows.
    pub rows: u64,
    /// Sizes.
    pub dims: BTreeMap<String, u64>,
    /// The document covers these shapes.
    pub declared: bool,
    /// The plugin says it can.
    pub probed: bool,
    /// It ran and was right.
    pub launched: bool,
    /// Optional entries.
    pub entries: Entries,
    /// `ok` or `refused`.
    pub outcome: String,
    /// Why not.
    pub code: Option<String>,
    /// Why not, for people.
    pub reason: Option<String>,
    /// `ok` when the launch agreed with the reference.
    pub parity: Option<String>,
}

/// Symbols nobody sized get this: a multiple of everything forms ask for, and small.
const DEFAULT_DIM: u64 = 256;
/// Most elements of one tensor, 1 GiB of f32: more than any layer of a published decoder has, and a slip of a digit
/// is a refused row instead of a process out of memory.
const MAX_ELEMENTS: usize = 1 << 28;

/// Runs the probes. A device no plugin has is an error; everything else is a row.
pub fn probe(host: &Host, options: &ProbeOptions) -> Result<Vec<ProbeRow>, Error> {
    if let Some(name) = &options.structure {
        host.catalog.get(name)?;
    }
    if let Some(id) = &options.plugin {
        if host.registry.plugin(id).is_none() {
            return Err(Error::invalid(
                "plugin_unknown",
                format!("no loaded plugin `{id}`; {}", host.registry.known()),
            ));
        }
    }
    let wanted = |option: &Option<String>, value: &str| option.as_ref().is_none_or(|o| o == value);
    let mut rows = Vec::new();
    for plugin in host.registry.loaded() {
        if !wanted(&options.plugin, plugin.id()) {
            continue;
        }
        for form in &plugin.description().forms {
            if !wanted(&options.structure, &form.structure) || !wanted(&options.form, &form.name) {
                continue;
            }
            for &n in &options.rows {
                rows.push(one(host, plugin, form, n, options)?);
            }
        }
    }
    Ok(rows)
}

fn one(
    host: &Host,
    plugin: &Plugin,
    form: &FormDecl,
    rows: u64,
    options: &ProbeOptions,
) -> Result<ProbeRow, Error> {
    let mut shapes = ProbeShapes {
        rows: vec![rows],
        ..admitted_shapes(form)
    };
    let mut row = ProbeRow {
        plugin: plugin.id().into(),
        structure: form.structure.clone(),
        form: form.name.clone(),
        device: options.device.unwrap_or(0),
        rows,
        dims: BTreeMap::new(),
        declared: false,
        probed: false,
        launched: false,
        entries: Entries::default(),
        outcome: "refused".into(),
        code: None,
        reason: None,
        parity: None,
    };
    let refuse = |mut row: ProbeRow, code: &str, reason: String| {
        row.code = Some(code.into());
        row.reason = Some(reason);
        Ok(row)
    };
    let spec = match host.catalog.get(&form.structure) {
        Ok(spec) => spec,
        Err(e) => return refuse(row, e.code(), e.to_string()),
    };
    if !form.spec_versions.contains(&spec.version) {
        let reason = format!(
            "the form accepts {:?}, the catalog has {}",
            form.spec_versions, spec.version
        );
        return refuse(row, "spec_version", reason);
    }
    let variant = variant(spec, form);
    shapes.variant.clone_from(&variant);
    if let Some(s) = form.statistics.iter().find(|s| s.statistic == "content") {
        let reason = format!("nothing ran that gives point `{}` its content", s.point);
        return refuse(row, "statistic_unmeasurable", reason);
    }
    let sized = match Shaped::new(spec, form, &variant, &shapes.dims, &options.dims, rows) {
        Ok(s) => s,
        Err(reason) => return refuse(row, "dims_inconsistent", reason),
    };
    shapes.dims.clone_from(&sized.dims);
    row.dims.clone_from(&sized.dims);
    if let Err(failure) = form.admits(&shapes) {
        return refuse(row, &failure.code, failure.message);
    }
    row.declared = true;
    if let Err(reason) = sized.fits(rows) {
        return refuse(row, "dims_inconsistent", reason);
    }
    let placed = match options.device {
        Some(device) => Ok(device),
        None => plugin.home(&form.structure, &form.name),
    };
    row.device = match placed {
        Ok(device) => device,
        Err(e) => return refuse(row, &e.code, e.to_string()),
    };
    match plugin.probe(&form.name, row.device, &shapes) {
        Ok(report) => {
            row.probed = report.probed;
            row.entries = report.entries;
            if !report.probed {
                let code = report.code.unwrap_or_else(|| "entry_missing".into());
                let reason = report
                    .reason
                    .unwrap_or_else(|| "the plugin gave no reason".into());
                return refuse(row, &code, reason);
            }
        }
        Err(e) => return refuse(row, &e.code, e.to_string()),
    }
    let bench = match sized.seeded() {
        Ok(b) => b,
        Err(reason) => return refuse(row, "host_failed", reason),
    };
    match bench.launch(spec, plugin, form, &variant, rows, row.device) {
        Ok(Ok(())) => {
            row.launched = true;
            row.outcome = "ok".into();
            row.parity = Some("ok".into());
            Ok(row)
        }
        Ok(Err((code, reason))) => refuse(row, &code, reason),
        // The host's own side of the comparison; the other forms go on.
        Err(e) => refuse(row, &e.code(), e.to_string()),
    }
}

/// The first value a form accepts on every axis, the spec's default or first value elsewhere.
fn variant(spec: &Spec, form: &FormDecl) -> BTreeMap<String, String> {
    spec.variants
        .iter()
        .filter_map(|(name, axis)| {
            let declared = form.variants.get(name).and_then(|v| v.first());
            let value = declared
                .or(axis.default.as_ref())
                .or_else(|| axis.values.keys().next())?;
            Some((name.clone(), value.clone()))
        })
        .collect()
}

/// The tensors of a structure at given sizes, before anything of that size exists.
struct Shaped {
    dims: BTreeMap<String, u64>,
    span: String,
    params: Attrs,
    weights: Vec<(String, Layout, Vec<usize>)>,
    inputs: Vec<(String, Option<Vec<usize>>)>,
    /// Inputs that hold one number: how many keys are valid.
    counts: BTreeMap<String, usize>,
    row_axes: Vec<Option<usize>>,
    outputs: Vec<String>,
    /// The largest size of a symbol that does not count rows.
    widest: u64,
}

/// The same with seeded values.
struct Seeded {
    dims: BTreeMap<String, u64>,
    span: String,
    params: Attrs,
    weights: Vec<NamedWeight>,
    inputs: Vec<(String, Option<Tensor>)>,
    row_axes: Vec<Option<usize>>,
    outputs: Vec<String>,
}

impl Shaped {
    fn new(
        spec: &Spec,
        form: &FormDecl,
        variant: &BTreeMap<String, String>,
        admitted: &BTreeMap<String, u64>,
        asked: &BTreeMap<String, u64>,
        rows: u64,
    ) -> Result<Self, String> {
        if rows == 0 || asked.values().any(|n| *n == 0) {
            return Err("expected rows and sizes of at least 1, found 0".into());
        }
        let symbols = symbols(spec);
        if let Some(unknown) = asked.keys().find(|s| !symbols.contains(s.as_str())) {
            let known: Vec<&str> = symbols.into_iter().collect();
            return Err(format!(
                "`{}` has no symbol `{unknown}`; expected one of {}",
                spec.name,
                known.join(", ")
            ));
        }
        let row = row_symbol(spec);
        let mut wanted = BTreeMap::new();
        for symbol in symbols {
            let size = match asked
                .get(symbol)
                .or_else(|| admitted.get(symbol).filter(|n| **n > 1))
            {
                Some(n) => whole(*n)?,
                None if Some(symbol) == row.as_deref() => whole(rows)?,
                None if is_width(spec, symbol) => whole(DEFAULT_DIM)?,
                None => continue,
            };
            wanted.insert(symbol.to_string(), size);
        }
        // The barest set of optional and repeated tensors with which one of the form's spans can run.
        let mut sets = patterns(spec);
        sets.sort_by_key(BTreeSet::len);
        let mut why = format!("none of the spans {:?} exists here", form.spans);
        for present in &sets {
            let case = Case {
                spec,
                axes: variant,
                present,
                shape: 0,
                setting: Setting::Default,
                wanted: &wanted,
            };
            match case.settle() {
                Ok(Some(mut settled)) => {
                    settled.params = settled.filled(spec);
                    match Self::settled(form, settled, asked, row.as_deref()) {
                        Ok(Some(shaped)) => return Ok(shaped),
                        Ok(None) => {}
                        Err(reason) => why = reason,
                    }
                }
                Ok(None) => {}
                Err(e) => why = e.to_string(),
            }
        }
        Err(why)
    }

    /// The widest span of the form that has everything it reads; `None` when none has.
    fn settled(
        form: &FormDecl,
        settled: Settled,
        asked: &BTreeMap<String, u64>,
        row: Option<&str>,
    ) -> Result<Option<Self>, String> {
        let Settled {
            plain,
            sources,
            params,
            dims,
        } = settled;
        for (symbol, n) in asked {
            match dims.get(symbol) {
                Some(found) if *found as u64 == *n => {}
                Some(found) => {
                    return Err(format!(
                        "{symbol} = {n} contradicts the other sizes, which ask for {found}"
                    ))
                }
                None => {}
            }
        }
        let complete = |span: &&SpanDecl| {
            plain.span_ops(span).iter().all(|o| {
                let op = &plain.ops[*o];
                let operands = op.kind.spec().operands.iter().zip(&op.inputs);
                operands
                    .clone()
                    .all(|(o, n)| n.is_some() || o.ends_with('?'))
                    && op.inputs.iter().flatten().all(|name| {
                        plain.source(name).is_none() || sources.iter().any(|s| s.name == *name)
                    })
            })
        };
        let named = form.spans.iter().filter_map(|name| plain.span(name));
        let Some(span) = named.clone().find(complete) else {
            return Ok(None);
        };
        let values = plain.value_dims();
        let shape = |name: &str, dims_of: &[DimExpr]| -> Result<Vec<usize>, String> {
            let sizes: Option<Vec<usize>> = dims_of.iter().map(|d| dim_size(d, &dims)).collect();
            sizes.ok_or_else(|| format!("`{name}` has dims without a size"))
        };
        let mut weights = Vec::new();
        let ops = plain.span_ops(span);
        let reads = |name: &str| {
            let mut all = ops
                .iter()
                .flat_map(|o| plain.ops[*o].inputs.iter().flatten());
            all.any(|n| n == name)
        };
        for source in sources.iter().filter(|s| s.slot && reads(&s.name)) {
            let dims = shape(&source.name, &source.dims)?;
            weights.push((source.name.clone(), source.layout, dims));
        }
        let (mut inputs, mut row_axes) = (Vec::new(), Vec::new());
        let mut counts = BTreeMap::new();
        for name in &span.inputs {
            let declared = sources.iter().find(|s| s.name == *name).map(|s| &s.dims);
            let made = || values.get(name).filter(|_| plain.source(name).is_none());
            let Some(of) = declared.or_else(made) else {
                inputs.push((name.clone(), None));
                row_axes.push(None);
                continue;
            };
            let is_row =
                |d: &DimExpr| matches!((d, row), (DimExpr::Symbol(s), Some(row)) if s == row);
            row_axes.push(of.iter().position(is_row));
            counts.extend(key_count(&plain, name, &dims).map(|n| (name.clone(), n)));
            inputs.push((name.clone(), Some(shape(name, of)?)));
        }
        let widths = dims.iter().filter(|(s, _)| Some(s.as_str()) != row);
        Ok(Some(Shaped {
            widest: widths.map(|(_, n)| *n as u64).max().unwrap_or(1),
            span: span.name.clone(),
            outputs: span.outputs.clone(),
            dims: dims.iter().map(|(s, n)| (s.clone(), *n as u64)).collect(),
            params,
            weights,
            inputs,
            counts,
            row_axes,
        }))
    }

    /// Every tensor can be made: weights, inputs, and values inside as wide as the widest symbol.
    fn fits(&self, rows: u64) -> Result<(), String> {
        let inside = (
            "a value".to_string(),
            vec![whole(rows)?, whole(self.widest)?],
        );
        let weights = self.weights.iter().map(|(n, _, d)| (n.clone(), d.clone()));
        let inputs = self
            .inputs
            .iter()
            .filter_map(|(n, d)| Some((n.clone(), d.clone()?)));
        for (name, dims) in weights.chain(inputs).chain([inside]) {
            let n = dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
            if n.is_none_or(|n| n > MAX_ELEMENTS) {
                return Err(format!(
                    "`{name}` would have the shape {dims:?}: expected at most {MAX_ELEMENTS} elements a tensor; \
                     give smaller --rows or --dims"
                ));
            }
        }
        Ok(())
    }

    /// Makes them. Each tensor has a seed of its own.
    fn seeded(self) -> Result<Seeded, String> {
        let mut seed = 1u32;
        let mut next = |dims: &[usize]| {
            seed += 1;
            noise(dims, seed)
        };
        let weights = self
            .weights
            .into_iter()
            .map(|(name, layout, dims)| {
                let tensor = next(&dims)?;
                Ok(NamedWeight {
                    name,
                    layout,
                    tensor,
                })
            })
            .collect::<Result<Vec<_>, String>>()?;
        let counts = self.counts;
        let inputs = self
            .inputs
            .into_iter()
            .map(|(name, dims)| {
                let tensor = match (dims, counts.get(&name)) {
                    (None, _) => None,
                    (Some(dims), Some(n)) => Some(
                        Tensor::full(*n as f32, dims, &Device::Cpu).map_err(|e| e.to_string())?,
                    ),
                    (Some(dims), None) => Some(next(&dims)?),
                };
                Ok((name, tensor))
            })
            .collect::<Result<Vec<_>, String>>()?;
        Ok(Seeded {
            dims: self.dims,
            span: self.span,
            params: self.params,
            weights,
            inputs,
            row_axes: self.row_axes,
            outputs: self.outputs,
        })
    }
}

impl Seeded {
    fn has(&self, name: &str) -> bool {
        self.weights.iter().any(|w| w.name == name)
            || self.inputs.iter().any(|(n, t)| n == name && t.is_some())
    }

    fn launch(
        &self,
        spec: &Spec,
        plugin: &Plugin,
        form: &FormDecl,
        variant: &BTreeMap<String, String>,
        rows: u64,
        device: u32,
    ) -> Result<Result<(), (String, String)>, Error> {
        // A capacity counts all dims of the first input but its channels.
        let first = self.inputs.iter().find_map(|(_, t)| t.as_ref());
        let rows = first.map_or(rows, |t| {
            (t.elem_count() / t.dims().last().copied().unwrap_or(1).max(1)) as u64
        });
        // Seeded inputs lie in -1..1: that is their amax, at any point far enough for a launch.
        let statistics: BTreeMap<String, Vec<f32>> = form
            .statistics
            .iter()
            .map(|s| {
                let n = match s.granularity.as_str() {
                    "channel" => spec
                        .expand(variant, &|n| self.has(n))
                        .ok()
                        .and_then(|plain| point_width(&plain, &s.point, &self.weights)),
                    _ => Some(1),
                };
                let key = format!("{}|{}|{}", s.point, s.statistic, s.granularity);
                (key, vec![4.0; n.unwrap_or(1)])
            })
            .collect();
        let params = BindParams {
            structure: spec.name.clone(),
            version: spec.version,
            variant: variant.clone(),
            params: self
                .params
                .iter()
                .map(|(k, v)| (k.clone(), serde_json::to_value(v).unwrap_or_default()))
                .collect(),
            dims: self.dims.clone(),
            inputs: self.inputs.iter().map(|(n, _)| n.clone()).collect(),
            outputs: self.outputs.clone(),
            states: Vec::new(),
            scheme: BTreeMap::new(),
            packed: BTreeMap::new(),
            wires: BTreeMap::new(),
            kept: None,
        };
        let bound = bind_form(
            plugin,
            &form.name,
            &self.span,
            &self.weights,
            &statistics,
            &params,
            rows,
            &crate::adopt::Blocks::new(),
            device,
        )?;
        let bound = bound.and_then(|form| Loaded::new(form, plugin, device));
        let bound = match bound {
            Ok(b) => b,
            Err(e) => return Ok(Err((e.code.clone(), e.to_string()))),
        };
        let trial = Trial {
            spec,
            span: &self.span,
            variant,
            params: &self.params,
            inputs: self.inputs.clone(),
            row_axes: self.row_axes.clone(),
            outputs: self.outputs.clone(),
            balance: structures_plugin_api::formats::Balance::default(),
        };
        let verdict = trial.run(form, &bound, &self.weights, &statistics, rows)?;
        let verdict = verdict.map(|_| ());
        Ok(verdict.map_err(|(code, reason)| (code.to_string(), reason)))
    }
}

/// Every symbol of boundary and slots.
fn symbols(spec: &Spec) -> BTreeSet<&str> {
    let of = |d: &DimExpr| matches!(d, DimExpr::Symbol(_));
    let ports = spec.inputs.iter().map(|p| &p.dims);
    let slots = spec.weights.iter().map(|s| &s.dims);
    let plain = ports.chain(slots).flatten().filter(|d| of(d));
    let named = plain.filter_map(|d| match d {
        DimExpr::Symbol(s) => Some(s.as_str()),
        _ => None,
    });
    named
        .chain(spec.symbols.keys().map(String::as_str))
        .collect()
}

/// What rows are counted by: the leading dim of a matrix, the second one of anything larger, as the first output has it.
fn row_symbol(spec: &Spec) -> Option<String> {
    let dims = &spec.outputs.first()?.dims;
    match dims.get(usize::from(dims.len() > 2))? {
        DimExpr::Symbol(s) => Some(s.clone()),
        _ => None,
    }
}

/// Whether a symbol is the last dim of an input or a dim of a matrix: as wide as layers are.
fn is_width(spec: &Spec, symbol: &str) -> bool {
    let is = |d: &DimExpr| matches!(d, DimExpr::Symbol(s) if s == symbol);
    spec.inputs.iter().any(|p| p.dims.last().is_some_and(is))
        || spec
            .weights
            .iter()
            .any(|s| s.dims.len() == 2 && s.dims.iter().any(is))
}

fn whole(n: u64) -> Result<usize, String> {
    usize::try_from(n).map_err(|_| format!("{n} is more than this machine can count"))
}

/// Deterministic values in -1..1; the caller has checked that so many fit.
fn noise(dims: &[usize], seed: u32) -> Result<Tensor, String> {
    let mut s = seed.wrapping_mul(2_654_435_761) | 1;
    let n: usize = dims.iter().product();
    let data: Vec<f32> = (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 17;
            s ^= s << 5;
            (s as f32 / u32::MAX as f32) * 2.0 - 1.0
        })
        .collect();
    Tensor::from_vec(data, dims, &Device::Cpu).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sized(rows: u64, asked: &[(&str, u64)]) -> Result<Shaped, String> {
        let catalog = structures_catalog::Catalog::builtin().unwrap();
        // One input and a matrix, so that a wide symbol costs elements.
        let matrix = |s: &&Spec| s.weights.iter().any(|w| w.dims.len() == 2);
        let mut all = catalog.list().into_iter().filter(matrix);
        let spec = all.find(|s| s.inputs.len() == 1);
        let spec = spec.unwrap();
        let mut form = FormDecl::new(&spec.name, "plain", "none");
        form.spans = spec.dataflow.spans.iter().map(|s| s.name.clone()).collect();
        let variant = variant(spec, &form);
        let asked: BTreeMap<String, u64> =
            asked.iter().map(|(s, n)| ((*s).to_string(), *n)).collect();
        let shaped = Shaped::new(spec, &form, &variant, &BTreeMap::new(), &asked, rows)?;
        shaped.fits(rows)?;
        Ok(shaped)
    }

    fn symbol() -> String {
        let plain = sized(1, &[]).unwrap();
        let wide = plain.dims.iter().find(|(_, n)| **n == DEFAULT_DIM);
        wide.unwrap().0.clone()
    }

    #[test]
    fn tensors_are_made_only_where_they_fit() {
        let plain = sized(3, &[]).unwrap();
        let widths = plain.dims.values().filter(|n| **n == DEFAULT_DIM).count();
        assert!(widths >= 2 && plain.dims["M"] == 3, "{:?}", plain.dims);
        let seeded = plain.seeded().unwrap();
        let input = seeded.inputs[0].1.as_ref().unwrap();
        assert_eq!(input.dims(), [3, DEFAULT_DIM as usize]);
        let most = MAX_ELEMENTS as u64 / DEFAULT_DIM;
        assert!(sized(most, &[]).is_ok());
        for rows in [most + 1, 100_000_000_000_000, u64::MAX] {
            let reason = sized(rows, &[]).err().unwrap();
            assert!(reason.contains("at most 268435456"), "{reason}");
        }
        let symbol = symbol();
        for n in [most + 1, 9_000_000_000_000_000_000, u64::MAX] {
            let reason = sized(1, &[(&symbol, n)]).err().unwrap();
            assert!(reason.contains(&n.to_string()), "{reason}");
        }
    }

    #[test]
    fn nothing_has_no_size() {
        assert!(sized(0, &[]).is_err());
        assert!(sized(1, &[(&symbol(), 0)]).is_err());
    }
}
