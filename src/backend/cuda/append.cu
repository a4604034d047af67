/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New tokens' K and V, K turned by its rotary angles, converted to the cache's type and written to
 * their slots. Slots outside the pool, and -1, are skipped.
 *
 * One CTA of 256 threads a token; a thread takes runs of 8 elements of a head, in one access of 16
 * bytes (8 for e4m3) where addresses and strides allow it. Angles are computed once a token, in
 * double, and shared by its heads. 2 KV heads x head_dim elements are read and written; 1 KiB of
 * shared memory. The operations are those of the CPU's append, so that the bytes are the same but
 * where a cosine or sine lies on the edge between two floats.
 */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "backend/cuda/cuda_launch.h"

#define APPEND_THREADS 256
#define RUN            8 /* elements a thread takes together */

struct append_args {
  pkv_append_params p;
  int runs;                                         /* of a head */
  int k_in_wide, v_in_wide, k_out_wide, v_out_wide; /* whether a run is one access */
};

static __device__ __forceinline__ float load1(const void *base, int64_t at, pkv_dtype dtype) {
  if (dtype == PKV_DTYPE_F16) return __half2float(((const __half *)base)[at]);
  if (dtype == PKV_DTYPE_BF16) return __bfloat162float(((const __nv_bfloat16 *)base)[at]);
  return ((const float *)base)[at];
}

static __device__ __forceinline__ void load_run(float x[RUN], const void *base, int64_t at,
                                                pkv_dtype dtype, int wide) {
  if (!wide) {
#pragma unroll
    for (int i = 0; i < RUN; ++i)
      x[i] = load1(base, at + i, dtype);
    return;
  }
  if (dtype == PKV_DTYPE_F32) {
    const float4 *from = (const float4 *)((const float *)base + at);
    const float4 a = from[0], b = from[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    return;
  }
  const uint4 raw = *(const uint4 *)((const uint16_t *)base + at);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < RUN; ++i) {
    const uint16_t bits = (uint16_t)(words[i / 2] >> (16 * (i & 1)));
    x[i] = dtype == PKV_DTYPE_F16 ? __half2float(__ushort_as_half(bits))
                                  : __uint_as_float((uint32_t)bits << 16);
  }
}

