/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who runs. A request starts when a row is free and its known tokens fit beside what the running
 * ones still need.
 *
 * Prefixes. Every page of a running request is offered to the prefix cache as soon as it is whole,
 * and a request starts with the pages of its known tokens that are there. The last token is never
 * taken over: something has to be computed to get its logits. A request that would find more pages
 * once a running one has got further *follows*: it holds a row and waits for them instead of
 * computing the same again. The wait is bounded by the other's prefill, and ends at once when that
 * one ends or is preempted; nobody follows a follower. Answers of one request take the whole prompt
 * from each other, the last page by copy on write.
 *
 * Pages are taken step by step. When there are none left, idle ones leave the cache; when that is
 * empty, the youngest running request gives all of its pages back and returns to its place in the
 * queue; it is computed again later, from what the cache still has, or gets back what swap.c kept
 * of it. The oldest therefore always advances, and any request fits alone (pkv_engine_submit).
 * Paused ones plan nothing, hold what they have until somebody needs it, also to start, and then
 * give it back first; nobody waits for what they compute.
 */
#include "engine/engine_state.h"

#include <string.h>

pkv_status pkv_engine_leave(pkv_engine *engine, int32_t slot, pkv_error *err) {
  pkv_seq *const s = &engine->seqs[slot];
  engine->free_rows[engine->free_row_count++] = s->row;
  if (s->locked > 0)
    pkv_prefix_unlock(engine->prefix, pkv_table_row(engine->table, s->row), s->locked);
  s->computed = s->planned = s->locked = s->follow_pages = 0;
  s->apart = s->follows = false;
  return pkv_table_truncate(engine->table, s->row, 0, err);
}

int32_t pkv_seq_common_pages(const pkv_engine *engine, const pkv_seq *a, const pkv_seq *b) {
  int32_t low = 0;
  int32_t high = a->digest_count < b->digest_count ? a->digest_count : b->digest_count;
  if (a->key.salt != b->key.salt || a->key.adapter != b->key.adapter) return 0;
  while (low < high) { /* chained: equal at i means equal before i */
    const int32_t middle = low + (high - low + 1) / 2;
    if (a->digests[middle - 1] == b->digests[middle - 1])
      low = middle;
    else
      high = middle - 1;
  }
  const size_t bytes = (size_t)low * (size_t)engine->options.page_tokens * sizeof(int32_t);
  return low > 0 && memcmp(a->tokens, b->tokens, bytes) == 0 ? low : 0;
}

typedef struct prefix_match {
  int32_t source; /* slot whose row is forked, or -1: pages of the cache */
  int32_t tokens; /* that are taken over */
  int32_t pages;  /* of the cache, in match_pages; those of the fork that are whole */
  int32_t idle;   /* of them, idle by now */
  int32_t soon;   /* pages, when those that compute them now are done; more than `pages`: wait */
  int32_t leader; /* slot of who computes them, where it is one */
} prefix_match;

/* The prompt of another answer to the same request, but for a last token to compute. */
static void match_sibling(const pkv_engine *e, const pkv_seq *s, prefix_match *match) {
  const int32_t share = s->known > s->prompt ? s->prompt : s->prompt - 1;
  for (int32_t i = 0; i < e->running_count; i++) {
    const pkv_seq *const other = &e->seqs[e->running[i]];
    if (other->id != s->id || other == s || other->follows || share <= match->tokens) continue;
    if (other->computed < share) {
      if (other->paused) continue;
      match->soon = pkv_pages_for(e, share);
      match->leader = -1;
      continue;
    }
    match->source = e->running[i];
    match->tokens = share;
    match->pages = match->soon = share / e->options.page_tokens;
    match->idle = 0;
    return;
  }
}

