/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who runs. First come, first served; a request starts when a row is free and its known tokens fit
 * beside what the running ones still need.
 *
 * Shared prefixes. Whole pages of equal prompt tokens are taken over by reference from a running
 * request (chained page hashes find the length, a comparison of the tokens decides). The last token
 * of a request is never taken over: something has to be computed to get its logits. A request that
 * would find more pages once a running one has got further waits for that instead of computing the
 * same again; whoever behind it shares nothing goes first. The wait is bounded by the other's
 * prefill, and ends at once when that one ends or is preempted.
 *
 * Pages are taken step by step. When there are none left, the youngest running request gives all of
 * its pages back and returns to its place in the queue; it is computed again later. The oldest
 * therefore always advances, and any request fits alone (pkv_engine_submit).
 */
#include "engine/engine_state.h"

#include <string.h>

/* Inserts by id; both lists are short, and mostly appended to. */
static void insert_by_id(const pkv_engine *e, int32_t *list, int32_t *count, int32_t slot) {
  int32_t at = *count;
  while (at > 0 && e->seqs[list[at - 1]].id > e->seqs[slot].id) {
    list[at] = list[at - 1];
    at--;
  }
  list[at] = slot;
  (*count)++;
}

static void remove_slot(int32_t *list, int32_t *count, int32_t slot) {
  int32_t at = 0;
  while (at < *count && list[at] != slot)
    at++;
  PKV_ASSERT(at < *count);
  if (at == *count) return;
  memmove(list + at, list + at + 1, (size_t)(*count - at - 1) * sizeof *list);
  (*count)--;
}

void pkv_engine_enqueue(pkv_engine *engine, int32_t slot) {
  engine->seqs[slot].state = PKV_SEQ_WAITING;
  insert_by_id(engine, engine->waiting, &engine->waiting_count, slot);
}

void pkv_engine_dequeue(pkv_engine *engine, int32_t slot) {
  remove_slot(engine->waiting, &engine->waiting_count, slot);
}

pkv_status pkv_engine_leave(pkv_engine *engine, int32_t slot, pkv_error *err) {
  pkv_seq *const s = &engine->seqs[slot];
  remove_slot(engine->running, &engine->running_count, slot);
  engine->free_rows[engine->free_row_count++] = s->row;
  s->computed = 0;
  s->planned = 0;
  return pkv_table_truncate(engine->table, s->row, 0, err);
}

/* How many leading pages of a's and b's prompts are equal. */
static int32_t common_pages(const pkv_engine *e, const pkv_seq *a, const pkv_seq *b) {
  int32_t low = 0;
  int32_t high = a->digest_count < b->digest_count ? a->digest_count : b->digest_count;
  while (low < high) { /* chained: equal at i means equal before i */
    const int32_t middle = low + (high - low + 1) / 2;
    if (a->digests[middle - 1] == b->digests[middle - 1])
      low = middle;
    else
      high = middle - 1;
  }
  const size_t bytes = (size_t)low * (size_t)e->options.page_tokens * sizeof(int32_t);
  return low > 0 && memcmp(a->tokens, b->tokens, bytes) == 0 ? low : 0;
}

typedef struct prefix_match {
  int32_t source;     /* slot, or -1 */
  int32_t pages_now;  /* that the source has computed already */
  int32_t pages_soon; /* that some running request will have computed */
} prefix_match;

static prefix_match find_prefix(const pkv_engine *e, const pkv_seq *s) {
  prefix_match match = {-1, 0, 0};
  if (!e->options.prefix_sharing || s->echo) return match;
  const int32_t most = (s->known - 1) / e->options.page_tokens;
  for (int32_t i = 0; i < e->running_count; i++) {
    const pkv_seq *const other = &e->seqs[e->running[i]];
    int32_t pages = common_pages(e, s, other);
    if (pages > most) pages = most;
    const int32_t ready = other->computed / e->options.page_tokens;
    const int32_t now = pages < ready ? pages : ready;
    if (now > match.pages_now) {
      match.pages_now = now;
      match.source = e->running[i];
    }
    if (pages > match.pages_soon) match.pages_soon = pages;
  }
  return match;
}

