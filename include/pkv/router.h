/* SPDX-License-Identifier: Apache-2.0 */
/*
 * router.h - steps on a GPU by a policy: plans of every route that may be taken, made ready once
 * from limits; for each batch the policy chooses one, and FlashInfer's kernels are one of them.
 *
 *   pkv_router_create()      once
 *   pkv_router_plan()        once a step: choice and plan
 *   pkv_router_attention()   once a layer
 *
 * All of device.h holds here, but that a step's route follows from lengths on the host: a captured
 * step may be replayed with the lengths of its plan only, and flashinfer's plan is made before the
 * capture begins.
 */
#ifndef PKV_ROUTER_H
#define PKV_ROUTER_H

#include "pkv/device.h"
#include "pkv/flashinfer.h"
#include "pkv/profile.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pkv_router_options {
  uint32_t struct_size;
  pkv_policy policy;
  pkv_route fixed;            /* PKV_POLICY_FIXED */
  const pkv_profile *profile; /* copied, but its model is borrowed; NULL = the seed's device */
  /* bit (1 << route): what may be taken, bucket_exact .. balanced and flashinfer;
     0 = split, workqueue, balanced and flashinfer. `balanced` always may. */
  uint32_t routes;
  const pkv_flashinfer_api *flashinfer; /* NULL = that route is not here */
  /* FlashInfer's kernels where the policy does not say: PKV_ROUTE_FLASHINFER (tensor cores) or
     PKV_COST_FLASHINFER_CORES; 0 = tensor cores from 4 query heads a KV head on */
  int32_t flashinfer_kind;
} pkv_router_options;
#define PKV_ROUTER_OPTIONS_INIT                                                                    \
  { (uint32_t)sizeof(pkv_router_options), PKV_POLICY_FIXED, PKV_ROUTE_BALANCED, NULL, 0u, NULL, 0 }

/* Single-owner, one launch at a time. */
typedef struct pkv_router pkv_router;

PKV_API PKV_MUST_CHECK pkv_status pkv_router_create(pkv_router **out, pkv_executor *executor,
                                                    const pkv_shape *shape,
                                                    const pkv_router_options *options,
                                                    pkv_dtype kv_dtype, int32_t max_rows,
                                                    int32_t max_seq_len, pkv_error *err);
PKV_API void pkv_router_destroy(pkv_router *router); /* after its last launch has ended */
/* Why flashinfer is not among the routes: static text, or NULL where it is. */
PKV_API const char *pkv_router_no_flashinfer(const pkv_router *router);

/*
 * Chooses the route of a batch and makes its plan; *choice says which, and why. seq_len [rows] on
 * the host, and the same on the device. A batch with a row of length 0 is not flashinfer's: the
 * best other route takes it.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_router_plan(pkv_choice *choice, pkv_router *router,
                                                  int32_t rows, const int32_t *seq_len,
                                                  const int32_t *device_seq_len, void *stream,
                                                  pkv_error *err);
/* pkv_device_plan_set_overlap of the plan that is taken. */
PKV_API void pkv_router_set_overlap(pkv_router *router, int32_t overlap);
/*
 * As pkv_device_attention. flashinfer takes contiguous f16 q and out, no lse, sinks or soft cap,
 * and K and V of the same strides: else E_UNSUPPORTED names what does not fit. Its first launch
 * after a plan, and each with another table, is led by one that turns the block table into the list
 * of pages that its kernels read; page ids outside the cache count as 0.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_router_attention(pkv_router *router,
                                                       const pkv_attention_args *args, void *stream,
                                                       pkv_error *err);

#ifdef __cplusplus
}
#endif
#endif
