//! Which tensor of a call is which: positions are resolved by name at bind.

use structures_plugin_api::sdk::{BindRequest, Failure, Tensor, TensorMut};
use structures_plugin_api::DType;

use crate::boundary::Boundary;

/// Position of a name in a span's list that a form cannot do without.
pub fn position(names: &[String], name: &str) -> Result<usize, Failure> {
    optional(names, name).ok_or_else(|| {
        Failure::refused(
            "param_missing",
            format!("the span lists {names:?}, not `{name}`"),
        )
    })
}

/// Position of an optional name.
pub fn optional(names: &[String], name: &str) -> Option<usize> {
    names.iter().position(|own| own == name)
}

/// The input at a position, unless it is absent.
pub fn input<'a>(inputs: &[Tensor<'a>], position: Option<usize>) -> Option<Tensor<'a>> {
    position
        .and_then(|position| inputs.get(position))
        .and_then(|tensor| tensor.present())
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
    let same = |(dim, expected): (&i64, &usize)| *dim == *expected as i64;
    let fits = tensor.rank() == expected.len();
    if !(fits && tensor.dims().iter().zip(expected).all(same)) {
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
    let given = request.params.params.get(param);
    let size = given
        .and_then(|value| value.as_u64())
        .map(|size| size as usize);
    size.ok_or_else(|| {
        let text = format!("neither dim `{symbol}` nor a whole number `{param}`");
        Failure::refused("param_missing", text)
    })
}

/// Values in row-major order: borrowed where they lie as f32, else read into `buffer`, which has
/// room for them.
pub fn floats<'b, 'a: 'b>(
    tensor: &Tensor<'a>,
    buffer: &'b mut [f32],
) -> Result<&'b [f32], Failure> {
    match tensor.as_f32() {
        Ok(values) => Ok(values),
        Err(_) => {
            tensor.read_f32(buffer)?;
            Ok(buffer)
        }
    }
}

/// Rows that buffers are reserved for at most: a longer call finds its own room. It keeps a
/// contract without a real limit from asking for all memory.
const RESERVED: u64 = 8192;

/// What the contract says about the rows of every call.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    boundary: Boundary,
    most: u64,
    /// The first input comes as codes.
    coded: bool,
    /// The output this form sends over a wire, by position.
    sent: Option<usize>,
}

impl Rows {
    /// From the contract.
    pub fn of(request: &BindRequest<'_>) -> Result<Self, Failure> {
        Ok(Rows {
            boundary: Boundary::of(request)?,
            most: request.contract.max_rows(),
            coded: false,
            sent: None,
        })
    }

    /// The same for a form whose first input comes as codes.
    pub fn coded(self, coded: bool) -> Self {
        Rows { coded, ..self }
    }

    /// The same for a form that sends the output at a position as codes.
    pub fn sending(self, sent: Option<usize>) -> Self {
        Rows { sent, ..self }
    }

    /// Rows to reserve buffers for; 0 when the contract does not say.
    pub fn reserved(self) -> usize {
        self.most.min(RESERVED) as usize
    }

    /// The boundary's dtype.
    pub fn boundary(self) -> Boundary {
        self.boundary
    }

    /// Rows of this call's first input.
    pub fn admit(self, x: Option<Tensor<'_>>, width: usize) -> Result<usize, Failure> {
        let x = x.ok_or_else(|| Failure::invalid("view_absent", "the input is absent"))?;
        self.check("the input", &x, width, self.coded)?;
        let rows = x.rows();
        if self.most > 0 && rows as u64 > self.most {
            let text = format!("{rows} rows, bound for at most {}", self.most);
            return Err(Failure::refused("form_band", text));
        }
        Ok(rows)
    }

