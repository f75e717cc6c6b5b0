//! The `describe` document: what a backend declares about itself, as pure data.
//!
//! One JSON document, `schema: 1`, printed by the scan child, shipped as a sidecar, and shown by
//! `structures plugins show`. Unknown fields are ignored on read, so a newer minor can add some.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::abi::API_VERSION;
use crate::formats::BlockFormat;
use crate::sdk::Failure;

/// Value of [`Description::schema`].
pub const SCHEMA: u32 = 1;

/// A whole `describe` document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// Always [`SCHEMA`].
    pub schema: u32,
    /// Unique id, `[a-z0-9][a-z0-9_-]*`; the library is named `libstructures_plugin_<id>.so` by
    /// convention.
    pub id: String,
    /// Who ships it.
    pub vendor: String,
    /// The plugin's own version (semver).
    pub version: String,
    /// The ABI version it was built against (semver).
    pub api: String,
    /// Architectures: `x86_64+avx512vnni`, `x86_64`, `sm_90a`, `sm_80+PTX`, ... An empty list keeps
    /// the legacy load path (no check).
    #[serde(default)]
    pub archs: Vec<String>,
    /// `reference` marks a yardstick whose forms are tried last and never bound by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// How it was built to panic: `unwind`, or `abort`, which ends the host's process where a panic
    /// would have become a status. The export macro writes it; absent where nothing panics (C).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub panic: Option<String>,
    /// Host features it cannot do without; an unknown one refuses the plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requires: Vec<String>,
    /// Named optional entries the probe looks for (kernels, library symbols, CPU features).
    #[serde(default)]
    pub entries: Vec<String>,
    /// What it can execute.
    pub forms: Vec<FormDecl>,
    /// Operations of a host's graph that it executes on its devices (`add`, `mul`, `embedding`), so that values need
    /// not leave them between two forms. One is bound by the form name of [`operation_form`] and no structure, with
    /// its attributes as params and its parameters as weights. Never on the CPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<String>,
    /// Those of them whose calls may be recorded and launched again ([`FormDecl::capture`] of an operation).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recorded_operations: Vec<String>,
}

/// What stands before the kind in the form name of a host operation. No form of a structure has a colon in its name.
const OPERATION: &str = "operation:";

/// The form name under which an operation of a host's graph is bound.
pub fn operation_form(kind: &str) -> String {
    format!("{OPERATION}{kind}")
}

/// The operation that a form of no structure stands for.
pub fn operation_of<'a>(structure: &str, form: &'a str) -> Option<&'a str> {
    form.strip_prefix(OPERATION)
        .filter(|_| structure.is_empty())
}

