//! Sizes and offsets of every struct of the ABI, from the Rust compiler.

use std::mem::{offset_of, size_of};

use structures_plugin_api::abi::*;

/// One struct.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Its Rust name.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// Fields with their offsets, in order.
    pub fields: &'static [(&'static str, usize)],
    /// Bytes it had in API 1.0, for tables that start with their size.
    pub size_1_0: Option<usize>,
}

macro_rules! layouts {
    ($($name:ident $(since $size:expr)? => $($field:ident),+;)+) => {
        /// Every struct of the ABI; a test compares the fields with the definitions.
        pub const LAYOUTS: &[Layout] = &[$(Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            fields: &[$((stringify!($field), offset_of!($name, $field))),+],
            size_1_0: layouts!(@ $($size)?),
        }),+];
    };
    (@) => { None };
    (@ $size:expr) => { Some($size) };
}

layouts! {
    TensorView => data, dtype, rank, dims, strides, device, flags;
    Str => ptr, len;
    Bytes => ptr, len, capacity, release;
    Error => code, message;
    Contract => struct_size, dtype, row_capacity, rows_exact, device, flags;
    BindArgs => struct_size, device, form, span, weight_names, weights, n_weights, statistic_names,
        statistics, n_statistics, params, contract;
    CallCtx => struct_size, flags, queue, workspace;
    FormFacts => packed_bytes, scratch_bytes, workspace_bytes;
    FormVTable since FormVTable::SIZE_1_0 => struct_size, api_minor, call, facts, release;
    DeviceVTable since DeviceVTable::SIZE_1_0 => struct_size, api_minor, open, alloc, free, copy_in,
        copy_out, queue_new, synchronize, elapsed, capture_begin, capture_end, queue_free, close,
        graph_launch, graph_free;
    PluginVTable since PluginVTable::SIZE_1_0 => struct_size, api_minor, describe, open, close,
        probe, bind, form, device, devices;
    HostVTable since HostVTable::SIZE_1_0 => struct_size, api_minor, ctx, log, num_threads,
        parallel_for, scratch_lease, scratch_release;
}
