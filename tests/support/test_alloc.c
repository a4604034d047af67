/* SPDX-License-Identifier: Apache-2.0 */
/* The tests' allocator: a table of live blocks beside the memory, so that nothing freed is read. */
#include "support/test_alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GUARD_BYTES 64
#define GUARD       0xc3
#define FILL_LIMIT  ((size_t)1 << 20)

struct test_alloc_block {
  unsigned char *ptr; /* NULL = free slot */
  size_t size;
};

static size_t slot_of(const test_alloc *t, const void *ptr) {
  return (size_t)((((uintptr_t)ptr >> 4) * UINT64_C(0x9e3779b97f4a7c15)) >> 20) % t->slots;
}

static void report(test_alloc *t, const char *format, ...) {
  char text[sizeof t->message];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (t->errors == 0) memcpy(t->message, text, sizeof text);
  t->errors++;
  fprintf(stderr, "test_alloc: %s\n", text);
}

static void insert(test_alloc *t, unsigned char *ptr, size_t size) {
  size_t i = slot_of(t, ptr);
  while (t->blocks[i].ptr != NULL)
    i = (i + 1) % t->slots;
  t->blocks[i].ptr = ptr;
  t->blocks[i].size = size;
}

static bool grow(test_alloc *t) {
  if (2 * (t->live_blocks + 1) <= t->slots) return true;
  test_alloc_block *old = t->blocks;
  const size_t old_slots = t->slots, slots = old_slots == 0 ? 256 : 2 * old_slots;
  test_alloc_block *blocks = calloc(slots, sizeof *blocks);
  if (blocks == NULL) return false;
  t->blocks = blocks;
  t->slots = slots;
  for (size_t i = 0; i < old_slots; i++)
    if (old[i].ptr != NULL) insert(t, old[i].ptr, old[i].size);
  free(old);
  return true;
}

/* Empties slot i and closes the gap that linear probing would trip over. */
static void erase(test_alloc *t, size_t i) {
  t->blocks[i].ptr = NULL;
  for (size_t j = (i + 1) % t->slots; t->blocks[j].ptr != NULL; j = (j + 1) % t->slots) {
    const test_alloc_block moved = t->blocks[j];
    t->blocks[j].ptr = NULL;
    insert(t, moved.ptr, moved.size);
  }
}

static bool must_fail(test_alloc *t, size_t size) {
  if (t->size_limit != 0 && size > t->size_limit) return true;
  if (t->countdown == 0) return false;
  if (t->countdown > 1) {
    t->countdown--;
    return false;
  }
  if (!t->from_then_on) t->countdown = 0;
  return true;
}

static unsigned char *take(test_alloc *t, size_t size, size_t align) {
  t->allocs++;
  if (size == 0) report(t, "alloc of 0 bytes");
  if (align == 0 || (align & (align - 1)) != 0) {
    report(t, "alignment %zu is no power of two", align);
    return NULL;
  }
  if (must_fail(t, size)) {
    t->failed++;
    return NULL;
  }
  if (size > PTRDIFF_MAX - GUARD_BYTES - align || !grow(t)) return NULL;
  if (align < sizeof(void *)) align = sizeof(void *);
  unsigned char *ptr = aligned_alloc(align, (size + GUARD_BYTES + align - 1) & ~(align - 1));
  if (ptr == NULL) return NULL;
  if (size <= FILL_LIMIT) memset(ptr, 0xa5, size);
  memset(ptr + size, GUARD, GUARD_BYTES);
  insert(t, ptr, size);
  t->live_blocks++;
  t->live_bytes += size;
  if (t->live_bytes > t->peak_bytes) t->peak_bytes = t->live_bytes;
  return ptr;
}

