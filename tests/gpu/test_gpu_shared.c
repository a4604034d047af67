/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over shared prefixes on the device, against the answer in double: plans made on the
   device and on the host, the workspace poisoned, tables of one plan after another. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu/gpu_case.h"
#include "gpu/gpu_stream.h"

enum { MOST_ROWS = 48 };

/* Rows in groups that share `pages[0]` pages, and in halves of groups that share pages[1] more. */
typedef struct family {
  int32_t rows, groups, pages[2];
  int32_t seq_len[MOST_ROWS], *table, stride, page_count;
} family;

static void family_init(family *f, pkv_rng *rng, int32_t page_tokens) {
  f->stride = f->pages[0] + f->pages[1] + (200 + page_tokens - 1) / page_tokens + 1;
  f->table = malloc((size_t)(f->rows * f->stride) * sizeof *f->table);
  f->page_count = 0;
  const int32_t root = f->page_count, branch = root + f->groups * f->pages[0];
  f->page_count = branch + 2 * f->groups * f->pages[1];
  for (int32_t r = 0; r < f->rows; r++) {
    const int32_t group = r % f->groups, half = r % (2 * f->groups);
    int32_t *to = f->table + r * f->stride, at = 0;
    for (int32_t i = 0; i < f->pages[0]; i++)
      to[at++] = root + group * f->pages[0] + i;
    for (int32_t i = 0; i < f->pages[1]; i++)
      to[at++] = branch + half * f->pages[1] + i;
    while (at < f->stride)
      to[at++] = f->page_count++;
    f->seq_len[r] = (int32_t)pkv_rng_range(rng, 0, 200) +
                    (pkv_rng_below(rng, 8) ? (f->pages[0] + f->pages[1]) * page_tokens : 0);
  }
}

static void check_plan(gpu_case *g, pkv_device_plan *plan, const char *what) {
  int32_t fault = 0;
  for (int twice = 0; twice < 2; twice++) {
    gpu_run(g, plan);
    attn_check(g->host, what);
  }
  OK(pkv_device_plan_fault(&fault, plan, NULL, err));
  assert_int_equal(fault, -1);
}

