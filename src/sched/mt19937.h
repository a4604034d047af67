/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The 32-bit Mersenne Twister (Matsumoto and Nishimura 1998, initialisation of 2002): the generator
 * behind the seed's traces. For those only; everything else of ours draws from base/rng.h.
 */
#ifndef PKV_SCHED_MT19937_H
#define PKV_SCHED_MT19937_H

#include <stdint.h>

typedef struct pkv_mt19937 {
  uint32_t s[624];
  int next; /* of s; 624 = twist first */
} pkv_mt19937;

void pkv_mt19937_init(pkv_mt19937 *mt, uint32_t seed);
uint32_t pkv_mt19937_next(pkv_mt19937 *mt);

#endif
