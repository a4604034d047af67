/* SPDX-License-Identifier: Apache-2.0 */
/* Stop strings across any borders, against a search in the whole text. */
#include "engine/stop_match.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"

static const pkv_allocator *allocator(void) {
  static pkv_allocator a;
  a = pkv_allocator_default();
  return &a;
}

static void set(pkv_stop_match *m, const char *const *stop, int32_t count) {
  assert_int_equal(pkv_stop_reserve(m, pkv_stop_bytes(stop, count), allocator(), NULL), PKV_OK);
  pkv_stop_set(m, stop, count);
}

/* The first end of any string in the text, of those the longest string; false: none. */
static bool naive(size_t *end, int32_t *which, const char *text, size_t bytes,
                  const char *const *stop, int32_t count) {
  for (*end = 1; *end <= bytes; (*end)++) {
    *which = -1;
    for (int32_t i = 0; i < count; i++) {
      const size_t length = strlen(stop[i]);
      if (length > *end || memcmp(text + *end - length, stop[i], length) != 0) continue;
      if (*which < 0 || length > strlen(stop[*which])) *which = i;
    }
    if (*which >= 0) return true;
  }
  return false;
}

static void random_text(char *text, size_t bytes, pkv_rng *rng) {
  for (size_t i = 0; i < bytes; i++)
    text[i] = (char)('a' + (int)pkv_rng_below(rng, 2));
  text[bytes] = 0;
}

static void test_random(void **state) {
  (void)state;
  pkv_stop_match m = {0};
  pkv_rng rng;
  pkv_rng_init(&rng, 5);
  int hits = 0, across = 0;
  for (int round = 0; round < 20000; round++) {
    char text[80], words[4][16];
    const char *stop[4];
    const int32_t count = (int32_t)pkv_rng_range(&rng, 1, 4);
    for (int32_t i = 0; i < count; i++) {
      random_text(words[i], (size_t)pkv_rng_range(&rng, 1, 12), &rng);
      stop[i] = words[i];
    }
    const size_t bytes = (size_t)pkv_rng_range(&rng, 0, 70);
    random_text(text, bytes, &rng);
    set(&m, stop, count);
    size_t end = 0, at = 0;
    int32_t which = -1, index = -1, tail = -1;
    const bool there = naive(&end, &which, text, bytes, stop, count);
    bool found = false;
    while (at < bytes && !found) { /* tokens of 0 to 5 bytes */
      size_t n = (size_t)pkv_rng_range(&rng, 0, 5);
      if (n > bytes - at) n = bytes - at;
      found = pkv_stop_feed(&index, &tail, &m, text + at, n);
      at += n;
      if (found) across += at - n > end - strlen(stop[which]);
    }
    assert_int_equal(found, there);
    if (!found) continue;
    hits++;
    assert_int_equal(strlen(stop[index]), strlen(stop[which]));
    assert_string_equal(stop[index], stop[which]);
    assert_int_equal(at - (size_t)tail, end - strlen(stop[which]));
  }
  assert_true(hits > 5000 && across > 1000);
  pkv_stop_free(&m, allocator());
}

static void test_whole_texts(void **state) {
  (void)state;
  static const char *const stop[] = {"</s>", "<|end|>", "\xf0\x9f\x98\xb8"};
  pkv_stop_match m = {0};
  int32_t index = -1, bytes = -1;
  set(&m, stop, 3);
  assert_int_equal(pkv_stop_equals(&m, "<|end|>", 7), 1);
  assert_int_equal(pkv_stop_equals(&m, "<|end|", 6), -1);
  assert_int_equal(pkv_stop_equals(&m, "", 0), -1);
  /* A character of four bytes in two tokens, with more text behind it. */
  assert_false(pkv_stop_feed(&index, &bytes, &m, "x\xf0\x9f", 3));
  assert_true(pkv_stop_feed(&index, &bytes, &m, "\x98\xb8 y", 4));
  assert_int_equal(index, 2);
  assert_int_equal(bytes, 6);
  pkv_stop_free(&m, allocator());
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random),
      cmocka_unit_test(test_whole_texts),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
