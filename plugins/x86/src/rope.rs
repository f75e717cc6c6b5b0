//! Rotary embedding of the heads of a row.

use structures_plugin_api::sdk::rope::Layout;

use crate::isa::vectorised;

vectorised! {
    /// Turns all channels of each head of `heads`: `a cos - b sin`, `b cos + a sin`. The heads are `stride` apart and
    /// `width` of their channels turn. Tables have one entry a pair, or, in layout half, one a channel.
    pub fn turn(layout: Layout, heads: &mut [f32], stride: usize, width: usize, cos: &[f32], sin: &[f32]) {
        let pairs = width / 2;
        for head in heads.chunks_exact_mut(stride) {
            let head = &mut head[..width];
            match layout {
                Layout::Half => {
                    let second = if cos.len() == pairs { 0 } else { pairs };
                    let (a, b) = head.split_at_mut(pairs);
                    let (cos_a, sin_a) = (&cos[..pairs], &sin[..pairs]);
                    let (cos_b, sin_b) = (&cos[second..][..pairs], &sin[second..][..pairs]);
                    for i in 0..pairs {
                        let (x, y) = (a[i], b[i]);
                        a[i] = x * cos_a[i] - y * sin_a[i];
                        b[i] = y * cos_b[i] + x * sin_b[i];
                    }
                }
                Layout::Interleaved => {
                    for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                        let (x, y) = (pair[0], pair[1]);
                        pair[0] = x * cos - y * sin;
                        pair[1] = y * cos + x * sin;
                    }
                }
            }
        }
    }
}
