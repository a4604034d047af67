/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The core of `shared`: how block tables become a tree of nodes (here) and the tree equal-cost
 * parts (tree_cuts.h). Inline, integer, without libc, so that the host's compiler and nvcc compile
 * the same text. Every function works on one row, rank, gap or cursor and reads only what earlier
 * phases wrote: the host calls them in loops, the device in threads with a barrier between phases.
 *
 * The definition
 *   shareable  e(r) = floor(max(0, L - q_len + 1) / unit_tokens) units of row r are seen whole by
 *              all its queries.
 *   shared     share(r, s) = most units k <= min(e(r), e(s)) whose pages, ceil(k * unit_tokens /
 *              page_tokens) from the start on, have equal ids in both rows. With PKV_TABLE_CHAINED
 *              equality of the last of these pages stands for all. Entries before a window count
 *              like any other, whatever they hold.
 *   leader     d(r) = max over s < r of share(r, s), 0 for the first row; p(r) = the smallest s < r
 *              with share(r, s) >= d(r), none when d(r) = 0. These pairs are the whole tree.
 *   ranks      Depth-first over the leaders: after a row come the rows that it leads, those with
 *              the largest d first, then by index; rows without a leader by index. Sharers are
 *              neighbours in it, and share(rank - 1, rank) = d(rank): lcp of the gap before it.
 *              (The usual order by page ids gives the same nodes. It is not used because it needs a
 *              sort of strings; d and p need one search a row, all rows at once.)
 *   nodes      Of every gap g with lcp > 0 the largest run of ranks around it whose inner gaps all
 *              have lcp >= lcp[g]; gaps of one run with equal lcp are one node, named by the
 *              leftmost, its *rep*. It ends at unit lcp[rep] and starts where its nearest kept
 *              ancestor ends (with a window not before the first unit that one of its rows sees).
 *   keeping    At first all nodes are kept. net = what dropping a node would cost minus what it
 *              costs itself, on the line of costs (pkv_tree_net): a dropped node's units are read
 *              by its kept children and, privately, by its other rows. Rounds: candidates are the
 *              kept nodes with net <= 0, and those with net <= bar on paths longer than
 *              PKV_TREE_MAX_PATH. Of the candidates those at odd depth among kept nodes are
 *              dropped together or, if there are none, all (they are at even depths: never a node
 *              and its parent). bar starts at 0; when there is no candidate and a path is too long,
 *              bar = 2 * (the least net on such paths); else the rounds end. So the nodes that save
 *              least collapse first, in few rounds also in chains of hundreds.
 *   enough     With PKV_PLAN_ENOUGH_SHARED all nodes go when the rounds have ended if those left
 *              save less than one in PKV_TREE_ENOUGH of the units that the rows read: to run them
 *              beside the private parts costs more (docs/notes/cuda-shared.md).
 *   bounds     nodes <= rows - 1; a row is in at most PKV_TREE_MAX_PATH of them; node segments <=
 *              kv_heads * (rows - 1 + floor(PKV_TREE_MAX_PATH * rows / most_tile_ranks)).
 */
#ifndef PKV_PLAN_TREE_CORE_H
#define PKV_PLAN_TREE_CORE_H

#include "plan/plan_core.h"
#include "plan/plan_tree.h"

/* Rows and gaps are packed into sort keys. */
#define PKV_TREE_MAX_ROWS  ((1 << 19) - 2)
#define PKV_TREE_UNIT_BITS 26 /* 2^31 tokens are 2^25 units */

/* Of so many units that rows read nodes have to save one. */
#define PKV_TREE_ENOUGH 20

/* A count that several threads raise; sums of integers do not depend on the order. */
#ifdef __CUDA_ARCH__
#define PKV_TREE_ADD(counter, value) ((void)atomicAdd((counter), (value)))
#else
#define PKV_TREE_ADD(counter, value) ((void)(*(counter) += (value)))
#endif

