//! State regions at run time: the KV cache of every layer and side, and recurrent states.
//!
//! A growing region is preallocated `[B,H,capacity,D]` and grows by doubling. All regions have one valid length, which
//! advances once a run, when the run is over: a run that fails leaves the state as it was, and running again
//! overwrites what it had written. Appending writes in place, so a view handed out earlier shares memory with what a
//! later run writes past it; whoever wants to keep one copies it.
//!
//! The home of a growing region is host memory, or a place where everybody who appends to it and reads it sits
//! ([`crate::place::Quarters`]). It moves when a plan asks for it there, and comes back, valid positions exactly, when
//! anybody else appends to it, copies it or captures a step over it. To forget positions moves nothing. A place that is
//! lost takes the regions with it: from then on the state is refused until it is reset.
//!
//! A fixed region is one tensor, replaced when a run is over. It cannot be cut back like a cache, so what it was after
//! the last runs is kept (tensors are shared, not copied): one can go back to where a run ended, not between.

use std::sync::Arc;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Tensor};

use crate::graph::{RegionKind, StateRegion};
use crate::kernels::{unfit, Outcome};
use crate::place::{Away, Place, Quarters};
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
    /// Memory at places, one each.
    quarters: Vec<Box<dyn Quarters>>,
}

#[derive(Debug)]
struct Region {
    spec: StateRegion,
    /// Allocated at the first append.
    data: Option<Tensor>,
    /// Where its memory is instead.
    away: Option<Place>,
    /// The place it was lost with, and why.
    lost: Option<(Place, String)>,
    /// One element of a reserved cache: through it candle lends the memory without sorting dims in a new list.
    door: Option<Tensor>,
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

/// See [`State::mark`].
#[derive(Debug)]
pub(crate) struct Mark {
    len: usize,
    kept: Vec<Kept>,
    fixed: Vec<Option<Tensor>>,
}

/// Rows written behind the valid part of every head.
struct Rows<'a> {
    x: &'a [f32],
    heads: usize,
    /// Elements of a head before the new ones, of a whole head, and of the new ones.
    at: usize,
    room: usize,
    row: usize,
}

impl InplaceOp1 for Rows<'_> {
    fn name(&self) -> &'static str {
        "append"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let data = cache(storage, layout, self.heads * self.room)?;
        let heads = data.chunks_exact_mut(self.room.max(1));
        for (head, x) in heads.zip(self.x.chunks_exact(self.row.max(1))) {
            head[self.at..self.at + self.row].copy_from_slice(x);
        }
        Ok(())
    }
}

/// Everything behind the valid part of every head becomes zero.
struct Rest {
    heads: usize,
    from: usize,
    room: usize,
}

impl InplaceOp1 for Rest {
    fn name(&self) -> &'static str {
        "zero"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let data = cache(storage, layout, self.heads * self.room)?;
        for head in data.chunks_exact_mut(self.room.max(1)) {
            head[self.from..].fill(0.0);
        }
        Ok(())
    }
}

/// A view of the first element.
fn door(t: &Tensor) -> candle_core::Result<Tensor> {
    t.flatten_all()?.narrow(0, 0, 1)
}

