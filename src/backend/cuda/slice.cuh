/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One warp's share of a step: 16 tokens, copied through its own ring and multiplied by its own
 * tensor-core instructions. No barrier beyond the warp.
 */
#ifndef PKV_CUDA_SLICE_CUH
#define PKV_CUDA_SLICE_CUH

#include <math_constants.h>

#include "backend/cuda/kv_types.cuh"
#include "backend/cuda/walk.cuh"

#define PKV_WARPS        4
#define PKV_THREADS      (PKV_WARPS * 32)
#define PKV_SLICE_TOKENS 16
#define PKV_LOG2_E       1.44269504f

template <int BYTES> struct pkv_bits;
template <> struct pkv_bits<1> { typedef uint8_t type; };
template <> struct pkv_bits<2> { typedef uint16_t type; };

/* Page id of this lane's token (lane & 15) of the warp's slice; -1 where there is none to read. */
static __device__ __forceinline__ int
pkv_fetch_page(const pkv_walk &w, const pkv_cuda_decode_params &p, int warp, int lane) {
  if (w.row < 0) return -1;
  int token = w.at + warp * PKV_SLICE_TOKENS + (lane & 15);
  if (token >= w.end) return -1;
  token = min(token, w.len - 1); /* padded: the row's last valid page again */
  const int index = p.page_shift >= 0 ? token >> p.page_shift : token / p.cache.page_tokens;
  const int page = __ldg(p.block_table + (int64_t)w.row * p.block_table_stride + index);
  if ((uint32_t)page < (uint64_t)p.cache.pages) return page;
  atomicMax(p.fault, 1 + w.row);
  return -1;
}

/* The slow way, for addresses that are not multiples of 16 bytes; the rest of the 16 bytes is
   zero. */
template <typename T>
static __device__ __noinline__ void pkv_copy_elements(uint32_t to, const T *from, int count) {
  for (int i = 0; i < 16 / (int)sizeof(T); ++i) {
    const uint32_t x =
        i < count ? (uint32_t) * (const typename pkv_bits<sizeof(T)>::type *)(from + i) : 0u;
    if (sizeof(T) == 1)
      asm volatile("st.shared.u8 [%0], %1;\n" ::"r"(to + i), "r"(x));
    else
      asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(to + 2 * i), "h"((uint16_t)x));
  }
}

/* Copies the slice at w into ring slot `slot` and commits; `page` is what pkv_fetch_page gave. */
template <typename KV>
static __device__ __forceinline__ void pkv_copy_slice(const pkv_walk &w,
                                                      const pkv_cuda_decode_params &p, int page,
                                                      uint32_t to, int warp, int lane) {
  typedef typename KV::element element;
  constexpr int slice_bytes = PKV_SLICE_TOKENS * KV::chunks * 16;
  const int base = w.at + warp * PKV_SLICE_TOKENS;
  if (w.row >= 0 && base < w.end) {
    const int token = min(base + (lane & 15), w.len - 1);
    const int in_page =
        p.page_shift >= 0 ? token & (p.cache.page_tokens - 1) : token % p.cache.page_tokens;
    int64_t k_at = (int64_t)page * p.cache.k_page_stride + in_page * p.cache.k_token_stride +
                   w.head * p.cache.k_head_stride;
    const int64_t v_at = (int64_t)page * p.cache.v_page_stride + in_page * p.cache.v_token_stride +
                         w.head * p.cache.v_head_stride;
    if (page < 0) k_at = INT64_MIN;
#pragma unroll
    for (int i = 0; i < PKV_SLICE_TOKENS * KV::chunks / 32; ++i) {
      const int t = (i * 32 + lane) / KV::chunks, c = (i * 32 + lane) % KV::chunks;
      const int64_t k_from = __shfl_sync(0xffffffffu, k_at, t);
      const int64_t v_from = __shfl_sync(0xffffffffu, v_at, t);
      const int left = (p.cache.head_dim - c * (16 / KV::bytes)) * KV::bytes; /* may end inside */
      const int bytes = k_from == INT64_MIN ? 0 : max(0, min(16, left));
      const uint32_t at = (uint32_t)((t * KV::chunks + pkv_swizzle<KV::chunks>(t, c)) * 16);
      const int64_t d = bytes > 0 ? c * (16 / KV::bytes) : 0;
      const element *k = (const element *)p.cache.k + (bytes > 0 ? k_from + d : 0);
      const element *v = (const element *)p.cache.v + (bytes > 0 ? v_from + d : 0);
      if (p.aligned) {
        pkv_copy16(to + at, k, bytes);
        pkv_copy16(to + slice_bytes + at, v, bytes);
      } else {
        pkv_copy_elements(to + at, k, bytes / KV::bytes);
        pkv_copy_elements(to + slice_bytes + at, v, bytes / KV::bytes);
      }
    }
  }
  pkv_copy_commit();
}

static __device__ __forceinline__ float pkv_q_element(const pkv_cuda_decode_params &p, int64_t at) {
  if (p.q_dtype == PKV_DTYPE_F32) return ((const float *)p.q)[at];
  if (p.q_dtype == PKV_DTYPE_F16) return __half2float(((const __half *)p.q)[at]);
  return __bfloat162float(((const __nv_bfloat16 *)p.q)[at]);
}

/* Two neighbouring elements of a query row as one operand word. */
template <typename MMA>
static __device__ __forceinline__ uint32_t pkv_q_word(const pkv_cuda_decode_params &p, int64_t at) {
  if (p.q_is_operand) return __ldg((const uint32_t *)((const uint16_t *)p.q + at));
  return MMA::pack(pkv_q_element(p, at), pkv_q_element(p, at + 1));
}

