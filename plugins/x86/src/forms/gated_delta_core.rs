//! `gated_delta_core`: the gated delta rule, one step after another, a head of a batch row at a time.
//!
//! `S *= e^g; m = S^T k; S += k (beta (v - m))^T; o = S^T (q scale)`. A call that brings no state starts from zeros.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::format::Format;
use crate::isa::vectorised;
use crate::linear::Out;
use crate::pool::{plain, Line};
use crate::ports;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[
        ("qk_norm", &["l2_in_kernel", "host"]),
        // The final state is an output; no buffer is updated in place.
        ("state_update", &["explicit_output"]),
    ],
    ..Leaf::plain("gated_delta_core", &["core"], bind)
};

/// What the operation has when nothing says otherwise.
const L2_EPS: f32 = 1e-6;

struct GatedDelta {
    shared: Shared,
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
    let (inputs, outputs) = (&request.params.inputs, &request.params.outputs);
    let optional = |name: &str| -> Result<Option<f32>, Failure> {
        Ok(request.optional_number(name)?.map(|value| value as f32))
    };
    Ok(Box::new(GatedDelta {
        shared: shared.clone(),
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

vectorised! {
    /// One step: `work` is the step's q, k and correction; decay and beta are its own.
    fn step(
        q: &[f32], k: &[f32], v: &[f32], l2: Option<f32>, scale: f32, decay: f32, beta: f32,
        state: &mut [f32], work: &mut [f32], o: &mut [f32],
    ) {
        let d = o.len();
        let (qn, rest) = work.split_at_mut(d);
        let (kn, m) = rest.split_at_mut(d);
        let m = &mut m[..d];
        let by = |x: &[f32]| match l2 {
            None => 1.0,
            Some(eps) => {
                let mut lanes = [0f32; 16];
                for part in x.chunks(16) {
                    for (s, v) in lanes.iter_mut().zip(part) {
                        *s += v * v;
                    }
                }
                1.0 / (lanes.iter().sum::<f32>() + eps).sqrt()
            }
        };
        let (q_by, k_by) = (by(q) * scale, by(k));
        for ((n, m), (q, k)) in qn.iter_mut().zip(kn.iter_mut()).zip(q.iter().zip(k)) {
            *n = q * q_by;
            *m = k * k_by;
        }
        // The order and the rounding of the definition: a state without a norm may grow, and errors with it.
        let decay = decay.exp();
        m.fill(0.0);
        for (row, k) in state.chunks_exact_mut(d).zip(&*kn) {
            for (s, m) in row.iter_mut().zip(&mut *m) {
                *s *= decay;
                *m += *s * k;
            }
        }
        for (m, v) in m.iter_mut().zip(v) {
            *m = beta * (v - *m);
        }
        o.fill(0.0);
        for ((row, k), q) in state.chunks_exact_mut(d).zip(&*kn).zip(&*qn) {
            for ((s, m), o) in row.iter_mut().zip(&*m).zip(&mut *o) {
                *s += k * m;
                *o += *s * q;
            }
        }
    }
}

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
        if d == 0 {
            return Err(Failure::invalid(
                "dims_inconsistent",
                "heads without channels",
            ));
        }
        let dims = [batch, steps, heads, d];
        ports::expect_dims("k", &k, &dims)?;
        ports::expect_dims("v", &v, &dims)?;
        ports::expect_dims("log_decay", &decay, &dims[..3])?;
        ports::expect_dims("beta", &beta, &dims[..3])?;
        let states = [batch, heads, d, d];
        let mut copies = [const { Vec::new() }; 6];
        let [a, b, c, e, f, g] = &mut copies;
        let start = match ports::input(inputs, self.state) {
            Some(state) => {
                ports::expect_dims("state", &state, &states)?;
                Some(ports::floats(&state, g)?)
            }
            None => None,
        };
        let (q, k, v) = (
            ports::floats(&q, a)?,
            ports::floats(&k, b)?,
            ports::floats(&v, c)?,
        );
        let (decay, beta) = (ports::floats(&decay, e)?, ports::floats(&beta, f)?);
        let (out, last) = match self.final_state {
            None => (ports::output_of(outputs, self.out, &dims)?, None),
            Some(at) => {
                let (first, second) = match outputs.split_at_mut_checked(self.out.max(at)) {
                    Some((low, high)) if self.out < at => (&mut low[self.out..], high),
                    Some((low, high)) if at < self.out => (high, &mut low[at..]),
                    _ => return Err(Failure::invalid("argument", "one output for two values")),
                };
                let out = ports::output_of(first, 0, &dims)?;
                (out, Some(ports::output_of(second, 0, &states)?))
            }
        };
        let out = Out::new(out, d);
        let last = last.map(|last| Out::new(last, d * d));
        let scale = self.scale.unwrap_or(1.0 / (d as f32).sqrt());
        let (shared, isa, l2) = (&self.shared, self.shared.isa, self.l2);
        shared.host.parallel_for(batch * heads, |at| {
            let (b, h) = (at / heads, at % heads);
            let sizes = [Line::of::<f32>(d * d), Line::of::<f32>(3 * d)];
            let mut lease = shared.pool.take(sizes.iter().sum());
            let [state, work] = lease.split(sizes);
            let state = match &last {
                // SAFETY: every head's state is one task's.
                Some(last) => unsafe { last.row(at, 0, d * d) },
                None => &mut plain::<f32>(state)[..d * d],
            };
            match start {
                Some(start) => state.copy_from_slice(&start[at * d * d..][..d * d]),
                None => state.fill(0.0),
            }
            for s in 0..steps {
                let token = (b * steps + s) * heads + h;
                let own = token * d..(token + 1) * d;
                // SAFETY: every token of a head is one task's.
                let o = unsafe { out.row(token, 0, d) };
                let (q, k, v) = (&q[own.clone()], &k[own.clone()], &v[own]);
                let (decay, beta) = (decay[token], beta[token]);
                step(isa, q, k, v, l2, scale, decay, beta, state, plain(work), o);
            }
        });
        Ok(())
    }
}
