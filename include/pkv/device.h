/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.h - libpkv on a GPU: plans that the device makes for itself, attention and append on a
 * stream.
 *
 * What differs from pkv.h: pointers to tensors, tables, lengths and slots are the device's;
 * calls put work on a stream and return at once; nothing synchronises, nothing allocates after
 * creation, and no launch depends on lengths. So a step can be captured in a CUDA graph with any
 * lengths and replayed with any other within the limits: rebuild the plan inside the graph, from
 * lengths on the device. `stream` is a cudaStream_t; NULL is the default stream.
 *
 * What the host cannot see it cannot check: lengths below 0 count as 0, lengths beyond
 * max_seq_len and page ids outside the cache are not read; pkv_device_plan_fault tells
 * afterwards.
 */
#ifndef PKV_DEVICE_H
#define PKV_DEVICE_H

#include "pkv/pkv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Memory of the executor's device. Zeroed. E_NOMEM names the bytes and what is free. */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_alloc(void **out, pkv_executor *executor, size_t bytes,
                                                   pkv_error *err);
PKV_API void pkv_device_free(pkv_executor *executor, void *ptr); /* NULL is allowed */
/* Either side may be host memory; in order with the stream. Waits when host memory is pageable. */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_copy(pkv_executor *executor, void *to,
                                                  const void *from, size_t bytes, void *stream,
                                                  pkv_error *err);
PKV_API PKV_MUST_CHECK pkv_status pkv_device_synchronize(pkv_executor *executor, void *stream,
                                                         pkv_error *err);
/* Parts that fill the device with `balanced` for this cache type and shape. */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_parts(int32_t *parts, pkv_executor *executor,
                                                   const pkv_shape *shape, pkv_dtype kv_dtype,
                                                   pkv_error *err);

/*
 * A plan and its workspace in device memory, sized once from limits. Single-owner; one launch at a
 * time: two streams need two. options->parts 0 = as many as fill the device, of which `balanced`
 * may leave some empty (PKV_PLAN_FEWER_PARTS); tile_cost and segment_cost 0 = 8 and 16.
 */
typedef struct pkv_device_plan pkv_device_plan;

PKV_API PKV_MUST_CHECK pkv_status pkv_device_plan_create(pkv_device_plan **out,
                                                         pkv_executor *executor,
                                                         const pkv_shape *shape,
                                                         const pkv_plan_options *options,
                                                         pkv_dtype kv_dtype, int32_t max_rows,
                                                         int32_t max_seq_len, pkv_error *err);
/* After the last launch that uses it has ended. */
PKV_API void pkv_device_plan_destroy(pkv_device_plan *plan);
/*
 * Plans `rows` rows on the device: one kernel that reads seq_len [rows] (device) and writes the
 * bytes that pkv_plan_build would with so many parts. `balanced` only. Rows that are not live have
 * length 0.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_plan_build(pkv_device_plan *plan, int32_t rows,
                                                        const int32_t *seq_len, void *stream,
                                                        pkv_error *err);
/*
 * The same for route shared, from a block table on the device: the bytes that pkv_plan_build_shared
 * makes of it. Three kernels, no launch depends on lengths or tables. sharing: without nodes and
 * order; rows beyond max_pages share what the table holds of them.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_plan_build_shared(pkv_device_plan *plan, int32_t rows,
                                                               const int32_t *seq_len,
                                                               const pkv_sharing *sharing,
                                                               void *stream, pkv_error *err);
/* Takes a plan made by pkv_plan_build, of any route; `plan` must stay until the copy is done. */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_plan_upload(pkv_device_plan *out, const pkv_plan *plan,
                                                         void *stream, pkv_error *err);
/* Copies the plan's bytes to host memory, waits; *bytes is what it needs (E_TOO_SMALL beyond
   capacity). */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_plan_download(void *memory, size_t capacity,
                                                           size_t *bytes, pkv_device_plan *plan,
                                                           void *stream, pkv_error *err);
/* Waits; *row is the last row whose table held a page id outside the cache, or whose partial states
   never came, in a run since the plan was built; -1 = none. */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_plan_fault(int32_t *row, pkv_device_plan *plan,
                                                        void *stream, pkv_error *err);
/*
 * 1: a `balanced` launch may begin while the kernel ahead of it in the stream is still ending, and
 * reads plan and block table by then (1 to 2 us a layer less on sm_90). For layers of one step: the
 * kernel ahead must not be the one that writes the block table. 2: it reads all tokens but each
 * row's last q_len by then, too (mostly another 0.5 to 2 us): the kernel ahead must write none of
 * these.
 * The first launch after a build or an upload always waits. 0 (default): every launch waits.
 */
PKV_API void pkv_device_plan_set_overlap(pkv_device_plan *plan, int32_t overlap);
/* The seed's routes: 1 = the last task of a segment merges, without a second launch. */
PKV_API void pkv_device_plan_set_fused(pkv_device_plan *plan, int32_t fused);

/*
 * As pkv_attention_run; args->plan must be NULL and args->workspace is not used. f32 caches:
 * E_UNSUPPORTED. Route shared: f16 or bf16 caches with head_dim 64 or 128 and q of their type, or
 * fp8_e4m3 ones with 128 and q of f16 or bf16; addresses and strides at multiples of 16 bytes,
 * pages of 16 tokens or more (a power of two), no batch invariance; else E_UNSUPPORTED, and the
 * text says which. Made for sm_90a; elsewhere nodes are multiplied by m16n8k16, unmeasured.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_attention(pkv_executor *executor,
                                                       pkv_device_plan *plan,
                                                       const pkv_attention_args *args, void *stream,
                                                       pkv_error *err);
/* As pkv_append; slots outside the cache are skipped; of a slot given twice either token stays. */
PKV_API PKV_MUST_CHECK pkv_status pkv_device_append(pkv_executor *executor,
                                                    const pkv_append_args *args, void *stream,
                                                    pkv_error *err);

#ifdef __cplusplus
}
#endif
#endif
