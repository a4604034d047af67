/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The orders of SGLang, on the prefix tree: `lpm` and `dfs-weight` rank the whole queue at once and
 * then serve from that ranking, until something but an admission changes. A ranking looks at every
 * waiting request: it is what the tree's own order is measured against.
 *
 * Where SGLang asks its cache what is there, these ask what the batch covers.
 */
#include "sched/sched_tree.h"

#include <string.h>

#define NONE PKV_SCHED_NONE

struct pkv_sched_ranking {
  uint32_t *order; /* [capacity], slots, first choice first */
  uint32_t *work;  /* [capacity + 2] */
  uint32_t *head;  /* dfs-weight [nodes]: waiting requests by their last covered node ... */
  uint32_t *next;  /* [capacity]: ... linked, the youngest first; lpm: sorting space */
  int32_t *shared; /* [capacity] by slot */
  uint32_t nodes;
  uint32_t count, at;
  uint64_t changes; /* those it was made after; UINT64_MAX = never made */
  bool fallback;
};

pkv_status pkv_sched_ranking_create(pkv_sched *s, pkv_error *err) {
  if (s->o.order != PKV_SCHED_LPM && s->o.order != PKV_SCHED_DFS_WEIGHT) return PKV_OK;
  pkv_sched_ranking *r = pkv_sched_take(s, 1, sizeof *r);
  PKV_CHECK(err, r, PKV_E_NOMEM, "no memory for a ranking");
  memset(r, 0, sizeof *r);
  s->ranking = r;
  r->changes = UINT64_MAX;
  r->nodes = s->tree->node_capacity;
  r->order = pkv_sched_take(s, s->capacity, sizeof *r->order);
  r->work = pkv_sched_take(s, (size_t)s->capacity + 2, sizeof *r->work);
  r->head = pkv_sched_take(s, r->nodes, sizeof *r->head);
  r->next = pkv_sched_take(s, s->capacity, sizeof *r->next);
  r->shared = pkv_sched_take(s, s->capacity, sizeof *r->shared);
  PKV_CHECK(err, r->order && r->work && r->head && r->next && r->shared, PKV_E_NOMEM,
            "no memory for a ranking of %u requests", s->capacity);
  return PKV_OK;
}

void pkv_sched_ranking_destroy(pkv_sched *s) {
  pkv_sched_ranking *r = s->ranking;
  if (r == NULL) return;
  pkv_sched_give(s, r->shared, s->capacity, sizeof *r->shared);
  pkv_sched_give(s, r->next, s->capacity, sizeof *r->next);
  pkv_sched_give(s, r->head, r->nodes, sizeof *r->head);
  pkv_sched_give(s, r->work, (size_t)s->capacity + 2, sizeof *r->work);
  pkv_sched_give(s, r->order, s->capacity, sizeof *r->order);
  pkv_sched_give(s, r, 1, sizeof *r);
}

/* ---- lpm ---- */

/* The highest node above the request that is at least so deep: what shares that much with it hangs
 * below. NONE = nothing does. */
static uint32_t at_least(const pkv_tree *t, uint32_t x, int32_t depth) {
  uint32_t found = NONE;
  while (x != NONE) {
    const uint32_t path = pkv_tree_path_of(t, x);
    for (uint32_t y = t->paths[path].root; y != NONE;) {
      const int32_t d = t->nodes[y].depth;
      if (d >= depth && d <= t->nodes[x].depth) {
        found = y;
        y = t->nodes[y].left;
      } else {
        y = d < depth ? t->nodes[y].right : t->nodes[y].left;
      }
    }
    x = t->paths[path].parent;
    if (x != NONE && t->nodes[x].depth < depth) break;
  }
  return found;
}

/* Waiting requests of a class by age, after the covered ones' rule: those that share too little
 * with the batch but enough with an older one go to the back. Returns their number. */
static uint32_t gather(pkv_sched *s, const pkv_sched_class *c, uint32_t *list) {
  pkv_sched_ranking *r = s->ranking;
  const int32_t chunk = s->o.chunk_tokens, limit = s->o.lpm_in_batch_tokens;
  const int32_t depth = (int32_t)(((int64_t)limit + chunk - 1) / chunk * chunk);
  uint32_t count = 0;
  if (limit > 0) memset(r->head, 0, r->nodes * sizeof *r->head);
  for (uint32_t slot = c->head; slot != NONE; slot = s->reqs[slot].younger) {
    if (s->reqs[slot].place != PKV_SCHED_IS_WAITING) continue;
    list[count++] = slot;
    r->shared[slot] = pkv_tree_shared(s, slot, 1);
    if (limit == 0 || r->shared[slot] > limit) continue;
    const uint32_t group = at_least(s->tree, s->reqs[slot].node, depth);
    if (group == NONE) continue;
    if (r->head[group]) r->shared[slot] = -1;
    r->head[group] = 1;
  }
  return count;
}

/* Stable merge sort, most shared first. */
static void sort_shared(const int32_t *shared, uint32_t *list, uint32_t *space, uint32_t count) {
  uint32_t *from = list, *to = space;
  for (uint32_t width = 1; width < count; width *= 2) {
    for (uint32_t low = 0; low < count; low += 2 * width) {
      const uint32_t middle = low + width < count ? low + width : count;
      const uint32_t high = low + 2 * width < count ? low + 2 * width : count;
      uint32_t a = low, b = middle;
      for (uint32_t i = low; i < high; i++)
        to[i] =
            a < middle && (b >= high || shared[from[a]] >= shared[from[b]]) ? from[a++] : from[b++];
    }
    uint32_t *t = from;
    from = to;
    to = t;
  }
  if (from != list) memcpy(list, from, count * sizeof *list);
}

