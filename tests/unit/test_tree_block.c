/* SPDX-License-Identifier: Apache-2.0 */
/* The device's planner of `shared`, its threads played by loops, against the host's: same bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/plan_prepare.h"
#include "plan/tree_core.h"
#include "support/tree_walk.h"

/* A block of one thread. Loops run backwards or from the middle: their order must not matter. */
static int32_t loop_twist;
/* Depths that a step of the search tries; 0: units are looked at side by side. */
static int probes_now;
/* Keys are of units alone, where units are looked at side by side. */
static bool local_now;

static int32_t twisted(int32_t i, int32_t count) {
  if (loop_twist == 0) return i;
  if (loop_twist == 1) return count - 1 - i;
  return (int32_t)(((int64_t)i + count / 3) % count);
}

#define TREE_FN static
#define TREE_FOR(i, count)                                                                         \
  for (int32_t at_##i = 0, i, count_##i = (count);                                                 \
       at_##i < count_##i && (i = twisted(at_##i, count_##i), 1); at_##i++)
#define TREE_FOR_LAST TREE_FOR
#define TREE_ONE      1
#define TREE_SYNC()   ((void)0)

static int tree_any(int x) {
  return x;
}
static int32_t tree_least32(int32_t x) {
  return x;
}
static int64_t tree_least64(int64_t x) {
  return x;
}
static int64_t tree_sum64(int64_t x) {
  return x;
}
static void tree_scan(int64_t *a, int64_t *b, int32_t *c, int32_t *d, int32_t *e, int32_t n) {
  for (int32_t i = 1; i < n; i++) {
    if (a) a[i] = (int64_t)((uint64_t)a[i] + (uint64_t)a[i - 1]);
    if (b) b[i] += b[i - 1];
    if (c) c[i] += c[i - 1];
    if (d) d[i] += d[i - 1];
    if (e) e[i] += e[i - 1];
  }
}
static void tree_sort(uint64_t *keys, int32_t n) {
  for (uint32_t k = 2; k <= (uint32_t)n; k *= 2)
    for (uint32_t j = k / 2; j > 0; j /= 2)
      for (uint32_t i = 0; i < (uint32_t)n; i++)
        pkv_tree_exchange(keys, i, j, k);
}
static int32_t tree_claim(uint64_t *keys, int32_t *first, int32_t slots, uint64_t key,
                          int32_t row) {
  int32_t slot = (int32_t)(key % 7) & (slots - 1); /* rows in each other's way */
  if (row == INT32_MAX) return 0;
  while (keys[slot] != UINT64_MAX && keys[slot] != key)
    slot = (slot + 1) & (slots - 1);
  keys[slot] = key;
  if (row < first[slot]) first[slot] = row;
  return slot;
}
static void tree_raise(uint64_t *to, uint64_t value) {
  if (value > *to) *to = value;
}
#define TREE_INLINE static inline
#define TREE_SELDOM static
#define TREE_UNROLL
#define TREE_ABREAST

#include "plan/tree_block_impl.h"

static void *memory_of(size_t bytes, int fill) {
  void *p = NULL;
  assert_int_equal(posix_memalign(&p, 64, bytes + 1), 0);
  memset(p, fill, bytes);
  return p;
}

static void find_leaders(const pkv_tree_input *in) {
  const int32_t rows = in->header.rows;
  if (probes_now > 0) {
    for (int32_t row = 0; row < rows; row++)
      tree_row_leader(in, row, probes_now);
    return;
  }
  const pkv_tree_core t = tree_core_of(in);
  void *memory = memory_of((size_t)pkv_tree_level_bytes(rows), 0x77);
  tree_level level;
  const int32_t most = tree_level_init(&level, in, &t, memory);
  for (int32_t unit = most - 1; unit >= 0; unit--) {
    tree_level_clear(&level);
    tree_level_enter(&level, in, &t, unit);
    tree_level_raise(&level, in, &t, unit);
  }
  free(memory);
}

/* Builds with the device's phases; key_bits < 64 makes keys collide. */
static pkv_plan *emulate(const pkv_shape *shape, const pkv_plan_options *options,
                         const tree_batch *b, bool chained, int32_t key_bits) {
  pkv_error err = {PKV_OK, NULL, {0}};
  pkv_tree_input in = {.seq_len = b->seq_len,
                       .block_table = b->table,
                       .block_table_stride = b->max_pages,
                       .max_seq_len = 1 << 20,
                       .chained = chained,
                       .local = local_now && probes_now == 0};
  int32_t longest = 0;
  for (int32_t row = 0; row < b->rows; row++)
    if (b->seq_len[row] > longest) longest = b->seq_len[row];
  if (pkv_plan_prepare_shared(&in.header, &in.tree, shape, options, b->rows, &err))
    fail_msg("prepare: %s", err.text);
  in.max_units = (int32_t)((int64_t)b->max_pages * in.header.page_tokens / in.header.unit_tokens);
  pkv_shared_bounds bounds;
  if (pkv_plan_shared_bounds(&bounds, shape, options, b->rows, longest, &err))
    fail_msg("bounds: %s", err.text);
  assert_true((size_t)in.header.plan_bytes <= bounds.plan_bytes);
  in.plan = memory_of((size_t)in.header.plan_bytes, 0);
  for (int64_t i = 0; i < in.header.plan_bytes / 8; i++)
    ((uint64_t *)(void *)in.plan)[i] = tree_blank_word(&in, i);
  void *memory = memory_of(bounds.memory_bytes, 0x77);
  void *desk = pkv_tree_memory_init(&in, memory, bounds.units);
  const pkv_plan_core core = pkv_plan_core_of(&in.header);
  const int64_t desk_bytes = pkv_tree_desk_bytes(&core);
  assert_true((unsigned char *)desk + desk_bytes <= (unsigned char *)memory + bounds.memory_bytes);
  const int32_t most = 32; /* units at a time: carries are needed */
  int64_t *sums = memory_of((size_t)most * 8, 0x77);
  for (int32_t row = 0; row < b->rows && !in.local; row++)
    tree_row_keys(&in, row, sums, most);
  for (int64_t i = 0; i < bounds.units * b->rows && key_bits < 64 && !in.local; i++)
    in.keys[i] &= ((uint64_t)1 << key_bits) - 1;
  memset(in.found, 0, (size_t)(b->rows + 1) * 8);
  find_leaders(&in);
  const pkv_tree_core t = tree_core_of(&in);
  pkv_tree_desk d;
  pkv_tree_desk_init(&d, desk, &in, &t.core);
  tree_block_begin(&in, &t, &d);
  tree_block_plan(&in, &t, &d);
  free(memory);
  free(sums);
  assert_true(in.plan->slots <= bounds.node_slots + bounds.private_slots);
  assert_true(in.plan->merges <= bounds.merges);
  return in.plan;
}

static void expect_same(const pkv_plan *plan, const pkv_plan *want, const char *what,
                        uint64_t seed) {
  assert_int_equal(plan->plan_bytes, want->plan_bytes);
  for (int64_t i = 0; i < want->plan_bytes; i++)
    if (((const unsigned char *)plan)[i] != ((const unsigned char *)want)[i])
      fail_msg("%s, seed %llu: byte %lld of %lld (tree at %lld) is 0x%02x, not 0x%02x", what,
               (unsigned long long)seed, (long long)i, (long long)want->plan_bytes,
               (long long)want->tree_at, ((const unsigned char *)plan)[i],
               ((const unsigned char *)want)[i]);
}

/* chains: equal ids imply equal ids before them. */
static void compare(const pkv_shape *shape, const pkv_plan_options *options, const tree_batch *b,
                    bool chains, uint64_t seed) {
  pkv_plan *want = tree_plan_make(shape, options, b, NULL);
  for (loop_twist = 0; loop_twist < 4; loop_twist++) {
    probes_now = loop_twist == 2 ? 3 : 0;
    local_now = loop_twist == 1 || loop_twist == 3;
    pkv_plan *plan = emulate(shape, options, b, false, 64);
    expect_same(plan, want, local_now ? "by units" : "hashed", seed);
    free(plan);
    if (!chains) continue;
    plan = emulate(shape, options, b, true, 64);
    expect_same(plan, want, "chained", seed);
    free(plan);
  }
  loop_twist = 0;
  local_now = false;
  for (probes_now = 0; probes_now < 8; probes_now += 7) {
    pkv_plan *plan = emulate(shape, options, b, false, (int32_t)(seed % 12));
    expect_same(plan, want, "with equal keys", seed);
    free(plan);
  }
  free(want);
}

static void test_random_trees(void **state) {
  (void)state;
  static const int32_t pages[] = {1, 3, 16, 16, 48, 64, 100, 128, 1024};
  static const int32_t groups[] = {1, 2, 3, 4, 8, 32};
  static const int32_t windows[] = {0, 0, 0, 1, 64, 200, 1000};
  for (uint64_t seed = 1; seed <= 500; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, seed);
    const int32_t page = pages[pkv_rng_below(&rng, 9)], heads = (int32_t)pkv_rng_range(&rng, 1, 4);
    const int32_t run = 1 << pkv_rng_range(&rng, 4, page == 1 ? 9 : 12);
    tree_batch b;
    tree_batch_random(&b, &rng, page, (int32_t)pkv_rng_range(&rng, 1, 9),
                      (int32_t)pkv_rng_range(&rng, 1, 2 << pkv_rng_below(&rng, 6)), run,
                      (int32_t)pkv_rng_range(&rng, 1, seed % 20 ? 60 : 200), run / 2);
    pkv_shape shape = PKV_SHAPE_INIT;
    shape.kv_heads = heads;
    shape.query_heads = heads * groups[pkv_rng_below(&rng, 6)];
    shape.head_dim = 64;
    shape.page_tokens = page;
    shape.q_len = pkv_rng_below(&rng, 2) ? 1 : (int32_t)pkv_rng_range(&rng, 1, 6);
    shape.window = windows[pkv_rng_below(&rng, 7)];
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.route = PKV_ROUTE_SHARED;
    options.parts = (int32_t)pkv_rng_range(&rng, 1, 1 << pkv_rng_below(&rng, 9));
    options.flags = (uint32_t)pkv_rng_below(&rng, 2);
    options.chunk_tokens = options.flags ? 128 : 0;
    if (seed % 3 == 0) options.flags |= PKV_PLAN_ENOUGH_SHARED;
    if (pkv_rng_below(&rng, 2)) {
      options.node_row_cost = (uint32_t)pkv_rng_range(&rng, 0, 20);
      options.node_segment_cost = (uint32_t)pkv_rng_range(&rng, 1, 100);
      options.state_cost = (uint32_t)pkv_rng_range(&rng, 1, 30);
    }
    compare(&shape, &options, &b, true, seed);
    tree_batch_deinit(&b);
  }
}

