/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's thread: it loads the model, then takes jobs, steps, and ends them. */
#include "server/engine_loop.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "server/loop_parts.h"

/* So many failed steps in a row, and the engine counts as broken. */
#define FAILED_STEPS 3
/* Between two looks when no request can advance. */
#define IDLE_NS 20000000

static void wake(const pkv_loop *loop) {
  const uint64_t one = 1;
  /* A full counter is no loss: the reader is woken already. Nothing else can be done here. */
  const ssize_t written = write(loop->options.wake_fd, &one, sizeof one);
  (void)written;
}

/* --- one choice ---------------------------------------------------------------------------- */

/* A log-probability is about so long in JSON. */
#define ENTRY_BYTES 128

/* Appends the records whose text is ready, all of them where `last`, but none past the end. */
static pkv_status move_records(size_t *weight, pkv_job_choice *c, bool last) {
  const size_t size = sizeof(pkv_token_record);
  const pkv_token_record *const all = (const void *)c->records.data;
  const size_t count = c->records.size / size;
  size_t moved = 0;
  while (moved < count &&
         (all[moved].text_at < pkv_answer_ready(&c->answer) || (last && !c->answer.stopped)))
    moved++;
  if (moved == 0) return PKV_OK;
  PKV_TRY(pkv_buffer_append(&c->piece.records, all, moved * size, NULL));
  for (size_t i = 0; i < moved; i++)
    *weight += ENTRY_BYTES * (1 + (size_t)all[i].top_count);
  c->records.size -= moved * size;
  memmove(c->records.data, c->records.data + moved * size, c->records.size);
  return PKV_OK;
}

/* Puts what is ready where the other thread finds it. */
static void publish(pkv_loop *loop, pkv_job_choice *c, bool last) {
  size_t bytes = 0;
  const char *const text = pkv_answer_take(&c->answer, &bytes);
  pkv_job *const job = c->job;
  (void)pthread_mutex_lock(&loop->lock);
  bool pause = false;
  if (!job->left) {
    pkv_status status = PKV_OK;
    size_t weight = bytes;
    if (bytes > 0) status = pkv_buffer_append(&c->piece.text, text, bytes, NULL);
    if (status == PKV_OK) status = move_records(&weight, c, last);
    /* Also of an answer that had its end: what is missing must not pass for all of it. */
    if (status != PKV_OK && c->ended != PKV_FINISH_CANCELLED && c->ended != PKV_FINISH_ERROR) {
      c->ended = PKV_FINISH_ERROR;
      c->status = status;
    }
    c->news = c->news || bytes > 0 || c->piece.records.size > 0;
    c->weight += weight;
    job->waiting += weight;
    pause = !job->paused && job->window > 0 && job->waiting > job->window;
    if (pause) loop->counters.pauses++;
    job->paused = job->paused || pause;
  }
  c->state.generated = c->sampled;
  (void)pthread_mutex_unlock(&loop->lock);
  if (pause) pkv_engine_pause(loop->engine, job->id, 1);
}

