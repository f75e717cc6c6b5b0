//! `modnorm_qkv_chain`: a norm without weights, its modulation, and the projections that read it.
//!
//! The span `chain` is modulated by a projected conditioning or by a table that is added to an
//! embedding of each token; the span `ffn` is the table's second half around a feed-forward.
//! Under the conditioning every step is rounded to the boundary dtype: the activation, the style,
//! the normed row, `1 + scale`, the scaled row, the shifted row. Under the table all this is f32 and
//! only the shifted row is rounded. Each product is rounded once, with its bias.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Spread, Tensor, TensorMut};

use super::Leaf;
use crate::activation::Activation;
use crate::biased::Biased;
use crate::boundary::Boundary;
use crate::format::Format;
use crate::norm;
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    versions: &[3],
    formats: &Format::ALL,
    points: &["attn_in", "ffn_in", "ffn_hid"],
    points_under: &[("modulation", "per_token_table")],
    variants: &[
        ("modulation", &["scale_shift", "per_token_table"]),
        ("fanout", &["qkv", "q_only"]),
    ],
    ..Leaf::plain("modnorm_qkv_chain", &["chain", "ffn"], bind)
};

/// Rows of the table: shift, scale, gate of the attention, then of the feed-forward.
const CHUNKS: usize = 6;

/// Where scale and shift come from.
enum Modulation {
    /// Halves of `silu(cond) W + b`.
    Projected { cond: Biased, input: usize },
    /// Rows of `table + temb`, from this one on.
    Table {
        table: Vec<f32>,
        first: usize,
        input: usize,
    },
}

/// What the modulated rows go into.
enum Then {
    /// Projections with the positions of their outputs.
    Projections(Vec<(Biased, usize)>),
    /// A feed-forward, gated and added to the input; the position of its output.
    FeedForward(Box<[Biased; 2]>, usize),
}

struct Chain {
    shared: Shared,
    rows: Rows,
    modulation: Modulation,
    then: Then,
    eps: f32,
    d: usize,
    x: usize,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let host = &shared.host;
    let (inputs, outputs) = (&request.params.inputs, &request.params.outputs);
    let table = request.axis("modulation")? == "per_token_table";
    let linear = |slot: &str, bias: &str, point: &str| {
        // The other modulation has no points.
        let point = if table { point } else { "" };
        let weight = request.required_weight(slot)?;
        ports::dims::<2>(slot, &weight)?;
        // Slots are [N, K].
        Biased::bind(host, format, weight.transpose(0, 1)?, bias, request, point)
    };
    let feed_forward = request.span == "ffn";
    let (then, d, x) = match feed_forward {
        true => {
            let [fc1, fc2] = [
                linear("w_fc1", "b_fc1", "ffn_in")?,
                linear("w_fc2", "b_fc2", "ffn_hid")?,
            ];
            let d = fc1.k();
            if (fc2.n(), fc2.k()) != (d, fc1.n()) {
                let text = format!(
                    "w_fc1 is {d} to {}, w_fc2 {} to {}",
                    fc1.n(),
                    fc2.k(),
                    fc2.n()
                );
                return Err(Failure::refused("dims_inconsistent", text));
            }
            let out = ports::position(outputs, "out")?;
            (Then::FeedForward(Box::new([fc1, fc2]), out), d, "x_cross")
        }
        false => {
            let mut all = Vec::new();
            for (output, slot, bias) in [
                ("q", "w_q", "b_q"),
                ("k", "w_k", "b_k"),
                ("v", "w_v", "b_v"),
            ] {
                // Under `q_only` the others are not made.
                if let Some(position) = ports::optional(outputs, output) {
                    all.push((linear(slot, bias, "attn_in")?, position));
                }
            }
            let d = all.first().map_or(0, |(first, _)| first.k());
            if all.is_empty() || all.iter().any(|(p, _)| p.k() != d) {
                let widths: Vec<usize> = all.iter().map(|(p, _)| p.k()).collect();
                let text = format!("projections of {outputs:?} read widths {widths:?}");
                return Err(Failure::refused("dims_inconsistent", text));
            }
            (Then::Projections(all), d, "x")
        }
    };
    let modulation = match request.axis("modulation")? {
        "per_token_table" => {
            let table = request.required_weight("table")?;
            if table.len() != CHUNKS * d || table.cols() != d {
                let text = format!(
                    "slot `table` has dims {:?}, expected [1, {CHUNKS}, {d}]",
                    table.dims()
                );
                return Err(Failure::refused("dims_inconsistent", text));
            }
            Modulation::Table {
                table: table.to_f32_vec()?,
                first: if feed_forward { CHUNKS / 2 } else { 0 },
                input: ports::position(inputs, "temb")?,
            }
        }
        _ if feed_forward => {
            let text = "span `ffn` has its modulation from the table only";
            return Err(Failure::refused("format_no_variant", text));
        }
        _ => {
            let cond = linear("w_cond", "b_cond", "")?.with_bias("b_cond")?;
            if cond.n() != 2 * d {
                let text = format!("w_cond makes {} channels, expected {}", cond.n(), 2 * d);
                return Err(Failure::refused("dims_inconsistent", text));
            }
            Modulation::Projected {
                cond,
                input: ports::position(inputs, "cond")?,
            }
        }
    };
    Ok(Box::new(Chain {
        shared: shared.clone(),
        rows: Rows::of(request)?,
        modulation,
        then,
        eps: request.number("eps")? as f32,
        d,
        x: ports::position(inputs, x)?,
    }))
}

