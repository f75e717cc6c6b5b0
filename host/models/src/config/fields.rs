//! Typed access to a JSON object whose errors name file, field, expected and found.

use std::path::Path;

use serde_json::{Map, Value};

use crate::ModelError;

const FIX: &str = "correct the file or get it again";

/// An object of a configuration file. Absent and `null` are the same: published configs use both.
pub struct Fields<'a> {
    pub(crate) path: &'a Path,
    pub(crate) prefix: String,
    pub(crate) map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    fn bad(&self, name: &str, expected: &str, found: &str) -> ModelError {
        let item = format!("{}{name}", self.prefix);
        ModelError::malformed(self.path, item, expected, found, FIX)
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(v) => match read(v) {
                Some(t) => Ok(Some(t)),
                None => Err(self.bad(name, expected, &brief(v))),
            },
        }
    }

    pub(crate) fn required<T>(
        &self,
        name: &str,
        expected: &str,
        value: Option<T>,
    ) -> Result<T, ModelError> {
        value.ok_or_else(|| self.bad(name, expected, "nothing"))
    }

    /// A size: a whole number of at least 1.
    pub(crate) fn size(&self, name: &str) -> Result<Option<usize>, ModelError> {
        self.typed(name, "a whole number of at least 1", |v| {
            let n = v.as_u64().or_else(|| {
                let x = v.as_f64()?;
                (x.fract() == 0.0 && (1.0..9e15).contains(&x)).then_some(x as u64)
            })?;
            usize::try_from(n).ok().filter(|n| *n >= 1)
        })
    }

    /// A whole number.
    pub(crate) fn count(&self, name: &str) -> Result<Option<usize>, ModelError> {
        self.typed(name, "a whole number", |v| {
            v.as_u64().and_then(|n| usize::try_from(n).ok())
        })
    }

    /// A finite positive number.
    pub(crate) fn positive(&self, name: &str) -> Result<Option<f64>, ModelError> {
        self.typed(name, "a positive number", |v| {
            v.as_f64().filter(|x| x.is_finite() && *x > 0.0)
        })
    }

    /// A finite number of at least zero.
    pub(crate) fn not_negative(&self, name: &str) -> Result<Option<f64>, ModelError> {
        self.typed(name, "a number of at least 0", |v| {
            v.as_f64().filter(|x| x.is_finite() && *x >= 0.0)
        })
    }

    /// A list of finite positive numbers.
    pub(crate) fn positives(&self, name: &str) -> Result<Option<Vec<f64>>, ModelError> {
        self.typed(name, "a list of positive numbers", |v| {
            let each = v.as_array()?.iter().map(Value::as_f64);
            let all: Vec<f64> = each.collect::<Option<_>>()?;
            all.iter().all(|x| x.is_finite() && *x > 0.0).then_some(all)
        })
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ModelError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(name, "a text", Value::as_str)
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ModelError> {
        let map = self.typed(name, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields {
            path: self.path,
            prefix: format!("{}{name}.", self.prefix),
            map,
        }))
    }

    /// One token id, or a list of them.
    pub(crate) fn ids(&self, name: &str) -> Result<Vec<u32>, ModelError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = self.typed(name, "a token id or a list of them", |v| match v {
            Value::Array(l) => l.iter().map(id).collect::<Option<Vec<u32>>>(),
            v => id(v).map(|n| vec![n]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

fn brief(v: &Value) -> String {
    let text = v.to_string();
    match text.char_indices().nth(60) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_absent_and_a_wrong_type_is_named() {
        let value: Value =
            serde_json::from_str(r#"{"a": null, "b": "x", "c": [1, 2], "d": 3, "e": 4.0}"#)
                .unwrap();
        let fields = Fields {
            path: Path::new("config.json"),
            prefix: String::new(),
            map: value.as_object().unwrap(),
        };
        assert_eq!(fields.size("a").unwrap(), None);
        assert_eq!(fields.size("e").unwrap(), Some(4));
        assert_eq!(fields.ids("c").unwrap(), [1, 2]);
        assert_eq!(fields.ids("d").unwrap(), [3]);
        let message = fields.size("b").unwrap_err().to_string();
        assert!(
            message.contains("config.json: b: expected a whole number"),
            "{message}"
        );
        assert!(message.contains("found \"x\""), "{message}");
    }
}
