/* SPDX-License-Identifier: Apache-2.0 */
/* The figures of `pkv bench model` in the tables of llama-bench and llama-batched-bench, for those
 * who read or parse them. */
#ifndef PKV_CLI_BENCH_LLAMA_TABLES_H
#define PKV_CLI_BENCH_LLAMA_TABLES_H

#include "cli/bench_figures.h"

/* llama-bench's: a head before the first row, then a row a cell: mean and standard deviation. */
void bench_llama_head(void);
void bench_llama_row(const bench_model_run *run, const char *backend, const pkv_model_info *info,
                     const bench_figure *figure);

/* llama-batched-bench's: `figures` are the prompts' and the answers' speed of a crowd. */
void bench_llama_batched_head(void);
void bench_llama_batched_row(const bench_crowd *crowd, const bench_figure figures[2]);

#endif
