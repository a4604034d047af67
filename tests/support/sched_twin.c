/* SPDX-License-Identifier: Apache-2.0 */
#include "support/sched_twin.h"

#include <string.h>

#define AGED(t) (((t)->o.faults & PKV_SCHED_FAULT_NO_AGEING) == 0)

void twin_init(sched_twin *t, const pkv_sched_options *resolved) {
  memset(t, 0, sizeof *t);
  t->o = *resolved;
  t->floor = 1;
  t->ranked = -1;
}

void twin_clock(sched_twin *t, int64_t ns) {
  if (!t->started || ns > t->now_ns) t->now_ns = ns;
  if (!t->started) t->base_ns = t->last_since_ns = t->now_ns;
  t->started = true;
}

twin_req *twin_find(sched_twin *t, uint64_t id) {
  for (int32_t i = 0; i < t->count; i++)
    if (t->q[i].r.id == id) return &t->q[i];
  return NULL;
}

int32_t twin_in(const sched_twin *t, pkv_sched_state state) {
  int32_t n = 0;
  for (int32_t i = 0; i < t->count; i++)
    n += t->q[i].state == state;
  return n;
}

static int32_t priority(const sched_twin *t, const twin_req *r) {
  return t->o.order == PKV_SCHED_FCFS ? 0 : r->r.priority;
}

static int32_t chunks(const sched_twin *t, int32_t tokens) {
  return (tokens + t->o.chunk_tokens - 1) / t->o.chunk_tokens;
}

/* Equal leading chunks, in tokens. */
static int32_t common(const sched_twin *t, const twin_req *a, const twin_req *b) {
  const int32_t c = t->o.chunk_tokens;
  int32_t equal = 0;
  if ((a->r.hashes != NULL) != (b->r.hashes != NULL)) return 0;
  for (int32_t level = 0;; level++) {
    const int32_t at = level * c;
    const int32_t na = a->hashed - at < c ? a->hashed - at : c;
    const int32_t nb = b->hashed - at < c ? b->hashed - at : c;
    if (na <= 0 || na != nb) return equal;
    if (a->r.hashes != NULL) {
      if (a->r.hashes[level] != b->r.hashes[level]) return equal;
    } else {
      for (int32_t i = 0; i < na; i++)
        if (a->r.tokens[at + i] != b->r.tokens[at + i]) return equal;
    }
    equal = at + na;
  }
}

int32_t twin_shared(const sched_twin *t, const twin_req *r) {
  int32_t most = 0;
  for (int32_t i = 0; i < t->count; i++) {
    if (t->q[i].state != PKV_SCHED_ACTIVE || &t->q[i] == r) continue;
    const int32_t n = common(t, &t->q[i], r);
    if (n > most) most = n;
  }
  return most;
}

static int32_t chain_with(const sched_twin *t, const twin_req *extra) {
  const twin_req *first = extra;
  int32_t chain = extra != NULL ? extra->hashed : 0;
  for (int32_t i = 0; i < t->count; i++) {
    if (t->q[i].state != PKV_SCHED_ACTIVE || &t->q[i] == extra) continue;
    if (first == NULL) {
      first = &t->q[i];
      chain = first->hashed;
    }
    const int32_t n = common(t, first, &t->q[i]);
    if (n < chain) chain = n;
  }
  return chain;
}

int32_t twin_chain(const sched_twin *t) {
  return chain_with(t, NULL);
}

/* The union of the active prompts: each counts what it does not share with those before it. */
int64_t twin_unique_tokens(const sched_twin *t) {
  int64_t total = 0;
  for (int32_t i = 0; i < t->count; i++) {
    if (t->q[i].state != PKV_SCHED_ACTIVE) continue;
    int32_t most = 0;
    for (int32_t j = 0; j < i; j++) {
      if (t->q[j].state != PKV_SCHED_ACTIVE) continue;
      const int32_t n = common(t, &t->q[i], &t->q[j]);
      if (n > most) most = n;
    }
    total += t->q[i].r.prompt_tokens - most;
  }
  return total;
}

