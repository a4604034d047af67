/* SPDX-License-Identifier: Apache-2.0 */
#include "support/tree_walk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/plan_walk.h"

#define REQUIRE(condition, ...)                                                                    \
  do {                                                                                             \
    if (!(condition)) fail_msg(__VA_ARGS__);                                                       \
  } while (0)

static void *zeros(size_t count, size_t size) {
  void *p = calloc(count + 1, size);
  assert_non_null(p);
  return p;
}

static int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* ------------------------------------------------------------------ walking */

/* What a slot holds: units [begin, end) of one rank and head. */
typedef struct slot_use {
  int32_t written, rank, head, begin, end;
} slot_use;

typedef struct walk {
  const pkv_plan *plan;
  const tree_batch *b; /* NULL: pages are not compared */
  const int32_t *seq_len;
  pkv_tree_view v;
  slot_use *node, *own; /* by slot of the two areas */
  int32_t *stored;      /* [rows, heads] */
} walk;

/* Units of a row that some query sees: [first, end). */
static void seen_units(const walk *w, int32_t length, int32_t *first, int32_t *end) {
  const int64_t token =
      w->plan->window > 0 ? (int64_t)length - w->plan->q_len + 1 - w->plan->window : 0;
  const int32_t unit = w->plan->unit_tokens;
  *first = token > 0 ? (int32_t)(token / unit) : 0;
  *end = length / unit + (length % unit != 0);
  if (length == 0) *first = *end = 0;
}

/* The pages of unit u, as far as row `row` sees it, are the same in its own table and in `other`.
   */
static void same_pages(const walk *w, int32_t row, int32_t other, int32_t u) {
  const int64_t unit = w->plan->unit_tokens, p = w->plan->page_tokens;
  int32_t first, end;
  seen_units(w, w->seq_len[row], &first, &end);
  if (u < first || !w->b) return;
  const int32_t *a = w->b->table + (int64_t)row * w->b->max_pages;
  const int32_t *c = w->b->table + (int64_t)other * w->b->max_pages;
  for (int64_t page = u * unit / p; page * p < (u + 1) * unit; page++)
    REQUIRE(a[page] == c[page], "unit %d: page %lld of row %d is %d, of row %d %d", u,
            (long long)page, row, a[page], other, c[page]);
  REQUIRE((u + 1) * unit <= w->seq_len[row] - w->plan->q_len + 1 &&
              (u + 1) * unit <= w->seq_len[other],
          "unit %d is not seen whole by rows %d and %d", u, row, other);
}

static void use_slot(slot_use *area, int32_t count, int64_t slot, slot_use use) {
  REQUIRE(slot >= 0 && slot < count, "slot %lld of %d", (long long)slot, count);
  REQUIRE(area[slot].written == 0, "slot %lld is written twice", (long long)slot);
  area[slot] = use;
  area[slot].written = 1;
}

static void walk_node_piece(walk *w, const pkv_node_piece *piece) {
  const int32_t step = w->v.batch_invariant ? 1 : piece->unit_end - piece->unit_begin;
  int64_t slot = piece->slot;
  REQUIRE(piece->unit_end > piece->unit_begin && piece->ranks >= 1, "an empty node piece");
  REQUIRE(piece->ranks * w->plan->q_len * (w->plan->query_heads / w->plan->kv_heads) <=
              PKV_TREE_TILE_ROWS,
          "a tile of %d ranks", piece->ranks);
  for (int32_t u = piece->unit_begin; u < piece->unit_end; u += step)
    for (int32_t i = 0; i < piece->ranks; i++, slot++)
      use_slot(w->node, w->v.tree->node_slots, slot,
               (slot_use){1, piece->first_rank + i, piece->kv_head, u, u + step});
  for (int32_t i = 0; i < piece->ranks; i++)
    for (int32_t u = piece->unit_begin; u < piece->unit_end; u++)
      same_pages(w, w->v.ranks[piece->first_rank + i].row, piece->table_row, u);
}

static void walk_private_piece(walk *w, const pkv_private_piece *piece) {
  REQUIRE(piece->row == w->v.ranks[piece->rank].row, "rank %d: row %d", piece->rank, piece->row);
  REQUIRE(piece->length == w->seq_len[piece->row], "row %d: length %d", piece->row, piece->length);
  if (piece->whole) {
    int32_t first, end;
    seen_units(w, piece->length, &first, &end);
    REQUIRE(piece->unit_begin == first && piece->unit_end == end, "row %d: whole, %d to %d",
            piece->row, piece->unit_begin, piece->unit_end);
    w->stored[piece->rank * w->v.kv_heads + piece->kv_head]++;
    return;
  }
  if (piece->unit_begin == piece->unit_end) return;
  const int32_t step = w->v.batch_invariant ? 1 : piece->unit_end - piece->unit_begin;
  int64_t slot = piece->slot;
  for (int32_t u = piece->unit_begin; u < piece->unit_end; u += step)
    use_slot(w->own, w->v.tree->private_slots, slot++,
             (slot_use){1, piece->rank, piece->kv_head, u, u + step});
}

