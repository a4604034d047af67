/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's own state, shared by its files only.
 *
 *   engine.c     creating, cancelling, statistics
 *   request.c    submitting: what is refused, what a slot holds
 *   queue.c      the lists of waiting and running ones, and the scheduler behind them
 *   admission.c  who runs: prefixes, pages, preemption
 *   guide.c      constraints: their machines, and which tokens they allow
 *   batch.c      what a step computes: tokens, groups, plans
 *   engine_device.c  weights, cache and forward pass on a device
 *   swap.c       pages of preempted ones in the host's memory, where a device has the cache
 *   ahead.c      the step behind one that a device still computes
 *   step.c       one step: the above in order, forward, sampling, events
 *
 * A request, or each of its n answers, is a pkv_seq in a slot of `seqs` from submit to its last
 * event. It waits in `waiting` or runs in `running`; both are in the order of arrival, so that a
 * preempted one returns to its own place. Running ones own a row of the block table, whose first
 * `locked` pages are entries of the prefix cache.
 */
#ifndef PKV_ENGINE_STATE_H
#define PKV_ENGINE_STATE_H

#include "base/alloc.h"
#include "engine/constraint.h"
#include "engine/logit_edit.h"
#include "engine/sampling.h"
#include "engine/stop_match.h"
#include "kv/prefix.h"
#include "model/device_forward.h"
#include "model/model.h"
#include "model/model_shard.h"

/*
 * A chunk of a prompt goes to attention as rows of q_len 64, 32, 16, ... by the binary digits of
 * its length: any mixture of chunks makes at most PKV_Q_CLASSES groups, whose rows balance over the
 * workers, and memory for that many plans is all a step needs.
 */
#define PKV_Q_CLASSES 7
#define PKV_Q_LARGEST (1 << (PKV_Q_CLASSES - 1))
/* Rows of logits a step can hold beyond one a running request: prompt tokens scored a step. */
#define PKV_SCORE_TOKENS 64
/* Admission leaves this many pages free for each running request, so that it is not preempted at
   once. */
#define PKV_HEADROOM_PAGES 2

typedef enum pkv_seq_state { PKV_SEQ_FREE = 0, PKV_SEQ_WAITING, PKV_SEQ_RUNNING } pkv_seq_state;

typedef struct pkv_seq {
  int64_t id;    /* of the request: all its answers have it */
  int64_t order; /* of arrival, unique */
  int32_t choice;
  pkv_seq_state state;
  int32_t row;     /* of the block table while running */
  int32_t *tokens; /* [capacity]: prompt, then what was generated; kept with the slot */
  int32_t capacity;
  uint64_t *digests; /* [digest_capacity]: chained hashes of the whole pages of known tokens */
  int32_t digest_capacity, digest_count;
  pkv_prefix_key key;
  int32_t locked; /* leading pages of its row that are entries of the prefix cache */
  bool apart;     /* an equal page was there before its own: no more entries for this run */
  /* Runs, but its prefix is being computed by another: holds a row and nothing else until then. */
  bool follows;
  int32_t follow_pages; /* what it will take over, by now ... */
  int32_t leader;       /* ... from whoever is in this slot; -1 = not one alone */
  int64_t leader_order;
  int32_t bypasses; /* how often a later one started before it */
  bool forgotten;   /* the scheduler does not know it any more: cancelled while waiting */
  bool held;        /* waits, and the scheduler is not to pick it: paused */
  int32_t prompt;   /* tokens of the prompt */
  int32_t known;    /* tokens there are: prompt and generated */
  int32_t computed; /* tokens whose K and V are in the cache */
  int32_t planned;  /* tokens this step computes */
  int32_t limit;    /* known at most */
  int32_t echoed;   /* prompt tokens whose events were written */
  bool echo, scoring, logprobs, ignore_end, cancelled, counted, paused;
  int32_t top_logprobs, min_tokens, cached_tokens, preemptions, priority;
  pkv_sampling sampling;
  pkv_logit_edit edit;
  pkv_stop_match stops;
  /* Preempted, with what its first tokens' pages held on the host: swap.c. */
  int32_t swapped;    /* so many tokens; 0 = nothing */
  int32_t swap_first; /* pages before this one are not there: others held them */
  int32_t *host;      /* [host_capacity] by page: where */
  int32_t host_capacity;
  int64_t started_ns; /* of the step that first computed something of it */
  int32_t guide;      /* of its constraint; -1 = none */
  int32_t fed;        /* tokens of the answer that `matched` has seen */
  pkv_machine_state matched;
  void *user;
} pkv_seq;

