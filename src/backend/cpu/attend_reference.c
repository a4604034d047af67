/* SPDX-License-Identifier: Apache-2.0 */
/*
 * REFERENCE: attention in double precision, one key at a time, as plainly as it can be written. The
 * oracle of the other tables. States in slots are floats as everywhere, in natural units: a state
 * is rounded to float before it is folded, so that a slot and a state in the scratch give the same
 * bits.
 */
#include "backend/cpu/cpu_isa.h"

#include <math.h>
#include <string.h>

#include "base/dtype.h"

typedef struct reference_state {
  double m, l, acc[PKV_CPU_MAX_HEAD_DIM];
} reference_state;

typedef struct reference_scratch {
  double q[PKV_CPU_BLOCK_ROWS][PKV_CPU_MAX_HEAD_DIM];
  reference_state own[PKV_CPU_BLOCK_ROWS], total[PKV_CPU_BLOCK_ROWS];
} reference_scratch;

static void state_clear(reference_state *s) {
  s->m = -INFINITY;
  s->l = 0.0;
  memset(s->acc, 0, sizeof s->acc);
}

/* total := total (+) (m, l, acc) */
static void state_fold(reference_state *total, double m, double l, const float *acc, int32_t d) {
  if (m == -INFINITY) return;
  const double top = total->m > m ? total->m : m;
  const double a = total->m == -INFINITY ? 0.0 : exp(total->m - top);
  const double b = exp(m - top);
  total->m = top;
  total->l = total->l * a + l * b;
  for (int32_t i = 0; i < d; i++)
    total->acc[i] = total->acc[i] * a + (double)acc[i] * b;
}

static void reference_begin(void *scratch, const pkv_cpu_block *b) {
  reference_scratch *s = scratch;
  const pkv_attention_params *p = b->p;
  for (int32_t r = 0; r < b->rows; r++) {
    const int64_t at =
        pkv_cpu_query_token(b, r) * p->q_token_stride + pkv_cpu_query_head(b, r) * p->q_head_stride;
    for (int32_t i = 0; i < p->cache.head_dim; i++)
      s->q[r][i] = (double)pkv_load(p->q, p->q_dtype, at + i);
  }
}

static double reference_logit(const reference_scratch *s, const pkv_cpu_block *b, int32_t r,
                              int64_t k_at) {
  const pkv_attention_params *p = b->p;
  double dot = 0.0;
  for (int32_t i = 0; i < p->cache.head_dim; i++)
    dot += s->q[r][i] * (double)pkv_load(p->cache.k, p->cache.dtype, k_at + i);
  double logit = dot * (double)p->scale * (double)pkv_cpu_k_scale(b);
  if (p->soft_cap > 0.0f) logit = (double)p->soft_cap * tanh(logit / (double)p->soft_cap);
  return logit;
}

static void reference_attend_row(reference_scratch *s, const pkv_cpu_block *b, int32_t r,
                                 int64_t begin, int64_t end) {
  const pkv_cache *c = &b->p->cache;
  reference_state *own = &s->own[r];
  int64_t lo, hi;
  pkv_cpu_visible(b, r, &lo, &hi);
  if (lo < begin) lo = begin;
  if (hi > end) hi = end;
  for (int64_t token = lo; token < hi; token++) {
    const int64_t page = b->pages[token / c->page_tokens], offset = token % c->page_tokens;
    PKV_ASSERT(page >= 0 && page < c->pages);
    const double logit = reference_logit(s, b, r,
                                         page * c->k_page_stride + offset * c->k_token_stride +
                                             b->kv_head * c->k_head_stride);
    const int64_t v_at =
        page * c->v_page_stride + offset * c->v_token_stride + b->kv_head * c->v_head_stride;
    if (logit == -INFINITY) continue;
    const double top = own->m > logit ? own->m : logit;
    const double keep = own->m == -INFINITY ? 0.0 : exp(own->m - top), w = exp(logit - top);
    own->m = top;
    own->l = own->l * keep + w;
    for (int32_t i = 0; i < c->head_dim; i++)
      own->acc[i] = own->acc[i] * keep + w * (double)pkv_load(c->v, c->dtype, v_at + i);
  }
}

static void reference_attend(void *scratch, const pkv_cpu_block *b, int64_t begin, int64_t end) {
  reference_scratch *s = scratch;
  for (int32_t r = 0; r < b->rows; r++) {
    state_clear(&s->own[r]);
    reference_attend_row(s, b, r, begin, end);
  }
}

