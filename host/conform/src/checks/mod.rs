//! The checks, one file each, in the order in which they are told.
//!
//! Checks of the file read it and open nothing. Checks of the plugin and of a form run in a process that loaded it.
//! Each owns one kind of fault, and looks away from the others': numbers are compared with the reference by
//! [`parity`] alone (and at edges by [`band`], where the form is right elsewhere); the others compare a form with itself.

mod band;
mod concurrency;
mod describe;
mod determinism;
mod file;
mod footprint;
mod hostile;
mod ids;
mod launch;
mod layout;
mod mutation;
mod non_finite;
mod outputs;
mod parity;

use std::collections::BTreeMap;
use std::path::Path;

use structures_catalog::{Catalog, Spec};
use structures_loader::{BoundForm, HostTensor, HostTensorMut, PluginError, Staged, Throwaway};
use structures_plugin_api::describe::FormDecl;
use structures_suite::cases::{draft_of, drafts, sizes_of_rows, width_symbols, Draft};
use structures_suite::executor::Request;
use structures_suite::judge::{Judge, Made, Prepared};
use structures_suite::operand::Operand;
use structures_suite::{Loaded, SuiteError};

use crate::child::{Task, Teller};
use crate::code::Code;
use crate::room::{Lay, Room};

/// The check that the library loads.
pub const LOAD: &str = "load";
/// The check of the document.
pub const DESCRIBE: &str = "describe";
/// The check that a form runs.
pub const LAUNCH: &str = "launch";

type OfFile = fn(&Path, &Throwaway) -> Verdict;
type OfPlugin = fn(&Context<'_>) -> Verdict;
type OfForm = fn(&Bench<'_>) -> Result<Verdict, SuiteError>;

/// A check.
pub enum Check {
    /// Of the file, which stays closed.
    File {
        /// Name.
        name: &'static str,
        /// What it does.
        run: OfFile,
    },
    /// How long a scan takes; measured from outside.
    Scan {
        /// Name.
        name: &'static str,
    },
    /// Of the loaded plugin.
    Plugin {
        /// Name.
        name: &'static str,
        /// What it does.
        run: OfPlugin,
    },
    /// Of each form.
    Form {
        /// Name.
        name: &'static str,
        /// What it does.
        run: OfForm,
    },
}

/// Every check, in order.
pub const ALL: &[Check] = &[
    Check::Plugin {
        name: LOAD,
        run: load,
    },
    Check::Scan { name: "scan_time" },
    Check::Plugin {
        name: DESCRIBE,
        run: describe::run,
    },
    Check::File {
        name: "symbols",
        run: file::symbols,
    },
    Check::File {
        name: "libraries",
        run: file::libraries,
    },
    Check::Plugin {
        name: "panic",
        run: file::panic,
    },
    Check::Form {
        name: LAUNCH,
        run: launch::run,
    },
    Check::Form {
        name: "parity",
        run: parity::run,
    },
    Check::Form {
        name: "band",
        run: band::run,
    },
    Check::Form {
        name: "outputs",
        run: outputs::run,
    },
    Check::Form {
        name: "layout",
        run: layout::run,
    },
    Check::Form {
        name: "non_finite",
        run: non_finite::run,
    },
    Check::Form {
        name: "determinism",
        run: determinism::run,
    },
    Check::Form {
        name: "concurrency",
        run: concurrency::run,
    },
    Check::Form {
        name: "footprint",
        run: footprint::run,
    },
    Check::Form {
        name: "bogus_ids",
        run: ids::run,
    },
    Check::Form {
        name: "null_arguments",
        run: hostile::nulls,
    },
    Check::Form {
        name: "absurd_arguments",
        run: hostile::absurd,
    },
    Check::Form {
        name: "mutation",
        run: mutation::run,
    },
];

/// Checks whose cases have seeds of their own, so that one can be asked for that does not exist.
pub const NUMBERED: &[&str] = &[
    "parity",
    "band",
    "outputs",
    "layout",
    "non_finite",
    "null_arguments",
    "absurd_arguments",
];

impl Check {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Check::File { name, .. }
            | Check::Scan { name }
            | Check::Plugin { name, .. }
            | Check::Form { name, .. } => name,
        }
    }
}

