/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Leftist heaps with parent links over cells of one array: meld, insert and the removal of any cell
 * take at most O(log n) steps, whatever came before. A heap is the index of its first cell.
 */
#ifndef PKV_SCHED_HEAP_H
#define PKV_SCHED_HEAP_H

#include <stdbool.h>
#include <stdint.h>

#define PKV_SCHED_NONE UINT32_MAX

/* What is compared: key, then age. `ord` grows with insertions and wraps, so that no two that are
 * held at a time may be 2^31 apart; it tells requests of one priority apart, not those of two. */
typedef struct pkv_sched_key {
  int64_t key; /* INT64_MAX: there is none, slot is PKV_SCHED_NONE */
  uint32_t ord;
  uint32_t slot; /* the request */
} pkv_sched_key;

#define PKV_SCHED_NO_KEY ((pkv_sched_key){INT64_MAX, 0u, PKV_SCHED_NONE})

static inline bool pkv_sched_older(uint32_t a, uint32_t b) {
  return (int32_t)(a - b) < 0;
}

static inline bool pkv_sched_before(const pkv_sched_key *a, const pkv_sched_key *b) {
  return a->key != b->key ? a->key < b->key : pkv_sched_older(a->ord, b->ord);
}

static inline bool pkv_sched_same_key(const pkv_sched_key *a, const pkv_sched_key *b) {
  return a->key == b->key && a->ord == b->ord && a->slot == b->slot;
}

typedef struct pkv_sched_cell {
  pkv_sched_key k;
  uint32_t left, right, up; /* a cell in no heap may use them as it likes */
  uint32_t rank;            /* length of the right spine */
} pkv_sched_cell;

/* Adds cell i, whose key is set. */
void pkv_sched_heap_insert(pkv_sched_cell *cells, uint32_t *heap, uint32_t i);
void pkv_sched_heap_remove(pkv_sched_cell *cells, uint32_t *heap, uint32_t i);
/* Gives a cell of the heap another key. */
void pkv_sched_heap_change(pkv_sched_cell *cells, uint32_t *heap, uint32_t i, pkv_sched_key k);

static inline pkv_sched_key pkv_sched_heap_top(const pkv_sched_cell *cells, uint32_t heap) {
  return heap == PKV_SCHED_NONE ? PKV_SCHED_NO_KEY : cells[heap].k;
}

#endif
