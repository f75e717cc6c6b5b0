//! A plugin's device as a place of the graph: values that lie there, and forms that run there.
//!
//! A value made by a seat at a station stays there; the session copies it home when somebody else reads it. Weights
//! and calls go to the form the device's plugin bound; all work of a station is in the order of one queue, so memory
//! that comes back to its pool is not used again before whoever read it is done.
//!
//! A state's regions that have their home here ([`Rooms`]) lie whole, as many positions as there is room for, and beside
//! them their one valid length. An operation that appends gets `x` and that length, and the region as its state; a form
//! that reads them gets them whole and the length at the input it declares for it. So what a step is told is at the same
//! addresses in every step, and only what lies there changes.
//!
//! Owns the copies and when memory is given back. Does not own which form runs on which device (`choose`), admission
//! and counts of calls (`seat`), nor what copies cost in a unit's judgement (they are part of its time).

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, Device, Storage, Tensor};
use structures_graph::place::{Away, Held, Place, Quarters, Recorder};
use structures_graph::{GraphError, OpKind};
use structures_loader::{
    BoundForm, Copies, DeviceMemory, DeviceTensor, DeviceTensorMut, Element, LoaderError, Plugin,
    PluginDevice, PluginError,
};
use structures_plugin_api::abi::DType;

use crate::bind::Loaded;
use crate::receipt::SeatDevice;
use crate::record::Tape;
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

    /// Appends to a region that has its home here; with what had to be brought.
    ///
    /// # Errors
    /// As [`Station::serve`].
    pub fn append(
        self: &Arc<Self>,
        form: &BoundForm,
        x: &Held,
        region: &Arc<dyn Away>,
    ) -> Result<Option<Arc<dyn Away>>, CallFailure> {
        let housed = Held::Away(Arc::clone(region));
        let Some(region) = region_at(&housed, &self.place) else {
            return Err(invalid("the region lies elsewhere".into()));
        };
        let brought = match (x.at(&self.place), x.host()) {
            (Some(_), _) => None,
            (None, Some(tensor)) => Some(self.bring(tensor)?),
            (None, None) => return Err(invalid("an input lies elsewhere".into())),
        };
        let resident = match (&brought, x.at(&self.place)) {
            (Some(resident), _) => Some(&**resident),
            (None, Some(away)) => away.as_any().downcast_ref::<Resident>(),
            (None, None) => None,
        };
        let resident = resident.ok_or_else(|| invalid("an input is not of this host".into()))?;
        let inputs = [resident.tensor()?, number(&region.length)?];
        let state = region.memory.state(DType::F32, &region.room);
        let mut states = [state.map_err(misfit)?];
        form.call_on(&self.device, None, &inputs, &mut [], &mut states)
            .map_err(|e| failure_of(form, e))?;
        Ok(brought.map(|resident| resident as Arc<dyn Away>))
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
    /// told by position. `length` is the input at which the form takes the valid length of regions that lie here; outputs
    /// are of one dtype and of these dims.
    ///
    /// # Errors
    /// What kept the form from serving; [`DEVICE_LOST`] when the device is gone.
    pub fn serve(
        self: &Arc<Self>,
        form: &BoundForm,
        length: Option<usize>,
        inputs: &[Option<Held>],
        (dtype, outputs): (DType, &[Vec<usize>]),
    ) -> AwayCall {
        let regions = inputs
            .iter()
            .flatten()
            .filter_map(|h| region_at(h, &self.place));
        let mut regions = regions.peekable();
        let valid = regions.peek().map(|region| Arc::clone(&region.length));
        if let Some(valid) = &valid {
            let free = length.is_some_and(|at| matches!(inputs.get(at), Some(None)));
            if !free || regions.any(|r| !Arc::ptr_eq(&r.length, valid)) {
                let text = "a region lies here, and the form takes no valid length with it";
                return Err(invalid(text.into()));
            }
        }
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
        for (i, held) in inputs.iter().enumerate() {
            let Some(held) = held else {
                views.push(match &valid {
                    Some(valid) if length == Some(i) => number(valid)?,
                    _ => DeviceTensor::ABSENT,
                });
                continue;
            };
            if let Some(region) = region_at(held, &self.place) {
                views.push(region.whole()?);
                continue;
            }
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
            memory.push(self.empty(dtype.size() * dims.iter().product::<usize>())?);
        }
        {
            let mut results: Vec<DeviceTensorMut<'_>> = memory
                .iter_mut()
                .zip(outputs)
                .map(|(memory, dims)| memory.tensor_mut(dtype, dims).map_err(misfit))
                .collect::<Result<_, _>>()?;
            form.call_on(&self.device, None, &views, &mut results, &mut [])
                .map_err(|e| failure_of(form, e))?;
        }
        let made = memory.into_iter().zip(outputs).map(|(memory, dims)| {
            Held::Away(Arc::new(Resident {
                station: Arc::clone(self),
                memory: Arc::new(memory),
                dtype,
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

/// The operand by which an attention is told how many of its keys are valid.
pub(crate) fn length_name() -> &'static str {
    OpKind::Attention.spec().operand_name(4)
}

/// The input of that name, where nobody gives it a value of the graph.
pub(crate) fn length_port<'n>(inputs: impl IntoIterator<Item = (&'n str, bool)>) -> Option<usize> {
    let mut inputs = inputs.into_iter();
    inputs.position(|(name, given)| !given && name == length_name())
}

/// A form at its station, as its seat sees it.
pub(crate) struct Stationed {
    loaded: Arc<Loaded>,
    station: Arc<Station>,
    length: Option<usize>,
    records: bool,
}

impl Stationed {
    /// `length`: see [`length_port`]; `records`: the form declares that its calls may be recorded.
    pub(crate) fn at(
        loaded: Arc<Loaded>,
        station: Arc<Station>,
        length: Option<usize>,
        records: bool,
    ) -> Arc<dyn Elsewhere> {
        Arc::new(Stationed {
            loaded,
            station,
            length,
            records,
        })
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
        let made = (DType::F32, outputs);
        let form = self.loaded.form();
        self.station.serve(form, self.length, inputs, made)
    }

    fn reads_housed(&self) -> bool {
        self.length.is_some()
    }

    fn records(&self) -> bool {
        self.records
    }

    fn recorder(&self) -> Box<dyn Recorder> {
        Tape::at(&self.station)
    }
}

/// Memory on a device for the regions of one state.
pub struct Rooms {
    station: Arc<Station>,
    /// Positions that are valid, in every region; made with the first one.
    length: Option<Arc<DeviceMemory>>,
    announced: Option<usize>,
    stamp: u64,
    /// Memory and dims, by region.
    rooms: BTreeMap<usize, (Arc<DeviceMemory>, [usize; 4])>,
}

impl Rooms {
    /// None yet.
    pub fn at(station: &Arc<Station>) -> Self {
        Rooms {
            station: Arc::clone(station),
            length: None,
            announced: None,
            stamp: next_stamp(),
            rooms: BTreeMap::new(),
        }
    }

    fn failed(&self, e: PluginError) -> GraphError {
        lost_or(&self.station.place, e)
    }
}

/// A device's failure outside any call.
pub(crate) fn lost_or(place: &Place, e: PluginError) -> GraphError {
    let (place, reason) = (place.name().to_string(), e.to_string());
    match e.code == DEVICE_LOST {
        true => GraphError::PlaceLost { place, reason },
        false => GraphError::Span {
            name: place,
            reason,
        },
    }
}

/// A number no other memory of regions has.
fn next_stamp() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl fmt::Debug for Rooms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} regions at {}", self.rooms.len(), self.station.place)
    }
}

impl Quarters for Rooms {
    fn place(&self) -> &Place {
        &self.station.place
    }

    fn admit(
        &mut self,
        region: usize,
        dims: [usize; 4],
        content: Option<&Tensor>,
    ) -> Result<(), GraphError> {
        let misfit = |reason: String| GraphError::Span {
            name: self.station.place.name().into(),
            reason,
        };
        let bytes = size_of::<f32>() * dims.iter().product::<usize>();
        let alloc = |bytes| self.station.device.alloc(bytes, ALIGN);
        if self.length.is_none() {
            let made = alloc(size_of::<i64>() as u64).map_err(|e| self.failed(e))?;
            self.length = Some(Arc::new(made));
        }
        let mut memory = alloc(bytes as u64).map_err(|e| self.failed(e))?;
        if let Some(content) = content {
            let (storage, layout) = content.storage_and_layout();
            let (Storage::Cpu(CpuStorage::F32(data)), Some((from, to)), true) = (
                &*storage,
                layout.contiguous_offsets(),
                content.dims() == dims,
            ) else {
                let text = format!("{:?} is not a whole region of {dims:?}", content.dims());
                return Err(misfit(text));
            };
            let copied = memory.copy_in(None, 0, &data[from..to]);
            copied.map_err(|e| self.failed(e))?;
        }
        self.rooms.insert(region, (Arc::new(memory), dims));
        self.stamp = next_stamp();
        Ok(())
    }

    fn room(&self, region: usize) -> Option<usize> {
        self.rooms.get(&region).map(|(_, dims)| dims[2])
    }

    fn announce(&mut self, valid: usize) -> Result<(), GraphError> {
        let Some(length) = self
            .length
            .as_ref()
            .filter(|_| self.announced != Some(valid))
        else {
            return Ok(());
        };
        let told = length.replace(None, 0, &[valid as i64]);
        told.map_err(|e| self.failed(e))?;
        self.announced = Some(valid);
        Ok(())
    }

    fn region(&self, region: usize, valid: usize) -> Option<Arc<dyn Away>> {
        let (memory, room) = self.rooms.get(&region)?;
        Some(Arc::new(Region {
            station: Arc::clone(&self.station),
            memory: Arc::clone(memory),
            length: Arc::clone(self.length.as_ref()?),
            room: *room,
            dims: vec![room[0], room[1], valid.min(room[2]), room[3]],
            whole: true,
        }))
    }

    fn dismiss(&mut self, region: usize) {
        self.rooms.remove(&region);
        self.stamp = next_stamp();
    }

    fn stamp(&self) -> u64 {
        self.stamp
    }
}

/// What memory of regions is aligned to.
const ALIGN: u64 = 256;

/// A region that has its home on a device, with so many positions valid.
pub struct Region {
    station: Arc<Station>,
    memory: Arc<DeviceMemory>,
    length: Arc<DeviceMemory>,
    room: [usize; 4],
    dims: Vec<usize>,
    /// Not a view with other dims, which nobody reads here.
    whole: bool,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Region { room, dims, .. } = self;
        write!(f, "{dims:?} of {room:?} at {}", self.station.place)
    }
}

