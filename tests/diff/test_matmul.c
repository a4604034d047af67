/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products against double on independently dequantised weights: every weight type, inner
 * sizes 32 to 1024, 1 to 9 and 33 rows, both modes; and what must hold bit for bit.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu_dense.h"
#include "backend/cpu/cpu_isa.h"
#include "backend/cpu/dense_kernels.h"
#include "base/cpu.h"
#include "support/weight_blocks.h"

#define MAX_M 130
#define MAX_N 40
#define MAX_K 2112
#define EPS   0x1p-24

/* In an emulator one in so many sizes is enough, and of them the small ones: whole with
   PKV_TEST_WHOLE (`./run neon`). */
#ifdef PKV_TEST_THIN
#define ONE_IN 8
#define SMALL  (getenv("PKV_TEST_WHOLE") == NULL)
#else
#define ONE_IN 1
#define SMALL  false
#endif

typedef struct fixture {
  pkv_executor *scalar;
  pkv_executor *vector, *avx512; /* AVX2 or NEON; may be NULL */
  pkv_executor *vnni;            /* AVX-512 of a machine without BF16; may be NULL */
  pkv_executor *many;            /* the best, with three workers */
  unsigned char *weights;
  float *x, *y, *other;
  double *values, *sizes; /* one column's weights */
  void *scratch;
} fixture;

static pkv_executor *executor_of(pkv_isa isa, int32_t threads) {
  pkv_executor *e = NULL;
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  options.isa = isa;
  options.threads = threads;
  pkv_error err = {0};
  if (pkv_executor_create(&e, &options, &err) != PKV_OK) print_message("%s\n", err.text);
  return e;
}

#if defined(__x86_64__)
/* On a machine that has more, the products of one that has VNNI and no BF16. */
static pkv_executor *vnni_executor(void) {
  pkv_cpu_features have;
  pkv_cpu_detect(&have);
  if (!have.avx512_bf16 || !have.avx512_vnni) return NULL;
  have.avx512_bf16 = false;
  pkv_executor *e = executor_of(PKV_ISA_AVX512, 1);
  if (e) ((pkv_cpu_state *)e->device_state)->dense = pkv_cpu_dense_table(PKV_ISA_AVX512, &have);
  return e;
}
#else
static pkv_executor *vnni_executor(void) {
  return NULL;
}
#endif

static int setup(void **state) {
  fixture *f = calloc(1, sizeof *f);
  f->scalar = executor_of(PKV_ISA_SCALAR, 1);
  f->vector = executor_of(PKV_ISA_AVX2, 1);
  if (f->vector == NULL) f->vector = executor_of(PKV_ISA_NEON, 1);
  f->avx512 = executor_of(PKV_ISA_AVX512, 1);
  f->vnni = vnni_executor();
  f->many = executor_of(PKV_ISA_AUTO, 3);
  f->weights = aligned_alloc(64, (size_t)MAX_N * MAX_K * 4);
  f->x = calloc((size_t)MAX_M * MAX_K, sizeof(float));
  f->y = calloc((size_t)MAX_M * MAX_N, sizeof(float));
  f->other = calloc((size_t)MAX_M * MAX_N, sizeof(float));
  f->values = calloc(MAX_K, sizeof(double));
  f->sizes = calloc(MAX_K, sizeof(double));
  f->scratch = aligned_alloc(64, (pkv_cpu_matmul_scratch_bytes(MAX_M, MAX_K) + 63) / 64 * 64);
  *state = f;
  return f->scalar && f->many ? 0 : -1;
}

static int teardown(void **state) {
  fixture *f = *state;
  pkv_executor_destroy(f->scalar);
  pkv_executor_destroy(f->vector);
  pkv_executor_destroy(f->avx512);
  pkv_executor_destroy(f->vnni);
  pkv_executor_destroy(f->many);
  free(f->weights);
  free(f->scratch);
  free(f->x);
  free(f->y);
  free(f->other);
  free(f->values);
  free(f->sizes);
  free(f);
  return 0;
}

