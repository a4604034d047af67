/* SPDX-License-Identifier: Apache-2.0 */
/* The side of the engine's loop that other threads call: jobs made, read, left, counted. */
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "server/loop_parts.h"

void pkv_piece_init(pkv_piece *piece) {
  pkv_buffer_init(&piece->text, PKV_ANSWER_BYTES, NULL);
  pkv_buffer_init(&piece->records, PKV_RECORD_BYTES, NULL);
}

void pkv_piece_clear(pkv_piece *piece) {
  pkv_buffer_clear(&piece->text);
  pkv_buffer_clear(&piece->records);
}

void pkv_piece_deinit(pkv_piece *piece) {
  pkv_buffer_deinit(&piece->text);
  pkv_buffer_deinit(&piece->records);
}

static size_t job_bytes(int32_t n) {
  return sizeof(pkv_job) + (size_t)n * sizeof(pkv_job_choice);
}

void pkv_job_free(pkv_job *job) {
  const pkv_allocator a = pkv_allocator_default();
  for (int32_t i = 0; i < job->n; i++) {
    pkv_answer_deinit(&job->choices[i].answer);
    pkv_buffer_deinit(&job->choices[i].records);
    pkv_piece_deinit(&job->choices[i].piece);
  }
  pkv_free(&a, job->bias, (size_t)job->request.logit_bias_count * sizeof *job->bias);
  pkv_constraint_destroy(job->constraint);
  pkv_tokens_free(&job->prompt);
  pkv_free(&a, job, job_bytes(job->n));
}

static pkv_job *make_job(const pkv_job_spec *spec, const pkv_model *model) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_job *const job = pkv_alloc_zeroed(&a, 1, job_bytes(spec->n));
  if (job == NULL) return NULL;
  job->n = job->left_choices = spec->n;
  job->window = spec->window;
  job->request = spec->request;
  job->stops = spec->stops;
  job->request.prompt = spec->prompt.ids;
  job->request.prompt_tokens = (int32_t)spec->prompt.count;
  job->request.n = spec->n;
  job->request.user = job;
  if (spec->constraint != NULL)
    job->request.constraint = job->constraint = pkv_constraint_retain(spec->constraint);
  for (int32_t i = 0; i < spec->stops.count; i++)
    job->stop_texts[i] = job->stops.text[i];
  job->request.stop = job->stop_texts;
  job->request.stop_count = spec->stops.count;
  for (int32_t i = 0; i < spec->n; i++) {
    pkv_job_choice *const c = &job->choices[i];
    c->job = job;
    c->index = i;
    c->state.prompt_tokens = job->request.prompt_tokens;
    c->state.stop = -1;
    c->state.arrived_ns = pkv_clock_ns();
    pkv_answer_init(&c->answer, model);
    c->answer.stream.shown = spec->shown;
    pkv_buffer_init(&c->records, PKV_RECORD_BYTES, NULL);
    pkv_piece_init(&c->piece);
  }
  if (spec->bias_count > 0) {
    const size_t bytes = (size_t)spec->bias_count * sizeof *job->bias;
    job->bias = pkv_alloc(&a, bytes);
    if (job->bias == NULL) {
      pkv_job_free(job);
      return NULL;
    }
    memcpy(job->bias, spec->bias, bytes);
    job->request.logit_bias_count = spec->bias_count;
    job->request.logit_bias = job->bias;
  }
  return job;
}

bool pkv_loop_has_room(pkv_loop *loop, int32_t choices) {
  (void)pthread_mutex_lock(&loop->lock);
  pkv_loop_counters *const c = &loop->counters;
  const bool room = choices <= loop->max_choices - c->live;
  if (!room) c->refused_full++;
  (void)pthread_mutex_unlock(&loop->lock);
  return room;
}

/* Under the lock: where the constraint is counted or may be; -1 = nowhere. */
static int32_t find_place(const pkv_loop *loop, const pkv_constraint *constraint) {
  int32_t place = -1;
  for (int32_t i = 0; i < PKV_MAX_CONSTRAINTS; i++) {
    if (loop->constraints[i].constraint == constraint) return i;
    if (loop->constraints[i].constraint == NULL && place < 0) place = i;
  }
  return place;
}

/* Under the lock. */
static void enqueue(pkv_loop *loop, pkv_job *job, pkv_job_spec *spec) {
  pkv_loop_counters *const c = &loop->counters;
  if (c->live == 0) c->worked_ns = pkv_clock_ns();
  c->live += job->n;
  c->accepted += job->n;
  job->number = ++loop->next_job;
  if (job->place >= 0) {
    loop->constraints[job->place].constraint = job->constraint;
    loop->constraints[job->place].jobs++;
  }
  job->prompt = spec->prompt;
  spec->prompt = (pkv_tokens){NULL, 0};
  *loop->inbox_end = job;
  loop->inbox_end = &job->next;
  (void)pthread_cond_signal(&loop->work);
}

static pkv_status check_submit(pkv_loop_phase phase, bool full, bool crowded, int32_t most,
                               pkv_error *err) {
  PKV_CHECK(err, phase == PKV_LOOP_READY, PKV_E_STATE, "there is no engine");
  PKV_CHECK(err, !full, PKV_E_LIMIT, "%d requests are here already; try again later", (int)most);
  PKV_CHECK(err, !crowded, PKV_E_LIMIT,
            "requests with %d different grammars or schemas are here already; try again later",
            PKV_MAX_CONSTRAINTS);
  return PKV_OK;
}

