/* SPDX-License-Identifier: Apache-2.0 */
/* JSON's rules against Jansson: texts made at random, and the same with bytes changed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/rng.h"
#include "support/grammar_drive.h"

#define MOST  4000
#define POWER 2 /* digits of an exponent */

static grammar_drive json;

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
  pkv_machine_state s;
  assert_true(pkv_machine_begin(&s, json.machine));
  for (size_t at = 0; at < t->size;) {
    size_t n = (size_t)pkv_rng_range(rng, 1, 5);
    if (n > t->size - at) n = t->size - at;
    assert_true(pkv_machine_feed(&s, json.machine, t->bytes + at, n));
    at += n;
  }
  return grammar_verdict_of(&json, s) == GRAMMAR_DONE;
}

/* Our bounds are not Jansson's. */
static bool long_number(const text *t) {
  int digits = 0;
  bool power = false;
  for (size_t i = 0; i < t->size; i++) {
    const char c = t->bytes[i];
    if (c >= '0' && c <= '9') {
      if (++digits > (power ? POWER : PKV_JSON_DIGITS)) return true;
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

static void test_bounds(void **state) {
  char deep[256] = "{\"a\":";
  size_t at = strlen(deep);
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
                                      "{\"a\":1234567890123456",
                                      "{,"};
  (void)state;
  for (int i = 1; i < PKV_JSON_LEVELS; i++)
    deep[at++] = '[';
  assert_int_equal(grammar_check(&json, deep, at), GRAMMAR_BEGUN);
  deep[at] = '[';
  assert_int_equal(grammar_check(&json, deep, at + 1), GRAMMAR_DEAD);
  deep[at] = '{';
  assert_int_equal(grammar_check(&json, deep, at + 1), GRAMMAR_DEAD);
  for (int i = 0; i <= PKV_JSON_BLANKS; i++)
    deep[at + (size_t)i] = ' ';
  assert_int_equal(grammar_check(&json, deep, at + PKV_JSON_BLANKS), GRAMMAR_BEGUN);
  assert_int_equal(grammar_check(&json, deep, at + PKV_JSON_BLANKS + 1), GRAMMAR_DEAD);
  for (size_t i = 0; i < sizeof never / sizeof *never; i++)
    if (grammar_check(&json, never[i], strlen(never[i])) != GRAMMAR_DEAD)
      fail_msg("accepted: %s", never[i]);
}

static int open_json(void **state) {
  (void)state;
  json_open(&json);
  return json.status == PKV_OK ? 0 : -1;
}

static int close_json(void **state) {
  (void)state;
  grammar_close(&json);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_against_jansson),
      cmocka_unit_test(test_bounds),
  };
  return cmocka_run_group_tests(tests, open_json, close_json);
}
