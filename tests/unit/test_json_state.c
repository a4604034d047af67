/* SPDX-License-Identifier: Apache-2.0 */
/* The JSON automaton against Jansson: texts made at random, and the same with bytes changed. */
#include "engine/json_state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/rng.h"

#define MOST 4000

typedef struct text {
  char bytes[MOST + 64];
  size_t size;
} text;

static void add(text *t, const char *bytes) {
  const size_t count = strlen(bytes);
  if (t->size + count > MOST) return;
  memcpy(t->bytes + t->size, bytes, count);
  t->size += count;
}

static const char *any(pkv_rng *rng, const char *const *list, uint64_t count) {
  return list[pkv_rng_below(rng, count)];
}

static void add_blanks(text *t, pkv_rng *rng) {
  static const char *const blanks[] = {"", "", "", " ", "\n", "\t", "\r\n ", "  "};
  add(t, any(rng, blanks, 8));
}

static void add_string(text *t, pkv_rng *rng) {
  static const char *const parts[] = {"a",
                                      "Zz9",
                                      " ",
                                      "\\n",
                                      "\\\"",
                                      "\\u00e9",
                                      "\xc3\xa9",
                                      "\\u12aB",
                                      "\xe4\xb8\x96",
                                      "\\ud83d\\ude38",
                                      "\xf0\x9f\x98\xb8",
                                      "\\/",
                                      "{",
                                      "]",
                                      "\x7f",
                                      "\xed\x9f\xbf"};
  add(t, "\"");
  for (uint64_t i = pkv_rng_below(rng, 5); i > 0; i--)
    add(t, any(rng, parts, 16));
  add(t, "\"");
}

static void add_value(text *t, pkv_rng *rng, int depth) {
  static const char *const scalars[] = {"0",    "-0",   "12",    "-3.5",  "1e5",  "2E-7", "0.25e+1",
                                        "true", "null", "false", "9.000", "-0.1", "70",   "8e0"};
  const uint64_t kind = pkv_rng_below(rng, depth > 5 ? 2 : 4);
  add_blanks(t, rng);
  if (kind == 0) {
    add(t, any(rng, scalars, 14));
  } else if (kind == 1) {
    add_string(t, rng);
  } else {
    const bool array = kind == 2;
    add(t, array ? "[" : "{");
    const uint64_t count = pkv_rng_below(rng, 4);
    for (uint64_t i = 0; i < count; i++) {
      if (i > 0) add(t, ",");
      if (!array) {
        add_blanks(t, rng);
        add_string(t, rng);
        add_blanks(t, rng);
        add(t, ":");
      }
      add_value(t, rng, depth + 1);
    }
    add_blanks(t, rng);
    add(t, array ? "]" : "}");
  }
  add_blanks(t, rng);
}

static void make(text *t, pkv_rng *rng) {
  t->size = 0;
  add_blanks(t, rng);
  add(t, "{");
  const uint64_t count = pkv_rng_below(rng, 4);
  for (uint64_t i = 0; i < count; i++) {
    add(t, i > 0 ? "," : "");
    add_blanks(t, rng);
    add_string(t, rng);
    add(t, ":");
    add_value(t, rng, 0);
  }
  add(t, "}");
}

static bool jansson_accepts(const text *t) {
  json_t *const value = json_loadb(t->bytes, t->size, 0, NULL);
  const bool object = json_is_object(value);
  json_decref(value);
  return object;
}

/* In pieces of any size. */
static bool we_accept(const text *t, pkv_rng *rng) {
  pkv_json_state s;
  pkv_json_begin(&s);
  for (size_t at = 0; at < t->size;) {
    size_t n = (size_t)pkv_rng_range(rng, 1, 5);
    if (n > t->size - at) n = t->size - at;
    if (!pkv_json_feed(&s, t->bytes + at, n)) return false;
    at += n;
  }
  return pkv_json_done(&s);
}

/* Our bounds are not Jansson's. */
static bool long_number(const text *t) {
  int digits = 0;
  bool power = false;
  for (size_t i = 0; i < t->size; i++) {
    const char c = t->bytes[i];
    if (c >= '0' && c <= '9') {
      if (++digits > (power ? JSON_POWER : JSON_DIGITS)) return true;
      continue;
    }
    digits = 0;
    power = c == 'e' || c == 'E' || (power && (c == '+' || c == '-'));
  }
  return false;
}

