//! Reads the tables of the other side, whatever minor version it was built with.
//!
//! A table starts with its size. What a shorter one does not cover is an optional entry that is not
//! there; what a longer one has beyond ours is of a later minor and not read. A table shorter than
//! API 1.0's, or one that leaves out an entry 1.0 promises, is no table. Nothing is borrowed: the
//! result is a copy in this host's layout.

use std::mem::{offset_of, MaybeUninit};

use structures_plugin_api::abi::{
    DeviceVTable, FormVTable, PluginVTable, API_MAJOR, API_MINOR, API_VERSION,
};

use crate::code::{Code, Refusal};

/// The size of one entry: a pointer.
const WORD: usize = size_of::<usize>();
/// Size and minor version, what every table starts with.
const HEAD: usize = 2 * size_of::<u32>();

/// A table of the ABI.
///
/// # Safety
/// `repr(C)`, at least [`HEAD`] bytes of head, then pointer-sized entries; every entry that is not
/// in `REQUIRED` may be all zeroes.
pub(crate) unsafe trait Table: Copy {
    /// For messages.
    const NAME: &'static str;
    /// Smallest size.
    const SIZE_1_0: usize;
    /// Entries that are never null, with their offsets.
    const REQUIRED: &'static [(&'static str, usize)];
}

macro_rules! table {
    ($table:ident $name:literal: $($entry:ident),+) => {
        // SAFETY: see `abi`; the entries that are not listed are raw pointers or options.
        unsafe impl Table for $table {
            const NAME: &'static str = $name;
            const SIZE_1_0: usize = $table::SIZE_1_0;
            const REQUIRED: &'static [(&'static str, usize)] =
                &[$((stringify!($entry), offset_of!($table, $entry))),+];
        }
    };
}

table!(PluginVTable "plugin table": describe, open, close, probe, bind, form);
table!(FormVTable "form table": call, facts, release);
table!(DeviceVTable "device table": open, alloc, free, copy_in, copy_out, queue_new, synchronize,
    elapsed, capture_begin, capture_end);

/// Copies the table at `from`.
///
/// # Safety
/// `from` is null or readable for the size it states.
pub(crate) unsafe fn read<T: Table>(from: *const T) -> Result<T, Refusal> {
    let refused = |what: String| Err(Code::DoorFailed.because(format!("{}: {what}", T::NAME)));
    if from.is_null() {
        return refused(format!("found none; this host serves API {API_VERSION}"));
    }
    if !from.cast::<usize>().is_aligned() {
        return refused(format!("expected a multiple of {WORD}, found {from:p}"));
    }
    // SAFETY: promised by the caller; every table has its head.
    let [size, minor] = unsafe { from.cast::<[u32; 2]>().read() };
    let size = size as usize;
    if size < T::SIZE_1_0 {
        return refused(format!(
            "expected at least the {} bytes of API {API_MAJOR}.0, found {size}; \
             the plugin was built for API {API_MAJOR}.{minor}, this host serves {API_VERSION}",
            T::SIZE_1_0
        ));
    }
    let mut table = MaybeUninit::<T>::zeroed();
    // Whole entries only: half a pointer is none.
    let bytes = size.min(size_of::<T>()) / WORD * WORD;
    // SAFETY: `bytes` are readable at `from`, says its size, and fit `table`.
    unsafe {
        from.cast::<u8>()
            .copy_to_nonoverlapping(table.as_mut_ptr().cast(), bytes);
    }
    for (entry, offset) in T::REQUIRED {
        debug_assert!(*offset >= HEAD && offset + WORD <= T::SIZE_1_0);
        // SAFETY: inside the table, pointer-sized and aligned, and initialised above.
        let word = unsafe { table.as_ptr().byte_add(*offset).cast::<usize>().read() };
        if word == 0 {
            return refused(format!(
                "entry `{entry}` is null; the plugin was built for API {API_MAJOR}.{minor}, \
                 this host serves {API_VERSION}"
            ));
        }
    }
    if minor > API_MINOR && size > size_of::<T>() {
        tracing::debug!(
            "{}: {} bytes of the later API {API_MAJOR}.{minor} are not read",
            T::NAME,
            size - size_of::<T>()
        );
    }
    // SAFETY: the required entries are not null; the rest is valid when zeroed, and was copied or is
    // zero.
    Ok(unsafe { table.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words that look like a table of `size` bytes.
    fn words(size: usize, minor: u32) -> Vec<usize> {
        let mut words = vec![0x1000; size.div_ceil(WORD).max(1)];
        words[0] = size | (minor as usize) << 32;
        words
    }

    fn plugin(words: &[usize]) -> Result<PluginVTable, Refusal> {
        // SAFETY: `words` covers the size it states; no entry is called.
        unsafe { read(words.as_ptr().cast()) }
    }

    #[test]
    fn shorter_and_longer_tables_are_read_as_far_as_both_go() {
        let full = size_of::<PluginVTable>();
        let old = plugin(&words(PluginVTable::SIZE_1_0, 0)).expect("1.0");
        assert!(old.devices.is_none());
        assert!(plugin(&words(full, 1)).expect("this").devices.is_some());
        assert!(plugin(&words(full + 64, 9))
            .expect("later")
            .devices
            .is_some());
        let mut ragged = words(full, 1);
        ragged[0] = (full - 1) | 1 << 32;
        assert!(
            plugin(&ragged).expect("ragged").devices.is_none(),
            "half a pointer is none"
        );
    }

    #[test]
    fn what_1_0_promises_is_there_or_there_is_no_table() {
        for size in [0, 8, PluginVTable::SIZE_1_0 - 8] {
            let refusal = plugin(&words(size, 7)).err().expect("short");
            assert_eq!(refusal.code, Code::DoorFailed);
            assert!(refusal.reason.contains("1.7") && refusal.reason.contains(API_VERSION));
        }
        for (entry, offset) in PluginVTable::REQUIRED {
            let mut words = words(size_of::<PluginVTable>(), 1);
            words[offset / WORD] = 0;
            let refusal = plugin(&words).err().expect(entry);
            assert!(refusal.reason.contains(entry), "{refusal}");
        }
        let mut device_less = words(size_of::<PluginVTable>(), 1);
        device_less[offset_of!(PluginVTable, device) / WORD] = 0;
        assert!(plugin(&device_less).expect("no device").device.is_null());
        // SAFETY: null is never read.
        assert!(unsafe { read::<FormVTable>(std::ptr::null()) }.is_err());
        let words = words(256, 1);
        let misplaced = words.as_ptr().wrapping_byte_add(4).cast::<FormVTable>();
        // SAFETY: a misaligned table is not read.
        assert!(unsafe { read::<FormVTable>(misplaced) }.is_err());
    }
}
