/*
 * A whole backend in C: `linear_proj` in f32, and with int8 weights (one scale an output channel)
 * and activations as they come.
 *
 * It shows everything a backend in C has to do, and is written to be read, not to be fast: baseline
 * instructions, plain loops that a compiler vectorises. Its role is `reference`: the host binds it
 * only where it is pinned or nothing else is.
 *
 * Everything it keeps is written in `bind` and only read in `call`, so its forms declare
 * `concurrent`.
 */
#include "structures_plugin.h"

#include "support.h"

/* Rows that the int8 form serves; the f32 form serves any number. */
#define INT8_ROWS 8
/* Output channels one thread takes at a time. */
#define CHANNELS 32
/* Partial sums of a dot product, so that it becomes vector code. */
#define LANES 16

#define FORM(name, format, band, weights, quantises, rank)                                        \
    "{\"structure\":\"linear_proj\",\"spec_versions\":[1],\"name\":\"" name "\",\"format\":\""    \
    format "\",\"spans\":[\"proj\"],\"variants\":{\"bias\":[\"none\",\"add\"],"                   \
    "\"epilogue\":[\"none\",\"residual_add\"],\"in_dtype\":[\"bf16\"]},\"dtypes\":[\"f32\"],"     \
    "\"band\":{" band "},\"weight_format\":\"" weights "\",\"tolerance\":1e-4,"                   \
    "\"precision_rank\":" rank ",\"quantises\":" quantises ",\"concurrent\":true,"                \
    "\"priority\":-100}"

static const char DESCRIPTION[] =
    "{\"schema\":1,\"id\":\"c_sample\",\"vendor\":\"structures\",\"version\":\"0.1.0\","
    "\"api\":\"" STRUCTURES_API_VERSION "\",\"archs\":[\"" ARCH "\"],\"role\":\"reference\","
    "\"forms\":["
    FORM("f32", "none", "", "none", "false", "0") ","
    FORM("w8a16_static", "w8a16_static", "\"rows\":[1,8]", "int8_per_channel", "true", "10")
    "]}";

/* The plugin. ------------------------------------------------------------------------------- */

typedef struct plugin {
    const structures_host_vtable *host;
} plugin;

typedef struct form {
    const structures_host_vtable *host;
    size_t k, n;
    bool adds_residual;
    float *values;  /* [n][k], or null with int8 */
    int8_t *codes;  /* [n][k], or null with f32 */
    float *scales;  /* [n], with int8 */
    float *bias;    /* [n], or null */
} form;

static structures_status describe(structures_bytes *out, structures_error *error)
{
    return answer(out, DESCRIPTION, error);
}

