/* SPDX-License-Identifier: Apache-2.0 */
#include "sched/mt19937.h"

#define N 624
#define M 397

void pkv_mt19937_init(pkv_mt19937 *mt, uint32_t seed) {
  mt->s[0] = seed;
  for (uint32_t i = 1; i < N; i++)
    mt->s[i] = 1812433253u * (mt->s[i - 1] ^ mt->s[i - 1] >> 30) + i;
  mt->next = N;
}

static void twist(uint32_t *s) {
  for (int i = 0; i < N; i++) {
    const uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % N] & 0x7fffffffu);
    s[i] = s[(i + M) % N] ^ y >> 1 ^ (y & 1u ? 0x9908b0dfu : 0u);
  }
}

uint32_t pkv_mt19937_next(pkv_mt19937 *mt) {
  if (mt->next == N) {
    twist(mt->s);
    mt->next = 0;
  }
  uint32_t y = mt->s[mt->next++];
  y ^= y >> 11;
  y ^= y << 7 & 0x9d2c5680u;
  y ^= y << 15 & 0xefc60000u;
  return y ^ y >> 18;
}
