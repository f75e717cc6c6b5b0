//! Views as checked, borrowed tensors.
//!
//! A [`TensorView`] is only numbers until somebody checked them. [`Tensor`] and [`TensorMut`] check
//! rank, sizes, overflow and null data once, and hand out slices only where dtype, device, layout
//! and alignment allow one; everything else is read and written element by element, at any stride,
//! widened to or rounded from f32.
//!
//! What they cannot check is that the memory is really there: that is the promise of the maker of
//! the view, and why the two constructors from a view are `unsafe`.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use crate::abi::{DType, TensorView, MAX_RANK};
use crate::formats;
use crate::sdk::Failure;

/// A borrowed tensor that may be read. Copying copies the view, not the data.
///
/// It is a view that was checked and nothing else, so the arguments of a call need not be copied.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    view: TensorView,
    _data: PhantomData<&'a [u8]>,
}

/// In the flags of a checked view, which are 0 as they come: an input that is a view of a state.
const ALIASED: u32 = 1 << 31;

/// Outputs and states, together, of a call on the short way; covers every span of the catalog.
pub(crate) const PLAIN: usize = 8;

// SAFETY: it only reads memory that nobody writes while it is borrowed.
unsafe impl Send for Tensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for Tensor<'_> {}

impl<'a> Tensor<'a> {
    /// An absent optional.
    pub const ABSENT: Tensor<'static> = Tensor {
        view: TensorView::ABSENT,
        _data: PhantomData,
    };

    /// Checks a view.
    ///
    /// # Safety
    /// Every element that dims and strides reach is readable, and written by nobody, during `'a`.
    #[inline]
    pub unsafe fn from_view(view: &TensorView) -> Result<Self, Failure> {
        if check(view)?.is_none() {
            return Ok(Tensor::ABSENT);
        }
        Ok(Tensor {
            view: TensorView { flags: 0, ..*view },
            _data: PhantomData,
        })
    }

    /// Borrows a slice as a row-major tensor.
    pub fn from_f32(data: &'a [f32], dims: &[usize]) -> Result<Self, Failure> {
        let view = row_major(data.as_ptr().cast(), data.len(), DType::F32, dims)?;
        // SAFETY: `row_major` checked that the dims cover exactly the borrowed slice.
        unsafe { Self::from_view(&view) }
    }

    /// Borrows bf16 bit patterns as a row-major tensor.
    pub fn from_bf16(data: &'a [u16], dims: &[usize]) -> Result<Self, Failure> {
        let view = row_major(data.as_ptr().cast(), data.len(), DType::Bf16, dims)?;
        // SAFETY: as in `from_f32`.
        unsafe { Self::from_view(&view) }
    }

    /// The view itself.
    pub fn view(&self) -> &TensorView {
        &self.view
    }

    /// Device it lies on; 0 is host memory.
    pub fn device(&self) -> u32 {
        self.view.device
    }

    /// Address of its first element on its device; `None` for host memory and absent optionals.
    pub fn device_address(&self) -> Option<u64> {
        let there = !self.is_absent() && self.view.device != 0;
        there.then(|| self.view.data.addr() as u64)
    }

    /// Whether it is an absent optional: rank 0, no data, every accessor refuses.
    pub fn is_absent(&self) -> bool {
        self.view.dtype == 0
    }

    /// `None` for an absent optional.
    pub fn present(self) -> Option<Self> {
        (!self.is_absent()).then_some(self)
    }

    /// Element type; `None` when absent.
    pub fn dtype(&self) -> Option<DType> {
        DType::from_id(self.view.dtype)
    }

    /// Sizes, outermost first, none negative.
    pub fn dims(&self) -> &[i64] {
        &self.view.dims[..self.view.rank as usize]
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        &self.view.strides[..self.view.rank as usize]
    }

    /// Number of dims.
    pub fn rank(&self) -> usize {
        self.view.rank as usize
    }

    /// Product of the leading dims; 1 for rank 0 and 1.
    pub fn rows(&self) -> usize {
        let dims = self.dims();
        dims[..dims.len().saturating_sub(1)].iter().product::<i64>() as usize
    }

    /// Last dim; 1 for rank 0.
    pub fn cols(&self) -> usize {
        self.dims().last().copied().unwrap_or(1) as usize
    }

    /// Number of elements; 0 when absent.
    pub fn len(&self) -> usize {
        if self.is_absent() {
            return 0;
        }
        self.dims().iter().product::<i64>() as usize
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row-major without gaps; dims of size 1 may have any stride.
    pub fn is_contiguous(&self) -> bool {
        contiguous(&self.view)
    }

    /// The data, when it is contiguous aligned host f32.
    pub fn as_f32(&self) -> Result<&'a [f32], Failure> {
        self.slice(&[DType::F32])
    }

    /// The bit patterns, when it is contiguous aligned host bf16.
    pub fn as_bf16(&self) -> Result<&'a [u16], Failure> {
        self.slice(&[DType::Bf16])
    }

    /// The bit patterns, when it is contiguous aligned host f16.
    pub fn as_f16(&self) -> Result<&'a [u16], Failure> {
        self.slice(&[DType::F16])
    }

    /// The codes, when it is contiguous host int8.
    pub fn as_i8(&self) -> Result<&'a [i8], Failure> {
        self.slice(&[DType::I8])
    }

    /// The codes, when it is contiguous and host memory of a one-byte type (`u8`, `e4m3`, `e5m2`,
    /// `e2m1x2`).
    pub fn as_codes(&self) -> Result<&'a [u8], Failure> {
        self.slice(&[DType::U8, DType::E4m3, DType::E5m2, DType::E2m1x2])
    }

    fn slice<T>(&self, dtypes: &[DType]) -> Result<&'a [T], Failure> {
        self.readable()?;
        let data = slice_base::<T>(&self.view, dtypes)?;
        let Some(data) = data else { return Ok(&[]) };
        // SAFETY: contiguous, aligned, of this type, in host memory, readable for `'a` by the
        // constructor.
        Ok(unsafe { std::slice::from_raw_parts(data, self.len()) })
    }

    fn readable(&self) -> Result<(), Failure> {
        if self.view.flags & ALIASED != 0 {
            return Err(Failure::invalid(
                "view_aliased",
                "this input is a view of a state: read it through the state",
            ));
        }
        Ok(())
    }

    /// All elements in row-major order, widened (from f64: narrowed) to f32; any float dtype, any
    /// strides.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>, Failure> {
        let mut out = vec![0.0; self.len()];
        self.read_f32(&mut out)?;
        Ok(out)
    }

    /// [`Tensor::to_f32_vec`] into a buffer of exactly [`Tensor::len`] elements.
    pub fn read_f32(&self, out: &mut [f32]) -> Result<(), Failure> {
        expect_len("the buffer", self.len(), out.len())?;
        if self.is_contiguous() {
            return self.lane(0, 1, out);
        }
        let cols = self.cols();
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            self.read_row(row, out)?;
        }
        Ok(())
    }

    /// All elements of an integer tensor (`i8`, `u8`, `i32`, `i64`) in row-major order, any strides:
    /// lengths and positions.
    pub fn to_i64_vec(&self) -> Result<Vec<i64>, Failure> {
        self.readable()?;
        let dtype = on_host(&self.view)?;
        let mut out = vec![0; self.len()];
        let stride = self.strides().last().copied().unwrap_or(1);
        for (row, out) in out.chunks_exact_mut(self.cols().max(1)).enumerate() {
            let lane = Lane {
                base: self.view.data.cast::<u8>(),
                offset: row_offset(&self.view, row),
                stride,
            };
            // SAFETY: one row inside the view's dims, and so in readable memory.
            unsafe {
                match dtype {
                    DType::I8 => lane.read(out, |v: i8| i64::from(v)),
                    DType::U8 => lane.read(out, |v: u8| i64::from(v)),
                    DType::I32 => lane.read(out, |v: i32| i64::from(v)),
                    DType::I64 => lane.read(out, |v: i64| v),
                    other => return Err(not_an_integer(other)),
                }
            }
        }
        Ok(out)
    }

    /// One row, `row < rows()`, of [`Tensor::cols`] elements, as [`Tensor::to_f32_vec`].
    pub fn read_row(&self, row: usize, out: &mut [f32]) -> Result<(), Failure> {
        expect_len("the row", self.cols(), out.len())?;
        expect_row(row, self.rows())?;
        let stride = self.strides().last().copied().unwrap_or(1);
        self.lane(row_offset(&self.view, row), stride, out)
    }

    /// Reads `out.len()` elements from element offset `offset`; the callers keep both inside the
    /// dims.
    fn lane(&self, offset: i64, stride: i64, out: &mut [f32]) -> Result<(), Failure> {
        self.readable()?;
        let dtype = on_host(&self.view)?;
        if out.is_empty() {
            return Ok(());
        }
        let lane = Lane {
            base: self.view.data.cast::<u8>(),
            offset,
            stride,
        };
        // SAFETY: offset and stride come from the view and stay inside its dims, and so in readable
        // memory.
        unsafe {
            match dtype {
                DType::F32 => lane.read(out, |v: f32| v),
                DType::F64 => lane.read(out, |v: f64| v as f32),
                DType::Bf16 => lane.read(out, formats::bf16_to_f32),
                DType::F16 => lane.read(out, formats::f16_to_f32),
                DType::E4m3 => lane.read(out, formats::e4m3_to_f32),
                DType::E5m2 => lane.read(out, formats::e5m2_to_f32),
                other => return Err(not_a_float(other)),
            }
        }
        Ok(())
    }

    /// The tensor at one index of an axis, which is dropped: column `n` of `[K, N]` is `select(1,
    /// n)`, a view.
    pub fn select(&self, axis: usize, index: usize) -> Result<Tensor<'a>, Failure> {
        let rank = self.rank();
        if axis >= rank || index >= self.view.dims[axis] as usize {
            return Err(Failure::invalid(
                "view_dims",
                format!("no index {index} on axis {axis} of {:?}", self.dims()),
            ));
        }
        let mut out = *self;
        let offset = index as i64 * self.view.strides[axis];
        out.view.data = offset_by(&self.view, offset);
        out.view.dims.copy_within(axis + 1..rank, axis);
        out.view.strides.copy_within(axis + 1..rank, axis);
        out.view.dims[rank - 1] = 0;
        out.view.strides[rank - 1] = 0;
        out.view.rank -= 1;
        Ok(out)
    }

    /// The same data with two axes exchanged: a stored `[N, K]` seen as `[K, N]`.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Tensor<'a>, Failure> {
        if a >= self.rank() || b >= self.rank() {
            let text = format!("no axes {a} and {b} in {:?}", self.dims());
            return Err(Failure::invalid("view_dims", text));
        }
        let mut out = *self;
        out.view.dims.swap(a, b);
        out.view.strides.swap(a, b);
        Ok(out)
    }

    /// The same data seen at `dims`, aligned from the last dim: a missing dim or one of size 1
    /// repeats.
    pub fn broadcast_to(&self, dims: &[i64]) -> Result<Tensor<'a>, Failure> {
        let misfit = || {
            Failure::invalid(
                "view_dims",
                format!("{:?} does not broadcast to {dims:?}", self.dims()),
            )
        };
        if self.is_absent() || dims.len() > MAX_RANK || dims.len() < self.rank() {
            return Err(misfit());
        }
        let missing = dims.len() - self.rank();
        let mut out = *self;
        out.view.rank = dims.len() as u32;
        out.view.dims[..dims.len()].copy_from_slice(dims);
        for (axis, want) in dims.iter().enumerate() {
            out.view.strides[axis] = match axis.checked_sub(missing) {
                None => 0,
                Some(own) if self.view.dims[own] == *want => self.view.strides[own],
                Some(own) if self.view.dims[own] == 1 => 0,
                Some(_) => return Err(misfit()),
            };
        }
        check(&out.view)?;
        Ok(out)
    }

    /// Marks an input that is a view of a state: no accessor reads it any more.
    pub(crate) fn mark_aliased(&mut self) {
        self.view.flags |= ALIASED;
    }
}

