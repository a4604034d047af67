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

#define PKV_THREADS (PKV_WARPS * 32)
#define PKV_LOG2_E  1.44269504f

template <int BYTES> struct pkv_bits;
template <> struct pkv_bits<1> { typedef uint8_t type; };
template <> struct pkv_bits<2> { typedef uint16_t type; };

/*
 * Page ids from the walk on, as the table has them: nothing waits for them before they are used.
 * Runs (16 tokens lie on one page): of this warp's slices of 32 steps, a lane each. Else: of the
 * tokens of two steps, 16 lanes each. False, and -1, where this lane has read none.
 */
static constexpr int pkv_run_steps = 32, pkv_token_steps = 2;

template <typename Walk, typename P>
static __device__ __forceinline__ bool pkv_read_pages(int &page, const Walk &w, const P &p,
                                                      int warp, int lane) {
  page = -1;
  if (w.row < 0) return false;
  const int first = w.at + w.share(warp);
  int token = pkv_runs(p) ? first + lane * w.step() : first + (lane >> 4) * w.step() + (lane & 15);
  if (token >= w.end) return false;
  if (pkv_window(p) > 0) { /* pages before every query's window may be gone */
    const int last = pkv_runs(p) ? token + PKV_SLICE_TOKENS - 1 : token;
    if (last < w.len - pkv_q_len(p) + 1 - pkv_window(p)) return false;
  }
  token = min(token, w.len - 1); /* padded: the row's last valid page again */
  const int index =
      pkv_runs(p) || p.page_shift >= 0 ? token >> p.page_shift : token / p.cache.page_tokens;
  if (index >= p.max_pages) { /* the row is longer than its table */
    atomicMax(p.fault, 1 + w.row);
    return false;
  }
  page = (int)pkv_load_ahead(p.block_table + (int64_t)w.row * p.block_table_stride + index);
  return true;
}

