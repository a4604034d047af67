/* SPDX-License-Identifier: Apache-2.0 */
/* Products of few rows: which kernel, how many CTAs share a row, and how deep its ring is. */
#include "backend/cuda/dense_few.h"

#include "backend/cuda/dense_launchers.h"
#include "backend/cuda/dense_pack.h"

#define SHARED_MOST  (227 * 1024) /* of a CTA on sm_90 */
#define SHARED_HALF  (112 * 1024) /* two kernels beside each other */
#define STAGES_LEAST 2
#define X_BYTES_MOST (64 * 1024) /* of x in a CTA, before a row is shared */
#define SPLIT_MOST   8

static const pkv_few_set *set_of(pkv_wtype type) {
  switch (type) {
  case PKV_WTYPE_F16:
    return &pkv_few_f16;
  case PKV_WTYPE_BF16:
    return &pkv_few_bf16;
  case PKV_WTYPE_Q4_0:
    return &pkv_few_q4_0;
  case PKV_WTYPE_Q4_1:
    return &pkv_few_q4_1;
  case PKV_WTYPE_Q4_K:
    return &pkv_few_q4_k;
  case PKV_WTYPE_Q5_0:
    return &pkv_few_q5_0;
  case PKV_WTYPE_Q5_1:
    return &pkv_few_q5_1;
  case PKV_WTYPE_Q5_K:
    return &pkv_few_q5_k;
  case PKV_WTYPE_Q6_K:
    return &pkv_few_q6_k;
  case PKV_WTYPE_Q8_0:
    return &pkv_few_q8_0;
  default:
    return NULL;
  }
}

/* Shared memory before the ring, a multiple of 128. */
static int64_t before_ring(const pkv_few_set *set, int32_t m, int64_t k, int32_t split) {
  const int64_t wide = m > 8 ? 2 : 1;
  const int64_t chunks = (k + set->chunk_k - 1) / set->chunk_k;
  int64_t mine = (chunks + split - 1) / split * set->chunk_k;
  if (mine > (k + 127) / 128 * 128) mine = (k + 127) / 128 * 128;
  const int64_t sums = set->warps * 8 * wide * 20 * 4, parts = split > 1 ? 2 * 128 * wide * 4 : 0;
  return (PKV_FEW_SUMS_AT + sums + parts + mine * m * 2 + 127) / 128 * 128;
}

static int fits(const pkv_few_set *set, int32_t m, int64_t k, int32_t split, int32_t stages) {
  const int64_t chunks = (k + set->chunk_k - 1) / set->chunk_k;
  return split <= chunks &&
         before_ring(set, m, k, split) + stages * set->stage_bytes <= SHARED_MOST;
}

/* The fewest CTAs a row whose share of x is small; the most there may be where none is. */
static int32_t split_of(const pkv_few_set *set, int32_t m, int64_t k) {
  int32_t split = 1;
  while (split < SPLIT_MOST && m * k * 2 / split > X_BYTES_MOST &&
         fits(set, m, k, 2 * split, STAGES_LEAST))
    split *= 2;
  return split;
}

static int takes(const pkv_few_set *set, const pkv_dense_matmul_params *p) {
  const pkv_wtype act = p->act == PKV_DTYPE_BF16 ? PKV_WTYPE_BF16 : PKV_WTYPE_F16;
  const int plain = p->w.type == PKV_WTYPE_F16 || p->w.type == PKV_WTYPE_BF16;
  if (set == NULL || p->m < 1 || p->m > PKV_DENSE_GEMV_ROWS || p->w.k % 32 != 0) return 0;
  if (plain && (p->w.type != act || p->w.row_bytes % 16 != 0)) return 0;
  if ((uintptr_t)p->w.data % 16 != 0 || (uintptr_t)p->x % 16 != 0 || p->x_stride % 8 != 0) return 0;
  if (p->w.n > (1 << 30) || p->w.k > (1 << 24)) return 0;
  if (p->gate != PKV_DENSE_NO_GATE && p->w.n % 16 != 0) return 0;
  return fits(set, p->m, p->w.k, split_of(set, p->m, p->w.k), STAGES_LEAST);
}

/* Bulk copies and clusters: sm_90 and later. */
static int device_is_new(void) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess)
    (void)cudaGetLastError();
  return major >= 9;
}

