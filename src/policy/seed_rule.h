/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many sequence splits the seed gives a row: the rules of its work queue and of its one-row
 * bucket route, restated from its paper and checked against its artifact's counters. Pure integer
 * functions, so that the policy's estimate and the plan use the same number.
 */
#ifndef PKV_POLICY_SEED_RULE_H
#define PKV_POLICY_SEED_RULE_H

#include <stdint.h>

/* What the seed calibrated and then held fixed: its bucket route and its default work queue. */
#define PKV_SEED_BUCKET_SPLITS    32
#define PKV_SEED_WORKQUEUE_SPLITS 24

/*
 * Work queue: max(up4(ceil(256 / (kv_heads * rows))), up4(ceil(tiles / 64))), at most
 * pkv_seed_split_cap(rows), at least 4, never more than tiles. rows, kv_heads >= 1; tiles >= 0, of
 * 32 tokens.
 */
int32_t pkv_seed_row_splits(int32_t rows, int32_t kv_heads, int64_t tiles);

/* 24 for 8 rows or more, 32 for 4 to 7, 40 for 2, 48 otherwise. */
int32_t pkv_seed_split_cap(int32_t rows);

/*
 * Bucket route under the second policy: up4(max(ceil(256 / (kv_heads * rows)), ceil(longest / 96)))
 * with the same bounds but 48 as the cap and the shortest row's tiles as the last word.
 */
int32_t pkv_seed_bucket_splits(int32_t rows, int32_t kv_heads, int64_t longest, int64_t shortest);

#endif
