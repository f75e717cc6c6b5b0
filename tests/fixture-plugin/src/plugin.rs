//! The plugin itself: declarations, and where each fault bites.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::describe::{
    Description, FormDecl, ProbeReport, ProbeShapes, WeightFormat,
};
use structures_plugin_api::export_backend;
use structures_plugin_api::formats::BlockFormat;
use structures_plugin_api::sdk::{
    Backend, BindRequest, BoundForm, Failure, Host, Tensor, TensorMut,
};

use crate::fault::Fault;
use crate::kernels::Kernel;
use crate::trailer;

/// Structure, spans, and the axes on which a form is choosy.
type Served = (
    &'static str,
    &'static [&'static str],
    &'static [(&'static str, &'static [&'static str])],
);

const SERVED: [Served; 4] = [
    (
        "decoder_ffn",
        &["block", "ffn"],
        &[("activation", &["silu", "gelu"])],
    ),
    (
        "linear_proj",
        &["proj"],
        &[("epilogue", &["none", "residual_add"])],
    ),
    ("qkv_pack", &["pack"], &[]),
    // A structure that no catalog of this repository knows: tests define it as data.
    ("plain_norm", &["norm"], &[]),
];

struct Fixture {
    host: Host,
    /// Kernels bound so far by structure, form and size: where `swapped` takes other weights from.
    bound: Mutex<HashMap<String, Vec<Arc<Kernel>>>>,
}

impl Backend for Fixture {
    fn description() -> Description {
        let own = trailer::own();
        let mut d = Description::new(&own.id, "Fixtures", "0.1.0");
        d.archs = vec![std::env::consts::ARCH.into()];
        for served in &SERVED {
            d.forms
                .push(declare(served, "plain", "none", WeightFormat::None));
            if served.0 != "plain_norm" {
                d.forms.push(declare(
                    served,
                    "int8",
                    "w8a16_static",
                    WeightFormat::Int8PerChannel,
                ));
            }
        }
        match own.fault {
            Fault::WrongArch => {
                let other = if cfg!(target_arch = "aarch64") {
                    "x86_64"
                } else {
                    "aarch64"
                };
                d.archs = vec![other.into()];
            }
            Fault::FewRows => d.forms.iter_mut().for_each(|f| f.band.rows = Some([1, 8])),
            Fault::MalformedArch => d.archs.push("some machine".into()),
            Fault::ApiMajor2 => d.api = "2.0.0".into(),
            Fault::ApiMinorNewer => d.api = "1.99.0".into(),
            Fault::Requires => d.requires = vec!["time_travel".into()],
            Fault::BadDescribe => d.schema = 99,
            Fault::DescribeChanges if !scanned() => d.forms.truncate(1),
            Fault::RefusesPacked => d.forms.iter_mut().for_each(|f| {
                f.priority = 100;
                if f.weight_format == WeightFormat::None {
                    f.packed = BlockFormat::ALL.to_vec();
                }
            }),
            Fault::DescribePanics => panic!("planted in describe"),
            Fault::DescribeHangs => hang(),
            Fault::DescribeAborts => std::process::abort(),
            Fault::Chatty => println!("chatter while describing"),
            _ => {}
        }
        d
    }

    fn open(host: Host) -> Result<Self, Failure> {
        match trailer::own().fault {
            Fault::OpenFails => return Err(Failure::failed("no_driver", "planted in open")),
            Fault::OpenAborts => std::process::abort(),
            Fault::OpenExits => std::process::exit(0),
            Fault::OpenHangs => hang(),
            _ => {}
        }
        Ok(Fixture {
            host,
            bound: Mutex::default(),
        })
    }

    fn probe(&self, form: &str, _: u32, shapes: &ProbeShapes) -> Result<ProbeReport, Failure> {
        if trailer::own().fault == Fault::ProbeRefuses {
            return Ok(ProbeReport {
                code: Some("entry_missing".into()),
                reason: Some("planted in probe".into()),
                ..ProbeReport::default()
            });
        }
        let d = Self::description();
        let decl = d
            .form(&shapes.structure, form)
            .ok_or_else(|| unknown(form))?;
        decl.admits(shapes)?;
        Ok(ProbeReport {
            probed: true,
            ..ProbeReport::default()
        })
    }

    fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
        let d = Self::description();
        let decl = d
            .form(&request.params.structure, request.form)
            .ok_or_else(|| unknown(request.form))?;
        request.admitted_by(decl)?;
        if !request.params.packed.is_empty() {
            return Err(Failure::refused("planted_no", "planted: rows as stored"));
        }
        let own = Arc::new(Kernel::bind(request, request.form == "int8")?);
        let fault = trailer::own().fault;
        let kernel = if fault == Fault::Swapped {
            self.another(request, own)
        } else {
            own
        };
        Ok(Box::new(Bound {
            host: self.host,
            kernel,
            fault,
            calls: 0,
            structure: request.params.structure.clone(),
        }))
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if trailer::own().fault == Fault::CloseAborts {
            std::process::abort();
        }
    }
}

impl Fixture {
    /// The first kernel of the same shape with other weights, if there is one.
    fn another(&self, request: &BindRequest<'_>, own: Arc<Kernel>) -> Arc<Kernel> {
        let key = format!(
            "{} {} {:?}",
            request.params.structure, request.form, request.params.dims
        );
        let mut bound = self
            .bound
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        let alike = bound.entry(key).or_default();
        let other = alike.iter().find(|k| ***k != *own).cloned();
        alike.push(Arc::clone(&own));
        other.unwrap_or(own)
    }
}

