/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps whose route a policy chooses (router.h): every route it may take gives the answer, a route
 * that is not here is replaced and the reason says so. FlashInfer is played by `balanced` behind
 * its interface; where its kernels are, they run too.
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

#include "gpu/gpu_case.h"
#include "pkv/router.h"

#define ROUTE(route) (1u << (unsigned)(route))
#define ALL_OURS     0x3eu

/* --- an invented FlashInfer ------------------------------------------------------------------ */

struct pkv_flashinfer {
  pkv_flashinfer_shape shape;
  pkv_device_plan *plan;
  int32_t rows;
  void *seq_len;
  const int32_t *table;
  int64_t stride, pages;
};

static struct {
  const char *create, *plan, *list, *run; /* what the next such call says */
  int32_t no_cores;                       /* it has no kernels on CUDA cores */
  int32_t handles, lists, ran_tensor, ran_cores;
  pkv_flashinfer_shape last;
} fake;

static void fake_destroy(pkv_flashinfer *h) {
  pkv_device_plan_destroy(h->plan);
  pkv_device_free(gpu, h->seq_len);
  free(h);
  fake.handles--;
}

static const char *fake_create(pkv_flashinfer **out, const pkv_flashinfer_shape *s) {
  pkv_shape shape = PKV_SHAPE_INIT;
  const pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  *out = NULL;
  fake.last = *s;
  if (fake.create) return fake.create;
  if (!s->tensor_cores && fake.no_cores) return "no kernel on CUDA cores";
  shape.query_heads = s->query_heads;
  shape.kv_heads = s->kv_heads;
  shape.head_dim = s->head_dim;
  shape.page_tokens = s->page_tokens;
  pkv_flashinfer *h = calloc(1, sizeof *h);
  h->shape = *s;
  OK(pkv_device_plan_create(&h->plan, gpu, &shape, &options, PKV_DTYPE_F16, s->most_rows,
                            (int32_t)s->most_pages * s->page_tokens, err));
  OK(pkv_device_alloc(&h->seq_len, gpu, (size_t)s->most_rows * sizeof(int32_t), err));
  fake.handles++;
  *out = h;
  return NULL;
}

static const char *fake_plan(pkv_flashinfer *h, int32_t rows, const int32_t *seq_len,
                             void *stream) {
  int64_t pages = 0;
  if (fake.plan) return fake.plan;
  assert_in_range(rows, 1, h->shape.most_rows);
  for (int32_t row = 0; row < rows; row++) {
    assert_true(seq_len[row] > 0);
    pages += (seq_len[row] - 1) / h->shape.page_tokens + 1;
  }
  assert_true(pages <= h->shape.most_pages);
  h->rows = rows;
  h->table = NULL;
  OK(pkv_device_copy(gpu, h->seq_len, seq_len, (size_t)rows * sizeof(int32_t), stream, err));
  OK(pkv_device_plan_build(h->plan, rows, h->seq_len, stream, err));
  return NULL;
}

static const char *fake_list(pkv_flashinfer *h, const int32_t *table, int64_t stride, int64_t pages,
                             void *stream) {
  (void)stream;
  if (fake.list) return fake.list;
  assert_true(h->rows > 0);
  h->table = table;
  h->stride = stride;
  h->pages = pages;
  fake.lists++;
  return NULL;
}

static const char *fake_run(pkv_flashinfer *h, const pkv_flashinfer_call *c, void *stream) {
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  pkv_cache cache = PKV_CACHE_INIT;
  if (fake.run) return fake.run;
  assert_non_null(h->table);
  cache.dtype = args.q_dtype = args.out_dtype = PKV_DTYPE_F16;
  cache.k = c->k;
  cache.v = c->v;
  cache.pages = h->pages;
  cache.page_tokens = h->shape.page_tokens;
  cache.kv_heads = h->shape.kv_heads;
  cache.head_dim = h->shape.head_dim;
  cache.k_page_stride = cache.v_page_stride = c->page_stride;
  cache.k_token_stride = cache.v_token_stride = c->token_stride;
  cache.k_head_stride = cache.v_head_stride = c->head_stride;
  args.cache = &cache;
  args.block_table = h->table;
  args.block_table_stride = h->stride;
  args.max_pages = (int32_t)h->stride;
  args.q = c->q;
  args.out = c->out;
  args.scale = c->scale;
  OK(pkv_device_attention(gpu, h->plan, &args, stream, err));
  *(h->shape.tensor_cores ? &fake.ran_tensor : &fake.ran_cores) += 1;
  return NULL;
}

