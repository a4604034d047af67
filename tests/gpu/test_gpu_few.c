/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of few rows and quantised weights on the device, against sums in double: every inner
 * size from 64 to 1024, every number of rows, each CTA split, with NaN around everything that is
 * read and marks around everything that is written.
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

#include "backend/cuda/cuda_state.h"
#include "backend/cuda/dense_launchers.h"
#include "base/dtype.h"
#include "gpu/gpu_case.h"
#include "support/weight_blocks.h"

enum { GUARD = 64, MARK = 0x7b };

/* A product with its operands on both sides. */
typedef struct few_case {
  pkv_wtype type;
  pkv_dtype act;
  int32_t m;
  int64_t n, k;
  pkv_dense_gate gate;
  int32_t y_f32, accumulate;
  int64_t x_stride, y_stride, y_rows;
  unsigned char *w, *packed; /* GGUF rows; the device's image with guards */
  void *x;                   /* [m, x_stride] with guards */
  double *values;            /* [m, k] of x */
  unsigned char *y, *start;  /* [m, y_stride] with guards */
  size_t w_bytes, x_bytes, y_bytes;
  void *d_w, *d_x, *d_y;
} few_case;

static size_t y_element(const few_case *c) {
  return c->y_f32 ? 4 : 2;
}

static bool quantised(pkv_wtype type) {
  return !test_wtype_is_float(type);
}

/* Weights in 16 bits have kernels of their own: scratch of theirs, NULL where the device has none.
   They take rows of w in sixteens. */
static void *few_sums;

static bool covered(pkv_wtype type) {
  return quantised(type) || (type != PKV_WTYPE_F32 && few_sums != NULL);
}

static pkv_weight host_weight(const few_case *c) {
  return (pkv_weight){.type = c->type,
                      .n = c->n,
                      .k = c->k,
                      .data = c->w,
                      .row_bytes = test_wtype_row_bytes(c->type, c->k)};
}

static void few_init(few_case *c, uint64_t seed) {
  pkv_rng rng;
  if (!quantised(c->type)) c->n = (c->n + 15) / 16 * 16;
  pkv_rng_init(&rng, seed);
  const size_t raw = (size_t)(c->n * test_wtype_row_bytes(c->type, c->k));
  c->w = malloc(raw);
  test_weights_random(c->w, c->type, c->n, c->k, &rng);
  c->w_bytes = quantised(c->type) ? pkv_dense_quant_bytes(c->type, c->n, c->k) : raw;
  assert_true(c->w_bytes > 0);
  c->packed = malloc(c->w_bytes + 2 * GUARD);
  memset(c->packed, 0xff, c->w_bytes + 2 * GUARD);
  const pkv_weight host = host_weight(c);
  if (quantised(c->type))
    pkv_dense_quant_pack(c->packed + GUARD, &host, c->n, 0);
  else
    memcpy(c->packed + GUARD, c->w, raw);

  c->x_stride = (c->k + 7) / 8 * 8 + 8;
  c->x_bytes = (size_t)(c->m * c->x_stride) * 2 + 2 * GUARD;
  c->x = malloc(c->x_bytes);
  memset(c->x, 0xff, c->x_bytes);
  for (int32_t i = 0; i < c->m; i++)
    for (int64_t j = 0; j < c->k; j++) /* rows of very different sizes */
      pkv_store(c->x, c->act, GUARD / 2 + i * c->x_stride + j,
                (float)pkv_rng_normal(&rng) * (i % 3 == 2   ? 3.0f
                                               : i % 3 == 1 ? 0.01f
                                                            : 1.0f));

  c->values = malloc((size_t)(c->m * c->k) * sizeof *c->values);
  for (int64_t i = 0; i < c->m * c->k; i++)
    c->values[i] = (double)pkv_load(c->x, c->act, GUARD / 2 + i / c->k * c->x_stride + i % c->k);

  const int64_t columns = c->gate == PKV_DENSE_NO_GATE ? c->n : c->n / 2;
  c->y_stride = (columns + 7) / 8 * 8 + 8;
  c->y_bytes = (size_t)(c->m * c->y_stride) * y_element(c) + 2 * GUARD;
  c->y = malloc(c->y_bytes);
  c->start = malloc(c->y_bytes);
  memset(c->start, MARK, c->y_bytes);
  if (c->accumulate)
    for (int32_t i = 0; i < c->m; i++)
      for (int64_t j = 0; j < columns; j++)
        pkv_store(c->start, PKV_DTYPE_F32, GUARD / 4 + i * c->y_stride + j,
                  (float)pkv_rng_normal(&rng));
  c->d_w = gpu_up(c->packed, c->w_bytes + 2 * GUARD);
  c->d_x = gpu_up(c->x, c->x_bytes);
  c->d_y = gpu_up(c->start, c->y_bytes);
}

