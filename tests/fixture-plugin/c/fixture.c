/*
 * One plugin for tests of the C door, good or bad in ways chosen by -D flags. It is the C sample with
 * its tables, its description and its calls changed, so what is not chosen is right.
 *
 *   ID, API, REQUIRES, PANIC     words of the description
 *   API_MINOR                    of all tables
 *   PLUGIN_SIZE, FORM_SIZE       what the tables say their sizes are
 *   LONGER                       tables with entries of a later minor behind ours
 *   DEVICES                      a device table, and a list of devices that answers an error
 *   NO_TABLE, NO_FORM_TABLE      null instead
 *   NULL_ENTRY                   a required entry is null
 *   NEEDS_LONGER_HOST            a host's table of 1.x is too short
 *   OTHER_MAJOR                  the door of major 2, and no other
 *   FAIL_STATUS                  every call answers this status
 *   FAIL_WHEN                    calls fail from the 20th on (bind parity makes the first), while this
 *                                environment variable is set
 *   MEET                         calls wait until two are inside; a lone one fails
 *   ALONE                        does not declare `concurrent`; calls are slow and fail when two meet
 *   COUNTED                      every allocation is counted and marked; the balance is written to the
 *                                file that STRUCTURES_FIXTURE_COUNTS names when the plugin is closed
 *   NOOP                         calls do nothing
 *   NO_ERROR_TEXT                errors are answered without code and message
 *
 * For the validator, each wrong in one way and right in every other:
 *   BEYOND, HALF, ADDS           writes behind its output; leaves its last element; adds to what it held
 *   WRITES_INPUT                 changes an input
 *   SCALE                        numbers times this
 *   NOISE                        other last bits in every call
 *   SHARED                       declares `concurrent` and keeps its input in a static
 *   EDGE_CRASH, EDGE_WRONG       at 8 rows, the edge of the int8 form's band
 *   NO_BAND                      its probe knows no band
 *   HANGS, EXITS                 every call
 *   FORKS, FORGES                a call leaves a process of its own session; answers the validator itself and exits
 *   NULL_CRASH, NULL_YES         bind reads args that are null; describe answers success without a place for it
 *   TRUSTS                       believes every view
 *   FLAG_CRASH                   bind, when a flag of a view is set
 *   REFUSES                      cannot bind what it describes
 *   SAYS_YES                     its probe serves any form on any device
 *   LIES, BOASTS, LEAKS          facts of nothing, facts of a megabyte more, release of nothing
 *   SPREADS, SWALLOWS            a NaN in one row is in all; a NaN becomes 0
 *   IGNORES_STRIDES              reads weights as if they lay row by row
 *   SLOW_DESCRIBE, COUNTS_DESCRIBE, ENV_DESCRIBE   waits; says another text each time, or by the environment
 *   SPAN, TYPO                   another span; another dtype beside the right ones
 *   DESCRIBED_API                API of the document alone
 *   HOST_ABORTS                  its open aborts in a process that is not a scan's
 *   LEAVES                       forks a process out of its group and session, which writes its id to this file;
 *                                LATE: and then waits for ever
 *   CLASHES, UNIQUE              exports a name of the C library; a unique symbol
 */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef COUNTED
static atomic_long made, freed, foreign_frees;
#define MARK 0x5ca1ab1eL

static void *counted_malloc(size_t bytes)
{
    long *block = malloc(bytes + 16);
    if (!block)
        return NULL;
    block[0] = MARK;
    atomic_fetch_add(&made, 1);
    return (char *)block + 16;
}

static void *counted_calloc(size_t n, size_t bytes)
{
    void *block = counted_malloc(n * bytes);
    return block ? memset(block, 0, n * bytes) : NULL;
}

static void counted_free(void *memory)
{
    if (!memory)
        return;
    long *block = (long *)((char *)memory - 16);
    if (block[0] != MARK) {
        atomic_fetch_add(&foreign_frees, 1);
        return;
    }
    block[0] = 0;
    atomic_fetch_add(&freed, 1);
    free(block);
}
#define malloc counted_malloc
#define calloc counted_calloc
#define free counted_free
#endif

#define structures_plugin_v1 sample_door
#include "plugin.c"
#undef structures_plugin_v1

