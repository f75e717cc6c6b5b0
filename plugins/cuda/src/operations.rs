//! Operations of a host's graph that run here so that values need not leave the device between two forms.
//!
//! Sums and products of values of one shape, or where one repeats over the leading dims of the other, rows of a table,
//! norms of rows, and appends to regions of the state that have their home here; anything else is refused and stays with
//! the host. No call allocates or waits, so all of them may be recorded.

use std::sync::Arc;

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{ports, BindRequest, BoundForm, Failure, Tensor, TensorMut};
use structures_plugin_api::DType;

use crate::context::{Arguments, Buffer, Grid, Kernel, Module};

/// What is declared.
pub const KINDS: &[&str] = &["add", "mul", "embedding", "rms_norm", "kv_append"];
/// The file of its kernels.
pub const FILE: &str = "operations";

const THREADS: u32 = 256;

/// Binds one of [`KINDS`].
///
/// # Errors
/// `form_unknown`; those of memory and of a request that lacks a part.
pub fn bind(
    module: &Arc<Module>,
    kind: &str,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    if request.boundary()? != DType::F32 {
        let text = "host operations are f32 here";
        return Err(Failure::refused("boundary_dtype", text));
    }
    let operand = |name: &str| match request.weight(name) {
        Some(stored) => Ok(Operand::Stored(upload(module, &stored)?, dims(&stored))),
        None => ports::position(&request.params.inputs, name).map(Operand::Given),
    };
    let body = match kind {
        "add" | "mul" => Body::Pair {
            kernel: module.kernel("operation_pair", 0)?,
            kind: u32::from(kind == "mul"),
            operands: [operand("a")?, operand("b")?],
        },
        "embedding" => {
            let table = request.required_weight("w")?;
            let [rows, width] = dims(&table)[..] else {
                let text = format!("a table of dims {:?}", table.dims());
                return Err(Failure::invalid("dims_inconsistent", text));
            };
            Body::Rows {
                kernel: module.kernel("operation_rows", 0)?,
                ids: ports::position(&request.params.inputs, "ids")?,
                rows,
                width: u32::try_from(width)
                    .map_err(|_| Failure::refused("envelope", format!("rows of {width}")))?,
                table: upload(module, &table)?,
            }
        }
        "rms_norm" => {
            if request.number("axes")? != 1.0 {
                return Err(Failure::refused("envelope", "norms over several axes"));
            }
            let weight = request.params.params.get("weight");
            let add = match weight.and_then(|w| w.as_str()) == Some("offset") {
                true => 1.0_f32,
                false => 0.0,
            };
            let scale = match request.weight("w") {
                Some(w) => {
                    let values = w.to_f32_vec()?.into_iter().map(|w| w + add);
                    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
                    Some(module.context().upload(&bytes)?)
                }
                None => None,
            };
            Body::Norm {
                kernel: module.kernel("operation_rms_norm", 0)?,
                x: ports::position(&request.params.inputs, "x")?,
                eps: request.number("eps")? as f32,
                scale,
            }
        }
        "kv_append" => Body::Append {
            kernel: module.kernel("operation_append", 0)?,
            x: ports::position(&request.params.inputs, "x")?,
            valid: ports::position(&request.params.inputs, "kv_len")?,
            region: ports::position(&request.params.states, "region")?,
        },
        _ => {
            let text = format!("host operation `{kind}` is not executed here");
            return Err(Failure::refused("form_unknown", text));
        }
    };
    Ok(Box::new(Operation {
        device: request.device,
        body,
    }))
}

fn dims(tensor: &Tensor<'_>) -> Vec<u64> {
    tensor.dims().iter().map(|n| *n as u64).collect()
}

fn upload(module: &Arc<Module>, tensor: &Tensor<'_>) -> Result<Buffer, Failure> {
    let values = tensor.to_f32_vec()?.into_iter();
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    module.context().upload(&bytes)
}

/// An operand: given in a call, or a parameter.
enum Operand {
    Given(usize),
    Stored(Buffer, Vec<u64>),
}

enum Body {
    Pair {
        kernel: Kernel,
        kind: u32,
        operands: [Operand; 2],
    },
    Norm {
        kernel: Kernel,
        x: usize,
        eps: f32,
        scale: Option<Buffer>,
    },
    Rows {
        kernel: Kernel,
        ids: usize,
        table: Buffer,
        rows: u64,
        width: u32,
    },
    Append {
        kernel: Kernel,
        x: usize,
        valid: usize,
        region: usize,
    },
}

