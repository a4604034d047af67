/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a plan on the CPU: its launches in order, each a parallel loop over parts, items or merges
 * handed out by tickets. Who takes what does not matter: every piece has its slot, and slots are
 * folded in the plan's order by whoever arrives last.
 */
#include "backend/cpu/cpu_isa.h"

#include <stdatomic.h>

#include "backend/cpu/cpu_shared.h"
#include "plan/plan_core.h"

typedef struct attention_run {
  const pkv_attention_params *p;
  const struct pkv_plan *plan;
  const pkv_cpu_isa_ops *ops;
  pkv_executor *executor;
  const int32_t *seq_len;
  const pkv_plan_merge *merges;
  /* FUSED: arrived units (batch-invariant) or pieces of each merge. */
  _Atomic uint32_t *counters;
  float *slots;
  int64_t slot_floats;
  int32_t group, states; /* query heads a KV head; states of a segment */
  int32_t first;         /* of the launch that runs */
  _Atomic uint32_t sink;
} attention_run;

/* A piece of one segment: units [begin, end), counted from the row's start. */
typedef struct attention_piece {
  int32_t row, kv_head;
  int64_t begin, end;
} attention_piece;

static int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static pkv_cpu_block block_at(const attention_run *run, const attention_piece *piece,
                              int32_t first) {
  pkv_cpu_block b;
  b.p = run->p;
  b.pages = run->p->block_table + piece->row * run->p->block_table_stride;
  b.ranks = NULL;
  b.row = piece->row;
  b.kv_head = piece->kv_head;
  b.seq_len = run->seq_len[piece->row];
  b.group = run->group;
  b.first = first;
  b.rows = (int32_t)min64(PKV_CPU_BLOCK_ROWS, run->states - first);
  b.until = min64(piece->end * run->plan->unit_tokens, b.seq_len);
  return b;
}

/* Where a block's states lie in a slot: all m, then all l, then all acc. */
static pkv_cpu_states slot_states(const attention_run *run, int64_t slot, int32_t first) {
  PKV_ASSERT(slot >= 0 && slot < run->plan->slots);
  float *base = run->slots + slot * run->slot_floats;
  return (pkv_cpu_states){base + first, base + run->states + first,
                          base + 2 * (int64_t)run->states + (int64_t)first * run->plan->head_dim};
}

static void attend_units(const attention_run *run, void *scratch, const pkv_cpu_block *b,
                         int64_t begin, int64_t end) {
  const int64_t unit = run->plan->unit_tokens;
  run->ops->attend(scratch, b, min64(begin * unit, b->seq_len), min64(end * unit, b->seq_len));
}

/* The piece is the whole segment: no slot. */
static void run_whole(const attention_run *run, void *scratch, const attention_piece *piece) {
  for (int32_t first = 0; first < run->states; first += PKV_CPU_BLOCK_ROWS) {
    const pkv_cpu_block b = block_at(run, piece, first);
    run->ops->begin(scratch, &b);
    if ((run->plan->flags & PKV_PLAN_BATCH_INVARIANT) == 0) {
      attend_units(run, scratch, &b, piece->begin, piece->end);
      run->ops->store_own(scratch, &b);
      continue;
    }
    run->ops->fold_begin(scratch, &b);
    for (int64_t unit = piece->begin; unit < piece->end; unit++) {
      attend_units(run, scratch, &b, unit, unit + 1);
      run->ops->fold_own(scratch, &b);
    }
    run->ops->store_total(scratch, &b);
  }
}

/* `step` units go to a slot each, from `slot` on. */
static void run_slots(const attention_run *run, void *scratch, const attention_piece *piece,
                      int64_t slot, int64_t step) {
  for (int32_t first = 0; first < run->states; first += PKV_CPU_BLOCK_ROWS) {
    const pkv_cpu_block b = block_at(run, piece, first);
    int64_t to = slot;
    run->ops->begin(scratch, &b);
    for (int64_t unit = piece->begin; unit < piece->end; unit += step, to++) {
      attend_units(run, scratch, &b, unit, min64(unit + step, piece->end));
      run->ops->save(scratch, &b, 0, b.rows, slot_states(run, to, first));
    }
  }
}

