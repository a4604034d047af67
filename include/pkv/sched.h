/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sched.h - Feather: which waiting request joins the batch next, and when to stop adding.
 *
 * The scheduler knows tokens (or block hashes), a clock and a cost figure, never a tensor. It holds
 * every request from insert to finish or cancel; a request is *waiting*, *active* (in the batch) or
 * *preempted* (out of the batch or the queue, not to be picked until it returns).
 *
 * The order of calls
 *   pkv_sched_insert()            a request has come
 *   each step:
 *     pkv_sched_finish()          for every request that ended
 *     pkv_sched_best()            who would be next, and whether to add it; while it says ADD:
 *       pkv_sched_admit()
 *     pkv_sched_reward()          the batch's measured time, for the policies that learn
 *
 * Sharing is counted in whole chunks from the start of the prompt (a partial last chunk is shared
 * by equal prompts only). What the active requests' prompts hold together is *covered*: a waiting
 * request's shared tokens are its longest covered prefix, the rest are its new tokens. The *chain*
 * is the longest common prefix of all active prompts, in chunks.
 *
 * Who is picked, whatever the order, the first rule that applies:
 *   1. a request that waited max_wait_s or longer; the longest wait first
 *   2. of the most urgent priority that waits: the oldest request, if it was passed over
 *      bypass_limit times (see pkv_sched_ageing)
 *   3. a request whose deadline is nearer than deadline_slack_s; the nearest first
 *   4. of the most urgent priority that waits: the order's choice
 * A request that does not fit the page budget is passed by (which counts); not so by rule 1 or 2:
 * then nothing is picked until it fits.
 *
 * Everything is deterministic: the same calls, clock values and seed give the same picks. Times are
 * nanoseconds of the options' clock; a clock that goes backwards is taken to stand still.
 */
#ifndef PKV_SCHED_H
#define PKV_SCHED_H

#include "pkv/pkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------
 * Orders, policies, options
 * ------------------------------------------------------------------------------------------ */

typedef enum pkv_sched_order {
  /* Requests that share come first, by 8 * new - 8 * share_weight * shared tokens, ties by age; the
     others by age. A prefix tree: logarithmic whatever is shared. */
  PKV_SCHED_TREE = 0,
  PKV_SCHED_FCFS = 1,     /* by age; priorities are ignored */
  PKV_SCHED_PRIORITY = 2, /* by priority, then by age */
  /* The same choice as TREE, counted in chunks, by the seed's Chunked Hash Tree: a missing count
     for each waiting request, a heap with lazy deletion. */
  PKV_SCHED_CHT = 3,
  /* Longest covered prefix first, ties by age; sorted once, and again after any insert, finish,
     cancel or return. */
  PKV_SCHED_LPM = 4,
  /* Depth first over the covered tree, heavier subtrees (more waiting requests) first; sorted when
     LPM would be. */
  PKV_SCHED_DFS_WEIGHT = 5
} pkv_sched_order;
#define PKV_SCHED_ORDERS 6

typedef enum pkv_sched_policy {
  PKV_SCHED_ALWAYS = 0,       /* add */
  PKV_SCHED_STATIC = 1,       /* add while few tokens are new (static_new_tokens) */
  PKV_SCHED_STATIC_CHAIN = 2, /* add while the chain loses little, else up to a floor */
  PKV_SCHED_UCB = 3,          /* contextual bandit */
  PKV_SCHED_Q_LEARNING = 4,
  /* Add while one batch of those that run, the candidate and its peers takes no longer than two
     batches do, one after the other, by the cost callback. Peers are the other waiting requests
     that would reread what the candidate brings, as many as fit. */
  PKV_SCHED_MARGINAL = 5
} pkv_sched_policy;
#define PKV_SCHED_POLICIES 6

/* "tree", "dfs-weight", "q-learning"; "?" for an unknown value. */
PKV_API const char *pkv_sched_order_name(pkv_sched_order order);
PKV_API const char *pkv_sched_policy_name(pkv_sched_policy policy);

/* What bypass_limit K bounds. Being passed over: a younger request of the same priority is admitted
   while this one is in the scheduler and not yet admitted for good. */
