/* SPDX-License-Identifier: Apache-2.0 */
#include "support/sched_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "sched/sched_parts.h"
#include "support/sched_twin.h"
#include "support/test_alloc.h"

enum { LONGEST = 96, STEPS_A_SEED = 4000, PROMPTS = 128 };

typedef struct prompt {
  int32_t length, hash_count;
  int32_t tokens[LONGEST];
  uint64_t hashes[LONGEST];
} prompt;

typedef struct world {
  uint64_t seed, next_id;
  int64_t step, clock_ns;
  pkv_rng rng;
  pkv_sched *s;
  sched_twin t;
  prompt prompts[PROMPTS]; /* those of held requests stay as they are */
  int32_t prompt_of[TWIN_MOST];
  bool prompt_used[PROMPTS];
  uint64_t prompt_id[PROMPTS];
  int32_t letters, most;
  int hash_kind;
  pkv_sched_pick pick; /* the last answer */
  int64_t done[12], refused[12];
} world;

static pkv_error err;

#define WRONG(w, ...)                                                                              \
  do {                                                                                             \
    char text_[400];                                                                               \
    snprintf(text_, sizeof text_, __VA_ARGS__);                                                    \
    fail_msg("%s, seed %llu, step %lld: %s", pkv_sched_order_name((w)->t.o.order),                 \
             (unsigned long long)(w)->seed, (long long)(w)->step, text_);                          \
  } while (0)

static int32_t below(world *w, int32_t n) {
  return (int32_t)pkv_rng_below(&w->rng, (uint64_t)n);
}

static bool one_in(world *w, int32_t n) {
  return below(w, n) == 0;
}

static int64_t clock_fn(void *ctx) {
  return ((world *)ctx)->clock_ns;
}

/* Collisions: one value for all, two values, or by the first token. */
static uint64_t hash_fn(void *ctx, const void *data, size_t bytes, uint64_t seed) {
  const world *w = ctx;
  (void)seed;
  int32_t first = 0;
  memcpy(&first, data, bytes < 4 ? bytes : 4);
  return w->hash_kind == 1 ? 7 : w->hash_kind == 2 ? bytes % 2 : (uint64_t)(uint32_t)first;
}

static double cost_fn(void *ctx, const pkv_sched_batch *b) {
  (void)ctx;
  return 3 + 0.5 * b->rows + 0.25 * (double)b->unique_tokens + 0.015625 * (double)b->total_tokens -
         0.015625 * b->chain_tokens + 0.03125 * b->rows * (double)b->common_tokens;
}

/* ---- prompts ---- */

/* Continues a prefix of another prompt, so that prompts branch at every depth. */
static int32_t make_prompt(world *w) {
  int32_t at = below(w, PROMPTS);
  while (w->prompt_used[at])
    at = (at + 1) % PROMPTS;
  prompt *p = &w->prompts[at];
  const prompt *from = &w->prompts[below(w, PROMPTS)];
  const int32_t most = one_in(w, 50) ? LONGEST : w->most;
  int32_t keep = from->length == 0 ? 0 : below(w, from->length + 1);
  p->length = below(w, 8) == 0 ? from->length : keep + below(w, most - keep > 0 ? most - keep : 1);
  if (one_in(w, 12)) keep = 0;
  if (p != from) memmove(p->tokens, from->tokens, sizeof p->tokens);
  for (int32_t i = keep; i < p->length; i++)
    p->tokens[i] = below(w, w->letters);
  const int32_t whole = p->length / w->t.o.chunk_tokens;
  p->hash_count = (int32_t)pkv_sched_digests(p->hashes, p->tokens, (size_t)p->length,
                                             (size_t)w->t.o.chunk_tokens, PKV_SCHED_HASH_TOKENWISE);
  if (one_in(w, 2)) p->hash_count = whole; /* as vLLM: full blocks only */
  return at;
}

/* ---- options ---- */