/// One executable realisation of a structure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FormDecl {
    /// Structure it realises.
    pub structure: String,
    /// Accepted spec versions.
    pub spec_versions: Vec<u32>,
    /// Name, unique within the plugin together with the structure.
    pub name: String,
    /// Format name, what schemes route to: `none` (unquantised), `fp8_static`, `w8a16_static`, ...
    pub format: String,
    /// Spans it implements, widest first, from the structure's dataflow.
    pub spans: Vec<String>,
    /// Axis -> accepted values; an axis not listed is accepted with any value of the spec.
    #[serde(default)]
    pub variants: BTreeMap<String, Vec<String>>,
    /// Boundary dtypes it accepts.
    pub dtypes: Vec<String>,
    /// Statistics it needs, resolved at bind.
    #[serde(default)]
    pub statistics: Vec<StatisticDecl>,
    /// Rows and dims it serves; calls outside `rows` are dispatched to the host and counted.
    #[serde(default)]
    pub band: Band,
    /// Format the weights are rounded through, for the bind-parity reference.
    pub weight_format: WeightFormat,
    /// Packed formats of checkpoints whose rows it takes as they are, in any rank-2 slot; the host
    /// hands them over only where it was told to adopt them. Empty: f32 and bf16 views alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub packed: Vec<BlockFormat>,
    /// Slots whose weights share one per-tensor scale, each list one group; a trailing `*` stands
    /// for any index (`w_*`). A slot in no group has a scale of its own. Read by the host's
    /// bind-parity reference.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scale_groups: Vec<Vec<String>>,
    /// Format activations are rounded through at each point listed in `statistics`, `none` when they
    /// are not. Static under the point's `(amax, tensor)`, else under a scale each row has of its
    /// own; a point that needs no measurement is listed with `(none, tensor)`.
    #[serde(default = "none_text")]
    pub activation_format: String,
    /// Whether input channels are balanced before packing, by the `(amax, channel)` of each point:
    /// the products that read the point pack `W * s` and read `x / s` (`formats::Balance`).
    #[serde(default, skip_serializing_if = "is_false")]
    pub balances: bool,
    /// Largest relative L2 error at bind parity this form promises.
    pub tolerance: f64,
    /// Rounds activations to this dtype on a wider host (`bf16`), absent when it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<String>,
    /// Lower is more precise.
    pub precision_rank: u32,
    /// Whether it quantises at all: scheme `none` keeps the host then.
    pub quantises: bool,
    /// Wires it can be put on, `emits:OUTPUT:FORMAT` or `accepts:INPUT:FORMAT` ([`Wire`]). A word
    /// without colons is a wire inside the form, which no host sees.
    #[serde(default)]
    pub wires: Vec<String>,
    /// Architectures it serves where they are fewer than the description's: kernels that use what one generation
    /// has. Empty takes the description's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub archs: Vec<String>,
    /// Whether its calls may be recorded by the device it is bound on and launched again (`graph_launch`): after a first
    /// call of the same sizes a call allocates nothing, waits for nothing, and does the same whatever lies in its inputs.
    #[serde(default)]
    pub capture: bool,
    /// Whether calls of one instance may overlap.
    #[serde(default)]
    pub concurrent: bool,
    /// Whether inputs of a call may have any strides: where a host holds one with gaps, it is then not copied first.
    #[serde(default, skip_serializing_if = "is_false")]
    pub strided: bool,
    /// Whether packed weights are kept in the place that [`BindParams::kept`] names, and found there again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub keeps_packed: bool,
    /// Order of choice among forms of one structure and format, across plugins: higher first, then the plugin's id,
    /// then [`FormDecl::precision_rank`], then the name.
    /// A form is judged before it lives, so a boast costs its author a refusal, nothing more.
    #[serde(default)]
    pub priority: i32,
}

/// Format of a wire: E4M3 codes, one byte a value, under one static scale (`formats::fp8_scale` of
/// the statistic `PORT|amax|tensor`, which both ends are bound with).
pub const WIRE_FP8_E4M3: &str = "fp8_e4m3";

/// One end of a wire: a tensor that passes between two bound forms in a number format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire<'a> {
    /// Whether the form makes the tensor; else it reads it.
    pub emits: bool,
    /// The output or input it is.
    pub port: &'a str,
    /// [`WIRE_FP8_E4M3`].
    pub format: &'a str,
}

impl<'a> Wire<'a> {
    /// Reads `emits:OUTPUT:FORMAT` or `accepts:INPUT:FORMAT`; `None` for anything else.
    pub fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(':');
        let (end, port, format) = (parts.next()?, parts.next()?, parts.next()?);
        let emits = match end {
            "emits" => true,
            "accepts" => false,
            _ => return None,
        };
        let whole = !port.is_empty() && !format.is_empty() && parts.next().is_none();
        whole.then_some(Wire {
            emits,
            port,
            format,
        })
    }
}

/// Statistic needed at one point.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StatisticDecl {
    /// Point of the structure.
    pub point: String,
    /// `amax` or `second_moment`.
    pub statistic: String,
    /// `tensor` or `channel`.
    pub granularity: String,
}

/// How a form's weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// As given.
    None,
    /// Rounded to bfloat16.
    Bf16,
    /// FP8 E4M3, one scale a tensor, `max(amax/448, 1e-8)`.
    Fp8PerTensor,
    /// int8, one scale per output channel.
    Int8PerChannel,
    /// E2M1 with E4M3 block scales of 16.
    Nvfp4,
}

/// What a form serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Band {
    /// Rows `[lo, hi]`, inclusive; absent means any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<[u64; 2]>,
    /// Symbol -> `{min, max, multiple_of}`; every listed one must hold at bind.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dims: BTreeMap<String, DimBand>,
    /// Product of rows and the named symbols, `[lo, hi]`, inclusive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<WorkBand>,
    /// Alternatives, one of which must hold beside the rest: for a form whose rows depend on its
    /// sizes. Empty means none are asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub any: Vec<BandCase>,
}

