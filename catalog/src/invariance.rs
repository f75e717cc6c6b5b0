//! Whether what a loop made again and again is one content.
//!
//! A structure whose output may be computed once instead of at every turn proves it here: all outputs captured over
//! one whole loop must agree with the first of them. With the first, because a replacement would serve that one
//! forever; neighbours compared with each other would let a slow drift pass. Owns the comparison; what is captured,
//! how many captures are enough and which tolerances hold, the caller knows (an entry declares them as gates).

use candle_core::{DType, Tensor};

use crate::error::CatalogError;

/// How near two captures must be: `|first - later| <= atol + rtol * |later|`, element by element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Share of the later value.
    pub rtol: f64,
    /// Whatever its size.
    pub atol: f64,
}

/// One element that was compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Deviation {
    /// Which capture, from 0.
    pub capture: usize,
    /// Where in it.
    pub index: Vec<usize>,
    /// The first capture's value.
    pub first: f64,
    /// This capture's value.
    pub found: f64,
    /// How far apart they may be; 0 where either is not finite.
    pub allowed: f64,
}

impl Deviation {
    /// How far apart they are; NaN where that has no value.
    pub fn distance(&self) -> f64 {
        (self.first - self.found).abs()
    }
}

/// The verdict.
#[derive(Clone, Debug, PartialEq)]
pub enum Invariance {
    /// All agree with the first; the nearest miss, `None` when there is no element.
    Static {
        /// The element that used most of what is allowed.
        worst: Option<Deviation>,
    },
    /// An element moved by more than is allowed: the one that did by most.
    Varies {
        /// Which.
        worst: Deviation,
    },
    /// A capture has another shape than the first.
    Reshaped {
        /// Which capture, from 0.
        capture: usize,
        /// The first one's shape.
        expected: Vec<usize>,
        /// Its own.
        found: Vec<usize>,
    },
    /// Too few captures to say anything.
    TooFew {
        /// At least so many.
        expected: usize,
        /// Given.
        found: usize,
    },
}

impl Invariance {
    /// Whether the content may be computed once.
    pub fn is_static(&self) -> bool {
        matches!(self, Invariance::Static { .. })
    }
}

/// Compares all captures of one loop with the first, as they are stored: each value is taken exactly, whatever its
/// dtype. Two equal values agree, infinities too; a NaN agrees with nothing. `least` is how many captures are
/// enough, and never below two: one capture agrees with itself.
pub fn invariance(
    captures: &[Tensor],
    tolerance: Tolerance,
    least: usize,
) -> Result<Invariance, CatalogError> {
    let least = least.max(2);
    let (Some(first), true) = (captures.first(), captures.len() >= least) else {
        return Ok(Invariance::TooFew {
            expected: least,
            found: captures.len(),
        });
    };
    let moved = captures.iter().position(|c| c.dims() != first.dims());
    if let Some(capture) = moved {
        return Ok(Invariance::Reshaped {
            capture,
            expected: first.dims().to_vec(),
            found: captures[capture].dims().to_vec(),
        });
    }
    let a = values(first)?;
    let mut worst: Option<(f64, Deviation)> = None;
    for (capture, t) in captures.iter().enumerate().skip(1) {
        for (at, (a, b)) in a.iter().zip(values(t)?).enumerate() {
            let (used, allowed) = used(*a, b, tolerance);
            if worst.as_ref().is_none_or(|(most, _)| used > *most) {
                let found = Deviation {
                    capture,
                    index: place(at, t.dims()),
                    first: *a,
                    found: b,
                    allowed,
                };
                worst = Some((used, found));
            }
        }
    }
    Ok(match worst {
        Some((used, worst)) if used > 1.0 => Invariance::Varies { worst },
        worst => Invariance::Static {
            worst: worst.map(|(_, d)| d),
        },
    })
}

/// The share of the allowed distance that is used, above 1 when it is exceeded, and the allowed distance.
fn used(a: f64, b: f64, t: Tolerance) -> (f64, f64) {
    let finite = a.is_finite() && b.is_finite();
    let allowed = if finite {
        t.atol + t.rtol * b.abs()
    } else {
        0.0
    };
    let distance = (a - b).abs();
    let share = if a == b {
        0.0
    } else if finite && distance <= allowed {
        distance / allowed
    } else if finite && allowed > 0.0 {
        // Just above the limit the quotient may round to 1.
        (distance / allowed).max(1.0 + f64::EPSILON)
    } else {
        f64::INFINITY
    };
    (share, allowed)
}

