//! The receipt: everything that was decided and why, as one JSON record with a digest. A receipt replays.
//!
//! Field names are a contract with scripts (`docs/receipt.md`). The digest is the sha256 of the canonical JSON of
//! the whole record without its `digest` field.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use structures_graph::captured::PlaceNote;

use crate::adopt::Adopted;
use crate::compose::BlockNote;
use crate::decisions::Resolved;
use crate::gates::Metrics;
use crate::ledger::LedgerSummary;
use crate::precision::PrecisionSpec;
use crate::release::ReleaseNote;
use crate::schemes::SchemeRecord;
use crate::stats;
use crate::steps::BrokerNote;

/// Value of [`Receipt::schema`].
pub const SCHEMA: u32 = 1;

/// One `attach`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Receipt {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Machine, threads, versions.
    pub environment: BTreeMap<String, Json>,
    /// Model name.
    pub model: String,
    /// What was loaded.
    pub checkpoint: CheckpointNote,
    /// `decode` or `prefill`.
    pub workload: String,
    /// `distribution` or `values`.
    pub output_kind: String,
    /// The scheme and what it decided.
    pub scheme: SchemeRecord,
    /// Floors the caller imposed.
    pub floors: BTreeMap<String, f64>,
    /// Smallest speed-up a unit must show.
    pub min_speedup: f64,
    /// How latency was measured.
    pub timing: TimingNote,
    /// How statistics were measured.
    pub calibration: CalibrationNote,
    /// Host run twice before anything, and again after detaching.
    pub control: ControlNote,
    /// Plugins that took part.
    pub plugins: Vec<PluginNote>,
    /// Who named the first form of each structure: pin, recorded decision or declaration, and what fell through.
    #[serde(default)]
    pub decisions: Vec<Resolved>,
    /// `name@version` -> digest.
    pub spec_digests: BTreeMap<String, String>,
    /// Assumptions seams carry.
    pub assumed: Vec<Assumption>,
    /// Refusals, at every stage.
    pub refused: Vec<RefusalNote>,
    /// Seams the scheme or an owner keeps on the host.
    pub kept_host: Vec<RefusalNote>,
    /// Packed weights taken over at load time, which every arm ran with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopted: Option<Adopted>,
    /// Negotiated wires.
    pub negotiated: Vec<WireNote>,
    /// Tables of steps that share one resolution of the step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub brokers: Vec<BrokerNote>,
    /// Blocks that were composed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockNote>,
    /// Host operations that devices execute between the seats.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_operations: Vec<DeviceOperations>,
    /// Stages of the plan in the order they were done.
    #[serde(default)]
    pub stages: Vec<String>,
    /// Units in the order they were judged.
    pub units: Vec<UnitNote>,
    /// All active units together.
    pub union: Option<UnitNote>,
    /// Ledger of the committed seats over the union's judgement.
    pub ledger: LedgerSummary,
    /// Paths of the seats that stay.
    pub seams_active: Vec<String>,
    /// Bytes the seats added.
    pub memory: MemoryNote,
    /// Everything needed to bind the same seats again.
    pub seats: Vec<SeatNote>,
    /// The scales bound forms really execute.
    pub precision_spec: PrecisionSpec,
    /// sha256 of the record without this field.
    pub digest: String,
}

impl Receipt {
    /// Every seat to bind again: what was adopted, then what was judged.
    pub fn bound(&self) -> impl Iterator<Item = &SeatNote> {
        let adopted = self.adopted.iter().flat_map(|a| &a.seats);
        adopted.chain(&self.seats)
    }
}

/// What was loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointNote {
    /// File name without its directory.
    pub file: String,
    /// Short hash of the checkpoint, as caches use it.
    pub hash: String,
    /// sha256 over every byte of weights, configuration and tokenizer: what replay compares.
    pub sha256: String,
    /// Architecture the checkpoint names.
    pub architecture: String,
    /// dtype activations are computed in.
    pub dtype: String,
}