/// One alternative of a band.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BandCase {
    /// Rows `[lo, hi]`, inclusive; absent means any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<[u64; 2]>,
    /// As in [`Band::dims`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dims: BTreeMap<String, DimBand>,
    /// As in [`Band::work`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<WorkBand>,
}

/// Limits of one dim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DimBand {
    /// Smallest size.
    #[serde(default = "one")]
    pub min: u64,
    /// Largest size.
    #[serde(default = "largest")]
    pub max: u64,
    /// Divisor.
    #[serde(default = "one")]
    pub multiple_of: u64,
}

/// Limits of `rows x symbols`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkBand {
    /// Symbols multiplied with the median rows.
    pub symbols: Vec<String>,
    /// Lower edge.
    pub min: f64,
    /// Upper edge.
    pub max: f64,
}

/// What `probe` answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// Whether the entries the form cannot do without are present here.
    pub probed: bool,
    /// Which optional entries were found.
    #[serde(default)]
    pub entries: Entries,
    /// Why not, when `probed` is false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Entries found and missed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entries {
    /// Found.
    #[serde(default)]
    pub present: Vec<String>,
    /// Looked for and not found: a slower path, never a refusal by itself.
    #[serde(default)]
    pub absent: Vec<String>,
}

/// What the table's `devices` answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Devices {
    /// What is there now, beside the CPU.
    pub devices: Vec<DeviceInfo>,
}

/// A device that a plugin offers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Number in `bind` and in views, counted from 1.
    pub index: u32,
    /// `gpu`, `simulated`, ...
    pub kind: String,
    /// For people.
    pub name: String,
    /// What it is, in the words of an architecture declaration: `sm_90a`, `x86_64+avx2`.
    pub arch: String,
    /// What the code for it was built for, where that is not the description's `archs`: kernels in
    /// files of their own, a simulator. Empty takes the description's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub built_for: Vec<String>,
    /// Bytes of its memory, 0 when nobody knows.
    #[serde(default)]
    pub memory_bytes: u64,
}

/// The JSON handed to `probe`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProbeShapes {
    /// Structure.
    pub structure: String,
    /// Span.
    pub span: String,
    /// Rows to be served.
    pub rows: Vec<u64>,
    /// Symbol -> size.
    pub dims: BTreeMap<String, u64>,
    /// Axis -> value.
    pub variant: BTreeMap<String, String>,
}

/// The JSON handed to `bind` as params.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BindParams {
    /// Structure.
    pub structure: String,
    /// Spec version.
    pub version: u32,
    /// Host and form axes.
    pub variant: BTreeMap<String, String>,
    /// Captured attributes (`eps`, ...).
    pub params: BTreeMap<String, serde_json::Value>,
    /// Symbol -> size.
    pub dims: BTreeMap<String, u64>,
    /// Names of the span's inputs, in call order. An optional one that this host lacks is listed
    /// and its view is absent.
    pub inputs: Vec<String>,
    /// Names of the span's outputs, in call order.
    pub outputs: Vec<String>,
    /// Names of the span's state regions, in call order.
    pub states: Vec<String>,
    /// Parameters of the scheme's route (`alpha`, `clamp`, ...); empty where it has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scheme: BTreeMap<String, serde_json::Value>,
    /// Slots that hold packed rows of the checkpoint. Their view is `u8`, `[N, bytes of a row]`,
    /// row-major, one row an output channel; the dims they stand for are here.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub packed: BTreeMap<String, PackedSlot>,
    /// Inputs and outputs of this seat that are wires -> format. Only what the form declares; empty
    /// for a form that is bound by itself.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub wires: BTreeMap<String, String>,
    /// Where packed weights outlive the process; only for a form that [keeps them](FormDecl::keeps_packed).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
}

/// Where a form's packed weights outlive the process: files of the plugin's own making in a directory
/// of the host's, read again by a later bind. Losing one, or all, costs a packing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The directory, there and private to the user.
    pub dir: String,
    /// What the names of files begin with. Equal keys are equal weights, parameters, statistics and bytes of
    /// the plugin's library; what else decides the layout (the CPU) is for the plugin to add.
    pub key: String,
    /// Whether matrices were left out: their views have the right sizes and hold zeros. A form that
    /// does not find its files then refuses `packed_missing`, and is asked again with everything.
    pub without_matrices: bool,
}

