/* SPDX-License-Identifier: Apache-2.0 */
/* The default allocator and checked calls into any allocator. Only this file uses malloc. */
#include "base/alloc.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

/*
 * Large storage (K and V above all) asks for transparent huge pages: attention walks K and V in
 * runs of a few KiB at random places, and with 4 KiB pages address translation is what limits it.
 * A pool lays its pages out so that those in use lie together: they cost no more than they fill.
 * Buffers of many parts, of which a few rows are used, do not ask: each part would fill a huge page
 * that it needs a little of.
 */
#define HUGE_PAGE      ((size_t)2 << 20)
#define HUGE_PAGE_FROM ((size_t)16 << 20)

static void *default_alloc(void *ctx, size_t size, size_t align) {
  (void)ctx;
  if (align < sizeof(void *)) align = sizeof(void *);
  /* aligned_alloc wants a multiple of the alignment */
  if (size > SIZE_MAX - (align - 1)) return NULL;
  const size_t whole = (size + align - 1) & ~(align - 1);
  void *p = aligned_alloc(align, whole);
#ifdef MADV_HUGEPAGE
  /* a wish: where the system refuses it, the block serves as it is */
  if (p != NULL && align >= HUGE_PAGE) (void)madvise(p, whole, MADV_HUGEPAGE);
#endif
  return p;
}

static void default_free(void *ctx, void *ptr, size_t size) {
  (void)ctx;
  (void)size;
  free(ptr);
}

pkv_allocator pkv_allocator_default(void) {
  return (pkv_allocator){default_alloc, default_free, NULL};
}

pkv_allocator pkv_allocator_or_default(const pkv_allocator *a) {
  return a != NULL ? *a : pkv_allocator_default();
}

void *pkv_alloc(const pkv_allocator *a, size_t size) {
  /* Objects larger than PTRDIFF_MAX would break pointer differences. */
  if (size == 0 || size > PTRDIFF_MAX) return NULL;
  void *p = a->alloc(a->ctx, size, PKV_CACHE_LINE);
  PKV_ASSERT(((uintptr_t)p & (PKV_CACHE_LINE - 1)) == 0);
  return p;
}

void *pkv_alloc_storage(const pkv_allocator *a, size_t size) {
  if (size < HUGE_PAGE_FROM || size > PTRDIFF_MAX) return pkv_alloc(a, size);
  return a->alloc(a->ctx, size, HUGE_PAGE);
}

void *pkv_alloc_zeroed(const pkv_allocator *a, size_t count, size_t size) {
  size_t bytes;
  if (!pkv_mul_size(&bytes, count, size)) return NULL;
  void *p = pkv_alloc(a, bytes);
  if (p != NULL) memset(p, 0, bytes);
  return p;
}

void *pkv_realloc(const pkv_allocator *a, void *ptr, size_t old_size, size_t new_size) {
  PKV_ASSERT(new_size >= old_size);
  void *p = pkv_alloc(a, new_size);
  if (p == NULL) return NULL;
  if (ptr != NULL) {
    memcpy(p, ptr, old_size);
    pkv_free(a, ptr, old_size);
  }
  return p;
}

void pkv_free(const pkv_allocator *a, void *ptr, size_t size) {
  if (ptr != NULL) a->free(a->ctx, ptr, size);
}

size_t pkv_heap_in_use(void) {
#if defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 33)
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
#else
  return 0;
#endif
}
