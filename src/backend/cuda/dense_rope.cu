/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a fused product to attention: biases, norms of single heads, rotation; q stays in its place,
 * k and v go to their slots.
 *
 * A CTA of 8 warps takes 8 heads of one token, a warp one head: lane l has elements 2 l, 2 l + 1,
 * 64 + 2 l, ... Angles are reduced to +-pi in double before a float sine is taken: at position
 * 100,000 a float product would be off by 0.004. They are computed before the wait for the kernel
 * ahead, which never writes positions. Reads and writes 2 bytes an element; 9 KiB of shared memory.
 */
#include <cuda_fp8.h>

#include "backend/cuda/dense_common.cuh"

#define HEADS 8 /* of a CTA */
#define PAIRS 4 /* of a lane: a head has 256 elements at most */

struct head_place {
  bool is_q, is_v;
  int index; /* within q, k or v */
};

static __device__ __forceinline__ head_place place_of(const pkv_dense_rope_params &p, int head) {
  if (head < p.query_heads) return {true, false, head};
  const int kv = head - p.query_heads;
  return {false, kv >= p.kv_heads, kv >= p.kv_heads ? kv - p.kv_heads : kv};
}

static __device__ __forceinline__ void angles(float *cosine, float *sine,
                                              const pkv_dense_rope_params &p, int64_t token) {
  const double turn = 6.283185307179586476925;
  const double position = (double)p.positions[token];
  for (int j = (int)threadIdx.x; j < p.dims / 2; j += 32 * HEADS) {
    double a = position * p.frequency[j];
    a -= rint(a / turn) * turn;
    float s, c;
    sincosf((float)a, &s, &c);
    cosine[j] = p.length * c;
    sine[j] = p.length * s;
  }
}

/* The head's elements with bias and norm; shared memory [head_dim] of the warp. */
static __device__ __forceinline__ void load_head(float *to, const pkv_dense_rope_params &p,
                                                 int64_t from, int head, const head_place &place,
                                                 int lane) {
  float2 x[PAIRS];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int e = 2 * lane + 64 * i;
    if (e >= p.head_dim) continue;
    x[i] = dense_load2(p.qkv, from + e, p.act);
    if (p.bias) {
      const float2 b = *(const float2 *)(p.bias + (int64_t)head * p.head_dim + e);
      x[i] = make_float2(x[i].x + b.x, x[i].y + b.y);
    }
    sum += x[i].x * x[i].x + x[i].y * x[i].y;
  }
  const float *weight = place.is_v ? nullptr : place.is_q ? p.q_norm : p.k_norm;
  const float scale = weight ? rsqrtf(dense_warp_sum(sum) / (float)p.head_dim + p.eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int e = 2 * lane + 64 * i;
    if (e >= p.head_dim) continue;
    to[e] = weight ? x[i].x * scale * weight[e] : x[i].x;
    to[e + 1] = weight ? x[i].y * scale * weight[e + 1] : x[i].y;
  }
}

/* Element e of the head after its rotation. */
static __device__ __forceinline__ float turned(const pkv_dense_rope_params &p, const float *x,
                                               const float *cosine, const float *sine, int e) {
  if (e >= p.dims) return x[e];
  const int half = p.dims / 2;
  const int j = p.adjacent ? e / 2 : (e < half ? e : e - half);
  const int first = p.adjacent ? 2 * j : j, second = p.adjacent ? 2 * j + 1 : j + half;
  float a = x[first], b = x[second];
  pkv_rope_turn(&a, &b, cosine[j], sine[j]);
  return e == first ? a : b;
}

static __device__ __forceinline__ void store_cached(void *base, int64_t at, float2 v,
                                                    pkv_dtype dtype) {
  if (dtype == PKV_DTYPE_F16) {
    dense_pair<__half>::store((__half *)base + at, v);
  } else if (dtype == PKV_DTYPE_BF16) {
    dense_pair<__nv_bfloat16>::store((__nv_bfloat16 *)base + at, v);
  } else {
    uint8_t *to = (uint8_t *)base + at;
    to[0] = (uint8_t)__nv_cvt_float_to_fp8(v.x, __NV_SATFINITE, __NV_E4M3);
    to[1] = (uint8_t)__nv_cvt_float_to_fp8(v.y, __NV_SATFINITE, __NV_E4M3);
  }
}

/* Where the head's element 0 goes in the cache, or -1. */
static __device__ __forceinline__ int64_t cached_at(const pkv_cache &c, int64_t slot,
                                                    const head_place &place) {
  if (slot < 0 || slot / c.page_tokens >= c.pages) return -1;
  const int64_t page = slot / c.page_tokens, token = slot - page * c.page_tokens;
  return place.is_v
             ? page * c.v_page_stride + token * c.v_token_stride + place.index * c.v_head_stride
             : page * c.k_page_stride + token * c.k_token_stride + place.index * c.k_head_stride;
}

static __device__ __forceinline__ float scale_of(const pkv_cache &c, const head_place &place) {
  if (c.dtype != PKV_DTYPE_FP8_E4M3) return 1.0f;
  const float *heads = place.is_v ? c.v_head_scale : c.k_head_scale;
  return (place.is_v ? c.v_scale : c.k_scale) * (heads ? heads[place.index] : 1.0f);
}

static __global__ void __launch_bounds__(32 * HEADS)
    dense_rope(const __grid_constant__ pkv_dense_rope_params p) {
  __shared__ float cosine[PKV_ROPE_PAIRS], sine[PKV_ROPE_PAIRS];
  __shared__ float heads[HEADS][2 * PKV_ROPE_PAIRS];
  const int64_t token = blockIdx.x;
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int head = (int)blockIdx.y * HEADS + warp;
  dense_release();
  angles(cosine, sine, p, token);
  __syncthreads();
  dense_wait();
  if (head >= p.query_heads + 2 * p.kv_heads) return;
  const head_place place = place_of(p, head);
  const int64_t row = token * p.stride + (int64_t)head * p.head_dim;
  float *x = heads[warp];
  load_head(x, p, row, head, place, lane);
  __syncwarp();
  const int64_t at = place.is_q ? 0 : cached_at(p.cache, p.slots[token], place);
  if (at < 0) return;
  const float divisor = place.is_q ? 1.0f : scale_of(p.cache, place);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int e = 2 * lane + 64 * i;
    if (e >= p.head_dim) continue;
    float2 v = make_float2(x[e], x[e + 1]);
    if (!place.is_v)
      v = make_float2(turned(p, x, cosine, sine, e), turned(p, x, cosine, sine, e + 1));
    if (place.is_q)
      dense_store2(p.qkv, row + e, v, p.act);
    else
      store_cached(place.is_v ? p.cache.v : p.cache.k, at + e,
                   make_float2(v.x / divisor, v.y / divisor), p.cache.dtype);
  }
}

extern "C" cudaError_t pkv_dense_launch_rope(const pkv_dense_rope_params *p, int32_t dependent,
                                             cudaStream_t stream) {
  if (p->m == 0) return cudaSuccess;
  const int heads = p->query_heads + 2 * p->kv_heads;
  pkv_dense_rope_params copy = *p;
  void *arguments[] = {&copy};
  return pkv_cuda_launch_kernel((const void *)dense_rope,
                                dim3((unsigned)p->m, (unsigned)((heads + HEADS - 1) / HEADS)),
                                32 * HEADS, 0, dependent != 0, arguments, stream);
}
