//! What the tests share: the oracle's list of structures as a catalog, and documents under a rule.

#![allow(clippy::unwrap_used, dead_code)] // tests; not every file uses everything

use std::path::PathBuf;

use indexmap::IndexMap;
use serde_json::Value as Json;
use structures_bindings::{
    parse, BindingError, BindingFile, Facts, Origin, SlotFacts, StageFacts, Structures,
};
use structures_catalog::expr::Expr;
use structures_catalog::spec::DimExpr;
use structures_catalog::{nearest, CatalogError, Kind};
use structures_graph::Layout;

/// The oracle's file, else the repository's copy of it.
pub fn oracle() -> Json {
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle");
    let given = std::env::var_os("STRUCTURES_ORACLE").map(PathBuf::from);
    let path = [given, Some(own)]
        .into_iter()
        .flatten()
        .map(|d| d.join("bindings.json"))
        .find(|p| p.exists())
        .unwrap();
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Structures as the oracle lists them.
pub struct OracleCatalog(Vec<Facts>);

impl OracleCatalog {
    pub fn new() -> Self {
        let list = oracle()["catalog"].as_array().unwrap().clone();
        OracleCatalog(list.iter().map(facts).collect())
    }

    pub fn names(&self) -> Vec<&str> {
        self.0.iter().map(|f| f.name.as_str()).collect()
    }
}

impl Structures for OracleCatalog {
    fn facts(&self, name: &str, version: Option<u32>) -> Result<Facts, CatalogError> {
        let found = self.0.iter().find(|f| f.name == name);
        match (found, version) {
            (Some(f), None) => Ok(f.clone()),
            (Some(f), Some(v)) if v == f.version => Ok(f.clone()),
            (Some(f), Some(v)) if v < f.version => Err(CatalogError::Retired {
                name: name.into(),
                version: v,
                note: format!("use version {}", f.version),
            }),
            _ => Err(CatalogError::Unknown {
                name: version.map_or(name.into(), |v| format!("{name}@{v}")),
                nearest: nearest(name, self.0.iter().map(|f| f.name.as_str())),
            }),
        }
    }
}

/// Structures whose matrices are `out, in`, as the oracle's page says.
const OUT_IN: [&str; 3] = ["vision_ffn", "patch_projection", "modnorm_qkv_chain"];

fn facts(row: &Json) -> Facts {
    let text = |v: &Json| v.as_str().unwrap().to_string();
    let texts = |v: &Json| v.as_array().unwrap().iter().map(text).collect::<Vec<_>>();
    let mut facts = Facts {
        name: text(&row["name"]),
        version: u32::try_from(row["version"].as_u64().unwrap()).unwrap(),
        kind: match row["kind"].as_str().unwrap() {
            "region" => Kind::Region,
            _ => Kind::StagePipeline,
        },
        family: text(&row["family"]),
        stages: row["stages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|s| StageFacts {
                name: text(&s["name"]),
                optional: s["optional"].as_bool().unwrap(),
                outputs: Vec::new(),
            })
            .collect(),
        embedded: texts(&row["embedded_regions"]),
        slots: IndexMap::new(),
        symbols: Vec::new(),
        axes: row["variants"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(axis, values)| (axis.clone(), texts(values)))
            .collect(),
        points: texts(&row["points"]),
    };
    for input in row["inputs"].as_array().unwrap() {
        facts.learn(&dims(&input["dims"]));
    }
    for slot in row["weight_slots"].as_array().unwrap() {
        let dims = dims(&slot["dims"]);
        facts.learn(&dims);
        let about = SlotFacts {
            dims,
            layout: match OUT_IN.contains(&facts.name.as_str()) {
                true => Layout::OutIn,
                false => Layout::InOut,
            },
            needed: !slot["optional"].as_bool().unwrap(),
        };
        facts.slots.insert(text(&slot["slot"]), about);
    }
    facts
}

fn dims(list: &Json) -> Vec<DimExpr> {
    let one = |d: &Json| {
        let text = d.as_str().unwrap();
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if let Ok(n) = text.parse() {
            return DimExpr::Literal(n);
        }
        if text.chars().all(word) && text.starts_with(|c: char| c.is_ascii_alphabetic()) {
            return DimExpr::Symbol(text.into());
        }
        // `2D` and `D/2|D` are the oracle's own shorthand.
        Expr::parse(text).map_or(DimExpr::Literal(1), DimExpr::Derived)
    };
    list.as_array().unwrap().iter().map(one).collect()
}

/// Parses a document against the oracle's catalog, stored under its own name.
pub fn check(text: &str) -> Result<BindingFile, BindingError> {
    parse("f.yaml", None, text, Origin::User, &OracleCatalog::new())
}
