//! Symbolic shapes of results, as far as they follow from the operands. `None` is a size that does not.

use crate::graph::{Dim, Graph, Layout, Op, Origin, ValueId};
use crate::ops::{AttrValue, OpKind};

/// A size that may not be known.
pub(crate) type Known = Option<Dim>;

type Shape = Vec<Known>;

/// Shapes of the results; an operand that does not fit is a message.
pub(crate) fn infer(graph: &Graph, op: &Op) -> Result<Vec<Shape>, String> {
    let dims = |at: usize| -> Option<&[Dim]> {
        let v: ValueId = op.inputs.get(at).copied().flatten()?;
        Some(&graph.value(v).dims)
    };
    let need = |at: usize| dims(at).ok_or_else(|| format!("operand {at} is missing"));
    let x = need(0)?;
    let same = || Ok(vec![known(x)]);
    match op.kind {
        OpKind::Linear => {
            let w = need(1)?;
            let [a, b] = w else {
                return Err(format!("w [{}] is not a matrix", list(w)));
            };
            let stored = op.inputs.get(1).copied().flatten();
            let layout = match stored.map(|v| &graph.value(v).origin) {
                Some(Origin::Param { layout, .. }) => *layout,
                _ => Layout::InOut,
            };
            let (k, n) = match layout {
                Layout::InOut => (a, b),
                Layout::OutIn => (b, a),
            };
            match x.last() {
                Some(d) if agree(d, k) => {}
                _ => {
                    return Err(format!(
                        "x [{}] meets w, which takes {k} input features",
                        list(x)
                    ))
                }
            }
            let mut out = known(&x[..x.len() - 1]);
            out.push(Some(n.clone()));
            Ok(vec![out])
        }
        OpKind::Bias | OpKind::Add | OpKind::Mul => {
            let b = need(1)?;
            let out = broadcast(x, b)?;
            if op.kind == OpKind::Bias && out.len() != x.len() {
                return Err(format!("b [{}] widens x [{}]", list(b), list(x)));
            }
            Ok(vec![out])
        }
        OpKind::Scale | OpKind::Act | OpKind::L2Norm | OpKind::Contiguous => same(),
        OpKind::RmsNorm | OpKind::LayerNorm => {
            let axes = match op.attrs.get("axes").and_then(AttrValue::as_f64) {
                Some(n) if op.kind == OpKind::RmsNorm => n as usize,
                _ => 1,
            };
            if axes == 0 || axes > x.len() {
                return Err(format!("x [{}] has no {axes} last dims", list(x)));
            }
            let width = count(&x[x.len() - axes..]);
            for (at, name) in [(1, "w"), (2, "b")] {
                if let (Some(w), Some(width)) = (dims(at).and_then(count), width) {
                    if w != width {
                        return Err(format!("{name} has {w} elements, {width} are normed"));
                    }
                }
            }
            same()
        }
        OpKind::Modulate => {
            let mut out = known(x);
            for at in [1, 2] {
                if let Some(d) = dims(at) {
                    let wider = broadcast(x, d)?;
                    if wider.len() != x.len() {
                        return Err(format!("[{}] widens x [{}]", list(d), list(x)));
                    }
                    out = out.into_iter().zip(wider).map(|(a, b)| a.or(b)).collect();
                }
            }
            Ok(vec![out])
        }
        OpKind::Chunk | OpKind::Split => parts(op, x),
        OpKind::Rope => {
            let [_, t, _, d] = x else {
                return Err(format!("x [{}] is not [B,T,H,D]", list(x)));
            };
            let (cos, sin) = (need(1)?, need(2)?);
            if cos != sin {
                return Err(format!(
                    "cos [{}] and sin [{}] differ",
                    list(cos),
                    list(sin)
                ));
            }
            let [.., rows, width] = cos else {
                return Err(format!(
                    "table [{}] is neither [T,W] nor [B,T,W]",
                    list(cos)
                ));
            };
            if !agree(rows, t) {
                return Err(format!(
                    "table [{}] has {rows} rows for {t} tokens",
                    list(cos)
                ));
            }
            let rotary = match op.attrs.get("rotary").and_then(AttrValue::as_f64) {
                Some(r) => Some(r as usize),
                None => size(d),
            };
            if let (Some(r), Some(d)) = (rotary, size(d)) {
                if r == 0 || r > d || r % 2 != 0 {
                    return Err(format!("rotary {r} must be even and in 2..={d}"));
                }
            }
            if let (Some(r), Some(w)) = (rotary, size(width)) {
                if w != r && w != r / 2 {
                    return Err(format!(
                        "table width {w} does not serve {r} rotary channels"
                    ));
                }
            }
            same()
        }
        OpKind::Attention => {
            let (k, v) = (need(1)?, need(2)?);
            let ([b, h, sq, d], [bk, hk, sk, dk], [bv, hv, sv, dv]) = (x, k, v) else {
                return Err(format!(
                    "q [{}], k [{}], v [{}] must have 4 dims",
                    list(x),
                    list(k),
                    list(v)
                ));
            };
            let groups = match (size(h), size(hk)) {
                (Some(h), Some(hk)) => hk > 0 && h % hk == 0,
                _ => true,
            };
            let fits = agree(b, bk) && agree(d, dk) && groups;
            if !(fits && agree(bk, bv) && agree(hk, hv) && agree(sk, sv)) {
                return Err(format!(
                    "q [{}], k [{}], v [{}] are not [B,H,Sq,D], [B,Hkv,Skv,D], [B,Hkv,Skv,D]",
                    list(x),
                    list(k),
                    list(v)
                ));
            }
            Ok(vec![known(&[b.clone(), sq.clone(), h.clone(), dv.clone()])])
        }
        OpKind::GatedDelta => {
            let v = need(2)?;
            let ([b, s, h, dk], [_, _, _, dv]) = (x, v) else {
                return Err(format!("q [{}], v [{}] must have 4 dims", list(x), list(v)));
            };
            let out = [b, s, h, dv].map(Clone::clone);
            let state = [b, h, dk, dv].map(Clone::clone);
            Ok(vec![known(&out), known(&state)])
        }
        OpKind::Reshape => reshape(op, x).map(|s| vec![s]),
        OpKind::Transpose => {
            let perm: Vec<usize> = counts(op, "perm");
            let mut seen = perm.clone();
            seen.sort_unstable();
            if !seen.iter().copied().eq(0..x.len()) {
                return Err(format!("perm {perm:?} does not permute [{}]", list(x)));
            }
            Ok(vec![perm.iter().map(|p| Some(x[*p].clone())).collect()])
        }
        OpKind::Embedding => {
            let w = need(1)?;
            let [_, d] = w else {
                return Err(format!("w [{}] is not [V,D]", list(w)));
            };
            let mut out = known(x);
            out.push(Some(d.clone()));
            Ok(vec![out])
        }
        OpKind::RopeTable => {
            let mut out = known(x);
            let n = match op.attrs.get("inv_freq") {
                Some(AttrValue::List(l)) => Some(Dim::Size(l.len())),
                _ => None,
            };
            if matches!(op.attrs.get("axes"), Some(AttrValue::List(_))) && !out.is_empty() {
                out.remove(0);
            }
            out.push(n);
            Ok(vec![out.clone(), out])
        }
        OpKind::KvAppend => {
            let region = need(1)?;
            let ([b, h, _, d], [rb, rh, _, rd]) = (x, region) else {
                return Err(format!("x [{}] is not [B,H,T,D]", list(x)));
            };
            if !(agree(b, rb) && agree(h, rh) && agree(d, rd)) {
                return Err(format!(
                    "x [{}] does not fit region [{}]",
                    list(x),
                    list(region)
                ));
            }
            // The length of the valid part is a symbol of the builder's choice.
            Ok(vec![vec![
                Some(b.clone()),
                Some(h.clone()),
                None,
                Some(d.clone()),
            ]])
        }
        OpKind::StateWrite => {
            let region = need(1)?;
            let fits = x.len() == region.len() && x.iter().zip(region).all(|(a, b)| agree(a, b));
            if !fits {
                return Err(format!(
                    "x [{}] does not fit region [{}]",
                    list(x),
                    list(region)
                ));
            }
            same()
        }
        OpKind::Concat => {
            let axis = op.attrs.get("axis").and_then(AttrValue::as_f64);
            let axis = axis.unwrap_or(-1.0) as i64;
            let at = if axis < 0 {
                axis + x.len() as i64
            } else {
                axis
            };
            let Some(at) = usize::try_from(at).ok().filter(|a| *a < x.len()) else {
                return Err(format!("x [{}] has no axis {axis}", list(x)));
            };
            let mut sum = Some(0);
            for i in 0..op.inputs.len() {
                let part = need(i)?;
                let fits = part.len() == x.len()
                    && (0..x.len()).all(|d| d == at || agree(&part[d], &x[d]));
                if !fits {
                    return Err(format!("[{}] does not go behind [{}]", list(part), list(x)));
                }
                sum = sum.zip(size(&part[at])).map(|(a, b)| a + b);
            }
            let mut out = known(x);
            out[at] = sum.map(Dim::Size);
            Ok(vec![out])
        }
        OpKind::CausalConv => {
            let w = need(1)?;
            let ([b, _, c], [wc, _, k]) = (x, w) else {
                return Err(format!(
                    "x [{}] is not [B,T,C] or w [{}] not [C,1,K]",
                    list(x),
                    list(w)
                ));
            };
            if !agree(c, wc) {
                return Err(format!("x has {c} channels, w serves {wc}"));
            }
            let back = size(k).map(|k| Dim::Size(k.saturating_sub(1)));
            let last = vec![Some(b.clone()), back, Some(c.clone())];
            Ok(vec![known(x), last])
        }
        OpKind::TopkRoute => same(),
        OpKind::Experts => {
            let (route, up, down) = (need(1)?, need(2)?, need(3)?);
            let ([e, _, d], [de, dd, _]) = (up, down) else {
                return Err(format!(
                    "gate_up [{}] or down [{}] is not [E,..,..]",
                    list(up),
                    list(down)
                ));
            };
            let last = |s: &[Dim]| s.last().cloned().unwrap_or(Dim::Size(0));
            if !(agree(e, de) && agree(d, dd) && agree(&last(x), d) && agree(&last(route), e)) {
                return Err(format!(
                    "x [{}], route [{}], gate_up [{}], down [{}] are not [..,D], [..,E], [E,2I,D], [E,D,I]",
                    list(x),
                    list(route),
                    list(up),
                    list(down)
                ));
            }
            same()
        }
        OpKind::Call => Ok(vec![]),
    }
}

