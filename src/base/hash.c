/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3 through the system's xxHash library. */
#include "base/hash.h"

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