/// A slot that holds packed rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedSlot {
    /// How a row is stored.
    pub format: BlockFormat,
    /// Output channels.
    pub n: u64,
    /// Inputs of a channel.
    pub k: u64,
}

impl Description {
    /// A description without forms, of this ABI version.
    pub fn new(id: &str, vendor: &str, version: &str) -> Self {
        Description {
            schema: SCHEMA,
            id: id.into(),
            vendor: vendor.into(),
            version: version.into(),
            api: API_VERSION.into(),
            archs: Vec::new(),
            role: None,
            panic: None,
            requires: Vec::new(),
            entries: Vec::new(),
            forms: Vec::new(),
            operations: Vec::new(),
            recorded_operations: Vec::new(),
        }
    }

    /// The declaration of a form.
    pub fn form(&self, structure: &str, name: &str) -> Option<&FormDecl> {
        self.forms
            .iter()
            .find(|form| form.structure == structure && form.name == name)
    }

    /// What the declaration alone answers to a probe: `probed` for a declared form of
    /// `shapes.structure` that [admits](FormDecl::admits) the shapes, else the code that says why
    /// not.
    pub fn probe(&self, form: &str, shapes: &ProbeShapes) -> ProbeReport {
        let admitted = match self.form(&shapes.structure, form) {
            Some(decl) => decl.admits(shapes),
            None => {
                let text = format!("no form `{form}` of `{}` is declared", shapes.structure);
                Err(Failure::refused("form_unknown", text))
            }
        };
        let (code, reason) = admitted.err().map(|f| (f.code, f.message)).unzip();
        ProbeReport {
            probed: code.is_none(),
            code,
            reason,
            ..ProbeReport::default()
        }
    }
}

impl FormDecl {
    /// The ends of wires it declares.
    pub fn wire_ends(&self) -> impl Iterator<Item = Wire<'_>> {
        self.wires.iter().filter_map(|text| Wire::parse(text))
    }

    /// A declaration with everything that has a neutral value set to it: spec version 1, no spans,
    /// no dtypes, any band, unrounded weights, tolerance 1e-4.
    pub fn new(structure: &str, name: &str, format: &str) -> Self {
        FormDecl {
            structure: structure.into(),
            spec_versions: vec![1],
            name: name.into(),
            format: format.into(),
            spans: Vec::new(),
            variants: BTreeMap::new(),
            dtypes: Vec::new(),
            statistics: Vec::new(),
            band: Band::default(),
            weight_format: WeightFormat::None,
            packed: Vec::new(),
            scale_groups: Vec::new(),
            activation_format: none_text(),
            balances: false,
            tolerance: 1e-4,
            rounds: None,
            precision_rank: 0,
            quantises: false,
            wires: Vec::new(),
            archs: Vec::new(),
            capture: false,
            concurrent: false,
            strided: false,
            keeps_packed: false,
            priority: 0,
        }
    }

    /// Whether the declaration covers these shapes: span (`span_unknown`), variant
    /// (`format_no_variant`), dims (`envelope`) and, where rows are given, at least one of them in
    /// the band (`form_band`). An empty `span` and an axis without a value are not compared: an
    /// axis that no operation of the span mentions may have none.
    pub fn admits(&self, shapes: &ProbeShapes) -> Result<(), Failure> {
        if !shapes.span.is_empty() && !self.spans.contains(&shapes.span) {
            let text = format!(
                "span `{}`, the form implements {:?}",
                shapes.span, self.spans
            );
            return Err(Failure::refused("span_unknown", text));
        }
        for (axis, accepted) in &self.variants {
            let value = shapes.variant.get(axis);
            if let Some(value) = value.filter(|value| !accepted.contains(value)) {
                let text = format!("axis `{axis}` is {value}, the form accepts {accepted:?}");
                return Err(Failure::refused("format_no_variant", text));
            }
        }
        for (symbol, band) in &self.band.dims {
            let size = shapes.dims.get(symbol).copied();
            if !size.is_some_and(|size| band.contains(size)) {
                let text = format!(
                    "{symbol} is {size:?}, the form serves {}..={} in steps of {}",
                    band.min, band.max, band.multiple_of
                );
                return Err(Failure::refused("envelope", text));
            }
        }
        if let Err(text) = self.band.any_holds(&shapes.rows, &shapes.dims) {
            return Err(Failure::refused("form_band", text));
        }
        if let Some([low, high]) = self.band.rows {
            let inside = |rows: &u64| (low..=high).contains(rows);
            if !shapes.rows.is_empty() && !shapes.rows.iter().any(inside) {
                let text = format!("rows {:?}, the form serves {low}..={high}", shapes.rows);
                return Err(Failure::refused("form_band", text));
            }
        }
        Ok(())
    }
}

