//! One allocation for every value of a step, cut by lifetime.
//!
//! Buffers whose lives do not meet share memory. A step's outputs never overlap its inputs, because both live while it
//! runs; so the arena can lend outputs exclusively and everything else shared, checked by the borrow checker.

use std::ops::Range;

/// Elements a buffer starts at a multiple of: 64 bytes, a cache line and a whole vector of the widest kind.
const ALIGN: usize = 16;

/// A buffer by index.
pub(super) type Buf = usize;

/// What is known of a buffer while a step is laid out.
#[derive(Clone, Debug)]
struct Life {
    len: usize,
    first: usize,
    last: usize,
}

/// Buffers before they have a place.
#[derive(Debug, Default)]
pub(super) struct Layout {
    lives: Vec<Life>,
}

impl Layout {
    /// A buffer made at `step`.
    pub(super) fn buffer(&mut self, len: usize, step: usize) -> Buf {
        self.lives.push(Life {
            len,
            first: step,
            last: step,
        });
        self.lives.len() - 1
    }

    /// The buffer is read or written at `step`.
    pub(super) fn touch(&mut self, buf: Buf, step: usize) {
        let life = &mut self.lives[buf];
        life.first = life.first.min(step);
        life.last = life.last.max(step);
    }

    /// The buffer keeps its content between two replays.
    pub(super) fn keep(&mut self, buf: Buf) {
        self.lives[buf].first = 0;
        self.lives[buf].last = usize::MAX;
    }

    /// Gives every buffer its place: those that live together lie apart.
    pub(super) fn place(self) -> Arena {
        let mut order: Vec<Buf> = (0..self.lives.len()).collect();
        // Large ones first: small ones find room between them.
        order.sort_by_key(|b| (std::cmp::Reverse(self.lives[*b].len), self.lives[*b].first));
        let mut at = vec![0; self.lives.len()];
        let mut placed: Vec<Buf> = Vec::new();
        let mut total = 0;
        for buf in order {
            let life = &self.lives[buf];
            let mut taken: Vec<Range<usize>> = placed
                .iter()
                .filter(|p| {
                    let other = &self.lives[**p];
                    other.first <= life.last && life.first <= other.last
                })
                .map(|p| at[*p]..at[*p] + padded(self.lives[*p].len))
                .collect();
            taken.sort_unstable_by_key(|r| r.start);
            let mut from = 0;
            for r in taken {
                if r.start >= from + padded(life.len) {
                    break;
                }
                from = from.max(r.end);
            }
            at[buf] = from;
            total = total.max(from + padded(life.len));
            placed.push(buf);
        }
        let data = vec![0f32; total + ALIGN];
        let base = data.as_ptr().align_offset(ALIGN * size_of::<f32>());
        Arena {
            base: if base <= ALIGN { base } else { 0 },
            planned: self.lives.iter().map(|l| padded(l.len)).sum(),
            places: self
                .lives
                .iter()
                .zip(at)
                .map(|(l, at)| at..at + l.len)
                .collect(),
            data,
        }
    }
}

fn padded(len: usize) -> usize {
    len.div_ceil(ALIGN) * ALIGN
}

/// The memory of a captured step.
#[derive(Debug)]
pub(super) struct Arena {
    data: Vec<f32>,
    base: usize,
    places: Vec<Range<usize>>,
    /// Elements that would be needed if no buffer shared memory.
    pub(super) planned: usize,
}

/// Most outputs of one step.
pub(super) const OUTS: usize = 8;

/// Everything that is not lent exclusively.
pub(super) struct Rest<'a> {
    parts: [(usize, &'a [f32]); OUTS + 1],
    places: &'a [Range<usize>],
    base: usize,
}

impl<'a> Rest<'a> {
    /// A buffer; empty when it is lent exclusively, which the layout rules out.
    pub(super) fn get(&self, buf: Buf) -> &'a [f32] {
        let place = &self.places[buf];
        let (from, to) = (place.start + self.base, place.end + self.base);
        let inside = |(at, part): &&(usize, &[f32])| *at <= from && to <= at + part.len();
        match self.parts.iter().find(inside) {
            Some((at, part)) => &part[from - at..to - at],
            None => &[],
        }
    }
}

