/* SPDX-License-Identifier: Apache-2.0 */
/* Shared plans: the tree is the one of the definition, nothing is read twice or not at all, sizes
   hold, and trees from schedulers are refused when they are none. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/plan_walk.h"
#include "support/tree_walk.h"

static pkv_shape shape_of(int32_t heads, int32_t kv_heads, int32_t page_tokens) {
  pkv_shape s = PKV_SHAPE_INIT;
  s.query_heads = heads;
  s.kv_heads = kv_heads;
  s.head_dim = 64;
  s.page_tokens = page_tokens;
  return s;
}

static pkv_plan_options options_of(int32_t parts, uint32_t flags) {
  pkv_plan_options o = PKV_PLAN_OPTIONS_INIT;
  o.route = PKV_ROUTE_SHARED;
  o.parts = parts;
  o.flags = flags;
  o.chunk_tokens = flags & PKV_PLAN_BATCH_INVARIANT ? 128 : 0;
  return o;
}

static pkv_plan_stats stats_of(const pkv_plan *plan) {
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  assert_int_equal(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F16, NULL), PKV_OK);
  return stats;
}

static void test_random_trees(void **state) {
  (void)state;
  static const int32_t pages[] = {1, 3, 16, 16, 48, 64, 100, 128, 1024};
  static const int32_t groups[] = {1, 2, 3, 4, 8, 32};
  static const int32_t windows[] = {0, 0, 0, 1, 64, 200, 1000};
  int64_t nodes = 0, levels = 0, windows_used = 0;
  for (uint64_t seed = 1; seed <= 2500; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, seed);
    const int32_t page = pages[pkv_rng_below(&rng, 9)], heads = (int32_t)pkv_rng_range(&rng, 1, 4);
    const int32_t run = 1 << pkv_rng_range(&rng, 4, page == 1 ? 9 : 12);
    tree_batch b;
    tree_batch_random(&b, &rng, page, (int32_t)pkv_rng_range(&rng, 1, 9),
                      (int32_t)pkv_rng_range(&rng, 1, 2 << pkv_rng_below(&rng, 6)), run,
                      (int32_t)pkv_rng_range(&rng, 1, seed % 20 ? 60 : 200), run / 2);
    pkv_shape shape = shape_of(heads * groups[pkv_rng_below(&rng, 6)], heads, page);
    shape.q_len = pkv_rng_below(&rng, 2) ? 1 : (int32_t)pkv_rng_range(&rng, 1, 6);
    shape.window = windows[pkv_rng_below(&rng, 7)];
    pkv_plan_options options =
        options_of((int32_t)pkv_rng_range(&rng, 1, 1 << pkv_rng_below(&rng, 9)),
                   (uint32_t)pkv_rng_below(&rng, 2));
    if (seed % 4 == 0) options.flags |= PKV_PLAN_ENOUGH_SHARED;
    if (pkv_rng_below(&rng, 2)) {
      options.tile_cost = (uint32_t)pkv_rng_range(&rng, 1, 100);
      options.segment_cost = (uint32_t)pkv_rng_range(&rng, 1, 100);
      options.node_tile_cost = (uint32_t)pkv_rng_range(&rng, 1, 100);
      options.node_row_cost = (uint32_t)pkv_rng_range(&rng, 0, 20);
      options.node_segment_cost = (uint32_t)pkv_rng_range(&rng, 1, 100);
      options.state_cost = (uint32_t)pkv_rng_range(&rng, 1, 30);
    }
    pkv_plan *plan = tree_plan_make(&shape, &options, &b, NULL);
    tree_plan_compare(plan, &b);
    const pkv_plan_stats stats = stats_of(plan);
    nodes += stats.nodes;
    windows_used += shape.window > 0 && stats.nodes > 0;
    for (int32_t rank = 0; rank < b.rows; rank++)
      levels += pkv_tree_view_of(plan).ranks[rank].depth == PKV_TREE_MAX_PATH;
    assert_true(stats.unique_kv_bytes <= stats.total_kv_bytes);
    assert_true(stats.padded_kv_bytes >= 0 && stats.tile_fill >= 0.0 && stats.tile_fill <= 1.0);
    const int64_t tile = (options.node_tile_cost ? options.node_tile_cost : 8) +
                         (int64_t)options.node_row_cost * 128 +
                         (options.tile_cost ? options.tile_cost : 8);
    const int64_t segment = 2 * (int64_t)plan->segment_cost + options.node_segment_cost;
    const int64_t most = stats.total_cost / plan->parts + 1 + 2 * (tile * 2 + segment);
    if (stats.max_part_cost > most)
      fail_msg("seed %llu: part %lld of %lld in %d", (unsigned long long)seed,
               (long long)stats.max_part_cost, (long long)stats.total_cost, plan->parts);
    free(plan);
    tree_batch_deinit(&b);
  }
  /* The generator must reach what it is for. */
  if (nodes < 4000 || levels < 300 || windows_used < 100)
    fail_msg("%lld nodes, %lld full paths, %lld plans with windows", (long long)nodes,
             (long long)levels, (long long)windows_used);
}