static void few_deinit(few_case *c) {
  pkv_device_free(gpu, c->d_w);
  pkv_device_free(gpu, c->d_x);
  pkv_device_free(gpu, c->d_y);
  free(c->w);
  free(c->packed);
  free(c->x);
  free(c->values);
  free(c->y);
  free(c->start);
}

static pkv_dense_matmul_params few_params(const few_case *c) {
  pkv_dense_matmul_params p = {0};
  p.w = host_weight(c);
  p.w.data = (unsigned char *)c->d_w + GUARD;
  p.act = c->act;
  p.m = c->m;
  p.x = (unsigned char *)c->d_x + GUARD;
  p.x_stride = c->x_stride;
  p.y = (unsigned char *)c->d_y + GUARD;
  p.y_stride = c->y_stride;
  p.y_f32 = c->y_f32;
  p.accumulate = c->accumulate;
  p.gate = c->gate;
  return p;
}

/* split: of packed weights alone. */
static cudaError_t few_launch(const pkv_dense_matmul_params *p, int32_t split, int32_t dependent) {
  const pkv_cuda_state *const state = pkv_cuda_state_of(gpu);
  if (quantised(p->w.type)) return pkv_dense_launch_gemv_as(p, split, dependent, NULL);
  return pkv_dense_launch_stream(p, state->tensor_encoder, few_sums, state->sms, dependent, NULL);
}

static bool few_fits(const pkv_dense_matmul_params *p, int32_t split) {
  return quantised(p->w.type) ? pkv_dense_gemv_fits(p, split) != 0 : pkv_dense_stream_takes(p) != 0;
}

static void few_run(few_case *c, int32_t split, int32_t dependent) {
  const pkv_dense_matmul_params p = few_params(c);
  gpu_copy(c->d_y, c->start, c->y_bytes);
  assert_int_equal(few_launch(&p, split, dependent), cudaSuccess);
  gpu_copy(c->y, c->d_y, c->y_bytes);
  OK(pkv_device_synchronize(gpu, NULL, err));
}

/* A row of w in double, and what roundings of its elements are relative to. */
typedef struct row_values {
  double *w, *size;
} row_values;

static void row_read(row_values *r, const few_case *c, int64_t j) {
  const unsigned char *row = c->w + j * test_wtype_row_bytes(c->type, c->k);
  for (int64_t e = 0; e < c->k; e++) {
    r->w[e] = test_weight_value(row, c->type, e);
    r->size[e] = quantised(c->type) ? test_weight_size(row, c->type, e) : 0.0;
  }
}

/* Row i of x times a row of w; *error: what roundings may make of it. */
static double few_dot(const few_case *c, int32_t i, const row_values *r, double *error) {
  double sum = 0.0, squares = 0.0, whole = 0.0;
  for (int64_t e = 0; e < c->k; e++) {
    const double x = c->values[i * c->k + e], y = r->w[e] * x, size = r->size[e] * x;
    sum += y;
    squares += size * size;
    whole += fabs(y);
  }
  /* Weights as f16 of f16 scales; then float sums. */
  *error = 6.0 * 0x1p-11 * sqrt(squares) + ((double)c->k / 8.0 + 16.0) * 0x1p-23 * whole;
  return sum;
}

