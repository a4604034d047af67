/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/policy.h"

#include "policy/seed_rule.h"

#define SEED_TILE   PKV_SEED_TILE_TOKENS
#define SEED_BUCKET 4096 /* bucket_padded's default */

static int64_t div_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* Distinct values of ceil(length / bucket), by stepping from each to the next larger one. */
static int64_t distinct_lengths(const pkv_policy_batch *batch, int64_t bucket) {
  int64_t count = 0, last = -1;
  for (;;) {
    int64_t next = INT64_MAX;
    for (int32_t row = 0; row < batch->rows; row++) {
      const int64_t value = div_up(batch->seq_len[row], bucket);
      if (value > last && value < next) next = value;
    }
    if (next == INT64_MAX) return count;
    last = next;
    count++;
  }
}

/* KV bytes when every row is padded to its bucket. */
static double padded_bytes(const pkv_policy_batch *batch) {
  double tokens = 0, padded = 0;
  for (int32_t row = 0; row < batch->rows; row++) {
    tokens += batch->seq_len[row];
    padded += (double)(div_up(batch->seq_len[row], SEED_BUCKET) * SEED_BUCKET);
  }
  return tokens > 0 ? (double)batch->kv_bytes * padded / tokens : 0;
}

int32_t pkv_policy_splits(const pkv_policy_batch *batch, pkv_route route) {
  const int32_t heads = batch->shape->kv_heads;
  const int64_t longest = div_up(batch->longest, SEED_TILE);
  const int64_t shortest = div_up(batch->shortest, SEED_TILE);
  int32_t splits = 1;
  if (batch->rows == 0) return 1;
  if (route == PKV_ROUTE_WORKQUEUE) splits = pkv_seed_row_splits(batch->rows, heads, longest);
  if (route == PKV_ROUTE_SPLIT || route == PKV_ROUTE_BUCKET_EXACT ||
      route == PKV_ROUTE_BUCKET_PADDED)
    splits = pkv_seed_bucket_splits(batch->rows, heads, longest, shortest);
  return splits > 0 ? splits : 1;
}

double pkv_policy_estimate(const pkv_policy_batch *batch, const pkv_policy_device *device,
                           pkv_route route, int32_t splits) {
  const pkv_shape *shape = batch->shape;
  const double state = (double)(shape->head_dim + 2) * 4 * shape->q_len;
  const double segments = (double)batch->rows * shape->kv_heads;
  double kv = (double)batch->kv_bytes, ctas = segments * splits / device->sms;
  double launches = 2, states = (double)batch->rows * shape->query_heads * splits;
  switch (route) {
  case PKV_ROUTE_BUCKET_EXACT:
    launches = 2.0 * (double)distinct_lengths(batch, 1);
    break;
  case PKV_ROUTE_BUCKET_PADDED:
    launches = 2.0 * (double)distinct_lengths(batch, SEED_BUCKET);
    kv = padded_bytes(batch);
    break;
  case PKV_ROUTE_FLASHINFER:
    launches = 1;
    states = 0;
    ctas = segments / device->sms;
    break;
  case PKV_ROUTE_BALANCED:
  case PKV_ROUTE_SHARED: {
    const double cuts = (double)device->sms * device->min_ctas - 1;
    launches = 1;
    states = (cuts + (cuts < segments ? cuts : segments)) * (shape->query_heads / shape->kv_heads);
    ctas = device->min_ctas;
    break;
  }
  default:
    break;
  }
  if (batch->rows == 0) return launches * device->launch_us;
  const double penalty = ctas < device->min_ctas ? device->min_ctas / ctas : 1;
  return (kv * penalty + states * state) / device->read_bytes_us + launches * device->launch_us;
}