static const pkv_flashinfer_api fake_api = {
    PKV_FLASHINFER_ABI, "invented", fake_create, fake_destroy, fake_plan, fake_list, fake_run};

/* --- a batch and a router -------------------------------------------------------------------- */

static const int32_t lens[] = {300, 17, 1, 64, 129, 16};
enum { LENS = sizeof lens / sizeof *lens };

/* f16, head_dim 128; `plain`: nothing that FlashInfer does not take. */
static attn_spec spec_of(const int32_t *seq_len, int32_t rows, int32_t group, bool plain) {
  attn_spec s = gpu_spec(PKV_DTYPE_F16, 3, rows, seq_len);
  s.head_dim = 128;
  s.group = group;
  if (plain) s.sinks = s.strided = s.lse_base2 = false;
  if (plain) s.soft_cap = 0;
  return s;
}

static pkv_router *open_router(const gpu_case *g, const pkv_router_options *o) {
  const pkv_shape shape = attn_case_shape(g->host);
  pkv_router *r = NULL;
  int32_t longest = 1;
  for (int32_t i = 0; i < g->host->spec.rows; i++)
    if (g->host->spec.seq_len[i] > longest) longest = g->host->spec.seq_len[i];
  OK(pkv_router_create(&r, gpu, &shape, o, g->host->spec.kv_dtype, g->host->spec.rows + 1, longest,
                       err));
  return r;
}

static pkv_choice plan(pkv_router *r, const gpu_case *g) {
  pkv_choice choice = PKV_CHOICE_INIT;
  OK(pkv_router_plan(&choice, r, g->host->spec.rows, g->host->spec.seq_len, g->seq_len, NULL, err));
  return choice;
}

/* Compares what was fetched with the answer; flashinfer leaves lse alone. */
static void check(attn_case *c, bool flash, const char *what) {
  const int64_t heads = (int64_t)c->spec.kv_heads * c->spec.group;
  if (c->want == NULL) attn_case_answer(c);
  for (int64_t i = 0; i < c->spec.rows * heads && flash; i++)
    c->lse[i / heads * c->lse_token + i % heads] = (float)c->want_lse[i];
  attn_check(c, what);
}

/* Plans, runs twice, and compares with the answer. */
static pkv_choice run_checked(pkv_router *r, gpu_case *g, const char *what) {
  const pkv_choice choice = plan(r, g);
  const bool flash = choice.route == PKV_ROUTE_FLASHINFER;
  pkv_attention_args args = g->args;
  for (int twice = 0; twice < 2; twice++) {
    gpu_mark(g, 0x5a);
    if (flash) args.lse = NULL;
    pkv_router_set_overlap(r, 0);
    OK(pkv_router_attention(r, &args, NULL, err));
    gpu_fetch(g);
    check(g->host, flash, what);
  }
  return choice;
}

static pkv_router_options fixed(pkv_route route, const pkv_flashinfer_api *api) {
  pkv_router_options o = PKV_ROUTER_OPTIONS_INIT;
  o.fixed = route;
  o.routes = ALL_OURS | ROUTE(PKV_ROUTE_FLASHINFER);
  o.flashinfer = api;
  return o;
}

#define OPEN(g, c, s)                                                                              \
  attn_case c;                                                                                     \
  gpu_case g;                                                                                      \
  attn_case_init(&c, &s);                                                                          \
  gpu_case_init(&g, &c)
#define CLOSE(g, c)                                                                                \
  gpu_case_deinit(&g);                                                                             \
  attn_case_deinit(&c)

/* --- tests ----------------------------------------------------------------------------------- */

