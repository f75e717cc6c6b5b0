//! What the host lends to a plugin: the entries of [`HostVTable`].
//!
//! One leaked context a plugin: its id for the log, its scratch. It is never freed, because a plugin is never
//! unloaded and may keep a thread that still logs. The pool is the process's own ([`crate::pool`]).

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard};

use structures_plugin_api::abi::{HostVTable, Str, API_MINOR};

use crate::log::Bridge;
use crate::pool::{Body, Pool};

/// Features a plugin's `requires` may name.
pub const HOST_FEATURES: &[&str] = &["log", "parallel_for", "scratch"];

/// Smallest alignment of a lease: a cache line, and a whole AVX-512 register.
const ALIGN: usize = 64;
/// Longest text that is taken from a log call.
const LONGEST_TEXT: usize = 64 * 1024;

/// How long closing a plugin waits for its last messages.
const FLUSH: std::time::Duration = std::time::Duration::from_millis(200);

/// A plugin's view of the host.
pub(crate) struct HostTable {
    context: &'static Context,
    table: &'static HostVTable,
}

impl HostTable {
    /// A new context and its table, for the plugin named `id`.
    pub(crate) fn leak(id: &str) -> Self {
        let context: &'static Context = Box::leak(Box::new(Context {
            plugin: id.to_string(),
            log: Bridge::new(id),
            scratch: Mutex::new(Scratch::default()),
        }));
        let table = Box::leak(Box::new(HostVTable {
            struct_size: size_of::<HostVTable>() as u32,
            api_minor: API_MINOR,
            ctx: std::ptr::from_ref(context).cast_mut().cast(),
            log,
            num_threads,
            parallel_for,
            scratch_lease,
            scratch_release,
        }));
        HostTable { context, table }
    }

    pub(crate) fn as_ptr(&self) -> *const HostVTable {
        self.table
    }

    /// Leases scratch on behalf of the host, as the plugin would.
    pub(crate) fn lease(&self, tag: &str, bytes: u64, align: u64) -> *mut c_void {
        self.context.scratch().lease(tag, bytes, align)
    }

    pub(crate) fn release(&self, memory: *mut c_void) {
        self.context.scratch().release(&self.context.plugin, memory);
    }

    /// Waits a moment for what the plugin logged.
    pub(crate) fn flush_log(&self) {
        self.context.log.flush(FLUSH);
    }

    /// Bytes of scratch this plugin holds or has pooled.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.context.scratch().bytes
    }
}

struct Context {
    plugin: String,
    log: Bridge,
    scratch: Mutex<Scratch>,
}

impl Context {
    fn scratch(&self) -> MutexGuard<'_, Scratch> {
        self.scratch
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

/// Scratch of one plugin. A block is on lease to one holder at a time, so forms share memory when they lease for
/// the length of a call, and are merely safe when they hold a lease for longer.
#[derive(Default)]
struct Scratch {
    /// Free blocks by tag; a plugin has a handful of tags.
    free: Vec<(String, Vec<Block>)>,
    /// Address -> index of the tag, block.
    leased: HashMap<usize, (usize, Block)>,
    bytes: u64,
}

struct Block {
    memory: *mut u8,
    layout: Layout,
}

// SAFETY: a block is plain memory owned by the pool that holds it.
unsafe impl Send for Block {}

impl Scratch {
    fn lease(&mut self, tag: &str, bytes: u64, align: u64) -> *mut c_void {
        let (Ok(bytes), Ok(align)) = (usize::try_from(bytes), usize::try_from(align)) else {
            return std::ptr::null_mut();
        };
        let Ok(wanted) = Layout::from_size_align(bytes.max(1), align.max(ALIGN)) else {
            return std::ptr::null_mut();
        };
        let index = self
            .free
            .iter()
            .position(|(t, _)| t == tag)
            .unwrap_or_else(|| {
                self.free.push((tag.to_string(), Vec::new()));
                self.free.len() - 1
            });
        let free = &mut self.free[index].1;
        let fits =
            |b: &Block| b.layout.size() >= wanted.size() && b.layout.align() >= wanted.align();
        let block = match free.iter().position(fits) {
            Some(i) => free.swap_remove(i),
            None => {
                // A tag grows to its largest lease: the block that was too small goes.
                if let Some(small) = free.pop() {
                    self.bytes -= small.layout.size() as u64;
                    small.free();
                }
                let Some(block) = Block::new(wanted) else {
                    return std::ptr::null_mut();
                };
                self.bytes += wanted.size() as u64;
                block
            }
        };
        let memory = block.memory;
        self.leased.insert(memory.addr(), (index, block));
        memory.cast()
    }

    fn release(&mut self, plugin: &str, memory: *mut c_void) {
        if memory.is_null() {
            return;
        }
        match self.leased.remove(&memory.addr()) {
            Some((index, block)) => self.free[index].1.push(block),
            None => tracing::error!(
                plugin,
                "released scratch at {memory:p} that is not on lease"
            ),
        }
    }
}

impl Block {
    fn new(layout: Layout) -> Option<Self> {
        // SAFETY: the layout has a size of at least 1.
        let memory = unsafe { alloc_zeroed(layout) };
        (!memory.is_null()).then_some(Block { memory, layout })
    }