fn known(dims: &[Dim]) -> Shape {
    dims.iter().cloned().map(Some).collect()
}

fn size(d: &Dim) -> Option<usize> {
    match d {
        Dim::Size(n) => Some(*n),
        Dim::Symbol(_) => None,
    }
}

/// Elements, when every dim is known.
fn count(dims: &[Dim]) -> Option<usize> {
    dims.iter().map(size).product()
}

/// Whether two sizes can be one: a symbol may turn out to be any size, but not another symbol.
fn agree(a: &Dim, b: &Dim) -> bool {
    match (a, b) {
        (Dim::Size(_), Dim::Size(_)) | (Dim::Symbol(_), Dim::Symbol(_)) => a == b,
        _ => true,
    }
}

fn list(dims: &[Dim]) -> String {
    let dims: Vec<String> = dims.iter().map(Dim::to_string).collect();
    dims.join(",")
}

fn broadcast(a: &[Dim], b: &[Dim]) -> Result<Shape, String> {
    let rank = a.len().max(b.len());
    let one = Dim::Size(1);
    let at = |d: &[Dim], i: usize| {
        let i = (i + d.len()).checked_sub(rank);
        i.map_or(one.clone(), |i| d[i].clone())
    };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Ok(Some(x)),
            (x, y) if y == one => Ok(Some(x)),
            (x, y) if x == one => Ok(Some(y)),
            (x, y) if agree(&x, &y) => Ok(None),
            _ => Err(format!("[{}] and [{}] do not broadcast", list(a), list(b))),
        })
        .collect()
}

