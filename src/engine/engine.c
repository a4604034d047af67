/* SPDX-License-Identifier: Apache-2.0 */
/* Creating an engine, cancelling requests, statistics. */
#include "pkv/engine.h"

#include <math.h>

#include "attention/executor.h"
#include "base/status.h"
#include "engine/engine_state.h"

#define DEFAULT_PAGE     16
#define DEFAULT_ROWS     32
#define DEFAULT_REQUESTS 256
#define DEFAULT_CHUNK    512
#define DEVICE_CHUNK     2048 /* products of fewer rows leave a GPU idle */
#define LARGEST_CHUNK    65536
#define LARGEST_ROWS     4096
#define LARGEST_REQUESTS 1000000
#define LARGEST_CACHE    ((int64_t)1 << 40)

static int32_t or_default(int32_t value, int32_t fallback) {
  return value == 0 ? fallback : value;
}

static pkv_status check_options(const pkv_engine_options *o, pkv_error *err) {
  PKV_CHECK(err, o->page_tokens >= 0 && o->page_tokens <= 1024, PKV_E_RANGE,
            "options->page_tokens is %d, possible are 1 to 1024", (int)o->page_tokens);
  PKV_CHECK(err, o->cache_tokens >= 0 && o->cache_tokens <= LARGEST_CACHE, PKV_E_RANGE,
            "options->cache_tokens is %lld, possible are 1 to %lld", (long long)o->cache_tokens,
            (long long)LARGEST_CACHE);
  PKV_CHECK(err, o->max_rows >= 0 && o->max_rows <= LARGEST_ROWS, PKV_E_RANGE,
            "options->max_rows is %d, possible are 1 to %d", (int)o->max_rows, LARGEST_ROWS);
  PKV_CHECK(err, o->max_requests >= 0 && o->max_requests <= LARGEST_REQUESTS, PKV_E_RANGE,
            "options->max_requests is %d, possible are 1 to %d", (int)o->max_requests,
            LARGEST_REQUESTS);
  PKV_CHECK(err, o->max_seq_len >= 0, PKV_E_RANGE, "options->max_seq_len is %d",
            (int)o->max_seq_len);
  PKV_CHECK(err, o->prefill_chunk >= 0 && o->prefill_chunk <= LARGEST_CHUNK, PKV_E_RANGE,
            "options->prefill_chunk is %d, possible are 1 to %d", (int)o->prefill_chunk,
            LARGEST_CHUNK);
  PKV_CHECK(err, o->activations == PKV_ACTIVATIONS_I8 || o->activations == PKV_ACTIVATIONS_F32,
            PKV_E_INVALID, "options->activations is %d", (int)o->activations);
  PKV_CHECK(err, o->policy >= PKV_POLICY_FIXED && o->policy <= PKV_POLICY_ROOFLINE, PKV_E_INVALID,
            "options->policy is %d, known are 0 to %d", (int)o->policy, (int)PKV_POLICY_ROOFLINE);
  PKV_CHECK(err, o->order >= PKV_SCHED_TREE && o->order <= PKV_SCHED_DFS_WEIGHT, PKV_E_INVALID,
            "options->order is %d, known are 0 to %d", (int)o->order, (int)PKV_SCHED_DFS_WEIGHT);
  PKV_CHECK(err, o->admission >= PKV_SCHED_ALWAYS && o->admission <= PKV_SCHED_MARGINAL,
            PKV_E_INVALID, "options->admission is %d, known are 0 to %d", (int)o->admission,
            (int)PKV_SCHED_MARGINAL);
  PKV_CHECK(err, o->prefill_beside >= 0 && o->prefill_beside <= LARGEST_CHUNK, PKV_E_RANGE,
            "options->prefill_beside is %d, possible are 1 to %d", (int)o->prefill_beside,
            LARGEST_CHUNK);
  PKV_CHECK(err, isfinite(o->k_scale) && o->k_scale >= 0.0f, PKV_E_RANGE,
            "options->k_scale is %g, it is above 0", (double)o->k_scale);
  PKV_CHECK(err, isfinite(o->v_scale) && o->v_scale >= 0.0f, PKV_E_RANGE,
            "options->v_scale is %g, it is above 0", (double)o->v_scale);
  PKV_CHECK(err, o->tensor_parallel >= 0 && o->tensor_parallel <= PKV_MAX_RANKS, PKV_E_RANGE,
            "options->tensor_parallel is %d, possible are 1 to %d", (int)o->tensor_parallel,
            PKV_MAX_RANKS);
  PKV_CHECK(err, o->tensor_parallel <= 1 || o->device != PKV_DEVICE_CPU, PKV_E_UNSUPPORTED,
            "options->tensor_parallel is %d: several devices compute together, the CPU is one",
            (int)o->tensor_parallel);
  PKV_CHECK(err, o->swap_bytes >= 0, PKV_E_RANGE, "options->swap_bytes is %lld, at least 0",
            (long long)o->swap_bytes);
  PKV_CHECK(err, o->swap_bytes == 0 || o->device != PKV_DEVICE_CPU, PKV_E_UNSUPPORTED,
            "options->swap_bytes is %lld: on the CPU the cache is in the host's memory already",
            (long long)o->swap_bytes);
  PKV_CHECK(err, !o->batch_invariant || o->policy == PKV_POLICY_FIXED, PKV_E_INVALID,
            "options->policy %s may take routes that are not batch-invariant: set batch_invariant "
            "to 0",
            pkv_policy_name(o->policy));
  return PKV_OK;
}

