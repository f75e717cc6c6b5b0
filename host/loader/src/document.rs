//! From the text of a `describe` document to a description the host believes.
//!
//! Owns what must hold in every document whatever the host's version: schema, id, versions, unambiguous forms, and
//! promises a gate can rely on: no form may declare itself more room for error than its formats explain.
//! Whether a plugin fits this host (API version, required features) is the handshake below; whether it fits this
//! machine is [`crate::arch`].

use std::collections::BTreeSet;

use structures_plugin_api::abi::{API_MINOR, API_VERSION};
use structures_plugin_api::describe::{Description, FormDecl, WeightFormat, Wire, SCHEMA};

use crate::code::{Code, Refusal};
use crate::open;
use crate::services::HOST_FEATURES;

/// Reads and checks a document.
///
/// # Errors
/// `bad_describe` with the first thing that is wrong.
pub fn parse(text: &str) -> Result<Description, Refusal> {
    let d: Description = serde_json::from_str(text)
        .map_err(|e| Code::BadDescribe.because(format!("not a description: {e}")))?;
    check(&d)?;
    Ok(d)
}

/// The same for a document that was read elsewhere.
///
/// # Errors
/// `bad_describe` with the first thing that is wrong.
pub fn check(d: &Description) -> Result<(), Refusal> {
    let bad = |what: String| Code::BadDescribe.because(what);
    if d.schema != SCHEMA {
        return Err(bad(format!("expected schema {SCHEMA}, found {}", d.schema)));
    }
    if !valid_id(&d.id) {
        return Err(bad(format!(
            "expected an id like [a-z0-9][a-z0-9_-]*, found `{}`",
            d.id
        )));
    }
    for (what, version) in [("version", &d.version), ("api", &d.api)] {
        if let Err(e) = semver::Version::parse(version) {
            return Err(bad(format!(
                "{what}: expected a semantic version, found `{version}` ({e})"
            )));
        }
    }
    let word = |name: &String| {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        !name.is_empty() && name.len() <= 64 && name.bytes().all(plain)
    };
    if let Some(name) = d.operations.iter().find(|name| !word(name)) {
        return Err(bad(format!(
            "operations: expected a name like [a-z0-9_]+, found `{name}`"
        )));
    }
    let mut seen = BTreeSet::new();
    for f in &d.forms {
        let name = format!("form `{}` of `{}`", f.name, f.structure);
        if !seen.insert((&f.structure, &f.name)) {
            return Err(bad(format!("{name} is declared twice")));
        }
        let empty = [
            ("structure", f.structure.is_empty()),
            ("name", f.name.is_empty()),
            ("format", f.format.is_empty()),
            ("spec_versions", f.spec_versions.is_empty()),
            ("spans", f.spans.is_empty()),
            ("dtypes", f.dtypes.is_empty()),
        ];
        if let Some((what, _)) = empty.iter().find(|(_, empty)| *empty) {
            return Err(bad(format!("{name}: `{what}` is empty")));
        }
        if !(f.tolerance.is_finite() && f.tolerance > 0.0) {
            return Err(bad(format!(
                "{name}: expected a positive tolerance, found {}",
                f.tolerance
            )));
        }
        if let Some([low, high]) = f.band.rows.filter(|[low, high]| low > high) {
            return Err(bad(format!(
                "{name}: the band of rows [{low}, {high}] is empty"
            )));
        }
        let malformed = |w: &&String| w.contains(':') && Wire::parse(w).is_none();
        if let Some(wire) = f.wires.iter().find(malformed) {
            return Err(bad(format!(
                "{name}: expected a wire as `emits:OUTPUT:FORMAT` or `accepts:INPUT:FORMAT`, found `{wire}`"
            )));
        }
        let cap = tolerance_cap(f);
        if f.tolerance > cap {
            return Err(bad(format!(
                "{name}: expected a tolerance of at most {cap:e} for {}, found {:e}",
                formats(f),
                f.tolerance
            )));
        }
        if !f.quantises && quantised(f) {
            return Err(bad(format!(
                "{name}: `quantises` is false, expected true for {}",
                formats(f)
            )));
        }
    }
    Ok(())
}

/// Largest tolerance a form may declare, by the coarsest format it keeps weights or rounds activations in: 1e-4 for
/// f32, 1e-2 for 16 bits, 6e-2 for 8, 2e-1 for 4. The reference rounds weights as the form does, so this is room for
/// the order of sums and the rounding of activations, not for the weights' own error. A name nobody here knows
/// explains no error.
pub fn tolerance_cap(form: &FormDecl) -> f64 {
    let activations = form.rounds.iter().chain([&form.activation_format]);
    activations
        .map(|name| width_of(name))
        .fold(weight_width(form), Width::max)
        .cap()
}

