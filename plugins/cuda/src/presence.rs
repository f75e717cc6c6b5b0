//! Whether there is anything to run on, asked one step after the other: the driver's library, its version, the
//! devices. Each absence is a code with what to install.
//!
//! Nothing here makes a context. Everything runs inside [`caught`], because the bindings panic where a library or a
//! symbol is missing.

use std::cell::Cell;
use std::panic::{catch_unwind, set_hook, take_hook, AssertUnwindSafe};
use std::sync::{Once, OnceLock};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUevent, CUresult};
use libloading::Library;
use structures_plugin_api::describe::DeviceInfo;
use structures_plugin_api::sdk::Failure;

use crate::libraries;

/// The CUDA version a driver must serve, as `1000 * major + 10 * minor`: that of the oldest compiler of the kernels. A
/// device that a driver is too old for it does not show.
pub const DRIVER_NEEDED: i32 = 12040;

/// One GPU, as a host addresses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The driver's number, from 0; a host's is one more.
    pub ordinal: i32,
    /// What the driver calls it.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// CUDA version of the driver, as [`DRIVER_NEEDED`].
    pub driver: i32,
}

impl Gpu {
    /// What the device table says about it.
    pub fn info(&self) -> DeviceInfo {
        DeviceInfo {
            index: self.ordinal as u32 + 1,
            kind: "gpu".into(),
            name: self.name.clone(),
            arch: format!("sm_{}{}", self.capability.0, self.capability.1),
            built_for: Vec::new(),
            memory_bytes: self.memory_bytes,
        }
    }
}

/// Runs calls into the driver's bindings; a missing symbol is `driver_too_old`. What they panic with is told in the failure,
/// not on the standard error.
pub fn caught<R>(f: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });
    thread_local!(static WHERE: Cell<Option<String>> = const { Cell::new(None) });
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let otherwise = take_hook();
        set_hook(Box::new(move |panic| match INSIDE.get() {
            true => WHERE.set(panic.location().map(ToString::to_string)),
            false => otherwise(panic),
        }));
    });
    let outer = INSIDE.replace(true);
    let done = catch_unwind(AssertUnwindSafe(f));
    INSIDE.set(outer);
    done.unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        Err(Failure::failed(
            "driver_too_old",
            format!(
                "the driver's library lacks something: {text} ({}); update the NVIDIA driver",
                WHERE.take().unwrap_or_default()
            ),
        ))
    })
}

/// The GPUs of this machine; at least one.
///
/// # Errors
/// `driver_absent`, `driver_too_old`, `driver_failed`, `no_device`.
pub fn gpus() -> Result<Vec<Gpu>, Failure> {
    caught(|| {
        // SAFETY: opens libraries of the system's search path by the driver's names and closes them.
        if !unsafe { sys::is_culib_present() } {
            let text = match broken() {
                None => "libcuda.so is not among the system's libraries".into(),
                Some(why) => format!("libcuda.so cannot be opened ({why})"),
            };
            return Err(Failure::refused(
                "driver_absent",
                format!("no NVIDIA driver: {text}; install one that serves CUDA 12.4 or newer"),
            ));
        }
        let mut driver = 0;
        // SAFETY: the out-parameter is live; this may be asked before anything else.
        let asked = unsafe { sys::cuDriverGetVersion(&mut driver) };
        started("cuDriverGetVersion", asked)?;
        if driver < DRIVER_NEEDED {
            return Err(Failure::refused(
                "driver_too_old",
                format!(
                    "the driver serves CUDA {}, needed is {}; update the NVIDIA driver",
                    version(driver),
                    version(DRIVER_NEEDED)
                ),
            ));
        }
        // SAFETY: takes no pointer.
        started("cuInit", unsafe { sys::cuInit(0) })?;
        let said = |e: result::DriverError| started("the list of devices", e.0).err();
        let count = result::device::get_count().or_else(|e| said(e).map_or(Ok(0), Err))?;
        if count <= 0 {
            return Err(none());
        }
        (0..count).map(|ordinal| gpu(ordinal, driver)).collect()
    })
}

/// What is wrong with a driver's library that is there.
fn broken() -> Option<String> {
    ["libcuda.so.1", "libcuda.so"].iter().find_map(|name| {
        // SAFETY: the driver's library, which its own bindings have just failed to open.
        let why = libraries::why(&unsafe { Library::new(*name) }.err()?);
        let absent =
            why.starts_with(&format!("{name}: cannot open")) && why.contains("No such file");
        (!absent).then_some(why)
    })
}

