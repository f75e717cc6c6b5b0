//! A plugin as the suite sees it, and the real one behind the loader.
//!
//! The trait is small so that a test can stand between suite and plugin and break one thing.

use std::path::Path;

use structures_loader::{
    row_capacity, BindSpec, BoundForm, Environment, HostTensor, HostTensorMut, Plugin, PluginError,
    Registry, ScanMode, ScanOptions, Staged, StatusKind,
};
use structures_plugin_api::describe::{BindParams, Description, ProbeReport, ProbeShapes};
use structures_plugin_api::DType;

use crate::error::SuiteError;
use crate::operand::Operand;

/// What is bound.
#[derive(Clone, Debug)]
pub struct Request {
    /// Form.
    pub form: String,
    /// Span.
    pub span: String,
    /// Slots in spec order.
    pub weights: Vec<(String, Operand)>,
    /// `point|statistic|granularity` and the values.
    pub statistics: Vec<(String, Vec<f32>)>,
    /// Structure, axes, dims, params, order of inputs and outputs.
    pub params: BindParams,
    /// Boundary dtype.
    pub dtype: DType,
    /// Most rows of a call.
    pub capacity: u64,
}

/// A plugin.
pub trait Executor {
    /// What it declares.
    fn description(&self) -> &Description;

    /// Whether a form runs here.
    fn probe(&self, form: &str, shapes: &ProbeShapes) -> Result<ProbeReport, PluginError>;

    /// Binds a form.
    fn bind(&self, request: &Request) -> Result<Box<dyn Bound>, PluginError>;
}

/// A bound form.
pub trait Bound {
    /// Fills the outputs.
    fn call(&self, inputs: &[Option<Operand>], outputs: &mut [Operand]) -> Result<(), PluginError>;
}

/// A plugin behind the loader.
pub struct Loaded {
    plugin: Plugin,
    /// The scanned copy and the cache, where they are this value's own.
    _place: Option<tempfile::TempDir>,
}

impl Loaded {
    /// Loads one file. It is trusted: it is described in this process, from a copy in a directory of its own.
    ///
    /// # Errors
    /// [`SuiteError::Plugin`] with the loader's code, [`SuiteError::File`].
    pub fn open(path: &Path) -> Result<Self, SuiteError> {
        let shown = path.display().to_string();
        let file = |source| SuiteError::File {
            path: shown.clone(),
            source,
        };
        let place = tempfile::tempdir().map_err(file)?;
        let root = place.path().canonicalize().map_err(file)?;
        let plugins = root.join("plugins");
        std::fs::create_dir(&plugins).map_err(file)?;
        let name = path.file_name().unwrap_or(path.as_os_str());
        std::fs::copy(path, plugins.join(name)).map_err(file)?;
        let loaded = Self::in_place(&plugins, &root.join("cache"))?;
        Ok(Loaded {
            _place: Some(place),
            ..loaded
        })
    }

    /// Loads the only plugin of a directory, with a cache elsewhere; described in this process.
    ///
    /// # Errors
    /// As [`Loaded::open`].
    pub fn in_place(plugins: &Path, cache: &Path) -> Result<Self, SuiteError> {
        let shown = plugins.display().to_string();
        let mut options = ScanOptions::new(vec![plugins.to_path_buf()]);
        options.environment = Environment {
            cache_dir: Some(cache.to_path_buf()),
            ..Environment::default()
        };
        options.mode = ScanMode::InProcess;
        let registry = Registry::scan(&options)?;
        match registry.loaded() {
            [plugin, ..] => Ok(Loaded {
                plugin: plugin.clone(),
                _place: None,
            }),
            [] => {
                let row = registry.plugins.first();
                let code = row.and_then(|r| r.code).map_or("none", |c| c.name());
                let reason = row.and_then(|r| r.reason.clone());
                Err(SuiteError::Plugin {
                    path: shown,
                    code: code.into(),
                    reason: reason.unwrap_or_default(),
                })
            }
        }
    }
}