/// A borrowed tensor that may be written: an output or a state.
#[repr(transparent)]
#[derive(Debug)]
pub struct TensorMut<'a> {
    tensor: Tensor<'a>,
    _data: PhantomData<&'a mut [u8]>,
}

impl<'a> TensorMut<'a> {
    /// Checks a view; one that repeats elements (stride 0) cannot be written.
    ///
    /// # Safety
    /// Every element that dims and strides reach is readable and writable, and reached by
    /// nobody else, during `'a`.
    #[inline]
    pub unsafe fn from_view(view: &TensorView) -> Result<Self, Failure> {
        // SAFETY: promised by the caller.
        let tensor = unsafe { Tensor::from_view(view) }?;
        let repeats = |(dim, stride): (&i64, &i64)| *dim > 1 && *stride == 0;
        if tensor.dims().iter().zip(tensor.strides()).any(repeats) {
            return Err(Failure::invalid(
                "view_layout",
                format!(
                    "an output of strides {:?} repeats elements",
                    tensor.strides()
                ),
            ));
        }
        Ok(TensorMut {
            tensor,
            _data: PhantomData,
        })
    }

    /// Borrows a slice as a row-major tensor.
    pub fn from_f32(data: &'a mut [f32], dims: &[usize]) -> Result<Self, Failure> {
        let view = row_major(
            data.as_mut_ptr().cast_const().cast(),
            data.len(),
            DType::F32,
            dims,
        )?;
        // SAFETY: `row_major` checked that the dims cover exactly the slice, which is borrowed
        // mutably.
        unsafe { Self::from_view(&view) }
    }