/* A constraint that requests use, or used: carried out with memory of its own. */
typedef struct pkv_guide {
  const pkv_constraint *constraint; /* NULL: free */
  pkv_machine *machine;
  int32_t users; /* answers that are not ended */
  int64_t used;  /* when one last came */
} pkv_guide;

/* Rows of one q_len in the batch of a step. */
typedef struct pkv_q_class {
  pkv_shape shape;
  pkv_plan_options plan_options;
  bool shares; /* plans of route shared, where rows share */
  int32_t max_rows, rows;
  int32_t *seq_len; /* [max_rows] */
  int32_t *table;   /* [max_rows, max_pages]: copies of the block table's rows */
  /* Of decoding rows, [max_rows], else NULL: which change of the block table a copy is, 0 = none;
     whether it is another one since the last step. */
  uint64_t *held;
  uint8_t *changed;
  void *plan;
  size_t plan_bytes;
  /* Of local layers, where a request may be longer than their window. */
  pkv_shape local_shape;
  void *local_plan; /* NULL: `plan` serves all layers */
  size_t local_plan_bytes;
} pkv_q_class;

/* Which token a row of logits belongs to. */
typedef struct pkv_logit_row {
  int32_t seq, position;
  int64_t order; /* of the request that was in slot `seq` then */
} pkv_logit_row;

/* What one of an engine's devices has. */
typedef struct pkv_engine_rank {
  pkv_executor *executor;
  pkv_model *shard; /* NULL: the whole model */
  pkv_device_weights *weights;
  void *cache; /* this rank's part of the pool's storage */
} pkv_engine_rank;

/* Pinned host memory for pages, in which preempted requests find theirs again. */
typedef struct pkv_swap {
  int32_t pages;     /* 0: none */
  int32_t *free_ids; /* [pages], a stack */
  int32_t free_count;
  int32_t *users;              /* [pages]: requests that a page is kept for */
  void *memory[PKV_MAX_RANKS]; /* each rank's part of all pages */
  size_t page_bytes[PKV_MAX_RANKS];
  double out_seconds, in_seconds; /* of a page, measured at the start */
  double token_seconds;           /* of a prompt's token, the least of any step; 0 = none yet */
} pkv_swap;

struct pkv_engine {
  pkv_allocator allocator;
  const pkv_model *model;
  pkv_engine_options options; /* every 0 replaced by its default */
  pkv_hparams shape;
  int32_t vocab; /* tokens that may be sampled: padding rows of the head are none */
  int32_t max_pages, max_tokens, max_logits;

  pkv_executor *executor;
  pkv_forward *forward;
  /* In its place on a device; NULL on the CPU. */
  pkv_device_weights *weights; /* of rank 0 */
  pkv_device_forward *device;
  pkv_engine_rank ranks[PKV_MAX_RANKS]; /* of rank 0 the executor is `executor` */
  int32_t rank_count;                   /* 0 on the CPU */
  pkv_cache *device_caches;             /* [ranks, layers] */
  size_t device_cache_bytes;            /* of all ranks */
  pkv_status copy_status;               /* of the pages copied so far: no step after a failure */
  pkv_error copy_error;
  pkv_swap swap;
  int32_t products_saved; /* products that had been measured when the file was written */
  pkv_pool *pool;
  pkv_table *table;
  pkv_cache *caches;    /* [layers] */
  pkv_prefix *prefix;   /* NULL without prefix_sharing */
  int32_t *match_pages; /* [max_pages]: what a search found */
  int32_t *ends;        /* [end_count]: tokens that end a turn */
  float *end_logits;    /* [end_count], for one choice of a token */
  pkv_guide guides[PKV_MAX_CONSTRAINTS];
  int32_t end_count;

  pkv_seq *seqs;              /* [max_requests] */
  int32_t *waiting, *running; /* slots, by order: [max_requests], [max_rows] */
  int32_t waiting_count, running_count;
  int32_t *free_rows; /* [max_rows], a stack */
  int32_t free_row_count;
  int64_t next_order;
  pkv_sched *sched; /* NULL: first come, first served, from `waiting` itself */

  /*
   * Steps on their way: 0 between calls on the CPU. A device's step is awaited by the call behind
   * the one that began it (`lags`), after the next one was begun where that can be done without
   * this one's tokens (ahead.c).
   */
  int32_t flights;
  bool lags;
  bool asked;       /* somebody came, or is to be looked at again, since the last admission */
  int64_t begun_ns; /* when the oldest began, or could: the one before had ended */

