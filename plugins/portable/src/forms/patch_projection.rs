//! `patch_projection`: flattened patches times the flattened kernel, bias, rounded once.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::pool::Reservation;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::biased::Biased;
use crate::format::Format;
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[
        ("layout", &["preflattened_full_patch"]),
        ("bias", &["none", "add"]),
    ],
    ..Leaf::plain("patch_projection", &["proj"], bind)
};

struct Projection {
    shared: Shared,
    rows: Rows,
    proj: Biased,
    x: usize,
    y: usize,
    room: Reservation<f32>,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let weight = request.required_weight("w")?;
    ports::dims::<2>("slot `w`", &weight)?;
    // The slot is [N, K].
    let weight = weight.transpose(0, 1)?;
    let proj = Biased::bind(&shared.host, format, weight, "b", request, "x")?;
    // Unless the axis says no, a bias is added where there is one.
    let proj = match request.params.variant.get("bias").map(String::as_str) {
        Some("none") => proj.without_bias(),
        _ => proj,
    };
    let mut projection = Projection {
        shared: shared.clone(),
        rows: Rows::of(request)?,
        proj,
        x: ports::position(&request.params.inputs, "x")?,
        y: ports::position(&request.params.outputs, "y")?,
        room: Reservation::default(),
    };
    let floats = projection.buffers(projection.rows.reserved()).iter().sum();
    projection.room = shared.pool.reserve(floats);
    Ok(Box::new(projection))
}

impl Projection {
    /// Sizes of: x, the product, y.
    fn buffers(&self, rows: usize) -> [usize; 3] {
        let (n, k) = (self.proj.n(), self.proj.k());
        [rows * k, rows * n, rows * n]
    }
}

impl BoundForm for Projection {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: self.proj.bytes(),
            scratch_bytes: self.room.bytes(),
            workspace_bytes: 0,
        }
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let given = ports::required(inputs, self.x)?;
        let rows = self.rows.admit(Some(given), self.proj.k())?;
        let out = self.rows.output(outputs, self.y, rows, self.proj.n())?;
        let sizes = self.buffers(rows);
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [x, product, y] = lease.split(sizes);
        given.read_f32(x)?;
        let host = &self.shared.host;
        self.proj.apply(host, x, product, y, |_, y, b| y + b);
        out.write_f32(y)
    }
}