/// Milliseconds between two events.
///
/// The bindings call the clock of CUDA 12.8; every driver has the one before it.
///
/// # Errors
/// The driver's.
///
/// # Safety
/// Events of the current context that were recorded.
pub unsafe fn elapsed(start: CUevent, end: CUevent) -> Result<f32, result::DriverError> {
    type Clock = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;
    static CLOCK: OnceLock<Option<(Library, Clock)>> = OnceLock::new();
    let clock = CLOCK.get_or_init(|| {
        // SAFETY: the driver's library, which is open already; the type is that of its documented interface.
        unsafe {
            let library = Library::new("libcuda.so.1")
                .or_else(|_| Library::new("libcuda.so"))
                .ok()?;
            let clock = *library.get::<Clock>(b"cuEventElapsedTime\0").ok()?;
            Some((library, clock))
        }
    });
    let Some((_, clock)) = clock else {
        return Err(result::DriverError(CUresult::CUDA_ERROR_NOT_FOUND));
    };
    let mut milliseconds = 0.0;
    // SAFETY: promised by the caller; the out-parameter is live.
    let answer = unsafe { clock(&mut milliseconds, start, end) };
    answer.result().map(|()| milliseconds)
}

fn gpu(ordinal: i32, driver: i32) -> Result<Gpu, Failure> {
    let failed = |e: result::DriverError| {
        let what = format!("device {ordinal} does not answer: {:?}", e.0);
        Failure::failed("driver_failed", what)
    };
    let device = result::device::get(ordinal).map_err(failed)?;
    // SAFETY: the device is one the driver just gave.
    let attribute = |what| unsafe { result::device::get_attribute(device, what) }.map_err(failed);
    Ok(Gpu {
        ordinal,
        name: result::device::get_name(device).map_err(failed)?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        ),
        // SAFETY: as above.
        memory_bytes: unsafe { result::device::total_mem(device) }.map_err(failed)? as u64,
        driver,
    })
}

fn none() -> Failure {
    Failure::refused(
        "no_device",
        "the NVIDIA driver is there and shows no GPU; check CUDA_VISIBLE_DEVICES and that the container or the \
         user may use one",
    )
}

fn started(what: &str, answer: CUresult) -> Result<(), Failure> {
    match answer {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NO_DEVICE => Err(none()),
        CUresult::CUDA_ERROR_STUB_LIBRARY => Err(Failure::refused(
            "driver_absent",
            "libcuda.so is the stub a toolkit ships for linking; install an NVIDIA driver",
        )),
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => Err(Failure::refused(
            "driver_too_old",
            format!("{what}: library and kernel module of the NVIDIA driver differ; reinstall it"),
        )),
        _ => Err(Failure::failed(
            "driver_failed",
            format!("{what}: {answer:?}"),
        )),
    }
}

/// `12080` as `12.8`.
pub fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_bindings_is_an_answer() {
        let failure = caught::<()>(|| panic!("Missing symbol cuFuture")).expect_err("caught");
        assert_eq!(failure.code, "driver_too_old");
        assert!(failure.message.contains("cuFuture"), "{failure}");
    }

    #[test]
    fn a_device_is_told_in_the_words_of_a_declaration() {
        let gpu = Gpu {
            ordinal: 0,
            name: "a card".into(),
            capability: (12, 0),
            memory_bytes: 1 << 30,
            driver: 13000,
        };
        assert_eq!((gpu.info().index, gpu.info().arch.as_str()), (1, "sm_120"));
        assert_eq!(
            (version(12080).as_str(), version(13000).as_str()),
            ("12.8", "13.0")
        );
    }

    #[test]
    fn what_the_driver_says_has_a_code() {
        let code = |answer| started("x", answer).expect_err("no").code;
        assert_eq!(code(CUresult::CUDA_ERROR_NO_DEVICE), "no_device");
        assert_eq!(code(CUresult::CUDA_ERROR_STUB_LIBRARY), "driver_absent");
        assert_eq!(
            code(CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH),
            "driver_too_old"
        );
        assert_eq!(code(CUresult::CUDA_ERROR_UNKNOWN), "driver_failed");
    }
}
