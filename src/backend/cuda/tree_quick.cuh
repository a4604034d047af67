/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The last step of the planner of `shared` (tree.cu) for most batches: no window, not
 * batch-invariant, a thread a row and a thread a cursor, leader, depth and row of a sort key in 32
 * bits. The same bytes as tree_block_plan gives, from the same definitions (plan/tree_core.h,
 * plan/tree_cuts.h), but what a row, a node or a cursor knows stays in its thread's registers:
 *
 *   sort     4 keys a thread in registers, two warps for 256 rows, eight for 1,024
 *   groups   where rows of one leader and depth begin and end: from ballots, not searched
 *   nodes    by the thread that has a group's first place; what they cover and where they end is
 *            one packed sum over ranks
 *   sums     within warps by shuffles, over warps by one reduction instruction
 *   slots    a warp for 128 segments: it finds its first cursor by ballots
 *
 * Whoever includes this has defined what tree_block_impl.h asks for.
 */
#ifndef PKV_CUDA_TREE_QUICK_CUH
#define PKV_CUDA_TREE_QUICK_CUH

#define QUICK_KEYS     4    /* sorted by a thread */
#define QUICK_SORTED   128  /* keys of a warp */
#define QUICK_ROWS     1024 /* at most, and threads */
#define QUICK_WARPS    (QUICK_ROWS / 32)
#define QUICK_SEGMENTS 128 /* whose first slots a warp writes at a time */

/* Bits of a key: leader + 1, depth reversed, row. */
struct tree_quick_bits {
  int32_t row, units;
};

/* Beside the desk. */
struct tree_quick_memory {
  uint4 keys[QUICK_ROWS / 4 + 2];
  uint32_t heads[QUICK_WARPS];                            /* a bit a place: groups begin */
  uint32_t totals[QUICK_WARPS], more_totals[QUICK_WARPS]; /* of warps */
  pkv_tree_sums node_totals[QUICK_WARPS], all;
  uint32_t votes[2][QUICK_WARPS]; /* of warps, in turns */
  int32_t balance[2][QUICK_WARPS];
  uint64_t least[2][QUICK_WARPS];
};

struct tree_quick_place {
  int32_t begin, end; /* of the group */
};

static __device__ __forceinline__ int32_t quick_lane() {
  return (int32_t)threadIdx.x % 32;
}
static __device__ __forceinline__ int32_t quick_warp() {
  return (int32_t)threadIdx.x / 32;
}

static __device__ __forceinline__ uint32_t quick_upto(uint32_t x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(ALL_LANES, x, step);
    if (quick_lane() >= step) x += other;
  }
  return x;
}
/* Of a word a warp: those of warps [from, to). */
static __device__ __forceinline__ uint32_t quick_over_warps(const uint32_t *totals, int32_t from,
                                                            int32_t to) {
  const int32_t lane = quick_lane();
  return __reduce_add_sync(ALL_LANES, lane >= from && lane < to ? totals[lane] : 0u);
}

/* ------------------------------------------------------------------------------------------
 * Order
 * ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void quick_exchange(uint32_t &a, uint32_t &b, bool up) {
  const uint32_t low = min(a, b), high = max(a, b);
  a = up ? low : high;
  b = up ? high : low;
}

/* Ascending; `count` 256, 512 or 1,024. The first count / QUICK_KEYS threads. */
static __device__ __forceinline__ void quick_sort(uint4 *keys, uint32_t count) {
  const uint32_t first = threadIdx.x * QUICK_KEYS;
  uint4 *mine = keys + threadIdx.x;
  const uint4 start = *mine;
  uint32_t key[QUICK_KEYS] = {start.x, start.y, start.z, start.w};
  quick_exchange(key[0], key[1], true);
  quick_exchange(key[2], key[3], false);
  PKV_ROLLED for (uint32_t k = QUICK_KEYS; k <= count; k *= 2) {
    const bool up = (first & k) == 0;
    PKV_ROLLED for (uint32_t j = k / 2; j >= QUICK_KEYS; j /= 2) {
      const bool low = ((first & j) == 0) == up;
      uint4 other;
      if (j >= QUICK_SORTED) { /* of another warp */
        *mine = make_uint4(key[0], key[1], key[2], key[3]);
        TREE_MEET(count / QUICK_KEYS);
        other = keys[(first ^ j) / QUICK_KEYS];
        TREE_MEET(count / QUICK_KEYS);
      } else {
        const int far = (int)(j / QUICK_KEYS);
        other.x = __shfl_xor_sync(ALL_LANES, key[0], far);
        other.y = __shfl_xor_sync(ALL_LANES, key[1], far);
        other.z = __shfl_xor_sync(ALL_LANES, key[2], far);
        other.w = __shfl_xor_sync(ALL_LANES, key[3], far);
      }
      key[0] = low ? min(key[0], other.x) : max(key[0], other.x);
      key[1] = low ? min(key[1], other.y) : max(key[1], other.y);
      key[2] = low ? min(key[2], other.z) : max(key[2], other.z);
      key[3] = low ? min(key[3], other.w) : max(key[3], other.w);
    }
    quick_exchange(key[0], key[2], up);
    quick_exchange(key[1], key[3], up);
    quick_exchange(key[0], key[1], up);
    quick_exchange(key[2], key[3], up);
  }
  *mine = make_uint4(key[0], key[1], key[2], key[3]);
}

