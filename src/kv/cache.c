/* SPDX-License-Identifier: Apache-2.0 */
/* Cache views: shape, strides and scales. */
#include "kv/cache.h"

#include <math.h>
#include <stdbool.h>

#include "base/dtype.h"

/* One axis of an index map: `extent` steps of `stride` elements. */
typedef struct axis {
  int64_t extent, stride;
} axis;

#define AXES 4 /* page, token, head, element */

static void axes_of(axis out[AXES], const pkv_cache *c, bool is_v) {
  out[0] = (axis){c->pages, is_v ? c->v_page_stride : c->k_page_stride};
  out[1] = (axis){c->page_tokens, is_v ? c->v_token_stride : c->k_token_stride};
  out[2] = (axis){c->kv_heads, is_v ? c->v_head_stride : c->k_head_stride};
  out[3] = (axis){c->head_dim, 1};
}

/* Elements from the first to one past the last; false on overflow. Strides are not negative. */
static bool span_of(int64_t *span, const axis *axes, int count) {
  int64_t last = 0;
  for (int i = 0; i < count; i++) {
    int64_t step;
    if (__builtin_mul_overflow(axes[i].extent - 1, axes[i].stride, &step)) return false;
    if (__builtin_add_overflow(last, step, &last)) return false;
  }
  if (last == INT64_MAX) return false;
  *span = last + 1;
  return true;
}

/*
 * Whether each axis steps over everything that the axes of smaller stride span: then no two indices
 * meet. Axes of extent 1 do not matter. Sorts `axes`. On failure *bad is the stride at fault and
 * *need the least one that would do.
 */
static bool nests(axis *axes, int count, int64_t *bad, int64_t *need) {
  int n = 0;
  for (int i = 0; i < count; i++)
    if (axes[i].extent > 1) axes[n++] = axes[i];
  for (int i = 1; i < n; i++)
    for (int j = i; j > 0 && axes[j].stride < axes[j - 1].stride; j--) {
      const axis t = axes[j];
      axes[j] = axes[j - 1];
      axes[j - 1] = t;
    }
  for (int i = 0; i < n; i++) {
    int64_t span;
    if (!span_of(&span, axes, i)) return false;
    if (axes[i].stride < span) {
      *bad = axes[i].stride;
      *need = span;
      return false;
    }
  }
  return true;
}

static bool scale_ok(float scale) {
  return isfinite(scale) && scale > 0.0f;
}

static pkv_status check_scales(const pkv_cache *c, const char *p, pkv_error *err) {
  PKV_CHECK(err, c->k_scale == 0.0f || scale_ok(c->k_scale), PKV_E_INVALID,
            "%sk_scale is %g, it must be finite and positive (0 = 1.0)", p, (double)c->k_scale);
  PKV_CHECK(err, c->v_scale == 0.0f || scale_ok(c->v_scale), PKV_E_INVALID,
            "%sv_scale is %g, it must be finite and positive (0 = 1.0)", p, (double)c->v_scale);
  for (int32_t h = 0; h < c->kv_heads && c->k_head_scale != NULL; h++)
    PKV_CHECK(err, scale_ok(c->k_head_scale[h]), PKV_E_INVALID,
              "%sk_head_scale[%d] is %g, it must be finite and positive", p, h,
              (double)c->k_head_scale[h]);
  for (int32_t h = 0; h < c->kv_heads && c->v_head_scale != NULL; h++)
    PKV_CHECK(err, scale_ok(c->v_head_scale[h]), PKV_E_INVALID,
              "%sv_head_scale[%d] is %g, it must be finite and positive", p, h,
              (double)c->v_head_scale[h]);
  return PKV_OK;
}

/* Strides of K or of V; `which` is 'k' or 'v'. */
static pkv_status check_strides(const pkv_cache *c, const char *p, char which, pkv_error *err) {
  static const char *const names[3] = {"page", "token", "head"};
  axis axes[AXES];
  axes_of(axes, c, which == 'v');
  for (int i = 0; i < 3; i++)
    PKV_CHECK(err, axes[i].stride >= 0, PKV_E_INVALID, "%s%c_%s_stride is %lld, which is negative",
              p, which, names[i], (long long)axes[i].stride);
  int64_t span, bytes;
  const bool fits = span_of(&span, axes, AXES) &&
                    !__builtin_mul_overflow(span, (int64_t)pkv_dtype_bytes(c->dtype), &bytes) &&
                    (uint64_t)bytes <= UINTPTR_MAX - (uintptr_t)(which == 'v' ? c->v : c->k);
  PKV_CHECK(
      err, fits, PKV_E_INVALID,
      "%s%c_page_stride %lld, %c_token_stride %lld, %c_head_stride %lld with %lld pages reach "
      "beyond the address space",
      p, which, (long long)axes[0].stride, which, (long long)axes[1].stride, which,
      (long long)axes[2].stride, (long long)c->pages);
  const int64_t strides[3] = {axes[0].stride, axes[1].stride, axes[2].stride};
  const int64_t extents[3] = {c->pages, c->page_tokens, c->kv_heads};
  for (int i = 0; i < 3; i++)
    PKV_CHECK(err, extents[i] == 1 || strides[i] >= c->head_dim, PKV_E_INVALID,
              "%s%c_%s_stride is %lld, less than head_dim %d: elements overlap", p, which, names[i],
              (long long)strides[i], c->head_dim);
  int64_t bad = 0, need = 0;
  if (nests(axes, AXES, &bad, &need)) return PKV_OK;
  int at = 0;
  while (at < 2 && (strides[at] != bad || extents[at] == 1))
    at++;
  return PKV_FAIL(err, PKV_E_INVALID,
                  "%s%c_%s_stride is %lld, elements overlap: smaller strides reach over %lld (page "
                  "%lld, token %lld, head %lld)",
                  p, which, names[at], (long long)bad, (long long)need, (long long)strides[0],
                  (long long)strides[1], (long long)strides[2]);
}

