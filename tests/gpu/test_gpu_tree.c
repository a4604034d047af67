/* SPDX-License-Identifier: Apache-2.0 */
/* Shared plans that the device makes from its block tables: the bytes of the host's, whatever lay
   in the memory before, and again for other tables in the same memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device_ops.h"
#include "gpu/gpu_case.h"
#include "support/tree_batch.h"

typedef struct tree_limits {
  int32_t rows, longest, pages;
} tree_limits;

static void compare_bytes(const char *what, const pkv_plan *host, const void *device) {
  const unsigned char *a = (const void *)host, *b = device;
  for (int64_t i = 0; i < host->plan_bytes; i++)
    if (a[i] != b[i])
      fail_msg("%s: byte %lld of %lld (tree at %lld) is %02x on the host, %02x on the device", what,
               (long long)i, (long long)host->plan_bytes, (long long)host->tree_at, a[i], b[i]);
}

/* One batch through an existing plan. */
static void same_plan(pkv_device_plan *dp, const tree_batch *b, uint32_t flags, const char *what) {
  size_t bytes, workspace, got = 0;
  OK(pkv_plan_size(&bytes, &workspace, &dp->shape, &dp->options, b->rows, dp->limits.max_seq_len,
                   err));
  void *host = aligned_alloc(64, bytes), *device = malloc(bytes);
  const pkv_plan *plan;
  pkv_sharing sharing = tree_batch_sharing(b);
  sharing.flags = flags;
  OK(pkv_plan_build_shared(&plan, host, bytes, &dp->shape, &dp->options, b->rows, b->seq_len,
                           &sharing, err));
  const size_t rows = (size_t)b->rows;
  void *lens = gpu_up(b->seq_len, (rows + 1) * 4);
  void *table = gpu_up(b->table, (rows * (size_t)b->max_pages + 1) * 4);
  sharing.block_table = table;
  OK(pkv_device_plan_build_shared(dp, b->rows, lens, &sharing, NULL, err));
  OK(pkv_device_plan_download(device, bytes, &got, dp, NULL, err));
  assert_int_equal(got, plan->plan_bytes);
  compare_bytes(what, plan, device);
  pkv_device_free(gpu, lens);
  pkv_device_free(gpu, table);
  free(host);
  free(device);
}

static pkv_device_plan *plan_for(pkv_rng *rng, int32_t page, int32_t rows, int32_t longest) {
  static const int32_t groups[] = {1, 3, 4, 8}, windows[] = {0, 0, 1, 700};
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.kv_heads = (int32_t)pkv_rng_range(rng, 1, 8);
  shape.query_heads = shape.kv_heads * PICK(rng, groups);
  shape.head_dim = 64;
  shape.page_tokens = page;
  shape.q_len = (int32_t)pkv_rng_range(rng, 1, 3);
  shape.window = PICK(rng, windows);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.route = PKV_ROUTE_SHARED;
  options.parts = (int32_t)pkv_rng_range(rng, 0, 1) * (1 << pkv_rng_below(rng, 9));
  options.flags = (uint32_t)pkv_rng_below(rng, 2);
  options.chunk_tokens = 128;
  if (pkv_rng_below(rng, 3) == 0) options.flags |= PKV_PLAN_ENOUGH_SHARED;
  options.state_cost = (uint32_t)pkv_rng_below(rng, 5);
  options.node_segment_cost = (uint32_t)pkv_rng_below(rng, 100);
  pkv_device_plan *dp = NULL;
  OK(pkv_device_plan_create(&dp, gpu, &shape, &options, PKV_DTYPE_F16, rows, longest, err));
  return dp;
}

static void test_random_trees(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t pages[] = {1, 3, 16, 16, 64, 100, 1024};
  const int seeds = gpu_opt.small ? 3 : 60;
  for (int seed = 1; seed <= seeds; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, (uint64_t)seed);
    const int32_t page = PICK(&rng, pages), most = seed % 8 ? 200 : 1500;
    const int longest_node = page < 16 ? 8 : 12; /* tables of some MB, not of hundreds */
    pkv_device_plan *dp = plan_for(&rng, page, most, 1 << 17);
    for (int i = 0; i < 4; i++) {
      char what[64];
      tree_batch b;
      tree_batch_random(&b, &rng, page, (int32_t)pkv_rng_range(&rng, 1, 7),
                        2 << pkv_rng_below(&rng, 6), 1 << pkv_rng_range(&rng, 4, longest_node),
                        (int32_t)pkv_rng_range(&rng, 1, most), 500);
      snprintf(what, sizeof what, "seed %d tree %d of %d rows", seed, i, b.rows);
      if (i == 2) gpu_poison_plan(dp, -1, 7);
      same_plan(dp, &b, i % 2 ? PKV_TABLE_CHAINED : 0u, what);
      tree_batch_deinit(&b);
    }
    pkv_device_plan_destroy(dp);
  }
}

