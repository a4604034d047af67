/* SPDX-License-Identifier: Apache-2.0 */
#include "support/tree_batch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct tree_batch_node {
  int32_t parent, start, end;    /* tokens from the rows' start */
  int32_t first_page, last_page; /* ids of its pages; of the page that its end leaves unfilled */
} node;

static void *grow(void *p, int32_t *room, int32_t used, size_t size) {
  if (used < *room) return p;
  *room = *room ? 2 * *room : 64;
  p = realloc(p, (size_t)*room * size);
  assert_non_null(p);
  return p;
}

void tree_batch_init(tree_batch *b, int32_t page_tokens) {
  memset(b, 0, sizeof *b);
  b->page_tokens = page_tokens;
}

int32_t tree_batch_node(tree_batch *b, int32_t parent, int32_t tokens) {
  b->node = grow(b->node, &b->node_room, b->nodes, sizeof(node));
  const int32_t start = parent >= 0 ? b->node[parent].end : 0;
  b->node[b->nodes] = (node){parent, start, start + tokens, 0, 0};
  return b->nodes++;
}

void tree_batch_row(tree_batch *b, int32_t at, int32_t tokens) {
  b->leaf = grow(b->leaf, &b->row_room, b->rows, sizeof(int32_t));
  if (tokens > 0) at = tree_batch_node(b, at, tokens);
  b->leaf[b->rows++] = at;
}

static void shuffle(int32_t *x, int32_t count, pkv_rng *rng) {
  for (int32_t i = count - 1; i > 0; i--) {
    const int32_t j = (int32_t)pkv_rng_below(rng, (uint64_t)i + 1), swap = x[i];
    x[i] = x[j];
    x[j] = swap;
  }
}

void tree_batch_finish(tree_batch *b, uint64_t seed) {
  const int32_t p = b->page_tokens;
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  if (seed) shuffle(b->leaf, b->rows, &rng);
  b->seq_len = calloc((size_t)b->rows + 1, sizeof(int32_t));
  b->max_pages = 2;
  for (int32_t id = 0; id < b->nodes; id++) {
    node *n = &b->node[id];
    n->first_page = b->pages;
    b->pages += n->end / p - n->start / p;
    n->last_page = b->pages++;
  }
  for (int32_t row = 0; row < b->rows; row++) {
    b->seq_len[row] = b->leaf[row] >= 0 ? b->node[b->leaf[row]].end : 0;
    if (b->seq_len[row] / p + 3 > b->max_pages) b->max_pages = b->seq_len[row] / p + 3;
  }
  int32_t *order = malloc(((size_t)b->pages + 1) * sizeof(int32_t));
  for (int32_t i = 0; i < b->pages; i++)
    order[i] = i;
  shuffle(order, b->pages, &rng);
  b->table = malloc(((size_t)b->rows * (size_t)b->max_pages + 1) * sizeof(int32_t));
  for (int32_t row = 0; row < b->rows; row++) {
    int32_t *ids = b->table + (int64_t)row * b->max_pages;
    for (int32_t i = 0; i < b->max_pages; i++)
      ids[i] = i % 2 ? -1 : INT32_MAX - i;
    int32_t at = b->leaf[row];
    if (at >= 0 && b->node[at].end % p) ids[b->node[at].end / p] = order[b->node[at].last_page];
    for (; at >= 0; at = b->node[at].parent)
      for (int32_t i = b->node[at].start / p; i < b->node[at].end / p; i++)
        ids[i] = order[b->node[at].first_page + i - b->node[at].start / p];
  }
  free(order);
}

void tree_batch_deinit(tree_batch *b) {
  free(b->seq_len);
  free(b->table);
  free(b->node);
  free(b->leaf);
  memset(b, 0, sizeof *b);
}

static void random_below(tree_batch *b, pkv_rng *rng, int32_t at, int32_t depth, int32_t fan_out,
                         int32_t run, int32_t rows, int32_t tail) {
  const int32_t children = (int32_t)pkv_rng_range(rng, 1, fan_out) + (depth > 0);
  for (int32_t i = 0; i < children && b->rows < rows; i++) {
    const uint64_t kind = pkv_rng_below(rng, 8);
    if (depth > 0 && kind < 5) {
      const int32_t tokens = (int32_t)pkv_rng_range(rng, 1, run >> pkv_rng_below(rng, 4) | 1);
      random_below(b, rng, tree_batch_node(b, at, tokens), depth - 1, fan_out, run, rows, tail);
    } else if (kind < 7) {
      tree_batch_row(b, at, (int32_t)pkv_rng_range(rng, 0, tail));
    } else {
      tree_batch_row(b, at, 0); /* often several of them: identical rows */
    }
  }
}

void tree_batch_random(tree_batch *b, pkv_rng *rng, int32_t page_tokens, int32_t depth,
                       int32_t fan_out, int32_t run, int32_t rows, int32_t tail) {
  tree_batch_init(b, page_tokens);
  for (int i = 0; i < 200 && b->rows < rows; i++)
    random_below(b, rng, -1, depth, fan_out, run, rows, tail);
  tree_batch_finish(b, pkv_rng_next(rng) | 1);
}

pkv_sharing tree_batch_sharing(const tree_batch *b) {
  pkv_sharing s = PKV_SHARING_INIT;
  s.block_table = b->table;
  s.block_table_stride = b->max_pages;
  s.max_pages = b->max_pages;
  return s;
}
