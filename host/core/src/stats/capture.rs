//! What can be captured at a point, and which of it a percentile may touch.
//!
//! Three kinds, never mixed. A *statistic* is a number that many samples vote on. *Content* is a stored output (a step
//! table, a prefix cache, a cadence buffer): it is the same in every sample or it is nothing, so a percentile over it
//! would be a value nobody computed. An *observation* (rows, width, dtypes) is a fact of one run. Only statistics can
//! be asked for by a scheme; content is captured where a form declares it, observations always.

use serde::{Deserialize, Serialize};

use super::Statistic;

/// A kind of capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// Reduced over samples by a percentile.
    Statistic(Statistic),
    /// Stored as it is.
    Content,
    /// Rows, width and dtypes.
    Observation,
}

impl Capture {
    /// The capture a form declares by these names, `None` when nothing here can make it.
    pub fn parse(statistic: &str, granularity: &str) -> Option<Self> {
        match (statistic, granularity) {
            ("content", "tensor") => Some(Capture::Content),
            ("observation", "tensor") => Some(Capture::Observation),
            _ => Statistic::parse(statistic, granularity).map(Capture::Statistic),
        }
    }

    /// Whether several samples become one value by a percentile.
    pub fn reduces(self) -> bool {
        matches!(self, Capture::Statistic(s) if s != Statistic::None)
    }
}

/// The stored output of one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallContent {
    /// Dims.
    pub dims: Vec<usize>,
    /// Values, row-major.
    pub values: Vec<f32>,
}

/// The stored outputs of all calls of a sample, in order: one for a prefix or a cadence buffer, one a step for a table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Content {
    /// Calls.
    pub calls: Vec<CallContent>,
}

impl Content {
    /// Values of all calls, one after the other: what a form is handed.
    pub fn values(&self) -> Vec<f32> {
        self.calls
            .iter()
            .flat_map(|call| call.values.iter().copied())
            .collect()
    }

    /// The same bits, call by call; NaN is equal to the same NaN.
    pub fn identical(&self, other: &Content) -> bool {
        let same = |a: &CallContent, b: &CallContent| {
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            a.dims == b.dims && bits(&a.values) == bits(&b.values)
        };
        self.calls.len() == other.calls.len()
            && self.calls.iter().zip(&other.calls).all(|(a, b)| same(a, b))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Collector, Wants};
    use super::*;

    #[test]
    fn b_065_three_kinds_and_only_statistics_are_reduced() {
        for (statistic, granularity, pair) in Statistic::TABLE {
            let capture = Capture::parse(statistic, granularity);
            assert_eq!(capture, Some(Capture::Statistic(pair)));
            assert_eq!(capture.unwrap().reduces(), pair != Statistic::None);
        }
        for (name, kind) in [
            ("content", Capture::Content),
            ("observation", Capture::Observation),
        ] {
            assert_eq!(Capture::parse(name, "tensor"), Some(kind));
            assert!(!kind.reduces());
            // No public surface: what a scheme may ask for does not know them.
            assert_eq!(Statistic::parse(name, "tensor"), None);
        }
        assert_eq!(Capture::parse("content", "channel"), None);
        assert_eq!(Capture::parse("histogram", "tensor"), None);
    }

    fn collect(samples: &[&[[f32; 2]]]) -> (Option<Content>, Vec<String>) {
        let mut c = Collector::new(Wants::new()).with_contents(["a|y".to_string()]);
        for calls in samples {
            for call in *calls {
                c.observe("a|y", call, &[1, 2], "f32").unwrap();
            }
            c.end_sample().unwrap();
        }
        // Any percentile: it must not matter.
        let mut done = c.finish(13.0, "text").unwrap();
        (done.contents.remove("a|y"), done.note.varying)
    }

    #[test]
    fn b_065_content_is_stored_call_by_call_and_never_a_percentile() {
        let steps = [[1.0, 2.0], [3.0, 4.0]];
        let (found, varying) = collect(&[&steps, &steps, &steps]);
        let found = found.unwrap();
        assert_eq!(found.calls.len(), 2);
        assert_eq!(found.calls[1].dims, [1, 2]);
        assert_eq!(found.values(), [1.0, 2.0, 3.0, 4.0]);
        assert!(varying.is_empty());
    }

    #[test]
    fn content_that_moves_between_samples_is_none_and_said() {
        let (found, varying) = collect(&[&[[1.0, 2.0]], &[[1.0, 2.0000002]]]);
        assert_eq!((found, varying), (None, vec!["a|y".to_string()]));
        let (found, varying) = collect(&[&[[1.0, 2.0]], &[[1.0, 2.0], [1.0, 2.0]]]);
        assert_eq!((found, varying), (None, vec!["a|y".to_string()]));
        let (found, varying) = collect(&[&[[1.0, 2.0]], &[]]);
        assert_eq!((found, varying), (None, vec!["a|y".to_string()]));
    }

    #[test]
    fn a_failed_sample_leaves_no_content() {
        let mut c = Collector::new(Wants::new()).with_contents(["a|y".to_string()]);
        c.observe("a|y", &[9.0], &[1], "f32").unwrap();
        c.abort_sample();
        c.observe("a|y", &[1.0], &[1], "f32").unwrap();
        c.observe("b|y", &[1.0], &[1], "f32").unwrap();
        c.end_sample().unwrap();
        let done = c.finish(99.9, "text").unwrap();
        assert_eq!(done.contents["a|y"].values(), [1.0]);
        assert_eq!(done.contents.len(), 1, "only what was asked for is kept");
    }
}
