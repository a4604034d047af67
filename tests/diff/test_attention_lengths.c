/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lengths at every edge, long rows among short ones, one huge score in each page in turn, splits
 * that outnumber tiles, and pools past 2^31 elements.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "support/attn_case.h"

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

static const pkv_isa isas[] = {PKV_ISA_SCALAR, PKV_ISA_AVX2, PKV_ISA_AVX512, PKV_ISA_NEON,
                               PKV_ISA_REFERENCE};
static const pkv_route routes[] = {PKV_ROUTE_BALANCED, PKV_ROUTE_BUCKET_EXACT,
                                   PKV_ROUTE_BUCKET_PADDED, PKV_ROUTE_SPLIT, PKV_ROUTE_WORKQUEUE};

/* Every route on every instruction set (REFERENCE: balanced only, where `slow` is 0). */
static void run_routes(attn_case *c, int32_t splits, bool slow) {
  attn_case_answer(c);
  for (size_t r = 0; r < COUNT(routes); r++) {
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.route = routes[r];
    if (routes[r] != PKV_ROUTE_BALANCED) options.splits = splits;
    attn_plan p;
    attn_plan_init(&p, c, &options);
    assert_int_equal(p.status, PKV_OK);
    for (size_t i = 0; i < COUNT(isas); i++) {
      if (isas[i] == PKV_ISA_REFERENCE && !slow && r > 0) continue;
      pkv_executor *executor = attn_executor(isas[i], 2);
      if (executor == NULL) continue;
      attn_run(c, &p, executor);
      char what[96];
      snprintf(what, sizeof what, "%s %s", pkv_isa_name(isas[i]), pkv_route_name(routes[r]));
      attn_check(c, what);
      pkv_executor_destroy(executor);
    }
    attn_plan_deinit(&p);
  }
}

static void test_edges(void **state) {
  (void)state;
  static const int32_t pages[] = {1, 3, 16, 64, 1024};
  for (size_t i = 0; i < COUNT(pages); i++) {
    const int32_t page = pages[i];
    const int32_t lens[] = {0, 1, page - 1, page, page + 1, 3 * page, 63, 64, 65, 0};
    attn_spec s = attn_spec_default();
    s.seed = 900 + i;
    s.rows = (int32_t)COUNT(lens);
    s.seq_len = lens;
    s.page_tokens = page;
    attn_case c;
    attn_case_init(&c, &s);
    run_routes(&c, 0, true);
    attn_case_deinit(&c);
  }
}

static void test_long_among_short(void **state) {
  (void)state;
  int32_t lens[24];
  for (int i = 0; i < 24; i++)
    lens[i] = 1 + i * 5;
  lens[11] = 32 * 1024 + 5;
  attn_spec s = attn_spec_default();
  s.rows = 24;
  s.seq_len = lens;
  s.kv_heads = 1;
  s.group = 3;
  s.head_dim = 32;
  attn_case c;
  attn_case_init(&c, &s);
  run_routes(&c, 0, false);
  attn_case_deinit(&c);
}

/* Rows with fewer tiles than splits: neutral states, whatever the workspace held. */
static void test_twenty_fixed_splits(void **state) {
  (void)state;
  const int32_t lens[] = {1, 31, 33, 640, 65536};
  attn_spec s = attn_spec_default();
  s.rows = 5;
  s.seq_len = lens;
  s.kv_heads = 1;
  s.group = 1;
  s.head_dim = 16;
  attn_case c;
  attn_case_init(&c, &s);
  run_routes(&c, 20, false);
  attn_case_deinit(&c);
}

