//! The library's doors on the demo model: one structure at one place, everything without a gate, everything with one.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use structures::attach::{attach, auto_swaps, Options, DEFAULT_FLOOR};
use structures::choose::Pin;
use structures::error::Error;
use structures::host::{Host, Loaded};
use structures::progress::Silent;
use structures::samples::{Sample, Samples};
use structures::workload::{Runner, Workload};
use structures_fixture_plugin::{fixture_copy, Fault};
use structures_graph::ValueId;
use structures_tests::demo;
use structures_tests::in_process::{any_speed, host, isolate, logits, made_samples, model};

fn samples(n: u32) -> Samples {
    made_samples(n, 24)
}

fn with(fault: Fault) -> (tempfile::TempDir, Host) {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), fault, "fixture");
    let host = host(dir.path());
    (dir, host)
}

const MLP: &str = "model.layers.0.mlp";

#[test]
fn b_170_a_region_gives_a_handle_and_a_pipeline_says_what_it_is() {
    let (_dir, host) = with(Fault::None);
    assert_eq!(host.get("qkv_pack").unwrap().spec.name, "qkv_pack");
    let pipelines: Vec<String> = host
        .catalog
        .newest()
        .iter()
        .filter(|s| s.kind == structures_catalog::Kind::StagePipeline)
        .map(|s| s.name.clone())
        .collect();
    assert!(!pipelines.is_empty());
    for name in pipelines {
        let error = host.get(&name).map(|_| ()).unwrap_err();
        assert_eq!(error.code(), "pipeline_not_bindable");
        assert!(error.to_string().contains("capture"), "{error}");
    }
    assert_eq!(
        host.get("decoder_fnn").map(|_| ()).unwrap_err().code(),
        "entry_unknown"
    );
}

#[test]
fn b_171_b_174_any_region_binds_at_its_place_and_is_certified() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    for (structure, path) in [
        ("decoder_ffn", MLP),
        ("qkv_pack", "model.layers.1.self_attn"),
        ("linear_proj", "model.layers.0.self_attn.o_proj"),
    ] {
        let handle = host.get(structure).unwrap();
        let bound = handle
            .bind(
                &model,
                path,
                &samples(3),
                &any_speed("none"),
                DEFAULT_FLOOR,
                &Silent,
            )
            .unwrap_or_else(|e| panic!("{structure}: {e}"));
        assert!(bound.worst_cosine > 0.99999, "{}", bound.worst_cosine);
        assert_eq!((bound.form.as_str(), bound.samples), ("fixture:plain", 3));
        assert_eq!(bound.structure, structure);
        assert_eq!(bound.rows, [24]);
        assert!(!bound.dims.is_empty() && !bound.boundary.is_empty());
        assert_eq!(bound.seat.ledger.counts().fallbacks, 0);
        // It runs, and leaving it out is the host again.
        let before = logits(&model, &model.session().host_plan());
        let served = bound.seat.ledger.counts().form_calls;
        logits(&model, &bound.plan(&model).unwrap());
        assert_eq!(bound.seat.ledger.counts().form_calls, served + 1);
        assert_eq!(logits(&model, &model.session().host_plan()), before);
    }
}

#[test]
fn b_172_no_sample_is_invalid() {
    let error = Samples::new("none", Vec::new()).unwrap_err();
    assert_eq!(error.code(), "no_samples");
    let empty = Sample {
        tokens: Vec::new(),
        origin: "made#1".into(),
    };
    let one = samples(1).samples().to_vec();
    let error = Samples::new("made", vec![one[0].clone(), empty]).unwrap_err();
    assert_eq!(error.code(), "no_samples");
    assert!(error.to_string().contains("made#1"), "{error}");
}

