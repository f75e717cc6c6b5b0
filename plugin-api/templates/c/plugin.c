/*
 * `@ID@`: a backend for the `structures` plugin host, in plain C.
 *
 * One form so far, `int8` of `linear_proj`: int8 weights with one scale an output channel,
 * activations as they come, 1 to 8 rows. Plain loops on the host's threads: a place to start from.
 * Everything it keeps is written in `bind` and only read in `call`, so it declares `concurrent`.
 *
 * To make it yours: add to DESCRIPTION what else you serve, and to `bind` what serves it; declare no
 * more than you do. structures_plugin.h says who calls what, when, and who owns what.
 */
#include "structures_plugin.h"

#include "support.h"

/* Most rows of one call: the decode band. Also in DESCRIPTION. */
#define ROWS 8
/* Output channels that one thread takes at a time. */
#define PIECE 64

/* What the host is told, and holds us to. */
static const char DESCRIPTION[] =
    "{\"schema\":1,\"id\":\"@ID@\",\"vendor\":\"@ID@ authors\",\"version\":\"0.1.0\","
    "\"api\":\"" STRUCTURES_API_VERSION "\",\"archs\":[\"" ARCH "\"],\"forms\":[{"
    "\"structure\":\"linear_proj\",\"spec_versions\":[1],\"name\":\"int8\","
    "\"format\":\"w8a16_static\",\"spans\":[\"proj\"],"
    "\"variants\":{\"bias\":[\"none\",\"add\"],\"epilogue\":[\"none\"],\"in_dtype\":[\"bf16\"]},"
    "\"dtypes\":[\"f32\"],\"band\":{\"rows\":[1,8]},\"weight_format\":\"int8_per_channel\","
    "\"tolerance\":1e-4,\"precision_rank\":10,\"quantises\":true,\"concurrent\":true}]}";

/* The plugin. ------------------------------------------------------------------------------- */

typedef struct plugin {
    const structures_host_vtable *host;
} plugin;

static structures_status describe(structures_bytes *out, structures_error *error)
{
    return answer(out, DESCRIPTION, error);
}

static structures_status
open_plugin(const structures_host_vtable *host, void **out, structures_error *error)
{
    if (!out || !host || host->struct_size < STRUCTURES_HOST_VTABLE_SIZE_1_0)
        return no(error, STRUCTURES_STATUS_INVALID, "argument", "no host table, or a short one");
    plugin *p = calloc(1, sizeof *p);
    if (!p)
        return no(error, STRUCTURES_STATUS_FAILED, "memory", "no memory for the plugin");
    p->host = host;
    *out = p;
    return STRUCTURES_STATUS_OK;
}

static void close_plugin(void *p)
{
    free(p);
}

/* Null when the form serves structure and variant; else the code that says why not. */
static const char *foreign(json document)
{
    json structure, variant;
    if (!json_member(document, "structure", &structure) || !json_is(structure, "linear_proj"))
        return "form_unknown";
    if (!json_member(document, "variant", &variant))
        return "params";
    if (!axis_in(variant, "bias", "none", "add") || !axis_in(variant, "epilogue", "none", "none") ||
        !axis_in(variant, "in_dtype", "bf16", "bf16"))
        return "format_no_variant";
    return NULL;
}

/* Can this form run here, at these shapes? A no is an answer, not an error. */
static structures_status probe(void *p, structures_str name, uint32_t device, structures_str shapes,
                               structures_bytes *out, structures_error *error)
{
    (void)p;
    json document = json_of(shapes.ptr, shapes.len), span, rows, item;
    if (!json_member(document, "span", &span))
        return no(error, STRUCTURES_STATUS_INVALID, "params", "shapes without a span");
    const char *code = foreign(document);
    if (!json_is(span, "proj") && !json_is(span, ""))
        code = "span_unknown";
    if (!text_is(name, "int8"))
        code = "form_unknown";
    if (device != 0)
        code = "device_unknown";
    if (!code && json_member(document, "rows", &rows)) {
        size_t i = 0, inside = 0;
        for (; json_item(rows, i, &item); i++) {
            uint64_t n;
            inside += json_u64(item, &n) && n >= 1 && n <= ROWS;
        }
        if (i > 0 && inside == 0)
            code = "form_band";
    }
    if (!code)
        return answer(out, "{\"probed\":true}", error);
    char text[256];
    snprintf(text, sizeof text,
             "{\"probed\":false,\"code\":\"%s\",\"reason\":\"outside the form's declaration\"}",
             code);
    return answer(out, text, error);
}

