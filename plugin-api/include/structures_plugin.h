/*
 * structures_plugin.h: the ABI between the structures host and its backends.
 *
 * GENERATED from plugin-api/src/abi.rs by `cargo xtask header`. Do not edit.
 *
 * A backend in C is one shared library that exports one symbol, `structures_plugin_v1`, and answers
 * it with a table of functions that lives for ever. docs/abi.md says who calls what, when, on which
 * thread, and who owns what; plugins/c-sample is a whole backend.
 *
 * In short:
 * - Text is UTF-8 with a length, never NUL-terminated. Views, texts and arrays are borrowed for the
 *   length of the call.
 * - Whoever makes a `structures_bytes` frees it: the receiver calls its `release`.
 * - A function that answers another status than STRUCTURES_STATUS_OK fills `error`, which the caller
 *   passes zeroed; it writes nothing else.
 * - Nothing unwinds and nothing jumps across the boundary: no C++ exception, no longjmp.
 * - New entries of a table are appended and optional. Set `struct_size` to sizeof the table you
 *   compiled; read no entry of the host's table that its `struct_size` does not cover.
 *
 * C11 and C++11 or later, 64-bit.
 */
#ifndef STRUCTURES_PLUGIN_H
#define STRUCTURES_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

/* The ABI version as text, for the `api` of a description. */
#define STRUCTURES_API_VERSION "1.2.0"
/* The only exported symbol of a backend. */
#define STRUCTURES_PLUGIN_SYMBOL "structures_plugin_v1"