/// A residual is an operation of the host's graph, one for every sample, so there is no list that could be of another
/// length: both sides of the comparison have it or neither has, by the span that is bound.
#[test]
fn b_172_one_sample_or_several_and_the_residual_is_the_hosts_own() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let handle = host.get("decoder_ffn").unwrap();
    for n in [1, 3] {
        let bound = handle
            .bind(
                &model,
                MLP,
                &samples(n),
                &any_speed("none"),
                DEFAULT_FLOOR,
                &Silent,
            )
            .unwrap();
        assert_eq!(bound.samples, n as usize);
        assert_eq!(bound.boundary, "block", "norm and residual are inside");
        assert!(bound.worst_cosine > 0.99999);
        let outputs = &bound.install.outputs;
        let graph = model.session().graph().clone();
        let made = graph.ops.iter().find(|op| op.outputs.contains(&outputs[0]));
        assert_eq!(made.unwrap().kind, structures_graph::OpKind::Add);
    }
}

/// In decode a place sees one row a step; what the form leaves to the host is no sample it was measured on.
#[test]
fn b_174_only_served_samples_are_counted_and_a_floor_is_a_number() {
    let dir = structures_tests::plugins(&["x86"]);
    let host = host(dir.path());
    let model = model();
    let handle = host.get("decoder_ffn").unwrap();
    let mut o = any_speed("w8a16_decode");
    let bind = |o: &Options, floor| handle.bind(&model, MLP, &samples(3), o, floor, &Silent);
    o.workload = Some(Workload::Decode);
    let bound = bind(&o, 0.9).unwrap();
    assert_eq!(bound.samples as u64, bound.seat.ledger.counts().form_calls);
    assert_eq!(bound.samples, 3);
    for floor in [f64::NAN, f64::INFINITY] {
        let error = bind(&o, floor).map(|_| ()).unwrap_err();
        assert_eq!(error.code(), "floor_invalid");
    }
}

#[test]
fn b_173_below_the_floor_is_refused_with_the_numbers_and_zero_skips() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let handle = host.get("decoder_ffn").unwrap();
    let bind = |floor| {
        handle.bind(
            &model,
            MLP,
            &samples(3),
            &any_speed("w8a8_or_none"),
            floor,
            &Silent,
        )
    };
    assert_eq!(bind(0.5).map(|_| ()).unwrap_err().code(), "scheme_unknown");

    let decode = Options {
        workload: Some(Workload::Decode),
        ..any_speed("w8a16_decode")
    };
    let bind = |floor| handle.bind(&model, MLP, &samples(3), &decode, floor, &Silent);
    let error = bind(1.1).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), "explicit_parity");
    let text = error.to_string();
    for fact in ["0.99", "1.1", "3 samples", "span `", MLP, "fixture:int8"] {
        assert!(text.contains(fact), "{text}");
    }
    assert!(error.is_refusal());
    assert_eq!(bind(0.0).unwrap().floor, 0.0);
}

#[test]
fn b_175_what_cannot_be_bound_is_said_with_every_reason() {
    let (_dir, host) = with(Fault::Scaled);
    let model = model();
    let handle = host.get("decoder_ffn").unwrap();
    let at = |path: &str, options: &Options| {
        handle
            .bind(&model, path, &samples(3), options, DEFAULT_FLOOR, &Silent)
            .map(|_| ())
            .unwrap_err()
    };
    let wrong = at(MLP, &any_speed("none"));
    assert_eq!(wrong.code(), "bind_parity");
    assert!(wrong.to_string().contains("fixture:plain"), "{wrong}");
    let nowhere = at("model.layers.7.mlp", &any_speed("none"));
    assert_eq!(nowhere.code(), "seam_unknown");
    assert!(nowhere.to_string().contains(MLP), "{nowhere}");
    let mut pinned = any_speed("none");
    pinned.pins = vec![Pin::parse("decoder_ffn=fixture:int8").unwrap()];
    assert_eq!(at(MLP, &pinned).code(), "format_no_variant");
}

