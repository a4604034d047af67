/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of shared plans: block tables and scheduler's trees of any kind. Promises: what is
 * refused says why; what is built fits what pkv_plan_size promised, passes pkv_plan_check, has
 * counters that add up, and is the same again; with some bytes changed pkv_plan_check may say what
 * it likes, and what it accepts can be walked.
 *
 *   int32 query_heads, kv_heads, page_tokens, q_len, window
 *   int32 flags, parts, chunk_tokens, tile, segment, node_tile, node_row, node_segment, state costs
 *   int32 mode (1 told, 2 chained, 4 with tables, 8 with an order), damage, rows, pages, nodes
 *   int32 per row: length, order; int32 page ids [rows, pages], small; nodes: 4 int32 each
 */
#include "plan/plan_tree.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

#define WORDS   19
#define LARGEST ((size_t)1 << 22)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct input {
  const uint8_t *data;
  size_t left;
} input;

static int32_t next_word(input *in) {
  int32_t word = 0;
  const size_t n = in->left < 4 ? in->left : 4;
  memcpy(&word, in->data, n);
  in->data += n;
  in->left -= n;
  return word;
}

/* All pieces and folds: what executors do, without keys. Reads every table that they read. */
static void walk(const pkv_plan *plan) {
  const pkv_tree_view v = pkv_tree_view_of(plan);
  int64_t sum = 0;
  for (int32_t p = 0; p < plan->parts; p++) {
    pkv_node_cursor node_at = v.node_cursors[p];
    pkv_node_piece node;
    while (pkv_tree_next_node_piece(&node, &v, &node_at, &v.node_cursors[p + 1]))
      sum += node.slot + v.ranks[node.first_rank + node.ranks - 1].row;
    for (int32_t half = 2 * p; half < 2 * p + 2; half++) {
      pkv_private_cursor at = v.private_cursors[half];
      pkv_private_piece piece;
      while (pkv_tree_next_private_piece(&piece, &v, &at, &v.private_cursors[half + 1]))
        sum += piece.slot + v.row_rank[piece.row];
    }
  }
  for (int32_t rank = 0; rank < plan->rows; rank++) {
    for (int32_t head = 0; head < plan->kv_heads; head++) {
      if (pkv_tree_stored(&v, rank, head)) continue;
      for (int32_t i = 0; i < v.ranks[rank].depth; i++) {
        const pkv_tree_states s = pkv_tree_node_states(&v, v.ranks[rank].path[i], rank, head);
        REQUIRE(s.count >= 1 && s.first >= 0 && s.stride >= 1);
        REQUIRE(s.first + (int64_t)(s.count - 1) * s.stride < v.tree->node_slots);
      }
      const pkv_tree_states s = pkv_tree_private_states(&v, rank, head);
      REQUIRE(s.count >= 0 && (s.count == 0 || s.first + s.count <= v.tree->private_slots));
    }
  }
  REQUIRE(sum != INT64_MIN);
}

static void damage(pkv_plan *plan, uint32_t seed) {
  const size_t words = (size_t)plan->plan_bytes / 4;
  const size_t at = (seed >> 8) % words * 4;
  static const uint32_t values[] = {0, 1, 0x7fffffffu, 0x80000000u, 0xffffffffu};
  uint32_t word;
  memcpy(&word, (unsigned char *)plan + at, 4);
  word = (seed & 8u) ? word + (seed & 7u) - 3 : values[(seed & 7u) % 5];
  const size_t bytes = words * 4;
  memcpy((unsigned char *)plan + at, &word, 4);
  pkv_error err;
  if (pkv_plan_check(plan, bytes, &err) != PKV_OK)
    REQUIRE(err.text[0] != '\0');
  else if (plan->route == PKV_ROUTE_SHARED)
    walk(plan);
}

typedef struct batch {
  pkv_shape shape;
  pkv_plan_options options;
  pkv_sharing sharing;
  int32_t rows;
  int32_t *lengths;
  uint32_t seed;
} batch;

