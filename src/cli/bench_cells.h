/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cells of `pkv bench attention`: named lists of batches. A batch is what decodes together in
 * one step: lengths, and where each row's pages lie among the batch's own, scattered as in its
 * trace. Rows that share tokens have the same pages there.
 */
#ifndef PKV_CLI_BENCH_CELLS_H
#define PKV_CLI_BENCH_CELLS_H

#include <stdbool.h>

#include "cli/bench_cell_files.h"
#include "cli/bench_rows.h"

typedef struct bench_batch {
  int32_t rows, max_pages;
  int64_t pages;     /* of all rows, those that rows share once */
  int64_t tokens;    /* sum of lengths */
  int32_t *lengths;  /* [rows] */
  int32_t *borrowed; /* [rows]: leading pages that are other rows', too */
  int32_t *ids;      /* [rows, max_pages]: 0 .. pages-1 in any order, then -1 */
} bench_batch;

typedef struct bench_cell {
  char name[BENCH_NAME_BYTES];
  char peers[BENCH_PEER_BYTES]; /* what others were measured at, in another run; or "" */
  int32_t count, capacity;
  bench_batch *batches; /* [count] of [capacity] */
} bench_cell;

typedef struct bench_cell_options {
  int32_t page_tokens;
  int32_t steps;  /* of a trace: this many, evenly spread over the seed's 48 or 64 */
  int32_t active; /* rows of a trace from a file, and of Mooncake's requests together */
  uint64_t seed;
  int32_t rows_permuted;       /* the rows of each batch in another order, by the seed */
  const bench_cell_list *list; /* cells from files; NULL = none */
  const char *lengths;         /* custom cell: words of bench_rows.h, with commas; NULL = none */
  const char *trace_file;      /* CSV or JSON; NULL = none */
  const char *mooncake;        /* JSON lines with hash_ids; NULL = none */
  const char *only;            /* of all these the ones named, separated by commas; NULL = all */
  /* of the built-in cells, separated by commas; NULL = the usual ones where nothing else is asked
     for */
  const char *names;
} bench_cell_options;

/* Every built-in cell, for the help text. */
#define BENCH_CELL_NAMES                                                                           \
  "1row_1k, 1row_4k, 1row_16k, 1row_64k, 16rows_mixed, b1_bucketed, b4_bimodal, b8_bimodal, "      \
  "b8_uniform, b8_zipf, b8_bucketed, b8_homogeneous, shared_64x8k, shared_8x32x2k, shared_tree"

/* How many cells the options ask for; an error names the word that is no cell or no length. */
pkv_status bench_cell_count(int32_t *count, const bench_cell_options *options, pkv_error *err);
/* Cell `index`, 0 .. count-1. Free it with bench_cell_free, also after a failure. */
pkv_status bench_cell_make(bench_cell *out, const bench_cell_options *options, int32_t index,
                           pkv_error *err);
/* A cell of one batch without a name; its pages are a random permutation by options->seed. *out is
   zeroed. */
pkv_status bench_cell_rows(bench_cell *out, const bench_cell_options *options,
                           const bench_row *rows, int32_t count, pkv_error *err);
/* Lengths, borrowed and ids of a zeroed batch: zeros, and -1. Freed with its cell. */
pkv_status bench_batch_alloc(bench_batch *b, int32_t rows, int32_t longest, int32_t page_tokens,
                             pkv_error *err);
/* Pages numbered in a random order; the rows, too, where that is asked for. */
pkv_status bench_batch_scatter(bench_batch *b, const bench_cell_options *o, pkv_error *err);
void bench_cell_free(bench_cell *cell);
bool bench_cell_shares(const bench_cell *cell);
/* Pages of its largest batch. */
int64_t bench_cell_pages(const bench_cell *cell);

#endif
