/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From one row of logits to a token, and to log-probabilities. Pure functions of their arguments:
 * what runs in other rows never enters. The order is temperature, top_k, top_p, min_p.
 */
#ifndef PKV_ENGINE_SAMPLING_H
#define PKV_ENGINE_SAMPLING_H

#include <stdbool.h>

#include "pkv/engine.h"

typedef struct pkv_sampling {
  float temperature; /* 0 = greedy */
  int32_t top_k;     /* 0 = all */
  float top_p;       /* 0 or 1 = all */
  uint64_t seed;
  uint64_t stream; /* of a seed: which answer */
  float min_p;     /* 0 = all; of the best token's probability */
} pkv_sampling;

typedef struct pkv_candidate {
  float logit;
  int32_t token;
} pkv_candidate;

/* Caller's memory, each [vocab]. */
typedef struct pkv_sampling_scratch {
  pkv_candidate *candidates;
  double *weights;
} pkv_sampling_scratch;

/*
 * exp(x) for x <= 0, within 2 units in the last place; 0 below -708. Plain arithmetic in a fixed
 * order: a seed gives the same tokens whatever the C library, and compilers make vectors of it.
 */
double pkv_exp_negative(double x);

/* The largest of logits[vocab], vocab >= 1; false when one of them is NaN or infinite. */
bool pkv_logits_max(float *max, const float *logits, int32_t vocab);

/*
 * The token at `position` of its sequence, or -1 when a logit is not finite. Equal logits count in
 * the order of their ids. Randomness is pkv_hash_uniform(seed, stream, position).
 */
int32_t pkv_sample(const float *logits, int32_t vocab, const pkv_sampling *sampling,
                   int64_t position, const pkv_sampling_scratch *scratch);
/* The same for edited logits: -infinity is a token that may not come; -1 when none may. */
int32_t pkv_sample_edited(const float *logits, int32_t vocab, const pkv_sampling *sampling,
                          int64_t position, const pkv_sampling_scratch *scratch);

/* log(sum(exp(logits))) in double, so that logits[i] - it is token i's log-probability. The sum is
 * in the order of ids. Finite logits only. */
double pkv_logits_log_sum(const float *logits, int32_t vocab);
/* The `count` best tokens, best first, with log-probabilities; returns how many (<= vocab). */
int32_t pkv_logits_top(pkv_logprob *top, int32_t count, const float *logits, int32_t vocab,
                       double log_sum);

#endif
