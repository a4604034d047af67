/* SPDX-License-Identifier: Apache-2.0 */
/* Norms, rope, the gated activation, addition and embeddings against double; scalar and AVX2 bit
   for bit; any number of rows and workers. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/cpu_dense.h"
#include "support/weight_blocks.h"

#define ROWS  48
#define WIDTH 1100 /* ROWS * WIDTH is past the size at which workers help */
#define EPS   0x1p-24

typedef struct fixture {
  pkv_executor *executors[3]; /* scalar; AVX2 or NULL; the best with three workers */
  float *x, *a, *b;           /* [ROWS * WIDTH] */
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

static int setup(void **state) {
  fixture *f = calloc(1, sizeof *f);
  f->executors[0] = executor_of(PKV_ISA_SCALAR, 1);
  f->executors[1] = executor_of(PKV_ISA_AVX2, 1);
  if (f->executors[1] == NULL) f->executors[1] = executor_of(PKV_ISA_NEON, 1);
  f->executors[2] = executor_of(PKV_ISA_AUTO, 3);
  f->x = calloc(ROWS * WIDTH, sizeof(float));
  f->a = calloc(ROWS * WIDTH, sizeof(float));
  f->b = calloc(ROWS * WIDTH, sizeof(float));
  *state = f;
  return f->executors[0] && f->executors[2] ? 0 : -1;
}

static int teardown(void **state) {
  fixture *f = *state;
  for (int i = 0; i < 3; i++)
    pkv_executor_destroy(f->executors[i]);
  free(f->x);
  free(f->a);
  free(f->b);
  free(f);
  return 0;
}

static void fill(float *to, int64_t count, uint64_t seed) {
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  for (int64_t i = 0; i < count; i++)
    to[i] = (float)pkv_rng_normal(&rng);
}

static void expect_near(float got, double want, double bound, const char *what, int64_t i) {
  if (!(fabs((double)got - want) <= bound))
    fail_msg("%s %d: %.9g, expected %.9g, bound %.3g", what, (int)i, (double)got, want, bound);
}

static void expect_same(const float *a, const float *b, int64_t count, const char *what) {
  for (int64_t i = 0; i < count; i++) {
    if (memcmp(&a[i], &b[i], sizeof(float)) != 0)
      fail_msg("%s %d: %.9g and %.9g", what, (int)i, (double)a[i], (double)b[i]);
  }
}

static void test_rms_norm(void **state) {
  fixture *f = *state;
  static const int64_t widths[] = {1, 3, 7, 8, 9, 15, 64, 576, 577, WIDTH};
  float weight[WIDTH];
  fill(f->x, ROWS * WIDTH, 1);
  fill(weight, WIDTH, 2);
  for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++) {
    const int64_t n = widths[w];
    for (int e = 0; e < 3; e++) {
      float *y = e == 0 ? f->a : f->b;
      if (!f->executors[e]) continue;
      assert_int_equal(
          pkv_cpu_rms_norm(f->executors[e], y, n, f->x, n, weight, ROWS, n, 1e-5f, NULL), PKV_OK);
      if (e > 0) expect_same(f->a, f->b, ROWS * n, "norm");
    }
    for (int64_t i = 0; i < ROWS * n; i++) {
      double sum = 0.0;
      for (int64_t j = 0; j < n; j++)
        sum += (double)f->x[i / n * n + j] * (double)f->x[i / n * n + j];
      const double want =
          (double)f->x[i] / sqrt(sum / (double)n + (double)1e-5f) * (double)weight[i % n];
      expect_near(f->a[i], want, 4.0 * EPS * fabs(want), "norm", i);
    }
  }
  /* In place, and with rows further apart. */
  memcpy(f->b, f->x, ROWS * WIDTH * sizeof(float));
  assert_int_equal(
      pkv_cpu_rms_norm(f->executors[2], f->b, WIDTH, f->b, WIDTH, weight, ROWS, 64, 1e-5f, NULL),
      PKV_OK);
  for (int64_t r = 0; r < ROWS; r++) {
    (void)pkv_cpu_rms_norm(f->executors[0], f->a, 64, f->x + r * WIDTH, 64, weight, 1, 64, 1e-5f,
                           NULL);
    expect_same(f->a, f->b + r * WIDTH, 64, "norm in place");
    expect_same(f->x + r * WIDTH + 64, f->b + r * WIDTH + 64, WIDTH - 64, "beyond the norm");
  }
}

