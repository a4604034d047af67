/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed matrices (dense_pack.h): filled from GGUF's blocks, and turned into f16 or bf16 for
 * products of many rows. Both are bound by memory.
 *
 * pack: a thread a block of 32 elements, blocks of a row side by side. dequant: a warp 128 elements
 * of a strip's 8 rows, a lane 32 elements, which it writes in four accesses of 16 bytes. Neither
 * uses shared memory.
 */
#include "backend/cuda/dense_launchers.h"
#include "backend/cuda/dense_packed.cuh"

#define THREADS 128

static __global__ void __launch_bounds__(THREADS)
    dense_pack(unsigned char *to, const __grid_constant__ pkv_weight raw, int64_t first_row,
               int64_t rows) {
  const pkv_pack_layout l = pkv_pack_layout_of(raw.type);
  const int64_t strip_bytes = pkv_pack_strip(&l, raw.k);
  const int64_t blocks = raw.k / 32, room = strip_bytes / l.cell_bytes * (l.cell_k / 32);
  const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  const int64_t i = at / room, b = at - i * room, row = first_row + i;
  if (i >= rows) return;
  const unsigned char *from = (const unsigned char *)raw.data + i * raw.row_bytes;
  unsigned char *const strip = to + row / PKV_PACK_ROWS * strip_bytes;
  if (i < raw.n && b < blocks)
    pkv_pack_block(strip, raw.type, &l, from, (int32_t)(row % PKV_PACK_ROWS), b);
  else
    pkv_pack_block(strip, raw.type, &l, NULL, (int32_t)(row % PKV_PACK_ROWS), b);
}

extern "C" cudaError_t pkv_dense_launch_pack(void *to, const pkv_weight *raw, int64_t rows_total,
                                             int64_t first_row, cudaStream_t stream) {
  const pkv_pack_layout l = pkv_pack_layout_of(raw->type);
  if (l.cell_bytes == 0) return cudaErrorInvalidValue;
  const int64_t end = first_row + raw->n;
  const int64_t padded = end == rows_total ? (end + 7) / 8 * 8 : end;
  const int64_t room = pkv_pack_strip(&l, raw->k) / l.cell_bytes * (l.cell_k / 32);
  const int64_t threads = (padded - first_row) * room;
  dense_pack<<<(unsigned)((threads + THREADS - 1) / THREADS), THREADS, 0, stream>>>(
      (unsigned char *)to, *raw, first_row, padded - first_row);
  return cudaGetLastError();
}

struct dequant_args {
  const unsigned char *w;
  uint16_t *out;
  int64_t n, k, strip_bytes;
  int bf16;
  int type;
};

template <int TYPE, int J>
static __device__ __forceinline__ void store_eight(uint16_t *to, const pkv_packed<TYPE> &p,
                                                   int bf16) {
  uint32_t v[4];
  p.template eight<J>(v);
  if (bf16)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = __half22float2(pkv_as_half2(v[i]));
      v[i] = pkv_bf16_type::pack(f.x, f.y);
    }
  *(uint4 *)(to + 8 * J) = make_uint4(v[0], v[1], v[2], v[3]);
}

/* A lane's 32 elements: row lane / 4 of the strip, block lane & 3 of the group. */
template <int TYPE>
static __device__ __forceinline__ void dequant_lane(const dequant_args &a, int64_t strip,
                                                    int64_t group, uint16_t *to, int lane) {
  typedef pkv_pack_of<TYPE> L;
  const unsigned char *cell = a.w + strip * a.strip_bytes + group / L::halves * L::cell_bytes;
  const unsigned char *half = cell + group % L::halves * L::half_bytes;
  pkv_packed_bytes<TYPE> bytes;
  pkv_packed<TYPE> p;
  bytes.fetch(half, cell + L::halves * L::half_bytes, lane);
  p.take(bytes);
  store_eight<TYPE, 0>(to, p, a.bf16);
  store_eight<TYPE, 1>(to, p, a.bf16);
  if constexpr (pkv_packed<TYPE>::bytes) p.take_codes(bytes, 1);
  store_eight<TYPE, 2>(to, p, a.bf16);
  store_eight<TYPE, 3>(to, p, a.bf16);
}

static __global__ void __launch_bounds__(THREADS)
    dense_dequant(const __grid_constant__ dequant_args a) {
  const int lane = threadIdx.x & 31;
  const int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
  const int64_t groups = (a.k + PKV_PACK_HALF - 1) / PKV_PACK_HALF;
  const int64_t strip = warp / groups, group = warp - strip * groups;
  const int64_t row = strip * PKV_PACK_ROWS + lane / 4;
  const int64_t k = group * PKV_PACK_HALF + (lane & 3) * 32;
  if (row >= a.n || k >= a.k) return;
  uint16_t *const to = a.out + row * a.k + k;
  switch (a.type) {
#define DEQUANT_CASE(name, cell, c, h, s, t, block, bytes)                                         \
  case PKV_WTYPE_##name:                                                                           \
    dequant_lane<PKV_WTYPE_##name>(a, strip, group, to, lane);                                     \
    break;
    PKV_PACK_MAP(DEQUANT_CASE)
#undef DEQUANT_CASE
  default:
    break;
  }
}

extern "C" cudaError_t pkv_dense_launch_dequant(const pkv_weight *w, pkv_dtype act, void *out,
                                                cudaStream_t stream) {
  const pkv_pack_layout l = pkv_pack_layout_of(w->type);
  if (l.cell_bytes == 0 || w->k % 32 != 0 || (uintptr_t)out % 16 != 0) return cudaErrorInvalidValue;
  const dequant_args a = {(const unsigned char *)w->data, (uint16_t *)out,       w->n,   w->k,
                          pkv_pack_strip(&l, w->k),       act == PKV_DTYPE_BF16, w->type};
  const int64_t warps = (w->n + 7) / 8 * ((w->k + PKV_PACK_HALF - 1) / PKV_PACK_HALF);
  const unsigned grid = (unsigned)((warps + THREADS / 32 - 1) / (THREADS / 32));
  dense_dequant<<<grid, THREADS, 0, stream>>>(a);
  return cudaGetLastError();
}
