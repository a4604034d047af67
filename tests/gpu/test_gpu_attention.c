/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA backend against the naive answer in double: every route, type and odd shape, needles,
 * poison,
 * the device's plans against the host's, equal bits. Skips, counted, without a device.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "base/dtype.h"
#include "gpu/gpu_case.h"

#define COUNT(a)        (sizeof(a) / sizeof(a)[0])
#define PICK(rng, list) (list)[pkv_rng_below((rng), COUNT(list))]

static pkv_executor *gpu;

#define NEED_GPU()                                                                                 \
  do {                                                                                             \
    if (gpu == NULL) skip();                                                                       \
  } while (0)

static const int32_t pages[] = {1, 3, 8, 16, 19, 32, 64, 768, 1024};
static const int32_t dims[] = {8, 24, 64, 72, 80, 128, 136, 192, 256};
static const int32_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32};
static const int32_t q_lens[] = {1, 1, 2, 4, 5, 16};
static const pkv_dtype kv_dtypes[] = {PKV_DTYPE_F16, PKV_DTYPE_BF16, PKV_DTYPE_FP8_E4M3};

static int plan_options(pkv_plan_options *out) {
  int n = 0;
  for (int i = 0; i < 8; i++)
    out[i] = (pkv_plan_options)PKV_PLAN_OPTIONS_INIT;
  n++; /* as many parts as fill the device */
  out[n++].parts = 7;
  out[n].flags = PKV_PLAN_BATCH_INVARIANT;
  out[n].parts = 13;
  out[n++].chunk_tokens = 64;
  out[n++].flags = PKV_PLAN_BATCH_INVARIANT;
  out[n++].route = PKV_ROUTE_BUCKET_EXACT;
  out[n].route = PKV_ROUTE_BUCKET_PADDED;
  out[n].splits = 5;
  out[n++].bucket_tokens = 128;
  out[n++].route = PKV_ROUTE_SPLIT;
  out[n++].route = PKV_ROUTE_WORKQUEUE;
  return n;
}

static double operand_u(pkv_dtype kv) {
  return kv == PKV_DTYPE_BF16 ? 1.0 / 256 : 1.0 / 2048;
}

static attn_spec draw(pkv_rng *rng, uint64_t seed, int32_t *lens) {
  attn_spec s = attn_spec_default();
  s.seed = seed;
  s.kv_dtype = PICK(rng, kv_dtypes);
  s.operand_u = operand_u(s.kv_dtype);
  s.q_dtype = (pkv_dtype)pkv_rng_below(rng, 3);
  s.out_dtype = (pkv_dtype)pkv_rng_below(rng, 3);
  s.layout = (attn_layout)pkv_rng_below(rng, ATTN_LAYOUTS);
  s.page_tokens = PICK(rng, pages);
  s.head_dim = PICK(rng, dims);
  s.group = PICK(rng, groups);
  s.q_len = PICK(rng, q_lens);
  s.kv_heads = (int32_t)pkv_rng_range(rng, 1, s.group >= 16 ? 1 : 3);
  s.rows = (int32_t)pkv_rng_range(rng, 1, 5);
  for (int32_t r = 0; r < s.rows; r++)
    lens[r] = (int32_t)pkv_rng_range(rng, 0, pkv_rng_below(rng, 3) ? 150 : 700);
  s.seq_len = lens;
  if (pkv_rng_below(rng, 3) == 0) s.window = (int32_t)pkv_rng_range(rng, 1, 300);
  if (pkv_rng_below(rng, 4) == 0) s.soft_cap = 20.0f;
  s.sinks = pkv_rng_below(rng, 4) == 0;
  s.lse_base2 = pkv_rng_below(rng, 2) != 0;
  s.strided = pkv_rng_below(rng, 2) != 0;
  if (s.kv_dtype == PKV_DTYPE_FP8_E4M3) {
    s.k_scale = 0.25f;
    s.v_scale = 0.5f;
    s.head_scales = pkv_rng_below(rng, 2) != 0;
  }
  return s;
}

static void run_routes(attn_case *c) {
  pkv_plan_options options[8];
  const int n = plan_options(options);
  gpu_case g;
  attn_case_answer(c);
  gpu_case_init(&g, c, gpu);
  for (int i = 0; i < n; i++) {
    char what[64];
    pkv_device_plan *plan = gpu_plan(&g, &options[i]);
    const bool seed = options[i].route != PKV_ROUTE_BALANCED;
    for (int fused = 0; fused <= (seed ? 1 : 0); fused++) {
      pkv_device_plan_set_fused(plan, fused);
      for (int twice = 0; twice < 2; twice++) {
        gpu_run(&g, plan);
        snprintf(what, sizeof what, "%s plan %d fused %d run %d", pkv_route_name(options[i].route),
                 i, fused, twice);
        attn_check(c, what);
      }
    }
    int32_t fault = 0;
    assert_int_equal(pkv_device_plan_fault(&fault, plan, NULL, NULL), PKV_OK);
    assert_int_equal(fault, -1);
    pkv_device_plan_destroy(plan);
  }
  gpu_case_deinit(&g);
}