static __device__ __forceinline__ int32_t quick_row(uint32_t key, tree_quick_bits bits) {
  return (int32_t)(key & ((1u << bits.row) - 1));
}
static __device__ __forceinline__ int32_t quick_leader(uint32_t key, tree_quick_bits bits) {
  return (int32_t)(key >> (bits.row + bits.units)) - 1;
}

/* The group of this thread's place, one of `rows`, from the bits where groups begin. */
static __device__ __forceinline__ tree_quick_place quick_group(const uint32_t *heads,
                                                               int32_t rows) {
  const int32_t lane = quick_lane(), warp = quick_warp();
  const uint32_t word = lane < (int32_t)blockDim.x / 32 ? heads[lane] : 0;
  const uint32_t some = __ballot_sync(ALL_LANES, word != 0), mine = heads[warp];
  const uint32_t below = some & ((1u << warp) - 1), above = some & ~((2u << warp) - 1);
  const int32_t last = below ? 31 - __clz((int)below) : 0, next = above ? __ffs((int)above) - 1 : 0;
  const uint32_t word_last = __shfl_sync(ALL_LANES, word, last);
  const uint32_t word_next = __shfl_sync(ALL_LANES, word, next);
  const uint32_t upto = mine & ((2u << lane) - 1), behind = mine & ~((2u << lane) - 1);
  tree_quick_place p;
  p.begin = upto ? warp * 32 + 31 - __clz((int)upto) : last * 32 + 31 - __clz((int)word_last);
  p.end = behind  ? warp * 32 + __ffs((int)behind) - 1
          : above ? next * 32 + __ffs((int)word_next) - 1
                  : rows;
  return p;
}

/* An element of the list in a word: the next one, and rows from here on (pkv_tree_link). */
#define QUICK_LINK(next, rows) ((uint32_t)(next) | (uint32_t)(rows) << 11)
static __device__ __forceinline__ uint32_t quick_jump(const uint32_t *links, int32_t element) {
  uint32_t here = links[element];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const uint32_t there = links[here & 2047];
    here = (here & ~2047u) + there;
  }
  return here;
}
static __device__ __forceinline__ int32_t quick_rank(const uint32_t *links, int32_t element,
                                                     int32_t rows) {
  return rows - (int32_t)(links[element] >> 11);
}

/* A node, with the thread that has its group's first place. */
struct tree_quick_node {
  int32_t gap; /* its rep; 0: this thread has none */
  int32_t first, end, up, units, start, ranks, tiles;
  bool kept;
};

