/* SPDX-License-Identifier: Apache-2.0 */
/* Scalar arithmetic that the vector kernels repeat operation by operation. Private to
   src/backend/cpu. */
#ifndef PKV_BACKEND_CPU_DENSE_MATH_H
#define PKV_BACKEND_CPU_DENSE_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* A block of activations below this in magnitude counts as zero: 127 / max must stay finite. */
#define PKV_QUANT_TINY 1e-30f

/* 1.5 * 2^23: adding it rounds a small float to an integer, half to even, in its low bits. */
#define PKV_ROUND_MAGIC 12582912.0f

/* Nearest integer, half to even, of |v| < 2^22. */
static inline int32_t pkv_round_small(float v) {
  const float t = v + PKV_ROUND_MAGIC;
  int32_t bits, magic;
  const float m = PKV_ROUND_MAGIC;
  memcpy(&bits, &t, sizeof bits);
  memcpy(&magic, &m, sizeof magic);
  return bits - magic;
}

static inline float pkv_sum_lanes(const float *l) {
  return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

static inline float pkv_rms_scale(double sum, int64_t n, float eps) {
  return (float)(1.0 / sqrt(sum / (double)n + (double)eps));
}

/*
 * exp(x) for x limited to +-PKV_EXP_LIMIT; NaN stays NaN. x = n ln 2 + r with |r| <= ln 2 / 2, ln 2
 * in two parts so that n * high is exact; e^r by its series to r^7 (the next term is below 6e-9);
 * 2^n through the exponent. Largest relative error measured, every seventh float of
 * either sign from 3e-8 to the limit: 7.8e-8.
 */
#define PKV_EXP_LIMIT 87.0f
#define PKV_LOG2_E    1.44269504088896341f
#define PKV_LN2_HIGH  0.693359375f
#define PKV_LN2_LOW   -2.12194440054690583e-4f
#define PKV_EXP_C7    (1.0f / 5040.0f)
#define PKV_EXP_C6    (1.0f / 720.0f)
#define PKV_EXP_C5    (1.0f / 120.0f)
#define PKV_EXP_C4    (1.0f / 24.0f)
#define PKV_EXP_C3    (1.0f / 6.0f)
#define PKV_EXP_C2    0.5f

static inline float pkv_exp_clamped(float x) {
  if (x > PKV_EXP_LIMIT) x = PKV_EXP_LIMIT;
  if (x < -PKV_EXP_LIMIT) x = -PKV_EXP_LIMIT;
  const float shifted = fmaf(x, PKV_LOG2_E, PKV_ROUND_MAGIC);
  const float n = shifted - PKV_ROUND_MAGIC;
  const float r = fmaf(n, -PKV_LN2_LOW, fmaf(n, -PKV_LN2_HIGH, x));
  float p = PKV_EXP_C7;
  p = fmaf(p, r, PKV_EXP_C6);
  p = fmaf(p, r, PKV_EXP_C5);
  p = fmaf(p, r, PKV_EXP_C4);
  p = fmaf(p, r, PKV_EXP_C3);
  p = fmaf(p, r, PKV_EXP_C2);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000u; /* the integer sits in the low bits of `shifted` */
  float two_n;
  memcpy(&two_n, &bits, sizeof two_n);
  return p * two_n;
}

/* gelu(x) by tanh is x / (1 + exp(-t)), t = x (A + B x^2): A = 2 sqrt(2 / pi), B = 0.044715 A. */
#define PKV_GELU_A 1.59576912160573071f
#define PKV_GELU_B 0.07135481282745f

static inline float pkv_gelu_tanh(float x) {
  const float t = x * fmaf(x * x, PKV_GELU_B, PKV_GELU_A);
  return x / (1.0f + pkv_exp_clamped(-t));
}

#endif
