/* SPDX-License-Identifier: Apache-2.0 */
/* An engine whose weights, cache and forward pass are on a device: what is refused, what fits, and
   where the cache lies. */
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "engine/engine_state.h"
#include "kv/pool.h"
#include "model/device_products.h"
#include "pkv/device.h"

#define RESERVE   ((size_t)768 << 20) /* for graphs and the libraries' own memory */
#define ALIGNMENT 256

static const pkv_model *model_of(const pkv_engine *e, int32_t rank) {
  return e->ranks[rank].shard != NULL ? e->ranks[rank].shard : e->model;
}

static size_t page_bytes(const pkv_engine *e, int32_t rank) {
  const int32_t kv_heads = pkv_model_hparams(model_of(e, rank))->kv_heads;
  return (size_t)e->options.page_tokens * (size_t)kv_heads * (size_t)e->shape.head_dim *
         pkv_dtype_bytes(e->options.kv_dtype);
}

/* K and V of all layers, of a rank's heads; SIZE_MAX where that is no size any more. */
static size_t pages_bytes(const pkv_engine *e, int32_t rank, int64_t pages) {
  size_t bytes = 0;
  if (!pkv_mul_size(&bytes, (size_t)pages, page_bytes(e, rank)) ||
      !pkv_add_size(&bytes, bytes, ALIGNMENT - 1) ||
      !pkv_mul_size(&bytes, bytes / ALIGNMENT * ALIGNMENT, 2 * (size_t)e->shape.layers))
    return SIZE_MAX;
  return bytes;
}

static pkv_device_forward_options forward_options(const pkv_engine *e) {
  pkv_device_forward_options o = {0};
  o.max_tokens = e->max_tokens;
  o.max_logits = e->max_logits;
  for (int i = 0; i < PKV_Q_CLASSES; i++)
    o.max_rows[i] = pkv_batch_max_rows(e, 1 << i);
  o.max_seq_len = e->options.max_seq_len;
  o.page_tokens = e->options.page_tokens;
  o.max_pages = e->max_pages;
  o.sampled_vocab = e->vocab;
  o.kv_dtype = e->options.kv_dtype;
  o.allocator = &e->allocator;
  return o;
}

static pkv_status check_options(const pkv_engine *e, pkv_error *err) {
  const pkv_engine_options *o = &e->options;
  PKV_CHECK(err, !o->batch_invariant, PKV_E_UNSUPPORTED,
            "options->batch_invariant: products on a device depend on the batch; set it to 0");
  PKV_CHECK(err, o->policy == PKV_POLICY_FIXED, PKV_E_UNSUPPORTED,
            "options->policy is %s: on a device only fixed", pkv_policy_name(o->policy));
  PKV_CHECK(err,
            o->route == PKV_ROUTE_AUTO || o->route == PKV_ROUTE_SHARED ||
                o->route == PKV_ROUTE_BALANCED,
            PKV_E_UNSUPPORTED, "options->route is %s: on a device balanced or shared",
            pkv_route_name(o->route));
  PKV_CHECK(err, o->kv_dtype != PKV_DTYPE_F32, PKV_E_UNSUPPORTED,
            "options->kv_dtype is f32: a device's caches are f16, bf16 or fp8_e4m3");
  return PKV_OK;
}

static size_t with_reserve(size_t bytes) {
  return bytes < SIZE_MAX - RESERVE ? bytes + RESERVE : SIZE_MAX;
}

/* What has to stay free behind a rank's weights: the reserve, the buffers of a step, and the cache
   that was asked for, else one that holds the longest request and is nine tenths of what is
   left. */
static size_t keep_free(const pkv_engine *e, int32_t rank) {
  const int64_t asked = e->options.cache_tokens, page = e->options.page_tokens;
  const int64_t tokens = asked > 0 ? asked : e->options.max_seq_len;
  const size_t cache = pages_bytes(e, rank, (tokens + page - 1) / page);
  const pkv_device_forward_options o = forward_options(e);
  pkv_executor *const executor = e->ranks[rank].executor;
  if (executor->dense == NULL) return 0; /* no device: refused next */
  const size_t buffers =
      pkv_device_forward_bytes(model_of(e, rank), executor, rank, e->rank_count, &o);
  size_t keep = 0;
  if (asked > 0) return pkv_add_size(&keep, cache, buffers) ? with_reserve(keep) : SIZE_MAX;
  const size_t tenth = cache / 9 + 1 > buffers ? cache / 9 + 1 : buffers;
  return pkv_mul_size(&keep, tenth, 10) ? with_reserve(keep) : SIZE_MAX;
}

static int32_t executors_of(pkv_executor *executors[PKV_MAX_RANKS], const pkv_engine *e) {
  for (int32_t r = 0; r < e->rank_count; r++)
    executors[r] = e->ranks[r].executor;
  return e->rank_count;
}

