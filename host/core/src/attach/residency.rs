//! Host operations of the devices that seats are on, before the union is judged: bound where they save copies, judged
//! with the seats they stand between, given up together with a union that does not hold with them. Where a captured step's
//! scores are made on a device that chooses among them, the choice is one of these.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use structures_graph::place::Place;
use structures_graph::session::Install;
use structures_graph::{Graph, OpId, OpKind, ValueId};
use structures_plugin_api::describe::operation_form;

use super::Prepared;
use crate::bind::{installs, Bound};
use crate::error::Error;
use crate::operations::{reads_housed, NotMade, Operation, Sizes, Workshop, CHOICE};
use crate::receipt::{DeviceOperations, RefusalNote};
use crate::residency::pays;
use crate::seat::Seat;
use crate::station::Station;
use crate::workload::Workload;

/// Stage of their refusals.
const STAGE: &str = "residency";

impl Prepared<'_> {
    /// Binds every operation that pays beside these seats, at all their devices. A step that is judged as captured chooses
    /// its next token.
    pub(super) fn operations(
        &mut self,
        active: &[Bound],
        captured: bool,
    ) -> Result<Vec<Operation>, Error> {
        let mut taken: Vec<Operation> = Vec::new();
        let mut visited: BTreeSet<String> = BTreeSet::new();
        let seated: Vec<Bound> = self.adopted.iter().chain(active).cloned().collect();
        for bound in &seated {
            let Some(device) = &bound.note.device else {
                continue;
            };
            if !visited.insert(format!("{}:{}", bound.note.plugin, device.index)) {
                continue;
            }
            let Some(plugin) = self.host.registry.plugin(&bound.note.plugin) else {
                continue;
            };
            if plugin.description().operations.is_empty() {
                continue;
            }
            let station = match Station::open(plugin, device.index) {
                Ok(station) => station,
                Err(e) => {
                    self.refuse(RefusalNote {
                        path: format!("{}:{}", bound.note.plugin, device.index),
                        structure: "operation".into(),
                        stage: STAGE.into(),
                        code: e.code,
                        reason: e.message,
                        plugin: Some(bound.note.plugin.clone()),
                        form: None,
                    });
                    continue;
                }
            };
            let most = self.model.model.config().max_positions;
            let mut shop = Workshop::new(
                self.model.session(),
                plugin,
                station,
                self.sizes(),
                most,
                self.options.on_guard_fail,
            );
            let mut all = installs(&seated);
            all.extend(taken.iter().map(|o| o.install.clone()));
            let chooses = captured && shop.chooses();
            taken.extend(self.at(&mut shop, &all, chooses));
        }
        Ok(taken)
    }

    /// What pays at one device, where it `chooses` and the scores are made there the choice too. What cannot be bound there
    /// stays with the host, and with it whatever it would have paid for.
    fn at(&mut self, shop: &mut Workshop<'_>, all: &[Install], chooses: bool) -> Vec<Operation> {
        let graph = self.model.session().graph().clone();
        let (readers, kinds, sizes) = (graph.readers(), shop.kinds(), self.sizes());
        let place: Place = shop.station().place().clone();
        let mut bound: BTreeMap<OpId, Operation> = BTreeMap::new();
        let mut declined: BTreeSet<OpId> = BTreeSet::new();
        let mut scores = match chooses {
            true => graph
                .outputs
                .first()
                .and_then(|(_, v)| chosen(&graph, &readers, *v)),
            false => None,
        };
        let mut choice = None;
        loop {
            let executes = |op: OpId| kinds.contains(&graph.op(op).kind) && !declined.contains(&op);
            let bytes = |v| match scores {
                // One number a row comes home for them.
                Some((made, _)) if v == made => sizes.chosen_bytes(&graph, v),
                _ => sizes.bytes(&graph, &readers, v),
            };
            let housed = |op: OpId| reads_housed(&graph, op);
            let found = pays(&graph, all, &place, executes, housed, bytes);
            let before = declined.len();
            for op in &found {
                if bound.contains_key(op) {
                    continue;
                }
                match shop.bind(*op) {
                    Ok(operation) => {
                        bound.insert(*op, operation);
                    }
                    Err(why) => {
                        declined.insert(*op);
                        let op = graph.op(*op);
                        let value = op.outputs.first().map(|v| graph.value(*v).name.clone());
                        self.not_bound(shop, op.kind.name(), value.unwrap_or_default(), why);
                    }
                }
            }
            if declined.len() > before {
                continue;
            }
            let there = |op: OpId| {
                let seat = all.iter().find(|i| i.ops.contains(&op));
                found.contains(&op) || seat.is_some_and(|i| i.runner.place() == Some(&place))
            };
            let made = scores.filter(|(made, _)| graph.producer(*made).is_some_and(|m| there(m.0)));
            if let (Some((_, given)), None) = (made, &choice) {
                match shop.bind_choice(given) {
                    Ok(operation) => choice = Some(operation),
                    Err(why) => {
                        scores = None;
                        let value = graph.value(given).name.clone();
                        self.not_bound(shop, CHOICE, value, why);
                        continue;
                    }
                }
            }
            bound.retain(|op, _| found.contains(op));
            return bound.into_values().chain(choice).collect();
        }
    }

    fn not_bound(&mut self, shop: &Workshop<'_>, kind: &str, value: String, no: NotMade) {
        self.refuse(RefusalNote {
            path: value,
            structure: "operation".into(),
            stage: STAGE.into(),
            code: no.code,
            reason: no.reason,
            plugin: Some(shop.plugin().into()),
            form: Some(operation_form(kind)),
        });
    }

    /// A union that does not hold with operations of devices is judged again without them.
    pub(super) fn gave_up_operations(&mut self, operations: &[Operation], code: &str, why: &str) {
        let count = operations.len();
        self.refuse(RefusalNote {
            path: "union".into(),
            structure: "operation".into(),
            stage: STAGE.into(),
            code: code.into(),
            reason: format!("with {count} host operations on devices: {why}"),
            plugin: None,
            form: None,
        });
    }

    /// What stands for symbols under the workload.
    fn sizes(&self) -> Sizes {
        let longest = self.judged.iter().map(Vec::len).max().unwrap_or(1);
        Sizes {
            tokens: match self.workload {
                Workload::Decode => 1,
                Workload::Prefill => longest,
            },
            positions: longest,
        }
    }
}

