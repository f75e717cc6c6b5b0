//! `cadence_static`: what a module gave once, given again; the inputs are ignored.
//!
//! The content of point `y` is bound as a statistic, so a caller must have seen that it does not
//! change within the loop, and must bind anew when it does. Values are kept in f32 and rounded to
//! the boundary dtype, from which they came, at each call. A call of another number of rows has no
//! content here.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::format::Format;
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    content: &["y"],
    ..Leaf::plain("cadence_static", &["content"], bind)
};

struct Content {
    rows: Rows,
    values: Vec<f32>,
    /// Width of a row.
    n: usize,
    output: usize,
}

fn bind(
    _shared: &Shared,
    _format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let values = request.statistic("y", "content", "tensor")?;
    let n = request.dim("N")?;
    if n == 0 || !values.len().is_multiple_of(n) {
        let text = format!("{} values in rows of N {n}", values.len());
        return Err(Failure::refused("dims_inconsistent", text));
    }
    Ok(Box::new(Content {
        rows: Rows::of(request)?,
        values,
        n,
        output: ports::position(&request.params.outputs, "y")?,
    }))
}

impl BoundForm for Content {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: 4 * self.values.len() as u64,
            ..FormFacts::default()
        }
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        _inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let rows = self.values.len() / self.n;
        self.rows
            .output(outputs, self.output, rows, self.n)?
            .write_f32(&self.values)
    }
}