typedef enum pkv_sched_ageing {
  /* Each request is passed over at most K times. Behind a long queue of mixed groups this comes
     close to first come, first served. */
  PKV_SCHED_AGEING_EACH = 0,
  /* The oldest waiting request is passed over at most K times in a row (k-LPM, with k = K + 1): a
     request behind n older ones sees at most (n + 1) * (K + 1) admissions. */
  PKV_SCHED_AGEING_OLDEST = 1
} pkv_sched_ageing;

/* Faults of the published code, for comparison; none is on by default. */
#define PKV_SCHED_FAULT_ABSOLUTE       1u  /* new chunks alone count: a stranger beats a sharer */
#define PKV_SCHED_FAULT_NO_AGEING      2u  /* no bypass_limit, no max_wait_s, no deadlines */
#define PKV_SCHED_FAULT_LOST_PREEMPTED 4u  /* cht: what was preempted is never picked again */
#define PKV_SCHED_FAULT_STICKY_FLOOR   8u  /* static-chain: the floor is never lowered */
#define PKV_SCHED_FAULT_TRUST_DIGESTS  16u /* cht: equal digests are equal prompts */
#define PKV_SCHED_FAULT_STALE_HEAP     32u /* cht: stale heap entries pile up (bounded by memory) */
/* Not in the published list: policies may stop although nothing is shared in the batch. */
#define PKV_SCHED_FAULT_NO_GUARD 64u
#define PKV_SCHED_FAULTS_ALL     127u

/* How cht digests tokens: XXH3 of each chunk and a mixing chain, or the published way, one XXH64
   stream fed token by token with a digest at each chunk's end. tree hashes a chunk here and there
   and compares tokens. */
typedef enum pkv_sched_hash {
  PKV_SCHED_HASH_BULK = 0,
  PKV_SCHED_HASH_TOKENWISE = 1
} pkv_sched_hash;

/* A batch as the cost callback sees it. Prompt tokens only: what requests have generated since is
   for the callback's own books. */
typedef struct pkv_sched_batch {
  int32_t rows;
  int32_t chain_tokens;  /* common to all rows */
  int64_t total_tokens;  /* of all rows */
  int64_t unique_tokens; /* a prefix that several rows share counted once */
  int64_t common_tokens; /* of those, what two rows or more have */
} pkv_sched_batch;

/* Seconds that a decode step of this batch takes; finite, >= 0 (anything else counts as 0). */
typedef double (*pkv_sched_cost_fn)(void *ctx, const pkv_sched_batch *batch);
/* Nanoseconds from any fixed point, >= 0. */
typedef int64_t (*pkv_sched_clock_fn)(void *ctx);
/* A hash of `bytes` bytes, for tests that force collisions. */
typedef uint64_t (*pkv_sched_hash_fn)(void *ctx, const void *data, size_t bytes, uint64_t seed);

