//! References and dataflows against tensors that another library computed.
//!
//! Reads `$STRUCTURES_ORACLE/reference` where there is one, else the repository's small copy. A structure that is
//! not built yet stands in `tests/oracle-pending.txt` as `reference <name>`; any other unknown one fails.
//! Weights that no slot declares are those of host modules around or inside the region: they become the closures of
//! the roles that the dataflow calls ([`roles`]).

mod roles;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use half::bf16;
use serde_json::Value;
use structures_catalog::expr::{eval_int, BinaryOp, Datum, Expr, Fact, Facts};
use structures_catalog::invariance::{invariance, Tolerance};
use structures_catalog::spec::{DimExpr, Source};
use structures_catalog::{dim_size, Catalog, CatalogError, Dims, Feed, Shape, Shapes, Spec};
use structures_graph::{AttrValue, Attrs};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A file of the oracle if it has it, else our own copy. A relative directory is below the repository.
fn oracle(theirs: &str, ours: &str) -> PathBuf {
    if let Some(given) = std::env::var_os("STRUCTURES_ORACLE") {
        let dir = repository().join(given);
        assert!(
            dir.is_dir(),
            "STRUCTURES_ORACLE: no directory {}",
            dir.display()
        );
        let path = dir.join(theirs);
        if path.exists() {
            return path;
        }
    }
    repository().join("tests/fixtures/oracle").join(ours)
}

fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The entry, or `None` when it is listed as pending.
fn entry<'a>(
    catalog: &'a Catalog,
    name: &str,
    skipped: &mut BTreeMap<String, usize>,
) -> Option<&'a Spec> {
    if let Ok(spec) = catalog.get(name) {
        return Some(spec);
    }
    let list = repository().join("tests/oracle-pending.txt");
    let text = std::fs::read_to_string(&list).expect("tests/oracle-pending.txt");
    let line = format!("reference {name}");
    assert!(
        text.lines().any(|l| l.trim() == line),
        "structure `{name}` is neither in the catalog nor pending: build it, or add `{line}` to the list"
    );
    *skipped.entry(name.into()).or_default() += 1;
    None
}

fn report(ran: usize, skipped: &BTreeMap<String, usize>) {
    println!("ran {ran}");
    for (name, n) in skipped {
        println!("skipped {n} of {name} (pending)");
    }
}

fn list<'a>(of: &'a Value, key: &str) -> Vec<&'a Value> {
    of[key]
        .as_array()
        .map(|a| a.iter().collect())
        .unwrap_or_default()
}

fn map(of: &Value) -> Vec<(&String, &Value)> {
    of.as_object()
        .map(|m| m.iter().collect())
        .unwrap_or_default()
}

fn variant(case: &Value) -> BTreeMap<String, String> {
    let words = map(&case["variant"]).into_iter();
    words
        .filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_string())))
        .collect()
}

fn params(case: &Value) -> Attrs {
    let values = map(&case["params"]).into_iter();
    values
        .filter_map(|(k, v)| {
            let value = match v {
                Value::Bool(b) => AttrValue::Flag(*b),
                Value::Number(n) => n
                    .as_i64()
                    .map(AttrValue::Int)
                    .or_else(|| n.as_f64().map(AttrValue::Float))?,
                Value::String(s) => AttrValue::Word(s.clone()),
                Value::Null => AttrValue::Absent,
                _ => return None,
            };
            Some((k.clone(), value))
        })
        .collect()
}

fn floats(t: &Tensor) -> Vec<f32> {
    let t = t.to_dtype(DType::F32).expect("f32");
    t.flatten_all().expect("flat").to_vec1().expect("vec")
}

fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    let square = |v: f64| v * v;
    let distance: f64 = a
        .iter()
        .zip(b)
        .map(|(x, y)| square(f64::from(*x) - f64::from(*y)))
        .sum();
    let norm: f64 = b.iter().map(|y| square(f64::from(*y))).sum();
    if distance == 0.0 {
        0.0
    } else {
        (distance / norm).sqrt()
    }
}