/* The id that was read, or -1 for one outside the pool. */
template <typename P>
static __device__ __forceinline__ int pkv_checked_page(int page, bool was_read, const P &p,
                                                       int row) {
  if (!was_read || (uint32_t)page < (uint64_t)p.cache.pages) return page;
  atomicMax(p.fault, 1 + row);
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

/*
 * A slice on one page: its address once, then fixed steps. `page` is that of every lane. Tokens
 * past the end are zero.
 */
template <typename KV, int HD, typename P>
static __device__ __forceinline__ void pkv_copy_run(const pkv_walk &w, const P &p, int page,
                                                    uint32_t to, int base, uint64_t policy,
                                                    int lane) {
  typedef typename KV::element element;
  constexpr int tokens_a_turn = 32 / KV::chunks, turns = PKV_SLICE_TOKENS * KV::chunks / 32;
  constexpr int slice_bytes = PKV_SLICE_TOKENS * KV::chunks * 16;
  const int in_page = base & (p.cache.page_tokens - 1);
  const int t = lane / KV::chunks, c = lane % KV::chunks;
  const int left = page < 0 ? 0 : w.end - base;
  page = max(page, 0);
  const element *k = (const element *)p.cache.k + (int64_t)page * p.cache.k_page_stride +
                     (in_page + t) * p.cache.k_token_stride + w.head * p.cache.k_head_stride +
                     c * (16 / KV::bytes);
  const element *v = (const element *)p.cache.v + (int64_t)page * p.cache.v_page_stride +
                     (in_page + t) * p.cache.v_token_stride + w.head * p.cache.v_head_stride +
                     c * (16 / KV::bytes);
#pragma unroll
  for (int i = 0; i < turns; ++i) {
    const int token = i * tokens_a_turn + t;
    const uint32_t at =
        to + (uint32_t)((token * KV::chunks + pkv_swizzle<KV::chunks>(token, c)) * 16);
    const int bytes = token < left ? 16 : 0;
    pkv_copy16(at, k + i * tokens_a_turn * p.cache.k_token_stride, bytes, policy);
    pkv_copy16(at + slice_bytes, v + i * tokens_a_turn * p.cache.v_token_stride, bytes, policy);
  }
}

/* Token by token, each on a page of its own; what lies past end or head dimension is zero. */
template <typename KV, typename P>
static __device__ __forceinline__ void pkv_copy_tokens(const pkv_walk &w, const P &p, int page,
                                                       uint32_t to, int base, uint64_t policy,
                                                       int lane) {
  typedef typename KV::element element;
  constexpr int tokens_a_turn = 32 / KV::chunks, turns = PKV_SLICE_TOKENS * KV::chunks / 32;
  constexpr int slice_bytes = PKV_SLICE_TOKENS * KV::chunks * 16;
  const int token = min(base + (lane & 15), w.len - 1), c = lane % KV::chunks;
  const int in_page =
      p.page_shift >= 0 ? token & (p.cache.page_tokens - 1) : token % p.cache.page_tokens;
  int64_t k_at = (int64_t)page * p.cache.k_page_stride + in_page * p.cache.k_token_stride +
                 w.head * p.cache.k_head_stride;
  const int64_t v_at = (int64_t)page * p.cache.v_page_stride + in_page * p.cache.v_token_stride +
                       w.head * p.cache.v_head_stride;
  if (page < 0 || base + (lane & 15) >= w.end) k_at = INT64_MIN;
  const int left = (p.cache.head_dim - c * (16 / KV::bytes)) * KV::bytes; /* may end inside */
  const int width = max(0, min(16, left)), d = width > 0 ? c * (16 / KV::bytes) : 0;
  const auto turn = [&](int i, auto &&copy) {
    const int t = i * tokens_a_turn + lane / KV::chunks;
    const int64_t k_from = __shfl_sync(0xffffffffu, k_at, t);
    const int64_t v_from = __shfl_sync(0xffffffffu, v_at, t);
    const bool there = k_from != INT64_MIN;
    const uint32_t at = to + (uint32_t)((t * KV::chunks + pkv_swizzle<KV::chunks>(t, c)) * 16);
    const int bytes = there ? width : 0;
    copy(at, (const element *)p.cache.k + (there ? k_from + d : 0), bytes);
    copy(at + slice_bytes, (const element *)p.cache.v + (there ? v_from + d : 0), bytes);
  };
  if (pkv_aligned(p)) {
#pragma unroll 4
    for (int i = 0; i < turns; ++i)
      turn(i, [&](uint32_t at, const element *from, int bytes) {
        pkv_copy16(at, from, bytes, policy);
      });
    return;
  }
#pragma unroll 1
  for (int i = 0; i < turns; ++i)
    turn(i, [](uint32_t at, const element *from, int bytes) {
      pkv_copy_elements(at, from, bytes / KV::bytes);
    });
}

/* Copies the slice at w to `to` and commits; `page` is its page, or this lane's token's. */
template <typename KV, int HD, typename Walk, typename P>
static __device__ __forceinline__ void pkv_copy_slice(const Walk &w, const P &p, int page,
                                                      uint32_t to, uint64_t policy, int warp,
                                                      int lane) {
  const int base = w.at + w.share(warp);
  if (w.row >= 0 && base < w.end) {
    if (pkv_runs(p) && (pkv_is_plain(p) || w.end <= w.len)) /* else padded */
      pkv_copy_run<KV, HD>(w, p, page, to, base, policy, lane);
    else
      pkv_copy_tokens<KV>(w, p, page, to, base, policy, lane);
  }
  pkv_copy_commit();
}

template <typename P>
static __device__ __forceinline__ float pkv_q_element(const P &p, int64_t at) {
  if (p.q_dtype == PKV_DTYPE_F32) return ((const float *)p.q)[at];
  if (p.q_dtype == PKV_DTYPE_F16) return __half2float(((const __half *)p.q)[at]);
  return __bfloat162float(((const __nv_bfloat16 *)p.q)[at]);
}

/* Two neighbouring elements of a query row as one operand word, converted. */
template <typename MMA, typename P>
static __device__ __noinline__ uint32_t pkv_q_convert(const P &p, int64_t at) {
  return MMA::pack(pkv_q_element(p, at), pkv_q_element(p, at + 1));
}

/* The query rows of one segment as B fragments, NT blocks of 8 rows. */
template <int HD, int NT> struct pkv_query { uint32_t word[NT][HD / 16][2]; };

/* Row m of the tile is query row tile * 8 NT + m = t * group + g. Rows past the end are zero. */
template <typename KV, int HD, int NT, typename P>
static __device__ __forceinline__ void pkv_load_q(pkv_query<HD, NT> &q, const P &p, int row,
                                                  int head, int tile, int lane) {
  const int rows = pkv_q_len(p) * p.group;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int m = (tile * NT + n) * 8 + lane / 4;
    const int t = pkv_q_len(p) == 1 ? 0 : m / p.group, g = m - t * p.group;
    const int64_t at = ((int64_t)row * pkv_q_len(p) + t) * p.q_token_stride +
                       (int64_t)(head * p.group + g) * p.q_head_stride;
#pragma unroll
    for (int k = 0; k < HD / 16; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = KV::q_pair(k, half, lane);
        uint32_t word = 0;
        if (m < rows && d < p.cache.head_dim) {
          if (pkv_q_is_operand(p))
            word = pkv_load_ahead((const uint16_t *)p.q + at + d);
          else
            word = pkv_q_convert<typename KV::mma>(p, at + d);
        }
        q.word[n][k][half] = word;
      }
  }
}

/*
 * A warp's running softmax over its slices. Lane holds query rows 8 n + 2 (lane & 3) + {0, 1} of
 * the tile, and of these head dimensions KV::dim_of. l is a lane's own share.
 */
template <int HD, int NT> struct pkv_state {
  float m[NT][2], l[NT][2];
  float acc[NT][HD / 16]
           [4]; /* (row 0, half 0), (row 1, half 0), (row 0, half 1), (row 1, half 1) */
};

