//! How much longer a text may become while a `tokenizer.json` rewrites it.
//!
//! Each step of a normalizer or decoder multiplies the length by a factor that its description shows; a chain of steps
//! multiplies the factors. A file with a chain beyond [`MAX_GROWTH`] is refused before any text meets it. What a step
//! does to a text is the library's.

use serde_json::Value as Json;

/// Bytes that one byte of text may become: published chains stay below 100.
const MAX_GROWTH: usize = 1_000;
/// What the Unicode forms and tables made from them do at most.
const UNICODE: usize = 12;

/// Refuses a normalizer or decoder whose steps together grow a text beyond the limit.
pub(super) fn check(item: &str, part: &Json) -> Result<(), String> {
    let mut growth = 1usize;
    let mut steps = vec![part];
    while let Some(step) = steps.pop() {
        for list in ["normalizers", "decoders"] {
            steps.extend(
                step.get(list)
                    .and_then(Json::as_array)
                    .into_iter()
                    .flatten(),
            );
        }
        growth = growth.saturating_mul(factor(step));
    }
    match growth > MAX_GROWTH {
        true => Err(format!(
            "{item}: expected steps that make a text at most {MAX_GROWTH} times as long, found a factor of {growth}"
        )),
        false => Ok(()),
    }
}

/// Bytes a step makes of one byte at most.
fn factor(step: &Json) -> usize {
    let length = |key: &str| step.get(key).and_then(Json::as_str).map_or(0, str::len);
    match step.get("type").and_then(Json::as_str).unwrap_or_default() {
        "Replace" => replaced(shortest(&step["pattern"]), length("content")),
        // Once for every piece between two added tokens.
        "Prepend" => length("prepend").saturating_add(1),
        "ByteLevel" => 2,
        "Precompiled" | "NFKC" | "NFKD" => UNICODE,
        // An empty suffix stands between all characters.
        "BPEDecoder" if length("suffix") == 0 => 2,
        _ => 1,
    }
}

/// A match of at least `from` bytes becomes `to` bytes; an empty one stands before every byte.
fn replaced(from: usize, to: usize) -> usize {
    match from {
        0 => to.saturating_add(1),
        n => to.div_ceil(n).max(1),
    }
}

/// Bytes of the shortest match; 0 where the pattern does not say.
fn shortest(pattern: &Json) -> usize {
    if let Some(text) = pattern.get("String").and_then(Json::as_str) {
        return text.len();
    }
    let regex = pattern.get("Regex").and_then(Json::as_str);
    regex
        .and_then(|r| regex_syntax::parse(r).ok())
        .and_then(|hir| hir.properties().minimum_len())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn replace(pattern: Json, content: &str) -> Json {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn chains_are_bounded_and_published_ones_pass() {
        let dots = replace(json!({"String": "."}), &".".repeat(20));
        let empties = replace(json!({"Regex": "x*"}), "y");
        for (steps, ok) in [
            (vec![dots.clone(); 2], true),
            (vec![dots.clone(); 8], false),
            (vec![empties.clone(); 9], true),
            (vec![empties; 40], false),
            (vec![json!({"type": "ByteLevel"}); 40], false),
            (vec![replace(json!({"Regex": "\\s+"}), " "); 40], true),
        ] {
            let chain = json!({"type": "Sequence", "normalizers": steps});
            let nested = json!({"type": "Sequence", "normalizers": [chain]});
            assert_eq!(check("normalizer", &nested).is_ok(), ok, "{nested}");
        }
        let decoder = json!({"type": "Sequence", "decoders": vec![dots; 8]});
        let why = check("decoder", &decoder).unwrap_err();
        assert!(why.starts_with("decoder: expected"), "{why}");
        let published = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Precompiled"},
            replace(json!({"String": " "}), "\u{2581}"),
        ]});
        check("normalizer", &published).unwrap();
        check("normalizer", &Json::Null).unwrap();
    }
}