/// How far apart two bf16 numbers are, in steps.
fn steps(a: f32, b: f32) -> i32 {
    let order = |v: f32| {
        let bits = i32::from(bf16::from_f32(v).to_bits());
        if bits & 0x8000 == 0 {
            bits
        } else {
            0x8000 - bits
        }
    };
    (order(a) - order(b)).abs()
}

/// Figures over all cases, for the log.
#[derive(Default)]
struct Worst {
    f32_error: f32,
    bf16_steps: i32,
    bf16_ratio: f64,
}

impl Worst {
    fn check(&mut self, what: &str, got: &Tensor, want: &Tensor, exact: Option<&Tensor>) {
        assert_eq!(got.dims(), want.dims(), "{what}: shape");
        assert_eq!(got.dtype(), want.dtype(), "{what}: dtype");
        let (a, b) = (floats(got), floats(want));
        match exact {
            None => {
                let scale = b.iter().fold(0f32, |m, v| m.max(v.abs()));
                let error = a
                    .iter()
                    .zip(&b)
                    .fold(0f32, |m, (x, y)| m.max((x - y).abs()));
                assert!(a.iter().all(|v| v.is_finite()), "{what}: not finite");
                assert!(
                    error <= 1e-5 * scale,
                    "{what}: differs by {error:e} of {scale:e}"
                );
                if scale > 0.0 {
                    self.f32_error = self.f32_error.max(error / scale);
                }
            }
            Some(exact) => {
                let exact = floats(exact);
                let far = a
                    .iter()
                    .zip(&b)
                    .map(|(x, y)| steps(*x, *y))
                    .max()
                    .unwrap_or(0);
                let (ours, theirs) = (relative_l2(&a, &exact), relative_l2(&b, &exact));
                assert!(
                    far <= 1 || ours <= 1.25 * theirs,
                    "{what}: {far} bf16 steps; relative L2 {ours:e}, the oracle's own is {theirs:e}"
                );
                self.bf16_steps = self.bf16_steps.max(far);
                if theirs > 0.0 {
                    self.bf16_ratio = self.bf16_ratio.max(ours / theirs);
                }
            }
        }
    }
}

