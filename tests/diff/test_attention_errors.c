/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bad input to pkv_attention_run and pkv_append: a status, a text that names argument and values,
 * and not one byte written.
 */
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
#include "plan/plan.h"
#include "support/attn_case.h"

typedef struct fixture {
  attn_case c;
  attn_plan p;
  pkv_executor *executor;
  pkv_attention_args args; /* good ones */
} fixture;

static fixture f;

/* Runs `args`: refused, with these words in the text, and nothing written. */
static void refused(const pkv_attention_args *args, pkv_status want, const char *word,
                    const char *second) {
  memset(f.c.out, 0x5a, f.c.out_bytes);
  memset(f.c.lse, 0x5a, f.c.lse_floats * 4);
  memset(f.p.workspace, 0xff, f.p.workspace_bytes);
  pkv_error err = {0};
  const pkv_status got = pkv_attention_run(f.executor, args, &err);
  if (got != want || strstr(err.text, word) == NULL || strstr(err.text, second) == NULL)
    fail_msg("got %s \"%s\", wanted %s with \"%s\" and \"%s\"", pkv_status_name(got), err.text,
             pkv_status_name(want), word, second);
  for (size_t i = 0; i < f.c.out_bytes; i++)
    assert_int_equal(((unsigned char *)f.c.out)[i], 0x5a);
  for (size_t i = 0; i < f.c.lse_floats * 4; i++)
    assert_int_equal(((unsigned char *)f.c.lse)[i], 0x5a);
  for (size_t i = 0; i < f.p.workspace_bytes; i++)
    assert_int_equal(((unsigned char *)f.p.workspace)[i], 0xff);
}

static int setup(void **state) {
  (void)state;
  static const int32_t lens[] = {40, 0, 100};
  attn_spec s = attn_spec_default();
  s.rows = 3;
  s.seq_len = lens;
  attn_case_init(&f.c, &s);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  attn_plan_init(&f.p, &f.c, &options);
  f.executor = attn_executor(PKV_ISA_AUTO, 1);
  f.args = attn_case_args(&f.c, f.p.plan);
  f.args.workspace = f.p.workspace;
  f.args.workspace_bytes = f.p.workspace_bytes;
  return 0;
}

static int teardown(void **state) {
  (void)state;
  attn_plan_deinit(&f.p);
  attn_case_deinit(&f.c);
  pkv_executor_destroy(f.executor);
  return 0;
}

#define BAD(change, status, word, second)                                                          \
  do {                                                                                             \
    pkv_attention_args a = f.args;                                                                 \
    change;                                                                                        \
    refused(&a, status, word, second);                                                             \
  } while (0)

static void test_pointers(void **state) {
  (void)state;
  pkv_error err = {0};
  assert_int_equal(pkv_attention_run(NULL, &f.args, &err), PKV_E_INVALID);
  assert_non_null(strstr(err.text, "executor is NULL"));
  refused(NULL, PKV_E_INVALID, "args is NULL", "");
  BAD(a.struct_size = 8, PKV_E_INVALID, "struct_size is 8", "pkv_attention_args");
  BAD(a.plan = NULL, PKV_E_INVALID, "plan is NULL", "");
  BAD(a.cache = NULL, PKV_E_INVALID, "cache is NULL", "");
  BAD(a.block_table = NULL, PKV_E_INVALID, "block_table is NULL", "");
  BAD(a.q = NULL, PKV_E_INVALID, "args->q is NULL", "");
  BAD(a.out = NULL, PKV_E_INVALID, "args->out is NULL", "");
  BAD(a.workspace = NULL, PKV_E_INVALID, "workspace is NULL", "");
  BAD(a.q = (char *)f.c.q + 1, PKV_E_INVALID, "args->q is", "aligned to 4");
  BAD(a.lse = (float *)(void *)((char *)f.c.lse + 2), PKV_E_INVALID, "args->lse", "aligned");
  BAD(a.block_table = (int32_t *)(void *)((char *)f.c.table + 1), PKV_E_INVALID, "block_table",
      "aligned");
  _Alignas(64) unsigned char junk[1024];
  memset(junk, 0x7e, sizeof junk);
  BAD(a.plan = (const pkv_plan *)(const void *)junk, PKV_E_INVALID, "plan", "0x7e7e7e7e");
}