/// How coarse a format is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Width {
    Full,
    Sixteen,
    Eight,
    Four,
}

impl Width {
    fn cap(self) -> f64 {
        match self {
            Width::Full => 1e-4,
            Width::Sixteen => 1e-2,
            Width::Eight => 6e-2,
            Width::Four => 2e-1,
        }
    }
}

/// Names of activation formats, as `activation_format` and `rounds` give them.
const ACTIVATIONS: [(&str, Width); 6] = [
    ("bf16", Width::Sixteen),
    ("f16", Width::Sixteen),
    ("e4m3", Width::Eight),
    ("e5m2", Width::Eight),
    ("int8", Width::Eight),
    ("nvfp4", Width::Four),
];

fn width_of(activation: &str) -> Width {
    let known = ACTIVATIONS.iter().find(|(name, _)| *name == activation);
    known.map_or(Width::Full, |(_, width)| *width)
}

fn weight_width(form: &FormDecl) -> Width {
    match form.weight_format {
        WeightFormat::None => Width::Full,
        WeightFormat::Bf16 => Width::Sixteen,
        WeightFormat::Fp8PerTensor | WeightFormat::Int8PerChannel => Width::Eight,
        WeightFormat::Nvfp4 => Width::Four,
    }
}

/// Rounding to 16 bits is a dtype, below that it is quantisation.
fn quantised(form: &FormDecl) -> bool {
    weight_width(form).max(width_of(&form.activation_format)) >= Width::Eight
}

fn formats(form: &FormDecl) -> String {
    let weights = match serde_json::to_value(form.weight_format) {
        Ok(serde_json::Value::String(name)) => name,
        _ => "?".into(),
    };
    let mut text = format!(
        "weight_format {weights}, activation_format {}",
        form.activation_format
    );
    if let Some(dtype) = &form.rounds {
        text.push_str(&format!(", rounds {dtype}"));
    }
    text
}

/// Whether this host serves the plugin: same API major; an older minor is served, a newer one too unless the plugin
/// requires a feature that this host does not have.
///
/// # Errors
/// `api_major` or `api_requires`; both versions are named.
pub fn handshake(d: &Description) -> Result<(), Refusal> {
    if !open::same_major(&d.api) {
        return Err(open::api_major(&d.api));
    }
    let unknown: Vec<&str> = d
        .requires
        .iter()
        .map(String::as_str)
        .filter(|f| !HOST_FEATURES.contains(f))
        .collect();
    if !unknown.is_empty() {
        return Err(Code::ApiRequires.because(format!(
            "the plugin (API {}) requires [{}], this host (API {API_VERSION}) has [{}]",
            d.api,
            unknown.join(", "),
            HOST_FEATURES.join(", ")
        )));
    }
    if semver::Version::parse(&d.api).is_ok_and(|v| v.minor > u64::from(API_MINOR)) {
        tracing::info!(
            plugin = d.id,
            "built for the newer API {}, served as {API_VERSION}",
            d.api
        );
    }
    Ok(())
}

fn valid_id(id: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    id.bytes().next().is_some_and(plain)
        && id.bytes().all(|b| plain(b) || b == b'_' || b == b'-')
        && id.len() <= 64
}

#[cfg(test)]
mod tests {
    use structures_plugin_api::describe::FormDecl;

    use super::*;

    fn good() -> Description {
        let mut form = FormDecl::new("some_structure", "plain", "none");
        form.spans = vec!["all".into()];
        form.dtypes = vec!["f32".into()];
        let mut d = Description::new("some_plugin", "somebody", "1.2.3");
        d.forms = vec![form];
        d
    }

    fn code(edit: impl Fn(&mut Description)) -> Option<String> {
        let mut d = good();
        edit(&mut d);
        let text = serde_json::to_string(&d).expect("serialises");
        parse(&text)
            .and_then(|d| handshake(&d))
            .err()
            .map(|r| r.code.name().to_string())
    }

