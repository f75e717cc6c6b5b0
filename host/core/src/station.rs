//! A plugin's device as a place of the graph: values that lie there, and forms that run there.
//!
//! A value made by a seat at a station stays there; the session copies it home when somebody else reads it. Weights
//! and calls go to the form the device's plugin bound; all work of a station is in the order of one queue, so memory
//! that comes back to its pool is not used again before whoever read it is done.
//!
//! Owns the copies and when memory is given back. Does not own which form runs on which device (`choose`), admission
//! and counts of calls (`seat`), nor what copies cost in a unit's judgement (they are part of its time).

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, Device, Storage, Tensor};
use structures_graph::place::{Away, Held, Place};
use structures_graph::GraphError;
use structures_loader::{
    BoundForm, Copies, DeviceMemory, DeviceTensor, DeviceTensorMut, Element, LoaderError, Plugin,
    PluginDevice, PluginError,
};
use structures_plugin_api::abi::DType;

use crate::bind::Loaded;
use crate::receipt::SeatDevice;
use crate::seat::{AwayCall, CallFailure, Elsewhere};

/// Code of a device that is gone.
pub const DEVICE_LOST: &str = "device_lost";

/// A device that seats run on.
pub struct Station {
    device: PluginDevice,
    place: Place,
    note: SeatDevice,
}

impl fmt::Debug for Station {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Station")
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl Station {
    /// Opens a device of a plugin, or shares it when it is open.
    ///
    /// # Errors
    /// As [`Plugin::device`].
    pub fn open(plugin: &Plugin, index: u32) -> Result<Arc<Self>, PluginError> {
        let device = plugin.device(index)?;
        let info = plugin.devices()?.iter().find(|d| d.index == index);
        let (name, arch) = info.map_or_else(Default::default, |d| (d.name.clone(), d.arch.clone()));
        Ok(Arc::new(Station {
            device,
            place: Place::new(&format!("{}:{index}", plugin.id())),
            note: SeatDevice { index, name, arch },
        }))
    }

    /// Its place.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// For receipts.
    pub fn note(&self) -> &SeatDevice {
        &self.note
    }

    /// The device.
    pub fn device(&self) -> &PluginDevice {
        &self.device
    }

    /// Copies a value there.
    fn bring(self: &Arc<Self>, tensor: &Tensor) -> Result<Arc<Resident>, CallFailure> {
        let tensor = tensor.contiguous().map_err(|e| invalid(e.to_string()))?;
        let (storage, layout) = tensor.storage_and_layout();
        let (Storage::Cpu(data), Some((from, to))) = (&*storage, layout.contiguous_offsets())
        else {
            return Err(invalid("an input is not in host memory".into()));
        };
        let (memory, dtype) = match data {
            CpuStorage::F32(data) => (self.copied(&data[from..to])?, DType::F32),
            CpuStorage::I64(data) => (self.copied(&data[from..to])?, DType::I64),
            CpuStorage::U32(data) => {
                let wide: Vec<i64> = data[from..to].iter().map(|n| i64::from(*n)).collect();
                (self.copied(&wide)?, DType::I64)
            }
            _ => return Err(invalid("an input is neither f32 nor whole numbers".into())),
        };
        Ok(Arc::new(Resident {
            station: Arc::clone(self),
            memory: Arc::new(memory),
            dtype,
            dims: tensor.dims().to_vec(),
            home: Arc::default(),
        }))
    }

    fn copied<T: Element>(&self, data: &[T]) -> Result<DeviceMemory, CallFailure> {
        let mut memory = self.empty(size_of_val(data))?;
        memory.copy_in(None, 0, data).map_err(failure)?;
        Ok(memory)
    }

    fn empty(&self, bytes: usize) -> Result<DeviceMemory, CallFailure> {
        self.device.lease(bytes as u64).map_err(failure)
    }

    /// A call of a form bound here on values wherever they lie. Outputs stay here; inputs that had to be brought are
    /// told by position.
    ///
    /// # Errors
    /// What kept the form from serving; [`DEVICE_LOST`] when the device is gone.
    pub fn serve(
        self: &Arc<Self>,
        form: &BoundForm,
        inputs: &[Option<Held>],
        outputs: &[Vec<usize>],
    ) -> AwayCall {
        let mut brought: Vec<(usize, Arc<Resident>)> = Vec::new();
        for (i, held) in inputs.iter().enumerate() {
            let Some(held) = held.as_ref().filter(|h| h.at(&self.place).is_none()) else {
                continue;
            };
            let tensor = held
                .host()
                .ok_or_else(|| invalid("an input lies elsewhere".into()))?;
            brought.push((i, self.bring(tensor)?));
        }
        let mut next = brought.iter();
        let mut views = Vec::with_capacity(inputs.len());
        for held in inputs {
            let Some(held) = held else {
                views.push(DeviceTensor::ABSENT);
                continue;
            };
            let resident = match held.at(&self.place) {
                Some(away) => away.as_any().downcast_ref::<Resident>(),
                None => next.next().map(|(_, resident)| &**resident),
            };
            let resident =
                resident.ok_or_else(|| invalid("an input is not of this host".into()))?;
            views.push(resident.tensor()?);
        }
        let mut memory = Vec::with_capacity(outputs.len());
        for dims in outputs {
            memory.push(self.empty(4 * dims.iter().product::<usize>())?);
        }
        {
            let mut results: Vec<DeviceTensorMut<'_>> = memory
                .iter_mut()
                .zip(outputs)
                .map(|(memory, dims)| memory.tensor_mut(DType::F32, dims).map_err(misfit))
                .collect::<Result<_, _>>()?;
            form.call_on(&self.device, None, &views, &mut results, &mut [])
                .map_err(|e| failure_of(form, e))?;
        }
        let made = memory.into_iter().zip(outputs).map(|(memory, dims)| {
            Held::Away(Arc::new(Resident {
                station: Arc::clone(self),
                memory: Arc::new(memory),
                dtype: DType::F32,
                dims: dims.clone(),
                home: Arc::default(),
            }))
        });
        let made = made.collect();
        let brought = brought
            .into_iter()
            .map(|(i, resident)| (i, resident as Arc<dyn Away>))
            .collect();
        Ok((made, brought))
    }
}

/// A form at its station, as its seat sees it.
pub(crate) struct Stationed {
    loaded: Arc<Loaded>,
    station: Arc<Station>,
}

impl Stationed {
    pub(crate) fn at(loaded: Arc<Loaded>, station: Arc<Station>) -> Arc<dyn Elsewhere> {
        Arc::new(Stationed { loaded, station })
    }
}

impl Elsewhere for Stationed {
    fn place(&self) -> &Place {
        self.station.place()
    }

