/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans that the device makes: the bytes of the host's, whatever lay in the memory before, whatever
 * limits the plan was created for; faults found in tables.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu/gpu_case.h"
#include "plan/plan.h"

static void compare_bytes(const char *what, const void *host, const void *device, size_t bytes) {
  const unsigned char *a = host, *b = device;
  for (size_t i = 0; i < bytes; i++)
    if (a[i] != b[i])
      fail_msg("%s: byte %zu of %zu is %02x on the host, %02x on the device", what, i, bytes, a[i],
               b[i]);
}

typedef struct plan_case {
  int32_t rows, longest, parts;
  uint32_t flags;
} plan_case;

static void same_plan(pkv_rng *rng, const plan_case *c) {
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.kv_heads = (int32_t)pkv_rng_range(rng, 1, 8);
  shape.query_heads = shape.kv_heads * (int32_t)pkv_rng_range(rng, 1, 8);
  shape.head_dim = 64;
  shape.q_len = (int32_t)pkv_rng_range(rng, 1, 4);
  shape.window = pkv_rng_below(rng, 3) ? 0 : (int32_t)pkv_rng_range(rng, 1, c->longest + 1);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.parts = c->parts;
  options.flags = c->flags;
  options.segment_cost = (uint32_t)pkv_rng_range(rng, 1, 40);
  int32_t *lens = malloc((size_t)(c->rows + 1) * sizeof *lens);
  for (int32_t r = 0; r < c->rows; r++)
    lens[r] = pkv_rng_below(rng, 4) ? (int32_t)pkv_rng_range(rng, 0, c->longest) : 0;
  size_t bytes, workspace, got = 0;
  OK(pkv_plan_size(&bytes, &workspace, &shape, &options, c->rows, c->longest, err));
  void *host = aligned_alloc(64, (bytes + 63) / 64 * 64), *device = malloc(bytes);
  const pkv_plan *plan;
  OK(pkv_plan_build(&plan, host, bytes, &shape, &options, c->rows, lens, err));
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  OK(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F16, err));
  void *d_lens = gpu_up(lens, (size_t)(c->rows + 1) * sizeof *lens);
  pkv_device_plan *dp = NULL;
  OK(pkv_device_plan_create(&dp, gpu, &shape, &options, PKV_DTYPE_F16, c->rows, c->longest, err));
  char what[96];
  for (int poison = 0; poison < 2; poison++) {
    if (poison) gpu_poison_plan(dp, -1, 7);
    OK(pkv_device_plan_build(dp, c->rows, d_lens, NULL, err));
    OK(pkv_device_plan_download(device, bytes, &got, dp, NULL, err));
    assert_int_equal(got, stats.plan_bytes);
    snprintf(what, sizeof what, "rows %d parts %d flags %u longest %d poisoned %d", c->rows,
             c->parts, c->flags, c->longest, poison);
    compare_bytes(what, host, device, got);
  }
  pkv_device_plan_destroy(dp);
  pkv_device_free(gpu, d_lens);
  free(host);
  free(device);
  free(lens);
}

static void test_device_plan_is_host_plan(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t rows[] = {0, 1, 2, 7, 33, 256, 1000, 4096};
  static const int32_t parts[] = {1, 2, 16, 132, 264, 1024};
  pkv_rng rng;
  pkv_rng_init(&rng, 5);
  for (size_t r = 0; r < COUNT(rows); r++)
    for (size_t p = 0; p < COUNT(parts); p++)
      for (int i = 0; i < 4; i++) {
        static const uint32_t flags[] = {0u, PKV_PLAN_BATCH_INVARIANT, PKV_PLAN_FEWER_PARTS,
                                         PKV_PLAN_FEWER_PARTS | PKV_PLAN_BATCH_INVARIANT};
        const plan_case c = {rows[r], i == 3 ? 131072 : 3000, parts[p], flags[i]};
        if (!gpu_opt.small || (r + p) % 4 == 0) same_plan(&rng, &c);
      }
}

/* The device's plan of the lengths `given` is the host's of those that are meant. */
static void expect_plan(const char *what, const pkv_shape *shape, const pkv_plan_options *options,
                        int32_t rows, int32_t longest, const int32_t *given, const int32_t *meant) {
  size_t bytes, workspace, got = 0;
  OK(pkv_plan_size(&bytes, &workspace, shape, options, rows, longest, err));
  void *host = aligned_alloc(64, (bytes + 63) / 64 * 64), *device = malloc(bytes);
  const pkv_plan *plan;
  OK(pkv_plan_build(&plan, host, bytes, shape, options, rows, meant, err));
  void *lens = gpu_up(given, (size_t)rows * sizeof *given);
  pkv_device_plan *dp = NULL;
  OK(pkv_device_plan_create(&dp, gpu, shape, options, PKV_DTYPE_F16, rows, longest, err));
  OK(pkv_device_plan_build(dp, rows, lens, NULL, err));
  OK(pkv_device_plan_download(device, bytes, &got, dp, NULL, err));
  compare_bytes(what, host, device, got);
  pkv_device_plan_destroy(dp);
  pkv_device_free(gpu, lens);
  free(host);
  free(device);
}

