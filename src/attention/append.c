/* SPDX-License-Identifier: Apache-2.0 */
/* pkv_append: every argument checked, defaults resolved, then the backend called. */
#include "attention/attention_check.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"

/* The caller's struct as this version knows it: what came after the first version is 0 in older
   ones. */
static pkv_status read_args(pkv_append_args *out, const pkv_append_args *args, pkv_error *err) {
  PKV_CHECK(err, args != NULL, PKV_E_INVALID, "args is NULL");
  const size_t size = args->struct_size, first = offsetof(pkv_append_args, dtype);
  PKV_CHECK(err, size == sizeof *args || size == first, PKV_E_INVALID,
            "args->struct_size is %zu, this library's pkv_append_args has %zu, an older one %zu "
            "(use its _INIT macro)",
            size, sizeof *args, first);
  *out = (pkv_append_args)PKV_APPEND_ARGS_INIT;
  memcpy(out, args, size);
  out->struct_size = (uint32_t)sizeof *out;
  return PKV_OK;
}

static pkv_status check_source(const char *name, const void *data, int64_t *token_stride,
                               int64_t *head_stride, const pkv_append_args *args, pkv_error *err) {
  const int64_t heads = args->cache->kv_heads, dim = args->cache->head_dim;
  const size_t element = pkv_dtype_bytes(args->dtype);
  int64_t whole, head, last;
  PKV_CHECK(err, data != NULL || args->tokens == 0, PKV_E_INVALID, "args->%s is NULL", name);
  PKV_CHECK(err, (uintptr_t)data % element == 0, PKV_E_INVALID,
            "args->%s is %p, not aligned to %zu bytes", name, data, element);
  if (*head_stride == 0) *head_stride = dim;
  PKV_CHECK(err, !__builtin_mul_overflow(heads, *head_stride, &whole), PKV_E_INVALID,
            "args->%s_head_stride %lld times %lld heads overflows", name, (long long)*head_stride,
            (long long)heads);
  if (*token_stride == 0) *token_stride = whole;
  PKV_CHECK(err, pkv_strides_nest(args->tokens, *token_stride, heads, *head_stride, dim),
            PKV_E_INVALID,
            "args->%s_token_stride is %lld, %s_head_stride %lld: %lld tokens of %lld heads of %lld "
            "overlap",
            name, (long long)*token_stride, name, (long long)*head_stride, (long long)args->tokens,
            (long long)heads, (long long)dim);
  PKV_CHECK(err,
            !__builtin_mul_overflow(args->tokens, *token_stride, &last) &&
                !__builtin_mul_overflow(heads, *head_stride, &head) &&
                !__builtin_add_overflow(last, head, &last) && last <= INT64_MAX / 8,
            PKV_E_INVALID, "args->%s_token_stride %lld times %lld tokens overflows", name,
            (long long)*token_stride, (long long)args->tokens);
  return PKV_OK;
}

/* The frequencies as doubles, but those that only the device can read. */
static pkv_status resolve_frequencies(pkv_rope_params *out, const pkv_rope *rope, int on_device,
                                      pkv_error *err) {
  const float *table = rope->inverse_frequency;
  const double base = rope->base != 0.0 ? rope->base : 10000.0;
  PKV_CHECK(err, (uintptr_t)table % sizeof(float) == 0, PKV_E_INVALID,
            "args->rope->inverse_frequency is %p, not aligned to 4 bytes", (const void *)table);
  if (table != NULL && on_device) {
    out->inverse_frequency = table;
    return PKV_OK;
  }
  PKV_CHECK(err, table != NULL || (isfinite(base) && base > 0.0), PKV_E_INVALID,
            "args->rope->base is %g, must be positive and finite", rope->base);
  for (int32_t j = 0; j < out->dims / 2; j++) {
    PKV_CHECK(err, table == NULL || isfinite(table[j]), PKV_E_INVALID,
              "args->rope->inverse_frequency[%d] is %g, must be finite", j, (double)table[j]);
    out->frequency[j] = table != NULL ? (double)table[j] : pow(base, -2.0 * j / out->dims);
  }
  return PKV_OK;
}

