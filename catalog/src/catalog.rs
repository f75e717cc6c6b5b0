//! The set of entries, keyed by (name, version).

use std::collections::BTreeMap;
use std::path::Path;

use crate::document::{self, Document};
use crate::error::{CatalogError, Place};
use crate::reference::ReferenceFn;
use crate::spec::Spec;
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
            catalog.retire(name, file, text)?;
        }
        for e in builtin::ENTRIES {
            catalog.add(e.stored, e.file, e.text, e.reference, &Limit::default())?;
        }
        Ok(catalog)
    }

    /// Adds the entries of a directory, `<name>/structure.yaml`, `<name>/v<k>/structure.yaml` and
    /// `<name>/retired.yaml`. They have no native reference. A name that is there already needs a higher version.
    pub fn with_dir(mut self, dir: &Path) -> Result<Catalog, CatalogError> {
        let taken: BTreeMap<String, u32> = self
            .entries
            .keys()
            .chain(self.retired.keys())
            .map(|name| (name.clone(), self.highest(name)))
            .collect();
        for entry in sub_directories(dir)? {
            let stored = file_name(&entry);
            let mut files = vec![(entry.join("structure.yaml"), None)];
            for below in sub_directories(&entry)? {
                let name = file_name(&below);
                if let Some(k) = name.strip_prefix('v').and_then(|v| v.parse::<u32>().ok()) {
                    files.push((below.join("structure.yaml"), Some(k)));
                }
            }
            let limit = |version| Limit {
                version,
                above: taken.get(&stored).copied().unwrap_or(0),
            };
            for (file, version) in files.iter().filter(|(f, _)| f.is_file()) {
                let text = document::read(file)?;
                self.add(
                    &stored,
                    &file.display().to_string(),
                    &text,
                    None,
                    &limit(*version),
                )?;
            }
            let notes = entry.join("retired.yaml");
            if notes.is_file() {
                let text = document::read(&notes)?;
                self.retire(&stored, &notes.display().to_string(), &text)?;
            }
        }
        Ok(self)
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
            version: None,
            above: self.highest(stored),
        };
        self.add(stored, file, text, None, &limit)?;
        Ok(self)
    }

    fn add(
        &mut self,
        stored: &str,
        file: &str,
        text: &str,
        reference: Option<ReferenceFn>,
        limit: &Limit,
    ) -> Result<(), CatalogError> {
        let mut spec = parse::spec(file, text)?;
        spec.reference = reference;
        let place = |key: &str| -> Result<Place, CatalogError> {
            Ok(Document::parse(file, text)?.root().find(&[key]).place())
        };
        if spec.name != stored {
            return Err(CatalogError::NameMismatch {
                at: place("name")?,
                stored: stored.into(),
                declared: spec.name,
            });
        }
        let invalid = |what: String| -> CatalogError {
            match place("version") {
                Ok(at) => CatalogError::Invalid {
                    at,
                    path: "version".into(),
                    what,
                },
                Err(e) => e,
            }
        };
        let version = spec.version;
        if let Some(k) = limit.version.filter(|k| *k != version) {
            return Err(invalid(format!(
                "stored under v{k}, found version {version}"
            )));
        }
        if version <= limit.above {
            return Err(invalid(format!(
                "`{stored}` exists up to version {}; a version above it is needed, found {version}",
                limit.above
            )));
        }
        if self
            .retired
            .get(stored)
            .is_some_and(|r| r.contains_key(&version))
        {
            return Err(invalid(format!(
                "version {version} of `{stored}` is retired"
            )));
        }
        let versions = self.entries.entry(stored.into()).or_default();
        if versions.contains_key(&version) {
            return Err(invalid(format!(
                "version {version} of `{stored}` is there twice"
            )));
        }
        versions.insert(version, spec);
        Ok(())
    }

    fn retire(&mut self, name: &str, file: &str, text: &str) -> Result<(), CatalogError> {
        let doc = Document::parse(file, text)?;
        for n in doc.root().items()? {
            let f = n.fields(&["version", "note"])?;
            let version = f.need("version")?;
            let number =
                u32::try_from(version.count()?).map_err(|_| version.invalid("out of range"))?;
            let note = f.need("note")?.text()?.trim().to_string();
            if note.is_empty() {
                return Err(n.invalid("a retired version needs a migration note"));
            }
            let notes = self.retired.entry(name.into()).or_default();
            notes.insert(number, note);
        }
        Ok(())
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
