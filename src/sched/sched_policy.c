/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When to stop. A policy is asked about a candidate and the batch as it is; it has no choice when
 * the batch is empty, when the candidate waited too long, and when nothing is shared in the batch:
 * then stopping protects nothing, and every policy does what `always` does.
 */
#include "sched/sched_parts.h"

#include <math.h>
#include <string.h>

pkv_status pkv_sched_policy_create(pkv_sched *s, pkv_error *err) {
  if (s->o.policy != PKV_SCHED_UCB && s->o.policy != PKV_SCHED_Q_LEARNING) return PKV_OK;
  s->learner = pkv_sched_take(s, 1, sizeof *s->learner);
  PKV_CHECK(err, s->learner, PKV_E_NOMEM, "no memory for a learner");
  pkv_sched_learner_reset(s);
  return PKV_OK;
}

void pkv_sched_policy_destroy(pkv_sched *s) {
  pkv_sched_give(s, s->learner, 1, sizeof *s->learner);
}

static double cost(const pkv_sched *s, const pkv_sched_batch *b) {
  if (s->o.cost == NULL)
    return 1e-6 * (s->o.cost_base_us + s->o.cost_row_us * b->rows +
                   s->o.cost_token_us * (double)b->unique_tokens);
  const double seconds = s->o.cost(s->o.cost_ctx, b);
  return isfinite(seconds) && seconds > 0 ? seconds : 0;
}

/* Peers of the candidate that fit besides it, each with the pages of its answer; none where the
   order would not take them next. */
static int32_t peers_that_fit(const pkv_sched *s, const pkv_sched_pick *pick, uint32_t slot,
                              int64_t page_budget) {
  int64_t most = pick->waiting_peers;
  if (s->o.order == PKV_SCHED_FCFS || s->o.order == PKV_SCHED_PRIORITY) return 0;
  if (s->o.max_rows > 0 && most > s->o.max_rows - s->active - 1)
    most = s->o.max_rows - s->active - 1;
  if (page_budget >= 0) {
    const int64_t own = s->reqs[slot].pages - pick->prompt_tokens / s->o.page_tokens;
    const int64_t fit = (page_budget - pick->new_pages) / (own > 0 ? own : 1);
    if (most > fit) most = fit;
  }
  return most > 0 ? (int32_t)most : 0;
}

/* The batch when half of its rows have ended, and all that it shares is still shared. */
static pkv_sched_batch half(const pkv_sched_batch *b) {
  const int64_t tails = b->unique_tokens - b->common_tokens, left = b->total_tokens / 2;
  const int64_t unique = b->common_tokens + tails / 2;
  return (pkv_sched_batch){(b->rows + 1) / 2, b->chain_tokens, left > unique ? left : unique,
                           unique, b->common_tokens};
}

/*
 * Whether the batch with the candidate and its peers takes no longer than the batch as it is and,
 * after it, theirs: then a token costs less when they run together. Asked of the batches as they
 * would be now and when half of the rows have ended, as a batch that takes no more rows runs
 * emptier and emptier; together it is if either says so. What peers do not share is not known and
 * counts on both sides.
 */
static bool pays(const pkv_sched *s, const pkv_sched_pick *pick, const pkv_sched_view *view,
                 uint32_t slot, int64_t page_budget) {
  const int32_t peers = peers_that_fit(s, pick, slot, page_budget), prompt = pick->prompt_tokens;
  const int64_t all = ((int64_t)peers + 1) * prompt;
  const int32_t read_twice = view->shared_tokens - pkv_sched_shared(s, slot, 2);
  const pkv_sched_batch present = {s->active, view->chain_before, s->total_tokens, s->unique_tokens,
                                   s->common_tokens};
  const pkv_sched_batch alone = {peers + 1, prompt, all, prompt, peers > 0 ? prompt : 0};
  const pkv_sched_batch together = {s->active + peers + 1, view->chain_after, s->total_tokens + all,
                                    s->unique_tokens + pick->new_tokens,
                                    s->common_tokens + read_twice +
                                        (peers > 0 ? pick->new_tokens : 0)};
  const pkv_sched_batch p = half(&present), a = half(&alone), t = half(&together);
  return cost(s, &together) + cost(s, &t) <=
         cost(s, &present) + cost(s, &p) + cost(s, &alone) + cost(s, &a);
}

static bool within_loss(const pkv_sched *s, const pkv_sched_pick *pick) {
  const int32_t limit =
      pick->waiting_sharers >= s->o.crowd ? s->o.chain_loss_crowded : s->o.chain_loss;
  return pick->chain_before - pick->chain_after <= limit;
}

static pkv_sched_verdict verdict(pkv_sched *s, const pkv_sched_pick *pick,
                                 const pkv_sched_view *view, uint32_t slot, int64_t page_budget) {
  bool add = true;
  switch (s->o.policy) {
  case PKV_SCHED_ALWAYS:
    break;
  case PKV_SCHED_STATIC:
    add = pick->new_tokens <= s->o.static_new_tokens;
    break;
  case PKV_SCHED_STATIC_CHAIN:
    s->last.state = within_loss(s, pick);
    add = s->last.state || s->active < s->floor;
    break;
  case PKV_SCHED_UCB:
  case PKV_SCHED_Q_LEARNING:
    if (pick->chain_before == pick->chain_after) break; /* nothing to weigh */
    s->last.decided = true;
    s->last.state = pkv_sched_learner_state(s->active, pick->chain_before, pick->chain_after,
                                            pick->waiting_sharers);
    return pkv_sched_learner_choose(s, s->last.state);
  case PKV_SCHED_MARGINAL:
    add = pays(s, pick, view, slot, page_budget);
    break;
  }
  return add ? PKV_SCHED_ADD : PKV_SCHED_STOP;
}

void pkv_sched_decide(pkv_sched *s, pkv_sched_pick *pick, const pkv_sched_view *view, uint32_t slot,
                      int64_t page_budget) {
  const bool guarded =
      !pkv_sched_fault(s, PKV_SCHED_FAULT_NO_GUARD) && s->unique_tokens == s->total_tokens;
  s->last = (pkv_sched_last){true, false, PKV_SCHED_ADD, pick->reason, slot, 0};
  pick->forced = s->active == 0 || pick->reason == PKV_SCHED_BY_WAIT || guarded;
  if (!pick->forced) s->last.verdict = verdict(s, pick, view, slot, page_budget);
  pick->verdict = s->last.verdict;
}

void pkv_sched_policy_admitted(pkv_sched *s) {
  if (s->o.policy == PKV_SCHED_STATIC_CHAIN && s->last.state && s->floor < s->o.floor_max)
    s->floor++;
  if (s->last.decided) pkv_sched_learner_note(s, s->last.state, PKV_SCHED_ADD);
}

void pkv_sched_policy_stopped(pkv_sched *s) {
  if (!s->last.valid || s->last.verdict != PKV_SCHED_STOP) return;
  s->stats.stops++;
  if (s->last.decided) pkv_sched_learner_note(s, s->last.state, PKV_SCHED_STOP);
  s->last.valid = false;
}

void pkv_sched_policy_drained(pkv_sched *s) {
  if (!pkv_sched_fault(s, PKV_SCHED_FAULT_STICKY_FLOOR)) s->floor = 1;
}