static pkv_status create_shards(pkv_engine *e, pkv_error *err) {
  pkv_executor *executors[PKV_MAX_RANKS];
  int32_t reaches = 0;
  (void)executors_of(executors, e);
  PKV_TRY(pkv_device_reaches(&reaches, executors, e->rank_count, err));
  for (int32_t r = 0; r < e->rank_count; r++)
    PKV_TRY(pkv_model_shard_create(&e->ranks[r].shard, e->model, r, e->rank_count, reaches != 0,
                                   &e->allocator, err));
  return PKV_OK;
}

pkv_status pkv_engine_device_begin(pkv_engine *e, pkv_error *err) {
  PKV_TRY(check_options(e, err));
  e->rank_count = e->options.tensor_parallel;
  e->ranks[0].executor = e->executor;
  if (e->rank_count > 1) PKV_TRY(create_shards(e, err));
  for (int32_t r = 0; r < e->rank_count; r++)
    PKV_TRY(pkv_device_weights_create(&e->ranks[r].weights, model_of(e, r), e->ranks[r].executor,
                                      e->options.max_rows, keep_free(e, r), &e->allocator, err));
  e->weights = e->ranks[0].weights;
  if (e->options.kv_dtype != PKV_DTYPE_FP8_E4M3) e->options.kv_dtype = e->weights->act;
  return PKV_OK;
}

static pkv_status free_bytes(size_t *bytes, const pkv_engine *e, int32_t rank, pkv_error *err) {
  size_t all = 0;
  PKV_TRY(pkv_device_weights_room(&all, e->ranks[rank].weights, err));
  *bytes = all > RESERVE ? all - RESERVE : 0;
  return PKV_OK;
}

/* Of a rank's device. */
static pkv_status room_of(int64_t *tokens, const pkv_engine *e, int32_t rank, pkv_error *err) {
  const size_t page = pages_bytes(e, rank, 1), least = RESERVE + (page + 8) / 9 * 10;
  size_t bytes = 0;
  PKV_TRY(pkv_device_weights_room(&bytes, e->ranks[rank].weights, err));
  const size_t rest = bytes > RESERVE ? bytes - RESERVE : 0;
  *tokens = (int64_t)(rest / 10 * 9 / page) * e->options.page_tokens;
  PKV_CHECK(err, *tokens > 0, PKV_E_NOMEM,
            "behind the weights %zu bytes are free on the device; a reserve of %zu, one page of "
            "cache and buffers need %zu: %zu are missing",
            bytes, RESERVE, least, least > bytes ? least - bytes : 1);
  return PKV_OK;
}

/* A tenth stays for the buffers of a step, which depend on this answer. */
pkv_status pkv_engine_device_room(int64_t *tokens, pkv_engine *e, pkv_error *err) {
  *tokens = INT64_MAX;
  for (int32_t r = 0; r < e->rank_count; r++) {
    int64_t here = 0;
    PKV_TRY(room_of(&here, e, r, err));
    if (here < *tokens) *tokens = here;
  }
  return PKV_OK;
}

pkv_status pkv_engine_device_forward(pkv_engine *e, pkv_error *err) {
  pkv_device_forward_options o = forward_options(e);
  pkv_device_rank ranks[PKV_MAX_RANKS];
  /* What route shared reads: pages of a power of two from 16 on, these heads. */
  const bool fp8 = o.kv_dtype == PKV_DTYPE_FP8_E4M3;
  o.shares = e->classes[0].shares && o.page_tokens >= 16 &&
             (o.page_tokens & (o.page_tokens - 1)) == 0 &&
             (e->shape.head_dim == 128 || (e->shape.head_dim == 64 && !fp8));
  for (int32_t r = 0; r < e->rank_count; r++)
    ranks[r] = (pkv_device_rank){model_of(e, r), e->ranks[r].weights};
  return pkv_device_forward_create(&e->device, ranks, e->rank_count, &o, err);
}

static void copy_page(void *ctx, int32_t to, int32_t from) {
  pkv_engine *const e = ctx;
  const pkv_status status = pkv_device_forward_copy_page(e->device, to, from, &e->copy_error);
  if (status != PKV_OK) e->copy_status = status;
}

static pkv_cache view_of(const pkv_engine *e, int32_t rank, int64_t pages) {
  const int64_t tokens = e->options.page_tokens, dim = e->shape.head_dim;
  pkv_cache c = PKV_CACHE_INIT;
  c.dtype = e->options.kv_dtype;
  c.pages = pages;
  c.page_tokens = e->options.page_tokens;
  c.kv_heads = pkv_model_hparams(model_of(e, rank))->kv_heads;
  c.head_dim = e->shape.head_dim;
  c.k_scale = e->options.k_scale;
  c.v_scale = e->options.v_scale;
  c.k_token_stride = c.v_token_stride = dim;
  c.k_head_stride = c.v_head_stride = tokens * dim;
  c.k_page_stride = c.v_page_stride = tokens * c.kv_heads * dim;
  return c;
}