#ifndef ID
#define ID "c_fixture"
#endif
#ifdef DESCRIBED_API
#define API DESCRIBED_API
#endif
#ifndef API
#define API STRUCTURES_API_VERSION
#endif
#ifndef REQUIRES
#define REQUIRES ""
#endif
#ifdef PANIC
#define PANIC_FIELD "\"panic\":\"" PANIC "\","
#else
#define PANIC_FIELD ""
#endif
#ifdef ALONE
#define CONCURRENT "false"
#else
#define CONCURRENT "true"
#endif

#ifndef ARCHS
#define ARCHS ARCH
#endif
#ifndef SPAN
#define SPAN ""
#endif
#ifndef TYPO
#define TYPO ""
#endif

#define FIXTURE_FORM(name, format, band, weights, quantises)                                      \
    "{\"structure\":\"linear_proj\",\"spec_versions\":[1],\"name\":\"" name "\",\"format\":\""    \
    format "\",\"spans\":[\"proj\"" SPAN "],\"dtypes\":[\"f32\"" TYPO "],\"variants\":{\"bias\":[\"none\","       \
    "\"add\"],\"epilogue\":[\"none\",\"residual_add\"],\"in_dtype\":[\"bf16\"]},\"band\":{"     \
    band "},\"weight_format\":\"" weights "\",\"tolerance\":1e-4,\"precision_rank\":0,\"quantises\":" quantises                         \
    ",\"concurrent\":" CONCURRENT "}"

static const char FIXTURE_DESCRIPTION[] =
    "{\"schema\":1,\"id\":\"" ID "\",\"vendor\":\"Fixtures\",\"version\":\"0.1.0\",\"api\":\"" API
    "\"," PANIC_FIELD "\"archs\":[\"" ARCHS "\"],\"requires\":[" REQUIRES "],\"forms\":["
    FIXTURE_FORM("f32", "none", "", "none", "false") ","
    FIXTURE_FORM("w8a16_static", "w8a16_static", "\"rows\":[1,8]", "int8_per_channel", "true") "]}";

static structures_status fixture_describe(structures_bytes *out, structures_error *error)
{
#ifdef SLOW_DESCRIBE
    const struct timespec long_time = {1, 300000000};
    nanosleep(&long_time, NULL);
#endif
#ifdef NULL_YES
    if (!out)
        return STRUCTURES_STATUS_OK;
#endif
#if defined(COUNTS_DESCRIBE) || defined(ENV_DESCRIBE)
    static int asked;
    char text[sizeof FIXTURE_DESCRIPTION + 64];
#ifdef COUNTS_DESCRIBE
    const int spaces = ++asked % 7;
#else
    const int spaces = getenv("HOME") ? 3 : asked;
#endif
    snprintf(text, sizeof text, "%s%*s", FIXTURE_DESCRIPTION, spaces, "");
    return answer(out, text, error);
#endif
    return answer(out, FIXTURE_DESCRIPTION, error);
}

static void fixture_close(void *p)
{
    close_plugin(p);
#ifdef COUNTED
    const char *path = getenv("STRUCTURES_FIXTURE_COUNTS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "made %ld freed %ld foreign %ld\n", (long)made, (long)freed,
                (long)foreign_frees);
        fclose(file);
    }
#endif
}

#ifdef HOST_ABORTS
/* In a process of the scan all is well. */
static structures_status fixture_open(const structures_host_vtable *host, void **out,
                                      structures_error *error)
{
    char line[4096] = {0};
    FILE *file = fopen("/proc/self/cmdline", "r");
    const size_t n = file ? fread(line, 1, sizeof line - 1, file) : 0;
    if (file)
        fclose(file);
    for (size_t i = 0; i + 11 <= n; i++)
        if (memcmp(line + i, "scan-plugin", 11) == 0)
            return open_plugin(host, out, error);
    abort();
}
#else
#define fixture_open open_plugin
#endif

#ifdef LEAVES
#include <unistd.h>
__attribute__((constructor)) static void leave_one(void)
{
    if (fork() != 0) {
#ifdef LATE
        for (;;)
            pause();
#endif
        return;
    }
    setsid();
    if (fork() != 0)
        _exit(0);
    FILE *file = fopen(LEAVES, "w");
    if (file) {
        fprintf(file, "%ld", (long)getpid());
        fclose(file);
    }
    for (;;)
        pause();
}
#endif

