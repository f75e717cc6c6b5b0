//! The right root module, exported without its layout constant.

#![allow(missing_docs)] // only the layout is of interest

mod common;

use abi_stable::library::{CheckTypeLayout, LibHeader, RootModuleResult};
use abi_stable::prefix_type::PrefixTypeTrait;
use abi_stable::std_types::{RBoxError, RStr};
use structures_plugin_api::abi::API_VERSION;
use structures_plugin_door::{PluginRoot, PluginRootRef};

use common::{exchange, ID, VERSION};

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
    unsafe { LibHeader::from_constructor::<PluginRootRef>(construct, CheckTypeLayout::No) };
