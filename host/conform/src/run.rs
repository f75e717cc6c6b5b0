//! The plan, and the parent of the children that carry it out.
//!
//! The library is copied once into a private directory; everything else happens to the copy, in one child after the
//! other. A check of the whole library comes first; a check that others stand on (that it loads, that a form runs)
//! turns the others into skips when it fails, so that a fault is named where it is and not everywhere it shows.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Serialize;
use structures_loader::{run_to_end, Ended, Refusal};
use structures_plugin_api::describe::Description;

use crate::checks::{self, Check};
use crate::child::{Done, Line, RawPath, Task, SUBCOMMAND};
use crate::code::Code;
use crate::place::{self, Place};

/// How many last bytes of a child's messages a reason quotes.
const LAST_WORDS: usize = 300;
/// Starts of the scanner that a scan time is the shortest of.
const SCANS: usize = 3;
/// Longest scan.
const LONGEST_SCAN: Duration = Duration::from_secs(1);

/// What is asked.
#[derive(Clone, Debug)]
pub struct Options {
    /// The library.
    pub plugin: PathBuf,
    /// Only these forms: a structure, or a structure and the name of a form.
    pub forms: Vec<(String, Option<String>)>,
    /// First seed of everything generated.
    pub seed: u64,
    /// Most generated cases a form and check; the checks' own numbers when absent.
    pub cases: Option<usize>,
    /// Longest time of one check.
    pub timeout: Duration,
    /// Only this check, and only the case with this seed.
    pub replay: Option<(String, u64)>,
    /// The program that has [`SUBCOMMAND`] and the scanner's sub-command.
    pub program: PathBuf,
    /// Directories with more structures.
    pub catalog: Vec<PathBuf>,
    /// Threads of the host's pool in every child.
    pub threads: Option<usize>,
}

/// What became of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All well.
    Pass,
    /// Something is wrong.
    Fail,
    /// Not done; the reason says why.
    Skip,
}

/// One check of the library or of one form.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the check.
    pub name: String,
    /// `structure/form`, for a check of one form.
    pub form: Option<String>,
    /// What became of it.
    pub outcome: Outcome,
    /// Stable code, when it failed.
    pub code: Option<String>,
    /// Why it failed or was skipped, or what was found.
    pub reason: Option<String>,
    /// Arguments that do exactly what failed once more.
    pub replay: Option<String>,
    /// How long it took.
    pub seconds: f64,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Id of the plugin, once it loaded.
    pub plugin: Option<String>,
    /// Its version.
    pub version: Option<String>,
    /// The library.
    #[serde(serialize_with = "shown")]
    pub path: PathBuf,
    /// First seed.
    pub seed: u64,
    /// Everything, in order.
    pub checks: Vec<Row>,
}

impl Report {
    /// How many ended so.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.checks.iter().filter(|r| r.outcome == outcome).count()
    }
}

/// Why there is no report. What a plugin does is never one of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConformError {
    /// The library or the place for its copy.
    #[error("{path}: {source}")]
    File {
        /// File.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The place for the private copy.
    #[error("{path}: the private copy of the plugin cannot be kept there: {source}")]
    Place {
        /// Directory.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// A child cannot be started.
    #[error("{program} cannot be started for a check: {source}")]
    Child {
        /// The program.
        program: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// A form that the plugin does not declare.
    #[error("--forms {wanted}: the plugin declares no such form; it declares {declared}")]
    FormUnknown {
        /// As given.
        wanted: String,
        /// All forms.
        declared: String,
    },
    /// A check that does not exist.
    #[error("--replay {wanted}: expected one of {known}")]
    CheckUnknown {
        /// As given.
        wanted: String,
        /// All checks.
        known: String,
    },
    /// A seed that belongs to no case.
    #[error("--replay {wanted}: no form has a case with this seed; they are counted from --seed {from} on")]
    SeedUnknown {
        /// As given.
        wanted: String,
        /// The first.
        from: u64,
    },
    /// What a child is told cannot be written.
    #[error("a task cannot be written: {0}")]
    Task(#[from] serde_json::Error),
}

impl ConformError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            ConformError::File { .. } | ConformError::Place { .. } => "io",
            ConformError::FormUnknown { .. }
            | ConformError::CheckUnknown { .. }
            | ConformError::SeedUnknown { .. } => "usage",
            ConformError::Child { .. } | ConformError::Task(_) => "conform_child",
        }
    }
}

