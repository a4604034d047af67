/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `shared` by a device: the phases of tree_core.h and tree_cuts.h for blocks of threads. Whoever
 * includes this defines first what a block is; a loop over one thread will do (the tests' twin):
 *   TREE_FN                     what functions of a block are declared with
 *   TREE_FOR(i, count)          i = 0 .. count - 1, shared out among the threads
 *   TREE_ONE                    true in one thread
 *   TREE_SYNC()                 a barrier; memory is seen after it
 *   tree_any(x)                 or of all threads' x, with a barrier
 *   tree_least32/64(x)          the least, likewise
 *   tree_scan32/64(x, n, last)  inclusive sums in place over x[0 .. n - 1], barriers before and
 *                               after; returns the sum of all (0 for n = 0)
 *   tree_sort(keys, n)          ascending; n a power of two, barriers before and after
 *   TREE_INLINE, TREE_UNROLL    always inlined; loops of constant length unrolled
 * Three steps, each needing the one before whole: a block a row writes the keys of its units; a
 * block a row finds its leader; one block makes the plan.
 */
#ifndef PKV_PLAN_TREE_BLOCK_H
#define PKV_PLAN_TREE_BLOCK_H

#include "plan/tree_desk.h"

TREE_FN pkv_tree_core tree_core_of(const pkv_tree_input *in) {
  pkv_tree_core t;
  t.core = pkv_plan_core_of(&in->header);
  t.page_tokens = in->header.page_tokens;
  t.most_tile_ranks = in->tree.most_tile_ranks;
  t.node_unit_cost = in->tree.node_unit_cost;
  t.rank_unit_cost = in->tree.rank_unit_cost;
  t.node_segment_cost = in->tree.node_segment_cost;
  t.state_cost = in->tree.state_cost;
  return t;
}

TREE_FN int32_t tree_length(const pkv_tree_input *in, int32_t row) {
  const int32_t length = in->seq_len[row];
  return length < 0 ? 0 : length < in->max_seq_len ? length : in->max_seq_len;
}

/* Shareable units whose pages the table has. */
TREE_FN int32_t tree_shareable(const pkv_tree_input *in, const pkv_tree_core *t, int32_t row) {
  const int32_t units = pkv_tree_shareable(&t->core, tree_length(in, row));
  const int64_t there = (int64_t)in->max_pages * t->page_tokens / t->core.unit_tokens;
  return units < there ? units : (int32_t)there;
}

/* ------------------------------------------------------------------------------------------
 * First step, a block a row: keys. sums: room for one value a unit of `most` units
 * ---------------------------------------------------------------------------------------- */

TREE_FN void tree_row_keys(const pkv_tree_input *in, int32_t row, int64_t *sums, int32_t most) {
  const pkv_tree_core t = tree_core_of(in);
  const int32_t units = tree_shareable(in, &t, row);
  const int32_t *ids = in->block_table + row * in->block_table_stride;
  int64_t carry = 0;
  if (in->chained) {
    TREE_FOR(unit, units)
      in->keys[(int64_t)unit * t.core.rows + row] = (uint32_t)ids[pkv_tree_pages(&t, unit + 1) - 1];
    return;
  }
  for (int32_t from = 0; from < units; from += most) {
    const int32_t count = units - from < most ? units - from : most;
    TREE_FOR(i, count) {
      const int64_t end = pkv_tree_pages(&t, from + i + 1);
      uint64_t sum = 0;
      for (int64_t page = pkv_tree_pages(&t, from + i); page < end; page++)
        sum += pkv_tree_mix(ids[page], page);
      sums[i] = (int64_t)sum;
    }
    const int64_t all = tree_scan64(sums, count);
    TREE_FOR(i, count)
      in->keys[(int64_t)(from + i) * t.core.rows + row] = (uint64_t)carry + (uint64_t)sums[i];
    carry = (int64_t)((uint64_t)carry + (uint64_t)all);
    TREE_SYNC();
  }
}

/* ------------------------------------------------------------------------------------------
 * Second step, a block a row: its leader
 * ---------------------------------------------------------------------------------------- */

#define PKV_TREE_MAX_PROBES 7

/*
 * The most units for which a row before this one has the same key; *leader is the first of those.
 * A step tries `probes` depths at once, so that few loads wait for each other.
 */
TREE_INLINE int32_t tree_search(const pkv_tree_input *in, const pkv_tree_core *t, int32_t row,
                                const int probes, int32_t *leader) {
  const int32_t rows = t->core.rows;
  int32_t low = 0, high = tree_shareable(in, t, row) + 1; /* low is shared, high is not */
  while (high - low > 1) {
    const int32_t span = high - low;
    int32_t at[PKV_TREE_MAX_PROBES];
    uint64_t own[PKV_TREE_MAX_PROBES];
    int seen = 0;
    TREE_UNROLL
    for (int i = 0; i < probes; i++) {
      at[i] = low + (int32_t)((int64_t)span * (i + 1) / (probes + 1));
      own[i] = at[i] > low ? in->keys[(int64_t)(at[i] - 1) * rows + row] : 0;
    }
    TREE_FOR(s, row) {
      const int32_t most = tree_shareable(in, t, s);
      uint64_t other[PKV_TREE_MAX_PROBES];
      TREE_UNROLL
      for (int i = 0; i < probes; i++) {
        const int valid = at[i] > low && at[i] <= most;
        other[i] = valid ? in->keys[(int64_t)(at[i] - 1) * rows + s] : ~own[i];
      }
      TREE_UNROLL
      for (int i = 0; i < probes; i++)
        seen |= (at[i] > low && other[i] == own[i]) << i;
    }
    seen = tree_any(seen);
    TREE_UNROLL
    for (int i = 0; i < probes; i++)
      if (seen >> i & 1) low = at[i];
    TREE_UNROLL
    for (int i = probes - 1; i >= 0; i--)
      if (at[i] > low && at[i] < high) high = at[i];
  }
  int32_t first = INT32_MAX;
  if (low > 0) {
    const uint64_t *keys = in->keys + (int64_t)(low - 1) * rows;
    TREE_FOR(s, row) {
      if (s < first && tree_shareable(in, t, s) >= low && keys[s] == keys[row]) first = s;
    }
  }
  *leader = tree_least32(first);
  return low;
}

/* Units that two rows share, from their ids. */
TREE_FN int32_t tree_compare(const pkv_tree_input *in, const pkv_tree_core *t, int32_t a,
                             int32_t b) {
  const int32_t units_a = tree_shareable(in, t, a), units_b = tree_shareable(in, t, b);
  const int32_t least = units_a < units_b ? units_a : units_b;
  const int32_t *ids_a = in->block_table + a * in->block_table_stride;
  const int32_t *ids_b = in->block_table + b * in->block_table_stride;
  const int32_t pages = (int32_t)pkv_tree_pages(t, least);
  int32_t differ = INT32_MAX;
  TREE_FOR(page, pages)
    if (page < differ && ids_a[page] != ids_b[page]) differ = page;
  differ = tree_least32(differ);
  if (differ == INT32_MAX) return least;
  return (int32_t)((int64_t)differ * t->page_tokens / t->core.unit_tokens);
}

/* probes: depths that a step of the search tries, 1 .. PKV_TREE_MAX_PROBES. */
TREE_INLINE void tree_row_leader(const pkv_tree_input *in, int32_t row, const int probes) {
  const pkv_tree_core t = tree_core_of(in);
  int32_t leader = -1, units = tree_search(in, &t, row, probes, &leader);
  /* Equal sums of other ids, once in 2^40 plans: look at every row. */
  if (units > 0 && !in->chained && tree_compare(in, &t, row, leader) < units) {
    units = 0;
    for (int32_t s = 0; s < row; s++) {
      const int32_t common = tree_compare(in, &t, row, s);
      if (common > units) leader = s;
      if (common > units) units = common;
    }
  }
  if (TREE_ONE) {
    in->leader[row] = units > 0 ? leader : -1;
    in->units[row] = units;
  }
}

/* ------------------------------------------------------------------------------------------
 * Third step, one block: ranks, nodes, parts
 * ---------------------------------------------------------------------------------------- */

TREE_FN void *tree_array(const pkv_tree_input *in, int64_t at) {
  return (unsigned char *)in->plan + at;
}

/* Rows to ranks; lcp of the gaps. */
TREE_FN void tree_block_order(const pkv_tree_input *in, const pkv_tree_core *t,
                              const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows, power = pkv_tree_power(rows);
  pkv_tree_rank *ranks = (pkv_tree_rank *)tree_array(in, in->tree.ranks_at);
  int32_t *row_rank = (int32_t *)tree_array(in, in->tree.row_rank_at);
  int32_t *seq_len = (int32_t *)tree_array(in, in->header.seq_len_at);
  TREE_FOR(i, power)
    d->keys[i] = i < rows ? pkv_tree_sort_key(i, in->leader[i], in->units[i]) : ~(uint64_t)0;
  TREE_FOR(row, rows)
    pkv_tree_link_init(d->links, row);
  tree_sort(d->keys, power);
  TREE_FOR(i, rows)
    pkv_tree_link_sorted(d->links, d->keys, i, rows);
  TREE_SYNC();
  pkv_tree_link *now = d->links, *then = d->more_links;
  for (int32_t reach = 1; reach < 2 * rows; reach *= 2) {
    TREE_FOR(element, 2 * rows)
      pkv_tree_link_jump(then, now, element);
    TREE_SYNC();
    pkv_tree_link *const other = now;
    now = then;
    then = other;
  }
  TREE_FOR(row, rows) {
    const int32_t rank = pkv_tree_link_rank(now, row, rows);
    const int32_t length = tree_length(in, row);
    ranks[rank].row = row;
    ranks[rank].length = length;
    row_rank[row] = rank;
    seq_len[row] = length;
    d->w.lcp[rank] = in->units[row];
  }
  if (TREE_ONE) d->w.lcp[rows] = 0;
  TREE_SYNC();
}

/* Least values of runs of 2^level entries of x[0 .. last]. */
TREE_FN void tree_block_table(const pkv_tree_desk *d, const int32_t *x, int32_t last) {
  const int32_t line = last + 2, levels = pkv_tree_min_levels(last);
  TREE_FOR(i, last + 1)
    d->table[i] = x[i];
  TREE_SYNC();
  for (int32_t level = 1; level < levels; level++) {
    const int32_t count = last + 2 - (1 << level);
    TREE_FOR(i, count)
      pkv_tree_min_level(d->table, line, level, i);
    TREE_SYNC();
  }
}

TREE_FN void tree_block_gaps(const pkv_tree_core *t, const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows, line = rows + 2, levels = pkv_tree_min_levels(rows);
  const pkv_tree_work *w = &d->w;
  tree_block_table(d, w->lcp, rows);
  TREE_FOR(gap, rows + 1) {
    const int32_t lcp = w->lcp[gap];
    if (lcp > 0) {
      const int32_t left = pkv_tree_find_left(d->table, line, levels, gap - 1, lcp);
      const int32_t right = pkv_tree_find_right(d->table, line, levels, rows, gap + 1, lcp);
      const int32_t rep = pkv_tree_find_right(d->table, line, levels, rows, left + 1, lcp + 1);
      pkv_tree_gap(t, w, gap, left, right, rep);
    } else {
      pkv_tree_gap(t, w, gap, 0, 0, 0);
    }
  }
  TREE_SYNC();
  TREE_FOR(gap, rows + 1)
    pkv_tree_parent(w, gap);
}

/* Exclusive sums over ranks of what nodes average. */
TREE_FN void tree_block_sums(const pkv_tree_core *t, const pkv_tree_desk *d,
                             const pkv_tree_rank *ranks) {
  const int32_t rows = t->core.rows;
  if (d->w.first_sum) {
    TREE_FOR(i, rows + 1)
      d->w.first_sum[i] = i ? pkv_core_first_unit(&t->core, ranks[i - 1].length) : 0;
    tree_scan64(d->w.first_sum, rows + 1);
  }
  if (d->w.end_sum) {
    TREE_FOR(i, rows + 1)
      d->w.end_sum[i] = i ? pkv_core_div_up(ranks[i - 1].length, t->core.unit_tokens) : 0;
    tree_scan64(d->w.end_sum, rows + 1);
  }
}

TREE_FN void tree_block_keep(const pkv_tree_core *t, const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows;
  const pkv_tree_work *w = &d->w;
  int64_t bar = 0;
  for (;;) {
    TREE_SYNC();
    TREE_FOR(gap, rows + 1)
      pkv_tree_round_clear(w, gap);
    TREE_SYNC();
    TREE_FOR(gap, rows)
      pkv_tree_round_count(t, w, gap);
    tree_scan32(w->cover, rows + 1);
    TREE_FOR(gap, rows)
      pkv_tree_round_deep(w, gap);
    tree_scan32(w->deep, rows + 1);
    int said = 0;
    int64_t least = INT64_MAX;
    TREE_FOR(gap, rows) {
      int64_t net = INT64_MAX;
      d->votes[gap] = w->kept[gap] ? pkv_tree_round_vote(t, w, gap, bar, &net) : 0;
      said |= d->votes[gap];
      if (net < least) least = net;
    }
    said = tree_any(said);
    least = tree_least64(least);
    if (said == 0 && least == INT64_MAX) return;
    if (said == 0) {
      bar = 2 * least;
      continue;
    }
    const int32_t side = said & 1 ? 1 : 2;
    TREE_FOR(gap, rows)
      if (d->votes[gap] == side) w->kept[gap] = 2;
    TREE_SYNC();
    TREE_FOR(gap, rows)
      pkv_tree_round_relink(w, gap);
    TREE_SYNC();
    TREE_FOR(gap, rows)
      if (w->kept[gap] == 2) w->kept[gap] = 0;
  }
}

/* Numbers, records and sums of the nodes; returns how many there are and what they sum up to. */
TREE_FN int32_t tree_block_nodes(const pkv_tree_input *in, const pkv_tree_core *t,
                                 const pkv_tree_desk *d, pkv_tree_sums *all) {
  const int32_t rows = t->core.rows;
  const pkv_tree_work *w = &d->w;
  const pkv_tree_rank *ranks = (const pkv_tree_rank *)tree_array(in, in->tree.ranks_at);
  pkv_tree_node *nodes = (pkv_tree_node *)tree_array(in, in->tree.nodes_at);
  int64_t *node_cost = (int64_t *)tree_array(in, in->tree.node_cost_at);
  if (t->core.window > 0) {
    TREE_FOR(rank, rows)
      d->votes[rank] = pkv_core_first_unit(&t->core, ranks[rank].length);
    TREE_SYNC();
    tree_block_table(d, d->votes, rows - 1);
  }
  TREE_FOR(i, rows + 1)
    w->deep[i] = 0;
  TREE_SYNC();
  TREE_FOR(gap, rows)
    pkv_tree_count_ends(w, w->deep, gap);
  const int32_t count = (int32_t)tree_scan32(w->deep, rows + 1);
  TREE_FOR(gap, rows)
    pkv_tree_number(w, w->deep, gap);
  TREE_SYNC();
  TREE_FOR(gap, rows) {
    if (!w->kept[gap]) continue;
    int32_t farthest = w->first[gap], seen = 0;
    if (t->core.window > 0) {
      const int32_t levels = pkv_tree_min_levels(rows - 1), line = rows + 1;
      seen = pkv_tree_least(d->table, line, farthest, w->end[gap] - 1);
      farthest = pkv_tree_find_right(d->table, line, levels, rows - 1, farthest, seen + 1);
    }
    const int32_t id = w->index[gap];
    pkv_tree_node node = {0};
    pkv_tree_fill_node(&node, t, w, ranks, gap, seen, farthest);
    const pkv_tree_sums one = pkv_tree_node_sums(t, &node);
    nodes[id] = node;
    d->cost[id + 1] = one.cost;
    d->segments[id] = one.segments;
    d->base[id] = one.slots;
  }
  if (TREE_ONE) d->cost[0] = 0;
  all->cost = tree_scan64(d->cost, count + 1);
  all->segments = (int32_t)tree_scan32(d->segments, count);
  all->slots = (int32_t)tree_scan32(d->base, count);
  TREE_FOR(id, count) {
    nodes[id].first_segment = id ? d->segments[id - 1] : 0;
    nodes[id].base_slot = id ? d->base[id - 1] : 0;
  }
  TREE_FOR(id, count + 1)
    node_cost[id] = d->cost[id];
  TREE_SYNC();
  return count;
}

/* The ranks' paths, private parts and sums; returns slots if nothing is cut. */
TREE_FN int32_t tree_block_ranks(const pkv_tree_input *in, const pkv_tree_core *t,
                                 const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows;
  pkv_tree_rank *ranks = (pkv_tree_rank *)tree_array(in, in->tree.ranks_at);
  int64_t *rank_cost = (int64_t *)tree_array(in, in->tree.rank_cost_at);
  TREE_FOR(i, rows) {
    pkv_tree_rank rank = ranks[i];
    pkv_tree_fill_rank(&rank, t, &d->w, i);
    ranks[i] = rank;
    d->rank_cost[i + 1] = pkv_tree_rank_cost(t, &rank);
    d->base[i] = pkv_tree_rank_slots(t, &rank);
  }
  if (TREE_ONE) d->rank_cost[0] = 0;
  tree_scan64(d->rank_cost, rows + 1);
  const int32_t slots = (int32_t)tree_scan32(d->base, rows);
  TREE_FOR(i, rows)
    ranks[i].base_slot = i ? d->base[i - 1] : 0;
  TREE_FOR(i, rows + 1)
    rank_cost[i] = d->rank_cost[i];
  TREE_SYNC();
  return slots;
}

/* Cursors and slots of the node line; returns its slots. total: cost of both lines. */
TREE_FN int32_t tree_block_cut_nodes(const pkv_tree_input *in, const pkv_tree_core *t,
                                     const pkv_tree_desk *d, int32_t count,
                                     const pkv_tree_sums *all, int64_t total) {
  const int32_t parts = t->core.parts;
  const pkv_tree_node *nodes = (const pkv_tree_node *)tree_array(in, in->tree.nodes_at);
  pkv_node_cursor *out = (pkv_node_cursor *)tree_array(in, in->tree.node_cursors_at);
  pkv_node_cursor *cursors = d->node_cursors;
  int32_t *slots = (int32_t *)tree_array(in, in->tree.node_slot_at);
  TREE_FOR(p, parts + 1) {
    pkv_node_cursor c;
    pkv_tree_node_cursor(&c, t, nodes, d->cost, count, all,
                         pkv_tree_node_cut(total, all->cost, parts, p));
    cursors[p] = c;
  }
  TREE_SYNC();
  TREE_FOR(p, parts + 1)
    d->marks[p] =
        p > 0 && p < parts ? pkv_tree_node_mark(t, nodes, &cursors[p - 1], &cursors[p]) : 0;
  const int32_t cut = (int32_t)tree_scan32(d->marks, parts + 1);
  TREE_FOR(p, parts + 1) {
    pkv_tree_node_place(&cursors[p], t, nodes, d->marks[p]);
    out[p] = cursors[p];
  }
  TREE_SYNC();
  TREE_FOR(segment, all->segments) {
    int32_t low = 0, high = count; /* the node: d->segments are inclusive sums */
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      if (d->segments[middle - 1] <= segment)
        low = middle;
      else
        high = middle;
    }
    slots[segment] = pkv_tree_node_base(t, &nodes[low], segment) +
                     d->marks[pkv_tree_find_node_cursor(cursors, parts, segment)];
  }
  if (TREE_ONE) slots[all->segments] = all->slots + cut;
  return all->slots + cut;
}

