//! The forms: `w8a16_static` of three structures, one file each. The list drives `describe` and `bind`.

mod ffn;
mod pack;
mod proj;

use structures_plugin_api::describe::{Band, FormDecl, StatisticDecl, WeightFormat};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Host, Tensor};

use crate::isa::Isa;
use crate::rows::MAX_ROWS;

/// Packs the weights of a request for an isa.
pub type Bind = fn(&Host, Isa, &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure>;

/// One form: what it declares and how it binds.
pub struct Form {
    /// Its declaration.
    pub declare: fn() -> FormDecl,
    /// Packs the weights for an isa.
    pub bind: Bind,
}

/// Every form of this backend.
pub const FORMS: &[Form] = &[
    Form {
        declare: ffn::declare,
        bind: ffn::bind,
    },
    Form {
        declare: proj::declare,
        bind: proj::bind,
    },
    Form {
        declare: pack::declare,
        bind: pack::bind,
    },
];

/// What the forms have in common: int8 weights, 16-bit activations, no statistics, 1 to 8 rows.
///
/// Tolerance: the reference uses the same int8 weights, so what is left is the 16-bit split of the activations. One
/// scale a row: rows with an outlier a thousand times the rest lose the rest.
/// Measured on SmolLM2: 1e-5 typical, 6e-4 at worst (layer 27, the first token).
fn w8a16(structure: &str, spans: &[&str]) -> FormDecl {
    FormDecl {
        spans: spans.iter().map(|s| (*s).to_string()).collect(),
        dtypes: vec!["f32".into()],
        statistics: Vec::<StatisticDecl>::new(),
        band: Band {
            rows: Some([1, MAX_ROWS as u64]),
            ..Band::default()
        },
        weight_format: WeightFormat::Int8PerChannel,
        tolerance: 5e-3,
        precision_rank: 10,
        quantises: true,
        priority: 10,
        ..FormDecl::new(structure, "w8a16", "w8a16_static")
    }
}

/// Rows of a call, checked against the band and the width.
fn rows_of(x: &Tensor<'_>, width: usize) -> Result<usize, Failure> {
    if x.cols() != width {
        let text = format!("input width {}, bound for {width}", x.cols());
        return Err(Failure::refused("envelope", text));
    }
    match x.rows() {
        rows @ 1..=MAX_ROWS => Ok(rows),
        rows => Err(Failure::refused(
            "form_band",
            format!("{rows} rows, the form serves 1..={MAX_ROWS}"),
        )),
    }
}

/// A text parameter of the variant.
fn axis<'a>(request: &'a BindRequest<'_>, name: &str) -> Option<&'a str> {
    request.params.variant.get(name).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use structures_plugin_api::abi::{CallCtx, Contract, DType};
    use structures_plugin_api::describe::BindParams;
    use structures_plugin_api::formats::{round_weight, WeightMatrix};
    use structures_plugin_api::sdk::TensorMut;

    use super::*;
    use crate::elementwise::{rms_norm, Activation};
    use crate::isa::ENTRIES;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut s = seed.wrapping_mul(2_654_435_761) | 1;
        (0..n)
            .map(|_| {
                s ^= s << 13;
                s ^= s >> 17;
                s ^= s << 5;
                (s as f32 / u32::MAX as f32) * 2.0 - 1.0
            })
            .collect()
    }

    /// `x @ w` on the weights as int8 keeps them; `w` is `[k, n]`.
    fn product(x: &[f32], w: &[f32], k: usize, n: usize) -> Vec<f32> {
        let mut w = w.to_vec();
        round_weight(
            WeightFormat::Int8PerChannel,
            WeightMatrix::in_out(&mut w, n, k),
        );
        x.chunks_exact(k)
            .flat_map(|row| {
                let w = &w;
                (0..n).map(move |o| (0..k).map(|i| row[i] * w[i * n + o]).sum::<f32>())
            })
            .collect()
    }

    struct Case<'a> {
        structure: &'a str,
        span: &'a str,
        variant: &'a [(&'a str, &'a str)],
        weights: Vec<(&'a str, Vec<f32>, Vec<usize>)>,
        inputs: Vec<Option<(Vec<f32>, Vec<usize>)>>,
        outputs: Vec<Vec<usize>>,
    }

    fn run(case: &Case<'_>, isa: Isa) -> Result<Vec<Vec<f32>>, Failure> {
        let contract = Contract {
            struct_size: size_of::<Contract>() as u32,
            dtype: DType::F32 as u32,
            row_capacity: 8,
            rows_exact: 0,
            device: 0,
            flags: 0,
        };
        let params = BindParams {
            structure: case.structure.into(),
            version: 1,
            variant: case
                .variant
                .iter()
                .map(|(k, v)| ((*k).to_string(), (*v).to_string()))
                .collect(),
            params: BTreeMap::from([("eps".to_string(), 1e-5.into())]),
            outputs: (0..case.outputs.len()).map(|i| format!("y_{i}")).collect(),
            ..BindParams::default()
        };
        let mut request = BindRequest::new("w8a16", case.span, params, &contract);
        for (name, data, dims) in &case.weights {
            request = request.with_weight(name, Tensor::from_f32(data, dims)?);
        }
        let form = FORMS
            .iter()
            .find(|f| (f.declare)().structure == case.structure)
            .unwrap();
        let mut bound = (form.bind)(&Host::detached(), isa, &request)?;
        assert!(bound.facts().packed_bytes > 0);
        let inputs: Vec<Tensor<'_>> = case
            .inputs
            .iter()
            .map(|i| match i {
                Some((data, dims)) => Tensor::from_f32(data, dims).unwrap(),
                None => Tensor::ABSENT,
            })
            .collect();
        let mut buffers: Vec<Vec<f32>> = case
            .outputs
            .iter()
            .map(|d| vec![f32::NAN; d.iter().product()])
            .collect();
        let ctx = CallCtx {
            struct_size: size_of::<CallCtx>() as u32,
            flags: 0,
            queue: std::ptr::null_mut(),
            workspace: std::ptr::null_mut(),
        };
        {
            let mut outputs: Vec<TensorMut<'_>> = buffers
                .iter_mut()
                .zip(&case.outputs)
                .map(|(b, d)| TensorMut::from_f32(b, d).unwrap())
                .collect();
            bound.call(&ctx, &inputs, &mut outputs, &mut [])?;
        }
        Ok(buffers)
    }

    fn close(got: &[f32], want: &[f32]) {
        let scale = want.iter().fold(0f32, |m, v| m.max(v.abs()));
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() <= 2e-4 * scale, "{g} for {w} (scale {scale})");
        }
    }

    fn each(test: impl Fn(Isa)) {
        for (name, isa) in ENTRIES {
            if isa.present() {
                test(isa);
            } else {
                eprintln!("skipped {name}: not on this CPU");
            }
        }
    }

    #[test]
    fn the_feed_forward_equals_its_formula_on_both_spans() {
        let (d, f, m) = (36, 52, 3);
        let (norm, gate) = (noise(d, 1), noise(d * f, 2));
        let (up, down) = (noise(d * f, 3), noise(f * d, 4));
        let x = noise(m * d, 5);
        let hidden = |h: &[f32]| {
            let (g, u) = (product(h, &gate, d, f), product(h, &up, d, f));
            let a: Vec<f32> = g
                .iter()
                .zip(&u)
                .map(|(g, u)| Activation::Silu.apply(*g) * u)
                .collect();
            product(&a, &down, f, d)
        };
        let weights = vec![
            ("w_norm", norm.clone(), vec![d]),
            ("w_gate", gate.clone(), vec![d, f]),
            ("w_up", up.clone(), vec![d, f]),
            ("w_down", down.clone(), vec![f, d]),
        ];
        let variant = [
            ("activation", "silu"),
            ("norm_weight_mode", "offset"),
            ("conditioning", "none"),
        ];
        each(|isa| {
            let block = Case {
                structure: "decoder_ffn",
                span: "block",
                variant: &variant,
                weights: weights.clone(),
                inputs: vec![Some((x.clone(), vec![m, d])), None, None, None],
                outputs: vec![vec![m, d]],
            };
            let mut h = vec![0.0; m * d];
            for (to, from) in h.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
                rms_norm(from, &norm, 1.0, 1e-5, to);
            }
            let want: Vec<f32> = hidden(&h).iter().zip(&x).map(|(y, x)| y + x).collect();
            close(&run(&block, isa).unwrap()[0], &want);
            let ffn = Case {
                span: "ffn",
                inputs: vec![Some((x.clone(), vec![m, d]))],
                ..block
            };
            close(&run(&ffn, isa).unwrap()[0], &hidden(&x));
        });
    }

    #[test]
    fn a_projection_has_its_bias_and_its_epilogues() {
        let (k, n, m) = (20, 33, 2);
        let (w, b) = (noise(k * n, 1), noise(n, 2));
        let (x, r) = (noise(m * k, 3), noise(m * n, 4));
        let plain: Vec<f32> = product(&x, &w, k, n)
            .chunks_exact(n)
            .flat_map(|row| row.iter().zip(&b).map(|(y, b)| y + b).collect::<Vec<_>>())
            .collect();
        each(|isa| {
            for (epilogue, residual) in [
                ("none", false),
                ("gelu_quant_fp8", false),
                ("residual_add", true),
            ] {
                let case = Case {
                    structure: "linear_proj",
                    span: "proj",
                    variant: &[("bias", "add"), ("epilogue", epilogue)],
                    weights: vec![("w", w.clone(), vec![k, n]), ("b", b.clone(), vec![n])],
                    inputs: vec![
                        Some((x.clone(), vec![m, k])),
                        residual.then(|| (r.clone(), vec![m, n])),
                    ],
                    outputs: vec![vec![m, n]],
                };
                let want: Vec<f32> = match epilogue {
                    "gelu_quant_fp8" => plain
                        .iter()
                        .map(|y| Activation::GeluTanh.apply(*y))
                        .collect(),
                    "residual_add" => plain.iter().zip(&r).map(|(y, r)| y + r).collect(),
                    _ => plain.clone(),
                };
                close(&run(&case, isa).unwrap()[0], &want);
            }
        });
    }

    #[test]
    fn a_pack_keeps_its_siblings_apart() {
        let (k, m) = (24, 8);
        let sizes = [40, 8, 8];
        let weights: Vec<Vec<f32>> = sizes
            .iter()
            .enumerate()
            .map(|(i, n)| noise(k * n, i as u32 + 1))
            .collect();
        let x = noise(m * k, 9);
        each(|isa| {
            let names = ["w_0", "w_1", "w_2"];
            let case = Case {
                structure: "qkv_pack",
                span: "pack",
                variant: &[("bind", "leaf")],
                weights: (0..3)
                    .map(|i| (names[i], weights[i].clone(), vec![k, sizes[i]]))
                    .collect(),
                inputs: vec![Some((x.clone(), vec![m, k]))],
                outputs: sizes.iter().map(|n| vec![m, *n]).collect(),
            };
            let got = run(&case, isa).unwrap();
            for i in 0..3 {
                close(&got[i], &product(&x, &weights[i], k, sizes[i]));
            }
        });
    }

    #[test]
    fn nine_rows_and_conditioning_are_refused_by_code() {
        each(|isa| {
            let case = Case {
                structure: "linear_proj",
                span: "proj",
                variant: &[("bias", "none"), ("epilogue", "none")],
                weights: vec![("w", noise(16, 1), vec![4, 4])],
                inputs: vec![Some((noise(36, 2), vec![9, 4])), None],
                outputs: vec![vec![9, 4]],
            };
            assert_eq!(run(&case, isa).unwrap_err().code, "form_band");
        });
    }
}