    /// Borrows bf16 bit patterns as a row-major tensor.
    pub fn from_bf16(data: &'a mut [u16], dims: &[usize]) -> Result<Self, Failure> {
        let view = row_major(
            data.as_mut_ptr().cast_const().cast(),
            data.len(),
            DType::Bf16,
            dims,
        )?;
        // SAFETY: as in `from_f32`.
        unsafe { Self::from_view(&view) }
    }

    /// Reads it.
    pub fn as_tensor(&self) -> Tensor<'_> {
        self.tensor
    }

    /// As [`Tensor::is_absent`].
    pub fn is_absent(&self) -> bool {
        self.tensor.is_absent()
    }

    /// As [`Tensor::dtype`].
    pub fn dtype(&self) -> Option<DType> {
        self.tensor.dtype()
    }

    /// As [`Tensor::dims`].
    pub fn dims(&self) -> &[i64] {
        self.tensor.dims()
    }

    /// As [`Tensor::strides`].
    pub fn strides(&self) -> &[i64] {
        self.tensor.strides()
    }

    /// As [`Tensor::rows`].
    pub fn rows(&self) -> usize {
        self.tensor.rows()
    }

    /// As [`Tensor::cols`].
    pub fn cols(&self) -> usize {
        self.tensor.cols()
    }

    /// As [`Tensor::len`].
    pub fn len(&self) -> usize {
        self.tensor.len()
    }

    /// As [`Tensor::is_empty`].
    pub fn is_empty(&self) -> bool {
        self.tensor.is_empty()
    }

    /// The data, when it is contiguous aligned host f32.
    pub fn as_f32_mut(&mut self) -> Result<&mut [f32], Failure> {
        self.slice(&[DType::F32])
    }

    /// The bit patterns, when it is contiguous aligned host bf16.
    pub fn as_bf16_mut(&mut self) -> Result<&mut [u16], Failure> {
        self.slice(&[DType::Bf16])
    }

    /// The bit patterns, when it is contiguous aligned host f16.
    pub fn as_f16_mut(&mut self) -> Result<&mut [u16], Failure> {
        self.slice(&[DType::F16])
    }

    /// The codes, when it is contiguous and host memory of a one-byte type (`u8`, `e4m3`, `e5m2`,
    /// `e2m1x2`).
    pub fn as_codes_mut(&mut self) -> Result<&mut [u8], Failure> {
        self.slice(&[DType::U8, DType::E4m3, DType::E5m2, DType::E2m1x2])
    }

    fn slice<T>(&mut self, dtypes: &[DType]) -> Result<&mut [T], Failure> {
        let data = slice_base::<T>(&self.tensor.view, dtypes)?;
        let Some(data) = data else { return Ok(&mut []) };
        // SAFETY: contiguous, aligned, of this type, in host memory, writable and ours alone by the
        // constructor; borrowed from `self`, so there is one slice at a time.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast_mut(), self.len()) })
    }

    /// One row of f32, when the elements of a row are adjacent: how a strided output is filled in
    /// place.
    pub fn row_f32_mut(&mut self, row: usize) -> Result<&mut [f32], Failure> {
        expect_row(row, self.rows())?;
        let (view, cols) = (&self.tensor.view, self.cols());
        let mut line = TensorView {
            data: offset_by(view, row_offset(view, row)),
            ..*view
        };
        line.rank = 1;
        line.dims[0] = cols as i64;
        line.strides[0] = self.strides().last().copied().unwrap_or(1);
        let data = slice_base::<f32>(&line, &[DType::F32])?;
        let Some(data) = data else { return Ok(&mut []) };
        // SAFETY: one row inside the view, checked as in `slice`.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast_mut(), cols) })
    }

    /// Writes all elements in row-major order, rounded to the dtype (nearest even); f32, f64, bf16
    /// and f16, any strides.
    pub fn write_f32(&mut self, data: &[f32]) -> Result<(), Failure> {
        expect_len("the data", self.len(), data.len())?;
        if self.tensor.is_contiguous() {
            return self.lane(0, 1, data);
        }
        let cols = self.cols();
        for (row, data) in data.chunks_exact(cols).enumerate() {
            self.write_row(row, data)?;
        }
        Ok(())
    }

    /// Writes one row, `row < rows()`, of [`TensorMut::cols`] elements, as
    /// [`TensorMut::write_f32`].
    pub fn write_row(&mut self, row: usize, data: &[f32]) -> Result<(), Failure> {
        expect_len("the row", self.cols(), data.len())?;
        expect_row(row, self.rows())?;
        let stride = self.strides().last().copied().unwrap_or(1);
        self.lane(row_offset(&self.tensor.view, row), stride, data)
    }

    fn lane(&mut self, offset: i64, stride: i64, data: &[f32]) -> Result<(), Failure> {
        let dtype = on_host(&self.tensor.view)?;
        if data.is_empty() {
            return Ok(());
        }
        let lane = Lane {
            base: self.tensor.view.data.cast::<u8>(),
            offset,
            stride,
        };
        // SAFETY: offset and stride come from the view and stay inside its dims, and so in writable
        // memory.
        unsafe {
            match dtype {
                DType::F32 => lane.write(data, |v| v),
                DType::F64 => lane.write(data, f64::from),
                DType::Bf16 => lane.write(data, formats::f32_to_bf16),
                DType::F16 => lane.write(data, formats::f32_to_f16),
                other => return Err(not_a_float(other)),
            }
        }
        Ok(())
    }
}

