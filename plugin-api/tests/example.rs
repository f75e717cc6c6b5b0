//! Binds and calls the example without a host, as a plugin's own unit tests do.

use structures_plugin_api::abi::{CallCtx, Contract, DType};
use structures_plugin_api::describe::BindParams;
use structures_plugin_api::{Backend, BindRequest, Host, Tensor, TensorMut};

#[path = "../examples/example_backend.rs"]
mod example_backend;

use example_backend::Example;

#[test]
fn x_times_w_plus_b() {
    let contract = Contract::capacity(DType::F32, 4);
    let params = BindParams {
        structure: "linear_proj".into(),
        version: 1,
        variant: [("epilogue".to_string(), "none".to_string())].into(),
        dims: [("K".to_string(), 2), ("N".to_string(), 3)].into(),
        ..BindParams::default()
    };
    let (w, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.5, 0.0, -0.5]);
    let request = BindRequest::new("plain", "proj", params, &contract)
        .with_weight("w", Tensor::from_f32(&w, &[2, 3]).expect("fits"))
        .with_weight("b", Tensor::from_f32(&b, &[3]).expect("fits"));
    let backend = Example::open(Host::detached()).expect("opens");
    let mut form = backend.bind(&request).expect("binds");

    let x = [1.0, 10.0, -1.0, 0.0];
    let mut y = [0.0; 6];
    let x = Tensor::from_f32(&x, &[2, 2]).expect("fits");
    let out = TensorMut::from_f32(&mut y, &[2, 3]).expect("fits");
    form.call(&CallCtx::NONE, &[x, Tensor::ABSENT], &mut [out], &mut [])
        .expect("runs");
    assert_eq!(y, [41.5, 52.0, 62.5, -0.5, -2.0, -3.5]);
}
