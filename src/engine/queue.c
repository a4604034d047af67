/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lists of waiting and running requests, and who is next.
 *
 * First come, first served needs no scheduler: `waiting` is in that order. A request that does not
 * fit is passed by smaller ones behind it, a bounded number of times and only before it first runs:
 * what was preempted keeps its place. Any other order or policy asks pkv_sched, which then hears of
 * every change. Its prompts are the slots' own tokens.
 */
#include "engine/engine_state.h"

#include <string.h>

/* How often a request may be passed by smaller ones, and how many of those are looked at. */
#define BYPASS_LIMIT 32
#define FIT_TRIES    8
/* What a step costs, for the policies that ask: a stand-in for a measured profile. Only the
   proportions matter to them. */
#define BYTES_PER_SECOND 2e10
#define SECONDS_PER_ROW  1e-4

/* Inserts by order of arrival; both lists are short, and mostly appended to. */
static void insert_by_order(const pkv_engine *e, int32_t *list, int32_t *count, int32_t slot) {
  int32_t at = *count;
  while (at > 0 && e->seqs[list[at - 1]].order > e->seqs[slot].order) {
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

/* A decode step reads the weights once, and what its rows hold: shared prefixes once where the
   engine reads them so. */
static double step_cost(void *ctx, const pkv_sched_batch *batch) {
  const pkv_engine *const e = ctx;
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  pkv_model_get_info(&info, e->model);
  const bool shares = e->options.route == PKV_ROUTE_SHARED;
  const int64_t tokens = shares ? batch->unique_tokens : batch->total_tokens;
  const double token = 2.0 * (double)e->shape.layers * (double)e->shape.kv_heads *
                       (double)e->shape.head_dim * (double)pkv_dtype_bytes(e->options.kv_dtype);
  return ((double)info.weight_bytes + (double)tokens * token) / BYTES_PER_SECOND +
         (double)batch->rows * SECONDS_PER_ROW;
}

pkv_status pkv_queue_create(pkv_engine *engine, pkv_error *err) {
  pkv_engine *const e = engine;
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  if (e->options.order == PKV_SCHED_FCFS && e->options.admission == PKV_SCHED_ALWAYS) return PKV_OK;
  o.order = e->options.order;
  o.policy = e->options.admission;
  o.max_requests = e->options.max_requests;
  o.max_prompt_tokens = e->options.max_seq_len;
  o.page_tokens = e->options.page_tokens;
  o.max_rows = e->options.max_rows;
  o.cost = step_cost;
  o.cost_ctx = e;
  o.allocator = &e->allocator;
  return pkv_sched_create(&e->sched, &o, err);
}

pkv_status pkv_queue_add(pkv_engine *engine, int32_t slot, pkv_error *err) {
  pkv_seq *const s = &engine->seqs[slot];
  if (engine->sched != NULL) {
    pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
    r.id = (uint64_t)s->order;
    r.tokens = s->tokens;
    r.prompt_tokens = s->prompt;
    r.output_tokens = s->limit - s->prompt;
    r.priority = s->priority;
    r.pages = pkv_pages_for(engine, s->known); /* pages are taken step by step */
    PKV_TRY(pkv_sched_insert(engine->sched, &r, err));
  }
  s->state = PKV_SEQ_WAITING;
  insert_by_order(engine, engine->waiting, &engine->waiting_count, slot);
  return PKV_OK;
}

pkv_status pkv_queue_start(pkv_engine *engine, int32_t slot, pkv_error *err) {
  pkv_seq *const s = &engine->seqs[slot];
  if (engine->sched != NULL) PKV_TRY(pkv_sched_admit(engine->sched, (uint64_t)s->order, err));
  for (int32_t i = 0; i < engine->waiting_count; i++) { /* those it goes past */
    pkv_seq *const other = &engine->seqs[engine->waiting[i]];
    if (other == s) break;
    other->bypasses++;
  }
  remove_slot(engine->waiting, &engine->waiting_count, slot);
  s->state = PKV_SEQ_RUNNING;
  insert_by_order(engine, engine->running, &engine->running_count, slot);
  return PKV_OK;
}

pkv_status pkv_queue_return(pkv_engine *engine, int32_t slot, pkv_error *err) {
  pkv_seq *const s = &engine->seqs[slot];
  remove_slot(engine->running, &engine->running_count, slot);
  s->state = PKV_SEQ_WAITING;
  insert_by_order(engine, engine->waiting, &engine->waiting_count, slot);
  if (engine->sched == NULL) return PKV_OK;
  PKV_TRY(pkv_sched_preempt(engine->sched, (uint64_t)s->order, err));
  s->held = s->paused; /* who is behind does not stand in the way of others */
  return s->held ? PKV_OK : pkv_sched_return(engine->sched, (uint64_t)s->order, err);
}

pkv_status pkv_queue_remove(pkv_engine *engine, int32_t slot, pkv_error *err) {
  pkv_seq *const s = &engine->seqs[slot];
  const bool running = s->state == PKV_SEQ_RUNNING;
  if (running)
    remove_slot(engine->running, &engine->running_count, slot);
  else
    remove_slot(engine->waiting, &engine->waiting_count, slot);
  s->state = PKV_SEQ_FREE;
  if (engine->sched == NULL || s->forgotten) return PKV_OK;
  return running ? pkv_sched_finish(engine->sched, (uint64_t)s->order, err)
                 : pkv_sched_cancel(engine->sched, (uint64_t)s->order, err);
}

void pkv_queue_forget(pkv_engine *engine, int32_t slot) {
  pkv_seq *const s = &engine->seqs[slot];
  if (engine->sched == NULL || s->forgotten || s->state != PKV_SEQ_WAITING) return;
  s->forgotten = pkv_sched_cancel(engine->sched, (uint64_t)s->order, NULL) == PKV_OK;
}

void pkv_queue_hold(pkv_engine *engine, int32_t slot) {
  pkv_seq *const s = &engine->seqs[slot];
  if (engine->sched == NULL || s->forgotten || s->state != PKV_SEQ_WAITING || s->held == s->paused)
    return;
  const pkv_status status = s->paused ? pkv_sched_preempt(engine->sched, (uint64_t)s->order, NULL)
                                      : pkv_sched_return(engine->sched, (uint64_t)s->order, NULL);
  if (status == PKV_OK) s->held = s->paused;
}

/* The first waiting one neither cancelled nor paused, or one behind it that it lets pass. */
static int32_t next_by_arrival(const pkv_engine *e, int32_t at) {
  int32_t seen = 0;
  for (int32_t i = 0; i < e->waiting_count && at <= FIT_TRIES; i++) {
    const pkv_seq *const s = &e->seqs[e->waiting[i]];
    if (s->cancelled || s->paused) continue;
    if (seen++ == at) return e->waiting[i];
    if (s->counted || s->bypasses >= BYPASS_LIMIT) return -1;
  }
  return -1;
}

/* `waiting` is sorted by order. */
static int32_t slot_of(const pkv_engine *e, int64_t order) {
  int32_t low = 0, high = e->waiting_count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (e->seqs[e->waiting[middle]].order < order)
      low = middle + 1;
    else
      high = middle;
  }
  const bool found = low < e->waiting_count && e->seqs[e->waiting[low]].order == order;
  return found ? e->waiting[low] : -1;
}

pkv_status pkv_queue_next(int32_t *slot, pkv_engine *engine, int32_t at, int64_t pages,
                          pkv_error *err) {
  pkv_engine *const e = engine;
  pkv_sched_pick pick = PKV_SCHED_PICK_INIT;
  *slot = -1;
  if (e->sched == NULL) {
    *slot = next_by_arrival(e, at);
    return PKV_OK;
  }
  /* The scheduler knows what the batch shares, not what the cache holds: a refusal for want of
     pages is asked for again without that limit, and the caller looks. */
  if (at > 0) return PKV_OK;
  PKV_TRY(pkv_sched_best(&pick, e->sched, pages, err));
  if (pick.verdict == PKV_SCHED_BLOCKED) PKV_TRY(pkv_sched_best(&pick, e->sched, -1, err));
  if (pick.verdict == PKV_SCHED_STOP) e->stats.sched_stops++;
  if (pick.verdict != PKV_SCHED_ADD) return PKV_OK;
  *slot = slot_of(e, (int64_t)pick.id);
  PKV_CHECK(err, *slot >= 0, PKV_E_INTERNAL,
            "the scheduler picks request %lld, which does not wait", (long long)pick.id);
  return PKV_OK;
}

pkv_status pkv_queue_reward(pkv_engine *engine, double seconds, pkv_error *err) {
  if (engine->sched == NULL || engine->decode_rows == 0 || !(seconds > 0.0)) return PKV_OK;
  return pkv_sched_reward(engine->sched, engine->decode_rows, seconds, err);
}
