/* SPDX-License-Identifier: Apache-2.0 */
/* Leftist heaps (Crane 1972) with parent links, iterative. */
#include "sched/sched_heap.h"

static uint32_t rank_of(const pkv_sched_cell *cells, uint32_t i) {
  return i == PKV_SCHED_NONE ? 0 : cells[i].rank;
}

/* Puts the children of i in order; false when its rank was right already. */
static bool fix(pkv_sched_cell *cells, uint32_t i) {
  pkv_sched_cell *c = &cells[i];
  if (rank_of(cells, c->left) < rank_of(cells, c->right)) {
    const uint32_t left = c->left;
    c->left = c->right;
    c->right = left;
  }
  const uint32_t rank = rank_of(cells, c->right) + 1;
  const bool changed = rank != c->rank;
  c->rank = rank;
  return changed;
}

/* Melds two heaps; the result's first cell has no parent. */
static uint32_t meld(pkv_sched_cell *cells, uint32_t a, uint32_t b) {
  if (a == PKV_SCHED_NONE || b == PKV_SCHED_NONE) {
    if (a == PKV_SCHED_NONE) a = b;
    if (a != PKV_SCHED_NONE) cells[a].up = PKV_SCHED_NONE;
    return a;
  }
  uint32_t first = PKV_SCHED_NONE, above = PKV_SCHED_NONE;
  /* Down both right spines, the smaller one first. */
  while (a != PKV_SCHED_NONE) {
    if (pkv_sched_before(&cells[b].k, &cells[a].k)) {
      const uint32_t t = a;
      a = b;
      b = t;
    }
    cells[a].up = above;
    if (above == PKV_SCHED_NONE)
      first = a;
    else
      cells[above].right = a;
    above = a;
    a = cells[a].right;
  }
  cells[above].right = b;
  cells[b].up = above;
  for (uint32_t i = above; i != PKV_SCHED_NONE; i = cells[i].up)
    (void)fix(cells, i);
  return first;
}

void pkv_sched_heap_insert(pkv_sched_cell *cells, uint32_t *heap, uint32_t i) {
  cells[i].left = cells[i].right = cells[i].up = PKV_SCHED_NONE;
  cells[i].rank = 1;
  *heap = meld(cells, *heap, i);
}

void pkv_sched_heap_remove(pkv_sched_cell *cells, uint32_t *heap, uint32_t i) {
  const uint32_t above = cells[i].up;
  const uint32_t rest = meld(cells, cells[i].left, cells[i].right);
  if (above == PKV_SCHED_NONE) {
    *heap = rest;
    return;
  }
  if (cells[above].left == i)
    cells[above].left = rest;
  else
    cells[above].right = rest;
  if (rest != PKV_SCHED_NONE) cells[rest].up = above;
  /* A rank that changes is one more than the changed one below it: log n steps at most. */
  for (uint32_t p = above; p != PKV_SCHED_NONE && fix(cells, p); p = cells[p].up) {}
}

void pkv_sched_heap_change(pkv_sched_cell *cells, uint32_t *heap, uint32_t i, pkv_sched_key k) {
  pkv_sched_cell *c = &cells[i];
  const bool stays = (c->up == PKV_SCHED_NONE || !pkv_sched_before(&k, &cells[c->up].k)) &&
                     (c->left == PKV_SCHED_NONE || !pkv_sched_before(&cells[c->left].k, &k)) &&
                     (c->right == PKV_SCHED_NONE || !pkv_sched_before(&cells[c->right].k, &k));
  if (stays) {
    c->k = k;
    return;
  }
  pkv_sched_heap_remove(cells, heap, i);
  c->k = k;
  pkv_sched_heap_insert(cells, heap, i);
}
