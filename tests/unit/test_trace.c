/* SPDX-License-Identifier: Apache-2.0 */
/* Traces: bounds of the seeded kinds, page placement, stepping, and files bad in every way. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "pkv/trace.h"
#include "sched/mt19937.h"

static pkv_trace *make(pkv_trace_kind kind, int32_t max_active, uint64_t seed, double holes) {
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  pkv_trace *trace = NULL;
  options.kind = kind;
  options.max_active = max_active;
  options.seed = seed;
  options.hole_fraction = holes;
  if (pkv_trace_create(&trace, &options, &err)) fail_msg("create: %s", err.text);
  return trace;
}

static void expect_between(const char *what, int32_t value, int32_t lo, int32_t hi) {
  if (value < lo || value > hi) fail_msg("%s is %d, not in %d .. %d", what, value, lo, hi);
}

static void test_bounds_of_the_kinds(void **state) {
  (void)state;
  for (int kind = PKV_TRACE_BUCKETED; kind <= PKV_TRACE_ZIPF; kind++)
    for (uint64_t seed = PKV_TRACE_SEED_CALIBRATION; seed < PKV_TRACE_SEED_CALIBRATION + 40;
         seed++) {
      pkv_trace *trace = make((pkv_trace_kind)kind, 8, seed, 0);
      int32_t count;
      const pkv_trace_request *r = pkv_trace_requests(trace, &count);
      assert_int_equal(count, 24);
      for (int32_t i = 0; i < count; i++) {
        const int32_t p = r[i].prompt_tokens, d = r[i].decode_tokens;
        assert_int_equal(p % 16, 0);
        assert_int_equal(r[i].pages, (p + d + 15) / 16);
        assert_int_equal(r[i].arrival, i / 8);
        switch (kind) {
        case PKV_TRACE_BUCKETED:
          assert_int_equal(p, 8192 << (i % 4));
          expect_between("decode", d, 32, 96);
          break;
        case PKV_TRACE_HOMOGENEOUS:
          assert_int_equal(p, 32768);
          expect_between("decode", d, 32, 96);
          break;
        case PKV_TRACE_BIMODAL:
          expect_between("prompt", p, i % 4 ? 2048 : 24576, i % 4 ? 12288 : 65536);
          expect_between("decode", d, i % 4 ? 8 : 32, i % 4 ? 64 : 128);
          break;
        case PKV_TRACE_UNIFORM:
          expect_between("prompt", p, 4096, 32768);
          expect_between("decode", d, 16, 96);
          break;
        default: /* ranks 32 .. 1: 13633 - 512 .. 67584 + 512 */
          expect_between("prompt", p, 13121, 68096);
          expect_between("decode", d, 8, 128);
        }
      }
      pkv_trace_destroy(trace);
    }
}

static void test_generator(void **state) {
  (void)state;
  pkv_mt19937 mt;
  pkv_mt19937_init(&mt, 5489);
  uint32_t last = 0;
  for (int i = 0; i < 10000; i++)
    last = pkv_mt19937_next(&mt);
  assert_int_equal(last, 4123659995u); /* the value that the C++ standard demands of mt19937 */
}

/* Physical pages and mean KV MiB a step (8 KV heads, head_dim 128, f16) that the seed published for
   its five held-out seeds. */
static void test_these_are_the_published_traces(void **state) {
  (void)state;
  static const struct {
    pkv_trace_kind kind;
    int32_t max_active, steps;
    int64_t pages[5];
    double mib[5];
  } published[] = {
      {PKV_TRACE_BIMODAL,
       8,
       48,
       {24285, 27474, 24493, 22191, 25393},
       {550.5, 730.0, 576.7, 565.9, 802.1}},
      {PKV_TRACE_UNIFORM,
       8,
       48,
       {31446, 25788, 27489, 26120, 25555},
       {671.0, 555.8, 480.2, 642.8, 447.2}},
      {PKV_TRACE_ZIPF,
       8,
       48,
       {30878, 31463, 37013, 31140, 29978},
       {672.2, 676.9, 573.4, 492.7, 662.4}},
      {PKV_TRACE_BUCKETED,
       1,
       64,
       {30793, 30790, 30791, 30794, 30798},
       {32.1, 32.1, 32.1, 35.6, 32.1}},
  };
  for (size_t k = 0; k < sizeof published / sizeof *published; k++)
    for (int i = 0; i < PKV_TRACE_HELD_OUT_SEEDS; i++) {
      const uint64_t seed = PKV_TRACE_SEED_HELD_OUT + (uint64_t)i;
      pkv_trace *trace = make(published[k].kind, published[k].max_active, seed, 0);
      int64_t tokens = 0;
      for (int32_t step = 0; step < published[k].steps; step++) {
        int32_t request[8], length[8];
        const int32_t active = pkv_trace_step(request, length, trace, step);
        for (int32_t row = 0; row < active; row++)
          tokens += length[row];
      }
      const double mib = (double)tokens * 4096 / published[k].steps / 1048576;
      if (pkv_trace_pages(trace) != published[k].pages[i] ||
          fabs(mib - published[k].mib[i]) > 0.0501)
        fail_msg("%s %llu: %lld pages, %.2f MiB; published %lld, %.1f",
                 pkv_trace_kind_name(published[k].kind), (unsigned long long)seed,
                 (long long)pkv_trace_pages(trace), mib, (long long)published[k].pages[i],
                 published[k].mib[i]);
      pkv_trace_destroy(trace);
    }
}

