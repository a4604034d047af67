/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Promises about bits: one plan gives the same on any number of workers and on repetition; in
 * batch-invariant mode a row's bits depend on its own tokens only: not on neighbours, parts, nor
 * q_len. And the step path allocates nothing.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "support/attn_case.h"
#include "support/test_alloc.h"

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

static const pkv_isa isas[] = {PKV_ISA_REFERENCE, PKV_ISA_SCALAR, PKV_ISA_AVX2, PKV_ISA_AVX512,
                               PKV_ISA_NEON};

static void assert_same(const void *a, const void *b, size_t bytes, const char *what) {
  if (memcmp(a, b, bytes) == 0) return;
  for (size_t i = 0; i < bytes / 4; i++) {
    uint32_t x, y;
    memcpy(&x, (const unsigned char *)a + 4 * i, 4);
    memcpy(&y, (const unsigned char *)b + 4 * i, 4);
    if (x != y) fail_msg("%s: word %zu is 0x%08x and 0x%08x", what, i, x, y);
  }
}

static void test_any_number_of_workers(void **state) {
  (void)state;
  static const int32_t threads[] = {1, 2, 3, 8};
  static const pkv_route routes[] = {PKV_ROUTE_BALANCED, PKV_ROUTE_WORKQUEUE, PKV_ROUTE_SPLIT,
                                     PKV_ROUTE_BUCKET_EXACT, PKV_ROUTE_BUCKET_PADDED};
  const int32_t lens[] = {300, 3, 700, 64, 0, 129};
  static const int32_t q_lens[] = {1, 5, 70};
  for (size_t q = 0; q < COUNT(q_lens); q++) {
    const int32_t q_len = q_lens[q];
    attn_spec s = attn_spec_default();
    s.rows = 6;
    s.seq_len = lens;
    s.group = 3;
    s.q_len = q_len;
    attn_case c;
    attn_case_init(&c, &s);
    void *first = malloc(c.out_bytes);
    for (size_t r = 0; r < 2 * COUNT(routes); r++) {
      pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
      options.route = routes[r / 2];
      if (r % 2) options.parts = 41;
      if (r % 2 && options.route == PKV_ROUTE_BALANCED) options.flags = PKV_PLAN_BATCH_INVARIANT;
      attn_plan p;
      attn_plan_init(&p, &c, &options);
      assert_int_equal(p.status, PKV_OK);
      for (size_t i = 0; i < COUNT(isas); i++) {
        if (isas[i] <= PKV_ISA_SCALAR && q_len > 5 - 4 * (isas[i] == PKV_ISA_REFERENCE))
          continue;                                       /* slow, and the same code */
        for (size_t k = 0; k < 2 * COUNT(threads); k++) { /* twice: tickets fall differently */
          pkv_executor *executor = attn_executor(isas[i], threads[k / 2]);
          if (executor == NULL) continue;
          attn_run(&c, &p, executor);
          if (k == 0) memcpy(first, c.out, c.out_bytes);
          char what[96];
          snprintf(what, sizeof what, "%s %s q_len %d threads %d", pkv_isa_name(isas[i]),
                   pkv_route_name(options.route), q_len, threads[k / 2]);
          assert_same(first, c.out, c.out_bytes, what);
          pkv_executor_destroy(executor);
        }
      }
      attn_plan_deinit(&p);
    }
    free(first);
    attn_case_deinit(&c);
  }
}

/* A case of row `row` of `c` alone: same cache, its table row, its queries and results. */
static attn_case alone(const attn_case *c, int32_t row, const int32_t *len) {
  attn_case one = *c;
  const size_t q = pkv_dtype_bytes(c->spec.q_dtype), out = pkv_dtype_bytes(c->spec.out_dtype);
  const int64_t token = (int64_t)row * c->spec.q_len;
  one.spec.rows = 1;
  one.spec.seq_len = len;
  one.table = c->table + row * c->table_stride;
  one.q = (unsigned char *)c->q + (size_t)(token * c->q_token) * q;
  one.out_bytes = (size_t)(c->spec.q_len * c->out_token) * out;
  one.out = malloc(one.out_bytes);
  one.lse_floats = (size_t)(c->spec.q_len * c->lse_token);
  one.lse = malloc(one.lse_floats * sizeof(float));
  return one;
}

static pkv_plan_options invariant_options(int32_t parts, int32_t chunk) {
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.flags = PKV_PLAN_BATCH_INVARIANT;
  options.parts = parts;
  options.chunk_tokens = chunk;
  return options;
}

