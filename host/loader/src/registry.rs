//! The scan of the whole search path: every candidate file and what became of it.
//!
//! Each file passes the same steps in the same order, and each step may refuse it with a code: path rules, ELF
//! check, private copy, lock, signature, sidecar, quarantine, `describe` in a child, identity, handshake,
//! architectures, opening. One file's fault is one row; the others go on. Ids are unique: two files of one directory
//! that share one are both refused, and across directories the earlier wins. Only a plugin that was loaded shadows
//! another. Everything up to the document happens for several files at once; everything after it in search order.
//!
//! Two ways to scan. [`Registry::scan`] opens what can be opened, and hashes whatever it opens. [`Registry::list`]
//! says the same of every file, but believes the cache of scans about files that have not changed and about plugins
//! that a scan child or this host has opened before: it opens what nobody did.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::Serialize;
use structures_plugin_api::abi::API_VERSION;
use structures_plugin_api::describe::Description;

use crate::arch::{self, Device};
use crate::cache::{now_nanos, Answer, ScanCache, Stamp};
use crate::code::{Code, Refusal};
use crate::document;
use crate::elf;
use crate::error::LoaderError;
use crate::lock::{self, Drift, Lock, LockPolicy, LockReport, LockedPlugin};
use crate::opening::{self, Opening};
use crate::paths::{self, Opened};
use crate::plugin::Plugin;
use crate::private;
use crate::quarantine::{Quarantine, Quarantined};
use crate::scan::{ScanMode, Scanner, DEADLINE};
use crate::search::{candidates, places, Environment, Place, SearchDir};
use crate::sidecar::Sidecar;
use crate::signature::{SignatureState, TrustedKeys};
use crate::store::{Object, ObjectStore, StoreFailure};

/// More scans at once than this gain nothing: each is a process of its own.
const MOST_WORKERS: usize = 8;

/// Plugins or files a message names at most.
const MOST_NAMED: usize = 16;

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
    /// The lock file, and whether it is enforced.
    pub lock: LockPolicy,
    /// Refuse every file without a signature of a trusted key.
    pub require_signed: bool,
}

