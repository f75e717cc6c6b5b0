//! The structures this backend executes, one file each, and what every bound form has in common: checks of a call,
//! rows in blocks that fit the scratch, and the ladder.
//!
//! A ladder is resolved once, at bind: each rung is launched at the bound rows on seeded inputs and compared with the
//! plain one; the first that runs and agrees is kept, what fell through is logged. A call looks nothing up. A parameter
//! `rung` of a bind names the only one to try, for who measures them one by one.

mod decoder_ffn;
mod linear_proj;
mod norm_fused;
mod projection;
mod qkv_pack;

use std::sync::Arc;

use structures_plugin_api::abi::{CallCtx, FormFacts, LogLevel};
use structures_plugin_api::describe::{FormDecl, WIRE_FP8_E4M3};
use structures_plugin_api::formats::{bf16_to_f32, f32_to_bf16, f32_to_e4m3_saturating};
use structures_plugin_api::sdk::{
    ports, BindRequest, BoundForm, Device, Failure, Host, Tensor, TensorMut,
};
use structures_plugin_api::DType;

use crate::context::{Arguments, Buffer, Context, Grid, Kernel, Module};
use crate::format::Format;
use crate::kernels::target;
use crate::lt::Lt;
use crate::product::{Product, Rung};

/// Rows that scratch is kept for at most; a longer call goes in blocks of as many.
const BLOCK_ROWS: u64 = 4096;
/// Rows that are compared with the plain rung: enough that the larger tile is the one that runs.
const COMPARED_ROWS: u64 = 48;
/// Largest relative L2 distance of a rung from the plain one, for other orders of summing; the form's own tolerance where
/// that is larger.
const AGREES: f64 = 1e-2;

/// What a structure's file says about it.
pub struct Leaf {
    /// Name in the catalog; the file of its kernels.
    pub structure: &'static str,
    /// Declarations, one a form.
    pub declare: fn() -> Vec<FormDecl>,
    bind: fn(&Site<'_>) -> Result<Box<dyn Body>, Failure>,
}

/// Every structure.
pub const LEAVES: &[&Leaf] = &[
    &linear_proj::LEAF,
    &qkv_pack::LEAF,
    &decoder_ffn::LEAF,
    &norm_fused::LEAF,
];

/// What a structure's file binds with.
pub struct Site<'s> {
    /// The request.
    pub request: &'s BindRequest<'s>,
    /// The structure's kernels, loaded.
    pub module: &'s Arc<Module>,
    /// cublasLt on this device, opened when it is first asked for.
    pub library: &'s dyn Fn() -> Result<Arc<Lt>, Failure>,
    /// The host.
    pub host: &'s Host,
    /// Boundary dtype.
    pub dtype: DType,
    /// Rows scratch is made for.
    pub rows: u64,
}

impl Site<'_> {
    /// The format a form's name stands for, among those its structure offers.
    pub fn format(&self, offered: &[Format]) -> Result<Format, Failure> {
        let name = self.request.form;
        let found = offered.iter().find(|format| format.name() == name);
        found.copied().ok_or_else(|| {
            let text = format!("no form `{name}` of `{}`", self.request.params.structure);
            Failure::refused("form_unknown", text)
        })
    }

    /// Where an input or output stands in a call.
    pub fn port(&self, names: &[String], name: &str, width: u32) -> Result<Port, Failure> {
        Ok(Port {
            position: ports::position(names, name)?,
            width,
            optional: false,
            wired: wired(self.request, name)?,
        })
    }

    /// A weight of `dims` as f32 on the device.
    pub fn floats(&self, slot: &str, dims: &[usize], add: f32) -> Result<Buffer, Failure> {
        let values = self.request.weight_of_dims(slot, dims)?.to_f32_vec()?;
        self.upload(values.iter().map(|v| v + add))
    }

    /// f32 on the device.
    pub fn upload(&self, values: impl Iterator<Item = f32>) -> Result<Buffer, Failure> {
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        self.module.context().upload(&bytes)
    }
}

/// One tensor of a call.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    position: usize,
    width: u32,
    optional: bool,
    /// It passes as E4M3 codes.
    pub wired: bool,
}

impl Port {
    fn dtype(&self, boundary: DType) -> DType {
        match self.wired {
            true => DType::E4m3,
            false => boundary,
        }
    }

    /// The same, may be absent.
    pub fn optional(self) -> Self {
        Port {
            optional: true,
            ..self
        }
    }
}

/// A block of rows of a call, as addresses.
#[derive(Clone, Debug)]
pub struct Block {
    /// The queue.
    pub queue: u64,
    /// Rows.
    pub rows: u32,
    /// Boundary dtype, as kernels know it.
    pub dtype: u32,
    /// Addresses in the order of [`Body::inputs`]; 0 for an absent one.
    pub inputs: Vec<u64>,
    /// Addresses in the order of [`Body::outputs`].
    pub outputs: Vec<u64>,
}

