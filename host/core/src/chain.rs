//! A wired pair at run time: two seats, one install, and a tensor of codes between them that no graph value is.
//!
//! The producer's form writes E4M3 codes, the consumer's form reads them, and nobody decodes in between. The host's
//! graph never sees the foreign dtype: the chain stands for the operations of both spans, so where it does not serve a
//! call the host runs exactly those. The seats are linked: what one cannot do, both do not do, from then on.
//!
//! Owns the hand-over, the linked guard and both ledgers' counts. Does not own which pairs there are
//! ([`crate::wires`]) nor how their forms are bound ([`crate::bind`]).

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use candle_core::{DType, Device, Tensor};
use structures_graph::session::{Frozen, SpanOutcome, SpanRunner, ViewMut};
use structures_graph::GraphError;
use structures_plugin_api::formats::{e4m3_to_f32, f32_to_e4m3_saturating};

use crate::bind::MOST;
use crate::seat::{
    learn, learn_dims, sizes, with_views, CallFailure, Executable, OnGuardFail, Seat, View,
};
use crate::workspace::{locked, Scratch, Workspace};

/// An argument of a form on a wire.
#[derive(Clone, Copy, Debug)]
pub enum Port<'a> {
    /// An optional that is not there.
    Absent,
    /// Values and dims.
    Values(&'a [f32], &'a [usize]),
    /// E4M3 codes and dims.
    Codes(&'a [u8], &'a [usize]),
}

/// A result of a form on a wire.
#[derive(Debug)]
pub enum PortMut<'a> {
    /// Values and dims.
    Values(&'a mut [f32], &'a [usize]),
    /// E4M3 codes and dims.
    Codes(&'a mut [u8], &'a [usize]),
}

impl PortMut<'_> {
    /// A place in a list that nothing fills yet.
    fn none() -> Self {
        PortMut::Values(&mut [], &[])
    }
}

/// A form with one port on a wire.
pub trait WiredForm: Send + Sync {
    /// Fills the outputs.
    fn call(&self, inputs: &[Port<'_>], outputs: &mut [PortMut<'_>]) -> Result<(), CallFailure>;
}

/// Which port is on the wire, by its position in the span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// An output.
    Emits(usize),
    /// An input.
    Accepts(usize),
}

/// What is bound for a wire and called off it: there is nothing it could answer.
pub(crate) struct Linked;

impl Executable for Linked {
    fn call(&self, _: &[View<'_>], _: &mut [(Vec<f32>, Vec<usize>)]) -> Result<(), CallFailure> {
        Err(CallFailure {
            code: "wire_unlinked".into(),
            message: "this form is bound for a wire and was called without its partner; it has no equivalent in the \
                      host's dtype"
                .into(),
            declined: false,
        })
    }

    fn has_host_path(&self) -> bool {
        false
    }
}

/// Codes behind the end of a wire that no form may touch, and what they hold.
const GUARD: (usize, u8) = (64, 0xa5);
/// The code of NaN.
const NAN: u8 = 0x7f;
/// The code of the largest value.
const LARGEST: u8 = 0x7e;

/// A form on a wire as one of values, for trials: it quantises what the wire would bring, or decodes what it sends.
pub(crate) struct Decoded<'a> {
    pub(crate) form: &'a dyn WiredForm,
    pub(crate) end: End,
    pub(crate) scale: f32,
}