static void compare_rows_alone(attn_case *c, pkv_executor *executor, int32_t parts, int32_t chunk) {
  pkv_plan_options options = invariant_options(parts, chunk);
  attn_plan p;
  attn_plan_init(&p, c, &options);
  assert_int_equal(p.status, PKV_OK);
  attn_run(c, &p, executor);
  const size_t row_bytes =
      (size_t)(c->spec.q_len * c->out_token) * pkv_dtype_bytes(c->spec.out_dtype);
  for (int32_t r = 0; r < c->spec.rows; r++) {
    attn_case one = alone(c, r, &c->spec.seq_len[r]);
    options.parts = 1 + r % 19;
    attn_plan q;
    attn_plan_init(&q, &one, &options);
    assert_int_equal(q.status, PKV_OK);
    attn_run(&one, &q, executor);
    char what[96];
    snprintf(what, sizeof what, "%s row %d of %d, %d tokens, %d parts against %d",
             pkv_isa_name(pkv_executor_isa(executor)), r, c->spec.rows, c->spec.seq_len[r],
             options.parts, parts);
    assert_same((unsigned char *)c->out + (size_t)r * row_bytes, one.out, row_bytes, what);
    assert_same(c->lse + (size_t)r * one.lse_floats, one.lse, one.lse_floats * 4, what);
    attn_plan_deinit(&q);
    free(one.out);
    free(one.lse);
  }
  attn_plan_deinit(&p);
}

static void test_alone_and_among_others(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 606);
  static const int32_t rows[] = {1, 2, 7, 64};
  for (size_t i = 0; i < COUNT(isas); i++) {
    pkv_executor *executor = attn_executor(isas[i], 2);
    if (executor == NULL) continue;
    for (size_t k = 0; k < COUNT(rows) - (isas[i] <= PKV_ISA_SCALAR); k++) {
      int32_t lens[64];
      for (int32_t r = 0; r < rows[k]; r++)
        lens[r] = (int32_t)pkv_rng_range(&rng, 0, r % 8 == 0 ? 1500 : 200);
      attn_spec s = attn_spec_default();
      s.seed = 50 + k;
      s.rows = rows[k];
      s.seq_len = lens;
      s.kv_heads = 1;
      s.group = 3;
      s.head_dim = 24;
      s.window = k == 2 ? 150 : 0;
      s.sinks = k == 1;
      s.q_len = k == 1 ? 4 : 1;
      s.kv_dtype = k == 3 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16;
      attn_case c;
      attn_case_init(&c, &s);
      for (int32_t parts = 1; parts <= 64; parts = parts * 4)
        compare_rows_alone(&c, executor, parts, k == 0 ? 512 : 64);
      attn_case_deinit(&c);
    }
    pkv_executor_destroy(executor);
  }
}

/* The first n of 64 random rows, for every n: each row's bits are those it has alone. */
static void test_any_number_of_neighbours(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 607);
  int32_t lens[64];
  for (int i = 0; i < 64; i++)
    lens[i] = (int32_t)pkv_rng_range(&rng, 0, i % 16 == 3 ? 700 : 150);
  attn_spec s = attn_spec_default();
  s.rows = 64;
  s.seq_len = lens;
  s.kv_heads = 1;
  s.group = 3;
  s.head_dim = 24;
  attn_case c;
  attn_case_init(&c, &s);
  unsigned char *want = malloc(c.out_bytes);
  const size_t row_bytes = c.out_bytes / 64;
  for (size_t i = 0; i < COUNT(isas); i++) {
    pkv_executor *executor = attn_executor(isas[i], 2);
    if (executor == NULL) continue;
    for (int32_t r = 0; r < 64; r++) {
      const pkv_plan_options options = invariant_options(1 + r % 5, 64);
      attn_case one = alone(&c, r, &c.spec.seq_len[r]);
      attn_plan p;
      attn_plan_init(&p, &one, &options);
      attn_run(&one, &p, executor);
      memcpy(want + (size_t)r * row_bytes, one.out, row_bytes);
      attn_plan_deinit(&p);
      free(one.out);
      free(one.lse);
    }
    for (int32_t n = 1; n <= 64; n++) {
      const pkv_plan_options options = invariant_options(1 + n % 21, 64);
      attn_plan p;
      c.spec.rows = n;
      attn_plan_init(&p, &c, &options);
      attn_run(&c, &p, executor);
      char what[64];
      snprintf(what, sizeof what, "%s among %d rows", pkv_isa_name(isas[i]), n);
      assert_same(want, c.out, (size_t)n * row_bytes, what);
      attn_plan_deinit(&p);
    }
    pkv_executor_destroy(executor);
  }
  free(want);
  attn_case_deinit(&c);
}

