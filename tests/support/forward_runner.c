/* SPDX-License-Identifier: Apache-2.0 */
#include "support/forward_runner.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static pkv_error error;

static void must(pkv_status status) {
  if (status != PKV_OK) fail_msg("%s: %s: %s", pkv_status_name(status), error.where, error.text);
}

static pkv_shape shape_of(const forward_runner *r, int32_t q_len, int32_t window) {
  const pkv_hparams *hp = pkv_model_hparams(r->model);
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = hp->query_heads;
  shape.kv_heads = hp->kv_heads;
  shape.head_dim = hp->head_dim;
  shape.page_tokens = r->options.page_tokens;
  shape.q_len = q_len;
  shape.window = window;
  return shape;
}

static pkv_plan_options plan_options(void) {
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.flags = PKV_PLAN_BATCH_INVARIANT;
  return options;
}

static void make_pool(forward_runner *r, int32_t max_pages) {
  const pkv_hparams *hp = pkv_model_hparams(r->model);
  pkv_pool_options options = PKV_POOL_OPTIONS_INIT;
  options.dtype = r->options.kv_dtype;
  options.layers = hp->layers;
  options.kv_heads = hp->kv_heads;
  options.head_dim = hp->head_dim;
  options.page_tokens = r->options.page_tokens;
  options.pages = (int64_t)max_pages * r->options.rows;
  must(pkv_pool_create(&r->pool, &options, &error));
  must(pkv_table_create(&r->table, r->pool, r->options.rows, max_pages, NULL, &error));
  r->caches = calloc((size_t)hp->layers, sizeof *r->caches);
  for (int32_t i = 0; i < hp->layers; i++)
    must(pkv_pool_cache(&r->caches[i], r->pool, i, &error));
}

/* Room for the largest plan and workspace of any use below. */
static size_t size_plans(forward_runner *r) {
  size_t workspace = 0;
  const pkv_plan_options options = plan_options();
  const int32_t window = pkv_model_hparams(r->model)->window;
  for (int32_t i = 0; i < 4; i++) {
    size_t plan_bytes = 0, workspace_bytes = 0;
    const int32_t decode = i % 2;
    const pkv_shape shape = shape_of(r, decode ? 1 : r->options.max_tokens, i < 2 ? 0 : window);
    must(pkv_plan_size(&plan_bytes, &workspace_bytes, &shape, &options,
                       decode ? r->options.rows : 1, r->options.max_seq_len, &error));
    if (plan_bytes > r->plan_bytes) r->plan_bytes = plan_bytes;
    if (workspace_bytes > workspace) workspace = workspace_bytes;
  }
  r->plan_bytes = (r->plan_bytes + 63) / 64 * 64;
  return workspace;
}

int forward_runner_init(forward_runner *r, const pkv_model *model,
                        const forward_runner_options *options) {
  memset(r, 0, sizeof *r);
  r->options = *options;
  if (r->options.page_tokens == 0) r->options.page_tokens = 16;
  r->model = model;
  pkv_executor_options eo = PKV_EXECUTOR_OPTIONS_INIT;
  eo.isa = options->isa;
  eo.threads = options->threads;
  eo.allocator = options->allocator;
  if (pkv_executor_create(&r->executor, &eo, &error) != PKV_OK) return -1;
  const int32_t page = r->options.page_tokens;
  make_pool(r, (options->max_seq_len + page - 1) / page);
  const size_t tokens = (size_t)options->max_tokens, rows = (size_t)options->rows;
  const size_t most = tokens > rows ? tokens : rows;
  const pkv_forward_options fo = {.max_tokens = (int32_t)most,
                                  .max_logits = (int32_t)most,
                                  .max_positions = options->max_seq_len,
                                  .compute = options->compute,
                                  .workspace_bytes = size_plans(r),
                                  .allocator = options->allocator};
  must(pkv_forward_create(&r->forward, model, r->executor, &fo, &error));
  r->plan_memory = aligned_alloc(64, 2 * r->plan_bytes);
  r->positions = calloc(most, sizeof *r->positions);
  r->logit_tokens = calloc(most, sizeof *r->logit_tokens);
  r->lengths = calloc(most, sizeof *r->lengths);
  r->slots = calloc(most, sizeof *r->slots);
  return 0;
}