static void give(test_alloc *t, unsigned char *ptr, size_t size) {
  t->frees++;
  if (ptr == NULL) {
    report(t, "free of NULL");
    return;
  }
  size_t i = t->slots > 0 ? slot_of(t, ptr) : 0;
  while (t->slots > 0 && t->blocks[i].ptr != NULL && t->blocks[i].ptr != ptr)
    i = (i + 1) % t->slots;
  if (t->slots == 0 || t->blocks[i].ptr == NULL) {
    report(t, "free of %p (%zu bytes), which is not live", (void *)ptr, size);
    return;
  }
  const size_t real = t->blocks[i].size;
  if (size != real) report(t, "free with size %zu of a block of %zu bytes", size, real);
  for (size_t j = 0; j < GUARD_BYTES; j++)
    if (ptr[real + j] != GUARD) {
      report(t, "write at byte %zu of a block of %zu bytes", real + j, real);
      break;
    }
  if (real <= FILL_LIMIT) memset(ptr, 0x5a, real);
  erase(t, i);
  t->live_blocks--;
  t->live_bytes -= real;
  free(ptr);
}

static void *alloc_fn(void *ctx, size_t size, size_t align) {
  test_alloc *t = ctx;
  pthread_mutex_lock(&t->lock);
  void *ptr = take(t, size, align);
  pthread_mutex_unlock(&t->lock);
  return ptr;
}

static void free_fn(void *ctx, void *ptr, size_t size) {
  test_alloc *t = ctx;
  pthread_mutex_lock(&t->lock);
  give(t, ptr, size);
  pthread_mutex_unlock(&t->lock);
}

void test_alloc_init(test_alloc *t) {
  memset(t, 0, sizeof *t);
  pthread_mutex_init(&t->lock, NULL);
}

pkv_allocator test_alloc_allocator(test_alloc *t) {
  return (pkv_allocator){alloc_fn, free_fn, t};
}

void test_alloc_fail_at(test_alloc *t, int64_t n, bool from_then_on) {
  pthread_mutex_lock(&t->lock);
  t->countdown = n;
  t->from_then_on = from_then_on;
  pthread_mutex_unlock(&t->lock);
}

int64_t test_alloc_calls(test_alloc *t) {
  pthread_mutex_lock(&t->lock);
  const int64_t calls = t->allocs + t->frees;
  pthread_mutex_unlock(&t->lock);
  return calls;
}

int64_t test_alloc_problems(test_alloc *t, char *text, size_t size) {
  pthread_mutex_lock(&t->lock);
  const int64_t problems = t->errors + (int64_t)t->live_blocks;
  if (t->errors > 0)
    snprintf(text, size, "%lld misuses, first: %s", (long long)t->errors, t->message);
  else
    snprintf(text, size, "%zu blocks, %zu bytes still live", t->live_blocks, t->live_bytes);
  pthread_mutex_unlock(&t->lock);
  return problems;
}

/* Frees everything; true when nothing was wrong. */
static bool close_down(test_alloc *t, char *text, size_t size) {
  const bool clean = test_alloc_problems(t, text, size) == 0;
  for (size_t i = 0; i < t->slots; i++)
    free(t->blocks[i].ptr);
  free(t->blocks);
  pthread_mutex_destroy(&t->lock);
  memset(t, 0, sizeof *t);
  return clean;
}

void test_alloc_finish(test_alloc *t) {
  char text[320];
  if (!close_down(t, text, sizeof text)) fail_msg("allocator: %s", text);
}

/* One run with the n-th allocation failing; false when that allocation was never reached. */
static bool torture_run(test_torture_fn fn, void *ctx, int64_t n, bool from_then_on) {
  test_alloc t;
  char text[320];
  test_alloc_init(&t);
  test_alloc_fail_at(&t, n, from_then_on);
  const pkv_allocator a = test_alloc_allocator(&t);
  const pkv_status status = fn(ctx, &a);
  const bool fired = t.failed > 0;
  const pkv_status expected = fired ? PKV_E_NOMEM : PKV_OK;
  if (!close_down(&t, text, sizeof text))
    fail_msg("allocation %lld failing%s: %s", (long long)n, from_then_on ? " on" : "", text);
  if (status != expected)
    fail_msg("allocation %lld failing%s: %s instead of %s", (long long)n, from_then_on ? " on" : "",
             pkv_status_name(status), pkv_status_name(expected));
  return fired;
}

int64_t test_alloc_torture(test_torture_fn fn, void *ctx) {
  int64_t n = 1;
  while (torture_run(fn, ctx, n, false))
    n++;
  for (int64_t i = 1; i <= n; i++)
    torture_run(fn, ctx, i, true);
  return n - 1;
}
