//! Recorded decisions: which form won where, on which device, so that nobody has to race them again.
//!
//! One JSON file a user, transportable: what was recorded on another device is kept and never matches here. A
//! decision orders forms; it never skips a gate, and one that names what is not there falls through with a reason.
//! A file that cannot be read counts as empty, which a caller is told ([`Store::warning`]).
//!
//! Key: device name, structure, band of rows. `host` is a winner like any other: the seams stay with the host.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::choose::{Choice, Pin};
use crate::error::Error;
use crate::fsio::{read_text, write_atomic};

/// Value of `schema`.
pub const SCHEMA: u32 = 1;
/// The winner that leaves seams with the host.
pub const HOST: &str = "host";

/// One decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    /// Name of the device it was made on.
    pub device: String,
    /// Structure.
    pub structure: String,
    /// Smallest and largest number of rows it is about.
    pub rows: [u64; 2],
    /// `PLUGIN:FORM`, or `host`.
    pub winner: String,
    /// Median milliseconds of every candidate that was timed; empty when a person decided.
    #[serde(default)]
    pub times_ms: BTreeMap<String, f64>,
}

impl Decision {
    fn same_place(&self, other: &Decision) -> bool {
        self.device == other.device && self.structure == other.structure && self.rows == other.rows
    }

    /// Its key for people.
    pub fn band(&self) -> String {
        match self.rows {
            [lo, hi] if lo == hi => format!("{lo}"),
            [lo, hi] => format!("{lo}..={hi}"),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Document {
    schema: u32,
    decisions: Vec<Decision>,
}

/// What an import did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Imported {
    /// New keys.
    pub imported: usize,
    /// Keys that were here already, with another winner or not: the local one stays.
    pub kept_local: usize,
    /// Keys that the imported file has more than once; its last decision of each counts.
    pub repeated: usize,
    /// The new ones, as `DEVICE STRUCTURE ROWS`.
    pub names: Vec<String>,
}

/// The decisions of one file.
#[derive(Clone, Debug, Default)]
pub struct Store {
    path: Option<PathBuf>,
    entries: Vec<Decision>,
    warning: Option<String>,
}

/// Where the decision of a structure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The caller pinned it.
    Pin,
    /// A recorded decision.
    Cache,
    /// Declared priority.
    Default,
}

/// How the first form to be tried for a structure was found: a receipt's trail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resolved {
    /// Structure.
    pub structure: String,
    /// Rows it was resolved for.
    pub rows: u64,
    /// `PLUGIN:FORM`, `host`, or nothing when no form is there.
    pub winner: Option<String>,
    /// Who named it.
    pub source: Source,
    /// What was named and is not available, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fell_through: Vec<FellThrough>,
}

/// A name that led nowhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FellThrough {
    /// Who named it.
    pub source: Source,
    /// `PLUGIN:FORM`.
    pub candidate: String,
    /// `unknown_candidate`, or what it misses.
    pub reason: String,
}

impl Store {
    /// No file: nothing is recorded, nothing can be.
    pub fn none() -> Self {
        Self::default()
    }

    /// Reads a file. One that is not there is empty; one that cannot be read is empty with a [`Store::warning`].
    pub fn open(path: &Path) -> Self {
        let (entries, warning) = match read(path) {
            Ok(entries) => (entries, None),
            Err(why) => {
                let text = format!(
                    "decisions {}: {why}; taken as empty, and nothing is written over it",
                    path.display()
                );
                (Vec::new(), Some(text))
            }
        };
        Store {
            path: Some(path.to_path_buf()),
            entries,
            warning,
        }
    }

    /// Why the file counts as empty, if it does.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Every decision, foreign devices included, by key.
    pub fn entries(&self) -> &[Decision] {
        &self.entries
    }

    /// The decision for this device, structure and number of rows: the narrowest band that holds them.
    pub fn lookup(&self, device: &str, structure: &str, rows: u64) -> Option<&Decision> {
        self.entries
            .iter()
            .filter(|d| d.device == device && d.structure == structure)
            .filter(|d| (d.rows[0]..=d.rows[1]).contains(&rows))
            .min_by_key(|d| (d.rows[1] - d.rows[0], d.rows[0]))
    }

