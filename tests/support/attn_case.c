/* SPDX-License-Identifier: Apache-2.0 */
/* Builds poisoned attention problems, answers them naively, compares. See attn_case.h. */
#include "support/attn_case.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"

#define U 0x1p-24

attn_spec attn_spec_default(void) {
  attn_spec s = {0};
  s.seed = 1;
  s.kv_dtype = PKV_DTYPE_F16;
  s.q_dtype = PKV_DTYPE_F32;
  s.out_dtype = PKV_DTYPE_F32;
  s.q_len = 1;
  s.kv_heads = 2;
  s.group = 2;
  s.head_dim = 64;
  s.page_tokens = 16;
  s.needle = -1;
  return s;
}

static void *take(size_t bytes) {
  void *p = NULL;
  assert_int_equal(posix_memalign(&p, 64, bytes > 0 ? bytes : 64), 0);
  return p;
}

static void set_strides(attn_case *c) {
  const attn_spec *s = &c->spec;
  const int64_t d = s->head_dim, h = s->kv_heads, t = s->page_tokens;
  pkv_cache *a = &c->cache;
  if (s->layout == ATTN_HND) {
    a->k_token_stride = d;
    a->k_head_stride = t * d;
    a->k_page_stride = h * t * d;
  } else if (s->layout == ATTN_PADDED) {
    a->k_token_stride = d + 3;
    a->k_head_stride = t * (d + 3) + 5;
    a->k_page_stride = h * (t * (d + 3) + 5) + 7;
  } else {
    a->k_head_stride = d;
    a->k_token_stride = h * d;
    a->k_page_stride = t * h * d * (s->layout == ATTN_INTERLEAVED ? 2 : 1);
  }
  a->v_token_stride = a->k_token_stride;
  a->v_head_stride = a->k_head_stride;
  a->v_page_stride = a->k_page_stride;
}

/* Bytes 0xff are NaN in every dtype. */
static void make_cache(attn_case *c, int64_t pages) {
  const attn_spec *s = &c->spec;
  const size_t element = pkv_dtype_bytes(s->kv_dtype);
  c->cache = (pkv_cache)PKV_CACHE_INIT;
  c->cache.dtype = s->kv_dtype;
  c->cache.pages = pages;
  c->cache.page_tokens = s->page_tokens;
  c->cache.kv_heads = s->kv_heads;
  c->cache.head_dim = s->head_dim;
  c->cache.k_scale = s->k_scale;
  c->cache.v_scale = s->v_scale;
  set_strides(c);
  const size_t one = (size_t)(pages * c->cache.k_page_stride) * element;
  const bool shared = s->layout == ATTN_INTERLEAVED;
  c->storage_bytes = shared ? one : 2 * one;
  c->storage = take(c->storage_bytes);
  memset(c->storage, 0xff, c->storage_bytes);
  c->cache.k = c->storage;
  c->cache.v =
      c->storage + (shared ? (size_t)(s->page_tokens * s->kv_heads * s->head_dim) * element : one);
}

static void make_table(attn_case *c, pkv_rng *rng) {
  const attn_spec *s = &c->spec;
  int64_t used = 0;
  c->max_pages = 3;
  for (int32_t r = 0; r < s->rows; r++) {
    const int32_t need = (s->seq_len[r] + s->page_tokens - 1) / s->page_tokens;
    used += need;
    if (need + 2 > c->max_pages) c->max_pages = need + 2;
  }
  if (s->pages) used = s->page_count;
  const int64_t pages = used + used / 4 + 3;
  make_cache(c, pages);
  c->table_stride = c->max_pages + 1;
  const size_t entries = (size_t)(c->table_stride * s->rows);
  c->table = take(entries * sizeof(int32_t));
  for (size_t i = 0; i < entries; i++)
    c->table[i] = i % 2 ? -1 : INT32_MAX - (int32_t)(i % 1000);
  int32_t *order = take((size_t)pages * sizeof(int32_t));
  for (int64_t i = 0; i < pages; i++)
    order[i] = (int32_t)i;
  for (int64_t i = pages - 1; i > 0; i--) {
    const int64_t j = (int64_t)pkv_rng_below(rng, (uint64_t)i + 1);
    const int32_t swap = order[i];
    order[i] = order[j];
    order[j] = swap;
  }
  int64_t next = 0;
  for (int32_t r = 0; r < s->rows; r++) {
    const int32_t need = (s->seq_len[r] + s->page_tokens - 1) / s->page_tokens;
    for (int32_t i = 0; i < need; i++)
      c->table[r * c->table_stride + i] =
          order[s->pages ? s->pages[(int64_t)r * s->pages_stride + i] : next++];
  }
  free(order);
}