/* One list of states: the next units of the fold. */
static void walk_states(slot_use *area, int32_t count, pkv_tree_states s, int32_t rank,
                        int32_t head, int32_t *at, bool may_skip) {
  for (int32_t i = 0; i < s.count; i++) {
    const int32_t slot = s.first + i * s.stride;
    REQUIRE(slot >= 0 && slot < count, "rank %d folds slot %d of %d", rank, slot, count);
    slot_use *use = &area[slot];
    REQUIRE(use->written == 1 && use->rank == rank && use->head == head,
            "rank %d head %d folds slot %d of rank %d head %d (%d)", rank, head, slot, use->rank,
            use->head, use->written);
    REQUIRE(may_skip ? use->begin <= *at : use->begin == *at,
            "rank %d head %d folds units %d to %d after %d", rank, head, use->begin, use->end, *at);
    if (use->end > *at) *at = use->end;
    use->written = 2;
  }
}

static void walk_fold(walk *w, int32_t rank, int32_t head) {
  const pkv_tree_rank *r = &w->v.ranks[rank];
  int32_t first, end, at;
  seen_units(w, r->length, &first, &end);
  if (pkv_tree_stored(&w->v, rank, head)) {
    REQUIRE(w->stored[rank * w->v.kv_heads + head] == 1, "rank %d head %d is not stored", rank,
            head);
    return;
  }
  REQUIRE(w->stored[rank * w->v.kv_heads + head] == 0, "rank %d head %d: stored, and folded", rank,
          head);
  at = w->plan->window > 0 ? first : 0;
  for (int32_t i = 0; i < r->depth; i++) {
    const pkv_tree_node *n = &w->v.nodes[r->path[i]];
    const int32_t from = at;
    /* With a window a node may begin before the row sees, or end before it does. */
    walk_states(w->node, w->v.tree->node_slots, pkv_tree_node_states(&w->v, r->path[i], rank, head),
                rank, head, &at, w->plan->window > 0);
    REQUIRE(n->first_unit <= from, "rank %d: node %d starts at %d after %d", rank, r->path[i],
            n->first_unit, from);
  }
  REQUIRE(r->units == 0 || at == r->first_unit, "rank %d: private units from %d after %d", rank,
          r->first_unit, at);
  walk_states(w->own, w->v.tree->private_slots, pkv_tree_private_states(&w->v, rank, head), rank,
              head, &at, false);
  REQUIRE(at == end, "rank %d head %d: folded up to unit %d of %d", rank, head, at, end);
}

void tree_plan_walk(const pkv_plan *plan, const tree_batch *b) {
  walk w = {.plan = plan, .b = b, .v = pkv_tree_view_of(plan)};
  w.seq_len = pkv_plan_at(plan, plan->seq_len_at);
  w.node = zeros((size_t)w.v.tree->node_slots, sizeof *w.node);
  w.own = zeros((size_t)w.v.tree->private_slots, sizeof *w.own);
  w.stored = zeros((size_t)plan->rows * (size_t)plan->kv_heads, sizeof *w.stored);
  for (int32_t p = 0; p < plan->parts; p++) {
    pkv_node_cursor node_at = w.v.node_cursors[p];
    pkv_node_piece node_piece;
    while (pkv_tree_next_node_piece(&node_piece, &w.v, &node_at, &w.v.node_cursors[p + 1]))
      walk_node_piece(&w, &node_piece);
    for (int32_t half = 2 * p; half < 2 * p + 2; half++) {
      pkv_private_cursor at = w.v.private_cursors[half];
      pkv_private_piece piece;
      while (pkv_tree_next_private_piece(&piece, &w.v, &at, &w.v.private_cursors[half + 1]))
        walk_private_piece(&w, &piece);
    }
  }
  for (int32_t rank = 0; rank < plan->rows; rank++)
    for (int32_t head = 0; head < plan->kv_heads; head++)
      walk_fold(&w, rank, head);
  for (int32_t i = 0; i < w.v.tree->node_slots; i++)
    REQUIRE(w.node[i].written == 2, "node slot %d: %d", i, w.node[i].written);
  for (int32_t i = 0; i < w.v.tree->private_slots; i++)
    REQUIRE(w.own[i].written != 1, "private slot %d is never folded", i);
  free(w.node);
  free(w.own);
  free(w.stored);
}

