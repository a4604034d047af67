/* SPDX-License-Identifier: Apache-2.0 */
/* Every route on every instruction set against a naive answer, over a grid of shapes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "support/attn_case.h"
#include "support/sanitized.h"

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

static const pkv_isa isas[] = {PKV_ISA_REFERENCE, PKV_ISA_SCALAR, PKV_ISA_AVX2, PKV_ISA_AVX512,
                               PKV_ISA_NEON};
static pkv_executor *executors[COUNT(isas)];

static const int32_t pages[] = {1, 3, 16, 64, 1024};
static const int32_t dims[] = {8, 24, 64, 80, 128, 256};
static const int32_t groups[] = {1, 3, 4, 7, 8, 32};
static const int32_t q_lens[] = {1, 2, 5, 16, 70};

/* balanced as it is, in many parts, batch-invariant; then the seed's four. */
static int plan_options(pkv_plan_options *out) {
  int n = 0;
  for (int i = 0; i < 7; i++)
    out[i] = (pkv_plan_options)PKV_PLAN_OPTIONS_INIT;
  n++;
  out[n].parts = 37;
  out[n++].segment_cost = 1;
  out[n].flags = PKV_PLAN_BATCH_INVARIANT;
  out[n].parts = 13;
  out[n++].chunk_tokens = 64;
  out[n++].route = PKV_ROUTE_BUCKET_EXACT;
  out[n].route = PKV_ROUTE_BUCKET_PADDED;
  out[n].splits = 5;
  out[n++].bucket_tokens = 128;
  out[n++].route = PKV_ROUTE_SPLIT;
  out[n++].route = PKV_ROUTE_WORKQUEUE;
  return n;
}

static void run_all(attn_case *c) {
  pkv_plan_options options[7];
  const int n = plan_options(options);
  char what[64];
  attn_case_answer(c);
  for (int i = 0; i < n; i++) {
    attn_plan p;
    attn_plan_init(&p, c, &options[i]);
    assert_int_equal(p.status, PKV_OK);
    for (size_t k = 0; k < COUNT(isas); k++) {
      if (executors[k] == NULL) continue;
      /* Slow, and routes share its code: whole, invariant, and separate launches. */
      if (isas[k] == PKV_ISA_REFERENCE && i != 0 && i != 2 && i != 6) continue;
      attn_run(c, &p, executors[k]);
      snprintf(what, sizeof what, "%s %s plan %d", pkv_isa_name(isas[k]),
               pkv_route_name(options[i].route), i);
      attn_check(c, what);
    }
    attn_plan_deinit(&p);
  }
}

#define PICK(rng, list) (list)[pkv_rng_below((rng), COUNT(list))]

/* What the grid leaves open is drawn: every pair of values meets somewhere. */
static attn_spec draw(pkv_rng *rng, uint64_t seed, int32_t *lens) {
  attn_spec s = attn_spec_default();
  s.seed = seed;
  s.kv_dtype = (pkv_dtype)pkv_rng_below(rng, 4);
  s.q_dtype = (pkv_dtype)pkv_rng_below(rng, 3);
  s.out_dtype = pkv_rng_below(rng, 2) ? PKV_DTYPE_F32 : (pkv_dtype)pkv_rng_below(rng, 3);
  s.layout = (attn_layout)pkv_rng_below(rng, ATTN_LAYOUTS);
  s.page_tokens = PICK(rng, pages);
  s.head_dim = PICK(rng, dims);
  s.group = PICK(rng, groups);
  s.q_len = PICK(rng, q_lens);
  s.kv_heads = (int32_t)pkv_rng_range(rng, 1, s.group == 32 ? 1 : 3);
  s.rows = (int32_t)pkv_rng_range(rng, 1, 4);
  for (int32_t r = 0; r < s.rows; r++)
    lens[r] = (int32_t)pkv_rng_range(rng, 0, pkv_rng_below(rng, 3) ? 150 : 420);
  if (pkv_rng_below(rng, 3) == 0) s.window = (int32_t)pkv_rng_range(rng, 1, 200);
  if (pkv_rng_below(rng, 3) == 0) s.soft_cap = 0.5f + (float)pkv_rng_below(rng, 50);
  s.sinks = pkv_rng_below(rng, 3) == 0;
  s.lse_base2 = pkv_rng_below(rng, 3) == 0;
  s.strided = pkv_rng_below(rng, 2) == 0;
  if (pkv_rng_below(rng, 3) == 0) s.scale = 0.3f;
  if (s.kv_dtype == PKV_DTYPE_FP8_E4M3) {
    s.k_scale = pkv_rng_below(rng, 2) ? 0.25f : 0.0f;
    s.v_scale = pkv_rng_below(rng, 2) ? 3.0f : 0.0f;
    s.head_scales = pkv_rng_below(rng, 2) == 0;
  }
  s.seq_len = lens;
  return s;
}

