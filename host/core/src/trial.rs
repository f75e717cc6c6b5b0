//! One run of a form against the structure's reference: bind parity, and the launch of a probe.
//!
//! Inputs come from the host or from a seed; outputs are poisoned first, so that what a form does not write is seen.
//! The reference runs on the same weights rounded through the form's declared format, with the points the form
//! rounds rounded too, so that what is left is the form's own error.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Tensor};
use structures_catalog::spec::Plain;
use structures_catalog::{CatalogError, Feed, Spec};
use structures_graph::{Attrs, Layout, OpKind};
use structures_plugin_api::describe::{FormDecl, WeightFormat};
use structures_plugin_api::formats::{
    round_weights_jointly, ActivationRounding, Balance, WeightMatrix,
};

use crate::error::Error;
use crate::gates::bind_parity;
use crate::kept::Witness;
use crate::seat::Executable;

/// A weight in slot dims.
pub struct NamedWeight {
    /// Slot, expanded.
    pub name: String,
    /// Order of the slot's dims.
    pub layout: Layout,
    /// f32, any strides.
    pub tensor: Tensor,
}

/// What is run.
pub struct Trial<'a> {
    /// Structure.
    pub spec: &'a Spec,
    /// Span.
    pub span: &'a str,
    /// Host and form axes.
    pub variant: &'a BTreeMap<String, String>,
    /// Captured attributes.
    pub params: &'a Attrs,
    /// The span's inputs in order; `None` for an absent optional.
    pub inputs: Vec<(String, Option<Tensor>)>,
    /// Along which dim an input's rows lie; `None` where it has none. As many as `inputs`.
    pub row_axes: Vec<Option<usize>>,
    /// Outputs that are made, in order.
    pub outputs: Vec<String>,
    /// How a balancing form was told to balance.
    pub balance: Balance,
}

/// Weight slot -> factor of every input channel, for the weights that a balancing form scales before it packs them.
pub type ChannelFactors = BTreeMap<String, Vec<f32>>;

