//! Paired, alternating timing: is the treated arm a net win over the host's?
//!
//! Both arms run in every round, so that drift of clock or load hits both; the order alternates from round to
//! round, so that being second is nobody's privilege. The headline is the median of the per-round ratios;
//! a minimum of N is never reported as a result.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{GateError, GateRefusal};
use crate::stats::{median, number};

/// Rounds when the caller names none.
pub const DEFAULT_ROUNDS: u32 = 7;
/// Timed calls of an arm in a round when the caller names none.
pub const DEFAULT_ITERS: u32 = 10;
/// Speed-up below which an attachment is not worth its risk.
pub const DEFAULT_MIN_SPEEDUP: f64 = 1.02;

/// Where time comes from.
pub trait Clock {
    /// Time since some fixed moment; never goes back.
    fn now(&self) -> Duration;
}

/// The machine's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct WallClock(Instant);

impl Default for WallClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for WallClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// How often to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    rounds: u32,
    iters: u32,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            rounds: DEFAULT_ROUNDS,
            iters: DEFAULT_ITERS,
        }
    }
}

impl Schedule {
    /// At least one round of one call.
    ///
    /// # Errors
    /// Zero of either.
    pub fn new(rounds: u32, iters: u32) -> Result<Self, GateError> {
        if rounds == 0 || iters == 0 {
            return Err(GateError::Schedule { rounds, iters });
        }
        Ok(Self { rounds, iters })
    }

    /// Rounds.
    pub fn rounds(self) -> u32 {
        self.rounds
    }

    /// Timed calls of an arm in a round.
    pub fn iters(self) -> u32 {
        self.iters
    }
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Paired {
    /// Median time of a host call.
    pub host_ms: f64,
    /// Median time of a treated call.
    pub treated_ms: f64,
    /// Median over rounds of host time by treated time.
    #[serde(with = "number")]
    pub speedup: f64,
    /// Smallest ratio of a round.
    #[serde(with = "number")]
    pub min: f64,
    /// Largest.
    #[serde(with = "number")]
    pub max: f64,
    /// `max - min`.
    #[serde(with = "number")]
    pub spread: f64,
    /// The host's own spread: (slowest - fastest round) by its median.
    #[serde(with = "number")]
    pub host_spread: f64,
    /// Rounds.
    pub rounds: u32,
    /// Timed calls of an arm in a round.
    pub iters: u32,
}

/// Times two arms by the machine's clock.
///
/// # Errors
/// The first error of an arm; nothing is measured then.
pub fn paired<E>(
    schedule: Schedule,
    base: impl FnMut() -> Result<(), E>,
    treated: impl FnMut() -> Result<(), E>,
) -> Result<Paired, E> {
    paired_with(&WallClock::default(), schedule, base, treated)
}

/// Times two arms: in each round both, each after one untimed call; treated first in even rounds, base first in
/// odd ones.
///
/// # Errors
/// The first error of an arm; nothing is measured then.
pub fn paired_with<E>(
    clock: &dyn Clock,
    schedule: Schedule,
    mut base: impl FnMut() -> Result<(), E>,
    mut treated: impl FnMut() -> Result<(), E>,
) -> Result<Paired, E> {
    let (mut host_ms, mut treated_ms) = (Vec::new(), Vec::new());
    for round in 0..schedule.rounds {
        if round % 2 == 0 {
            treated_ms.push(arm(clock, schedule.iters, &mut treated)?);
            host_ms.push(arm(clock, schedule.iters, &mut base)?);
        } else {
            host_ms.push(arm(clock, schedule.iters, &mut base)?);
            treated_ms.push(arm(clock, schedule.iters, &mut treated)?);
        }
    }
    let ratios: Vec<f64> = host_ms
        .iter()
        .zip(&treated_ms)
        .map(|(h, t)| h / t)
        .collect();
    let (min, max) = range(&ratios);
    let (host_min, host_max) = range(&host_ms);
    let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
    Ok(Paired {
        host_ms: middle(&host_ms),
        treated_ms: middle(&treated_ms),
        speedup: middle(&ratios),
        min,
        max,
        spread: max - min,
        host_spread: (host_max - host_min) / middle(&host_ms),
        rounds: schedule.rounds,
        iters: schedule.iters,
    })
}

impl Paired {
    /// `no_net_win` below `min_speedup`; `row_note` says at which rows, since a refusal holds at that size only.
    pub fn refusal(&self, min_speedup: f64, row_note: &str) -> Option<GateRefusal> {
        // Asked this way round, NaN is no win.
        if self.speedup >= min_speedup {
            return None;
        }
        Some(GateRefusal::new(
            "no_net_win",
            format!(
                "{:.3}x the host ({:.4} ms against {:.4} ms), below {min_speedup}x; ratios {:.3} to {:.3} over {} \
                 rounds, the host's own spread {:.1}%; rows {row_note}; says nothing about other sizes",
                self.speedup,
                self.treated_ms,
                self.host_ms,
                self.min,
                self.max,
                self.rounds,
                100.0 * self.host_spread,
            ),
        ))
    }
}

/// Milliseconds a call, never zero.
fn arm<E>(
    clock: &dyn Clock,
    iters: u32,
    run: &mut impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    run()?;
    let start = clock.now();
    for _ in 0..iters {
        run()?;
    }
    let took = clock
        .now()
        .saturating_sub(start)
        .max(Duration::from_nanos(1));
    Ok(took.as_secs_f64() * 1e3 / f64::from(iters))
}

fn range(values: &[f64]) -> (f64, f64) {
    values
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(lo, hi), v| {
            (lo.min(*v), hi.max(*v))
        })
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    #[derive(Default)]
    struct Hand(Cell<Duration>);

