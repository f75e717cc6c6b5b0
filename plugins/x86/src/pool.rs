//! What call buffers are counted in: lines of 64 bytes, seen as numbers. The pool itself is the SDK's.

/// 64 bytes, aligned to a cache line: what buffers are counted in.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Line(pub [u8; 64]);

impl Default for Line {
    fn default() -> Self {
        Line([0; 64])
    }
}

impl Line {
    /// Lines that hold `count` values of a type.
    pub fn of<T>(count: usize) -> usize {
        (count * size_of::<T>()).div_ceil(64)
    }
}

/// Types of which any bytes are a value, with an alignment that a line satisfies.
///
/// # Safety
/// As said.
pub unsafe trait Plain: Copy {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: numbers.
unsafe impl Plain for i32 {}
// SAFETY: numbers.
unsafe impl Plain for i16 {}
// SAFETY: numbers.
unsafe impl Plain for u16 {}
// SAFETY: numbers.
unsafe impl Plain for i8 {}

/// Lines seen as numbers.
pub fn plain<T: Plain>(lines: &mut [Line]) -> &mut [T] {
    let len = size_of_val(lines) / size_of::<T>();
    // SAFETY: `T` is plain and its alignment divides 64; the length is rounded down.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), len) }
}

/// Room for a form's calls.
pub type Reservation = structures_plugin_api::sdk::pool::Reservation<Line>;

/// The backend's arenas.
pub type Pool = structures_plugin_api::sdk::pool::Pool<Line>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_room_for_any_number() {
        let pool = Pool::default();
        let mut lease = pool.take(6);
        let [a, b] = lease.split([2, 4]);
        plain::<f32>(a).fill(1.0);
        plain::<i8>(b).fill(2);
        assert_eq!((plain::<f32>(a).len(), plain::<i8>(b).len()), (32, 256));
        assert_eq!((Line::of::<f32>(17), Line::of::<i8>(64)), (2, 1));
    }
}