impl ScanOptions {
    /// The process's own surroundings, a child for each plugin, ten seconds each, no lock.
    pub fn new(dirs: Vec<PathBuf>) -> Self {
        ScanOptions {
            dirs,
            environment: Environment::capture(),
            mode: ScanMode::default(),
            deadline: DEADLINE,
            lock: LockPolicy::default(),
            require_signed: false,
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
    /// Not opened because these bytes crashed or hung a scan before.
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
    #[serde(serialize_with = "paths::shown")]
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
    /// Who made it, as far as it was asked; absent where the file fell before that.
    pub signature: Option<SignatureState>,
    /// Whether a sidecar stands beside it.
    pub sidecar: bool,
    /// Since when and why it is not opened.
    pub quarantine: Option<Quarantined>,
    /// The whole declaration, where there is a valid one.
    #[serde(skip)]
    pub description: Option<Description>,
    /// The steps it took, for the trace.
    #[serde(skip)]
    pub steps: Vec<String>,
}

/// One place of the search path and every candidate in it; the load trace.
#[derive(Clone, Debug, Serialize)]
pub struct TracedPlace {
    /// Why it was considered.
    pub source: &'static str,
    /// The directory, where one is known.
    #[serde(serialize_with = "paths::shown_option")]
    pub path: Option<PathBuf>,
    /// Whether it was searched.
    pub searched: bool,
    /// Why not.
    pub reason: Option<String>,
    /// Its candidates.
    pub candidates: Vec<TracedCandidate>,
}

/// One candidate of the trace.
#[derive(Clone, Debug, Serialize)]
pub struct TracedCandidate {
    /// The file.
    #[serde(serialize_with = "paths::shown")]
    pub path: PathBuf,
    /// The steps it took, in order.
    pub steps: Vec<String>,
    /// What became of it.
    pub outcome: Outcome,
    /// Why, when it was not loaded.
    pub code: Option<Code>,
}

/// The result of a scan.
#[derive(Debug)]
pub struct Registry {
    /// The search path that was used.
    pub searched: Vec<SearchDir>,
    /// Every candidate, in search order.
    pub plugins: Vec<PluginRow>,
    /// Every place that was considered, in order.
    pub trace: Vec<TracedPlace>,
    /// What the lock says, where one was looked for.
    pub lock: Option<LockReport>,
    loaded: Vec<Plugin>,
}

impl Registry {
    /// Scans the search path and loads what can be loaded.
    ///
    /// # Errors
    /// [`LoaderError`] when a named directory cannot be searched, the cache cannot be written, or a lock or a trusted
    /// key cannot be read; never because of a candidate.
    pub fn scan(options: &ScanOptions) -> Result<Self, LoaderError> {
        Self::run(options, false)
    }

    /// As [`Registry::scan`] for somebody who only wants to know: a plugin that its scan child or this host opened
    /// is listed as loaded without being opened here. [`Registry::loaded`] lacks it.
    ///
    /// # Errors
    /// As [`Registry::scan`].
    pub fn list(options: &ScanOptions) -> Result<Self, LoaderError> {
        Self::run(options, true)
    }

    fn run(options: &ScanOptions, listing: bool) -> Result<Self, LoaderError> {
        let environment = &options.environment;
        let places = places(&options.dirs, environment)?;
        let cache_dir = environment.cache_dir.as_deref();
        let scanner = Scanner::find(&options.mode, environment);
        if let Some(cache) = cache_dir {
            own_cache(cache)?;
        }
        let lock = Lock::read_for(&options.lock)?;
        let named = environment.trusted_keys.is_some();
        let keys = environment.trusted_keys.clone().or_else(|| {
            let config = environment.config_dir.as_ref()?;
            Some(config.join("structures").join("trusted"))
        });
        let made_by = made_by(&scanner);
        let quarantine = Quarantine::open(cache_dir, made_by.clone());
        let opening = Opening::open(cache_dir);
        // Noted before the entries' names are read again.
        let quarantine = match opening.report(&quarantine) {
            0 => quarantine,
            _ => Quarantine::open(cache_dir, made_by.clone()),
        };
        let mut scan = Scan {
            options,
            listing,
            cpu: Device::host_cpu(),
            cache: ScanCache::open(cache_dir, made_by),
            quarantine,
            opening,
            keys: TrustedKeys::read(keys.as_deref(), named)?,
            lock,
            scanner,
            store: Mutex::new(None),
            files: HashMap::new(),
            ids: HashMap::new(),
            loaded: Vec::new(),
        };
        let (plugins, trace) = scan.places(&places)?;
        let lock = scan.report(&plugins);
        scan.cache.save();
        Ok(Registry {
            searched: places.into_iter().filter_map(Place::searched).collect(),
            plugins,
            trace,
            lock,
            loaded: scan.loaded,
        })
    }

    /// The plugins that were opened, in search order.
    pub fn loaded(&self) -> &[Plugin] {
        &self.loaded
    }

    /// The opened plugin with this id.
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

    /// What there is, for a message about an id that is not: the ids that can be used, and the files that are not.
    pub fn known(&self) -> String {
        let of = |wanted: fn(Outcome) -> bool| {
            let rows = self.plugins.iter().filter(move |p| wanted(p.outcome));
            rows.take(MOST_NAMED)
        };
        let usable: Vec<&str> = of(|o| o == Outcome::Loaded)
            .filter_map(|p| p.id.as_deref())
            .collect();
        let unused: Vec<String> = of(|o| matches!(o, Outcome::Refused | Outcome::Quarantined))
            .map(|p| {
                let code = p.code.map_or("refused", |c| c.name());
                let quarantined = match p.outcome {
                    Outcome::Quarantined => "in quarantine: ",
                    _ => "",
                };
                format!("{} ({quarantined}{code})", name(&p.path))
            })
            .collect();
        let usable = match usable.is_empty() {
            true => "none is loaded".to_string(),
            false => format!("loaded: {}", usable.join(", ")),
        };
        match unused.is_empty() {
            true => usable,
            false => format!("{usable}; not used: {}", unused.join(", ")),
        }
    }

    /// A lock of every loaded plugin.
    pub fn to_lock(&self) -> Lock {
        let locked = self.plugins.iter().filter_map(|p| {
            Some(LockedPlugin {
                id: p.id.clone().filter(|_| p.outcome == Outcome::Loaded)?,
                version: p.version.clone()?,
                sha256: p.sha256.clone()?,
                file: name(&p.path),
            })
        });
        Lock::new(locked.collect())
    }
}

/// Whoever could write the cache could tell the host what it has seen, and give it other bytes to open.
fn own_cache(cache: &Path) -> Result<(), LoaderError> {
    for name in ["objects", "scans", "quarantine", "opening"] {
        let path = cache.join(name);
        private::own_directory(&path).map_err(|source| LoaderError::Cache {
            path,
            action: "believe the directory",
            source,
        })?;
    }
    Ok(())
}

/// Forgets every scan and the whole quarantine below a cache directory; how many entries each had.
///
/// # Errors
/// [`LoaderError::NoCacheDir`], or [`LoaderError::Cache`] when a file cannot be removed.
pub fn forget(environment: &Environment) -> Result<(usize, usize), LoaderError> {
    let cache = environment
        .cache_dir
        .as_deref()
        .ok_or(LoaderError::NoCacheDir)?;
    let failed = |source| LoaderError::Cache {
        path: cache.to_path_buf(),
        action: "forget what it holds",
        source,
    };
    let scans = crate::cache::forget(cache).map_err(failed)?;
    opening::forget(cache).map_err(failed)?;
    let quarantined = crate::quarantine::forget(cache).map_err(failed)?;
    Ok((scans, quarantined))
}

/// Whose answers the cache holds.
fn made_by(scanner: &Scanner) -> String {
    format!(
        "structures {} api {API_VERSION} scanner {}",
        env!("CARGO_PKG_VERSION"),
        scanner.stamp()
    )
}

struct Scan<'a> {
    options: &'a ScanOptions,
    listing: bool,
    scanner: Scanner,
    cpu: Device,
    cache: ScanCache,
    quarantine: Quarantine,
    opening: Opening,
    keys: TrustedKeys,
    lock: Option<Lock>,
    store: Mutex<Option<ObjectStore>>,
    /// Canonical path -> the name under which it was listed.
    files: HashMap<PathBuf, PathBuf>,
    /// Id -> the file that was loaded.
    ids: HashMap<String, PathBuf>,
    loaded: Vec<Plugin>,
}

/// A candidate on its way.
struct Candidate {
    path: PathBuf,
    /// Links resolved, once the path rules passed.
    canonical: Option<PathBuf>,
    /// What refused it belongs to this name - sidecar, signature - and not to the bytes.
    by_name: bool,
    /// What was hashed: the stamp and when it was taken.
    stamp: Option<(Stamp, i64)>,
    sha256: Option<String>,
    object: Option<Object>,
    sidecar: bool,
    signature: Option<SignatureState>,
    quarantine: Option<Quarantined>,
    description: Option<Description>,
    /// The child opened and closed it in this scan.
    rehearsed: bool,
    /// What the child answered in this scan.
    answer: Option<Answer>,
    /// What it answered when the child opened it.
    unopened: Option<Refusal>,
    /// The line of a signature that was found to fit these bytes.
    signed: Option<String>,
    fate: Fate,
    steps: Vec<String>,
}

enum Fate {
    /// Not looked into yet.
    Unknown,
    /// Described.
    Open,
    Loaded,
    Refused(Refusal),
    Quarantined(Refusal),
    Shadowed(Refusal),
}

/// What ends the way of one candidate; the cache's failure ends the scan.
enum Stop {
    Refused(Refusal),
    Cache(LoaderError),
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Stop::Refused(refusal)
    }
}