/// What parts of the scratch are aligned to.
pub const STEP: u64 = 256;

/// A structure bound to its weights: launches, and nothing else.
pub trait Body: Send {
    /// What it reads; the first one counts the rows.
    fn inputs(&self) -> &[Port];
    /// What it fills.
    fn outputs(&self) -> &[Port];
    /// The ladder, best first.
    fn ladder(&self) -> &'static [Rung];
    /// Bytes of weights on the device.
    fn weight_bytes(&self) -> u64;
    /// Bytes of scratch a block of rows takes.
    fn scratch_bytes(&self, rows: u64) -> u64;
    /// Launches everything for a block of rows. `scratch` is a multiple of [`STEP`].
    ///
    /// # Safety
    /// The addresses cover `rows` rows of the ports' widths, and the scratch what [`Body::scratch_bytes`] says, on this
    /// device until the queue is done.
    unsafe fn run(&self, rung: Rung, block: &Block, scratch: u64) -> Result<(), Failure>;
}

/// Binds the form that a request names.
///
/// # Errors
/// `form_unknown`, the declaration's, and those of packing, memory and the ladder.
pub fn bind(
    host: &Host,
    module: impl FnOnce(&str) -> Result<Arc<Module>, Failure>,
    library: &dyn Fn() -> Result<Arc<Lt>, Failure>,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let (leaf, decl) = found(&request.params.structure, request.form)?;
    request.admitted_by(&decl)?;
    let module = module(leaf.structure)?;
    let most = match request.contract.max_rows() {
        0 => BLOCK_ROWS,
        rows => rows,
    };
    let rows = match decl.band.rows {
        Some([_, last]) => last,
        None => most.min(BLOCK_ROWS),
    };
    let site = Site {
        request,
        module: &module,
        library,
        host,
        dtype: request.boundary()?,
        rows,
    };
    let context = Arc::clone(module.context());
    let body = (leaf.bind)(&site)?;
    context.scratch_at_least(body.scratch_bytes(rows))?;
    let name = format!("{} {}", leaf.structure, request.form);
    let asked = request
        .params
        .params
        .get("rung")
        .and_then(|rung| rung.as_str());
    let rung = climb(
        host,
        &context,
        &*body,
        (site.dtype, rows.min(most)),
        decl.tolerance.max(AGREES),
        &name,
        asked,
    )?;
    Ok(Box::new(Bound {
        context,
        dtype: site.dtype,
        device: request.device,
        block_rows: rows,
        most: decl.band.rows.map(|[_, last]| last),
        body,
        rung,
    }))
}

/// The file and the declaration of a form.
///
/// # Errors
/// `form_unknown`.
pub fn found(structure: &str, form: &str) -> Result<(&'static Leaf, FormDecl), Failure> {
    let leaf = LEAVES.iter().find(|leaf| leaf.structure == structure);
    let decl = leaf.and_then(|leaf| (leaf.declare)().into_iter().find(|d| d.name == form));
    leaf.copied().zip(decl).ok_or_else(|| {
        Failure::refused("form_unknown", format!("no form `{form}` of `{structure}`"))
    })
}

/// A bound form.
struct Bound {
    context: Arc<Context>,
    dtype: DType,
    device: u32,
    block_rows: u64,
    most: Option<u64>,
    body: Box<dyn Body>,
    rung: Rung,
}

impl BoundForm for Bound {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: self.body.weight_bytes(),
            scratch_bytes: self.body.scratch_bytes(self.block_rows),
            workspace_bytes: 0,
        }
    }

    fn call(
        &mut self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let mut given = Vec::with_capacity(inputs.len());
        let mut rows = None;
        for port in self.body.inputs() {
            let tensor = inputs.get(port.position).copied().and_then(Tensor::present);
            given.push(self.address(port, tensor, &mut rows)?);
        }
        let mut made = Vec::with_capacity(outputs.len());
        for port in self.body.outputs() {
            let tensor = outputs.get(port.position).map(TensorMut::as_tensor);
            made.push(self.address(port, tensor.and_then(Tensor::present), &mut rows)?);
        }
        let rows = rows.unwrap_or(0);
        if let Some(most) = self.most.filter(|most| rows > *most) {
            let text = format!("{rows} rows, the form serves 1..={most}");
            return Err(Failure::refused("form_band", text));
        }
        let mut first = 0;
        while first < rows {
            let count = (rows - first).min(self.block_rows);
            let at = |(address, port): (&u64, &Port)| match address {
                0 => 0,
                address => {
                    let size = port.dtype(self.dtype).size() as u64;
                    address + first * u64::from(port.width) * size
                }
            };
            let block = Block {
                queue: ctx.queue.addr() as u64,
                rows: count as u32,
                dtype: self.dtype as u32,
                inputs: given.iter().zip(self.body.inputs()).map(at).collect(),
                outputs: made.iter().zip(self.body.outputs()).map(at).collect(),
            };
            self.context.with_scratch(block.queue, |scratch| {
                // SAFETY: tensors of this device, checked in `address`, borrowed by the host until the queue is done;
                // the scratch was made for such a block at bind.
                unsafe { self.body.run(self.rung, &block, scratch) }
            })?;
            first += count;
        }
        Ok(())
    }
}