template <int HD, int NT>
static __device__ __forceinline__ void pkv_state_reset(pkv_state<HD, NT> &s) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      s.m[n][j] = -CUDART_INF_F;
      s.l[n][j] = 0.0f;
    }
#pragma unroll
    for (int b = 0; b < HD / 16; ++b)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        s.acc[n][b][j] = 0.0f;
  }
}

/* Logits in base 2, those a query may not see set to -infinity. `scale` holds log2 e. */
template <int NT, typename P>
static __device__ __forceinline__ void pkv_logits(float c[NT][4], const pkv_walk &w, const P &p,
                                                  float scale, int base, int tile, int lane) {
  if (pkv_soft_cap(p) > 0.0f) {
    const float in = scale / (pkv_soft_cap(p) * PKV_LOG2_E), out = pkv_soft_cap(p) * PKV_LOG2_E;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        c[n][j] = tanhf(c[n][j] * in) * out;
  } else {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        c[n][j] *= scale;
  }
  /* every query sees every key up to the first query's position; later keys and windows are
     masked */
  const int first_pos = w.len - pkv_q_len(p);
  if (base + PKV_SLICE_TOKENS - 1 <= first_pos && pkv_window(p) == 0 &&
      base + PKV_SLICE_TOKENS <= w.end)
    return;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int t = pkv_q_len(p) == 1 ? 0 : ((tile * NT + n) * 8 + 2 * (lane & 3) + j) / p.group;
      const int pos = first_pos + t;
      const int from = pkv_window(p) > 0 ? pos - pkv_window(p) + 1 : 0;
      const int until = min(pos + 1, min(w.end, w.len));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = base + half * 8 + lane / 4;
        if (token < from || token >= until) c[n][half * 2 + j] = -CUDART_INF_F;
      }
    }
}

/*
 * Takes the logits of one slice into m and l; c becomes the weights. m is a reference, not the
 * maximum: it moves, and acc is scaled, only when a logit exceeds it by more than PKV_HEADROOM, so
 * that most slices need no exchange between lanes. Weights stay below 2^PKV_HEADROOM.
 */
#define PKV_HEADROOM 8.0f

template <int HD, int NT>
static __device__ __forceinline__ void pkv_softmax(pkv_state<HD, NT> &s, float c[NT][4]) {
  bool above = false;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      above |= c[n][j] > s.m[n][j & 1] + PKV_HEADROOM;
  if (__any_sync(0xffffffffu, above)) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = fmaxf(c[n][j], c[n][2 + j]);
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 4));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 8));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 16));
        const float m = fmaxf(s.m[n][j], top);
        const float shrink = pkv_exp2(s.m[n][j] - (m == -CUDART_INF_F ? 0.0f : m));
        s.m[n][j] = m;
        s.l[n][j] *= shrink;
#pragma unroll
        for (int b = 0; b < HD / 16; ++b)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            s.acc[n][b][half * 2 + j] *= shrink;
      }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float ref = s.m[n][j] == -CUDART_INF_F ? 0.0f : s.m[n][j];
      c[n][j] = pkv_exp2(c[n][j] - ref);
      c[n][2 + j] = pkv_exp2(c[n][2 + j] - ref);
      s.l[n][j] += c[n][j] + c[n][2 + j];
    }
}

/* S^T = K q^T, online softmax, acc^T += V^T P^T over the slice in shared memory at `from`. */
template <typename KV, int HD, int NT, typename Walk, typename P>
static __device__ __forceinline__ void
pkv_slice_attend(pkv_state<HD, NT> &s, const pkv_query<HD, NT> &q, const Walk &w, const P &p,
                 float scale, uint32_t from, int tile, int warp, int lane) {
  typedef typename KV::mma MMA;
  const int base = w.at + w.share(warp);
  if (base >= w.end) return;
  float c[NT][4] = {}, odd[NT][4] = {}; /* two chains: latency is what a slice waits for */
#pragma unroll
  for (int k = 0; k < HD / 16; ++k) {
    uint32_t a[4];
    KV::load_k(a, from, k, lane);
#pragma unroll
    for (int n = 0; n < NT; ++n)
      MMA::mma(k & 1 ? odd[n] : c[n], a, q.word[n][k][0], q.word[n][k][1]);
  }
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      c[n][j] += odd[n][j];
  pkv_logits<NT>(c, w, p, scale, base, tile, lane);
  pkv_softmax<HD, NT>(s, c);
  uint32_t weights[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      weights[n][half] = pkv_transpose8(MMA::pack(c[n][half * 2], c[n][half * 2 + 1]));
  constexpr int slice_bytes = PKV_SLICE_TOKENS * KV::chunks * 16;
#pragma unroll
  for (int b = 0; b < HD / 16; ++b) {
    uint32_t a[4];
    KV::load_v(a, from + slice_bytes, b, lane);
#pragma unroll
    for (int n = 0; n < NT; ++n)
      MMA::mma(s.acc[n][b], a, weights[n][0], weights[n][1]);
  }
}

#endif
