//! Finds, checks, loads and probes plugins; lends them the host's services. The only unsafe code of the host.
//!
//! Three thin layers. Raw: [`open`](crate::open) (dynamic linker, door) and `sys` (system calls). Checked: statuses,
//! ownership and sizes are verified where they enter. Safe: [`Registry`], [`Plugin`], [`BoundForm`],
//! [`HostTensor`] and [`pool`] are all that the rest of the host sees, and it needs no `unsafe` to use them.
//!
//! Loading, in this order, each step able to refuse one file with a [`Code`] while the others go on: search path,
//! path rules, ELF headers, private content-addressed copy, lock, signature, sidecar, quarantine, `describe` in a
//! throw-away process, identity and handshake, architectures, opening. Nothing is ever unloaded.
//!
//! This crate knows no structure, no host family and no plugin by name; which form to bind, gates and guards are
//! core's.

pub mod arch;
mod cache;
mod child;
mod code;
mod device;
mod devices;
mod document;
mod elf;
mod error;
mod hostile;
mod lock;
mod log;
mod open;
mod opening;
mod paths;
mod plugin;
pub mod pool;
mod private;
mod quarantine;
mod registry;
mod scan;
pub mod search;
mod services;
mod sidecar;
mod signature;
mod staged;
mod store;
mod supervisor;
mod sys;
mod table;
mod tensor;

pub use child::{run_to_end, Ended, Throwaway};
pub use code::{Code, Refusal};
pub use device::{
    Copies, DeviceMemory, DeviceTensor, DeviceTensorMut, PluginDevice, Queue, Recording,
};
pub use devices::{devices, without_devices, Admission, DeviceRow, NoDevices};
pub use document::tolerance_cap;
pub use elf::check as check_elf;
pub use error::LoaderError;
pub use hostile::{RawBind, NULL_CALLS, NULL_ENTRIES};
pub use lock::{Drift, Lock, LockPolicy, LockReport, LockedPlugin, LOCK_FILE};
pub use plugin::{row_capacity, BindSpec, BoundForm, Plugin, PluginError, StatusKind};
pub use pool::configure_threads;
pub use private::directory as private_directory;
pub use quarantine::Quarantined;
pub use registry::{
    forget, Outcome, PluginRow, Registry, ScanOptions, TracedCandidate, TracedPlace,
};
pub use scan::{scan_main, ScanMode, DEADLINE, SUBCOMMAND};
pub use search::Environment;
pub use services::HOST_FEATURES;
pub use signature::SignatureState;
pub use staged::Staged;
pub use sys::{
    end_process, give_memory_back, process_defaults, run_on, secure_execution, take_stdout,
};
pub use tensor::{Element, HostTensor, HostTensorMut, TensorArg, TensorArgMut};