/* ------------------------------------------------------------------ the definition, slowly */

typedef struct naive_node {
  int32_t first, end, depth; /* ranks [first, end), the unit where it ends */
  int32_t level;             /* kept nodes above it */
  bool kept;
} naive_node;

typedef struct naive {
  const pkv_plan *plan;
  const pkv_plan_tree *tree;
  const tree_batch *b;
  int32_t rows, nodes;
  int32_t *share; /* [rows, rows] */
  int32_t *leader, *units, *order;
  naive_node *node;
} naive;

static int32_t share_of(const naive *n, int32_t r, int32_t s) {
  const int64_t unit = n->plan->unit_tokens, p = n->plan->page_tokens;
  const int64_t least = min64(n->b->seq_len[r], n->b->seq_len[s]) - n->plan->q_len + 1;
  const int32_t *a = n->b->table + (int64_t)r * n->b->max_pages;
  const int32_t *c = n->b->table + (int64_t)s * n->b->max_pages;
  int32_t units = 0;
  int64_t page = 0;
  while ((units + 1) * unit <= least) {
    for (; page * p < (units + 1) * unit; page++)
      if (a[page] != c[page]) return units;
    units++;
  }
  return units;
}

/* A row, then the rows that it leads: those led deepest first, then by index. */
static void order_below(naive *n, int32_t row, int32_t *at) {
  n->order[(*at)++] = row;
  for (int32_t deep = INT32_MAX; deep > 0;) {
    int32_t next = 0;
    for (int32_t r = 0; r < n->rows; r++) {
      if (n->leader[r] != row) continue;
      if (n->units[r] == deep) order_below(n, r, at);
      if (n->units[r] < deep && n->units[r] > next) next = n->units[r];
    }
    deep = next;
  }
}

static void naive_order(naive *n) {
  int32_t at = 0;
  for (int32_t r = 0; r < n->rows; r++) {
    n->leader[r] = -1;
    n->units[r] = 0;
    for (int32_t s = 0; s < r; s++) {
      n->share[r * n->rows + s] = n->share[s * n->rows + r] = share_of(n, r, s);
      if (n->share[r * n->rows + s] > n->units[r]) n->units[r] = n->share[r * n->rows + s];
    }
    for (int32_t s = r - 1; s >= 0 && n->units[r] > 0; s--)
      if (n->share[r * n->rows + s] == n->units[r]) n->leader[r] = s;
  }
  for (int32_t r = 0; r < n->rows; r++)
    if (n->leader[r] < 0) order_below(n, r, &at);
}

/* Runs of ranks that share more than their neighbours do with them, found from every gap. */
static void naive_nodes(naive *n) {
  for (int32_t gap = 1; gap < n->rows && n->tree->most_tile_ranks > 0; gap++) {
    const int32_t depth = n->share[n->order[gap - 1] * n->rows + n->order[gap]];
    if (depth == 0) continue;
    int32_t first = gap - 1, end = gap + 1;
    while (first > 0 && n->share[n->order[first - 1] * n->rows + n->order[gap]] >= depth)
      first--;
    while (end < n->rows && n->share[n->order[end] * n->rows + n->order[gap]] >= depth)
      end++;
    bool known = false;
    for (int32_t i = 0; i < n->nodes; i++)
      known |= n->node[i].first == first && n->node[i].end == end;
    if (!known) n->node[n->nodes++] = (naive_node){first, end, depth, 0, true};
  }
}

static bool holds(const naive_node *a, const naive_node *c) {
  return a->first <= c->first && a->end >= c->end && a->end - a->first > c->end - c->first;
}

/* The nearest kept node around node i; -1: none. */
static int32_t naive_up(const naive *n, int32_t i) {
  int32_t best = -1;
  for (int32_t k = 0; k < n->nodes; k++)
    if (n->node[k].kept && holds(&n->node[k], &n->node[i]) &&
        (best < 0 || holds(&n->node[best], &n->node[k])))
      best = k;
  return best;
}

static int64_t tiles_of(const naive *n, int64_t ranks) {
  return (ranks + n->tree->most_tile_ranks - 1) / n->tree->most_tile_ranks;
}

static int32_t length_at(const naive *n, int32_t rank) {
  return n->b->seq_len[n->order[rank]];
}