impl Trial<'_> {
    /// Compares the form with the reference at the largest and the smallest row count it serves, and with itself; gives
    /// the smallest call and its answer. The inner error is `bind_parity`, `bind_smoke`, `bind_writes` or `not_repeatable` with its reason.
    pub fn run(
        &self,
        form: &FormDecl,
        executable: &dyn Executable,
        weights: &[NamedWeight],
        statistics: &BTreeMap<String, Vec<f32>>,
        capacity: u64,
    ) -> Result<Result<Witness, (&'static str, String)>, Error> {
        if ActivationRounding::of(&form.activation_format, None).is_none() {
            let reason = format!(
                "the host's reference cannot round activations through `{}`; it knows {}",
                form.activation_format,
                ActivationRounding::NAMES.join(", ")
            );
            return Ok(Err(("format_no_variant", reason)));
        }
        let factors = match form.balances {
            false => ChannelFactors::new(),
            true => {
                let given = |n: &str| self.inputs.iter().any(|(i, t)| i == n && t.is_some());
                let plain = self.plain(&|n| given(n) || weights.iter().any(|w| w.name == n))?;
                channel_factors(&plain, form, statistics, &self.balance)
            }
        };
        let rounded = round_weights(weights, form, &factors)?;
        let available = self
            .inputs
            .iter()
            .find_map(|(_, t)| t.as_ref())
            .map_or(1, count);
        let lowest = form.band.rows.map_or(1, |[lo, _]| lo as usize).max(1);
        let largest = (capacity as usize).min(available).max(1);
        let mut counts = vec![largest];
        if lowest < largest {
            counts.push(lowest);
        }
        let mut last = None;
        for rows in counts {
            let inputs = take_rows(&self.inputs, &self.row_axes, rows)?;
            let want = self.reference(&rounded, &inputs, form, statistics)?;
            let got = match launch(executable, &inputs, &want, f32::NAN) {
                Ok(got) => got,
                Err((code, reason)) => return Ok(Err((code, format!("{reason}, at {rows} rows")))),
            };
            // What a form may promise is capped by its formats, whatever it declares.
            let tolerance = form.tolerance.min(structures_loader::tolerance_cap(form));
            let unit = rounding(form);
            if let Err(reason) = self.within(&inputs, &want, &got, weights, tolerance, unit)? {
                return Ok(Err(("bind_parity", format!("{reason}, at {rows} rows"))));
            }
            // Another poison: what is read before it is written shows here, and so does state that is kept.
            let again = match launch(executable, &inputs, &want, 1e30) {
                Ok(again) => again,
                Err((code, reason)) => {
                    return Ok(Err((code, format!("{reason}, in a second call"))))
                }
            };
            if let Some(reason) = different(&want, &got, &again)? {
                return Ok(Err(("not_repeatable", format!("{reason}, at {rows} rows"))));
            }
            let names = want.into_iter().map(|(name, _)| name);
            last = Some(Witness {
                inputs,
                outputs: names.zip(got).collect(),
            });
        }
        match last {
            Some(last) => Ok(Ok(last)),
            None => Ok(Err(("bind_smoke", "no number of rows was tried".into()))),
        }
    }

    /// Compares outputs one by one, at `tolerance`; an output that ends in `+ input` without that input.
    pub fn compare(
        &self,
        inputs: &[(String, Option<Tensor>)],
        want: &[(String, Tensor)],
        got: &[Tensor],
        weights: &[NamedWeight],
        tolerance: f64,
    ) -> Result<Result<(), String>, Error> {
        let unit = f64::from(f32::EPSILON);
        self.within(inputs, want, got, weights, tolerance, unit)
    }

    /// As `compare`, for outputs that were rounded to a relative `unit` at last.
    fn within(
        &self,
        inputs: &[(String, Option<Tensor>)],
        want: &[(String, Tensor)],
        got: &[Tensor],
        weights: &[NamedWeight],
        tolerance: f64,
        unit: f64,
    ) -> Result<Result<(), String>, Error> {
        let tails = self.tails(inputs, weights)?;
        for ((name, want), got) in want.iter().zip(got) {
            let (mut got, mut want) = (flat(got)?, flat(want)?);
            let mut tolerance = tolerance;
            let tail = tails
                .get(name)
                .and_then(|t| inputs.iter().find(|(n, _)| n == t))
                .and_then(|(_, t)| t.as_ref())
                .filter(|t| t.elem_count() == want.len());
            if let Some(tail) = tail {
                let (whole, tail) = (norm(&want), flat(tail)?);
                for ((g, w), t) in got.iter_mut().zip(&mut want).zip(&tail) {
                    *g -= t;
                    *w -= t;
                }
                // The sum was rounded before the tail was taken off again.
                tolerance += unit * whole / norm(&want).max(f64::MIN_POSITIVE);
            }
            if let Some(refusal) = bind_parity(&got, &want, tolerance).refusal() {
                return Ok(Err(format!("output `{name}`: {}", refusal.reason)));
            }
        }
        Ok(Ok(()))
    }

    pub(crate) fn reference(
        &self,
        weights: &[(String, Tensor)],
        inputs: &[(String, Option<Tensor>)],
        form: &FormDecl,
        statistics: &BTreeMap<String, Vec<f32>>,
    ) -> Result<Vec<(String, Tensor)>, Error> {
        let given = |n: &str| inputs.iter().any(|(name, t)| name == n && t.is_some());
        let plain = self.plain(&|n| given(n) || weights.iter().any(|(name, _)| name == n))?;
        let present = inputs
            .iter()
            .filter_map(|(name, t)| Some((name, t.as_ref()?)));
        let feed = Feed {
            inputs: present
                .map(|(name, t)| Ok((name.clone(), viewed(&plain, name, t)?)))
                .collect::<Result<_, Error>>()?,
            weights: weights.iter().cloned().collect(),
            params: self.params.clone(),
            dtype: Some(DType::F32),
            ..Feed::default()
        };
        reference(
            (self.spec, &plain, self.span),
            feed,
            &self.outputs,
            form,
            statistics,
            &self.balance,
        )
    }

    /// The operations. A narrow span lists only what it reads; what is missed elsewhere is taken as there.
    fn plain(&self, here: &dyn Fn(&str) -> bool) -> Result<Plain, Error> {
        let mut outside: Vec<String> = Vec::new();
        loop {
            let plain = self
                .spec
                .expand(self.variant, &|n| here(n) || outside.iter().any(|o| o == n));
            match plain {
                Err(
                    CatalogError::MissingWeight { slot: name, .. }
                    | CatalogError::MissingInput { input: name, .. },
                ) if !outside.contains(&name) => outside.push(name),
                plain => return Ok(plain?),
            }
        }
    }

    /// Outputs that end in `+ input`: the input is exact on both sides and would hide an error of the form.
    fn tails(
        &self,
        inputs: &[(String, Option<Tensor>)],
        weights: &[NamedWeight],
    ) -> Result<HashMap<String, String>, Error> {
        let given = |name: &str| inputs.iter().any(|(n, t)| n == name && t.is_some());
        let here = |name: &str| given(name) || weights.iter().any(|w| w.name == name);
        let plain = self.plain(&here)?;
        let mut tails = HashMap::new();
        for op in plain.ops.iter().filter(|op| op.kind == OpKind::Add) {
            let input = op.inputs.iter().flatten().find(|i| given(i));
            if let (Some(input), [out]) = (input, op.outputs.as_slice()) {
                tails.insert(out.clone(), input.clone());
            }
        }
        Ok(tails)
    }
}

