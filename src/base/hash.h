/* SPDX-License-Identifier: Apache-2.0 */
/* Chained chunk hashes of token ids: XXH3 over whole chunks in bulk. */
#ifndef PKV_BASE_HASH_H
#define PKV_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

/* XXH3, 64 bit, of `bytes` bytes with a seed. */
uint64_t pkv_hash_bytes(const void *data, size_t bytes, uint64_t seed);

/*
 * digests[i] covers tokens 0 .. min((i + 1) * chunk, count) - 1: each digest is the hash of its
 * chunk's ids seeded with the one before, the first with `seed`. Writes ceil(count / chunk) digests
 * (the partial last chunk included) and returns their number. digests may be NULL to count only.
 * chunk >= 1.
 */
size_t pkv_hash_chunks(uint64_t *digests, const int32_t *tokens, size_t count, size_t chunk,
                       uint64_t seed);

#endif
