//! A product `x W` in one of the number formats.
//!
//! The result is channel-major, `[n, rows]`: a thread owns a run of channels and so a run of
//! memory, whatever the number of rows, and weights are read once. Turning it is left to the pass
//! that follows anyway (bias, activation, residual).

use structures_plugin_api::formats::{
    e4m3_to_f32, f32_to_e4m3_saturating, fp8_scale, ActivationRounding, Balance,
};
use structures_plugin_api::sdk::{BindRequest, Failure, Host, Weight};

use crate::format::Format;
use crate::packed::Packed;
use crate::wire::wired;

/// Inputs whose weights are widened at a time: with four channels 8 KiB, half of a first-level
/// cache together with the matching part of a row.
const BLOCK: usize = 512;
/// Channels that share one pass over the rows.
const GROUP: usize = 4;
/// Multiplications that are worth waking a thread for: about 20 microseconds.
const GRAIN: usize = 1 << 16;
/// Partial sums of a dot product, so that it can be vectorised.
const LANES: usize = 16;

/// A bound product.
#[derive(Debug)]
pub struct Linear {
    weight: Packed,
    activation: Activation,
}

/// What is done to the values before they are multiplied.
#[derive(Debug)]
enum Activation {
    /// E4M3 codes under a scale, which is applied to the sums; `given` when they come as codes.
    Codes { scale: f32, given: bool },
    /// Times a factor a channel where there are factors, then rounded.
    Rounded {
        inverse: Vec<f32>,
        rounding: ActivationRounding,
    },
}

impl Linear {
    /// Packs weights of dims `[K, N_i]` as one; `point` is where the activation's statistic was
    /// taken. An empty one is none: what the product reads is no point, and is taken as it comes.
    pub fn bind<'a, W: Copy + Into<Weight<'a>>>(
        host: &Host,
        format: Format,
        parts: &[W],
        request: &BindRequest<'_>,
        point: &str,
    ) -> Result<Self, Failure> {
        let rounded = |name: &str, amax| match ActivationRounding::of(name, amax) {
            Some(rounding) => Ok(rounding),
            None => Err(Failure::refused("format_no_variant", name)),
        };
        let mut factors = None;
        let activation = match format {
            _ if point.is_empty() => Activation::plain(),
            Format::Fp8Static => Activation::Codes {
                scale: fp8_scale(request.scalar_statistic(point, "amax")?),
                given: wired(request, point)?,
            },
            _ => {
                let amax = match format.calibrated() {
                    true => Some(request.scalar_statistic(point, "amax")?),
                    false => None,
                };
                if format.balances() {
                    let amax = request.statistic(point, "amax", "channel")?;
                    let given = &request.params.scheme;
                    let balance = Balance::from_params(|name| given.get(name));
                    let balance = balance.map_err(|why| Failure::refused("scheme_invalid", why))?;
                    factors = Some(balance.factors(&amax));
                }
                Activation::Rounded {
                    inverse: factors.iter().flatten().map(|s| 1.0 / s).collect(),
                    rounding: rounded(format.activations(), amax)?,
                }
            }
        };
        Ok(Linear {
            weight: Packed::pack(host, format.weights(), parts, factors.as_deref())?,
            activation,
        })
    }

    /// Whether it reads codes: `x` holds their values, without the scale.
    pub fn coded(&self) -> bool {
        matches!(self.activation, Activation::Codes { given: true, .. })
    }

    /// Output channels.
    pub fn n(&self) -> usize {
        self.weight.n()
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.weight.k()
    }

    /// Bytes of packed weights.
    pub fn bytes(&self) -> u64 {
        self.weight.bytes()
    }

    /// `out[channel][row] = sum over k of x[row][k] W[k][channel]`. `x` is overwritten by its own
    /// codes' values where activations are quantised, unless it comes as them.
    pub fn apply(&self, host: &Host, x: &mut [f32], rows: usize, out: &mut [f32]) {
        let (n, k) = (self.n(), self.k());
        debug_assert_eq!((x.len(), out.len()), (rows * k, rows * n));
        if rows == 0 {
            return;
        }
        match &self.activation {
            Activation::Codes { given: true, .. } => {}
            Activation::Codes { scale, .. } => {
                host.parallel_chunks(x, GRAIN / 8, |_, values| {
                    for value in values {
                        *value = e4m3_to_f32(f32_to_e4m3_saturating(*value / scale));
                    }
                });
            }
            Activation::Rounded { inverse, rounding } => {
                if *rounding != ActivationRounding::None || !inverse.is_empty() {
                    let rows = (GRAIN / 8 / k.max(1)).max(1);
                    host.parallel_chunks(x, rows * k, |_, values| {
                        for row in values.chunks_mut(k) {
                            row.iter_mut().zip(inverse).for_each(|(v, f)| *v *= f);
                        }
                        rounding.round(values, k);
                    });
                }
            }
        }
        let x = &*x;
        let channels = (GRAIN / (rows * k).max(1)).clamp(GROUP, n.max(GROUP));
        let channels = channels.next_multiple_of(GROUP);
        host.parallel_chunks(out, channels * rows, |piece, out| {
            for (group, out) in out.chunks_mut(GROUP * rows).enumerate() {
                let first = piece * channels + group * GROUP;
                self.group(first, x, rows, out);
            }
        });
    }