/*
 * Query rows of one segment as A fragments, rows m = tile * 16 + (lane / 4, + 8), m = t * group +
 * g.
 * Rows past the end are zero.
 */
template <typename KV, int HD>
static __device__ __forceinline__ void pkv_load_q(uint32_t q[HD / 16][4],
                                                  const pkv_cuda_decode_params &p, int row,
                                                  int head, int tile, int lane) {
  const int rows = p.q_len * p.group;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = tile * PKV_CUDA_TILE_ROWS + lane / 4 + half * 8;
    const int t = m / p.group, g = m - t * p.group;
    const int64_t at = ((int64_t)row * p.q_len + t) * p.q_token_stride +
                       (int64_t)(head * p.group + g) * p.q_head_stride;
#pragma unroll
    for (int k = 0; k < HD / 16; ++k)
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const int d = KV::q_pair(k, word, lane);
        q[k][half + 2 * word] =
            m < rows && d < p.cache.head_dim ? pkv_q_word<typename KV::mma>(p, at + d) : 0u;
      }
  }
}

/* One warp's running state over its slices: two query rows a lane (lane / 4 and that + 8). */
template <int HD> struct pkv_state {
  float m[2], l[2]; /* l: this lane's share, summed over 4 lanes when it is stored */
  float acc[HD / 8][4];
};

template <int HD> static __device__ __forceinline__ void pkv_state_reset(pkv_state<HD> &s) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.m[i] = -CUDART_INF_F;
    s.l[i] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < HD / 8; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      s.acc[n][j] = 0.0f;
}

/* Logits in base 2, those a query may not see set to -infinity. `scale` holds log2 e. */
static __device__ __forceinline__ void pkv_logits(float c[2][4], const pkv_walk &w,
                                                  const pkv_cuda_decode_params &p, float scale,
                                                  int base, int tile, int lane) {
  if (p.soft_cap > 0.0f) {
    const float in = scale / (p.soft_cap * PKV_LOG2_E), out = p.soft_cap * PKV_LOG2_E;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        c[n][j] = tanhf(c[n][j] * in) * out;
  } else {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        c[n][j] *= scale;
  }
  /* every query sees every key up to the first query's position; later keys and windows are
     masked */
  const int first_pos = w.len - p.q_len;
  if (base + PKV_SLICE_TOKENS - 1 <= first_pos && p.window == 0 && base + PKV_SLICE_TOKENS <= w.end)
    return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int pos = first_pos + (tile * PKV_CUDA_TILE_ROWS + lane / 4 + half * 8) / p.group;
    const int from = p.window > 0 ? pos - p.window + 1 : 0;
    const int until = min(pos + 1, min(w.end, w.len));
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int token = base + n * 8 + 2 * (lane & 3) + j;
        if (token < from || token >= until) c[n][half * 2 + j] = -CUDART_INF_F;
      }
  }
}

/* S = q K^T, online softmax, acc += P V over the slice in shared memory at `from`. */
template <typename KV, int HD>
static __device__ __forceinline__ void
pkv_slice_attend(pkv_state<HD> &s, const uint32_t q[HD / 16][4], const pkv_walk &w,
                 const pkv_cuda_decode_params &p, float scale, uint32_t from, int tile, int warp,
                 int lane) {
  typedef typename KV::mma MMA;
  const int base = w.at + warp * PKV_SLICE_TOKENS;
  if (base >= w.end) return;
  float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
  for (int k = 0; k < HD / 16; ++k) {
    uint32_t b[4];
    KV::load_k(b, from, k, lane);
    MMA::mma(c[0], q[k], b[0], b[1]);
    MMA::mma(c[1], q[k], b[2], b[3]);
  }
  pkv_logits(c, w, p, scale, base, tile, lane);
  uint32_t a[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top =
        fmaxf(fmaxf(c[0][half * 2], c[0][half * 2 + 1]), fmaxf(c[1][half * 2], c[1][half * 2 + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float m = fmaxf(s.m[half], top);
    const float ref = m == -CUDART_INF_F ? 0.0f : m;
    const float shrink = pkv_exp2(s.m[half] - ref);
    s.m[half] = m;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        c[n][half * 2 + j] = pkv_exp2(c[n][half * 2 + j] - ref);
    s.l[half] = s.l[half] * shrink +
                ((c[0][half * 2] + c[0][half * 2 + 1]) + (c[1][half * 2] + c[1][half * 2 + 1]));
    a[half] = MMA::pack(c[0][half * 2], c[0][half * 2 + 1]);
    a[half + 2] = MMA::pack(c[1][half * 2], c[1][half * 2 + 1]);
    if (__any_sync(0xffffffffu, shrink != 1.0f)) {
#pragma unroll
      for (int n = 0; n < HD / 8; ++n) {
        s.acc[n][half * 2] *= shrink;
        s.acc[n][half * 2 + 1] *= shrink;
      }
    }
  }
  constexpr int slice_bytes = PKV_SLICE_TOKENS * KV::chunks * 16;
#pragma unroll
  for (int n = 0; n < HD / 16; ++n) {
    uint32_t b[4];
    KV::load_v(b, from + slice_bytes, n, lane);
    MMA::mma(s.acc[2 * n], a, b[0], b[1]);
    MMA::mma(s.acc[2 * n + 1], a, b[2], b[3]);
  }
}

#endif
