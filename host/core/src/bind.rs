//! Binding one form at one site: weights as views, statistics, params, contract, then bind parity.
//!
//! Bind parity runs the form once at the shapes it will serve, on what the host really feeds it there, and compares
//! with the structure's reference on the same weights rounded through the form's declared format. Parity of a whole
//! model cannot see a form that is a little wrong; this can.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use structures_catalog::spec::{ConstFill, DimExpr, Slot};
use structures_catalog::Spec;
use structures_graph::session::{Install, Session};
use structures_graph::{AttrValue, Dim, ValueId};
use structures_loader::{
    row_capacity, BindSpec, BoundForm, HostTensor, HostTensorMut, Plugin, PluginError, StatusKind,
};
use structures_plugin_api::abi;
use structures_plugin_api::describe::{BindParams, FormDecl, PackedSlot, ProbeShapes};
use structures_plugin_api::formats::Balance;
use structures_seams::{LocatedSpan, SlotWeight};

use crate::adopt::Blocks;
use crate::choose::{variant_of, Choice};
use crate::error::Error;
use crate::receipt::{RefusalNote, SeatNote};
use crate::seat::{Admission, CallFailure, Executable, OnGuardFail, Rows, Seat};
use crate::sites::Site;
use crate::stats::{Calibration, Content, Statistic};
use crate::trial::{NamedWeight, Trial};

/// A form in a seat, ready to be put in a plan.
pub struct Bound {
    /// The seat.
    pub seat: Arc<Seat>,
    /// How a plan hands the span to it.
    pub install: Install,
    /// How to bind it again.
    pub note: SeatNote,
    /// Bytes of packed weights.
    pub packed_bytes: u64,
    /// Bytes of scratch.
    pub scratch_bytes: u64,
}

/// Why a site got no form.
pub struct NotBound {
    /// Code, reason, plugin, form.
    pub note: RefusalNote,
    /// The form computed wrong or crashed: it is not trusted at any other site either.
    pub distrust: bool,
}

/// Everything binding needs beside the site and the choice.
pub struct Bench<'a> {
    /// The host's weights.
    pub session: &'a Session,
    /// Reduced statistics, by `key|point`.
    pub calibration: &'a Calibration,
    /// What the host feeds span inputs, `[B, T, ..]`, for bind parity.
    pub contents: &'a HashMap<ValueId, Tensor>,
    /// What a contract miss does.
    pub on_guard_fail: OnGuardFail,
    /// Parameters of the scheme's route, for the form.
    pub scheme: &'a BTreeMap<String, serde_json::Value>,
    /// Slots handed over as the packed rows they are stored in; none but when adopting.
    pub blocks: &'a Blocks,
}

