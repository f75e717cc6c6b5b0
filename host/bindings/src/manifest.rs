//! A binding as JSON: what it binds, which stages, who owns the hot path. No hosts, no hardware.

use serde_json::{json, Map, Value as Json};
use structures_catalog::selects_hardware;

use crate::coverage::{Coverage, Segment, COMPLETE_HOT_PATH};
use crate::file::{Body, FamilyBinding};
use crate::library::Binding;
use crate::pipeline::PipelineBinding;
use crate::region::{RegionBinding, StructureRef};

impl Binding<'_> {
    /// The manifest.
    pub fn manifest(&self) -> Json {
        match self {
            Binding::Region(b) => b.manifest(),
            Binding::Pipeline(b) => b.manifest(),
            Binding::Family(b) => b.manifest(),
        }
    }
}

impl Body {
    /// The manifest.
    pub fn manifest(&self) -> Json {
        match self {
            Body::Region(b) => b.manifest(),
            Body::Pipeline(b) => b.manifest(),
            Body::Family(b) => b.manifest(),
        }
    }
}

impl RegionBinding {
    /// The manifest: what it binds.
    pub fn manifest(&self) -> Json {
        json!({"binding": self.binding, "structure": structure(&self.structure)})
    }
}

impl FamilyBinding {
    /// The manifest: models and regions.
    pub fn manifest(&self) -> Json {
        let regions: Vec<Json> = self.regions.iter().map(RegionBinding::manifest).collect();
        json!({"binding": self.binding, "model_types": self.model_types, "regions": regions})
    }
}

impl PipelineBinding {
    /// The manifest: what it binds, its stages in the order of the file, its coverage if it declares one.
    pub fn manifest(&self) -> Json {
        let stages: Vec<&String> = self.stages.keys().collect();
        let mut m = json!({
            "binding": self.binding,
            "structure": structure(&self.structure),
            "stages": stages,
        });
        if let (Some(c), Json::Object(m)) = (&self.coverage, &mut m) {
            m.insert("coverage".into(), coverage(c));
        }
        m
    }
}

fn structure(s: &StructureRef) -> Json {
    json!({"name": s.name, "version": s.version, "kind": s.kind, "family": s.family})
}

fn coverage(c: &Coverage) -> Json {
    let segments: Vec<Json> = c.segments.iter().map(segment).collect();
    json!({"contract": COMPLETE_HOT_PATH, "hot_path": c.hot_path, "segments": segments})
}

fn segment(s: &Segment) -> Json {
    let mut m = Map::new();
    m.insert("name".into(), json!(s.name));
    m.insert("stage".into(), json!(s.stage));
    m.insert("classification".into(), json!(s.classification.word()));
    m.insert("seam".into(), json!(s.seam));
    m.insert("hot".into(), json!(s.hot));
    if !s.structures.is_empty() {
        m.insert("structures".into(), json!(s.structures));
    }
    Json::Object(m)
}

/// The first key of a manifest that must not be there (B-013), as a path.
pub fn forbidden_key(manifest: &Json) -> Option<String> {
    fn walk(at: &str, value: &Json) -> Option<String> {
        match value {
            Json::Object(map) => map.iter().find_map(|(key, value)| {
                let path = format!("{at}.{key}");
                if selects_hardware(key) || key == "hosts" {
                    return Some(path);
                }
                walk(&path, value)
            }),
            Json::Array(items) => items
                .iter()
                .enumerate()
                .find_map(|(i, value)| walk(&format!("{at}[{i}]"), value)),
            _ => None,
        }
    }
    walk("manifest", manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forbidden_keys_are_seen_anywhere() {
        assert_eq!(forbidden_key(&json!({"a": [{"b": 1}]})), None);
        for key in ["hosts", "device", "kernels", "Arch", "runtime-benchmark"] {
            let found = forbidden_key(&json!({"a": [{"b": {key: 1}}]}));
            assert_eq!(found, Some(format!("manifest.a[0].b.{key}")));
        }
    }
}
