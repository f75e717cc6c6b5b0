#include "json.h"

#include <string.h>

/* Deeper than anything the host sends; keeps a hostile text from exhausting the stack. */
#define DEEPEST 32

static const char *blank(json v)
{
    while (v.at < v.end && (*v.at == ' ' || *v.at == '\t' || *v.at == '\n' || *v.at == '\r'))
        v.at++;
    return v.at;
}

/* Past the string that starts at v.at; null when it does not end. */
static const char *past_string(json v)
{
    for (v.at++; v.at < v.end; v.at++) {
        if (*v.at == '\\')
            v.at++;
        else if (*v.at == '"')
            return v.at + 1;
    }
    return NULL;
}

/* Past the value that starts at v.at; null when it does not end. */
static const char *past(json v, int depth)
{
    if (v.at >= v.end || depth > DEEPEST)
        return NULL;
    if (*v.at == '"')
        return past_string(v);
    if (*v.at != '{' && *v.at != '[') {
        const char *start = v.at;
        while (v.at < v.end && !strchr(",]} \t\n\r", *v.at))
            v.at++;
        return v.at > start ? v.at : NULL;
    }
    const char close = *v.at == '{' ? '}' : ']';
    v.at++;
    for (;;) {
        v.at = blank(v);
        if (v.at >= v.end)
            return NULL;
        if (*v.at == close)
            return v.at + 1;
        if (*v.at == ',' || *v.at == ':') {
            v.at++;
            continue;
        }
        v.at = past(v, depth + 1);
        if (!v.at)
            return NULL;
    }
}

json json_of(const void *text, size_t len)
{
    json v = {(const char *)text, (const char *)text + len};
    if (len == 0)
        v.at = v.end = "";
    v.at = blank(v);
    return v;
}

bool json_member(json object, const char *key, json *out)
{
    if (object.at >= object.end || *object.at != '{')
        return false;
    for (object.at++;;) {
        object.at = blank(object);
        if (object.at >= object.end || *object.at != '"')
            return false;
        json name = object;
        object.at = past_string(object);
        if (!object.at)
            return false;
        name.end = object.at;
        object.at = blank(object);
        if (object.at >= object.end || *object.at != ':')
            return false;
        object.at++;
        object.at = blank(object);
        const char *after = past(object, 0);
        if (!after)
            return false;
        if (json_is(name, key)) {
            out->at = object.at;
            out->end = after;
            return true;
        }
        object.at = after;
        object.at = blank(object);
        if (object.at >= object.end || *object.at != ',')
            return false;
        object.at++;
    }
}

bool json_item(json array, size_t index, json *out)
{
    if (array.at >= array.end || *array.at != '[')
        return false;
    for (array.at++;; index--) {
        array.at = blank(array);
        const char *after = array.at < array.end && *array.at != ']' ? past(array, 0) : NULL;
        if (!after)
            return false;
        if (index == 0) {
            out->at = array.at;
            out->end = after;
            return true;
        }
        array.at = after;
        array.at = blank(array);
        if (array.at >= array.end || *array.at != ',')
            return false;
        array.at++;
    }
}

bool json_is(json value, const char *text)
{
    size_t len = strlen(text);
    return (size_t)(value.end - value.at) == len + 2 && *value.at == '"' &&
           value.end[-1] == '"' && memcmp(value.at + 1, text, len) == 0;
}

bool json_u64(json value, uint64_t *out)
{
    if (value.at >= value.end)
        return false;
    *out = 0;
    for (; value.at < value.end; value.at++) {
        if (*value.at < '0' || *value.at > '9' || *out > (UINT64_MAX - 9) / 10)
            return false;
        *out = *out * 10 + (uint64_t)(*value.at - '0');
    }
    return true;
}
