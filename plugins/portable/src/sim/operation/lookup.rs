//! What is looked up by whole numbers: rows of a table, angles of positions.

use std::sync::Arc;

use structures_plugin_api::sdk::{ports, BindRequest, Failure};

use super::super::work::{Body, Inputs, Value};
use super::{fill, filled, given, Bound};

pub fn embedding(request: &BindRequest<'_>) -> Bound {
    let table = request.required_weight("w")?;
    let [rows, width] = *table.dims() else {
        let what = format!("a table of dims {:?}", table.dims());
        return Err(Failure::invalid("dims_inconsistent", what));
    };
    let body = Rows {
        ids: ports::position(&request.params.inputs, "ids")?,
        rows: rows as usize,
        width: width as usize,
        table: table.to_f32_vec()?,
    };
    let bytes = 4 * body.table.len() as u64;
    Ok((Arc::new(body), bytes))
}

/// Rows of a table.
struct Rows {
    ids: usize,
    rows: usize,
    width: usize,
    table: Vec<f32>,
}

impl Body for Rows {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let mut out = Vec::new();
        for id in given(inputs, self.ids)?.whole()? {
            let row = usize::try_from(*id).ok().filter(|row| *row < self.rows);
            let Some(row) = row else {
                let what = format!("id {id} is not in a table of {} rows", self.rows);
                return Err(Failure::refused("operand", what));
            };
            out.extend_from_slice(&self.table[row * self.width..][..self.width]);
        }
        fill(filled(outputs, 0)?, out)
    }
}

pub fn rope_table(request: &BindRequest<'_>) -> Bound {
    let attribute = |name: &str| request.params.params.get(name);
    if attribute("axes").is_some_and(|axes| !axes.is_null()) {
        return Err(Failure::refused("envelope", "positions of several rows"));
    }
    let list = attribute("inv_freq").and_then(|v| v.as_array());
    let numbers = list.map(|list| list.iter().map(|v| v.as_f64().map(|v| v as f32)).collect());
    let inv_freq: Option<Vec<f32>> = numbers.flatten();
    let body = Angles {
        positions: ports::position(&request.params.inputs, "positions")?,
        inv_freq: inv_freq.ok_or_else(|| Failure::refused("param_missing", "list `inv_freq`"))?,
        scaling: request.number("scaling")? as f32,
    };
    let bytes = 4 * body.inv_freq.len() as u64;
    Ok((Arc::new(body), bytes))
}

/// Cosines and sines of positions times frequencies.
struct Angles {
    positions: usize,
    inv_freq: Vec<f32>,
    scaling: f32,
}

impl Body for Angles {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in given(inputs, self.positions)?.whole()? {
            for f in &self.inv_freq {
                let (s, c) = (*position as f32 * f).sin_cos();
                cos.push(c * self.scaling);
                sin.push(s * self.scaling);
            }
        }
        fill(filled(outputs, 0)?, cos)?;
        fill(filled(outputs, 1)?, sin)
    }
}
