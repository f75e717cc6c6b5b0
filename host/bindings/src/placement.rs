//! From a region binding to seams of one model: instances counted, paths filled in, parameters found.

use indexmap::IndexMap;
use structures_catalog::spec::ConstFill;
use structures_catalog::Place;
use structures_graph::ParamRef;

use crate::error::BindingError;
use crate::region::{RegionBinding, Side};
use crate::rule::Rule;
use crate::size::{Size, Sizes};
use crate::weights::{SlotBinding, SlotSource, SourceMap, StoredLayout};

type Result<T> = std::result::Result<T, BindingError>;

/// What a model tells a binding.
pub trait HostFacts {
    /// The key under which `hosts` and `weights_map` speak of it.
    fn naming(&self) -> &str;
    /// A number of its configuration.
    fn number(&self, name: &str) -> Option<u64>;
    /// Whether it has a module of this path, or modules below it.
    fn module(&self, path: &str) -> bool;
    /// A parameter, ties followed, with its stored dims.
    fn param(&self, path: &str, name: &str) -> Option<(ParamRef, Vec<usize>)>;
}

/// Where a slot is stored on a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacedWeight {
    /// A parameter, or some of its rows.
    Stored {
        /// Which, with the rows in it.
        param: ParamRef,
        /// How it is stored.
        layout: StoredLayout,
    },
    /// A constant.
    Const(ConstFill),
}

/// A seam a binding places on a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Name of the binding.
    pub binding: String,
    /// Structure.
    pub structure: String,
    /// Its version.
    pub version: u32,
    /// Module path.
    pub path: String,
    /// Slot -> where it is stored.
    pub weights: IndexMap<String, PlacedWeight>,
    /// Symbol -> size.
    pub dims: IndexMap<String, u64>,
    /// Axis -> value.
    pub variant: IndexMap<String, String>,
    /// Point -> module and side.
    pub points: IndexMap<String, (String, Side)>,
}

/// More instances than any model has layers.
const MOST_INSTANCES: u64 = 1 << 16;

impl RegionBinding {
    /// The seams it places. What the document names and the model lacks is an error: a binding says what is there.
    pub fn place(&self, host: &dyn HostFacts) -> Result<Vec<Placed>> {
        let fault = |path: &str, at: &Place, what: String| BindingError::Invalid {
            at: at.clone(),
            path: path.into(),
            rule: Rule::Placement,
            binding: self.binding.clone(),
            what,
        };
        let naming = host.naming();
        let (Some(entry), Some(source)) = (self.hosts.get(naming), self.weights_map.get(naming))
        else {
            let what = format!("expected `{naming}` in both, the names this host speaks");
            return Err(fault("hosts and weights_map", &self.at, what));
        };
        let solve = |symbol: &str, size: &Size| match size {
            Size::Number(n) => Ok(*n),
            Size::Config(name) => host.number(name).ok_or_else(|| {
                let what =
                    format!("expected a number of the host's configuration, found `@{name}`");
                fault(&format!("dims.{symbol}"), &self.at, what)
            }),
        };
        let mut dims = IndexMap::new();
        for (symbol, size) in &self.dims {
            dims.insert(symbol.clone(), solve(symbol, size)?);
        }
        let layers = match &self.layers {
            Some(size) => solve("layers", size)?,
            None => 1,
        };
        if layers > MOST_INSTANCES {
            let what = format!("expected at most {MOST_INSTANCES} instances, found {layers}");
            return Err(fault("dims.layers", &self.at, what));
        }
        if layers > 1 && !entry.module_path.has_instance() {
            let what = format!("{layers} instances need {{i}} in the path");
            return Err(fault(
                &format!("hosts.{naming}.module_path"),
                &self.at,
                what,
            ));
        }
        let sizes: Sizes = dims.iter().map(|(k, v)| (k.clone(), *v)).collect();
        let mut seams = Vec::new();
        for i in 0..layers {
            let mut weights = IndexMap::new();
            for (slot, bound) in &source.slots {
                let weight = weight(source, bound, i, &sizes, host)
                    .map_err(|what| fault(&bound.path, &bound.at, what))?;
                weights.insert(slot.clone(), weight);
            }
            let path = entry.module_path.at(i);
            let there = |item: &str, module: &str| match host.module(module) {
                true => Ok(()),
                false => {
                    let what = format!("expected a module of the model, found `{module}`");
                    Err(fault(item, &self.at, what))
                }
            };
            there(&format!("hosts.{naming}.module_path"), &path)?;
            let mut points = IndexMap::new();
            for (point, place) in &self.points {
                let module = place.module.at(i);
                there(&format!("points.{point}.module"), &module)?;
                points.insert(point.clone(), (module, place.side));
            }
            seams.push(Placed {
                binding: self.binding.clone(),
                structure: self.structure.name.clone(),
                version: self.structure.version,
                path,
                weights,
                dims: dims.clone(),
                variant: self.variant.clone(),
                points,
            });
        }
        Ok(seams)
    }
}

fn weight(
    source: &SourceMap,
    bound: &SlotBinding,
    instance: u64,
    sizes: &Sizes,
    host: &dyn HostFacts,
) -> std::result::Result<PlacedWeight, String> {
    let (template, layout, rows) = match &bound.source {
        SlotSource::Const(fill) => return Ok(PlacedWeight::Const(*fill)),
        SlotSource::Stored {
            template,
            layout,
            rows,
        } => (template, *layout, rows),
    };
    let mut full = template.at(instance);
    if let Some(root) = &source.host_root {
        full = format!("{}.{full}", root.at(instance));
    }
    let found = full
        .rsplit_once('.')
        .and_then(|(path, name)| host.param(path, name));
    let Some((mut param, dims)) = found else {
        return Err(format!("expected a parameter of the model, found `{full}`"));
    };
    if let Some(rows) = rows {
        let (from, to) = rows.range(sizes)?;
        let stored = dims.first().copied().unwrap_or(0);
        if to > stored {
            return Err(format!(
                "expected rows below {stored}, all that `{full}` has, found {from} to {to}"
            ));
        }
        param.rows = Some((from, to));
    }
    Ok(PlacedWeight::Stored { param, layout })
}