/* What two active prompts or more have: each adds what exactly one of those before it shares. */
int64_t twin_common_tokens(const sched_twin *t, const twin_req *extra) {
  int64_t total = 0;
  for (int32_t i = 0; i < t->count; i++) {
    int32_t most = 0, second = 0;
    if (t->q[i].state != PKV_SCHED_ACTIVE && &t->q[i] != extra) continue;
    for (int32_t j = 0; j < i; j++) {
      if (t->q[j].state != PKV_SCHED_ACTIVE && &t->q[j] != extra) continue;
      const int32_t n = common(t, &t->q[i], &t->q[j]);
      second = n > most ? most : n > second ? n : second;
      if (n > most) most = n;
    }
    total += most - second;
  }
  return total;
}

static int64_t total_tokens(const sched_twin *t) {
  int64_t total = 0;
  for (int32_t i = 0; i < t->count; i++)
    if (t->q[i].state == PKV_SCHED_ACTIVE) total += t->q[i].r.prompt_tokens;
  return total;
}

/* ---- coming and going ---- */

/* The next older one of the same priority. */
static const twin_req *ahead_of(const sched_twin *t, const twin_req *r) {
  for (const twin_req *q = r; q-- > t->q;)
    if (priority(t, q) == priority(t, r)) return q;
  return NULL;
}

static int32_t pages_of(const sched_twin *t, const pkv_sched_request *r) {
  const int32_t page = t->o.page_tokens;
  return r->pages > 0 ? r->pages : (r->prompt_tokens + r->output_tokens + page - 1) / page;
}

static pkv_status refusal(sched_twin *t, const pkv_sched_request *r) {
  if (r->prompt_tokens > t->o.max_prompt_tokens) return PKV_E_LIMIT;
  if (t->o.pool_pages > 0 && pages_of(t, r) > t->o.pool_pages) return PKV_E_LIMIT;
  if (twin_find(t, r->id) != NULL) return PKV_E_STATE;
  return t->count == t->o.max_requests ? PKV_E_LIMIT : PKV_OK;
}

