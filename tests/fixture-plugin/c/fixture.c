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
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

#define FIXTURE_FORM(name, format, band, weights, quantises)                                      \
    "{\"structure\":\"linear_proj\",\"spec_versions\":[1],\"name\":\"" name "\",\"format\":\""    \
    format "\",\"spans\":[\"proj\"],\"dtypes\":[\"f32\"],\"variants\":{\"bias\":[\"none\","       \
    "\"add\"],\"epilogue\":[\"none\",\"residual_add\"]},\"band\":{" band "},\"weight_format\":\"" weights  \
    "\",\"tolerance\":1e-4,\"precision_rank\":0,\"quantises\":" quantises                         \
    ",\"concurrent\":" CONCURRENT "}"

static const char FIXTURE_DESCRIPTION[] =
    "{\"schema\":1,\"id\":\"" ID "\",\"vendor\":\"Fixtures\",\"version\":\"0.1.0\",\"api\":\"" API
    "\"," PANIC_FIELD "\"archs\":[\"" ARCH "\"],\"requires\":[" REQUIRES "],\"forms\":["
    FIXTURE_FORM("f32", "none", "", "none", "false") ","
    FIXTURE_FORM("w8a16_static", "w8a16_static", "\"rows\":[1,8]", "int8_per_channel", "true") "]}";

static structures_status fixture_describe(structures_bytes *out, structures_error *error)
{
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
        status = call(form_instance, ctx, in, n_in, out, n_out, states, n_states, error);
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
    {.struct_size = FORM_SIZE, .api_minor = API_MINOR, .call = fixture_call, .facts = facts,
     .release = release_form},
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
     .open = open_plugin, .close = fixture_close, .probe = probe,
#ifdef NULL_ENTRY
     .bind = NULL,
#else
     .bind = bind,
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
