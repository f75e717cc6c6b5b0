//! A form that is called with host memory, wherever it is bound.
//!
//! On the CPU a call goes straight through. On a device every input is copied in, the form is called on a queue of
//! its own, and what it filled is copied out; device memory is kept between calls and grows with the largest. Copies
//! are counted. A device that fails during a copy poisons the form, as one that fails inside the call does.
//!
//! Not here: values that stay on a device between forms, and which device a form is bound on beyond [`Plugin::home`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

use structures_plugin_api::abi::FormFacts;

use crate::code::Code;
use crate::device::{DeviceMemory, DeviceTensor, DeviceTensorMut, PluginDevice, Queue};
use crate::plugin::{BindSpec, BoundForm, Plugin, PluginError, StatusKind};
use crate::tensor::{HostTensor, HostTensorMut};

/// Alignment of device memory: as good as any kernel asks for.
const ALIGN: u64 = 256;

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

    /// Every device a form has code for, the CPU first.
    pub fn places(&self, structure: &str, form: &str) -> Vec<u32> {
        let own = self.devices().unwrap_or_default().iter().map(|d| d.index);
        let all = std::iter::once(0).chain(own);
        all.filter(|device| self.placeable(structure, form, *device).is_ok())
            .collect()
    }

    /// As [`Plugin::bind`], for calls with host memory.
    ///
    /// # Errors
    /// As [`Plugin::bind`] and [`Plugin::open_device`].
    pub fn bind_staged(&self, spec: &BindSpec<'_>) -> Result<Staged, PluginError> {
        let form = self.bind(spec)?;
        let place = match spec.device {
            0 => None,
            index => {
                let device = self.open_device(index)?;
                Some(Place {
                    queue: device.queue()?,
                    device,
                    memory: Mutex::default(),
                    copies: AtomicU64::new(0),
                    bytes: AtomicU64::new(0),
                })
            }
        };
        Ok(Staged { form, place })
    }
}

/// See the module.
pub struct Staged {
    form: BoundForm,
    place: Option<Place>,
}

struct Place {
    device: PluginDevice,
    queue: Queue,
    memory: Mutex<Vec<Option<DeviceMemory>>>,
    copies: AtomicU64,
    bytes: AtomicU64,
}

/// What went between host and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Copies, both ways.
    pub copies: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Staged {
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
        self.place.as_ref().map_or(0, |place| place.device.index())
    }

    /// What was copied so far.
    pub fn copied(&self) -> Copied {
        self.place
            .as_ref()
            .map_or(Copied::default(), |place| Copied {
                copies: place.copies.load(Ordering::Relaxed),
                bytes: place.bytes.load(Ordering::Relaxed),
            })
    }

    /// As [`BoundForm::call`].
    ///
    /// # Errors
    /// As [`BoundForm::call`] and the device's own.
    pub fn call(
        &self,
        inputs: &[HostTensor<'_>],
        outputs: &mut [HostTensorMut<'_>],
        states: &mut [HostTensorMut<'_>],
    ) -> Result<(), PluginError> {
        let Some(place) = &self.place else {
            return self.form.call(inputs, outputs, states);
        };
        if self.form.poisoned() {
            return Err(self.form.dead());
        }
        let called = self.staged(place, inputs, outputs, states);
        if called.as_ref().is_err_and(|e| e.kind == StatusKind::Failed) {
            self.form.poison();
        }
        called
    }

    fn staged(
        &self,
        place: &Place,
        inputs: &[HostTensor<'_>],
        outputs: &mut [HostTensorMut<'_>],
        states: &mut [HostTensorMut<'_>],
    ) -> Result<(), PluginError> {
        let mut memory = place.memory.lock().unwrap_or_else(|e| e.into_inner());
        memory.resize_with(inputs.len() + outputs.len() + states.len(), || None);
        let (given, rest) = memory.split_at_mut(inputs.len());
        let (made, kept) = rest.split_at_mut(outputs.len());
        let queue = &place.queue;

        for (slot, tensor) in given.iter_mut().zip(inputs) {
            if tensor.dtype().is_some() {
                place.copy_in(slot, &tensor.bytes_of())?;
            }
        }
        for (slot, tensor) in made.iter_mut().zip(&*outputs) {
            place.room(slot, tensor.byte_count())?;
        }
        for (slot, tensor) in kept.iter_mut().zip(&*states) {
            let bytes = tensor.as_tensor().bytes_of();
            place.copy_in(slot, &bytes)?;
        }

        let wrong = |e: crate::error::LoaderError| self.form.invalid("argument", e.to_string());
        let mut views = Vec::with_capacity(inputs.len());
        for (slot, tensor) in given.iter().zip(inputs) {
            views.push(match (slot, tensor.dtype()) {
                (Some(memory), Some(dtype)) => {
                    memory.tensor(dtype, &sizes(tensor.dims())).map_err(wrong)?
                }
                _ => DeviceTensor::ABSENT,
            });
        }
        fn exclusive<'m>(
            slots: &'m mut [Option<DeviceMemory>],
            tensors: &[HostTensorMut<'_>],
        ) -> Result<Vec<DeviceTensorMut<'m>>, crate::error::LoaderError> {
            let pairs = slots.iter_mut().flatten().zip(tensors);
            pairs
                .map(|(memory, t)| memory.tensor_mut(t.dtype(), &sizes(t.dims())))
                .collect()
        }
        let mut out = exclusive(made, outputs).map_err(wrong)?;
        let mut state = exclusive(kept, states).map_err(wrong)?;
        self.form
            .call_on(&place.device, Some(queue), &views, &mut out, &mut state)?;
        drop((views, out, state));

        for (memory, tensor) in made.iter().flatten().zip(outputs) {
            place.copy_out(memory, tensor)?;
        }
        for (memory, tensor) in kept.iter().flatten().zip(states) {
            place.copy_out(memory, tensor)?;
        }
        queue.synchronize()
    }
}

impl Place {
    /// Memory of at least so many bytes.
    fn room<'m>(
        &self,
        slot: &'m mut Option<DeviceMemory>,
        bytes: usize,
    ) -> Result<&'m mut DeviceMemory, PluginError> {
        let needed = bytes.max(1) as u64;
        // Given back first, so that growing needs no room for both.
        let kept = slot.take().filter(|memory| memory.bytes() >= needed);
        Ok(slot.insert(match kept {
            Some(memory) => memory,
            None => self.device.alloc(needed, ALIGN)?,
        }))
    }

    fn copy_in(&self, slot: &mut Option<DeviceMemory>, bytes: &[u8]) -> Result<(), PluginError> {
        let memory = self.room(slot, bytes.len())?;
        self.count(bytes.len());
        memory.copy_in(Some(&self.queue), 0, bytes)
    }

    fn copy_out(
        &self,
        memory: &DeviceMemory,
        tensor: &mut HostTensorMut<'_>,
    ) -> Result<(), PluginError> {
        let mut bytes = vec![0; tensor.byte_count()];
        self.count(bytes.len());
        memory.copy_out(Some(&self.queue), 0, &mut bytes)?;
        tensor.fill_from(&bytes);
        Ok(())
    }

    fn count(&self, bytes: usize) {
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

fn sizes(dims: &[i64]) -> Vec<usize> {
    dims.iter().map(|dim| *dim as usize).collect()
}
