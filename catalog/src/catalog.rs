//! The set of entries, keyed by (name, version).

use std::collections::BTreeMap;
use std::path::Path;

use crate::document::{self, Document};
use crate::error::CatalogError;
use crate::spec::{Kind, Spec};
use crate::{builtin, names, parse};

/// Every structure this process knows.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    entries: BTreeMap<String, BTreeMap<u32, Spec>>,
    retired: BTreeMap<String, BTreeMap<u32, String>>,
}

impl Catalog {
    /// The entries that ship with this crate.
    pub fn builtin() -> Result<Catalog, CatalogError> {
        let mut catalog = Catalog::default();
        for (name, file, text) in builtin::RETIRED {
            catalog.retire(name, file, text, &Limit::default())?;
        }
        for e in builtin::ENTRIES {
            let added = catalog.add(e.stored, e.file, e.text, &Limit::default())?;
            added.reference = e.reference;
            added.builtin = true;
        }
        catalog.check_embedded()?;
        Ok(catalog)
    }

    /// Adds the entries of a directory, `<name>/structure.yaml`, `<name>/v<k>/structure.yaml` and
    /// `<name>/retired.yaml`. They have no native reference. A name that is there already needs a higher version.
    pub fn with_dir(mut self, dir: &Path) -> Result<Catalog, CatalogError> {
        match self.take_dir(dir, false)?.into_iter().next() {
            Some(bad) => Err(bad),
            None => Ok(self),
        }
    }

    /// The same for a check of the whole directory: what is good is added, everything else is told. An exact copy of
    /// an entry that is there already is that entry.
    pub fn with_good_of(
        mut self,
        dir: &Path,
    ) -> Result<(Catalog, Vec<CatalogError>), CatalogError> {
        let bad = self.take_dir(dir, true)?;
        Ok((self, bad))
    }

    fn take_dir(&mut self, dir: &Path, copies: bool) -> Result<Vec<CatalogError>, CatalogError> {
        let taken: BTreeMap<String, u32> = self
            .entries
            .keys()
            .chain(self.retired.keys())
            .map(|name| (name.clone(), self.highest(name)))
            .collect();
        let mut bad = Vec::new();
        let mut found = false;
        for entry in sub_directories(dir)? {
            let stored = file_name(&entry);
            let mut files = vec![(entry.join("structure.yaml"), None)];
            match sub_directories(&entry) {
                Err(e) => bad.push(e),
                Ok(below) => files.extend(below.iter().filter_map(|below| {
                    let k = file_name(below).strip_prefix('v')?.parse::<u32>().ok()?;
                    Some((below.join("structure.yaml"), Some(k)))
                })),
            }
            let limit = |version| Limit {
                version,
                above: taken.get(&stored).copied().unwrap_or(0),
                copies,
            };
            let notes = entry.join("retired.yaml");
            found |= notes.exists() || files.iter().any(|(f, _)| f.exists());
            if notes.exists() {
                let shown = notes.display().to_string();
                let one = document::read(&notes)
                    .and_then(|text| self.retire(&stored, &shown, &text, &limit(None)));
                bad.extend(one.err());
            }
            for (file, version) in files.iter().filter(|(f, _)| f.exists()) {
                let shown = file.display().to_string();
                let one = document::read(file)
                    .and_then(|text| self.add(&stored, &shown, &text, &limit(*version)).map(drop));
                bad.extend(one.err());
            }
        }
        if copies && !found {
            bad.push(CatalogError::Io {
                path: dir.display().to_string(),
                reason: "no entry here, expected <name>/structure.yaml below it".into(),
            });
        }
        // A check of the directory tells this of every pipeline.
        if !copies && bad.is_empty() {
            bad.extend(self.check_embedded().err());
        }
        Ok(bad)
    }

    // Every region a pipeline embeds is a live region.
    fn check_embedded(&self) -> Result<(), CatalogError> {
        for spec in self.list() {
            self.check_embedded_of(spec)?;
        }
        Ok(())
    }

    pub(crate) fn check_embedded_of(&self, spec: &Spec) -> Result<(), CatalogError> {
        for (i, name) in spec.embedded().iter().enumerate() {
            let what = match self.get(name) {
                Ok(found) if found.kind == Kind::Region => continue,
                Ok(_) => format!("`{name}` is a stage pipeline, expected a region"),
                Err(e) => format!("`{name}` is no region of the catalog: {e}"),
            };
            let doc = Document::parse(&spec.file, &spec.document)?;
            let at = doc.root().find(&["embedded_regions", &format!("[{i}]")]);
            return Err(at.invalid(what));
        }
        Ok(())
    }

    fn highest(&self, name: &str) -> u32 {
        let live = self.entries.get(name).and_then(|v| v.keys().next_back());
        let retired = self.retired.get(name).and_then(|v| v.keys().next_back());
        live.max(retired).copied().unwrap_or(0)
    }

    /// Adds one document as if it stood under `<stored>/`. For tests and tools.
    pub fn with_document(
        mut self,
        stored: &str,
        file: &str,
        text: &str,
    ) -> Result<Self, CatalogError> {
        let limit = Limit {
            above: self.highest(stored),
            ..Limit::default()
        };
        self.add(stored, file, text, &limit)?;
        self.check_embedded()?;
        Ok(self)
    }

