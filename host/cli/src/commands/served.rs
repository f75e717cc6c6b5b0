//! What of ungated seats a command has to tell: what was not bound, and what the host served in a seat's place.
//!
//! Owned here because every command that binds without a judgement owes it; `attach` has its receipt for this.

use std::collections::BTreeMap;

use serde::Serialize;
use structures::attach::Swaps;
use structures::ledger::LedgerSummary;
use structures::receipt::RefusalNote;

use crate::say::say;

/// Seams that one code kept with the host.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Unbound {
    /// The code.
    pub code: String,
    /// How often.
    pub count: usize,
    /// Structure of the first.
    pub structure: String,
    /// Its path.
    pub path: String,
    /// Its reason.
    pub reason: String,
}

/// What was not bound, by code: how often, and one reason of each.
pub fn unbound(swaps: &Swaps) -> Vec<Unbound> {
    by_code(swaps.refused.iter().chain(&swaps.kept))
}

fn by_code<'r>(notes: impl Iterator<Item = &'r RefusalNote>) -> Vec<Unbound> {
    let mut codes: BTreeMap<&str, (usize, &RefusalNote)> = BTreeMap::new();
    for r in notes {
        tracing::info!(path = %r.path, code = %r.code, "{}", r.reason);
        codes.entry(&r.code).or_insert((0, r)).0 += 1;
    }
    codes
        .into_iter()
        .map(|(code, (count, r))| Unbound {
            code: code.into(),
            count,
            structure: r.structure.clone(),
            path: r.path.clone(),
            reason: r.reason.clone(),
        })
        .collect()
}

/// The same for people; the rows, for a document.
pub fn say_unbound(swaps: &Swaps) -> Vec<Unbound> {
    let rows = unbound(swaps);
    if swaps.seats.is_empty() {
        say("warning: nothing is bound; the host runs everything");
    }
    for r in &rows {
        say(&format!(
            "not bound: {} x {}, such as {} `{}`: {}",
            r.count, r.code, r.structure, r.path, r.reason
        ));
    }
    rows
}

/// How the calls of the seats went.
pub fn ledger_line(seats: usize, l: &LedgerSummary) -> String {
    if seats == 0 {
        return "ledger: no seats, the host ran everything".into();
    }
    let mut text = format!(
        "ledger: {seats} seats, {} calls served, {} dispatched by band, {} fell back",
        l.form_calls, l.band_dispatches, l.fallbacks
    );
    if !l.self_detached.is_empty() {
        text.push_str(&format!(", {} seats ended", l.self_detached.len()));
    }
    if let Some(reason) = &l.last_reason {
        text.push_str(&format!("; last reason: {reason}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_counted_and_the_first_reason_stays() {
        let note = |code: &str, path: &str| RefusalNote {
            path: path.into(),
            structure: "s".into(),
            stage: "bind".into(),
            code: code.into(),
            reason: format!("why at {path}"),
            plugin: None,
            form: None,
        };
        let notes = [note("b", "x"), note("a", "y"), note("b", "z")];
        let rows = by_code(notes.iter());
        let short: Vec<_> = rows
            .iter()
            .map(|r| (r.code.as_str(), r.count, r.reason.as_str()))
            .collect();
        assert_eq!(short, [("a", 1, "why at y"), ("b", 2, "why at x")]);
    }

    #[test]
    fn seats_that_ended_are_part_of_the_line() {
        let mut ledger = LedgerSummary::of(std::iter::empty());
        assert_eq!(
            ledger_line(0, &ledger),
            "ledger: no seats, the host ran everything"
        );
        assert!(!ledger_line(2, &ledger).contains("ended"));
        ledger.self_detached = vec!["a".into()];
        ledger.last_reason = Some("device_lost: x".into());
        let line = ledger_line(2, &ledger);
        assert!(
            line.contains(", 1 seats ended; last reason: device_lost: x"),
            "{line}"
        );
    }
}
