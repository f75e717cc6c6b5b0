//! Which tensor of a call is which: positions are resolved by name at bind.

use structures_plugin_api::sdk::{BindRequest, Failure, Tensor, TensorMut};

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

/// Rows that buffers are reserved for at most: a longer call finds its own room. It keeps a
/// contract without a real limit from asking for all memory.
const RESERVED: u64 = 8192;

/// What the contract says about the rows of every call.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    boundary: Boundary,
    most: u64,
}

impl Rows {
    /// From the contract.
    pub fn of(request: &BindRequest<'_>) -> Result<Self, Failure> {
        Ok(Rows {
            boundary: Boundary::of(request)?,
            most: request.contract.max_rows(),
        })
    }

    /// Rows to reserve buffers for; 0 when the contract does not say.
    pub fn reserved(self) -> usize {
        self.most.min(RESERVED) as usize
    }

    /// Rows of this call's first input.
    pub fn admit(self, x: Option<Tensor<'_>>, width: usize) -> Result<usize, Failure> {
        let x = x.ok_or_else(|| Failure::invalid("view_absent", "the input is absent"))?;
        self.check("the input", &x, width)?;
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
        self.check("an output", &output.as_tensor(), width)?;
        if output.rows() != rows {
            let text = format!("an output of dims {:?} for {rows} rows", output.dims());
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        Ok(output)
    }

    fn check(self, what: &str, tensor: &Tensor<'_>, width: usize) -> Result<(), Failure> {
        let expected = self.boundary.dtype();
        if tensor.dtype() != Some(expected) {
            let found = tensor.dtype().map_or("absent", |dtype| dtype.name());
            let text = format!("{what} is {found}, bound for {}", expected.name());
            return Err(Failure::invalid("view_dtype", text));
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
    use structures_plugin_api::DType;

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
