/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches that share prefixes, for tests: a tree of token runs is written down node by node, rows
 * hang on nodes, and block tables come out: a page belongs to the deepest node that holds its last
 * token. Rows on one node with no tokens of their own share their partly filled last page too.
 */
#ifndef PKV_TEST_TREE_BATCH_H
#define PKV_TEST_TREE_BATCH_H

#include "base/rng.h"
#include "pkv/pkv.h"

typedef struct tree_batch {
  int32_t rows, page_tokens;
  int32_t pages;     /* ids are 0 .. pages - 1 */
  int32_t max_pages; /* entries of a row; those past its pages are -1 or huge */
  int32_t *seq_len;  /* [rows] */
  int32_t *table;    /* [rows, max_pages] */
  /* while building */
  int32_t nodes, node_room, row_room;
  struct tree_batch_node *node;
  int32_t *leaf; /* [rows] */
} tree_batch;

void tree_batch_init(tree_batch *b, int32_t page_tokens);
/* A run of `tokens` tokens behind `parent` (-1: a root); returns its number. */
int32_t tree_batch_node(tree_batch *b, int32_t parent, int32_t tokens);
/* A row: all tokens up to the node's end (-1: none), then `tokens` of its own. */
void tree_batch_row(tree_batch *b, int32_t node, int32_t tokens);
/* Shuffles rows (unless seed is 0) and page ids, writes seq_len and table. */
void tree_batch_finish(tree_batch *b, uint64_t seed);
void tree_batch_deinit(tree_batch *b);

/* A random tree: up to `depth` levels, `fan_out` children, runs of up to `run` tokens, about `rows`
   rows with up to `tail` tokens of their own. Finished. */
void tree_batch_random(tree_batch *b, pkv_rng *rng, int32_t page_tokens, int32_t depth,
                       int32_t fan_out, int32_t run, int32_t rows, int32_t tail);

pkv_sharing tree_batch_sharing(const tree_batch *b);

#endif
