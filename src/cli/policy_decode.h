/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole traces of the seed decoded on a GPU by a policy: each step from the first to the last,
 * chosen, planned, run through all layers and waited for. That is how FlashInfer's planning, our
 * choices and launches count as they do in an engine; what is around attention does not count.
 */
#ifndef PKV_CLI_POLICY_DECODE_H
#define PKV_CLI_POLICY_DECODE_H

#include "cli/policy_batches.h"
#include "cli/route_times.h"
#include "pkv/router.h"

#define POLICY_DECODE_MOST 16 /* contenders */

/* Of one contender over one trace. */
typedef struct policy_decoded {
  int64_t tokens;
  int32_t steps;
  double us;    /* of all steps by the host's clock: choice, plan, all layers, the wait */
  double error; /* of the first step's layer 0 against double arithmetic */
} policy_decoded;

/*
 * All contenders over one trace, out [count]: step by step in turn, so that the device's moods hit
 * all alike. options [count]: flashinfer is set from what `t` loaded. E_UNSUPPORTED on the CPU,
 * E_LIMIT: the trace does not fit; E_INTERNAL: an output is wrong.
 */
pkv_status policy_decode(policy_decoded *out, route_times *t, const policy_trace *trace,
                         const pkv_router_options *options, int32_t count, int32_t layers,
                         pkv_error *err);

#endif