#[test]
fn b_175_a_foreign_activation_is_refused_by_name() {
    let (_dir, host) = with(Fault::None);
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let config = copy.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let foreign = text.replace(r#""hidden_act": "silu""#, r#""hidden_act": "gelu""#);
    assert_ne!(text, foreign);
    std::fs::write(&config, foreign).unwrap();
    let model = Loaded::open(copy.path()).unwrap();
    let handle = host.get("decoder_ffn").unwrap();
    let error = handle
        .bind(
            &model,
            MLP,
            &samples(3),
            &any_speed("none"),
            DEFAULT_FLOOR,
            &Silent,
        )
        .map(|_| ())
        .unwrap_err();
    assert_eq!(error.code(), "activation_foreign");
    let text = error.to_string();
    assert!(text.contains(MLP) && text.contains("gelu"), "{text}");
}

#[test]
fn b_178_b_344_auto_swaps_builds_without_judging_and_the_ledger_tells() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let swaps = auto_swaps(
        &host,
        &model,
        &samples(3),
        &any_speed("w8a16_decode"),
        &Silent,
    )
    .unwrap();
    assert!(!swaps.seats.is_empty());
    let ran: u64 = swaps
        .seats
        .iter()
        .map(|s| s.ledger.counts().form_calls)
        .sum();
    assert_eq!(ran, 0, "nothing was judged");
    logits(&model, &swaps.plan);
    assert!(swaps
        .seats
        .iter()
        .all(|s| s.ledger.counts().form_calls == 1));
}

#[test]
fn b_123_too_little_memory_refuses_the_rest_with_numbers() {
    let (_dir, mut host) = with(Fault::None);
    let model = model();
    host.free_memory = || Some(100 << 20);
    let swaps = auto_swaps(&host, &model, &samples(3), &any_speed("none"), &Silent).unwrap();
    assert!(swaps.seats.is_empty());
    // Whoever has a form is refused for the memory, and the rest for having none.
    let (formed, formless): (Vec<_>, Vec<_>) = swaps.refused.iter().partition(|r| r.form.is_some());
    assert!(!formed.is_empty());
    assert!(formless.iter().all(|r| r.code == "format_no_variant"));
    for r in formed {
        assert_eq!(r.code, "insufficient_memory", "{r:?}");
        assert!(
            r.reason.contains("100 MiB") && r.reason.contains("512 MiB"),
            "{r:?}"
        );
    }
    let a = attach(&host, &model, &samples(3), &any_speed("none"), &Silent).unwrap();
    assert!(a.seats.is_empty() && a.plan.is_host());
    // Exactly the headroom is enough, and so is a system that does not say.
    for free in [|| Some(512 << 20), || None] {
        host.free_memory = free;
        let swaps = auto_swaps(&host, &model, &samples(3), &any_speed("none"), &Silent).unwrap();
        assert!(!swaps.seats.is_empty());
    }
}

#[test]
fn b_342_forms_are_tried_in_order_and_the_first_that_executes_serves() {
    isolate();
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::Scaled, "alpha");
    fixture_copy(dir.path(), Fault::None, "beta");
    fixture_copy(dir.path(), Fault::None, "gamma");
    let host = host(dir.path());
    let model = model();
    let a = attach(&host, &model, &samples(3), &any_speed("none"), &Silent).unwrap();
    assert!(!a.seats.is_empty());
    assert!(a.receipt.seats.iter().all(|s| s.plugin == "beta"));
    // What fell through is in the trail, and what came after the first success was not tried.
    let outcomes: Vec<(&str, Option<&str>)> = a
        .receipt
        .units
        .iter()
        .map(|u| (u.plugin.as_str(), u.code.as_deref()))
        .collect();
    assert!(
        outcomes.contains(&("alpha", Some("bind_parity"))),
        "{outcomes:?}"
    );
    assert!(
        outcomes.iter().all(|(plugin, _)| *plugin != "gamma"),
        "{outcomes:?}"
    );
    // All fail: every rung is listed.
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::Scaled, "alpha");
    fixture_copy(dir.path(), Fault::Half, "beta");
    let host = self::host(dir.path());
    let error = host
        .get("decoder_ffn")
        .unwrap()
        .bind(
            &model,
            MLP,
            &samples(3),
            &any_speed("none"),
            DEFAULT_FLOOR,
            &Silent,
        )
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("alpha:plain") && error.contains("beta:plain"),
        "{error}"
    );
}

