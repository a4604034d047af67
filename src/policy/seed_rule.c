/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/seed_rule.h"

static int64_t up4(int64_t value) {
  return (value + 3) / 4 * 4;
}

static int64_t div_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* `wanted` between 4 and cap, and then never more than there is to split. */
static int32_t bounded(int64_t wanted, int32_t cap, int64_t tiles) {
  int64_t splits = wanted > cap ? cap : wanted;
  if (splits < 4) splits = 4;
  return (int32_t)(splits > tiles ? tiles : splits);
}

int32_t pkv_seed_split_cap(int32_t rows) {
  if (rows >= 8) return 24;
  if (rows >= 4) return 32;
  return rows == 2 ? 40 : 48;
}

int32_t pkv_seed_row_splits(int32_t rows, int32_t kv_heads, int64_t tiles) {
  const int64_t occupancy = up4(div_up(256, (int64_t)kv_heads * rows));
  const int64_t length = up4(div_up(tiles, 64));
  return bounded(occupancy > length ? occupancy : length, pkv_seed_split_cap(rows), tiles);
}

int32_t pkv_seed_bucket_splits(int32_t rows, int32_t kv_heads, int64_t longest, int64_t shortest) {
  const int64_t occupancy = div_up(256, (int64_t)kv_heads * rows);
  const int64_t length = div_up(longest, 96);
  return bounded(up4(occupancy > length ? occupancy : length), 48, shortest);
}
