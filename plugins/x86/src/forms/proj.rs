//! `linear_proj`: one product, an optional bias, an optional epilogue.

use std::collections::BTreeMap;

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Host, Tensor, TensorMut};

use super::{axis, rows_of, w8a16};
use crate::elementwise::Activation;
use crate::isa::Isa;
use crate::packed::Packed;
use crate::product;
use crate::region::Tiles;
use crate::rows::Rows;

pub fn declare() -> FormDecl {
    let words = |list: &[&str]| list.iter().map(|s| (*s).to_string()).collect::<Vec<_>>();
    FormDecl {
        variants: BTreeMap::from([
            (
                "epilogue".to_string(),
                words(&["none", "gelu_quant_fp8", "residual_add"]),
            ),
            ("in_dtype".to_string(), words(&["bf16"])),
        ]),
        ..w8a16("linear_proj", &["proj"])
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Epilogue {
    None,
    Gelu,
    Residual,
}

struct Proj {
    host: Host,
    isa: Isa,
    packed: Packed,
    bias: Option<Vec<f32>>,
    epilogue: Epilogue,
    rows: Rows,
    tiles: Tiles,
}

pub fn bind(
    host: &Host,
    isa: Isa,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let packed = Packed::pack(isa, &request.required_weight("w")?)?;
    let bias = match (axis(request, "bias"), request.weight("b")) {
        (Some("none"), _) | (_, None) => None,
        (_, Some(b)) => {
            let b = b.to_f32_vec()?;
            if b.len() != packed.n {
                let text = format!("bias of {} elements for {} outputs", b.len(), packed.n);
                return Err(Failure::refused("dims_inconsistent", text));
            }
            Some(b)
        }
    };
    let epilogue = match axis(request, "epilogue") {
        None | Some("none") => Epilogue::None,
        Some("gelu_quant_fp8") => Epilogue::Gelu,
        Some("residual_add") => Epilogue::Residual,
        Some(other) => {
            return Err(Failure::refused(
                "format_no_variant",
                format!("epilogue `{other}`"),
            ))
        }
    };
    let (rows, tiles) = (Rows::new(packed.k), Tiles::new(packed.blocks()));
    Ok(Box::new(Proj {
        host: *host,
        isa,
        packed,
        bias,
        epilogue,
        rows,
        tiles,
    }))
}

impl BoundForm for Proj {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: self.packed.bytes(),
            scratch_bytes: self.rows.bytes() + self.tiles.bytes(),
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
        let [x, rest @ ..] = inputs else {
            return Err(Failure::invalid("argument", "no input"));
        };
        let n_rows = rows_of(x, self.packed.k)?;
        for (row, values) in x.as_f32()?.chunks_exact(self.packed.k).enumerate() {
            self.rows.row_mut(row).copy_from_slice(values);
        }
        self.rows.prepare(self.isa, n_rows);
        let (isa, packed, rows) = (self.isa, &self.packed, &self.rows);
        self.tiles.fill(
            &self.host,
            packed.blocks(),
            n_rows,
            packed.bytes(),
            |b, tile| {
                product::block(isa, packed, b, rows, tile);
            },
        );
        let residual = match (
            self.epilogue,
            rest.first().copied().and_then(Tensor::present),
        ) {
            (Epilogue::Residual, Some(r)) => Some(r.as_f32()?),
            (Epilogue::Residual, None) => {
                return Err(Failure::invalid("argument", "the residual is absent"))
            }
            _ => None,
        };
        let n = packed.n;
        let out = outputs
            .first_mut()
            .ok_or_else(|| Failure::invalid("argument", "no output"))?
            .as_f32_mut()?;
        if out.len() != n_rows * n || residual.is_some_and(|r| r.len() != out.len()) {
            let text = format!("output of {} elements for {n_rows} rows of {n}", out.len());
            return Err(Failure::invalid("argument", text));
        }
        for (row, out) in out.chunks_exact_mut(n).enumerate() {
            self.tiles.copy_row(0, row, out);
            if let Some(bias) = &self.bias {
                out.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
            }
            if self.epilogue == Epilogue::Gelu {
                out.iter_mut()
                    .for_each(|o| *o = Activation::GeluTanh.apply(*o));
            }
            if let Some(residual) = residual {
                let residual = &residual[row * n..(row + 1) * n];
                out.iter_mut().zip(residual).for_each(|(o, r)| *o += r);
            }
        }
        Ok(())
    }
}