static pkv_status create_storage(pkv_engine *e, int32_t rank, int64_t pages, pkv_error *err) {
  const int32_t layers = e->shape.layers;
  const size_t need = pages_bytes(e, rank, pages), each = need / (2 * (size_t)layers);
  pkv_engine_rank *const own = &e->ranks[rank];
  pkv_cache *const caches = e->device_caches + (int64_t)rank * layers;
  size_t have = 0;
  PKV_TRY(free_bytes(&have, e, rank, err));
  PKV_CHECK(err, need <= have, PKV_E_NOMEM,
            "a cache of %lld tokens needs %zu bytes on the device, %zu are free behind weights, "
            "buffers and a reserve of %zu: %zu are missing",
            (long long)(pages * e->options.page_tokens), need, have, RESERVE, need - have);
  PKV_TRY(pkv_device_alloc(&own->cache, own->executor, need, err));
  e->device_cache_bytes += need;
  for (int32_t i = 0; i < layers; i++) {
    caches[i] = view_of(e, rank, pages);
    caches[i].k = (char *)own->cache + 2 * (size_t)i * each;
    caches[i].v = (char *)caches[i].k + each;
  }
  return PKV_OK;
}

/* The pool counts pages; it sees rank 0's, and those of the others lie alike. */
pkv_status pkv_engine_device_pool(pkv_engine *e, pkv_error *err) {
  const int64_t page = e->options.page_tokens, pages = (e->options.cache_tokens + page - 1) / page;
  const size_t count = (size_t)e->rank_count * (size_t)e->shape.layers;
  e->device_caches = pkv_alloc_zeroed(&e->allocator, count, sizeof *e->device_caches);
  PKV_CHECK(err, e->device_caches != NULL, PKV_E_NOMEM, "no memory for the caches of %d layers",
            (int)e->shape.layers);
  for (int32_t r = 0; r < e->rank_count; r++)
    PKV_TRY(create_storage(e, r, pages, err));
  PKV_TRY(pkv_pool_wrap(&e->pool, e->device_caches, e->shape.layers, &e->allocator, err));
  pkv_pool_set_copy(e->pool, copy_page, e);
  return PKV_OK;
}

void pkv_engine_device_save(pkv_engine *e) {
  pkv_executor *executors[PKV_MAX_RANKS];
  const char *const file = e->options.products_file;
  if (file == NULL || e->device == NULL) return;
  e->products_saved = pkv_device_products_save(executors, executors_of(executors, e), file,
                                               e->products_saved, &e->allocator);
}

pkv_status pkv_engine_device_attach(pkv_engine *e, pkv_error *err) {
  pkv_executor *executors[PKV_MAX_RANKS];
  const char *const file = e->options.products_file;
  if (file != NULL)
    pkv_device_products_load(executors, executors_of(executors, e), file, &e->allocator);
  PKV_TRY(pkv_device_forward_attach(e->device, e->device_caches, err));
  pkv_engine_device_save(e);
  return pkv_swap_create(e, err);
}

void pkv_engine_device_end(pkv_engine *e) {
  pkv_swap_destroy(e);
  for (int32_t r = 0; r < e->rank_count; r++) {
    pkv_engine_rank *const rank = &e->ranks[r];
    if (rank->cache != NULL) pkv_device_free(rank->executor, rank->cache);
    pkv_device_weights_destroy(rank->weights);
    pkv_model_shard_destroy(rank->shard);
  }
  pkv_free(&e->allocator, e->device_caches,
           (size_t)e->rank_count * (size_t)e->shape.layers * sizeof *e->device_caches);
}

void pkv_engine_device_row(pkv_engine *e, int32_t row, const pkv_seq *s) {
  const bool early = s->known - s->prompt < s->min_tokens;
  const pkv_edit_context context = {s->tokens, s->prompt, s->known, e->ends,
                                    early ? e->end_count : 0};
  const pkv_sampling *how = &s->sampling;
  e->sample_rows[row] = (pkv_dense_sample_row){
      how->temperature, how->top_k, how->top_p, how->min_p, how->seed, how->stream, s->known};
  if (s->logprobs || s->scoring || s->guide >= 0 ||
      (how->temperature > 0.0f && !pkv_device_forward_samples(e->device)) ||
      pkv_logit_edit_needed(&s->edit, &context))
    e->reads_logits = true;
}
