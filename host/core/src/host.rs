//! What every door starts from: the catalog, the loaded plugins, the schemes, and an opened model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use structures_bindings::Bindings;
use structures_catalog::Catalog;
use structures_graph::session::Session;
use structures_graph::{Graph, ModuleTree};
use structures_loader::{Plugin, Registry, ScanOptions};
use structures_models::{Description, Model};
use structures_plugin_api::describe::{FormDecl, ProbeShapes};

use crate::choose::{Choice, Pin};
use crate::decisions::Store;
use crate::error::Error;
use crate::points;
use crate::receipt::RefusalNote;
use crate::samples::Samples;
use crate::schemes::{self, native, Capability};
use crate::sites::{note, survey, Survey};
use crate::steps;
use crate::zeros;

/// Where things come from.
#[derive(Clone, Debug, Default)]
pub struct HostOptions {
    /// Plugin directories, searched first.
    pub plugins: Vec<PathBuf>,
    /// Directories of more structures.
    pub catalog: Vec<PathBuf>,
    /// Directories of more binding files.
    pub bindings: Vec<PathBuf>,
    /// File of recorded decisions; none are read when absent.
    pub decisions: Option<PathBuf>,
    /// Judge decode steps eagerly, not in the captured form they are served in.
    pub eager: bool,
}

/// Memory that binding leaves free.
const HEADROOM: u64 = 512 << 20;

/// The host process.
pub struct Host {
    /// Structures.
    pub catalog: Catalog,
    /// Plugins.
    pub registry: Registry,
    /// Precision profiles.
    pub schemes: schemes::Registry,
    /// Binding files.
    pub bindings: Bindings,
    /// Recorded decisions.
    pub decisions: Store,
    /// Asked before every bind how much memory is left.
    pub free_memory: fn() -> Option<u64>,
    /// Forms the host itself offers.
    own: Vec<FormDecl>,
    /// Judge decode steps eagerly.
    pub eager: bool,
}

impl Host {
    /// Loads the catalog and scans for plugins.
    pub fn open(options: &HostOptions) -> Result<Self, Error> {
        Self::with_scan(options, &ScanOptions::new(options.plugins.clone()))
    }

    /// As `open`, with a scan of the caller's choice instead of `options.plugins`.
    pub fn with_scan(options: &HostOptions, scan: &ScanOptions) -> Result<Self, Error> {
        let catalog = open_catalog(&options.catalog)?;
        let bindings = Bindings::open(&options.bindings, &catalog)?;
        let registry = Registry::scan(scan)?;
        let decisions = match &options.decisions {
            Some(path) => Store::open(path),
            None => Store::none(),
        };
        if let Some(warning) = decisions.warning() {
            tracing::warn!("{warning}");
        }
        Ok(Host {
            free_memory: crate::environment::free_memory,
            own: steps::forms(catalog.list()),
            catalog,
            registry,
            schemes: schemes::Registry::builtin(),
            bindings,
            decisions,
            eager: options.eager,
        })
    }