/// A value that the entry makes itself, under the dims it gives it there: a host may hold it with dims of size 1 more.
fn viewed(plain: &Plain, name: &str, tensor: &Tensor) -> Result<Tensor, Error> {
    let declared = plain.ops.iter().find_map(|op| {
        let at = op.outputs.iter().position(|o| o == name)?;
        op.view(at)
    });
    let mut dims = tensor.dims().to_vec();
    while declared.is_some_and(|d| d.len() < dims.len()) {
        // Rows and channels stay where they are.
        let inner = (1..dims.len() - 1).find(|i| dims[*i] == 1);
        match inner.or((dims[0] == 1).then_some(0)) {
            Some(i) => dims.remove(i),
            None => break,
        };
    }
    tensor.reshape(dims).map_err(crate::bind::failed)
}

/// The reference of a span on operands as a form keeps them: the weights of `feed` come rounded ([`round_weights`]),
/// the points that the form rounds are rounded here.
pub fn reference(
    (spec, plain, span): (&Spec, &Plain, &str),
    feed: Feed<'_>,
    outputs: &[String],
    form: &FormDecl,
    statistics: &BTreeMap<String, Vec<f32>>,
    balance: &Balance,
) -> Result<Vec<(String, Tensor)>, Error> {
    let rounding_of = |point: &str| -> Option<ActivationRounding> {
        form.statistics.iter().find(|s| s.point == point)?;
        let amax = statistics.get(&format!("{point}|amax|tensor"));
        let amax = amax.and_then(|values| values.first().copied());
        ActivationRounding::of(&form.activation_format, amax)
            .filter(|rounding| *rounding != ActivationRounding::None)
    };
    let factors_of = |point: &str| factors_at(point, form, statistics, balance);
    let at = |name: &str| structures_graph::GraphError::Malformed {
        phase: "reference".into(),
        at: name.into(),
        what: "cannot be rounded through its format".into(),
    };
    let round = |name: &str, t: Tensor| -> Result<Tensor, CatalogError> {
        let Some(rounding) = rounding_of(name) else {
            return Ok(t);
        };
        let dims = t.dims().to_vec();
        let mut data = t
            .to_dtype(DType::F32)
            .and_then(|t| t.flatten_all())
            .and_then(|t| t.to_vec1::<f32>())
            .map_err(|_| at(name))?;
        let width = dims.last().copied().unwrap_or(1);
        // The form reads `x / s`; its weights carry the `s` that is put back here.
        let factors = factors_of(name).filter(|factors| factors.len() == width);
        scale_channels(&mut data, factors.as_deref(), |s| 1.0 / s);
        rounding.round(&mut data, width);
        scale_channels(&mut data, factors.as_deref(), |s| s);
        Ok(Tensor::from_vec(data, dims, &Device::Cpu).map_err(|_| at(name))?)
    };
    let feed = Feed {
        on_value: Some(&round),
        ..feed
    };
    let values = spec.evaluate(plain, span, &feed)?;
    outputs
        .iter()
        .map(|name| {
            let made = plain.resolve(name);
            let value = values.iter().find(|(n, _)| n == made || n == name);
            value
                .map(|(_, t)| (name.clone(), t.clone()))
                .ok_or_else(|| {
                    Error::invalid(
                        "point_unplaced",
                        format!("the reference of `{}` makes no `{name}`", spec.name),
                    )
                })
        })
        .collect()
}

