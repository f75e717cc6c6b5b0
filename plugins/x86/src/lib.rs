//! The x86 backend: `w8a16_static` in the decode band (1 to 8 rows) for CPUs with AVX2, better with AVX-512 VNNI.
//!
//! Weights are packed per output channel at bind; work is shared through the host's pool. It owns its kernels and
//! nothing else; what a structure is comes from the catalog's documents, by name.

mod elementwise;
mod forms;
mod isa;
mod packed;
mod product;
mod region;
mod rows;

use structures_plugin_api::abi::LogLevel;
use structures_plugin_api::describe::{Description, Entries, ProbeReport, ProbeShapes};
use structures_plugin_api::sdk::{Backend, BindRequest, BoundForm, Failure, Host};

use crate::forms::FORMS;
use crate::isa::{Isa, ENTRIES};

/// See the crate.
pub struct X86 {
    host: Host,
}

impl Backend for X86 {
    fn description() -> Description {
        Description {
            archs: vec!["x86_64+avx2+fma".into()],
            entries: ENTRIES
                .iter()
                .map(|(name, _)| (*name).to_string())
                .collect(),
            forms: FORMS.iter().map(|f| (f.declare)()).collect(),
            ..Description::new("x86", "structures", env!("CARGO_PKG_VERSION"))
        }
    }

    fn open(host: Host) -> Result<Self, Failure> {
        Ok(X86 { host })
    }

    fn probe(
        &self,
        form: &str,
        _device: u32,
        shapes: &ProbeShapes,
    ) -> Result<ProbeReport, Failure> {
        let (present, absent): (Vec<_>, Vec<_>) =
            ENTRIES.iter().partition(|(_, isa)| isa.present());
        let names = |list: Vec<&(&str, Isa)>| list.iter().map(|e| e.0.to_string()).collect();
        let mut report = ProbeReport {
            entries: Entries {
                present: names(present),
                absent: names(absent),
            },
            ..ProbeReport::default()
        };
        let description = Self::description();
        let admitted = match description.form(&shapes.structure, form) {
            None => Err(Failure::refused(
                "form_unknown",
                format!("no form `{form}` of `{}` is declared", shapes.structure),
            )),
            Some(decl) => decl.admits(shapes),
        };
        match (admitted, Isa::best()) {
            (Err(failure), _) => {
                report.code = Some(failure.code);
                report.reason = Some(failure.message);
            }
            (Ok(()), None) => {
                report.code = Some("entry_missing".into());
                report.reason = Some("the CPU has neither AVX-512 VNNI nor AVX2 with FMA".into());
            }
            (Ok(()), Some(_)) => report.probed = true,
        }
        Ok(report)
    }

    fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
        let isa = Isa::best().ok_or_else(|| {
            Failure::refused(
                "entry_missing",
                "the CPU has neither AVX-512 VNNI nor AVX2 with FMA",
            )
        })?;
        let form = FORMS
            .iter()
            .find(|f| {
                let d = (f.declare)();
                d.name == request.form && d.structure == request.params.structure
            })
            .ok_or_else(|| {
                let text = format!(
                    "no form `{}` of `{}`",
                    request.form, request.params.structure
                );
                Failure::refused("form_unknown", text)
            })?;
        request.admitted_by(&(form.declare)())?;
        self.host.log(
            LogLevel::Debug,
            "bind",
            &format!("{} on {}", request.form, isa.name()),
        );
        (form.bind)(&self.host, isa, request)
    }
}

structures_plugin_api::export_backend!(X86);