static void run_merge(const attention_run *run, void *scratch, const pkv_plan_merge *merge) {
  const attention_piece piece = {merge->row, merge->kv_head, 0, 0};
  PKV_ASSERT(merge->row >= 0 && merge->row < run->plan->rows);
  PKV_ASSERT(merge->kv_head >= 0 && merge->kv_head < run->plan->kv_heads);
  for (int32_t first = 0; first < run->states; first += PKV_CPU_BLOCK_ROWS) {
    const pkv_cpu_block b = block_at(run, &piece, first);
    run->ops->fold_begin(scratch, &b);
    for (int64_t i = 0; i < merge->count; i++) {
      const int64_t slot = merge->first_slot + i * run->plan->slot_stride;
      run->ops->fold_slot(scratch, &b, slot_states(run, slot, first));
    }
    run->ops->store_total(scratch, &b);
  }
}

/*
 * A part's piece of a cut segment. Release: the slots are visible to whoever sees the count;
 * acquire: the last arriver sees all slots.
 */
static void run_cut(const attention_run *run, void *scratch, const attention_piece *piece,
                    int64_t slot, int32_t merge_index) {
  const int invariant = (run->plan->flags & PKV_PLAN_BATCH_INVARIANT) != 0;
  const int64_t units = piece->end - piece->begin;
  PKV_ASSERT(merge_index >= 0 && merge_index < run->plan->merges);
  const pkv_plan_merge *merge = &run->merges[merge_index];
  PKV_ASSERT(merge->row == piece->row && merge->kv_head == piece->kv_head);
  run_slots(run, scratch, piece, slot, invariant ? 1 : units);
  const uint32_t arrived = invariant ? (uint32_t)units : 1u;
  const uint32_t before =
      atomic_fetch_add_explicit(&run->counters[merge_index], arrived, memory_order_acq_rel);
  PKV_ASSERT(before + arrived <= (uint32_t)merge->count);
  if (before + arrived == (uint32_t)merge->count) run_merge(run, scratch, merge);
}

static void run_part(void *ctx, int64_t item, int32_t worker) {
  const attention_run *run = ctx;
  const pkv_plan_cursor *cursors = pkv_plan_at(run->plan, run->plan->cursors_at);
  const pkv_plan_core core = pkv_plan_core_of(run->plan);
  void *scratch = pkv_cpu_scratch(run->executor, worker);
  pkv_plan_cursor at = cursors[run->first + item];
  const pkv_plan_cursor end = cursors[run->first + item + 1];
  pkv_plan_piece next;
  while (pkv_plan_next_piece(&next, &core, run->seq_len, &at, &end)) {
    const attention_piece piece = {next.row, next.kv_head,
                                   (int64_t)next.first_unit + next.unit_begin,
                                   (int64_t)next.first_unit + next.unit_end};
    PKV_ASSERT(next.row >= 0 && next.row < core.rows && next.kv_head >= 0);
    PKV_ASSERT(next.kv_head < core.kv_heads && next.unit_begin <= next.unit_end);
    if (next.whole)
      run_whole(run, scratch, &piece);
    else
      run_cut(run, scratch, &piece, next.slot, next.merge);
  }
}

/* bucket_padded: tokens [begin, end) lie beyond the row; its last page is read in their place. */
static void touch_padding(attention_run *run, const attention_piece *piece, int64_t begin,
                          int64_t end) {
  const pkv_cache *c = &run->p->cache;
  const int64_t len = run->seq_len[piece->row];
  if (len == 0) return; /* there is no page to read */
  const int32_t *pages = run->p->block_table + piece->row * run->p->block_table_stride;
  const int64_t page = pages[(len - 1) / c->page_tokens];
  const size_t element = pkv_dtype_bytes(c->dtype), bytes = (size_t)c->head_dim * element;
  uint32_t sum = 0;
  for (int64_t token = begin > len ? begin : len; token < end; token++) {
    const int64_t offset = token % c->page_tokens;
    const int64_t k =
        page * c->k_page_stride + offset * c->k_token_stride + piece->kv_head * c->k_head_stride;
    const int64_t v =
        page * c->v_page_stride + offset * c->v_token_stride + piece->kv_head * c->v_head_stride;
    sum += run->ops->touch((const unsigned char *)c->k + (size_t)k * element, bytes);
    sum += run->ops->touch((const unsigned char *)c->v + (size_t)v * element, bytes);
  }
  atomic_fetch_add_explicit(&run->sink, sum, memory_order_relaxed);
}

