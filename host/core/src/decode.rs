//! The decode loop: a window of memory for the state, the prompt in passes, and one captured step a token.
//!
//! The next token and its position are chosen inside the step, so a greedy continuation is replays and nothing else;
//! its tokens are those of the eager form under the same plan. The first one comes from the prompt's own scores, as in
//! the eager form. Choosing by chance is a host stage between two steps.
//!
//! Where a guard fires, the captured step ends in an error that names it. A loop whose seats may fall back then makes
//! this one step eagerly with the host at that seat, counted once as the seat counted it, and captures again: a seat
//! that gave itself up is left out from then on, one that declined a single call stays. In strict mode it ends.
//!
//! Where a device is lost with regions of the state, and its seats may fall back, the state is made again from the tokens so
//! far and the loop goes on with the host there.
//!
//! Owns the order of these things. Does not own the captured form (`structures-graph`), seats, or text.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use structures_graph::captured::Manifest;
use structures_graph::{Capture, Graph, GraphError, Greedy, Plan, Session, State, StaticPlan};
use structures_models::decoder::{LOGITS, POSITIONS, TOKENS};
use structures_models::generate::{self, Generated};
use structures_models::{ModelError, Stop};

use crate::crew::Shift;
use crate::error::Error;
use crate::host::Loaded;
use crate::passes::Passes;
use crate::sampling::{Choose, Sampler};
use crate::workspace::{Exclusive, Workspace};

/// A window is a multiple of so many positions.
const WINDOW_STEP: usize = 8;

/// See the module.
pub struct DecodeLoop<'m> {
    model: &'m Loaded,
    plan: Plan,
    state: State,
    step: StaticPlan,
    window: usize,
    /// Captured passes of short prompts.
    passes: Passes,
    /// Steps that a guard ended and the eager form made.
    recovered: usize,
    /// Tokens the state was made of.
    tokens: Vec<u32>,
    /// The token the last call chose and did not run.
    next: u32,
    /// Tokens are drawn from the scores.
    draws: bool,
    /// Counts the state and the arena for as long as they are there.
    held: [Exclusive<'static>; 2],
}

/// Scores of the last step: in the step, or of one the eager form made.
enum Scores {
    InStep,
    Made(Tensor),
}

/// The host's decode loop over a window of at least `max_len` positions.
///
/// # Errors
/// As [`DecodeLoop::new`].
pub fn decode_loop(model: &Loaded, max_len: usize) -> Result<DecodeLoop<'_>, Error> {
    DecodeLoop::new(model, model.session().host_plan(), max_len)
}

impl<'m> DecodeLoop<'m> {
    /// Reserves the state, captures one step of the plan and runs it once on nothing.
    ///
    /// # Errors
    /// `not_a_decoder` where the graph does not take tokens and positions and make scores, or keeps nothing between
    /// runs; `context_full` where the model has fewer positions; the codes of a capture that is refused.
    pub fn new(model: &'m Loaded, plan: Plan, max_len: usize) -> Result<Self, Error> {
        is_decoder(model.session().graph(), model.name())?;
        let most = model.model.config().max_positions;
        if max_len > most {
            let full = ModelError::ContextFull {
                prompt: 0,
                new: max_len,
                max: most,
            };
            return Err(full.into());
        }
        let window = max_len.max(1).next_multiple_of(WINDOW_STEP);
        let mut state = model.session().new_state(1, window);
        state.reserve()?;
        // A state has room for some positions at least.
        let window = window.max(state.room());
        let step = captured(model.session(), &plan, &state)?;
        let held = counted(&step);
        let mut made = DecodeLoop {
            model,
            plan,
            state,
            step,
            window,
            passes: Passes::default(),
            recovered: 0,
            tokens: Vec::with_capacity(window),
            next: 0,
            draws: false,
            held,
        };
        made.warm_up()?;
        Ok(made)
    }