  /* The batch of a step. */
  int32_t *ids, *positions; /* [max_tokens] */
  int64_t *slots;           /* [max_tokens] */
  int32_t *logit_tokens;    /* [max_logits] */
  pkv_logit_row *logit_rows;
  float *logits;                     /* [max_logits, hparams.vocab] */
  int32_t *sampled;                  /* device: [max_logits] the tokens that it chose ... */
  pkv_dense_sample_row *sample_rows; /* ... by these, where it samples */
  bool reads_logits; /* device: some row of the step needs more than its likeliest token */
  int32_t tokens, decode_tokens, logit_count;
  pkv_q_class classes[PKV_Q_CLASSES]; /* by q_len 1, 2, 4, ... */
  pkv_forward_group groups[PKV_Q_CLASSES];
  int32_t group_count;
  int32_t *decode_len;   /* [max_rows]: lengths of the decoding rows, for policy and statistics */
  int32_t *decode_table; /* [max_rows, max_pages]: theirs, with route_stats */
  int32_t decode_rows;
  void *stats_plan;
  size_t stats_plan_bytes;
  pkv_sampling_scratch scratch;
  float *edited;   /* [vocab]: logits after penalties and biases */
  int32_t *counts; /* [vocab]: 0 between uses */

  pkv_engine_stats stats;
};

/* Where the events of a step go. */
typedef struct pkv_event_sink {
  pkv_event *events;
  size_t capacity, count;
} pkv_event_sink;

static inline int32_t pkv_pages_for(const struct pkv_engine *e, int32_t tokens) {
  const int32_t page = e->options.page_tokens;
  return tokens / page + (tokens % page != 0);
}

/* A request with one token to compute behind its prompt advances in every step. */
static inline bool pkv_seq_decodes(const pkv_seq *s) {
  return s->known > s->prompt && s->known - s->computed == 1;
}

/* queue.c: every change of a request's state passes here */
pkv_status pkv_queue_create(pkv_engine *engine, pkv_error *err);
/* A new request (in the order of arrival). On failure it is in no list. */
pkv_status pkv_queue_add(pkv_engine *engine, int32_t slot, pkv_error *err);
/* Waiting -> running, and back to its place. */
pkv_status pkv_queue_start(pkv_engine *engine, int32_t slot, pkv_error *err);
pkv_status pkv_queue_return(pkv_engine *engine, int32_t slot, pkv_error *err);
/* Out of whatever list it is in. */
pkv_status pkv_queue_remove(pkv_engine *engine, int32_t slot, pkv_error *err);
/* Who may start next, at most `pages` new pages (-1 = any): *slot, or -1. `at` counts the
   candidates that the caller refused since the last start. */
pkv_status pkv_queue_next(int32_t *slot, pkv_engine *engine, int32_t at, int64_t pages,
                          pkv_error *err);
/* A waiting request is cancelled: nobody may pick it any more. */
void pkv_queue_forget(pkv_engine *engine, int32_t slot);
/* A request was paused, or goes on: while it is paused and waits nobody picks it, and it keeps its
   place. */
void pkv_queue_hold(pkv_engine *engine, int32_t slot);
/* The step's time, for policies that learn. */
pkv_status pkv_queue_reward(pkv_engine *engine, double seconds, pkv_error *err);

/* admission.c */
/* Moves waiting requests into the batch as rows and pages allow, until `most` run. */
pkv_status pkv_engine_admit(pkv_engine *engine, size_t most, pkv_error *err);
/* Gives a running request's row and pages back; the lists are the caller's. */
pkv_status pkv_engine_leave(pkv_engine *engine, int32_t slot, pkv_error *err);
/* Sets `planned` of each running request and takes its pages, preempting the youngest if need
   be. */
pkv_status pkv_engine_reserve(pkv_engine *engine, pkv_error *err);
/* After a step: pages that are whole now become entries of the prefix cache. */
void pkv_engine_publish_pages(pkv_engine *engine);

/* How many leading pages of a's and b's tokens are equal. */
int32_t pkv_seq_common_pages(const pkv_engine *engine, const pkv_seq *a, const pkv_seq *b);
/* Idle pages leave the cache until the row can grow by `tokens`; false: it still cannot. */
bool pkv_engine_make_room(pkv_engine *engine, int32_t row, int32_t tokens);

/* swap.c */
/* The host's memory, and how fast pages get there and back. E_NOMEM: what was asked for cannot be
   had. */