/* Under the lock. */
static void count_end(pkv_loop *loop, const pkv_job_choice *c) {
  pkv_histograms *const h = &loop->counters.times;
  const pkv_choice_state *const s = &c->state;
  const pkv_request *const r = &c->job->request;
  const int64_t now = pkv_clock_ns();
  if (c->ended != PKV_FINISH_STOP && c->ended != PKV_FINISH_LENGTH) return;
  if (s->first_ns == 0) loop->counters.prompt_tokens += r->prompt_tokens; /* scored alone */
  pkv_histogram_add(h, PKV_MEASURE_PROMPT_TOKENS, (double)r->prompt_tokens);
  pkv_histogram_add(h, PKV_MEASURE_MAX_TOKENS, (double)r->max_tokens);
  pkv_histogram_add(h, PKV_MEASURE_E2E, (double)(now - s->arrived_ns) * 1e-9);
  pkv_histogram_add(h, PKV_MEASURE_GENERATION_TOKENS, (double)c->sampled);
  if (s->started_ns != 0 && s->first_ns != 0) {
    pkv_histogram_add(h, PKV_MEASURE_QUEUE, (double)(s->started_ns - s->arrived_ns) * 1e-9);
    pkv_histogram_add(h, PKV_MEASURE_PREFILL, (double)(s->first_ns - s->started_ns) * 1e-9);
    pkv_histogram_add(h, PKV_MEASURE_INFERENCE, (double)(s->last_ns - s->started_ns) * 1e-9);
  }
  if (c->sampled > 1) {
    const double decode = (double)(s->last_ns - s->first_ns) * 1e-9;
    pkv_histogram_add(h, PKV_MEASURE_DECODE, decode);
    pkv_histogram_add(h, PKV_MEASURE_TPOT, decode / (double)(c->sampled - 1));
  }
}

/* Under the lock; the engine has let go of it before. */
static void leave_constraint(pkv_loop *loop, const pkv_job *job) {
  if (job->place < 0) return;
  pkv_live_constraint *const live = &loop->constraints[job->place];
  if (--live->jobs == 0) live->constraint = NULL;
}

/* The one end of every choice; its job goes from the active ones with the last, and is freed if
 * nobody waits for it. */
static void end_choice(pkv_loop *loop, pkv_job_choice *c) {
  pkv_job *const job = c->job;
  (void)pthread_mutex_lock(&loop->lock);
  count_end(loop, c);
  c->state.done = c->news = true;
  c->state.finish = c->ended;
  c->state.status = c->status;
  c->state.stop = c->stop;
  loop->counters.live--;
  loop->counters.finished[c->ended]++;
  const bool last = --job->left_choices == 0, left = job->left;
  if (last) {
    pkv_histogram_add(&loop->counters.times, PKV_MEASURE_N, (double)job->n);
    if (left)
      pkv_histogram_add(&loop->counters.times, PKV_MEASURE_CANCEL_STEPS,
                        (double)(loop->steps_begun - job->left_step));
    *job->at = job->next;
    if (job->next != NULL) job->next->at = job->at;
    leave_constraint(loop, job);
  }
  (void)pthread_mutex_unlock(&loop->lock);
  if (last && left) pkv_job_free(job);
}

static void fail_choice(pkv_loop *loop, pkv_job_choice *c, pkv_status status) {
  c->ended = PKV_FINISH_ERROR;
  c->status = status;
  end_choice(loop, c);
}

static pkv_status add_record(pkv_job_choice *c, const pkv_event *event) {
  pkv_token_record record;
  memset(&record, 0, sizeof record);
  record.token = event->token;
  record.from_prompt = event->from_prompt;
  record.logprob = event->logprob;
  record.top_count = event->top_count;
  record.text_at = pkv_answer_size(&c->answer);
  for (int32_t i = 0; i < event->top_count && i < PKV_MAX_TOP_LOGPROBS; i++)
    record.top[i] = event->top[i];
  return pkv_buffer_append(&c->records, &record, sizeof record, NULL);
}

static void count_token(pkv_loop *loop, pkv_job_choice *c, const pkv_event *event) {
  const int64_t now = pkv_clock_ns();
  (void)pthread_mutex_lock(&loop->lock);
  pkv_histograms *const h = &loop->counters.times;
  pkv_choice_state *const s = &c->state;
  if (s->first_ns == 0) {
    s->first_ns = now;
    loop->counters.prompt_tokens += c->job->request.prompt_tokens;
    pkv_histogram_add(h, PKV_MEASURE_TTFT, (double)(now - s->arrived_ns) * 1e-9);
  } else {
    pkv_histogram_add(h, PKV_MEASURE_ITL, (double)(now - s->last_ns) * 1e-9);
  }
  s->last_ns = now;
  s->cached_tokens = event->cached_tokens;
  s->started_ns = event->started_ns;
  loop->counters.generated_tokens++;
  (void)pthread_mutex_unlock(&loop->lock);
}