void *attn_case_element(const attn_case *c, bool is_v, int32_t row, int32_t token, int32_t head) {
  const pkv_cache *a = &c->cache;
  const int64_t page = c->table[row * c->table_stride + token / a->page_tokens];
  const int64_t in = token % a->page_tokens;
  const int64_t at =
      is_v ? page * a->v_page_stride + in * a->v_token_stride + head * a->v_head_stride
           : page * a->k_page_stride + in * a->k_token_stride + head * a->k_head_stride;
  return (unsigned char *)(is_v ? a->v : a->k) + at * (int64_t)pkv_dtype_bytes(a->dtype);
}

/* Sum of three uniforms: near enough to normal, and fast. */
static float noise(uint64_t *x) {
  float sum = 0.0f;
  for (int i = 0; i < 3; i++) {
    *x = *x * 6364136223846793005u + 1442695040888963407u;
    sum += (float)(*x >> 40) * 0x1p-24f - 0.5f;
  }
  return 2.0f * sum;
}

static void fill_tokens(attn_case *c, uint64_t *x) {
  const attn_spec *s = &c->spec;
  for (int32_t r = 0; r < s->rows; r++) {
    for (int32_t t = 0; t < s->seq_len[r]; t++) {
      for (int32_t h = 0; h < s->kv_heads; h++) {
        void *k = attn_case_element(c, false, r, t, h), *v = attn_case_element(c, true, r, t, h);
        for (int32_t i = 0; i < s->head_dim; i++) {
          /* The needle: along the queries, which all have a positive mean (make_queries). */
          const float key = t == s->needle ? 8.0f : noise(x);
          pkv_store(k, s->kv_dtype, i, key);
          pkv_store(v, s->kv_dtype, i, noise(x));
        }
      }
    }
  }
}

static void make_queries(attn_case *c, uint64_t *x) {
  const attn_spec *s = &c->spec;
  const int64_t heads = (int64_t)s->kv_heads * s->group, tokens = (int64_t)s->rows * s->q_len;
  const int64_t gap = s->strided ? 5 : 0;
  c->q_head = c->out_head = s->head_dim + gap;
  c->q_token = c->out_token = heads * c->q_head + 2 * gap;
  c->lse_token = heads + gap;
  c->q_bytes = (size_t)(tokens * c->q_token) * pkv_dtype_bytes(s->q_dtype);
  c->out_bytes = (size_t)(tokens * c->out_token) * pkv_dtype_bytes(s->out_dtype);
  c->lse_floats = (size_t)(tokens * c->lse_token);
  c->q = take(c->q_bytes);
  c->out = take(c->out_bytes);
  c->lse = take(c->lse_floats * sizeof(float));
  memset(c->q, 0xff, c->q_bytes);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++)
      for (int32_t i = 0; i < s->head_dim; i++)
        pkv_store(c->q, s->q_dtype, t * c->q_token + h * c->q_head + i,
                  s->needle >= 0 ? 2.0f + noise(x) : noise(x));
}

void attn_case_init(attn_case *c, const attn_spec *spec) {
  memset(c, 0, sizeof *c);
  c->spec = *spec;
  pkv_rng rng;
  pkv_rng_init(&rng, spec->seed);
  uint64_t x = pkv_rng_next(&rng);
  int32_t *lens = take((size_t)spec->rows * sizeof(int32_t));
  memcpy(lens, spec->seq_len, (size_t)spec->rows * sizeof(int32_t));
  c->spec.seq_len = lens;
  make_table(c, &rng);
  fill_tokens(c, &x);
  make_queries(c, &x);
  if (spec->head_scales) {
    c->k_head_scale = take((size_t)spec->kv_heads * sizeof(float));
    c->v_head_scale = take((size_t)spec->kv_heads * sizeof(float));
    for (int32_t h = 0; h < spec->kv_heads; h++) {
      c->k_head_scale[h] = 0.5f + 0.37f * (float)h;
      c->v_head_scale[h] = 1.5f - 0.11f * (float)(h % 8);
    }
    c->cache.k_head_scale = c->k_head_scale;
    c->cache.v_head_scale = c->v_head_scale;
  }
  if (spec->sinks) {
    const int32_t heads = spec->kv_heads * spec->group;
    c->sinks = take((size_t)heads * sizeof(float));
    for (int32_t h = 0; h < heads; h++)
      c->sinks[h] = 2.0f * noise(&x);
  }
}

