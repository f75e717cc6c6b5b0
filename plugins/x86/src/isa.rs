//! Which instructions this process may use. Chosen once when the backend opens; nothing is asked again in a call.

/// Caps the ladder: the name of an entry. For tests and for finding a fault, not for operation.
pub const CAP: &str = "STRUCTURES_X86_ISA";

/// The rungs of this backend's ladder, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// AVX-512 with VNNI, byte permutes and bf16 products.
    Avx512Bf16,
    /// AVX-512 with VNNI: 64 int8 products an instruction. bf16 and E4M3 take the rung below.
    Avx512Vnni,
    /// AVX2 with FMA and F16C: int8 widened to 16 bits.
    Avx2,
}

/// Entry names, in the order of the ladder.
pub const ENTRIES: [(&str, Isa); 3] = [
    ("avx512bf16", Isa::Avx512Bf16),
    ("avx512vnni", Isa::Avx512Vnni),
    ("avx2", Isa::Avx2),
];

impl Isa {
    /// Whether this CPU (and its operating system) runs it.
    pub fn present(self) -> bool {
        macro_rules! all {
            ($($feature:tt),*) => { $(std::arch::is_x86_feature_detected!($feature))&&* };
        }
        match self {
            Isa::Avx512Bf16 => Isa::Avx512Vnni.present() && all!("avx512vbmi", "avx512bf16"),
            Isa::Avx512Vnni => {
                Isa::Avx2.present()
                    && all!("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
            }
            Isa::Avx2 => all!("avx2", "fma", "f16c"),
        }
    }

    /// The best rung present and not above the cap, or `None`.
    pub fn best(cap: Option<&str>) -> Option<Isa> {
        let from = match cap {
            Some(cap) => ENTRIES.iter().position(|(name, _)| *name == cap)?,
            None => 0,
        };
        let mut rungs = ENTRIES[from..].iter().map(|(_, isa)| *isa);
        rungs.find(|isa| isa.present())
    }

    /// Its entry name.
    pub fn name(self) -> &'static str {
        ENTRIES
            .iter()
            .find(|(_, isa)| *isa == self)
            .map_or("", |(name, _)| name)
    }

    /// Whether it has 512-bit vectors with VNNI.
    pub fn wide(self) -> bool {
        self != Isa::Avx2
    }

    /// Every rung that is present here, for tests.
    #[cfg(test)]
    pub fn here() -> Vec<Isa> {
        let rungs = ENTRIES.iter().map(|(_, isa)| *isa);
        rungs.filter(|isa| isa.present()).collect()
    }
}

/// Defines a function whose body is compiled for each vector width and chosen by an [`Isa`] that was found present.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn wide($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            #[target_feature(enable = "avx2,fma")]
            fn narrow($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            // SAFETY: an `Isa` is handed out only where it was found present.
            unsafe {
                match isa.wide() {
                    true => wide($($arg),*),
                    false => narrow($($arg),*),
                }
            }
        }
    };
}
pub(crate) use vectorised;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_takes_a_lower_rung_and_an_unknown_one_takes_none() {
        let best = Isa::best(None);
        let capped = Isa::best(Some("avx2"));
        assert!(capped.is_none_or(|isa| isa == Isa::Avx2));
        assert!(best <= capped || capped.is_none());
        assert_eq!(Isa::best(Some("sse9")), None);
    }
}
