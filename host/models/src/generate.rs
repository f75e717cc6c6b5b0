//! Running a decoder: prefill, single steps, teacher forcing, greedy generation.
//!
//! Every function takes the plan, so both arms of a comparison run the same code. Greedy choice is the first of the
//! largest scores; sampling is not here.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use structures_graph::{GraphError, Observer, Plan, State};

use crate::model::Model;
use crate::ModelError;

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model chose this end token; it is not among the generated ones.
    EndOfText(u32),
    /// As many tokens as asked for.
    Length,
    /// The caller had enough: a stop condition of its own.
    Asked,
}

/// Most tokens of a prompt in one pass. Scores are made for every row of a pass: at 49,152 words 256 rows are 50 MB. The
/// passes are the same whoever decodes afterwards; a captured pass of a short prompt differs in the order of sums at most.
pub const PROMPT_PASS: usize = 256;

/// A continuation and how long it took.
#[derive(Clone, Debug)]
pub struct Generated {
    /// New tokens.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub stop: Stop,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Time for the prompt.
    pub prefill: Duration,
    /// Single steps after it.
    pub steps: usize,
    /// Time for them, callbacks excluded.
    pub decode: Duration,
}

impl Generated {
    /// Prompt tokens a second.
    pub fn prefill_tps(&self) -> f64 {
        rate(self.prompt, self.prefill)
    }

    /// Generated tokens a second, the first one (which the prefill gives) not counted.
    pub fn decode_tps(&self) -> f64 {
        rate(self.steps, self.decode)
    }
}

/// Tokens a second.
pub fn rate(n: usize, time: Duration) -> f64 {
    match n {
        0 => 0.0,
        n => n as f64 / time.as_secs_f64().max(1e-9),
    }
}

/// Runs the tokens after what `state` holds; gives their scores `[T, V]`, row `t` for the token after `tokens[t]`.
pub fn advance(
    model: &Model,
    plan: &Plan,
    state: &mut State,
    tokens: &[u32],
    observer: Option<&mut dyn Observer>,
) -> Result<Tensor, ModelError> {
    let from = state.len();
    advance_at(model, plan, state, tokens, from, observer)
}

/// [`advance`] from another position than the number of tokens before, as after pictures.
pub fn advance_at(
    model: &Model,
    plan: &Plan,
    state: &mut State,
    tokens: &[u32],
    from: usize,
    observer: Option<&mut dyn Observer>,
) -> Result<Tensor, ModelError> {
    let inputs = inputs(model, state, tokens, from)?;
    scores(model.session.run(plan, &inputs, state, observer)?)
}

fn scores(outputs: Vec<Tensor>) -> Result<Tensor, ModelError> {
    outputs[0]
        .squeeze(0)
        .map_err(|e| ModelError::compute("reading the scores", e))
}

fn inputs(
    model: &Model,
    state: &State,
    tokens: &[u32],
    from: usize,
) -> Result<[Tensor; 2], ModelError> {
    if tokens.is_empty() {
        return Err(ModelError::EmptyPrompt);
    }
    check(model, state.len(), tokens)?;
    let n = tokens.len();
    let failed = |e| ModelError::compute("preparing the inputs", e);
    let ids = Tensor::from_slice(tokens, (1, n), &Device::Cpu).map_err(failed)?;
    let positions: Vec<u32> = (from..from + n).map(|p| p as u32).collect();
    let positions = Tensor::from_vec(positions, n, &Device::Cpu).map_err(failed)?;
    Ok([ids, positions])
}

/// Runs a prompt in passes of at most [`PROMPT_PASS`] tokens; gives scores whose last row is the last token's. No other
/// row is asked for, so there may be none. Where the state was empty and a place is lost with regions of it, the prompt
/// begins anew, with the host there if the seats may fall back.
pub fn prefill(
    model: &Model,
    plan: &Plan,
    state: &mut State,
    prompt: &[u32],
) -> Result<Tensor, ModelError> {
    check(model, state.len(), prompt)?;
    let empty = state.is_empty();
    let mut gone: Vec<String> = Vec::new();
    loop {
        match passes(model, plan, state, prompt) {
            Err(ModelError::Graph(GraphError::StateLost { place, .. }))
                if empty && !gone.contains(&place) =>
            {
                state.reset();
                gone.push(place);
            }
            done => return done,
        }
    }
}

fn passes(
    model: &Model,
    plan: &Plan,
    state: &mut State,
    prompt: &[u32],
) -> Result<Tensor, ModelError> {
    let mut last = Err(ModelError::EmptyPrompt);
    for pass in prompt.chunks(PROMPT_PASS) {
        let inputs = inputs(model, state, pass, state.len())?;
        let session = &model.session;
        last = Ok(session.run_for_last_row(plan, &inputs, state, 0)?);
    }
    scores(last?)
}

/// One token; its scores `[V]`.
pub fn step(
    model: &Model,
    plan: &Plan,
    state: &mut State,
    token: u32,
) -> Result<Tensor, ModelError> {
    advance(model, plan, state, &[token], None)?
        .squeeze(0)
        .map_err(|e| ModelError::compute("reading the scores", e))
}

