/* SPDX-License-Identifier: Apache-2.0 */
/* Grammars: the language as it is written, what is refused, and random ones against a twin that
   tries everything. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/rng.h"
#include "support/grammar_drive.h"
#include "support/grammar_twin.h"

static void expect(const grammar_drive *d, const char *text, grammar_verdict want) {
  const grammar_verdict got = grammar_check(d, text, strlen(text));
  if (got != want) fail_msg("'%s': verdict %d, expected %d", text, (int)got, (int)want);
}

static void test_language(void **state) {
  static const char text[] = "# a comment\n"
                             "root ::= greeting (\", \" name){1,2} \"!\"? # another\n"
                             "greeting ::= \"Hi\" |\n"
                             "  \"Hello\" | \"\\x41\\u00e9\\U0001F600\"\r\n"
                             "\n"
                             "name ::= [A-Z] [^A-Z\\n\\]]* (\n \"-\" .)?\n"
                             "digits ::= [0-9]{3} [0-9]{2,} [0-9]{0,1}\n";
  grammar_drive d;
  (void)state;
  grammar_open(&d, text, NULL);
  if (d.status != PKV_OK) fail_msg("%s", d.err.text);
  expect(&d, "", GRAMMAR_BEGUN);
  expect(&d, "H", GRAMMAR_BEGUN);
  expect(&d, "Hi, Bo", GRAMMAR_WHOLE);
  expect(&d, "Hi, Bo-X!", GRAMMAR_DONE);
  expect(&d, "Hello, B, C!", GRAMMAR_WHOLE); /* ! belongs to a name, too */
  expect(&d, "Hello, B]", GRAMMAR_DEAD);
  expect(&d, "Hello, b", GRAMMAR_DEAD);
  expect(&d, "A\xc3\xa9\xf0\x9f\x98\x80, X", GRAMMAR_WHOLE);
  expect(&d, "A\xc3", GRAMMAR_BEGUN);
  expect(&d, "A\xc3\xa8", GRAMMAR_DEAD);
  expect(&d, "Hi, A\xe2\x82", GRAMMAR_BEGUN);
  expect(&d, "Hi, A\xed\xa0", GRAMMAR_DEAD); /* a surrogate */
  expect(&d, "Hi, A\xc0", GRAMMAR_DEAD);     /* overlong */
  grammar_close(&d);
}

