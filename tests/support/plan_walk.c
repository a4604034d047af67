/* SPDX-License-Identifier: Apache-2.0 */
#include "support/plan_walk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define REQUIRE(condition, ...)                                                                    \
  do {                                                                                             \
    if (!(condition)) fail_msg(__VA_ARGS__);                                                       \
  } while (0)

void *plan_memory(size_t bytes, int fill) {
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  REQUIRE(memory, "no memory for %zu bytes", bytes);
  return memset(memory, fill, (bytes + 63) / 64 * 64 + 64);
}

/* Units of a row, written down once more and differently: by looking at its tokens. */
static void row_units(const pkv_plan *plan, int32_t length, int32_t *first, int32_t *end) {
  int64_t seen = plan->window > 0 ? (int64_t)length - plan->q_len + 1 - plan->window : 0;
  if (seen < 0) seen = 0;
  *first = (int32_t)(seen / plan->unit_tokens);
  int64_t last = length;
  if (plan->route == PKV_ROUTE_BUCKET_PADDED)
    while (last % plan->bucket_tokens != 0)
      last += plan->bucket_tokens - last % plan->bucket_tokens;
  *end = (int32_t)(last / plan->unit_tokens + (last % plan->unit_tokens != 0));
  if (length == 0) *end = *first;
}

typedef struct walk {
  const pkv_plan *plan;
  const int32_t *seq_len;
  int32_t *at;      /* [rows, kv_heads]: the next unit, from the row's start */
  int32_t *stores;  /* [rows, kv_heads]: results stored without a merge */
  int32_t *written; /* [slots]: segment + 1 */
  int32_t *merged;  /* [slots] */
} walk;

static void cover(walk *w, int32_t row, int32_t head, int32_t begin, int32_t end) {
  int32_t *at = &w->at[(int64_t)row * w->plan->kv_heads + head];
  REQUIRE(begin == *at && end >= begin, "row %d head %d: units %d to %d come after %d", row, head,
          begin, end, *at);
  *at = end;
}

static void write_slot(walk *w, int32_t row, int32_t head, int64_t slot) {
  REQUIRE(slot >= 0 && slot < w->plan->slots, "slot %lld of %d", (long long)slot, w->plan->slots);
  REQUIRE(w->written[slot] == 0, "slot %lld is written twice", (long long)slot);
  w->written[slot] = row * w->plan->kv_heads + head + 1;
}

/* balanced: the cursors read as their comment in plan.h says. */
static void walk_parts(walk *w) {
  const pkv_plan *plan = w->plan;
  const pkv_plan_cursor *cursors = pkv_plan_at(plan, plan->cursors_at);
  const int invariant = plan->flags & PKV_PLAN_BATCH_INVARIANT;
  for (int32_t p = 0; p < plan->parts; p++) {
    const pkv_plan_cursor *a = &cursors[p], *b = &cursors[p + 1];
    int32_t row = a->row, head = a->kv_head, unit = a->unit;
    while (row < b->row || (row == b->row && head < b->kv_head) ||
           (row == b->row && head == b->kv_head && unit < b->unit)) {
      int32_t first, end;
      row_units(plan, w->seq_len[row], &first, &end);
      const int cut_after = row == b->row && head == b->kv_head;
      const int32_t stop = cut_after ? b->unit : end - first;
      cover(w, row, head, first + unit, first + stop);
      if (unit == 0 && !cut_after) {
        w->stores[(int64_t)row * plan->kv_heads + head]++;
      } else if (invariant) {
        for (int32_t u = unit; u < stop; u++)
          write_slot(w, row, head, (unit > 0 ? a->slot : b->slot) + u);
      } else {
        write_slot(w, row, head, unit > 0 ? a->slot : b->slot - 1);
      }
      unit = cut_after ? stop : 0;
      if (cut_after) break;
      if (++head == plan->kv_heads) {
        head = 0;
        row++;
      }
    }
  }
}

