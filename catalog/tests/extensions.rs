//! Alternatives of dims, symbols that are params, views, attributes over dims, constraints, content points, calls
//! with several results.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use structures_catalog::verify::verify_spec;
use structures_catalog::{Catalog, CatalogError, Feed, Spec};
use structures_graph::AttrValue;

/// A packed projection split into heads and turned, then whatever the host mixes with.
const TEXT: &str = "
name: t
version: 1
boundary:
  inputs:
    - {name: packed, dims: [B, T, (Hq+Hkv)*D]}
    - {name: cos, dims: [[B, T, W], [T, W]]}
    - {name: sin, dims: [[B, T, W], [T, W]]}
  outputs:
    - {name: q, value: q_turned, dims: [B, T, Hq, D]}
    - {name: k, dims: [B, T, Hkv, D]}
    - {name: mixed, dims: [B, T, Hq*D]}
    - {name: kept, dims: [B, T, Hkv*D]}
weights: {bias: {dims: [(Hq+Hkv)*D], optional: true}}
symbols: {Hq: q_heads, Hkv: kv_heads, D: head_dim, R: rotary_dim}
constraints:
  - {that: R % 2 == 0 and R <= D, else: bad_rotary_dim}
  - {that: W * 2 == R, when: {table: half}, else: bad_table}
  - {that: W == R, when: {table: full}, else: bad_table}
variants: {table: {host: true, values: [half, full]}}
points: [q_turned, cos]
content: [cos]
gates: {parity: [cosine]}
slots: {at: graph}
dataflow:
  spans:
    all: {in: [packed, cos, sin], out: [q_turned, k, mixed, kept]}
    turn: {in: [q_flat, cos, sin], out: [q_turned]}
  ops:
    - {let: biased, op: bias, in: [packed, bias], needs: [bias]}
    - {let: [q_flat, k], op: split, in: [biased], attrs: {sizes: [=Hq*D, =Hkv*D]}, dims: [~, [B, T, Hkv, D]]}
    - {let: q_heads_, op: scale, in: [q_flat], dims: [B, T, Hq, D]}
    - {let: q_turned, op: rope, in: [q_heads_, cos, sin], attrs: {rotary: =R}, anchor: true}
    - {let: [mixed, kept], op: call, in: [q_turned, k], attrs: {role: mixer}, dims: [[B, T, Hq*D], [B, T, Hkv*D]]}
";

fn load(text: &str) -> Result<Spec, CatalogError> {
    let catalog = Catalog::default().with_document("t", "t.yaml", text)?;
    catalog.get("t").cloned()
}

fn axes(table: &str) -> BTreeMap<String, String> {
    [("table".to_string(), table.to_string())].into()
}

/// Hq = 2, Hkv = 1, D = 4, R = 2.
fn feed<'a>() -> Feed<'a> {
    let ones =
        |shape: &[usize]| Tensor::ones(shape, candle_core::DType::F32, &Device::Cpu).expect("ones");
    let mut feed = Feed {
        inputs: [
            ("packed".to_string(), ones(&[2, 3, 12])),
            ("cos".to_string(), ones(&[3, 1])),
            ("sin".to_string(), ones(&[3, 1])),
        ]
        .into(),
        ..Feed::default()
    };
    for (param, n) in [
        ("q_heads", 2),
        ("kv_heads", 1),
        ("head_dim", 4),
        ("rotary_dim", 2),
    ] {
        feed.params.insert(param.into(), AttrValue::Int(n));
    }
    feed.calls.insert(
        "mixer".into(),
        Box::new(|args: &[Tensor]| Ok(args.to_vec())),
    );
    feed
}

