//! The step that adopts: before anything is judged, seam by seam, the highest precedence first.
//!
//! A seam takes part when a weight of its span is stored packed in a wanted format. A form that declares the format
//! gets the rows as they are; failing that, one that keeps its own weights in the same format packs the decoded values
//! again. The rows of one seam are in memory at a time, beside what forms keep.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use candle_core::Tensor;
use structures_graph::session::{Install, Plan};
use structures_graph::{Layout, OpId, OpKind, ParamRef};
use structures_plugin_api::formats::BlockFormat;
use structures_seams::LocatedSpan;

use super::prepare::DECIDED_HOST;
use super::Prepared;
use crate::adopt::{counterpart, relative_l2, Adopted, Blocks, Layer, NotAdopted, Wish, BANKS};
use crate::bind::{failed, Bench, Bound};
use crate::choose::{median_rows, qualify, Choice, Wanted};
use crate::error::Error;
use crate::host::Loaded;
use crate::judge::Judge;
use crate::receipt::{RefusalNote, UnitNote};
use crate::schemes::Decision;
use crate::trial::{round_weights, ChannelFactors, NamedWeight};

/// A slot whose weight is stored packed.
pub(crate) struct Slot {
    name: String,
    param: ParamRef,
    format: BlockFormat,
}

/// Why a seam's forms did not take it.
#[derive(Default)]
struct Notes {
    /// Forms that were bound here and did not hold.
    tried: Vec<RefusalNote>,
    /// Forms that the scheme does not admit, or that there was none.
    passed_over: Vec<RefusalNote>,
}

/// Slots of a span that hold a whole matrix or a range of its rows, packed in one of these formats.
pub(crate) fn packed_slots(
    model: &Loaded,
    span: &LocatedSpan,
    formats: &[BlockFormat],
) -> Vec<Slot> {
    let loader = model.model.description.loader();
    let slot = |(name, source): (&String, &structures_seams::SlotWeight)| {
        let address = source.stored()?;
        let param = address.param();
        let format = loader.packed_format(&param)?;
        let whole = address.reshape.is_none() && address.layout == Layout::OutIn;
        (whole && formats.contains(&format)).then(|| Slot {
            name: name.clone(),
            param,
            format,
        })
    };
    span.weights
        .iter()
        .filter_map(|(n, w)| slot((n, w)))
        .collect()
}

/// Reads the rows of these slots.
pub(crate) fn read(model: &Loaded, slots: &[Slot]) -> Result<Blocks, Error> {
    let loader = model.model.description.loader();
    let mut blocks = Blocks::new();
    for slot in slots {
        if let Some(weight) = loader.packed(&slot.param)? {
            blocks.insert(slot.name.clone(), weight);
        }
    }
    Ok(blocks)
}

/// Rows of the slots that a receipt says were handed over packed, in the formats it names.
pub(crate) fn read_packed(
    model: &Loaded,
    span: &LocatedSpan,
    packed: &BTreeMap<String, String>,
) -> Result<Blocks, Error> {
    if packed.is_empty() {
        return Ok(Blocks::new());
    }
    let mut blocks = read(model, &packed_slots(model, span, &BlockFormat::ALL))?;
    blocks.retain(|slot, weight| packed.get(slot).is_some_and(|f| f == weight.format.name()));
    Ok(blocks)
}

