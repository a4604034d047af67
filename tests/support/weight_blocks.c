/* SPDX-License-Identifier: Apache-2.0 */
#include "support/weight_blocks.h"

#include <math.h>
#include <string.h>

const pkv_wtype test_wtypes[TEST_WTYPES] = {
    PKV_WTYPE_F32,  PKV_WTYPE_F16,  PKV_WTYPE_BF16, PKV_WTYPE_Q8_0, PKV_WTYPE_Q4_0, PKV_WTYPE_Q4_1,
    PKV_WTYPE_Q5_0, PKV_WTYPE_Q5_1, PKV_WTYPE_Q4_K, PKV_WTYPE_Q5_K, PKV_WTYPE_Q6_K};

const char *test_wtype_name(pkv_wtype type) {
  switch (type) {
  case PKV_WTYPE_F32:
    return "F32";
  case PKV_WTYPE_F16:
    return "F16";
  case PKV_WTYPE_BF16:
    return "BF16";
  case PKV_WTYPE_Q4_0:
    return "Q4_0";
  case PKV_WTYPE_Q4_1:
    return "Q4_1";
  case PKV_WTYPE_Q5_0:
    return "Q5_0";
  case PKV_WTYPE_Q5_1:
    return "Q5_1";
  case PKV_WTYPE_Q8_0:
    return "Q8_0";
  case PKV_WTYPE_Q4_K:
    return "Q4_K";
  case PKV_WTYPE_Q5_K:
    return "Q5_K";
  case PKV_WTYPE_Q6_K:
    return "Q6_K";
  }
  return "?";
}

bool test_wtype_is_float(pkv_wtype type) {
  return type == PKV_WTYPE_F32 || type == PKV_WTYPE_F16 || type == PKV_WTYPE_BF16;
}

bool test_wtype_is_super(pkv_wtype type) {
  return type == PKV_WTYPE_Q4_K || type == PKV_WTYPE_Q5_K || type == PKV_WTYPE_Q6_K;
}

int64_t test_wtype_block(pkv_wtype type) {
  return test_wtype_is_float(type) ? 1 : (test_wtype_is_super(type) ? 256 : 32);
}

/* Where the parts of a block lie: scale first, then minimum, fifth bits, codes. */
static bool has_min(pkv_wtype type) {
  return type == PKV_WTYPE_Q4_1 || type == PKV_WTYPE_Q5_1;
}

static bool has_fifth(pkv_wtype type) {
  return type == PKV_WTYPE_Q5_0 || type == PKV_WTYPE_Q5_1;
}

static int64_t fifth_at(pkv_wtype type) {
  return has_min(type) ? 4 : 2;
}

static int64_t codes_at(pkv_wtype type) {
  return fifth_at(type) + (has_fifth(type) ? 4 : 0);
}

int64_t test_wtype_block_bytes(pkv_wtype type) {
  if (type == PKV_WTYPE_F32) return 4;
  if (test_wtype_is_float(type)) return 2;
  if (type == PKV_WTYPE_Q4_K) return 2 + 2 + 12 + 128;
  if (type == PKV_WTYPE_Q5_K) return 2 + 2 + 12 + 32 + 128;
  if (type == PKV_WTYPE_Q6_K) return 128 + 64 + 16 + 2;
  return codes_at(type) + (type == PKV_WTYPE_Q8_0 ? 32 : 16);
}

int64_t test_wtype_row_bytes(pkv_wtype type, int64_t k) {
  return k / test_wtype_block(type) * test_wtype_block_bytes(type);
}

/* A half between 2^-7 and 2^-5 of either sign. */
static uint16_t random_scale(pkv_rng *rng) {
  const uint64_t r = pkv_rng_next(rng);
  return (uint16_t)((r & 0x83ffu) | (uint64_t)(8 + (r >> 20) % 2) << 10);
}

/* The float cut to 16 bits: what bf16 holds exactly. */
static uint16_t to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return (uint16_t)(bits >> 16);
}

void test_weights_random(unsigned char *bytes, pkv_wtype type, int64_t n, int64_t k, pkv_rng *rng) {
  const int64_t blocks = n * (k / test_wtype_block(type)), size = test_wtype_block_bytes(type);
  for (int64_t b = 0; b < blocks; b++) {
    unsigned char *p = bytes + b * size;
    const float f = (float)(pkv_rng_normal(rng) / 4.0);
    uint16_t half;
    switch (type) {
    case PKV_WTYPE_F32:
      memcpy(p, &f, sizeof f);
      break;
    case PKV_WTYPE_BF16:
      half = to_bf16(f);
      memcpy(p, &half, sizeof half);
      break;
    case PKV_WTYPE_F16:
      half = random_scale(rng);
      memcpy(p, &half, sizeof half);
      break;
    default:
      for (int64_t i = 0; i < size; i++)
        p[i] = (unsigned char)pkv_rng_next(rng);
      half = random_scale(rng);
      memcpy(type == PKV_WTYPE_Q6_K ? p + 208 : p, &half, sizeof half);
      half = random_scale(rng);
      if (has_min(type) || type == PKV_WTYPE_Q4_K || type == PKV_WTYPE_Q5_K)
        memcpy(p + 2, &half, sizeof half);
      break;
    }
  }
}

static void constant_super(unsigned char *p, pkv_wtype type, int32_t code) {
  const uint16_t one = 0x3c00;
  if (type == PKV_WTYPE_Q6_K) {
    memset(p, code % 16 * 17, 128);
    memset(p + 128, code / 16 * 85, 64);
    memset(p + 192, -128, 16);
    memcpy(p + 208, &one, sizeof one);
    return;
  }
  memcpy(p, &one, sizeof one);
  memset(p + 4, 0xff, 4); /* scales of the first four parts, and high bits of the others' */
  memset(p + 12, 0x0f, 4);
  if (type == PKV_WTYPE_Q5_K) memset(p + 16, code >= 16 ? 0xff : 0, 32);
  memset(p + (type == PKV_WTYPE_Q5_K ? 48 : 16), code % 16 * 17, 128);
}

