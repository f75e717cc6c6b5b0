//! `ModuleTree`: a neutral description of a model: paths, kinds, parameter shapes, scalar attributes.
//!
//! It comes from a checkpoint's headers and config, or from a JSON dump of another framework's module tree
//! (`dump`, with kinds from `kinds`). No weight is ever read for it.

use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

/// What a module is, as far as `slots` can ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the grammar's
pub enum ModuleKind {
    Linear,
    LayerNorm,
    RmsNorm,
    Conv3d,
    Embedding,
    Activation,
    Other,
}

/// Shape and stored type of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamInfo {
    /// Stored dims.
    pub dims: Vec<usize>,
    /// Stored dtype as text (`bf16`, `f32`, `q4_1`, ...).
    pub dtype: String,
}

/// A scalar attribute of a module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Scalar {
    /// true, false
    Flag(bool),
    /// A whole number.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A word.
    Word(String),
    /// A short tuple.
    List(Vec<Scalar>),
    /// None.
    Null,
}

/// How a forward parameter is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArgKind {
    /// Positional or keyword.
    Arg,
    /// Positional only.
    Pos,
    /// Keyword only.
    Kw,
    /// `*args`.
    Var,
    /// `**kwargs`.
    Varkw,
}

/// One named module.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// Dotted path; the root is empty.
    pub path: String,
    /// Class name where one is known. Never evidence.
    pub class: String,
    /// Kind.
    pub kind: Option<ModuleKind>,
    /// Parameters by name, definition order.
    pub params: IndexMap<String, ParamInfo>,
    /// Registered but absent parameters (a missing bias).
    pub absent_params: Vec<String>,
    /// Scalar attributes. An activation attribute (`act_fn` ...) holds its kind as a word in the operations'
    /// vocabulary (`silu`, `gelu_tanh`, `gelu_exact`, ...) or, when it is none of those, its own name.
    pub attrs: IndexMap<String, Scalar>,
    /// Forward parameters without `self`, where known.
    pub forward: Option<Vec<(String, ArgKind)>>,
}

/// Where the rows of a module that is stored inside another one stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowsOf {
    /// The module that is stored.
    pub path: String,
    /// Its rows, in every parameter.
    pub rows: (usize, usize),
    /// Why they may be others.
    pub doubt: Option<String>,
}

/// A whole tree, modules in definition order.
#[derive(Clone, Debug, Default)]
pub struct ModuleTree {
    /// Name of the model.
    pub model: String,
    /// Second names of shared modules: alias path -> the path the module is listed under. `get` and `children` follow
    /// them; the list of modules has each module once.
    pub aliases: IndexMap<String, String>,
    /// Groups of parameters that are one tensor (`a.weight`, `b.weight`).
    pub tied: Vec<Vec<String>>,
    /// Modules that are rows of another one's parameters (`qkv_proj` holds three): path -> where.
    pub slices: IndexMap<String, RowsOf>,
    /// Whether it was made of names and shapes alone: then modules without parameters are not in it, and what is not
    /// among the attributes and forwards of the others is not known.
    pub headers_only: bool,
    /// Facts of a module that nothing said and that were taken for granted: path -> one sentence.
    pub assumed: IndexMap<String, String>,
    modules: Vec<Module>,
    index: HashMap<String, usize>,
    children: Vec<Vec<usize>>,
}

impl ModuleTree {
    /// Builds the index. Missing intermediate modules are added as `Other`, before their first child.
    pub fn new(model: &str, modules: Vec<Module>) -> Self {
        let mut tree = ModuleTree {
            model: model.into(),
            ..Self::default()
        };
        tree.insert(Module::default());
        for m in modules {
            let mut at = 0;
            while let Some(dot) = m.path[at..].find('.') {
                let prefix = &m.path[..at + dot];
                if !tree.index.contains_key(prefix) {
                    tree.insert(Module {
                        path: prefix.into(),
                        ..Module::default()
                    });
                }
                at += dot + 1;
            }
            tree.insert(m);
        }
        tree
    }