static void run_item(void *ctx, int64_t item, int32_t worker) {
  attention_run *run = ctx;
  const struct pkv_plan *plan = run->plan;
  const pkv_plan_item *it =
      (const pkv_plan_item *)pkv_plan_at(plan, plan->items_at) + run->first + item;
  const int32_t *split_first = pkv_plan_at(plan, plan->split_first_at);
  PKV_ASSERT(it->row >= 0 && it->row < plan->rows);
  PKV_ASSERT(it->kv_head >= 0 && it->kv_head < plan->kv_heads);
  PKV_ASSERT(it->split >= 0 && it->unit_begin >= 0 && it->unit_begin <= it->unit_end);
  const attention_piece piece = {it->row, it->kv_head, it->unit_begin, it->unit_end};
  const int64_t slot =
      ((int64_t)split_first[it->row] + it->split) * plan->slot_stride + it->kv_head;
  for (int32_t first = 0; first < run->states; first += PKV_CPU_BLOCK_ROWS) {
    void *scratch = pkv_cpu_scratch(run->executor, worker);
    const pkv_cpu_block b = block_at(run, &piece, first);
    run->ops->begin(scratch, &b);
    attend_units(run, scratch, &b, piece.begin, piece.end);
    run->ops->save(scratch, &b, 0, b.rows, slot_states(run, slot, first));
  }
  if (plan->route == PKV_ROUTE_BUCKET_PADDED)
    touch_padding(run, &piece, piece.begin * plan->unit_tokens, piece.end * plan->unit_tokens);
}

static void run_merge_item(void *ctx, int64_t item, int32_t worker) {
  const attention_run *run = ctx;
  run_merge(run, pkv_cpu_scratch(run->executor, worker), &run->merges[run->first + item]);
}

pkv_status pkv_cpu_attention(pkv_executor *executor, const pkv_attention_params *p,
                             pkv_error *err) {
  const struct pkv_plan *plan = p->plan;
  const pkv_plan_launch *launches = pkv_plan_at(plan, plan->launches_at);
  attention_run run = {.p = p, .plan = plan, .ops = executor->isa_ops, .executor = executor};
  run.seq_len = pkv_plan_at(plan, plan->seq_len_at);
  run.merges = pkv_plan_at(plan, plan->merges_at);
  run.group = plan->query_heads / plan->kv_heads;
  run.states = run.group * plan->q_len;
  run.slot_floats = pkv_plan_slot_bytes(plan) / (int64_t)sizeof(float);
  run.counters = p->workspace;
  run.slots = (float *)(void *)((unsigned char *)p->workspace + pkv_plan_slots_at(plan));
  PKV_ASSERT(pkv_plan_check(plan, (size_t)plan->plan_bytes, NULL) == PKV_OK);
  if (plan->route == PKV_ROUTE_SHARED) {
    pkv_cpu_shared_attention(executor, p);
    return PKV_OK;
  }
  for (int32_t i = 0; i < plan->merges; i++)
    atomic_store_explicit(&run.counters[i], 0u, memory_order_relaxed);
  for (int32_t i = 0; i < plan->launches; i++) {
    pkv_work_fn fn = run_part;
    if (launches[i].kind == PKV_LAUNCH_DECODE) fn = run_item;
    if (launches[i].kind == PKV_LAUNCH_MERGE) fn = run_merge_item;
    run.first = launches[i].first;
    pkv_workers_run(executor->workers, fn, &run, launches[i].count);
  }
  (void)err;
  return PKV_OK;
}