/* What plan_core.h says of `used`, of a plan with the device's own number of parts. */
static void test_default_parts(void **state) {
  (void)state;
  NEED_GPU();
  static const struct {
    int32_t rows, live, length, spare;
  } cases[] = {{1, 1, 1024, 5},  {1, 1, 8192, 5}, {1, 1, 16384, 1}, {4, 4, 2048, 5},
               {8, 8, 1024, 1},  {2, 2, 8192, 1}, {8, 8, 4096, 0},  {9, 9, 64, 0},
               {5, 2, 2048, 1},  {64, 2, 64, 0},  {64, 64, 100, 1}, {64, 63, 100, 1},
               {64, 32, 100, 0}, {63, 63, 100, 0}};
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.kv_heads = 8;
  shape.query_heads = 32;
  shape.head_dim = 128;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_device_plan *dp = NULL;
  int32_t parts, lens[65];
  OK(pkv_device_parts(&parts, gpu, &shape, PKV_DTYPE_F16, err));
  OK(pkv_device_plan_create(&dp, gpu, &shape, &options, PKV_DTYPE_F16, 65, 16384, err));
  options.parts = parts;
  options.flags = PKV_PLAN_FEWER_PARTS;
  options.segment_cost = 16;
  size_t bytes, workspace, got;
  OK(pkv_plan_size(&bytes, &workspace, &shape, &options, 65, 16384, err));
  void *host = aligned_alloc(64, (bytes + 63) / 64 * 64),
       *device = aligned_alloc(64, (bytes + 63) / 64 * 64);
  for (size_t i = 0; i < COUNT(cases); i++) {
    const int32_t rows = cases[i].rows, used = parts - parts / 32 * cases[i].spare;
    const pkv_plan *plan;
    char what[96];
    for (int32_t r = 0; r < rows; r++)
      lens[r] = r < cases[i].live ? cases[i].length : 0;
    void *d_lens = gpu_up(lens, (size_t)rows * sizeof *lens);
    OK(pkv_plan_build(&plan, host, bytes, &shape, &options, rows, lens, err));
    OK(pkv_device_plan_build(dp, rows, d_lens, NULL, err));
    OK(pkv_device_plan_download(device, bytes, &got, dp, NULL, err));
    snprintf(what, sizeof what, "%d of %d rows of %d", cases[i].live, rows, cases[i].length);
    compare_bytes(what, host, device, got);
    const pkv_plan_cursor *c = pkv_plan_at(plan, plan->cursors_at);
    if (c[used - 1].row >= rows || c[used].row != rows)
      fail_msg("%s: parts %d and %d of %d begin at rows %d and %d of %d", what, used - 1, used,
               parts, c[used - 1].row, c[used].row, rows);
    pkv_device_free(gpu, d_lens);
  }
  pkv_device_plan_destroy(dp);
  free(host);
  free(device);
}

/* Lengths below 0 count as 0, lengths beyond the limit as the limit. */
static void test_lengths_are_cut(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t given[] = {-5, 100, 5000, INT32_MAX, INT32_MIN, 1},
                       meant[] = {0, 100, 1000, 1000, 0, 1};
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.kv_heads = 2;
  shape.query_heads = 4;
  shape.head_dim = 64;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.parts = 5;
  options.segment_cost = 9; /* a device's default is its own */
  expect_plan("cut lengths", &shape, &options, 6, 1000, given, meant);
}

/* A cut 5 below the end of a row's last segment, where costs have more bits than a float. */
static void test_large_costs(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {128, 64};
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.kv_heads = shape.query_heads = 9;
  shape.head_dim = 64;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.parts = 2;
  options.tile_cost = 1;
  for (uint32_t i = 0; i < 64; i++) {
    options.segment_cost = 100000001 + i;
    expect_plan("large costs", &shape, &options, 2, 128, lens, lens);
  }
}

/* A last row that names a page outside the cache is told, and forgotten with the next plan. */
static void test_fault_is_told(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {100, 200}, bad[] = {-1, INT32_MIN, INT32_MAX};
  for (size_t i = 0; i < COUNT(bad); i++)
    for (int invariant = 0; invariant < 2; invariant++) {
      attn_spec s = gpu_spec(PKV_DTYPE_F16, 1, 2, lens);
      attn_case c;
      attn_case_init(&c, &s);
      const int32_t good = c.table[c.table_stride + 3];
      c.table[c.table_stride + 3] = bad[i];
      gpu_case g;
      gpu_case_init(&g, &c);
      pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
      options.flags = invariant ? PKV_PLAN_BATCH_INVARIANT : 0u;
      pkv_device_plan *plan = gpu_plan(&g, &options, 0);
      int32_t row = -2;
      gpu_run(&g, plan);
      OK(pkv_device_plan_fault(&row, plan, NULL, err));
      assert_int_equal(row, 1);
      c.table[c.table_stride + 3] = good;
      gpu_case_refresh(&g);
      gpu_replan(&g, plan, &options);
      OK(pkv_device_plan_fault(&row, plan, NULL, err));
      assert_int_equal(row, -1);
      gpu_run(&g, plan); /* and the plan is as good as new */
      attn_case_answer(&c);
      attn_check(&c, "after a fault");
      pkv_device_plan_destroy(plan);
      gpu_case_deinit(&g);
      attn_case_deinit(&c);
    }
}

