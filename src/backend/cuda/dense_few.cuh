/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of few rows with packed weights: y[m, n] = x[m, k] w[n, k]^T for m <= 16.
 *
 * Mapping: a tile is 16 rows of w (with a gate 8 of gate and the 8 of up that belong to them); CTAs
 * take tiles in turn, and a cluster of `split` CTAs shares the elements of a row. A warp has
 * elements of its own (128 of each chunk), brings them straight to registers, a few shares ahead,
 * and multiplies by m16n8k16, w on the M side and the rows of x on the N side: one product for 8
 * rows costs what one row would. The order of elements inside a product is free: x lies in shared
 * memory in the order in which a lane has its weights. Warps meet at the end of a tile only, where
 * their sums are added in order; CTAs of a cluster every few tiles, through their shared memory, in
 * order too.
 *
 * w does not depend on the kernel ahead: its first shares are asked for before the grid-dependency
 * wait, x is read after it.
 *
 * Shared memory: x[m, k / split] in 16 bits, 20 to 57 KiB of sums. Bytes read: those of w once, x
 * once a CTA from L2. x in bf16 is scaled by a power of two a row, so that f16 holds it.
 * Registers: up to 121, which leaves the kernel behind no room to begin early.
 */
#ifndef PKV_CUDA_DENSE_FEW_CUH
#define PKV_CUDA_DENSE_FEW_CUH

#include "backend/cuda/cluster.cuh"
#include "backend/cuda/dense_few.h"
#include "backend/cuda/dense_packed.cuh"

/* Row of w that is row i of a tile. */
static __device__ __forceinline__ int pkv_few_source(const pkv_few_args &a, int tile, int i) {
  if (a.gate == PKV_DENSE_NO_GATE) return tile * 16 + i;
  return (i < 8 ? 0 : a.n / 2) + tile * 8 + (i & 7);
}
static __device__ __forceinline__ bool pkv_few_has(const pkv_few_args &a, int tile, int i) {
  return a.gate == PKV_DENSE_NO_GATE ? tile * 16 + i < a.n : tile * 8 + (i & 7) < a.n / 2;
}

/* A warp brings its elements straight to registers, `stages` shares ahead. */

/* Packed weights: a warp's share of a chunk is half a cell of two strips. It comes straight to
   registers, `stages` shares ahead: as many bytes in flight as a ring has, and no addresses. */
template <int TYPE> struct pkv_few_packed {
  typedef pkv_half_type mma;
  typedef pkv_pack_of<TYPE> L;
  static constexpr int warps = 16, warp_k = PKV_PACK_HALF, chunk_k = warps * warp_k, step_k = 32;
  static constexpr int stages = L::codes > 16 || L::high > 0 ? 2 : L::tail > 0 ? 3 : 4;

  struct share {
    pkv_packed_bytes<TYPE> low, high; /* of the two strips */
  };

  static __device__ __forceinline__ void fetch(share &s, const pkv_few_args &a, int tile, int chunk,
                                               int warp, int lane) {
    const int group = chunk * warps + warp;
    if (tile >= a.tiles || group * warp_k >= a.k) return;
    const int strip = pkv_few_source(a, tile, 0) / 8;
    /* A strip that is not there is the first again. */
    const int other = pkv_few_has(a, tile, 8) ? pkv_few_source(a, tile, 8) / 8 : strip;
    const int64_t cell = (int64_t)(group / L::halves) * L::cell_bytes;
    const int half = group % L::halves * L::half_bytes, tail = L::halves * L::half_bytes;
    const unsigned char *const first = a.w + strip * a.w_step + cell;
    const unsigned char *const second = a.w + other * a.w_step + cell;
    s.low.fetch(first + half, first + tail, lane);
    s.high.fetch(second + half, second + tail, lane);
  }
  /* A lane owns 32 elements of the 128: its 8 j .. are those of the four lines in turn. */
  static __device__ __forceinline__ void place(int j, int *line, int *at) {
    *line = (j >> 4) * 4 + (j & 3);
    *at = j >> 2 & 3;
  }
  template <int NB, int J>
  static __device__ __forceinline__ void eight(float acc[2][4], const pkv_packed<TYPE> &low,
                                               const pkv_packed<TYPE> &high, const unsigned char *x,
                                               int m, int lane) {
    uint32_t p[4], q[4];
    low.template eight<J>(p);
    high.template eight<J>(q);
    const uint32_t first[4] = {p[0], q[0], p[1], q[1]}, second[4] = {p[2], q[2], p[3], q[3]};
#pragma unroll
    for (int b = 0; b < NB; ++b) {
      const int col = b * 8 + lane / 4;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (col < m) v = *(const uint4 *)(x + (J * m + col) * 64 + (lane & 3) * 16);
      mma::mma(acc[NB == 1 ? 0 : b], first, v.x, v.y);
      mma::mma(acc[NB == 1 ? 1 : b], second, v.z, v.w);
    }
  }
  template <int NB>
  static __device__ __forceinline__ void multiply(float acc[2][4], const pkv_few_args &a,
                                                  const share &s, const unsigned char *x, int chunk,
                                                  int first_chunk, int warp, int lane) {
    const int k = chunk * chunk_k + warp * warp_k;
    if (k >= a.k) return;
    pkv_packed<TYPE> low, high;
    low.take(s.low);
    high.take(s.high);
    const unsigned char *lines = x + (k / step_k - first_chunk * (chunk_k / step_k)) * a.m * 64;
    eight<NB, 0>(acc, low, high, lines, a.m, lane);
    eight<NB, 1>(acc, low, high, lines, a.m, lane);
    if constexpr (pkv_packed<TYPE>::bytes) {
      low.take_codes(s.low, 1);
      high.take_codes(s.high, 1);
    }
    eight<NB, 2>(acc, low, high, lines, a.m, lane);
    eight<NB, 3>(acc, low, high, lines, a.m, lane);
  }
};