struct Operation {
    device: u32,
    body: Body,
}

impl Operation {
    /// Address of a tensor of this device.
    fn address(&self, tensor: &Tensor<'_>, dtype: DType) -> Result<u64, Failure> {
        if tensor.dtype() != Some(dtype) {
            let found = tensor.dtype().map_or("absent", |found| found.name());
            let text = format!("a tensor is {found}, expected {}", dtype.name());
            return Err(Failure::invalid("view_dtype", text));
        }
        if !tensor.is_contiguous() {
            let text = format!("strides {:?} of dims {:?}", tensor.strides(), tensor.dims());
            return Err(Failure::invalid("view_layout", text));
        }
        let address = tensor.device_address();
        address
            .filter(|_| tensor.device() == self.device)
            .ok_or_else(|| {
                let text = format!("device {}, bound on {}", tensor.device(), self.device);
                Failure::invalid("view_device", text)
            })
    }
}

impl Operation {
    /// `x [B, heads, T, D]` as the last of the valid positions of a region `[B, heads, room, D]`.
    fn append(
        &self,
        queue: u64,
        kernel: &Kernel,
        x: &Tensor<'_>,
        valid: &Tensor<'_>,
        region: &Tensor<'_>,
    ) -> Result<(), Failure> {
        let (of, to) = (dims(x), dims(region));
        let (&[b, h, rows, width], &[rb, rh, room, rw]) = (of.as_slice(), to.as_slice()) else {
            let text = format!("x {of:?} for a region {to:?}");
            return Err(Failure::invalid("dims_inconsistent", text));
        };
        if (b, h, width) != (rb, rh, rw) || rows > room || valid.len() != 1 {
            let text = format!("x {of:?} for a region {to:?}");
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        let count: u64 = of.iter().product();
        if count == 0 {
            return Ok(());
        }
        let (from, length) = (
            self.address(x, DType::F32)?,
            self.address(valid, DType::I64)?,
        );
        let region = self.address(region, DType::F32)?;
        let blocks = u32::try_from(count.div_ceil(u64::from(THREADS)));
        let blocks = blocks.ok().filter(|n| *n <= i32::MAX as u32);
        let Some(blocks) = blocks else {
            return Err(Failure::refused("envelope", format!("{count} elements")));
        };
        let grid = Grid {
            blocks: (blocks, 1),
            threads: THREADS,
            shared: 0,
        };
        let arguments = Arguments::default();
        let arguments = arguments.with(&from).with(&length).with(&region);
        let arguments = arguments.with(&rows).with(&width).with(&room).with(&count);
        // SAFETY: the kernel's arguments; dims are checked above, and a length that does not fit writes nothing.
        unsafe { kernel.context().launch(queue, kernel, grid, arguments) }
    }
}

/// Elements of an operand that repeats over the leading dims of the result.
fn repeated(of: &[u64], to: &[u64]) -> Result<u64, Failure> {
    let lead = of.iter().take_while(|n| **n == 1).count();
    if of.len() > to.len() || !to.ends_with(&of[lead..]) {
        let text = format!("dims {of:?} do not repeat over the leading dims of {to:?}");
        return Err(Failure::refused("operand_dims", text));
    }
    Ok(of.iter().product())
}

impl BoundForm for Operation {
    fn facts(&self) -> FormFacts {
        let packed_bytes = match &self.body {
            Body::Pair { operands, .. } => operands
                .iter()
                .map(|o| match o {
                    Operand::Given(_) => 0,
                    Operand::Stored(buffer, _) => buffer.bytes(),
                })
                .sum(),
            Body::Norm { scale, .. } => scale.as_ref().map_or(0, Buffer::bytes),
            Body::Rows { table, .. } => table.bytes(),
            Body::Append { .. } => 0,
        };
        FormFacts {
            packed_bytes,
            ..FormFacts::default()
        }
    }