/// Whether two views share no byte, as far as it can be told: address ranges that do not meet, or
/// rows of one buffer side by side (the outputs of a pack). `false` means "they overlap, or nobody
/// can tell". Views on another device than the host's are taken as disjoint: their `data` is a
/// handle.
///
/// Both views must have passed [`Tensor::from_view`].
pub fn disjoint(a: &TensorView, b: &TensorView) -> bool {
    let (Some(x), Some(y)) = (extent(a), extent(b)) else {
        return true;
    };
    if x.1 <= y.0 || y.1 <= x.0 {
        return true;
    }
    let (Some((pitch, row_a)), Some((pitch_b, row_b))) = (uniform_rows(a), uniform_rows(b)) else {
        return false;
    };
    if pitch != pitch_b {
        return false;
    }
    let delta = (b.data as i128 - a.data as i128).rem_euclid(pitch as i128);
    delta >= row_a as i128 && delta + row_b as i128 <= pitch as i128
}

/// First and last address (exclusive) of a host view; `None` when it reaches no host byte.
fn extent(view: &TensorView) -> Option<(usize, usize)> {
    let dtype = DType::from_id(view.dtype).filter(|_| view.device == 0)?;
    let rank = view.rank as usize;
    if view.dims[..rank].contains(&0) {
        return None;
    }
    let (mut low, mut high) = (0_i64, 0_i64);
    for (dim, stride) in view.dims[..rank].iter().zip(&view.strides[..rank]) {
        let reach = (dim - 1) * stride;
        low += reach.min(0);
        high += reach.max(0);
    }
    let (base, size) = (view.data as usize, dtype.size());
    let from = base.wrapping_add_signed(low as isize * size as isize);
    let to = base.wrapping_add_signed((high as isize + 1) * size as isize);
    Some((from, to))
}

/// `(pitch, row)` in bytes, when the view is rows of adjacent elements, all a multiple of one pitch
/// apart.
fn uniform_rows(view: &TensorView) -> Option<(usize, usize)> {
    let size = DType::from_id(view.dtype)?.size();
    let rank = view.rank as usize;
    let (cols, lead) = match rank.checked_sub(1) {
        Some(last) if view.dims[last] == 1 || view.strides[last] == 1 => (view.dims[last], last),
        _ => return None,
    };
    let outer = view.dims[..lead]
        .iter()
        .zip(&view.strides[..lead])
        .filter(|(dim, _)| **dim > 1);
    let mut strides = outer.map(|(_, stride)| *stride);
    let pitch = strides.clone().min()?;
    if pitch <= 0 || strides.any(|stride| stride % pitch != 0) {
        return None;
    }
    Some((pitch as usize * size, cols as usize * size))
}

/// A strided run of elements.
struct Lane {
    base: *mut u8,
    offset: i64,
    stride: i64,
}

impl Lane {
    /// # Safety
    /// Every element `offset + i * stride`, `i < out.len()`, is a readable `T`.
    unsafe fn read<T: Copy, V>(&self, out: &mut [V], widen: impl Fn(T) -> V) {
        let base = self.base.cast::<T>().wrapping_offset(self.offset as isize);
        if self.stride == 1 {
            for (i, value) in out.iter_mut().enumerate() {
                // SAFETY: promised by the caller.
                *value = widen(unsafe { base.add(i).read_unaligned() });
            }
            return;
        }
        for (i, value) in out.iter_mut().enumerate() {
            let from = base.wrapping_offset(i as isize * self.stride as isize);
            // SAFETY: promised by the caller.
            *value = widen(unsafe { from.read_unaligned() });
        }
    }

    /// # Safety
    /// Every element `offset + i * stride`, `i < data.len()`, is a writable `T`.
    unsafe fn write<T: Copy>(&self, data: &[f32], round: impl Fn(f32) -> T) {
        let base = self.base.cast::<T>().wrapping_offset(self.offset as isize);
        for (i, value) in data.iter().enumerate() {
            let to = base.wrapping_offset(i as isize * self.stride as isize);
            // SAFETY: promised by the caller.
            unsafe { to.write_unaligned(round(*value)) };
        }
    }
}

/// First and last address (exclusive) of a view that is plainly good: host memory, rising strides,
/// sizes far from any overflow; an absent one reaches nothing. `None` says only that [`check`] has to
/// look. A view that passes here passes there.
#[inline]
fn plain(view: &TensorView, writable: bool) -> Option<(usize, usize)> {
    if view.dtype == 0 {
        return (!writable && view.rank == 0).then_some((0, 0));
    }
    let size = DType::from_id(view.dtype)?.size() as i64;
    let rank = view.rank as usize;
    if rank > MAX_RANK || view.device != 0 || view.flags != 0 || view.data.is_null() {
        return None;
    }
    let elements = match dense(view, rank) {
        Some(elements) => elements,
        None => spread(view, rank, writable)?,
    };
    let from = view.data.addr();
    let bytes = usize::try_from(elements.checked_mul(size)?).ok()?;
    Some((from, from.checked_add(bytes)?))
}

/// A copy by its parts: as one it is a call of `memcpy`, which costs as much as the checks.
#[inline]
fn by_parts(view: &TensorView) -> TensorView {
    TensorView {
        data: view.data,
        dtype: view.dtype,
        rank: view.rank,
        dims: view.dims,
        strides: view.strides,
        device: 0,
        flags: 0,
    }
}

/// The first `n` places.
///
/// # Safety
/// They were written.
#[inline]
unsafe fn written_of<T>(places: &[MaybeUninit<T>], n: usize) -> Option<&[T]> {
    let written = std::ptr::from_ref(places.get(..n)?) as *const [T];
    // SAFETY: promised by the caller; the layout is that of `T`.
    Some(unsafe { &*written })
}

/// Elements of a view that is row-major without gaps, as nearly all of a call are.
#[inline]
fn dense(view: &TensorView, rank: usize) -> Option<i64> {
    let mut count = 1_i64;
    for (dim, stride) in view.dims[..rank].iter().zip(&view.strides[..rank]).rev() {
        if *stride != count || *dim < 1 {
            return None;
        }
        count = count.checked_mul(*dim)?;
    }
    Some(count)
}

