/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NEON of AArch64: eight lanes as two registers, so that lanes, sums and tiles are those of AVX2.
 * There are 32 registers of half the width: the same kernels fit. Only what every AArch64
 * processor has: conversions from and to f16 are, arithmetic in it is not.
 */
#include "backend/cpu/cpu_isa.h"

#if defined(__aarch64__)

#include <arm_neon.h>
#include <string.h>

#define VL         8
#define ATTEND_OPS pkv_cpu_neon_ops
#define ATTEND_ISA PKV_ISA_NEON
/* e4m3 bits moved into an f16 are 2^8 too small. */
#define VF_FP8_FACTOR   256.0f
#define QK_TOKENS(rows) ((rows) == 4 ? 2 : 4)
#define PV_CHUNKS(rows) ((rows) == 4 ? 2 : (rows) == 1 ? 8 : 4)
#define WIDE_CHUNKS     2
#define PANEL_VECTORS   3
#define WIDE_FROM       16
#define WIDE_TOKENS     4
#define UNROLL          _Pragma("GCC unroll 8")

typedef struct vf {
  float32x4_t a, b; /* lanes 0 .. 3, 4 .. 7 */
} vf;

#define BOTH(one, two) ((vf){(one), (two)})

static inline vf vf_set1(float x) {
  return BOTH(vdupq_n_f32(x), vdupq_n_f32(x));
}
static inline vf vf_zero(void) {
  return vf_set1(0.0f);
}
static inline vf vf_load(const float *p) {
  return BOTH(vld1q_f32(p), vld1q_f32(p + 4));
}
static inline void vf_store(float *p, vf x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
}
static inline vf vf_add(vf x, vf y) {
  return BOTH(vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b));
}
static inline vf vf_sub(vf x, vf y) {
  return BOTH(vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b));
}
static inline vf vf_mul(vf x, vf y) {
  return BOTH(vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b));
}
static inline vf vf_div(vf x, vf y) {
  return BOTH(vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b));
}
static inline vf vf_fma(vf x, vf y, vf z) {
  return BOTH(vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b));
}
/* Not vmaxq_f32, which keeps NaN of either side. */
static inline vf vf_max(vf x, vf y) {
  return BOTH(vbslq_f32(vcgtq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcgtq_f32(x.b, y.b), x.b, y.b));
}
static inline vf vf_abs(vf x) {
  return BOTH(vabsq_f32(x.a), vabsq_f32(x.b));
}
static inline float32x4_t with_sign(float32x4_t x, float32x4_t sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000u), sign, x);
}
static inline vf vf_copysign(vf x, vf sign) {
  return BOTH(with_sign(x.a, sign.a), with_sign(x.b, sign.b));
}
static inline float32x4_t to_exponent(float32x4_t x) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 23));
}
static inline vf vf_exponent(vf t) {
  return BOTH(to_exponent(t.a), to_exponent(t.b));
}

/* Lanes of four vectors by adjacent pairs, then halves: ((0+1)+(2+3)) + ((4+5)+(6+7)). */
static inline float32x4_t sum4(vf x, vf y, vf z, vf w) {
  const float32x4_t low = vpaddq_f32(vpaddq_f32(x.a, y.a), vpaddq_f32(z.a, w.a));
  const float32x4_t high = vpaddq_f32(vpaddq_f32(x.b, y.b), vpaddq_f32(z.b, w.b));
  return vaddq_f32(low, high);
}
static inline void vf_sum4(float *out, vf x, vf y, vf z, vf w) {
  vst1q_f32(out, sum4(x, y, z, w));
}
static inline float vf_sum(vf x) {
  return vgetq_lane_f32(sum4(x, x, x, x), 0);
}
static inline float vf_top(vf x) {
  return vmaxnmvq_f32(vmaxnmq_f32(x.a, x.b));
}

static inline vf widen_f16(uint16x8_t h) {
  const float16x8_t f = vreinterpretq_f16_u16(h);
  return BOTH(vcvt_f32_f16(vget_low_f16(f)), vcvt_high_f32_f16(f));
}