static void test_every_route(void **state) {
  (void)state;
  NEED_GPU();
  const attn_spec s = spec_of(lens, LENS, 4, true);
  OPEN(g, c, s);
  memset(&fake, 0, sizeof fake);
  for (int route = PKV_ROUTE_BUCKET_EXACT; route <= PKV_ROUTE_FLASHINFER; route++) {
    if (route == PKV_ROUTE_SHARED) continue;
    const pkv_router_options o = fixed((pkv_route)route, &fake_api);
    pkv_router *r = open_router(&g, &o);
    assert_null(pkv_router_no_flashinfer(r));
    const pkv_choice choice = run_checked(r, &g, pkv_route_name((pkv_route)route));
    assert_int_equal(choice.route, route);
    pkv_router_destroy(r);
  }
  assert_int_equal(fake.ran_tensor, 2); /* group 4: tensor cores, unless the caller says else */
  assert_int_equal(fake.ran_cores, 0);
  assert_int_equal(fake.lists, 1); /* once a plan, not once a layer */
  assert_int_equal(fake.handles, 0);
  assert_int_equal(fake.last.most_rows, LENS + 1);
  assert_int_equal(fake.last.most_pages, (LENS + 1) * 19);
  CLOSE(g, c);
}

static void test_kinds(void **state) {
  (void)state;
  NEED_GPU();
  static const struct {
    int32_t group, asked, no_cores, tensor;
  } cases[] = {{4, PKV_COST_FLASHINFER_CORES, 0, 0},
               {1, 0, 0, 0},
               {1, PKV_ROUTE_FLASHINFER, 0, 1},
               {3, 0, 1, 1},
               {8, 0, 0, 1}};
  for (size_t i = 0; i < COUNT(cases); i++) {
    const attn_spec s = spec_of(lens, 3, cases[i].group, true);
    OPEN(g, c, s);
    memset(&fake, 0, sizeof fake);
    fake.no_cores = cases[i].no_cores;
    pkv_router_options o = fixed(PKV_ROUTE_FLASHINFER, &fake_api);
    o.flashinfer_kind = cases[i].asked;
    pkv_router *r = open_router(&g, &o);
    const pkv_choice choice = run_checked(r, &g, "kinds");
    assert_int_equal(choice.kind,
                     cases[i].tensor ? PKV_ROUTE_FLASHINFER : PKV_COST_FLASHINFER_CORES);
    assert_int_equal(fake.ran_tensor > 0, cases[i].tensor);
    pkv_router_destroy(r);
    CLOSE(g, c);
  }
}

/* The seed's policies name flashinfer for short batches; calibrated takes the least prediction. */
static void test_policies(void **state) {
  (void)state;
  NEED_GPU();
  const attn_spec s = spec_of(lens, LENS, 4, true);
  OPEN(g, c, s);
  pkv_cost_model model = {.struct_size = sizeof model, .shape = attn_case_shape(&c)};
  pkv_profile profile = PKV_PROFILE_INIT;
  profile.model = &model;
  model.kv_dtype = PKV_DTYPE_F16;
  model.cost[PKV_ROUTE_WORKQUEUE] = (pkv_route_cost){.points = 1, .attend = {[PKV_COST_ONE] = 10}};
  model.cost[PKV_ROUTE_BALANCED] = (pkv_route_cost){.points = 1, .attend = {[PKV_COST_ONE] = 12}};
  model.cost[PKV_COST_FLASHINFER_CORES] =
      (pkv_route_cost){.points = 1, .attend = {[PKV_COST_ONE] = 9}};
  memset(&fake, 0, sizeof fake);
  for (int policy = PKV_POLICY_STATIC; policy <= PKV_POLICY_CALIBRATED; policy++) {
    pkv_router_options o = fixed(PKV_ROUTE_AUTO, &fake_api);
    o.policy = (pkv_policy)policy;
    o.profile = policy == PKV_POLICY_CALIBRATED ? &profile : NULL;
    pkv_router *r = open_router(&g, &o);
    const pkv_choice choice = run_checked(r, &g, pkv_policy_name((pkv_policy)policy));
    assert_int_equal(choice.route, PKV_ROUTE_FLASHINFER);
    pkv_router_destroy(r);
  }
  assert_int_equal(fake.ran_cores, 2); /* calibrated named the kind */
  pkv_router_options o = fixed(PKV_ROUTE_AUTO, NULL);
  o.policy = PKV_POLICY_CALIBRATED;
  o.profile = &profile;
  pkv_router *r = open_router(&g, &o);
  assert_int_equal(run_checked(r, &g, "calibrated without flashinfer").route, PKV_ROUTE_WORKQUEUE);
  pkv_router_destroy(r);
  CLOSE(g, c);
}

