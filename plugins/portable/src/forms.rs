//! The structures this backend executes, one file each. The list drives everything: a structure in
//! every [`Format`] is a form.

mod decoder_ffn;
mod linear_proj;
mod qkv_pack;

use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure};

use crate::format::Format;
use crate::Shared;

/// Binds a structure in a format.
type Bind = fn(&Shared, Format, &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure>;

/// What a structure's file says about it.
pub struct Leaf {
    /// Name in the catalog.
    pub structure: &'static str,
    /// Spans, widest first.
    pub spans: &'static [&'static str],
    /// Points whose activations a quantising format rounds.
    pub points: &'static [&'static str],
    /// Slots that are packed as one and so share a per-tensor scale.
    pub scale_groups: &'static [&'static [&'static str]],
    /// Axes of which not every value is accepted.
    pub variants: &'static [(&'static str, &'static [&'static str])],
    /// Binds it in a format.
    pub bind: Bind,
}

const LEAVES: [&Leaf; 3] = [&decoder_ffn::LEAF, &linear_proj::LEAF, &qkv_pack::LEAF];

/// Declarations of all forms.
pub fn declarations() -> Vec<FormDecl> {
    let every = LEAVES
        .iter()
        .flat_map(|leaf| Format::ALL.map(|format| (leaf, format)));
    every.map(|(leaf, format)| format.declare(leaf)).collect()
}

/// Binds the form that a request names.
pub fn bind(shared: &Shared, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
    let leaf = LEAVES
        .iter()
        .find(|leaf| leaf.structure == request.params.structure);
    let format = Format::ALL
        .into_iter()
        .find(|format| format.name() == request.form);
    let (Some(leaf), Some(format)) = (leaf, format) else {
        let text = format!(
            "no form `{}` of `{}`",
            request.form, request.params.structure
        );
        return Err(Failure::refused("form_unknown", text));
    };
    request.admitted_by(&format.declare(leaf))?;
    (leaf.bind)(shared, format, request)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use structures_plugin_api::abi::Contract;
    use structures_plugin_api::describe::BindParams;
    use structures_plugin_api::sdk::Host;
    use structures_plugin_api::DType;

    #[test]
    fn what_is_not_declared_is_refused_before_anything_is_packed() {
        let shared = Shared {
            host: Host::detached(),
            pool: std::sync::Arc::<Pool>::default(),
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