/* Before a loop: a device takes longer to fetch instructions that run once than to run them. */
#ifdef __CUDACC__
#define PKV_ROLLED _Pragma("unroll 1")
#else
#define PKV_ROLLED
#endif
/* What the tree depends on besides tables and lengths. Checked by the host. */
typedef struct pkv_tree_core {
  pkv_plan_core core;
  int32_t page_tokens, most_tile_ranks;
  int32_t enough; /* whether nodes have to save that much */
  int64_t node_unit_cost, rank_unit_cost, node_segment_cost, state_cost;
} pkv_tree_core;

/* Arrays of the builders, [rows + 1] unless said; gaps are 1 .. rows - 1, rep 0 = none. */
typedef struct pkv_tree_work {
  int32_t *lcp;         /* by gap; 0 at gaps 0 and rows */
  int32_t *rep;         /* by gap: rep of its node; 0 where lcp is 0 */
  int32_t *first, *end; /* by rep: ranks [first, end) of the node */
  int32_t *up;          /* by rep: nearest kept ancestor's rep */
  int32_t *kept;        /* by rep: 1 kept, 2 about to be dropped, 0 else */
  int32_t *kid_ranks;   /* by rep: sums over kept children of their ranks */
  int32_t *kid_tiles;   /* ... and tiles */
  int32_t *cover;       /* by gap: kept nodes that hold both its ranks, after a scan */
  int32_t *ends;        /* by rank: kept nodes that end up to it, after a scan */
  int32_t *deep;        /* by rank: kept nodes below the longest path that start before it */
  int64_t *first_sum;   /* by rank, exclusive: first visible units (windows); else NULL */
  int64_t *end_sum;     /* by rank, exclusive: units (batch-invariant); else NULL */
} pkv_tree_work;

/* ------------------------------------------------------------------------------------------
 * Sharing
 * ---------------------------------------------------------------------------------------- */

/* Lengths are below 2^31: sums of two such values and their quotients take 32 bits. */
static inline PKV_HD int32_t pkv_tree_shareable(const pkv_plan_core *core, int32_t length) {
  if (length < core->q_len) return 0;
  return (int32_t)((uint32_t)(length - core->q_len + 1) / (uint32_t)core->unit_tokens);
}

/* Pages that hold the first `units` units of a row that has them. */
static inline PKV_HD int32_t pkv_tree_pages(const pkv_tree_core *t, int32_t units) {
  const uint32_t tokens = (uint32_t)units * (uint32_t)t->core.unit_tokens;
  return (int32_t)((tokens + (uint32_t)t->page_tokens - 1) / (uint32_t)t->page_tokens);
}

/* As pkv_core_first_unit, and the unit after a row's last token. */
static inline PKV_HD int32_t pkv_tree_first_unit(const pkv_plan_core *core, int32_t length) {
  if (core->window == 0) return 0;
  const uint32_t token = (uint32_t)pkv_core_first_token(core->q_len, core->window, length);
  return (int32_t)(token / (uint32_t)core->unit_tokens);
}
static inline PKV_HD int32_t pkv_tree_end_unit(const pkv_plan_core *core, int32_t length) {
  const uint32_t unit = (uint32_t)core->unit_tokens;
  return (int32_t)(((uint32_t)length + unit - 1) / unit);
}

/*
 * Candidates: the key of the first k units is the sum over their pages of this; with
 * PKV_TABLE_CHAINED the last page's id. Different keys: different pages. Equal keys are confirmed.
 */
static inline PKV_HD uint64_t pkv_tree_mix(int32_t id, int64_t index) {
  uint64_t x = ((uint64_t)index << 32 | (uint32_t)id) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
  x = (x ^ x >> 29) * 0xa0761d6478bd642fu;
  return x ^ x >> 32;
}

/* ------------------------------------------------------------------------------------------
 * Ranks from leaders: siblings sorted, then places in the depth-first list by pointer jumping
 * ---------------------------------------------------------------------------------------- */

