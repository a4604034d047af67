/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dense functions of the device against plain loops in double (support/fake_dense.h) on the
 * same inputs: shapes, types, what a row of a batch has to do with the others (nothing), values
 * that are not finite.
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

#include "base/dtype.h"
#include "base/rng.h"
#include "gpu/gpu_case.h"
#include "support/fake_dense.h"

static const pkv_dtype acts[] = {PKV_DTYPE_F16, PKV_DTYPE_BF16};

/* Host memory, its copy on the device, and what came back. */
typedef struct both {
  void *host, *device;
  size_t bytes;
} both;

static both make(size_t bytes) {
  both b = {calloc(1, bytes), NULL, bytes};
  assert_non_null(b.host);
  return b;
}

static both random_of(pkv_dtype dtype, int64_t count, pkv_rng *rng, float scale) {
  both b = make((size_t)count * pkv_dtype_bytes(dtype));
  for (int64_t i = 0; i < count; i++)
    pkv_store(b.host, dtype, i, scale * (float)(2.0 * pkv_rng_uniform(rng) - 1.0));
  return b;
}

static void *up(both *b) {
  b->device = gpu_up(b->host, b->bytes);
  return b->device;
}

static void drop(both *b) {
  pkv_device_free(gpu, b->device);
  free(b->host);
}

/* The device's values against the host's, which the reference has changed; u of the result's type,
   `slack` for sums of floats. */
static void compare(const both *b, pkv_dtype dtype, double slack, const char *what) {
  const int64_t count = (int64_t)(b->bytes / pkv_dtype_bytes(dtype));
  const double u = dtype == PKV_DTYPE_F32    ? 1e-6
                   : dtype == PKV_DTYPE_F16  ? 1.0 / 1024
                   : dtype == PKV_DTYPE_BF16 ? 1.0 / 128
                                             : 1.0 / 8;
  void *got = malloc(b->bytes);
  gpu_copy(got, b->device, b->bytes);
  for (int64_t i = 0; i < count; i++) {
    const double want = (double)pkv_load(b->host, dtype, i), have = (double)pkv_load(got, dtype, i);
    if (isnan(want) ? isnan(have) : fabs(have - want) <= u * fabs(want) + slack) continue;
    fail_msg("%s: element %lld is %.9g, should be %.9g", what, (long long)i, have, want);
  }
  free(got);
}

static void prepare(void) {
  OK(gpu->dense->prepare(gpu, err));
}

static void reference(pkv_status status) {
  assert_int_equal(status, PKV_OK);
}

/* ------------------------------------------------------------------ products */

typedef struct product_case {
  int64_t n, k;
  int32_t m;
  bool f32, adds;
  pkv_dense_gate gate;
} product_case;

static void run_product(const product_case *c, pkv_dtype act, pkv_rng *rng) {
  char what[160];
  const pkv_wtype type = act == PKV_DTYPE_F16 ? PKV_WTYPE_F16 : PKV_WTYPE_BF16;
  const int64_t columns = c->gate ? c->n / 2 : c->n;
  both w = random_of(act, c->n * c->k, rng, 1.0f), x = random_of(act, c->m * c->k, rng, 1.0f);
  both y = random_of(c->f32 ? PKV_DTYPE_F32 : act, c->m * columns, rng, 1.0f);
  both scratch = make((size_t)(c->m * c->n) * 2);
  pkv_dense_matmul_params p = {.w = {.type = type, .n = c->n, .k = c->k, .row_bytes = c->k * 2},
                               .act = act,
                               .m = c->m,
                               .x_stride = c->k,
                               .y_stride = columns,
                               .y_f32 = c->f32,
                               .accumulate = c->adds,
                               .gate = c->gate};
  (void)snprintf(what, sizeof what, "%s product of %d rows with [%lld, %lld], gate %d, f32 %d",
                 pkv_dtype_name(act), (int)c->m, (long long)c->n, (long long)c->k, (int)c->gate,
                 (int)c->f32);
  p.w.data = up(&w);
  p.x = up(&x);
  p.y = up(&y);
  p.gate_scratch = up(&scratch);
  OK(gpu->dense->matmul(gpu, &p, NULL, err));
  p.w.data = w.host;
  p.x = x.host;
  p.y = y.host;
  pkv_error err = {0};
  reference(fake_dense_ops.matmul(gpu, &p, NULL, &err));
  /* gate and up are rounded to act's type before they meet; each is around sqrt(k) / 3. */
  const double u = act == PKV_DTYPE_F16 ? 1.0 / 1024 : 1.0 / 128;
  const double slack = 1e-6 * (double)c->k + (c->gate ? u * (double)c->k / 4.0 : 0.0);
  compare(&y, c->f32 ? PKV_DTYPE_F32 : act, slack, what);
  drop(&w), drop(&x), drop(&y), drop(&scratch);
}