static void test_defaults(void **state) {
  (void)state;
  int32_t count;
  pkv_trace *trace = make(PKV_TRACE_UNIFORM, 1, 0, 0);
  (void)pkv_trace_requests(trace, &count);
  assert_int_equal(count, 16);
  assert_int_equal(pkv_trace_max_active(trace), 1);
  pkv_trace_destroy(trace);
  trace = make(PKV_TRACE_UNIFORM, 0, 0, 0);
  (void)pkv_trace_requests(trace, &count);
  assert_int_equal(count, 24);
  assert_int_equal(pkv_trace_max_active(trace), 8);
  pkv_trace_destroy(trace);
  assert_string_equal(pkv_trace_kind_name(PKV_TRACE_ZIPF), "zipf");
  assert_string_equal(pkv_trace_kind_name((pkv_trace_kind)5), "?");
}

static void test_pages_are_a_permutation(void **state) {
  (void)state;
  const double holes[] = {0, 0.5, 0.9};
  for (int h = 0; h < 3; h++) {
    pkv_trace *trace = make(PKV_TRACE_ZIPF, 4, 7, holes[h]);
    int32_t count;
    int64_t owned = 0, rising = 0;
    const pkv_trace_request *r = pkv_trace_requests(trace, &count);
    const int64_t all = pkv_trace_pages(trace);
    unsigned char *seen = calloc((size_t)all, 1);
    for (int32_t i = 0; i < count; i++) {
      const int32_t *table = pkv_trace_table(trace, i);
      owned += r[i].pages;
      for (int32_t p = 0; p < r[i].pages; p++) {
        assert_true(table[p] >= 0 && table[p] < all);
        assert_int_equal(seen[table[p]]++, 0);
        if (p > 0 && table[p] == table[p - 1] + 1) rising++;
      }
    }
    const double expected = (double)owned / (1 - holes[h]);
    if ((double)all < expected || (double)all >= expected + 1)
      fail_msg("%lld pages for %lld owned, expected %.1f", (long long)all, (long long)owned,
               expected);
    if (rising > 20) fail_msg("%lld neighbours in a permutation", (long long)rising);
    assert_null(pkv_trace_table(trace, count));
    assert_null(pkv_trace_table(trace, -1));
    free(seen);
    pkv_trace_destroy(trace);
  }
}

static pkv_trace *parse(const char *text, int32_t max_active) {
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  pkv_trace *trace = NULL;
  options.max_active = max_active;
  if (pkv_trace_parse(&trace, text, strlen(text), &options, &err))
    fail_msg("\"%s\": %s", text, err.text);
  return trace;
}

static void expect_step(const pkv_trace *trace, int32_t step, int32_t count, const int32_t *request,
                        const int32_t *length) {
  int32_t r[4], l[4];
  const int32_t got = pkv_trace_step(r, l, trace, step);
  if (got != count) fail_msg("step %d: %d active, expected %d", step, got, count);
  for (int32_t i = 0; i < count; i++)
    if (r[i] != request[i] || l[i] != length[i])
      fail_msg("step %d: request %d with %d tokens, expected %d with %d", step, r[i], l[i],
               request[i], length[i]);
}

