/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over shared prefixes on the CPU against the naive answer, in every instruction set; and
   in batch-invariant mode against `balanced`, bit for bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/plan_tree.h"
#include "support/attn_case.h"
#include "support/sanitized.h"
#include "support/tree_batch.h"

#define COUNT(x) (sizeof(x) / sizeof(x)[0])

static const pkv_isa isas[] = {PKV_ISA_REFERENCE, PKV_ISA_SCALAR, PKV_ISA_AVX2, PKV_ISA_AVX512,
                               PKV_ISA_NEON};

static pkv_plan_options shared_options(int32_t parts, uint32_t flags) {
  pkv_plan_options o = PKV_PLAN_OPTIONS_INIT;
  o.route = PKV_ROUTE_SHARED;
  o.parts = parts;
  o.flags = flags;
  o.chunk_tokens = flags ? 128 : 0;
  return o;
}

static attn_spec spec_of(const tree_batch *b) {
  attn_spec s = attn_spec_default();
  s.rows = b->rows;
  s.seq_len = b->seq_len;
  s.page_tokens = b->page_tokens;
  s.pages = b->table;
  s.pages_stride = b->max_pages;
  s.page_count = b->pages;
  s.head_dim = 16;
  return s;
}

static int64_t nodes_of(const attn_plan *p) {
  return pkv_tree_view_of(p->plan).tree->nodes;
}

/* In each instruction set, or in one. Returns the nodes of the plan. */
static int64_t run_all(attn_case *c, const pkv_plan_options *options, pkv_isa only) {
  attn_plan p;
  attn_plan_init(&p, c, options);
  assert_int_equal(p.status, PKV_OK);
  const int64_t nodes = nodes_of(&p);
  for (size_t i = 0; i < COUNT(isas); i++) {
    if (only != PKV_ISA_AUTO && isas[i] != only) continue;
    pkv_executor *executor = attn_executor(isas[i], 2);
    if (executor == NULL) continue;
    attn_run(c, &p, executor);
    attn_check(c, pkv_isa_name(isas[i]));
    pkv_executor_destroy(executor);
  }
  attn_plan_deinit(&p);
  return nodes;
}

static void random_spec(attn_spec *s, pkv_rng *rng) {
  static const int32_t groups[] = {1, 2, 3, 4, 8, 16};
  static const int32_t windows[] = {0, 0, 0, 1, 100, 500};
  static const pkv_dtype kv[] = {PKV_DTYPE_F16, PKV_DTYPE_BF16, PKV_DTYPE_F32, PKV_DTYPE_FP8_E4M3};
  s->seed = pkv_rng_next(rng);
  s->kv_heads = (int32_t)pkv_rng_range(rng, 1, 3);
  s->group = groups[pkv_rng_below(rng, 6)];
  s->head_dim = 8 * (int32_t)pkv_rng_range(rng, 1, 4);
  s->q_len = pkv_rng_below(rng, 2) ? 1 : (int32_t)pkv_rng_range(rng, 2, 4);
  s->window = windows[pkv_rng_below(rng, 6)];
  s->soft_cap = pkv_rng_below(rng, 4) ? 0.0f : 5.0f;
  s->sinks = pkv_rng_below(rng, 4) == 0;
  s->lse_base2 = pkv_rng_below(rng, 2);
  s->strided = pkv_rng_below(rng, 2);
  s->layout = (attn_layout)pkv_rng_below(rng, ATTN_LAYOUTS);
  s->kv_dtype = kv[pkv_rng_below(rng, 4)];
  s->head_scales = s->kv_dtype == PKV_DTYPE_FP8_E4M3;
}

static void test_random_trees(void **state) {
  (void)state;
  static const int32_t pages[] = {1, 3, 16, 16, 64, 100, 1024};
  int64_t nodes = 0;
  for (uint64_t seed = 1; seed <= 100; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, seed);
    tree_batch b;
    const int32_t run = 1 << pkv_rng_range(&rng, 6, 10);
    tree_batch_random(&b, &rng, pages[pkv_rng_below(&rng, 7)], (int32_t)pkv_rng_range(&rng, 1, 6),
                      (int32_t)pkv_rng_range(&rng, 1, 2 << pkv_rng_below(&rng, 6)), run,
                      (int32_t)pkv_rng_range(&rng, 1, 40), run / 4);
    attn_spec s = spec_of(&b);
    random_spec(&s, &rng);
    attn_case c;
    attn_case_init(&c, &s);
    attn_case_answer(&c);
    const pkv_plan_options options =
        shared_options((int32_t)pkv_rng_range(&rng, 1, 1 << pkv_rng_below(&rng, 7)), seed % 4 == 0);
    nodes += run_all(&c, &options, PKV_ISA_AUTO);
    attn_case_deinit(&c);
    tree_batch_deinit(&b);
  }
  if (nodes < 100) fail_msg("%lld nodes", (long long)nodes);
}