/* The largest magnitude in four pairs of bf16, as their bits. */
static __device__ __forceinline__ uint32_t pkv_few_largest(uint4 v) {
  const uint32_t a = __vmaxu2(v.x & 0x7fff7fffu, v.y & 0x7fff7fffu);
  const uint32_t b = __vmaxu2(v.z & 0x7fff7fffu, v.w & 0x7fff7fffu);
  const uint32_t c = __vmaxu2(a, b);
  return max(c & 0xffffu, c >> 16);
}
/* 2^(14 - e) for a largest magnitude of 2^e, as bf16 bits: x times it fits f16. */
static __device__ __forceinline__ float pkv_few_scale(uint32_t largest) {
  const int e = (int)(largest >> 7);
  return __uint_as_float((uint32_t)min(254, 127 + 14 + 127 - max(e, 14)) << 23);
}
static __device__ __forceinline__ uint32_t pkv_few_half(uint32_t pair, float scale) {
  const float lo = __uint_as_float(pair << 16) * scale;
  const float hi = __uint_as_float(pair & 0xffff0000u) * scale;
  return pkv_half_type::pack(lo, hi);
}

/* A row's largest magnitude over the lanes that have it. Rows are in order along the lanes. */
static __device__ __forceinline__ void pkv_few_collect(uint32_t *largest, int row, uint32_t v,
                                                       int lane) {
  const int first = __shfl_sync(0xffffffffu, row, 0), last = __shfl_sync(0xffffffffu, row, 31);
  if (first == last) {
    v = __reduce_max_sync(0xffffffffu, v);
    if (lane == 0) atomicMax(largest + row, v);
  } else {
    atomicMax(largest + row, v);
  }
}

/* x's rows, elements 8 first .. 8 end - 1, to shared memory; past k zeros. largest: of each row, in
   bf16's bits, only where x is bf16. */
template <typename W>
static __device__ __forceinline__ void pkv_few_stage(unsigned char *x, uint32_t *largest,
                                                     const pkv_few_args &a, int first, int end) {
  constexpr int threads = W::warps * 32, batch = 4;
  const int runs = end - first, total = runs * a.m, lane = threadIdx.x & 31;
  const bool scales = a.act == PKV_DTYPE_BF16;
  for (int base = (int)threadIdx.x - lane; base < total; base += batch * threads) {
    uint4 v[batch];
    int rows[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int at = base + i * threads + lane;
      v[i] = make_uint4(0, 0, 0, 0);
      rows[i] = min(at, total - 1) / runs;
      const int j = first + at - rows[i] * runs;
      if (at < total && 8 * j < a.k)
        v[i] = __ldcg((const uint4 *)((const uint16_t *)a.x + rows[i] * a.x_stride + 8 * j));
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int at = base + i * threads + lane;
      int line, place;
      W::place(at - rows[i] * runs, &line, &place);
      if (at < total) *(uint4 *)(x + (line * a.m + rows[i]) * 64 + place * 16) = v[i];
      if (scales && base + i * threads < total)
        pkv_few_collect(largest, rows[i], pkv_few_largest(v[i]), lane);
    }
  }
}
/* The same places, from bf16 to f16. */
template <typename W>
static __device__ __forceinline__ void pkv_few_convert(unsigned char *x, const uint32_t *largest,
                                                       const pkv_few_args &a, int runs) {
  for (int at = threadIdx.x; at < runs * a.m; at += W::warps * 32) {
    uint4 *const v = (uint4 *)(x + at * 16);
    const float scale = pkv_few_scale(largest[at / 4 % a.m]);
    *v = make_uint4(pkv_few_half(v->x, scale), pkv_few_half(v->y, scale), pkv_few_half(v->z, scale),
                    pkv_few_half(v->w, scale));
  }
}