    /// Records one, in place of what stood at the same key.
    ///
    /// # Errors
    /// There is no file, it cannot be read, or it cannot be written.
    pub fn record(&mut self, decision: Decision) -> Result<(), Error> {
        check(&decision).map_err(|what| Error::invalid("decision_invalid", what))?;
        self.change(|entries| {
            entries.retain(|d| !d.same_place(&decision));
            entries.push(decision);
        })
    }

    /// Takes over what is not decided here yet; the local entry wins.
    ///
    /// # Errors
    /// Either file cannot be read, or this one cannot be written. Nothing is changed then.
    pub fn import(&mut self, from: &Path) -> Result<Imported, Error> {
        let mut foreign = fs::metadata(from)
            .map_err(|e| Unread::Io(e.to_string()))
            .and_then(|_| read(from))
            .map_err(|why| why.error(from, "no decisions to import: ", ""))?;
        let mut done = Imported::default();
        let all = foreign.len();
        let mut last: Vec<Decision> = Vec::with_capacity(all);
        for decision in foreign.drain(..).rev() {
            if !last.iter().any(|d| d.same_place(&decision)) {
                last.push(decision);
            }
        }
        last.reverse();
        done.repeated = all - last.len();
        self.change(|entries| {
            for decision in last {
                if entries.iter().any(|d| d.same_place(&decision)) {
                    done.kept_local += 1;
                    continue;
                }
                done.imported += 1;
                let (device, band) = (&decision.device, decision.band());
                done.names
                    .push(format!("{device} {} {band}", decision.structure));
                entries.push(decision);
            }
        })?;
        Ok(done)
    }

    /// Reads again under a lock, changes, writes by rename: two writers lose nothing.
    fn change(&mut self, edit: impl FnOnce(&mut Vec<Decision>)) -> Result<(), Error> {
        let Some(path) = self.path.as_deref().map(behind_links) else {
            return Err(Error::invalid(
                "decisions_nowhere",
                "there is no decisions file to write to; name one",
            ));
        };
        let io = |reason: String| Error::Io {
            path: path.display().to_string(),
            reason,
        };
        let _guard = lock_beside(&path).map_err(|e| io(format!("cannot be locked: {e}")))?;
        let mut entries =
            read(&path).map_err(|why| why.error(&path, "", "; move it away to start anew"))?;
        edit(&mut entries);
        entries.sort_by(|a, b| {
            (&a.device, &a.structure, a.rows).cmp(&(&b.device, &b.structure, b.rows))
        });
        let document = Document {
            schema: SCHEMA,
            decisions: entries,
        };
        let text = serde_json::to_string_pretty(&document)
            .map_err(|e| io(format!("does not serialise: {e}")))?;
        write_atomic(&path, text.as_bytes())?;
        self.entries = document.decisions;
        self.warning = None;
        Ok(())
    }

