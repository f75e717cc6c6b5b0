//! The shared pool as the crew of captured steps: one set of threads for the host's own loops and every plugin's.

use structures_graph::Crew;
use structures_loader::pool::{Awake, Pool};

/// The pool's workers, spinning as long as this lives: hold it for the length of a step.
pub struct Shift {
    pool: &'static Pool,
    awake: Awake<'static>,
}

impl Shift {
    /// Wakes them.
    pub fn begin() -> Self {
        let pool = Pool::global();
        Shift {
            pool,
            awake: pool.stay_awake(),
        }
    }
}

impl Crew for Shift {
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn run(&self, n: usize, body: &(dyn Fn(usize) + Sync)) {
        self.pool.parallel_for(n, body);
    }

    /// candle's products have threads of their own, as many as this pool: they do not meet.
    fn aside(&self, body: &mut dyn FnMut()) {
        self.awake.aside(body);
    }
}