/* d and p of a row in a word: the greatest is the deepest, then the smallest leader; 0: none. */
static inline PKV_HD uint64_t pkv_tree_found(int32_t units, int32_t leader) {
  return (uint64_t)(uint32_t)units << 32 | (uint32_t)(INT32_MAX - leader);
}
static inline PKV_HD int32_t pkv_tree_found_units(uint64_t found) {
  return (int32_t)(found >> 32);
}
static inline PKV_HD int32_t pkv_tree_found_leader(uint64_t found) {
  return found ? INT32_MAX - (int32_t)(uint32_t)found : -1;
}

/* Sorts rows by leader (none first), then d from large to small, then index. */
static inline PKV_HD uint64_t pkv_tree_sort_key(int32_t row, int32_t leader, int32_t units) {
  const uint64_t deepest = ((uint64_t)1 << PKV_TREE_UNIT_BITS) - 1;
  return (uint64_t)(leader + 1) << (19 + PKV_TREE_UNIT_BITS) | (deepest - (uint64_t)units) << 19 |
         (uint64_t)row;
}
/* Behind all rows, no two alike: for places of a table past them. */
static inline PKV_HD uint64_t pkv_tree_no_key(int32_t place) {
  return ~(uint64_t)0 << 19 | (uint64_t)place;
}
static inline PKV_HD int32_t pkv_tree_key_row(uint64_t key) {
  return (int32_t)(key & (((uint64_t)1 << 19) - 1));
}
static inline PKV_HD int32_t pkv_tree_key_leader(uint64_t key) {
  return (int32_t)(key >> (19 + PKV_TREE_UNIT_BITS)) - 1;
}
/* Equal for rows with one leader at one depth. */
static inline PKV_HD uint64_t pkv_tree_key_group(uint64_t key) {
  return key >> 19;
}

/* One exchange of a bitonic sort of a power of two of keys: block k, distance j, element i. */
static inline PKV_HD void pkv_tree_exchange(uint64_t *keys, uint32_t i, uint32_t j, uint32_t k) {
  const uint32_t other = i ^ j;
  if (other <= i) return;
  const uint64_t a = keys[i], b = keys[other];
  if ((a > b) != ((i & k) == 0)) return;
  keys[i] = b;
  keys[other] = a;
}

/*
 * The list enters and leaves every row: element 2r enters r, 2r + 1 leaves it. links[e] =
 * {next element, rows entered from e on before the next}; the last element is its own next.
 * Position i of the sorted keys sets what it knows: the sibling after it, its leader's first row.
 */
typedef struct pkv_tree_link {
  int32_t next, rows;
} pkv_tree_link;

/* First for every row ... */
static inline PKV_HD void pkv_tree_link_init(pkv_tree_link *links, int32_t row) {
  links[2 * row].next = 2 * row + 1; /* unless it leads somebody */
  links[2 * row].rows = 1;
  links[2 * row + 1].rows = 0;
}
/* ... then for every place of the sorted keys. */
static inline PKV_HD void pkv_tree_link_sorted(pkv_tree_link *links, const uint64_t *keys,
                                               int32_t i, int32_t rows) {
  const int32_t row = pkv_tree_key_row(keys[i]), leader = pkv_tree_key_leader(keys[i]);
  const int alike = i + 1 < rows && pkv_tree_key_leader(keys[i + 1]) == leader;
  const int32_t leave = 2 * row + 1;
  links[leave].next = alike         ? 2 * pkv_tree_key_row(keys[i + 1])
                      : leader >= 0 ? 2 * leader + 1
                                    : leave;
  if (leader >= 0 && (i == 0 || pkv_tree_key_leader(keys[i - 1]) != leader))
    links[2 * leader].next = 2 * row;
}
/* Rounds from one array to another for all elements until 4^rounds >= 2 * rows: three jumps each.
   The last element has no rows: what jumps onto it again adds nothing. */