static int32_t first_seen(const naive *n, int32_t rank) {
  const int64_t token = (int64_t)length_at(n, rank) - n->plan->q_len + 1 - n->plan->window;
  return n->plan->window > 0 && token > 0 ? (int32_t)(token / n->plan->unit_tokens) : 0;
}

/* The unit that node i is read from: where its parent ends, or where its rows begin to see, on
   average. */
static int64_t naive_start(const naive *n, int32_t i) {
  const naive_node *node = &n->node[i];
  const int32_t up = naive_up(n, i);
  int64_t start = up >= 0 ? n->node[up].depth : 0, seen = 0;
  for (int32_t rank = node->first; rank < node->end; rank++)
    seen += first_seen(n, rank);
  seen /= node->end - node->first;
  return n->plan->window > 0 && seen > start ? seen : start;
}

/* What dropping node i changes, written as costs before and after. */
static int64_t naive_net(const naive *n, int32_t i) {
  const pkv_plan_tree *t = n->tree;
  const naive_node *node = &n->node[i];
  const int32_t up = naive_up(n, i);
  const int64_t ranks = node->end - node->first;
  const bool invariant = n->plan->flags & PKV_PLAN_BATCH_INVARIANT;
  int64_t ends = 0;
  for (int32_t rank = node->first; rank < node->end; rank++)
    ends += (length_at(n, rank) + n->plan->unit_tokens - 1) / n->plan->unit_tokens;
  const int64_t units = node->depth - naive_start(n, i);
  if (units <= 0) return -1;
  int64_t kid_ranks = 0, without = 0;
  for (int32_t k = 0; k < n->nodes; k++) {
    if (!n->node[k].kept || naive_up(n, k) != i) continue;
    const int64_t kid = n->node[k].end - n->node[k].first;
    kid_ranks += kid;
    without += units * (tiles_of(n, kid) * t->node_unit_cost + kid * t->rank_unit_cost);
  }
  const int64_t direct = ranks - kid_ranks;
  without += direct * units * n->plan->unit_cost;
  int64_t with = tiles_of(n, ranks) * (t->node_segment_cost + units * t->node_unit_cost);
  with += ranks * units * t->rank_unit_cost;
  const int64_t mean = (ends + ranks - 1) / ranks;
  const int64_t tail = mean > node->depth ? mean - node->depth : 0;
  if (invariant)
    with += up < 0 ? direct * (units + tail) * t->state_cost : 0;
  else
    with += (ranks + (up < 0 ? direct : 0)) * t->state_cost;
  return without - with;
}

static bool naive_deep(const naive *n, int32_t i) {
  for (int32_t k = 0; k < n->nodes; k++)
    if (n->node[k].kept && n->node[k].level >= PKV_TREE_MAX_PATH &&
        (k == i || holds(&n->node[i], &n->node[k])))
      return true;
  return false;
}

static void naive_enough(naive *n) {
  int64_t saved = 0, read = 0;
  if (!(n->plan->flags & PKV_PLAN_ENOUGH_SHARED)) return;
  for (int32_t rank = 0; rank < n->rows; rank++)
    read += (length_at(n, rank) + n->plan->unit_tokens - 1) / n->plan->unit_tokens -
            first_seen(n, rank);
  for (int32_t i = 0; i < n->nodes; i++) {
    const int64_t units = n->node[i].depth - naive_start(n, i);
    if (n->node[i].kept && units > 0) saved += units * (n->node[i].end - n->node[i].first - 1);
  }
  for (int32_t i = 0; i < n->nodes && saved * 20 < read; i++)
    n->node[i].kept = false;
}

static void naive_keep(naive *n) {
  int64_t bar = 0;
  for (;;) {
    int64_t least = INT64_MAX;
    int32_t said[2] = {0, 0};
    int8_t *vote = zeros((size_t)n->nodes, 1);
    for (int32_t i = 0; i < n->nodes; i++) {
      n->node[i].level = 0;
      for (int32_t k = 0; k < n->nodes; k++)
        n->node[i].level += n->node[k].kept && holds(&n->node[k], &n->node[i]);
    }
    for (int32_t i = 0; i < n->nodes; i++) {
      if (!n->node[i].kept) continue;
      const int64_t net = naive_net(n, i);
      const bool deep = naive_deep(n, i);
      if (deep && net < least) least = net;
      if (net > 0 && !(deep && net <= bar)) continue;
      vote[i] = (int8_t)(1 + n->node[i].level % 2);
      said[n->node[i].level % 2]++;
    }
    const int8_t side = said[1] ? 2 : 1;
    for (int32_t i = 0; i < n->nodes; i++)
      if (vote[i] == side) n->node[i].kept = false;
    free(vote);
    if (said[0] || said[1]) continue;
    if (least == INT64_MAX) break;
    bar = 2 * least;
  }
  naive_enough(n);
}

