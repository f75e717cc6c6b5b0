//! The mutations: of bytes, of words and of lines, a few to a case.

use crate::random::Random;

// What documents of these formats are sensitive to.
const WORDS: &[&str] = &[
    "*a",
    "&a ",
    "!!int ",
    "no",
    "on",
    "~",
    "null",
    "true",
    "{",
    "}",
    "[",
    "]",
    "[[",
    "]]",
    "{}",
    "[]",
    ": ",
    "- ",
    "? ",
    "| ",
    ">-\n",
    "---\n",
    "...\n",
    "\t",
    "\u{feff}",
    "'",
    "\"",
    "#",
    "<i>",
    "<",
    "$x",
    "@x",
    "=D/0",
    "D/0",
    "D*D*D",
    "9223372036854775807",
    "-1",
    "0",
    "1e999",
    "nan",
    "99999999999999999999",
    "0..64",
    "0..99999999999",
    "a.b.c.d",
    "if a then b else c",
    "not not not",
    "((((((((",
    "has(",
    "\u{0}",
    "\u{1F600}",
    "\r\n",
];
// Larger than any format takes.
const LARGE: usize = 1_200_000;

/// Makes documents out of good ones.
#[derive(Clone, Debug)]
pub struct Mutator<'a> {
    seeds: &'a [Vec<u8>],
}

impl<'a> Mutator<'a> {
    /// Over these good documents.
    pub fn new(seeds: &'a [Vec<u8>]) -> Mutator<'a> {
        Mutator { seeds }
    }

    /// The document of a case: the same for the same seed.
    pub fn case(&self, seed: u64, case: u64) -> Vec<u8> {
        let mut random = Random::new(seed, case);
        let mut doc = random.pick(self.seeds).cloned().unwrap_or_default();
        let rounds = 1 + random.below(6);
        for _ in 0..rounds {
            match random.below(16) {
                0 => flip(&mut doc, &mut random),
                1 => cut(&mut doc, &mut random),
                2 => double(&mut doc, &mut random),
                3..=5 => insert_word(&mut doc, &mut random),
                6..=9 => replace_word(&mut doc, &mut random),
                10 => nest(&mut doc, &mut random),
                11..=14 => self.lines(&mut doc, &mut random),
                _ => self.splice(&mut doc, &mut random),
            }
        }
        if random.below(400) == 0 && !doc.is_empty() {
            while doc.len() < LARGE {
                doc.extend_from_within(..);
            }
        }
        doc
    }

    fn lines(&self, doc: &mut Vec<u8>, random: &mut Random) {
        let mut lines: Vec<Vec<u8>> = doc.split(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
        let (at, to) = (random.below(lines.len()), random.below(lines.len()));
        match random.below(6) {
            0 => drop(lines.remove(at)),
            1 => {
                let line = lines[at].clone();
                lines.insert(to, line);
            }
            2 => lines.swap(at, to),
            3 => {
                let indent = vec![b' '; 1 + random.below(4)];
                lines[at].splice(0..0, indent);
            }
            4 => {
                let spaces = lines[at].iter().take_while(|b| **b == b' ').count();
                lines[at].drain(..spaces);
            }
            _ => {
                if let Some(line) = self.foreign_line(random) {
                    lines.insert(at, line);
                }
            }
        }
        *doc = lines.join(&b'\n');
    }

    // A line of any good document.
    fn foreign_line(&self, random: &mut Random) -> Option<Vec<u8>> {
        let lines: Vec<&[u8]> = random.pick(self.seeds)?.split(|b| *b == b'\n').collect();
        random.pick(&lines).map(|l| l.to_vec())
    }

    // The beginning of one, the end of another.
    fn splice(&self, doc: &mut Vec<u8>, random: &mut Random) {
        let Some(other) = random.pick(self.seeds) else {
            return;
        };
        doc.truncate(random.below(doc.len() + 1));
        doc.extend_from_slice(&other[random.below(other.len() + 1)..]);
    }
}

fn flip(doc: &mut [u8], random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let at = random.below(doc.len());
        let bit = 1 << random.below(8);
        if let Some(byte) = doc.get_mut(at) {
            *byte ^= bit;
        }
    }
}

fn range(doc: &[u8], random: &mut Random) -> std::ops::Range<usize> {
    let from = random.below(doc.len() + 1);
    let length = random.below(40.min(doc.len() - from) + 1);
    from..from + length
}

fn cut(doc: &mut Vec<u8>, random: &mut Random) {
    let range = range(doc, random);
    doc.drain(range);
}

fn double(doc: &mut Vec<u8>, random: &mut Random) {
    let range = range(doc, random);
    let part = doc[range.clone()].to_vec();
    for _ in 0..1 + random.below(8) {
        doc.splice(range.end..range.end, part.iter().copied());
    }
}

fn word(random: &mut Random) -> &'static str {
    random.pick(WORDS).copied().unwrap_or("x")
}

fn insert_word(doc: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(doc.len() + 1);
    doc.splice(at..at, word(random).bytes());
}

// Words of letters and digits, where they stand.
fn words(doc: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut found = Vec::new();
    let mut start = None;
    for (i, b) in doc.iter().chain(b" ").enumerate() {
        match (b.is_ascii_alphanumeric() || *b == b'_', start) {
            (true, None) => start = Some(i),
            (false, Some(s)) => {
                found.push(s..i);
                start = None;
            }
            _ => {}
        }
    }
    found
}

// By a word of the list, or by another word of the document.
fn replace_word(doc: &mut Vec<u8>, random: &mut Random) {
    let all = words(doc);
    let (Some(one), Some(other)) = (random.pick(&all).cloned(), random.pick(&all).cloned()) else {
        return;
    };
    let new = match random.below(3) {
        0 => word(random).as_bytes().to_vec(),
        _ => doc[other].to_vec(),
    };
    doc.splice(one, new);
}

fn nest(doc: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(doc.len() + 1);
    let depth = 1 << random.below(12);
    let open = random
        .pick(&["[", "{a: ", "- ", "(", "not "])
        .copied()
        .unwrap_or("[");
    doc.splice(at..at, open.repeat(depth).bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_the_same_again_and_cases_differ() {
        let seeds = [b"a: b\nc: [d, e]\n".to_vec(), b"f: {g: h}\n".to_vec()];
        let mutator = Mutator::new(&seeds);
        let all: Vec<Vec<u8>> = (0..500).map(|i| mutator.case(3, i)).collect();
        assert!((0..500).all(|i| mutator.case(3, i as u64) == all[i]));
        let mut distinct = all.clone();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() > 400, "{}", distinct.len());
        assert!((0..4000).any(|i| mutator.case(3, i).len() > 1 << 20));
        // Nothing to start from is fine too.
        assert!((0..100).all(|i| Mutator::new(&[]).case(1, i).len() < 1 << 22));
    }
}