static __device__ __forceinline__ uint16_t bits16(float x, pkv_dtype dtype) {
  return dtype == PKV_DTYPE_F16 ? __half_as_ushort(__float2half_rn(x))
                                : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

static __device__ __forceinline__ uint8_t bits8(float x) {
  return (uint8_t)__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

static __device__ __forceinline__ void store_narrow(void *base, int64_t at, const float x[RUN],
                                                    pkv_dtype dtype) {
#pragma unroll
  for (int i = 0; i < RUN; ++i) {
    if (dtype == PKV_DTYPE_F32)
      ((float *)base)[at + i] = x[i];
    else if (dtype == PKV_DTYPE_FP8_E4M3)
      ((uint8_t *)base)[at + i] = bits8(x[i]);
    else
      ((uint16_t *)base)[at + i] = bits16(x[i], dtype);
  }
}

static __device__ __forceinline__ void store_run(void *base, int64_t at, const float x[RUN],
                                                 pkv_dtype dtype, int wide) {
  if (!wide) {
    store_narrow(base, at, x, dtype);
  } else if (dtype == PKV_DTYPE_F32) {
    float4 *to = (float4 *)((float *)base + at);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else if (dtype == PKV_DTYPE_FP8_E4M3) {
    uint32_t w[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < RUN; ++i)
      w[i / 4] |= (uint32_t)bits8(x[i]) << (8 * (i & 3));
    *(uint2 *)((uint8_t *)base + at) = make_uint2(w[0], w[1]);
  } else {
    uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < RUN; ++i)
      w[i / 2] |= (uint32_t)bits16(x[i], dtype) << (16 * (i & 1));
    *(uint4 *)((uint16_t *)base + at) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

/* Cosine and sine of the token's angles. */
static __device__ __forceinline__ void angles(float *cosine, float *sine,
                                              const pkv_rope_params &rope, int64_t token) {
  const double position = (double)rope.positions[token];
  for (int j = threadIdx.x; j < rope.dims / 2; j += APPEND_THREADS) {
    double s, c;
    sincos(position *
               (rope.inverse_frequency ? (double)rope.inverse_frequency[j] : rope.frequency[j]),
           &s, &c);
    cosine[j] = (float)c;
    sine[j] = (float)s;
  }
  __syncthreads();
}

/* Elements d .. d + 7 of a head of K that starts at `head`. */
static __device__ __forceinline__ void turn_run(float x[RUN], const append_args &a, int64_t head,
                                                int d, const float *cosine, const float *sine) {
  const int dims = a.p.rope.dims, half = dims / 2;
  if (a.p.rope.adjacent) {
#pragma unroll
    for (int i = 0; i < RUN; i += 2)
      if (d + i < dims) pkv_rope_turn(&x[i], &x[i + 1], cosine[(d + i) / 2], sine[(d + i) / 2]);
    return;
  }
  float y[RUN]; /* what each element turns with */
  if (half % RUN == 0 && d < dims) {
    load_run(y, a.p.k, head + (d < half ? d + half : d - half), a.p.dtype, a.k_in_wide);
  } else {
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      const int e = d + i;
      y[i] = e < dims ? load1(a.p.k, head + (e < half ? e + half : e - half), a.p.dtype) : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < RUN; ++i) {
    const int e = d + i;
    if (e < half)
      pkv_rope_turn(&x[i], &y[i], cosine[e], sine[e]);
    else if (e < dims)
      pkv_rope_turn(&y[i], &x[i], cosine[e - half], sine[e - half]);
  }
}

static __global__ void __launch_bounds__(APPEND_THREADS)
    append(const __grid_constant__ append_args a) {
  __shared__ float cosine[PKV_ROPE_PAIRS], sine[PKV_ROPE_PAIRS];
  const pkv_append_params &p = a.p;
  const pkv_cache &c = p.cache;
  const int64_t token = blockIdx.x, slot = p.slots[token];
  const int64_t page = slot < 0 ? c.pages : slot / c.page_tokens;
  if (page >= c.pages) return;
  const int64_t in_page = slot - page * c.page_tokens;
  if (p.rope.dims > 0) angles(cosine, sine, p.rope, token);

  const int each = c.kv_heads * a.runs;
  for (int i = threadIdx.x; i < 2 * each; i += APPEND_THREADS) {
    const bool is_v = i >= each;
    const int run = is_v ? i - each : i, head = run / a.runs, d = (run - head * a.runs) * RUN;
    const int64_t from = is_v ? token * p.v_token_stride + head * p.v_head_stride
                              : token * p.k_token_stride + head * p.k_head_stride;
    float x[RUN];
    load_run(x, is_v ? p.v : p.k, from + d, p.dtype, is_v ? a.v_in_wide : a.k_in_wide);
    if (!is_v && d < p.rope.dims) turn_run(x, a, from, d, cosine, sine);
    if (c.dtype == PKV_DTYPE_FP8_E4M3) {
      const float *scales = is_v ? c.v_head_scale : c.k_head_scale;
      const float scale = (is_v ? c.v_scale : c.k_scale) * (scales ? scales[head] : 1.0f);
#pragma unroll
      for (int k = 0; k < RUN; ++k)
        x[k] = x[k] / scale;
    }
    const int64_t to =
        is_v ? page * c.v_page_stride + in_page * c.v_token_stride + head * c.v_head_stride
             : page * c.k_page_stride + in_page * c.k_token_stride + head * c.k_head_stride;
    store_run(is_v ? c.v : c.k, to + d, x, c.dtype, is_v ? a.v_out_wide : a.k_out_wide);
  }
}

/* Whether every run of 8 elements lies on a multiple of its access: 16 bytes, of e4m3 8. */
static int wide(const void *base, int64_t strides, pkv_dtype dtype) {
  const int64_t bytes = (int64_t)pkv_dtype_bytes(dtype), access = bytes == 1 ? 8 : 16;
  return (uintptr_t)base % (uintptr_t)access == 0 && strides * bytes % access == 0;
}

extern "C" cudaError_t pkv_cuda_launch_append(const pkv_append_params *p, cudaStream_t stream) {
  if (p->tokens == 0) return cudaSuccess;
  const pkv_cache *c = &p->cache;
  append_args a = {};
  a.p = *p;
  a.runs = c->head_dim / RUN;
  a.k_in_wide = wide(p->k, p->k_token_stride | p->k_head_stride, p->dtype);
  a.v_in_wide = wide(p->v, p->v_token_stride | p->v_head_stride, p->dtype);
  a.k_out_wide = wide(c->k, c->k_page_stride | c->k_token_stride | c->k_head_stride, c->dtype);
  a.v_out_wide = wide(c->v, c->v_page_stride | c->v_token_stride | c->v_head_stride, c->dtype);
  append<<<(unsigned)p->tokens, APPEND_THREADS, 0, stream>>>(a);
  return cudaGetLastError();
}

extern "C" cudaError_t pkv_cuda_kernels_load(void) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, append);
}