/* Rows to ranks, gaps to nodes; found: of this thread's row. Ends without a barrier. */
static __device__ __forceinline__ tree_quick_node
quick_nodes(const pkv_tree_input *in, const pkv_tree_core *t, const pkv_tree_desk *d,
            tree_quick_memory *m, tree_quick_bits bits, uint64_t found) {
  const int32_t rows = t->core.rows, i = (int32_t)threadIdx.x, threads = (int32_t)blockDim.x;
  const pkv_tree_work *w = &d->w;
  uint32_t *keys = (uint32_t *)m->keys, *now = (uint32_t *)d->links, *then = now + 2 * rows;
  const uint32_t deepest = (1u << bits.units) - 1;
  const uint32_t sorted = rows > 512 ? 1024 : rows > 256 ? 512 : 256;
  PKV_ROLLED for (int32_t k = i; k < (int32_t)sorted; k += threads) {
    uint32_t key = ~0u;
    if (k < rows)
      key = (uint32_t)(pkv_tree_found_leader(found) + 1) << (bits.row + bits.units) |
            (deepest - (uint32_t)pkv_tree_found_units(found)) << bits.row | (uint32_t)k;
    keys[k] = key;
  }
  if (i < rows) {
    now[2 * i] = QUICK_LINK(2 * i + 1, 1); /* unless it leads somebody */
    d->segments[i + 1] = 0;                /* marks, and sums over kids */
    d->base[i + 1] = 0;
  }
  TREE_SYNC();
  if (i < (int32_t)sorted / QUICK_KEYS) quick_sort(m->keys, sorted);
  TREE_SYNC();
  const uint32_t key = i < rows ? keys[i] : ~0u, before = i > 0 && i < rows ? keys[i - 1] : ~0u;
  const uint32_t behind = i + 1 < rows ? keys[i + 1] : ~0u;
  const int32_t row = quick_row(key, bits), leader = i < rows ? quick_leader(key, bits) : -1;
  const bool head = i < rows && (i == 0 || before >> bits.row != key >> bits.row);
  const uint32_t heads = __ballot_sync(ALL_LANES, head);
  if (quick_lane() == 0) m->heads[quick_warp()] = heads;
  if (i < rows) {
    const bool alike = i + 1 < rows && quick_leader(behind, bits) == leader;
    const int32_t leave = 2 * row + 1;
    now[leave] = QUICK_LINK(alike         ? 2 * quick_row(behind, bits)
                            : leader >= 0 ? 2 * leader + 1
                                          : leave,
                            0);
    if (leader >= 0 && (i == 0 || quick_leader(before, bits) != leader))
      now[2 * leader] = QUICK_LINK(2 * row, 1);
  }
  TREE_SYNC();
  const tree_quick_place group = quick_group(m->heads, rows);
  PKV_ROLLED for (int32_t reach = 1; reach < 2 * rows; reach *= 4) {
    if (i < 2 * rows) then[i] = quick_jump(now, i);
    if (i + threads < 2 * rows) then[i + threads] = quick_jump(now, i + threads);
    TREE_SYNC();
    uint32_t *const other = now;
    now = then;
    then = other;
  }
  tree_quick_node node = {0, 0, 0, 0, 0, 0, 0, 0, false};
  if (i < rows) {
    const int32_t rank = quick_rank(now, 2 * i, rows), length = d->votes[i];
    int32_t *row_rank = (int32_t *)tree_array(in, in->tree.row_rank_at);
    int32_t *seq_len = (int32_t *)tree_array(in, in->header.seq_len_at);
    d->row[rank] = i;
    d->length[rank] = length;
    w->lcp[rank] = pkv_tree_found_units(found);
    row_rank[i] = rank;
    seq_len[i] = length;
    const int32_t gap = quick_rank(now, 2 * row, rows);
    const bool shares = leader >= 0 && t->most_tile_ranks > 0;
    w->rep[gap] = shares ? quick_rank(now, 2 * quick_row(keys[group.begin], bits), rows) : 0;
    w->kept[gap] = shares && head;
    w->up[gap] = 0;
    if (shares && head) {
      const uint32_t after = group.end < rows ? keys[group.end] : ~0u;
      node.gap = gap;
      node.first = quick_rank(now, 2 * leader, rows);
      node.end = quick_rank(now, 2 * quick_row(keys[group.end - 1], bits) + 1, rows);
      node.up = group.end < rows && quick_leader(after, bits) == leader
                    ? quick_rank(now, 2 * quick_row(after, bits), rows)
                    : -node.first;
      node.units = (int32_t)(deepest - (key >> bits.row & deepest));
      node.ranks = node.end - node.first;
      node.tiles = pkv_tree_tiles(t, node.ranks);
      node.kept = true;
      w->first[gap] = node.first;
      w->end[gap] = node.end;
    }
  }
  if (i == 0) {
    w->lcp[rows] = 0;
    pkv_tree_gap(t, w, rows, 0, 0, 0);
  }
  TREE_SYNC();
  if (node.gap) {
    if (node.up < 0) node.up = w->rep[-node.up];
    w->up[node.gap] = node.up;
    node.start = node.up ? w->lcp[node.up] : 0;
  }
  return node;
}

/* ------------------------------------------------------------------------------------------
 * Keeping
 * ---------------------------------------------------------------------------------------- */

/* marks[rank]: nodes that end up to it times 65,536, and those that hold it and the one before. */
static __device__ __forceinline__ void quick_count(const pkv_tree_desk *d,
                                                   const tree_quick_node &n) {
  if (!n.kept) return;
  atomicAdd(&d->segments[n.first + 1], 1);
  atomicAdd(&d->segments[n.end], 65535);
  if (n.up) atomicAdd(&d->base[n.up], n.tiles << 16 | n.ranks);
}

/* pkv_tree_net without a window. kids: sums over them of tiles * 65,536 + ranks. */
static __device__ __forceinline__ int64_t quick_net(const pkv_tree_core *t,
                                                    const tree_quick_node &n, uint32_t kids) {
  const int64_t units = n.units - n.start, kid_ranks = kids & 65535, kid_tiles = kids >> 16;
  const int64_t direct = n.ranks - kid_ranks;
  const int64_t drop = units * (t->node_unit_cost * kid_tiles + t->rank_unit_cost * kid_ranks +
                                t->core.unit_cost * direct);
  const int64_t keep = n.tiles * (t->node_segment_cost + units * t->node_unit_cost) +
                       units * t->rank_unit_cost * n.ranks;
  return drop - keep - (n.ranks + (n.up == 0 ? direct : 0)) * t->state_cost;
}

