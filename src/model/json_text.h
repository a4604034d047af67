/* SPDX-License-Identifier: Apache-2.0 */
/*
 * JSON files of a model folder: bounded before they are parsed (nesting, values), then read by key
 * with their type and range. Untrusted: every failure names file and key. A key that is null is
 * absent. The parser takes its memory from the C library.
 */
#ifndef PKV_MODEL_JSON_TEXT_H
#define PKV_MODEL_JSON_TEXT_H

#include <jansson.h>

#include "model/gguf.h"

#define PKV_JSON_MAX_VALUES 16777216u

/* E_FORMAT: no JSON in UTF-8, a key twice, or not an object; E_LIMIT: too deep, too many values.
   `file` only names it. The caller ends *out with json_decref. */
pkv_status pkv_json_parse(json_t **out, const char *file, const char *text, size_t bytes,
                          pkv_error *err);
/* The same of a file of at most max_bytes. *out is NULL and OK comes back when the file is not
   there and not required. */
pkv_status pkv_json_read(json_t **out, const char *folder, const char *file, bool required,
                         size_t max_bytes, const pkv_allocator *allocator, pkv_error *err);

/* Absent: *out keeps its value; E_FORMAT when required, of another type, or outside lo .. hi. */
pkv_status pkv_json_get_int(int64_t *out, const json_t *object, const char *file, const char *key,
                            bool required, int64_t lo, int64_t hi, pkv_error *err);
/* Integers count as numbers. */
pkv_status pkv_json_get_float(double *out, const json_t *object, const char *file, const char *key,
                              bool required, double lo, double hi, pkv_error *err);
pkv_status pkv_json_get_bool(bool *out, const json_t *object, const char *file, const char *key,
                             pkv_error *err);
/* Borrowed from the JSON value. */
pkv_status pkv_json_get_string(pkv_span *out, const json_t *object, const char *file,
                               const char *key, bool required, pkv_error *err);
/* NULL: absent, or null. */
const json_t *pkv_json_get(const json_t *object, const char *key);
/* Whether object[key] is exactly this string. */
bool pkv_json_says(const json_t *object, const char *key, const char *text);

#endif
