//! Borrowed tensors for the other side of the boundary, checked on this side.
//!
//! A [`HostTensor`] is a view together with the borrow that keeps its memory alive and unchanged; a
//! [`HostTensorMut`] the same with exclusive access. Their constructors check that dims and strides stay inside
//! the slice, so nothing above the loader needs `unsafe` to call a plugin. They have the layout of
//! [`TensorView`], so a slice of them crosses the boundary as it is.

use std::borrow::Cow;
use std::ffi::c_void;
use std::marker::PhantomData;

use half::{bf16, f16};
use structures_plugin_api::abi::{DType, TensorView, MAX_RANK};

use crate::error::LoaderError;

mod sealed {
    pub trait Sealed {}
}

/// Element types a slice of which is a tensor.
pub trait Element: sealed::Sealed + Copy + 'static {
    /// Its id.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => {
        $(impl sealed::Sealed for $t {}
        impl Element for $t { const DTYPE: DType = DType::$d; })*
    };
}

elements!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i8 => I8, u8 => U8, i32 => I32, i64 => I64);

/// A read-only tensor in host memory, or an absent optional.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct HostTensor<'a> {
    view: TensorView,
    borrow: PhantomData<&'a [u8]>,
}

/// What a call reads.
pub type TensorArg<'a> = HostTensor<'a>;

/// A tensor in host memory that a call fills or updates. No two elements share memory.
#[repr(transparent)]
#[derive(Debug)]
pub struct HostTensorMut<'a> {
    view: TensorView,
    borrow: PhantomData<&'a mut [u8]>,
}

/// What a call writes.
pub type TensorArgMut<'a> = HostTensorMut<'a>;

// SAFETY: behaves as the `&[u8]` it borrows: shared, read-only memory.
unsafe impl Send for HostTensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for HostTensor<'_> {}
// SAFETY: behaves as the `&mut [u8]` it borrows: exclusive memory.
unsafe impl Send for HostTensorMut<'_> {}
// SAFETY: as above; a shared reference to it gives no access to the memory.
unsafe impl Sync for HostTensorMut<'_> {}

impl<'a> HostTensor<'a> {
    /// An absent optional.
    pub const ABSENT: HostTensor<'static> = HostTensor {
        view: TensorView::ABSENT,
        borrow: PhantomData,
    };

    /// A row-major tensor over all of `data`.
    ///
    /// # Errors
    /// [`LoaderError::Tensor`] when `dims` do not multiply to the length of `data`.
    pub fn new<T: Element>(data: &'a [T], dims: &[usize]) -> Result<Self, LoaderError> {
        exact(T::DTYPE, data.len(), dims)?;
        Self::strided(data, dims, &row_major(dims)[..dims.len()])
    }

    /// A tensor with strides in elements, 0 to broadcast; the first element is `data[0]`.
    ///
    /// # Errors
    /// [`LoaderError::Tensor`] when an element would lie outside `data` or the rank is above 8.
    pub fn strided<T: Element>(
        data: &'a [T],
        dims: &[usize],
        strides: &[usize],
    ) -> Result<Self, LoaderError> {
        let view = view(
            data.as_ptr().cast_mut().cast(),
            T::DTYPE,
            data.len(),
            dims,
            strides,
        )?;
        Ok(HostTensor {
            view,
            borrow: PhantomData,
        })
    }

    /// A tensor over raw bytes of any type, FP8 and FP4 included; for `e2m1x2` strides and the last dim count
    /// pairs.
    ///
    /// # Errors
    /// As [`HostTensor::strided`], and when the bytes are not aligned for the type.
    pub fn bytes(
        data: &'a [u8],
        dtype: DType,
        dims: &[usize],
        strides: &[usize],
    ) -> Result<Self, LoaderError> {
        aligned(data.as_ptr(), dtype)?;
        let elements = data.len() / dtype.size();
        let view = view(
            data.as_ptr().cast_mut().cast(),
            dtype,
            elements,
            dims,
            strides,
        )?;
        Ok(HostTensor {
            view,
            borrow: PhantomData,
        })
    }

    /// Whether it stands for an absent optional.
    pub fn is_absent(&self) -> bool {
        self.view.dtype == 0
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[i64] {
        &self.view.dims[..self.view.rank as usize]
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        &self.view.strides[..self.view.rank as usize]
    }

    /// Element type; `None` for an absent optional.
    pub fn dtype(&self) -> Option<DType> {
        DType::from_id(self.view.dtype)
    }

    /// Its elements' bytes in row-major order, repeated ones repeated.
    pub(crate) fn bytes_of(self) -> Cow<'a, [u8]> {
        let Some(dtype) = self.dtype() else {
            return Cow::Borrowed(&[]);
        };
        let (size, data) = (dtype.size(), self.view.data.cast::<u8>());
        if is_row_major(&self.view) {
            // SAFETY: the constructors checked that the dims stay inside the borrowed slice.
            return Cow::Borrowed(unsafe {
                std::slice::from_raw_parts(data, byte_count(&self.view))
            });
        }
        let mut out = Vec::with_capacity(byte_count(&self.view));
        each_offset(&self.view, |offset| {
            // SAFETY: as above, for one element.
            out.extend_from_slice(unsafe {
                std::slice::from_raw_parts(data.add(offset * size), size)
            });
        });
        Cow::Owned(out)
    }

    pub(crate) fn view(&self) -> &TensorView {
        &self.view
    }

    pub(crate) fn as_views(tensors: &[HostTensor<'_>]) -> *const TensorView {
        tensors.as_ptr().cast() // repr(transparent)
    }
}