impl Scan<'_> {
    fn places(
        &mut self,
        places: &[Place],
    ) -> Result<(Vec<PluginRow>, Vec<TracedPlace>), LoaderError> {
        let mut found: Vec<(usize, Candidate)> = Vec::new();
        for (i, place) in places.iter().enumerate() {
            if let Some(dir) = place.clone().searched() {
                for path in candidates(&dir)? {
                    found.push((i, self.first_look(path)));
                }
            }
        }
        self.describe_all(&mut found)?;
        while look_again(&mut found) {
            self.describe_all(&mut found)?;
        }
        for (_, candidate) in &mut found {
            self.remember(candidate);
        }
        let mut rows = Vec::with_capacity(found.len());
        let mut trace: Vec<TracedPlace> = places.iter().map(TracedPlace::of).collect();
        let mut found = found.into_iter().peekable();
        while let Some(&(place, _)) = found.peek() {
            let mut group = Vec::new();
            while let Some((_, candidate)) = found.next_if(|(p, _)| *p == place) {
                group.push(candidate);
            }
            refuse_duplicates(&mut group);
            for candidate in &mut group {
                if matches!(candidate.fate, Fate::Open) {
                    candidate.fate = self.load(candidate);
                }
                if let Some((loaded, sha256)) = candidate.tried() {
                    self.cache.note_loaded(sha256, loaded);
                }
            }
            for candidate in group {
                let row = candidate.row();
                trace[place].candidates.push(TracedCandidate::of(&row));
                rows.push(row);
            }
        }
        Ok((rows, trace))
    }

    /// Path rules, and what the cache knows of a file that has not changed.
    fn first_look(&mut self, path: PathBuf) -> Candidate {
        let mut candidate = Candidate::new(path);
        let opened = match paths::open(&candidate.path) {
            Ok(opened) => opened,
            Err(refusal) => {
                candidate.fate = Fate::Refused(refusal);
                return candidate;
            }
        };
        candidate.canonical = Some(opened.canonical.clone());
        if let Some(first) = self.files.get(&opened.canonical) {
            let reason = format!("the same file as {}", first.display());
            candidate.fate = Fate::Shadowed(Code::SameFile.because(reason));
            return candidate;
        }
        self.files
            .insert(opened.canonical.clone(), candidate.path.clone());
        candidate.steps.push("path rules passed".into());
        if self.listing {
            let stamp = opened.file.metadata().ok().map(|m| Stamp::of(&m));
            candidate.sha256 = stamp
                .and_then(|stamp| self.cache.digest(&candidate.path, &stamp))
                .filter(|sha256| self.cache.answer(sha256).is_some());
            if candidate.sha256.is_some() {
                candidate
                    .steps
                    .push("unchanged since it was hashed (cache)".into());
                let way = self.describe(&mut candidate, Some(opened));
                // Nothing is copied on this way, so the cache cannot fail.
                candidate.end(way);
            }
        }
        candidate
    }

    /// Everything up to the document, for all that are not known yet, several at once.
    fn describe_all(&self, found: &mut [(usize, Candidate)]) -> Result<(), LoaderError> {
        let unknown: Vec<&mut Candidate> = found
            .iter_mut()
            .map(|(_, c)| c)
            .filter(|c| matches!(c.fate, Fate::Unknown))
            .collect();
        // In this process, initialisers run one at a time, as they do in every other program.
        let workers = match &self.scanner {
            Scanner::InProcess => 1,
            _ => std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(MOST_WORKERS)
                .min(unknown.len()),
        };
        let queue = Mutex::new(unknown.into_iter());
        let failure: Mutex<Option<LoaderError>> = Mutex::new(None);
        let work = || loop {
            let next = unpoisoned(&queue).next();
            let Some(candidate) = next.filter(|_| unpoisoned(&failure).is_none()) else {
                return;
            };
            let way = self.describe(candidate, None);
            if let Some(error) = candidate.end(way) {
                unpoisoned(&failure).get_or_insert(error);
            }
        };
        if workers <= 1 {
            work();
        } else {
            std::thread::scope(|scope| {
                for _ in 0..workers {
                    scope.spawn(work);
                }
            });
        }
        let failure = unpoisoned(&failure).take();
        failure.map_or(Ok(()), Err)
    }

    /// From the file to the document. With a digest from the cache the file is not read.
    fn describe(&self, candidate: &mut Candidate, opened: Option<Opened>) -> Result<(), Stop> {
        let opened = match opened {
            Some(opened) => opened,
            None => paths::open(&candidate.path)?,
        };
        // Read first, so that a library for another machine shows what it declares.
        let sidecar = Sidecar::read(&candidate.path);
        if let Ok(Some(sidecar)) = &sidecar {
            candidate.sidecar = true;
            candidate.description = Some(sidecar.description.clone());
            candidate.steps.push("sidecar read".into());
        }
        if candidate.sha256.is_none() {
            self.copy(candidate, &opened)?;
        }
        let sha256 = candidate.sha256.clone().unwrap_or_default();
        if let Some(lock) = self.listed(&name(&candidate.path), &sha256)? {
            candidate.steps.push(lock);
        }
        let copy = candidate.object.clone();
        // Without a copy nothing is opened, and the digest is the cache's: so may be what it says of a signature.
        let known = match copy {
            Some(_) => None,
            None => self.cache.signed(&sha256),
        };
        let bytes = || copy.map_or_else(|| opened.file.try_clone(), |copy| copy.open());
        let required = self.options.require_signed;
        let judged = self.keys.judge(&candidate.path, known, bytes, required);
        candidate.steps.push(format!("signature {}", judged.state));
        candidate.signature = Some(judged.state);
        candidate.signed = judged.verified;
        candidate.by_name = true;
        judged.answer?;
        let sidecar = sidecar?;
        if let Some(sidecar) = &sidecar {
            sidecar.covers(&candidate.path, &sha256)?;
            self.admit(&sidecar.description)?;
        }
        candidate.by_name = false;
        self.answer(candidate, &sha256)?;
        if let (Some(sidecar), Some(d)) = (&sidecar, &candidate.description) {
            let agreed = sidecar.agrees(&candidate.path, d);
            candidate.by_name = agreed.is_err();
            agreed?;
            candidate.steps.push("sidecar agrees".into());
        }
        candidate.fate = Fate::Open;
        Ok(())
    }

    /// The private copy and the digest.
    fn copy(&self, candidate: &mut Candidate, opened: &Opened) -> Result<(), Stop> {
        // Before copying: a text file of a gigabyte is not worth it.
        elf::check(&opened.file)?;
        let taken = now_nanos();
        let stamp = opened.file.metadata().ok().map(|m| Stamp::of(&m));
        let object = self.intern(&opened.file)?;
        // The copy is what is opened, so it is what must be whole: the original may have changed while it was read.
        let copy = object.open().map_err(|e| {
            Code::Unreadable.because(format!("the private copy cannot be opened: {e}"))
        })?;
        elf::check(&copy)?;
        let after = opened.file.metadata().ok().map(|m| Stamp::of(&m));
        candidate.stamp = stamp.filter(|_| stamp == after).map(|s| (s, taken));
        candidate.sha256 = Some(object.sha256.clone());
        candidate.object = Some(object);
        candidate.steps.push("ELF checked, hashed, copied".into());
        Ok(())
    }

    fn intern(&self, file: &File) -> Result<Object, Stop> {
        let mut slot = unpoisoned(&self.store);
        if slot.is_none() {
            let cache = self.options.environment.cache_dir.as_ref();
            let opened = cache
                .ok_or(LoaderError::NoCacheDir)
                .and_then(|cache| ObjectStore::open(cache));
            *slot = Some(opened.map_err(Stop::Cache)?);
        }
        let store = slot.clone();
        drop(slot);
        match store.map(|store| store.intern(file)) {
            Some(Ok(object)) => Ok(object),
            Some(Err(StoreFailure::Candidate(refusal))) => Err(refusal.into()),
            Some(Err(StoreFailure::Cache(error))) => Err(Stop::Cache(error)),
            None => Err(Stop::Cache(LoaderError::NoCacheDir)),
        }
    }

    /// What an enforced lock says.
    fn listed(&self, file: &str, sha256: &str) -> Result<Option<String>, Refusal> {
        match (&self.lock, self.options.lock.enforced) {
            (_, false) => Ok(None),
            (None, true) => Err(lock::missing(&self.options.lock)),
            (Some(lock), true) => {
                lock.admits(file, sha256)?;
                Ok(Some("locked".into()))
            }
        }
    }

    /// The document: remembered, or from a child unless these bytes are in quarantine.
    fn answer(&self, candidate: &mut Candidate, sha256: &str) -> Result<(), Refusal> {
        if let Some(entry) = self.quarantine.of(sha256) {
            let refusal = entry.refusal();
            candidate.quarantine = Some(entry);
            return Err(refusal);
        }
        match self.cache.answer(sha256) {
            Some(Answer::Description(d)) => {
                candidate.steps.push("described before (cache)".into());
                candidate.description = Some((**d).clone());
                return Ok(());
            }
            Some(Answer::Refused {
                code,
                reason,
                detail,
            }) => {
                if let Some(code) = Code::from_name(code) {
                    candidate.steps.push("refused before (cache)".into());
                    return Err(Refusal {
                        detail: detail.clone(),
                        ..code.because(reason.clone())
                    });
                }
            }
            None => {}
        }
        let Some(object) = &candidate.object else {
            return Err(Code::BytesChanged.because("the cache of scans forgot the file meanwhile"));
        };
        let start = Instant::now();
        let described = self
            .scanner
            .describe(&object.path, self.options.deadline)
            .and_then(|described| {
                let d = document::parse(&described.text)?;
                Ok((d, described.opened))
            });
        let took = start.elapsed().as_secs_f64() * 1e3;
        match described {
            Ok((d, opened)) => {
                candidate.steps.push(format!("described in {took:.1} ms"));
                candidate.description = Some(d.clone());
                match opened {
                    Ok(rehearsed) => {
                        candidate.rehearsed = rehearsed;
                        candidate.answer = Some(Answer::Description(Box::new(d)));
                    }
                    // An answer of the plugin's own, perhaps another one tomorrow; ids are settled first.
                    Err(failed) if failed.is_answer() => candidate.unopened = Some(failed.refusal),
                    Err(failed) => {
                        self.quarantine.note(sha256, &candidate.path, &failed);
                        return Err(failed.refusal);
                    }
                }
                Ok(())
            }
            Err(failed) => {
                candidate
                    .steps
                    .push(format!("not described, after {took:.1} ms"));
                candidate.answer = Answer::refused(&failed.refusal);
                self.quarantine.note(sha256, &candidate.path, &failed);
                Err(failed.refusal)
            }
        }
    }

    /// Handshake and architectures.
    fn admit(&self, description: &Description) -> Result<(), Refusal> {
        document::handshake(description)?;
        arch::admit_at_load(&description.id, &description.archs, &self.cpu)
    }

    fn remember(&mut self, candidate: &mut Candidate) {
        let Some(sha256) = &candidate.sha256 else {
            return;
        };
        if let Some(answer) = candidate.answer.take() {
            self.cache.note_answer(sha256, answer);
            self.cache.note_loaded(sha256, candidate.rehearsed);
        }
        if let Some(line) = candidate.signed.take() {
            self.cache.note_signed(sha256, line);
        }
        if let Some((stamp, taken)) = candidate.stamp {
            if self.cache.answer(sha256).is_some() {
                self.cache.note_file(&candidate.path, stamp, taken, sha256);
            }
        }
    }

    /// Everything after the document.
    fn load(&mut self, candidate: &mut Candidate) -> Fate {
        let (Some(sha256), Some(description)) =
            (candidate.sha256.clone(), candidate.description.clone())
        else {
            return Fate::Refused(Code::BadDescribe.because("no document"));
        };
        if let Err(refusal) = self.admit(&description) {
            return Fate::Refused(refusal);
        }
        if let Some(earlier) = self.ids.get(&description.id) {
            return Fate::Shadowed(Code::Shadowed.because(format!(
                "id {} was loaded from {}",
                description.id,
                earlier.display()
            )));
        }
        if let Some(refusal) = candidate.unopened.take() {
            return Fate::Refused(refusal);
        }
        if self.listing && self.cache.loaded(&sha256) {
            let step = match candidate.rehearsed {
                true => "opened in the scan child",
                false => "opened before (cache)",
            };
            candidate.steps.push(step.into());
            self.ids.insert(description.id, candidate.path.clone());
            return Fate::Loaded;
        }
        match self.open(candidate, &sha256, &description) {
            Ok(plugin) => {
                tracing::debug!(plugin = plugin.id(), path = %candidate.path.display(), "loaded");
                candidate.steps.push("opened".into());
                self.ids.insert(description.id, candidate.path.clone());
                self.loaded.push(plugin);
                Fate::Loaded
            }
            Err(refusal) => Fate::Refused(refusal),
        }
    }

    fn open(
        &mut self,
        candidate: &mut Candidate,
        sha256: &str,
        description: &Description,
    ) -> Result<Plugin, Refusal> {
        if candidate.object.is_none() {
            // Known from the cache so far: now the bytes are needed, and they are hashed.
            let opened = paths::open(&candidate.path)?;
            let object = match self.intern(&opened.file) {
                Ok(object) => object,
                Err(Stop::Refused(refusal)) => return Err(refusal),
                Err(Stop::Cache(error)) => {
                    return Err(Code::OpenFailed.because(error.to_string()));
                }
            };
            if object.sha256 != sha256 {
                self.cache.forget_file(&candidate.path);
                return Err(Code::BytesChanged.because(format!(
                    "expected sha256 {sha256}, found {}, although inode, size and times are the same",
                    object.sha256
                )));
            }
            candidate.object = Some(object);
        }
        let Some(object) = &candidate.object else {
            return Err(Code::BytesChanged.because("there is no private copy"));
        };
        object.verify()?;
        let _mark = self.opening.mark(sha256, &candidate.path);
        Plugin::load(&candidate.path, object, description)
    }

    /// Differences between a lock and what was found.
    fn report(&self, rows: &[PluginRow]) -> Option<LockReport> {
        let path = self.options.lock.file.clone()?;
        let enforced = self.options.lock.enforced;
        let Some(lock) = &self.lock else {
            return enforced.then_some(LockReport {
                path,
                found: false,
                enforced,
                drift: Vec::new(),
            });
        };
        let mut drift = Vec::new();
        for row in rows.iter().filter(|r| r.outcome == Outcome::Loaded) {
            let (file, sha256) = (name(&row.path), row.sha256.clone().unwrap_or_default());
            if let Err(refusal) = lock.admits(&file, &sha256) {
                drift.push(Drift {
                    code: refusal.code.name().into(),
                    id: row.id.clone(),
                    reason: refusal.reason,
                    file,
                });
            }
        }
        for entry in &lock.plugins {
            let there = |r: &PluginRow| {
                r.sha256.as_ref() == Some(&entry.sha256) || name(&r.path) == entry.file
            };
            if !rows.iter().any(there) {
                drift.push(Drift {
                    code: "lock_absent".into(),
                    id: Some(entry.id.clone()),
                    reason: format!("{} {} is locked and was not found", entry.id, entry.version),
                    file: entry.file.clone(),
                });
            }
        }
        for d in &drift {
            tracing::warn!("{}: {}: {}: {}", path.display(), d.file, d.code, d.reason);
        }
        Some(LockReport {
            path,
            found: true,
            enforced,
            drift,
        })
    }
}

