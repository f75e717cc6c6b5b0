//! The device table of a Rust backend: numbers and slices in front of [`Device`].
//!
//! A handle is a boxed [`Shared`], so that forms bound on a device may outlive the host's handle.

use std::ffi::c_void;
use std::sync::Arc;

use super::{answer, backend, guard};
use crate::abi::{DeviceVTable, Error, Status, API_MINOR, STATUS_OK};
use crate::owned::put_error;
use crate::sdk::{Backend, Device, Failure, Shared};

/// The table of a backend with devices.
pub(super) const fn table<T: Backend>() -> DeviceVTable {
    DeviceVTable {
        struct_size: size_of::<DeviceVTable>() as u32,
        api_minor: API_MINOR,
        open: open::<T>,
        alloc,
        free,
        copy_in,
        copy_out,
        queue_new,
        synchronize,
        elapsed,
        capture_begin,
        capture_end,
        queue_free: Some(queue_free),
        close: Some(close),
        graph_launch: Some(graph_launch),
        graph_free: Some(graph_free),
    }
}

/// A number as the opaque pointer it crosses as.
fn opaque(number: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(number as usize)
}

/// # Safety
/// `device` is null or an open device that `close` has not taken.
unsafe fn shared<'a>(device: *mut c_void) -> Result<&'a dyn Device, Failure> {
    // SAFETY: promised by the caller.
    unsafe { device.cast_const().cast::<Shared>().as_ref() }
        .map(Arc::as_ref)
        .ok_or_else(|| Failure::invalid("argument", "the device is null"))
}

/// Answers a status alone.
///
/// # Safety
/// `error` is null or writable.
unsafe fn done(made: Result<(), Failure>, error: *mut Error) -> Status {
    // SAFETY: promised by the caller.
    made.map_or_else(|f| unsafe { put_error(error, f) }, |()| STATUS_OK)
}

fn length(bytes: u64) -> Result<usize, Failure> {
    usize::try_from(bytes)
        .ok()
        .filter(|n| *n <= isize::MAX as usize)
        .ok_or_else(|| Failure::invalid("argument", format!("{bytes} bytes of host memory")))
}

unsafe extern "C" fn open<T: Backend>(
    plugin: *mut c_void,
    index: u32,
    device: *mut *mut c_void,
    error: *mut Error,
) -> Status {
    // SAFETY: made by the plugin's `open`, says the ABI.
    let made = guard(|| unsafe { backend::<T>(plugin) }?.open_device(index));
    let made = made.map(|shared| Box::into_raw(Box::new(shared)).cast::<c_void>());
    // SAFETY: the caller's out-parameters, null or writable.
    unsafe { answer(made, device, error) }
}

unsafe extern "C" fn close(device: *mut c_void) {
    if !device.is_null() {
        // SAFETY: made by `open`, closed once.
        let shared = unsafe { Box::from_raw(device.cast::<Shared>()) };
        let _ = guard(|| {
            drop(shared);
            Ok(())
        });
    }
}

unsafe extern "C" fn alloc(
    device: *mut c_void,
    bytes: u64,
    align: u64,
    memory: *mut *mut c_void,
    error: *mut Error,
) -> Status {
    // SAFETY: an open device, says the ABI.
    let made = guard(|| unsafe { shared(device) }?.alloc(bytes, align));
    // SAFETY: the caller's out-parameters, null or writable.
    unsafe { answer(made.map(opaque), memory, error) }
}

unsafe extern "C" fn free(device: *mut c_void, memory: *mut c_void) {
    let _ = guard(|| {
        // SAFETY: an open device, says the ABI.
        unsafe { shared(device) }?.free(memory.addr() as u64);
        Ok(())
    });
}

unsafe extern "C" fn copy_in(
    device: *mut c_void,
    queue: *mut c_void,
    to: *mut c_void,
    from: *const c_void,
    bytes: u64,
    error: *mut Error,
) -> Status {
    let made = guard(|| {
        if bytes == 0 {
            return Ok(());
        }
        if from.is_null() {
            return Err(Failure::invalid("argument", "the host memory is null"));
        }
        // SAFETY: `bytes` of host memory are readable for the call, says the ABI.
        let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), length(bytes)?) };
        // SAFETY: an open device, says the ABI.
        unsafe { shared(device) }?.copy_in(queue.addr() as u64, to.addr() as u64, from)
    });
    // SAFETY: the caller's, null or writable.
    unsafe { done(made, error) }
}