static void test_grid(void **state) {
  (void)state;
  NEED_GPU();
  pkv_rng rng;
  pkv_rng_init(&rng, 20261129);
  for (uint64_t i = 0; i < 400; i++) {
    int32_t lens[8];
    attn_case c;
    const attn_spec s = draw(&rng, i, lens);
    attn_case_init(&c, &s);
    run_routes(&c);
    attn_case_deinit(&c);
  }
  printf("grid: 400 random shapes x 8 plans, fused merges, twice each\n");
}

/* The fast shapes, longer rows, one long among many short. */
static void test_fast_shapes(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t fast_dims[] = {64, 128, 256};
  int32_t lens[40];
  for (size_t d = 0; d < COUNT(fast_dims); d++)
    for (size_t k = 0; k < COUNT(kv_dtypes); k++) {
      attn_spec s = attn_spec_default();
      s.seed = 7 + d * 3 + k;
      s.kv_dtype = kv_dtypes[k];
      s.operand_u = operand_u(s.kv_dtype);
      s.q_dtype = s.out_dtype = s.kv_dtype == PKV_DTYPE_BF16 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16;
      s.head_dim = fast_dims[d];
      s.kv_heads = 2;
      s.group = 4;
      s.rows = 35;
      for (int32_t r = 0; r < s.rows; r++)
        lens[r] = r == 17 ? 32 * 1024 + 5 : r % 5 == 0 ? 0 : 15 + r % 4;
      s.seq_len = lens;
      attn_case c;
      attn_case_init(&c, &s);
      run_routes(&c);
      attn_case_deinit(&c);
    }
}

static void test_needles(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {400, 131};
  for (size_t k = 0; k < COUNT(kv_dtypes); k++)
    for (int32_t needle = 0; needle < 131; needle += 7) {
      attn_spec s = attn_spec_default();
      s.seed = 100 + (uint64_t)needle;
      s.kv_dtype = kv_dtypes[k];
      s.operand_u = operand_u(s.kv_dtype);
      s.q_dtype = PKV_DTYPE_F16;
      s.rows = 2;
      s.seq_len = lens;
      s.needle = needle;
      attn_case c;
      attn_case_init(&c, &s);
      run_routes(&c);
      attn_case_deinit(&c);
    }
}

/* ------------------------------------------------------------------ plans */