/* The same of the private line. base: slots if nothing is cut. */
TREE_FN int32_t tree_block_cut_private(const pkv_tree_input *in, const pkv_tree_core *t,
                                       const pkv_tree_desk *d, int32_t base, int64_t node_cost,
                                       int64_t total) {
  const int32_t rows = t->core.rows, parts = t->core.parts, heads = t->core.kv_heads;
  const pkv_tree_rank *ranks = (const pkv_tree_rank *)tree_array(in, in->tree.ranks_at);
  pkv_private_cursor *out = (pkv_private_cursor *)tree_array(in, in->tree.private_cursors_at);
  pkv_private_cursor *cursors = d->private_cursors;
  int32_t *slots = (int32_t *)tree_array(in, in->tree.private_slot_at);
  TREE_FOR(i, 2 * parts + 1) {
    pkv_private_cursor c;
    const int64_t at = i == 2 * parts ? total : pkv_tree_private_cut(total, node_cost, parts, i);
    pkv_tree_private_cursor(&c, t, ranks, d->rank_cost, base, at);
    cursors[i] = c;
  }
  TREE_SYNC();
  TREE_FOR(i, 2 * parts + 1)
    d->marks[i] =
        i > 0 && i < 2 * parts ? pkv_tree_private_mark(t, ranks, &cursors[i - 1], &cursors[i]) : 0;
  const int32_t cut = (int32_t)tree_scan32(d->marks, 2 * parts + 1);
  TREE_FOR(i, 2 * parts + 1) {
    pkv_tree_private_place(&cursors[i], t, ranks, d->marks[i]);
    out[i] = cursors[i];
  }
  TREE_SYNC();
  TREE_FOR(segment, rows * heads) {
    const int32_t rank = segment / heads, head = segment % heads;
    slots[segment] = pkv_tree_private_base(t, &ranks[rank], head) +
                     d->marks[pkv_tree_find_private_cursor(cursors, parts, rank, head)];
  }
  if (TREE_ONE) slots[rows * heads] = base + cut;
  return base + cut;
}

