//! State regions at run time: the KV cache of every layer and side, and recurrent states.
//!
//! A growing region is preallocated `[B,H,capacity,D]` and grows by doubling. All regions have one valid length, which
//! advances once a run, when the run is over: a run that fails leaves the state as it was, and running again
//! overwrites what it had written. Appending writes in place, so a view handed out earlier shares memory with what a
//! later run writes past it; whoever wants to keep one copies it.
//!
//! A fixed region is one tensor, replaced when a run is over. It cannot be cut back like a cache, so what it was after
//! the last runs is kept (tensors are shared, not copied): one can go back to where a run ended, not between.

use candle_core::{DType, Device, Tensor};

use crate::graph::{RegionKind, StateRegion};
use crate::kernels::{unfit, Outcome};
use crate::GraphError;

/// Positions a region gets at least.
const MIN_CAPACITY: usize = 16;

/// How many places one can go back to: ends of runs over several tokens, and of single steps.
const KEPT: usize = 4;

/// The regions of one conversation (or batch of them).
#[derive(Debug)]
pub struct State {
    kept: Vec<Kept>,
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
    /// What the run that is going on leaves in a fixed region.
    next: Option<Tensor>,
}

/// The fixed regions after a run.
#[derive(Clone, Debug)]
struct Kept {
    len: usize,
    /// Whether the run was longer than one token.
    long: bool,
    content: Vec<Option<Tensor>>,
}

impl State {
    pub(crate) fn new(regions: &[StateRegion], batch: usize, capacity: usize) -> Self {
        State {
            kept: Vec::new(),
            batch,
            len: 0,
            capacity: capacity.max(MIN_CAPACITY),
            regions: regions
                .iter()
                .map(|spec| Region {
                    spec: spec.clone(),
                    data: None,
                    pending: 0,
                    next: None,
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

    /// Forgets positions from `len` on. With recurrent states only to where a recent run ended.
    pub fn truncate(&mut self, len: usize) -> Result<(), GraphError> {
        if len > self.len {
            return Err(GraphError::Mismatch {
                what: "state length to keep".into(),
                expected: format!("at most {}", self.len),
                found: len.to_string(),
            });
        }
        if len == 0 {
            self.reset();
            return Ok(());
        }
        if len < self.len && self.regions.iter().any(|r| r.spec.is_fixed()) {
            let Some(kept) = self.kept.iter().rev().find(|k| k.len == len) else {
                let ends: Vec<String> = self.kept.iter().map(|k| k.len.to_string()).collect();
                return Err(GraphError::Mismatch {
                    what: "state length to keep, with recurrent states".into(),
                    expected: format!("where a recent run ended: 0, {}", ends.join(", ")),
                    found: len.to_string(),
                });
            };
            let content = kept.content.clone();
            for (r, t) in self.regions.iter_mut().zip(content) {
                if r.spec.is_fixed() {
                    r.data = t;
                }
            }
            self.kept.retain(|k| k.len <= len);
        }
        self.len = len;
        Ok(())
    }

    /// Forgets everything; memory stays.
    pub fn reset(&mut self) {
        self.len = 0;
        self.kept.clear();
        for r in self.regions.iter_mut().filter(|r| r.spec.is_fixed()) {
            r.data = None;
        }
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
                    next: None,
                })
            })
            .collect::<Result<_, GraphError>>()?;
        // Contents of fixed regions are never written in place.
        Ok(State {
            kept: self.kept.clone(),
            regions,
            ..*self
        })
    }

    /// The content of a fixed region when a run begins.
    pub(crate) fn content(&self, region: usize) -> Outcome<Tensor> {
        match self.regions.get(region) {
            Some(Region {
                data: Some(t),
                spec,
                ..
            }) if spec.is_fixed() => Ok(t.clone()),
            Some(Region { spec, .. }) => match &spec.kind {
                RegionKind::Fixed { dims } => {
                    let dims: Vec<usize> =
                        std::iter::once(self.batch).chain(dims.clone()).collect();
                    Ok(Tensor::zeros(dims, DType::F32, &Device::Cpu)?)
                }
                RegionKind::Growing { .. } => unfit(format!("region `{}` is a cache", spec.name)),
            },
            None => unfit(format!("the state has no region {region}")),
        }
    }

    /// What a fixed region holds when the run is over.
    pub(crate) fn write(&mut self, region: usize, x: &Tensor) -> Outcome<Tensor> {
        let batch = self.batch;
        let Some(r) = self.regions.get_mut(region) else {
            return unfit(format!("the state has no region {region}"));
        };
        let fits = match &r.spec.kind {
            RegionKind::Fixed { dims } => x.dims().split_first() == Some((&batch, dims.as_slice())),
            RegionKind::Growing { .. } => false,
        };
        if !fits {
            return unfit(format!(
                "x {:?} does not fit region `{}` with {batch} batch rows",
                x.dims(),
                r.spec.name
            ));
        }
        if r.next.is_some() {
            return unfit(format!("region `{}` was already written", r.spec.name));
        }
        let x = x.to_dtype(DType::F32)?.contiguous()?;
        r.next = Some(x.clone());
        Ok(x)
    }