/* Votes of all, or'ed; *least: of all threads'. One barrier; turn: not that of the call before. */
static __device__ __forceinline__ uint32_t quick_vote(tree_quick_memory *m, int turn, int32_t said,
                                                      uint64_t *least) {
  const int32_t lane = quick_lane(), warps = (int32_t)blockDim.x / 32;
  const uint32_t of_warp = __reduce_or_sync(ALL_LANES, (unsigned)said);
  const auto lowest = [](uint64_t x) {
    PKV_ROLLED for (int step = 16; step > 0; step /= 2) {
      const uint64_t other = __shfl_xor_sync(ALL_LANES, (unsigned long long)x, step);
      if (other < x) x = other;
    }
    return x;
  };
  if (least) *least = lowest(*least);
  if (lane == 0) m->votes[turn][quick_warp()] = of_warp;
  if (lane == 0 && least) m->least[turn][quick_warp()] = *least;
  TREE_SYNC();
  if (least) *least = lowest(lane < warps ? m->least[turn][lane] : UINT64_MAX);
  return __reduce_or_sync(ALL_LANES, lane < warps ? m->votes[turn][lane] : 0u);
}

/* Which side of the kept nodes goes, where paths are too long: as tree_block_keep has it. low: this
   thread's node is below the longest path. turn: of the vote before. */
static __device__ __forceinline__ uint32_t quick_vote_deep(const pkv_tree_desk *d,
                                                           tree_quick_memory *m,
                                                           const tree_quick_node &n, bool low,
                                                           int32_t side, int64_t net, int32_t rows,
                                                           int *turn, int64_t *bar, int32_t *said) {
  const int32_t i = (int32_t)threadIdx.x, warp = quick_warp();
  int32_t *marks = d->w.deep;
  if (i < rows) marks[i + 1] = 0;
  if (i == 0) marks[0] = 0;
  TREE_SYNC();
  if (low) atomicAdd(&marks[n.first + 1], 1);
  TREE_SYNC();
  uint32_t sum = quick_upto(i < rows ? (uint32_t)marks[i + 1] : 0u);
  if (quick_lane() == 31) m->totals[warp] = sum;
  TREE_SYNC();
  sum += quick_over_warps(m->totals, 0, warp);
  if (i < rows) marks[i + 1] = (int32_t)sum;
  TREE_SYNC();
  const bool deep = n.kept && marks[n.end] > marks[n.first];
  for (;;) {
    uint64_t least = deep ? (uint64_t)net : UINT64_MAX; /* used where all of them are positive */
    *said = n.kept && !(net > 0 && !(deep && net <= *bar)) ? side : 0;
    *turn ^= 1;
    const uint32_t votes = quick_vote(m, *turn, *said, &least);
    if (votes) return votes;
    *bar = 2 * (int64_t)least;
  }
}

/* The rounds of tree_block_keep, and tree_block_enough. cover and ends are set when it ends;
   row_units: of this thread's row, where it has one. */
static __device__ __forceinline__ void quick_keep(const pkv_tree_core *t, const pkv_tree_desk *d,
                                                  tree_quick_memory *m, tree_quick_node &n,
                                                  int32_t row_units) {
  const int32_t rows = t->core.rows, i = (int32_t)threadIdx.x, lane = quick_lane();
  const int32_t warp = quick_warp(), warps = (int32_t)blockDim.x / 32;
  const pkv_tree_work *w = &d->w;
  int64_t bar = 0;
  int turn = 0;
  quick_count(d, n);
  for (;;) {
    TREE_SYNC();
    uint32_t sum = quick_upto(i < rows ? (uint32_t)d->segments[i + 1] : 0u);
    const uint32_t kids = n.kept ? (uint32_t)d->base[n.gap] : 0u;
    if (lane == 31) m->totals[warp] = sum;
    TREE_SYNC();
    sum += quick_over_warps(m->totals, 0, warp);
    if (i < rows) {
      w->cover[i + 1] = (int32_t)(sum & 65535);
      w->ends[i + 1] = (int32_t)(sum >> 16);
      d->segments[i + 1] = 0;
      d->base[i + 1] = 0;
    }
    if (i == 0) w->cover[0] = w->ends[0] = 0;
    TREE_SYNC();
    int32_t side = 0, said = 0, balance = -row_units;
    int64_t net = 0;
    if (n.kept) {
      const int32_t level = w->cover[n.gap] - 1;
      net = quick_net(t, n, kids);
      side = level % 2 ? 1 : 2;
      said = (net > 0 ? 0 : side) | (level >= PKV_TREE_MAX_PATH ? 4 : 0);
      balance += PKV_TREE_ENOUGH * (n.units - n.start) * (n.ranks - 1);
      w->kid_ranks[n.gap] = w->ends[n.first] + level; /* its number in preorder */
    }
    balance = __reduce_add_sync(ALL_LANES, balance);
    turn ^= 1;
    if (lane == 0) m->balance[turn][warp] = balance;
    uint32_t votes = quick_vote(m, turn, said, NULL);
    if (votes == 0) {
      balance = __reduce_add_sync(ALL_LANES, lane < warps ? m->balance[turn][lane] : 0);
      if (!t->enough || balance >= 0) return;
      if (i < rows) pkv_tree_forget(w, i + 1);
      if (i == 0) pkv_tree_forget(w, 0);
      n.kept = false;
      TREE_SYNC();
      return;
    }
    if (votes & 4)
      votes = quick_vote_deep(d, m, n, (said & 4) != 0, side, net, rows, &turn, &bar, &said);
    const bool goes = n.kept && (said & 3) == (votes & 1 ? 1 : 2);
    if (goes) w->kept[n.gap] = 2;
    TREE_SYNC();
    if (n.gap && n.up && w->kept[n.up] == 2) {
      n.up = w->up[n.up];
      n.start = n.up ? w->lcp[n.up] : 0;
      w->up[n.gap] = n.up;
    }
    TREE_SYNC();
    if (goes) w->kept[n.gap] = 0;
    n.kept = n.kept && !goes;
    quick_count(d, n);
  }
}

