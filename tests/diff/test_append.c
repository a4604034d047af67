/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pkv_append on the CPU against double: source types and strides, cache types and layouts, scales,
 * rotations; equal bytes for all instruction sets; the sizes of older structs; bad ropes.
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

#include "backend/cpu/cpu_dense.h"
#include "support/append_case.h"
#include "support/attn_case.h"

/* In an emulator fewer cases are enough. */
#ifdef PKV_TEST_THIN
#define CASES 40
#else
#define CASES 400
#endif

static void test_random_cases(void **state) {
  (void)state;
  static const pkv_isa isas[] = {PKV_ISA_REFERENCE, PKV_ISA_SCALAR, PKV_ISA_AVX2, PKV_ISA_AVX512,
                                 PKV_ISA_NEON};
  pkv_executor *executors[5];
  pkv_rng rng;
  pkv_rng_init(&rng, 77);
  for (int e = 0; e < 5; e++)
    executors[e] = attn_executor(isas[e], 1 + e % 2);
  for (uint64_t i = 0; i < CASES; i++) {
    const append_spec s = append_draw(&rng, i);
    append_case c;
    unsigned char *first = NULL;
    append_case_init(&c, &s);
    const pkv_append_args args = append_case_args(&c);
    for (int e = 0; e < 5; e++) {
      pkv_error err = {0};
      if (executors[e] == NULL) continue;
      append_case_reset(&c);
      if (pkv_append(executors[e], &args, &err) != PKV_OK) fail_msg("%s", err.text);
      append_check(&c, c.storage, pkv_isa_name(isas[e]));
      if (first == NULL) {
        first = malloc(c.storage_bytes);
        memcpy(first, c.storage, c.storage_bytes);
      }
      assert_memory_equal(first, c.storage, c.storage_bytes);
    }
    free(first);
    append_case_deinit(&c);
  }
  for (int e = 0; e < 5; e++)
    pkv_executor_destroy(executors[e]);
}

/* A turn on the way into the cache gives the bytes of the model's own rope before. */
static void test_rope_equals_rope_before(void **state) {
  (void)state;
  enum { TOKENS = 9, HEADS = 3, DIM = 40, POSITIONS = 70 };
  pkv_executor *executor = attn_executor(PKV_ISA_AUTO, 2);
  for (int adjacent = 0; adjacent < 2; adjacent++)
    for (int32_t dims = 2; dims <= DIM; dims += 2) {
      append_spec s = {.seed = (uint64_t)dims, .tokens = TOKENS, .kv_heads = HEADS};
      s.head_dim = DIM;
      s.page_tokens = 4;
      s.pages = 9;
      s.rope_dims = dims;
      s.pairs = adjacent ? PKV_ROPE_ADJACENT : PKV_ROPE_HALVES;
      append_case c;
      append_case_init(&c, &s);
      float *table = malloc((size_t)(POSITIONS * dims) * sizeof *table);
      for (int32_t p = 0; p < POSITIONS; p++)
        for (int32_t j = 0; j < dims / 2; j++) {
          const double angle = p * pow(10000.0, -2.0 * j / dims);
          table[p * dims + 2 * j] = (float)cos(angle);
          table[p * dims + 2 * j + 1] = (float)sin(angle);
        }
      for (int i = 0; i < TOKENS; i++) {
        c.positions[i] %= POSITIONS;
        c.slots[i] = i;
      }
      pkv_append_args args = append_case_args(&c);
      assert_int_equal(pkv_append(executor, &args, NULL), PKV_OK);
      unsigned char *fused = malloc(c.storage_bytes);
      memcpy(fused, c.storage, c.storage_bytes);
      append_case_reset(&c);
      assert_int_equal(pkv_cpu_rope(executor, (float *)(void *)(c.source + c.k_at), HEADS * DIM,
                                    TOKENS, HEADS, DIM, dims, adjacent, table, c.positions, NULL),
                       PKV_OK);
      args.rope = NULL;
      assert_int_equal(pkv_append(executor, &args, NULL), PKV_OK);
      for (size_t i = 0; i < c.storage_bytes; i++)
        if (fused[i] != c.storage[i])
          fail_msg("adjacent %d dims %d: byte %zu is %02x, %02x with the rope before", adjacent,
                   dims, i, fused[i], c.storage[i]);
      free(fused);
      free(table);
      append_case_deinit(&c);
    }
  pkv_executor_destroy(executor);
}