    /// The valid part `[B,H,len,D]` of a cache, or the content of a fixed region, by its index in the graph; `None`
    /// while it has none.
    pub fn valid(&self, region: usize) -> Result<Option<Tensor>, GraphError> {
        let Some(Region {
            spec,
            data: Some(t),
            ..
        }) = self.regions.get(region)
        else {
            return Ok(None);
        };
        if spec.is_fixed() {
            return Ok(Some(t.clone()));
        }
        let view = t.narrow(2, 0, self.len);
        view.map(Some).map_err(|e| failed(&spec.name, e))
    }

    /// Forgets what an abandoned run appended.
    pub(crate) fn begin(&mut self) {
        self.regions.iter_mut().for_each(|r| {
            r.pending = 0;
            r.next = None;
        });
    }

    /// Writes `x [B,H,T,D]` behind the valid part; gives `[B,H,len+T,D]`.
    pub(crate) fn append(&mut self, region: usize, x: &Tensor) -> Outcome<Tensor> {
        let (batch, len, floor) = (self.batch, self.len, self.capacity);
        let Some(r) = self.regions.get_mut(region) else {
            return unfit(format!("the state has no region {region}"));
        };
        let RegionKind::Growing { heads, width } = r.spec.kind else {
            return unfit(format!("region `{}` is no cache", r.spec.name));
        };
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

    /// The run is over: the valid length advances by what was appended, by `tokens` where nothing grows.
    pub(crate) fn commit(&mut self, tokens: Option<usize>) -> Result<(), GraphError> {
        let mut growing = self.regions.iter().filter(|r| !r.spec.is_fixed());
        let n = growing.clone().map(|r| r.pending).max();
        let n = n.or(tokens).unwrap_or(0);
        if let Some(r) = growing.find(|r| r.pending != n) {
            return Err(GraphError::Mismatch {
                what: format!("positions appended to region `{}`", r.spec.name),
                expected: format!("{n}, as to the others"),
                found: r.pending.to_string(),
            });
        }
        self.len += n;
        let mut fixed = false;
        for r in self.regions.iter_mut().filter(|r| r.spec.is_fixed()) {
            fixed = true;
            if let Some(t) = r.next.take() {
                r.data = Some(t);
            }
        }
        if fixed {
            self.keep(n > 1);
        }
        self.begin();
        Ok(())
    }

    fn keep(&mut self, long: bool) {
        let same = |k: &Kept| k.long == long;
        if self.kept.iter().filter(|k| same(k)).count() >= KEPT {
            if let Some(oldest) = self.kept.iter().position(same) {
                self.kept.remove(oldest);
            }
        }
        let content = self.regions.iter().map(|r| match r.spec.is_fixed() {
            true => r.data.clone(),
            false => None,
        });
        self.kept.push(Kept {
            len: self.len,
            long,
            content: content.collect(),
        });
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
        let r = |name: &str| StateRegion::growing(name, 2, 3);
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
            s.commit(None).unwrap();
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
        s.commit(None).unwrap();
        let copy = s.clone_deep().unwrap();
        let before = flat(&copy.valid(0).unwrap().unwrap());
        s.truncate(2).unwrap();
        for r in 0..2 {
            s.append(r, &step(2, 50.0)).unwrap();
        }
        s.commit(None).unwrap();
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
        assert!(s.commit(None).is_err(), "one region only");
        s.begin();
        assert_eq!(s.len(), 0);
        for r in 0..2 {
            s.append(r, &step(1, 9.0)).unwrap();
            assert!(s.append(r, &step(1, 9.0)).is_err(), "twice in a run");
        }
        s.commit(None).unwrap();
        assert_eq!(flat(&s.valid(1).unwrap().unwrap()), flat(&step(1, 9.0)));
        let wrong = Tensor::zeros((1, 3, 1, 3), DType::F32, &Device::Cpu).unwrap();
        assert!(s.append(0, &wrong).is_err());
    }

    #[test]
    fn a_fixed_region_is_replaced_at_the_end_and_goes_back_to_ends_of_runs() {
        let regions = [
            StateRegion::growing("k", 2, 3),
            StateRegion::fixed("s", &[2]),
        ];
        let mut s = State::new(&regions, 1, 0);
        let one = |v: f32| Tensor::full(v, (1, 2), &Device::Cpu).unwrap();
        let now = |s: &State| flat(&s.content(1).unwrap())[0];
        assert_eq!(now(&s), 0.0);
        let run = |s: &mut State, n: usize, v: f32| {
            s.begin();
            s.append(0, &step(n, v)).unwrap();
            s.write(1, &one(v)).unwrap();
            assert!(s.write(1, &one(v)).is_err(), "twice in a run");
            s.commit(None).unwrap();
        };
        run(&mut s, 5, 1.0);
        for i in 0..6 {
            run(&mut s, 1, 2.0 + i as f32);
        }
        let copy = s.clone_deep().unwrap();
        assert_eq!((s.len(), now(&s)), (11, 7.0));
        assert!(s.truncate(6).is_err(), "too many steps ago");
        s.truncate(9).unwrap();
        assert_eq!((s.len(), now(&s)), (9, 5.0));
        s.truncate(5).unwrap();
        assert_eq!((s.len(), now(&s)), (5, 1.0));
        assert!(s.truncate(3).is_err(), "within a run");
        s.truncate(0).unwrap();
        assert_eq!((s.len(), now(&s)), (0, 0.0));
        assert_eq!((copy.len(), now(&copy)), (11, 7.0));
        assert!(s.write(0, &one(1.0)).is_err(), "a cache");
        assert!(s.append(1, &step(1, 0.0)).is_err(), "no cache");
    }
}