impl Candidate {
    fn new(path: PathBuf) -> Self {
        Candidate {
            path,
            canonical: None,
            by_name: false,
            stamp: None,
            sha256: None,
            object: None,
            sidecar: false,
            signature: None,
            quarantine: None,
            description: None,
            rehearsed: false,
            answer: None,
            unopened: None,
            signed: None,
            fate: Fate::Unknown,
            steps: Vec::new(),
        }
    }

    /// Takes the end of its way; gives back what ends the whole scan.
    fn end(&mut self, way: Result<(), Stop>) -> Option<LoaderError> {
        match way {
            Ok(()) => None,
            Err(Stop::Cache(error)) => Some(error),
            Err(Stop::Refused(refusal)) => {
                self.fate = match self.quarantine {
                    Some(_) => Fate::Quarantined(refusal),
                    None => Fate::Refused(refusal),
                };
                None
            }
        }
    }

    /// Whether it was opened, and with which bytes: what the cache remembers of the end.
    fn tried(&self) -> Option<(bool, &str)> {
        let loaded = match &self.fate {
            Fate::Loaded => true,
            // Everything else says nothing about opening these bytes.
            Fate::Refused(r)
                if self.object.is_some()
                    && matches!(r.code, Code::DescribeChanged | Code::PluginOpenFailed) =>
            {
                false
            }
            _ => return None,
        };
        Some((loaded, self.sha256.as_deref()?))
    }

