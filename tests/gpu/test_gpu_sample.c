/* SPDX-License-Identifier: Apache-2.0 */
/* Sampling on the device: every token is the one that the engine's sampler chooses for the same
   logits; a logit that is no number ends its own row only. */
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
#include "base/rng.h"
#include "engine/sampling.h"
#include "gpu/gpu_case.h"

enum { MARK = -77 };

typedef enum shape { NORMAL, FLAT, PEAKED, TIES, SAME, STEEP, SHAPES } shape;

static float logit_of(shape kind, int32_t i, pkv_rng *rng) {
  const float x = (float)pkv_rng_normal(rng);
  switch (kind) {
  case NORMAL:
    return 3.0f * x;
  case FLAT:
    return 1e-3f * x;
  case PEAKED:
    return pkv_rng_below(rng, 997) == 0 ? 12.0f + x : x;
  case TIES:
    return rintf(2.0f * x) / 2.0f * (pkv_rng_below(rng, 2) ? 1.0f : -1.0f); /* -0 and 0, too */
  case SAME:
    return -4.0f;
  default:
    return 40.0f * x + (i == 5 ? 3e4f : 0.0f);
  }
}

/* A batch of rows of all shapes under all kinds of settings, here and there. */
static void check_batch(int32_t vocab, int32_t m, uint64_t seed) {
  static const float temperatures[] = {0.0f, 1.0f, 0.7f, 1.9f, 0.05f, 1.0f};
  static const int32_t top_ks[] = {0, 40, 1, 1000, 0, 3000};
  static const float top_ps[] = {0.0f, 0.95f, 1.0f, 0.5f, 0.999f}, min_ps[] = {0.0f, 0.05f, 0.0f};
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  const int64_t stride = vocab + 5;
  float *logits = malloc((size_t)(m * stride) * sizeof *logits);
  pkv_dense_sample_row *rows = calloc((size_t)m, sizeof *rows);
  int32_t *ids = malloc((size_t)(m + 2) * sizeof *ids);
  const pkv_sampling_scratch scratch = {malloc((size_t)vocab * sizeof(pkv_candidate)),
                                        malloc((size_t)vocab * sizeof(double))};
  for (int64_t i = 0; i < m * stride; i++) /* what lies past the vocabulary does not count */
    logits[i] = i % stride < vocab
                    ? logit_of((shape)(i / stride % SHAPES), (int32_t)(i % stride), &rng)
                    : 1e9f;
  for (int32_t i = 0; i < m; i++)
    rows[i] = (pkv_dense_sample_row){.temperature = PICK(&rng, temperatures),
                                     .top_k = PICK(&rng, top_ks),
                                     .top_p = PICK(&rng, top_ps),
                                     .min_p = PICK(&rng, min_ps),
                                     .seed = pkv_rng_next(&rng),
                                     .stream = pkv_rng_below(&rng, 3),
                                     .position = (int64_t)pkv_rng_below(&rng, 100000)};
  for (int32_t i = 0; i < m + 2; i++)
    ids[i] = MARK;
  pkv_dense_sample_params p = {.m = m, .vocab = vocab, .stride = stride};
  const size_t bytes = pkv_dense_sample_bytes(m, vocab);
  p.logits = gpu_up(logits, (size_t)(m * stride) * sizeof *logits);
  void *const d_rows = gpu_up(rows, (size_t)m * sizeof *rows);
  int32_t *const d_ids = gpu_up(ids, (size_t)(m + 2) * sizeof *ids);
  unsigned char *const poison = malloc(bytes);
  memset(poison, 0xff, bytes);
  p.scratch = gpu_up(poison, bytes);
  p.ids = d_ids + 1;
  for (int greedy = 0; greedy < 2; greedy++) {
    p.rows = greedy ? NULL : d_rows;
    assert_int_equal(pkv_dense_launch_sample(&p, greedy, NULL), cudaSuccess);
    gpu_copy(ids, d_ids, (size_t)(m + 2) * sizeof *ids);
    OK(pkv_device_synchronize(gpu, NULL, err));
    assert_int_equal(ids[0], MARK);
    assert_int_equal(ids[m + 1], MARK);
    for (int32_t i = 0; i < m; i++) {
      const pkv_dense_sample_row *r = &rows[i];
      const pkv_sampling s = {.temperature = greedy ? 0.0f : r->temperature,
                              .top_k = r->top_k,
                              .top_p = r->top_p,
                              .seed = r->seed,
                              .stream = r->stream,
                              .min_p = r->min_p};
      const int32_t want = pkv_sample(logits + i * stride, vocab, &s, r->position, &scratch);
      if (ids[i + 1] != want)
        fail_msg("vocab %d row %d (shape %d) temperature %g top_k %d top_p %g min_p %g: token %d, "
                 "wanted %d",
                 vocab, i, i % SHAPES, (double)s.temperature, s.top_k, (double)s.top_p,
                 (double)s.min_p, ids[i + 1], want);
    }
  }
  pkv_device_free(gpu, (void *)(uintptr_t)p.logits);
  pkv_device_free(gpu, d_rows);
  pkv_device_free(gpu, d_ids);
  pkv_device_free(gpu, p.scratch);
  free(poison);
  free(scratch.candidates);
  free(scratch.weights);
  free(logits);
  free(rows);
  free(ids);
}

