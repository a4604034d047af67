/* SPDX-License-Identifier: Apache-2.0 */
/* xoshiro256** and splitmix64 (Blackman and Vigna 2018), and a counter-based uniform. */
#include "base/rng.h"

#include <math.h>

/* splitmix64's output function: a bijection of 64 bits. */
static uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

static uint64_t rotl(uint64_t x, unsigned n) {
  return (x << n) | (x >> (64 - n));
}

void pkv_rng_init(pkv_rng *rng, uint64_t seed) {
  for (int i = 0; i < 4; i++) {
    seed += UINT64_C(0x9e3779b97f4a7c15);
    rng->s[i] = mix64(seed);
  }
}

uint64_t pkv_rng_next(pkv_rng *rng) {
  uint64_t *s = rng->s;
  const uint64_t result = rotl(s[1] * 5, 7) * 9;
  const uint64_t t = s[1] << 17;
  s[2] ^= s[0];
  s[3] ^= s[1];
  s[1] ^= s[2];
  s[0] ^= s[3];
  s[2] ^= t;
  s[3] = rotl(s[3], 45);
  return result;
}

uint64_t pkv_rng_below(pkv_rng *rng, uint64_t bound) {
  if (bound == 0) return 0;
  /* Draws below 2^64 mod bound are thrown away: what is left is a multiple of bound. */
  const uint64_t least = (0 - bound) % bound;
  uint64_t r;
  do {
    r = pkv_rng_next(rng);
  } while (r < least);
  return r % bound;
}

int64_t pkv_rng_range(pkv_rng *rng, int64_t lo, int64_t hi) {
  if (lo >= hi) return lo;
  const uint64_t span = (uint64_t)hi - (uint64_t)lo;
  const uint64_t r = span == UINT64_MAX ? pkv_rng_next(rng) : pkv_rng_below(rng, span + 1);
  return (int64_t)((uint64_t)lo + r);
}

static double unit(uint64_t bits) {
  return (double)(bits >> 11) * 0x1p-53;
}

double pkv_rng_uniform(pkv_rng *rng) {
  return unit(pkv_rng_next(rng));
}

double pkv_rng_normal(pkv_rng *rng) {
  /* Polar method; the second variate is dropped, so that the state is the four words alone. */
  double x, y, r;
  do {
    x = 2.0 * pkv_rng_uniform(rng) - 1.0;
    y = 2.0 * pkv_rng_uniform(rng) - 1.0;
    r = x * x + y * y;
  } while (r >= 1.0 || r == 0.0);
  return x * sqrt(-2.0 * log(r) / r);
}

double pkv_hash_uniform(uint64_t seed, uint64_t stream, uint64_t position) {
  const uint64_t step = UINT64_C(0x9e3779b97f4a7c15);
  uint64_t z = mix64(seed + step);
  z = mix64(z + mix64(stream + 2 * step));
  z = mix64(z + mix64(position + 3 * step));
  return unit(z);
}
