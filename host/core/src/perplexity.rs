//! What a plan costs in quality: perplexity on text, and how often its first choice is the host's.
//!
//! Both plans see the same tokens at the same positions. A position counts where the text has a next token: `-ln p` of
//! that token is what perplexity averages. Sums are f64 over logits as they come; nothing is sampled, nothing is cut
//! off. Scores that are not finite end the measurement: an average would hide them.

use structures_graph::session::Plan;

use crate::error::Error;
use crate::workload::{Runner, Scores, Workload};

/// What was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Perplexity {
    /// Positions that count.
    pub tokens: usize,
    /// `exp` of the mean `-ln p` under the treated plan.
    pub perplexity: f64,
    /// The same under the host's own plan.
    pub host: f64,
    /// Share of positions at which both have the same largest score.
    pub top1_agreement: f64,
}

/// Measures samples one by one; `tick` after each. `None` for `plan` measures the host alone.
///
/// # Errors
/// What a run reports; `non_finite` for scores that are not finite; `no_samples` when none has a next token.
pub fn measure(
    runner: &Runner<'_>,
    host: &Plan,
    plan: Option<&Plan>,
    samples: &[Vec<u32>],
    workload: Workload,
    mut tick: impl FnMut(),
) -> Result<Perplexity, Error> {
    let (mut tokens, mut agreed) = (0_usize, 0_usize);
    let (mut own, mut treated) = (0.0, 0.0);
    for (i, sample) in samples.iter().enumerate() {
        let one = std::slice::from_ref(sample);
        let score = |plan: &Plan| runner.score(plan, one, workload, true, None, || {});
        let base = Read::of(&score(host)?, sample, i)?;
        let other = match plan {
            Some(plan) => Read::of(&score(plan)?, sample, i)?,
            None => base.clone(),
        };
        tokens += base.losses.len();
        own += base.losses.iter().sum::<f64>();
        treated += other.losses.iter().sum::<f64>();
        let both = base.first.iter().zip(&other.first);
        agreed += both.filter(|(a, b)| a == b).count();
        tick();
    }
    if tokens == 0 {
        let text = "no sample has two tokens, and the first one has nothing to be predicted from";
        return Err(Error::invalid("no_samples", text));
    }
    let mean = |sum: f64| (sum / tokens as f64).exp();
    Ok(Perplexity {
        tokens,
        perplexity: mean(treated),
        host: mean(own),
        top1_agreement: agreed as f64 / tokens as f64,
    })
}

/// Losses and first choices of one sample.
#[derive(Clone, Debug)]
struct Read {
    losses: Vec<f64>,
    first: Vec<usize>,
}

impl Read {
    fn of(scores: &Scores, sample: &[u32], at: usize) -> Result<Self, Error> {
        let mut read = Read {
            losses: Vec::new(),
            first: Vec::new(),
        };
        let rows = scores.data.chunks_exact(scores.width.max(1));
        for (position, (row, next)) in rows.zip(sample.iter().skip(1)).enumerate() {
            let Some((loss, first)) = loss(row, *next as usize) else {
                let text = format!(
                    "sample {at}, position {position}: the scores of {} tokens are not all finite, or token {next} is \
                     not among them",
                    row.len()
                );
                return Err(Error::refused("non_finite", text));
            };
            read.losses.push(loss);
            read.first.push(first);
        }
        Ok(read)
    }
}

/// `-ln softmax(row)[next]` and the place of the largest score.
fn loss(row: &[f32], next: usize) -> Option<(f64, usize)> {
    let (mut largest, mut first) = (f32::NEG_INFINITY, 0);
    for (i, score) in row.iter().enumerate() {
        if !score.is_finite() {
            return None;
        }
        if *score > largest {
            (largest, first) = (*score, i);
        }
    }
    let largest = f64::from(largest);
    let sum: f64 = row.iter().map(|s| (f64::from(*s) - largest).exp()).sum();
    let own = f64::from(*row.get(next)?);
    Some((sum.ln() + largest - own, first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_of_the_next_token_and_large_scores_do_not_overflow() {
        let (found, first) = loss(&[1000.0, 1000.0, 0.0], 1).unwrap();
        assert!((found - std::f64::consts::LN_2).abs() < 1e-12);
        assert_eq!(first, 0);
        let (uniform, _) = loss(&[3.0; 8], 7).unwrap();
        assert!((uniform.exp() - 8.0).abs() < 1e-9);
        assert_eq!(loss(&[0.0, f32::NAN], 0), None);
        assert_eq!(loss(&[0.0, 1.0], 2), None);
    }

    #[test]
    fn the_last_position_has_nothing_to_predict() {
        let scores = Scores {
            width: 2,
            data: vec![0.0, 1.0, 1.0, 0.0, 5.0, 5.0],
        };
        let read = Read::of(&scores, &[0, 1, 0], 0).unwrap();
        assert_eq!(read.first, [1, 0]);
        assert_eq!(read.losses.len(), 2);
        let error = Read::of(&scores, &[0, 9, 0], 3).unwrap_err();
        assert!(
            error.to_string().contains("sample 3, position 0"),
            "{error}"
        );
    }
}