    /// Once on nothing, and without what fails then.
    fn warm_up(&mut self) -> Result<(), Error> {
        for _ in 0..=self.plan.installs().len() {
            let shift = Shift::begin();
            let done = self.step.warm_up(&mut self.state, &shift, 1);
            drop(shift);
            match done {
                Err(
                    GraphError::Guard { name, reason }
                    | GraphError::PlaceLost {
                        place: name,
                        reason,
                    },
                ) => {
                    tracing::warn!(at = name, "warming up: {reason}; it is captured again");
                    self.capture_again()?;
                }
                other => return Ok(other?),
            }
        }
        Ok(())
    }

    /// What runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Positions there is memory for.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Steps a guard ended and the eager form made.
    pub fn recovered(&self) -> usize {
        self.recovered
    }

    /// The captured step as data.
    pub fn manifest(&self) -> Manifest {
        self.step.manifest()
    }

    /// Bytes of its memory: the arena and the state.
    pub fn bytes(&self) -> usize {
        let manifest = self.step.manifest();
        manifest.arena_bytes + manifest.regions.iter().map(|r| r.bytes).sum::<usize>()
    }

    /// Continues a prompt. `on_token` sees each token as it is chosen and may end it there. Every call starts from
    /// nothing: the same prompt gives the same tokens.
    ///
    /// # Errors
    /// `context_full` with numbers when prompt and new tokens exceed the window; what a strict seat refuses.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        max_new: usize,
        choose: Choose,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, Error> {
        self.go(prompt, max_new, choose, true, on_token)
    }

