//! Calibration and parity samples: where they come from, how they are cut, and which of them are fitted.
//!
//! Scales are fitted on the first three quarters and judged on the rest, so that parity is not a fit residual;
//! with fewer than four samples it is one, and says so. A scheme that measures nothing fits nothing: then all
//! samples are judged ([`Samples::all`]).
//!
//! Does not own: tokenizers (a closure here) and what a sample is run through.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

/// Original prose of several kinds; about 1700 tokens for a vocabulary of 50,000, more for any smaller one.
const BUILT_IN: &str = include_str!("samples.txt");

/// Tokens of one sample cut from a text.
pub const CHUNK: usize = 128;
/// Samples taken from the built-in text.
pub const BUILT_IN_SAMPLES: usize = 8;
/// Below this number nothing is held out.
const SPLIT_FROM: usize = 4;
/// Receipt word for the built-in text.
pub const BUILT_IN_SOURCE: &str = "built-in";

/// One input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Token ids, never empty.
    pub tokens: Vec<u32>,
    /// Where it comes from: `built-in#3`, `prompts.jsonl:7`.
    pub origin: String,
}

/// Samples in order. Which of them are fitted is a rule of their number; whether any is, the scheme's matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Samples {
    all: Vec<Sample>,
    source: String,
    notes: Vec<String>,
}

impl Samples {
    /// Samples from elsewhere.
    ///
    /// # Errors
    /// None of them, or an empty one.
    pub fn new(source: &str, all: Vec<Sample>) -> Result<Self, SampleError> {
        let empty = all
            .iter()
            .find(|s| s.tokens.is_empty())
            .map(|s| s.origin.as_str());
        if let Some(name) = empty.or(all.is_empty().then_some(source)) {
            return Err(SampleError::Empty {
                source_name: name.to_string(),
            });
        }
        Ok(Self {
            all,
            source: source.to_string(),
            notes: Vec::new(),
        })
    }

    /// Token ids of every sample. A scheme that measures nothing is judged on all of them.
    pub fn all(&self) -> impl Iterator<Item = &[u32]> {
        tokens(&self.all)
    }

    /// What scales are fitted on: the first three quarters, all below four samples.
    pub fn fitted(&self) -> impl Iterator<Item = &[u32]> {
        tokens(&self.all[..self.fitted_count()])
    }

    /// What is left; nothing below four samples.
    pub fn held_out(&self) -> impl Iterator<Item = &[u32]> {
        tokens(&self.all[self.fitted_count()..])
    }

    /// What parity is judged on after fitting: the held out ones, the fitted ones below four samples. Never empty.
    pub fn judged(&self) -> impl Iterator<Item = &[u32]> {
        let from = if self.fit_residual() {
            0
        } else {
            self.fitted_count()
        };
        tokens(&self.all[from..])
    }

    /// Nothing can be held out: parity after fitting is a fit residual.
    pub fn fit_residual(&self) -> bool {
        self.all.len() < SPLIT_FROM
    }

    /// `built-in`, or the file.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The samples with their origins.
    pub fn samples(&self) -> &[Sample] {
        &self.all
    }

    /// What a person should know about them.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    fn fitted_count(&self) -> usize {
        let n = self.all.len();
        if self.fit_residual() {
            n
        } else {
            n * 3 / 4
        }
    }
}

fn tokens(samples: &[Sample]) -> impl Iterator<Item = &[u32]> {
    samples.iter().map(|s| s.tokens.as_slice())
}

/// What to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleOptions {
    /// Keep only the first so many.
    pub max_samples: Option<usize>,
    /// Vocabulary size, to refuse token ids outside it.
    pub vocabulary: Option<u32>,
}

/// Text to token ids.
pub type Tokenize<'a> = dyn Fn(&str) -> Result<Vec<u32>, String> + 'a;

/// What is wrong with samples.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The file cannot be read.
    #[error("cannot read samples {}: {cause}", path.display())]
    Read {
        /// File.
        path: PathBuf,
        /// Why.
        cause: String,
    },
    /// An extension that says nothing.
    #[error(
        "samples {}: expected a .txt file (one text) or a .jsonl file (one JSON object a line)", path.display()
    )]
    Kind {
        /// File.
        path: PathBuf,
    },
    /// No sample in it.
    #[error("samples {source_name}: no sample in it; expected at least one")]
    Empty {
        /// File or `built-in`.
        source_name: String,
    },
    /// A line that is not a sample.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// File.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// The tokenizer failed on a text.
    #[error("cannot tokenize {origin}: {cause}")]
    Tokenize {
        /// Which text.
        origin: String,
        /// Why.
        cause: String,
    },
    /// A line that only another kind of model can use.
    #[error("{}:{line}: inputs from a tensor file are not supported for a model that reads tokens; give text or tokens", path.display())]
    Inputs {
        /// File.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
    },
    /// `--max-samples 0`.
    #[error("max samples is 0: expected at least 1")]
    MaxSamples,
}