/* The best executor of this machine. */
static pkv_executor *best(const fixture *f) {
  return f->avx512 ? f->avx512 : (f->vector ? f->vector : f->scalar);
}

static pkv_matmul_params params(const fixture *f, pkv_wtype type, pkv_compute compute, int64_t m,
                                int64_t n, int64_t k, float *y) {
  return (pkv_matmul_params){.w = {.type = type,
                                   .n = n,
                                   .k = k,
                                   .data = f->weights,
                                   .row_bytes = test_wtype_row_bytes(type, k)},
                             .compute = compute,
                             .m = m,
                             .x = f->x,
                             .x_stride = k,
                             .y = y,
                             .y_stride = n,
                             .scratch = f->scratch};
}

static void run(pkv_executor *e, const pkv_matmul_params *p) {
  pkv_error err = {0};
  if (pkv_cpu_matmul(e, p, &err) != PKV_OK) fail_msg("matmul: %s", err.text);
}

static void fill_x(fixture *f, int64_t count, pkv_rng *rng) {
  for (int64_t i = 0; i < count; i++)
    f->x[i] = (float)pkv_rng_normal(rng);
}

/* Largest part of the bound that any output takes; fails beyond 1. */
static double compare(fixture *f, const pkv_matmul_params *p) {
  double worst = 0.0;
  const int64_t k = p->w.k;
  const bool eight = p->compute == PKV_COMPUTE_I8 && !test_wtype_is_float(p->w.type);
  const bool half = p->compute == PKV_COMPUTE_I8 && p->w.type == PKV_WTYPE_BF16;
  for (int64_t c = 0; c < p->w.n; c++) {
    const unsigned char *row = f->weights + c * p->w.row_bytes;
    for (int64_t i = 0; i < k; i++) {
      f->values[i] = test_weight_value(row, p->w.type, i);
      f->sizes[i] = test_weight_size(row, p->w.type, i);
    }
    for (int64_t r = 0; r < p->m; r++) {
      const float *x = p->x + r * p->x_stride;
      double want = 0.0, size = 0.0, step = 0.0;
      for (int64_t i = 0; i < k; i++) {
        want += f->values[i] * (double)x[i];
        size += f->sizes[i] * fabs((double)x[i]);
      }
      for (int64_t b = 0; eight && b < k / 32; b++) {
        double largest = 0.0, weights = 0.0;
        for (int64_t i = 32 * b; i < 32 * b + 32; i++) {
          largest = fmax(largest, fabs((double)x[i]));
          weights += fabs(f->values[i]);
        }
        step += weights * largest / 254.0; /* half a step of largest / 127 */
      }
      if (half) step = size * 0x1p-8; /* half a step of 8 bits: 2^-9 of their lowest value */
      /* Roundings: two of each weight, one of each product and sum along a lane, the lanes' tree;
         in the 8-bit mode two sums a block, of scales rounded three times. */
      const double steps = eight ? 2.0 * (double)(k / 32) + 8.0 : (double)(k / 8) + 8.0;
      const double bound = step * (1.0 + 1e-5) + steps * EPS * size + 1e-30;
      const double got = (double)p->y[r * p->y_stride + c];
      const double part = fabs(got - want) / bound;
      if (!(part <= 1.0))
        fail_msg("%s compute %d m %d n %d k %d row %d col %d: %.9g, expected %.9g, bound %.3g",
                 test_wtype_name(p->w.type), (int)p->compute, (int)p->m, (int)p->w.n, (int)k,
                 (int)r, (int)c, got, want, bound);
      worst = fmax(worst, part);
    }
  }
  return worst;
}

