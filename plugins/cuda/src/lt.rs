//! cublasLt, where it loads: products of bf16 and of E4M3 rows, sums in bf16 or f32.
//!
//! The library is opened when a form is bound: the one `STRUCTURES_CUBLASLT` names (a path; then nothing else is tried, but
//! an unversioned `libcublasLt.so` of the system comes before it), one below `CUDA_HOME` or `CUDA_PATH`, by its usual names,
//! or below the usual place of a toolkit. A plan has algorithms chosen at bind, for steps of rows;
//! where the library declines one of them for the rows of a call it is asked once for just these. Sums are scaled, go to
//! scratch, and the structure's own epilogue follows as a kernel. Absent, too old or refusing, it is a rung that fell
//! through.
//!
//! E4M3 has two kinds of plans. A fast one sums the tensor cores' own way, as inference engines do: on Hopper and Ada partial
//! sums keep 13 bits, truncated, which costs a feed-forward layer about 1 % in relative L2. The other one adds them to f32
//! every few inputs. The ladder takes the fast one where it stays within the form's tolerance.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use libloading::Library;
use structures_plugin_api::abi::STATUS_FAILED;
use structures_plugin_api::sdk::Failure;
use structures_plugin_api::DType;

use crate::context::{Buffer, Context};
use crate::libraries::{self, given, majors, named, Variable};
use crate::presence::caught;

/// What NVIDIA recommends for Hopper.
const WORKSPACE: u64 = 32 << 20;
/// `CUBLAS_OP_T`, which the bindings of this library alone do not name.
const TRANSPOSED: i32 = 1;
const LIBRARY: &str = "libcublasLt.so";
/// The variable that names the library.
pub const CUBLASLT: &str = "STRUCTURES_CUBLASLT";
/// Addresses of operands and sums are multiples of it.
static ALIGN: u32 = 16;
/// Rows that algorithms are chosen for; a call takes that of the next larger.
const STEPS: [u32; 9] = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096];

/// An open cublasLt.
pub struct Lt {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    /// Used by one product at a time: whoever enqueues one holds the context's scratch.
    workspace: Buffer,
}

// SAFETY: a handle of the library, whose entries take any thread.
unsafe impl Send for Lt {}
// SAFETY: as above.
unsafe impl Sync for Lt {}

impl std::fmt::Debug for Lt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lt")
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

impl Lt {
    /// Whether it can be had; `driver` is the CUDA version of the driver. Asked once a process.
    ///
    /// # Errors
    /// `cublaslt_absent`, with what was tried.
    pub fn look(variable: impl Variable, driver: i32) -> Result<(), Failure> {
        static FOUND: OnceLock<Result<(), Failure>> = OnceLock::new();
        FOUND.get_or_init(|| found(variable, driver / 1000)).clone()
    }