/* Most tokens that the rows can hold; the default on the CPU is the context alone. */
static pkv_status default_cache(pkv_engine *e, pkv_error *err) {
  pkv_engine_options *const o = &e->options;
  const int64_t row = (int64_t)pkv_pages_for(e, o->max_seq_len) * o->page_tokens;
  o->cache_tokens = e->shape.context;
  if (e->weights != NULL) PKV_TRY(pkv_engine_device_room(&o->cache_tokens, e, err));
  if (o->cache_tokens > row * o->max_rows) o->cache_tokens = row * o->max_rows;
  return PKV_OK;
}

/* All but what follows from the cache's size: a device has its weights first. */
static void resolve_options(pkv_engine *e) {
  pkv_engine_options *const o = &e->options;
  o->max_rows = or_default(o->max_rows, DEFAULT_ROWS);
  o->page_tokens = or_default(o->page_tokens, DEFAULT_PAGE);
  o->max_requests = or_default(o->max_requests, DEFAULT_REQUESTS);
  o->prefill_chunk =
      or_default(o->prefill_chunk, o->device != PKV_DEVICE_CPU ? DEVICE_CHUNK : DEFAULT_CHUNK);
  o->prefill_beside = or_default(o->prefill_beside, o->prefill_chunk);
  if (o->prefill_beside > o->prefill_chunk) o->prefill_beside = o->prefill_chunk;
  o->max_seq_len = or_default(o->max_seq_len, e->shape.context);
  if (o->max_seq_len > e->shape.context) o->max_seq_len = e->shape.context;
  if (o->max_requests < o->max_rows) o->max_rows = o->max_requests;
  e->max_pages = pkv_pages_for(e, o->max_seq_len);
  e->max_tokens = o->max_rows + o->prefill_chunk;
  e->max_logits = o->max_rows + PKV_SCORE_TOKENS;
}

static pkv_status resolve_cache(pkv_engine *e, pkv_error *err) {
  pkv_engine_options *const o = &e->options;
  if (o->cache_tokens == 0) PKV_TRY(default_cache(e, err));
  if (o->cache_tokens < o->max_seq_len) o->max_seq_len = (int32_t)o->cache_tokens;
  if (o->route == PKV_ROUTE_AUTO)
    o->route = o->prefix_sharing ? PKV_ROUTE_SHARED : PKV_ROUTE_BALANCED;
  e->max_pages = pkv_pages_for(e, o->max_seq_len);
  return PKV_OK;
}

static pkv_status create_pool(pkv_engine *e, pkv_error *err) {
  pkv_pool_options pool = PKV_POOL_OPTIONS_INIT;
  pool.dtype = e->options.kv_dtype;
  pool.layers = e->shape.layers;
  pool.kv_heads = e->shape.kv_heads;
  pool.head_dim = e->shape.head_dim;
  pool.page_tokens = e->options.page_tokens;
  pool.pages = (e->options.cache_tokens + pool.page_tokens - 1) / pool.page_tokens;
  pool.k_scale = e->options.k_scale;
  pool.v_scale = e->options.v_scale;
  pool.allocator = &e->allocator;
  return pkv_pool_create(&e->pool, &pool, err);
}

