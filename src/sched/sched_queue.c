/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Age. Each priority lists its requests by insertion, whatever they are doing, so that what was
 * preempted returns to its place.
 *
 * How often a request was passed over is kept as differences: it is the sum of `passed` from the
 * request to the youngest. Admitting one adds 1 to the `passed` of the next older one and thereby
 * to the bypasses of all older ones; a request that leaves hands its own to the next older one. The
 * sums fall with youth, so that when the oldest waiting request is within the bound, all are; only
 * its sum is ever needed, and the class holds it. Every operation is O(1), but for steps over
 * requests that do not wait: as many as are in the batch or preempted, at most.
 */
#include "sched/sched_parts.h"

#include <string.h>

pkv_status pkv_sched_queue_init(pkv_sched *s, pkv_error *err) {
  s->queue.classes = pkv_sched_take(s, PKV_SCHED_MAX_PRIORITIES, sizeof *s->queue.classes);
  PKV_CHECK(err, s->queue.classes, PKV_E_NOMEM, "no memory for the queue");
  s->queue.gap = 1;
  return PKV_OK;
}

void pkv_sched_queue_deinit(pkv_sched *s) {
  pkv_sched_give(s, s->queue.classes, PKV_SCHED_MAX_PRIORITIES, sizeof *s->queue.classes);
  pkv_sched_give(s, s->queue.deadlines, s->capacity, sizeof *s->queue.deadlines);
}

/* ---- priorities ---- */