static inline PKV_HD void pkv_tree_link_jump(pkv_tree_link *to, const pkv_tree_link *from,
                                             int32_t element) {
  pkv_tree_link here = from[element];
  for (int32_t i = 0; i < 3; i++) {
    const pkv_tree_link there = from[here.next];
    here.next = there.next;
    here.rows += there.rows;
  }
  to[element] = here;
}
/* Rows entered from here on, itself included, are those that come after it. */
static inline PKV_HD int32_t pkv_tree_link_rank(const pkv_tree_link *links, int32_t row,
                                                int32_t rows) {
  return rows - links[2 * row].rows;
}

/* ------------------------------------------------------------------------------------------
 * Nodes from gaps
 * ---------------------------------------------------------------------------------------- */

/*
 * table[level][i] = min of x[i .. i + 2^level - 1], for 0 <= i <= last - 2^level + 1; rows of the
 * table are `stride` apart, level 0 is x itself.
 */
static inline PKV_HD void pkv_tree_min_level(int32_t *table, int32_t stride, int32_t level,
                                             int32_t i) {
  const int32_t *below = table + (int64_t)(level - 1) * stride;
  const int32_t a = below[i], b = below[i + (1 << (level - 1))];
  table[(int64_t)level * stride + i] = a < b ? a : b;
}
static inline PKV_HD int32_t pkv_tree_min_levels(int32_t last) {
  int32_t levels = 1;
  PKV_ROLLED while (1 << levels <= last + 1) levels++;
  return levels;
}
/* min of x[from .. to] */
static inline PKV_HD int32_t pkv_tree_least(const int32_t *table, int32_t stride, int32_t from,
                                            int32_t to) {
  int32_t level = 0;
  PKV_ROLLED while (2 << level <= to - from + 1) level++;
  const int32_t *row = table + (int64_t)level * stride;
  const int32_t a = row[from], b = row[to + 1 - (1 << level)];
  return a < b ? a : b;
}
/* The first i >= from with x[i] < bound; last + 1: none. */
static inline PKV_HD int32_t pkv_tree_find_right(const int32_t *table, int32_t stride,
                                                 int32_t levels, int32_t last, int32_t from,
                                                 int32_t bound) {
  PKV_ROLLED for (int32_t level = levels - 1; level >= 0; level--) {
    const int32_t end = from + (1 << level) - 1;
    if (end <= last && table[(int64_t)level * stride + from] >= bound) from = end + 1;
  }
  return from;
}

/* A gap's node: ranks [first, end) and its rep. A row that fills more than a tile is not shared. */
static inline PKV_HD void pkv_tree_gap(const pkv_tree_core *t, const pkv_tree_work *w, int32_t gap,
                                       int32_t first, int32_t end, int32_t rep) {
  const int node = w->lcp[gap] > 0 && t->most_tile_ranks > 0;
  w->rep[gap] = node ? rep : 0;
  w->kept[gap] = node && rep == gap;
  w->first[gap] = first;
  w->end[gap] = end;
  w->up[gap] = 0;
}

/* From gaps alone: a node lies between the nearest gaps of smaller lcp, which are its first and
   end; its parent is the node of the larger of them. For all reps when all gaps are set. */
static inline PKV_HD void pkv_tree_parent(const pkv_tree_work *w, int32_t gap) {
  if (!w->kept[gap]) return;
  const int32_t left = w->first[gap], right = w->end[gap];
  w->up[gap] = w->rep[w->lcp[left] > w->lcp[right] ? left : right];
}

/*
 * From leaders, without looking for anything: the row at place i of the sorted keys follows its
 * leader at depth d, and so do the rows of its group, [begin, end) of the places; the node is the
 * leader with what follows it at that depth or deeper. A group of the same leader at a smaller d
 * comes next in the keys: the parent's; or else the parent is the leader's own node. up is that
 * rank negated until all gaps are set. links: ranked.
 */
