//! Adjudication: which of several forms of one structure wins. Parity first, then time, then precision.
//!
//! A candidate below the parity floor is never timed, one that fails loses with its reason, and among those within
//! three percent of the fastest the most precise wins: a few percent are not worth an error.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::timing::{Clock, WallClock};
use crate::stats::median;

/// Cosine against the host below which a candidate is not timed.
pub const PARITY_FLOOR: f64 = 0.99;
/// Share of the fastest time within which precision decides.
pub const WIN_MARGIN: f64 = 0.03;
/// Untimed calls of every candidate.
pub const WARM_UPS: u32 = 5;
/// Timed calls of every candidate.
pub const ITERATIONS: u32 = 30;

/// What became of one candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Standing {
    /// `PLUGIN:FORM`.
    pub candidate: String,
    /// Larger means less precise.
    pub precision_rank: u32,
    /// Cosine against the host; absent when it did not get that far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parity: Option<f64>,
    /// Median milliseconds; absent when it was not timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_ms: Option<f64>,
    /// Code and reason when it lost before the times were compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
}

impl Standing {
    /// One that has shown nothing yet.
    pub fn new(candidate: &str, precision_rank: u32) -> Self {
        Standing {
            candidate: candidate.into(),
            precision_rank,
            parity: None,
            time_ms: None,
            lost: None,
        }
    }

    /// Loses unless its parity reaches the floor; NaN does not.
    pub fn enter(&mut self, parity: f64) -> bool {
        self.parity = Some(parity).filter(|p| p.is_finite());
        let enters = parity >= PARITY_FLOOR;
        if !enters {
            self.lost = Some(format!(
                "floor_not_met: cosine {parity:.6} against the host, {PARITY_FLOOR} is needed to be timed"
            ));
        }
        enters
    }
}

/// The winner among standings that were timed: of those within [`WIN_MARGIN`] of the fastest the most precise, then
/// the fastest, then the name.
pub fn winner(standings: &[Standing]) -> Option<&Standing> {
    let timed = || {
        standings
            .iter()
            .filter(|s| s.lost.is_none())
            .filter_map(|s| Some((s, s.time_ms.filter(|t| t.is_finite())?)))
    };
    let fastest = timed().map(|(_, t)| t).min_by(f64::total_cmp)?;
    timed()
        .filter(|(_, t)| *t <= fastest * (1.0 + WIN_MARGIN))
        .min_by(|(a, s), (b, t)| {
            (a.precision_rank, *s)
                .partial_cmp(&(b.precision_rank, *t))
                .unwrap_or(std::cmp::Ordering::Equal)
                .then_with(|| a.candidate.cmp(&b.candidate))
        })
        .map(|(s, _)| s)
}

/// Median milliseconds of every arm over [`ITERATIONS`] calls after [`WARM_UPS`]. The arms take turns call by call, so
/// that whatever the machine does hits all of them. An arm that fails leaves the race with its error.
pub fn race<E>(arms: usize, call: impl FnMut(usize) -> Result<(), E>) -> Vec<Result<f64, E>> {
    race_with(&WallClock::default(), arms, call)
}

/// The same with a clock of the caller's.
pub fn race_with<E>(
    clock: &dyn Clock,
    arms: usize,
    mut call: impl FnMut(usize) -> Result<(), E>,
) -> Vec<Result<f64, E>> {
    let mut times: Vec<Result<Vec<f64>, E>> = (0..arms).map(|_| Ok(Vec::new())).collect();
    for turn in 0..WARM_UPS + ITERATIONS {
        for k in 0..arms {
            // Who goes first changes from turn to turn.
            let arm = (k + turn as usize) % arms;
            let Ok(list) = &mut times[arm] else { continue };
            let from = clock.now();
            match call(arm) {
                Ok(()) if turn >= WARM_UPS => list.push(ms(clock.now() - from)),
                Ok(()) => {}
                Err(e) => times[arm] = Err(e),
            }
        }
    }
    times
        .into_iter()
        .map(|list| list.map(|l| median(&l).unwrap_or(f64::NAN)))
        .collect()
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(name: &str, rank: u32, parity: f64, time: Option<f64>) -> Standing {
        let mut s = Standing::new(name, rank);
        if s.enter(parity) {
            s.time_ms = time;
        }
        s
    }

    fn won(list: &[Standing]) -> Option<&str> {
        winner(list).map(|s| s.candidate.as_str())
    }

    #[test]
    fn b_341_within_three_percent_precision_decides_then_time() {
        let four_bit = at("a:w4", 30, 0.995, Some(1.00));
        let eight_bit = at("a:w8", 10, 0.999, Some(1.03));
        let slower = at("a:w8", 10, 0.999, Some(1.0301));
        assert_eq!(won(&[four_bit.clone(), eight_bit.clone()]), Some("a:w8"));
        assert_eq!(won(&[four_bit.clone(), slower]), Some("a:w4"));
        let other = at("b:w8", 10, 0.999, Some(1.01));
        assert_eq!(won(&[four_bit, eight_bit, other]), Some("b:w8"));
    }

    #[test]
    fn b_340_the_parity_floor_comes_before_any_timing() {
        let fast_and_wrong = at("a:f", 10, 0.98999, Some(0.1));
        assert_eq!(fast_and_wrong.time_ms, None);
        assert!(fast_and_wrong
            .lost
            .as_deref()
            .unwrap()
            .starts_with("floor_not_met"));
        let right = at("b:f", 10, 0.99, Some(5.0));
        assert_eq!(won(&[fast_and_wrong, right]), Some("b:f"));
        assert!(at("c:f", 0, f64::NAN, Some(0.1)).lost.is_some());
    }

    #[test]
    fn b_340_nothing_survives_and_ties_have_one_answer() {
        assert_eq!(won(&[]), None);
        assert_eq!(won(&[at("a:f", 0, 0.5, Some(1.0))]), None);
        assert_eq!(
            won(&[at("a:f", 0, 1.0, None), at("b:f", 0, 1.0, Some(f64::NAN))]),
            None
        );
        let (a, b) = (at("a:f", 1, 1.0, Some(2.0)), at("b:f", 1, 1.0, Some(2.0)));
        assert_eq!(won(&[b.clone(), a.clone()]), won(&[a, b]));
    }

    #[test]
    fn b_340_arms_alternate_and_one_that_fails_leaves() {
        use std::cell::Cell;
        struct Steps(Cell<u64>);
        impl Clock for Steps {
            fn now(&self) -> Duration {
                Duration::from_micros(self.0.get())
            }
        }
        let clock = Steps(Cell::new(0));
        let mut calls = [0u32; 3];
        let mut order = Vec::new();
        let times = race_with(&clock, 3, |arm| {
            calls[arm] += 1;
            order.push(arm);
            clock.0.set(clock.0.get() + 1000 * (arm as u64 + 1));
            if arm == 1 && calls[1] == 7 {
                return Err("planted");
            }
            Ok(())
        });
        assert_eq!(calls, [WARM_UPS + ITERATIONS, 7, WARM_UPS + ITERATIONS]);
        assert_eq!(times, [Ok(1.0), Err("planted"), Ok(3.0)]);
        assert_eq!(&order[..6], [0, 1, 2, 1, 2, 0], "who is first changes");
    }
}