static prefix_match find_prefix(const pkv_engine *e, const pkv_seq *s) {
  prefix_match match = {-1, 0, 0, 0, 0, -1};
  if (s->echo) return match;
  if (e->prefix == NULL && pkv_swap_continues(e, s, 0)) return match;
  if (e->prefix != NULL) {
    const pkv_prefix_path path = {s->digests, s->tokens, s->key};
    const int32_t most = (s->known - 1) / e->options.page_tokens;
    match.pages = pkv_prefix_match(e->match_pages, &match.idle, e->prefix, &path, most);
    match.tokens = match.pages * e->options.page_tokens;
    match.soon = match.pages;
    if (pkv_swap_continues(e, s, match.pages)) return match;
    for (int32_t i = 0; i < e->running_count && match.soon < most; i++) {
      const pkv_seq *const other = &e->seqs[e->running[i]];
      if (other == s || other->apart || other->follows || other->paused) continue;
      const int32_t common = pkv_seq_common_pages(e, s, other);
      if (common <= match.soon) continue;
      match.soon = common < most ? common : most;
      match.leader = e->running[i];
    }
  }
  match_sibling(e, s, &match);
  return match;
}

/* Pages that running requests have not taken yet but need for the tokens they know. */
static int64_t pages_promised(const pkv_engine *e) {
  int64_t pages = 0;
  for (int32_t i = 0; i < e->running_count; i++) {
    const pkv_seq *const s = &e->seqs[e->running[i]];
    const int32_t have = s->follows ? s->follow_pages : pkv_pages_for(e, s->computed);
    pages += pkv_pages_for(e, s->known) - have;
  }
  return pages;
}

/* What one more request may take so that nobody is preempted at once; -1 = anything. */
static int64_t room_for_one(const pkv_engine *e) {
  pkv_pool_stats pool;
  pkv_prefix_stats prefix;
  if (e->running_count == 0) return -1; /* whatever is accepted fits alone */
  pkv_pool_get_stats(&pool, e->pool);
  pkv_prefix_get_stats(&prefix, e->prefix);
  const int64_t headroom = (int64_t)PKV_HEADROOM_PAGES * (e->running_count + 1);
  const int64_t room = pool.pages_free + prefix.idle - pages_promised(e) - headroom;
  return room > 0 ? room : 0;
}

static bool fits(const pkv_engine *e, const pkv_seq *s, const prefix_match *match, int64_t room) {
  const int32_t have = match->soon > match->pages ? match->soon : match->pages;
  return room < 0 || pkv_pages_for(e, s->known) - have + match->idle <= room;
}

/* The row's first pages, from the cache or from another answer's row. */
static pkv_status take_over(pkv_engine *e, pkv_seq *s, int32_t row, const prefix_match *match,
                            pkv_error *err) {
  if (match->tokens == 0) return PKV_OK;
  if (match->source < 0) {
    pkv_prefix_lock(e->prefix, e->match_pages, match->pages);
    const pkv_status status =
        pkv_table_attach(e->table, row, e->match_pages, match->pages, match->tokens, err);
    if (status != PKV_OK)
      pkv_prefix_unlock(e->prefix, e->match_pages, match->pages);
    else
      s->locked = match->pages;
    return status;
  }
  const pkv_seq *const source = &e->seqs[match->source];
  PKV_TRY(pkv_table_fork(e->table, row, source->row, match->tokens, err));
  s->locked = source->locked < match->pages ? source->locked : match->pages;
  if (s->locked > 0) pkv_prefix_lock(e->prefix, pkv_table_row(e->table, row), s->locked);
  s->apart = s->locked < match->pages;
  e->stats.forks++;
  return PKV_OK;
}

/* A preempted one whose pages are on the host: behind those of the cache, if they fit there. */
static void resume(pkv_engine *e, pkv_seq *s, const prefix_match *match) {
  const bool kept = match->source < 0 && pkv_swap_continues(e, s, match->pages);
  if (!kept || !pkv_swap_in(e, s, match->pages)) {
    pkv_swap_drop(e, s);
    e->stats.swap_drops++;
  }
}

