/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every route against the naive answer in double, poisoned pages around: the released grid, value
 * by value of each dimension with each cache type, and printed; random shapes; the fast shapes with
 * long rows; a needle in each page in turn.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "gpu/gpu_case.h"

/* ------------------------------------------------------------------ the released grid */

static const int32_t pages[] = {1,  2,  3,  4,   5,   7,   8,   11,  16,   19,  24,
                                32, 48, 64, 100, 128, 256, 512, 768, 1000, 1024};

enum { MAX_VALUES = 32, AXES = 6 };

/* A dimension of the grid: its values, and how many cases ran with each and a cache type. */
typedef struct axis {
  const char *name;
  int32_t values[MAX_VALUES];
  int count;
  int cases[MAX_VALUES][3];
} axis;

enum { HEAD_DIM, GROUP, PAGE, Q_LEN, LAYOUT, EXTRAS };

static void axes_init(axis *a) {
  memset(a, 0, AXES * sizeof *a);
  a[HEAD_DIM].name = "head_dim";
  for (int32_t d = 8; d <= 256; d += 8)
    a[HEAD_DIM].values[a[HEAD_DIM].count++] = d;
  a[GROUP].name = "query heads a KV head";
  for (int32_t g = 1; g <= 32; g++)
    a[GROUP].values[a[GROUP].count++] = g;
  a[PAGE].name = "page_tokens";
  for (size_t i = 0; i < COUNT(pages); i++)
    a[PAGE].values[a[PAGE].count++] = pages[i];
  a[Q_LEN].name = "q_len";
  for (int32_t q = 1; q <= 16; q++)
    a[Q_LEN].values[a[Q_LEN].count++] = q;
  a[LAYOUT].name = "layout (hnd nhd interleaved padded, +4: q and out with gaps)";
  for (int32_t l = 0; l < 2 * ATTN_LAYOUTS; l++)
    a[LAYOUT].values[a[LAYOUT].count++] = l;
  a[EXTRAS].name = "extras (1 window, 2 soft cap, 4 sinks, 8 lse base 2, 16 head scales)";
  for (int32_t x = 0; x < 32; x++)
    a[EXTRAS].values[a[EXTRAS].count++] = x;
}

static int32_t draw_value(const axis *a, pkv_rng *rng) {
  return a->values[pkv_rng_below(rng, (uint64_t)a->count)];
}

/* A value of each axis at random but for one; small where the product would be slow to answer. */
static void draw_values(int32_t value[AXES], const axis *a, pkv_rng *rng) {
  for (int i = 0; i < AXES; i++)
    value[i] = draw_value(&a[i], rng);
  while ((int64_t)value[HEAD_DIM] * value[GROUP] * value[Q_LEN] > 16384) {
    value[GROUP] = 1 + value[GROUP] / 2;
    value[Q_LEN] = 1 + value[Q_LEN] / 2;
  }
}

static attn_spec spec_of(const int32_t value[AXES], pkv_dtype kv, pkv_rng *rng, uint64_t seed,
                         int32_t *lens) {
  attn_spec s = attn_spec_default();
  s.seed = seed;
  s.kv_dtype = kv;
  s.operand_u = gpu_operand_u(kv);
  s.q_dtype = (pkv_dtype)pkv_rng_below(rng, 3);
  s.out_dtype = (pkv_dtype)pkv_rng_below(rng, 3);
  s.head_dim = value[HEAD_DIM];
  s.group = value[GROUP];
  s.page_tokens = value[PAGE];
  s.q_len = value[Q_LEN];
  s.layout = (attn_layout)(value[LAYOUT] % ATTN_LAYOUTS);
  s.strided = value[LAYOUT] >= ATTN_LAYOUTS;
  if (value[EXTRAS] & 1) s.window = (int32_t)pkv_rng_range(rng, 1, 200);
  if (value[EXTRAS] & 2) s.soft_cap = 20.0f;
  s.sinks = (value[EXTRAS] & 4) != 0;
  s.lse_base2 = (value[EXTRAS] & 8) != 0;
  if (kv == PKV_DTYPE_FP8_E4M3) {
    s.k_scale = 0.25f;
    s.v_scale = 0.5f;
    s.head_scales = (value[EXTRAS] & 16) != 0;
  }
  s.kv_heads = (int32_t)pkv_rng_range(rng, 1, s.group >= 16 ? 1 : 3);
  s.rows = (int32_t)pkv_rng_range(rng, 1, 3);
  for (int32_t r = 0; r < s.rows; r++)
    lens[r] = (int32_t)pkv_rng_range(rng, 0, pkv_rng_below(rng, 4) ? 150 : 400);
  s.seq_len = lens;
  return s;
}