/* Every value of the output is that of the needle's V: its weight is 1 up to e^-50. */
static void check_needle(const attn_case *c, const char *what) {
  const attn_spec *s = &c->spec;
  for (int32_t row = 0; row < s->rows; row++) {
    for (int32_t head = 0; head < s->kv_heads * s->group; head++) {
      const void *v = attn_case_element(c, true, row, s->needle, head / s->group);
      for (int32_t d = 0; d < s->head_dim; d++) {
        const float want = pkv_load(v, s->kv_dtype, d);
        const float got = ((float *)c->out)[row * c->out_token + head * c->out_head + d];
        if (!(fabsf(got - want) <= 4e-7f * (1.0f + fabsf(want))))
          fail_msg("%s: needle %d row %d head %d [%d]: got %.9g, want %.9g", what, s->needle, row,
                   head, d, (double)got, (double)want);
      }
    }
  }
}

/* In each page in turn, for every element type and several page sizes. */
static void test_needles(void **state) {
  (void)state;
  static const struct {
    pkv_dtype kv;
    int32_t page;
  } kinds[] = {
      {PKV_DTYPE_F16, 16}, {PKV_DTYPE_F32, 1}, {PKV_DTYPE_BF16, 3}, {PKV_DTYPE_FP8_E4M3, 64}};
  const int32_t lens[] = {200, 197};
  for (size_t i = 0; i < COUNT(isas); i++) {
    pkv_executor *executor = attn_executor(isas[i], 2);
    if (executor == NULL) continue;
    for (size_t k = 0; k < COUNT(kinds); k++) {
      for (int32_t needle = kinds[k].page / 5; needle < 197; needle += kinds[k].page) {
        attn_spec s = attn_spec_default();
        s.kv_dtype = kinds[k].kv;
        s.page_tokens = kinds[k].page;
        s.rows = 2;
        s.seq_len = lens;
        s.needle = needle;
        s.scale = 1.0f;
        attn_case c;
        attn_case_init(&c, &s);
        for (size_t r = 0; r < COUNT(routes); r++) {
          char what[96];
          pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
          options.route = routes[r];
          attn_plan p;
          attn_plan_init(&p, &c, &options);
          attn_run(&c, &p, executor);
          snprintf(what, sizeof what, "%s %s %s page %d", pkv_isa_name(isas[i]),
                   pkv_route_name(routes[r]), pkv_dtype_name(s.kv_dtype), s.page_tokens);
          check_needle(&c, what);
          attn_plan_deinit(&p);
        }
        attn_case_deinit(&c);
      }
    }
    pkv_executor_destroy(executor);
  }
}

/* NaN and infinity in tokens that a query may not see yet do not reach it. */
static void test_future_tokens_are_not_read(void **state) {
  (void)state;
  const int32_t lens[] = {90};
  attn_spec s = attn_spec_default();
  s.rows = 1;
  s.seq_len = lens;
  s.q_len = 7;
  attn_case c;
  attn_case_init(&c, &s);
  attn_case_answer(&c);
  for (int32_t h = 0; h < s.kv_heads; h++) {
    for (int32_t d = 0; d < s.head_dim; d++) {
      pkv_store(attn_case_element(&c, false, 0, 89, h), s.kv_dtype, d, NAN);
      pkv_store(attn_case_element(&c, true, 0, 89, h), s.kv_dtype, d, d % 2 ? NAN : INFINITY);
    }
  }
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  attn_plan p;
  attn_plan_init(&p, &c, &options);
  for (size_t i = 0; i < COUNT(isas); i++) {
    pkv_executor *executor = attn_executor(isas[i], 1);
    if (executor == NULL) continue;
    attn_run(&c, &p, executor);
    const int64_t at = 6 * c.out_token; /* the last query does see it */
    assert_true(isnan(((float *)c.out)[at]));
    for (int64_t k = 0; k < c.out_token; k++)
      ((float *)c.out)[at + k] = (float)c.want[at + k];
    for (int64_t k = 0; k < c.lse_token; k++)
      c.lse[6 * c.lse_token + k] = (float)c.want_lse[6 * c.lse_token + k];
    attn_check(&c, pkv_isa_name(isas[i]));
    pkv_executor_destroy(executor);
  }
  attn_plan_deinit(&p);
  attn_case_deinit(&c);
}

