/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor parallelism: the part of a model that one of several ranks computes. A rank has some KV
 * heads with their query heads, and some of the feed-forward's columns: rows of q, k, v, gate and
 * up, columns of o and down, whose products the ranks add up. Where there are more ranks than KV
 * heads, several have the same one and divide its query heads. Embeddings and norms are each
 * rank's; the head is rank 0's, or its rows are divided where ranks reach each other's memory.
 */
#ifndef PKV_MODEL_MODEL_SHARD_H
#define PKV_MODEL_MODEL_SHARD_H

#include "model/model.h"

/* A model whose weights are views of the whole's, which must outlive it. Serves device passes only:
   it has no file, tokenizer or template of its own. E_UNSUPPORTED where heads or blocks of weights
   do not divide; the text says which. */
pkv_status pkv_model_shard_create(pkv_model **out, const pkv_model *whole, int32_t rank,
                                  int32_t ranks, bool divides_head, const pkv_allocator *allocator,
                                  pkv_error *err);
void pkv_model_shard_destroy(pkv_model *shard);

#endif
