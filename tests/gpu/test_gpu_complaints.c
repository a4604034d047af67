/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Failures that users of other libraries reported, as tests: numbers as in docs/notes/gpu-tests.md,
 * which also says where those that are not here are.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device_ops.h"
#include "base/dtype.h"
#include "gpu/gpu_case.h"

/* Every route once more after the answer of a case that the caller changed. */
static void run_and_drop(attn_case *c) {
  gpu_run_routes(c);
  attn_case_deinit(c);
}

/* ------------------------------------------------------------------ empty rows and states */

/* 9: a row of length 0 is written, zeros and -inf, and poisons nobody. */
static void test_c09_rows_of_length_0(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {0, 17, 0, 4096};
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (int sinks = 0; sinks < 2; sinks++) {
      attn_spec s = gpu_spec(gpu_kv_dtypes[k], 9, (int32_t)COUNT(lens), lens);
      pkv_plan_options options[GPU_PLANS];
      attn_case c;
      gpu_case g;
      s.sinks = sinks != 0;
      attn_case_init(&c, &s);
      attn_case_answer(&c);
      gpu_case_init(&g, &c);
      const int n = gpu_plan_options(options);
      for (int i = 0; i < n; i++) {
        pkv_device_plan *plan = gpu_plan(&g, &options[i], 0);
        gpu_mark(&g, 0xff); /* NaN */
        OK(pkv_device_attention(gpu, plan, &g.args, NULL, err));
        gpu_fetch(&g);
        attn_check(&c, pkv_route_name(options[i].route));
        for (int32_t row = 0; row < 4; row += 2) {
          size_t bytes;
          const unsigned char *out = gpu_out_of(&c, row, 0, &bytes);
          for (size_t b = 0; b < bytes; b++)
            assert_int_equal(out[b], 0);
          assert_true(c.lse[row * c.lse_token] == -INFINITY);
        }
        pkv_device_plan_destroy(plan);
      }
      gpu_case_deinit(&g);
      attn_case_deinit(&c);
    }
}