void attn_case_deinit(attn_case *c) {
  free((void *)(uintptr_t)c->spec.seq_len);
  free(c->storage);
  free(c->k_head_scale);
  free(c->v_head_scale);
  free(c->sinks);
  free(c->table);
  free(c->q);
  free(c->out);
  free(c->lse);
  free(c->want);
  free(c->bound);
  free(c->want_lse);
  free(c->bound_lse);
  memset(c, 0, sizeof *c);
}

void attn_case_set_lengths(attn_case *c, const int32_t *seq_len) {
  int32_t *mine = (int32_t *)(uintptr_t)c->spec.seq_len;
  memcpy(mine, seq_len, (size_t)c->spec.rows * sizeof(int32_t));
  attn_case_forget(c);
}

void attn_case_forget(attn_case *c) {
  double **all[] = {&c->want, &c->bound, &c->want_lse, &c->bound_lse};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    free(*all[i]);
    *all[i] = NULL;
  }
}

/* ------------------------------------------------------------------ the naive answer */

/* K and V of one row and head as doubles [seq_len, head_dim], scales applied. */
static void gather(double *out, const attn_case *c, bool is_v, int32_t row, int32_t head) {
  const attn_spec *s = &c->spec;
  double scale = 1.0;
  if (s->kv_dtype == PKV_DTYPE_FP8_E4M3) {
    const float tensor = is_v ? s->v_scale : s->k_scale;
    const float *heads = is_v ? c->v_head_scale : c->k_head_scale;
    if (tensor != 0.0f) scale = (double)tensor;
    if (heads != NULL) scale *= (double)heads[head];
  }
  for (int32_t t = 0; t < s->seq_len[row]; t++) {
    const void *from = attn_case_element(c, is_v, row, t, head);
    for (int32_t i = 0; i < s->head_dim; i++)
      out[(int64_t)t * s->head_dim + i] = scale * (double)pkv_load(from, s->kv_dtype, i);
  }
}

/* One query: logits of keys [lo, hi); returns the largest sum of |products|. */
static double logits_of(double *logit, const attn_case *c, const double *k, int64_t q_at,
                        int32_t lo, int32_t hi) {
  const attn_spec *s = &c->spec;
  const double scale =
      s->scale != 0.0f ? (double)s->scale : (double)(float)(1.0 / sqrt((double)s->head_dim));
  double q[256], worst = 0.0;
  for (int32_t i = 0; i < s->head_dim; i++)
    q[i] = (double)pkv_load(c->q, s->q_dtype, q_at + i);
  for (int32_t j = lo; j < hi; j++) {
    double dot = 0.0, size = 0.0;
    for (int32_t i = 0; i < s->head_dim; i++) {
      const double x = q[i] * k[(int64_t)j * s->head_dim + i];
      dot += x;
      size += fabs(x);
    }
    logit[j] = dot * scale;
    if (s->soft_cap > 0.0f) logit[j] = (double)s->soft_cap * tanh(logit[j] / (double)s->soft_cap);
    if (size * fabs(scale) > worst) worst = size * fabs(scale);
  }
  return worst;
}

static double out_rounding(pkv_dtype dtype, double value) {
  if (dtype == PKV_DTYPE_F16) return 0x1p-11 * fabs(value) + 0x1p-25;
  if (dtype == PKV_DTYPE_BF16) return 0x1p-8 * fabs(value);
  return U * fabs(value) + 0x1p-149;
}