/* The token of an event into the answer. */
static pkv_status take_token(pkv_loop *loop, pkv_job_choice *c, const pkv_event *event) {
  static const pkv_stops none;
  const pkv_request *const r = &c->job->request;
  /* The end token itself is no text of the answer; one that completes a constraint is. */
  const bool text = event->finish != PKV_FINISH_STOP || event->from_prompt ||
                    event->stop_bytes > 0 || !pkv_model_is_end(loop->model, event->token);
  if (!event->from_prompt) {
    c->sampled++;
    count_token(loop, c, event);
  }
  if (!text) return PKV_OK;
  if (r->logprobs || r->top_logprobs > 0) PKV_TRY(add_record(c, event));
  if (event->from_prompt) return pkv_answer_prompt(&c->answer, event->token, NULL);
  const bool early = c->sampled < r->min_tokens;
  return pkv_answer_token(&c->answer, early ? &none : &c->job->stops, event->token, NULL);
}

static void take_event(pkv_loop *loop, const pkv_event *event) {
  pkv_job *const job = event->user;
  pkv_job_choice *const c = &job->choices[event->choice];
  pkv_status status = PKV_OK;
  if (event->token >= 0 && c->ended == PKV_FINISH_NONE) status = take_token(loop, c, event);
  const bool last = event->finish != PKV_FINISH_NONE;
  if (last && status == PKV_OK) status = pkv_answer_end(&c->answer, &job->stops, NULL);
  if (last) c->stop = event->stop_index;
  if (c->ended == PKV_FINISH_NONE && status != PKV_OK) {
    c->ended = PKV_FINISH_ERROR;
    c->status = status;
  } else if (c->ended == PKV_FINISH_NONE && last) {
    c->ended = event->finish;
    if (event->finish == PKV_FINISH_ERROR) c->status = PKV_E_INTERNAL;
  }
  publish(loop, c, last);
  if (last)
    end_choice(loop, c);
  else if (c->ended == PKV_FINISH_ERROR)
    pkv_engine_cancel(loop->engine, job->id);
}

/* --- steps --------------------------------------------------------------------------------- */

static void start_job(pkv_loop *loop, pkv_job *job) {
  pkv_error err = {PKV_OK, "", ""};
  const int32_t n = job->n; /* the job may be freed with its last choice */
  const pkv_status status = pkv_engine_submit(&job->id, loop->engine, &job->request, &err);
  if (status == PKV_OK) return;
  pkv_log(PKV_LOG_WARN, "server", "the engine refuses a request: %s", err.text);
  for (int32_t i = 0; i < n; i++)
    fail_choice(loop, &job->choices[i], status);
}

/* Jobs whose client left, and those whose client has caught up. */
static void heed_clients(pkv_loop *loop) {
  /* Only this thread takes jobs off the active list. */
  for (pkv_job *job = loop->active, *next; job != NULL; job = next) {
    (void)pthread_mutex_lock(&loop->lock);
    const bool cancel = job->cancel;
    const bool go_on = job->paused && job->waiting < job->window / 2;
    job->cancel = false;
    if (go_on) job->paused = false;
    next = job->next;
    (void)pthread_mutex_unlock(&loop->lock);
    if (go_on) pkv_engine_pause(loop->engine, job->id, 0);
    if (cancel) pkv_engine_cancel(loop->engine, job->id);
  }
}

