//! Numbers in JSON records: JSON has no NaN and no infinity, so these are the strings `"nan"`, `"inf"` and
//! `"-inf"`, never a silent `null`.

use serde::{Deserialize, Deserializer, Serializer};
use serde_json::Value;

/// A number as it stands in a record.
pub fn to_json(value: f64) -> Value {
    match serde_json::Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None => Value::String(word(value).to_string()),
    }
}

/// The number a record holds, `None` when it holds something else.
pub fn from_json(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => match text.as_str() {
            "nan" => Some(f64::NAN),
            "inf" => Some(f64::INFINITY),
            "-inf" => Some(f64::NEG_INFINITY),
            _ => None,
        },
        _ => None,
    }
}

/// `#[serde(serialize_with)]`.
pub fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() {
        to.serialize_f64(*value)
    } else {
        to.serialize_str(word(*value))
    }
}

/// `#[serde(deserialize_with)]`.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let value = Value::deserialize(from)?;
    from_json(&value).ok_or_else(|| {
        serde::de::Error::custom(format!(
            "expected a number, nan, inf or -inf, found {value}"
        ))
    })
}

fn word(value: f64) -> &'static str {
    if value.is_nan() {
        "nan"
    } else if value > 0.0 {
        "inf"
    } else {
        "-inf"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_number_survives_a_record() {
        for value in [0.0, -0.1, 1e300, 5e-324, f64::INFINITY, f64::NEG_INFINITY] {
            let text = to_json(value).to_string();
            let back = from_json(&serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(back.to_bits(), value.to_bits(), "{text}");
        }
        assert!(from_json(&to_json(f64::NAN)).unwrap().is_nan());
        assert_eq!(from_json(&Value::String("many".into())), None);
        assert_eq!(from_json(&Value::Null), None);
    }
}