/* ---- dfs-weight ---- */

typedef struct child {
  uint32_t node;
  int32_t weight;
} child;

/* The deepest covered node above a request, the root at last. */
static uint32_t last_covered(const pkv_tree *t, uint32_t x) {
  while (x != NONE) {
    const pkv_tree_spot spot = pkv_tree_look(t, x);
    if (spot.active > 0) return x;
    if (spot.above != NONE) return spot.above;
    x = t->paths[spot.path].parent;
  }
  return PKV_TREE_ROOT;
}

/* Pushes the covered children of x, the heaviest first, so that the lightest is taken first. */
static uint32_t push_children(const pkv_tree *t, uint32_t x, uint32_t *stack, uint32_t top) {
  const uint32_t begin = top, heavy = t->nodes[x].heavy;
  if (heavy != NONE && pkv_tree_look(t, heavy).active > 0) stack[top++] = heavy;
  /* The heap of covered light children, in its own order: up and down by parent links. */
  for (uint32_t p = t->nodes[x].paths_b, from = NONE; p != NONE;) {
    const pkv_sched_cell *c = &t->by_b[p];
    uint32_t to = c->up;
    if (from == c->up) {
      stack[top++] = pkv_tree_path_top(t, p);
      to = c->left != NONE ? c->left : c->right != NONE ? c->right : c->up;
    } else if (from == c->left && c->right != NONE) {
      to = c->right;
    }
    from = p;
    p = to;
  }
  /* Insertion sort: a node has few covered children, never more than the batch has requests. */
  for (uint32_t i = begin + 1; i < top; i++) {
    const uint32_t node = stack[i];
    const int32_t weight = pkv_tree_look(t, node).waiting;
    uint32_t j = i;
    for (; j > begin; j--) {
      const int32_t other = pkv_tree_look(t, stack[j - 1]).waiting;
      if (other > weight || (other == weight && stack[j - 1] < node)) break;
      stack[j] = stack[j - 1];
    }
    stack[j] = node;
  }
  return top;
}

/* Filled from its end: a node before its children, the lightest child first, is the reverse of
 * children before their node, the heaviest first. */
static uint32_t depth_first(pkv_sched *s, const pkv_sched_class *c, uint32_t *list) {
  pkv_sched_ranking *r = s->ranking;
  const pkv_tree *t = s->tree;
  memset(r->head, 0xff, r->nodes * sizeof *r->head);
  uint32_t count = 0, top = 0;
  for (uint32_t slot = c->head; slot != NONE; slot = s->reqs[slot].younger) {
    if (s->reqs[slot].place != PKV_SCHED_IS_WAITING) continue;
    const uint32_t node = last_covered(t, s->reqs[slot].node);
    r->next[slot] = r->head[node];
    r->head[node] = slot;
    count++;
  }
  uint32_t at = count;
  r->work[top++] = PKV_TREE_ROOT;
  while (top > 0) {
    const uint32_t x = r->work[--top];
    for (uint32_t slot = r->head[x]; slot != NONE; slot = r->next[slot])
      list[--at] = slot;
    top = push_children(t, x, r->work, top);
  }
  return count;
}

/* ---- both ---- */

static void rank(pkv_sched *s) {
  pkv_sched_ranking *r = s->ranking;
  r->count = 0;
  r->at = 0;
  r->changes = s->changes;
  r->fallback =
      s->o.order == PKV_SCHED_LPM && s->o.lpm_fallback > 0 && s->waiting > s->o.lpm_fallback;
  if (r->fallback) return;
  for (int32_t i = 0; i < s->queue.class_count; i++) { /* the more urgent priority first */
    const pkv_sched_class *c = &s->queue.classes[i];
    uint32_t *list = r->order + r->count;
    if (s->o.order == PKV_SCHED_DFS_WEIGHT) {
      r->count += depth_first(s, c, list);
      continue;
    }
    const uint32_t n = gather(s, c, list);
    sort_shared(r->shared, list, r->next, n);
    r->count += n;
  }
}

void pkv_sched_ranking_refresh(pkv_sched *s) {
  if (s->ranking != NULL && s->ranking->changes != s->changes) rank(s);
}

uint32_t pkv_sched_ranking_choose(pkv_sched *s) {
  pkv_sched_ranking *r = s->ranking;
  pkv_sched_ranking_refresh(s);
  if (r->fallback) return NONE;
  for (uint32_t i = r->at; i < r->count; i++) {
    const uint8_t place = s->reqs[r->order[i]].place;
    if (place == PKV_SCHED_IS_WAITING) return r->order[i];
    if (place != PKV_SCHED_IS_HIDDEN && i == r->at) r->at++; /* admitted: it does not come back */
  }
  return NONE;
}

int32_t pkv_sched_ranking_ids(uint64_t *ids, int32_t capacity, const pkv_sched *s) {
  const pkv_sched_ranking *r = s->ranking;
  if (r == NULL) return 0;
  const int32_t count = r->count < (uint32_t)capacity ? (int32_t)r->count : capacity;
  for (int32_t i = 0; i < count; i++)
    ids[i] = s->reqs[r->order[i]].id;
  return count;
}
