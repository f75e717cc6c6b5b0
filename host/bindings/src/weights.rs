//! `weights_map`: where each slot of a structure is stored, for one source of parameter names.

use indexmap::IndexMap;
use structures_catalog::document::Node;
use structures_catalog::spec::ConstFill;
use structures_catalog::{dim_size, Place};
use structures_graph::Layout;

use crate::error::BindingError;
use crate::facts::{Facts, SlotFacts};
use crate::reader::{is_name, Reader};
use crate::region::{template, RegionBinding};
use crate::rule::Rule;
use crate::size::{Rows, Sizes};
use crate::template::Template;

type Result<T> = std::result::Result<T, BindingError>;

/// How a weight lies in the checkpoint. Both words mean `[out, in]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredLayout {
    /// Stored `[out, in]`; a slot that is `in, out` sees it through swapped strides.
    OutIn,
    /// Stored `[out, in]`, and the slot is too: nothing is ever swapped.
    OutInNative,
}

impl StoredLayout {
    /// As the rest of the system says it.
    pub fn layout(self) -> Layout {
        match self {
            StoredLayout::OutIn | StoredLayout::OutInNative => Layout::OutIn,
        }
    }
}

/// Where a slot's content comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotSource {
    /// A stored parameter, or some of its rows.
    Stored {
        /// `MODULE.PARAM`.
        template: Template,
        /// How it is stored.
        layout: StoredLayout,
        /// Rows, where a host fuses several slots in one tensor.
        rows: Option<Rows>,
    },
    /// A constant.
    Const(ConstFill),
}

impl SlotSource {
    /// Its template, when it is stored.
    pub fn template(&self) -> Option<&Template> {
        match self {
            SlotSource::Stored { template, .. } => Some(template),
            SlotSource::Const(_) => None,
        }
    }
}

/// A slot's source and where the document says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotBinding {
    /// The source.
    pub source: SlotSource,
    /// Where it stands.
    pub at: Place,
    /// Its path in the document.
    pub path: String,
}

/// One source of parameter names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceMap {
    /// Where the names begin on the live model, when they are not its own paths (`model` for a checkpoint whose
    /// names lack that prefix).
    pub host_root: Option<Template>,
    /// Slot -> source.
    pub slots: IndexMap<String, SlotBinding>,
}

const LAYOUT: &str = "layout";
const HOST_ROOT: &str = "host_root";
const LAYOUTS: [&str; 2] = ["out_in", "out_in_native"];

/// Reads one entry of `weights_map`; `region` gives the dims that row ranges are written in.
pub(crate) fn read(
    r: &Reader<'_>,
    facts: &Facts,
    region: &RegionBinding,
    name: &str,
    node: &Node<'_>,
) -> Result<SourceMap> {
    let rule = Rule::Weights;
    if !is_name(name) {
        let what = format!("expected a source of a-z, 0-9, `_`, `.`, `-`, found `{name}`");
        return Err(r.fail(node, rule, what));
    }
    let entries = r.entries(node, rule)?;
    let named = |key: &str| entries.iter().find(|(k, _)| k == key).map(|(_, n)| n);
    let Some(layout) = named(LAYOUT) else {
        let what = format!("expected `{LAYOUT}`, one of {}", LAYOUTS.join(", "));
        return Err(r.fail(node, rule, what));
    };
    let usual = read_layout(r, layout)?;
    let root = named(HOST_ROOT).map(|n| template(r, n, rule)).transpose()?;
    let mut slots = IndexMap::new();
    for (slot, n) in entries
        .iter()
        .filter(|(k, _)| k != LAYOUT && k != HOST_ROOT)
    {
        let Some(about) = facts.slots.get(slot) else {
            let known: Vec<&str> = facts.slots.keys().map(String::as_str).collect();
            let what = format!(
                "`{slot}`: expected {LAYOUT}, {HOST_ROOT} or a slot of {}, one of {}",
                facts.name,
                known.join(", ")
            );
            return Err(r.fail_key(node, slot, rule, what));
        };
        let source = read_source(r, n, usual, region)?;
        fits(r, n, about, &source, &region.sizes())?;
        let bound = SlotBinding {
            source,
            at: n.place(),
            path: n.path(),
        };
        slots.insert(slot.clone(), bound);
    }
    let missing = facts
        .slots
        .iter()
        .find(|(s, f)| f.needed && !slots.contains_key(*s));
    if let Some((slot, _)) = missing {
        let what = format!(
            "expected every slot that {} needs, `{slot}` is missing",
            facts.name
        );
        return Err(r.fail(node, rule, what));
    }
    Ok(SourceMap {
        host_root: root,
        slots,
    })
}

