/* SPDX-License-Identifier: Apache-2.0 */
/* The scheduler's handle: options, requests coming and going, counters. */
#include "sched/sched_parts.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"

#define NONE PKV_SCHED_NONE

const char *pkv_sched_order_name(pkv_sched_order order) {
  static const char *const names[PKV_SCHED_ORDERS] = {"tree", "fcfs", "priority",
                                                      "cht",  "lpm",  "dfs-weight"};
  return (int)order >= 0 && (int)order < PKV_SCHED_ORDERS ? names[order] : "?";
}

const char *pkv_sched_policy_name(pkv_sched_policy policy) {
  static const char *const names[PKV_SCHED_POLICIES] = {"always", "static",     "static-chain",
                                                        "ucb",    "q-learning", "marginal"};
  return (int)policy >= 0 && (int)policy < PKV_SCHED_POLICIES ? names[policy] : "?";
}

void *pkv_sched_take(pkv_sched *s, size_t count, size_t size) {
  size_t bytes;
  if (!pkv_mul_size(&bytes, count, size)) return NULL;
  void *p = pkv_alloc(&s->allocator, bytes);
  if (p != NULL) s->allocated += (int64_t)bytes;
  return p;
}

void pkv_sched_give(pkv_sched *s, void *ptr, size_t count, size_t size) {
  if (ptr == NULL) return;
  s->allocated -= (int64_t)(count * size);
  pkv_free(&s->allocator, ptr, count * size);
}

/* ---- options ---- */

#define CHECK_INT(o, field, low, high)                                                             \
  PKV_CHECK(err, (int32_t)(o)->field >= (low) && (int32_t)(o)->field <= (high), PKV_E_INVALID,     \
            "options->" #field " is %d, possible: %d to %d", (int)(o)->field, (int)(low),          \
            (int)(high))
/* NaN fails too. */
#define CHECK_REAL(o, field, low, high)                                                            \
  PKV_CHECK(err, (o)->field >= (low) && (o)->field <= (high), PKV_E_INVALID,                       \
            "options->" #field " is %g, possible: %g to %g", (double)(o)->field, (double)(low),    \
            (double)(high))

static pkv_status check_options(const pkv_sched_options *o, pkv_error *err) {
  PKV_CHECK_STRUCT(err, o, pkv_sched_options);
  CHECK_INT(o, order, 0, PKV_SCHED_ORDERS - 1);
  CHECK_INT(o, policy, 0, PKV_SCHED_POLICIES - 1);
  CHECK_INT(o, max_requests, 0, PKV_SCHED_MAX_REQUESTS);
  CHECK_INT(o, max_prompt_tokens, 0, PKV_SCHED_MAX_PROMPT);
  CHECK_INT(o, chunk_tokens, 0, PKV_SCHED_MAX_CHUNK);
  CHECK_INT(o, page_tokens, 0, PKV_SCHED_MAX_CHUNK);
  CHECK_INT(o, pool_pages, 0, INT32_MAX);
  CHECK_INT(o, bypass_limit, -1, INT32_MAX);
  CHECK_INT(o, ageing, 0, PKV_SCHED_AGEING_OLDEST);
  CHECK_REAL(o, max_wait_s, 0, 1e9);
  CHECK_REAL(o, deadline_slack_s, 0, 1e9);
  CHECK_REAL(o, share_weight, -1, 1000);
  PKV_CHECK(err, o->share_weight >= 0 || o->share_weight == -1, PKV_E_INVALID,
            "options->share_weight is %g, possible: 0 to 1000, or -1 for none", o->share_weight);
  CHECK_INT(o, share_min_tokens, 0, PKV_SCHED_MAX_PROMPT);
  CHECK_REAL(o, age_tokens_per_s, 0, 1e9);
  CHECK_INT(o, fit_tries, 0, PKV_SCHED_MOST_TRIES);
  CHECK_INT(o, lpm_fallback, 0, INT32_MAX);
  CHECK_INT(o, lpm_in_batch_tokens, 0, PKV_SCHED_MAX_PROMPT);
  return PKV_OK;
}

