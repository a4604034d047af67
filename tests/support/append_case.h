/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New tokens for a paged cache, and what must stand there afterwards, in double: rotation, division
 * by the scales, rounding. Elements that no token writes must keep their bytes.
 *
 * The bound of an element: the products of the rotation, its sum, the cosine and sine, the scale
 * and the division are each rounded to float, at most 6 units of 2^-24 of (|a cos| + |b sin|) /
 * scale; then half a unit of the cache's type.
 */
#ifndef PKV_TEST_APPEND_CASE_H
#define PKV_TEST_APPEND_CASE_H

#include <stdbool.h>

#include "base/rng.h"
#include "pkv/pkv.h"

typedef enum append_source {
  APPEND_PLAIN = 0,      /* [tokens, heads, head_dim] */
  APPEND_GAPS = 1,       /* gaps of NaN after heads and tokens, odd: unaligned */
  APPEND_HEAD_MAJOR = 2, /* [heads, tokens, head_dim] */
  APPEND_FUSED = 3,      /* K and V of a token side by side in one row of a projection */
  APPEND_SOURCES = 4
} append_source;

typedef struct append_spec {
  uint64_t seed;
  pkv_dtype dtype, cache_dtype;
  append_source source;
  int32_t layout; /* 0 HND, 1 NHD, 2 K | V in one buffer, 3 HND with odd gaps */
  int32_t tokens, kv_heads, head_dim, page_tokens, pages;
  float k_scale, v_scale;
  bool head_scales;
  int32_t rope_dims; /* 0 = no rope, head_dim + 1 = 0 in the struct: all of the head */
  pkv_rope_pairs pairs;
  double base;
  bool table; /* inverse frequencies from a table */
} append_spec;

typedef struct append_case {
  append_spec spec;
  pkv_cache cache;
  unsigned char *storage;
  size_t storage_bytes;
  unsigned char *source; /* k and v point into it */
  size_t source_bytes;
  size_t k_at, v_at; /* bytes */
  int64_t token_stride, head_stride;
  int64_t *slots; /* [tokens], some -1 */
  int32_t *positions;
  float *frequencies; /* [dims / 2] or NULL */
  float *k_head_scale, *v_head_scale;
  pkv_rope rope;
} append_case;

/* A random one; every field of the grid comes about. */
append_spec append_draw(pkv_rng *rng, uint64_t seed);
void append_case_init(append_case *c, const append_spec *spec);
void append_case_deinit(append_case *c);
/* Host pointers; rope is NULL without. */
pkv_append_args append_case_args(append_case *c);
/* Storage back to its pattern. */
void append_case_reset(append_case *c);
/* `storage` as the call left it (the case's own, or a copy from elsewhere). */
void append_check(const append_case *c, const unsigned char *storage, const char *what);

#endif