/// What a check says.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// All well.
    Passed {
        /// What was found, for people.
        note: Option<String>,
        /// The text of the description.
        described: Option<String>,
    },
    /// Not applicable; the reason.
    Skipped(String),
    /// Something is wrong.
    Failed {
        /// Stable code.
        code: Code,
        /// Expected and found.
        reason: String,
        /// What does it again.
        seed: Option<u64>,
        /// Forms that the fault is of, where a check of the whole library finds one of some.
        forms: Vec<(String, String)>,
    },
}

impl Verdict {
    /// All well, and what was found.
    pub fn passed(note: impl Into<String>) -> Self {
        Verdict::Passed {
            note: Some(note.into()),
            described: None,
        }
    }
}

impl Code {
    /// A failure.
    pub fn because(self, reason: impl Into<String>) -> Verdict {
        Verdict::Failed {
            code: self,
            reason: reason.into(),
            seed: None,
            forms: Vec::new(),
        }
    }

    /// A failure that a seed makes again.
    pub fn at(self, seed: u64, reason: impl Into<String>) -> Verdict {
        Verdict::Failed {
            code: self,
            reason: reason.into(),
            seed: Some(seed),
            forms: Vec::new(),
        }
    }
}

/// What a check of the plugin gets.
pub struct Context<'a> {
    /// The plugin.
    pub loaded: &'a Loaded,
    /// Structures.
    pub catalog: &'a Catalog,
    /// The process may end here.
    pub throwaway: &'a Throwaway,
    /// Where the parent is told.
    pub teller: &'a Teller,
    /// What was asked.
    pub task: &'a Task,
}

/// That it loads is what the caller has done; what it says of itself goes to the others.
fn load(cx: &Context<'_>) -> Verdict {
    let plugin = cx.loaded.plugin();
    match plugin.describe_again(cx.throwaway) {
        Ok(text) => Verdict::Passed {
            note: Some(format!(
                "{} {}, API {}, {} forms",
                plugin.id(),
                plugin.description().version,
                plugin.description().api,
                plugin.description().forms.len()
            )),
            described: Some(text),
        },
        Err(refusal) => Code::DescribeImpure.because(format!(
            "it was described, and the next time answered {refusal}"
        )),
    }
}

/// What a check of a form gets.
pub struct Bench<'a> {
    /// Plugin and surroundings.
    pub cx: &'a Context<'a>,
    /// The form.
    pub form: &'a FormDecl,
    /// Its structure, in the newest version that form and catalog share.
    pub spec: &'a Spec,
    /// A case of usual size.
    pub case: &'a Prepared<'a>,
}

/// Runs a check of a form on a usual case.
pub fn with_bench(cx: &Context<'_>, form: &FormDecl, run: OfForm) -> Verdict {
    let Some(spec) = newest(cx.catalog, form) else {
        let name = &form.structure;
        return Verdict::Skipped(format!(
            "the catalog has no `{name}` in any of {:?}",
            form.spec_versions
        ));
    };
    match benched(cx, form, spec, run) {
        Ok(verdict) => verdict,
        Err(e) => Code::Broken.because(e.to_string()),
    }
}

fn benched(
    cx: &Context<'_>,
    form: &FormDecl,
    spec: &Spec,
    run: OfForm,
) -> Result<Verdict, SuiteError> {
    for draft in usual_drafts(spec, form)? {
        match Judge::new(spec, form, &draft).prepare(cx.task.seed, false)? {
            Made::Ready(case) => {
                return run(&Bench {
                    cx,
                    form,
                    spec,
                    case: &case,
                })
            }
            Made::Outside | Made::Broken(_) => {}
        }
    }
    let text = format!(
        "no combination of its band, variants {:?} and spans {:?} exists at a size that can be tried",
        form.variants, form.spans
    );
    Ok(Code::Unjudged.because(text))
}

fn newest<'a>(catalog: &'a Catalog, form: &FormDecl) -> Option<&'a Spec> {
    let known = form
        .spec_versions
        .iter()
        .filter_map(|v| catalog.get_version(&form.structure, *v).ok());
    known.max_by_key(|spec| spec.version)
}

