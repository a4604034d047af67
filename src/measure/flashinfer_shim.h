/* SPDX-License-Identifier: Apache-2.0 */
/*
 * FlashInfer's decode attention behind plain C calls. flashinfer_shim.cu implements them over
 * FlashInfer's header-only templates and becomes a shared object of its own, pkv_flashinfer.so,
 * built only where those headers are found; flashinfer_load.c opens it at run time. Nothing else
 * knows FlashInfer, and nothing else grows by it.
 *
 * f16, head_dim 128; CUDA cores: 1, 4 or 8 query heads a KV head; tensor cores: up to 16.
 */
#ifndef PKV_MEASURE_FLASHINFER_SHIM_H
#define PKV_MEASURE_FLASHINFER_SHIM_H

#include <stdint.h>

#define PKV_FLASHINFER_ABI  1
#define PKV_FLASHINFER_OPEN "pkv_flashinfer_open"

#ifdef __cplusplus
extern "C" {
#endif

/* One batch size's buffers and plan. Single-owner. */
typedef struct pkv_flashinfer pkv_flashinfer;

typedef struct pkv_flashinfer_shape {
  int32_t tensor_cores;
  int32_t query_heads, kv_heads, head_dim, page_tokens, rows;
} pkv_flashinfer_shape;

typedef struct pkv_flashinfer_call {
  const void *q; /* [rows, query_heads, head_dim], f16, device */
  void *out;
  void *k, *v;
  int64_t page_stride, token_stride, head_stride; /* elements, of both */
  float scale;
} pkv_flashinfer_call;

/* All return NULL, or a static text that says what is wrong. */
typedef struct pkv_flashinfer_api {
  int32_t abi;
  const char *(*create)(pkv_flashinfer **out, const pkv_flashinfer_shape *shape);
  void (*destroy)(pkv_flashinfer *handle);
  /* The pages of all rows one after another, host [count]; waits. */
  const char *(*pages)(pkv_flashinfer *handle, const int32_t *ids, int64_t count);
  /* FlashInfer's host planner over these lengths, host [rows], and its upload. */
  const char *(*plan)(pkv_flashinfer *handle, const int32_t *seq_len, void *stream);
  const char *(*run)(pkv_flashinfer *handle, const pkv_flashinfer_call *call, void *stream);
} pkv_flashinfer_api;

typedef const pkv_flashinfer_api *(*pkv_flashinfer_open_fn)(void);

#ifdef __cplusplus
}
#endif
#endif
