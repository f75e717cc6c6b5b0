//! Digests of JSON records: sha256 over the canonical form of the whole record without its `digest` field.
//!
//! Canonical means sorted keys and no whitespace; numbers stand as serde_json prints them (the shortest text
//! that parses back to the same value, which needs its `float_roundtrip` feature to hold when a file is read
//! again).

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use thiserror::Error;

/// The field that holds the digest.
pub const FIELD: &str = "digest";

/// What an inspection found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The record is what was sealed.
    Intact,
    /// There is no digest in it.
    Missing,
    /// It was changed.
    Tampered {
        /// What the record says.
        recorded: String,
        /// What it is.
        computed: String,
    },
}

/// What cannot be digested.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DigestError {
    /// Not an object.
    #[error("a record is a JSON object, found {found}")]
    NotAnObject {
        /// What was found.
        found: &'static str,
    },
    /// Not representable as JSON.
    #[error("a record does not serialise: {cause}")]
    NotJson {
        /// Why.
        cause: String,
    },
}

/// Hex sha256 of some bytes.
pub fn sha256_hex(bytes: &[u8]) -> String {
    let mut hex = String::with_capacity(64);
    for byte in Sha256::digest(bytes) {
        for nibble in [byte >> 4, byte & 15] {
            hex.push(char::from(b"0123456789abcdef"[usize::from(nibble)]));
        }
    }
    hex
}

/// Canonical text of a value: sorted keys, no whitespace.
pub fn canonical(value: &Value) -> String {
    let mut text = String::new();
    write(value, &mut text);
    text
}

/// Digest of a record without its digest field.
///
/// # Errors
/// The record is not an object.
pub fn digest(record: &Value) -> Result<String, DigestError> {
    let Value::Object(map) = record else {
        return Err(DigestError::NotAnObject {
            found: kind(record),
        });
    };
    let mut text = String::new();
    object(
        map.iter().filter(|(key, _)| key.as_str() != FIELD),
        &mut text,
    );
    Ok(sha256_hex(text.as_bytes()))
}

/// Digest of anything that serialises to an object, without its digest field.
///
/// # Errors
/// It does not serialise, or not to an object.
pub fn of(record: &impl Serialize) -> Result<String, DigestError> {
    let value = serde_json::to_value(record).map_err(|e| DigestError::NotJson {
        cause: e.to_string(),
    })?;
    digest(&value)
}

/// Puts the digest into a record, as its last field; returns it.
///
/// # Errors
/// The record is not an object.
pub fn seal(record: &mut Value) -> Result<String, DigestError> {
    let computed = digest(record)?;
    if let Value::Object(map) = record {
        map.shift_remove(FIELD);
        map.insert(FIELD.to_string(), Value::String(computed.clone()));
    }
    Ok(computed)
}

/// Compares a record with its digest. What is not a record has none.
pub fn inspect(record: &Value) -> Verdict {
    let (Ok(computed), Some(recorded)) = (digest(record), record.get(FIELD)) else {
        return Verdict::Missing;
    };
    match recorded {
        Value::Null => Verdict::Missing,
        Value::String(recorded) if *recorded == computed => Verdict::Intact,
        other => Verdict::Tampered {
            recorded: other
                .as_str()
                .map_or_else(|| other.to_string(), String::from),
            computed,
        },
    }
}

/// Whether a record is what was sealed; one without a digest is not.
pub fn verify(record: &Value) -> bool {
    inspect(record) == Verdict::Intact
}

fn write(value: &Value, text: &mut String) {
    match value {
        Value::Object(map) => object(map.iter(), text),
        Value::Array(items) => {
            text.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    text.push(',');
                }
                write(item, text);
            }
            text.push(']');
        }
        scalar => text.push_str(&scalar.to_string()),
    }
}

fn object<'a>(entries: impl Iterator<Item = (&'a String, &'a Value)>, text: &mut String) {
    let mut entries: Vec<_> = entries.collect();
    entries.sort_by_key(|(key, _)| *key);
    text.push('{');
    for (i, (key, value)) in entries.into_iter().enumerate() {
        if i > 0 {
            text.push(',');
        }
        text.push_str(&Value::String(key.clone()).to_string());
        text.push(':');
        write(value, text);
    }
    text.push('}');
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn canonical_text_is_sorted_and_tight() {
        let value = json!({"b": [1, 2.5, null], "a": {"z": "q\"\u{e9}\n", "y": true}});
        assert_eq!(
            canonical(&value),
            r#"{"a":{"y":true,"z":"q\"é\n"},"b":[1,2.5,null]}"#
        );
        assert_eq!(
            sha256_hex(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn key_order_and_an_old_digest_do_not_matter() {
        let a = json!({"x": 1, "y": {"p": 1, "q": 2}});
        let b = json!({"y": {"q": 2, "p": 1}, "digest": "old", "x": 1});
        assert_eq!(digest(&a), digest(&b));
        assert_eq!(of(&a), digest(&a));
        // Only the record's own field is left out.
        assert_ne!(
            digest(&json!({"y": {"digest": "a"}})),
            digest(&json!({"y": {"digest": "b"}}))
        );
    }

    #[test]
    fn b_440_b_308_any_change_is_seen() {
        let mut record = json!({"metrics": {"cosine": 0.9991}, "units": ["a", "b"], "ok": true});
        seal(&mut record).unwrap();
        assert!(verify(&record));
        let edits: [fn(&mut Value); 5] = [
            |r| r["metrics"]["cosine"] = json!(0.9992),
            |r| r["units"] = json!(["b", "a"]),
            |r| r["ok"] = json!(1),
            |r| r["extra"] = json!(null),
            |r| r[FIELD] = json!("00"),
        ];
        for edit in edits {
            let mut changed = record.clone();
            edit(&mut changed);
            assert!(
                matches!(inspect(&changed), Verdict::Tampered { .. }),
                "{changed}"
            );
            assert!(!verify(&changed));
        }
        for bare in [json!({"a": 1}), json!({"digest": null}), json!([1])] {
            assert_eq!(inspect(&bare), Verdict::Missing);
        }
        assert!(seal(&mut json!(3)).is_err() && of(&1).is_err());
    }

    #[test]
    fn sealing_twice_changes_nothing() {
        let mut record = json!({"a": 1});
        let first = seal(&mut record).unwrap();
        assert_eq!(seal(&mut record).unwrap(), first);
        assert_eq!(record, json!({"a": 1, "digest": first}));
    }

    #[test]
    fn a_record_written_and_read_again_has_the_same_digest() {
        // A weak generator over all bit patterns; the short ones are the hard ones.
        let (mut state, mut numbers) = (0x9e37_79b9_7f4a_7c15_u64, Vec::new());
        while numbers.len() < 20_000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            numbers.extend([
                f64::from_bits(state),
                (state as f64) / 1e19,
                f64::from(state as f32),
            ]);
        }
        numbers.retain(|n| n.is_finite());
        let mut record = json!({ "numbers": numbers });
        seal(&mut record).unwrap();
        let back: Value = serde_json::from_str(&record.to_string()).unwrap();
        assert!(verify(&back));
        let pretty = serde_json::to_string_pretty(&record).unwrap();
        assert!(verify(&serde_json::from_str(&pretty).unwrap()));
    }
}