/* ------------------------------------------------------------------------------------------
 * Nodes and ranks
 * ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ pkv_tree_sums quick_plus(pkv_tree_sums a, pkv_tree_sums b) {
  a.cost += b.cost;
  a.segments += b.segments;
  a.slots += b.slots;
  return a;
}

/* Sums over the nodes before each, in preorder; m->all. Two barriers at most, none at the end. */
static __device__ __forceinline__ void quick_node_sums(const pkv_tree_input *in,
                                                       const pkv_tree_core *t,
                                                       const pkv_tree_desk *d, tree_quick_memory *m,
                                                       int32_t count) {
  int64_t *node_cost = (int64_t *)tree_array(in, in->tree.node_cost_at);
  const int32_t id = (int32_t)threadIdx.x, lane = quick_lane(), warp = quick_warp();
  pkv_tree_sums one = {0, 0, 0}, upto;
  if (warp * 32 < count) {
    if (id < count) one = pkv_tree_node_sums(t, &d->nodes[id]);
    upto = one;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      pkv_tree_sums other;
      other.cost = __shfl_up_sync(ALL_LANES, (long long)upto.cost, step);
      other.segments = __shfl_up_sync(ALL_LANES, upto.segments, step);
      other.slots = __shfl_up_sync(ALL_LANES, upto.slots, step);
      if (lane >= step) upto = quick_plus(upto, other);
    }
    if (lane == 31) m->node_totals[warp] = upto;
  }
  if (count > 32) {
    TREE_SYNC();
    PKV_ROLLED for (int32_t k = 0; k < warp && warp * 32 < count; k++) upto =
        quick_plus(upto, m->node_totals[k]);
  }
  if (id < count) {
    d->nodes[id].first_segment = d->segments[id] = upto.segments - one.segments;
    d->nodes[id].base_slot = upto.slots - one.slots;
    node_cost[id] = d->cost[id] = upto.cost - one.cost;
    if (id == count - 1) {
      m->all = upto;
      node_cost[count] = d->cost[count] = upto.cost;
    }
  }
  if (count == 0 && id == 0) {
    m->all = one;
    node_cost[0] = d->cost[0] = 0;
  }
}

/* What pkv_tree_fill_rank finds of a rank, without a window; the numbers of nodes are in kid_ranks.
   base_slot is left. */
static __device__ __forceinline__ pkv_tree_rank quick_rank_of(const pkv_tree_core *t,
                                                              const pkv_tree_desk *d, int32_t id) {
  const pkv_tree_work *w = &d->w;
  int32_t left = w->rep[id], right = w->rep[id + 1]; /* 0 at both ends; so are kept, up and lcp */
  left = w->kept[left] ? left : w->up[left];
  right = w->kept[right] ? right : w->up[right];
  int32_t node = w->lcp[right] > w->lcp[left] ? right : left;
  pkv_tree_rank r;
  r.row = d->row[id];
  r.length = d->length[id];
  r.first_unit = node ? w->lcp[node] : 0;
  r.units = pkv_tree_end_unit(&t->core, r.length) - r.first_unit;
  r.depth = node ? w->cover[node] : 0;
#pragma unroll
  for (int i = PKV_TREE_MAX_PATH - 1; i >= 0; i--) {
    r.path[i] = -1;
    if (i >= r.depth) continue;
    r.path[i] = w->kid_ranks[node];
    node = w->up[node];
  }
  r.base_slot = r.pad = 0;
  return r;
}
static __device__ __forceinline__ void quick_put(pkv_tree_rank *at, const pkv_tree_rank &r) {
  uint4 *to = (uint4 *)(void *)at;
  to[0] =
      make_uint4((uint32_t)r.row, (uint32_t)r.length, (uint32_t)r.first_unit, (uint32_t)r.units);
  to[1] =
      make_uint4((uint32_t)r.depth, (uint32_t)r.path[0], (uint32_t)r.path[1], (uint32_t)r.path[2]);
  to[2] =
      make_uint4((uint32_t)r.path[3], (uint32_t)r.path[4], (uint32_t)r.base_slot, (uint32_t)r.pad);
}