/* Faults of the validator's tests. ---------------------------------------------------------- */

/* Where a write ends the process. A raised signal would not: handlers of a host may return from it. */
static int *volatile nowhere = NULL;

static structures_status fixture_probe(void *p, structures_str name, uint32_t device,
                                       structures_str shapes, structures_bytes *out,
                                       structures_error *error)
{
#ifdef SAYS_YES
    (void)p, (void)name, (void)device, (void)shapes;
    return answer(out, "{\"probed\":true}", error);
#endif
#ifdef NO_BAND
    /* As the other form, which has none. */
    if (text_is(name, "w8a16_static")) {
        name.ptr = (const uint8_t *)"f32";
        name.len = 3;
    }
#endif
    return probe(p, name, device, shapes, out, error);
}

static structures_status fixture_bind(void *p, const structures_bind_args *args, void **out,
                                      structures_error *error)
{
#ifdef NULL_CRASH
    volatile uint32_t size = args->struct_size;
    (void)size;
#endif
#ifdef REFUSES
    return no(error, STRUCTURES_STATUS_REFUSED, "not_today", "planted in bind");
#endif
#ifdef FLAG_CRASH
    for (size_t i = 0; args && args->weights && i < args->n_weights; i++)
        if (args->weights[i].flags)
            *nowhere = 1;
#endif
#ifdef IGNORES_STRIDES
    structures_tensor_view views[8];
    structures_bind_args plain;
    if (args && args->weights && args->n_weights <= 8 && args->struct_size >= sizeof plain) {
        plain = *args;
        memcpy(views, args->weights, args->n_weights * sizeof *views);
        for (size_t i = 0; i < args->n_weights; i++)
            if (views[i].rank == 2 && sane(&views[i]) && views[i].data) {
                views[i].strides[0] = views[i].dims[1];
                views[i].strides[1] = 1;
            }
        plain.weights = views;
        args = &plain;
        return bind(p, args, out, error);
    }
#endif
    return bind(p, args, out, error);
}

static void fixture_facts(void *instance, structures_form_facts *out)
{
    facts(instance, out);
#ifdef LIES
    if (out)
        memset(out, 0, sizeof *out);
#endif
#ifdef BOASTS
    if (out)
        out->packed_bytes += 1 << 20;
#endif
}

static void fixture_release(void *instance)
{
#ifndef LEAKS
    release_form(instance);
#endif
    (void)instance;
}