/* The headers as prepared, then what the rows decided. */
TREE_FN void tree_block_headers(const pkv_tree_input *in, int32_t count, const pkv_tree_sums *all,
                                int32_t node_slots, int32_t private_slots, int64_t total) {
  struct pkv_plan *header = in->plan;
  pkv_plan_tree *tree = (pkv_plan_tree *)tree_array(in, in->header.tree_at);
  pkv_plan_launch *launches = (pkv_plan_launch *)tree_array(in, in->header.launches_at);
  const int32_t header_words = (int32_t)(sizeof *header / 4),
                tree_words = (int32_t)(sizeof *tree / 4);
  TREE_FOR(i, header_words)
    ((int32_t *)(void *)header)[i] = ((const int32_t *)(const void *)&in->header)[i];
  TREE_FOR(i, tree_words)
    ((int32_t *)(void *)tree)[i] = ((const int32_t *)(const void *)&in->tree)[i];
  TREE_SYNC();
  if (!TREE_ONE) return;
  const int32_t merges = in->header.rows * in->header.kv_heads;
  const int64_t slots = (int64_t)node_slots + private_slots;
  tree->nodes = count;
  tree->node_segments = all->segments;
  tree->node_cost = all->cost;
  tree->node_slots = node_slots;
  tree->private_slots = private_slots;
  header->total_cost = total;
  header->merges = merges;
  header->slots = (int32_t)slots;
  header->launches = 2;
  header->workspace_bytes = pkv_plan_slots_at(header) + slots * pkv_plan_slot_bytes(&in->header);
  launches[0].kind = PKV_LAUNCH_FUSED;
  launches[0].count = in->header.parts;
  launches[1].kind = PKV_LAUNCH_MERGE;
  launches[1].count = merges;
}

TREE_FN void tree_block_plan(const pkv_tree_input *in, void *memory) {
  const pkv_tree_core t = tree_core_of(in);
  pkv_tree_desk d;
  pkv_tree_desk_init(&d, memory, &t);
  pkv_tree_sums all = {0, 0, 0};
  int32_t count = 0, base = 0;
  int64_t total = 0;
  if (t.core.rows > 0) {
    tree_block_order(in, &t, &d);
    tree_block_gaps(&t, &d);
    tree_block_sums(&t, &d, (const pkv_tree_rank *)tree_array(in, in->tree.ranks_at));
    tree_block_keep(&t, &d);
    count = tree_block_nodes(in, &t, &d, &all);
    base = tree_block_ranks(in, &t, &d);
    total = all.cost + d.rank_cost[t.core.rows];
  } else {
    if (TREE_ONE) d.cost[0] = d.rank_cost[0] = 0;
    TREE_SYNC();
  }
  const int32_t node_slots = tree_block_cut_nodes(in, &t, &d, count, &all, total);
  TREE_SYNC();
  const int32_t private_slots = tree_block_cut_private(in, &t, &d, base, all.cost, total);
  tree_block_headers(in, count, &all, node_slots, private_slots, total);
}

#endif
