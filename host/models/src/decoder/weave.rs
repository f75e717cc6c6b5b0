//! A graph builder that speaks of modules: what builders of decoders have in common, in normal form.

use structures_graph::{
    AttrValue, Dim, GraphBuilder, Layout, OpKind, ParamRef, StateRegion, ValueId,
};

use crate::config::Rope;

/// Rows `[from, to)` of a stored parameter.
pub(crate) type Rows = Option<(usize, usize)>;

/// What `attention` of one layer is, beside its operands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Score {
    pub(crate) scale: Option<f64>,
    pub(crate) window: Option<usize>,
    pub(crate) softcap: Option<f64>,
}

pub(crate) struct Weave {
    pub(crate) b: GraphBuilder,
    /// Epsilon of the norms.
    pub(crate) eps: f64,
    /// Norm weights are multiplied as `1 + w`.
    pub(crate) offset: bool,
}

impl Weave {
    pub(crate) fn op(
        &mut self,
        kind: OpKind,
        at: &str,
        label: &str,
        inputs: &[ValueId],
        attrs: &[(&str, AttrValue)],
        shape: Vec<Dim>,
    ) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.b.op(kind, at, label, &inputs, attrs, shape)
    }

    /// The dims of a value with another last one.
    pub(crate) fn widened(&self, x: ValueId, width: usize) -> Vec<Dim> {
        let mut shape = self.b.dims(x).to_vec();
        shape.pop();
        shape.push(Dim::Size(width));
        shape
    }

    /// A parameter. Matrices are stored `[out, in]`; for the embedding that reads `[vocabulary, width]`, which is also
    /// how a tied head reads it.
    pub(crate) fn param(&mut self, at: &str, name: &str, rows: Rows, shape: &[usize]) -> ValueId {
        let layout = match shape.len() {
            2 => Layout::OutIn,
            _ => Layout::InOut,
        };
        let param = ParamRef {
            path: at.into(),
            name: name.into(),
            rows,
        };
        self.b.param(param, shape, layout)
    }

    /// A product with a module's weight, and its bias where it has one: `<at>.<label>`.
    pub(crate) fn linear(
        &mut self,
        at: &str,
        label: &str,
        x: ValueId,
        rows: Rows,
        [input, out]: [usize; 2],
        bias: bool,
    ) -> ValueId {
        let w = self.param(at, "weight", rows, &[out, input]);
        let shape = self.widened(x, out);
        if !bias {
            return self.op(OpKind::Linear, at, label, &[x, w], &[], shape);
        }
        let product = format!("{label}_product");
        let y = self.op(OpKind::Linear, at, &product, &[x, w], &[], shape.clone());
        let b = self.param(at, "bias", rows, &[out]);
        self.op(OpKind::Bias, at, label, &[y, b], &[], shape)
    }

    /// A norm over the last `axes` dims.
    pub(crate) fn rms_norm(
        &mut self,
        at: &str,
        x: ValueId,
        width: usize,
        axes: usize,
        offset: bool,
    ) -> ValueId {
        let w = self.param(at, "weight", None, &[width]);
        let mode = if offset { "offset" } else { "direct" };
        let mut attrs = vec![
            ("eps", AttrValue::Float(self.eps)),
            ("weight", AttrValue::Word(mode.into())),
        ];
        if axes != 1 {
            attrs.push(("axes", AttrValue::Int(axes as i64)));
        }
        let shape = self.b.dims(x).to_vec();
        self.op(OpKind::RmsNorm, at, "out", &[x, w], &attrs, shape)
    }

    /// The usual norm of the model.
    pub(crate) fn norm(&mut self, at: &str, x: ValueId, width: usize) -> ValueId {
        self.rms_norm(at, x, width, 1, self.offset)
    }

    pub(crate) fn layer_norm(&mut self, at: &str, x: ValueId, width: usize) -> ValueId {
        let w = self.param(at, "weight", None, &[width]);
        let b = self.param(at, "bias", None, &[width]);
        let attrs = [("eps", AttrValue::Float(self.eps))];
        let shape = self.b.dims(x).to_vec();
        self.op(OpKind::LayerNorm, at, "out", &[x, w, b], &attrs, shape)
    }

    pub(crate) fn act(&mut self, at: &str, label: &str, x: ValueId, kind: &str) -> ValueId {
        let shape = self.b.dims(x).to_vec();
        let attrs = [("kind", AttrValue::Word(kind.into()))];
        self.op(OpKind::Act, at, label, &[x], &attrs, shape)
    }

    pub(crate) fn add(&mut self, at: &str, label: &str, a: ValueId, b: ValueId) -> ValueId {
        let shape = self.b.dims(a).to_vec();
        self.op(OpKind::Add, at, label, &[a, b], &[], shape)
    }

    /// A product element by element; `b` may be narrower.
    pub(crate) fn mul(&mut self, at: &str, label: &str, a: ValueId, b: ValueId) -> ValueId {
        let shape = self.b.dims(a).to_vec();
        self.op(OpKind::Mul, at, label, &[a, b], &[], shape)
    }

    /// Nothing, for a factor of one.
    pub(crate) fn scale(&mut self, at: &str, label: &str, x: ValueId, by: f64) -> ValueId {
        if by == 1.0 {
            return x;
        }
        let shape = self.b.dims(x).to_vec();
        let attrs = [("by", AttrValue::Float(by))];
        self.op(OpKind::Scale, at, label, &[x], &attrs, shape)
    }

    pub(crate) fn reshape(
        &mut self,
        at: &str,
        label: &str,
        x: ValueId,
        shape: Vec<Dim>,
    ) -> ValueId {
        let list = shape
            .iter()
            .map(|d| match d {
                Dim::Size(n) => AttrValue::Int(*n as i64),
                Dim::Symbol(s) => AttrValue::Word(s.clone()),
            })
            .collect();
        let attrs = [("dims", AttrValue::List(list))];
        self.op(OpKind::Reshape, at, label, &[x], &attrs, shape)
    }

    /// Parts of the last dim of these sizes.
    pub(crate) fn split(&mut self, at: &str, x: ValueId, parts: &[(&str, usize)]) -> Vec<ValueId> {
        let sizes = parts.iter().map(|(_, n)| AttrValue::Int(*n as i64));
        let attrs = [("sizes", AttrValue::List(sizes.collect()))];
        let results = parts
            .iter()
            .map(|(label, n)| (*label, self.widened(x, *n)))
            .collect();
        self.b.ops(OpKind::Split, at, &[Some(x)], &attrs, results)
    }

    /// A fixed region `<at>.<name>` as it is before the run.
    pub(crate) fn fixed(&mut self, at: &str, name: &str, sizes: &[usize]) -> ValueId {
        self.b
            .state(StateRegion::fixed(format!("{at}.{name}"), sizes))
    }

    /// What the region holds after it.
    pub(crate) fn keep(&mut self, at: &str, label: &str, x: ValueId, region: ValueId) {
        let shape = self.b.dims(x).to_vec();
        self.op(OpKind::StateWrite, at, label, &[x, region], &[], shape);
    }

    /// `cos` and `sin` for `width` channels at `positions [T]`, or `[A,T]` where `axes` name a row for each frequency.
    pub(crate) fn rope_tables(
        &mut self,
        at: &str,
        positions: ValueId,
        rope: &Rope,
        width: usize,
        axes: Option<&[usize]>,
    ) -> [ValueId; 2] {
        let [cos, sin] = self.rope_tables_by(at, positions, rope.inv_freq(width), axes);
        [
            self.scale(at, "cos_scaled", cos, rope.amplitude),
            self.scale(at, "sin_scaled", sin, rope.amplitude),
        ]
    }

    /// Tables of these frequencies; with `axes`, at `positions [A,T]`, each frequency at the row it names.
    pub(crate) fn rope_tables_by(
        &mut self,
        at: &str,
        positions: ValueId,
        frequencies: Vec<f64>,
        axes: Option<&[usize]>,
    ) -> [ValueId; 2] {
        let half = dims(&["T"], &[frequencies.len()]);
        let list = AttrValue::List(frequencies.into_iter().map(AttrValue::Float).collect());
        let mut attrs = vec![("inv_freq", list)];
        if let Some(axes) = axes {
            let axes = axes.iter().map(|a| AttrValue::Int(*a as i64));
            attrs.push(("axes", AttrValue::List(axes.collect())));
        }
        let tables = self.b.ops(
            OpKind::RopeTable,
            at,
            &[Some(positions)],
            &attrs,
            vec![("cos", half.clone()), ("sin", half)],
        );
        [tables[0], tables[1]]
    }

    /// `x [B,T,H,D]` turned; `rotary` channels of each head.
    pub(crate) fn rope(
        &mut self,
        at: &str,
        label: &str,
        x: ValueId,
        [cos, sin]: [ValueId; 2],
        rotary: usize,
    ) -> ValueId {
        let shape = self.b.dims(x).to_vec();
        let attrs = match shape.last() {
            Some(Dim::Size(d)) if *d == rotary => vec![],
            _ => vec![("rotary", AttrValue::Int(rotary as i64))],
        };
        self.op(OpKind::Rope, at, label, &[x, cos, sin], &attrs, shape)
    }

    /// `[B,T,H,D]` -> `[B,H,T,D]`.
    pub(crate) fn heads_first(&mut self, at: &str, label: &str, x: ValueId) -> ValueId {
        let perm = [0usize, 2, 1, 3];
        let from = self.b.dims(x).to_vec();
        let shape = perm.iter().filter_map(|p| from.get(*p).cloned()).collect();
        let list = perm.map(|p| AttrValue::Int(p as i64)).to_vec();
        let attrs = [("perm", AttrValue::List(list))];
        self.op(OpKind::Transpose, at, label, &[x], &attrs, shape)
    }

    /// Appends `[B,H,T,D]` to the region `<at>.<side>`; gives all of it.
    pub(crate) fn append(
        &mut self,
        at: &str,
        side: &str,
        x: ValueId,
        heads: usize,
        width: usize,
    ) -> ValueId {
        let region = StateRegion::growing(format!("{at}.{side}"), heads, width);
        let region = self.b.state(region);
        let shape = vec![symbol("B"), Dim::Size(heads), symbol("S"), Dim::Size(width)];
        let label = format!("{side}_all");
        self.op(OpKind::KvAppend, at, &label, &[x, region], &[], shape)
    }

    /// Causal attention over the regions; `[B,T,H,D]`. q, k, v come as `[B,T,H,D]`.
    pub(crate) fn attention(
        &mut self,
        at: &str,
        [q, k, v]: [ValueId; 3],
        [heads, kv_heads, width]: [usize; 3],
        score: Score,
    ) -> ValueId {
        let q = self.heads_first(at, "q_first", q);
        let k = self.heads_first(at, "k_first", k);
        let v = self.heads_first(at, "v_first", v);
        let k = self.append(at, "k", k, kv_heads, width);
        let v = self.append(at, "v", v, kv_heads, width);
        let mut attrs = vec![("causal", AttrValue::Flag(true))];
        if let Some(scale) = score.scale {
            attrs.push(("scale", AttrValue::Float(scale)));
        }
        if let Some(window) = score.window {
            attrs.push(("window", AttrValue::Int(window as i64)));
        }
        if let Some(cap) = score.softcap {
            attrs.push(("softcap", AttrValue::Float(cap)));
        }
        let shape = dims(&["B", "T"], &[heads, width]);
        self.op(
            OpKind::Attention,
            at,
            "attention",
            &[q, k, v],
            &attrs,
            shape,
        )
    }
}

pub(crate) fn symbol(name: &str) -> Dim {
    Dim::Symbol(name.into())
}

pub(crate) fn dims(symbols: &[&str], sizes: &[usize]) -> Vec<Dim> {
    let symbols = symbols.iter().map(|s| symbol(s));
    symbols.chain(sizes.iter().map(|n| Dim::Size(*n))).collect()
}