static structures_status
open_plugin(const structures_host_vtable *host, void **out, structures_error *error)
{
    if (!host || host->struct_size < STRUCTURES_HOST_VTABLE_SIZE_1_0 || !out)
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

/* Null when the forms serve structure and variant; else the code that says why not. */
static const char *foreign(json document)
{
    json structure, variant;
    if (!json_member(document, "structure", &structure) || !json_is(structure, "linear_proj"))
        return "form_unknown";
    if (!json_member(document, "variant", &variant))
        return "params";
    if (!axis_in(variant, "bias", "none", "add") ||
        !axis_in(variant, "epilogue", "none", "residual_add") ||
        !axis_in(variant, "in_dtype", "bf16", "bf16"))
        return "format_no_variant";
    return NULL;
}

static structures_status probe(void *p, structures_str name, uint32_t device, structures_str shapes,
                               structures_bytes *out, structures_error *error)
{
    (void)p;
    json document = json_of(shapes.ptr, shapes.len), span, rows;
    if (!json_member(document, "span", &span))
        return no(error, STRUCTURES_STATUS_INVALID, "params", "shapes without a span");
    const char *code = foreign(document);
    if (!json_is(span, "proj") && !json_is(span, ""))
        code = "span_unknown";
    const bool int8 = text_is(name, "w8a16_static");
    if (!int8 && !text_is(name, "f32"))
        code = "form_unknown";
    if (device != 0)
        code = "device_unknown";
    if (!code && int8 && json_member(document, "rows", &rows)) {
        json item;
        size_t i = 0, inside = 0;
        for (; json_item(rows, i, &item); i++) {
            uint64_t n;
            inside += json_u64(item, &n) && n >= 1 && n <= INT8_ROWS;
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

static void release_form(void *instance)
{
    form *f = instance;
    if (!f)
        return;
    free(f->values);
    free(f->codes);
    free(f->scales);
    free(f->bias);
    free(f);
}

/* Packs the weights, one output channel after the other; false when memory is short. */
static bool pack(form *f, const structures_tensor_view *w, const structures_tensor_view *b,
                 bool int8)
{
    const size_t k = f->k, n = f->n;
    float *row = malloc(k * sizeof *row);
    if (int8) {
        f->codes = malloc(n * k);
        f->scales = malloc(n * sizeof *f->scales);
    } else {
        f->values = malloc(n * k * sizeof *f->values);
    }
    if (b)
        f->bias = malloc(n * sizeof *f->bias);
    if (!row || (int8 ? !f->codes || !f->scales : !f->values) || (b && !f->bias)) {
        free(row);
        return false;
    }
    for (size_t c = 0; c < n; c++) {
        for (size_t i = 0; i < k; i++)
            row[i] = element(w, (int64_t)i * w->strides[0] + (int64_t)c * w->strides[1]);
        if (int8)
            quantise(row, k, f->codes + c * k, &f->scales[c]);
        else
            memcpy(f->values + c * k, row, k * sizeof *row);
        if (b)
            f->bias[c] = element(b, (int64_t)c * b->strides[0]);
    }
    free(row);
    return true;
}

static structures_status
bind(void *p, const structures_bind_args *args, void **out, structures_error *error)
{
    if (!p || !args || !out || args->struct_size < sizeof *args || !args->contract)
        return no(error, STRUCTURES_STATUS_INVALID, "argument", "null, or short bind args");
    if (args->n_weights > 0 && (!args->weight_names || !args->weights))
        return no(error, STRUCTURES_STATUS_INVALID, "argument", "weights without an array");
    if (args->device != 0)
        return no(error, STRUCTURES_STATUS_REFUSED, "device_unknown", "this backend is of the CPU");
    const bool int8 = text_is(args->form, "w8a16_static");
    if (!int8 && !text_is(args->form, "f32"))
        return no(error, STRUCTURES_STATUS_REFUSED, "form_unknown", "no form `%.*s`",
                  (int)args->form.len, (const char *)args->form.ptr);
    if (args->contract->dtype != STRUCTURES_DTYPE_F32)
        return no(error, STRUCTURES_STATUS_REFUSED, "boundary_dtype", "type id %u, expected f32",
                  (unsigned)args->contract->dtype);

    json params = json_of(args->params.ptr, args->params.len), variant, epilogue, bias;
    if (!text_is(args->span, "proj"))
        return no(error, STRUCTURES_STATUS_REFUSED, "span_unknown", "the form implements `proj`");
    const char *code = foreign(params);
    if (code)
        return no(error, STRUCTURES_STATUS_REFUSED, code, "outside the form's declaration");
    json_member(params, "variant", &variant);

    const structures_tensor_view *w = weight(args, "w"), *b = weight(args, "b");
    if (json_member(variant, "bias", &bias) && json_is(bias, "none"))
        b = NULL;
    if (!w)
        return no(error, STRUCTURES_STATUS_REFUSED, "weight_missing", "slot `w` has no weight");
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
    f->adds_residual =
        json_member(variant, "epilogue", &epilogue) && json_is(epilogue, "residual_add");
    if (!pack(f, w, b, int8)) {
        release_form(f);
        return no(error, STRUCTURES_STATUS_FAILED, "memory", "no memory for %lld x %lld weights",
                  (long long)w->dims[1], (long long)w->dims[0]);
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
    out->packed_bytes = f->n * (f->codes ? f->k + sizeof(float) : f->k * sizeof(float));
    out->packed_bytes += f->bias ? f->n * sizeof(float) : 0;
}

/* Calling. ---------------------------------------------------------------------------------- */

/* Rows of f32 in host memory, at any strides. */
typedef struct rows {
    const structures_tensor_view *view;
    size_t count;
    int64_t stride; /* of the last dim, in elements */
} rows;

static bool rows_of(const structures_tensor_view *view, size_t width, rows *out)
{
    if (view->dtype != STRUCTURES_DTYPE_F32 || view->device != 0 || view->rank < 1 ||
        !sane(view) || view->dims[view->rank - 1] != (int64_t)width ||
        (uintptr_t)view->data % sizeof(float) != 0)
        return false;
    out->view = view;
    out->stride = view->strides[view->rank - 1];
    out->count = 1;
    for (uint32_t d = 0; d + 1 < view->rank; d++)
        out->count *= (size_t)view->dims[d];
    return view->data || out->count == 0;
}

/* First element of a row, counted over the leading dims. */
static float *row(const rows *r, size_t index)
{
    int64_t offset = 0, rest = (int64_t)index;
    for (uint32_t d = r->view->rank - 1; d-- > 0;) {
        offset += rest % r->view->dims[d] * r->view->strides[d];
        rest /= r->view->dims[d];
    }
    return (float *)r->view->data + offset;
}

/* Dot product of a row with a packed channel of either kind. */
#define DOT(name, type)                                                                           \
    static float name(const float *x, int64_t stride, const type *w, size_t k)                    \
    {                                                                                             \
        float sums[LANES] = {0}, sum = 0;                                                         \
        size_t i = 0;                                                                             \
        if (stride == 1)                                                                          \
            for (; i + LANES <= k; i += LANES)                                                    \
                for (size_t lane = 0; lane < LANES; lane++)                                       \
                    sums[lane] += x[i + lane] * (float)w[i + lane];                               \
        for (; i < k; i++)                                                                        \
            sums[i % LANES] += x[(int64_t)i * stride] * (float)w[i];                              \
        for (size_t lane = 0; lane < LANES; lane++)                                               \
            sum += sums[lane];                                                                    \
        return sum;                                                                               \
    }

DOT(dot_f32, float)
DOT(dot_int8, int8_t)

typedef struct job {
    const form *form;
    rows x, y, residual;
} job;

/* One piece of the channels, for every row; runs on any thread of the host's pool. */
static void piece(void *user, size_t index)
{
    const job *j = user;
    const form *f = j->form;
    const size_t first = index * CHANNELS;
    const size_t end = first + CHANNELS < f->n ? first + CHANNELS : f->n;
    for (size_t r = 0; r < j->x.count; r++) {
        const float *x = row(&j->x, r);
        float *y = row(&j->y, r);
        const float *residual = f->adds_residual ? row(&j->residual, r) : NULL;
        for (size_t c = first; c < end; c++) {
            float sum = f->codes
                ? dot_int8(x, j->x.stride, f->codes + c * f->k, f->k) * f->scales[c]
                : dot_f32(x, j->x.stride, f->values + c * f->k, f->k);
            if (f->bias)
                sum += f->bias[c];
            if (residual)
                sum += residual[(int64_t)c * j->residual.stride];
            y[(int64_t)c * j->y.stride] = sum;
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
    job j = {.form = f};
    if (!rows_of(&inputs[0], f->k, &j.x) || !rows_of(&outputs[0], f->n, &j.y) ||
        j.x.count != j.y.count)
        return no(error, STRUCTURES_STATUS_INVALID, "view_dims",
                  "expected f32 rows of %zu in and %zu out on the host", f->k, f->n);
    if (f->adds_residual && (!rows_of(&inputs[1], f->n, &j.residual) || j.residual.count != j.y.count))
        return no(error, STRUCTURES_STATUS_INVALID, "view_absent",
                  "the epilogue adds a residual of %zu rows of %zu", j.y.count, f->n);
    f->host->parallel_for(f->host->ctx, (f->n + CHANNELS - 1) / CHANNELS, piece, &j);
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
    .device = NULL,
    .devices = NULL,
};

const structures_plugin_vtable *structures_plugin_v1(const structures_host_vtable *host)
{
    if (host && host->struct_size < STRUCTURES_HOST_VTABLE_SIZE_1_0)
        return NULL;
    return &PLUGIN_TABLE;
}
