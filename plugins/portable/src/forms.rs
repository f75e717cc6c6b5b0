//! The structures this backend executes, one file each. The list drives everything: a structure in
//! each of the [`Format`]s that its file offers is a form.

mod adaln_producer;
mod attention_core;
mod cadence_static;
mod decoder_block;
mod decoder_ffn;
mod gated_delta_core;
mod linear_proj;
mod modnorm_qkv_chain;
mod norm_fused;
mod patch_projection;
mod qk_norm_rope;
mod qkv_pack;
mod qkv_rope;
mod vision_ffn;

use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::sdk::{forms, BindRequest, BoundForm, Failure};

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
    /// Sizes that are whole blocks where the format of both operands has blocks.
    pub blocked: &'static [&'static str],
    /// Whether its unquantised form takes packed rows of a checkpoint as they are.
    pub packed: bool,
    /// Points whose activations a quantising format rounds.
    pub points: &'static [&'static str],
    /// Points whose content is bound, whatever the format.
    pub content: &'static [&'static str],
    /// Axis values under which those points are; all of them when empty.
    pub points_under: &'static [(&'static str, &'static str)],
    /// Slots that are packed as one and so share a per-tensor scale.
    pub scale_groups: &'static [&'static [&'static str]],
    /// Outputs that the unquantised form can send over a wire.
    pub emits: &'static [&'static str],
    /// Inputs that the form with E4M3 activations can take from a wire.
    pub accepts: &'static [&'static str],
    /// Axes of which not every value is accepted.
    pub variants: &'static [(&'static str, &'static [&'static str])],
    /// Binds it in a format.
    pub bind: Bind,
}

impl Leaf {
    /// One version, executed as given, nothing calibrated, every variant: what most files differ
    /// from in a field or two.
    pub const fn plain(
        structure: &'static str,
        spans: &'static [&'static str],
        bind: Bind,
    ) -> Leaf {
        Leaf {
            structure,
            versions: &[1],
            spans,
            formats: &[Format::F32],
            blocked: &[],
            packed: false,
            points: &[],
            points_under: &[],
            content: &[],
            scale_groups: &[],
            emits: &[],
            accepts: &[],
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
    &cadence_static::LEAF,
    &decoder_block::LEAF,
    &decoder_ffn::LEAF,
    &gated_delta_core::LEAF,
    &linear_proj::LEAF,
    &modnorm_qkv_chain::LEAF,
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

#[cfg(test)]
mod tests {
    use super::*;
    use structures_plugin_api::abi::Contract;
    use structures_plugin_api::describe::BindParams;
    use structures_plugin_api::sdk::Host;
    use structures_plugin_api::DType;

    #[test]
    fn what_is_not_declared_is_refused_before_anything_is_packed() {
        let shared = Shared {
            host: Host::detached(),
            pool: std::sync::Arc::default(),
        };
        let contract = Contract::capacity(DType::F32, 1);
        let code = |form: &str, span: &str, structure: &str, version: u32| {
            let params = BindParams {
                structure: structure.into(),
                version,
                ..BindParams::default()
            };
            let request = BindRequest::new(form, span, params, &contract);
            bind(&shared, &request).err().expect("refused").code
        };
        let structure = LEAVES[0].structure;
        let span = LEAVES[0].spans[0];
        assert_eq!(code("nvfp4", span, structure, 1), "form_unknown");
        assert_eq!(code("f32", span, "unheard_of", 1), "form_unknown");
        assert_eq!(code("f32", "elsewhere", structure, 1), "span_unknown");
        assert_eq!(code("f32", span, structure, 2), "structure_version");
        assert_eq!(code("f32", span, structure, 1), "weight_missing");
    }
}
