/* SPDX-License-Identifier: Apache-2.0 */
/* Private to device_forward.c, which owns it, and device_pass.c, which fills the stream. */
#ifndef PKV_MODEL_DEVICE_FORWARD_PARTS_H
#define PKV_MODEL_DEVICE_FORWARD_PARTS_H

#include "backend/device_ops.h"
#include "model/device_forward.h"
#include "model/model_parts.h"
#include "model/model_shard.h"
#include "pkv/device.h"

#define PKV_DEVICE_BUCKETS 64

/* The integers of a batch. The host's copy has the same layout as the device's: one transfer. */
typedef struct pkv_device_inputs {
  int64_t *slots;                       /* [max_tokens] */
  pkv_dense_sample_row *sample_rows;    /* [max_logits] */
  int32_t *ids, *positions;             /* [max_tokens] */
  int32_t *logit_rows;                  /* [max_logits] */
  int32_t *seq_len[PKV_DEVICE_CLASSES]; /* [max_rows of the class] */
  int32_t *first;                       /* [max_rows of the last class + 1], see prefills */
} pkv_device_inputs;

typedef struct pkv_device_class {
  pkv_device_plan *plan, *local_plan; /* local: with the model's window; NULL: plan serves */
  pkv_device_plan *shared_plan;       /* q_len 1; NULL: none */
  int32_t *table;                     /* device [max_rows, max_pages] */
  int32_t *known;                     /* host: what `table` holds, of class 0; else NULL */
} pkv_device_class;

/* What a pass computes. */
typedef struct pkv_device_pass {
  int32_t tokens, logit_count;
  int32_t first[PKV_DEVICE_CLASSES], rows[PKV_DEVICE_CLASSES]; /* by class */
  bool shared;                                                 /* class 0 by the shared plan */
  bool alone; /* rows of class 0 only, each at its newest token */
  /* Of the last class: its rows are so many chunks of prompts, which the prefill kernel takes;
     0: rows of 64 tokens by their plan. */
  int32_t chunks, longest;
} pkv_device_pass;

typedef struct pkv_device_graph {
  int32_t rows;
  void *graph[2]; /* balanced, shared */
} pkv_device_graph;

/* Of one rank. The leader, rank 0, is what the engine has: its calls drive all of them. */
struct pkv_device_forward {
  pkv_allocator allocator;
  struct pkv_device_forward *ranks[PKV_MAX_RANKS]; /* of the leader: [0] itself */
  int32_t rank_count;                              /* of others 0 */
  void *group;                                     /* of the leader of several */
  bool divided;                                    /* one of several ranks ... */
  bool follows;                                    /* ... and not the leader */
  const pkv_model *model;
  const pkv_device_weights *weights;
  pkv_executor *executor;
  pkv_device_forward_options options;
  void *stream;
  pkv_cache *caches; /* [layers] */
  pkv_device_class classes[PKV_DEVICE_CLASSES];
  int64_t qkv_width, logit_stride;
  bool samples;  /* the device samples; else it finds the likeliest tokens only */
  bool prefills; /* the device has a kernel for chunks of prompts of this shape */

  void *memory; /* device: all buffers */
  size_t memory_bytes;
  void *host_inputs, *host_sampled; /* pinned; sampled: [2, max_logits], of two passes */
  void *ended[2];                   /* events; NULL: of several ranks */
  int32_t begun;                    /* passes whose tokens were not asked for yet: 0 to 2 */
  int32_t oldest;                   /* 0 or 1: which of the two that they use */
  int32_t last_rows;                /* of the last pass, where it can be gone on from; else 0 */
  int32_t last_graph;
  bool last_shared;
  bool broken; /* a pass broke off: something may be on the stream that nobody waited for */
  pkv_device_inputs host, device;
  void *device_inputs;
  size_t input_bytes;
  float *x; /* [max_tokens, width] the residual stream */
  /* [max_tokens, width] what is normed, or summed over the ranks, before it is added: of attention,
     of the feed-forward; or NULL. The same one but where ranks have to alternate. */
  float *delta[2];
  void *normed;          /* act [max_tokens, width] */
  void *qkv, *attended;  /* act [max_tokens, qkv_width], [max_tokens, query heads] */
  void *gate_up, *gated; /* act [max_tokens, 2 feed_forward], [max_tokens, feed_forward] */
  void *last;            /* act [max_logits, width] */
  float *logits;         /* [max_logits, logit_stride], the leader's, as what follows */
  int32_t *sampled;      /* [max_logits] */
  void *sample_scratch;

  pkv_device_graph graphs[PKV_DEVICE_BUCKETS];
  int32_t graph_count;
};

/* The attention of a pass's chunks in a layer. */
pkv_dense_prefill_params pkv_device_pass_chunks(const pkv_device_forward *f, int32_t layer,
                                                const pkv_device_pass *pass);
/* Puts plans, layers, head and sampling on the stream of each of the leader's ranks. */
pkv_status pkv_device_pass_run(pkv_device_forward *f, const pkv_device_pass *pass, pkv_error *err);
/* The rank's device becomes the thread's, where there are several. */
pkv_status pkv_device_rank_select(const pkv_device_forward *rank, pkv_error *err);
/* Parts of a pass, for measurements: the norm of the residual stream, and what lies between a
   layer's product for q, k and v and its attention. */
pkv_status pkv_device_pass_norm(pkv_device_forward *f, int32_t m, const float *weight,
                                pkv_error *err);
pkv_status pkv_device_pass_rotate(pkv_device_forward *f, int32_t layer, int32_t m, pkv_error *err);

#endif
