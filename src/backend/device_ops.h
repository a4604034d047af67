/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend with memory of its own offers; arguments arrive checked. Streams are its own
   type. */
#ifndef PKV_BACKEND_DEVICE_OPS_H
#define PKV_BACKEND_DEVICE_OPS_H

#include "backend/device_dense.h"
#include "backend/product_choices.h"
#include "plan/plan_tree.h"

/* Bounds of a plan's arrays, from limits. */
typedef struct pkv_device_limits {
  int32_t max_rows, max_seq_len;
  int64_t max_merges, max_slots;
  size_t plan_bytes;
} pkv_device_limits;

/* What plans of route shared have beside. */
typedef struct pkv_device_tree {
  pkv_plan_tree header; /* host copy, without what the rows decide */
  int64_t max_node_slots, max_private_slots, most_units;
  void *memory; /* device: where the planner works */
  size_t memory_bytes;
} pkv_device_tree;

struct pkv_device_plan {
  pkv_executor *executor;
  pkv_shape shape;
  pkv_plan_options options; /* parts resolved */
  pkv_dtype kv_dtype;
  pkv_device_limits limits;
  int32_t fused_merge;
  int32_t overlap;          /* 0, 1, 2: pkv_device_plan_set_overlap */
  int32_t tiles, tile_rows; /* of a segment's query rows, that a CTA takes together */
  int32_t stages;           /* of the kernel's copy ring */
  int32_t clears_slots;     /* slots are emptied by each build and upload */
  int32_t fresh;            /* no launch has used the plan yet */
  int32_t built;            /* header says for what */
  struct pkv_plan header;   /* host copy; of a device-made plan without what the lengths decide */
  pkv_plan_launch *launch;  /* host copy of an uploaded plan's launches */
  int32_t launch_room;
  void *plan;         /* device: the plan's bytes */
  uint32_t *counters; /* device: [tiles of query rows, max_merges] */
  int64_t counter_count;
  int32_t *fault; /* device */
  float *slots;   /* device */
  size_t counter_bytes, slot_bytes;
  pkv_device_tree tree;
  struct pkv_device_plan *line; /* shared: the `balanced` plan of the same rows, or NULL */
  /* device: what a build sets to 0 besides, another plan's, a multiple of 8 bytes; or NULL */
  void *zeros;
  int64_t zero_bytes;
};

/* The inputs of decoding rows become those of their next step: the token that was chosen, one
   position on, its slot by the block table. */
typedef struct pkv_device_advance {
  int32_t rows;
  const int32_t *chosen;              /* [rows] */
  int32_t *ids, *positions, *seq_len; /* [rows] */
  int64_t *slots;                     /* [rows] */
  pkv_dense_sample_row *sample_rows;  /* [rows] */
  const int32_t *table;               /* [rows, table_stride], the next token's pages included */
  int64_t table_stride;
  int32_t page_tokens;
} pkv_device_advance;

typedef struct pkv_device_ops {
  pkv_status (*alloc)(void **out, pkv_executor *executor, size_t bytes, pkv_error *err);
  void (*free)(pkv_executor *executor, void *ptr);
  pkv_status (*copy)(pkv_executor *executor, void *to, const void *from, size_t bytes, void *stream,
                     pkv_error *err);
  pkv_status (*synchronize)(pkv_executor *executor, void *stream, pkv_error *err);
  /* query_rows: of a KV head, q_len times the group. */
  pkv_status (*parts)(int32_t *parts, pkv_executor *executor, pkv_dtype kv_dtype, int32_t head_dim,
                      int32_t query_rows, pkv_error *err);
  /* Sets the plan's tiles, tile_rows, stages, clears_slots; bytes of one slot. */
  pkv_status (*sizes)(int64_t *slot_bytes, struct pkv_device_plan *plan, pkv_error *err);
  /* Lengths are cut to 0 .. max_seq_len. */
  pkv_status (*build)(struct pkv_device_plan *plan, int32_t max_seq_len, const int32_t *seq_len,
                      void *stream, pkv_error *err);
  /* The workspace as a launch expects it. */
  pkv_status (*reset)(struct pkv_device_plan *plan, void *stream, pkv_error *err);
  pkv_status (*attention)(struct pkv_device_plan *plan, const pkv_attention_params *p, void *stream,
                          pkv_error *err);
  pkv_status (*append)(pkv_executor *executor, const pkv_append_params *p, void *stream,
                       pkv_error *err);
  /* Parts that fill the device with route shared. */
  pkv_status (*tree_parts)(int32_t *parts, pkv_executor *executor, pkv_error *err);
  /* shared: from the block table in `sharing` (the device's; stride resolved). */
  pkv_status (*build_tree)(struct pkv_device_plan *plan, const int32_t *seq_len,
                           const pkv_sharing *sharing, void *stream, pkv_error *err);
  /* `rows` rows of `bytes` bytes, so many bytes apart on either side. The host's memory is pinned:
     the call does not wait. */
  pkv_status (*copy_rows)(pkv_executor *executor, void *to, size_t to_stride, const void *from,
                          size_t from_stride, size_t bytes, int32_t rows, void *stream,
                          pkv_error *err);
  pkv_status (*advance)(pkv_executor *executor, const pkv_device_advance *p, void *stream,
                        pkv_error *err);
  /* What was on the stream when an event was recorded last has ended when event_wait returns. */
  pkv_status (*event_create)(void **event, pkv_executor *executor, pkv_error *err);
  void (*event_destroy)(pkv_executor *executor, void *event);
  pkv_status (*event_record)(pkv_executor *executor, void *event, void *stream, pkv_error *err);
  pkv_status (*event_wait)(pkv_executor *executor, void *event, pkv_error *err);
  /* Of prepared products (device_dense.h): who measures, what is known already from elsewhere, and
     what is known now; *timed: how many of these this process measured. NULL: nothing is. */
  void (*products_maker)(char maker[PKV_PRODUCT_MAKER], pkv_executor *executor);
  void (*products_take)(pkv_executor *executor, const pkv_product_choice *choices, int32_t count);
  int32_t (*products_list)(pkv_product_choice out[PKV_PRODUCT_CHOICES], int32_t *timed,
                           pkv_executor *executor);
} pkv_device_ops;

/* The CUDA backend, where it is built in: on the device of this index; -1 = the thread's own. */
pkv_status pkv_cuda_executor_init(pkv_executor *executor, int32_t index, pkv_error *err);
void pkv_cuda_executor_deinit(pkv_executor *executor);

#endif
