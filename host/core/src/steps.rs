//! Tables of steps: a span that is a function of a conditioning which takes few values, one a step of a loop, is
//! looked up instead of computed.
//!
//! Which spans those are is declared by the structures: an entry with a gate `max_steps` and a span whose one input is
//! a point of stored content. The rows are the host's own outputs, made by the host's own operations on the
//! conditionings it was seen to use, so a table computes the host's bits. A conditioning that is in no row is not
//! guessed at: the call is declined and the host serves it, counted.
//!
//! Several tables that read one stream of conditionings share one locator, and a broker resolves the step once for all
//! of them: the one the host calls first writes, the others read, each only after checking that it was shown the same
//! conditioning.
//!
//! Owns rows, locator, table and broker. Does not own how conditionings are observed ([`crate::observe`]) nor how a
//! table gets into a plan ([`crate::bind`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use structures_catalog::spec::SpanDecl;
use structures_catalog::{Kind, Spec};
use structures_plugin_api::describe::FormDecl;

use crate::seat::{CallFailure, Executable};

/// Who offers tables: the host itself, no plugin.
pub const PROVIDER: &str = "builtin";
/// The form.
pub const FORM: &str = "step_table";

/// Two conditionings are one up to this part of their size.
const SAME_RTOL: f32 = 1e-5;
/// And up to this part of the largest value of any.
const SAME_ATOL: f32 = 1e-6;
/// And this.
const SAME_TINY: f32 = 1e-12;
/// Most coordinates a locator looks at.
const COORDINATES: usize = 8;

/// What an entry declares about its steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Declared {
    /// The span a table replaces.
    pub span: String,
    /// The point whose content are the conditionings.
    pub point: String,
    /// Most distinct conditionings.
    pub max_steps: usize,
    /// Smallest separation, as a part of the mean size.
    pub margin: f64,
}

/// The declaration of an entry, if it has one.
pub fn declared(spec: &Spec) -> Option<Declared> {
    let number = |key: &str| spec.gates.other.get(key)?.as_f64();
    let max_steps = number("max_steps").filter(|_| spec.kind == Kind::Region)?;
    let content = |span: &&SpanDecl| match span.inputs.as_slice() {
        [input] => spec.content.contains(input) && span.states.is_empty(),
        _ => false,
    };
    let span = spec.dataflow.spans.iter().find(content)?;
    Some(Declared {
        span: span.name.clone(),
        point: span.inputs[0].clone(),
        max_steps: max_steps as usize,
        margin: number("fingerprint_rel_margin").unwrap_or(0.0),
    })
}

/// The forms the host itself offers for a catalog.
pub fn forms<'s>(specs: impl IntoIterator<Item = &'s Spec>) -> Vec<FormDecl> {
    let mut found: Vec<FormDecl> = Vec::new();
    for spec in specs {
        let Some(declared) = declared(spec) else {
            continue;
        };
        if let Some(form) = found.iter_mut().find(|f| f.structure == spec.name) {
            form.spec_versions.push(spec.version);
            continue;
        }
        found.push(FormDecl {
            spec_versions: vec![spec.version],
            spans: vec![declared.span],
            dtypes: vec!["f32".into()],
            concurrent: true,
            // Whoever does more than this is asked first.
            priority: i32::MIN,
            ..FormDecl::new(&spec.name, FORM, "none")
        });
    }
    found
}

/// Why there is no table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoTable {
    /// `not_step_quantised` or `not_separable`.
    pub code: &'static str,
    /// For people.
    pub reason: String,
}