/* Pages that rows of other prefixes share: keys of units alone do not do. */
static void test_broken_chains(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 60; seed++) {
    pkv_rng rng;
    pkv_rng_init(&rng, 700 + seed);
    const int32_t page = seed % 2 ? 16 : 128;
    tree_batch b;
    tree_batch_random(&b, &rng, page, 4, 8, 1000, 40, 500);
    const int32_t at = (int32_t)pkv_rng_below(&rng, 8);
    for (int32_t row = 0; row < b.rows; row++)
      if ((at + 1) * page <= b.seq_len[row] && pkv_rng_below(&rng, 4) > 0)
        b.table[(int64_t)row * b.max_pages + at] = 0;
    pkv_shape shape = PKV_SHAPE_INIT;
    shape.kv_heads = 2;
    shape.query_heads = 8;
    shape.head_dim = 64;
    shape.page_tokens = page;
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.route = PKV_ROUTE_SHARED;
    compare(&shape, &options, &b, false, seed);
    tree_batch_deinit(&b);
  }
}

static void test_chains_and_edges(void **state) {
  (void)state;
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.kv_heads = 8;
  shape.query_heads = 32;
  shape.head_dim = 128;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.route = PKV_ROUTE_SHARED;
  options.parts = 132;
  static const int32_t counts[] = {0, 1, 2, 3, 31, 32, 33, 256, 1000};
  for (int k = 0; k < 9; k++) {
    for (int kind = 0; kind < 3; kind++) { /* identical, staggered, none sharing */
      tree_batch b;
      tree_batch_init(&b, 16);
      int32_t at = kind == 0 ? tree_batch_node(&b, -1, 1000) : -1;
      for (int32_t i = 0; i < counts[k]; i++) {
        tree_batch_row(&b, at, kind == 0 ? 0 : 70);
        if (kind == 1 && i < 300) at = tree_batch_node(&b, at, 64);
      }
      tree_batch_finish(&b, 8);
      compare(&shape, &options, &b, true, (uint64_t)k + 9);
      tree_batch_deinit(&b);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_trees),
      cmocka_unit_test(test_broken_chains),
      cmocka_unit_test(test_chains_and_edges),
  };
  return cmocka_run_group_tests_name("tree_block", tests, NULL, NULL);
}