    #[test]
    fn each_rule_has_a_refusal() {
        let bad = Some("bad_describe".to_string());
        assert_eq!(code(|_| ()), None);
        assert_eq!(code(|d| d.schema = 2), bad);
        for id in ["", "Upper", "-x", "a b", "a/b", "é", &"x".repeat(65)] {
            assert_eq!(code(|d| d.id = id.into()), bad, "{id}");
        }
        assert_eq!(code(|d| d.version = "1.2".into()), bad);
        assert_eq!(code(|d| d.api = "one".into()), bad);
        assert_eq!(code(|d| d.forms.push(d.forms[0].clone())), bad);
        assert_eq!(code(|d| d.operations = vec!["add".into()]), None);
        for name in ["", "Add", "operation:add", "a b"] {
            assert_eq!(code(|d| d.operations = vec![name.into()]), bad, "{name}");
        }
        assert_eq!(code(|d| d.forms[0].spans.clear()), bad);
        assert_eq!(code(|d| d.forms[0].dtypes.clear()), bad);
        assert_eq!(code(|d| d.forms[0].spec_versions.clear()), bad);
        assert_eq!(code(|d| d.forms[0].tolerance = 0.0), bad);
        assert_eq!(code(|d| d.forms[0].band.rows = Some([4, 1])), bad);
        for text in ["", "{}", "[]", "{\"schema\": 1}", "nonsense"] {
            assert_eq!(parse(text).expect_err(text).code, Code::BadDescribe);
        }
    }

    #[test]
    fn majors_must_be_equal_and_minors_need_not() {
        assert_eq!(code(|d| d.api = "2.0.0".into()), Some("api_major".into()));
        assert_eq!(code(|d| d.api = "0.9.0".into()), Some("api_major".into()));
        assert_eq!(code(|d| d.api = "1.9.0".into()), None);
        assert_eq!(
            code(|d| {
                d.api = "1.9.0".into();
                d.requires = vec!["parallel_for".into(), "time_travel".into()];
            }),
            Some("api_requires".into())
        );
        assert_eq!(code(|d| d.requires = vec!["scratch".into()]), None);
    }
    type Edit = fn(&mut FormDecl);

    /// Caps as the decisions state them, each with the declaration that earns it.
    const CAPS: [(f64, Edit); 11] = [
        (1e-4, |_| ()),
        (1e-4, |f| f.activation_format = "of_a_later_minor".into()),
        (1e-2, |f| f.weight_format = WeightFormat::Bf16),
        (1e-2, |f| f.rounds = Some("bf16".into())),
        (6e-2, |f| f.weight_format = WeightFormat::Int8PerChannel),
        (6e-2, |f| f.weight_format = WeightFormat::Fp8PerTensor),
        (6e-2, |f| f.activation_format = "e4m3".into()),
        (6e-2, |f| f.activation_format = "e5m2".into()),
        (6e-2, |f| {
            f.activation_format = "int8".into();
            f.rounds = Some("bf16".into());
        }),
        (2e-1, |f| f.weight_format = WeightFormat::Nvfp4),
        (2e-1, |f| f.activation_format = "nvfp4".into()),
    ];

    #[test]
    fn no_form_promises_less_than_its_formats_allow() {
        for (i, (cap, edit)) in CAPS.iter().enumerate() {
            let mut d = good();
            edit(&mut d.forms[0]);
            d.forms[0].quantises = true;
            assert_eq!(tolerance_cap(&d.forms[0]), *cap, "case {i}");
            let with = |tolerance: f64| {
                let mut d = d.clone();
                d.forms[0].tolerance = tolerance;
                parse(&serde_json::to_string(&d).expect("serialises"))
            };
            assert!(with(*cap).is_ok(), "case {i}");
            let refused = with(cap * 1.01).expect_err("more than the cap");
            assert_eq!(refused.code, Code::BadDescribe, "case {i}");
            let text = refused.to_string();
            for fact in ["`plain` of `some_structure`", "at most", "weight_format"] {
                assert!(text.contains(fact), "{text}");
            }
        }
    }

    #[test]
    fn a_form_that_quantises_says_so() {
        for (i, (cap, edit)) in CAPS.iter().enumerate() {
            let denied = code(|d| {
                edit(&mut d.forms[0]);
                d.forms[0].quantises = false;
            });
            let expected = (*cap > 1e-2).then(|| "bad_describe".to_string());
            assert_eq!(denied, expected, "case {i}");
        }
    }

    #[test]
    fn statistics_of_a_later_version_are_no_reason() {
        let later = structures_plugin_api::describe::StatisticDecl {
            point: "somewhere".into(),
            statistic: "kurtosis".into(),
            granularity: "block".into(),
        };
        assert_eq!(code(|d| d.forms[0].statistics = vec![later.clone()]), None);
    }
}