/* Binding. ---------------------------------------------------------------------------------- */

/* The form, bound to one place: one channel of k codes after the other. */
typedef struct form {
    const structures_host_vtable *host;
    size_t k, n;
    int8_t *codes; /* [n][k] */
    float *scales; /* [n] */
    float *bias;   /* [n], or null */
} form;

static void release_form(void *instance)
{
    form *f = instance;
    if (!f)
        return;
    free(f->codes);
    free(f->scales);
    free(f->bias);
    free(f);
}

/* False when memory is short. */
static bool pack(form *f, const structures_tensor_view *w, const structures_tensor_view *b)
{
    float *channel = malloc(f->k * sizeof *channel);
    f->codes = malloc(f->n * f->k);
    f->scales = malloc(f->n * sizeof *f->scales);
    f->bias = b ? malloc(f->n * sizeof *f->bias) : NULL;
    const bool enough = channel && f->codes && f->scales && (!b || f->bias);
    for (size_t c = 0; enough && c < f->n; c++) {
        for (size_t i = 0; i < f->k; i++)
            channel[i] = element(w, (int64_t)i * w->strides[0] + (int64_t)c * w->strides[1]);
        quantise(channel, f->k, f->codes + c * f->k, &f->scales[c]);
        if (b)
            f->bias[c] = element(b, (int64_t)c * b->strides[0]);
    }
    free(channel);
    return enough;
}

static structures_status
bind(void *p, const structures_bind_args *args, void **out, structures_error *error)
{
    if (!p || !args || !out || args->struct_size < sizeof *args || !args->contract)
        return no(error, STRUCTURES_STATUS_INVALID, "argument", "null, or short bind args");
    if (args->n_weights && (!args->weights || !args->weight_names))
        return no(error, STRUCTURES_STATUS_INVALID, "argument", "weights without an array");
    if (args->device != 0)
        return no(error, STRUCTURES_STATUS_REFUSED, "device_unknown", "this backend is of the CPU");
    if (!text_is(args->form, "int8"))
        return no(error, STRUCTURES_STATUS_REFUSED, "form_unknown", "expected the form `int8`");
    if (!text_is(args->span, "proj"))
        return no(error, STRUCTURES_STATUS_REFUSED, "span_unknown", "expected the span `proj`");
    if (args->contract->dtype != STRUCTURES_DTYPE_F32)
        return no(error, STRUCTURES_STATUS_REFUSED, "boundary_dtype", "type id %u, expected f32",
                  (unsigned)args->contract->dtype);
    const json params = json_of(args->params.ptr, args->params.len);
    const char *code = foreign(params);
    if (code)
        return no(error, STRUCTURES_STATUS_REFUSED, code, "outside the form's declaration");

    json variant = {0}, bias;
    json_member(params, "variant", &variant);
    const structures_tensor_view *w = weight(args, "w"), *b = weight(args, "b");
    if (!w)
        return no(error, STRUCTURES_STATUS_REFUSED, "weight_missing", "slot `w` has no weight");
    /* The axis may leave the bias out, and a place may have none. */
    if (json_member(variant, "bias", &bias) && json_is(bias, "none"))
        b = NULL;
    if (!readable(w, 2) || (b && !readable(b, 1)))
        return no(error, STRUCTURES_STATUS_REFUSED, "view_dtype",
                  "expected f32 or bf16 host weights, `w` of rank 2 and `b` of rank 1");
    if (w->dims[0] < 1 || w->dims[1] < 1 || w->dims[0] > INT32_MAX || w->dims[1] > INT32_MAX ||
        (b && b->dims[0] != w->dims[1]))
        return no(error, STRUCTURES_STATUS_REFUSED, "dims_inconsistent", "w [%lld, %lld], b [%lld]",
                  (long long)w->dims[0], (long long)w->dims[1], b ? (long long)b->dims[0] : 0LL);

    form *f = calloc(1, sizeof *f);
    if (!f)
        return no(error, STRUCTURES_STATUS_FAILED, "memory", "no memory for the form");
    f->host = ((const plugin *)p)->host;
    f->k = (size_t)w->dims[0];
    f->n = (size_t)w->dims[1];
    if (!pack(f, w, b)) {
        release_form(f);
        return no(error, STRUCTURES_STATUS_FAILED, "memory", "no memory for %lld x %lld weights",
                  (long long)w->dims[0], (long long)w->dims[1]);
    }
    *out = f;
    return STRUCTURES_STATUS_OK;
}