    /// Resolves a structure at a number of rows among the forms that are there: pin, then recorded decision, then
    /// the order of declaration. `qualifies` says what a form misses at the seams, and `None` when it misses nothing.
    pub fn resolve(
        &self,
        device: &str,
        structure: &str,
        rows: u64,
        ordered: &[Choice<'_>],
        pins: &[Pin],
        qualifies: &dyn Fn(&Choice<'_>) -> Option<String>,
    ) -> Resolved {
        let name = |c: &Choice<'_>| format!("{}:{}", c.plugin, c.form.name);
        let mut fell_through = Vec::new();
        let mut available = |candidate: &str, source: Source| -> bool {
            let misses = match ordered.iter().find(|c| name(c) == candidate) {
                None => Some("unknown_candidate".to_string()),
                Some(choice) => qualifies(choice),
            };
            let Some(reason) = misses else { return true };
            fell_through.push(FellThrough {
                source,
                candidate: candidate.into(),
                reason,
            });
            false
        };
        let resolved = |winner, source| Resolved {
            structure: structure.into(),
            rows,
            winner,
            source,
            fell_through: Vec::new(),
        };
        // `ordered` holds nothing but pinned forms where there is a pin.
        let pinned = pins.iter().any(|p| p.structure == structure);
        let mut found = None;
        if pinned {
            let winner = ordered
                .iter()
                .map(name)
                .find(|candidate| available(candidate, Source::Pin));
            found = winner.map(|w| resolved(Some(w), Source::Pin));
        } else if let Some(decision) = self.lookup(device, structure, rows) {
            if decision.winner == HOST || available(&decision.winner, Source::Cache) {
                found = Some(resolved(Some(decision.winner.clone()), Source::Cache));
            }
        }
        let mut found = found.unwrap_or_else(|| {
            let first = ordered.iter().find(|c| qualifies(c).is_none()).map(name);
            resolved(first, Source::Default)
        });
        found.fell_through = fell_through;
        found
    }
}

/// What makes a decision unusable.
fn check(d: &Decision) -> Result<(), String> {
    if d.device.is_empty() || d.structure.is_empty() {
        return Err("a decision names a device and a structure".into());
    }
    if d.rows[0] == 0 || d.rows[0] > d.rows[1] {
        return Err(format!(
            "rows {:?} of `{}`: expected 1 or more, the smaller first",
            d.rows, d.structure
        ));
    }
    let form = d.winner.split_once(':');
    if d.winner != HOST && !form.is_some_and(|(p, f)| !p.is_empty() && !f.is_empty()) {
        return Err(format!(
            "winner `{}` of `{}`: expected PLUGIN:FORM or `{HOST}`",
            d.winner, d.structure
        ));
    }
    Ok(())
}

/// Why a file gives no decisions.
enum Unread {
    /// The file.
    Io(String),
    /// What stands in it.
    Content(String),
}

impl Unread {
    fn error(self, path: &Path, before: &str, after: &str) -> Error {
        match self {
            Unread::Io(why) => Error::Io {
                path: path.display().to_string(),
                reason: format!("{before}{why}{after}"),
            },
            Unread::Content(why) => Error::invalid(
                "decisions_invalid",
                format!("{}: {before}{why}{after}", path.display()),
            ),
        }
    }
}

impl std::fmt::Display for Unread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Unread::Io(why) | Unread::Content(why)) = self;
        f.write_str(why)
    }
}

fn read(path: &Path) -> Result<Vec<Decision>, Unread> {
    let text = match read_text(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
            return Err(Unread::Content(format!("not a file of decisions: {e}")));
        }
        Err(e) => return Err(Unread::Io(format!("cannot be read: {e}"))),
    };
    let document: Document = serde_json::from_str(&text)
        .map_err(|e| Unread::Content(format!("not a file of decisions: {e}")))?;
    if document.schema != SCHEMA {
        let found = document.schema;
        let why = format!("expected schema {SCHEMA}, found {found}");
        return Err(Unread::Content(why));
    }
    let checked = document.decisions.iter().try_for_each(check);
    checked.map_err(Unread::Content)?;
    Ok(document.decisions)
}

/// The file itself: whoever comes by a link locks and replaces the same file as whoever does not.
fn behind_links(path: &Path) -> PathBuf {
    if let Ok(file) = path.canonicalize() {
        return file;
    }
    // Not there yet, or a link to what is not there yet.
    match fs::read_link(path) {
        Ok(target) => path.parent().unwrap_or(Path::new("")).join(target),
        Err(_) => path.to_path_buf(),
    }
}