static void walk_items(walk *w) {
  const pkv_plan *plan = w->plan;
  const pkv_plan_item *items = pkv_plan_at(plan, plan->items_at);
  const int32_t *split_first = pkv_plan_at(plan, plan->split_first_at);
  for (int32_t i = 0; i < plan->items; i++) {
    const pkv_plan_item *it = &items[i];
    cover(w, it->row, it->kv_head, it->unit_begin, it->unit_end);
    REQUIRE(plan->route != PKV_ROUTE_WORKQUEUE || it->unit_end > it->unit_begin,
            "workqueue item %d is empty", i);
    write_slot(w, it->row, it->kv_head,
               ((int64_t)split_first[it->row] + it->split) * plan->kv_heads + it->kv_head);
  }
}

static void walk_merges(walk *w) {
  const pkv_plan *plan = w->plan;
  const pkv_plan_merge *merges = pkv_plan_at(plan, plan->merges_at);
  for (int32_t m = 0; m < plan->merges; m++) {
    const int32_t segment = merges[m].row * plan->kv_heads + merges[m].kv_head;
    w->stores[segment]++;
    for (int32_t i = 0; i < merges[m].count; i++) {
      const int64_t slot = merges[m].first_slot + (int64_t)i * plan->slot_stride;
      REQUIRE(slot < plan->slots && w->written[slot] == segment + 1,
              "merge %d folds slot %lld of another segment", m, (long long)slot);
      w->merged[slot]++;
    }
  }
}

void plan_walk(const pkv_plan *plan) {
  const size_t segments = (size_t)plan->rows * (size_t)plan->kv_heads;
  walk w = {.plan = plan, .seq_len = pkv_plan_at(plan, plan->seq_len_at)};
  w.at = calloc(segments + 1, sizeof(int32_t));
  w.stores = calloc(segments + 1, sizeof(int32_t));
  w.written = calloc((size_t)plan->slots + 1, sizeof(int32_t));
  w.merged = calloc((size_t)plan->slots + 1, sizeof(int32_t));
  REQUIRE(w.at && w.stores && w.written && w.merged, "no memory for %zu segments", segments);
  for (size_t s = 0; s < segments; s++) {
    int32_t end;
    row_units(plan, w.seq_len[s / (size_t)plan->kv_heads], &w.at[s], &end);
  }
  if (plan->route == PKV_ROUTE_BALANCED)
    walk_parts(&w);
  else
    walk_items(&w);
  walk_merges(&w);
  for (size_t s = 0; s < segments; s++) {
    int32_t first, end;
    row_units(plan, w.seq_len[s / (size_t)plan->kv_heads], &first, &end);
    REQUIRE(w.at[s] == end, "segment %zu: units up to %d, not %d", s, w.at[s], end);
    REQUIRE(w.stores[s] == 1, "segment %zu: %d results", s, w.stores[s]);
  }
  for (int32_t i = 0; i < plan->slots; i++)
    REQUIRE(w.written[i] && w.merged[i] == 1, "slot %d: written %d, merged %d times", i,
            w.written[i], w.merged[i]);
  free(w.at);
  free(w.stores);
  free(w.written);
  free(w.merged);
}

pkv_plan *plan_make(const pkv_shape *shape, const pkv_plan_options *options, int32_t rows,
                    const int32_t *seq_len) {
  pkv_error err = {PKV_OK, NULL, {0}};
  size_t bytes, workspace;
  int32_t longest = 0;
  for (int32_t row = 0; row < rows; row++)
    if (seq_len[row] > longest) longest = seq_len[row];
  if (pkv_plan_size(&bytes, &workspace, shape, options, rows, longest, &err))
    fail_msg("size: %s", err.text);
  void *memory = plan_memory(bytes, 0xa5);
  const pkv_plan *plan;
  if (pkv_plan_build(&plan, memory, bytes, shape, options, rows, seq_len, &err))
    fail_msg("build: %s", err.text);
  REQUIRE((const void *)plan == memory, "the plan is not at the start of its memory");
  REQUIRE((size_t)plan->workspace_bytes <= workspace, "workspace %lld, promised %zu",
          (long long)plan->workspace_bytes, workspace);
  plan_walk(plan);
  if (pkv_plan_check(plan, bytes, &err)) fail_msg("check: %s", err.text);
  return memory;
}