static void facts(void *instance, structures_form_facts *out)
{
    const form *f = instance;
    if (!f || !out)
        return;
    memset(out, 0, sizeof *out);
    out->packed_bytes = f->n * (f->k + sizeof(float)) + (f->bias ? f->n * sizeof(float) : 0);
}

/* Calling. ---------------------------------------------------------------------------------- */

/* Rows of `width` adjacent floats in host memory, one after the other; null data without rows. */
static bool rows_of(const structures_tensor_view *view, size_t width, float **data, size_t *count)
{
    if (view->dtype != STRUCTURES_DTYPE_F32 || view->device != 0 || view->rank < 1 ||
        view->rank > STRUCTURES_MAX_RANK || view->dims[view->rank - 1] != (int64_t)width)
        return false;
    int64_t expected = 1;
    *count = 1;
    for (uint32_t d = view->rank; d-- > 0;) {
        if (view->dims[d] < 0 || view->dims[d] > INT32_MAX)
            return false;
        if (view->dims[d] > 1 && view->strides[d] != expected)
            return false;
        if (view->dims[d] > 0 && expected > INT64_MAX / view->dims[d])
            return false;
        expected *= view->dims[d];
        *count *= d + 1 < view->rank ? (size_t)view->dims[d] : 1;
    }
    *data = view->data;
    return (uintptr_t)view->data % sizeof(float) == 0 && (view->data || *count == 0);
}

typedef struct job {
    const form *form;
    const float *x;
    float *y;
    size_t rows;
} job;

/* One piece of the channels, for every row; runs on any thread of the host's pool. */
static void piece(void *user, size_t index)
{
    const job *j = user;
    const form *f = j->form;
    const size_t first = index * PIECE;
    const size_t end = first + PIECE < f->n ? first + PIECE : f->n;
    for (size_t r = 0; r < j->rows; r++) {
        for (size_t c = first; c < end; c++) {
            const float *x = j->x + r * f->k;
            const int8_t *codes = f->codes + c * f->k;
            float sum = 0;
            for (size_t i = 0; i < f->k; i++)
                sum += x[i] * (float)codes[i];
            j->y[r * f->n + c] = sum * f->scales[c] + (f->bias ? f->bias[c] : 0.0f);
        }
    }
}

static structures_status call(void *instance, const structures_call_ctx *ctx,
                              const structures_tensor_view *inputs, size_t n_inputs,
                              const structures_tensor_view *outputs, size_t n_outputs,
                              const structures_tensor_view *states, size_t n_states,
                              structures_error *error)
{
    (void)states;
    const form *f = instance;
    /* The order is the span's: in [x, residual], out [y]. */
    if (!f || !ctx || n_inputs != 2 || n_outputs != 1 || n_states != 0 || !inputs || !outputs)
        return no(error, STRUCTURES_STATUS_INVALID, "argument", "span `proj` has x, residual and y");
    float *x, *y;
    size_t rows, written;
    if (!rows_of(&inputs[0], f->k, &x, &rows) || !rows_of(&outputs[0], f->n, &y, &written) ||
        rows != written)
        return no(error, STRUCTURES_STATUS_INVALID, "view_dims",
                  "expected adjacent f32 rows of %zu in and as many of %zu out, on the host", f->k,
                  f->n);
    job j = {.form = f, .x = x, .y = y, .rows = rows};
    f->host->parallel_for(f->host->ctx, (f->n + PIECE - 1) / PIECE, piece, &j);
    return STRUCTURES_STATUS_OK;
}

/* The door. --------------------------------------------------------------------------------- */

static const structures_form_vtable FORM_TABLE = {
    .struct_size = sizeof(structures_form_vtable),
    .api_minor = STRUCTURES_API_MINOR,
    .call = call,
    .facts = facts,
    .release = release_form,
};

static const structures_plugin_vtable PLUGIN_TABLE = {
    .struct_size = sizeof(structures_plugin_vtable),
    .api_minor = STRUCTURES_API_MINOR,
    .describe = describe,
    .open = open_plugin,
    .close = close_plugin,
    .probe = probe,
    .bind = bind,
    .form = &FORM_TABLE,
};

const structures_plugin_vtable *structures_plugin_v1(const structures_host_vtable *host)
{
    if (host && host->struct_size < STRUCTURES_HOST_VTABLE_SIZE_1_0)
        return NULL;
    return &PLUGIN_TABLE;
}