static double gate_of(pkv_dense_gate gate, double g) {
  const double t =
      gate == PKV_DENSE_SILU ? g : g * (1.59576912160573071 + 0.07135481282745 * g * g);
  return g / (1.0 + exp(-t));
}

static double few_expected(const few_case *c, int32_t i, int64_t j, const row_values rows[2],
                           double *error) {
  double e1 = 0.0, e2 = 0.0, y = few_dot(c, i, &rows[0], &e1);
  if (c->gate != PKV_DENSE_NO_GATE) {
    const double g = gate_of(c->gate, y), up = few_dot(c, i, &rows[1], &e2);
    e1 = 1.2 * e1 * (fabs(up) + e2) + (fabs(g) + 1e-6) * e2 + 1e-6 * fabs(g * up);
    y = g * up;
  }
  if (c->accumulate)
    y += (double)pkv_load(c->start, PKV_DTYPE_F32, GUARD / 4 + i * c->y_stride + j);
  const double u = c->y_f32 ? 0x1p-23 : c->act == PKV_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
  *error = e1 + u * fabs(y) + 1e-7;
  return y;
}

static void few_check(const few_case *c, const char *what) {
  const pkv_dtype type = c->y_f32 ? PKV_DTYPE_F32 : c->act;
  const int64_t columns = c->gate == PKV_DENSE_NO_GATE ? c->n : c->n / 2;
  const int64_t guard = GUARD / (int64_t)y_element(c);
  double *const memory = malloc((size_t)c->k * 4 * sizeof *memory);
  row_values rows[2] = {{memory, memory + c->k}, {memory + 2 * c->k, memory + 3 * c->k}};
  for (int64_t j = 0; j < columns; j++) {
    row_read(&rows[0], c, j);
    if (c->gate != PKV_DENSE_NO_GATE) row_read(&rows[1], c, c->n / 2 + j);
    for (int32_t i = 0; i < c->m; i++) {
      double error = 0.0;
      const double want = few_expected(c, i, j, rows, &error);
      const double got = (double)pkv_load(c->y, type, guard + i * c->y_stride + j);
      if (!(fabs(got - want) <= error))
        fail_msg("%s %s m %d n %lld k %lld gate %d: y[%d][%lld] = %.9g, wanted %.9g +- %.3g", what,
                 test_wtype_name(c->type), c->m, (long long)c->n, (long long)c->k, (int)c->gate, i,
                 (long long)j, got, want, error);
    }
  }
  free(memory);
  for (size_t b = 0; b < c->y_bytes; b++) { /* nothing else was written */
    const int64_t at = ((int64_t)b - GUARD) / (int64_t)y_element(c);
    const bool inside = b >= GUARD && b < c->y_bytes - GUARD && at % c->y_stride < columns;
    if (!inside && c->y[b] != MARK)
      fail_msg("%s %s m %d n %lld k %lld: byte %zu beside y became %d", what,
               test_wtype_name(c->type), c->m, (long long)c->n, (long long)c->k, b, c->y[b]);
  }
}

/* False where so many CTAs' share of x does not fit: nothing runs then. */
static bool few_once(few_case c, int32_t split, const char *what) {
  few_init(&c, (uint64_t)(c.k * 31 + c.m));
  const pkv_dense_matmul_params p = few_params(&c);
  const bool fits = few_fits(&p, split);
  if (fits) {
    few_run(&c, split, 0);
    few_check(&c, what);
  } else {
    assert_int_equal(few_launch(&p, split, 0), cudaErrorInvalidValue);
  }
  few_deinit(&c);
  return fits;
}