/* A running request's first pages are there, or it waits for them. */
static pkv_status join(pkv_engine *e, pkv_seq *s, const prefix_match *match, pkv_error *err) {
  s->follows = match->soon > match->pages;
  s->follow_pages = s->follows ? match->soon : 0;
  s->leader = s->follows ? match->leader : -1;
  s->leader_order = s->leader >= 0 ? e->seqs[s->leader].order : 0;
  if (s->follows) return PKV_OK;
  PKV_TRY(take_over(e, s, s->row, match, err));
  s->computed = match->tokens;
  if (s->swapped > 0) resume(e, s, match);
  e->stats.prefix_pages_reused += match->pages;
  if (!s->counted) {
    s->counted = true;
    s->cached_tokens = match->tokens;
    e->stats.prompt_tokens += s->prompt;
    e->stats.prompt_tokens_reused += match->tokens;
  }
  return PKV_OK;
}

static pkv_status start(pkv_engine *e, int32_t slot, const prefix_match *match, pkv_error *err) {
  pkv_seq *const s = &e->seqs[slot];
  PKV_TRY(pkv_queue_start(e, slot, err));
  s->row = e->free_rows[--e->free_row_count];
  s->computed = s->planned = 0;
  e->stats.admissions++;
  return join(e, s, match, err);
}

/* Whether the one that it follows is still at its prefix: nothing to search for then. */
static bool still_waits(const pkv_engine *e, const pkv_seq *s) {
  if (s->leader < 0) return false;
  const pkv_seq *const leader = &e->seqs[s->leader];
  return leader->state == PKV_SEQ_RUNNING && leader->order == s->leader_order && !leader->apart &&
         !leader->follows && !leader->paused &&
         leader->computed < s->follow_pages * e->options.page_tokens;
}

/* Followers whose prefix is there now, or whose leader is gone. */
static pkv_status join_followers(pkv_engine *e, pkv_error *err) {
  for (int32_t i = 0; i < e->running_count; i++) {
    pkv_seq *const s = &e->seqs[e->running[i]];
    if (!s->follows || still_waits(e, s)) continue;
    const prefix_match match = find_prefix(e, s);
    PKV_TRY(join(e, s, &match, err));
  }
  return PKV_OK;
}

/* The youngest paused one; its index in `running`, or -1. */
static int32_t find_paused(const pkv_engine *e) {
  for (int32_t i = e->running_count; i-- > 0;)
    if (e->seqs[e->running[i]].paused) return i;
  return -1;
}

/* Who loses its pages: a paused one, which needs none now, else the youngest; its index in
   `running`. */
static int32_t find_victim(const pkv_engine *e) {
  const int32_t paused = find_paused(e);
  return paused >= 0 ? paused : e->running_count - 1;
}

static pkv_status preempt(pkv_engine *e, int32_t index, pkv_error *err) {
  const int32_t slot = e->running[index];
  e->asked = true; /* what it leaves may do for somebody else */
  pkv_swap_out(e, slot);
  PKV_TRY(pkv_engine_leave(e, slot, err));
  PKV_TRY(pkv_queue_return(e, slot, err));
  e->seqs[slot].preemptions++;
  e->stats.preemptions++;
  return PKV_OK;
}

/* A paused one gives row and pages to whom it keeps out. */
static pkv_status yield_paused(bool *yielded, pkv_engine *e, pkv_error *err) {
  const int32_t paused = find_paused(e);
  *yielded = paused >= 0;
  return *yielded ? preempt(e, paused, err) : PKV_OK;
}

pkv_status pkv_engine_admit(pkv_engine *engine, size_t most, pkv_error *err) {
  engine->asked = false;
  PKV_TRY(join_followers(engine, err));
  int32_t refused = 0;
  while ((size_t)engine->running_count < most) {
    const bool row = engine->free_row_count > 0;
    const int64_t room = room_for_one(engine);
    int32_t slot = -1;
    bool yielded = false;
    if (!row && find_paused(engine) < 0) break;
    PKV_TRY(pkv_queue_next(&slot, engine, refused, room, err));
    if (slot < 0) break;
    const prefix_match match = find_prefix(engine, &engine->seqs[slot]);
    const bool fit = row && fits(engine, &engine->seqs[slot], &match, room);
    if (!fit) PKV_TRY(yield_paused(&yielded, engine, err));
    if (fit) PKV_TRY(start(engine, slot, &match, err));
    refused = fit || yielded ? 0 : refused + 1;
  }
  return PKV_OK;
}

