/* SPDX-License-Identifier: Apache-2.0 */
/* Between the launcher of prefill attention (dense_prefill.c) and its kernels (dense_prefill.cuh).
 */
#ifndef PKV_CUDA_DENSE_PREFILL_H
#define PKV_CUDA_DENSE_PREFILL_H

#include "backend/device_dense.h"

/* Passed by value, beside the cache's tensor maps. */
typedef struct pkv_prefill_args {
  pkv_dense_prefill_params p;
  int32_t group;      /* query heads of a KV head */
  int32_t page_shift; /* log2(page_tokens) */
} pkv_prefill_args;

typedef struct pkv_prefill_set {
  const void *kernel;
  int32_t threads, shared_bytes;
} pkv_prefill_set;

#ifdef __cplusplus
extern "C" {
#endif
/* By head dimension: 64, 128. */
extern const pkv_prefill_set pkv_prefill_f16[2], pkv_prefill_bf16[2];
#ifdef __cplusplus
}
#endif
#endif
