/* SPDX-License-Identifier: Apache-2.0 */
#include "server/engine_loop.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/status.h"

/* So many failed steps in a row, and the engine counts as broken. */
#define FAILED_STEPS 3

struct pkv_job {
  /* fixed once submitted */
  pkv_tokens prompt;
  pkv_request request;
  pkv_stops stops;
  /* the engine thread's */
  pkv_answer answer;
  int64_t id;
  int32_t sampled;
  pkv_finish ended; /* what the job ends with, also where the engine says cancelled later */
  pkv_status status;
  /* under the lock */
  pkv_job *next; /* in the inbox, then among the active */
  pkv_buffer text;
  pkv_job_state state;
  bool news, left, cancel, cancelled;
};

struct pkv_loop {
  const pkv_model *model;
  pkv_engine *engine; /* the thread's, once it runs */
  pkv_event *events;
  size_t event_count;
  int wake_fd;
  int32_t max_jobs;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t work; /* something for the thread */
  pkv_job *inbox, **inbox_end;
  pkv_job *active; /* the thread's list; `next` is its own while a job is in it */
  bool quit;
  bool cancels; /* some job has `cancel` set and not `cancelled` */
  pkv_loop_counters counters;
};

static void free_job(pkv_job *job) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_answer_deinit(&job->answer);
  pkv_buffer_deinit(&job->text);
  pkv_tokens_free(&job->prompt);
  pkv_free(&a, job, sizeof *job);
}

static void wake(const pkv_loop *loop) {
  const uint64_t one = 1;
  /* It fails only when the counter is full, and then the reader is woken already. */
  const ssize_t written = write(loop->wake_fd, &one, sizeof one);
  (void)written;
}

/* Puts what is ready where the other thread finds it. */
static void publish(pkv_loop *loop, pkv_job *job) {
  size_t bytes = 0;
  const char *const text = pkv_answer_take(&job->answer, &bytes);
  (void)pthread_mutex_lock(&loop->lock);
  if (bytes > 0 && !job->left) {
    const pkv_status status = pkv_buffer_append(&job->text, text, bytes, NULL);
    if (status != PKV_OK && job->ended == PKV_FINISH_NONE) {
      job->ended = PKV_FINISH_ERROR;
      job->status = status;
      job->cancel = loop->cancels = true;
    }
    job->news = true;
  }
  job->state.generated = job->sampled;
  (void)pthread_mutex_unlock(&loop->lock);
}

/* The one end of every job: takes it from the active ones, and frees it if nobody waits. */
static void end_job(pkv_loop *loop, pkv_job *job) {
  pkv_job **at = &loop->active;
  while (*at != NULL && *at != job)
    at = &(*at)->next;
  if (*at == job) *at = job->next;
  (void)pthread_mutex_lock(&loop->lock);
  job->state.done = job->news = true;
  job->state.finish = job->ended;
  job->state.status = job->status;
  loop->counters.live--;
  loop->counters.finished[job->ended]++;
  const bool left = job->left;
  (void)pthread_mutex_unlock(&loop->lock);
  if (left) free_job(job);
}

static void fail_job(pkv_loop *loop, pkv_job *job, pkv_status status) {
  job->ended = PKV_FINISH_ERROR;
  job->status = status;
  end_job(loop, job);
  wake(loop);
}

static void take_event(pkv_loop *loop, const pkv_event *event) {
  pkv_job *const job = event->user;
  pkv_status status = PKV_OK;
  if (event->token >= 0 && job->ended == PKV_FINISH_NONE) {
    job->sampled++;
    /* The end token itself is no text of the answer. */
    if (event->finish != PKV_FINISH_STOP)
      status = pkv_answer_token(&job->answer, &job->stops, event->token, NULL);
  }
  const bool last = event->finish != PKV_FINISH_NONE;
  if (last && status == PKV_OK) status = pkv_answer_end(&job->answer, &job->stops, NULL);
  if (job->ended == PKV_FINISH_NONE) {
    if (status != PKV_OK) {
      job->ended = PKV_FINISH_ERROR;
      job->status = status;
    } else if (job->answer.stopped) {
      job->ended = PKV_FINISH_STOP;
    } else if (last) {
      job->ended = event->finish;
      if (event->finish == PKV_FINISH_ERROR) job->status = PKV_E_INTERNAL;
    }
  }
  publish(loop, job);
  if (last) {
    end_job(loop, job);
  } else if (job->ended != PKV_FINISH_NONE && !job->cancelled) {
    job->cancelled = true;
    pkv_engine_cancel(loop->engine, job->id);
  }
}