static void same_plan(pkv_rng *rng, int32_t rows, int32_t longest, int32_t parts, uint32_t flags) {
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.kv_heads = (int32_t)pkv_rng_range(rng, 1, 8);
  shape.query_heads = shape.kv_heads * (int32_t)pkv_rng_range(rng, 1, 8);
  shape.head_dim = 64;
  shape.q_len = (int32_t)pkv_rng_range(rng, 1, 4);
  shape.window = pkv_rng_below(rng, 3) ? 0 : (int32_t)pkv_rng_range(rng, 1, longest + 1);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.parts = parts;
  options.flags = flags;
  options.segment_cost = (uint32_t)pkv_rng_range(rng, 1, 40);
  int32_t *lens = malloc((size_t)(rows + 1) * sizeof *lens);
  for (int32_t r = 0; r < rows; r++)
    lens[r] = pkv_rng_below(rng, 4) ? (int32_t)pkv_rng_range(rng, 0, longest) : 0;
  size_t bytes, workspace, got = 0;
  pkv_error err = {0};
  assert_int_equal(pkv_plan_size(&bytes, &workspace, &shape, &options, rows, longest, &err),
                   PKV_OK);
  void *host = aligned_alloc(64, bytes), *device = aligned_alloc(64, bytes);
  const pkv_plan *plan;
  assert_int_equal(pkv_plan_build(&plan, host, bytes, &shape, &options, rows, lens, &err), PKV_OK);
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  assert_int_equal(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F16, NULL), PKV_OK);
  void *d_lens;
  assert_int_equal(pkv_device_alloc(&d_lens, gpu, (size_t)(rows + 1) * sizeof *lens, &err), PKV_OK);
  assert_int_equal(pkv_device_copy(gpu, d_lens, lens, (size_t)rows * sizeof *lens, NULL, &err),
                   PKV_OK);
  pkv_device_plan *dp = NULL;
  if (pkv_device_plan_create(&dp, gpu, &shape, &options, PKV_DTYPE_F16, rows, longest, &err) !=
      PKV_OK)
    fail_msg("%s", err.text);
  if (pkv_device_plan_build(dp, rows, d_lens, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  if (pkv_device_plan_download(device, bytes, &got, dp, NULL, &err) != PKV_OK)
    fail_msg("%s", err.text);
  assert_int_equal(got, stats.plan_bytes);
  for (size_t i = 0; i < got; i++)
    if (((unsigned char *)host)[i] != ((unsigned char *)device)[i])
      fail_msg("rows %d parts %d flags %u: byte %zu of %zu is %02x on the host, %02x on the device",
               rows, parts, flags, i, got, ((unsigned char *)host)[i],
               ((unsigned char *)device)[i]);
  pkv_device_plan_destroy(dp);
  pkv_device_free(gpu, d_lens);
  free(host);
  free(device);
  free(lens);
}

static void test_plans_equal(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t rows[] = {0, 1, 2, 7, 33, 256, 1000, 4096};
  static const int32_t parts[] = {1, 2, 16, 132, 264, 1024};
  pkv_rng rng;
  pkv_rng_init(&rng, 5);
  for (size_t r = 0; r < COUNT(rows); r++)
    for (size_t p = 0; p < COUNT(parts); p++)
      for (int i = 0; i < 4; i++)
        same_plan(&rng, rows[r], i == 3 ? 131072 : 3000, parts[p],
                  i & 1 ? PKV_PLAN_BATCH_INVARIANT : 0u);
}

/* ------------------------------------------------------------------ equal bits */

static void test_same_bits(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {5000, 1, 77, 3000, 64, 900};
  attn_spec s = attn_spec_default();
  s.seed = 3;
  s.q_dtype = PKV_DTYPE_F16;
  s.rows = (int32_t)COUNT(lens);
  s.seq_len = lens;
  attn_case c;
  attn_case_init(&c, &s);
  gpu_case g;
  gpu_case_init(&g, &c, gpu);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_device_plan *plan = gpu_plan(&g, &options);
  gpu_run(&g, plan);
  void *first = malloc(c.out_bytes);
  memcpy(first, c.out, c.out_bytes);
  for (int i = 0; i < 100; i++) {
    pkv_device_plan_set_overlap(plan, i % 2);
    gpu_run(&g, plan);
    assert_memory_equal(first, c.out, c.out_bytes);
  }
  free(first);
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* Row 0 of the case alone, and at each place among others: the case's seed fixes its K, V and q. */
static void test_batch_invariant(void **state) {
  (void)state;
  NEED_GPU();
  int32_t lens[64];
  pkv_rng rng;
  pkv_rng_init(&rng, 8);
  static const int32_t sizes[] = {1, 2, 5, 17, 64};
  float *alone = NULL;
  size_t row_bytes = 0;
  for (size_t n = 0; n < COUNT(sizes); n++) {
    attn_spec s = attn_spec_default();
    s.seed = 11;
    s.q_dtype = PKV_DTYPE_F16;
    s.rows = sizes[n];
    lens[0] = 1777;
    for (int32_t r = 1; r < s.rows; r++)
      lens[r] = (int32_t)pkv_rng_range(&rng, 0, 4000);
    s.seq_len = lens;
    attn_case c;
    attn_case_init(&c, &s);
    const size_t heads = (size_t)(s.kv_heads * s.group), d = (size_t)s.head_dim;
    row_bytes = heads * d * sizeof(float);
    /* row 0's keys, values and query are set to a function of their place in the row */
    pkv_rng fixed;
    pkv_rng_init(&fixed, 99);
    for (int32_t t = 0; t < lens[0]; t++)
      for (int32_t h = 0; h < s.kv_heads; h++)
        for (int v = 0; v < 2; v++)
          for (size_t i = 0; i < d; i++)
            pkv_store(attn_case_element(&c, v, 0, t, h), s.kv_dtype, (int64_t)i,
                      (float)pkv_rng_normal(&fixed));
    for (size_t i = 0; i < heads * d; i++)
      pkv_store(c.q, s.q_dtype, (int64_t)i, (float)pkv_rng_normal(&fixed));
    gpu_case g;
    gpu_case_init(&g, &c, gpu);
    for (int p = 0; p < 3; p++) {
      pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
      options.flags = PKV_PLAN_BATCH_INVARIANT;
      options.parts = p == 0 ? 1 : p == 1 ? 9 : 0;
      pkv_device_plan *plan = gpu_plan(&g, &options);
      gpu_run(&g, plan);
      if (alone == NULL) {
        alone = malloc(row_bytes);
        memcpy(alone, c.out, row_bytes);
      }
      if (memcmp(alone, c.out, row_bytes) != 0)
        fail_msg("row 0 differs among %d rows with plan %d", s.rows, p);
      pkv_device_plan_destroy(plan);
    }
    gpu_case_deinit(&g);
    attn_case_deinit(&c);
  }
  free(alone);
}

/* ------------------------------------------------------------------ graphs */

#define CUDA(call) assert_int_equal((call), cudaSuccess)

/* Plan and two layers captured with rows of one token, replayed with others, longer and empty
   ones. */
static void test_graph_takes_other_lengths(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {3000, 1, 64, 700, 0, 129, 5000, 33};
  const size_t bytes = sizeof lens;
  int32_t ones[COUNT(lens)], none[COUNT(lens)] = {0};
  attn_spec s = attn_spec_default();
  s.seed = 21;
  s.operand_u = operand_u(s.kv_dtype);
  s.q_dtype = PKV_DTYPE_F16;
  s.rows = (int32_t)COUNT(lens);
  s.seq_len = lens;
  attn_case c;
  attn_case_init(&c, &s);
  attn_case_answer(&c);
  gpu_case g;
  gpu_case_init(&g, &c, gpu);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_device_plan *plan = gpu_plan(&g, &options);
  pkv_device_plan_set_overlap(plan, 1);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  pkv_error err = {0};
  for (size_t i = 0; i < COUNT(ones); i++)
    ones[i] = 1;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaMemcpy(g.seq_len, ones, bytes, cudaMemcpyHostToDevice));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  assert_int_equal(pkv_device_plan_build(plan, s.rows, g.seq_len, stream, &err), PKV_OK);
  for (int layer = 0; layer < 2; layer++)
    assert_int_equal(pkv_device_attention(gpu, plan, &g.args, stream, &err), PKV_OK);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 6; i++) {
    const int32_t *now = i % 3 == 0 ? lens : i % 3 == 1 ? none : ones;
    CUDA(cudaMemcpy(g.seq_len, now, bytes, cudaMemcpyHostToDevice));
    CUDA(cudaMemset(g.out, 0x5a, c.out_bytes));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(c.out, g.out, c.out_bytes, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(c.lse, g.lse, c.lse_floats * sizeof(float), cudaMemcpyDeviceToHost));
    if (now == lens) attn_check(&c, "replayed graph");
    for (size_t k = 0; now == none && k < c.out_bytes; k++)
      if (((unsigned char *)c.out)[k] != 0) fail_msg("byte %zu of an empty batch is not zero", k);
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(stream));
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* ------------------------------------------------------------------ faults and refusals */

static void test_fault_is_told(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {100, 200};
  attn_spec s = attn_spec_default();
  s.rows = 2;
  s.seq_len = lens;
  attn_case c;
  attn_case_init(&c, &s);
  c.table[c.table_stride + 3] = -1;
  gpu_case g;
  gpu_case_init(&g, &c, gpu);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_device_plan *plan = gpu_plan(&g, &options);
  gpu_run(&g, plan);
  int32_t row = -2;
  assert_int_equal(pkv_device_plan_fault(&row, plan, NULL, NULL), PKV_OK);
  assert_int_equal(row, 1);
  pkv_error err = {0};
  assert_int_equal(pkv_device_plan_build(plan, 2, g.seq_len, NULL, &err), PKV_OK);
  assert_int_equal(pkv_device_plan_fault(&row, plan, NULL, NULL), PKV_OK);
  assert_int_equal(row, -1);
  assert_int_equal(pkv_device_plan_build(plan, 3, g.seq_len, NULL, &err), PKV_E_RANGE);
  assert_non_null(strstr(err.text, "rows is 3"));
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

static void test_refusals(void **state) {
  (void)state;
  NEED_GPU();
  pkv_error err = {0};
  void *p = (void *)1;
  assert_int_equal(pkv_device_alloc(&p, gpu, (size_t)1 << 46, &err), PKV_E_NOMEM);
  assert_null(p);
  assert_non_null(strstr(err.text, "free"));
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = shape.kv_heads = 1;
  shape.head_dim = 64;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_device_plan *plan = NULL;
  assert_int_equal(
      pkv_device_plan_create(&plan, gpu, &shape, &options, PKV_DTYPE_F32, 1, 100, &err),
      PKV_E_UNSUPPORTED);
  assert_non_null(strstr(err.text, "f32"));
  assert_int_equal(pkv_device_alloc(&p, gpu, 64, &err), PKV_OK); /* no sticky error is left */
  pkv_device_free(gpu, p);
}

static int setup(void **state) {
  (void)state;
  gpu = gpu_executor();
  return 0;
}

static int teardown(void **state) {
  (void)state;
  pkv_executor_destroy(gpu);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_plans_equal),
      cmocka_unit_test(test_grid),
      cmocka_unit_test(test_fast_shapes),
      cmocka_unit_test(test_needles),
      cmocka_unit_test(test_same_bits),
      cmocka_unit_test(test_batch_invariant),
      cmocka_unit_test(test_graph_takes_other_lengths),
      cmocka_unit_test(test_fault_is_told),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