    /// Every form of every loaded plugin, on every device it could run on, and those of the host itself.
    pub fn forms(&self) -> Vec<Choice<'_>> {
        let mut list = Vec::new();
        for plugin in self.registry.loaded() {
            let d = plugin.description();
            let reference = d.role.as_deref() == Some("reference");
            for form in &d.forms {
                list.extend(devices_of(plugin, form).into_iter().map(|device| Choice {
                    plugin: &d.id,
                    reference,
                    form,
                    device,
                }));
            }
        }
        list.extend(self.own.iter().map(|form| Choice {
            plugin: steps::PROVIDER,
            reference: false,
            form,
            device: 0,
        }));
        list
    }

    /// What `auto` chooses from: every format of every plugin, probed at the shapes its declaration admits.
    pub fn capabilities(&self) -> Vec<Capability> {
        let mut list = Vec::new();
        for plugin in self.registry.loaded() {
            let d = plugin.description();
            let mut formats: Vec<&str> = d.forms.iter().map(|f| f.format.as_str()).collect();
            formats.sort_unstable();
            formats.dedup();
            for format in formats {
                // Any form of the format that runs here will do.
                let (mut probed, mut refused) = (false, None);
                let mut present = Vec::new();
                let forms = d.forms.iter().filter(|f| f.format == format);
                let placed =
                    forms.flat_map(|f| devices_of(plugin, f).into_iter().map(move |d| (f, d)));
                for (form, device) in placed {
                    match plugin.probe(&form.name, device, &admitted_shapes(form)) {
                        Ok(report) => {
                            probed |= report.probed;
                            if let (false, Some(code)) = (report.probed, report.code) {
                                let why = report.reason.unwrap_or_default();
                                refused.get_or_insert(format!("{code}: {why}"));
                            }
                            present.extend(report.entries.present);
                        }
                        Err(e) => {
                            tracing::debug!(plugin = %d.id, form = %form.name, "probe: {e}");
                            refused.get_or_insert(format!("{}: {}", e.code, e.message));
                        }
                    }
                }
                list.push(Capability {
                    plugin: d.id.clone(),
                    reference: d.role.as_deref() == Some("reference"),
                    native: native(format, &d.archs, &present),
                    format: format.to_string(),
                    probed,
                    refused: refused.filter(|_| !probed),
                });
            }
        }
        list
    }

    /// Whether another seat may be bound: the rest of the machine keeps some memory.
    pub(crate) fn check_memory(&self) -> Result<(), String> {
        match (self.free_memory)() {
            Some(free) if free < HEADROOM => Err(format!(
                "{} MiB of memory are free, {} MiB are kept free",
                free >> 20,
                HEADROOM >> 20
            )),
            _ => Ok(()),
        }
    }

    /// Refuses a structure filter that names nothing.
    pub fn check_structures(&self, names: &[String]) -> Result<(), Error> {
        for name in names {
            self.catalog.get(name)?;
        }
        Ok(())
    }

    /// Refuses pins that name nothing, or one structure twice.
    pub fn check_pins(&self, pins: &[Pin]) -> Result<(), Error> {
        for (i, pin) in pins.iter().enumerate() {
            let bad = |what: String| {
                Err(Error::invalid(
                    "pin_unknown",
                    format!("pin `{pin}`: {what}"),
                ))
            };
            if pins[..i].iter().any(|p| p.structure == pin.structure) {
                return bad(format!("`{}` is pinned twice", pin.structure));
            }
            self.catalog.get(&pin.structure)?;
            if pin.plugin != steps::PROVIDER && self.registry.plugin(&pin.plugin).is_none() {
                return bad(format!(
                    "no loaded plugin `{}`; {}",
                    pin.plugin,
                    self.registry.known()
                ));
            }
            let all = self.forms();
            let forms: Vec<&str> = all
                .iter()
                .filter(|c| c.plugin == pin.plugin && c.form.structure == pin.structure)
                .map(|c| c.form.name.as_str())
                .collect();
            if !forms
                .iter()
                .any(|f| pin.form.as_deref().is_none_or(|wanted| wanted == *f))
            {
                return bad(format!(
                    "plugin `{}` has these forms of `{}`: {}",
                    pin.plugin,
                    pin.structure,
                    if forms.is_empty() {
                        "none".to_string()
                    } else {
                        forms.join(", ")
                    }
                ));
            }
            let of_pin = Pin {
                device: None,
                ..pin.clone()
            };
            let offered: BTreeSet<u32> = all
                .iter()
                .filter(|c| c.form.structure == pin.structure && of_pin.allows(c))
                .map(|c| c.device)
                .collect();
            if let Some(device) = pin.device.filter(|d| !offered.contains(d)) {
                let known: Vec<String> = offered.iter().map(u32::to_string).collect();
                let plugin = self.registry.plugin(&pin.plugin);
                let why = plugin.and_then(|p| p.devices().err());
                let why = why.map_or(String::new(), |e| format!(" ({}: {})", e.code, e.message));
                return bad(format!(
                    "`{}` offers this on device {}, not on {device}{why}",
                    pin.plugin,
                    known.join(", ")
                ));
            }
        }
        Ok(())
    }

    /// Refuses a decision whose winner no loaded plugin declares; `host` is always one.
    pub fn check_winner(&self, structure: &str, winner: &str) -> Result<(), Error> {
        self.catalog.get(structure)?;
        let declared: Vec<String> = self
            .forms()
            .iter()
            .filter(|c| c.form.structure == structure)
            .map(|c| format!("{}:{}", c.plugin, c.form.name))
            .collect();
        if winner == crate::decisions::HOST || declared.iter().any(|d| d == winner) {
            return Ok(());
        }
        Err(Error::refused(
            "winner_undeclared",
            format!(
                "`{winner}` is no form of `{structure}` here; candidates: {}, {}",
                crate::decisions::HOST,
                declared.join(", ")
            ),
        ))
    }

    /// Sites of a model.
    pub fn survey(&self, model: &Loaded, only: &[String]) -> Result<Survey<'_>, Error> {
        let mut survey = survey_headers(
            &self.catalog,
            &self.bindings,
            &model.model.description,
            only,
        )?;
        zeros::leave_out(&mut survey, model.session());
        Ok(survey)
    }

    /// Machine and versions, for receipts.
    pub fn environment(&self) -> BTreeMap<String, Json> {
        crate::environment::lock()
    }
}