/* Prompts share this many tokens a step: less where others wait for their next token. */
static int32_t prompt_budget(const pkv_engine *e, int32_t *prompts) {
  int32_t decoding = 0;
  *prompts = 0;
  for (int32_t i = 0; i < e->running_count; i++) {
    const pkv_seq *const s = &e->seqs[e->running[i]];
    decoding += pkv_seq_decodes(s) && !s->paused;
    *prompts += !pkv_seq_decodes(s) && !s->follows && !s->paused;
  }
  return decoding > 0 ? e->options.prefill_beside : e->options.prefill_chunk;
}

/* Decoding requests get their token. Prompts share the budget in the order of arrival, a quarter of
   it kept from the first for those behind it. */
static void plan_tokens(pkv_engine *e) {
  int32_t prompts = 0, score = PKV_SCORE_TOKENS;
  int32_t budget = prompt_budget(e, &prompts);
  int32_t kept = prompts > 1 ? budget / 4 : 0;
  for (int32_t i = 0; i < e->running_count; i++) {
    pkv_seq *const s = &e->seqs[e->running[i]];
    const bool idle = s->follows || s->paused;
    int32_t count = idle ? 0 : s->known - s->computed;
    if (!pkv_seq_decodes(s) && !idle) {
      if (count > budget - kept) count = budget - kept;
      if (s->scoring && count > score) count = score;
      if (s->scoring) score -= count;
      budget -= count;
      kept = 0;
    }
    s->planned = count;
  }
}

bool pkv_engine_make_room(pkv_engine *engine, int32_t row, int32_t tokens) {
  pkv_engine *const e = engine;
  pkv_pool_stats pool;
  const int32_t length = pkv_table_seq_len(e->table, row);
  const int32_t have = pkv_pages_for(e, length);
  int64_t need = pkv_pages_for(e, length + tokens) - have;
  if (length % e->options.page_tokens != 0) /* a page shared with others is copied first */
    need += pkv_pool_refcount(e->pool, pkv_table_row(e->table, row)[have - 1]) > 1;
  pkv_pool_get_stats(&pool, e->pool);
  if (pool.pages_free >= need) return true;
  const int64_t missing = need - pool.pages_free;
  return e->prefix != NULL && pkv_prefix_evict(e->prefix, missing) == missing;
}

pkv_status pkv_engine_reserve(pkv_engine *engine, pkv_error *err) {
  plan_tokens(engine);
  for (int32_t i = 0; i < engine->running_count; i++) {
    const int32_t slot = engine->running[i];
    const pkv_seq *const s = &engine->seqs[slot];
    while (s->planned > 0) {
      if (pkv_engine_make_room(engine, s->row, s->planned)) {
        PKV_TRY(pkv_table_extend(engine->table, s->row, s->planned, err));
        break;
      }
      /* Everyone younger stands behind i, and who is paused plans nothing: nobody who has pages for
         this step loses them. */
      PKV_CHECK(err, engine->running_count > 1, PKV_E_INTERNAL,
                "request %lld alone needs more pages than the cache has", (long long)s->id);
      const int32_t victim = find_victim(engine);
      PKV_TRY(preempt(engine, victim, err)); /* perhaps s itself: then planned is 0 */
      if (victim < i) i--;
    }
  }
  return PKV_OK;
}

void pkv_engine_publish_pages(pkv_engine *engine) {
  pkv_engine *const e = engine;
  for (int32_t i = 0; i < e->running_count && e->prefix != NULL; i++) {
    pkv_seq *const s = &e->seqs[e->running[i]];
    const int32_t whole = s->computed / e->options.page_tokens;
    if (s->apart || s->locked >= whole) continue;
    pkv_seq_digest(e, s);
    const pkv_prefix_path path = {s->digests, s->tokens, s->key};
    const int32_t *const pages = pkv_table_row(e->table, s->row);
    while (s->locked < whole && !s->apart) {
      if (pkv_prefix_insert(e->prefix, pages, s->locked, &path))
        s->locked++;
      else
        s->apart = true;
    }
  }
}
