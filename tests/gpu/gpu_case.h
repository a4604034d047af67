/* SPDX-License-Identifier: Apache-2.0 */
/* An attention problem of attn_case.h on the device. */
#ifndef PKV_TEST_GPU_CASE_H
#define PKV_TEST_GPU_CASE_H

#include "pkv/device.h"
#include "support/attn_case.h"

/* Device copies of everything a run touches; args points to them. */
typedef struct gpu_case {
  attn_case *host;
  pkv_executor *executor;
  pkv_attention_args args;
  pkv_cache cache;
  void *storage, *table, *q, *out, *lse, *sinks, *k_scale, *v_scale, *seq_len;
} gpu_case;

/* The device's executor, or NULL without a device (the reason is printed once). */
pkv_executor *gpu_executor(void);

/* The answer must be there already: c's storage may be changed afterwards. */
void gpu_case_init(gpu_case *g, attn_case *c, pkv_executor *executor);
void gpu_case_deinit(gpu_case *g);
/* A plan for the case: balanced on the device, other routes uploaded. */
pkv_device_plan *gpu_plan(gpu_case *g, const pkv_plan_options *options);
/* Marks the outputs, runs, fetches out and lse into the host's case. */
void gpu_run(gpu_case *g, pkv_device_plan *plan);

#endif
