//! `norm_fused`: layer norm with its affine part, in f32, rounded once: to the boundary, or to the
//! codes of a wire.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::pool::Reservation;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::format::Format;
use crate::norm;
use crate::ports::{self, Rows};
use crate::wire::Exit;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    emits: &["y"],
    variants: &[("norm", &["layer"])],
    ..Leaf::plain("norm_fused", &["norm"], bind)
};

struct Norm {
    shared: Shared,
    rows: Rows,
    w: Vec<f32>,
    b: Vec<f32>,
    eps: f32,
    x: usize,
    y: usize,
    exit: Exit,
    room: Reservation<f32>,
}

fn bind(
    shared: &Shared,
    _format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let w = request.required_weight("w")?;
    let [d] = ports::dims("slot `w`", &w)?;
    if d != request.dim("D")? {
        let text = format!("slot `w` has {d} elements, D is {}", request.dim("D")?);
        return Err(Failure::refused("dims_inconsistent", text));
    }
    if d == 0 {
        return Err(Failure::refused("dims_inconsistent", "rows of width 0"));
    }
    let y = ports::position(&request.params.outputs, "y")?;
    let exit = Exit::of(request, "y")?;
    let mut norm = Norm {
        shared: shared.clone(),
        rows: Rows::of(request)?.sending((exit != Exit::Boundary).then_some(y)),
        w: w.to_f32_vec()?,
        b: request.weight_of_dims("b", &[d])?.to_f32_vec()?,
        eps: request.number("eps")? as f32,
        x: ports::position(&request.params.inputs, "x")?,
        y,
        exit,
        room: Reservation::default(),
    };
    let floats = norm.buffers(norm.rows.reserved()).iter().sum();
    norm.room = shared.pool.reserve(floats);
    Ok(Box::new(norm))
}

impl Norm {
    /// Sizes of: x, y.
    fn buffers(&self, rows: usize) -> [usize; 2] {
        [rows * self.w.len(); 2]
    }
}

impl BoundForm for Norm {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: 8 * self.w.len() as u64,
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
        let d = self.w.len();
        let given = ports::required(inputs, self.x)?;
        let rows = self.rows.admit(Some(given), d)?;
        let out = self.rows.output(outputs, self.y, rows, d)?;
        let sizes = self.buffers(rows);
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [x, y] = lease.split(sizes);
        let x = ports::floats(&given, x)?;
        self.shared.host.parallel_chunks(y, d, |row, y| {
            let x = &x[row * d..][..d];
            let (mean, inverse) = norm::layer(x, self.eps);
            for (i, y) in y.iter_mut().enumerate() {
                *y = (x[i] - mean) * inverse * self.w[i] + self.b[i];
            }
        });
        self.exit.write(out, y)
    }
}