    /// Opens it on a context.
    ///
    /// # Errors
    /// As [`Lt::look`]; `cublaslt_failed`; of memory.
    pub fn open(context: &Arc<Context>, variable: impl Variable) -> Result<Arc<Self>, Failure> {
        Self::look(variable, context.gpu().driver)?;
        let workspace = context.buffer(WORKSPACE)?;
        let handle = context.with_stream(0, |_| result::create_handle().map_err(said))?;
        Ok(Arc::new(Lt {
            context: Arc::clone(context),
            handle,
            workspace,
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

/// Looks for it, and keeps open what was found by path: the bindings then find it by name.
fn found(variable: impl Variable, driver_major: i32) -> Result<(), Failure> {
    let absent = |text: String| Err(Failure::refused("cublaslt_absent", text));
    // SAFETY: opens libraries of the system's search path by the library's names and closes them.
    let by_name = || caught(|| Ok(unsafe { sys::is_culib_present() })).unwrap_or(false);
    let open = |path: &PathBuf| -> Result<(), String> {
        // SAFETY: the library's initialisers do nothing a process could not have; the operator named it or where it lies.
        let library = unsafe { Library::new(path) }.map_err(|e| libraries::why(&e))?;
        // SAFETY: only looked for.
        let entry = unsafe { library.get::<*const c_void>(b"cublasLtCreate\0") };
        entry.map_err(|_| format!("it is no {LIBRARY}"))?;
        std::mem::forget(library);
        Ok(())
    };
    if let Some(path) = given(&variable, CUBLASLT) {
        let path_text = path.display();
        return match open(&path) {
            Ok(()) if by_name() => Ok(()),
            Ok(()) => absent(format!(
                "{CUBLASLT} names {path_text}, whose own name is none of {LIBRARY}"
            )),
            Err(why) => absent(format!("{CUBLASLT} names {path_text}: {why}")),
        };
    }
    let majors = majors(driver_major);
    let opened = |paths: Vec<PathBuf>| paths.iter().any(|path| open(path).is_ok());
    // Where one of a toolkit that is named opens it comes first.
    opened(named(&variable, LIBRARY, majors));
    if by_name() || (opened(libraries::usual(LIBRARY, majors)) && by_name()) {
        return Ok(());
    }
    absent(format!(
        "{LIBRARY} is neither below CUDA_HOME nor among the system's libraries; install the CUDA toolkit's cuBLAS or name \
         it in {CUBLASLT}"
    ))
}

/// `sums[m, n] = scale * x[m, k] * w[n, k]^T` with its algorithms.
pub struct Plan {
    lt: Arc<Lt>,
    operand: DType,
    /// Type of the sums.
    pub sums: DType,
    scale: f32,
    n: u32,
    k: u32,
    description: Description,
    algorithms: Vec<(u32, sys::cublasLtMatmulAlgo_t)>,
    /// For rows whose step's algorithm was declined.
    exact: Mutex<HashMap<u32, sys::cublasLtMatmulAlgo_t>>,
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
        (operand, sums, scale): (DType, DType, f32),
        (n, k): (u32, u32),
        rows: u32,
        fast: bool,
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
            if fast {
                let fast = 1_i8;
                let attribute =
                    sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_FAST_ACCUM;
                // SAFETY: as above; the attribute is an i8.
                unsafe {
                    let value = (&raw const fast).cast::<c_void>();
                    result::set_matmul_desc_attribute(description.0, attribute, value, 1)
                }
                .map_err(said)?;
            }
            let mut plan = Plan {
                lt: Arc::clone(lt),
                operand,
                sums,
                scale,
                n,
                k,
                description,
                algorithms: Vec::new(),
                exact: Mutex::default(),
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
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let bytes = WORKSPACE as usize;
        let room = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let alignments = [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        // SAFETY: live descriptors; the workspace's value is a usize, those of alignments are u32, as the attributes are.
        let found = unsafe {
            let value = (&raw const bytes).cast::<c_void>();
            let set =
                result::set_matmul_pref_attribute(preference, room, value, size_of::<usize>());
            let set = alignments.iter().fold(set, |set, attribute| {
                let value = (&raw const ALIGN).cast::<c_void>();
                set.and_then(|()| {
                    result::set_matmul_pref_attribute(
                        preference,
                        *attribute,
                        value,
                        size_of::<u32>(),
                    )
                })
            });
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
        let kept = |exact: &HashMap<u32, sys::cublasLtMatmulAlgo_t>| exact.get(&rows).copied();
        let mut exact = self.exact.lock().unwrap_or_else(|e| e.into_inner());
        let fitting = self.algorithms.iter().find(|(step, _)| *step >= rows);
        let (step, algorithm) = fitting
            .or(self.algorithms.last())
            .ok_or_else(|| Failure::failed("cublaslt_failed", "no algorithm was chosen"))?;
        // SAFETY: as the caller promised.
        let multiply =
            |algorithm: &_| unsafe { self.multiply(queue, (w, x, sums), rows, algorithm) };
        match kept(&exact) {
            Some(algorithm) => multiply(&algorithm),
            None => multiply(algorithm).or_else(|failure| {
                // An algorithm is promised for the rows it was chosen for.
                if *step == rows || failure.code == "device_lost" {
                    return Err(failure);
                }
                let algorithm = self.lt.context.with_stream(queue, |_| self.choose(rows))?;
                multiply(&algorithm)?;
                exact.insert(rows, algorithm);
                Ok(())
            }),
        }
    }

    /// # Safety
    /// As [`Plan::launch`].
    unsafe fn multiply(
        &self,
        queue: u64,
        (w, x, sums): (u64, u64, u64),
        rows: u32,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> Result<(), Failure> {
        let lt = &*self.lt;
        let [wl, xl, yl] = self.layouts(rows)?;
        let zero = 0.0_f32;
        let address = |a: u64| std::ptr::with_exposed_provenance_mut::<c_void>(a as usize);
        let done = lt.context.with_stream(queue, |stream| {
            // SAFETY: live descriptors of this library; the memory is promised by the caller, the workspace is our own
            // and used by one product at a time.
            unsafe {
                result::matmul(
                    lt.handle,
                    self.description.0,
                    (&raw const self.scale).cast(),
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
        });
        // The library has no word for a device that is gone; the driver does. It is not asked about what the library only
        // declines: asking spoils a recording.
        done.map_err(|failure| match failure.status {
            STATUS_FAILED => lt.context.query(queue).err().unwrap_or(failure),
            _ => failure,
        })
    }
}

/// What the library declines is refused; anything else has gone wrong.
fn said(e: CublasError) -> Failure {
    use sys::cublasStatus_t as Status;
    let text = format!("cublasLt: {:?}", e.0);
    match e.0 {
        Status::CUBLAS_STATUS_NOT_SUPPORTED
        | Status::CUBLAS_STATUS_INVALID_VALUE
        | Status::CUBLAS_STATUS_ARCH_MISMATCH => Failure::refused("cublaslt_failed", text),
        _ => Failure::failed("cublaslt_failed", text),
    }
}
