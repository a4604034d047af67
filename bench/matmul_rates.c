/* SPDX-License-Identifier: Apache-2.0 */
/*
 * matmul_rates: products of one weight type on AVX2 and on AVX-512, in turns on the same memory;
 * one thread, its processor time, the best of the rounds. `float` is the exact mode, `fast` the
 * 8-bit one. Weights lie on huge pages and are larger than the second-level cache.
 *
 *   matmul_rates ROUNDS > FILE.csv
 *
 * Built by hand against the static libraries and libtest_support.a.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "backend/cpu/cpu_dense.h"
#include "support/weight_blocks.h"

#define WIDTH    2048 /* n and k */
#define BYTES    ((size_t)64 << 20)
#define MAX_ROWS 128

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct bench {
  pkv_executor *executors[2]; /* AVX2, AVX-512 */
  unsigned char *weights;
  float *x, *y;
  void *scratch;
} bench;

/* Seconds of one product; every call has the next copy of the matrix. */
static double timed(const bench *b, int which, pkv_wtype type, pkv_compute compute, int64_t rows) {
  const int64_t row_bytes = test_wtype_row_bytes(type, WIDTH), bytes = row_bytes * WIDTH;
  const int64_t copies = (int64_t)BYTES / bytes, calls = rows > 16 ? 6 : 2 * copies;
  const double start = seconds();
  for (int64_t i = 0; i < calls; i++) {
    const pkv_matmul_params p = {.w = {.type = type,
                                       .n = WIDTH,
                                       .k = WIDTH,
                                       .data = b->weights + i % copies * bytes,
                                       .row_bytes = row_bytes},
                                 .compute = compute,
                                 .m = rows,
                                 .x = b->x,
                                 .x_stride = WIDTH,
                                 .y = b->y,
                                 .y_stride = WIDTH,
                                 .scratch = b->scratch};
    pkv_error err = {0};
    if (pkv_cpu_matmul(b->executors[which], &p, &err) != PKV_OK) {
      fprintf(stderr, "%s\n", err.text);
      exit(1);
    }
  }
  return (seconds() - start) / (double)calls;
}

static void measure(const bench *b, pkv_wtype type, pkv_compute compute, int64_t rows, int rounds) {
  double best[2] = {1e9, 1e9};
  for (int r = 0; r < rounds; r++) {
    for (int which = 0; which < 2; which++) {
      const double s = timed(b, which, type, compute, rows);
      if (s < best[which]) best[which] = s;
    }
  }
  const double bytes = (double)(test_wtype_row_bytes(type, WIDTH) * WIDTH);
  const double products = (double)rows * WIDTH * WIDTH;
  printf("%s,%s,%d,%.1f,%.1f,%.2f,%.2f,%.1f,%.1f,%.2f\n", test_wtype_name(type),
         compute == PKV_COMPUTE_I8 ? "fast" : "float", (int)rows, best[0] * 1e6, best[1] * 1e6,
         bytes / best[0] * 1e-9, bytes / best[1] * 1e-9, products / best[0] * 1e-9,
         products / best[1] * 1e-9, best[0] / best[1]);
  fflush(stdout);
}

int main(int argc, char **argv) {
  static const int64_t rows[] = {1, 2, 4, 8, 16, MAX_ROWS};
  bench b;
  const int rounds = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 3;
  for (int i = 0; i < 2; i++) {
    pkv_executor_options o = PKV_EXECUTOR_OPTIONS_INIT;
    pkv_error err = {0};
    o.isa = i == 0 ? PKV_ISA_AVX2 : PKV_ISA_AVX512;
    o.threads = 1;
    if (pkv_executor_create(&b.executors[i], &o, &err) != PKV_OK) {
      fprintf(stderr, "%s\n", err.text);
      return 1;
    }
  }
  b.weights = aligned_alloc((size_t)2 << 20, BYTES + ((size_t)2 << 20));
  (void)madvise(b.weights, BYTES, MADV_HUGEPAGE);
  b.x = malloc(sizeof(float) * MAX_ROWS * WIDTH);
  b.y = malloc(sizeof(float) * MAX_ROWS * WIDTH);
  b.scratch = aligned_alloc(64, (pkv_cpu_matmul_scratch_bytes(MAX_ROWS, WIDTH) + 63) / 64 * 64);
  pkv_rng rng;
  pkv_rng_init(&rng, 1);
  for (int64_t i = 0; i < MAX_ROWS * WIDTH; i++)
    b.x[i] = (float)pkv_rng_normal(&rng);
  printf("type,mode,rows,avx2_us,avx512_us,avx2_gb_s,avx512_gb_s,avx2_gmac_s,avx512_gmac_s,"
         "avx2_over_avx512\n");
  for (int t = 0; t < TEST_WTYPES; t++) {
    const int64_t bytes = test_wtype_row_bytes(test_wtypes[t], WIDTH) * WIDTH;
    test_weights_random(b.weights, test_wtypes[t], WIDTH, WIDTH, &rng);
    for (int64_t i = 1; i < (int64_t)BYTES / bytes; i++)
      memcpy(b.weights + i * bytes, b.weights, (size_t)bytes);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
      if (test_wtypes[t] == PKV_WTYPE_BF16)
        measure(&b, PKV_WTYPE_BF16, PKV_COMPUTE_F32, rows[i], rounds);
      measure(&b, test_wtypes[t], PKV_COMPUTE_I8, rows[i], rounds);
    }
  }
  return 0;
}
