//! The structures this backend executes, one file each. The list drives everything: a structure in each of the formats
//! that its file offers is a form.

mod adaln_producer;
mod attention_core;
mod decoder_ffn;
mod gated_delta_core;
mod linear_proj;
mod norm_fused;
mod patch_projection;
mod projection;
mod qk_norm_rope;
mod qkv_pack;
mod qkv_rope;
mod vision_ffn;

use structures_plugin_api::abi::FormFacts;
use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::sdk::{forms, BindRequest, BoundForm, Failure, Host};

use crate::format::Format;
use crate::Shared;

/// Binds a structure in a format.
type Bind = fn(&Shared, Format, &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure>;

/// What a structure's file says about it.
pub struct Leaf {
    /// Name in the catalog.
    pub structure: &'static str,
    /// Accepted versions of it.
    pub versions: &'static [u32],
    /// Spans, widest first.
    pub spans: &'static [&'static str],
    /// Formats it is executed in, unquantised first.
    pub formats: &'static [Format],
    /// Points whose activations a quantising format rounds.
    pub points: &'static [&'static str],
    /// Slots that are packed as one and so share a per-tensor scale.
    pub scale_groups: &'static [&'static [&'static str]],
    /// Whether its unquantised form takes packed rows of a checkpoint.
    pub packed: bool,
    /// Whether inputs of any strides are read as they lie.
    pub strided: bool,
    /// Axes of which not every value is accepted.
    pub variants: &'static [(&'static str, &'static [&'static str])],
    /// Binds it in a format.
    pub bind: Bind,
}

impl Leaf {
    /// One version, executed as given, nothing calibrated, every variant: what files differ from in a field or two.
    pub const fn plain(
        structure: &'static str,
        spans: &'static [&'static str],
        bind: Bind,
    ) -> Self {
        Leaf {
            structure,
            versions: &[1],
            spans,
            formats: &[Format::F32],
            points: &[],
            scale_groups: &[],
            packed: false,
            strided: false,
            variants: &[],
            bind,
        }
    }
}

impl forms::Leaf for Leaf {
    type Format = Format;

    fn structure(&self) -> &str {
        self.structure
    }

    fn formats(&self) -> &[Format] {
        self.formats
    }

    fn declare(&self, format: Format) -> FormDecl {
        format.declare(self)
    }
}

const LEAVES: &[&Leaf] = &[
    &adaln_producer::LEAF,
    &attention_core::LEAF,
    &decoder_ffn::LEAF,
    &gated_delta_core::LEAF,
    &linear_proj::LEAF,
    &norm_fused::LEAF,
    &patch_projection::LEAF,
    &qk_norm_rope::LEAF,
    &qkv_pack::LEAF,
    &qkv_rope::LEAF,
    &vision_ffn::LEAF,
];

/// Declarations of all forms.
pub fn declarations() -> Vec<FormDecl> {
    forms::declarations(LEAVES)
}

/// Binds the form that a request names.
pub fn bind(shared: &Shared, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
    let (leaf, format) = forms::admitted(LEAVES, request)?;
    (leaf.bind)(shared, format, request)
}

/// What a form added: bytes of packed weights, bytes of call buffers.
fn facts(packed_bytes: u64, scratch_bytes: u64) -> FormFacts {
    FormFacts {
        packed_bytes,
        scratch_bytes,
        workspace_bytes: 0,
    }
}

/// A text parameter of the variant, where the span has the axis.
fn axis<'a>(request: &'a BindRequest<'_>, name: &str) -> Option<&'a str> {
    request.params.variant.get(name).map(String::as_str)
}

/// Values that are worth waking a thread for: about 4 microseconds of an elementwise pass.
const GRAIN: usize = 1 << 14;

/// Runs `one` for each row of `width` values, on several threads where there is enough to do.
fn each_row(host: &Host, data: &mut [f32], width: usize, one: impl Fn(usize, &mut [f32]) + Sync) {
    if data.len() < GRAIN {
        let rows = data.chunks_exact_mut(width.max(1)).enumerate();
        rows.for_each(|(row, to)| one(row, to));
        return;
    }
    // Whole rows, as many as make a grain.
    let rows = GRAIN.div_ceil(width).max(1);
    host.parallel_chunks(data, rows * width, |piece, data| {
        for (row, to) in data.chunks_exact_mut(width).enumerate() {
            one(piece * rows + row, to);
        }
    });
}