/// The factors at a point that a form balances by.
fn factors_at(
    point: &str,
    form: &FormDecl,
    statistics: &BTreeMap<String, Vec<f32>>,
    balance: &Balance,
) -> Option<Vec<f32>> {
    let amax = statistics.get(&format!("{point}|amax|channel"));
    amax.filter(|_| form.balances).map(|a| balance.factors(a))
}

/// Which weights a balancing form scales, and by what: those of the products that read a point it balances by.
pub fn channel_factors(
    plain: &Plain,
    form: &FormDecl,
    statistics: &BTreeMap<String, Vec<f32>>,
    balance: &Balance,
) -> ChannelFactors {
    let mut found = ChannelFactors::new();
    for s in form
        .statistics
        .iter()
        .filter(|s| s.granularity == "channel")
    {
        let Some(factors) = factors_at(&s.point, form, statistics, balance) else {
            continue;
        };
        let value = plain.resolve(&s.point);
        for op in plain.ops.iter().filter(|op| op.kind == OpKind::Linear) {
            if let [Some(x), Some(w), ..] = op.inputs.as_slice() {
                if x == value || *x == s.point {
                    found.insert(w.clone(), factors.clone());
                }
            }
        }
    }
    found
}

/// Channels of a point: the inputs of a product that reads it.
pub fn point_width(plain: &Plain, point: &str, weights: &[NamedWeight]) -> Option<usize> {
    let value = plain.resolve(point);
    let products = plain.ops.iter().filter(|op| op.kind == OpKind::Linear);
    products
        .filter_map(|op| match op.inputs.as_slice() {
            [Some(x), Some(w), ..] if x == value || x == point => {
                weights.iter().find(|have| have.name == *w)
            }
            _ => None,
        })
        .find_map(|w| match (w.layout, w.tensor.dims()) {
            (Layout::InOut, [k, _]) | (Layout::OutIn, [_, k]) => Some(*k),
            _ => None,
        })
}

fn scale_channels(data: &mut [f32], factors: Option<&[f32]>, by: impl Fn(f32) -> f32) {
    if let Some(factors) = factors {
        for row in data.chunks_mut(factors.len().max(1)) {
            row.iter_mut().zip(factors).for_each(|(v, s)| *v *= by(*s));
        }
    }
}

/// The relative rounding unit of a form's outputs.
fn rounding(form: &FormDecl) -> f64 {
    match form.rounds.as_deref() {
        Some("bf16") => 2f64.powi(-8),
        Some("f16") => 2f64.powi(-11),
        _ => f64::from(f32::EPSILON),
    }
}

/// Values behind the end of every output that no form may touch.
const GUARD: usize = 64;
/// What they hold.
const GUARD_VALUE: f32 = -1.5e-33;

/// Values and dims.
type Copied = (Vec<f32>, Vec<usize>);

