/* SPDX-License-Identifier: Apache-2.0 */
/* Bump allocation in a caller's block. */
#include "base/arena.h"

void pkv_arena_init(pkv_arena *arena, void *base, size_t size) {
  PKV_ASSERT(((uintptr_t)base & (PKV_CACHE_LINE - 1)) == 0);
  arena->base = base;
  arena->size = base != NULL ? size : 0;
  arena->used = 0;
  arena->peak = 0;
}

void *pkv_arena_take(pkv_arena *arena, size_t count, size_t size) {
  size_t bytes, end;
  if (!pkv_mul_size(&bytes, count, size)) return NULL;
  /* Rounding `used` up after each take keeps every block aligned; the last one may end short of it.
   */
  if (!pkv_add_size(&end, arena->used, bytes) || end > arena->size) return NULL;
  unsigned char *p = arena->base + arena->used;
  const size_t pad = (PKV_CACHE_LINE - (end & (PKV_CACHE_LINE - 1))) & (PKV_CACHE_LINE - 1);
  arena->used = pad > arena->size - end ? arena->size : end + pad;
  if (arena->used > arena->peak) arena->peak = arena->used;
  return p;
}

void pkv_arena_reset(pkv_arena *arena) {
  arena->used = 0;
}