#[test]
fn oracle_reference() {
    let index_path = oracle("reference/index.json", "reference/index.json");
    let dir = index_path.parent().expect("a directory");
    let index = json(&index_path);
    let catalog = Catalog::builtin().expect("built-in entries load");
    let (mut ran, mut skipped, mut worst) = (0, BTreeMap::new(), Worst::default());
    for case in list(&index, "cases") {
        let name = case["structure"].as_str().expect("structure");
        let id = case["id"].as_str().unwrap_or("?");
        let Some(spec) = entry(&catalog, name, &mut skipped) else {
            continue;
        };
        let file = dir.join(case["file"].as_str().expect("file"));
        let tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect(id);
        let named = |part: &str| -> BTreeMap<String, Tensor> {
            let of = map(&case[part]).into_iter();
            of.map(|(k, v)| {
                (
                    k.clone(),
                    tensors[v["tensor"].as_str().expect("tensor")].clone(),
                )
            })
            .collect()
        };
        let bf16_case = case["dtype"] == "bfloat16";
        let dtype = if bf16_case { DType::BF16 } else { DType::F32 };
        // A convolution's filter is one row of the slot; its own result is another name of the output.
        let rows = |(k, t): (String, Tensor)| match k.strip_suffix("_conv") {
            Some(slot) => (slot.to_string(), t.flatten_from(1).expect(id)),
            None => (k, t),
        };
        let (weights, foreign): (BTreeMap<_, _>, BTreeMap<_, _>) = named("weights")
            .into_iter()
            .map(rows)
            .partition(|(n, _)| declares(spec, n));
        let orientation = |weight: &str| {
            let text = &index["orientations"][name][weight];
            text.as_str().is_some_and(|t| t.contains("(out,in)"))
        };
        let eps = case["params"]["eps"].as_f64().unwrap_or(1e-6);
        let feed = Feed {
            inputs: named("inputs"),
            weights,
            params: params(case),
            dtype: bf16_case.then_some(DType::BF16),
            calls: roles::closures(foreign, &orientation, eps, dtype),
            ..Feed::default()
        };
        let variant = variant(case);
        let runs = [
            ("reference", spec.call_reference(&variant, &feed)),
            ("dataflow", spec.call_dataflow(&variant, &feed)),
        ];
        for (way, outputs) in runs {
            let outputs: BTreeMap<_, _> = outputs
                .unwrap_or_else(|e| panic!("{id} by {way}: {e}"))
                .into_iter()
                .collect();
            let mut expected = named("outputs");
            let captures = captures(spec, &mut expected);
            if !captures.is_empty() {
                judge_captures(spec, case, id, &captures);
            }
            let names: Vec<_> = outputs.keys().map(String::as_str).collect();
            let mut ports: Vec<_> = expected.keys().map(|n| port_of(n)).collect();
            ports.dedup();
            assert_eq!(names, ports, "{id} by {way}: outputs");
            for (port, want) in &expected {
                let exact = case["outputs_f32_from_same_inputs"][port].as_str();
                let exact = exact.map(|n| &tensors[n]);
                assert!(exact.is_some() == bf16_case, "{id}: out_f32");
                worst.check(
                    &format!("{id} by {way}, {port}"),
                    &outputs[port_of(port)],
                    want,
                    exact,
                );
            }
        }
        ran += 1;
    }
    for refusal in list(&index, "refusals") {
        let name = refusal["structure"].as_str().expect("structure");
        let Some(spec) = entry(&catalog, name, &mut skipped) else {
            continue;
        };
        refused(spec, refusal);
        ran += 1;
    }
    assert!(ran > 0, "no case ran");
    report(ran, &skipped);
    println!(
        "largest f32 error {:e}; bf16: {} steps, {:.3} of the oracle's own error",
        worst.f32_error, worst.bf16_steps, worst.bf16_ratio
    );
}

fn port_of(name: &str) -> &str {
    name.strip_suffix("_conv").unwrap_or(name)
}

/// Whether a weight belongs to a slot of the entry; else it is a host module's.
fn declares(spec: &Spec, weight: &str) -> bool {
    let sources = spec.declared_sources();
    sources.iter().any(|(s, _)| s.slot && s.name == weight)
}

/// Outputs that the boundary does not have: what the host made at each turn of a loop, in order.
fn captures(spec: &Spec, outputs: &mut BTreeMap<String, Tensor>) -> Vec<Tensor> {
    let turn = |name: &str| -> Option<usize> {
        let declared = spec.outputs.iter().any(|p| p.name == name);
        if declared {
            return None;
        }
        name.strip_prefix("capture_")?.parse().ok()
    };
    let mut found: Vec<(usize, Tensor)> = outputs
        .iter()
        .filter_map(|(n, t)| Some((turn(n)?, t.clone())))
        .collect();
    outputs.retain(|n, _| turn(n).is_none());
    found.sort_by_key(|(n, _)| *n);
    found.into_iter().map(|(_, t)| t).collect()
}

/// `params.verdict.static`: whether all turns agree with the first.
fn judge_captures(spec: &Spec, case: &Value, id: &str, captures: &[Tensor]) {
    let params = &case["params"];
    let number = |key: &str| {
        params[key]
            .as_f64()
            .unwrap_or_else(|| panic!("{id}: {key}"))
    };
    let tolerance = Tolerance {
        rtol: number("rtol"),
        atol: number("atol"),
    };
    assert_eq!(
        Some(captures.len() as u64),
        params["captures"].as_u64(),
        "{id}"
    );
    let least = spec.gates.other["min_hot_loop_captures"]
        .as_u64()
        .expect(id);
    let verdict = invariance(captures, tolerance, least as usize).expect(id);
    let want = params["verdict"]["static"].as_bool().expect(id);
    assert_eq!(verdict.is_static(), want, "{id}: {verdict:?}");
}