impl Band {
    /// Whether an alternative holds for these dims and, where rows are given, at least one of them;
    /// else what was asked for and what there is.
    pub fn any_holds(&self, rows: &[u64], dims: &BTreeMap<String, u64>) -> Result<(), String> {
        let served = |case: &BandCase| {
            let at = |rows: u64| {
                case.rows_at(dims)
                    .is_some_and(|[lo, hi]| (lo..=hi).contains(&rows))
            };
            match rows {
                [] => case.rows_at(dims).is_some(),
                _ => rows.iter().any(|rows| at(*rows)),
            }
        };
        if self.any.is_empty() || self.any.iter().any(served) {
            return Ok(());
        }
        let cases: Vec<String> = self.any.iter().map(ToString::to_string).collect();
        Err(format!(
            "rows {rows:?} at {dims:?}, the form serves {}",
            cases.join(" or ")
        ))
    }

    /// Rows served at these dims, `[lo, hi]`; `None` when none are, all of `u64` when any are. Of
    /// alternatives that do not touch, the lowest.
    pub fn rows_at(&self, dims: &BTreeMap<String, u64>) -> Option<[u64; 2]> {
        let whole = BandCase {
            rows: self.rows,
            dims: self.dims.clone(),
            work: self.work.clone(),
        };
        let whole = whole.rows_at(dims)?;
        if self.any.is_empty() {
            return Some(whole);
        }
        let mut cases: Vec<[u64; 2]> = self
            .any
            .iter()
            .filter_map(|case| case.rows_at(dims))
            .collect();
        cases.sort_unstable();
        let mut cases = cases.into_iter();
        let mut hull = cases.next()?;
        for [lo, hi] in cases {
            if lo <= hull[1].saturating_add(1) {
                hull[1] = hull[1].max(hi);
            }
        }
        let both = [whole[0].max(hull[0]), whole[1].min(hull[1])];
        (both[0] <= both[1]).then_some(both)
    }
}

impl BandCase {
    /// Rows this alternative serves at these dims.
    pub fn rows_at(&self, dims: &BTreeMap<String, u64>) -> Option<[u64; 2]> {
        let holds = |(symbol, band): (&String, &DimBand)| {
            dims.get(symbol).is_some_and(|size| band.contains(*size))
        };
        if !self.dims.iter().all(holds) {
            return None;
        }
        let [mut lo, mut hi] = self.rows.unwrap_or([0, u64::MAX]);
        if let Some(work) = &self.work {
            let one = work.size(1, dims)?;
            if one <= 0.0 {
                return None;
            }
            // The saturating casts keep an open edge open.
            lo = lo.max((work.min / one).ceil() as u64);
            hi = hi.min((work.max / one).floor() as u64);
        }
        (lo <= hi).then_some([lo, hi])
    }
}

impl std::fmt::Display for BandCase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = Vec::new();
        if let Some([lo, hi]) = self.rows {
            parts.push(format!("rows {lo}..={hi}"));
        }
        for (symbol, band) in &self.dims {
            parts.push(match (band.min, band.max) {
                (min, u64::MAX) => format!("{symbol} from {min}"),
                (1, max) => format!("{symbol} to {max}"),
                (min, max) => format!("{symbol} {min}..={max}"),
            });
        }
        parts.extend(self.work.as_ref().map(ToString::to_string));
        match parts.is_empty() {
            true => write!(f, "anything"),
            false => write!(f, "{}", parts.join(", ")),
        }
    }
}

