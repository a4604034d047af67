/* SPDX-License-Identifier: Apache-2.0 */
/* What the engine's thread (engine_loop.c) and the other one's calls (loop_calls.c) share. */
#ifndef PKV_SERVER_LOOP_PARTS_H
#define PKV_SERVER_LOOP_PARTS_H

#include <pthread.h>

#include "server/engine_loop.h"

/* Log-probabilities of one answer that is not streamed; it ends with an error beyond. */
#define PKV_RECORD_BYTES ((size_t)32 << 20)

typedef struct pkv_job_choice {
  pkv_job *job;
  int32_t index;
  /* the engine thread's */
  pkv_answer answer;
  pkv_buffer records; /* of tokens whose text is not ready yet */
  int32_t sampled, stop;
  pkv_finish ended; /* what it ends with, also where the engine says cancelled later */
  pkv_status status;
  /* under the lock */
  pkv_piece piece;
  bool news;     /* something was not taken yet */
  size_t weight; /* of the piece, about as many bytes as its events will have */
  pkv_choice_state state;
} pkv_job_choice;

struct pkv_job {
  /* fixed once submitted */
  uint64_t number;
  pkv_tokens prompt;
  pkv_request request;
  pkv_stops stops;
  const char *stop_texts[PKV_MAX_STOPS];
  int32_t n;
  pkv_logit_bias *bias;
  pkv_constraint *constraint;
  /* the engine thread's */
  int64_t id;    /* in the engine; 0 = not there */
  size_t window; /* bytes that may wait for the client before the engine pauses; 0 = any */
  /* under the lock */
  pkv_job *next, **at;  /* in the inbox, then among the active */
  int32_t left_choices; /* not ended */
  bool left, cancel;
  int32_t place;            /* in the loop's constraints; -1 = it has none */
  bool paused;              /* `waiting` went above the window, and is not far below it yet */
  size_t waiting;           /* weight of the pieces of all choices */
  int64_t left_step;        /* engine steps begun when the client left */
  pkv_job_choice choices[]; /* [n] */
};

/* The constraints of the jobs that are live: no more than the engine takes. */
typedef struct pkv_live_constraint {
  const pkv_constraint *constraint; /* NULL: free */
  int32_t jobs;
} pkv_live_constraint;

struct pkv_loop {
  pkv_loop_options options;
  pkv_engine *engine; /* the thread's */
  pkv_event *events;
  size_t event_count;
  int32_t max_choices;
  pthread_t thread;
  pthread_mutex_t lock; /* guards everything below */
  pthread_cond_t work;  /* something for the thread */
  pkv_model *model;     /* written once */
  pkv_error failure;
  pkv_job *inbox, **inbox_end;
  pkv_job *active;
  pkv_live_constraint constraints[PKV_MAX_CONSTRAINTS];
  uint64_t next_job;
  int64_t steps_begun;
  bool quit;
  bool cancels; /* some job has `cancel` set and is not cancelled yet, or may go on */
  pkv_loop_counters counters;
};

/* A job that nobody knows of any more. */
void pkv_job_free(pkv_job *job);

#endif
