//! A backend without forms: only its door is looked at.

use std::ffi::c_void;

use structures_plugin_api::describe::Description;
use structures_plugin_api::door::plugin_vtable;
use structures_plugin_api::sdk::{Backend, BindRequest, BoundForm, Failure, Host};

pub struct Empty;

pub const ID: &str = "door_fixture";
pub const VERSION: &str = "0.1.0";

impl Backend for Empty {
    fn description() -> Description {
        Description::new(ID, "Fixtures", VERSION)
    }

    fn open(_: Host) -> Result<Self, Failure> {
        Ok(Empty)
    }

    fn bind(&self, _: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
        Err(Failure::refused("form_unknown", "there is none"))
    }
}

pub unsafe extern "C" fn exchange(_: *const c_void) -> *const c_void {
    std::ptr::from_ref(plugin_vtable::<Empty>()).cast()
}
