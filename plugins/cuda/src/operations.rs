//! Operations of a host's graph that run here so that values need not leave the device between two forms.
//!
//! Sums and products of values of one shape, or where one repeats over the leading dims of the other, rows of a table,
//! norms of rows, elements in another order, appends to regions of the state that have their home here, and the choice of
//! the next token; anything else is refused and stays with the host. No call allocates or waits, so all of them may be
//! recorded.

use std::sync::Arc;

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{ports, BindRequest, BoundForm, Failure, Tensor, TensorMut};
use structures_plugin_api::DType;

use crate::context::{Arguments, Buffer, Grid, Kernel, Module};

/// What is declared.
pub const KINDS: &[&str] = &[
    "add",
    "mul",
    "embedding",
    "rms_norm",
    "transpose",
    "contiguous",
    "kv_append",
    "argmax",
];
/// The file of its kernels.
pub const FILE: &str = "operations";

const THREADS: u32 = 256;
/// A row of scores has one block, so that has as many as a block may have.
const CHOOSING: u32 = 1024;
/// Axes that the kernel of copies knows, once those that stay together are one.
const AXES: usize = 5;

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
        "transpose" | "contiguous" => Body::Copy {
            kernel: module.kernel("operation_copy", 0)?,
            x: ports::position(&request.params.inputs, "x")?,
            perm: match kind {
                "transpose" => Some(axes(request)?),
                _ => None,
            },
        },
        "argmax" => Body::Choice {
            kernel: module.kernel("operation_argmax", 0)?,
            x: ports::position(&request.params.inputs, "x")?,
        },
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

/// The order of axes that a transpose asks for.
fn axes(request: &BindRequest<'_>) -> Result<Vec<usize>, Failure> {
    let perm = request.params.params.get("perm").and_then(|v| v.as_array());
    let perm: Option<Vec<usize>> = perm.and_then(|list| {
        let axes = list.iter().map(|axis| axis.as_u64());
        axes.map(|axis| usize::try_from(axis?).ok()).collect()
    });
    let perm = perm.ok_or_else(|| Failure::refused("param_missing", "list `perm`"))?;
    let each = (0..perm.len()).all(|axis| perm.contains(&axis));
    match each {
        true => Ok(perm),
        false => {
            let text = format!("axes {perm:?}, expected each once");
            Err(Failure::refused("operand_dims", text))
        }
    }
}

/// Sizes and strides of the axes by which dense elements of these dims are read in another order: an axis of one is left
/// out, and axes that stay neighbours are one.
fn walk(of: &[u64], perm: &[usize]) -> Vec<(u64, u64)> {
    let stride = |axis: usize| of[axis + 1..].iter().product::<u64>();
    let mut walked: Vec<(u64, u64)> = Vec::with_capacity(perm.len());
    for axis in perm.iter().filter(|axis| of[**axis] != 1) {
        let (size, step) = (of[*axis], stride(*axis));
        match walked.last_mut() {
            Some(before) if before.1 == size * step => *before = (before.0 * size, step),
            _ => walked.push((size, step)),
        }
    }
    walked
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
    Copy {
        kernel: Kernel,
        x: usize,
        /// As it lies without one.
        perm: Option<Vec<usize>>,
    },
    Choice {
        kernel: Kernel,
        x: usize,
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

impl Operation {
    /// Of every row of `x` the index of the first of the largest.
    fn choose(
        &self,
        queue: u64,
        kernel: &Kernel,
        x: &Tensor<'_>,
        y: &Tensor<'_>,
    ) -> Result<(), Failure> {
        let of = dims(x);
        let (width, lead) = of.split_last().map_or((1, &[][..]), |(n, lead)| (*n, lead));
        let rows: u64 = lead.iter().product();
        // An index is told apart from none.
        let width = u32::try_from(width)
            .ok()
            .filter(|n| (1..u32::MAX >> 1).contains(n));
        let blocks = u32::try_from(rows).ok().filter(|n| *n <= i32::MAX as u32);
        let (Some(width), Some(blocks), true) = (width, blocks, dims(y) == lead) else {
            let text = format!("indices {:?} for scores {of:?}", y.dims());
            return Err(Failure::invalid("dims_inconsistent", text));
        };
        if blocks == 0 {
            return Ok(());
        }
        let (from, to) = (self.address(x, DType::F32)?, self.address(y, DType::I64)?);
        let grid = Grid {
            blocks: (blocks, 1),
            threads: CHOOSING,
            shared: 0,
        };
        let arguments = Arguments::default();
        let arguments = arguments.with(&from).with(&width).with(&to);
        // SAFETY: the kernel's arguments; a block reads its row and writes its index, and dims are checked above.
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
            Body::Append { .. } | Body::Copy { .. } | Body::Choice { .. } => 0,
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
        if let Body::Choice { kernel, x } = &self.body {
            let x = ports::required(inputs, *x)?;
            return self.choose(queue, kernel, &x, &output);
        }
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
            Body::Copy { kernel, x, perm } => {
                let tensor = ports::required(inputs, *x)?;
                let (from, of) = (self.address(&tensor, DType::F32)?, dims(&tensor));
                let as_it_lies: Vec<usize> = (0..of.len()).collect();
                let perm = perm.as_deref().unwrap_or(&as_it_lies);
                let turned = |perm: &[usize]| perm.iter().map(|a| of[*a]).collect::<Vec<_>>();
                if perm.len() != of.len() || turned(perm) != shape {
                    let text = format!("dims {shape:?} for axes {perm:?} of {of:?}");
                    return Err(Failure::invalid("dims_inconsistent", text));
                }
                let walked = walk(&of, perm);
                let Some(left) = AXES.checked_sub(walked.len()) else {
                    let text = format!("axes {perm:?} of {of:?}: more than {AXES} that move apart");
                    return Err(Failure::refused("envelope", text));
                };
                let mut axes = [(1, 0); AXES];
                axes[left..].copy_from_slice(&walked);
                let [(_, s0), (n1, s1), (n2, s2), (n3, s3), (n4, s4)] = axes;
                let arguments = Arguments::default().with(&from).with(&y).with(&count);
                let arguments = arguments.with(&n1).with(&n2).with(&n3).with(&n4);
                let arguments = arguments.with(&s0).with(&s1).with(&s2).with(&s3);
                let arguments = arguments.with(&s4);
                let grid = grid(count.div_ceil(u64::from(THREADS)))?;
                // SAFETY: as above; sizes and strides walk every element of the input once.
                unsafe { kernel.context().launch(queue, kernel, grid, arguments) }
            }
            // Done above: these make no f32 output.
            Body::Append { .. } | Body::Choice { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_stay_together_are_one() {
        assert_eq!(walk(&[2, 3, 4], &[0, 1, 2]), [(24, 1)]);
        assert_eq!(walk(&[1, 1, 3, 4], &[0, 2, 1, 3]), [(12, 1)]);
        assert_eq!(
            walk(&[1, 5, 3, 4], &[0, 2, 1, 3]),
            [(3, 4), (5, 12), (4, 1)]
        );
        assert_eq!(walk(&[2, 3, 4, 5], &[2, 3, 0, 1]), [(20, 1), (6, 20)]);
        assert_eq!(walk(&[1, 1], &[1, 0]), []);
    }

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
