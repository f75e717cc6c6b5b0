//! One packed product and the shapes it can be launched in.
//!
//! The structs mirror those of `cu/product.cuh`; a test on the CPU holds both to the same numbers by running them.

use structures_plugin_api::sdk::{Failure, Tensor};
use structures_plugin_api::DType;

use crate::context::{Argument, Arguments, Grid, Kernel};
use crate::format::Format;
use crate::forms::{Site, STEP};
use crate::kernels::{target, Abilities};
use crate::lt::Plan;
use crate::weights::{Order, Weights};

/// One way to execute, best first in a form's ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// cublasLt with the tensor cores' own sums of E4M3, and the epilogue as a kernel of its own.
    LibraryFast,
    /// The same with sums in f32.
    Library,
    /// Tensor cores through `wgmma`, a larger tile a block; few rows as [`Rung::Tiles`].
    Warpgroups,
    /// Tensor cores through `mma.sync`, a tile a block.
    Tiles,
    /// Weights streamed once past up to 8 rows, through `mma.sync`.
    Rows,
    /// One thread a few outputs: slow, and what the others are compared with.
    Plain,
}

impl Rung {
    /// Its name in entries and notes.
    pub fn name(self) -> &'static str {
        match self {
            Rung::LibraryFast => "cublaslt_fast",
            Rung::Library => "cublaslt",
            Rung::Warpgroups => "wgmma",
            Rung::Tiles => "mma_sync",
            Rung::Rows => "row_stream",
            Rung::Plain => "plain",
        }
    }

    /// The ladder of a format.
    pub fn ladder(format: Format) -> &'static [Rung] {
        match format {
            Format::W8a16Static => &[Rung::Rows],
            Format::Fp8Static => &[
                Rung::LibraryFast,
                Rung::Library,
                Rung::Warpgroups,
                Rung::Tiles,
                Rung::Plain,
            ],
            _ => &[Rung::Library, Rung::Warpgroups, Rung::Tiles, Rung::Plain],
        }
    }

    /// Whether a device of this target can have it at all.
    pub fn exists_on(self, target: &str) -> bool {
        self != Rung::Warpgroups || Abilities::of(target).warpgroups
    }
}

/// Stages x (128 + 128) rows x 128 bytes.
const SHARED_128: u32 = 3 * 256 * 128;
/// Stages x (32 + 128) rows x 128 bytes.
const SHARED_32: u32 = 3 * 160 * 128;
/// Stages x (128 + 256) rows x 128 bytes, and what their alignment may take.
const SHARED_WARPGROUPS: u32 = 4 * 384 * 128 + 1024;
/// Rows up to which the smaller tile wastes less than the larger.
const SMALL_ROWS: u32 = 32;
/// Channels from which blocks of 32 and of 64 fill a device; rows are then read by a half, a quarter as many.
const MIDDLE: u32 = 8192;
/// See above.
const WIDE: u32 = 16384;
/// Rows of a plane, `MOST_ROWS` of `product.cuh`.
const MOST_ROWS: u64 = 8;
/// Planes of bf16 that are an f32.
const PLANES: u64 = 3;

#[repr(C)]
#[derive(Clone, Copy)]
struct Operands {
    x: u64,
    w: u64,
    m: u32,
    n: u32,
    k: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Rows {
    x: u64,
    w: u64,
    m: u32,
    n: u32,
    k: u32,
}

// SAFETY: as `Operands` in `product.cuh`.
unsafe impl Argument for Operands {}
// SAFETY: as `Rows` in `product.cuh`.
unsafe impl Argument for Rows {}

/// A product bound to its weights.
#[derive(Debug)]
pub struct Product {
    format: Format,
    /// Rows come as planes of bf16.
    planes: bool,
    /// Its weights.
    pub weights: Weights,
    /// What the sums are multiplied with: the scales of weights and activations that are no channel's.
    scale: f32,
    /// What activations are divided by before they become codes; 1 where they are none.
    pub x_scale: f32,
    /// Tiles of 128 and of 32 rows, plain, and of warpgroups where there are any; or rows by 16, 32 and 64 channels,
    /// the same of planes.
    kernels: Vec<Kernel>,
    end: Kernel,
    /// Columns of sums that a thread of the end kernel takes.
    end_columns: u32,
    /// The library's plan, and the fast one, or why there is none.
    plans: [Result<Plan, Failure>; 2],
}

/// Where scaled sums, rounded, are all that an epilogue would make.
#[derive(Clone, Copy, Debug)]
pub struct Whole {
    /// Rows of the product's channels.
    pub address: u64,
    /// Type id of their elements.
    pub dtype: u32,
}

/// What a product is made of.
pub struct Parts<'r, 'a> {
    /// Kernels are `NAME_OPERAND_SHAPE`.
    pub name: &'r str,
    /// Slots.
    pub weights: &'r [Tensor<'a>],
    /// How they lie together.
    pub order: Order,
    /// The point whose scale its activations have.
    pub point: &'r str,
    /// The epilogue begins with rounding scaled sums to the boundary.
    pub rounds: bool,
}

