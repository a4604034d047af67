/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Folding of partial states: the 4 warps' of a piece, in warp order; the pieces' of a cut segment,
 * in
 * slot order. A thread owns four neighbouring head dimensions of one query row (its item).
 */
#ifndef PKV_CUDA_FOLD_CUH
#define PKV_CUDA_FOLD_CUH

#include "backend/cuda/slice.cuh"

#define PKV_FOLD_ROWS 4 /* query rows that are folded together; more go in turns */
#ifndef PKV_FOLD_BATCH
#define PKV_FOLD_BATCH 16 /* pieces of a cut segment whose states are in flight together */
#endif

template <int HD> struct pkv_fold {
  static constexpr int pitch = HD + 8; /* floats between rows: keeps the fragments' stores apart */
  static constexpr int bytes = PKV_WARPS * PKV_FOLD_ROWS * pitch * 4;
  static constexpr int stats_bytes = PKV_WARPS * PKV_CUDA_TILE_ROWS * 8;
  static constexpr int items = (PKV_FOLD_ROWS * HD / 4 + PKV_THREADS - 1) / PKV_THREADS;
  static constexpr int turns = PKV_CUDA_TILE_ROWS / PKV_FOLD_ROWS;
  static constexpr int slot_floats = PKV_CUDA_TILE_ROWS * (HD + 2);
};

/* Four values of one query row, and that row's m and l. */
struct pkv_item {
  float m, l;
  float4 acc;
};

static __device__ __forceinline__ void pkv_scale4(float4 &a, float x) {
  a = make_float4(a.x * x, a.y * x, a.z * x, a.w * x);
}
static __device__ __forceinline__ void pkv_add4(float4 &a, const float4 &b, float x) {
  a = make_float4(a.x + b.x * x, a.y + b.y * x, a.z + b.z * x, a.w + b.w * x);
}

/* a := a folded with b, which comes later in token order. */
static __device__ __forceinline__ void pkv_item_fold(pkv_item &a, const pkv_item &b) {
  const float m = fmaxf(a.m, b.m), ref = m == -CUDART_INF_F ? 0.0f : m;
  const float wa = pkv_exp2(a.m - ref), wb = pkv_exp2(b.m - ref);
  a.m = m;
  a.l = a.l * wa + b.l * wb;
  pkv_scale4(a.acc, wa);
  pkv_add4(a.acc, b.acc, wb);
}

static __device__ __forceinline__ void pkv_store_out(const pkv_cuda_decode_params &p, int64_t at,
                                                     float x) {
  if (p.out_dtype == PKV_DTYPE_F32)
    ((float *)p.out)[at] = x;
  else if (p.out_dtype == PKV_DTYPE_F16)
    ((__half *)p.out)[at] = __float2half_rn(x);
  else
    ((__nv_bfloat16 *)p.out)[at] = __float2bfloat16_rn(x);
}

/* Normalises, adds the sink, and stores an item: query row q of the segment, dimensions d .. d +
   3. */
static __device__ __forceinline__ void pkv_item_store(const pkv_cuda_decode_params &p, int row,
                                                      int head, int q, int d,
                                                      const pkv_item &item) {
  const int t = q / p.group, g = q - t * p.group, h = head * p.group + g;
  const int64_t token = (int64_t)row * p.q_len + t;
  float m = item.m, l = item.l, keep = 1.0f;
  if (p.sinks && m != -CUDART_INF_F) {
    const float sink = p.sinks[h] * PKV_LOG2_E;
    const float top = fmaxf(m, sink);
    keep = pkv_exp2(m - top);
    l = l * keep + pkv_exp2(sink - top);
    m = top;
  }
  if (d == 0 && p.lse) {
    const float lse2 = m == -CUDART_INF_F ? -CUDART_INF_F : m + log2f(l);
    p.lse[token * p.lse_token_stride + h] = p.lse_base2 ? lse2 : lse2 * 0.693147181f;
  }
  if (d >= p.cache.head_dim) return; /* a multiple of 8 */
  const float v_scale = p.cache.v_head_scale ? p.v_scale * p.cache.v_head_scale[head] : p.v_scale;
  const float norm = l > 0.0f ? keep / l * v_scale : 0.0f;
  const int64_t at = token * p.out_token_stride + (int64_t)h * p.out_head_stride + d;
  pkv_store_out(p, at, item.acc.x * norm);
  pkv_store_out(p, at + 1, item.acc.y * norm);
  pkv_store_out(p, at + 2, item.acc.z * norm);
  pkv_store_out(p, at + 3, item.acc.w * norm);
}

/* A slot's arrays: m[16], l[16], acc[16][HD]. */
template <int HD>
static __device__ __forceinline__ float *pkv_slot(const pkv_cuda_decode_params &p, int tile,
                                                  int slot) {
  return p.slots + ((int64_t)tile * p.slots_stride + slot) * pkv_fold<HD>::slot_floats;
}

template <int HD>
static __device__ __forceinline__ void pkv_item_to_slot(float *slot, int m, int d,
                                                        const pkv_item &item) {
  *(float4 *)(slot + 2 * PKV_CUDA_TILE_ROWS + m * HD + d) = item.acc;
  if (d == 0) {
    slot[m] = item.m;
    slot[PKV_CUDA_TILE_ROWS + m] = item.l;
  }
}

/*
 * Folds the warps' states; calls done(turn, n, m, d, item) for each of this thread's items, the
 * same
 * (turn, n) always standing for the same (m, d). All threads. rows: query rows of this tile.
 */