static pkv_status check_policy_options(const pkv_sched_options *o, pkv_error *err) {
  CHECK_INT(o, static_new_tokens, 0, INT32_MAX);
  CHECK_INT(o, chain_loss, 0, INT32_MAX);
  CHECK_INT(o, chain_loss_crowded, 0, INT32_MAX);
  CHECK_INT(o, crowd, 0, INT32_MAX);
  CHECK_INT(o, floor_max, 0, INT32_MAX);
  CHECK_REAL(o, ucb_bonus, 0, 1e12);
  CHECK_REAL(o, q_rate, 0, 1);
  CHECK_REAL(o, q_discount, 0, 1);
  CHECK_REAL(o, q_explore, -1, 1);
  CHECK_REAL(o, prior_weight, -1, 1e6);
  CHECK_REAL(o, cost_base_us, 0, 1e12);
  CHECK_INT(o, max_rows, 0, INT32_MAX);
  CHECK_REAL(o, cost_row_us, 0, 1e12);
  CHECK_REAL(o, cost_token_us, 0, 1e12);
  CHECK_INT(o, hash, 0, PKV_SCHED_HASH_TOKENWISE);
  PKV_CHECK(err, (o->faults & ~PKV_SCHED_FAULTS_ALL) == 0, PKV_E_INVALID,
            "options->faults is %#x, known: %#x", (unsigned)o->faults,
            (unsigned)PKV_SCHED_FAULTS_ALL);
  return PKV_OK;
}

static void default_int(int32_t *value, int32_t standard) {
  if (*value == 0) *value = standard;
}

/* 0 is the default, a negative value stands for 0. */
static void default_real(double *value, double standard) {
  if (*value == 0)
    *value = standard;
  else if (*value < 0)
    *value = 0;
}

static void resolve(pkv_sched *s, const pkv_sched_options *options) {
  pkv_sched_options *o = &s->o;
  *o = *options;
  default_int(&o->max_requests, 16384);
  default_int(&o->max_prompt_tokens, 1 << 20);
  default_int(&o->chunk_tokens, 64);
  default_int(&o->page_tokens, 16);
  default_int(&o->bypass_limit, 32);
  default_int(&o->share_min_tokens, o->chunk_tokens);
  default_int(&o->fit_tries, 8);
  default_int(&o->static_new_tokens, 500);
  default_int(&o->chain_loss, 5);
  default_int(&o->chain_loss_crowded, 7);
  default_int(&o->crowd, 10);
  default_int(&o->floor_max, 10);
  default_real(&o->deadline_slack_s, 1);
  default_real(&o->share_weight, 1);
  default_real(&o->ucb_bonus, 200);
  default_real(&o->q_rate, 0.1);
  default_real(&o->q_discount, 0.9);
  default_real(&o->q_explore, 0.05);
  default_real(&o->prior_weight, 4);
  default_real(&o->cost_base_us, 5000);
  default_real(&o->cost_row_us, 8);
  default_real(&o->cost_token_us, 0.03);
  s->share8 = llround(o->share_weight * PKV_SCHED_UNIT);
  s->age8 = llround(o->age_tokens_per_s * PKV_SCHED_UNIT);
  s->capacity = (uint32_t)o->max_requests;
  s->floor = 1;
}

pkv_status pkv_sched_create(pkv_sched **out, const pkv_sched_options *options, pkv_error *err) {
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_TRY(check_options(options, err));
  PKV_TRY(check_policy_options(options, err));
  const pkv_allocator allocator = pkv_allocator_or_default(options->allocator);
  pkv_sched *s = pkv_alloc_zeroed(&allocator, 1, sizeof *s);
  PKV_CHECK(err, s, PKV_E_NOMEM, "no memory for a scheduler");
  s->allocator = allocator;
  s->allocated = (int64_t)sizeof *s;
  resolve(s, options);
  s->free = NONE;
  s->reqs = pkv_sched_take(s, s->capacity, sizeof *s->reqs);
  s->cells = pkv_sched_take(s, s->capacity, sizeof *s->cells);
  pkv_status status = PKV_OK;
  if (s->reqs == NULL || s->cells == NULL)
    status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for %u requests", s->capacity);
  if (status == PKV_OK) status = pkv_sched_map_init(&s->ids, s->capacity, &allocator, err);
  if (status == PKV_OK) s->allocated += (int64_t)pkv_sched_map_bytes(&s->ids);
  if (status == PKV_OK) status = pkv_sched_queue_init(s, err);
  if (status == PKV_OK)
    status = s->o.order == PKV_SCHED_CHT ? pkv_cht_create(s, err) : pkv_tree_create(s, err);
  if (status == PKV_OK) status = pkv_sched_ranking_create(s, err);
  if (status == PKV_OK) status = pkv_sched_policy_create(s, err);
  if (status != PKV_OK)
    pkv_sched_destroy(s);
  else
    *out = s;
  return status;
}

