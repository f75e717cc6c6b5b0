//! Progress of long work: a bar on a terminal, plain lines elsewhere, both on stderr.

use std::cell::RefCell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use structures::progress::Progress;

use crate::say::{one_line, say};

/// Shows stages.
pub struct Bars {
    mode: Mode,
    bar: RefCell<Option<ProgressBar>>,
    started: RefCell<Option<(String, Instant)>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Bar,
    Lines,
    Quiet,
}

impl Bars {
    /// By what stderr is.
    pub fn new(quiet: bool) -> Self {
        let mode = match (quiet, std::io::stderr().is_terminal()) {
            (true, _) => Mode::Quiet,
            (false, true) => Mode::Bar,
            (false, false) => Mode::Lines,
        };
        Bars {
            mode,
            bar: RefCell::new(None),
            started: RefCell::new(None),
        }
    }

    /// Ends the current stage.
    pub fn finish(&self) {
        if let Some(bar) = self.bar.borrow_mut().take() {
            bar.finish_and_clear();
        }
        if let Some((name, since)) = self.started.borrow_mut().take() {
            if self.mode == Mode::Lines {
                say(&format!(
                    "  {}: {:.1} s",
                    one_line(&name),
                    since.elapsed().as_secs_f64()
                ));
            }
        }
    }
}

impl Progress for Bars {
    fn stage(&self, name: &str, total: usize) {
        self.finish();
        *self.started.borrow_mut() = Some((name.into(), Instant::now()));
        if self.mode != Mode::Bar {
            return;
        }
        let bar = match total {
            0 => ProgressBar::new_spinner(),
            n => ProgressBar::new(n as u64),
        };
        bar.set_draw_target(ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{msg:40} {bar:30} {pos}/{len} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(one_line(name));
        bar.enable_steady_tick(Duration::from_millis(200));
        *self.bar.borrow_mut() = Some(bar);
    }

    fn tick(&self) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.inc(1);
        }
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        self.finish();
    }
}