/// Elements from the first to the last of a view with rising strides; its count fits too.
fn spread(view: &TensorView, rank: usize, writable: bool) -> Option<i64> {
    let size = DType::from_id(view.dtype)?.size() as i64;
    let (mut count, mut last) = (1_i64, 0_i64);
    for (dim, stride) in view.dims[..rank].iter().zip(&view.strides[..rank]) {
        // A zero stride repeats elements, which is for reading.
        if *dim < 1 || *stride < i64::from(writable && *dim > 1) {
            return None;
        }
        count = count.checked_mul(*dim)?;
        last = last.checked_add((dim - 1).checked_mul(*stride)?)?;
    }
    count.checked_mul(size)?;
    last.checked_add(1)
}

/// What a form is called with: inputs, outputs, states.
pub(crate) type Tensors<'a, 'm> = (
    &'a [Tensor<'a>],
    &'m mut [TensorMut<'a>],
    &'m mut [TensorMut<'a>],
);

/// The tensors of a call, when every view is plainly good and no written one meets another. Inputs
/// stay where they lie; written ones are copied, because a form may exchange them. `None` says only
/// that somebody has to look closer.
///
/// # Safety
/// The views are lent for `'a`, outputs and states exclusively.
#[inline]
pub(crate) unsafe fn plain_call<'a, 'm>(
    inputs: &'a [TensorView],
    outputs: &'a [TensorView],
    states: &'a [TensorView],
    made: &'m mut [MaybeUninit<TensorMut<'a>>; PLAIN],
) -> Option<Tensors<'a, 'm>> {
    let apart = |a: (usize, usize), b: (usize, usize)| a.1 <= b.0 || b.1 <= a.0;
    // Places that are not used are not touched: filling them shows.
    let mut ranges = [MaybeUninit::<(usize, usize)>::uninit(); PLAIN];
    let mut n = 0;
    for views in [outputs, states] {
        for view in views {
            let range = plain(view, true)?;
            // SAFETY: the first `n` were written.
            if !unsafe { written_of(&ranges, n) }?
                .iter()
                .all(|other| apart(range, *other))
            {
                return None;
            }
            ranges.get_mut(n)?.write(range);
            made.get_mut(n)?.write(TensorMut {
                tensor: Tensor {
                    view: by_parts(view),
                    _data: PhantomData,
                },
                _data: PhantomData,
            });
            n += 1;
        }
    }
    // SAFETY: as above.
    let ranges = unsafe { written_of(&ranges, n) }?;
    for view in inputs {
        let range = plain(view, false)?;
        if !ranges.iter().all(|other| apart(range, *other)) {
            return None;
        }
    }
    let written = std::ptr::from_mut(made.get_mut(..n)?) as *mut [TensorMut<'a>];
    // SAFETY: the first `n` were made above. A `Tensor` is a checked view and has its layout; all
    // inputs were checked just now, and the caller lends their memory for `'a`.
    let (inputs, written) = unsafe {
        (
            std::slice::from_raw_parts(inputs.as_ptr().cast(), inputs.len()),
            &mut *written,
        )
    };
    let (outputs, states) = written.split_at_mut_checked(outputs.len())?;
    Some((inputs, outputs, states))
}

/// Checks everything about a view that numbers can tell. Returns its dtype, `None` when absent.
fn check(view: &TensorView) -> Result<Option<DType>, Failure> {
    if view.dtype == 0 {
        return Ok(None);
    }
    let dtype = DType::from_id(view.dtype)
        .ok_or_else(|| Failure::invalid("view_dtype", format!("unknown type id {}", view.dtype)))?;
    let rank = view.rank as usize;
    if rank > MAX_RANK {
        return Err(Failure::invalid(
            "view_rank",
            format!("rank {rank}, at most {MAX_RANK}"),
        ));
    }
    let (dims, strides) = (&view.dims[..rank], &view.strides[..rank]);
    let bad = || {
        let text = format!("dims {dims:?} with strides {strides:?} are negative or too large");
        Failure::invalid("view_dims", text)
    };
    if dims.iter().any(|dim| *dim < 0) {
        return Err(bad());
    }
    // Both the element count and the farthest reach in bytes must fit, so that no later product
    // overflows.
    let mut count = 1_i64;
    let mut reach = 0_i64;
    for (dim, stride) in dims.iter().zip(strides) {
        count = count.checked_mul((*dim).max(1)).ok_or_else(bad)?;
        let far = stride
            .checked_abs()
            .and_then(|s| s.checked_mul((dim - 1).max(0)));
        reach = far.and_then(|far| reach.checked_add(far)).ok_or_else(bad)?;
    }
    let bytes = count
        .max(reach + i64::from(reach < i64::MAX))
        .checked_mul(dtype.size() as i64);
    if bytes.is_none_or(|bytes| bytes > isize::MAX as i64) {
        return Err(bad());
    }
    if view.data.is_null() && !dims.contains(&0) {
        return Err(Failure::invalid(
            "view_null",
            format!("dims {dims:?} without data"),
        ));
    }
    Ok(Some(dtype))
}

fn contiguous(view: &TensorView) -> bool {
    let rank = view.rank as usize;
    if view.dims[..rank].contains(&0) {
        return true;
    }
    let mut expected = 1;
    for (dim, stride) in view.dims[..rank].iter().zip(&view.strides[..rank]).rev() {
        if *dim > 1 && *stride != expected {
            return false;
        }
        expected *= dim;
    }
    true
}

/// Element offset of the first element of row `row` (over the leading dims, row-major).
fn row_offset(view: &TensorView, row: usize) -> i64 {
    let lead = (view.rank as usize).saturating_sub(1);
    let mut rest = row as i64;
    let mut offset = 0;
    for (dim, stride) in view.dims[..lead].iter().zip(&view.strides[..lead]).rev() {
        offset += rest % dim * stride;
        rest /= dim;
    }
    offset
}

fn offset_by(view: &TensorView, elements: i64) -> *mut std::ffi::c_void {
    let size = DType::from_id(view.dtype).map_or(0, DType::size);
    view.data
        .cast::<u8>()
        .wrapping_offset(elements as isize * size as isize)
        .cast()
}

/// The address of a slice over the whole view, `None` when it has no element.
fn slice_base<T>(view: &TensorView, dtypes: &[DType]) -> Result<Option<*const T>, Failure> {
    let found = on_host(view)?;
    if !dtypes.contains(&found) {
        let expected: Vec<&str> = dtypes.iter().map(|d| d.name()).collect();
        let text = format!("dtype {}, expected {}", found.name(), expected.join(" or "));
        return Err(Failure::invalid("view_dtype", text));
    }
    let rank = view.rank as usize;
    if !contiguous(view) {
        let text = format!(
            "dims {:?}, strides {:?}",
            &view.dims[..rank],
            &view.strides[..rank]
        );
        return Err(Failure::invalid(
            "view_layout",
            format!("not contiguous: {text}"),
        ));
    }
    if view.dims[..rank].contains(&0) {
        return Ok(None);
    }
    let data = view.data.cast_const().cast::<T>();
    if !data.is_aligned() {
        return Err(Failure::invalid(
            "view_alignment",
            format!("{data:p} is not aligned"),
        ));
    }
    Ok(Some(data))
}

fn on_host(view: &TensorView) -> Result<DType, Failure> {
    let dtype = DType::from_id(view.dtype)
        .ok_or_else(|| Failure::invalid("view_absent", "the tensor is absent"))?;
    if view.device != 0 {
        let text = format!("on device {}, expected host memory", view.device);
        return Err(Failure::invalid("view_device", text));
    }
    Ok(dtype)
}

fn expect_len(what: &str, expected: usize, found: usize) -> Result<(), Failure> {
    if expected != found {
        let text = format!("{what} has {found} elements, expected {expected}");
        return Err(Failure::invalid("view_dims", text));
    }
    Ok(())
}

fn expect_row(row: usize, rows: usize) -> Result<(), Failure> {
    if row >= rows {
        return Err(Failure::invalid(
            "view_dims",
            format!("row {row} of {rows}"),
        ));
    }
    Ok(())
}

fn not_a_float(dtype: DType) -> Failure {
    Failure::invalid(
        "view_dtype",
        format!("dtype {} is not a float read here", dtype.name()),
    )
}

fn not_an_integer(dtype: DType) -> Failure {
    Failure::invalid(
        "view_dtype",
        format!("{} is not read as an integer", dtype.name()),
    )
}

fn row_major(
    data: *const std::ffi::c_void,
    len: usize,
    dtype: DType,
    dims: &[usize],
) -> Result<TensorView, Failure> {
    if dims.len() > MAX_RANK {
        return Err(Failure::invalid(
            "view_rank",
            format!("rank {}", dims.len()),
        ));
    }
    let count = dims
        .iter()
        .try_fold(1_usize, |count, dim| count.checked_mul(*dim));
    if count != Some(len) {
        let text = format!("{len} elements do not fill dims {dims:?}");
        return Err(Failure::invalid("view_dims", text));
    }
    let mut view = TensorView {
        data: data.cast_mut(),
        dtype: dtype as u32,
        rank: dims.len() as u32,
        ..TensorView::ABSENT
    };
    let mut stride = 1;
    for (axis, dim) in dims.iter().enumerate().rev() {
        view.dims[axis] = *dim as i64;
        view.strides[axis] = stride;
        stride *= (*dim as i64).max(1);
    }
    Ok(view)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(data: &[f32], dims: &[i64], strides: &[i64]) -> TensorView {
        let mut view = TensorView {
            data: data.as_ptr().cast_mut().cast(),
            dtype: DType::F32 as u32,
            rank: dims.len() as u32,
            ..TensorView::ABSENT
        };
        view.dims[..dims.len().min(8)].copy_from_slice(&dims[..dims.len().min(8)]);
        view.strides[..strides.len().min(8)].copy_from_slice(&strides[..strides.len().min(8)]);
        view
    }

    fn tensor(view: &TensorView) -> Result<Tensor<'static>, Failure> {
        // SAFETY: the tests keep their data alive and never write it meanwhile.
        unsafe { Tensor::from_view(view) }
    }

    fn code<T>(result: Result<T, Failure>) -> String {
        result.err().map_or("ok".into(), |failure| failure.code)
    }

    const DATA: [f32; 6] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0];

    #[test]
    fn malformed_views_are_refused_by_name() {
        let ok = view(&DATA, &[2, 3], &[3, 1]);
        assert_eq!(code(tensor(&ok)), "ok");
        assert_eq!(code(tensor(&TensorView { dtype: 99, ..ok })), "view_dtype");
        assert_eq!(code(tensor(&TensorView { rank: 9, ..ok })), "view_rank");
        assert_eq!(code(tensor(&view(&DATA, &[2, -3], &[3, 1]))), "view_dims");
        assert_eq!(
            code(tensor(&view(&DATA, &[1 << 40, 1 << 40], &[1, 1]))),
            "view_dims"
        );
        assert_eq!(
            code(tensor(&view(&DATA, &[2], &[i64::MAX / 2]))),
            "view_dims"
        );
        assert_eq!(code(tensor(&view(&DATA, &[2], &[i64::MIN]))), "view_dims");
        let null = TensorView {
            data: std::ptr::null_mut(),
            ..ok
        };
        assert_eq!(code(tensor(&null)), "view_null");
        assert_eq!(
            code(tensor(&TensorView {
                dims: [0; 8],
                ..null
            })),
            "ok"
        );
    }

    #[test]
    fn slices_need_dtype_device_layout_and_alignment() {
        let ok = view(&DATA, &[2, 3], &[3, 1]);
        let slice = |view: &TensorView| tensor(view).and_then(|t| t.as_f32());
        assert_eq!(slice(&ok).expect("contiguous"), DATA);
        assert_eq!(
            code(slice(&TensorView {
                dtype: DType::I32 as u32,
                ..ok
            })),
            "view_dtype"
        );
        assert_eq!(code(slice(&TensorView { device: 1, ..ok })), "view_device");
        assert_eq!(code(slice(&view(&DATA, &[3, 2], &[1, 3]))), "view_layout");
        assert_eq!(code(slice(&TensorView::ABSENT)), "view_absent");
        let odd = TensorView {
            data: DATA.as_ptr().cast::<u8>().wrapping_add(1).cast_mut().cast(),
            dims: [1, 1, 0, 0, 0, 0, 0, 0],
            ..ok
        };
        assert_eq!(code(slice(&odd)), "view_alignment");
        // A dim of size 1 may have any stride; a dim of size 0 makes everything contiguous and
        // empty.
        assert_eq!(
            slice(&view(&DATA, &[1, 3], &[77, 1])).expect("one row"),
            &DATA[..3]
        );
        assert!(slice(&view(&DATA, &[0, 3], &[7, 9]))
            .expect("empty")
            .is_empty());
    }

    #[test]
    fn integers_are_read_at_any_stride_and_floats_are_none() {
        let data: [i64; 6] = [0, -1, 2, 3, 4, 5];
        let of = |dims: &[i64], strides: &[i64]| TensorView {
            data: data.as_ptr().cast_mut().cast(),
            dtype: DType::I64 as u32,
            ..view(&DATA, dims, strides)
        };
        let read = |view: &TensorView| tensor(view).and_then(|t| t.to_i64_vec());
        assert_eq!(read(&of(&[], &[])), Ok(vec![0]));
        assert_eq!(read(&of(&[3, 2], &[1, 3])), Ok(vec![0, 3, -1, 4, 2, 5]));
        let bytes = TensorView {
            dtype: DType::I8 as u32,
            ..of(&[2], &[8])
        };
        assert_eq!(read(&bytes), Ok(vec![0, -1]));
        assert_eq!(code(read(&view(&DATA, &[6], &[1]))), "view_dtype");
    }

    #[test]
    fn strides_read_transposed_broadcast_and_reversed() {
        let read = |view: &TensorView| tensor(view).and_then(|t| t.to_f32_vec()).expect("readable");
        assert_eq!(
            read(&view(&DATA, &[3, 2], &[1, 3])),
            [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
        );
        assert_eq!(
            read(&view(&DATA, &[2, 3], &[0, 1])),
            [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
        );
        assert_eq!(
            read(&view(&DATA[5..], &[6], &[-1])),
            [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
        );
        assert_eq!(read(&view(&DATA, &[], &[])), [0.0]);
        let column = tensor(&view(&DATA, &[2, 3], &[3, 1])).and_then(|t| t.select(1, 2));
        assert_eq!(
            column.and_then(|t| t.to_f32_vec()).expect("column"),
            [2.0, 5.0]
        );
        let turned = tensor(&view(&DATA, &[2, 3], &[3, 1])).and_then(|t| t.transpose(0, 1));
        let turned = turned.expect("two axes");
        assert_eq!(
            (turned.dims(), turned.strides()),
            (&[3, 2][..], &[1, 3][..])
        );
        assert_eq!(code(turned.transpose(0, 2)), "view_dims");
        let cube = tensor(&view(&DATA, &[3, 1, 2], &[2, 2, 1])).expect("cube");
        assert_eq!((cube.rows(), cube.cols(), cube.len()), (3, 2, 6));
        let mut row = [0.0; 2];
        cube.read_row(2, &mut row).expect("row");
        assert_eq!(row, [4.0, 5.0]);
        assert_eq!(code(cube.read_row(3, &mut row)), "view_dims");
    }

    #[test]
    fn broadcasting_aligns_from_the_last_dim() {
        let row = Tensor::from_f32(&DATA[..3], &[1, 3]).expect("fits");
        let wide = row.broadcast_to(&[2, 2, 3]).expect("broadcasts");
        assert_eq!(wide.to_f32_vec().expect("readable"), DATA[..3].repeat(4));
        assert_eq!(code(row.broadcast_to(&[3, 2])), "view_dims");
        assert_eq!(code(row.broadcast_to(&[3])), "view_dims");
        assert_eq!(code(Tensor::ABSENT.broadcast_to(&[3])), "view_dims");
    }

    #[test]
    fn every_float_dtype_widens() {
        let bits = [0x3f80_u16, 0xc000];
        let bf16 = Tensor::from_bf16(&bits, &[2]).expect("fits");
        assert_eq!(bf16.to_f32_vec().expect("bf16"), [1.0, -2.0]);
        assert_eq!(bf16.as_bf16().expect("raw"), bits);
        assert_eq!(code(bf16.as_f16()), "view_dtype");
        let raw = |data: *const u8, dtype: DType| {
            let mut v = TensorView {
                dtype: dtype as u32,
                rank: 1,
                ..TensorView::ABSENT
            };
            (v.data, v.dims[0], v.strides[0]) = (data.cast_mut().cast(), 2, 1);
            tensor(&v).and_then(|t| t.to_f32_vec())
        };
        let f16 = [0x3c00_u16, 0xc000];
        assert_eq!(
            raw(f16.as_ptr().cast(), DType::F16).expect("f16"),
            [1.0, -2.0]
        );
        let f64 = [1.0_f64, -2.0];
        assert_eq!(
            raw(f64.as_ptr().cast(), DType::F64).expect("f64"),
            [1.0, -2.0]
        );
        let e4m3 = [0x38_u8, 0xc0];
        assert_eq!(raw(e4m3.as_ptr(), DType::E4m3).expect("e4m3"), [1.0, -2.0]);
        let e5m2 = [0x3c_u8, 0xc0];
        assert_eq!(raw(e5m2.as_ptr(), DType::E5m2).expect("e5m2"), [1.0, -2.0]);
        assert_eq!(code(raw(e5m2.as_ptr(), DType::U8)), "view_dtype");
    }

    #[test]
    fn writes_round_and_respect_strides() {
        let mut bits = [0_u16; 6];
        let mut out = TensorMut::from_bf16(&mut bits, &[2, 3]).expect("fits");
        out.write_f32(&[1.0, 1.003_906_3, -2.0, 0.0, 3.0, 1.0 + 3.0 / 256.0])
            .expect("writes");
        assert_eq!(bits, [0x3f80, 0x3f80, 0xc000, 0, 0x4040, 0x3f82]);

        let mut data = [9.0_f32; 6];
        let mut strided = view(&data, &[2, 2], &[3, 1]);
        strided.data = data.as_mut_ptr().cast();
        // SAFETY: `data` is borrowed by nobody else until the assertion below.
        let mut out = unsafe { TensorMut::from_view(&strided) }.expect("a view");
        assert_eq!(code(out.as_f32_mut()), "view_layout");
        out.write_f32(&[1.0, 2.0, 3.0, 4.0]).expect("writes");
        out.row_f32_mut(1).expect("a row")[1] = 5.0;
        assert_eq!(code(out.row_f32_mut(2)), "view_dims");
        assert_eq!(data, [1.0, 2.0, 9.0, 3.0, 5.0, 9.0]);

        strided.strides[0] = 0;
        // SAFETY: refused before anything is written.
        let refused = unsafe { TensorMut::from_view(&strided) };
        assert_eq!(code(refused), "view_layout");
        let mut one = [0.0_f32];
        let mut out = TensorMut::from_f32(&mut one, &[1]).expect("fits");
        assert_eq!(code(out.write_f32(&[1.0, 2.0])), "view_dims");
    }

    #[test]
    fn overlap_is_seen_and_rows_side_by_side_are_not() {
        let buffer = [0.0_f32; 64];
        let v = |from: usize, dims: &[i64], strides: &[i64]| view(&buffer[from..], dims, strides);
        assert!(disjoint(&v(0, &[2, 4], &[4, 1]), &v(8, &[8], &[1])));
        assert!(!disjoint(&v(0, &[2, 4], &[4, 1]), &v(7, &[8], &[1])));
        // Two column blocks of one [4, 8] buffer, and two that meet in one column.
        assert!(disjoint(&v(0, &[4, 5], &[8, 1]), &v(5, &[4, 3], &[8, 1])));
        assert!(!disjoint(&v(0, &[4, 5], &[8, 1]), &v(4, &[4, 3], &[8, 1])));
        // The second block wraps into the next row of the first.
        assert!(!disjoint(&v(0, &[4, 5], &[8, 1]), &v(5, &[3, 4], &[8, 1])));
        // Batches of rows, still one pitch; another pitch cannot be told apart.
        assert!(disjoint(
            &v(0, &[2, 2, 5], &[16, 8, 1]),
            &v(5, &[4, 3], &[8, 1])
        ));
        assert!(!disjoint(&v(0, &[4, 2], &[8, 1]), &v(4, &[4, 2], &[6, 1])));
        assert!(disjoint(&TensorView::ABSENT, &v(0, &[4], &[1])));
        assert!(disjoint(&v(0, &[4], &[-1]), &v(1, &[4], &[1])));
    }

    #[test]
    fn an_input_that_is_a_state_is_not_read() {
        let mut t = Tensor::from_f32(&DATA, &[6]).expect("fits");
        t.mark_aliased();
        assert_eq!(code(t.as_f32()), "view_aliased");
        assert_eq!(code(t.to_f32_vec()), "view_aliased");
    }

    #[test]
    fn what_is_plainly_good_is_good_and_its_range_is_the_extent() {
        const SIZES: [i64; 12] = [
            0,
            1,
            1,
            2,
            3,
            4,
            7,
            -1,
            1 << 20,
            1 << 33,
            i64::MAX / 3,
            i64::MAX,
        ];
        let mut seed = 1_u64;
        let mut pick = |n: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed % n as u64) as usize
        };
        let data = [0_f32; 4];
        let mut seen = [0, 0];
        for _ in 0..200_000 {
            let rank = pick(5);
            let dims: Vec<i64> = (0..rank).map(|_| SIZES[pick(SIZES.len())]).collect();
            let mut strides = vec![1_i64; rank];
            for axis in (1..rank).rev() {
                strides[axis - 1] = strides[axis].wrapping_mul(dims[axis]);
            }
            if pick(2) == 0 {
                strides
                    .iter_mut()
                    .for_each(|s| *s = SIZES[pick(SIZES.len())]);
            }
            let mut v = view(&data, &dims, &strides);
            v.dtype = pick(14) as u32;
            match pick(20) {
                0 => v.device = 1,
                1 => v.flags = ALIASED,
                2 => v.rank = 9,
                3 => v.data = std::ptr::null_mut(),
                _ => {}
            }
            for writable in [false, true] {
                let Some(range) = plain(&v, writable) else {
                    seen[0] += 1;
                    continue;
                };
                seen[1] += 1;
                let found = check(&v);
                assert!(found.is_ok(), "{v:?}: {found:?}");
                let repeats = |(d, s): (&i64, &i64)| *d > 1 && *s == 0;
                let repeats = v.dims[..rank].iter().zip(&v.strides[..rank]).any(repeats);
                assert!(!writable || !repeats, "{v:?}");
                match found.expect("checked") {
                    None => assert_eq!(range, (0, 0)),
                    Some(_) => assert_eq!(Some(range), extent(&v), "{v:?}"),
                }
            }
        }
        assert!(seen.iter().all(|n| *n > 1_000), "{seen:?}");
    }

    #[test]
    fn a_plain_call_hands_out_what_it_was_given_and_nothing_that_meets() {
        let (x, mut y) = ([1.0_f32, 2.0], [0.0_f32; 4]);
        let x = view(&x, &[2], &[1]);
        let y = {
            let y = TensorMut::from_f32(&mut y, &[4]).expect("fits");
            *y.as_tensor().view()
        };
        let half = |from: usize| TensorView {
            data: offset_by(&y, from as i64),
            dims: [2, 0, 0, 0, 0, 0, 0, 0],
            ..y
        };
        let lists = |inputs: &[TensorView], outputs: &[TensorView], states: &[TensorView]| {
            let mut made = [const { MaybeUninit::uninit() }; PLAIN];
            // SAFETY: the memory lives in this test and nobody else uses it.
            let call = unsafe { plain_call(inputs, outputs, states, &mut made) };
            call.map(|(a, b, c)| {
                b.iter_mut()
                    .for_each(|t| t.write_f32(&[5.0, 6.0]).expect("writes"));
                let sum: f32 = a
                    .iter()
                    .map(|t| t.to_f32_vec().unwrap_or_default().iter().sum::<f32>())
                    .sum();
                (sum, a.len(), b.len(), c.len())
            })
        };
        let absent = TensorView::ABSENT;
        assert_eq!(
            lists(&[x, absent], &[half(0)], &[half(2)]),
            Some((3.0, 2, 1, 1))
        );
        assert_eq!(lists(&[half(0)], &[half(2)], &[]), Some((11.0, 1, 1, 0)));
        assert_eq!(lists(&[], &[], &[]), Some((0.0, 0, 0, 0)));
        // One element in common is enough, wherever it is.
        assert_eq!(lists(&[x], &[half(0)], &[half(1)]), None);
        assert_eq!(lists(&[half(1)], &[half(0)], &[]), None);
        assert_eq!(lists(&[half(1)], &[], &[half(2)]), None);
        assert_eq!(lists(&[x], &[absent], &[]), None, "nothing to write");
        let many = [half(0); PLAIN + 1];
        assert_eq!(lists(&[x], &many, &[]), None);
    }
}
