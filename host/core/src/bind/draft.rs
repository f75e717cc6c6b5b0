//! What a form is bound with: the probe at the shapes it will serve, statistics, params, weights as views.
//!
//! Owns the request up to the plugin's answer. Whether what it answered is right is `make.rs`; which weights there are is
//! `weights.rs`.

use std::collections::BTreeMap;

use candle_core::{CpuStorage, Storage};
use structures_loader::{
    row_capacity, BindSpec, BoundForm, HostTensor, Plugin, PluginError, StatusKind,
};
use structures_plugin_api::abi;
use structures_plugin_api::describe::{
    BindParams, FormDecl, PackedSlot, ProbeShapes, StatisticDecl,
};
use structures_plugin_api::formats::Balance;

use super::{json, present, Bench, NotBound, Place, WireBind};
use crate::adopt::Blocks;
use crate::choose::{median_rows, variant_of};
use crate::error::Error;
use crate::kept::Shelf;
use crate::sites::Site;
use crate::stats::{Content, Statistic};
use crate::trial::NamedWeight;

/// What a form is bound with.
pub(super) struct Draft {
    pub(super) capacity: u64,
    pub(super) band: Option<[u64; 2]>,
    pub(super) statistics: BTreeMap<String, Vec<f32>>,
    pub(super) params: BindParams,
    pub(super) balance: Balance,
}

impl Bench<'_> {
    /// What a form is bound with at its place, once it was probed there.
    pub(super) fn draft(
        &self,
        place: &Place<'_>,
        wire: Option<&WireBind>,
    ) -> Result<Draft, NotBound> {
        let Place {
            site,
            choice,
            plugin,
            rows,
            scheme,
            ..
        } = *place;
        let (span, form) = (place.located(), choice.form);
        // A form by itself serves all that was seen; a pair is for the rows it mostly sees.
        let observed = match wire {
            None => rows.iter().copied().max().unwrap_or(1),
            Some(_) => median_rows(rows),
        };
        let dims: BTreeMap<String, u64> = span.dims.iter().map(|(k, v)| (k.clone(), *v)).collect();
        // Alternatives of a band settle once the sizes are known; without any the declared rows hold.
        let band = match form.band.any.is_empty() {
            true => form.band.rows,
            false => form.band.rows_at(&dims),
        };
        let capacity = band.map_or(observed, |[_, hi]| match hi {
            u64::MAX => observed,
            hi if wire.is_some() => hi.min(observed),
            hi => hi.min(observed.max(hi)),
        });
        let band = match wire {
            None => band,
            Some(_) => Some([band.map_or(1, |[lo, _]| lo), capacity]),
        };
        let variant = variant_of(site, place.span);
        let shapes = ProbeShapes {
            structure: site.spec.name.clone(),
            span: span.name.clone(),
            rows: vec![capacity],
            dims: span.dims.iter().map(|(k, v)| (k.clone(), *v)).collect(),
            variant: variant.clone(),
        };
        match plugin.probe(&form.name, choice.device, &shapes) {
            Ok(report) if report.probed => {}
            Ok(report) => {
                let code = report.code.unwrap_or_else(|| "entry_missing".into());
                let reason = report
                    .reason
                    .unwrap_or_else(|| "the probe gave no reason".into());
                return Err(NotBound {
                    machine: true,
                    ..place.refusal("probe", &code, reason, false)
                });
            }
            Err(e) => return Err(place.answered("probe", e)),
        }
        let mut statistics = match self.statistics(site, form) {
            Ok(s) => s,
            Err(reason) => return place.refuse("bind", "statistic_missing", reason, false),
        };
        if let Some(wire) = wire {
            statistics.insert(format!("{}|amax|tensor", wire.port), vec![wire.amax]);
        }
        let params = BindParams {
            structure: site.spec.name.clone(),
            version: site.spec.version,
            variant: variant.clone(),
            params: span
                .params
                .iter()
                .map(|(k, v)| (k.clone(), json(v)))
                .collect(),
            dims: span.dims.iter().map(|(k, v)| (k.clone(), *v)).collect(),
            inputs: span.inputs.iter().map(|(n, _)| n.clone()).collect(),
            outputs: present(&span.outputs).map(|(n, _)| n.to_string()).collect(),
            states: span.states.iter().map(|(n, _)| n.clone()).collect(),
            scheme: scheme.clone(),
            packed: packed_slots(self.blocks),
            wires: wire
                .iter()
                .map(|w| (w.port.clone(), w.format.clone()))
                .collect(),
            kept: None,
        };
        let balance = match Balance::from_params(|name| scheme.get(name)) {
            Ok(balance) => balance,
            Err(reason) => return place.refuse("bind", "scheme_invalid", reason, false),
        };
        Ok(Draft {
            capacity,
            band,
            statistics,
            params,
            balance,
        })
    }

    /// Under which name what a draft packs is kept, where it is.
    pub(super) fn shelved(&self, place: &Place<'_>, draft: &Draft) -> Option<(&Shelf, String)> {
        let shelf = self.shelf.filter(|_| place.choice.device == 0)?;
        let spec = place.site.spec;
        let name = Shelf::name(&(
            (&spec.name, spec.version, &spec.digest),
            (place.plugin.sha256(), place.choice.form),
            &place.located().weights,
            (&draft.params, &draft.statistics),
        ))?;
        Some((shelf, name))
    }

    pub(super) fn bind_draft(
        &self,
        place: &Place<'_>,
        draft: &Draft,
        weights: &[NamedWeight],
    ) -> Result<Result<BoundForm, PluginError>, Error> {
        bind_form(
            place.plugin,
            &place.choice.form.name,
            &place.located().name,
            weights,
            &draft.statistics,
            &draft.params,
            draft.capacity,
            self.blocks,
            place.choice.device,
        )
    }

    fn statistics(
        &self,
        site: &Site<'_>,
        form: &FormDecl,
    ) -> Result<BTreeMap<String, Vec<f32>>, String> {
        let mut found = BTreeMap::new();
        for s in &form.statistics {
            let key = site.point_key(&s.point);
            let values = match Statistic::parse(&s.statistic, &s.granularity) {
                Some(Statistic::AmaxTensor) => self.calibration.amax.get(&key).map(|v| vec![*v]),
                Some(Statistic::AmaxChannel) => self.calibration.channel_amax.get(&key).cloned(),
                Some(Statistic::SecondMomentChannel) => self
                    .calibration
                    .second_moment
                    .get(&key)
                    .map(|v| v.iter().map(|x| *x as f32).collect()),
                Some(Statistic::None) => continue,
                None if s.statistic == "content" => {
                    self.calibration.contents.get(&key).map(Content::values)
                }
                None => None,
            };
            match values {
                Some(v) if v.iter().all(|x| x.is_finite()) => {
                    found.insert(statistic_name(s), v);
                }
                Some(_) => return Err(format!("{} at `{key}` is not finite", s.statistic)),
                None => {
                    return Err(format!(
                        "the form needs {} per {} at point `{}`; nothing was measured there",
                        s.statistic, s.granularity, s.point
                    ))
                }
            }
        }
        Ok(found)
    }
}

