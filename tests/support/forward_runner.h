/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a model over sequences through a paged cache, without the engine: pool, table, plans and one
 * pkv_forward. Anything that fails, fails the test.
 */
#ifndef PKV_TEST_FORWARD_RUNNER_H
#define PKV_TEST_FORWARD_RUNNER_H

#include "model/model.h"

typedef struct forward_runner_options {
  pkv_isa isa;
  int32_t threads;
  pkv_compute compute;
  pkv_dtype kv_dtype;
  int32_t rows, max_seq_len;      /* sequences, and tokens of one */
  int32_t max_tokens;             /* of one run */
  int32_t page_tokens;            /* 0 = 16 */
  const pkv_allocator *allocator; /* of the forward pass and the executor */
} forward_runner_options;

typedef struct forward_runner {
  forward_runner_options options;
  const pkv_model *model;
  pkv_executor *executor;
  pkv_pool *pool;
  pkv_table *table;
  pkv_forward *forward;
  pkv_cache *caches; /* [layers] */
  unsigned char *plan_memory;
  size_t plan_bytes; /* of one plan */
  int32_t *positions, *logit_tokens, *lengths;
  int64_t *slots;
} forward_runner;

/* Negative when the instruction set is not here. */
int forward_runner_init(forward_runner *r, const pkv_model *model,
                        const forward_runner_options *options);
void forward_runner_deinit(forward_runner *r);

/* Appends `count` tokens to one row. all: logits of each token, [count, vocab]; else of the last
   one only. logits may be NULL. */
void forward_runner_feed(forward_runner *r, int32_t row, const int32_t *ids, int32_t count,
                         bool all, float *logits);
/* One more token for each of rows 0 .. rows-1 together; logits [rows, vocab]. */
void forward_runner_step(forward_runner *r, const int32_t *ids, int32_t rows, float *logits);
void forward_runner_reset(forward_runner *r);

/* log softmax of a row, in double, of one token. */
double log_probability(const float *logits, int32_t vocab, int32_t token);
int32_t best_token(const float *logits, int32_t vocab);

#endif
