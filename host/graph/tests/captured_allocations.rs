//! A captured step allocates nothing while it replays, whatever its state holds.

#![allow(clippy::unwrap_used)]

#[path = "common/decoder.rs"]
mod decoder;

use std::sync::Arc;

use candle_core::{Device, Tensor};
use decoder::{graph, Random, Sizes};
use structures_graph::{check, Alone, Capture, Greedy, Session};

const SIZES: Sizes = Sizes {
    layers: 2,
    width: 32,
    ffn: 48,
    heads: 4,
    kv_heads: 2,
    head: 8,
    vocabulary: 40,
};

#[test]
fn replays_allocate_nothing() {
    let graph = Arc::new(graph(SIZES));
    check(&graph).unwrap();
    let s = Session::new(graph.clone(), &Random(graph)).unwrap();
    let mut state = s.new_state(1, 64);
    state.reserve().unwrap();
    let token = |t: u32| Tensor::new(&[[t]], &Device::Cpu).unwrap();
    let at = |p: u32| Tensor::new(&[p], &Device::Cpu).unwrap();
    let inputs = [token(7), at(0)];
    let capture = Capture {
        inputs: &inputs,
        state: &state,
        windows: &[],
        greedy: Some(Greedy {
            scores: 0,
            token: 0,
            position: 1,
        }),
        last_row: None,
    };
    let mut step = s.capture(&s.host_plan(), &capture).unwrap();
    assert!(step.manifest().allocating.is_empty());
    step.warm_up(&mut state, &Alone, 1).unwrap();
    let mut tokens = [0u32; 64];
    let made = allocation_counter::measure(|| {
        for t in &mut tokens {
            step.replay(&mut state, &Alone).unwrap();
            *t = step.choice().unwrap();
        }
    });
    assert_eq!((made.count_total, made.bytes_total), (0, 0));

    // The eager form of the same graph chooses the same tokens, and allocates.
    let mut eager = s.new_state(1, 64);
    let mut next = 7;
    let made = allocation_counter::measure(|| {
        for (i, t) in tokens.iter().enumerate() {
            let inputs = [token(next), at(i as u32)];
            let y = s.run(&s.host_plan(), &inputs, &mut eager, None).unwrap();
            let y = y[0].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            next = y
                .iter()
                .enumerate()
                .max_by(|a, b| a.1.total_cmp(b.1))
                .unwrap()
                .0 as u32;
            assert_eq!(next, *t, "token {i}");
        }
    });
    assert!(made.count_total > 1000);
}
