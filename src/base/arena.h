/* SPDX-License-Identifier: Apache-2.0 */
/* A bump allocator over one block of fixed size: taken once, reset each step, never grows. */
#ifndef PKV_BASE_ARENA_H
#define PKV_BASE_ARENA_H

#include "base/alloc.h"

typedef struct pkv_arena {
  unsigned char *base;
  size_t size, used, peak;
} pkv_arena;

/* Uses the caller's block; nothing to free. base is aligned to PKV_CACHE_LINE. */
void pkv_arena_init(pkv_arena *arena, void *base, size_t size);
/* count * size bytes aligned to PKV_CACHE_LINE, not zeroed; NULL when they do not fit. */
void *pkv_arena_take(pkv_arena *arena, size_t count, size_t size);
void pkv_arena_reset(pkv_arena *arena);

#endif
