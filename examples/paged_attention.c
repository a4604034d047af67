/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of two sequences on a paged cache, with the public header only; checks its own
 * result. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <pkv/pkv.h>

enum { HEADS = 6, KV_HEADS = 2, DIM = 64, ROWS = 2 };

static pkv_error err;
#define TRY(call)                                                                                  \
  if ((call) != PKV_OK) return fprintf(stderr, "%s: %s\n", err.where, err.text), 1

int main(void) {
  static const int32_t seq_len[ROWS] = {100, 37};
  static float k[100 * KV_HEADS * DIM], v[100 * KV_HEADS * DIM], q[ROWS * HEADS * DIM];
  static float out[ROWS * HEADS * DIM];
  pkv_executor *executor;
  pkv_pool *pool;
  pkv_table *table;
  pkv_cache cache;
  pkv_executor_options executor_options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_pool_options pool_options = PKV_POOL_OPTIONS_INIT;
  pool_options.kv_heads = KV_HEADS, pool_options.head_dim = DIM, pool_options.pages = 64;
  TRY(pkv_executor_create(&executor, &executor_options, &err));
  TRY(pkv_pool_create(&pool, &pool_options, &err));
  TRY(pkv_pool_cache(&cache, pool, 0, &err));
  TRY(pkv_table_create(&table, pool, ROWS, 16, NULL, &err));

  /* Every key is 0, so that each query weighs its row's values equally: the answer is their
   * mean. */
  for (int32_t row = 0; row < ROWS; row++) {
    int64_t slots[100];
    pkv_append_args append = PKV_APPEND_ARGS_INIT;
    for (int i = 0; i < seq_len[row] * KV_HEADS * DIM; i++)
      v[i] = (float)(row + 1) + (float)(i % DIM) / 8;
    TRY(pkv_table_extend(table, row, seq_len[row], &err));
    TRY(pkv_table_slots(slots, table, row, 0, seq_len[row], &err));
    append.cache = &cache, append.tokens = seq_len[row], append.slots = slots;
    append.k = k, append.v = v;
    TRY(pkv_append(executor, &append, &err));
  }

  pkv_shape shape = PKV_SHAPE_INIT;
  pkv_plan_options plan_options = PKV_PLAN_OPTIONS_INIT;
  shape.query_heads = HEADS, shape.kv_heads = KV_HEADS, shape.head_dim = DIM;
  size_t plan_bytes, workspace_bytes;
  const pkv_plan *plan;
  TRY(pkv_plan_size(&plan_bytes, &workspace_bytes, &shape, &plan_options, ROWS, 256, &err));
  void *plan_memory = aligned_alloc(64, (plan_bytes + 63) / 64 * 64);
  void *workspace = aligned_alloc(64, (workspace_bytes + 63) / 64 * 64);
  if (plan_memory == NULL || workspace == NULL) return 1;
  TRY(pkv_plan_build(&plan, plan_memory, plan_bytes, &shape, &plan_options, ROWS, seq_len, &err));

  for (int i = 0; i < ROWS * HEADS * DIM; i++)
    q[i] = (float)(i % 7) - 3;
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  args.plan = plan, args.cache = &cache, args.q = q, args.out = out;
  args.block_table = pkv_table_row(table, 0), args.block_table_stride = pkv_table_stride(table);
  args.max_pages = 16, args.workspace = workspace, args.workspace_bytes = workspace_bytes;
  TRY(pkv_attention_run(executor, &args, &err));

  int wrong = 0;
  for (int i = 0; i < ROWS * HEADS * DIM; i++)
    wrong += !(fabsf(out[i] - ((float)(i / (HEADS * DIM) + 1) + (float)(i % DIM) / 8)) < 1e-4f);
  printf("%s: %d of %d outputs wrong\n", pkv_isa_name(pkv_executor_isa(executor)), wrong,
         ROWS * HEADS * DIM);
  free(plan_memory);
  free(workspace);
  pkv_table_destroy(table);
  pkv_pool_destroy(pool);
  pkv_executor_destroy(executor);
  return wrong != 0;
}
