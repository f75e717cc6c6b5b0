//! An operation with its attributes read once: what a session runs at every call.

use candle_core::{DType, Tensor};

use super::act::{act, ActKind};
use super::attention::Attention;
use super::gated_delta::GatedDelta;
use super::read::{operand, optional};
use super::rope::{rope, Pairing};
use super::{conv, elementwise, experts, linear, norm, table, unfit, view, Outcome};
use crate::graph::Layout;
use crate::ops::{AttrDefault, AttrValue, Attrs, OpKind};

pub(crate) use super::view::ReshapeDim;

/// An operation ready to run.
#[derive(Clone, Debug)]
pub(crate) enum Kernel {
    Linear(Layout),
    Bias,
    Add,
    Mul,
    Scale(f32),
    Act(ActKind),
    RmsNorm {
        eps: f32,
        offset: bool,
        axes: usize,
    },
    LayerNorm {
        eps: f32,
    },
    L2Norm {
        eps: f32,
    },
    Modulate {
        each: bool,
    },
    Chunk {
        n: usize,
        axis: i64,
    },
    Split {
        sizes: Vec<usize>,
        axis: i64,
    },
    Rope {
        pairing: Pairing,
        rotary: Option<usize>,
    },
    Attention(Attention),
    GatedDelta(GatedDelta),
    Reshape(Vec<ReshapeDim>),
    Transpose(Vec<usize>),
    Contiguous,
    Embedding,
    RopeTable {
        inv_freq: Vec<f32>,
        scaling: f32,
        axes: Option<Vec<usize>>,
    },
    Concat {
        axis: i64,
    },
    CausalConv,
    TopkRoute {
        k: usize,
        normalise: bool,
    },
    Experts(ActKind),
}

impl Kernel {
    /// Reads the attributes. `weight` is how a linear's second operand is stored. A word among the dims of a
    /// `reshape` stands for the axis at its own position; the session, which knows symbols, overrides that.
    pub(crate) fn prepare(kind: OpKind, attrs: &Attrs, weight: Layout) -> Outcome<Kernel> {
        let a = Reader { kind, attrs };
        a.refuse_unknown()?;
        Ok(match kind {
            OpKind::Linear => Kernel::Linear(weight),
            OpKind::Bias => Kernel::Bias,
            OpKind::Add => Kernel::Add,
            OpKind::Mul => Kernel::Mul,
            OpKind::Scale => Kernel::Scale(a.number("by")? as f32),
            OpKind::Act => Kernel::Act(a.act("kind")?),
            OpKind::Concat => Kernel::Concat {
                axis: a.whole("axis")?,
            },
            OpKind::CausalConv => Kernel::CausalConv,
            OpKind::TopkRoute => Kernel::TopkRoute {
                k: a.count("k")?,
                normalise: a.flag("normalise")?,
            },
            OpKind::Experts => Kernel::Experts(a.act("kind")?),
            OpKind::RmsNorm => Kernel::RmsNorm {
                eps: a.number("eps")? as f32,
                offset: a.choice("weight", &["direct", "offset"])? == 1,
                axes: a.count("axes")?,
            },
            OpKind::LayerNorm => Kernel::LayerNorm {
                eps: a.number("eps")? as f32,
            },
            OpKind::L2Norm => Kernel::L2Norm {
                eps: a.number("eps")? as f32,
            },
            OpKind::Modulate => Kernel::Modulate {
                each: a.choice("round", &["once", "each"])? == 1,
            },
            OpKind::Chunk => Kernel::Chunk {
                n: a.count("n")?,
                axis: a.whole("axis")?,
            },
            OpKind::Split => Kernel::Split {
                sizes: a.counts("sizes")?,
                axis: a.whole("axis")?,
            },
            OpKind::Rope => Kernel::Rope {
                pairing: match a.choice("layout", &["half", "interleaved"])? {
                    0 => Pairing::Half,
                    _ => Pairing::Interleaved,
                },
                rotary: a.maybe("rotary")?.map(|r| r as usize),
            },
            OpKind::Attention => Kernel::Attention(Attention {
                scale: a.maybe("scale")?.map(|s| s as f32),
                causal: a.flag("causal")?,
                window: match a.value("window") {
                    None | Some(AttrValue::Absent) => None,
                    Some(_) => Some(a.count("window")?),
                },
                softcap: a.maybe("softcap")?.map(|s| s as f32),
            }),
            OpKind::GatedDelta => Kernel::GatedDelta(GatedDelta {
                l2: a.flag("l2")?,
                l2_eps: a.number("l2_eps")? as f32,
                scale: a.maybe("scale")?.map(|s| s as f32),
            }),
            OpKind::Reshape => Kernel::Reshape(
                a.list("dims")?
                    .iter()
                    .enumerate()
                    .map(|(i, d)| match d {
                        AttrValue::Int(-1) => Ok(ReshapeDim::Rest),
                        AttrValue::Int(n) if *n >= 0 => Ok(ReshapeDim::Size(*n as usize)),
                        AttrValue::Word(_) => Ok(ReshapeDim::Axis(i)),
                        _ => unfit(format!("dims: `{d}` is neither a size, -1 nor a symbol")),
                    })
                    .collect::<Outcome<_>>()?,
            ),
            OpKind::Transpose => Kernel::Transpose(a.counts("perm")?),
            OpKind::Contiguous => Kernel::Contiguous,
            OpKind::Embedding => Kernel::Embedding,
            OpKind::RopeTable => Kernel::RopeTable {
                inv_freq: a
                    .list("inv_freq")?
                    .iter()
                    .map(|f| match f.as_f64() {
                        Some(f) => Ok(f as f32),
                        None => unfit(format!("inv_freq: `{f}` is not a number")),
                    })
                    .collect::<Outcome<_>>()?,
                scaling: a.number("scaling")? as f32,
                axes: match a.value("axes") {
                    None | Some(AttrValue::Absent) => None,
                    Some(_) => Some(a.counts("axes")?),
                },
            },
            OpKind::Call | OpKind::KvAppend | OpKind::StateWrite => {
                return unfit("has no kernel: the session or the evaluator runs it")
            }
        })
    }

