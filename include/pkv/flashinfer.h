/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flashinfer.h - FlashInfer's decode attention behind plain C calls. src/measure/flashinfer_shim.cu
 * implements them over FlashInfer's header-only templates and becomes a shared object of its own,
 * pkv_flashinfer.so, built only where those headers are found; pkv_flashinfer_open loads it at run
 * time. Nothing else knows FlashInfer, and nothing else grows by it. router.h runs it as a route.
 *
 * f16, head_dim 128; CUDA cores: 1, 4 or 8 query heads a KV head; tensor cores: up to 16.
 */
#ifndef PKV_FLASHINFER_H
#define PKV_FLASHINFER_H

#include "pkv/pkv.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PKV_FLASHINFER_ABI  2
#define PKV_FLASHINFER_OPEN "pkv_flashinfer_module" /* the symbol, a pkv_flashinfer_open_fn */

/* Buffers and a plan for up to so many rows and pages. Single-owner. */
typedef struct pkv_flashinfer pkv_flashinfer;

typedef struct pkv_flashinfer_shape {
  int32_t tensor_cores;
  int32_t query_heads, kv_heads, head_dim, page_tokens;
  int32_t most_rows;
  int64_t most_pages; /* of all rows of a batch together */
} pkv_flashinfer_shape;

typedef struct pkv_flashinfer_call {
  const void *q; /* [rows, query_heads, head_dim], f16, device */
  void *out;
  void *k, *v;
  int64_t page_stride, token_stride, head_stride; /* elements, of both */
  float scale;
} pkv_flashinfer_call;

/* All return NULL, or a static text that says what is wrong. Streams as in device.h. */
typedef struct pkv_flashinfer_api {
  int32_t abi;
  const char *version; /* of FlashInfer: "0.7.4" */
  const char *(*create)(pkv_flashinfer **out, const pkv_flashinfer_shape *shape);
  void (*destroy)(pkv_flashinfer *handle);
  /* FlashInfer's host planner over these lengths, host [rows], each at least 1, and its upload. It
     waits for the upload of the plan before; refused while the stream is being captured. */
  const char *(*plan)(pkv_flashinfer *handle, int32_t rows, const int32_t *seq_len, void *stream);
  /* After plan: the list of pages that it reads, from a block table [rows, stride] on the device;
     one launch. Ids outside 0 .. pages - 1 become 0. */
  const char *(*list)(pkv_flashinfer *handle, const int32_t *table, int64_t stride, int64_t pages,
                      void *stream);
  const char *(*run)(pkv_flashinfer *handle, const pkv_flashinfer_call *call, void *stream);
} pkv_flashinfer_api;

typedef const pkv_flashinfer_api *(*pkv_flashinfer_open_fn)(void);

/*
 * Loads `path`, or where it is NULL the pkv_flashinfer.so beside the program or where the system's
 * loader looks. Once loaded it stays: kernels of it may be in graphs. E_UNSUPPORTED: not there, or
 * not for this version; the text says which.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_flashinfer_open(const pkv_flashinfer_api **out,
                                                      const char *path, pkv_error *err);

#ifdef __cplusplus
}
#endif
#endif
