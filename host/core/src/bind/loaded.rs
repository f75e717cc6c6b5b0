//! A form of a plugin as a seat and a chain see it: dense values, regions as they lie, and codes.
//!
//! Owns how operands are handed over without copying them. Admission and fallback are [`crate::seat`], what is between two
//! forms is [`crate::chain`], devices are [`crate::station`].

use std::sync::Arc;

use structures_graph::session::ViewMut;
use structures_loader::{
    BoundForm, HostTensor, HostTensorMut, LoaderError, Plugin, PluginError, Staged,
};
use structures_plugin_api::abi;

use crate::chain::{Port, PortMut, WiredForm};
use crate::seat::{CallFailure, Executable, View};
use crate::station::Station;

/// Most operands and results that are handed over without a list of them being allocated.
pub(crate) const MOST: (usize, usize) = (16, 8);

/// A loaded form as a seat sees it.
pub(crate) struct Loaded {
    form: Staged,
    /// The device it was bound on, when that is not the CPU.
    station: Option<Arc<Station>>,
}

impl Loaded {
    /// A form that was bound on a device, 0 being the CPU.
    pub(crate) fn new(form: BoundForm, plugin: &Plugin, device: u32) -> Result<Self, PluginError> {
        let station = match device {
            0 => None,
            index => Some(Station::open(plugin, index)?),
        };
        let device = station.as_ref().map(|s| s.device().clone());
        Ok(Loaded {
            form: Staged::new(form, device),
            station,
        })
    }

    /// What was bound.
    pub(crate) fn form(&self) -> &BoundForm {
        self.form.form()
    }

    /// The device, when it is not the CPU.
    pub(super) fn station(&self) -> Option<&Arc<Station>> {
        self.station.as_ref()
    }
}

impl Executable for Loaded {
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        let inputs: Vec<HostTensor<'_>> = inputs
            .iter()
            .map(|i| match i {
                Some((data, dims)) => HostTensor::new(data, dims),
                None => Ok(HostTensor::ABSENT),
            })
            .collect::<Result<_, _>>()
            .map_err(shape)?;
        let mut outputs: Vec<HostTensorMut<'_>> = outputs
            .iter_mut()
            .map(|(data, dims)| {
                let made = dims.iter().product::<usize>().min(data.len());
                HostTensorMut::new(&mut data[..made], dims)
            })
            .collect::<Result<_, _>>()
            .map_err(shape)?;
        self.form
            .call(&inputs, &mut outputs, &mut [])
            .map_err(|e| self.failure(&e))
    }

    fn call_into(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<(), CallFailure> {
        let mut given = [HostTensor::ABSENT; MOST.0];
        let mut made: [HostTensorMut<'_>; MOST.1] = std::array::from_fn(|_| Default::default());
        let (n, m) = (inputs.len(), outputs.len());
        check_count(n, m)?;
        for (to, input) in given.iter_mut().zip(inputs) {
            if let Some((data, dims)) = input {
                *to = given_as_it_lies(data, dims).map_err(shape)?;
            }
        }
        for (to, (data, dims)) in made.iter_mut().zip(outputs) {
            *to = HostTensorMut::new(data, dims).map_err(shape)?;
        }
        let called = self.form.call(&given[..n], &mut made[..m], &mut []);
        called.map_err(|e| self.failure(&e))
    }
}

impl Loaded {
    fn failure(&self, e: &PluginError) -> CallFailure {
        CallFailure {
            code: e.code.clone(),
            declined: !self.form.poisoned(),
            message: e.to_string(),
        }
    }
}

impl Executable for Arc<Loaded> {
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        Executable::call(&**self, inputs, outputs)
    }

    fn call_into(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<(), CallFailure> {
        Executable::call_into(&**self, inputs, outputs)
    }
}

impl WiredForm for Loaded {
    fn call(&self, inputs: &[Port<'_>], outputs: &mut [PortMut<'_>]) -> Result<(), CallFailure> {
        let mut given = [HostTensor::ABSENT; MOST.0];
        let mut made: [HostTensorMut<'_>; MOST.1] = std::array::from_fn(|_| Default::default());
        let (n, m) = (inputs.len(), outputs.len());
        check_count(n, m)?;
        for (to, port) in given.iter_mut().zip(inputs) {
            *to = match port {
                Port::Absent => continue,
                Port::Values(data, dims) => HostTensor::new(data, dims),
                Port::Codes(data, dims) => {
                    HostTensor::bytes(data, abi::DType::E4m3, dims, row_major(dims).of(dims))
                }
            }
            .map_err(shape)?;
        }
        for (to, port) in made.iter_mut().zip(outputs) {
            *to = match port {
                PortMut::Values(data, dims) => HostTensorMut::new(data, dims),
                PortMut::Codes(data, dims) => {
                    HostTensorMut::bytes(data, abi::DType::E4m3, dims, row_major(dims).of(dims))
                }
            }
            .map_err(shape)?;
        }
        let called = self.form.call(&given[..n], &mut made[..m], &mut []);
        called.map_err(|e| self.failure(&e))
    }
}

/// Dense data, or a region `[B, heads, T, D]` with room for more positions than it holds.
fn given_as_it_lies<'a>(data: &'a [f32], dims: &[usize]) -> Result<HostTensor<'a>, LoaderError> {
    match *dims {
        [batch, heads, len, d] if data.len() > batch * heads * len * d => {
            let head = data.len() / (batch * heads).max(1);
            HostTensor::strided(data, dims, &[heads * head, head, d, 1])
        }
        _ => HostTensor::new(data, dims),
    }
}

fn shape(e: LoaderError) -> CallFailure {
    CallFailure {
        code: "argument".into(),
        message: e.to_string(),
        declined: false,
    }
}

fn check_count(n: usize, m: usize) -> Result<(), CallFailure> {
    if n <= MOST.0 && m <= MOST.1 {
        return Ok(());
    }
    Err(CallFailure {
        code: "arguments_count".into(),
        message: format!("at most {MOST:?} operands and results, found {n} and {m}"),
        declined: true,
    })
}

/// Strides of elements that follow each other.
struct RowMajor([usize; abi::MAX_RANK]);

impl RowMajor {
    fn of(&self, dims: &[usize]) -> &[usize] {
        &self.0[..dims.len().min(abi::MAX_RANK)]
    }
}

fn row_major(dims: &[usize]) -> RowMajor {
    let mut strides = [1; abi::MAX_RANK];
    for i in (1..dims.len().min(abi::MAX_RANK)).rev() {
        strides[i - 1] = strides[i] * dims[i];
    }
    RowMajor(strides)
}