static pkv_status create_cache(pkv_engine *e, pkv_error *err) {
  PKV_TRY(e->weights != NULL ? pkv_engine_device_pool(e, err) : create_pool(e, err));
  if (e->options.prefix_sharing)
    PKV_TRY(
        pkv_prefix_create(&e->prefix, e->pool, e->options.prefix_cache != 0, &e->allocator, err));
  PKV_TRY(
      pkv_table_create(&e->table, e->pool, e->options.max_rows, e->max_pages, &e->allocator, err));
  e->caches = pkv_alloc_zeroed(&e->allocator, (size_t)e->shape.layers, sizeof *e->caches);
  e->match_pages = pkv_alloc_zeroed(&e->allocator, (size_t)e->max_pages, sizeof *e->match_pages);
  PKV_CHECK(err, e->caches != NULL && e->match_pages != NULL, PKV_E_NOMEM,
            "no memory for the caches of %d layers", (int)e->shape.layers);
  for (int32_t i = 0; i < e->shape.layers; i++)
    PKV_TRY(pkv_pool_cache(&e->caches[i], e->pool, i, err));
  return PKV_OK;
}

static pkv_status create_requests(pkv_engine *e, pkv_error *err) {
  const pkv_allocator *const a = &e->allocator;
  const size_t requests = (size_t)e->options.max_requests, rows = (size_t)e->options.max_rows;
  e->seqs = pkv_alloc_zeroed(a, requests, sizeof *e->seqs);
  e->waiting = pkv_alloc_zeroed(a, requests, sizeof *e->waiting);
  e->running = pkv_alloc_zeroed(a, rows, sizeof *e->running);
  e->free_rows = pkv_alloc_zeroed(a, rows, sizeof *e->free_rows);
  PKV_CHECK(err,
            e->seqs != NULL && e->waiting != NULL && e->running != NULL && e->free_rows != NULL,
            PKV_E_NOMEM, "no memory for %zu requests and %zu rows", requests, rows);
  for (size_t i = 0; i < rows; i++)
    e->free_rows[i] = (int32_t)(rows - 1 - i);
  e->free_row_count = (int32_t)rows;
  return PKV_OK;
}

/* Few of the vocabulary: asked once for each token, then listed. */
static pkv_status find_ends(pkv_engine *e, pkv_error *err) {
  int32_t count = 0;
  for (int32_t i = 0; i < e->vocab; i++)
    count += pkv_model_is_end(e->model, i) != 0;
  if (count == 0) return PKV_OK;
  e->ends = pkv_alloc(&e->allocator, (size_t)count * sizeof *e->ends);
  e->end_logits = pkv_alloc(&e->allocator, (size_t)count * sizeof *e->end_logits);
  e->end_count = count;
  PKV_CHECK(err, e->ends != NULL && e->end_logits != NULL, PKV_E_NOMEM,
            "no memory for %d end tokens", (int)count);
  count = 0;
  for (int32_t i = 0; i < e->vocab; i++)
    if (pkv_model_is_end(e->model, i) != 0) e->ends[count++] = i;
  return PKV_OK;
}

/* index: of the device; -1 = the thread's own. */
static pkv_status create_executor(pkv_executor **out, const pkv_engine *e, int32_t index,
                                  pkv_error *err) {
  pkv_executor_options executor = PKV_EXECUTOR_OPTIONS_INIT;
  executor.device = e->options.device;
  executor.threads = e->options.threads;
  executor.isa = e->options.isa;
  executor.allocator = &e->allocator;
  return pkv_executor_create_at(out, &executor, index, err);
}

/* Those of ranks 1 and up are ranks[].executor. */
static pkv_status create_executors(pkv_engine *e, pkv_error *err) {
  const int32_t ranks = e->options.tensor_parallel;
  if (e->executor == NULL) PKV_TRY(create_executor(&e->executor, e, ranks > 1 ? 0 : -1, err));
  for (int32_t r = 1; r < ranks; r++)
    if (e->ranks[r].executor == NULL) PKV_TRY(create_executor(&e->ranks[r].executor, e, r, err));
  return PKV_OK;
}

