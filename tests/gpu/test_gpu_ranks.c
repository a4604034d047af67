/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Norms of what several devices add up (--ranks N; PKV_CUDA_SUM=nccl: by NCCL): against the same
 * sums on the host, in all ranks the same bits, in graphs too, and again and again in the same two
 * places.
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

#include "attention/executor.h"
#include "base/dtype.h"
#include "base/rng.h"
#include "gpu/gpu_case.h"
#include "model/device_forward_parts.h"

#define ROUNDS 6 /* of two calls */

typedef struct member {
  pkv_executor *executor;
  void *stream, *graph;
  float *x, *bias, *weight, *by, *delta[2];
  void *made[2]; /* what products leave in delta, on the device: copies from a host's memory wait */
  void *y;
} member;

static member members[PKV_MAX_RANKS];
static void *streams[PKV_MAX_RANKS];
static void *group;
static int32_t count;

static void *take(const member *m, const void *from, size_t bytes) {
  void *to = NULL;
  OK(pkv_device_alloc(&to, m->executor, bytes, err));
  if (from) OK(pkv_device_copy(m->executor, to, from, bytes, NULL, err));
  OK(pkv_device_synchronize(m->executor, NULL, err));
  return to;
}

static float *draw(pkv_rng *rng, int64_t n, float scale) {
  float *const to = malloc((size_t)n * sizeof *to);
  for (int64_t i = 0; i < n; i++)
    to[i] = scale * (2.0f * (float)pkv_rng_uniform(rng) - 1.0f);
  return to;
}

static void open_members(int32_t rows) {
  pkv_executor *executors[PKV_MAX_RANKS];
  count = gpu_opt.ranks;
  for (int32_t r = 0; r < count; r++) {
    pkv_executor_options o = PKV_EXECUTOR_OPTIONS_INIT;
    o.device = PKV_DEVICE_CUDA;
    OK(pkv_executor_create_at(&members[r].executor, &o, r, err));
    OK(gpu->dense->stream_create(&members[r].stream, members[r].executor, err));
    streams[r] = members[r].stream;
    executors[r] = members[r].executor;
  }
  OK(gpu->dense->group_create(&group, executors, count, rows, err));
}

static void close_members(void) {
  gpu->dense->group_destroy(group);
  for (int32_t r = 0; r < count; r++) {
    gpu->dense->stream_destroy(members[r].executor, members[r].stream);
    pkv_executor_destroy(members[r].executor);
  }
  OK(gpu->dense->select(gpu, err));
}

/* What lies on the host: x of all ranks is the same, sums are each rank's own. */
typedef struct problem {
  int32_t m, n;
  bool bias, post, weight;
  float *x, *biases, *weights, *by, *delta[2][PKV_MAX_RANKS];
} problem;

static void upload(const problem *p) {
  const size_t all = (size_t)p->m * (size_t)p->n * sizeof(float),
               row = (size_t)p->n * sizeof(float);
  for (int32_t r = 0; r < count; r++) {
    member *const m = &members[r];
    OK(gpu->dense->select(m->executor, err));
    m->x = take(m, p->x, all);
    m->bias = take(m, p->biases, row);
    m->weight = take(m, p->weights, row);
    m->by = take(m, p->by, row);
    m->y = take(m, NULL, all / 2);
    for (int i = 0; i < 2; i++) {
      m->delta[i] = take(m, NULL, all);
      m->made[i] = take(m, p->delta[i][r], all);
    }
  }
}

static void free_device(void) {
  for (int32_t r = 0; r < count; r++) {
    member *const m = &members[r];
    void *const all[] = {m->x,        m->bias,     m->weight,  m->by,     m->y,
                         m->delta[0], m->delta[1], m->made[0], m->made[1]};
    for (size_t i = 0; i < COUNT(all); i++)
      pkv_device_free(m->executor, all[i]);
    if (m->graph) gpu->dense->graph_destroy(m->executor, m->graph);
    m->graph = NULL;
  }
}

/* Both places once: sums anew, as products leave them, then the norm. */
static void put_pair(const problem *p) {
  pkv_dense_norm_params n[PKV_MAX_RANKS];
  for (int i = 0; i < 2; i++) {
    for (int32_t r = 0; r < count; r++) {
      const member *const m = &members[r];
      const size_t bytes = (size_t)p->m * (size_t)p->n * sizeof(float);
      n[r] = (pkv_dense_norm_params){.act = PKV_DTYPE_BF16,
                                     .m = p->m,
                                     .n = p->n,
                                     .eps = 1e-5f,
                                     .x = m->x,
                                     .bias = p->bias ? m->bias : NULL,
                                     .delta = m->delta[i],
                                     .delta_weight = p->post ? m->by : NULL,
                                     .weight = p->weight ? m->weight : NULL,
                                     .y = m->y};
      OK(pkv_device_copy(m->executor, m->delta[i], m->made[i], bytes, m->stream, err));
    }
    OK(gpu->dense->group_norm(group, n, streams, err));
  }
}