static inline PKV_HD void pkv_tree_place_gap(const pkv_tree_core *t, const pkv_tree_work *w,
                                             const uint64_t *keys, const pkv_tree_link *links,
                                             int32_t i) {
  const int32_t rows = t->core.rows, leader = pkv_tree_key_leader(keys[i]);
  const int32_t gap = pkv_tree_link_rank(links, pkv_tree_key_row(keys[i]), rows);
  if (leader < 0) {
    pkv_tree_gap(t, w, gap, 0, 0, 0);
    return;
  }
  const uint64_t group = pkv_tree_key_group(keys[i]);
  int32_t begin = i, low = -1, last_in = i, high = rows;     /* the group: begin .. high - 1 */
  PKV_ROLLED while (begin - low > 1 || high - last_in > 1) { /* both ends at once */
    const int32_t before = low + (begin - low) / 2, behind = last_in + (high - last_in) / 2;
    const uint64_t a = pkv_tree_key_group(keys[before < 0 ? 0 : before]);
    const uint64_t b = pkv_tree_key_group(keys[behind]);
    if (begin - low > 1) {
      if (a == group)
        begin = before;
      else
        low = before;
    }
    if (high - last_in > 1) {
      if (b == group)
        last_in = behind;
      else
        high = behind;
    }
  }
  const int32_t first = pkv_tree_link_rank(links, leader, rows);
  const int32_t last = pkv_tree_key_row(keys[high - 1]);
  pkv_tree_gap(t, w, gap, first, rows - links[2 * last + 1].rows,
               pkv_tree_link_rank(links, pkv_tree_key_row(keys[begin]), rows));
  if (high < rows && pkv_tree_key_leader(keys[high]) == leader)
    w->up[gap] = pkv_tree_link_rank(links, pkv_tree_key_row(keys[high]), rows);
  else
    w->up[gap] = -first;
}
static inline PKV_HD void pkv_tree_place_parent(const pkv_tree_work *w, int32_t gap) {
  if (w->up[gap] < 0) w->up[gap] = w->rep[-w->up[gap]];
  if (!w->kept[gap]) w->up[gap] = 0;
}

/* ------------------------------------------------------------------------------------------
 * Keeping
 * ---------------------------------------------------------------------------------------- */

static inline PKV_HD int32_t pkv_tree_tiles(const pkv_tree_core *t, int32_t ranks) {
  return (ranks + t->most_tile_ranks - 1) / t->most_tile_ranks;
}

/* Start of a round, for gaps 0 .. rows. */
static inline PKV_HD void pkv_tree_round_clear(const pkv_tree_work *w, int32_t gap) {
  w->kid_ranks[gap] = 0;
  w->kid_tiles[gap] = 0;
  w->cover[gap] = 0;
  w->ends[gap] = 0;
  w->deep[gap] = 0;
}
/* Then for every gap; cover and ends are summed up inclusively afterwards. */
static inline PKV_HD void pkv_tree_round_count(const pkv_tree_core *t, const pkv_tree_work *w,
                                               int32_t gap) {
  if (!w->kept[gap]) return;
  const int32_t ranks = w->end[gap] - w->first[gap], up = w->up[gap];
  PKV_TREE_ADD(&w->cover[w->first[gap] + 1], 1);
  PKV_TREE_ADD(&w->cover[w->end[gap]], -1);
  PKV_TREE_ADD(&w->ends[w->end[gap]], 1);
  if (up == 0) return;
  PKV_TREE_ADD(&w->kid_ranks[up], ranks);
  PKV_TREE_ADD(&w->kid_tiles[up], pkv_tree_tiles(t, ranks));
}
/* Kept nodes above a kept node: the gap itself is in it and in those only. */
static inline PKV_HD int32_t pkv_tree_level(const pkv_tree_work *w, int32_t gap) {
  return w->cover[gap] - 1;
}
/* Number of a kept node in preorder: those that ended before it starts, and its ancestors. */
static inline PKV_HD int32_t pkv_tree_number(const pkv_tree_work *w, int32_t gap) {
  return w->ends[w->first[gap]] + pkv_tree_level(w, gap);
}
/* Whether a path is too long because of a kept node. */
static inline PKV_HD int pkv_tree_too_low(const pkv_tree_work *w, int32_t gap) {
  return w->kept[gap] && pkv_tree_level(w, gap) >= PKV_TREE_MAX_PATH;
}
/* Where some path is too long, for every gap; deep is summed up inclusively afterwards. */
static inline PKV_HD void pkv_tree_round_deep(const pkv_tree_work *w, int32_t gap) {
  if (pkv_tree_too_low(w, gap)) PKV_TREE_ADD(&w->deep[w->first[gap] + 1], 1);
}
/* Whether a kept node lies on such a path: one below it, or it, starts among its ranks. */
static inline PKV_HD int pkv_tree_is_deep(const pkv_tree_work *w, int32_t gap) {
  return w->deep[w->end[gap]] > w->deep[w->first[gap]];
}