static void test_products(void **state) {
  (void)state;
  static const int32_t rows[] = {1, 2, 3, 4, 7, 8, 9, 16, 33, 64, 130};
  static const int64_t shapes[][2] = {{64, 64}, {320, 576}, {1536, 576}, {1000, 512}, {4096, 264}};
  pkv_rng rng;
  NEED_GPU();
  prepare();
  pkv_rng_init(&rng, 11);
  for (size_t a = 0; a < COUNT(acts); a++)
    for (size_t s = 0; s < COUNT(shapes); s++)
      for (size_t r = 0; r < (gpu_opt.small ? 3 : COUNT(rows)); r++) {
        const int64_t n = shapes[s][0], k = shapes[s][1];
        const product_case cases[] = {{n, k, rows[r], false, false, PKV_DENSE_NO_GATE},
                                      {n, k, rows[r], true, false, PKV_DENSE_NO_GATE},
                                      {n, k, rows[r], true, true, PKV_DENSE_NO_GATE},
                                      {n, k, rows[r], false, false, PKV_DENSE_SILU},
                                      {n, k, rows[r], false, false, PKV_DENSE_GELU}};
        const size_t count = n % 16 == 0 ? COUNT(cases) : 3; /* halves at multiples of 16 bytes */
        for (size_t i = 0; i < count; i++)
          run_product(&cases[i], acts[a], &rng);
      }
}

/* A product of a real model's size: weights made on the device, some results checked. */
static double weight_at(const product_case *c, pkv_dtype act, int64_t row, int64_t e) {
  uint16_t one[1];
  pkv_store(one, act, 0,
            pkv_random_weight(5, (uint64_t)(row * c->k + e), pkv_random_deviation(c->k)));
  return (double)pkv_load(one, act, 0);
}

static double dot_with(const product_case *c, pkv_dtype act, const both *x, int64_t row,
                       int64_t of) {
  double sum = 0.0;
  for (int64_t e = 0; e < c->k; e++)
    sum += weight_at(c, act, of, e) * (double)pkv_load(x->host, act, row * c->k + e);
  return sum;
}

static void check_some(const product_case *c, pkv_dtype act, const both *x, const both *y,
                       const void *got, pkv_rng *rng) {
  const int64_t columns = c->gate ? c->n / 2 : c->n;
  const pkv_dtype type = c->f32 ? PKV_DTYPE_F32 : act;
  for (int i = 0; i < 40; i++) {
    const int64_t of = (int64_t)pkv_rng_below(rng, (uint64_t)columns);
    const int64_t row = (int64_t)pkv_rng_below(rng, (uint64_t)c->m);
    double want = dot_with(c, act, x, row, of);
    if (c->gate) want = want / (1.0 + exp(-want)) * dot_with(c, act, x, row, columns + of);
    if (c->adds) want += (double)pkv_load(y->host, type, row * columns + of);
    const double have = (double)pkv_load(got, type, row * columns + of);
    const double u = c->f32 ? 3e-5 : act == PKV_DTYPE_F16 ? 1.0 / 512 : 1.0 / 64;
    if (!(fabs(have - want) <= u * (fabs(want) + 0.5)))
      fail_msg("%d rows with [%lld, %lld]: [%lld][%lld] is %.9g, should be %.9g", (int)c->m,
               (long long)c->n, (long long)c->k, (long long)row, (long long)of, have, want);
  }
}

