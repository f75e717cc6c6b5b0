//! What is tried with a form: every combination the entry leaves open and the form accepts, and around each the sizes
//! and values at which forms go wrong.
//!
//! Axes, patterns of optionals, alternatives of dims and altered params are crossed in full at usual sizes. Other
//! sizes, row counts, dtypes and values vary one at a time, on the fullest and the barest pattern of each axis
//! combination: a form that is wrong there is wrong in both.

use std::collections::{BTreeMap, BTreeSet};

use structures_catalog::spec::{DimExpr, Source};
use structures_catalog::verify::{alternatives, patterns, Case, Setting, Settled};
use structures_catalog::{CatalogError, Spec};
use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::DType;

/// Symbol that stands for any leading dims.
pub const ROWS: &str = "M";
/// Sizes that cross the blocks kernels are written in; odd ones, so that no tail is empty.
const WIDE: [usize; 6] = [65, 530, 129, 40, 272, 96];
/// Rows that no small kernel does in one go.
const MANY_ROWS: usize = 67;

/// Boundary dtypes the suite can make.
const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

/// Values of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Uniform in -1..1.
    Usual,
    /// The first row of every input is zero.
    ZeroRow,
    /// The first input is sixteen times as large.
    Large,
}

/// One case, still without tensors.
#[derive(Clone, Debug)]
pub struct Draft {
    /// For people, and for ignore lists.
    pub name: String,
    /// All axes: host axes as they are, form axes as chosen.
    pub variant: BTreeMap<String, String>,
    /// Operations, sources, params and sizes.
    pub settled: Settled,
    /// Span.
    pub span: String,
    /// Boundary dtype.
    pub dtype: DType,
    /// Values.
    pub values: Values,
    /// Matrices among the weights are stored the other way round.
    pub swapped: bool,
    /// Leading dims are `[1, rows]` where the entry says rows.
    pub lead: bool,
}

/// What varies beside the combination.
#[derive(Clone, Debug)]
struct Shape {
    name: String,
    wanted: BTreeMap<String, usize>,
    dtype: DType,
    values: Values,
    lead: bool,
}

/// Every case of a form of one version of a structure.
///
/// # Errors
/// When the entry itself has no sizes; a combination that it does not have is left out.
pub fn drafts(spec: &Spec, form: &FormDecl) -> Result<Vec<Draft>, CatalogError> {
    let mut all = Vec::new();
    let dtypes: Vec<DType> = DTYPES
        .into_iter()
        .filter(|d| form.dtypes.iter().any(|name| name == d.name()))
        .collect();
    let Some(first) = dtypes.first().copied() else {
        return Ok(all);
    };
    let usual = Shape {
        name: "usual sizes".into(),
        wanted: least(form),
        dtype: first,
        values: Values::Usual,
        lead: false,
    };
    let shapes = shapes(spec, form, &usual, &dtypes);
    for axes in spec.host_axis_combinations() {
        if !accepts(form, &axes) {
            continue;
        }
        let variants = form_axes(spec, form, &axes);
        let mut runs: Vec<BTreeSet<String>> = Vec::new();
        for present in patterns(spec) {
            let mut here = false;
            for shape in 0..alternatives(spec) {
                for setting in [Setting::Default, Setting::Altered] {
                    let case = Case {
                        spec,
                        axes: &axes,
                        present: &present,
                        shape,
                        setting,
                        wanted: &usual.wanted,
                    };
                    let Some(settled) = settle(&case)? else {
                        continue;
                    };
                    here |= setting == Setting::Default;
                    for variant in &variants {
                        all.extend(each_span(&case, form, &settled, variant, &usual, all.len()));
                    }
                }
            }
            if here {
                runs.push(present);
            }
        }
        let fullest = runs.iter().max_by_key(|p| p.len());
        let barest = runs.iter().min_by_key(|p| p.len());
        let mut ends: Vec<&BTreeSet<String>> = fullest.into_iter().chain(barest).collect();
        ends.dedup();
        for present in ends {
            let related = related_sizes(spec, &axes, present, &usual)?;
            for shape in shapes.iter().chain(&related) {
                let case = Case {
                    spec,
                    axes: &axes,
                    present,
                    shape: 0,
                    setting: Setting::Default,
                    wanted: &shape.wanted,
                };
                let Some(settled) = settle(&case)? else {
                    continue;
                };
                for variant in variants.iter().take(1) {
                    all.extend(each_span(&case, form, &settled, variant, shape, all.len()));
                }
            }
        }
    }
    Ok(all)
}