static void start_jobs(pkv_loop *loop, pkv_job *jobs) {
  pkv_error err = {PKV_OK, "", ""};
  while (jobs != NULL) {
    pkv_job *const job = jobs;
    jobs = job->next;
    job->next = loop->active;
    loop->active = job;
    const pkv_status status = pkv_engine_submit(&job->id, loop->engine, &job->request, &err);
    if (status != PKV_OK) {
      pkv_log(PKV_LOG_WARN, "server", "the engine refuses a request: %s", err.text);
      fail_job(loop, job, status);
    }
  }
}

static void cancel_jobs(pkv_loop *loop) {
  for (pkv_job *job = loop->active; job != NULL; job = job->next) {
    (void)pthread_mutex_lock(&loop->lock);
    const bool now = job->cancel && !job->cancelled;
    if (now) job->cancelled = true;
    (void)pthread_mutex_unlock(&loop->lock);
    if (now) pkv_engine_cancel(loop->engine, job->id);
  }
}

/* One step. False: the engine is given up. */
static bool step(pkv_loop *loop, int *failures) {
  pkv_error err = {PKV_OK, "", ""};
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  size_t count = 0;
  const pkv_status status =
      pkv_engine_step(loop->events, loop->event_count, &count, loop->engine, &err);
  int64_t tokens = 0;
  for (size_t i = 0; i < count; i++) {
    tokens += loop->events[i].token >= 0;
    take_event(loop, &loop->events[i]);
  }
  pkv_engine_get_stats(&stats, loop->engine);
  (void)pthread_mutex_lock(&loop->lock);
  loop->counters.engine = stats;
  loop->counters.generated_tokens += tokens;
  (void)pthread_mutex_unlock(&loop->lock);
  if (count > 0) wake(loop);
  *failures = status == PKV_OK ? 0 : *failures + 1;
  if (status != PKV_OK) pkv_log(PKV_LOG_ERROR, "server", "a step failed: %s", err.text);
  return *failures < FAILED_STEPS;
}

/* Waits for work; false: time to end. Hands the inbox over in order. */
static bool next_work(pkv_loop *loop, pkv_job **jobs, bool *cancels) {
  (void)pthread_mutex_lock(&loop->lock);
  while (!loop->quit && loop->inbox == NULL && loop->active == NULL)
    (void)pthread_cond_wait(&loop->work, &loop->lock);
  const bool go = !loop->quit;
  *jobs = loop->inbox;
  loop->inbox = NULL;
  loop->inbox_end = &loop->inbox;
  *cancels = loop->cancels;
  loop->cancels = false;
  (void)pthread_mutex_unlock(&loop->lock);
  return go;
}

static void *engine_thread(void *opaque) {
  pkv_loop *const loop = opaque;
  pkv_job *jobs = NULL;
  bool cancels = false;
  int failures = 0;
  while (next_work(loop, &jobs, &cancels)) {
    start_jobs(loop, jobs);
    jobs = NULL;
    if (cancels) cancel_jobs(loop);
    if (loop->active != NULL && !step(loop, &failures)) break;
    if (loop->active == NULL) wake(loop);
  }
  (void)pthread_mutex_lock(&loop->lock);
  loop->counters.broken = !loop->quit;
  pkv_job *late = loop->inbox;
  loop->inbox = NULL;
  loop->inbox_end = &loop->inbox;
  (void)pthread_mutex_unlock(&loop->lock);
  pkv_job *const lists[] = {jobs, late};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
    for (pkv_job *job = lists[i], *next; job != NULL; job = next) {
      next = job->next;
      job->next = loop->active;
      loop->active = job;
    }
  while (loop->active != NULL)
    fail_job(loop, loop->active, PKV_E_INTERNAL);
  wake(loop);
  return NULL;
}

static void free_loop(pkv_loop *loop) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_engine_destroy(loop->engine);
  pkv_free(&a, loop->events, loop->event_count * sizeof *loop->events);
  (void)pthread_cond_destroy(&loop->work);
  (void)pthread_mutex_destroy(&loop->lock);
  pkv_free(&a, loop, sizeof *loop);
}

static pkv_status start(pkv_loop *loop, const pkv_engine_options *options, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const int32_t rows = options->max_rows > 0 ? options->max_rows : 32;
  PKV_TRY(pkv_engine_create(&loop->engine, loop->model, options, err));
  pkv_engine_get_stats(&loop->counters.engine, loop->engine);
  loop->events = pkv_alloc_zeroed(&a, (size_t)rows, sizeof *loop->events);
  PKV_CHECK(err, loop->events != NULL, PKV_E_NOMEM, "no memory for %d events", (int)rows);
  loop->event_count = (size_t)rows;
  const int failed = pthread_create(&loop->thread, NULL, engine_thread, loop);
  PKV_CHECK(err, failed == 0, PKV_E_NOMEM, "cannot start the engine's thread: error %d", failed);
  return PKV_OK;
}