static void run_large(const product_case *c, pkv_dtype act, pkv_rng *rng) {
  const int64_t columns = c->gate ? c->n / 2 : c->n;
  const pkv_wtype type = act == PKV_DTYPE_F16 ? PKV_WTYPE_F16 : PKV_WTYPE_BF16;
  both x = random_of(act, c->m * c->k, rng, 1.0f);
  both y = random_of(c->f32 ? PKV_DTYPE_F32 : act, c->m * columns, rng, 1.0f);
  void *w = NULL, *scratch = NULL, *got = malloc(y.bytes), *again = malloc(y.bytes);
  OK(pkv_device_alloc(&w, gpu, (size_t)(c->n * c->k) * 2, err));
  OK(pkv_device_alloc(&scratch, gpu, (size_t)(c->m * c->n) * 2, err));
  const pkv_dense_random_params any =
      pkv_dense_random_run(w, act, c->n * c->k, 5, pkv_random_deviation(c->k));
  OK(gpu->dense->weight_random(gpu, &any, NULL, err));
  const pkv_dense_matmul_params p = {
      .w = {.type = type, .n = c->n, .k = c->k, .data = w, .row_bytes = c->k * 2},
      .act = act,
      .m = c->m,
      .x = up(&x),
      .x_stride = c->k,
      .y = up(&y),
      .y_stride = columns,
      .y_f32 = c->f32,
      .accumulate = c->adds,
      .gate = c->gate,
      .gate_scratch = scratch};
  for (int i = 0; i < 3; i++) { /* the same bits each time */
    gpu_copy(y.device, y.host, y.bytes);
    OK(gpu->dense->matmul(gpu, &p, NULL, err));
    gpu_copy(i ? again : got, y.device, y.bytes);
    if (i && memcmp(again, got, y.bytes) != 0)
      fail_msg("%d rows with [%lld, %lld]: other bits in run %d", (int)c->m, (long long)c->n,
               (long long)c->k, i);
  }
  check_some(c, act, &x, &y, got, rng);
  pkv_device_free(gpu, w);
  pkv_device_free(gpu, scratch);
  drop(&x), drop(&y);
  free(got), free(again);
}

static void test_large_products(void **state) {
  (void)state;
  static const int32_t rows[] = {1, 8, 13, 16, 17};
  pkv_rng rng;
  NEED_GPU();
  if (gpu_opt.small) skip();
  prepare();
  pkv_rng_init(&rng, 21);
  for (size_t a = 0; a < COUNT(acts); a++)
    for (size_t r = 0; r < COUNT(rows); r++) {
      const product_case cases[] = {{6144, 4096, rows[r], false, false, PKV_DENSE_NO_GATE},
                                    {4096, 4096, rows[r], true, true, PKV_DENSE_NO_GATE},
                                    {28672, 4096, rows[r], false, false, PKV_DENSE_SILU},
                                    {4096, 14336, rows[r], true, true, PKV_DENSE_NO_GATE},
                                    {50304, 2048, rows[r], true, false, PKV_DENSE_NO_GATE}};
      for (size_t i = 0; i < COUNT(cases); i++)
        run_large(&cases[i], acts[a], &rng);
    }
}

/* ------------------------------------------------------------------ norms */

