/* SPDX-License-Identifier: Apache-2.0 */
/* Tensor maps (sm_90): what the copy engine has to know of a paged cache. Host code. */
#ifndef PKV_CUDA_TENSOR_MAP_H
#define PKV_CUDA_TENSOR_MAP_H

#include <cuda.h>

#include "pkv/pkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Coordinates of K and of V: dimension of the head, token of a page, KV head, page. Pages from
   cache.pages on read as zeros. */
typedef struct pkv_cuda_tensor_maps {
  CUtensorMap k, v;
} pkv_cuda_tensor_maps;

/* The most tokens of a box; smaller pages are a box each. */
#define PKV_CUDA_BOX_TOKENS 64

/* The driver's function that encodes maps, NULL where it has none. */
void *pkv_cuda_tensor_encoder(void);
/* cache: f16 or bf16, head_dim a multiple of 64, addresses and strides multiples of 16 bytes.
   Boxes of 64 dimensions (128 bytes, so swizzled) and a page's tokens. 0, or the driver's error. */
int pkv_cuda_encode_tensors(pkv_cuda_tensor_maps *maps, const void *encoder,
                            const pkv_cache *cache);

#ifdef __cplusplus
}
#endif
#endif
