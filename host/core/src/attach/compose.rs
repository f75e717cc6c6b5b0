//! The `compose` stage, between the binding of single seats and the union: a block whose parts are all seated, and whose
//! second norm is wired to what reads it, takes its residual sums along. It is judged as one unit; a block that does not
//! pass stays as its parts are.

use structures_graph::ValueId;

use super::Prepared;
use crate::adopt::Blocks;
use crate::bind::{installs, Bench, Bound, NotBound};
use crate::choose::{qualify_at, Choice};
use crate::compose::{join, seat_name, BlockNote, CANNOT_ABSORB, LOCATORS_DIFFER};
use crate::error::Error;
use crate::judge::Judge;
use crate::receipt::{RefusalNote, UnitNote};
use crate::sites::Site;

/// A structure with this tag says how a block's sums run.
pub(super) const BLOCK: &str = "block";

/// A block that may be composed; seats by their index among the active.
struct Candidate {
    site: usize,
    before: usize,
    after: usize,
    pair: [usize; 2],
    first: Vec<usize>,
}

impl<'a> Prepared<'a> {
    /// Composes what can be; active seats that became parts of a block are replaced.
    pub(super) fn compose(
        &mut self,
        judge: &Judge<'_>,
        active: &mut Vec<Bound>,
        units: &mut Vec<UnitNote>,
    ) -> Result<(), Error> {
        let sites = 0..self.survey.sites.len();
        let tagged = |i: &usize| self.survey.sites[*i].spec.tags.iter().any(|t| t == BLOCK);
        let blocks: Vec<usize> = sites.filter(tagged).collect();
        let mut ready: Vec<(Candidate, Vec<Bound>)> = Vec::new();
        for site in blocks {
            match self.candidate(site, active) {
                None => {}
                Some(Err(note)) => self.refuse(note),
                Some(Ok(found)) => {
                    for choice in self.choices(site) {
                        match self.joined(&found, &choice, active) {
                            Ok(all) => {
                                ready.push((found, all));
                                break;
                            }
                            Err(no) => self.refuse(no.note),
                        }
                    }
                }
            }
        }
        if ready.is_empty() {
            return Ok(());
        }
        let name = self.survey.sites[ready[0].0.site].spec.name.clone();
        judge
            .progress
            .stage(&format!("judge composed {name}"), self.judging());
        let all: Vec<&Bound> = ready.iter().flat_map(|(_, b)| b).collect();
        let seats: Vec<_> = all.iter().map(|b| b.seat.clone()).collect();
        let mut note = judge.judge(
            installs(all.iter().copied()),
            &seats,
            &self.rows_at(all.iter().copied()),
        )?;
        let words = |f: fn(&Bound) -> &str| {
            let mut words: Vec<&str> = all.iter().map(|b| f(b)).collect();
            words.dedup();
            words.join("+")
        };
        note.name = format!("block:{name}");
        note.structure = name;
        note.form = words(|b| &b.note.form);
        note.plugin = {
            let mut ids: Vec<&str> = all.iter().map(|b| b.note.plugin.as_str()).collect();
            ids.sort_unstable();
            ids.dedup();
            ids.join("+")
        };
        let passed = note.outcome == "activated";
        units.push(note);
        if !passed {
            return Ok(());
        }
        for (found, all) in ready {
            let site = &self.survey.sites[found.site];
            let linked = found.first.len();
            self.composed.push(BlockNote {
                structure: site.spec.name.clone(),
                owner: site.seam.path.clone(),
                linked: all[..linked].iter().map(seat_name).collect(),
                parts: all[linked..].iter().map(seat_name).collect(),
            });
            // Whatever held an operation of the block is in it now.
            let ops: Vec<_> = all
                .iter()
                .flat_map(|b| b.install.ops.iter())
                .copied()
                .collect();
            active.retain(|b| !b.install.ops.iter().any(|op| ops.contains(op)));
            active.extend(all);
        }
        Ok(())
    }

