/* SPDX-License-Identifier: Apache-2.0 */
/* Products of packed weights with few rows: which kernel, and how many CTAs share a row. */
#include "backend/cuda/dense_few.h"

#include "backend/cuda/dense_clusters.h"
#include "backend/cuda/dense_launchers.h"
#include "backend/cuda/dense_pack.h"

#define SHARED_MOST  (227 * 1024) /* of a CTA on sm_90 */
#define X_BYTES_MOST (72 * 1024)  /* of x in a CTA, before a row is shared */
#define SPLIT_MOST   8

static const pkv_few_set *set_of(pkv_wtype type) {
  switch (type) {
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

/* Shared memory of a launch, a multiple of 128. */
static int64_t shared_bytes(const pkv_few_set *set, int32_t m, int64_t k, int32_t split) {
  const int64_t wide = m > 8 ? 2 : 1;
  const int64_t chunks = (k + set->chunk_k - 1) / set->chunk_k;
  int64_t mine = (chunks + split - 1) / split * set->chunk_k;
  if (mine > (k + 127) / 128 * 128) mine = (k + 127) / 128 * 128;
  const int64_t sums = 2 * set->warps * 8 * wide * PKV_FEW_PITCH;
  const int64_t parts = split > 1 ? PKV_FEW_GROUP * 128 * wide : 0;
  return (PKV_FEW_SUMS_AT + (sums + parts) * 4 + mine * m * 2 + 127) / 128 * 128;
}

static int fits(const pkv_few_set *set, int32_t m, int64_t k, int32_t split) {
  const int64_t chunks = (k + set->chunk_k - 1) / set->chunk_k;
  return split <= chunks && shared_bytes(set, m, k, split) <= SHARED_MOST;
}

/* The fewest CTAs a row whose share of x is small; the most there may be where none is. */
static int32_t split_of(const pkv_few_set *set, int32_t m, int64_t k) {
  const int64_t chunks = (k + set->chunk_k - 1) / set->chunk_k;
  int32_t split = 1;
  while (split < SPLIT_MOST && 2 * split <= chunks && m * k * 2 / split > X_BYTES_MOST)
    split *= 2;
  return split;
}

/* Rows of x of a launch: as many as there are, or as fit. 0: not even 8 fit. */
static int32_t rows_of(const pkv_few_set *set, int32_t m, int64_t k) {
  const int32_t most = m > 16 ? 16 : m;
  if (fits(set, most, k, split_of(set, most, k))) return most;
  return most > 8 && fits(set, 8, k, split_of(set, 8, k)) ? 8 : 0;
}

static int takes(const pkv_few_set *set, const pkv_dense_matmul_params *p) {
  if (set == NULL || p->m < 1 || p->m > PKV_DENSE_GEMV_ROWS || p->w.k % 32 != 0) return 0;
  if ((uintptr_t)p->w.data % 16 != 0 || (uintptr_t)p->x % 16 != 0 || p->x_stride % 8 != 0) return 0;
  if (p->w.n > (1 << 30) || p->w.k > (1 << 24)) return 0;
  if (p->gate != PKV_DENSE_NO_GATE && p->w.n % 16 != 0) return 0;
  return rows_of(set, p->m, p->w.k) > 0;
}

/* Clusters: sm_90 and later. */
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
  static const pkv_wtype types[] = {PKV_WTYPE_Q4_0, PKV_WTYPE_Q4_1, PKV_WTYPE_Q4_K, PKV_WTYPE_Q5_0,
                                    PKV_WTYPE_Q5_1, PKV_WTYPE_Q5_K, PKV_WTYPE_Q6_K, PKV_WTYPE_Q8_0};
  cudaError_t e = cudaSuccess;
  if (!device_is_new()) return e;
  e = pkv_dense_prefill_prepare();
  if (e == cudaSuccess) e = pkv_dense_stream_prepare();
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
    for (int j = 0; j < 2 && e == cudaSuccess; j++)
      e = cudaFuncSetAttribute(set_of(types[i])->kernel[j],
                               cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MOST);
  return e;
}

static pkv_few_args arguments(const pkv_dense_matmul_params *p, const pkv_few_set *set) {
  const pkv_pack_layout l = pkv_pack_layout_of((int32_t)p->w.type);
  pkv_few_args a = {0};
  a.w = p->w.data;
  a.w_step = pkv_pack_strip(&l, p->w.k);
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

/* One launch, for rows that fit. */
static cudaError_t launch(const pkv_few_set *set, const pkv_dense_matmul_params *p, int32_t split,
                          int32_t dependent, cudaStream_t stream) {
  pkv_few_args a = arguments(p, set);
  a.split = split > 0 ? split : split_of(set, p->m, p->w.k);
  if (!fits(set, p->m, p->w.k, a.split)) return cudaErrorInvalidValue;
  int32_t clusters = multiprocessors() / a.split;
  if (clusters > a.tiles) clusters = a.tiles;
  void *arguments_of[] = {&a};
  return pkv_dense_launch_clusters(set->kernel[p->m > 8], (int32_t)(clusters * a.split),
                                   set->warps * 32,
                                   (int32_t)(shared_bytes(set, p->m, p->w.k, a.split)), a.split,
                                   dependent, arguments_of, stream);
}

int pkv_dense_gemv_fits(const pkv_dense_matmul_params *p, int32_t split) {
  const pkv_few_set *const set = set_of(p->w.type);
  return takes(set, p) && (split == 0 || (p->m <= 16 && fits(set, p->m, p->w.k, split)));
}

cudaError_t pkv_dense_launch_gemv_as(const pkv_dense_matmul_params *p, int32_t split,
                                     int32_t dependent, cudaStream_t stream) {
  const pkv_few_set *const set = set_of(p->w.type);
  if (!takes(set, p)) return cudaErrorInvalidValue;
  const int32_t rows = split > 0 && p->m <= 16 ? p->m : rows_of(set, p->m, p->w.k);
  const int64_t y_bytes = p->y_f32 ? 4 : 2;
  cudaError_t e = cudaSuccess;
  for (int32_t first = 0; first < p->m && e == cudaSuccess; first += rows) {
    pkv_dense_matmul_params part = *p;
    part.m = p->m - first < rows ? p->m - first : rows;
    part.x = (const unsigned char *)p->x + first * p->x_stride * 2;
    part.y = (unsigned char *)p->y + first * p->y_stride * y_bytes;
    e = launch(set, &part, split, dependent, stream);
  }
  return e;
}

cudaError_t pkv_dense_launch_gemv(const pkv_dense_matmul_params *p, int32_t dependent,
                                  cudaStream_t stream) {
  return pkv_dense_launch_gemv_as(p, 0, dependent, stream);
}
