//! What a receipt says about the scheme: name, whether `auto` chose it, routed formats, kept seams.

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::{Decision, Seam, Selected};

/// A seam that keeps the host by decision; distinct from a refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptHost {
    /// Seam key.
    pub path: String,
    /// Structure.
    pub structure: String,
    /// Stable code.
    pub code: String,
    /// For people.
    pub reason: String,
}

/// The scheme in a receipt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchemeRecord {
    /// Profile.
    pub name: String,
    /// Whether `auto` chose it.
    pub auto: bool,
    /// Why it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Seam key -> structure -> routed format.
    pub formats: IndexMap<String, IndexMap<String, String>>,
    /// Seam key -> structure -> parameters, where a route has some.
    pub params: IndexMap<String, IndexMap<String, serde_json::Value>>,
    /// Seams that keep the host.
    pub keep_host: Vec<KeptHost>,
}

impl SchemeRecord {
    /// Of decisions in the order of the seams.
    pub fn new(selected: &Selected, seams: &[Seam], decisions: &[Decision]) -> Self {
        let mut record = Self {
            name: selected.scheme.name().to_string(),
            auto: selected.auto.is_some(),
            why: selected.auto.clone(),
            formats: IndexMap::new(),
            params: IndexMap::new(),
            keep_host: Vec::new(),
        };
        for (seam, decision) in seams.iter().zip(decisions) {
            let (key, structure) = (seam.key.clone(), seam.structure.clone());
            match decision {
                Decision::Default => {}
                Decision::Keep { code, reason } => record.keep_host.push(KeptHost {
                    path: key,
                    structure,
                    code: code.clone(),
                    reason: reason.clone(),
                }),
                Decision::Route { format, params } => {
                    if !params.is_empty() {
                        let value = serde_json::Value::Object(params.clone());
                        let of_seam = record.params.entry(key.clone()).or_default();
                        of_seam.insert(structure.clone(), value);
                    }
                    record
                        .formats
                        .entry(key)
                        .or_default()
                        .insert(structure, format.clone());
                }
            }
        }
        record
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{ignoring, seam};
    use super::super::{decide, Registry};
    use super::*;

    #[test]
    fn b_103_b_104_routes_and_kept_seams_are_recorded_apart() {
        let selected = Registry::builtin().select("none", &[]).unwrap();
        let seams = [
            seam("a", &["gemm"], &["fp8_static"]),
            seam("b", &["pack"], &["none"]),
            ignoring("c", &[]),
        ];
        let mut decisions = decide(selected.scheme.as_ref(), &seams).unwrap();
        if let Decision::Route { params, .. } = &mut decisions[1] {
            params.insert("alpha".into(), 0.5.into());
        }
        let record = SchemeRecord::new(&selected, &seams, &decisions);
        assert_eq!(record.formats["b"]["structure_of_b"], "none");
        assert_eq!(record.params["b"]["structure_of_b"]["alpha"], 0.5);
        assert_eq!(record.keep_host.len(), 1);
        assert_eq!(record.keep_host[0].code, "keep_quantisation_off");
        assert!(!record.auto && record.formats.len() == 1);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<SchemeRecord>(&text).unwrap(), record);
    }
}
