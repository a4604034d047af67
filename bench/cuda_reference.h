/* SPDX-License-Identifier: Apache-2.0 */
/* See cuda_reference.cu. Device pointers. */
#ifndef PKV_BENCH_CUDA_REFERENCE_H
#define PKV_BENCH_CUDA_REFERENCE_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bench_case {
  const int32_t *table, *first_page, *seq_len;
  int64_t stride;
  int32_t rows, heads, group, head_dim;
  uint32_t *sink;
} bench_case;

cudaError_t bench_fill(void *x, int64_t count, uint64_t seed); /* f16 */
cudaError_t bench_null_read(const bench_case *c, const void *k, const void *v, int sms,
                            cudaStream_t stream);
cudaError_t bench_answer(const bench_case *c, double *out, const void *q, const void *k,
                         const void *v);

#ifdef __cplusplus
}
#endif
#endif
