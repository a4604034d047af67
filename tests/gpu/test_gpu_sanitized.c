/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What runs under the race and initialisation checkers, which slow a launch by orders of magnitude:
 * every kernel once or twice with cut rows, merges, tails, windows and several query tokens, small.
 * Also a table that ends exactly where its allocation does, for the memory checker.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "gpu/gpu_case.h"

static void run(const attn_spec *s, const pkv_plan_options *options, int fused) {
  attn_case c;
  gpu_case g;
  attn_case_init(&c, s);
  attn_case_answer(&c);
  gpu_case_init(&g, &c);
  pkv_device_plan *plan = gpu_plan(&g, options, 0);
  pkv_device_plan_set_fused(plan, fused);
  for (int i = 0; i < 2; i++) {
    gpu_run(&g, plan);
    attn_check(&c, pkv_route_name(options->route));
  }
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* Every set of kernels, both modes: a cut row, an empty one, tails. */
static void test_balanced(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t dims[] = {64, 128, 256}, lens[] = {700, 0, 65, 3};
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (size_t d = 0; d < COUNT(dims); d++)
      for (uint32_t flags = 0; flags <= PKV_PLAN_BATCH_INVARIANT; flags++) {
        attn_spec s = gpu_spec(gpu_kv_dtypes[k], 5, (int32_t)COUNT(lens), lens);
        pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
        s.head_dim = dims[d];
        s.group = 4;
        options.parts = 5;
        options.flags = flags;
        options.chunk_tokens = 64;
        run(&s, &options, 0);
      }
}

/* Odd shapes: unaligned strides, a window, several query tokens in two tiles, odd groups. */
static void test_odd_shapes(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {300, 17};
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (int layout = 0; layout < ATTN_LAYOUTS; layout++) {
      attn_spec s = gpu_spec(gpu_kv_dtypes[k], 6, (int32_t)COUNT(lens), lens);
      pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
      s.layout = (attn_layout)layout;
      s.head_dim = 72;
      s.group = 7;
      s.q_len = 5;
      s.page_tokens = layout == 1 ? 1 : 19;
      s.window = layout == 2 ? 100 : 0;
      s.sinks = layout == 3;
      s.soft_cap = layout == 3 ? 15.0f : 0.0f;
      s.strided = layout != 0;
      options.parts = 3;
      run(&s, &options, 0);
    }
}

static void test_seed_routes(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {500, 0, 33};
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_WORKQUEUE; route++)
    for (int fused = 0; fused < 2; fused++) {
      attn_spec s = gpu_spec(gpu_kv_dtypes[route % 3], 7, (int32_t)COUNT(lens), lens);
      pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
      options.route = (pkv_route)route;
      options.splits = 4;
      options.bucket_tokens = 128;
      run(&s, &options, fused);
    }
}

/* Complaint 14: exactly as many entries as pages, at the end of an allocation. */
static void test_c14_table_ends_with_its_row(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t page[] = {1, 16, 64}, length[] = {257, 512, 64, 1};
  for (size_t p = 0; p < COUNT(page); p++)
    for (size_t n = 0; n < COUNT(length); n++)
      for (uint32_t flags = 0; flags <= PKV_PLAN_BATCH_INVARIANT; flags++) {
        attn_spec s = gpu_spec(PKV_DTYPE_F16, 8, 1, &length[n]);
        pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
        attn_case c;
        gpu_case g;
        s.page_tokens = page[p];
        attn_case_init(&c, &s);
        attn_case_answer(&c);
        gpu_case_init(&g, &c);
        const int32_t need = (length[n] + page[p] - 1) / page[p];
        void *const exact = gpu_up(c.table, (size_t)need * sizeof(int32_t));
        g.args.block_table = exact;
        g.args.max_pages = need;
        g.args.block_table_stride = need;
        options.flags = flags;
        options.parts = 4;
        pkv_device_plan *plan = gpu_plan(&g, &options, 0);
        gpu_run(&g, plan);
        attn_check(&c, "a table of exactly its pages");
        pkv_device_plan_destroy(plan);
        pkv_device_free(gpu, exact);
        gpu_case_deinit(&g);
        attn_case_deinit(&c);
      }
}

/* The planner, alone. */
static void test_planner(void **state) {
  (void)state;
  NEED_GPU();
  enum { ROWS = 700 };
  int32_t lens[ROWS];
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.kv_heads = 3;
  shape.query_heads = 9;
  shape.head_dim = 64;
  for (int32_t r = 0; r < ROWS; r++)
    lens[r] = r * 37 % 900;
  void *const on_device = gpu_up(lens, sizeof lens);
  for (uint32_t flags = 0; flags <= PKV_PLAN_BATCH_INVARIANT; flags++) {
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    pkv_device_plan *plan = NULL;
    int32_t fault = 0;
    options.flags = flags;
    options.parts = 264;
    OK(pkv_device_plan_create(&plan, gpu, &shape, &options, PKV_DTYPE_F16, ROWS, 900, err));
    OK(pkv_device_plan_build(plan, ROWS, on_device, NULL, err));
    OK(pkv_device_plan_fault(&fault, plan, NULL, err));
    assert_int_equal(fault, -1);
    pkv_device_plan_destroy(plan);
  }
  pkv_device_free(gpu, on_device);
}

int gpu_suite_sanitized(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_balanced),    cmocka_unit_test(test_odd_shapes),
      cmocka_unit_test(test_seed_routes), cmocka_unit_test(test_c14_table_ends_with_its_row),
      cmocka_unit_test(test_planner),
  };
  return cmocka_run_group_tests_name("sanitized", tests, gpu_setup, gpu_teardown);
}
