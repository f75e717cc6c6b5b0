//! The reference of a structure: what its seams must compute.
//!
//! A native reference is a plain candle function beside the entry's yaml, written without the dataflow in mind, so
//! that `verify` compares two independent statements of the same thing. An entry without one is its own dataflow.
//! The front door here refuses a bad call before either runs.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use structures_graph::{AttrValue, Attrs};

use crate::constraint::{first_unmet, Known};
use crate::error::CatalogError;
use crate::evaluate::{CallFn, Feed, Tensors};
use crate::rows::Rows;
use crate::solve::{Dims, Shape, Shapes};
use crate::spec::{Plain, Spec};

/// A call of a native reference: admitted, dims agree, ranks as declared.
pub struct Call<'a> {
    /// Host axes, complete.
    pub axes: &'a BTreeMap<String, String>,
    /// Captured attributes, those that are sizes filled in.
    pub params: &'a Attrs,
    /// Sizes of the dim symbols.
    pub dims: &'a Dims,
    /// Boundary inputs.
    pub inputs: &'a Tensors,
    /// Slots, dims in their declared order.
    pub weights: &'a Tensors,
    /// Boundary dtype.
    pub dtype: DType,
    /// Closures of roles.
    pub calls: &'a BTreeMap<String, CallFn<'a>>,
}

/// A native reference: boundary outputs by name.
pub type ReferenceFn = fn(&Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError>;

impl Call<'_> {
    /// A boundary input in f32.
    pub fn input(&self, name: &str) -> Result<Tensor, CatalogError> {
        match self.inputs.get(name) {
            Some(t) => Ok(t.to_dtype(DType::F32)?),
            None => Err(CatalogError::MissingInput {
                structure: "reference".into(),
                input: name.into(),
                why: String::new(),
            }),
        }
    }

    /// A boundary input in f32, if it is there.
    pub fn optional_input(&self, name: &str) -> Result<Option<Tensor>, CatalogError> {
        let given = self.inputs.get(name);
        Ok(given.map(|t| t.to_dtype(DType::F32)).transpose()?)
    }

    /// A slot in f32.
    pub fn weight(&self, slot: &str) -> Result<Tensor, CatalogError> {
        match self.weights.get(slot) {
            Some(t) => Ok(t.to_dtype(DType::F32)?),
            None => Err(CatalogError::MissingWeight {
                structure: "reference".into(),
                slot: slot.into(),
                why: String::new(),
            }),
        }
    }

    /// A slot in f32, if it is there.
    pub fn optional_weight(&self, slot: &str) -> Result<Option<Tensor>, CatalogError> {
        let given = self.weights.get(slot);
        Ok(given.map(|t| t.to_dtype(DType::F32)).transpose()?)
    }

    /// The value of a host axis.
    pub fn axis(&self, name: &str) -> &str {
        self.axes.get(name).map_or("", String::as_str)
    }

    /// A captured number.
    pub fn number(&self, param: &str) -> Result<f64, CatalogError> {
        self.params
            .get(param)
            .and_then(AttrValue::as_f64)
            .ok_or_else(|| CatalogError::MissingParam {
                structure: "reference".into(),
                param: param.into(),
                op: "reference".into(),
            })
    }

    /// A captured number, if somebody gave it.
    pub fn optional_number(&self, param: &str) -> Option<f64> {
        self.params.get(param).and_then(AttrValue::as_f64)
    }

    /// A captured flag, false when nobody gave it.
    pub fn flag(&self, param: &str) -> bool {
        self.params.get(param) == Some(&AttrValue::Flag(true))
    }

    /// The size of a dim symbol.
    pub fn dim(&self, symbol: &str) -> Result<usize, CatalogError> {
        self.dims
            .get(symbol)
            .copied()
            .ok_or_else(|| CatalogError::Evaluation {
                structure: "reference".into(),
                at: format!("dim {symbol}"),
                reason: "nothing gave it a size".into(),
            })
    }

    /// What the host runs inside a role; its results in f32.
    pub fn run_role(&self, role: &str, args: &[Tensor]) -> Result<Vec<Tensor>, CatalogError> {
        let run = self
            .calls
            .get(role)
            .ok_or_else(|| CatalogError::Evaluation {
                structure: "reference".into(),
                at: "call".into(),
                reason: format!("no closure for role `{role}`"),
            })?;
        let results = run(args)?;
        let widened = results.iter().map(|t| t.to_dtype(DType::F32));
        Ok(widened.collect::<Result<_, _>>()?)
    }

    /// Rounded to the boundary dtype, back in f32.
    pub fn round(&self, t: &Tensor) -> Result<Tensor, CatalogError> {
        Ok(t.to_dtype(self.dtype)?.to_dtype(DType::F32)?)
    }

    /// An output of this name.
    pub fn output(&self, name: &str, t: &Tensor) -> Result<(String, Tensor), CatalogError> {
        Ok((name.into(), t.to_dtype(self.dtype)?))
    }
}

/// A call that the entry admits.
#[derive(Clone, Debug)]
pub struct Admitted {
    /// Host axes, complete.
    pub axes: BTreeMap<String, String>,
    /// Sizes of the dim symbols.
    pub dims: Dims,
    /// Params with those that are sizes filled in.
    pub params: Attrs,
    /// The dataflow for what is there.
    pub plain: Plain,
}

