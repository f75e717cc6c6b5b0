//! State regions at run time: the KV cache of every layer and side.
//!
//! A region is preallocated `[B,H,capacity,D]` and grows by doubling. All regions have one valid length, which
//! advances once a run, when the run is over: a run that fails leaves the state as it was, and running again
//! overwrites what it had written. Appending writes in place, so a view handed out earlier shares memory with what a
//! later run writes past it; whoever wants to keep one copies it.

use candle_core::{DType, Device, Tensor};

use crate::graph::StateRegion;
use crate::kernels::{unfit, Outcome};
use crate::GraphError;

/// Positions a region gets at least.
const MIN_CAPACITY: usize = 16;

/// The regions of one conversation (or batch of them).
#[derive(Debug)]
pub struct State {
    batch: usize,
    len: usize,
    capacity: usize,
    regions: Vec<Region>,
}

#[derive(Debug)]
struct Region {
    spec: StateRegion,
    /// Allocated at the first append.
    data: Option<Tensor>,
    /// Positions appended in the run that is going on.
    pending: usize,
}

impl State {
    pub(crate) fn new(regions: &[StateRegion], batch: usize, capacity: usize) -> Self {
        State {
            batch,
            len: 0,
            capacity: capacity.max(MIN_CAPACITY),
            regions: regions
                .iter()
                .map(|spec| Region {
                    spec: spec.clone(),
                    data: None,
                    pending: 0,
                })
                .collect(),
        }
    }

    /// Valid positions, the same in every region.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing has been appended.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Batch rows.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Forgets positions from `len` on.
    pub fn truncate(&mut self, len: usize) -> Result<(), GraphError> {
        if len > self.len {
            return Err(GraphError::Mismatch {
                what: "state length to keep".into(),
                expected: format!("at most {}", self.len),
                found: len.to_string(),
            });
        }
        self.len = len;
        Ok(())
    }

    /// Forgets everything; memory stays.
    pub fn reset(&mut self) {
        self.len = 0;
    }

    /// A copy that shares no memory, so that two arms can go on from the same state.
    pub fn clone_deep(&self) -> Result<State, GraphError> {
        let regions = self
            .regions
            .iter()
            .map(|r| {
                let data = match &r.data {
                    Some(t) => Some(t.copy().map_err(|e| failed(&r.spec.name, e))?),
                    None => None,
                };
                Ok(Region {
                    spec: r.spec.clone(),
                    data,
                    pending: 0,
                })
            })
            .collect::<Result<_, GraphError>>()?;
        Ok(State { regions, ..*self })
    }

    /// The valid part `[B,H,len,D]` of a region, by its index in the graph; `None` while it has none.
    pub fn valid(&self, region: usize) -> Result<Option<Tensor>, GraphError> {
        let Some(Region {
            spec,
            data: Some(t),
            ..
        }) = self.regions.get(region)
        else {
            return Ok(None);
        };
        let view = t.narrow(2, 0, self.len);
        view.map(Some).map_err(|e| failed(&spec.name, e))
    }

    /// Forgets what an abandoned run appended.
    pub(crate) fn begin(&mut self) {
        self.regions.iter_mut().for_each(|r| r.pending = 0);
    }

    /// Writes `x [B,H,T,D]` behind the valid part; gives `[B,H,len+T,D]`.
    pub(crate) fn append(&mut self, region: usize, x: &Tensor) -> Outcome<Tensor> {
        let (batch, len, floor) = (self.batch, self.len, self.capacity);
        let Some(r) = self.regions.get_mut(region) else {
            return unfit(format!("the state has no region {region}"));
        };
        let (heads, width) = (r.spec.heads, r.spec.width);
        let n = match *x.dims() {
            [b, h, n, d] if (b, h, d) == (batch, heads, width) => n,
            _ => {
                return unfit(format!(
                    "x {:?} is not [{batch},{heads},T,{width}] of region `{}`",
                    x.dims(),
                    r.spec.name
                ))
            }
        };
        if r.pending > 0 {
            return unfit(format!("region `{}` was already appended", r.spec.name));
        }
        let x = x.to_dtype(DType::F32)?.contiguous()?;
        let need = len + n;
        let old = r.data.take();
        let held = old.as_ref().map_or(0, |t| t.dims()[2]);
        let data = match old {
            Some(t) if held >= need => t,
            old => {
                let capacity = need.max(2 * held).max(floor);
                let dims = (batch, heads, capacity, width);
                let grown = Tensor::zeros(dims, DType::F32, &Device::Cpu)?;
                if let (Some(t), true) = (old, len > 0) {
                    grown.slice_set(&t.narrow(2, 0, len)?.contiguous()?, 2, 0)?;
                }
                grown
            }
        };
        if n > 0 {
            data.slice_set(&x, 2, len)?;
        }
        let view = data.narrow(2, 0, need)?;
        r.data = Some(data);
        r.pending = n;
        Ok(view)
    }