void forward_runner_deinit(forward_runner *r) {
  pkv_forward_destroy(r->forward);
  pkv_table_destroy(r->table);
  pkv_pool_destroy(r->pool);
  pkv_executor_destroy(r->executor);
  free(r->caches);
  free(r->plan_memory);
  free(r->positions);
  free(r->logit_tokens);
  free(r->lengths);
  free(r->slots);
}

static void run(forward_runner *r, const int32_t *ids, int32_t rows, int32_t first_row,
                int32_t q_len, int32_t logit_count, float *logits) {
  const int32_t window = pkv_model_hparams(r->model)->window;
  const pkv_shape shape = shape_of(r, q_len, 0), local_shape = shape_of(r, q_len, window);
  const pkv_plan_options options = plan_options();
  const pkv_plan *plan = NULL, *local = NULL;
  must(pkv_plan_build(&plan, r->plan_memory, r->plan_bytes, &shape, &options, rows, r->lengths,
                      &error));
  if (window > 0)
    must(pkv_plan_build(&local, r->plan_memory + r->plan_bytes, r->plan_bytes, &local_shape,
                        &options, rows, r->lengths, &error));
  const int32_t tokens = rows * q_len;
  const pkv_forward_group group = {.plan = plan,
                                   .local_plan = local,
                                   .block_table = pkv_table_row(r->table, first_row),
                                   .block_table_stride = pkv_table_stride(r->table),
                                   .max_pages = (int32_t)pkv_table_stride(r->table)};
  const pkv_forward_batch batch = {.tokens = tokens,
                                   .ids = ids,
                                   .positions = r->positions,
                                   .slots = r->slots,
                                   .groups = &group,
                                   .group_count = 1,
                                   .logit_tokens = r->logit_tokens,
                                   .logit_count = logit_count,
                                   .logits = logits};
  must(pkv_forward_run(r->forward, r->caches, &batch, &error));
}

void forward_runner_feed(forward_runner *r, int32_t row, const int32_t *ids, int32_t count,
                         bool all, float *logits) {
  const int32_t vocab = pkv_model_hparams(r->model)->vocab;
  for (int32_t done = 0; done < count;) {
    const int32_t n = count - done < r->options.max_tokens ? count - done : r->options.max_tokens;
    const int32_t before = pkv_table_seq_len(r->table, row);
    must(pkv_table_extend(r->table, row, n, &error));
    must(pkv_table_slots(r->slots, r->table, row, before, n, &error));
    for (int32_t i = 0; i < n; i++) {
      r->positions[i] = before + i;
      r->logit_tokens[i] = all ? i : n - 1;
    }
    r->lengths[0] = before + n;
    const bool last = done + n == count;
    const int32_t wanted = !logits ? 0 : (all ? n : (last ? 1 : 0));
    run(r, ids + done, 1, row, n, wanted, all ? logits + (int64_t)done * vocab : logits);
    done += n;
  }
}

void forward_runner_step(forward_runner *r, const int32_t *ids, int32_t rows, float *logits) {
  for (int32_t i = 0; i < rows; i++) {
    const int32_t before = pkv_table_seq_len(r->table, i);
    must(pkv_table_extend(r->table, i, 1, &error));
    must(pkv_table_slots(r->slots + i, r->table, i, before, 1, &error));
    r->positions[i] = before;
    r->lengths[i] = before + 1;
    r->logit_tokens[i] = i;
  }
  run(r, ids, rows, 0, 1, rows, logits);
}

void forward_runner_reset(forward_runner *r) {
  for (int32_t i = 0; i < r->options.rows; i++)
    must(pkv_table_truncate(r->table, i, 0, &error));
}

double log_probability(const float *logits, int32_t vocab, int32_t token) {
  double largest = -INFINITY, sum = 0.0;
  for (int32_t i = 0; i < vocab; i++)
    largest = fmax(largest, (double)logits[i]);
  for (int32_t i = 0; i < vocab; i++)
    sum += exp((double)logits[i] - largest);
  return (double)logits[token] - largest - log(sum);
}

int32_t best_token(const float *logits, int32_t vocab) {
  int32_t best = 0;
  for (int32_t i = 1; i < vocab; i++) {
    if (logits[i] > logits[best]) best = i;
  }
  return best;
}
