/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of a cell of `pkv bench attention`, as words:
 *   4096, 4096x3              one row of so many tokens, or three
 *   8x32x2048+128             8 groups of 32 rows: 2048 tokens that the rows of a group share, then
 *                             128 of their own
 *   1024/8x32x2048+128        before these, 1024 tokens that all of them share
 */
#ifndef PKV_CLI_BENCH_ROWS_H
#define PKV_CLI_BENCH_ROWS_H

#include "base/status.h"

#define BENCH_MAX_ROWS   4096
#define BENCH_MAX_LENGTH (1 << 24)

/* A row's first `root_tokens` are those of row `root_row`; up to `group_tokens`, those of
   `group_row`. Either may be the row itself. Only whole pages are shared. */
typedef struct bench_row {
  int32_t length;
  int32_t root_row, root_tokens;
  int32_t group_row, group_tokens;
} bench_row;

/* Adds what the word says to rows[*count ..] of BENCH_MAX_ROWS. E_INVALID: not such a word;
   E_LIMIT: too many rows. */
pkv_status bench_rows_word(bench_row *rows, int32_t *count, const char *word, pkv_error *err);

#endif
