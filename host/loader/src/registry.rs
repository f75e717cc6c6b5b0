//! The scan of the whole search path: every candidate file and what became of it.
//!
//! Each file passes the same steps in the same order, and each step may refuse it with a code: path rules, ELF
//! check, private copy, `describe` in a child, identity, handshake, architectures, opening. One file's fault is one
//! row; the others go on. Ids are unique: two files of one directory that share one are both refused, and across
//! directories the earlier wins. Only a plugin that was loaded shadows another.
//!
//! Places kept for later steps: the digest against `plugins.lock` and a sidecar manifest belong between the private
//! copy and the child; quarantine and the cache of scans around the child.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use structures_plugin_api::describe::Description;

use crate::arch::{self, Device};
use crate::code::{Code, Refusal};
use crate::document;
use crate::elf;
use crate::error::LoaderError;
use crate::paths::{self, Opened};
use crate::plugin::Plugin;
use crate::scan::{ScanMode, Scanner, DEADLINE};
use crate::search::{candidates, search_path, Environment, SearchDir};
use crate::store::{Object, ObjectStore, StoreFailure};

/// What to scan and how.
#[derive(Clone, Debug)]
pub struct ScanOptions {
    /// Directories before all others (`--plugins`).
    pub dirs: Vec<PathBuf>,
    /// Variables and places; [`Environment::capture`] unless a test says otherwise.
    pub environment: Environment,
    /// Where plugins are described.
    pub mode: ScanMode,
    /// How long describing one may take.
    pub deadline: Duration,
}

impl ScanOptions {
    /// The process's own surroundings, a child for each plugin, ten seconds each.
    pub fn new(dirs: Vec<PathBuf>) -> Self {
        ScanOptions {
            dirs,
            environment: Environment::capture(),
            mode: ScanMode::default(),
            deadline: DEADLINE,
        }
    }
}

/// What became of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Usable.
    Loaded,
    /// Not used; code and reason say why.
    Refused,
    /// Not opened because these bytes crashed a scan before. Reserved: nothing is quarantined yet.
    Quarantined,
    /// Another file stands for it.
    Shadowed,
}

/// One candidate file and what became of it; the rows of `plugins list`.
#[derive(Clone, Debug, Serialize)]
pub struct PluginRow {
    /// Id, as far as it is known.
    pub id: Option<String>,
    /// The plugin's own version.
    pub version: Option<String>,
    /// Who ships it.
    pub vendor: Option<String>,
    /// API version it was built for.
    pub api: Option<String>,
    /// Where it was found.
    pub path: PathBuf,
    /// Digest, once it was hashed.
    pub sha256: Option<String>,
    /// What became of it.
    pub outcome: Outcome,
    /// Why, when it was not loaded.
    pub code: Option<Code>,
    /// Why, for people.
    pub reason: Option<String>,
    /// Declared architectures.
    pub archs: Vec<String>,
    /// Number of declared forms.
    pub forms: usize,
    /// The whole declaration, where there is a valid one.
    #[serde(skip)]
    pub description: Option<Description>,
}

/// The result of a scan.
#[derive(Debug)]
pub struct Registry {
    /// The search path that was used.
    pub searched: Vec<SearchDir>,
    /// Every candidate, in search order.
    pub plugins: Vec<PluginRow>,
    loaded: Vec<Plugin>,
}

impl Registry {
    /// Scans the search path and loads what can be loaded.
    ///
    /// # Errors
    /// [`LoaderError`] when a named directory cannot be searched or the cache cannot be written; never because of a
    /// candidate.
    pub fn scan(options: &ScanOptions) -> Result<Self, LoaderError> {
        let searched = search_path(&options.dirs, &options.environment)?;
        let mut scan = Scan {
            options,
            scanner: Scanner::find(&options.mode, &options.environment),
            cpu: Device::host_cpu(),
            store: None,
            files: HashMap::new(),
            loaded: Vec::new(),
        };
        let mut plugins = Vec::new();
        for dir in &searched {
            plugins.extend(scan.directory(dir)?);
        }
        Ok(Registry {
            searched,
            plugins,
            loaded: scan.loaded,
        })
    }

