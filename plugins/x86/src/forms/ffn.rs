//! `decoder_ffn`: norm, gate and up in one parallel region, activation and product inside it, down in a second.

use std::collections::BTreeMap;

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Host, Tensor, TensorMut};

use super::{axis, rows_of, w8a16};
use crate::elementwise::{rms_norm, Activation};
use crate::isa::Isa;
use crate::packed::{Packed, BLOCK};
use crate::product::{self, Tile};
use crate::region::Tiles;
use crate::rows::{Rows, MAX_ROWS};

pub fn declare() -> FormDecl {
    let words = |list: &[&str]| list.iter().map(|s| (*s).to_string()).collect::<Vec<_>>();
    FormDecl {
        variants: BTreeMap::from([
            ("activation".to_string(), words(&["silu", "gelu"])),
            ("norm_weight_mode".to_string(), words(&["direct", "offset"])),
            ("conditioning".to_string(), words(&["none"])),
        ]),
        ..w8a16("decoder_ffn", &["block", "ffn"])
    }
}

struct Norm {
    weight: Vec<f32>,
    offset: f32,
    eps: f32,
}

struct Ffn {
    host: Host,
    isa: Isa,
    /// Where the gate after the product lies among the inputs, when the span has one.
    cond_gate: Option<usize>,
    /// Present for the span that starts before the norm and ends after the residual.
    norm: Option<Norm>,
    activation: Activation,
    gate: Packed,
    up: Packed,
    down: Packed,
    x: Rows,
    hidden: Rows,
    tiles: Tiles,
}

pub fn bind(
    host: &Host,
    isa: Isa,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let gate = Packed::pack(isa, &request.required_weight("w_gate")?)?;
    let up = Packed::pack(isa, &request.required_weight("w_up")?)?;
    let down = Packed::pack(isa, &request.required_weight("w_down")?)?;
    if (up.k, up.n) != (gate.k, gate.n) || (down.k, down.n) != (gate.n, gate.k) {
        let text = format!(
            "gate [{}, {}], up [{}, {}], down [{}, {}]",
            gate.k, gate.n, up.k, up.n, down.k, down.n
        );
        return Err(Failure::refused("dims_inconsistent", text));
    }
    let name = axis(request, "activation").unwrap_or("");
    let activation = Activation::from_axis(name)
        .ok_or_else(|| Failure::refused("format_no_variant", format!("activation `{name}`")))?;
    let norm = match request.span {
        "block" => {
            let weight = request.weight_of_dims("w_norm", &[gate.k])?.to_f32_vec()?;
            let eps = request
                .params
                .params
                .get("eps")
                .and_then(|v| v.as_f64())
                .ok_or_else(|| {
                    Failure::refused("param_missing", "the norm needs the number `eps`")
                })?;
            let offset = if axis(request, "norm_weight_mode") == Some("offset") {
                1.0
            } else {
                0.0
            };
            Some(Norm {
                weight,
                offset,
                eps: eps as f32,
            })
        }
        "ffn" => None,
        other => return Err(Failure::refused("span_unknown", format!("span `{other}`"))),
    };
    let blocks = gate.blocks().max(down.blocks());
    let position = |name: &str| request.params.inputs.iter().position(|n| n == name);
    Ok(Box::new(Ffn {
        cond_gate: position("cond_gate"),
        host: *host,
        isa,
        norm,
        activation,
        x: Rows::new(gate.k),
        hidden: Rows::new(gate.n),
        tiles: Tiles::new(blocks),
        gate,
        up,
        down,
    }))
}

impl Ffn {
    fn load(&mut self, x: &[f32], width: usize) {
        for (row, values) in x.chunks_exact(width).enumerate() {
            let to = self.x.row_mut(row);
            match &self.norm {
                Some(n) => rms_norm(values, &n.weight, n.offset, n.eps, to),
                None => to.copy_from_slice(values),
            }
        }
    }
}

impl BoundForm for Ffn {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: self.gate.bytes() + self.up.bytes() + self.down.bytes(),
            scratch_bytes: self.x.bytes() + self.hidden.bytes() + self.tiles.bytes(),
            workspace_bytes: 0,
        }
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let Some(x) = inputs.first() else {
            return Err(Failure::invalid("argument", "no input"));
        };
        let mut others = inputs.iter().enumerate().skip(1);
        if others.any(|(i, c)| Some(i) != self.cond_gate && !c.is_absent()) {
            return Err(Failure::refused(
                "format_no_variant",
                "a conditioned norm is not implemented",
            ));
        }
        let width = self.gate.k;
        let n_rows = rows_of(x, width)?;
        let cond_gate = self.cond_gate.and_then(|i| inputs.get(i)?.present());
        let cond_gate = cond_gate.map(|gate| gate.as_f32()).transpose()?;
        if let Some(gate) = cond_gate.filter(|gate| gate.len() != n_rows * width) {
            let text = format!(
                "a gate of {} elements for {n_rows} rows of {width}",
                gate.len()
            );
            return Err(Failure::invalid("argument", text));
        }
        let x = x.as_f32()?;
        self.load(x, width);
        let (isa, activation) = (self.isa, self.activation);
        self.x.prepare(isa, n_rows);
        let (gate, up, rows) = (&self.gate, &self.up, &self.x);
        let bytes = gate.bytes() + up.bytes();
        self.tiles
            .fill(&self.host, gate.blocks(), n_rows, bytes, |b, tile| {
                let mut other: Tile = [[0.0; BLOCK]; MAX_ROWS];
                product::block(isa, gate, b, rows, tile);
                product::block(isa, up, b, rows, &mut other);
                for (g, u) in tile.iter_mut().zip(&other).take(n_rows) {
                    for (g, u) in g.iter_mut().zip(u) {
                        *g = activation.apply(*g) * u;
                    }
                }
            });
        for row in 0..n_rows {
            self.tiles.copy_row(0, row, self.hidden.row_mut(row));
        }
        self.hidden.prepare(isa, n_rows);
        let (down, rows) = (&self.down, &self.hidden);
        self.tiles.fill(
            &self.host,
            down.blocks(),
            n_rows,
            down.bytes(),
            |b, tile| {
                product::block(isa, down, b, rows, tile);
            },
        );
        let out = outputs
            .first_mut()
            .ok_or_else(|| Failure::invalid("argument", "no output"))?
            .as_f32_mut()?;
        if out.len() != n_rows * width {
            let text = format!(
                "output of {} elements for {n_rows} rows of {width}",
                out.len()
            );
            return Err(Failure::invalid("argument", text));
        }
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            self.tiles.copy_row(0, row, out);
            let own = row * width..(row + 1) * width;
            if let Some(gate) = cond_gate {
                out.iter_mut()
                    .zip(&gate[own.clone()])
                    .for_each(|(o, g)| *o *= g);
            }
            if self.norm.is_some() {
                let residual = &x[own];
                out.iter_mut().zip(residual).for_each(|(o, r)| *o += r);
            }
        }
        Ok(())
    }
}