static void draw_options(world *w, pkv_sched_options *o, pkv_sched_order order) {
  static const int32_t limits[] = {-1, 1, 2, 5, 32};
  o->order = order;
  o->policy = (pkv_sched_policy[]){PKV_SCHED_ALWAYS, PKV_SCHED_STATIC, PKV_SCHED_STATIC_CHAIN,
                                   PKV_SCHED_MARGINAL}[below(w, 4)];
  o->max_requests = one_in(w, 8) ? 1 + below(w, 3) : 8 + below(w, one_in(w, 3) ? 80 : 24);
  o->max_prompt_tokens = LONGEST - 4;
  o->chunk_tokens = 1 + below(w, 4);
  o->page_tokens = 1 + below(w, 4);
  o->pool_pages = one_in(w, 4) ? 20 : 0;
  o->bypass_limit = limits[below(w, 5)];
  o->ageing = one_in(w, 2) ? PKV_SCHED_AGEING_EACH : PKV_SCHED_AGEING_OLDEST;
  o->max_wait_s = one_in(w, 3) ? 40e-9 : 0;
  o->deadline_slack_s = 5e-9;
  o->share_weight = one_in(w, 4) ? 2.5 : 1;
  o->share_min_tokens = one_in(w, 3) ? 1 + below(w, 12) : o->chunk_tokens;
  o->age_tokens_per_s = one_in(w, 4) ? 2e8 : 0;
  o->fit_tries = 1 + below(w, 8);
  o->lpm_fallback = one_in(w, 4) ? 6 : 0;
  o->lpm_in_batch_tokens = one_in(w, 2) ? 1 + below(w, 6) : 0;
  o->static_new_tokens = 1 + below(w, 8);
  o->chain_loss = 1 + below(w, 3);
  o->chain_loss_crowded = o->chain_loss + 1;
  o->crowd = 1 + below(w, 3);
  o->floor_max = 1 + below(w, 6);
  o->max_rows = one_in(w, 3) ? 1 + below(w, 12) : 0;
  o->cost = cost_fn;
  o->clock = clock_fn;
  o->clock_ctx = w;
  if (one_in(w, 3)) o->faults |= PKV_SCHED_FAULT_NO_GUARD;
  if (one_in(w, 6)) o->faults |= PKV_SCHED_FAULT_STICKY_FLOOR;
  if (one_in(w, 6)) o->faults |= PKV_SCHED_FAULT_ABSOLUTE;
  if (one_in(w, 10)) o->faults |= PKV_SCHED_FAULT_NO_AGEING;
  if (one_in(w, 6)) o->faults |= PKV_SCHED_FAULT_STALE_HEAP;
  if (one_in(w, 6)) o->faults |= PKV_SCHED_FAULT_LOST_PREEMPTED;
  if (one_in(w, 4)) o->hash = PKV_SCHED_HASH_TOKENWISE;
  w->hash_kind = one_in(w, 2) ? 1 + below(w, 3) : 0;
  if (w->hash_kind > 0) {
    o->hash_fn = hash_fn;
    o->hash_ctx = w;
  }
}

/* ---- operations: each compares the status with the twin's ---- */

static bool expect(world *w, pkv_status got, pkv_status expected, const char *what) {
  if (got != expected)
    WRONG(w, "%s: %s, expected %s (%s)", what, pkv_status_name(got), pkv_status_name(expected),
          got == PKV_OK ? "" : err.text);
  return got == PKV_OK;
}

static uint64_t any_id(world *w) {
  if (w->t.count == 0 || one_in(w, 25)) return (uint64_t)below(w, 40);
  return w->t.q[below(w, w->t.count)].r.id;
}

