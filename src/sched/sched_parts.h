/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside the room: the scheduler's handle, a request's record, and what its parts call in each
 * other.
 *
 *   sched.c            options, the handle, the public calls
 *   sched_queue.c      age: priorities, bypasses, waiting times, deadlines
 *   sched_pick.c       pkv_sched_best: the rules, the page budget
 *   sched_tree*.c      the prefix tree: order TREE; what is shared for all orders but CHT
 *   sched_baselines.c  LPM and DFS_WEIGHT on that tree
 *   sched_cht.c        the Chunked Hash Tree
 *   sched_policy*.c    when to stop; learners
 */
#ifndef PKV_SCHED_PARTS_H
#define PKV_SCHED_PARTS_H

#include <stdbool.h>

#include "base/alloc.h"
#include "pkv/sched.h"
#include "sched/sched_heap.h"
#include "sched/sched_map.h"

#define PKV_SCHED_MAX_REQUESTS (1 << 21)
#define PKV_SCHED_MAX_PROMPT   (1 << 24)
#define PKV_SCHED_MAX_CHUNK    (1 << 16)
#define PKV_SCHED_MOST_TRIES   64

/* Keys: priority * 2^40 + order's score, |score| < 2^39. Scores count eighths of a token. */
#define PKV_SCHED_CLASS_BITS 40
#define PKV_SCHED_UNIT       8
#define PKV_SCHED_AGE_LIMIT  ((int64_t)1 << 38)

typedef enum pkv_sched_place { /* where a request is; the first four are pkv_sched_state */
                               PKV_SCHED_FREE = 0,
                               PKV_SCHED_IS_WAITING = 1,
                               PKV_SCHED_IS_ACTIVE = 2,
                               PKV_SCHED_IS_PREEMPTED = 3,
                               PKV_SCHED_IS_HIDDEN =
                                   4 /* waiting, but not to be chosen during this pkv_sched_best */
} pkv_sched_place;

typedef struct pkv_sched_req {
  uint64_t id;
  const void *data; /* tokens or hashes, borrowed */
  int64_t since_ns;
  uint64_t first; /* tree: hash of the first chunk of its edge */
  int32_t prompt; /* tokens */
  int32_t hashed; /* of these, what may be shared: all, or as far as the hashes go */
  int32_t pages;
  int32_t priority;        /* as given; order FCFS counts all as 0 */
  uint32_t node;           /* tree: the node it hangs from; cht: its block of entries */
  uint32_t older, younger; /* of its priority; free requests are linked by `younger` */
  int32_t passed;          /* see sched_queue.c */
  uint32_t deadline;       /* place in the deadline heap + 1; 0 = none */
  uint8_t place;           /* pkv_sched_place */
  bool by_hash;
  bool lost;     /* cht, PKV_SCHED_FAULT_LOST_PREEMPTED */
  bool admitted; /* once at least */
} pkv_sched_req;

/* One priority: its requests by age, whatever they are doing. */
typedef struct pkv_sched_class {
  int32_t priority;
  int32_t waiting;
  uint32_t head, tail;
  uint32_t oldest; /* the first that waits */
  int32_t streak;  /* AGEING_OLDEST: admissions since the oldest one was admitted */
  int64_t passed;  /* AGEING_EACH: bypasses of `oldest` */
} pkv_sched_class;

typedef struct pkv_sched_deadline {
  int64_t at_ns;
  uint32_t slot;
} pkv_sched_deadline;

typedef struct pkv_sched_queue {
  pkv_sched_class *classes; /* [PKV_SCHED_MAX_PRIORITIES], the most urgent first */
  int32_t class_count;
  uint32_t next_ord;
  uint32_t gap;   /* between insertions: 1, or more from one put between to an empty queue */
  uint64_t moved; /* times that a request was given another ord */
  pkv_sched_deadline *deadlines; /* binary heap [max_requests]; NULL until there is one */
  uint32_t deadline_count;
} pkv_sched_queue;

/* What a request would mean for the batch. */
typedef struct pkv_sched_view {
  int32_t shared_tokens;
  int32_t chain_before, chain_after; /* tokens */
  int32_t sharers, peers;
} pkv_sched_view;

typedef struct pkv_tree pkv_tree;
typedef struct pkv_cht pkv_cht;
typedef struct pkv_sched_learner pkv_sched_learner;
typedef struct pkv_sched_ranking pkv_sched_ranking;

/* The last answer of pkv_sched_best, until something changes. */
typedef struct pkv_sched_last {
  bool valid;
  bool decided; /* the policy had a choice */
  pkv_sched_verdict verdict;
  pkv_sched_reason reason;
  uint32_t slot;
  uint32_t state; /* the learner's */
} pkv_sched_last;

