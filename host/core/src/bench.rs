//! How fast: prompt and decode tokens a second of several arms, alternating, with the memory's speed beside them.
//!
//! In each round every arm runs once, and the order turns with the round. Loading, calibration, capture and the first,
//! untimed run of an arm are outside the timing. Before and after each arm a buffer that fits no cache is summed by the
//! same threads: a figure whose neighbours differ was taken on a busy machine.
//!
//! The host arm is the session, eager, which every gate measures against.

use std::ops::ControlFlow;
use std::sync::Mutex;
use std::time::Instant;

use serde::Serialize;
use structures_graph::Plan;
use structures_loader::pool::Pool;
use structures_models::generate::{self, rate};

use crate::decode::DecodeLoop;
use crate::error::Error;
use crate::host::Loaded;
use crate::passes::{Passes, MOST_TOKENS};
use crate::sampling::Choose;

/// Tokens before those that are decoded.
pub const PROMPT: usize = 32;

/// Elements the memory probe sums: 64 MB, more than the caches of the servers this was measured on.
const PROBE: usize = 1 << 24;

/// One way to run the model.
pub struct Contender {
    /// Name of the arm.
    pub arm: &'static str,
    /// What runs.
    pub plan: Plan,
    /// In the captured form.
    pub captured: bool,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Measures {
    /// Prompt lengths.
    pub prefill: Vec<usize>,
    /// Decoded tokens; 0 leaves them out.
    pub decode: usize,
    /// Rounds.
    pub rounds: usize,
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// Tokens of the prompt, or decoded ones.
    pub tokens: usize,
    /// Arm.
    pub arm: &'static str,
    /// `eager` or `captured`.
    pub form: &'static str,
    /// Tokens a second, median of the rounds.
    pub tps: f64,
    /// (fastest - slowest) by the median.
    pub spread: f64,
    /// By the host arm's: median of the ratios of each round; absent without that arm.
    pub speedup: Option<f64>,
    /// Gigabytes a second the memory gave before and after, medians.
    pub memory_gbs: [f64; 2],
}

/// One arm that runs when it is told to: for who alternates it with another program.
pub struct Stand<'m> {
    model: &'m Loaded,
    contender: Contender,
    /// The loop of the last number of tokens that was decoded.
    decode: Option<(usize, DecodeLoop<'m>)>,
    /// The loop of short prompts.
    prompts: Option<DecodeLoop<'m>>,
}

impl<'m> Stand<'m> {
    /// Nothing runs yet.
    pub fn new(model: &'m Loaded, contender: Contender) -> Self {
        Stand {
            model,
            contender,
            decode: None,
            prompts: None,
        }
    }

    /// Tokens a second of a prompt.
    ///
    /// # Errors
    /// As [`run`].
    pub fn prefill(&mut self, tokens: usize) -> Result<f64, Error> {
        let plan = &self.contender.plan;
        if !short(&self.contender, tokens) {
            return prefilled(self.model, plan, tokens);
        }
        let made = match self.prompts.take() {
            Some(made) => made,
            None => DecodeLoop::new(self.model, plan.clone(), MOST_TOKENS)?,
        };
        prefilled_in(self.model, self.prompts.insert(made), tokens)
    }

