/* SPDX-License-Identifier: Apache-2.0 */
/* Cumulative digests of whole prompts: for callers, and for cht. */
#include "sched/sched_hash.h"

#include "base/hash.h"

size_t pkv_sched_digests(uint64_t *digests, const int32_t *tokens, size_t count, size_t chunk,
                         pkv_sched_hash hash) {
  return hash == PKV_SCHED_HASH_TOKENWISE ? pkv_hash_stream(digests, tokens, count, chunk, 0)
                                          : pkv_hash_chain(digests, tokens, count, chunk, 0);
}

void pkv_sched_hash_prompt(uint64_t *digests, const pkv_sched *s, const int32_t *tokens,
                           size_t count) {
  const size_t chunk = (size_t)s->o.chunk_tokens;
  uint64_t before = s->o.seed;
  if (s->o.hash_fn == NULL) {
    if (s->o.hash == PKV_SCHED_HASH_TOKENWISE)
      (void)pkv_hash_stream(digests, tokens, count, chunk, s->o.seed);
    else
      (void)pkv_hash_chain(digests, tokens, count, chunk, s->o.seed);
    return;
  }
  for (size_t at = 0; at < count; at += chunk) {
    const size_t size = count - at < chunk ? count - at : chunk;
    const uint64_t hash =
        s->o.hash_fn(s->o.hash_ctx, tokens + at, size * sizeof *tokens, s->o.seed);
    before = pkv_hash_mix(before, hash, size);
    digests[at / chunk] = before;
  }
}