void pkv_sched_destroy(pkv_sched *sched) {
  if (sched == NULL) return;
  pkv_sched_policy_destroy(sched);
  pkv_sched_ranking_destroy(sched);
  pkv_cht_destroy(sched);
  pkv_tree_destroy(sched);
  pkv_sched_queue_deinit(sched);
  pkv_sched_map_deinit(&sched->ids, &sched->allocator);
  pkv_sched_give(sched, sched->cells, sched->capacity, sizeof *sched->cells);
  pkv_sched_give(sched, sched->reqs, sched->capacity, sizeof *sched->reqs);
  const pkv_allocator allocator = sched->allocator;
  pkv_free(&allocator, sched, sizeof *sched);
}

/* ---- requests ---- */

static uint32_t find(const pkv_sched *s, uint64_t id) {
  for (uint32_t at = pkv_sched_map_first(&s->ids, id); at != UINT32_MAX;
       at = pkv_sched_map_next(&s->ids, id, at))
    if (s->reqs[s->ids.entries[at].ref].id == id) return s->ids.entries[at].ref;
  return NONE;
}

int64_t pkv_sched_now(pkv_sched *s) {
  const int64_t t = s->o.clock != NULL ? s->o.clock(s->o.clock_ctx) : pkv_clock_ns();
  if (!s->started || t > s->now_ns) s->now_ns = t;
  if (!s->started) {
    s->base_ns = s->last_since_ns = s->now_ns;
    s->started = true;
  }
  return s->now_ns;
}

int64_t pkv_sched_base_key(const pkv_sched *s, uint32_t slot, int64_t length8) {
  const pkv_sched_req *r = &s->reqs[slot];
  double age = (double)(r->since_ns - s->base_ns) * 1e-9 * (double)s->age8;
  if (age > (double)PKV_SCHED_AGE_LIMIT) age = (double)PKV_SCHED_AGE_LIMIT;
  return pkv_sched_class_priority(s, slot) * ((int64_t)1 << PKV_SCHED_CLASS_BITS) + length8 +
         (int64_t)age;
}

static int64_t pages_of(const pkv_sched *s, const pkv_sched_request *r) {
  if (r->pages > 0) return r->pages;
  return ((int64_t)r->prompt_tokens + r->output_tokens + s->o.page_tokens - 1) / s->o.page_tokens;
}