impl Product {
    /// Packs the weights and resolves the kernels.
    ///
    /// # Errors
    /// Of packing; `statistic_missing`; `kernel_missing`.
    pub fn bind(site: &Site<'_>, format: Format, parts: &Parts<'_, '_>) -> Result<Self, Failure> {
        let (module, request) = (site.module, site.request);
        let x_scale = match format {
            Format::Fp8Static => {
                let amax = request.scalar_statistic(parts.point, "amax")?;
                structures_plugin_api::formats::fp8_scale(amax)
            }
            _ => 1.0,
        };
        let target = target(module.context().gpu().capability);
        let shapes: &[(&str, u32)] = match format {
            Format::W8a16Static => &[
                ("rows16", 0),
                ("rows32", 0),
                ("rows64", 0),
                ("rows16x3", 0),
                ("rows32x3", 0),
                ("rows64x3", 0),
            ],
            _ if Rung::Warpgroups.exists_on(&target) => &[
                ("tile128", SHARED_128),
                ("tile32", SHARED_32),
                ("plain", 0),
                ("wgmma", SHARED_WARPGROUPS),
            ],
            _ => &[("tile128", SHARED_128), ("tile32", SHARED_32), ("plain", 0)],
        };
        let kernel = |(shape, shared): &(&str, u32)| {
            module.kernel(
                &format!("{}_{}_{shape}", parts.name, format.operand()),
                *shared,
            )
        };
        let kernels = shapes.iter().map(kernel).collect::<Result<Vec<_>, _>>()?;
        let context = module.context();
        let weights = Weights::pack(site.host, context, format, parts.weights, parts.order)?;
        let operand = match format {
            Format::Fp8Static => DType::E4m3,
            _ => DType::Bf16,
        };
        let scale = weights.scale * x_scale;
        // Where the epilogue would round them first the library may: half is then written between two kernels. Anywhere
        // else that would be a rounding more, which pushes E4M3 codes over edges.
        let sums = match parts.rounds && site.dtype == DType::Bf16 {
            true => DType::Bf16,
            false => DType::F32,
        };
        let plan = |fast: bool| match format {
            Format::W8a16Static => Err(Failure::refused("no_rung", "no library streams int8 rows")),
            Format::Bf16 | Format::Bf16Pack if fast => {
                Err(Failure::refused("no_rung", "bf16 is summed in f32"))
            }
            _ => (site.library)().and_then(|lt| {
                let (types, dims) = ((operand, sums, scale), (weights.n, weights.k));
                Plan::new(&lt, types, dims, site.rows as u32, fast)
            }),
        };
        let plans = [plan(false), plan(true)];
        Ok(Product {
            end_columns: match parts.order {
                // Both of a pair are sixteen columns side by side.
                Order::ByEights => 16,
                Order::Behind => 4,
            },
            end: module.kernel(&format!("{}_end", parts.name), 0)?,
            plans,
            planes: format == Format::W8a16Static && site.dtype == DType::F32,
            format,
            scale,
            x_scale,
            weights,
            kernels,
        })
    }

    /// Bytes of scratch that `rows` operand rows of it take.
    pub fn operands_bytes(&self, rows: u64) -> u64 {
        let k = u64::from(self.weights.k);
        let bytes = match (self.format, self.planes) {
            (Format::W8a16Static, true) => PLANES * MOST_ROWS * k * 2,
            (Format::W8a16Static, false) => rows * k * 2,
            (format, _) => rows * k * format.weight_bytes() as u64,
        };
        bytes.next_multiple_of(STEP)
    }

    /// Bytes of sums that another library leaves for so many rows.
    pub fn sums_bytes(&self, rows: u64) -> u64 {
        let plans = self.plans.iter().flatten();
        let size = plans.map(|plan| plan.sums.size()).max().unwrap_or(0);
        rows * u64::from(self.weights.n) * size as u64
    }