    impl Hand {
        fn pass(&self, ms: u64) {
            self.0.set(self.0.get() + Duration::from_millis(ms));
        }
    }

    impl Clock for Hand {
        fn now(&self) -> Duration {
            self.0.get()
        }
    }

    #[test]
    fn b_305_arms_alternate_and_warm_up_outside_the_timing() {
        let (clock, log) = (Hand::default(), RefCell::new(String::new()));
        let run = |name, ms| {
            let (clock, log) = (&clock, &log);
            move || {
                // A first call after the other arm is slow; it must not be timed.
                let cold = !log.borrow().ends_with(name);
                log.borrow_mut().push(name);
                clock.pass(if cold { 1000 } else { ms });
                Ok::<(), ()>(())
            }
        };
        let schedule = Schedule::new(3, 2).unwrap();
        let got = paired_with(&clock, schedule, run('b', 6), run('t', 2)).unwrap();
        // Round 2 (odd) starts with the base, so the base runs on without a change of arm.
        assert_eq!(*log.borrow(), "tttbbbbbbttttttbbb");
        assert_eq!((got.host_ms, got.treated_ms, got.speedup), (6.0, 2.0, 3.0));
        assert_eq!((got.spread, got.host_spread), (0.0, 0.0));
        assert!(got.refusal(1.02, "1 x1").is_none());
    }

    #[test]
    fn b_305_b_190_b_420_the_median_ratio_decides_not_the_best_round() {
        let (clock, calls) = (Hand::default(), Cell::new(0u64));
        let base = || {
            clock.pass(10);
            Ok::<(), ()>(())
        };
        let treated = || {
            calls.set(calls.get() + 1);
            // Two calls a round; one round of five is very fast.
            clock.pass(if calls.get().div_ceil(2) == 3 { 1 } else { 10 });
            Ok(())
        };
        let got = paired_with(&clock, Schedule::new(5, 1).unwrap(), base, treated).unwrap();
        assert_eq!(
            (got.speedup, got.min, got.max, got.spread),
            (1.0, 1.0, 10.0, 9.0)
        );
        let refusal = got.refusal(DEFAULT_MIN_SPEEDUP, "1 x32").unwrap();
        assert_eq!(refusal.code, "no_net_win");
        for fact in ["1.000x", "1.02x", "5 rounds", "10.000", "1 x32"] {
            assert!(refusal.reason.contains(fact), "{}", refusal.reason);
        }
    }

    #[test]
    fn an_error_of_an_arm_ends_the_timing() {
        let result = paired(Schedule::default(), || Ok(()), || Err("refused"));
        assert_eq!(result, Err("refused"));
        assert!(Schedule::new(0, 1).is_err() && Schedule::new(1, 0).is_err());
        assert_eq!(Schedule::default().rounds(), 7);
    }

    #[test]
    fn a_clock_that_stands_still_gives_no_infinity() {
        let got = paired_with(
            &Hand::default(),
            Schedule::default(),
            || Ok::<(), ()>(()),
            || Ok(()),
        );
        assert_eq!(got.unwrap().speedup, 1.0);
        let real = paired(Schedule::new(1, 1).unwrap(), || Ok::<(), ()>(()), || Ok(())).unwrap();
        assert!(real.speedup.is_finite() && real.host_ms > 0.0);
    }

    #[test]
    fn b_190_an_unmeasurable_ratio_is_no_win() {
        let nan = Paired {
            host_ms: 1.0,
            treated_ms: 1.0,
            speedup: f64::NAN,
            min: 0.0,
            max: 0.0,
            spread: 0.0,
            host_spread: 0.0,
            rounds: 1,
            iters: 1,
        };
        assert!(nan.refusal(0.0, "").is_some());
    }
}
