/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pkv_attention_run: every argument checked, defaults resolved, then the backend called. Nothing is
 * written and no K or V is read before the last check passed.
 */
#include "attention/attention_check.h"

#include <math.h>

#include "base/status.h"
#include "kv/cache.h"

int pkv_strides_nest(int64_t tokens, int64_t token_stride, int64_t heads, int64_t head_stride,
                     int64_t head_dim) {
  int64_t span;
  if (token_stride < 0 || head_stride < 0) return 0;
  const int heads_inside = (heads == 1 || head_stride >= head_dim) &&
                           !__builtin_mul_overflow(heads - 1, head_stride, &span) &&
                           (tokens <= 1 || token_stride - head_dim >= span);
  const int tokens_inside = (tokens <= 1 || token_stride >= head_dim) &&
                            !__builtin_mul_overflow(tokens - 1, token_stride, &span) &&
                            (heads == 1 || head_stride - head_dim >= span);
  return heads_inside || tokens_inside;
}

static pkv_status check_vectors(const char *name, const void *data, pkv_dtype dtype,
                                int64_t *token_stride, int64_t *head_stride,
                                const struct pkv_plan *plan, pkv_error *err) {
  const int64_t tokens = (int64_t)plan->rows * plan->q_len;
  PKV_CHECK(err, data != NULL || tokens == 0, PKV_E_INVALID, "args->%s is NULL", name);
  PKV_CHECK(err, dtype == PKV_DTYPE_F32 || dtype == PKV_DTYPE_F16 || dtype == PKV_DTYPE_BF16,
            PKV_E_UNSUPPORTED, "args->%s_dtype is %d (%s), must be f32, f16 or bf16", name,
            (int)dtype, pkv_dtype_name(dtype));
  PKV_CHECK(err, (uintptr_t)data % pkv_dtype_bytes(dtype) == 0, PKV_E_INVALID,
            "args->%s is %p, not aligned to %zu bytes", name, data, pkv_dtype_bytes(dtype));
  if (*head_stride == 0) *head_stride = plan->head_dim;
  if (*token_stride == 0) {
    int64_t whole;
    const int overflow = __builtin_mul_overflow(*head_stride, plan->query_heads, &whole);
    PKV_CHECK(err, !overflow, PKV_E_INVALID, "args->%s_head_stride %lld times %d heads overflows",
              name, (long long)*head_stride, plan->query_heads);
    *token_stride = whole;
  }
  PKV_CHECK(
      err, pkv_strides_nest(tokens, *token_stride, plan->query_heads, *head_stride, plan->head_dim),
      PKV_E_INVALID,
      "args->%s strides token %lld, head %lld make the %lld tokens of %d heads of %d overlap", name,
      (long long)*token_stride, (long long)*head_stride, (long long)tokens, plan->query_heads,
      plan->head_dim);
  int64_t last, head, bytes;
  const int overflow = __builtin_mul_overflow(tokens, *token_stride, &last) ||
                       __builtin_mul_overflow((int64_t)plan->query_heads, *head_stride, &head) ||
                       __builtin_add_overflow(last, head, &last) ||
                       __builtin_mul_overflow(last, 8, &bytes);
  PKV_CHECK(err, !overflow, PKV_E_INVALID, "args->%s strides token %lld, head %lld overflow", name,
            (long long)*token_stride, (long long)*head_stride);
  return PKV_OK;
}

static pkv_status check_plan(const struct pkv_plan *plan, pkv_error *err) {
  PKV_CHECK(err, plan != NULL, PKV_E_INVALID, "args->plan is NULL");
  PKV_CHECK(err, (uintptr_t)plan % PKV_CACHE_LINE == 0, PKV_E_INVALID,
            "args->plan is %p, not aligned to %u bytes", (const void *)plan, PKV_CACHE_LINE);
  PKV_CHECK(err, plan->magic == PKV_PLAN_MAGIC, PKV_E_INVALID,
            "args->plan does not point to a plan: its first word is 0x%08x", (unsigned)plan->magic);
  return PKV_OK;
}

pkv_status pkv_check_view(const pkv_cache *cache, int on_device, pkv_error *err) {
  PKV_CHECK(err, cache != NULL, PKV_E_INVALID, "args->cache is NULL");
  if (!on_device) return pkv_cache_check(cache, "args->cache->", err);
  pkv_cache seen = *cache;
  seen.k_head_scale = NULL;
  seen.v_head_scale = NULL;
  return pkv_cache_check(&seen, "args->cache->", err);
}