    fn insert(&mut self, m: Module) {
        if let Some(&i) = self.index.get(&m.path) {
            self.modules[i] = m;
            return;
        }
        let i = self.modules.len();
        self.index.insert(m.path.clone(), i);
        if !m.path.is_empty() {
            let parent = self.index[parent_path(&m.path)];
            self.children[parent].push(i);
        }
        self.modules.push(m);
        self.children.push(Vec::new());
    }

    /// All modules, definition order, the root first.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// The module at a path, or at the path it is a second name of.
    pub fn get(&self, path: &str) -> Option<&Module> {
        self.at(path).map(|i| &self.modules[i])
    }

    fn at(&self, path: &str) -> Option<usize> {
        let own = |p: &str| self.index.get(p).copied();
        own(path).or_else(|| self.aliases.get(path).and_then(|p| own(p)))
    }

    /// Elements of all parameters, tied ones once.
    pub fn parameter_count(&self) -> u64 {
        let copies: HashSet<&str> = self
            .tied
            .iter()
            .flat_map(|group| group.iter().skip(1).map(String::as_str))
            .collect();
        let mut count = 0;
        for m in &self.modules {
            for (name, p) in &m.params {
                let full = if m.path.is_empty() {
                    name.clone()
                } else {
                    format!("{}.{name}", m.path)
                };
                if !copies.contains(full.as_str()) {
                    count += p.dims.iter().map(|d| *d as u64).product::<u64>();
                }
            }
        }
        count
    }

    /// Direct children of a path, definition order.
    pub fn children(&self, path: &str) -> impl Iterator<Item = &Module> {
        let ids = self
            .at(path)
            .map(|i| self.children[i].as_slice())
            .unwrap_or(&[]);
        ids.iter().map(|&i| &self.modules[i])
    }

    /// The module above a path; `None` for the root.
    pub fn parent(&self, path: &str) -> Option<&Module> {
        if path.is_empty() {
            None
        } else {
            self.get(parent_path(path))
        }
    }
}

/// `a.b.c` -> `a.b`; a top-level name -> the root.
pub fn parent_path(path: &str) -> &str {
    path.rfind('.').map_or("", |dot| &path[..dot])
}

/// The path with every numeric component replaced: `{i}`, then `{j}`, `{k}` ...; and the last number, -1 if none.
pub fn family_template(path: &str) -> (String, i64) {
    let mut layer = -1;
    let mut adjacent = false;
    let mut letters = ('i'..='z').map(|c| format!("{{{c}}}"));
    let parts: Vec<String> = path
        .split('.')
        .map(|p| {
            let numeric = !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit());
            let first = !std::mem::replace(&mut adjacent, numeric);
            match p.parse::<i64>() {
                Ok(n) if numeric => {
                    if first {
                        layer = n;
                    }
                    letters.next().unwrap_or_else(|| "{n}".into())
                }
                _ => p.to_string(),
            }
        })
        .collect();
    (parts.join("."), layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_replace_every_number() {
        let cases = [
            ("model.layers.3.mlp", "model.layers.{i}.mlp", 3),
            ("stack.0.1.mlp", "stack.{i}.{j}.mlp", 0),
            ("deep.7.0.a.2.mlp", "deep.{i}.{j}.a.{k}.mlp", 2),
            ("0", "{i}", 0),
            ("lm_head", "lm_head", -1),
            ("a.+1.b2", "a.+1.b2", -1),
            ("", "", -1),
        ];
        for (path, template, layer) in cases {
            assert_eq!(family_template(path), (template.to_string(), layer));
        }
    }

    #[test]
    fn missing_parents_are_added_before_their_children() {
        let at = |p: &str| Module {
            path: p.into(),
            ..Module::default()
        };
        let tree = ModuleTree::new("t", vec![at("a.b.c"), at("a.d")]);
        let paths: Vec<&str> = tree.modules().iter().map(|m| m.path.as_str()).collect();
        assert_eq!(paths, ["", "a", "a.b", "a.b.c", "a.d"]);
        let below: Vec<&str> = tree.children("a").map(|m| m.path.as_str()).collect();
        assert_eq!(below, ["a.b", "a.d"]);
        assert_eq!(tree.parent("a.b.c").map(|m| m.path.as_str()), Some("a.b"));
        assert!(tree.parent("").is_none());
    }
}
