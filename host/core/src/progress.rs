//! Progress of long work, for whoever shows it.

/// Told what is going on. All methods may be called often and must be quick.
pub trait Progress {
    /// A stage begins; `total` ticks are to come, 0 when nobody knows.
    fn stage(&self, name: &str, total: usize);
    /// One more of them is done.
    fn tick(&self);
}

/// Shows nothing.
pub struct Silent;

impl Progress for Silent {
    fn stage(&self, _name: &str, _total: usize) {}
    fn tick(&self) {}
}