static void test_steps(void **state) {
  (void)state;
  /* 0: steps 0-1; 1: 0-4; 2: 1-2, waits in step 1 but grows; 3: 9 */
  pkv_trace *trace = parse("prompt,decode,arrival\n16,2,0\n17,5,0\n48,2,1\n1,1,9\n", 2);
  expect_step(trace, 0, 2, (const int32_t[]){0, 1}, (const int32_t[]){16, 32});
  expect_step(trace, 1, 2, (const int32_t[]){0, 1}, (const int32_t[]){17, 33});
  expect_step(trace, 2, 2, (const int32_t[]){1, 2}, (const int32_t[]){34, 49});
  expect_step(trace, 3, 1, (const int32_t[]){1}, (const int32_t[]){35});
  expect_step(trace, 5, 0, NULL, NULL);
  expect_step(trace, 9, 1, (const int32_t[]){3}, (const int32_t[]){16});
  assert_int_equal(pkv_trace_next_step(trace, 0), 0);
  assert_int_equal(pkv_trace_next_step(trace, 4), 4);
  assert_int_equal(pkv_trace_next_step(trace, 5), 9);
  assert_int_equal(pkv_trace_next_step(trace, 10), -1);
  pkv_trace_destroy(trace);
}

/* Every step of the seeded traces: lengths grow by one, requests leave after their answer. */
static void test_seeded_steps(void **state) {
  (void)state;
  int32_t request[8], length[8], count, served[24] = {0};
  pkv_trace *trace = make(PKV_TRACE_BIMODAL, 8, PKV_TRACE_SEED_HELD_OUT, 0);
  const pkv_trace_request *r = pkv_trace_requests(trace, &count);
  int32_t steps = 0;
  for (int32_t s = pkv_trace_next_step(trace, 0); s >= 0; s = pkv_trace_next_step(trace, s + 1)) {
    const int32_t active = pkv_trace_step(request, length, trace, s);
    assert_in_range(active, 1, 8);
    for (int32_t i = 0; i < active; i++) {
      assert_int_equal(length[i], r[request[i]].prompt_tokens + s - r[request[i]].arrival);
      assert_true(length[i] <= r[request[i]].pages * 16);
      served[request[i]]++;
    }
    steps++;
  }
  for (int32_t i = 0; i < 8; i++)
    assert_int_equal(served[i], r[i].decode_tokens);
  assert_true(steps >= 48);
  pkv_trace_destroy(trace);
}

static void test_files(void **state) {
  (void)state;
  const char *const same[] = {
      "prompt_len,decode_len\n100,3\n200,4\n",
      "\xef\xbb\xbf decode_len , prompt_len,note\r\n3,100,\r\n4, 200 ,\"a, \"\"b\"\"\"\r\n\r\n",
      "\"prompt\",\"decode\"\n\"100\",\"3\"\n\n\"200\",\"4\"",
      "[{\"prompt_len\":100,\"decode_len\":3},{\"decode\":4,\"prompt\":200}]",
      (" \n[ { \"x\" : [1, {\"y\": [], \"z\": {}}, \"\\u00e9\\\"\", -1.5e3, true, null],"
       " \"prompt_len\" : 100 , \"decode_len\" : 3 },\n {\"prompt\":200,\"decode\":4} ] \n"),
  };
  for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
    pkv_trace *trace = parse(same[i], 8);
    int32_t count;
    const pkv_trace_request *r = pkv_trace_requests(trace, &count);
    assert_int_equal(count, 2);
    assert_int_equal(r[0].prompt_tokens, 112);
    assert_int_equal(r[0].decode_tokens, 3);
    assert_int_equal(r[0].arrival, 0);
    assert_int_equal(r[1].prompt_tokens, 208);
    assert_int_equal(r[1].decode_tokens, 4);
    assert_int_equal(r[1].arrival, 1);
    pkv_trace_destroy(trace);
  }
  pkv_trace *trace = parse("[{\"prompt\":1,\"decode\":1,\"arrival_step\":7}]", 1);
  int32_t count;
  assert_int_equal(pkv_trace_requests(trace, &count)->arrival, 7);
  pkv_trace_destroy(trace);
}