/* Promised for limits, used for less; the bytes are the same again. */
static void test_limits_are_enough(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 100; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, 9000 + seed);
    tree_batch b;
    tree_batch_random(&b, &rng, 16, 5, 6, 400, 60, 300);
    const pkv_shape shape = shape_of(16, 4, 16);
    const pkv_plan_options options = options_of(33, seed % 2);
    pkv_plan *plan = tree_plan_make(&shape, &options, &b, NULL), *again;
    size_t bytes, workspace;
    assert_int_equal(pkv_plan_size(&bytes, &workspace, &shape, &options,
                                   b.rows + (int32_t)pkv_rng_below(&rng, 9), 1 << 14, NULL),
                     PKV_OK);
    assert_true((size_t)plan->plan_bytes <= bytes);
    assert_true((size_t)plan->workspace_bytes <= workspace);
    again = plan_memory(bytes, 0x17);
    const pkv_plan *out;
    const pkv_sharing sharing = tree_batch_sharing(&b);
    assert_int_equal(pkv_plan_build_shared(&out, again, bytes, &shape, &options, b.rows, b.seq_len,
                                           &sharing, NULL),
                     PKV_OK);
    assert_memory_equal(again, plan, (size_t)plan->plan_bytes);
    for (size_t i = (size_t)plan->plan_bytes; i < bytes + 64; i++)
      assert_int_equal(((unsigned char *)again)[i], 0x17);
    free(again);
    free(plan);
    tree_batch_deinit(&b);
  }
}

/* With tables of a prefix cache the promise changes nothing but the way. */
static void test_chained_gives_the_same(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 200; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, 300 + seed);
    tree_batch b;
    tree_batch_random(&b, &rng, seed % 3 ? 16 : 256, 5, 8, 700, 50, 300);
    const pkv_shape shape = shape_of(8, 2, b.page_tokens);
    const pkv_plan_options options = options_of(7, 0);
    pkv_sharing sharing = tree_batch_sharing(&b);
    pkv_plan *plan = tree_plan_make(&shape, &options, &b, NULL);
    sharing.flags = PKV_TABLE_CHAINED;
    pkv_plan *chained = tree_plan_make(&shape, &options, &b, &sharing);
    assert_memory_equal(plan, chained, (size_t)plan->plan_bytes);
    free(plan);
    free(chained);
    tree_batch_deinit(&b);
  }
}

static pkv_plan *make(tree_batch *b, int32_t heads, int32_t kv_heads, int32_t parts) {
  const pkv_shape shape = shape_of(heads, kv_heads, b->page_tokens);
  const pkv_plan_options options = options_of(parts, 0);
  pkv_plan *plan = tree_plan_make(&shape, &options, b, NULL);
  tree_plan_compare(plan, b);
  return plan;
}

static void test_all_identical(void **state) {
  (void)state;
  for (int32_t tokens = 0; tokens <= 200; tokens += 25) {
    tree_batch b;
    tree_batch_init(&b, 16);
    const int32_t root = tree_batch_node(&b, -1, tokens);
    for (int i = 0; i < 40; i++)
      tree_batch_row(&b, root, 0);
    tree_batch_finish(&b, 5);
    pkv_plan *plan = make(&b, 16, 4, 9);
    const pkv_tree_view v = pkv_tree_view_of(plan);
    assert_int_equal(v.tree->nodes, tokens >= 64);
    if (tokens >= 64) {
      assert_int_equal(v.nodes[0].ranks, 40);
      assert_int_equal(v.nodes[0].units, tokens / 64);
      assert_int_equal(v.nodes[0].tiles, 2);
    }
    free(plan);
    tree_batch_deinit(&b);
  }
}

/* Nothing shared, or too little between too few: no node, and every row costs what it costs alone.
   */