/// Distinct conditionings in the order they were first seen.
pub fn distinct(
    rows: &[f32],
    width: usize,
    at: &str,
    most: usize,
) -> Result<Vec<Vec<f32>>, NoTable> {
    let no = |reason: String| {
        Err(NoTable {
            code: "not_step_quantised",
            reason,
        })
    };
    let seen: Vec<&[f32]> = match width {
        0 => Vec::new(),
        width => rows.chunks_exact(width).collect(),
    };
    if seen.is_empty() {
        return no(format!("no conditioning was observed at `{at}`"));
    }
    if rows.iter().any(|v| !v.is_finite()) {
        return no(format!("a conditioning at `{at}` is not finite"));
    }
    let atol = tolerance(rows);
    let mut found: Vec<Vec<f32>> = Vec::new();
    for row in &seen {
        if found.iter().any(|f| same(f, row, atol)) {
            continue;
        }
        if found.len() == most {
            return no(format!(
                "more than {most} distinct conditionings in {} calls at `{at}`: no small set of steps",
                seen.len()
            ));
        }
        found.push(row.to_vec());
    }
    Ok(found)
}

/// The absolute part of what counts as the same.
fn tolerance(values: &[f32]) -> f32 {
    let largest = values.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    SAME_ATOL * largest + SAME_TINY
}

fn same(a: &[f32], b: &[f32], atol: f32) -> bool {
    a.len() == b.len()
        && a.iter()
            .zip(b)
            .all(|(a, b)| (a - b).abs() <= atol + SAME_RTOL * a.abs())
}

/// Finds the step of a conditioning by a few coordinates.
#[derive(Debug)]
pub struct Locator {
    rows: Vec<Vec<f32>>,
    coordinates: Vec<usize>,
    /// Steps, by their values at the coordinates.
    marks: Vec<Vec<f32>>,
    atol: f32,
    /// Digest of the rows: who has the same reads the same stream.
    stream: String,
    /// Smallest distance of two steps over the coordinates; infinite for one step.
    margin: f64,
}

impl Locator {
    /// Chooses up to eight coordinates, each the one that keeps the nearest two steps furthest apart. `rel_margin` is
    /// the part of the mean absolute value that the nearest two must be apart.
    pub fn new(rows: Vec<Vec<f32>>, rel_margin: f64, at: &str) -> Result<Self, NoTable> {
        let width = rows.first().map_or(0, Vec::len);
        let pairs: Vec<(usize, usize)> = (0..rows.len())
            .flat_map(|i| (0..i).map(move |j| (j, i)))
            .collect();
        let gap = |k: usize, (i, j): (usize, usize)| {
            let d = f64::from(rows[i][k]) - f64::from(rows[j][k]);
            d * d
        };
        let mut coordinates: Vec<usize> = Vec::new();
        let mut apart = vec![0.0_f64; pairs.len()];
        while coordinates.len() < COORDINATES.min(width) {
            // What is still the nearest pair counts; what all pairs gain decides among equals.
            let score = |k: usize| {
                let mut least = f64::INFINITY;
                let mut all = 0.0;
                for (pair, sofar) in pairs.iter().zip(&apart) {
                    let d = sofar + gap(k, *pair);
                    least = least.min(d);
                    all += d.sqrt();
                }
                (least, all)
            };
            let open = (0..width).filter(|k| !coordinates.contains(k));
            let mut best: Option<(usize, (f64, f64))> = None;
            for k in open {
                let s = score(k);
                if best.is_none_or(|(_, b)| s > b) {
                    best = Some((k, s));
                }
            }
            let Some((k, _)) = best else { break };
            for (pair, sofar) in pairs.iter().zip(&mut apart) {
                *sofar += gap(k, *pair);
            }
            coordinates.push(k);
        }
        let margin = apart.iter().fold(f64::INFINITY, |m, d| m.min(*d)).sqrt();
        let values = rows.iter().flatten();
        let count = values.clone().count().max(1);
        let mean = values.map(|v| f64::from(v.abs())).sum::<f64>() / count as f64;
        if margin < rel_margin * mean {
            return Err(NoTable {
                code: "not_separable",
                reason: format!(
                    "the nearest two of {} conditionings at `{at}` are {margin:.3e} apart over {} coordinates, \
                     {rel_margin} of their mean size {mean:.3e} is needed",
                    rows.len(),
                    coordinates.len()
                ),
            });
        }
        let flat: Vec<f32> = rows.iter().flatten().copied().collect();
        Ok(Locator {
            marks: rows
                .iter()
                .map(|row| coordinates.iter().map(|k| row[*k]).collect())
                .collect(),
            atol: tolerance(&flat),
            stream: stream(&flat, width),
            rows,
            coordinates,
            margin,
        })
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.rows.len()
    }

