/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward pass on a device: weights and caches lie there, a batch goes up as a few integers,
 * and what comes back is the likeliest tokens, with their logits where somebody asks. Batches of
 * decoding rows alone run from graphs captured at creation, one for each of a few batch sizes.
 * Single-owner; allocates nothing after pkv_device_forward_attach.
 */
#ifndef PKV_MODEL_DEVICE_FORWARD_H
#define PKV_MODEL_DEVICE_FORWARD_H

#include "model/device_weights.h"
#include "model/model.h"

#define PKV_DEVICE_CLASSES 7 /* of rows: q_len 1, 2, 4, ... 64 */

typedef struct pkv_device_forward pkv_device_forward;

/* A part of a model (model_shard.h), or all of it, and its weights on a device. */
typedef struct pkv_device_rank {
  const pkv_model *model;
  const pkv_device_weights *weights;
} pkv_device_rank;

typedef struct pkv_device_forward_options {
  int32_t max_tokens, max_logits;
  int32_t max_rows[PKV_DEVICE_CLASSES]; /* by class; 0 = no such rows */
  int32_t max_seq_len, page_tokens, max_pages;
  int32_t sampled_vocab; /* tokens that may be sampled */
  pkv_dtype kv_dtype;
  bool shares; /* rows may share prefixes: plans of route shared are made ready, where they run */
  const pkv_allocator *allocator;
} pkv_device_forward_options;

/* Whether ranks on these executors reach each other's memory; before their weights are made. */
pkv_status pkv_device_reaches(int32_t *reaches, pkv_executor *const *executors, int32_t count,
                              pkv_error *err);
/* What the buffers take of the device of one of `ranks`; SIZE_MAX where they do not fit the address
   space. */
size_t pkv_device_forward_bytes(const pkv_model *model, pkv_executor *executor, int32_t rank,
                                int32_t ranks, const pkv_device_forward_options *options);
/* Buffers and plans; weights and model are borrowed. Several ranks, each on a device of its own,
   compute one pass together. */
pkv_status pkv_device_forward_create(pkv_device_forward **out, const pkv_device_rank *ranks,
                                     int32_t count, const pkv_device_forward_options *options,
                                     pkv_error *err);
void pkv_device_forward_destroy(pkv_device_forward *forward);
/* caches [ranks, layers], copied: the devices'. Runs each graph's batch once (rows of length 0,
   nothing is written to the caches) and captures it. */
pkv_status pkv_device_forward_attach(pkv_device_forward *forward, const pkv_cache *caches,
                                     pkv_error *err);
/* Whether passes may have sample_rows. */
bool pkv_device_forward_samples(const pkv_device_forward *forward);
/* Returns when `sampled`, and `logits` where it is not NULL, are there. Groups are one a class,
   with rows, q_len and seq_len instead of plans. */
pkv_status pkv_device_forward_run(pkv_device_forward *forward, const pkv_forward_batch *batch,
                                  pkv_error *err);
/*
 * The same in two halves. begin returns when the pass is on the stream, finish when its tokens and,
 * where `batch` has them, its logits are there; a failure leaves nothing begun.
 */
pkv_status pkv_device_forward_begin(pkv_device_forward *forward, const pkv_forward_batch *batch,
                                    pkv_error *err);
pkv_status pkv_device_forward_finish(pkv_device_forward *forward, const pkv_forward_batch *batch,
                                     pkv_error *err);
/* How many rows the pass that was begun can be gone on from with, before its tokens are known: 0
   where it is not one of decoding rows alone, from a graph, on one device. */
int32_t pkv_device_forward_goes_on(const pkv_device_forward *forward);
/*
 * Begins the pass behind it: the same rows, each with the token that will have been chosen for it,
 * one position on. `group`: with the new lengths, and tables that hold the new tokens' pages.
 * finish is for the older one first. After a failure the older one is still there.
 */
pkv_status pkv_device_forward_go_on(pkv_device_forward *forward, const pkv_forward_group *group,
                                    pkv_error *err);
/* One page of all layers onto another, in order with the passes. */
pkv_status pkv_device_forward_copy_page(pkv_device_forward *forward, int32_t to, int32_t from,
                                        pkv_error *err);
/* What a page of all layers takes of a rank's cache, K and V. */
size_t pkv_device_forward_page_bytes(const pkv_device_forward *forward, int32_t rank);
/* A page of all layers to each rank's pinned host memory, so many bytes at host[rank], or from
   there; in order with the passes. The caches lie as the engine lays them: K and V of all layers
   one after the other, equally far apart; E_UNSUPPORTED where they do not. */
pkv_status pkv_device_forward_store_page(pkv_device_forward *forward, void *const *host,
                                         int32_t page, pkv_error *err);
pkv_status pkv_device_forward_load_page(pkv_device_forward *forward, int32_t page,
                                        void *const *host, pkv_error *err);
/* Until everything that was put on the streams so far has ended. */
pkv_status pkv_device_forward_wait(pkv_device_forward *forward, pkv_error *err);

#endif