    fn row(self) -> PluginRow {
        let (outcome, refusal) = match self.fate {
            Fate::Loaded => (Outcome::Loaded, None),
            Fate::Refused(refusal) => (Outcome::Refused, Some(refusal)),
            Fate::Quarantined(refusal) => (Outcome::Quarantined, Some(refusal)),
            Fate::Shadowed(refusal) => (Outcome::Shadowed, Some(refusal)),
            Fate::Unknown | Fate::Open => (
                Outcome::Refused,
                Some(Code::BadDescribe.because("no document")),
            ),
        };
        if let Some(refusal) = &refusal {
            tracing::debug!(path = %self.path.display(), "{refusal}");
            if let Some(detail) = &refusal.detail {
                tracing::debug!(path = %self.path.display(), "in full:\n{detail}");
            }
        }
        let (code, reason) = refusal.map(|r| (r.code, r.reason)).unzip();
        let d = self.description;
        PluginRow {
            id: d.as_ref().map(|d| d.id.clone()),
            version: d.as_ref().map(|d| d.version.clone()),
            vendor: d.as_ref().map(|d| d.vendor.clone()),
            api: d.as_ref().map(|d| d.api.clone()),
            path: self.path,
            sha256: self.sha256,
            outcome,
            code,
            reason,
            archs: d.as_ref().map(|d| d.archs.clone()).unwrap_or_default(),
            forms: d.as_ref().map_or(0, |d| d.forms.len()),
            signature: self.signature,
            sidecar: self.sidecar,
            quarantine: self.quarantine,
            description: d,
            steps: self.steps,
        }
    }
}