static void expect_replaced(const pkv_router_options *o, const attn_spec *s, const char *why) {
  OPEN(g, c, *s);
  pkv_router *r = open_router(&g, o);
  if (why) {
    assert_non_null(pkv_router_no_flashinfer(r));
    if (strstr(pkv_router_no_flashinfer(r), why) == NULL)
      fail_msg("'%s' does not say '%s'", pkv_router_no_flashinfer(r), why);
  }
  const pkv_choice choice = run_checked(r, &g, why ? why : "replaced");
  assert_int_equal(choice.wanted, PKV_ROUTE_FLASHINFER);
  assert_int_equal(choice.route, PKV_ROUTE_BALANCED);
  if (strstr(choice.reason, "flashinfer is not available: balanced") == NULL)
    fail_msg("reason: %s", choice.reason);
  pkv_router_destroy(r);
  CLOSE(g, c);
}

static void test_replaced(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t hole[] = {40, 0, 70};
  memset(&fake, 0, sizeof fake);
  pkv_router_options o = fixed(PKV_ROUTE_FLASHINFER, NULL);
  attn_spec s = spec_of(lens, LENS, 4, false);
  expect_replaced(&o, &s, "kernels are not here");
  o.flashinfer = &fake_api;
  o.routes = ALL_OURS;
  expect_replaced(&o, &s, "not among the routes");
  o.routes = 0;
  fake.create = "no kernel for the shape";
  expect_replaced(&o, &s, "no kernel for the shape");
  fake.create = NULL;
  s.head_dim = 64;
  expect_replaced(&o, &s, "f16 and head_dim 128");
  s.head_dim = 128;
  s.window = 9;
  expect_replaced(&o, &s, "no window");
  s.window = 0;
  s.q_len = 2;
  expect_replaced(&o, &s, "one query token");
  s.q_len = 1;
  s.kv_dtype = PKV_DTYPE_BF16;
  s.q_dtype = s.out_dtype = PKV_DTYPE_BF16;
  s.operand_u = gpu_operand_u(PKV_DTYPE_BF16);
  expect_replaced(&o, &s, "f16 and head_dim 128");
  s = spec_of(hole, 3, 4, false);
  expect_replaced(&o, &s, NULL); /* this batch only: a row without tokens */
  assert_int_equal(fake.ran_tensor + fake.ran_cores, 0);
  assert_int_equal(fake.handles, 0);
}