    /// [`DecodeLoop::generate`] that takes end tokens for tokens like any other: for measurements.
    ///
    /// # Errors
    /// As there.
    pub fn generate_past_ends(
        &mut self,
        prompt: &[u32],
        max_new: usize,
        choose: Choose,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, Error> {
        self.go(prompt, max_new, choose, false, on_token)
    }

    fn go(
        &mut self,
        prompt: &[u32],
        max_new: usize,
        choose: Choose,
        ends: bool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, Error> {
        let model = &self.model.model;
        if prompt.len().saturating_add(max_new) > self.window {
            let full = ModelError::ContextFull {
                prompt: prompt.len(),
                new: max_new,
                max: self.window,
            };
            return Err(full.into());
        }
        self.begin()?;
        self.tokens.clear();
        self.tokens.extend_from_slice(prompt);
        let mut sampler = Sampler::new(choose, model.config().vocab_size);
        let start = Instant::now();
        let scores = self.prefill(prompt)?;
        let mut next = self.choose(&Scores::Made(scores), &mut sampler)?;
        let mut out = Generated {
            tokens: Vec::with_capacity(max_new),
            stop: Stop::Length,
            prompt: prompt.len(),
            prefill: start.elapsed(),
            steps: 0,
            decode: Duration::ZERO,
        };
        // Who draws reads all the scores.
        self.draws = sampler.is_some();
        while out.tokens.len() < max_new {
            if ends && model.config().eos.contains(&next) {
                out.stop = Stop::EndOfText(next);
                break;
            }
            out.tokens.push(next);
            if on_token(next).is_break() {
                out.stop = Stop::Asked;
                break;
            }
            if out.tokens.len() == max_new {
                break;
            }
            let start = Instant::now();
            let scores = self.advance(next)?;
            next = self.choose(&scores, &mut sampler)?;
            out.steps += 1;
            out.decode += start.elapsed();
        }
        self.next = next;
        Ok(out)
    }

    /// Forgets what came before.
    pub(crate) fn begin(&mut self) -> Result<(), Error> {
        self.state.reset();
        self.state.zero_rest()?;
        Ok(())
    }

    /// A prompt after what the state holds; the scores after its last token. A short one is a captured pass.
    pub(crate) fn prefill(&mut self, prompt: &[u32]) -> Result<Tensor, Error> {
        let model = self.model;
        let done = self.passes.run(model, &self.plan, &mut self.state, prompt);
        let plan = match done {
            Ok(Some(scores)) => return Ok(scores),
            Ok(None) => self.plan.clone(),
            Err(Error::Graph(GraphError::Guard { name, reason })) => {
                self.passes.clear();
                self.without(&name, &reason)?
            }
            Err(e) => return Err(e),
        };
        let scores = generate::prefill(&model.model, &plan, &mut self.state, prompt)?;
        // Regions may have come home on the way.
        self.state.reserve()?;
        Ok(scores)
    }

    /// Whether some prompt was a captured pass.
    pub fn prompt_captured(&self) -> bool {
        self.passes.any()
    }

    /// The plan with the host at the seat whose guard fired.
    fn without(&self, name: &str, reason: &str) -> Result<Plan, Error> {
        let installs = self.plan.installs();
        let others: Vec<_> = installs
            .iter()
            .filter(|i| i.name != name)
            .cloned()
            .collect();
        if others.len() == installs.len() {
            return Err(GraphError::Guard {
                name: name.into(),
                reason: reason.into(),
            }
            .into());
        }
        tracing::warn!(
            span = name,
            "the captured step ended ({reason}); the host makes it, and it is captured again"
        );
        Ok(self.model.session().plan(others)?)
    }

    /// Goes on greedily from where the last call ended, one token a replay. As long as no guard fires nothing is
    /// allocated.
    ///
    /// # Errors
    /// As [`DecodeLoop::generate`]; without room for another position.
    pub fn go_on(&mut self, tokens: &mut [u32]) -> Result<(), Error> {
        self.draws = false;
        for token in tokens {
            let scores = self.advance(self.next)?;
            self.next = self.choose(&scores, &mut None)?;
            *token = self.next;
        }
        Ok(())
    }

    /// One token through the captured step.
    fn advance(&mut self, token: u32) -> Result<Scores, Error> {
        self.step.begin_with(token, self.state.len());
        self.step.bring_scores(self.draws);
        let shift = Shift::begin();
        let done = self.step.replay(&mut self.state, &shift);
        drop(shift);
        let scores = match done {
            Ok(()) => Scores::InStep,
            Err(GraphError::Guard { name, reason }) => {
                let plan = self.without(&name, &reason)?;
                self.eagerly(&plan, token)?
            }
            Err(lost @ (GraphError::StateLost { .. } | GraphError::PlaceLost { .. })) => {
                tracing::warn!("{lost}: the host makes the step, and it is captured again");
                self.eagerly(&self.plan.clone(), token)?
            }
            Err(e) => return Err(e.into()),
        };
        self.tokens.push(token);
        Ok(scores)
    }

    /// The step that the captured form did not make, eagerly: from all tokens so far where a device took the state with it.
    /// Then another capture.
    fn eagerly(&mut self, plan: &Plan, token: u32) -> Result<Scores, Error> {
        let model = &self.model.model;
        let scores = match generate::step(model, plan, &mut self.state, token) {
            Err(ModelError::Graph(lost @ GraphError::StateLost { .. })) => {
                tracing::warn!("{lost}: it is made again from {} tokens", self.tokens.len());
                let all = [self.tokens.as_slice(), &[token]].concat();
                generate::again(model, plan, &mut self.state, &all)?
            }
            made => made?,
        };
        self.capture_again()?;
        self.recovered += 1;
        Ok(Scores::Made(scores))
    }

    /// Captures the step anew, on a state whose regions may have come home.
    fn capture_again(&mut self) -> Result<(), Error> {
        self.state.reserve()?;
        self.step = captured(self.model.session(), &self.plan, &self.state)?;
        self.held = counted(&self.step);
        Ok(())
    }

    fn choose(&mut self, scores: &Scores, sampler: &mut Option<Sampler>) -> Result<u32, Error> {
        let vocab = self.model.model.config().vocab_size;
        let none = Error::Model(ModelError::NoFiniteScore { vocab });
        match (scores, sampler) {
            (Scores::InStep, None) => self.step.choice().ok_or(none),
            (Scores::InStep, Some(sampler)) => sampler.draw(self.step.scores()?).ok_or(none),
            (Scores::Made(t), None) => Ok(generate::greedy(t)?),
            (Scores::Made(t), Some(sampler)) => {
                let failed = |e| kernel("scores", e);
                let last = match t.dims() {
                    [n, _] => t.get(n.saturating_sub(1)).map_err(failed)?,
                    _ => t.clone(),
                };
                let last = last.to_vec1::<f32>().map_err(failed)?;
                sampler.draw(&last).ok_or(none)
            }
        }
    }
}

/// The memory of a step as what it is: nobody else's.
fn counted(step: &StaticPlan) -> [Exclusive<'static>; 2] {
    let regions = step.manifest().regions;
    let state = regions.iter().map(|r| r.bytes).sum();
    let all = Workspace::global();
    [
        all.exclusive("state", state),
        all.exclusive("step", step.bytes()),
    ]
}

/// One step of one token on a state of this form.
pub(crate) fn captured(session: &Session, plan: &Plan, state: &State) -> Result<StaticPlan, Error> {
    let failed = |e| kernel("inputs", e);
    let token = Tensor::zeros((1, 1), candle_core::DType::U32, &Device::Cpu).map_err(failed)?;
    let position = Tensor::zeros(1, candle_core::DType::U32, &Device::Cpu).map_err(failed)?;
    let capture = Capture {
        inputs: &[token, position],
        state,
        windows: &[],
        greedy: Some(Greedy {
            scores: 0,
            token: 0,
            position: 1,
        }),
        last_row: None,
    };
    Ok(session.capture(plan, &capture)?)
}

fn kernel(at: &str, source: candle_core::Error) -> GraphError {
    GraphError::Kernel {
        op: "decode".into(),
        at: at.into(),
        source: Box::new(source),
    }
}

fn is_decoder(graph: &Graph, name: &str) -> Result<(), Error> {
    let inputs: Vec<&str> = graph
        .inputs
        .iter()
        .map(|v| graph.value(*v).name.as_str())
        .collect();
    let outputs: Vec<&str> = graph
        .outputs
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    if inputs == [TOKENS, POSITIONS] && outputs.first() == Some(&LOGITS) && !graph.states.is_empty()
    {
        return Ok(());
    }
    Err(Error::refused(
        "not_a_decoder",
        format!(
            "`{name}`: a decode loop needs the inputs {TOKENS} and {POSITIONS}, the output {LOGITS} and a state; this graph \
             has inputs {}, outputs {} and {} regions",
            inputs.join(", "),
            outputs.join(", "),
            graph.states.len()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use structures_graph::{AttrValue, Dim, GraphBuilder, OpKind, StateRegion};

    #[test]
    fn b_230_what_lacks_a_part_of_a_decoder_is_refused() {
        let graph = |output: &str, state: bool| {
            let mut b = GraphBuilder::new("g");
            let dims = |n: &[&str]| {
                n.iter()
                    .map(|s| Dim::Symbol(s.to_string()))
                    .collect::<Vec<_>>()
            };
            let x = b.input(TOKENS, dims(&["B", "T"]));
            b.input(POSITIONS, dims(&["T"]));
            if state {
                b.state(StateRegion::growing("k", 1, 4));
            }
            let by = [("by", AttrValue::Int(2))];
            let y = b.op(OpKind::Scale, "", "y", &[Some(x)], &by, dims(&["B", "T"]));
            b.output(output, y);
            b.finish()
        };
        assert!(is_decoder(&graph(LOGITS, true), "m").is_ok());
        for (output, state, named) in [
            ("features", true, "outputs features"),
            (LOGITS, false, "0 regions"),
        ] {
            let e = is_decoder(&graph(output, state), "m").unwrap_err();
            assert_eq!(e.code(), "not_a_decoder");
            assert!(e.to_string().contains(named), "{e}");
        }
    }
}