static inline vf vf_kv(pkv_dtype dtype, const unsigned char *p) {
  if (dtype == PKV_DTYPE_F32) {
    const uint8x16_t a = vld1q_u8(p), b = vld1q_u8(p + 16);
    return BOTH(vreinterpretq_f32_u8(a), vreinterpretq_f32_u8(b));
  }
  if (dtype == PKV_DTYPE_FP8_E4M3) {
    /* e4m3 through f16: sign to the top, the rest 7 bits up; 0x7f and 0xff become NaN. */
    const uint16x8_t x = vmovl_u8(vld1_u8(p));
    const uint16x8_t rest = vandq_u16(x, vdupq_n_u16(0x7f));
    const uint16x8_t sign = vshlq_n_u16(vbicq_u16(x, vdupq_n_u16(0x7f)), 8);
    const uint16x8_t nan = vceqq_u16(rest, vdupq_n_u16(0x7f));
    return widen_f16(vorrq_u16(vorrq_u16(vshlq_n_u16(rest, 7), sign), nan));
  }
  const uint16x8_t h = vreinterpretq_u16_u8(vld1q_u8(p));
  if (dtype == PKV_DTYPE_F16) return widen_f16(h);
  return BOTH(vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
              vreinterpretq_f32_u32(vshll_high_n_u16(h, 16)));
}

static inline uint16x4_t bf16_of(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, quiet), 16);
}

/* f32, f16 and bf16, eight at a time; returns how many were written. */
static inline int64_t vf_narrow(void *dst, pkv_dtype dtype, const float *src, int64_t count,
                                float divisor) {
  int64_t i = 0;
  unsigned char *out = dst;
  const vf by = vf_set1(divisor);
  for (; i + VL <= count; i += VL) {
    vf x = vf_load(src + i);
    if (divisor != 1.0f) x = vf_div(x, by);
    if (dtype == PKV_DTYPE_F32) {
      vst1q_u8(out + i * 4, vreinterpretq_u8_f32(x.a));
      vst1q_u8(out + i * 4 + 16, vreinterpretq_u8_f32(x.b));
    }
    if (dtype == PKV_DTYPE_F16)
      vst1q_u8(out + i * 2, vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
    if (dtype == PKV_DTYPE_BF16)
      vst1q_u8(out + i * 2, vreinterpretq_u8_u16(vcombine_u16(bf16_of(x.a), bf16_of(x.b))));
  }
  return i;
}

static inline uint32_t unequal4(float32x4_t x, float32x4_t y) {
  static const uint32_t bits[4] = {1, 2, 4, 8};
  return vaddvq_u32(vbicq_u32(vld1q_u32(bits), vceqq_f32(x, y)));
}
static inline uint32_t vf_unequal(vf x, vf y) {
  return unequal4(x.a, y.a) | unequal4(x.b, y.b) << 4;
}

static inline void transpose4(float32x4_t out[4], const float *const rows[4], int32_t at) {
  float64x2_t t[4];
  for (int i = 0; i < 4; i += 2) {
    const float32x4_t x = vld1q_f32(rows[i] + at), y = vld1q_f32(rows[i + 1] + at);
    t[i] = vreinterpretq_f64_f32(vtrn1q_f32(x, y));
    t[i + 1] = vreinterpretq_f64_f32(vtrn2q_f32(x, y));
  }
  out[0] = vreinterpretq_f32_f64(vtrn1q_f64(t[0], t[2]));
  out[1] = vreinterpretq_f32_f64(vtrn1q_f64(t[1], t[3]));
  out[2] = vreinterpretq_f32_f64(vtrn2q_f64(t[0], t[2]));
  out[3] = vreinterpretq_f32_f64(vtrn2q_f64(t[1], t[3]));
}
static inline void vf_transpose4(vf out[4], const float *const rows[VL], int32_t at) {
  float32x4_t low[4], high[4];
  transpose4(low, rows, at);
  transpose4(high, rows + 4, at);
  for (int i = 0; i < 4; i++)
    out[i] = BOTH(low[i], high[i]);
}

#define vf_prefetch(p) __builtin_prefetch(p)

#include "backend/cpu/attend_impl.h"

#endif
