//! Which layers see a window, from `layer_types` or from a family's rule.

use serde_json::Value;

use super::{Fields, Windows};
use crate::ModelError;

const FIX: &str = "correct the file or get it again";
const CANNOT: &str = "this version cannot run the model";

/// The windows of `config.json`, one entry a layer. Kinds of layers given one by one decide.
pub(super) fn from_json(
    fields: &Fields<'_>,
    rule: Windows,
    layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    let width = width(fields, rule)?;
    let flagged = fields.flag("use_sliding_window")?.unwrap_or(false);
    if let Some(kinds) = fields.get("layer_types") {
        let windows = by_kind(fields, kinds, rule, width, layers)?;
        // The library does not read the list where all layers are alike, and has no window without the flag.
        let (item, agrees) = match rule {
            Windows::Always { .. } => ("layer_types", windows.iter().all(|w| *w == width)),
            Windows::Flagged => {
                let none = windows.iter().all(Option::is_none);
                ("use_sliding_window", flagged || none)
            }
            Windows::Never | Windows::AllBut { .. } => return Ok(windows),
        };
        if !agrees {
            let expected = "layer_types, sliding_window and use_sliding_window to agree";
            let found = fields.get(item).map_or("nothing".into(), Value::to_string);
            return Err(refused(fields, item, expected, &found));
        }
        return Ok(windows);
    }
    if rule == Windows::Never && flagged {
        return Err(refused(
            fields,
            "use_sliding_window",
            "it absent, null or false",
            "true",
        ));
    }
    let window = |from: usize| (0..layers).map(|i| width.filter(|_| i >= from)).collect();
    Ok(match rule {
        Windows::Never => vec![None; layers],
        Windows::Always { .. } => window(0),
        Windows::Flagged => {
            if !flagged {
                return Ok(vec![None; layers]);
            }
            let from = fields.count("max_window_layers")?.unwrap_or(28);
            if from < layers && width.is_none() {
                return Err(ModelError::malformed(
                    fields.path,
                    "sliding_window",
                    "a whole number of at least 1, as use_sliding_window is true",
                    "nothing",
                    FIX,
                ));
            }
            window(from)
        }
        Windows::AllBut { every, .. } => {
            let every = match fields.size("sliding_window_pattern")? {
                Some(n) => n,
                None => fields.size("_sliding_window_pattern")?.unwrap_or(every),
            };
            all_but(every, width, layers)
        }
    })
}

/// Every n-th layer sees all, the others the window.
pub(super) fn all_but(every: usize, width: Option<usize>, layers: usize) -> Vec<Option<usize>> {
    (0..layers)
        .map(|i| width.filter(|_| (i + 1) % every != 0))
        .collect()
}

fn width(fields: &Fields<'_>, rule: Windows) -> Result<Option<usize>, ModelError> {
    let absent = match rule {
        Windows::Always { absent } => absent,
        Windows::AllBut { absent, .. } => Some(absent),
        Windows::Flagged => Some(4096),
        Windows::Never => None,
    };
    match fields.map.contains_key("sliding_window") {
        true => fields.size("sliding_window"),
        false => Ok(absent),
    }
}

fn by_kind(
    fields: &Fields<'_>,
    kinds: &Value,
    rule: Windows,
    width: Option<usize>,
    layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    let each = kinds.as_array().map(Vec::as_slice).unwrap_or(&[]);
    if each.len() < layers {
        return Err(ModelError::malformed(
            fields.path,
            "layer_types",
            format!("a list with a kind for each of the {layers} layers"),
            kinds.to_string(),
            FIX,
        ));
    }
    let known = match rule {
        Windows::Never => "full_attention in every layer",
        _ => "full_attention or sliding_attention",
    };
    let mut windows = Vec::with_capacity(layers);
    for kind in &each[..layers] {
        windows.push(match kind.as_str() {
            Some("full_attention") => None,
            Some("sliding_attention") if rule != Windows::Never => match width {
                Some(width) => Some(width),
                None => {
                    return Err(ModelError::malformed(
                        fields.path,
                        "sliding_window",
                        "a whole number of at least 1, as layer_types has sliding_attention",
                        "nothing",
                        FIX,
                    ))
                }
            },
            _ => {
                let found = kind.to_string();
                return Err(refused(
                    fields,
                    "layer_types",
                    known,
                    found.trim_matches('"'),
                ));
            }
        });
    }
    Ok(windows)
}

fn refused(fields: &Fields<'_>, item: &str, expected: &str, found: &str) -> ModelError {
    ModelError::unsupported(fields.path, item, expected, found, CANNOT)
}
