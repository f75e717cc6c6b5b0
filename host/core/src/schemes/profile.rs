//! A profile as data: which seams it routes to which format, what it measures there, why it keeps the rest.
//!
//! Most profiles are a list of routes and nothing else; they stand in one table ([`super::profiles`]) and are decided
//! here. A route selects by tag, by point and by what stands around a seam, never by a name of a structure. A profile
//! whose format no loaded plugin offers still routes: the binder refuses the seam by name, so that a missing form is
//! told and not silently replaced.

use serde_json::{Map, Value};
use structures_plugin_api::formats::Balance;

use super::{Decision, Scheme, SchemeError, Seam, Want};

/// Which seams a route takes. All that is given must hold.
#[derive(Clone, Copy, Debug)]
pub struct Select {
    /// Tags it must have.
    pub tags: &'static [&'static str],
    /// A point it must have.
    pub point: Option<&'static str>,
    /// A point it must not have.
    pub no_point: Option<&'static str>,
    /// It lies inside a seam of this tag.
    pub inside: Option<&'static str>,
}

impl Select {
    /// Every seam with these tags.
    pub const fn tags(tags: &'static [&'static str]) -> Self {
        Select {
            tags,
            point: None,
            no_point: None,
            inside: None,
        }
    }

    fn takes(&self, seam: &Seam, report: &[Seam]) -> bool {
        let has = |point: &str| seam.points.iter().any(|p| p == point);
        let within = |tag: &str| {
            let around = |s: &&Seam| seam.key.strip_prefix(s.key.as_str());
            let mut around = report
                .iter()
                .filter(|s| s.has_tag(tag))
                .filter_map(|s| around(&s));
            around.any(|rest| rest.starts_with('.'))
        };
        self.tags.iter().all(|tag| seam.has_tag(tag))
            && self.point.is_none_or(has)
            && !self.no_point.is_some_and(has)
            && self.inside.is_none_or(within)
    }
}

/// Where seams of a kind go.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Which.
    pub select: Select,
    /// To forms of this format.
    pub format: &'static str,
    /// Handed to the form beside the profile's own parameters.
    pub flag: Option<&'static str>,
}

/// What becomes of a consulted seam that no route takes.
#[derive(Clone, Copy, Debug)]
pub enum Otherwise {
    /// It keeps the host.
    Keep {
        /// Stable code.
        code: &'static str,
        /// For people.
        reason: &'static str,
    },
    /// These keep the host, any other is none of the profile's business.
    KeepTagged {
        /// Any of these tags.
        tags: &'static [&'static str],
        /// Stable code.
        code: &'static str,
        /// For people.
        reason: &'static str,
    },
}

/// A profile as data.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name.
    pub name: &'static str,
    /// One line for people.
    pub summary: &'static str,
    /// Statistic and granularity measured at every point of every consulted seam.
    pub statistic: Option<(&'static str, &'static str)>,
    /// The first that takes a seam decides.
    pub routes: &'static [Route],
    /// The rest.
    pub otherwise: Otherwise,
    /// Keeps a seam of which no observed call is within the rows that any form serves.
    pub bands: bool,
    /// Dtypes that forms may round activations to on a wider host.
    pub rounds: &'static [&'static str],
    /// Parameters that every route carries, and that [`Profile::with`] may change.
    pub params: &'static [(&'static str, Param)],
    /// What this host would have to do and does not: the profile is refused before any work.
    pub unsupported: Option<&'static str>,
    /// As given by [`Profile::with`].
    pub given: Map<String, Value>,
}

/// A parameter with its default.
#[derive(Clone, Copy, Debug)]
pub enum Param {
    /// Exponent of the channel balance.
    Alpha,
    /// Range of its factors.
    Clamp,
    /// One of these, the first by default.
    OneOf(&'static [&'static str]),
}

impl Param {
    fn default(self) -> Value {
        let balance = Balance::default();
        match self {
            Param::Alpha => f64::from(balance.alpha).into(),
            Param::Clamp => balance.clamp.map(f64::from).to_vec().into(),
            Param::OneOf(values) => values.first().copied().unwrap_or_default().into(),
        }
    }
}