static void run_norm(int32_t n, pkv_dtype act, int variant, pkv_rng *rng) {
  enum { M = 5, ALL = 9 };
  char what[120];
  const bool gathers = variant == 3;
  const int32_t picked[M] = {8, 0, 3, 3, 7};
  both x = random_of(PKV_DTYPE_F32, (int64_t)ALL * n, rng, 3.0f);
  both bias = random_of(PKV_DTYPE_F32, n, rng, 1.0f),
       weight = random_of(PKV_DTYPE_F32, n, rng, 2.0f);
  both delta = random_of(PKV_DTYPE_F32, (int64_t)M * n, rng, 5.0f);
  both by = random_of(PKV_DTYPE_F32, n, rng, 1.0f), y = make((size_t)(M * n) * 2);
  both rows = make(sizeof picked);
  memcpy(rows.host, picked, sizeof picked);
  pkv_dense_norm_params p = {.act = act, .m = M, .n = n, .eps = 1e-5f};
  (void)snprintf(what, sizeof what, "%s norm of %d, variant %d", pkv_dtype_name(act), (int)n,
                 variant);
  up(&x), up(&bias), up(&weight), up(&delta), up(&by), up(&y), up(&rows);
  for (int host = 0; host < 2; host++) {
    p.x = host ? x.host : x.device;
    p.y = host ? y.host : y.device;
    p.weight = variant == 4 ? NULL : host ? weight.host : weight.device;
    p.bias = variant == 1 ? (host ? bias.host : bias.device) : NULL;
    p.delta =
        variant == 2 || variant == 4 || variant == 5 ? (host ? delta.host : delta.device) : NULL;
    p.delta_weight = variant == 2 || variant == 4 ? (host ? by.host : by.device) : NULL;
    p.rows = gathers ? (host ? rows.host : rows.device) : NULL;
    if (!host)
      OK(gpu->dense->norm(gpu, &p, NULL, err));
    else
      reference(fake_dense_ops.norm(gpu, &p, NULL, NULL));
  }
  compare(&x, PKV_DTYPE_F32, 1e-5, what);
  compare(&y, act, 1e-5, what);
  drop(&x), drop(&bias), drop(&weight), drop(&delta), drop(&by), drop(&y), drop(&rows);
}

static void test_norms(void **state) {
  (void)state;
  static const int32_t widths[] = {8, 64, 576, 640, 4096, 8192, 16384};
  pkv_rng rng;
  NEED_GPU();
  pkv_rng_init(&rng, 12);
  for (size_t a = 0; a < COUNT(acts); a++)
    for (size_t i = 0; i < COUNT(widths); i++)
      for (int variant = 0; variant < 6; variant++)
        run_norm(widths[i], acts[a], variant, &rng);
}

/* ------------------------------------------------------------------ rotation */

typedef struct rope_case {
  int32_t query_heads, kv_heads, head_dim, dims, adjacent;
  bool bias, norms;
  pkv_dtype cache;
} rope_case;