static pkv_status check_request(const pkv_sched *s, const pkv_sched_request *r, pkv_error *err) {
  const unsigned long long id = r->id;
  PKV_CHECK(err, r->prompt_tokens >= 0 && r->hash_count >= 0, PKV_E_INVALID,
            "request %llu: prompt_tokens is %d, hash_count %d, possible: 0 and more", id,
            r->prompt_tokens, r->hash_count);
  PKV_CHECK(err, r->prompt_tokens <= s->o.max_prompt_tokens, PKV_E_LIMIT,
            "request %llu: prompt_tokens is %d, at most %d (options->max_prompt_tokens)", id,
            r->prompt_tokens, s->o.max_prompt_tokens);
  PKV_CHECK(err, r->tokens == NULL || r->hashes == NULL, PKV_E_INVALID,
            "request %llu: tokens and hashes are both given", id);
  PKV_CHECK(err,
            r->hashes != NULL ? r->hash_count <= pkv_sched_chunks(s, r->prompt_tokens)
                              : r->hash_count == 0,
            PKV_E_INVALID, "request %llu: hash_count is %d, %s", id, r->hash_count,
            r->hashes != NULL ? "the prompt has fewer chunks" : "but hashes is NULL");
  PKV_CHECK(err, r->tokens != NULL || r->hashes != NULL || r->prompt_tokens == 0, PKV_E_INVALID,
            "request %llu: neither tokens nor hashes are given", id);
  PKV_CHECK(err, r->output_tokens >= 0 && r->pages >= 0, PKV_E_INVALID,
            "request %llu: output_tokens is %d, pages %d, possible: 0 and more", id,
            r->output_tokens, r->pages);
  PKV_CHECK(err, r->priority >= -PKV_SCHED_MAX_PRIORITY && r->priority <= PKV_SCHED_MAX_PRIORITY,
            PKV_E_INVALID, "request %llu: priority is %d, possible: -%d to %d", id, r->priority,
            PKV_SCHED_MAX_PRIORITY, PKV_SCHED_MAX_PRIORITY);
  PKV_CHECK(err, r->arrival_ns >= 0 && r->deadline_ns >= 0, PKV_E_INVALID,
            "request %llu: arrival_ns is %lld, deadline_ns %lld, possible: 0 and more", id,
            (long long)r->arrival_ns, (long long)r->deadline_ns);
  PKV_CHECK(err, s->o.pool_pages == 0 || pages_of(s, r) <= s->o.pool_pages, PKV_E_LIMIT,
            "request %llu needs %lld pages, the cache has %d (options->pool_pages)", id,
            (long long)pages_of(s, r), s->o.pool_pages);
  return PKV_OK;
}

static int32_t held(const pkv_sched *s) {
  return s->waiting + s->active + s->preempted;
}

static size_t used_bytes(const pkv_sched *s) {
  const size_t n = (size_t)held(s);
  const size_t ids =
      (size_t)((double)pkv_sched_map_bytes(&s->ids) * (double)n / (double)s->capacity);
  return n * (sizeof *s->reqs + sizeof *s->cells) + ids +
         s->queue.deadline_count * sizeof *s->queue.deadlines +
         (s->tree != NULL ? pkv_tree_used(s) : pkv_cht_used(s));
}

static void note_used(pkv_sched *s) {
  const int64_t used = (int64_t)used_bytes(s);
  if (used > s->used_peak) s->used_peak = used;
}

/* What pkv_sched_best last said no longer holds. */
static void changed(pkv_sched *s) {
  s->last.valid = false;
}

static uint32_t take_slot(pkv_sched *s) {
  const uint32_t slot = s->free;
  if (slot == NONE) return s->fresh++;
  s->free = s->reqs[slot].younger;
  return slot;
}

static void give_slot(pkv_sched *s, uint32_t slot) {
  s->reqs[slot].place = PKV_SCHED_FREE;
  s->reqs[slot].younger = s->free;
  s->free = slot;
}

/* From when it waits; never out of the order of ages. */
static int64_t since_of(pkv_sched *s, const pkv_sched_request *request, uint32_t before) {
  const int64_t t = pkv_sched_now(s);
  int64_t since = request->arrival_ns != 0 && request->arrival_ns < t ? request->arrival_ns : t;
  int64_t least = s->last_since_ns;
  if (before != NONE) {
    const uint32_t older = s->reqs[before].older;
    least = older != NONE ? s->reqs[older].since_ns : s->base_ns;
    if (since > s->reqs[before].since_ns) since = s->reqs[before].since_ns;
  }
  if (since < least) since = least;
  if (before == NONE) s->last_since_ns = since;
  return since;
}

static void fill(pkv_sched *s, uint32_t slot, const pkv_sched_request *request, uint32_t before) {
  const int64_t since = since_of(s, request, before);
  pkv_sched_req *r = &s->reqs[slot];
  memset(r, 0, sizeof *r);
  r->id = request->id;
  r->by_hash = request->hashes != NULL;
  r->data = r->by_hash ? (const void *)request->hashes : (const void *)request->tokens;
  r->since_ns = since;
  r->prompt = request->prompt_tokens;
  const int64_t hashed = (int64_t)request->hash_count * s->o.chunk_tokens;
  r->hashed = !r->by_hash || hashed > r->prompt ? r->prompt : (int32_t)hashed;
  const int64_t pages = pages_of(s, request);
  r->pages = pages > INT32_MAX ? INT32_MAX : (int32_t)pages;
  r->priority = request->priority;
  r->node = NONE;
  r->place = PKV_SCHED_IS_WAITING;
}

