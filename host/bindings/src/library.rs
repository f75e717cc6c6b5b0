//! All bindings of a process: the built-in ones and those of the user's directories.
//!
//! Names are taken once, whatever kind a binding is and wherever it stands. A user's file may take the name of a
//! built-in one only when it says so (`replaces: built-in`): what a file replaces is then a decision, never a
//! coincidence of names.

use std::path::{Path, PathBuf};

use structures_catalog::nearest;

use crate::error::BindingError;
use crate::facts::Structures;
use crate::file::{self, BindingFile, Body, FamilyBinding, Origin};
use crate::pipeline::PipelineBinding;
use crate::placement::{HostFacts, Placed};
use crate::reader::is_name;
use crate::region::{RegionBinding, StructureRef};
use crate::rule::Rule;

type Result<T> = std::result::Result<T, BindingError>;

/// File name and text of every binding file of the repository.
const EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/embedded_bindings.rs"));

/// What binding files end in.
const EXTENSION: &str = "yaml";

/// Every binding this process knows.
#[derive(Clone, Debug, Default)]
pub struct Bindings {
    // Sorted by name.
    files: Vec<BindingFile>,
}

/// One binding.
#[derive(Clone, Copy, Debug)]
pub enum Binding<'a> {
    /// A region, in a file of its own or in a family's.
    Region(&'a RegionBinding),
    /// A pipeline.
    Pipeline(&'a PipelineBinding),
    /// A host family.
    Family(&'a FamilyBinding),
}

/// A binding in a list.
#[derive(Clone, Copy, Debug)]
pub struct Listed<'a> {
    /// Its name.
    pub name: &'a str,
    /// The binding.
    pub binding: Binding<'a>,
    /// The file it stands in.
    pub file: &'a BindingFile,
}

impl<'a> Binding<'a> {
    /// `region`, `pipeline` or `family`.
    pub fn kind(&self) -> &'static str {
        match self {
            Binding::Region(_) => "region",
            Binding::Pipeline(_) => "pipeline",
            Binding::Family(_) => "family",
        }
    }

    /// The structure it is about; a family has none of its own.
    pub fn structure(&self) -> Option<&'a StructureRef> {
        match self {
            Binding::Region(b) => Some(&b.structure),
            Binding::Pipeline(b) => Some(&b.structure),
            Binding::Family(_) => None,
        }
    }
}

impl Bindings {
    /// Those that ship with the program.
    pub fn built_in(structures: &dyn Structures) -> Result<Self> {
        let mut bindings = Bindings::default();
        for (stem, text) in EMBEDDED {
            let name = format!("bindings/{stem}.{EXTENSION}");
            let file = file::parse(&name, Some(stem), text, Origin::BuiltIn, structures)?;
            bindings.add(file)?;
        }
        Ok(bindings)
    }

    /// The built-in ones and those of some directories.
    pub fn open(dirs: &[PathBuf], structures: &dyn Structures) -> Result<Self> {
        let mut bindings = Self::built_in(structures)?;
        for dir in dirs {
            bindings.add_directory(dir, structures)?;
        }
        Ok(bindings)
    }

    /// Adds every binding file of a directory.
    pub fn add_directory(&mut self, dir: &Path, structures: &dyn Structures) -> Result<()> {
        for path in files_of(dir)? {
            self.add(file::read(&path, structures)?)?;
        }
        Ok(())
    }

    /// Adds one file, if its names are free or it replaces a built-in one.
    pub fn add(&mut self, file: BindingFile) -> Result<()> {
        let same = |f: &&BindingFile| f.name == file.name && f.origin == Origin::BuiltIn;
        let built_in = self.files.iter().find(same);
        match (file.replaces, built_in) {
            (true, None) => {
                let what = "`replaces: built-in`, but no built-in file has this name".into();
                return Err(refuse(&file, what));
            }
            (false, Some(other)) if file.origin == Origin::User => {
                let what = format!(
                    "{} is built in and has this name; rename this file, or say `replaces: built-in`",
                    other.file
                );
                return Err(refuse(&file, what));
            }
            _ => {}
        }
        let stays = |f: &&BindingFile| {
            !(file.replaces && f.name == file.name && f.origin == Origin::BuiltIn)
        };
        for (name, at) in file.names() {
            let taken = self
                .files
                .iter()
                .filter(stays)
                .flat_map(BindingFile::names)
                .find(|(other, _)| *other == name);
            if let Some((_, other)) = taken {
                return Err(BindingError::name_taken(name, at, &other.to_string()));
            }
        }
        if file.replaces {
            self.files
                .retain(|f| !(f.name == file.name && f.origin == Origin::BuiltIn));
        }
        let at = self.files.partition_point(|f| f.name < file.name);
        self.files.insert(at, file);
        Ok(())
    }

