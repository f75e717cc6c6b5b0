//! The `wires` stage, between ownership and the binding of single seats: pairs of sites whose forms can hand a tensor
//! over in a number format are bound together, judged as one unit, and taken or left together.
//!
//! A pair that is left goes back to where it came from: both sites are then bound one by one, as if nobody had asked.

use std::collections::{BTreeMap, BTreeSet};

use structures_plugin_api::describe::WIRE_FP8_E4M3;
use structures_plugin_api::formats::fp8_scale;
use structures_seams::HostFacts;

use super::Prepared;
use crate::adopt::Blocks;
use crate::bind::{installs, Bench, Bound, Place};
use crate::choose::{median_rows, qualify_at, Choice};
use crate::error::Error;
use crate::judge::Judge;
use crate::receipt::{RefusalNote, UnitNote, WireEndNote, WireNote};
use crate::schemes::Decision;
use crate::wires::{self, edge, owner, Broken, Edge, End, COMPOSED, MOST_ROWS};

/// A site, the form it would take there, and its end.
#[derive(Clone)]
struct Offer<'a> {
    end: End,
    choice: Choice<'a>,
}

/// A pair that may be bound.
struct Pair<'a> {
    edge: Edge,
    forms: [Choice<'a>; 2],
    amax: f32,
    owner: String,
    rows: u64,
}

impl<'a> Prepared<'a> {
    /// Binds, judges and takes what can be wired; the sites taken leave `alive`.
    pub(super) fn wires(
        &mut self,
        judge: &Judge<'_>,
        alive: &mut BTreeSet<usize>,
        units: &mut Vec<UnitNote>,
    ) -> Result<Vec<Bound>, Error> {
        let mut active = Vec::new();
        // One unit for each two forms of each two structures.
        let mut groups: BTreeMap<String, Vec<Pair<'a>>> = BTreeMap::new();
        for pair in self.pairs(alive) {
            let name = |i: usize, s: usize| {
                let spec = &self.survey.sites[s].spec.name;
                format!(
                    "{spec} {}:{}",
                    pair.forms[i].plugin, pair.forms[i].form.name
                )
            };
            let [a, b] = [pair.edge.producer.site, pair.edge.consumer.site];
            let group = format!("{} + {}", name(0, a), name(1, b));
            groups.entry(group).or_default().push(pair);
        }
        for pairs in groups.into_values() {
            let (bounds, notes) = self.bind_pairs(judge, &pairs);
            if bounds.is_empty() {
                continue;
            }
            self.did("gate");
            let note = self.judge_pairs(judge, &pairs[0], &bounds)?;
            let passed = note.outcome == "activated";
            units.push(note);
            self.negotiated.extend(notes);
            if passed {
                for pair in &pairs {
                    for site in [pair.edge.producer.site, pair.edge.consumer.site] {
                        let id = self.survey.sites[site].id();
                        if bounds
                            .iter()
                            .any(|b| format!("{}:{}", b.note.structure, b.note.key) == id)
                        {
                            alive.remove(&site);
                        }
                    }
                }
                active.extend(bounds);
            }
        }
        Ok(active)
    }

