//! A model, described (headers only) and loaded (weights in memory, ready to run on the host path).

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;
use structures_graph::{Graph, GraphError, ModuleTree, ParamRef, ParamSource, Session};

use crate::checkpoint::Checkpoint;
use crate::config::DecoderConfig;
use crate::families::{self, Blueprint};
use crate::later::Later;
use crate::multimodal::{Eyes, Sight};
use crate::params::{CheckpointParams, ParamMap};
use crate::tokenizer::{fault, Tokenizer};
use crate::ModelError;

/// What can be said about a model without reading a weight: enough to discover, locate and plan.
#[derive(Clone, Debug)]
pub struct Description {
    /// Name for reports: the directory's or the file's.
    pub name: String,
    /// Family that built it.
    pub family: &'static str,
    /// Its configuration.
    pub config: DecoderConfig,
    /// Its modules.
    pub tree: ModuleTree,
    /// Its dataflow.
    pub graph: Arc<Graph>,
    /// Where its parameters are stored.
    pub params: Arc<ParamMap>,
    /// The files.
    pub checkpoint: Arc<Checkpoint>,
    /// What the configuration says about pictures, when it sees.
    pub sight: Option<Sight>,
    /// Its other phases by name: the same modules, other dataflow.
    pub phases: Vec<Arc<Graph>>,
}

impl Description {
    /// Opens a directory or a `.gguf` file and describes the model in it.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let checkpoint = Checkpoint::open(path)?;
        let (family, blueprint) = families::describe(&checkpoint)?;
        let Blueprint {
            config,
            mut tree,
            graph,
            params,
            pictures,
        } = blueprint;
        let (sight, phases) = match pictures {
            Some(p) => (Some(p.sight), vec![p.encoder, p.prefill]),
            None => (None, Vec::new()),
        };
        let name = model_name(path);
        tree.model.clone_from(&name);
        for note in &config.notes {
            tracing::debug!(model = %name, "{note}");
        }
        Ok(Description {
            name,
            family: family.name(),
            config,
            tree,
            graph,
            params,
            checkpoint: Arc::new(checkpoint),
            sight,
            phases,
        })
    }

    /// The description with another of its phases as its dataflow, for whoever looks for structures in that one.
    pub fn phase(&self, name: &str) -> Option<Description> {
        let graph = self.phases.iter().find(|g| g.phase == name)?;
        Some(Description {
            graph: graph.clone(),
            ..self.clone()
        })
    }

    /// Loads parameters one by one.
    pub fn loader(&self) -> CheckpointParams {
        CheckpointParams {
            checkpoint: self.checkpoint.clone(),
            map: self.params.clone(),
        }
    }
}

/// A model in memory.
pub struct Model {
    /// What it is.
    pub description: Description,
    /// Its graph with parameters, the host path.
    pub session: Session,
    /// The sessions of its other phases, when it sees.
    pub eyes: Option<Eyes>,
    /// Its tokenizer, or why there is none.
    tokenizer: Later<Result<Tokenizer, String>>,
    /// Of every byte, where that was begun when it was opened.
    digest: Option<Later<Result<String, ModelError>>>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({})", self.description.name)
    }
}