/// Sites of a model described from its headers; needs no plugin.
pub fn survey_headers<'c>(
    catalog: &'c Catalog,
    bindings: &Bindings,
    description: &Description,
    only: &[String],
) -> Result<Survey<'c>, Error> {
    for name in only {
        catalog.get(name)?;
    }
    let (mut bound, mut contradicted) = (Vec::new(), Vec::new());
    let mut addressed = Vec::new();
    let facts = crate::bound_seam::ModelFacts(description);
    for placed in bindings.place(&description.config.model_type, &facts)? {
        let spec = catalog.get_version(&placed.structure, placed.version)?;
        match crate::bound_seam::seam(spec, &description.tree, &placed) {
            Ok(seam) => {
                bound.push(seam);
                let points: Vec<_> = placed.points.into_iter().collect();
                addressed.push((placed.structure, placed.path, points));
            }
            Err(refusal) => contradicted.push(note("discover", &refusal)),
        }
    }
    let graph: &Graph = &description.graph;
    let tree: &ModuleTree = &description.tree;
    let mut survey = survey(catalog, tree, graph, bound, only);
    for (structure, path, points) in addressed {
        let unplaced = points::place(graph, &mut survey.sites, &structure, &path, &points);
        contradicted.extend(unplaced.iter().map(|r| note("locate", r)));
    }
    survey.refused.extend(contradicted);
    Ok(survey)
}

/// As [`survey_headers`], in every phase of the model: a module that the main graph does not run is located in the first
/// phase that runs it. What is located there is told, not bound: seats are those of the main graph.
pub fn survey_phases<'c>(
    catalog: &'c Catalog,
    bindings: &Bindings,
    description: &Description,
    only: &[String],
) -> Result<Survey<'c>, Error> {
    let mut survey = survey_headers(catalog, bindings, description, only)?;
    let mut graphs: Vec<&Graph> = vec![&description.graph];
    for phase in &description.phases {
        let Some(described) = description.phase(&phase.phase) else {
            continue;
        };
        let runs = |graph: &Graph, path: &str| {
            let within = |module: &str| {
                let rest = module.strip_prefix(path);
                rest.is_some_and(|r| r.is_empty() || r.starts_with('.'))
            };
            graph.ops.iter().any(|op| within(&op.module))
        };
        let new = |path: &str| runs(phase, path) && !graphs.iter().any(|g| runs(g, path));
        let other = survey_headers(catalog, bindings, &described, only)?;
        let located = |r: &RefusalNote| r.stage == "locate";
        survey.refused.retain(|r| !(located(r) && new(&r.path)));
        let refused = other.refused.into_iter();
        survey
            .refused
            .extend(refused.filter(|r| located(r) && new(&r.path)));
        let sites = other.sites.into_iter();
        survey
            .sites
            .extend(sites.filter(|site| new(&site.seam.path)));
        graphs.push(phase);
    }
    Ok(survey)
}