    fn copies(&self) -> Copies {
        self.station.device.copies()
    }

    fn call(&self, inputs: &[Option<Held>], outputs: &[Vec<usize>]) -> AwayCall {
        self.station.serve(self.loaded.form(), inputs, outputs)
    }
}

/// A value that lies on a device.
pub struct Resident {
    station: Arc<Station>,
    memory: Arc<DeviceMemory>,
    dtype: DType,
    dims: Vec<usize>,
    /// The copy in host memory, of all views of this memory.
    home: Arc<OnceLock<Tensor>>,
}

impl fmt::Debug for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {}", self.dims, self.station.place)
    }
}

impl Resident {
    fn tensor(&self) -> Result<DeviceTensor<'_>, CallFailure> {
        self.memory.tensor(self.dtype, &self.dims).map_err(misfit)
    }
}

impl Away for Resident {
    fn place(&self) -> &Place {
        &self.station.place
    }

    fn dims(&self) -> &[usize] {
        &self.dims
    }

    fn view(&self, dims: Vec<usize>) -> Arc<dyn Away> {
        Arc::new(Resident {
            station: Arc::clone(&self.station),
            memory: Arc::clone(&self.memory),
            dtype: self.dtype,
            dims,
            home: Arc::clone(&self.home),
        })
    }

    fn fetch(&self) -> Result<Tensor, GraphError> {
        let kernel = |source: candle_core::Error| GraphError::Kernel {
            op: "copy".into(),
            at: self.station.place.name().into(),
            source: Box::new(source),
        };
        if let Some(home) = self.home.get() {
            return home.reshape(self.dims.as_slice()).map_err(kernel);
        }
        let mut data = vec![0_f32; self.dims.iter().product()];
        let copied = self.memory.copy_out(None, 0, &mut data);
        // What was enqueued before answers here as well: nothing that lies there can be trusted any more.
        copied.map_err(|e| GraphError::PlaceLost {
            place: self.station.place.name().into(),
            reason: e.to_string(),
        })?;
        let home = Tensor::from_vec(data, self.dims.as_slice(), &Device::Cpu).map_err(kernel)?;
        Ok(self.home.get_or_init(|| home).clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn invalid(message: String) -> CallFailure {
    CallFailure {
        code: "rt_device".into(),
        message,
        declined: true,
    }
}

fn misfit(e: LoaderError) -> CallFailure {
    CallFailure {
        code: "argument".into(),
        message: e.to_string(),
        declined: false,
    }
}

fn failure(e: PluginError) -> CallFailure {
    CallFailure {
        message: e.to_string(),
        code: e.code,
        declined: false,
    }
}

fn failure_of(form: &BoundForm, e: PluginError) -> CallFailure {
    CallFailure {
        declined: !form.poisoned(),
        ..failure(e)
    }
}
