/* SPDX-License-Identifier: Apache-2.0 */
/* The allocator calls, the arena, and the tests' own allocator, whose findings must be real. */
#include "base/alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/arena.h"
#include "base/rng.h"
#include "support/test_alloc.h"

static void default_allocator(void **state) {
  (void)state;
  const pkv_allocator a = pkv_allocator_or_default(NULL);
  assert_null(pkv_alloc(&a, 0));
  assert_null(pkv_alloc(&a, SIZE_MAX));
  assert_null(pkv_alloc(&a, SIZE_MAX - 64));
  assert_null(pkv_alloc_zeroed(&a, SIZE_MAX / 2, 3));
  assert_null(pkv_alloc_zeroed(&a, 0, 8));
  assert_null(a.alloc(a.ctx, SIZE_MAX, 64)); /* rounding up must not wrap */
  const size_t sizes[] = {1, 2, 63, 64, 65, 4095, 4097, 1 << 20};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    unsigned char *p = pkv_alloc_zeroed(&a, 1, sizes[i]);
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % PKV_CACHE_LINE, 0);
    for (size_t j = 0; j < sizes[i]; j++)
      assert_int_equal(p[j], 0);
    memset(p, 0x11, sizes[i]);
    pkv_free(&a, p, sizes[i]);
  }
  pkv_free(&a, NULL, 10);
}

static void *note_align(void *ctx, size_t size, size_t align) {
  (void)size;
  *(size_t *)ctx = align;
  return NULL;
}

/* Only storage asks for huge pages, by its alignment, and only where it is large. */
static void storage_asks_for_huge_pages(void **state) {
  (void)state;
  size_t align = 0;
  const pkv_allocator a = {note_align, NULL, &align};
  const size_t large = (size_t)16 << 20;
  assert_null(pkv_alloc_storage(&a, large));
  assert_int_equal(align, 2 << 20);
  assert_null(pkv_alloc_storage(&a, large - 1));
  assert_int_equal(align, PKV_CACHE_LINE);
  assert_null(pkv_alloc(&a, large));
  assert_int_equal(align, PKV_CACHE_LINE);
  align = 0;
  assert_null(pkv_alloc_storage(&a, SIZE_MAX));
  assert_null(pkv_alloc_storage(&a, 0));
  assert_int_equal(align, 0); /* refused before anything is asked */
}

static void realloc_keeps(void **state) {
  (void)state;
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator a = test_alloc_allocator(&ta);
  unsigned char *p = pkv_realloc(&a, NULL, 0, 10);
  assert_non_null(p);
  for (unsigned i = 0; i < 10; i++)
    p[i] = (unsigned char)i;
  p = pkv_realloc(&a, p, 10, 1000);
  assert_non_null(p);
  for (unsigned i = 0; i < 10; i++)
    assert_int_equal(p[i], i);
  assert_int_equal(ta.live_blocks, 1);
  assert_int_equal(ta.live_bytes, 1000);
  test_alloc_fail_at(&ta, 1, false);
  assert_null(pkv_realloc(&a, p, 1000, 2000));
  for (unsigned i = 0; i < 10; i++)
    assert_int_equal(p[i], i); /* the old block still stands */
  pkv_free(&a, p, 1000);
  assert_int_equal(ta.allocs, 3);
  assert_int_equal(ta.frees, 2);
  test_alloc_finish(&ta);
}

static void checked_arithmetic(void **state) {
  (void)state;
  size_t v = 7;
  assert_true(pkv_mul_size(&v, 3, 5));
  assert_int_equal(v, 15);
  assert_false(pkv_mul_size(&v, SIZE_MAX, 2));
  assert_false(pkv_add_size(&v, SIZE_MAX, 1));
  assert_int_equal(v, 15);
  assert_true(pkv_add_size(&v, SIZE_MAX - 1, 1));
  assert_true(v == SIZE_MAX);
}

static void arena_bumps(void **state) {
  (void)state;
  static _Alignas(64) unsigned char block[1000];
  pkv_arena arena;
  pkv_arena_init(&arena, block, sizeof block);
  unsigned char *p = pkv_arena_take(&arena, 3, 7);
  assert_ptr_equal(p, block);
  unsigned char *q = pkv_arena_take(&arena, 1, 64);
  assert_ptr_equal(q, block + 64);
  assert_int_equal(arena.used, 128);
  assert_null(pkv_arena_take(&arena, 1, 873));
  assert_null(pkv_arena_take(&arena, SIZE_MAX, 2));
  assert_null(pkv_arena_take(&arena, 1, SIZE_MAX - 100));
  assert_int_equal(arena.used, 128);
  unsigned char *r = pkv_arena_take(&arena, 1, 872); /* exactly the rest */
  assert_ptr_equal(r, block + 128);
  assert_int_equal(arena.used, sizeof block);
  assert_null(pkv_arena_take(&arena, 1, 1));
  pkv_arena_reset(&arena);
  assert_int_equal(arena.used, 0);
  assert_int_equal(arena.peak, sizeof block);
  assert_ptr_equal(pkv_arena_take(&arena, 1, 1000), block);
  pkv_arena_init(&arena, NULL, 100);
  assert_null(pkv_arena_take(&arena, 1, 1));
}