impl Prepared<'_> {
    /// See the module.
    ///
    /// # Errors
    /// `nothing_to_adopt` when no product is packed like this, or no form takes any that is.
    pub(super) fn adopt(&mut self, wish: &Wish) -> Result<(), Error> {
        if wish.banks {
            self.banks()?;
        }
        let mut order: Vec<usize> = (0..self.survey.sites.len()).collect();
        order.sort_by_key(|i| Reverse(self.survey.sites[*i].spec.precedence));
        let mut owned: HashSet<OpId> = HashSet::new();
        let mut layers = Vec::new();
        let mut passed: Vec<(usize, Notes)> = Vec::new();
        for site in order {
            let spans = &self.survey.sites[site].spans;
            let packed =
                |span: &LocatedSpan| !packed_slots(self.model, span, &wish.formats).is_empty();
            if !spans.iter().any(packed) {
                continue;
            }
            let mut notes = Notes::default();
            if let Some(kept) = self.decided_host(site) {
                self.refuse(kept);
                continue;
            }
            match self.adopt_site(site, wish, &owned, &mut layers, &mut notes)? {
                Some(bound) => {
                    owned.extend(bound.install.ops.iter().copied());
                    self.adopted.push(bound);
                    // Who came before the one that serves it, and could not.
                    notes.tried.into_iter().for_each(|note| self.refuse(note));
                }
                None => passed.push((site, notes)),
            }
        }
        let taken: HashSet<String> = layers.iter().map(|layer| layer.param.clone()).collect();
        let mut left: BTreeSet<String> = BTreeSet::new();
        for (site, notes) in passed {
            // What wider or narrower seams took whole is not missing here; what they took a part of is.
            if self.all_taken(site, wish, &taken) {
                continue;
            }
            for note in notes.tried.into_iter().chain(notes.passed_over) {
                left.insert(format!("{}: {}", note.code, note.reason));
                self.refuse(note);
            }
        }
        if self.adopted.is_empty() {
            return Err(self.nothing(wish, &left));
        }
        let seats = self.adopted.iter().map(|b| b.note.clone()).collect();
        let bytes = self.adopted.iter().map(|b| b.packed_bytes).sum();
        self.adoption = Some(Adopted::of(layers, seats, bytes));
        Ok(())
    }

    /// Whether others adopted every packed weight of a seam.
    fn all_taken(&self, site: usize, wish: &Wish, taken: &HashSet<String>) -> bool {
        let spans = &self.survey.sites[site].spans;
        let slots = |span| packed_slots(self.model, span, &wish.formats);
        let mut slots = spans.iter().flat_map(slots);
        slots.all(|slot| taken.contains(&slot.param.to_string()))
    }

    /// A recorded decision that the host keeps a seam.
    fn decided_host(&self, site: usize) -> Option<RefusalNote> {
        let Decision::Keep { code, reason } = &self.decisions[site] else {
            return None;
        };
        let s = &self.survey.sites[site];
        (code == DECIDED_HOST).then(|| RefusalNote {
            path: s.seam.path.clone(),
            structure: s.spec.name.clone(),
            stage: "adopt".into(),
            code: code.clone(),
            reason: reason.clone(),
            plugin: None,
            form: None,
        })
    }

    /// What was adopted stays: seams that the scheme left with the host are adopted now, or lost an operation to one
    /// that is.
    pub(super) fn settle_adopted(&mut self) {
        let ids: HashSet<(&str, &str)> = self
            .adopted
            .iter()
            .map(|b| (b.note.structure.as_str(), b.note.path.as_str()))
            .collect();
        self.kept
            .retain(|k| !ids.contains(&(k.structure.as_str(), k.path.as_str())));
        let ops = self.adopted.iter().flat_map(|b| &b.install.ops);
        let owned: HashSet<OpId> = ops.copied().collect();
        for kept in &mut self.kept {
            let same = |s: &&crate::sites::Site<'_>| {
                s.spec.name == kept.structure && s.seam.path == kept.path
            };
            let Some(site) = self.survey.sites.iter().find(same) else {
                continue;
            };
            let ops = site.spans.iter().flat_map(|span| &span.ops);
            let Some(op) = ops.copied().find(|op| owned.contains(op)) else {
                continue;
            };
            let owner = self.adopted.iter().find(|b| b.install.ops.contains(&op));
            let owner = owner.map_or("", |b| b.install.name.as_str());
            kept.stage = "ownership".into();
            kept.code = "owned_by".into();
            kept.reason =
                format!("`{owner}`, which was adopted, keeps an operation this seam needs");
        }
    }

    /// The first form that takes what is packed here; why not goes into `notes`.
    fn adopt_site(
        &self,
        site: usize,
        wish: &Wish,
        owned: &HashSet<OpId>,
        layers: &mut Vec<Layer>,
        notes: &mut Notes,
    ) -> Result<Option<Bound>, Error> {
        let s = &self.survey.sites[site];
        let rows = &self.seams[site].rows;
        let mut choices = self.ordered(&s.spec.name, Wanted::Any, median_rows(rows));
        // As stored before packed again, else in the order of choice.
        choices.sort_by_key(|c| c.form.packed.is_empty());
        let mut met = BTreeSet::new();
        for choice in choices {
            let Ok(span_index) = qualify(s, &choice, "f32", rows) else {
                continue;
            };
            let span = &s.spans[span_index];
            if span.ops.iter().any(|op| owned.contains(op)) {
                continue;
            }
            let slots = packed_slots(self.model, span, &wish.formats);
            if slots.is_empty() {
                continue;
            }
            met.extend(slots.iter().map(|slot| slot.format.name()));
            let as_stored = slots.iter().all(|s| choice.form.packed.contains(&s.format));
            let again = slots
                .iter()
                .all(|s| counterpart(s.format) == Some(choice.form.weight_format));
            if !as_stored && !again {
                continue;
            }
            if let Err((code, reason)) = self.scheme_admits(site, &choice) {
                notes.passed_over.push(RefusalNote {
                    path: s.seam.path.clone(),
                    structure: s.spec.name.clone(),
                    stage: "adopt".into(),
                    code: code.into(),
                    reason,
                    plugin: Some(choice.plugin.into()),
                    form: Some(choice.form.name.clone()),
                });
                continue;
            }
            let blocks = match as_stored {
                true => read(self.model, &slots)?,
                false => Blocks::new(),
            };
            match self.adopt_with(site, span_index, &choice, &blocks)? {
                Ok((bound, weights)) => {
                    layers.extend(layers_of(&bound, &choice, &slots, &blocks, &weights)?);
                    return Ok(Some(bound));
                }
                Err(note) => notes.tried.push(note),
            }
        }
        let nobody = notes.tried.is_empty() && notes.passed_over.is_empty();
        if nobody && !met.is_empty() {
            let met: Vec<&str> = met.into_iter().collect();
            notes.passed_over.push(RefusalNote {
                path: s.seam.path.clone(),
                structure: s.spec.name.clone(),
                stage: "adopt".into(),
                code: "format_no_variant".into(),
                reason: format!("no form takes {} rows of `{}`", met.join(", "), s.spec.name),
                plugin: None,
                form: None,
            });
        }
        Ok(None)
    }

    #[allow(clippy::type_complexity)] // one call site
    fn adopt_with(
        &self,
        site: usize,
        span: usize,
        choice: &Choice<'_>,
        blocks: &Blocks,
    ) -> Result<Result<(Bound, Vec<NamedWeight>), RefusalNote>, Error> {
        let s = &self.survey.sites[site];
        let Some(plugin) = self.host.registry.plugin(choice.plugin) else {
            return Err(Error::invalid("plugin_unknown", choice.plugin.to_string()));
        };
        let bench = Bench {
            session: self.model.session(),
            calibration: &self.calibration,
            contents: &self.contents,
            on_guard_fail: self.options.on_guard_fail,
            scheme: &BTreeMap::new(),
            blocks,
            shelf: None,
        };
        match bench.bind(s, span, choice, plugin, &self.seams[site].rows) {
            Ok(bound) => Ok(Ok((bound, bench.weights(s.spec, &s.spans[span])?))),
            Err(no) => Ok(Err(RefusalNote {
                stage: "adopt".into(),
                ..no.note
            })),
        }
    }

    /// Dense banks of experts: nothing here executes one yet, so a model that has some is told so.
    fn banks(&self) -> Result<(), Error> {
        let graph = self.model.session().graph();
        let banks = graph
            .ops
            .iter()
            .filter(|op| op.kind == OpKind::Experts)
            .count();
        Err(match banks {
            0 => Error::invalid(
                "nothing_to_adopt",
                format!("{BANKS}: `{}` has no bank of experts", self.model.name()),
            ),
            n => Error::refused(
                "format_no_variant",
                format!(
                    "{BANKS}: `{}` has {n} banks of experts, and no loaded plugin has a form that executes one",
                    self.model.name()
                ),
            ),
        })
    }

    fn nothing(&self, wish: &Wish, left: &BTreeSet<String>) -> Error {
        let wanted: Vec<&str> = wish.formats.iter().map(|f| f.name()).collect();
        let why: Vec<&str> = left.iter().take(3).map(String::as_str).collect();
        let why = match why.is_empty() {
            true => "no product of it is stored like this".to_string(),
            false => why.join("; "),
        };
        Error::invalid(
            "nothing_to_adopt",
            format!("`{}`, {}: {why}", self.model.name(), wanted.join(", ")),
        )
    }

    /// Where the products that were adopted go, in every plan.
    pub(super) fn base(&self) -> Vec<Install> {
        self.adopted.iter().map(|b| b.install.clone()).collect()
    }

    /// A plan with these seats beside what was adopted.
    pub(super) fn plan(&self, installs: Vec<Install>) -> Result<Plan, Error> {
        let all = self.base().into_iter().chain(installs).collect();
        Ok(self.model.session().plan(all)?)
    }

    /// The model with what was adopted against the plain host. What does not hold is used nowhere, and the record says
    /// why.
    pub(super) fn adopted_parity(&mut self, judge: &Judge<'_>) -> Result<(), Error> {
        let seats: Vec<_> = self.adopted.iter().map(|b| b.seat.clone()).collect();
        let plan = self.plan(Vec::new())?;
        let mut note = UnitNote::default();
        let refusal = judge.parity(&plan, &seats, &mut note)?;
        if let Some(adoption) = &mut self.adoption {
            adoption.metrics = note.metrics;
            adoption.band = note.band;
        }
        if let Some(no) = refusal {
            self.adopted.clear();
            if let Some(adoption) = &mut self.adoption {
                adoption.seats.clear();
                adoption.packed_bytes = 0;
                adoption.refused = Some(NotAdopted {
                    code: no.code,
                    reason: format!("does not hold against the host: {}", no.reason),
                });
            }
        }
        Ok(())
    }
}