/* 10, 8: more splits than a short row has tiles: pieces without keys, states never written. */
static void test_c10_c08_splits_without_keys(void **state) {
  (void)state;
  NEED_GPU();
  const int32_t lens[] = {1, 31, 33, 640, gpu_opt.small ? 3000 : 65536};
  static const pkv_route routes[] = {PKV_ROUTE_WORKQUEUE, PKV_ROUTE_SPLIT, PKV_ROUTE_BUCKET_EXACT,
                                     PKV_ROUTE_BUCKET_PADDED, PKV_ROUTE_BALANCED};
  attn_spec s = gpu_spec(PKV_DTYPE_F16, 10, (int32_t)COUNT(lens), lens);
  attn_case c;
  gpu_case g;
  attn_case_init(&c, &s);
  attn_case_answer(&c);
  gpu_case_init(&g, &c);
  for (size_t i = 0; i < COUNT(routes); i++)
    for (int fused = 0; fused < 2; fused++) {
      pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
      options.route = routes[i];
      options.splits = 20;
      options.bucket_tokens = 128;
      pkv_device_plan *plan = gpu_plan(&g, &options, 0);
      pkv_device_plan_set_fused(plan, fused);
      for (int run = 0; run < 2; run++) {
        gpu_fill(plan->slots, 0xff, plan->slot_bytes); /* states nobody has written are NaN */
        gpu_run(&g, plan);
        attn_check(&c, pkv_route_name(routes[i]));
      }
      pkv_device_plan_destroy(plan);
    }
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* ------------------------------------------------------------------ pieces, many of them */

/* Runs the case four times: waiting for the kernel ahead, and overlapping it. */
static void run_parts(const attn_spec *s, int32_t parts) {
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  attn_case c;
  gpu_case g;
  attn_case_init(&c, s);
  attn_case_answer(&c);
  gpu_case_init(&g, &c);
  options.parts = parts;
  pkv_device_plan *plan = gpu_plan(&g, &options, 0);
  for (int i = 0; i < 4; i++) {
    int32_t fault = 0;
    char name[48];
    pkv_device_plan_set_overlap(plan, i);
    if (i < 2) gpu_replan(&g, plan, &options);
    gpu_run(&g, plan);
    snprintf(name, sizeof name, "%d parts, run %d", parts, i);
    attn_check(&c, name);
    OK(pkv_device_plan_fault(&fault, plan, NULL, err));
    assert_int_equal(fault, -1);
  }
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* 5: a row cut into hundreds of pieces, which are folded in groups; a piece of another row beside
   it in the groups at both ends. */
static void test_c05_many_pieces(void **state) {
  (void)state;
  NEED_GPU();
  const int32_t most = gpu_opt.small ? 60 : 300;
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (int32_t parts = 40; parts <= most; parts = parts * 5 / 4 + 1) {
      const int32_t lens[] = {0, 700, 64 * parts + 7, 900};
      attn_spec s = gpu_spec(gpu_kv_dtypes[k], (uint64_t)parts, (int32_t)COUNT(lens), lens);
      s.kv_heads = 1;
      s.group = parts % 2 ? 8 : 3;
      s.head_dim = parts % 3 == 0 ? 64 : parts % 3 == 1 ? 128 : 256;
      run_parts(&s, parts);
    }
}

/* States come in slots that hold a NaN before: a value that is one must arrive all the same, and
   stay in its dimension. */
static void test_nan_in_a_cut_row(void **state) {
  (void)state;
  NEED_GPU();
  enum { HEADS = 4, DIM = 64, BAD = 5 };
  static const int32_t lens[] = {3000}, parts[] = {2, 30, 47};
  for (size_t i = 0; i < COUNT(parts); i++) {
    attn_spec s = gpu_spec(PKV_DTYPE_F16, 3, 1, lens);
    s.kv_heads = 1;
    s.group = HEADS;
    s.head_dim = DIM;
    attn_case c;
    attn_case_init(&c, &s);
    gpu_case g;
    gpu_case_init(&g, &c);
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.parts = parts[i];
    pkv_device_plan *plan = gpu_plan(&g, &options, 0);
    gpu_run(&g, plan);
    uint16_t want[HEADS * DIM];
    assert_int_equal(c.out_bytes, sizeof want);
    memcpy(want, c.out, sizeof want);
    ((uint16_t *)attn_case_element(&c, true, 0, 1234, 0))[BAD] = 0x7fff;
    gpu_copy(g.storage, c.storage, c.storage_bytes);
    int32_t fault = 0;
    gpu_run(&g, plan);
    OK(pkv_device_plan_fault(&fault, plan, NULL, err));
    assert_int_equal(fault, -1);
    const uint16_t *out = c.out;
    for (int k = 0; k < HEADS * DIM; k++)
      if (k % DIM == BAD)
        assert_true((out[k] & 0x7fff) > 0x7c00);
      else
        assert_int_equal(out[k], want[k]);
    pkv_device_plan_destroy(plan);
    gpu_case_deinit(&g);
    attn_case_deinit(&c);
  }
}

/* Rows of less than a tile and of a few, more than parts: short ones are one warp's. */
static void test_many_short_rows(void **state) {
  (void)state;
  NEED_GPU();
  enum { ROWS = 90 };
  static const int32_t dims[] = {64, 128, 256}, limits[] = {40, 400};
  int32_t lens[ROWS];
  pkv_rng rng;
  pkv_rng_init(&rng, 17);
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (size_t d = 0; d < COUNT(dims); d++)
      for (size_t l = 0; l < COUNT(limits); l++) {
        const int32_t rows = gpu_opt.small ? ROWS / 4 : ROWS;
        for (int32_t r = 0; r < rows; r++)
          lens[r] = (int32_t)pkv_rng_range(&rng, 0, limits[l]);
        attn_spec s = gpu_spec(gpu_kv_dtypes[k], d, rows, lens);
        s.head_dim = dims[d];
        s.kv_heads = 1 + (int32_t)(k + l) % 3;
        s.group = l ? 8 : 3;
        run_parts(&s, 4);
        run_parts(&s, 13);
      }
}

/* ------------------------------------------------------------------ what no row owns */

/* All that rows own, in order: to `to`, or back into the case. */
static void copy_owned(attn_case *c, unsigned char *to, const unsigned char *from) {
  const attn_spec *s = &c->spec;
  const size_t bytes = (size_t)s->head_dim * pkv_dtype_bytes(s->kv_dtype);
  size_t at = 0;
  for (int32_t r = 0; r < s->rows; r++)
    for (int32_t t = 0; t < s->seq_len[r]; t++)
      for (int32_t h = 0; h < s->kv_heads; h++)
        for (int v = 0; v < 2; v++, at += bytes) {
          void *const element = attn_case_element(c, v != 0, r, t, h);
          if (to != NULL)
            memcpy(to + at, element, bytes);
          else
            memcpy(element, from + at, bytes);
        }
}

/* 11: NaN, infinity, the largest number or zero in pages and tails that no row owns: equal bits. */
static void test_c11_unowned_memory_never_matters(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {100, 1, 333};
  static const float poison[] = {NAN, INFINITY, -INFINITY, 65504.0f, 0.0f};
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (int layout = 0; layout < ATTN_LAYOUTS; layout++) {
      attn_spec s = gpu_spec(gpu_kv_dtypes[k], 11, (int32_t)COUNT(lens), lens);
      s.layout = (attn_layout)layout;
      attn_case c;
      attn_case_init(&c, &s);
      attn_case_answer(&c);
      unsigned char *owned = malloc(c.storage_bytes), *first = malloc(c.out_bytes);
      copy_owned(&c, owned, NULL);
      for (size_t p = 0; p < COUNT(poison); p++) {
        const int64_t count = (int64_t)(c.storage_bytes / pkv_dtype_bytes(s.kv_dtype));
        for (int64_t i = 0; i < count; i++)
          pkv_store(c.storage, s.kv_dtype, i, poison[p]);
        copy_owned(&c, NULL, owned);
        gpu_case g;
        gpu_case_init(&g, &c);
        pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
        options.parts = 7;
        pkv_device_plan *plan = gpu_plan(&g, &options, 0);
        gpu_run(&g, plan);
        attn_check(&c, "other unowned memory");
        if (p == 0) memcpy(first, c.out, c.out_bytes);
        assert_memory_equal(first, c.out, c.out_bytes);
        pkv_device_plan_destroy(plan);
        gpu_case_deinit(&g);
      }
      free(owned);
      free(first);
      attn_case_deinit(&c);
    }
}

/* A page of the cache that no row's table names. */
static int32_t unowned_page(const attn_case *c) {
  for (int32_t page = 0; page < c->cache.pages; page++) {
    bool owned = false;
    for (int32_t r = 0; r < c->spec.rows; r++)
      for (int32_t i = 0; i * c->spec.page_tokens < c->spec.seq_len[r]; i++)
        owned = owned || c->table[r * c->table_stride + i] == page;
    if (!owned) return page;
  }
  return -1;
}

/* 12: one page too many in the table where the length is a multiple of the page, a loud one. */
static void test_c12_one_page_too_many(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {16, 64, 1600, 160};
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++) {
    attn_spec s = gpu_spec(gpu_kv_dtypes[k], 12, (int32_t)COUNT(lens), lens);
    attn_case c;
    attn_case_init(&c, &s);
    const int32_t extra = unowned_page(&c);
    assert_true(extra >= 0);
    for (int64_t i = 0; i < c.cache.k_page_stride; i++) {
      pkv_store(c.cache.k, s.kv_dtype, extra * c.cache.k_page_stride + i, 1e4f);
      pkv_store(c.cache.v, s.kv_dtype, extra * c.cache.v_page_stride + i, 1e4f);
    }
    for (int32_t r = 0; r < s.rows; r++)
      c.table[r * c.table_stride + lens[r] / 16] = extra;
    run_and_drop(&c);
  }
}

/* 13: lengths around a page's end. */
static void test_c13_lengths_around_a_page(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {15, 16, 17, 31, 32}, pages[] = {16, 1, 8, 32};
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (size_t p = 0; p < COUNT(pages); p++) {
      attn_spec s = gpu_spec(gpu_kv_dtypes[k], 13, (int32_t)COUNT(lens), lens);
      s.page_tokens = pages[p];
      attn_case c;
      attn_case_init(&c, &s);
      run_and_drop(&c);
    }
}

/* 15: -1 past a row's pages, and before its window, is never read. */
static void test_c15_minus_one_is_never_read(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {700, 33, 257};
  attn_spec s = gpu_spec(PKV_DTYPE_F16, 15, (int32_t)COUNT(lens), lens);
  s.window = 100;
  s.q_len = 2;
  attn_case c;
  attn_case_init(&c, &s);
  attn_case_answer(&c); /* from the table before */
  for (int32_t r = 0; r < s.rows; r++) {
    const int32_t first = lens[r] - 2 - 100 + 1; /* the first query's first key */
    for (int32_t i = 0; i < c.table_stride; i++)
      if (i * 16 >= lens[r] || (i + 1) * 16 <= first) c.table[r * c.table_stride + i] = -1;
  }
  run_and_drop(&c);
}

/* ------------------------------------------------------------------ shapes */

/* 23: every number of query heads a KV head. */
static void test_c23_every_group_size(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {130, 300};
  for (int32_t group = 1; group <= 32; group += gpu_opt.small ? 7 : 1) {
    attn_spec s = gpu_spec(group % 2 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16, 23, 2, lens);
    s.group = group;
    s.kv_heads = 1;
    s.head_dim = 128;
    attn_case c;
    attn_case_init(&c, &s);
    run_and_drop(&c);
  }
}

/* 24: 28 query heads on 4, bf16, scores eight times as large: relative error 1 %. */
static void test_c24_group_of_7_large_scores(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {1000, 65, 4097};
  attn_spec s = gpu_spec(PKV_DTYPE_BF16, 24, (int32_t)COUNT(lens), lens);
  s.kv_heads = 4;
  s.group = 7;
  s.head_dim = 128;
  s.scale = (float)(8.0 / sqrt(128.0));
  attn_case c;
  gpu_case g;
  attn_case_init(&c, &s);
  attn_case_answer(&c);
  gpu_case_init(&g, &c);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_device_plan *plan = gpu_plan(&g, &options, 0);
  gpu_run(&g, plan);
  attn_check(&c, "large scores");
  double error = 0.0, size = 0.0;
  const int64_t count = (int64_t)COUNT(lens) * 28 * 128;
  for (int64_t i = 0; i < count; i++) {
    const double d = (double)pkv_load(c.out, s.out_dtype, i) - c.want[i];
    error += d * d;
    size += c.want[i] * c.want[i];
  }
  printf("  relative error %.2e (at most 1e-2)\n", sqrt(error / size));
  assert_true(sqrt(error / size) <= 1e-2);
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* 27: room for 512 rows of 32 heads on 2, head_dim 256, follows from the parts, not the rows. */
static void test_c27_workspace_of_a_large_batch(void **state) {
  (void)state;
  NEED_GPU();
  enum { ROWS = 512 };
  int32_t lens[ROWS];
  const int32_t rows = gpu_opt.small ? 40 : ROWS;
  for (int32_t r = 0; r < rows; r++)
    lens[r] = r * 13 % 400;
  attn_spec s = gpu_spec(PKV_DTYPE_F16, 27, rows, lens);
  s.kv_heads = 2;
  s.group = 16;
  s.head_dim = 256;
  attn_case c;
  gpu_case g;
  attn_case_init(&c, &s);
  attn_case_answer(&c);
  gpu_case_init(&g, &c);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_device_plan *plan = gpu_plan(&g, &options, 131072);
  const int64_t parts = plan->options.parts, state_bytes = (256 + 2) * 4;
  const int64_t closed_form = 2 * (parts - 1) * 16 * state_bytes;
  printf("  %d rows: workspace %.2f MB, %lld parts; 2 (parts - 1) pieces are %.2f MB\n", rows,
         (double)plan->slot_bytes / 1e6, (long long)parts, (double)closed_form / 1e6);
  assert_true((int64_t)plan->slot_bytes <= closed_form + closed_form / 8);
  gpu_run(&g, plan);
  attn_check(&c, "a large batch");
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* 28: lse with gaps between tokens has the bits of the dense one, and the gaps stay. */
static void test_c28_lse_with_a_stride(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {300, 0, 70};
  attn_spec s = gpu_spec(PKV_DTYPE_F16, 28, (int32_t)COUNT(lens), lens);
  s.q_len = 3;
  attn_case c[2];
  for (int wide = 0; wide < 2; wide++) {
    gpu_case g;
    s.strided = wide != 0;
    attn_case_init(&c[wide], &s);
    gpu_case_init(&g, &c[wide]);
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    pkv_device_plan *plan = gpu_plan(&g, &options, 0);
    gpu_run(&g, plan);
    pkv_device_plan_destroy(plan);
    gpu_case_deinit(&g);
  }
  const int64_t heads = (int64_t)s.kv_heads * s.group;
  for (int64_t t = 0; t < 9; t++) {
    const float *wide = c[1].lse + t * c[1].lse_token, *dense = c[0].lse + t * c[0].lse_token;
    assert_memory_equal(wide, dense, (size_t)heads * sizeof(float));
    for (int64_t i = heads; i < c[1].lse_token; i++) {
      const unsigned char mark[4] = {0x5a, 0x5a, 0x5a, 0x5a};
      assert_memory_equal(wide + i, mark, sizeof mark);
    }
  }
  attn_case_deinit(&c[0]);
  attn_case_deinit(&c[1]);
}

/* 47: fp8 with scales of heads from 0.01 to 100. */
static void test_c47_scales_of_heads(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {300, 77};
  attn_spec s = gpu_spec(PKV_DTYPE_FP8_E4M3, 47, 2, lens);
  s.kv_heads = 5;
  s.head_scales = true;
  attn_case c;
  attn_case_init(&c, &s);
  for (int32_t h = 0; h < 5; h++) {
    c.k_head_scale[h] = (float)pow(10.0, h - 2);
    c.v_head_scale[h] = (float)pow(10.0, 2 - h);
  }
  run_and_drop(&c);
}

int gpu_suite_complaints(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_c09_rows_of_length_0),
      cmocka_unit_test(test_c10_c08_splits_without_keys),
      cmocka_unit_test(test_c05_many_pieces),
      cmocka_unit_test(test_nan_in_a_cut_row),
      cmocka_unit_test(test_many_short_rows),
      cmocka_unit_test(test_c11_unowned_memory_never_matters),
      cmocka_unit_test(test_c12_one_page_too_many),
      cmocka_unit_test(test_c13_lengths_around_a_page),
      cmocka_unit_test(test_c15_minus_one_is_never_read),
      cmocka_unit_test(test_c23_every_group_size),
      cmocka_unit_test(test_c24_group_of_7_large_scores),
      cmocka_unit_test(test_c27_workspace_of_a_large_batch),
      cmocka_unit_test(test_c28_lse_with_a_stride),
      cmocka_unit_test(test_c47_scales_of_heads),
  };
  return cmocka_run_group_tests_name("complaints", tests, gpu_setup, gpu_teardown);
}
