/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The features of the cost model: what a route reads, how evenly, in how many pieces, from lengths
 * alone. Each route is modelled as it plans: the seed's splits of 32-token tiles, equal parts of
 * 64-token tiles, FlashInfer's chunks, found as its planner finds them (the smallest chunk whose
 * count fits the grid).
 */
#include "policy/cost.h"

#include <math.h>
#include <string.h>

#include "policy/seed_rule.h"

#define RAMP_MB       32.0
#define BUCKET_TOKENS 4096 /* bucket_padded's default */
#define CHUNK_TOKENS  128  /* FlashInfer's least chunk */
/* Blocks a multiprocessor that FlashInfer's planners count on. */
#define TENSOR_BLOCKS 2
#define CORE_BLOCKS   4
#define QUICK_STATES  4 /* states of a merge that are read side by side */

static const char *const names[PKV_COST_FEATURES] = {"one",    "launches", "bytes", "ramp",
                                                     "span",   "waves",    "tasks", "states",
                                                     "merges", "fill",     "rows",  "work"};

const char *pkv_cost_feature_name(int32_t feature) {
  return feature >= 0 && feature < PKV_COST_FEATURES ? names[feature] : "?";
}

const char *pkv_cost_kind_name(int32_t kind) {
  if (kind == PKV_COST_FLASHINFER_CORES) return "flashinfer_cores";
  if (kind == PKV_COST_WORKQUEUE_FUSED) return "workqueue_fused";
  return kind > 0 && kind < PKV_COST_KINDS ? pkv_route_name((pkv_route)kind) : "?";
}

static int64_t div_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* What a model of one batch is worked out with. */
typedef struct tally {
  const pkv_policy_batch *batch;
  double *f;
  int64_t slots;
  int64_t token_bytes; /* of a token and KV head */
} tally;

static int64_t seen_tokens(const pkv_policy_batch *batch, int32_t row) {
  const int64_t length = batch->seq_len[row];
  const int64_t window = (int64_t)batch->shape->window + batch->shape->q_len - 1;
  return batch->shape->window > 0 && window < length ? window : length;
}

/* Tasks of one launch, as they are handed out: rows in order. */
typedef struct launch {
  int64_t slots, tasks;
  double tokens, end; /* of all tasks; when the last of them ends, in tokens of one slot */
} launch;

/*
 * `tasks` more of `length` tokens. The last of them starts when a slot is free: what came before
 * spread over the slots, less half a task, since the slots do not come free together.
 */
static void add_tasks(launch *l, int64_t tasks, int64_t length) {
  if (tasks <= 0) return;
  const int64_t before = l->tasks + tasks - 1;
  const double work = l->tokens + (double)(tasks - 1) * (double)length;
  double start = 0;
  if (before >= l->slots) start = work / (double)l->slots - work / (double)before / 2;
  if (start < 0) start = 0;
  if (start + (double)length > l->end) l->end = start + (double)length;
  l->tasks += tasks;
  l->tokens += (double)tasks * (double)length;
}

/* The even share and the end count as a root of squares: slots that run on alone run faster. */
static void add_launch(const tally *t, const launch *l) {
  const double even = l->tokens / (double)l->slots;
  t->f[PKV_COST_SPAN] += hypot(even, l->end > even ? l->end : even) * (double)t->token_bytes * 1e-3;
  t->f[PKV_COST_TASKS] += (double)l->tasks * 1e-3;
  if (l->tasks > l->slots) t->f[PKV_COST_WAVES] += (double)(div_up(l->tasks, l->slots) - 1);
}

/* A merge that folds `deepest` states; merges of other rows run beside it. */
static void add_merge(const tally *t, int64_t deepest) {
  if (deepest > QUICK_STATES) t->f[PKV_COST_MERGES] += (double)(deepest - QUICK_STATES);
}

static void add_states(const tally *t, double states) {
  const pkv_shape *shape = t->batch->shape;
  const double group = (double)shape->query_heads / shape->kv_heads * shape->q_len;
  t->f[PKV_COST_STATES] += states * group * (shape->head_dim + 2) * 4e-6;
}