static void build(const batch *b, size_t bytes, size_t workspace) {
  pkv_error err = {PKV_OK, NULL, {0}};
  const pkv_plan *plan = NULL, *again = NULL;
  unsigned char *memory = aligned_alloc(64, bytes), *twin = aligned_alloc(64, bytes);
  REQUIRE(memory != NULL && twin != NULL);
  memset(memory, 0x5a, bytes);
  memset(twin, 0xa5, bytes);
  const pkv_status status = pkv_plan_build_shared(&plan, memory, bytes, &b->shape, &b->options,
                                                  b->rows, b->lengths, &b->sharing, &err);
  if (status != PKV_OK) {
    REQUIRE((status == PKV_E_RANGE || status == PKV_E_INVALID) && plan == NULL);
    REQUIRE(err.text[0] != '\0');
  } else {
    REQUIRE((const void *)plan == memory && (size_t)plan->plan_bytes <= bytes);
    REQUIRE((size_t)plan->workspace_bytes <= workspace);
    REQUIRE(pkv_plan_check(plan, bytes, &err) == PKV_OK);
    REQUIRE(pkv_plan_build_shared(&again, twin, (size_t)plan->plan_bytes, &b->shape, &b->options,
                                  b->rows, b->lengths, &b->sharing, &err) == PKV_OK);
    REQUIRE(memcmp(memory, twin, (size_t)plan->plan_bytes) == 0);
    walk(plan);
    pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
    REQUIRE(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F32, &err) == PKV_OK);
    REQUIRE(stats.padded_kv_bytes >= 0 && stats.unique_kv_bytes <= stats.total_kv_bytes);
    REQUIRE(stats.max_part_cost <= stats.total_cost && stats.nodes >= 0);
    damage((pkv_plan *)(void *)memory, b->seed);
  }
  free(memory);
  free(twin);
}

/* Tables, nodes and order from the rest of the input, in memory of exactly their size. */
static void run(batch *b, input *in, int32_t mode, int32_t pages, int32_t node_count) {
  pkv_error err = {PKV_OK, NULL, {0}};
  size_t bytes, workspace;
  const size_t rows = (size_t)b->rows;
  int32_t longest = 0;
  int32_t *order = malloc((rows + !rows) * 4), *table = malloc((rows + !rows) * (size_t)pages * 4);
  pkv_prefix_node *nodes = malloc(((size_t)node_count + !node_count) * sizeof *nodes);
  b->lengths = malloc((rows + !rows) * 4);
  REQUIRE(order != NULL && table != NULL && nodes != NULL && b->lengths != NULL);
  for (int32_t row = 0; row < b->rows; row++) {
    const int32_t length = next_word(in);
    b->lengths[row] = row % 8 == 7 ? length : (int32_t)((uint32_t)length % 5000u);
    order[row] = next_word(in);
    if (order[row] % 2 == 0) order[row] = row;
    if (b->lengths[row] > longest) longest = b->lengths[row];
  }
  for (size_t i = 0; i < rows * (size_t)pages; i++)
    table[i] = i >= (size_t)pages && in->left > 0 && *in->data % 4 ? table[i - (size_t)pages]
                                                                   : next_word(in) % 4;
  for (int32_t i = 0; i < node_count; i++)
    nodes[i] = (pkv_prefix_node){next_word(in), next_word(in), next_word(in), next_word(in)};
  b->sharing = (pkv_sharing)PKV_SHARING_INIT;
  b->sharing.flags = mode & 2 ? PKV_TABLE_CHAINED : 0;
  b->sharing.max_pages = pages;
  if ((mode & 1) == 0 || mode & 4) b->sharing.block_table = table;
  if (mode & 1) {
    b->sharing.nodes = nodes;
    b->sharing.node_count = node_count;
    if (mode & 8) b->sharing.order = order;
  }
  if (pkv_plan_size(&bytes, &workspace, &b->shape, &b->options, b->rows, longest, &err) != PKV_OK)
    REQUIRE(err.text[0] != '\0' && bytes == 0 && workspace == 0);
  else if (bytes <= LARGEST)
    build(b, bytes, workspace);
  free(order);
  free(table);
  free(nodes);
  free(b->lengths);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  input in = {data, size};
  int32_t w[WORDS];
  for (int i = 0; i < WORDS; i++)
    w[i] = next_word(&in);
  batch b = {.rows = (int32_t)((uint32_t)w[16] % 65u), .seed = (uint32_t)w[15]};
  b.shape = (pkv_shape){sizeof b.shape, w[0], w[1], 64, w[2], w[3], w[4]};
  b.options = (pkv_plan_options)PKV_PLAN_OPTIONS_INIT;
  b.options.route = PKV_ROUTE_SHARED;
  b.options.flags = (uint32_t)w[5];
  b.options.parts = w[6];
  b.options.chunk_tokens = w[7];
  b.options.tile_cost = (uint32_t)w[8];
  b.options.segment_cost = (uint32_t)w[9];
  b.options.node_tile_cost = (uint32_t)w[10];
  b.options.node_row_cost = (uint32_t)w[11];
  b.options.node_segment_cost = (uint32_t)w[12];
  b.options.state_cost = (uint32_t)w[13];
  run(&b, &in, w[14], 1 + (int32_t)((uint32_t)w[17] % 512u), (int32_t)((uint32_t)w[18] % 33u));
  return 0;
}