static void test_sharing_must_pay(void **state) {
  (void)state;
  for (int32_t shared = 0; shared <= 64; shared += 64) {
    tree_batch b;
    tree_batch_init(&b, 16);
    for (int i = 0; i < 20; i++) {
      const int32_t root = tree_batch_node(&b, -1, shared);
      tree_batch_row(&b, root, 1000);
      tree_batch_row(&b, root, 900);
    }
    tree_batch_finish(&b, 6);
    pkv_plan *plan = make(&b, 32, 8, 16);
    const pkv_plan_stats stats = stats_of(plan);
    assert_int_equal(stats.nodes, 0);
    assert_int_equal(stats.unique_kv_bytes, stats.total_kv_bytes);
    assert_true(stats.dedup_ratio == 1.0 && stats.tile_fill == 0.0);
    free(plan);
    tree_batch_deinit(&b);
  }
}

/* Three rows that share an eighth, and strangers: at 200 tiles what is saved is a twentieth. */
static void test_a_twentieth_is_enough(void **state) {
  (void)state;
  for (int32_t strangers = 0; strangers <= 4; strangers++)
    for (uint32_t flags = 0; flags <= PKV_PLAN_ENOUGH_SHARED; flags += PKV_PLAN_ENOUGH_SHARED) {
      tree_batch b;
      tree_batch_init(&b, 16);
      const int32_t root = tree_batch_node(&b, -1, 5 * 64); /* 3 rows save 2 * 5 tiles ... */
      for (int i = 0; i < 3; i++)
        tree_batch_row(&b, root, 35 * 64);
      for (int i = 0; i < strangers; i++) /* ... of 120, 160, 200, 240, 280 */
        tree_batch_row(&b, -1, 40 * 64);
      tree_batch_finish(&b, 0);
      const pkv_shape shape = shape_of(32, 8, 16);
      pkv_plan_options options = options_of(16, flags);
      options.node_segment_cost = options.state_cost = 1;
      pkv_plan *plan = tree_plan_make(&shape, &options, &b, NULL);
      tree_plan_compare(plan, &b);
      const pkv_tree_view v = pkv_tree_view_of(plan);
      assert_int_equal(v.tree->nodes, flags && strangers > 2 ? 0 : 1);
      assert_int_equal(v.ranks[0].depth, v.tree->nodes);
      free(plan);
      tree_batch_deinit(&b);
    }
}

static void test_one_stranger(void **state) {
  (void)state;
  tree_batch b;
  tree_batch_init(&b, 16);
  const int32_t root = tree_batch_node(&b, -1, 4096);
  for (int i = 0; i < 63; i++)
    tree_batch_row(&b, root, 100 + i);
  tree_batch_row(&b, -1, 5000);
  tree_batch_finish(&b, 7);
  pkv_plan *plan = make(&b, 32, 8, 132);
  const pkv_tree_view v = pkv_tree_view_of(plan);
  assert_int_equal(v.tree->nodes, 1);
  assert_int_equal(v.nodes[0].ranks, 63);
  assert_int_equal(v.nodes[0].units, 64);
  const pkv_plan_stats stats = stats_of(plan);
  const int64_t token = 2 * 8 * 64 * 2;
  int64_t alone = 5000, all = 5000;
  for (int i = 0; i < 63; i++) {
    alone += 100 + i;
    all += 4196 + i;
  }
  assert_int_equal(stats.total_kv_bytes, all * token);
  assert_int_equal(stats.unique_kv_bytes, (alone + 4096) * token);
  free(plan);
  tree_batch_deinit(&b);
}

/* Row i shares i tiles with all later ones: hundreds of nodes on one path collapse to five. */
static void test_staggered_chain(void **state) {
  (void)state;
  for (int32_t rows = 2; rows <= 256; rows *= 2) {
    tree_batch b;
    tree_batch_init(&b, 16);
    int32_t at = -1;
    for (int32_t i = 0; i < rows; i++) {
      tree_batch_row(&b, at, 70);
      at = tree_batch_node(&b, at, 64);
    }
    tree_batch_finish(&b, 8);
    pkv_plan *plan = make(&b, 32, 8, 132);
    const pkv_plan_stats stats = stats_of(plan);
    if (rows == 256) {
      assert_in_range(stats.nodes, 4, 5);
      /* five steps of a staircase leave a sixth of it */
      if (stats.dedup_ratio < 2.5) fail_msg("dedup %g", stats.dedup_ratio);
    }
    free(plan);
    tree_batch_deinit(&b);
  }
}