/// Candidates for the usual case, in the order of preference.
fn usual_drafts(spec: &Spec, form: &FormDecl) -> Result<Vec<Draft>, SuiteError> {
    let mut all = Vec::new();
    for wanted in [
        BTreeMap::new(),
        admitted(spec, form, 0),
        admitted(spec, form, 1),
    ] {
        all.extend(draft_of(spec, form, &wanted)?);
    }
    all.extend(drafts(spec, form)?);
    Ok(all)
}

/// Sizes that the band declares: every symbol in it, the same number of steps above its lower edge; as many rows as
/// the band allows, at most three.
pub(crate) fn admitted(spec: &Spec, form: &FormDecl, steps: u64) -> BTreeMap<String, usize> {
    let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
    if let Some([low, high]) = form.band.rows {
        let rows = high.min(3).max(low).max(1);
        sizes.extend(sizes_of_rows(spec, rows as usize));
    }
    for (symbol, band) in &form.band.dims {
        let step = band.multiple_of.max(1);
        let low = band.min.max(1).next_multiple_of(step);
        // One is rarely a size of anything.
        let low = if low == 1 { 2 } else { low };
        let size = low.saturating_add(step.saturating_mul(steps)).min(band.max);
        sizes.insert(symbol.clone(), size as usize);
    }
    sizes
}

/// Sizes for memory that can be told from noise: every width large, as far as the band allows.
pub(crate) fn large(spec: &Spec, form: &FormDecl, width: u64) -> BTreeMap<String, usize> {
    let mut sizes = admitted(spec, form, 0);
    for symbol in width_symbols(spec) {
        let size = form.band.dims.get(&symbol).map_or(width, |band| {
            let step = band.multiple_of.max(1);
            let most = band.max / step * step;
            width.max(band.min).next_multiple_of(step).min(most)
        });
        sizes.insert(symbol, size as usize);
    }
    sizes
}

impl Bench<'_> {
    /// Tells the parent where the check is.
    pub fn at(&self, what: &str, seed: Option<u64>) {
        self.cx.teller.at(what, seed);
    }

    /// Binds the usual case.
    pub fn bind(&self) -> Result<Staged, PluginError> {
        self.bind_as(self.case.request())
    }

    /// Binds.
    pub fn bind_as(&self, request: &Request) -> Result<Staged, PluginError> {
        self.cx.loaded.bind_form(request)
    }

    /// Binds the usual case, for calls with views as they are given.
    pub fn bind_direct(&self) -> Result<BoundForm, PluginError> {
        let request = self.case.request();
        let weights = request.weights.iter();
        let views: Result<Vec<(&str, HostTensor<'_>)>, _> = weights
            .map(|(name, w)| Ok((name.as_str(), w.view()?)))
            .collect();
        let views = views.map_err(|e: structures_loader::LoaderError| broken(&e))?;
        self.cx.loaded.bind_direct(request, &views)
    }

    /// The device the form is bound on; 0 also where it is bound nowhere.
    pub fn device(&self) -> u32 {
        self.cx.loaded.home(self.case.request()).unwrap_or(0)
    }

    /// Whether a plain call leaves the memory around its outputs alone. Where it does not, that is one fault, and not
    /// one more wherever memory is watched.
    pub fn keeps_to_its_outputs(&self) -> bool {
        once(self, self.case).is_ok_and(|outputs| outputs.iter().all(|r| r.touched().is_none()))
    }

    /// What the form's numbers may differ by from one summation to another.
    pub fn slack(&self) -> f64 {
        let cap = structures_loader::tolerance_cap(self.form);
        self.form.tolerance.min(cap).max(1e-5)
    }
}

/// Whether the numbers of an input make a difference at all: a form may serve content that it was bound with.
pub fn matters(bench: &Bench<'_>, index: usize) -> bool {
    let run = |inputs: &[Option<Operand>]| {
        let bound = bench.bind().ok()?;
        let mut outputs = poisoned(bench.case, Lay::default());
        call(&bound, &rooms(inputs, Lay::default()), &mut outputs).ok()?;
        Some(outputs.iter().map(Room::bits).collect::<Vec<_>>())
    };
    let clean = bench.case.inputs();
    let mut other = clean.clone();
    if let Some(Some(operand)) = other.get_mut(index) {
        if let structures_suite::operand::Data::F32(values) = &mut operand.data {
            values.iter_mut().for_each(|v| *v = 0.5 * *v + 0.25);
        } else {
            return true;
        }
    }
    run(&clean) != run(&other)
}

