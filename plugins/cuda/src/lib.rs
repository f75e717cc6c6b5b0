//! The CUDA backend: region structures on NVIDIA GPUs.
//!
//! Built on any machine, without a toolkit: the driver is opened when a device is asked for, kernels are CUDA C++ in
//! `cu/` that NVRTC compiles for the device at bind. Where something is missing every entry refuses with one code that
//! says what to install; nothing here needs a GPU to be described, listed or compiled.
//!
//! Owns its kernels, their machine code on disk and the memory it packs weights into. What a structure is comes from
//! the catalog's documents, by name. Not here: the CPU (device 0), which has backends of its own.

mod cache;
pub mod compiler;
pub mod context;
mod format;
mod forms;
pub mod kernels;
mod libraries;
mod lt;
mod operations;
pub mod presence;
mod product;
mod weights;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use structures_plugin_api::abi::LogLevel;
use structures_plugin_api::describe::{Description, DeviceInfo, Entries, ProbeReport, ProbeShapes};
use structures_plugin_api::sdk::{self, Backend, BindRequest, BoundForm, Device, Failure, Host};

use crate::cache::{Cache, Origin};
use crate::compiler::Compiler;
use crate::context::{Context, Module};
use crate::lt::Lt;
use crate::presence::{caught, Gpu};

/// Rungs, as entries of a probe.
const ENTRIES: [&str; 6] = [
    "cublaslt_fast",
    "cublaslt",
    "wgmma",
    "mma_sync",
    "row_stream",
    "plain",
];

/// The backend.
pub struct Cuda {
    host: Host,
    /// Asked once, when first needed.
    gpus: OnceLock<Result<Vec<Gpu>, Failure>>,
    compiler: OnceLock<Result<Compiler, Failure>>,
    /// By ordinal; a context goes when its last form, memory and handle is gone.
    contexts: Mutex<HashMap<i32, std::sync::Weak<Context>>>,
    /// cublasLt by ordinal.
    libraries: Mutex<HashMap<i32, std::sync::Weak<Lt>>>,
    /// Loaded images, by ordinal and file.
    modules: Mutex<HashMap<(i32, &'static str), std::sync::Weak<Module>>>,
}

impl Backend for Cuda {
    fn description() -> Description {
        Description {
            archs: kernels::GENERIC.iter().map(|a| (*a).to_string()).collect(),
            entries: ENTRIES.iter().map(|e| (*e).to_string()).collect(),
            forms: forms::LEAVES
                .iter()
                .flat_map(|leaf| (leaf.declare)())
                .collect(),
            operations: operations::KINDS.iter().map(|k| (*k).into()).collect(),
            recorded_operations: operations::KINDS.iter().map(|k| (*k).into()).collect(),
            ..Description::new("cuda", "structures", env!("CARGO_PKG_VERSION"))
        }
    }

    fn open(host: Host) -> Result<Self, Failure> {
        Ok(Cuda {
            host,
            gpus: OnceLock::new(),
            compiler: OnceLock::new(),
            contexts: Mutex::default(),
            libraries: Mutex::default(),
            modules: Mutex::default(),
        })
    }

    fn probe(&self, form: &str, device: u32, shapes: &ProbeShapes) -> Result<ProbeReport, Failure> {
        let mut report = Self::description().probe(form, shapes);
        if !report.probed {
            return Ok(report);
        }
        let (leaf, decl) = forms::found(&shapes.structure, form)?;
        let ladder = format_of(&decl.name).map_or(&["plain"][..], |ladder| ladder);
        let ready = self.context(device).and_then(|context| {
            context.synchronize(0)?;
            self.module(&context, leaf.structure)?;
            let gpu = context.gpu();
            let abilities = kernels::Abilities::of(&kernels::target(gpu.capability));
            Ok((abilities, gpu.driver))
        });
        let there = |entry: &&str| match (*entry, &ready) {
            (_, Err(_)) => false,
            ("cublaslt" | "cublaslt_fast", Ok((_, driver))) => Lt::look(variable, *driver).is_ok(),
            ("wgmma", Ok((abilities, _))) => abilities.warpgroups,
            _ => true,
        };
        let (present, absent): (Vec<&str>, Vec<&str>) =
            ladder.iter().copied().partition(|e| there(e));
        let owned = |list: Vec<&str>| list.into_iter().map(str::to_string).collect();
        report.entries = Entries {
            present: owned(present),
            absent: owned(absent),
        };
        if let Err(failure) = ready {
            report.probed = false;
            report.code = Some(failure.code);
            report.reason = Some(failure.message);
        }
        Ok(report)
    }

    const DEVICES: bool = true;