/* An uploaded plan forgets the fault of the one before, too. */
static void test_fault_of_uploaded_plan(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {100, 200};
  attn_spec s = gpu_spec(PKV_DTYPE_F16, 1, 2, lens);
  attn_case c;
  attn_case_init(&c, &s);
  const int32_t good = c.table[0];
  c.table[0] = 1 << 30;
  gpu_case g;
  gpu_case_init(&g, &c);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.route = PKV_ROUTE_WORKQUEUE;
  pkv_device_plan *plan = gpu_plan(&g, &options, 0);
  int32_t row = -2;
  gpu_run(&g, plan);
  OK(pkv_device_plan_fault(&row, plan, NULL, err));
  assert_int_equal(row, 0);
  c.table[0] = good;
  gpu_case_refresh(&g);
  gpu_replan(&g, plan, &options);
  OK(pkv_device_plan_fault(&row, plan, NULL, err));
  assert_int_equal(row, -1);
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/*
 * Complaint 20, and a launch that did not end: whatever lies in all that the plan owns, the next
 * build or upload makes it right. 0xff also makes every count and cursor -1.
 */
static void test_c20_stale_memory_poisons_nothing(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {3000, 1, 64, 0, 700, 129};
  static const int poison[] = {0xff, -1, 0x01, -1, 0x7f};
  pkv_plan_options options[GPU_PLANS];
  const int n = gpu_plan_options(options);
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++) {
    attn_spec s = gpu_spec(gpu_kv_dtypes[k], 41, (int32_t)COUNT(lens), lens);
    s.q_len = k == 0 ? 5 : 1;
    s.group = 4;
    attn_case c;
    attn_case_init(&c, &s);
    attn_case_answer(&c);
    gpu_case g;
    gpu_case_init(&g, &c);
    for (int i = 0; i < n; i++)
      for (int fused = 0; fused <= (options[i].route != PKV_ROUTE_BALANCED ? 1 : 0); fused++) {
        pkv_device_plan *plan = gpu_plan(&g, &options[i], 0);
        pkv_device_plan_set_fused(plan, fused);
        gpu_run(&g, plan);
        for (size_t p = 0; p < COUNT(poison); p++) {
          char what[96];
          int32_t fault = 0;
          gpu_poison_plan(plan, poison[p], 100 + p);
          gpu_replan(&g, plan, &options[i]);
          for (int run = 0; run < 2; run++) {
            snprintf(what, sizeof what, "%s plan %d fused %d poison %d run %d",
                     pkv_route_name(options[i].route), i, fused, poison[p], run);
            gpu_run(&g, plan);
            attn_check(&c, what);
          }
          OK(pkv_device_plan_fault(&fault, plan, NULL, err));
          assert_int_equal(fault, -1);
        }
        pkv_device_plan_destroy(plan);
      }
    gpu_case_deinit(&g);
    attn_case_deinit(&c);
  }
}

/* Complaint 20: room for 64 rows, two of them live, the memory poisoned before. */
static void test_c20_few_rows_of_many(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {515, 2049};
  attn_spec s = gpu_spec(PKV_DTYPE_F16, 43, 2, lens);
  attn_case c;
  attn_case_init(&c, &s);
  attn_case_answer(&c);
  gpu_case g;
  gpu_case_init(&g, &c);
  const pkv_shape shape = attn_case_shape(&c);
  for (uint32_t flags = 0; flags <= PKV_PLAN_BATCH_INVARIANT + 1; flags++) {
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.flags = flags & PKV_PLAN_BATCH_INVARIANT;
    options.parts = flags == 2 ? 0 : 40; /* 2: the device's own, some of them left empty */
    pkv_device_plan *plan = NULL;
    OK(pkv_device_plan_create(&plan, gpu, &shape, &options, PKV_DTYPE_F16, 64, 4096, err));
    gpu_poison_plan(plan, 0xff, 0);
    gpu_replan(&g, plan, &options);
    gpu_run(&g, plan);
    attn_check(&c, "2 rows in a plan for 64");
    pkv_device_plan_destroy(plan);
  }
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

int gpu_suite_plans(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_device_plan_is_host_plan),
      cmocka_unit_test(test_default_parts),
      cmocka_unit_test(test_lengths_are_cut),
      cmocka_unit_test(test_large_costs),
      cmocka_unit_test(test_fault_is_told),
      cmocka_unit_test(test_fault_of_uploaded_plan),
      cmocka_unit_test(test_c20_stale_memory_poisons_nothing),
      cmocka_unit_test(test_c20_few_rows_of_many),
  };
  return cmocka_run_group_tests_name("plans", tests, gpu_setup, gpu_teardown);
}
