/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker pool. One word holds the whole state of a loop: its number, whether it is open, and
 * how many workers are in it. A worker may only enter the loop that it saw open, by
 * compare-and-swap on that word; the caller closes the loop when the tickets are used up and waits
 * for those inside. So a worker that wakes late is never waited for, and never sees a loop that is
 * not its own.
 */
#include "base/workers.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/clock.h"
#include "base/cpu.h"

#define MAX_THREADS 1024
#define SPIN_NS     20000 /* about the gap between two loops of a decode step */

#define JOINED(state) ((state)&0x7fffffffu)
#define OPEN          UINT64_C(0x80000000)
#define LOOP(state)   ((state) >> 32)

typedef struct worker {
  pkv_workers *pool;
  pthread_t thread;
  int32_t index;
} worker;

struct pkv_workers {
  pkv_allocator allocator;
  size_t bytes;
  int32_t threads;
  int64_t spin_ns;
  pthread_mutex_t lock; /* for the two conditions only; the state is atomic */
  pthread_cond_t wake, idle;
  atomic_bool busy, stop;
  /* The loop: written by the caller while it is closed and empty. */
  pkv_work_fn fn;
  void *ctx;
  int64_t count;
  _Alignas(PKV_CACHE_LINE) atomic_uint_fast64_t state; /* loop number << 32 | OPEN | joined */
  atomic_int sleepers;
  atomic_bool caller_sleeps;
  _Alignas(PKV_CACHE_LINE) atomic_int_fast64_t ticket;
  _Alignas(PKV_CACHE_LINE) worker items[]; /* threads - 1 */
};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __asm__ volatile("pause");
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void take_tickets(pkv_workers *w, int32_t index) {
  /* Relaxed: entering and leaving the loop order the items' memory, the ticket only counts. */
  for (;;) {
    const int64_t item = atomic_fetch_add_explicit(&w->ticket, 1, memory_order_relaxed);
    if (item >= w->count) return;
    w->fn(w->ctx, item, index);
  }
}

/* Waits for a loop other than `seen`, spinning first. */
static uint64_t next_state(pkv_workers *w, uint64_t seen) {
  uint64_t state;
  const int64_t end = w->spin_ns > 0 ? pkv_clock_ns() + w->spin_ns : 0;
  for (int i = 1; w->spin_ns > 0; i++) {
    state = atomic_load_explicit(&w->state, memory_order_acquire);
    if (LOOP(state) != LOOP(seen)) return state;
    relax();
    if (i % 32 == 0 && pkv_clock_ns() >= end) break;
  }
  pthread_mutex_lock(&w->lock);
  /* Sequentially consistent with open_loop: this sees the new loop, or that sees a sleeper. */
  atomic_fetch_add(&w->sleepers, 1);
  while (LOOP(state = atomic_load(&w->state)) == LOOP(seen))
    pthread_cond_wait(&w->wake, &w->lock);
  atomic_fetch_sub(&w->sleepers, 1);
  pthread_mutex_unlock(&w->lock);
  return state;
}

static void *worker_main(void *arg) {
  const worker *me = arg;
  pkv_workers *w = me->pool;
  uint64_t seen = 0; /* the pool starts with loop 0, closed */
  for (;;) {
    uint64_t state = next_state(w, seen);
    if (atomic_load_explicit(&w->stop, memory_order_relaxed)) return NULL;
    seen = state;
    while ((state & OPEN) != 0 && LOOP(state) == LOOP(seen)) {
      if (!atomic_compare_exchange_weak(&w->state, &state, state + 1)) continue;
      take_tickets(w, me->index);
      state = atomic_fetch_sub(&w->state, 1) - 1;
      if ((state & OPEN) == 0 && JOINED(state) == 0 && atomic_load(&w->caller_sleeps)) {
        pthread_mutex_lock(&w->lock);
        pthread_cond_signal(&w->idle);
        pthread_mutex_unlock(&w->lock);
      }
      break;
    }
  }
}

/* A new loop number: wakes up to `wanted` sleeping workers. */
static void open_loop(pkv_workers *w, uint64_t flags, int64_t wanted) {
  const uint64_t state = atomic_load_explicit(&w->state, memory_order_relaxed);
  atomic_store(&w->state, (((LOOP(state) + 1) & 0xffffffffu) << 32) | flags);
  const int sleepers = atomic_load(&w->sleepers);
  if (sleepers == 0) return;
  pthread_mutex_lock(&w->lock);
  if (wanted >= sleepers)
    pthread_cond_broadcast(&w->wake);
  else
    for (int64_t i = 0; i < wanted; i++)
      pthread_cond_signal(&w->wake);
  pthread_mutex_unlock(&w->lock);
}

