//! From the parameters a model has to the tensors a checkpoint holds: names, ties, row orders, and the
//! [`ParamSource`] a session loads from.

use std::sync::Arc;

use candle_core::Tensor;
use indexmap::IndexMap;
use structures_graph::session::ParamSource;
use structures_graph::{GraphError, ParamRef, Rows};

use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::ModelError;

/// Whose names the parameters of every builder have, whatever file they come from.
pub const NAMING: &str = "transformers";

/// How stored rows become the published order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// They are in it.
    Published,
    /// Each of `heads` heads has its rotation pairs side by side; the published order has the first halves first.
    AdjacentPairs {
        /// Heads the rows divide into.
        heads: usize,
    },
}

/// A parameter a model needs.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Module path.
    pub path: String,
    /// Parameter name.
    pub name: &'static str,
    /// Its dims.
    pub dims: Vec<usize>,
    /// The tensors that hold it: one of the same dims, or several whose rows one after another are its content.
    pub tensors: Vec<String>,
    /// In which order.
    pub rows: RowOrder,
}

/// Parameters by `(path, name)`, checked against a checkpoint's headers.
#[derive(Clone, Debug, Default)]
pub struct ParamMap {
    params: IndexMap<(String, String), (ParamSpec, TensorInfo)>,
    ties: IndexMap<(String, String), (String, String)>,
}

impl ParamMap {
    /// Finds every parameter's tensor; the first that is missing or has another shape is the error.
    pub fn check(checkpoint: &Checkpoint, specs: Vec<ParamSpec>) -> Result<Self, ModelError> {
        let mut map = ParamMap::default();
        for spec in specs {
            let mut found = 0;
            let mut first = None;
            for tensor in &spec.tensors {
                let Some(info) = checkpoint.tensor_info(tensor) else {
                    return Err(ModelError::tensor(
                        checkpoint.path(),
                        tensor,
                        format!("{:?}, the parameter {}.{}", spec.dims, spec.path, spec.name),
                        format!("no such tensor among {}", checkpoint.tensor_infos().count()),
                        "the checkpoint is not complete or its config belongs to another model",
                    ));
                };
                let whole: usize = spec.dims.iter().product();
                found += info.dims.iter().product::<usize>();
                let fits = match spec.tensors.len() {
                    1 => info.dims == spec.dims,
                    _ => info.dims.last() == spec.dims.last() && found <= whole,
                };
                if !fits {
                    return Err(misfit(checkpoint, &spec, &info));
                }
                first.get_or_insert(info);
            }
            let Some(first) = first else { continue };
            if found != spec.dims.iter().product::<usize>() {
                return Err(misfit(checkpoint, &spec, &first));
            }
            map.params
                .insert((spec.path.clone(), spec.name.into()), (spec, first));
        }
        Ok(map)
    }

    /// Declares that one parameter is another one.
    pub fn tie(&mut self, from: (&str, &str), to: (&str, &str)) {
        let owned = |(a, b): (&str, &str)| (a.to_string(), b.to_string());
        self.ties.insert(owned(from), owned(to));
    }

    /// The parameter that a possibly tied name stands for, if the model has it.
    pub fn resolve(&self, path: &str, name: &str) -> Option<ParamRef> {
        let key = (path.to_string(), name.to_string());
        let key = self.ties.get(&key).unwrap_or(&key);
        self.params.get(key).map(|_| ParamRef {
            path: key.0.clone(),
            name: key.1.clone(),
            rows: None,
        })
    }

    /// Tied parameters: the second name, then the one that is stored.
    pub fn ties(&self) -> impl Iterator<Item = (&(String, String), &(String, String))> {
        self.ties.iter()
    }

    /// What a parameter is and where it is stored, ties followed.
    pub fn get(&self, path: &str, name: &str) -> Option<(&ParamSpec, &TensorInfo)> {
        let param = self.resolve(path, name)?;
        self.params
            .get(&(param.path, param.name))
            .map(|(s, i)| (s, i))
    }