template <typename KV, int HD, typename F>
static __device__ __forceinline__ void pkv_fold_warps(const pkv_state<HD> &s, int rows, float *fold,
                                                      float *stats, int warp, int lane, F done) {
  typedef pkv_fold<HD> C;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float l = s.l[half];
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
    if ((lane & 3) == 0)
      *(float2 *)(stats + ((lane / 4 + half * 8) * PKV_WARPS + warp) * 2) =
          make_float2(s.m[half], l);
  }
#pragma unroll
  for (int turn = 0; turn < C::turns; ++turn) {
    if (turn * PKV_FOLD_ROWS >= rows) break;
    constexpr int rows_a_half = 8 / PKV_FOLD_ROWS;
    const int half = turn / rows_a_half;
    if (lane / 4 / PKV_FOLD_ROWS == turn % rows_a_half) {
      float *row = fold + (warp * PKV_FOLD_ROWS + lane / 4 % PKV_FOLD_ROWS) * C::pitch;
#pragma unroll
      for (int n = 0; n < HD / 16; ++n)
        KV::store_pair(row, n, lane, s.acc[2 * n][half * 2], s.acc[2 * n][half * 2 + 1],
                       s.acc[2 * n + 1][half * 2], s.acc[2 * n + 1][half * 2 + 1]);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < C::items; ++n) {
      const int i = threadIdx.x + n * PKV_THREADS;
      const int r = i / (HD / 4), m = turn * PKV_FOLD_ROWS + r, d = i % (HD / 4) * 4;
      if (r >= PKV_FOLD_ROWS || m >= rows) continue;
      float2 ml[PKV_WARPS];
      pkv_item item = {-CUDART_INF_F, 0.0f, make_float4(0, 0, 0, 0)};
#pragma unroll
      for (int k = 0; k < PKV_WARPS; ++k) {
        ml[k] = *(const float2 *)(stats + (m * PKV_WARPS + k) * 2);
        item.m = fmaxf(item.m, ml[k].x);
      }
      const float ref = item.m == -CUDART_INF_F ? 0.0f : item.m;
#pragma unroll
      for (int k = 0; k < PKV_WARPS; ++k) {
        const float weight = pkv_exp2(ml[k].x - ref);
        item.l += ml[k].y * weight;
        pkv_add4(item.acc, *(const float4 *)(fold + (k * PKV_FOLD_ROWS + r) * C::pitch + d),
                 weight);
      }
      done(turn, n, m, d, item);
    }
    __syncthreads();
  }
}

/*
 * Folds `count` pieces from slot `first` on, `stride` slots apart, in order, and stores the result.
 * ONE_BY_ONE: each with the rounding that folding it alone has, as batch invariance asks.
 * All threads; reads through L2, with many loads in flight: the rest of the grid has finished by
 * then, so latency is all that counts.
 */
template <int HD, bool ONE_BY_ONE>
static __device__ void pkv_fold_slots(const pkv_cuda_decode_params &p, int row, int head, int tile,
                                      int first, int count, int stride, int rows) {
  const float *slots = pkv_slot<HD>(p, tile, first);
  const int64_t step = (int64_t)stride * pkv_fold<HD>::slot_floats;
  for (int i = threadIdx.x; i < rows * (HD / 4); i += PKV_THREADS) {
    const int m = i / (HD / 4), d = (i - m * (HD / 4)) * 4;
    const float *ml = slots + m, *acc = slots + 2 * PKV_CUDA_TILE_ROWS + m * HD + d;
    pkv_item sum = {-CUDART_INF_F, 0.0f, make_float4(0, 0, 0, 0)};
    for (int k = 0; k < count; k += PKV_FOLD_BATCH) {
      float mk[PKV_FOLD_BATCH], lk[PKV_FOLD_BATCH];
      float4 ak[PKV_FOLD_BATCH];
#pragma unroll
      for (int j = 0; j < PKV_FOLD_BATCH; ++j) {
        const int64_t at = (int64_t)min(k + j, count - 1) * step;
        mk[j] = __ldcg(ml + at);
        lk[j] = __ldcg(ml + PKV_CUDA_TILE_ROWS + at);
        ak[j] = __ldcg((const float4 *)(acc + at));
      }
      if (ONE_BY_ONE) {
#pragma unroll
        for (int j = 0; j < PKV_FOLD_BATCH; ++j)
          if (k + j < count) pkv_item_fold(sum, {mk[j], lk[j], ak[j]});
        continue;
      }
      float high = sum.m;
#pragma unroll
      for (int j = 0; j < PKV_FOLD_BATCH; ++j) {
        if (k + j >= count) mk[j] = -CUDART_INF_F;
        high = fmaxf(high, mk[j]);
      }
      const float ref = high == -CUDART_INF_F ? 0.0f : high;
      const float shrink = pkv_exp2(sum.m - ref);
      sum.l *= shrink;
      pkv_scale4(sum.acc, shrink);
#pragma unroll
      for (int j = 0; j < PKV_FOLD_BATCH; ++j) {
        const float weight = pkv_exp2(mk[j] - ref);
        if (weight > 0.0f) {
          sum.l += lk[j] * weight;
          pkv_add4(sum.acc, ak[j], weight);
        }
      }
      sum.m = high;
    }
    pkv_item_store(p, row, head, tile * PKV_CUDA_TILE_ROWS + m, d, sum);
  }
}

#endif