static void test_every_type_and_shape(void **state) {
  fixture *f = *state;
  static const int64_t rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 33};
  for (int t = 0; t < TEST_WTYPES; t++) {
    double worst[2] = {0.0, 0.0};
    for (int64_t k = 32; k <= 1024; k += 32) {
      if (k % test_wtype_block(test_wtypes[t]) != 0) continue;
      if (k / 32 % ONE_IN != 0 && k != 96) continue;
      if (SMALL && k > 256) continue;
      pkv_rng rng;
      pkv_rng_init(&rng, (uint64_t)(1000 * t + k));
      const int64_t n = k % 96 == 0 ? 33 : 1 + k / 32 % 20;
      test_weights_random(f->weights, test_wtypes[t], n, k, &rng);
      fill_x(f, 33 * k, &rng);
      for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i] == 33 && k % 128 != 0) continue;
        for (int mode = 0; mode < 2; mode++) {
          const pkv_matmul_params p =
              params(f, test_wtypes[t], (pkv_compute)mode, rows[i], n, k, f->y);
          run(best(f), &p);
          worst[mode] = fmax(worst[mode], compare(f, &p));
        }
      }
    }
    print_message("%s: largest error as a part of its bound: F32 %.3f, I8 %.3f\n",
                  test_wtype_name(test_wtypes[t]), worst[0], worst[1]);
  }
}

static void test_float_types_take_any_k(void **state) {
  fixture *f = *state;
  for (int t = 0; t < 3; t++) {
    for (int64_t k = 1; k <= 41; k++) {
      pkv_rng rng;
      pkv_rng_init(&rng, (uint64_t)(77 + 100 * t + k));
      /* Memory of the exact size, so that a read past a row's end shows under a sanitizer. */
      const size_t bytes = (size_t)(5 * test_wtype_row_bytes(test_wtypes[t], k));
      fixture own = *f; /* a failure leaves the others' memory as it was */
      own.weights = malloc(bytes);
      own.x = malloc((size_t)(3 * k) * sizeof *own.x);
      test_weights_random(own.weights, test_wtypes[t], 5, k, &rng);
      fill_x(&own, 3 * k, &rng);
      for (int64_t m = 1; m <= 3; m++) {
        for (int mode = 0; mode < 2; mode++) {
          const pkv_matmul_params p =
              params(&own, test_wtypes[t], (pkv_compute)mode, m, 5, k, f->y);
          pkv_executor *const executors[3] = {best(f), f->vector, f->scalar};
          for (int e = 0; e < 3; e++) {
            if (!executors[e]) continue;
            run(executors[e], &p);
            (void)compare(&own, &p);
          }
        }
      }
      free(own.weights);
      free(own.x);
    }
  }
}

static void expect_same_bits(const float *a, const float *b, int64_t count, const char *what,
                             pkv_wtype type, int mode, int64_t k) {
  for (int64_t i = 0; i < count; i++) {
    if (memcmp(&a[i], &b[i], sizeof(float)) != 0)
      fail_msg("%s: %s compute %d k %d output %d: %.9g and %.9g", what, test_wtype_name(type), mode,
               (int)k, (int)i, (double)a[i], (double)b[i]);
  }
}

