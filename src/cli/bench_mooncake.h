/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mooncake's requests as batches: a request names its blocks of 512 tokens, and those with equal
 * names are one block of the cache. Rows are requests that arrived one after another, half of
 * their output behind them; partly filled blocks and output are a row's own.
 */
#ifndef PKV_CLI_BENCH_MOONCAKE_H
#define PKV_CLI_BENCH_MOONCAKE_H

#include "cli/bench_cells.h"

/* options->steps batches of options->active requests each, evenly spread over the file. E_INVALID:
   pages do not fill a block. *out is zeroed but for its name. */
pkv_status bench_mooncake_cell(bench_cell *out, const bench_cell_options *options, pkv_error *err);

#endif
