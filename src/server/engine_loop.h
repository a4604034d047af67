/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that owns the engine, and the bounded queue by which another one reaches it. A job is
 * one request: made and released by the other thread, run by this one, and freed by whichever
 * leaves it last. Functions here are for one other thread, unless they say more.
 */
#ifndef PKV_SERVER_ENGINE_LOOP_H
#define PKV_SERVER_ENGINE_LOOP_H

#include "server/answer.h"
#include "server/token_list.h"

typedef struct pkv_job pkv_job;
typedef struct pkv_loop pkv_loop;

/* What a job is to do. The job takes `prompt` over. */
typedef struct pkv_job_spec {
  pkv_tokens prompt;
  pkv_request request; /* prompt, prompt_tokens and user are filled in by the job */
  pkv_stops stops;
} pkv_job_spec;

typedef struct pkv_job_state {
  bool done;         /* nothing more comes */
  pkv_finish finish; /* when done; a stop string counts as PKV_FINISH_STOP */
  pkv_status status; /* PKV_FINISH_ERROR: why */
  int32_t prompt_tokens, generated;
} pkv_job_state;

typedef struct pkv_loop_counters {
  int64_t accepted, refused_full;
  int64_t finished[5];      /* by pkv_finish */
  int64_t prompt_tokens;    /* of accepted jobs */
  int64_t generated_tokens; /* sampled for jobs */
  int32_t live;             /* accepted and not finished */
  bool broken;              /* steps fail again and again: no more jobs are taken */
  pkv_engine_stats engine;  /* after the latest step */
} pkv_loop_counters;

/* Starts the thread. `wake_fd` (an eventfd, borrowed) is written whenever a job has news. */
pkv_status pkv_loop_create(pkv_loop **out, const pkv_model *model,
                           const pkv_engine_options *options, int wake_fd, pkv_error *err);
/* Cancels what runs, ends the thread; every job must have been released. NULL is allowed. */
void pkv_loop_destroy(pkv_loop *loop);

/* E_LIMIT: as many jobs are live as the engine's max_requests. On failure the spec's prompt stays
 * the caller's. */
pkv_status pkv_loop_submit(pkv_job **out, pkv_loop *loop, pkv_job_spec *spec, pkv_error *err);
/* True when pkv_loop_take would give something new. */
bool pkv_loop_has_news(pkv_loop *loop, pkv_job *job);
/* Appends text that is new to `text`. */
pkv_status pkv_loop_take(pkv_buffer *text, pkv_job_state *state, pkv_loop *loop, pkv_job *job,
                         pkv_error *err);
/* The caller leaves the job, which is cancelled when it is not done. NULL is allowed. */
void pkv_loop_release(pkv_loop *loop, pkv_job *job);
/* Any thread. */
void pkv_loop_get_counters(pkv_loop_counters *out, pkv_loop *loop);

#endif