static void answer_one(attn_case *c, const double *k, const double *v, double *logit, int32_t row,
                       int32_t t, int32_t head) {
  const attn_spec *s = &c->spec;
  const int32_t heads = s->kv_heads * s->group, d = s->head_dim;
  const int64_t token = (int64_t)row * s->q_len + t, at = (token * heads + head) * d;
  const int32_t position = s->seq_len[row] - s->q_len + t;
  const int32_t hi = position + 1;
  const int32_t lo = s->window > 0 && hi > s->window ? hi - s->window : 0;
  memset(c->want + at, 0, (size_t)d * sizeof(double));
  memset(c->bound + at, 0, (size_t)d * sizeof(double));
  c->want_lse[token * heads + head] = -INFINITY;
  c->bound_lse[token * heads + head] = 0.0;
  if (position < 0) return;
  const double size = logits_of(logit, c, k, token * c->q_token + head * c->q_head, lo, hi);
  double top = c->sinks != NULL ? (double)c->sinks[head] : -INFINITY, sum = 0.0;
  for (int32_t j = lo; j < hi; j++)
    top = logit[j] > top ? logit[j] : top;
  for (int32_t j = lo; j < hi; j++)
    sum += exp(logit[j] - top);
  if (c->sinks != NULL) sum += exp((double)c->sinks[head] - top);
  double *abs_sum = c->bound + at;
  for (int32_t j = lo; j < hi; j++) {
    const double p = exp(logit[j] - top) / sum;
    for (int32_t i = 0; i < d; i++) {
      const double x = p * v[(int64_t)j * d + i];
      c->want[at + i] += x;
      abs_sum[i] += fabs(x);
    }
  }
  double ds = U * (d / 8.0 + 8.0) * size + 8.0 * U * (double)s->soft_cap;
  ds += s->operand_u * size;
  if (c->sinks != NULL) ds += 4.0 * U * fabs((double)c->sinks[head]);
  const double sums = 8.0 * U * sqrt((double)(hi - lo) + 64.0);
  for (int32_t i = 0; i < d; i++)
    c->bound[at + i] = (2.0 * ds + sums + 2.0 * s->operand_u) * abs_sum[i] +
                       out_rounding(s->out_dtype, c->want[at + i]);
  const double lse = top + log(sum), unit = s->lse_base2 ? 1.0 / log(2.0) : 1.0;
  c->want_lse[token * heads + head] = lse * unit;
  c->bound_lse[token * heads + head] = (ds + sums + 2.0 * U * fabs(lse)) * unit;
}

void attn_case_answer(attn_case *c) {
  const attn_spec *s = &c->spec;
  const size_t heads = (size_t)(s->kv_heads * s->group), d = (size_t)s->head_dim;
  const size_t states = (size_t)s->rows * (size_t)s->q_len * heads;
  c->want = take(states * d * sizeof(double));
  c->bound = take(states * d * sizeof(double));
  c->want_lse = take(states * sizeof(double));
  c->bound_lse = take(states * sizeof(double));
  for (int32_t r = 0; r < s->rows; r++) {
    const size_t len = (size_t)s->seq_len[r];
    double *k = take(len * d * sizeof(double)), *v = take(len * d * sizeof(double));
    double *logit = take(len * sizeof(double));
    for (int32_t h = 0; h < s->kv_heads; h++) {
      gather(k, c, false, r, h);
      gather(v, c, true, r, h);
      for (int32_t t = 0; t < s->q_len; t++)
        for (int32_t g = 0; g < s->group; g++)
          answer_one(c, k, v, logit, r, t, h * s->group + g);
    }
    free(k);
    free(v);
    free(logit);
  }
}

/* ------------------------------------------------------------------ running and comparing */

const char *attn_case_name(const attn_case *c, char *text, size_t size) {
  const attn_spec *s = &c->spec;
  snprintf(text, size,
           "seed %llu kv %s q %s out %s layout %d rows %d len0 %d q_len %d heads %dx%d dim %d page "
           "%d window %d cap %g sinks %d strided %d needle %d",
           (unsigned long long)s->seed, pkv_dtype_name(s->kv_dtype), pkv_dtype_name(s->q_dtype),
           pkv_dtype_name(s->out_dtype), (int)s->layout, s->rows, s->rows > 0 ? s->seq_len[0] : -1,
           s->q_len, s->kv_heads, s->group, s->head_dim, s->page_tokens, s->window,
           (double)s->soft_cap, (int)s->sinks, (int)s->strided, s->needle);
  return text;
}

pkv_shape attn_case_shape(const attn_case *c) {
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = c->spec.kv_heads * c->spec.group;
  shape.kv_heads = c->spec.kv_heads;
  shape.head_dim = c->spec.head_dim;
  shape.page_tokens = c->spec.page_tokens;
  shape.q_len = c->spec.q_len;
  shape.window = c->spec.window;
  return shape;
}

pkv_attention_args attn_case_args(attn_case *c, const pkv_plan *plan) {
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  args.plan = plan;
  args.cache = &c->cache;
  args.block_table = c->table;
  args.block_table_stride = c->table_stride;
  args.max_pages = c->max_pages;
  args.q_dtype = c->spec.q_dtype;
  args.q = c->q;
  args.q_token_stride = c->q_token;
  args.q_head_stride = c->q_head;
  args.out_dtype = c->spec.out_dtype;
  args.out = c->out;
  args.out_token_stride = c->out_token;
  args.out_head_stride = c->out_head;
  args.lse = c->lse;
  args.lse_token_stride = c->lse_token;
  args.lse_base2 = c->spec.lse_base2;
  args.scale = c->spec.scale;
  args.soft_cap = c->spec.soft_cap;
  args.sinks = c->sinks;
  return args;
}

