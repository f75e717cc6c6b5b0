//! Documents with one fault each, and the message and code it gives.

use structures_catalog::{Catalog, CatalogError};

const GOOD: &str = "\
name: small
version: 1
summary: A product with a gate.
tags: [gemm]
boundary:
  inputs:
    - {name: x, dims: [M, K]}
    - {name: gate, dims: [M, N], optional: true}
  outputs:
    - {name: y, dims: [M, N]}
weights:
  w: [K, N]
  b: {dims: [N], optional: true}
variants:
  kind: {host: true, values: {silu: silu, gelu: gelu_tanh}}
  wire: {host: false, values: [bf16, fp8], default: bf16}
points: [p]
gates: {parity: [cosine]}
qualification: {min_elements: {w: 16}}
slots:
  at: module
  roles: {q: q_proj, n: {in: parent, first: [norm], optional: true}}
  checks:
    - {that: \"q.kind == 'linear'\", else: {refuse: projection_not_linear}}
  dims: {K: q.in, N: q.out}
  axis: {kind: {attr: [act], of: self, map: {silu: silu}, default: silu}}
  weights: {w: {from: q.weight, layout: out_in}, b: q.bias}
  emit: {path: self, parent: parent}
dataflow:
  spans:
    whole: {in: [x, gate], out: [y]}
  ops:
    - {let: p, op: linear, in: [x, w]}
    - {let: s, op: bias, in: [p, b], needs: [b]}
    - {let: a, op: act, in: [s], attrs: {kind: <kind>}}
    - {let: y, op: mul, in: [a, gate], needs: [gate]}
evidence: [none yet]
";

fn load(text: &str) -> Result<Catalog, CatalogError> {
    Catalog::default().with_document("small", "small/structure.yaml", text)
}

/// One planted fault: `from` becomes `to`, and the message must stand where `at` begins (on the changed line, else
/// anywhere) and contain `says`.
struct Fault(&'static str, &'static str, &'static str, &'static str);

fn refused(faults: &[Fault]) {
    let mut wrong = Vec::new();
    for Fault(from, to, at, says) in faults {
        assert!(GOOD.contains(from), "`{from}` is not in the good document");
        let start = GOOD.find(from).unwrap_or(0);
        let text = GOOD.replacen(from, to, 1);
        let line = text[..start].rfind('\n').map_or(0, |n| n + 1);
        let found = text[line..].find(at).map(|n| line + n);
        let offset = found.or_else(|| text.find(at)).expect(at);
        let row = text[..offset].matches('\n').count() + 1;
        let column = offset - text[..offset].rfind('\n').map_or(0, |n| n + 1) + 1;
        let expected = format!("small/structure.yaml:{row}:{column}: ");
        match load(&text) {
            Ok(_) => wrong.push(format!("`{to}` for `{from}` was accepted")),
            Err(e) => {
                let message = e.to_string();
                if !message.starts_with(&expected) || !message.contains(says) {
                    wrong.push(format!(
                        "`{to}` for `{from}`: {message}\n   expected {expected}{says}"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn the_good_document_is_good() {
    let catalog = load(GOOD).expect("good");
    let spec = catalog.get("small").expect("small");
    assert_eq!(spec.precedence, 0);
    assert_eq!(spec.weights[0].name, "w");
    let rows = structures_catalog::verify::verify_spec(spec);
    assert!(
        rows.iter().all(|r| r.failure.is_none() && !r.native),
        "{rows:?}"
    );
    assert_eq!(rows.len(), 2 * 4);
}

#[test]
fn header_faults() {
    refused(&[
        Fault(
            "version: 1\n",
            "version: 0\n",
            "0\n",
            "a whole number from 1",
        ),
        Fault(
            "version: 1\n",
            "version: one\n",
            "one",
            "expected a whole number, found `one`",
        ),
        Fault(
            "name: small",
            "name: Small-1",
            "Small-1",
            "a name is small letters",
        ),
        Fault(
            "tags:",
            "tag:",
            "tag:",
            "unknown key `tag`, expected one of name, version",
        ),
        Fault(
            "version: 1\n",
            "version: 1\nkind: stage_pipeline\n",
            "boundary:",
            "a stage pipeline has no `boundary`",
        ),
        Fault(
            "version: 1\n",
            "version: 1\nkind: other\n",
            "other",
            "expected region or stage_pipeline, found `other`",
        ),
        Fault(
            "version: 1\n",
            "version: 1\nscheme: maybe\n",
            "maybe",
            "consulted or ignored",
        ),
        Fault(
            "gates: {parity: [cosine]}\n",
            "",
            "name:",
            "`gates` is missing",
        ),
        Fault(
            "{parity: [cosine]}",
            "{parity: []}",
            "{parity",
            "no gate, no structure",
        ),
        Fault(
            "weights:\n  w: [K, N]",
            "weight:\n  w: [K, N]",
            "weight:",
            "unknown key `weight`",
        ),
        Fault(
            "{min_elements: {w: 16}}",
            "{min_elements: {v: 16}}",
            "16}}",
            "`v` is no slot",
        ),
        Fault(
            "{min_elements: {w: 16}}",
            "{min_elements: {w: -1}}",
            "-1",
            "expected a whole number",
        ),
        Fault(
            "tags: [gemm]",
            "tags: [gemm, gemm]",
            "gemm]",
            "`gemm` stands here twice",
        ),
        Fault(
            "points: [p]",
            "points: [p, ghost]",
            "ghost",
            "point `ghost` is no value of the dataflow",
        ),
        Fault(
            "evidence: [none yet]",
            "evidence: {a: b}",
            "{a: b}",
            "expected a list, found a mapping",
        ),
    ]);
}

#[test]
fn parts_that_are_missing() {
    for (key, next) in [
        ("boundary:", "weights:"),
        ("weights:", "variants:"),
        ("slots:", "dataflow:"),
        ("dataflow:", "evidence:"),
    ] {
        let (a, b) = (GOOD.find(key).expect(key), GOOD.find(next).expect(next));
        let text = format!("{}{}", &GOOD[..a], &GOOD[b..]);
        let e = load(&text).expect_err(key).to_string();
        let says = format!("`{}` is missing", key.trim_end_matches(':'));
        assert!(e.contains(&says), "{e}");
    }
}

#[test]
fn forbidden_keys_anywhere() {
    for (from, to) in [
        ("version: 1\n", "version: 1\nbackend: cuda\n"),
        (
            "{parity: [cosine]}",
            "{parity: [cosine], extra: [{Hardware: x}]}",
        ),
        ("min_elements: {w: 16}", "min_elements: {w: 16, kernel: 3}"),
        (
            "variants:\n",
            "variants:\n  device: {host: true, values: [a]}\n",
        ),
        (
            "attrs: {kind: <kind>}",
            "attrs: {kind: <kind>, Runtime-Benchmark: 1}",
        ),
    ] {
        assert!(GOOD.contains(from), "{from}");
        let e = load(&GOOD.replacen(from, to, 1)).expect_err(to);
        assert_eq!(e.code(), "key_forbidden", "{e}");
    }
    refused(&[Fault(
        "version: 1\n",
        "version: 1\nbackend: x\n",
        "backend",
        "`backend` is forbidden",
    )]);
}

#[test]
fn boundary_and_weight_faults() {
    const GATE: &str = "{name: gate, dims: [M, N], optional: true}";
    refused(&[
        Fault(
            "x, dims: [M, K]}",
            "x, dims: [M, K], shape: 1}",
            "shape",
            "unknown key `shape`",
        ),
        Fault(
            "x, dims: [M, K]}",
            "x, dims: [M, 'K K']}",
            "'K K'",
            "expected an operator or the end",
        ),
        Fault(
            "x, dims: [M, K]}",
            "x, dims: [M, q.in]}",
            "q.in",
            "a dim is a number, a symbol",
        ),
        Fault(
            "x, dims: [M, K]}",
            "x, dims: [M, '-K']}",
            "'-K'",
            "a dim is a number, a symbol",
        ),
        Fault(
            "{name: gate,",
            "{name: x,",
            "x, dims: [M, N]",
            "`x` stands here twice",
        ),
        Fault(
            "y, dims: [M, N]}",
            "y, dims: [M, Z]}",
            "[M, Z]",
            "nothing gives `Z` a size",
        ),
        Fault(
            "  w: [K, N]",
            "  w: [K, 2*Z]",
            "[K, 2*Z]",
            "nothing gives `Z` a size",
        ),
        Fault(
            "  w: [K, N]",
            "  w: {dims: [K, N], layout: up}",
            "up}",
            "expected in_out or out_in",
        ),
        Fault(
            "  w: [K, N]",
            "  w_<i>: {dims: [K, N]}",
            "{dims",
            "is repeated and needs `for",
        ),
        Fault(
            "  w: [K, N]",
            "  w: {dims: [K, N], for: {i: 0..4}}",
            "{i: 0",
            "must contain `<i>`",
        ),
        Fault(
            "  w: [K, N]",
            "  w_<i>: {dims: [K, N], for: {i: 4..0}}",
            "4..0",
            "a range such as 0..8",
        ),
        Fault(
            "  w: [K, N]",
            "  w_<i>: {dims: [K, N], for: {i: 0..4}, least: 5}",
            "5}",
            "at most the number",
        ),
        Fault(
            "  w: [K, N]",
            "  w: [K, N]\n  extra: [N]",
            "[N]",
            "slot `extra` is read by no op",
        ),
        Fault(
            "  b: {dims",
            "  gate: [N]\n  b: {dims",
            "[N]\n",
            "`gate` is declared twice",
        ),
        Fault(
            GATE,
            "{name: gate, dims: [M, N], value: z}",
            "{name: gate",
            "an input is its own value",
        ),
        Fault(
            "boundary:\n",
            "boundary:\n  states: []\n",
            "states",
            "unknown key `states`",
        ),
        Fault(
            "{name: y, dims",
            "{name: y, value: z, dims",
            "{name: y",
            "output value `z` is made by no op",
        ),
        Fault(
            "{name: x, dims: [M, K]}\n",
            "{name: x, dims: [M, K]}\n    - {name: lost, dims: [M]}\n",
            "{name: lost",
            "input `lost` is read by no op",
        ),
    ]);
}

#[test]
fn variant_faults() {
    const KIND: &str = "{host: true, values: {silu: silu, gelu: gelu_tanh}}";
    refused(&[
        Fault(
            "default: bf16}",
            "default: f16}",
            "f16}",
            "the default is not among the values",
        ),
        Fault(
            ", default: bf16}",
            "}",
            "{host: false",
            "a form axis needs a `default`",
        ),
        Fault(
            KIND,
            "{host: true, values: []}",
            "[]",
            "an axis needs a value",
        ),
        Fault(KIND, "{values: [a]}", "{values", "`host` is missing"),
    ]);
    let many: Vec<String> = (0..65).map(|i| format!("v{i}")).collect();
    let many = format!("{{host: true, values: [{}]}}", many.join(", "));
    let e = load(&GOOD.replacen(KIND, &many, 1))
        .expect_err("65")
        .to_string();
    assert!(
        e.contains("65 combinations of host axes and counts, expected at most 64"),
        "{e}"
    );
}

#[test]
fn slot_faults() {
    let graph =
        &GOOD[GOOD.find("  at: module").expect("at")..GOOD.find("dataflow:").expect("flow")];
    let e = load(&GOOD.replacen(graph, "  at: graph\n", 1))
        .expect_err("no anchor")
        .to_string();
    assert!(e.contains("needs an op marked `anchor: true`"), "{e}");
    refused(&[
        Fault("at: module", "at: tree", "tree", "expected module or graph"),
        Fault(
            "at: module",
            "at: graph",
            "roles:",
            "unknown key `roles`, expected one of at",
        ),
        Fault(
            "roles: {q: q_proj,",
            "roles: {self: q_proj,",
            "q_proj,",
            "cannot be a role's name",
        ),
        Fault(
            "q: q_proj",
            "q: 'q..proj'",
            "'q..proj'",
            "is no module path",
        ),
        Fault(
            "in: parent",
            "in: uncle",
            "uncle",
            "expected self or parent",
        ),
        Fault(
            "q.kind == 'linear'",
            "q.kinds == 'linear'",
            "\"q.kinds",
            "expected kind, in, out, name",
        ),
        Fault(
            "q.kind == 'linear'",
            "z.kind == 'linear'",
            "\"z.kind",
            "`z` is no role",
        ),
        Fault(
            "q.kind == 'linear'",
            "role.in == 1",
            "\"role.in",
            "`role` is no role",
        ),
        Fault(
            "q.kind == 'linear'",
            "q.in == W",
            "\"q.in",
            "`W` is no symbol of `dims`",
        ),
        Fault(
            "{refuse: projection_not_linear}",
            "stop",
            "stop",
            "expected pass or {refuse: CODE}",
        ),
        Fault(
            "{refuse: projection_not_linear}",
            "{refuse: Not Linear}",
            "Not Linear",
            "a code is small letters",
        ),
        Fault(
            "axis: {kind:",
            "axis: {sort:",
            "{attr:",
            "`sort` is no variant axis",
        ),
        Fault(
            "map: {silu: silu}",
            "map: {silu: relu}",
            "{attr:",
            "`relu` is no value of `kind`",
        ),
        Fault(
            "{attr: [act], of: self, map: {silu: silu}, default: silu}",
            "\"if has(n) then 'silu' else 'tanh'\"",
            "\"if has",
            "`tanh` is no value of `kind`",
        ),
        Fault("of: self", "of: z", "{attr:", "`z` is no role"),
        Fault(
            "{from: q.weight,",
            "{from: qweight,",
            "qweight",
            "expected role.param",
        ),
        Fault(
            "{w: {from: q.weight, layout: out_in}, b",
            "{b",
            "{b",
            "the required slot `w` has no source",
        ),
        Fault(
            "w: {from: q.weight, layout: out_in}",
            "w: {const: twos}",
            "twos",
            "expected zeros or ones",
        ),
        Fault(
            "b: q.bias",
            "c: q.bias",
            "q.bias",
            "`c` is no slot of this entry",
        ),
        Fault(
            "emit: {path: self",
            "emit: {path: z",
            "z,",
            "`z` is no role",
        ),
        Fault(
            "  emit:",
            "  any: [{q: q}]\n  emit:",
            "at: module",
            "exactly one of `roles` and `any`",
        ),
        Fault(
            "  emit:",
            "  every: true\n  emit:",
            "true",
            "`every` belongs to `any`",
        ),
    ]);
}

#[test]
fn roles_may_all_be_optional_where_a_check_tells() {
    let alone = GOOD
        .replacen(
            "roles: {q: q_proj, n",
            "roles: {q: {first: [q_proj], optional: true}, n",
            1,
        )
        .replacen("q.kind == 'linear'", "self.kind == 'linear'", 1);
    load(&alone).expect("a check tells");
    let check = alone.find("  checks:").expect("checks")..alone.find("  dims: {K").expect("dims");
    let mut open = alone.clone();
    open.replace_range(check, "");
    let e = load(&open).expect_err("open").to_string();
    assert!(e.contains("every module fits"), "{e}");
}

#[test]
fn dataflow_faults() {
    const ACT: &str = "attrs: {kind: <kind>}}";
    refused(&[
        Fault(
            "op: linear",
            "op: linaer",
            "linaer",
            "unknown operation `linaer`; nearest: linear",
        ),
        Fault(
            "op: linear",
            "op: softmax",
            "softmax",
            "an operation of hosts only",
        ),
        Fault(
            "op: linear",
            "op: reshape",
            "reshape",
            "an operation of hosts only",
        ),
        Fault(
            "in: [x, w]}",
            "in: [x]}",
            "[x]}",
            "linear takes (x, w), found 1 operands",
        ),
        Fault(
            "{let: p,",
            "{let: [p, r],",
            "[p, r]",
            "linear makes 1 values here, found 2 names",
        ),
        Fault(
            ACT,
            "attrs: {sort: <kind>}}",
            "<kind>",
            "act has no attribute `sort`",
        ),
        Fault(
            ", attrs: {kind: <kind>}",
            "",
            "{let: a",
            "act needs the attribute `kind`",
        ),
        Fault(
            "<kind>",
            "<wire>",
            "<wire>",
            "`wire` is a choice of the form",
        ),
        Fault("<kind>", "<sort>", "<sort>", "`sort` is no variant axis"),
        Fault("<kind>", "$a-b", "$a-b", "`a-b` is no param name"),
        Fault(
            "in: [s], attrs",
            "in: [t], attrs",
            "{let: a",
            "`t`: read, but neither a value nor",
        ),
        Fault(
            "in: [s], attrs",
            "in: [s_<j>], attrs",
            "{let: a",
            "is no host axis and no index",
        ),
        Fault(
            "in: [x, w]}",
            "in: [y, w]}",
            "{let: p",
            "depend on each other",
        ),
        Fault(
            "{let: a,",
            "{let: s,",
            "{let: s, op: act",
            "`s`: defined twice under the same axes",
        ),
        Fault(
            "{let: a,",
            "{let: w,",
            "{let: w",
            "defined by an op, and a slot or input",
        ),
        Fault(
            "needs: [b]",
            "needs: [w]",
            "[w]",
            "`w` is no optional slot or input",
        ),
        Fault(
            ACT,
            "attrs: {kind: silu}, when: {wire: bf16}}",
            "bf16}",
            "`wire` is a choice of the form",
        ),
        Fault(
            ACT,
            "attrs: {kind: silu}, when: {kind: relu}}",
            "relu",
            "`relu` is no value of `kind`",
        ),
        Fault(
            ACT,
            "attrs: {kind: silu}, when: {kind: silu}}",
            "{let: a",
            "not made under these axes",
        ),
        Fault(
            ACT,
            "attrs: {kind: silu}, as: bf16}",
            "bf16}",
            "expected f32",
        ),
        Fault(
            "in: [x, gate]",
            "in: [x, z]",
            "z]",
            "`z` is neither an input nor a value",
        ),
        Fault(
            "in: [x, gate]",
            "in: [x]",
            "[x]",
            "the span reads the input `gate`",
        ),
        Fault("out: [y]", "out: [w]", "w]", "`w` is made by no op"),
        Fault(
            "out: [y]",
            "out: []",
            "{in: [x, gate]",
            "a span needs an input and an output",
        ),
        Fault(
            "in: [x, w]}",
            "in: [x, w], for: {i: [a, b]}}",
            "{let: p",
            "`p`: defined twice",
        ),
        Fault(
            "in: [x, w]}",
            "in: [x, w], for: {kind: [a, b]}}",
            "{kind:",
            "is also a variant axis",
        ),
        Fault(
            "in: [x, w]}",
            "in: [x, w], for: {i: some}}",
            "some",
            "a range such as 0..8",
        ),
    ]);
}
