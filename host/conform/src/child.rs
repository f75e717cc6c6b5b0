//! The child's end: one check, in a process that exists for it.
//!
//! What to do comes as one JSON argument; answers are JSON lines on the real stdout: where the check is (so that the
//! parent can say where it died), and at the end what came out.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use structures_catalog::Catalog;
use structures_loader::Throwaway;
use structures_suite::{Executor, Loaded};

use crate::checks::{self, Check, Verdict};
use crate::code::Code;

/// Sub-command of the program that is a child.
pub const SUBCOMMAND: &str = "__conform-check";

/// Processor seconds beyond the deadline: only catches a child whose parent is gone.
const SPARE_SECONDS: u64 = 30;

/// What a child is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    /// Name of the check.
    pub check: String,
    /// Structure and form, for a check of one form.
    pub form: Option<(String, String)>,
    /// Directory that holds the copy of the plugin and nothing else.
    #[serde(with = "raw_path")]
    pub plugins: PathBuf,
    /// The copy.
    #[serde(with = "raw_path")]
    pub file: PathBuf,
    /// Private directory of caches.
    #[serde(with = "raw_path")]
    pub cache: PathBuf,
    /// Directories with more structures.
    pub catalog: Vec<RawPath>,
    /// First seed.
    pub seed: u64,
    /// Most cases.
    pub cases: Option<usize>,
    /// Only this one.
    pub only: Option<u64>,
    /// Threads of the host's pool.
    pub threads: Option<usize>,
    /// Seconds it may take.
    pub seconds: u64,
    /// What `describe` answered in another process.
    pub described: Option<String>,
    /// What the end has to repeat: an answer without it is somebody else's.
    pub nonce: String,
}

/// A path in a task: JSON has no word for one that is not UTF-8, so it goes as its bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RawPath(#[serde(with = "raw_path")] pub PathBuf);

mod raw_path {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Vec::deserialize(from).map(|bytes| OsString::from_vec(bytes).into())
    }
}

/// A line from the child.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// Where it is.
    At {
        /// For people.
        what: String,
        /// What to replay, where there is something.
        seed: Option<u64>,
    },
    /// The end.
    Done(Done),
}

/// What came out.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Done {
    /// The code, when it failed.
    pub code: Option<String>,
    /// Why it failed, or what was found.
    pub reason: Option<String>,
    /// It was not done.
    pub skipped: bool,
    /// What to replay.
    pub seed: Option<u64>,
    /// The text of the description, from the check that loads.
    pub described: Option<String>,
    /// Forms that the fault is of.
    pub forms: Vec<(String, String)>,
    /// The case that was asked for was there.
    pub met: bool,
    /// The task's.
    pub nonce: String,
}

/// Tells the parent where a check is.
pub struct Teller {
    out: RefCell<File>,
    only: Option<u64>,
    met: Cell<bool>,
}

impl Teller {
    /// A line; a parent that is gone is no concern of a child that dies with it.
    pub fn tell(&self, line: &Line) {
        if let Ok(text) = serde_json::to_string(line) {
            let _ = self
                .out
                .borrow_mut()
                .write_all(format!("{text}\n").as_bytes());
        }
    }

    /// Where the check is.
    pub fn at(&self, what: &str, seed: Option<u64>) {
        if seed.is_some() && seed == self.only {
            self.met.set(true);
        }
        self.tell(&Line::At {
            what: what.into(),
            seed,
        });
    }
}

/// A last word; whether anybody hears it is no concern of a child.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Does one check and leaves the process: what a program does for [`SUBCOMMAND`], before anything else.
pub fn check_main(task: &str) -> i32 {
    let task: Task = match serde_json::from_str(task) {
        Ok(task) => task,
        Err(e) => {
            say(&format!("{SUBCOMMAND}: the task is none: {e}"));
            return 2;
        }
    };
    let (throwaway, out) = match Throwaway::enter(task.seconds.saturating_add(SPARE_SECONDS)) {
        Ok(entered) => entered,
        Err(e) => {
            say(&format!("{SUBCOMMAND}: stdout cannot be moved away: {e}"));
            return 1;
        }
    };
    let teller = Teller {
        out: RefCell::new(out),
        only: task.only,
        met: Cell::new(false),
    };
    let mut done = perform(&task, &throwaway, &teller);
    done.met = teller.met.get();
    done.nonce = task.nonce;
    teller.tell(&Line::Done(done));
    throwaway.leave(0)
}

fn perform(task: &Task, throwaway: &Throwaway, teller: &Teller) -> Done {
    let Some(check) = checks::ALL.iter().find(|c| c.name() == task.check) else {
        return failed(
            Code::Broken.name(),
            format!("no check `{}`", task.check),
            None,
        );
    };
    if let Some(n) = task.threads {
        if let Err(e) = structures::host::set_threads(n) {
            return failed(Code::Broken.name(), e.to_string(), None);
        }
    }
    if let Check::File { run, .. } = check {
        return told(run(&task.file, throwaway));
    }
    let loaded = match Loaded::in_place(&task.plugins, &task.cache) {
        Ok(loaded) => loaded,
        Err(structures_suite::SuiteError::Plugin { code, reason, .. }) => {
            return failed(&code, reason, None)
        }
        Err(e) => return failed(Code::Broken.name(), e.to_string(), None),
    };
    let mut catalog = match Catalog::builtin() {
        Ok(catalog) => catalog,
        Err(e) => return failed(Code::Broken.name(), e.to_string(), None),
    };
    for RawPath(dir) in &task.catalog {
        catalog = match catalog.with_dir(dir) {
            Ok(catalog) => catalog,
            Err(e) => return failed(Code::Broken.name(), e.to_string(), None),
        };
    }
    let cx = checks::Context {
        loaded: &loaded,
        catalog: &catalog,
        throwaway,
        teller,
        task,
    };
    match check {
        Check::File { .. } | Check::Scan { .. } => Done::default(),
        Check::Plugin { run, .. } => told(run(&cx)),
        Check::Form { run, .. } => {
            let named = task.form.as_ref();
            let form = named.and_then(|(s, f)| loaded.description().form(s, f));
            match form {
                Some(form) => told(checks::with_bench(&cx, form, *run)),
                None => failed(Code::Broken.name(), "no such form".into(), None),
            }
        }
    }
}

fn failed(code: &str, reason: String, seed: Option<u64>) -> Done {
    Done {
        code: Some(code.into()),
        reason: Some(reason),
        seed,
        ..Done::default()
    }
}

fn told(verdict: Verdict) -> Done {
    match verdict {
        Verdict::Passed { note, described } => Done {
            reason: note,
            described,
            ..Done::default()
        },
        Verdict::Skipped(reason) => Done {
            reason: Some(reason),
            skipped: true,
            ..Done::default()
        },
        Verdict::Failed {
            code,
            reason,
            seed,
            forms,
        } => Done {
            forms,
            ..failed(code.name(), reason, seed)
        },
    }
}