    fn call(
        &mut self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let queue = ctx.queue.addr() as u64;
        if let Body::Append {
            kernel,
            x,
            valid,
            region,
        } = &self.body
        {
            let x = ports::required(inputs, *x)?;
            let valid = ports::required(inputs, *valid)?;
            let region = ports::output(states, *region)?.as_tensor();
            return self.append(queue, kernel, &x, &valid, &region);
        }
        let output = ports::output(outputs, 0)?.as_tensor();
        let (y, shape) = (self.address(&output, DType::F32)?, dims(&output));
        let count: u64 = shape.iter().product();
        if count == 0 {
            return Ok(());
        }
        let grid = |blocks: u64| match u32::try_from(blocks) {
            Ok(blocks) if blocks <= i32::MAX as u32 => Ok(Grid {
                blocks: (blocks, 1),
                threads: THREADS,
                shared: 0,
            }),
            _ => Err(Failure::refused("envelope", format!("{count} elements"))),
        };
        match &self.body {
            Body::Pair {
                kernel,
                kind,
                operands,
            } => {
                let read = |operand: &Operand| -> Result<(u64, u64), Failure> {
                    match operand {
                        Operand::Stored(buffer, dims) => {
                            Ok((buffer.address(), repeated(dims, &shape)?))
                        }
                        Operand::Given(at) => {
                            let tensor = ports::required(inputs, *at)?;
                            let count = repeated(&dims(&tensor), &shape)?;
                            Ok((self.address(&tensor, DType::F32)?, count))
                        }
                    }
                };
                let ((a, a_count), (b, b_count)) = (read(&operands[0])?, read(&operands[1])?);
                let arguments = Arguments::default();
                let arguments = arguments.with(&a).with(&a_count).with(&b).with(&b_count);
                let arguments = arguments.with(&y).with(&count).with(kind);
                let grid = grid(count.div_ceil(u64::from(THREADS)))?;
                // SAFETY: the kernel's arguments; operands and result are checked above and borrowed by the host until
                // the queue is done.
                unsafe { kernel.context().launch(queue, kernel, grid, arguments) }
            }
            Body::Norm {
                kernel,
                x,
                eps,
                scale,
            } => {
                let tensor = ports::required(inputs, *x)?;
                let (from, width) = (self.address(&tensor, DType::F32)?, tensor.cols() as u64);
                let fits = scale.as_ref().is_none_or(|w| w.bytes() == 4 * width);
                let Some(width) = u32::try_from(width).ok().filter(|n| fits && *n > 0) else {
                    let text = format!("rows of {width}");
                    return Err(Failure::invalid("dims_inconsistent", text));
                };
                if dims(&tensor) != shape {
                    let text = format!("dims {shape:?} for {:?}", tensor.dims());
                    return Err(Failure::invalid("dims_inconsistent", text));
                }
                let w = scale.as_ref().map_or(0, Buffer::address);
                let arguments = Arguments::default();
                let arguments = arguments.with(&from).with(&w).with(eps);
                let arguments = arguments.with(&y).with(&width);
                let grid = grid(tensor.rows() as u64)?;
                // SAFETY: as above; the scale has a row's width.
                unsafe { kernel.context().launch(queue, kernel, grid, arguments) }
            }
            Body::Rows {
                kernel,
                ids,
                table,
                rows,
                width,
            } => {
                let ids = ports::required(inputs, *ids)?;
                if ids.len() as u64 * u64::from(*width) != count {
                    let text = format!("dims {shape:?} for {} rows of {width}", ids.len());
                    return Err(Failure::invalid("dims_inconsistent", text));
                }
                let (from, address) = (table.address(), self.address(&ids, DType::I64)?);
                let arguments = Arguments::default();
                let arguments = arguments.with(&address).with(&from).with(rows);
                let arguments = arguments.with(&y).with(width);
                let grid = grid(ids.len() as u64)?;
                // SAFETY: as above; a row that is not in the table is not read.
                unsafe { kernel.context().launch(queue, kernel, grid, arguments) }
            }
            // Done above: it makes no output.
            Body::Append { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_repeats_over_leading_dims_is_taken_and_nothing_else() {
        let code = |of: &[u64]| repeated(of, &[2, 4, 8]).map_err(|f| f.code);
        assert_eq!(code(&[2, 4, 8]), Ok(64));
        assert_eq!(code(&[8]), Ok(8));
        assert_eq!(code(&[1, 4, 8]), Ok(32));
        assert_eq!(code(&[]), Ok(1));
        for of in [&[4, 1][..], &[2, 1, 8], &[4], &[1, 2, 4, 8]] {
            assert_eq!(code(of), Err("operand_dims".into()), "{of:?}");
        }
    }
}