static pkv_status create_parts(pkv_engine *e, pkv_error *err) {
  pkv_forward_options forward = {0};
  PKV_TRY(create_executors(e, err));
  resolve_options(e);
  if (e->options.device != PKV_DEVICE_CPU) PKV_TRY(pkv_engine_device_begin(e, err));
  PKV_TRY(resolve_cache(e, err));
  PKV_TRY(find_ends(e, err));
  PKV_TRY(create_requests(e, err));
  PKV_TRY(pkv_batch_create(e, &forward.workspace_bytes, err));
  if (e->weights != NULL) PKV_TRY(pkv_engine_device_forward(e, err));
  PKV_TRY(create_cache(e, err));
  PKV_TRY(pkv_queue_create(e, err));
  if (e->weights != NULL) return pkv_engine_device_attach(e, err);
  forward.max_tokens = e->max_tokens;
  forward.max_logits = e->max_logits;
  forward.max_positions = e->options.max_seq_len;
  forward.compute =
      e->options.activations == PKV_ACTIVATIONS_F32 ? PKV_COMPUTE_F32 : PKV_COMPUTE_I8;
  forward.allocator = &e->allocator;
  return pkv_forward_create(&e->forward, e->model, e->executor, &forward, err);
}

static pkv_status check_arguments(const pkv_model *model, const pkv_engine_options *options,
                                  pkv_error *err) {
  PKV_CHECK(err, model != NULL, PKV_E_INVALID, "model is NULL");
  PKV_CHECK_STRUCT(err, options, pkv_engine_options);
  PKV_TRY(check_options(options, err));
  PKV_CHECK(err, pkv_model_hparams(model)->layers > 0, PKV_E_STATE,
            "the model was opened for its tokenizer only");
  return PKV_OK;
}

static pkv_engine *create_empty(const pkv_model *model, const pkv_engine_options *options) {
  const pkv_allocator a = pkv_allocator_or_default(options->allocator);
  pkv_engine *const e = pkv_alloc_zeroed(&a, 1, sizeof *e);
  if (e == NULL) return NULL;
  e->allocator = a;
  e->model = model;
  e->shape = *pkv_model_hparams(model);
  e->next_order = 1;
  e->options = *options;
  e->lags = options->device != PKV_DEVICE_CPU && options->overlap != 0;
  e->options.tensor_parallel = or_default(options->tensor_parallel, 1);
  return e;
}

/* Owns e. */
static pkv_status create(pkv_engine **out, pkv_engine *e, const pkv_model *model, pkv_error *err) {
  PKV_CHECK(err, e != NULL, PKV_E_NOMEM, "no memory for an engine");
  const pkv_tokenizer *const tokenizer = pkv_model_tokenizer(model);
  e->vocab = e->shape.vocab;
  if (tokenizer != NULL && pkv_tokenizer_vocab_used(tokenizer) < e->vocab)
    e->vocab = pkv_tokenizer_vocab_used(tokenizer);
  const pkv_status status = create_parts(e, err);
  if (status != PKV_OK) {
    pkv_engine_destroy(e);
    return status;
  }
  *out = e;
  return PKV_OK;
}

pkv_status pkv_engine_create(pkv_engine **out, const pkv_model *model,
                             const pkv_engine_options *options, pkv_error *err) {
  const pkv_engine_options defaults = PKV_ENGINE_OPTIONS_INIT;
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  if (options == NULL) options = &defaults;
  PKV_TRY(check_arguments(model, options, err));
  return create(out, create_empty(model, options), model, err);
}

pkv_status pkv_engine_create_on(pkv_engine **out, const pkv_model *model,
                                pkv_executor *const *executors, int32_t count,
                                const pkv_engine_options *options, pkv_error *err) {
  *out = NULL;
  pkv_status status = check_arguments(model, options, err);
  pkv_engine *const e = status == PKV_OK ? create_empty(model, options) : NULL;
  for (int32_t r = 0; r < count; r++) {
    if (e != NULL && r < e->options.tensor_parallel)
      *(r == 0 ? &e->executor : &e->ranks[r].executor) = executors[r];
    else
      pkv_executor_destroy(executors[r]);
  }
  return status == PKV_OK ? create(out, e, model, err) : status;
}

