//! Watching host values while a plan runs: feeds the statistics collector, and keeps the content of one call where it
//! was asked for (span inputs, for bind parity). Nothing else is kept.

use std::collections::{HashMap, HashSet};

use candle_core::{CpuStorage, Storage, Tensor};
use structures_graph::session::Observer;
use structures_graph::{GraphError, ValueId};

use crate::stats::Collector;

/// An observer over host values.
pub struct Watch {
    /// Where statistics go.
    pub collector: Collector,
    keys: HashMap<ValueId, Vec<String>>,
    wanted: HashSet<ValueId>,
    contents: HashMap<ValueId, Tensor>,
}

impl Watch {
    /// Reports every value of `keys` to the collector under each of its keys.
    pub fn new(collector: Collector, keys: impl IntoIterator<Item = (ValueId, String)>) -> Self {
        let mut by_value: HashMap<ValueId, Vec<String>> = HashMap::new();
        for (value, key) in keys {
            by_value.entry(value).or_default().push(key);
        }
        Watch {
            collector,
            keys: by_value,
            wanted: HashSet::new(),
            contents: HashMap::new(),
        }
    }

    /// Keeps the content of values at their first call.
    #[must_use]
    pub fn content(mut self, values: impl IntoIterator<Item = ValueId>) -> Self {
        self.wanted.extend(values);
        self
    }

    /// The kept contents.
    pub fn into_contents(self) -> HashMap<ValueId, Tensor> {
        self.contents
    }
}

impl Observer for Watch {
    fn wants(&self, value: ValueId) -> bool {
        self.keys.contains_key(&value)
            || (self.wanted.contains(&value) && !self.contents.contains_key(&value))
    }

    fn see(&mut self, value: ValueId, tensor: &Tensor) -> Result<(), GraphError> {
        let failed = |source: candle_core::Error| GraphError::Kernel {
            op: "observe".into(),
            at: format!("value {}", value.0),
            source: Box::new(source),
        };
        if self.wanted.contains(&value) && !self.contents.contains_key(&value) {
            self.contents.insert(value, tensor.copy().map_err(failed)?);
        }
        let Some(keys) = self.keys.get(&value) else {
            return Ok(());
        };
        let tensor = tensor.contiguous().map_err(failed)?;
        let (storage, layout) = tensor.storage_and_layout();
        let data = match (&*storage, layout.contiguous_offsets()) {
            (Storage::Cpu(CpuStorage::F32(data)), Some((from, to))) => &data[from..to],
            _ => {
                return Err(GraphError::Mismatch {
                    what: format!("value {} while calibrating", value.0),
                    expected: "f32 on the CPU".into(),
                    found: format!("{:?}", tensor.dtype()),
                })
            }
        };
        for key in keys {
            self.collector
                .observe(key, data, tensor.dims(), "f32")
                .map_err(|e| GraphError::Mismatch {
                    what: format!("statistics at `{key}`"),
                    expected: "a measurable tensor".into(),
                    found: e.to_string(),
                })?;
        }
        Ok(())
    }
}

/// The distinct rows of values, over all calls of any number of runs: what a loop feeds a span that is to be a table.
#[derive(Debug, Default)]
pub struct Conditionings {
    wanted: HashSet<ValueId>,
    found: HashMap<ValueId, Distinct>,
}

#[derive(Debug, Default)]
struct Distinct {
    width: usize,
    rows: Vec<f32>,
    bits: HashSet<Vec<u32>>,
}

/// Rows of one value beyond which no more are kept: nothing with so many is a set of steps.
const MOST_ROWS: usize = 4096;

impl Conditionings {
    /// Watches these values.
    pub fn new(values: impl IntoIterator<Item = ValueId>) -> Self {
        Conditionings {
            wanted: values.into_iter().collect(),
            found: HashMap::new(),
        }
    }

    /// Whether there is nothing to watch.
    pub fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Width and rows of a value, bit by bit distinct, in the order they were first seen.
    pub fn rows(&self, value: ValueId) -> Option<(usize, &[f32])> {
        let found = self.found.get(&value)?;
        Some((found.width, &found.rows))
    }
}

impl Observer for Conditionings {
    fn wants(&self, value: ValueId) -> bool {
        self.wanted.contains(&value)
    }

    fn see(&mut self, value: ValueId, tensor: &Tensor) -> Result<(), GraphError> {
        let width = tensor.dims().last().copied().unwrap_or(1);
        let all = tensor.flatten_all().and_then(|t| t.to_vec1::<f32>());
        let all = all.map_err(|source| GraphError::Kernel {
            op: "observe".into(),
            at: format!("value {}", value.0),
            source: Box::new(source),
        })?;
        let found = self.found.entry(value).or_default();
        found.width = width;
        for row in all.chunks_exact(width.max(1)) {
            let bits = row.iter().map(|v| v.to_bits()).collect();
            if found.bits.len() < MOST_ROWS && found.bits.insert(bits) {
                found.rows.extend_from_slice(row);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{Statistic, Wants};
    use candle_core::Device;

    #[test]
    fn statistics_run_over_calls_and_content_is_the_first() {
        let v = ValueId(3);
        let wants = Wants::from([("p|x".to_string(), [Statistic::AmaxTensor].into())]);
        let mut w = Watch::new(Collector::new(wants), [(v, "p|x".to_string())]).content([v]);
        let t = |d: &[f32]| Tensor::from_slice(d, (1, d.len() / 2, 2), &Device::Cpu).unwrap();
        w.see(v, &t(&[1.0, -5.0])).unwrap();
        w.see(v, &t(&[2.0, 3.0, -4.0, 0.5])).unwrap();
        w.collector.end_sample().unwrap();
        let c = w.collector.clone().finish(99.9, "test").unwrap();
        assert_eq!(c.amax["p|x"], 5.0);
        assert_eq!(c.observations["p|x"].rows, [1, 2]);
        assert_eq!(w.into_contents()[&v].dims(), [1, 1, 2]);
    }

    #[test]
    fn rows_of_a_loop_are_kept_once() {
        let v = ValueId(1);
        let mut c = Conditionings::new([v]);
        assert!(c.wants(v) && !c.wants(ValueId(2)) && c.rows(v).is_none());
        for data in [[1.0_f32, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]] {
            let t = Tensor::from_slice(&data, (2, 2), &Device::Cpu).unwrap();
            c.see(v, &t).unwrap();
        }
        assert_eq!(
            c.rows(v),
            Some((2, &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0][..]))
        );
    }
}
