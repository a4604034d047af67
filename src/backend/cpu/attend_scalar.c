/* SPDX-License-Identifier: Apache-2.0 */
/* SCALAR: baseline C, eight lanes as a plain array; runs on any machine. */
#include "backend/cpu/cpu_isa.h"

#include <math.h>
#include <string.h>

#include "base/dtype.h"

#if defined(__AVX__)
#error "attend_scalar.c is built for the baseline"
#endif

#define VL              8
#define ATTEND_OPS      pkv_cpu_scalar_ops
#define ATTEND_ISA      PKV_ISA_SCALAR
#define VF_FP8_FACTOR   1.0f
#define QK_TOKENS(rows) 1
#define PV_CHUNKS(rows) 1
#define UNROLL

typedef struct vf {
  float x[VL];
} vf;

#define LANES(expression)                                                                          \
  do {                                                                                             \
    vf y;                                                                                          \
    for (int i = 0; i < VL; i++)                                                                   \
      y.x[i] = (expression);                                                                       \
    return y;                                                                                      \
  } while (0)

static inline vf vf_set1(float a) {
  LANES(a);
}
static inline vf vf_zero(void) {
  LANES(0.0f);
}
static inline vf vf_load(const float *p) {
  LANES(p[i]);
}
static inline void vf_store(float *p, vf a) {
  memcpy(p, a.x, sizeof a.x);
}
static inline vf vf_add(vf a, vf b) {
  LANES(a.x[i] + b.x[i]);
}
static inline vf vf_sub(vf a, vf b) {
  LANES(a.x[i] - b.x[i]);
}
static inline vf vf_mul(vf a, vf b) {
  LANES(a.x[i] * b.x[i]);
}
static inline vf vf_div(vf a, vf b) {
  LANES(a.x[i] / b.x[i]);
}
static inline vf vf_fma(vf a, vf b, vf c) {
  LANES(a.x[i] * b.x[i] + c.x[i]);
}
static inline vf vf_max(vf a, vf b) {
  LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i]);
}
static inline vf vf_abs(vf a) {
  LANES(fabsf(a.x[i]));
}
static inline vf vf_copysign(vf a, vf sign) {
  LANES(copysignf(a.x[i], sign.x[i]));
}
static inline vf vf_exponent(vf t) {
  vf y;
  for (int i = 0; i < VL; i++) {
    uint32_t bits;
    memcpy(&bits, &t.x[i], 4);
    bits <<= 23;
    memcpy(&y.x[i], &bits, 4);
  }
  return y;
}
static inline float vf_sum(vf a) {
  return ((a.x[0] + a.x[1]) + (a.x[2] + a.x[3])) + ((a.x[4] + a.x[5]) + (a.x[6] + a.x[7]));
}
static inline void vf_sum4(float *out, vf a, vf b, vf c, vf d) {
  out[0] = vf_sum(a);
  out[1] = vf_sum(b);
  out[2] = vf_sum(c);
  out[3] = vf_sum(d);
}
static inline float vf_top(vf a) {
  float top = a.x[0];
  for (int i = 1; i < VL; i++)
    top = top > a.x[i] ? top : a.x[i];
  return top;
}

/* Exact: exponent rebiased by a product, which handles subnormals too. */
static inline float half_to_float(uint16_t h) {
  const uint32_t magnitude = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
  uint32_t bits = magnitude << 13;
  float f;
  memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  memcpy(&bits, &f, 4);
  if (magnitude >= 0x7c00u) bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
}

static inline vf vf_kv(pkv_dtype dtype, const unsigned char *p) {
  vf y;
  if (dtype == PKV_DTYPE_F32) {
    memcpy(y.x, p, sizeof y.x);
  } else if (dtype == PKV_DTYPE_FP8_E4M3) {
    for (int i = 0; i < VL; i++)
      y.x[i] = pkv_e4m3_to_f32(p[i]);
  } else {
    uint16_t h[VL];
    memcpy(h, p, sizeof h);
    for (int i = 0; i < VL; i++) {
      const uint32_t bits = (uint32_t)h[i] << 16;
      if (dtype == PKV_DTYPE_F16) y.x[i] = half_to_float(h[i]);
      if (dtype == PKV_DTYPE_BF16) memcpy(&y.x[i], &bits, 4);
    }
  }
  return y;
}

static inline int64_t vf_narrow(void *dst, pkv_dtype dtype, const float *src, int64_t count,
                                float divisor) {
  if (dtype != PKV_DTYPE_F32 || divisor != 1.0f) return 0;
  memcpy(dst, src, (size_t)count * sizeof(float));
  return count;
}

#define vf_prefetch(p) ((void)(p))

#include "backend/cpu/attend_impl.h"