/// One call on copies of the inputs, with poisoned and guarded outputs.
fn launch(
    executable: &dyn Executable,
    inputs: &[(String, Option<Tensor>)],
    like: &[(String, Tensor)],
    poison: f32,
) -> Result<Vec<Tensor>, (&'static str, String)> {
    let host = |e: candle_core::Error| ("bind_smoke", format!("host_failed: {e}"));
    let copies = || -> Result<Vec<Option<Copied>>, (&'static str, String)> {
        let copy = |t: &Tensor| Ok((t.flatten_all()?.to_vec1::<f32>()?, t.dims().to_vec()));
        inputs
            .iter()
            .map(|(_, t)| t.as_ref().map(copy).transpose())
            .collect::<Result<_, _>>()
            .map_err(host)
    };
    let (given, kept) = (copies()?, copies()?);
    let views: Vec<Option<(&[f32], &[usize])>> = given
        .iter()
        .map(|t| t.as_ref().map(|(d, s)| (d.as_slice(), s.as_slice())))
        .collect();
    let mut outputs: Vec<(Vec<f32>, Vec<usize>)> = like
        .iter()
        .map(|(_, t)| {
            let mut data = vec![poison; t.elem_count()];
            data.resize(t.elem_count() + GUARD, GUARD_VALUE);
            (data, t.dims().to_vec())
        })
        .collect();
    executable
        .call(&views, &mut outputs)
        .map_err(|f| ("bind_smoke", format!("{}: {}", f.code, f.message)))?;
    // Read through the pointers the form had, or the compiler may take the copies for unchanged.
    let views = std::hint::black_box(&given);
    for (((name, _), now), then) in inputs.iter().zip(views).zip(&kept) {
        if now.as_ref().map(|(d, _)| bits(d)) != then.as_ref().map(|(d, _)| bits(d)) {
            return Err((
                "bind_writes",
                format!("the form changed its input `{name}`"),
            ));
        }
    }
    let mut made = Vec::with_capacity(outputs.len());
    for ((name, like), (mut data, dims)) in like.iter().zip(outputs) {
        let behind = data.split_off(like.elem_count());
        if behind.iter().any(|v| v.to_bits() != GUARD_VALUE.to_bits()) {
            let reason = format!("the form wrote behind the end of output `{name}`");
            return Err(("bind_writes", reason));
        }
        made.push(Tensor::from_vec(data, dims, &Device::Cpu).map_err(host)?);
    }
    Ok(made)
}