    /// The loaded plugins, in search order.
    pub fn loaded(&self) -> &[Plugin] {
        &self.loaded
    }

    /// The loaded plugin with this id.
    pub fn plugin(&self, id: &str) -> Option<&Plugin> {
        self.loaded.iter().find(|p| p.id() == id)
    }

    /// The row of a plugin: the loaded one with this id, else the first that has it.
    pub fn row(&self, id: &str) -> Option<&PluginRow> {
        let of_id = |p: &&PluginRow| p.id.as_deref() == Some(id);
        let loaded = |p: &&PluginRow| p.outcome == Outcome::Loaded;
        self.plugins
            .iter()
            .filter(of_id)
            .find(loaded)
            .or(self.plugins.iter().find(of_id))
    }
}

struct Scan<'a> {
    options: &'a ScanOptions,
    scanner: Scanner,
    cpu: Device,
    store: Option<ObjectStore>,
    /// Canonical path -> the name under which it was listed.
    files: HashMap<PathBuf, PathBuf>,
    loaded: Vec<Plugin>,
}

/// A candidate on its way.
struct Candidate {
    path: PathBuf,
    object: Option<Object>,
    description: Option<Description>,
    fate: Fate,
}

enum Fate {
    Open,
    Loaded,
    Refused(Refusal),
    Shadowed(Refusal),
}

impl Scan<'_> {
    fn directory(&mut self, dir: &SearchDir) -> Result<Vec<PluginRow>, LoaderError> {
        let mut found = Vec::new();
        for path in candidates(dir)? {
            found.push(self.describe(path)?);
        }
        refuse_duplicates(&mut found);
        for candidate in &mut found {
            if matches!(candidate.fate, Fate::Open) {
                candidate.fate = self.load(candidate);
            }
        }
        Ok(found.into_iter().map(Candidate::row).collect())
    }

    /// Everything up to the document.
    fn describe(&mut self, path: PathBuf) -> Result<Candidate, LoaderError> {
        let mut candidate = Candidate {
            path,
            object: None,
            description: None,
            fate: Fate::Open,
        };
        let opened = match paths::open(&candidate.path) {
            Ok(opened) => opened,
            Err(refusal) => return Ok(candidate.refused(refusal)),
        };
        if let Some(first) = self.files.get(&opened.canonical) {
            let reason = format!("the same file as {}", first.display());
            candidate.fate = Fate::Shadowed(Code::SameFile.because(reason));
            return Ok(candidate);
        }
        self.files
            .insert(opened.canonical.clone(), candidate.path.clone());
        let object = match self.private_copy(&opened)? {
            Ok(object) => object,
            Err(refusal) => return Ok(candidate.refused(refusal)),
        };
        candidate.object = Some(object.clone());
        let document = self
            .scanner
            .describe(&object.path, self.options.deadline)
            .and_then(|text| document::parse(&text));
        match document {
            Ok(description) => candidate.description = Some(description),
            Err(refusal) => return Ok(candidate.refused(refusal)),
        }
        Ok(candidate)
    }

    /// The outer result is the cache's failure, the inner one the candidate's.
    fn private_copy(&mut self, opened: &Opened) -> Result<Result<Object, Refusal>, LoaderError> {
        // Before copying: a text file of a gigabyte is not worth it.
        if let Err(refusal) = elf::check(&opened.file) {
            return Ok(Err(refusal));
        }
        let store = match &self.store {
            Some(store) => store,
            None => {
                let cache = self
                    .options
                    .environment
                    .cache_dir
                    .as_ref()
                    .ok_or(LoaderError::NoCacheDir)?;
                self.store.insert(ObjectStore::open(cache)?)
            }
        };
        match store.intern(&opened.file) {
            Ok(object) => Ok(check_copy(&object).map(|()| object)),
            Err(StoreFailure::Candidate(refusal)) => Ok(Err(refusal)),
            Err(StoreFailure::Cache(error)) => Err(error),
        }
    }

    /// Everything after the document.
    fn load(&mut self, candidate: &Candidate) -> Fate {
        let (Some(object), Some(description)) = (&candidate.object, &candidate.description) else {
            return Fate::Refused(Code::BadDescribe.because("no document"));
        };
        let admitted = document::handshake(description)
            .and_then(|()| arch::admit_at_load(&description.id, &description.archs, &self.cpu));
        if let Err(refusal) = admitted {
            return Fate::Refused(refusal);
        }
        if let Some(earlier) = self.loaded.iter().find(|p| p.id() == description.id) {
            return Fate::Shadowed(Code::Shadowed.because(format!(
                "id {} was loaded from {}",
                description.id,
                earlier.path().display()
            )));
        }
        match Plugin::load(&candidate.path, object, description) {
            Ok(plugin) => {
                tracing::debug!(plugin = plugin.id(), path = %candidate.path.display(), "loaded");
                self.loaded.push(plugin);
                Fate::Loaded
            }
            Err(refusal) => Fate::Refused(refusal),
        }
    }
}