static int64_t at_most(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static int64_t at_least(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* At place `at` of the queue, with nothing but what the request itself says. */
static twin_req *put_in(sched_twin *t, const pkv_sched_request *r, int32_t at) {
  twin_req *q = &t->q[at];
  memmove(q + 1, q, (size_t)(t->count - at) * sizeof *q);
  t->count++;
  memset(q, 0, sizeof *q);
  q->r = *r;
  q->state = PKV_SCHED_WAITING;
  q->since_ns = r->arrival_ns != 0 ? at_most(r->arrival_ns, t->now_ns) : t->now_ns;
  q->deadline_ns = r->deadline_ns;
  q->pages = pages_of(t, r);
  q->hashed = r->prompt_tokens;
  if (r->hashes != NULL && r->hash_count * t->o.chunk_tokens < q->hashed)
    q->hashed = r->hash_count * t->o.chunk_tokens;
  t->ranked = -1;
  return q;
}

pkv_status twin_insert(sched_twin *t, const pkv_sched_request *r, int64_t now_ns) {
  const pkv_status status = refusal(t, r);
  if (status != PKV_OK) return status;
  twin_clock(t, now_ns);
  twin_req *q = put_in(t, r, t->count);
  t->last_since_ns = q->since_ns = at_least(q->since_ns, t->last_since_ns);
  return PKV_OK;
}

pkv_status twin_insert_before(sched_twin *t, const pkv_sched_request *r, uint64_t before,
                              int64_t now_ns) {
  const pkv_status status = refusal(t, r);
  if (status != PKV_OK) return status;
  const twin_req *behind = twin_find(t, before);
  if (behind == NULL) return PKV_E_STATE;
  if (t->o.order != PKV_SCHED_FCFS && behind->r.priority != r->priority) return PKV_E_INVALID;
  twin_clock(t, now_ns);
  const twin_req *ahead = ahead_of(t, behind);
  const int64_t least = ahead != NULL ? ahead->since_ns : t->base_ns;
  const int64_t most = behind->since_ns, passed = behind->passed;
  twin_req *q = put_in(t, r, (int32_t)(behind - t->q));
  q->since_ns = at_least(at_most(q->since_ns, most), least);
  q->passed = passed;
  return PKV_OK;
}

static int32_t *streak_of(sched_twin *t, const twin_req *r) {
  return &t->streaks[priority(t, r) + 3];
}

static twin_req *oldest(sched_twin *t, int32_t class_priority, const bool *hidden) {
  for (int32_t i = 0; i < t->count; i++)
    if (t->q[i].state == PKV_SCHED_WAITING && priority(t, &t->q[i]) == class_priority &&
        (hidden == NULL || !hidden[i]))
      return &t->q[i];
  return NULL;
}

static void end_row(sched_twin *t, const twin_req *r) {
  if (oldest(t, priority(t, r), NULL) == NULL) *streak_of(t, r) = 0;
}

void twin_admit(sched_twin *t, uint64_t id, bool best) {
  twin_req *r = twin_find(t, id);
  for (int32_t i = 0; &t->q[i] != r; i++)
    if (priority(t, &t->q[i]) == priority(t, r)) t->q[i].passed++;
  if (r == oldest(t, priority(t, r), NULL))
    *streak_of(t, r) = 0;
  else
    ++*streak_of(t, r);
  if (best && t->o.policy == PKV_SCHED_STATIC_CHAIN && t->within_loss && t->floor < t->o.floor_max)
    t->floor++;
  r->state = PKV_SCHED_ACTIVE;
  r->deadline_ns = 0;
  end_row(t, r);
}

static void drained(sched_twin *t) {
  if (twin_in(t, PKV_SCHED_ACTIVE) == 0 && (t->o.faults & PKV_SCHED_FAULT_STICKY_FLOOR) == 0)
    t->floor = 1;
}

void twin_leave(sched_twin *t, uint64_t id) {
  twin_req *r = twin_find(t, id);
  const twin_req gone = *r;
  const int32_t at = (int32_t)(r - t->q);
  memmove(r, r + 1, (size_t)(t->count - at - 1) * sizeof *r);
  t->count--;
  if (gone.state == PKV_SCHED_ACTIVE) drained(t);
  end_row(t, &gone);
  t->ranked = -1;
}

void twin_preempt(sched_twin *t, uint64_t id) {
  twin_req *r = twin_find(t, id);
  const bool waits = r->state == PKV_SCHED_WAITING;
  r->state = PKV_SCHED_PREEMPTED;
  r->lost = (t->o.faults & PKV_SCHED_FAULT_LOST_PREEMPTED) != 0 && t->o.order == PKV_SCHED_CHT;
  if (waits) {
    r->deadline_ns = 0;
    end_row(t, r);
  } else {
    drained(t);
  }
  t->ranked = -1;
}

void twin_return(sched_twin *t, uint64_t id) {
  twin_find(t, id)->state = PKV_SCHED_WAITING;
  t->ranked = -1;
}

/* ---- the order's choice ---- */

/* Lower is better; false = it does not share enough to have one. */
static bool score(int64_t *out, const sched_twin *t, const twin_req *r) {
  const bool absolute = (t->o.faults & PKV_SCHED_FAULT_ABSOLUTE) != 0;
  const int64_t share8 = absolute ? 0 : (int64_t)(t->o.share_weight * 8 + 0.5);
  const int64_t age = (int64_t)((double)(r->since_ns - t->base_ns) * 1e-9 *
                                (double)(int64_t)(t->o.age_tokens_per_s * 8 + 0.5));
  const int32_t shared = twin_shared(t, r);
  if (t->o.order == PKV_SCHED_CHT) {
    const int32_t levels = chunks(t, r->hashed), have = chunks(t, shared);
    *out = 8 * (int64_t)(levels - have) - share8 * have + age;
  } else {
    *out = 8 * (int64_t)(r->r.prompt_tokens - shared) - share8 * shared + age;
  }
  return (absolute || shared >= t->o.share_min_tokens) && !r->lost;
}

static twin_req *by_score(sched_twin *t, int32_t class_priority, const bool *hidden) {
  twin_req *best = NULL;
  int64_t least = 0, s;
  for (int32_t i = 0; i < t->count; i++) {
    twin_req *r = &t->q[i];
    if (r->state != PKV_SCHED_WAITING || hidden[i] || priority(t, r) != class_priority) continue;
    if (!score(&s, t, r) || (best != NULL && s >= least)) continue;
    best = r;
    least = s;
  }
  return best;
}

/* Whether an older waiting request, itself not sent back, has the first `depth` tokens too. */
static bool has_elder(const sched_twin *t, int32_t i, int32_t depth) {
  for (int32_t j = 0; j < i; j++) {
    const twin_req *r = &t->q[j];
    if (r->state == PKV_SCHED_WAITING && priority(t, r) == priority(t, &t->q[i]) &&
        r->shared_ranked >= 0 && r->shared_ranked <= t->o.lpm_in_batch_tokens &&
        common(t, r, &t->q[i]) >= depth)
      return true;
  }
  return false;
}

static void rank(sched_twin *t) {
  const int32_t limit = t->o.lpm_in_batch_tokens, c = t->o.chunk_tokens;
  const int32_t depth = (limit + c - 1) / c * c;
  int32_t index[TWIN_MOST], n = 0;
  for (int32_t i = 0; i < t->count; i++) {
    twin_req *r = &t->q[i];
    if (r->state != PKV_SCHED_WAITING) continue;
    r->shared_ranked = twin_shared(t, r);
    if (limit > 0 && r->shared_ranked <= limit && has_elder(t, i, depth)) r->shared_ranked = -1;
    int32_t at = n++;
    for (; at > 0; at--) { /* insertion keeps the older first */
      const twin_req *o = &t->q[index[at - 1]];
      if (priority(t, o) < priority(t, r) ||
          (priority(t, o) == priority(t, r) && o->shared_ranked >= r->shared_ranked))
        break;
      index[at] = index[at - 1];
    }
    index[at] = i;
  }
  for (int32_t i = 0; i < n; i++)
    t->ranking[i] = t->q[index[i]].r.id;
  t->ranked = t->o.lpm_fallback > 0 && n > t->o.lpm_fallback ? 0 : n;
}

/* Where the ranking under test has the first of these requests. */
static int32_t first_tested(const sched_twin *t, const int32_t *of, int32_t n) {
  for (int32_t i = 0; i < t->tested_count; i++)
    for (int32_t j = 0; j < n; j++)
      if (t->tested[i] == t->q[of[j]].r.id) return i;
  return INT32_MAX;
}

/* Waiting requests, of any priority, that share more than so many tokens with this one. */
static int32_t weight_below(const sched_twin *t, const twin_req *r, int32_t depth) {
  int32_t weight = 0;
  for (int32_t i = 0; i < t->count; i++)
    weight += t->q[i].state == PKV_SCHED_WAITING &&
              (&t->q[i] == r ? r->hashed : common(t, &t->q[i], r)) > depth;
  return weight;
}

/*
 * Requests `of`, by age, share their first `depth` tokens with each other and with the batch.
 * Those that share more of them with the batch come first, branch by branch: the branch with most
 * waiting requests first. Writes ids.
 */
static uint64_t *depth_first(const sched_twin *t, const int32_t *of, int32_t n, int32_t depth,
                             uint64_t *to) {
  int32_t branch[TWIN_MOST], rest[TWIN_MOST], left[TWIN_MOST], count = 0, others = 0;
  for (int32_t i = 0; i < n; i++)
    if (t->q[of[i]].shared_ranked > depth)
      left[count++] = of[i];
    else
      rest[others++] = of[i];
  while (count > 0) {
    const twin_req *best = NULL;
    int32_t weight = 0, place = 0;
    for (int32_t i = 0; i < count; i++) {
      const twin_req *r = &t->q[left[i]];
      int32_t members = 0;
      for (int32_t j = 0; j < count; j++)
        if (common(t, r, &t->q[left[j]]) > depth || j == i) branch[members++] = left[j];
      const int32_t w = weight_below(t, r, depth), p = first_tested(t, branch, members);
      if (best != NULL && (w < weight || (w == weight && p >= place))) continue;
      best = r;
      weight = w;
      place = p;
    }
    int32_t members = 0, kept = 0;
    for (int32_t j = 0; j < count; j++)
      if (&t->q[left[j]] == best || common(t, best, &t->q[left[j]]) > depth)
        branch[members++] = left[j];
      else
        left[kept++] = left[j];
    count = kept;
    /* As deep as all of it goes together: the next place where it can part. */
    to = depth_first(t, branch, members, depth + 1, to);
  }
  for (int32_t i = 0; i < others; i++)
    *to++ = t->q[rest[i]].r.id;
  return to;
}

static void rank_depth_first(sched_twin *t) {
  uint64_t *to = t->ranking;
  for (int32_t level = -3; level <= 3; level++) {
    int32_t of[TWIN_MOST], n = 0;
    for (int32_t i = 0; i < t->count; i++) {
      twin_req *r = &t->q[i];
      if (r->state != PKV_SCHED_WAITING || priority(t, r) != level) continue;
      r->shared_ranked = twin_shared(t, r);
      of[n++] = i;
    }
    to = depth_first(t, of, n, 0, to);
  }
  t->ranked = (int32_t)(to - t->ranking);
}

static void rank_again(sched_twin *t) {
  if (t->ranked < 0 && t->o.order == PKV_SCHED_DFS_WEIGHT)
    rank_depth_first(t);
  else if (t->ranked < 0 && t->o.order == PKV_SCHED_LPM)
    rank(t);
}

static twin_req *by_ranking(sched_twin *t, const bool *hidden) {
  rank_again(t);
  for (int32_t i = 0; i < t->ranked; i++) {
    twin_req *r = twin_find(t, t->ranking[i]);
    if (r != NULL && r->state == PKV_SCHED_WAITING && !hidden[r - t->q]) return r;
  }
  return NULL;
}

static twin_req *by_order(sched_twin *t, int32_t top, const bool *hidden,
                          pkv_sched_reason *reason) {
  twin_req *r = NULL;
  *reason = PKV_SCHED_BY_ORDER;
  if (t->o.order == PKV_SCHED_FCFS || t->o.order == PKV_SCHED_PRIORITY)
    return oldest(t, top, hidden);
  if (t->o.order == PKV_SCHED_LPM || t->o.order == PKV_SCHED_DFS_WEIGHT)
    r = by_ranking(t, hidden);
  else
    r = by_score(t, top, hidden);
  if (r != NULL && priority(t, r) == top) return r;
  *reason = PKV_SCHED_BY_AGE;
  for (int32_t i = 0; i < t->count; i++)
    if (t->q[i].state == PKV_SCHED_WAITING && !hidden[i] && priority(t, &t->q[i]) == top &&
        !t->q[i].lost)
      return &t->q[i];
  return NULL;
}

/* ---- the rules ---- */

static twin_req *choose(sched_twin *t, const bool *hidden, pkv_sched_reason *reason) {
  const double slack = t->o.deadline_slack_s * 1e9, wait = t->o.max_wait_s * 1e9;
  int32_t top = INT32_MAX;
  twin_req *urgent = NULL;
  for (int32_t i = 0; i < t->count; i++) {
    twin_req *r = &t->q[i];
    if (r->state != PKV_SCHED_WAITING || hidden[i]) continue;
    if (priority(t, r) < top) top = priority(t, r);
    if (r->deadline_ns != 0 &&
        (urgent == NULL || r->deadline_ns < urgent->deadline_ns ||
         (r->deadline_ns == urgent->deadline_ns && priority(t, r) < priority(t, urgent))))
      urgent = r;
  }
  if (top == INT32_MAX) return NULL;
  if (AGED(t)) {
    *reason = PKV_SCHED_BY_WAIT;
    twin_req *late = NULL;
    for (int32_t i = 0; i < t->count && wait > 0; i++) {
      twin_req *r = &t->q[i];
      if (r->state != PKV_SCHED_WAITING || hidden[i] || t->now_ns - r->since_ns < (int64_t)wait)
        continue;
      if (late == NULL || r->since_ns < late->since_ns ||
          (r->since_ns == late->since_ns && priority(t, r) < priority(t, late)))
        late = r;
    }
    if (late != NULL) return late;
    *reason = PKV_SCHED_BY_BYPASSES;
    twin_req *r = oldest(t, top, hidden);
    const int64_t n = t->o.ageing == PKV_SCHED_AGEING_EACH ? r->passed : (int64_t)*streak_of(t, r);
    if (t->o.bypass_limit >= 0 && n >= t->o.bypass_limit) return r;
    *reason = PKV_SCHED_BY_DEADLINE;
    if (urgent != NULL && urgent->deadline_ns - t->now_ns <= (int64_t)slack) return urgent;
  }
  return by_order(t, top, hidden, reason);
}

/* Of the batch, and of what is left of it when half has ended. */
static double cost(const sched_twin *t, int32_t rows, int32_t chain, int64_t total, int64_t unique,
                   int64_t common_tokens) {
  const pkv_sched_batch b = {rows, chain, total, unique, common_tokens};
  pkv_sched_batch half = {(rows + 1) / 2, chain, total / 2,
                          common_tokens + (unique - common_tokens) / 2, common_tokens};
  if (half.total_tokens < half.unique_tokens) half.total_tokens = half.unique_tokens;
  return t->o.cost(t->o.cost_ctx, &b) + t->o.cost(t->o.cost_ctx, &half);
}

static bool together_is_cheaper(const sched_twin *t, const pkv_sched_pick *p, const twin_req *r,
                                int64_t budget) {
  const int32_t rows = twin_in(t, PKV_SCHED_ACTIVE), prompt = p->prompt_tokens;
  const int64_t total = total_tokens(t), common_tokens = twin_common_tokens(t, NULL);
  const int64_t unique = twin_unique_tokens(t);
  int32_t n = 0;
  for (int32_t i = 0; i < p->waiting_peers; i++) { /* one more, while it fits */
    const int64_t own = r->pages - prompt / t->o.page_tokens;
    if (t->o.order == PKV_SCHED_FCFS || t->o.order == PKV_SCHED_PRIORITY) break;
    if (t->o.max_rows > 0 && rows + 1 + n + 1 > t->o.max_rows) break;
    if (budget >= 0 && p->new_pages + (n + 1) * (own > 0 ? own : 1) > budget) break;
    n++;
  }
  const double apart =
      cost(t, rows, twin_chain(t), total, unique, common_tokens) +
      cost(t, n + 1, prompt, (int64_t)(n + 1) * prompt, prompt, n > 0 ? prompt : 0);
  return cost(t, rows + n + 1, chain_with(t, r), total + (int64_t)(n + 1) * prompt,
              unique + p->new_tokens,
              twin_common_tokens(t, r) + (n > 0 ? p->new_tokens : 0)) <= apart;
}

static bool adds(sched_twin *t, const pkv_sched_pick *p, const twin_req *r, int32_t rows,
                 int64_t budget) {
  switch (t->o.policy) {
  case PKV_SCHED_STATIC:
    return p->new_tokens <= t->o.static_new_tokens;
  case PKV_SCHED_STATIC_CHAIN:
    t->within_loss = p->chain_before - p->chain_after <=
                     (p->waiting_sharers >= t->o.crowd ? t->o.chain_loss_crowded : t->o.chain_loss);
    return t->within_loss || rows < t->floor;
  case PKV_SCHED_MARGINAL:
    return together_is_cheaper(t, p, r, budget);
  default:
    return true;
  }
}

static void describe(pkv_sched_pick *out, sched_twin *t, const twin_req *r) {
  out->id = r->r.id;
  out->prompt_tokens = r->r.prompt_tokens;
  out->shared_tokens = twin_shared(t, r);
  out->new_tokens = r->r.prompt_tokens - out->shared_tokens;
  out->new_pages = r->pages - out->shared_tokens / t->o.page_tokens;
  if (out->new_pages < 0) out->new_pages = 0;
  const int32_t after = chain_with(t, r);
  out->chain_before = chunks(t, twin_chain(t));
  out->chain_after = chunks(t, after);
  for (int32_t i = 0; i < t->count; i++)
    out->waiting_sharers +=
        &t->q[i] != r && t->q[i].state == PKV_SCHED_WAITING && common(t, &t->q[i], r) >= after;
  for (int32_t i = 0; i < t->count; i++)
    out->waiting_peers += &t->q[i] != r && t->q[i].state == PKV_SCHED_WAITING &&
                          common(t, &t->q[i], r) > out->shared_tokens;
  out->bypasses = -1;
  if (r == oldest(t, priority(t, r), NULL))
    out->bypasses = t->o.ageing == PKV_SCHED_AGEING_EACH ? (int32_t)r->passed : *streak_of(t, r);
  out->waited_ns = t->now_ns - r->since_ns;
}

void twin_best(pkv_sched_pick *out, sched_twin *t, int64_t budget) {
  bool hidden[TWIN_MOST] = {false};
  pkv_sched_reason reason = PKV_SCHED_BY_ORDER, first_reason = PKV_SCHED_BY_ORDER;
  twin_req *first = NULL, *r = NULL;
  memset(out, 0, sizeof *out);
  out->struct_size = (uint32_t)sizeof *out;
  out->verdict = PKV_SCHED_EMPTY;
  t->within_loss = false;
  for (int32_t tries = 0; tries < t->o.fit_tries; tries++) {
    r = choose(t, hidden, &reason);
    if (r == NULL) break;
    if (first == NULL) {
      first = r;
      first_reason = reason;
    }
    const int32_t pages = r->pages - twin_shared(t, r) / t->o.page_tokens;
    if (budget < 0 || (pages > 0 ? pages : 0) <= budget) break;
    const bool last = reason == PKV_SCHED_BY_BYPASSES || reason == PKV_SCHED_BY_WAIT;
    /* A pass is due before the second candidate is sought, whichever rule finds it. */
    if (!last && tries + 1 < t->o.fit_tries) rank_again(t);
    hidden[r - t->q] = true;
    r = NULL;
    if (last) break;
  }
  if (first == NULL) return;
  describe(out, t, r != NULL ? r : first);
  out->reason = r != NULL ? reason : first_reason;
  out->verdict = PKV_SCHED_BLOCKED;
  if (r == NULL) return;
  const int32_t rows = twin_in(t, PKV_SCHED_ACTIVE);
  const bool guarded =
      (t->o.faults & PKV_SCHED_FAULT_NO_GUARD) == 0 && total_tokens(t) == twin_unique_tokens(t);
  out->forced = rows == 0 || reason == PKV_SCHED_BY_WAIT || guarded;
  out->verdict = out->forced || adds(t, out, r, rows, budget) ? PKV_SCHED_ADD : PKV_SCHED_STOP;
}