/* Records of 48, 24 and 32 bytes in vectors: words one by one, that far apart, are stored as many
   times slower. */
static __device__ __forceinline__ void quick_put(pkv_node_cursor *at, const pkv_node_cursor &c) {
  uint2 *to = (uint2 *)(void *)at;
  to[0] = make_uint2((uint32_t)c.node, (uint32_t)c.kv_head);
  to[1] = make_uint2((uint32_t)c.tile, (uint32_t)c.unit);
  to[2] = make_uint2((uint32_t)c.slot, (uint32_t)c.segment);
}
static __device__ __forceinline__ void quick_put(pkv_private_cursor *at,
                                                 const pkv_private_cursor &c) {
  uint4 *to = (uint4 *)(void *)at;
  to[0] = make_uint4((uint32_t)c.rank, (uint32_t)c.kv_head, (uint32_t)c.unit, (uint32_t)c.slot);
  to[1] =
      make_uint4((uint32_t)c.row, (uint32_t)c.length, (uint32_t)c.first_unit, (uint32_t)c.depth);
}

/* Ranks, nodes and their sums; returns how many nodes there are. Ends with a barrier. */
static __device__ __forceinline__ int32_t quick_fill(const pkv_tree_input *in,
                                                     const pkv_tree_core *t, const pkv_tree_desk *d,
                                                     tree_quick_memory *m, const tree_quick_node &n,
                                                     int32_t *shared_ranks) {
  static_assert(PKV_TREE_MAX_PATH == 5 && sizeof(pkv_tree_rank) == 48 &&
                    sizeof(pkv_node_cursor) == 24 && sizeof(pkv_private_cursor) == 32,
                "quick_put");
  const int32_t rows = t->core.rows, id = (int32_t)threadIdx.x, lane = quick_lane();
  const int32_t warp = quick_warp(), warps = (int32_t)blockDim.x / 32;
  const pkv_tree_work *w = &d->w;
  int64_t *rank_cost = (int64_t *)tree_array(in, in->tree.rank_cost_at);
  pkv_tree_rank rank = {};
  if (id < rows) rank = quick_rank_of(t, d, id);
  if (n.kept)
    pkv_tree_fill_node(&d->nodes[pkv_tree_number(w, n.gap)], t, w, n.gap, 0, d->row[n.first]);
  const uint32_t upto = quick_upto((uint32_t)rank.units);
  const uint32_t share = __ballot_sync(ALL_LANES, rank.depth > 0);
  if (lane == 31) m->totals[warp] = upto;
  if (lane == 31) m->more_totals[warp] = (uint32_t)__popc(share);
  TREE_SYNC();
  const int32_t count = w->ends[rows];
  const int64_t heads = t->core.kv_heads;
  const int64_t before = quick_over_warps(m->totals, 0, warp) + upto - (uint32_t)rank.units;
  const int32_t shared_before =
      (int32_t)quick_over_warps(m->more_totals, 0, warp) + __popc(share & ((1u << lane) - 1));
  const int64_t all = quick_over_warps(m->totals, 0, warps);
  *shared_ranks = (int32_t)quick_over_warps(m->more_totals, 0, warps);
  const auto cost = [&](int64_t ranks, int64_t of) {
    return heads * (ranks * t->core.segment_cost + of * t->core.unit_cost);
  };
  if (id < rows) {
    rank.base_slot = (int32_t)heads * shared_before;
    quick_put(&d->ranks[id], rank);
    quick_put((pkv_tree_rank *)tree_array(in, in->tree.ranks_at) + id, rank);
    rank_cost[id] = d->rank_cost[id] = cost(id, before);
  }
  if (id == 0) rank_cost[rows] = d->rank_cost[rows] = cost(rows, all);
  quick_node_sums(in, t, d, m, count);
  TREE_SYNC();
  return count;
}

/* ------------------------------------------------------------------------------------------
 * Parts and slots
 * ---------------------------------------------------------------------------------------- */

/* The thread of the first private cursor: those of node cursors are before it. */
static __host__ __device__ __forceinline__ int32_t quick_private_thread(int32_t parts) {
  return (parts + 32) / 32 * 32;
}