#[test]
fn all_of_them_together_hold_for_every_combination() {
    let spec = load(TEXT).expect("loads");
    assert_eq!(spec.content, ["cos"]);
    let rows = verify_spec(&spec);
    for row in &rows {
        assert!(
            row.failure.is_none(),
            "{}: {:?}",
            row.combination,
            row.failure
        );
    }
    // Two tables, with and without bias, both ranks of the tables.
    assert_eq!(rows.len(), 8, "{rows:?}");
    assert!(rows.iter().any(|r| r.combination.contains("alternative 2")));
}

#[test]
fn a_call_is_run_with_the_alternative_of_its_rank() {
    let spec = load(TEXT).expect("loads");
    let out = spec.call_dataflow(&axes("half"), &feed()).expect("runs");
    let shapes: Vec<(&str, &[usize])> = out.iter().map(|(n, t)| (n.as_str(), t.dims())).collect();
    let expected: [(&str, &[usize]); 4] = [
        ("q", &[2, 3, 2, 4]),
        ("k", &[2, 3, 1, 4]),
        ("mixed", &[2, 3, 8]),
        ("kept", &[2, 3, 4]),
    ];
    assert_eq!(shapes, expected);
    // cos = sin = 1 on ones: the first channel becomes 0, the second 2, the rest passes.
    let q: Vec<f32> = out[0]
        .1
        .flatten_all()
        .expect("flat")
        .to_vec1()
        .expect("vec");
    assert_eq!(q[..4], [0.0, 2.0, 1.0, 1.0]);
    let mut three = feed();
    for name in ["cos", "sin"] {
        let t = three.inputs[name].broadcast_as((2, 3, 1)).expect("wide");
        three.inputs.insert(name.into(), t);
    }
    assert!(spec.call_dataflow(&axes("half"), &three).is_ok());
    let flat = three.inputs["cos"].flatten_all().expect("flat");
    three.inputs.insert("cos".into(), flat);
    let e = spec
        .call_dataflow(&axes("half"), &three)
        .expect_err("rank 1");
    assert!(
        e.code() == "rank_mismatch" && e.to_string().contains("[B, T, W] or [T, W]"),
        "{e}"
    );
}

#[test]
fn a_span_inside_is_viewed_from_its_own_inputs() {
    let spec = load(TEXT).expect("loads");
    let mut inner = feed();
    let packed = inner.inputs.remove("packed").expect("packed");
    inner
        .inputs
        .insert("q_flat".into(), packed.narrow(2, 0, 8).expect("part"));
    let out = spec
        .reference_span("turn", &axes("half"), &inner)
        .expect("runs");
    assert_eq!(
        out.last().map(|(_, t)| t.dims().to_vec()),
        Some(vec![2, 3, 2, 4])
    );
}

#[test]
fn calls_that_are_not_admitted() {
    let spec = load(TEXT).expect("loads");
    let code = |table: &str, change: &dyn Fn(&mut Feed)| {
        let mut feed = feed();
        change(&mut feed);
        match spec.call_dataflow(&axes(table), &feed) {
            Ok(_) => "ok".to_string(),
            Err(e) => format!("{} {e}", e.code()),
        }
    };
    let param = |name: &'static str, v: AttrValue| {
        move |f: &mut Feed| {
            f.params.insert(name.into(), v.clone());
        }
    };
    assert_eq!(code("half", &|_| {}), "ok");
    let e = code("full", &|_| {});
    assert!(
        e.starts_with("bad_table") && e.contains("W == R") && e.contains("W = 1, R = 2"),
        "{e}"
    );
    let e = code("half", &param("rotary_dim", AttrValue::Int(6)));
    assert!(e.starts_with("bad_rotary_dim"), "{e}");
    let e = code("half", &param("rotary_dim", AttrValue::Float(2.5)));
    assert!(e.starts_with("bad_param") && e.contains("2.5"), "{e}");
    let e = code("half", &param("rotary_dim", AttrValue::Int(-2)));
    assert!(e.starts_with("bad_param"), "{e}");
    // A size written as a real number is one.
    assert_eq!(
        code("half", &param("rotary_dim", AttrValue::Float(2.0))),
        "ok"
    );
    let e = code("half", &param("q_heads", AttrValue::Int(3)));
    assert!(e.starts_with("dim_conflict") && e.contains("packed"), "{e}");
    // An absent param leaves its symbol open, and what needs it says so.
    let e = code("half", &|f| {
        f.params.remove("rotary_dim");
    });
    assert!(
        e.starts_with("bad_rotary_dim") && e.contains("`R` is not there"),
        "{e}"
    );
    let e = code("half", &|f| {
        f.params.remove("q_heads");
    });
    assert!(
        e.starts_with("missing_param") && e.contains("`q_heads`"),
        "{e}"
    );
    let e = code("half", &|f| {
        f.calls.insert(
            "mixer".into(),
            Box::new(|args: &[Tensor]| Ok(args[..1].to_vec())),
        );
    });
    assert!(e.contains("`mixer` makes 1 results, expected 2"), "{e}");
    let e = code("half", &|f| {
        f.calls.insert(
            "mixer".into(),
            Box::new(|args: &[Tensor]| Ok(vec![args[1].clone(), args[0].clone()])),
        );
    });
    assert!(e.contains("cannot be viewed as [2, 3, 8]"), "{e}");
}