/// Scale, shift and gate of each row of x, found by the row's own place in the values.
struct Modulator<'m> {
    values: &'m [f32],
    spread: Spread,
    width: usize,
    /// Offsets of scale, shift and gate.
    parts: [usize; 3],
}

impl Modulator<'_> {
    fn of(&self, row: usize, d: usize) -> [&[f32]; 3] {
        let values = &self.values[self.spread.row(row) * self.width..][..self.width];
        self.parts
            .map(|from| values.get(from..from + d).unwrap_or(&[]))
    }
}

impl Modulation {
    fn input(&self) -> usize {
        match self {
            Modulation::Projected { input, .. } | Modulation::Table { input, .. } => *input,
        }
    }

    /// Values a row of conditioning has, before and after.
    fn widths(&self, d: usize) -> [usize; 2] {
        match self {
            Modulation::Projected { cond, .. } => [cond.k(), cond.n()],
            Modulation::Table { .. } => [CHUNKS * d; 2],
        }
    }

    /// Offsets of scale, shift and gate among those after.
    fn parts(&self, d: usize) -> [usize; 3] {
        match self {
            // No gate: past the end.
            Modulation::Projected { .. } => [0, d, 2 * d],
            Modulation::Table { first, .. } => [(first + 1) * d, first * d, (first + 2) * d],
        }
    }

    /// Fills `values` from the conditioning `given`, which is overwritten.
    fn fill(
        &self,
        shared: &Shared,
        boundary: Boundary,
        given: &mut [f32],
        product: &mut [f32],
        values: &mut [f32],
    ) {
        match self {
            Modulation::Projected { cond, .. } => {
                for value in given.iter_mut() {
                    *value = boundary.round(Activation::Silu.apply(*value));
                }
                cond.apply(&shared.host, given, product, values, |_, y, b| {
                    boundary.round(y + b)
                });
            }
            Modulation::Table { table, .. } => {
                for (i, (to, value)) in values.iter_mut().zip(given.iter()).enumerate() {
                    *to = value + table[i % table.len()];
                }
            }
        }
    }
}

