//! cublasLt, where it loads: products of bf16 and of E4M3 rows, sums in bf16 or f32.
//!
//! The library is opened when a form is bound. A plan has its algorithm chosen for a number of rows and is asked again
//! for none; sums go to scratch and the structure's own epilogue follows as a kernel. Absent, too old or refusing, it is
//! a rung that fell through.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use structures_plugin_api::sdk::Failure;
use structures_plugin_api::DType;

use crate::context::{Buffer, Context};
use crate::presence::caught;

/// What NVIDIA recommends for Hopper.
const WORKSPACE: u64 = 32 << 20;
/// `CUBLAS_OP_T`, which the bindings of this library alone do not name.
const TRANSPOSED: i32 = 1;
/// Rows that algorithms are chosen for; a call takes that of the next larger.
const STEPS: [u32; 9] = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096];

/// An open cublasLt.
pub struct Lt {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    workspace: Buffer,
    /// One product at a time uses the workspace; those of one queue follow each other.
    queue: Mutex<u64>,
}

// SAFETY: a handle of the library, whose entries take any thread.
unsafe impl Send for Lt {}
// SAFETY: as above; the workspace is guarded by `queue`.
unsafe impl Sync for Lt {}

impl std::fmt::Debug for Lt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lt")
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

impl Lt {
    /// Whether it is among the system's libraries.
    pub fn is_there() -> bool {
        // SAFETY: opens libraries of the system's search path by the library's names and closes them.
        caught(|| Ok(unsafe { sys::is_culib_present() })).unwrap_or(false)
    }

    /// Opens it on a context.
    ///
    /// # Errors
    /// `cublaslt_absent`, `cublaslt_failed`; of memory.
    pub fn open(context: &Arc<Context>) -> Result<Arc<Self>, Failure> {
        if !Self::is_there() {
            let text = "libcublasLt.so is not among the system's libraries";
            return Err(Failure::refused("cublaslt_absent", text));
        }
        let workspace = context.buffer(WORKSPACE)?;
        let handle = context.with_stream(0, |_| result::create_handle().map_err(said))?;
        Ok(Arc::new(Lt {
            context: Arc::clone(context),
            handle,
            workspace,
            queue: Mutex::new(0),
        }))
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; every plan holds this value.
        let _ = self.context.with_stream(0, |_| unsafe {
            result::destroy_handle(self.handle).map_err(said)
        });
    }
}

/// `sums[m, n] = x[m, k] * w[n, k]^T` with its algorithms.
pub struct Plan {
    lt: Arc<Lt>,
    operand: DType,
    /// Type of the sums.
    pub sums: DType,
    n: u32,
    k: u32,
    description: Description,
    algorithms: Vec<(u32, sys::cublasLtMatmulAlgo_t)>,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Plan {
            operand,
            sums,
            n,
            k,
            ..
        } = self;
        write!(f, "cublasLt {operand:?} x {k} x {n} -> {sums:?}")
    }
}

struct Description(sys::cublasLtMatmulDesc_t);

