//! Packed weights of a checkpoint taken over as they are stored: GGUF files and compressed-tensors directories made
//! here from the demo model, through the library's doors and the program.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::{Device, Tensor};
use serde_json::{json, Value as Json};
use structures::adopt::{Wish, BANKS};
use structures::attach::{attach, auto_swaps, Options};
use structures::choose::Pin;
use structures::host::Loaded;
use structures::progress::Silent;
use structures::receipt::RefusalNote;
use structures::replay::replay;
use structures::samples::Samples;
use structures::seat::OnGuardFail;
use structures_fixture_plugin::{fixture_copy, Fault};
use structures_graph::session::Plan;
use structures_models::{Checkpoint, Description};
use structures_plugin_api::formats::{
    amax, bf16_to_f32, f32_to_bf16, f32_to_e4m3_saturating, nvfp4_global_scale, pack_nvfp4,
    unpack_nvfp4, E4M3_VALUES,
};
use structures_tests::in_process::{any_speed, host, made_samples, try_logits};
use structures_tests::{demo, json as run, plugins, structures};

#[path = "../host/models/tests/common/gguf.rs"]
mod write;

fn tensors(dir: &Path) -> Vec<(String, Tensor)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let names: Vec<String> = checkpoint.tensor_infos().map(|t| t.name).collect();
    names
        .into_iter()
        .map(|n| (n.clone(), checkpoint.load(&n).unwrap()))
        .collect()
}

fn tensor(values: &[f32], dims: &[usize]) -> Tensor {
    Tensor::from_slice(values, dims, &Device::Cpu).unwrap()
}

fn samples() -> Samples {
    made_samples(2, 12)
}

fn options(adopt: Option<Wish>) -> Options {
    Options {
        adopt,
        ..any_speed("none")
    }
}

fn logits(model: &Loaded, plan: &Plan) -> Vec<f32> {
    try_logits(model, plan).unwrap()
}

fn close(a: &[f32], b: &[f32]) -> bool {
    let scale = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-4 * scale)
}

/// The demo model as one file; `kind` gives each matrix its type.
fn gguf(dir: &Path, kind: impl Fn(&str) -> GgmlDType) -> PathBuf {
    let path = dir.join("m.gguf");
    let d = Description::open(&demo()).unwrap();
    write::write(
        &path,
        &write::metadata(&d),
        &write::tensors(&d),
        |name| match name.contains("norm") || name.contains("freqs") {
            true => GgmlDType::F32,
            false => kind(name),
        },
    );
    path
}