/// Hands everything over as views, packed slots as their rows. The outer result is the host's failure, the inner one the plugin's.
#[allow(clippy::too_many_arguments)] // one for each part of the interface's own request
pub(crate) fn bind_form(
    plugin: &Plugin,
    form: &str,
    span: &str,
    weights: &[NamedWeight],
    statistics: &BTreeMap<String, Vec<f32>>,
    params: &BindParams,
    capacity: u64,
    blocks: &Blocks,
    device: u32,
) -> Result<Result<BoundForm, PluginError>, Error> {
    let guards: Vec<_> = weights
        .iter()
        .map(|w| (w, w.tensor.storage_and_layout()))
        .collect();
    let mut named = Vec::with_capacity(guards.len());
    for (weight, (storage, layout)) in &guards {
        if let Some(packed) = blocks.get(&weight.name) {
            let view = HostTensor::new(&packed.rows, &[packed.n, packed.width()])?;
            named.push((weight.name.as_str(), view));
            continue;
        }
        let Storage::Cpu(CpuStorage::F32(data)) = &**storage else {
            return Err(Error::invalid("weights_not_on_device", weight.name.clone()));
        };
        let view = HostTensor::strided(
            &data[layout.start_offset()..],
            layout.dims(),
            layout.stride(),
        )?;
        named.push((weight.name.as_str(), view));
    }
    let mut stats = Vec::with_capacity(statistics.len());
    for (name, values) in statistics {
        let dims: &[usize] = if values.len() == 1 {
            &[]
        } else {
            &[values.len()]
        };
        stats.push((name.as_str(), HostTensor::new(values, dims)?));
    }
    Ok(plugin.bind(&BindSpec {
        form,
        device,
        span,
        weights: &named,
        statistics: &stats,
        params,
        contract: row_capacity(abi::DType::F32, capacity),
    }))
}

fn packed_slots(blocks: &Blocks) -> BTreeMap<String, PackedSlot> {
    let slot = |(name, packed): (&String, &structures_models::PackedWeight)| {
        let slot = PackedSlot {
            format: packed.format,
            n: packed.n as u64,
            k: packed.k as u64,
        };
        (name.clone(), slot)
    };
    blocks.iter().map(slot).collect()
}

/// Whether the plugin is not to be trusted further, beyond having said no.
pub(super) fn crashed(kind: StatusKind) -> bool {
    !matches!(kind, StatusKind::Refused | StatusKind::Invalid)
}

/// `point|statistic|granularity`
fn statistic_name(s: &StatisticDecl) -> String {
    format!("{}|{}|{}", s.point, s.statistic, s.granularity)
}
