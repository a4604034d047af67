/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An allocator for tests: counts, fails on demand, and finds leaks, double frees, foreign pointers,
 * wrong sizes at free and writes past the end. New blocks up to 1 MiB are filled with 0xa5, freed
 * ones with 0x5a, so that reading what was never written shows.
 *
 *   test_alloc ta;
 *   test_alloc_init(&ta);
 *   const pkv_allocator a = test_alloc_allocator(&ta);
 *   ... create things with &a ...
 *   const int64_t before = test_alloc_calls(&ta);
 *   ... the step path, 1000 times ...
 *   assert_int_equal(test_alloc_calls(&ta) - before, 0);
 *   ... destroy ...
 *   test_alloc_finish(&ta);       fails the test on a leak or misuse
 *
 * Thread-safe. Each misuse is printed when it happens; the test fails at test_alloc_finish.
 */
#ifndef PKV_TEST_ALLOC_H
#define PKV_TEST_ALLOC_H

#include <pthread.h>
#include <stdbool.h>

#include "pkv/pkv.h"

typedef struct test_alloc_block test_alloc_block;

typedef struct test_alloc {
  pthread_mutex_t lock; /* everything below */
  test_alloc_block *blocks;
  size_t slots, live_blocks, live_bytes, peak_bytes;
  int64_t allocs, frees, errors, failed; /* failed: allocations refused on purpose */
  int64_t countdown;                     /* the countdown-th alloc from now fails; 0 = none */
  bool from_then_on;
  size_t size_limit; /* requests above it fail; 0 = none */
  char message[256]; /* the first misuse */
} test_alloc;

void test_alloc_init(test_alloc *t);
pkv_allocator test_alloc_allocator(test_alloc *t);
/* The n-th allocation from now on fails (n >= 1), and every later one too if asked; 0 disarms. */
void test_alloc_fail_at(test_alloc *t, int64_t n, bool from_then_on);
/* Calls of alloc and free so far. */
int64_t test_alloc_calls(test_alloc *t);
/* Number of misuses and blocks still live, with a text of the first problem; 0 = clean. */
int64_t test_alloc_problems(test_alloc *t, char *text, size_t size);
/* Frees what leaked, then fails the test if anything was wrong. */
void test_alloc_finish(test_alloc *t);

/*
 * Runs `fn` with an allocator whose n-th allocation fails, for n = 1, 2, ... until it gets through;
 * once with only that one failing and once with all later ones too. fn builds something, destroys
 * it again, and returns the status of the building. Fails the test unless every failed run gives
 * PKV_E_NOMEM and leaves nothing behind. Returns the number of allocations of a full run.
 */
typedef pkv_status (*test_torture_fn)(void *ctx, const pkv_allocator *allocator);
int64_t test_alloc_torture(test_torture_fn fn, void *ctx);

#endif