/// One tensor of a safetensors file.
struct Raw(String, &'static str, Vec<usize>, Vec<u8>);

fn save(path: &Path, tensors: &[Raw]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::<u8>::new());
    for Raw(name, dtype, dims, bytes) in tensors {
        let from = data.len();
        data.extend(bytes);
        let row = json!({"dtype": dtype, "shape": dims, "data_offsets": [from, data.len()]});
        header.insert(name.clone(), row);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The demo model as compressed-tensors writes it: feed-forwards in NVFP4, attention in FP8 with a bf16 scale a channel,
/// everything else as it is. Gives the values of every packed weight too.
fn compressed(dir: &Path) -> Vec<(String, Vec<f32>)> {
    compressed_but(dir, |_| {})
}

/// The same, after somebody spoiled its tensors.
fn compressed_but(dir: &Path, spoil: impl FnOnce(&mut Vec<Raw>)) -> Vec<(String, Vec<f32>)> {
    let (mut raw, mut values) = (Vec::new(), Vec::new());
    for (name, tensor) in tensors(&demo()) {
        let dims = tensor.dims().to_vec();
        let data = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let base = name.strip_suffix(".weight").unwrap().to_string();
        if name.contains(".mlp.") {
            let (n, k) = (dims[0], dims[1]);
            let packed = pack_nvfp4(&data, k, nvfp4_global_scale(amax(&data)) * 0.75);
            values.push((name, unpack_nvfp4(&packed, k)));
            let part = |suffix: &str| format!("{base}.{suffix}");
            let global = packed.global;
            raw.push(Raw(
                part("weight_packed"),
                "U8",
                vec![n, k / 2],
                packed.packed,
            ));
            raw.push(Raw(
                part("weight_scale"),
                "F8_E4M3",
                vec![n, k / 16],
                packed.block_scales,
            ));
            raw.push(Raw(
                part("weight_global_scale"),
                "F32",
                vec![1],
                floats(&[global]),
            ));
            raw.push(Raw(
                part("input_global_scale"),
                "F32",
                vec![1],
                floats(&[1.0]),
            ));
        } else if name.contains("_proj.") {
            let (n, k) = (dims[0], dims[1]);
            let scales: Vec<u16> = data
                .chunks(k)
                .map(|r| f32_to_bf16(amax(r) / 448.0))
                .collect();
            let scale = |i: usize| bf16_to_f32(scales[i / k]);
            let one = |(i, v): (usize, &f32)| f32_to_e4m3_saturating(v / scale(i));
            let codes: Vec<u8> = data.iter().enumerate().map(one).collect();
            let decoded = codes.iter().enumerate();
            let decoded = decoded
                .map(|(i, c)| E4M3_VALUES[usize::from(*c)] * scale(i))
                .collect();
            values.push((name.clone(), decoded));
            raw.push(Raw(name, "F8_E4M3", vec![n, k], codes));
            let scales = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            raw.push(Raw(
                format!("{base}.weight_scale"),
                "BF16",
                vec![n, 1],
                scales,
            ));
        } else {
            raw.push(Raw(name, "F32", dims, floats(&data)));
        }
    }
    spoil(&mut raw);
    save(&dir.join("model.safetensors"), &raw);
    configure(dir, "mixed-precision", json!("compressed-tensors"));
    std::fs::copy(demo().join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
    values
}

fn configure(dir: &Path, format: &str, method: Json) {
    let text = std::fs::read(demo().join("config.json")).unwrap();
    let mut config: Json = serde_json::from_slice(&text).unwrap();
    config["quantization_config"] = json!({
        "quant_method": method, "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": {"format": "nvfp4-pack-quantized", "targets": ["Linear"]}},
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn b_246_blocks_of_a_file_are_taken_over_as_they_are() {
    let portable = plugins(&["portable"]);
    let host = host(portable.path());
    for (dtype, name) in [
        (GgmlDType::Q8_0, "q8_0"),
        (GgmlDType::Q4_0, "q4_0"),
        (GgmlDType::Q4_1, "q4_1"),
        (GgmlDType::Q4K, "q4_k"),
        (GgmlDType::Q6K, "q6_k"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        // As usual files do, one matrix of a pack is in another format.
        let path = gguf(dir.path(), |tensor| match tensor.contains("attn_v") {
            true => GgmlDType::Q6K,
            false => dtype,
        });
        let model = Loaded::open(&path).unwrap();
        let wish = options(Some(Wish::everything()));
        let swaps = auto_swaps(&host, &model, &samples(), &wish, &Silent).unwrap();
        let adopted = swaps.adopted.unwrap();
        // Seven products a layer and the output head, and the embedding is none.
        assert_eq!((adopted.count, adopted.converted), (2 * 7 + 1, 0), "{name}");
        assert!(adopted.formats[name] >= 13 && adopted.formats["q6_k"] >= 2);
        assert_eq!(
            (adopted.median_relative_l2, adopted.max_relative_l2),
            (0.0, 0.0)
        );
        let got = logits(&model, &swaps.plan);
        assert!(
            close(&got, &logits(&model, &model.session().host_plan())),
            "{name}"
        );
        assert!(swaps
            .seats
            .iter()
            .all(|s| s.ledger.counts().form_calls == 1));
        // A weight of it at most a byte and a sixteenth an element.
        let elements = 2 * (512 * 512 * 2 + 512 * 128 * 2 + 3 * 512 * 768) + 264 * 512;
        assert!(
            adopted.packed_bytes <= elements * 17 / 16 + 16_384,
            "{}",
            adopted.packed_bytes
        );
    }
}

#[test]
fn b_246_a_compressed_directory_is_read_and_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let values = compressed(dir.path());
    let model = Loaded::open(dir.path()).unwrap();
    let d = &model.model.description;
    for (name, want) in &values {
        let got = d.checkpoint.load(name).unwrap().flatten_all().unwrap();
        assert!(got.to_vec1::<f32>().unwrap() == *want, "{name}");
    }
    assert_eq!(d.params.unused(&d.checkpoint), Vec::<String>::new());

    let portable = plugins(&["portable"]);
    let host = host(portable.path());
    let before = logits(&model, &model.session().host_plan());
    let wish = options(Some(Wish::everything()));
    let swaps = auto_swaps(&host, &model, &samples(), &wish, &Silent).unwrap();
    let adopted = swaps.adopted.unwrap();
    assert_eq!(
        adopted.formats,
        [("fp8".into(), 8), ("nvfp4".into(), 6)].into()
    );
    assert_eq!((adopted.converted, adopted.max_relative_l2), (0, 0.0));
    assert!(close(&logits(&model, &swaps.plan), &before));

    // A form that keeps its own NVFP4 packs the decoded values again, and what that costs is told a layer.
    let mut wish = options(Some(Wish::parse(&["nvfp4".into()]).unwrap()));
    wish.pins = vec![Pin::parse("decoder_ffn=portable:w4a16_static").unwrap()];
    wish.structures = vec!["decoder_ffn".into()];
    let swaps = auto_swaps(&host, &model, &samples(), &wish, &Silent).unwrap();
    let adopted = swaps.adopted.unwrap();
    assert_eq!((adopted.count, adopted.converted), (6, 6));
    assert!(adopted
        .layers
        .iter()
        .all(|l| l.relative_l2 > 0.0 && l.relative_l2 < 0.15));
    assert!(adopted.median_relative_l2 <= adopted.max_relative_l2);
}

#[test]
fn b_246_what_cannot_be_adopted_is_told() {
    let portable = plugins(&["portable"]);
    let error = |model: &str, more: &[&str]| {
        let mut command = structures(portable.path());
        let (exit, document, _) = run(command
            .args(["attach", model, "--scheme", "none"])
            .args(more));
        (exit, document["error"].clone())
    };
    let (exit, e) = error("demo", &["--adopt=q5_k"]);
    assert_eq!((exit, e["code"].as_str()), (2, Some("format_unknown")));
    assert!(e["message"].as_str().unwrap().contains("q4_k"), "{e}");
    let (exit, e) = error("demo", &["--adopt"]);
    assert_eq!((exit, e["code"].as_str()), (2, Some("nothing_to_adopt")));

    let dir = tempfile::tempdir().unwrap();
    compressed(dir.path());
    let path = dir.path().to_str().unwrap();
    for (format, method, named) in [
        ("int-quantized", "compressed-tensors", "int-quantized"),
        ("x", "gptq", "gptq"),
    ] {
        configure(dir.path(), format, json!(method));
        let (exit, e) = error(path, &["--adopt"]);
        assert_eq!(
            (exit, e["code"].as_str()),
            (1, Some("codec_missing")),
            "{e}"
        );
        assert!(e["message"].as_str().unwrap().contains(named), "{e}");
    }

    // An embedding is stored packed here and is no product.
    let path = gguf(dir.path(), |name| match name {
        "token_embd.weight" => GgmlDType::Q8_0,
        _ => GgmlDType::F32,
    });
    let model = Loaded::open(&path).unwrap();
    let host = host(portable.path());
    let wish = options(Some(Wish::everything()));
    let no = auto_swaps(&host, &model, &samples(), &wish, &Silent)
        .err()
        .unwrap();
    assert_eq!(no.code(), "nothing_to_adopt");
}

#[test]
fn b_246_scales_that_cannot_be_and_weights_that_are_there_twice_are_refused() {
    type Spoil = fn(&mut Vec<Raw>);
    let cases: [(&str, &str, Spoil); 5] = [
        ("down_proj.weight_global_scale", "positive", |raw| {
            let of = |r: &&mut Raw| r.0.ends_with("down_proj.weight_global_scale");
            raw.iter_mut().find(of).unwrap().3 = floats(&[-1.0]);
        }),
        ("q_proj.weight_scale", "finite", |raw| {
            let of = |r: &&mut Raw| r.0.ends_with("q_proj.weight_scale");
            // bf16 NaN
            raw.iter_mut().find(of).unwrap().3[..2].copy_from_slice(&[0xc0, 0x7f]);
        }),
        ("q_proj.weight_scale", "at least 0", |raw| {
            let of = |r: &&mut Raw| r.0.ends_with("q_proj.weight_scale");
            // bf16 -1
            raw.iter_mut().find(of).unwrap().3[..2].copy_from_slice(&[0x80, 0xbf]);
        }),
        ("up_proj.weight_packed", "a weight once", |raw| {
            let of = |r: &&Raw| r.0.ends_with("up_proj.weight_packed");
            let name = raw.iter().find(of).unwrap().0.replace("_packed", "");
            raw.push(Raw(name, "F32", vec![1, 1], floats(&[0.0])));
        }),
        ("zero points", "symmetric", |raw| {
            let of = |r: &&Raw| r.0.ends_with("q_proj.weight_scale");
            let name = raw
                .iter()
                .find(of)
                .unwrap()
                .0
                .replace("_scale", "_zero_point");
            raw.push(Raw(name, "F32", vec![1], floats(&[3.0])));
        }),
    ];
    for (item, what, spoil) in cases {
        let dir = tempfile::tempdir().unwrap();
        compressed_but(dir.path(), spoil);
        let error = Loaded::open(dir.path())
            .map(|_| ())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(item) && error.contains(what),
            "{item}: {error}"
        );
    }
}

#[test]
fn b_247_expert_banks_are_looked_for_and_none_is_an_error() {
    let portable = plugins(&["portable"]);
    let (exit, document, _) = run(structures(portable.path())
        .args(["attach", "demo", "--scheme", "none"])
        .arg(format!("--adopt={BANKS}")));
    assert_eq!(
        (exit, document["error"]["code"].as_str()),
        (2, Some("nothing_to_adopt"))
    );
    let message = document["error"]["message"].as_str().unwrap();
    assert!(message.contains("no bank of experts"), "{message}");
    // A format of banks that there is not is unknown like any other.
    let error = Wish::parse(&["moe_experts_int4".into()]).unwrap_err();
    assert_eq!(error.code(), "format_unknown");
}

#[test]
fn b_248_it_is_reported_and_replayed_and_has_no_detach() {
    let dir = tempfile::tempdir().unwrap();
    compressed(dir.path());
    let model = Loaded::open(dir.path()).unwrap();
    let portable = plugins(&["portable"]);
    let host = host(portable.path());
    let wish = options(Some(Wish::everything()));
    let done = attach(&host, &model, &samples(), &wish, &Silent).unwrap();
    let adopted = done.receipt.adopted.clone().unwrap();
    assert_eq!(
        (adopted.count, adopted.layers.len(), adopted.detachable),
        (14, 14, false)
    );
    assert_eq!(adopted.max_relative_l2, 0.0);
    assert_eq!(adopted.band, "pass");
    assert!(adopted.metrics.get("top1_agreement").unwrap() >= 0.99);
    let text = adopted.summary();
    assert!(
        text.contains("6 nvfp4") && text.contains("8 fp8") && text.contains("no detach"),
        "{text}"
    );
    assert_eq!(done.adopted.len(), adopted.seats.len());
    let value = serde_json::to_value(&done.receipt).unwrap();
    assert!(structures::digest::verify(&value));
    assert_eq!(
        value["adopted"]["seats"][0]["packed"]
            .as_object()
            .unwrap()
            .len(),
        3
    );
    let want = logits(&model, &done.plan);

    let (plan, seats) = replay(
        &host,
        &model,
        &done.receipt,
        &[5, 9, 2, 7],
        OnGuardFail::Fallback,
    )
    .unwrap();
    assert_eq!(seats.len(), adopted.seats.len() + done.receipt.seats.len());
    assert_eq!(logits(&model, &plan), want);

    let no = done.detach().map_err(|n| n.error).unwrap_err();
    assert_eq!(no.code(), "adopted_no_detach");
    assert!(no.to_string().contains("open the model again"), "{no}");
}

#[test]
fn b_246_a_slot_that_is_not_packed_leaves_its_siblings_packed() {
    let portable = plugins(&["portable"]);
    let host = host(portable.path());
    let dir = tempfile::tempdir().unwrap();
    // q and k in a format nobody adopts, v in one that is: what popular files look like.
    let path = gguf(dir.path(), |tensor| match tensor.contains("attn_v") {
        true => GgmlDType::Q8_0,
        false => GgmlDType::Q5_0,
    });
    let model = Loaded::open(&path).unwrap();
    let mut wish = options(Some(Wish::everything()));
    wish.structures = vec!["qkv_pack".into()];
    let swaps = auto_swaps(&host, &model, &samples(), &wish, &Silent).unwrap();
    let adopted = swaps.adopted.unwrap();
    assert_eq!((adopted.count, adopted.converted), (2, 0));
    let (plain, packed) = (4 * (512 * 512 + 128 * 512), 128 * 512 / 32 * 34);
    let most = 2 * (plain + packed);
    assert!(
        (most..most + 16_384).contains(&(adopted.packed_bytes as usize)),
        "{} of {most}",
        adopted.packed_bytes
    );
    let got = logits(&model, &swaps.plan);
    assert!(close(&got, &logits(&model, &model.session().host_plan())));
}

#[test]
fn b_246_what_others_took_a_part_of_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = gguf(dir.path(), |_| GgmlDType::Q8_0);
    let model = Loaded::open(&path).unwrap();
    let portable = plugins(&["portable"]);
    let host = host(portable.path());
    let of_packs = |refused: &[RefusalNote]| -> Vec<(String, String)> {
        let rows = refused.iter().filter(|r| r.structure == "qkv_pack");
        rows.map(|r| (r.stage.clone(), r.code.clone())).collect()
    };
    // The packs are left; of their three products, `linear_proj` takes q alone.
    let mut wish = options(Some(Wish::everything()));
    wish.pins = vec![Pin::parse("qkv_pack=portable:w4a16_static").unwrap()];
    let swaps = auto_swaps(&host, &model, &samples(), &wish, &Silent).unwrap();
    let adopted = swaps.adopted.unwrap();
    let paths: Vec<&str> = adopted.seats.iter().map(|s| s.path.as_str()).collect();
    let took = |name: &str| paths.iter().any(|path| path.ends_with(name));
    let only_q = took(".q_proj") && !took(".k_proj") && !took(".v_proj");
    assert!(only_q, "{paths:?}");
    let row = ("adopt".to_string(), "format_no_variant".to_string());
    assert_eq!(of_packs(&swaps.refused), [row.clone(), row]);
    // All of it taken by a wider seam: nothing is missing.
    let wish = options(Some(Wish::everything()));
    let swaps = auto_swaps(&host, &model, &samples(), &wish, &Silent).unwrap();
    assert!(
        swaps.refused.iter().all(|r| r.stage != "adopt"),
        "{:?}",
        swaps.refused
    );
}

#[test]
fn b_246_who_could_not_take_a_seat_is_told_and_who_serves_it_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    compressed(dir.path());
    let portable = plugins(&["portable"]);
    fixture_copy(portable.path(), Fault::RefusesPacked, "eager");
    let model = Loaded::open(dir.path()).unwrap();
    let wish = options(Some(Wish::everything()));
    let done = attach(&host(portable.path()), &model, &samples(), &wish, &Silent).unwrap();
    let adopted = done.receipt.adopted.as_ref().unwrap();
    let n = adopted.seats.len();
    assert!(adopted.seats.iter().all(|s| s.plugin == "portable"));
    let planted = done.receipt.refused.iter().filter(|r| {
        let who = (r.plugin.as_deref(), r.form.as_deref());
        (r.stage.as_str(), r.code.as_str()) == ("adopt", "planted_no")
            && who == (Some("eager"), Some("plain"))
    });
    assert_eq!(planted.count(), n);
    let text = adopted.summary();
    assert!(
        text.contains(&format!("in {n} seats ({n} portable:f32)")),
        "{text}"
    );

    let out = structures(portable.path())
        .args([
            "generate",
            "--adopt",
            "--prompt",
            "the",
            "--max-new-tokens",
            "1",
        ])
        .arg(dir.path())
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&out.stderr);
    assert!(
        log.contains(&format!("not bound: {n} x planted_no")),
        "{log}"
    );
}

#[test]
fn b_246_what_does_not_hold_is_used_nowhere_and_the_receipt_says_so() {
    let dir = tempfile::tempdir().unwrap();
    compressed(dir.path());
    let portable = plugins(&["portable"]);
    let receipts = tempfile::tempdir().unwrap();
    let (exit, receipt, log) = run(structures(portable.path())
        .args([
            "attach",
            "--scheme",
            "none",
            "--adopt",
            "--floor",
            "kl_per_token=0",
        ])
        .args(["--rounds", "1", "--iters", "1", "--max-samples", "1"])
        .arg("--receipt-dir")
        .arg(receipts.path())
        .arg(dir.path()));
    // `none` asks for nothing, so that nothing active is no refusal of it; the adoption was.
    assert_eq!(exit, 3, "{log}");
    assert_eq!(
        receipt["adopted"]["refused"]["code"], "floor_not_met",
        "{receipt}"
    );
    assert_eq!(receipt["adopted"]["seats"], json!([]));
    assert_eq!(receipt["adopted"]["packed_bytes"], 0);
    let baseline = receipt["timing"]["baseline"].as_str().unwrap();
    assert!(!baseline.contains("adopted"), "{baseline}");
    let kept = receipt["kept_host"].as_array().unwrap();
    assert!(kept.iter().all(|k| k["code"] != "owned_by"), "{kept:?}");
    assert_eq!(std::fs::read_dir(receipts.path()).unwrap().count(), 1);
}

#[test]
fn b_246_a_decision_for_the_host_is_not_adopted_over() {
    let dir = tempfile::tempdir().unwrap();
    compressed(dir.path());
    let model = Loaded::open(dir.path()).unwrap();
    let portable = plugins(&["portable"]);
    let mut host = host(portable.path());
    let made = json!({"schema": 1, "decisions": [{
        "device": structures::environment::cpu_name(), "structure": "decoder_ffn",
        "rows": [1, 4096], "winner": "host",
    }]});
    let file = dir.path().join("decisions.json");
    std::fs::write(&file, made.to_string()).unwrap();
    host.decisions = structures::decisions::Store::open(&file);
    assert_eq!(host.decisions.warning(), None);
    let wish = options(Some(Wish::everything()));
    let done = attach(&host, &model, &samples(), &wish, &Silent).unwrap();
    let adopted = done.receipt.adopted.as_ref().unwrap();
    assert!(adopted.seats.iter().all(|s| s.structure != "decoder_ffn"));
    let kept = done
        .receipt
        .kept_host
        .iter()
        .filter(|k| k.structure == "decoder_ffn");
    assert!(kept.clone().count() == 2 && kept.clone().all(|k| k.code == "decided_host"));
    let refused = &done.receipt.refused;
    assert!(refused
        .iter()
        .any(|r| r.stage == "adopt" && r.code == "decided_host"));
    // What lost its operations to an adopted pack says so, not that quantisation is off.
    let of_a_pack = |k: &&structures::receipt::RefusalNote| k.path.ends_with(".q_proj");
    let q = done.receipt.kept_host.iter().find(of_a_pack).unwrap();
    assert_eq!(q.code, "owned_by");
    let baseline = &done.receipt.timing.baseline;
    assert!(baseline.contains("adopted seats"), "{baseline}");
}

#[test]
fn fault_a_receipt_sealed_again_that_contradicts_itself() {
    let dir = tempfile::tempdir().unwrap();
    compressed(dir.path());
    let model = Loaded::open(dir.path()).unwrap();
    let portable = plugins(&["portable"]);
    let host = host(portable.path());
    let mut wish = options(Some(Wish::parse(&["nvfp4".into()]).unwrap()));
    wish.scheme = "fp8_static".into();
    wish.pins = vec![Pin::parse("qkv_pack=portable:fp8_static").unwrap()];
    wish.structures = vec!["decoder_ffn".into(), "qkv_pack".into()];
    let done = attach(&host, &model, &samples(), &wish, &Silent).unwrap();
    assert!(!done.receipt.seats.is_empty(), "{:?}", done.receipt.units);
    let value = serde_json::to_value(&done.receipt).unwrap();
    type Edit = fn(&mut Json);
    let edits: [(&str, Edit); 4] = [
        ("has no row", |r| r["plugins"] = json!([])),
        ("is listed twice", |r| {
            let again = r["seats"][0].clone();
            r["seats"].as_array_mut().unwrap().push(again);
        }),
        ("says otherwise at", |r| {
            let statistics = r["seats"][0]["statistics"].as_object_mut().unwrap();
            for (_, values) in statistics.iter_mut() {
                let amax = values[0].as_f64().unwrap();
                *values = json!([amax * 100.0]);
            }
        }),
        ("was taken as stored", |r| {
            r["adopted"]["seats"][0]["packed"] = json!({});
        }),
    ];
    for (named, edit) in edits {
        let mut forged = value.clone();
        edit(&mut forged);
        structures::digest::seal(&mut forged).unwrap();
        assert!(structures::digest::verify(&forged));
        let forged = serde_json::from_value(forged).unwrap();
        let mode = OnGuardFail::Fallback;
        let no = replay(&host, &model, &forged, &[5, 9, 2, 7], mode)
            .err()
            .unwrap();
        assert_eq!(no.code(), "receipt_mismatch", "{named}");
        assert!(no.to_string().contains(named), "{named}: {no}");
    }
}

#[test]
fn b_248_the_program_prints_the_summary() {
    let dir = tempfile::tempdir().unwrap();
    compressed(dir.path());
    let portable = plugins(&["portable"]);
    let out = structures(portable.path())
        .args([
            "generate",
            "--adopt",
            "--prompt",
            "the",
            "--max-new-tokens",
            "3",
        ])
        .arg(dir.path())
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{log}");
    assert!(
        log.contains("adopted at load time: 14 weights (8 fp8, 6 nvfp4)"),
        "{log}"
    );
    assert!(
        log.contains("relative L2 median 0.00e0, max 0.00e0"),
        "{log}"
    );
}

#[test]
fn fault_packed_rows_changed_after_their_receipt() {
    let dir = tempfile::tempdir().unwrap();
    let path = gguf(dir.path(), |_| GgmlDType::Q8_0);
    let model = Loaded::open(&path).unwrap();
    let portable = plugins(&["portable"]);
    let host = host(portable.path());
    let wish = options(Some(Wish::everything()));
    let done = attach(&host, &model, &samples(), &wish, &Silent).unwrap();
    let again = |model: &Loaded, receipt| {
        replay(&host, model, receipt, &[5, 9, 2, 7], OnGuardFail::Fallback).map(|_| ())
    };
    again(&model, &done.receipt).unwrap();
    let whole = std::fs::read(&path).unwrap();
    // One bit of one code.
    let mut bytes = whole.clone();
    let at = bytes.len() - 40;
    bytes[at] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let error = again(&Loaded::open(&path).unwrap(), &done.receipt).unwrap_err();
    assert_eq!(error.code(), "receipt_mismatch");
    assert!(error.to_string().contains("sha256"), "{error}");
    // The same values in another format are not the rows it was bound with.
    std::fs::write(&path, &whole).unwrap();
    let mut other = done.receipt.clone();
    let adopted = other.adopted.as_mut().unwrap();
    for format in adopted.seats[0].packed.values_mut() {
        *format = "q4_0".into();
    }
    let error = again(&model, &other).unwrap_err();
    assert_eq!(error.code(), "receipt_mismatch");
    assert!(error.to_string().contains("packed"), "{error}");
    // Rows that end too early never get that far.
    std::fs::write(&path, &whole[..whole.len() - 40]).unwrap();
    assert!(Loaded::open(&path).is_err());
}
