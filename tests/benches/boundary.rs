//! What the plugin boundary costs a decode step: the same products of the x86 backend once through its library, as the host
//! loads and calls it, and once linked into this program.
//!
//! Run with `cargo bench --profile release -p structures-tests --bench boundary` after
//! `cargo build --release --workspace`. A step is SmolLM2-135M's 30 blocks (feed-forward, QKV, output projection) and its
//! head, one row, `w8a16`, one thread; 131 MB of weights a side, so that memory is read as a model reads it. Sides alternate
//! step by step, the first of a pair by turns; the ratio is the median of the pairs'.
//!
//! A call through the library also checks its views, counts, and guards against panics; linked in, none of that is there.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::time::Instant;

use structures_catalog::Catalog;
use structures_loader::{HostTensor, HostTensorMut, Staged};
use structures_plugin_api::abi::{CallCtx, Contract, DType};
use structures_plugin_api::sdk::{Backend, BindRequest, BoundForm, Host, Tensor, TensorMut};
use structures_plugin_x86::X86;
use structures_suite::cases::draft_of;
use structures_suite::executor::{Loaded, Request};
use structures_suite::judge::{Judge, Made};
use structures_suite::operand::{Data, Operand};
use structures_tests::build_dir;

const BLOCKS: usize = 30;
const PAIRS: usize = 101;
const LIBRARY: &str = "libstructures_plugin_x86.so";

/// One kind of seat: what it is bound with, what it is called with.
struct Kind {
    structure: &'static str,
    sizes: &'static [(&'static str, usize)],
    count: usize,
}

const KINDS: [Kind; 4] = [
    Kind {
        structure: "qkv_pack",
        sizes: &[
            ("M", 1),
            ("K", 576),
            ("N_0", 576),
            ("N_1", 192),
            ("N_2", 192),
        ],
        count: BLOCKS,
    },
    Kind {
        structure: "linear_proj",
        sizes: &[("M", 1), ("K", 576), ("N", 576)],
        count: BLOCKS,
    },
    Kind {
        structure: "decoder_ffn",
        sizes: &[("M", 1), ("D", 576), ("F", 1536)],
        count: BLOCKS,
    },
    Kind {
        structure: "linear_proj",
        sizes: &[("M", 1), ("K", 576), ("N", 49152)],
        count: 1,
    },
];

/// Both sides of the seats of a kind.
struct Seats {
    inputs: Vec<Option<Operand>>,
    outputs: Vec<Operand>,
    library: Vec<Staged>,
    linked: Vec<Box<dyn BoundForm>>,
}

fn f32s(operand: &Operand) -> &[f32] {
    match &operand.data {
        Data::F32(values) => values,
        _ => panic!("the boundary is f32"),
    }
}

/// A tensor of the SDK, whatever its strides are two axes of.
fn linked_tensor(operand: &Operand) -> Tensor<'_> {
    let (data, dims) = (f32s(operand), &operand.dims);
    match (dims.as_slice(), operand.strides.as_slice()) {
        (&[a, b], &[1, s]) if s == a && b > 1 => Tensor::from_f32(data, &[b, a])
            .unwrap()
            .transpose(0, 1)
            .unwrap(),
        _ => Tensor::from_f32(data, dims).unwrap(),
    }
}

fn seats(catalog: &Catalog, library: &Loaded, linked: &X86, kind: &Kind) -> Seats {
    let spec = catalog.get(kind.structure).unwrap();
    let declared = &library.plugin().description().forms;
    let form = declared
        .iter()
        .find(|f| f.structure == kind.structure && f.name == "w8a16")
        .unwrap();
    let wanted: BTreeMap<String, usize> = kind
        .sizes
        .iter()
        .map(|(s, n)| ((*s).to_string(), *n))
        .collect();
    let draft = draft_of(spec, form, &wanted)
        .unwrap()
        .expect(kind.structure);
    let Made::Ready(case) = Judge::new(spec, form, &draft).prepare(0, false).unwrap() else {
        panic!("{}: no such case", kind.structure);
    };
    let request: &Request = case.request();
    let contract = Contract::capacity(DType::F32, request.capacity);
    let bind = || {
        let mut asked = BindRequest::new(
            &request.form,
            &request.span,
            request.params.clone(),
            &contract,
        );
        for (slot, weight) in &request.weights {
            asked = asked.with_weight(slot, linked_tensor(weight));
        }
        linked.bind(&asked).unwrap()
    };
    Seats {
        inputs: case.inputs(),
        outputs: case.outputs(),
        library: (0..kind.count)
            .map(|_| library.bind_form(request).unwrap())
            .collect(),
        linked: (0..kind.count).map(|_| bind()).collect(),
    }
}

