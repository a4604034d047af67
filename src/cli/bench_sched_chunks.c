/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_chunks.h"

#include <string.h>

#include "cli/bench_sched_memory.h"

pkv_status sched_chunks_init(sched_chunks *out, const sched_work *work, pkv_error *err) {
  size_t size = 64;
  while (size < 2 * work->hash_count)
    size *= 2;
  memset(out, 0, sizeof *out);
  out->slots = sched_alloc(size, sizeof *out->slots);
  PKV_CHECK(err, out->slots, PKV_E_NOMEM, "no memory for %zu chunks", size);
  out->mask = size - 1;
  return PKV_OK;
}

void sched_chunks_free(sched_chunks *chunks) {
  sched_free(chunks->slots, chunks->mask + 1, sizeof *chunks->slots);
  memset(chunks, 0, sizeof *chunks);
}

/* The chunk's place, or the free one where it would go: never full, as there are twice as many. */
static sched_chunk *find(const sched_chunks *c, uint64_t hash) {
  size_t at = (size_t)(hash * UINT64_C(0x9e3779b97f4a7c15) >> 20) & c->mask;
  while (c->slots[at].used && c->slots[at].hash != hash)
    at = (at + 1) & c->mask;
  return &c->slots[at];
}

static int32_t tokens_of(const sched_work *work, const sched_job *job, int32_t chunk) {
  const int32_t left = job->prompt - chunk * work->chunk;
  return left < work->chunk ? left : work->chunk;
}

int32_t sched_chunks_prefix(const sched_chunks *chunks, const sched_work *work,
                            const sched_job *job, bool ever) {
  int32_t tokens = 0;
  for (int32_t i = 0; i < job->hashes; i++) {
    const sched_chunk *const slot = find(chunks, work->hashes[job->first_hash + (size_t)i]);
    if (!slot->used || (ever ? !slot->seen : slot->rows == 0)) break;
    tokens += tokens_of(work, job, i);
  }
  return tokens;
}

void sched_chunks_add(sched_chunks *chunks, const sched_work *work, const sched_job *job, int by) {
  int64_t own = job->prompt;
  for (int32_t i = 0; i < job->hashes; i++) {
    const uint64_t hash = work->hashes[job->first_hash + (size_t)i];
    const int32_t tokens = tokens_of(work, job, i);
    sched_chunk *const slot = find(chunks, hash);
    const int32_t before = slot->rows;
    slot->hash = hash;
    slot->used = slot->seen = 1;
    slot->rows += by;
    chunks->unique += ((slot->rows > 0) - (before > 0)) * tokens;
    chunks->shared += ((slot->rows > 1) - (before > 1)) * tokens;
    own -= tokens;
  }
  chunks->unique += by * own;
}