fn shown<S: serde::Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// Does all checks; `told` hears of each as it ends.
///
/// # Errors
/// [`ConformError`]; whatever the plugin does is in the report.
pub fn conform(options: &Options, told: &mut dyn FnMut(&Row)) -> Result<Report, ConformError> {
    if let Some((name, _)) = &options.replay {
        if !checks::ALL.iter().any(|c| c.name() == name) {
            let known: Vec<&str> = checks::ALL.iter().map(Check::name).collect();
            return Err(ConformError::CheckUnknown {
                wanted: name.clone(),
                known: known.join(", "),
            });
        }
    }
    let unfit = place::unfit(&options.plugin)?;
    let place = match unfit {
        Some(_) => None,
        None => Some(Place::of(&options.plugin)?),
    };
    let mut run = Run {
        options,
        place: place.as_ref(),
        unfit,
        met: Cell::new(None),
        told,
        report: Report {
            plugin: None,
            version: None,
            path: options.plugin.clone(),
            seed: options.seed,
            checks: Vec::new(),
        },
        described: None,
        faulty: Vec::new(),
    };
    run.all()?;
    run.seed_was_there()?;
    Ok(run.report)
}

struct Run<'a> {
    options: &'a Options,
    /// None when the file is no library at all.
    place: Option<&'a Place>,
    unfit: Option<Refusal>,
    /// Whether the case to be replayed was there; nothing before somebody could tell.
    met: Cell<Option<bool>>,
    told: &'a mut dyn FnMut(&Row),
    report: Report,
    described: Option<String>,
    /// Forms that a check of the whole library found fault with.
    faulty: Vec<(String, String)>,
}

