/* The backend's own tests: its tables, driven by a host of a few lines. Exits 0 when all is well. */
#include "structures_plugin.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { K = 5, N = 3, ROWS = 2 };

static int failed;

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                                \
            failed = 1;                                                                           \
        }                                                                                         \
    } while (0)

/* A host: logs vanish, loops run here, scratch is the heap's. */
static void host_log(void *ctx, uint32_t level, structures_str target, structures_str message)
{
    (void)ctx, (void)level, (void)target, (void)message;
}

static size_t host_threads(void *ctx)
{
    (void)ctx;
    return 1;
}

static void host_for(void *ctx, size_t n, void (*body)(void *user, size_t i), void *user)
{
    (void)ctx;
    for (size_t i = 0; i < n; i++)
        body(user, i);
}

static void *host_lease(void *ctx, structures_str tag, uint64_t bytes, uint64_t align)
{
    (void)ctx, (void)tag, (void)align;
    return malloc(bytes);
}

static void host_release(void *ctx, void *memory)
{
    (void)ctx;
    free(memory);
}

static const structures_host_vtable HOST = {
    .struct_size = sizeof(structures_host_vtable),
    .api_minor = STRUCTURES_API_MINOR,
    .log = host_log,
    .num_threads = host_threads,
    .parallel_for = host_for,
    .scratch_lease = host_lease,
    .scratch_release = host_release,
};

static structures_str str(const char *text)
{
    structures_str s = {(const uint8_t *)text, strlen(text)};
    return s;
}

/* A row-major view of f32. */
static structures_tensor_view matrix(float *data, int64_t rows, int64_t columns)
{
    structures_tensor_view view = {.data = data, .dtype = STRUCTURES_DTYPE_F32, .rank = 2};
    view.dims[0] = rows;
    view.dims[1] = columns;
    view.strides[0] = columns;
    view.strides[1] = 1;
    return view;
}

static void forget(structures_bytes *bytes)
{
    if (bytes->release)
        bytes->release(bytes);
}

/* Whether the error has this code; frees it. */
static int code_is(structures_error *error, const char *code)
{
    const size_t len = strlen(code);
    const int same = error->code.len == len && memcmp(error->code.ptr, code, len) == 0;
    forget(&error->code);
    forget(&error->message);
    memset(error, 0, sizeof *error);
    return same;
}

static float w[K * N], b[N] = {0.5f, -1.0f, 2.0f};

static structures_status bind_with(const structures_plugin_vtable *table, void *plugin,
                                   const char *variant, void **form, structures_error *error)
{
    char params[256];
    snprintf(params, sizeof params,
             "{\"structure\":\"linear_proj\",\"version\":1,\"variant\":{%s}}", variant);
    structures_tensor_view bias = {.data = b, .dtype = STRUCTURES_DTYPE_F32, .rank = 1};
    bias.dims[0] = N;
    bias.strides[0] = 1;
    const structures_str names[] = {str("w"), str("b")};
    const structures_tensor_view weights[] = {matrix(w, K, N), bias};
    const structures_contract contract = {
        .struct_size = sizeof contract, .dtype = STRUCTURES_DTYPE_F32, .row_capacity = 8};
    const structures_bind_args args = {
        .struct_size = sizeof args,
        .form = str("int8"),
        .span = str("proj"),
        .weight_names = names,
        .weights = weights,
        .n_weights = 2,
        .params = str(params),
        .contract = &contract,
    };
    return table->bind(plugin, &args, form, error);
}

/* What the form has to compute: int8 weights, one scale an output channel. */
static float expected(const float *x, size_t channel)
{
    float amax = 0, sum = 0;
    for (size_t k = 0; k < K; k++)
        amax = fmaxf(amax, fabsf(w[k * N + channel]));
    const float scale = fmaxf(amax / 127.0f, 1e-8f);
    for (size_t k = 0; k < K; k++)
        sum += x[k] * rintf(w[k * N + channel] / scale) * scale;
    return sum;
}

static void computes(const structures_plugin_vtable *table, void *plugin, int biased)
{
    structures_error error = {0};
    void *form = NULL;
    const char *variant = biased ? "\"bias\":\"add\"" : "\"bias\":\"none\",\"epilogue\":\"none\"";
    CHECK(bind_with(table, plugin, variant, &form, &error) == STRUCTURES_STATUS_OK);
    if (!form)
        return;
    structures_form_facts facts;
    table->form->facts(form, &facts);
    CHECK(facts.packed_bytes == N * (K + 4) + (biased ? 4 * N : 0));
    float x[ROWS * K], y[ROWS * N];
    for (size_t i = 0; i < ROWS * K; i++)
        x[i] = cosf((float)i * 1.3f);
    for (size_t i = 0; i < ROWS * N; i++)
        y[i] = NAN;
    const structures_tensor_view in[] = {matrix(x, ROWS, K), {0}}, out[] = {matrix(y, ROWS, N)};
    const structures_call_ctx ctx = {.struct_size = sizeof ctx};
    CHECK(table->form->call(form, &ctx, in, 2, out, 1, NULL, 0, &error) == STRUCTURES_STATUS_OK);
    for (size_t i = 0; i < ROWS * N; i++) {
        const float exact = expected(x + i / N * K, i % N) + (biased ? b[i % N] : 0.0f);
        CHECK(fabsf(y[i] - exact) < 1e-5f);
    }
    /* One argument short: an error, not a crash. */
    CHECK(table->form->call(form, &ctx, in, 1, out, 1, NULL, 0, &error) ==
          STRUCTURES_STATUS_INVALID);
    CHECK(code_is(&error, "argument"));
    table->form->release(form);
}

static void refuses(const structures_plugin_vtable *table, void *plugin)
{
    structures_error error = {0};
    void *form = NULL;
    CHECK(bind_with(table, plugin, "\"epilogue\":\"residual_add\"", &form, &error) ==
          STRUCTURES_STATUS_REFUSED);
    CHECK(code_is(&error, "format_no_variant") && !form);

    structures_bytes report = {0};
    CHECK(table->probe(plugin, str("int8"), 0,
                       str("{\"structure\":\"linear_proj\",\"span\":\"proj\",\"rows\":[9],"
                           "\"variant\":{}}"),
                       &report, &error) == STRUCTURES_STATUS_OK);
    const char no[] = "{\"probed\":false,\"code\":\"form_band\"";
    CHECK(report.len > sizeof no && memcmp(report.ptr, no, sizeof no - 1) == 0);
    forget(&report);
}

int main(void)
{
    for (size_t i = 0; i < K * N; i++)
        w[i] = sinf((float)i * 0.7f);
    const structures_plugin_vtable *table = structures_plugin_v1(&HOST);
    CHECK(table && table->struct_size == sizeof *table);
    if (!table)
        return 1;
    structures_error error = {0};
    void *plugin = NULL;
    CHECK(table->open(NULL, &plugin, &error) == STRUCTURES_STATUS_INVALID);
    CHECK(code_is(&error, "argument"));
    CHECK(table->open(&HOST, &plugin, &error) == STRUCTURES_STATUS_OK);
    computes(table, plugin, 0);
    computes(table, plugin, 1);
    refuses(table, plugin);
    table->close(plugin);
    puts(failed ? "failed" : "ok");
    return failed;
}