/// The value that scores are made as, and the one they are given as, where nothing but the choice reads them.
fn chosen(
    graph: &Graph,
    readers: &[Vec<(OpId, usize)>],
    given: ValueId,
) -> Option<(ValueId, ValueId)> {
    let reshape = |op: OpId| graph.op(op).kind == OpKind::Reshape;
    let mut made = given;
    while let Some((op, _)) = graph.producer(made).filter(|(op, _)| reshape(*op)) {
        made = graph.op(op).inputs.first().copied().flatten()?;
    }
    let mut readers = readers[made.0].iter();
    readers.all(|(op, _)| reshape(*op)).then_some((made, given))
}

/// Seats of operations.
pub(super) fn seats(operations: &[Operation]) -> Vec<Arc<Seat>> {
    operations.iter().map(|o| o.seat.clone()).collect()
}

/// Rows of the receipt: one a device and kind.
pub(super) fn notes(operations: &[Operation]) -> Vec<DeviceOperations> {
    let mut rows: Vec<DeviceOperations> = Vec::new();
    for operation in operations {
        let kind = operation.kind;
        let (plugin, device) = (&operation.plugin, &operation.device);
        let same = |r: &&mut DeviceOperations| {
            r.plugin == *plugin && r.device == *device && r.kind == kind
        };
        let at = match rows.iter_mut().find(same) {
            Some(row) => row,
            None => {
                rows.push(DeviceOperations {
                    plugin: plugin.clone(),
                    device: device.clone(),
                    kind: kind.into(),
                    count: 0,
                    values: Vec::new(),
                });
                match rows.last_mut() {
                    Some(row) => row,
                    None => continue,
                }
            }
        };
        at.count += 1;
        at.values.push(operation.value.clone());
    }
    rows
}
