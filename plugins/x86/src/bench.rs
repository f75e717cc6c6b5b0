//! What benchmarks see of the backend: a product on its own, on threads of their choice. Not an interface.

use structures_plugin_api::abi::{Contract, DType};
use structures_plugin_api::describe::BindParams;
use structures_plugin_api::sdk::{BindRequest, Failure, Host, Tensor};

use crate::format::Format;
use crate::isa::{Isa, CAP};
use crate::kernels::LANES;
use crate::linear::{Linear, Out};
use crate::pool::Line;
use crate::source::Source;
use crate::Shared;

/// Names of the formats, as forms have them.
pub const FORMATS: [&str; 6] = ["f32", "bf16", "w8a16", "w8a8_dynamic", "fp8", "w4a16"];

/// A bound product.
pub struct Product {
    shared: Shared,
    linear: Linear,
    buffer: Vec<Line>,
}

impl Product {
    /// Packs a seeded `[n, k]` matrix.
    ///
    /// # Errors
    /// As `bind`.
    pub fn new(host: Host, format: &str, n: usize, k: usize) -> Result<Self, Failure> {
        let known = || Format::ALL.iter().find(|f| f.name() == format);
        let format = *known().ok_or_else(|| Failure::refused("form_unknown", format))?;
        let cap = std::env::var(CAP).ok();
        let isa = Isa::best(cap.as_deref())
            .ok_or_else(|| Failure::refused("entry_missing", "no rung of the ladder"))?;
        let shared = Shared {
            host,
            isa,
            arena: Default::default(),
            pool: Default::default(),
            keeper: None,
        };
        let contract = Contract::capacity(DType::F32, 1);
        let amax = [1.0];
        let request = BindRequest::new("any", "any", BindParams::default(), &contract)
            .with_statistic("x|amax|tensor", Tensor::from_f32(&amax, &[1])?);
        let w: Vec<f32> = (0..n * k)
            .map(|i| ((i * 2_654_435_761) >> 7 & 0xfff) as f32 / 2048.0 - 1.0)
            .collect();
        let weight = Tensor::from_f32(&w, &[n, k])?.transpose(0, 1)?;
        let source = Source::concatenated(&[weight])?;
        Ok(Product {
            linear: Linear::bind(&shared, format, &source, &request, "x")?,
            shared,
            buffer: Vec::new(),
        })
    }

    /// Bytes of packed weights.
    pub fn bytes(&self) -> u64 {
        self.linear.bytes()
    }

    /// One call: `x` is `[rows, k]`, `out` is `[rows, n]`.
    pub fn run(&mut self, x: &[f32], rows: usize, out: &mut [f32]) {
        let lines = self.linear.buffer(rows);
        self.buffer.resize(lines, Line([0; 64]));
        let to = Out::new(out, self.linear.n());
        let (shared, buffer) = (&self.shared, &mut self.buffer);
        self.linear.run(shared, x, rows, buffer, |cover, tile| {
            for (r, values) in tile.0.iter().enumerate().take(cover.rows) {
                let (row, first) = (cover.row + r, cover.line * LANES);
                // SAFETY: every place of the output is in one cover.
                let to = unsafe { to.row(row, first, cover.lines * LANES) };
                to.copy_from_slice(&values[..to.len()]);
            }
        });
    }
}
