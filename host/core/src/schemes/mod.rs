//! Precision schemes: which statistics to measure, and which form each seam gets.
//!
//! A scheme owns two functions: [`Scheme::statistics`] before calibration and [`Scheme::decide`] after it. It
//! selects by tag, point and declared forms, never by the name of a structure, host family or plugin. Most profiles are
//! entries of one table ([`profiles`]); those with a rule of their own have a file each.
//!
//! # A profile of your own
//!
//! Implement [`Scheme`], register it, and ask for it by name. The last registration of a name wins.
//!
//! ```
//! use std::sync::Arc;
//! use structures::schemes::{self, Decision, Registry, Scheme, Seam, Want};
//!
//! /// FP8 in feed-forwards, the host everywhere else.
//! struct OnlyFfn;
//!
//! impl Scheme for OnlyFfn {
//!     fn name(&self) -> &str {
//!         "only_ffn"
//!     }
//!     fn summary(&self) -> &str {
//!         "FP8 in feed-forwards"
//!     }
//!     fn statistics(&self, seam: &Seam) -> Vec<Want> {
//!         if !seam.has_tag("ffn") {
//!             return Vec::new();
//!         }
//!         seam.points.iter().map(|p| Want::new(p, "amax", "tensor")).collect()
//!     }
//!     fn decide(&self, report: &[Seam]) -> Vec<Decision> {
//!         let one = |seam: &Seam| match (seam.consulted, seam.has_tag("ffn")) {
//!             (false, _) => Decision::Default,
//!             (true, true) => Decision::route("fp8_static"),
//!             (true, false) => Decision::keep(schemes::KEEP_NOT_IN_PROFILE, "feed-forwards only"),
//!         };
//!         report.iter().map(one).collect()
//!     }
//! }
//!
//! let mut registry = Registry::builtin(); // a door's is `host.schemes`
//! registry.register(Arc::new(OnlyFfn));
//! let mine = registry.select("only_ffn", &[])?.scheme;
//!
//! let ffn = Seam {
//!     key: "layers.0.mlp".into(),
//!     tags: vec!["gemm".into(), "ffn".into()],
//!     points: vec!["x".into()],
//!     consulted: true,
//!     ..Seam::default()
//! };
//! let plan = schemes::plan(mine.as_ref(), std::slice::from_ref(&ffn))?;
//! assert!(plan.wants.contains_key("layers.0.mlp|x"));
//! assert_eq!(mine.decide(&[ffn]), [Decision::route("fp8_static")]);
//! # Ok::<(), schemes::SchemeError>(())
//! ```
//!
//! Tags read here, declared by structures: [`TAG_GEMM`] (a product with weights worth quantising) and
//! [`TAG_PACK`] (sibling products merged into one, a fusion of its own worth even unquantised).
//!
//! Keeping the host is a decision with a code, not a refusal: the seam leaves the plan and the receipt says
//! why. Does not own: binding a form, its bands at call time, ownership between seams, wires.

mod auto;
mod fp8_static;
mod keep_outliers;
mod none;
mod plan;
mod profile;
mod profiles;
mod record;
mod registry;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use auto::{auto, native, Auto, Capability, AUTO};
pub use fp8_static::Fp8Static;
pub use keep_outliers::KeepOutliers;
pub use none::NoQuantisation;
pub use plan::{decide, plan, unserved, Plan, Undelivered};
pub use profile::{Otherwise, Param, Profile, Route, Select};
pub use profiles::{profile, profiles};
pub use record::{KeptHost, SchemeRecord};
pub use registry::{Registry, Selected};

/// Tag of a structure that multiplies with weights.
pub const TAG_GEMM: &str = "gemm";
/// Tag of a structure that merges sibling products: worth attaching unquantised too.
pub const TAG_PACK: &str = "pack";
/// Format of forms that do not quantise.
pub const UNQUANTISED: &str = "none";
/// Kept because quantisation is off.
pub const KEEP_QUANTISATION_OFF: &str = "keep_quantisation_off";
/// Kept because the profile does not cover it.
pub const KEEP_NOT_IN_PROFILE: &str = "keep_not_in_profile";
/// Kept because a point of it is an outlier.
pub const KEEP_OUTLIER: &str = "keep_outlier";

/// One seam as a scheme sees it. Before calibration `statistics` and `rows` are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seam {
    /// Receipt key.
    pub key: String,
    /// Structure; opaque here.
    pub structure: String,
    /// The structure's tags.
    pub tags: Vec<String>,
    /// Whether a scheme decides about it; a fusion structure ignores schemes.
    pub consulted: bool,
    /// Its points.
    pub points: Vec<String>,
    /// Forms that loaded plugins offer for it.
    pub forms: Vec<Form>,
    /// Rows of each observed call, ascending.
    pub rows: Vec<u64>,
    /// Point -> reduced statistics.
    pub statistics: BTreeMap<String, PointStatistics>,
}

impl Seam {
    /// Whether its structure declares a tag.
    pub fn has_tag(&self, tag: &str) -> bool {
        self.tags.iter().any(|t| t == tag)
    }

    /// Offered forms of a format.
    pub fn forms_of<'a>(&'a self, format: &'a str) -> impl Iterator<Item = &'a Form> {
        self.forms.iter().filter(move |f| f.format == format)
    }
}

/// An offered form, as far as schemes care.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Form {
    /// Plugin id; opaque here.
    pub plugin: String,
    /// Form name.
    pub form: String,
    /// Format name.
    pub format: String,
    /// Whether it quantises.
    pub quantises: bool,
    /// Dtype it rounds activations to on a wider host.
    pub rounds: Option<String>,
    /// Statistics it needs.
    pub statistics: Vec<Want>,
    /// Wires it consumes or produces.
    pub wires: Vec<String>,
    /// Rows it serves, inclusive; `None` for any.
    pub rows: Option<[u64; 2]>,
}