impl TracedPlace {
    fn of(place: &Place) -> Self {
        TracedPlace {
            source: place.source.name(),
            path: place.path.clone(),
            searched: place.path.is_some() && place.skipped.is_none(),
            reason: place.skipped.clone(),
            candidates: Vec::new(),
        }
    }
}

impl TracedCandidate {
    fn of(row: &PluginRow) -> Self {
        TracedCandidate {
            path: row.path.clone(),
            steps: row.steps.clone(),
            outcome: row.outcome,
            code: row.code,
        }
    }
}

/// A name that was refused for what stands beside it stands for no other name of the file: the next one is looked
/// into. Whether there is one.
fn look_again(found: &mut [(usize, Candidate)]) -> bool {
    let mut standing: HashMap<PathBuf, PathBuf> = HashMap::new();
    let mut again = false;
    for (_, candidate) in found {
        let Some(canonical) = candidate.canonical.clone() else {
            continue;
        };
        let first = standing.get(&canonical);
        match &candidate.fate {
            Fate::Shadowed(refusal) if refusal.code == Code::SameFile => {
                if let Some(first) = first {
                    let reason = format!("the same file as {}", first.display());
                    candidate.fate = Fate::Shadowed(Code::SameFile.because(reason));
                    continue;
                }
                candidate.fate = Fate::Unknown;
                candidate.steps.push("path rules passed".into());
                again = true;
            }
            Fate::Refused(_) if candidate.by_name => continue,
            _ if first.is_some() => continue,
            _ => {}
        }
        standing.insert(canonical, candidate.path.clone());
    }
    again
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

/// A worker that panicked left nothing half-done behind these locks.
fn unpoisoned<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
