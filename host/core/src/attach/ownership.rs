//! Who keeps which operation of the graph: every operation has one owner, and what loses says to whom.
//!
//! Owns one settlement among the sites that are still alive, against seats that are taken. The rule between two claims is
//! [`structures_seams::resolve_ownership`]; when to settle again is the caller's.

use std::collections::{BTreeSet, HashMap};

use structures_graph::OpId;
use structures_seams::{resolve_ownership, Claim};

use super::Prepared;
use crate::bind::Bound;
use crate::choose::qualify;
use crate::receipt::RefusalNote;

/// One settlement of ownership.
pub(super) struct Round {
    pub(super) winners: Vec<usize>,
    /// Site and the name of who keeps an operation it needs.
    pub(super) losers: Vec<(usize, String)>,
    /// Operation -> who keeps it: seats that stay, and this round's winners.
    pub(super) owners: HashMap<OpId, String>,
}

impl Prepared<'_> {
    /// Who keeps the operations, among sites that are still alive, against seats that are taken. Losers by seats
    /// that stay are final; losers among the alive come back when their winner ends without a form.
    pub(super) fn ownership(&self, alive: &BTreeSet<usize>, taken: &[Bound]) -> Round {
        let mut owners: HashMap<OpId, String> = HashMap::new();
        for b in self.adopted.iter().chain(taken) {
            owners.extend(b.install.ops.iter().map(|op| (*op, b.install.name.clone())));
        }
        let mut claims = Vec::new();
        let mut losers = Vec::new();
        for &i in alive {
            let site = &self.survey.sites[i];
            let ops = &site.spans[self.claimed_span(i)].ops;
            if let Some(owner) = ops.iter().find_map(|op| owners.get(op)) {
                losers.push((i, owner.clone()));
                continue;
            }
            claims.push(Claim {
                seam: i,
                precedence: site.spec.precedence,
                ops: ops.clone(),
            });
        }
        let settled = resolve_ownership(&claims);
        for claim in claims.iter().filter(|c| settled.winners.contains(&c.seam)) {
            let id = self.survey.sites[claim.seam].id();
            owners.extend(claim.ops.iter().map(|op| (*op, id.clone())));
        }
        let by = |l: &structures_seams::Owned| (l.seam, self.survey.sites[l.by].id());
        losers.extend(settled.losers.iter().map(by));
        Round {
            winners: settled.winners,
            losers,
            owners,
        }
    }

    /// The span the first choice would take; the widest when there is none.
    fn claimed_span(&self, site: usize) -> usize {
        let s = &self.survey.sites[site];
        self.choices(site)
            .iter()
            .find_map(|c| qualify(s, c, "f32", &self.seams[site].rows).ok())
            .unwrap_or(0)
    }

    /// Records sites that lost an operation they need.
    pub(super) fn lost(&mut self, losers: Vec<(usize, String)>, ended: &str) {
        for (site, owner) in losers {
            let s = &self.survey.sites[site];
            self.kept.push(RefusalNote {
                path: s.seam.path.clone(),
                structure: s.spec.name.clone(),
                stage: "ownership".into(),
                code: "owned_by".into(),
                reason: format!("`{owner}` keeps an operation this seam needs{ended}"),
                plugin: None,
                form: None,
            });
        }
    }
}
