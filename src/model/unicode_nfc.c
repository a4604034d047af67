/* SPDX-License-Identifier: Apache-2.0 */
#include "model/unicode_nfc.h"

#include <string.h>

#include <utf8proc.h>

#define CLASSES   256
#define FEW_MARKS 32 /* up to so many, insertion is faster than counting */
#define MAX_PARTS 32 /* code points that one decomposes into; the longest known has 4 */

typedef struct points {
  pkv_allocator allocator;
  utf8proc_int32_t *at, *spare;
  size_t count, capacity;
} points;

static unsigned class_of(utf8proc_int32_t point) {
  return (unsigned)utf8proc_get_property(point)->combining_class & (CLASSES - 1);
}

static pkv_status reserve(points *p, size_t more, pkv_error *err) {
  if (p->capacity - p->count >= more) return PKV_OK;
  const size_t capacity = p->capacity * 2 + more + 64; /* no more than a few times the text */
  utf8proc_int32_t *grown =
      pkv_realloc(&p->allocator, p->at, p->capacity * sizeof *p->at, capacity * sizeof *p->at);
  PKV_CHECK(err, grown, PKV_E_NOMEM, "no memory to normalize %zu characters", capacity);
  p->at = grown;
  pkv_free(&p->allocator, p->spare, p->capacity * sizeof *p->spare);
  p->capacity = capacity;
  p->spare = pkv_alloc(&p->allocator, capacity * sizeof *p->spare);
  if (!p->spare) { /* both tables have the capacity, or neither is kept */
    pkv_free(&p->allocator, p->at, capacity * sizeof *p->at);
    p->at = NULL;
    p->capacity = p->count = 0;
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory to normalize %zu characters", capacity);
  }
  return PKV_OK;
}

static void sort_few(utf8proc_int32_t *at, size_t count) {
  for (size_t i = 1; i < count; i++) {
    const utf8proc_int32_t point = at[i];
    size_t k = i;
    for (; k > 0 && class_of(at[k - 1]) > class_of(point); k--)
      at[k] = at[k - 1];
    at[k] = point;
  }
}

static void sort_many(utf8proc_int32_t *at, utf8proc_int32_t *spare, size_t count) {
  size_t start[CLASSES + 1] = {0};
  for (size_t i = 0; i < count; i++)
    start[class_of(at[i]) + 1]++;
  for (size_t c = 0; c < CLASSES; c++)
    start[c + 1] += start[c];
  for (size_t i = 0; i < count; i++)
    spare[start[class_of(at[i])]++] = at[i];
  memcpy(at, spare, count * sizeof *at);
}

/* Each run of marks in the order of their classes, equal ones as they came. */
static void order_marks(points *p) {
  for (size_t i = 0; i < p->count;) {
    size_t end = i;
    while (end < p->count && class_of(p->at[end]) != 0)
      end++;
    if (end - i > FEW_MARKS)
      sort_many(p->at + i, p->spare, end - i);
    else if (end - i > 1)
      sort_few(p->at + i, end - i);
    i = end + 1;
  }
}

/* Well-formed text. */
static pkv_status normalize(pkv_buffer *out, points *p, const char *text, size_t bytes,
                            pkv_error *err) {
  p->count = 0;
  for (size_t i = 0; i < bytes;) {
    utf8proc_int32_t point, parts[MAX_PARTS];
    int boundary = 0;
    const utf8proc_ssize_t n =
        utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(bytes - i), &point);
    PKV_ASSERT(n > 0); /* formed_until asked the same */
    i += (size_t)n;
    const utf8proc_ssize_t count = utf8proc_decompose_char(
        point, parts, MAX_PARTS, UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &boundary);
    PKV_CHECK(err, count >= 0 && count <= MAX_PARTS, PKV_E_INTERNAL,
              "U+%04X decomposes into %lld code points", (unsigned)point, (long long)count);
    PKV_TRY(reserve(p, (size_t)count, err));
    memcpy(p->at + p->count, parts, (size_t)count * sizeof *parts);
    p->count += (size_t)count;
  }
  order_marks(p);
  const utf8proc_ssize_t composed = utf8proc_normalize_utf32(p->at, (utf8proc_ssize_t)p->count,
                                                             UTF8PROC_COMPOSE | UTF8PROC_STABLE);
  PKV_CHECK(err, composed >= 0, PKV_E_INTERNAL, "the text cannot be composed");
  for (utf8proc_ssize_t i = 0; i < composed; i++) {
    utf8proc_uint8_t encoded[4];
    const utf8proc_ssize_t n = utf8proc_encode_char(p->at[i], encoded);
    PKV_TRY(pkv_buffer_append(out, encoded, (size_t)n, err));
  }
  return PKV_OK;
}

/* End of the ASCII bytes from `at` on, but for the last one before something else: that one may
   compose with what follows. */
static size_t plain_until(const char *text, size_t at, size_t bytes) {
  size_t end = at;
  while (end < bytes && (unsigned char)text[end] < 0x80)
    end++;
  return end == bytes || end == at ? end : end - 1;
}

/* End of the well-formed text from `at` on, up to an ASCII run that is long enough to skip. */
static size_t formed_until(const char *text, size_t at, size_t bytes) {
  size_t end = at;
  while (end < bytes) {
    utf8proc_int32_t point;
    const utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + end,
                                                (utf8proc_ssize_t)(bytes - end), &point);
    if (n <= 0) break;
    end += (size_t)n;
  }
  return end;
}

static pkv_status normalize_all(pkv_buffer *out, points *p, const char *text, size_t bytes,
                                pkv_error *err) {
  for (size_t at = 0; at < bytes;) {
    const size_t plain = plain_until(text, at, bytes);
    PKV_TRY(pkv_buffer_append(out, text + at, plain - at, err));
    at = plain;
    const size_t formed = formed_until(text, at, bytes);
    PKV_TRY(normalize(out, p, text + at, formed - at, err));
    at = formed;
    if (at == bytes || formed > plain) continue;
    PKV_TRY(pkv_buffer_append(out, text + at, 1, err)); /* no character starts here */
    at++;
  }
  return PKV_OK;
}

pkv_status pkv_nfc(pkv_buffer *out, const char *text, size_t bytes, pkv_error *err) {
  points p = {.allocator = out->allocator};
  const pkv_status status = normalize_all(out, &p, text, bytes, err);
  pkv_free(&p.allocator, p.at, p.capacity * sizeof *p.at);
  pkv_free(&p.allocator, p.spare, p.capacity * sizeof *p.spare);
  return status;
}