#[test]
fn params_are_filled_from_dims() {
    // D is a dim of `x` here, so nobody has to give `width`.
    let text = "
name: t
version: 1
boundary: {inputs: [{name: x, dims: [M, D]}], outputs: [{name: y, dims: [M, D]}]}
weights: {}
symbols: {D: width}
constraints: [{that: width % 2 == 0 and has(width), else: odd_width}]
gates: {parity: [cosine]}
slots: {at: graph}
dataflow:
  spans: {s: {in: [x], out: [y]}}
  ops: [{let: y, op: scale, in: [x], attrs: {by: $width}, anchor: true}]
";
    let spec = load(text).expect("loads");
    let run = |width: usize| {
        let x = Tensor::ones((1, width), candle_core::DType::F32, &Device::Cpu).expect("x");
        let feed = Feed {
            inputs: [("x".to_string(), x)].into(),
            ..Feed::default()
        };
        spec.call_dataflow(&BTreeMap::new(), &feed)
    };
    let out = run(4).expect("runs")[0].1.flatten_all().expect("flat");
    assert_eq!(out.to_vec1::<f32>().expect("vec"), [4.0; 4]);
    assert_eq!(run(3).expect_err("odd").code(), "odd_width");
    let rows = verify_spec(&spec);
    assert!(rows.iter().all(|r| r.failure.is_none()), "{rows:?}");
}