/* The last query of a row of len - t tokens with q_len 1 is query q_len - 1 - t of the longer
 * one. */
static void test_any_q_len(void **state) {
  (void)state;
  static const int32_t q_lens[] = {2, 5, 16, 70};
  const int32_t lens[] = {611};
  for (size_t i = 0; i < COUNT(isas); i++) {
    pkv_executor *executor = attn_executor(isas[i], 2);
    if (executor == NULL) continue;
    for (size_t k = 0; k < COUNT(q_lens); k++) {
      attn_spec s = attn_spec_default();
      s.rows = 1;
      s.seq_len = lens;
      s.group = k % 2 ? 3 : 4;
      s.window = k == 3 ? 97 : 0;
      s.q_len = q_lens[k];
      attn_case c;
      attn_case_init(&c, &s);
      pkv_plan_options options = invariant_options(5, 128);
      attn_plan p;
      attn_plan_init(&p, &c, &options);
      assert_int_equal(p.status, PKV_OK);
      attn_run(&c, &p, executor);
      for (int32_t t = 0; t < s.q_len; t += 3) {
        const int32_t len = lens[0] - s.q_len + 1 + t;
        attn_case one = c;
        one.spec.q_len = 1;
        one.spec.seq_len = &len;
        one.q = (float *)c.q + t * c.q_token;
        one.out_bytes = (size_t)c.out_token * 4;
        one.out = malloc(one.out_bytes);
        one.lse_floats = (size_t)c.lse_token;
        one.lse = malloc(one.lse_floats * 4);
        options.parts = 1 + t;
        attn_plan q;
        attn_plan_init(&q, &one, &options);
        assert_int_equal(q.status, PKV_OK);
        attn_run(&one, &q, executor);
        char what[96];
        snprintf(what, sizeof what, "%s query %d of %d", pkv_isa_name(isas[i]), t, s.q_len);
        assert_same((float *)c.out + t * c.out_token, one.out, one.out_bytes, what);
        assert_same(c.lse + t * c.lse_token, one.lse, one.lse_floats * 4, what);
        attn_plan_deinit(&q);
        free(one.out);
        free(one.lse);
      }
      attn_plan_deinit(&p);
      attn_case_deinit(&c);
    }
    pkv_executor_destroy(executor);
  }
}

static void test_allocates_nothing(void **state) {
  (void)state;
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator allocator = test_alloc_allocator(&ta);
  const int32_t lens[] = {130, 0, 77};
  attn_spec s = attn_spec_default();
  s.rows = 3;
  s.seq_len = lens;
  attn_case c;
  attn_case_init(&c, &s);
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  options.threads = 2;
  options.allocator = &allocator;
  pkv_executor *executor = NULL;
  assert_int_equal(pkv_executor_create(&executor, &options, NULL), PKV_OK);
  pkv_plan_options plan_options = PKV_PLAN_OPTIONS_INIT;
  attn_plan p;
  attn_plan_init(&p, &c, &plan_options);
  const int64_t slots[] = {5, -1, 0};
  float *fresh = calloc((size_t)(3 * s.kv_heads * s.head_dim), sizeof(float));
  pkv_append_args append = PKV_APPEND_ARGS_INIT;
  append.cache = &c.cache;
  append.tokens = 3;
  append.slots = slots;
  append.k = append.v = fresh;
  const int64_t before = test_alloc_calls(&ta);
  for (int step = 0; step < 1000; step++) {
    assert_int_equal(pkv_append(executor, &append, NULL), PKV_OK);
    attn_run(&c, &p, executor);
  }
  assert_int_equal(test_alloc_calls(&ta) - before, 0);
  free(fresh);
  attn_plan_deinit(&p);
  attn_case_deinit(&c);
  pkv_executor_destroy(executor);
  test_alloc_finish(&ta);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_any_number_of_workers),
      cmocka_unit_test(test_alone_and_among_others),
      cmocka_unit_test(test_any_number_of_neighbours),
      cmocka_unit_test(test_any_q_len),
      cmocka_unit_test(test_allocates_nothing),
  };
  return cmocka_run_group_tests_name("attention_bits", tests, NULL, NULL);
}