static bool op_insert(world *w) {
  pkv_sched_request r = PKV_SCHED_REQUEST_INIT;
  const int32_t at = make_prompt(w);
  const prompt *p = &w->prompts[at];
  /* Few ids, used again and again. */
  r.id = one_in(w, 20) ? any_id(w) : (uint64_t)below(w, 200);
  r.prompt_tokens = p->length;
  if (w->seed % 3 == 0 && one_in(w, 3)) {
    r.hashes = p->hashes;
    r.hash_count = p->hash_count;
  } else {
    r.tokens = p->tokens;
  }
  r.priority = w->seed % 2 ? below(w, 3) - 1 : 0;
  r.arrival_ns = one_in(w, 3) ? w->clock_ns - below(w, 30) : 0;
  if (r.arrival_ns < 0) r.arrival_ns = 0;
  if (w->seed % 5 == 0 && one_in(w, 3)) r.deadline_ns = w->clock_ns + 1 + below(w, 60);
  r.output_tokens = below(w, 10);
  r.pages = one_in(w, 4) ? 1 + below(w, 12) : 0;
  if (w->seed % 4 == 0 && one_in(w, 2)) {
    const uint64_t before = any_id(w);
    const twin_req *behind = twin_find(&w->t, before);
    if (behind != NULL && !one_in(w, 20)) r.priority = behind->r.priority;
    const pkv_status expected = twin_insert_before(&w->t, &r, before, w->clock_ns);
    const pkv_status got = pkv_sched_insert_before(w->s, &r, before, &err);
    if (!expect(w, got, expected, "insert before another")) return false;
  } else {
    const pkv_status expected = twin_insert(&w->t, &r, w->clock_ns);
    if (!expect(w, pkv_sched_insert(w->s, &r, &err), expected, "insert")) return false;
  }
  w->prompt_used[at] = true;
  w->prompt_id[at] = r.id;
  return true;
}

static void gone(world *w, uint64_t id) {
  for (int32_t i = 0; i < PROMPTS; i++)
    if (w->prompt_used[i] && w->prompt_id[i] == id) w->prompt_used[i] = false;
}

static pkv_status in_state(world *w, uint64_t id, pkv_sched_state state) {
  const twin_req *r = twin_find(&w->t, id);
  return r != NULL && r->state == state ? PKV_OK : PKV_E_STATE;
}

static void compare_pick(world *w, const pkv_sched_pick *a, const pkv_sched_pick *b) {
  if (memcmp(a, b, sizeof *a) == 0) return;
  WRONG(w,
        "best: verdict %d reason %d forced %d id %llu shared %d new %d pages %d chain %d %d "
        "sharers %d peers %d bypasses %d waited %lld; twin: %d %d %d %llu %d %d %d %d %d %d %d %d "
        "%lld",
        a->verdict, a->reason, a->forced, (unsigned long long)a->id, a->shared_tokens,
        a->new_tokens, a->new_pages, a->chain_before, a->chain_after, a->waiting_sharers,
        a->waiting_peers, a->bypasses, (long long)a->waited_ns, b->verdict, b->reason, b->forced,
        (unsigned long long)b->id, b->shared_tokens, b->new_tokens, b->new_pages, b->chain_before,
        b->chain_after, b->waiting_sharers, b->waiting_peers, b->bypasses, (long long)b->waited_ns);
}

static bool op_best(world *w) {
  pkv_sched_pick twin, again;
  const int64_t budget = one_in(w, 2) ? -1 : below(w, 14);
  w->pick = again = (pkv_sched_pick)PKV_SCHED_PICK_INIT;
  twin_clock(&w->t, w->clock_ns);
  expect(w, pkv_sched_best(&w->pick, w->s, budget, &err), PKV_OK, "best");
  w->t.tested_count = pkv_sched_ranking_ids(w->t.tested, TWIN_MOST, w->s);
  twin_best(&twin, &w->t, budget);
  compare_pick(w, &w->pick, &twin);
  expect(w, pkv_sched_best(&again, w->s, budget, &err), PKV_OK, "best again");
  compare_pick(w, &again, &twin);
  return w->pick.verdict == PKV_SCHED_ADD;
}

static bool op_admit(world *w) {
  const bool best = !one_in(w, 6) && op_best(w);
  const uint64_t id = best ? w->pick.id : any_id(w);
  const pkv_status expected = in_state(w, id, PKV_SCHED_WAITING);
  const bool last = w->pick.verdict != PKV_SCHED_EMPTY && w->pick.verdict != PKV_SCHED_BLOCKED &&
                    w->pick.id == id && best;
  if (!best) w->s->last.valid = false; /* or it might be what best said before other operations */
  if (!expect(w, pkv_sched_admit(w->s, id, &err), expected, "admit")) return false;
  twin_clock(&w->t, w->clock_ns);
  twin_admit(&w->t, id, last);
  return true;
}