#[test]
fn bad_documents_say_where_and_why() {
    let lines: Vec<&str> = TEXT.lines().collect();
    for (from, to, says) in [
        (
            "dims: [[B, T, W], [T, W]]}\n    - {name: sin",
            "dims: [[B, T, W], [W, B, T]]}\n    - {name: sin",
            "an alternative of 3 dims stands before it",
        ),
        (
            "{name: k, dims: [B, T, Hkv, D]}",
            "{name: k, dims: [[B, T, Hkv, D], [T]]}",
            "an output has one list of dims",
        ),
        (
            "dims: [[B, T, W], [T, W]]}\n    - {name: sin",
            "dims: [[B, T, W], T]}\n    - {name: sin",
            "expected a list, found `T`",
        ),
        (
            "dims: [[B, T, W], [T, W]]}\n    - {name: sin",
            "dims: [[B, T, W], [T, W+X]]}\n    - {name: sin",
            "nothing gives `X` a size",
        ),
        (
            "R: rotary_dim}",
            "R: rotary_dim, X: x}",
            "no dim and no expression uses `X`",
        ),
        (
            "R: rotary_dim}",
            "R: q_heads}",
            "param `q_heads` is already a symbol's size",
        ),
        ("R: rotary_dim}", "R: T}", "`T` is a dim symbol"),
        (
            "R: rotary_dim}",
            "R: cos}",
            "`cos` is a tensor of this entry",
        ),
        (
            "R: rotary_dim}",
            "R: 3}",
            "expected a word, found the number 3",
        ),
        (
            "R: rotary_dim}",
            "R: a-b}",
            "no name of a symbol or a param",
        ),
        (
            "W == R,",
            "W == Q,",
            "`Q` is neither a dim symbol nor a captured param",
        ),
        (
            "W == R,",
            "has(Q),",
            "`Q` is no dim symbol, param, input or slot",
        ),
        ("W == R,", "cos.in == R,", "asks a module"),
        ("W == R,", "W = R,", "expected"),
        ("W == R,", "W / (2-2) == R,", "divides by zero"),
        (
            "else: bad_rotary_dim",
            "else: Bad-Code",
            "a code is small letters",
        ),
        (", else: bad_rotary_dim", "", "`else` is missing"),
        (
            "when: {table: full}",
            "when: {table: wide}",
            "`wide` is no value of `table`",
        ),
        (
            "when: {table: full}",
            "when: {tabel: full}",
            "`tabel` is no variant axis",
        ),
        (
            "content: [cos]",
            "content: [sin]",
            "`sin` is none of `points`",
        ),
        ("content: [cos]", "content: [cos, cos]", "stands here twice"),
        ("=Hkv*D]}", "=Hx*D]}", "nothing gives `Hx` a size"),
        ("=Hkv*D]}", "=Hkv*]}", "expected a value"),
        ("=Hkv*D]}", "x]}", "expected a whole number"),
        ("=Hkv*D]}", "=has(q)]}", "is no arithmetic"),
        ("rotary: =R", "rotary: =R/0", "divides by zero"),
        (
            "dims: [~, [B, T, Hkv, D]]",
            "dims: [[B, T, Hkv, D]]",
            "a list of dims for each of 2 results, found 1",
        ),
        (
            "in: [q_flat], dims: [B, T, Hq, D]",
            "in: [q_flat], dims: [B, T, Z, D]",
            "nothing gives `Z` a size",
        ),
        (
            "in: [q_flat], dims: [B, T, Hq, D]",
            "in: [q_flat], dims: 4",
            "expected a list",
        ),
        // The bias is dropped when it is absent, and its operand is an input: nobody could view it.
        (
            "needs: [bias]}",
            "needs: [bias], dims: [B, T, Hq+Hkv, D]}",
            "its `dims` have no place",
        ),
        (
            "weights: {bias: {dims: [(Hq+Hkv)*D]",
            "weights: {bias: {dims: [(Hq+Hkv)*D/0]",
            "divides by zero",
        ),
    ] {
        let bad = TEXT.replacen(from, to, 1);
        assert_ne!(bad, TEXT, "{from}");
        let e = load(&bad).map(|_| ()).expect_err(to);
        let text = e.to_string();
        assert!(
            e.code() == "entry_invalid" && text.contains(says),
            "{to}: {text}"
        );
        // `t.yaml:LINE:COLUMN: path: ...`, at the line that changed.
        let line: usize = text
            .split(':')
            .nth(1)
            .and_then(|l| l.parse().ok())
            .expect("a line");
        let changed = bad
            .lines()
            .zip(&lines)
            .position(|(a, b)| a != *b)
            .expect("changed")
            + 1;
        assert_eq!(line, changed, "{to}: {text}");
    }
}

#[test]
fn sizes_that_do_not_exist_are_a_failure() {
    let bad = TEXT.replace("that: W == R,", "that: W == R and W == 1 and R == 2,");
    let rows = verify_spec(&load(&bad).expect("loads"));
    let failed: Vec<_> = rows.iter().filter_map(|r| r.failure.as_ref()).collect();
    assert!(!failed.is_empty() && failed.len() < rows.len(), "{rows:?}");
    assert!(failed[0].contains("no small sizes of"), "{}", failed[0]);
}