impl Executable for Decoded<'_> {
    fn call(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        let mut codes = Vec::new();
        if let End::Accepts(at) = self.end {
            if let Some(Some((data, _))) = inputs.get(at) {
                codes.extend(data.iter().map(|v| f32_to_e4m3_saturating(v / self.scale)));
            }
        }
        let ports: Vec<Port<'_>> = inputs
            .iter()
            .enumerate()
            .map(|(i, view)| match view {
                None => Port::Absent,
                Some((_, dims)) if self.end == End::Accepts(i) => Port::Codes(&codes, dims),
                Some((data, dims)) => Port::Values(data, dims),
            })
            .collect();
        let mut sent = Vec::new();
        if let End::Emits(at) = self.end {
            if let Some((data, dims)) = outputs.get(at) {
                // As the outputs themselves are poisoned.
                let poison = match data.first() {
                    Some(v) if v.is_nan() => NAN,
                    _ => LARGEST,
                };
                sent = vec![poison; dims.iter().product()];
                sent.resize(sent.len() + GUARD.0, GUARD.1);
            }
        }
        let made = sent.len().saturating_sub(GUARD.0);
        let (body, guard) = sent.split_at_mut(made);
        let mut body = Some(body);
        let mut results: Vec<PortMut<'_>> = Vec::with_capacity(outputs.len());
        for (i, (data, dims)) in outputs.iter_mut().enumerate() {
            let len = dims.iter().product::<usize>().min(data.len());
            results.push(match (self.end == End::Emits(i), body.take()) {
                (true, Some(codes)) => PortMut::Codes(codes, dims),
                (_, kept) => {
                    body = kept;
                    PortMut::Values(&mut data[..len], dims)
                }
            });
        }
        self.form.call(&ports, &mut results)?;
        drop(results);
        if guard.iter().any(|code| *code != GUARD.1) {
            return Err(CallFailure {
                code: "bind_writes".into(),
                message: "the form wrote behind the end of the wire".into(),
                declined: false,
            });
        }
        if let End::Emits(at) = self.end {
            if let Some((data, _)) = outputs.get_mut(at) {
                for (value, code) in data.iter_mut().zip(&sent[..made]) {
                    *value = e4m3_to_f32(*code) * self.scale;
                }
            }
        }
        Ok(())
    }
}

/// One end of a chain.
pub struct Half {
    /// Its seat: contract and ledger.
    pub seat: Arc<Seat>,
    /// Its form.
    pub form: Arc<dyn WiredForm>,
    /// Position of the wire among its outputs or inputs.
    pub port: usize,
}

/// See the module.
pub struct Chain {
    name: String,
    producer: Half,
    consumer: Half,
    /// Most rows seen while calibrating; more is outside the contract, fewer than that and more than the seats' band is
    /// the host's as planned.
    observed: usize,
    /// Sizes captured steps call it at.
    laid: RwLock<Vec<Arc<Laid>>>,
}

/// A wire at the sizes of a captured step.
struct Laid {
    /// Dims of the producer's first input.
    first: Vec<usize>,
    /// Dims of the wire as it is sent and as it is read.
    wire: Vec<usize>,
    into: Vec<usize>,
    /// Its memory, shared by every wire of these dims: no two are in use at a time.
    codes: Scratch<u8>,
}

impl Chain {
    /// A chain of two bound halves.
    pub fn new(name: String, producer: Half, consumer: Half, observed: usize) -> Self {
        Chain {
            name,
            producer,
            consumer,
            observed,
            laid: RwLock::default(),
        }
    }

    fn seats(&self) -> [&Arc<Seat>; 2] {
        [&self.producer.seat, &self.consumer.seat]
    }

    /// The producer's inputs, and the consumer's with a gap where the wire is.
    fn split(&self, inputs: &[Option<Tensor>]) -> (Vec<Option<Tensor>>, Vec<Option<Tensor>>) {
        let (own, rest) = inputs.split_at(self.producer.seat.dims().0.len().min(inputs.len()));
        let mut rest = rest.to_vec();
        rest.insert(self.consumer.port.min(rest.len()), None);
        (own.to_vec(), rest)
    }

    fn admit(
        &self,
        own: &[Option<Tensor>],
        rest: &[Option<Tensor>],
    ) -> Result<usize, (&'static str, String)> {
        let rows = self.producer.seat.admit(own)?;
        if rows > self.observed {
            let reason = format!("bound for at most {} rows, found {rows}", self.observed);
            return Err(("rt_row_capacity", reason));
        }
        if let Some(t) = rest.iter().flatten().find(|t| t.dtype() != DType::F32) {
            return Err(("rt_dtype", format!("expected f32, found {:?}", t.dtype())));
        }
        self.consumer.seat.admit_thread()?;
        Ok(rows)
    }