impl Spec {
    /// Refuses a call that the entry does not admit: unknown variant values, missing or unexpected tensors, shapes
    /// that contradict each other, constraints that do not hold.
    pub fn admit(
        &self,
        variant: &BTreeMap<String, String>,
        feed: &Feed,
    ) -> Result<Admitted, CatalogError> {
        self.need_region()?;
        let axes = self.host_axes(variant)?;
        let shapes = |of: &Tensors| -> Shapes {
            of.iter()
                .map(|(n, t)| (n.clone(), t.dims().to_vec()))
                .collect()
        };
        let (inputs, weights) = (shapes(&feed.inputs), shapes(&feed.weights));
        let dims = self.solve_dims_with(&inputs, &weights, &feed.params, Shape::Host)?;
        let params = self.filled(&feed.params, &dims);
        let plain = self.plain_for(&axes, feed)?;
        let known = Known {
            size: &|s| dims.get(s).map(|n| *n as u64),
            params: &params,
            present: &|n| inputs.contains_key(n) || weights.contains_key(n),
        };
        if let Some(unmet) = first_unmet(&plain.constraints, &known) {
            return Err(CatalogError::Constraint {
                structure: self.name.clone(),
                code: unmet.code,
                that: unmet.that,
                found: unmet.found,
            });
        }
        Ok(Admitted {
            axes,
            dims,
            params,
            plain,
        })
    }

    /// The whole region: boundary outputs by boundary name, in the boundary dtype. Leading dims of `[M, ..]` inputs
    /// come back on the outputs.
    pub fn call_reference(
        &self,
        variant: &BTreeMap<String, String>,
        feed: &Feed,
    ) -> Result<Vec<(String, Tensor)>, CatalogError> {
        let Some(native) = self.reference else {
            return self.call_dataflow(variant, feed);
        };
        let admitted = self.admit(variant, feed)?;
        let declared = self.declared_sources();
        let dims = |name: &str, t: &Tensor| {
            let found = declared.iter().find(|(s, _)| !s.slot && s.name == name);
            found.map(|(s, _)| s.dims_for(t.rank())).unwrap_or(&[])
        };
        let rows = Rows::of(feed.inputs.iter().map(|(n, t)| (dims(n, t), t)));
        let mut inputs = Tensors::new();
        for (name, t) in &feed.inputs {
            inputs.insert(name.clone(), rows.flatten(dims(name, t), t)?);
        }
        let outputs = native(&Call {
            axes: &admitted.axes,
            params: &admitted.params,
            dims: &admitted.dims,
            inputs: &inputs,
            weights: &feed.weights,
            dtype: feed.dtype(),
            calls: &feed.calls,
        })?;
        outputs
            .into_iter()
            .map(|(name, t)| {
                let dims = self.port_dims(&name);
                Ok((name, rows.restore(dims, t)?))
            })
            .collect()
    }

    /// The same by executing the dataflow.
    pub fn call_dataflow(
        &self,
        variant: &BTreeMap<String, String>,
        feed: &Feed,
    ) -> Result<Vec<(String, Tensor)>, CatalogError> {
        let mut plain = self.admit(variant, feed)?.plain;
        // The whole region is a span of its own: all inputs, all outputs.
        let whole = crate::spec::SpanDecl {
            name: WHOLE.into(),
            inputs: plain
                .sources
                .iter()
                .filter(|s| !s.slot)
                .map(|s| s.name.clone())
                .collect(),
            outputs: plain.outputs.iter().map(|(_, v)| v.clone()).collect(),
            states: Vec::new(),
        };
        plain.spans.insert(0, whole);
        let values: Tensors = self.evaluate(&plain, WHOLE, feed)?.into_iter().collect();
        let outputs = plain.outputs.iter();
        Ok(outputs
            .filter_map(|(port, v)| Some((port.clone(), values.get(v)?.clone())))
            .collect())
    }

    pub(crate) fn port_dims(&self, name: &str) -> Option<&[crate::spec::DimExpr]> {
        let port = self.outputs.iter().find(|p| {
            crate::names::expanded(&p.name, p.repeat)
                .iter()
                .any(|n| n == name)
        })?;
        Some(&port.dims)
    }
}

const WHOLE: &str = "(whole region)";

/// Formulas that several references share.
pub mod formula {
    use candle_core::{Result, Tensor};

    /// `x @ w` over the last dim, f32.
    pub fn product(x: &Tensor, w: &Tensor) -> Result<Tensor> {
        x.contiguous()?.matmul(&w.contiguous()?)
    }

    /// `x / (1 + e^-x)`
    pub fn silu(x: &Tensor) -> Result<Tensor> {
        x.div(&(x.neg()?.exp()? + 1.0)?)
    }

    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
        let cubic = ((x.powf(3.0)? * 0.044715)? + x)?;
        let inner = (cubic * (2.0 / std::f64::consts::PI).sqrt())?;
        (x * 0.5)?.mul(&(inner.tanh()? + 1.0)?)
    }

    /// `(x - mean) / sqrt(var + eps)` over the last dim, biased variance
    pub fn layer(x: &Tensor, eps: f64) -> Result<Tensor> {
        let last = candle_core::D::Minus1;
        let centred = x.broadcast_sub(&x.mean_keepdim(last)?)?;
        let variance = centred.sqr()?.mean_keepdim(last)?;
        centred.broadcast_div(&(variance + eps)?.sqrt()?)
    }

    /// `x / sqrt(mean(x^2) + eps)` over the last dim
    pub fn rms(x: &Tensor, eps: f64) -> Result<Tensor> {
        let mean = x.sqr()?.mean_keepdim(candle_core::D::Minus1)?;
        x.broadcast_div(&(mean + eps)?.sqrt()?)
    }
}
