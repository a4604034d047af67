/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a `shared` plan on the CPU: parts (node pieces, then private pieces) handed out by tickets,
 * then one fold a (rank, KV head) over its path and its private part.
 */
#include "backend/cpu/cpu_shared.h"

#include "plan/plan_core.h"

typedef struct shared_run {
  const pkv_attention_params *p;
  const struct pkv_plan *plan;
  const pkv_cpu_isa_ops *ops;
  pkv_executor *executor;
  pkv_tree_view view;
  float *node_slots, *private_slots;
  int64_t slot_floats;
  int32_t group, states; /* query heads a KV head; states of a slot */
} shared_run;

static int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* States [first, ..) of one rank and KV head, which read `pages`. */
static pkv_cpu_block block_of(const pkv_attention_params *p, const int32_t *pages, int32_t row,
                              int32_t length, int32_t kv_head, int32_t group, int32_t first) {
  const int32_t states = group * p->plan->q_len;
  pkv_cpu_block b;
  b.p = p;
  b.pages = pages;
  b.until = 0;
  b.ranks = NULL;
  b.row = row;
  b.kv_head = kv_head;
  b.seq_len = length;
  b.group = group;
  b.first = first;
  b.rows = (int32_t)min64(PKV_CPU_BLOCK_ROWS, states - first);
  return b;
}

/* A slot holds all m, then all l, then all acc. */
static pkv_cpu_states states_at(float *slot, int32_t states, int32_t first, int32_t head_dim) {
  return (pkv_cpu_states){slot + first, slot + states + first,
                          slot + 2 * (int64_t)states + (int64_t)first * head_dim};
}

static const int32_t *pages_of(const pkv_attention_params *p, int32_t row) {
  return p->block_table + row * p->block_table_stride;
}

_Static_assert(PKV_TREE_TILE_ROWS <= PKV_CPU_BLOCK_ROWS, "a tile of a node is one block");

/* All query rows of the tile as one block, which reads K and V once. */
static void run_node_piece(const shared_run *run, void *scratch, const pkv_node_piece *piece) {
  const pkv_cpu_block b = {.p = run->p,
                           .pages = pages_of(run->p, piece->table_row),
                           .ranks = run->view.ranks + piece->first_rank,
                           .row = -1,
                           .kv_head = piece->kv_head,
                           .group = run->group,
                           .rows = piece->ranks * run->states};
  const int64_t unit = run->plan->unit_tokens;
  const int32_t step = run->view.batch_invariant ? 1 : piece->unit_end - piece->unit_begin;
  int64_t slot = piece->slot;
  PKV_ASSERT(b.rows <= PKV_CPU_BLOCK_ROWS);
  run->ops->begin(scratch, &b);
  for (int32_t u = piece->unit_begin; u < piece->unit_end; u += step) {
    run->ops->attend(scratch, &b, u * unit, (u + step) * unit);
    for (int32_t i = 0; i < piece->ranks; i++, slot++) {
      PKV_ASSERT(slot >= 0 && slot < run->view.tree->node_slots);
      run->ops->save(scratch, &b, i * run->states, run->states,
                     states_at(run->node_slots + slot * run->slot_floats, run->states, 0,
                               run->plan->head_dim));
    }
  }
}

/* No path and uncut: the result, unit by unit when batch-invariant. */
static void run_whole(const shared_run *run, void *scratch, const pkv_cpu_block *b,
                      const pkv_private_piece *piece) {
  const int64_t unit = run->plan->unit_tokens;
  run->ops->begin(scratch, b);
  if (!run->view.batch_invariant) {
    run->ops->attend(scratch, b, min64(piece->unit_begin * unit, b->seq_len),
                     min64(piece->unit_end * unit, b->seq_len));
    run->ops->store_own(scratch, b);
    return;
  }
  run->ops->fold_begin(scratch, b);
  for (int64_t u = piece->unit_begin; u < piece->unit_end; u++) {
    run->ops->attend(scratch, b, min64(u * unit, b->seq_len), min64((u + 1) * unit, b->seq_len));
    run->ops->fold_own(scratch, b);
  }
  run->ops->store_total(scratch, b);
}