    /// One call through the wire: the producer's other outputs, then the consumer's. The outer error is the host's, the
    /// inner one says which seat failed.
    pub(crate) fn serve(
        &self,
        inputs: &[Option<Tensor>],
    ) -> Result<Result<Vec<Tensor>, (usize, CallFailure)>, GraphError> {
        let kernel = |source: candle_core::Error| GraphError::Kernel {
            op: "chain".into(),
            at: self.name.clone(),
            source: Box::new(source),
        };
        let (own, rest) = self.split(inputs);
        let (own_dims, made_dims) = self.producer.seat.dims();
        let (rest_dims, out_dims) = self.consumer.seat.dims();
        let mut symbols = HashMap::new();
        learn(&mut symbols, own_dims, &own);
        learn(&mut symbols, rest_dims, &rest);
        let made = sizes(&self.name, &symbols, made_dims)?;
        let into = rest_dims.get(self.consumer.port).cloned().flatten();
        let into = sizes(&self.name, &symbols, &[into.unwrap_or_default()])?;
        let out = sizes(&self.name, &symbols, out_dims)?;
        let blank = |dims: &Vec<usize>| vec![0.0_f32; dims.iter().product()];

        let mut codes = vec![0_u8; made[self.producer.port].iter().product()];
        let mut side: Vec<Vec<f32>> = made
            .iter()
            .enumerate()
            .map(|(i, dims)| match i == self.producer.port {
                true => Vec::new(),
                false => blank(dims),
            })
            .collect();
        let called = with_views(&own, |views| {
            let ports: Vec<Port<'_>> = views.iter().map(|v| port(*v)).collect();
            let mut wire = Some(codes.as_mut_slice());
            let mut results = Vec::with_capacity(made.len());
            for ((i, data), dims) in side.iter_mut().enumerate().zip(&made) {
                results.push(match wire.take_if(|_| i == self.producer.port) {
                    Some(codes) => PortMut::Codes(codes, dims),
                    None => PortMut::Values(data, dims),
                });
            }
            self.producer.form.call(&ports, &mut results)
        });
        if let Err(failure) = called.map_err(kernel)? {
            return Ok(Err((0, failure)));
        }
        let mut outputs: Vec<Vec<f32>> = out.iter().map(blank).collect();
        let called = with_views(&rest, |views| {
            let mut ports: Vec<Port<'_>> = views.iter().map(|v| port(*v)).collect();
            if let Some(wire) = ports.get_mut(self.consumer.port) {
                *wire = Port::Codes(&codes, &into[0]);
            }
            let mut results: Vec<PortMut<'_>> = outputs
                .iter_mut()
                .zip(&out)
                .map(|(data, dims)| PortMut::Values(data, dims))
                .collect();
            self.consumer.form.call(&ports, &mut results)
        });
        if let Err(failure) = called.map_err(kernel)? {
            return Ok(Err((1, failure)));
        }
        let others = side.into_iter().zip(made).enumerate();
        let others = others.filter(|(i, _)| *i != self.producer.port);
        let all = others.map(|(_, o)| o).chain(outputs.into_iter().zip(out));
        all.map(|(data, dims)| Tensor::from_vec(data, dims, &Device::Cpu))
            .collect::<Result<Vec<_>, _>>()
            .map(Ok)
            .map_err(kernel)
    }

    /// Both seats give themselves up: the host runs both spans, this call and from now on.
    fn demote(&self, failed: usize, text: &str) -> Result<SpanOutcome, GraphError> {
        let seats = self.seats();
        let linked = format!("linked to `{}`: {text}", seats[failed].key);
        if seats[failed].mode() == OnGuardFail::Raise {
            for (i, seat) in seats.iter().enumerate() {
                seat.ledger
                    .refused(if i == failed { text } else { &linked });
            }
            return Err(GraphError::Span {
                name: seats[failed].key.clone(),
                reason: text.into(),
            });
        }
        for (i, seat) in seats.iter().enumerate() {
            seat.ledger
                .fell_back(if i == failed { text } else { &linked });
            seat.ledger.detach();
        }
        tracing::warn!(
            chain = %self.name,
            "one call missed the contract of a wired pair ({text}); the host runs both ends from now on"
        );
        Ok(SpanOutcome::Host)
    }
}