impl Default for HostTensorMut<'_> {
    /// A place in a list that nothing fills yet.
    fn default() -> Self {
        HostTensorMut {
            view: TensorView::ABSENT,
            borrow: PhantomData,
        }
    }
}

impl<'a> HostTensorMut<'a> {
    /// A row-major tensor over all of `data`.
    ///
    /// # Errors
    /// As [`HostTensor::new`].
    pub fn new<T: Element>(data: &'a mut [T], dims: &[usize]) -> Result<Self, LoaderError> {
        exact(T::DTYPE, data.len(), dims)?;
        // Elements that follow each other share no memory, and a call is no place to allocate.
        let strides = &row_major(dims)[..dims.len()];
        let at = data.as_mut_ptr().cast();
        let view = view(at, T::DTYPE, data.len(), dims, strides)?;
        Ok(HostTensorMut {
            view,
            borrow: PhantomData,
        })
    }

    /// A tensor with strides in elements; the first element is `data[0]`.
    ///
    /// # Errors
    /// As [`HostTensor::strided`], and when two elements would share memory.
    pub fn strided<T: Element>(
        data: &'a mut [T],
        dims: &[usize],
        strides: &[usize],
    ) -> Result<Self, LoaderError> {
        injective(dims, strides)?;
        let view = view(
            data.as_mut_ptr().cast(),
            T::DTYPE,
            data.len(),
            dims,
            strides,
        )?;
        Ok(HostTensorMut {
            view,
            borrow: PhantomData,
        })
    }

    /// A tensor over raw bytes of any type, as [`HostTensor::bytes`].
    ///
    /// # Errors
    /// As [`HostTensor::bytes`], and when two elements would share memory.
    pub fn bytes(
        data: &'a mut [u8],
        dtype: DType,
        dims: &[usize],
        strides: &[usize],
    ) -> Result<Self, LoaderError> {
        aligned(data.as_ptr(), dtype)?;
        injective(dims, strides)?;
        let elements = data.len() / dtype.size();
        let view = view(data.as_mut_ptr().cast(), dtype, elements, dims, strides)?;
        Ok(HostTensorMut {
            view,
            borrow: PhantomData,
        })
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[i64] {
        &self.view.dims[..self.view.rank as usize]
    }

    /// Element type.
    pub(crate) fn dtype(&self) -> DType {
        // The constructors take no other id.
        DType::from_id(self.view.dtype).unwrap_or(DType::U8)
    }

    /// Bytes of its elements.
    pub(crate) fn byte_count(&self) -> usize {
        byte_count(&self.view)
    }

    /// The same memory, read.
    pub(crate) fn as_tensor(&self) -> HostTensor<'_> {
        HostTensor {
            view: self.view,
            borrow: PhantomData,
        }
    }

    /// Takes its elements from bytes in row-major order, as many as [`HostTensorMut::byte_count`].
    pub(crate) fn fill_from(&mut self, bytes: &[u8]) {
        let (size, data) = (self.dtype().size(), self.view.data.cast::<u8>());
        let mut elements = bytes.chunks_exact(size);
        each_offset(&self.view, |offset| {
            if let Some(element) = elements.next() {
                // SAFETY: the constructors checked that the dims stay inside the slice, borrowed exclusively.
                unsafe {
                    std::ptr::copy_nonoverlapping(element.as_ptr(), data.add(offset * size), size);
                }
            }
        });
    }

