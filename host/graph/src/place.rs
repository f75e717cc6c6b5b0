//! Values that lie elsewhere than in host memory while a plan runs.
//!
//! A runner may sit at a *place*, a memory the host cannot read. What it makes stays there until somebody at another
//! place, the host's operations or the caller reads it, and is copied once for all of them; a change of dims alone
//! copies nothing. The session decides when a copy is made; who owns a place makes it and counts it.
//!
//! A growing region of a state may have its home at a place ([`Quarters`]) when everybody who appends to it and reads it
//! sits there. Which regions those are a plan decides; moving one is the state's business.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use candle_core::Tensor;

use crate::GraphError;

/// Name of a memory: equal names are one memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place(Arc<str>);

impl Place {
    /// A place of this name.
    pub fn new(name: &str) -> Self {
        Place(name.into())
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A row-major f32 value that lies at a place.
pub trait Away: Send + Sync + fmt::Debug {
    /// Where.
    fn place(&self) -> &Place;

    /// Dims.
    fn dims(&self) -> &[usize];

    /// The same memory with other dims of as many elements.
    fn view(&self, dims: Vec<usize>) -> Arc<dyn Away>;

    /// A copy in host memory.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`] when the memory is gone.
    fn fetch(&self) -> Result<Tensor, GraphError>;

    /// For the runner that knows what it is.
    fn as_any(&self) -> &dyn Any;
}

/// A value during a run, in one memory or in two.
#[derive(Clone, Debug)]
pub enum Held {
    /// In host memory.
    Host(Tensor),
    /// At a place.
    Away(Arc<dyn Away>),
    /// In both.
    Both(Tensor, Arc<dyn Away>),
}

impl Held {
    /// Dims.
    pub fn dims(&self) -> &[usize] {
        match self {
            Held::Host(t) | Held::Both(t, _) => t.dims(),
            Held::Away(a) => a.dims(),
        }
    }

    /// The host's copy, where there is one.
    pub fn host(&self) -> Option<&Tensor> {
        match self {
            Held::Host(t) | Held::Both(t, _) => Some(t),
            Held::Away(_) => None,
        }
    }

    /// The copy at this place, where there is one.
    pub fn at(&self, place: &Place) -> Option<&Arc<dyn Away>> {
        match self {
            Held::Away(a) | Held::Both(_, a) if a.place() == place => Some(a),
            _ => None,
        }
    }

    /// The host's copy, made when there is none yet.
    ///
    /// # Errors
    /// As [`Away::fetch`].
    pub fn bring_home(&mut self) -> Result<&Tensor, GraphError> {
        if let Held::Away(a) = self {
            let tensor = a.fetch()?;
            *self = Held::Both(tensor, a.clone());
        }
        match self {
            Held::Host(t) | Held::Both(t, _) => Ok(t),
            Held::Away(a) => Err(GraphError::Mismatch {
                what: format!("copy from `{}`", a.place()),
                expected: "a tensor in host memory".into(),
                found: "none".into(),
            }),
        }
    }

    /// Remembers a copy at a place beside the host's; one at another place is forgotten.
    pub fn also(&mut self, away: Arc<dyn Away>) {
        if let Held::Host(t) | Held::Both(t, _) = self {
            *self = Held::Both(t.clone(), away);
        }
    }
}

/// Memory at a place for the growing regions of one state, each whole: `[B, heads, room, D]`, f32. What lies behind its
/// valid positions is undefined. All of them have one valid length, which lies there as a number of its own, so that
/// neither a reader nor who appends is told anything else from one step to the next.
pub trait Quarters: Send + Sync + fmt::Debug {
    /// Where.
    fn place(&self) -> &Place;

    /// Memory for a region, with a copy of what it holds, of these very dims; without content none of it is valid.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`]; anything else keeps the region where it is.
    fn admit(
        &mut self,
        region: usize,
        dims: [usize; 4],
        content: Option<&Tensor>,
    ) -> Result<(), GraphError>;

    /// Positions the region has memory for there, if it has any.
    fn room(&self, region: usize) -> Option<usize>;

    /// How many positions are valid once the run that is going on has appended: the number that lies there.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`].
    fn announce(&mut self, valid: usize) -> Result<(), GraphError>;

    /// The region with so many valid positions `[B, heads, valid, D]`, as runners there read it and append to it. A copy
    /// of it in host memory is of the valid positions.
    fn region(&self, region: usize, valid: usize) -> Option<Arc<dyn Away>>;

    /// Frees the region's memory.
    fn dismiss(&mut self, region: usize);

    /// Another number whenever memory of a region is another, in no two quarters the same.
    fn stamp(&self) -> u64;
}

/// Fixed memory at a place for what a captured step is told and what it says there, and a way to do its calls as one.
pub trait Recorder: Send + Sync {
    /// Memory for a value: f32, or whole numbers.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`]; what keeps it from being there.
    fn fixed(&mut self, dims: &[usize], whole: bool) -> Result<Arc<dyn Away>, GraphError>;

    /// Puts elements there; allocates nothing.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`].
    fn write(&self, to: &Arc<dyn Away>, data: &[f32]) -> Result<(), GraphError>;

    /// The same of whole numbers.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`].
    fn write_whole(&self, to: &Arc<dyn Away>, data: &[i64]) -> Result<(), GraphError>;

    /// Takes elements from there; allocates nothing.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`].
    fn read(&self, from: &Arc<dyn Away>, to: &mut [f32]) -> Result<(), GraphError>;

    /// The same of whole numbers.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`].
    fn read_whole(&self, from: &Arc<dyn Away>, to: &mut [i64]) -> Result<(), GraphError>;

    /// Records what `calls` enqueue there, which is not done now.
    ///
    /// # Errors
    /// Why not: the calls' own refusal, or the place's.
    fn record(
        &self,
        calls: &mut dyn FnMut() -> Result<(), Unserved>,
    ) -> Result<Box<dyn Recorded>, Unserved>;
}

/// Recorded calls.
pub trait Recorded: Send + Sync {
    /// Does them again, on what lies now where they were recorded with; allocates nothing.
    ///
    /// # Errors
    /// Why not.
    fn launch(&self) -> Result<(), Unserved>;
}

/// Why a call of a captured step at a place was not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unserved {
    /// Stable code; [`LOST`] when the place is gone.
    pub code: String,
    /// For people.
    pub message: String,
    /// Who declined it is still sound.
    pub declined: bool,
}

/// Code of a place that is gone.
pub const LOST: &str = "device_lost";

/// Code of a choice among scores that is none of them.
pub const NO_SUCH_SCORE: &str = "rt_choice";

impl Unserved {
    pub(crate) fn is_loss(&self) -> bool {
        self.code == LOST
    }
}

/// What a runner at a place did with a call.
#[derive(Debug)]
pub enum AwayOutcome {
    /// It ran.
    Done {
        /// In the order of the install's outputs, with the host's shapes.
        outputs: Vec<Held>,
        /// Inputs, by position, that had to be copied to the place.
        brought: Vec<(usize, Arc<dyn Away>)>,
    },
    /// Nothing: the session runs the original operations.
    Host,
}