    /// Computes. `step` is the rounding dtype of `modulate` with `round: each`.
    pub(crate) fn run(
        &self,
        inputs: &[Option<Tensor>],
        step: Option<DType>,
    ) -> Outcome<Vec<Tensor>> {
        let x = |name| operand(inputs, 0, name);
        let one = |t: Tensor| Ok(vec![t]);
        match self {
            Kernel::Linear(layout) => {
                one(linear::linear(x("x")?, operand(inputs, 1, "w")?, *layout)?)
            }
            Kernel::Bias => one(elementwise::bias(x("x")?, operand(inputs, 1, "b")?)?),
            Kernel::Add => one(elementwise::add(x("a")?, operand(inputs, 1, "b")?)?),
            Kernel::Mul => one(elementwise::mul(x("a")?, operand(inputs, 1, "b")?)?),
            Kernel::Scale(by) => one(elementwise::scale(x("x")?, *by)?),
            Kernel::Act(kind) => one(act(x("x")?, *kind)?),
            Kernel::RmsNorm { eps, offset, axes } => one(norm::rms_norm(
                x("x")?,
                optional(inputs, 1),
                *eps,
                *offset,
                *axes,
            )?),
            Kernel::LayerNorm { eps } => one(norm::layer_norm(
                x("x")?,
                optional(inputs, 1),
                optional(inputs, 2),
                *eps,
            )?),
            Kernel::L2Norm { eps } => one(norm::l2_norm(x("x")?, *eps)?),
            Kernel::Modulate { each } => one(elementwise::modulate(
                x("x")?,
                optional(inputs, 1),
                optional(inputs, 2),
                step.filter(|_| *each),
            )?),
            Kernel::Chunk { n, axis } => view::chunk(x("x")?, *n, *axis),
            Kernel::Split { sizes, axis } => view::split(x("x")?, sizes, *axis),
            Kernel::Rope { pairing, rotary } => one(rope(
                x("x")?,
                operand(inputs, 1, "cos")?,
                operand(inputs, 2, "sin")?,
                *pairing,
                *rotary,
            )?),
            Kernel::Attention(a) => one(a.run(
                x("q")?,
                operand(inputs, 1, "k")?,
                operand(inputs, 2, "v")?,
                optional(inputs, 3),
                optional(inputs, 4),
            )?),
            Kernel::GatedDelta(a) => a.run(
                [
                    x("q")?,
                    operand(inputs, 1, "k")?,
                    operand(inputs, 2, "v")?,
                    operand(inputs, 3, "log_decay")?,
                    operand(inputs, 4, "beta")?,
                ],
                optional(inputs, 5),
            ),
            Kernel::Reshape(dims) => one(view::reshape(x("x")?, dims)?),
            Kernel::Transpose(perm) => one(view::transpose(x("x")?, perm)?),
            Kernel::Contiguous => one(x("x")?.contiguous()?),
            Kernel::Embedding => one(table::embedding(x("ids")?, operand(inputs, 1, "w")?)?),
            Kernel::RopeTable {
                inv_freq,
                scaling,
                axes,
            } => table::rope_table(x("positions")?, inv_freq, *scaling, axes.as_deref()),
            Kernel::Concat { axis } => {
                let parts: Option<Vec<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
                one(view::concat(&parts.unwrap_or_default(), *axis)?)
            }
            Kernel::CausalConv => {
                conv::causal_conv(x("x")?, operand(inputs, 1, "w")?, optional(inputs, 2))
            }
            Kernel::TopkRoute { k, normalise } => {
                one(experts::topk_route(x("x")?, *k, *normalise)?)
            }
            Kernel::Experts(kind) => one(experts::experts(
                x("x")?,
                operand(inputs, 1, "route")?,
                operand(inputs, 2, "gate_up")?,
                operand(inputs, 3, "down")?,
                *kind,
            )?),
        }
    }
}