/* Cursors of both lines; d->marks and d->starts as tree_block_cut leaves them. Ends with a
   barrier. */
static __device__ __forceinline__ void quick_cut(const pkv_tree_input *in, const pkv_tree_core *t,
                                                 const pkv_tree_desk *d, tree_quick_memory *m,
                                                 int32_t count, int32_t rank_slots, int64_t total) {
  const int32_t parts = t->core.parts, heads = t->core.kv_heads, i = (int32_t)threadIdx.x;
  const int32_t lane = quick_lane(), warp = quick_warp(), from = quick_private_thread(parts);
  const int32_t k = i - from;
  const bool is_node = i <= parts, is_private = k >= 0 && k <= 2 * parts;
  const pkv_tree_sums all = m->all;
  const pkv_tree_line line = pkv_tree_line_of(total, all.cost, parts);
  int2 *at = (int2 *)(void *)d->private_cursors; /* segment and unit of each cursor */
  pkv_node_cursor node = {};
  pkv_private_cursor own = {};
  if (is_node) {
    pkv_tree_node_cursor(&node, t, d->nodes, d->cost, count, &all, pkv_tree_node_cut(&line, i));
    at[i] = make_int2(node.segment, node.unit);
  }
  if (is_private) {
    pkv_tree_private_cursor(&own, t, d->ranks, d->rank_cost, rank_slots,
                            pkv_tree_private_cut(&line, k));
    const int32_t segment = own.rank * heads + own.kv_head;
    at[parts + 1 + k] = make_int2(segment, own.unit);
    d->starts[k] = segment;
  }
  TREE_SYNC();
  uint32_t mark = 0;
  if (is_node && i > 0 && i < parts) {
    const int2 b = at[i - 1];
    pkv_node_cursor before = {};
    before.segment = b.x;
    before.unit = b.y;
    mark = (uint32_t)pkv_tree_node_mark(t, d->nodes, &before, &node);
  }
  if (is_private && k > 0 && k < 2 * parts) {
    const int2 b = at[parts + k];
    const bool same = b.x == own.rank * heads + own.kv_head;
    if (own.unit > 0 && !(same && b.y == own.unit))
      mark = own.depth == 0 && !(same && b.y > 0) ? 2 : 1;
  }
  uint32_t sum = quick_upto(mark);
  if (lane == 31) m->totals[warp] = sum;
  TREE_SYNC();
  const uint32_t of_nodes = quick_over_warps(m->totals, 0, from / 32);
  sum += quick_over_warps(m->totals, is_node || k < 0 ? 0 : from / 32, warp);
  if (is_node) {
    pkv_node_cursor *out = (pkv_node_cursor *)tree_array(in, in->tree.node_cursors_at);
    pkv_tree_node_place(&node, t, d->nodes, (int32_t)sum);
    d->marks[i] = (int32_t)sum;
    quick_put(&d->node_cursors[i], node);
    quick_put(&out[i], node);
  }
  if (is_private) {
    pkv_private_cursor *out = (pkv_private_cursor *)tree_array(in, in->tree.private_cursors_at);
    pkv_tree_private_place(&own, t, d->ranks, (int32_t)sum);
    d->marks[parts + 1 + k] = (int32_t)(of_nodes + sum);
    quick_put(&out[k], own);
  }
  TREE_SYNC();
}

/* How many of the `count` ascending words, at most 1,024, are less than x. The whole warp, one x.
 */
static __device__ __forceinline__ int32_t quick_less(const int32_t *words, int32_t count,
                                                     int32_t x) {
  const int32_t lane = quick_lane(), step = (count + 31) / 32, at = lane * step;
  const int32_t some =
      __popc(__ballot_sync(ALL_LANES, at < count && words[min(at, count - 1)] < x));
  if (some == 0) return 0;
  const int32_t first = (some - 1) * step + 1, next = first + lane; /* words before are less */
  const bool less = lane < step - 1 && next < count && words[min(next, count - 1)] < x;
  return first + __popc(__ballot_sync(ALL_LANES, less));
}

