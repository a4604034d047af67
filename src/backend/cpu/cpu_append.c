/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes new tokens' K and V into their pages. One item is one KV head of K or of V: its tokens are
 * written in order, so that a slot given twice holds the later token, whatever the workers.
 */
#include "backend/cpu/cpu_isa.h"

#include <math.h>

#include "base/dtype.h"

typedef struct append_run {
  const pkv_append_params *p;
  const pkv_cpu_isa_ops *ops;
} append_run;

/* Source and destination of one head of K or of V. */
typedef struct append_lane {
  const unsigned char *src; /* token 0 */
  unsigned char *dst;       /* slot 0 */
  int64_t src_stride, page_stride, token_stride;
  float divisor;
  int turn; /* by rope */
} append_lane;

static append_lane lane_of(const pkv_append_params *p, int64_t head, int is_v) {
  const pkv_cache *c = &p->cache;
  const int64_t in = (int64_t)pkv_dtype_bytes(p->dtype), out = (int64_t)pkv_dtype_bytes(c->dtype);
  const float *head_scale = is_v ? c->v_head_scale : c->k_head_scale;
  append_lane l = {0};
  l.src = (const unsigned char *)(is_v ? p->v : p->k) +
          head * (is_v ? p->v_head_stride : p->k_head_stride) * in;
  l.src_stride = (is_v ? p->v_token_stride : p->k_token_stride) * in;
  l.dst = (unsigned char *)(is_v ? c->v : c->k) +
          head * (is_v ? c->v_head_stride : c->k_head_stride) * out;
  l.page_stride = (is_v ? c->v_page_stride : c->k_page_stride) * out;
  l.token_stride = (is_v ? c->v_token_stride : c->k_token_stride) * out;
  l.divisor = 1.0f; /* scales belong to fp8: other dtypes hold the values themselves */
  if (c->dtype == PKV_DTYPE_FP8_E4M3)
    l.divisor = (is_v ? c->v_scale : c->k_scale) * (head_scale != NULL ? head_scale[head] : 1.0f);
  l.turn = !is_v && p->rope.dims > 0;
  return l;
}

static void turn(float *x, const pkv_rope_params *rope, int64_t token) {
  const int32_t half = rope->dims / 2;
  for (int32_t j = 0; j < half; j++) {
    const double angle = (double)rope->positions[token] * rope->frequency[j];
    float *a = rope->adjacent ? x + 2 * j : x + j, *b = rope->adjacent ? a + 1 : a + half;
    pkv_rope_turn(a, b, (float)cos(angle), (float)sin(angle));
  }
}

static void append_head(void *ctx, int64_t item, int32_t worker) {
  const append_run *run = ctx;
  const pkv_append_params *p = run->p;
  const pkv_cache *c = &p->cache;
  const append_lane l = lane_of(p, item / 2, (int)(item % 2));
  (void)worker;
  for (int64_t i = 0; i < p->tokens; i++) {
    float row[PKV_CPU_MAX_HEAD_DIM];
    const int64_t slot = p->slots[i];
    const void *src = l.src + i * l.src_stride;
    if (slot < 0) continue;
    const int64_t page = slot / c->page_tokens, offset = slot % c->page_tokens;
    if (p->dtype != PKV_DTYPE_F32 || l.turn) {
      for (int32_t d = 0; d < c->head_dim; d++)
        row[d] = pkv_load(src, p->dtype, d);
      if (l.turn) turn(row, &p->rope, i);
      src = row;
    }
    run->ops->convert(l.dst + page * l.page_stride + offset * l.token_stride, c->dtype, src,
                      c->head_dim, l.divisor);
  }
}

pkv_status pkv_cpu_append(pkv_executor *executor, const pkv_append_params *p, pkv_error *err) {
  append_run run = {p, executor->isa_ops};
  (void)err;
  pkv_workers_run(executor->workers, append_head, &run, (int64_t)p->cache.kv_heads * 2);
  return PKV_OK;
}