static void test_request_limit(void **state) {
  (void)state;
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
  options.requests = 2;
  const char *const texts[] = {"prompt,decode\n1,1\n2,2\n3,3\n",
                               "[{\"prompt\":1,\"decode\":1},{\"prompt\":2,\"decode\":2},"
                               "{\"prompt\":3,\"decode\":3}]"};
  for (int i = 0; i < 2; i++) {
    pkv_trace *trace = NULL;
    int32_t count;
    assert_int_equal(pkv_trace_parse(&trace, texts[i], strlen(texts[i]), &options, NULL), PKV_OK);
    (void)pkv_trace_requests(trace, &count);
    assert_int_equal(count, 2);
    pkv_trace_destroy(trace);
  }
}

static void test_bad_files(void **state) {
  (void)state;
  const struct {
    pkv_status status;
    const char *says, *text;
  } cases[] = {
      {PKV_E_FORMAT, "names no column prompt_len", ""},
      {PKV_E_FORMAT, "names no column prompt_len", "a,b\n1,2\n"},
      {PKV_E_FORMAT, "names no column decode_len", "prompt\n1\n"},
      {PKV_E_FORMAT, "two columns are prompt_len", "prompt,prompt_len,decode\n1,1,1\n"},
      {PKV_E_FORMAT, "no request", "prompt,decode\n"},
      {PKV_E_FORMAT, "no request", "[]"},
      {PKV_E_FORMAT, "line 3: prompt_len is 'x'", "prompt,decode\n1,1\nx,1\n"},
      {PKV_E_FORMAT, "not a whole number", "prompt,decode\n1.0,1\n"},
      {PKV_E_FORMAT, "not a whole number", "prompt,decode\n99999999999999999999,1\n"},
      {PKV_E_FORMAT, "not a whole number",
       "prompt,decode\n00000000000000000000000000000000000000000001,1\n"},
      {PKV_E_FORMAT, "decode_len is missing", "prompt,decode\n1\n"},
      {PKV_E_FORMAT, "decode_len is missing", "prompt,decode\n1,\n"},
      {PKV_E_FORMAT, "more than 2 columns", "prompt,decode\n1,2,3\n"},
      {PKV_E_FORMAT, "not closed", "prompt,decode\n\"1,2\n"},
      {PKV_E_FORMAT, "after a closing quote", "prompt,decode\n\"1\"2,2\n"},
      {PKV_E_LIMIT, "prompt of 0 tokens", "prompt,decode\n0,2\n"},
      {PKV_E_LIMIT, "prompt of -5 tokens", "prompt,decode\n-5,2\n"},
      {PKV_E_LIMIT, "prompt of 16777217", "prompt,decode\n16777217,2\n"},
      {PKV_E_LIMIT, "answer of 0", "prompt,decode\n1,0\n"},
      {PKV_E_LIMIT, "arrival at step -1", "prompt,decode,arrival\n1,1,-1\n"},
      {PKV_E_FORMAT, "'{' expected", "[1]"},
      {PKV_E_FORMAT, "'{' expected", "[{\"prompt\":1,\"decode\":1},]"},
      {PKV_E_FORMAT, "']' expected", "[{\"prompt\":1,\"decode\":1}"},
      {PKV_E_FORMAT, "after the list", "[{\"prompt\":1,\"decode\":1}] x"},
      {PKV_E_FORMAT, "given twice", "[{\"prompt\":1,\"prompt_len\":1,\"decode\":1}]"},
      {PKV_E_FORMAT, "missing", "[{}]"},
      {PKV_E_FORMAT, "not a whole number", "[{\"prompt\":true,\"decode\":1}]"},
      {PKV_E_FORMAT, "a value expected", "[{\"prompt\":\"1\",\"decode\":1}]"},
      {PKV_E_FORMAT, "':' expected", "[{\"prompt\" 1}]"},
      {PKV_E_FORMAT, "not closed", "[{\"prompt"},
      {PKV_E_FORMAT, "escape", "[{\"\\q\":1}]"},
      {PKV_E_FORMAT, "control character", "[{\"a\nb\":1}]"},
      {PKV_E_FORMAT, "a value expected", "[{\"x\":[1,]}]"},
      {PKV_E_FORMAT, "a value expected", "[{\"x\":}]"},
      {PKV_E_FORMAT, "',' expected", "[{\"x\":[1 2]}]"},
      {PKV_E_FORMAT, "'\"' expected", "[{\"x\":{1:2}}]"},
      {PKV_E_FORMAT, "a value expected", "[{\"x\":[}"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
    pkv_error err = {PKV_OK, NULL, {0}};
    pkv_trace *trace = (pkv_trace *)&err;
    const pkv_status status =
        pkv_trace_parse(&trace, cases[i].text, strlen(cases[i].text), &options, &err);
    if (status != cases[i].status || !strstr(err.text, cases[i].says) || trace)
      fail_msg("\"%s\": %s \"%s\", expected %s with \"%s\"", cases[i].text, pkv_status_name(status),
               err.text, pkv_status_name(cases[i].status), cases[i].says);
  }
}

static void test_hostile_sizes(void **state) {
  (void)state;
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  pkv_trace *trace = NULL;
  /* deep nesting neither recurses nor passes */
  char *deep = malloc(1 << 20);
  memcpy(deep, "[{\"x\":", 6);
  memset(deep + 6, '[', (1 << 20) - 6);
  assert_int_equal(pkv_trace_parse(&trace, deep, 1 << 20, &options, &err), PKV_E_FORMAT);
  assert_non_null(strstr(err.text, "nested deeper than 64"));
  free(deep);
  /* 2^20 tokens in pages of one: 100 requests are beyond 2^26 pages, found before any is placed */
  char text[8192];
  int used = snprintf(text, sizeof text, "prompt,decode\n");
  for (int i = 0; i < 100; i++)
    used += snprintf(text + used, sizeof text - (size_t)used, "16777216,1048576\n");
  options.page_tokens = 1;
  assert_int_equal(pkv_trace_parse(&trace, text, (size_t)used, &options, &err), PKV_E_LIMIT);
  assert_non_null(strstr(err.text, "at most 67108864"));
  /* every prefix of a good file, and of one with a zero byte in it, ends without a crash */
  const char good[] = "[{\"prompt_len\":10,\"x\":[{\"a\":\"\\\\b\"}],\"decode_len\":3}, {}]\0,3";
  for (size_t n = 0; n < sizeof good; n++) {
    char *exact = malloc(n ? n : 1);
    memcpy(exact, good, n);
    if (pkv_trace_parse(&trace, exact, n, &options, &err) == PKV_OK)
      fail_msg("%zu bytes of a broken list are a trace", n);
    free(exact);
  }
}

static void test_bad_options(void **state) {
  (void)state;
  pkv_error err = {PKV_OK, NULL, {0}};
  pkv_trace *trace = NULL;
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
#define REFUSE(field_, value_, text_)                                                              \
  do {                                                                                             \
    options = (pkv_trace_options)PKV_TRACE_OPTIONS_INIT;                                           \
    options.field_ = (value_);                                                                     \
    assert_int_equal(pkv_trace_create(&trace, &options, &err), PKV_E_INVALID);                     \
    if (!strstr(err.text, text_)) fail_msg("\"%s\" does not say \"%s\"", err.text, text_);         \
    assert_null(trace);                                                                            \
  } while (0)
  REFUSE(requests, -1, "requests is -1");
  REFUSE(requests, (1 << 20) + 1, "requests");
  REFUSE(max_active, -1, "max_active is -1");
  REFUSE(page_tokens, 1025, "page_tokens is 1025");
  REFUSE(hole_fraction, 1.0, "hole_fraction is 1");
  REFUSE(hole_fraction, -0.1, "hole_fraction is -0.1");
  REFUSE(kind, (pkv_trace_kind)5, "kind is 5");
  REFUSE(struct_size, 3, "struct_size is 3");
  assert_int_equal(pkv_trace_load(&trace, "/nonexistent/trace.csv", &options, &err),
                   PKV_E_INVALID); /* struct_size is still 3 */
  options = (pkv_trace_options)PKV_TRACE_OPTIONS_INIT;
  assert_int_equal(pkv_trace_load(&trace, "/nonexistent/trace.csv", &options, &err), PKV_E_IO);
  assert_int_equal(pkv_trace_load(&trace, NULL, &options, &err), PKV_E_INVALID);
  pkv_trace_destroy(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bounds_of_the_kinds),
      cmocka_unit_test(test_generator),
      cmocka_unit_test(test_these_are_the_published_traces),
      cmocka_unit_test(test_defaults),
      cmocka_unit_test(test_pages_are_a_permutation),
      cmocka_unit_test(test_steps),
      cmocka_unit_test(test_seeded_steps),
      cmocka_unit_test(test_files),
      cmocka_unit_test(test_request_limit),
      cmocka_unit_test(test_bad_files),
      cmocka_unit_test(test_hostile_sizes),
      cmocka_unit_test(test_bad_options),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
