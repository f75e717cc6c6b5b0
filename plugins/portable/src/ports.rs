//! What a call is held to beyond the SDK's `ports`: the contract's rows, the boundary's dtype, wires.

pub use structures_plugin_api::sdk::ports::{
    dims, expect_dims, floats, input, optional, position, required, size,
};
use structures_plugin_api::sdk::{pool, ports, BindRequest, Failure, Tensor, TensorMut};
use structures_plugin_api::DType;

use crate::boundary::Boundary;

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
        self.most.min(pool::ROWS) as usize
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
        let output = ports::output(outputs, position)?;
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
        let output = ports::output(outputs, position)?;
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
        assert_eq!(
            Rows::of(&request).expect("f32").reserved() as u64,
            pool::ROWS
        );
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
