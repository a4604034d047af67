/* SPDX-License-Identifier: Apache-2.0 */
/* Products that stream 16-bit weights: what they cover, their tensor maps, their grid. */
#include "backend/cuda/dense_stream.h"

#include <string.h>

#include "backend/cuda/dense_clusters.h"
#include "backend/cuda/dense_launchers.h"

#define SHARED     (200 * 1024) /* of a CTA, one a multiprocessor: smaller rings slow a step */
#define ALIGNMENT  1024         /* of swizzled tiles */
#define LEAST      4            /* units a CTA is worth starting for */
#define SPLIT_MOST 8

static int32_t columns_of(int32_t m) {
  return m > 8 ? 16 : 8;
}

int pkv_dense_stream_takes(const pkv_dense_matmul_params *p) {
  const pkv_wtype act = p->act == PKV_DTYPE_BF16 ? PKV_WTYPE_BF16 : PKV_WTYPE_F16;
  if (p->w.type != act || p->m < 1 || p->m > PKV_DENSE_STREAM_ROWS) return 0;
  if (p->w.n < 16 || p->w.n % 16 != 0 || p->w.n > (1 << 30)) return 0;
  if (p->w.k < 1 || p->w.k > (1 << 24)) return 0;
  if ((uintptr_t)p->w.data % 16 != 0 || p->w.row_bytes % 16 != 0) return 0;
  if ((uintptr_t)p->x % 16 != 0 || p->x_stride % 8 != 0) return 0;
  return pkv_dense_device_has_wgmma();
}

/* Of sums, a CTA. */
static size_t part_bytes(void) {
  return (size_t)PKV_DENSE_STREAM_ROWS * PKV_STREAM_ROWS * sizeof(float);
}

size_t pkv_dense_stream_scratch(int32_t sms) {
  return (size_t)sms * (part_bytes() + sizeof(uint32_t));
}

cudaError_t pkv_dense_stream_prepare(void) {
  cudaError_t e = cudaSuccess;
  for (int i = 0; i < 4 && e == cudaSuccess && pkv_dense_device_has_wgmma(); i++)
    e = cudaFuncSetAttribute(pkv_stream_kernels[i / 2][i % 2],
                             cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
  return e;
}

typedef CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                 const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static CUresult encode(CUtensorMap *map, const void *encoder, pkv_dtype act, cuuint32_t dims,
                       const void *base, const cuuint64_t *sizes, const cuuint64_t *apart,
                       const cuuint32_t *box) {
  static const cuuint32_t steps[4] = {1, 1, 1, 1};
  encode_tiled function;
  void *address;
  memcpy(&function, &encoder, sizeof function);
  memcpy(&address, &base, sizeof address);
  return function(map,
                  act == PKV_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                  dims, address, sizes, apart, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* What a box has past the ends is zeros. */
static CUresult encode_both(pkv_stream_args *a, const void *encoder,
                            const pkv_dense_matmul_params *p) {
  const cuuint64_t row = (cuuint64_t)p->w.row_bytes, n = (cuuint64_t)p->w.n;
  const int gated = p->gate != PKV_DENSE_NO_GATE;
  const cuuint64_t w_sizes[4] = {(cuuint64_t)p->w.k, 8, 2, n / 16};
  const cuuint64_t w_apart[3] = {row, gated ? n / 2 * row : 8 * row, (gated ? 8 : 16) * row};
  const cuuint32_t w_box[4] = {PKV_STREAM_K, 8, 2, PKV_STREAM_ROWS / 16};
  const cuuint64_t x_sizes[2] = {(cuuint64_t)p->w.k, (cuuint64_t)p->m};
  const cuuint64_t x_apart[1] = {(cuuint64_t)p->x_stride * 2};
  const cuuint32_t x_box[2] = {PKV_STREAM_K, (cuuint32_t)columns_of(p->m)};
  const CUresult e = encode(&a->w, encoder, p->act, 4, p->w.data, w_sizes, w_apart, w_box);
  return e != CUDA_SUCCESS ? e : encode(&a->x, encoder, p->act, 2, p->x, x_sizes, x_apart, x_box);
}

/* Clusters that run at a time: of 4 and of 8 CTAs an H200's groups of 16 to 18 multiprocessors hold
   four and two. */
static int32_t clusters_of(int32_t split, int32_t sms) {
  return split == 2 ? sms / 2 : split == 4 ? sms * 8 / 33 : sms * 4 / 33;
}

/* CTAs of a tile's cluster: as many as leave each cluster one tile. Clusters of several tiles in
   turn are slower than to divide all units evenly. */
static int32_t split_of(int32_t tiles, int32_t units, int32_t sms) {
  int32_t split = 1;
  while (split < SPLIT_MOST && 2 * split <= units && tiles <= clusters_of(2 * split, sms))
    split *= 2;
  return split;
}

static int32_t grid_of(const pkv_stream_args *a, int32_t sms) {
  const int64_t worth = ((int64_t)a->units * a->tiles + LEAST - 1) / LEAST;
  if (a->split > 1) return a->tiles * a->split;
  return worth < sms ? (int32_t)worth : sms;
}

static pkv_stream_args arguments(const pkv_dense_matmul_params *p, void *scratch, int32_t sms) {
  pkv_stream_args a = {0};
  a.y = p->y;
  a.parts = scratch;
  a.ready = (uint32_t *)((char *)scratch + (size_t)sms * part_bytes());
  a.y_stride = p->y_stride;
  a.m = p->m;
  a.n = (int32_t)p->w.n;
  a.units = (int32_t)((p->w.k + PKV_STREAM_K - 1) / PKV_STREAM_K);
  a.tiles = (int32_t)((p->w.n + PKV_STREAM_ROWS - 1) / PKV_STREAM_ROWS);
  a.split = split_of(a.tiles, a.units, sms);
  a.stages = (SHARED - ALIGNMENT - pkv_stream_slot_bytes(a.split) - PKV_STREAM_BARRIERS) /
             (pkv_stream_stage_bytes(columns_of(p->m)) + PKV_STREAM_BARRIERS);
  a.act = (int32_t)p->act;
  a.y_f32 = p->y_f32;
  a.accumulate = p->accumulate;
  a.gate = (int32_t)p->gate;
  return a;
}

cudaError_t pkv_dense_launch_stream(const pkv_dense_matmul_params *p, const void *encoder,
                                    void *scratch, int32_t sms, int32_t dependent,
                                    cudaStream_t stream) {
  if (!pkv_dense_stream_takes(p) || encoder == NULL) return cudaErrorInvalidValue;
  pkv_stream_args a = arguments(p, scratch, sms);
  if (encode_both(&a, encoder, p) != CUDA_SUCCESS) return cudaErrorInvalidValue;
  void *arguments_of[] = {&a};
  return pkv_dense_launch_clusters(pkv_stream_kernels[p->m > 8][p->act == PKV_DTYPE_BF16],
                                   (int32_t)(grid_of(&a, sms)), PKV_STREAM_WORKERS + 32,
                                   (int32_t)(SHARED), a.split, dependent, arguments_of, stream);
}