pkv_status pkv_cache_check_shape(const pkv_cache *c, const char *p, pkv_error *err) {
  PKV_CHECK(err, pkv_dtype_bytes(c->dtype) != 0, PKV_E_INVALID,
            "%sdtype is %d, which is no pkv_dtype", p, (int)c->dtype);
  PKV_CHECK(err, c->pages >= 1 && c->pages <= INT32_MAX, PKV_E_INVALID,
            "%spages is %lld, possible are 1 to %d", p, (long long)c->pages, INT32_MAX);
  PKV_CHECK(err, c->page_tokens >= 1 && c->page_tokens <= 1024, PKV_E_INVALID,
            "%spage_tokens is %d, possible are 1 to 1024", p, c->page_tokens);
  PKV_CHECK(err, c->kv_heads >= 1, PKV_E_INVALID, "%skv_heads is %d, at least 1 is needed", p,
            c->kv_heads);
  PKV_CHECK(err, c->head_dim >= 8 && c->head_dim <= 256 && c->head_dim % 8 == 0, PKV_E_UNSUPPORTED,
            "%shead_dim is %d, supported are multiples of 8 from 8 to 256", p, c->head_dim);
  return check_scales(c, p, err);
}

static pkv_status check_base(const pkv_cache *c, const char *p, char which, pkv_error *err) {
  const void *base = which == 'v' ? c->v : c->k;
  const size_t bytes = pkv_dtype_bytes(c->dtype);
  PKV_CHECK(err, base != NULL, PKV_E_INVALID, "%s%c is NULL", p, which);
  PKV_CHECK(err, (uintptr_t)base % bytes == 0, PKV_E_INVALID, "%s%c is not aligned to %zu bytes", p,
            which, bytes);
  return check_strides(c, p, which, err);
}

pkv_status pkv_cache_check(const pkv_cache *cache, const char *prefix, pkv_error *err) {
  PKV_CHECK_STRUCT(err, cache, pkv_cache);
  PKV_TRY(pkv_cache_check_shape(cache, prefix, err));
  PKV_TRY(check_base(cache, prefix, 'k', err));
  return check_base(cache, prefix, 'v', err);
}

/* Whether two bases whose pages advance alike keep to different parts of each page; b lies `delta`
 * elements behind a. */
static bool pages_apart(const axis *a, const axis *b, uint64_t delta) {
  int64_t a_span, b_span;
  if (a[0].extent == 1 || a[0].stride != b[0].stride) return false;
  if (!span_of(&a_span, a + 1, AXES - 1) || !span_of(&b_span, b + 1, AXES - 1)) return false;
  const uint64_t rest = delta % (uint64_t)a[0].stride;
  return rest >= (uint64_t)a_span && rest + (uint64_t)b_span <= (uint64_t)a[0].stride;
}

int pkv_cache_apart(const pkv_cache *a, int a_is_v, const pkv_cache *b, int b_is_v) {
  uintptr_t at_a = (uintptr_t)(a_is_v ? a->v : a->k), at_b = (uintptr_t)(b_is_v ? b->v : b->k);
  axis first[AXES], second[AXES];
  axes_of(first, a, a_is_v != 0);
  axes_of(second, b, b_is_v != 0);
  if (at_b < at_a) {
    axes_of(first, b, b_is_v != 0);
    axes_of(second, a, a_is_v != 0);
    const uintptr_t t = at_a;
    at_a = at_b;
    at_b = t;
  }
  const uint64_t bytes = pkv_dtype_bytes(a->dtype), gap = at_b - at_a;
  int64_t span;
  if (!span_of(&span, first, AXES)) return 0;
  if (gap >= (uint64_t)span * bytes) return 1;
  if (gap == 0 || gap % bytes != 0) return 0;
  if (pages_apart(first, second, gap / bytes)) return 1;
  for (int i = 0; i < AXES; i++)
    if (first[i].extent > 1 && first[i].stride != second[i].stride) return 0;
  /* Equal strides: the two are one map with one more axis of two steps. */
  axis both[AXES + 1] = {first[0], first[1], first[2], first[3], {2, (int64_t)(gap / bytes)}};
  int64_t bad, need;
  return nests(both, AXES + 1, &bad, &need);
}
