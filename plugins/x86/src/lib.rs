//! The x86 backend: products, norms, attention and recurrences for CPUs with AVX2, better with AVX-512 VNNI and bf16.
//!
//! One file of `forms` a structure, one value of [`format::Format`] a number format, and every structure of products in
//! every format is a form; the list in `forms` drives `describe`, `probe` and `bind`. Weights are packed at bind into
//! huge pages, in the layout that `kernels` describes; calls are shared out on the host's pool.
//!
//! It owns its kernels and nothing else: number formats are the SDK's (`formats`), threads the host's, and what a
//! structure is comes from the catalog, by name.

mod activations;
mod adopt;
mod arena;
mod attention;
#[doc(hidden)]
pub mod bench;
mod elementwise;
mod format;
mod forms;
mod isa;
mod kept;
mod kernels;
mod linear;
mod packed;
mod pool;
mod ports;
mod rope;
mod source;

use std::sync::Arc;

use structures_plugin_api::abi::LogLevel;
use structures_plugin_api::describe::{Description, Entries, ProbeReport, ProbeShapes};
use structures_plugin_api::sdk::{Backend, BindRequest, BoundForm, Failure, Host};

use crate::arena::Arena;
use crate::isa::{Isa, CAP, ENTRIES};
use crate::kept::Keeper;
use crate::pool::Pool;

/// See the crate.
pub struct X86 {
    host: Host,
    isa: Option<Isa>,
    arena: Arc<Arena>,
    pool: Arc<Pool>,
}

/// What every bound form keeps a handle on.
#[derive(Clone)]
struct Shared {
    host: Host,
    isa: Isa,
    arena: Arc<Arena>,
    pool: Arc<Pool>,
    /// Where this bind keeps what it packs.
    keeper: Option<Arc<Keeper>>,
}

impl X86 {
    fn rung(&self) -> Result<Isa, Failure> {
        self.isa.ok_or_else(|| {
            let text = "the CPU has neither AVX-512 VNNI nor AVX2 with FMA and F16C, or the cap names another entry";
            Failure::refused("entry_missing", text)
        })
    }
}

impl Backend for X86 {
    fn description() -> Description {
        Description {
            archs: vec!["x86_64+avx2+fma".into()],
            entries: ENTRIES
                .iter()
                .map(|(name, _)| (*name).to_string())
                .collect(),
            forms: forms::declarations(),
            ..Description::new("x86", "structures", env!("CARGO_PKG_VERSION"))
        }
    }

    fn open(host: Host) -> Result<Self, Failure> {
        let cap = std::env::var(CAP).ok().filter(|cap| !cap.is_empty());
        Ok(X86 {
            host,
            isa: Isa::best(cap.as_deref()),
            arena: Arc::default(),
            pool: Arc::default(),
        })
    }

    fn probe(
        &self,
        form: &str,
        _device: u32,
        shapes: &ProbeShapes,
    ) -> Result<ProbeReport, Failure> {
        let usable = |isa: Isa| isa.present() && self.isa.is_some_and(|best| isa >= best);
        let (present, absent): (Vec<_>, Vec<_>) = ENTRIES.iter().partition(|(_, isa)| usable(*isa));
        let names = |list: Vec<&(&str, Isa)>| list.iter().map(|e| e.0.to_string()).collect();
        let mut report = Self::description().probe(form, shapes);
        report.entries = Entries {
            present: names(present),
            absent: names(absent),
        };
        if let (true, Err(missing)) = (report.probed, self.rung()) {
            report.probed = false;
            (report.code, report.reason) = (Some(missing.code), Some(missing.message));
        }
        Ok(report)
    }

    fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
        let isa = self.rung()?;
        let shared = Shared {
            host: self.host,
            isa,
            arena: self.arena.clone(),
            pool: self.pool.clone(),
            keeper: Keeper::of(request, isa).map(Arc::new),
        };
        let text = format!("{} on {}", request.form, shared.isa.name());
        self.host.log(LogLevel::Debug, "bind", &text);
        forms::bind(&shared, request)
    }
}

structures_plugin_api::export_backend!(X86);
