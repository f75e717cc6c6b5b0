//! `gated_delta_core`: the gated delta rule, one step after another.
//!
//! Per batch row and head: `S *= e^g; m = S^T k; S += k (beta (v - m))^T; o = S^T (q scale)`. The
//! state is f32 until the end; each output and the final state are rounded once. A call that brings
//! no state starts from zeros.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::format::Format;
use crate::norm;
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[
        ("qk_norm", &["l2_in_kernel", "host"]),
        // The final state is an output; no buffer is updated in place.
        ("state_update", &["explicit_output"]),
    ],
    ..Leaf::plain("gated_delta_core", &["core"], bind)
};

struct GatedDelta {
    shared: Shared,
    rows: Rows,
    /// Epsilon of the norm of q and k, where they have one.
    l2: Option<f32>,
    /// `D^-0.5` when none.
    scale: Option<f32>,
    /// q, k, v, log_decay, beta.
    given: [usize; 5],
    state: Option<usize>,
    out: usize,
    final_state: Option<usize>,
}

fn bind(
    shared: &Shared,
    _format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let inputs = &request.params.inputs;
    let outputs = &request.params.outputs;
    let optional = |name: &str| -> Result<Option<f32>, Failure> {
        Ok(request.optional_number(name)?.map(|value| value as f32))
    };
    Ok(Box::new(GatedDelta {
        shared: shared.clone(),
        rows: Rows::of(request)?,
        l2: match request.axis("qk_norm")? {
            "l2_in_kernel" => Some(optional("l2_eps")?.unwrap_or(L2_EPS)),
            _ => None,
        },
        scale: optional("scale")?,
        given: [
            ports::position(inputs, "q")?,
            ports::position(inputs, "k")?,
            ports::position(inputs, "v")?,
            ports::position(inputs, "log_decay")?,
            ports::position(inputs, "beta")?,
        ],
        state: ports::optional(inputs, "state"),
        out: ports::position(outputs, "out")?,
        final_state: ports::optional(outputs, "final_state"),
    }))
}

/// What the operation has when nothing says otherwise.
const L2_EPS: f32 = 1e-6;

impl BoundForm for GatedDelta {
    /// Buffers depend on the number of heads, which only a call knows: the first one makes them.
    fn facts(&self) -> FormFacts {
        FormFacts::default()
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let [q, k, v, decay, beta] = self.given.map(|at| ports::required(inputs, at));
        let (q, k, v, decay, beta) = (q?, k?, v?, decay?, beta?);
        let [batch, steps, heads, d] = ports::dims("q", &q)?;
        self.rows.admit(Some(q), d)?;
        if d == 0 {
            let text = "heads without channels";
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        ports::expect_dims("k", &k, &[batch, steps, heads, d])?;
        ports::expect_dims("v", &v, &[batch, steps, heads, d])?;
        ports::expect_dims("log_decay", &decay, &[batch, steps, heads])?;
        ports::expect_dims("beta", &beta, &[batch, steps, heads])?;
        self.rows.check_dtype("k", &k)?;
        self.rows.check_dtype("v", &v)?;
        let state = ports::input(inputs, self.state);
        if let Some(state) = &state {
            ports::expect_dims("state", state, &[batch, heads, d, d])?;
        }

        let size = Piece { d, steps };
        let states = batch * heads * d * d;
        let sizes = [
            q.len(),
            k.len(),
            v.len(),
            decay.len(),
            beta.len(),
            states,
            batch * heads * size.len(),
            v.len(),
        ];
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [q_buffer, k_buffer, v_buffer, decay_buffer, beta_buffer, start, pieces, y] =
            lease.split(sizes);
        let q = ports::floats(&q, q_buffer)?;
        let k = ports::floats(&k, k_buffer)?;
        let v = ports::floats(&v, v_buffer)?;
        let decay = ports::floats(&decay, decay_buffer)?;
        let beta = ports::floats(&beta, beta_buffer)?;
        let start = match &state {
            Some(state) => ports::floats(state, start)?,
            None => {
                start.fill(0.0);
                start
            }
        };
        let scale = self.scale.unwrap_or(1.0 / (d as f32).sqrt());
        let host = &self.shared.host;
        host.parallel_chunks(pieces, size.len().max(1), |at, piece| {
            let (b, h) = (at / heads, at % heads);
            let [state, out, qn, kn, m] = size.split(piece);
            state.copy_from_slice(&start[at * d * d..][..d * d]);
            for (step, o) in out.chunks_exact_mut(d).enumerate() {
                let token = (b * steps + step) * heads + h;
                let (q, k) = (&q[token * d..][..d], &k[token * d..][..d]);
                let by = |x: &[f32]| self.l2.map_or(1.0, |eps| norm::l2(x, eps));
                let (q_by, k_by) = (by(q) * scale, by(k));
                for i in 0..d {
                    (qn[i], kn[i]) = (q[i] * q_by, k[i] * k_by);
                }
                let decay = decay[token].exp();
                m.fill(0.0);
                for (row, k) in state.chunks_exact_mut(d).zip(&*kn) {
                    for (s, m) in row.iter_mut().zip(&mut *m) {
                        *s *= decay;
                        *m += *s * k;
                    }
                }
                for (m, v) in m.iter_mut().zip(&v[token * d..][..d]) {
                    *m = beta[token] * (v - *m);
                }
                o.fill(0.0);
                for ((row, k), q) in state.chunks_exact_mut(d).zip(&*kn).zip(&*qn) {
                    for ((s, m), o) in row.iter_mut().zip(&*m).zip(&mut *o) {
                        *s += k * m;
                        *o += *s * q;
                    }
                }
            }
        });

        for at in 0..batch * heads {
            let (b, h) = (at / heads, at % heads);
            let [_, out, ..] = size.split(&mut pieces[at * size.len()..][..size.len()]);
            for (step, o) in out.chunks_exact(d).enumerate() {
                let token = (b * steps + step) * heads + h;
                y[token * d..][..d].copy_from_slice(o);
            }
        }
        let dims = [batch, steps, heads, d];
        self.rows
            .output_of(outputs, self.out, &dims)?
            .write_f32(y)?;
        if let Some(position) = self.final_state {
            let dims = [batch, heads, d, d];
            let last = outputs
                .get_mut(position)
                .ok_or_else(|| Failure::invalid("argument", "no output for the final state"))?;
            ports::expect_dims("the final state", &last.as_tensor(), &dims)?;
            for at in 0..batch * heads {
                let [state, ..] = size.split(&mut pieces[at * size.len()..][..size.len()]);
                for (i, row) in state.chunks_exact(d).enumerate() {
                    last.write_row(at * d + i, row)?;
                }
            }
        }
        Ok(())
    }
}

/// What one batch row and head works on: the state, its outputs, the step's q, k and correction.
#[derive(Clone, Copy)]
struct Piece {
    d: usize,
    steps: usize,
}

impl Piece {
    fn sizes(self) -> [usize; 5] {
        [self.d * self.d, self.steps * self.d, self.d, self.d, self.d]
    }

    fn len(self) -> usize {
        self.sizes().iter().sum()
    }

    fn split(self, piece: &mut [f32]) -> [&mut [f32]; 5] {
        let mut rest = piece;
        self.sizes().map(|size| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(size);
            rest = tail;
            part
        })
    }
}