static void run_rope(const rope_case *c, pkv_dtype act, pkv_rng *rng) {
  enum { M = 6, PAGES = 4, PAGE = 16 };
  char what[160];
  const int64_t width = (int64_t)(c->query_heads + 2 * c->kv_heads) * c->head_dim;
  const int64_t element = (int64_t)pkv_dtype_bytes(c->cache);
  const int64_t page = (int64_t)PAGE * c->kv_heads * c->head_dim;
  static const int64_t slots[M] = {0, 63, -1, 17, 64, 40};
  static const int32_t positions[M] = {0, 1, 5, 999, 4000, 131071};
  both qkv = random_of(act, M * width, rng, 2.0f),
       bias = random_of(PKV_DTYPE_F32, width, rng, 1.0f);
  both q_norm = random_of(PKV_DTYPE_F32, c->head_dim, rng, 1.0f);
  both k_norm = random_of(PKV_DTYPE_F32, c->head_dim, rng, 1.0f);
  both k = make((size_t)(PAGES * page * element)), v = make((size_t)(PAGES * page * element));
  both at = make(sizeof slots), when = make(sizeof positions);
  both frequency = make((size_t)(c->dims / 2 + 1) * sizeof(double));
  memcpy(at.host, slots, sizeof slots);
  memcpy(when.host, positions, sizeof positions);
  for (int32_t j = 0; j < c->dims / 2; j++)
    ((double *)frequency.host)[j] = pow(500000.0, -2.0 * j / c->dims);
  pkv_dense_rope_params p = {.act = act,
                             .m = M,
                             .query_heads = c->query_heads,
                             .kv_heads = c->kv_heads,
                             .head_dim = c->head_dim,
                             .stride = width,
                             .eps = 1e-6f,
                             .dims = c->dims,
                             .adjacent = c->adjacent,
                             .length = 1.25f,
                             .cache = PKV_CACHE_INIT};
  p.cache.dtype = c->cache;
  p.cache.pages = PAGES;
  p.cache.page_tokens = PAGE;
  p.cache.kv_heads = c->kv_heads;
  p.cache.head_dim = c->head_dim;
  p.cache.k_scale = 0.5f;
  p.cache.v_scale = 0.25f;
  p.cache.k_token_stride = p.cache.v_token_stride = c->head_dim;
  p.cache.k_head_stride = p.cache.v_head_stride = PAGE * c->head_dim;
  p.cache.k_page_stride = p.cache.v_page_stride = page;
  (void)snprintf(what, sizeof what, "%s rope of %d and %d heads of %d, %d turned, cache %s",
                 pkv_dtype_name(act), (int)c->query_heads, (int)c->kv_heads, (int)c->head_dim,
                 (int)c->dims, pkv_dtype_name(c->cache));
  up(&qkv), up(&bias), up(&q_norm), up(&k_norm), up(&k), up(&v), up(&at), up(&when), up(&frequency);
  for (int host = 0; host < 2; host++) {
    p.qkv = host ? qkv.host : qkv.device;
    p.bias = c->bias ? (host ? bias.host : bias.device) : NULL;
    p.q_norm = c->norms ? (host ? q_norm.host : q_norm.device) : NULL;
    p.k_norm = c->norms ? (host ? k_norm.host : k_norm.device) : NULL;
    p.frequency = host ? frequency.host : frequency.device;
    p.positions = host ? when.host : when.device;
    p.slots = host ? at.host : at.device;
    p.cache.k = host ? k.host : k.device;
    p.cache.v = host ? v.host : v.device;
    if (!host)
      OK(gpu->dense->rope(gpu, &p, NULL, err));
    else
      reference(fake_dense_ops.rope(gpu, &p, NULL, NULL));
  }
  compare(&qkv, act, 1e-4, what);
  compare(&k, c->cache, c->cache == PKV_DTYPE_FP8_E4M3 ? 1e-2 : 1e-4, what);
  compare(&v, c->cache, c->cache == PKV_DTYPE_FP8_E4M3 ? 1e-2 : 1e-4, what);
  drop(&qkv), drop(&bias), drop(&q_norm), drop(&k_norm), drop(&k), drop(&v);
  drop(&at), drop(&when), drop(&frequency);
}

static void test_ropes(void **state) {
  (void)state;
  static const rope_case cases[] = {{9, 3, 64, 64, 1, false, false, PKV_DTYPE_F16},
                                    {32, 8, 128, 128, 0, false, false, PKV_DTYPE_BF16},
                                    {14, 2, 64, 64, 0, true, false, PKV_DTYPE_BF16},
                                    {16, 8, 128, 128, 0, false, true, PKV_DTYPE_BF16},
                                    {4, 1, 256, 256, 0, false, true, PKV_DTYPE_F16},
                                    {6, 2, 96, 32, 0, true, false, PKV_DTYPE_F16},
                                    {4, 4, 8, 0, 0, false, false, PKV_DTYPE_F16},
                                    {8, 2, 128, 128, 0, false, false, PKV_DTYPE_FP8_E4M3}};
  pkv_rng rng;
  NEED_GPU();
  pkv_rng_init(&rng, 13);
  for (size_t a = 0; a < COUNT(acts); a++)
    for (size_t i = 0; i < COUNT(cases); i++)
      run_rope(&cases[i], acts[a], &rng);
}

/* ------------------------------------------------------------------ rows */

static void test_embeddings(void **state) {
  (void)state;
  enum { N = 11, K = 576, M = 5 };
  static const int32_t ids[M] = {0, 10, -1, 11, 3};
  pkv_rng rng;
  NEED_GPU();
  pkv_rng_init(&rng, 14);
  for (size_t a = 0; a < COUNT(acts); a++) {
    both w = random_of(acts[a], N * K, &rng, 1.0f), y = make(M * K * sizeof(float));
    both picked = make(sizeof ids);
    memcpy(picked.host, ids, sizeof ids);
    up(&w), up(&y), up(&picked);
    pkv_dense_embed_params p = {
        .w = {.type = acts[a] == PKV_DTYPE_F16 ? PKV_WTYPE_F16 : PKV_WTYPE_BF16,
              .n = N,
              .k = K,
              .data = w.device,
              .row_bytes = K * 2},
        .act = acts[a],
        .m = M,
        .ids = picked.device,
        .y = y.device,
        .scale = 3.0f};
    OK(gpu->dense->embed(gpu, &p, NULL, err));
    p.w.data = w.host;
    p.ids = picked.host;
    p.y = y.host;
    reference(fake_dense_ops.embed(gpu, &p, NULL, NULL));
    compare(&y, PKV_DTYPE_F32, 0.0, "embedding");
    drop(&w), drop(&y), drop(&picked);
  }
}

