//! The roles of one candidate as expressions see them.

use indexmap::IndexMap;
use structures_catalog::expr::{Datum, Fact, Facts};
use structures_catalog::spec::Role;
use structures_graph::tree::{parent_path, ArgKind, Scalar};
use structures_graph::{Module, ModuleKind, ModuleTree};

/// One candidate: the module tried as `self`, its roles, and the sizes solved so far.
#[derive(Clone, Debug)]
pub struct Candidate<'t> {
    /// The tree.
    pub tree: &'t ModuleTree,
    /// Role -> path, `self` and `parent` left out.
    pub roles: IndexMap<String, String>,
    /// Path of `self`.
    pub own: String,
    /// The current role of `emit.per`, by its path.
    pub current: Option<String>,
    /// Solved dims.
    pub dims: IndexMap<String, u64>,
    /// Required roles that a tree from headers does not show: modules without parameters, if they are there.
    pub unseen: Vec<String>,
}

impl<'t> Candidate<'t> {
    /// The roles below `own`, when every required one exists. In a tree from headers up to half of them may be
    /// missing, if `bare` names one of those: a role whose module may have no parameters.
    pub fn resolve(
        tree: &'t ModuleTree,
        own: &str,
        wanted: &IndexMap<String, Role>,
        bare: &[String],
    ) -> Option<Candidate<'t>> {
        let mut roles = IndexMap::new();
        let mut unseen: Vec<String> = Vec::new();
        let required = wanted.values().filter(|r| !r.optional).count();
        for (name, role) in wanted {
            let base = if role.in_parent {
                parent_path(own)
            } else {
                own
            };
            let found = role
                .first
                .iter()
                .map(|p| join(base, p))
                .find(|path| tree.get(path).is_some());
            match found {
                Some(path) => {
                    roles.insert(name.clone(), path);
                }
                None if role.optional => {}
                None if tree.headers_only && (unseen.len() + 1) * 2 <= required => {
                    unseen.push(name.clone());
                }
                None => return None,
            }
        }
        let known = unseen.is_empty() || unseen.iter().any(|r| bare.contains(r));
        known.then(|| Candidate {
            tree,
            roles,
            own: own.into(),
            current: None,
            dims: IndexMap::new(),
            unseen,
        })
    }

    /// Whether a role is one that the tree does not show.
    pub fn unseen(&self, role: &str) -> bool {
        self.unseen.iter().any(|r| r == role)
    }

    /// The path of a role, `self`, `parent` and `role` included.
    pub fn path(&self, role: &str) -> Option<&str> {
        match role {
            "self" => Some(&self.own),
            "parent" => Some(parent_path(&self.own)),
            "role" => self.current.as_deref(),
            _ => self.roles.get(role).map(String::as_str),
        }
    }

    /// The module of a role.
    pub fn module(&self, role: &str) -> Option<&'t Module> {
        self.path(role).and_then(|p| self.tree.get(p))
    }
}

impl Candidate<'_> {
    /// The first parameter below `own` that stands in no role, by its full name.
    pub fn beside_roles(&self) -> Option<String> {
        let within = |path: &str, base: &str| {
            let rest = path.strip_prefix(base);
            rest.is_some_and(|r| r.is_empty() || r.starts_with('.'))
        };
        let mut below = self.tree.modules().iter();
        below.find_map(|m| {
            let own = within(&m.path, &self.own);
            let role = || self.roles.values().any(|role| within(&m.path, role));
            let param = m.params.keys().next().filter(|_| own && !role())?;
            Some(format!("{}.{param}", m.path))
        })
    }
}