static void reference_fold_begin(void *scratch, const pkv_cpu_block *b) {
  reference_scratch *s = scratch;
  for (int32_t r = 0; r < b->rows; r++)
    state_clear(&s->total[r]);
}

static void state_to_floats(float *acc, const reference_state *s, int32_t d) {
  for (int32_t i = 0; i < d; i++)
    acc[i] = (float)s->acc[i];
}

static void reference_fold_own(void *scratch, const pkv_cpu_block *b) {
  reference_scratch *s = scratch;
  const int32_t d = b->p->cache.head_dim;
  float acc[PKV_CPU_MAX_HEAD_DIM];
  for (int32_t r = 0; r < b->rows; r++) {
    state_to_floats(acc, &s->own[r], d);
    state_fold(&s->total[r], (double)(float)s->own[r].m, (double)(float)s->own[r].l, acc, d);
  }
}

static void reference_fold_slot(void *scratch, const pkv_cpu_block *b, pkv_cpu_states slot) {
  reference_scratch *s = scratch;
  const int32_t d = b->p->cache.head_dim;
  for (int32_t r = 0; r < b->rows; r++)
    state_fold(&s->total[r], (double)slot.m[r], (double)slot.l[r], slot.acc + (int64_t)r * d, d);
}

static void reference_save(void *scratch, const pkv_cpu_block *b, int32_t from, int32_t count,
                           pkv_cpu_states slot) {
  reference_scratch *s = scratch;
  const int32_t d = b->p->cache.head_dim;
  for (int32_t r = 0; r < count; r++) {
    const reference_state *own = &s->own[from + r];
    slot.m[r] = (float)own->m;
    slot.l[r] = (float)own->l;
    state_to_floats(slot.acc + (int64_t)r * d, own, d);
  }
}

static void reference_store(const reference_state *states, const pkv_cpu_block *b) {
  const pkv_attention_params *p = b->p;
  const double v_scale = (double)pkv_cpu_v_scale(b);
  for (int32_t r = 0; r < b->rows; r++) {
    const int64_t token = pkv_cpu_query_token(b, r);
    const int32_t head = pkv_cpu_query_head(b, r);
    const int64_t at = token * p->out_token_stride + head * p->out_head_stride;
    const reference_state *s = &states[r];
    const int empty = s->m == -INFINITY;
    double m = s->m, l = s->l, keep = 1.0;
    if (!empty && p->sinks != NULL) {
      const double sink = (double)p->sinks[head], top = sink > m ? sink : m;
      keep = exp(m - top);
      l = l * keep + exp(sink - top);
      m = top;
    }
    for (int32_t i = 0; i < p->cache.head_dim; i++) {
      const double value = empty ? 0.0 : s->acc[i] * keep * v_scale / l;
      pkv_store(p->out, p->out_dtype, at + i, (float)value);
    }
    if (p->lse == NULL) continue;
    const double lse = empty ? -INFINITY : m + log(l);
    p->lse[token * p->lse_token_stride + head] = (float)(p->lse_base2 ? lse / log(2.0) : lse);
  }
}

static void reference_store_own(void *scratch, const pkv_cpu_block *b) {
  reference_store(((reference_scratch *)scratch)->own, b);
}

static void reference_store_total(void *scratch, const pkv_cpu_block *b) {
  reference_store(((reference_scratch *)scratch)->total, b);
}

static void reference_convert(void *dst, pkv_dtype dtype, const float *src, int64_t count,
                              float divisor) {
  for (int64_t i = 0; i < count; i++)
    pkv_store(dst, dtype, i, src[i] / divisor);
}

static uint32_t reference_touch(const void *data, size_t bytes) {
  const unsigned char *at = data;
  uint32_t sum = 0;
  for (size_t i = 0; i < bytes; i++)
    sum += at[i];
  return sum;
}

const pkv_cpu_isa_ops pkv_cpu_reference_ops = {
    .isa = PKV_ISA_REFERENCE,
    .scratch_bytes = sizeof(reference_scratch),
    .begin = reference_begin,
    .attend = reference_attend,
    .fold_begin = reference_fold_begin,
    .fold_own = reference_fold_own,
    .fold_slot = reference_fold_slot,
    .save = reference_save,
    .store_own = reference_store_own,
    .store_total = reference_store_total,
    .convert = reference_convert,
    .touch = reference_touch,
};
