//! The portable backend: scalar Rust for any CPU, the yardstick other backends are measured
//! against.
//!
//! It exists so that every structure and every wire format has at least one form that is simple
//! enough to be believed, on any machine. It is declared `role: reference`: its forms are tried
//! last and bound only where nothing else is. Clarity comes before speed, but a product is blocked
//! and spread over the host's threads, so that a whole model can be run with it.
//!
//! One file of `forms` a structure, one value of `format::Format` a number format, and every
//! structure in every format is a form: the list in `forms` drives `describe`, `probe` and `bind`.
//!
//! It owns no number format (the SDK's `formats` define them), no thread (the host lends its pool)
//! and no structure's meaning (the catalog's). Names of slots, points and axes are the catalog's.
//!
//! Its architecture is the one it was compiled for: the code uses nothing beyond the target's
//! baseline, so a feature list would promise too much and an empty list would skip the check.

#![forbid(unsafe_code)]

mod activation;
mod biased;
mod boundary;
mod format;
mod forms;
mod linear;
mod norm;
mod packed;
mod ports;
mod rope;
mod sim;
#[cfg(test)]
mod testing;
mod wire;

use std::sync::Arc;

use structures_plugin_api::describe::{Description, DeviceInfo, ProbeReport, ProbeShapes};
use structures_plugin_api::export_backend;
use structures_plugin_api::sdk::pool::Pool;
use structures_plugin_api::sdk::{self, Backend, BindRequest, BoundForm, Failure, Host};
use structures_plugin_api::DType;

use crate::sim::Sim;

/// The backend.
#[derive(Debug)]
pub struct Portable {
    shared: Shared,
    /// The simulated device, where one was asked for.
    sim: Option<Arc<Sim>>,
}

/// What every bound form keeps a handle on.
#[derive(Clone, Debug)]
struct Shared {
    host: Host,
    pool: Arc<Pool<f32>>,
}

impl Backend for Portable {
    fn description() -> Description {
        let mut description = Description::new("portable", "structures", env!("CARGO_PKG_VERSION"));
        description.archs = vec![std::env::consts::ARCH.into()];
        description.role = Some("reference".into());
        description.forms = forms::declarations();
        description.operations = sim::operation::kinds();
        description.recorded_operations = sim::operation::kinds();
        description
    }

    fn open(host: Host) -> Result<Self, Failure> {
        Ok(Portable {
            shared: Shared {
                host,
                pool: Arc::default(),
            },
            sim: sim::Config::read(|name| std::env::var(name).ok())?.map(Sim::new),
        })
    }

    fn probe(&self, form: &str, device: u32, shapes: &ProbeShapes) -> Result<ProbeReport, Failure> {
        if device != 0 {
            sdk::Device::synchronize(&**self.device(device)?, 0)?;
        }
        Ok(Self::description().probe(form, shapes))
    }

    const DEVICES: bool = true;

    fn devices(&self) -> Result<Vec<DeviceInfo>, Failure> {
        Ok(self.sim.iter().map(|sim| sim.info()).collect())
    }

    fn open_device(&self, index: u32) -> Result<sdk::Shared, Failure> {
        Ok(self.device(index)?.clone())
    }

    fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
        if request.device == 0 {
            return forms::bind(&self.shared, request);
        }
        let sim = self.device(request.device)?;
        if request.boundary()? != DType::F32 {
            let what = "the simulated device stages f32 alone";
            return Err(Failure::refused("boundary_dtype", what));
        }
        sdk::Device::synchronize(&**sim, 0)?;
        if let Some(kind) = request.operation() {
            return sim::operation::bind(sim, kind, request);
        }
        Ok(sim.place(forms::bind(&self.shared, request)?))
    }
}

impl Portable {
    fn device(&self, index: u32) -> Result<&Arc<Sim>, Failure> {
        self.sim
            .as_ref()
            .filter(|_| index == sim::INDEX)
            .ok_or_else(|| Failure::refused("device_unknown", format!("no device {index}")))
    }
}

export_backend!(Portable);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_is_a_yardsticks() {
        let description = Portable::description();
        assert_eq!(description.role.as_deref(), Some("reference"));
        assert_eq!(description.archs, [std::env::consts::ARCH]);
        let mut keys: Vec<_> = description
            .forms
            .iter()
            .map(|f| (f.structure.as_str(), f.name.as_str()))
            .collect();
        let declared = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(
            (keys.len(), declared),
            (49, 49),
            "a structure and a name make a form unique"
        );
        for form in &description.forms {
            let rounds = form.rounds.is_some();
            let cap = match (form.quantises, rounds) {
                (true, _) => 6e-2,
                (false, true) => 1e-2,
                (false, false) => 1e-4,
            };
            assert!(form.tolerance <= cap, "{}", form.name);
            assert_eq!(form.quantises || rounds, form.format != "none");
        }
    }

    #[test]
    fn every_declared_form_probes() {
        let backend = Portable::open(Host::detached()).expect("opens");
        for form in Portable::description().forms {
            let least = |(symbol, band): (&String, &structures_plugin_api::describe::DimBand)| {
                let size = band.min.max(1).next_multiple_of(band.multiple_of.max(1));
                (symbol.clone(), size)
            };
            let shapes = ProbeShapes {
                structure: form.structure.clone(),
                span: form.spans[0].clone(),
                rows: vec![1, 100],
                dims: form.band.dims.iter().map(least).collect(),
                ..ProbeShapes::default()
            };
            assert!(
                backend
                    .probe(&form.name, 0, &shapes)
                    .expect("answers")
                    .probed
            );
            let other = ProbeShapes {
                span: "elsewhere".into(),
                ..shapes
            };
            let report = backend.probe(&form.name, 0, &other).expect("answers");
            assert_eq!(report.code.as_deref(), Some("span_unknown"));
        }
    }
}