    /// The output at a position, of `rows` x `width`.
    pub fn output<'o, 'a>(
        self,
        outputs: &'o mut [TensorMut<'a>],
        position: usize,
        rows: usize,
        width: usize,
    ) -> Result<&'o mut TensorMut<'a>, Failure> {
        let output = outputs.get_mut(position).ok_or_else(|| {
            Failure::invalid("argument", format!("no output at position {position}"))
        })?;
        let sent = self.sent == Some(position);
        self.check("an output", &output.as_tensor(), width, sent)?;
        if output.rows() != rows {
            let text = format!("an output of dims {:?} for {rows} rows", output.dims());
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        Ok(output)
    }

    /// The output at a position, of exactly these dims.
    pub fn output_of<'o, 'a>(
        self,
        outputs: &'o mut [TensorMut<'a>],
        position: usize,
        dims: &[usize],
    ) -> Result<&'o mut TensorMut<'a>, Failure> {
        let output = outputs.get_mut(position).ok_or_else(|| {
            Failure::invalid("argument", format!("no output at position {position}"))
        })?;
        self.check_dtype("an output", &output.as_tensor())?;
        expect_dims("an output", &output.as_tensor(), dims)?;
        Ok(output)
    }

    /// Whether a tensor is of the boundary's dtype.
    pub fn check_dtype(self, what: &str, tensor: &Tensor<'_>) -> Result<(), Failure> {
        let expected = self.boundary.dtype();
        if tensor.dtype() != Some(expected) {
            let found = tensor.dtype().map_or("absent", |dtype| dtype.name());
            let text = format!("{what} is {found}, bound for {}", expected.name());
            return Err(Failure::invalid("view_dtype", text));
        }
        Ok(())
    }

    fn check(
        self,
        what: &str,
        tensor: &Tensor<'_>,
        width: usize,
        coded: bool,
    ) -> Result<(), Failure> {
        match coded {
            false => self.check_dtype(what, tensor)?,
            true if tensor.dtype() == Some(DType::E4m3) => {}
            true => {
                let found = tensor.dtype().map_or("absent", |dtype| dtype.name());
                let text = format!("{what} is {found}, bound for the wire's e4m3");
                return Err(Failure::invalid("view_dtype", text));
            }
        }
        if tensor.rank() == 0 || tensor.cols() != width {
            let text = format!(
                "{what} of dims {:?}, bound for width {width}",
                tensor.dims()
            );
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use structures_plugin_api::abi::Contract;
    use structures_plugin_api::describe::BindParams;

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
        assert_eq!(floats(&x, &mut []), Ok(&data[..]));
        let turned = x.transpose(0, 1).expect("two axes");
        let mut buffer = [0.0; 6];
        let values = floats(&turned, &mut buffer);
        assert_eq!(values, Ok(&[1.0, 4.0, 2.0, 5.0, 3.0, 6.0][..]));
        let absent = required(&[Tensor::ABSENT], 0).expect_err("absent");
        assert_eq!(absent.code, "view_absent");
    }

    #[test]
    fn a_call_is_held_to_the_contract() {
        let contract = Contract::capacity(DType::F32, 2);
        let request = BindRequest::new("f32", "s", BindParams::default(), &contract);
        let rows = Rows::of(&request).expect("f32");
        let data = [0.0; 12];
        let code = |dims: &[usize], width| {
            let len = dims.iter().product::<usize>();
            let x = Tensor::from_f32(&data[..len], dims).expect("fits");
            rows.admit(Some(x), width).map_err(|failure| failure.code)
        };
        assert_eq!(code(&[2, 3], 3), Ok(2));
        assert_eq!(code(&[1, 1, 3], 3), Ok(1));
        assert_eq!(code(&[4, 3], 3), Err("form_band".into()));
        assert_eq!(code(&[2, 3], 4), Err("dims_inconsistent".into()));
        assert_eq!(rows.reserved(), 2);
        let endless = Contract::capacity(DType::F32, u64::MAX);
        let request = BindRequest::new("f32", "s", BindParams::default(), &endless);
        assert_eq!(Rows::of(&request).expect("f32").reserved() as u64, RESERVED);
        assert_eq!(rows.admit(None, 3).expect_err("absent").code, "view_absent");
        let bits = [0_u16; 3];
        let x = Tensor::from_bf16(&bits, &[1, 3]).expect("fits");
        assert_eq!(rows.admit(Some(x), 3).expect_err("bf16").code, "view_dtype");
        let mut out = [0.0; 6];
        let mut outputs = [TensorMut::from_f32(&mut out, &[2, 3]).expect("fits")];
        assert!(rows.output(&mut outputs, 0, 2, 3).is_ok());
        assert!(rows.output(&mut outputs, 0, 1, 3).is_err());
        assert!(rows.output(&mut outputs, 1, 2, 3).is_err());
    }
}