typedef struct pkv_sched_options {
  uint32_t struct_size;
  pkv_sched_order order;
  pkv_sched_policy policy;
  /* Waiting, active and preempted together, at most 2^21; 0 = 16384. All memory but cht's is taken
     at create, and touched as it fills. */
  int32_t max_requests;
  int32_t max_prompt_tokens; /* at most 2^24; 0 = 2^20 */
  int32_t chunk_tokens;      /* what sharing is counted in, 1 .. 2^16; 0 = 64 */
  int32_t page_tokens;       /* of the KV cache; 0 = 16 */
  int32_t pool_pages;        /* of the whole cache: what needs more is refused; 0 = no limit */

  int32_t bypass_limit; /* K; 0 = 32, -1 = none */
  pkv_sched_ageing ageing;
  double max_wait_s;       /* 0 = none */
  double deadline_slack_s; /* 0 = 1 */

  double share_weight;      /* what a shared token is worth against a new one; 0 = 1, -1 = 0 */
  int32_t share_min_tokens; /* less is no sharing (tree, cht); 0 = one chunk */
  double age_tokens_per_s;  /* how many new tokens a second of waiting outweighs; 0 = none */
  int32_t fit_tries;        /* candidates looked at for one that fits the budget; 0 = 8 */

  int32_t lpm_fallback;        /* lpm is fcfs above so many waiting (SGLang: 128); 0 = never */
  int32_t lpm_in_batch_tokens; /* lpm: what shares at most so many covered tokens but at least so
                                  many with an older waiting one goes last (SGLang: 32); 0 = off */

  /* static (published: 500 at chunk 500, or 50) */
  int32_t static_new_tokens; /* 0 = 500 */
  /* static-chain (published: 5, 7, 10, 10 at chunk 50) */
  int32_t chain_loss;         /* chunks; 0 = 5 */
  int32_t chain_loss_crowded; /* when crowd waiting requests share the new chain; 0 = 7 */
  int32_t crowd;              /* 0 = 10 */
  int32_t floor_max;          /* each add within the loss raises the floor by 1, to this; 0 = 10 */
  double ucb_bonus;           /* c in mean + c * sqrt(ln(n + 1) / n_a); 0 = 200 */
  double q_rate;              /* 0 = 0.1 */
  double q_discount;          /* 0 = 0.9 */
  double q_explore;           /* 0 = 0.05, -1 = 0 */
  double prior_weight;        /* visits that the shipped prior counts for; 0 = 4, -1 = no prior */

  /* NULL = base_us + row_us * rows + token_us * unique_tokens */
  pkv_sched_cost_fn cost;
  void *cost_ctx;
  double cost_base_us;  /* 0 = 5000 */
  double cost_row_us;   /* 0 = 8 */
  double cost_token_us; /* 0 = 0.03 */

  pkv_sched_clock_fn clock; /* NULL = the machine's monotonic clock */
  void *clock_ctx;
  pkv_sched_hash hash;
  pkv_sched_hash_fn hash_fn; /* NULL = XXH3 */
  void *hash_ctx;
  uint64_t seed;
  uint32_t faults;
  const pkv_allocator *allocator;
  int32_t max_rows; /* of a batch, as far as marginal looks ahead; it limits no call; 0 = any */
} pkv_sched_options;
/* All defaults: the fields that are not named are 0. */
#define PKV_SCHED_OPTIONS_INIT                                                                     \
  {                                                                                                \
    (uint32_t)sizeof(pkv_sched_options), PKV_SCHED_TREE, PKV_SCHED_ALWAYS, 0, 0, 0, 0, 0, 0,       \
        PKV_SCHED_AGEING_EACH, 0.0, 0.0, 0.0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0,  \
        0.0, NULL, NULL, 0.0, 0.0, 0.0, NULL, NULL, PKV_SCHED_HASH_BULK, NULL, NULL, 0u, 0u, NULL, \
        0                                                                                          \
  }

/* Single-owner. */
typedef struct pkv_sched pkv_sched;

PKV_API PKV_MUST_CHECK pkv_status pkv_sched_create(pkv_sched **out,
                                                   const pkv_sched_options *options,
                                                   pkv_error *err);
PKV_API void pkv_sched_destroy(pkv_sched *sched); /* NULL is allowed */

/* ------------------------------------------------------------------------------------------
 * Requests
 * ------------------------------------------------------------------------------------------ */

#define PKV_SCHED_MAX_PRIORITY   1000000 /* and its negative */
#define PKV_SCHED_MAX_PRIORITIES 1024    /* different ones at a time */

typedef struct pkv_sched_request {
  uint32_t struct_size;
  int32_t prompt_tokens; /* 0 .. max_prompt_tokens */
  uint64_t id;           /* unique among those held; may be used again after finish or cancel */
  /*
   * Either tokens [prompt_tokens] or hashes [hash_count], borrowed: they must stay as they are
   * until the request has left. hashes[i] stands for all tokens up to the end of block i, blocks of
   * chunk_tokens, hash_count <= ceil(prompt_tokens / chunk_tokens); tokens beyond the last hash are
   * shared with nobody. Equal hashes are taken for equal tokens; requests given by tokens share
   * nothing with those given by hashes.
   */
  const int32_t *tokens;
  const uint64_t *hashes;
  int32_t hash_count;
  int32_t priority; /* lower is more urgent */
  /* When it came; 0 = now. Waiting is counted from here, but never from later than now nor from
     earlier than the request inserted before it. */
  int64_t arrival_ns;
  int64_t deadline_ns;   /* when it should be admitted at the latest; 0 = none */
  int32_t output_tokens; /* known or guessed */
  /* Of the KV cache, for prompt and output, were nothing shared; 0 = ceil((prompt_tokens +
     output_tokens) / page_tokens). */
  int32_t pages;
} pkv_sched_request;
#define PKV_SCHED_REQUEST_INIT                                                                     \
  { (uint32_t)sizeof(pkv_sched_request), 0, 0u, NULL, NULL, 0, 0, 0, 0, 0, 0 }