static void count_step(pkv_loop *loop) {
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&stats, loop->engine);
  (void)pthread_mutex_lock(&loop->lock);
  const pkv_engine_stats *const before = &loop->counters.engine;
  const int64_t rows = stats.decode_tokens - before->decode_tokens;
  const int64_t tokens = rows + stats.prefill_tokens - before->prefill_tokens;
  if (rows > 0) pkv_histogram_add(&loop->counters.times, PKV_MEASURE_DECODE_ROWS, (double)rows);
  if (tokens > 0)
    pkv_histogram_add(&loop->counters.times, PKV_MEASURE_ITERATION_TOKENS, (double)tokens);
  loop->counters.engine = stats;
  loop->counters.worked_ns = pkv_clock_ns();
  (void)pthread_mutex_unlock(&loop->lock);
}

/* After a step that did nothing: everybody who could run waits for a client. */
static void wait_for_clients(pkv_loop *loop) {
  struct timespec end = {0, 0};
  (void)clock_gettime(CLOCK_REALTIME, &end);
  end.tv_nsec += IDLE_NS;
  end.tv_sec += end.tv_nsec / 1000000000;
  end.tv_nsec %= 1000000000;
  (void)pthread_mutex_lock(&loop->lock);
  if (!loop->quit && loop->inbox == NULL && !loop->cancels)
    (void)pthread_cond_timedwait(&loop->work, &loop->lock, &end);
  loop->counters.worked_ns = pkv_clock_ns();
  (void)pthread_mutex_unlock(&loop->lock);
}

/* One step. False: the engine is given up. */
static bool step(pkv_loop *loop, int *failures, pkv_error *err) {
  size_t count = 0;
  (void)pthread_mutex_lock(&loop->lock);
  loop->steps_begun++;
  (void)pthread_mutex_unlock(&loop->lock);
  const int64_t before = loop->counters.engine.steps; /* written by this thread alone */
  const pkv_status status =
      pkv_engine_step(loop->events, loop->event_count, &count, loop->engine, err);
  count_step(loop);
  for (size_t i = 0; i < count; i++)
    take_event(loop, &loop->events[i]);
  if (count > 0) wake(loop);
  if (status == PKV_OK && count == 0 && loop->counters.engine.steps == before)
    wait_for_clients(loop);
  /* A device that has failed stays so. */
  *failures = status == PKV_OK ? 0 : status == PKV_E_DEVICE ? FAILED_STEPS : *failures + 1;
  if (status != PKV_OK) pkv_log(PKV_LOG_ERROR, "server", "a step failed: %s", err->text);
  return *failures < FAILED_STEPS;
}

/* Waits for work; false: time to end. Puts what came among the active; *jobs is the first that is
 * to be started, and those behind it that have no id yet. */
static bool next_work(pkv_loop *loop, bool *cancels) {
  (void)pthread_mutex_lock(&loop->lock);
  while (!loop->quit && loop->inbox == NULL && loop->active == NULL)
    (void)pthread_cond_wait(&loop->work, &loop->lock);
  const bool go = !loop->quit;
  pkv_job *jobs = loop->inbox;
  loop->inbox = NULL;
  loop->inbox_end = &loop->inbox;
  *cancels = loop->cancels;
  loop->cancels = false;
  pkv_job **end = &loop->active;
  while (*end != NULL)
    end = &(*end)->next;
  *end = jobs;
  for (pkv_job **at = end; *at != NULL; at = &(*at)->next)
    (*at)->at = at;
  (void)pthread_mutex_unlock(&loop->lock);
  for (pkv_job *job = jobs, *next; go && job != NULL; job = next) {
    next = job->next;
    start_job(loop, job);
  }
  return go;
}

/* --- begin and end ------------------------------------------------------------------------- */

/* What a device had room for. */
static void say_size(const pkv_engine *engine, const pkv_engine_options *o) {
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  if (o->device == PKV_DEVICE_CPU) return;
  pkv_engine_get_stats(&stats, engine);
  pkv_log(PKV_LOG_INFO, "server", "the device's cache holds %lld tokens (%zu MiB)",
          (long long)stats.pages_total * (o->page_tokens > 0 ? o->page_tokens : 16),
          stats.cache_bytes >> 20);
}