/// How latency was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimingNote {
    /// Always `paired alternating, medians of per-round ratios`.
    pub method: String,
    /// Rounds.
    pub rounds: usize,
    /// Iterations a round.
    pub iters: usize,
    /// Threads both arms had.
    pub threads: usize,
    /// What the treated arm is compared with.
    pub baseline: String,
    /// What one iteration is.
    pub iteration: String,
    /// The form both arms were judged in: `captured` or `eager`.
    #[serde(default = "eager")]
    pub form: String,
}

/// What receipts without a form were judged in.
fn eager() -> String {
    "eager".into()
}

/// How statistics were measured, and on what the arms were judged.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CalibrationNote {
    /// The measurement.
    #[serde(flatten)]
    pub note: stats::CalibrationNote,
    /// Parity was judged on the samples scales were fitted on.
    pub fit_residual: bool,
    /// Distinct row counts observed at the seams' inputs under the workload.
    pub rows: Vec<u64>,
}

/// Identity checks of the unmodified host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlNote {
    /// Two runs of the host before anything was built are bit-identical.
    pub repeat_identical: bool,
    /// A run of the host after everything was taken off equals the first, bit for bit.
    pub detach_identical: bool,
}

/// A plugin that took part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginNote {
    /// Id.
    pub id: String,
    /// Version.
    pub version: String,
    /// Digest of the library.
    pub sha256: String,
}

/// An assumption.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assumption {
    /// Seam.
    pub path: String,
    /// Structure.
    pub structure: String,
    /// What was assumed.
    pub text: String,
}

/// A refusal, or a seam kept on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalNote {
    /// Seam or unit.
    pub path: String,
    /// Structure.
    pub structure: String,
    /// `discover`, `locate`, `scheme`, `ownership`, `choose`, `probe`, `bind`, `adopt`.
    pub stage: String,
    /// Stable code.
    pub code: String,
    /// For people.
    pub reason: String,
    /// Plugin, where one was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plugin: Option<String>,
    /// Form, where one was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub form: Option<String>,
}

/// A unit, or the union.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct UnitNote {
    /// Name of the structure, `chain:...`, or `union`.
    pub name: String,
    /// Structure.
    pub structure: String,
    /// Form.
    pub form: String,
    /// Plugin.
    pub plugin: String,
    /// Number of the plugin's device; absent on the CPU, and where several differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u32>,
    /// Number of seats.
    pub seams: usize,
    /// Their paths.
    pub paths: Vec<String>,
    /// Host operations that devices executed beside them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub operations: usize,
    /// `activated` or `refused`.
    pub outcome: String,
    /// Code of the refusal.
    pub code: Option<String>,
    /// Reason of the refusal.
    pub reason: Option<String>,
    /// Parity metrics.
    pub metrics: Metrics,
    /// `pass`, `warn`, `low` or `unknown`.
    pub band: String,
    /// Band note: metric, value, samples, method.
    pub band_note: Option<Json>,
    /// What the seats did while judged.
    pub ledger: LedgerSummary,
    /// Paired latency.
    pub latency: Option<LatencyNote>,
    /// Copies between host and devices in one timed iteration; empty when all of it ran on the CPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<CopyNote>,
    /// How its captured step ran where its seats are; absent where it was judged eagerly, or nothing of it is on a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_step: Option<PlaceNote>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// Copies between the host and one device in one iteration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyNote {
    /// `PLUGIN:NUMBER`.
    pub device: String,
    /// Values copied to it.
    pub copies_in: u64,
    /// Values copied from it.
    pub copies_out: u64,
    /// Bytes copied to it.
    pub bytes_in: u64,
    /// Bytes copied from it.
    pub bytes_out: u64,
}

