//! The same numbers on every machine: splitmix64.

/// A seeded source.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Random(seed ^ 0x5eed_cafe)
    }

    /// Uniform in `-1..1`.
    pub fn value(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    /// Below `n`; 0 when that is 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.word() % n.max(1) as u64) as usize
    }

    /// 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// As many of them.
    pub fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_in_range_and_repeat() {
        let (a, b) = (Random::new(7).values(1000), Random::new(7).values(1000));
        assert_eq!(a, b);
        assert!(a.iter().all(|v| (-1.0..1.0).contains(v)));
        assert!(a.iter().sum::<f32>().abs() < 100.0);
        assert_ne!(Random::new(8).value(), a[0]);
    }
}