static bool here(void) {
  if (gpu == NULL || pkv_cuda_state_of(gpu)->major < 9) return false;
  assert_int_equal(pkv_dense_kernels_prepare(), cudaSuccess);
  if (few_sums == NULL && pkv_dense_device_has_wgmma())
    OK(pkv_device_alloc(&few_sums, gpu, pkv_dense_stream_scratch(pkv_cuda_state_of(gpu)->sms),
                        err));
  return true;
}

/* Each inner size and number of rows, all weight types that have kernels. */
static void test_sizes(void **state) {
  (void)state;
  if (!here()) skip();
  for (size_t t = 0; t < TEST_WTYPES; t++) {
    const pkv_wtype type = test_wtypes[t];
    const int64_t step = test_wtype_is_super(type) ? 256 : 32, most = gpu_opt.small ? 320 : 1024;
    if (!covered(type)) continue;
    for (int64_t k = step > 64 ? step : 64; k <= most; k += step)
      for (int32_t m = 1; m <= (quantised(type) ? 9 : 16); m++) {
        const few_case c = {.type = type,
                            .act = type == PKV_WTYPE_BF16  ? PKV_DTYPE_BF16
                                   : type == PKV_WTYPE_F16 ? PKV_DTYPE_F16
                                   : (k / step + m) % 2    ? PKV_DTYPE_BF16
                                                           : PKV_DTYPE_F16,
                            .m = m,
                            .n = 16 + (k / 32 + m) % 23,
                            .k = k,
                            .y_f32 = (int32_t)(k / 32) % 2,
                            .accumulate = (int32_t)(k / 32) % 2 && m % 2};
        assert_true(few_once(c, 0, "sizes"));
      }
  }
}

/* Rows of real models: several tiles a CTA, elements shared by CTAs of a cluster, 16 rows. */
static void test_splits(void **state) {
  static const struct {
    int64_t k;
    int32_t m, split;
  } cells[] = {{4096, 1, 1},   {4096, 5, 2},  {4096, 16, 2}, {8192, 3, 4},
               {8192, 11, 2},  {4096, 8, 1},  {576, 16, 1},  {14336, 2, 1},
               {14336, 16, 0}, {14336, 8, 4}, {768, 37, 0}};
  (void)state;
  if (!here()) skip();
  for (size_t t = 1; t < TEST_WTYPES; t++)
    for (size_t i = 0; i < COUNT(cells); i++) {
      const pkv_wtype type = test_wtypes[t];
      if (!covered(type) || cells[i].k % test_wtype_block(type) != 0) continue;
      if (cells[i].m > PKV_DENSE_STREAM_ROWS && !quantised(type)) continue;
      const few_case c = {.type = type,
                          .act = type == PKV_WTYPE_F16 ? PKV_DTYPE_F16 : PKV_DTYPE_BF16,
                          .m = cells[i].m,
                          .n = i == 0 ? 3000 : 100,
                          .k = cells[i].k,
                          .y_f32 = 1,
                          .accumulate = 1};
      if (gpu_opt.small && i > 1) continue;
      const bool ran = few_once(c, cells[i].split, "splits");
      /* Of the widest types some shares of 11 and 16 rows are too large; the others run. */
      if (cells[i].split <= 1 || cells[i].m < 8) assert_true(ran);
    }
}

/* Weights in 16 bits: clusters of 1, 2, 4 and 8 CTAs with a tile each, and more tiles than there
   are clusters, whose units CTAs divide; inner sizes that end inside a unit. */