static void arena_random(void **state) {
  (void)state;
  static _Alignas(64) unsigned char block[1 << 14];
  pkv_rng rng;
  pkv_rng_init(&rng, 1);
  for (int round = 0; round < 200; round++) {
    const size_t size = (size_t)pkv_rng_below(&rng, sizeof block + 1);
    pkv_arena arena;
    pkv_arena_init(&arena, block, size);
    const unsigned char *end = block;
    for (;;) {
      const size_t n = (size_t)pkv_rng_range(&rng, 1, 600);
      const size_t free_before = size - arena.used;
      unsigned char *p = pkv_arena_take(&arena, n, 1);
      if (p == NULL) {
        assert_true(n > free_before);
        break;
      }
      assert_int_equal((uintptr_t)p % 64, 0);
      assert_true(p >= end && p + n <= block + size);
      end = p + n;
    }
  }
}

/* Each kind of misuse must be found. */
static void finds_misuse(void **state) {
  (void)state;
  char text[320];
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator a = test_alloc_allocator(&ta);
  assert_int_equal(test_alloc_problems(&ta, text, sizeof text), 0);
  char *p = pkv_alloc(&a, 100);
  assert_int_equal(test_alloc_problems(&ta, text, sizeof text), 1); /* live = leak */
  assert_non_null(strstr(text, "1 blocks, 100 bytes"));
  a.free(a.ctx, p, 99);
  assert_int_equal(ta.errors, 1);
  assert_non_null(strstr(ta.message, "size 99 of a block of 100"));
  a.free(a.ctx, p, 100);
  assert_int_equal(ta.errors, 2); /* double free */
  a.free(a.ctx, text, 8);
  assert_int_equal(ta.errors, 3); /* foreign */
  p = pkv_alloc(&a, 40);
  p[41] = 1;
  a.free(a.ctx, p, 40);
  assert_int_equal(ta.errors, 4); /* overrun */
  assert_null(a.alloc(a.ctx, 8, 3));
  assert_int_equal(ta.errors, 5);
  assert_int_equal(ta.live_blocks, 0);
  ta.errors = 0;
  test_alloc_finish(&ta);
}

static void fails_on_demand(void **state) {
  (void)state;
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator a = test_alloc_allocator(&ta);
  test_alloc_fail_at(&ta, 2, false);
  void *p = pkv_alloc(&a, 8);
  assert_non_null(p);
  assert_null(pkv_alloc(&a, 8));
  void *q = pkv_alloc(&a, 8);
  assert_non_null(q);
  test_alloc_fail_at(&ta, 1, true);
  assert_null(pkv_alloc(&a, 8));
  assert_null(pkv_alloc(&a, 8));
  test_alloc_fail_at(&ta, 0, false);
  ta.size_limit = 100;
  assert_null(pkv_alloc(&a, 101));
  void *r = pkv_alloc(&a, 100);
  assert_non_null(r);
  assert_int_equal(ta.failed, 4);
  pkv_free(&a, p, 8);
  pkv_free(&a, q, 8);
  pkv_free(&a, r, 100);
  test_alloc_finish(&ta);
}

static pkv_status build_three(void *ctx, const pkv_allocator *a) {
  (void)ctx;
  void *p[3] = {NULL, NULL, NULL};
  pkv_status status = PKV_OK;
  for (size_t i = 0; i < 3; i++) {
    p[i] = pkv_alloc(a, 10 + i);
    if (p[i] == NULL) status = PKV_E_NOMEM;
  }
  for (size_t i = 0; i < 3; i++)
    pkv_free(a, p[i], 10 + i);
  return status;
}

static void torture_counts(void **state) {
  (void)state;
  assert_int_equal(test_alloc_torture(build_three, NULL), 3);
}

/* Many blocks in random order: the table of the tests' allocator against itself. */
static void many_blocks(void **state) {
  (void)state;
  enum { N = 3000 };
  static void *p[N];
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator a = test_alloc_allocator(&ta);
  pkv_rng rng;
  pkv_rng_init(&rng, 2);
  memset(p, 0, sizeof p);
  for (int i = 0; i < 40000; i++) {
    const size_t k = (size_t)pkv_rng_below(&rng, N);
    if (p[k] == NULL) {
      p[k] = pkv_alloc(&a, k % 50 + 1);
    } else {
      pkv_free(&a, p[k], k % 50 + 1);
      p[k] = NULL;
    }
  }
  for (size_t k = 0; k < N; k++)
    if (p[k] != NULL) pkv_free(&a, p[k], k % 50 + 1);
  assert_int_equal(ta.allocs, ta.frees);
  test_alloc_finish(&ta);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(default_allocator), cmocka_unit_test(storage_asks_for_huge_pages),
      cmocka_unit_test(realloc_keeps),     cmocka_unit_test(checked_arithmetic),
      cmocka_unit_test(arena_bumps),       cmocka_unit_test(arena_random),
      cmocka_unit_test(finds_misuse),      cmocka_unit_test(fails_on_demand),
      cmocka_unit_test(torture_counts),    cmocka_unit_test(many_blocks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
