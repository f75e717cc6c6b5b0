//! Rotary embedding of one head.

use structures_plugin_api::sdk::rope::Layout;

/// Turns all channels of `head`: `a cos - b sin`, `b cos + a sin`. Tables have one entry a pair,
/// or, in layout half, one a channel.
pub fn turn(layout: Layout, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let pairs = head.len() / 2;
    for i in 0..pairs {
        let (a, b) = match layout {
            Layout::Half => (i, i + pairs),
            Layout::Interleaved => (2 * i, 2 * i + 1),
        };
        let second = if cos.len() == pairs { i } else { i + pairs };
        let (x, y) = (head[a], head[b]);
        head[a] = x * cos[i] - y * sin[i];
        head[b] = y * cos[second] + x * sin[second];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_turn_by_their_layout_and_table_width() {
        let (cos, sin) = ([0.0, 0.0], [1.0, 1.0]);
        let turned = |layout: Layout, cos: &[f32], sin: &[f32]| {
            let mut head = [1.0, 2.0, 3.0, 4.0];
            turn(layout, &mut head, cos, sin);
            head
        };
        assert_eq!(turned(Layout::Half, &cos, &sin), [-3.0, -4.0, 1.0, 2.0]);
        assert_eq!(
            turned(Layout::Interleaved, &cos, &sin),
            [-2.0, 1.0, -4.0, 3.0]
        );
        let (cos, sin) = ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]);
        assert_eq!(turned(Layout::Half, &cos, &sin), [1.0, 2.0, 1.0, 2.0]);
    }
}