/* A row's bits: alone, among 2..130 rows, with 1 or 3 workers, in any of several products. */
static void test_bits_do_not_depend_on_rows_or_workers(void **state) {
  fixture *f = *state;
  static const int64_t ks[] = {32, 96, 544, 1056, 2080}, rows[] = {2, 3, 4, 5, 7, 33, 130};
  const int64_t n = 39;
  for (int t = 0; t < TEST_WTYPES; t++) {
    for (int mode = 0; mode < 2; mode++) {
      for (size_t i = 0; i < sizeof ks / sizeof ks[0]; i++) {
        const pkv_wtype type = test_wtypes[t];
        const int64_t block = test_wtype_is_super(type) ? 256 : 1, k = ks[i] / block * block;
        if (k == 0 || (ONE_IN > 1 && k > 600)) continue;
        if (SMALL && (k > 512 || k == 32)) continue;
        const int64_t most = SMALL ? 33 : MAX_M;
        pkv_rng rng;
        pkv_rng_init(&rng, (uint64_t)(t * 10 + mode));
        test_weights_random(f->weights, type, n, k, &rng);
        fill_x(f, most * k, &rng);
        for (int64_t r = 0; r < most; r++) {
          pkv_matmul_params p = params(f, type, (pkv_compute)mode, 1, n, k, f->y + r * n);
          p.x = f->x + r * k;
          run(best(f), &p);
        }
        for (size_t j = 0; j < sizeof rows / sizeof rows[0] && rows[j] <= most; j++) {
          const pkv_matmul_params p = params(f, type, (pkv_compute)mode, rows[j], n, k, f->other);
          run(best(f), &p);
          expect_same_bits(f->y, f->other, rows[j] * n, "rows", type, mode, k);
          if (f->vector && f->vector != best(f)) {
            memset(f->other, 0, (size_t)(rows[j] * n) * sizeof(float));
            run(f->vector, &p);
            expect_same_bits(f->y, f->other, rows[j] * n, "AVX2", type, mode, k);
          }
          memset(f->other, 0, (size_t)(rows[j] * n) * sizeof(float));
          run(f->many, &p);
          expect_same_bits(f->y, f->other, rows[j] * n, "workers", type, mode, k);
        }
      }
    }
  }
}

static void agree_on(fixture *f, pkv_executor *vector, pkv_wtype type, int mode, int64_t m,
                     int64_t k) {
  pkv_rng rng;
  pkv_rng_init(&rng, (uint64_t)type + (uint64_t)k);
  test_weights_random(f->weights, type, 19, k, &rng);
  fill_x(f, m * k, &rng);
  pkv_matmul_params p = params(f, type, (pkv_compute)mode, m, 19, k, f->y);
  run(vector, &p);
  p.y = f->other;
  run(f->scalar, &p);
  expect_same_bits(f->y, f->other, m * 19, "scalar and vector", type, mode, k);
}

/* Each vector instruction set against the scalar kernels, bit for bit. */
static void agree(fixture *f, pkv_executor *vector) {
  if (!vector) {
    print_message("skipped: not on this CPU\n");
    skip();
  }
  static const int64_t rows[] = {1, 2, 3, 4, 7, 9, 15};
  for (int t = 0; t < TEST_WTYPES; t++) {
    for (int mode = 0; mode < 2; mode++) {
      for (int64_t step = 0; step < 7; step++) {
        const int64_t m = rows[step], block = test_wtype_block(test_wtypes[t]);
        const int64_t k = (32 + 160 * step + block - 1) / block * block;
        if (SMALL && k > 512) continue;
        agree_on(f, vector, test_wtypes[t], mode, m, k);
        if (!test_wtype_is_float(test_wtypes[t])) continue;
        for (int64_t tail = 1 + step % 3; tail < 32; tail += 3)
          agree_on(f, vector, test_wtypes[t], mode, m, k - tail);
      }
    }
  }
}

static void test_scalar_and_vector_agree(void **state) {
  fixture *f = *state;
  agree(f, f->vector);
}

static void test_scalar_and_avx512_agree(void **state) {
  fixture *f = *state;
  agree(f, f->avx512);
}

static void test_scalar_and_vnni_without_bf16_agree(void **state) {
  fixture *f = *state;
  agree(f, f->vnni);
}

/* Of BF16 weights in the 8-bit mode activations are rounded to bf16 and to nothing coarser: numbers
   of 8 bits come out exact, others differ from the float mode. */