static void test_streams(void **state) {
  static const struct {
    int64_t n, k;
  } cells[] = {{2000, 264}, {2000, 1000}, {1008, 520}, {4096, 200},
               {4240, 72},  {4400, 136},  {4400, 968}, {9008, 328}};
  static const int32_t rows[] = {1, 8, 9, 16};
  (void)state;
  if (!here() || few_sums == NULL) skip();
  for (size_t i = 0; i < (gpu_opt.small ? 1 : COUNT(cells)); i++)
    for (size_t r = 0; r < COUNT(rows); r++)
      for (int bf16 = 0; bf16 < 2; bf16++) {
        few_case c = {.type = bf16 ? PKV_WTYPE_BF16 : PKV_WTYPE_F16,
                      .act = bf16 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16,
                      .m = rows[r],
                      .n = cells[i].n,
                      .k = cells[i].k,
                      .y_f32 = 1,
                      .accumulate = 1};
        if (bf16) assert_true(few_once(c, 0, "streams"));
        c.accumulate = c.y_f32 = 0;
        c.gate = bf16 ? PKV_DENSE_GELU : PKV_DENSE_SILU;
        if (!bf16) assert_true(few_once(c, 0, "streams"));
      }
}

static void test_gates(void **state) {
  (void)state;
  if (!here()) skip();
  for (size_t t = 1; t < TEST_WTYPES; t++)
    for (int gate = PKV_DENSE_SILU; gate <= PKV_DENSE_GELU; gate++)
      for (int32_t m = 1; m <= 16; m += 5) {
        const pkv_wtype type = test_wtypes[t];
        const few_case c = {.type = type,
                            .act = type == PKV_WTYPE_F16 ? PKV_DTYPE_F16 : PKV_DTYPE_BF16,
                            .m = m,
                            .n = 16 * (m + 4),
                            .k = m % 2 ? 512 : 4096,
                            .gate = (pkv_dense_gate)gate,
                            .y_f32 = m % 2 == 0};
        if (!covered(type)) continue;
        assert_true(few_once(c, m % 2 ? 0 : 2, "gates"));
      }
}

/* Dependent launches, each reading what the one before wrote; the same bits each time. */
static void chain(pkv_wtype type, int32_t m, int64_t n) {
  few_case c = {.type = type, .act = PKV_DTYPE_BF16, .m = m, .n = n, .k = n};
  few_init(&c, 7);
  unsigned char *first = malloc(c.y_bytes);
  pkv_dense_matmul_params there = few_params(&c), back = there;
  back.x = there.y;
  back.x_stride = there.y_stride;
  back.y = (void *)(uintptr_t)there.x;
  back.y_stride = there.x_stride;
  for (int round = 0; round < 3; round++) {
    gpu_copy(c.d_x, c.x, c.x_bytes);
    gpu_copy(c.d_y, c.start, c.y_bytes);
    for (int i = 0; i < (n > 1024 ? 24 : 40); i++) /* they grow: still finite */
      assert_int_equal(few_launch(i % 2 ? &back : &there, 0, round != 1), cudaSuccess);
    gpu_copy(c.y, c.d_y, c.y_bytes);
    OK(pkv_device_synchronize(gpu, NULL, err));
    if (round == 0) memcpy(first, c.y, c.y_bytes);
    assert_memory_equal(first, c.y, c.y_bytes);
  }
  free(first);
  few_deinit(&c);
}

static void test_chain(void **state) {
  (void)state;
  if (!here()) skip();
  chain(PKV_WTYPE_Q8_0, 3, 512);
  if (!covered(PKV_WTYPE_BF16)) return;
  chain(PKV_WTYPE_BF16, 3, 512);
  chain(PKV_WTYPE_BF16, 13, 512);
  chain(PKV_WTYPE_BF16, 5, gpu_opt.small ? 1024 : 4352); /* sums left for other CTAs */
}