/* One prompt for all, chains of prefixes, none; up to more rows than shared memory holds. */
static void test_sizes(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t counts[] = {0, 1, 2, 31, 32, 33, 256, 512, 513, 1024, 2500};
  pkv_rng rng;
  pkv_rng_init(&rng, 77);
  for (size_t k = 0; k < COUNT(counts) - (gpu_opt.small ? 3 : 0); k++)
    for (int kind = 0; kind < 3; kind++) {
      char what[64];
      pkv_device_plan *dp = plan_for(&rng, 16, counts[k], 1 << 15);
      tree_batch b;
      tree_batch_init(&b, 16);
      int32_t at = kind == 0 ? tree_batch_node(&b, -1, 10240) : -1;
      for (int32_t i = 0; i < counts[k]; i++) {
        tree_batch_row(&b, at, kind == 0 ? i % 100 : 70);
        if (kind == 1 && i < 300) at = tree_batch_node(&b, at, 64);
      }
      tree_batch_finish(&b, 8);
      snprintf(what, sizeof what, "%d rows, kind %d", counts[k], kind);
      same_plan(dp, &b, 0u, what);
      tree_batch_deinit(&b);
      pkv_device_plan_destroy(dp);
    }
}

/* A page at one index of rows of other prefixes: the planner begins again with all pages. */
static void test_broken_chains(void **state) {
  (void)state;
  NEED_GPU();
  for (int seed = 1; seed <= (gpu_opt.small ? 2 : 12); seed++) {
    char what[64];
    pkv_rng rng;
    pkv_rng_init(&rng, 40 + (uint64_t)seed);
    const int32_t most = seed % 4 ? 200 : 900, at = seed % 5;
    pkv_device_plan *dp = plan_for(&rng, 16, most, 1 << 15);
    tree_batch b;
    tree_batch_random(&b, &rng, 16, 4, 8, 1000, most / 2, 500);
    for (int32_t row = 0; row < b.rows; row++)
      if ((at + 1) * 16 <= b.seq_len[row] && pkv_rng_below(&rng, 4) > 0)
        b.table[(int64_t)row * b.max_pages + at] = 0;
    snprintf(what, sizeof what, "seed %d, page 0 at %d of %d rows", seed, at, b.rows);
    same_plan(dp, &b, 0u, what);
    tree_batch_deinit(&b);
    pkv_device_plan_destroy(dp);
  }
}

static void test_refusals(void **state) {
  (void)state;
  NEED_GPU();
  pkv_rng rng;
  pkv_rng_init(&rng, 3);
  pkv_device_plan *dp = plan_for(&rng, 16, 4, 100);
  pkv_error error = {PKV_OK, NULL, {0}};
  pkv_sharing sharing = PKV_SHARING_INIT;
  int32_t words[64] = {0};
  void *there = gpu_up(words, sizeof words);
  assert_int_equal(pkv_device_plan_build_shared(dp, 1, there, &sharing, NULL, &error),
                   PKV_E_INVALID); /* no table */
  sharing.block_table = there;
  sharing.max_pages = 7;
  assert_int_equal(pkv_device_plan_build_shared(dp, 5, there, &sharing, NULL, &error), PKV_E_RANGE);
  assert_int_equal(pkv_device_plan_build_shared(dp, 1, NULL, &sharing, NULL, &error),
                   PKV_E_INVALID);
  assert_int_equal(pkv_device_plan_build(dp, 1, there, NULL, &error), PKV_E_UNSUPPORTED);
  sharing.node_count = 1;
  assert_int_equal(pkv_device_plan_build_shared(dp, 1, there, &sharing, NULL, &error),
                   PKV_E_UNSUPPORTED);
  sharing.node_count = 0;
  sharing.block_table_stride = 6;
  assert_int_equal(pkv_device_plan_build_shared(dp, 1, there, &sharing, NULL, &error),
                   PKV_E_INVALID);
  pkv_device_free(gpu, there);
  pkv_device_plan_destroy(dp);
}

int gpu_suite_tree(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_trees),
      cmocka_unit_test(test_sizes),
      cmocka_unit_test(test_broken_chains),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests_name("gpu_tree", tests, gpu_setup, gpu_teardown);
}