impl Region {
    fn whole(&self) -> Result<DeviceTensor<'_>, CallFailure> {
        self.memory.tensor(DType::F32, &self.room).map_err(misfit)
    }
}

/// A valid length as forms read it.
fn number(length: &DeviceMemory) -> Result<DeviceTensor<'_>, CallFailure> {
    length.tensor(DType::I64, &[]).map_err(misfit)
}

/// The region a value is at this place, if it is one.
fn region_at<'h>(held: &'h Held, place: &Place) -> Option<&'h Region> {
    let away = held.at(place)?;
    let region = away.as_any().downcast_ref::<Region>()?;
    region.whole.then_some(region)
}

impl Away for Region {
    fn place(&self) -> &Place {
        &self.station.place
    }

    fn dims(&self) -> &[usize] {
        &self.dims
    }

    fn view(&self, dims: Vec<usize>) -> Arc<dyn Away> {
        Arc::new(Region {
            station: Arc::clone(&self.station),
            memory: Arc::clone(&self.memory),
            length: Arc::clone(&self.length),
            room: self.room,
            dims,
            whole: false,
        })
    }

    fn fetch(&self) -> Result<Tensor, GraphError> {
        let kernel = |source: candle_core::Error| GraphError::Kernel {
            op: "copy".into(),
            at: self.station.place.name().into(),
            source: Box::new(source),
        };
        let mut data = vec![0_f32; self.room.iter().product()];
        let copied = self.memory.copy_out(None, 0, &mut data);
        copied.map_err(|e| GraphError::PlaceLost {
            place: self.station.place.name().into(),
            reason: e.to_string(),
        })?;
        let [b, h, _, d] = self.room;
        let valid = self.dims.iter().product::<usize>() / (b * h * d).max(1);
        let whole = Tensor::from_vec(data, self.room.as_slice(), &Device::Cpu);
        let valid = whole.and_then(|t| t.narrow(2, 0, valid));
        let fetched = valid.and_then(|t| t.reshape(self.dims.as_slice()));
        fetched.map_err(kernel)
    }

