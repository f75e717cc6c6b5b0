//! Owned memory across the boundary: who made it frees it.
//!
//! [`Bytes`] carries its maker's `release`, so an allocation of one library is never freed by the
//! allocator of another. Both sides use this file: a plugin (through the export macro) fills
//! [`Bytes`] and [`Error`], a host takes them with [`read_bytes`] and [`take_error`]. Nothing else
//! of the ABI owns memory.

use crate::abi::{Bytes, Error, Status, Str};
use crate::sdk::Failure;

impl Bytes {
    /// Hands `bytes` to the other side; its receiver calls `release`.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        if bytes.capacity() == 0 {
            return Bytes::EMPTY;
        }
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        Bytes {
            ptr: bytes.as_mut_ptr(),
            len: bytes.len(),
            capacity: bytes.capacity(),
            release: Some(release),
        }
    }
}

/// Frees what [`Bytes::from_vec`] made and empties the struct, so that a second call does nothing.
unsafe extern "C" fn release(bytes: *mut Bytes) {
    // SAFETY: the receiver passes the struct it was given, or null.
    let Some(bytes) = (unsafe { bytes.as_mut() }) else {
        return;
    };
    let Bytes {
        ptr, len, capacity, ..
    } = std::mem::replace(bytes, Bytes::EMPTY);
    if !ptr.is_null() {
        // SAFETY: the three values came out of a `Vec<u8>` of this library, and are taken exactly
        // once.
        drop(unsafe { Vec::from_raw_parts(ptr, len, capacity) });
    }
}

/// Copies the bytes and releases them. Afterwards `bytes` is empty.
///
/// # Safety
/// `bytes` is as its maker left it: `ptr` readable for `len`, `release` its own function or null.
pub unsafe fn read_bytes(bytes: &mut Bytes) -> Vec<u8> {
    let copy = if bytes.ptr.is_null() || bytes.len == 0 {
        Vec::new()
    } else {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts(bytes.ptr, bytes.len) }.to_vec()
    };
    if let Some(release) = bytes.release {
        // SAFETY: promised by the caller; the struct is emptied below, so it runs once.
        unsafe { release(bytes) };
    }
    *bytes = Bytes::EMPTY;
    copy
}

/// Takes code and message of a status other than 0 and releases both. Text that is not UTF-8 is
/// repaired.
///
/// # Safety
/// As [`read_bytes`], for both members.
pub unsafe fn take_error(status: Status, error: &mut Error) -> Failure {
    // SAFETY: promised by the caller.
    let (code, message) = unsafe { (read_bytes(&mut error.code), read_bytes(&mut error.message)) };
    Failure {
        status,
        code: String::from_utf8_lossy(&code).into_owned(),
        message: String::from_utf8_lossy(&message).into_owned(),
    }
}

/// Writes a failure into the caller's [`Error`]; a null pointer drops it. What was there is not
/// released: the caller passes [`Error::EMPTY`].
///
/// # Safety
/// `out` is null or writable.
pub unsafe fn put_error(out: *mut Error, failure: Failure) -> Status {
    if !out.is_null() {
        let error = Error {
            code: Bytes::from_vec(failure.code.into_bytes()),
            message: Bytes::from_vec(failure.message.into_bytes()),
        };
        // SAFETY: promised by the caller; `write` does not read what was there.
        unsafe { out.write(error) };
    }
    failure.status
}

/// Borrows the text of a [`Str`]; `what` names it in the failure.
///
/// # Safety
/// `text.ptr` is readable for `text.len` bytes during `'a`, or `len` is 0.
pub unsafe fn read_str<'a>(text: Str, what: &str) -> Result<&'a str, Failure> {
    if text.len == 0 {
        return Ok("");
    }
    if text.ptr.is_null() {
        return Err(Failure::invalid(
            "argument",
            format!("{what} is null with length {}", text.len),
        ));
    }
    // SAFETY: promised by the caller.
    let bytes = unsafe { std::slice::from_raw_parts(text.ptr, text.len) };
    std::str::from_utf8(bytes)
        .map_err(|e| Failure::invalid("argument", format!("{what} is not UTF-8: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::STATUS_REFUSED;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn bytes_come_back_once_and_leave_nothing() {
        let mut bytes = Bytes::from_vec(b"hello".to_vec());
        // SAFETY: made by `from_vec` just above.
        assert_eq!(unsafe { read_bytes(&mut bytes) }, b"hello");
        assert!(bytes.ptr.is_null() && bytes.release.is_none());
        // SAFETY: empty after the first read.
        assert!(unsafe { read_bytes(&mut bytes) }.is_empty());
    }

    #[test]
    fn a_maker_that_does_not_empty_its_bytes_is_still_called_once() {
        static RELEASED: AtomicUsize = AtomicUsize::new(0);
        unsafe extern "C" fn counts(_: *mut Bytes) {
            RELEASED.fetch_add(1, Ordering::Relaxed);
        }
        let mut text = *b"abc";
        let (ptr, len, capacity) = (text.as_mut_ptr(), text.len(), 0);
        let mut bytes = Bytes {
            ptr,
            len,
            capacity,
            release: Some(counts),
        };
        // SAFETY: `text` outlives both reads, and its release frees nothing.
        let (first, second) = unsafe { (read_bytes(&mut bytes), read_bytes(&mut bytes)) };
        assert_eq!((first.as_slice(), second.len()), (&b"abc"[..], 0));
        assert_eq!(RELEASED.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn errors_cross_with_code_and_message() {
        let mut error = Error::EMPTY;
        let sent = Failure::refused("envelope", "K is 7, not a multiple of 64");
        // SAFETY: `error` is writable, then filled.
        let back = unsafe {
            let status = put_error(&mut error, sent.clone());
            take_error(status, &mut error)
        };
        assert_eq!((back.status, &back), (STATUS_REFUSED, &sent));
        // SAFETY: null is allowed.
        let status = unsafe { put_error(std::ptr::null_mut(), sent) };
        assert_eq!(status, STATUS_REFUSED);
    }

    #[test]
    fn text_is_checked() {
        let bad = [0xff_u8, 0xfe];
        let text = Str {
            ptr: bad.as_ptr(),
            len: 2,
        };
        // SAFETY: the bytes live on.
        let failure = unsafe { read_str(text, "form") }.expect_err("not UTF-8");
        assert!(failure.message.contains("form"), "{failure}");
        // SAFETY: a null pointer is never read.
        unsafe {
            assert!(read_str(
                Str {
                    ptr: std::ptr::null(),
                    len: 3
                },
                "span"
            )
            .is_err());
            assert_eq!(
                read_str(
                    Str {
                        ptr: std::ptr::null(),
                        len: 0
                    },
                    "span"
                ),
                Ok("")
            );
        }
    }
}