impl Facts for Candidate<'_> {
    fn symbol(&self, name: &str) -> Option<Datum> {
        self.dims.get(name).and_then(|n| int(*n as usize))
    }

    fn has_role(&self, role: &str) -> bool {
        self.module(role).is_some()
    }

    fn fact(&self, role: &str, fact: Fact) -> Option<Datum> {
        let m = self.module(role)?;
        let kind = m.kind.unwrap_or(ModuleKind::Other);
        match fact {
            Fact::Kind => Some(Datum::Text(kind_word(kind).into())),
            Fact::Name => m.path.rsplit('.').next().map(|n| Datum::Text(n.into())),
            Fact::In | Fact::Out => width(m, kind, fact == Fact::In).and_then(int),
        }
    }

    fn param_dims(&self, role: &str, param: &str) -> Option<Vec<usize>> {
        self.module(role)?.params.get(param).map(|p| p.dims.clone())
    }

    fn attr(&self, role: &str, name: &str) -> Option<Datum> {
        datum(self.module(role)?.attrs.get(name)?)
    }

    fn conditioned(&self, role: &str) -> bool {
        let Some(forward) = self.module(role).and_then(|m| m.forward.as_ref()) else {
            return false;
        };
        let named = forward
            .iter()
            .any(|(n, _)| ["cond", "temb", "emb", "c"].contains(&n.as_str()));
        let positional = forward
            .iter()
            .filter(|(_, k)| matches!(k, ArgKind::Arg | ArgKind::Pos))
            .count();
        named || positional >= 2
    }

    fn takes(&self, role: &str, name: &str) -> bool {
        let forward = self.module(role).and_then(|m| m.forward.as_ref());
        forward.is_some_and(|f| f.iter().any(|(n, _)| n == name))
    }
}

/// Features a module takes or gives, from its stored weight, else from its attributes.
fn width(m: &Module, kind: ModuleKind, inner: bool) -> Option<usize> {
    let weight = m.params.get("weight").map(|p| p.dims.as_slice());
    match (kind, weight) {
        (ModuleKind::Linear | ModuleKind::Conv3d, Some([out, inside, ..])) => {
            Some(if inner { *inside } else { *out })
        }
        (ModuleKind::Linear, _) => {
            let name = if inner { "in_features" } else { "out_features" };
            match m.attrs.get(name)? {
                Scalar::Int(n) => usize::try_from(*n).ok(),
                _ => None,
            }
        }
        (ModuleKind::Embedding, Some([count, dim])) => Some(if inner { *count } else { *dim }),
        (ModuleKind::LayerNorm | ModuleKind::RmsNorm, Some(dims)) => dims.last().copied(),
        _ => None,
    }
}

fn kind_word(kind: ModuleKind) -> &'static str {
    match kind {
        ModuleKind::Linear => "linear",
        ModuleKind::LayerNorm => "layer_norm",
        ModuleKind::RmsNorm => "rms_norm",
        ModuleKind::Conv3d => "conv3d",
        ModuleKind::Embedding => "embedding",
        ModuleKind::Activation => "activation",
        ModuleKind::Other => "other",
    }
}

fn int(n: usize) -> Option<Datum> {
    i64::try_from(n).ok().map(Datum::Int)
}

/// A scalar attribute as a value of an expression; null is absence.
pub fn datum(scalar: &Scalar) -> Option<Datum> {
    Some(match scalar {
        Scalar::Flag(b) => Datum::Bool(*b),
        Scalar::Int(i) => Datum::Int(*i),
        // A whole number is one, however it is written.
        Scalar::Float(x) if x.fract() == 0.0 && x.abs() < 1e9 => Datum::Int(*x as i64),
        Scalar::Float(x) => Datum::Text(x.to_string()),
        Scalar::Word(w) => Datum::Text(w.clone()),
        Scalar::List(items) => Datum::List(items.iter().filter_map(datum).collect()),
        Scalar::Null => return None,
    })
}

/// `a` and `b.c` -> `a.b.c`; the root adds nothing.
pub fn join(base: &str, path: &str) -> String {
    if base.is_empty() {
        path.into()
    } else {
        format!("{base}.{path}")
    }
}
