/* SPDX-License-Identifier: Apache-2.0 */
/* Whether everything inside fits together: ages, deadlines, and the prefix tree. For tests. */
#include "sched/sched_tree.h"

#include <string.h>

#define NONE PKV_SCHED_NONE

#define MUST(condition, ...) PKV_CHECK(err, condition, PKV_E_INTERNAL, __VA_ARGS__)

/* ---- the queue ---- */

static pkv_status check_class(int32_t *held, const pkv_sched *s, const pkv_sched_class *c,
                              pkv_error *err) {
  int32_t waiting = 0;
  uint32_t oldest = NONE, before = NONE;
  int64_t passed = 0;
  for (uint32_t at = c->head; at != NONE; at = s->reqs[at].younger) {
    const pkv_sched_req *r = &s->reqs[at];
    MUST(r->older == before && r->place != PKV_SCHED_FREE, "slot %u: bad link or place", at);
    MUST(pkv_sched_class_priority(s, at) == c->priority, "slot %u: priority", at);
    MUST(before == NONE || pkv_sched_older(s->cells[before].k.ord, s->cells[at].k.ord),
         "slot %u is older than slot %u before it", at, before);
    if (r->place == PKV_SCHED_IS_WAITING) {
      waiting++;
      if (oldest == NONE) oldest = at;
    }
    if (oldest != NONE) passed += r->passed;
    before = at;
    (*held)++;
  }
  MUST(before == c->tail && before != NONE, "priority %d: tail", c->priority);
  MUST(waiting == c->waiting && oldest == c->oldest, "priority %d: %d wait, oldest %u; not %d, %u",
       c->priority, waiting, oldest, c->waiting, c->oldest);
  MUST(passed == c->passed, "priority %d: passed %lld, not %lld", c->priority, (long long)passed,
       (long long)c->passed);
  return PKV_OK;
}

static pkv_status check_queue(const pkv_sched *s, pkv_error *err) {
  const pkv_sched_queue *q = &s->queue;
  int32_t held = 0, waiting = 0;
  for (int32_t i = 0; i < q->class_count; i++) {
    MUST(i == 0 || q->classes[i - 1].priority < q->classes[i].priority, "priorities out of order");
    PKV_TRY(check_class(&held, s, &q->classes[i], err));
    waiting += q->classes[i].waiting;
  }
  MUST(held == s->waiting + s->active + s->preempted && waiting == s->waiting,
       "%d held, %d wait; not %d + %d + %d", held, waiting, s->waiting, s->active, s->preempted);
  for (uint32_t i = 0; i < q->deadline_count; i++) {
    const pkv_sched_deadline *d = &q->deadlines[i];
    MUST(s->reqs[d->slot].deadline == i + 1 && s->reqs[d->slot].place == PKV_SCHED_IS_WAITING,
         "deadline %u: slot %u does not know it", i, d->slot);
    MUST(i == 0 || q->deadlines[(i - 1) / 2].at_ns <= d->at_ns, "deadline %u: out of order", i);
  }
  return PKV_OK;
}

/* ---- heaps ---- */

typedef struct heap_walk {
  const pkv_sched_cell *cells;
  uint32_t at, from;
} heap_walk;

/* The next cell, parents first; NONE at the end. */
static uint32_t next_cell(heap_walk *w) {
  while (w->at != NONE) {
    const uint32_t p = w->at, from = w->from;
    const pkv_sched_cell *c = &w->cells[p];
    const bool first = from == c->up;
    w->from = p;
    if (first)
      w->at = c->left != NONE ? c->left : c->right != NONE ? c->right : c->up;
    else
      w->at = from == c->left && c->right != NONE ? c->right : c->up;
    if (first) return p;
  }
  return NONE;
}

