//! A table of the host's own outputs in a seat, for a span that is a function of one conditioning with few values.
//!
//! Owns the making of the table and its seat. What a table is, and how a row is found in it, is [`crate::steps`].

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use structures_graph::session::{Install, Piece};
use structures_graph::{Dim, ValueId};

use super::{failed, present, refusal, seat_note, Bench, Bound, NotBound};
use crate::choose::Choice;
use crate::error::Error;
use crate::receipt::SeatNote;
use crate::seat::{Admission, Rows, Seat};
use crate::sites::Site;
use crate::stats::Content;
use crate::steps::{self, Locator, StepTable};

impl Bench<'_> {
    /// A table of the host's own outputs, one row for each conditioning that was observed.
    pub fn bind_table(
        &self,
        site: &Site<'_>,
        span_index: usize,
        choice: &Choice<'_>,
        rows: &[u64],
    ) -> Result<Bound, NotBound> {
        let span = &site.spans[span_index];
        let refuse =
            |code: &str, reason: String| Err(refusal(site, choice, "bind", code, reason, false));
        let outputs: Vec<(&str, ValueId)> = present(&span.outputs).collect();
        let (Some(declared), [(point, Some(cond))], [(_, output)]) = (
            steps::declared(site.spec),
            span.inputs.as_slice(),
            outputs.as_slice(),
        ) else {
            let reason = format!("span `{}` is no function of one conditioning", span.name);
            return refuse("not_step_quantised", reason);
        };
        let graph = self.session.graph();
        let width = match graph.value(*cond).dims.last() {
            Some(Dim::Size(n)) => *n,
            _ => 0,
        };
        let key = site.point_key(point);
        let seen = self.calibration.contents.get(&key).map(Content::values);
        let made = steps::distinct(&seen.unwrap_or_default(), width, &key, declared.max_steps)
            .and_then(|rows| Locator::new(rows, declared.margin, &key));
        let locator = match made {
            Ok(locator) => Arc::new(locator),
            Err(no) => return refuse(no.code, no.reason),
        };
        let piece = match self.session.piece(&span.ops) {
            Ok(piece) => piece,
            Err(e) => return refuse("not_step_quantised", e.to_string()),
        };
        let table = match self.answers(&piece, &locator, *cond, *output) {
            Ok(table) => table,
            Err(e) => return refuse(&e.code(), e.to_string()),
        };
        let statistics = BTreeMap::from([(
            format!("{point}|content|tensor"),
            locator.rows().iter().flatten().copied().collect(),
        )]);
        let table = StepTable::new(locator, table);
        let capacity = rows.iter().copied().max().unwrap_or(1) as usize;
        let dims_of = |v: ValueId| graph.value(v).dims.clone();
        let seat = Seat::new(
            site.seam.key.clone(),
            Box::new(table.clone()),
            Admission {
                width,
                rows: Rows::Capacity(capacity),
                band: None,
                concurrent: choice.form.concurrent,
                strided: false,
            },
            self.on_guard_fail,
            vec![Some(dims_of(*cond))],
            vec![dims_of(*output)],
        );
        Ok(Bound {
            install: Install {
                name: site.id(),
                ops: span.ops.clone(),
                inputs: vec![Some(*cond)],
                outputs: vec![*output],
                runner: seat.clone(),
            },
            seat,
            note: SeatNote {
                statistics,
                ..seat_note(site, span_index, choice, rows, capacity)
            },
            packed_bytes: table.bytes(),
            scratch_bytes: 0,
            table: Some(table),
        })
    }

    /// What the host makes of every row, one after the other.
    fn answers(
        &self,
        piece: &Piece,
        locator: &Locator,
        cond: ValueId,
        output: ValueId,
    ) -> Result<Vec<f32>, Error> {
        let graph = self.session.graph();
        let size = |d: &Dim| match d {
            Dim::Size(n) => *n,
            Dim::Symbol(_) => 1,
        };
        let mut table = Vec::new();
        for row in locator.rows() {
            let dims: Vec<usize> = graph.value(cond).dims.iter().map(size).collect();
            let row = Tensor::from_slice(row, dims, &Device::Cpu).map_err(failed)?;
            let made = piece.run(&[(cond, row)], &[output])?;
            let flat = made[0].flatten_all().and_then(|t| t.to_vec1::<f32>());
            table.extend(flat.map_err(failed)?);
        }
        Ok(table)
    }
}