fn values_of<'a>((data, dims): &'a mut ViewMut<'_>) -> PortMut<'a> {
    PortMut::Values(data, dims)
}

fn port<'a>(view: View<'a>) -> Port<'a> {
    match view {
        None => Port::Absent,
        Some((data, dims)) => Port::Values(data, dims),
    }
}

impl SpanRunner for Chain {
    fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        let seats = self.seats();
        if seats.iter().any(|s| s.ledger.is_detached()) {
            return Ok(SpanOutcome::Host);
        }
        let (own, rest) = self.split(inputs);
        let rows = match self.admit(&own, &rest) {
            Ok(rows) => rows,
            Err((code, reason)) => return self.demote(0, &format!("{code}: {reason}")),
        };
        if seats.iter().any(|s| s.out_of_band(rows)) {
            seats.iter().for_each(|s| s.ledger.dispatched());
            return Ok(SpanOutcome::Host);
        }
        match self.serve(inputs)? {
            Ok(outputs) => {
                seats.iter().for_each(|s| s.ledger.served());
                Ok(SpanOutcome::Done(outputs))
            }
            Err((failed, failure)) => {
                if seats[failed].mode() == OnGuardFail::Raise {
                    // A form that failed is not entered again, whatever the mode.
                    seats.iter().for_each(|s| s.ledger.detach());
                }
                self.demote(failed, &format!("{}: {}", failure.code, failure.message))
            }
        }
    }

    fn freeze(&self, inputs: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
        let seats = self.seats();
        if seats.iter().any(|s| s.ledger.is_detached()) {
            return Ok(Frozen::Host);
        }
        let rows = self
            .producer
            .seat
            .admit_sizes(inputs.first().copied().flatten());
        match rows {
            Ok(rows) if rows > self.observed => Err(self.guard(format!(
                "rt_row_capacity: bound for at most {} rows, found {rows}",
                self.observed
            ))),
            Ok(rows) if seats.iter().any(|s| s.out_of_band(rows)) => Ok(Frozen::Host),
            Ok(_) => {
                self.lay_out(inputs)?;
                Ok(Frozen::Served { allocates: false })
            }
            Err((code, reason)) => Err(self.guard(format!("{code}: {reason}"))),
        }
    }

    fn replay(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), GraphError> {
        let seats = self.seats();
        if seats.iter().any(|s| s.ledger.is_detached()) {
            return Err(self.guard("the pair gave itself up after the step was captured".into()));
        }
        if let Err((code, reason)) = seats.iter().try_for_each(|s| s.admit_thread()) {
            let reason = format!("{code}: {reason}");
            self.demote(0, &reason)?;
            return Err(self.guard(reason));
        }
        let Some(laid) = self.laid(inputs) else {
            return Err(self.guard("called at sizes it was not captured for".into()));
        };
        self.call_into(&laid, inputs, outputs)
            .or_else(|(failed, failure)| {
                if seats[failed].mode() == OnGuardFail::Raise {
                    seats.iter().for_each(|s| s.ledger.detach());
                }
                let reason = format!("{}: {}", failure.code, failure.message);
                self.demote(failed, &reason)?;
                Err(self.guard(reason))
            })
    }

    fn replayed(&self, planned: Frozen) {
        self.seats().iter().for_each(|s| s.replayed(planned));
    }

    fn host_serves(&self, rows: usize) -> bool {
        // More rows than were observed end the pair; what lies between them and the band is planned.
        self.seats()
            .iter()
            .any(|s| s.host_serves(rows.min(self.observed)))
    }

    fn host_gone(&self) {
        self.seats().iter().for_each(|s| s.host_gone());
    }
}