    /// Width of a conditioning.
    pub fn width(&self) -> usize {
        self.rows.first().map_or(0, Vec::len)
    }

    /// The conditionings.
    pub fn rows(&self) -> &[Vec<f32>] {
        &self.rows
    }

    /// What tells one stream from another.
    pub fn stream(&self) -> &str {
        &self.stream
    }

    /// Smallest distance of two steps.
    pub fn margin(&self) -> f64 {
        self.margin
    }

    /// The step whose marks are nearest, if it is this conditioning; a nearest one there always is, and it may be
    /// another conditioning altogether.
    pub fn find(&self, cond: &[f32]) -> Option<usize> {
        let far = |marks: &[f32]| -> f64 {
            let at = self.coordinates.iter().zip(marks);
            at.map(|(k, m)| {
                let d = f64::from(cond[*k]) - f64::from(*m);
                d * d
            })
            .sum()
        };
        if cond.len() != self.width() {
            return None;
        }
        let (step, _) = self
            .marks
            .iter()
            .map(|marks| far(marks))
            .enumerate()
            .min_by(|a, b| a.1.total_cmp(&b.1))?;
        same(&self.rows[step], cond, self.atol).then_some(step)
    }
}

fn stream(rows: &[f32], width: usize) -> String {
    let mut hash = Sha256::new();
    hash.update((width as u64).to_le_bytes());
    for v in rows {
        hash.update(v.to_le_bytes());
    }
    hash.finalize()[..8]
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// The outputs of a span, one row a step.
#[derive(Debug)]
pub struct StepTable {
    locator: Arc<Locator>,
    /// Steps, `width` values each.
    rows: Vec<f32>,
    width: usize,
    member: OnceLock<(Arc<Broker>, usize)>,
}

impl StepTable {
    /// A table of the host's outputs, one row a step of the locator.
    pub fn new(locator: Arc<Locator>, rows: Vec<f32>) -> Arc<Self> {
        let width = rows.len() / locator.steps().max(1);
        Arc::new(StepTable {
            locator,
            rows,
            width,
            member: OnceLock::new(),
        })
    }

    /// Its locator.
    pub fn locator(&self) -> &Arc<Locator> {
        &self.locator
    }

    /// Width of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes of rows and marks.
    pub fn bytes(&self) -> u64 {
        let locator = self.locator.steps() * (self.locator.width() + COORDINATES);
        4 * (self.rows.len() + locator) as u64
    }

    /// The broker it belongs to.
    pub fn broker(&self) -> Option<&Arc<Broker>> {
        self.member.get().map(|(broker, _)| broker)
    }

    fn find(&self, cond: &[f32]) -> Result<usize, CallFailure> {
        let found = match self.member.get() {
            Some((broker, place)) => broker.step(*place, cond),
            None => self.locator.find(cond),
        };
        found.ok_or_else(|| CallFailure {
            code: "step_unknown".into(),
            message: format!(
                "this conditioning is none of the {} steps the table was made of",
                self.locator.steps()
            ),
            declined: true,
        })
    }
}

impl Executable for Arc<StepTable> {
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        let ([Some((conds, _))], [(out, _)]) = (inputs, outputs) else {
            return Err(CallFailure {
                code: "argument".into(),
                message: "a table takes one conditioning and gives one output".into(),
                declined: true,
            });
        };
        let conds = conds.chunks_exact(self.locator.width().max(1));
        for (cond, out) in conds.zip(out.chunks_exact_mut(self.width.max(1))) {
            let step = self.find(cond)?;
            out.copy_from_slice(&self.rows[step * self.width..][..self.width]);
        }
        Ok(())
    }
}

