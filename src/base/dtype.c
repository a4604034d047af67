/* SPDX-License-Identifier: Apache-2.0 */
/* Element types: sizes, names and scalar conversions by integer arithmetic. */
#include "base/dtype.h"

#include <math.h>
#include <string.h>

const char *pkv_dtype_name(pkv_dtype dtype) {
  switch (dtype) {
  case PKV_DTYPE_F32:
    return "f32";
  case PKV_DTYPE_F16:
    return "f16";
  case PKV_DTYPE_BF16:
    return "bf16";
  case PKV_DTYPE_FP8_E4M3:
    return "fp8_e4m3";
  }
  return "?";
}

size_t pkv_dtype_bytes(pkv_dtype dtype) {
  switch (dtype) {
  case PKV_DTYPE_F32:
    return 4;
  case PKV_DTYPE_F16:
  case PKV_DTYPE_BF16:
    return 2;
  case PKV_DTYPE_FP8_E4M3:
    return 1;
  }
  return 0;
}

static uint32_t float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

static float bits_float(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

/* v / 2^shift, nearest, ties to even; 1 <= shift <= 31. */
static uint32_t round_shift(uint32_t v, uint32_t shift) {
  const uint32_t half = UINT32_C(1) << (shift - 1);
  return (v + (half - 1) + ((v >> shift) & 1)) >> shift;
}

/* Significand with its hidden one, of a normal float. */
static uint32_t full_significand(uint32_t abs) {
  return (abs & 0x7fffff) | 0x800000;
}

float pkv_f16_to_f32(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return bits_float(sign | 0x7f800000 | (mantissa << 13));
  if (exponent != 0) return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float f = (float)mantissa * 0x1p-24f;
  return sign != 0 ? -f : f;
}

uint16_t pkv_f32_to_f16(float f) {
  const uint32_t u = float_bits(f), sign = (u >> 16) & 0x8000, abs = u & 0x7fffffff;
  if (abs > 0x7f800000) return (uint16_t)(sign | 0x7e00 | ((abs >> 13) & 0x3ff));
  if (abs >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* from 65520 on: infinity */
  if (abs >= 0x38800000) return (uint16_t)(sign | (round_shift(abs, 13) - (112u << 10)));
  if (abs < 0x33000000) return (uint16_t)sign; /* below half the least subnormal 2^-24 */
  return (uint16_t)(sign | round_shift(full_significand(abs), 126 - (abs >> 23)));
}

float pkv_bf16_to_f32(uint16_t h) {
  return bits_float((uint32_t)h << 16);
}

uint16_t pkv_f32_to_bf16(float f) {
  const uint32_t u = float_bits(f);
  /* Quiet bit set, so that dropping the low payload cannot turn a NaN into infinity. */
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
  return (uint16_t)round_shift(u, 16);
}

float pkv_e4m3_to_f32(uint8_t b) {
  const uint32_t sign = (uint32_t)(b & 0x80) << 24;
  const uint32_t exponent = (b >> 3) & 15, mantissa = b & 7;
  if ((b & 0x7f) == 0x7f) return bits_float(sign | 0x7fc00000);
  if (exponent != 0) return bits_float(sign | ((exponent + 120) << 23) | (mantissa << 20));
  const float f = (float)mantissa * 0x1p-9f;
  return sign != 0 ? -f : f;
}

uint8_t pkv_f32_to_e4m3(float f) {
  const uint32_t u = float_bits(f), sign = (u >> 24) & 0x80, abs = u & 0x7fffffff;
  if (abs > 0x7f800000) return 0x7f;
  if (abs >= 0x43e00000) return (uint8_t)(sign | 0x7e); /* 448 and more */
  if (abs >= 0x3c800000) return (uint8_t)(sign | (round_shift(abs, 20) - (120u << 3)));
  if (abs < 0x3a800000) return (uint8_t)sign; /* below half the least subnormal 2^-9 */
  return (uint8_t)(sign | round_shift(full_significand(abs), 141 - (abs >> 23)));
}

float pkv_load(const void *base, pkv_dtype dtype, int64_t i) {
  switch (dtype) {
  case PKV_DTYPE_F32:
    return ((const float *)base)[i];
  case PKV_DTYPE_F16:
    return pkv_f16_to_f32(((const uint16_t *)base)[i]);
  case PKV_DTYPE_BF16:
    return pkv_bf16_to_f32(((const uint16_t *)base)[i]);
  case PKV_DTYPE_FP8_E4M3:
    return pkv_e4m3_to_f32(((const uint8_t *)base)[i]);
  }
  return NAN;
}

void pkv_store(void *base, pkv_dtype dtype, int64_t i, float value) {
  switch (dtype) {
  case PKV_DTYPE_F32:
    ((float *)base)[i] = value;
    break;
  case PKV_DTYPE_F16:
    ((uint16_t *)base)[i] = pkv_f32_to_f16(value);
    break;
  case PKV_DTYPE_BF16:
    ((uint16_t *)base)[i] = pkv_f32_to_bf16(value);
    break;
  case PKV_DTYPE_FP8_E4M3:
    ((uint8_t *)base)[i] = pkv_f32_to_e4m3(value);
    break;
  }
}