    /// Tensors of the checkpoint that no parameter reads.
    pub fn unused(&self, checkpoint: &Checkpoint) -> Vec<String> {
        let used: std::collections::HashSet<&str> = self
            .params
            .values()
            .flat_map(|(s, _)| s.tensors.iter().map(String::as_str))
            .collect();
        checkpoint
            .tensor_infos()
            .filter(|t| !used.contains(t.name.as_str()))
            .map(|t| t.name)
            .collect()
    }
}

fn misfit(checkpoint: &Checkpoint, spec: &ParamSpec, info: &TensorInfo) -> ModelError {
    let expected = match spec.tensors.len() {
        1 => format!("shape {:?}, as the config says", spec.dims),
        n => format!(
            "a part of {:?}, {n} of which the config asks for",
            spec.dims
        ),
    };
    ModelError::tensor(
        checkpoint.path(),
        &info.name,
        expected,
        format!("shape {:?}", info.dims),
        "config and checkpoint do not belong together: get both again",
    )
}

/// Loads parameters from a checkpoint.
#[derive(Debug)]
pub struct CheckpointParams {
    /// Where from.
    pub checkpoint: Arc<Checkpoint>,
    /// Which is which.
    pub map: Arc<ParamMap>,
}

impl CheckpointParams {
    /// A parameter as f32 in published row order.
    pub fn load(&self, param: &ParamRef) -> Result<Tensor, ModelError> {
        let Some((spec, _)) = self.map.get(&param.path, &param.name) else {
            return Err(ModelError::tensor(
                self.checkpoint.path(),
                &param.to_string(),
                "a parameter of the model",
                "none of this name",
                "the graph asks for something else than this model has",
            ));
        };
        let failed = |e| ModelError::compute(format!("arranging `{param}`"), e);
        let tensor = match spec.tensors.as_slice() {
            [one] => self.checkpoint.load(one)?,
            many => {
                let parts = many
                    .iter()
                    .map(|t| self.checkpoint.load(t))
                    .collect::<Result<Vec<_>, _>>()?;
                let joined = Tensor::cat(&parts, 0).and_then(|t| t.reshape(spec.dims.clone()));
                joined.map_err(failed)?
            }
        };
        let tensor = match spec.rows {
            RowOrder::Published => tensor,
            RowOrder::AdjacentPairs { heads } => halves_first(&tensor, heads).map_err(failed)?,
        };
        match param.rows {
            None => Ok(tensor),
            Some((from, to)) => tensor
                .narrow(0, from, to.saturating_sub(from))
                .and_then(|t| t.contiguous())
                .map_err(failed),
        }
    }
}

impl ParamSource for CheckpointParams {
    fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
        self.load(param).map_err(|e| unread(param, &e))
    }

    fn rows(&self, param: &ParamRef) -> Result<Option<Arc<dyn Rows>>, GraphError> {
        let one = match self.map.get(&param.path, &param.name) {
            Some((spec, _)) if spec.rows == RowOrder::Published && param.rows.is_none() => {
                match spec.tensors.as_slice() {
                    [one] => one,
                    _ => return Ok(None),
                }
            }
            _ => return Ok(None),
        };
        let rows = self.checkpoint.rows(one).map_err(|e| unread(param, &e))?;
        Ok(rows.map(|rows| Arc::new(rows) as Arc<dyn Rows>))
    }
}

fn unread(param: &ParamRef, e: &ModelError) -> GraphError {
    GraphError::MissingParam {
        param: param.to_string(),
        reason: e.to_string(),
    }
}

/// Row `h*D + 2i + s` becomes row `h*D + s*D/2 + i`.
fn halves_first(tensor: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let dims = tensor.dims().to_vec();
    let (rows, rest) = (dims[0], dims[1..].iter().product::<usize>());
    tensor
        .reshape((heads, rows / heads / 2, 2, rest))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape(dims)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn adjacent_pairs_become_halves() {
        let rows: Vec<f32> = (0..8).map(|r| r as f32).collect();
        let stored = Tensor::from_vec(rows, (8, 1), &Device::Cpu).unwrap();
        let got = halves_first(&stored, 2).unwrap().flatten_all().unwrap();
        assert_eq!(
            got.to_vec1::<f32>().unwrap(),
            [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
        );
    }
}