/* NaN and infinity in one row stay there. */
static void test_nan_of_one_row(void **state) {
  (void)state;
  if (!here()) skip();
  for (size_t t = 1; t < TEST_WTYPES; t++) {
    const pkv_wtype type = test_wtypes[t];
    few_case c = {.type = type,
                  .act = type == PKV_WTYPE_F16 ? PKV_DTYPE_F16 : PKV_DTYPE_BF16,
                  .m = 7,
                  .n = 40,
                  .k = 512,
                  .y_f32 = 1};
    if (!covered(type)) continue;
    few_init(&c, 11);
    unsigned char *clean = malloc(c.y_bytes);
    few_run(&c, 0, 0);
    memcpy(clean, c.y, c.y_bytes);
    pkv_store(c.x, c.act, GUARD / 2 + 2 * c.x_stride + 77, NAN);
    pkv_store(c.x, c.act, GUARD / 2 + 5 * c.x_stride + 300, INFINITY);
    gpu_copy(c.d_x, c.x, c.x_bytes);
    few_run(&c, 0, 0);
    for (int32_t i = 0; i < c.m; i++)
      for (int64_t j = 0; j < c.n; j++) {
        const int64_t at = GUARD / 4 + i * c.y_stride + j;
        const float y = pkv_load(c.y, PKV_DTYPE_F32, at);
        if (i == 2)
          assert_true(isnan(y));
        else if (i == 5)
          assert_int_equal(isfinite(y) != 0, 0);
        else
          assert_memory_equal(c.y + 4 * at, clean + 4 * at, 4);
      }
    free(clean);
    few_deinit(&c);
  }
}

/* Packing on the device gives the host's bytes, in one go and in two; dequantised it is the
   weights. */
static void test_packing(void **state) {
  (void)state;
  if (!here()) skip();
  for (size_t t = 1; t < TEST_WTYPES; t++) {
    const pkv_wtype type = test_wtypes[t];
    few_case c = {.type = type, .act = PKV_DTYPE_BF16, .m = 1, .n = 37, .k = 768};
    if (!quantised(type)) continue;
    few_init(&c, 3);
    const pkv_weight host = host_weight(&c);
    const int64_t row = host.row_bytes, cut = 13;
    unsigned char *raw = gpu_up(c.w, (size_t)(c.n * row)), *back = malloc(c.w_bytes);
    uint16_t *out = malloc((size_t)(c.n * c.k) * 2);
    unsigned char *to = gpu_up(c.packed, c.w_bytes), *d_out = gpu_up(out, (size_t)(c.n * c.k) * 2);
    gpu_fill(to, 0xff, c.w_bytes);
    pkv_weight part = host;
    part.data = raw;
    part.n = cut;
    assert_int_equal(pkv_dense_launch_pack(to, &part, c.n, 0, NULL), cudaSuccess);
    part.data = raw + cut * row;
    part.n = c.n - cut;
    assert_int_equal(pkv_dense_launch_pack(to, &part, c.n, cut, NULL), cudaSuccess);
    gpu_copy(back, to, c.w_bytes);
    OK(pkv_device_synchronize(gpu, NULL, err));
    assert_memory_equal(back, c.packed + GUARD, c.w_bytes);
    for (int bf16 = 0; bf16 < 2; bf16++) {
      const pkv_dtype act = bf16 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16;
      const double u = bf16 ? 0x1p-8 + 0x1p-11 : 0x1p-11;
      pkv_weight packed = host;
      packed.data = to;
      assert_int_equal(pkv_dense_launch_dequant(&packed, act, d_out, NULL), cudaSuccess);
      gpu_copy(out, d_out, (size_t)(c.n * c.k) * 2);
      OK(pkv_device_synchronize(gpu, NULL, err));
      for (int64_t i = 0; i < c.n; i++)
        for (int64_t j = 0; j < c.k; j++) {
          const double want = test_weight_value(c.w + i * row, type, j);
          const double size = test_weight_size(c.w + i * row, type, j);
          const double got = (double)pkv_load(out, act, i * c.k + j);
          if (!(fabs(got - want) <= 3.0 * 0x1p-11 * size + u * fabs(want)))
            fail_msg("%s [%lld][%lld] = %.9g, wanted %.9g", test_wtype_name(type), (long long)i,
                     (long long)j, got, want);
        }
    }
    pkv_device_free(gpu, raw);
    pkv_device_free(gpu, to);
    pkv_device_free(gpu, d_out);
    free(back);
    free(out);
    few_deinit(&c);
  }
}