/// The first combination that a form declares, at these sizes where the entry has them: with the fewest optional parts.
///
/// # Errors
/// As [`drafts`].
pub fn draft_of(
    spec: &Spec,
    form: &FormDecl,
    wanted: &BTreeMap<String, usize>,
) -> Result<Option<Draft>, CatalogError> {
    let named = |name: &&DType| form.dtypes.iter().any(|d| d == name.name());
    let Some(dtype) = DTYPES.iter().find(named) else {
        return Ok(None);
    };
    let sizes: Vec<String> = wanted.iter().map(|(s, n)| format!("{s} {n}")).collect();
    let shape = Shape {
        name: match sizes.is_empty() {
            true => "usual sizes".into(),
            false => sizes.join(" "),
        },
        wanted: wanted.clone(),
        dtype: *dtype,
        values: Values::Usual,
        lead: false,
    };
    let mut sets = patterns(spec);
    sets.sort_by_key(BTreeSet::len);
    for axes in spec.host_axis_combinations() {
        if !accepts(form, &axes) {
            continue;
        }
        let variants = form_axes(spec, form, &axes);
        for present in &sets {
            let case = Case {
                spec,
                axes: &axes,
                present,
                shape: 0,
                setting: Setting::Default,
                wanted,
            };
            let Some(settled) = settle(&case)? else {
                continue;
            };
            let has = |(s, n): (&String, &usize)| settled.dims.get(s).is_none_or(|d| d == n);
            if !wanted.iter().all(has) {
                continue;
            }
            let first = variants
                .iter()
                .flat_map(|v| each_span(&case, form, &settled, v, &shape, 0))
                .next();
            if first.is_some() {
                return Ok(first);
            }
        }
    }
    Ok(None)
}

/// Sizes of the leading symbols of the first input so that it has this many rows.
pub fn sizes_of_rows(spec: &Spec, count: usize) -> BTreeMap<String, usize> {
    let rows = row_symbols_of(spec);
    let last = rows.len().saturating_sub(1);
    let size = |at: usize| if at == last { count } else { 1 };
    let sized = rows.iter().enumerate();
    sized.map(|(at, s)| (s.clone(), size(at))).collect()
}

/// Symbols that are widths: all but those that count rows.
pub fn width_symbols(spec: &Spec) -> Vec<String> {
    let sources: Vec<Source> = spec
        .declared_sources()
        .into_iter()
        .map(|(s, _)| s)
        .collect();
    let rows = row_symbols(&sources);
    let mut widths = symbols(&sources);
    widths.retain(|s| !rows.contains(s));
    widths
}

fn row_symbols_of(spec: &Spec) -> Vec<String> {
    let sources: Vec<Source> = spec
        .declared_sources()
        .into_iter()
        .map(|(s, _)| s)
        .collect();
    row_symbols(&sources)
}

/// Whether a form accepts these axes.
fn accepts(form: &FormDecl, axes: &BTreeMap<String, String>) -> bool {
    axes.iter().all(|(axis, value)| {
        let accepted = form.variants.get(axis);
        accepted.is_none_or(|values| values.contains(value))
    })
}

