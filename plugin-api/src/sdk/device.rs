//! A device with memory of its own, as a backend implements it.
//!
//! Addresses and queues are numbers that mean something to the device alone: the host hands them
//! back, adds offsets to addresses, and never dereferences one. What crosses as host memory crosses
//! as a slice. Not here: which devices exist ([`Backend::devices`](super::Backend::devices)) and
//! what runs on them ([`BoundForm::call`](super::BoundForm::call) with views of that device).

use std::sync::Arc;

use crate::sdk::Failure;

/// An open device, shared by the host's handle and the forms bound on it.
pub type Shared = Arc<dyn Device>;

/// A device with memory of its own. The host makes one call at a time on an open device; calls of
/// bound forms may run meanwhile. A device that is gone answers every call with
/// [`Failure::failed`] and the code `device_lost`.
pub trait Device: Send + Sync {
    /// Allocates; the address is a multiple of `align` and not 0.
    fn alloc(&self, bytes: u64, align: u64) -> Result<u64, Failure>;

    /// Frees what [`Device::alloc`] gave. Unknown addresses are ignored, a lost device forgets.
    fn free(&self, address: u64);

    /// Copies host bytes in. `from` may be reused when it returns.
    fn copy_in(&self, queue: u64, to: u64, from: &[u8]) -> Result<(), Failure>;

    /// Copies device bytes out; they are in `to` when it returns.
    fn copy_out(&self, queue: u64, to: &mut [u8], from: u64) -> Result<(), Failure>;

    /// Makes a queue, not 0: 0 is the device's default queue.
    fn queue_new(&self) -> Result<u64, Failure>;

    /// Frees a queue.
    fn queue_free(&self, queue: u64);

    /// Waits for everything on the queue.
    fn synchronize(&self, queue: u64) -> Result<(), Failure>;

    /// Sets the queue's mark.
    fn mark(&self, queue: u64) -> Result<(), Failure>;

    /// Milliseconds from the mark to everything enqueued so far, for which it waits.
    fn elapsed(&self, queue: u64) -> Result<f32, Failure>;

    /// Starts recording the queue: calls of forms on it are noted, not done, until [`Device::capture_end`]. Whoever
    /// allocates, copies or waits meanwhile is refused, and so is the end of the recording.
    fn capture_begin(&self, queue: u64) -> Result<(), Failure> {
        let _ = queue;
        Err(no_capture())
    }

    /// Ends recording, also after an error; the number is for [`Device::graph_launch`].
    fn capture_end(&self, queue: u64) -> Result<u64, Failure> {
        let _ = queue;
        Err(no_capture())
    }

    /// Enqueues everything a recording holds, at the addresses it was recorded with.
    fn graph_launch(&self, queue: u64, graph: u64) -> Result<(), Failure> {
        let _ = (queue, graph);
        Err(no_capture())
    }

    /// Frees a recording whose work is done.
    fn graph_free(&self, graph: u64) {
        let _ = graph;
    }
}

fn no_capture() -> Failure {
    Failure::refused("capture_unsupported", "this device records nothing")
}
