/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3 through the system's xxHash library. */
#include "base/hash.h"

#define XXH_STATIC_LINKING_ONLY /* the stream's state on the stack */
#include <xxhash.h>

uint64_t pkv_hash_bytes(const void *data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

size_t pkv_hash_chunks(uint64_t *digests, const int32_t *tokens, size_t count, size_t chunk,
                       uint64_t seed) {
  if (chunk == 0) return 0;
  const size_t n = count / chunk + (count % chunk != 0);
  if (digests == NULL) return n;
  for (size_t i = 0; i < n; i++) {
    const size_t first = i * chunk;
    const size_t size = count - first < chunk ? count - first : chunk;
    seed = XXH3_64bits_withSeed(tokens + first, size * sizeof tokens[0], seed);
    digests[i] = seed;
  }
  return n;
}

uint64_t pkv_hash_mix(uint64_t before, uint64_t hash, size_t tokens) {
  uint64_t z = (before ^ hash) * UINT64_C(0x9e3779b97f4a7c15) + before + tokens;
  z = (z ^ (z >> 32)) * UINT64_C(0xd6e8feb86659fd93);
  return z ^ (z >> 32);
}

size_t pkv_hash_chain(uint64_t *digests, const int32_t *tokens, size_t count, size_t chunk,
                      uint64_t seed) {
  if (chunk == 0) return 0;
  const size_t n = count / chunk + (count % chunk != 0);
  if (digests == NULL) return n;
  for (size_t i = 0; i < n; i++) {
    const size_t first = i * chunk;
    const size_t size = count - first < chunk ? count - first : chunk;
    /* Without a seed: XXH3 would derive a secret from it for each chunk. */
    seed = pkv_hash_mix(seed, XXH3_64bits(tokens + first, size * sizeof tokens[0]), size);
    digests[i] = seed;
  }
  return n;
}

size_t pkv_hash_stream(uint64_t *digests, const int32_t *tokens, size_t count, size_t chunk,
                       uint64_t seed) {
  if (chunk == 0) return 0;
  const size_t n = count / chunk + (count % chunk != 0);
  if (digests == NULL) return n;
  XXH64_state_t state;
  (void)XXH64_reset(&state, seed);
  for (size_t i = 0; i < count; i++) {
    const uint32_t id = (uint32_t)tokens[i];
    const unsigned char bytes[4] = {(unsigned char)id, (unsigned char)(id >> 8),
                                    (unsigned char)(id >> 16), (unsigned char)(id >> 24)};
    (void)XXH64_update(&state, bytes, sizeof bytes);
    if ((i + 1) % chunk == 0 || i + 1 == count) digests[i / chunk] = XXH64_digest(&state);
  }
  return n;
}