/* What the kernels do not do is refused by name, not done wrongly. */
static void test_refused_arguments(void **state) {
  (void)state;
  NEED_GPU();
  const attn_spec s = spec_of(lens, LENS, 4, true);
  OPEN(g, c, s);
  memset(&fake, 0, sizeof fake);
  const pkv_router_options o = fixed(PKV_ROUTE_FLASHINFER, &fake_api);
  pkv_router *r = open_router(&g, &o);
  (void)plan(r, &g);
#define REFUSED(change, status, says)                                                              \
  do {                                                                                             \
    pkv_attention_args args = g.args;                                                              \
    pkv_cache cache = *g.args.cache;                                                               \
    pkv_error ref = {0};                                                                           \
    args.lse = NULL;                                                                               \
    args.cache = &cache;                                                                           \
    change;                                                                                        \
    assert_int_equal(pkv_router_attention(r, &args, NULL, &ref), status);                          \
    if (strstr(ref.text, says) == NULL) fail_msg("'%s' does not say '%s'", ref.text, says);        \
  } while (0)
  REFUSED(args.lse = g.lse, PKV_E_UNSUPPORTED, "lse");
  REFUSED(args.soft_cap = 5, PKV_E_UNSUPPORTED, "soft_cap");
  REFUSED(args.sinks = g.lse, PKV_E_UNSUPPORTED, "sinks");
  REFUSED(args.q_token_stride = 8 * 128 + 8, PKV_E_UNSUPPORTED, "contiguous");
  REFUSED(args.out_dtype = PKV_DTYPE_F32, PKV_E_UNSUPPORTED, "must be f16");
  REFUSED(cache.v_page_stride += 8, PKV_E_UNSUPPORTED, "same strides");
  REFUSED(args.block_table = NULL, PKV_E_INVALID, "block_table is NULL");
  REFUSED(args.max_pages = 18, PKV_E_RANGE, "a row has 19 pages");
  REFUSED(args.plan = (const pkv_plan *)&c, PKV_E_INVALID, "args->plan is set");
  REFUSED(fake.list = "no list", PKV_E_DEVICE, "pages: no list");
  fake.list = NULL;
  REFUSED(fake.run = "no run", PKV_E_DEVICE, "flashinfer: no run");
  fake.run = NULL;
  (void)run_checked(r, &g, "after refusals");
  fake.plan = "refused";
  pkv_choice choice = PKV_CHOICE_INIT;
  pkv_error e = {0};
  assert_int_equal(pkv_router_plan(&choice, r, LENS, lens, g.seq_len, NULL, &e), PKV_E_DEVICE);
  assert_non_null(strstr(e.text, "plan: refused"));
  REFUSED((void)0, PKV_E_STATE, "no batch has been planned");
  fake.plan = NULL;
  assert_int_equal(pkv_router_plan(&choice, r, LENS + 2, lens, g.seq_len, NULL, &e), PKV_E_RANGE);
  assert_int_equal(pkv_router_plan(&choice, r, 1, NULL, g.seq_len, NULL, &e), PKV_E_INVALID);
  assert_int_equal(pkv_router_plan(NULL, r, 1, lens, g.seq_len, NULL, &e), PKV_E_INVALID);
  pkv_router_destroy(r);
  CLOSE(g, c);
}

static void test_refused_options(void **state) {
  (void)state;
  NEED_GPU();
  pkv_flashinfer_api other = fake_api;
  pkv_shape shape = PKV_SHAPE_INIT;
  shape.query_heads = 8;
  shape.kv_heads = 2;
  shape.head_dim = 128;
  other.abi++;
#define BAD(change, status, says)                                                                  \
  do {                                                                                             \
    pkv_router_options o = fixed(PKV_ROUTE_BALANCED, &fake_api);                                   \
    pkv_shape sh = shape;                                                                          \
    pkv_router *r = (pkv_router *)&o;                                                              \
    pkv_error ref = {0};                                                                           \
    int32_t rows = 4;                                                                              \
    change;                                                                                        \
    assert_int_equal(pkv_router_create(&r, gpu, &sh, &o, PKV_DTYPE_F16, rows, 100, &ref), status); \
    assert_null(r);                                                                                \
    if (strstr(ref.text, says) == NULL) fail_msg("'%s' does not say '%s'", ref.text, says);        \
  } while (0)
  memset(&fake, 0, sizeof fake);
  BAD(o.routes = ROUTE(PKV_ROUTE_SHARED), PKV_E_INVALID, "options->routes is 0x40");
  BAD(o.flashinfer_kind = 3, PKV_E_INVALID, "flashinfer_kind is 3");
  BAD(o.flashinfer = &other, PKV_E_UNSUPPORTED, "ABI 3");
  BAD(o.policy = PKV_POLICY_CALIBRATED, PKV_E_INVALID, "cost model");
  BAD(o.struct_size = 4, PKV_E_INVALID, "struct_size");
  BAD(sh.head_dim = 12, PKV_E_UNSUPPORTED, "head_dim");
  BAD(rows = -1, PKV_E_INVALID, "max_rows is -1");
  assert_int_equal(fake.handles, 0);
  pkv_router_destroy(NULL);
}

/*
 * Two batches planned and run one after the other without a wait between, behind work that keeps
 * the device busy: when the second plan is made, the first one's upload is still ahead.
 */