    /// Facts of the graph: a wire inside the block that reads what one of its sums makes and feeds the other, and a
    /// seat of the same structure whose output the first sum takes.
    fn candidate(&self, at: usize, active: &[Bound]) -> Option<Result<Candidate, RefusalNote>> {
        let graph = self.model.session().graph();
        let site = &self.survey.sites[at];
        let inner = |key: &str| {
            let rest = key.strip_prefix(site.seam.path.as_str());
            rest.is_some_and(|r| r.starts_with('.'))
        };
        let ends = |emits: bool| {
            active.iter().enumerate().filter(move |(_, b)| {
                b.note.wire.as_ref().is_some_and(|w| w.emits == emits) && inner(&b.note.path)
            })
        };
        for (sender, from) in ends(true) {
            let (taker, _) = ends(false).find(|(_, b)| b.install.name == from.install.name)?;
            let chain = &from.install;
            let apart = |i: &usize| site.spans[*i].ops.iter().all(|op| !chain.ops.contains(op));
            let makes = |i: &usize| {
                let outputs = site.spans[*i].outputs.iter().filter_map(|(_, v)| *v);
                outputs.into_iter().any(|v| chain.inputs.contains(&Some(v)))
            };
            let reads = |i: &usize| {
                let inputs = site.spans[*i].inputs.iter().filter_map(|(_, v)| *v);
                inputs.into_iter().any(|v| chain.outputs.contains(&v))
            };
            let spans = 0..site.spans.len();
            let before = spans.clone().filter(apart).find(makes);
            let after = spans.filter(apart).find(reads);
            let (Some(before), Some(after)) = (before, after) else {
                continue;
            };
            // The gate that the first sum takes, and who makes it.
            let gate = active.iter().find(|b| {
                let mut inputs = site.spans[before].inputs.iter();
                b.note.structure == from.note.structure
                    && inner(&b.note.path)
                    && inputs.any(|(_, v)| v.is_some_and(|v| b.install.outputs.contains(&v)))
            });
            // A sublayer that is not bound leaves the block alone.
            let gate = gate?;
            let refused = |code: &str, reason: String| {
                Some(Err(RefusalNote {
                    path: site.seam.path.clone(),
                    structure: site.spec.name.clone(),
                    stage: "compose".into(),
                    code: code.into(),
                    reason,
                    plugin: None,
                    form: None,
                }))
            };
            let shared = |v: &Option<ValueId>| v.is_some() && gate.install.inputs.contains(v);
            if !chain.inputs.iter().any(shared) {
                let reason = format!(
                    "`{}` and `{}` are conditioned by different tensors",
                    gate.note.key, from.note.key
                );
                return refused(LOCATORS_DIFFER, reason);
            }
            let mut ops = chain.ops.clone();
            ops.extend(&site.spans[before].ops);
            ops.extend(&site.spans[after].ops);
            let kept: Vec<ValueId> = site.spans[before]
                .outputs
                .iter()
                .filter_map(|(_, v)| *v)
                .chain(chain.outputs.iter().copied())
                .collect();
            let readers = graph.readers();
            for v in kept {
                let outside = readers[v.0].iter().find(|(op, _)| !ops.contains(op));
                let returned = graph.outputs.iter().find(|(_, o)| *o == v);
                let who = match (outside, returned) {
                    (Some((op, _)), _) => graph.op(*op).kind.to_string(),
                    (None, Some((name, _))) => format!("output `{name}`"),
                    (None, None) => continue,
                };
                let name = &graph.value(v).name;
                return refused(CANNOT_ABSORB, format!("`{name}` is read by {who} as well"));
            }
            let first: Vec<usize> = (0..active.len())
                .filter(|i| active[*i].install.name == gate.install.name)
                .collect();
            return Some(Ok(Candidate {
                site: at,
                before,
                after,
                pair: [sender, taker],
                first,
            }));
        }
        None
    }

    /// Binds the sums and joins everything.
    fn joined(
        &self,
        found: &Candidate,
        choice: &Choice<'_>,
        active: &[Bound],
    ) -> Result<Vec<Bound>, NotBound> {
        let site: &Site<'_> = &self.survey.sites[found.site];
        let rows = &self.seams[found.site].rows;
        let empty = Default::default();
        let bench = Bench {
            session: self.model.session(),
            calibration: &self.calibration,
            contents: &self.contents,
            on_guard_fail: self.options.on_guard_fail,
            scheme: &empty,
            blocks: &Blocks::new(),
            shelf: None,
        };
        let sum = |span: usize| -> Result<Bound, NotBound> {
            let fits = qualify_at(site, choice, "f32", rows, |i| i == span);
            let span = fits?;
            let Some(plugin) = self.host.registry.plugin(choice.plugin) else {
                return Err(RefusalNote {
                    path: site.seam.path.clone(),
                    structure: site.spec.name.clone(),
                    stage: "compose".into(),
                    code: "plugin_unknown".into(),
                    reason: format!("plugin `{}` is not loaded", choice.plugin),
                    plugin: Some(choice.plugin.into()),
                    form: Some(choice.form.name.clone()),
                }
                .into());
            };
            bench.bind(site, span, choice, plugin, rows)
        };
        let name = format!("block:{}", site.id());
        let pick = |list: &[usize]| list.iter().map(|i| active[*i].clone()).collect::<Vec<_>>();
        Ok(join(
            self.model.session().graph(),
            &name,
            pick(&found.first),
            sum(found.before)?,
            pick(&found.pair),
            sum(found.after)?,
        ))
    }
}