impl WorkBand {
    /// Rows times the symbols' sizes; `None` for a symbol that has none.
    pub fn size(&self, rows: u64, dims: &BTreeMap<String, u64>) -> Option<f64> {
        let sizes = self
            .symbols
            .iter()
            .map(|s| dims.get(s).map(|size| *size as f64));
        let product: Option<f64> = sizes.product();
        Some(product? * rows as f64)
    }

    /// Whether that much work at these rows and dims is inside; else the sizes, the work and the
    /// edge that it misses. An edge is the form's: another form of the same structure has its own.
    pub fn admits(&self, rows: u64, dims: &BTreeMap<String, u64>) -> Result<(), String> {
        let sizes: Vec<String> = self
            .symbols
            .iter()
            .map(|s| {
                dims.get(s)
                    .map_or(format!("{s} unknown"), |n| format!("{s} {n}"))
            })
            .collect();
        let what = format!("{rows} rows x {}", sizes.join(" x "));
        let (edge, limit) = match self.size(rows, dims) {
            None => return Err(format!("{what} has no size")),
            Some(size) if size < self.min => ("lower", self.min),
            Some(size) if size > self.max => ("upper", self.max),
            Some(_) => return Ok(()),
        };
        let size = self.size(rows, dims).unwrap_or(0.0);
        Err(format!(
            "{what} is {size:.3e}, beyond this form's {edge} edge of {limit:.3e}; other forms have bands of their own"
        ))
    }
}

impl std::fmt::Display for WorkBand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let symbols = self.symbols.join(" x ");
        write!(f, "rows x {symbols} in {:.3e}..={:.3e}", self.min, self.max)
    }
}

impl DimBand {
    /// Whether `size` is within the limits and a multiple of the divisor.
    pub fn contains(&self, size: u64) -> bool {
        (self.min..=self.max).contains(&size) && size.is_multiple_of(self.multiple_of.max(1))
    }
}

fn none_text() -> String {
    "none".into()
}

fn is_false(value: &bool) -> bool {
    !value
}

fn one() -> u64 {
    1
}