static bool op_finish(world *w) {
  const uint64_t id = any_id(w);
  const pkv_status expected = in_state(w, id, PKV_SCHED_ACTIVE);
  if (!expect(w, pkv_sched_finish(w->s, id, &err), expected, "finish")) return false;
  twin_leave(&w->t, id);
  gone(w, id);
  return true;
}

static bool op_cancel(world *w) {
  const uint64_t id = any_id(w);
  const pkv_status expected = twin_find(&w->t, id) != NULL ? PKV_OK : PKV_E_STATE;
  if (!expect(w, pkv_sched_cancel(w->s, id, &err), expected, "cancel")) return false;
  twin_leave(&w->t, id);
  gone(w, id);
  return true;
}

static bool op_preempt(world *w) {
  const uint64_t id = any_id(w);
  const bool waits = in_state(w, id, PKV_SCHED_WAITING) == PKV_OK;
  if (waits && !one_in(w, 4)) return false; /* those that run are the rule */
  const pkv_status expected = waits ? PKV_OK : in_state(w, id, PKV_SCHED_ACTIVE);
  if (!expect(w, pkv_sched_preempt(w->s, id, &err), expected, "preempt")) return false;
  twin_preempt(&w->t, id);
  return true;
}

static bool op_return(world *w) {
  const uint64_t id = any_id(w);
  const pkv_status expected = in_state(w, id, PKV_SCHED_PREEMPTED);
  if (!expect(w, pkv_sched_return(w->s, id, &err), expected, "return")) return false;
  twin_return(&w->t, id);
  return true;
}

static bool op_clock(world *w) {
  w->clock_ns += one_in(w, 10) ? -below(w, 50) : below(w, 12);
  if (w->clock_ns < 0) w->clock_ns = 0;
  return true;
}

static bool op_reward(world *w) {
  const double seconds = one_in(w, 20) ? 0 : 0.5;
  return expect(w, pkv_sched_reward(w->s, below(w, 5), seconds, &err),
                seconds > 0 ? PKV_OK : PKV_E_INVALID, "reward");
}

/* Everything goes, one way or another. */
static bool op_clear(world *w) {
  if (!one_in(w, 60)) return false;
  while (w->t.count > 0) {
    const uint64_t id = w->t.q[below(w, w->t.count)].r.id;
    expect(w, pkv_sched_cancel(w->s, id, &err), PKV_OK, "clear");
    twin_leave(&w->t, id);
    gone(w, id);
  }
  return true;
}

static const struct {
  const char *name;
  bool (*run)(world *w);
  int weight;
} operations[] = {
    {"insert", op_insert, 26}, {"best", op_best, 14},    {"admit", op_admit, 22},
    {"finish", op_finish, 12}, {"cancel", op_cancel, 5}, {"preempt", op_preempt, 5},
    {"return", op_return, 5},  {"clock", op_clock, 6},   {"reward", op_reward, 4},
    {"clear", op_clear, 1},
};
#define OPERATIONS ((int)(sizeof operations / sizeof operations[0]))

/* ---- checks ---- */

static void check_figures(world *w) {
  pkv_sched_stats s = PKV_SCHED_STATS_INIT;
  pkv_sched_get_stats(&s, w->s);
  const int64_t unique = twin_unique_tokens(&w->t), both = twin_common_tokens(&w->t, NULL);
  const int32_t c = w->t.o.chunk_tokens, chain = (twin_chain(&w->t) + c - 1) / c;
  if (s.waiting != twin_in(&w->t, PKV_SCHED_WAITING) ||
      s.active != twin_in(&w->t, PKV_SCHED_ACTIVE) ||
      s.preempted != twin_in(&w->t, PKV_SCHED_PREEMPTED) || s.unique_tokens != unique ||
      s.common_tokens != both || s.chain_chunks != chain)
    WRONG(w,
          "stats: %d wait, %d active, unique %lld, common %lld, chain %d; twin: unique %lld, "
          "common %lld, chain %d",
          s.waiting, s.active, (long long)s.unique_tokens, (long long)s.common_tokens,
          s.chain_chunks, (long long)unique, (long long)both, chain);
}