static void test_workspace(void **state) {
  (void)state;
  char words[32];
  snprintf(words, sizeof words, "%zu", f.p.workspace_bytes);
  BAD(a.workspace_bytes--, PKV_E_TOO_SMALL, "workspace_bytes", words);
  BAD(a.workspace = (char *)f.p.workspace + 32, PKV_E_INVALID, "workspace", "aligned to 64");
}

static void test_table(void **state) {
  (void)state;
  int32_t *entry = &f.c.table[2 * f.c.table_stride + 4];
  const int32_t kept = *entry, pages = (int32_t)f.c.cache.pages;
  char words[32];
  const int32_t bad[] = {-1, pages, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    *entry = bad[i];
    snprintf(words, sizeof words, "page %d", bad[i]);
    BAD((void)0, PKV_E_RANGE, "row 2, index 4", words);
    snprintf(words, sizeof words, "0 .. %d", pages - 1);
    BAD((void)0, PKV_E_RANGE, "block_table", words);
  }
  *entry = kept;
  BAD(a.max_pages = 6, PKV_E_RANGE, "row 2 of 100 tokens needs 7 pages", "max_pages is 6");
  BAD(a.max_pages = -2, PKV_E_INVALID, "max_pages", "-2");
  BAD(a.block_table_stride = 3, PKV_E_INVALID, "block_table_stride is 3", "max_pages");
  BAD(a.block_table_stride = INT64_MAX, PKV_E_INVALID, "block_table_stride", "overflows");
}

static void test_types_and_numbers(void **state) {
  (void)state;
  BAD(a.q_dtype = PKV_DTYPE_FP8_E4M3, PKV_E_UNSUPPORTED, "q_dtype", "fp8");
  BAD(a.out_dtype = (pkv_dtype)99, PKV_E_UNSUPPORTED, "out_dtype is 99", "f32, f16 or bf16");
  BAD(a.scale = NAN, PKV_E_INVALID, "scale is", "nan");
  BAD(a.scale = INFINITY, PKV_E_INVALID, "scale is", "inf");
  BAD(a.soft_cap = -1.0f, PKV_E_INVALID, "soft_cap is -1", "");
  BAD(a.soft_cap = NAN, PKV_E_INVALID, "soft_cap", "nan");
}

static void test_strides(void **state) {
  (void)state;
  BAD(a.q_head_stride = 63, PKV_E_INVALID, "args->q strides", "head 63");
  BAD(a.out_token_stride = 200, PKV_E_INVALID, "args->out strides token 200", "overlap");
  BAD(a.out_token_stride = -256, PKV_E_INVALID, "args->out strides token -256", "");
  BAD(a.q_token_stride = INT64_MAX / 2, PKV_E_INVALID, "args->q strides", "overflow");
  BAD((a.q_token_stride = 0, a.q_head_stride = INT64_MAX / 2), PKV_E_INVALID, "q_head_stride",
      "overflows");
  BAD(a.lse_token_stride = 3, PKV_E_INVALID, "lse_token_stride is 3", "4 query heads");
  BAD(a.lse_token_stride = INT64_MAX / 2, PKV_E_INVALID, "lse_token_stride 4611686018427387903",
      "overflows");
}

/* Tokens inside heads is a layout too: [heads, tokens, head_dim]. */
static void test_heads_outermost(void **state) {
  (void)state;
  pkv_attention_args a = f.args;
  a.out_token_stride = 64;
  a.out_head_stride = 3 * 64;
  attn_case_answer(&f.c);
  assert_int_equal(pkv_attention_run(f.executor, &a, NULL), PKV_OK);
  for (int t = 0; t < 3; t++) {
    for (int h = 0; h < 4; h++) {
      const double want = f.c.want[(t * 4 + h) * 64 + 7];
      const double got = (double)((float *)f.c.out)[h * 192 + t * 64 + 7];
      if (!(fabs(got - want) <= 1e-5)) fail_msg("token %d head %d: %g, want %g", t, h, got, want);
    }
  }
}