static void test_likeliest(void **state) {
  (void)state;
  enum { M = 7, VOCAB = 49152, STRIDE = VOCAB + 8 };
  pkv_rng rng;
  NEED_GPU();
  pkv_rng_init(&rng, 15);
  both logits = random_of(PKV_DTYPE_F32, (int64_t)M * STRIDE, &rng, 4.0f);
  both ids = make(M * sizeof(int32_t));
  float *const rows = logits.host;
  for (int32_t i = 0; i < STRIDE; i++)
    rows[STRIDE + i] = 0.25f; /* all equal: the first */
  rows[2 * STRIDE + 77] = rows[2 * STRIDE + 40000] = 9.0f;
  rows[3 * STRIDE + 40] = NAN;
  rows[4 * STRIDE + VOCAB - 1] = INFINITY;
  rows[5 * STRIDE + VOCAB] = 100.0f; /* behind the vocabulary */
  rows[6 * STRIDE + VOCAB - 1] = 50.0f;
  up(&logits), up(&ids);
  pkv_dense_sample_params p = {.m = M, .vocab = VOCAB, .stride = STRIDE};
  both scratch = make(gpu->dense->sample_bytes(M, VOCAB) + 1);
  p.scratch = up(&scratch);
  p.logits = logits.device;
  p.ids = ids.device;
  OK(gpu->dense->sample(gpu, &p, NULL, err));
  p.logits = logits.host;
  p.ids = ids.host;
  reference(fake_dense_ops.sample(gpu, &p, NULL, NULL));
  int32_t got[M];
  gpu_copy(got, ids.device, sizeof got);
  for (int i = 0; i < M; i++)
    assert_int_equal(got[i], ((int32_t *)ids.host)[i]);
  assert_int_equal(got[1], 0);
  assert_int_equal(got[2], 77);
  assert_int_equal(got[3], -1);
  assert_int_equal(got[4], -1);
  drop(&logits), drop(&ids), drop(&scratch);
}

static void test_random_weights(void **state) {
  (void)state;
  enum { ROWS_OF = 3, COLUMNS_OF = 1667, COUNT_OF = ROWS_OF * COLUMNS_OF };
  NEED_GPU();
  for (size_t a = 0; a < COUNT(acts); a++) {
    both w = make(COUNT_OF * 2);
    up(&w);
    pkv_dense_random_params p = {w.device, acts[a], ROWS_OF, COLUMNS_OF, 42, 11, 3000, 0.125f};
    OK(gpu->dense->weight_random(gpu, &p, NULL, err));
    p.data = w.host;
    reference(fake_dense_ops.weight_random(gpu, &p, NULL, NULL));
    uint16_t *const got = malloc(w.bytes);
    gpu_copy(got, w.device, w.bytes);
    assert_memory_equal(got, w.host, w.bytes);
    double sum = 0.0;
    for (int i = 0; i < COUNT_OF; i++)
      sum += pow((double)pkv_load(got, acts[a], i), 2.0);
    assert_true(fabs(sqrt(sum / COUNT_OF) / 0.125 - 1.0) < 0.05);
    free(got);
    drop(&w);
  }
}

int gpu_suite_dense(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_products),      cmocka_unit_test(test_large_products),
      cmocka_unit_test(test_norms),         cmocka_unit_test(test_ropes),
      cmocka_unit_test(test_embeddings),    cmocka_unit_test(test_likeliest),
      cmocka_unit_test(test_random_weights)};
  return cmocka_run_group_tests_name("dense", tests, gpu_setup, gpu_teardown);
}