/* The host's x after one call, and y where `y` is not NULL. */
static void norm_host(const problem *p, int place, float *x, float *y) {
  for (int64_t row = 0; row < p->m; row++) {
    double squares = 0.0, before = 0.0;
    for (int pass = 0; pass < 2; pass++)
      for (int64_t i = row * p->n; i < (row + 1) * p->n; i++) {
        const int64_t column = i - row * p->n;
        float sum = p->delta[place][0][i];
        for (int32_t r = 1; r < count; r++)
          sum += p->delta[place][r][i];
        if (pass == 0) {
          before += (double)sum * (double)sum;
          continue;
        }
        const double by = p->post ? (double)p->by[column] / sqrt(before / p->n + 1e-5) : 1.0;
        x[i] += (p->bias ? p->biases[column] : 0.0f) + (float)((double)sum * by);
        squares += (double)x[i] * (double)x[i];
      }
    for (int64_t i = row * p->n; y && i < (row + 1) * p->n; i++)
      y[i] = (float)((double)x[i] / sqrt(squares / p->n + 1e-5)) * p->weights[i - row * p->n];
  }
}

static void compare(const problem *p, int pairs, const char *what) {
  const size_t elements = (size_t)p->m * (size_t)p->n;
  float *x = malloc(elements * sizeof *x), *y = malloc(elements * sizeof *y);
  float *got = malloc(elements * sizeof *got), *first = malloc(elements * sizeof *first);
  uint16_t *normed = malloc(elements * sizeof *normed);
  memcpy(x, p->x, elements * sizeof *x);
  for (int i = 0; i < 2 * pairs; i++)
    norm_host(p, i % 2, x, y);
  for (int32_t r = 0; r < count; r++) {
    OK(pkv_device_copy(members[r].executor, got, members[r].x, elements * sizeof *got, NULL, err));
    OK(pkv_device_copy(members[r].executor, normed, members[r].y, elements * 2, NULL, err));
    OK(pkv_device_synchronize(members[r].executor, NULL, err));
    if (r == 0) memcpy(first, got, elements * sizeof *got);
    if (memcmp(first, got, elements * sizeof *got) != 0)
      fail_msg("%s: rank %d has other bits than rank 0", what, (int)r);
    for (size_t i = 0; i < elements; i++) {
      if (fabsf(got[i] - x[i]) > 1e-4f * (1.0f + fabsf(x[i])))
        fail_msg("%s: rank %d, x[%zu] is %g for %g", what, (int)r, i, (double)got[i], (double)x[i]);
      const float is = pkv_load(normed, PKV_DTYPE_BF16, (int64_t)i);
      if (p->weight && fabsf(is - y[i]) > 0.01f * (0.1f + fabsf(y[i])))
        fail_msg("%s: rank %d, y[%zu] is %g for %g", what, (int)r, i, (double)is, (double)y[i]);
    }
  }
  free(x), free(y), free(got), free(first), free(normed);
}

static void capture(const problem *p) {
  for (int32_t r = 0; r < count; r++) {
    OK(gpu->dense->select(members[r].executor, err));
    OK(gpu->dense->graph_begin(members[r].executor, streams[r], err));
  }
  put_pair(p);
  for (int32_t r = 0; r < count; r++) {
    OK(gpu->dense->select(members[r].executor, err));
    OK(gpu->dense->graph_end(&members[r].graph, members[r].executor, streams[r], err));
  }
}

static void run_problem(int32_t m, int32_t n, int variant) {
  char what[96];
  pkv_rng rng;
  problem p = {.m = m, .n = n, .bias = variant % 2, .post = variant / 2, .weight = variant < 3};
  pkv_rng_init(&rng, (uint64_t)(31 * m + n + variant));
  (void)snprintf(what, sizeof what, "%d rows of %d, variant %d", (int)m, (int)n, variant);
  p.x = draw(&rng, (int64_t)m * n, 2.0f);
  p.biases = draw(&rng, n, 1.0f), p.weights = draw(&rng, n, 1.0f), p.by = draw(&rng, n, 1.0f);
  for (int i = 0; i < 2; i++)
    for (int32_t r = 0; r < count; r++)
      p.delta[i][r] = draw(&rng, (int64_t)m * n, 1.0f);
  upload(&p);
  for (int i = 0; i < ROUNDS; i++)
    put_pair(&p);
  OK(gpu->dense->group_wait(group, streams, err));
  compare(&p, ROUNDS, what);
  if (m <= 64) {
    capture(&p);
    for (int i = 0; i < ROUNDS; i++)
      for (int32_t r = 0; r < count; r++) {
        OK(gpu->dense->select(members[r].executor, err));
        OK(gpu->dense->graph_launch(members[r].executor, members[r].graph, streams[r], err));
      }
    OK(gpu->dense->group_wait(group, streams, err));
    compare(&p, 2 * ROUNDS, what);
  }
  free_device();
  free(p.x), free(p.biases), free(p.weights), free(p.by);
  for (int i = 0; i < 2; i++)
    for (int32_t r = 0; r < count; r++)
      free(p.delta[i][r]);
}

static void test_sums(void **state) {
  static const int32_t rows[] = {1, 7, 64, 133, 700}, widths[] = {64, 576, 4096, 16384};
  (void)state;
  NEED_GPU();
  if (gpu_opt.ranks < 2) {
    printf("no --ranks: nothing summed\n");
    return;
  }
  open_members(700);
  for (size_t i = 0; i < COUNT(rows); i++)
    for (size_t k = 0; k < COUNT(widths); k++)
      for (int variant = 0; variant < 4 && rows[i] * widths[k] <= 700 * 4096; variant++)
        run_problem(rows[i], widths[k], variant);
  close_members();
}

int gpu_suite_ranks(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_sums)};
  return cmocka_run_group_tests_name("ranks", tests, gpu_setup, gpu_teardown);
}