struct pkv_sched {
  pkv_allocator allocator;
  pkv_sched_options o; /* resolved */
  uint32_t capacity;   /* max_requests */
  pkv_sched_req *reqs;
  pkv_sched_cell *cells; /* [capacity]: a request's key, and its place in a heap */
  uint32_t free, fresh;  /* unused records: a list, and those never used from `fresh` on */
  pkv_sched_map ids;
  pkv_sched_queue queue;
  pkv_tree *tree; /* all orders but CHT */
  pkv_cht *cht;
  pkv_sched_ranking *ranking; /* LPM, DFS_WEIGHT */
  pkv_sched_learner *learner; /* UCB, Q_LEARNING */
  int64_t share8, age8;       /* share_weight and age_tokens_per_s in eighths */
  int64_t now_ns, last_since_ns, base_ns;
  bool started;  /* the clock was read */
  int32_t floor; /* STATIC_CHAIN */
  int32_t waiting, active, preempted;
  int64_t total_tokens, unique_tokens, common_tokens;
  pkv_sched_last last;
  pkv_sched_stats stats; /* counters since create */
  int64_t allocated, used_peak;
  uint64_t changes; /* of anything that a ranking depends on */
};

/* Reads the clock into now_ns, which never goes backwards. */
int64_t pkv_sched_now(pkv_sched *s);

/* Allocations of the handle, counted. */
void *pkv_sched_take(pkv_sched *s, size_t count, size_t size);
void pkv_sched_give(pkv_sched *s, void *ptr, size_t count, size_t size);

static inline bool pkv_sched_fault(const pkv_sched *s, uint32_t fault) {
  return (s->o.faults & fault) != 0;
}
static inline int32_t pkv_sched_class_priority(const pkv_sched *s, uint32_t slot) {
  return s->o.order == PKV_SCHED_FCFS ? 0 : s->reqs[slot].priority;
}
/* Chunks of the first `tokens` tokens, a partial one included. */
static inline int32_t pkv_sched_chunks(const pkv_sched *s, int32_t tokens) {
  return tokens / s->o.chunk_tokens + (tokens % s->o.chunk_tokens != 0);
}
/* What a waiting request has to outweigh, before what it shares is taken off. */
int64_t pkv_sched_base_key(const pkv_sched *s, uint32_t slot, int64_t length8);

/* ---- sched_queue.c ---- */

pkv_status pkv_sched_queue_init(pkv_sched *s, pkv_error *err);
void pkv_sched_queue_deinit(pkv_sched *s);
/* E_LIMIT: one priority too many, or the next `ord` would be 2^31 behind a request's, which is
 * 2^31 / gap insertions. E_NOMEM: the heap of deadlines. */
pkv_status pkv_sched_queue_ready(pkv_sched *s, int32_t class_priority, bool deadline,
                                 pkv_error *err);
/* The `ord` of a new request ahead of `before`, NONE = behind all. Neighbours may get others.
 * After queue_ready, which answers for NONE. E_LIMIT: a request would be 2^31 behind. */
pkv_status pkv_sched_queue_place(uint32_t *ord, pkv_sched *s, uint32_t before, pkv_error *err);
/* Checked before; the cell has its `ord`. */
void pkv_sched_queue_insert(pkv_sched *s, uint32_t slot, uint32_t before, int64_t deadline_ns);
/* After place has changed between waiting and anything else. `admitted`: it passed older ones. */
void pkv_sched_queue_leave(pkv_sched *s, uint32_t slot, bool admitted);
void pkv_sched_queue_return(pkv_sched *s, uint32_t slot);
/* After queue_leave if it waited. */
void pkv_sched_queue_remove(pkv_sched *s, uint32_t slot);
void pkv_sched_deadline_add(pkv_sched *s, uint32_t slot, int64_t at_ns);
void pkv_sched_deadline_remove(pkv_sched *s, uint32_t slot);
pkv_sched_class *pkv_sched_class_of(const pkv_sched *s, uint32_t slot);
/* The most urgent priority that waits; NULL = nothing waits. */
pkv_sched_class *pkv_sched_top_class(const pkv_sched *s);
int64_t pkv_sched_bypasses(const pkv_sched *s, const pkv_sched_class *c);

/* ---- sched_tree.c ---- */

pkv_status pkv_tree_create(pkv_sched *s, pkv_error *err);
void pkv_tree_destroy(pkv_sched *s);
/* A request that waits; never fails. */
void pkv_tree_insert(pkv_sched *s, uint32_t slot);
void pkv_tree_remove(pkv_sched *s, uint32_t slot);
/* Changes reqs[slot].place too. */
void pkv_tree_move(pkv_sched *s, uint32_t slot, pkv_sched_place to);
/* Gives a waiting request another `ord`; its age among the others stays what it is. */
void pkv_tree_set_ord(pkv_sched *s, uint32_t slot, uint32_t ord);
/* The best of those that share, PKV_SCHED_NONE = none does. */
uint32_t pkv_tree_choose(const pkv_sched *s);
/* The longest prefix that `others` active requests have, itself not counted. */
int32_t pkv_tree_shared(const pkv_sched *s, uint32_t slot, int32_t others);
int32_t pkv_tree_chain(const pkv_sched *s); /* tokens */
void pkv_tree_view(pkv_sched_view *view, const pkv_sched *s, uint32_t slot);
size_t pkv_tree_used(const pkv_sched *s);
int32_t pkv_tree_nodes(const pkv_sched *s);
pkv_status pkv_tree_check(const pkv_sched *s, pkv_error *err);