/// Paired latency of one unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencyNote {
    /// Median host milliseconds an iteration.
    pub host_ms: f64,
    /// Median treated milliseconds an iteration.
    pub treated_ms: f64,
    /// Median of per-round ratios host / treated.
    pub speedup: f64,
    /// Largest minus smallest ratio.
    pub spread: f64,
    /// The host's own spread, `(max - min) / median`.
    pub host_spread: f64,
    /// Rounds.
    pub rounds: usize,
}

/// Bytes the seats added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryNote {
    /// Packed weights.
    pub packed_bytes: u64,
    /// Scratch.
    pub scratch_bytes: u64,
    /// The host's own weights that were let go in return, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<ReleaseNote>,
}

/// What binds one seat again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeatNote {
    /// Receipt key of the seam.
    pub key: String,
    /// Path.
    pub path: String,
    /// Structure.
    pub structure: String,
    /// Spec version.
    pub version: u32,
    /// Span bound.
    pub span: String,
    /// Plugin id.
    pub plugin: String,
    /// Form.
    pub form: String,
    /// Format.
    pub format: String,
    /// Host and form axes it was bound with.
    pub variant: BTreeMap<String, String>,
    /// Attributes captured from the host graph.
    pub params: BTreeMap<String, Json>,
    /// Symbol -> size.
    pub dims: BTreeMap<String, u64>,
    /// Format activations are rounded through at the points with statistics.
    pub activation_format: String,
    /// `point|statistic|granularity` -> values.
    pub statistics: BTreeMap<String, Vec<f32>>,
    /// Parameters of the scheme's route.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scheme: BTreeMap<String, Json>,
    /// Slots that were handed over as packed rows -> their format.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub packed: BTreeMap<String, String>,
    /// Row capacity bound.
    pub row_capacity: usize,
    /// Median of the rows observed here under the workload.
    pub median_rows: u64,
    /// Why wider spans were not taken.
    #[serde(default)]
    pub note: Vec<String>,
    /// The wire it is on, with its partner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire: Option<SeatWire>,
    /// The device it runs on; absent on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<SeatDevice>,
}

/// The device of a seat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeatDevice {
    /// Its number in the plugin, from 1.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its architecture.
    pub arch: String,
}

/// Host operations of one kind that one device executes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceOperations {
    /// Plugin id.
    pub plugin: String,
    /// The device.
    pub device: SeatDevice,
    /// Kind.
    pub kind: String,
    /// How many.
    pub count: usize,
    /// Names of their first results in the host's graph.
    pub values: Vec<String>,
}

/// One seat's end of a wire.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeatWire {
    /// Name of the port.
    pub port: String,
    /// Whether it is an output.
    pub emits: bool,
    /// Format of the wire.
    pub format: String,
    /// What both ends take their scale from.
    pub amax: f32,
    /// `structure:key` of the seat at the other end.
    pub peer: String,
    /// Most rows observed: more than that demotes both.
    pub rows: u64,
}

/// One negotiated wire.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WireNote {
    /// The unit: `chain:<producer>+<consumer>`, structures.
    pub unit: String,
    /// Who sends.
    pub producer: WireEndNote,
    /// Who reads.
    pub consumer: WireEndNote,
    /// Name of the value in the host's graph.
    pub value: String,
    /// Module of the structure that owns the block.
    pub owner: String,
    /// Format.
    pub format: String,
    /// Calibrated at the consumer's input.
    pub amax: f32,
    /// The one scale of both ends.
    pub scale: f32,
    /// Median rows, which the pair is bound for.
    pub rows: u64,
    /// Cosine of the pair on what the host feeds it.
    pub smoke: f64,
    /// Whether both seats stay.
    pub active: bool,
}

/// One end of a negotiated wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireEndNote {
    /// Receipt key of the seam.
    pub key: String,
    /// Structure.
    pub structure: String,
    /// Port.
    pub port: String,
    /// Plugin.
    pub plugin: String,
    /// Form.
    pub form: String,
}