/* Where a kept node starts, with a window on average over its rows. */
static inline PKV_HD int64_t pkv_tree_seen_from(const pkv_tree_work *w, int32_t gap) {
  const int32_t up = w->up[gap], first = w->first[gap], end = w->end[gap];
  const int64_t start = up ? w->lcp[up] : 0;
  if (!w->first_sum) return start;
  const int64_t mean = (w->first_sum[end] - w->first_sum[first]) / (end - first);
  return mean > start ? mean : start;
}

/*
 * What dropping a kept node would add to the line of costs, minus what it takes up there. A state
 * is written and read once a node and row (batch-invariant: once a unit); a row whose only node
 * this is has private states because of it.
 */
static inline PKV_HD int64_t pkv_tree_net(const pkv_tree_core *t, const pkv_tree_work *w,
                                          int32_t gap) {
  const int32_t ranks = w->end[gap] - w->first[gap], root = w->up[gap] == 0;
  const int64_t direct = ranks - w->kid_ranks[gap], tiles = pkv_tree_tiles(t, ranks);
  const int64_t units = w->lcp[gap] - pkv_tree_seen_from(w, gap);
  if (units <= 0) return -1;
  const int64_t drop = units * (t->node_unit_cost * w->kid_tiles[gap] +
                                t->rank_unit_cost * w->kid_ranks[gap] + t->core.unit_cost * direct);
  const int64_t keep = tiles * (t->node_segment_cost + units * t->node_unit_cost) +
                       units * t->rank_unit_cost * ranks;
  int64_t states = ranks + (root ? direct : 0);
  if (t->core.batch_invariant) {
    const int64_t mean =
        pkv_core_div_up(w->end_sum[w->end[gap]] - w->end_sum[w->first[gap]], ranks);
    states = root ? direct * (mean > w->lcp[gap] ? mean - w->lcp[gap] + units : units) : 0;
  }
  return drop - keep - states * t->state_cost;
}

/* What a round's candidates have in common. */
typedef struct pkv_tree_vote {
  int32_t odd, even;  /* candidates by depth, or whether there are any */
  int64_t least_deep; /* least net of the nodes on too long paths; INT64_MAX: there are none */
} pkv_tree_vote;

/* A kept node's vote: 1 candidate at odd depth, 2 at even depth, 0 none; *deep_net: its net when it
   lies on a too long path, else INT64_MAX. */
static inline PKV_HD int32_t pkv_tree_round_vote(const pkv_tree_core *t, const pkv_tree_work *w,
                                                 int32_t gap, int64_t bar, int64_t *deep_net) {
  const int64_t net = pkv_tree_net(t, w, gap);
  const int deep = pkv_tree_is_deep(w, gap);
  *deep_net = deep ? net : INT64_MAX;
  if (net > 0 && !(deep && net <= bar)) return 0;
  return pkv_tree_level(w, gap) % 2 ? 1 : 2;
}

/* Units that a kept node saves, and those that a row reads by itself; whether all nodes save
   enough. */
