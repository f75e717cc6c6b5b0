//! Operations of a host's graph on the simulated device: what a decoder's step has beside its forms, so that a whole step
//! can stay there, to the choice of the next token.
//!
//! They read and write the device's memory alone. What else a host has between two seats it does itself, with copies.

mod attention;
mod choice;
mod elementwise;
mod lookup;
mod product;
mod turned;

use std::sync::Arc;

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::work::{Body, Value, Work};
use super::Sim;

/// What a bind makes: the computation, and bytes of parameters it keeps.
type Bound = Result<(Arc<dyn Body>, u64), Failure>;

/// A kind and what binds it.
type Row = (&'static str, fn(&BindRequest<'_>) -> Bound);

/// What is executed.
const TABLE: &[Row] = &[
    ("add", elementwise::add),
    ("mul", elementwise::mul),
    ("linear", product::linear),
    ("act", elementwise::act),
    ("rms_norm", elementwise::rms_norm),
    ("embedding", lookup::embedding),
    ("rope_table", lookup::rope_table),
    ("rope", turned::rope),
    ("transpose", turned::transpose),
    ("contiguous", turned::contiguous),
    ("attention", attention::attention),
    ("kv_append", attention::kv_append),
    ("argmax", choice::argmax),
];

/// What is declared.
pub fn kinds() -> Vec<String> {
    TABLE.iter().map(|(kind, _)| (*kind).to_string()).collect()
}

/// Binds one of [`kinds`].
pub fn bind(
    sim: &Arc<Sim>,
    kind: &str,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let Some((kind, bind)) = TABLE.iter().find(|(known, _)| *known == kind) else {
        let what = format!("the simulated device does not execute `{kind}`");
        return Err(Failure::refused("form_unknown", what));
    };
    let (body, packed_bytes) = bind(request)?;
    Ok(Box::new(Operation {
        sim: Arc::clone(sim),
        kind,
        body,
        packed_bytes,
    }))
}

struct Operation {
    sim: Arc<Sim>,
    kind: &'static str,
    body: Arc<dyn Body>,
    packed_bytes: u64,
}

impl BoundForm for Operation {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: self.packed_bytes,
            ..FormFacts::default()
        }
    }

    fn call(
        &mut self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let work = Work::new(self.kind, Arc::clone(&self.body), inputs, outputs, states)?;
        self.sim.enqueue(ctx.queue.addr() as u64, work)
    }
}

/// The input at a position.
fn given(inputs: &[Option<Value>], at: usize) -> Result<&Value, Failure> {
    let found = inputs.get(at).and_then(Option::as_ref);
    found.ok_or_else(|| Failure::invalid("view_absent", format!("input {at} is absent")))
}

/// The output or state at a position.
fn filled(values: &mut [Value], at: usize) -> Result<&mut Value, Failure> {
    let absent = || Failure::invalid("view_absent", format!("output {at} is absent"));
    values.get_mut(at).ok_or_else(absent)
}

/// Puts values where as many belong.
fn fill(to: &mut Value, made: Vec<f32>) -> Result<(), Failure> {
    let dims = to.dims.clone();
    let values = to.floats_mut()?;
    if made.len() != values.len() {
        let what = format!("an output of dims {dims:?} for {} values", made.len());
        return Err(Failure::invalid("dims_inconsistent", what));
    }
    *values = made;
    Ok(())
}