impl Profile {
    /// The same profile with other parameters.
    ///
    /// # Errors
    /// A parameter it does not have, or a value that is not of its kind.
    pub fn with(mut self, params: Map<String, Value>) -> Result<Self, SchemeError> {
        let wrong = |problem: String| SchemeError::Parameter {
            scheme: self.name.to_string(),
            problem,
        };
        for (name, value) in &params {
            let Some((_, param)) = self.params.iter().find(|(own, _)| own == name) else {
                let own: Vec<&str> = self.params.iter().map(|(own, _)| *own).collect();
                return Err(wrong(format!(
                    "no `{name}`; expected one of [{}]",
                    own.join(", ")
                )));
            };
            if let Param::OneOf(values) = param {
                if !values.iter().any(|v| value.as_str() == Some(*v)) {
                    let values = values.join(", ");
                    return Err(wrong(format!(
                        "`{name}` is {value}; expected one of {values}"
                    )));
                }
            }
        }
        Balance::from_params(|name| params.get(name)).map_err(wrong)?;
        self.given = params;
        Ok(self)
    }

    fn params(&self, flag: Option<&str>) -> Map<String, Value> {
        let mut all: Map<String, Value> = self
            .params
            .iter()
            .map(|(name, param)| ((*name).to_string(), param.default()))
            .collect();
        all.extend(self.given.clone());
        if let Some(flag) = flag {
            all.insert(flag.to_string(), true.into());
        }
        all
    }

    fn one(&self, seam: &Seam, report: &[Seam]) -> Decision {
        if !seam.consulted {
            return Decision::Default;
        }
        let mut routes = self.routes.iter();
        if let Some(route) = routes.find(|route| route.select.takes(seam, report)) {
            let kept = if self.bands {
                out_of_band(seam, route.format)
            } else {
                None
            };
            return kept.unwrap_or_else(|| Decision::Route {
                format: route.format.to_string(),
                params: self.params(route.flag),
            });
        }
        match self.otherwise {
            Otherwise::Keep { code, reason } => Decision::keep(code, reason),
            Otherwise::KeepTagged { tags, code, reason }
                if tags.iter().any(|t| seam.has_tag(t)) =>
            {
                Decision::keep(code, reason)
            }
            Otherwise::KeepTagged { .. } => Decision::Default,
        }
    }
}

impl Scheme for Profile {
    fn name(&self) -> &str {
        self.name
    }

    fn summary(&self) -> &str {
        self.summary
    }

    fn statistics(&self, seam: &Seam) -> Vec<Want> {
        let Some((statistic, granularity)) = self.statistic else {
            return Vec::new();
        };
        let want = |point: &String| Want::new(point, statistic, granularity);
        seam.points.iter().map(want).collect()
    }

    fn decide(&self, report: &[Seam]) -> Vec<Decision> {
        report.iter().map(|seam| self.one(seam, report)).collect()
    }

    fn allows_rounding(&self, dtype: &str) -> bool {
        self.rounds.contains(&dtype)
    }

    fn unsupported(&self) -> Option<&str> {
        self.unsupported
    }
}

/// Where forms are offered and none serves any observed call, the seam would only ever be dispatched to the host.
fn out_of_band(seam: &Seam, format: &str) -> Option<Decision> {
    let bands: Vec<Option<[u64; 2]>> = seam.forms_of(format).map(|f| f.rows).collect();
    let serves = |band: &Option<[u64; 2]>| match band {
        None => true,
        Some([lo, hi]) => seam.rows.iter().any(|rows| (lo..=hi).contains(&rows)),
    };
    // Where no form is offered the route stands: the binder refuses it by name.
    if bands.is_empty() || seam.rows.is_empty() || bands.iter().any(serves) {
        return None;
    }
    let bands: Vec<String> = bands
        .iter()
        .flatten()
        .map(|[lo, hi]| format!("{lo} to {hi}"))
        .collect();
    let (least, most) = (seam.rows.iter().min(), seam.rows.iter().max());
    Some(Decision::keep(
        super::KEEP_NOT_IN_PROFILE,
        format!(
            "no observed call is in the band: rows {} to {} seen, {} served",
            least.copied().unwrap_or(0),
            most.copied().unwrap_or(0),
            bands.join(" or ")
        ),
    ))
}
