/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast the cores multiply and add: what attention inside shared nodes is measured against. As
 * many independent chains of fused products as hide their latency, in registers, nothing else.
 */
#ifndef PKV_CLI_BENCH_FMA_H
#define PKV_CLI_BENCH_FMA_H

#include "base/workers.h"
#include "pkv/pkv.h"

/* All workers together for about two milliseconds a core; *flops: what they did, a product and a
   sum each; 0 for instruction sets without such a loop. Returns a checksum. */
float bench_fma_run(double *flops, pkv_workers *workers, pkv_isa isa);

/* One stretch of `rounds` rounds; its flops a round. For machines that have the instructions. */
float bench_fma_avx2(int64_t rounds);
float bench_fma_avx512(int64_t rounds);
#define BENCH_FMA_AVX2_FLOPS   (12 * 8 * 2)
#define BENCH_FMA_AVX512_FLOPS (12 * 16 * 2)

#endif
