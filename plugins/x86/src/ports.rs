//! Which tensor of a call is which: positions are resolved by name at bind; shapes and rows are checked in a call.

use structures_plugin_api::abi::MAX_RANK;
use structures_plugin_api::sdk::{BindRequest, Failure, Tensor, TensorMut};

use crate::format::MOST_ROWS;

/// Position of a name in a span's list that a form cannot do without.
pub fn position(names: &[String], name: &str) -> Result<usize, Failure> {
    optional(names, name).ok_or_else(|| {
        let text = format!("the span lists {names:?}, not `{name}`");
        Failure::refused("param_missing", text)
    })
}

/// Position of an optional name.
pub fn optional(names: &[String], name: &str) -> Option<usize> {
    names.iter().position(|own| own == name)
}

/// The input at a position, unless it is absent.
pub fn input<'a>(inputs: &[Tensor<'a>], position: Option<usize>) -> Option<Tensor<'a>> {
    inputs.get(position?)?.present()
}

/// The input at a position that a call cannot do without.
pub fn required<'a>(inputs: &[Tensor<'a>], position: usize) -> Result<Tensor<'a>, Failure> {
    input(inputs, Some(position)).ok_or_else(|| {
        let text = format!("the input at position {position} is absent");
        Failure::invalid("view_absent", text)
    })
}

/// Dims of a tensor of a certain rank.
pub fn dims<const N: usize>(what: &str, tensor: &Tensor<'_>) -> Result<[usize; N], Failure> {
    let sizes: Vec<usize> = tensor.dims().iter().map(|dim| *dim as usize).collect();
    sizes.try_into().map_err(|found: Vec<usize>| {
        let text = format!("{what} of dims {found:?}, expected rank {N}");
        Failure::invalid("dims_inconsistent", text)
    })
}

/// Compares the dims of a tensor.
pub fn expect_dims(what: &str, tensor: &Tensor<'_>, expected: &[usize]) -> Result<(), Failure> {
    let same = tensor
        .dims()
        .iter()
        .map(|d| *d as usize)
        .eq(expected.iter().copied());
    if !same {
        let text = format!("{what} of dims {:?}, expected {expected:?}", tensor.dims());
        return Err(Failure::invalid("dims_inconsistent", text));
    }
    Ok(())
}

/// A size that a symbol has, or a param that stands for it.
pub fn size(request: &BindRequest<'_>, symbol: &str, param: &str) -> Result<usize, Failure> {
    if let Ok(size) = request.dim(symbol) {
        return Ok(size);
    }
    let given = request.params.params.get(param).and_then(|v| v.as_u64());
    given.map(|size| size as usize).ok_or_else(|| {
        let text = format!("neither dim `{symbol}` nor a whole number `{param}`");
        Failure::refused("param_missing", text)
    })
}

/// Rows that buffers are reserved for: the contract's, as far as a call may have them.
pub fn reserved(request: &BindRequest<'_>) -> usize {
    // A contract without a real limit must not ask for all memory.
    request.contract.max_rows().min(8192) as usize
}

/// Values in row-major order: borrowed where they lie so, else read into `buffer`.
pub fn floats<'b, 'a: 'b>(
    tensor: &Tensor<'a>,
    buffer: &'b mut Vec<f32>,
) -> Result<&'b [f32], Failure> {
    if let Ok(values) = tensor.as_f32() {
        return Ok(values);
    }
    buffer.resize(tensor.len(), 0.0);
    tensor.read_f32(buffer)?;
    Ok(buffer)
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

/// The output at a position, of `rows` x `width`.
pub fn output<'o>(
    outputs: &'o mut [TensorMut<'_>],
    position: usize,
    rows: usize,
    width: usize,
) -> Result<&'o mut [f32], Failure> {
    let missing = || Failure::invalid("argument", format!("no output at position {position}"));
    let output = outputs.get_mut(position).ok_or_else(missing)?;
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
    let missing = || Failure::invalid("argument", format!("no output at position {position}"));
    let output = outputs.get_mut(position).ok_or_else(missing)?;
    expect_dims("an output", &output.as_tensor(), dims)?;
    output.as_f32_mut()
}

/// Which row of a smaller tensor belongs to each row of a larger one: leading dims align from the first (`[B, D]` meets
/// `[B, M, D]` as `[B, 1, D]`), a missing dim or one of size 1 repeats, and a single row serves all.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    axes: usize,
    dims: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
}

impl Spread {
    /// The last dim of either is within a row.
    pub fn of(what: &str, narrow: &Tensor<'_>, wide: &Tensor<'_>) -> Result<Self, Failure> {
        let own = &narrow.dims()[..narrow.rank().saturating_sub(1)];
        let lead = &wide.dims()[..wide.rank().saturating_sub(1)];
        let mut spread = Spread {
            axes: lead.len(),
            dims: [1; MAX_RANK],
            strides: [0; MAX_RANK],
        };
        for (to, dim) in spread.dims.iter_mut().zip(lead) {
            *to = *dim as usize;
        }
        if own.iter().all(|dim| *dim == 1) {
            return Ok(spread);
        }
        let fits = |(own, dim): (&i64, &i64)| *own == *dim || *own == 1;
        if own.len() > lead.len() || !own.iter().zip(lead).all(fits) {
            let (narrow, wide) = (narrow.dims(), wide.dims());
            let text = format!("{what} of dims {narrow:?} for rows of {wide:?}");
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        let mut step = 1;
        for (axis, dim) in own.iter().enumerate().rev() {
            if *dim > 1 {
                spread.strides[axis] = step;
            }
            step *= *dim as usize;
        }
        Ok(spread)
    }

    /// The row of the smaller tensor.
    pub fn row(&self, row: usize) -> usize {
        let (mut rest, mut found) = (row, 0);
        for axis in (0..self.axes).rev() {
            found += rest % self.dims[axis] * self.strides[axis];
            rest /= self.dims[axis];
        }
        found
    }
}