static void plan_at_once(const pkv_router_options *o) {
  static const int32_t other[] = {33, 290, 200, 5, 16, 77};
  const size_t bytes = (gpu_opt.fake ? (size_t)1 : (size_t)128) << 20;
  const int busy = gpu_opt.fake ? 1 : 64; /* about 5 ms */
  const attn_spec one = spec_of(lens, LENS, 4, true), two = spec_of(other, LENS, 4, true);
  attn_case c[2];
  gpu_case g[2];
  void *memory = NULL;
  OK(pkv_device_alloc(&memory, gpu, 2 * bytes, err));
  for (int i = 0; i < 2; i++) {
    attn_case_init(&c[i], i == 0 ? &one : &two);
    gpu_case_init(&g[i], &c[i]);
    gpu_mark(&g[i], 0x5a);
  }
  pkv_router *r = open_router(&g[0], o);
  OK(pkv_device_synchronize(gpu, NULL, err));
  for (int n = 0; n < busy; n++)
    OK(pkv_device_copy(gpu, (unsigned char *)memory + bytes, memory, bytes, NULL, err));
  for (int i = 0; i < 2; i++) {
    pkv_attention_args args = g[i].args;
    args.lse = NULL;
    assert_int_equal(plan(r, &g[i]).route, PKV_ROUTE_FLASHINFER);
    OK(pkv_router_attention(r, &args, NULL, err));
  }
  for (int i = 0; i < 2; i++) {
    gpu_fetch(&g[i]);
    check(&c[i], true, i == 0 ? "the first of two" : "the second of two");
  }
  pkv_router_destroy(r);
  for (int i = 0; i < 2; i++) {
    gpu_case_deinit(&g[i]);
    attn_case_deinit(&c[i]);
  }
  pkv_device_free(gpu, memory);
}

static void test_plans_at_once(void **state) {
  (void)state;
  NEED_GPU();
  const pkv_flashinfer_api *api = &fake_api;
  pkv_error e = {0};
  memset(&fake, 0, sizeof fake);
  if (!gpu_opt.fake && pkv_flashinfer_open(&api, NULL, &e) != PKV_OK) {
    print_message("%s\n", e.text);
    skip();
  }
  pkv_router_options o = fixed(PKV_ROUTE_FLASHINFER, api);
  for (int cores = 0; cores < 2; cores++) {
    o.flashinfer_kind = cores ? PKV_COST_FLASHINFER_CORES : PKV_ROUTE_FLASHINFER;
    plan_at_once(&o);
  }
}

/* The kernels themselves, where they are; on a GPU their absence counts. */
static void test_flashinfer(void **state) {
  (void)state;
  NEED_GPU();
  const pkv_flashinfer_api *api;
  pkv_error e = {0};
  if (gpu_opt.fake) return; /* the others have played it */
  if (pkv_flashinfer_open(&api, NULL, &e) != PKV_OK) {
    print_message("%s\n", e.text);
    skip();
  }
  static const int32_t groups[] = {1, 4, 8};
  for (size_t i = 0; i < COUNT(groups); i++)
    for (int cores = 0; cores < 2; cores++) {
      const attn_spec s = spec_of(lens, LENS, groups[i], true);
      OPEN(g, c, s);
      pkv_router_options o = fixed(PKV_ROUTE_FLASHINFER, api);
      o.flashinfer_kind = cores ? PKV_COST_FLASHINFER_CORES : PKV_ROUTE_FLASHINFER;
      pkv_router *r = open_router(&g, &o);
      assert_int_equal(run_checked(r, &g, "flashinfer").kind, o.flashinfer_kind);
      pkv_router_destroy(r);
      CLOSE(g, c);
    }
}

int gpu_suite_router(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_route),       cmocka_unit_test(test_kinds),
      cmocka_unit_test(test_policies),          cmocka_unit_test(test_replaced),
      cmocka_unit_test(test_refused_arguments), cmocka_unit_test(test_refused_options),
      cmocka_unit_test(test_plans_at_once),     cmocka_unit_test(test_flashinfer),
  };
  return cmocka_run_group_tests_name("router", tests, gpu_setup, gpu_teardown);
}