static void test_refused(void **state) {
  static const struct {
    const char *text;
    pkv_status status;
    const char *says;
  } cases[] = {
      {"", PKV_E_FORMAT, "no rule named root"},
      {"a ::= \"x\"", PKV_E_FORMAT, "no rule named root"},
      {"root ::= b", PKV_E_FORMAT, "line 1: a rule of this name"},
      {"root ::= \"x\"\nroot ::= \"y\"", PKV_E_FORMAT, "line 2, column 1: this rule is there"},
      {"root ::= \"x", PKV_E_FORMAT, "line 1, column 10: this text is not closed"},
      {"root ::= [a", PKV_E_FORMAT, "not closed"},
      {"root ::= [z-a]", PKV_E_FORMAT, "backwards"},
      {"root ::= []", PKV_E_FORMAT, "empty"},
      {"root ::= (\"a\"", PKV_E_FORMAT, "parenthesis is not closed"},
      {"root ::= \"a\")", PKV_E_FORMAT, "cannot stand here"},
      {"root ::= \"a\"{3,2}", PKV_E_FORMAT, "backwards"},
      {"root ::= \"a\"{65537}", PKV_E_LIMIT, "65536"},
      {"root ::= \"a\"{99999999999999999999}", PKV_E_LIMIT, "65536"},
      {"root ::= \"\\q\"", PKV_E_FORMAT, "escape"},
      {"root ::= \"\\ud800\"", PKV_E_FORMAT, "no character"},
      {"root ::= <think>", PKV_E_UNSUPPORTED, "tokens"},
      {"root = \"a\"", PKV_E_FORMAT, "::= is expected"},
      {"root ::= root \"a\" | \"b\"", PKV_E_INVALID, "left recursive"},
      {"root ::= root", PKV_E_INVALID, "left recursive"},
      {"root ::= a\na ::= \"x\"? b\nb ::= \"y\"* root", PKV_E_INVALID, "left recursive"},
      {"root ::= (root)* \"a\"", PKV_E_INVALID, "left recursive"},
      {"root ::= \"a\" root", PKV_E_INVALID, "no text satisfies"},
      {"root ::= (((\"ab\"{60000}) \"c\"){1} \"d\"{60000}){3} \"e\"{60000} \"fg\"{60000} | "
       "\"hi\"{60000} | \"jk\"{60000}",
       PKV_E_LIMIT, "states"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    grammar_drive d;
    grammar_open(&d, cases[i].text, NULL);
    if (d.status != cases[i].status || strstr(d.err.text, cases[i].says) == NULL)
      fail_msg("'%s': status %d '%s', expected %d '%s'", cases[i].text, (int)d.status, d.err.text,
               (int)cases[i].status, cases[i].says);
    grammar_close(&d);
  }
}

static void takes(bool is_schema, const char *text, pkv_status status, const char *says) {
  grammar_drive d;
  if (is_schema)
    schema_open(&d, text, NULL);
  else
    grammar_open(&d, text, NULL);
  if (d.status != status || strstr(d.err.text, says) == NULL)
    fail_msg("%.40s...: status %d '%s', expected %d '%s'", text, (int)d.status, d.err.text,
             (int)status, says);
  grammar_close(&d);
}

/* So many schemas in each other, by reference. */
static void chain(char *text, size_t room, int count) {
  size_t at = (size_t)snprintf(text, room, "{\"$ref\":\"#/$defs/1\",\"$defs\":{");
  for (int i = 1; i < count; i++)
    at += (size_t)snprintf(text + at, room - at,
                           "\"%d\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/%d\"}},", i,
                           i + 1);
  (void)snprintf(text + at, room - at, "\"%d\":{\"type\":\"null\"}}}", count);
}

/* A list of so many JSON values, itself and the object around it included. */
static void values(char *text, size_t room, int count) {
  size_t at = (size_t)snprintf(text, room, "{\"enum\":[1");
  for (int i = 3; i < count; i++)
    at += (size_t)snprintf(text + at, room - at, ",%d", i);
  (void)snprintf(text + at, room - at, "]}");
}

/* Any of so many at once with any of as many: each with each is a schema of its own. */
static void product(char *text, size_t room, int count) {
  size_t at = (size_t)snprintf(text, room, "{\"allOf\":[");
  for (int side = 0; side < 2; side++) {
    at += (size_t)snprintf(text + at, room - at, "%s{\"anyOf\":[", side ? "," : "");
    for (int i = 0; i < count; i++)
      at += (size_t)snprintf(text + at, room - at, "%s{\"type\":\"array\",\"m%sItems\":%d}",
                             i ? "," : "", side ? "ax" : "in", i + side * count);
    at += (size_t)snprintf(text + at, room - at, "]}");
  }
  (void)snprintf(text + at, room - at, "]}");
}

/* A list of `count` schemas that hold nothing: with the list's own, count + 1 are looked at. */
static void nothings(char *text, size_t room, int count) {
  size_t at = (size_t)snprintf(text, room, "{\"anyOf\":[");
  for (int i = 0; i < count; i++)
    at += (size_t)snprintf(text + at, room - at, "%s{}", i ? "," : "");
  (void)snprintf(text + at, room - at, "]}");
}

/* Limits of base/limits.h: at each, and one past it. */
static void test_limits(void **state) {
  static char text[1 << 18];
  (void)state;
  for (size_t n = PKV_GRAMMAR_DEPTH; n <= PKV_GRAMMAR_DEPTH + 1; n++) {
    (void)snprintf(text, sizeof text, "root ::= ");
    memset(text + 9, '(', n);
    text[9 + n] = '.';
    memset(text + 10 + n, ')', n);
    text[10 + 2 * n] = '\0';
    takes(false, text, n == PKV_GRAMMAR_DEPTH ? PKV_OK : PKV_E_LIMIT,
          n == PKV_GRAMMAR_DEPTH ? "" : "nest");
  }
  takes(false, "root ::= \"a\"{65536}", PKV_OK, "");
  takes(false, "root ::= \"a\"{65537}", PKV_E_LIMIT, "65536");
  chain(text, sizeof text, PKV_SCHEMA_DEPTH / 2);
  takes(true, text, PKV_OK, "");
  chain(text, sizeof text, PKV_SCHEMA_DEPTH / 2 + 1);
  takes(true, text, PKV_E_LIMIT, "schemas lie in each other deeper than 128");
  values(text, sizeof text, PKV_SCHEMA_VALUES);
  takes(true, text, PKV_OK, "");
  values(text, sizeof text, PKV_SCHEMA_VALUES + 1);
  takes(true, text, PKV_E_LIMIT, "has more than 32768 values");
  product(text, sizeof text, 10);
  takes(true, text, PKV_OK, "");
  product(text, sizeof text, 127); /* 16,129 */
  takes(true, text, PKV_E_LIMIT, "more than 16000");
  /* 2^18 states, of which two are the start and the end */
  takes(false, "root ::= \"a\"{65536} \"a\"{65536} \"a\"{65536} \"a\"{65534}", PKV_OK, "");
  takes(false, "root ::= \"a\"{65536} \"a\"{65536} \"a\"{65536} \"a\"{65535}", PKV_E_LIMIT,
        "more than 262144 states");
  nothings(text, sizeof text, PKV_SCHEMA_WORK - 1);
  takes(true, text, PKV_OK, "");
  nothings(text, sizeof text, PKV_SCHEMA_WORK);
  takes(true, text, PKV_E_LIMIT, "more than 16000");
}

/* What could take long, or much: each is refused, or done in bounded time (J2, CVE-2025-57809). */
static void test_hostile(void **state) {
  static char text[300000];
  grammar_drive d;
  const int64_t begin = pkv_clock_ns();
  (void)state;
  (void)snprintf(text, sizeof text, "root ::= ");
  memset(text + 9, '(', 60000);
  text[60009] = '\0';
  grammar_open(&d, text, NULL);
  assert_int_equal(d.status, PKV_E_LIMIT);
  assert_non_null(strstr(d.err.text, "nest"));
  grammar_close(&d);
  memset(text, 'x', sizeof text - 1);
  grammar_open(&d, text, NULL);
  assert_int_equal(d.status, PKV_E_LIMIT);
  grammar_close(&d);
  size_t at = (size_t)snprintf(text, sizeof text, "root ::= r0\n"); /* a chain of rules */
  for (int i = 0; i < 8000; i++)
    at += (size_t)snprintf(text + at, sizeof text - at, "r%d ::= \"a\" r%d \"b\"\n", i, i + 1);
  (void)snprintf(text + at, sizeof text - at, "r8000 ::= \"x\"\n");
  grammar_open(&d, text, NULL);
  assert_int_equal(d.status, PKV_E_INVALID); /* 8000 open calls: no way to carry it out */
  grammar_close(&d);
  at = (size_t)snprintf(text, sizeof text, "root ::= "); /* many words that begin alike */
  for (int i = 0; i < 20000; i++)
    at += (size_t)snprintf(text + at, sizeof text - at, "%s\"w%05d\"", i == 0 ? "" : "|", i);
  grammar_open(&d, text, NULL);
  if (d.status != PKV_OK) fail_msg("%s", d.err.text);
  expect(&d, "w19999", GRAMMAR_DONE);
  expect(&d, "w2", GRAMMAR_DEAD);
  grammar_close(&d);
  at = (size_t)snprintf(text, sizeof text, "root ::= "); /* nothing, very often */
  for (int i = 0; i < 20000; i++)
    at += (size_t)snprintf(text + at, sizeof text - at, "(){65536} ");
  (void)snprintf(text + at, sizeof text - at, "\"a\"");
  grammar_open(&d, text, NULL);
  if (d.status != PKV_OK) fail_msg("%s", d.err.text);
  expect(&d, "a", GRAMMAR_DONE);
  grammar_close(&d);
  /* Ways without a byte, in each new state again: either it is told, or the answer is right. */
  at = (size_t)snprintf(text, sizeof text, "root ::= ([a-z] e)* \"a\" [a-z]{12}\ne ::= ");
  for (int i = 0; i < 20000; i++)
    at += (size_t)snprintf(text + at, sizeof text - at, "(|)");
  grammar_open(&d, text, NULL);
  pkv_machine_state many;
  if (d.status == PKV_OK && pkv_machine_begin(&many, d.machine))
    for (int i = 0; i < 2000; i++)
      if (!pkv_machine_feed(&many, d.machine, &"abcdefghij"[i % 10], 1)) break;
  grammar_close(&d);
  /* Ambiguous in ever more ways: either it is told, or the answer is right. */
  grammar_open(&d, "root ::= s\ns ::= \"a\" (s | t)? (s | t)? | \"b\"\nt ::= \"a\" s t? \"b\"? s?",
               NULL);
  pkv_machine_state s;
  assert_true(pkv_machine_begin(&s, d.machine));
  for (int i = 0; i < 300; i++)
    if (!pkv_machine_feed(&s, d.machine, "a", 1)) break;
  grammar_close(&d);
  assert_true(pkv_clock_ns() - begin < INT64_C(30000000000)); /* under sanitizers, beside others */
}

/* `bytes` of rules, each a line with a class of its own; how long their reading takes. */
static double seconds_for(size_t bytes) {
  static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
  static char text[1 << 18];
  size_t at = (size_t)snprintf(text, sizeof text, "root::=r0\n");
  for (int i = 0; at + 40 < bytes; i++)
    at += (size_t)snprintf(text + at, sizeof text - at, "r%d::=[%c%c]\n", i, letters[i % 62],
                           letters[i / 62 % 62]);
  grammar_drive d;
  const clock_t begin = clock(); /* of this process alone: the machine may be busy */
  grammar_open(&d, text, NULL);
  const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
  assert_int_equal(d.status, PKV_OK);
  grammar_close(&d);
  return seconds;
}

/* Eight times the text takes about eight times as long: 64 times before. */
static void test_linear(void **state) {
  (void)state;
  const double small = seconds_for((1 << 15) - 1), large = seconds_for((1 << 18) - 1);
  print_message("32 KiB: %.4f s, 256 KiB: %.4f s\n", small, large);
  assert_true(large < 16 * small + 0.02);
}

/* --- random grammars ----------------------------------------------------------------------- */

typedef struct maker {
  pkv_rng rng;
  char text[8192];
  size_t at;
  int rules;
} maker;

static void put(maker *m, const char *text) {
  const size_t bytes = strlen(text);
  if (m->at + bytes + 1 < sizeof m->text) {
    memcpy(m->text + m->at, text, bytes + 1);
    m->at += bytes;
  }
}

static void put_suffix(maker *m) {
  static const char *const all[] = {"", "", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"};
  put(m, all[pkv_rng_below(&m->rng, 11)]);
}

static void put_either(maker *m, int depth);

static void put_item(maker *m, int depth) {
  static const char *const texts[] = {"\"a\"",        "\"b\"",   "\"ab\"",
                                      "\"\xc3\xa9\"", "\"aab\"", "\"\""};
  static const char *const classes[] = {"[ab]",           "[^a]", "[a-c]", "[\xc3\xa0-\xc3\xbf]",
                                        "[^\\x00-\\x7f]", "."};
  char name[8];
  const uint64_t kind = pkv_rng_below(&m->rng, depth > 0 ? 8 : 6);
  if (kind < 3) {
    put(m, texts[pkv_rng_below(&m->rng, 6)]);
  } else if (kind == 3) {
    put(m, classes[pkv_rng_below(&m->rng, 6)]);
  } else if (kind < 6) {
    (void)snprintf(name, sizeof name, "r%d", (int)pkv_rng_below(&m->rng, (uint64_t)m->rules));
    put(m, name);
  } else {
    put(m, "(");
    put_either(m, depth - 1);
    put(m, ")");
  }
  put_suffix(m);
  put(m, " ");
}

static void put_either(maker *m, int depth) {
  for (uint64_t i = 0, count = 1 + pkv_rng_below(&m->rng, 3); i < count; i++) {
    if (i > 0) put(m, "| ");
    const uint64_t items = pkv_rng_below(&m->rng, 4);
    if (items == 0) put(m, "\"\" "); /* a line may go on behind | */
    for (uint64_t k = 0; k < items; k++)
      put_item(m, depth);
  }
}

static void make(maker *m, uint64_t seed) {
  pkv_rng_init(&m->rng, seed);
  m->at = 0;
  m->rules = 1 + (int)pkv_rng_below(&m->rng, 4);
  put(m, "root ::= ");
  put_either(m, 2);
  for (int i = 0; i < m->rules; i++) {
    char head[32];
    (void)snprintf(head, sizeof head, "\nr%d ::= ", i);
    put(m, head);
    put_either(m, 2);
  }
}

/* Pieces of UTF-8 and of several symbols: what a tokenizer makes of such texts. */
static const char *const pieces[] = {
    "a",
    "b",
    "c",
    "ab",
    "aa",
    "ba",
    "aab",
    "\xc3",
    "\xa9",
    "\xc3\xa9",
    ("\xa9"
     "b"),
    "a\xc3",
    "\xf0\x9f",
    "\x98\x80",
    "\xf0\x9f\x98\x80",
    "\xe0",
    "\xc3\xa0",
    "abab",
    "\xff",
    "\n",
    "\xe2\x82\xac",
    "cab",
};
#define PIECES (sizeof pieces / sizeof *pieces)

static void piece_text(const void *user, int32_t token, const char **bytes, size_t *count) {
  (void)user;
  *bytes = pieces[token];
  *count = strlen(pieces[token]);
}

static void test_random(void **state) {
  static maker m;
  pkv_token_trie *trie = NULL;
  int used = 0, refused = 0, compared = 0;
  (void)state;
  assert_int_equal(pkv_token_trie_create(&trie, PIECES, piece_text, NULL, NULL, NULL), PKV_OK);
  for (uint64_t seed = 1; seed <= 3000; seed++) {
    grammar_drive d;
    bool left = false;
    make(&m, seed);
    grammar_open(&d, m.text, trie);
    if (d.tree.status != PKV_OK) fail_msg("seed %d: %s\n%s", (int)seed, d.err.text, m.text);
    const bool sound = twin_is_sound(&d.tree, &left);
    if (left != (d.status == PKV_E_INVALID && strstr(d.err.text, "left") != NULL))
      fail_msg("seed %d: status %d %s, left recursion %d\n%s", (int)seed, (int)d.status, d.err.text,
               left, m.text);
    refused += d.status != PKV_OK;
    used += sound && d.status == PKV_OK;
    for (int walk = 0; sound && d.status == PKV_OK && walk < 6; walk++) {
      char text[TWIN_BYTES + 8] = "";
      size_t bytes = 0;
      pkv_machine_state s;
      assert_true(pkv_machine_begin(&s, d.machine));
      while (bytes + 4 <= TWIN_BYTES) {
        const grammar_verdict want = twin_check(&d.tree, text, bytes);
        const grammar_verdict got = grammar_verdict_of(&d, s);
        if (got != want)
          fail_msg("seed %d, '%s': verdict %d, twin %d\n%s", (int)seed, text, (int)got, (int)want,
                   m.text);
        compared++;
        if (got == GRAMMAR_DEAD || got == GRAMMAR_DONE) break;
        const uint64_t *const mask = pkv_machine_mask(d.machine, &s);
        assert_non_null(mask);
        const uint64_t bits = *mask;
        for (size_t i = 0; i < PIECES; i++) { /* the mask is what feeding each would say */
          pkv_machine_state next = s;
          assert_true(pkv_machine_feed(&next, d.machine, pieces[i], strlen(pieces[i])));
          if ((next.id != 0) != ((bits >> i & 1) != 0))
            fail_msg("seed %d, '%s': piece %d, mask %d\n%s", (int)seed, text, (int)i,
                     (int)(bits >> i & 1), m.text);
        }
        size_t pick = (size_t)pkv_rng_below(&m.rng, PIECES); /* mostly one that is allowed */
        for (size_t k = 0; k < PIECES && (bits >> pick & 1) == 0 && walk > 0; k++)
          pick = (pick + 1) % PIECES;
        memcpy(text + bytes, pieces[pick], strlen(pieces[pick]) + 1);
        bytes += strlen(pieces[pick]);
        assert_true(pkv_machine_feed(&s, d.machine, pieces[pick], strlen(pieces[pick])));
      }
    }
    grammar_close(&d);
  }
  print_message("%d grammars carried out, %d refused, %d verdicts compared\n", used, refused,
                compared);
  assert_true(used > 300 && refused > 300 && compared > 3000);
  pkv_token_trie_destroy(trie);
}

/* Forgetting: many states, and answers that come back to an epoch that is gone. */
static void test_forgetting(void **state) {
  grammar_drive d;
  pkv_machine_state one, two;
  pkv_machine_stats stats;
  (void)state;
  grammar_open(&d, "root ::= \"a\"{0,60000} x\nx ::= \"(\" x \")\" | \"y\"", NULL);
  if (d.status != PKV_OK) fail_msg("%s", d.err.text);
  assert_true(pkv_machine_begin(&one, d.machine));
  two = one;
  for (int i = 0; i < 30000; i++)
    assert_true(pkv_machine_feed(&one, d.machine, "a", 1));
  pkv_machine_get_stats(&stats, d.machine);
  assert_true(stats.forgotten >= 3);
  assert_false(pkv_machine_knows(d.machine, two));
  assert_true(pkv_machine_feed(&one, d.machine, "((y)", 4));
  assert_int_equal(grammar_verdict_of(&d, one), GRAMMAR_BEGUN);
  assert_true(pkv_machine_feed(&one, d.machine, ")", 1));
  assert_int_equal(grammar_verdict_of(&d, one), GRAMMAR_DONE);
  grammar_close(&d);
}

/* The longest text, which min_tokens is checked against. */
static void test_longest(void **state) {
  static const struct {
    const char *text;
    int64_t longest;
  } cases[] = {
      {"root ::= \"a\"", 1},
      {"root ::= \"\"", 0},
      {"root ::= \"a\" | \"bcd\" | \"\xc3\xa9\"", 3},
      {"root ::= x{2,5}\nx ::= \"ab\" | [\xc3\xa0-\xe2\x82\xac]", 15},
      {"root ::= \"a\"*", -1},
      {"root ::= \"a\" root?", -1},
      {"root ::= \"ab\" | \"c\" dead\ndead ::= \"d\" dead", 2},
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    grammar_drive d;
    grammar_open(&d, cases[i].text, NULL);
    assert_int_equal(d.status, PKV_OK);
    assert_int_equal(d.program.longest, cases[i].longest);
    grammar_close(&d);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_language), cmocka_unit_test(test_refused),
      cmocka_unit_test(test_hostile),  cmocka_unit_test(test_linear),
      cmocka_unit_test(test_random),   cmocka_unit_test(test_forgetting),
      cmocka_unit_test(test_longest),  cmocka_unit_test(test_limits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
