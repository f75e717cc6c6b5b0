//! A product with an optional bias: the shape of most slots that come in pairs.
//!
//! It owns the turn from the product's channel-major result to rows; what is added and rounded is
//! the structure's, handed in as a function of product and bias.

use structures_plugin_api::sdk::{BindRequest, Failure, Host, Tensor};

use crate::format::Format;
use crate::linear::Linear;

/// `x W + b`.
#[derive(Debug)]
pub struct Biased {
    linear: Linear,
    bias: Option<Vec<f32>>,
}

impl Biased {
    /// Binds a weight of dims `[K, N]` and the bias in slot `bias`, where that has one; `point` is
    /// where a quantising format's statistic was taken.
    pub fn bind(
        host: &Host,
        format: Format,
        weight: Tensor<'_>,
        bias: &str,
        request: &BindRequest<'_>,
        point: &str,
    ) -> Result<Self, Failure> {
        let linear = Linear::bind(host, format, &[weight], request, point)?;
        let bias = match request.weight(bias) {
            Some(_) => Some(request.weight_of_dims(bias, &[linear.n()])?.to_f32_vec()?),
            None => None,
        };
        Ok(Biased { linear, bias })
    }

    /// Leaves the bias out, whether there is one or not.
    #[must_use]
    pub fn without_bias(self) -> Self {
        Biased { bias: None, ..self }
    }

    /// Refuses to go without a bias.
    pub fn with_bias(self, slot: &str) -> Result<Self, Failure> {
        match self.bias {
            Some(_) => Ok(self),
            None => Err(Failure::refused(
                "weight_missing",
                format!("slot `{slot}` has no weight"),
            )),
        }
    }

    /// Output channels.
    pub fn n(&self) -> usize {
        self.linear.n()
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.linear.k()
    }

    /// Bytes of what is kept.
    pub fn bytes(&self) -> u64 {
        self.linear.bytes() + 4 * self.bias.as_ref().map_or(0, Vec::len) as u64
    }

    /// Fills `out`, `[rows, n]`, with `finish(index, product, bias)`; without a bias that is 0.
    /// `product` is scratch of the same size. `x` may be overwritten by the codes of a quantising
    /// format.
    pub fn apply(
        &self,
        host: &Host,
        x: &mut [f32],
        product: &mut [f32],
        out: &mut [f32],
        finish: impl Fn(usize, f32, f32) -> f32 + Sync,
    ) {
        let n = self.n();
        let rows = out.len() / n.max(1);
        self.linear.apply(host, x, rows, product);
        let product = &*product;
        host.parallel_chunks(out, n, |row, out| {
            for (channel, out) in out.iter_mut().enumerate() {
                let bias = self.bias.as_ref().map_or(0.0, |bias| bias[channel]);
                *out = finish(row * n + channel, product[channel * rows + row], bias);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, swapped};
    use structures_plugin_api::abi::Contract;
    use structures_plugin_api::describe::BindParams;
    use structures_plugin_api::DType;

    #[test]
    fn the_bias_is_added_where_there_is_one() {
        let (k, n, rows) = (5, 3, 2);
        let (w, b, x) = (noise(1, n * k), noise(2, n), noise(3, rows * k));
        let contract = Contract::capacity(DType::F32, 0);
        let request = BindRequest::new("f32", "s", BindParams::default(), &contract)
            .with_weight("b", Tensor::from_f32(&b, &[n]).expect("fits"));
        let host = Host::detached();
        let bind = |slot| Biased::bind(&host, Format::F32, swapped(&w, n, k), slot, &request, "x");
        let run = |biased: &Biased| {
            let (mut product, mut out) = (vec![0.0; rows * n], vec![0.0; rows * n]);
            biased.apply(&host, &mut x.clone(), &mut product, &mut out, |_, y, b| {
                y + b
            });
            out
        };
        let (with, without) = (bind("b").expect("binds"), bind("c").expect("binds"));
        for (i, (y, plain)) in run(&with).iter().zip(run(&without)).enumerate() {
            assert!((y - plain - b[i % n]).abs() < 1e-6);
        }
        assert_eq!((with.bytes(), without.bytes()), (72, 60));
        let missing = without.with_bias("c").expect_err("has none");
        assert_eq!(missing.code, "weight_missing");
        assert_eq!(with.without_bias().bytes(), 60);
    }
}
