//! The gated door: discover, locate, calibrate, decide, settle ownership, bind, judge, re-check the union, commit.
//!
//! Stages are generic; what varies is declared by structures, schemes and forms. Every refusal along the way is a
//! row of the receipt, and the door itself fails only when nothing can be judged at all.
//!
//! This file owns the list of stages and the door; each stage is a file beside it, on the one state that `prepare.rs`
//! makes. The doors that stop earlier are where their last stage is: `calibrating.rs`, `swaps.rs`, `door.rs`,
//! `adjudicate.rs`.

mod adjudicate;
mod adopt;
mod attachment;
mod binding;
mod calibrating;
mod choosing;
mod commit;
mod compose;
mod door;
mod judging;
mod options;
mod ownership;
mod prepare;
mod residency;
mod swaps;
mod wires;

use crate::error::Error;
use crate::host::{Host, Loaded};
use crate::progress::Progress;
use crate::samples::Samples;
use prepare::Prepared;

pub use adjudicate::{adjudicate, Adjudication};
pub use attachment::{Attachment, NotDetached};
pub use calibrating::{calibrate, precision_spec, Measured};
pub use door::{Certified, Handle, DEFAULT_FLOOR};
pub use options::Options;
pub use swaps::{auto_swaps, Swaps};

pub(crate) use adopt::read_packed;
pub(crate) use calibrating::{nothing, span_contents};

/// What is done, in this order, whatever the structures are: what the model offers, where it is in the graph, what is
/// measured, what the scheme says, who keeps which operation, which pairs are wired, what is bound and judged by itself,
/// what stays together.
pub const STAGES: [&str; 8] = [
    "discover",
    "locate",
    "calibrate",
    "scheme",
    "ownership",
    "wires",
    "bind",
    "gate",
];

/// See the module.
pub fn attach(
    host: &Host,
    model: &Loaded,
    samples: &Samples,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Attachment, Error> {
    let prepared = Prepared::new(host, model, samples, options, progress)?;
    prepared.judge(progress)
}
