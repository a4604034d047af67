/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/tensor_map.h"

#include <cuda_runtime_api.h>
#include <string.h>

typedef CUresult (*pkv_encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                     const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                     const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

void *pkv_cuda_tensor_encoder(void) {
  void *function = NULL;
  enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                         cudaEnableDefault, &found);
  if (e != cudaSuccess) (void)cudaGetLastError();
  return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : NULL;
}

/* Elements between neighbours, in bytes. Of one only, any stride will do. */
static cuuint64_t stride_of(int64_t count, int64_t elements, int64_t bytes) {
  return count > 1 ? (cuuint64_t)(elements * bytes) : 16;
}

static CUresult encode(CUtensorMap *map, const void *encoder, const pkv_cache *c, const void *base,
                       const int64_t strides[3]) {
  const int64_t bytes = (int64_t)pkv_dtype_bytes(c->dtype);
  const int64_t counts[4] = {c->head_dim, c->page_tokens, c->kv_heads, c->pages};
  /* e4m3: rows as they are, all dimensions in one box, not swizzled; node_widen.cuh does that. */
  const int wide = bytes == 1;
  const cuuint32_t box[4] = {
      wide ? (cuuint32_t)c->head_dim : 64,
      (cuuint32_t)(c->page_tokens < PKV_CUDA_BOX_TOKENS ? c->page_tokens : PKV_CUDA_BOX_TOKENS), 1,
      1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  cuuint64_t sizes[4], apart[3];
  for (int i = 0; i < 4; i++)
    sizes[i] = (cuuint64_t)counts[i];
  for (int i = 0; i < 3; i++)
    apart[i] = stride_of(counts[i + 1], strides[i], bytes);
  pkv_encode_tiled function;
  void *address;
  memcpy(&function, &encoder, sizeof function);
  memcpy(&address, &base, sizeof address);
  return function(map,
                  wide                         ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                  : c->dtype == PKV_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                  4, address, sizes, apart, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  wide ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

int pkv_cuda_encode_tensors(pkv_cuda_tensor_maps *maps, const void *encoder,
                            const pkv_cache *cache) {
  const int64_t k[3] = {cache->k_token_stride, cache->k_head_stride, cache->k_page_stride};
  const int64_t v[3] = {cache->v_token_stride, cache->v_head_stride, cache->v_page_stride};
  const CUresult e = encode(&maps->k, encoder, cache, cache->k, k);
  return (int)(e == CUDA_SUCCESS ? encode(&maps->v, encoder, cache, cache->v, v) : e);
}
