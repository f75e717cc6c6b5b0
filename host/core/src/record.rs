//! What a captured step keeps on a device: fixed memory for what it is told and says there, and its calls as one.
//!
//! A recording holds the addresses its calls were made with, so whoever launches it keeps that memory and those forms. While
//! it is made nothing is copied and nothing allocated: the calls find memory that an earlier pass left in the device's pool.
//!
//! Owns no choice: which calls there are is the captured step's (`structures-graph`).

use std::sync::Arc;

use structures_graph::place::{Away, Recorded, Recorder, Unserved};
use structures_graph::GraphError;
use structures_loader::{PluginError, Recording};
use structures_plugin_api::abi::DType;

use crate::station::{lost_or, Resident, Station};

/// See the module.
pub(crate) struct Tape {
    station: Arc<Station>,
}

impl Tape {
    /// For captured steps at this station.
    pub(crate) fn at(station: &Arc<Station>) -> Box<dyn Recorder> {
        Box::new(Tape {
            station: Arc::clone(station),
        })
    }

    fn of<'a>(&self, value: &'a Arc<dyn Away>) -> Result<&'a Resident, GraphError> {
        let found = value.as_any().downcast_ref::<Resident>();
        found.ok_or_else(|| GraphError::Span {
            name: self.station.place().name().into(),
            reason: "a value of the captured step is not of this host".into(),
        })
    }

    fn failed(&self, e: PluginError) -> GraphError {
        lost_or(self.station.place(), e)
    }
}

impl Recorder for Tape {
    fn fixed(&mut self, dims: &[usize], whole: bool) -> Result<Arc<dyn Away>, GraphError> {
        let dtype = if whole { DType::I64 } else { DType::F32 };
        let made = Resident::fixed(&self.station, dtype, dims).map_err(|e| self.failed(e))?;
        Ok(Arc::new(made))
    }

    fn write(&self, to: &Arc<dyn Away>, data: &[f32]) -> Result<(), GraphError> {
        let memory = self.of(to)?.memory();
        memory.replace(None, 0, data).map_err(|e| self.failed(e))
    }

    fn write_whole(&self, to: &Arc<dyn Away>, data: &[i64]) -> Result<(), GraphError> {
        let memory = self.of(to)?.memory();
        memory.replace(None, 0, data).map_err(|e| self.failed(e))
    }

    fn read(&self, from: &Arc<dyn Away>, to: &mut [f32]) -> Result<(), GraphError> {
        let memory = self.of(from)?.memory();
        memory.copy_out(None, 0, to).map_err(|e| self.failed(e))
    }

    fn read_whole(&self, from: &Arc<dyn Away>, to: &mut [i64]) -> Result<(), GraphError> {
        let memory = self.of(from)?.memory();
        memory.copy_out(None, 0, to).map_err(|e| self.failed(e))
    }

    fn record(
        &self,
        calls: &mut dyn FnMut() -> Result<(), Unserved>,
    ) -> Result<Box<dyn Recorded>, Unserved> {
        let device = self.station.device();
        let (called, ended) = device.record(None, calls).map_err(unserved)?;
        // A refusal is the reason worth telling, not that the recording is spoilt by it.
        called?;
        Ok(Box::new(Taped(ended.map_err(unserved)?)))
    }
}

struct Taped(Recording);

impl Recorded for Taped {
    fn launch(&self) -> Result<(), Unserved> {
        self.0.launch(None).map_err(unserved)
    }
}

fn unserved(e: PluginError) -> Unserved {
    Unserved {
        message: e.to_string(),
        code: e.code,
        declined: false,
    }
}
