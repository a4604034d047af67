/* SPDX-License-Identifier: Apache-2.0 */
/* Creating an engine, submitting and cancelling requests, statistics. */
#include "pkv/engine.h"

#include <math.h>
#include <string.h>

#include "base/hash.h"
#include "base/status.h"
#include "engine/engine_state.h"

#define DEFAULT_PAGE     16
#define DEFAULT_ROWS     32
#define DEFAULT_REQUESTS 256
#define DEFAULT_CHUNK    512
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
  PKV_CHECK(err, !o->batch_invariant || o->policy == PKV_POLICY_FIXED, PKV_E_INVALID,
            "options->policy %s may take routes that are not batch-invariant: set batch_invariant "
            "to 0",
            pkv_policy_name(o->policy));
  return PKV_OK;
}

static void resolve_options(pkv_engine *e, const pkv_engine_options *given) {
  pkv_engine_options *const o = &e->options;
  *o = *given;
  o->page_tokens = or_default(o->page_tokens, DEFAULT_PAGE);
  o->max_rows = or_default(o->max_rows, DEFAULT_ROWS);
  o->max_requests = or_default(o->max_requests, DEFAULT_REQUESTS);
  o->prefill_chunk = or_default(o->prefill_chunk, DEFAULT_CHUNK);
  o->max_seq_len = or_default(o->max_seq_len, e->shape.context);
  if (o->max_seq_len > e->shape.context) o->max_seq_len = e->shape.context;
  if (o->max_requests < o->max_rows) o->max_rows = o->max_requests;
  if (o->cache_tokens == 0) { /* no more than the rows can ever hold */
    const int64_t row = (int64_t)pkv_pages_for(e, o->max_seq_len) * o->page_tokens;
    o->cache_tokens = e->shape.context;
    if (o->cache_tokens > row * o->max_rows) o->cache_tokens = row * o->max_rows;
  }
  if (o->cache_tokens < o->max_seq_len) o->max_seq_len = (int32_t)o->cache_tokens;
  if (o->route == PKV_ROUTE_AUTO)
    o->route = o->prefix_sharing ? PKV_ROUTE_SHARED : PKV_ROUTE_BALANCED;
  e->max_pages = pkv_pages_for(e, o->max_seq_len);
  e->max_tokens = o->max_rows + o->prefill_chunk;
  e->max_logits = o->max_rows + PKV_SCORE_TOKENS;
}