impl Bound {
    /// Checks a tensor of a call; 0 for an absent optional. The first one tells the rows.
    fn address(
        &self,
        port: &Port,
        tensor: Option<Tensor<'_>>,
        rows: &mut Option<u64>,
    ) -> Result<u64, Failure> {
        let Some(tensor) = tensor else {
            if port.optional {
                return Ok(0);
            }
            let text = format!("the tensor at position {} is absent", port.position);
            return Err(Failure::invalid("view_absent", text));
        };
        let expected = port.dtype(self.dtype);
        if tensor.dtype() != Some(expected) {
            let found = tensor.dtype().map_or("absent", |dtype| dtype.name());
            let text = format!("a tensor is {found}, bound for {}", expected.name());
            return Err(Failure::invalid("view_dtype", text));
        }
        let known = *rows.get_or_insert(tensor.rows() as u64);
        if tensor.cols() as u64 != u64::from(port.width) || tensor.rows() as u64 != known {
            let dims = tensor.dims();
            let text = format!("dims {dims:?} for {known} rows of {}", port.width);
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        if !tensor.is_contiguous() {
            let text = format!("strides {:?} of dims {:?}", tensor.strides(), tensor.dims());
            return Err(Failure::invalid("view_layout", text));
        }
        match tensor.device_address() {
            Some(address) if port.wired && !address.is_multiple_of(16) => {
                let text = format!("codes at {address:#x}, expected a multiple of 16");
                Err(Failure::invalid("view_alignment", text))
            }
            Some(address) if tensor.device() == self.device => Ok(address),
            _ => {
                let text = format!("device {}, bound on {}", tensor.device(), self.device);
                Err(Failure::invalid("view_device", text))
            }
        }
    }
}

/// Launches the kernel that makes operand rows of boundary rows.
///
/// # Safety
/// `x` covers `rows` rows of the boundary, `out` as many operand rows.
pub unsafe fn operand(
    kernel: &Kernel,
    block: &Block,
    x: u64,
    out: u64,
    (kind, width, scale): (u32, u32, f32),
) -> Result<(), Failure> {
    let arguments = Arguments::default();
    let arguments = arguments.with(&x).with(&block.dtype).with(&out).with(&kind);
    let arguments = arguments.with(&width).with(&scale);
    let grid = Grid {
        blocks: (block.rows, 1),
        threads: 256,
        shared: 0,
    };
    // SAFETY: the kernel's arguments; the addresses are promised by the caller.
    unsafe {
        kernel
            .context()
            .launch(block.queue, kernel, grid, arguments)
    }
}

/// Whether the rows at a port are operand rows as they are.
pub fn is_operand(product: &Product, port: &Port, dtype: u32, address: u64) -> bool {
    port.wired || (product.kind() == dtype && address.is_multiple_of(16))
}

/// Whether an input or output of this bind is a wire.
fn wired(request: &BindRequest<'_>, port: &str) -> Result<bool, Failure> {
    match request.params.wires.get(port).map(String::as_str) {
        None => Ok(false),
        Some(WIRE_FP8_E4M3) => Ok(true),
        Some(other) => {
            let text = format!("a wire at `{port}` in {other}, expected {WIRE_FP8_E4M3}");
            Err(Failure::refused("wire_format", text))
        }
    }
}

/// The first rung that runs at the bound rows and agrees with the plain one.
fn climb(
    host: &Host,
    context: &Arc<Context>,
    body: &dyn Body,
    (dtype, rows): (DType, u64),
    most: f64,
    name: &str,
    asked: Option<&str>,
) -> Result<Rung, Failure> {
    let target = target(context.gpu().capability);
    let ladder = body.ladder().iter().copied();
    let ladder: Vec<Rung> = ladder.filter(|rung| rung.exists_on(&target)).collect();
    let trial = Trial::new(context, body, dtype, rows)?;
    let mut fell = Vec::new();
    for rung in ladder
        .iter()
        .filter(|rung| asked.is_none_or(|asked| asked == rung.name()))
    {
        let last = *rung == Rung::Plain || ladder.len() == 1;
        let tried = trial.run(*rung, rows).and_then(|_| match last {
            true => Ok(()),
            false => trial.agrees(*rung, rows.min(COMPARED_ROWS), most),
        });
        match tried {
            Ok(()) => {
                let notes = match fell.is_empty() {
                    true => String::new(),
                    false => format!("; fell through: {}", fell.join("; ")),
                };
                let level = match fell.is_empty() {
                    true => LogLevel::Debug,
                    false => LogLevel::Info,
                };
                host.log(level, "ladder", &format!("{name}: {}{notes}", rung.name()));
                return Ok(*rung);
            }
            // Nothing more can be learnt from a device that is gone.
            Err(failure) if failure.code == "device_lost" => return Err(failure),
            Err(failure) => fell.push(format!("{}: {failure}", rung.name())),
        }
    }
    let text = format!("{name}: no rung runs at {rows} rows: {}", fell.join("; "));
    Err(Failure::failed("no_rung", text))
}

/// Seeded inputs and room for outputs.
struct Trial<'b> {
    context: &'b Arc<Context>,
    body: &'b dyn Body,
    dtype: DType,
    inputs: Vec<Buffer>,
    outputs: Vec<(Buffer, u32)>,
}