#if defined(__cplusplus)
#define STRUCTURES_ASSERT(condition, text) static_assert(condition, text)
#define STRUCTURES_EXPORT extern "C" __attribute__((visibility("default")))
extern "C" {
#else
#define STRUCTURES_ASSERT(condition, text) _Static_assert(condition, text)
#define STRUCTURES_EXPORT __attribute__((visibility("default")))
#endif

// ABI major version: a host serves exactly its own.
#define STRUCTURES_API_MAJOR 1

// ABI minor version: entries appended since 1.0.
#define STRUCTURES_API_MINOR 2

// Largest rank of a view.
#define STRUCTURES_MAX_RANK 8

// Element types, by fixed numeric id.
enum structures_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // IEEE-754 binary32.
    STRUCTURES_DTYPE_F32 = 1,
    // IEEE-754 binary16.
    STRUCTURES_DTYPE_F16 = 2,
    // bfloat16.
    STRUCTURES_DTYPE_BF16 = 3,
    // FP8 E4M3 (finite, max 448).
    STRUCTURES_DTYPE_E4M3 = 4,
    // FP8 E5M2.
    STRUCTURES_DTYPE_E5M2 = 5,
    // Signed 8-bit integer.
    STRUCTURES_DTYPE_I8 = 6,
    // Unsigned 8-bit integer.
    STRUCTURES_DTYPE_U8 = 7,
    // Signed 32-bit integer.
    STRUCTURES_DTYPE_I32 = 8,
    // Signed 64-bit integer.
    STRUCTURES_DTYPE_I64 = 9,
    // FP4 E2M1, two per byte along the last dim, low nibble first.
    STRUCTURES_DTYPE_E2M1X2 = 10,
    // One byte, 0 or 1.
    STRUCTURES_DTYPE_BOOL = 11,
    // IEEE-754 binary64.
    STRUCTURES_DTYPE_F64 = 12,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum structures_dtype structures_dtype;
#else
typedef uint32_t structures_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Log levels of `structures_host_vtable.log`.
enum structures_log_level
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Lost work.
    STRUCTURES_LOG_LEVEL_ERROR = 1,
    // Worth a look.
    STRUCTURES_LOG_LEVEL_WARN = 2,
    // Milestones.
    STRUCTURES_LOG_LEVEL_INFO = 3,
    // For authors.
    STRUCTURES_LOG_LEVEL_DEBUG = 4,
    // Everything.
    STRUCTURES_LOG_LEVEL_TRACE = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum structures_log_level structures_log_level;
#else
typedef uint32_t structures_log_level;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// `0` is success, everything else came with an `structures_error`.
typedef int32_t structures_status;

// A borrowed strided tensor (DLPack semantics), 152 bytes. `dtype == 0` is an absent optional.
typedef struct structures_tensor_view {
    // First element. Host memory when `device == 0`, else a handle the device understands.
    void *data;
    // `structures_dtype` id, or 0 for "absent".
    uint32_t dtype;
    // Number of dims in use.
    uint32_t rank;
    // Sizes, outermost first.
    int64_t dims[STRUCTURES_MAX_RANK];
    // Strides in elements; 0 broadcasts.
    int64_t strides[STRUCTURES_MAX_RANK];
    // 0 is host memory; other numbers are devices the plugin declared, counted from 1.
    uint32_t device;
    // Reserved, 0.
    uint32_t flags;
} structures_tensor_view;

// Borrowed UTF-8, not NUL-terminated.
typedef struct structures_str {
    // First byte; may be null when `len == 0`.
    const uint8_t *ptr;
    // Length in bytes.
    size_t len;
} structures_str;

// Owned bytes, released by the receiver through `release`.
typedef struct structures_bytes {
    // First byte.
    uint8_t *ptr;
    // Length in bytes.
    size_t len;
    // Allocated size; private to the maker.
    size_t capacity;
    // Frees the bytes; null when there is nothing to free.
    void (*release)(struct structures_bytes*);
} structures_bytes;

// What came with a status other than 0. The caller passes zeroes; the callee fills it;
// the receiver releases both members.
typedef struct structures_error {
    // Stable refusal or failure code (`envelope`, `dims_inconsistent`, ...).
    struct structures_bytes code;
    // For people: what was wrong, expected and found.
    struct structures_bytes message;
} structures_error;

// What a bound form may rely on for every call.
typedef struct structures_contract {
    // `sizeof(structures_contract)` of the maker.
    uint32_t struct_size;
    // `structures_dtype` id of the boundary: inputs and outputs.
    uint32_t dtype;
    // Largest number of rows (product of leading dims) of a call; 0 when `rows_exact` says it.
    uint64_t row_capacity;
    // Exact number of rows of every call; 0 when a capacity holds.
    uint64_t rows_exact;
    // Device of inputs and outputs.
    uint32_t device;
    // Reserved, 0.
    uint32_t flags;
} structures_contract;

// Everything `bind` gets. Arrays are parallel; names are the spec's own.
typedef struct structures_bind_args {
    // `sizeof(structures_bind_args)` of the host.
    uint32_t struct_size;
    // Device to bind on; 0 is the CPU.
    uint32_t device;
    // Name of the form, from `describe`.
    struct structures_str form;
    // Name of the span of the structure's dataflow.
    struct structures_str span;
    // Slot names, spec order, repeated slots expanded (`w_0`, `w_1`, ...).
    const struct structures_str *weight_names;
    // One view a slot, slot dims, any strides; absent optional slots have dtype 0. Valid during
    // `bind` only.
    const struct structures_tensor_view *weights;
    // Number of slots.
    size_t n_weights;
    // Statistic names, `point|statistic|granularity` (`x|amax|tensor`).
    const struct structures_str *statistic_names;
    // One f32 view a statistic: rank 0 or `[channels]`. Valid during `bind` only.
    const struct structures_tensor_view *statistics;
    // Number of statistics.
    size_t n_statistics;
    // JSON object `{structure, version, variant: {axis: value}, params: {name: value}, dims:`
    // {symbol: size}, inputs: [names], outputs: [names], states: [names]}`.`
    struct structures_str params;
    // Never null.
    const struct structures_contract *contract;
} structures_bind_args;

// Per-call context.
typedef struct structures_call_ctx {
    // `sizeof(structures_call_ctx)` of the host.
    uint32_t struct_size;
    // Reserved, 0.
    uint32_t flags;
    // Queue of the device, null on the CPU.
    void *queue;
    // Scratch of the size the form asked for, or null.
    void *workspace;
} structures_call_ctx;

// Facts about a bound form, asked once after `bind`.
typedef struct structures_form_facts {
    // Bytes of packed weights this instance added.
    uint64_t packed_bytes;
    // Bytes of scratch it added to what its plugin keeps or leases. Buffers that forms share count
    // once, in the form whose `bind` made them.
    uint64_t scratch_bytes;
    // Bytes of workspace it wants in `structures_call_ctx.workspace`.
    uint64_t workspace_bytes;
} structures_form_facts;

// Per-instance entries. Calls on one instance never overlap unless the form declared `concurrent`.
typedef struct structures_form_vtable {
    // Size of this table in bytes.
    uint32_t struct_size;
    // ABI minor of the plugin.
    uint32_t api_minor;
    // Fills the outputs. Order of inputs, outputs and states is the bound span's.
    structures_status (*call)(void *form,
                              const struct structures_call_ctx *ctx,
                              const struct structures_tensor_view *inputs,
                              size_t n_inputs,
                              const struct structures_tensor_view *outputs,
                              size_t n_outputs,
                              const struct structures_tensor_view *states,
                              size_t n_states,
                              struct structures_error *error);
    // Reports `structures_form_facts`.
    void (*facts)(void *form, struct structures_form_facts *out);
    // Drops the instance. Called exactly once, also on a poisoned one.
    void (*release)(void *form);
} structures_form_vtable;


// Device entries, for backends with memory of their own. Device addresses are numbers the host
// never dereferences; it only adds offsets to them. A device that is gone answers
// `STRUCTURES_STATUS_FAILED` with the code `device_lost` from then on.
typedef struct structures_device_vtable {
    // Size of this table in bytes.
    uint32_t struct_size;
    // ABI minor of the plugin.
    uint32_t api_minor;
    // Opens device `index` (counted from 1).
    structures_status (*open)(void *plugin,
                              uint32_t index,
                              void **device,
                              struct structures_error *error);
    // Allocates bytes of device memory.
    structures_status (*alloc)(void *device,
                               uint64_t bytes,
                               uint64_t align,
                               void **memory,
                               struct structures_error *error);
    // Frees what `alloc` returned.
    void (*free)(void *device, void *memory);
    // Copies host bytes in, ordered on the queue.
    structures_status (*copy_in)(void *device,
                                 void *queue,
                                 void *to,
                                 const void *from,
                                 uint64_t bytes,
                                 struct structures_error *error);
    // Copies device bytes out, ordered on the queue.
    structures_status (*copy_out)(void *device,
                                  void *queue,
                                  void *to,
                                  const void *from,
                                  uint64_t bytes,
                                  struct structures_error *error);
    // Makes a queue.
    structures_status (*queue_new)(void *device, void **queue, struct structures_error *error);
    // Waits for everything on the queue.
    structures_status (*synchronize)(void *device, void *queue, struct structures_error *error);
    // A null `milliseconds` sets the queue's mark; otherwise the time from the mark to everything
    // enqueued so far, for which it waits.
    structures_status (*elapsed)(void *device,
                                 void *queue,
                                 float *milliseconds,
                                 struct structures_error *error);
    // Starts recording the queue: until `capture_end`, calls of forms on it are noted and not done. Who allocates, copies
    // or waits meanwhile is refused, and `capture_end` with it.
    structures_status (*capture_begin)(void *device, void *queue, struct structures_error *error);
    // Ends recording, also after an error. The handle is for `graph_launch`; a device that fills it has that entry.
    structures_status (*capture_end)(void *device,
                                     void *queue,
                                     void **graph,
                                     struct structures_error *error);
    // Since 1.1, optional: frees what `queue_new` made. Without it a queue lives as long as its
    // device.
    void (*queue_free)(void *device, void *queue);
    // Since 1.1, optional: closes what `open` opened, after its queues and memory. Without it a
    // device lives as long as the plugin instance.
    void (*close)(void *device);
    // Since 1.2, optional: enqueues everything a recording holds, at the addresses it was recorded with. Forms and memory
    // of it are the caller's to keep. Without it a host records nothing.
    structures_status (*graph_launch)(void *device,
                                      void *queue,
                                      void *graph,
                                      struct structures_error *error);
    // Since 1.2, optional: frees what `capture_end` gave, once its work is done. Without it a recording lives as long as
    // its device.
    void (*graph_free)(void *device, void *graph);
} structures_device_vtable;

// Services the host lends. Valid as long as the plugin instance; callable from any thread.
typedef struct structures_host_vtable {
    // Size of this table in bytes.
    uint32_t struct_size;
    // ABI minor of the host.
    uint32_t api_minor;
    // First argument of every entry.
    void *ctx;
    // Log bridge: level, target, message.
    void (*log)(void *ctx,
                uint32_t level,
                struct structures_str target,
                struct structures_str message);
    // Threads `parallel_for` uses, the caller included. At least 1.
    size_t (*num_threads)(void *ctx);
    // Runs `body(user, i)` for every `i < n` on the host's pool, the caller included, and returns
    // when all are done. `body` must not unwind. A call from inside a body runs serially.
    void (*parallel_for)(void *ctx, size_t n, void (*body)(void *user, size_t i), void *user);
    // Leases scratch shared with other forms of this plugin that lease the same tag: content does
    // not survive a call. Null when memory is short.
    void *(*scratch_lease)(void *ctx, struct structures_str tag, uint64_t bytes, uint64_t align);
    // Gives a lease back.
    void (*scratch_release)(void *ctx, void *memory);
} structures_host_vtable;


// Plugin entries. All may be called from any thread, one at a time a plugin; `describe` touches no
// device and may be called before anything else, in a throw-away process.
typedef struct structures_plugin_vtable {
    // Size of this table in bytes.
    uint32_t struct_size;
    // ABI minor of the plugin.
    uint32_t api_minor;
    // The `describe` document, UTF-8 JSON.
    structures_status (*describe)(struct structures_bytes *out, struct structures_error *error);
    // Makes the plugin instance. The host's table outlives it.
    structures_status (*open)(const struct structures_host_vtable *host,
                              void **plugin,
                              struct structures_error *error);
    // Drops the instance.
    void (*close)(void *plugin);
    // Capability probe of a form at shapes (JSON `{structure, span, rows: [..], dims: {..},`
    // variant: {..}}`); answers JSON `{probed: bool, entries: {present: [..], absent: [..]},
    // code?, reason?}`.`
    structures_status (*probe)(void *plugin,
                               struct structures_str form,
                               uint32_t device,
                               struct structures_str shapes,
                               struct structures_bytes *out,
                               struct structures_error *error);
    // Binds a form. After it nothing is looked up again.
    structures_status (*bind)(void *plugin,
                              const struct structures_bind_args *args,
                              void **form,
                              struct structures_error *error);
    // Entries of what `bind` makes.
    const struct structures_form_vtable *form;
    // Null for backends without memory of their own.
    const struct structures_device_vtable *device;
    // Since 1.1, optional: the devices that are there now, beside the CPU, as JSON `{devices:`
    // [{index, kind, name, arch, built_for: [..], memory_bytes}]}`. Asked once, after `open`.`
    structures_status (*devices)(void *plugin,
                                 struct structures_bytes *out,
                                 struct structures_error *error);
} structures_plugin_vtable;

// The call did what it says.
#define STRUCTURES_STATUS_OK 0

// An argument is malformed: a bug on the caller's side.
#define STRUCTURES_STATUS_INVALID 1

// Well formed, but not something this form executes here (band, dims, architecture, missing
// entry).
#define STRUCTURES_STATUS_REFUSED 2

// It should have worked and did not.
#define STRUCTURES_STATUS_FAILED 3

// The plugin panicked; the instance is poisoned.
#define STRUCTURES_STATUS_PANICKED 4

// The instance failed or panicked before and is not entered again.
#define STRUCTURES_STATUS_POISONED 5

/* The layout, as the host's compiler has it. The host asserts the same numbers. */
STRUCTURES_ASSERT(sizeof(structures_tensor_view) == 152, "size of structures_tensor_view");
STRUCTURES_ASSERT(offsetof(structures_tensor_view, data) == 0, "structures_tensor_view.data");
STRUCTURES_ASSERT(offsetof(structures_tensor_view, dtype) == 8, "structures_tensor_view.dtype");
STRUCTURES_ASSERT(offsetof(structures_tensor_view, rank) == 12, "structures_tensor_view.rank");
STRUCTURES_ASSERT(offsetof(structures_tensor_view, dims) == 16, "structures_tensor_view.dims");
STRUCTURES_ASSERT(offsetof(structures_tensor_view, strides) == 80, "structures_tensor_view.strides");
STRUCTURES_ASSERT(offsetof(structures_tensor_view, device) == 144, "structures_tensor_view.device");
STRUCTURES_ASSERT(offsetof(structures_tensor_view, flags) == 148, "structures_tensor_view.flags");
STRUCTURES_ASSERT(sizeof(structures_str) == 16, "size of structures_str");
STRUCTURES_ASSERT(offsetof(structures_str, ptr) == 0, "structures_str.ptr");
STRUCTURES_ASSERT(offsetof(structures_str, len) == 8, "structures_str.len");
STRUCTURES_ASSERT(sizeof(structures_bytes) == 32, "size of structures_bytes");
STRUCTURES_ASSERT(offsetof(structures_bytes, ptr) == 0, "structures_bytes.ptr");
STRUCTURES_ASSERT(offsetof(structures_bytes, len) == 8, "structures_bytes.len");
STRUCTURES_ASSERT(offsetof(structures_bytes, capacity) == 16, "structures_bytes.capacity");
STRUCTURES_ASSERT(offsetof(structures_bytes, release) == 24, "structures_bytes.release");
STRUCTURES_ASSERT(sizeof(structures_error) == 64, "size of structures_error");
STRUCTURES_ASSERT(offsetof(structures_error, code) == 0, "structures_error.code");
STRUCTURES_ASSERT(offsetof(structures_error, message) == 32, "structures_error.message");
STRUCTURES_ASSERT(sizeof(structures_contract) == 32, "size of structures_contract");
STRUCTURES_ASSERT(offsetof(structures_contract, struct_size) == 0, "structures_contract.struct_size");
STRUCTURES_ASSERT(offsetof(structures_contract, dtype) == 4, "structures_contract.dtype");
STRUCTURES_ASSERT(offsetof(structures_contract, row_capacity) == 8, "structures_contract.row_capacity");
STRUCTURES_ASSERT(offsetof(structures_contract, rows_exact) == 16, "structures_contract.rows_exact");
STRUCTURES_ASSERT(offsetof(structures_contract, device) == 24, "structures_contract.device");
STRUCTURES_ASSERT(offsetof(structures_contract, flags) == 28, "structures_contract.flags");
STRUCTURES_ASSERT(sizeof(structures_bind_args) == 112, "size of structures_bind_args");
STRUCTURES_ASSERT(offsetof(structures_bind_args, struct_size) == 0, "structures_bind_args.struct_size");
STRUCTURES_ASSERT(offsetof(structures_bind_args, device) == 4, "structures_bind_args.device");
STRUCTURES_ASSERT(offsetof(structures_bind_args, form) == 8, "structures_bind_args.form");
STRUCTURES_ASSERT(offsetof(structures_bind_args, span) == 24, "structures_bind_args.span");
STRUCTURES_ASSERT(offsetof(structures_bind_args, weight_names) == 40, "structures_bind_args.weight_names");
STRUCTURES_ASSERT(offsetof(structures_bind_args, weights) == 48, "structures_bind_args.weights");
STRUCTURES_ASSERT(offsetof(structures_bind_args, n_weights) == 56, "structures_bind_args.n_weights");
STRUCTURES_ASSERT(offsetof(structures_bind_args, statistic_names) == 64, "structures_bind_args.statistic_names");
STRUCTURES_ASSERT(offsetof(structures_bind_args, statistics) == 72, "structures_bind_args.statistics");
STRUCTURES_ASSERT(offsetof(structures_bind_args, n_statistics) == 80, "structures_bind_args.n_statistics");
STRUCTURES_ASSERT(offsetof(structures_bind_args, params) == 88, "structures_bind_args.params");
STRUCTURES_ASSERT(offsetof(structures_bind_args, contract) == 104, "structures_bind_args.contract");
STRUCTURES_ASSERT(sizeof(structures_call_ctx) == 24, "size of structures_call_ctx");
STRUCTURES_ASSERT(offsetof(structures_call_ctx, struct_size) == 0, "structures_call_ctx.struct_size");
STRUCTURES_ASSERT(offsetof(structures_call_ctx, flags) == 4, "structures_call_ctx.flags");
STRUCTURES_ASSERT(offsetof(structures_call_ctx, queue) == 8, "structures_call_ctx.queue");
STRUCTURES_ASSERT(offsetof(structures_call_ctx, workspace) == 16, "structures_call_ctx.workspace");
STRUCTURES_ASSERT(sizeof(structures_form_facts) == 24, "size of structures_form_facts");
STRUCTURES_ASSERT(offsetof(structures_form_facts, packed_bytes) == 0, "structures_form_facts.packed_bytes");
STRUCTURES_ASSERT(offsetof(structures_form_facts, scratch_bytes) == 8, "structures_form_facts.scratch_bytes");
STRUCTURES_ASSERT(offsetof(structures_form_facts, workspace_bytes) == 16, "structures_form_facts.workspace_bytes");
STRUCTURES_ASSERT(sizeof(structures_form_vtable) == 32, "size of structures_form_vtable");
STRUCTURES_ASSERT(offsetof(structures_form_vtable, struct_size) == 0, "structures_form_vtable.struct_size");
STRUCTURES_ASSERT(offsetof(structures_form_vtable, api_minor) == 4, "structures_form_vtable.api_minor");
STRUCTURES_ASSERT(offsetof(structures_form_vtable, call) == 8, "structures_form_vtable.call");
STRUCTURES_ASSERT(offsetof(structures_form_vtable, facts) == 16, "structures_form_vtable.facts");
STRUCTURES_ASSERT(offsetof(structures_form_vtable, release) == 24, "structures_form_vtable.release");
#define STRUCTURES_FORM_VTABLE_SIZE_1_0 32
STRUCTURES_ASSERT(sizeof(structures_device_vtable) == 120, "size of structures_device_vtable");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, struct_size) == 0, "structures_device_vtable.struct_size");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, api_minor) == 4, "structures_device_vtable.api_minor");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, open) == 8, "structures_device_vtable.open");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, alloc) == 16, "structures_device_vtable.alloc");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, free) == 24, "structures_device_vtable.free");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, copy_in) == 32, "structures_device_vtable.copy_in");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, copy_out) == 40, "structures_device_vtable.copy_out");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, queue_new) == 48, "structures_device_vtable.queue_new");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, synchronize) == 56, "structures_device_vtable.synchronize");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, elapsed) == 64, "structures_device_vtable.elapsed");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, capture_begin) == 72, "structures_device_vtable.capture_begin");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, capture_end) == 80, "structures_device_vtable.capture_end");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, queue_free) == 88, "structures_device_vtable.queue_free");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, close) == 96, "structures_device_vtable.close");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, graph_launch) == 104, "structures_device_vtable.graph_launch");
STRUCTURES_ASSERT(offsetof(structures_device_vtable, graph_free) == 112, "structures_device_vtable.graph_free");
#define STRUCTURES_DEVICE_VTABLE_SIZE_1_0 88
STRUCTURES_ASSERT(sizeof(structures_plugin_vtable) == 72, "size of structures_plugin_vtable");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, struct_size) == 0, "structures_plugin_vtable.struct_size");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, api_minor) == 4, "structures_plugin_vtable.api_minor");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, describe) == 8, "structures_plugin_vtable.describe");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, open) == 16, "structures_plugin_vtable.open");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, close) == 24, "structures_plugin_vtable.close");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, probe) == 32, "structures_plugin_vtable.probe");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, bind) == 40, "structures_plugin_vtable.bind");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, form) == 48, "structures_plugin_vtable.form");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, device) == 56, "structures_plugin_vtable.device");
STRUCTURES_ASSERT(offsetof(structures_plugin_vtable, devices) == 64, "structures_plugin_vtable.devices");
#define STRUCTURES_PLUGIN_VTABLE_SIZE_1_0 64
STRUCTURES_ASSERT(sizeof(structures_host_vtable) == 56, "size of structures_host_vtable");
STRUCTURES_ASSERT(offsetof(structures_host_vtable, struct_size) == 0, "structures_host_vtable.struct_size");
STRUCTURES_ASSERT(offsetof(structures_host_vtable, api_minor) == 4, "structures_host_vtable.api_minor");
STRUCTURES_ASSERT(offsetof(structures_host_vtable, ctx) == 8, "structures_host_vtable.ctx");
STRUCTURES_ASSERT(offsetof(structures_host_vtable, log) == 16, "structures_host_vtable.log");
STRUCTURES_ASSERT(offsetof(structures_host_vtable, num_threads) == 24, "structures_host_vtable.num_threads");
STRUCTURES_ASSERT(offsetof(structures_host_vtable, parallel_for) == 32, "structures_host_vtable.parallel_for");
STRUCTURES_ASSERT(offsetof(structures_host_vtable, scratch_lease) == 40, "structures_host_vtable.scratch_lease");
STRUCTURES_ASSERT(offsetof(structures_host_vtable, scratch_release) == 48, "structures_host_vtable.scratch_release");
#define STRUCTURES_HOST_VTABLE_SIZE_1_0 56

#if defined(__cplusplus)
} /* extern "C" */
#endif

/*
 * The door. `host` is null in the throw-away process that only describes the library; otherwise it
 * lives longer than the plugin. Answers a table that is valid for ever, or null when the host's table
 * is too short for this backend. Calls nothing through either table.
 *
 * A backend defines it; declared here so that the compiler compares the two.
 */
STRUCTURES_EXPORT const structures_plugin_vtable *
structures_plugin_v1(const structures_host_vtable *host);

#endif /* STRUCTURES_PLUGIN_H */
