/*
 * What every backend in C needs beside structures_plugin.h: owned answers and errors, checks of views, the slots of a
 * bind, axes of a document, the host's int8. Functions only, all of them private to the file that includes it; a
 * scaffold gets a copy of its own, to be changed at will.
 */
#ifndef STRUCTURES_SUPPORT_H
#define STRUCTURES_SUPPORT_H

#include "structures_plugin.h"

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

/* Name of this architecture in `archs`. */
#if defined(__x86_64__)
#define ARCH "x86_64"
#elif defined(__aarch64__)
#define ARCH "aarch64"
#elif defined(__riscv)
#define ARCH "riscv64"
#else
#error "an architecture the host has a name for"
#endif

/* Answers. ---------------------------------------------------------------------------------- */

/* Whoever makes bytes frees them: the host calls this, with the struct we filled. */
static inline void release_bytes(structures_bytes *bytes)
{
    if (!bytes)
        return;
    free(bytes->ptr);
    memset(bytes, 0, sizeof *bytes);
}

/* Owned bytes with a copy of the text; none when memory is short. */
static inline structures_bytes own(const char *text, size_t len)
{
    structures_bytes bytes = {0};
    bytes.ptr = malloc(len ? len : 1);
    if (bytes.ptr) {
        memcpy(bytes.ptr, text, len);
        bytes.len = bytes.capacity = len;
        bytes.release = release_bytes;
    }
    return bytes;
}

/* Fills the error and gives the status back. */
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static inline structures_status
no(structures_error *error, structures_status status, const char *code, const char *format, ...)
{
    if (error) {
        char text[512];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        error->code = own(code, strlen(code));
        error->message = own(text, strlen(text));
    }
    return status;
}

static inline structures_status answer(structures_bytes *out, const char *text, structures_error *error)
{
    if (!out)
        return no(error, STRUCTURES_STATUS_INVALID, "argument", "the out-parameter is null");
    *out = own(text, strlen(text));
    if (!out->ptr)
        return no(error, STRUCTURES_STATUS_FAILED, "memory", "no memory for an answer");
    return STRUCTURES_STATUS_OK;
}

static inline bool text_is(structures_str text, const char *wanted)
{
    return text.len > 0 && text.len == strlen(wanted) && memcmp(text.ptr, wanted, text.len) == 0;
}

/* Documents. -------------------------------------------------------------------------------- */

/* Whether an axis has one of two values, or none. */
static inline bool axis_in(json variant, const char *axis, const char *a, const char *b)
{
    json value;
    return !json_member(variant, axis, &value) || json_is(value, a) || json_is(value, b);
}

/* Weights. ---------------------------------------------------------------------------------- */

/* The weight of a slot; null when it is absent. */
static inline const structures_tensor_view *weight(const structures_bind_args *args, const char *slot)
{
    for (size_t i = 0; i < args->n_weights; i++)
        if (text_is(args->weight_names[i], slot) && args->weights[i].dtype != 0)
            return &args->weights[i];
    return NULL;
}

/* One element of a host view of f32 or bf16; offset in elements. */
static inline float element(const structures_tensor_view *view, int64_t offset)
{
    float value;
    if (view->dtype == STRUCTURES_DTYPE_F32) {
        memcpy(&value, (const char *)view->data + offset * 4, sizeof value);
    } else {
        uint16_t half;
        memcpy(&half, (const char *)view->data + offset * 2, sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&value, &bits, sizeof value);
    }
    return value;
}

/* Whether rank, sizes and strides are ones that memory can have: no sum or product below overflows. */
static inline bool sane(const structures_tensor_view *view)
{
    const int64_t limit = INT64_MAX / 16;
    int64_t count = 1, reach = 0;
    if (view->rank > STRUCTURES_MAX_RANK)
        return false;
    for (uint32_t d = 0; d < view->rank; d++) {
        const int64_t dim = view->dims[d], stride = view->strides[d];
        if (dim < 0 || (dim > 0 && count > limit / dim))
            return false;
        count *= dim;
        if (dim <= 1 || stride == 0)
            continue;
        if (stride > limit || stride < -limit)
            return false;
        const int64_t step = stride < 0 ? -stride : stride;
        if (dim - 1 > (limit - reach) / step)
            return false;
        reach += (dim - 1) * step;
    }
    return true;
}

/* Weights in f32 or bf16, in host memory, at any strides that memory can have. */
static inline bool readable(const structures_tensor_view *view, uint32_t rank)
{
    const bool known = view->dtype == STRUCTURES_DTYPE_F32 || view->dtype == STRUCTURES_DTYPE_BF16;
    return known && view->rank == rank && view->device == 0 && view->data && sane(view);
}

/* The host's definition: max(amax / 127, 1e-8), half to even, -128 unused, NaN is 0. */
static inline void quantise(const float *values, size_t k, int8_t *codes, float *scale)
{
    float amax = 0;
    for (size_t i = 0; i < k; i++)
        amax = fmaxf(amax, fabsf(values[i]));
    *scale = fmaxf(amax / 127.0f, 1e-8f);
    for (size_t i = 0; i < k; i++) {
        float code = rintf(values[i] / *scale);
        codes[i] = isnan(code) ? 0 : (int8_t)fminf(fmaxf(code, -127.0f), 127.0f);
    }
}

#endif
