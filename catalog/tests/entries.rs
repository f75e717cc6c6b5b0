//! Every entry that ships: loads, agrees with its reference, keeps its bytes.

use structures_catalog::{verify, Catalog};

const DIGESTS: &str = include_str!("../digests.txt");

#[test]
fn dataflow_equals_reference() {
    let catalog = Catalog::builtin().expect("built-in entries load");
    let rows = verify(&catalog);
    let mut worst = 0f32;
    for row in &rows {
        assert!(row.native, "{}: no native reference", row.name);
        let what = format!("{}@{} {}", row.name, row.version, row.combination);
        assert!(row.failure.is_none(), "{what}: {:?}", row.failure);
        worst = worst.max(row.error);
    }
    for name in catalog.names() {
        assert!(
            rows.iter().any(|r| r.name == name),
            "{name} was not verified"
        );
    }
    println!("{} combinations, largest difference {worst:e}", rows.len());
}

#[test]
fn a_changed_document_needs_a_new_version() {
    let catalog = Catalog::builtin().expect("built-in entries load");
    let found: String = catalog
        .list()
        .iter()
        .map(|s| format!("{} {} {}\n", s.name, s.version, s.digest))
        .collect();
    if std::env::var_os("STRUCTURES_UPDATE_DIGESTS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/digests.txt");
        std::fs::write(path, &found).expect("digests.txt");
        return;
    }
    assert_eq!(
        DIGESTS, found,
        "\nthe bytes of a structure.yaml changed. A receipt cites (name, version, digest), so meaning and bytes may \
         change only together with `version`: keep the released document as <name>/v<k>/structure.yaml, bump \
         `version` in the new one, and add its line to catalog/digests.txt \
         (STRUCTURES_UPDATE_DIGESTS=1 writes the table)\n"
    );
}

#[test]
fn every_listed_name_loads() {
    let catalog = Catalog::builtin().expect("built-in entries load");
    let names = catalog.names();
    assert!(!names.is_empty() && names.is_sorted());
    for name in names {
        let spec = catalog.get(name).expect(name);
        assert_eq!(spec.name, name);
        assert!(
            !spec.summary.is_empty() && !spec.evidence.is_empty(),
            "{name}"
        );
        assert!(spec.reference.is_some(), "{name}");
    }
}

#[test]
fn a_wrong_reference_is_found_out() {
    let catalog = Catalog::builtin().expect("built-in entries load");
    for spec in catalog.list() {
        let mut wrong = spec.clone();
        wrong.reference = Some(|call| {
            let name = call.inputs.keys().next().map_or("y", String::as_str);
            Ok(vec![(name.to_string(), call.input(name)?)])
        });
        let rows = structures_catalog::verify::verify_spec(&wrong);
        assert!(rows.iter().all(|r| r.failure.is_some()), "{}", spec.name);
    }
}