/* The seed's routes: rows of one launch are those whose bucket is `bucket`; 0 = all rows. */
static void add_seed_launch(const tally *t, int32_t kind, int32_t splits, int64_t round,
                            int64_t bucket) {
  const pkv_policy_batch *b = t->batch;
  const int64_t heads = b->shape->kv_heads;
  launch l = {.slots = t->slots};
  int64_t deepest = 0;
  for (int32_t row = 0; row < b->rows; row++) {
    int64_t seen = seen_tokens(b, row);
    if (round > 0 && div_up(b->seq_len[row], round) != bucket) continue;
    if (kind == PKV_ROUTE_BUCKET_PADDED) {
      const int64_t padded = bucket * round;
      t->f[PKV_COST_FILL] += (double)((padded - seen) * heads * t->token_bytes) * 1e-6;
      seen = padded;
    }
    const int64_t tiles = div_up(seen, PKV_SEED_TILE_TOKENS);
    const int64_t wanted = kind == PKV_ROUTE_WORKQUEUE
                               ? pkv_seed_row_splits(b->rows, b->shape->kv_heads, tiles)
                               : splits;
    const int64_t used = wanted < tiles ? wanted : tiles;
    const int64_t task = used > 0 ? div_up(tiles, used) * PKV_SEED_TILE_TOKENS : 0;
    add_tasks(&l, used * heads, task);
    if (wanted > 1 && wanted > deepest) deepest = wanted;
    if (used > 0 && kind != PKV_ROUTE_BUCKET_PADDED)
      t->f[PKV_COST_FILL] +=
          (double)((tiles * PKV_SEED_TILE_TOKENS - seen) * heads * t->token_bytes) * 1e-6;
    add_states(t, (double)(wanted * heads));
  }
  add_launch(t, &l);
  add_merge(t, deepest);
  t->f[PKV_COST_LAUNCHES] += 2;
}

static void seed_features(const tally *t, int32_t kind, int32_t splits) {
  const pkv_policy_batch *b = t->batch;
  const bool buckets = kind == PKV_ROUTE_BUCKET_EXACT || kind == PKV_ROUTE_BUCKET_PADDED;
  const int64_t round = kind == PKV_ROUTE_BUCKET_PADDED ? BUCKET_TOKENS : 1;
  int64_t last = -1;
  if (!buckets) add_seed_launch(t, kind, splits, 0, 0);
  while (buckets) { /* each distinct bucket, the smallest first */
    int64_t next = INT64_MAX;
    for (int32_t row = 0; row < b->rows; row++) {
      const int64_t value = div_up(b->seq_len[row], round);
      if (value > last && value < next) next = value;
    }
    if (next == INT64_MAX) break;
    add_seed_launch(t, kind, splits, round, next);
    last = next;
  }
  t->f[PKV_COST_LAUNCHES] -= 1;
}

static void balanced_features(const tally *t, int64_t parts) {
  const pkv_policy_batch *b = t->batch;
  const int64_t heads = b->shape->kv_heads;
  int64_t tiles = 0, tokens = 0;
  for (int32_t row = 0; row < b->rows; row++) {
    const int64_t seen = seen_tokens(b, row);
    tiles += div_up(seen, PKV_TILE_TOKENS) * heads;
    tokens += seen * heads;
  }
  const int64_t used = parts < tiles ? parts : tiles;
  const double cuts = used > 0 ? (double)(used - 1) : 0, segments = (double)b->rows * (double)heads;
  const double merges = cuts < segments ? cuts : segments;
  t->f[PKV_COST_FILL] += (double)((tiles * PKV_TILE_TOKENS - tokens) * t->token_bytes) * 1e-6;
  launch l = {.slots = t->slots};
  const int64_t part = used > 0 ? div_up(tiles, used) : 1;
  add_tasks(&l, used, part * PKV_TILE_TOKENS);
  add_launch(t, &l);
  add_merge(t, used > 1 ? div_up(div_up(b->longest, PKV_TILE_TOKENS), part) + 1 : 0);
  add_states(t, cuts + merges);
}

/* Chunks of all rows together. */
static int64_t chunks_of(const pkv_policy_batch *b, int64_t chunk) {
  int64_t chunks = 0;
  for (int32_t row = 0; row < b->rows; row++)
    chunks += b->seq_len[row] > 0 ? div_up(seen_tokens(b, row), chunk) : 1;
  return chunks;
}