/* First slots of QUICK_SEGMENTS private segments from s0 on, a multiple of that. The whole warp. */
static __device__ __forceinline__ void
quick_private_slots(const pkv_tree_core *t, const pkv_tree_desk *d, int32_t *slot, int32_t s0) {
  const int32_t parts = t->core.parts, heads = t->core.kv_heads, cursors = 2 * parts + 1;
  const int32_t *sums = d->marks + parts + 1, lane = quick_lane();
  const int32_t first = s0 + 4 * lane, end = t->core.rows * heads, nodes = d->marks[parts];
  int32_t c = quick_less(d->starts, cursors, s0), before[4] = {c, c, c, c}; /* cursors */
  for (;; c += 32) {
    const int32_t start = c + lane < cursors ? d->starts[c + lane] : INT32_MAX;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int32_t less = 0; /* of the lanes' starts: those of lanes below it */
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const int32_t other = __shfl_sync(ALL_LANES, start, less + step - 1);
        if (other < first + j) less += step;
      }
      if (__shfl_sync(ALL_LANES, start, less) < first + j) less++;
      before[j] += less;
    }
    if (__shfl_sync(ALL_LANES, start, 31) >= s0 + QUICK_SEGMENTS - 1) break;
  }
  if (first >= end) return;
  int32_t rank = first / heads, head = first - rank * heads, out[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (head == heads) {
      head = 0;
      rank++;
    }
    const pkv_tree_rank *r = &d->ranks[min(rank, t->core.rows - 1)];
    out[j] = r->base_slot - nodes + pkv_tree_head_slots(t, r) * head + sums[max(before[j] - 1, 0)];
    head++;
  }
  if (first + 4 <= end) {
    *(int4 *)(slot + first) = make_int4(out[0], out[1], out[2], out[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 3; j++)
    if (first + j < end) slot[first + j] = out[j];
}

/* First slots of 32 segments of the node line. */
static __device__ __forceinline__ void quick_node_slots(const pkv_tree_core *t,
                                                        const pkv_tree_desk *d, int32_t *slot,
                                                        int32_t segment, int32_t segments,
                                                        int32_t count) {
  if (segment >= segments) return;
  const int32_t node = pkv_tree_find_node(d->segments, count, segment);
  slot[segment] = pkv_tree_node_base(t, &d->nodes[node], segment) +
                  d->marks[pkv_tree_find_node_cursor(d->node_cursors, t->core.parts, segment)];
}

static __device__ __forceinline__ void quick_slots(const pkv_tree_input *in, const pkv_tree_core *t,
                                                   const pkv_tree_desk *d, int32_t count,
                                                   int32_t segments) {
  const int32_t warps = (int32_t)blockDim.x / 32, node_turns = (segments + 31) / 32;
  const int32_t all = t->core.rows * t->core.kv_heads;
  const int32_t turns = node_turns + (all + QUICK_SEGMENTS - 1) / QUICK_SEGMENTS;
  int32_t *node_slot = (int32_t *)tree_array(in, in->tree.node_slot_at);
  int32_t *slot = (int32_t *)tree_array(in, in->tree.private_slot_at);
  PKV_ROLLED for (int32_t turn = quick_warp(); turn < turns; turn += warps) {
    if (turn < node_turns)
      quick_node_slots(t, d, node_slot, turn * 32 + quick_lane(), segments, count);
    else
      quick_private_slots(t, d, slot, (turn - node_turns) * QUICK_SEGMENTS);
  }
}

/* Nodes from the desk to the plan. */
static __device__ __forceinline__ void quick_copy(const pkv_tree_input *in, const pkv_tree_desk *d,
                                                  int32_t count) {
  static_assert(sizeof(pkv_tree_node) % 16 == 0, "vectors");
  const int32_t words = count * (int32_t)(sizeof(pkv_tree_node) / 16);
  TREE_FOR(i, words)
    ((uint4 *)tree_array(in, in->tree.nodes_at))[i] = ((const uint4 *)(const void *)d->nodes)[i];
}

/* d: begun. As many threads as rows and, from quick_private_thread on, private cursors. */
static __device__ __forceinline__ void quick_plan(const pkv_tree_input *in, const pkv_tree_core *t,
                                                  const pkv_tree_desk *d, tree_quick_memory *m,
                                                  tree_quick_bits bits) {
  const int32_t rows = t->core.rows, i = (int32_t)threadIdx.x;
  uint64_t found = i < rows ? in->found[i] : 0;
  if (in->found[rows]) {
    const pkv_tree_core copy = *t; /* whose address is known: t's stays in registers */
    tree_block_again(in, &copy, d->keys);
    found = i < rows ? in->found[i] : 0;
  }
  tree_quick_node node = quick_nodes(in, t, d, m, bits, found);
  const int32_t units = i < rows ? (int32_t)pkv_tree_row_units(&t->core, d->length[i]) : 0;
  quick_keep(t, d, m, node, units);
  int32_t shared_ranks = 0;
  const int32_t count = quick_fill(in, t, d, m, node, &shared_ranks);
  const int64_t total = m->all.cost + d->rank_cost[rows];
  const int32_t rank_slots = shared_ranks * t->core.kv_heads;
  quick_cut(in, t, d, m, count, rank_slots, total);
  const pkv_tree_sums all = m->all;
  if (i == (int32_t)blockDim.x - 1) tree_block_finish(in, d, rows, count, &all, rank_slots, total);
  quick_copy(in, d, count);
  quick_slots(in, t, d, count, all.segments);
}

#endif
