/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill attention: what its kernels cover, and their launch. */
#include "backend/cuda/dense_prefill.h"

#include "backend/cuda/dense_launchers.h"
#include "backend/cuda/tensor_map.h"

static const pkv_prefill_set *set_of(pkv_dtype act, int32_t head_dim) {
  if (head_dim != 64 && head_dim != 128) return NULL;
  const int32_t i = head_dim == 128;
  if (act == PKV_DTYPE_BF16) return &pkv_prefill_bf16[i];
  return act == PKV_DTYPE_F16 ? &pkv_prefill_f16[i] : NULL;
}

/* Tensor copies want addresses and strides in multiples of 16 bytes. */
static int aligned(const pkv_cache *c) {
  const int64_t strides = c->k_token_stride | c->k_head_stride | c->k_page_stride |
                          c->v_token_stride | c->v_head_stride | c->v_page_stride;
  return strides % 8 == 0 && (uintptr_t)c->k % 16 == 0 && (uintptr_t)c->v % 16 == 0;
}

int pkv_dense_device_has_wgmma(void) {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
    (void)cudaGetLastError();
  return major == 9 && minor == 0;
}

int pkv_dense_prefill_takes(const pkv_dense_prefill_params *p) {
  const pkv_cache *c = &p->cache;
  const int32_t page = c->page_tokens;
  if (set_of(p->act, c->head_dim) == NULL || c->dtype != p->act || !aligned(c)) return 0;
  if (page < 16 || (page & (page - 1)) != 0 || c->kv_heads < 1) return 0;
  if (p->query_heads % c->kv_heads != 0 || c->pages > INT32_MAX - 1) return 0;
  if ((uintptr_t)p->q % 16 != 0 || p->q_stride % 8 != 0) return 0;
  if ((uintptr_t)p->out % 4 != 0 || p->out_stride % 2 != 0) return 0;
  return pkv_dense_device_has_wgmma();
}

cudaError_t pkv_dense_prefill_prepare(void) {
  cudaError_t e = cudaSuccess;
  for (int i = 0; i < 4 && e == cudaSuccess && pkv_dense_device_has_wgmma(); i++) {
    const pkv_prefill_set *set = i < 2 ? &pkv_prefill_f16[i] : &pkv_prefill_bf16[i - 2];
    e = cudaFuncSetAttribute(set->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             set->shared_bytes);
  }
  return e;
}

cudaError_t pkv_dense_launch_prefill(const pkv_dense_prefill_params *p, cudaStream_t stream) {
  void *const encoder = pkv_cuda_tensor_encoder();
  pkv_cuda_tensor_maps maps;
  pkv_prefill_args a = {.p = *p};
  if (!pkv_dense_prefill_takes(p) || encoder == NULL) return cudaErrorInvalidValue;
  if (p->rows == 0 || p->longest == 0) return cudaSuccess;
  if (pkv_cuda_encode_tensors(&maps, encoder, &p->cache) != 0) return cudaErrorInvalidValue;
  const pkv_prefill_set *const set = set_of(p->act, p->cache.head_dim);
  a.group = p->query_heads / p->cache.kv_heads;
  while (1 << a.page_shift < p->cache.page_tokens)
    a.page_shift++;
  const int64_t tiles = ((int64_t)p->longest * a.group + 127) / 128;
  if (p->rows > 65535 || tiles > 65535) return cudaErrorInvalidValue;
  const dim3 grid = {(unsigned)p->cache.kv_heads, (unsigned)p->rows, (unsigned)tiles};
  const dim3 block = {(unsigned)set->threads, 1, 1};
  void *arguments[] = {&a, &maps};
  return cudaLaunchKernel(set->kernel, grid, block, arguments, (size_t)set->shared_bytes, stream);
}
