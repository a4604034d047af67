/* SPDX-License-Identifier: Apache-2.0 */
#include "server/text_worker.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/status.h"

struct pkv_text_worker {
  int wake_fd;
  bool ended;
  pthread_t thread;
  pthread_mutex_t lock; /* guards everything below, and `done` of tasks */
  pthread_cond_t given;
  pkv_text_task *first, **last;
  bool quit;
};

/* Under the lock. */
static void mark_done(pkv_text_worker *w, pkv_text_task *task) {
  const uint64_t one = 1;
  task->done = true;
  const ssize_t written = write(w->wake_fd, &one, sizeof one); /* a full counter wakes as well */
  (void)written;
}

/* Under the lock. */
static pkv_text_task *take_first(pkv_text_worker *w) {
  pkv_text_task *const task = w->first;
  if (task == NULL) return NULL;
  w->first = task->next;
  if (w->first == NULL) w->last = &w->first;
  return task;
}

static void *work(void *opaque) {
  pkv_text_worker *const w = opaque;
  (void)pthread_mutex_lock(&w->lock);
  for (;;) {
    while (!w->quit && w->first == NULL)
      (void)pthread_cond_wait(&w->given, &w->lock);
    pkv_text_task *const task = take_first(w);
    if (task == NULL) break; /* the end */
    if (!w->quit) {
      (void)pthread_mutex_unlock(&w->lock);
      task->work(task->user);
      (void)pthread_mutex_lock(&w->lock);
    }
    mark_done(w, task);
  }
  (void)pthread_mutex_unlock(&w->lock);
  return NULL;
}

pkv_status pkv_text_worker_create(pkv_text_worker **out, int wake_fd, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  *out = NULL;
  pkv_text_worker *const w = pkv_alloc_zeroed(&a, 1, sizeof *w);
  PKV_CHECK(err, w != NULL, PKV_E_NOMEM, "no memory for the thread of long texts");
  w->wake_fd = wake_fd;
  w->last = &w->first;
  (void)pthread_mutex_init(&w->lock, NULL);
  (void)pthread_cond_init(&w->given, NULL);
  const int failed = pthread_create(&w->thread, NULL, work, w);
  if (failed != 0) {
    w->ended = true;
    pkv_text_worker_destroy(w);
    return PKV_FAIL(err, PKV_E_NOMEM, "cannot start the thread of long texts: error %d", failed);
  }
  *out = w;
  return PKV_OK;
}

void pkv_text_worker_give(pkv_text_worker *worker, pkv_text_task *task) {
  (void)pthread_mutex_lock(&worker->lock);
  task->next = NULL;
  task->done = false;
  *worker->last = task;
  worker->last = &task->next;
  (void)pthread_cond_signal(&worker->given);
  (void)pthread_mutex_unlock(&worker->lock);
}

bool pkv_text_worker_is_done(pkv_text_worker *worker, const pkv_text_task *task) {
  (void)pthread_mutex_lock(&worker->lock);
  const bool done = task->done;
  (void)pthread_mutex_unlock(&worker->lock);
  return done;
}

void pkv_text_worker_end(pkv_text_worker *worker) {
  if (worker == NULL || worker->ended) return;
  (void)pthread_mutex_lock(&worker->lock);
  worker->quit = true;
  (void)pthread_cond_signal(&worker->given);
  (void)pthread_mutex_unlock(&worker->lock);
  (void)pthread_join(worker->thread, NULL);
  worker->ended = true;
}

void pkv_text_worker_destroy(pkv_text_worker *worker) {
  const pkv_allocator a = pkv_allocator_default();
  if (worker == NULL) return;
  pkv_text_worker_end(worker);
  (void)pthread_cond_destroy(&worker->given);
  (void)pthread_mutex_destroy(&worker->lock);
  pkv_free(&a, worker, sizeof *worker);
}
