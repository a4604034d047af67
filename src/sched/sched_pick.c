/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pkv_sched_best: the rules in their order, and the page budget. A candidate that does not fit is
 * hidden while the next one is sought; afterwards all are as they were.
 */
#include "sched/sched_parts.h"

#include <string.h>

#define NONE PKV_SCHED_NONE

typedef struct candidate {
  uint32_t slot;
  pkv_sched_reason reason;
} candidate;

static bool ages(const pkv_sched *s) {
  return !pkv_sched_fault(s, PKV_SCHED_FAULT_NO_AGEING);
}

static int64_t in_ns(double seconds) {
  return (int64_t)(seconds * 1e9);
}

/* The longest wait of all priorities, if it is too long; of equal ones the most urgent. */
static uint32_t waited_too_long(const pkv_sched *s) {
  uint32_t found = NONE;
  for (int32_t i = 0; i < s->queue.class_count; i++) {
    const uint32_t slot = s->queue.classes[i].oldest;
    if (slot == NONE || s->now_ns - s->reqs[slot].since_ns < in_ns(s->o.max_wait_s)) continue;
    if (found == NONE || s->reqs[slot].since_ns < s->reqs[found].since_ns) found = slot;
  }
  return found;
}

static uint32_t by_order(pkv_sched *s, const pkv_sched_class *top) {
  uint32_t slot = NONE;
  switch (s->o.order) {
  case PKV_SCHED_TREE:
    slot = pkv_tree_choose(s);
    break;
  case PKV_SCHED_CHT:
    slot = pkv_cht_choose(s);
    break;
  case PKV_SCHED_LPM:
  case PKV_SCHED_DFS_WEIGHT:
    slot = pkv_sched_ranking_choose(s);
    break;
  case PKV_SCHED_FCFS:
  case PKV_SCHED_PRIORITY:
    return top->oldest;
  }
  /* Of a less urgent priority: among the urgent ones none shares. */
  return slot != NONE && s->reqs[slot].priority == top->priority ? slot : NONE;
}

static uint32_t oldest(const pkv_sched *s, const pkv_sched_class *c) {
  uint32_t slot = c->oldest;
  while (slot != NONE && (s->reqs[slot].lost || s->reqs[slot].place != PKV_SCHED_IS_WAITING))
    slot = s->reqs[slot].younger; /* PKV_SCHED_FAULT_LOST_PREEMPTED: the oldest may be lost */
  return slot;
}

static candidate choose(pkv_sched *s) {
  const pkv_sched_class *top = pkv_sched_top_class(s);
  if (top == NULL) return (candidate){NONE, PKV_SCHED_BY_ORDER};
  if (ages(s)) {
    const uint32_t late = s->o.max_wait_s > 0 ? waited_too_long(s) : NONE;
    if (late != NONE) return (candidate){late, PKV_SCHED_BY_WAIT};
    if (s->o.bypass_limit >= 0 && pkv_sched_bypasses(s, top) >= s->o.bypass_limit)
      return (candidate){top->oldest, PKV_SCHED_BY_BYPASSES};
    if (s->queue.deadline_count > 0) {
      const pkv_sched_deadline *d = &s->queue.deadlines[0];
      if (d->at_ns - s->now_ns <= in_ns(s->o.deadline_slack_s))
        return (candidate){d->slot, PKV_SCHED_BY_DEADLINE};
    }
  }
  const uint32_t slot = by_order(s, top);
  if (slot != NONE) return (candidate){slot, PKV_SCHED_BY_ORDER};
  return (candidate){oldest(s, top), PKV_SCHED_BY_AGE};
}

static int32_t new_pages(const pkv_sched *s, uint32_t slot) {
  const int32_t pages = s->reqs[slot].pages - pkv_sched_shared(s, slot, 1) / s->o.page_tokens;
  return pages > 0 ? pages : 0;
}

/* ---- candidates that do not fit ---- */

typedef struct hidden {
  uint32_t slot;
  int64_t deadline_ns; /* 0 = none */
} hidden;

