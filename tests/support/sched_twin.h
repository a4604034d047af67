/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A scheduler as the header describes it, without any structure: a list of requests, prompts
 * compared token by token, everything recomputed at each question. Policies that do not learn.
 */
#ifndef PKV_TEST_SCHED_TWIN_H
#define PKV_TEST_SCHED_TWIN_H

#include <stdbool.h>

#include "pkv/sched.h"

#define TWIN_MOST 96

typedef struct twin_req {
  pkv_sched_request r;
  pkv_sched_state state;
  int64_t since_ns, deadline_ns; /* the deadline counts until the first admission */
  int64_t passed;
  int32_t hashed, pages, shared_ranked;
  bool lost;
} twin_req;

typedef struct sched_twin {
  pkv_sched_options o;   /* every field set: no defaults are filled in */
  twin_req q[TWIN_MOST]; /* by age */
  int32_t count;
  int64_t now_ns, last_since_ns, base_ns;
  bool started;
  int32_t streaks[8]; /* AGEING_OLDEST, by priority + 3 */
  int32_t floor;
  bool within_loss;            /* of the last answer */
  uint64_t ranking[TWIN_MOST]; /* lpm, dfs-weight: ids */
  int32_t ranked;              /* -1 = to be made */
  /* dfs-weight: the ranking under test, ids. Which of two children of equal weight goes first is
     nobody's promise: it is read off here. */
  uint64_t tested[TWIN_MOST];
  int32_t tested_count;
} sched_twin;

void twin_init(sched_twin *t, const pkv_sched_options *resolved);
void twin_clock(sched_twin *t, int64_t ns);
twin_req *twin_find(sched_twin *t, uint64_t id);
int32_t twin_in(const sched_twin *t, pkv_sched_state state);
/* What pkv_sched_insert must say, and the insertion if it says PKV_OK. */
pkv_status twin_insert(sched_twin *t, const pkv_sched_request *r, int64_t now_ns);
pkv_status twin_insert_before(sched_twin *t, const pkv_sched_request *r, uint64_t before,
                              int64_t now_ns);
/* `best`: it is what the twin said last. */
void twin_admit(sched_twin *t, uint64_t id, bool best);
void twin_leave(sched_twin *t, uint64_t id); /* finish, cancel */
void twin_preempt(sched_twin *t, uint64_t id);
void twin_return(sched_twin *t, uint64_t id);
void twin_best(pkv_sched_pick *out, sched_twin *t, int64_t budget);
int64_t twin_unique_tokens(const sched_twin *t);
int64_t twin_common_tokens(const sched_twin *t, const twin_req *extra); /* with one more, or NULL */
int32_t twin_chain(const sched_twin *t);                                /* tokens */
int32_t twin_shared(const sched_twin *t, const twin_req *r);

#endif
