//! A root module of another major version.

#![allow(missing_docs)] // only the layout is of interest

mod common;

use abi_stable::library::{CheckTypeLayout, LibHeader, RootModule, RootModuleResult};
use abi_stable::prefix_type::PrefixTypeTrait;
use abi_stable::sabi_types::VersionStrings;
use abi_stable::std_types::{RBoxError, RStr};
use abi_stable::StableAbi;
use structures_plugin_api::abi::API_VERSION;

use common::{exchange, ID, VERSION};

/// As the host's, but for what this fixture is about.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginRootRef)))]
#[sabi(missing_field(panic))]
pub struct PluginRoot {
    pub id: RStr<'static>,
    pub version: RStr<'static>,
    pub api: RStr<'static>,
    #[sabi(last_prefix_field)]
    pub exchange: unsafe extern "C" fn(host: *const std::ffi::c_void) -> *const std::ffi::c_void,
}

impl RootModule for PluginRootRef {
    const BASE_NAME: &'static str = "structures_plugin";
    const NAME: &'static str = "structures plugin";
    const VERSION_STRINGS: VersionStrings = VersionStrings::new("2.0.0");

    abi_stable::declare_root_module_statics! {PluginRootRef}
}

fn root() -> Result<PluginRootRef, RBoxError> {
    let root = PluginRoot {
        id: RStr::from_str(ID),
        version: RStr::from_str(VERSION),
        api: RStr::from_str(API_VERSION),
        exchange,
    };
    Ok(root.leak_into_prefix())
}

extern "C" fn construct() -> RootModuleResult {
    abi_stable::library::__call_root_module_loader(root)
}

#[export_name = "_1as_0lib_1header_0root_bmodule_bloader"]
pub static ROOT: LibHeader =
    // SAFETY: `construct` answers this crate's `PluginRootRef`, by abi_stable's own helper.
    unsafe { LibHeader::from_constructor::<PluginRootRef>(construct, CheckTypeLayout::Yes) };
