/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions: all patterns of the small types, and rounding against a computation in double. */
#include "base/dtype.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* A small float: significand bits after the point, least exponent of a normal number, bias. */
typedef struct form {
  const char *name;
  pkv_dtype dtype;
  int bits, mantissa, least, bias;
  double largest;
  int has_infinity;
} form;

static const form forms[] = {
    {"f16", PKV_DTYPE_F16, 16, 10, -14, 15, 65504.0, 1},
    {"bf16", PKV_DTYPE_BF16, 16, 7, -126, 127, 0x1.fep127, 1},
    {"fp8_e4m3", PKV_DTYPE_FP8_E4M3, 8, 3, -6, 7, 448.0, 0},
};

static float decode(const form *f, uint32_t pattern) {
  const uint16_t h = (uint16_t)pattern;
  const uint8_t b = (uint8_t)pattern;
  return f->bits == 16 ? pkv_load(&h, f->dtype, 0) : pkv_load(&b, f->dtype, 0);
}

static uint32_t encode(const form *f, float value) {
  uint16_t h = 0;
  uint8_t b = 0;
  if (f->bits == 16) {
    pkv_store(&h, f->dtype, 0, value);
    return h;
  }
  pkv_store(&b, f->dtype, 0, value);
  return b;
}

/* What a pattern means, by the definition of the type. */
static double meaning(const form *f, uint32_t pattern) {
  const uint32_t exponents = (1u << (f->bits - 1 - f->mantissa)) - 1;
  const uint32_t m = pattern & ((1u << f->mantissa) - 1);
  const uint32_t e = (pattern >> f->mantissa) & exponents;
  const double sign = (pattern >> (f->bits - 1)) != 0 ? -1.0 : 1.0;
  if (f->has_infinity && e == exponents) return m == 0 ? sign * INFINITY : NAN;
  if (!f->has_infinity && e == exponents && m == (1u << f->mantissa) - 1) return NAN;
  if (e == 0) return sign * ldexp((double)m, f->least - f->mantissa);
  return sign * ldexp(1.0 + ldexp((double)m, -f->mantissa), (int)e - f->bias);
}

/* x rounded to the type, nearest even, in double. */
static double rounded(const form *f, double x) {
  if (x == 0.0 || isnan(x)) return x;
  if (isinf(x)) return f->has_infinity ? x : copysign(f->largest, x);
  int e = ilogb(x);
  if (e < f->least) e = f->least;
  const double unit = ldexp(1.0, e - f->mantissa);
  const double r = nearbyint(fabs(x) / unit) * unit;
  if (r > f->largest) return copysign(f->has_infinity ? (double)INFINITY : f->largest, x);
  return copysign(r, x);
}

static void same(const form *f, double x, double got, double expected) {
  if (isnan(expected) ? isnan(got) : got == expected && signbit(got) == signbit(expected)) return;
  fail_msg("%s of %a: %a, expected %a", f->name, x, got, expected);
}

static void all_patterns(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
    const form *f = &forms[i];
    int nans = 0;
    for (uint32_t p = 0; p < 1u << f->bits; p++) {
      const float value = decode(f, p);
      same(f, p, (double)value, meaning(f, p));
      const uint32_t back = encode(f, value);
      if (isnan(value)) {
        nans++;
        assert_true(isnan(decode(f, back)));
      } else if (back != p) {
        fail_msg("%s pattern %x -> %a -> %x", f->name, p, (double)value, back);
      }
    }
    assert_int_equal(nans, i == 0 ? 2046 : i == 1 ? 254 : 2);
  }
}

/* Each neighbouring pair: the middle goes to the even one, a step beside it to the nearer one. */
static void all_middles(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
    const form *f = &forms[i];
    const uint32_t last = encode(f, (float)f->largest);
    for (uint32_t p = 0; p < last; p++)
      for (int sign = 0; sign < 2; sign++) {
        const double lo = meaning(f, p), hi = meaning(f, p + 1);
        const float middle = (float)((lo + hi) / 2); /* exact: one bit more */
        const uint32_t s = sign ? 1u << (f->bits - 1) : 0;
        const float flip = sign ? -1.0f : 1.0f;
        const uint32_t at = encode(f, flip * middle);
        const uint32_t below = encode(f, flip * nextafterf(middle, 0.0f));
        const uint32_t above = encode(f, flip * nextafterf(middle, INFINITY));
        if (at != (s | (p + (p & 1))) || below != (s | p) || above != (s | (p + 1)))
          fail_msg("%s between %x and %x: middle %x, below %x, above %x", f->name, s | p,
                   s | (p + 1), at, below, above);
      }
  }
}