impl Run<'_> {
    fn all(&mut self) -> Result<(), ConformError> {
        let mut loads = true;
        for check in checks::ALL {
            match check {
                Check::File { name, .. } => {
                    if self.wanted(name) {
                        let row = match &self.unfit {
                            Some(_) => self.skip(name, None, "the file is no library"),
                            None => self.child(name, None)?.0,
                        };
                        self.tell(row);
                    }
                }
                Check::Plugin { name, .. } if *name == checks::LOAD => {
                    let (row, done) = self.child(name, None)?;
                    loads = row.outcome == Outcome::Pass;
                    self.described = done.and_then(|d| d.described);
                    if self.wanted(name) || !loads {
                        self.tell(row);
                    }
                }
                Check::Plugin { name, .. } | Check::Scan { name, .. } => {
                    if !self.wanted(name) {
                        continue;
                    }
                    let row = match (loads, check) {
                        (false, _) => self.skip(name, None, "the library does not load"),
                        (true, Check::Scan { .. }) => self.scan_time(name)?,
                        (true, _) => {
                            let (row, done) = self.child(name, None)?;
                            self.faulty.extend(done.into_iter().flat_map(|d| d.forms));
                            row
                        }
                    };
                    self.tell(row);
                }
                Check::Form { .. } => {}
            }
        }
        let description: Option<Description> = self
            .described
            .as_deref()
            .and_then(|text| serde_json::from_str(text).ok());
        if let Some(description) = description {
            self.report.plugin = Some(description.id.clone());
            self.report.version = Some(description.version.clone());
            self.forms(&description)?;
        }
        Ok(())
    }

    fn forms(&mut self, description: &Description) -> Result<(), ConformError> {
        let wanted = |structure: &str, form: &str| {
            let mut asked = self.options.forms.iter();
            let named = |(s, f): &(String, Option<String>)| {
                s == structure && f.as_deref().is_none_or(|f| f == form)
            };
            self.options.forms.is_empty() || asked.any(named)
        };
        for (structure, form) in &self.options.forms {
            let here = |f: &structures_plugin_api::describe::FormDecl| {
                f.structure == *structure && form.as_ref().is_none_or(|name| *name == f.name)
            };
            if !description.forms.iter().any(here) {
                let declared = description.forms.iter();
                let declared: Vec<String> = declared
                    .map(|f| format!("{}/{}", f.structure, f.name))
                    .collect();
                return Err(ConformError::FormUnknown {
                    wanted: form
                        .as_ref()
                        .map_or(structure.clone(), |f| format!("{structure}/{f}")),
                    declared: declared.join(", "),
                });
            }
        }
        let chosen: Vec<(String, String)> = description
            .forms
            .iter()
            .filter(|f| wanted(&f.structure, &f.name))
            .map(|f| (f.structure.clone(), f.name.clone()))
            .collect();
        for form in chosen {
            let mut stopped: Option<String> = None;
            for check in checks::ALL {
                let Check::Form { name, .. } = check else {
                    continue;
                };
                let stands = *name == checks::LAUNCH;
                if !self.wanted(name) && !stands {
                    continue;
                }
                let faulty = self.faulty.contains(&form);
                let row = match &stopped {
                    _ if faulty => {
                        self.skip(name, Some(&form), "its declaration is at fault, see above")
                    }
                    None => self.child(name, Some(&form))?.0,
                    Some(why) => self.skip(name, Some(&form), why),
                };
                if stands && !faulty {
                    stopped = match row.outcome {
                        Outcome::Pass => None,
                        Outcome::Fail => Some("the form does not run at all".into()),
                        Outcome::Skip => Some("the form was not tried, see `launch`".into()),
                    };
                }
                if self.wanted(name) || row.outcome == Outcome::Fail {
                    self.tell(row);
                }
            }
        }
        Ok(())
    }

    fn wanted(&self, name: &str) -> bool {
        let replay = self.options.replay.as_ref();
        replay.is_none_or(|(wanted, _)| wanted == name)
    }

    fn tell(&mut self, row: Row) {
        (self.told)(&row);
        self.report.checks.push(row);
    }

    fn row(&self, name: &str, form: Option<&(String, String)>) -> Row {
        Row {
            name: name.into(),
            form: form.map(|(s, f)| format!("{s}/{f}")),
            outcome: Outcome::Pass,
            code: None,
            reason: None,
            replay: None,
            seconds: 0.0,
        }
    }

    fn skip(&self, name: &str, form: Option<&(String, String)>, why: &str) -> Row {
        Row {
            outcome: Outcome::Skip,
            reason: Some(why.into()),
            ..self.row(name, form)
        }
    }

    /// Runs one check in a child.
    fn child(
        &self,
        name: &str,
        form: Option<&(String, String)>,
    ) -> Result<(Row, Option<Done>), ConformError> {
        let Some(place) = self.place else {
            return Ok((self.no_library(name), None));
        };
        let seconds = self.options.timeout.as_secs().max(1);
        let run = format!("{}-{}", std::process::id(), random_word());
        let task = Task {
            check: name.into(),
            form: form.cloned(),
            plugins: place.plugins(),
            file: place.file.clone(),
            cache: place.cache(),
            catalog: self.options.catalog.iter().cloned().map(RawPath).collect(),
            seed: self.options.seed,
            cases: self.options.cases,
            only: self.options.replay.as_ref().map(|(_, seed)| *seed),
            threads: self.options.threads,
            seconds,
            described: self.described.clone(),
            nonce: random_word(),
        };
        let mut command = Command::new(&self.options.program);
        command.arg(SUBCOMMAND).arg(serde_json::to_string(&task)?);
        if name == checks::DESCRIBE {
            // Another surrounding than the one it was described in before, but for what the linker needs.
            let kept: Vec<_> = std::env::vars_os()
                .filter(|(key, _)| key.to_string_lossy().starts_with("LD_"))
                .collect();
            command.env_clear().envs(kept);
        }
        command.env(place::RUN, &run);
        let end = run_to_end(&mut command, self.options.timeout).map_err(|source| {
            ConformError::Child {
                program: self.options.program.display().to_string(),
                source,
            }
        })?;
        let left = end.left_processes.max(place::end_left(&run));
        let (at, done) = lines(&end, &task.nonce);
        let mut row = Row {
            seconds: end.wall.as_secs_f64(),
            ..self.row(name, form)
        };
        let fail = |row: &mut Row, code: &str, reason: String| {
            row.outcome = Outcome::Fail;
            row.code = Some(code.into());
            row.reason = Some(reason);
        };
        let whereabouts = at
            .as_ref()
            .map_or(String::new(), |(what, _)| format!(", at {what}"));
        let seed = match (&done, &end.signal, end.timed_out) {
            (Some(done), ..) => {
                match &done.code {
                    Some(code) => fail(&mut row, code, done.reason.clone().unwrap_or_default()),
                    None => {
                        if done.skipped {
                            row.outcome = Outcome::Skip;
                        }
                        row.reason.clone_from(&done.reason);
                    }
                }
                done.seed
            }
            (None, _, true) => {
                let text = format!("no end within {seconds} s, killed{whereabouts}");
                fail(&mut row, Code::TimedOut.name(), text);
                at.and_then(|(_, seed)| seed)
            }
            (None, Some((_, signal)), _) => {
                let text = format!(
                    "ended by {signal}{whereabouts}{}",
                    last_words(&end.messages)
                );
                fail(&mut row, Code::Crashed.name(), text);
                at.and_then(|(_, seed)| seed)
            }
            (None, None, false) => {
                let status = end.code.unwrap_or(-1);
                let words = last_words(&end.messages);
                let text = format!("left with exit status {status}{whereabouts}{words}");
                fail(&mut row, Code::Ended.name(), text);
                at.and_then(|(_, seed)| seed)
            }
        };
        if left > 0 && row.outcome != Outcome::Fail {
            let text = format!("{left} processes that the check began were still there at its end");
            fail(&mut row, Code::LeftProcesses.name(), text);
        }
        let replayed = self.options.replay.as_ref().is_some_and(|(n, _)| n == name);
        if let (true, Some(done)) = (replayed && checks::NUMBERED.contains(&name), &done) {
            let before = self.met.get().unwrap_or(false);
            self.met.set(Some(before || done.met));
        }
        if row.outcome == Outcome::Fail {
            row.replay = Some(self.replay(name, form, seed));
        }
        Ok((row, done))
    }

    /// The row of a file that is not opened, because it can be told without that it is no library.
    fn no_library(&self, name: &str) -> Row {
        let refusal = self.unfit.as_ref();
        Row {
            outcome: Outcome::Fail,
            code: refusal.map(|r| r.code.name().into()),
            reason: refusal.map(|r| r.reason.clone()),
            replay: Some(self.replay(name, None, None)),
            ..self.row(name, None)
        }
    }

    fn seed_was_there(&self) -> Result<(), ConformError> {
        match (&self.options.replay, self.met.get()) {
            (Some((name, seed)), Some(false)) if self.report.count(Outcome::Fail) == 0 => {
                Err(ConformError::SeedUnknown {
                    wanted: format!("{name}:{seed}"),
                    from: self.options.seed,
                })
            }
            _ => Ok(()),
        }
    }

    fn replay(&self, name: &str, form: Option<&(String, String)>, seed: Option<u64>) -> String {
        let form = form.map_or(String::new(), |(s, f)| format!(" --forms {s}/{f}"));
        let from = match self.options.seed {
            0 => String::new(),
            seed => format!(" --seed {seed}"),
        };
        format!(
            "structures conform {}{form}{from} --replay {name}:{}",
            self.options.plugin.display(),
            seed.unwrap_or(self.options.seed)
        )
    }

    fn scan_time(&self, name: &str) -> Result<Row, ConformError> {
        let mut row = self.row(name, None);
        let mut best: Option<Duration> = None;
        let Some(place) = self.place else {
            return Ok(self.no_library(name));
        };
        for _ in 0..SCANS {
            let mut command = Command::new(&self.options.program);
            command.arg(structures_loader::SUBCOMMAND).arg(&place.file);
            let end = run_to_end(&mut command, self.options.timeout).map_err(|source| {
                ConformError::Child {
                    program: self.options.program.display().to_string(),
                    source,
                }
            })?;
            row.seconds += end.wall.as_secs_f64();
            if end.code != Some(0) {
                let how = end.signal.map_or("in time".into(), |(_, signal)| signal);
                row.outcome = Outcome::Fail;
                row.code = Some(Code::SlowScan.name().into());
                row.reason = Some(format!(
                    "the scan of a fresh process did not end well: {how}"
                ));
                return Ok(row);
            }
            best = Some(best.map_or(end.wall, |b| b.min(end.wall)));
        }
        let best = best.unwrap_or_default();
        let text = format!(
            "{:.1} ms, the shortest of {SCANS}",
            best.as_secs_f64() * 1e3
        );
        row.reason = Some(match best > LONGEST_SCAN {
            true => format!("{text}; expected at most {} ms", LONGEST_SCAN.as_millis()),
            false => text,
        });
        if best > LONGEST_SCAN {
            row.outcome = Outcome::Fail;
            row.code = Some(Code::SlowScan.name().into());
            row.replay = Some(self.replay(name, None, None));
        }
        Ok(row)
    }
}