/* ---- sched_cht.c: the same ---- */

pkv_status pkv_cht_create(pkv_sched *s, pkv_error *err);
void pkv_cht_destroy(pkv_sched *s);
pkv_status pkv_cht_insert(pkv_sched *s, uint32_t slot, pkv_error *err);
void pkv_cht_remove(pkv_sched *s, uint32_t slot);
void pkv_cht_move(pkv_sched *s, uint32_t slot, pkv_sched_place to);
void pkv_cht_set_ord(pkv_sched *s, uint32_t slot, uint32_t ord);
uint32_t pkv_cht_choose(pkv_sched *s);
int32_t pkv_cht_shared(const pkv_sched *s, uint32_t slot, int32_t others);
int32_t pkv_cht_chain(const pkv_sched *s); /* tokens */
void pkv_cht_view(pkv_sched_view *view, const pkv_sched *s, uint32_t slot);
size_t pkv_cht_used(const pkv_sched *s);
int32_t pkv_cht_keys(const pkv_sched *s);
int64_t pkv_cht_stale(const pkv_sched *s);
pkv_status pkv_cht_check(const pkv_sched *s, pkv_error *err);

/* ---- sched_baselines.c ---- */

pkv_status pkv_sched_ranking_create(pkv_sched *s, pkv_error *err);
void pkv_sched_ranking_destroy(pkv_sched *s);
/* Before anything is hidden. */
void pkv_sched_ranking_refresh(pkv_sched *s);
uint32_t pkv_sched_ranking_choose(pkv_sched *s);
/* The ids that are served from, first choice first; their number, 0 without a ranking. */
int32_t pkv_sched_ranking_ids(uint64_t *ids, int32_t capacity, const pkv_sched *s);

/* ---- sched_policy.c ---- */

pkv_status pkv_sched_policy_create(pkv_sched *s, pkv_error *err);
void pkv_sched_policy_destroy(pkv_sched *s);
/* Sets verdict and forced of a pick that is complete otherwise, and s->last. */
void pkv_sched_decide(pkv_sched *s, pkv_sched_pick *pick, const pkv_sched_view *view, uint32_t slot,
                      int64_t page_budget);
/* The pick in s->last is being admitted. */
void pkv_sched_policy_admitted(pkv_sched *s);
void pkv_sched_policy_stopped(pkv_sched *s);
void pkv_sched_policy_drained(pkv_sched *s); /* the batch is empty */

/* ---- sched_policy_learn.c, sched_policy_store.c ---- */

#define PKV_SCHED_STATES  (11 * 11 * 11)
#define PKV_SCHED_ACTIONS 2 /* add, stop: pkv_sched_verdict */

typedef struct pkv_sched_arm {
  double visits; /* rewards that it was credited with */
  double value;  /* ucb: their sum; q-learning: the present estimate */
} pkv_sched_arm;

typedef struct pkv_sched_step {
  uint16_t state;
  uint8_t action;
} pkv_sched_step;

#define PKV_SCHED_LOG 4096 /* decisions between two rewards; older ones are forgotten */

struct pkv_sched_learner {
  pkv_sched_arm arms[PKV_SCHED_STATES][PKV_SCHED_ACTIONS];
  double reward_sum, rewards;
  uint64_t decisions; /* for the random draws */
  bool pending;       /* q-learning: `last` was rewarded and waits for the state after it */
  pkv_sched_step last;
  double last_reward;
  uint64_t logged; /* since the last reward */
  pkv_sched_step log[PKV_SCHED_LOG];
};

uint32_t pkv_sched_learner_state(int32_t rows, int32_t before, int32_t after, int32_t sharers);
void pkv_sched_learner_reset(pkv_sched *s); /* to the shipped prior */
pkv_sched_verdict pkv_sched_learner_choose(const pkv_sched *s, uint32_t state);
void pkv_sched_learner_note(pkv_sched *s, uint32_t state, pkv_sched_verdict action);
void pkv_sched_policy_reward(pkv_sched *s, int32_t rows, double seconds);

/* ---- sched_pick.c, sched_check.c ---- */

void pkv_sched_move(pkv_sched *s, uint32_t slot, pkv_sched_place to);
int32_t pkv_sched_shared(const pkv_sched *s, uint32_t slot, int32_t others);
/* E_INTERNAL: something inside does not fit together, and what. For tests: takes O(held). */
pkv_status pkv_sched_check(const pkv_sched *s, pkv_error *err);

#endif