impl Candidate {
    fn refused(mut self, refusal: Refusal) -> Self {
        tracing::debug!(path = %self.path.display(), "{refusal}");
        self.fate = Fate::Refused(refusal);
        self
    }

    fn row(self) -> PluginRow {
        let (outcome, refusal) = match self.fate {
            Fate::Loaded => (Outcome::Loaded, None),
            Fate::Refused(refusal) => (Outcome::Refused, Some(refusal)),
            Fate::Shadowed(refusal) => (Outcome::Shadowed, Some(refusal)),
            Fate::Open => (
                Outcome::Refused,
                Some(Code::BadDescribe.because("no document")),
            ),
        };
        let (code, reason) = refusal.map(|r| (r.code, r.reason)).unzip();
        let d = self.description;
        PluginRow {
            id: d.as_ref().map(|d| d.id.clone()),
            version: d.as_ref().map(|d| d.version.clone()),
            vendor: d.as_ref().map(|d| d.vendor.clone()),
            api: d.as_ref().map(|d| d.api.clone()),
            path: self.path,
            sha256: self.object.map(|o| o.sha256),
            outcome,
            code,
            reason,
            archs: d.as_ref().map(|d| d.archs.clone()).unwrap_or_default(),
            forms: d.as_ref().map_or(0, |d| d.forms.len()),
            description: d,
        }
    }
}

/// The copy is what is opened, so it is what must be whole: the original may have changed while it was read.
fn check_copy(object: &Object) -> Result<(), Refusal> {
    let copy = std::fs::File::open(&object.path)
        .map_err(|e| Code::Unreadable.because(format!("the private copy cannot be opened: {e}")))?;
    elf::check(&copy)
}

/// Ids are unique within a directory: whoever shares one is refused, naming the others.
fn refuse_duplicates(found: &mut [Candidate]) {
    let mut by_id: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (i, candidate) in found.iter().enumerate() {
        if let (Fate::Open, Some(d)) = (&candidate.fate, &candidate.description) {
            by_id.entry(d.id.clone()).or_default().push(i);
        }
    }
    for (id, members) in by_id.into_iter().filter(|(_, members)| members.len() > 1) {
        for &i in &members {
            let others: Vec<String> = members
                .iter()
                .filter(|j| **j != i)
                .map(|j| name(&found[*j].path))
                .collect();
            let reason = format!("id {id} is also declared by {}", others.join(", "));
            found[i].fate = Fate::Refused(Code::IdDuplicate.because(reason));
        }
    }
}

fn name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}
