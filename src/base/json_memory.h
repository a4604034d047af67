/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jansson where there may be no memory. By itself it says "no JSON" of a text it had no memory for,
 * or aborts; copies without what it could not copy; goes on where it could not write a part; and
 * leaves to everybody whether an addition is looked at. Here nothing is lost without a word.
 */
#ifndef PKV_BASE_JSON_MEMORY_H
#define PKV_BASE_JSON_MEMORY_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/escape_alloc.h"
#include "base/text.h"

/* To a list, to an object; the value is theirs. What cannot be added takes the whole with it: *to
 * is NULL then, and stays so, which json_pack and whoever writes it out take for a failure. */
static inline void pkv_json_add(json_t **to, json_t *value) {
  if (json_array_append_new(*to, value) == 0) return;
  json_decref(*to);
  *to = NULL;
}

static inline void pkv_json_set(json_t **to, const char *key, json_t *value) {
  if (json_object_set_new(*to, key, value) == 0) return;
  json_decref(*to);
  *to = NULL;
}

/* Once, before any value is made: Jansson's memory from escape_alloc.h, for the two functions
 * below. A program's choice, not a library's: without it they do what Jansson does. */
static inline void pkv_json_watch_memory(void) {
  json_set_alloc_funcs(pkv_escape_malloc, pkv_escape_free);
}

/* json_loadb; *lost: NULL for want of memory. */
static inline json_t *pkv_json_load(bool *lost, const char *text, size_t bytes, size_t flags,
                                    json_error_t *where) {
  pkv_escape escape;
  *lost = true;
  if (setjmp(escape.back) != 0) return NULL;
  pkv_escape_begin(&escape);
  json_t *const value = json_loadb(text, bytes, flags, where);
  pkv_escape_end(&escape);
  *lost = value == NULL && json_error_code(where) == json_error_out_of_memory;
  return value;
}

/* json_deep_copy, NULL where it could not copy all. */
static inline json_t *pkv_json_deep_copy(const json_t *value) {
  pkv_escape escape;
  if (setjmp(escape.back) != 0) return NULL;
  pkv_escape_begin(&escape);
  json_t *const copy = json_deep_copy(value);
  pkv_escape_end(&escape);
  return copy;
}

/* json_copy of a list or an object, NULL where it could not copy all. */
static inline json_t *pkv_json_copy(const json_t *value) {
  json_t *const from = (json_t *)(uintptr_t)value;
  json_t *copy = json_is_array(value) ? json_array() : json_object();
  const char *key;
  size_t i;
  json_t *item;
  json_array_foreach(from, i, item) pkv_json_add(&copy, json_incref(item));
  json_object_foreach(from, key, item) pkv_json_set(&copy, key, json_incref(item));
  return copy;
}

typedef struct pkv_json_sink {
  pkv_buffer *out;
  pkv_status status; /* of the first piece that had no room: later ones may have it */
} pkv_json_sink;

static inline int pkv_json_sink_piece(const char *bytes, size_t count, void *user) {
  pkv_json_sink *const sink = (pkv_json_sink *)user;
  if (sink->status == PKV_OK) sink->status = pkv_buffer_append(sink->out, bytes, count, NULL);
  return sink->status == PKV_OK ? 0 : -1;
}

/* Behind what the buffer holds. E_LIMIT: it may not be that large; NULL is E_NOMEM. */
static inline pkv_status pkv_json_write(pkv_buffer *out, const json_t *value, size_t flags) {
  pkv_json_sink sink = {out, PKV_OK};
  const int failed = json_dump_callback(value, pkv_json_sink_piece, &sink, flags);
  if (sink.status != PKV_OK) return sink.status;
  return failed == 0 ? PKV_OK : PKV_E_NOMEM;
}

#endif