/// The rest of the call is made right, so that only the named fault can be the reason.
fn refused(spec: &Spec, case: &Value) {
    let id = case["id"].as_str().unwrap_or("?");
    let mut variant = variant(case);
    for (name, axis) in spec.variants.iter().filter(|(_, a)| a.host) {
        let usual = axis.default.as_ref().or_else(|| axis.values.keys().next());
        variant
            .entry(name.clone())
            .or_insert(usual.expect("a value").clone());
    }
    let mut feed = Feed {
        params: params(case),
        ..Feed::default()
    };
    let given: Shapes = map(&case["shapes"])
        .into_iter()
        .map(|(k, v)| (k.clone(), shape(v)))
        .collect();
    let sources = spec.declared_sources();
    let dims = completed(spec, &variant, &feed.params, &given, &sources);
    // What every call needs and an attribute does not default to.
    feed.params
        .entry("eps".into())
        .or_insert(AttrValue::Float(1e-6));
    let expect = case["expect"].as_str().expect("expect");
    for (s, must) in &sources {
        let shape: Option<Vec<usize>> = match given.get(&s.name) {
            Some(shape) => Some(shape.clone()),
            // An input that only some axes need is no fault of the call.
            None if *must || !s.slot && expect != "missing_input" => {
                s.dims.iter().map(|d| dim_size(d, &dims)).collect()
            }
            None => None,
        };
        let Some(shape) = shape else { continue };
        let t = Tensor::ones(shape, DType::F32, &Device::Cpu).expect("ones");
        if s.slot {
            feed.weights.insert(s.name.clone(), t);
        } else {
            feed.inputs.insert(s.name.clone(), t);
        }
    }
    feed.calls = roles::identities(spec);
    for (way, outcome) in [
        ("reference", spec.call_reference(&variant, &feed)),
        ("dataflow", spec.call_dataflow(&variant, &feed)),
    ] {
        let kind = match outcome {
            Ok(_) => panic!("{id} by {way}: accepted, expected {expect}"),
            Err(CatalogError::RankMismatch { .. } | CatalogError::DimConflict { .. }) => {
                "shape_mismatch".to_string()
            }
            Err(e) => e.code().to_string(),
        };
        assert_eq!(kind, expect, "{id} by {way}");
    }
}

/// Sizes of all symbols: those the case gives, in its shapes and params; those that a constraint defines (`S ==
/// EXPR`); the others are 4.
fn completed(
    spec: &Spec,
    variant: &BTreeMap<String, String>,
    params: &Attrs,
    given: &Shapes,
    sources: &[(Source, bool)],
) -> Dims {
    let mut known = Completed::default();
    for (symbol, param) in &spec.symbols {
        if let Some(AttrValue::Int(n)) = params.get(param) {
            known
                .0
                .insert(symbol.clone(), usize::try_from(*n).expect("a size"));
        }
    }
    for (s, _) in sources {
        let Some(shape) = given.get(&s.name) else {
            continue;
        };
        for (d, n) in s.dims_for(shape.len()).iter().zip(shape) {
            if let DimExpr::Symbol(symbol) = d {
                known.0.entry(symbol.clone()).or_insert(*n);
            }
        }
    }
    let applies = spec.constraints.iter().filter(|c| c.applies(variant));
    let mut defined: Vec<(String, Expr)> = Vec::new();
    applies.for_each(|c| definitions(&c.that, &mut defined));
    for d in sources.iter().flat_map(|(s, _)| &s.dims) {
        if let DimExpr::Symbol(symbol) = d {
            if defined.iter().all(|(s, _)| s != symbol) {
                known.0.entry(symbol.clone()).or_insert(4);
            }
        }
    }
    for (symbol, e) in &defined {
        if known.0.contains_key(symbol) || spec.symbols.contains_key(symbol) {
            continue;
        }
        // A fault elsewhere may leave it without a value; then its size is not what is judged.
        let n = eval_int(e, &known)
            .ok()
            .and_then(|n| usize::try_from(n).ok());
        known.0.insert(symbol.clone(), n.unwrap_or(4));
    }
    known.0
}

