/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Seeded generators. pkv_rng is a stream (xoshiro256**, seeded by splitmix64: Blackman and Vigna
 * 2018). pkv_hash_uniform is counter-based: the value depends on its key only, never on what was
 * drawn before.
 */
#ifndef PKV_BASE_RNG_H
#define PKV_BASE_RNG_H

#include <stdint.h>

typedef struct pkv_rng {
  uint64_t s[4];
} pkv_rng;

void pkv_rng_init(pkv_rng *rng, uint64_t seed);
uint64_t pkv_rng_next(pkv_rng *rng);
/* 0 .. bound-1 without bias; bound 0 gives 0. */
uint64_t pkv_rng_below(pkv_rng *rng, uint64_t bound);
/* lo .. hi, both included. */
int64_t pkv_rng_range(pkv_rng *rng, int64_t lo, int64_t hi);
double pkv_rng_uniform(pkv_rng *rng);                                       /* [0, 1) */
double pkv_rng_normal(pkv_rng *rng);                                        /* mean 0, variance 1 */
double pkv_hash_uniform(uint64_t seed, uint64_t stream, uint64_t position); /* [0, 1) */

#endif