static void test_bf16_rounds_activations(void **state) {
  fixture *f = *state;
  pkv_executor *const executors[3] = {f->scalar, f->vector, f->avx512};
  const int64_t k = 37, n = 9;
  for (int e = 0; e < 3; e++) {
    if (!executors[e]) continue;
    for (int fine = 0; fine < 2; fine++) {
      pkv_rng rng;
      pkv_rng_init(&rng, 5);
      test_weights_random(f->weights, PKV_WTYPE_BF16, n, k, &rng);
      for (int64_t i = 0; i < 5 * k; i++)
        f->x[i] = (float)(128 + i % 127) + (fine ? 0.25f : 0.0f);
      for (int64_t m = 1; m <= 5; m++) {
        const pkv_matmul_params p = params(f, PKV_WTYPE_BF16, PKV_COMPUTE_I8, m, n, k, f->y);
        run(executors[e], &p);
        for (int64_t i = 0; i < m * n; i++) {
          const unsigned char *row = f->weights + i % n * p.w.row_bytes;
          double want = 0.0, size = 0.0;
          for (int64_t j = 0; j < k; j++) {
            const double part =
                test_weight_value(row, PKV_WTYPE_BF16, j) * (double)(128 + (i / n * k + j) % 127);
            want += part;
            size += fabs(part);
          }
          if (fabs((double)f->y[i] - want) > size * 8.0 * EPS)
            fail_msg("m %d output %d: %.9g, expected %.9g", (int)m, (int)i, (double)f->y[i], want);
        }
      }
    }
  }
}

/* Codes and activations at their ends: no 16-bit sum inside a kernel may overflow. */
static void test_extremes(void **state) {
  fixture *f = *state;
  pkv_executor *const executors[3] = {f->scalar, f->vector, f->avx512};
  const int64_t n = 17;
  for (int t = 3; t < TEST_WTYPES; t++) {
    const pkv_wtype type = test_wtypes[t];
    const int64_t k = test_wtype_is_super(type) ? 1024 : 1088;
    const bool five = type == PKV_WTYPE_Q5_0 || type == PKV_WTYPE_Q5_1 || type == PKV_WTYPE_Q5_K;
    const int32_t most = type == PKV_WTYPE_Q6_K ? 63 : (five ? 31 : 15);
    const int32_t codes[2] = {type == PKV_WTYPE_Q8_0 ? 128 : 0,
                              type == PKV_WTYPE_Q8_0 ? 127 : most};
    for (int which = 0; which < 2; which++) {
      for (int sign = -1; sign <= 1; sign += 2) {
        test_weights_constant(f->weights, type, n, k, codes[which]);
        for (int64_t i = 0; i < 5 * k; i++)
          f->x[i] = (float)(127 * sign); /* rounds to itself: step 1 */
        const double want = (double)k * 127.0 * sign * test_weight_value(f->weights, type, 0);
        for (int e = 0; e < 3; e++) {
          if (!executors[e]) continue;
          for (int64_t m = 1; m <= 5; m += 4) {
            const pkv_matmul_params p = params(f, type, PKV_COMPUTE_I8, m, n, k, f->y);
            run(executors[e], &p);
            for (int64_t i = 0; i < m * n; i++) {
              if (fabs((double)f->y[i] - want) > fabs(want) * 1e-6)
                fail_msg("%s code %d sign %d m %d: %.9g, expected %.9g", test_wtype_name(type),
                         (int)codes[which], sign, (int)m, (double)f->y[i], want);
            }
          }
        }
      }
    }
  }
}