/* Three levels, eight rows: a key of huge score in each page in turn, shared ones and private. */
static void test_needle_in_every_page(void **state) {
  (void)state;
  tree_batch b;
  tree_batch_init(&b, 16);
  const int32_t root = tree_batch_node(&b, -1, 200);
  for (int i = 0; i < 2; i++) {
    const int32_t below = tree_batch_node(&b, root, 150);
    for (int k = 0; k < 4; k++)
      tree_batch_row(&b, below, 40 + 9 * k);
  }
  tree_batch_finish(&b, 3);
  for (int32_t needle = 5; needle < 390; needle += 16) {
    attn_spec s = spec_of(&b);
    s.needle = needle;
    s.seed = (uint64_t)needle;
    attn_case c;
    attn_case_init(&c, &s);
    attn_case_answer(&c);
    pkv_plan_options options = shared_options(3 + needle % 5, 0);
    options.node_segment_cost = 1; /* so that small nodes pay */
    options.state_cost = 1;
    assert_true(run_all(&c, &options, PKV_ISA_AUTO) >= 2);
    attn_case_deinit(&c);
  }
  tree_batch_deinit(&b);
}

static void same_bytes(const void *a, const void *b, size_t bytes, const char *what) {
  for (size_t i = 0; i < bytes; i++)
    if (((const unsigned char *)a)[i] != ((const unsigned char *)b)[i])
      fail_msg("%s: byte %zu of %zu is 0x%02x, 0x%02x", what, i, bytes,
               ((const unsigned char *)a)[i], ((const unsigned char *)b)[i]);
}

/* Batch-invariant: sharing, its parts and its workers do not show in the bits. */
static void test_sharing_does_not_show(void **state) {
  (void)state;
  int64_t nodes = 0;
  for (uint64_t seed = 1; seed <= 40; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, 70 + seed);
    tree_batch b;
    tree_batch_random(&b, &rng, seed % 2 ? 16 : 48, 4, 6, 700, 16, 300);
    attn_spec s = spec_of(&b);
    random_spec(&s, &rng);
    attn_case c;
    attn_case_init(&c, &s);
    pkv_plan_options options = shared_options(1, PKV_PLAN_BATCH_INVARIANT);
    options.route = PKV_ROUTE_BALANCED;
    attn_plan p;
    unsigned char *want = malloc(c.out_bytes);
    float *want_lse = malloc(c.lse_floats * sizeof(float));
    for (size_t i = 0; i < COUNT(isas); i++) {
      pkv_executor *executor = attn_executor(isas[i], 1 + (int32_t)(seed % 3));
      if (executor == NULL) continue;
      options.route = PKV_ROUTE_BALANCED;
      attn_plan_init(&p, &c, &options);
      attn_run(&c, &p, executor);
      memcpy(want, c.out, c.out_bytes);
      memcpy(want_lse, c.lse, c.lse_floats * sizeof(float));
      attn_plan_deinit(&p);
      for (int32_t parts = 1; parts <= 40; parts = parts * 3 + 1) {
        options = shared_options(parts, PKV_PLAN_BATCH_INVARIANT);
        options.state_cost = options.node_segment_cost = 1;
        attn_plan_init(&p, &c, &options);
        nodes += nodes_of(&p);
        attn_run(&c, &p, executor);
        same_bytes(want, c.out, c.out_bytes, pkv_isa_name(isas[i]));
        same_bytes(want_lse, c.lse, c.lse_floats * sizeof(float), pkv_isa_name(isas[i]));
        attn_plan_deinit(&p);
      }
      pkv_executor_destroy(executor);
    }
    free(want);
    free(want_lse);
    attn_case_deinit(&c);
    tree_batch_deinit(&b);
  }
  if (nodes < 200) fail_msg("%lld nodes", (long long)nodes);
}