/* The right call, and what is wrong about it. */
static structures_status spoiled_call(void *instance, const structures_call_ctx *ctx,
                                      const structures_tensor_view *in, size_t n_in,
                                      const structures_tensor_view *out, size_t n_out,
                                      const structures_tensor_view *states, size_t n_states,
                                      structures_error *error)
{
    const form *f = instance;
    rows x, y;
    const bool good = f && ctx && in && out && n_in == 2 && n_out == 1 &&
                      rows_of(&in[0], f->k, &x) && rows_of(&out[0], f->n, &y) &&
                      x.count == y.count && y.count > 0;
#ifdef TRUSTS
    if (f && out && n_out > 0)
        *(volatile float *)out[0].data = *(volatile float *)in[0].data;
#endif
    if (!good)
        return call(instance, ctx, in, n_in, out, n_out, states, n_states, error);
    float *last = row(&y, y.count - 1) + (f->n - 1) * y.stride;
    const float before = *last;
    float held[8] = {0};
    (void)before, (void)held;
#ifdef HANGS
    for (;;)
        nanosleep(&(const struct timespec){1, 0}, NULL);
#endif
#ifdef EXITS
    _Exit(7);
#endif
#ifdef FORKS
    if (fork() == 0) {
        setsid();
        for (int fd = 0; fd < 256; fd++)
            close(fd);
        sleep(120);
        _Exit(0);
    }
    // Long enough for it to leave the group.
    nanosleep(&(const struct timespec){0, 100000000}, NULL);
#endif
#ifdef FORGES
    static const char answer[] =
        "\n{\"done\":{\"code\":null,\"reason\":null,\"skipped\":false,\"seed\":null,\"described\":null,"
        "\"forms\":[],\"met\":true,\"nonce\":\"\"}}\n";
    for (int fd = 3; fd < 256; fd++)
        if (write(fd, answer, sizeof answer - 1) < 0)
            continue;
    _Exit(0);
#endif
#ifdef EDGE_CRASH
    if (f->codes && x.count == 8)
        *nowhere = 1;
#endif
#ifdef ADDS
    const float first = *row(&y, 0);
#endif
#ifdef SHARED
    static float kept[1 << 16];
    structures_tensor_view own[2] = {in[0], in[1]};
    if (x.count * f->k <= sizeof kept / sizeof *kept) {
        for (size_t r = 0; r < x.count; r++)
            for (size_t i = 0; i < f->k; i++)
                kept[r * f->k + i] = row(&x, r)[(int64_t)i * x.stride];
        nanosleep(&(const struct timespec){0, 20000}, NULL);
        own[0].data = kept;
        own[0].rank = 2;
        own[0].dims[0] = (int64_t)x.count;
        own[0].dims[1] = own[0].strides[0] = (int64_t)f->k;
        own[0].strides[1] = 1;
        in = own;
    }
#endif
    structures_status status = call(instance, ctx, in, n_in, out, n_out, states, n_states, error);
    if (status != STRUCTURES_STATUS_OK)
        return status;
    for (size_t r = 0; r < y.count; r++)
        for (size_t i = 0; i < f->n; i++) {
            float *value = row(&y, r) + (int64_t)i * y.stride;
#ifdef SCALE
            *value *= SCALE;
#endif
#ifdef EDGE_WRONG
            if (f->codes && y.count == 8)
                *value *= 1.5f;
#endif
#ifdef SWALLOWS
            *value = isnan(*value) ? 0 : *value;
#endif
            (void)value;
        }
#ifdef SPREADS
    for (size_t r = 0; r < x.count; r++)
        for (size_t i = 0; i < f->k; i++)
            if (isnan(row(&x, r)[(int64_t)i * x.stride]))
                *row(&y, 0) = NAN;
#endif
#ifdef NOISE
    static atomic_int calls;
    *row(&y, 0) *= 1 + 1e-6f * (float)(atomic_fetch_add(&calls, 1) % 7);
#endif
#ifdef ADDS
    *row(&y, 0) += first;
#endif
#ifdef HALF
    *last = before;
#endif
#ifdef BEYOND
    last[1] = 0;
#endif
#ifdef WRITES_INPUT
    *row(&x, 0) = 0.25f;
#endif
    return STRUCTURES_STATUS_OK;
}

#ifdef CLASHES
STRUCTURES_EXPORT void tzset(void)
{
}
#endif
#ifdef UNIQUE
__asm__(".data\n.globl only_once\n.type only_once, %gnu_unique_object\n.size only_once, 4\n"
        "only_once: .long 0\n.text\n");
#endif

static atomic_int inside;

static void pause_a_little(void)
{
    const struct timespec little = {0, 1000000};
    nanosleep(&little, NULL);
}

static structures_status fixture_call(void *form_instance, const structures_call_ctx *ctx,
                                      const structures_tensor_view *in, size_t n_in,
                                      const structures_tensor_view *out, size_t n_out,
                                      const structures_tensor_view *states, size_t n_states,
                                      structures_error *error)
{
#ifdef NOOP
    (void)form_instance, (void)ctx, (void)in, (void)n_in, (void)out, (void)n_out, (void)states;
    (void)n_states, (void)error, (void)pause_a_little;
    return STRUCTURES_STATUS_OK;
#endif
    atomic_fetch_add(&inside, 1);
    structures_status status = STRUCTURES_STATUS_OK;
#if defined(FAIL_STATUS)
    status = no(error, FAIL_STATUS, "planted_error", "planted in call");
#elif defined(FAIL_WHEN)
    static atomic_int calls;
    if (getenv(FAIL_WHEN) && atomic_fetch_add(&calls, 1) >= 19)
        status = no(error, STRUCTURES_STATUS_FAILED, "planted_error", "planted in a later call");
#elif defined(MEET)
    static atomic_int met;
    for (int i = 0; i < 10000 && !atomic_load(&met); i++) {
        if (atomic_load(&inside) > 1)
            atomic_store(&met, 1);
        pause_a_little();
    }
    if (!atomic_load(&met))
        status = no(error, STRUCTURES_STATUS_FAILED, "alone", "no second call came");
#elif defined(ALONE)
    for (int i = 0; i < 20; i++) {
        if (atomic_load(&inside) > 1)
            status = STRUCTURES_STATUS_FAILED;
        pause_a_little();
    }
    if (status)
        no(error, status, "raced", "two calls of one form met");
#elif defined(NO_ERROR_TEXT)
    status = STRUCTURES_STATUS_FAILED;
#endif
    if (status == STRUCTURES_STATUS_OK)
        status = spoiled_call(form_instance, ctx, in, n_in, out, n_out, states, n_states, error);
    atomic_fetch_sub(&inside, 1);
    return status;
}