impl Loaded {
    /// The plugin itself.
    pub fn plugin(&self) -> &Plugin {
        &self.plugin
    }

    /// Binds a form.
    ///
    /// # Errors
    /// The plugin's own.
    pub fn bind_form(&self, request: &Request) -> Result<Staged, PluginError> {
        let mut weights = Vec::with_capacity(request.weights.len());
        for (name, weight) in &request.weights {
            let view = weight.view().map_err(|e| malformed(&e))?;
            weights.push((name.as_str(), view));
        }
        self.bind_views(request, &weights)
    }

    /// Binds a form to these weights instead of the request's own, to be called with host memory.
    ///
    /// # Errors
    /// The plugin's own.
    pub fn bind_views(
        &self,
        request: &Request,
        weights: &[(&str, HostTensor<'_>)],
    ) -> Result<Staged, PluginError> {
        self.with_spec(request, weights, |spec| self.plugin.bind_staged(spec))
    }

    /// As [`Loaded::bind_views`], to be called with memory of the device it is bound on.
    ///
    /// # Errors
    /// The plugin's own.
    pub fn bind_direct(
        &self,
        request: &Request,
        weights: &[(&str, HostTensor<'_>)],
    ) -> Result<BoundForm, PluginError> {
        self.with_spec(request, weights, |spec| self.plugin.bind(spec))
    }

    /// The device its form runs on.
    ///
    /// # Errors
    /// Why it runs nowhere.
    pub fn home(&self, request: &Request) -> Result<u32, PluginError> {
        self.plugin.home(&request.params.structure, &request.form)
    }

    fn with_spec<R>(
        &self,
        request: &Request,
        weights: &[(&str, HostTensor<'_>)],
        bind: impl FnOnce(&BindSpec<'_>) -> Result<R, PluginError>,
    ) -> Result<R, PluginError> {
        let mut statistics = Vec::with_capacity(request.statistics.len());
        for (name, values) in &request.statistics {
            let dims: &[usize] = match values.len() {
                1 => &[],
                _ => &[values.len()],
            };
            let view = HostTensor::new(values, dims).map_err(|e| malformed(&e))?;
            statistics.push((name.as_str(), view));
        }
        bind(&BindSpec {
            form: &request.form,
            device: self.home(request)?,
            span: &request.span,
            weights,
            statistics: &statistics,
            params: &request.params,
            contract: row_capacity(request.dtype, request.capacity),
        })
    }
}

impl Executor for Loaded {
    fn description(&self) -> &Description {
        self.plugin.description()
    }

    fn probe(&self, form: &str, shapes: &ProbeShapes) -> Result<ProbeReport, PluginError> {
        let device = self.plugin.home(&shapes.structure, form)?;
        self.plugin.probe(form, device, shapes)
    }

    fn bind(&self, request: &Request) -> Result<Box<dyn Bound>, PluginError> {
        Ok(Box::new(self.bind_form(request)?))
    }
}

impl Bound for Staged {
    fn call(&self, inputs: &[Option<Operand>], outputs: &mut [Operand]) -> Result<(), PluginError> {
        let inputs: Vec<_> = inputs.iter().map(view).collect::<Result<_, _>>()?;
        let outputs = outputs.iter_mut();
        let mut outputs: Vec<HostTensorMut<'_>> = outputs
            .map(|operand| operand.view_mut().map_err(|e| malformed(&e)))
            .collect::<Result<_, _>>()?;
        Staged::call(self, &inputs, &mut outputs, &mut [])
    }
}

fn view(operand: &Option<Operand>) -> Result<HostTensor<'_>, PluginError> {
    match operand {
        Some(operand) => operand.view().map_err(|e| malformed(&e)),
        None => Ok(HostTensor::ABSENT),
    }
}

/// A tensor of the suite's own that is none.
fn malformed(e: &structures_loader::LoaderError) -> PluginError {
    PluginError {
        kind: StatusKind::Invalid,
        code: "suite_tensor".into(),
        message: e.to_string(),
        plugin: "suite".into(),
        form: String::new(),
    }
}
