/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launchers of the model's kernels besides attention's decode: products of few rows, quantised
 * weights, prefill attention, sampling. Each puts its work on a stream and returns what the runtime
 * said. Parameters are device_dense.h's; `takes` says whether a kernel here covers them.
 */
#ifndef PKV_CUDA_DENSE_LAUNCHERS_H
#define PKV_CUDA_DENSE_LAUNCHERS_H

#include <cuda_runtime_api.h>

#include "backend/device_dense.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raises the kernels' limits of shared memory. Once a device, before any launch. */
cudaError_t pkv_dense_kernels_prepare(void);

/* Warpgroup products are sm_90a's alone. Of the current device. */
int pkv_dense_device_has_wgmma(void);

/* Products of packed weights with few rows (dense_few.cuh). 0: take a library. Weights are read
   once for each 16 rows, which is less than to unpack them first up to 64. */
#define PKV_DENSE_GEMV_ROWS 64
int pkv_dense_gemv_takes(const pkv_dense_matmul_params *p);
/* dependent: the kernel may begin before the one ahead of it has ended; it reads weights then, and
   everything else after that end. */
cudaError_t pkv_dense_launch_gemv(const pkv_dense_matmul_params *p, int32_t dependent,
                                  cudaStream_t stream);
/* The same with the number of CTAs that share the elements of a row (1, 2, 4, 8, where their share
   of x fits; 0 = choose). For tests and measurements. */
int pkv_dense_gemv_fits(const pkv_dense_matmul_params *p, int32_t split);
cudaError_t pkv_dense_launch_gemv_as(const pkv_dense_matmul_params *p, int32_t split,
                                     int32_t dependent, cudaStream_t stream);

/* Products of weights in 16 bits with few rows (dense_stream.cu). 0: take a library, which is as
   fast for more rows. scratch: pkv_dense_stream_scratch bytes, zeros before its first use, of one
   stream at a time; encoder: the driver's for tensor maps; sms: of the device. */
#define PKV_DENSE_STREAM_ROWS 16
int pkv_dense_stream_takes(const pkv_dense_matmul_params *p);
size_t pkv_dense_stream_scratch(int32_t sms);
cudaError_t pkv_dense_launch_stream(const pkv_dense_matmul_params *p, const void *encoder,
                                    void *scratch, int32_t sms, int32_t dependent,
                                    cudaStream_t stream);
/* Part of pkv_dense_kernels_prepare. */
cudaError_t pkv_dense_stream_prepare(void);

/* Quantised matrices lie on the device as dense_pack.h says. Bytes of one, 0 = no kernel takes the
   type. */
size_t pkv_dense_quant_bytes(pkv_wtype type, int64_t n, int64_t k);
/* Rows first_row .. of the host's image `to` of a matrix of rows_total rows, from GGUF blocks. */
void pkv_dense_quant_pack(void *to, const pkv_weight *host, int64_t rows_total, int64_t first_row);
/* The same on the device: `from` holds GGUF rows of raw->row_bytes (raw->data), device memory. */
cudaError_t pkv_dense_launch_pack(void *to, const pkv_weight *raw, int64_t rows_total,
                                  int64_t first_row, cudaStream_t stream);
/* out[n, k] of type act (f16, bf16) from a packed matrix. */
cudaError_t pkv_dense_launch_dequant(const pkv_weight *w, pkv_dtype act, void *out,
                                     cudaStream_t stream);

/* Attention of prompts' new tokens (dense_prefill.cuh): sm_90a, head_dim 64 and 128, cache of type
   act, pages of 16 tokens or more in powers of two. Rows of few new tokens leave most of the device
   idle: a CTA takes 128 query rows and all tokens that they see. */
int pkv_dense_prefill_takes(const pkv_dense_prefill_params *p);
cudaError_t pkv_dense_launch_prefill(const pkv_dense_prefill_params *p, cudaStream_t stream);
/* Part of pkv_dense_kernels_prepare. */
cudaError_t pkv_dense_prefill_prepare(void);

/* Sampling (dense_sample.cu): the tokens that pkv_sample chooses. sm_90 and later. */
size_t pkv_dense_sample_bytes(int32_t m, int32_t vocab);
cudaError_t pkv_dense_launch_sample(const pkv_dense_sample_params *p, int32_t dependent,
                                    cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