static void flashinfer_features(const tally *t, int64_t blocks, int32_t sms) {
  const pkv_policy_batch *b = t->batch;
  const int64_t heads = b->shape->kv_heads, room = blocks * sms / heads;
  const int64_t page = b->shape->page_tokens;
  int64_t chunk = div_up(b->longest, page) * page;
  launch l = {.slots = blocks * sms};
  if (chunk < page) chunk = page;
  if (b->rows < room) {
    int64_t low = CHUNK_TOKENS / page > 0 ? CHUNK_TOKENS / page : 1, high = chunk / page;
    while (low < high) { /* the smallest that fits */
      const int64_t middle = (low + high) / 2;
      if (chunks_of(b, middle * page) > room)
        low = middle + 1;
      else
        high = middle;
    }
    chunk = low * page;
  }
  const int64_t chunks = chunks_of(b, chunk);
  for (int32_t row = 0; row < b->rows; row++) {
    const int64_t seen = seen_tokens(b, row);
    add_tasks(&l, seen / chunk * heads, chunk);
    add_tasks(&l, seen % chunk > 0 ? heads : 0, seen % chunk);
  }
  add_launch(t, &l);
  if (chunks > b->rows) {
    t->f[PKV_COST_LAUNCHES] += 1;
    add_merge(t, div_up(b->longest, chunk));
    add_states(t, (double)(chunks * heads));
  }
}

static void shared_features(const tally *t, const pkv_plan_stats *tree, int64_t parts) {
  const double even = tree->total_cost > 0 ? (double)tree->max_part_cost / (double)tree->total_cost
                                           : 1.0 / (double)parts;
  t->f[PKV_COST_BYTES] = (double)tree->unique_kv_bytes * 1e-6;
  t->f[PKV_COST_SPAN] = (double)tree->unique_kv_bytes * 1e-3 * even;
  t->f[PKV_COST_TASKS] = (double)tree->tasks * 1e-3;
  t->f[PKV_COST_STATES] = (double)tree->merge_state_bytes * 1e-6;
  t->f[PKV_COST_MERGES] = (double)tree->nodes * t->batch->shape->kv_heads * 1e-3;
  t->f[PKV_COST_FILL] = (double)tree->padded_kv_bytes * 1e-6;
  t->f[PKV_COST_WORK] = (double)tree->total_kv_bytes * 1e-6;
  t->f[PKV_COST_LAUNCHES] = (double)tree->launches - 1;
}

void pkv_cost_features(double *f, int32_t *splits, int32_t kind, const pkv_policy_batch *batch,
                       const pkv_policy_device *device, const pkv_plan_stats *tree) {
  const pkv_shape *shape = batch->shape;
  const int64_t slots = (int64_t)device->sms * device->min_ctas;
  const int64_t parts = device->parts > 0 ? device->parts : slots;
  int64_t tokens = 0;
  memset(f, 0, PKV_COST_FEATURES * sizeof *f);
  *splits = 0;
  for (int32_t row = 0; row < batch->rows; row++)
    tokens += seen_tokens(batch, row);
  const tally t = {batch, f, slots, tokens > 0 ? batch->kv_bytes / tokens / shape->kv_heads : 0};
  f[PKV_COST_BYTES] = (double)batch->kv_bytes * 1e-6;
  switch (kind) {
  case PKV_ROUTE_SHARED:
    shared_features(&t, tree, parts);
    break;
  case PKV_ROUTE_BALANCED:
    balanced_features(&t, parts);
    break;
  case PKV_ROUTE_FLASHINFER:
    flashinfer_features(&t, TENSOR_BLOCKS, device->sms);
    break;
  case PKV_COST_FLASHINFER_CORES:
    flashinfer_features(&t, CORE_BLOCKS, device->sms);
    break;
  case PKV_COST_WORKQUEUE_FUSED:
    seed_features(&t, PKV_ROUTE_WORKQUEUE, 0);
    f[PKV_COST_LAUNCHES] -= 1;
    break;
  default:
    if (kind != PKV_ROUTE_WORKQUEUE) *splits = pkv_policy_splits(batch, (pkv_route)kind);
    seed_features(&t, kind, *splits);
    break;
  }
  f[PKV_COST_ONE] = 1;
  f[PKV_COST_ROWS] = batch->rows;
  f[PKV_COST_RAMP] = f[PKV_COST_BYTES] < RAMP_MB ? f[PKV_COST_BYTES] : RAMP_MB;
}