static void test_cache(void **state) {
  (void)state;
  pkv_cache bad = f.c.cache;
  bad.head_dim = 128;
  bad.k_token_stride = bad.v_token_stride = 128;
  bad.k_head_stride = bad.v_head_stride = 16 * 128;
  bad.k_page_stride = bad.v_page_stride = 2 * 16 * 128;
  BAD(a.cache = &bad, PKV_E_INVALID, "head_dim 64", "128");
  bad = f.c.cache;
  bad.head_dim = 60;
  BAD(a.cache = &bad, PKV_E_UNSUPPORTED, "head_dim", "60");
  bad = f.c.cache;
  bad.k = NULL;
  BAD(a.cache = &bad, PKV_E_INVALID, "args->cache->k", "NULL");
  bad = f.c.cache;
  bad.k_token_stride = 32;
  BAD(a.cache = &bad, PKV_E_INVALID, "args->cache->k", "32");
  bad = f.c.cache;
  bad.v_page_stride = 100;
  BAD(a.cache = &bad, PKV_E_INVALID, "args->cache->v", "100");
  bad = f.c.cache;
  bad.dtype = (pkv_dtype)12;
  BAD(a.cache = &bad, PKV_E_INVALID, "dtype", "12");
  bad = f.c.cache;
  bad.k_scale = NAN;
  BAD(a.cache = &bad, PKV_E_INVALID, "k_scale", "nan");
  bad = f.c.cache;
  bad.struct_size = 1;
  BAD(a.cache = &bad, PKV_E_INVALID, "struct_size", "1");
}

/* ------------------------------------------------------------------ append */

static void append_refused(const pkv_append_args *args, pkv_status want, const char *word,
                           const char *second) {
  unsigned char *before = malloc(f.c.storage_bytes);
  memcpy(before, f.c.storage, f.c.storage_bytes);
  pkv_error err = {0};
  const pkv_status got = pkv_append(f.executor, args, &err);
  if (got != want || strstr(err.text, word) == NULL || strstr(err.text, second) == NULL)
    fail_msg("got %s \"%s\", wanted %s with \"%s\" and \"%s\"", pkv_status_name(got), err.text,
             pkv_status_name(want), word, second);
  assert_memory_equal(before, f.c.storage, f.c.storage_bytes);
  free(before);
}

static void test_append(void **state) {
  (void)state;
  float fresh[3 * 2 * 64] = {0};
  const int64_t last = f.c.cache.pages * 16 - 1;
  int64_t slots[] = {0, last, -1};
  pkv_append_args good = PKV_APPEND_ARGS_INIT;
  good.cache = &f.c.cache;
  good.tokens = 3;
  good.slots = slots;
  good.k = good.v = fresh;
  pkv_append_args a = good;
  append_refused(NULL, PKV_E_INVALID, "args is NULL", "");
  a.struct_size = 3;
  append_refused(&a, PKV_E_INVALID, "struct_size is 3", "");
  a = good;
  a.cache = NULL;
  append_refused(&a, PKV_E_INVALID, "cache is NULL", "");
  a = good;
  a.slots = NULL;
  append_refused(&a, PKV_E_INVALID, "slots is NULL", "");
  a = good;
  a.k = NULL;
  append_refused(&a, PKV_E_INVALID, "args->k is NULL", "");
  a = good;
  a.v = NULL;
  append_refused(&a, PKV_E_INVALID, "args->v is NULL", "");
  a = good;
  a.tokens = -4;
  append_refused(&a, PKV_E_INVALID, "tokens is -4", "");
  a = good;
  a.v_token_stride = 100;
  append_refused(&a, PKV_E_INVALID, "v_token_stride is 100", "2 heads of 64");
  char words[48];
  snprintf(words, sizeof words, "slots[2] is %lld", (long long)last + 1);
  slots[2] = last + 1;
  append_refused(&good, PKV_E_RANGE, words, "0 .. ");
  slots[2] = -2;
  append_refused(&good, PKV_E_RANGE, "slots[2] is -2", "");
}

