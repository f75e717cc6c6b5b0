//! The ledger: what a seat really did. Falling back to the host is exact, so parity cannot see it; this can.
//!
//! One ledger a seat, one summary a unit. Counts are never reset while a seat is judged.

use std::sync::Mutex;

use serde::{Deserialize, Serialize};

/// Counts of one seat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Calls that reached the seat.
    pub calls: u64,
    /// Calls the form served.
    pub form_calls: u64,
    /// Calls outside the form's declared band, dispatched to the host as planned.
    pub band_dispatches: u64,
    /// Calls the form should have served and the host did.
    pub fallbacks: u64,
    /// Calls refused outright in strict mode: nothing fell back, and the run ended.
    #[serde(default)]
    pub refused: u64,
    /// Code and reason of the last fallback or refusal.
    pub last_reason: Option<String>,
    /// Whether the seat gave itself up and the host runs there for good.
    pub detached: bool,
}

/// Thread-safe counts with the run length of fallbacks.
#[derive(Debug, Default)]
pub struct Ledger {
    inner: Mutex<(Counts, u64)>,
}

impl Ledger {
    fn with<R>(&self, f: impl FnOnce(&mut Counts, &mut u64) -> R) -> R {
        // A poisoned lock means a panic between two additions; the counts are still the best there is.
        let mut guard = self.inner.lock().unwrap_or_else(|e| e.into_inner());
        let (counts, run) = &mut *guard;
        f(counts, run)
    }

    /// The form served a call.
    pub fn served(&self) {
        self.with(|c, run| {
            c.calls += 1;
            c.form_calls += 1;
            *run = 0;
        });
    }

    /// The call was outside the declared band: planned.
    pub fn dispatched(&self) {
        self.with(|c, _| {
            c.calls += 1;
            c.band_dispatches += 1;
        });
    }

    /// The host served a call the form should have; returns how many in a row.
    pub fn fell_back(&self, reason: &str) -> u64 {
        self.with(|c, run| {
            c.calls += 1;
            c.fallbacks += 1;
            c.last_reason = Some(reason.into());
            *run += 1;
            *run
        })
    }

    /// The call was refused outright: nothing fell back.
    pub fn refused(&self, reason: &str) {
        self.with(|c, _| {
            c.calls += 1;
            c.refused += 1;
            c.last_reason = Some(reason.into());
        });
    }

    /// The seat gave itself up.
    pub fn detach(&self) {
        self.with(|c, _| c.detached = true);
    }

    /// Whether the seat gave itself up.
    pub fn is_detached(&self) -> bool {
        self.with(|c, _| c.detached)
    }

    /// A copy of the counts.
    pub fn counts(&self) -> Counts {
        self.with(|c, _| c.clone())
    }

    /// Back to zero, for the next thing to be judged. A detached seat stays detached.
    pub fn reset(&self) {
        self.with(|c, run| {
            let detached = c.detached;
            *c = Counts {
                detached,
                ..Counts::default()
            };
            *run = 0;
        });
    }
}

/// Summary over the seats of a unit, in the receipt's words.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LedgerSummary {
    /// Sum of calls.
    pub calls: u64,
    /// Sum of calls the forms served.
    pub form_calls: u64,
    /// Sum of planned dispatches.
    pub band_dispatches: u64,
    /// Sum of fallbacks.
    pub fallbacks: u64,
    /// Sum of calls refused outright.
    #[serde(default)]
    pub refused: u64,
    /// Last fallback or refusal reason of any seat.
    pub last_reason: Option<String>,
    /// Seats whose form served no call.
    pub never_ran: Vec<String>,
    /// Seats that gave themselves up.
    pub self_detached: Vec<String>,
    /// There are seats, no call fell back or was refused, every form ran, none detached.
    pub clean: bool,
}