static void test_rope(void **state) {
  fixture *f = *state;
  const int32_t heads = 5, head_dim = 40, positions = 50;
  const int64_t stride = heads * head_dim + 3;
  int32_t position[ROWS];
  float *table = calloc((size_t)(positions * head_dim), sizeof *table);
  for (int32_t i = 0; i < ROWS; i++)
    position[i] = (i * 13) % positions;
  for (int32_t rope_dim = 0; rope_dim <= head_dim; rope_dim += 2) {
    for (int32_t p = 0; p < positions; p++) {
      for (int32_t j = 0; j < rope_dim / 2; j++) {
        const double angle = p * pow(10000.0, -2.0 * j / rope_dim);
        table[p * rope_dim + 2 * j] = (float)cos(angle);
        table[p * rope_dim + 2 * j + 1] = (float)sin(angle);
      }
    }
    for (int32_t adjacent = 0; adjacent < 2; adjacent++) {
      fill(f->x, ROWS * stride, 3);
      for (int e = 0; e < 3; e++) {
        float *y = e == 0 ? f->a : f->b;
        if (!f->executors[e]) continue;
        memcpy(y, f->x, (size_t)(ROWS * stride) * sizeof(float));
        assert_int_equal(pkv_cpu_rope(f->executors[e], y, stride, ROWS, heads, head_dim, rope_dim,
                                      adjacent, table, position, NULL),
                         PKV_OK);
        if (e > 0) expect_same(f->a, f->b, ROWS * stride, "rope");
      }
      for (int64_t i = 0; i < ROWS * stride; i++) {
        const int64_t row = i / stride, in_row = i % stride, d = in_row % head_dim;
        double want = (double)f->x[i], size = fabs(want);
        if (in_row < heads * head_dim && d < rope_dim) {
          const int64_t half = rope_dim / 2, j = adjacent ? d / 2 : d % half;
          const bool second = adjacent ? d % 2 == 1 : d >= half;
          const int64_t step = adjacent ? 1 : half;
          const double angle = position[row] * pow(10000.0, -2.0 * (double)j / rope_dim);
          const double other = (double)f->x[second ? i - step : i + step];
          want = (double)f->x[i] * cos(angle) + (second ? 1.0 : -1.0) * other * sin(angle);
          size += fabs(other);
        }
        expect_near(f->a[i], want, 3.0 * EPS * size, "rope", i);
      }
    }
  }
  assert_int_equal(
      pkv_cpu_rope(f->executors[0], f->a, stride, 1, heads, head_dim, 41, 1, table, position, NULL),
      PKV_E_INVALID);
  free(table);
}

static double silu(double g) {
  return g / (1.0 + exp(-g));
}

static void test_swiglu(void **state) {
  fixture *f = *state;
  const int64_t count = ROWS * WIDTH - 3;
  fill(f->b, count, 5);
  for (int64_t i = 0; i < count; i++)
    f->x[i] = (float)((double)(i - count / 2) / (double)count * 220.0); /* -110 .. 110 */
  float *first = calloc((size_t)count, sizeof *first);
  for (int e = 0; e < 3; e++) {
    float *y = e == 0 ? first : f->a;
    if (!f->executors[e]) continue;
    memcpy(y, f->x, (size_t)count * sizeof(float)); /* y may be gate */
    assert_int_equal(pkv_cpu_swiglu(f->executors[e], y, y, f->b, count, NULL), PKV_OK);
    if (e > 0) expect_same(first, f->a, count, "swiglu");
  }
  for (int64_t i = 0; i < count; i++) {
    const double want = silu((double)f->x[i]) * (double)f->b[i];
    /* Below -87 the true value is under 1e-36; what is asked there is to be as small. */
    expect_near(first[i], want, 8.0 * EPS * fabs(want) + 1e-34, "swiglu", i);
  }
  free(first);
}

/* gelu in its tanh form; where 1 + tanh would cancel, by the same number as a quotient. */
static double gelu(double g, double *t) {
  *t = 2.0 * sqrt(2.0 / 3.14159265358979323846) * (g + 0.044715 * g * g * g);
  return g > -1.0 ? 0.5 * g * (1.0 + tanh(*t / 2.0)) : g / (1.0 + exp(-*t));
}

static void test_geglu(void **state) {
  fixture *f = *state;
  const int64_t count = ROWS * WIDTH - 3;
  fill(f->b, count, 5);
  for (int64_t i = 0; i < count; i++)
    f->x[i] = (float)((double)(i - count / 2) / (double)count * 24.0); /* -12 .. 12 */
  float *first = calloc((size_t)count, sizeof *first);
  for (int e = 0; e < 3; e++) {
    float *y = e == 0 ? first : f->a;
    if (!f->executors[e]) continue;
    memcpy(y, f->x, (size_t)count * sizeof(float)); /* y may be gate */
    assert_int_equal(pkv_cpu_geglu(f->executors[e], y, y, f->b, count, NULL), PKV_OK);
    if (e > 0) expect_same(first, f->a, count, "geglu");
  }
  for (int64_t i = 0; i < count; i++) {
    double t;
    const double want = gelu((double)f->x[i], &t) * (double)f->b[i];
    /* exp(-t) is off by |t| times what t is off; below -87 only smallness is asked. */
    expect_near(first[i], want, (8.0 + 4.0 * fmin(fabs(t), 90.0)) * EPS * fabs(want) + 1e-34,
                "geglu", i);
  }
  const float gates[4] = {NAN, 0.0f, 1e30f, -1e30f}, up[4] = {1, 1, 1, 1};
  for (int e = 0; e < 3; e++) {
    float y[4];
    if (!f->executors[e]) continue;
    assert_int_equal(pkv_cpu_geglu(f->executors[e], y, gates, up, 4, NULL), PKV_OK);
    assert_true(isnan(y[0]) != 0 && y[1] == 0.0f && y[2] == 1e30f && fabsf(y[3]) < 1e-7f);
  }
  free(first);
}