/// Attributes with the table's defaults.
struct Reader<'a> {
    kind: OpKind,
    attrs: &'a Attrs,
}

impl Reader<'_> {
    fn refuse_unknown(&self) -> Outcome<()> {
        let spec = self.kind.spec();
        match self.attrs.keys().find(|k| spec.attr(k).is_none()) {
            Some(k) => unfit(format!("has no attribute `{k}`")),
            None => Ok(()),
        }
    }

    fn default(&self, name: &str) -> AttrDefault {
        self.kind
            .spec()
            .attr(name)
            .map_or(AttrDefault::Required, |a| a.default)
    }

    fn value(&self, name: &str) -> Option<&AttrValue> {
        self.attrs.get(name)
    }

    fn wrong<T>(&self, name: &str, wanted: &str) -> Outcome<T> {
        match self.value(name) {
            Some(v) => unfit(format!("attribute `{name}` is `{v}`, not {wanted}")),
            None => unfit(format!("attribute `{name}` is missing: {wanted}")),
        }
    }

    fn number(&self, name: &str) -> Outcome<f64> {
        match (self.value(name), self.default(name)) {
            (Some(v), _) => match v.as_f64() {
                Some(n) => Ok(n),
                None => self.wrong(name, "a number"),
            },
            (None, AttrDefault::Number(n)) => Ok(n),
            (None, _) => self.wrong(name, "a number"),
        }
    }

    /// A number that may be absent or left to the kernel (a default made of the operand's dims).
    fn maybe(&self, name: &str) -> Outcome<Option<f64>> {
        match self.value(name) {
            None | Some(AttrValue::Absent) => Ok(None),
            Some(_) => self.number(name).map(Some),
        }
    }

    fn whole(&self, name: &str) -> Outcome<i64> {
        let n = self.number(name)?;
        if n.fract() == 0.0 {
            Ok(n as i64)
        } else {
            self.wrong(name, "a whole number")
        }
    }

    fn count(&self, name: &str) -> Outcome<usize> {
        match usize::try_from(self.whole(name)?) {
            Ok(n) => Ok(n),
            Err(_) => self.wrong(name, "a count"),
        }
    }

    fn flag(&self, name: &str) -> Outcome<bool> {
        match (self.value(name), self.default(name)) {
            (Some(AttrValue::Flag(b)), _) => Ok(*b),
            (None, AttrDefault::Flag(b)) => Ok(b),
            _ => self.wrong(name, "true or false"),
        }
    }

    fn act(&self, name: &str) -> Outcome<ActKind> {
        let word = self.word(name)?;
        match ActKind::from_name(&word) {
            Some(kind) => Ok(kind),
            None => unfit(format!(
                "{name} `{word}` is not one of {}",
                ActKind::names().join(", ")
            )),
        }
    }

    fn word(&self, name: &str) -> Outcome<String> {
        match (self.value(name), self.default(name)) {
            (Some(AttrValue::Word(w)), _) => Ok(w.clone()),
            (None, AttrDefault::Word(w)) => Ok(w.into()),
            _ => self.wrong(name, "a word"),
        }
    }

    /// Which of the words.
    fn choice(&self, name: &str, words: &[&str]) -> Outcome<usize> {
        let word = self.word(name)?;
        match words.iter().position(|w| *w == word) {
            Some(i) => Ok(i),
            None => self.wrong(name, &format!("one of {}", words.join(", "))),
        }
    }

    fn list(&self, name: &str) -> Outcome<&[AttrValue]> {
        match self.value(name) {
            Some(AttrValue::List(l)) => Ok(l),
            _ => self.wrong(name, "a list"),
        }
    }

    fn counts(&self, name: &str) -> Outcome<Vec<usize>> {
        self.list(name)?
            .iter()
            .map(|v| match v {
                AttrValue::Int(n) if *n >= 0 => Ok(*n as usize),
                _ => unfit(format!("attribute `{name}`: `{v}` is not a count")),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{eval, eval_rounded};
    use crate::GraphError;
    use candle_core::Device;

    fn attrs(pairs: &[(&str, AttrValue)]) -> Attrs {
        pairs
            .iter()
            .map(|(k, v)| ((*k).into(), v.clone()))
            .collect()
    }

    fn x() -> Option<Tensor> {
        Some(Tensor::new(&[[3f32, 4.0]], &Device::Cpu).unwrap())
    }

    #[test]
    fn defaults_come_from_the_table() {
        let y = eval(OpKind::Scale, &attrs(&[]), &[x()], &[]).unwrap();
        assert_eq!(y[0].to_vec2::<f32>().unwrap(), [[3.0, 4.0]]);
        let y = eval(
            OpKind::RmsNorm,
            &attrs(&[("eps", AttrValue::Float(0.0))]),
            &[x()],
            &[],
        );
        assert!(
            (y.unwrap()[0].to_vec2::<f32>().unwrap()[0][0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            (OpKind::RmsNorm, attrs(&[]), "`eps`"),
            (OpKind::Scale, attrs(&[("bye", AttrValue::Int(1))]), "`bye`"),
            (
                OpKind::Act,
                attrs(&[("kind", AttrValue::Word("mish".into()))]),
                "`mish`",
            ),
            (
                OpKind::Call,
                attrs(&[("role", AttrValue::Word("a".into()))]),
                "no kernel",
            ),
            (OpKind::Add, attrs(&[]), "operand 1 `b`"),
            (
                OpKind::Chunk,
                attrs(&[("n", AttrValue::Float(1.5))]),
                "whole number",
            ),
            (
                OpKind::RmsNorm,
                attrs(&[
                    ("eps", AttrValue::Int(0)),
                    ("weight", AttrValue::Word("centred".into())),
                ]),
                "direct, offset",
            ),
        ];
        for (kind, attrs, want) in cases {
            match eval(kind, &attrs, &[x()], &[]).unwrap_err() {
                GraphError::Operands { op, what, .. } => {
                    assert!(
                        op == kind.name() && what.contains(want),
                        "{what} lacks {want}"
                    )
                }
                e => panic!("{e}"),
            }
        }
    }

    #[test]
    fn other_float_types_are_widened() {
        let b = |t: Option<Tensor>| t.map(|t| t.to_dtype(DType::BF16).unwrap());
        let y = eval(OpKind::Add, &attrs(&[]), &[b(x()), x()], &[]).unwrap();
        assert_eq!(y[0].dtype(), DType::F32);
        assert_eq!(y[0].to_vec2::<f32>().unwrap(), [[6.0, 8.0]]);
        let each = attrs(&[("round", AttrValue::Word("each".into()))]);
        let s = Some(Tensor::new(&[0.001f32], &Device::Cpu).unwrap());
        let run = |step| {
            let y = eval_rounded(OpKind::Modulate, &each, &[x(), s.clone()], &[], step).unwrap();
            y[0].to_vec2::<f32>().unwrap()[0][0]
        };
        assert_eq!(run(Some(DType::BF16)), 3.0);
        assert!(run(None) > 3.0);
    }
}
