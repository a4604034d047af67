/* SPDX-License-Identifier: Apache-2.0 */
/* Bounded text: strict number parsing, and a byte buffer that must state its maximum. */
#ifndef PKV_BASE_TEXT_H
#define PKV_BASE_TEXT_H

#include <stdbool.h>

#include "base/alloc.h"

/* Whole text, base 10, no blanks, within lo .. hi; false otherwise (value untouched). */
bool pkv_parse_i64(int64_t *value, const char *text, int64_t lo, int64_t hi);
/* Whole text, finite, within lo .. hi. */
bool pkv_parse_f64(double *value, const char *text, double lo, double hi);

/* Grows up to `limit` bytes (E_LIMIT beyond). data is always terminated with a zero byte not
 * counted in size. */
typedef struct pkv_buffer {
  char *data;
  size_t size, capacity, limit;
  pkv_allocator allocator;
} pkv_buffer;

void pkv_buffer_init(pkv_buffer *b, size_t limit, const pkv_allocator *allocator);
void pkv_buffer_deinit(pkv_buffer *b);
void pkv_buffer_clear(pkv_buffer *b);
pkv_status pkv_buffer_append(pkv_buffer *b, const void *bytes, size_t count, pkv_error *err);
pkv_status pkv_buffer_printf(pkv_buffer *b, pkv_error *err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Reads a whole file of at most `limit` bytes into an initialised buffer. */
pkv_status pkv_buffer_read_file(pkv_buffer *b, const char *path, pkv_error *err);

/* True when the bytes are well-formed UTF-8 (no surrogates, no overlong forms). */
bool pkv_utf8_valid(const char *bytes, size_t count);
/* How many of the last 0..3 bytes belong to a sequence that is still incomplete: hold them back
 * when streaming. */
size_t pkv_utf8_incomplete_tail(const char *bytes, size_t count);

#endif