/* Nobody may enter any more; returns when those inside have left. */
static void close_loop(pkv_workers *w) {
  if (JOINED(atomic_fetch_and(&w->state, ~OPEN)) == 0) return;
  const int64_t end = w->spin_ns > 0 ? pkv_clock_ns() + w->spin_ns : 0;
  for (int i = 1; w->spin_ns > 0; i++) {
    if (JOINED(atomic_load_explicit(&w->state, memory_order_acquire)) == 0) return;
    relax();
    if (i % 32 == 0 && pkv_clock_ns() >= end) break;
  }
  pthread_mutex_lock(&w->lock);
  atomic_store(&w->caller_sleeps, true);
  while (JOINED(atomic_load(&w->state)) != 0)
    pthread_cond_wait(&w->idle, &w->lock);
  atomic_store(&w->caller_sleeps, false);
  pthread_mutex_unlock(&w->lock);
}

void pkv_workers_run(pkv_workers *w, pkv_work_fn fn, void *ctx, int64_t count) {
  if (count <= 0) return;
  const bool nested = atomic_exchange_explicit(&w->busy, true, memory_order_acquire);
  PKV_ASSERT(!nested);
  (void)nested;
  if (w->threads == 1 || count == 1) {
    for (int64_t i = 0; i < count; i++)
      fn(ctx, i, 0);
  } else {
    w->fn = fn;
    w->ctx = ctx;
    w->count = count;
    atomic_store_explicit(&w->ticket, 0, memory_order_relaxed);
    open_loop(w, OPEN, count - 1);
    take_tickets(w, 0);
    close_loop(w);
  }
  atomic_store_explicit(&w->busy, false, memory_order_release);
}

int32_t pkv_workers_threads(const pkv_workers *workers) {
  return workers->threads;
}

/* Ends the first `started` workers and frees the pool. */
static void stop_and_free(pkv_workers *w, int32_t started) {
  atomic_store(&w->stop, true);
  open_loop(w, 0, INT64_MAX);
  for (int32_t i = 0; i < started; i++)
    pthread_join(w->items[i].thread, NULL);
  pthread_cond_destroy(&w->idle);
  pthread_cond_destroy(&w->wake);
  pthread_mutex_destroy(&w->lock);
  const pkv_allocator allocator = w->allocator;
  pkv_free(&allocator, w, w->bytes);
}

void pkv_workers_destroy(pkv_workers *workers) {
  if (workers == NULL) return;
  PKV_ASSERT(!atomic_load(&workers->busy));
  stop_and_free(workers, workers->threads - 1);
}

static pkv_status start_threads(pkv_workers *w, pkv_error *err) {
  /* Signals belong to the host's threads. */
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int32_t i = 0;
  int code = 0;
  for (; i < w->threads - 1; i++) {
    w->items[i].pool = w;
    w->items[i].index = i + 1;
    code = pthread_create(&w->items[i].thread, NULL, worker_main, &w->items[i]);
    if (code != 0) break;
  }
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (code == 0) return PKV_OK;
  const int32_t threads = w->threads;
  stop_and_free(w, i);
  return PKV_FAIL(err, PKV_E_NOMEM, "thread %d of %d could not be started (error %d)", i + 2,
                  threads, code);
}

pkv_status pkv_workers_create(pkv_workers **out, int32_t threads, const pkv_allocator *allocator,
                              pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, threads >= 0 && threads <= MAX_THREADS, PKV_E_INVALID,
            "threads is %d, possible are 0 (one a core) to %d", threads, MAX_THREADS);
  const int32_t cores = pkv_cpu_cores();
  if (threads == 0) threads = cores < MAX_THREADS ? cores : MAX_THREADS;
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  const size_t bytes = sizeof(pkv_workers) + (size_t)(threads - 1) * sizeof(worker);
  pkv_workers *w = pkv_alloc_zeroed(&a, 1, bytes);
  PKV_CHECK(err, w != NULL, PKV_E_NOMEM, "no memory for %d threads (%zu bytes)", threads, bytes);
  w->allocator = a;
  w->bytes = bytes;
  w->threads = threads;
  /* With more threads than cores a spinning one stands in the way of a working one. */
  w->spin_ns = threads <= cores ? SPIN_NS : 0;
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->wake, NULL);
  pthread_cond_init(&w->idle, NULL);
  PKV_TRY(start_threads(w, err));
  *out = w;
  return PKV_OK;
}