    fn free(self) {
        // SAFETY: allocated with this layout, and nobody holds the block any more.
        unsafe { dealloc(self.memory, self.layout) };
    }
}

/// # Safety
/// `ctx` is the context of a [`HostTable`].
unsafe fn context<'a>(ctx: *mut c_void) -> Option<&'a Context> {
    // SAFETY: promised by the caller; contexts are leaked, so they live for ever.
    unsafe { ctx.cast_const().cast::<Context>().as_ref() }
}

/// # Safety
/// `text` is readable for its length.
unsafe fn text(text: Str) -> String {
    if text.ptr.is_null() || text.len == 0 {
        return String::new();
    }
    // SAFETY: promised by the caller.
    let bytes = unsafe { std::slice::from_raw_parts(text.ptr, text.len.min(LONGEST_TEXT)) };
    String::from_utf8_lossy(bytes).into_owned()
}

unsafe extern "C" fn log(ctx: *mut c_void, level: u32, target: Str, message: Str) {
    // SAFETY: the table's own context.
    let Some(context) = (unsafe { context(ctx) }) else {
        return;
    };
    // Nothing here may unwind into the plugin, and a subscriber's filter is a stranger's code too.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        if Bridge::listens(level) {
            // SAFETY: both texts are borrowed for the call, says the ABI.
            let (target, message) = unsafe { (text(target), text(message)) };
            context.log.send(level, target, message);
        }
    }));
}

unsafe extern "C" fn num_threads(_: *mut c_void) -> usize {
    Pool::global().threads()
}

unsafe extern "C" fn parallel_for(_: *mut c_void, n: usize, body: Body, user: *mut c_void) {
    // SAFETY: the plugin promises what the ABI asks of a body, which is what `run` asks.
    unsafe { Pool::global().run(n, body, user) };
}

unsafe extern "C" fn scratch_lease(
    ctx: *mut c_void,
    tag: Str,
    bytes: u64,
    align: u64,
) -> *mut c_void {
    // SAFETY: the table's own context; the tag is borrowed for the call.
    let (context, tag) = unsafe { (context(ctx), text(tag)) };
    context.map_or(std::ptr::null_mut(), |c| {
        c.scratch().lease(&tag, bytes, align)
    })
}

unsafe extern "C" fn scratch_release(ctx: *mut c_void, memory: *mut c_void) {
    // SAFETY: the table's own context.
    if let Some(context) = unsafe { context(ctx) } {
        context.scratch().release(&context.plugin, memory);
    }
}

/// The table a child gets that only describes: none.
pub(crate) const NO_HOST: *const HostVTable = std::ptr::null();

#[cfg(test)]
mod tests {
    use structures_plugin_api::abi::LogLevel;
    use structures_plugin_api::sdk::Host;

    use super::*;

    fn host() -> (HostTable, Host) {
        let table = HostTable::leak("p");
        // SAFETY: a leaked table of this process.
        let host = unsafe { Host::from_raw(table.as_ptr()) }.expect("a whole table");
        (table, host)
    }

    #[test]
    fn scratch_is_shared_by_tag_and_never_between_two_leases() {
        let (table, host) = host();
        let a = host.scratch("t", 1000, 1).expect("memory");
        let b = host.scratch("t", 1000, 4096).expect("memory");
        let (pa, pb) = (a.as_ptr(), b.as_ptr());
        assert!(pa != pb && pa.addr() % 64 == 0 && pb.addr() % 4096 == 0);
        drop((a, b));
        let held = table.scratch_bytes();
        let again = host.scratch("t", 500, 1).expect("memory");
        assert!(again.as_ptr() == pa || again.as_ptr() == pb);
        assert_eq!(table.scratch_bytes(), held, "nothing was allocated");
        let other = host.scratch("u", 500, 1).expect("memory");
        assert!(other.as_ptr() != pa && other.as_ptr() != pb);
    }

    #[test]
    fn a_tag_grows_to_its_largest_lease() {
        let (table, host) = host();
        for bytes in [100, 200, 300, 50] {
            drop(host.scratch("t", bytes, 64).expect("memory"));
        }
        assert_eq!(table.scratch_bytes(), 300);
    }

    #[test]
    fn absurd_requests_are_refused_and_foreign_memory_ignored() {
        let (table, host) = host();
        assert!(host.scratch("t", u64::MAX, 64).is_none());
        assert!(host.scratch("t", 1 << 60, 64).is_none());
        assert!(
            host.scratch("t", 8, 3 << 20).is_none(),
            "not a power of two"
        );
        let mut own = 0_u8;
        table.release((&raw mut own).cast());
        table.release(std::ptr::null_mut());
    }

    #[test]
    fn the_pool_is_reached_through_the_table() {
        let (_table, host) = host();
        assert_eq!(host.num_threads(), Pool::global().threads());
        let mut data = vec![0_u32; 1000];
        host.parallel_chunks(&mut data, 10, |i, piece| piece.fill(i as u32));
        assert!(data.iter().enumerate().all(|(i, v)| *v == i as u32 / 10));
    }

    #[test]
    fn logs_arrive_with_the_plugin_s_id() {
        use std::io::Write;
        #[derive(Clone, Default)]
        struct Sink(std::sync::Arc<Mutex<Vec<u8>>>);
        impl Write for Sink {
            fn write(&mut self, b: &[u8]) -> std::io::Result<usize> {
                self.0.lock().expect("lock").extend_from_slice(b);
                Ok(b.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let (table, host) = host();
            host.log(LogLevel::Warn, "kernels", "careful");
            table.flush_log();
        });
        let text = String::from_utf8(sink.0.lock().expect("lock").clone()).expect("UTF-8");
        for part in ["WARN", "plugin=\"p\"", "from=\"kernels\"", "careful"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