/// Whole variants: defaults of the form axes first, then every other accepted value, one axis at a time.
fn form_axes(
    spec: &Spec,
    form: &FormDecl,
    axes: &BTreeMap<String, String>,
) -> Vec<BTreeMap<String, String>> {
    let own = || spec.variants.iter().filter(|(_, axis)| !axis.host);
    let accepted = |name: &str, value: &String| {
        let values = form.variants.get(name);
        values.is_none_or(|values| values.contains(value))
    };
    let mut base = axes.clone();
    for (name, axis) in own() {
        // The host reports the default; a form that does not take it gets what it takes.
        let default = axis.default.clone().filter(|value| accepted(name, value));
        let first = axis.values.keys().find(|value| accepted(name, value));
        if let Some(value) = default.or_else(|| first.cloned()) {
            base.insert(name.clone(), value);
        }
    }
    let mut all = vec![base.clone()];
    for (name, axis) in own() {
        for value in axis.values.keys().filter(|value| accepted(name, value)) {
            if base.get(name) != Some(value) {
                let mut other = base.clone();
                other.insert(name.clone(), value.clone());
                all.push(other);
            }
        }
    }
    all
}

/// Operations, params and sizes, unless the entry has no such combination.
fn settle(case: &Case<'_>) -> Result<Option<Settled>, CatalogError> {
    match case.settle() {
        Ok(settled) => Ok(settled),
        // An optional that these axes need.
        Err(CatalogError::MissingInput { .. } | CatalogError::MissingWeight { .. }) => Ok(None),
        // Altered params and wanted sizes are guesses, which the entry may well refuse.
        Err(_) if case.setting == Setting::Altered || !case.wanted.is_empty() => Ok(None),
        Err(e) => Err(e),
    }
}

/// The sizes, dtypes and values beside the usual ones.
fn shapes(spec: &Spec, form: &FormDecl, usual: &Shape, dtypes: &[DType]) -> Vec<Shape> {
    let sources: Vec<Source> = spec
        .declared_sources()
        .into_iter()
        .map(|(s, _)| s)
        .collect();
    let rows = row_symbols(&sources);
    let widths: Vec<String> = symbols(&sources)
        .into_iter()
        .filter(|s| !rows.contains(s))
        .collect();
    // So many rows in all: the last symbol takes them.
    let rows_of = |count: usize| -> BTreeMap<String, usize> {
        let last = rows.len().saturating_sub(1);
        let size = |at: usize| if at == last { count } else { 1 };
        let sized = rows.iter().enumerate();
        sized.map(|(at, s)| (s.clone(), size(at))).collect()
    };
    let wanted = |name: String, own: BTreeMap<String, usize>| {
        let mut wanted = usual.wanted.clone();
        wanted.extend(own);
        Shape {
            name,
            wanted,
            ..usual.clone()
        }
    };
    let mut counts = vec![1, MANY_ROWS];
    if let Some([low, high]) = form.band.rows {
        let far = high.min(low.saturating_add(1024));
        counts = vec![low as usize, (low + (far - low) / 2) as usize, far as usize];
    }
    counts.dedup();
    let mut all: Vec<Shape> = counts
        .into_iter()
        .map(|count| wanted(format!("{count} rows"), rows_of(count)))
        .collect();
    let wide = |offset: usize| -> BTreeMap<String, usize> {
        let sized = widths.iter().enumerate();
        sized
            .map(|(i, s)| (s.clone(), WIDE[(i + offset) % WIDE.len()]))
            .collect()
    };
    all.push(wanted("wide".into(), wide(0)));
    all.push(wanted("wider".into(), wide(1)));
    for (symbol, band) in &form.band.dims {
        let step = band.multiple_of.max(1);
        let low = band.min.max(1).next_multiple_of(step);
        for size in [low, low + step] {
            let sized = [(symbol.clone(), size as usize)].into();
            all.push(wanted(format!("{symbol} {size}"), sized));
        }
    }
    let beside = |name: &str, values: Values, lead: bool| Shape {
        name: name.into(),
        values,
        lead,
        ..usual.clone()
    };
    all.push(beside("zero row", Values::ZeroRow, false));
    all.push(beside("large values", Values::Large, false));
    all.push(beside("two leading dims", Values::Usual, true));
    for dtype in dtypes.iter().skip(1) {
        for (name, own) in [("usual sizes", BTreeMap::new()), ("1 rows", rows_of(1))] {
            all.push(Shape {
                dtype: *dtype,
                ..wanted(name.into(), own)
            });
        }
    }
    all
}