static inline PKV_HD int64_t pkv_tree_saved(const pkv_tree_work *w, int32_t gap) {
  const int64_t units = w->lcp[gap] - pkv_tree_seen_from(w, gap);
  return units > 0 ? units * (w->end[gap] - w->first[gap] - 1) : 0;
}
static inline PKV_HD int64_t pkv_tree_row_units(const pkv_plan_core *core, int32_t length) {
  return pkv_tree_end_unit(core, length) - pkv_tree_first_unit(core, length);
}
static inline PKV_HD int pkv_tree_is_enough(int64_t saved, int64_t units) {
  return saved * PKV_TREE_ENOUGH >= units;
}
/* For gaps 0 .. rows: there is no node. */
static inline PKV_HD void pkv_tree_forget(const pkv_tree_work *w, int32_t gap) {
  w->kept[gap] = 0;
  w->up[gap] = 0;
  w->cover[gap] = 0;
  w->ends[gap] = 0;
}

/* A dropped node's descendants move up to its parent, which is kept. Before kept is cleared. */
static inline PKV_HD void pkv_tree_round_relink(const pkv_tree_work *w, int32_t gap) {
  const int32_t up = w->up[gap];
  if (up && w->kept[up] == 2) w->up[gap] = w->up[up];
}

/* ------------------------------------------------------------------------------------------
 * Nodes and ranks of the plan
 * ---------------------------------------------------------------------------------------- */

/* The deepest kept node that holds a rank; 0: none. */
static inline PKV_HD int32_t pkv_tree_leaf(const pkv_tree_work *w, int32_t rank, int32_t rows) {
  int32_t best = 0;
  PKV_ROLLED for (int32_t gap = rank; gap <= rank + 1 && gap < rows; gap++) {
    int32_t node = gap > 0 ? w->rep[gap] : 0;
    if (node && !w->kept[node]) node = w->up[node];
    if (node && (best == 0 || w->lcp[node] > w->lcp[best])) best = node;
  }
  return best;
}

/* All of a rank but row and length, which are there, and base_slot. */
static inline PKV_HD void pkv_tree_fill_rank(pkv_tree_rank *rank, const pkv_tree_core *t,
                                             const pkv_tree_work *w, int32_t id) {
  const int32_t leaf = pkv_tree_leaf(w, id, t->core.rows);
  int32_t first = pkv_tree_first_unit(&t->core, rank->length), depth = 0;
  const int32_t end = pkv_tree_end_unit(&t->core, rank->length);
  if (leaf) {
    depth = pkv_tree_level(w, leaf) + 1;
    if (w->lcp[leaf] > first) first = w->lcp[leaf];
  }
  rank->pad = 0;
  rank->first_unit = first;
  rank->units = end - first;
  rank->depth = depth;
  int32_t node = leaf;
  PKV_ROLLED for (int32_t i = PKV_TREE_MAX_PATH - 1; i >= 0; i--) {
    rank->path[i] = i < depth ? pkv_tree_number(w, node) : -1;
    if (i < depth) node = w->up[node];
  }
}

/*
 * All of a node but first_segment and base_slot. seen_from: with a window the least first visible
 * unit of its rows, else 0; table_row: a row of the node that sees as much.
 */
static inline PKV_HD void pkv_tree_fill_node(pkv_tree_node *node, const pkv_tree_core *t,
                                             const pkv_tree_work *w, int32_t gap, int32_t seen_from,
                                             int32_t table_row) {
  const int32_t up = w->up[gap];
  const int32_t start = up && w->lcp[up] > seen_from ? w->lcp[up] : seen_from;
  node->first_rank = w->first[gap];
  node->ranks = w->end[gap] - w->first[gap];
  node->table_row = table_row;
  node->first_unit = start;
  node->units = w->lcp[gap] - start;
  node->parent = up ? pkv_tree_number(w, up) : -1;
  node->tiles = pkv_tree_tiles(t, node->ranks);
  node->tile_ranks = (node->ranks + node->tiles - 1) / node->tiles;
  node->depth = pkv_tree_level(w, gap);
  node->pad = 0;
}

#endif