    fn bind_pairs(&mut self, judge: &Judge<'_>, pairs: &[Pair<'a>]) -> (Vec<Bound>, Vec<WireNote>) {
        let (mut bounds, mut notes) = (Vec::new(), Vec::new());
        judge.progress.stage("bind wires", pairs.len());
        self.did("bind");
        for pair in pairs {
            judge.progress.tick();
            match self.bind_pair(pair) {
                Ok((halves, note)) => {
                    bounds.extend(halves);
                    notes.push(note);
                }
                Err(refused) => self.refuse(refused),
            }
        }
        (bounds, notes)
    }

    fn unit_name(&self, edge: &Edge) -> String {
        let name = |site: usize| &self.survey.sites[site].spec.name;
        format!(
            "chain:{}+{}",
            name(edge.producer.site),
            name(edge.consumer.site)
        )
    }

    /// One refusal for both, where the pair cannot be bound.
    fn bind_pair(&self, pair: &Pair<'a>) -> Result<([Bound; 2], WireNote), RefusalNote> {
        let [from, to] = [&pair.edge.producer, &pair.edge.consumer];
        let sites = [from, to].map(|end| &self.survey.sites[end.site]);
        let refused = |code: &str, reason: String| RefusalNote {
            path: sites[0].seam.path.clone(),
            structure: self.unit_name(&pair.edge),
            stage: "wires".into(),
            code: code.into(),
            reason: format!(
                "`{}` to `{}`: {reason}; both are bound by themselves",
                sites[0].seam.key, sites[1].seam.key
            ),
            plugin: Some(pair.forms[0].plugin.into()),
            form: Some(format!(
                "{}+{}",
                pair.forms[0].form.name, pair.forms[1].form.name
            )),
        };
        if let Err(reason) = self.host.check_memory() {
            return Err(refused("insufficient_memory", reason));
        }
        let mut plugins = Vec::new();
        for form in &pair.forms {
            match self.host.registry.plugin(form.plugin) {
                Some(plugin) => plugins.push(plugin),
                None => return Err(refused("plugin_unknown", form.plugin.into())),
            }
        }
        let schemes = [from.site, to.site].map(|site| match &self.decisions[site] {
            Decision::Route { params, .. } => params.clone().into_iter().collect(),
            _ => BTreeMap::new(),
        });
        let place = |i: usize, end: &End| Place {
            site: sites[i],
            span: end.span,
            choice: &pair.forms[i],
            plugin: plugins[i],
            rows: &self.seams[end.site].rows,
            scheme: &schemes[i],
        };
        let bench = Bench {
            session: self.model.session(),
            calibration: &self.calibration,
            contents: &self.contents,
            on_guard_fail: self.options.on_guard_fail,
            scheme: &schemes[0],
            // Adopted seats are bound by then, and no pair is made of them.
            blocks: &Blocks::new(),
            shelf: None,
        };
        let places = [&place(0, from), &place(1, to)];
        let bound = bench
            .bind_pair(&pair.edge, WIRE_FP8_E4M3, places, pair.amax)
            .map_err(|no| {
                refused(
                    &no.note.code,
                    format!("at `{}`: {}", no.note.path, no.note.reason),
                )
            })?;
        let end = |i: usize, end: &End| WireEndNote {
            key: sites[i].seam.key.clone(),
            structure: sites[i].spec.name.clone(),
            port: end.port.clone(),
            plugin: pair.forms[i].plugin.into(),
            form: pair.forms[i].form.name.clone(),
        };
        let note = WireNote {
            unit: self.unit_name(&pair.edge),
            producer: end(0, from),
            consumer: end(1, to),
            value: self.model.session().graph().value(from.value).name.clone(),
            owner: pair.owner.clone(),
            format: WIRE_FP8_E4M3.into(),
            amax: pair.amax,
            scale: fp8_scale(pair.amax),
            rows: pair.rows,
            smoke: bound.smoke,
            active: false,
        };
        Ok((bound.halves, note))
    }

    fn judge_pairs(
        &self,
        judge: &Judge<'_>,
        first: &Pair<'a>,
        bounds: &[Bound],
    ) -> Result<UnitNote, Error> {
        let name = self.unit_name(&first.edge);
        judge
            .progress
            .stage(&format!("judge {name}"), self.judging());
        let seats: Vec<_> = bounds.iter().map(|b| b.seat.clone()).collect();
        let mut note = judge.judge(installs(bounds), &seats, &self.rows_at(bounds))?;
        let both = |f: fn(&Choice<'a>) -> String| {
            let [a, b] = [f(&first.forms[0]), f(&first.forms[1])];
            match a == b {
                true => a,
                false => format!("{a}+{b}"),
            }
        };
        note.structure.clone_from(&name);
        note.name = name;
        note.form = format!("{}+{}", first.forms[0].form.name, first.forms[1].form.name);
        note.plugin = both(|c| c.plugin.into());
        Ok(note)
    }

    /// Every pair that qualifies; what looks like one and does not is refused with its edge.
    fn pairs(&mut self, alive: &BTreeSet<usize>) -> Vec<Pair<'a>> {
        // What wires compose does not stand in their way; what loses its operations to another seam is no end of one.
        let plain = |i: &usize| {
            let tags = &self.survey.sites[*i].spec.tags;
            tags.iter().all(|t| t != COMPOSED)
        };
        let claims: BTreeSet<usize> = alive.iter().copied().filter(plain).collect();
        let winners = self.ownership(&claims, &[]).winners;
        let (senders, takers) = self.offers(&winners.into_iter().collect());
        if senders.is_empty() || takers.is_empty() {
            return Vec::new();
        }
        let graph = self.model.session().graph().clone();
        let facts = HostFacts::new(&graph);
        let (mut found, mut broken) = (Vec::new(), Vec::new());
        for taker in &takers {
            for sender in &senders {
                match edge(&facts, &self.survey.sites, &sender.end, &taker.end) {
                    None => {}
                    Some(Err(why)) => broken.push(why),
                    Some(Ok(edge)) => match self.qualified(&edge) {
                        Err(why) => broken.push(why),
                        Ok((owner, amax, rows)) => found.push(Pair {
                            edge,
                            forms: [sender.choice.clone(), taker.choice.clone()],
                            amax,
                            owner,
                            rows,
                        }),
                    },
                }
            }
        }
        for why in broken {
            self.break_off(&why);
        }
        found
    }

    fn break_off(&mut self, why: &Broken) {
        let [from, to] = [why.producer, why.consumer].map(|i| &self.survey.sites[i]);
        let note = RefusalNote {
            path: from.seam.path.clone(),
            structure: format!("chain:{}+{}", from.spec.name, to.spec.name),
            stage: "wires".into(),
            code: why.code.into(),
            reason: format!("`{}` to `{}`: {}", from.seam.key, to.seam.key, why.reason),
            plugin: None,
            form: None,
        };
        self.refuse(note);
    }

    /// Owner, amax and median rows of an edge that may be wired.
    fn qualified(&self, edge: &Edge) -> Result<(String, f32, u64), Broken> {
        let [from, to] = [edge.producer.site, edge.consumer.site];
        let no = |code, reason: String| {
            Err(Broken {
                producer: from,
                consumer: to,
                code,
                reason,
            })
        };
        let Some(owner) = owner(&self.survey.sites, edge) else {
            let reason = "no structure of this model owns the block they lie in".into();
            return no(wires::NO_OWNER, reason);
        };
        let key = self.survey.sites[to].point_key(&edge.consumer.port);
        let Some(amax) = self
            .calibration
            .amax
            .get(&key)
            .copied()
            .filter(|a| a.is_finite())
        else {
            let reason = format!("nothing was calibrated at `{key}`, so there is no scale");
            return no(wires::UNQUALIFIED, reason);
        };
        let rows = median_rows(&self.seams[to].rows).max(median_rows(&self.seams[from].rows));
        if rows > MOST_ROWS {
            let reason = format!("median rows are {rows}, a pair is formed up to {MOST_ROWS}");
            return no(wires::UNQUALIFIED, reason);
        }
        Ok((owner.to_string(), amax, rows))
    }

    /// Who could send and who could take, with the first form of each site that can.
    fn offers(&self, alive: &BTreeSet<usize>) -> (Vec<Offer<'a>>, Vec<Offer<'a>>) {
        let (mut senders, mut takers) = (Vec::new(), Vec::new());
        for &site in alive {
            let s = &self.survey.sites[site];
            let mut open = [true, true];
            for choice in self.choices(site) {
                // Why not is told where the site is bound by itself.
                if self.scheme_admits(site, &choice).is_err() {
                    continue;
                }
                let form = choice.form;
                for wire in form.wire_ends().filter(|w| w.format == WIRE_FP8_E4M3) {
                    let value = |span: usize| {
                        let ports = match wire.emits {
                            true => &s.spans[span].outputs,
                            false => &s.spans[span].inputs,
                        };
                        ports.iter().find(|(n, _)| n == wire.port)?.1
                    };
                    // The widest span may hold the tensor inside: the wire is at the edge of a narrower one.
                    let rows = &self.seams[site].rows;
                    let span = qualify_at(s, &choice, "f32", rows, |i| value(i).is_some());
                    let Ok(span) = span else { continue };
                    let (Some(value), true) = (value(span), open[usize::from(wire.emits)]) else {
                        continue;
                    };
                    open[usize::from(wire.emits)] = false;
                    let list = if wire.emits {
                        &mut senders
                    } else {
                        &mut takers
                    };
                    list.push(Offer {
                        end: End {
                            site,
                            span,
                            port: wire.port.into(),
                            value,
                        },
                        choice: choice.clone(),
                    });
                }
            }
        }
        (senders, takers)
    }
}