/* The tree shapes of PAT's kernel benchmark: 1, 4, 8, 256 nodes of 32, 256, 256, 32 tokens. */
static void test_four_levels(void **state) {
  (void)state;
  static const int32_t heads[][2] = {{32, 32}, {16, 8}, {32, 8}, {64, 8}};
  for (int k = 0; k < 4; k++) {
    tree_batch b;
    tree_batch_init(&b, 16);
    const int32_t root = tree_batch_node(&b, -1, 32);
    for (int i = 0; i < 4; i++) {
      const int32_t second = tree_batch_node(&b, root, 256);
      for (int j = 0; j < 2; j++) {
        const int32_t third = tree_batch_node(&b, second, 256);
        for (int l = 0; l < 32; l++)
          tree_batch_row(&b, third, 32);
      }
    }
    tree_batch_finish(&b, 9);
    pkv_plan *plan = make(&b, heads[k][0], heads[k][1], 132);
    const pkv_tree_view v = pkv_tree_view_of(plan);
    /* The root is less than a tile. Where two tiles of query rows are needed for the 64 rows of a
       node above, each of its two children may as well read its tokens. */
    assert_int_equal(v.tree->nodes, k == 0 ? 12 : 8);
    free(plan);
    tree_batch_deinit(&b);
  }
}

static void test_no_rows_and_long_rows(void **state) {
  (void)state;
  for (int32_t rows = 0; rows <= 3; rows++) {
    tree_batch b;
    tree_batch_init(&b, 1024);
    const int32_t root = tree_batch_node(&b, -1, 65536);
    for (int32_t i = 0; i < rows; i++)
      tree_batch_row(&b, i == 1 ? -1 : root, 0);
    tree_batch_finish(&b, 0);
    free(make(&b, 4, 1, 3));
    tree_batch_deinit(&b);
  }
}

/* More query rows than a tile has: the route is balanced with another slot numbering. */
static void test_wide_rows_share_nothing(void **state) {
  (void)state;
  tree_batch b;
  tree_batch_init(&b, 16);
  const int32_t root = tree_batch_node(&b, -1, 4096);
  for (int i = 0; i < 5; i++)
    tree_batch_row(&b, root, 500);
  tree_batch_finish(&b, 0);
  pkv_shape shape = shape_of(32, 4, 16);
  for (shape.q_len = 8; shape.q_len <= 17; shape.q_len += 9) {
    const pkv_plan_options options = options_of(5, 0);
    pkv_plan *plan = tree_plan_make(&shape, &options, &b, NULL);
    const int64_t nodes = stats_of(plan).nodes;
    assert_int_equal(nodes, shape.q_len == 8 ? 1 : 0);
    free(plan);
  }
  tree_batch_deinit(&b);
}

/* ------------------------------------------------------------------ trees from schedulers */

typedef struct told {
  tree_batch b;
  pkv_shape shape;
  pkv_plan_options options;
  pkv_prefix_node nodes[3]; /* 4 rows of 8 pages: all share 2, the first three 2 more */
  int32_t order[4];
  pkv_sharing sharing;
} told;

static void told_init(told *t) {
  tree_batch_init(&t->b, 64);
  const int32_t root = tree_batch_node(&t->b, -1, 128);
  const int32_t below = tree_batch_node(&t->b, root, 128);
  for (int i = 0; i < 3; i++)
    tree_batch_row(&t->b, below, 200);
  tree_batch_row(&t->b, root, 328);
  tree_batch_finish(&t->b, 0);
  t->shape = shape_of(8, 2, 64);
  t->options = options_of(4, 0);
  t->nodes[0] = (pkv_prefix_node){0, 4, 0, 2};
  t->nodes[1] = (pkv_prefix_node){0, 3, 2, 2};
  t->nodes[2] = (pkv_prefix_node){3, 1, 2, 1};
  for (int i = 0; i < 4; i++)
    t->order[i] = i;
  t->sharing = (pkv_sharing)PKV_SHARING_INIT;
  t->sharing.nodes = t->nodes;
  t->sharing.node_count = 3;
}

static void expect_refusal(told *t, const char *text) {
  size_t bytes, workspace;
  pkv_error err = {PKV_OK, NULL, {0}};
  const pkv_plan *plan = NULL;
  assert_int_equal(pkv_plan_size(&bytes, &workspace, &t->shape, &t->options, 4, 1000, &err),
                   PKV_OK);
  void *memory = plan_memory(bytes, 0);
  const pkv_status status = pkv_plan_build_shared(&plan, memory, bytes, &t->shape, &t->options, 4,
                                                  t->b.seq_len, &t->sharing, &err);
  if (status != PKV_E_INVALID || !strstr(err.text, text))
    fail_msg("status %d, \"%s\" without \"%s\"", (int)status, err.text, text);
  assert_null(plan);
  free(memory);
  tree_batch_deinit(&t->b);
}

