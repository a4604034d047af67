/* SPDX-License-Identifier: Apache-2.0 */
/* Values at the ends of their range: NaN that a row owns, soft caps of any size. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "support/attn_case.h"

static const pkv_isa isas[] = {PKV_ISA_REFERENCE, PKV_ISA_SCALAR, PKV_ISA_AVX2, PKV_ISA_AVX512,
                               PKV_ISA_NEON};
#define ISAS (sizeof isas / sizeof *isas)

static void run_route(attn_case *c, pkv_executor *executor, pkv_route route, uint32_t flags) {
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  attn_plan p;
  options.route = route;
  options.flags = flags;
  attn_plan_init(&p, c, &options);
  attn_run(c, &p, executor);
  attn_plan_deinit(&p);
}

/* All of the row's results are NaN, and those of the others are numbers. */
static void check_nan_row(const attn_case *c, int32_t row, const char *what) {
  const attn_spec *s = &c->spec;
  const int32_t heads = s->kv_heads * s->group;
  for (int32_t r = 0; r < s->rows; r++) {
    for (int32_t h = 0; h < heads; h++) {
      const float lse = c->lse[r * c->lse_token + h];
      for (int32_t i = 0; i < s->head_dim; i++) {
        const float x = pkv_load(c->out, s->out_dtype, r * c->out_token + h * c->out_head + i);
        if (isnan(x) != (r == row) || isnan(lse) != (r == row))
          fail_msg("%s: row %d of %d tokens, head %d: out[%d] %g, lse %g; NaN belongs to row %d",
                   what, r, s->seq_len[r], h, i, (double)x, (double)lse, row);
      }
    }
  }
}

/*
 * A NaN in a row's query, or in the key of its last token, which may be alone in its tile, is seen
 * in the row's results: it is no key that nobody may see.
 */
static void test_owned_nan_shows(void **state) {
  (void)state;
  static const int32_t lens[] = {1, 3, 5, 8, 17, 64, 65, 577};
  const int32_t rows = (int32_t)(sizeof lens / sizeof *lens);
  attn_spec s = attn_spec_default();
  s.rows = rows;
  s.seq_len = lens;
  s.q_dtype = PKV_DTYPE_F16;
  s.head_dim = 24;
  for (size_t i = 0; i < ISAS; i++) {
    pkv_executor *executor = attn_executor(isas[i], 2);
    if (executor == NULL) continue;
    for (int32_t row = 0; row < rows; row++) {
      for (int in_key = 0; in_key < 2; in_key++) {
        attn_case c;
        attn_case_init(&c, &s);
        for (int32_t h = 0; h < s.kv_heads; h++)
          if (in_key)
            pkv_store(attn_case_element(&c, false, row, lens[row] - 1, h), s.kv_dtype, 5, NAN);
        for (int32_t h = 0; h < s.kv_heads * s.group; h++)
          if (!in_key) pkv_store(c.q, s.q_dtype, row * c.q_token + h * c.q_head + 5, NAN);
        run_route(&c, executor, PKV_ROUTE_BALANCED, 0);
        check_nan_row(&c, row, pkv_isa_name(isas[i]));
        run_route(&c, executor, PKV_ROUTE_BALANCED, PKV_PLAN_BATCH_INVARIANT);
        check_nan_row(&c, row, pkv_isa_name(isas[i]));
        run_route(&c, executor, PKV_ROUTE_SPLIT, 0);
        check_nan_row(&c, row, pkv_isa_name(isas[i]));
        attn_case_deinit(&c);
      }
    }
    pkv_executor_destroy(executor);
  }
}

/* A cap far above the scores changes nothing; one far below them makes all keys alike. */
static void test_soft_caps_of_any_size(void **state) {
  (void)state;
  static const int32_t lens[] = {1, 40, 300};
  static const float large[] = {1e5f, 1e8f, 1e20f, 1e37f, 3.4e38f};
  static const float small[] = {1e-10f, 1e-30f, 1e-38f, 1e-45f};
  attn_spec s = attn_spec_default();
  s.rows = 3;
  s.seq_len = lens;
  for (size_t i = 0; i < ISAS; i++) {
    pkv_executor *executor = attn_executor(isas[i], 1);
    if (executor == NULL) continue;
    for (size_t j = 0; j < sizeof large / sizeof *large + sizeof small / sizeof *small; j++) {
      const size_t larges = sizeof large / sizeof *large;
      attn_case c;
      s.soft_cap = j < larges ? 0.0f : small[j - larges];
      attn_case_init(&c, &s);
      attn_case_answer(&c);
      if (j < larges) c.spec.soft_cap = large[j];
      run_route(&c, executor, PKV_ROUTE_BALANCED, 0);
      attn_check(&c, pkv_isa_name(isas[i]));
      attn_case_deinit(&c);
    }
    pkv_executor_destroy(executor);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_owned_nan_shows),
      cmocka_unit_test(test_soft_caps_of_any_size),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
