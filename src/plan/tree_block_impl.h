/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `shared` by a device: the phases of tree_core.h and tree_cuts.h for blocks of threads. Whoever
 * includes this defines first what a block is; a loop over one thread will do (the tests' twin):
 *   TREE_FN                     what functions of a block are declared with
 *   TREE_FOR(i, count)          i = 0 .. count - 1, shared out among the threads
 *   TREE_FOR_LAST(i, count)     the same by other threads, where there are enough: what one loop
 *                               does need not wait for the other's
 *   TREE_ONE                    true in one thread
 *   TREE_SYNC()                 a barrier; memory is seen after it
 *   tree_any(x)                 or of all threads' x, with a barrier
 *   tree_least32/64(x)          the least, likewise
 *   tree_sum64(x)               the sum, likewise
 *   tree_scan(a, b, c, d, e, n) inclusive sums in place over n entries of each of two arrays of 64
 *                               bits and three of 32, NULL ones apart; barriers before and after
 *   tree_sort(keys, n)          ascending; n a power of two, all keys differ, barriers before and
 *                               after
 *   tree_claim(keys, first, slots, key, row)  the slot of a key in a table of `slots` (a power of
 *                               two; PKV_TREE_NO_KEY = free), first[slot] lowered to row. Called by
 *                               whole warps; row INT32_MAX: nothing is entered
 *   tree_raise(to, value)       *to = the larger, whoever else does the same
 *   TREE_INLINE, TREE_UNROLL    always inlined; loops of constant length unrolled
 *   TREE_ABREAST                before a loop whose loads should not wait for each other
 *   TREE_SELDOM                 as TREE_FN, kept out of line
 * Three steps, each needing the one before whole: a block a row writes the keys of its units; a
 * block a unit finds the rows that lead there (beyond PKV_TREE_LEVEL_ROWS rows: a block a row its
 * leader); one block makes the plan. Whoever comes first writes the plan's headers and zeros.
 *
 * Keys are sums over all pages up to a unit. Where pages are shared with all before them, as every
 * prefix cache has it, the pages of the unit alone will do, and there is no first step (`local`):
 * where a unit finds two rows of equal pages whose pages in the unit before differ, the last step
 * begins again by the other way.
 */
#ifndef PKV_PLAN_TREE_BLOCK_IMPL_H
#define PKV_PLAN_TREE_BLOCK_IMPL_H

#include "plan/tree_desk.h"

TREE_FN pkv_tree_core tree_core_of(const pkv_tree_input *in) {
  pkv_tree_core t;
  t.core = pkv_plan_core_of(&in->header);
  t.page_tokens = in->header.page_tokens;
  t.most_tile_ranks = in->tree.most_tile_ranks;
  t.enough = (in->header.flags & PKV_PLAN_ENOUGH_SHARED) != 0;
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
  return units < in->max_units ? units : in->max_units;
}

/* ------------------------------------------------------------------------------------------
 * First step, a block a row: keys. sums: room for one value a unit of `most` units
 * ---------------------------------------------------------------------------------------- */

/* Word i of 8 bytes of a plan before anything is known: the headers as prepared, else zeros. */
TREE_INLINE uint64_t tree_blank_word(const pkv_tree_input *in, int64_t i) {
  const int64_t tree = i - in->header.tree_at / 8;
  if (i < (int64_t)(sizeof in->header / 8)) return ((const uint64_t *)(const void *)&in->header)[i];
  if (tree >= 0 && tree < (int64_t)(sizeof in->tree / 8))
    return ((const uint64_t *)(const void *)&in->tree)[tree];
  return 0;
}

TREE_FN void tree_row_keys(const pkv_tree_input *in, int32_t row, int64_t *sums, int32_t most) {
  const pkv_tree_core t = tree_core_of(in);
  const int32_t units = tree_shareable(in, &t, row);
  const int32_t *ids = in->block_table + row * in->block_table_stride;
  uint64_t carry = 0;
  if (in->chained) {
    TREE_FOR(unit, units)
      in->keys[(int64_t)unit * t.core.rows + row] = (uint32_t)ids[pkv_tree_pages(&t, unit + 1) - 1];
    return;
  }
  PKV_ROLLED for (int32_t from = 0; from < units; from += most) {
    const int32_t count = units - from < most ? units - from : most;
    TREE_FOR(i, count) {
      const int32_t end = pkv_tree_pages(&t, from + i + 1);
      uint64_t sum = 0;
      TREE_ABREAST for (int32_t page = pkv_tree_pages(&t, from + i); page < end; page++) sum +=
          pkv_tree_mix(ids[page], page);
      sums[i] = (int64_t)sum;
    }
    tree_scan(sums, 0, 0, 0, 0, count);
    TREE_FOR(i, count)
      in->keys[(int64_t)(from + i) * t.core.rows + row] = carry + (uint64_t)sums[i];
    carry += (uint64_t)sums[count - 1];
    TREE_SYNC();
  }
}

/* ------------------------------------------------------------------------------------------
 * Second step, a block a row: its leader
 * ---------------------------------------------------------------------------------------- */

#define PKV_TREE_MAX_PROBES 7
#define PKV_TREE_LEVEL_ROWS 2048
#define PKV_TREE_NO_KEY     (~(uint64_t)0)

/*
 * The most units for which a row before this one has the same key; *leader is the first of those.
 * A step tries `probes` depths at once, so that few loads wait for each other.
 */
TREE_INLINE int32_t tree_search(const pkv_tree_input *in, const pkv_tree_core *t, int32_t row,
                                const int probes, int32_t *leader) {
  const int32_t rows = t->core.rows;
  int32_t low = 0, high = tree_shareable(in, t, row) + 1; /* low is shared, high is not */
  const int64_t more = t->core.q_len - 1; /* tokens of a row beyond its shareable ones, at least */
  PKV_ROLLED while (high - low > 1) {
    const uint32_t span = (uint32_t)(high - low);
    int32_t at[PKV_TREE_MAX_PROBES];
    int64_t tokens[PKV_TREE_MAX_PROBES];
    uint64_t own[PKV_TREE_MAX_PROBES];
    int seen = 0;
    TREE_UNROLL
    for (int i = 0; i < probes; i++) {
      at[i] = low + (int32_t)(span * (uint32_t)(i + 1) / (uint32_t)(probes + 1));
      tokens[i] = (int64_t)at[i] * t->core.unit_tokens + more;
      own[i] = at[i] > low ? in->keys[(int64_t)(at[i] - 1) * rows + row] : 0;
    }
    TREE_FOR(s, row) {
      const int32_t length = tree_length(in, s);
      uint64_t other[PKV_TREE_MAX_PROBES];
      TREE_UNROLL
      for (int i = 0; i < probes; i++) {
        const int valid = at[i] > low && length >= tokens[i];
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
    const uint64_t own = keys[row];
    const int64_t tokens = (int64_t)low * t->core.unit_tokens + more;
    TREE_FOR(s, row) {
      if (s < first && tree_length(in, s) >= tokens && keys[s] == own) first = s;
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
  const int32_t pages = pkv_tree_pages(t, least);
  int32_t differ = INT32_MAX;
  TREE_FOR(page, pages)
    if (page < differ && ids_a[page] != ids_b[page]) differ = page;
  differ = tree_least32(differ);
  if (differ == INT32_MAX) return least;
  return (int32_t)((int64_t)differ * t->page_tokens / t->core.unit_tokens);
}

/* Equal sums of other ids, once in 2^40 plans: look at every row. */
TREE_SELDOM int32_t tree_compare_all(const pkv_tree_input *in, const pkv_tree_core *t, int32_t row,
                                     int32_t *leader) {
  int32_t units = 0;
  *leader = -1;
  for (int32_t s = 0; s < row; s++) {
    const int32_t common = tree_compare(in, t, row, s);
    if (common > units) *leader = s;
    if (common > units) units = common;
  }
  return units;
}

/* ------------------------------------------------------------------------------------------
 * The same for up to PKV_TREE_LEVEL_ROWS rows, a block a unit
 * ---------------------------------------------------------------------------------------- */

/*
 * A row shares a unit when an earlier row has the same key there; its leader is the first row that
 * has it at the last unit shared. So all units are looked at side by side, and no row waits for a
 * search. Equal keys are trusted when no unit finds two rows of equal keys whose pages of the unit,
 * or whose keys of the unit before (local: pages of it), differ: then by induction all pages before
 * are equal. (Local: rows a and b of equal pages in a unit and the one before are led there by one
 * row, to which both are equal in all units up to it.)
 */
typedef struct tree_level {
  uint64_t *keys; /* [slots]: PKV_TREE_NO_KEY = free */
  int32_t *first; /* [slots]: the first row with the key */
  uint64_t *next; /* [rows]: key of the unit behind */
  int32_t *slot;  /* [rows] */
  int32_t *units; /* [rows]: shareable */
  int32_t slots;  /* a power of two, at least twice the rows */
} tree_level;

/* Returns the deepest row's units. */
TREE_FN int32_t tree_level_init(tree_level *l, const pkv_tree_input *in, const pkv_tree_core *t,
                                void *memory) {
  const int32_t rows = t->core.rows;
  int32_t least = 0;
  l->slots = pkv_tree_power(2 * rows);
  l->keys = (uint64_t *)memory;
  l->next = l->keys + l->slots;
  l->first = (int32_t *)(void *)(l->next + rows);
  l->slot = l->first + l->slots;
  l->units = l->slot + rows;
  TREE_FOR(row, rows) {
    const int32_t units = tree_shareable(in, t, row);
    l->units[row] = units;
    if (-units < least) least = -units;
  }
  return -tree_least32(least);
}

/* The first page of a unit, or, where it lies on one that began before, that one. */
TREE_FN int32_t tree_unit_page(const pkv_tree_core *t, int32_t unit) {
  const int32_t page = pkv_tree_pages(t, unit);
  return page < pkv_tree_pages(t, unit + 1) ? page : page - 1;
}

/* A row's pages [from, end) of a unit as a key. */
TREE_FN uint64_t tree_local_key(const pkv_tree_input *in, int32_t row, int32_t from, int32_t end) {
  const int32_t *ids = in->block_table + row * in->block_table_stride;
  uint64_t sum = 0;
  if (in->chained) return (uint32_t)ids[end - 1];
  TREE_ABREAST for (int32_t page = from; page < end; page++) sum += pkv_tree_mix(ids[page], page);
  return sum;
}

/* Whether two rows of equal keys differ in their unit's pages, [from, end), or before it. */
TREE_FN int tree_level_differ(const pkv_tree_input *in, const pkv_tree_core *t, int32_t unit,
                              int32_t from, int32_t end, int32_t a, int32_t b) {
  const int32_t rows = t->core.rows;
  const int32_t *ids_a = in->block_table + a * in->block_table_stride;
  const int32_t *ids_b = in->block_table + b * in->block_table_stride;
  const uint64_t *keys = in->keys + (int64_t)(unit - 1) * rows;
  int differ = unit > 0 && !in->local && keys[a] != keys[b];
  TREE_ABREAST for (int32_t page = from; page < end; page++) differ |= ids_a[page] != ids_b[page];
  return differ;
}

TREE_FN void tree_level_clear(const tree_level *l) {
  TREE_FOR(i, l->slots) {
    l->keys[i] = PKV_TREE_NO_KEY;
    l->first[i] = INT32_MAX;
  }
}

/* A table of the rows' keys at a unit. The table is clear, a barrier has passed. */
TREE_FN void tree_level_enter(const tree_level *l, const pkv_tree_input *in, const pkv_tree_core *t,
                              int32_t unit) {
  const int32_t rows = t->core.rows, whole = (rows + 31) / 32 * 32;
  const int32_t from = tree_unit_page(t, unit), end = pkv_tree_pages(t, unit + 1);
  const int32_t next_from = tree_unit_page(t, unit + 1), next_end = pkv_tree_pages(t, unit + 2);
  const uint64_t *keys = in->keys + (int64_t)unit * rows;
  TREE_FOR(row, whole) {
    const int valid = row < rows && l->units[row] > unit, more = valid && l->units[row] > unit + 1;
    uint64_t key = PKV_TREE_NO_KEY, next = PKV_TREE_NO_KEY;
    if (valid) key = in->local ? tree_local_key(in, row, from, end) : keys[row];
    if (more) next = in->local ? tree_local_key(in, row, next_from, next_end) : keys[rows + row];
    if (valid) l->next[row] = next;
    if (valid && key == PKV_TREE_NO_KEY) key = 0;
    const int32_t slot = tree_claim(l->keys, l->first, l->slots, key, valid ? row : INT32_MAX);
    if (valid) l->slot[row] = slot;
  }
}

/* Behind a barrier: raises found of the rows that share the unit and not, with the same row, the
   next: there another block raises it. */
TREE_FN void tree_level_raise(const tree_level *l, const pkv_tree_input *in, const pkv_tree_core *t,
                              int32_t unit) {
  const int32_t rows = t->core.rows, end = pkv_tree_pages(t, unit + 1);
  const int32_t from = tree_unit_page(t, in->local && unit > 0 ? unit - 1 : unit);
  int differ = 0;
  TREE_FOR(row, rows) {
    if (l->units[row] <= unit) continue;
    const int32_t first = l->first[l->slot[row]];
    if (first >= row) continue;
    if (l->next[row] != l->next[first] || l->units[row] <= unit + 1 || l->units[first] <= unit + 1)
      tree_raise(&in->found[row], pkv_tree_found(unit + 1, first));
    if (!in->chained) differ |= tree_level_differ(in, t, unit, from, end, row, first);
  }
  if (differ) in->found[rows] = 1;
}

/* probes: depths that a step of the search tries, 1 .. PKV_TREE_MAX_PROBES. */
TREE_INLINE void tree_row_leader(const pkv_tree_input *in, int32_t row, const int probes) {
  const pkv_tree_core t = tree_core_of(in);
  int32_t leader = -1, units = tree_search(in, &t, row, probes, &leader);
  if (units > 0 && !in->chained && tree_compare(in, &t, row, leader) < units)
    units = tree_compare_all(in, &t, row, &leader);
  if (TREE_ONE) {
    in->found[row] = units > 0 ? pkv_tree_found(units, leader) : 0;
  }
}

/* ------------------------------------------------------------------------------------------
 * Third step, one block: ranks, nodes, parts
 * ---------------------------------------------------------------------------------------- */

TREE_FN void *tree_array(const pkv_tree_input *in, int64_t at) {
  return (unsigned char *)in->plan + at;
}

/* All leaders from the ids themselves. */
TREE_FN void tree_block_mistrust(const pkv_tree_input *in, const pkv_tree_core *t) {
  for (int32_t row = 0; row < t->core.rows; row++) {
    int32_t leader;
    const int32_t units = tree_compare_all(in, t, row, &leader);
    if (TREE_ONE) in->found[row] = units > 0 ? pkv_tree_found(units, leader) : 0;
  }
  TREE_SYNC();
}

/* What needs no step before: the lengths, by row, where votes will be. */
TREE_FN void tree_block_begin(const pkv_tree_input *in, const pkv_tree_core *t,
                              const pkv_tree_desk *d) {
  TREE_FOR(row, t->core.rows)
    d->votes[row] = tree_length(in, row);
}

/* All leaders once more, where equal keys belong to different pages: by keys of all pages where
   they were local, else, or if that is no better, by the ids. desk: of t's rows; begun again. */
TREE_SELDOM void tree_block_again(const pkv_tree_input *in, const pkv_tree_core *t, void *desk) {
  const int32_t rows = t->core.rows;
  if (in->local && !in->chained) {
    const int32_t most = (int32_t)(pkv_tree_desk_bytes(&t->core) / 8);
    pkv_tree_input exact = *in;
    tree_level level;
    exact.local = 0;
    TREE_SYNC();
    PKV_ROLLED for (int32_t row = 0; row < rows; row++)
        tree_row_keys(&exact, row, (int64_t *)desk, most < 1024 ? most : 1024);
    TREE_FOR(i, rows + 1)
      in->found[i] = 0;
    TREE_SYNC();
    const int32_t deepest = tree_level_init(&level, &exact, t, desk);
    PKV_ROLLED for (int32_t unit = 0; unit < deepest; unit++) {
      tree_level_clear(&level);
      TREE_SYNC();
      tree_level_enter(&level, &exact, t, unit);
      TREE_SYNC();
      tree_level_raise(&level, &exact, t, unit);
      TREE_SYNC();
    }
  }
  if (in->found[rows]) tree_block_mistrust(in, t);
  pkv_tree_desk d;
  TREE_SYNC();
  pkv_tree_desk_init(&d, desk, in, &t->core);
  tree_block_begin(in, t, &d);
  TREE_SYNC();
}

/* Rows to ranks, gaps to nodes. */
TREE_FN void tree_block_order(const pkv_tree_input *in, const pkv_tree_core *t,
                              const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows, power = pkv_tree_power(rows);
  const pkv_tree_work *w = &d->w;
  int32_t *row_rank = (int32_t *)tree_array(in, in->tree.row_rank_at);
  int32_t *seq_len = (int32_t *)tree_array(in, in->header.seq_len_at);
  TREE_FOR(i, power)
    d->keys[i] = i < rows ? pkv_tree_sort_key(i, pkv_tree_found_leader(in->found[i]),
                                              pkv_tree_found_units(in->found[i]))
                          : pkv_tree_no_key(i);
  TREE_FOR(row, rows)
    pkv_tree_link_init(d->links, row);
  tree_sort(d->keys, power);
  TREE_FOR(i, rows)
    pkv_tree_link_sorted(d->links, d->keys, i, rows);
  TREE_SYNC();
  pkv_tree_link *now = d->links, *then = d->more_links;
  PKV_ROLLED for (int32_t reach = 1; reach < 2 * rows; reach *= 4) {
    TREE_FOR(element, 2 * rows)
      pkv_tree_link_jump(then, now, element);
    TREE_SYNC();
    pkv_tree_link *const other = now;
    now = then;
    then = other;
  }
  TREE_FOR(row, rows) {
    const int32_t rank = pkv_tree_link_rank(now, row, rows);
    const int32_t length = d->votes[row];
    d->row[rank] = row;
    d->length[rank] = length;
    w->lcp[rank] = pkv_tree_found_units(in->found[row]);
    row_rank[row] = rank;
    seq_len[row] = length;
  }
  if (TREE_ONE) {
    w->lcp[rows] = 0;
    pkv_tree_gap(t, w, rows, 0, 0, 0);
  }
  TREE_SYNC();
  TREE_FOR(i, rows)
    pkv_tree_place_gap(t, w, d->keys, now, i);
  TREE_FOR(i, rows + 1) {
    d->cost[i] = 0;
    d->segments[i] = 0;
    d->base[i] = 0;
  }
  TREE_SYNC();
  TREE_FOR(gap, rows)
    pkv_tree_place_parent(w, gap);
}

/* Least values of runs of 2^level entries of x[0 .. last]. */
TREE_FN void tree_block_table(const pkv_tree_desk *d, const int32_t *x, int32_t last) {
  const int32_t line = last + 2, levels = pkv_tree_min_levels(last);
  TREE_FOR(i, last + 1)
    d->table[i] = x[i];
  TREE_SYNC();
  PKV_ROLLED for (int32_t level = 1; level < levels; level++) {
    const int32_t count = last + 2 - (1 << level);
    TREE_FOR(i, count)
      pkv_tree_min_level(d->table, line, level, i);
    TREE_SYNC();
  }
}

/* Exclusive sums over ranks of what nodes average; with a window the table of first units. */
TREE_FN void tree_block_sums(const pkv_tree_core *t, const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows;
  if (t->core.window > 0) {
    TREE_FOR(i, rows)
      d->votes[i] = pkv_tree_first_unit(&t->core, d->length[i]);
    TREE_SYNC();
    tree_block_table(d, d->votes, rows - 1);
    TREE_FOR(i, rows + 1)
      d->w.first_sum[i] = i ? d->votes[i - 1] : 0;
    tree_scan(d->w.first_sum, 0, 0, 0, 0, rows + 1);
  }
  if (t->core.batch_invariant) {
    TREE_FOR(i, rows + 1)
      d->w.end_sum[i] = i ? pkv_tree_end_unit(&t->core, d->length[i - 1]) : 0;
    tree_scan(d->w.end_sum, 0, 0, 0, 0, rows + 1);
  }
}

/* Votes of all kept nodes, or'ed; *least: of those on too long paths. deep is summed up. */
TREE_FN int tree_block_vote(const pkv_tree_core *t, const pkv_tree_desk *d, int64_t bar,
                            int64_t *least) {
  int said = 0;
  *least = INT64_MAX;
  TREE_FOR(gap, t->core.rows) {
    int64_t net = INT64_MAX;
    int vote = 0;
    if (d->w.kept[gap]) {
      vote = pkv_tree_round_vote(t, &d->w, gap, bar, &net);
      if (pkv_tree_too_low(&d->w, gap)) said |= 4;
    }
    d->votes[gap] = vote;
    said |= vote;
    if (net < *least) *least = net;
  }
  return tree_any(said);
}

TREE_FN void tree_block_keep(const pkv_tree_core *t, const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows;
  const pkv_tree_work *w = &d->w;
  int64_t bar = 0, least;
  for (;;) {
    TREE_SYNC();
    TREE_FOR(gap, rows + 1)
      pkv_tree_round_clear(w, gap);
    TREE_SYNC();
    TREE_FOR(gap, rows)
      pkv_tree_round_count(t, w, gap);
    tree_scan(0, 0, w->cover, w->ends, 0, rows + 1);
    /* Seldom is a path too long: at first as if none were. */
    int said = tree_block_vote(t, d, 0, &least);
    if (said & 4) {
      TREE_FOR(gap, rows)
        pkv_tree_round_deep(w, gap);
      tree_scan(0, 0, w->deep, 0, 0, rows + 1);
      said = tree_block_vote(t, d, bar, &least);
      least = tree_least64(least);
    }
    if ((said & 3) == 0 && (said & 4) == 0) return;
    if ((said & 3) == 0) {
      bar = 2 * least;
      continue;
    }
    const int32_t side = said & 1 ? 1 : 2;
    TREE_FOR(gap, rows) {
      if (d->votes[gap] == side) w->kept[gap] = 2;
    }
    TREE_SYNC();
    TREE_FOR(gap, rows)
      pkv_tree_round_relink(w, gap);
    TREE_SYNC();
    TREE_FOR(gap, rows) {
      if (w->kept[gap] == 2) w->kept[gap] = 0;
    }
  }
}

/* All nodes go where they save too little. */
TREE_FN void tree_block_enough(const pkv_tree_core *t, const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows;
  int64_t saved = 0, units = 0;
  if (!t->enough) return;
  TREE_FOR(i, rows) {
    units += pkv_tree_row_units(&t->core, d->length[i]);
    if (d->w.kept[i]) saved += pkv_tree_saved(&d->w, i);
  }
  /* every thread's is a sum of its own: so is what is missing */
  if (tree_sum64(saved * PKV_TREE_ENOUGH - units) >= 0) return;
  TREE_FOR(gap, rows + 1)
    pkv_tree_forget(&d->w, gap);
  TREE_SYNC();
}

/* The record of a kept node, and what it adds to the sums. */
TREE_FN void tree_block_node(const pkv_tree_core *t, const pkv_tree_desk *d, int32_t gap) {
  const pkv_tree_work *w = &d->w;
  const int32_t rows = t->core.rows, id = pkv_tree_number(w, gap);
  int32_t farthest = w->first[gap], seen = 0;
  if (t->core.window > 0) {
    const int32_t levels = pkv_tree_min_levels(rows - 1), line = rows + 1;
    seen = pkv_tree_least(d->table, line, farthest, w->end[gap] - 1);
    farthest = pkv_tree_find_right(d->table, line, levels, rows - 1, farthest, seen + 1);
  }
  pkv_tree_node *node = &d->nodes[id];
  pkv_tree_fill_node(node, t, w, gap, seen, d->row[farthest]);
  const pkv_tree_sums one = pkv_tree_node_sums(t, node);
  d->cost[id + 1] = one.cost;
  d->segments[id + 1] = one.segments;
  d->base[id + 1] = one.slots;
}

/* Nodes and ranks with their sums; returns how many nodes there are. */
TREE_FN int32_t tree_block_fill(const pkv_tree_input *in, const pkv_tree_core *t,
                                const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows, count = d->w.ends[rows];
  int64_t *node_cost = (int64_t *)tree_array(in, in->tree.node_cost_at);
  int64_t *rank_cost = (int64_t *)tree_array(in, in->tree.rank_cost_at);
  TREE_FOR(i, rows) {
    pkv_tree_rank *rank = &d->ranks[i];
    rank->row = d->row[i];
    rank->length = d->length[i];
    pkv_tree_fill_rank(rank, t, &d->w, i);
    d->rank_cost[i + 1] = pkv_tree_rank_cost(t, rank);
    d->rank_base[i + 1] = pkv_tree_rank_slots(t, rank);
  }
  TREE_FOR_LAST(gap, rows)
  if (d->w.kept[gap]) tree_block_node(t, d, gap);
  if (TREE_ONE) d->rank_cost[0] = d->rank_base[0] = 0;
  tree_scan(d->cost, d->rank_cost, d->segments, d->base, d->rank_base, rows + 1);
  TREE_FOR(i, rows + 1) {
    if (i < count) {
      d->nodes[i].first_segment = d->segments[i];
      d->nodes[i].base_slot = d->base[i];
    }
    if (i <= count) node_cost[i] = d->cost[i];
    if (i < rows) d->ranks[i].base_slot = d->rank_base[i];
    rank_cost[i] = d->rank_cost[i];
  }
  TREE_SYNC();
  return count;
}

/* Cursors of both lines, placed; the marks' sums stay on the desk. */
TREE_FN void tree_block_cut(const pkv_tree_input *in, const pkv_tree_core *t,
                            const pkv_tree_desk *d, int32_t count, const pkv_tree_sums *all,
                            int32_t rank_slots, int64_t total) {
  const int32_t parts = t->core.parts, most = 3 * parts + 2;
  const pkv_tree_line line = pkv_tree_line_of(total, all->cost, parts);
  pkv_node_cursor *node_out = (pkv_node_cursor *)tree_array(in, in->tree.node_cursors_at);
  pkv_private_cursor *out = (pkv_private_cursor *)tree_array(in, in->tree.private_cursors_at);
  int32_t *marks = d->marks + parts + 1; /* of private cursors */
  TREE_FOR(i, parts + 1)
    pkv_tree_node_cursor(&d->node_cursors[i], t, d->nodes, d->cost, count, all,
                         pkv_tree_node_cut(&line, i));
  TREE_FOR_LAST(k, 2 * parts + 1)
  pkv_tree_private_cursor(&d->private_cursors[k], t, d->ranks, d->rank_cost, rank_slots,
                          pkv_tree_private_cut(&line, k));
  TREE_SYNC();
  TREE_FOR(i, parts + 1)
    d->marks[i] = i == 0 || i == parts ? 0
                                       : pkv_tree_node_mark(t, d->nodes, &d->node_cursors[i - 1],
                                                            &d->node_cursors[i]);
  TREE_FOR_LAST(k, 2 * parts + 1) {
    const pkv_private_cursor *c = &d->private_cursors[k];
    marks[k] = k == 0 || k == 2 * parts ? 0 : pkv_tree_private_mark(t, d->ranks, c - 1, c);
    d->starts[k] = c->rank * t->core.kv_heads + c->kv_head;
  }
  tree_scan(0, 0, d->marks, 0, 0, most);
  TREE_FOR(i, parts + 1) {
    pkv_tree_node_place(&d->node_cursors[i], t, d->nodes, d->marks[i]);
    node_out[i] = d->node_cursors[i];
  }
  TREE_FOR_LAST(k, 2 * parts + 1) {
    pkv_tree_private_place(&d->private_cursors[k], t, d->ranks, marks[k] - d->marks[parts]);
    out[k] = d->private_cursors[k];
  }
}

/* First slots of all segments. */
TREE_FN void tree_block_slots(const pkv_tree_input *in, const pkv_tree_core *t,
                              const pkv_tree_desk *d, int32_t count, int32_t segments) {
  const int32_t rows = t->core.rows, parts = t->core.parts, heads = t->core.kv_heads;
  const int32_t *marks = d->marks + parts + 1, before = d->marks[parts], all = rows * heads;
  int32_t *node_slot = (int32_t *)tree_array(in, in->tree.node_slot_at);
  int32_t *slot = (int32_t *)tree_array(in, in->tree.private_slot_at);
  TREE_FOR(segment, segments) {
    const int32_t node = pkv_tree_find_node(d->segments, count, segment);
    node_slot[segment] = pkv_tree_node_base(t, &d->nodes[node], segment) +
                         d->marks[pkv_tree_find_node_cursor(d->node_cursors, parts, segment)];
  }
  /* The last cursor before a segment: four neighbours' searches at once, step by step. */
  TREE_FOR_LAST(four, (all + 3) / 4) {
    int32_t last[4] = {0, 0, 0, 0};
    PKV_ROLLED for (int32_t step = pkv_tree_power(2 * parts) / 2; step > 0; step /= 2) {
      TREE_UNROLL
      for (int32_t i = 0; i < 4; i++) {
        const int32_t middle = last[i] + step;
        if (middle < 2 * parts && d->starts[middle] < 4 * four + i) last[i] = middle;
      }
    }
    TREE_UNROLL
    for (int32_t i = 0; i < 4; i++) {
      const int32_t segment = 4 * four + i, rank = segment / heads;
      if (segment >= all) continue;
      slot[segment] = d->ranks[rank].base_slot - before +
                      pkv_tree_head_slots(t, &d->ranks[rank]) * (segment - rank * heads) +
                      marks[last[i]];
    }
  }
}

/* Ranks and nodes from the desk to the plan, where they are not there already. */
TREE_FN void tree_block_copy(const pkv_tree_input *in, const pkv_tree_core *t,
                             const pkv_tree_desk *d, int32_t count) {
  const int32_t words = (int32_t)(sizeof(pkv_tree_rank) / 4);
  const int32_t node_words = (int32_t)(sizeof(pkv_tree_node) / 4);
  int32_t *ranks = (int32_t *)tree_array(in, in->tree.ranks_at);
  int32_t *nodes = (int32_t *)tree_array(in, in->tree.nodes_at);
  if (t->core.window > 0) return;
  TREE_FOR(i, t->core.rows * words)
    ranks[i] = ((const int32_t *)(const void *)d->ranks)[i];
  TREE_FOR(i, count * node_words)
    nodes[i] = ((const int32_t *)(const void *)d->nodes)[i];
}

TREE_FN void tree_block_finish(const pkv_tree_input *in, const pkv_tree_desk *d, int32_t rows,
                               int32_t count, const pkv_tree_sums *all, int32_t rank_slots,
                               int64_t total) {
  struct pkv_plan *header = in->plan;
  pkv_plan_tree *tree = (pkv_plan_tree *)tree_array(in, in->header.tree_at);
  pkv_plan_launch *launches = (pkv_plan_launch *)tree_array(in, in->header.launches_at);
  int32_t *node_slot = (int32_t *)tree_array(in, in->tree.node_slot_at);
  int32_t *slot = (int32_t *)tree_array(in, in->tree.private_slot_at);
  const int32_t parts = in->header.parts, merges = rows * in->header.kv_heads;
  const int32_t node_cuts = d->marks[parts];
  const int32_t node_slots = all->slots + node_cuts;
  const int32_t private_slots = rank_slots + d->marks[3 * parts + 1] - node_cuts;
  const int64_t slots = (int64_t)node_slots + private_slots;
  tree->nodes = count;
  tree->node_segments = all->segments;
  tree->node_cost = all->cost;
  tree->node_slots = node_slots;
  tree->private_slots = private_slots;
  node_slot[all->segments] = node_slots;
  slot[merges] = private_slots;
  header->total_cost = total;
  header->merges = merges;
  header->slots = (int32_t)slots;
  header->launches = 2;
  header->workspace_bytes =
      ((int64_t)merges * 4 + 63) / 64 * 64 + slots * pkv_plan_slot_bytes(&in->header);
  launches[0].kind = PKV_LAUNCH_FUSED;
  launches[0].count = parts;
  launches[1].kind = PKV_LAUNCH_MERGE;
  launches[1].count = merges;
}

/* d: the desk of t's rows, begun. */
TREE_INLINE void tree_block_plan(const pkv_tree_input *in, const pkv_tree_core *t,
                                 const pkv_tree_desk *d) {
  const int32_t rows = t->core.rows;
  pkv_tree_sums all = {0, 0, 0};
  int32_t count = 0, rank_slots = 0;
  int64_t total = 0;
  if (rows > 0) {
    if (in->found[rows]) tree_block_again(in, t, d->keys);
    tree_block_order(in, t, d);
    tree_block_sums(t, d);
    tree_block_keep(t, d);
    tree_block_enough(t, d);
    count = tree_block_fill(in, t, d);
    all.cost = d->cost[rows];
    all.segments = d->segments[rows];
    all.slots = d->base[rows];
    rank_slots = d->rank_base[rows];
    total = all.cost + d->rank_cost[rows];
  } else {
    if (TREE_ONE) d->cost[0] = d->rank_cost[0] = 0;
    TREE_SYNC();
  }
  tree_block_cut(in, t, d, count, &all, rank_slots, total);
  tree_block_slots(in, t, d, count, all.segments);
  tree_block_copy(in, t, d, count);
  if (TREE_ONE) tree_block_finish(in, d, rows, count, &all, rank_slots, total);
}

#endif