static pkv_status check_cache(const struct pkv_plan *plan, const pkv_cache *cache, int on_device,
                              pkv_error *err) {
  PKV_TRY(pkv_check_view(cache, on_device, err));
  PKV_CHECK(err,
            plan->kv_heads == cache->kv_heads && plan->head_dim == cache->head_dim &&
                plan->page_tokens == cache->page_tokens,
            PKV_E_INVALID,
            "plan is for kv_heads %d, head_dim %d, page_tokens %d; cache has %d, %d, %d",
            plan->kv_heads, plan->head_dim, plan->page_tokens, cache->kv_heads, cache->head_dim,
            cache->page_tokens);
  return PKV_OK;
}

/* First page of the row that is read: earlier ones lie before the window of every query. */
static int64_t first_page(const struct pkv_plan *plan, int64_t len) {
  const int64_t position = len > plan->q_len ? len - plan->q_len : 0;
  const int64_t first =
      plan->window > 0 && position + 1 > plan->window ? position + 1 - plan->window : 0;
  return first / plan->page_tokens;
}

static pkv_status check_row(const int32_t *ids, int32_t row, int64_t first, int64_t count,
                            int64_t pages, pkv_error *err) {
  uint32_t worst = 0; /* negative ids are the largest */
  for (int64_t i = first; i < count; i++) {
    const uint32_t id = (uint32_t)ids[i];
    worst = id > worst ? id : worst;
  }
  if (worst < pages) return PKV_OK;
  for (int64_t i = first; i < count; i++) {
    PKV_CHECK(err, ids[i] >= 0 && ids[i] < pages, PKV_E_RANGE,
              "args->block_table row %d, index %lld holds page %d; the cache has pages 0 .. %lld",
              row, (long long)i, ids[i], (long long)(pages - 1));
  }
  return PKV_OK;
}

static pkv_status check_table(pkv_attention_params *p, const pkv_attention_args *args,
                              const struct pkv_plan *plan, pkv_error *err) {
  PKV_CHECK(err, args->max_pages >= 0, PKV_E_INVALID, "args->max_pages is %d", args->max_pages);
  p->block_table = args->block_table;
  p->block_table_stride =
      args->block_table_stride != 0 ? args->block_table_stride : args->max_pages;
  p->max_pages = args->max_pages;
  PKV_CHECK(err, p->block_table_stride >= args->max_pages, PKV_E_INVALID,
            "args->block_table_stride is %lld, less than max_pages %d",
            (long long)args->block_table_stride, args->max_pages);
  PKV_CHECK(err, (uintptr_t)args->block_table % sizeof(int32_t) == 0, PKV_E_INVALID,
            "args->block_table is %p, not aligned to 4 bytes", (const void *)args->block_table);
  int64_t entries;
  const int overflow =
      __builtin_mul_overflow((int64_t)plan->rows, p->block_table_stride, &entries) ||
      entries > INT64_MAX / 8;
  PKV_CHECK(err, !overflow, PKV_E_INVALID, "args->block_table_stride %lld times %d rows overflows",
            (long long)p->block_table_stride, plan->rows);
  return PKV_OK;
}

/* The page ids of every row, as far as they are read. */
static pkv_status check_ids(const pkv_attention_params *p, const pkv_attention_args *args,
                            pkv_error *err) {
  const struct pkv_plan *plan = args->plan;
  const int32_t *seq_len = pkv_plan_at(plan, plan->seq_len_at);
  for (int32_t row = 0; row < plan->rows; row++) {
    const int64_t len = seq_len[row];
    const int64_t need = (len + plan->page_tokens - 1) / plan->page_tokens;
    if (need == 0) continue;
    PKV_CHECK(err, need <= args->max_pages, PKV_E_RANGE,
              "row %d of %lld tokens needs %lld pages of %d, args->max_pages is %d", row,
              (long long)len, (long long)need, plan->page_tokens, args->max_pages);
    PKV_CHECK(err, args->block_table != NULL, PKV_E_INVALID, "args->block_table is NULL");
    PKV_TRY(check_row(args->block_table + row * p->block_table_stride, row, first_page(plan, len),
                      need, args->cache->pages, err));
  }
  return PKV_OK;
}

