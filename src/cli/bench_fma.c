/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_fma.h"

#define PIECES 16    /* a worker, so that one that starts late holds nobody up */
#define ROUNDS 60000 /* of a piece: an eighth of a millisecond */

typedef struct fma_job {
  pkv_isa isa;
  float sums[64]; /* by worker; more of them share one */
} fma_job;

static void fma_piece(void *ctx, int64_t item, int32_t worker) {
  fma_job *job = ctx;
  float sum = 0.0f;
  (void)item;
#if defined(__x86_64__)
  if (job->isa == PKV_ISA_AVX2) sum = bench_fma_avx2(ROUNDS);
  if (job->isa == PKV_ISA_AVX512) sum = bench_fma_avx512(ROUNDS);
#endif
  if (worker < (int32_t)(sizeof job->sums / sizeof *job->sums)) job->sums[worker] = sum;
}

float bench_fma_run(double *flops, pkv_workers *workers, pkv_isa isa) {
  const int32_t pieces = PIECES * pkv_workers_threads(workers);
  fma_job job = {.isa = isa};
  double round = 0;
#if defined(__x86_64__)
  if (isa == PKV_ISA_AVX2) round = BENCH_FMA_AVX2_FLOPS;
  if (isa == PKV_ISA_AVX512) round = BENCH_FMA_AVX512_FLOPS;
#endif
  *flops = round * ROUNDS * pieces;
  if (round == 0) return 0.0f;
  pkv_workers_run(workers, fma_piece, &job, pieces);
  float sum = 0.0f;
  for (size_t i = 0; i < sizeof job.sums / sizeof *job.sums; i++)
    sum += job.sums[i];
  return sum;
}
