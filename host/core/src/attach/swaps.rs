//! The door that binds and does not judge: the caller owns the gate and must read the ledger.
//!
//! Owns the order in which sites are taken and what is let go of between them. Which form comes first is `choosing.rs`, who
//! keeps an operation `ownership.rs`, the bind itself `binding.rs`; all three serve the gated door too.

use std::collections::BTreeSet;
use std::sync::Arc;

use structures_graph::session::Plan;

use super::compose::BLOCK;
use super::{Options, Prepared};
use crate::adopt::Adopted;
use crate::bind::{brokers, installs, Bound};
use crate::error::Error;
use crate::host::{Host, Loaded};
use crate::progress::Progress;
use crate::receipt::RefusalNote;
use crate::release::{self, ReleaseNote};
use crate::samples::Samples;
use crate::seat::Seat;

/// Seats that nobody judged.
pub struct Swaps {
    /// The host's plan with the seats.
    pub plan: Plan,
    /// The seats, for their ledgers.
    pub seats: Vec<Arc<Seat>>,
    /// What was not bound, and why.
    pub refused: Vec<RefusalNote>,
    /// What stays with the host, and why: the scheme keeps it, or another seat has its operations.
    pub kept: Vec<RefusalNote>,
    /// What was taken over at load time; its seats come first in `seats`.
    pub adopted: Option<Adopted>,
    /// Whether scales were fitted: then only the samples that are judged are held out.
    pub fitted: bool,
    /// The host's weights that were let go, where that was asked for.
    pub released: Option<ReleaseNote>,
}

/// Binds without judging: the caller owns the gate and must read the ledger.
pub fn auto_swaps(
    host: &Host,
    model: &Loaded,
    samples: &Samples,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Swaps, Error> {
    let mut prepared = Prepared::new(host, model, samples, options, progress)?;
    prepared.settle_adopted();
    let taken = match prepared.swap(options, progress) {
        Ok(taken) => taken,
        Err(e) => {
            // What was let go on the way comes back: nobody holds a seat now.
            release::restore(model)?;
            return Err(e);
        }
    };
    let plan = prepared.plan(installs(&taken))?;
    let all = prepared.adopted.iter().chain(&taken);
    let seats = all.map(|b| b.seat.clone()).collect();
    let released = match options.release_host {
        true => Some(release::consume(model, &plan)?),
        false => None,
    };
    Ok(Swaps {
        plan,
        seats,
        refused: prepared.refused,
        kept: prepared.kept,
        adopted: prepared.adoption,
        fitted: prepared.calibration.note.samples > 0,
        released,
    })
}

impl Prepared<'_> {
    /// Binds what can be bound, without judging.
    fn swap(&mut self, options: &Options, progress: &dyn Progress) -> Result<Vec<Bound>, Error> {
        let mut taken: Vec<Bound> = Vec::new();
        let mut alive: BTreeSet<usize> = self.eligible().collect();
        progress.stage("bind", alive.len());
        while !alive.is_empty() {
            let round = self.ownership(&alive, &taken);
            if round.winners.is_empty() {
                self.lost(round.losers, "");
                break;
            }
            for &site in &round.winners {
                alive.remove(&site);
                progress.tick();
                let mut bound = None;
                let choices = self.choices(site);
                if choices.is_empty() {
                    let note = self.no_form(site);
                    self.refuse(note);
                }
                for choice in choices {
                    // A yardstick is not worth running unless somebody asked for it.
                    let structure = &self.survey.sites[site].spec.name;
                    let pinned = options.pins.iter().any(|p| p.structure == *structure);
                    if choice.reference && !pinned {
                        let note = self.yardstick(site, &choice);
                        self.refuse(note);
                        continue;
                    }
                    match self.bind(site, &choice, &round.owners) {
                        Ok(b) => {
                            bound = Some(b);
                            break;
                        }
                        Err(refused) => self.refuse(refused.note),
                    }
                }
                taken.extend(bound);
                // Seat by seat, so that packed and plain weights are together in memory for one seat only. A block covers
                // what others may still be bound at.
                let block = self.survey.sites[site].spec.tags.iter().any(|t| t == BLOCK);
                if self.options.release_host && !block {
                    release::consume(self.model, &self.plan(installs(&taken))?)?;
                }
            }
        }
        brokers(&taken);
        Ok(taken)
    }
}