/// One resolution of the step for all tables on a stream.
#[derive(Debug)]
pub struct Broker {
    locator: Arc<Locator>,
    current: Mutex<Current>,
}

/// The step resolved last, and what was done so far.
#[derive(Debug, Default)]
struct Current {
    cond: Vec<f32>,
    step: Option<usize>,
    counts: BrokerCounts,
}

/// What a broker did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerCounts {
    /// Steps the writer resolved.
    pub fills: u64,
    /// Calls of the others that took it over.
    pub reads: u64,
    /// Calls of the others that were shown another conditioning and resolved it themselves.
    pub apart: u64,
}

impl Broker {
    /// What was done so far.
    pub fn counts(&self) -> BrokerCounts {
        self.lock().counts
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Current> {
        // What is behind a poisoned lock is checked against the conditioning before it is used.
        self.current.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Place 0 writes.
    fn step(&self, place: usize, cond: &[f32]) -> Option<usize> {
        let mut current = self.lock();
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        if place > 0 && bits(&current.cond) == bits(cond) {
            current.counts.reads += 1;
            return current.step;
        }
        let step = self.locator.find(cond);
        match place {
            0 => {
                current.counts.fills += 1;
                current.cond = cond.to_vec();
                current.step = step;
            }
            _ => current.counts.apart += 1,
        }
        step
    }
}

/// A broker in a receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerNote {
    /// Structure.
    pub structure: String,
    /// Key of the seat the host calls first.
    pub writer: String,
    /// Keys of all, in the order the host calls them.
    pub members: Vec<String>,
    /// Digest of the conditionings.
    pub stream: String,
    /// Steps.
    pub steps: usize,
    /// Width of a row.
    pub width: usize,
}

/// A seated table, for the forming of brokers.
pub struct Seated<'a> {
    /// Structure.
    pub structure: &'a str,
    /// Key.
    pub key: &'a str,
    /// Host axes and others: members agree in all of them.
    pub variant: &'a BTreeMap<String, String>,
    /// When the host calls it, among the others.
    pub order: usize,
    /// The table.
    pub table: &'a Arc<StepTable>,
}

