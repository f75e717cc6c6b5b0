//! The root module of a Rust plugin: the whole abi_stable surface, frozen as 1.0.
//!
//! It is a crate of its own because abi_stable compares more than fields: the name and the version
//! of the package that defines a type are part of its layout. Here both stay what they are while
//! `structures-plugin-api` goes on, and a plugin built years ago still has the layout a host looks
//! for. For the same reason nothing is ever added: layout checking is one-directional, so a host
//! whose root module gained a field would refuse every older plugin. What may grow lives in the
//! tables that `exchange` exchanges.
//!
//! Its tests are the version matrix: plugins of other versions and layouts, each with its outcome.

use std::ffi::c_void;

use abi_stable::library::RootModule;
use abi_stable::sabi_types::VersionStrings;
use abi_stable::std_types::RStr;
use abi_stable::StableAbi;

/// Version of the root module's layout. Never changes.
pub const DOOR_VERSION: &str = "1.0.0";

/// The root module. Frozen.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginRootRef)))]
#[sabi(missing_field(panic))]
pub struct PluginRoot {
    /// The backend's id, as in its description.
    pub id: RStr<'static>,
    /// The plugin's own version, as in its description.
    pub version: RStr<'static>,
    /// ABI version it was built against.
    pub api: RStr<'static>,
    /// Gives the host's table (`const HostVTable *`, null while only describing), answers the
    /// plugin's (`const PluginVTable *`, valid for ever) or null when the two do not fit. Calls
    /// nothing through either.
    #[sabi(last_prefix_field)]
    pub exchange: unsafe extern "C" fn(host: *const c_void) -> *const c_void,
}

impl RootModule for PluginRootRef {
    const BASE_NAME: &'static str = "structures_plugin";
    const NAME: &'static str = "structures plugin";
    const VERSION_STRINGS: VersionStrings = VersionStrings::new(DOOR_VERSION);

    abi_stable::declare_root_module_statics! {PluginRootRef}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_package_is_part_of_the_layout_and_stays() {
        assert_eq!(env!("CARGO_PKG_NAME"), "structures-plugin-door");
        assert_eq!(env!("CARGO_PKG_VERSION"), DOOR_VERSION);
    }
}
