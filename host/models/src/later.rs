//! A result that a thread of its own makes while its owner goes on, and that is waited for where it is read.
//!
//! Owns the waiting. A thread that cannot be had is no failure: the work is then done at once.

use std::sync::{Mutex, OnceLock};
use std::thread::{Builder, JoinHandle};

/// See the module.
#[derive(Debug)]
pub struct Later<T> {
    value: OnceLock<Option<T>>,
    maker: Mutex<Option<JoinHandle<T>>>,
}

impl<T: Send + 'static> Later<T> {
    /// What is there already.
    pub fn ready(value: T) -> Self {
        Later {
            value: OnceLock::from(Some(value)),
            maker: Mutex::new(None),
        }
    }

    /// Begins to make it.
    pub fn begin(name: &str, make: impl Fn() -> T + Clone + Send + 'static) -> Self {
        match Builder::new().name(name.into()).spawn(make.clone()) {
            Ok(maker) => Later {
                value: OnceLock::new(),
                maker: Mutex::new(Some(maker)),
            },
            Err(_) => Self::ready(make()),
        }
    }

    /// The value, waited for; `None` when its thread panicked.
    pub fn get(&self) -> Option<&T> {
        let made = self.value.get_or_init(|| {
            let maker = self.maker.lock().unwrap_or_else(|e| e.into_inner()).take();
            maker.and_then(|maker| maker.join().ok())
        });
        made.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once_and_waited_for() {
        let (go, wait) = std::sync::mpsc::channel::<u32>();
        let wait = std::sync::Arc::new(Mutex::new(wait));
        let later = Later::begin("later", move || wait.lock().unwrap().recv().unwrap() + 1);
        std::thread::scope(|s| {
            let readers = [0, 1].map(|_| s.spawn(|| later.get().copied()));
            go.send(1).unwrap();
            for reader in readers {
                assert_eq!(reader.join().unwrap(), Some(2));
            }
        });
        assert_eq!(Later::ready(3).get(), Some(&3));
    }

    #[test]
    fn a_panic_is_no_value() {
        let later: Later<u32> = Later::begin("later", || panic!("planned"));
        assert_eq!((later.get(), later.get()), (None, None));
    }
}