/* Where the priority is, or where it would be. */
static int32_t class_place(const pkv_sched_queue *q, int32_t priority) {
  int32_t low = 0, high = q->class_count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (q->classes[middle].priority < priority)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static bool class_known(const pkv_sched_queue *q, int32_t priority) {
  const int32_t at = class_place(q, priority);
  return at < q->class_count && q->classes[at].priority == priority;
}

pkv_sched_class *pkv_sched_class_of(const pkv_sched *s, uint32_t slot) {
  return &s->queue.classes[class_place(&s->queue, pkv_sched_class_priority(s, slot))];
}

pkv_sched_class *pkv_sched_top_class(const pkv_sched *s) {
  for (int32_t i = 0; i < s->queue.class_count; i++)
    if (s->queue.classes[i].waiting > 0) return &s->queue.classes[i];
  return NULL;
}

static pkv_sched_class *class_for(pkv_sched_queue *q, int32_t priority) {
  const int32_t at = class_place(q, priority);
  pkv_sched_class *c = &q->classes[at];
  if (at < q->class_count && c->priority == priority) return c;
  memmove(c + 1, c, (size_t)(q->class_count - at) * sizeof *c);
  q->class_count++;
  *c = (pkv_sched_class){priority, 0, PKV_SCHED_NONE, PKV_SCHED_NONE, PKV_SCHED_NONE, 0, 0};
  return c;
}

static void drop_class(pkv_sched_queue *q, pkv_sched_class *c) {
  q->class_count--;
  if (q->class_count == 0) q->gap = 1; /* nobody is left that others went ahead of */
  memmove(c, c + 1, (size_t)(q->class_count - (c - q->classes)) * sizeof *c);
}

/* ---- coming and going ---- */

/* Whether the next insertion can be told from `ord`, which is the request's or just ahead of it. */
static pkv_status check_reach(const pkv_sched *s, uint32_t slot, uint32_t ord, pkv_error *err) {
  const pkv_sched_queue *q = &s->queue;
  PKV_CHECK(err, q->next_ord - ord < (uint32_t)INT32_MAX, PKV_E_LIMIT,
            "request %llu has seen %u insertions: it must leave first",
            (unsigned long long)s->reqs[slot].id, ((uint32_t)1 << 31) / q->gap);
  return PKV_OK;
}

pkv_status pkv_sched_queue_ready(pkv_sched *s, int32_t class_priority, bool deadline,
                                 pkv_error *err) {
  pkv_sched_queue *q = &s->queue;
  PKV_CHECK(err, q->class_count < PKV_SCHED_MAX_PRIORITIES || class_known(q, class_priority),
            PKV_E_LIMIT, "request->priority is %d, and %d other priorities are held",
            class_priority, PKV_SCHED_MAX_PRIORITIES);
  for (int32_t i = 0; i < q->class_count; i++) {
    const uint32_t head = q->classes[i].head;
    PKV_TRY(check_reach(s, head, s->cells[head].k.ord, err));
  }
  if (deadline && q->deadlines == NULL) {
    q->deadlines = pkv_sched_take(s, s->capacity, sizeof *q->deadlines);
    PKV_CHECK(err, q->deadlines, PKV_E_NOMEM, "no memory for %u deadlines", s->capacity);
  }
  return PKV_OK;
}

/* One more request of the class waits: its oldest, or not. */
static void oldest_or_younger(const pkv_sched *s, pkv_sched_class *c, uint32_t slot) {
  const uint32_t oldest = c->oldest;
  if (oldest != PKV_SCHED_NONE && pkv_sched_older(s->cells[oldest].k.ord, s->cells[slot].k.ord))
    return;
  for (uint32_t at = slot; at != oldest; at = s->reqs[at].younger)
    c->passed += s->reqs[at].passed;
  c->oldest = slot;
}

/*
 * Between two neighbours goes the middle of their `ord`s. Where these lie side by side, the
 * requests around are spread out evenly over the smallest aligned range 2^k that is not too full:
 * with at most (2 / 1.2)^k of them (Bender, Cole, Demaine, Farach-Colton, Zito 2002, "Two
 * simplified algorithms for maintaining order in a list"). That is O(log n) moves for each
 * insertion on average, whatever the pattern. A range may reach beyond the youngest; younger ones
 * then begin behind it.
 */
#define GAP       16
#define MOST_BITS 30

typedef struct range {
  uint32_t low, bits, first, last; /* of `ord`, and the requests within */
  uint32_t count;
} range;

static bool within(const pkv_sched *s, const range *r, uint32_t slot) {
  return slot != PKV_SCHED_NONE && (s->cells[slot].k.ord ^ r->low) >> r->bits == 0;
}

/* The smallest range around `slot` that has room for one more. */
static range roomy_range(const pkv_sched *s, uint32_t slot) {
  const uint32_t ord = s->cells[slot].k.ord;
  range r = {ord, 0, slot, slot, 1};
  double most = 1;
  do {
    r.bits++;
    most *= 2 / 1.2;
    r.low = ord >> r.bits << r.bits;
    while (within(s, &r, s->reqs[r.first].older)) {
      r.first = s->reqs[r.first].older;
      r.count++;
    }
    while (within(s, &r, s->reqs[r.last].younger)) {
      r.last = s->reqs[r.last].younger;
      r.count++;
    }
  } while (r.bits < MOST_BITS && (r.count + 1 > most || 2 * (r.count + 1) > (uint32_t)1 << r.bits));
  return r;
}

static void set_ord(pkv_sched *s, uint32_t slot, uint32_t ord) {
  s->queue.moved++;
  if (s->reqs[slot].place != PKV_SCHED_IS_WAITING)
    s->cells[slot].k.ord = ord;
  else if (s->cht != NULL)
    pkv_cht_set_ord(s, slot, ord);
  else
    pkv_tree_set_ord(s, slot, ord);
}

/* Whether every request stays within 2^31 of `next`. */
static bool reaches(const pkv_sched *s, uint32_t next) {
  for (int32_t i = 0; i < s->queue.class_count; i++)
    if (next - s->cells[s->queue.classes[i].head].k.ord >= (uint32_t)INT32_MAX) return false;
  return true;
}

static pkv_status spread(pkv_sched *s, uint32_t slot, pkv_error *err) {
  const range r = roomy_range(s, slot);
  const uint32_t size = (uint32_t)1 << r.bits, step = size / (r.count + 1), end = r.low + size;
  const uint32_t next = pkv_sched_older(s->queue.next_ord, end) ? end : s->queue.next_ord;
  PKV_CHECK(err, step >= 2 && next - r.low < (uint32_t)INT32_MAX && reaches(s, next), PKV_E_LIMIT,
            "there is no room ahead of request %llu: older ones must leave first",
            (unsigned long long)s->reqs[slot].id);
  s->queue.next_ord = next;
  uint32_t ord = r.low, at = r.first;
  for (uint32_t i = 0; i < r.count; i++, at = s->reqs[at].younger)
    set_ord(s, at, ord += step);
  return PKV_OK;
}

pkv_status pkv_sched_queue_place(uint32_t *ord, pkv_sched *s, uint32_t before, pkv_error *err) {
  pkv_sched_queue *q = &s->queue;
  *ord = q->next_ord;
  if (before == PKV_SCHED_NONE) {
    q->next_ord += q->gap;
    return PKV_OK;
  }
  q->gap = GAP;
  const uint32_t older = s->reqs[before].older;
  if (older == PKV_SCHED_NONE) {
    *ord = s->cells[before].k.ord - GAP;
    return check_reach(s, before, *ord, err);
  }
  if (s->cells[before].k.ord - s->cells[older].k.ord < 2) PKV_TRY(spread(s, before, err));
  *ord = s->cells[older].k.ord + (s->cells[before].k.ord - s->cells[older].k.ord) / 2;
  return PKV_OK;
}

void pkv_sched_queue_insert(pkv_sched *s, uint32_t slot, uint32_t before, int64_t deadline_ns) {
  pkv_sched_req *r = &s->reqs[slot];
  pkv_sched_class *c = class_for(&s->queue, pkv_sched_class_priority(s, slot));
  r->passed = 0;
  r->younger = before;
  r->older = before != PKV_SCHED_NONE ? s->reqs[before].older : c->tail;
  *(before != PKV_SCHED_NONE ? &s->reqs[before].older : &c->tail) = slot;
  *(r->older != PKV_SCHED_NONE ? &s->reqs[r->older].younger : &c->head) = slot;
  c->waiting++;
  oldest_or_younger(s, c, slot);
  if (deadline_ns != 0) pkv_sched_deadline_add(s, slot, deadline_ns);
}

static bool is_waiting(const pkv_sched *s, uint32_t slot) {
  return s->reqs[slot].place == PKV_SCHED_IS_WAITING;
}

/* The oldest request of the class does not wait any more: on to the next that does. */
static void advance(const pkv_sched *s, pkv_sched_class *c) {
  uint32_t at = c->oldest;
  do {
    c->passed -= s->reqs[at].passed;
    at = s->reqs[at].younger;
  } while (at != PKV_SCHED_NONE && !is_waiting(s, at));
  c->oldest = at;
  PKV_ASSERT(at != PKV_SCHED_NONE || c->passed == 0);
}

static int32_t add_passed(int32_t a, int32_t b) {
  int32_t sum;
  return __builtin_add_overflow(a, b, &sum) ? INT32_MAX : sum;
}

void pkv_sched_queue_leave(pkv_sched *s, uint32_t slot, bool admitted) {
  pkv_sched_class *c = pkv_sched_class_of(s, slot);
  const uint32_t older = s->reqs[slot].older;
  c->waiting--;
  if (admitted) {
    if (older != PKV_SCHED_NONE) s->reqs[older].passed = add_passed(s->reqs[older].passed, 1);
    if (slot != c->oldest) {
      c->passed++;
      c->streak = add_passed(c->streak, 1);
    } else {
      c->streak = 0;
    }
  }
  if (slot == c->oldest) advance(s, c);
  if (c->waiting == 0) c->streak = 0;
}

void pkv_sched_queue_return(pkv_sched *s, uint32_t slot) {
  pkv_sched_class *c = pkv_sched_class_of(s, slot);
  c->waiting++;
  oldest_or_younger(s, c, slot);
}

void pkv_sched_queue_remove(pkv_sched *s, uint32_t slot) {
  pkv_sched_req *r = &s->reqs[slot];
  pkv_sched_class *c = pkv_sched_class_of(s, slot);
  if (r->older != PKV_SCHED_NONE) {
    s->reqs[r->older].passed = add_passed(s->reqs[r->older].passed, r->passed);
    s->reqs[r->older].younger = r->younger;
  } else {
    c->head = r->younger;
  }
  if (r->younger != PKV_SCHED_NONE)
    s->reqs[r->younger].older = r->older;
  else
    c->tail = r->older;
  if (c->head == PKV_SCHED_NONE) drop_class(&s->queue, c);
}

int64_t pkv_sched_bypasses(const pkv_sched *s, const pkv_sched_class *c) {
  return s->o.ageing == PKV_SCHED_AGEING_EACH ? c->passed : c->streak;
}

/* ---- deadlines: a binary heap, the nearest first, then urgency, then age ---- */

static bool nearer(const pkv_sched *s, const pkv_sched_deadline *a, const pkv_sched_deadline *b) {
  if (a->at_ns != b->at_ns) return a->at_ns < b->at_ns;
  const int32_t pa = pkv_sched_class_priority(s, a->slot);
  const int32_t pb = pkv_sched_class_priority(s, b->slot);
  if (pa != pb) return pa < pb;
  return pkv_sched_older(s->cells[a->slot].k.ord, s->cells[b->slot].k.ord);
}

static void put(pkv_sched *s, uint32_t at, pkv_sched_deadline d) {
  s->queue.deadlines[at] = d;
  s->reqs[d.slot].deadline = at + 1;
}

static void sift(pkv_sched *s, uint32_t at, pkv_sched_deadline d) {
  const pkv_sched_deadline *h = s->queue.deadlines;
  const uint32_t count = s->queue.deadline_count;
  while (at > 0 && nearer(s, &d, &h[(at - 1) / 2])) {
    put(s, at, h[(at - 1) / 2]);
    at = (at - 1) / 2;
  }
  for (;;) {
    uint32_t child = 2 * at + 1;
    if (child >= count) break;
    if (child + 1 < count && nearer(s, &h[child + 1], &h[child])) child++;
    if (!nearer(s, &h[child], &d)) break;
    put(s, at, h[child]);
    at = child;
  }
  put(s, at, d);
}

void pkv_sched_deadline_add(pkv_sched *s, uint32_t slot, int64_t at_ns) {
  sift(s, s->queue.deadline_count++, (pkv_sched_deadline){at_ns, slot});
}

void pkv_sched_deadline_remove(pkv_sched *s, uint32_t slot) {
  const uint32_t at = s->reqs[slot].deadline - 1;
  const pkv_sched_deadline last = s->queue.deadlines[--s->queue.deadline_count];
  s->reqs[slot].deadline = 0;
  if (last.slot != slot) sift(s, at, last);
}