/// Sizes that a form's band asks for where it does not serve any: the smallest of each symbol.
fn least(form: &FormDecl) -> BTreeMap<String, usize> {
    let sized = form.band.dims.iter().map(|(symbol, band)| {
        let low = band.min.max(1).next_multiple_of(band.multiple_of.max(1));
        (symbol.clone(), low as usize)
    });
    sized.filter(|(_, low)| *low > 1).collect()
}

/// Pairs of symbols that a constraint relates, one as large as the other and half of it, where they usually are not: a
/// table as wide as a head and one of half its width are two cases.
fn related_sizes(
    spec: &Spec,
    axes: &BTreeMap<String, String>,
    present: &BTreeSet<String>,
    usual: &Shape,
) -> Result<Vec<Shape>, CatalogError> {
    let case = |wanted: &BTreeMap<String, usize>| {
        settle(&Case {
            spec,
            axes,
            present,
            shape: 0,
            setting: Setting::Default,
            wanted,
        })
    };
    let Some(settled) = case(&usual.wanted)? else {
        return Ok(Vec::new());
    };
    let mut all: Vec<Shape> = Vec::new();
    for constraint in &spec.constraints {
        let read = constraint.that.symbols();
        for (a, b) in read.iter().flat_map(|a| read.iter().map(move |b| (a, b))) {
            let (Some(own), Some(other)) = (settled.dims.get(a), settled.dims.get(b)) else {
                continue;
            };
            for (name, size) in [
                (format!("{a} as {b}"), *other),
                (format!("{a} half {b}"), other / 2),
            ] {
                let known = all.iter().any(|shape| shape.name == name);
                if a == b || *own == size || size == 0 || known {
                    continue;
                }
                let wanted = BTreeMap::from([(a.clone(), size), (b.clone(), *other)]);
                let here = case(&wanted)?;
                if here
                    .is_some_and(|s| s.dims.get(a) == Some(&size) && s.dims.get(b) == Some(other))
                {
                    all.push(Shape {
                        name,
                        wanted,
                        ..usual.clone()
                    });
                }
            }
        }
    }
    Ok(all)
}

/// Leading symbols of the first input.
fn row_symbols(sources: &[Source]) -> Vec<String> {
    let first = sources.iter().find(|s| !s.slot);
    let lead = first.map_or(&[][..], |s| &s.dims[..s.dims.len().saturating_sub(1)]);
    lead.iter().flat_map(DimExpr::symbols).collect()
}

fn symbols(sources: &[Source]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for symbol in sources
        .iter()
        .flat_map(|s| &s.dims)
        .flat_map(DimExpr::symbols)
    {
        if !all.contains(&symbol) {
            all.push(symbol);
        }
    }
    all
}

/// The combination on every span that exists and that the form declares.
fn each_span(
    case: &Case<'_>,
    form: &FormDecl,
    settled: &Settled,
    variant: &BTreeMap<String, String>,
    shape: &Shape,
    seed: usize,
) -> Vec<Draft> {
    let spans = settled.plain.spans.iter();
    spans
        .filter(|span| form.spans.contains(&span.name))
        .map(|span| Draft {
            name: name(case, variant, shape),
            variant: variant.clone(),
            settled: settled.clone(),
            span: span.name.clone(),
            dtype: shape.dtype,
            values: shape.values,
            swapped: seed % 2 == 1,
            lead: shape.lead,
        })
        .collect()
}

fn name(case: &Case<'_>, variant: &BTreeMap<String, String>, shape: &Shape) -> String {
    let axes: Vec<String> = variant.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let with: Vec<&str> = case.present.iter().map(String::as_str).collect();
    let mut name = format!(
        "{} with [{}], {}",
        axes.join(" "),
        with.join(" "),
        shape.name
    );
    if case.shape > 0 {
        name += &format!(", dims alternative {}", case.shape + 1);
    }
    if case.setting == Setting::Altered {
        name += ", params altered";
    }
    format!("{name}, {}", shape.dtype.name())
}