    pub(crate) fn as_views(tensors: &mut [HostTensorMut<'_>]) -> *const TensorView {
        tensors.as_ptr().cast() // repr(transparent)
    }
}

fn byte_count(view: &TensorView) -> usize {
    let elements: i64 = view.dims[..view.rank as usize].iter().product();
    let size = DType::from_id(view.dtype).map_or(0, DType::size);
    elements as usize * size
}

fn is_row_major(view: &TensorView) -> bool {
    let mut stride = 1;
    let axes = (0..view.rank as usize).rev();
    axes.into_iter().all(|axis| {
        let same = view.strides[axis] == stride || view.dims[axis] == 1;
        stride *= view.dims[axis].max(1);
        same
    })
}

/// The offset of every element, in row-major order.
fn each_offset(view: &TensorView, mut visit: impl FnMut(usize)) {
    let rank = view.rank as usize;
    let (dims, strides) = (&view.dims[..rank], &view.strides[..rank]);
    if dims.contains(&0) {
        return;
    }
    let mut at = [0_i64; MAX_RANK];
    loop {
        let offset: i64 = at.iter().zip(strides).map(|(i, s)| i * s).sum();
        visit(offset as usize);
        let Some(axis) = (0..rank).rev().find(|axis| at[*axis] + 1 < dims[*axis]) else {
            return;
        };
        at[axis] += 1;
        at[axis + 1..].fill(0);
    }
}

fn view(
    data: *mut c_void,
    dtype: DType,
    elements: usize,
    dims: &[usize],
    strides: &[usize],
) -> Result<TensorView, LoaderError> {
    if dims.len() > MAX_RANK || dims.len() != strides.len() {
        return Err(wrong(format!(
            "expected at most {MAX_RANK} dims and as many strides, found {} dims and {} strides",
            dims.len(),
            strides.len()
        )));
    }
    // Sizes and offsets must also fit i64 and a byte count must fit usize: bounded by the slice below, except for
    // dims of an empty tensor and broadcast dims, which are bounded here.
    let product = dims.iter().try_fold(1_usize, |p, d| p.checked_mul(*d));
    let bounded = dims
        .iter()
        .chain(strides)
        .all(|n| *n <= i64::MAX as usize / 16);
    let last = dims
        .iter()
        .zip(strides)
        .try_fold(0_usize, |sum, (dim, stride)| {
            dim.saturating_sub(1)
                .checked_mul(*stride)
                .and_then(|part| sum.checked_add(part))
        });
    let empty = dims.contains(&0);
    let inside = matches!(last, Some(last) if last < elements) || empty;
    if product.is_none() || !bounded || !inside {
        return Err(wrong(format!(
            "dims {dims:?} with strides {strides:?} reach past {elements} elements of {}",
            dtype.name()
        )));
    }
    let mut view = TensorView {
        data,
        dtype: dtype as u32,
        rank: dims.len() as u32,
        ..TensorView::ABSENT
    };
    for (i, (dim, stride)) in dims.iter().zip(strides).enumerate() {
        view.dims[i] = *dim as i64;
        view.strides[i] = *stride as i64;
    }
    Ok(view)
}

fn exact(dtype: DType, elements: usize, dims: &[usize]) -> Result<(), LoaderError> {
    if dims.len() > MAX_RANK {
        let found = dims.len();
        return Err(wrong(format!(
            "expected at most {MAX_RANK} dims, found {found}"
        )));
    }
    let product = dims.iter().try_fold(1_usize, |p, d| p.checked_mul(*d));
    if product == Some(elements) {
        return Ok(());
    }
    Err(wrong(format!(
        "dims {dims:?} do not cover exactly {elements} elements of {}",
        dtype.name()
    )))
}

/// As many as there are dims; of more than the largest rank none, which [`exact`] has refused.
fn row_major(dims: &[usize]) -> [usize; MAX_RANK] {
    let mut strides = [1_usize; MAX_RANK];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(dims[i].max(1));
    }
    strides
}

/// Sufficient for "no two indices meet": sorted by stride, each stride reaches past everything below it.
fn injective(dims: &[usize], strides: &[usize]) -> Result<(), LoaderError> {
    // A call is no place to allocate. More dims than this are refused by whoever makes the view.
    let mut list = [(0, 0); MAX_RANK];
    let each = strides.iter().copied().zip(dims.iter().copied());
    let mut n = 0;
    for (to, axis) in list.iter_mut().zip(each.filter(|(_, d)| *d > 1)) {
        *to = axis;
        n += 1;
    }
    let axes = &mut list[..n];
    axes.sort_unstable();
    let mut reach = 0_usize;
    for (stride, dim) in axes.iter().copied() {
        if stride <= reach {
            return Err(wrong(format!(
                "an output must not overlap itself, found dims {dims:?} with strides {strides:?}"
            )));
        }
        reach = reach.saturating_add((dim - 1).saturating_mul(stride));
    }
    Ok(())
}