fn counts(op: &Op, name: &str) -> Vec<usize> {
    match op.attrs.get(name) {
        Some(AttrValue::List(l)) => l
            .iter()
            .filter_map(|v| v.as_f64().map(|n| n as usize))
            .collect(),
        _ => Vec::new(),
    }
}

fn parts(op: &Op, x: &[Dim]) -> Result<Vec<Shape>, String> {
    let axis = op.attrs.get("axis").and_then(AttrValue::as_f64);
    let axis = axis.unwrap_or(-1.0) as i64;
    let at = if axis < 0 {
        axis + x.len() as i64
    } else {
        axis
    };
    if !(0..x.len() as i64).contains(&at) {
        return Err(format!("x [{}] has no axis {axis}", list(x)));
    }
    let at = at as usize;
    let whole = size(&x[at]);
    let part = |n: Option<usize>| {
        let mut s = known(x);
        s[at] = n.map(Dim::Size);
        s
    };
    if op.kind == OpKind::Split {
        let sizes = counts(op, "sizes");
        if whole.is_some_and(|w| w != sizes.iter().sum::<usize>()) {
            return Err(format!("sizes {sizes:?} do not add up to {}", x[at]));
        }
        return Ok(sizes.into_iter().map(|n| part(Some(n))).collect());
    }
    let n = op.attrs.get("n").and_then(AttrValue::as_f64).unwrap_or(0.0) as usize;
    if n == 0 || whole.is_some_and(|w| w % n != 0) {
        return Err(format!("{} does not cut into {n} equal parts", x[at]));
    }
    Ok(vec![part(whole.map(|w| w / n)); n])
}

