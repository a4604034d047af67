/* SPDX-License-Identifier: Apache-2.0 */
/* The worker pool: every item once, on one to eight threads, awake and asleep. */
#include "base/workers.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/rng.h"
#include "support/test_alloc.h"

#define ITEMS 64

typedef struct loop {
  int32_t done[ITEMS]; /* not atomic: the pool alone orders them */
  int64_t count;
  int32_t threads;
  atomic_int in_use[8]; /* a worker's index is one thread's at a time */
  atomic_int wrong;
} loop;

static void count_item(void *ctx, int64_t item, int32_t worker) {
  loop *l = ctx;
  if (item < 0 || item >= l->count || worker < 0 || worker >= l->threads) {
    atomic_fetch_add(&l->wrong, 1);
    return;
  }
  if (atomic_exchange(&l->in_use[worker], 1) != 0) atomic_fetch_add(&l->wrong, 1);
  l->done[item]++;
  atomic_store(&l->in_use[worker], 0);
}

static void nap(long ns) {
  const struct timespec t = {0, ns};
  nanosleep(&t, NULL);
}

static void run_loops(pkv_workers *w, int32_t threads, int loops, int sleep_every) {
  static loop l;
  pkv_rng rng;
  pkv_rng_init(&rng, (uint64_t)threads);
  for (int i = 0; i < loops; i++) {
    l.count = (int64_t)pkv_rng_below(&rng, ITEMS + 1);
    l.threads = threads;
    memset(l.done, 0, sizeof l.done);
    pkv_workers_run(w, count_item, &l, l.count);
    for (int64_t k = 0; k < ITEMS; k++)
      if (l.done[k] != (k < l.count))
        fail_msg("%d threads, loop %d of %lld items: item %lld done %d times", threads, i,
                 (long long)l.count, (long long)k, l.done[k]);
    if (sleep_every > 0 && i % sleep_every == 0) nap(200000);
  }
  assert_int_equal(atomic_load(&l.wrong), 0);
}

static void every_item_once(void **state) {
  (void)state;
  for (int32_t threads = 1; threads <= 8; threads++) {
    test_alloc ta;
    test_alloc_init(&ta);
    const pkv_allocator a = test_alloc_allocator(&ta);
    pkv_workers *w;
    assert_int_equal(pkv_workers_create(&w, threads, &a, NULL), PKV_OK);
    assert_int_equal(pkv_workers_threads(w), threads);
    const int64_t before = test_alloc_calls(&ta);
    run_loops(w, threads, 10000, 0);
    run_loops(w, threads, 200, 4); /* the workers fall asleep in between */
    assert_int_equal(test_alloc_calls(&ta) - before, 0);
    pkv_workers_destroy(w);
    test_alloc_finish(&ta);
  }
}

static void wait_for_all(void *ctx, int64_t item, int32_t worker) {
  (void)item;
  (void)worker;
  /* Each item waits until all have begun: passes only when every thread takes one. */
  atomic_int *begun = ctx;
  atomic_fetch_add(begun, 1);
  const int64_t end = pkv_clock_ns() + INT64_C(20000000000);
  while (atomic_load(begun) < 4 && pkv_clock_ns() < end)
    nap(10000);
}

static void threads_run_at_once(void **state) {
  (void)state;
  pkv_workers *w;
  assert_int_equal(pkv_workers_create(&w, 4, NULL, NULL), PKV_OK);
  for (int i = 0; i < 20; i++) {
    atomic_int begun = 0;
    const int64_t start = pkv_clock_ns();
    pkv_workers_run(w, wait_for_all, &begun, 4);
    assert_int_equal(atomic_load(&begun), 4);
    const double seconds = (double)(pkv_clock_ns() - start) / 1e9;
    if (seconds > 19.0) fail_msg("loop %d: four items never ran at once", i);
    if (i % 2 == 1) nap(1000000);
  }
  pkv_workers_destroy(w);
}

static void slow_item(void *ctx, int64_t item, int32_t worker) {
  (void)worker;
  if (item == 1) nap(2000000);
  ((int32_t *)ctx)[item]++;
}

/* The caller runs out of items long before a worker is done with its own. */
static void caller_waits(void **state) {
  (void)state;
  pkv_workers *w;
  assert_int_equal(pkv_workers_create(&w, 2, NULL, NULL), PKV_OK);
  int32_t done[8] = {0};
  for (int i = 0; i < 50; i++)
    pkv_workers_run(w, slow_item, done, 8);
  for (int i = 0; i < 8; i++)
    assert_int_equal(done[i], 50);
  pkv_workers_destroy(w);
}

static void create_arguments(void **state) {
  (void)state;
  pkv_error err;
  pkv_workers *w = (pkv_workers *)&err;
  assert_int_equal(pkv_workers_create(&w, -1, NULL, &err), PKV_E_INVALID);
  assert_null(w);
  assert_non_null(strstr(err.text, "threads is -1"));
  assert_int_equal(pkv_workers_create(&w, 1025, NULL, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "threads is 1025"));
  assert_int_equal(pkv_workers_create(NULL, 1, NULL, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "out"));
  assert_int_equal(pkv_workers_create(&w, 0, NULL, &err), PKV_OK);
  assert_int_equal(pkv_workers_threads(w), pkv_cpu_cores());
  pkv_workers_destroy(w);
  pkv_workers_destroy(NULL);
  /* Made and ended at once, before the threads have begun. */
  for (int i = 0; i < 200; i++) {
    assert_int_equal(pkv_workers_create(&w, 1 + i % 8, NULL, &err), PKV_OK);
    pkv_workers_destroy(w);
  }
}

static pkv_status create_and_destroy(void *ctx, const pkv_allocator *a) {
  (void)ctx;
  pkv_workers *w;
  PKV_TRY(pkv_workers_create(&w, 3, a, NULL));
  pkv_workers_destroy(w);
  return PKV_OK;
}

static void create_torture(void **state) {
  (void)state;
  assert_int_equal(test_alloc_torture(create_and_destroy, NULL), 1);
}

static void nested(void *ctx, int64_t item, int32_t worker) {
  (void)item;
  (void)worker;
  pkv_workers_run(ctx, nested, ctx, 1);
}

static void nested_use_is_refused(void **state) {
  (void)state;
#ifdef PKV_ASSERTS
  pkv_workers *w;
  assert_int_equal(pkv_workers_create(&w, 1, NULL, NULL), PKV_OK);
  const pid_t pid = fork();
  if (pid == 0) {
    close(2);
    pkv_workers_run(w, nested, w, 1);
    _exit(0);
  }
  int status = 0;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) != 0);
  pkv_workers_destroy(w);
#else
  (void)nested;
  print_message("skipped: this build has no assertions\n");
  skip();
#endif
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_item_once), cmocka_unit_test(threads_run_at_once),
      cmocka_unit_test(caller_waits),    cmocka_unit_test(create_arguments),
      cmocka_unit_test(create_torture),  cmocka_unit_test(nested_use_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
