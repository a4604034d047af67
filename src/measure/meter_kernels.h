/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers of meter_kernels.cu. Device pointers; each returns what the runtime said. */
#ifndef PKV_MEASURE_METER_KERNELS_H
#define PKV_MEASURE_METER_KERNELS_H

#include <cuda_runtime_api.h>

#include "measure/meter.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Tokens whose products one thread adds up; partial results a (query, chunk). */
#define PKV_METER_CHUNK 512

cudaError_t pkv_meter_launch_fill(const pkv_cache *cache, const int32_t *owned, uint64_t seed,
                                  cudaStream_t stream);
cudaError_t pkv_meter_launch_needle(const pkv_cache *cache, const pkv_meter_batch *batch,
                                    const int32_t *position, float value, uint64_t seed,
                                    cudaStream_t stream);
/* error [rows * q_len * query_heads] */
cudaError_t pkv_meter_launch_needle_error(float *error, const pkv_cache *cache,
                                          const pkv_meter_batch *batch, const int32_t *position,
                                          const void *out, pkv_dtype out_dtype,
                                          cudaStream_t stream);
/*
 * Row `row` of length `length` in double, into answer [rows * q_len, query_heads, head_dim].
 * scratch: (length + chunks * (head_dim + 2)) * q_len * query_heads doubles, chunks =
 * ceil(length / PKV_METER_CHUNK).
 */
cudaError_t pkv_meter_launch_answer(double *answer, double *scratch, const pkv_cache *cache,
                                    const pkv_meter_batch *batch, int32_t row, int32_t length,
                                    const void *q, pkv_dtype q_dtype, cudaStream_t stream);
cudaError_t pkv_meter_launch_null_read(uint32_t *sink, const pkv_cache *cache,
                                       const pkv_meter_batch *batch, int32_t blocks,
                                       cudaStream_t stream);

/*
 * The same for other programs, which find it in libpkv_null_read.so: pages without gaps, layout 0
 * HND, 1 NHD, 2 NHD with K and V in one page; dtype as pkv_dtype. Device pointers: first_page [rows
 * + 1] are prefix sums of the rows' pages, pages their sum; seq_len in tokens; sink one uint32.
 * waves: blocks a multiprocessor; 4 and 16 are what `pkv bench` takes the faster of. Returns a
 * cudaError_t.
 */
PKV_API int pkv_meter_null_read(const void *k, const void *v, const int32_t *table, int64_t stride,
                                const int32_t *seq_len, const int32_t *first_page, int32_t rows,
                                int64_t pages, int32_t kv_heads, int32_t head_dim,
                                int32_t page_tokens, int32_t layout, int32_t dtype, void *sink,
                                int32_t waves, void *stream);

#ifdef __cplusplus
}
#endif
#endif
