//! The weights of a span as its structure's slots name them: views of what the host stores, or constants.
//!
//! Owns names, shapes and layouts. Packed rows are [`crate::adopt`], what a form makes of any of them is its own.

use candle_core::{DType, Device, Tensor};
use structures_catalog::spec::{ConstFill, DimExpr, Slot};
use structures_catalog::Spec;
use structures_graph::Dim;
use structures_seams::{LocatedSpan, SlotWeight};

use super::{failed, Bench};
use crate::error::Error;
use crate::trial::NamedWeight;

impl Bench<'_> {
    /// The span's weights in slot dims; strides tell the stored order, nothing is copied.
    pub(crate) fn weights(
        &self,
        spec: &Spec,
        span: &LocatedSpan,
    ) -> Result<Vec<NamedWeight>, Error> {
        self.weights_without(spec, span, &|_| false)
    }

    /// The same with zeros in some slots: memory that nobody touches, so none.
    pub(super) fn weights_without(
        &self,
        spec: &Spec,
        span: &LocatedSpan,
        without: &dyn Fn(&String) -> bool,
    ) -> Result<Vec<NamedWeight>, Error> {
        let mut out = Vec::with_capacity(span.weights.len());
        for (name, source) in &span.weights {
            let slot = slot_of(spec, name).ok_or_else(|| {
                Error::invalid(
                    "slot_missing",
                    format!("`{}` has no slot `{name}`", spec.name),
                )
            })?;
            let tensor = match source {
                SlotWeight::Stored(address) => {
                    let param = address.param();
                    let stored = match without(name) {
                        false => self.session.param(&param)?,
                        true => self.session.param_dims(&param).and_then(zeros),
                    };
                    let stored = stored.ok_or_else(|| {
                        Error::invalid(
                            "slot_missing",
                            format!("the host holds no parameter `{param}`"),
                        )
                    })?;
                    let stored = match &address.reshape {
                        Some(dims) => stored.reshape(dims.as_slice()).map_err(failed)?,
                        None => stored,
                    };
                    if stored.rank() == 2 && address.layout != slot.layout {
                        stored.t().map_err(failed)?
                    } else {
                        stored
                    }
                }
                SlotWeight::Const { fill } => {
                    let dims = slot
                        .dims
                        .iter()
                        .map(|d| match d {
                            DimExpr::Literal(n) => Some(*n),
                            DimExpr::Symbol(s) => span.dims.get(s).map(|n| *n as usize),
                            DimExpr::Derived(_) => None,
                        })
                        .collect::<Option<Vec<usize>>>()
                        .ok_or_else(|| {
                            Error::invalid(
                                "dims_inconsistent",
                                format!("the size of constant slot `{name}` is not known"),
                            )
                        })?;
                    match fill {
                        ConstFill::Zeros => Tensor::zeros(dims, DType::F32, &Device::Cpu),
                        ConstFill::Ones => Tensor::ones(dims, DType::F32, &Device::Cpu),
                    }
                    .map_err(failed)?
                }
            };
            out.push(NamedWeight {
                name: name.clone(),
                layout: slot.layout,
                tensor,
            });
        }
        Ok(out)
    }
}

fn zeros(dims: &[Dim]) -> Option<Tensor> {
    let size = |d: &Dim| match d {
        Dim::Size(n) => Some(*n),
        Dim::Symbol(_) => None,
    };
    let dims: Vec<usize> = dims.iter().map(size).collect::<Option<_>>()?;
    Tensor::zeros(dims, DType::F32, &Device::Cpu).ok()
}

/// The declaration of an expanded slot name (`w_2` of `w_<i>`).
fn slot_of<'s>(spec: &'s Spec, name: &str) -> Option<&'s Slot> {
    spec.weights
        .iter()
        .find(|slot| match slot.name.split_once("<i>") {
            None => slot.name == name,
            Some((head, tail)) => name
                .strip_prefix(head)
                .and_then(|rest| rest.strip_suffix(tail))
                .is_some_and(|i| !i.is_empty() && i.bytes().all(|b| b.is_ascii_digit())),
        })
}