impl Arena {
    pub(super) fn get(&self, buf: Buf) -> &[f32] {
        let place = &self.places[buf];
        &self.data[place.start + self.base..place.end + self.base]
    }

    pub(super) fn get_mut(&mut self, buf: Buf) -> &mut [f32] {
        let place = &self.places[buf];
        &mut self.data[place.start + self.base..place.end + self.base]
    }

    /// Lends up to [`OUTS`] buffers exclusively, in the order asked for, and the rest shared.
    pub(super) fn lend<const N: usize>(&mut self, outs: [Buf; N]) -> ([&mut [f32]; N], Rest<'_>) {
        self.lend_some(&outs, std::array::from_fn(|_| Default::default()))
    }

    /// [`Arena::lend`] into an array that may be longer.
    pub(super) fn lend_some<'a, const N: usize>(
        &'a mut self,
        outs: &[Buf],
        mut lent: [&'a mut [f32]; N],
    ) -> ([&'a mut [f32]; N], Rest<'a>) {
        let mut parts: [(usize, &[f32]); OUTS + 1] = [(0, &[]); OUTS + 1];
        let (mut at, mut left) = (0, self.data.as_mut_slice());
        let mut done = [false; OUTS];
        for part in &mut parts {
            // The next output in memory.
            let next = (0..outs.len().min(N).min(OUTS))
                .filter(|i| !done[*i])
                .min_by_key(|i| self.places[outs[*i]].start);
            let Some(i) = next else {
                *part = (at, left);
                break;
            };
            done[i] = true;
            let place = &self.places[outs[i]];
            let (from, len) = (place.start + self.base, place.len());
            let (before, rest) = left.split_at_mut(from - at);
            let (out, rest) = rest.split_at_mut(len);
            *part = (at, before);
            lent[i] = out;
            (at, left) = (from + len, rest);
        }
        let rest = Rest {
            parts,
            places: &self.places,
            base: self.base,
        };
        (lent, rest)
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.data.len() * size_of::<f32>()
    }

    /// Where a buffer lies, in bytes from the start.
    pub(super) fn offset(&self, buf: Buf) -> usize {
        self.places[buf].start * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lives_that_meet_lie_apart_and_others_share() {
        let mut l = Layout::default();
        let lens = [100, 3, 50, 100, 7];
        let spans = [(0, 1), (1, 3), (2, 3), (2, 4), (5, 6)];
        for (len, (first, last)) in lens.iter().zip(spans) {
            let b = l.buffer(*len, first);
            l.touch(b, last);
        }
        let kept = l.buffer(5, 3);
        l.keep(kept);
        let lives = l.lives.clone();
        let arena = l.place();
        for (i, a) in lives.iter().enumerate() {
            for (j, b) in lives.iter().enumerate().skip(i + 1) {
                let meet = a.first <= b.last && b.first <= a.last;
                let (p, q) = (&arena.places[i], &arena.places[j]);
                assert!(!meet || p.end <= q.start || q.end <= p.start, "{i} and {j}");
            }
        }
        assert!(
            arena.bytes() < arena.planned * 4,
            "buffers 0 and 3 share memory"
        );
        assert_eq!(arena.get(3).as_ptr().addr() % 64, 0);
    }

    #[test]
    fn outputs_are_lent_in_the_order_asked_for_and_the_rest_is_readable() {
        let mut l = Layout::default();
        let b: Vec<Buf> = (0..5).map(|i| l.buffer(4 + i, 0)).collect();
        let mut arena = l.place();
        for (i, buf) in b.iter().enumerate() {
            arena.get_mut(*buf).fill(i as f32);
        }
        let ([x, y], rest) = arena.lend([b[3], b[1]]);
        assert_eq!((x.len(), y.len()), (7, 5));
        x.copy_from_slice(&[30.0; 7]);
        y.fill(10.0);
        for i in [0, 2, 4] {
            assert_eq!(rest.get(b[i]), vec![i as f32; 4 + i]);
        }
        assert!(rest.get(b[3]).is_empty());
        assert_eq!(arena.get(b[1]), [10.0; 5]);
        assert_eq!(arena.get(b[3]), [30.0; 7]);
    }
}
