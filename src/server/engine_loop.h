/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that loads the model and owns the engine, and the bounded queue by which another one
 * reaches it. A job is one prompt and its n answers ("choices"): made and released by the other
 * thread, run by this one, and freed by whichever leaves it last. Functions here are for one other
 * thread, unless they say more.
 */
#ifndef PKV_SERVER_ENGINE_LOOP_H
#define PKV_SERVER_ENGINE_LOOP_H

#include "server/answer.h"
#include "server/serving_times.h"
#include "server/token_list.h"

/* Answers to all prompts of one HTTP request. */
#define PKV_CHOICES PKV_MAX_CHOICES

typedef struct pkv_job pkv_job;
typedef struct pkv_loop pkv_loop;

typedef enum pkv_loop_phase {
  PKV_LOOP_LOADING = 0,
  PKV_LOOP_READY,
  PKV_LOOP_FAILED /* no model, or steps fail again and again: no jobs are taken any more */
} pkv_loop_phase;

typedef struct pkv_loop_options {
  /* Called once, on the loop's thread; the model is the caller's and outlives the loop. */
  pkv_status (*load)(void *user, pkv_model **out, pkv_error *err);
  void *user;
  pkv_engine_options engine;
  int wake_fd; /* an eventfd, borrowed: written when a job or the loop has news */
} pkv_loop_options;

/* What a job is to do. The job takes `prompt` over. */
typedef struct pkv_job_spec {
  pkv_tokens prompt;
  pkv_request request; /* prompt, stops, bias, n and user are filled in by the job */
  pkv_stops stops;
  int32_t shown;              /* a control token whose text is shown; -1 = none */
  pkv_constraint *constraint; /* or NULL; the job keeps it for itself */
  int32_t n;                  /* 1 .. PKV_CHOICES */
  size_t window; /* of a stream: bytes not taken beyond which its tokens wait; 0 = no bound */
  int32_t bias_count;
  pkv_logit_bias bias[PKV_MAX_LOGIT_BIAS];
} pkv_job_spec;

/* One token of an answer whose request asked for log-probabilities. */
typedef struct pkv_token_record {
  int32_t token, from_prompt;
  float logprob; /* NaN = none */
  int32_t top_count;
  size_t text_at; /* bytes of the answer's text before it */
  pkv_logprob top[PKV_MAX_TOP_LOGPROBS];
} pkv_token_record;

/* What is new of one choice. */
typedef struct pkv_piece {
  pkv_buffer text;    /* well-formed UTF-8 */
  pkv_buffer records; /* pkv_token_record, packed */
} pkv_piece;

void pkv_piece_init(pkv_piece *piece);
void pkv_piece_clear(pkv_piece *piece);
void pkv_piece_deinit(pkv_piece *piece);

typedef struct pkv_choice_state {
  bool done;         /* nothing more comes */
  pkv_finish finish; /* when done; a stop string counts as PKV_FINISH_STOP */
  int32_t stop;      /* the stop string that ended it; -1 = none */
  pkv_status status; /* PKV_FINISH_ERROR: why */
  int32_t prompt_tokens, cached_tokens, generated;
  int64_t arrived_ns, started_ns, first_ns, last_ns; /* 0 = not yet; started: left the queue */
} pkv_choice_state;

typedef struct pkv_loop_counters {
  int64_t accepted, refused_full;
  int64_t finished[5];      /* by pkv_finish */
  int64_t prompt_tokens;    /* of answers that have a token, each on its own */
  int64_t generated_tokens; /* sampled for jobs */
  int32_t live;             /* choices accepted and not finished */
  int64_t pauses;           /* times that a job had to wait for its client */
  pkv_loop_phase phase;
  int64_t worked_ns;       /* when the engine last made progress, or had nothing to do */
  pkv_engine_stats engine; /* after the latest step */
  pkv_histograms times;
} pkv_loop_counters;

/* A choice that is live, for /slots and the dashboard. */
typedef struct pkv_slot {
  uint64_t job;
  int32_t choice, prompt_tokens, cached_tokens, generated, max_tokens;
  double age_s;
  bool started; /* its first token came */
} pkv_slot;

/* Starts the thread, which loads the model first. */
pkv_status pkv_loop_create(pkv_loop **out, const pkv_loop_options *options, pkv_error *err);
/* Cancels what runs, ends the thread; every job must have been released. NULL is allowed. */
void pkv_loop_destroy(pkv_loop *loop);

/* The model, or NULL until it is loaded. Any thread. */
const pkv_model *pkv_loop_model(pkv_loop *loop);
/* PKV_LOOP_FAILED: why. Any thread. */
void pkv_loop_get_failure(pkv_error *out, pkv_loop *loop);

/* True when `choices` more can be taken; stays true until the caller submits. */
bool pkv_loop_has_room(pkv_loop *loop, int32_t choices);
/* E_LIMIT: as many choices are live as the engine's max_requests, or as many different constraints
 * as it takes; E_STATE: no engine. On failure the spec's prompt stays the caller's. */
pkv_status pkv_loop_submit(pkv_job **out, pkv_loop *loop, pkv_job_spec *spec, pkv_error *err);
/* True when pkv_loop_take would give something new for some choice. */
bool pkv_loop_has_news(pkv_loop *loop, pkv_job *job);
/* True when all choices are done. */
bool pkv_loop_is_done(pkv_loop *loop, pkv_job *job);
int32_t pkv_job_choices(const pkv_job *job);
/* Appends what is new of a choice to `piece`. */
pkv_status pkv_loop_take(pkv_piece *piece, pkv_choice_state *state, pkv_loop *loop, pkv_job *job,
                         int32_t choice, pkv_error *err);
/* The caller leaves the job, which is cancelled when it is not done. NULL is allowed. */
void pkv_loop_release(pkv_loop *loop, pkv_job *job);

/* Any thread. */
void pkv_loop_get_counters(pkv_loop_counters *out, pkv_loop *loop);
/* Up to `capacity` live choices, the longest here first; returns how many. Any thread. */
int32_t pkv_loop_get_slots(pkv_slot *out, int32_t capacity, pkv_loop *loop);

/* Visits the live jobs' prompts, oldest first, under the loop's lock: quickly. Any thread. */
void pkv_loop_visit_prompts(pkv_loop *loop,
                            void (*visit)(void *user, uint64_t job, const int32_t *ids,
                                          int32_t count),
                            void *user);

#endif