static pkv_status check_rest(pkv_attention_params *p, const pkv_attention_args *args,
                             const struct pkv_plan *plan, pkv_error *err) {
  PKV_CHECK(err, isfinite(args->scale), PKV_E_INVALID, "args->scale is %g, must be finite",
            (double)args->scale);
  PKV_CHECK(err, isfinite(args->soft_cap) && args->soft_cap >= 0.0f, PKV_E_INVALID,
            "args->soft_cap is %g, must be finite and >= 0", (double)args->soft_cap);
  p->scale = args->scale != 0.0f ? args->scale : (float)(1.0 / sqrt((double)plan->head_dim));
  p->soft_cap = args->soft_cap;
  PKV_CHECK(err, (uintptr_t)args->sinks % sizeof(float) == 0, PKV_E_INVALID,
            "args->sinks is %p, not aligned to 4 bytes", (const void *)args->sinks);
  p->sinks = args->sinks;
  p->lse = args->lse;
  p->lse_base2 = args->lse_base2 != 0;
  p->lse_token_stride = args->lse_token_stride != 0 ? args->lse_token_stride : plan->query_heads;
  PKV_CHECK(err, args->lse == NULL || p->lse_token_stride >= plan->query_heads, PKV_E_INVALID,
            "args->lse_token_stride is %lld, less than the %d query heads",
            (long long)args->lse_token_stride, plan->query_heads);
  int64_t last;
  PKV_CHECK(
      err,
      !__builtin_mul_overflow((int64_t)plan->rows * plan->q_len, p->lse_token_stride, &last) &&
          last <= INT64_MAX / 8,
      PKV_E_INVALID, "args->lse_token_stride %lld times %lld tokens overflows",
      (long long)args->lse_token_stride, (long long)plan->rows * plan->q_len);
  PKV_CHECK(err, (uintptr_t)args->lse % sizeof(float) == 0, PKV_E_INVALID,
            "args->lse is %p, not aligned to 4 bytes", (void *)args->lse);
  return PKV_OK;
}

static pkv_status check_workspace(pkv_attention_params *p, const pkv_attention_args *args,
                                  pkv_error *err) {
  const size_t need = (size_t)args->plan->workspace_bytes;
  PKV_CHECK(err, args->workspace_bytes >= need, PKV_E_TOO_SMALL,
            "args->workspace_bytes is %zu, the plan needs %zu", args->workspace_bytes, need);
  PKV_CHECK(err, args->workspace != NULL || need == 0, PKV_E_INVALID, "args->workspace is NULL");
  PKV_CHECK(err, (uintptr_t)args->workspace % PKV_CACHE_LINE == 0, PKV_E_INVALID,
            "args->workspace is %p, not aligned to %u bytes", args->workspace, PKV_CACHE_LINE);
  p->workspace = args->workspace;
  return PKV_OK;
}

void pkv_resolve_scales(pkv_cache *cache) {
  const int fp8 = cache->dtype == PKV_DTYPE_FP8_E4M3;
  if (!fp8 || cache->k_scale == 0.0f) cache->k_scale = 1.0f;
  if (!fp8 || cache->v_scale == 0.0f) cache->v_scale = 1.0f;
  if (!fp8) cache->k_head_scale = NULL;
  if (!fp8) cache->v_head_scale = NULL;
}

pkv_status pkv_attention_resolve(pkv_attention_params *p, const pkv_attention_args *args,
                                 const struct pkv_plan *plan, int on_device, pkv_error *err) {
  PKV_TRY(check_cache(plan, args->cache, on_device, err));
  *p = (pkv_attention_params){.plan = plan,
                              .cache = *args->cache,
                              .q = args->q,
                              .out = args->out,
                              .q_dtype = args->q_dtype,
                              .out_dtype = args->out_dtype,
                              .q_token_stride = args->q_token_stride,
                              .q_head_stride = args->q_head_stride,
                              .out_token_stride = args->out_token_stride,
                              .out_head_stride = args->out_head_stride};
  PKV_TRY(
      check_vectors("q", args->q, args->q_dtype, &p->q_token_stride, &p->q_head_stride, plan, err));
  PKV_TRY(check_vectors("out", args->out, args->out_dtype, &p->out_token_stride,
                        &p->out_head_stride, plan, err));
  PKV_TRY(check_rest(p, args, plan, err));
  PKV_TRY(check_table(p, args, plan, err));
  pkv_resolve_scales(&p->cache);
  return PKV_OK;
}

pkv_status pkv_attention_run(pkv_executor *executor, const pkv_attention_args *args,
                             pkv_error *err) {
  pkv_attention_params p;
  PKV_CHECK(err, executor != NULL, PKV_E_INVALID, "executor is NULL");
  PKV_CHECK(err, executor->device_ops == NULL, PKV_E_INVALID,
            "executor runs on a device: use pkv_device_attention");
  PKV_CHECK_STRUCT(err, args, pkv_attention_args);
  PKV_TRY(check_plan(args->plan, err));
  PKV_TRY(pkv_attention_resolve(&p, args, args->plan, 0, err));
  PKV_TRY(check_workspace(&p, args, err));
  PKV_TRY(check_ids(&p, args, err));
  return executor->ops->attention(executor, &p, err);
}
