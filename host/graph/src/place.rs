//! Values that lie elsewhere than in host memory while a plan runs.
//!
//! A runner may sit at a *place*, a memory the host cannot read. What it makes stays there until somebody at another
//! place, the host's operations or the caller reads it, and is copied once for all of them; a change of dims alone
//! copies nothing. The session decides when a copy is made; who owns a place makes it and counts it.

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