static void test_bad_numbers_stay_in_their_row(void **state) {
  fixture *f = *state;
  pkv_executor *const executors[3] = {f->scalar, f->vector, f->avx512};
  const float bad[3] = {NAN, INFINITY, -INFINITY};
  const int64_t n = 21, m = 6;
  for (int t = 0; t < TEST_WTYPES; t++) {
    const int64_t k = test_wtype_is_super(test_wtypes[t]) ? 256 : 128;
    for (int mode = 0; mode < 2; mode++) {
      for (int which = 0; which < 3; which++) {
        for (int e = 0; e < 3; e++) {
          if (!executors[e]) continue;
          pkv_rng rng;
          pkv_rng_init(&rng, 9u);
          test_weights_random(f->weights, test_wtypes[t], n, k, &rng);
          fill_x(f, m * k, &rng);
          pkv_matmul_params p = params(f, test_wtypes[t], (pkv_compute)mode, m, n, k, f->y);
          run(executors[e], &p);
          f->x[2 * k + 77] = bad[which];
          p.y = f->other;
          run(executors[e], &p);
          for (int64_t i = 0; i < m * n; i++) {
            if (i / n == 2)
              assert_int_equal(isfinite(f->other[i]) ? 1 : 0, 0);
            else
              assert_memory_equal(&f->y[i], &f->other[i], sizeof(float));
          }
        }
      }
    }
  }
}

/* Zeros, denormals and huge numbers as activations give finite, right results. */
static void test_tiny_and_huge_activations(void **state) {
  fixture *f = *state;
  pkv_executor *const executors[3] = {f->scalar, f->vector, f->avx512};
  static const float values[] = {0.0f, -0.0f, 1e-45f, 1e-38f, 1e-31f, 1e-29f, 1e30f};
  const int64_t k = 64, n = 9;
  pkv_rng rng;
  pkv_rng_init(&rng, 4);
  test_weights_random(f->weights, PKV_WTYPE_Q4_1, n, k, &rng);
  for (size_t v = 0; v < sizeof values / sizeof values[0]; v++) {
    for (int e = 0; e < 3; e++) {
      if (!executors[e]) continue;
      for (int64_t i = 0; i < 2 * k; i++)
        f->x[i] = i % 3 == 0 ? -values[v] : values[v];
      const pkv_matmul_params p = params(f, PKV_WTYPE_Q4_1, PKV_COMPUTE_I8, 2, n, k, f->y);
      run(executors[e], &p);
      if (fabsf(values[v]) >= 1e-29f || values[v] == 0.0f) (void)compare(f, &p);
      for (int64_t i = 0; i < 2 * n; i++)
        assert_true(isfinite(f->y[i]) != 0 &&
                    fabs((double)f->y[i]) <= 100.0 * (double)fabsf(values[v]));
    }
  }
}

static void test_bias_accumulate_and_strides(void **state) {
  fixture *f = *state;
  pkv_executor *const executors[3] = {f->scalar, f->vector, f->avx512};
  const int64_t n = 21, m = 5, y_stride = 24;
  for (int t = 0; t < TEST_WTYPES; t++) {
    const int64_t k = test_wtype_is_super(test_wtypes[t]) ? 256 : 96, x_stride = k + 5;
    for (int e = 0; e < 3; e++) {
      if (!executors[e]) continue;
      pkv_rng rng;
      pkv_rng_init(&rng, 11);
      test_weights_random(f->weights, test_wtypes[t], n, k, &rng);
      fill_x(f, m * x_stride, &rng);
      float bias[32];
      for (int64_t i = 0; i < n; i++)
        bias[i] = (float)pkv_rng_normal(&rng);
      pkv_matmul_params p = params(f, test_wtypes[t], PKV_COMPUTE_I8, m, n, k, f->y);
      p.x_stride = x_stride;
      run(executors[e], &p); /* plain, dense rows */
      p.y = f->other;
      p.y_stride = y_stride;
      p.bias = bias;
      p.accumulate = 1;
      for (int64_t i = 0; i < m * y_stride; i++)
        f->other[i] = 3.5f;
      run(executors[e], &p);
      for (int64_t i = 0; i < m * y_stride; i++) {
        const int64_t r = i / y_stride, c = i % y_stride;
        const float want = c < n ? 3.5f + (f->y[r * n + c] + bias[c]) : 3.5f;
        if (memcmp(&f->other[i], &want, sizeof want) != 0)
          fail_msg("%s row %d col %d: %.9g, expected %.9g", test_wtype_name(test_wtypes[t]), (int)r,
                   (int)c, (double)f->other[i], (double)want);
      }
    }
  }
}