void pkv_engine_destroy(pkv_engine *engine) {
  pkv_engine *const e = engine;
  if (e == NULL) return;
  const pkv_allocator a = e->allocator;
  pkv_engine_device_save(e);
  pkv_forward_destroy(e->forward);
  pkv_device_forward_destroy(e->device);
  pkv_batch_destroy(e);
  pkv_free(&a, e->caches, (size_t)e->shape.layers * sizeof *e->caches);
  pkv_sched_destroy(e->sched);
  pkv_free(&a, e->match_pages, (size_t)e->max_pages * sizeof *e->match_pages);
  pkv_free(&a, e->ends, (size_t)e->end_count * sizeof *e->ends);
  pkv_free(&a, e->end_logits, (size_t)e->end_count * sizeof *e->end_logits);
  pkv_guides_destroy(e);
  pkv_table_destroy(e->table);
  pkv_prefix_destroy(e->prefix);
  pkv_pool_destroy(e->pool);
  pkv_engine_device_end(e);
  for (int32_t i = 0; e->seqs != NULL && i < e->options.max_requests; i++)
    pkv_seq_free(e, &e->seqs[i]);
  pkv_free(&a, e->seqs, (size_t)e->options.max_requests * sizeof *e->seqs);
  pkv_free(&a, e->waiting, (size_t)e->options.max_requests * sizeof *e->waiting);
  pkv_free(&a, e->running, (size_t)e->options.max_rows * sizeof *e->running);
  pkv_free(&a, e->free_rows, (size_t)e->options.max_rows * sizeof *e->free_rows);
  for (int32_t r = 1; r < PKV_MAX_RANKS; r++)
    pkv_executor_destroy(e->ranks[r].executor);
  pkv_executor_destroy(e->executor);
  pkv_free(&a, e, sizeof *e);
}

void pkv_engine_cancel(pkv_engine *engine, int64_t id) {
  if (engine != NULL) engine->asked = true;
  for (int32_t i = 0; engine != NULL && i < engine->options.max_requests; i++) {
    pkv_seq *const s = &engine->seqs[i];
    if (s->state == PKV_SEQ_FREE || s->id != id) continue;
    s->cancelled = true;
    pkv_queue_forget(engine, i);
  }
}

void pkv_engine_pause(pkv_engine *engine, int64_t id, int32_t paused) {
  if (engine != NULL) engine->asked = true;
  for (int32_t i = 0; engine != NULL && i < engine->options.max_requests; i++) {
    pkv_seq *const s = &engine->seqs[i];
    if (s->state == PKV_SEQ_FREE || s->id != id) continue;
    s->paused = paused != 0;
    pkv_queue_hold(engine, i);
  }
}

int32_t pkv_engine_pending(const pkv_engine *engine) {
  return engine == NULL ? 0 : engine->running_count + engine->waiting_count;
}

void pkv_engine_clear_cache(pkv_engine *engine) {
  if (engine == NULL || engine->prefix == NULL) return;
  (void)pkv_prefix_evict(engine->prefix, INT64_MAX);
}

void pkv_engine_get_stats(pkv_engine_stats *out, const pkv_engine *engine) {
  pkv_pool_stats pool;
  pkv_prefix_stats prefix;
  if (out == NULL || engine == NULL || out->struct_size != sizeof *out) return;
  *out = engine->stats;
  pkv_pool_get_stats(&pool, engine->pool);
  pkv_prefix_get_stats(&prefix, engine->prefix);
  out->struct_size = (uint32_t)sizeof *out;
  out->max_seq_len = engine->options.max_seq_len;
  out->rows_running = engine->running_count;
  out->rows_waiting = engine->waiting_count;
  out->rows_paused = out->rows_deferred = 0;
  for (int32_t i = 0; i < engine->running_count; i++)
    out->rows_paused += engine->seqs[engine->running[i]].paused;
  for (int32_t i = 0; i < engine->waiting_count; i++)
    out->rows_deferred += engine->seqs[engine->waiting[i]].paused;
  out->pages_total = pool.pages_total;
  out->pages_in_use = pool.pages_in_use - prefix.idle;
  out->pages_cached = prefix.idle;
  out->pages_free = pool.pages_free;
  out->pages_shared = engine->prefix != NULL ? prefix.shared : pool.pages_shared;
  out->page_copies = pool.copies;
  out->evictions = prefix.evictions;
  out->swap_used_bytes = out->swap_bytes;
  if (engine->swap.pages > 0)
    out->swap_used_bytes = out->swap_bytes / (size_t)engine->swap.pages *
                           (size_t)(engine->swap.pages - engine->swap.free_count);
  out->cache_bytes = engine->weights != NULL ? engine->device_cache_bytes : pool.storage_bytes;
}