/* What no kernel covers is refused before anything runs. */
static void test_refused(void **state) {
  (void)state;
  if (!here()) skip();
  const pkv_dense_matmul_params good = {
      .w = {.type = PKV_WTYPE_Q8_0, .n = 16, .k = 64, .row_bytes = 68},
      .act = PKV_DTYPE_F16,
      .m = 64,
      .x_stride = 64,
      .y_stride = 16};
  pkv_dense_matmul_params p = good;
  assert_int_equal(pkv_dense_gemv_takes(&p), 1);
  p.m = 65;
  assert_int_equal(pkv_dense_gemv_takes(&p), 0);
  p = good;
  p.w.k = 72;
  assert_int_equal(pkv_dense_gemv_takes(&p), 0);
  p = good;
  p.w.type = PKV_WTYPE_F32;
  assert_int_equal(pkv_dense_gemv_takes(&p), 0);
  p = good;
  p.w.type = PKV_WTYPE_F16;
  assert_int_equal(pkv_dense_gemv_takes(&p), 0);
  p = good;
  p.gate = PKV_DENSE_SILU;
  p.w.n = 24;
  assert_int_equal(pkv_dense_gemv_takes(&p), 0);
  assert_int_equal(pkv_dense_launch_gemv(&p, 0, NULL), cudaErrorInvalidValue);
  assert_int_equal(pkv_dense_quant_bytes(PKV_WTYPE_F32, 16, 64), 0);
  assert_int_equal(pkv_dense_quant_bytes(PKV_WTYPE_Q4_K, 16, 64), 0);
}

/* The same of weights in 16 bits. */
static void test_streams_refused(void **state) {
  (void)state;
  if (!here() || few_sums == NULL) skip();
  const pkv_dense_matmul_params good = {
      .w = {.type = PKV_WTYPE_F16, .n = 16, .k = 64, .row_bytes = 128},
      .act = PKV_DTYPE_F16,
      .m = 16,
      .x_stride = 64,
      .y_stride = 16};
  pkv_dense_matmul_params p = good;
  assert_int_equal(pkv_dense_stream_takes(&p), 1);
  p.m = 17;
  assert_int_equal(pkv_dense_stream_takes(&p), 0);
  p.m = 0;
  assert_int_equal(pkv_dense_stream_takes(&p), 0);
  p = good;
  p.act = PKV_DTYPE_BF16;
  assert_int_equal(pkv_dense_stream_takes(&p), 0);
  p = good;
  p.w.n = 24;
  assert_int_equal(pkv_dense_stream_takes(&p), 0);
  p = good;
  p.w.row_bytes = 136;
  assert_int_equal(pkv_dense_stream_takes(&p), 0);
  p = good;
  p.w.type = PKV_WTYPE_Q8_0;
  assert_int_equal(pkv_dense_stream_takes(&p), 0);
  p = good;
  p.x_stride = 68;
  assert_int_equal(pkv_dense_stream_takes(&p), 0);
  assert_int_equal(few_launch(&p, 0, 0), cudaErrorInvalidValue);
}

static int few_teardown(void **state) {
  if (gpu != NULL) pkv_device_free(gpu, few_sums);
  few_sums = NULL;
  return gpu_teardown(state);
}

int gpu_suite_few(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_sizes),           cmocka_unit_test(test_splits),
      cmocka_unit_test(test_gates),           cmocka_unit_test(test_chain),
      cmocka_unit_test(test_nan_of_one_row),  cmocka_unit_test(test_packing),
      cmocka_unit_test(test_refused),         cmocka_unit_test(test_streams),
      cmocka_unit_test(test_streams_refused),
  };
  return cmocka_run_group_tests_name("few", tests, gpu_setup, few_teardown);
}
