/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From packed codes (dense_pack.h) to f16 pairs: a mask and an or put a pair of codes into the low
 * bits of 1024 (or, sixteenfold, of the nibbles above), one exact operation takes the 1024 and the
 * zero point away, one multiplies by d and adds m. Scales of super-blocks are rounded to f16.
 */
#ifndef PKV_CUDA_DENSE_PACKED_CUH
#define PKV_CUDA_DENSE_PACKED_CUH

#include "backend/cuda/dense_pack.h"
#include "backend/cuda/mma.cuh"

template <int TYPE> struct pkv_pack_of;
#define PKV_PACK_STRUCT(name, cell, c, h, s, t, block, bytes)                                      \
  template <> struct pkv_pack_of<PKV_WTYPE_##name> {                                               \
    static constexpr int cell_k = cell, codes = c, high = h, scales = s, tail = t,                 \
                         halves = cell / PKV_PACK_HALF, half_bytes = PKV_PACK_HALF_BYTES(c, h, s), \
                         cell_bytes = PKV_PACK_CELL(cell, c, h, s, t);                             \
  };
PKV_PACK_MAP(PKV_PACK_STRUCT)
#undef PKV_PACK_STRUCT

static __device__ __forceinline__ __half2 pkv_as_half2(uint32_t x) {
  return *reinterpret_cast<const __half2 *>(&x);
}
static __device__ __forceinline__ uint32_t pkv_half2_bits(__half2 x) {
  return *reinterpret_cast<const uint32_t *>(&x);
}
/* Bits moved from place FROM to place TO of the word. */
template <int FROM, int TO> static __device__ __forceinline__ uint32_t pkv_move_bits(uint32_t x) {
  if constexpr (FROM >= TO)
    return x >> (FROM - TO);
  else
    return x << (TO - FROM);
}

/* What a lane has of 128 elements of a strip, as it lies there: 32 elements of row lane / 4. */
template <int TYPE> struct pkv_packed_bytes {
  typedef pkv_pack_of<TYPE> L;
  uint4 code[L::codes / 16];
  uint32_t high[L::high > 0 ? L::high / 4 : 1], own, row; /* scales of its own, of its row */

  /* Read once, from memory. */
  __device__ __forceinline__ void fetch(const unsigned char *half, const unsigned char *tail,
                                        int lane) {
    const unsigned char *highs = half + PKV_PACK_LANES * L::codes;
#pragma unroll
    for (int i = 0; i < L::codes / 16; ++i)
      code[i] = __ldcs((const uint4 *)(half + (i * PKV_PACK_LANES + lane) * 16));
    if constexpr (L::high == 4) high[0] = __ldcs((const uint32_t *)(highs + lane * 4));
    if constexpr (L::high == 8) {
      const uint2 v = __ldcs((const uint2 *)(highs + lane * 8));
      high[0] = v.x, high[1] = v.y;
    }
    const unsigned char *scale = highs + PKV_PACK_LANES * L::high + lane * L::scales;
    if constexpr (L::scales == 4)
      own = __ldcs((const uint32_t *)scale);
    else
      own = __ldcs((const uint16_t *)scale);
    if constexpr (L::tail == 32) row = __ldcs((const uint32_t *)(tail + lane / 4 * 4));
    if constexpr (L::tail == 16) row = __ldcs((const uint16_t *)(tail + lane / 4 * 2));
  }
};