impl Bench<'_> {
    /// Probes, binds and checks. `rows` are those observed at the span's input under the workload.
    pub fn bind(
        &self,
        site: &Site<'_>,
        span_index: usize,
        choice: &Choice<'_>,
        plugin: &Plugin,
        rows: &[u64],
    ) -> Result<Bound, NotBound> {
        let form = choice.form;
        let span = &site.spans[span_index];
        let refuse = |stage: &str, code: &str, reason: String, distrust: bool| {
            Err(NotBound {
                note: RefusalNote {
                    path: site.seam.path.clone(),
                    structure: site.spec.name.clone(),
                    stage: stage.into(),
                    code: code.into(),
                    reason,
                    plugin: Some(choice.plugin.into()),
                    form: Some(form.name.clone()),
                },
                distrust,
            })
        };
        let observed = rows.iter().copied().max().unwrap_or(1);
        let dims: BTreeMap<String, u64> = span.dims.iter().map(|(k, v)| (k.clone(), *v)).collect();
        // Alternatives of a band settle once the sizes are known; without any the declared rows hold.
        let band = match form.band.any.is_empty() {
            true => form.band.rows,
            false => form.band.rows_at(&dims),
        };
        let capacity = band.map_or(observed, |[_, hi]| match hi {
            u64::MAX => observed,
            hi => hi.min(observed.max(hi)),
        });
        let variant = variant_of(site, span_index);
        let shapes = ProbeShapes {
            structure: site.spec.name.clone(),
            span: span.name.clone(),
            rows: vec![capacity],
            dims: span.dims.iter().map(|(k, v)| (k.clone(), *v)).collect(),
            variant: variant.clone(),
        };
        match plugin.probe(&form.name, 0, &shapes) {
            Ok(report) if report.probed => {}
            Ok(report) => {
                let code = report.code.unwrap_or_else(|| "entry_missing".into());
                let reason = report
                    .reason
                    .unwrap_or_else(|| "the probe gave no reason".into());
                return refuse("probe", &code, reason, false);
            }
            Err(e) => return refuse("probe", &e.code, e.message, crashed(e.kind)),
        }
        let statistics = match self.statistics(site, form) {
            Ok(s) => s,
            Err(reason) => return refuse("bind", "statistic_missing", reason, false),
        };
        let weights = match self.weights(site.spec, span) {
            Ok(w) => w,
            Err(e) => return refuse("bind", &e.code(), e.to_string(), false),
        };
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
            scheme: self.scheme.clone(),
            packed: packed_slots(self.blocks),
        };
        let balance = match Balance::from_params(|name| self.scheme.get(name)) {
            Ok(balance) => balance,
            Err(reason) => return refuse("bind", "scheme_invalid", reason, false),
        };
        let bound = match bind_form(
            plugin,
            &form.name,
            &span.name,
            &weights,
            &statistics,
            &params,
            capacity,
            self.blocks,
        ) {
            Ok(Ok(b)) => b,
            Ok(Err(e)) => return refuse("bind", &e.code, e.message, crashed(e.kind)),
            Err(e) => return refuse("bind", &e.code(), e.to_string(), false),
        };
        let facts = bound.facts();
        let executable = Loaded(bound);
        let inputs = match self.inputs(site, span) {
            Ok(i) => i,
            Err(e) => return refuse("bind", &e.code(), e.to_string(), false),
        };
        let trial = Trial {
            spec: site.spec,
            span: &span.name,
            variant: &variant,
            params: &span.params,
            inputs,
            row_axes: self.row_axes(span),
            outputs: present(&span.outputs).map(|(n, _)| n.to_string()).collect(),
            balance,
        };
        match trial.run(form, &executable, &weights, &statistics, capacity) {
            Ok(Ok(())) => {}
            Ok(Err((code, reason))) => return refuse("bind", code, reason, true),
            Err(e) => return refuse("bind", &e.code(), e.to_string(), false),
        }
        let graph = self.session.graph();
        let dims_of = |v: ValueId| graph.value(v).dims.clone();
        let width = span
            .inputs
            .iter()
            .find_map(|(_, v)| *v)
            .and_then(|v| match graph.value(v).dims.last() {
                Some(Dim::Size(n)) => Some(*n),
                _ => None,
            })
            .unwrap_or(0);
        let outputs: Vec<ValueId> = present(&span.outputs).map(|(_, v)| v).collect();
        let seat = Seat::new(
            site.seam.key.clone(),
            Box::new(executable),
            Admission {
                width,
                rows: Rows::Capacity(capacity as usize),
                band: band.map(|[lo, hi]| (lo as usize, hi as usize)),
                concurrent: form.concurrent,
            },
            self.on_guard_fail,
            span.inputs.iter().map(|(_, v)| v.map(dims_of)).collect(),
            outputs.iter().map(|v| dims_of(*v)).collect(),
        );
        Ok(Bound {
            install: Install {
                name: site.id(),
                ops: span.ops.clone(),
                inputs: span.inputs.iter().map(|(_, v)| *v).collect(),
                outputs,
                runner: seat.clone(),
            },
            seat,
            note: SeatNote {
                key: site.seam.key.clone(),
                path: site.seam.path.clone(),
                structure: site.spec.name.clone(),
                version: site.spec.version,
                span: span.name.clone(),
                plugin: choice.plugin.into(),
                form: form.name.clone(),
                format: form.format.clone(),
                activation_format: form.activation_format.clone(),
                variant,
                params: params.params,
                dims: params.dims,
                statistics,
                scheme: params.scheme,
                packed: params
                    .packed
                    .iter()
                    .map(|(slot, p)| (slot.clone(), p.format.name().to_string()))
                    .collect(),
                row_capacity: capacity as usize,
                median_rows: median(rows),
                note: site.notes.clone(),
            },
            packed_bytes: facts.packed_bytes,
            scratch_bytes: facts.scratch_bytes,
        })
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

    /// Where the rows of each input lie: the symbol nearest to the first input's channels, in every input that has it.
    fn row_axes(&self, span: &LocatedSpan) -> Vec<Option<usize>> {
        let graph = self.session.graph();
        let dims = |v: &Option<ValueId>| v.map(|v| graph.value(v).dims.as_slice()).unwrap_or(&[]);
        let first = span.inputs.iter().find(|(_, v)| v.is_some());
        let rows = first.and_then(|(_, v)| {
            let channels = dims(v).split_last().map_or(&[][..], |(_, lead)| lead);
            channels.iter().rev().find(|d| matches!(d, Dim::Symbol(_)))
        });
        span.inputs
            .iter()
            .map(|(_, v)| rows.and_then(|rows| dims(v).iter().position(|d| d == rows)))
            .collect()
    }

    /// What the host feeds the span.
    fn inputs(
        &self,
        site: &Site<'_>,
        span: &LocatedSpan,
    ) -> Result<Vec<(String, Option<Tensor>)>, Error> {
        span.inputs
            .iter()
            .map(|(name, value)| match value {
                None => Ok((name.clone(), None)),
                Some(v) => match self.contents.get(v) {
                    Some(t) => Ok((name.clone(), Some(t.clone()))),
                    None => Err(Error::invalid(
                        "producer_input_unobserved",
                        format!("`{}`: the host never made input `{name}`", site.seam.path),
                    )),
                },
            })
            .collect()
    }

    /// The span's weights in slot dims; strides tell the stored order, nothing is copied.
    pub(crate) fn weights(
        &self,
        spec: &Spec,
        span: &LocatedSpan,
    ) -> Result<Vec<NamedWeight>, Error> {
        let mut out = Vec::with_capacity(span.weights.len());
        for (name, source) in &span.weights {
            let slot = slot_of(spec, name).ok_or_else(|| {
                Error::invalid(
                    "slot_missing",
                    format!("`{}` has no slot `{name}`", spec.name),
                )
            })?;
            let tensor = match source {
                SlotWeight::Stored(address) => {
                    let stored = self.session.param(&address.param()).ok_or_else(|| {
                        Error::invalid(
                            "slot_missing",
                            format!("the host holds no parameter `{}`", address.param()),
                        )
                    })?;
                    let stored = match &address.reshape {
                        Some(dims) => stored.reshape(dims.as_slice()).map_err(failed)?,
                        None => stored.clone(),
                    };
                    if stored.rank() == 2 && address.layout != slot.layout {
                        stored.t().map_err(failed)?
                    } else {
                        stored
                    }
                }
                SlotWeight::Const { fill } => {
                    let dims = slot
                        .dims
                        .iter()
                        .map(|d| match d {
                            DimExpr::Literal(n) => Some(*n),
                            DimExpr::Symbol(s) => span.dims.get(s).map(|n| *n as usize),
                            DimExpr::Derived(_) => None,
                        })
                        .collect::<Option<Vec<usize>>>()
                        .ok_or_else(|| {
                            Error::invalid(
                                "dims_inconsistent",
                                format!("the size of constant slot `{name}` is not known"),
                            )
                        })?;
                    match fill {
                        ConstFill::Zeros => Tensor::zeros(dims, DType::F32, &Device::Cpu),
                        ConstFill::Ones => Tensor::ones(dims, DType::F32, &Device::Cpu),
                    }
                    .map_err(failed)?
                }
            };
            out.push(NamedWeight {
                name: name.clone(),
                layout: slot.layout,
                tensor,
            });
        }
        Ok(out)
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
        device: 0,
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

/// A loaded form as a seat sees it.
pub(crate) struct Loaded(pub(crate) BoundForm);

impl Executable for Loaded {
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        let shape = |e: structures_loader::LoaderError| CallFailure {
            code: "argument".into(),
            message: e.to_string(),
            declined: false,
        };
        let inputs: Vec<HostTensor<'_>> = inputs
            .iter()
            .map(|i| match i {
                Some((data, dims)) => HostTensor::new(data, dims),
                None => Ok(HostTensor::ABSENT),
            })
            .collect::<Result<_, _>>()
            .map_err(shape)?;
        let mut outputs: Vec<HostTensorMut<'_>> = outputs
            .iter_mut()
            .map(|(data, dims)| {
                let made = dims.iter().product::<usize>().min(data.len());
                HostTensorMut::new(&mut data[..made], dims)
            })
            .collect::<Result<_, _>>()
            .map_err(shape)?;
        self.0
            .call(&inputs, &mut outputs, &mut [])
            .map_err(|e: PluginError| CallFailure {
                code: e.code.clone(),
                declined: !self.0.poisoned(),
                message: e.to_string(),
            })
    }
}

