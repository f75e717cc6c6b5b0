//! What the simulated device is given to do: a computation from values that lie there to values that lie there.
//!
//! Work knows addresses, not contents, so it can be done at once or recorded and done again ([`super::Sim::enqueue`]):
//! what it reads is what lies there then.

use std::sync::Arc;

use structures_plugin_api::sdk::{Failure, Tensor, TensorMut};
use structures_plugin_api::DType;

use super::{Sim, INDEX};

/// A tensor on the device.
#[derive(Clone, Debug)]
pub struct Laid {
    address: u64,
    dtype: DType,
    dims: Vec<usize>,
}

/// Elements, on this side.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    F32(Vec<f32>),
    I64(Vec<i64>),
}

/// A tensor's elements, on this side.
#[derive(Clone, Debug)]
pub struct Value {
    pub data: Data,
    pub dims: Vec<usize>,
}

impl Value {
    /// Its elements, which must be f32.
    pub fn floats(&self) -> Result<&[f32], Failure> {
        match &self.data {
            Data::F32(values) => Ok(values),
            Data::I64(_) => Err(Failure::invalid("view_dtype", "expected f32, found i64")),
        }
    }

    pub fn floats_mut(&mut self) -> Result<&mut Vec<f32>, Failure> {
        match &mut self.data {
            Data::F32(values) => Ok(values),
            Data::I64(_) => Err(Failure::invalid("view_dtype", "expected f32, found i64")),
        }
    }

    /// Its elements, which must be i64.
    pub fn whole(&self) -> Result<&[i64], Failure> {
        match &self.data {
            Data::I64(values) => Ok(values),
            Data::F32(_) => Err(Failure::invalid("view_dtype", "expected i64, found f32")),
        }
    }
}

/// What a computation reads; absent optionals are `None`.
pub type Inputs<'v> = &'v [Option<Value>];

/// A computation. What it leaves alone in outputs and states stays as it was.
pub trait Body: Send + Sync {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        states: &mut [Value],
    ) -> Result<(), Failure>;
}

/// One call.
#[derive(Clone)]
pub struct Work {
    /// The host operation it is; empty for a form.
    pub kind: &'static str,
    body: Arc<dyn Body>,
    inputs: Vec<Option<Laid>>,
    outputs: Vec<Laid>,
    states: Vec<Laid>,
}

impl Laid {
    /// `None` for an absent optional.
    fn of(tensor: &Tensor<'_>) -> Result<Option<Laid>, Failure> {
        if tensor.is_absent() {
            return Ok(None);
        }
        let address = tensor.device_address();
        let address = address.filter(|_| tensor.device() == INDEX);
        let address = address.ok_or_else(|| {
            let what = format!("on device {}, expected {INDEX}", tensor.device());
            Failure::invalid("view_device", what)
        })?;
        let dtype = tensor
            .dtype()
            .filter(|d| [DType::F32, DType::I64].contains(d));
        let (Some(dtype), true) = (dtype, tensor.is_contiguous()) else {
            let what = "expected contiguous f32 or i64";
            return Err(Failure::invalid("view_layout", what));
        };
        let dims = tensor.dims().iter().map(|dim| *dim as usize).collect();
        Ok(Some(Laid {
            address,
            dtype,
            dims,
        }))
    }

    fn written(tensor: &TensorMut<'_>) -> Result<Laid, Failure> {
        let absent = || Failure::invalid("view_absent", "an output is absent");
        Laid::of(&tensor.as_tensor())?.ok_or_else(absent)
    }

    fn bytes(&self) -> usize {
        self.dtype.size() * self.dims.iter().product::<usize>()
    }

    fn read(&self, sim: &Sim, queue: u64) -> Result<Value, Failure> {
        let bytes = sim.on_queue(queue, |state, _| {
            Ok(state.memory.at(self.address, self.bytes())?.to_vec())
        })?;
        let data = match self.dtype {
            DType::I64 => Data::I64(each(&bytes, i64::from_le_bytes)),
            _ => Data::F32(each(&bytes, f32::from_le_bytes)),
        };
        Ok(Value {
            data,
            dims: self.dims.clone(),
        })
    }

    fn write(&self, sim: &Sim, queue: u64, value: &Value) -> Result<(), Failure> {
        let bytes: Vec<u8> = match &value.data {
            Data::F32(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Data::I64(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        if bytes.len() != self.bytes() {
            let what = format!("{} bytes for dims {:?}", bytes.len(), self.dims);
            return Err(Failure::invalid("dims_inconsistent", what));
        }
        sim.on_queue(queue, |state, _| {
            state
                .memory
                .at_mut(self.address, bytes.len())?
                .copy_from_slice(&bytes);
            Ok(())
        })
    }
}

fn each<const N: usize, T>(bytes: &[u8], make: fn([u8; N]) -> T) -> Vec<T> {
    let whole = bytes.chunks_exact(N).map(|chunk| {
        let mut bytes = [0; N];
        bytes.copy_from_slice(chunk);
        make(bytes)
    });
    whole.collect()
}

impl Work {
    /// A call with these tensors.
    pub fn new(
        kind: &'static str,
        body: Arc<dyn Body>,
        inputs: &[Tensor<'_>],
        outputs: &[TensorMut<'_>],
        states: &[TensorMut<'_>],
    ) -> Result<Self, Failure> {
        Ok(Work {
            kind,
            body,
            inputs: inputs.iter().map(Laid::of).collect::<Result<_, _>>()?,
            outputs: outputs
                .iter()
                .map(Laid::written)
                .collect::<Result<_, _>>()?,
            states: states.iter().map(Laid::written).collect::<Result<_, _>>()?,
        })
    }

    /// A call whose only state is one number.
    #[cfg(test)]
    pub fn on_cell(body: Arc<dyn Body>, address: u64) -> Self {
        Work {
            kind: "",
            body,
            inputs: Vec::new(),
            outputs: Vec::new(),
            states: vec![Laid {
                address,
                dtype: DType::F32,
                dims: vec![1],
            }],
        }
    }

    /// Does it.
    pub fn run(&self, sim: &Sim, queue: u64) -> Result<(), Failure> {
        let read = |laid: &Laid| laid.read(sim, queue);
        let inputs = self
            .inputs
            .iter()
            .map(|laid| laid.as_ref().map(read).transpose());
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let mut outputs = self
            .outputs
            .iter()
            .map(read)
            .collect::<Result<Vec<_>, _>>()?;
        let mut states = self
            .states
            .iter()
            .map(read)
            .collect::<Result<Vec<_>, _>>()?;
        self.body.run(&inputs, &mut outputs, &mut states)?;
        sim.inside(self.kind);
        let made = self.outputs.iter().zip(&outputs);
        let kept = self.states.iter().zip(&states);
        let mut written = made.chain(kept);
        written.try_for_each(|(laid, value)| laid.write(sim, queue, value))
    }
}
