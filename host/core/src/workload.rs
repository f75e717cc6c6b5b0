//! What is run to judge a plan: teacher-forced decode steps, or whole prompts.
//!
//! Both arms run exactly the same thing; the only difference is the plan.

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use structures_graph::session::{Observer, Plan, Session, State};
use structures_graph::GraphError;

use crate::error::Error;

/// Positions of each sample that are teacher-forced one by one in the decode workload.
pub const DECODE_POSITIONS: usize = 32;

/// Which phase is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// Each sample is prefilled and its last positions are forced one by one.
    Decode,
    /// Each sample is run in one call.
    Prefill,
}

impl Workload {
    /// The name used in receipts.
    pub fn name(self) -> &'static str {
        match self {
            Workload::Decode => "decode",
            Workload::Prefill => "prefill",
        }
    }
}

/// Rows of a distribution, flattened.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// Width of a row.
    pub width: usize,
    /// All rows.
    pub data: Vec<f32>,
}

impl Scores {
    /// `[rows, width]`
    pub fn shape(&self) -> [usize; 2] {
        [self.data.len() / self.width.max(1), self.width]
    }

    /// Bit-identity, also of NaNs.
    pub fn identical(&self, other: &Scores) -> bool {
        self.width == other.width
            && self.data.len() == other.data.len()
            && self
                .data
                .iter()
                .zip(&other.data)
                .all(|(a, b)| a.to_bits() == b.to_bits())
    }
}

/// A session with the conventions of autoregressive decoders: inputs `tokens` and `positions`, first output logits.
pub struct Runner<'a> {
    session: &'a Session,
    capacity: usize,
}

impl<'a> Runner<'a> {
    /// Runs on a session; `capacity` is a hint for state regions.
    pub fn new(session: &'a Session, capacity: usize) -> Self {
        Runner { session, capacity }
    }

    /// The session.
    pub fn session(&self) -> &'a Session {
        self.session
    }

    /// Fresh state.
    pub fn state(&self) -> State {
        self.session.new_state(1, self.capacity)
    }

    /// One call over tokens that start at a position; gives the first output.
    pub fn step(
        &self,
        plan: &Plan,
        tokens: &[u32],
        start: usize,
        state: &mut State,
        observer: Option<&mut dyn Observer>,
    ) -> Result<Tensor, GraphError> {
        let device = Device::Cpu;
        let kernel = |source: candle_core::Error| GraphError::Kernel {
            op: "input".into(),
            at: "tokens".into(),
            source: Box::new(source),
        };
        let positions: Vec<u32> = (start..start + tokens.len()).map(|p| p as u32).collect();
        let ids = Tensor::from_slice(tokens, (1, tokens.len()), &device).map_err(kernel)?;
        let positions = Tensor::from_slice(&positions, positions.len(), &device).map_err(kernel)?;
        let mut outputs = self.session.run(plan, &[ids, positions], state, observer)?;
        if outputs.is_empty() {
            return Err(GraphError::Malformed {
                phase: self.session.graph().phase.clone(),
                at: "outputs".into(),
                what: "expected at least one output, found none".into(),
            });
        }
        Ok(outputs.swap_remove(0))
    }

    /// Runs the workload over samples and gathers the judged rows.
    pub fn score(
        &self,
        plan: &Plan,
        samples: &[Vec<u32>],
        workload: Workload,
        all_positions: bool,
        mut observer: Option<&mut dyn Observer>,
        mut tick: impl FnMut(),
    ) -> Result<Scores, Error> {
        let mut scores = Scores {
            width: 0,
            data: Vec::new(),
        };
        for sample in samples {
            let mut state = self.state();
            match workload {
                Workload::Prefill => {
                    let out = self.step(plan, sample, 0, &mut state, reborrow(&mut observer))?;
                    push(&mut scores, &out, 0)?;
                }
                Workload::Decode => {
                    let split = decode_split(sample.len(), all_positions);
                    if split > 0 {
                        let prompt = &sample[..split];
                        self.step(plan, prompt, 0, &mut state, reborrow(&mut observer))?;
                    }
                    for (i, token) in sample.iter().enumerate().skip(split) {
                        let out =
                            self.step(plan, &[*token], i, &mut state, reborrow(&mut observer))?;
                        push(&mut scores, &out, 0)?;
                    }
                }
            }
            tick();
        }
        Ok(scores)
    }
}

/// How many tokens of a sample are prefilled before decoding.
pub fn decode_split(len: usize, all_positions: bool) -> usize {
    if all_positions {
        0
    } else {
        len.saturating_sub(DECODE_POSITIONS)
    }
}

fn reborrow<'b>(observer: &'b mut Option<&mut dyn Observer>) -> Option<&'b mut dyn Observer> {
    match observer {
        Some(o) => Some(&mut **o),
        None => None,
    }
}

fn push(scores: &mut Scores, out: &Tensor, from_row: usize) -> Result<(), Error> {
    let kernel = |source: candle_core::Error| GraphError::Kernel {
        op: "read".into(),
        at: "first output".into(),
        source: Box::new(source),
    };
    let width = out.dims().last().copied().unwrap_or(1);
    let rows = out.reshape(((), width)).map_err(kernel)?;
    let rows = rows
        .narrow(0, from_row, rows.dims()[0] - from_row)
        .map_err(kernel)?;
    let data = rows
        .flatten_all()
        .and_then(|t| t.to_vec1::<f32>())
        .map_err(kernel)?;
    scores.width = width;
    scores.data.extend_from_slice(&data);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_positions_are_decoded() {
        assert_eq!(decode_split(128, false), 96);
        assert_eq!(decode_split(20, false), 0);
        assert_eq!(decode_split(128, true), 0);
    }

    #[test]
    fn identity_is_of_bits() {
        let s = |v: f32| Scores {
            width: 1,
            data: vec![v],
        };
        assert!(s(f32::NAN).identical(&s(f32::NAN)));
        assert!(!s(0.0).identical(&s(-0.0)));
    }
}