static void test_any_number_of_workers(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 5);
  tree_batch b;
  tree_batch_random(&b, &rng, 16, 4, 5, 800, 24, 300);
  attn_spec s = spec_of(&b);
  attn_case c;
  attn_case_init(&c, &s);
  const pkv_plan_options options = shared_options(21, 0);
  attn_plan p;
  attn_plan_init(&p, &c, &options);
  assert_true(nodes_of(&p) > 0);
  unsigned char *want = malloc(c.out_bytes);
  for (size_t i = 0; i < COUNT(isas); i++) {
    for (int32_t threads = 1; threads <= 5; threads++) {
      pkv_executor *executor = attn_executor(isas[i], threads);
      if (executor == NULL) continue;
      attn_run(&c, &p, executor);
      if (threads == 1) memcpy(want, c.out, c.out_bytes);
      same_bytes(want, c.out, c.out_bytes, pkv_isa_name(isas[i]));
      pkv_executor_destroy(executor);
    }
  }
  free(want);
  attn_plan_deinit(&p);
  attn_case_deinit(&c);
  tree_batch_deinit(&b);
}

/* A batch through every instruction set; the caller frees nothing. */
static int64_t run_batch(tree_batch *b, attn_spec s, int32_t parts, pkv_isa only) {
  attn_case c;
  attn_case_init(&c, &s);
  attn_case_answer(&c);
  const pkv_plan_options options = shared_options(parts, 0);
  const int64_t nodes = run_all(&c, &options, only);
  attn_case_deinit(&c);
  tree_batch_deinit(b);
  return nodes;
}

/* vllm#22103: 32 rows of one prompt and 18 of another; 128 identical ones; lse with a wide stride.
   */
static void test_two_prompts_and_identical_ones(void **state) {
  (void)state;
  tree_batch b;
  tree_batch_init(&b, 16);
  const int32_t first = tree_batch_node(&b, -1, 333), second = tree_batch_node(&b, -1, 450);
  for (int i = 0; i < 50; i++)
    tree_batch_row(&b, i < 32 ? first : second, 1 + i % 7);
  tree_batch_finish(&b, 22103);
  attn_spec s = spec_of(&b);
  s.strided = true;
  s.group = 4;
  assert_int_equal(run_batch(&b, s, 16, PKV_ISA_AUTO), 2);
  tree_batch_init(&b, 16);
  const int32_t only = tree_batch_node(&b, -1, 300);
  for (int i = 0; i < 128; i++)
    tree_batch_row(&b, only, 0);
  tree_batch_finish(&b, 22003);
  s = spec_of(&b);
  s.strided = true;
  s.lse_base2 = true;
  assert_int_equal(run_batch(&b, s, 16, PKV_ISA_AUTO), 1);
}

/* vllm#26130: 100 rows behind 1K tokens, step after step. */
static void test_many_steps_finish(void **state) {
  (void)state;
  tree_batch b;
  tree_batch_init(&b, 16);
  const int32_t root = tree_batch_node(&b, -1, 1024);
  for (int i = 0; i < 100; i++)
    tree_batch_row(&b, root, 1 + i);
  tree_batch_finish(&b, 26130);
  attn_spec s = spec_of(&b);
  s.kv_heads = 1;
  s.head_dim = 8;
  attn_case c;
  attn_case_init(&c, &s);
  attn_case_answer(&c);
  const pkv_plan_options options = shared_options(8, 0);
  pkv_executor *executor = attn_executor(PKV_ISA_AUTO, 2);
  const int steps = TEST_SANITIZED ? 100 : 1000;
  for (int step = 0; step < steps; step++) {
    attn_plan p;
    attn_plan_init(&p, &c, &options);
    attn_run(&c, &p, executor);
    if ((step + 1) % (steps / 4) == 0) attn_check(&c, "step");
    attn_plan_deinit(&p);
  }
  pkv_executor_destroy(executor);
  attn_case_deinit(&c);
  tree_batch_deinit(&b);
}

