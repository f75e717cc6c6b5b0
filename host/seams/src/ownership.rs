//! Who keeps a host operation that several seams want.
//!
//! Settled after the scheme has decided, and again whenever a winner ends without a form: pass only the claims that
//! are still alive, and a loser of the last round comes back by itself.

use std::collections::HashMap;

use structures_graph::OpId;

/// A seam's wish for the operations of its span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The caller's index of the seam.
    pub seam: usize,
    /// Precedence of its structure.
    pub precedence: i32,
    /// Operations of the span it would take.
    pub ops: Vec<OpId>,
}

/// A claim that did not get its operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owned {
    /// The seam that lost.
    pub seam: usize,
    /// The seam that keeps the first operation both want.
    pub by: usize,
    /// That operation.
    pub op: OpId,
}

/// The outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ownership {
    /// Seams that keep everything they asked for, in the order of the claims.
    pub winners: Vec<usize>,
    /// The others, in the order of the claims.
    pub losers: Vec<Owned>,
}

/// Higher precedence first, then the wider span, then the order of the claims.
pub fn resolve_ownership(claims: &[Claim]) -> Ownership {
    let mut order: Vec<usize> = (0..claims.len()).collect();
    order.sort_by_key(|&i| {
        (
            std::cmp::Reverse(claims[i].precedence),
            std::cmp::Reverse(claims[i].ops.len()),
            i,
        )
    });
    let mut owner: HashMap<OpId, usize> = HashMap::new();
    let mut lost: HashMap<usize, Owned> = HashMap::new();
    for i in order {
        let claim = &claims[i];
        let taken = claim
            .ops
            .iter()
            .find_map(|op| owner.get(op).map(|by| (*op, *by)));
        match taken {
            Some((op, by)) => {
                let seam = claim.seam;
                lost.insert(i, Owned { seam, by, op });
            }
            None => owner.extend(claim.ops.iter().map(|op| (*op, claim.seam))),
        }
    }
    let mut out = Ownership::default();
    for (i, claim) in claims.iter().enumerate() {
        match lost.remove(&i) {
            Some(owned) => out.losers.push(owned),
            None => out.winners.push(claim.seam),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(seam: usize, precedence: i32, ops: &[usize]) -> Claim {
        Claim {
            seam,
            precedence,
            ops: ops.iter().copied().map(OpId).collect(),
        }
    }

    #[test]
    fn precedence_then_width_then_order() {
        let o = resolve_ownership(&[
            claim(0, 0, &[1]),
            claim(1, 10, &[1, 2, 3]),
            claim(2, 10, &[3, 4, 5, 6]),
            claim(3, 0, &[9]),
            claim(4, 0, &[9]),
        ]);
        assert_eq!(o.winners, vec![0, 2, 3]);
        assert_eq!(
            o.losers,
            vec![
                Owned {
                    seam: 1,
                    by: 2,
                    op: OpId(3)
                },
                Owned {
                    seam: 4,
                    by: 3,
                    op: OpId(9)
                }
            ]
        );
    }

    #[test]
    fn the_loser_returns_when_the_winner_is_gone() {
        let all = [
            claim(0, 20, &[1, 2, 3]),
            claim(1, 0, &[1]),
            claim(2, 0, &[2]),
        ];
        let first = resolve_ownership(&all);
        assert_eq!(first.winners, vec![0]);
        assert_eq!(first.losers.len(), 2);
        assert_eq!(resolve_ownership(&all[1..]).winners, vec![1, 2]);
    }

    #[test]
    fn a_loser_does_not_block_anybody() {
        // 1 loses its op 2 to 0, so 2 gets op 3 although 1 is wider.
        let o = resolve_ownership(&[claim(0, 9, &[2]), claim(1, 5, &[2, 3]), claim(2, 1, &[3])]);
        assert_eq!(o.winners, vec![0, 2]);
    }
}