/// Single steps over given tokens, whatever the model would have chosen; their scores `[n, V]`.
pub fn teacher_forced(
    model: &Model,
    plan: &Plan,
    state: &mut State,
    tokens: &[u32],
) -> Result<Tensor, ModelError> {
    let rows = tokens
        .iter()
        .map(|t| step(model, plan, state, *t))
        .collect::<Result<Vec<_>, _>>()?;
    if rows.is_empty() {
        return Err(ModelError::EmptyPrompt);
    }
    Tensor::stack(&rows, 0).map_err(|e| ModelError::compute("stacking the scores", e))
}

/// The index of the largest score of the last row; the first of equal ones. NaN is never the largest, and where no
/// score is finite there is none.
pub fn greedy(scores: &Tensor) -> Result<u32, ModelError> {
    let failed = |e| ModelError::compute("choosing a token", e);
    let last = match scores.dims() {
        [_] => scores.clone(),
        [n, _] => scores.get(n.saturating_sub(1)).map_err(failed)?,
        other => {
            let what = format!("scores of [V] or [T, V], found {other:?}");
            return Err(failed(candle_core::Error::Msg(what)));
        }
    };
    let values = last.to_vec1::<f32>().map_err(failed)?;
    if !values.iter().any(|v| v.is_finite()) {
        return Err(ModelError::NoFiniteScore {
            vocab: values.len(),
        });
    }
    let mut best = (0, f32::NEG_INFINITY);
    for (i, v) in values.iter().enumerate() {
        if *v > best.1 {
            best = (i, *v);
        }
    }
    Ok(best.0 as u32)
}

/// Makes a state anew that was lost with the place of a region: these are all its tokens. Scores as of [`prefill`].
pub fn again(
    model: &Model,
    plan: &Plan,
    state: &mut State,
    tokens: &[u32],
) -> Result<Tensor, ModelError> {
    state.reset();
    prefill(model, plan, state, tokens)
}

/// Greedy continuation of a prompt. `on_token` sees each token as it is chosen.
pub fn generate(
    model: &Model,
    plan: &Plan,
    prompt: &[u32],
    max_new: usize,
    on_token: &mut dyn FnMut(u32),
) -> Result<Generated, ModelError> {
    generate_until(model, plan, prompt, max_new, &mut |token| {
        on_token(token);
        ControlFlow::Continue(())
    })
}

/// [`generate`] that `on_token` may end.
pub fn generate_until(
    model: &Model,
    plan: &Plan,
    prompt: &[u32],
    max_new: usize,
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated, ModelError> {
    check_room(model, prompt.len(), max_new)?;
    let mut state = model.session.new_state(1, prompt.len() + max_new);
    let start = Instant::now();
    let scores = prefill(model, plan, &mut state, prompt)?;
    let mut next = greedy(&scores)?;
    let mut out = Generated {
        tokens: Vec::new(),
        stop: Stop::Length,
        prompt: prompt.len(),
        prefill: start.elapsed(),
        steps: 0,
        decode: Duration::ZERO,
    };
    while out.tokens.len() < max_new {
        if model.config().eos.contains(&next) {
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
        let scores = match step(model, plan, &mut state, next) {
            Err(ModelError::Graph(GraphError::StateLost { .. })) => again(
                model,
                plan,
                &mut state,
                &[prompt, out.tokens.as_slice()].concat(),
            )?,
            other => other?,
        };
        next = greedy(&scores)?;
        out.steps += 1;
        out.decode += start.elapsed();
    }
    Ok(out)
}

/// Room and vocabulary.
/// Whether these tokens can come after so many others.
///
/// # Errors
/// [`ModelError::ContextFull`], [`ModelError::TokenRange`].
pub fn check(model: &Model, held: usize, tokens: &[u32]) -> Result<(), ModelError> {
    check_room(model, held, tokens.len())?;
    let vocab = model.config().vocab_size;
    match tokens.iter().position(|t| *t as usize >= vocab) {
        None => Ok(()),
        Some(at) => Err(ModelError::TokenRange {
            token: tokens[at],
            position: held + at,
            vocab,
        }),
    }
}

fn check_room(model: &Model, held: usize, new: usize) -> Result<(), ModelError> {
    let max = model.config().max_positions;
    if held.checked_add(new).is_none_or(|all| all > max) {
        return Err(ModelError::ContextFull {
            prompt: held,
            new,
            max,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_largest_of_the_last_row() {
        let scores = |v: &[f32], dims: &[usize]| Tensor::from_slice(v, dims, &Device::Cpu).unwrap();
        assert_eq!(greedy(&scores(&[0.0, 2.0, 2.0], &[3])).unwrap(), 1);
        assert_eq!(
            greedy(&scores(&[9.0, 0.0, -3.0, -1.0], &[2, 2])).unwrap(),
            1
        );
        assert_eq!(greedy(&scores(&[f32::NAN, -1.0], &[2])).unwrap(), 1);
        assert!(greedy(&scores(&[0.0], &[1, 1, 1])).is_err());
        let (nan, low) = (f32::NAN, f32::NEG_INFINITY);
        for none in [&[nan, nan][..], &[low, low], &[low, nan], &[]] {
            let e = greedy(&scores(none, &[none.len()])).unwrap_err();
            assert_eq!(e.code(), "non_finite", "{none:?}");
        }
    }
}