impl SampleError {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Read { .. } => "samples_unreadable",
            Self::Empty { .. } | Self::MaxSamples => "no_samples",
            Self::Kind { .. } | Self::Line { .. } | Self::Tokenize { .. } => "samples_invalid",
            Self::Inputs { .. } => "samples_unsupported",
        }
    }
}

/// Samples of a file, or of the built-in text where there is none.
///
/// # Errors
/// A missing, unreadable or empty file, a line that is not a sample, a tokenizer that fails.
pub fn load(
    file: Option<&Path>,
    tokenize: &Tokenize<'_>,
    options: &SampleOptions,
) -> Result<Samples, SampleError> {
    if options.max_samples == Some(0) {
        return Err(SampleError::MaxSamples);
    }
    let mut notes = Vec::new();
    let (source, mut all) = match file {
        None => (BUILT_IN_SOURCE.to_string(), built_in(tokenize, &mut notes)?),
        Some(path) => {
            let source = path.display().to_string();
            let samples = match path.extension().and_then(|e| e.to_str()) {
                Some("txt") => text_file(path, tokenize, &mut notes)?,
                Some("jsonl") => json_lines(path, tokenize, options)?,
                _ => {
                    return Err(SampleError::Kind {
                        path: path.to_path_buf(),
                    })
                }
            };
            (source, samples)
        }
    };
    if let Some(max) = options.max_samples {
        all.truncate(max);
    }
    let samples = Samples::new(&source, all)?;
    if samples.fit_residual() {
        notes.push(format!(
            "only {} sample(s), nothing held out: parity after fitting is a fit residual ({SPLIT_FROM} are needed)",
            samples.all.len()
        ));
    }
    Ok(Samples { notes, ..samples })
}

fn built_in(tokenize: &Tokenize<'_>, note: &mut Vec<String>) -> Result<Vec<Sample>, SampleError> {
    let all = cut(BUILT_IN, BUILT_IN_SOURCE, tokenize, note)?;
    if all.len() <= BUILT_IN_SAMPLES {
        return Ok(all);
    }
    // Spread over the text: its pieces differ more than neighbours do.
    let n = all.len();
    Ok((0..BUILT_IN_SAMPLES)
        .map(|i| all[i * n / BUILT_IN_SAMPLES].clone())
        .collect())
}

fn text_file(
    path: &Path,
    tokenize: &Tokenize<'_>,
    note: &mut Vec<String>,
) -> Result<Vec<Sample>, SampleError> {
    cut(&read(path)?, &path.display().to_string(), tokenize, note)
}

/// Chunks of [`CHUNK`] tokens. A shorter rest is dropped and said, unless it is all there is.
fn cut(
    text: &str,
    name: &str,
    tokenize: &Tokenize<'_>,
    note: &mut Vec<String>,
) -> Result<Vec<Sample>, SampleError> {
    if text.trim().is_empty() {
        return Err(SampleError::Empty {
            source_name: name.to_string(),
        });
    }
    let tokens = tokenize(text).map_err(|cause| SampleError::Tokenize {
        origin: name.to_string(),
        cause,
    })?;
    let whole = tokens.len() / CHUNK;
    let rest = tokens.len() % CHUNK;
    if whole > 0 && rest > 0 {
        note.push(format!(
            "{name}: the last {rest} tokens do not fill a sample of {CHUNK}; left out"
        ));
    }
    let used = if whole > 0 { whole * CHUNK } else { rest };
    let sample = |(i, chunk): (usize, &[u32])| Sample {
        tokens: chunk.to_vec(),
        origin: format!("{name}#{i}"),
    };
    Ok(tokens[..used]
        .chunks(CHUNK)
        .enumerate()
        .map(sample)
        .collect())
}

/// A JSONL line: exactly one of the three.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    text: Option<String>,
    tokens: Option<Vec<u32>>,
    inputs: Option<String>,
}

