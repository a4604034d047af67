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

/* The same digests in form, faster: XXH3 of each chunk alone, mixed into the digest before it. */
size_t pkv_hash_chain(uint64_t *digests, const int32_t *tokens, size_t count, size_t chunk,
                      uint64_t seed);
/* One step of pkv_hash_chain: `hash` is that of a chunk of `tokens` tokens. */
uint64_t pkv_hash_mix(uint64_t before, uint64_t hash, size_t tokens);
/* The same in form again: one XXH64 stream over 4-byte little-endian ids, fed one by one, and its
 * digest so far at the end of each chunk. */
size_t pkv_hash_stream(uint64_t *digests, const int32_t *tokens, size_t count, size_t chunk,
                       uint64_t seed);

#endif
