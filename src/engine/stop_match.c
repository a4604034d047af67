/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/stop_match.h"

#include <string.h>

int32_t pkv_stop_bytes(const char *const *stop, int32_t count) {
  int32_t bytes = 0;
  for (int32_t i = 0; i < count; i++)
    bytes += (int32_t)strlen(stop[i]);
  return bytes;
}

void pkv_stop_free(pkv_stop_match *match, const pkv_allocator *allocator) {
  pkv_free(allocator, match->text, (size_t)match->capacity);
  pkv_free(allocator, match->failure, (size_t)match->capacity * sizeof *match->failure);
  match->text = NULL;
  match->failure = NULL;
  match->capacity = match->count = 0;
}

pkv_status pkv_stop_reserve(pkv_stop_match *match, int32_t bytes, const pkv_allocator *allocator,
                            pkv_error *err) {
  if (bytes <= match->capacity) return PKV_OK;
  pkv_stop_free(match, allocator);
  match->text = pkv_alloc(allocator, (size_t)bytes);
  match->failure = pkv_alloc(allocator, (size_t)bytes * sizeof *match->failure);
  match->capacity = bytes;
  if (match->text != NULL && match->failure != NULL) return PKV_OK;
  pkv_stop_free(match, allocator);
  return PKV_FAIL(err, PKV_E_NOMEM, "no memory for stop strings of %d bytes", (int)bytes);
}

static void build_failure(int16_t *failure, const unsigned char *text, int32_t length) {
  int32_t k = 0;
  failure[0] = 0;
  for (int32_t i = 1; i < length; i++) {
    while (k > 0 && text[i] != text[k])
      k = failure[k - 1];
    if (text[i] == text[k]) k++;
    failure[i] = (int16_t)k;
  }
}

void pkv_stop_set(pkv_stop_match *match, const char *const *stop, int32_t count) {
  int32_t first = 0;
  match->count = count;
  for (int32_t i = 0; i < count; i++) {
    const int32_t length = (int32_t)strlen(stop[i]);
    memcpy(match->text + first, stop[i], (size_t)length);
    build_failure(match->failure + first, match->text + first, length);
    match->length[i] = length;
    match->at[i] = 0;
    first += length;
  }
}

/* True: the whole string ends with this byte. */
static bool feed_byte(pkv_stop_match *match, int32_t i, int32_t first, unsigned char byte) {
  const unsigned char *const text = match->text + first;
  const int16_t *const failure = match->failure + first;
  int32_t k = match->at[i];
  while (k > 0 && text[k] != byte)
    k = failure[k - 1];
  if (text[k] == byte) k++;
  const bool whole = k == match->length[i];
  match->at[i] = whole ? failure[k - 1] : k;
  return whole;
}

bool pkv_stop_feed(int32_t *index, int32_t *bytes, pkv_stop_match *match, const char *text,
                   size_t count) {
  for (size_t at = 0; at < count; at++) {
    int32_t found = -1, first = 0;
    for (int32_t i = 0; i < match->count; i++) {
      if (feed_byte(match, i, first, (unsigned char)text[at]) &&
          (found < 0 || match->length[i] > match->length[found]))
        found = i;
      first += match->length[i];
    }
    if (found < 0) continue;
    *index = found;
    *bytes = match->length[found] + (int32_t)(count - 1 - at);
    return true;
  }
  return false;
}

int32_t pkv_stop_equals(const pkv_stop_match *match, const char *text, size_t count) {
  int32_t first = 0;
  for (int32_t i = 0; i < match->count; i++) {
    if ((size_t)match->length[i] == count && memcmp(match->text + first, text, count) == 0)
      return i;
    first += match->length[i];
  }
  return -1;
}
