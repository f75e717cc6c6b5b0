//! How a command ends when it does not succeed: exit code, code, message, help.

use std::fmt;

use serde_json::{Map, Value as Json};
use structures::Error;
use structures_bindings::BindingError;
use structures_graph::GraphError;
use structures_models::ModelError;

/// A command's failure.
#[derive(Debug)]
pub struct Failure {
    /// 1 it failed, 2 wrong usage, 3 refused.
    pub exit: u8,
    /// Stable code.
    pub code: String,
    /// What was wrong, expected and found.
    pub message: String,
    /// What to do.
    pub help: String,
    /// More members of the JSON document, such as the rule a file breaks.
    pub more: Map<String, Json>,
}

impl Failure {
    /// Wrong usage.
    pub fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Failure {
            exit: 2,
            code: "usage".into(),
            message: message.into(),
            help: help.into(),
            more: Map::new(),
        }
    }

    /// clap's error: everything it says up to the usage line, which is the help.
    pub fn of_clap(e: &clap::Error) -> Self {
        use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand as NoCommand;
        let text = e.to_string();
        let (mut message, mut help) = (Vec::new(), None);
        for line in text.lines() {
            if line.starts_with("Usage:") {
                help = Some(line.trim_end());
                break;
            }
            if line.starts_with("For more information") {
                break;
            }
            message.push(line.trim_end());
        }
        let message = message.join("\n");
        let message = match e.kind() {
            // clap prints its whole help instead of a message.
            NoCommand => "a command is missing: expected one of those that --help lists",
            _ => message.trim().trim_start_matches("error: "),
        };
        Failure::usage(
            message,
            help.unwrap_or("`structures --help` lists everything"),
        )
    }

    /// As it may be shown: what others wrote steers no terminal.
    pub fn printable(mut self) -> Self {
        for text in [&mut self.code, &mut self.message, &mut self.help] {
            *text = crate::say::lines(text);
        }
        self
    }

    /// The JSON document of the contract.
    pub fn document(&self) -> Json {
        let mut error = Map::new();
        for (key, text) in [
            ("code", &self.code),
            ("message", &self.message),
            ("help", &self.help),
        ] {
            error.insert(key.into(), Json::from(text.as_str()));
        }
        error.extend(self.more.clone());
        serde_json::json!({"schema": 1, "error": error})
    }

    /// It failed.
    pub fn failed(code: &str, message: impl Into<String>, help: impl Into<String>) -> Self {
        Failure {
            exit: 1,
            code: code.into(),
            message: message.into(),
            help: help.into(),
            more: Map::new(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl miette::Diagnostic for Failure {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(&self.code))
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        (!self.help.is_empty()).then(|| Box::new(&self.help) as Box<dyn fmt::Display>)
    }
}

/// Codes of arguments that make no sense: usage, not failure.
const USAGE: &[&str] = &[
    "scheme_unknown",
    "percentile_range",
    "floor_invalid",
    "unknown_metric",
    "unmeasured_metric",
    "timing_invalid",
    "plugin_unknown",
    "pin_unknown",
    "pin_invalid",
    "empty_prompt",
    "plugins_unreadable",
    "decision_invalid",
    "format_unknown",
    "nothing_to_adopt",
];

/// Codes whose answer is no.
const REFUSED: &[&str] = &[
    "entry_unknown",
    "entry_retired",
    "binding_unknown",
    "no_standalone_reference",
    "statistic_unmeasurable",
    "scheme_unsupported",
    "winner_undeclared",
];

/// Code -> what to do, beside what the message says itself.
const HELP: &[(&str, &str)] = &[
    ("scheme_unknown", "choose one of the registered schemes, or leave --scheme out for `auto`"),
    ("scheme_unsupported", "choose another scheme; the message says what this host does not do"),
    ("scheme_invalid", "this is a fault of the scheme, not of the model: choose another one"),
    ("percentile_range", "give a percentile between 0 and 100; 99.9 is the default"),
    ("floor_invalid", "write --floor METRIC=NUMBER, for example --floor top1_agreement=0.9"),
    ("unmeasured_metric", "floors name metrics of this output: top1_agreement, last_position_cosine, kl_per_token, max_abs for distributions; cosine, max_abs, p99_abs, relative_l2 for values"),
    ("unknown_metric", "floors name metrics: top1_agreement, last_position_cosine, kl_per_token, max_abs, cosine, p99_abs, relative_l2"),
    ("timing_invalid", "give --rounds and --iters of at least 1; 7 and 10 are the defaults"),
    ("no_samples", "give --samples FILE with at least one sample, or leave it out for the built-in text"),
    ("samples_unreadable", "check the path; samples are UTF-8 text"),
    ("samples_invalid", "a .txt file, or a .jsonl file with `text` or `tokens` in every line, none longer than the model's context"),
    ("samples_unsupported", "this model reads tokens: give `text` or `tokens`"),
    ("samples_misaligned", "every sample must reach the same points; leave out those that do not"),
    ("entry_unknown", "`structures catalog list` shows what there is"),
    ("entry_retired", "the message says what replaces it; `structures catalog list` shows what there is"),
    ("pin_invalid", "write NAME or NAME@VERSION"),
    ("entry_name_mismatch", "a directory and the `name` of the entry in it are the same word: rename one"),
    ("key_forbidden", "take the key out: what runs where is a plugin's form, never an entry"),
    ("no_standalone_reference", "compare with the unmodified eager host under the same windows"),
    ("entry_invalid", "correct the document at the place the message names, or leave its --catalog directory out"),
    ("entry_unreadable", "check the path of --catalog"),
    ("statistic_unmeasurable", "another scheme measures it, or another form does without it"),
    ("plugin_unknown", "`structures plugins list` shows what was found and why something was refused"),
    ("pin_unknown", "`structures plugins show ID` lists the forms of a plugin, `structures devices` the devices"),
    ("plugins_unreadable", "give directories that exist and that you may read, or leave them out"),
    ("cache_unwritable", "set STRUCTURES_CACHE_DIR to a directory you may write to; libraries are opened from private copies in it"),
    ("lock_invalid", "correct or remove the file, or write it again with `structures plugins lock`"),
    ("trusted_keys", "keys are ed25519 public keys in PEM, in *.pub files that only you can write"),
    ("pool_running", "the number of threads is set once a process: give it before anything runs"),
    ("winner_undeclared", "`structures plugins show ID` lists the forms of a plugin; `host` is a winner too"),
    ("decision_invalid", "write the winner as PLUGIN:FORM or `host`, and rows from 1"),
    ("decisions_invalid", "give a file that `structures decisions` wrote; the message says what is not one of its decisions"),
    ("decisions_nowhere", "give --decisions FILE, or set XDG_DATA_HOME or HOME"),
    ("env_drift", "leave --strict out to accept a receipt that was made under other conditions, or attach again"),
    ("seat_unavailable", "nothing of the receipt differs: mend what the reason names (a driver, a device, free memory) and try again; without --receipt the host runs alone"),
    ("receipt_mismatch", "attach again to write a receipt for what is here now"),
    ("record_tampered", "use the receipt as attach wrote it, or attach again"),
    ("record_invalid", "give the file that attach wrote, as it wrote it; a record that attach itself cannot write is a fault of the program: report it"),
    ("strict_fallback", "without --strict (or --on-guard-fail raise) the host serves such calls and the ledger counts them"),
    ("control_differs", "run on an idle machine with the same --threads; a host that is not repeatable cannot be a baseline"),
    ("empty_prompt", "give --prompt with at least one character"),
    ("not_a_decoder", "leave the decode loop out: run the graph with a session"),
    ("capture_guard", "the seat that is named failed in a captured step; --eager falls back there and counts it"),
    ("capture_shape_moved", "--eager runs what has no captured form"),
    ("context_full", "shorten the prompt or give a smaller --max-new-tokens"),
    ("token_range", "use the tokenizer that belongs to the model"),
    ("io", "check the path, its permissions and the free space"),
    ("malformed", "correct the file or get it again"),
    ("unsupported", "use another checkpoint, or convert this one"),
    ("codec_missing", "get the model in a format with a codec here (the message lists them), or in bf16"),
    ("format_unknown", "--adopt alone takes every format over; --adopt=q8_0,q4_k only those"),
    ("nothing_to_adopt", "leave --adopt out; `structures discover MODEL` shows what a model stores, `plugins show ID` what a form takes"),
    ("adopted_no_detach", "open the model again without adopting"),
    ("released_for_good", "open the model again: what was released for good does not come back"),
    ("tensor", "configuration and weights must belong together: get both again"),
    ("non_finite", "the weights are damaged or diverged: get the checkpoint again"),
    ("tokenizer", "a model directory needs its tokenizer.json"),
    ("binding_invalid", "correct the binding file where the message points; docs/bindings.md has a row for each rule"),
    ("binding_unknown", "`structures bindings list` shows what there is"),
    ("binding_unreadable", "check the path of --bindings; binding files are *.yaml"),
];

/// What to do about a code.
pub fn help_of(code: &str) -> &'static str {
    let line = HELP.iter().find(|(c, _)| *c == code);
    line.map_or(HELP_OF_THE_REST, |(_, h)| h)
}

