/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill attention over pages on the device, against double: chunks with and without a past,
   groups that do not divide a tile, windows, caps, NaN in all tokens that no row owns. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cuda/dense_launchers.h"
#include "base/dtype.h"
#include "base/rng.h"
#include "gpu/gpu_case.h"

enum { MOST_ROWS = 6, MARK = 0x7b };

typedef struct prefill_case {
  pkv_dtype act;
  int32_t rows, kv_heads, group, head_dim, page, window;
  float soft_cap;
  int32_t q_len[MOST_ROWS], seq_len[MOST_ROWS];
} prefill_case;

/* Everything of a case, on the host and on the device. */
typedef struct prefill_data {
  prefill_case c;
  int32_t first[MOST_ROWS + 1], max_pages, pages;
  int32_t *table;
  uint16_t *k, *v, *q, *out; /* [pages, page, kv_heads, head_dim]; [tokens, heads, head_dim] + 8 */
  int64_t kv_elements, q_stride;
  size_t q_bytes;
  void *d_table, *d_k, *d_v, *d_q, *d_out, *d_first, *d_len;
} prefill_data;

static int64_t place(const prefill_data *d, int32_t row, int32_t token, int32_t head) {
  const prefill_case *c = &d->c;
  const int64_t page = d->table[row * d->max_pages + token / c->page];
  return ((page * c->page + token % c->page) * c->kv_heads + head) * c->head_dim;
}

static void fill_cache(prefill_data *d, pkv_rng *rng) {
  const prefill_case *c = &d->c;
  for (int32_t r = 0; r < c->rows; r++)
    for (int32_t t = 0; t < c->seq_len[r]; t++)
      for (int64_t i = 0; i < (int64_t)c->kv_heads * c->head_dim; i++) {
        pkv_store(d->k, c->act, place(d, r, t, 0) + i, (float)pkv_rng_normal(rng));
        pkv_store(d->v, c->act, place(d, r, t, 0) + i, (float)pkv_rng_normal(rng));
      }
}

static void data_init(prefill_data *d, const prefill_case *c, uint64_t seed) {
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  *d = (prefill_data){.c = *c};
  for (int32_t r = 0; r < c->rows; r++) {
    d->first[r + 1] = d->first[r] + c->q_len[r];
    if ((c->seq_len[r] + c->page - 1) / c->page > d->max_pages)
      d->max_pages = (c->seq_len[r] + c->page - 1) / c->page;
  }
  const int32_t entries = c->rows * d->max_pages;
  d->pages = entries + 3;
  d->table = malloc((size_t)entries * sizeof *d->table);
  for (int32_t i = 0; i < entries; i++) /* a permutation: 7 is prime to d->pages or pages move on */
    d->table[i] = (int32_t)((i * 7LL + 2) % d->pages);
  if (d->pages % 7 == 0)
    for (int32_t i = 0; i < entries; i++)
      d->table[i] = d->pages - 1 - i;
  d->kv_elements = (int64_t)d->pages * c->page * c->kv_heads * c->head_dim;
  d->k = malloc((size_t)d->kv_elements * 2);
  d->v = malloc((size_t)d->kv_elements * 2);
  memset(d->k, 0xff, (size_t)d->kv_elements * 2); /* NaN of either type */
  memset(d->v, 0xff, (size_t)d->kv_elements * 2);
  fill_cache(d, &rng);
  /* Entries past a row's last page are never read. */
  for (int32_t r = 0; r < c->rows; r++)
    for (int32_t i = (c->seq_len[r] + c->page - 1) / c->page; i < d->max_pages; i++)
      d->table[r * d->max_pages + i] = INT32_MAX - 5;

  d->q_stride = (int64_t)c->kv_heads * c->group * c->head_dim + 8;
  d->q_bytes = (size_t)(d->first[c->rows] * d->q_stride) * 2;
  d->q = malloc(d->q_bytes);
  d->out = malloc(d->q_bytes);
  memset(d->q, 0xff, d->q_bytes);
  memset(d->out, MARK, d->q_bytes);
  for (int32_t t = 0; t < d->first[c->rows]; t++)
    for (int64_t i = 0; i < d->q_stride - 8; i++)
      pkv_store(d->q, c->act, t * d->q_stride + i, 2.0f * (float)pkv_rng_normal(&rng));
  d->d_table = gpu_up(d->table, (size_t)entries * sizeof *d->table);
  d->d_k = gpu_up(d->k, (size_t)d->kv_elements * 2);
  d->d_v = gpu_up(d->v, (size_t)d->kv_elements * 2);
  d->d_q = gpu_up(d->q, d->q_bytes);
  d->d_out = gpu_up(d->out, d->q_bytes);
  d->d_first = gpu_up(d->first, (size_t)(c->rows + 1) * sizeof *d->first);
  d->d_len = gpu_up(c->seq_len, (size_t)c->rows * sizeof *c->seq_len);
}