/*
 * E_INVALID: a bad field. E_STATE: the id is held already. E_LIMIT: max_requests are held, the
 * prompt is longer than max_prompt_tokens, it needs more than pool_pages, or it is one priority too
 * many. Nothing has changed then. After warm-up nothing is allocated (E_NOMEM before; tree never).
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_insert(pkv_sched *sched,
                                                   const pkv_sched_request *request,
                                                   pkv_error *err);
/*
 * The same for a request that is older than one that is held: it comes just ahead of `before`, of
 * the same priority (any, with order fcfs), whatever that one is doing. It has waited at least as
 * long as that one and no longer than the one ahead of it, and counts as passed over as often as
 * the one behind it. O(log n) when it is averaged over many, whatever their order.
 * E_STATE also: no such request is held. E_INVALID also: it has another priority.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_insert_before(pkv_sched *sched,
                                                          const pkv_sched_request *request,
                                                          uint64_t before, pkv_error *err);

typedef enum pkv_sched_verdict {
  PKV_SCHED_ADD = 0,
  PKV_SCHED_STOP = 1, /* there is one, but the policy would not add it */
  PKV_SCHED_BLOCKED =
      2,              /* nothing that may be picked fits the page budget; id is the first choice */
  PKV_SCHED_EMPTY = 3 /* nothing waits; the other fields are 0 */
} pkv_sched_verdict;

typedef enum pkv_sched_reason {
  PKV_SCHED_BY_ORDER = 0,
  PKV_SCHED_BY_AGE = 1,      /* no request shares: the oldest */
  PKV_SCHED_BY_BYPASSES = 2, /* passed over bypass_limit times */
  PKV_SCHED_BY_WAIT = 3,     /* max_wait_s */
  PKV_SCHED_BY_DEADLINE = 4
} pkv_sched_reason;

typedef struct pkv_sched_pick {
  uint32_t struct_size;
  pkv_sched_verdict verdict;
  pkv_sched_reason reason;
  int32_t forced; /* 1: the policy had no choice (an empty batch, nothing shared, max_wait_s) */
  uint64_t id;
  int32_t prompt_tokens;
  int32_t shared_tokens;   /* covered by the batch */
  int32_t new_tokens;      /* prompt_tokens - shared_tokens */
  int32_t new_pages;       /* pages - shared_tokens / page_tokens, at least 0 */
  int32_t chain_before;    /* chunks; 0 for an empty batch */
  int32_t chain_after;     /* with this request added */
  int32_t waiting_sharers; /* other waiting requests that have the whole chain_after */
  int32_t bypasses;        /* how often it was passed over (AGEING_EACH: exact for the oldest of its
                              priority, else -1) */
  int64_t waited_ns;
  int32_t waiting_peers; /* other waiting requests that have the first new chunk too */
} pkv_sched_pick;
#define PKV_SCHED_PICK_INIT                                                                        \
  {                                                                                                \
    (uint32_t)sizeof(pkv_sched_pick), PKV_SCHED_EMPTY, PKV_SCHED_BY_ORDER, 0, 0u, 0, 0, 0, 0, 0,   \
        0, 0, 0, 0, 0                                                                              \
  }

/*
 * Who would be next, within page_budget new pages (-1 = no limit). Changes nothing that can be
 * seen: asked again, it answers the same.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_best(pkv_sched_pick *out, pkv_sched *sched,
                                                 int64_t page_budget, pkv_error *err);
/* Any waiting request becomes active, the best one or another. E_STATE: it does not wait. */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_admit(pkv_sched *sched, uint64_t id, pkv_error *err);
/* An active request leaves for good. */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_finish(pkv_sched *sched, uint64_t id, pkv_error *err);
/* An active request leaves the batch and keeps its age; it is picked again after its return. A
   waiting one, too, is then not picked before that; its deadline does not count any more. */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_preempt(pkv_sched *sched, uint64_t id, pkv_error *err);