fn aligned(data: *const u8, dtype: DType) -> Result<(), LoaderError> {
    let size = dtype.size();
    if data.addr().is_multiple_of(size) {
        return Ok(());
    }
    Err(wrong(format!(
        "expected {} data at a multiple of {size} bytes",
        dtype.name()
    )))
}

fn wrong(reason: String) -> LoaderError {
    LoaderError::Tensor { reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_covers_its_tensor() {
        let data = [0.0_f32; 6];
        let t = HostTensor::new(&data, &[2, 3]).expect("fits");
        assert_eq!(
            (t.dims(), t.strides(), t.dtype()),
            (&[2, 3][..], &[3, 1][..], Some(DType::F32))
        );
        assert!(HostTensor::new(&data, &[2, 2]).is_err());
        assert!(HostTensor::new(&data, &[usize::MAX, 2]).is_err());
        assert!(HostTensor::new(&data[..0], &[0, 5]).is_ok());
        assert!(
            HostTensor::new(&data[..1], &[]).is_ok(),
            "rank 0 is one element"
        );
        assert!(HostTensor::new(&data[..0], &[]).is_err());
        assert!(HostTensor::ABSENT.is_absent() && HostTensor::ABSENT.dtype().is_none());
    }

    #[test]
    fn strides_stay_inside() {
        let data = [0_i8; 6];
        assert!(
            HostTensor::strided(&data, &[3, 2], &[1, 3]).is_ok(),
            "transposed"
        );
        assert!(
            HostTensor::strided(&data, &[100, 2], &[0, 1]).is_ok(),
            "broadcast"
        );
        assert!(HostTensor::strided(&data, &[3, 2], &[2, 3]).is_err());
        assert!(HostTensor::strided(&data, &[3, 2], &[usize::MAX, 1]).is_err());
        assert!(HostTensor::strided(&data, &[usize::MAX, usize::MAX], &[0, 0]).is_err());
        assert!(
            HostTensor::strided(&data, &[0, 2], &[9, 9]).is_ok(),
            "nothing is reached"
        );
        assert!(HostTensor::strided(&data, &[1; 9], &[1; 9]).is_err());
        assert!(HostTensor::strided(&data, &[1], &[1, 1]).is_err());
    }

    #[test]
    fn an_output_does_not_overlap_itself() {
        let mut data = [0.0_f32; 12];
        assert!(HostTensorMut::new(&mut data, &[3, 4]).is_ok());
        assert!(
            HostTensorMut::strided(&mut data, &[3, 2], &[4, 1]).is_ok(),
            "rows of a wider buffer"
        );
        assert!(
            HostTensorMut::strided(&mut data, &[2, 3], &[1, 4]).is_ok(),
            "columns"
        );
        assert!(HostTensorMut::strided(&mut data, &[3, 2], &[0, 1]).is_err());
        assert!(HostTensorMut::strided(&mut data, &[3, 3], &[2, 1]).is_err());
        assert!(
            HostTensorMut::strided(&mut data, &[1, 4], &[0, 1]).is_ok(),
            "a dim of 1 never moves"
        );
    }

    #[test]
    fn bytes_are_aligned_for_their_type() {
        let words = [0_u32; 4];
        // SAFETY: any initialised memory may be read as bytes.
        let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), 16) };
        assert!(HostTensor::bytes(bytes, DType::F32, &[4], &[1]).is_ok());
        assert!(HostTensor::bytes(bytes, DType::F32, &[5], &[1]).is_err());
        assert!(HostTensor::bytes(&bytes[1..], DType::F32, &[3], &[1]).is_err());
        assert!(HostTensor::bytes(&bytes[1..], DType::E4m3, &[15], &[1]).is_ok());
        assert!(HostTensor::bytes(&bytes[..15], DType::F32, &[4], &[1]).is_err());
    }

    #[test]
    fn the_wrappers_are_views() {
        assert_eq!(size_of::<HostTensor>(), 152);
        assert_eq!(size_of::<HostTensorMut>(), 152);
    }
}