static void data_deinit(prefill_data *d) {
  void *const there[] = {d->d_table, d->d_k, d->d_v, d->d_q, d->d_out, d->d_first, d->d_len};
  for (size_t i = 0; i < COUNT(there); i++)
    pkv_device_free(gpu, there[i]);
  free(d->table);
  free(d->k);
  free(d->v);
  free(d->q);
  free(d->out);
}

static pkv_dense_prefill_params params_of(const prefill_data *d) {
  const prefill_case *c = &d->c;
  pkv_dense_prefill_params p = {.act = c->act, .rows = c->rows, .tokens = d->first[c->rows]};
  for (int32_t r = 0; r < c->rows; r++)
    if (c->q_len[r] > p.longest) p.longest = c->q_len[r];
  p.first = d->d_first;
  p.seq_len = d->d_len;
  p.cache.dtype = c->act;
  p.cache.page_tokens = c->page;
  p.cache.kv_heads = c->kv_heads;
  p.cache.head_dim = c->head_dim;
  p.cache.pages = d->pages;
  p.cache.k = d->d_k;
  p.cache.v = d->d_v;
  p.cache.k_head_stride = p.cache.v_head_stride = c->head_dim;
  p.cache.k_token_stride = p.cache.v_token_stride = (int64_t)c->kv_heads * c->head_dim;
  p.cache.k_page_stride = p.cache.v_page_stride = c->page * p.cache.k_token_stride;
  p.cache.k_scale = p.cache.v_scale = 1.0f;
  p.block_table = d->d_table;
  p.block_table_stride = d->max_pages;
  p.max_pages = d->max_pages;
  p.query_heads = c->kv_heads * c->group;
  p.q = d->d_q;
  p.out = d->d_out;
  p.q_stride = p.out_stride = d->q_stride;
  p.scale = 1.0f / sqrtf((float)c->head_dim);
  p.window = c->window;
  p.soft_cap = c->soft_cap;
  return p;
}

/* One query head of one token against double. */
static void check_head(const prefill_data *d, int32_t row, int32_t t, int32_t head, double *logit) {
  const prefill_case *c = &d->c;
  const int32_t position = c->seq_len[row] - c->q_len[row] + t, kv = head / c->group;
  const int32_t begin = c->window > 0 && position >= c->window ? position - c->window + 1 : 0;
  const int64_t at = (d->first[row] + t) * d->q_stride + (int64_t)head * c->head_dim;
  double most = -INFINITY, sum = 0.0;
  for (int32_t s = begin; s <= position; s++) {
    double x = 0.0;
    for (int32_t i = 0; i < c->head_dim; i++)
      x += (double)pkv_load(d->q, c->act, at + i) *
           (double)pkv_load(d->k, c->act, place(d, row, s, kv) + i);
    x /= sqrt((double)c->head_dim);
    if (c->soft_cap > 0.0f) x = (double)c->soft_cap * tanh(x / (double)c->soft_cap);
    logit[s] = x;
    most = x > most ? x : most;
  }
  for (int32_t s = begin; s <= position; s++)
    sum += logit[s] = exp(logit[s] - most);
  const double u = c->act == PKV_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
  for (int32_t i = 0; i < c->head_dim; i++) {
    double want = 0.0, whole = 0.0;
    for (int32_t s = begin; s <= position; s++) {
      const double v = (double)pkv_load(d->v, c->act, place(d, row, s, kv) + i);
      want += logit[s] / sum * v;
      whole += logit[s] / sum * fabs(v);
    }
    const double got = (double)pkv_load(d->out, c->act, at + i);
    if (!(fabs(got - want) <= 2.0 * u * whole + u * fabs(want) + 1e-6))
      fail_msg("act %d head_dim %d group %d page %d window %d cap %g: row %d token %d head %d [%d] "
               "= %.8g, wanted %.8g",
               (int)c->act, c->head_dim, c->group, c->page, c->window, (double)c->soft_cap, row, t,
               head, i, got, want);
  }
}