/// Forms brokers: tables of one structure that agree in stream, steps, width and axes, at least two of them. Whoever
/// agrees with nobody keeps to itself, and so does a table that has a broker already.
pub fn brokers(tables: &[Seated<'_>]) -> Vec<BrokerNote> {
    let mut groups: Vec<Vec<&Seated<'_>>> = Vec::new();
    for seated in tables.iter().filter(|s| s.table.broker().is_none()) {
        let agrees = |other: &Seated<'_>| {
            let (a, b) = (&seated.table, &other.table);
            seated.structure == other.structure
                && seated.variant == other.variant
                && a.width == b.width
                && a.locator.stream == b.locator.stream
        };
        match groups.iter_mut().find(|g| agrees(g[0])) {
            Some(group) => group.push(seated),
            None => groups.push(vec![seated]),
        }
    }
    let mut notes = Vec::new();
    for mut group in groups.into_iter().filter(|g| g.len() > 1) {
        group.sort_by_key(|s| s.order);
        let first = group[0];
        let broker = Arc::new(Broker {
            locator: first.table.locator.clone(),
            current: Mutex::default(),
        });
        for (place, seated) in group.iter().enumerate() {
            // Only tables without one are in a group.
            let _ = seated.table.member.set((broker.clone(), place));
        }
        notes.push(BrokerNote {
            structure: first.structure.into(),
            writer: first.key.into(),
            members: group.iter().map(|s| s.key.to_string()).collect(),
            stream: first.table.locator.stream.clone(),
            steps: first.table.locator.steps(),
            width: first.table.width,
        });
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conds(steps: usize, width: usize) -> Vec<f32> {
        (0..steps * width)
            .map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0)
            .collect()
    }

    fn locator(steps: usize, width: usize) -> Arc<Locator> {
        let rows = distinct(&conds(steps, width), width, "a|c", 64).unwrap();
        Arc::new(Locator::new(rows, 1e-3, "a|c").unwrap())
    }

    #[test]
    fn rows_that_agree_are_one_step_and_too_many_are_none() {
        let mut rows = conds(5, 4);
        let again: Vec<f32> = rows.iter().map(|v| v * (1.0 + 5e-6)).collect();
        rows.extend(again);
        assert_eq!(distinct(&rows, 4, "a|c", 64).unwrap().len(), 5);
        let moved: Vec<f32> = conds(5, 4).iter().map(|v| v * 1.001).collect();
        rows.extend(moved);
        assert_eq!(distinct(&rows, 4, "a|c", 64).unwrap().len(), 10);
        let refused = |rows: &[f32], most| distinct(rows, 4, "a|c", most).unwrap_err();
        for (no, fact) in [
            (refused(&rows, 9), "more than 9"),
            (refused(&[], 64), "no conditioning"),
            (refused(&[f32::NAN; 4], 64), "not finite"),
        ] {
            assert_eq!(no.code, "not_step_quantised");
            assert!(
                no.reason.contains(fact) && no.reason.contains("a|c"),
                "{no:?}"
            );
        }
        // The edge itself is served.
        let edge: Vec<f32> = (0..64).flat_map(|i| [i as f32, 1.0]).collect();
        assert_eq!(distinct(&edge, 2, "a|c", 64).unwrap().len(), 64);
        let over: Vec<f32> = (0..65).flat_map(|i| [i as f32, 1.0]).collect();
        assert!(distinct(&over, 2, "a|c", 64).is_err());
    }

    #[test]
    fn every_step_is_found_and_nothing_else_is() {
        for (steps, width) in [(1, 3), (2, 1), (33, 16), (64, 128)] {
            let l = locator(steps, width);
            assert!(l.coordinates.len() <= 8);
            for (i, row) in l.rows().iter().enumerate() {
                assert_eq!(l.find(row), Some(i));
                let near: Vec<f32> = row.iter().map(|v| v * (1.0 + 1e-6)).collect();
                assert_eq!(l.find(&near), Some(i));
            }
            // The nearest mark is no proof: a value off the coordinates counts as well.
            let mut other = l.rows()[0].clone();
            let off = (0..width).find(|k| !l.coordinates.contains(k));
            if let Some(off) = off {
                other[off] += 0.1;
                assert_eq!(l.find(&other), None);
            }
            assert_eq!(l.find(&vec![9.0; width]), None);
            assert_eq!(l.find(&vec![0.0; width + 1]), None);
        }
    }

    #[test]
    fn steps_that_cannot_be_told_apart_are_refused_with_the_margin() {
        let rows = vec![vec![100.0, 1.0], vec![100.0, 1.01]];
        let no = Locator::new(rows.clone(), 1e-3, "a|c").unwrap_err();
        assert_eq!(no.code, "not_separable");
        assert!(no.reason.contains("0.001") && no.reason.contains("2 conditionings"));
        assert!(Locator::new(rows, 1e-4, "a|c").is_ok());
        // Eight coordinates are chosen for the nearest pair, wherever it differs.
        let mut rows = vec![vec![1.0; 64]; 3];
        rows[1][0] = 5.0;
        rows[2][0] = 5.0;
        rows[2][63] = 2.0;
        let l = Locator::new(rows, 1e-3, "a|c").unwrap();
        assert!(l.coordinates.contains(&63) && l.coordinates.contains(&0));
        assert_eq!(l.margin(), 1.0);
    }

    fn table(l: &Arc<Locator>, width: usize, at: f32) -> Arc<StepTable> {
        let rows = (0..l.steps() * width).map(|i| at + i as f32).collect();
        StepTable::new(l.clone(), rows)
    }

    fn call(t: &Arc<StepTable>, cond: &[f32]) -> Result<Vec<f32>, CallFailure> {
        let rows = cond.len() / t.locator().width();
        let mut out = vec![(vec![f32::NAN; rows * t.width()], vec![rows, t.width()])];
        let dims = [rows, t.locator().width()];
        t.call(&[Some((cond, &dims))], &mut out)?;
        Ok(out.remove(0).0)
    }

    #[test]
    fn a_table_gives_rows_and_declines_what_it_does_not_know() {
        let l = locator(5, 16);
        let t = table(&l, 3, 0.0);
        assert_eq!(call(&t, &l.rows()[4]).unwrap(), [12.0, 13.0, 14.0]);
        let two = [l.rows()[1].clone(), l.rows()[0].clone()].concat();
        assert_eq!(call(&t, &two).unwrap(), [3.0, 4.0, 5.0, 0.0, 1.0, 2.0]);
        let no = call(&t, &[7.0; 16]).unwrap_err();
        assert_eq!((no.code.as_str(), no.declined), ("step_unknown", true));
    }

    #[test]
    fn b_153_one_fill_serves_all_and_the_first_called_writes() {
        let l = locator(5, 16);
        let tables: Vec<_> = (0..3).map(|i| table(&l, 3, 100.0 * i as f32)).collect();
        let variant = BTreeMap::from([("norm".to_string(), "rms".to_string())]);
        let seated: Vec<Seated<'_>> = [("c", 7), ("a", 2), ("b", 4)]
            .iter()
            .zip(&tables)
            .map(|((key, order), table)| Seated {
                structure: "s",
                key,
                variant: &variant,
                order: *order,
                table,
            })
            .collect();
        let notes = brokers(&seated);
        assert_eq!(notes.len(), 1);
        assert_eq!(notes[0].writer, "a");
        assert_eq!(notes[0].members, ["a", "b", "c"]);
        assert_eq!((notes[0].steps, notes[0].width), (5, 3));
        for step in 0..5 {
            for t in [&tables[1], &tables[2], &tables[0]] {
                let cond = &l.rows()[step];
                let alone = StepTable::new(l.clone(), t.rows.clone());
                assert_eq!(call(t, cond).unwrap(), call(&alone, cond).unwrap());
            }
        }
        let broker = tables[0].broker().unwrap();
        let (fills, reads, apart) = (5, 10, 0);
        assert_eq!(
            broker.counts(),
            BrokerCounts {
                fills,
                reads,
                apart
            }
        );
        // A reader that is shown another conditioning than the writer was never takes a stale step.
        assert_eq!(call(&tables[0], &l.rows()[1]).unwrap(), [3.0, 4.0, 5.0]);
        assert_eq!(broker.counts().apart, 1);
        assert!(call(&tables[1], &[7.0; 16]).is_err());
        assert!(call(&tables[2], &[7.0; 16]).is_err());
        assert!(brokers(&seated).is_empty(), "nobody is in two");
    }

    #[test]
    fn b_153_mixed_widths_steps_streams_or_axes_and_one_alone_have_no_broker() {
        let l = locator(5, 16);
        let plain = BTreeMap::new();
        let layer = BTreeMap::from([("norm".to_string(), "layer".to_string())]);
        let a = table(&l, 3, 0.0);
        let seated = |structure, variant, table| Seated {
            structure,
            key: "k",
            variant,
            order: 0,
            table,
        };
        let wide = table(&l, 2, 0.0);
        let fewer = table(&locator(4, 16), 3, 0.0);
        let mut moved = l.rows().to_vec();
        moved[0][3] += 0.5;
        let moved = Arc::new(Locator::new(moved, 1e-3, "b|c").unwrap());
        let other = table(&moved, 3, 0.0);
        let twin = table(&l, 3, 0.0);
        for second in [
            seated("s", &plain, &wide),
            seated("s", &plain, &fewer),
            seated("s", &plain, &other),
            seated("s", &layer, &twin),
            seated("t", &plain, &twin),
        ] {
            assert!(brokers(&[seated("s", &plain, &a), second]).is_empty());
        }
        assert!(brokers(&[seated("s", &plain, &a)]).is_empty());
        assert!(a.broker().is_none());
    }
}
