//! The log bridge: plugins' messages into `tracing`, under their id, without ever making a plugin wait.
//!
//! A kernel's thread must not stand behind a terminal or a full pipe. So an entry copies the text, hands it to one
//! thread of the process that does the writing, and returns; when [`LIMIT`] messages of a plugin wait already, the new
//! one is dropped and counted, and the count is logged with the next message that gets through. Each plugin has a limit
//! of its own: a chatty one costs the others nothing.
//!
//! A message goes to the subscriber that was current where it was sent, so scoped subscribers see it too. It does not
//! own what is shown: levels and formats are the subscriber's.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use structures_plugin_api::abi::LogLevel;
use tracing::{dispatcher, Dispatch};

/// Messages of one plugin that may wait.
pub(crate) const LIMIT: usize = 256;

/// One plugin's end.
#[derive(Debug)]
pub(crate) struct Bridge {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    plugin: String,
    waiting: AtomicUsize,
    dropped: AtomicU64,
}

struct Message {
    from: Arc<Shared>,
    subscriber: Dispatch,
    level: u32,
    target: String,
    text: String,
    dropped: u64,
}

impl Bridge {
    pub(crate) fn new(plugin: &str) -> Self {
        Bridge {
            shared: Arc::new(Shared {
                plugin: plugin.to_string(),
                waiting: AtomicUsize::new(0),
                dropped: AtomicU64::new(0),
            }),
        }
    }

    /// Whether anybody listens at this level. Asked before a text is copied.
    pub(crate) fn listens(level: u32) -> bool {
        match level {
            l if l == LogLevel::Error as u32 => tracing::enabled!(tracing::Level::ERROR),
            l if l == LogLevel::Warn as u32 => tracing::enabled!(tracing::Level::WARN),
            l if l == LogLevel::Info as u32 => tracing::enabled!(tracing::Level::INFO),
            l if l == LogLevel::Debug as u32 => tracing::enabled!(tracing::Level::DEBUG),
            _ => tracing::enabled!(tracing::Level::TRACE),
        }
    }

    /// Sends a message on its way, or drops and counts it. Never waits.
    pub(crate) fn send(&self, level: u32, target: String, text: String) {
        let shared = &self.shared;
        let room = shared
            .waiting
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| {
                (n < LIMIT).then_some(n + 1)
            });
        if room.is_err() {
            shared.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let message = Message {
            from: Arc::clone(shared),
            subscriber: dispatcher::get_default(Dispatch::clone),
            level,
            target,
            text,
            dropped: shared.dropped.swap(0, Ordering::Relaxed),
        };
        if let Err(back) = writer().queue.send(message) {
            // There is no writing thread: better slow than lost.
            back.0.write();
        }
    }

    /// Waits until this plugin's messages are written, or `patience` is over. For the end of a plugin, when no kernel
    /// waits; not for its calls.
    pub(crate) fn flush(&self, patience: Duration) {
        let end = Instant::now() + patience;
        let writer = writer();
        let mut idle = writer.idle.lock().unwrap_or_else(|e| e.into_inner());
        while self.shared.waiting.load(Ordering::Acquire) > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let woken = writer.wrote.wait_timeout(idle, left);
            idle = woken.unwrap_or_else(|e| e.into_inner()).0;
        }
    }
}

impl Message {
    fn write(self) {
        let (plugin, from, text) = (self.from.plugin.as_str(), self.target, self.text);
        // A subscriber that panics costs its message, not the thread that writes all others'.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            dispatcher::with_default(&self.subscriber, || {
                if self.dropped > 0 {
                    let dropped = self.dropped;
                    tracing::warn!(plugin, dropped, "log messages of the plugin were dropped");
                }
                match self.level {
                    l if l == LogLevel::Error as u32 => tracing::error!(plugin, from, "{text}"),
                    l if l == LogLevel::Warn as u32 => tracing::warn!(plugin, from, "{text}"),
                    l if l == LogLevel::Info as u32 => tracing::info!(plugin, from, "{text}"),
                    l if l == LogLevel::Debug as u32 => tracing::debug!(plugin, from, "{text}"),
                    _ => tracing::trace!(plugin, from, "{text}"),
                }
            });
        }));
        self.from.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