/* A sparse pool past 2^31 elements and 2^32 bytes: the last pages give what the first ones give. */
static void test_pool_past_2_31(void **state) {
  (void)state;
  const int64_t page_elements = 2 * 16 * 128, pages = (INT64_C(1) << 31) / page_elements + 4096;
  const size_t bytes = (size_t)(pages * page_elements * 2);
  unsigned char *k =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  unsigned char *v =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (k == MAP_FAILED || v == MAP_FAILED) {
    print_message("no address space for %zu bytes twice: skipped\n", bytes);
    skip();
  }
  const int32_t lens[] = {100, 100};
  attn_spec s = attn_spec_default();
  s.rows = 2;
  s.seq_len = lens;
  s.head_dim = 128;
  attn_case c;
  attn_case_init(&c, &s);
  pkv_cache big = c.cache;
  big.k = k;
  big.v = v;
  big.pages = pages;
  for (int32_t i = 0; i < 7; i++) { /* row 0's pages at both ends */
    const size_t page = (size_t)page_elements * 2;
    const size_t from = (size_t)c.table[i] * page;
    const int64_t last = pages - 7 + i;
    memcpy(k + (size_t)i * page, (unsigned char *)c.cache.k + from, page);
    memcpy(v + (size_t)i * page, (unsigned char *)c.cache.v + from, page);
    memcpy(k + (size_t)last * page, (unsigned char *)c.cache.k + from, page);
    memcpy(v + (size_t)last * page, (unsigned char *)c.cache.v + from, page);
    c.table[i] = i;
    c.table[c.table_stride + i] = (int32_t)last;
  }
  memcpy((float *)c.q + c.q_token, c.q, (size_t)c.q_token * sizeof(float));
  c.cache = big;
  for (size_t r = 0; r < COUNT(routes); r++) {
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.route = routes[r];
    options.parts = routes[r] == PKV_ROUTE_BALANCED ? 2 : 0;
    attn_plan p;
    attn_plan_init(&p, &c, &options);
    for (size_t i = 0; i < COUNT(isas); i++) {
      pkv_executor *executor = attn_executor(isas[i], 1);
      if (executor == NULL) continue;
      attn_run(&c, &p, executor);
      const float *out = c.out;
      for (int64_t e = 0; e < c.out_token; e++)
        if (!(out[e] == out[c.out_token + e]))
          fail_msg("%s %s [%lld]: first pages %.9g, last pages %.9g", pkv_isa_name(isas[i]),
                   pkv_route_name(routes[r]), (long long)e, (double)out[e],
                   (double)out[c.out_token + e]);
      pkv_executor_destroy(executor);
    }
    attn_plan_deinit(&p);
  }
  /* Appending there, too: the slot's own 64-bit product. */
  pkv_executor *executor = attn_executor(PKV_ISA_AUTO, 1);
  float fresh[2 * 128];
  for (int i = 0; i < 256; i++)
    fresh[i] = (float)i;
  const int64_t slot = pages * 16 - 1;
  pkv_append_args append = PKV_APPEND_ARGS_INIT;
  append.cache = &c.cache;
  append.tokens = 1;
  append.slots = &slot;
  append.k = append.v = fresh;
  assert_int_equal(pkv_append(executor, &append, NULL), PKV_OK);
  const int64_t at = (pages - 1) * page_elements + 16 * 128 + 15 * 128 + 5;
  assert_true(pkv_load(k, PKV_DTYPE_F16, at) == 133.0f);
  assert_true(pkv_load(v, PKV_DTYPE_F16, at) == 133.0f);
  pkv_executor_destroy(executor);
  munmap(k, bytes);
  munmap(v, bytes);
  attn_case_deinit(&c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_edges),
      cmocka_unit_test(test_long_among_short),
      cmocka_unit_test(test_twenty_fixed_splits),
      cmocka_unit_test(test_needles),
      cmocka_unit_test(test_future_tokens_are_not_read),
      cmocka_unit_test(test_pool_past_2_31),
  };
  return cmocka_run_group_tests_name("attention_lengths", tests, NULL, NULL);
}
