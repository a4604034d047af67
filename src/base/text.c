/* SPDX-License-Identifier: Apache-2.0 */
/* Strict number parsing, the bounded buffer, UTF-8. */
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool pkv_parse_i64(int64_t *value, const char *text, int64_t lo, int64_t hi) {
  if (text == NULL) return false;
  const bool negative = text[0] == '-';
  const char *c = text + negative;
  if (*c == '\0') return false;
  /* Collected as a negative number: its range is the larger one. */
  int64_t v = 0;
  for (; *c != '\0'; c++) {
    if (*c < '0' || *c > '9') return false;
    if (__builtin_mul_overflow(v, (int64_t)10, &v)) return false;
    if (__builtin_sub_overflow(v, (int64_t)(*c - '0'), &v)) return false;
  }
  if (!negative && __builtin_sub_overflow((int64_t)0, v, &v)) return false;
  if (v < lo || v > hi) return false;
  *value = v;
  return true;
}

static const char *skip_digits(const char *c) {
  while (*c >= '0' && *c <= '9')
    c++;
  return c;
}

/* [-] digits [. digits] [e [+-] digits], with a digit before or after the point. */
static bool is_decimal(const char *c) {
  c += *c == '-';
  const char *whole = c;
  c = skip_digits(c);
  ptrdiff_t digits = c - whole;
  if (*c == '.') {
    const char *fraction = c + 1;
    c = skip_digits(fraction);
    digits += c - fraction;
  }
  if (digits == 0) return false;
  if (*c == 'e' || *c == 'E') {
    c++;
    c += *c == '+' || *c == '-';
    const char *exponent = c;
    c = skip_digits(exponent);
    if (c == exponent) return false;
  }
  return *c == '\0';
}

bool pkv_parse_f64(double *value, const char *text, double lo, double hi) {
  if (text == NULL || !is_decimal(text)) return false;
  /* A host may have set a locale with a decimal comma. */
  const locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  if (c_locale == (locale_t)0) return false;
  char *end;
  const double v = strtod_l(text, &end, c_locale);
  freelocale(c_locale);
  if (*end != '\0' || !isfinite(v) || !(v >= lo && v <= hi)) return false;
  *value = v;
  return true;
}

/* What an empty buffer shows; never written. */
static char empty[1];

void pkv_buffer_init(pkv_buffer *b, size_t limit, const pkv_allocator *allocator) {
  b->data = empty;
  b->size = 0;
  b->capacity = 0;
  b->limit = limit < SIZE_MAX ? limit : SIZE_MAX - 1;
  b->allocator = pkv_allocator_or_default(allocator);
}

void pkv_buffer_deinit(pkv_buffer *b) {
  if (b->capacity > 0) pkv_free(&b->allocator, b->data, b->capacity);
  b->data = empty;
  b->size = 0;
  b->capacity = 0;
}

void pkv_buffer_clear(pkv_buffer *b) {
  b->size = 0;
  if (b->capacity > 0) b->data[0] = '\0';
}

/* Room for `count` more bytes and the terminator. */
static pkv_status reserve(pkv_buffer *b, size_t count, pkv_error *err) {
  PKV_CHECK(err, count <= b->limit - b->size, PKV_E_LIMIT,
            "%zu bytes and %zu more exceed the limit of %zu bytes", b->size, count, b->limit);
  const size_t need = b->size + count + 1;
  if (need <= b->capacity) return PKV_OK;
  size_t capacity = b->capacity < 64 ? 64 : b->capacity;
  while (capacity < need)
    capacity = capacity > SIZE_MAX / 2 ? need : capacity * 2;
  if (capacity > b->limit + 1) capacity = b->limit + 1;
  char *data = pkv_realloc(&b->allocator, b->capacity > 0 ? b->data : NULL, b->capacity, capacity);
  PKV_CHECK(err, data != NULL, PKV_E_NOMEM, "no memory for a buffer of %zu bytes", capacity);
  b->data = data;
  b->capacity = capacity;
  b->data[b->size] = '\0';
  return PKV_OK;
}

pkv_status pkv_buffer_append(pkv_buffer *b, const void *bytes, size_t count, pkv_error *err) {
  PKV_TRY(reserve(b, count, err));
  if (count > 0) memcpy(b->data + b->size, bytes, count);
  b->size += count;
  b->data[b->size] = '\0';
  return PKV_OK;
}

pkv_status pkv_buffer_printf(pkv_buffer *b, pkv_error *err, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const int n = vsnprintf(NULL, 0, format, args);
  va_end(args);
  PKV_CHECK(err, n >= 0, PKV_E_INVALID, "format \"%s\" cannot be printed", format);
  PKV_TRY(reserve(b, (size_t)n, err));
  va_start(args, format);
  vsnprintf(b->data + b->size, (size_t)n + 1, format, args);
  va_end(args);
  b->size += (size_t)n;
  return PKV_OK;
}

/* To the end of the file; the size a file claims is not trusted (pipes and /proc claim 0). */
static pkv_status read_all(pkv_buffer *b, int fd, const char *path, pkv_error *err) {
  char block[16384], reason[64];
  for (;;) {
    const ssize_t n = read(fd, block, sizeof block);
    if (n == 0) return PKV_OK;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return PKV_FAIL(err, PKV_E_IO, "path \"%s\" cannot be read: %s", path,
                      strerror_r(errno, reason, sizeof reason));
    PKV_CHECK(err, (size_t)n <= b->limit - b->size, PKV_E_LIMIT,
              "path \"%s\" holds more than %zu bytes", path, b->limit);
    PKV_TRY(pkv_buffer_append(b, block, (size_t)n, err));
  }
}

pkv_status pkv_buffer_read_file(pkv_buffer *b, const char *path, pkv_error *err) {
  PKV_CHECK(err, path != NULL, PKV_E_INVALID, "path is NULL");
  char reason[64];
  pkv_buffer_clear(b);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return PKV_FAIL(err, PKV_E_IO, "path \"%s\" cannot be opened: %s", path,
                    strerror_r(errno, reason, sizeof reason));
  const pkv_status status = read_all(b, fd, path, err);
  close(fd);
  if (status != PKV_OK) pkv_buffer_clear(b);
  return status;
}

/*
 * Looks at the sequence at the start of s[count], count >= 1: its length when it is well formed,
 * 0 when no more bytes could make it so, -1 when it is a proper prefix of a well-formed one.
 * Bounds of the second byte: Unicode standard, table 3-7.
 */
static int sequence(const unsigned char *s, size_t count) {
  const unsigned lead = s[0];
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const int length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  const unsigned lo = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned hi = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  for (int i = 1; i < length; i++) {
    if ((size_t)i >= count) return -1;
    if (s[i] < (i == 1 ? lo : 0x80) || s[i] > (i == 1 ? hi : 0xbf)) return 0;
  }
  return length;
}

bool pkv_utf8_valid(const char *bytes, size_t count) {
  const unsigned char *s = (const unsigned char *)bytes;
  for (size_t i = 0; i < count;) {
    const int n = sequence(s + i, count - i);
    if (n <= 0) return false;
    i += (size_t)n;
  }
  return true;
}

size_t pkv_utf8_incomplete_tail(const char *bytes, size_t count) {
  const unsigned char *s = (const unsigned char *)bytes;
  for (size_t n = 1; n <= 3 && n <= count; n++) {
    const unsigned c = s[count - n];
    if (c >= 0x80 && c < 0xc0) continue; /* a continuation: its lead stands before it */
    return sequence(s + count - n, n) < 0 ? n : 0;
  }
  return 0;
}