    fn as_any(&self) -> &dyn Any {
        self
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
    /// Memory for a value that stays as long as this does; its content is undefined.
    pub(crate) fn fixed(
        station: &Arc<Station>,
        dtype: DType,
        dims: &[usize],
    ) -> Result<Self, PluginError> {
        let bytes = dtype.size() * dims.iter().product::<usize>();
        let memory = station.device.alloc(bytes.max(1) as u64, ALIGN)?;
        Ok(Resident {
            station: Arc::clone(station),
            memory: Arc::new(memory),
            dtype,
            dims: dims.to_vec(),
            home: Arc::default(),
        })
    }

    pub(crate) fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    fn tensor(&self) -> Result<DeviceTensor<'_>, CallFailure> {
        self.memory.tensor(self.dtype, &self.dims).map_err(misfit)
    }

    fn elements<T: Element + Default>(&self) -> Result<Vec<T>, PluginError> {
        let mut data = vec![T::default(); self.dims.iter().product()];
        self.memory.copy_out(None, 0, &mut data)?;
        Ok(data)
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
        // What was enqueued before answers here as well: nothing that lies there can be trusted any more.
        let lost = |e: PluginError| GraphError::PlaceLost {
            place: self.station.place.name().into(),
            reason: e.to_string(),
        };
        let home = match self.dtype {
            DType::I64 => {
                let data = self.elements::<i64>().map_err(lost)?;
                Tensor::from_vec(data, self.dims.as_slice(), &Device::Cpu)
            }
            _ => {
                let data = self.elements::<f32>().map_err(lost)?;
                Tensor::from_vec(data, self.dims.as_slice(), &Device::Cpu)
            }
        };
        let home = home.map_err(kernel)?;
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
