/* SPDX-License-Identifier: Apache-2.0 */
#include "support/append_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"

#define U       0x1p-24
#define PATTERN 0xa5

append_spec append_draw(pkv_rng *rng, uint64_t seed) {
  static const int32_t page[] = {1, 3, 16, 64};
  append_spec s = {0};
  s.seed = seed;
  s.dtype = (pkv_dtype)pkv_rng_below(rng, 3);
  s.cache_dtype = (pkv_dtype)pkv_rng_below(rng, 4);
  s.source = (append_source)pkv_rng_below(rng, APPEND_SOURCES);
  s.layout = (int32_t)pkv_rng_below(rng, 4);
  s.tokens = (int32_t)pkv_rng_range(rng, 1, 40);
  s.kv_heads = (int32_t)pkv_rng_range(rng, 1, 9);
  s.head_dim = 8 * (int32_t)pkv_rng_range(rng, 1, 32);
  s.page_tokens = page[pkv_rng_below(rng, 4)];
  s.pages = (2 * s.tokens + s.page_tokens) / s.page_tokens + 1;
  s.k_scale = pkv_rng_below(rng, 2) ? 0.07f : 0.0f;
  s.v_scale = pkv_rng_below(rng, 2) ? 1.7f : 0.0f;
  s.head_scales = pkv_rng_below(rng, 2) != 0;
  if (pkv_rng_below(rng, 4) != 0) {
    s.rope_dims =
        pkv_rng_below(rng, 2) ? s.head_dim + 1 : 2 * (int32_t)pkv_rng_range(rng, 1, s.head_dim / 2);
    s.pairs = (pkv_rope_pairs)pkv_rng_below(rng, 2);
    s.base = pkv_rng_below(rng, 2) ? 500000.0 : 0.0;
    s.table = pkv_rng_below(rng, 3) == 0;
  }
  return s;
}

static void *take(size_t bytes) {
  void *p = NULL;
  assert_int_equal(posix_memalign(&p, 64, bytes > 0 ? bytes : 64), 0);
  return p;
}

static void make_cache(append_case *c) {
  const append_spec *s = &c->spec;
  const int64_t d = s->head_dim, h = s->kv_heads, t = s->page_tokens;
  const int64_t gap = s->layout == 3 ? 3 : 0;
  pkv_cache *a = &c->cache;
  *a = (pkv_cache)PKV_CACHE_INIT;
  a->dtype = s->cache_dtype;
  a->pages = s->pages;
  a->page_tokens = s->page_tokens;
  a->kv_heads = s->kv_heads;
  a->head_dim = s->head_dim;
  a->k_scale = s->k_scale;
  a->v_scale = s->v_scale;
  if (s->layout == 1) {
    a->k_head_stride = d;
    a->k_token_stride = h * d;
    a->k_page_stride = t * h * d;
  } else {
    a->k_token_stride = d + gap;
    a->k_head_stride = t * a->k_token_stride + gap;
    a->k_page_stride = h * a->k_head_stride + gap;
  }
  const size_t element = pkv_dtype_bytes(s->cache_dtype);
  const size_t one = (size_t)(a->k_page_stride * s->pages) * element;
  c->storage_bytes = 2 * one;
  c->storage = take(c->storage_bytes);
  a->k = c->storage;
  a->v = c->storage + one;
  if (s->layout == 2) {
    a->v = c->storage + (size_t)a->k_page_stride * element;
    a->k_page_stride *= 2;
  }
  a->v_token_stride = a->k_token_stride;
  a->v_head_stride = a->k_head_stride;
  a->v_page_stride = a->k_page_stride;
}

static void make_source(append_case *c, pkv_rng *rng) {
  const append_spec *s = &c->spec;
  const int64_t d = s->head_dim, h = s->kv_heads, t = s->tokens;
  const size_t element = pkv_dtype_bytes(s->dtype);
  const int64_t gap = s->source == APPEND_GAPS ? 5 : 0;
  c->head_stride = s->source == APPEND_HEAD_MAJOR ? t * d : d + gap;
  c->token_stride = s->source == APPEND_HEAD_MAJOR ? d
                    : s->source == APPEND_FUSED    ? 3 * h * d
                                                   : h * c->head_stride + gap;
  const int64_t extent = (t - 1) * c->token_stride + (h - 1) * c->head_stride + d;
  const int64_t v_at = s->source == APPEND_FUSED ? h * d : extent + gap;
  c->source_bytes = (size_t)(v_at + extent) * element;
  c->k_at = 0;
  c->v_at = (size_t)v_at * element;
  c->source = take(c->source_bytes);
  const double large = s->dtype == PKV_DTYPE_F16 ? 6e3 : 3e4; /* past f16's and e4m3's largest */
  memset(c->source, 0xff, c->source_bytes);                   /* NaN */
  for (int is_v = 0; is_v < 2; is_v++)
    for (int64_t i = 0; i < t; i++)
      for (int64_t k = 0; k < h; k++)
        for (int64_t e = 0; e < d; e++)
          pkv_store(c->source + (is_v ? c->v_at : c->k_at), s->dtype,
                    i * c->token_stride + k * c->head_stride + e,
                    (float)(pkv_rng_normal(rng) * (pkv_rng_below(rng, 20)  ? 1.0
                                                   : pkv_rng_below(rng, 2) ? large
                                                                           : 1e-6)));
}

