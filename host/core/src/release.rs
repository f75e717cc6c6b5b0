//! Letting go of the host's own weights where seats do their work, and getting them back.
//!
//! A form keeps packed copies of its own, so beside every seat the host's f32 weights lie idle. A parameter that only
//! operations of such seats read is consumed: what the files give is compared with what is in memory, bit for bit, and only
//! if it is the same is the memory let go. A call that falls back reads it from the file again, checked by its digest, and
//! keeps it; that is counted. What the files do not give back exactly stays in memory. A parameter that was not read yet
//! is looked at once for its digest, so that what comes back later is checked and counted as well. A place where the host serves some of
//! the calls as planned (rows outside a form's band, whatever else reads the tensor, another phase of the model) is kept
//! whole and counted.
//!
//! [`finalise`] is the same without the way back: nothing can be detached, and a call that a form does not serve ends the
//! run, because there is no host to answer it.
//!
//! Owns which parameters may go and what is said about it. Does not own parameters ([`Session`]) nor files
//! (`structures-models`).

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use structures_graph::session::{Originals, Stored};
use structures_graph::{Dim, GraphError, OpId, ParamRef, Plan, Session, ValueId};
use structures_models::generate::PROMPT_PASS;
use structures_models::params::CheckpointParams;

use crate::error::Error;
use crate::host::Loaded;

/// Some parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amount {
    /// How many; tied ones count once.
    pub params: usize,
    /// Bytes of the host's copies.
    pub bytes: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.params += 1;
        self.bytes += bytes;
    }
}

/// What of the host's weights is where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseNote {
    /// Let go; the checkpoint's files give them back exactly, unless `for_good`.
    pub released: Amount,
    /// Read by no planned host operation, but not what the files give: kept in host memory, gone when `for_good`.
    pub in_memory: Amount,
    /// Weights of seats whose place the host serves too: kept whole.
    pub serving: Amount,
    /// Those seats.
    pub serving_seats: usize,
    /// Came back because the host read them again -> how often.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub restored: BTreeMap<String, u64>,
    /// There is no way back.
    pub for_good: bool,
}

impl ReleaseNote {
    /// One line for people.
    pub fn summary(&self) -> String {
        let mb = |a: &Amount| a.bytes as f64 / 1e6;
        let mut text = format!(
            "host weights: {} parameters released ({:.1} MB{})",
            self.released.params,
            mb(&self.released),
            if self.for_good { ", for good" } else { "" },
        );
        if self.in_memory.params > 0 {
            let (n, mb) = (self.in_memory.params, mb(&self.in_memory));
            text.push_str(&format!(
                ", {n} kept in memory because the files do not give them back exactly ({mb:.1} MB)"
            ));
        }
        if self.serving_seats > 0 {
            let (n, mb) = (self.serving_seats, mb(&self.serving));
            text.push_str(&format!(
                ", {n} seats whose host serves some calls kept whole ({mb:.1} MB)"
            ));
        }
        if !self.restored.is_empty() {
            text.push_str(&format!(", {} restored by fallbacks", self.restored.len()));
        }
        text
    }
}

/// One parameter in the checkpoint, as it was when it was released.
struct InFile {
    loader: Arc<CheckpointParams>,
    digest: [u8; 32],
}

impl Originals for InFile {
    fn restore(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
        let failed = |reason: String| GraphError::MissingParam {
            param: param.to_string(),
            reason,
        };
        let tensor = load(&self.loader, param).map_err(|e| failed(e.to_string()))?;
        if digest(&tensor).map_err(|e| failed(e.to_string()))? != self.digest {
            return Err(failed(
                "it was released, and the checkpoint does not hold it any more as it was loaded: open the model again"
                    .into(),
            ));
        }
        tracing::warn!(%param, "the host reads a released parameter again; it was restored from the checkpoint");
        Ok(tensor)
    }
}

fn load(loader: &CheckpointParams, param: &ParamRef) -> Result<Tensor, Error> {
    let tensor = loader.load(param)?;
    Ok(tensor.to_dtype(DType::F32).map_err(failed)?)
}

fn failed(source: candle_core::Error) -> GraphError {
    GraphError::Kernel {
        op: "release".into(),
        at: "parameter".into(),
        source: Box::new(source),
    }
}

fn digest(tensor: &Tensor) -> Result<[u8; 32], Error> {
    let values = tensor
        .flatten_all()
        .and_then(|t| t.to_vec1::<f32>())
        .map_err(failed)?;
    let mut hash = Sha256::new();
    for dim in tensor.dims() {
        hash.update((*dim as u64).to_le_bytes());
    }
    let mut bytes = Vec::with_capacity(1 << 14);
    for some in values.chunks(1 << 12) {
        bytes.clear();
        bytes.extend(some.iter().flat_map(|v| v.to_bits().to_le_bytes()));
        hash.update(&bytes);
    }
    Ok(hash.finalize().into())
}

/// What may go under a plan.
struct Idle {
    /// Read by operations of seats only, and by nobody else.
    params: Vec<Stored>,
    /// Weights of the seats whose place the host serves.
    serving: Amount,
    serving_seats: usize,
}

