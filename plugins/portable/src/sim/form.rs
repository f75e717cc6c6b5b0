//! A form on the simulated device: a form of the CPU between two copies.

use std::sync::Arc;

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BoundForm, Failure, Tensor, TensorMut};
use structures_plugin_api::DType;

use super::{Sim, INDEX};

/// Lays `inner` on the device.
pub fn place(sim: Arc<Sim>, inner: Box<dyn BoundForm>) -> Box<dyn BoundForm> {
    Box::new(Placed { sim, inner })
}

struct Placed {
    sim: Arc<Sim>,
    inner: Box<dyn BoundForm>,
}

/// A tensor's values on this side, with its dims; `None` for an absent optional.
type Staged = Option<(Vec<f32>, Vec<usize>)>;

/// Address and bytes of a tensor of this device.
fn place_of(tensor: &Tensor<'_>, dtype: DType) -> Result<(u64, usize), Failure> {
    let address = tensor
        .device_address()
        .filter(|_| tensor.device() == INDEX)
        .ok_or_else(|| {
            let what = format!("on device {}, expected {INDEX}", tensor.device());
            Failure::invalid("view_device", what)
        })?;
    if tensor.dtype() != Some(dtype) || !tensor.is_contiguous() {
        let what = format!("expected contiguous {}", dtype.name());
        return Err(Failure::invalid("view_layout", what));
    }
    Ok((address, dtype.size() * tensor.len()))
}

/// The bytes of a tensor of this device.
pub fn read(sim: &Sim, queue: u64, tensor: &Tensor<'_>, dtype: DType) -> Result<Vec<u8>, Failure> {
    let (address, bytes) = place_of(tensor, dtype)?;
    sim.on_queue(queue, |state, _| {
        Ok(state.memory.at(address, bytes)?.to_vec())
    })
}

/// Fills a tensor of this device.
pub fn write(sim: &Sim, queue: u64, tensor: &Tensor<'_>, values: &[f32]) -> Result<(), Failure> {
    let (address, bytes) = place_of(tensor, DType::F32)?;
    sim.on_queue(queue, |state, _| {
        let to = state.memory.at_mut(address, bytes)?.chunks_exact_mut(4);
        to.zip(values)
            .for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
        Ok(())
    })
}

impl Placed {
    fn fetch(&self, queue: u64, tensor: &Tensor<'_>) -> Result<Staged, Failure> {
        if tensor.is_absent() {
            return Ok(None);
        }
        let bytes = read(&self.sim, queue, tensor, DType::F32)?;
        let each = bytes.chunks_exact(4);
        let values = each
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        let dims = tensor.dims().iter().map(|dim| *dim as usize).collect();
        Ok(Some((values, dims)))
    }

    fn store_all(
        &self,
        queue: u64,
        tensors: &[TensorMut<'_>],
        staged: &[Staged],
    ) -> Result<(), Failure> {
        let mut each = tensors.iter().zip(staged);
        each.try_for_each(|(tensor, staged)| self.store(queue, &tensor.as_tensor(), staged))
    }

    fn store(&self, queue: u64, tensor: &Tensor<'_>, staged: &Staged) -> Result<(), Failure> {
        let Some((values, _)) = staged else {
            return Ok(());
        };
        write(&self.sim, queue, tensor, values)
    }
}

impl BoundForm for Placed {
    fn facts(&self) -> FormFacts {
        self.inner.facts()
    }

    fn call(
        &mut self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let queue = ctx.queue.addr() as u64;
        let fetch = |tensors: &[TensorMut<'_>]| -> Result<Vec<Staged>, Failure> {
            let each = tensors.iter().map(|t| self.fetch(queue, &t.as_tensor()));
            each.collect()
        };
        let read: Vec<Staged> = inputs
            .iter()
            .map(|tensor| self.fetch(queue, tensor))
            .collect::<Result<_, _>>()?;
        let (mut written, mut updated) = (fetch(outputs)?, fetch(states)?);
        let read: Vec<Tensor<'_>> = read
            .iter()
            .map(|staged| match staged {
                Some((values, dims)) => Tensor::from_f32(values, dims),
                None => Ok(Tensor::ABSENT),
            })
            .collect::<Result<_, _>>()?;
        self.inner.call(
            ctx,
            &read,
            &mut staged_mut(&mut written)?,
            &mut staged_mut(&mut updated)?,
        )?;
        self.store_all(queue, outputs, &written)?;
        self.store_all(queue, states, &updated)
    }
}

/// Staged outputs as tensors. No span of the catalog has an optional output.
fn staged_mut(staged: &mut [Staged]) -> Result<Vec<TensorMut<'_>>, Failure> {
    let each = staged.iter_mut().map(|staged| match staged {
        Some((values, dims)) => TensorMut::from_f32(values, dims),
        None => Err(Failure::invalid("view_absent", "an output is absent")),
    });
    each.collect()
}