    fn add(
        &mut self,
        stored: &str,
        file: &str,
        text: &str,
        limit: &Limit,
    ) -> Result<&mut Spec, CatalogError> {
        let doc = Document::parse(file, text)?;
        let spec = parse::spec(&doc)?;
        let at = |key: &str| doc.root().find(&[key]);
        if spec.name != stored {
            return Err(CatalogError::NameMismatch {
                at: at("name").place(),
                stored: stored.into(),
                declared: spec.name,
            });
        }
        let version = spec.version;
        if let Some(k) = limit.version.filter(|k| *k != version) {
            let what = format!("stored under v{k}, found version {version}");
            return Err(at("version").invalid(what));
        }
        let known = self.entries.get(stored).and_then(|v| v.get(&version));
        let copy = limit.copies && known.is_some_and(|k| k.digest == spec.digest);
        if version <= limit.above && !copy {
            return Err(at("version").invalid(format!(
                "`{stored}` exists up to version {}; a version above it is needed, found {version}",
                limit.above
            )));
        }
        if known.is_some() && !copy {
            let what = format!("version {version} of `{stored}` is there twice");
            return Err(at("version").invalid(what));
        }
        let gone = self.retired.get(stored);
        if gone.is_some_and(|r| r.contains_key(&version)) {
            let what = format!("version {version} of `{stored}` is retired");
            return Err(at("version").invalid(what));
        }
        let versions = self.entries.entry(stored.into()).or_default();
        Ok(versions.entry(version).or_insert(spec))
    }

    fn retire(
        &mut self,
        name: &str,
        file: &str,
        text: &str,
        limit: &Limit,
    ) -> Result<(), CatalogError> {
        let doc = Document::parse(file, text)?;
        for n in doc.root().items()? {
            let f = n.fields(&["version", "note"])?;
            let at = f.need("version")?;
            let version = u32::try_from(at.count()?).unwrap_or(0);
            if version == 0 {
                return Err(at.invalid("a version is a whole number from 1"));
            }
            let note = f.need("note")?.text()?.trim().to_string();
            if note.is_empty() {
                return Err(n.invalid("a retired version needs a migration note"));
            }
            let known = self.retired.get(name).and_then(|r| r.get(&version));
            if limit.copies && known == Some(&note) {
                continue;
            }
            if known.is_some() {
                return Err(at.invalid(format!("version {version} of `{name}` is retired twice")));
            }
            if version <= limit.above {
                return Err(at.invalid(format!(
                    "versions of `{name}` up to {} belong to somebody else; only they retire one",
                    limit.above
                )));
            }
            let live = self.entries.get(name);
            if live.is_some_and(|v| v.contains_key(&version)) {
                return Err(at.invalid(format!("version {version} of `{name}` is live too")));
            }
            let notes = self.retired.entry(name.into()).or_default();
            notes.insert(version, note);
        }
        Ok(())
    }

    /// Versions that are no more, with their migration notes.
    pub fn retired(&self) -> impl Iterator<Item = (&str, u32, &str)> {
        let all = self.retired.iter();
        all.flat_map(|(name, notes)| {
            let each = notes.iter();
            each.map(move |(version, note)| (name.as_str(), *version, note.as_str()))
        })
    }

    /// What a pin means: `name` is the newest live version, `name@2` (or `name@v2`) that one.
    pub fn find(&self, pin: &str) -> Result<&Spec, CatalogError> {
        let Some((name, version)) = pin.split_once('@') else {
            return self.get(pin);
        };
        match version.strip_prefix('v').unwrap_or(version).parse::<u32>() {
            Ok(version) => self.get_version(name, version),
            Err(_) => Err(CatalogError::Pin {
                pin: pin.into(),
                found: version.into(),
            }),
        }
    }

    /// Names of all structures with a live document, sorted.
    pub fn names(&self) -> Vec<&str> {
        self.entries.keys().map(String::as_str).collect()
    }

    /// Every live entry, by name and version.
    pub fn list(&self) -> Vec<&Spec> {
        self.entries.values().flat_map(BTreeMap::values).collect()
    }

    /// The newest version of every structure, by name: what discovery walks.
    pub fn newest(&self) -> Vec<&Spec> {
        let newest = self.entries.values().filter_map(|v| v.values().next_back());
        newest.collect()
    }

    /// The newest live version.
    pub fn get(&self, name: &str) -> Result<&Spec, CatalogError> {
        let live = self.entries.get(name).and_then(|v| v.values().next_back());
        live.ok_or_else(|| self.unknown(name, None))
    }

    /// One version.
    pub fn get_version(&self, name: &str, version: u32) -> Result<&Spec, CatalogError> {
        let live = self.entries.get(name).and_then(|v| v.get(&version));
        live.ok_or_else(|| self.unknown(name, Some(version)))
    }

    fn unknown(&self, name: &str, version: Option<u32>) -> CatalogError {
        let retired = self.retired.get(name).and_then(|notes| match version {
            Some(v) => notes.get_key_value(&v),
            None => notes.iter().next_back(),
        });
        if let Some((version, note)) = retired {
            return CatalogError::Retired {
                name: name.into(),
                version: *version,
                note: note.clone(),
            };
        }
        let (name, nearest) = match (version, self.entries.get(name)) {
            (Some(v), Some(live)) => (
                format!("{name}@{v}"),
                live.keys().map(|k| format!("{name}@{k}")).collect(),
            ),
            (v, _) => (
                v.map_or(name.to_string(), |v| format!("{name}@{v}")),
                names::nearest(name, self.entries.keys().map(String::as_str)),
            ),
        };
        CatalogError::Unknown { name, nearest }
    }
}

#[derive(Default)]
struct Limit {
    // The version the directory stands for.
    version: Option<u32>,
    // Versions up to this one belong to somebody else.
    above: u32,
    // An exact copy of what is there is no second entry.
    copies: bool,
}

fn sub_directories(dir: &Path) -> Result<Vec<std::path::PathBuf>, CatalogError> {
    let io = |e: std::io::Error| CatalogError::Io {
        path: dir.display().to_string(),
        reason: e.to_string(),
    };
    let mut dirs = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.is_dir() {
            dirs.push(path);
        }
    }
    dirs.sort();
    Ok(dirs)
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into()
}