impl Seats {
    fn through_the_library(&mut self, at: usize) {
        let inputs: Vec<HostTensor<'_>> = self
            .inputs
            .iter()
            .map(|o| match o {
                Some(o) => HostTensor::new(f32s(o), &o.dims).unwrap(),
                None => HostTensor::ABSENT,
            })
            .collect();
        let mut outputs: Vec<HostTensorMut<'_>> = self
            .outputs
            .iter_mut()
            .map(|o| o.view_mut().unwrap())
            .collect();
        self.library[at]
            .call(&inputs, &mut outputs, &mut [])
            .unwrap();
    }

    fn linked_in(&mut self, at: usize) {
        let inputs: Vec<Tensor<'_>> = self
            .inputs
            .iter()
            .map(|o| match o {
                Some(o) => Tensor::from_f32(f32s(o), &o.dims).unwrap(),
                None => Tensor::ABSENT,
            })
            .collect();
        let mut outputs: Vec<TensorMut<'_>> = self
            .outputs
            .iter_mut()
            .map(|o| match &mut o.data {
                Data::F32(values) => TensorMut::from_f32(values, &o.dims).unwrap(),
                _ => panic!("the boundary is f32"),
            })
            .collect();
        let made = self.linked[at].call(&CallCtx::NONE, &inputs, &mut outputs, &mut []);
        made.unwrap();
    }
}

fn step(all: &mut [Seats], call: fn(&mut Seats, usize)) -> f64 {
    let begun = Instant::now();
    for block in 0..BLOCKS {
        all[..3].iter_mut().for_each(|seats| call(seats, block));
    }
    call(&mut all[3], 0);
    begun.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    // `cargo test --benches` asks for this.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    std::env::set_var("STRUCTURES_THREADS", "1");
    let catalog = Catalog::builtin().unwrap();
    let library = Loaded::open(&build_dir().join(LIBRARY)).unwrap();
    let linked = X86::open(Host::detached()).unwrap();
    let mut all: Vec<Seats> = KINDS
        .iter()
        .map(|kind| seats(&catalog, &library, &linked, kind))
        .collect();
    for seats in &mut all {
        seats.through_the_library(0);
        let bits = |s: &Seats| -> Vec<Vec<u32>> {
            let each = |o: &Operand| f32s(o).iter().map(|v| v.to_bits()).collect();
            s.outputs.iter().map(each).collect()
        };
        let made = bits(seats);
        seats.linked_in(0);
        assert_eq!(made, bits(seats), "both sides compute the same");
    }
    let sides: [fn(&mut Seats, usize); 2] = [Seats::through_the_library, Seats::linked_in];
    for side in sides {
        step(&mut all, side);
    }
    let (mut times, mut ratios) = ([Vec::new(), Vec::new()], Vec::new());
    for pair in 0..PAIRS {
        let mut took = [0.0; 2];
        for turn in 0..2 {
            let side = (pair + turn) % 2;
            took[side] = step(&mut all, sides[side]);
            times[side].push(took[side]);
        }
        ratios.push(took[0] / took[1]);
    }
    let mut sorted = ratios.clone();
    sorted.sort_by(f64::total_cmp);
    let [library, linked] = times.map(median);
    println!(
        "a step of {} calls, {PAIRS} pairs: through the library {:.3} ms, linked in {:.3} ms; the library takes {:+.2} % \
         (quartiles {:+.2} % and {:+.2} %)",
        3 * BLOCKS + 1,
        library * 1e3,
        linked * 1e3,
        (median(ratios) - 1.0) * 100.0,
        (sorted[PAIRS / 4] - 1.0) * 100.0,
        (sorted[PAIRS * 3 / 4] - 1.0) * 100.0,
    );
}