/// The middle of ascending row counts; 1 where none was observed.
fn median(rows: &[u64]) -> u64 {
    rows.get(rows.len() / 2).copied().unwrap_or(1)
}

/// Whether the plugin is not to be trusted further, beyond having said no.
fn crashed(kind: StatusKind) -> bool {
    !matches!(kind, StatusKind::Refused | StatusKind::Invalid)
}

/// `point|statistic|granularity`
fn statistic_name(s: &structures_plugin_api::describe::StatisticDecl) -> String {
    format!("{}|{}|{}", s.point, s.statistic, s.granularity)
}

pub(crate) fn failed(e: candle_core::Error) -> Error {
    Error::Graph(structures_graph::GraphError::Kernel {
        op: "bind".into(),
        at: "weights".into(),
        source: Box::new(e),
    })
}

fn present(list: &[(String, Option<ValueId>)]) -> impl Iterator<Item = (&str, ValueId)> {
    list.iter().filter_map(|(n, v)| v.map(|v| (n.as_str(), v)))
}

fn json(v: &AttrValue) -> serde_json::Value {
    serde_json::to_value(v).unwrap_or(serde_json::Value::Null)
}

/// The declaration of an expanded slot name (`w_2` of `w_<i>`).
fn slot_of<'s>(spec: &'s Spec, name: &str) -> Option<&'s Slot> {
    spec.weights
        .iter()
        .find(|slot| match slot.name.split_once("<i>") {
            None => slot.name == name,
            Some((head, tail)) => name
                .strip_prefix(head)
                .and_then(|rest| rest.strip_suffix(tail))
                .is_some_and(|i| !i.is_empty() && i.bytes().all(|b| b.is_ascii_digit())),
        })
}