static void check_family(const attn_spec *spec, const char *name) {
  char what[128];
  attn_case c;
  gpu_case g;
  attn_case_init(&c, spec);
  attn_case_answer(&c);
  gpu_case_init(&g, &c);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.route = PKV_ROUTE_SHARED;
  pkv_sharing sharing = PKV_SHARING_INIT;
  sharing.block_table = g.table;
  sharing.block_table_stride = c.table_stride;
  sharing.max_pages = c.max_pages;
  pkv_device_plan *plan = gpu_plan(&g, &options, 0);
  snprintf(what, sizeof what, "%s, planned on the host", name);
  check_plan(&g, plan, what);
  gpu_poison_plan(plan, -1, spec->seed);
  OK(pkv_device_plan_build_shared(plan, spec->rows, g.seq_len, &sharing, NULL, err));
  snprintf(what, sizeof what, "%s, planned on the device", name);
  check_plan(&g, plan, what);
  pkv_device_plan_destroy(plan);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

static void test_shared_families(void **state) {
  (void)state;
  NEED_GPU();
  static const pkv_dtype dtypes[] = {PKV_DTYPE_F16, PKV_DTYPE_BF16, PKV_DTYPE_FP8_E4M3};
  static const int32_t head_dims[] = {64, 128}, groups[] = {1, 2, 3, 4, 7, 8, 16, 32};
  static const int32_t pages[] = {16, 32, 64, 128};
  const int count = gpu_opt.small ? 9 : 90;
  for (int i = 0; i < count; i++) {
    char name[64];
    pkv_rng rng;
    pkv_rng_init(&rng, 900 + (uint64_t)i);
    family f = {.rows = (int32_t)pkv_rng_range(&rng, 1, MOST_ROWS),
                .groups = (int32_t)pkv_rng_range(&rng, 1, 4),
                .pages = {(int32_t)pkv_rng_range(&rng, 0, 20), (int32_t)pkv_rng_range(&rng, 0, 9)}};
    if (i % 5 == 4) f.groups = f.rows; /* nothing is shared */
    const int32_t page = PICK(&rng, pages);
    family_init(&f, &rng, page);
    attn_spec s = gpu_spec(PICK(&rng, dtypes), 900 + (uint64_t)i, f.rows, f.seq_len);
    s.head_dim = PICK(&rng, head_dims);
    if (s.kv_dtype == PKV_DTYPE_FP8_E4M3) {
      s.head_dim = 128;
      s.head_scales = pkv_rng_below(&rng, 2) == 0;
      if (pkv_rng_below(&rng, 2)) s.q_dtype = s.out_dtype = PKV_DTYPE_BF16;
    }
    s.group = PICK(&rng, groups);
    s.kv_heads = (int32_t)pkv_rng_range(&rng, 1, 3);
    s.page_tokens = page;
    s.q_len = pkv_rng_below(&rng, 3) ? 1 : (int32_t)pkv_rng_range(&rng, 2, 4);
    s.layout = (attn_layout)pkv_rng_below(&rng, ATTN_PADDED); /* multiples of 16 bytes */
    s.window = pkv_rng_below(&rng, 4) ? 0 : (int32_t)pkv_rng_range(&rng, 1, 900);
    s.soft_cap = pkv_rng_below(&rng, 5) ? 0.0f : 20.0f;
    s.sinks = pkv_rng_below(&rng, 4) == 0;
    s.needle = pkv_rng_below(&rng, 4) ? -1 : (int32_t)pkv_rng_range(&rng, 0, 500);
    s.pages = f.table;
    s.pages_stride = f.stride;
    s.page_count = f.page_count;
    snprintf(name, sizeof name, "family %d", i);
    check_family(&s, name);
    free(f.table);
  }
}

/*
 * Layers in a row on one plan, each launch beginning before the one ahead has ended: two caches and
 * queries in turns, so that states of the wrong layer would show.
 */
static void check_layers(const attn_spec *spec, const char *name) {
  enum { LAYERS = 7 };
  char what[128];
  attn_case c[2];
  gpu_case g[2];
  for (int i = 0; i < 2; i++) {
    attn_spec s = *spec;
    s.seed += (uint64_t)i * 7919;
    attn_case_init(&c[i], &s);
    attn_case_answer(&c[i]);
    gpu_case_init(&g[i], &c[i]);
  }
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.route = PKV_ROUTE_SHARED;
  pkv_device_plan *plan = gpu_plan(&g[0], &options, 0);
  for (int overlap = 0; overlap < 3; overlap++) {
    for (int i = 0; i < 2; i++)
      gpu_mark(&g[i], 0x5a);
    gpu_wait();
    pkv_device_plan_set_overlap(plan, overlap);
    for (int layer = 0; layer < LAYERS; layer++)
      OK(pkv_device_attention(gpu, plan, &g[layer % 2].args, NULL, err));
    gpu_wait();
    for (int i = 0; i < 2; i++) {
      gpu_fetch(&g[i]);
      snprintf(what, sizeof what, "%s, overlap %d, layers of kind %d", name, overlap, i);
      attn_check(&c[i], what);
    }
  }
  pkv_device_plan_destroy(plan);
  for (int i = 0; i < 2; i++) {
    gpu_case_deinit(&g[i]);
    attn_case_deinit(&c[i]);
  }
}

static void test_shared_layers(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t groups[] = {1, 4, 8};
  const int count = gpu_opt.small ? 9 : 27;
  for (int i = 0; i < count; i++) {
    char name[64];
    pkv_rng rng;
    pkv_rng_init(&rng, 1900 + (uint64_t)i);
    family f = {.rows = (int32_t)pkv_rng_range(&rng, 1, MOST_ROWS),
                .groups = (int32_t)pkv_rng_range(&rng, 1, 3),
                .pages = {(int32_t)pkv_rng_range(&rng, 0, 40), (int32_t)pkv_rng_range(&rng, 0, 9)}};
    if (i % 3 == 2) f.groups = f.rows; /* nothing is shared: the kernel of `balanced` */
    family_init(&f, &rng, 16);
    attn_spec s = gpu_spec(gpu_kv_dtypes[i / 3 % 3], 1900 + (uint64_t)i, f.rows, f.seq_len);
    s.head_dim = 128;
    s.group = PICK(&rng, groups);
    s.kv_heads = 2;
    s.page_tokens = 16;
    s.pages = f.table;
    s.pages_stride = f.stride;
    s.page_count = f.page_count;
    snprintf(name, sizeof name, "layers %d", i);
    check_layers(&s, name);
    free(f.table);
  }
}

static void test_shared_refusals(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {300, 300};
  const struct {
    pkv_dtype kv;
    int32_t head_dim, page;
  } cases[] = {{PKV_DTYPE_FP8_E4M3, 64, 16}, {PKV_DTYPE_F16, 96, 16}, {PKV_DTYPE_F16, 64, 8}};
  for (size_t i = 0; i < COUNT(cases); i++) {
    pkv_error error = {0};
    attn_spec s = gpu_spec(cases[i].kv, 5, 2, lens);
    s.head_dim = cases[i].head_dim;
    s.page_tokens = cases[i].page;
    attn_case c;
    gpu_case g;
    attn_case_init(&c, &s);
    gpu_case_init(&g, &c);
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    options.route = PKV_ROUTE_SHARED;
    pkv_device_plan *plan = gpu_plan(&g, &options, 0);
    assert_int_equal(pkv_device_attention(gpu, plan, &g.args, NULL, &error), PKV_E_UNSUPPORTED);
    assert_non_null(strstr(error.text, "route shared on CUDA"));
    pkv_device_plan_destroy(plan);
    gpu_case_deinit(&g);
    attn_case_deinit(&c);
  }
}

int gpu_suite_shared(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_shared_families),
      cmocka_unit_test(test_shared_layers),
      cmocka_unit_test(test_shared_refusals),
  };
  return cmocka_run_group_tests_name("shared", tests, gpu_setup, gpu_teardown);
}
