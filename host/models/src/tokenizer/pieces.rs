//! A text cut into SentencePiece pieces by their scores.
//!
//! Such a vocabulary has pieces with scores and no merges: of two neighbours, the pair whose joined piece has the
//! highest score is joined first, of equal ones the leftmost. Characters without a piece become bytes.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};

/// Two neighbours that could be one piece.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of both, to see that neither has changed since.
    size: usize,
}

impl Pair {
    fn order(&self) -> (f32, Reverse<usize>) {
        (self.score, Reverse(self.left))
    }
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        let (a, b) = (self.order(), other.order());
        a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// A part of the text in a chain of parts; one that was joined to the part before it has no bytes left.
struct Part {
    from: usize,
    to: usize,
    before: Option<usize>,
    after: Option<usize>,
}

/// The parts of a text that no pair joins any more, as they stand in it.
pub(super) fn cut<'t>(text: &'t str, ids: &HashMap<String, u32>, scores: &[f32]) -> Vec<&'t str> {
    let mut parts: Vec<Part> = Vec::new();
    for (from, c) in text.char_indices() {
        let at = parts.len();
        parts.push(Part {
            from,
            to: from + c.len_utf8(),
            before: at.checked_sub(1),
            after: Some(at + 1),
        });
    }
    if let Some(last) = parts.last_mut() {
        last.after = None;
    }
    let pair = |parts: &[Part], left: Option<usize>, right: Option<usize>| -> Option<Pair> {
        let (left, right) = (left?, right?);
        let whole = &text[parts[left].from..parts[right].to];
        let id = *ids.get(whole)?;
        Some(Pair {
            score: scores.get(id as usize).copied().unwrap_or(0.0),
            left,
            right,
            size: whole.len(),
        })
    };
    let mut open: BinaryHeap<Pair> = (1..parts.len())
        .filter_map(|right| pair(&parts, Some(right - 1), Some(right)))
        .collect();
    while let Some(Pair {
        left, right, size, ..
    }) = open.pop()
    {
        let bytes = |i: usize| parts[i].to - parts[i].from;
        if bytes(left) == 0 || bytes(right) == 0 || bytes(left) + bytes(right) != size {
            continue;
        }
        let after = parts[right].after;
        parts[left].to = parts[right].to;
        parts[left].after = after;
        parts[right].from = parts[right].to;
        if let Some(after) = after {
            parts[after].before = Some(left);
        }
        open.extend(pair(&parts, parts[left].before, Some(left)));
        open.extend(pair(&parts, Some(left), after));
    }
    let kept = parts.iter().filter(|p| p.from < p.to);
    kept.map(|p| &text[p.from..p.to]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut_by(pieces: &[(&str, f32)], text: &str) -> String {
        let ids = pieces.iter().zip(0u32..);
        let ids = ids.map(|((p, _), i)| ((*p).to_string(), i)).collect();
        let scores: Vec<f32> = pieces.iter().map(|(_, s)| *s).collect();
        cut(text, &ids, &scores).join("|")
    }

    #[test]
    fn the_highest_score_joins_first_and_of_equal_ones_the_leftmost() {
        let pieces = [
            ("a", -9.0),
            ("ab", -3.0),
            ("bc", -1.0),
            ("abc", -5.0),
            ("de", -2.0),
            ("ef", -2.0),
        ];
        assert_eq!(cut_by(&pieces, "abcab"), "abc|ab");
        assert_eq!(cut_by(&pieces, "def"), "de|f");
        assert_eq!(cut_by(&pieces, ""), "");
        // A run of one character grows from its start.
        let runs = [("__", -4.0), ("___", -4.0)];
        assert_eq!(cut_by(&runs, "_____"), "___|__");
    }

    #[test]
    fn a_long_text_takes_no_square_time() {
        let long = "ab".repeat(100_000);
        let start = std::time::Instant::now();
        let pieces = [("ab", -1.0), ("abab", -2.0), ("ba", -1.0)];
        assert_eq!(cut_by(&pieces, &long).split('|').count(), 50_000);
        assert!(start.elapsed().as_secs() < 10);
    }
}
