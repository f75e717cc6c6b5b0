//! A form on the simulated device: a form of the CPU between two copies.

use std::sync::{Arc, Mutex};

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BoundForm, Failure, Tensor, TensorMut};

use super::work::{Body, Data, Inputs, Value, Work};
use super::Sim;

/// Lays `inner` on the device.
pub fn place(sim: Arc<Sim>, inner: Box<dyn BoundForm>) -> Box<dyn BoundForm> {
    let facts = inner.facts();
    Box::new(Placed {
        sim,
        facts,
        inner: Arc::new(Inner(Mutex::new(inner))),
    })
}

struct Placed {
    sim: Arc<Sim>,
    facts: FormFacts,
    inner: Arc<Inner>,
}

/// A form that recorded work may call after its handle was released.
struct Inner(Mutex<Box<dyn BoundForm>>);

impl Body for Inner {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        states: &mut [Value],
    ) -> Result<(), Failure> {
        // The forms of the CPU take whole numbers as floats.
        let floats = |value: &Value| match &value.data {
            Data::F32(values) => values.clone(),
            Data::I64(values) => values.iter().map(|v| *v as f32).collect(),
        };
        let read: Vec<Option<(Vec<f32>, &[usize])>> = inputs
            .iter()
            .map(|v| v.as_ref().map(|v| (floats(v), v.dims.as_slice())))
            .collect();
        let read = read.iter().map(|staged| match staged {
            Some((values, dims)) => Tensor::from_f32(values, dims),
            None => Ok(Tensor::ABSENT),
        });
        let read = read.collect::<Result<Vec<_>, _>>()?;
        let (mut written, mut updated) = (staged(outputs)?, staged(states)?);
        let mut inner = self.0.lock().unwrap_or_else(|poison| poison.into_inner());
        inner.call(&CallCtx::NONE, &read, &mut written, &mut updated)
    }
}

/// Values as tensors to be written.
fn staged(values: &mut [Value]) -> Result<Vec<TensorMut<'_>>, Failure> {
    let each = values.iter_mut().map(|value| {
        let Value { data, dims } = value;
        match data {
            Data::F32(values) => TensorMut::from_f32(values, dims),
            Data::I64(_) => Err(Failure::invalid("view_dtype", "expected f32, found i64")),
        }
    });
    each.collect()
}

impl BoundForm for Placed {
    fn facts(&self) -> FormFacts {
        self.facts
    }

    fn call(
        &mut self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let inner = Arc::clone(&self.inner) as Arc<dyn Body>;
        let work = Work::new("", inner, inputs, outputs, states)?;
        self.sim.enqueue(ctx.queue.addr() as u64, work)
    }
}
