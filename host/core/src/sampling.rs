//! Choosing a token by chance: temperature and top-p, a host stage after the step.

/// How a token is chosen from the scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choose {
    /// The first of the largest.
    Greedy,
    /// By chance.
    Sample {
        /// Scores are divided by it; above 0.
        temperature: f64,
        /// The smallest set of most likely tokens that holds this much is drawn from; in (0, 1].
        top_p: f64,
        /// The same seed gives the same tokens for the same scores.
        seed: u64,
    },
}

/// Draws tokens. Its lists are allocated once.
#[derive(Clone, Debug)]
pub struct Sampler {
    temperature: f64,
    top_p: f64,
    state: u64,
    /// Probability and token.
    ranked: Vec<(f64, u32)>,
}

impl Sampler {
    /// Draws from `vocabulary` scores; none for the greedy choice.
    pub fn new(choose: Choose, vocabulary: usize) -> Option<Self> {
        match choose {
            Choose::Greedy => None,
            Choose::Sample {
                temperature,
                top_p,
                seed,
            } => Some(Sampler {
                temperature,
                top_p,
                state: seed,
                ranked: Vec::with_capacity(vocabulary),
            }),
        }
    }

    /// A token; none where no score is finite.
    pub fn draw(&mut self, scores: &[f32]) -> Option<u32> {
        let best = scores.iter().filter(|s| s.is_finite());
        let best = f64::from(best.copied().reduce(f32::max)?);
        self.ranked.clear();
        let ranked = scores.iter().zip(0..).filter(|(s, _)| s.is_finite());
        self.ranked.extend(ranked.map(|(s, token)| {
            let weight = ((f64::from(*s) - best) / self.temperature).exp();
            (weight, token)
        }));
        // Equal ones stay in the order of their tokens, so that a seed means the same everywhere.
        self.ranked
            .sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let all: f64 = self.ranked.iter().map(|(w, _)| w).sum();
        let mut kept = 0.0;
        let mut n = 0;
        for (weight, _) in &self.ranked {
            kept += weight;
            n += 1;
            if kept >= self.top_p * all {
                break;
            }
        }
        let mut left = self.uniform() * kept;
        let mut drawn = None;
        for (weight, token) in &self.ranked[..n] {
            drawn = Some(*token);
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
        drawn
    }

    /// In [0, 1): SplitMix64 (Steele, Lea and Flood, 2014), the upper 53 bits.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(temperature: f64, top_p: f64, scores: &[f32]) -> Vec<usize> {
        let choose = Choose::Sample {
            temperature,
            top_p,
            seed: 7,
        };
        let mut sampler = Sampler::new(choose, scores.len()).unwrap();
        let mut counts = vec![0; scores.len()];
        for _ in 0..20_000 {
            counts[sampler.draw(scores).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn tokens_come_as_often_as_their_probability() {
        // e^1, e^0, e^-1 over their sum: 0.665, 0.245, 0.090.
        let counts = drawn(1.0, 1.0, &[0.0, 1.0, -1.0]);
        for (count, want) in counts.iter().zip([0.245, 0.665, 0.090]) {
            let found = *count as f64 / 20_000.0;
            assert!((found - want).abs() < 0.015, "{found} is not {want}");
        }
        let cold = drawn(0.1, 1.0, &[0.0, 1.0, -1.0]);
        assert!(cold[1] > 19_990, "{cold:?}");
    }

    #[test]
    fn top_p_leaves_the_smallest_set_that_holds_it() {
        let scores = [0.0, 1.0, -1.0, f32::NAN];
        assert_eq!(drawn(1.0, 0.6, &scores)[1], 20_000);
        let two = drawn(1.0, 0.7, &scores);
        assert!(two[0] > 4_000 && two[2] == 0 && two[3] == 0, "{two:?}");
    }

    #[test]
    fn a_seed_repeats_and_nothing_finite_is_no_token() {
        let scores: Vec<f32> = (0..50).map(|i| (i % 7) as f32).collect();
        assert_eq!(drawn(1.5, 0.9, &scores), drawn(1.5, 0.9, &scores));
        let choose = Choose::Sample {
            temperature: 1.0,
            top_p: 1.0,
            seed: 0,
        };
        let mut sampler = Sampler::new(choose, 2).unwrap();
        assert_eq!(sampler.draw(&[f32::NAN, f32::NEG_INFINITY]), None);
        assert!(Sampler::new(Choose::Greedy, 9).is_none());
    }
}
