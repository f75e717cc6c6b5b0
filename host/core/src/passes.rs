//! Prompts of a few tokens as captured passes, one for each number of tokens.
//!
//! What a pass of two to sixteen rows costs is reading the weights once, as a single step does; the host's own work
//! between the seats, allocations and all, is then as much again. A captured pass leaves that out. It is made when a
//! number of tokens first comes and kept, since conversations and drafts of one loop have few different ones.
//!
//! A pass is used only where nothing of it goes through candle: what is left are the seats' forms and the functions a
//! captured step has for the host's own operations. Only the last row's scores are made. Where a product of one row is
//! left to the host, its sum has another order than the eager pass's (relative error of some 1e-7); all else is the same bits.
//! Everything else stays eager, and so do seats on
//! a device.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use structures_graph::{Capture, GraphError, Plan, State, StaticPlan};
use structures_models::decoder::{LOGITS, POSITIONS, TOKENS};
use structures_models::generate;

use crate::crew::Shift;
use crate::error::Error;
use crate::host::Loaded;
use crate::workspace::{Exclusive, Workspace};

/// Most tokens of a captured pass.
pub const MOST_TOKENS: usize = 16;

/// See the module.
#[derive(Default)]
pub struct Passes {
    /// By number of tokens; `None` where the pass has no captured form.
    kept: BTreeMap<usize, Option<Pass>>,
}

struct Pass {
    step: StaticPlan,
    _held: Exclusive<'static>,
}

impl Passes {
    /// Whether a prompt of so many tokens may be one.
    pub fn serve(plan: &Plan, tokens: usize) -> bool {
        let installs = plan.installs();
        let here = installs.iter().all(|i| i.runner.place().is_none());
        (2..=MOST_TOKENS).contains(&tokens) && !installs.is_empty() && here
    }

    /// The scores `[1, V]` after the last token, or `None` where the pass has no captured form.
    ///
    /// # Errors
    /// As `generate::prefill`; [`GraphError::Guard`] names the seat whose guard fired, and the state is as it was.
    pub fn run(
        &mut self,
        model: &Loaded,
        plan: &Plan,
        state: &mut State,
        tokens: &[u32],
    ) -> Result<Option<Tensor>, Error> {
        if !Self::serve(plan, tokens.len()) {
            return Ok(None);
        }
        generate::check(&model.model, state.len(), tokens)?;
        let inputs = inputs(tokens, state.len()).map_err(failed)?;
        let pass = self.kept.entry(tokens.len());
        let pass = pass.or_insert_with(|| captured(model, plan, state, &inputs));
        let Some(Pass { step, .. }) = pass else {
            return Ok(None);
        };
        for (name, tensor) in [TOKENS, POSITIONS].into_iter().zip(&inputs) {
            step.write(name, tensor)?;
        }
        let shift = Shift::begin();
        let done = step.replay(state, &shift);
        drop(shift);
        done?;
        let scores = step.read(LOGITS)?.squeeze(0);
        Ok(Some(scores.map_err(failed)?))
    }

    /// Whether there is one.
    pub fn any(&self) -> bool {
        self.kept.values().any(Option::is_some)
    }

    /// Forgets them all: a seat of the plan changed.
    pub fn clear(&mut self) {
        self.kept.clear();
    }
}

fn inputs(tokens: &[u32], from: usize) -> candle_core::Result<[Tensor; 2]> {
    let n = tokens.len();
    let ids = Tensor::from_slice(tokens, (1, n), &Device::Cpu)?;
    let positions = Tensor::arange(from as u32, (from + n) as u32, &Device::Cpu)?;
    debug_assert_eq!(positions.dtype(), DType::U32);
    Ok([ids, positions])
}

fn captured(model: &Loaded, plan: &Plan, state: &State, inputs: &[Tensor]) -> Option<Pass> {
    let capture = Capture {
        inputs,
        state,
        windows: &[],
        greedy: None,
        last_row: Some(0),
    };
    let step = match model.session().capture(plan, &capture) {
        Ok(step) => step,
        Err(e) => {
            tracing::debug!(
                "a prompt of {} tokens stays eager: {e}",
                inputs[0].elem_count()
            );
            return None;
        }
    };
    if step.allocates() {
        tracing::debug!(
            "a prompt stays eager: some of it has no code of its own in a captured pass"
        );
        return None;
    }
    let held = Workspace::global().exclusive("step", step.bytes());
    Some(Pass { step, _held: held })
}

fn failed(source: candle_core::Error) -> Error {
    let failed = GraphError::Kernel {
        op: "prompt".into(),
        at: "inputs and scores".into(),
        source: Box::new(source),
    };
    failed.into()
}