/* The same, ready to be multiplied. */
template <int TYPE> struct pkv_packed {
  typedef pkv_pack_of<TYPE> L;
  static constexpr bool bytes = L::codes == 32, super = L::tail > 0,
                        pairs_of_scales = L::tail == 16;
  static constexpr bool with_m = L::scales == 4 || L::tail == 32;
  static constexpr int zero = TYPE == PKV_WTYPE_Q4_0   ? 8
                              : TYPE == PKV_WTYPE_Q5_0 ? 16
                              : TYPE == PKV_WTYPE_Q6_K ? 32
                              : TYPE == PKV_WTYPE_Q8_0 ? 128
                                                       : 0;
  uint32_t code[4], high[L::high > 0 ? L::high / 4 : 1];
  __half2 d[2], m; /* d: of the first and the last 16 elements */

  /* Codes of 8 bits come in two goes: elements 0 .. 15, then the others. */
  __device__ __forceinline__ void take_codes(const pkv_packed_bytes<TYPE> &b, int plane) {
    const uint4 v = b.code[plane];
    code[0] = v.x, code[1] = v.y, code[2] = v.z, code[3] = v.w;
  }
  __device__ __forceinline__ void take(const pkv_packed_bytes<TYPE> &b) {
    take_codes(b, 0);
    if constexpr (L::high >= 4) high[0] = b.high[0];
    if constexpr (L::high == 8) high[1] = b.high[1];
    take_scales(b.own, b.row);
  }
  __device__ __forceinline__ void take_scales(uint32_t own, uint32_t row) {
    if constexpr (L::scales == 4) {
      const __half2 both = pkv_as_half2(own);
      d[0] = d[1] = __low2half2(both);
      m = __high2half2(both);
    } else if constexpr (!super) {
      d[0] = d[1] = __low2half2(pkv_as_half2(own));
    } else {
      const __half2 factors = pkv_as_half2(__byte_perm(own, 0x64646464, 0x4140));
      if constexpr (pairs_of_scales) {
        const __half2 both =
            __hmul2(__hsub2(factors, __float2half2_rn(1152.0f)), __low2half2(pkv_as_half2(row)));
        d[0] = __low2half2(both);
        d[1] = __high2half2(both);
      } else {
        const __half2 both =
            __hmul2(__hsub2(factors, __float2half2_rn(1024.0f)), pkv_as_half2(row));
        d[0] = d[1] = __low2half2(both);
        m = __high2half2(both);
      }
    }
  }
  /* The high bits of pair I, at the place that its nibbles leave free. */
  template <int I, int ODD> __device__ __forceinline__ uint32_t high_bits() const {
    constexpr int to = ODD ? 8 : 4;
    if constexpr (L::high == 4)
      return pkv_move_bits<I, to>(high[0]) & (0x00010001u << to);
    else if constexpr (L::high == 8)
      return pkv_move_bits<2 * (I & 7), to>(high[I / 8]) & (0x00030003u << to);
    else
      return 0;
  }
  /* Elements 8 J + 2 P and the next. */
  template <int J, int P> __device__ __forceinline__ uint32_t pair() const {
    __half2 q;
    if constexpr (bytes) {
      const uint32_t t =
          __byte_perm(code[2 * (J & 1) + P / 2], 0x64646464, P & 1 ? 0x4342 : 0x4140);
      q = __hsub2(pkv_as_half2(t), __float2half2_rn(1024.0f + zero));
    } else {
      const uint32_t w = P >= 2 ? code[J] >> 8 : code[J];
      constexpr int odd = P & 1;
      const uint32_t t =
          (w & (odd ? 0x00f000f0u : 0x000f000fu)) | high_bits<4 * J + P, odd>() | 0x64006400u;
      if constexpr (odd)
        q = __hfma2(pkv_as_half2(t), __float2half2_rn(0.0625f), __float2half2_rn(-64.0f - zero));
      else
        q = __hsub2(pkv_as_half2(t), __float2half2_rn(1024.0f + zero));
    }
    if constexpr (with_m)
      return pkv_half2_bits(__hfma2(q, d[0], m));
    else
      return pkv_half2_bits(__hmul2(q, d[J / 2]));
  }
  /* Elements 8 J .. 8 J + 7. */
  template <int J> __device__ __forceinline__ void eight(uint32_t out[4]) const {
    out[0] = pair<J, 0>();
    out[1] = pair<J, 1>();
    out[2] = pair<J, 2>();
    out[3] = pair<J, 3>();
  }
};

#endif
