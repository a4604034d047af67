/* SPDX-License-Identifier: Apache-2.0 */
/* The arena of this room: small things in chunks, given back together. */
#include "template/template_parts.h"

#define FIRST_CHUNK 16384u
#define LAST_CHUNK  1048576u
#define HEAD        16u

typedef struct tpl_chunk {
  struct tpl_chunk *before;
  size_t size; /* of the block, HEAD bytes of this struct's own included */
  size_t used;
} tpl_chunk;

#define HEAD_BYTES ((sizeof(tpl_chunk) + HEAD - 1) / HEAD * HEAD)

void pkv_tpl_arena_init(tpl_arena *a, size_t limit, const pkv_allocator *allocator) {
  *a = (tpl_arena){*allocator, NULL, 0, limit, false};
}

void pkv_tpl_arena_deinit(tpl_arena *a) {
  for (tpl_chunk *c = a->top; c != NULL;) {
    tpl_chunk *const before = c->before;
    pkv_free(&a->allocator, c, c->size);
    c = before;
  }
  a->top = NULL;
}

static bool add_chunk(tpl_arena *a, size_t bytes) {
  size_t size = a->top == NULL ? FIRST_CHUNK : 2 * a->top->size;
  if (size > LAST_CHUNK) size = LAST_CHUNK;
  if (size < bytes + HEAD_BYTES) size = bytes + HEAD_BYTES;
  tpl_chunk *const c = pkv_alloc(&a->allocator, size);
  if (c == NULL) return false;
  *c = (tpl_chunk){a->top, size, HEAD_BYTES};
  a->top = c;
  return true;
}

void *pkv_tpl_arena_take(tpl_arena *a, size_t count, size_t size) {
  size_t bytes;
  a->over = true;
  if (!pkv_mul_size(&bytes, count, size) || bytes > a->limit - a->used) return NULL;
  bytes = bytes == 0 ? HEAD : (bytes + HEAD - 1) / HEAD * HEAD;
  if (bytes > a->limit - a->used) return NULL;
  a->over = false;
  if ((a->top == NULL || bytes > a->top->size - a->top->used) && !add_chunk(a, bytes)) return NULL;
  void *const out = (char *)a->top + a->top->used;
  a->top->used += bytes;
  a->used += bytes;
  return out;
}
