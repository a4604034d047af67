/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The batches that the cost model is fitted to, and those it is judged by. The two share neither
 * seeds nor numbers of rows.
 *   fit     5 mixes of lengths (equal, uniform, bimodal, one long row, zipf-like) x numbers of rows
 *           x tokens in all, drawn from seed 20260622; every 4th has prefixes that groups share
 *   judge   steps of the seed's five traces, 3 * B requests with B active, held-out seeds
 */
#ifndef PKV_CLI_POLICY_BATCHES_H
#define PKV_CLI_POLICY_BATCHES_H

#include "cli/bench_cells.h"
#include "pkv/trace.h"

#define POLICY_TRACES 5
#define POLICY_ROWS   7 /* 1, 2, 4, .. 64 */

extern const int32_t policy_rows[POLICY_ROWS];

/* Batch `index` of the fit, of at most most_tokens; free it with bench_cell_free, also after a
 * failure. *mix: its name, static. */
pkv_status policy_fit_batch(bench_cell *out, const char **mix, int32_t index, int64_t most_tokens,
                            int32_t page_tokens, pkv_error *err);

/* Step `step` of `steps` evenly spread over a trace; every length divided by `divide`. */
typedef struct policy_trace {
  pkv_trace_kind kind;
  int32_t active, page_tokens, divide;
  int32_t requests;   /* 0 = 3 * active */
  int32_t most_steps; /* only the first so many; 0 = all */
  uint64_t seed;
} policy_trace;

pkv_status policy_trace_batch(bench_cell *out, const policy_trace *trace, int32_t step,
                              int32_t steps, pkv_error *err);

#endif