pkv_status pkv_loop_create(pkv_loop **out, const pkv_model *model,
                           const pkv_engine_options *options, int wake_fd, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  *out = NULL;
  pkv_loop *const loop = pkv_alloc_zeroed(&a, 1, sizeof *loop);
  PKV_CHECK(err, loop != NULL, PKV_E_NOMEM, "no memory for the engine's loop");
  loop->model = model;
  loop->wake_fd = wake_fd;
  loop->max_jobs = options->max_requests > 0 ? options->max_requests : 256;
  loop->inbox_end = &loop->inbox;
  loop->counters.engine = (pkv_engine_stats)PKV_ENGINE_STATS_INIT;
  (void)pthread_mutex_init(&loop->lock, NULL);
  (void)pthread_cond_init(&loop->work, NULL);
  const pkv_status status = start(loop, options, err);
  if (status != PKV_OK) {
    free_loop(loop);
    return status;
  }
  *out = loop;
  return PKV_OK;
}

void pkv_loop_destroy(pkv_loop *loop) {
  if (loop == NULL) return;
  (void)pthread_mutex_lock(&loop->lock);
  loop->quit = true;
  (void)pthread_cond_signal(&loop->work);
  (void)pthread_mutex_unlock(&loop->lock);
  (void)pthread_join(loop->thread, NULL);
  free_loop(loop);
}

pkv_status pkv_loop_submit(pkv_job **out, pkv_loop *loop, pkv_job_spec *spec, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_job *const job = pkv_alloc_zeroed(&a, 1, sizeof *job);
  PKV_CHECK(err, job != NULL, PKV_E_NOMEM, "no memory for a request");
  job->request = spec->request;
  job->stops = spec->stops;
  job->request.prompt = spec->prompt.ids;
  job->request.prompt_tokens = (int32_t)spec->prompt.count;
  job->request.user = job;
  job->state.prompt_tokens = job->request.prompt_tokens;
  pkv_answer_init(&job->answer, loop->model);
  pkv_buffer_init(&job->text, PKV_ANSWER_BYTES, NULL);
  (void)pthread_mutex_lock(&loop->lock);
  pkv_loop_counters *const c = &loop->counters;
  const bool full = c->live >= loop->max_jobs, broken = c->broken;
  if (full || broken) {
    c->refused_full += full;
  } else {
    c->live++;
    c->accepted++;
    c->prompt_tokens += job->request.prompt_tokens;
    job->prompt = spec->prompt;
    spec->prompt = (pkv_tokens){NULL, 0};
    *loop->inbox_end = job;
    loop->inbox_end = &job->next;
    (void)pthread_cond_signal(&loop->work);
  }
  (void)pthread_mutex_unlock(&loop->lock);
  if (full || broken) free_job(job);
  PKV_CHECK(err, !broken, PKV_E_INTERNAL, "the engine has failed");
  PKV_CHECK(err, !full, PKV_E_LIMIT, "%d requests are here already", (int)loop->max_jobs);
  *out = job;
  return PKV_OK;
}

bool pkv_loop_has_news(pkv_loop *loop, pkv_job *job) {
  (void)pthread_mutex_lock(&loop->lock);
  const bool news = job->news;
  (void)pthread_mutex_unlock(&loop->lock);
  return news;
}

pkv_status pkv_loop_take(pkv_buffer *text, pkv_job_state *state, pkv_loop *loop, pkv_job *job,
                         pkv_error *err) {
  (void)pthread_mutex_lock(&loop->lock);
  const pkv_status status =
      job->text.size > 0 ? pkv_buffer_append(text, job->text.data, job->text.size, err) : PKV_OK;
  pkv_buffer_clear(&job->text);
  job->news = false;
  *state = job->state;
  (void)pthread_mutex_unlock(&loop->lock);
  return status;
}

void pkv_loop_release(pkv_loop *loop, pkv_job *job) {
  if (job == NULL) return;
  (void)pthread_mutex_lock(&loop->lock);
  const bool done = job->state.done;
  job->left = true;
  if (!done) job->cancel = loop->cancels = true;
  (void)pthread_cond_signal(&loop->work);
  (void)pthread_mutex_unlock(&loop->lock);
  if (done) free_job(job);
}

void pkv_loop_get_counters(pkv_loop_counters *out, pkv_loop *loop) {
  (void)pthread_mutex_lock(&loop->lock);
  *out = loop->counters;
  (void)pthread_mutex_unlock(&loop->lock);
}
