/* SPDX-License-Identifier: Apache-2.0 */
/* A model: hyper-parameters, weights, tokenizer, and one forward pass over a mixed batch of
   tokens. */
#ifndef PKV_MODEL_MODEL_H
#define PKV_MODEL_MODEL_H

#include <stdbool.h>

#include "grammar/token_trie.h"
#include "model/gguf.h"
#include "model/tokenizer.h"
#include "pkv/engine.h"

/* Validated once, before any use. */
typedef struct pkv_hparams {
  int32_t layers, width, feed_forward, query_heads, kv_heads, head_dim, rope_dim, vocab, context;
  float norm_eps, rope_base;
  int32_t rope_pairs_adjacent;
  int32_t window;       /* tokens that a query of a local layer sees, its own included; 0 = none */
  int32_t local_layers; /* how many there are */
} pkv_hparams;

const pkv_hparams *pkv_model_hparams(const pkv_model *model);
const pkv_tokenizer *pkv_model_tokenizer(const pkv_model *model);
/* The texts of its tokens, control tokens left out; the model's, made with the first call. Any
   thread. */
pkv_status pkv_model_trie(const pkv_token_trie **out, const pkv_model *model, pkv_error *err);
/* A hash of every setting and weight (reads all of them): equal where K and V are computed from the
   same numbers. */
uint64_t pkv_model_fingerprint(const pkv_model *model);
/* The model over GGUF bytes in memory, which must outlive it (tests, fuzzing). */
pkv_status pkv_model_open_memory(pkv_model **out, const void *bytes, size_t size,
                                 const pkv_model_options *options, pkv_error *err);

/* pkv_model_inspect over bytes in memory. */
pkv_status pkv_model_inspect_memory(const void *bytes, size_t size, const pkv_inspector *visitor,
                                    const pkv_allocator *allocator, pkv_error *err);

/* Rows of the batch that have the same number of new tokens: all decoding rows, or one chunk of
   one prompt. */
typedef struct pkv_forward_group {
  const pkv_plan
      *plan; /* rows, q_len and lengths (new tokens included); head shape of this model */
  /* The same with the model's window, for its local layers. NULL: no token of any batch lies
     further than the window (max_positions), so that one plan serves all layers. */
  const pkv_plan *local_plan;
  const int32_t *block_table; /* [plan rows, block_table_stride] */
  int64_t block_table_stride;
  int32_t max_pages;
  int32_t first_token; /* where its rows * q_len tokens start in the batch, row by row */
  /* For a device, which plans for itself: `plan` and `local_plan` are NULL, `rows` rows of q_len
     new tokens. `shares`: read prefixes that rows share once. */
  int32_t rows, q_len;
  const int32_t *seq_len; /* [rows] */
  bool shares;
  const uint8_t *changed; /* [rows]: 0: its table is what it was in the batch before; NULL: any */
} pkv_forward_group;

typedef struct pkv_forward_batch {
  int32_t tokens;
  const int32_t *ids;       /* [tokens] */
  const int32_t *positions; /* [tokens] */
  const int64_t *slots;     /* [tokens], as pkv_append */
  const pkv_forward_group *groups;
  int32_t group_count;
  const int32_t *logit_tokens; /* [logit_count]: which tokens of the batch need logits */
  int32_t logit_count;
  float *logits; /* [logit_count, vocab] */
  /* A device: [logit_count] tokens, by sample_rows [logit_count] or, NULL, the likeliest ones;
     -1 = not finite. */
  int32_t *sampled;
  const struct pkv_dense_sample_row *sample_rows;
} pkv_forward_batch;

/* Scratch and tables of forward passes on one executor: single-owner, sized at creation,
   allocates nothing afterwards. */
typedef struct pkv_forward pkv_forward;

typedef struct pkv_forward_options {
  int32_t max_tokens, max_logits, max_positions;
  pkv_compute compute;
  size_t workspace_bytes; /* for attention: the largest of the plans that will be used */
  const pkv_allocator *allocator;
} pkv_forward_options;

pkv_status pkv_forward_create(pkv_forward **out, const pkv_model *model, pkv_executor *executor,
                              const pkv_forward_options *options, pkv_error *err);
void pkv_forward_destroy(pkv_forward *forward);
/* caches [layers], borrowed for the call. */
pkv_status pkv_forward_run(pkv_forward *forward, const pkv_cache *caches,
                           const pkv_forward_batch *batch, pkv_error *err);

#endif