void test_weights_constant(unsigned char *bytes, pkv_wtype type, int64_t n, int64_t k,
                           int32_t code) {
  const int64_t blocks = n * (k / test_wtype_block(type)), size = test_wtype_block_bytes(type);
  const uint16_t one = 0x3c00;
  for (int64_t b = 0; b < blocks; b++) {
    unsigned char *p = bytes + b * size;
    memset(p, 0, (size_t)size);
    if (test_wtype_is_super(type)) {
      constant_super(p, type, code);
      continue;
    }
    memcpy(p, &one, sizeof one);
    if (has_fifth(type)) memset(p + fifth_at(type), code & 16 ? 0xff : 0, 4);
    const int32_t byte = type == PKV_WTYPE_Q8_0 ? code : (code & 15) * 17;
    memset(p + codes_at(type), byte, (size_t)(size - codes_at(type)));
  }
}

static double half_value(const unsigned char *p) {
  const uint32_t h = (uint32_t)p[0] + 256u * p[1];
  const int32_t exponent = (int32_t)(h >> 10 & 31u);
  const double fraction = (double)(h & 1023u) / 1024.0;
  const double sign = h & 0x8000u ? -1.0 : 1.0;
  if (exponent == 31) return fraction != 0.0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * ldexp(fraction, -14);
  return sign * ldexp(1.0 + fraction, exponent - 15);
}

/* The code of element i of a block, its offset taken off. */
static int32_t code_value(const unsigned char *p, pkv_wtype type, int64_t i) {
  const unsigned char *codes = p + codes_at(type);
  if (type == PKV_WTYPE_Q8_0) return codes[i] < 128 ? codes[i] : codes[i] - 256;
  int32_t code = i < 16 ? codes[i] % 16 : codes[i - 16] / 16;
  if (has_fifth(type)) code += p[fifth_at(type) + i / 8] >> (i % 8) & 1 ? 16 : 0;
  if (type == PKV_WTYPE_Q4_0) code -= 8;
  if (type == PKV_WTYPE_Q5_0) code -= 16;
  return code;
}

/* Element i of a super-block of Q4_K or Q5_K, read off the description of the format: eight groups
   of 32, each with a 6-bit scale and a 6-bit minimum. */
static void super_terms(double *scaled, double *min, const unsigned char *p, pkv_wtype type,
                        int64_t i) {
  const int64_t group = i / 32;
  const unsigned char *six = p + 4;
  const int32_t scale =
      group < 4 ? six[group] % 64 : six[group + 4] % 16 + six[group - 4] / 64 * 16;
  const int32_t low = group < 4 ? six[group + 4] % 64 : six[group + 4] / 16 + six[group] / 64 * 16;
  const unsigned char *nibbles = p + (type == PKV_WTYPE_Q4_K ? 16 : 48);
  const int32_t byte = nibbles[i / 64 * 32 + i % 32];
  int32_t code = i % 64 < 32 ? byte % 16 : byte / 16;
  if (type == PKV_WTYPE_Q5_K && (p[16 + i % 32] & (1 << group)) != 0) code += 16;
  *scaled = half_value(p) * scale * code;
  *min = -half_value(p + 2) * low;
}

/* Element i of a super-block of Q6_K: sixteen groups of 16, each with a signed 8-bit scale. */
static double six_bit_value(const unsigned char *p, int64_t i) {
  const int64_t half = i / 128, rest = i % 128;
  const int32_t byte = p[64 * half + rest % 64];
  const int32_t low = rest < 64 ? byte % 16 : byte / 16;
  const int32_t high = p[128 + 32 * half + rest % 32] >> (rest / 32 * 2) & 3;
  const int32_t scale = p[192 + i / 16] < 128 ? p[192 + i / 16] : p[192 + i / 16] - 256;
  return half_value(p + 208) * scale * (low + 16 * high - 32);
}

static void terms(double *scaled, double *min, const unsigned char *row, pkv_wtype type,
                  int64_t i) {
  const int64_t block = test_wtype_block(type), size = test_wtype_block_bytes(type);
  const unsigned char *p = row + i / block * size;
  float f;
  uint32_t bits;
  *min = 0.0;
  switch (type) {
  case PKV_WTYPE_F32:
    memcpy(&f, p, sizeof f);
    *scaled = (double)f;
    return;
  case PKV_WTYPE_BF16:
    bits = ((uint32_t)p[0] + 256u * p[1]) << 16;
    memcpy(&f, &bits, sizeof f);
    *scaled = (double)f;
    return;
  case PKV_WTYPE_F16:
    *scaled = half_value(p);
    return;
  case PKV_WTYPE_Q4_K:
  case PKV_WTYPE_Q5_K:
    super_terms(scaled, min, p, type, i % 256);
    return;
  case PKV_WTYPE_Q6_K:
    *scaled = six_bit_value(p, i % 256);
    return;
  default:
    *scaled = half_value(p) * code_value(p, type, i % 32);
    if (has_min(type)) *min = half_value(p + 2);
    return;
  }
}

double test_weight_value(const unsigned char *row, pkv_wtype type, int64_t i) {
  double scaled, min;
  terms(&scaled, &min, row, type, i);
  return scaled + min;
}

double test_weight_size(const unsigned char *row, pkv_wtype type, int64_t i) {
  double scaled, min;
  terms(&scaled, &min, row, type, i);
  return fabs(scaled) + fabs(min);
}