#ifdef LONGER
#define TAIL void *later[8]
#define TAIL_WORDS {(void *)(size_t)0xbad, (void *)(size_t)0xbad}
#else
#define TAIL char none
#define TAIL_WORDS 0
#endif
#ifndef API_MINOR
#define API_MINOR STRUCTURES_API_MINOR
#endif
typedef struct { structures_form_vtable table; TAIL; } form_tables;
typedef struct { structures_plugin_vtable table; TAIL; } plugin_tables;
#ifndef LONGER
#define WHOLE(type) sizeof(((type *)0)->table)
#else
#define WHOLE(type) sizeof(type)
#endif
#ifndef FORM_SIZE
#define FORM_SIZE WHOLE(form_tables)
#endif
#ifndef PLUGIN_SIZE
#define PLUGIN_SIZE WHOLE(plugin_tables)
#endif

#ifndef NO_FORM_TABLE
static const form_tables FIXTURE_FORMS = {
    {.struct_size = FORM_SIZE, .api_minor = API_MINOR, .call = fixture_call,
     .facts = fixture_facts, .release = fixture_release},
    TAIL_WORDS,
};
#endif

/* `devices` lies behind what 1.0 had: a table that says so must not have it read. */
static structures_status not_read(void *p, structures_bytes *out, structures_error *error)
{
    (void)p;
    (void)out;
    return no(error, STRUCTURES_STATUS_FAILED, "read_past_the_end", "an entry behind the table");
}

#ifdef DEVICES
static void never_called(void)
{
}
#define TEN never_called, never_called, never_called, never_called, never_called, never_called,    \
            never_called, never_called, never_called, never_called
static const struct {
    uint32_t size, minor;
    void (*entries[10])(void);
} FIXTURE_DEVICE = {STRUCTURES_DEVICE_VTABLE_SIZE_1_0, API_MINOR, {TEN}};
#define DEVICE_TABLE (const structures_device_vtable *)&FIXTURE_DEVICE
#else
#define DEVICE_TABLE NULL
#endif

static const plugin_tables FIXTURE_PLUGIN = {
    {.struct_size = PLUGIN_SIZE, .api_minor = API_MINOR, .describe = fixture_describe,
     .open = fixture_open, .close = fixture_close, .probe = fixture_probe,
#ifdef NULL_ENTRY
     .bind = NULL,
#else
     .bind = fixture_bind,
#endif
#ifdef NO_FORM_TABLE
     .form = NULL,
#else
     .form = &FIXTURE_FORMS.table,
#endif
     .device = DEVICE_TABLE, .devices = not_read},
    TAIL_WORDS,
};

#ifdef OTHER_MAJOR
#define DOOR structures_plugin_v2
#else
#define DOOR structures_plugin_v1
#endif
STRUCTURES_EXPORT const structures_plugin_vtable *DOOR(const structures_host_vtable *host);

const structures_plugin_vtable *DOOR(const structures_host_vtable *host)
{
    /* The sample's door is not this library's. */
    if (!sample_door(host))
        return NULL;
#ifdef NO_TABLE
    return NULL;
#endif
#ifdef NEEDS_LONGER_HOST
    if (host && host->struct_size < 4096)
        return NULL;
#endif
    return &FIXTURE_PLUGIN.table;
}