unsafe extern "C" fn copy_out(
    device: *mut c_void,
    queue: *mut c_void,
    to: *mut c_void,
    from: *const c_void,
    bytes: u64,
    error: *mut Error,
) -> Status {
    let made = guard(|| {
        if bytes == 0 {
            return Ok(());
        }
        if to.is_null() {
            return Err(Failure::invalid("argument", "the host memory is null"));
        }
        // SAFETY: `bytes` of initialised host memory are the caller's alone for the call, says the
        // ABI.
        let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), length(bytes)?) };
        // SAFETY: an open device, says the ABI.
        unsafe { shared(device) }?.copy_out(queue.addr() as u64, to, from.addr() as u64)
    });
    // SAFETY: the caller's, null or writable.
    unsafe { done(made, error) }
}

unsafe extern "C" fn queue_new(
    device: *mut c_void,
    queue: *mut *mut c_void,
    error: *mut Error,
) -> Status {
    // SAFETY: an open device, says the ABI.
    let made = guard(|| unsafe { shared(device) }?.queue_new());
    // SAFETY: the caller's out-parameters, null or writable.
    unsafe { answer(made.map(opaque), queue, error) }
}

unsafe extern "C" fn queue_free(device: *mut c_void, queue: *mut c_void) {
    let _ = guard(|| {
        // SAFETY: an open device, says the ABI.
        unsafe { shared(device) }?.queue_free(queue.addr() as u64);
        Ok(())
    });
}

unsafe extern "C" fn synchronize(
    device: *mut c_void,
    queue: *mut c_void,
    error: *mut Error,
) -> Status {
    // SAFETY: an open device, says the ABI.
    let made = guard(|| unsafe { shared(device) }?.synchronize(queue.addr() as u64));
    // SAFETY: the caller's, null or writable.
    unsafe { done(made, error) }
}

unsafe extern "C" fn elapsed(
    device: *mut c_void,
    queue: *mut c_void,
    milliseconds: *mut f32,
    error: *mut Error,
) -> Status {
    let queue = queue.addr() as u64;
    if milliseconds.is_null() {
        // SAFETY: an open device, says the ABI.
        let made = guard(|| unsafe { shared(device) }?.mark(queue));
        // SAFETY: the caller's, null or writable.
        return unsafe { done(made, error) };
    }
    // SAFETY: an open device, says the ABI.
    let made = guard(|| unsafe { shared(device) }?.elapsed(queue));
    // SAFETY: the caller's out-parameters, null or writable.
    unsafe { answer(made, milliseconds, error) }
}

unsafe extern "C" fn capture_begin(
    device: *mut c_void,
    queue: *mut c_void,
    error: *mut Error,
) -> Status {
    // SAFETY: an open device, says the ABI.
    let made = guard(|| unsafe { shared(device) }?.capture_begin(queue.addr() as u64));
    // SAFETY: the caller's, null or writable.
    unsafe { done(made, error) }
}

unsafe extern "C" fn capture_end(
    device: *mut c_void,
    queue: *mut c_void,
    graph: *mut *mut c_void,
    error: *mut Error,
) -> Status {
    // SAFETY: an open device, says the ABI.
    let made = guard(|| unsafe { shared(device) }?.capture_end(queue.addr() as u64));
    // SAFETY: the caller's out-parameters, null or writable.
    unsafe { answer(made.map(opaque), graph, error) }
}

unsafe extern "C" fn graph_launch(
    device: *mut c_void,
    queue: *mut c_void,
    graph: *mut c_void,
    error: *mut Error,
) -> Status {
    let (queue, graph) = (queue.addr() as u64, graph.addr() as u64);
    // SAFETY: an open device, says the ABI.
    let made = guard(|| unsafe { shared(device) }?.graph_launch(queue, graph));
    // SAFETY: the caller's, null or writable.
    unsafe { done(made, error) }
}

unsafe extern "C" fn graph_free(device: *mut c_void, graph: *mut c_void) {
    let _ = guard(|| {
        // SAFETY: an open device, says the ABI.
        unsafe { shared(device) }?.graph_free(graph.addr() as u64);
        Ok(())
    });
}
