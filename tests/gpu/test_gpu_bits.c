/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Equal bits: one plan gives one result; in the batch-invariant mode a row's result does not depend
 * on its neighbours, their order or q_len; page size, layout, hints and the place of pages in the
 * pool, past 2^32 bytes, never matter.
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

/* A result that others must equal. */
typedef struct bits {
  unsigned char *data;
  size_t bytes;
} bits;

static void bits_take(bits *b, const void *data, size_t bytes) {
  b->data = malloc(bytes);
  b->bytes = bytes;
  memcpy(b->data, data, bytes);
}

/* The first call keeps, later ones compare. */
static void bits_same(bits *b, const void *data, size_t bytes, const char *what) {
  if (b->data == NULL) bits_take(b, data, bytes);
  assert_int_equal(bytes, b->bytes);
  const unsigned char *got = data;
  for (size_t i = 0; i < bytes; i++)
    if (got[i] != b->data[i])
      fail_msg("%s: byte %zu of %zu is %02x, was %02x", what, i, bytes, got[i], b->data[i]);
}

static void bits_drop(bits *b) {
  free(b->data);
  *b = (bits){NULL, 0};
}

/* ------------------------------------------------------------------ one plan, one result */

static void test_same_plan_same_bits_100_runs(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {5000, 1, 77, 3000, 64, 900};
  const int runs = gpu_opt.small ? 4 : 100;
  pkv_plan_options options[GPU_PLANS];
  const int n = gpu_plan_options(options);
  attn_spec s = gpu_spec(PKV_DTYPE_F16, 3, (int32_t)COUNT(lens), lens);
  attn_case c;
  attn_case_init(&c, &s);
  gpu_case g;
  gpu_case_init(&g, &c);
  for (int i = 0; i < n; i++)
    for (int fused = 0; fused <= (options[i].route != PKV_ROUTE_BALANCED ? 1 : 0); fused++) {
      pkv_device_plan *plan = gpu_plan(&g, &options[i], 0);
      bits out = {0}, lse = {0};
      char what[64];
      snprintf(what, sizeof what, "%s plan %d fused %d", pkv_route_name(options[i].route), i,
               fused);
      pkv_device_plan_set_fused(plan, fused);
      for (int run = 0; run < runs; run++) {
        pkv_device_plan_set_overlap(plan, run % 3);
        if (run % 10 == 9) gpu_replan(&g, plan, &options[i]);
        gpu_run(&g, plan);
        bits_same(&out, c.out, c.out_bytes, what);
        bits_same(&lse, c.lse, c.lse_floats * sizeof(float), what);
      }
      bits_drop(&out);
      bits_drop(&lse);
      pkv_device_plan_destroy(plan);
    }
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* ------------------------------------------------------------------ batch invariance */

enum { ROW_SEED = 99, ROW_LEN = 1777 };

/* A batch with the known row at `at`, the others random. */
typedef struct batch {
  attn_case c;
  gpu_case g;
  int32_t at;
} batch;

/* group: with q_len 4, 2 gives 8 query rows a KV head and 4 gives 16: other tiles of the kernel. */
static void batch_init(batch *b, pkv_dtype kv, int32_t group, int32_t rows, int32_t q_len,
                       int32_t len, pkv_rng *rng) {
  int32_t *lens = malloc((size_t)rows * sizeof *lens);
  b->at = (int32_t)pkv_rng_below(rng, (uint64_t)rows);
  for (int32_t r = 0; r < rows; r++)
    lens[r] = (int32_t)pkv_rng_range(rng, 0, r % 16 == 3 ? 4000 : rows > 64 ? 300 : 1200);
  lens[b->at] = len;
  attn_spec s = gpu_spec(kv, pkv_rng_next(rng), rows, lens);
  s.q_len = q_len;
  s.group = group;
  attn_case_init(&b->c, &s);
  gpu_fill_row(&b->c, b->at, ROW_SEED);
  gpu_case_init(&b->g, &b->c);
  free(lens);
}

static void batch_deinit(batch *b) {
  gpu_case_deinit(&b->g);
  attn_case_deinit(&b->c);
}

/* The row's tokens against `want` [by position, 0 = the row's fourth last] for several plans. */
static void batch_compare(batch *b, bits want[4]) {
  static const int32_t parts[] = {0, 1, 9};
  const int32_t q_len = b->c.spec.q_len, len = b->c.spec.seq_len[b->at];
  for (size_t p = 0; p < COUNT(parts); p++) {
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.flags = PKV_PLAN_BATCH_INVARIANT;
    options.parts = parts[p];
    pkv_device_plan *plan = gpu_plan(&b->g, &options, 0);
    gpu_run(&b->g, plan);
    for (int32_t t = 0; t < q_len; t++) {
      char what[96];
      size_t bytes;
      const unsigned char *got = gpu_out_of(&b->c, b->at, t, &bytes);
      const int32_t position = len - q_len + t - (ROW_LEN - 4);
      snprintf(what, sizeof what, "row %d of %d, q_len %d, position %d, %d parts", b->at,
               b->c.spec.rows, q_len, position, parts[p]);
      bits_same(&want[position], got, bytes, what);
    }
    pkv_device_plan_destroy(plan);
  }
}

/* Complaint 22. The row alone, among others, with q_len 1 and 4. */
static void test_c22_row_does_not_depend_on_batch(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t sizes[] = {1, 2, 5, 17, 64, 256}, groups[] = {2, 4, 7};
  pkv_rng rng;
  pkv_rng_init(&rng, 8);
  for (size_t k = 0; k < 3 * COUNT(groups); k++) {
    const pkv_dtype kv = gpu_kv_dtypes[k % 3];
    const int32_t group = groups[k / 3];
    bits want[4] = {{0}};
    for (size_t n = 0; n < COUNT(sizes); n++) {
      const bool large = sizes[n] > (gpu_opt.small ? 17 : 64); /* these once */
      if (large && (k != 3 || (gpu_opt.small && sizes[n] > 64))) continue;
      batch b;
      batch_init(&b, kv, group, sizes[n], 4, ROW_LEN, &rng);
      batch_compare(&b, want);
      batch_deinit(&b);
      for (int32_t back = 0; back < (sizes[n] > 64 ? 1 : 4); back++) {
        batch_init(&b, kv, group, sizes[n], 1, ROW_LEN - back, &rng);
        batch_compare(&b, want);
        batch_deinit(&b);
      }
    }
    for (int i = 0; i < 4; i++)
      bits_drop(&want[i]);
  }
}

/* Complaint 1, its bits: a long row among many short ones, at any place. */
static void test_c01_order_of_rows_changes_no_bits(void **state) {
  (void)state;
  NEED_GPU();
  enum { ROWS = 192 };
  const int32_t rows = gpu_opt.small ? 24 : ROWS;
  int32_t lens[ROWS], order[ROWS];
  bits want[ROWS] = {{0}};
  pkv_rng rng;
  pkv_rng_init(&rng, 31);
  for (int32_t r = 0; r < rows; r++)
    order[r] = r;
  for (int turn = 0; turn < 3; turn++) {
    for (int32_t r = 0; r < rows; r++)
      lens[r] = order[r] == 0 ? 9000 : 100 + order[r] % 50;
    attn_spec s = gpu_spec(PKV_DTYPE_F16, 50 + (uint64_t)turn, rows, lens);
    s.kv_heads = 1;
    attn_case c;
    attn_case_init(&c, &s);
    for (int32_t r = 0; r < rows; r++)
      gpu_fill_row(&c, r, 1000 + (uint64_t)order[r]);
    gpu_case g;
    gpu_case_init(&g, &c);
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.flags = PKV_PLAN_BATCH_INVARIANT;
    pkv_device_plan *plan = gpu_plan(&g, &options, 0);
    gpu_run(&g, plan);
    for (int32_t r = 0; r < rows; r++) {
      char what[64];
      size_t bytes;
      const unsigned char *got = gpu_out_of(&c, r, 0, &bytes);
      snprintf(what, sizeof what, "row %d as row %d in turn %d", order[r], r, turn);
      bits_same(&want[order[r]], got, bytes, what);
    }
    pkv_device_plan_destroy(plan);
    gpu_case_deinit(&g);
    attn_case_deinit(&c);
    for (int32_t r = rows - 1; r > 0; r--) {
      const int32_t j = (int32_t)pkv_rng_below(&rng, (uint64_t)r + 1), swap = order[r];
      order[r] = order[j];
      order[j] = swap;
    }
  }
  for (int32_t r = 0; r < rows; r++)
    bits_drop(&want[r]);
}

/* ------------------------------------------------------------------ what never matters */

/* Rows of the same content in pages of another size and layout. */
static void run_paged(const int32_t *lens, int32_t rows, pkv_dtype kv, int32_t page,
                      attn_layout layout, uint32_t flags, bits *want) {
  attn_spec s = gpu_spec(kv, 77, rows, lens);
  s.page_tokens = page;
  s.layout = layout;
  attn_case c;
  attn_case_init(&c, &s);
  for (int32_t r = 0; r < rows; r++)
    gpu_fill_row(&c, r, 500 + (uint64_t)r);
  gpu_case g;
  gpu_case_init(&g, &c);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.flags = flags;
  options.parts = 9;
  pkv_device_plan *plan = gpu_plan(&g, &options, 0);
  char what[96];
  gpu_run(&g, plan);
  snprintf(what, sizeof what, "%s, pages of %d, layout %d, flags %u", pkv_dtype_name(kv), page,
           (int)layout, flags);
  bits_same(want, c.out, c.out_bytes, what);
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* Complaint 25. */
static void test_c25_page_sizes_and_layouts_agree(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t pages[] = {16, 1, 2, 3, 8, 19, 32, 64, 128, 256, 768};
  static const int32_t lens[] = {1300, 31, 769};
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (uint32_t flags = 0; flags <= PKV_PLAN_BATCH_INVARIANT; flags++) {
      bits want = {0};
      for (size_t p = 0; p < COUNT(pages); p++)
        for (int layout = 0; layout < (p == 0 ? ATTN_LAYOUTS : 1); layout++)
          run_paged(lens, (int32_t)COUNT(lens), gpu_kv_dtypes[k], pages[p], (attn_layout)layout,
                    flags, &want);
      bits_drop(&want);
    }
}

/* Complaint 21. */
static void test_c21_length_limit_is_only_a_limit(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {1300, 31, 0, 769};
  attn_spec s = gpu_spec(PKV_DTYPE_F16, 5, (int32_t)COUNT(lens), lens);
  attn_case c;
  attn_case_init(&c, &s);
  gpu_case g;
  gpu_case_init(&g, &c);
  for (uint32_t flags = 0; flags <= PKV_PLAN_BATCH_INVARIANT; flags++) {
    const int32_t limits[] = {1300, 2600, gpu_opt.fake ? 1 << 17 : 1 << 20};
    bits want = {0};
    for (size_t i = 0; i < COUNT(limits); i++) {
      pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
      options.flags = flags;
      options.parts = 7;
      pkv_device_plan *plan = gpu_plan(&g, &options, limits[i]);
      gpu_run(&g, plan);
      bits_same(&want, c.out, c.out_bytes, "another max_seq_len");
      pkv_device_plan_destroy(plan);
    }
    bits_drop(&want);
  }
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* ------------------------------------------------------------------ a large pool */

typedef struct far_case {
  pkv_dtype kv;
  attn_layout layout;
  int64_t pages;
} far_case;

/* The row's pages copied to `first` + i * step of a large pool; the table says so. */
static void place(gpu_case *g, unsigned char *k, unsigned char *v, int64_t first, int64_t step) {
  const attn_case *c = g->host;
  const int32_t need = (c->spec.seq_len[0] + c->spec.page_tokens - 1) / c->spec.page_tokens;
  const size_t bytes = (size_t)c->cache.k_page_stride * pkv_dtype_bytes(c->cache.dtype);
  int32_t *table = malloc((size_t)c->table_stride * sizeof *table);
  memset(table, 0xff, (size_t)c->table_stride * sizeof *table);
  for (int32_t i = 0; i < need; i++) {
    const int64_t page = first + i * step;
    const size_t from = (size_t)c->table[i] * bytes;
    table[i] = (int32_t)page;
    gpu_copy(k + (size_t)page * bytes, (unsigned char *)c->cache.k + from, bytes);
    if (v != NULL) gpu_copy(v + (size_t)page * bytes, (unsigned char *)c->cache.v + from, bytes);
  }
  gpu_copy(g->table, table, (size_t)c->table_stride * sizeof *table);
  OK(pkv_device_synchronize(gpu, NULL, err));
  free(table);
}

static void run_far(const far_case *f) {
  static const int32_t lens[] = {701};
  attn_spec s = gpu_spec(f->kv, 5, 1, lens);
  s.kv_heads = 8;
  s.head_dim = 128;
  s.layout = f->layout;
  attn_case c;
  attn_case_init(&c, &s);
  attn_case_answer(&c);
  gpu_case g;
  gpu_case_init(&g, &c);
  const bool one = f->layout == ATTN_INTERLEAVED;
  const size_t bytes =
      (size_t)f->pages * (size_t)c.cache.k_page_stride * pkv_dtype_bytes(c.cache.dtype);
  void *k = NULL, *v = NULL;
  OK(pkv_device_alloc(&k, gpu, bytes, err));
  if (!one) OK(pkv_device_alloc(&v, gpu, bytes, err));
  g.cache.k = k;
  g.cache.v =
      one ? (unsigned char *)k + ((unsigned char *)c.cache.v - (unsigned char *)c.cache.k) : v;
  g.cache.pages = f->pages;
  pkv_plan_options options[GPU_PLANS];
  const int n = gpu_plan_options(options);
  for (int i = 0; i < n; i++) {
    pkv_device_plan *plan = gpu_plan(&g, &options[i], 0);
    bits want = {0};
    for (int last = 0; last < 2; last++) {
      place(&g, k, v, last ? f->pages - 1 : 0, last ? -1 : 1);
      gpu_run(&g, plan);
      attn_check(&c, last ? "the pool's last pages" : "the pool's first pages");
      bits_same(&want, c.out, c.out_bytes, "first and last pages");
    }
    bits_drop(&want);
    pkv_device_plan_destroy(plan);
  }
  if (!gpu_opt.fake)
    printf("  %s layout %d: %lld pages, %.1f GiB a buffer, %.2f x 2^31 elements\n",
           pkv_dtype_name(f->kv), (int)f->layout, (long long)f->pages, (double)bytes / 0x1p30,
           (double)bytes / (double)pkv_dtype_bytes(f->kv) / 0x1p31);
  pkv_device_free(gpu, k);
  pkv_device_free(gpu, v);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

/* Complaint 16: past 2^31 elements and past 2^32 bytes, together and in each buffer. */
static void test_c16_pool_past_4_gib(void **state) {
  (void)state;
  NEED_GPU();
  static const far_case cases[] = {{PKV_DTYPE_F16, ATTN_INTERLEAVED, 65700},
                                   {PKV_DTYPE_F16, ATTN_HND, 131300},
                                   {PKV_DTYPE_BF16, ATTN_NHD, 131300},
                                   {PKV_DTYPE_FP8_E4M3, ATTN_HND, 262500}};
  for (size_t i = 0; i < COUNT(cases); i++) {
    far_case f = cases[i];
    if (gpu_opt.fake || gpu_opt.small) f.pages /= 500;
    run_far(&f);
  }
}

int gpu_suite_bits(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_same_plan_same_bits_100_runs),
      cmocka_unit_test(test_c22_row_does_not_depend_on_batch),
      cmocka_unit_test(test_c01_order_of_rows_changes_no_bits),
      cmocka_unit_test(test_c25_page_sizes_and_layouts_agree),
      cmocka_unit_test(test_c21_length_limit_is_only_a_limit),
      cmocka_unit_test(test_c16_pool_past_4_gib),
  };
  return cmocka_run_group_tests_name("bits", tests, gpu_setup, gpu_teardown);
}
