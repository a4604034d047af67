/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv bench attention --policy`: each batch by the route that a policy chooses, FlashInfer's
 * kernels included where they are here, beside the fastest route of the same run.
 */
#ifndef PKV_CLI_BENCH_CHOSEN_H
#define PKV_CLI_BENCH_CHOSEN_H

#include "cli/bench_attention.h"

/* frame->o->policy is not NULL. Prints a line for each batch and one for the reason. */
pkv_status bench_chosen_run(const bench_frame *frame, pkv_error *err);

#endif
