/*
 * Just enough JSON to read what the host says: a value is a range of the text, found by member or
 * index, and compared or converted on the spot. Nothing is allocated and nothing is written; text
 * that is not JSON is not found.
 */
#ifndef STRUCTURES_JSON_H
#define STRUCTURES_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct json {
    const char *at;
    const char *end;
} json;

/* The value of a whole text. */
json json_of(const void *text, size_t len);

/* The value of a member of an object; false when there is none. */
bool json_member(json object, const char *key, json *out);

/* The index-th value of an array; false when there is none. */
bool json_item(json array, size_t index, json *out);

/* Whether it is this string. Keys and names are compared as they stand: an escape never matches. */
bool json_is(json value, const char *text);

/* A whole number that is not negative. */
bool json_u64(json value, uint64_t *out);

#endif