static void run_private_slots(const shared_run *run, void *scratch, const pkv_cpu_block *b,
                              const pkv_private_piece *piece) {
  const int64_t unit = run->plan->unit_tokens;
  const int32_t step = run->view.batch_invariant ? 1 : piece->unit_end - piece->unit_begin;
  int64_t slot = piece->slot;
  run->ops->begin(scratch, b);
  for (int64_t u = piece->unit_begin; u < piece->unit_end; u += step, slot++) {
    PKV_ASSERT(slot >= 0 && slot < run->view.tree->private_slots);
    run->ops->attend(scratch, b, min64(u * unit, b->seq_len), min64((u + step) * unit, b->seq_len));
    run->ops->save(scratch, b, 0, b->rows,
                   states_at(run->private_slots + slot * run->slot_floats, run->states, b->first,
                             run->plan->head_dim));
  }
}

static void run_private_piece(const shared_run *run, void *scratch,
                              const pkv_private_piece *piece) {
  if (!piece->whole && piece->unit_begin == piece->unit_end) return;
  for (int32_t first = 0; first < run->states; first += PKV_CPU_BLOCK_ROWS) {
    const pkv_cpu_block b = block_of(run->p, pages_of(run->p, piece->row), piece->row,
                                     piece->length, piece->kv_head, run->group, first);
    if (piece->whole)
      run_whole(run, scratch, &b, piece);
    else
      run_private_slots(run, scratch, &b, piece);
  }
}

static void run_part(void *ctx, int64_t part, int32_t worker) {
  const shared_run *run = ctx;
  void *scratch = pkv_cpu_scratch(run->executor, worker);
  pkv_node_cursor node_at = run->view.node_cursors[part];
  pkv_node_piece node_piece;
  while (pkv_tree_next_node_piece(&node_piece, &run->view, &node_at,
                                  &run->view.node_cursors[part + 1]))
    run_node_piece(run, scratch, &node_piece);
  for (int64_t half = 2 * part; half < 2 * part + 2; half++) {
    pkv_private_cursor at = run->view.private_cursors[half];
    pkv_private_piece piece;
    while (
        pkv_tree_next_private_piece(&piece, &run->view, &at, &run->view.private_cursors[half + 1]))
      run_private_piece(run, scratch, &piece);
  }
}

static void fold_states(const shared_run *run, void *scratch, const pkv_cpu_block *b, float *slots,
                        pkv_tree_states s) {
  for (int64_t i = 0; i < s.count; i++) {
    float *slot = slots + (s.first + i * s.stride) * run->slot_floats;
    run->ops->fold_slot(scratch, b, states_at(slot, run->states, b->first, run->plan->head_dim));
  }
}

static void run_fold(void *ctx, int64_t item, int32_t worker) {
  const shared_run *run = ctx;
  const int32_t kv_head = (int32_t)(item % run->view.kv_heads);
  const int32_t rank_id = (int32_t)(item / run->view.kv_heads);
  const pkv_tree_rank *rank = &run->view.ranks[rank_id];
  void *scratch = pkv_cpu_scratch(run->executor, worker);
  if (pkv_tree_stored(&run->view, rank_id, kv_head)) return;
  for (int32_t first = 0; first < run->states; first += PKV_CPU_BLOCK_ROWS) {
    const pkv_cpu_block b = block_of(run->p, pages_of(run->p, rank->row), rank->row, rank->length,
                                     kv_head, run->group, first);
    run->ops->fold_begin(scratch, &b);
    for (int32_t i = 0; i < rank->depth; i++)
      fold_states(run, scratch, &b, run->node_slots,
                  pkv_tree_node_states(&run->view, rank->path[i], rank_id, kv_head));
    fold_states(run, scratch, &b, run->private_slots,
                pkv_tree_private_states(&run->view, rank_id, kv_head));
    run->ops->store_total(scratch, &b);
  }
}

void pkv_cpu_shared_attention(pkv_executor *executor, const pkv_attention_params *p) {
  const struct pkv_plan *plan = p->plan;
  shared_run run = {.p = p, .plan = plan, .ops = executor->isa_ops, .executor = executor};
  run.view = pkv_tree_view_of(plan);
  run.group = plan->query_heads / plan->kv_heads;
  run.states = run.group * plan->q_len;
  run.slot_floats = pkv_plan_slot_bytes(plan) / (int64_t)sizeof(float);
  run.node_slots = (float *)(void *)((unsigned char *)p->workspace + pkv_plan_slots_at(plan));
  run.private_slots = run.node_slots + run.view.tree->node_slots * run.slot_floats;
  pkv_workers_run(executor->workers, run_part, &run, plan->parts);
  pkv_workers_run(executor->workers, run_fold, &run, (int64_t)plan->rows * plan->kv_heads);
}