/// An exclusive lock on a file beside the store, held until dropped.
fn lock_beside(path: &Path) -> std::io::Result<File> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".lock");
    let lock = path.with_file_name(name);
    if let Some(dir) = lock.parent().filter(|d| !d.as_os_str().is_empty()) {
        fs::create_dir_all(dir)?;
    }
    // Opened, never replaced: a lock file that is another file the next time locks nothing.
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&lock)?;
    file.lock()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use structures_plugin_api::describe::FormDecl;

    use super::*;

    fn decision(device: &str, rows: [u64; 2], winner: &str) -> Decision {
        Decision {
            device: device.into(),
            structure: "s".into(),
            rows,
            winner: winner.into(),
            times_ms: BTreeMap::from([(winner.to_string(), 1.5)]),
        }
    }

    fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("deep/decisions.json"));
        (dir, store)
    }

    #[test]
    fn b_330_an_unreadable_file_is_empty_said_and_never_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.json");
        for text in ["{", "[]", r#"{"schema": 9, "decisions": []}"#, "\u{0}"] {
            fs::write(&path, text).unwrap();
            let mut store = Store::open(&path);
            assert!(store.entries().is_empty());
            assert!(store.warning().unwrap().contains("d.json"), "{text}");
            assert!(store.record(decision("cpu", [1, 1], "p:f")).is_err());
            assert_eq!(fs::read_to_string(&path).unwrap(), text, "kept as it was");
        }
        assert!(Store::open(&dir.path().join("absent")).warning().is_none());
    }

    #[test]
    fn b_331_the_last_write_wins_and_other_devices_never_match() {
        let (_dir, mut store) = store();
        store.record(decision("cpu", [1, 1], "p:f")).unwrap();
        store.record(decision("cpu", [1, 1], "q:g")).unwrap();
        store.record(decision("other", [1, 64], "r:h")).unwrap();
        assert_eq!(store.entries().len(), 2);
        let again = Store::open(store.path.as_ref().unwrap());
        assert_eq!(again.lookup("cpu", "s", 1).unwrap().winner, "q:g");
        assert!(again.lookup("cpu", "s", 2).is_none());
        assert!(again.lookup("cpu", "t", 1).is_none());
        assert!(again.lookup("third", "s", 1).is_none());
    }

    #[test]
    fn b_331_the_narrowest_band_decides() {
        let (_dir, mut store) = store();
        store.record(decision("cpu", [1, 512], "wide:f")).unwrap();
        store.record(decision("cpu", [1, 16], "narrow:f")).unwrap();
        let at = |rows| store.lookup("cpu", "s", rows).unwrap().winner.clone();
        assert_eq!(
            (at(8), at(16), at(17)),
            ("narrow:f".into(), "narrow:f".into(), "wide:f".into())
        );
    }

    #[test]
    fn b_332_an_import_is_a_union_in_which_local_entries_win() {
        let (_dir, mut local) = store();
        let (_other_dir, mut other) = store();
        local.record(decision("cpu", [1, 1], "mine:f")).unwrap();
        other.record(decision("cpu", [1, 1], "theirs:f")).unwrap();
        other.record(decision("gpu", [1, 8], "theirs:g")).unwrap();
        let done = local.import(other.path.as_ref().unwrap()).unwrap();
        assert_eq!((done.imported, done.kept_local), (1, 1));
        assert_eq!(done.names, ["gpu s 1..=8"]);
        assert_eq!(local.lookup("cpu", "s", 1).unwrap().winner, "mine:f");
        assert!(
            local.lookup("gpu", "s", 3).is_some(),
            "kept, inert elsewhere"
        );
        let again = local.import(other.path.as_ref().unwrap()).unwrap();
        assert_eq!((again.imported, again.kept_local), (0, 2));
        assert!(local.import(Path::new("/no/such/file")).is_err());
    }

    #[test]
    fn a_key_that_an_imported_file_has_twice_is_counted_as_that() {
        let (dir, mut local) = store();
        let twice = Document {
            schema: SCHEMA,
            decisions: vec![
                decision("cpu", [1, 1], "first:f"),
                decision("cpu", [1, 1], "last:f"),
            ],
        };
        let path = dir.path().join("twice.json");
        fs::write(&path, serde_json::to_string(&twice).unwrap()).unwrap();
        let done = local.import(&path).unwrap();
        assert_eq!((done.imported, done.kept_local, done.repeated), (1, 0, 1));
        assert_eq!(local.lookup("cpu", "s", 1).unwrap().winner, "last:f");
    }

    #[test]
    fn a_link_leads_to_the_one_file_and_its_one_lock() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real.json"), dir.path().join("link.json"));
        std::os::unix::fs::symlink("real.json", &link).unwrap();
        for (i, path) in [&link, &real, &link].into_iter().enumerate() {
            let rows = [i as u64 + 1, i as u64 + 1];
            let mut store = Store::open(path);
            store.record(decision("cpu", rows, "p:f")).unwrap();
        }
        assert!(link.is_symlink() && !real.is_symlink());
        assert_eq!(Store::open(&real).entries().len(), 3);
        assert!(!dir.path().join("link.json.lock").exists());
    }

    #[test]
    fn b_330_writers_at_once_lose_nothing() {
        let (_dir, store) = store();
        let path = store.path.clone().unwrap();
        std::thread::scope(|scope| {
            for i in 1..=8 {
                let path = &path;
                scope.spawn(move || {
                    let mut mine = Store::open(path);
                    mine.record(decision("cpu", [i, i], "p:f")).unwrap();
                });
            }
        });
        assert_eq!(Store::open(&path).entries().len(), 8);
    }

    #[test]
    fn decisions_that_say_nothing_are_refused() {
        let (_dir, mut store) = store();
        for bad in [
            decision("", [1, 1], "p:f"),
            decision("cpu", [0, 1], "p:f"),
            decision("cpu", [2, 1], "p:f"),
            decision("cpu", [1, 1], "p"),
            decision("cpu", [1, 1], ":f"),
        ] {
            assert_eq!(store.record(bad).unwrap_err().code(), "decision_invalid");
        }
        assert!(!store.path.unwrap().exists(), "nothing was written");
    }

    #[test]
    fn b_333_b_334_pin_then_record_then_default_and_what_fell_through() {
        let (f, g) = (FormDecl::new("s", "f", "q"), FormDecl::new("s", "g", "q"));
        let choice = |plugin, form| Choice {
            plugin,
            reference: false,
            form,
            device: 0,
        };
        let ordered = [choice("a", &f), choice("b", &g)];
        let (_dir, mut store) = store();
        let fine = |_: &Choice<'_>| None;
        let get = |store: &Store,
                   ordered: &[Choice<'_>],
                   pins: &[Pin],
                   misses: &dyn Fn(&Choice<'_>) -> Option<String>| {
            store.resolve("cpu", "s", 1, ordered, pins, misses)
        };
        let by_default = get(&store, &ordered, &[], &fine);
        assert_eq!(
            (by_default.winner.as_deref(), by_default.source),
            (Some("a:f"), Source::Default)
        );

        store.record(decision("cpu", [1, 4], "b:g")).unwrap();
        let recorded = get(&store, &ordered, &[], &fine);
        assert_eq!(
            (recorded.winner.as_deref(), recorded.source),
            (Some("b:g"), Source::Cache)
        );

        let pins = [Pin::parse("s=a").unwrap()];
        let pinned = get(&store, &ordered[..1], &pins, &fine);
        assert_eq!(
            (pinned.winner.as_deref(), pinned.source),
            (Some("a:f"), Source::Pin)
        );

        // The recorded form misses something: the next source is asked, and the reason stays.
        let misses = |c: &Choice<'_>| (c.plugin == "b").then(|| "form_band: 1 row".to_string());
        let fell = get(&store, &ordered, &[], &misses);
        assert_eq!(
            (fell.winner.as_deref(), fell.source),
            (Some("a:f"), Source::Default)
        );
        assert_eq!(fell.fell_through[0].reason, "form_band: 1 row");

        store.record(decision("cpu", [1, 4], "gone:h")).unwrap();
        let unknown = get(&store, &ordered, &[], &fine);
        assert_eq!(unknown.source, Source::Default);
        assert_eq!(unknown.fell_through[0].candidate, "gone:h");
        assert_eq!(unknown.fell_through[0].reason, "unknown_candidate");

        store.record(decision("cpu", [1, 4], HOST)).unwrap();
        let host = get(&store, &ordered, &[], &fine);
        assert_eq!(
            (host.winner.as_deref(), host.source),
            (Some(HOST), Source::Cache)
        );
    }
}
