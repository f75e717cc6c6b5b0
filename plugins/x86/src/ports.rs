//! What a call is held to beyond the SDK's `ports`: rows in the band, outputs that are written as slices.

pub use structures_plugin_api::sdk::ports::{
    dims, expect_dims, floats, input, optional, position, required, size,
};
use structures_plugin_api::sdk::{pool, ports, BindRequest, Failure, Tensor, TensorMut};

use crate::format::MOST_ROWS;

/// Rows that buffers are reserved for: the contract's, as far as they are known before a call.
pub fn reserved(request: &BindRequest<'_>) -> usize {
    request.contract.max_rows().min(pool::ROWS) as usize
}

/// As [`floats`], of a tensor that is repeated to other dims.
pub fn floats_of<'b, 'a: 'b>(
    tensor: &Tensor<'a>,
    dims: &[i64],
    buffer: &'b mut Vec<f32>,
) -> Result<&'b [f32], Failure> {
    floats(&tensor.broadcast_to(dims)?, buffer)
}

/// Rows of a call's first input, checked against the width and the band.
pub fn rows(x: &Tensor<'_>, width: usize) -> Result<usize, Failure> {
    if x.rank() == 0 || x.cols() != width {
        let text = format!("input of dims {:?}, bound for width {width}", x.dims());
        return Err(Failure::refused("envelope", text));
    }
    match x.rows() {
        rows if (1..=MOST_ROWS).contains(&(rows as u64)) => Ok(rows),
        rows => {
            let text = format!("{rows} rows, the form serves 1..={MOST_ROWS}");
            Err(Failure::refused("form_band", text))
        }
    }
}

/// A call's first input, admitted and read.
pub struct Given<'b, 'a> {
    /// As it came.
    pub tensor: Tensor<'a>,
    /// Its rows.
    pub rows: usize,
    /// Its values, row by row.
    pub values: &'b [f32],
}

/// The input at a position, of rows of `width`: borrowed where it lies so, else read into `copy`.
pub fn given<'b, 'a: 'b>(
    inputs: &[Tensor<'a>],
    position: usize,
    width: usize,
    copy: &'b mut Vec<f32>,
) -> Result<Given<'b, 'a>, Failure> {
    let tensor = required(inputs, position)?;
    Ok(Given {
        rows: rows(&tensor, width)?,
        values: floats(&tensor, copy)?,
        tensor,
    })
}

/// The output at a position, of `rows` x `width`.
pub fn output<'o>(
    outputs: &'o mut [TensorMut<'_>],
    position: usize,
    rows: usize,
    width: usize,
) -> Result<&'o mut [f32], Failure> {
    let output = ports::output(outputs, position)?;
    let (found_rows, found) = (output.rows(), output.cols());
    if (found_rows, found) != (rows, width) {
        let text = format!("output of {found_rows} x {found} for {rows} x {width}");
        return Err(Failure::invalid("dims_inconsistent", text));
    }
    output.as_f32_mut()
}

/// The output at a position, of exactly these dims.
pub fn output_of<'o>(
    outputs: &'o mut [TensorMut<'_>],
    position: usize,
    dims: &[usize],
) -> Result<&'o mut [f32], Failure> {
    let output = ports::output(outputs, position)?;
    expect_dims("an output", &output.as_tensor(), dims)?;
    output.as_f32_mut()
}