/// The cache of `len` elements that begins at a door.
fn cache<'a>(
    storage: &'a mut CpuStorage,
    door: &Layout,
    len: usize,
) -> candle_core::Result<&'a mut [f32]> {
    let from = door.start_offset();
    match storage {
        CpuStorage::F32(v) if v.len() >= from + len => Ok(&mut v[from..from + len]),
        _ => candle_core::bail!("a cache is {len} contiguous f32"),
    }
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
                    away: None,
                    lost: None,
                    door: None,
                    pending: 0,
                    next: None,
                })
                .collect(),
            quarters: Vec::new(),
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
        self.sound()?;
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
        self.regions.iter_mut().for_each(|r| r.lost = None);
        for r in self.regions.iter_mut().filter(|r| r.spec.is_fixed()) {
            r.data = None;
        }
    }

    /// A copy that shares no memory, so that two arms can go on from the same state. All of it is in host memory.
    pub fn clone_deep(&self) -> Result<State, GraphError> {
        self.sound()?;
        let regions = self
            .regions
            .iter()
            .enumerate()
            .map(|(i, r)| {
                let data = match &r.data {
                    Some(t) => Some(t.copy().map_err(|e| failed(&r.spec.name, e))?),
                    None => self.brought(i)?,
                };
                let reserved = r.door.is_some() || r.away.is_some();
                let door = match data.as_ref().filter(|_| reserved) {
                    Some(t) => Some(door(t).map_err(|e| failed(&r.spec.name, e))?),
                    None => None,
                };
                Ok(Region {
                    spec: r.spec.clone(),
                    data,
                    away: None,
                    lost: None,
                    door,
                    pending: 0,
                    next: None,
                })
            })
            .collect::<Result<_, GraphError>>()?;
        // Contents of fixed regions are never written in place.
        Ok(State {
            kept: self.kept.clone(),
            regions,
            quarters: Vec::new(),
            ..*self
        })
    }

    /// Positions a growing region may hold without moving.
    pub fn room(&self) -> usize {
        self.capacity
    }

    /// Allocates every cache at once, so that none moves or grows while it holds no more than [`State::room`]. What lies
    /// at a place has its memory there.
    pub fn reserve(&mut self) -> Result<(), GraphError> {
        let (batch, capacity) = (self.batch, self.capacity);
        for r in &mut self.regions {
            let RegionKind::Growing { heads, width } = r.spec.kind else {
                continue;
            };
            if r.away.is_some() {
                continue;
            }
            let dims = (batch, heads, capacity, width);
            let grown = || -> candle_core::Result<Tensor> {
                let old = match &r.data {
                    Some(t) if t.dims()[2] >= capacity => return Ok(t.clone()),
                    old => old.as_ref().filter(|_| self.len > 0),
                };
                let grown = Tensor::zeros(dims, DType::F32, &Device::Cpu)?;
                if let Some(t) = old {
                    grown.slice_set(&t.narrow(2, 0, self.len)?.contiguous()?, 2, 0)?;
                }
                Ok(grown)
            };
            let data = grown().map_err(|e| failed(&r.spec.name, e))?;
            r.door = Some(door(&data).map_err(|e| failed(&r.spec.name, e))?);
            r.data = Some(data);
        }
        Ok(())
    }

    /// Refused when a region was lost with its place.
    pub(crate) fn sound(&self) -> Result<(), GraphError> {
        let lost = self
            .regions
            .iter()
            .find_map(|r| Some((r, r.lost.as_ref()?)));
        match lost {
            None => Ok(()),
            Some((r, (place, reason))) => Err(GraphError::StateLost {
                region: r.spec.name.clone(),
                place: place.name().into(),
                reason: reason.clone(),
            }),
        }
    }

    /// Where a region has its home, when that is not host memory.
    pub fn home(&self, region: usize) -> Option<&Place> {
        self.regions.get(region)?.away.as_ref()
    }

    fn quarters_at(&mut self, place: &Place) -> Option<&mut Box<dyn Quarters>> {
        self.quarters.iter_mut().find(|q| q.place() == place)
    }

    /// Tells a place how many positions are valid once a step has appended `n`, when all these regions have their home
    /// there and room for them; what they lie in, as [`Quarters::stamp`]. Allocates nothing.
    pub(crate) fn ready(
        &mut self,
        place: &Place,
        mut regions: impl Iterator<Item = usize>,
        n: usize,
    ) -> Result<Option<u64>, GraphError> {
        let need = self.len + n;
        let Some(at) = self.quarters.iter().position(|q| q.place() == place) else {
            return Ok(regions.next().is_none().then_some(0));
        };
        let fits = |region: usize| {
            let room = self.quarters[at].room(region);
            self.home(region) == Some(place) && room.is_some_and(|room| room >= need)
        };
        if !regions.all(fits) {
            return Ok(None);
        }
        self.quarters[at].announce(need)?;
        Ok(Some(self.quarters[at].stamp()))
    }

    /// What the regions at a place lie in.
    pub(crate) fn stamp(&self, place: &Place) -> u64 {
        let quarters = self.quarters.iter().find(|q| q.place() == place);
        quarters.map_or(0, |q| q.stamp())
    }

    /// A region that lies at a place, with so many positions valid.
    pub(crate) fn lodged(&self, region: usize, valid: usize) -> Option<Arc<dyn Away>> {
        let place = self.home(region)?;
        let quarters = self.quarters.iter().find(|q| q.place() == place)?;
        quarters.region(region, valid)
    }

    /// Makes a place the home of a cache in which a run is about to append `n` positions; gives it as it will be then.
    /// `open` makes the quarters when the state has none there; without any it stays where it is.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`]; after anything else the region is whole, where it was or, if it had outgrown its memory
    /// at a place, in host memory.
    pub(crate) fn settle(
        &mut self,
        region: usize,
        n: usize,
        place: &Place,
        open: impl FnOnce() -> Option<Box<dyn Quarters>>,
    ) -> Result<Option<Arc<dyn Away>>, GraphError> {
        let (batch, need) = (self.batch, self.len + n);
        let Some(r) = self.regions.get(region) else {
            return Ok(None);
        };
        let RegionKind::Growing { heads, width } = r.spec.kind else {
            return Ok(None);
        };
        if r.pending > 0 {
            return Err(GraphError::Mismatch {
                what: format!("region `{}`", r.spec.name),
                expected: "one append a run".into(),
                found: "another".into(),
            });
        }
        let there = r.away.as_ref() == Some(place);
        let held = match self.quarters.iter().find(|q| q.place() == place) {
            Some(quarters) => quarters.room(region).filter(|_| there),
            None => {
                let Some(made) = open() else {
                    return Ok(None);
                };
                self.quarters.push(made);
                None
            }
        };
        if held.is_none_or(|room| room < need) {
            let room = match held {
                Some(room) => need.max(2 * room),
                None => need,
            };
            if self.regions[region].away.is_some() {
                self.come_home(region)?;
            }
            let r = &self.regions[region];
            let now = r.data.as_ref().map_or(0, |t| t.dims()[2]);
            let dims = [batch, heads, room.max(self.capacity).max(now), width];
            let content = match &r.data {
                Some(t) if self.len > 0 => {
                    let whole = whole(t, dims, self.len);
                    Some(whole.map_err(|e| failed(&r.spec.name, e))?)
                }
                _ => None,
            };
            if let Some(quarters) = self.quarters_at(place) {
                quarters.admit(region, dims, content.as_ref())?;
            }
            let r = &mut self.regions[region];
            (r.data, r.door, r.away) = (None, None, Some(place.clone()));
        }
        if let Some(quarters) = self.quarters_at(place) {
            quarters.announce(need)?;
        }
        Ok(self.lodged(region, need))
    }

    /// A run appended so many positions to a region where it lies.
    pub(crate) fn appended(&mut self, region: usize, n: usize) {
        if let Some(r) = self.regions.get_mut(region) {
            r.pending = n;
        }
    }

    /// A copy in host memory, with room behind the valid part, of a region that lies at a place.
    fn brought(&self, region: usize) -> Result<Option<Tensor>, GraphError> {
        let Some(there) = self.lodged(region, self.len) else {
            return Ok(None);
        };
        let (r, &[b, h, _, d]) = (&self.regions[region], there.dims()) else {
            return Ok(None);
        };
        let dims = [b, h, self.capacity.max(self.len), d];
        let made = match self.len {
            0 => Tensor::zeros(dims.as_slice(), DType::F32, &Device::Cpu),
            len => whole(&there.fetch()?, dims, len),
        };
        made.map(Some).map_err(|e| failed(&r.spec.name, e))
    }

    /// Makes host memory the home of a region again.
    pub(crate) fn come_home(&mut self, region: usize) -> Result<(), GraphError> {
        let Some(place) = self.home(region).cloned() else {
            return Ok(());
        };
        let data = self.brought(region)?;
        if let Some(quarters) = self.quarters_at(&place) {
            quarters.dismiss(region);
        }
        let r = &mut self.regions[region];
        (r.data, r.door, r.away) = (data, None, None);
        Ok(())
    }

    /// Makes host memory the home of every region but those that stay, with memory as [`State::reserve`] gives it where
    /// any came back.
    pub(crate) fn home_but(&mut self, stays: impl Fn(usize) -> bool) -> Result<(), GraphError> {
        self.sound()?;
        let mut came = false;
        for region in 0..self.regions.len() {
            if self.regions[region].away.is_some() && !stays(region) {
                self.come_home(region)?;
                came = true;
            }
        }
        if came {
            self.reserve()?;
        }
        Ok(())
    }

    /// A place is gone, and what lay there.
    pub(crate) fn place_lost(&mut self, place: &str, reason: &str) -> Result<(), GraphError> {
        self.quarters.retain(|q| q.place().name() != place);
        for r in &mut self.regions {
            if let Some(place) = r.away.take_if(|p| p.name() == place) {
                r.pending = 0;
                if self.len > 0 {
                    r.lost = Some((place, reason.into()));
                }
            }
        }
        self.sound()
    }

    /// Whether every cache but those that live elsewhere has memory for exactly `room` positions.
    pub(crate) fn holds(&self, room: usize, elsewhere: impl Fn(usize) -> bool) -> bool {
        let all = self.regions.iter().enumerate();
        let mut growing = all.filter(|(i, r)| !r.spec.is_fixed() && !elsewhere(*i));
        growing
            .all(|(_, r)| r.door.is_some() && r.data.as_ref().is_some_and(|t| t.dims()[2] == room))
    }

    /// All of a cache, valid or not.
    pub(crate) fn whole(&self, region: usize) -> Option<&Tensor> {
        self.regions.get(region).and_then(|r| r.data.as_ref())
    }

    /// [`State::append`] of `n` positions `[B,H,n,D]` as they lie, into memory that is there: allocates nothing.
    pub(crate) fn append_slice(&mut self, region: usize, x: &[f32], n: usize) -> Outcome<()> {
        let len = self.len;
        let Some(r) = self.regions.get_mut(region) else {
            return unfit(format!("the state has no region {region}"));
        };
        let (Some(t), Some(door)) = (&r.data, &r.door) else {
            return unfit(format!("region `{}` is not reserved", r.spec.name));
        };
        let &[b, h, room, d] = t.dims() else {
            return unfit(format!("region `{}` is no cache", r.spec.name));
        };
        if r.pending > 0 || len + n > room || x.len() != b * h * n * d {
            return unfit(format!(
                "{} elements for {n} of {room} positions behind {len} of region `{}`",
                x.len(),
                r.spec.name
            ));
        }
        door.inplace_op1(&Rows {
            x,
            heads: b * h,
            at: len * d,
            room: room * d,
            row: n * d,
        })?;
        r.pending = n;
        Ok(())
    }

    /// What the state is now, to come back to.
    pub(crate) fn mark(&self) -> Mark {
        let fixed = |r: &Region| match r.spec.is_fixed() {
            true => r.data.clone(),
            false => None,
        };
        Mark {
            len: self.len,
            kept: self.kept.clone(),
            fixed: self.regions.iter().map(fixed).collect(),
        }
    }

    /// Goes back to a mark. What caches hold beyond it is zeroed, so that nothing can tell it was there.
    pub(crate) fn restore(&mut self, mark: Mark) -> Result<(), GraphError> {
        self.begin();
        self.len = mark.len;
        self.kept = mark.kept;
        for (r, fixed) in self.regions.iter_mut().zip(mark.fixed) {
            if r.spec.is_fixed() {
                r.data = fixed;
            }
        }
        self.zero_rest()
    }

    /// Zeroes what caches hold beyond the valid length.
    pub fn zero_rest(&mut self) -> Result<(), GraphError> {
        for r in &self.regions {
            let (Some(t), Some(door)) = (&r.data, &r.door) else {
                continue;
            };
            let rest = Rest {
                heads: t.dims()[0] * t.dims()[1],
                from: self.len * t.dims()[3],
                room: t.dims()[2] * t.dims()[3],
            };
            door.inplace_op1(&rest)
                .map_err(|e| failed(&r.spec.name, e))?;
        }
        Ok(())
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
        self.sound()?;
        if let Some(there) = self.lodged(region, self.len) {
            return there.fetch().map(Some);
        }
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
                r.door = None;
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

/// The first `len` positions of a cache, with room for as many as `dims` say.
fn whole(t: &Tensor, dims: [usize; 4], len: usize) -> candle_core::Result<Tensor> {
    if t.dims() == dims {
        return Ok(t.clone());
    }
    let made = Tensor::zeros(dims.as_slice(), DType::F32, &Device::Cpu)?;
    made.slice_set(&t.narrow(2, 0, len)?.contiguous()?, 2, 0)?;
    Ok(made)
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
