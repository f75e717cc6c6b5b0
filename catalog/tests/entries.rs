//! Every entry that ships: loads, agrees with its reference, keeps its bytes.

use structures_catalog::{verify, Catalog, Check, Kind};

const DIGESTS: &str = include_str!("../digests.txt");

#[test]
fn dataflow_equals_reference() {
    let catalog = Catalog::builtin().expect("built-in entries load");
    let rows = verify(&catalog);
    let mut worst = 0f32;
    for row in &rows {
        let native = row.native || row.check != Check::Dataflow;
        assert!(native, "{}: no native reference", row.name);
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
        assert_eq!(
            spec.reference.is_some(),
            spec.kind == Kind::Region,
            "{name}"
        );
    }
}

#[test]
fn a_wrong_reference_is_found_out() {
    let catalog = Catalog::builtin().expect("built-in entries load");
    for spec in catalog
        .list()
        .into_iter()
        .filter(|s| s.kind == Kind::Region)
    {
        let mut wrong = spec.clone();
        wrong.reference = Some(|call| {
            let name = call.inputs.keys().next().map_or("y", String::as_str);
            Ok(vec![(name.to_string(), call.input(name)?)])
        });
        let rows = structures_catalog::verify::verify_spec(&wrong);
        assert!(rows.iter().all(|r| r.failure.is_some()), "{}", spec.name);
    }
}

/// The benchmark `load` measures; this only notices a change of order: ten times its figure, of the processor's time
/// where the kernel tells it, so that a busy machine does not count.
#[test]
fn the_whole_catalog_loads_quickly() {
    let started = std::time::Instant::now();
    let clock = || -> u128 {
        let spent = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
        let spent = spent.and_then(|s| s.split(' ').next().and_then(|n| n.parse().ok()));
        spent.unwrap_or_else(|| started.elapsed().as_nanos())
    };
    let best = (0..5)
        .map(|_| {
            let before = clock();
            Catalog::builtin().expect("built-in entries load");
            (clock() - before) / 1_000_000
        })
        .min();
    println!("{best:?} ms");
    assert!(best.is_some_and(|ms| ms <= 200), "{best:?} ms");
}

/// The entries of the specification, with their kinds and versions.
#[test]
fn every_entry_of_the_specification_is_there() {
    let catalog = Catalog::builtin().expect("built-in entries load");
    let count = |kind| catalog.newest().iter().filter(|s| s.kind == kind).count();
    assert_eq!((count(Kind::Region), count(Kind::StagePipeline)), (14, 3));
    for (pin, live) in [
        ("vision_ffn@2", true),
        ("vision_ffn@1", true),
        ("modnorm_qkv_chain@3", true),
        ("modnorm_qkv_chain@2", false),
        ("modnorm_qkv_chain@1", false),
        ("autoregressive_decode_pipeline@2", true),
        ("autoregressive_decode_pipeline@1", false),
        ("vla_tick_pipeline@2", true),
        ("vla_tick_pipeline@1", false),
        ("video_generation_pipeline@1", true),
    ] {
        match catalog.find(pin) {
            Ok(_) => assert!(live, "{pin} is live"),
            Err(e) => assert!(!live && e.code() == "entry_retired", "{pin}: {e}"),
        }
    }
}
