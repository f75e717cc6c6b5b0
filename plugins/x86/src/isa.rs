//! Which instructions this process may use. Chosen once at bind; nothing is asked again in a call.

/// The rungs of this backend's ladder, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with VNNI: 64 int8 products an instruction.
    Avx512Vnni,
    /// AVX2 with FMA: int8 widened to f32.
    Avx2,
}

/// Entry names, in the order of the ladder.
pub const ENTRIES: [(&str, Isa); 2] = [("avx512vnni", Isa::Avx512Vnni), ("avx2", Isa::Avx2)];

impl Isa {
    /// Whether this CPU (and its operating system) runs it.
    pub fn present(self) -> bool {
        match self {
            Isa::Avx512Vnni => {
                std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512vnni")
            }
            Isa::Avx2 => {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
            }
        }
    }

    /// The best rung present, or `None`.
    pub fn best() -> Option<Isa> {
        ENTRIES
            .iter()
            .map(|(_, isa)| *isa)
            .find(|isa| isa.present())
    }

    /// Its entry name.
    pub fn name(self) -> &'static str {
        ENTRIES
            .iter()
            .find(|(_, isa)| *isa == self)
            .map_or("", |(name, _)| name)
    }
}
