/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Route shared, one warpgroup's arithmetic in the nodes' kernel (node.cuh): 64 query rows against
 * tiles of 128 tokens. Products are issued here and waited for by the caller, and no arithmetic on
 * their registers may move across: the compiler serialises all of them where it does.
 */
#ifndef PKV_CUDA_NODE_STATE_CUH
#define PKV_CUDA_NODE_STATE_CUH

#include "backend/cuda/node_feed.cuh"

#ifdef PKV_HAVE_WGMMA
template <typename MMA> struct pkv_wgmma;
#define PKV_WGMMA_OF(type, space)                                                                  \
  template <> struct pkv_wgmma<type> {                                                             \
    static __device__ __forceinline__ void logits(float *d, uint64_t a, uint64_t b, int keep) {    \
      space::pkv_wgmma_ss_128(d, a, b, keep);                                                      \
    }                                                                                              \
    template <int HD>                                                                              \
    static __device__ __forceinline__ void values(float *d, const uint32_t *a, uint64_t b) {       \
      if constexpr (HD > 64)                                                                       \
        space::pkv_wgmma_rs_128(d, a, b);                                                          \
      else                                                                                         \
        space::pkv_wgmma_rs_64(d, a, b);                                                           \
    }                                                                                              \
  };
PKV_WGMMA_OF(pkv_half_type, pkv_wgmma_f16)
PKV_WGMMA_OF(pkv_bf16_type, pkv_wgmma_bf16)

/* The registers are settled here: no arithmetic on them moves across. */
template <int N> static __device__ __forceinline__ void pkv_node_settle(float *x) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> static __device__ __forceinline__ void pkv_node_settle(uint32_t *x) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+r"(x[i])::"memory");
}