static void compare_node(const naive *n, const pkv_tree_node *nodes, int32_t id, int32_t i) {
  const naive_node *node = &n->node[i];
  const pkv_tree_node *got = &nodes[id];
  const int32_t up = naive_up(n, i);
  int32_t seen = INT32_MAX, start = up >= 0 ? n->node[up].depth : 0;
  for (int32_t rank = node->first; rank < node->end; rank++)
    if (first_seen(n, rank) < seen) seen = first_seen(n, rank);
  if (seen > start) start = seen;
  REQUIRE(got->first_rank == node->first && got->ranks == node->end - node->first &&
              got->first_unit == start && got->units == node->depth - start &&
              got->depth == node->level,
          "node %d: ranks %d + %d, units %d + %d, depth %d; expected %d + %d, %d + %d, %d", id,
          got->first_rank, got->ranks, got->first_unit, got->units, got->depth, node->first,
          node->end - node->first, start, node->depth - start, node->level);
  REQUIRE((got->parent < 0) == (up < 0), "node %d: parent %d", id, got->parent);
  if (up >= 0)
    REQUIRE(nodes[got->parent].first_rank == n->node[up].first &&
                nodes[got->parent].ranks == n->node[up].end - n->node[up].first,
            "node %d: parent %d", id, got->parent);
}

void tree_plan_compare(const pkv_plan *plan, const tree_batch *b) {
  const pkv_tree_view v = pkv_tree_view_of(plan);
  naive n = {.plan = plan, .tree = v.tree, .b = b, .rows = b->rows};
  const size_t rows = (size_t)b->rows;
  n.share = zeros(rows * rows, sizeof(int32_t));
  n.leader = zeros(rows, sizeof(int32_t));
  n.units = zeros(rows, sizeof(int32_t));
  n.order = zeros(rows, sizeof(int32_t));
  n.node = zeros(rows, sizeof(naive_node));
  naive_order(&n);
  for (int32_t rank = 0; rank < b->rows; rank++)
    REQUIRE(v.ranks[rank].row == n.order[rank], "rank %d is row %d, expected %d", rank,
            v.ranks[rank].row, n.order[rank]);
  naive_nodes(&n);
  naive_keep(&n);
  int32_t count = 0;
  for (int32_t first = 0; first < b->rows; first++)
    for (int32_t level = 0; level < b->rows; level++)
      for (int32_t i = 0; i < n.nodes; i++) {
        if (!n.node[i].kept || n.node[i].first != first || n.node[i].level != level) continue;
        REQUIRE(count < v.tree->nodes, "%d nodes, more are expected", v.tree->nodes);
        compare_node(&n, v.nodes, count++, i);
      }
  REQUIRE(count == v.tree->nodes, "%d nodes, expected %d", v.tree->nodes, count);
  free(n.share);
  free(n.leader);
  free(n.units);
  free(n.order);
  free(n.node);
}

pkv_plan *tree_plan_make(const pkv_shape *shape, const pkv_plan_options *options,
                         const tree_batch *b, const pkv_sharing *sharing) {
  pkv_error err = {PKV_OK, NULL, {0}};
  size_t bytes, workspace;
  int32_t longest = 0;
  for (int32_t row = 0; row < b->rows; row++)
    if (b->seq_len[row] > longest) longest = b->seq_len[row];
  if (pkv_plan_size(&bytes, &workspace, shape, options, b->rows, longest, &err))
    fail_msg("size: %s", err.text);
  void *memory = NULL;
  assert_int_equal(posix_memalign(&memory, 64, bytes), 0);
  memset(memory, 0xa5, bytes);
  const pkv_sharing from_table = tree_batch_sharing(b);
  const pkv_plan *plan;
  if (pkv_plan_build_shared(&plan, memory, bytes, shape, options, b->rows, b->seq_len,
                            sharing ? sharing : &from_table, &err))
    fail_msg("build: %s", err.text);
  REQUIRE((const void *)plan == memory, "the plan is not at the start of its memory");
  REQUIRE((size_t)plan->plan_bytes <= bytes, "plan %lld, promised %zu", (long long)plan->plan_bytes,
          bytes);
  REQUIRE((size_t)plan->workspace_bytes <= workspace, "workspace %lld, promised %zu",
          (long long)plan->workspace_bytes, workspace);
  if (pkv_plan_check(plan, bytes, &err)) fail_msg("check: %s", err.text);
  tree_plan_walk(plan, b);
  return memory;
}
