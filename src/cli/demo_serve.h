/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The demo's comparison: the server itself, HTTP and all, on a thread of this process, asked all
 * questions at once, once in each order of admission.
 */
#ifndef PKV_CLI_DEMO_SERVE_H
#define PKV_CLI_DEMO_SERVE_H

#include "cli/bench_serve.h"
#include "cli/demo_requests.h"

typedef struct pkv_demo_load {
  const pkv_demo_request *requests; /* [count], asked in this order */
  int32_t count, tokens;            /* tokens: of each answer, whatever the model would end */
  double slo_ttft, slo_tpot;        /* seconds; what counts as good */
  void (*progress)(void *user, double share, double seconds);
  void *user;
} pkv_demo_load;

/* engine: sizes; order and policy are the schedule's. E_STATE: interrupted. */
pkv_status pkv_demo_serve(bench_outcome *out, pkv_model *model, const pkv_engine_options *engine,
                          const bench_schedule *schedule, const pkv_demo_load *load,
                          pkv_error *err);

#endif