/* f(gate) * up. */
static __device__ __forceinline__ float pkv_few_gated(int gate, float g, float up) {
  const float t =
      gate == PKV_DENSE_SILU ? g : g * fmaf(g * g, 0.07135481282745f, 1.59576912160573071f);
  return g / (1.0f + expf(-t)) * up;
}

/* Where a thread's output of a tile goes. */
static __device__ __forceinline__ void pkv_few_store(const pkv_few_args &a, int64_t at, float v,
                                                     float before) {
  if (a.y_f32)
    ((float *)a.y)[at] = before + v;
  else if (a.act == PKV_DTYPE_BF16)
    ((__nv_bfloat16 *)a.y)[at] = __float2bfloat16_rn(v);
  else
    ((__half *)a.y)[at] = __float2half_rn(v);
}

/* The end of tiles: sums of warps, then of CTAs, and what is made of them. */
template <typename W, int NB> struct pkv_few_finish {
  static constexpr int outputs = 128 * NB, warp_sums = 8 * NB * PKV_FEW_PITCH;
  const pkv_few_args &a;
  float *sums, *parts; /* [2, warps, 8 NB, PITCH]; of a cluster [PKV_FEW_GROUP, outputs] */
  const uint32_t *largest;
  int rank;

  static __device__ __forceinline__ bool busy() {
    return threadIdx.x < outputs;
  }
  /* Column (row of x) and row of the tile that are this thread's. */
  static __device__ __forceinline__ int col() {
    return threadIdx.x >> 4;
  }
  static __device__ __forceinline__ int row() {
    return threadIdx.x & 15;
  }
  __device__ __forceinline__ bool stores(int tile) const {
    return busy() && col() < a.m && pkv_few_has(a, tile, row()) &&
           (a.gate == PKV_DENSE_NO_GATE || row() < 8);
  }
  __device__ __forceinline__ int64_t place(int tile) const {
    const int width = a.gate == PKV_DENSE_NO_GATE ? 16 : 8;
    return col() * a.y_stride + tile * width + row();
  }
  /* What y holds, read while the tile is multiplied. */
  __device__ __forceinline__ float before(int tile) const {
    return a.accumulate && stores(tile) ? __ldcg((const float *)a.y + place(tile)) : 0.0f;
  }
  __device__ __forceinline__ void put(const float acc[2][4], int parity, int warp, int lane) const {
    float *const mine = sums + (parity * W::warps + warp) * warp_sums + lane / 4;
#pragma unroll
    for (int b = 0; b < NB; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        mine[(b * 8 + 2 * (lane & 3) + (i & 1)) * PKV_FEW_PITCH + 8 * (i >> 1)] =
            NB == 1 ? acc[0][i] + acc[1][i] : acc[b][i];
  }
  /* The warps' sum of this thread's output. */
  __device__ __forceinline__ float add(int parity) const {
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < W::warps; ++w)
      v += sums[(parity * W::warps + w) * warp_sums + col() * PKV_FEW_PITCH + row()];
    if (a.act == PKV_DTYPE_BF16) v *= __frcp_rn(pkv_few_scale(largest[col()]));
    return v;
  }
  __device__ __forceinline__ void put_out(int tile, float v, float old) const {
    if (a.gate != PKV_DENSE_NO_GATE)
      v = pkv_few_gated(a.gate, v, __shfl_xor_sync(0xffffffffu, v, 8));
    if (stores(tile)) pkv_few_store(a, place(tile), v, old);
  }
  /* `count` tiles from `tile` on lie in the parts of all CTAs: each finishes some. */
  __device__ __forceinline__ void gather(int tile, int step, int count) const {
    pkv_cluster_sync();
    if (busy())
      for (int i = rank; i < count; i += a.split) {
        const float old = before(tile + i * step);
        float v = 0.0f;
        for (int r = 0; r < a.split; ++r)
          v += pkv_cluster_word(parts + i * outputs + threadIdx.x, r);
        put_out(tile + i * step, v, old);
      }
    pkv_cluster_sync(); /* before the parts are written again, or their CTA leaves */
  }
};