impl LedgerSummary {
    /// An error that names every seat that did not do its work, for callers who accept no fallback.
    ///
    /// # Errors
    /// The summary is not clean.
    pub fn require_clean(&self) -> Result<(), crate::Error> {
        if self.clean {
            return Ok(());
        }
        let mut why = Vec::new();
        if self.calls == 0 {
            why.push("no seat was called".to_string());
        }
        if self.fallbacks + self.refused > 0 {
            why.push(format!(
                "{} of {} calls fell back and {} were refused ({})",
                self.fallbacks,
                self.calls,
                self.refused,
                self.last_reason.as_deref().unwrap_or("no reason recorded")
            ));
        }
        for (what, seats) in [
            ("never ran", &self.never_ran),
            ("gave itself up", &self.self_detached),
        ] {
            if !seats.is_empty() {
                why.push(format!("{what}: {}", seats.join(", ")));
            }
        }
        Err(crate::Error::refused("fell_back", why.join("; ")))
    }

    /// Adds up named seats.
    pub fn of<'a>(seats: impl IntoIterator<Item = (&'a str, Counts)>) -> Self {
        let mut s = LedgerSummary::default();
        let mut any = false;
        for (name, c) in seats {
            s.calls += c.calls;
            s.form_calls += c.form_calls;
            s.band_dispatches += c.band_dispatches;
            s.fallbacks += c.fallbacks;
            s.refused += c.refused;
            any = true;
            if c.last_reason.is_some() {
                s.last_reason = c.last_reason;
            }
            if c.form_calls == 0 {
                s.never_ran.push(name.into());
            }
            if c.detached {
                s.self_detached.push(name.into());
            }
        }
        s.clean = any
            && s.fallbacks + s.refused == 0
            && s.never_ran.is_empty()
            && s.self_detached.is_empty();
        s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_288_a_reverted_seat_is_visible() {
        let l = Ledger::default();
        l.served();
        l.dispatched();
        assert!(LedgerSummary::of([("a", l.counts())]).clean);
        assert_eq!(l.fell_back("rt_rows: 9"), 1);
        assert_eq!(l.fell_back("rt_rows: 9"), 2);
        let s = LedgerSummary::of([("a", l.counts())]);
        assert!(!s.clean);
        assert_eq!(
            (s.calls, s.form_calls, s.band_dispatches, s.fallbacks),
            (4, 1, 1, 2)
        );
        l.served();
        assert_eq!(l.fell_back("x"), 1, "an admitted call resets the run");
    }

    #[test]
    fn b_288_a_seat_that_only_dispatched_never_ran() {
        let l = Ledger::default();
        l.dispatched();
        let s = LedgerSummary::of([("a", l.counts())]);
        assert!(!s.clean);
        assert_eq!(s.never_ran, ["a"]);
    }

    #[test]
    fn b_288_nothing_and_a_refused_call_are_not_clean() {
        assert!(!LedgerSummary::of([]).clean);
        let l = Ledger::default();
        l.served();
        l.refused("rt_rows: 9");
        let s = LedgerSummary::of([("a", l.counts())]);
        assert!(!s.clean);
        assert_eq!((s.fallbacks, s.refused), (0, 1));
    }

    #[test]
    fn reset_keeps_detachment() {
        let l = Ledger::default();
        l.fell_back("x");
        l.detach();
        l.reset();
        assert_eq!(
            l.counts(),
            Counts {
                detached: true,
                ..Counts::default()
            }
        );
    }

    #[test]
    fn b_288_a_caller_who_accepts_no_fallback_gets_every_reason() {
        let (a, b) = (Ledger::default(), Ledger::default());
        a.served();
        let fine = LedgerSummary::of([("a", a.counts())]);
        assert!(fine.require_clean().is_ok());
        a.fell_back("rt_rows: 9");
        b.detach();
        let s = LedgerSummary::of([("a", a.counts()), ("b", b.counts())]);
        let error = s.require_clean().unwrap_err();
        assert_eq!(error.code(), "fell_back");
        let text = error.to_string();
        for fact in [
            "1 of 2 calls",
            "rt_rows: 9",
            "never ran: b",
            "gave itself up: b",
        ] {
            assert!(text.contains(fact), "{text}");
        }
    }
}