static pkv_status resolve_rope(pkv_rope_params *out, const pkv_append_args *args, int on_device,
                               pkv_error *err) {
  const pkv_rope *rope = args->rope;
  const int32_t head_dim = args->cache->head_dim;
  if (rope == NULL) return PKV_OK;
  PKV_CHECK(err, rope->struct_size == sizeof *rope, PKV_E_INVALID,
            "args->rope->struct_size is %u, this library's pkv_rope has %zu (use its _INIT macro)",
            (unsigned)rope->struct_size, sizeof *rope);
  PKV_CHECK(err, rope->pairs == PKV_ROPE_HALVES || rope->pairs == PKV_ROPE_ADJACENT, PKV_E_INVALID,
            "args->rope->pairs is %d, known are 0 (halves) and 1 (adjacent)", (int)rope->pairs);
  PKV_CHECK(err, rope->dims >= 0 && rope->dims % 2 == 0 && rope->dims <= head_dim, PKV_E_INVALID,
            "args->rope->dims is %d, must be even and at most head_dim %d", rope->dims, head_dim);
  PKV_CHECK(err, rope->positions != NULL || args->tokens == 0, PKV_E_INVALID,
            "args->rope->positions is NULL");
  PKV_CHECK(err, (uintptr_t)rope->positions % sizeof(int32_t) == 0, PKV_E_INVALID,
            "args->rope->positions is %p, not aligned to 4 bytes", (const void *)rope->positions);
  out->dims = rope->dims != 0 ? rope->dims : head_dim;
  out->adjacent = rope->pairs == PKV_ROPE_ADJACENT;
  out->positions = rope->positions;
  return resolve_frequencies(out, rope, on_device, err);
}

pkv_status pkv_append_resolve(pkv_append_params *p, const pkv_append_args *given, int on_device,
                              pkv_error *err) {
  pkv_append_args args;
  PKV_TRY(read_args(&args, given, err));
  PKV_TRY(pkv_check_view(args.cache, on_device, err));
  PKV_CHECK(err, args.tokens >= 0, PKV_E_INVALID, "args->tokens is %lld", (long long)args.tokens);
  PKV_CHECK(err, args.slots != NULL || args.tokens == 0, PKV_E_INVALID, "args->slots is NULL");
  PKV_CHECK(err, (uintptr_t)args.slots % sizeof(int64_t) == 0, PKV_E_INVALID,
            "args->slots is %p, not aligned to 8 bytes", (const void *)args.slots);
  PKV_CHECK(err,
            args.dtype == PKV_DTYPE_F32 || args.dtype == PKV_DTYPE_F16 ||
                args.dtype == PKV_DTYPE_BF16,
            PKV_E_UNSUPPORTED, "args->dtype is %d (%s), must be f32, f16 or bf16", (int)args.dtype,
            pkv_dtype_name(args.dtype));
  *p = (pkv_append_params){.cache = *args.cache,
                           .tokens = args.tokens,
                           .slots = args.slots,
                           .k = args.k,
                           .v = args.v,
                           .dtype = args.dtype,
                           .k_token_stride = args.k_token_stride,
                           .v_token_stride = args.v_token_stride,
                           .k_head_stride = args.k_head_stride,
                           .v_head_stride = args.v_head_stride};
  PKV_TRY(check_source("k", args.k, &p->k_token_stride, &p->k_head_stride, &args, err));
  PKV_TRY(check_source("v", args.v, &p->v_token_stride, &p->v_head_stride, &args, err));
  PKV_TRY(resolve_rope(&p->rope, &args, on_device, err));
  pkv_resolve_scales(&p->cache);
  return PKV_OK;
}

pkv_status pkv_append(pkv_executor *executor, const pkv_append_args *args, pkv_error *err) {
  pkv_append_params p;
  PKV_CHECK(err, executor != NULL, PKV_E_INVALID, "executor is NULL");
  PKV_CHECK(err, executor->device_ops == NULL, PKV_E_INVALID,
            "executor runs on a device: use pkv_device_append");
  PKV_TRY(pkv_append_resolve(&p, args, 0, err));
  const int64_t slots = p.cache.pages * p.cache.page_tokens;
  for (int64_t i = 0; i < p.tokens; i++) {
    PKV_CHECK(err, p.slots[i] >= -1 && p.slots[i] < slots, PKV_E_RANGE,
              "args->slots[%lld] is %lld; the cache has slots 0 .. %lld (%lld pages of %d), -1 = "
              "skip",
              (long long)i, (long long)p.slots[i], (long long)(slots - 1), (long long)p.cache.pages,
              p.cache.page_tokens);
  }
  return executor->ops->append(executor, &p, err);
}
