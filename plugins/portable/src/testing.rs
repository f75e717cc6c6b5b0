//! What the unit tests of this crate share.

use structures_plugin_api::abi::Contract;
use structures_plugin_api::describe::BindParams;
use structures_plugin_api::formats::amax;
use structures_plugin_api::sdk::{BindRequest, Tensor};
use structures_plugin_api::DType;

/// Seeded values in `-1..1`, xorshift64*.
pub fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
            bits as f32 / (1_u32 << 23) as f32 - 1.0
        })
        .collect()
}

/// Row-major `[rows, columns]` turned.
pub fn transposed(data: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns)
        .map(|i| data[i % rows * columns + i / rows])
        .collect()
}

/// A slot of dims `[k, n]` whose memory is `[n, k]`: how a host shows a stored linear weight.
pub fn swapped(data: &[f32], n: usize, k: usize) -> Tensor<'_> {
    Tensor::from_f32(data, &[n, k])
        .and_then(|t| t.transpose(0, 1))
        .expect("fits")
}

/// Largest absolute value of each of `k` channels.
pub fn channel_amax(x: &[f32], k: usize) -> Vec<f32> {
    let of = |channel: usize| {
        x.iter()
            .skip(channel)
            .step_by(k)
            .fold(0.0, |m: f32, v| m.max(v.abs()))
    };
    (0..k).map(of).collect()
}

/// Runs `f` on a request that has the amax of `x` at each point, of the tensor and of its `k`
/// channels.
pub fn request_with_amax<R>(
    points: &[&str],
    x: &[f32],
    k: usize,
    f: impl FnOnce(&BindRequest<'_>) -> R,
) -> R {
    let contract = Contract::capacity(DType::F32, 0);
    let value = [amax(x)];
    let names: Vec<String> = points
        .iter()
        .map(|point| format!("{point}|amax|tensor"))
        .collect();
    let channels = channel_amax(x, k);
    let of_channels: Vec<String> = points
        .iter()
        .map(|point| format!("{point}|amax|channel"))
        .collect();
    let mut request = BindRequest::new("f", "s", BindParams::default(), &contract);
    for name in &names {
        request = request.with_statistic(name, Tensor::from_f32(&value, &[]).expect("fits"));
    }
    for name in &of_channels {
        request = request.with_statistic(name, Tensor::from_f32(&channels, &[k]).expect("fits"));
    }
    f(&request)
}
