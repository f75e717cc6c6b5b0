//! Host operations of the devices that seats are on, before the union is judged: bound where they save copies, judged
//! with the seats they stand between, given up together with a union that does not hold with them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use structures_graph::place::Place;
use structures_graph::session::Install;
use structures_graph::OpId;

use super::Prepared;
use crate::bind::{installs, Bound};
use crate::error::Error;
use crate::operations::{reads_housed, Operation, Sizes, Workshop};
use crate::receipt::{DeviceOperations, RefusalNote};
use crate::residency::pays;
use crate::seat::Seat;
use crate::station::Station;
use crate::workload::Workload;

/// Stage of their refusals.
const STAGE: &str = "residency";

impl Prepared<'_> {
    /// Binds every operation that pays beside these seats, at all their devices.
    pub(super) fn operations(&mut self, active: &[Bound]) -> Result<Vec<Operation>, Error> {
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
            taken.extend(self.at(&mut shop, &all));
        }
        Ok(taken)
    }

    /// What pays at one device. What cannot be bound there stays with the host, and with it whatever it would have paid
    /// for.
    fn at(&mut self, shop: &mut Workshop<'_>, all: &[Install]) -> Vec<Operation> {
        let graph = self.model.session().graph().clone();
        let (readers, kinds, sizes) = (graph.readers(), shop.kinds(), self.sizes());
        let place: Place = shop.station().place().clone();
        let mut bound: BTreeMap<OpId, Operation> = BTreeMap::new();
        let mut declined: BTreeSet<OpId> = BTreeSet::new();
        loop {
            let executes = |op: OpId| kinds.contains(&graph.op(op).kind) && !declined.contains(&op);
            let bytes = |v| sizes.bytes(&graph, &readers, v);
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
                    Err((code, reason)) => {
                        declined.insert(*op);
                        let op = graph.op(*op);
                        let value = op.outputs.first().map(|v| graph.value(*v).name.clone());
                        let form = structures_plugin_api::describe::operation_form(op.kind.name());
                        self.refuse(RefusalNote {
                            path: value.unwrap_or_default(),
                            structure: "operation".into(),
                            stage: STAGE.into(),
                            code,
                            reason,
                            plugin: Some(shop.plugin().into()),
                            form: Some(form),
                        });
                    }
                }
            }
            if declined.len() == before {
                bound.retain(|op, _| found.contains(op));
                return bound.into_values().collect();
            }
        }
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

/// Seats of operations.
pub(super) fn seats(operations: &[Operation]) -> Vec<Arc<Seat>> {
    operations.iter().map(|o| o.seat.clone()).collect()
}

/// Rows of the receipt: one a device and kind.
pub(super) fn notes(operations: &[Operation]) -> Vec<DeviceOperations> {
    let mut rows: Vec<DeviceOperations> = Vec::new();
    for operation in operations {
        let kind = operation.kind.name();
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