static pkv_status check_cell(const pkv_sched_cell *cells, uint32_t i, pkv_error *err) {
  const pkv_sched_cell *c = &cells[i];
  const uint32_t l = c->left == NONE ? 0 : cells[c->left].rank;
  const uint32_t r = c->right == NONE ? 0 : cells[c->right].rank;
  MUST(l >= r && c->rank == r + 1, "cell %u: rank %u over %u and %u", i, c->rank, l, r);
  MUST(c->up == NONE || !pkv_sched_before(&c->k, &cells[c->up].k), "cell %u before its parent", i);
  return PKV_OK;
}

/* ---- the tree ---- */

typedef struct tally {
  uint32_t nodes, paths, requests, children;
} tally;

static pkv_status check_request(tally *n, const pkv_sched *s, uint32_t x, uint32_t slot,
                                pkv_error *err) {
  const int32_t depth = s->tree->nodes[x].depth;
  n->requests++;
  n->children += s->reqs[slot].hashed > depth;
  MUST(s->reqs[slot].node == x && s->reqs[slot].hashed >= depth, "slot %u does not hang from %u",
       slot, x);
  return PKV_OK;
}

/* Counts what hangs from x directly, and compares. */
static pkv_status check_items(tally *n, const pkv_sched *s, uint32_t x, pkv_error *err) {
  const pkv_tree *t = s->tree;
  const pkv_tree_node *v = &t->nodes[x];
  uint32_t items = v->heavy != NONE, covered = 0, in_b = 0, light = 0, by_size = 0;
  int32_t active = 0, waiting = 0;
  heap_walk w = {t->cells, v->reqs, NONE};
  for (uint32_t i; (i = next_cell(&w)) != NONE; items++, waiting++) {
    PKV_TRY(check_cell(t->cells, i, err));
    PKV_TRY(check_request(n, s, x, i, err));
    MUST(s->reqs[i].place == PKV_SCHED_IS_WAITING && t->cells[i].k.slot == i, "slot %u: place", i);
  }
  for (uint32_t i = v->side; i != NONE; i = t->cells[i].right, items++) {
    PKV_TRY(check_request(n, s, x, i, err));
    active += s->reqs[i].place == PKV_SCHED_IS_ACTIVE;
    MUST(s->reqs[i].place == PKV_SCHED_IS_ACTIVE || s->reqs[i].place == PKV_SCHED_IS_PREEMPTED,
         "slot %u: place %d", i, s->reqs[i].place);
  }
  w = (heap_walk){t->by_m, v->paths_m, NONE};
  for (uint32_t p; (p = next_cell(&w)) != NONE; items++, light++) {
    const pkv_tree_path *path = &t->paths[p];
    const pkv_tree_node *root = &t->nodes[path->root];
    PKV_TRY(check_cell(t->by_m, p, err));
    MUST(path->parent == x && path->active == root->sum_active &&
             path->waiting == root->sum_waiting && pkv_sched_same_key(&t->by_m[p].k, &root->m),
         "path %u is counted wrong in node %u", p, x);
    active += path->active;
    waiting += path->waiting;
    covered += path->active > 0;
  }
  w = (heap_walk){t->by_s, v->paths_s, NONE};
  for (uint32_t p; (p = next_cell(&w)) != NONE; by_size++) {
    PKV_TRY(check_cell(t->by_s, p, err));
    MUST(t->paths[p].parent == x &&
             t->by_s[p].k.key == -((int64_t)t->paths[p].active + t->paths[p].waiting),
         "path %u: size", p);
  }
  w = (heap_walk){t->by_b, v->paths_b, NONE};
  for (uint32_t p; (p = next_cell(&w)) != NONE; in_b++) {
    PKV_TRY(check_cell(t->by_b, p, err));
    MUST(t->paths[p].parent == x && t->paths[p].active > 0 &&
             pkv_sched_same_key(&t->by_b[p].k, &t->nodes[t->paths[p].root].c0),
         "path %u in the wrong heap of covered ones", p);
  }
  MUST(in_b == covered && active == v->active && waiting == v->waiting && items == v->items,
       "node %u: %u of %u covered, %d active, %d wait, %u items; not %d, %d, %u", x, in_b, covered,
       active, waiting, items, v->active, v->waiting, v->items);
  MUST(light == by_size, "node %u: %u light children, %u by size", x, light, by_size);
  MUST(x == PKV_TREE_ROOT || items >= 2, "node %u has %u items", x, items);
  MUST(v->heavy != NONE || v->paths_m == NONE, "node %u has light children only", x);
  return PKV_OK;
}

