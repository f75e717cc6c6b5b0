//! What was seen at a point besides its values: rows of each call, width, dtypes. Scalars, never reduced by a
//! percentile.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::median;

/// Rows, width and dtypes seen at one point.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observation {
    /// Rows of each call, ascending.
    pub rows: Vec<u64>,
    /// Last dim of the first call; absent for a tensor without dims.
    pub width: Option<u64>,
    /// Dtypes seen.
    pub dtypes: BTreeSet<String>,
}

impl Observation {
    /// Takes one call in. Rows are the product of all dims but the last; a tensor without dims is one row.
    pub fn record(&mut self, shape: &[usize], dtype: &str) {
        let (width, lead) = match shape.split_last() {
            Some((width, lead)) => (Some(*width as u64), lead),
            None => (None, shape),
        };
        let rows = lead.iter().map(|d| *d as u64).product();
        let place = self.rows.partition_point(|r| *r <= rows);
        self.rows.insert(place, rows);
        self.width = self.width.or(width);
        self.dtypes.insert(dtype.to_string());
    }

    /// Median of the rows, the mean of the two middle ones when their number is even.
    pub fn median_rows(&self) -> Option<f64> {
        median(&self.rows.iter().map(|r| *r as f64).collect::<Vec<_>>())
    }

    /// Most rows seen in one call.
    pub fn max_rows(&self) -> Option<u64> {
        self.rows.last().copied()
    }

    /// The row profile for a message: `1 x32, 96 x1`.
    pub fn row_note(&self) -> String {
        let mut parts: Vec<(u64, usize)> = Vec::new();
        for row in &self.rows {
            match parts.last_mut() {
                Some((value, count)) if value == row => *count += 1,
                _ => parts.push((*row, 1)),
            }
        }
        match parts.len() {
            0 => "rows never observed".into(),
            _ => parts
                .iter()
                .map(|(r, n)| format!("{r} x{n}"))
                .collect::<Vec<_>>()
                .join(", "),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_064_rows_are_the_leading_dims() {
        let mut seen = Observation::default();
        seen.record(&[], "f32");
        assert_eq!(seen.width, None);
        for shape in [[2usize, 48, 64], [1, 1, 64], [1, 1, 80]] {
            seen.record(&shape, "f32");
        }
        assert_eq!(seen.rows, [1, 1, 1, 96]);
        assert_eq!(seen.width, Some(64));
        assert_eq!(seen.median_rows(), Some(1.0));
        assert_eq!(seen.max_rows(), Some(96));
        assert_eq!(seen.row_note(), "1 x3, 96 x1");
        seen.record(&[64], "bf16");
        assert_eq!(seen.dtypes.len(), 2);
        assert_eq!(Observation::default().row_note(), "rows never observed");
        assert_eq!(Observation::default().median_rows(), None);
    }
}