static void make_slots(append_case *c, pkv_rng *rng) {
  const append_spec *s = &c->spec;
  const int64_t room = (int64_t)s->pages * s->page_tokens;
  c->slots = take((size_t)s->tokens * sizeof(int64_t));
  c->positions = take((size_t)s->tokens * sizeof(int32_t));
  for (int32_t i = 0; i < s->tokens; i++) {
    bool taken = true;
    while (taken) {
      c->slots[i] = (int64_t)pkv_rng_below(rng, (uint64_t)room);
      taken = false;
      for (int32_t k = 0; k < i; k++)
        taken = taken || c->slots[k] == c->slots[i];
    }
    if (pkv_rng_below(rng, 8) == 0) c->slots[i] = -1;
    c->positions[i] = (int32_t)pkv_rng_below(rng, pkv_rng_below(rng, 2) ? 64 : 131072);
  }
}

static int32_t dims_of(const append_spec *s) {
  return s->rope_dims > s->head_dim ? s->head_dim : s->rope_dims;
}

static void make_rope(append_case *c, pkv_rng *rng) {
  const append_spec *s = &c->spec;
  c->rope = (pkv_rope)PKV_ROPE_INIT;
  c->rope.pairs = s->pairs;
  c->rope.dims = s->rope_dims > s->head_dim ? 0 : s->rope_dims;
  c->rope.base = s->base;
  c->rope.positions = c->positions;
  if (!s->table || s->rope_dims == 0) return;
  const int32_t count = dims_of(s) / 2;
  c->frequencies = take((size_t)count * sizeof(float));
  for (int32_t j = 0; j < count; j++)
    c->frequencies[j] = (float)pkv_rng_uniform(rng);
  c->rope.inverse_frequency = c->frequencies;
}

void append_case_init(append_case *c, const append_spec *spec) {
  pkv_rng rng;
  memset(c, 0, sizeof *c);
  c->spec = *spec;
  pkv_rng_init(&rng, spec->seed);
  make_cache(c);
  make_source(c, &rng);
  make_slots(c, &rng);
  make_rope(c, &rng);
  if (spec->head_scales) {
    c->k_head_scale = take((size_t)spec->kv_heads * sizeof(float));
    c->v_head_scale = take((size_t)spec->kv_heads * sizeof(float));
    for (int32_t h = 0; h < spec->kv_heads; h++) {
      c->k_head_scale[h] = (float)pow(10.0, 4.0 * pkv_rng_uniform(&rng) - 2.0); /* 0.01 .. 100 */
      c->v_head_scale[h] = 0.5f + 0.1f * (float)h;
    }
    c->cache.k_head_scale = c->k_head_scale;
    c->cache.v_head_scale = c->v_head_scale;
  }
  append_case_reset(c);
}

void append_case_deinit(append_case *c) {
  free(c->storage);
  free(c->source);
  free(c->slots);
  free(c->positions);
  free(c->frequencies);
  free(c->k_head_scale);
  free(c->v_head_scale);
  memset(c, 0, sizeof *c);
}

void append_case_reset(append_case *c) {
  memset(c->storage, PATTERN, c->storage_bytes);
}

pkv_append_args append_case_args(append_case *c) {
  pkv_append_args args = PKV_APPEND_ARGS_INIT;
  const bool plain = c->spec.source == APPEND_PLAIN;
  args.cache = &c->cache;
  args.tokens = c->spec.tokens;
  args.slots = c->slots;
  args.dtype = c->spec.dtype;
  args.k = c->source + c->k_at;
  args.v = c->source + c->v_at;
  args.k_token_stride = args.v_token_stride = plain ? 0 : c->token_stride;
  args.k_head_stride = args.v_head_stride = plain ? 0 : c->head_stride;
  if (c->spec.rope_dims > 0) args.rope = &c->rope;
  return args;
}

/* ------------------------------------------------------------------ the answer */

/* What an element should be, and the float part of its bound. */
typedef struct wanted {
  double value, slack;
} wanted;

static double source_of(const append_case *c, bool is_v, int64_t i, int64_t head, int64_t d) {
  return (double)pkv_load(c->source + (is_v ? c->v_at : c->k_at), c->spec.dtype,
                          i * c->token_stride + head * c->head_stride + d);
}