fn declare(
    (structure, spans, axes): &Served,
    name: &str,
    format: &str,
    weight_format: WeightFormat,
) -> FormDecl {
    let text = |names: &[&str]| names.iter().map(|n| (*n).to_string()).collect::<Vec<_>>();
    let mut form = FormDecl::new(structure, name, format);
    form.spans = text(spans);
    form.dtypes = vec!["f32".into()];
    form.variants = axes
        .iter()
        .map(|(axis, values)| ((*axis).to_string(), text(values)))
        .collect();
    form.quantises = weight_format != WeightFormat::None;
    form.precision_rank = if form.quantises { 10 } else { 0 };
    form.weight_format = weight_format;
    form
}

fn unknown(form: &str) -> Failure {
    Failure::refused("form_unknown", format!("no form `{form}`"))
}

fn hang() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Whether this is the throw-away process of a scan.
fn scanned() -> bool {
    std::env::args_os()
        .nth(1)
        .is_some_and(|argument| argument == "scan-plugin")
}

struct Bound {
    host: Host,
    kernel: Arc<Kernel>,
    fault: Fault,
    calls: u32,
    structure: String,
}

/// Whether forms of another structure were called among the last few calls of this plugin.
fn others_in_use(structure: &str) -> bool {
    static LAST: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut last = LAST.lock().unwrap_or_else(|poison| poison.into_inner());
    last.push(structure.to_string());
    let from = last.len().saturating_sub(16);
    last.drain(..from);
    last.iter().any(|other| other != structure)
}

fn zeros(inputs: &[Tensor<'_>]) -> Result<bool, Failure> {
    for input in inputs.iter().filter(|i| !i.is_absent()) {
        if input.to_f32_vec()?.iter().any(|v| *v != 0.0) {
            return Ok(false);
        }
    }
    Ok(true)
}

impl BoundForm for Bound {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: self.kernel.bytes(),
            ..FormFacts::default()
        }
    }

    fn call(
        &mut self,
        _: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        self.calls += 1;
        match (self.fault, self.calls) {
            (Fault::ErrorThirdCall, 3) => {
                return Err(Failure::failed(
                    "planted_error",
                    "planted in the third call",
                ));
            }
            (Fault::ErrorNinthCall, 9) => {
                return Err(Failure::failed(
                    "planted_error",
                    "planted in the ninth call",
                ));
            }
            (Fault::ErrorLate, 300) => {
                return Err(Failure::failed("planted_error", "planted in a late call"));
            }
            (Fault::PanicInCall, _) | (Fault::PanicThirdCall, 3) | (Fault::PanicNinthCall, 9) => {
                panic!("planted in call")
            }
            (Fault::DeclinesOdd, n) if n >= 30 && n % 2 == 1 => {
                return Err(Failure::refused(
                    "planted_no",
                    "planted in every second call",
                ));
            }
            (Fault::SlowTogether, _) if others_in_use(&self.structure) => {
                std::thread::sleep(Duration::from_millis(20));
            }
            (Fault::WritesInput, _) => {
                let first = inputs[0].view().data.cast::<f32>();
                // SAFETY: none: that a form must not write here is the fault. The memory is the host's, and writable.
                unsafe { first.write(first.read() + 1.0) };
            }
            (Fault::FastOnZeros, _) if zeros(inputs)? => {}
            (Fault::Slow | Fault::FastOnZeros, _) => {
                for _ in 0..10 {
                    self.kernel.run(&self.host, inputs)?;
                }
            }
            _ => {}
        }
        let results = self.kernel.run(&self.host, inputs)?;
        if results.len() != outputs.len() {
            let text = format!(
                "expected {} outputs, found {}",
                results.len(),
                outputs.len()
            );
            return Err(Failure::invalid("argument", text));
        }
        for (output, mut values) in outputs.iter_mut().zip(results) {
            match self.fault {
                Fault::Scaled => values.iter_mut().for_each(|v| *v *= 1.01),
                Fault::NonFinite => values[0] = f32::NAN,
                Fault::NonFiniteLate if self.calls >= 40 => values[0] = f32::NAN,
                Fault::Drifts if self.calls > 20 => {
                    let more = 1e-3 * (self.calls - 20) as f32;
                    values.iter_mut().for_each(|v| *v += more);
                }
                _ => {}
            }
            if self.fault == Fault::Half {
                write_half(output, &values)?;
            } else {
                output.write_f32(&values)?;
            }
        }
        Ok(())
    }
}

/// The first half of the elements; with one row, the first half of the row.
fn write_half(output: &mut TensorMut<'_>, values: &[f32]) -> Result<(), Failure> {
    let (rows, cols) = (output.rows(), output.cols());
    let mut left = values.len() / 2;
    for row in 0..rows {
        let n = left.min(cols);
        output.row_f32_mut(row)?[..n].copy_from_slice(&values[row * cols..][..n]);
        left -= n;
    }
    Ok(())
}

export_backend!(Fixture);

/// Runs while the library is being opened, before anybody asked it for anything.
extern "C" fn on_load() {
    match trailer::own().fault {
        Fault::Chatty => println!("chatter while loading"),
        Fault::LoadAborts => std::process::abort(),
        Fault::LoadExits => std::process::exit(0),
        Fault::LoadHangs => hang(),
        _ => {}
    }
}

#[used]
#[link_section = ".init_array"]
static ON_LOAD: extern "C" fn() = on_load;