int pkv_dense_gemv_takes(const pkv_dense_matmul_params *p) {
  return takes(set_of(p->w.type), p) && device_is_new();
}

cudaError_t pkv_dense_kernels_prepare(void) {
  static const pkv_wtype types[] = {PKV_WTYPE_F16,  PKV_WTYPE_BF16, PKV_WTYPE_Q4_0, PKV_WTYPE_Q4_1,
                                    PKV_WTYPE_Q4_K, PKV_WTYPE_Q5_0, PKV_WTYPE_Q5_1, PKV_WTYPE_Q5_K,
                                    PKV_WTYPE_Q6_K, PKV_WTYPE_Q8_0};
  cudaError_t e = cudaSuccess;
  if (!device_is_new()) return e;
  e = pkv_dense_prefill_prepare();
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    for (int j = 0; j < 2 && e == cudaSuccess; j++)
      e = cudaFuncSetAttribute(set_of(types[i])->kernel[j],
                               cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MOST);
  return e;
}

static pkv_few_args arguments(const pkv_dense_matmul_params *p, const pkv_few_set *set) {
  const pkv_pack_layout l = pkv_pack_layout_of(p->w.type);
  pkv_few_args a = {0};
  a.w = p->w.data;
  a.w_step = l.cell_bytes > 0 ? pkv_pack_strip(&l, p->w.k) : p->w.row_bytes;
  a.x = p->x;
  a.y = p->y;
  a.x_stride = p->x_stride;
  a.y_stride = p->y_stride;
  a.m = p->m;
  a.n = (int32_t)p->w.n;
  a.k = (int32_t)p->w.k;
  a.tiles = (a.n + 15) / 16;
  a.chunks = (a.k + set->chunk_k - 1) / set->chunk_k;
  a.act = (int32_t)p->act;
  a.y_f32 = p->y_f32;
  a.accumulate = p->accumulate;
  a.gate = (int32_t)p->gate;
  return a;
}

static int32_t multiprocessors(void) {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    (void)cudaGetLastError();
  return count > 0 ? count : 1;
}

cudaError_t pkv_dense_launch_gemv_as(const pkv_dense_matmul_params *p, int32_t split,
                                     int32_t stages, int32_t dependent, cudaStream_t stream) {
  const pkv_few_set *const set = set_of(p->w.type);
  if (!takes(set, p)) return cudaErrorInvalidValue;
  pkv_few_args a = arguments(p, set);
  a.split = split > 0 ? split : split_of(set, p->m, p->w.k);
  if (!fits(set, p->m, p->w.k, a.split, STAGES_LEAST)) return cudaErrorInvalidValue;
  const int64_t before = before_ring(set, p->m, p->w.k, a.split);
  a.ring_at = (int32_t)before;
  a.stages = stages > 0 ? stages : (int32_t)((SHARED_HALF - before) / set->stage_bytes);
  if (a.stages < STAGES_LEAST) a.stages = STAGES_LEAST;
  if (a.stages > PKV_FEW_STAGES) a.stages = PKV_FEW_STAGES;
  const int64_t bytes = before + (int64_t)a.stages * set->stage_bytes;
  if (bytes > SHARED_MOST) return cudaErrorInvalidValue;

  int32_t clusters = multiprocessors() / a.split;
  if (clusters > a.tiles) clusters = a.tiles;
  cudaLaunchAttribute attributes[2] = {0};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = (unsigned)a.split;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {0};
  config.gridDim.x = (unsigned)(clusters * a.split);
  config.blockDim.x = (unsigned)set->warps * 32;
  config.gridDim.y = config.gridDim.z = config.blockDim.y = config.blockDim.z = 1;
  config.dynamicSmemBytes = (size_t)bytes;
  config.stream = stream;
  config.attrs = a.split > 1 ? attributes : attributes + 1;
  config.numAttrs = (a.split > 1 ? 1u : 0u) + (dependent ? 1u : 0u);
  void *arguments_of[] = {&a};
  return cudaLaunchKernelExC(&config, set->kernel[p->m > 8], arguments_of);
}

cudaError_t pkv_dense_launch_gemv(const pkv_dense_matmul_params *p, int32_t dependent,
                                  cudaStream_t stream) {
  return pkv_dense_launch_gemv_as(p, 0, 0, dependent, stream);
}