    /// What an epilogue still has to multiply sums with.
    pub fn end_scale(&self, rung: Rung) -> f32 {
        match rung {
            Rung::Library | Rung::LibraryFast => 1.0,
            _ => self.scale,
        }
    }

    /// Launches it on operand rows at `x`.
    ///
    /// # Safety
    /// `x` has `rows` operand rows, `sums` is scratch of [`Product::sums_bytes`], and every address in `end` covers what
    /// the epilogue reaches for those rows, as does `whole`.
    pub unsafe fn launch<E: Argument>(
        &self,
        rung: Rung,
        queue: u64,
        (x, sums): (u64, u64),
        rows: u32,
        (end, whole): (&E, Option<Whole>),
    ) -> Result<(), Failure> {
        let (n, k) = (self.weights.n, self.weights.k);
        let w = self.weights.codes();
        let quadruples = n.div_ceil(16) * 4;
        let operands = Operands {
            x,
            w,
            m: rows,
            n,
            k,
        };
        let tiles = |kernel: usize, (down, across): (u32, u32), shared: u32| {
            let grid = Grid {
                blocks: (rows.div_ceil(down) * n.div_ceil(across), 1),
                threads: 256,
                shared,
            };
            (kernel, grid)
        };
        let (kernel, grid) = match rung {
            Rung::Library | Rung::LibraryFast => {
                let plan = &self.plans[usize::from(rung == Rung::LibraryFast)];
                let plan = plan.as_ref().map_err(Clone::clone)?;
                let whole = whole
                    .filter(|to| plan.sums as u32 == to.dtype && to.address.is_multiple_of(16));
                if let Some(to) = whole {
                    // SAFETY: as the caller promised.
                    return unsafe { plan.launch(queue, (w, x, to.address), rows) };
                }
                let threads = n.div_ceil(16) * 16 / self.end_columns;
                let blocks = (threads.div_ceil(128), rows);
                let grid = Grid {
                    blocks,
                    threads: 128,
                    shared: 0,
                };
                let dtype = plan.sums as u32;
                let arguments = Arguments::default()
                    .with(&sums)
                    .with(&dtype)
                    .with(&n)
                    .with(end);
                // SAFETY: rows and scratch as the caller promised; the arguments of an end kernel.
                return unsafe {
                    plan.launch(queue, (w, x, sums), rows)?;
                    self.end.context().launch(queue, &self.end, grid, arguments)
                };
            }
            Rung::Warpgroups if rows > SMALL_ROWS => tiles(3, (128, 256), SHARED_WARPGROUPS),
            Rung::Tiles if rows > SMALL_ROWS => tiles(0, (128, 128), SHARED_128),
            Rung::Warpgroups | Rung::Tiles => tiles(1, (32, 128), SHARED_32),
            Rung::Plain => {
                let blocks = (quadruples.div_ceil(64), rows);
                (
                    2,
                    Grid {
                        blocks,
                        threads: 64,
                        shared: 0,
                    },
                )
            }
            Rung::Rows => {
                let rows_of = Rows {
                    x,
                    w,
                    m: rows,
                    n,
                    k,
                };
                let (width, channels) = match n {
                    WIDE.. => (2, 64),
                    MIDDLE..WIDE => (1, 32),
                    _ => (0, 16),
                };
                let kernel = &self.kernels[width + 3 * usize::from(self.planes)];
                let blocks = (n.div_ceil(channels), 1);
                let arguments = Arguments::default().with(&rows_of).with(end);
                let grid = Grid {
                    blocks,
                    threads: 256,
                    shared: 0,
                };
                // SAFETY: the arguments of a rows kernel; the addresses are promised by the caller.
                return unsafe { kernel.context().launch(queue, kernel, grid, arguments) };
            }
        };
        let arguments = Arguments::default().with(&operands).with(end);
        let Some(kernel) = self.kernels.get(kernel) else {
            let text = format!("no kernel of the rung {} for this device", rung.name());
            return Err(Failure::refused("no_rung", text));
        };
        // SAFETY: the arguments of a tile or plain kernel; the addresses are promised by the caller.
        unsafe { kernel.context().launch(queue, kernel, grid, arguments) }
    }

    /// How a prologue hands rows to it.
    pub fn kind(&self) -> u32 {
        self.format.kind(self.planes)
    }
}
