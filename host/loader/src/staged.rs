//! A form that is called with host memory, wherever it is bound.
//!
//! On the CPU a call goes straight through. On a device every tensor is copied in, outputs too (what a form leaves alone
//! stays what the caller put there), and what it may write is copied out, with a guard behind it. Memory is leased from
//! the device, which counts the copies. A device that fails during a copy poisons the form, as one that fails inside the
//! call does.
//!
//! Not here: values that stay on a device between forms, and which device a form is bound on beyond [`Plugin::home`].

use structures_plugin_api::abi::FormFacts;
use structures_plugin_api::DType;

use crate::code::Code;
use crate::device::{DeviceMemory, DeviceTensor, DeviceTensorMut, PluginDevice};
use crate::error::LoaderError;
use crate::plugin::{BindSpec, BoundForm, Plugin, PluginError, StatusKind};
use crate::tensor::{HostTensor, HostTensorMut};

/// Bytes behind what a form may write, and what they hold.
const GUARD: [u8; 64] = [0xa5; 64];

impl Plugin {
    /// The device a form runs on when nobody names one: the CPU where the plugin serves it, else the first of its own
    /// devices that it has code for.
    ///
    /// # Errors
    /// Why it runs nowhere: the plugin's own reason for having no device, else that of the last one asked.
    pub fn home(&self, structure: &str, form: &str) -> Result<u32, PluginError> {
        let mut refusal = match self.placeable(structure, form, 0) {
            Ok(()) => return Ok(0),
            Err(e) if e.code != Code::ArchNotDeclared.name() => return Err(e),
            Err(e) => e,
        };
        for device in self.devices()? {
            match self.placeable(structure, form, device.index) {
                Ok(()) => return Ok(device.index),
                Err(e) => refusal = e,
            }
        }
        Err(refusal)
    }

    /// Whether a form has code for this CPU.
    pub fn runs_on_cpu(&self, structure: &str, form: &str) -> bool {
        self.placeable(structure, form, 0).is_ok()
    }

    /// As [`Plugin::bind`], for calls with host memory.
    ///
    /// # Errors
    /// As [`Plugin::bind`] and [`Plugin::open_device`].
    pub fn bind_staged(&self, spec: &BindSpec<'_>) -> Result<Staged, PluginError> {
        let form = self.bind(spec)?;
        let device = match spec.device {
            0 => None,
            index => Some(self.device(index)?),
        };
        Ok(Staged { form, device })
    }
}

/// See the module.
pub struct Staged {
    form: BoundForm,
    device: Option<PluginDevice>,
}

impl Staged {
    /// A form with the device it was bound on, `None` being the CPU.
    pub fn new(form: BoundForm, device: Option<PluginDevice>) -> Self {
        Staged { form, device }
    }

    /// The form, for calls with memory of its own device.
    pub fn form(&self) -> &BoundForm {
        &self.form
    }

    /// What `bind` said.
    pub fn facts(&self) -> FormFacts {
        self.form.facts()
    }

    /// Whether an earlier call failed.
    pub fn poisoned(&self) -> bool {
        self.form.poisoned()
    }

    /// Where it is bound; 0 is the CPU.
    pub fn device(&self) -> u32 {
        self.device.as_ref().map_or(0, PluginDevice::index)
    }

    /// As [`BoundForm::call`].
    ///
    /// # Errors
    /// As [`BoundForm::call`] and the device's own; `bind_writes` when the form wrote behind the end of a tensor.
    pub fn call(
        &self,
        inputs: &[HostTensor<'_>],
        outputs: &mut [HostTensorMut<'_>],
        states: &mut [HostTensorMut<'_>],
    ) -> Result<(), PluginError> {
        let Some(device) = &self.device else {
            return self.form.call(inputs, outputs, states);
        };
        if self.form.poisoned() {
            return Err(self.form.dead());
        }
        let called = self.copied(device, inputs, outputs, states);
        if called.as_ref().is_err_and(|e| e.kind == StatusKind::Failed) {
            self.form.poison();
        }
        called
    }

    fn copied(
        &self,
        device: &PluginDevice,
        inputs: &[HostTensor<'_>],
        outputs: &mut [HostTensorMut<'_>],
        states: &mut [HostTensorMut<'_>],
    ) -> Result<(), PluginError> {
        let wrong = |e: LoaderError| self.form.invalid("argument", e.to_string());
        let mut read = Vec::with_capacity(inputs.len());
        for tensor in inputs {
            read.push(match tensor.dtype() {
                None => None,
                Some(dtype) => {
                    let bytes = tensor.bytes_of();
                    let mut memory = device.lease(bytes.len() as u64)?;
                    memory.copy_in(None, 0, &bytes)?;
                    Some((memory, dtype, sizes(tensor.dims())))
                }
            });
        }
        let mut made = writable(device, outputs)?;
        let mut kept = writable(device, states)?;
        {
            let views = read.iter().map(|read| match read {
                None => Ok(DeviceTensor::ABSENT),
                Some((memory, dtype, dims)) => memory.tensor(*dtype, dims),
            });
            let views = views.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
            let mut out = exclusive(&mut made).map_err(wrong)?;
            let mut state = exclusive(&mut kept).map_err(wrong)?;
            self.form
                .call_on(device, None, &views, &mut out, &mut state)?;
        }
        self.bring_back("output", &made, outputs)?;
        self.bring_back("state", &kept, states)
    }

    fn bring_back(
        &self,
        what: &str,
        held: &[Writable],
        tensors: &mut [HostTensorMut<'_>],
    ) -> Result<(), PluginError> {
        for (i, (held, tensor)) in held.iter().zip(tensors).enumerate() {
            let mut bytes = vec![0_u8; tensor.byte_count() + GUARD.len()];
            held.memory.copy_out(None, 0, &mut bytes)?;
            let (body, guard) = bytes.split_at(tensor.byte_count());
            if guard != GUARD {
                let text = format!("the form wrote behind the end of {what} {i}");
                return Err(self.form.fault("bind_writes", text));
            }
            tensor.fill_from(body);
        }
        Ok(())
    }
}

/// Memory a form may write, with its guard.
struct Writable {
    memory: DeviceMemory,
    dtype: DType,
    dims: Vec<usize>,
}

fn writable(
    device: &PluginDevice,
    tensors: &[HostTensorMut<'_>],
) -> Result<Vec<Writable>, PluginError> {
    let one = |tensor: &HostTensorMut<'_>| {
        let mut bytes = tensor.as_tensor().bytes_of().into_owned();
        bytes.extend(GUARD);
        let mut memory = device.lease(bytes.len() as u64)?;
        memory.copy_in(None, 0, &bytes)?;
        Ok(Writable {
            memory,
            dtype: tensor.dtype(),
            dims: sizes(tensor.dims()),
        })
    };
    tensors.iter().map(one).collect()
}

fn exclusive(held: &mut [Writable]) -> Result<Vec<DeviceTensorMut<'_>>, LoaderError> {
    let each = held.iter_mut();
    each.map(|held| held.memory.tensor_mut(held.dtype, &held.dims))
        .collect()
}

fn sizes(dims: &[i64]) -> Vec<usize> {
    dims.iter().map(|dim| *dim as usize).collect()
}