static void test_against_jansson(void **state) {
  (void)state;
  static text t;
  pkv_rng rng;
  pkv_rng_init(&rng, 77);
  int accepted = 0, refused = 0;
  for (int round = 0; round < 60000; round++) {
    make(&t, &rng);
    if (t.size > MOST - 100) continue;
    for (int k = round % 3; k > 0 && t.size > 1; k--) { /* a byte changed, lost, or twice */
      static const char bytes[] = "{}[]\",:\\u0d8eE+-.9 \n\xc3\x80\xed\xf4tn";
      const size_t at = (size_t)pkv_rng_below(&rng, t.size);
      const uint64_t how = pkv_rng_below(&rng, 3);
      if (how == 0) t.bytes[at] = bytes[pkv_rng_below(&rng, sizeof bytes - 1)];
      if (how == 1) memmove(t.bytes + at, t.bytes + at + 1, --t.size - at);
      if (how == 2) memmove(t.bytes + at + 1, t.bytes + at, t.size++ - at);
    }
    while (t.size > 0 && strchr(" \t\r\n", t.bytes[t.size - 1]) != NULL)
      t.size--; /* we end at the closing brace */
    t.bytes[t.size] = 0;
    if (long_number(&t)) continue;
    const bool theirs = jansson_accepts(&t), ours = we_accept(&t, &rng);
    if (ours != theirs) fail_msg("we say %d, Jansson %d: %s", ours, theirs, t.bytes);
    accepted += ours;
    refused += !ours;
  }
  assert_true(accepted > 20000 && refused > 10000);
}

/* What is accepted so far can always be completed: the shortest way out is found. */
static void test_no_dead_ends(void **state) {
  (void)state;
  static const char out[] = "\"}]0:,\\uduc1delsrua1\x80\x90\xa0";
  static text t;
  pkv_rng rng;
  pkv_rng_init(&rng, 5);
  for (int round = 0; round < 3000; round++) {
    pkv_json_state s;
    make(&t, &rng);
    pkv_json_begin(&s);
    assert_true(pkv_json_feed(&s, t.bytes, (size_t)pkv_rng_below(&rng, t.size)));
    int steps = 0;
    while (!pkv_json_done(&s)) {
      size_t best = sizeof out;
      for (size_t i = 0; i + 1 < sizeof out && best == sizeof out; i++) {
        pkv_json_state next = s;
        if (pkv_json_feed(&next, out + i, 1)) best = i;
      }
      if (best == sizeof out && s.mode == 0) {
        assert_true(pkv_json_feed(&s, "{", 1));
        continue;
      }
      if (best == sizeof out) fail_msg("mode %d: no way on", (int)s.mode);
      assert_true(pkv_json_feed(&s, out + best, 1));
      assert_true(++steps < 2000);
    }
  }
}

static void test_bounds(void **state) {
  (void)state;
  pkv_json_state s;
  pkv_json_begin(&s);
  assert_true(pkv_json_feed(&s, "{\"a\":", 5));
  for (int i = 1; i < JSON_DEPTH; i++)
    assert_true(pkv_json_feed(&s, "[", 1));
  pkv_json_state deep = s;
  assert_false(pkv_json_feed(&deep, "[", 1));
  deep = s;
  assert_false(pkv_json_feed(&deep, "{", 1));
  for (int i = 0; i < JSON_BLANKS; i++)
    assert_true(pkv_json_feed(&s, " ", 1));
  assert_false(pkv_json_feed(&s, " ", 1));
  static const char *const never[] = {"[",
                                      "\"",
                                      "1",
                                      "{}x",
                                      "{\"a\":1}\n",
                                      "{\"\\u0000\"",
                                      "{\"\\ud83d\"",
                                      "{\"\\ude38",
                                      "{\"\xed\xa0",
                                      "{\"\xc0",
                                      "{\"a\":01",
                                      "{,"};
  for (size_t i = 0; i < sizeof never / sizeof *never; i++) {
    pkv_json_begin(&s);
    if (pkv_json_feed(&s, never[i], strlen(never[i]))) fail_msg("accepted: %s", never[i]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_against_jansson),
      cmocka_unit_test(test_no_dead_ends),
      cmocka_unit_test(test_bounds),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