    /// The run is over: the valid length advances by what was appended.
    pub(crate) fn commit(&mut self) -> Result<(), GraphError> {
        let n = self.regions.iter().map(|r| r.pending).max().unwrap_or(0);
        if let Some(r) = self.regions.iter().find(|r| r.pending != n) {
            return Err(GraphError::Mismatch {
                what: format!("positions appended to region `{}`", r.spec.name),
                expected: format!("{n}, as to the others"),
                found: r.pending.to_string(),
            });
        }
        self.len += n;
        self.begin();
        Ok(())
    }
}

fn failed(region: &str, e: candle_core::Error) -> GraphError {
    GraphError::Kernel {
        op: "state".into(),
        at: region.into(),
        source: Box::new(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let r = |name: &str| StateRegion {
            name: name.into(),
            heads: 2,
            width: 3,
        };
        State::new(&[r("k"), r("v")], 1, 0)
    }

    fn step(n: usize, from: f32) -> Tensor {
        let data = (0..2 * n * 3).map(|i| from + i as f32).collect();
        Tensor::from_vec(data, (1, 2, n, 3), &Device::Cpu).unwrap()
    }

    fn flat(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    }

    #[test]
    fn grows_past_its_capacity_and_keeps_what_it_held() {
        let mut s = state();
        let mut want: Option<Tensor> = None;
        for i in 0..5 {
            let x = step(7, i as f32 * 100.0);
            want = Some(match want {
                Some(w) => Tensor::cat(&[&w, &x], 2).unwrap(),
                None => x.clone(),
            });
            s.begin();
            s.append(0, &x).unwrap();
            let got = s.append(1, &x).unwrap();
            assert_eq!(s.len(), 7 * i, "the length advances once, at the end");
            s.commit().unwrap();
            assert_eq!(flat(&got), flat(want.as_ref().unwrap()));
        }
        assert_eq!(s.len(), 35);
        assert_eq!(flat(&s.valid(0).unwrap().unwrap()), flat(&want.unwrap()));
    }

    #[test]
    fn truncate_reset_and_deep_copies() {
        let mut s = state();
        for r in 0..2 {
            s.append(r, &step(4, 0.0)).unwrap();
        }
        s.commit().unwrap();
        let copy = s.clone_deep().unwrap();
        let before = flat(&copy.valid(0).unwrap().unwrap());
        s.truncate(2).unwrap();
        for r in 0..2 {
            s.append(r, &step(2, 50.0)).unwrap();
        }
        s.commit().unwrap();
        assert_eq!(s.len(), 4);
        assert_ne!(flat(&s.valid(0).unwrap().unwrap()), before);
        assert_eq!(flat(&copy.valid(0).unwrap().unwrap()), before);
        assert!(s.truncate(5).is_err());
        s.reset();
        assert!(s.is_empty());
    }

    #[test]
    fn an_abandoned_run_leaves_no_trace() {
        let mut s = state();
        s.append(0, &step(4, 0.0)).unwrap();
        assert!(s.commit().is_err(), "one region only");
        s.begin();
        assert_eq!(s.len(), 0);
        for r in 0..2 {
            s.append(r, &step(1, 9.0)).unwrap();
            assert!(s.append(r, &step(1, 9.0)).is_err(), "twice in a run");
        }
        s.commit().unwrap();
        assert_eq!(flat(&s.valid(1).unwrap().unwrap()), flat(&step(1, 9.0)));
        let wrong = Tensor::zeros((1, 3, 1, 3), DType::F32, &Device::Cpu).unwrap();
        assert!(s.append(0, &wrong).is_err());
    }
}
