//! A family's own numbers, from either kind of checkpoint by their two names.

use super::from_gguf::{shortest, Keys};
use super::Fields;
use crate::ModelError;

/// Where a configuration is read from.
pub enum Facts<'a> {
    /// `config.json`, or an object in it.
    Json(Fields<'a>),
    /// GGUF metadata.
    Gguf(Keys<'a>),
}

impl std::fmt::Debug for Facts<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Facts::Json(_) => "Facts(config.json)",
            Facts::Gguf(_) => "Facts(gguf)",
        })
    }
}

impl Facts<'_> {
    /// Whether it is a GGUF.
    pub fn is_gguf(&self) -> bool {
        matches!(self, Facts::Gguf(_))
    }

    /// A positive number under its name in `config.json` or its GGUF key without the architecture. A field that is
    /// `null` switches the fact off; an absent one means `absent`.
    pub fn number(
        &self,
        field: &str,
        key: &str,
        absent: Option<f64>,
    ) -> Result<Option<f64>, ModelError> {
        match self {
            Facts::Json(fields) if fields.map.contains_key(field) => fields.positive(field),
            Facts::Json(_) => Ok(absent),
            Facts::Gguf(keys) => Ok(keys.number(key)?.map(shortest).or(absent)),
        }
    }

    /// Refuses a flag of `config.json` that is on.
    pub fn must_be_off(&self, field: &str) -> Result<(), ModelError> {
        let Facts::Json(fields) = self else {
            return Ok(());
        };
        if fields.flag(field)? != Some(true) {
            return Ok(());
        }
        Err(ModelError::unsupported(
            fields.path,
            field,
            "it absent, null or false",
            "true",
            "this version cannot run the model",
        ))
    }
}