impl Model {
    /// Describes the model at a path and loads its weights. A tokenizer that cannot be made is no failure: tokens
    /// can come from elsewhere, and [`Model::tokenizer`] says why.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::load(Description::open(path)?)
    }

    /// As [`Model::open`], and a weight is read when it is first used: what is served by other means is never in memory. A
    /// weight that cannot be read is then an error of the run that wants it. The digest is begun at once, beside what
    /// comes next: whoever opens a model like this compares it. A model with several phases shares its
    /// weights among them and is loaded at once.
    pub fn open_later(path: &Path) -> Result<Self, ModelError> {
        let description = Description::open(path)?;
        if !description.phases.is_empty() {
            return Self::load(description);
        }
        let tokenizer = tokenizer_of(&description);
        let checkpoint = description.checkpoint.clone();
        let digest = Later::begin("digest", move || checkpoint.digest());
        let source = Arc::new(description.loader());
        let session = Session::reading_later(description.graph.clone(), source)?;
        Ok(Model {
            description,
            session,
            eyes: None,
            tokenizer,
            digest: Some(digest),
        })
    }

    /// Loads the weights of a described model.
    pub fn load(description: Description) -> Result<Self, ModelError> {
        let tokenizer = tokenizer_of(&description);
        let source = Loading {
            params: description.loader(),
            loaded: (!description.phases.is_empty()).then(RefCell::default),
            first_error: RefCell::new(None),
        };
        let open = |graph: &Arc<Graph>| match Session::new(graph.clone(), &source) {
            Ok(session) => Ok(session),
            Err(e) => Err(source.first_error.take().unwrap_or(e.into())),
        };
        let session = open(&description.graph)?;
        let eyes = match description.phases.as_slice() {
            [encoder, prefill] => Some(Eyes {
                encoder: open(encoder)?,
                prefill: open(prefill)?,
            }),
            _ => None,
        };
        Ok(Model {
            description,
            session,
            eyes,
            tokenizer,
            digest: None,
        })
    }

    /// Sha256 over every byte of weights, configuration and tokenizer.
    ///
    /// # Errors
    /// As [`Checkpoint::digest`].
    pub fn digest(&self) -> Result<String, ModelError> {
        match self.digest.as_ref().and_then(Later::get) {
            Some(Ok(digest)) => Ok(digest.clone()),
            _ => self.description.checkpoint.digest(),
        }
    }

    /// Name for reports.
    pub fn name(&self) -> &str {
        &self.description.name
    }

    /// Configuration.
    pub fn config(&self) -> &DecoderConfig {
        &self.description.config
    }

    /// Module tree.
    pub fn tree(&self) -> &ModuleTree {
        &self.description.tree
    }

    /// Graph.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.description.graph
    }

    /// The tokenizer; without one, why, and what to do.
    pub fn tokenizer(&self) -> Result<&Tokenizer, ModelError> {
        let reason = match self.tokenizer.get() {
            Some(Ok(tokenizer)) => return Ok(tokenizer),
            Some(Err(reason)) => reason.as_str(),
            None => "making it panicked",
        };
        let help = "give token ids instead of text, or add the model's tokenizer.json";
        Err(fault(self.description.checkpoint.path(), reason, help))
    }
}

/// Takes a while, and nobody needs it before the first text.
fn tokenizer_of(description: &Description) -> Later<Result<Tokenizer, String>> {
    let (checkpoint, config) = (description.checkpoint.clone(), description.config.clone());
    Later::begin("tokenizer", move || {
        match Tokenizer::open(&checkpoint, &config) {
            Ok(Some(t)) => Ok(t),
            Ok(None) => {
                Err("expected tokenizer.json or a vocabulary in the file, found none".into())
            }
            Err(e) => Err(e.to_string()),
        }
    })
}

/// Keeps the first error as it was: the session's own error type cannot carry it.
struct Loading {
    params: CheckpointParams,
    /// What is loaded already, where several sessions share it.
    loaded: Option<RefCell<HashMap<ParamRef, Tensor>>>,
    first_error: RefCell<Option<ModelError>>,
}

impl ParamSource for Loading {
    fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
        let known = self.loaded.as_ref().map(RefCell::borrow);
        if let Some(tensor) = known.as_ref().and_then(|k| k.get(param)) {
            return Ok(tensor.clone());
        }
        drop(known);
        let tensor = self.params.load(param).map_err(|e| {
            let reason = e.to_string();
            self.first_error.borrow_mut().get_or_insert(e);
            GraphError::MissingParam {
                param: param.to_string(),
                reason,
            }
        })?;
        if let Some(loaded) = &self.loaded {
            loaded.borrow_mut().insert(param.clone(), tensor.clone());
        }
        Ok(tensor)
    }
}

/// `models/smollm2/x.Q4_1.gguf` -> `x.Q4_1`; a directory -> its name.
fn model_name(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let stem = match full.extension() {
        Some(e) if e == "gguf" => full.file_stem(),
        _ => full.file_name(),
    };
    stem.unwrap_or(full.as_os_str())
        .to_string_lossy()
        .into_owned()
}