/* A caller compiled against the first version: what came later is neither read nor wanted. */
static void test_older_struct(void **state) {
  (void)state;
  pkv_executor *executor = attn_executor(PKV_ISA_AUTO, 1);
  append_spec s = {.seed = 4, .tokens = 5, .kv_heads = 2, .head_dim = 16, .page_tokens = 4};
  s.pages = 9;
  append_case c;
  append_case_init(&c, &s);
  pkv_append_args args = append_case_args(&c);
  const size_t older = offsetof(pkv_append_args, dtype);
  unsigned char *exact = malloc(older); /* ends where the old struct did */
  args.struct_size = (uint32_t)older;
  memcpy(exact, &args, older);
  assert_int_equal(pkv_append(executor, (const pkv_append_args *)(void *)exact, NULL), PKV_OK);
  append_check(&c, c.storage, "older struct");
  free(exact);
  append_case_deinit(&c);
  pkv_executor_destroy(executor);
}

typedef struct refusal {
  pkv_executor *executor;
  append_case *c;
} refusal;

static void refused(const refusal *r, const pkv_append_args *args, pkv_status want,
                    const char *word) {
  pkv_error err = {0};
  const pkv_status got = pkv_append(r->executor, args, &err);
  if (got != want || strstr(err.text, word) == NULL)
    fail_msg("got %s \"%s\", wanted %s with \"%s\"", pkv_status_name(got), err.text,
             pkv_status_name(want), word);
  for (size_t i = 0; i < r->c->storage_bytes; i++)
    assert_int_equal(r->c->storage[i], 0xa5);
}

static void test_bad_arguments(void **state) {
  (void)state;
  pkv_executor *executor = attn_executor(PKV_ISA_AUTO, 1);
  append_spec s = {.seed = 4, .tokens = 5, .kv_heads = 2, .head_dim = 16, .page_tokens = 4};
  s.pages = 9;
  s.rope_dims = 8;
  s.table = true;
  append_case c;
  append_case_init(&c, &s);
  const refusal r = {executor, &c};
  const pkv_append_args good = append_case_args(&c);
  pkv_append_args a = good;
  pkv_rope rope = c.rope;
#define BAD(change, undo, status, word)                                                            \
  do {                                                                                             \
    change;                                                                                        \
    refused(&r, &a, status, word);                                                                 \
    undo;                                                                                          \
  } while (0)
  a.rope = &rope;
  BAD(a.struct_size = 12, a = good, PKV_E_INVALID, "struct_size is 12");
  BAD(a.struct_size += 8, a = good, PKV_E_INVALID, "struct_size");
  BAD(a.dtype = PKV_DTYPE_FP8_E4M3, a = good, PKV_E_UNSUPPORTED, "f32, f16 or bf16");
  BAD(a.dtype = (pkv_dtype)9, a = good, PKV_E_UNSUPPORTED, "dtype is 9");
  BAD(a.k_head_stride = 15, a = good, PKV_E_INVALID, "k_head_stride 15");
  BAD(a.v_head_stride = -16, a = good, PKV_E_INVALID, "v_head_stride -16");
  BAD(a.v_token_stride = -1, a = good, PKV_E_INVALID, "v_token_stride is -1");
  BAD(a.k_head_stride = INT64_MAX, a = good, PKV_E_INVALID, "k_head_stride");
  BAD(a.k_token_stride = INT64_MAX / 2, a = good, PKV_E_INVALID, "overflows");
  BAD(a.k = (const unsigned char *)good.k + 1, a = good, PKV_E_INVALID, "aligned to 4");
  a.rope = &rope;
  BAD(rope.struct_size = 8, rope = c.rope, PKV_E_INVALID, "rope->struct_size is 8");
  BAD(rope.dims = 7, rope = c.rope, PKV_E_INVALID, "dims is 7");
  BAD(rope.dims = -2, rope = c.rope, PKV_E_INVALID, "dims is -2");
  BAD(rope.dims = 18, rope = c.rope, PKV_E_INVALID, "head_dim 16");
  BAD(rope.pairs = (pkv_rope_pairs)2, rope = c.rope, PKV_E_INVALID, "pairs is 2");
  BAD(rope.positions = NULL, rope = c.rope, PKV_E_INVALID, "positions is NULL");
  BAD(rope.positions = (int32_t *)(void *)((char *)c.positions + 2), rope = c.rope, PKV_E_INVALID,
      "aligned to 4");
  BAD(c.frequencies[3] = NAN, c.frequencies[3] = 1.0f, PKV_E_INVALID, "inverse_frequency[3]");
  rope.inverse_frequency = NULL;
  BAD(rope.base = -1.0, rope.base = 0.0, PKV_E_INVALID, "base is -1");
  BAD(rope.base = INFINITY, rope.base = 0.0, PKV_E_INVALID, "base is inf");
  BAD(c.slots[4] = 36, c.slots[4] = -1, PKV_E_RANGE, "slots[4] is 36");
#undef BAD
  append_case_deinit(&c);
  pkv_executor_destroy(executor);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_cases),
      cmocka_unit_test(test_rope_equals_rope_before),
      cmocka_unit_test(test_older_struct),
      cmocka_unit_test(test_bad_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