static void check_case(const prefill_case *c, uint64_t seed) {
  prefill_data d;
  data_init(&d, c, seed);
  const pkv_dense_prefill_params p = params_of(&d);
  assert_int_equal(pkv_dense_prefill_takes(&p), 1);
  assert_int_equal(pkv_dense_launch_prefill(&p, NULL), cudaSuccess);
  gpu_copy(d.out, d.d_out, d.q_bytes);
  OK(pkv_device_synchronize(gpu, NULL, err));
  int32_t longest = 1;
  for (int32_t r = 0; r < c->rows; r++)
    longest = c->seq_len[r] > longest ? c->seq_len[r] : longest;
  double *const logit = malloc((size_t)longest * sizeof *logit);
  for (int32_t r = 0; r < c->rows; r++)
    for (int32_t t = 0; t<c->q_len[r]; t += c->q_len[r]> 64 && t > 8 ? 7 : 1)
      for (int32_t h = 0; h < c->kv_heads * c->group; h++)
        check_head(&d, r, t, h, logit);
  for (int32_t t = 0; t < d.first[c->rows]; t++) /* the gap between tokens */
    for (int32_t i = 0; i < 8; i++)
      assert_int_equal(d.out[(t + 1) * d.q_stride - 8 + i], MARK << 8 | MARK);
  free(logit);
  data_deinit(&d);
}

static bool here(void) {
  if (gpu == NULL) return false;
  assert_int_equal(pkv_dense_kernels_prepare(), cudaSuccess);
  const pkv_dense_prefill_params p = {
      .act = PKV_DTYPE_F16,
      .cache = {.dtype = PKV_DTYPE_F16, .page_tokens = 16, .kv_heads = 1, .head_dim = 64},
      .query_heads = 1};
  return pkv_dense_prefill_takes(&p) != 0;
}

static void test_chunks(void **state) {
  static const int32_t groups[] = {1, 4, 3, 7, 8}, pages[] = {16, 64, 32, 128, 256};
  (void)state;
  if (!here()) skip();
  for (int i = 0; i < (gpu_opt.small ? 4 : 40); i++) {
    const prefill_case c = {.act = i % 2 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16,
                            .rows = 6,
                            .kv_heads = 1 + i % 3,
                            .group = groups[i % 5],
                            .head_dim = i / 2 % 2 ? 64 : 128,
                            .page = pages[i / 5 % 5],
                            .window = i % 3 == 1 ? 100 : 0,
                            .soft_cap = i % 4 == 3 ? 5.0f : 0.0f,
                            .q_len = {1, 33, 200, 128, 0, 1 + i * 5},
                            .seq_len = {1, 33, 455 + i, 256, 77, 300 + 11 * i}};
    check_case(&c, (uint64_t)i);
  }
}

/* Lengths around the edges of tiles and pages. */
static void test_edges(void **state) {
  (void)state;
  if (!here()) skip();
  for (int32_t past = 0; past < (gpu_opt.small ? 4 : 260); past += past < 4 ? 1 : 63) {
    const prefill_case c = {
        .act = PKV_DTYPE_BF16,
        .rows = 6,
        .kv_heads = 2,
        .group = 4,
        .head_dim = past % 2 ? 64 : 128,
        .page = 16,
        .window = past > 100 ? 64 : 0,
        .q_len = {31, 32, 33, 127, 128, 129},
        .seq_len = {31 + past, 32 + past, 33 + past, 127 + past, 128 + past, 129 + past}};
    check_case(&c, 1000 + (uint64_t)past);
  }
}

/* Page ids outside the pool read as zeros and never as an address. */
static void test_hostile_table(void **state) {
  (void)state;
  if (!here()) skip();
  const prefill_case c = {.act = PKV_DTYPE_F16,
                          .rows = 1,
                          .kv_heads = 1,
                          .group = 1,
                          .head_dim = 64,
                          .page = 16,
                          .q_len = {64},
                          .seq_len = {300}};
  static const int32_t ids[] = {-1, INT32_MIN, INT32_MAX, 1 << 20};
  prefill_data d;
  data_init(&d, &c, 5);
  for (int32_t i = 0; i < 12; i++)
    d.table[i] = ids[i % 4];
  gpu_copy(d.d_table, d.table, (size_t)d.max_pages * sizeof *d.table);
  const pkv_dense_prefill_params p = params_of(&d);
  assert_int_equal(pkv_dense_launch_prefill(&p, NULL), cudaSuccess);
  gpu_copy(d.out, d.d_out, d.q_bytes);
  OK(pkv_device_synchronize(gpu, NULL, err));
  for (int64_t i = 0; i < 64; i++)
    for (int32_t e = 0; e < 64; e++)
      assert_int_equal(isfinite(pkv_load(d.out, c.act, i * d.q_stride + e)) != 0, 1);
  data_deinit(&d);
}

int gpu_suite_prefill(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_chunks),
      cmocka_unit_test(test_edges),
      cmocka_unit_test(test_hostile_table),
  };
  return cmocka_run_group_tests_name("prefill", tests, gpu_setup, gpu_teardown);
}