/* flashinfer#595: 8 rows of 8 heads over 1 KV head behind 4000 tokens must not cost more. */
static void test_small_batches_do_not_pay_for_it(void **state) {
  (void)state;
  for (int32_t rows = 1; rows <= 8; rows++) {
    for (int32_t prefix = 0; prefix <= 4000; prefix += 500) {
      tree_batch b;
      tree_batch_init(&b, 16);
      const int32_t root = tree_batch_node(&b, -1, prefix);
      for (int i = 0; i < rows; i++)
        tree_batch_row(&b, root, 256);
      tree_batch_finish(&b, 595);
      attn_spec s = spec_of(&b);
      s.kv_heads = 1;
      s.group = 8;
      attn_case c;
      attn_case_init(&c, &s);
      const pkv_plan_options options = shared_options(16, 0);
      pkv_plan_options alone = options;
      alone.state_cost = UINT32_MAX; /* nothing is worth it */
      attn_plan p, q;
      attn_plan_init(&p, &c, &options);
      attn_plan_init(&q, &c, &alone);
      assert_int_equal(nodes_of(&q), 0);
      if (p.plan->total_cost > q.plan->total_cost)
        fail_msg("%d rows, prefix %d: cost %lld with sharing, %lld without", rows, prefix,
                 (long long)p.plan->total_cost, (long long)q.plan->total_cost);
      assert_int_equal(nodes_of(&p), rows > 1 && prefix > 0 ? 1 : 0);
      attn_plan_deinit(&p);
      attn_plan_deinit(&q);
      attn_case_deinit(&c);
      tree_batch_deinit(&b);
    }
  }
}

static void test_staggered_chain(void **state) {
  (void)state;
  tree_batch b;
  tree_batch_init(&b, 32);
  int32_t at = -1;
  for (int32_t i = 0; i < 256; i++) {
    tree_batch_row(&b, at, 40);
    at = tree_batch_node(&b, at, 64);
  }
  tree_batch_finish(&b, 8);
  attn_spec s = spec_of(&b);
  s.kv_heads = 1;
  s.head_dim = 8;
  assert_in_range(run_batch(&b, s, 64, PKV_ISA_SCALAR), 4, 5);
}

/* PAT's tree: 1, 4, 8, 256 nodes of 32, 256, 256, 32 tokens; its four head shapes. */
static void test_four_levels(void **state) {
  (void)state;
  static const int32_t heads[][2] = {{32, 32}, {16, 8}, {32, 8}, {64, 8}};
  for (int k = 0; k < 4; k++) {
    tree_batch b;
    tree_batch_init(&b, 16);
    const int32_t root = tree_batch_node(&b, -1, 32);
    for (int i = 0; i < 4; i++) {
      const int32_t second = tree_batch_node(&b, root, 256);
      for (int j = 0; j < 2; j++) {
        const int32_t third = tree_batch_node(&b, second, 256);
        for (int l = 0; l < 32; l++)
          tree_batch_row(&b, third, 32);
      }
    }
    tree_batch_finish(&b, 9);
    attn_spec s = spec_of(&b);
    s.kv_heads = heads[k][1] / 8 ? heads[k][1] / 8 : 1; /* an eighth of the heads: time */
    s.group = heads[k][0] / heads[k][1];
    s.head_dim = 8;
    assert_true(run_batch(&b, s, 32, PKV_ISA_AUTO) >= 8);
  }
}

static void test_long_rows(void **state) {
  (void)state;
  tree_batch b;
  tree_batch_init(&b, 256);
  const int32_t root = tree_batch_node(&b, -1, 65000);
  for (int i = 0; i < 3; i++)
    tree_batch_row(&b, root, 536 * i);
  tree_batch_row(&b, -1, 0);
  tree_batch_row(&b, -1, 5);
  tree_batch_finish(&b, 64);
  attn_spec s = spec_of(&b);
  s.kv_heads = 1;
  s.head_dim = 8;
  assert_int_equal(run_batch(&b, s, 40, PKV_ISA_AUTO), 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_trees),
      cmocka_unit_test(test_needle_in_every_page),
      cmocka_unit_test(test_sharing_does_not_show),
      cmocka_unit_test(test_any_number_of_workers),
      cmocka_unit_test(test_two_prompts_and_identical_ones),
      cmocka_unit_test(test_many_steps_finish),
      cmocka_unit_test(test_small_batches_do_not_pay_for_it),
      cmocka_unit_test(test_staggered_chain),
      cmocka_unit_test(test_four_levels),
      cmocka_unit_test(test_long_rows),
  };
  return cmocka_run_group_tests_name("attention_shared", tests, NULL, NULL);
}