static hidden hide(pkv_sched *s, uint32_t slot) {
  hidden h = {slot, 0};
  if (s->reqs[slot].deadline != 0) {
    h.deadline_ns = s->queue.deadlines[s->reqs[slot].deadline - 1].at_ns;
    pkv_sched_deadline_remove(s, slot);
  }
  pkv_sched_move(s, slot, PKV_SCHED_IS_HIDDEN);
  pkv_sched_queue_leave(s, slot, false);
  return h;
}

static void show(pkv_sched *s, const hidden *h) {
  pkv_sched_move(s, h->slot, PKV_SCHED_IS_WAITING);
  pkv_sched_queue_return(s, h->slot);
  if (h->deadline_ns != 0) pkv_sched_deadline_add(s, h->slot, h->deadline_ns);
}

/* The first candidate that fits; *first is the first of all. NONE = none fits. */
static candidate choose_fitting(pkv_sched *s, int64_t budget, candidate *first) {
  hidden kept[PKV_SCHED_MOST_TRIES];
  int32_t streaks[PKV_SCHED_MOST_TRIES]; /* hiding all of a class ends its row of bypasses */
  int32_t count = 0;
  candidate c = choose(s);
  *first = c;
  while (c.slot != NONE && budget >= 0 && new_pages(s, c.slot) > budget) {
    const bool last = c.reason == PKV_SCHED_BY_BYPASSES || c.reason == PKV_SCHED_BY_WAIT;
    if (last || count + 1 >= s->o.fit_tries) {
      c.slot = NONE;
      break;
    }
    if (count == 0) pkv_sched_ranking_refresh(s);
    streaks[count] = pkv_sched_class_of(s, c.slot)->streak;
    kept[count++] = hide(s, c.slot);
    c = choose(s);
  }
  while (count > 0) {
    show(s, &kept[--count]);
    pkv_sched_class_of(s, kept[count].slot)->streak = streaks[count];
  }
  return c;
}

/* ---- the call ---- */

static void describe(pkv_sched_pick *out, pkv_sched_view *view, const pkv_sched *s, candidate c) {
  const pkv_sched_req *r = &s->reqs[c.slot];
  const pkv_sched_class *top = pkv_sched_class_of(s, c.slot);
  if (s->cht != NULL)
    pkv_cht_view(view, s, c.slot);
  else
    pkv_tree_view(view, s, c.slot);
  out->reason = c.reason;
  out->id = r->id;
  out->prompt_tokens = r->prompt;
  out->shared_tokens = view->shared_tokens;
  out->new_tokens = r->prompt - view->shared_tokens;
  out->new_pages = r->pages - view->shared_tokens / s->o.page_tokens;
  if (out->new_pages < 0) out->new_pages = 0;
  out->chain_before = pkv_sched_chunks(s, view->chain_before);
  out->chain_after = pkv_sched_chunks(s, view->chain_after);
  out->waiting_sharers = view->sharers;
  out->waiting_peers = view->peers;
  out->bypasses = -1;
  if (c.slot == top->oldest) {
    const int64_t n = pkv_sched_bypasses(s, top);
    out->bypasses = n > INT32_MAX ? INT32_MAX : (int32_t)n;
  }
  out->waited_ns = s->now_ns - r->since_ns;
}

pkv_status pkv_sched_best(pkv_sched_pick *out, pkv_sched *sched, int64_t page_budget,
                          pkv_error *err) {
  PKV_CHECK(err, sched, PKV_E_INVALID, "sched is NULL");
  PKV_CHECK_STRUCT(err, out, pkv_sched_pick);
  PKV_CHECK(err, page_budget >= -1, PKV_E_INVALID,
            "page_budget is %lld, possible: 0 and more, or -1 for no limit",
            (long long)page_budget);
  pkv_sched_view view;
  candidate first;
  (void)pkv_sched_now(sched);
  memset(out, 0, sizeof *out);
  out->struct_size = (uint32_t)sizeof *out;
  out->verdict = PKV_SCHED_EMPTY;
  sched->last.valid = false;
  const candidate c = choose_fitting(sched, page_budget, &first);
  if (first.slot == NONE) return PKV_OK;
  describe(out, &view, sched, c.slot != NONE ? c : first);
  if (c.slot == NONE)
    out->verdict = PKV_SCHED_BLOCKED;
  else
    pkv_sched_decide(sched, out, &view, c.slot, page_budget);
  return PKV_OK;
}