impl BoundForm for Chain {
    fn facts(&self) -> FormFacts {
        let modulation = match &self.modulation {
            Modulation::Projected { cond, .. } => cond.bytes(),
            Modulation::Table { table, .. } => 4 * table.len() as u64,
        };
        let then: u64 = match &self.then {
            Then::Projections(all) => all.iter().map(|(p, _)| p.bytes()).sum(),
            Then::FeedForward(both, _) => both.iter().map(Biased::bytes).sum(),
        };
        FormFacts {
            packed_bytes: modulation + then,
            ..FormFacts::default()
        }
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let d = self.d;
        let x = ports::required(inputs, self.x)?;
        let rows = self.rows.admit(Some(x), d)?;
        let given = ports::required(inputs, self.modulation.input())?;
        let [before, after] = self.modulation.widths(d);
        let (tail, width) = match self.modulation {
            Modulation::Projected { .. } => (1, before),
            Modulation::Table { .. } => (2, d),
        };
        if given.cols() != width || !given.len().is_multiple_of(before.max(1)) {
            let text = format!(
                "a conditioning of dims {:?}, expected rows of {before}",
                given.dims()
            );
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        let spread = Spread::of("the conditioning", &given, tail, &x)?;
        let styles = given.len() / before.max(1);
        let (widest, hidden) = match &self.then {
            // Each projection has the rows to itself: a quantising one leaves its codes in them.
            Then::Projections(all) => (all.iter().map(|(p, _)| p.n()).max().unwrap_or(0), d),
            Then::FeedForward(both, _) => (d.max(both[0].n()), both[0].n()),
        };
        let sizes = [
            given.len(),
            (styles * after).max(rows * widest),
            styles * after,
            rows * d,
            rows * d,
            rows * hidden,
            rows * widest,
        ];
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [cond, product, style, buffer, modulated, hidden, y] = lease.split(sizes);
        given.read_f32(cond)?;
        let x = ports::floats(&x, buffer)?;
        let (host, boundary) = (&self.shared.host, self.rows.boundary());
        let part = &mut product[..styles * after];
        self.modulation
            .fill(&self.shared, boundary, cond, part, style);
        let modulator = Modulator {
            values: style,
            spread,
            width: after,
            parts: self.modulation.parts(d),
        };
        let step = match self.modulation {
            Modulation::Projected { .. } => boundary,
            Modulation::Table { .. } => Boundary::F32,
        };
        host.parallel_chunks(modulated, d, |row, to| {
            let x = &x[row * d..][..d];
            let (mean, inverse) = norm::layer(x, self.eps);
            let [scale, shift, _] = modulator.of(row, d);
            for (i, to) in to.iter_mut().enumerate() {
                let normed = step.round((x[i] - mean) * inverse);
                let scaled = step.round(normed * step.round(1.0 + scale[i]));
                *to = boundary.round(scaled + shift[i]);
            }
        });
        match &self.then {
            Then::Projections(all) => {
                for (projection, position) in all {
                    let n = projection.n();
                    let out = self.rows.output(outputs, *position, rows, n)?;
                    let (product, y) = (&mut product[..rows * n], &mut y[..rows * n]);
                    hidden.copy_from_slice(modulated);
                    projection.apply(host, hidden, product, y, |_, y, b| y + b);
                    out.write_f32(y)?;
                }
                Ok(())
            }
            Then::FeedForward(both, position) => {
                let [fc1, fc2] = &**both;
                let out = self.rows.output(outputs, *position, rows, d)?;
                let wide = &mut product[..rows * fc1.n()];
                fc1.apply(host, modulated, wide, hidden, |_, y, b| {
                    let sum = boundary.round(y + b);
                    boundary.round(Activation::GeluTanh.apply(sum))
                });
                let (product, y) = (&mut product[..rows * d], &mut y[..rows * d]);
                fc2.apply(host, hidden, product, y, |i, y, b| {
                    let [_, _, gate] = modulator.of(i / d, d);
                    x[i] + boundary.round(y + b) * gate[i % d]
                });
                out.write_f32(y)
            }
        }
    }
}
