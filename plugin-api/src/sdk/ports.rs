//! Which tensor of a call is which: positions are resolved by name at bind, sizes are compared in a
//! call.
//!
//! It owns the codes such a check answers with (`param_missing`, `view_absent`,
//! `dims_inconsistent`, `argument`), not what a form makes of rows, dtypes and bands.

use crate::sdk::{BindRequest, Failure, Tensor, TensorMut};

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

/// Room for values that do not lie as they are needed; see [`floats`].
pub trait Room<'b> {
    /// Exactly what was lent, or made as long as is asked for.
    fn of(self, len: usize) -> &'b mut [f32];
}

impl<'b> Room<'b> for &'b mut [f32] {
    fn of(self, _len: usize) -> &'b mut [f32] {
        self
    }
}

impl<'b> Room<'b> for &'b mut Vec<f32> {
    fn of(self, len: usize) -> &'b mut [f32] {
        self.resize(len, 0.0);
        self
    }
}

/// Values in row-major order: borrowed where they lie so as f32, else read into `room`: a slice as
/// long as the tensor, or a vector, which grows only then.
pub fn floats<'b, 'a: 'b>(tensor: &Tensor<'a>, room: impl Room<'b>) -> Result<&'b [f32], Failure> {
    if let Ok(values) = tensor.as_f32() {
        return Ok(values);
    }
    let room = room.of(tensor.len());
    tensor.read_f32(room)?;
    Ok(room)
}

/// The output at a position: else `argument`.
pub fn output<'o, 'a>(
    outputs: &'o mut [TensorMut<'a>],
    position: usize,
) -> Result<&'o mut TensorMut<'a>, Failure> {
    outputs
        .get_mut(position)
        .ok_or_else(|| Failure::invalid("argument", format!("no output at position {position}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Contract, DType};
    use crate::describe::BindParams;

    #[test]
    fn names_become_positions() {
        let names = ["x".to_string(), "residual".to_string()];
        assert_eq!(position(&names, "residual"), Ok(1));
        assert_eq!(
            position(&names, "y").expect_err("not listed").code,
            "param_missing"
        );
        let x = [1.0];
        let inputs = [Tensor::from_f32(&x, &[1]).expect("fits"), Tensor::ABSENT];
        assert!(input(&inputs, Some(0)).is_some());
        assert!(input(&inputs, Some(1)).is_none() && input(&inputs, Some(2)).is_none());
        assert!(input(&inputs, None).is_none());
    }

    #[test]
    fn dims_are_compared_and_values_borrowed_where_they_can_be() {
        let data = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let x = Tensor::from_f32(&data, &[2, 3]).expect("fits");
        assert_eq!(dims("x", &x), Ok([2, 3]));
        assert!(dims::<3>("x", &x).is_err());
        assert!(expect_dims("x", &x, &[2, 3]).is_ok());
        for other in [&[2, 4][..], &[2], &[3, 2], &[1, 2, 3]] {
            let failure = expect_dims("x", &x, other).expect_err("other dims");
            assert_eq!(failure.code, "dims_inconsistent");
        }
        assert_eq!(floats(&x, &mut [][..]), Ok(&data[..]));
        let turned = x.transpose(0, 1).expect("two axes");
        let mut buffer = [0.0; 6];
        let expected = [1.0, 4.0, 2.0, 5.0, 3.0, 6.0];
        assert_eq!(floats(&turned, &mut buffer[..]), Ok(&expected[..]));
        assert!(floats(&turned, &mut buffer[..5]).is_err());
        let mut grows = Vec::new();
        assert_eq!(floats(&x, &mut grows), Ok(&data[..]));
        assert!(grows.is_empty());
        assert_eq!(floats(&turned, &mut grows), Ok(&expected[..]));
        let absent = required(&[Tensor::ABSENT], 0).expect_err("absent");
        assert_eq!(absent.code, "view_absent");
    }

    #[test]
    fn a_size_is_a_symbols_or_a_params() {
        let contract = Contract::capacity(DType::F32, 1);
        let mut params = BindParams::default();
        params.dims.insert("D".into(), 4);
        params.params.insert("head_dim".into(), 8.into());
        params.params.insert("text".into(), "8".into());
        let request = BindRequest::new("f", "s", params, &contract);
        assert_eq!(size(&request, "D", "head_dim"), Ok(4));
        assert_eq!(size(&request, "Hq", "head_dim"), Ok(8));
        for param in ["text", "nothing"] {
            let failure = size(&request, "Hq", param).expect_err("neither");
            assert_eq!(failure.code, "param_missing");
        }
    }

    #[test]
    fn an_output_is_there_or_the_call_is_wrong() {
        let mut out = [0.0; 2];
        let mut outputs = [TensorMut::from_f32(&mut out, &[2]).expect("fits")];
        assert!(output(&mut outputs, 0).is_ok());
        let failure = output(&mut outputs, 1).expect_err("one output");
        assert_eq!(failure.code, "argument");
    }
}