void attn_plan_init(attn_plan *p, const attn_case *c, const pkv_plan_options *options) {
  memset(p, 0, sizeof *p);
  const pkv_shape shape = attn_case_shape(c);
  int32_t longest = 0;
  for (int32_t r = 0; r < c->spec.rows; r++)
    if (c->spec.seq_len[r] > longest) longest = c->spec.seq_len[r];
  pkv_error err = {0};
  size_t bytes = 0, work = 0;
  p->status = pkv_plan_size(&bytes, &work, &shape, options, c->spec.rows, longest, &err);
  if (p->status != PKV_OK) return;
  p->memory = take(bytes);
  p->memory_bytes = bytes;
  pkv_sharing sharing = PKV_SHARING_INIT;
  sharing.block_table = c->table;
  sharing.block_table_stride = c->table_stride;
  sharing.max_pages = c->max_pages;
  if (options->route == PKV_ROUTE_SHARED)
    p->status = pkv_plan_build_shared(&p->plan, p->memory, bytes, &shape, options, c->spec.rows,
                                      c->spec.seq_len, &sharing, &err);
  else
    p->status = pkv_plan_build(&p->plan, p->memory, bytes, &shape, options, c->spec.rows,
                               c->spec.seq_len, &err);
  if (p->status != PKV_OK) fail_msg("plan: %s", err.text);
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  assert_int_equal(pkv_plan_get_stats(&stats, p->plan, c->spec.kv_dtype, NULL), PKV_OK);
  assert_true(stats.workspace_bytes <= work);
  p->workspace_bytes = stats.workspace_bytes;
  p->workspace = take(p->workspace_bytes);
}

void attn_plan_deinit(attn_plan *p) {
  free(p->memory);
  free(p->workspace);
  memset(p, 0, sizeof *p);
}

void attn_run(attn_case *c, const attn_plan *p, pkv_executor *executor) {
  memset(c->out, 0x5a, c->out_bytes);
  memset(c->lse, 0x5a, c->lse_floats * sizeof(float));
  memset(p->workspace, 0xff, p->workspace_bytes);
  pkv_attention_args args = attn_case_args(c, p->plan);
  args.workspace = p->workspace;
  args.workspace_bytes = p->workspace_bytes;
  pkv_error err = {0};
  const pkv_status status = pkv_attention_run(executor, &args, &err);
  char name[256];
  if (status != PKV_OK) fail_msg("%s: %s", attn_case_name(c, name, sizeof name), err.text);
}

/* What is below the least normal float may come out as zero. */
static bool near_enough(double got, double want, double bound) {
  if (isinf(want) || isnan(want)) return got == want;
  return fabs(got - want) <= bound + (double)FLT_MIN; /* false for NaN */
}

void attn_check(attn_case *c, const char *what) {
  const attn_spec *s = &c->spec;
  const int64_t heads = (int64_t)s->kv_heads * s->group, tokens = (int64_t)s->rows * s->q_len;
  char name[256];
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t h = 0; h < heads; h++) {
      const int64_t state = t * heads + h;
      for (int32_t i = 0; i < s->head_dim; i++) {
        const double got =
            (double)pkv_load(c->out, s->out_dtype, t * c->out_token + h * c->out_head + i);
        const double want = c->want[state * s->head_dim + i];
        const double bound = c->bound[state * s->head_dim + i];
        if (!near_enough(got, want, bound))
          fail_msg("%s: %s: token %lld head %lld [%d]: got %.9g, want %.9g, bound %.3g", what,
                   attn_case_name(c, name, sizeof name), (long long)t, (long long)h, i, got, want,
                   bound);
      }
      const double lse = (double)c->lse[t * c->lse_token + h];
      if (!near_enough(lse, c->want_lse[state], c->bound_lse[state]))
        fail_msg("%s: %s: token %lld head %lld lse: got %.9g, want %.9g, bound %.3g", what,
                 attn_case_name(c, name, sizeof name), (long long)t, (long long)h, lse,
                 c->want_lse[state], c->bound_lse[state]);
    }
  }
}

pkv_executor *attn_executor(pkv_isa isa, int32_t threads) {
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  options.isa = isa;
  options.threads = threads;
  pkv_executor *executor = NULL;
  const pkv_status status = pkv_executor_create(&executor, &options, NULL);
  if (status == PKV_E_UNSUPPORTED) return NULL;
  assert_int_equal(status, PKV_OK);
  return executor;
}