/* One warpgroup's softmax: this thread's rows r = lane / 4 and r + 8 of its warp's 16. */
template <typename MMA, int HD> struct pkv_node_state {
  typedef pkv_node_config<HD> C;
  static constexpr int logits = C::tokens / 2;
  float m[2], l[2];
  float acc[HD / 2];
  float logit[logits];
  uint32_t weights[logits / 2];
  int from[2]; /* the first token that each row may see, with a window */

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < HD / 2; ++i)
      acc[i] = 0.0f;
    m[0] = m[1] = -CUDART_INF_F;
    l[0] = l[1] = 0.0f;
  }
  /* q, k, v: pkv_wgmma_matrix of the warpgroup's query rows and of a tile. */
  __device__ __forceinline__ void multiply_keys(uint64_t q, uint64_t k) {
    pkv_node_settle<logits>(logit);
    pkv_wgmma_fence();
#pragma unroll
    for (int i = 0; i < HD / 16; ++i)
      pkv_wgmma<MMA>::logits(logit, q + ((i / 4 * C::q_block + i % 4 * 32) >> 4),
                             k + ((i / 4 * C::kv_block + i % 4 * 32) >> 4), i > 0);
    pkv_wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values(uint64_t v) {
    pkv_node_settle<HD / 2>(acc);
    pkv_node_settle<logits / 2>(weights);
    pkv_wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::tokens / 16; ++i)
      pkv_wgmma<MMA>::template values<HD>(acc, weights + 4 * i, v + (i * 2048 >> 4));
    pkv_wgmma_commit();
  }
  template <int N> __device__ __forceinline__ void wait_logits() {
    pkv_wgmma_wait<N>();
    pkv_node_settle<logits>(logit);
  }
  __device__ __forceinline__ void wait_values() {
    pkv_wgmma_wait<0>();
    pkv_node_settle<HD / 2>(acc);
    pkv_node_settle<logits / 2>(weights);
  }
  /* Scale and cap; logits are then in base 2. tanh x = 1 - 2 / (1 + exp 2x). */
  __device__ __forceinline__ void apply_cap(float scale, float cap) {
    const float top = cap * PKV_LOG2_E, inside = scale * 2.0f / cap;
#pragma unroll
    for (int i = 0; i < logits; ++i)
      logit[i] = fmaf(top, -__fdividef(2.0f, 1.0f + pkv_exp2(logit[i] * inside)), top);
  }
  /* Tokens before a row's window, and those from `half` of the tile on. */
  __device__ __forceinline__ void mask(int token, int half, int lane) {
#pragma unroll
    for (int i = 0; i < logits; ++i) {
      const int at = i / 4 * 8 + 2 * (lane & 3) + (i & 1);
      if (at >= half || token + at < from[i >> 1 & 1]) logit[i] = -CUDART_INF_F;
    }
  }
  /* logits to weights, still in f32; shrink: what acc has to be multiplied by, once it is still. */
  __device__ __forceinline__ bool softmax(float shrink[2], float scale) {
    float top[2] = {logit[0], logit[2]};
#pragma unroll
    for (int i = 0; i < logits; ++i)
      top[i >> 1 & 1] = fmaxf(top[i >> 1 & 1], logit[i]);
    top[0] *= scale;
    top[1] *= scale;
    const bool grows =
        __any_sync(0xffffffffu, top[0] > m[0] + PKV_HEADROOM || top[1] > m[1] + PKV_HEADROOM);
    shrink[0] = shrink[1] = 1.0f;
    if (grows)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float high = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], 1));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
        high = fmaxf(high, m[j]);
        shrink[j] = pkv_exp2(m[j] - (high == -CUDART_INF_F ? 0.0f : high));
        m[j] = high;
        l[j] *= shrink[j];
      }
    const float less[2] = {m[0] == -CUDART_INF_F ? 0.0f : -m[0],
                           m[1] == -CUDART_INF_F ? 0.0f : -m[1]};
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < logits; ++i) {
      logit[i] = pkv_exp2(fmaf(logit[i], scale, less[i >> 1 & 1]));
      sum[i & 3] += logit[i];
    }
    l[0] += sum[0] + sum[1];
    l[1] += sum[2] + sum[3];
    return grows;
  }
  /* The assembler would wait for the product first and leave the softmax for later: this store,
     which never happens (sums are not negative), has to come before the wait. */
  __device__ __forceinline__ void stay_before_wait(uint32_t at) const {
    asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n"
                 "@p st.shared.f32 [%1], %0;\n}\n" ::"f"(fminf(l[0], l[1])),
                 "r"(at)
                 : "memory");
  }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < logits / 2; ++i)
      weights[i] = MMA::pack(logit[2 * i], logit[2 * i + 1]);
  }
  __device__ __forceinline__ void rescale(const float shrink[2]) {
#pragma unroll
    for (int i = 0; i < HD / 2; ++i)
      acc[i] *= shrink[i >> 1 & 1];
  }
  /* The sums over the four threads of a row. */
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      l[j] += __shfl_xor_sync(0xffffffffu, l[j], 1);
      l[j] += __shfl_xor_sync(0xffffffffu, l[j], 2);
    }
  }
  /* Hands the state, added up, over in shared memory: acc by thread, sums by row. */
  __device__ __forceinline__ void hand_over(float *to, float *sums, int thread, int r) const {
#pragma unroll
    for (int i = 0; i < HD / 2; ++i)
      to[i * 128 + thread] = acc[i];
    if ((thread & 3) == 0)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[r + 8 * j] = m[j];
        sums[64 + r + 8 * j] = l[j];
      }
  }
  __device__ __forceinline__ void take_over(const float *from_there, const float *sums, int thread,
                                            int r) {
    float mine[2], other[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float m2 = sums[r + 8 * j], high = fmaxf(m[j], m2);
      const float base = high == -CUDART_INF_F ? 0.0f : high;
      mine[j] = pkv_exp2(m[j] - base);
      other[j] = pkv_exp2(m2 - base);
      m[j] = high;
      l[j] = l[j] * mine[j] + sums[64 + r + 8 * j] * other[j];
    }
#pragma unroll
    for (int i = 0; i < HD / 2; ++i)
      acc[i] = acc[i] * mine[i >> 1 & 1] + from_there[i * 128 + thread] * other[i >> 1 & 1];
  }
  /* The state of query rows r and r + 8 of the piece, which has `rows`, to its slot rows. */
  __device__ __forceinline__ void store(float *slot, int r, int rows, int lane) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (r + 8 * j >= rows) continue;
      float *to = slot + (int64_t)(r + 8 * j) * pkv_slot_row<HD>::floats;
#pragma unroll
      for (int b = 0; b < HD / 8; ++b)
        *(float2 *)(to + b * 8 + 2 * (lane & 3)) =
            make_float2(acc[4 * b + 2 * j], acc[4 * b + 2 * j + 1]);
      if ((lane & 3) == 0) *(float4 *)(to + HD) = make_float4(m[j], l[j], 0.0f, 0.0f);
    }
  }
};
#endif

#endif