static pkv_status check_insert(pkv_sched *sched, const pkv_sched_request *request, pkv_error *err) {
  PKV_CHECK_STRUCT(err, request, pkv_sched_request);
  PKV_TRY(check_request(sched, request, err));
  const unsigned long long id = request->id;
  PKV_CHECK(err, find(sched, request->id) == NONE, PKV_E_STATE, "request %llu is held already", id);
  PKV_CHECK(err, (uint32_t)held(sched) < sched->capacity, PKV_E_LIMIT,
            "%d requests are held, no more are possible (options->max_requests)", held(sched));
  const int32_t class_priority = sched->o.order == PKV_SCHED_FCFS ? 0 : request->priority;
  return pkv_sched_queue_ready(sched, class_priority, request->deadline_ns != 0, err);
}

/* Ahead of a request, NONE = behind all. Checked before. */
static pkv_status put_in(pkv_sched *sched, const pkv_sched_request *request, uint32_t before,
                         pkv_error *err) {
  uint32_t ord;
  PKV_TRY(pkv_sched_queue_place(&ord, sched, before, err));
  const uint32_t slot = take_slot(sched);
  const int64_t last_since_ns = sched->last_since_ns;
  fill(sched, slot, request, before);
  sched->cells[slot].k.ord = ord;
  if (sched->cht != NULL) {
    const pkv_status status = pkv_cht_insert(sched, slot, err);
    if (status != PKV_OK) {
      give_slot(sched, slot);
      if (sched->stats.inserted > 0) sched->last_since_ns = last_since_ns;
      return status;
    }
  } else {
    pkv_tree_insert(sched, slot);
  }
  pkv_sched_queue_insert(sched, slot, before, request->deadline_ns);
  pkv_sched_map_add(&sched->ids, request->id, slot);
  sched->waiting++;
  sched->changes++;
  sched->stats.inserted++;
  changed(sched);
  note_used(sched);
  return PKV_OK;
}

pkv_status pkv_sched_insert(pkv_sched *sched, const pkv_sched_request *request, pkv_error *err) {
  PKV_CHECK(err, sched, PKV_E_INVALID, "sched is NULL");
  PKV_TRY(check_insert(sched, request, err));
  return put_in(sched, request, NONE, err);
}

pkv_status pkv_sched_insert_before(pkv_sched *sched, const pkv_sched_request *request,
                                   uint64_t before, pkv_error *err) {
  PKV_CHECK(err, sched, PKV_E_INVALID, "sched is NULL");
  PKV_TRY(check_insert(sched, request, err));
  const uint32_t slot = find(sched, before);
  const unsigned long long id = before;
  PKV_CHECK(err, slot != NONE, PKV_E_STATE, "request %llu is not held", id);
  PKV_CHECK(err,
            sched->o.order == PKV_SCHED_FCFS || sched->reqs[slot].priority == request->priority,
            PKV_E_INVALID, "request->priority is %d, request %llu has %d", request->priority, id,
            sched->reqs[slot].priority);
  return put_in(sched, request, slot, err);
}

/* ---- from one state to another ---- */

void pkv_sched_move(pkv_sched *s, uint32_t slot, pkv_sched_place to) {
  if (s->cht != NULL)
    pkv_cht_move(s, slot, to);
  else
    pkv_tree_move(s, slot, to);
}

int32_t pkv_sched_shared(const pkv_sched *s, uint32_t slot, int32_t others) {
  return s->cht != NULL ? pkv_cht_shared(s, slot, others) : pkv_tree_shared(s, slot, others);
}

/* A request joins the batch (by = 1) or leaves it; how many of its tokens others there have. */
static int32_t count_tokens(pkv_sched *s, uint32_t slot, int by) {
  const int32_t prompt = s->reqs[slot].prompt, shared = pkv_sched_shared(s, slot, 1);
  s->total_tokens += by * prompt;
  s->unique_tokens += by * (prompt - shared);
  s->common_tokens += by * (shared - pkv_sched_shared(s, slot, 2));
  return shared;
}