fn json_lines(
    path: &Path,
    tokenize: &Tokenize<'_>,
    options: &SampleOptions,
) -> Result<Vec<Sample>, SampleError> {
    let mut samples = Vec::new();
    for (i, text) in read(path)?.lines().enumerate() {
        if text.trim().is_empty() {
            continue;
        }
        let line = i + 1;
        let wrong = |problem: String| SampleError::Line {
            path: path.to_path_buf(),
            line,
            problem,
        };
        let parsed: Line = serde_json::from_str(text).map_err(|e| {
            wrong(format!(
                "expected an object with text, tokens or inputs; {e}"
            ))
        })?;
        let origin = format!("{}:{line}", path.display());
        let tokens = match parsed {
            Line {
                text: Some(text),
                tokens: None,
                inputs: None,
            } => tokenize(&text).map_err(|cause| SampleError::Tokenize {
                origin: origin.clone(),
                cause,
            })?,
            Line {
                text: None,
                tokens: Some(tokens),
                inputs: None,
            } => tokens,
            Line {
                text: None,
                tokens: None,
                inputs: Some(_),
            } => {
                return Err(SampleError::Inputs {
                    path: path.to_path_buf(),
                    line,
                });
            }
            _ => return Err(wrong("expected exactly one of text, tokens, inputs".into())),
        };
        if tokens.is_empty() {
            return Err(wrong("an empty sample: expected at least one token".into()));
        }
        let outside = options
            .vocabulary
            .and_then(|v| tokens.iter().find(|t| **t >= v));
        if let (Some(token), Some(size)) = (outside, options.vocabulary) {
            return Err(wrong(format!(
                "token {token} is outside the vocabulary of {size}"
            )));
        }
        samples.push(Sample { tokens, origin });
    }
    Ok(samples)
}