/// Symbols that stand alone on the left of an equation that must hold; of alternatives, the first.
fn definitions(that: &Expr, found: &mut Vec<(String, Expr)>) {
    match that {
        Expr::Binary(BinaryOp::And, a, b) => [a, b].iter().for_each(|e| definitions(e, found)),
        Expr::Binary(BinaryOp::Or, a, _) => definitions(a, found),
        Expr::Binary(BinaryOp::Eq, a, b) => {
            if let Expr::Symbol(s) = &**a {
                found.push((s.clone(), (**b).clone()));
            }
        }
        _ => {}
    }
}

#[derive(Default)]
struct Completed(Dims);

impl Facts for Completed {
    fn symbol(&self, name: &str) -> Option<Datum> {
        self.0.get(name).map(|n| Datum::Int(*n as i64))
    }
    fn has_role(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
    fn fact(&self, _: &str, _: Fact) -> Option<Datum> {
        None
    }
    fn param_dims(&self, _: &str, _: &str) -> Option<Vec<usize>> {
        None
    }
    fn attr(&self, _: &str, _: &str) -> Option<Datum> {
        None
    }
    fn conditioned(&self, _: &str) -> bool {
        false
    }
}

fn shape(v: &Value) -> Vec<usize> {
    let dims = v.as_array().map(Vec::as_slice).unwrap_or_default();
    dims.iter()
        .map(|d| d.as_u64().expect("a size") as usize)
        .collect()
}

fn shapes(v: &Value) -> Shapes {
    map(v)
        .into_iter()
        .map(|(k, v)| (k.clone(), shape(v)))
        .collect()
}

/// Symbolic dims from shapes, refusals by kind (the group `solve_dims` of `gates.json`).
#[test]
fn oracle_gates_solve_dims() {
    let gates = json(&oracle("gates.json", "reference/solve_dims.json"));
    let catalog = Catalog::builtin().expect("built-in entries load");
    let (mut ran, mut skipped) = (0, BTreeMap::new());
    for case in list(&gates, "solve_dims") {
        let name = case["structure"].as_str().expect("structure");
        let Some(spec) = entry(&catalog, name, &mut skipped) else {
            continue;
        };
        let note = case["note"].as_str().unwrap_or("");
        if note.starts_with("observed") {
            // What was seen there; optional slots and literal dims are decided otherwise here.
            println!("observation, not compared: {name}: {note}");
            continue;
        }
        let (inputs, weights) = (shapes(&case["inputs"]), shapes(&case["weights"]));
        let outcome = spec.solve_dims(&inputs, &weights, Shape::Declared);
        match (case["refused"].as_str(), outcome) {
            (Some(kind), Err(e)) => assert_eq!(e.code(), kind, "{case}: {e}"),
            (None, Ok(dims)) => {
                let want: Dims = map(&case["dims"])
                    .into_iter()
                    .map(|(k, v)| (k.clone(), v.as_u64().expect("a size") as usize))
                    .collect();
                assert_eq!(dims, want, "{case}");
            }
            (kind, outcome) => panic!("{case}: expected {kind:?}, got {outcome:?}"),
        }
        ran += 1;
    }
    assert!(ran > 0, "no case ran");
    report(ran, &skipped);
}