static void run_spec(const attn_spec *s) {
  attn_case c;
  attn_case_init(&c, s);
  gpu_run_routes(&c);
  attn_case_deinit(&c);
}

static void print_axis(const axis *a) {
  int least = INT32_MAX;
  printf("  %s:", a->name);
  for (int v = 0; v < a->count; v++) {
    printf(" %d", a->values[v]);
    for (int k = 0; k < 3; k++)
      least = a->cases[v][k] < least ? a->cases[v][k] : least;
  }
  printf("\n    each with f16, bf16 and e4m3, in %d cases or more\n", least);
  assert_true(least >= 1);
}

static void test_released_grid(void **state) {
  (void)state;
  NEED_GPU();
  static axis a[AXES];
  pkv_rng rng;
  int cases = 0;
  axes_init(a);
  pkv_rng_init(&rng, 20261130);
  for (int i = 0; i < AXES; i++)
    for (int v = 0; v < a[i].count; v++)
      for (int k = 0; k < 3; k++) {
        int32_t value[AXES], lens[4];
        draw_values(value, a, &rng);
        value[i] = a[i].values[v];
        const attn_spec s = spec_of(value, gpu_kv_dtypes[k], &rng, (uint64_t)++cases, lens);
        if (gpu_opt.small && cases % 16 != 1) continue;
        run_spec(&s);
        for (int j = 0; j < AXES; j++)
          for (int w = 0; w < a[j].count; w++)
            if (a[j].values[w] == value[j]) a[j].cases[w][k]++;
      }
  if (gpu_opt.small) return;
  printf("the released grid: %d cases; %d plans (balanced x4, bucket_exact, bucket_padded, split, "
         "workqueue; the last four also with fused merges), each run twice; q and out f32, f16 or "
         "bf16; lse with each\n",
         cases, GPU_PLANS);
  for (int i = 0; i < AXES; i++)
    print_axis(&a[i]);
}

/* ------------------------------------------------------------------ other shapes */

/* More rows and longer ones than the grid's. */
static void test_random_shapes(void **state) {
  (void)state;
  NEED_GPU();
  static axis a[AXES];
  const uint64_t cases = gpu_opt.small ? 3 : 60;
  pkv_rng rng;
  axes_init(a);
  pkv_rng_init(&rng, 20261129);
  for (uint64_t i = 0; i < cases; i++) {
    int32_t value[AXES], lens[8];
    draw_values(value, a, &rng);
    attn_spec s = spec_of(value, PICK(&rng, gpu_kv_dtypes), &rng, 1000 + i, lens);
    s.rows = (int32_t)pkv_rng_range(&rng, 4, 8);
    for (int32_t r = 0; r < s.rows; r++)
      lens[r] = (int32_t)pkv_rng_range(&rng, 0, pkv_rng_below(&rng, 3) ? 150 : 900);
    run_spec(&s);
  }
}

/* The fast shapes, longer rows, one long among many short. */
static void test_fast_shapes(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t fast_dims[] = {64, 128, 256};
  int32_t lens[40];
  for (size_t d = 0; d < COUNT(fast_dims); d++)
    for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++) {
      attn_spec s = gpu_spec(gpu_kv_dtypes[k], 7 + d * 3 + k, 35, lens);
      s.head_dim = fast_dims[d];
      s.group = 4;
      for (int32_t r = 0; r < s.rows; r++)
        lens[r] = r == 17 ? (gpu_opt.small ? 2048 : 32 * 1024) + 5 : r % 5 == 0 ? 0 : 15 + r % 4;
      run_spec(&s);
    }
}

/* Random values hide a missing page behind an absolute tolerance; one huge score does not. */
static void test_needle_in_each_page(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t sizes[] = {1, 16, 64}, lens[] = {403, 131};
  pkv_rng rng;
  pkv_rng_init(&rng, 12);
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (size_t p = 0; p < COUNT(sizes); p++) {
      const int32_t step = sizes[p] == 1 ? 9 : sizes[p];
      for (int32_t page = 0; page < 403; page += gpu_opt.small ? 7 * step : step) {
        attn_spec s = gpu_spec(gpu_kv_dtypes[k], 100 + (uint64_t)page, 2, lens);
        s.page_tokens = sizes[p];
        s.needle = page + (int32_t)pkv_rng_below(&rng, (uint64_t)sizes[p]);
        if (s.needle > 402) s.needle = 402;
        run_spec(&s);
      }
    }
}

int gpu_suite_grid(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_released_grid),
      cmocka_unit_test(test_random_shapes),
      cmocka_unit_test(test_fast_shapes),
      cmocka_unit_test(test_needle_in_each_page),
  };
  return cmocka_run_group_tests_name("grid", tests, gpu_setup, gpu_teardown);
}
