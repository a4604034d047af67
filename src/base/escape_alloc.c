/* SPDX-License-Identifier: Apache-2.0 */
#include "base/escape_alloc.h"

#include <stdalign.h>
#include <stdint.h>

#include "base/alloc.h"

/* Before each block. */
typedef struct pkv_escape_block {
  alignas(max_align_t) struct pkv_escape_block *next;
  struct pkv_escape_block **link; /* what points here; NULL: its span is over */
} block;

static _Thread_local pkv_escape *span;

static void *take(size_t size) {
  const pkv_allocator a = pkv_allocator_default();
  return a.alloc(a.ctx, size, alignof(max_align_t));
}

static void drop(block *b) {
  const pkv_allocator a = pkv_allocator_default();
  a.free(a.ctx, b, 0);
}

void pkv_escape_begin(pkv_escape *escape) {
  escape->blocks = NULL;
  span = escape;
}

void pkv_escape_end(pkv_escape *escape) {
  for (block *b = escape->blocks; b != NULL; b = b->next)
    b->link = NULL;
  span = NULL;
}

static void give_up(void) {
  pkv_escape *const escape = span;
  span = NULL;
  for (block *b = escape->blocks, *next; b != NULL; b = next) {
    next = b->next;
    drop(b);
  }
  longjmp(escape->back, 1);
}

void *pkv_escape_malloc(size_t size) {
  block *const b = size <= PTRDIFF_MAX - sizeof *b ? take(sizeof *b + size) : NULL;
  if (b == NULL) {
    if (span != NULL) give_up();
    return NULL;
  }
  b->link = NULL;
  if (span != NULL) {
    b->next = span->blocks;
    b->link = &span->blocks;
    if (b->next != NULL) b->next->link = &b->next;
    span->blocks = b;
  }
  return b + 1;
}

void pkv_escape_free(void *memory) {
  if (memory == NULL) return;
  block *const b = (block *)memory - 1;
  if (b->link != NULL) {
    *b->link = b->next;
    if (b->next != NULL) b->next->link = b->link;
  }
  drop(b);
}