#[test]
fn b_360_a_library_is_loaded_once_however_often_it_is_found() {
    let (dir, first) = with(Fault::None);
    let second = host(dir.path());
    let plugin = first.registry.plugin("fixture").unwrap();
    assert_eq!(
        plugin.sha256(),
        second.registry.plugin("fixture").unwrap().sha256()
    );
    let object = format!("{}.so", plugin.sha256());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    // The file's head is mapped once for each time it is loaded.
    let heads = maps.lines().filter(|l| {
        let offset = l.split_whitespace().nth(2);
        l.ends_with(&object) && offset.is_some_and(|o| o.bytes().all(|b| b == b'0'))
    });
    assert_eq!(heads.count(), 1, "{object}");
}

#[test]
fn b_186_b_194_nothing_to_attach_leaves_the_host_as_it_is() {
    isolate();
    let empty = tempfile::tempdir().unwrap();
    let host = host(empty.path());
    let model = model();
    let before = logits(&model, &model.session().host_plan());
    let done = attach(&host, &model, &samples(3), &any_speed("none"), &Silent).unwrap();
    assert!(done.seats.is_empty() && done.receipt.units.is_empty());
    assert!(done.receipt.union.is_none());
    assert!(done.plan.is_host());
    assert_eq!(logits(&model, &done.plan), before);
    // There is one digest, of the whole record, whatever was activated: never the word "none".
    let record = serde_json::to_value(&done.receipt).unwrap();
    assert!(structures::digest::verify(&record));
    assert_eq!(done.receipt.digest.len(), 64);
}

#[test]
fn b_127_b_193_b_196_b_197_b_289_what_is_attached_runs_and_detaching_is_exact_and_idempotent() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let before = logits(&model, &model.session().host_plan());
    let done = attach(&host, &model, &samples(3), &any_speed("none"), &Silent).unwrap();
    assert!(!done.seats.is_empty(), "{:?}", done.receipt.units);
    let ran = |seats: &[std::sync::Arc<structures::seat::Seat>]| -> u64 {
        seats.iter().map(|s| s.ledger.counts().form_calls).sum()
    };
    let served = ran(&done.seats);
    // Arms are switched at will: each is itself again, however often.
    let treated = logits(&model, &done.plan);
    for _ in 0..3 {
        assert_eq!(logits(&model, &model.session().host_plan()), before);
        assert_eq!(logits(&model, &done.plan), treated);
    }
    assert_eq!(ran(&done.seats), served + 4 * done.seats.len() as u64);
    let served = ran(&done.seats) - done.seats.len() as u64;
    let seats = done.seats.clone();
    let active = done.receipt.seams_active.len();
    assert_eq!(active, seats.len());
    done.detach().map_err(|n| n.error).unwrap();
    for _ in 0..2 {
        assert_eq!(logits(&model, &model.session().host_plan()), before);
    }
    assert_eq!(
        ran(&seats),
        served + active as u64,
        "nothing ran after detaching"
    );
}

#[test]
fn b_284_weights_are_the_hosts_own_while_attached() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let digest = |model: &Loaded| -> Vec<(String, u64)> {
        let session = model.session();
        let graph = session.graph();
        let mut sums: Vec<(String, u64)> = (0..graph.values.len())
            .filter_map(|v| graph.param(ValueId(v)))
            .map(|(p, _)| {
                let data = session.param(p).unwrap().unwrap().flatten_all().unwrap();
                let bits = data.to_vec1::<f32>().unwrap();
                let sum = bits.iter().fold(0u64, |h, v| {
                    h.wrapping_mul(31).wrapping_add(u64::from(v.to_bits()))
                });
                (p.to_string(), sum)
            })
            .collect();
        sums.sort();
        sums
    };
    let before = digest(&model);
    assert!(!before.is_empty());
    let done = attach(&host, &model, &samples(3), &any_speed("none"), &Silent).unwrap();
    logits(&model, &done.plan);
    assert_eq!(digest(&model), before, "attached");
    done.detach().map_err(|n| n.error).unwrap();
    assert_eq!(digest(&model), before, "detached");
}