fn reshape(op: &Op, x: &[Dim]) -> Result<Shape, String> {
    let Some(AttrValue::List(words)) = op.attrs.get("dims") else {
        return Err("attribute `dims` must be a list".into());
    };
    let mut out: Shape = words
        .iter()
        .map(|w| match w {
            AttrValue::Int(n) if *n >= 0 => Some(Dim::Size(*n as usize)),
            AttrValue::Word(s) => Some(Dim::Symbol(s.clone())),
            _ => None,
        })
        .collect();
    let open: Vec<usize> = (0..out.len()).filter(|i| out[*i].is_none()).collect();
    let unknown = |d: &Dim| matches!(d, Dim::Symbol(s) if !x.contains(&Dim::Symbol(s.clone())));
    let foreign = out.iter().flatten().filter(|d| unknown(d)).count();
    if open.len() + foreign > 1 {
        return Err(format!(
            "dims {} leave more than one size open for x [{}]",
            AttrValue::List(words.clone()),
            list(x)
        ));
    }
    // Symbols that stand on both sides cancel; the rest must hold equally many elements.
    let mut left: Vec<&Dim> = x.iter().collect();
    let mut right: Vec<&Dim> = Vec::new();
    for d in out.iter().flatten() {
        match left.iter().position(|l| *l == d && size(d).is_none()) {
            Some(i) => {
                left.remove(i);
            }
            None => right.push(d),
        }
    }
    let product = |d: &[&Dim]| d.iter().map(|d| size(d)).product::<Option<usize>>();
    let (have, given) = (product(&left), product(&right));
    match (have, given, open.as_slice()) {
        (Some(h), Some(g), []) if h != g => Err(format!(
            "x [{}] leaves {h} elements, dims {} hold {g}: {g} elements for {h}",
            list(x),
            AttrValue::List(words.clone())
        )),
        (Some(h), Some(g), [i]) => {
            if g == 0 || h % g != 0 {
                return Err(format!(
                    "x [{}]: {h} elements do not divide by {g}",
                    list(x)
                ));
            }
            out[*i] = Some(Dim::Size(h / g));
            Ok(out)
        }
        _ => Ok(out),
    }
}