static pkv_status create_cache(pkv_engine *e, pkv_error *err) {
  pkv_pool_options pool = PKV_POOL_OPTIONS_INIT;
  pool.dtype = e->options.kv_dtype;
  pool.layers = e->shape.layers;
  pool.kv_heads = e->shape.kv_heads;
  pool.head_dim = e->shape.head_dim;
  pool.page_tokens = e->options.page_tokens;
  pool.pages = (e->options.cache_tokens + pool.page_tokens - 1) / pool.page_tokens;
  pool.allocator = &e->allocator;
  PKV_TRY(pkv_pool_create(&e->pool, &pool, err));
  PKV_TRY(
      pkv_table_create(&e->table, e->pool, e->options.max_rows, e->max_pages, &e->allocator, err));
  e->caches = pkv_alloc_zeroed(&e->allocator, (size_t)e->shape.layers, sizeof *e->caches);
  PKV_CHECK(err, e->caches != NULL, PKV_E_NOMEM, "no memory for the caches of %d layers",
            (int)e->shape.layers);
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

static pkv_status create_parts(pkv_engine *e, pkv_error *err) {
  pkv_executor_options executor = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_forward_options forward = {0};
  executor.threads = e->options.threads;
  executor.isa = e->options.isa;
  executor.allocator = &e->allocator;
  PKV_TRY(pkv_executor_create(&e->executor, &executor, err));
  PKV_TRY(create_requests(e, err));
  PKV_TRY(create_cache(e, err));
  PKV_TRY(pkv_batch_create(e, &forward.workspace_bytes, err));
  forward.max_tokens = e->max_tokens;
  forward.max_logits = e->max_logits;
  forward.max_positions = e->options.max_seq_len;
  forward.compute =
      e->options.activations == PKV_ACTIVATIONS_F32 ? PKV_COMPUTE_F32 : PKV_COMPUTE_I8;
  forward.allocator = &e->allocator;
  return pkv_forward_create(&e->forward, e->model, e->executor, &forward, err);
}

pkv_status pkv_engine_create(pkv_engine **out, const pkv_model *model,
                             const pkv_engine_options *options, pkv_error *err) {
  const pkv_engine_options defaults = PKV_ENGINE_OPTIONS_INIT;
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, model != NULL, PKV_E_INVALID, "model is NULL");
  if (options == NULL) options = &defaults;
  PKV_CHECK_STRUCT(err, options, pkv_engine_options);
  PKV_TRY(check_options(options, err));
  const pkv_hparams *const shape = pkv_model_hparams(model);
  PKV_CHECK(err, shape->layers > 0, PKV_E_STATE, "the model was opened for its tokenizer only");

  const pkv_allocator a = pkv_allocator_or_default(options->allocator);
  pkv_engine *const e = pkv_alloc_zeroed(&a, 1, sizeof *e);
  PKV_CHECK(err, e != NULL, PKV_E_NOMEM, "no memory for an engine");
  e->allocator = a;
  e->model = model;
  e->shape = *shape;
  e->next_id = 1;
  resolve_options(e, options);
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

void pkv_engine_destroy(pkv_engine *engine) {
  pkv_engine *const e = engine;
  if (e == NULL) return;
  const pkv_allocator a = e->allocator;
  pkv_forward_destroy(e->forward);
  pkv_batch_destroy(e);
  pkv_free(&a, e->caches, (size_t)e->shape.layers * sizeof *e->caches);
  pkv_table_destroy(e->table);
  pkv_pool_destroy(e->pool);
  for (int32_t i = 0; e->seqs != NULL && i < e->options.max_requests; i++) {
    pkv_free(&a, e->seqs[i].tokens, (size_t)e->seqs[i].capacity * sizeof(int32_t));
    pkv_free(&a, e->seqs[i].digests, (size_t)e->seqs[i].digest_capacity * sizeof(uint64_t));
  }
  pkv_free(&a, e->seqs, (size_t)e->options.max_requests * sizeof *e->seqs);
  pkv_free(&a, e->waiting, (size_t)e->options.max_requests * sizeof *e->waiting);
  pkv_free(&a, e->running, (size_t)e->options.max_rows * sizeof *e->running);
  pkv_free(&a, e->free_rows, (size_t)e->options.max_rows * sizeof *e->free_rows);
  pkv_executor_destroy(e->executor);
  pkv_free(&a, e, sizeof *e);
}

static pkv_status check_request(const pkv_engine *e, const pkv_request *r, pkv_error *err) {
  const int32_t longest = e->options.max_seq_len;
  PKV_CHECK(err, r->prompt != NULL, PKV_E_INVALID, "request->prompt is NULL");
  PKV_CHECK(err, r->prompt_tokens >= 1, PKV_E_INVALID,
            "request->prompt_tokens is %d, a prompt has at least 1", (int)r->prompt_tokens);
  PKV_CHECK(err, r->max_tokens >= 0, PKV_E_INVALID, "request->max_tokens is %d",
            (int)r->max_tokens);
  PKV_CHECK(err, r->max_tokens > 0 || r->echo, PKV_E_INVALID,
            "request->max_tokens is 0, which only makes sense with echo");
  PKV_CHECK(err, isfinite(r->temperature) && r->temperature >= 0.0f, PKV_E_RANGE,
            "request->temperature is %g, it is 0 or more", (double)r->temperature);
  PKV_CHECK(err, r->top_k >= 0, PKV_E_RANGE, "request->top_k is %d, it is 0 or more",
            (int)r->top_k);
  PKV_CHECK(err, r->top_p >= 0.0f && r->top_p <= 1.0f, PKV_E_RANGE,
            "request->top_p is %g, it lies in 0 to 1", (double)r->top_p);
  PKV_CHECK(err, r->top_logprobs >= 0 && r->top_logprobs <= PKV_MAX_TOP_LOGPROBS, PKV_E_RANGE,
            "request->top_logprobs is %d, possible are 0 to %d", (int)r->top_logprobs,
            PKV_MAX_TOP_LOGPROBS);
  for (int32_t i = 0; i < r->prompt_tokens; i++)
    PKV_CHECK(err, r->prompt[i] >= 0 && r->prompt[i] < e->shape.vocab, PKV_E_RANGE,
              "request->prompt[%d] is %d, the vocabulary has %d tokens", (int)i, (int)r->prompt[i],
              (int)e->shape.vocab);
  const int32_t most = r->max_tokens == 0 ? longest : longest - 1;
  PKV_CHECK(err, r->prompt_tokens <= most, PKV_E_LIMIT,
            "the prompt has %d tokens, at most %d fit (context and cache hold %d)",
            (int)r->prompt_tokens, (int)most, (int)longest);
  PKV_CHECK(err, pkv_engine_pending(e) < e->options.max_requests, PKV_E_LIMIT,
            "%d requests are running or waiting, the most that this engine takes",
            (int)e->options.max_requests);
  return PKV_OK;
}

/* Room for the tokens and digests of a request; kept with the slot for later ones. */
static pkv_status grow_slot(pkv_engine *e, pkv_seq *s, int32_t tokens, int32_t digests,
                            pkv_error *err) {
  const pkv_allocator *const a = &e->allocator;
  if (tokens > s->capacity) {
    int32_t *const grown = pkv_alloc(a, (size_t)tokens * sizeof *grown);
    PKV_CHECK(err, grown != NULL, PKV_E_NOMEM, "no memory for %d tokens", (int)tokens);
    pkv_free(a, s->tokens, (size_t)s->capacity * sizeof *s->tokens);
    s->tokens = grown;
    s->capacity = tokens;
  }
  if (digests > s->digest_capacity) {
    uint64_t *const grown = pkv_alloc(a, (size_t)digests * sizeof *grown);
    PKV_CHECK(err, grown != NULL, PKV_E_NOMEM, "no memory for %d digests", (int)digests);
    pkv_free(a, s->digests, (size_t)s->digest_capacity * sizeof *s->digests);
    s->digests = grown;
    s->digest_capacity = digests;
  }
  return PKV_OK;
}

static void fill_slot(pkv_engine *e, pkv_seq *s, const pkv_request *r, int32_t limit) {
  const int32_t page = e->options.page_tokens;
  memcpy(s->tokens, r->prompt, (size_t)r->prompt_tokens * sizeof *s->tokens);
  s->digest_count = r->prompt_tokens / page;
  if (s->digest_count > 0)
    (void)pkv_hash_chunks(s->digests, s->tokens, (size_t)s->digest_count * (size_t)page,
                          (size_t)page, 0);
  s->id = e->next_id++;
  s->row = -1;
  s->prompt = s->known = r->prompt_tokens;
  s->computed = s->planned = s->echoed = 0;
  s->limit = limit;
  s->echo = r->echo != 0;
  s->logprobs = r->logprobs != 0 || r->top_logprobs > 0;
  s->scoring = s->echo && s->logprobs;
  s->ignore_end = r->ignore_end != 0;
  s->cancelled = s->counted = false;
  s->top_logprobs = r->top_logprobs;
  s->sampling = (pkv_sampling){r->temperature, r->top_k, r->top_p, r->seed};
  s->user = r->user;
}

pkv_status pkv_engine_submit(int64_t *id, pkv_engine *engine, const pkv_request *request,
                             pkv_error *err) {
  PKV_CHECK(err, id != NULL, PKV_E_INVALID, "id is NULL");
  *id = 0;
  PKV_CHECK(err, engine != NULL, PKV_E_INVALID, "engine is NULL");
  PKV_CHECK_STRUCT(err, request, pkv_request);
  PKV_TRY(check_request(engine, request, err));
  const int32_t room = engine->options.max_seq_len - request->prompt_tokens;
  const int32_t limit =
      request->prompt_tokens + (request->max_tokens < room ? request->max_tokens : room);
  int32_t slot = 0;
  while (engine->seqs[slot].state != PKV_SEQ_FREE)
    slot++; /* there is one: checked above */
  pkv_seq *const s = &engine->seqs[slot];
  PKV_TRY(grow_slot(engine, s, limit, request->prompt_tokens / engine->options.page_tokens, err));
  fill_slot(engine, s, request, limit);
  pkv_engine_enqueue(engine, slot);
  *id = s->id;
  return PKV_OK;
}

void pkv_engine_cancel(pkv_engine *engine, int64_t id) {
  for (int32_t i = 0; engine != NULL && i < engine->options.max_requests; i++) {
    pkv_seq *const s = &engine->seqs[i];
    if (s->state != PKV_SEQ_FREE && s->id == id) s->cancelled = true;
  }
}

int32_t pkv_engine_pending(const pkv_engine *engine) {
  return engine == NULL ? 0 : engine->running_count + engine->waiting_count;
}

void pkv_engine_get_stats(pkv_engine_stats *out, const pkv_engine *engine) {
  pkv_pool_stats pool;
  if (out == NULL || engine == NULL || out->struct_size != sizeof *out) return;
  *out = engine->stats;
  pkv_pool_get_stats(&pool, engine->pool);
  out->struct_size = (uint32_t)sizeof *out;
  out->max_seq_len = engine->options.max_seq_len;
  out->rows_running = engine->running_count;
  out->rows_waiting = engine->waiting_count;
  out->pages_total = pool.pages_total;
  out->pages_in_use = pool.pages_in_use;
  out->pages_peak = pool.peak_in_use;
  out->pages_shared = pool.pages_shared;
  out->cache_bytes = pool.storage_bytes;
}