static void test_swiglu_special_values(void **state) {
  fixture *f = *state;
  static const float gates[8] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e30f, -1e30f, 1e-40f};
  const float up[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  for (int e = 0; e < 2; e++) {
    float y[9];
    if (!f->executors[e]) continue;
    assert_int_equal(pkv_cpu_swiglu(f->executors[e], y, gates, up, 8, NULL), PKV_OK);
    assert_int_equal(isnan(y[0]) ? 1 : 0, 1);
    assert_int_equal(isinf(y[1]) ? 1 : 0, 1);
    assert_true(y[3] == 0.0f && y[4] == 0.0f);
    assert_true(y[5] == 1e30f);
    assert_true(fabsf(y[6]) < 1e-7f);
    assert_true(fabsf(y[7]) <= 1e-40f);
  }
}

static void test_add(void **state) {
  fixture *f = *state;
  for (int64_t count = 0; count < 40; count++) {
    fill(f->x, 40, 7);
    for (int e = 0; e < 3; e++) {
      if (!f->executors[e]) continue;
      fill(f->a, 40, 8);
      fill(f->b, 40, 8);
      assert_int_equal(pkv_cpu_add(f->executors[e], f->a, f->x, count, NULL), PKV_OK);
      for (int64_t i = 0; i < 40; i++)
        assert_true(f->a[i] == (i < count ? f->b[i] + f->x[i] : f->b[i]));
    }
  }
  fill(f->a, ROWS * WIDTH, 8);
  fill(f->b, ROWS * WIDTH, 8);
  fill(f->x, ROWS * WIDTH, 7);
  assert_int_equal(pkv_cpu_add(f->executors[2], f->a, f->x, ROWS * WIDTH, NULL), PKV_OK);
  for (int64_t i = 0; i < ROWS * WIDTH; i++)
    assert_true(f->a[i] == f->b[i] + f->x[i]);
}

static void test_embed(void **state) {
  fixture *f = *state;
  const int64_t n = 23, widest = 352;
  unsigned char *weights = malloc((size_t)(n * widest) * 4);
  int32_t ids[ROWS];
  for (int32_t i = 0; i < ROWS; i++)
    ids[i] = i * 7 % (int32_t)n;
  for (int t = 0; t < TEST_WTYPES; t++) {
    const int64_t block = test_wtype_block(test_wtypes[t]), k = widest / block * block;
    const pkv_weight w = {.type = test_wtypes[t],
                          .n = n,
                          .k = k,
                          .data = weights,
                          .row_bytes = test_wtype_row_bytes(test_wtypes[t], k)};
    pkv_rng rng;
    pkv_rng_init(&rng, (uint64_t)t);
    test_weights_random(weights, w.type, n, k, &rng);
    for (int e = 0; e < 3; e++) {
      float *y = e == 0 ? f->a : f->b;
      if (!f->executors[e]) continue;
      assert_int_equal(pkv_cpu_embed(f->executors[e], y, k, &w, ids, ROWS, 1.5f, NULL), PKV_OK);
      if (e > 0) expect_same(f->a, f->b, ROWS * k, "embed");
    }
    for (int64_t i = 0; i < ROWS * k; i++) {
      const unsigned char *row = weights + ids[i / k] * w.row_bytes;
      const double size = 1.5 * test_weight_size(row, w.type, i % k);
      expect_near(f->a[i], 1.5 * test_weight_value(row, w.type, i % k), 3.0 * EPS * size,
                  test_wtype_name(w.type), i);
    }
  }
  const int64_t k = widest;
  const pkv_weight w = {.type = PKV_WTYPE_F32, .n = n, .k = k, .data = weights, .row_bytes = 4 * k};
  static const int32_t bad[2] = {-1, 23};
  for (int i = 0; i < 2; i++) {
    pkv_error err = {0};
    f->a[0] = 42.0f;
    const int32_t both[2] = {0, bad[i]};
    assert_int_equal(pkv_cpu_embed(f->executors[0], f->a, k, &w, both, 2, 1.0f, &err), PKV_E_RANGE);
    assert_non_null(strstr(err.text, "ids[1]"));
    assert_true(f->a[0] == 42.0f);
  }
  free(weights);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_rms_norm), cmocka_unit_test(test_rope),
      cmocka_unit_test(test_swiglu),   cmocka_unit_test(test_swiglu_special_values),
      cmocka_unit_test(test_geglu),    cmocka_unit_test(test_add),
      cmocka_unit_test(test_embed),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