/* Floats of all exponents in steps through their whole range of bits. */
static void strided_floats(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
    const form *f = &forms[i];
    for (uint64_t u = 0; u < UINT64_C(1) << 32; u += 4093) {
      const uint32_t bits = (uint32_t)u;
      float x;
      memcpy(&x, &bits, sizeof x);
      same(f, (double)x, (double)decode(f, encode(f, x)), rounded(f, (double)x));
    }
  }
}

static void edges(void **state) {
  (void)state;
  assert_int_equal(pkv_f32_to_f16(65519.996f), 0x7bff);
  assert_int_equal(pkv_f32_to_f16(65520.0f), 0x7c00);
  assert_int_equal(pkv_f32_to_f16(-INFINITY), 0xfc00);
  assert_int_equal(pkv_f32_to_f16(0x1p-25f), 0);
  assert_int_equal(pkv_f32_to_f16(-0x1.000002p-25f), 0x8001);
  assert_int_equal(pkv_f32_to_f16(0x1p-149f), 0);
  assert_int_equal(pkv_f32_to_bf16(0x1.ffp127f), 0x7f80);
  assert_int_equal(pkv_f32_to_bf16(0x1p-149f), 0);
  assert_int_equal(pkv_f32_to_e4m3(INFINITY), 0x7e);
  assert_int_equal(pkv_f32_to_e4m3(-449.0f), 0xfe);
  assert_int_equal(pkv_f32_to_e4m3(3e38f), 0x7e);
  assert_int_equal(pkv_f32_to_e4m3(NAN), 0x7f);
  assert_int_equal(pkv_f32_to_e4m3(-0.0f), 0x80);
  assert_int_equal(pkv_f32_to_e4m3(0x1p-10f), 0);
  assert_int_equal(pkv_f32_to_e4m3(0x1.8p-10f), 1);
  /* A NaN whose payload lies in the dropped bits only. */
  const uint32_t bits = 0x7f800001u;
  float nan;
  memcpy(&nan, &bits, sizeof nan);
  assert_true(isnan(pkv_bf16_to_f32(pkv_f32_to_bf16(nan))));
  assert_true(isnan(pkv_f16_to_f32(pkv_f32_to_f16(nan))));
}

static void names_and_arrays(void **state) {
  (void)state;
  assert_string_equal(pkv_dtype_name(PKV_DTYPE_F32), "f32");
  assert_string_equal(pkv_dtype_name(PKV_DTYPE_F16), "f16");
  assert_string_equal(pkv_dtype_name(PKV_DTYPE_BF16), "bf16");
  assert_string_equal(pkv_dtype_name(PKV_DTYPE_FP8_E4M3), "fp8_e4m3");
  assert_string_equal(pkv_dtype_name((pkv_dtype)4), "?");
  assert_string_equal(pkv_dtype_name((pkv_dtype)-1), "?");
  const size_t sizes[] = {4, 2, 2, 1};
  for (int d = 0; d < 4; d++) {
    assert_int_equal(pkv_dtype_bytes((pkv_dtype)d), sizes[d]);
    _Alignas(8) unsigned char array[64];
    memset(array, 0x33, sizeof array);
    pkv_store(array, (pkv_dtype)d, 5, -1.5f);
    assert_true(pkv_load(array, (pkv_dtype)d, 5) == -1.5f);
    for (size_t b = 0; b < sizeof array; b++) /* element 5 and nothing else */
      if (b < 5 * sizes[d] || b >= 6 * sizes[d]) assert_int_equal(array[b], 0x33);
  }
  assert_int_equal(pkv_dtype_bytes((pkv_dtype)4), 0);
  assert_true(isnan(pkv_load(sizes, (pkv_dtype)4, 0)));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(all_patterns),     cmocka_unit_test(all_middles),
      cmocka_unit_test(strided_floats),   cmocka_unit_test(edges),
      cmocka_unit_test(names_and_arrays),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