static wanted want_of(const append_case *c, bool is_v, int64_t i, int64_t head, int32_t d) {
  const append_spec *s = &c->spec;
  const int32_t dims = dims_of(s), half = dims / 2;
  const double x = source_of(c, is_v, i, head, d);
  wanted w = {x, 0.0};
  double scale = 1.0;
  if (!is_v && d < dims) {
    const bool adjacent = s->pairs == PKV_ROPE_ADJACENT;
    const int32_t j = adjacent ? d / 2 : d % half;
    const bool second = adjacent ? d % 2 == 1 : d >= half;
    const int32_t mate = adjacent ? d ^ 1 : second ? d - half : d + half;
    const double base = s->base > 0.0 ? s->base : 10000.0;
    const double frequency =
        c->frequencies != NULL ? (double)c->frequencies[j] : exp(-2.0 * j / dims * log(base));
    const double angle = (double)c->positions[i] * frequency;
    const double y = source_of(c, false, i, head, mate);
    w.value = second ? x * cos(angle) + y * sin(angle) : x * cos(angle) - y * sin(angle);
    w.slack = fabs(x * cos(angle)) + fabs(y * sin(angle)) + 1e-3 * (fabs(x) + fabs(y));
  }
  if (s->cache_dtype == PKV_DTYPE_FP8_E4M3) {
    const float tensor = is_v ? s->v_scale : s->k_scale;
    const float *heads = is_v ? c->v_head_scale : c->k_head_scale;
    if (tensor > 0.0f) scale = (double)tensor;
    if (heads != NULL) scale *= (double)heads[head];
  }
  w.value /= scale;
  w.slack = (w.slack / scale + fabs(w.value)) * 6.0 * U;
  return w;
}

/* Half the distance between neighbours of the type at x, of the larger side at a power of two. */
static double half_unit(pkv_dtype dtype, double x) {
  const double size = fabs(x) * (1.0 + 0x1p-20);
  if (dtype == PKV_DTYPE_F32) return size * U;
  if (dtype == PKV_DTYPE_F16) return fmax(size * 0x1p-11, 0x1p-25);
  if (dtype == PKV_DTYPE_BF16) return size * 0x1p-8;
  return fmax(size * 0x1p-4, 0x1p-10);
}

static double largest(pkv_dtype dtype) {
  return dtype == PKV_DTYPE_F16 ? 65520.0 : dtype == PKV_DTYPE_FP8_E4M3 ? 448.0 : INFINITY;
}

static void check_element(const append_case *c, const unsigned char *at, wanted w, bool is_v,
                          int64_t i, int64_t head, int32_t d, const char *what) {
  const append_spec *s = &c->spec;
  const double got = (double)pkv_load(at, s->cache_dtype, 0), most = largest(s->cache_dtype);
  double want = w.value;
  bool good;
  if (s->cache_dtype == PKV_DTYPE_F16 && fabs(want) >= most - w.slack) {
    good = fabs(got) >= 65504.0 && (got > 0) == (want > 0); /* the last finite one, or infinity */
  } else {
    if (fabs(want) > most) want = want > 0 ? most : -most;
    good = fabs(got - want) <= w.slack + half_unit(s->cache_dtype, want);
  }
  if (!good)
    fail_msg("%s: seed %llu %s to %s source %d layout %d heads %d dim %d rope %d %d: %s token %lld "
             "position %d head %lld [%d]: got %.9g, want %.9g",
             what, (unsigned long long)s->seed, pkv_dtype_name(s->dtype),
             pkv_dtype_name(s->cache_dtype), (int)s->source, s->layout, s->kv_heads, s->head_dim,
             s->rope_dims, (int)s->pairs, is_v ? "v" : "k", (long long)i, c->positions[i],
             (long long)head, d, got, want);
}

void append_check(const append_case *c, const unsigned char *storage, const char *what) {
  const pkv_cache *a = &c->cache;
  const size_t element = pkv_dtype_bytes(a->dtype);
  unsigned char *written = take(c->storage_bytes);
  memset(written, 0, c->storage_bytes);
  for (int32_t i = 0; i < c->spec.tokens; i++) {
    if (c->slots[i] < 0) continue;
    const int64_t page = c->slots[i] / a->page_tokens, in = c->slots[i] % a->page_tokens;
    for (int is_v = 0; is_v < 2; is_v++)
      for (int32_t h = 0; h < a->kv_heads; h++) {
        const int64_t at = page * a->k_page_stride + in * a->k_token_stride + h * a->k_head_stride;
        const size_t first =
            (size_t)((unsigned char *)(is_v ? a->v : a->k) - c->storage) + (size_t)at * element;
        memset(written + first, 1, (size_t)a->head_dim * element);
        for (int32_t d = 0; d < a->head_dim; d++)
          check_element(c, storage + first + (size_t)d * element, want_of(c, is_v, i, h, d), is_v,
                        i, h, d, what);
      }
  }
  for (size_t i = 0; i < c->storage_bytes; i++)
    if (!written[i] && storage[i] != PATTERN)
      fail_msg("%s: seed %llu: byte %zu of the cache belongs to no token and was changed to %02x",
               what, (unsigned long long)c->spec.seed, i, storage[i]);
  free(written);
}