impl<'b> Trial<'b> {
    fn new(
        context: &'b Arc<Context>,
        body: &'b dyn Body,
        dtype: DType,
        rows: u64,
    ) -> Result<Self, Failure> {
        let mut seed = 0x2545_f491_u32;
        let mut inputs = Vec::new();
        for port in body.inputs() {
            let n = (rows * u64::from(port.width)) as usize;
            inputs.push(context.upload(&noise(&mut seed, port.dtype(dtype), n))?);
        }
        let mut outputs = Vec::new();
        for port in body.outputs() {
            let size = port.dtype(dtype).size() as u64;
            let bytes = rows * u64::from(port.width) * size;
            outputs.push((context.buffer(bytes)?, port.width));
        }
        Ok(Trial {
            context,
            body,
            dtype,
            inputs,
            outputs,
        })
    }

    fn run(&self, rung: Rung, rows: u64) -> Result<(), Failure> {
        let block = Block {
            queue: 0,
            rows: rows as u32,
            dtype: self.dtype as u32,
            inputs: self.inputs.iter().map(Buffer::address).collect(),
            outputs: self.outputs.iter().map(|(b, _)| b.address()).collect(),
        };
        self.context.with_scratch(0, |scratch| {
            // SAFETY: buffers of at least `rows` rows of the ports' widths, waited for here; the scratch is as at bind.
            unsafe { self.body.run(rung, &block, scratch) }
        })?;
        self.context.synchronize(0)
    }

    fn agrees(&self, rung: Rung, rows: u64, most: f64) -> Result<(), Failure> {
        self.run(Rung::Plain, rows)?;
        let expected = self.read(rows)?;
        for (buffer, _) in &self.outputs {
            let poison = vec![0xff; buffer.bytes() as usize];
            self.context.copy_in(0, buffer.address(), &poison)?;
        }
        self.run(rung, rows)?;
        let found = self.read(rows)?;
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let apart = squares(&mut expected.iter().zip(&found).map(|(e, f)| f64::from(e - f)));
        let whole = squares(&mut expected.iter().map(|e| f64::from(*e)));
        let distance = (apart / whole.max(f64::MIN_POSITIVE)).sqrt();
        match distance <= most || apart == 0.0 {
            true => Ok(()),
            false => {
                let text =
                    format!("it differs from the plain one by {distance:.1e} at {rows} rows, at most {most:.0e} is expected");
                Err(Failure::failed("rung_wrong", text))
            }
        }
    }

    fn read(&self, rows: u64) -> Result<Vec<f32>, Failure> {
        let mut all = Vec::new();
        for (buffer, width) in &self.outputs {
            let mut bytes = vec![0; (rows * u64::from(*width)) as usize * self.dtype.size()];
            self.context.copy_out(0, &mut bytes, buffer.address())?;
            match self.dtype {
                DType::F32 => all.extend(
                    bytes
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
                ),
                _ => all.extend(
                    bytes
                        .chunks_exact(2)
                        .map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]]))),
                ),
            }
        }
        Ok(all)
    }
}

/// Values in -1..1 at the boundary's dtype.
fn noise(seed: &mut u32, dtype: DType, n: usize) -> Vec<u8> {
    let mut next = || {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 17;
        *seed ^= *seed << 5;
        *seed as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    match dtype {
        DType::F32 => (0..n).flat_map(|_| next().to_le_bytes()).collect(),
        DType::E4m3 => (0..n).map(|_| f32_to_e4m3_saturating(next())).collect(),
        _ => (0..n)
            .flat_map(|_| f32_to_bf16(next()).to_le_bytes())
            .collect(),
    }
}