static pkv_status check_path(tally *n, const pkv_sched *s, uint32_t path, pkv_error *err) {
  pkv_tree *t = s->tree;
  const uint32_t root = t->paths[path].root;
  uint32_t before = t->paths[path].parent, x = root;
  bool top = true;
  MUST(t->nodes[root].up == (PKV_TREE_PATH | path), "path %u: root %u", path, root);
  while (t->nodes[x].left != NONE)
    x = t->nodes[x].left;
  while (x != NONE) { /* in order */
    const pkv_tree_node v = t->nodes[x];
    const int32_t hl = v.left == NONE ? 0 : (int32_t)t->nodes[v.left].height;
    const int32_t hr = v.right == NONE ? 0 : (int32_t)t->nodes[v.right].height;
    n->nodes++;
    n->children += x != PKV_TREE_ROOT;
    MUST(hl - hr <= 1 && hr - hl <= 1 && (int32_t)v.height == (hl > hr ? hl : hr) + 1,
         "node %u: height", x);
    MUST(v.parent == before || (x == PKV_TREE_ROOT && path == 0), "node %u: parent %u, not %u", x,
         v.parent, before);
    MUST(before == NONE || t->nodes[before].depth < v.depth, "node %u: depth %d", x, v.depth);
    MUST(top || t->nodes[before].heavy == x, "node %u is not the heavy child of %u", x, before);
    PKV_TRY(check_items(n, s, x, err));
    pkv_tree_pull(t, x);
    MUST(memcmp(&v, &t->nodes[x], sizeof v) == 0, "node %u was not mended", x);
    before = x;
    top = false;
    uint32_t next = v.right;
    if (next != NONE) {
      while (t->nodes[next].left != NONE)
        next = t->nodes[next].left;
    } else {
      uint32_t from = x;
      next = v.up;
      while (!(next & PKV_TREE_PATH) && t->nodes[next].right == from) {
        from = next;
        next = t->nodes[next].up;
      }
      if (next & PKV_TREE_PATH) next = NONE;
    }
    x = next;
  }
  MUST(t->nodes[before].heavy == NONE, "the end of path %u has a heavy child", path);
  n->paths++;
  return PKV_OK;
}

pkv_status pkv_tree_check(const pkv_sched *s, pkv_error *err) {
  const pkv_tree *t = s->tree;
  tally n = {0, 0, 0, 0};
  PKV_TRY(check_path(&n, s, 0, err));
  /* Every other path hangs from a node that is seen here. */
  for (uint32_t p = 1; p < t->fresh_path; p++) {
    bool used = true;
    for (uint32_t f = t->free_path; f != NONE && used; f = t->paths[f].root)
      used = f != p;
    if (used) PKV_TRY(check_path(&n, s, p, err));
  }
  MUST(n.nodes == t->node_count && n.paths == t->path_count, "%u nodes, %u paths; not %u and %u",
       n.nodes, n.paths, t->node_count, t->path_count);
  MUST((int32_t)n.requests == s->waiting + s->active + s->preempted, "%u requests hang",
       n.requests);
  uint32_t entries = 0;
  for (uint32_t i = 0; i < t->children.size; i++)
    entries += t->children.entries[i].ref != UINT32_MAX;
  MUST(entries == n.children, "%u children in the table, not %u", entries, n.children);
  return PKV_OK;
}

pkv_status pkv_sched_check(const pkv_sched *s, pkv_error *err) {
  PKV_TRY(check_queue(s, err));
  return s->tree != NULL ? pkv_tree_check(s, err) : pkv_cht_check(s, err);
}