    /// All files, by name.
    pub fn files(&self) -> &[BindingFile] {
        &self.files
    }

    /// Every binding, by name; with a structure only those about it.
    pub fn list(&self, structure: Option<&str>) -> Vec<Listed<'_>> {
        let mut all: Vec<Listed<'_>> = self.files.iter().flat_map(listed).collect();
        if let Some(wanted) = structure {
            all.retain(|l| l.binding.structure().is_some_and(|s| s.name == wanted));
        }
        all.sort_by_key(|l| l.name);
        all
    }

    /// One binding. With `require_pipeline_coverage` a pipeline binding must declare its coverage (V-07).
    pub fn load_binding(&self, name: &str, require_pipeline_coverage: bool) -> Result<Binding<'_>> {
        let all = self.list(None);
        let found = all.iter().find(|l| l.name == name && is_name(name));
        let Some(found) = found else {
            return Err(BindingError::Unknown {
                name: name.into(),
                nearest: nearest(name, all.iter().map(|l| l.name)),
            });
        };
        if let (Binding::Pipeline(p), true) = (found.binding, require_pipeline_coverage) {
            p.require_coverage()?;
        }
        Ok(found.binding)
    }

    /// The region bindings of the families for a model type.
    pub fn for_model_type(&self, model_type: &str) -> Vec<&RegionBinding> {
        let family = |f: &'_ BindingFile| match &f.body {
            Body::Family(f) if f.model_types.iter().any(|t| t == model_type) => true,
            Body::Region(_) | Body::Pipeline(_) | Body::Family(_) => false,
        };
        self.files
            .iter()
            .filter(|f| family(f))
            .flat_map(|f| match &f.body {
                Body::Family(f) => f.regions.iter().collect(),
                Body::Region(_) | Body::Pipeline(_) => Vec::new(),
            })
            .collect()
    }

    /// The seams the families for a model type place on one model.
    pub fn place(&self, model_type: &str, host: &dyn HostFacts) -> Result<Vec<Placed>> {
        let mut placed: Vec<Placed> = Vec::new();
        for region in self.for_model_type(model_type) {
            for one in region.place(host)? {
                let same = |p: &&Placed| p.path == one.path && p.structure == one.structure;
                if let Some(other) = placed.iter().find(same) {
                    return Err(BindingError::Invalid {
                        at: region.at.clone(),
                        path: "hosts".into(),
                        rule: Rule::Placement,
                        binding: region.binding.clone(),
                        what: format!(
                            "`{}` places {} at `{}` already; remove one",
                            other.binding, one.structure, one.path
                        ),
                    });
                }
                placed.push(one);
            }
        }
        Ok(placed)
    }
}

/// Binding files of a directory, by name. A file that looks like one and would not be read is refused.
pub fn files_of(dir: &Path) -> Result<Vec<PathBuf>> {
    let unreadable = |reason: String| BindingError::Unreadable {
        path: dir.display().to_string(),
        reason,
    };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| unreadable(e.to_string()))? {
        let path = entry.map_err(|e| unreadable(e.to_string()))?.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some(EXTENSION) => paths.push(path),
            Some("yml") => {
                return Err(BindingError::Unreadable {
                    path: path.display().to_string(),
                    reason: format!("binding files end in .{EXTENSION}; rename it"),
                })
            }
            _ => {}
        }
    }
    paths.sort();
    Ok(paths)
}

fn listed(file: &BindingFile) -> Vec<Listed<'_>> {
    let one = |name, binding| Listed {
        name,
        binding,
        file,
    };
    match &file.body {
        Body::Region(b) => vec![one(b.binding.as_str(), Binding::Region(b))],
        Body::Pipeline(b) => vec![one(b.binding.as_str(), Binding::Pipeline(b))],
        Body::Family(f) => std::iter::once(one(f.binding.as_str(), Binding::Family(f)))
            .chain(
                f.regions
                    .iter()
                    .map(|r| one(r.binding.as_str(), Binding::Region(r))),
            )
            .collect(),
    }
}

fn refuse(file: &BindingFile, what: String) -> BindingError {
    BindingError::Invalid {
        at: file.at().clone(),
        path: "binding".into(),
        rule: Rule::Replaces,
        binding: file.name.clone(),
        what,
    }
}
