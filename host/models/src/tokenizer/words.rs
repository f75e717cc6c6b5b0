//! WordPiece: a text cut into words, and each word greedily into the longest tokens it starts with.
//!
//! In a GGUF the tokens that begin a word carry U+2581 in front, those that go on have nothing.

use std::collections::HashMap;
use std::sync::OnceLock;

use regex::Regex;
use tokenizers::NormalizedString;

/// Written before a word.
pub(super) const START: char = '\u{2581}';

/// What is done to a text first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) lowercase: bool,
    pub(super) strip_accents: bool,
}

/// Token ids of a text; a word that is not made of tokens is `unknown`.
pub(super) fn cut(
    text: &str,
    rules: Rules,
    ids: &HashMap<String, u32>,
    longest: usize,
    unknown: Option<u32>,
) -> Vec<u32> {
    let mut out = Vec::new();
    for word in words(text, rules) {
        let word = format!("{START}{word}");
        match pieces(&word, ids, longest) {
            Some(found) => out.extend(found),
            None => out.extend(unknown),
        }
    }
    out
}

fn pieces(word: &str, ids: &HashMap<String, u32>, longest: usize) -> Option<Vec<u32>> {
    let mut found = Vec::new();
    let mut rest = word;
    while !rest.is_empty() {
        let ends = rest.char_indices().map(|(i, c)| i + c.len_utf8());
        let fits: Vec<usize> = ends.take_while(|end| *end <= longest).collect();
        let longest = fits
            .into_iter()
            .rev()
            .find_map(|end| Some((end, *ids.get(&rest[..end])?)));
        let (end, id) = longest?;
        found.push(id);
        rest = &rest[end..];
    }
    Some(found)
}

/// Words without spaces; a sign and an ideograph is a word of its own.
fn words(text: &str, rules: Rules) -> Vec<String> {
    let text = match rules.strip_accents {
        true => decomposed(text),
        false => text.to_string(),
    };
    let mut words = Vec::new();
    let mut open = String::new();
    for c in text.chars() {
        if c.is_whitespace() {
            words.extend((!open.is_empty()).then(|| std::mem::take(&mut open)));
            continue;
        }
        if c == '\0' || c == '\u{fffd}' || is(c, Class::Control) {
            continue;
        }
        if rules.strip_accents && is(c, Class::Mark) {
            continue;
        }
        let c = match rules.lowercase {
            true => lower(c),
            false => c,
        };
        if alone(c) {
            words.extend((!open.is_empty()).then(|| std::mem::take(&mut open)));
            words.push(c.into());
        } else {
            open.push(c);
        }
    }
    words.extend((!open.is_empty()).then_some(open));
    words
}

/// Each character as the first one of its decomposition, which is all that readers of the format keep of it: a letter
/// without its accents, and of a Hangul syllable its first consonant.
fn decomposed(text: &str) -> String {
    let first = |c: char| {
        if c.is_ascii() {
            return c;
        }
        let mut one = NormalizedString::from(c.to_string());
        one.nfd();
        one.get().chars().next().unwrap_or(c)
    };
    text.chars().map(first).collect()
}

/// One character for one; what has no such lower case stays.
fn lower(c: char) -> char {
    let mut lower = c.to_lowercase();
    match (lower.next(), lower.next()) {
        (Some(one), None) => one,
        _ => c,
    }
}

fn alone(c: char) -> bool {
    c.is_ascii_punctuation() || (!c.is_ascii() && is(c, Class::Sign)) || ideograph(c)
}

fn ideograph(c: char) -> bool {
    matches!(u32::from(c),
        0x4e00..=0x9fff
        | 0x3400..=0x4dbf
        | 0x20000..=0x2a6df
        | 0x2a700..=0x2b73f
        | 0x2b740..=0x2b81f
        // Published readers begin this block late, and so do the vocabularies made with them.
        | 0x2b920..=0x2ceaf
        | 0xf900..=0xfaff
        | 0x2f800..=0x2fa1f)
}

#[derive(Clone, Copy)]
enum Class {
    Control,
    Mark,
    Sign,
}

fn is(c: char, class: Class) -> bool {
    static SETS: OnceLock<Option<[Regex; 3]>> = OnceLock::new();
    let sets = SETS.get_or_init(|| {
        let set = |pattern: &str| Regex::new(pattern).ok();
        Some([
            set(r"^[\p{Cc}\p{Cf}\p{Co}]$")?,
            set(r"^\p{M}$")?,
            set(r"^\p{P}$")?,
        ])
    });
    let mut one = [0; 4];
    let text = c.encode_utf8(&mut one);
    sets.as_ref()
        .is_some_and(|sets| sets[class as usize].is_match(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Rules = Rules {
        lowercase: true,
        strip_accents: true,
    };

    #[test]
    fn words_are_cleaned_and_signs_stand_alone() {
        let got = words("  \u{c9}t\u{e9}, d'Or\u{200d}x\u{4e2d}\u{6587}$1\t", PLAIN);
        let want = [
            "ete", ",", "d", "'", "orx", "\u{4e2d}", "\u{6587}", "$", "1",
        ];
        assert_eq!(got, want);
        assert_eq!(words("\u{e9}\u{d55c}\u{e0}", PLAIN), ["e\u{1112}a"]);
        let as_it_is = Rules {
            lowercase: false,
            strip_accents: false,
        };
        assert_eq!(words("\u{c9}a", as_it_is), ["\u{c9}a"]);
    }

    #[test]
    fn the_longest_token_wins_and_a_word_with_a_gap_is_unknown() {
        let tokens = ["[UNK]", "\u{2581}un", "\u{2581}unda", "able", "d", "a"];
        let ids = tokens.iter().zip(0u32..);
        let ids: HashMap<String, u32> = ids.map(|(t, i)| ((*t).into(), i)).collect();
        let cut = |text: &str| super::cut(text, PLAIN, &ids, 7, Some(0));
        assert_eq!(cut("Unable undad unx"), [1, 3, 2, 4, 0]);
    }
}