impl Chain {
    /// Sizes of the wire at these inputs, and memory for it.
    fn lay_out(&self, inputs: &[Option<&[usize]>]) -> Result<(), GraphError> {
        let (own_dims, made_dims) = self.producer.seat.dims();
        let (rest_dims, _) = self.consumer.seat.dims();
        let (own, rest) = inputs.split_at(own_dims.len().min(inputs.len()));
        let mut rest = rest.to_vec();
        rest.insert(self.consumer.port.min(rest.len()), None);
        let mut symbols = HashMap::new();
        for (dims, sizes) in own_dims.iter().zip(own).chain(rest_dims.iter().zip(&rest)) {
            if let (Some(dims), Some(sizes)) = (dims, sizes) {
                learn_dims(&mut symbols, dims, sizes);
            }
        }
        let into = rest_dims.get(self.consumer.port).cloned().flatten();
        let ends = [
            made_dims[self.producer.port].clone(),
            into.unwrap_or_default(),
        ];
        let [wire, into]: [Vec<usize>; 2] = sizes(&self.name, &symbols, &ends)?
            .try_into()
            .unwrap_or_default();
        let first = own.first().copied().flatten().unwrap_or_default().to_vec();
        let laid = Arc::new(Laid {
            first,
            codes: Workspace::global().codes(&wire, "wire"),
            wire,
            into,
        });
        let mut all = self.laid.write().unwrap_or_else(|e| e.into_inner());
        all.retain(|l| l.first != laid.first);
        all.push(laid);
        Ok(())
    }