/* Every dtype, layout and instruction set: what is appended is what pkv_store would write. */
static void test_append_writes(void **state) {
  (void)state;
  static const pkv_isa isas[] = {PKV_ISA_REFERENCE, PKV_ISA_SCALAR, PKV_ISA_AVX2, PKV_ISA_AVX512,
                                 PKV_ISA_NEON};
  const int32_t lens[] = {37};
  for (int i = 0; i < 4 * 4 * ATTN_LAYOUTS; i++) {
    pkv_executor *executor = attn_executor(isas[i % 4], 2);
    if (executor == NULL) continue;
    attn_spec s = attn_spec_default();
    s.rows = 1;
    s.seq_len = lens;
    s.kv_heads = 3;
    s.head_dim = 40;
    s.page_tokens = 4;
    s.kv_dtype = (pkv_dtype)(i / 4 % 4);
    s.layout = (attn_layout)(i / 16);
    const bool fp8 = s.kv_dtype == PKV_DTYPE_FP8_E4M3;
    s.k_scale = 0.7f;
    s.v_scale = 0.03f; /* without effect on other dtypes */
    s.head_scales = true;
    attn_case c;
    attn_case_init(&c, &s);
    float k[6 * 3 * 40], v[6 * 3 * 40];
    pkv_rng rng;
    pkv_rng_init(&rng, (uint64_t)i);
    for (size_t n = 0; n < 6 * 3 * 40; n++) {
      k[n] = (float)(pkv_rng_normal(&rng) * pow(10.0, (double)pkv_rng_range(&rng, -9, 6)));
      v[n] = n % 50 == 7 ? INFINITY : n % 50 == 9 ? NAN : (float)pkv_rng_normal(&rng);
    }
    /* token 3 is skipped; token 5 overwrites what token 1 wrote */
    const int32_t position[] = {36, 11, 4, -1, 20, 11};
    int64_t slots[6];
    for (int t = 0; t < 6; t++)
      slots[t] = position[t] < 0 ? -1 : (int64_t)c.table[position[t] / 4] * 4 + position[t] % 4;
    pkv_append_args args = PKV_APPEND_ARGS_INIT;
    args.cache = &c.cache;
    args.tokens = 6;
    args.slots = slots;
    args.k = k;
    args.v = v;
    assert_int_equal(pkv_append(executor, &args, NULL), PKV_OK);
    for (int t = 0; t < 6; t++) {
      if (t == 1 || t == 3) continue;
      for (int h = 0; h < 3; h++) {
        for (int is_v = 0; is_v < 2; is_v++) {
          const float *from = (is_v ? v : k) + (t * 3 + h) * 40;
          float scale = 1.0f;
          if (fp8) scale = is_v ? s.v_scale * c.v_head_scale[h] : s.k_scale * c.k_head_scale[h];
          for (int d = 0; d < 40; d++) {
            unsigned char want[4] = {0}, got[4] = {0};
            pkv_store(want, s.kv_dtype, 0, from[d] / scale);
            const size_t size = pkv_dtype_bytes(s.kv_dtype);
            memcpy(got,
                   (unsigned char *)attn_case_element(&c, is_v, 0, position[t], h) +
                       (size_t)d * size,
                   size);
            const double w = (double)pkv_load(want, s.kv_dtype, 0);
            const double g = (double)pkv_load(got, s.kv_dtype, 0);
            if (!(w == g || (isnan(w) && isnan(g))))
              fail_msg("%s %s layout %d token %d head %d [%d] of %c: %g became %g, not %g",
                       pkv_isa_name(isas[i % 4]), pkv_dtype_name(s.kv_dtype), (int)s.layout, t, h,
                       d, is_v ? 'V' : 'K', (double)from[d], g, w);
          }
        }
      }
    }
    attn_case_deinit(&c);
    pkv_executor_destroy(executor);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_pointers),      cmocka_unit_test(test_workspace),
      cmocka_unit_test(test_table),         cmocka_unit_test(test_types_and_numbers),
      cmocka_unit_test(test_strides),       cmocka_unit_test(test_heads_outermost),
      cmocka_unit_test(test_cache),         cmocka_unit_test(test_append),
      cmocka_unit_test(test_append_writes),
  };
  return cmocka_run_group_tests_name("attention_errors", tests, setup, teardown);
}