fn read_layout(r: &Reader<'_>, n: &Node<'_>) -> Result<StoredLayout> {
    Ok(match r.one_of(n, &LAYOUTS, Rule::Weights)?.as_str() {
        "out_in" => StoredLayout::OutIn,
        _ => StoredLayout::OutInNative,
    })
}

fn read_source(
    r: &Reader<'_>,
    n: &Node<'_>,
    usual: StoredLayout,
    region: &RegionBinding,
) -> Result<SlotSource> {
    let rule = Rule::Weights;
    if !n.value().is_mapping() {
        return Ok(SlotSource::Stored {
            template: parameter(r, n)?,
            layout: usual,
            rows: None,
        });
    }
    let f = r.fields(n, &["const", "from", "rows", LAYOUT], rule)?;
    if let Some(fill) = f.get("const") {
        if let Some(key) = ["from", "rows", LAYOUT].iter().find(|k| f.get(k).is_some()) {
            let what = format!("a constant has no `{key}`");
            return Err(r.fail_key(n, key, rule, what));
        }
        return Ok(match r.one_of(fill, &["zeros", "ones"], rule)?.as_str() {
            "zeros" => SlotSource::Const(ConstFill::Zeros),
            _ => SlotSource::Const(ConstFill::Ones),
        });
    }
    let Some(from) = f.get("from") else {
        let what =
            "expected MODULE.PARAM, {const: zeros|ones} or {from: MODULE.PARAM, rows: [FROM, TO]}";
        return Err(r.fail(n, rule, what));
    };
    let known = |symbol: &str| region.dims.contains_key(symbol);
    Ok(SlotSource::Stored {
        template: parameter(r, from)?,
        layout: f.get(LAYOUT).map_or(Ok(usual), |n| read_layout(r, n))?,
        rows: f
            .get("rows")
            .map(|n| Rows::read(r, n, &known))
            .transpose()?,
    })
}

/// `MODULE.PARAM`
fn parameter(r: &Reader<'_>, n: &Node<'_>) -> Result<Template> {
    let template = template(r, n, Rule::Weights)?;
    if template.as_str().contains('.') {
        return Ok(template);
    }
    let what = format!("expected MODULE.PARAM, found `{}`", template.as_str());
    Err(r.fail(n, Rule::Weights, what))
}

/// What can be said before a model is there: the layout fits the slot, the range has the slot's size.
fn fits(
    r: &Reader<'_>,
    n: &Node<'_>,
    slot: &SlotFacts,
    source: &SlotSource,
    sizes: &Sizes,
) -> Result<()> {
    let SlotSource::Stored { layout, rows, .. } = source else {
        return Ok(());
    };
    if *layout == StoredLayout::OutInNative && slot.dims.len() == 2 && slot.layout != Layout::OutIn
    {
        let what = "expected layout out_in: the slot is `in, out`, so it is not read as stored";
        return Err(r.fail(n, Rule::Weights, what));
    }
    let Some(rows) = rows else {
        return Ok(());
    };
    if rows.symbols().iter().any(|s| !sizes.contains_key(s)) {
        return Ok(()); // decided on the model
    }
    let (from, to) = rows
        .range(sizes)
        .map_err(|what| r.fail(n, Rule::Weights, what))?;
    let sizes = sizes
        .iter()
        .map(|(k, v)| (k.clone(), *v as usize))
        .collect();
    match slot.rows().and_then(|dim| dim_size(dim, &sizes)) {
        Some(size) if size != to - from => {
            let what = format!(
                "expected the slot's {size} rows, found {from} to {to}, {}",
                to - from
            );
            Err(r.fail(n, Rule::Weights, what))
        }
        _ => Ok(()),
    }
}
