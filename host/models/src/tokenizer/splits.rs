//! How a byte-level vocabulary's text is cut into words before anything is merged, by the name that a GGUF gives.
//!
//! The file has only the name; what it means is common knowledge of the format's readers, kept here as data. An
//! unknown name is refused: cutting a text in another way gives other tokens and a worse model, silently.

/// How a named pre-tokenizer splits.
pub(super) struct Pre {
    pub(super) names: &'static [&'static str],
    /// Applied in order, each on the pieces of the one before.
    pub(super) splits: &'static [&'static str],
    /// A piece that is a token stays one, whatever the merges say.
    pub(super) whole_words: bool,
    /// Whether texts begin with the first token when the file does not say.
    pub(super) add_bos: bool,
}

/// Contractions, words, numbers, signs, each with at most one space before it.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Signs that stand for themselves.
const SIGNS: &str = r"[\p{P}\$\+<=>\^~\|]+";
const DIGIT: &str = r"\p{N}";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";
/// Ideographs and kana.
const EASTERN: &str = "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+";

/// The contractions of both cases, then the rest of a newer split.
macro_rules! contracted {
    ($rest:literal) => {
        concat!(
            r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|",
            $rest
        )
    };
}

/// Newer splits: numbers of up to three digits, of one, and what is between.
const UP_TO_3: &str = contracted!(
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const ONE: &str = contracted!(
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const ANY: &str = contracted!(
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Marks count as letters.
const ONE_WITH_MARKS: &str = contracted!(
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// A sign holds a word of ASCII letters behind it.
const SIGN_AND_WORD: &str = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/// Words end where lower case goes over to upper case.
const CASES: &str = r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const CASES_AND_CONTRACTIONS: &str = r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with marks among the letters.
const CASES_WITH_MARKS: &str = r"[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]&&[^a-z]]*[[\p{L}\p{M}]&&[^A-Z]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]&&[^a-z]]+[[\p{L}\p{M}]&&[^A-Z]]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Runs of spaces in powers of two.
const SPACES_BY_TWO: &str = contracted!(
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
);
/// Numbers in threes, counted from their end.
const THREES: &str = r"[0-9]{1,3}(?=(?:[0-9]{3})*(?![0-9]))";
/// Everything up to a space or a sign that ends a sentence.
const CLAUSES: &str = " ?[^(\\s|.,!?\u{2026}\u{3002}\u{ff0c}\u{3001}\u{964}\u{6d4}\u{60c})]+";
/// Letters of the alphabets with two cases, range by range.
const CASED: &str = "\\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}]+";
const WIDE_SIGNS: &str =
    "\\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+";
const IDEOGRAPHS: &str = "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+";

const fn pre(names: &'static [&'static str], splits: &'static [&'static str]) -> Pre {
    Pre {
        names,
        splits,
        whole_words: false,
        add_bos: false,
    }
}

const fn whole(
    names: &'static [&'static str],
    splits: &'static [&'static str],
    add_bos: bool,
) -> Pre {
    Pre {
        names,
        splits,
        whole_words: true,
        add_bos,
    }
}

/// Every name this version knows. Left out, and so refused: what readers cut by code of their own (`kimi-k2`, `afmoe`),
/// by classes their patterns do not know (`youtu`, `tiny_aya`), or without the byte level (`gemma4`, `sarvam-moe`,
/// `granite-embed-multi-311m`).
pub(super) const PRE: &[Pre] = &[
    pre(&["default"], &[SIGNS, WORDS, r"\p{N}+", THREE_DIGITS]),
    pre(
        &[
            "gpt-2",
            "gpt2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "mpt",
            "olmo",
            "jais",
            "exaone4",
            "trillion",
            "granite-docling",
        ],
        &[WORDS],
    ),
    pre(
        &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        &[DIGIT, WORDS],
    ),
    whole(
        &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        &[UP_TO_3],
        true,
    ),
    pre(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[UP_TO_3]),
    whole(&["glm4", "glm5"], &[UP_TO_3], false),
    pre(
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        &[ONE],
    ),
    pre(&["qwen35"], &[ONE_WITH_MARKS]),
    pre(
        &["ufakzeka"],
        &[r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    ),
    pre(&["jais-2"], &[SPACES_BY_TWO]),
    pre(&["superbpe"], &[r"\p{N}+", THREES]),
    whole(&["granite-embed-multi-97m"], &[CASES_WITH_MARKS], false),
    whole(&["minicpm5"], &[r"\p{N}{1,3}", ANY], false),
    pre(
        &["deepseek-llm"],
        &["[\r\n]", CASED, WIDE_SIGNS, r"\s+$", IDEOGRAPHS, r"\p{N}+"],
    ),
    pre(
        &["deepseek-coder"],
        &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, DIGIT],
    ),
    pre(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[r"\p{N}{1,3}", EASTERN, SIGN_AND_WORD],
    ),
    pre(
        &["falcon"],
        &[r"[\p{P}\$\+<=>\^~\|`]+", WORDS, THREE_DIGITS],
    ),
    whole(&["tekken"], &[CASES], true),
    pre(
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        &[CASES_AND_CONTRACTIONS],
    ),
    pre(&["poro-chat", "bloom", "gpt3-finnish"], &[CLAUSES]),
    pre(&["viking"], &[CLAUSES, DIGIT]),
    pre(
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        &[
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
    ),
    pre(
        &["seed-coder"],
        &[contracted!(
            r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
    ),
    pre(
        &["exaone-moe"],
        &[contracted!(
            r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::SplitDelimiterBehavior;

    #[test]
    fn every_name_is_there_once_and_every_pattern_compiles() {
        let mut seen = std::collections::HashSet::new();
        for pre in PRE {
            for name in pre.names {
                assert!(seen.insert(name), "{name} twice");
            }
            for split in pre.splits {
                let pattern = SplitPattern::Regex((*split).into());
                let made = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
                assert!(made.is_ok(), "{:?}: {split}", pre.names);
            }
        }
    }
}