struct Writer {
    queue: Sender<Message>,
    idle: Mutex<()>,
    wrote: Condvar,
}

fn writer() -> &'static Writer {
    static WRITER: OnceLock<Writer> = OnceLock::new();
    WRITER.get_or_init(|| {
        let (queue, messages) = channel::<Message>();
        // Without a thread the receiver is gone, and `send` writes itself.
        let _ = std::thread::Builder::new()
            .name("plugin-log".into())
            .spawn(move || {
                for message in messages {
                    message.write();
                    let writer = writer();
                    drop(writer.idle.lock().unwrap_or_else(|e| e.into_inner()));
                    writer.wrote.notify_all();
                }
            });
        Writer {
            queue,
            idle: Mutex::default(),
            wrote: Condvar::new(),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::MutexGuard;

    use super::*;

    /// What a subscriber wrote; locked, it makes the subscriber wait.
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Sink {
        fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
            self.0.lock().expect("lock")
        }

        fn text(&self) -> String {
            String::from_utf8(self.lock().clone()).expect("UTF-8")
        }

        fn listen<R>(&self, f: impl FnOnce() -> R) -> R {
            let writer = self.clone();
            let subscriber = tracing_subscriber::fmt()
                .with_ansi(false)
                .with_max_level(tracing::Level::DEBUG)
                .with_writer(move || writer.clone())
                .finish();
            tracing::subscriber::with_default(subscriber, f)
        }
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    const LONG: Duration = Duration::from_secs(20);

    /// Runs `f` while the subscriber waits; whether it came back meanwhile.
    fn while_blocked(sink: &Sink, f: impl FnOnce() + Send) -> bool {
        let subscriber = dispatcher::get_default(Dispatch::clone);
        let blocked = sink.lock();
        std::thread::scope(|scope| {
            let run = scope.spawn(move || dispatcher::with_default(&subscriber, f));
            let end = Instant::now() + LONG;
            while !run.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            let back = run.is_finished();
            drop(blocked);
            back
        })
    }

    #[test]
    fn a_subscriber_that_blocks_makes_no_plugin_wait_and_drops_are_counted() {
        let sink = Sink::default();
        let (chatty, other) = (Bridge::new("chatty"), Bridge::new("other"));
        sink.listen(|| {
            let back = while_blocked(&sink, || {
                for i in 0..10 * LIMIT {
                    chatty.send(LogLevel::Info as u32, "t".into(), format!("message {i};"));
                }
                other.send(LogLevel::Warn as u32, "t".into(), "mine".into());
            });
            assert!(back, "the plugins waited");
            chatty.flush(LONG);
            chatty.send(LogLevel::Info as u32, "t".into(), "after".into());
            chatty.flush(LONG);
            other.flush(LONG);
        });
        let text = sink.text();
        assert!(text.contains("message 0;") && text.contains(&format!("message {};", LIMIT - 1)));
        assert!(!text.contains(&format!("message {LIMIT};")), "dropped");
        let lost = text.lines().find(|l| l.contains("dropped")).expect("told");
        assert!(lost.contains(&format!("dropped={}", 9 * LIMIT)), "{lost}");
        assert!(lost.contains("chatty"), "{lost}");
        let mine = text.lines().find(|l| l.contains("mine")).expect("kept");
        assert!(mine.contains("other") && mine.contains("WARN"), "{mine}");
    }

    #[test]
    fn levels_nobody_listens_to_are_not_copied() {
        Sink::default().listen(|| {
            assert!(Bridge::listens(LogLevel::Debug as u32));
            assert!(!Bridge::listens(LogLevel::Trace as u32) && !Bridge::listens(77));
        });
    }

    #[test]
    fn waiting_for_a_blocked_subscriber_ends() {
        let sink = Sink::default();
        let bridge = Bridge::new("p");
        sink.listen(|| {
            let back = while_blocked(&sink, || {
                bridge.send(LogLevel::Error as u32, "t".into(), "stuck".into());
                bridge.flush(Duration::from_millis(50));
            });
            assert!(back, "it waited longer");
        });
        bridge.flush(LONG);
        assert!(sink.text().contains("stuck"));
    }
}