/// Bytes a form may add to any weights: tables, alignment.
const LAYOUT: u64 = 64 << 10;

/// Conversion errors: what the form is given to multiply with against the checkpoint's values on the host, measured whether the
/// rows were taken as they are or packed again.
fn layers_of(
    bound: &Bound,
    choice: &Choice<'_>,
    slots: &[Slot],
    blocks: &Blocks,
    plain: &[NamedWeight],
) -> Result<Vec<Layer>, Error> {
    let given: usize = plain
        .iter()
        .map(|w| match blocks.get(&w.name) {
            Some(packed) => packed.rows.len(),
            None => size_of::<f32>() * w.tensor.elem_count(),
        })
        .sum();
    // A form may lay rows out anew; one that holds a twentieth more has unpacked them.
    let unpacked = bound.packed_bytes > given as u64 + given as u64 / 20 + LAYOUT;
    let rounded = match blocks.is_empty() {
        true => round_weights(plain, choice.form, &ChannelFactors::new())?,
        false => Vec::new(),
    };
    let mut layers = Vec::new();
    for slot in slots {
        let Some(weight) = plain.iter().find(|w| w.name == slot.name) else {
            continue;
        };
        let want = rows(weight.layout, &weight.tensor)?;
        let again = rounded.iter().find(|(name, _)| *name == slot.name);
        let got = match (blocks.get(&slot.name), again) {
            (Some(packed), _) => packed.decode(),
            (None, Some((_, tensor))) => rows(weight.layout, tensor)?,
            (None, None) => Vec::new(),
        };
        layers.push(Layer {
            key: bound.note.key.clone(),
            structure: bound.note.structure.clone(),
            slot: slot.name.clone(),
            param: slot.param.to_string(),
            format: slot.format.name().into(),
            form: format!("{}:{}", choice.plugin, choice.form.name),
            converted: blocks.is_empty() || unpacked,
            relative_l2: relative_l2(&got, &want),
        });
    }
    Ok(layers)
}

/// The values of a matrix, output channels in rows.
fn rows(layout: Layout, tensor: &Tensor) -> Result<Vec<f32>, Error> {
    let turned = match layout {
        Layout::InOut => tensor.t(),
        Layout::OutIn => Ok(tensor.clone()),
    };
    turned
        .and_then(|t| t.contiguous()?.flatten_all()?.to_vec1::<f32>())
        .map_err(failed)
}