/* Pages that running requests have not taken yet but need for the tokens they know. */
static int64_t pages_promised(const pkv_engine *e) {
  int64_t pages = 0;
  for (int32_t i = 0; i < e->running_count; i++) {
    const pkv_seq *const s = &e->seqs[e->running[i]];
    pages += pkv_pages_for(e, s->known) - pkv_pages_for(e, s->computed);
  }
  return pages;
}

static bool has_room(const pkv_engine *e, const pkv_seq *s, int32_t shared_pages) {
  pkv_pool_stats pool;
  if (e->running_count == 0) return true; /* fits alone: checked at submit */
  pkv_pool_get_stats(&pool, e->pool);
  const int64_t need = pkv_pages_for(e, s->known) - shared_pages;
  const int64_t headroom = (int64_t)PKV_HEADROOM_PAGES * (e->running_count + 1);
  return pool.pages_free - pages_promised(e) >= need + headroom;
}

static pkv_status start(pkv_engine *e, int32_t slot, const prefix_match *match, pkv_error *err) {
  pkv_seq *const s = &e->seqs[slot];
  const int32_t row = e->free_rows[e->free_row_count - 1];
  const int32_t shared = match->pages_now * e->options.page_tokens;
  if (shared > 0) PKV_TRY(pkv_table_fork(e->table, row, e->seqs[match->source].row, shared, err));
  pkv_engine_dequeue(e, slot);
  e->free_row_count--;
  s->row = row;
  s->computed = shared;
  s->planned = 0;
  s->state = PKV_SEQ_RUNNING;
  insert_by_id(e, e->running, &e->running_count, slot);
  e->stats.prefix_pages_reused += match->pages_now;
  if (!s->counted) {
    s->counted = true;
    e->stats.prompt_tokens += s->prompt;
    e->stats.prompt_tokens_reused += shared;
  }
  return PKV_OK;
}

pkv_status pkv_engine_admit(pkv_engine *engine, size_t most, pkv_error *err) {
  int32_t at = 0;
  while (at < engine->waiting_count && engine->free_row_count > 0 &&
         (size_t)engine->running_count < most) {
    const int32_t slot = engine->waiting[at];
    const pkv_seq *const s = &engine->seqs[slot];
    const prefix_match match = find_prefix(engine, s);
    if (s->cancelled || match.pages_soon > match.pages_now) {
      at++;
      continue;
    }
    if (!has_room(engine, s, match.pages_now)) break;
    PKV_TRY(start(engine, slot, &match, err)); /* takes itself off the list */
  }
  return PKV_OK;
}

/* Decoding requests get their token, prompts share prefill_chunk in the order of arrival. */
static void plan_tokens(pkv_engine *e) {
  int32_t budget = e->options.prefill_chunk, score = PKV_SCORE_TOKENS;
  for (int32_t i = 0; i < e->running_count; i++) {
    pkv_seq *const s = &e->seqs[e->running[i]];
    int32_t count = s->known - s->computed;
    if (!pkv_seq_decodes(s)) {
      if (count > budget) count = budget;
      if (s->scoring && count > score) count = score;
      if (s->scoring) score -= count;
      budget -= count;
    }
    s->planned = count;
  }
}

static pkv_status preempt_youngest(pkv_engine *e, pkv_error *err) {
  const int32_t slot = e->running[e->running_count - 1];
  PKV_TRY(pkv_engine_leave(e, slot, err));
  pkv_engine_enqueue(e, slot);
  e->stats.preemptions++;
  return PKV_OK;
}

pkv_status pkv_engine_reserve(pkv_engine *engine, pkv_error *err) {
  plan_tokens(engine);
  for (int32_t i = 0; i < engine->running_count; i++) {
    const int32_t slot = engine->running[i];
    const pkv_seq *const s = &engine->seqs[slot];
    while (s->planned > 0) {
      const pkv_status status = pkv_table_extend(engine->table, s->row, s->planned, err);
      if (status == PKV_OK) break;
      if (status != PKV_E_NO_PAGES) return status;
      /* Everyone younger stands behind i, so nobody who has pages for this step loses them. */
      PKV_CHECK(err, engine->running_count > 1, PKV_E_INTERNAL,
                "request %lld alone needs more pages than the cache has", (long long)s->id);
      PKV_TRY(preempt_youngest(engine, err)); /* perhaps s itself: then planned is 0 */
    }
  }
  return PKV_OK;
}