// SAFETY: read by the library while a product is enqueued, changed by nobody.
unsafe impl Send for Description {}
// SAFETY: as above.
unsafe impl Sync for Description {}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = caught(|| unsafe { result::destroy_matmul_desc(self.0).map_err(said) });
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// Rows of `length` one after the other: what the library calls columns.
    fn rows(dtype: DType, rows: u32, length: u32) -> Result<Self, Failure> {
        let dtype = match dtype {
            DType::E4m3 => sys::cudaDataType::CUDA_R_8F_E4M3,
            DType::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            _ => sys::cudaDataType::CUDA_R_32F,
        };
        let made = result::create_matrix_layout(dtype, length.into(), rows.into(), length.into());
        made.map(Layout).map_err(said)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

impl Plan {
    /// Chooses algorithms for up to `rows` rows.
    ///
    /// # Errors
    /// `cublaslt_failed`: it has none for these operands.
    pub fn new(
        lt: &Arc<Lt>,
        (operand, sums): (DType, DType),
        (n, k): (u32, u32),
        rows: u32,
    ) -> Result<Self, Failure> {
        lt.context.with_stream(0, |_| {
            let single = sys::cudaDataType::CUDA_R_32F;
            let made =
                result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, single);
            let description = Description(made.map_err(said)?);
            let turned = TRANSPOSED;
            let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            // SAFETY: a live description; the value is an i32, as the attribute is.
            unsafe {
                let value = (&raw const turned).cast::<c_void>();
                result::set_matmul_desc_attribute(description.0, attribute, value, size_of::<i32>())
            }
            .map_err(said)?;
            let mut plan = Plan {
                lt: Arc::clone(lt),
                operand,
                sums,
                n,
                k,
                description,
                algorithms: Vec::new(),
            };
            for step in STEPS {
                plan.algorithms.push((step, plan.choose(step)?));
                if step >= rows {
                    break;
                }
            }
            Ok(plan)
        })
    }

    fn choose(&self, rows: u32) -> Result<sys::cublasLtMatmulAlgo_t, Failure> {
        let [w, x, y] = self.layouts(rows)?;
        let preference = result::create_matmul_pref().map_err(said)?;
        let bytes = WORKSPACE as usize;
        let attribute =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: live descriptors; the value is a usize, as the attribute is.
        let found = unsafe {
            let value = (&raw const bytes).cast::<c_void>();
            let set =
                result::set_matmul_pref_attribute(preference, attribute, value, size_of::<usize>());
            let found = set.and_then(|()| {
                let handle = self.lt.handle;
                result::get_matmul_algo_heuristic(
                    handle,
                    self.description.0,
                    w.0,
                    x.0,
                    y.0,
                    y.0,
                    preference,
                )
            });
            let _ = result::destroy_matmul_pref(preference);
            found
        };
        Ok(found.map_err(said)?.algo)
    }

    fn layouts(&self, rows: u32) -> Result<[Layout; 3], Failure> {
        Ok([
            Layout::rows(self.operand, self.n, self.k)?,
            Layout::rows(self.operand, rows, self.k)?,
            Layout::rows(self.sums, rows, self.n)?,
        ])
    }

    /// Enqueues it.
    ///
    /// # Safety
    /// `w` has `n`, `x` has `rows` rows of `k` operands, `sums` room for `rows` rows of `n`, until the queue is done.
    pub unsafe fn launch(
        &self,
        queue: u64,
        (w, x, sums): (u64, u64, u64),
        rows: u32,
    ) -> Result<(), Failure> {
        let lt = &*self.lt;
        let mut last = lt.queue.lock().unwrap_or_else(|e| e.into_inner());
        if *last != queue {
            structures_plugin_api::sdk::Device::synchronize(&*lt.context, *last)?;
            *last = queue;
        }
        let fitting = self.algorithms.iter().find(|(step, _)| *step >= rows);
        let (_, algorithm) = fitting
            .or(self.algorithms.last())
            .ok_or_else(|| Failure::failed("cublaslt_failed", "no algorithm was chosen"))?;
        let [wl, xl, yl] = self.layouts(rows)?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let address = |a: u64| std::ptr::with_exposed_provenance_mut::<c_void>(a as usize);
        lt.context.with_stream(queue, |stream| {
            // SAFETY: live descriptors of this library; the memory is promised by the caller, the workspace is our own
            // and used by one queue at a time.
            unsafe {
                result::matmul(
                    lt.handle,
                    self.description.0,
                    (&raw const one).cast(),
                    (&raw const zero).cast(),
                    address(w),
                    wl.0,
                    address(x),
                    xl.0,
                    address(sums),
                    yl.0,
                    address(sums),
                    yl.0,
                    algorithm,
                    address(lt.workspace.address()),
                    WORKSPACE as usize,
                    stream.cast(),
                )
            }
            .map_err(said)
        })
    }
}

fn said(e: CublasError) -> Failure {
    Failure::failed("cublaslt_failed", format!("cublasLt: {:?}", e.0))
}