/// One number of threads for the shared pool and for candle's products. Once, before anything runs.
pub fn set_threads(threads: usize) -> Result<(), Error> {
    // candle reads this variable to split its products, and rayon sizes its global pool by it.
    std::env::set_var("RAYON_NUM_THREADS", threads.to_string());
    structures_loader::configure_threads(threads)?;
    Ok(())
}

/// The built-in catalog with the caller's directories.
pub fn open_catalog(dirs: &[PathBuf]) -> Result<Catalog, Error> {
    let mut catalog = Catalog::builtin()?;
    for dir in dirs {
        catalog = catalog.with_dir(dir)?;
    }
    Ok(catalog)
}

/// An opened model, weights in memory.
pub struct Loaded {
    /// The model.
    pub model: Model,
}

impl Loaded {
    /// Opens a checkpoint and loads its weights.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Ok(Loaded {
            model: Model::open(path)?,
        })
    }

    /// Opens a checkpoint and loads a weight when it is first used.
    pub fn open_later(path: &Path) -> Result<Self, Error> {
        Ok(Loaded {
            model: Model::open_later(path)?,
        })
    }

    /// The session.
    pub fn session(&self) -> &Session {
        &self.model.session
    }

    /// Name for reports.
    pub fn name(&self) -> &str {
        &self.model.description.name
    }

    /// File or directory name, without its place.
    pub fn file(&self) -> String {
        let path = self.model.description.checkpoint.path();
        let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        full.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// Short hash of the checkpoint.
    pub fn hash(&self) -> Result<String, Error> {
        Ok(self.model.description.checkpoint.hash()?)
    }

    /// sha256 over every byte of weights, configuration and tokenizer.
    pub fn sha256(&self) -> Result<String, Error> {
        Ok(self.model.digest()?)
    }

    /// Refuses samples that do not fit into the context.
    pub fn check_room(&self, samples: &Samples) -> Result<(), Error> {
        let max = self.model.config().max_positions;
        match samples.samples().iter().find(|s| s.tokens.len() > max) {
            None => Ok(()),
            Some(s) => Err(Error::invalid(
                "samples_invalid",
                format!(
                    "{}: {} tokens, the model's context holds {max}; give shorter samples",
                    s.origin,
                    s.tokens.len()
                ),
            )),
        }
    }

    /// Architecture the checkpoint names.
    pub fn architecture(&self) -> String {
        self.model.description.config.model_type.clone()
    }
}

/// Numbers of the devices a form is tried on: the CPU where it has code for it, and every device its plugin offers, so
/// that one it has no code for is refused by name. Where there is neither, the device its plugin would need is asked, for
/// the plugin's own reason.
pub fn devices_of(plugin: &Plugin, form: &FormDecl) -> Vec<u32> {
    let mut list = Vec::new();
    if plugin.runs_on_cpu(&form.structure, &form.name) {
        list.push(0);
    }
    match plugin.devices() {
        Ok(devices) => list.extend(devices.iter().map(|d| d.index)),
        // Asked for its first one, it says why it has none.
        Err(_) => list.push(1),
    }
    if list.is_empty() {
        list.push(u32::from(!plugin.serves_cpu()));
    }
    list
}

/// Shapes the declaration of a form admits: the smallest rows, the smallest dims, the first accepted variants.
pub fn admitted_shapes(form: &FormDecl) -> ProbeShapes {
    ProbeShapes {
        structure: form.structure.clone(),
        span: form.spans.first().cloned().unwrap_or_default(),
        rows: vec![form.band.rows.map_or(1, |[lo, _]| lo)],
        dims: form
            .band
            .dims
            .iter()
            .map(|(symbol, band)| {
                let step = band.multiple_of.max(1);
                (
                    symbol.clone(),
                    band.min.max(1).div_ceil(step).saturating_mul(step),
                )
            })
            .collect(),
        variant: form
            .variants
            .iter()
            .filter_map(|(axis, values)| Some((axis.clone(), values.first()?.clone())))
            .collect(),
    }
}