static pkv_status find_in(uint32_t *slot, const pkv_sched *s, uint64_t id, pkv_sched_place place,
                          pkv_error *err) {
  static const char *const names[] = {"not held", "waiting", "active", "preempted"};
  PKV_CHECK(err, s, PKV_E_INVALID, "sched is NULL");
  *slot = find(s, id);
  const int is = *slot == NONE ? PKV_SCHED_FREE : s->reqs[*slot].place;
  PKV_CHECK(err, is == (int)place, PKV_E_STATE, "request %llu is %s, not %s",
            (unsigned long long)id, names[is], names[place]);
  return PKV_OK;
}

static void count_admission(pkv_sched *s, uint32_t slot, int32_t shared) {
  pkv_sched_req *r = &s->reqs[slot];
  pkv_sched_stats *n = &s->stats;
  const pkv_sched_class *c = pkv_sched_class_of(s, slot);
  n->admitted++;
  n->shared_tokens += shared;
  n->new_tokens += r->prompt - shared;
  if (s->last.valid && s->last.slot == slot) n->by_reason[s->last.reason]++;
  if (s->o.ageing == PKV_SCHED_AGEING_EACH && c->oldest == slot && c->passed > n->max_bypasses)
    n->max_bypasses = c->passed;
  if (r->admitted) return;
  r->admitted = true;
  const int64_t wait = s->now_ns - r->since_ns;
  n->sum_wait_ns += wait;
  if (wait > n->max_wait_ns) n->max_wait_ns = wait;
}

pkv_status pkv_sched_admit(pkv_sched *sched, uint64_t id, pkv_error *err) {
  uint32_t slot;
  PKV_TRY(find_in(&slot, sched, id, PKV_SCHED_IS_WAITING, err));
  pkv_sched_req *r = &sched->reqs[slot];
  (void)pkv_sched_now(sched);
  count_admission(sched, slot, count_tokens(sched, slot, 1));
  if (sched->last.valid && sched->last.slot == slot) pkv_sched_policy_admitted(sched);
  if (r->deadline != 0) pkv_sched_deadline_remove(sched, slot);
  pkv_sched_move(sched, slot, PKV_SCHED_IS_ACTIVE);
  pkv_sched_queue_leave(sched, slot, true);
  sched->waiting--;
  sched->active++;
  changed(sched);
  return PKV_OK;
}

/* An active request is about to leave the batch. */
static void leave_batch(pkv_sched *s, uint32_t slot) {
  (void)count_tokens(s, slot, -1);
  s->active--;
  s->changes++;
  pkv_sched_policy_stopped(s);
  if (s->active == 0) pkv_sched_policy_drained(s);
}

static void drop(pkv_sched *s, uint32_t slot) {
  if (s->cht != NULL)
    pkv_cht_remove(s, slot);
  else
    pkv_tree_remove(s, slot);
  pkv_sched_queue_remove(s, slot);
  pkv_sched_map_remove(&s->ids, s->reqs[slot].id, slot);
  give_slot(s, slot);
  changed(s);
}

pkv_status pkv_sched_finish(pkv_sched *sched, uint64_t id, pkv_error *err) {
  uint32_t slot;
  PKV_TRY(find_in(&slot, sched, id, PKV_SCHED_IS_ACTIVE, err));
  leave_batch(sched, slot);
  drop(sched, slot);
  sched->stats.finished++;
  return PKV_OK;
}

/* A waiting request is about to wait no longer, without having been admitted. */
static void leave_queue(pkv_sched *s, uint32_t slot) {
  if (s->reqs[slot].deadline != 0) pkv_sched_deadline_remove(s, slot);
  pkv_sched_queue_leave(s, slot, false);
  s->waiting--;
  s->changes++;
}

pkv_status pkv_sched_preempt(pkv_sched *sched, uint64_t id, pkv_error *err) {
  PKV_CHECK(err, sched, PKV_E_INVALID, "sched is NULL");
  uint32_t slot = find(sched, id);
  const bool waits = slot != NONE && sched->reqs[slot].place == PKV_SCHED_IS_WAITING;
  if (!waits) PKV_TRY(find_in(&slot, sched, id, PKV_SCHED_IS_ACTIVE, err));
  if (!waits) leave_batch(sched, slot);
  pkv_sched_move(sched, slot, PKV_SCHED_IS_PREEMPTED);
  if (waits) leave_queue(sched, slot); /* once it counts as one that does not wait */
  sched->preempted++;
  sched->stats.preempts++;
  changed(sched);
  return PKV_OK;
}

