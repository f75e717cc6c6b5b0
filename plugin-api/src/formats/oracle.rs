//! The oracle's numbers, code for code.

use serde_json::Value;

use super::*;

/// `$STRUCTURES_ORACLE/calibration.json`, else the copy in the repository.
fn calibration() -> Value {
    let own = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/oracle/calibration.json");
    let given = std::env::var_os("STRUCTURES_ORACLE")
        .map(|root| std::path::PathBuf::from(root).join("calibration.json"));
    let path = given.filter(|path| path.is_file()).unwrap_or(own);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("the oracle parses")
}

fn list(value: &Value) -> &[Value] {
    value
        .as_array()
        .unwrap_or_else(|| panic!("not a list: {value}"))
}

/// A number; NaN and infinities are strings. Inline tensors are f32 written as decimals.
fn number(value: &Value) -> f64 {
    match value.as_str() {
        Some("nan") => f64::NAN,
        Some("inf") => f64::INFINITY,
        Some("-inf") => f64::NEG_INFINITY,
        _ => value
            .as_f64()
            .unwrap_or_else(|| panic!("not a number: {value}")),
    }
}

/// The shortest decimal parses back to the same f32, so it is parsed as one: not by way of f64.
fn floats(value: &Value) -> Vec<f32> {
    list(value)
        .iter()
        .map(|v| {
            v.as_f64().map_or(number(v) as f32, |_| {
                v.to_string().parse().expect("a float")
            })
        })
        .collect()
}

fn codes(value: &Value) -> Vec<u8> {
    list(value)
        .iter()
        .map(|v| v.as_i64().expect("a code") as u8)
        .collect()
}

fn from_bits(value: &Value) -> f32 {
    f32::from_bits(value.as_u64().expect("bits") as u32)
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn assert_same(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!(same(*a, *b), "{name} [{i}]: {a} is not {b}");
    }
}

fn check_fp8_table(
    table: &Value,
    decode: fn(u8) -> f32,
    encode: fn(f32) -> u8,
    saturating: fn(f32) -> u8,
) {
    let name = table["dtype"].as_str().expect("a name");
    let decoded: Vec<f32> = (0..=u8::MAX).map(decode).collect();
    assert_same(name, &decoded, &floats(&table["decode"]));
    let rows = &table["encode"];
    let inputs = list(&rows["input_f32_bits"]);
    let plain = codes(&rows["code"]);
    let clamped = codes(&rows["code_saturating"]);
    assert!(!inputs.is_empty(), "{name}: {} rows", inputs.len());
    for (i, input) in inputs.iter().enumerate() {
        let input = from_bits(input);
        let found = (encode(input), saturating(input));
        let nan = |code: u8| decode(code).is_nan();
        let alike = |a: u8, b: u8| a == b || (nan(a) && nan(b));
        assert!(
            alike(found.0, plain[i]) && alike(found.1, clamped[i]),
            "{name} of {input:e}: {found:?} is not ({}, {})",
            plain[i],
            clamped[i]
        );
    }
}

fn check_fp8_tensors(rows: &Value) {
    for row in list(rows) {
        let name = row["name"].as_str().expect("a name");
        // A clipped amax is a float64 number there.
        let scale = fp8_scale_f64(number(&row["amax"])) as f32;
        assert!(
            same(scale, from_bits(&row["scale_f32_bits"])),
            "{name}: scale {scale}"
        );
        let mut data = floats(&row["input"]);
        let mut found = vec![0; data.len()];
        quantise_e4m3(&data, scale, &mut found);
        assert_eq!(found, codes(&row["codes"]), "{name}");
        fake_quant_e4m3(&mut data, scale);
        assert_same(name, &data, &floats(&row["dequantized"]));
    }
}

fn check_nvfp4(group: &Value) {
    let decoded: Vec<f32> = (0..16).map(e2m1_to_f32).collect();
    assert_same("e2m1", &decoded, &floats(&group["decode"]));
    let rows = &group["encode"];
    let inputs = list(&rows["input_f32_bits"]);
    let expected = codes(&rows["code"]);
    for (input, code) in inputs.iter().zip(&expected) {
        let input = from_bits(input);
        assert_eq!(f32_to_e2m1(input), *code, "e2m1 of {input:e}");
    }
    for case in list(&group["cases"]) {
        let name = case["name"].as_str().expect("a name");
        let weight = floats(&case["weight"]);
        let k = case["k"].as_u64().expect("k") as usize;
        let global = match name.ends_with("unit_global") {
            true => 1.0,
            false => nvfp4_global_scale(amax(&weight)),
        };
        assert!(
            same(global, from_bits(&case["global_scale_f32_bits"])),
            "{name}: global {global}"
        );
        let packed = pack_nvfp4(&weight, k, global);
        assert_eq!(
            packed.block_scales,
            codes(&case["block_scale_codes"]),
            "{name}"
        );
        assert_eq!(packed.packed, codes(&case["packed"]), "{name}");
        assert_same(
            name,
            &unpack_nvfp4(&packed, k),
            &floats(&case["dequantized"]),
        );
    }
}

fn check_int8(rows: &Value) {
    for row in list(rows) {
        let name = row["name"].as_str().expect("a name");
        let k = row["k"].as_u64().expect("k") as usize;
        let weight = floats(&row["weight"]);
        let scales: Vec<f32> = weight
            .chunks_exact(k)
            .map(|row| int8_scale(amax(row)))
            .collect();
        let bits = list(&row["scale_f32_bits"])
            .iter()
            .map(from_bits)
            .collect::<Vec<_>>();
        assert_same(name, &scales, &bits);
        let found: Vec<i8> = weight
            .iter()
            .enumerate()
            .map(|(i, v)| quantise_int8(*v, scales[i / k]))
            .collect();
        assert_eq!(
            found,
            codes(&row["codes"])
                .iter()
                .map(|c| *c as i8)
                .collect::<Vec<_>>(),
            "{name}"
        );
        let mut rounded = weight.clone();
        let n = scales.len();
        let matrix = WeightMatrix::out_in(&mut rounded, n, k);
        round_weight(crate::describe::WeightFormat::Int8PerChannel, matrix);
        // Compared as numbers: the oracle keeps the sign of a zero, an int8 code has none.
        assert_eq!(rounded, floats(&row["dequantized"]), "{name}");
    }
}

#[test]
fn oracle_calibration_formats() {
    let oracle = calibration();
    let scales = list(&oracle["fp8_scale"]);
    assert!(!scales.is_empty());
    for row in scales {
        let (amax, scale) = (number(&row[0]), number(&row[1]));
        assert_eq!(fp8_scale_f64(amax), scale, "scale of {amax}");
    }
    check_fp8_table(
        &oracle["fp8_e4m3fn"],
        e4m3_to_f32,
        f32_to_e4m3,
        f32_to_e4m3_saturating,
    );
    check_fp8_table(
        &oracle["fp8_e5m2"],
        e5m2_to_f32,
        f32_to_e5m2,
        f32_to_e5m2_saturating,
    );
    check_fp8_tensors(&oracle["fp8_tensors"]);
    check_nvfp4(&oracle["nvfp4"]);
    check_int8(&oracle["int8"]);
}