static void test_told_trees(void **state) {
  (void)state;
  told t;
  told_init(&t);
  pkv_plan *found = tree_plan_make(&t.shape, &t.options, &t.b, NULL);
  pkv_plan *plan = tree_plan_make(&t.shape, &t.options, &t.b, &t.sharing);
  assert_int_equal(stats_of(plan).nodes, 2);
  assert_memory_equal(plan, found, (size_t)plan->plan_bytes);
  free(plan);
  /* with tables beside it, and rows elsewhere */
  t.sharing.block_table = t.b.table;
  t.sharing.max_pages = t.b.max_pages;
  t.sharing.order = t.order;
  t.order[0] = 2;
  t.order[2] = 0;
  plan = tree_plan_make(&t.shape, &t.options, &t.b, &t.sharing);
  assert_int_equal(stats_of(plan).nodes, 2);
  assert_int_equal(pkv_tree_view_of(plan).ranks[0].row, 2);
  free(plan);
  /* nothing is known to be shared */
  t.sharing = (pkv_sharing)PKV_SHARING_INIT;
  plan = tree_plan_make(&t.shape, &t.options, &t.b, &t.sharing);
  assert_int_equal(stats_of(plan).nodes, 0);
  free(plan);
  free(found);
  tree_batch_deinit(&t.b);
}

static void test_bad_trees(void **state) {
  (void)state;
  told t;
  told_init(&t), t.nodes[0].row_count = 3, t.nodes[1] = (pkv_prefix_node){2, 2, 2, 1},
                 expect_refusal(&t, "lie partly in node 0");
  told_init(&t), t.nodes[1].row_count = 0, expect_refusal(&t, "rows 0 + 0");
  told_init(&t), t.nodes[1].row_count = 5, expect_refusal(&t, "rows 0 + 5");
  told_init(&t), t.nodes[1].row_count = INT32_MAX, expect_refusal(&t, "nodes[1]: rows");
  told_init(&t), t.nodes[1].first_row = -1, expect_refusal(&t, "nodes[1]: rows -1");
  told_init(&t), t.nodes[1].row_count = 4, expect_refusal(&t, "has the rows of node 0");
  told_init(&t), t.nodes[1].first_page = 1, expect_refusal(&t, "its parent ends at 2");
  told_init(&t), t.nodes[0].first_page = 1, expect_refusal(&t, "a root's table");
  told_init(&t), t.nodes[1].page_count = 100, expect_refusal(&t, "ends at page 102, row 0");
  told_init(&t), t.nodes[1].page_count = INT32_MAX, expect_refusal(&t, "pages 2 + 2147483647");
  told_init(&t), t.nodes[1].page_count = 0, expect_refusal(&t, "pages 2 + 0");
  told_init(&t), t.nodes[2] = t.nodes[1], expect_refusal(&t, "has the rows of node 1");
  told_init(&t), t.nodes[2] = t.nodes[1], t.nodes[1] = (pkv_prefix_node){3, 1, 2, 1},
                 expect_refusal(&t, "not in preorder");
  told_init(&t), t.nodes[2] = (pkv_prefix_node){2, 2, 2, 1}, expect_refusal(&t, "partly in node 1");
  told_init(&t), t.nodes[2] = t.nodes[0], expect_refusal(&t, "nodes[2]");
  told_init(&t), t.sharing.node_count = -1, expect_refusal(&t, "node_count is -1");
  told_init(&t), t.sharing.nodes = NULL, expect_refusal(&t, "nodes is NULL");
  told_init(&t), t.sharing.flags = 2, expect_refusal(&t, "flags");
  told_init(&t), t.sharing.order = t.order, t.order[1] = 3,
                 expect_refusal(&t, "row 3 at 1 and at 3");
  told_init(&t), t.sharing.order = t.order, t.order[1] = 4, expect_refusal(&t, "row 4 of 4");
  told_init(&t), t.sharing.order = t.order, t.order[1] = -1, expect_refusal(&t, "row -1 of 4");
  told_init(&t);
  t.sharing.block_table = t.b.table;
  t.sharing.max_pages = t.b.max_pages;
  t.b.table[2 * t.b.max_pages + 3] = 77;
  expect_refusal(&t, "index 3 is page");
  told_init(&t);
  t.sharing.block_table = t.b.table;
  t.sharing.block_table_stride = t.b.max_pages;
  t.sharing.max_pages = 5;
  expect_refusal(&t, "max_pages is 5");
  told_init(&t), t.options.route = PKV_ROUTE_BALANCED, expect_refusal(&t, "must be shared");
}