fn largest() -> u64 {
    u64::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_round_trips_and_ignores_what_it_does_not_know() {
        let mut description = Description::new("example", "somebody", "1.2.3");
        description
            .forms
            .push(FormDecl::new("scale_rows", "plain", "none"));
        let mut json = serde_json::to_value(&description).expect("serialises");
        json["of_a_later_minor"] = serde_json::json!({"a": 1});
        let back: Description = serde_json::from_value(json).expect("parses");
        assert_eq!(back, description);
        assert!(back.form("scale_rows", "plain").is_some());
        assert!(back.form("scale_rows", "other").is_none());
    }

    #[test]
    fn b_140_an_end_of_a_wire_names_port_and_format() {
        let wire = Wire::parse("emits:y:fp8_e4m3").expect("whole");
        assert_eq!(
            (wire.emits, wire.port, wire.format),
            (true, "y", WIRE_FP8_E4M3)
        );
        assert!(!Wire::parse("accepts:x:fp8_e4m3").expect("whole").emits);
        for bad in [
            "nvfp4",
            "emits:y",
            "emits::fp8_e4m3",
            "emits:y:",
            "takes:y:fp8_e4m3",
            "emits:y:fp8_e4m3:",
        ] {
            assert_eq!(Wire::parse(bad), None, "{bad}");
        }
        let mut decl = FormDecl::new("scale_rows", "plain", "none");
        decl.wires = vec!["nvfp4".into(), "emits:y:fp8_e4m3".into()];
        assert_eq!(decl.wire_ends().count(), 1);
    }

    #[test]
    fn rows_are_compared_only_where_they_are_given() {
        let mut decl = FormDecl::new("scale_rows", "plain", "none");
        decl.band.rows = Some([1, 4]);
        let shapes = |rows: &[u64]| ProbeShapes {
            rows: rows.to_vec(),
            ..ProbeShapes::default()
        };
        assert!(decl.admits(&shapes(&[])).is_ok() && decl.admits(&shapes(&[64, 4])).is_ok());
        assert_eq!(
            decl.admits(&shapes(&[5, 64])).expect_err("outside").code,
            "form_band"
        );
    }

    fn dims(list: &[(&str, u64)]) -> BTreeMap<String, u64> {
        list.iter().map(|(s, n)| ((*s).to_string(), *n)).collect()
    }

    fn from(min: u64) -> DimBand {
        DimBand {
            min,
            max: u64::MAX,
            multiple_of: 1,
        }
    }

    fn to(max: u64) -> DimBand {
        DimBand {
            min: 1,
            max,
            multiple_of: 1,
        }
    }

    fn case(rows: [u64; 2], dims: &[(&str, DimBand)], work: Option<WorkBand>) -> BandCase {
        BandCase {
            rows: Some(rows),
            dims: dims
                .iter()
                .map(|(s, b)| ((*s).to_string(), b.clone()))
                .collect(),
            work,
        }
    }

    /// As a form with rows by sizes would declare it: few rows anywhere, more where there are enough
    /// output channels.
    #[test]
    fn b_463_rows_that_depend_on_sizes_are_declared_data() {
        let mut decl = FormDecl::new("scale_rows", "w8", "w8a16_static");
        decl.band.any = vec![
            case([1, 4], &[("K", to(1024))], None),
            case([1, 4], &[("K", to(4096)), ("N", from(1024))], None),
            case([1, 2], &[("N", from(1024))], None),
            case([3, 4], &[("N", from(2048))], None),
        ];
        decl.band.dims.insert(
            "K".into(),
            DimBand {
                min: 512,
                max: 16384,
                multiple_of: 32,
            },
        );
        decl.band.dims.insert(
            "N".into(),
            DimBand {
                min: 128,
                max: 262_144,
                multiple_of: 1,
            },
        );
        let shapes = |rows: u64, n: u64, k: u64| ProbeShapes {
            rows: vec![rows],
            dims: dims(&[("N", n), ("K", k)]),
            ..ProbeShapes::default()
        };
        for (rows, n, k) in [
            (1, 512, 1024),
            (4, 128, 1024),
            (1, 1024, 4096),
            (2, 1024, 8192),
            (3, 2048, 8192),
        ] {
            assert!(
                decl.admits(&shapes(rows, n, k)).is_ok(),
                "({rows}, {n}, {k})"
            );
        }
        for (rows, n, k) in [
            (1, 960, 4096),
            (3, 1024, 8192),
            (5, 2048, 1024),
            (0, 2048, 1024),
        ] {
            let refused = decl.admits(&shapes(rows, n, k)).expect_err("outside");
            assert_eq!(refused.code, "form_band", "({rows}, {n}, {k})");
        }
        // Sizes outside the envelope are named as such.
        for (n, k, symbol) in [(1024, 96, "K"), (64, 1024, "N"), (1024, 1040, "K")] {
            let refused = decl.admits(&shapes(1, n, k)).expect_err("outside");
            assert_eq!(refused.code, "envelope");
            assert!(refused.message.starts_with(symbol), "{}", refused.message);
        }
        // What a call may have, once the sizes are known.
        let at = |n: u64, k: u64| decl.band.rows_at(&dims(&[("N", n), ("K", k)]));
        assert_eq!(at(128, 1024), Some([1, 4]));
        assert_eq!(at(1024, 8192), Some([1, 2]));
        assert_eq!(
            at(2048, 8192),
            Some([1, 4]),
            "touching alternatives are one range"
        );
        assert_eq!(at(960, 4096), None);
    }

    #[test]
    fn b_464_a_floor_of_weight_elements_by_rows_is_declared_data() {
        let floor = |rows: u64, elements: u64| {
            // Three matrices of D x F, so a third of the elements each; work counts the rows too.
            let work = WorkBand {
                symbols: vec!["D".into(), "F".into()],
                min: (rows * elements) as f64 / 3.0,
                max: f64::INFINITY,
            };
            case([rows, rows], &[], Some(work))
        };
        const MI: u64 = 1 << 20;
        let mut decl = FormDecl::new("scale_rows", "w4", "w4a16_static");
        decl.band.any = vec![floor(1, 12 * MI), floor(2, 32 * MI), floor(3, 64 * MI)];
        let admits = |rows: u64, elements: u64| {
            decl.admits(&ProbeShapes {
                rows: vec![rows],
                dims: dims(&[("D", 1), ("F", elements)]),
                ..ProbeShapes::default()
            })
            .is_ok()
        };
        assert!(admits(1, 4 * MI) && !admits(1, 4 * MI - 1));
        assert!(admits(2, 32 * MI / 3 + 1) && !admits(2, 32 * MI / 3));
        assert!(admits(3, 64 * MI / 3 + 1) && !admits(3, 64 * MI / 3));
        assert!(!admits(4, 1 << 40));
    }

    #[test]
    fn b_460_work_outside_a_band_is_told_with_sizes_and_edge() {
        let work = WorkBand {
            symbols: vec!["N".into(), "K".into()],
            min: 2e7,
            max: 1e9,
        };
        let sizes = dims(&[("N", 1024), ("K", 512)]);
        assert!(work.admits(64, &sizes).is_ok());
        let below = work.admits(1, &sizes).expect_err("too little");
        for fact in [
            "1 rows",
            "N 1024",
            "K 512",
            "lower edge",
            "2.000e7",
            "other forms",
        ] {
            assert!(below.contains(fact), "{below}");
        }
        let above = work.admits(1 << 20, &sizes).expect_err("too much");
        assert!(above.contains("upper edge"), "{above}");
        assert!(work
            .admits(1, &dims(&[("N", 4)]))
            .expect_err("no K")
            .contains("K unknown"));
        // On the edges themselves it is inside.
        let edge = WorkBand {
            symbols: vec!["N".into()],
            min: 10.0,
            max: 20.0,
        };
        assert!(
            edge.admits(1, &dims(&[("N", 10)])).is_ok()
                && edge.admits(2, &dims(&[("N", 10)])).is_ok()
        );
    }

    /// Three forms of one format, as their author declares them: which one serves follows from parts
    /// and size, and an upper edge hands over to the next form.
    #[test]
    fn b_461_a_form_is_chosen_by_parts_and_size() {
        let form = |name: &str, axes: &[(&str, &[&str])], work: Option<(f64, f64)>, priority| {
            let mut decl = FormDecl::new("scale_rows", name, "fp8_static");
            for (axis, values) in axes {
                let values = values.iter().map(|v| (*v).to_string()).collect();
                decl.variants.insert((*axis).into(), values);
            }
            decl.band.work = work.map(|(min, max)| WorkBand {
                symbols: vec!["N".into(), "K".into()],
                min,
                max,
            });
            decl.priority = priority;
            decl
        };
        let mut forms = [
            form(
                "bias",
                &[("in_dtype", &["bf16"])],
                Some((2e8, f64::INFINITY)),
                1,
            ),
            form("fp8_in", &[("in_dtype", &["fp8_static"])], None, 3),
            form(
                "no_bias",
                &[("in_dtype", &["bf16"]), ("bias", &["none"])],
                Some((2e7, 1e9)),
                2,
            ),
        ];
        forms.sort_by_key(|f| std::cmp::Reverse(f.priority));
        let chosen = |rows: u64, bias: &str, in_dtype: &str| {
            let shapes = ProbeShapes {
                rows: vec![rows],
                dims: dims(&[("N", 1024), ("K", 1024)]),
                variant: [("bias", bias), ("in_dtype", in_dtype)]
                    .map(|(a, v)| (a.to_string(), v.to_string()))
                    .into(),
                ..ProbeShapes::default()
            };
            let serves = |f: &&FormDecl| {
                let work = f.band.work.as_ref();
                f.admits(&shapes).is_ok()
                    && work.is_none_or(|w| w.admits(rows, &shapes.dims).is_ok())
            };
            forms.iter().find(serves).map(|f| f.name.as_str())
        };
        assert_eq!(
            chosen(1, "none", "fp8_static"),
            Some("fp8_in"),
            "at any size"
        );
        assert_eq!(chosen(64, "none", "bf16"), Some("no_bias"));
        assert_eq!(chosen(953, "none", "bf16"), Some("no_bias"));
        assert_eq!(
            chosen(954, "none", "bf16"),
            Some("bias"),
            "beyond 1e9 of work"
        );
        assert_eq!(chosen(400, "add", "bf16"), Some("bias"));
        assert_eq!(chosen(64, "add", "bf16"), None, "below its floor");
        assert_eq!(chosen(16, "none", "bf16"), None);
    }
}