    /// Tokens a second of single steps after a prompt of [`PROMPT`].
    ///
    /// # Errors
    /// As [`run`].
    pub fn decode(&mut self, tokens: usize) -> Result<f64, Error> {
        let prompt = prompt(self.model, PROMPT);
        // One more than is asked for: the first one is the prompt's.
        let n = tokens + 1;
        if !self.contender.captured {
            return decode_eager(self.model, &self.contender.plan, &prompt, n);
        }
        let made = match self.decode.take() {
            Some((held, made)) if held == tokens => made,
            _ => DecodeLoop::new(self.model, self.contender.plan.clone(), PROMPT + n)?,
        };
        let (_, made) = self.decode.insert((tokens, made));
        decode_captured(made, &prompt, n)
    }
}

/// Any tokens do; these are neither special nor all the same.
fn prompt(model: &Loaded, n: usize) -> Vec<u32> {
    let vocabulary = model.model.config().vocab_size;
    let word = |i: usize| (i * 7919 + 13) % vocabulary.max(2);
    (0..n).map(|i| word(i) as u32).collect()
}

fn prefilled(model: &Loaded, plan: &Plan, tokens: usize) -> Result<f64, Error> {
    let prompt = prompt(model, tokens);
    let mut state = model.session().new_state(1, tokens);
    let start = Instant::now();
    generate::prefill(&model.model, plan, &mut state, &prompt)?;
    Ok(rate(tokens, start.elapsed()))
}

/// Whether a prompt may be a captured pass.
fn short(contender: &Contender, tokens: usize) -> bool {
    contender.captured && Passes::serve(&contender.plan, tokens)
}

fn prefilled_in(model: &Loaded, l: &mut DecodeLoop<'_>, tokens: usize) -> Result<f64, Error> {
    let prompt = prompt(model, tokens);
    l.begin()?;
    let start = Instant::now();
    l.prefill(&prompt)?;
    Ok(rate(tokens, start.elapsed()))
}

/// Runs everything; rows in the order of phases, lengths and arms.
///
/// # Errors
/// The model's own, `context_full` for lengths it has no room for.
pub fn run(
    model: &Loaded,
    contenders: &[Contender],
    measures: &Measures,
    mut tick: impl FnMut(),
) -> Result<Vec<Row>, Error> {
    let mut probe = Probe::new();
    let mut rows = Vec::new();
    for tokens in measures.prefill.iter().filter(|n| **n > 0) {
        let mut loops = Vec::new();
        let mut forms = Vec::new();
        for c in contenders {
            let mut made = match short(c, *tokens) {
                true => Some(DecodeLoop::new(model, c.plan.clone(), *tokens)?),
                false => None,
            };
            if let Some(l) = &mut made {
                // Only now it is known.
                prefilled_in(model, l, *tokens)?;
            }
            loops.push(made.filter(DecodeLoop::prompt_captured));
            forms.push(
                loops
                    .last()
                    .map_or("eager", |l| l.as_ref().map_or("eager", |_| "captured")),
            );
        }
        let mut one = |c: usize| match &mut loops[c] {
            Some(l) => prefilled_in(model, l, *tokens),
            None => prefilled(model, &contenders[c].plan, *tokens),
        };
        rows.extend(alternate(
            ("prefill", *tokens),
            contenders,
            &forms,
            measures.rounds,
            &mut probe,
            &mut one,
            &mut tick,
        )?);
    }
    if measures.decode > 0 {
        let prompt = prompt(model, PROMPT);
        let window = PROMPT + measures.decode + 1;
        let mut loops = Vec::new();
        let mut forms = Vec::new();
        for c in contenders {
            loops.push(match c.captured {
                true => Some(DecodeLoop::new(model, c.plan.clone(), window)?),
                false => None,
            });
            forms.push(if c.captured { "captured" } else { "eager" });
        }
        let mut one = |c: usize| -> Result<f64, Error> {
            // One more than is asked for: the first one is the prompt's.
            let n = measures.decode + 1;
            match &mut loops[c] {
                Some(l) => decode_captured(l, &prompt, n),
                None => decode_eager(model, &contenders[c].plan, &prompt, n),
            }
        };
        rows.extend(alternate(
            ("decode", measures.decode),
            contenders,
            &forms,
            measures.rounds,
            &mut probe,
            &mut one,
            &mut tick,
        )?);
    }
    Ok(rows)
}

/// Tokens a second of `n - 1` steps, end tokens and all.
fn decode_eager(model: &Loaded, plan: &Plan, prompt: &[u32], n: usize) -> Result<f64, Error> {
    let m = &model.model;
    let mut state = model.session().new_state(1, prompt.len() + n);
    let mut next = generate::greedy(&generate::prefill(m, plan, &mut state, prompt)?)?;
    let start = Instant::now();
    for _ in 1..n {
        next = generate::greedy(&generate::step(m, plan, &mut state, next)?)?;
    }
    Ok(rate(n - 1, start.elapsed()))
}

fn decode_captured(l: &mut DecodeLoop<'_>, prompt: &[u32], n: usize) -> Result<f64, Error> {
    let goes_on = &mut |_| ControlFlow::Continue(());
    let done = l.generate_past_ends(prompt, n, Choose::Greedy, goes_on)?;
    Ok(done.decode_tps())
}

#[allow(clippy::too_many_arguments)] // one row each
fn alternate(
    (phase, tokens): (&'static str, usize),
    contenders: &[Contender],
    forms: &[&'static str],
    rounds: usize,
    probe: &mut Probe,
    one: &mut dyn FnMut(usize) -> Result<f64, Error>,
    tick: &mut dyn FnMut(),
) -> Result<Vec<Row>, Error> {
    let n = contenders.len();
    let mut tps = vec![Vec::new(); n];
    let mut memory = vec![[Vec::new(), Vec::new()]; n];
    for c in 0..n {
        one(c)?;
    }
    for round in 0..rounds.max(1) {
        for i in 0..n {
            let c = if round % 2 == 0 { i } else { n - 1 - i };
            memory[c][0].push(probe.gigabytes_a_second());
            tps[c].push(one(c)?);
            memory[c][1].push(probe.gigabytes_a_second());
            tick();
        }
    }
    let host = contenders.iter().position(|c| c.arm == "host");
    let row = |c: usize| {
        let middle = median(&tps[c]);
        let (low, high) = tps[c]
            .iter()
            .fold((f64::INFINITY, 0f64), |(l, h), v| (l.min(*v), h.max(*v)));
        let ratios = host.map(|host| -> Vec<f64> {
            tps[c].iter().zip(&tps[host]).map(|(t, h)| t / h).collect()
        });
        Row {
            phase,
            tokens,
            arm: contenders[c].arm,
            form: forms[c],
            tps: middle,
            spread: (high - low) / middle,
            speedup: ratios.map(|r| median(&r)),
            memory_gbs: [median(&memory[c][0]), median(&memory[c][1])],
        }
    };
    Ok((0..n).map(row).collect())
}

fn median(values: &[f64]) -> f64 {
    crate::stats::median(values).unwrap_or(f64::NAN)
}

/// The speed of memory as the pool's threads see it.
struct Probe(Vec<f32>);

impl Probe {
    fn new() -> Self {
        // Written, so that every page is there.
        Probe((0..PROBE).map(|i| i as f32).collect())
    }

    fn gigabytes_a_second(&mut self) -> f64 {
        let pool = Pool::global();
        let piece = PROBE.div_ceil(pool.threads());
        let total = Mutex::new(0f32);
        let start = Instant::now();
        pool.parallel_for(pool.threads(), |i| {
            let from = (i * piece).min(PROBE);
            let mut lanes = [0f32; 32];
            for chunk in self.0[from..(from + piece).min(PROBE)].chunks_exact(32) {
                for (lane, v) in lanes.iter_mut().zip(chunk) {
                    *lane += v;
                }
            }
            let sum: f32 = lanes.iter().sum();
            *total.lock().unwrap_or_else(|e| e.into_inner()) += sum;
        });
        let seconds = start.elapsed().as_secs_f64();
        std::hint::black_box(total);
        (PROBE * size_of::<f32>()) as f64 / seconds / 1e9
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Loaded;
    use std::path::Path;

    #[test]
    fn arms_alternate_and_every_figure_has_its_row() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model");
        let model = Loaded::open(&demo).unwrap();
        let plan = model.session().host_plan();
        let arm = |arm, captured| Contender {
            arm,
            plan: plan.clone(),
            captured,
        };
        let arms = [arm("host", false), arm("attached", true)];
        let measures = Measures {
            prefill: vec![0, 16],
            decode: 4,
            rounds: 2,
        };
        let mut ticks = 0;
        let rows = run(&model, &arms, &measures, || ticks += 1).unwrap();
        assert_eq!(ticks, 2 * 2 * 2);
        let shown: Vec<_> = rows
            .iter()
            .map(|r| (r.phase, r.tokens, r.arm, r.form))
            .collect();
        let want = [
            ("prefill", 16, "host", "eager"),
            ("prefill", 16, "attached", "eager"),
            ("decode", 4, "host", "eager"),
            ("decode", 4, "attached", "captured"),
        ];
        assert_eq!(shown, want);
        assert!(rows
            .iter()
            .all(|r| r.tps > 0.0 && r.memory_gbs.iter().all(|m| *m > 0.0)));
        assert_eq!(rows[0].speedup, Some(1.0));
    }
}
