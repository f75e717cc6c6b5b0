//! A judged model as its caller holds it: the receipt, the plan, the seats, and the ways back.
//!
//! Owns what may be done with it afterwards: detaching, letting go of the host's weights, describing what is attached now.
//! How it came to be is `judging.rs` and `commit.rs`; how weights are let go is [`crate::release`].

use std::sync::Arc;

use structures_graph::session::Plan;

use crate::decisions;
use crate::environment::cpu_name;
use crate::error::Error;
use crate::host::{Host, Loaded};
use crate::judge::summary;
use crate::receipt::Receipt;
use crate::release::{self, ReleaseNote};
use crate::seat::{Seat, SeatReport};

/// A judged model: the receipt, and the plan to run it with.
pub struct Attachment {
    /// Everything that was decided.
    pub receipt: Receipt,
    /// The seats that stay, and after them those of host operations on devices; empty when nothing was activated.
    pub seats: Vec<Arc<Seat>>,
    /// Seats that were adopted at load time.
    pub adopted: Vec<Arc<Seat>>,
    /// The host's plan with the adopted and the active seats.
    pub plan: Plan,
    /// The host's weights here are gone for good.
    pub(super) for_good: bool,
}

/// What could not be detached, and why.
pub struct NotDetached {
    /// As it was.
    pub attachment: Box<Attachment>,
    /// `adopted_no_detach`, `released_for_good`.
    pub error: Error,
}

impl Attachment {
    /// Takes every seat off and keeps the record. The model was never changed: a plan held the seats, and with it they
    /// are gone; whoever still holds another handle to a seat holds only its ledger. Weights of the host that were let go
    /// come back as the host reads them.
    ///
    /// # Errors
    /// What was adopted belongs to the load, not to the attachment, and stays; so do seats that nothing is left behind.
    pub fn detach(self) -> Result<Receipt, NotDetached> {
        if self.for_good {
            let error = Error::refused(
                "released_for_good",
                format!(
                    "the host's weights of {} seats were released for good: open the model again to be without them",
                    self.seats.len()
                ),
            );
            let attachment = Box::new(self);
            return Err(NotDetached { attachment, error });
        }
        if self.adopted.is_empty() {
            return Ok(self.receipt);
        }
        let error = Error::refused(
            "adopted_no_detach",
            format!(
                "{} seats were adopted when the model was loaded, and every number was measured with them; open the \
                 model again without adopting to be rid of them",
                self.adopted.len()
            ),
        );
        let attachment = Box::new(self);
        Err(NotDetached { attachment, error })
    }

    /// Lets go of the host's own weights of these seats; a call that falls back brings them back.
    ///
    /// # Errors
    /// As [`release::consume`].
    pub fn release_host(&self, model: &Loaded) -> Result<ReleaseNote, Error> {
        release::consume(model, &self.plan)
    }

    /// The same for good: one way. What the seats do not serve is refused, and they cannot be detached.
    ///
    /// # Errors
    /// As [`release::finalise`].
    pub fn finalise(&mut self, model: &Loaded) -> Result<ReleaseNote, Error> {
        let note = release::finalise(model, &self.plan)?;
        self.for_good = true;
        Ok(note)
    }

    /// What is attached now, as one JSON document: device, seats with their contracts and counts, the summary, the
    /// decisions of this device, bytes held. Unlike the receipt it goes on changing.
    pub fn manifest(&self, host: &Host) -> serde_json::Value {
        let device = cpu_name();
        let reports =
            |seats: &[Arc<Seat>]| -> Vec<SeatReport> { seats.iter().map(|s| s.report()).collect() };
        let (seats, adopted) = (reports(&self.seats), reports(&self.adopted));
        let decisions: Vec<&decisions::Decision> = host
            .decisions
            .entries()
            .iter()
            .filter(|d| d.device == device)
            .collect();
        serde_json::json!({
            "schema": 1,
            "device": device,
            "receipt": self.receipt.digest,
            "seats": seats,
            "adopted": adopted,
            "summary": summary(&self.seats),
            "decisions": decisions,
            "memory": self.receipt.memory,
        })
    }
}