fn read(path: &Path) -> Result<String, SampleError> {
    let failed = |cause: String| SampleError::Read {
        path: path.to_path_buf(),
        cause,
    };
    let bytes = std::fs::read(path).map_err(|e| failed(e.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        failed(format!(
            "not UTF-8 text (byte {})",
            e.utf8_error().valid_up_to()
        ))
    })?;
    Ok(text
        .strip_prefix('\u{feff}')
        .map(String::from)
        .unwrap_or(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Result<Vec<u32>, String> {
        Ok(text.bytes().map(u32::from).collect())
    }

    /// One token a word with its space: coarser than any subword vocabulary.
    fn words(text: &str) -> Result<Vec<u32>, String> {
        Ok(text.split_whitespace().map(|w| w.len() as u32).collect())
    }

    fn plain() -> SampleOptions {
        SampleOptions::default()
    }

    fn file(name: &str, content: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        (dir, path)
    }

    fn jsonl(content: &str, options: &SampleOptions) -> Result<Samples, SampleError> {
        let (_dir, path) = file("s.jsonl", content);
        load(Some(&path), &bytes, options)
    }

    #[test]
    fn the_built_in_text_gives_eight_samples_with_any_tokenizer() {
        for tokenize in [&bytes as &Tokenize<'_>, &words] {
            let samples = load(None, tokenize, &plain()).unwrap();
            assert_eq!(
                (samples.fitted().count(), samples.held_out().count()),
                (6, 2)
            );
            assert_eq!(samples.source(), "built-in");
            assert!(!samples.fit_residual());
            assert!(samples.all().all(|s| s.len() == CHUNK));
            let distinct: std::collections::HashSet<_> = samples.all().collect();
            assert_eq!(distinct.len(), 8);
        }
    }

    #[test]
    fn three_quarters_are_fitted_and_few_samples_are_a_fit_residual() {
        for (n, fitted) in [
            (1, 1),
            (3, 3),
            (4, 3),
            (5, 3),
            (6, 4),
            (7, 5),
            (8, 6),
            (9, 6),
        ] {
            let text: String = (0..n).map(|i| format!("{{\"tokens\": [{i}]}}\n")).collect();
            let samples = jsonl(&text, &plain()).unwrap();
            let few = n < 4;
            assert_eq!(samples.all().count(), n);
            assert_eq!(samples.fitted().count(), fitted, "{n}");
            assert_eq!(samples.held_out().count(), n - fitted, "{n}");
            assert_eq!(
                samples.judged().count(),
                if few { n } else { n - fitted },
                "{n}"
            );
            assert_eq!(samples.fit_residual(), few, "{n}");
            assert_eq!(samples.notes().is_empty(), !few, "{n}");
            assert_eq!(samples.fitted().next(), samples.all().next());
            assert_eq!(samples.judged().last(), samples.all().last());
        }
    }

    #[test]
    fn b_052_max_samples_keeps_the_first() {
        let options = SampleOptions {
            max_samples: Some(2),
            ..plain()
        };
        let samples = jsonl(
            "{\"tokens\":[7]}\n\n{\"tokens\":[8]}\n{\"tokens\":[9]}",
            &options,
        );
        let samples = samples.unwrap();
        assert_eq!(samples.samples().len(), 2);
        assert_eq!(samples.samples()[1].tokens, [8]);
        assert!(samples.samples()[1].origin.ends_with("s.jsonl:3"));
        let zero = SampleOptions {
            max_samples: Some(0),
            ..options
        };
        assert_eq!(load(None, &bytes, &zero).unwrap_err().code(), "no_samples");
    }

    #[test]
    fn a_text_is_cut_into_chunks_and_the_rest_is_said() {
        let (_dir, path) = file("t.txt", &"x".repeat(300));
        let samples = load(Some(&path), &bytes, &plain()).unwrap();
        assert_eq!(samples.all().count(), 2);
        assert!(
            samples.notes()[0].contains("last 44 tokens"),
            "{:?}",
            samples.notes()
        );
        let (_dir, path) = file("short.txt", "hello");
        let samples = load(Some(&path), &bytes, &plain()).unwrap();
        assert_eq!(samples.samples()[0].tokens.len(), 5);
        assert!(Samples::new("x", vec![]).is_err());
        let empty = Sample {
            tokens: vec![],
            origin: "x#0".into(),
        };
        assert!(Samples::new("x", vec![empty])
            .unwrap_err()
            .to_string()
            .contains("x#0"));
    }

    #[test]
    fn bad_lines_are_named_by_file_and_line() {
        let options = SampleOptions {
            vocabulary: Some(256),
            ..plain()
        };
        for (second, code, fact) in [
            ("{", "samples_invalid", "expected an object"),
            ("[1]", "samples_invalid", "expected an object"),
            ("{}", "samples_invalid", "exactly one"),
            (
                "{\"text\":\"a\",\"tokens\":[1]}",
                "samples_invalid",
                "exactly one",
            ),
            ("{\"prompt\":\"a\"}", "samples_invalid", "prompt"),
            ("{\"tokens\":[-1]}", "samples_invalid", "-1"),
            ("{\"tokens\":[]}", "samples_invalid", "empty sample"),
            ("{\"text\":\"\"}", "samples_invalid", "empty sample"),
            ("{\"tokens\":[256]}", "samples_invalid", "vocabulary of 256"),
            (
                "{\"inputs\":\"a.safetensors\"}",
                "samples_unsupported",
                "not supported",
            ),
        ] {
            let error = jsonl(&format!("{{\"text\":\"fine\"}}\n{second}\n"), &options).unwrap_err();
            assert_eq!(error.code(), code, "{second}");
            let text = error.to_string();
            assert!(text.contains("s.jsonl:2") && text.contains(fact), "{text}");
        }
    }

    #[test]
    fn missing_empty_and_foreign_files_are_refused() {
        let gone = load(Some(Path::new("/nowhere/s.txt")), &bytes, &plain()).unwrap_err();
        assert_eq!(gone.code(), "samples_unreadable");
        assert!(gone.to_string().contains("/nowhere/s.txt"));
        for (name, content, code) in [
            ("e.txt", " \n ", "no_samples"),
            ("e.jsonl", "\n\n", "no_samples"),
            ("e.csv", "a,b", "samples_invalid"),
        ] {
            let (_dir, path) = file(name, content);
            assert_eq!(
                load(Some(&path), &bytes, &plain()).unwrap_err().code(),
                code,
                "{name}"
            );
        }
        let (_dir, path) = file("b.txt", "");
        std::fs::write(&path, [b'a', 0xff]).unwrap();
        let error = load(Some(&path), &bytes, &plain()).unwrap_err().to_string();
        assert!(error.contains("byte 1"), "{error}");
    }

    #[test]
    fn a_failing_tokenizer_is_told_with_the_text() {
        let error = load(None, &|_| Err("no vocabulary".into()), &plain()).unwrap_err();
        assert!(
            error.to_string().contains("built-in: no vocabulary"),
            "{error}"
        );
    }
}