#[test]
fn b_292_the_manifest_follows_what_the_seats_do() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let done = attach(&host, &model, &samples(3), &any_speed("none"), &Silent).unwrap();
    let then = done.manifest(&host);
    logits(&model, &done.plan);
    let now = done.manifest(&host);
    let seats = now["seats"].as_array().unwrap();
    assert_eq!(seats.len(), done.seats.len());
    for (then, now) in then["seats"].as_array().unwrap().iter().zip(seats) {
        let calls = |s: &serde_json::Value| s["form_calls"].as_u64().unwrap();
        assert_eq!(calls(now), calls(then) + 1);
    }
    assert_eq!(now["summary"]["clean"], true);
    assert_eq!(now["receipt"], done.receipt.digest.as_str());
    assert!(now["memory"]["packed_bytes"].is_u64() && now["decisions"].is_array());
}

#[test]
fn b_283_a_model_that_was_loaded_again_takes_no_plan_of_the_first() {
    let (_dir, host) = with(Fault::None);
    let (first, again) = (model(), model());
    let done = attach(&host, &first, &samples(3), &any_speed("none"), &Silent).unwrap();
    let runner = Runner::new(again.session(), 8);
    let mut state = runner.state();
    let error = runner
        .step(&done.plan, &[5, 9], 0, &mut state, None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("another session"), "{error}");
    for fact in ["detach", "attach to this one"] {
        assert!(error.contains(fact), "{error}");
    }
    // The one it was made for goes on.
    logits(&first, &done.plan);
}

#[test]
fn b_285_attaching_is_all_or_nothing() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let before = logits(&model, &model.session().host_plan());
    let ffn = host.get("decoder_ffn").unwrap();
    let bound = ffn
        .bind(
            &model,
            MLP,
            &samples(3),
            &any_speed("none"),
            DEFAULT_FLOOR,
            &Silent,
        )
        .unwrap();
    let served = bound.seat.ledger.counts();
    let mut broken = bound.install.clone();
    broken.name = "broken".into();
    broken.outputs.clear();
    for second in [bound.install.clone(), broken] {
        let both = vec![bound.install.clone(), second];
        let error = model.session().plan(both).map(|_| ()).unwrap_err();
        assert!(!error.to_string().is_empty());
        assert_eq!(logits(&model, &model.session().host_plan()), before);
    }
    assert_eq!(bound.seat.ledger.counts(), served, "nothing ran");
}

#[test]
fn b_310_b_425_a_refusal_is_for_its_form_and_its_sizes() {
    let (_dir, host) = with(Fault::Slow);
    let model = model();
    let options = Options {
        min_speedup: 1.02,
        structures: vec!["decoder_ffn".into()],
        ..any_speed("w8a16_decode")
    };
    let done = attach(&host, &model, &samples(3), &options, &Silent).unwrap();
    let unit = &done.receipt.units[0];
    assert_eq!(
        (unit.outcome.as_str(), unit.form.as_str()),
        ("refused", "int8")
    );
    let reason = unit.reason.as_deref().unwrap();
    for fact in ["rows 24", "says nothing about other sizes"] {
        assert!(reason.contains(fact), "{reason}");
    }
}

#[test]
fn b_170_errors_are_typed() {
    let (_dir, host) = with(Fault::None);
    assert!(matches!(host.get("").map(|_| ()), Err(Error::Catalog(_))));
}
