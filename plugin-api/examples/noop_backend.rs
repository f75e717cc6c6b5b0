//! A backend whose one form does nothing: what the benchmark of the boundary calls.

use structures_plugin_api::abi::CallCtx;
use structures_plugin_api::describe::{Description, FormDecl};
use structures_plugin_api::export_backend;
use structures_plugin_api::sdk::{
    Backend, BindRequest, BoundForm, Failure, Host, Tensor, TensorMut,
};

/// Does nothing.
pub struct Noop;

impl Backend for Noop {
    fn description() -> Description {
        let mut form = FormDecl::new("linear_proj", "noop", "none");
        form.spans = vec!["proj".into()];
        form.dtypes = vec!["f32".into()];
        let mut description = Description::new("noop", "Example Kernels", "0.1.0");
        description.forms = vec![form];
        description
    }

    fn open(_: Host) -> Result<Self, Failure> {
        Ok(Noop)
    }

    fn bind(&self, _: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
        Ok(Box::new(Noop))
    }
}

impl BoundForm for Noop {
    fn call(
        &mut self,
        _: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        std::hint::black_box((inputs.len(), outputs.len()));
        Ok(())
    }
}

export_backend!(Noop);