pkv_status pkv_sched_return(pkv_sched *sched, uint64_t id, pkv_error *err) {
  uint32_t slot;
  PKV_TRY(find_in(&slot, sched, id, PKV_SCHED_IS_PREEMPTED, err));
  pkv_sched_move(sched, slot, PKV_SCHED_IS_WAITING);
  pkv_sched_queue_return(sched, slot);
  sched->preempted--;
  sched->waiting++;
  sched->changes++;
  sched->stats.returns++;
  changed(sched);
  return PKV_OK;
}

pkv_status pkv_sched_cancel(pkv_sched *sched, uint64_t id, pkv_error *err) {
  PKV_CHECK(err, sched, PKV_E_INVALID, "sched is NULL");
  const uint32_t slot = find(sched, id);
  PKV_CHECK(err, slot != NONE, PKV_E_STATE, "request %llu is not held", (unsigned long long)id);
  pkv_sched_req *r = &sched->reqs[slot];
  if (r->place == PKV_SCHED_IS_ACTIVE) {
    leave_batch(sched, slot);
  } else if (r->place == PKV_SCHED_IS_PREEMPTED) {
    sched->preempted--;
  } else {
    leave_queue(sched, slot);
  }
  drop(sched, slot);
  sched->changes++;
  sched->stats.cancelled++;
  return PKV_OK;
}

pkv_status pkv_sched_reward(pkv_sched *sched, int32_t rows, double seconds, pkv_error *err) {
  PKV_CHECK(err, sched, PKV_E_INVALID, "sched is NULL");
  PKV_CHECK(err, rows >= 0 && seconds > 0 && isfinite(seconds), PKV_E_INVALID,
            "rows is %d, seconds %g, possible: 0 and more, and more than 0", rows, seconds);
  pkv_sched_policy_stopped(sched);
  pkv_sched_policy_reward(sched, rows, seconds);
  sched->stats.rewards++;
  changed(sched);
  return PKV_OK;
}

/* ---- looking inside ---- */

pkv_sched_state pkv_sched_get_state(const pkv_sched *sched, uint64_t id) {
  const uint32_t slot = find(sched, id);
  return slot == NONE ? PKV_SCHED_UNKNOWN : (pkv_sched_state)sched->reqs[slot].place;
}

void pkv_sched_get_stats(pkv_sched_stats *out, const pkv_sched *sched) {
  *out = sched->stats;
  out->struct_size = (uint32_t)sizeof *out;
  out->waiting = sched->waiting;
  out->active = sched->active;
  out->preempted = sched->preempted;
  out->total_tokens = sched->total_tokens;
  out->unique_tokens = sched->unique_tokens;
  out->common_tokens = sched->common_tokens;
  if (sched->cht != NULL) {
    out->chain_chunks = pkv_sched_chunks(sched, pkv_cht_chain(sched));
    out->tree_nodes = pkv_cht_keys(sched);
    out->heap_stale = pkv_cht_stale(sched);
  } else {
    out->chain_chunks = pkv_sched_chunks(sched, pkv_tree_chain(sched));
    out->tree_nodes = pkv_tree_nodes(sched);
  }
  out->memory_bytes = sched->allocated;
  out->used_bytes = (int64_t)used_bytes(sched);
  out->peak_used_bytes = sched->used_peak;
}

int32_t pkv_sched_snapshot(pkv_sched_entry *entries, int32_t capacity, const pkv_sched *sched) {
  int32_t n = 0;
  for (int32_t i = 0; i < sched->queue.class_count; i++)
    for (uint32_t at = sched->queue.classes[i].head; at != NONE; at = sched->reqs[at].younger) {
      const pkv_sched_req *r = &sched->reqs[at];
      if (n < capacity)
        entries[n] = (pkv_sched_entry){
            r->id,
            (pkv_sched_state)r->place,
            r->priority,
            r->prompt,
            r->place == PKV_SCHED_IS_ACTIVE ? r->prompt : pkv_sched_shared(sched, at, 1),
            r->since_ns};
      n++;
    }
  return n;
}