/// Where a code has no line above.
const HELP_OF_THE_REST: &str =
    "docs/codes.md explains every code; STRUCTURES_LOG=debug shows what led to it";

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        let code = e.code();
        let exit = if e.is_refusal() || REFUSED.contains(&code.as_str()) {
            3
        } else if USAGE.contains(&code.as_str()) {
            2
        } else {
            1
        };
        Failure {
            exit,
            message: message(&e, &code),
            help: help_of(&code).into(),
            more: match &e {
                Error::Binding(e) => rule(e),
                _ => Map::new(),
            },
            code,
        }
    }
}

/// The rule a binding breaks, and where.
pub fn rule(e: &BindingError) -> Map<String, Json> {
    let mut more = Map::new();
    if let (Some(rule), Some(at)) = (e.rule(), e.place()) {
        more.insert("sub_code".into(), Json::from(rule.sub_code()));
        more.insert("kind".into(), Json::from(rule.kind()));
        more.insert("file".into(), Json::from(at.file.as_str()));
        more.insert("line".into(), Json::from(at.line));
        more.insert("column".into(), Json::from(at.column));
    }
    more
}

/// The error's own words; for a seat in strict mode, which seat and which part of its contract.
fn message(e: &Error, code: &str) -> String {
    match e {
        Error::Graph(GraphError::Span { name, reason })
        | Error::Model(ModelError::Graph(GraphError::Span { name, reason }))
            if code == "strict_fallback" =>
        {
            format!("strict: seat `{name}` did not serve a call of its span: {reason}")
        }
        _ => e.to_string(),
    }
}

