//! The reference of a structure: what its seams must compute.
//!
//! A native reference is a plain candle function beside the entry's yaml, written without the dataflow in mind, so
//! that `verify` compares two independent statements of the same thing. An entry without one is its own dataflow.
//! The front door here refuses a bad call before either runs.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use structures_graph::{AttrValue, Attrs};

use crate::error::CatalogError;
use crate::evaluate::{CallFn, Feed, Tensors};
use crate::rows::Rows;
use crate::solve::{Shape, Shapes};
use crate::spec::Spec;

/// A call of a native reference: admitted, dims agree, ranks as declared.
pub struct Call<'a> {
    /// Host axes, complete.
    pub axes: &'a BTreeMap<String, String>,
    /// Captured attributes.
    pub params: &'a Attrs,
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

    /// Rounded to the boundary dtype, back in f32.
    pub fn round(&self, t: &Tensor) -> Result<Tensor, CatalogError> {
        Ok(t.to_dtype(self.dtype)?.to_dtype(DType::F32)?)
    }

    /// An output of this name.
    pub fn output(&self, name: &str, t: &Tensor) -> Result<(String, Tensor), CatalogError> {
        Ok((name.into(), t.to_dtype(self.dtype)?))
    }
}

impl Spec {
    /// Refuses a call that the entry does not admit: unknown variant values, missing or unexpected tensors, shapes
    /// that contradict each other.
    pub fn admit(
        &self,
        variant: &BTreeMap<String, String>,
        feed: &Feed,
    ) -> Result<BTreeMap<String, String>, CatalogError> {
        let axes = self.host_axes(variant)?;
        let shapes = |of: &Tensors| -> Shapes {
            of.iter()
                .map(|(n, t)| (n.clone(), t.dims().to_vec()))
                .collect()
        };
        self.solve_dims(&shapes(&feed.inputs), &shapes(&feed.weights), Shape::Host)?;
        self.plain_for(&axes, feed)?;
        Ok(axes)
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
        let axes = self.admit(variant, feed)?;
        let declared = self.declared_sources();
        let dims = |name: &str| {
            let found = declared.iter().find(|(s, _)| !s.slot && s.name == name);
            found.map(|(s, _)| s.dims.as_slice()).unwrap_or(&[])
        };
        let rows = Rows::of(feed.inputs.iter().map(|(n, t)| (dims(n), t)));
        let mut inputs = Tensors::new();
        for (name, t) in &feed.inputs {
            inputs.insert(name.clone(), rows.flatten(dims(name), t)?);
        }
        let outputs = native(&Call {
            axes: &axes,
            params: &feed.params,
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
        let axes = self.admit(variant, feed)?;
        let mut plain = self.plain_for(&axes, feed)?;
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

    fn port_dims(&self, name: &str) -> Option<&[crate::spec::DimExpr]> {
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

    /// `x / sqrt(mean(x^2) + eps)` over the last dim
    pub fn rms(x: &Tensor, eps: f64) -> Result<Tensor> {
        let mean = x.sqr()?.mean_keepdim(candle_core::D::Minus1)?;
        x.broadcast_div(&(mean + eps)?.sqrt()?)
    }
}
