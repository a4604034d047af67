/* SPDX-License-Identifier: Apache-2.0 */
/* The only place that calls malloc and free. */
#ifndef PKV_BASE_ALLOC_H
#define PKV_BASE_ALLOC_H

#include "base/status.h"

#define PKV_CACHE_LINE 64u

/* The C library's allocator; what a NULL allocator in an options struct means. */
pkv_allocator pkv_allocator_default(void);
/* *a, or the default when a is NULL. */
pkv_allocator pkv_allocator_or_default(const pkv_allocator *a);

/* NULL when size is 0 or there is no memory. Aligned to PKV_CACHE_LINE. Not zeroed. */
void *pkv_alloc(const pkv_allocator *a, size_t size);
/* The same for what is read all over at random: on huge pages of memory, where it is large. */
void *pkv_alloc_storage(const pkv_allocator *a, size_t size);
/* As pkv_alloc, zeroed, for count * size bytes; NULL too when the product overflows. */
void *pkv_alloc_zeroed(const pkv_allocator *a, size_t count, size_t size);
/* New block with the old content; the old block is freed on success only. Grows only: new_size >=
 * old_size. */
void *pkv_realloc(const pkv_allocator *a, void *ptr, size_t old_size, size_t new_size);
void pkv_free(const pkv_allocator *a, void *ptr, size_t size); /* NULL is allowed */

/* Bytes of all blocks that the C library's malloc has given out, whoever asked for them; 0 where it
 * does not tell (a sanitizer's, musl's). What it keeps for itself does not count, so that growth of
 * this is growth of what is in use. Walks the heap's lists: not for a step's path. */
size_t pkv_heap_in_use(void);

/* Checked arithmetic: false on overflow, *out then unchanged. */
static inline int pkv_mul_size(size_t *out, size_t a, size_t b) {
  size_t r;
  if (__builtin_mul_overflow(a, b, &r)) return 0;
  *out = r;
  return 1;
}
static inline int pkv_add_size(size_t *out, size_t a, size_t b) {
  size_t r;
  if (__builtin_add_overflow(a, b, &r)) return 0;
  *out = r;
  return 1;
}

#endif