/// Whether a form answers a witness's call as then, bit by bit.
pub(crate) fn repeats(executable: &dyn Executable, witness: &Witness) -> bool {
    let then: Vec<Tensor> = witness.outputs.iter().map(|(_, t)| t.clone()).collect();
    let now = launch(executable, &witness.inputs, &witness.outputs, f32::NAN);
    now.is_ok_and(|now| matches!(different(&witness.outputs, &then, &now), Ok(None)))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The first output in which two calls on the same inputs differ, as a sentence.
fn different(
    like: &[(String, Tensor)],
    first: &[Tensor],
    second: &[Tensor],
) -> Result<Option<String>, Error> {
    for (((name, _), a), b) in like.iter().zip(first).zip(second) {
        let (a, b) = (flat(a)?, flat(b)?);
        let other = a.iter().zip(&b).filter(|(a, b)| a.to_bits() != b.to_bits());
        let count = other.clone().count();
        if let Some((x, y)) = other.clone().next() {
            return Ok(Some(format!(
                "output `{name}`: two calls on the same inputs differ in {count} of {} values ({x:e} and {y:e})",
                a.len()
            )));
        }
    }
    Ok(None)
}

fn flat(t: &Tensor) -> Result<Vec<f32>, Error> {
    t.flatten_all()
        .and_then(|t| t.to_vec1::<f32>())
        .map_err(failed)
}

fn norm(values: &[f32]) -> f64 {
    values
        .iter()
        .map(|v| f64::from(*v).powi(2))
        .sum::<f64>()
        .sqrt()
}

fn failed(e: candle_core::Error) -> Error {
    Error::Graph(structures_graph::GraphError::Kernel {
        op: "trial".into(),
        at: "tensors".into(),
        source: Box::new(e),
    })
}

/// The last rows of every input, at most `rows` in the first one. Rows are cut along each input's own dim of them; an
/// input without one (a table of the whole length, a conditioning) is taken whole. Ranks stay as they are.
pub(crate) fn take_rows(
    inputs: &[(String, Option<Tensor>)],
    axes: &[Option<usize>],
    rows: usize,
) -> Result<Vec<(String, Option<Tensor>)>, Error> {
    let first = inputs
        .iter()
        .zip(axes)
        .find_map(|((_, t), axis)| Some((t.as_ref()?, *axis)));
    // How many steps along the dim there are, and how many are wanted.
    let (steps, wanted) = match first {
        Some((t, Some(axis))) => {
            let steps = t.dims()[axis].max(1);
            let each = (count(t) / steps).max(1);
            (steps, (rows / each).clamp(1, steps))
        }
        _ => return Ok(inputs.to_vec()),
    };
    inputs
        .iter()
        .zip(axes)
        .map(|((name, t), axis)| {
            let taken = match (t, axis) {
                (Some(t), Some(axis)) if t.dims()[*axis] == steps => {
                    let part = t.narrow(*axis, steps - wanted, wanted);
                    Some(part.and_then(|t| t.contiguous()).map_err(failed)?)
                }
                (other, _) => other.clone(),
            };
            Ok((name.clone(), taken))
        })
        .collect()
}

/// Rows of a tensor: all dims but the last.
fn count(t: &Tensor) -> usize {
    t.elem_count() / t.dims().last().copied().unwrap_or(1).max(1)
}

/// The weights as the form's declared format keeps them, balanced ones with their factors taken off again.
pub fn round_weights(
    weights: &[NamedWeight],
    form: &FormDecl,
    factors: &ChannelFactors,
) -> Result<Vec<(String, Tensor)>, Error> {
    if form.weight_format == WeightFormat::None {
        return Ok(weights
            .iter()
            .map(|w| (w.name.clone(), w.tensor.clone()))
            .collect());
    }
    // Rows of the buffers are output channels, whatever the slot's order.
    let mut buffers: Vec<Option<(Vec<f32>, usize, usize)>> = weights
        .iter()
        .map(|w| {
            if w.tensor.rank() != 2 {
                return Ok(None);
            }
            let out_in = match w.layout {
                Layout::InOut => w.tensor.t()?,
                Layout::OutIn => w.tensor.clone(),
            };
            let (n, k) = out_in.dims2()?;
            Ok(Some((
                out_in.contiguous()?.flatten_all()?.to_vec1::<f32>()?,
                n,
                k,
            )))
        })
        .collect::<Result<_, candle_core::Error>>()
        .map_err(failed)?;
    let scale = |by: &dyn Fn(f32) -> f32, buffers: &mut [Option<(Vec<f32>, usize, usize)>]| {
        for (w, buffer) in weights.iter().zip(buffers) {
            if let (Some((data, _, k)), Some(s)) = (buffer, factors.get(&w.name)) {
                scale_channels(data, Some(s.as_slice()).filter(|s| s.len() == *k), by);
            }
        }
    };
    scale(&|s| s, &mut buffers);
    for group in scale_groups(weights, form) {
        let mut members: Vec<WeightMatrix<'_>> = buffers
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| group.contains(i))
            .filter_map(|(_, b)| b.as_mut())
            .map(|(data, n, k)| WeightMatrix::out_in(data, *n, *k))
            .collect();
        round_weights_jointly(form.weight_format, &mut members);
    }
    scale(&|s| 1.0 / s, &mut buffers);
    weights
        .iter()
        .zip(buffers)
        .map(|(w, b)| {
            let tensor = match b {
                None => w.tensor.clone(),
                Some((data, n, k)) => {
                    let t = Tensor::from_vec(data, (n, k), &Device::Cpu).map_err(failed)?;
                    match w.layout {
                        Layout::InOut => t.t().map_err(failed)?,
                        Layout::OutIn => t,
                    }
                }
            };
            Ok((w.name.clone(), tensor))
        })
        .collect()
}

/// Indices of weights that share one scale: as declared, every other matrix alone.
fn scale_groups(weights: &[NamedWeight], form: &FormDecl) -> Vec<Vec<usize>> {
    let mut taken = vec![false; weights.len()];
    let mut groups = Vec::new();
    for declared in &form.scale_groups {
        let members: Vec<usize> = (0..weights.len())
            .filter(|i| !taken[*i] && weights[*i].tensor.rank() == 2)
            .filter(|i| {
                declared.iter().any(|d| match d.strip_suffix('*') {
                    Some(head) => weights[*i].name.starts_with(head),
                    None => weights[*i].name == *d,
                })
            })
            .collect();
        members.iter().for_each(|i| taken[*i] = true);
        groups.push(members);
    }
    groups.extend((0..weights.len()).filter(|i| !taken[*i]).map(|i| vec![i]));
    groups
}