/// Statistics measured at a point.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PointStatistics {
    /// Largest absolute value.
    pub amax: Option<f32>,
    /// Of each channel.
    pub channel_amax: Option<Vec<f32>>,
    /// Mean square of each channel.
    pub second_moment: Option<Vec<f64>>,
}

/// A statistic wanted at a point, by name: a scheme or form may ask for what nothing can measure.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Want {
    /// Point.
    pub point: String,
    /// `amax`, `second_moment`, `none`.
    pub statistic: String,
    /// `tensor`, `channel`.
    pub granularity: String,
}

impl Want {
    /// A want.
    pub fn new(point: &str, statistic: &str, granularity: &str) -> Self {
        Self {
            point: point.to_string(),
            statistic: statistic.to_string(),
            granularity: granularity.to_string(),
        }
    }
}

/// What a scheme decides about a seam.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Bind a form of this format.
    Route {
        /// Format name.
        format: String,
        /// Parameters for the form.
        params: serde_json::Map<String, serde_json::Value>,
    },
    /// Keep the host.
    Keep {
        /// Stable code (`keep_...`).
        code: String,
        /// For people.
        reason: String,
    },
    /// The scheme has no say: the declared order of choice decides.
    Default,
}

impl Decision {
    /// A route without parameters.
    pub fn route(format: &str) -> Self {
        Self::Route {
            format: format.to_string(),
            params: serde_json::Map::new(),
        }
    }

    /// Keeping the host.
    pub fn keep(code: &str, reason: impl Into<String>) -> Self {
        Self::Keep {
            code: code.to_string(),
            reason: reason.into(),
        }
    }
}

/// A precision profile.
pub trait Scheme: Send + Sync {
    /// Profile name.
    fn name(&self) -> &str;

    /// One line for people.
    fn summary(&self) -> &str;

    /// What to measure at a consulted seam; empty for nothing.
    fn statistics(&self, seam: &Seam) -> Vec<Want>;

    /// One decision a seam, in order. Sees the whole report, since an outlier is one only among all points.
    fn decide(&self, report: &[Seam]) -> Vec<Decision>;

    /// Whether a form may round activations to this dtype on a wider host. No, unless a profile says so.
    fn allows_rounding(&self, _dtype: &str) -> bool {
        false
    }

    /// Format of a draft head, which is judged by how many of its tokens are accepted.
    fn draft_head_format(&self) -> &str {
        "bf16"
    }

    /// What the profile needs of a host and this one does not do; the profile is then refused before any work.
    fn unsupported(&self) -> Option<&str> {
        None
    }
}

/// Why a scheme cannot be used.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum SchemeError {
    /// No such profile.
    #[error("unknown scheme {name:?}; registered: {}", registered.join(", "))]
    NotFound {
        /// What was asked for.
        name: String,
        /// What there is.
        registered: Vec<String>,
    },
    /// A pair that nothing here can measure, or a point the structure does not have.
    #[error(
        "scheme {scheme}: cannot measure ({}, {}) at point {} of {seam}; measurable: {measurable}",
        want.statistic, want.granularity, want.point
    )]
    Unmeasurable {
        /// Profile.
        scheme: String,
        /// Seam key.
        seam: String,
        /// Point, statistic and granularity asked for.
        want: Box<Want>,
        /// What there is.
        measurable: String,
    },
    /// A parameter the profile does not have, or a value it does not take.
    #[error("scheme {scheme}: {problem}")]
    Parameter {
        /// Profile.
        scheme: String,
        /// Expected and found.
        problem: String,
    },
    /// The profile needs what this host does not do.
    #[error("scheme {scheme} needs {needs}, which this host does not do; choose another scheme")]
    Unsupported {
        /// Profile.
        scheme: String,
        /// What it needs.
        needs: String,
    },
    /// A scheme that answered for another number of seams.
    #[error("scheme {scheme} gave {found} decisions for {expected} seams")]
    Decisions {
        /// Profile.
        scheme: String,
        /// Seams.
        expected: usize,
        /// Decisions.
        found: usize,
    },
}

impl SchemeError {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "scheme_unknown",
            Self::Unmeasurable { .. } => "statistic_unmeasurable",
            Self::Decisions { .. } | Self::Parameter { .. } => "scheme_invalid",
            Self::Unsupported { .. } => "scheme_unsupported",
        }
    }
}

#[cfg(test)]
pub(crate) mod fixtures {
    //! Seams for the tests of this directory.
    use super::*;

    pub(crate) fn form(plugin: &str, format: &str) -> Form {
        let quantises = format != UNQUANTISED;
        let needs = format.starts_with("fp8");
        Form {
            plugin: plugin.into(),
            form: format!("{format}_form"),
            format: format.into(),
            quantises,
            statistics: if needs {
                vec![Want::new("x", "amax", "tensor")]
            } else {
                vec![]
            },
            ..Form::default()
        }
    }

    pub(crate) fn seam(key: &str, tags: &[&str], formats: &[&str]) -> Seam {
        Seam {
            key: key.into(),
            structure: format!("structure_of_{key}"),
            tags: tags.iter().map(|t| (*t).to_string()).collect(),
            consulted: true,
            points: vec!["x".into()],
            forms: formats.iter().map(|f| form("vendor", f)).collect(),
            ..Seam::default()
        }
    }

    pub(crate) fn ignoring(key: &str, formats: &[&str]) -> Seam {
        Seam {
            consulted: false,
            ..seam(key, &["norm"], formats)
        }
    }
}