macro_rules! through_error {
    ($($t:ty),* $(,)?) => {
        $(impl From<$t> for Failure {
            fn from(e: $t) -> Self {
                Error::from(e).into()
            }
        })*
    };
}

through_error!(
    structures_catalog::CatalogError,
    structures_bindings::BindingError,
    structures_models::ModelError,
    structures_graph::GraphError,
    structures_loader::LoaderError,
    structures::gates::GateError,
    structures::samples::SampleError,
    structures::fsio::WriteError,
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_with_an_exit_of_its_own_says_what_to_do() {
        for code in USAGE.iter().chain(REFUSED) {
            assert!(
                HELP.iter().any(|(c, h)| c == code && !h.is_empty()),
                "{code}"
            );
        }
        let mut codes: Vec<&str> = HELP.iter().map(|(c, _)| *c).collect();
        codes.sort_unstable();
        let all = codes.len();
        codes.dedup();
        assert_eq!(codes.len(), all, "one line a code");
    }

    #[test]
    fn a_strict_seat_is_named_with_its_contract() {
        let span = || GraphError::Span {
            name: "a.b".into(),
            reason: "rt_width: expected 4, found 5".into(),
        };
        for e in [Error::from(span()), Error::from(ModelError::from(span()))] {
            let f = Failure::from(e);
            assert_eq!((f.exit, f.code.as_str()), (1, "strict_fallback"));
            for fact in ["`a.b`", "rt_width: expected 4, found 5"] {
                assert!(f.message.contains(fact), "{}", f.message);
            }
            assert!(f.help.contains("--strict"), "{}", f.help);
        }
    }

    #[test]
    fn a_code_without_a_line_still_has_help() {
        let f = Failure::from(Error::invalid("something_new", "x"));
        assert_eq!((f.exit, f.help.as_str()), (1, HELP_OF_THE_REST));
    }
}