pkv_status pkv_swap_create(pkv_engine *engine, pkv_error *err);
void pkv_swap_destroy(pkv_engine *engine);
/* A request is about to lose its pages: they are kept, where that pays and fits. */
void pkv_swap_out(pkv_engine *engine, int32_t slot);
/* Whether what is kept continues `pages` pages of the cache, and goes beyond them. */
bool pkv_swap_continues(const pkv_engine *engine, const pkv_seq *s, int32_t pages);
/* The rest of what is kept, behind the `pages` pages that its row has; nothing is kept any more.
   False: it could not be had, and the row is as it was. */
bool pkv_swap_in(pkv_engine *engine, pkv_seq *s, int32_t pages);
/* Nothing is kept for it any more. */
void pkv_swap_drop(pkv_engine *engine, pkv_seq *s);
/* What a step with tokens of prompts took. */
void pkv_swap_note_step(pkv_engine *engine, double seconds, int32_t tokens);

/* request.c */
/* Digests of the pages that are whole with the tokens known by now. */
void pkv_seq_digest(const pkv_engine *engine, pkv_seq *s);
/* The memory that a slot keeps. */
void pkv_seq_free(const pkv_engine *engine, pkv_seq *s);

/* engine_device.c */
/* The same as pkv_engine_create on executors made before, one a rank, which the engine then owns,
   whatever comes of it (tests). */
pkv_status pkv_engine_create_on(pkv_engine **out, const pkv_model *model,
                                pkv_executor *const *executors, int32_t count,
                                const pkv_engine_options *options, pkv_error *err);
/* Uploads the weights, in a form that leaves room for the rest where there is one; refuses options
   that a device has no answer to. Knows all options but cache_tokens, which may be 0. */
pkv_status pkv_engine_device_begin(pkv_engine *engine, pkv_error *err);
/* Tokens of cache that will fit, roughly: before anything but the weights is there. */
pkv_status pkv_engine_device_room(int64_t *tokens, pkv_engine *engine, pkv_error *err);
/* The forward pass, then the pool from what is left, then the graphs. */
pkv_status pkv_engine_device_forward(pkv_engine *engine, pkv_error *err);
pkv_status pkv_engine_device_pool(pkv_engine *engine, pkv_error *err);
pkv_status pkv_engine_device_attach(pkv_engine *engine, pkv_error *err);
/* What was measured of products since the last time goes to options.products_file. */
void pkv_engine_device_save(pkv_engine *engine);
void pkv_engine_device_end(pkv_engine *engine);
/* Row `row` of logits is this request's: how its token is chosen. Sets reads_logits where that
   needs logits on the host. */
void pkv_engine_device_row(pkv_engine *engine, int32_t row, const pkv_seq *s);

/* ahead.c */
/* Begins the step behind the one on its way, where all that it needs but tokens is known. After a
   failure the one on its way still is. */
pkv_status pkv_ahead_begin(pkv_engine *engine, pkv_error *err);
/* The older step's tokens were dealt with: the batch becomes that of the younger one. */
void pkv_ahead_take(pkv_engine *engine);

/* guide.c */
/* Of one more answer; E_LIMIT: too many different ones. May allocate. */
pkv_status pkv_guide_take(int32_t *guide, pkv_engine *engine, const pkv_constraint *constraint,
                          pkv_error *err);
void pkv_guide_leave(pkv_engine *engine, pkv_seq *s);
void pkv_guides_destroy(pkv_engine *engine);
/* logits[vocab]: those of tokens that may not follow become -infinity. False: it cannot be told,
   the grammar is too ambiguous here. */
bool pkv_guide_mask(float *logits, pkv_engine *engine, pkv_seq *s);
/* After a token that was allowed: the text is complete and nothing can follow. */
bool pkv_guide_completes(pkv_engine *engine, pkv_seq *s);

/* batch.c */
pkv_status pkv_batch_create(pkv_engine *engine, size_t *workspace_bytes, pkv_error *err);
/* Most rows of q_len tokens that a step may have. */
int32_t pkv_batch_max_rows(const pkv_engine *engine, int32_t q_len);
void pkv_batch_destroy(pkv_engine *engine);
/* Lays the planned tokens out and builds the plans. */
pkv_status pkv_batch_build(pkv_engine *engine, pkv_error *err);
/* After a failed step: nobody may rely on having seen what it laid out. */
void pkv_batch_forget(pkv_engine *engine);
/* Row by row, the lengths and pages of decoding rows as class 0 has them, each one token more. */
const pkv_forward_group *pkv_batch_go_on(pkv_engine *engine);
/* The decoding rows, for policy and statistics. */
void pkv_batch_note_rows(pkv_engine *engine);
/* Adds what each route would have read for the decoding rows to the statistics. */
pkv_status pkv_batch_count_routes(pkv_engine *engine, pkv_error *err);

#endif