/* x to shared memory, in the form that W multiplies; after the grid-dependency wait. */
template <typename W>
static __device__ __forceinline__ void pkv_few_take_x(unsigned char *x, uint32_t *largest,
                                                      const pkv_few_args &a, int first, int end) {
  constexpr int runs = W::chunk_k / 8;
  const int end_run = min(end * runs, (a.k + 127) / 128 * 16);
  if (threadIdx.x < 16) largest[threadIdx.x] = 0;
  pkv_grid_wait();
  __syncthreads();
  pkv_few_stage<W>(x, largest, a, first * runs, end_run);
  __syncthreads();
  if (a.act == PKV_DTYPE_BF16) {
    pkv_few_convert<W>(x, largest, a, end_run - first * runs);
    __syncthreads();
  }
}

template <typename W, int NB>
__global__ void __launch_bounds__(W::warps * 32) dense_few(const __grid_constant__ pkv_few_args a) {
#if __CUDA_ARCH__ >= 900
  typedef pkv_few_finish<W, NB> finish_type;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int rank = a.split > 1 ? (int)pkv_cluster_rank() : 0;
  const int first_tile = (int)blockIdx.x / a.split, step = (int)gridDim.x / a.split;
  const int first = a.chunks * rank / a.split, end = a.chunks * (rank + 1) / a.split;
  uint32_t *const largest = (uint32_t *)memory;
  float *const sums = (float *)(memory + PKV_FEW_SUMS_AT);
  float *const parts = sums + 2 * W::warps * finish_type::warp_sums;
  unsigned char *const x =
      (unsigned char *)(parts + (a.split > 1 ? PKV_FEW_GROUP * finish_type::outputs : 0));
  const finish_type finish = {a, sums, parts, largest, rank};
  typename W::share shares[W::stages];

  pkv_grid_release();
  int fetch_tile = first_tile, fetch_chunk = first;
  auto fetch = [&](typename W::share &s) {
    W::fetch(s, a, fetch_tile, fetch_chunk, warp, lane);
    if (++fetch_chunk == end) {
      fetch_chunk = first;
      fetch_tile += step;
    }
  };
#pragma unroll
  for (int i = 0; i < W::stages; ++i)
    fetch(shares[i]);
  pkv_few_take_x<W>(x, largest, a, first, end);

  int tile = first_tile, chunk = first, parity = 0, held = 0;
  float old = 0.0f, acc[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
  while (tile < a.tiles) {
#pragma unroll
    for (int i = 0; i < W::stages; ++i) {
      if (tile >= a.tiles) break;
      if (chunk == first && a.split == 1) old = finish.before(tile);
      const typename W::share now = shares[i];
      fetch(shares[i]);
      W::template multiply<NB>(acc, a, now, x, chunk, first, warp, lane);
      if (++chunk < end) continue;
      chunk = first;
      finish.put(acc, parity, warp, lane);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        acc[j / 4][j & 3] = 0.0f;
      __syncthreads();
      if (finish.busy()) {
        const float v = finish.add(parity);
        if (a.split == 1)
          finish.put_out(tile, v, old);
        else
          parts[held * finish_type::outputs + threadIdx.x] = v;
      }
      if (a.split > 1 && (++held == PKV_FEW_GROUP || tile + step >= a.tiles)) {
        finish.gather(tile - (held - 1) * step, step, held);
        held = 0;
      }
      tile += step;
      parity ^= 1;
    }
  }
#endif
}

#define PKV_FEW_SET(name, W)                                                                       \
  extern "C" const pkv_few_set name;                                                               \
  const pkv_few_set name = {                                                                       \
      {(const void *)dense_few<W, 1>, (const void *)dense_few<W, 2>}, W::warps, W::chunk_k};

#endif
