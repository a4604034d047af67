/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The core of `balanced`: how lengths become equal-cost parts. Inline, integer, without libc, so
 * that the host's compiler and nvcc compile the same text and two builders give the same bytes.
 *
 * The definition
 *   units      A row of length L is cut in units of `unit_tokens` tokens, counted from its start:
 *              64, or chunk_tokens in batch-invariant mode. The first token that its first query
 *              sees is f = max(0, L - q_len + 1 - window) with a window, else 0. The row reads
 *              units first = floor(f / unit_tokens) .. ceil(L / unit_tokens) - 1; none if L = 0.
 *   cost       A segment (row, KV head) costs segment_cost + units * unit_cost. One without units
 *              costs segment_cost, as its zeros have to be stored; a quarter of it, rounded up,
 *              where there are many segments, four a part or more (not in batch-invariant mode).
 *              unit_cost = tile_cost * unit_tokens / 64.
 *   line       Segments lie on a line of costs ordered by row, KV head; inside a segment first its
 *              segment_cost, then its units. row_cost[r] = costs of all rows before r.
 *   used       Parts that the line is cut in: all, or with PKV_PLAN_FEWER_PARTS all but what
 *              pkv_core_spare says; the others come last and are empty.
 *   cuts       Cut p = 1 .. used-1 lies at c = floor(p * total / used). Its row is the last with
 *              row_cost[row] <= c; its head follows by division. With x = c - (segment's start):
 *              x <= segment_cost cuts before the segment (unit 0), else before unit
 *              floor((2 (x - segment_cost) + unit_cost) / (2 unit_cost)), the nearest; where that
 *              equals the number of units, before the next segment (unit 0).
 *              Cursor 0 is (0, 0, 0), cursors from `used` on are (rows, 0, 0).
 *   marks      Cursors are monotone; equal ones make empty parts. For p = 1 .. parts-1:
 *              cut[p] = 1 if unit > 0 and cursor p differs from cursor p-1;
 *              seg[p] = 1 if cut[p] and cursor p-1 is not a cut (unit > 0) of the same segment;
 *              uni[p] = units of the segment if seg[p], else 0.
 *   slots      With inclusive sums C, S, U of the marks, a cursor with unit > 0 has merge S - 1 and
 *              slot C + S - 1: a segment cut k times has k + 1 pieces in consecutive slots, and the
 *              piece that ends at the cursor has the slot before. Batch-invariant: slot U - units,
 *              one slot a unit of each cut segment.
 *   bounds     slots <= 2 (parts - 1), merges <= parts - 1; batch-invariant: slots <=
 *              (parts - 1) * (most units of a row).
 * Everything but the sums is local to p, so a device needs one scan over rows and one over cursors.
 */
#ifndef PKV_PLAN_PLAN_CORE_H
#define PKV_PLAN_PLAN_CORE_H

#include "plan/plan.h"

#ifdef __CUDACC__
#define PKV_HD __host__ __device__
#else
#define PKV_HD
#endif

/* Keeps p * (total mod parts) far inside 64 bits. */
#define PKV_PLAN_MAX_PARTS 65536

/* What the cost line depends on besides the lengths. Checked by the host before it gets here. */
typedef struct pkv_plan_core {
  int32_t rows, kv_heads, q_len, window, unit_tokens, parts;
  int32_t batch_invariant;
  int32_t fewer; /* PKV_PLAN_FEWER_ bits: whether some parts may stay empty */
  int32_t used;  /* parts that are cut: a builder's, from the lengths */
  int64_t unit_cost, segment_cost, empty_cost; /* empty_cost: of a segment without units */
} pkv_plan_core;

/* Segments a part that are many. */
#define PKV_PLAN_MANY 4

/* Whether a batch has many segments for its parts: known before any length. */
static inline PKV_HD int pkv_core_many(const pkv_plan_core *core) {
  return (int64_t)core->rows * core->kv_heads >= (int64_t)PKV_PLAN_MANY * core->parts;
}

/* Segments of a batch that is few. */
#define PKV_PLAN_FEW 64

#define PKV_PLAN_FEWER_FEW  1 /* few segments */
#define PKV_PLAN_FEWER_EVEN 2 /* as many a part, were one part in 32 empty */

/* What of a plan with PKV_PLAN_FEWER_PARTS is known before any length. */
static inline PKV_HD int32_t pkv_core_fewer(const pkv_plan_core *core) {
  const int64_t segments = (int64_t)core->rows * core->kv_heads;
  const int32_t few = segments <= PKV_PLAN_FEW && !pkv_core_many(core) ? PKV_PLAN_FEWER_FEW : 0;
  if (segments == 0) return 0;
  return segments % (core->parts - core->parts / 32) == 0 ? few | PKV_PLAN_FEWER_EVEN : few;
}

/*
 * How many 32nds of the parts a batch leaves empty. Of few segments: on a GPU the next layer's CTAs
 * begin in their places, and a segment in fewer pieces is folded sooner. Of rows that are about as
 * long as the first: then no segment is cut, and parts that read what rows share read it together.
 * docs/notes/cuda-decode.md. total, first: the costs of all rows and of row 0.
 */
static inline PKV_HD int32_t pkv_core_spare(const pkv_plan_core *core, int64_t total,
                                            int64_t first) {
  const int64_t segments = (int64_t)core->rows * core->kv_heads, off = total - core->rows * first;
  if ((core->fewer & PKV_PLAN_FEWER_EVEN) && (off < 0 ? -off : off) <= total / 32) return 1;
  if (!(core->fewer & PKV_PLAN_FEWER_FEW)) return 0;
  /* 10K tokens of 8 KV heads in 264 parts */
  const int brief = total - segments * core->segment_cost < 5 * core->parts * core->unit_cost;
  if (brief && segments <= 32) return 5;
  return brief || segments <= 16 ? 1 : 0;
}

/* row_cost: of core->rows and the total. */
static inline PKV_HD int32_t pkv_core_used_parts(const pkv_plan_core *core,
                                                 const int64_t *row_cost) {
  if (!core->fewer) return core->parts;
  return core->parts - core->parts / 32 * pkv_core_spare(core, row_cost[core->rows], row_cost[1]);
}

/* a / b for a >= 0, b > 0: a GPU divides 32 bits many times faster than 64. */
static inline PKV_HD int64_t pkv_core_div(int64_t a, int64_t b) {
  if ((((uint64_t)a | (uint64_t)b) >> 32) == 0) return (uint32_t)a / (uint32_t)b;
  return a / b;
}

static inline PKV_HD int64_t pkv_core_div_up(int64_t a, int64_t b) {
  return pkv_core_div(a + b - 1, b);
}

/* First token that a row's first query sees. */
static inline PKV_HD int64_t pkv_core_first_token(int32_t q_len, int32_t window, int32_t length) {
  const int64_t first = (int64_t)length - q_len + 1 - window;
  return window > 0 && first > 0 ? first : 0;
}

static inline PKV_HD int32_t pkv_core_first_unit(const pkv_plan_core *core, int32_t length) {
  return (int32_t)pkv_core_div(pkv_core_first_token(core->q_len, core->window, length),
                               core->unit_tokens);
}

static inline PKV_HD int32_t pkv_core_units(const pkv_plan_core *core, int32_t length) {
  return (int32_t)(pkv_core_div_up(length, core->unit_tokens) - pkv_core_first_unit(core, length));
}

static inline PKV_HD int64_t pkv_core_segment(const pkv_plan_core *core, int32_t units) {
  return units == 0 ? core->empty_cost : core->segment_cost + units * core->unit_cost;
}

static inline PKV_HD int64_t pkv_core_cut(int64_t total, int32_t parts, int32_t p) {
  const int64_t each = pkv_core_div(total, parts);
  return p * each + pkv_core_div(p * (total - each * parts), parts);
}

/* The last row whose cost starts at or before c; 0 <= c < row_cost[rows]. */
static inline PKV_HD int32_t pkv_core_find_row(const int64_t *row_cost, int32_t rows, int64_t c) {
  int32_t low = 0, high = rows; /* row_cost[low] <= c < row_cost[high] */
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (row_cost[middle] <= c)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* Row, head and unit of cursor p; slot and merge stay -1 until the sums are known. */
static inline PKV_HD void pkv_core_cursor(pkv_plan_cursor *out, const pkv_plan_core *core,
                                          const int64_t *row_cost, const int32_t *seq_len,
                                          int32_t p) {
  out->row = p == 0 ? 0 : core->rows;
  out->kv_head = 0;
  out->unit = 0;
  out->slot = -1;
  out->merge = -1;
  out->length = p == 0 && core->rows > 0 ? seq_len[0] : 0;
  if (p == 0 || p >= core->used || core->rows == 0) return;
  const int64_t c = pkv_core_cut(row_cost[core->rows], core->used, p);
  const int32_t row = pkv_core_find_row(row_cost, core->rows, c);
  const int32_t units = pkv_core_units(core, seq_len[row]);
  const int64_t segment = pkv_core_segment(core, units);
  int32_t head = (int32_t)pkv_core_div(c - row_cost[row], segment);
  const int64_t x = c - row_cost[row] - head * segment - core->segment_cost;
  int32_t unit = x <= 0 ? 0 : (int32_t)pkv_core_div(2 * x + core->unit_cost, 2 * core->unit_cost);
  if (unit > 0 && unit == units) {
    unit = 0;
    head++;
  }
  out->row = head == core->kv_heads ? row + 1 : row;
  out->kv_head = head == core->kv_heads ? 0 : head;
  out->unit = unit;
  out->length = out->row < core->rows ? seq_len[out->row] : 0;
}

static inline PKV_HD int pkv_core_same_segment(const pkv_plan_cursor *a, const pkv_plan_cursor *b) {
  return a->row == b->row && a->kv_head == b->kv_head;
}

/* What is summed over the cursors 1 .. parts-1. */
typedef struct pkv_core_mark {
  int64_t cuts, segments, units;
} pkv_core_mark;

static inline PKV_HD pkv_core_mark pkv_core_mark_of(const pkv_plan_core *core,
                                                    const int32_t *seq_len,
                                                    const pkv_plan_cursor *before,
                                                    const pkv_plan_cursor *cursor) {
  pkv_core_mark mark = {0, 0, 0};
  const int same = pkv_core_same_segment(before, cursor);
  if (cursor->unit == 0 || (same && before->unit == cursor->unit)) return mark;
  mark.cuts = 1;
  if (same && before->unit > 0) return mark;
  mark.segments = 1;
  mark.units = pkv_core_units(core, seq_len[cursor->row]);
  return mark;
}

/* Slot and merge of a cursor from the inclusive sums up to it. */
static inline PKV_HD void pkv_core_place(pkv_plan_cursor *cursor, const pkv_plan_core *core,
                                         const int32_t *seq_len, const pkv_core_mark *sum) {
  if (cursor->unit == 0) return;
  cursor->merge = (int32_t)(sum->segments - 1);
  cursor->slot = core->batch_invariant
                     ? (int32_t)(sum->units - pkv_core_units(core, seq_len[cursor->row]))
                     : (int32_t)(sum->cuts + sum->segments - 1);
}

/*
 * The merge of the segment whose cuts start at `first` (its mark has segments = 1) and end at
 * `last` (the cursor after it lies in another segment).
 */
static inline PKV_HD void pkv_core_merge(pkv_plan_merge *out, const pkv_plan_core *core,
                                         const int32_t *seq_len, const pkv_plan_cursor *first,
                                         const pkv_plan_cursor *last) {
  out->row = first->row;
  out->kv_head = first->kv_head;
  out->first_slot = core->batch_invariant ? first->slot : first->slot - 1;
  out->count = core->batch_invariant ? pkv_core_units(core, seq_len[first->row])
                                     : last->slot - first->slot + 2;
}

/* Where a cursor lies on the line of costs: what the parts' costs are differences of. */
static inline PKV_HD int64_t pkv_core_position(const pkv_plan_core *core, const int64_t *row_cost,
                                               const int32_t *seq_len,
                                               const pkv_plan_cursor *cursor) {
  if (cursor->row >= core->rows) return row_cost[core->rows];
  const int64_t segment = pkv_core_segment(core, pkv_core_units(core, seq_len[cursor->row]));
  const int64_t start = row_cost[cursor->row] + cursor->kv_head * segment;
  return cursor->unit == 0 ? start : start + core->segment_cost + cursor->unit * core->unit_cost;
}

/* ------------------------------------------------------------------------------------------
 * For executors
 * ---------------------------------------------------------------------------------------- */

/* The core's view of a built plan. */
static inline PKV_HD pkv_plan_core pkv_plan_core_of(const struct pkv_plan *plan) {
  pkv_plan_core core;
  core.rows = plan->rows;
  core.kv_heads = plan->kv_heads;
  core.q_len = plan->q_len;
  core.window = plan->window;
  core.unit_tokens = plan->unit_tokens;
  core.parts = core.used = plan->parts;
  core.batch_invariant = (plan->flags & PKV_PLAN_BATCH_INVARIANT) != 0;
  core.unit_cost = plan->unit_cost;
  core.segment_cost = core.empty_cost = plan->segment_cost;
  if (plan->route == PKV_ROUTE_BALANCED && !core.batch_invariant && pkv_core_many(&core))
    core.empty_cost = pkv_core_div_up(plan->segment_cost, 4);
  core.fewer = 0;
  if (plan->route == PKV_ROUTE_BALANCED && (plan->flags & PKV_PLAN_FEWER_PARTS) &&
      !core.batch_invariant)
    core.fewer = pkv_core_fewer(&core);
  return core;
}

/* Bytes of one slot: group * q_len states. */
static inline PKV_HD int64_t pkv_plan_slot_bytes(const struct pkv_plan *plan) {
  return (int64_t)(plan->query_heads / plan->kv_heads) * plan->q_len * (plan->head_dim + 2) * 4;
}

/* Byte offset of the first slot in the workspace: the counters lie before it. */
static inline PKV_HD int64_t pkv_plan_slots_at(const struct pkv_plan *plan) {
  return ((int64_t)plan->merges * 4 + 63) / 64 * 64;
}

/* What a part of `balanced` does with one segment. */
typedef struct pkv_plan_piece {
  int32_t row, kv_head;
  int32_t unit_begin, unit_end; /* counted from the row's first unit that is read */
  int32_t first_unit;           /* that unit: tokens start at (first_unit + unit) * unit_tokens */
  int32_t whole; /* 1: the whole segment, also one without units: store the result, no slot */
  int32_t slot;  /* else of this piece; batch-invariant: of unit_begin, the next unit's follow */
  int32_t merge; /* else of this segment; whole: -1 */
} pkv_plan_piece;

/*
 * The piece of part `at`..`end` that starts at `at`, which moves past it; 0 when there is none
 * left. Begin with at = cursors[p], end = cursors[p + 1].
 */
static inline PKV_HD int pkv_plan_next_piece(pkv_plan_piece *piece, const pkv_plan_core *core,
                                             const int32_t *seq_len, pkv_plan_cursor *at,
                                             const pkv_plan_cursor *end) {
  const int last = pkv_core_same_segment(at, end);
  if (last && at->unit >= end->unit) return 0;
  const int32_t units = pkv_core_units(core, seq_len[at->row]);
  piece->row = at->row;
  piece->kv_head = at->kv_head;
  piece->unit_begin = at->unit;
  piece->unit_end = last ? end->unit : units;
  piece->first_unit = pkv_core_first_unit(core, seq_len[at->row]);
  piece->whole = at->unit == 0 && !last;
  piece->slot = -1;
  piece->merge = at->unit > 0 ? at->merge : last ? end->merge : -1;
  if (!piece->whole && core->batch_invariant)
    piece->slot = (at->unit > 0 ? at->slot : end->slot) + at->unit;
  else if (!piece->whole)
    piece->slot = at->unit > 0 ? at->slot : end->slot - 1;
  at->unit = last ? end->unit : 0;
  if (last) return 1;
  at->slot = -1;
  at->merge = -1;
  at->kv_head++;
  if (at->kv_head == core->kv_heads) {
    at->kv_head = 0;
    at->row++;
  }
  return 1;
}

#endif
