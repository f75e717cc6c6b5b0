//! What the structures of one product have in common: the product, its bias, the buffer of a call.

use structures_plugin_api::abi::FormFacts;
use structures_plugin_api::sdk::{BindRequest, Failure, Tensor};

use super::{axis, facts};
use crate::format::Format;
use crate::kernels::{Cover, Tile};
use crate::linear::Linear;
use crate::pool::Reservation;
use crate::ports::{self, Given};
use crate::source::Source;
use crate::Shared;

/// A product of the input `x`, bound.
pub struct Projection {
    pub shared: Shared,
    pub linear: Linear,
    /// Of every channel, empty when there is none.
    pub bias: Vec<f32>,
    x: usize,
    room: Reservation,
}

impl Projection {
    /// Packs the channels; a bias is added afterwards.
    pub fn bind(
        shared: &Shared,
        format: Format,
        source: &Source<'_>,
        request: &BindRequest<'_>,
    ) -> Result<Self, Failure> {
        let linear = Linear::bind(shared, format, source, request, "x")?;
        let lines = linear.buffer(ports::reserved(request));
        Ok(Projection {
            shared: shared.clone(),
            linear,
            bias: Vec::new(),
            x: ports::position(&request.params.inputs, "x")?,
            room: shared.pool.reserve(lines),
        })
    }

    /// The same with the bias of slot `b`: without the axis it is added where there is one.
    pub fn biased(self, request: &BindRequest<'_>) -> Result<Self, Failure> {
        let bias = match (axis(request, "bias"), request.weight("b")) {
            (Some("none"), _) | (_, None) => Vec::new(),
            _ => request
                .weight_of_dims("b", &[self.linear.n()])?
                .to_f32_vec()?,
        };
        Ok(Projection { bias, ..self })
    }

    /// What it added.
    pub fn facts(&self) -> FormFacts {
        let bias = 4 * self.bias.len() as u64;
        facts(self.linear.bytes() + bias, self.room.bytes())
    }

    /// The input of a call.
    pub fn given<'b, 'a: 'b>(
        &self,
        inputs: &[Tensor<'a>],
        copy: &'b mut Vec<f32>,
    ) -> Result<Given<'b, 'a>, Failure> {
        ports::given(inputs, self.x, self.linear.k(), copy)
    }

    /// Computes all channels; `finish` gets each tile once, as [`Linear::run`] says.
    pub fn run(&self, x: &Given<'_, '_>, finish: impl Fn(Cover, &mut Tile) + Sync) {
        let lines = self.linear.buffer(x.rows);
        let mut lease = self.shared.pool.take(lines);
        let [buffer] = lease.split([lines]);
        self.linear
            .run(&self.shared, x.values, x.rows, buffer, finish);
    }
}