fn values(t: &Tensor) -> Result<Vec<f64>, CatalogError> {
    Ok(t.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

fn place(mut at: usize, dims: &[usize]) -> Vec<usize> {
    let mut index = vec![0; dims.len()];
    for (i, n) in dims.iter().enumerate().rev() {
        index[i] = at % n;
        at /= n;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const T: Tolerance = Tolerance {
        rtol: 0.1,
        atol: 0.5,
    };

    fn t(v: &[f32]) -> Tensor {
        Tensor::from_slice(v, (v.len() / 2, 2), &Device::Cpu).expect("tensor")
    }

    fn run(of: &[&[f32]]) -> Invariance {
        let captures: Vec<Tensor> = of.iter().map(|v| t(v)).collect();
        invariance(&captures, T, 2).expect("runs")
    }

    #[test]
    fn the_limit_belongs_to_it_and_grows_with_the_later_value() {
        // |10 - 11.5| = 1.5 <= 0.5 + 0.1 * 11.5 = 1.65; the other way round 0.5 + 0.1 * 10 = 1.5, the limit itself.
        let at = |a: f32, b: f32| run(&[&[a, 0.0], &[b, 0.0]]);
        assert!(at(10.0, 11.5).is_static());
        assert!(at(11.5, 10.0).is_static());
        assert!(!at(11.75, 10.0).is_static());
        assert!(at(0.0, 0.5).is_static() && at(0.0, -0.5).is_static());
    }

    #[test]
    fn the_worst_element_is_named_with_its_values() {
        let v = run(&[
            &[1.0, 2.0, 3.0, 4.0],
            &[1.0, 2.0, 3.0, 4.1],
            &[1.0, 9.0, 3.5, 4.0],
        ]);
        let Invariance::Varies { worst } = v else {
            panic!("{v:?}")
        };
        assert_eq!(
            (worst.capture, worst.index.as_slice()),
            (2, &[0usize, 1][..])
        );
        assert_eq!((worst.first, worst.found), (2.0, 9.0));
        assert!((worst.allowed - 1.4).abs() < 1e-12 && worst.distance() == 7.0);
        let Invariance::Static { worst: Some(d) } = run(&[&[1.0, 2.0], &[1.0, 2.1]]) else {
            panic!("varies")
        };
        assert_eq!(d.index, [0, 1]);
    }

    /// Neighbours agree, the last has left the first.
    #[test]
    fn a_slow_drift_is_seen() {
        let v = run(&[&[0.0, 0.0], &[0.4, 0.0], &[0.8, 0.0]]);
        assert!(matches!(v, Invariance::Varies { worst } if worst.capture == 2));
    }

    #[test]
    fn what_is_not_finite_agrees_with_its_equal_only() {
        let inf = f32::INFINITY;
        assert!(run(&[&[inf, -inf], &[inf, -inf]]).is_static());
        for (a, b) in [
            (inf, -inf),
            (inf, 1.0),
            (1.0, inf),
            (f32::NAN, f32::NAN),
            (1.0, f32::NAN),
        ] {
            assert!(!run(&[&[a, 0.0], &[b, 0.0]]).is_static(), "{a} {b}");
        }
    }

    #[test]
    fn too_few_and_reshaped() {
        let few = Invariance::TooFew {
            expected: 2,
            found: 1,
        };
        assert_eq!(run(&[&[1.0, 2.0]]), few);
        assert_eq!(invariance(&[t(&[1.0, 2.0])], T, 0).expect("runs"), few);
        let three = invariance(&[t(&[1.0, 2.0]), t(&[1.0, 2.0])], T, 3).expect("runs");
        assert!(matches!(
            three,
            Invariance::TooFew {
                expected: 3,
                found: 2
            }
        ));
        let v = run(&[&[1.0, 2.0], &[1.0, 2.0, 3.0, 4.0]]);
        assert!(matches!(v, Invariance::Reshaped { capture: 1, .. }));
        assert!(matches!(
            run(&[&[], &[]]),
            Invariance::Static { worst: None }
        ));
    }
}