static void run_spec(const attn_spec *s) {
  attn_case c;
  attn_case_init(&c, s);
  run_all(&c);
  attn_case_deinit(&c);
}

/* One case for each dtype x page x head_dim and for each group x q_len, the rest drawn. */
static void test_grid(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 20260622);
  int32_t lens[8];
  uint64_t seed = 100;
  for (int dtype = 0; dtype < 4; dtype++) {
    for (size_t i = 0; i < COUNT(pages); i++) {
      for (size_t j = 0; j < COUNT(dims); j++) {
        attn_spec s = draw(&rng, seed++, lens);
        if (TEST_SANITIZED && ((size_t)dtype + i + j) % 3 != 0) continue;
        s.kv_dtype = (pkv_dtype)dtype;
        s.page_tokens = pages[i];
        s.head_dim = dims[j];
        if (s.q_len == 70) s.q_len = 3;
        if (s.group == 32) s.q_len = 1;
        run_spec(&s);
      }
    }
  }
  for (size_t i = 0; i < COUNT(groups); i++) {
    for (size_t j = 0; j < COUNT(q_lens); j++) {
      attn_spec s = draw(&rng, seed++, lens);
      if (TEST_SANITIZED && (i + j) % 2 != 0) continue;
      s.group = groups[i];
      s.q_len = q_lens[j];
      s.kv_heads = 1;
      if (s.head_dim > 80) s.head_dim = 24;
      run_spec(&s);
    }
  }
}

/* Groups 1 .. 32 with the shapes that have their own kernel sizes. */
static void test_every_group(void **state) {
  (void)state;
  for (int32_t group = 1; group <= 32; group++) {
    const int32_t lens[] = {131, 1};
    attn_spec s = attn_spec_default();
    s.seed = 7000 + (uint64_t)group;
    s.group = group;
    s.kv_heads = 1;
    s.head_dim = group % 2 ? 64 : 40;
    s.rows = 2;
    s.seq_len = lens;
    run_spec(&s);
  }
}

/* Every head dimension there is: whole vectors of any instruction set, and all remainders. */
static void test_every_head_dim(void **state) {
  (void)state;
  for (int32_t dim = 8; dim <= 256; dim += 8) {
    const int32_t lens[] = {77, 1};
    attn_spec s = attn_spec_default();
    s.seed = 8000 + (uint64_t)dim;
    s.kv_dtype = (pkv_dtype)(dim / 8 % 4);
    s.layout = (attn_layout)(dim / 32 % ATTN_LAYOUTS);
    s.head_dim = dim;
    s.group = 3;
    s.rows = 2;
    s.seq_len = lens;
    run_spec(&s);
  }
}

/* q_len greater than the row: tokens before its start give zeros and -inf, sinks or not. */
static void test_negative_positions(void **state) {
  (void)state;
  for (int sinks = 0; sinks < 2; sinks++) {
    const int32_t lens[] = {0, 3, 1, 200};
    attn_spec s = attn_spec_default();
    s.q_len = 5;
    s.rows = 4;
    s.sinks = sinks;
    s.seq_len = lens;
    run_spec(&s);
  }
}

static int setup(void **state) {
  (void)state;
  for (size_t k = 0; k < COUNT(isas); k++) {
    executors[k] = attn_executor(isas[k], isas[k] == PKV_ISA_REFERENCE ? 2 : 1);
    if (executors[k] == NULL) print_message("no %s here: not compared\n", pkv_isa_name(isas[k]));
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  for (size_t k = 0; k < COUNT(isas); k++)
    pkv_executor_destroy(executors[k]);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_grid),
      cmocka_unit_test(test_every_group),
      cmocka_unit_test(test_every_head_dim),
      cmocka_unit_test(test_negative_positions),
  };
  return cmocka_run_group_tests_name("attention_grid", tests, setup, teardown);
}
