/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes new tokens' K and V into their pages. One item is one KV head of K or of V: its tokens are
 * written in order, so that a slot given twice holds the later token, whatever the workers.
 */
#include "backend/cpu/cpu_isa.h"

typedef struct append_run {
  const pkv_append_params *p;
  const pkv_cpu_isa_ops *ops;
} append_run;

static void append_head(void *ctx, int64_t item, int32_t worker) {
  const append_run *run = ctx;
  const pkv_append_params *p = run->p;
  const pkv_cache *c = &p->cache;
  const int64_t head = item / 2;
  const int is_v = (int)(item % 2);
  const float *src = (is_v ? p->v : p->k) + head * c->head_dim;
  const int64_t src_stride = is_v ? p->v_token_stride : p->k_token_stride;
  unsigned char *dst = is_v ? c->v : c->k;
  const int64_t page_stride = is_v ? c->v_page_stride : c->k_page_stride;
  const int64_t token_stride = is_v ? c->v_token_stride : c->k_token_stride;
  const int64_t head_stride = is_v ? c->v_head_stride : c->k_head_stride;
  const float *head_scale = is_v ? c->v_head_scale : c->k_head_scale;
  float divisor = 1.0f; /* scales belong to fp8: other dtypes hold the values themselves */
  if (c->dtype == PKV_DTYPE_FP8_E4M3)
    divisor = (is_v ? c->v_scale : c->k_scale) * (head_scale != NULL ? head_scale[head] : 1.0f);
  const int64_t element = (int64_t)pkv_dtype_bytes(c->dtype);
  (void)worker;
  for (int64_t i = 0; i < p->tokens; i++) {
    const int64_t slot = p->slots[i];
    if (slot < 0) continue;
    const int64_t page = slot / c->page_tokens, offset = slot % c->page_tokens;
    const int64_t at = page * page_stride + offset * token_stride + head * head_stride;
    run->ops->convert(dst + at * element, c->dtype, src + i * src_stride, c->head_dim, divisor);
  }
}

pkv_status pkv_cpu_append(pkv_executor *executor, const pkv_append_params *p, pkv_error *err) {
  append_run run = {p, executor->isa_ops};
  (void)err;
  pkv_workers_run(executor->workers, append_head, &run, (int64_t)p->cache.kv_heads * 2);
  return PKV_OK;
}
