//! The safe layer for plugin authors: implement [`Backend`] and [`BoundForm`], export with
//! [`export_backend!`](crate::export_backend), write no `unsafe`.
//!
//! It owns the checks every plugin would otherwise repeat: views become [`Tensor`]s whose slices
//! are checked for dtype, device, layout, alignment and aliasing; a declaration is compared with
//! what is asked of it ([`FormDecl::admits`](crate::describe::FormDecl::admits)); statuses and
//! codes travel as [`Failure`]. It does not own the vtables (see [`crate::door`]) nor any number
//! format (see [`crate::formats`]).
//!
//! Codes this layer answers with, beside a plugin's own: `argument` (a malformed argument),
//! `params` (a params or shapes document that does not parse), `device_unknown`,
//! `capture_unsupported`, `view_null`, `view_rank`,
//! `view_dims`, `view_dtype`, `view_absent`, `view_device`, `view_layout`, `view_alignment`,
//! `view_aliased` (a view that is malformed or not what an accessor promises), `form_unknown`,
//! `structure_version`, `packed_format`, `span_unknown`, `format_no_variant`, `boundary_dtype`, `envelope`,
//! `form_band` (asked beyond the declaration), `weight_missing`, `statistic_missing`,
//! `param_missing` (a part of the bind request that is not there), `overlapping_call`, `poisoned`,
//! `panicked`.

mod device;
mod failure;
pub mod forms;
mod host;
pub mod pool;
pub mod ports;
mod request;
pub mod rope;
mod spread;
mod tensor;
mod weight;

pub use device::{Device, Shared};
pub use failure::Failure;
pub use host::{Host, Scratch};
pub use request::BindRequest;
pub use spread::Spread;
pub use tensor::{disjoint, Tensor, TensorMut};
pub(crate) use tensor::{plain_call, PLAIN};
pub use weight::{PackedRows, Weight};

use crate::abi::{CallCtx, FormFacts};
use crate::describe::{Description, DeviceInfo, ProbeReport, ProbeShapes};

/// A backend: what one plugin library is. Every entry may be called from any thread, one at a time.
pub trait Backend: Send + Sync + Sized + 'static {
    /// What it declares: pure data. Called in a throw-away process before anything else; touches no
    /// device.
    fn description() -> Description;

    /// Makes the plugin's only instance. `host` is valid for as long as the instance and its forms
    /// are.
    fn open(host: Host) -> Result<Self, Failure>;

    /// Whether `form` can run here at `shapes`. The default answers from the declaration alone:
    /// `probed` for a declared form of `shapes.structure` whose band admits the shapes, else the
    /// code that says why not. A backend that depends on the machine (CPU features, a driver)
    /// overrides it and launches once.
    fn probe(&self, form: &str, device: u32, shapes: &ProbeShapes) -> Result<ProbeReport, Failure> {
        let _ = device;
        Ok(Self::description().probe(form, shapes))
    }

    /// Whether it has a device table. A backend of the CPU leaves this and the next two alone.
    const DEVICES: bool = false;

    /// The devices that are there now, beside the CPU, numbered from 1. Asked once, after `open`.
    fn devices(&self) -> Result<Vec<DeviceInfo>, Failure> {
        Ok(Vec::new())
    }

    /// Opens one of [`Backend::devices`].
    fn open_device(&self, index: u32) -> Result<Shared, Failure> {
        let text = format!("no device {index}");
        Err(Failure::refused("device_unknown", text))
    }

    /// Binds a form: reads and packs the weights, resolves every kernel, sizes every buffer.
    /// Nothing borrowed from `request` survives it.
    fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure>;
}

/// A form bound to one seat: its packed weights and its buffers. Calls on one instance never
/// overlap (a call inside a call answers `overlapping_call`), so such a form leaves `concurrent`
/// false. One whose calls only read is a [`ConcurrentForm`].
pub trait BoundForm: Send {
    /// What it added. Asked once after `bind`.
    fn facts(&self) -> FormFacts {
        FormFacts::default()
    }

    /// Fills `outputs`, updates `states`; order is the bound span's. An absent optional input is an
    /// absent [`Tensor`]. Outputs and states overlap nothing else; an input that is a view of a
    /// state refuses to be borrowed as a slice (read it through the state). [`Failure::failed`]
    /// poisons this instance, [`Failure::refused`] and [`Failure::invalid`] do not; but a
    /// host gives a seat up at any status other than success, so say no in `bind`, not here.
    fn call(
        &mut self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure>;

    /// Itself, where calls may overlap. [`Concurrent`] answers; nobody else needs to.
    #[doc(hidden)]
    fn concurrent(&self) -> Option<&(dyn ConcurrentForm + 'static)> {
        None
    }
}

/// A form whose calls may overlap: it may declare `concurrent`. It is shared by threads, so what a
/// call changes is behind an atomic or a lock, which the compiler holds it to.
///
/// `bind` wraps it: `Ok(Box::new(Concurrent(form)))`. Whether the host really overlaps calls follows
/// the declaration; a declared form that is no `Concurrent` is refused when it is bound.
pub trait ConcurrentForm: Send + Sync {
    /// As [`BoundForm::facts`].
    fn facts(&self) -> FormFacts {
        FormFacts::default()
    }

    /// As [`BoundForm::call`], possibly on several threads at once, each with tensors of its own.
    /// After a failure no further call starts; those that run end as they do.
    fn call(
        &self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure>;
}

/// A [`ConcurrentForm`] as what `bind` gives.
#[derive(Debug)]
pub struct Concurrent<F>(pub F);

impl<F: ConcurrentForm + 'static> BoundForm for Concurrent<F> {
    fn facts(&self) -> FormFacts {
        self.0.facts()
    }

    fn call(
        &mut self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        self.0.call(ctx, inputs, outputs, states)
    }

    fn concurrent(&self) -> Option<&(dyn ConcurrentForm + 'static)> {
        Some(&self.0)
    }
}