static void check_snapshot(world *w) {
  pkv_sched_entry e[TWIN_MOST];
  const int32_t n = pkv_sched_snapshot(e, TWIN_MOST, w->s);
  if (n != w->t.count) WRONG(w, "snapshot has %d of %d", n, w->t.count);
  for (int32_t i = 0; i < n; i++) {
    const twin_req *r = twin_find(&w->t, e[i].id);
    if (r == NULL) WRONG(w, "snapshot has request %llu", (unsigned long long)e[i].id);
    const int32_t shared =
        r->state == PKV_SCHED_ACTIVE ? r->r.prompt_tokens : twin_shared(&w->t, r);
    if (e[i].state != r->state || e[i].shared_tokens != shared ||
        e[i].waiting_since_ns != r->since_ns || pkv_sched_get_state(w->s, e[i].id) != r->state)
      WRONG(w, "snapshot of %llu: state %d shared %d since %lld, twin: %d %d %lld",
            (unsigned long long)e[i].id, e[i].state, e[i].shared_tokens,
            (long long)e[i].waiting_since_ns, r->state, shared, (long long)r->since_ns);
    if (i > 0 && w->t.o.order != PKV_SCHED_FCFS && e[i - 1].priority > e[i].priority)
      WRONG(w, "snapshot: priority %d before %d", e[i - 1].priority, e[i].priority);
  }
}

static void run_seed(world *w, pkv_sched_order order, int64_t steps) {
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator a = test_alloc_allocator(&ta);
  pkv_sched_options o = PKV_SCHED_OPTIONS_INIT;
  pkv_rng_init(&w->rng, w->seed);
  draw_options(w, &o, order);
  o.allocator = &a;
  w->letters = 1 + below(w, 3);
  w->most = one_in(w, 3) ? LONGEST - 4 : 4 + below(w, 20);
  twin_init(&w->t, &o);
  expect(w, pkv_sched_create(&w->s, &o, &err), PKV_OK, "create");
  if (one_in(w, 3)) w->s->queue.next_ord = UINT32_MAX - (uint32_t)below(w, 500); /* it wraps */
  for (w->step = 0; w->step < steps; w->step++) {
    int32_t pick = below(w, 100);
    int i = 0;
    while (pick >= operations[i].weight)
      pick -= operations[i++].weight;
    if (operations[i].run(w))
      w->done[i]++;
    else
      w->refused[i]++;
    if (pkv_sched_check(w->s, &err) != PKV_OK)
      WRONG(w, "after %s: %s", operations[i].name, err.text);
    if (w->step % 8 == 0) check_figures(w);
    if (w->step % 64 == 0) check_snapshot(w);
  }
  pkv_sched_destroy(w->s);
  test_alloc_finish(&ta);
}

void sched_world_run(pkv_sched_order order, uint64_t first_seed, int64_t steps) {
  static world w;
  int64_t done[12] = {0}, refused[12] = {0};
  const char *factor = getenv("PKV_TEST_FACTOR");
  if (factor != NULL) steps *= strtol(factor, NULL, 10);
  for (int64_t left = steps; left > 0; left -= STEPS_A_SEED) {
    memset(&w, 0, sizeof w);
    w.seed = first_seed++;
    run_seed(&w, order, left < STEPS_A_SEED ? left : STEPS_A_SEED);
    for (int i = 0; i < OPERATIONS; i++) {
      done[i] += w.done[i];
      refused[i] += w.refused[i];
    }
  }
  for (int i = 0; i < OPERATIONS; i++) {
    print_message("  %-8s done %8lld, refused or idle %8lld\n", operations[i].name,
                  (long long)done[i], (long long)refused[i]);
    assert_true(done[i] > 0);
  }
}