/// Where the child was last, and its end.
fn lines(end: &Ended, nonce: &str) -> (Option<(String, Option<u64>)>, Option<Done>) {
    let (mut place, mut done) = (None, None);
    for line in end.answer.split(|b| *b == b'\n') {
        match serde_json::from_slice(line) {
            Ok(Line::At { what, seed }) => place = Some((what, seed)),
            Ok(Line::Done(d)) if d.nonce == nonce => done = Some(d),
            // A library that found the pipe may write what it likes.
            Ok(Line::Done(_)) | Err(_) => {}
        }
    }
    (place, done)
}

/// A word that nobody can guess.
fn random_word() -> String {
    let word = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", word(), word())
}

fn last_words(messages: &[u8]) -> String {
    let text = String::from_utf8_lossy(messages);
    let words: Vec<&str> = text.split_whitespace().collect();
    let words = words.join(" ");
    if words.is_empty() {
        return String::new();
    }
    let count = words.chars().count();
    let last: String = words
        .chars()
        .skip(count.saturating_sub(LAST_WORDS))
        .collect();
    format!("; its last words: {last}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_counts_only_with_the_word_of_its_task() {
        let answer = |nonce: &str| {
            let done = Done {
                nonce: nonce.into(),
                ..Done::default()
            };
            serde_json::to_vec(&Line::Done(done)).unwrap()
        };
        let ended = |answer| Ended {
            code: Some(0),
            signal: None,
            timed_out: false,
            answer,
            messages: Vec::new(),
            wall: Duration::ZERO,
            left_processes: 0,
        };
        let word = random_word();
        assert_ne!(word, random_word());
        assert!(lines(&ended(answer(&word)), &word).1.is_some());
        for forged in ["", "00"] {
            assert!(lines(&ended(answer(forged)), &word).1.is_none());
        }
    }

    #[test]
    fn last_words_are_short_and_in_one_line() {
        assert_eq!(last_words(b""), "");
        assert_eq!(last_words(b"a\n\n b "), "; its last words: a b");
        let long = last_words("\u{e9}x ".repeat(1000).as_bytes());
        assert!(long.chars().count() <= LAST_WORDS + 20);
    }
}
