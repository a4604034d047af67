/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the planner. The input is a shape, options, limits and lengths, any bytes.
 * Promises: whatever is refused leaves the memory alone and says why; whatever is built fits what
 * pkv_plan_size promised for its limits, passes pkv_plan_check, has counters, and is the same
 * again. Then some bytes of the plan are changed: pkv_plan_check may say what it likes, but not
 * crash.
 *
 *   int32 query_heads, kv_heads, head_dim, page_tokens, q_len, window
 *   int32 route, flags, parts, splits, bucket_tokens, chunk_tokens, tile_cost, segment_cost
 *   int32 damage (word to change, and to what); int32 seq_len[...]: the rest
 */
#include "plan/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

#define WORDS   15
#define LARGEST ((size_t)1 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void damage(pkv_plan *plan, uint32_t seed) {
  const size_t words = (size_t)plan->plan_bytes / 4;
  const size_t at = (seed >> 8) % words * 4;
  static const uint32_t values[] = {0, 1, 0x7fffffffu, 0x80000000u, 0xffffffffu};
  uint32_t word;
  memcpy(&word, (unsigned char *)plan + at, 4);
  word = (seed & 8u) ? word + (seed & 7u) - 3 : values[(seed & 7u) % 5];
  const size_t bytes = words * 4;
  memcpy((unsigned char *)plan + at, &word, 4);
  pkv_error err;
  if (pkv_plan_check(plan, bytes, &err) != PKV_OK) REQUIRE(err.text[0] != '\0');
}

static void build(const pkv_shape *shape, const pkv_plan_options *options, int32_t rows,
                  const int32_t *lengths, size_t bytes, size_t workspace, uint32_t seed) {
  pkv_error err = {PKV_OK, NULL, {0}};
  const pkv_plan *plan = NULL, *again = NULL;
  unsigned char *memory = aligned_alloc(64, bytes + 64), *twin = aligned_alloc(64, bytes + 64);
  if (memory == NULL || twin == NULL) {
    free(memory);
    free(twin);
    return;
  }
  memset(memory, 0x5a, bytes + 64);
  memset(twin, 0xa5, bytes + 64);
  const pkv_status status =
      pkv_plan_build(&plan, memory, bytes, shape, options, rows, lengths, &err);
  if (status != PKV_OK) { /* costs or counters beyond 64 bits: all else was checked by the size */
    REQUIRE(status == PKV_E_RANGE && plan == NULL && err.text[0] != '\0');
    for (size_t i = 0; i < bytes + 64; i++)
      REQUIRE(memory[i] == 0x5a);
  } else {
    REQUIRE((const void *)plan == memory && (size_t)plan->plan_bytes <= bytes);
    REQUIRE((size_t)plan->workspace_bytes <= workspace);
    REQUIRE(pkv_plan_check(plan, bytes, &err) == PKV_OK);
    for (size_t i = (size_t)plan->plan_bytes; i < bytes + 64; i++)
      REQUIRE(memory[i] == 0x5a);
    REQUIRE(pkv_plan_build(&again, twin, (size_t)plan->plan_bytes, shape, options, rows, lengths,
                           &err) == PKV_OK);
    REQUIRE(memcmp(memory, twin, (size_t)plan->plan_bytes) == 0);
    REQUIRE(pkv_plan_build(&again, twin, (size_t)plan->plan_bytes - 1, shape, options, rows,
                           lengths, &err) == PKV_E_TOO_SMALL);
    pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
    REQUIRE(pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F32, &err) == PKV_OK);
    REQUIRE(stats.useful_kv_bytes >= 0 && stats.padded_kv_bytes >= 0 && stats.tasks >= 0);
    REQUIRE(stats.max_part_cost <= stats.total_cost);
    damage((pkv_plan *)(void *)memory, seed);
  }
  free(memory);
  free(twin);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  int32_t w[WORDS] = {0};
  pkv_error err = {PKV_OK, NULL, {0}};
  size_t bytes, workspace;
  memcpy(w, data, size < sizeof w ? size : sizeof w);
  const pkv_shape shape = {sizeof shape, w[0], w[1], w[2], w[3], w[4], w[5]};
  const pkv_plan_options options = {sizeof options,
                                    (pkv_route)w[6],
                                    (uint32_t)w[7],
                                    w[8],
                                    w[9],
                                    w[10],
                                    w[11],
                                    (uint32_t)w[12],
                                    (uint32_t)w[13],
                                    0,
                                    0,
                                    0,
                                    0};
  const size_t rest = size > sizeof w ? (size - sizeof w) / 4 : 0;
  const int32_t rows = (int32_t)(rest < 4096 ? rest : 4096);
  int32_t *lengths = malloc(((size_t)rows + 1) * sizeof *lengths);
  if (lengths == NULL) return 0;
  int32_t longest = 0;
  if (rows > 0) memcpy(lengths, data + sizeof w, (size_t)rows * 4);
  for (int32_t row = 0; row < rows; row++) {
    if (lengths[row] < 0 && row % 8 != 7) lengths[row] &= 0x7fffffff; /* keep most inputs valid */
    if (lengths[row] > longest) longest = lengths[row];
  }
  const pkv_status status =
      pkv_plan_size(&bytes, &workspace, &shape, &options, rows, longest, &err);
  if (status != PKV_OK) {
    REQUIRE(err.text[0] != '\0' && bytes == 0 && workspace == 0);
  } else if (bytes <= LARGEST) {
    int negative = 0;
    for (int32_t row = 0; row < rows; row++)
      negative |= lengths[row] < 0;
    if (negative || options.route == PKV_ROUTE_SHARED) { /* fuzz_tree.c has that route */
      const pkv_plan *plan = NULL;
      void *memory = aligned_alloc(64, bytes);
      REQUIRE(memory == NULL || pkv_plan_build(&plan, memory, bytes, &shape, &options, rows,
                                               lengths, &err) == PKV_E_INVALID);
      free(memory);
    } else {
      build(&shape, &options, rows, lengths, bytes, workspace, (uint32_t)w[14]);
    }
  }
  free(lengths);
  return 0;
}