static bool here(void) {
  int major = 0;
  return gpu != NULL &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
         major >= 9;
}

static void test_tokens(void **state) {
  static const int32_t vocabs[] = {1, 2, 7, 31, 100, 511, 1025, 4097, 32000, 49152, 128256, 262144};
  (void)state;
  if (!here()) skip();
  for (size_t i = 0; i < (gpu_opt.small ? 7 : COUNT(vocabs)); i++)
    for (int round = 0; round < (vocabs[i] < 10000 ? 20 : 2); round++)
      check_batch(vocabs[i], 1 + (int32_t)(i * 7 + (size_t)round * 5) % 40,
                  i * 100 + (uint64_t)round);
}

static void test_not_a_number(void **state) {
  (void)state;
  if (!here()) skip();
  enum { M = 5, VOCAB = 3000 };
  static float logits[M * VOCAB];
  pkv_dense_sample_row rows[M];
  int32_t ids[M];
  pkv_rng rng;
  pkv_rng_init(&rng, 9);
  for (int i = 0; i < M * VOCAB; i++)
    logits[i] = (float)pkv_rng_normal(&rng);
  logits[1 * VOCAB + 17] = NAN;
  logits[3 * VOCAB + VOCAB - 1] = INFINITY;
  logits[4 * VOCAB] = -INFINITY;
  for (int i = 0; i < M; i++)
    rows[i] = (pkv_dense_sample_row){.temperature = i % 2 ? 0.8f : 0.0f, .top_k = 40, .seed = 3};
  rows[1].top_k = 0;
  pkv_dense_sample_params p = {.m = M, .vocab = VOCAB, .stride = VOCAB};
  p.logits = gpu_up(logits, sizeof logits);
  p.rows = gpu_up(rows, sizeof rows);
  p.ids = gpu_up(ids, sizeof ids);
  unsigned char *const room = calloc(1, pkv_dense_sample_bytes(M, VOCAB));
  p.scratch = gpu_up(room, pkv_dense_sample_bytes(M, VOCAB));
  assert_int_equal(pkv_dense_launch_sample(&p, 0, NULL), cudaSuccess);
  gpu_copy(ids, p.ids, sizeof ids);
  OK(pkv_device_synchronize(gpu, NULL, err));
  assert_true(ids[0] >= 0);
  assert_int_equal(ids[1], -1);
  assert_true(ids[2] >= 0);
  assert_int_equal(ids[3], -1);
  assert_int_equal(ids[4], -1);
  free(room);
  pkv_device_free(gpu, (void *)(uintptr_t)p.logits);
  pkv_device_free(gpu, (void *)(uintptr_t)p.rows);
  pkv_device_free(gpu, p.ids);
  pkv_device_free(gpu, p.scratch);
}

int gpu_suite_sample(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_tokens),
      cmocka_unit_test(test_not_a_number),
  };
  return cmocka_run_group_tests_name("sample", tests, gpu_setup, gpu_teardown);
}