/* A preempted request waits again, in its old place. */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_return(pkv_sched *sched, uint64_t id, pkv_error *err);
/* Whatever the request is doing, it leaves. E_STATE: there is no such request. */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_cancel(pkv_sched *sched, uint64_t id, pkv_error *err);
/*
 * `rows` requests took `seconds` (> 0): a step, or a batch from its start to its end. ucb and
 * q-learning credit rows / seconds to every decision since the last reward.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_reward(pkv_sched *sched, int32_t rows, double seconds,
                                                   pkv_error *err);

/* ------------------------------------------------------------------------------------------
 * Looking inside
 * ------------------------------------------------------------------------------------------ */

typedef enum pkv_sched_state {
  PKV_SCHED_UNKNOWN = 0, /* no such id */
  PKV_SCHED_WAITING = 1,
  PKV_SCHED_ACTIVE = 2,
  PKV_SCHED_PREEMPTED = 3
} pkv_sched_state;

PKV_API pkv_sched_state pkv_sched_get_state(const pkv_sched *sched, uint64_t id);

typedef struct pkv_sched_stats {
  uint32_t struct_size;
  int32_t waiting, active, preempted;
  int32_t chain_chunks;                /* of the batch */
  int32_t tree_nodes;                  /* inner nodes (tree), different chunks (cht) */
  int64_t total_tokens, unique_tokens; /* of the batch's prompts */
  /* Since create. */
  int64_t inserted, admitted, finished, cancelled, preempts, returns, rewards;
  int64_t stops;        /* rewards whose batch ended with STOP */
  int64_t by_reason[5]; /* admissions of the pick, by pkv_sched_reason */
  int64_t max_bypasses; /* that any admitted request had seen (AGEING_EACH, oldest only) */
  int64_t max_wait_ns, sum_wait_ns;  /* of admitted requests, from arrival to first admission */
  int64_t shared_tokens, new_tokens; /* at admission, summed */
  int64_t collisions;                /* equal digests of unequal tokens */
  int64_t heap_stale;                /* cht: entries that lazy deletion has not removed yet */
  int64_t memory_bytes;              /* taken from the allocator */
  int64_t used_bytes; /* of it in use for the requests held; the rest is ready for more */
  int64_t peak_used_bytes;
  int64_t common_tokens; /* of unique_tokens, what two active requests or more have */
} pkv_sched_stats;
#define PKV_SCHED_STATS_INIT                                                                       \
  {                                                                                                \
    (uint32_t)sizeof(pkv_sched_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,                \
        {0, 0, 0, 0, 0}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0                                           \
  }

/* Fills *out, whatever it held. Constant time. */
PKV_API void pkv_sched_get_stats(pkv_sched_stats *out, const pkv_sched *sched);

typedef struct pkv_sched_entry {
  uint64_t id;
  pkv_sched_state state;
  int32_t priority;
  int32_t prompt_tokens;
  int32_t shared_tokens; /* covered now; for an active request its own prompt */
  int64_t waiting_since_ns;
} pkv_sched_entry;

/*
 * The requests held, the most urgent priority first, then by age; at most `capacity` entries.
 * Returns how many there are. entries may be NULL when capacity is 0.
 */
PKV_API int32_t pkv_sched_snapshot(pkv_sched_entry *entries, int32_t capacity,
                                   const pkv_sched *sched);

/* ------------------------------------------------------------------------------------------
 * Learners' tables
 * ------------------------------------------------------------------------------------------ */

/*
 * Writes the learner's table to a file (a new one that then takes its place), or reads it. A file
 * that is damaged, of another policy or of another version is refused (E_FORMAT; a line goes to the
 * log) and the table stays as it was: the shipped prior, in a new scheduler. E_UNSUPPORTED: this
 * policy does not learn.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_save_learner(const pkv_sched *sched, const char *path,
                                                         pkv_error *err);
PKV_API PKV_MUST_CHECK pkv_status pkv_sched_load_learner(pkv_sched *sched, const char *path,
                                                         pkv_error *err);

/* ------------------------------------------------------------------------------------------
 * Hashing
 * ------------------------------------------------------------------------------------------ */

/*
 * Cumulative digests of tokens [count] in chunks, fit for pkv_sched_request.hashes: writes
 * ceil(count / chunk) of them (a partial last chunk has one) and returns their number. digests may
 * be NULL to count only; chunk < 1 gives 0. Not kept stable between versions: never store them.
 */
PKV_API size_t pkv_sched_digests(uint64_t *digests, const int32_t *tokens, size_t count,
                                 size_t chunk, pkv_sched_hash hash);

#ifdef __cplusplus
}
#endif
#endif