static pkv_status make_engine(pkv_loop *loop, pkv_model **model, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const pkv_engine_options *const o = &loop->options.engine;
  PKV_TRY(loop->options.load(loop->options.user, model, err));
  PKV_TRY(pkv_engine_create(&loop->engine, *model, o, err));
  say_size(loop->engine, o);
  const int32_t rows = o->max_rows > 0 ? o->max_rows : 32;
  const int32_t chunk = o->prefill_chunk > 0 ? o->prefill_chunk : 2048; /* the largest default */
  loop->event_count = (size_t)rows + (size_t)chunk;
  loop->events = pkv_alloc_zeroed(&a, loop->event_count, sizeof *loop->events);
  PKV_CHECK(err, loop->events != NULL, PKV_E_NOMEM, "no memory for %zu events", loop->event_count);
  return PKV_OK;
}

static void set_phase(pkv_loop *loop, pkv_loop_phase phase, pkv_model *model,
                      const pkv_error *why) {
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  if (loop->engine != NULL) pkv_engine_get_stats(&stats, loop->engine);
  (void)pthread_mutex_lock(&loop->lock);
  if (model != NULL) loop->model = model;
  loop->counters.engine = stats;
  loop->counters.phase = phase;
  loop->counters.worked_ns = pkv_clock_ns();
  if (why != NULL) loop->failure = *why;
  (void)pthread_mutex_unlock(&loop->lock);
  wake(loop);
}

static void fail_all(pkv_loop *loop) {
  bool cancels;
  (void)pthread_mutex_lock(&loop->lock);
  loop->quit = true; /* so that next_work only moves what came meanwhile */
  (void)pthread_mutex_unlock(&loop->lock);
  (void)next_work(loop, &cancels);
  while (loop->active != NULL) {
    pkv_job *const job = loop->active;
    for (int32_t i = 0, n = job->n; i < n; i++)
      if (!job->choices[i].state.done) {
        const bool last = job->left_choices == 1;
        fail_choice(loop, &job->choices[i], PKV_E_INTERNAL);
        if (last) break;
      }
  }
}

static void *engine_thread(void *opaque) {
  pkv_loop *const loop = opaque;
  pkv_error err = {PKV_OK, "", ""};
  pkv_model *model = NULL;
  bool cancels = false;
  int failures = 0;
  if (make_engine(loop, &model, &err) != PKV_OK) {
    set_phase(loop, PKV_LOOP_FAILED, model, &err);
    return NULL;
  }
  set_phase(loop, PKV_LOOP_READY, model, NULL);
  while (next_work(loop, &cancels)) {
    if (cancels) heed_clients(loop);
    if (loop->active != NULL && !step(loop, &failures, &err)) {
      set_phase(loop, PKV_LOOP_FAILED, model, &err);
      break;
    }
    if (loop->active == NULL) wake(loop);
  }
  fail_all(loop);
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

pkv_status pkv_loop_create(pkv_loop **out, const pkv_loop_options *options, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  *out = NULL;
  pkv_loop *const loop = pkv_alloc_zeroed(&a, 1, sizeof *loop);
  PKV_CHECK(err, loop != NULL, PKV_E_NOMEM, "no memory for the engine's loop");
  loop->options = *options;
  loop->max_choices = options->engine.max_requests > 0 ? options->engine.max_requests : 256;
  loop->inbox_end = &loop->inbox;
  loop->counters.engine = (pkv_engine_stats)PKV_ENGINE_STATS_INIT;
  (void)pthread_mutex_init(&loop->lock, NULL);
  (void)pthread_cond_init(&loop->work, NULL);
  const int failed = pthread_create(&loop->thread, NULL, engine_thread, loop);
  if (failed != 0) {
    free_loop(loop);
    return PKV_FAIL(err, PKV_E_NOMEM, "cannot start the engine's thread: error %d", failed);
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