    fn devices(&self) -> Result<Vec<DeviceInfo>, Failure> {
        Ok(self.gpus()?.iter().map(Gpu::info).collect())
    }

    fn open_device(&self, index: u32) -> Result<sdk::Shared, Failure> {
        Ok(self.context(index)?)
    }

    fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
        let context = self.context(request.device)?;
        if let Some(kind) = request.operation() {
            return caught(|| {
                operations::bind(&self.module(&context, operations::FILE)?, kind, request)
            });
        }
        let library = || self.library(&context);
        caught(|| {
            forms::bind(
                &self.host,
                |file| self.module(&context, file),
                &library,
                request,
            )
        })
    }
}

/// Names of the rungs of a form that multiplies.
fn format_of(form: &str) -> Option<&'static [&'static str]> {
    match form {
        "w8a16_static" => Some(&["row_stream"]),
        "bf16" | "bf16_pack" => Some(&["cublaslt", "wgmma", "mma_sync", "plain"]),
        "fp8_static" => Some(&["cublaslt_fast", "cublaslt", "wgmma", "mma_sync", "plain"]),
        _ => None,
    }
}

/// The environment, except where the process runs with another user's rights.
fn variable(name: &str) -> Option<std::ffi::OsString> {
    // SAFETY: takes a number, answers a number.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    (!secure).then(|| std::env::var_os(name)).flatten()
}

impl Cuda {
    fn gpus(&self) -> Result<&[Gpu], Failure> {
        let asked = self.gpus.get_or_init(presence::gpus);
        asked.as_deref().map_err(Clone::clone)
    }

    fn context(&self, device: u32) -> Result<Arc<Context>, Failure> {
        let gpus = self.gpus()?;
        let gpu = device.checked_sub(1).and_then(|i| gpus.get(i as usize));
        let gpu = gpu.ok_or_else(|| {
            let text = format!("no device {device}; there are 1 to {}", gpus.len());
            Failure::refused("device_unknown", text)
        })?;
        let mut contexts = self.contexts.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(open) = contexts
            .get(&gpu.ordinal)
            .and_then(std::sync::Weak::upgrade)
        {
            return Ok(open);
        }
        let context = Context::open(gpu)?;
        contexts.insert(gpu.ordinal, Arc::downgrade(&context));
        Ok(context)
    }

    fn library(&self, context: &Arc<Context>) -> Result<Arc<Lt>, Failure> {
        let mut libraries = self.libraries.lock().unwrap_or_else(|e| e.into_inner());
        let ordinal = context.gpu().ordinal;
        if let Some(open) = libraries.get(&ordinal).and_then(std::sync::Weak::upgrade) {
            return Ok(open);
        }
        let library = Lt::open(context, variable)?;
        libraries.insert(ordinal, Arc::downgrade(&library));
        Ok(library)
    }

    fn compiler(&self, gpu: &Gpu) -> Result<&Compiler, Failure> {
        let found = self
            .compiler
            .get_or_init(|| Compiler::find(variable, gpu.driver / 1000));
        found.as_ref().map_err(Clone::clone)
    }

    /// The kernels of a file on a GPU: loaded, else compiled or taken from disk.
    fn module(&self, context: &Arc<Context>, file: &str) -> Result<Arc<Module>, Failure> {
        let found = kernels::FILES.iter().find(|f| f.name == file);
        let file = found.ok_or_else(|| {
            Failure::failed("kernel_missing", format!("no file of kernels `{file}`"))
        })?;
        let gpu = context.gpu();
        let mut modules = self.modules.lock().unwrap_or_else(|e| e.into_inner());
        let key = (gpu.ordinal, file.name);
        if let Some(module) = modules.get(&key).and_then(std::sync::Weak::upgrade) {
            return Ok(module);
        }
        let compiler = self.compiler(gpu)?;
        let (major, minor) = gpu.capability;
        if !compiler.knows(10 * major + minor) {
            let (found, at) = (compiler.version(), compiler.path());
            let text = format!(
                "NVRTC {}.{} at {at} compiles for no sm_{major}{minor}; install a newer one",
                found.0, found.1
            );
            return Err(Failure::refused("nvrtc_too_old", text));
        }
        let target = kernels::target(gpu.capability);
        let cache = Cache::of(variable);
        let (image, origin) = cache.image(compiler, &file.source(), &target)?;
        let text = match origin {
            Origin::Kept => format!("{} for {target}: from disk", file.name),
            Origin::Made => format!("{} for {target}: compiled", file.name),
        };
        self.host.log(LogLevel::Debug, "kernels", &text);
        let module = Arc::new(context.load(&image)?);
        modules.insert(key, Arc::downgrade(&module));
        Ok(module)
    }
}

structures_plugin_api::export_backend!(Cuda);