fn idle(model: &Loaded, plan: &Plan) -> Idle {
    let session = model.session();
    let graph = session.graph();
    // No pass of ours has more rows.
    let rows = PROMPT_PASS.min(model.model.config().max_positions);
    let mut covered: HashSet<OpId> = HashSet::new();
    let mut shared: HashSet<OpId> = HashSet::new();
    let mut serving_seats = 0;
    let mut read: HashSet<ValueId> = graph.outputs.iter().map(|(_, v)| *v).collect();
    for install in plan.installs() {
        read.extend(install.inputs.iter().flatten());
        match install.runner.host_serves(rows) {
            true => {
                serving_seats += 1;
                shared.extend(&install.ops);
            }
            false => covered.extend(&install.ops),
        }
    }
    let inputs = |op: OpId| graph.op(op).inputs.iter().flatten().copied();
    let host = graph.op_ids().filter(|op| !covered.contains(op));
    read.extend(host.flat_map(inputs));
    let at_seats: HashSet<ValueId> = shared.iter().flat_map(|op| inputs(*op)).collect();
    let other = |param: &ParamRef| match &model.model.eyes {
        Some(eyes) => [&eyes.encoder, &eyes.prefill]
            .iter()
            .any(|phase| holds(phase, param)),
        None => false,
    };
    let mut serving = Amount::default();
    let mut params = Vec::new();
    for stored in session.stored() {
        let needed = stored.values.iter().any(|v| read.contains(v));
        if !needed && !other(&stored.param) {
            params.push(stored);
        } else if stored.values.iter().any(|v| at_seats.contains(v)) {
            serving.add(bytes(model, &stored));
        }
    }
    Idle {
        params,
        serving,
        serving_seats,
    }
}

fn holds(session: &Session, param: &ParamRef) -> bool {
    session.stored().iter().any(|s| s.param == *param)
}

/// Bytes of the host's copy: all rows, whatever part of them the graph reads.
fn bytes(model: &Loaded, stored: &Stored) -> u64 {
    let map = &model.model.description.params;
    let graph = model.session().graph();
    let here = |v: &ValueId| -> usize {
        let size = |d: &Dim| if let Dim::Size(n) = d { *n } else { 1 };
        graph.value(*v).dims.iter().map(size).product()
    };
    let elements = match map.get(&stored.param.path, &stored.param.name) {
        Some((spec, _)) => spec.dims.iter().product(),
        // A model that no checkpoint describes: what the graph reads.
        None => stored.values.iter().map(here).sum::<usize>(),
    };
    (elements * size_of::<f32>()) as u64
}

/// Lets go of the host's weights where the seats of a plan serve every planned call. What was let go before stays so.
///
/// # Errors
/// A tensor that cannot be read in memory, or for the first time from its file; nothing is lost then.
pub fn consume(model: &Loaded, plan: &Plan) -> Result<ReleaseNote, Error> {
    let session = model.session();
    let loader = Arc::new(model.model.description.loader());
    let idle = idle(model, plan);
    let mut note = ReleaseNote {
        serving: idle.serving,
        serving_seats: idle.serving_seats,
        restored: session.restored(),
        ..ReleaseNote::default()
    };
    for stored in &idle.params {
        let whole = if session.unread(stored) {
            Some(load(&loader, &stored.param)?)
        } else if session.holds(stored) {
            // A file that is gone or holds something else gives nothing back.
            let whole = load(&loader, &stored.param).ok();
            let same = |t: &Tensor| matches!(session.holds_this(stored, t), Ok(true));
            let Some(whole) = whole.filter(same) else {
                note.in_memory.add(bytes(model, stored));
                continue;
            };
            Some(whole)
        } else {
            None
        };
        if let Some(whole) = whole {
            let from: Arc<dyn Originals> = Arc::new(InFile {
                loader: loader.clone(),
                digest: digest(&whole)?,
            });
            session.release(&stored.param, Some(&from));
        }
        note.released.add(bytes(model, stored));
    }
    structures_loader::give_memory_back();
    Ok(note)
}

/// What is released now, and what came back since.
pub fn note(model: &Loaded, plan: &Plan) -> ReleaseNote {
    let session = model.session();
    let idle = idle(model, plan);
    let mut note = ReleaseNote {
        serving: idle.serving,
        serving_seats: idle.serving_seats,
        restored: session.restored(),
        ..ReleaseNote::default()
    };
    for stored in session.stored() {
        if session.unread(&stored) {
            continue;
        }
        if !session.holds(&stored) {
            note.released.add(bytes(model, &stored));
        } else if idle.params.contains(&stored) {
            note.in_memory.add(bytes(model, &stored));
        }
    }
    note
}

/// Lets go for good: of what [`consume`] lets go of, and of what it keeps in memory. There is no way back, and what the
/// forms do not serve is refused from now on.
///
/// # Errors
/// As [`consume`].
pub fn finalise(model: &Loaded, plan: &Plan) -> Result<ReleaseNote, Error> {
    let consumed = consume(model, plan)?;
    let rows = PROMPT_PASS.min(model.model.config().max_positions);
    for stored in idle(model, plan).params {
        model.session().release(&stored.param, None);
    }
    for install in plan.installs() {
        // A choice among scores takes no weights: the host can always make it.
        if install.chooses().is_none() && !install.runner.host_serves(rows) {
            install.runner.host_gone();
        }
    }
    structures_loader::give_memory_back();
    Ok(ReleaseNote {
        for_good: true,
        ..consumed
    })
}

/// Brings everything back that was let go, exactly; how many parameters.
///
/// # Errors
/// `released_for_good`; a checkpoint that changed.
pub fn restore(model: &Loaded) -> Result<usize, Error> {
    let session = model.session();
    let mut back = 0;
    for stored in session.stored() {
        if session.holds(&stored) || session.unread(&stored) {
            continue;
        }
        for v in &stored.values {
            session.value_tensor(*v)?;
        }
        back += 1;
    }
    Ok(back)
}