    /// Up to [`GROUP`] channels from `first` on.
    fn group(&self, first: usize, x: &[f32], rows: usize, out: &mut [f32]) {
        let k = self.k();
        let mut buffers = [[0.0; BLOCK]; GROUP];
        out.fill(0.0);
        for from in (0..k).step_by(BLOCK) {
            let len = BLOCK.min(k - from);
            for ((c, out), buffer) in out.chunks_exact_mut(rows).enumerate().zip(&mut buffers) {
                let weights = self.weight.values(first + c, from, &mut buffer[..len]);
                for (sum, x) in out.iter_mut().zip(x.chunks_exact(k)) {
                    *sum += dot(&x[from..from + len], weights);
                }
            }
        }
        for (c, out) in out.chunks_exact_mut(rows).enumerate() {
            // One factor, formed in f32: `alpha = f32(s_act) * f32(s_w)`.
            let alpha = self.activation.scale() * self.weight.scale(first + c);
            if alpha != 1.0 {
                out.iter_mut().for_each(|sum| *sum *= alpha);
            }
        }
    }
}

impl Activation {
    fn plain() -> Self {
        Activation::Rounded {
            inverse: Vec::new(),
            rounding: ActivationRounding::None,
        }
    }

    /// What is left to be applied to the sums.
    fn scale(&self) -> f32 {
        match self {
            Activation::Codes { scale, .. } => *scale,
            Activation::Rounded { .. } => 1.0,
        }
    }
}

/// Dot product of two equally long slices.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let (a_lanes, b_lanes) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_lanes
        .remainder()
        .iter()
        .zip(b_lanes.remainder())
        .map(|(a, b)| a * b)
        .sum();
    for (a, b) in a_lanes.zip(b_lanes) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + tail
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{channel_amax, noise, request_with_amax, transposed};
    use structures_plugin_api::formats::{amax, round_weight, WeightMatrix};
    use structures_plugin_api::sdk::Tensor;

    /// The product in f64, on weights and activations rounded as the format says.
    fn expected(format: Format, w: &[f32], x: &[f32], n: usize, k: usize) -> Vec<f64> {
        let (mut w, mut x) = (w.to_vec(), x.to_vec());
        let factors = match format.balances() {
            true => Balance::default().factors(&channel_amax(&x, k)),
            false => vec![1.0; k],
        };
        w.iter_mut()
            .zip(factors.iter().cycle())
            .for_each(|(w, s)| *w *= s);
        x.iter_mut()
            .zip(factors.iter().cycle())
            .for_each(|(x, s)| *x *= 1.0 / s);
        round_weight(format.weights(), WeightMatrix::out_in(&mut w, n, k));
        let amax = format.calibrated().then(|| amax(&x));
        ActivationRounding::of(format.activations(), amax)
            .expect("known")
            .round(&mut x, k);
        let rows = x.len() / k;
        (0..n * rows)
            .map(|i| {
                let (w, x) = (&w[i / rows * k..][..k], &x[i % rows * k..][..k]);
                w.iter()
                    .zip(x)
                    .map(|(w, x)| f64::from(*w) * f64::from(*x))
                    .sum()
            })
            .collect()
    }

    const EVERY: [Format; 10] = [
        Format::F32,
        Format::Bf16,
        Format::Bf16Pack,
        Format::W8a16Static,
        Format::W4a16Static,
        Format::W8a8Static,
        Format::W8a8Dynamic,
        Format::Fp8Static,
        Format::Nvfp4Dynamic,
        Format::Nvfp4Balance,
    ];

    #[test]
    fn every_format_computes_its_own_definition() {
        let host = Host::detached();
        for (n, k, rows) in [
            (1, 1, 1),
            (7, 23, 1),
            (33, 600, 5),
            (130, 1030, 2),
            (5, 64, 70),
        ] {
            let (w, x) = (noise(n as u64, n * k), noise(k as u64, rows * k));
            let stored = transposed(&w, n, k);
            let weight = Tensor::from_f32(&stored, &[k, n]).expect("fits");
            for format in EVERY {
                let linear = request_with_amax(&["x"], &x, k, |request| {
                    Linear::bind(&host, format, &[weight], request, "x")
                })
                .expect("binds");
                let mut out = vec![f32::NAN; n * rows];
                linear.apply(&host, &mut x.clone(), rows, &mut out);
                let want = expected(format, &w, &x, n, k);
                let largest = want.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
                for (got, want) in out.iter().zip(&want) {
                    let error = (f64::from(*got) - want).abs();
                    assert!(
                        error <= 1e-6 * largest,
                        "{format:?} {n}x{k}x{rows}: {got} {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn fp8_needs_its_statistic_and_no_rows_are_no_work() {
        let host = Host::detached();
        let w = noise(1, 6);
        let weight = Tensor::from_f32(&w, &[2, 3]).expect("fits");
        let bind = |format, point: &str| {
            request_with_amax(&["x"], &[1.0], 1, |request| {
                Linear::bind(&host, format, &[weight], request, point)
            })
        };
        assert_eq!(
            bind(Format::Fp8Static, "y").expect_err("no y").code,
            "statistic_missing"
        );
        bind(Format::F32, "y")
            .expect("needs none")
            .apply(&host, &mut [], 0, &mut []);
    }
}