pkv_status pkv_loop_submit(pkv_job **out, pkv_loop *loop, pkv_job_spec *spec, pkv_error *err) {
  *out = NULL;
  pkv_job *const job = make_job(spec, pkv_loop_model(loop));
  PKV_CHECK(err, job != NULL, PKV_E_NOMEM, "no memory for a request");
  (void)pthread_mutex_lock(&loop->lock);
  pkv_loop_counters *const c = &loop->counters;
  const pkv_loop_phase phase = c->phase;
  const bool full = spec->n > loop->max_choices - c->live;
  job->place = job->constraint != NULL ? find_place(loop, job->constraint) : -1;
  const bool crowded = job->constraint != NULL && job->place < 0;
  if (phase == PKV_LOOP_READY && (full || crowded)) c->refused_full++;
  if (phase == PKV_LOOP_READY && !full && !crowded) enqueue(loop, job, spec);
  (void)pthread_mutex_unlock(&loop->lock);
  const pkv_status status = check_submit(phase, full, crowded, loop->max_choices, err);
  if (status == PKV_OK)
    *out = job;
  else
    pkv_job_free(job);
  return status;
}

bool pkv_loop_has_news(pkv_loop *loop, pkv_job *job) {
  bool news = false;
  (void)pthread_mutex_lock(&loop->lock);
  for (int32_t i = 0; i < job->n; i++)
    news = news || job->choices[i].news;
  (void)pthread_mutex_unlock(&loop->lock);
  return news;
}

bool pkv_loop_is_done(pkv_loop *loop, pkv_job *job) {
  (void)pthread_mutex_lock(&loop->lock);
  const bool done = job->left_choices == 0;
  (void)pthread_mutex_unlock(&loop->lock);
  return done;
}

int32_t pkv_job_choices(const pkv_job *job) {
  return job->n;
}

pkv_status pkv_loop_take(pkv_piece *piece, pkv_choice_state *state, pkv_loop *loop, pkv_job *job,
                         int32_t choice, pkv_error *err) {
  pkv_job_choice *const c = &job->choices[choice];
  (void)pthread_mutex_lock(&loop->lock);
  pkv_piece *const from = &c->piece;
  pkv_status status = PKV_OK;
  if (from->text.size > 0)
    status = pkv_buffer_append(&piece->text, from->text.data, from->text.size, err);
  if (status == PKV_OK && from->records.size > 0)
    status = pkv_buffer_append(&piece->records, from->records.data, from->records.size, err);
  job->waiting -= c->weight;
  c->weight = 0;
  pkv_piece_clear(from);
  c->news = status != PKV_OK;
  if (job->paused && job->waiting < job->window / 2) { /* the engine's thread looks again */
    loop->cancels = true;
    (void)pthread_cond_signal(&loop->work);
  }
  *state = c->state;
  (void)pthread_mutex_unlock(&loop->lock);
  return status;
}

void pkv_loop_release(pkv_loop *loop, pkv_job *job) {
  if (job == NULL) return;
  (void)pthread_mutex_lock(&loop->lock);
  const bool done = job->left_choices == 0;
  job->left = true;
  job->left_step = loop->steps_begun;
  if (!done) job->cancel = loop->cancels = true;
  (void)pthread_cond_signal(&loop->work);
  (void)pthread_mutex_unlock(&loop->lock);
  if (done) pkv_job_free(job);
}

const pkv_model *pkv_loop_model(pkv_loop *loop) {
  (void)pthread_mutex_lock(&loop->lock);
  const pkv_model *const model = loop->counters.phase == PKV_LOOP_LOADING ? NULL : loop->model;
  (void)pthread_mutex_unlock(&loop->lock);
  return model;
}

void pkv_loop_get_failure(pkv_error *out, pkv_loop *loop) {
  (void)pthread_mutex_lock(&loop->lock);
  *out = loop->failure;
  (void)pthread_mutex_unlock(&loop->lock);
}

void pkv_loop_get_counters(pkv_loop_counters *out, pkv_loop *loop) {
  (void)pthread_mutex_lock(&loop->lock);
  *out = loop->counters;
  (void)pthread_mutex_unlock(&loop->lock);
}

int32_t pkv_loop_get_slots(pkv_slot *out, int32_t capacity, pkv_loop *loop) {
  int32_t count = 0;
  const int64_t now = pkv_clock_ns();
  (void)pthread_mutex_lock(&loop->lock);
  const pkv_job *const lists[] = {loop->active, loop->inbox};
  for (size_t l = 0; l < sizeof lists / sizeof *lists; l++)
    for (const pkv_job *job = lists[l]; job != NULL; job = job->next)
      for (int32_t i = 0; i < job->n && count < capacity; i++) {
        const pkv_choice_state *const s = &job->choices[i].state;
        if (s->done) continue;
        out[count++] = (pkv_slot){job->number,
                                  i,
                                  s->prompt_tokens,
                                  s->cached_tokens,
                                  s->generated,
                                  job->request.max_tokens,
                                  (double)(now - s->arrived_ns) * 1e-9,
                                  s->first_ns != 0};
      }
  (void)pthread_mutex_unlock(&loop->lock);
  return count;
}

void pkv_loop_visit_prompts(pkv_loop *loop,
                            void (*visit)(void *user, uint64_t job, const int32_t *ids,
                                          int32_t count),
                            void *user) {
  (void)pthread_mutex_lock(&loop->lock);
  for (const pkv_job *job = loop->active; job != NULL; job = job->next)
    visit(user, job->number, job->prompt.ids, job->request.prompt_tokens);
  (void)pthread_mutex_unlock(&loop->lock);
}