static void test_arguments(void **state) {
  (void)state;
  pkv_error err = {PKV_OK, NULL, {0}};
  told t;
  told_init(&t);
  size_t bytes, workspace;
  const pkv_plan *plan;
  assert_int_equal(pkv_plan_size(&bytes, &workspace, &t.shape, &t.options, 4, 456, &err), PKV_OK);
  void *memory = plan_memory(bytes, 0);
  assert_int_equal(pkv_plan_build(&plan, memory, bytes, &t.shape, &t.options, 4, t.b.seq_len, &err),
                   PKV_E_INVALID);
  assert_non_null(strstr(err.text, "pkv_plan_build_shared"));
  assert_int_equal(pkv_plan_build_shared(&plan, memory, 100, &t.shape, &t.options, 4, t.b.seq_len,
                                         &t.sharing, &err),
                   PKV_E_TOO_SMALL);
  assert_int_equal(
      pkv_plan_build_shared(&plan, memory, bytes, &t.shape, &t.options, 4, t.b.seq_len, NULL, &err),
      PKV_E_INVALID);
  assert_int_equal(pkv_plan_build_shared(&plan, (char *)memory + 8, bytes, &t.shape, &t.options, 4,
                                         t.b.seq_len, &t.sharing, &err),
                   PKV_E_INVALID);
  assert_int_equal(pkv_plan_build_shared(&plan, memory, bytes, &t.shape, &t.options, -1,
                                         t.b.seq_len, &t.sharing, &err),
                   PKV_E_INVALID);
  assert_int_equal(
      pkv_plan_build_shared(&plan, memory, bytes, &t.shape, &t.options, 4, NULL, &t.sharing, &err),
      PKV_E_INVALID);
  free(memory);
  tree_batch_deinit(&t.b);
}

/* Any changed word is found, or changes nothing that is run. */
static void test_check_finds_changed_words(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 4711);
  for (int round = 0; round < 3; round++) {
    tree_batch b;
    tree_batch_random(&b, &rng, 16, 4, 5, 500, 20, 200);
    pkv_shape shape = shape_of(8, 2, 16);
    shape.window = round == 2 ? 700 : 0;
    const pkv_plan_options options = options_of(6, round == 1);
    pkv_plan *plan = tree_plan_make(&shape, &options, &b, NULL);
    const size_t bytes = (size_t)plan->plan_bytes;
    const pkv_plan_tree tree = *pkv_tree_view_of(plan).tree;
    static const int32_t changes[] = {1, -1, 64, INT32_MIN, 0x55555555};
    /* header, tree, arrays; padding, costs of states and the unused ends mean nothing */
    for (size_t at = (size_t)plan->tree_at; at < (size_t)tree.node_cost_at; at += 4) {
      for (int k = 0; k < 5; k++) {
        int32_t word;
        memcpy(&word, (unsigned char *)plan + at, 4);
        const int32_t changed = (int32_t)((uint32_t)word + (uint32_t)changes[k]);
        memcpy((unsigned char *)plan + at, &changed, 4);
        if (pkv_plan_check(plan, bytes, NULL) == PKV_OK) tree_plan_walk(plan, NULL);
        memcpy((unsigned char *)plan + at, &word, 4);
      }
    }
    free(plan);
    tree_batch_deinit(&b);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_trees),
      cmocka_unit_test(test_limits_are_enough),
      cmocka_unit_test(test_chained_gives_the_same),
      cmocka_unit_test(test_all_identical),
      cmocka_unit_test(test_sharing_must_pay),
      cmocka_unit_test(test_a_twentieth_is_enough),
      cmocka_unit_test(test_one_stranger),
      cmocka_unit_test(test_staggered_chain),
      cmocka_unit_test(test_four_levels),
      cmocka_unit_test(test_no_rows_and_long_rows),
      cmocka_unit_test(test_wide_rows_share_nothing),
      cmocka_unit_test(test_told_trees),
      cmocka_unit_test(test_bad_trees),
      cmocka_unit_test(test_arguments),
      cmocka_unit_test(test_check_finds_changed_words),
  };
  return cmocka_run_group_tests_name("plan_shared", tests, NULL, NULL);
}