static void test_many_products_equal_single_ones(void **state) {
  fixture *f = *state;
  pkv_executor *const executors[2] = {best(f), f->many};
  const int64_t k = 320;
  static const int64_t widths[4] = {40, 8, 17, 1};
  pkv_rng rng;
  pkv_rng_init(&rng, 21);
  test_weights_random(f->weights, PKV_WTYPE_Q4_1, MAX_N, k, &rng);
  for (int64_t m = 1; m <= 129; m += 64) {
    fill_x(f, m * k, &rng);
    for (int e = 0; e < 2; e++) {
      float *many = calloc((size_t)(m * 66), sizeof *many), *at = many;
      pkv_matmul_params p[4];
      for (int i = 0; i < 4; i++) {
        p[i] = params(f, PKV_WTYPE_Q4_1, PKV_COMPUTE_I8, m, widths[i], k, at);
        at += m * widths[i];
      }
      pkv_error err = {0};
      assert_int_equal(pkv_cpu_matmul_many(executors[e], p, 4, &err), PKV_OK);
      for (int i = 0; i < 4; i++) {
        pkv_matmul_params one = p[i];
        one.y = f->y;
        run(f->scalar, &one);
        expect_same_bits(p[i].y, f->y, m * widths[i], "many", PKV_WTYPE_Q4_1, 1, k);
      }
      free(many);
    }
  }
}

static void test_refusals(void **state) {
  fixture *f = *state;
  pkv_error err = {0};
  pkv_matmul_params p = params(f, PKV_WTYPE_Q4_1, PKV_COMPUTE_I8, 1, 4, 64, f->y);
  f->y[0] = 42.0f;
  p.w.type = (pkv_wtype)10;
  assert_int_equal(pkv_cpu_matmul(f->scalar, &p, &err), PKV_E_UNSUPPORTED);
  assert_non_null(strstr(err.text, "10"));
  p.w.type = PKV_WTYPE_Q4_1;
  p.w.k = 48;
  assert_int_equal(pkv_cpu_matmul(f->scalar, &p, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "48"));
  p.w.k = 64;
  p.w.row_bytes = 39;
  assert_int_equal(pkv_cpu_matmul(f->scalar, &p, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "39"));
  p.w.type = PKV_WTYPE_Q6_K;
  p.w.k = 128;
  assert_int_equal(pkv_cpu_matmul(f->scalar, &p, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "256"));
  p.w.type = PKV_WTYPE_Q4_1;
  p.w.k = 64;
  p.w.row_bytes = 40;
  p.scratch = NULL;
  assert_int_equal(pkv_cpu_matmul(f->scalar, &p, &err), PKV_E_INVALID);
  assert_true(f->y[0] == 42.0f);
  assert_int_equal(pkv_cpu_matmul_many(f->scalar, &p, 9, &err), PKV_E_INVALID);
  p.m = 0;
  assert_int_equal(pkv_cpu_matmul(f->scalar, &p, &err), PKV_OK);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_type_and_shape),
      cmocka_unit_test(test_float_types_take_any_k),
      cmocka_unit_test(test_bits_do_not_depend_on_rows_or_workers),
      cmocka_unit_test(test_scalar_and_vector_agree),
      cmocka_unit_test(test_scalar_and_avx512_agree),
      cmocka_unit_test(test_scalar_and_vnni_without_bf16_agree),
      cmocka_unit_test(test_bf16_rounds_activations),
      cmocka_unit_test(test_extremes),
      cmocka_unit_test(test_bad_numbers_stay_in_their_row),
      cmocka_unit_test(test_tiny_and_huge_activations),
      cmocka_unit_test(test_bias_accumulate_and_strides),
      cmocka_unit_test(test_many_products_equal_single_ones),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