/// Rooms for the inputs.
pub fn rooms(inputs: &[Option<Operand>], lay: Lay) -> Vec<Option<Room>> {
    let each = inputs.iter();
    each.map(|i| i.as_ref().map(|o| Room::of(o, lay))).collect()
}

/// Poisoned rooms for the outputs of a case.
pub fn poisoned(case: &Prepared<'_>, lay: Lay) -> Vec<Room> {
    let each = case.outputs();
    each.iter().map(|o| Room::poisoned(o, lay)).collect()
}

/// Calls a bound form on rooms.
pub fn call(
    bound: &Staged,
    inputs: &[Option<Room>],
    outputs: &mut [Room],
) -> Result<(), PluginError> {
    let views: Result<Vec<HostTensor<'_>>, _> = inputs
        .iter()
        .map(|room| room.as_ref().map_or(Ok(HostTensor::ABSENT), Room::view))
        .collect();
    let made: Result<Vec<HostTensorMut<'_>>, _> = outputs.iter_mut().map(Room::view_mut).collect();
    match (views, made) {
        (Ok(views), Ok(mut made)) => bound.call(&views, &mut made, &mut []),
        (Err(e), _) | (_, Err(e)) => Err(broken(&e)),
    }
}

/// Tensors of our own that are none.
fn broken(e: &structures_loader::LoaderError) -> PluginError {
    PluginError {
        kind: structures_loader::StatusKind::Invalid,
        code: "conform_failed".into(),
        message: e.to_string(),
        plugin: "conform".into(),
        form: String::new(),
    }
}

/// Binds a case and calls it once, on rooms as they usually lie.
pub fn once(bench: &Bench<'_>, case: &Prepared<'_>) -> Result<Vec<Room>, PluginError> {
    let bound = bench.bind_as(case.request())?;
    let mut outputs = poisoned(case, Lay::default());
    call(&bound, &rooms(&case.inputs(), Lay::default()), &mut outputs)?;
    Ok(outputs)
}

/// Outputs with what was not written taken from the reference: that is another check's to tell.
pub fn filled(case: &Prepared<'_>, outputs: &[Room]) -> Result<Vec<Operand>, SuiteError> {
    let mut all = Vec::new();
    for (room, (_, want)) in outputs.iter().zip(case.want()) {
        let mut values = room.values();
        let left = room.intact();
        if !left.is_empty() {
            let want: Vec<f32> = want
                .to_dtype(candle_core::DType::F32)?
                .flatten_all()?
                .to_vec1()?;
            for i in left {
                values[i] = want.get(i).copied().unwrap_or(0.0);
            }
        }
        let like = room.operand();
        let dtype = match like.data {
            structures_suite::operand::Data::Bf16(_) => structures_plugin_api::DType::Bf16,
            structures_suite::operand::Data::I64(_) => structures_plugin_api::DType::I64,
            _ => structures_plugin_api::DType::F32,
        };
        all.push(Operand::new(&values, room.dims(), dtype));
    }
    Ok(all)
}

/// Whether two runs of one form made the same numbers, but for the order of sums.
pub fn alike(a: &[Room], b: &[Room], slack: f64) -> Result<(), String> {
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        let (a, b) = (a.values(), b.values());
        let (mut off, mut size) = (0.0_f64, 0.0_f64);
        for (i, (x, y)) in a.iter().zip(&b).enumerate() {
            if x.is_finite() != y.is_finite() {
                return Err(format!("output {index} at {i}: {x} and {y}"));
            }
            if x.is_finite() {
                off += f64::from(x - y).powi(2);
                size += f64::from(*x).powi(2);
            }
        }
        let relative = off.sqrt() / size.sqrt().max(f64::MIN_POSITIVE);
        if off > 0.0 && relative > slack {
            return Err(format!(
                "output {index} differs by relative L2 {relative:.2e}, at most {slack:.0e}"
            ));
        }
    }
    Ok(())
}