    fn laid(&self, inputs: &[View<'_>]) -> Option<Arc<Laid>> {
        let first = inputs
            .first()
            .copied()
            .flatten()
            .map_or(&[][..], |(_, dims)| dims);
        let all = self.laid.read().unwrap_or_else(|e| e.into_inner());
        all.iter().find(|l| l.first == first).cloned()
    }

    /// [`Chain::serve`] in the caller's memory: nothing is allocated. An error says which seat failed.
    fn call_into(
        &self,
        laid: &Laid,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<(), (usize, CallFailure)> {
        let (own_dims, made_dims) = self.producer.seat.dims();
        let (own, rest) = inputs.split_at(own_dims.len().min(inputs.len()));
        let (n, m) = (rest.len() + 1, made_dims.len());
        let sides = m.saturating_sub(1).min(outputs.len());
        let (sides, outputs) = outputs.split_at_mut(sides);
        if own.len().max(n) > MOST.0 || m.max(outputs.len()) > MOST.1 {
            let failure = CallFailure {
                code: "arguments_count".into(),
                message: format!("a wired pair has more than {MOST:?} operands and results"),
                declined: true,
            };
            return Err((0, failure));
        }
        let mut codes = locked(&laid.codes);
        let mut ports = [Port::Absent; MOST.0];
        for (to, view) in ports.iter_mut().zip(own) {
            *to = port(*view);
        }
        {
            let mut results: [PortMut<'_>; MOST.1] = std::array::from_fn(|_| PortMut::none());
            let mut wire = Some(codes.as_mut_slice());
            let mut others = sides.iter_mut();
            for (i, to) in results.iter_mut().enumerate().take(m) {
                *to = match wire.take_if(|_| i == self.producer.port) {
                    Some(codes) => PortMut::Codes(codes, &laid.wire),
                    None => others.next().map_or(PortMut::none(), values_of),
                };
            }
            let called = self
                .producer
                .form
                .call(&ports[..own.len()], &mut results[..m]);
            called.map_err(|failure| (0, failure))?;
        }
        let mut ports = [Port::Absent; MOST.0];
        let mut others = rest.iter();
        for (i, to) in ports.iter_mut().enumerate().take(n) {
            *to = match i == self.consumer.port {
                true => Port::Codes(&codes, &laid.into),
                false => others.next().map_or(Port::Absent, |view| port(*view)),
            };
        }
        let mut results: [PortMut<'_>; MOST.1] = std::array::from_fn(|_| PortMut::none());
        let made = outputs.len();
        for (to, output) in results.iter_mut().zip(outputs) {
            *to = values_of(output);
        }
        let called = self.consumer.form.call(&ports[..n], &mut results[..made]);
        called.map_err(|failure| (1, failure))
    }

    fn guard(&self, reason: String) -> GraphError {
        GraphError::Guard {
            name: self.name.clone(),
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seat::{Admission, Rows};
    use structures_graph::Dim;

    const WIDTH: usize = 4;

    /// Sends its input as codes under scale 1.
    struct Sends;
    /// Reads codes under scale 1; fails when it meets NaN.
    struct Reads;

    impl WiredForm for Sends {
        fn call(
            &self,
            inputs: &[Port<'_>],
            outputs: &mut [PortMut<'_>],
        ) -> Result<(), CallFailure> {
            let (Port::Values(x, _), PortMut::Codes(y, _)) = (inputs[0], &mut outputs[0]) else {
                panic!("{inputs:?} {outputs:?}")
            };
            for (y, x) in y.iter_mut().zip(x) {
                *y = if x.is_nan() {
                    NAN
                } else {
                    f32_to_e4m3_saturating(*x)
                };
            }
            Ok(())
        }
    }

    impl WiredForm for Reads {
        fn call(
            &self,
            inputs: &[Port<'_>],
            outputs: &mut [PortMut<'_>],
        ) -> Result<(), CallFailure> {
            let (Port::Codes(x, dims), PortMut::Values(y, _)) = (inputs[0], &mut outputs[0]) else {
                panic!("{inputs:?} {outputs:?}")
            };
            assert_eq!(dims.last(), Some(&WIDTH));
            for (y, x) in y.iter_mut().zip(x) {
                if *x == NAN {
                    return Err(CallFailure {
                        code: "failed".into(),
                        message: "planted".into(),
                        declined: false,
                    });
                }
                *y = 2.0 * e4m3_to_f32(*x);
            }
            Ok(())
        }
    }

    fn dims() -> Vec<Dim> {
        vec![Dim::Symbol("T".into()), Dim::Size(WIDTH)]
    }

    fn seat(key: &str, mode: OnGuardFail) -> Arc<Seat> {
        let admission = Admission {
            width: WIDTH,
            rows: Rows::Capacity(4),
            band: Some((1, 4)),
            concurrent: true,
            strided: false,
        };
        Seat::new(
            key.into(),
            Box::new(Linked),
            admission,
            mode,
            vec![Some(dims())],
            vec![dims()],
        )
    }

    fn chain(mode: OnGuardFail) -> Chain {
        let half = |key, form: Arc<dyn WiredForm>| Half {
            seat: seat(key, mode),
            form,
            port: 0,
        };
        Chain::new(
            "chain:a+b".into(),
            half("a", Arc::new(Sends)),
            half("b", Arc::new(Reads)),
            8,
        )
    }

    fn x(rows: usize, value: f32) -> Vec<Option<Tensor>> {
        let data = vec![value; rows * WIDTH];
        vec![Some(
            Tensor::from_vec(data, (rows, WIDTH), &Device::Cpu).unwrap(),
        )]
    }

    fn counts(c: &Chain) -> [(u64, u64, u64, u64, bool); 2] {
        c.seats().map(|s| {
            let n = s.ledger.counts();
            (
                n.calls,
                n.form_calls,
                n.band_dispatches,
                n.fallbacks,
                n.detached,
            )
        })
    }

    #[test]
    fn a_served_call_hands_codes_over_and_counts_at_both() {
        let c = chain(OnGuardFail::Fallback);
        let SpanOutcome::Done(out) = c.run(&x(3, 1.06)).unwrap() else {
            panic!("host ran")
        };
        // 1.06 is 1.0 in E4M3.
        assert_eq!(
            out[0].flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            vec![2.0; 12]
        );
        assert_eq!(counts(&c), [(1, 1, 0, 0, false); 2]);
    }

    #[test]
    fn rows_beyond_the_median_that_were_seen_are_planned() {
        let c = chain(OnGuardFail::Fallback);
        assert!(matches!(c.run(&x(8, 1.0)).unwrap(), SpanOutcome::Host));
        assert_eq!(counts(&c), [(1, 0, 1, 0, false); 2]);
        assert!(matches!(c.run(&x(4, 1.0)).unwrap(), SpanOutcome::Done(_)));
    }

    #[test]
    fn b_151_b_279_one_call_out_of_contract_demotes_both() {
        for bad in [
            x(9, 1.0),
            vec![Some(
                Tensor::ones((2, 5), DType::F32, &Device::Cpu).unwrap(),
            )],
        ] {
            let c = chain(OnGuardFail::Fallback);
            assert!(matches!(c.run(&bad).unwrap(), SpanOutcome::Host));
            assert_eq!(counts(&c), [(1, 0, 0, 1, true); 2]);
            let [a, b] = c.seats().map(|s| s.ledger.counts().last_reason.unwrap());
            assert!(
                a.starts_with("rt_") && b.starts_with("linked to `a`: rt_"),
                "{a} {b}"
            );
            // For good, and nothing is counted any more.
            assert!(matches!(c.run(&x(2, 1.0)).unwrap(), SpanOutcome::Host));
            assert_eq!(counts(&c), [(1, 0, 0, 1, true); 2]);
        }
    }

    #[test]
    fn b_151_a_form_that_fails_takes_its_partner_with_it() {
        let c = chain(OnGuardFail::Fallback);
        assert!(matches!(c.run(&x(2, f32::NAN)).unwrap(), SpanOutcome::Host));
        assert_eq!(counts(&c), [(1, 0, 0, 1, true); 2]);
        let reason = c.seats()[0].ledger.counts().last_reason.unwrap();
        assert!(reason.starts_with("linked to `b`: failed"), "{reason}");
    }

    #[test]
    fn b_276_a_strict_chain_ends_the_run_and_nothing_fell_back() {
        let c = chain(OnGuardFail::Raise);
        assert!(c.run(&x(9, 1.0)).is_err());
        assert_eq!(counts(&c), [(1, 0, 0, 0, false); 2]);
        assert!(c.run(&x(2, f32::NAN)).is_err());
        assert_eq!(counts(&c), [(2, 0, 0, 0, true); 2]);
    }

    #[test]
    fn b_152_b_275_a_form_off_its_wire_refuses() {
        let failure = Linked.call(&[], &mut []).unwrap_err();
        assert_eq!(failure.code, "wire_unlinked");
        for mode in [OnGuardFail::Fallback, OnGuardFail::Raise] {
            // Within its contract and beyond it: nobody else could answer, so nothing falls back.
            for rows in [2, 9] {
                let alone = seat("a", mode);
                let error = alone.run(&x(rows, 1.0));
                // Nine rows are outside the band: planned for the host, whichever that is.
                if rows == 9 {
                    assert!(matches!(error.unwrap(), SpanOutcome::Host));
                    continue;
                }
                let error = error.unwrap_err().to_string();
                for fact in ["`a`", "rt_no_host_path", "no equivalent"] {
                    assert!(error.contains(fact), "{error}");
                }
                let counts = alone.ledger.counts();
                assert_eq!(
                    (
                        counts.calls,
                        counts.refused,
                        counts.fallbacks,
                        counts.form_calls
                    ),
                    (1, 1, 0, 0)
                );
            }
            let wrong = vec![Some(
                Tensor::ones((2, 5), DType::F32, &Device::Cpu).unwrap(),
            )];
            let alone = seat("a", mode);
            let error = alone.run(&wrong).unwrap_err().to_string();
            assert!(error.contains("rt_no_host_path: rt_width"), "{error}");
            assert_eq!(alone.ledger.counts().fallbacks, 0);
        }
    }

    #[test]
    fn b_272_the_wire_is_read_as_codes_and_as_nothing_else() {
        // The trial adapter shows a wired form as one of values, through the very codes.
        let decoded = |form, end| Decoded {
            form,
            end,
            scale: 0.5,
        };
        let data = [0.53_f32, -3.0, 1e9, 0.0];
        let view = [Some((data.as_slice(), [1, WIDTH].as_slice()))];
        let mut out = vec![(vec![f32::NAN; WIDTH + 3], vec![1, WIDTH])];
        decoded(&Sends, End::Emits(0))
            .call(&view, &mut out)
            .unwrap();
        // The form's own scale is 1, the wire's 0.5.
        assert_eq!(out[0].0[..WIDTH], [0.25, -1.5, 224.0, 0.0]);
        assert!(
            out[0].0[WIDTH..].iter().all(|v| v.is_nan()),
            "the guard is untouched"
        );
        let mut out = vec![(vec![0.0; WIDTH], vec![1, WIDTH])];
        decoded(&Reads, End::Accepts(0))
            .call(&view, &mut out)
            .unwrap();
        assert_eq!(out[0].0, [2.0, -12.0, 896.0, 0.0]);
    }
}
