/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks of many states at the tables of the instruction sets: query rows of several rows of a node
 * that share its tokens. Batch-invariant: every state has the bits that it has in a block of its
 * own row. In any mode: against double, computed here, within the bound of attn_case.h. What a
 * query does not see never reaches it.
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

#include "backend/cpu/cpu_isa.h"
#include "base/cpu.h"
#include "base/dtype.h"
#include "base/rng.h"

#define COUNT(a)   (sizeof(a) / sizeof(a)[0])
#define U          0x1p-24
#define MAX_STATES PKV_CPU_BLOCK_ROWS
#define MAX_DIM    PKV_CPU_MAX_HEAD_DIM
#define TOKENS     448 /* of the node: seven tiles */
#define KV_HEADS   2
#define HEAD       1 /* the KV head that is attended */

typedef struct node_spec {
  uint64_t seed;
  pkv_dtype kv_dtype, q_dtype;
  int32_t ranks, group, q_len, head_dim, page_tokens, window;
  int32_t begin, end;
  float soft_cap;
  uint32_t flags;
} node_spec;

typedef struct node_case {
  node_spec spec;
  struct pkv_plan plan;
  pkv_attention_params params;
  pkv_tree_rank ranks[MAX_STATES];
  int32_t *pages;
  unsigned char *k, *v, *q;
  size_t cache_bytes;
  int32_t states;
} node_case;

/* States of a block, by rank as the slots hold them. */
typedef struct states {
  float m[MAX_STATES], l[MAX_STATES], acc[MAX_STATES * MAX_DIM];
} states;

static const char *spec_name(const node_spec *s, char *text, size_t size) {
  (void)snprintf(text, size,
                 "kv %s q %s, %d rows x %d x %d, d %d, page %d, window %d, [%d, %d), "
                 "cap %g, flags %u, seed %llu",
                 pkv_dtype_name(s->kv_dtype), pkv_dtype_name(s->q_dtype), s->ranks, s->q_len,
                 s->group, s->head_dim, s->page_tokens, s->window, s->begin, s->end,
                 (double)s->soft_cap, s->flags, (unsigned long long)s->seed);
  return text;
}

static void *take(size_t bytes) {
  void *p = NULL;
  assert_int_equal(posix_memalign(&p, 64, bytes), 0);
  return p;
}

static void fill(void *to, pkv_dtype dtype, int64_t count, pkv_rng *rng) {
  for (int64_t i = 0; i < count; i++)
    pkv_store(to, dtype, i, (float)pkv_rng_normal(rng));
}

/* Rows in any order; the shortest ends right behind the node, others up to 300 tokens later. */
static void make_ranks(node_case *c, pkv_rng *rng) {
  const node_spec *s = &c->spec;
  for (int32_t i = 0; i < s->ranks; i++) {
    c->ranks[i].row = s->ranks - 1 - i;
    const int64_t more = i == 0 ? 0 : pkv_rng_range(rng, 0, 300);
    c->ranks[i].length = TOKENS + s->q_len - 1 + (int32_t)more;
  }
}

static void node_case_init(node_case *c, const node_spec *s) {
  pkv_rng rng;
  pkv_rng_init(&rng, s->seed);
  memset(c, 0, sizeof *c);
  c->spec = *s;
  c->states = s->ranks * s->q_len * s->group;
  assert_true(c->states <= MAX_STATES);
  c->plan.q_len = s->q_len;
  c->plan.window = s->window;
  c->plan.flags = s->flags;
  c->plan.head_dim = s->head_dim;
  const int32_t used = (TOKENS + s->page_tokens - 1) / s->page_tokens, pages = used + 3;
  const int64_t tokens = (int64_t)pages * s->page_tokens;
  const size_t element = pkv_dtype_bytes(s->kv_dtype);
  c->cache_bytes = (size_t)(tokens * KV_HEADS * s->head_dim) * element;
  c->k = take(c->cache_bytes);
  c->v = take(c->cache_bytes);
  memset(c->k, 0xff, c->cache_bytes); /* NaN in every dtype */
  memset(c->v, 0xff, c->cache_bytes);
  c->pages = take((size_t)used * sizeof *c->pages);
  pkv_cache *const a = &c->params.cache;
  *a = (pkv_cache)PKV_CACHE_INIT;
  a->dtype = s->kv_dtype;
  a->k = c->k;
  a->v = c->v;
  a->pages = pages;
  a->page_tokens = s->page_tokens;
  a->kv_heads = KV_HEADS;
  a->head_dim = s->head_dim;
  a->k_token_stride = a->v_token_stride = s->head_dim;
  a->k_head_stride = a->v_head_stride = (int64_t)s->page_tokens * s->head_dim;
  a->k_page_stride = a->v_page_stride = KV_HEADS * a->k_head_stride;
  const int fp8 = s->kv_dtype == PKV_DTYPE_FP8_E4M3;
  a->k_scale = fp8 ? 0.75f : 1.0f;
  a->v_scale = fp8 ? 1.5f : 1.0f;
  for (int32_t i = 0; i < used; i++)
    c->pages[i] = (i + used / 2) % used + 1;
  for (int32_t token = 0; token < TOKENS; token++) {
    const int64_t at = c->pages[token / s->page_tokens] * a->k_page_stride +
                       token % s->page_tokens * a->k_token_stride + HEAD * a->k_head_stride;
    fill(c->k + (size_t)at * element, s->kv_dtype, s->head_dim, &rng);
    fill(c->v + (size_t)at * element, s->kv_dtype, s->head_dim, &rng);
  }
  const int32_t heads = KV_HEADS * s->group;
  const int64_t vectors = (int64_t)s->ranks * s->q_len * heads;
  c->q = take((size_t)(vectors * s->head_dim) * sizeof(float));
  fill(c->q, s->q_dtype, vectors * s->head_dim, &rng);
  make_ranks(c, &rng);
  c->params.plan = &c->plan;
  c->params.q = c->q;
  c->params.q_dtype = s->q_dtype;
  c->params.q_head_stride = s->head_dim;
  c->params.q_token_stride = (int64_t)heads * s->head_dim;
  c->params.scale = 1.0f / sqrtf((float)s->head_dim);
  c->params.soft_cap = s->soft_cap;
}

static void node_case_deinit(node_case *c) {
  free(c->k);
  free(c->v);
  free(c->q);
  free(c->pages);
}

/* K or V of a token, for the head that is attended. */
static unsigned char *element_of(const node_case *c, int is_v, int32_t token) {
  const pkv_cache *a = &c->params.cache;
  const int64_t at = c->pages[token / a->page_tokens] * a->k_page_stride +
                     token % a->page_tokens * a->k_token_stride + HEAD * a->k_head_stride;
  return (is_v ? c->v : c->k) + (size_t)at * pkv_dtype_bytes(a->dtype);
}

/* Ranks [first, first + count) as one block. */
static void attend(states *out, const node_case *c, const pkv_cpu_isa_ops *ops, void *scratch,
                   int32_t first, int32_t count) {
  const node_spec *s = &c->spec;
  const int32_t each = s->q_len * s->group;
  const pkv_cpu_block b = {.p = &c->params,
                           .pages = c->pages,
                           .ranks = c->ranks + first,
                           .row = -1,
                           .kv_head = HEAD,
                           .group = s->group,
                           .rows = count * each};
  ops->begin(scratch, &b);
  ops->attend(scratch, &b, s->begin, s->end);
  for (int32_t i = 0; i < count; i++) {
    const int32_t at = (first + i) * each;
    const pkv_cpu_states to = {out->m + at, out->l + at, out->acc + (int64_t)at * s->head_dim};
    ops->save(scratch, &b, i * each, each, to);
  }
}

/* The same row by row, as the segments of rows that share nothing. */
static void attend_alone(states *out, const node_case *c, const pkv_cpu_isa_ops *ops,
                         void *scratch) {
  const node_spec *s = &c->spec;
  const int32_t each = s->q_len * s->group;
  for (int32_t i = 0; i < s->ranks; i++) {
    const pkv_cpu_block b = {.p = &c->params,
                             .pages = c->pages,
                             .row = c->ranks[i].row,
                             .kv_head = HEAD,
                             .seq_len = c->ranks[i].length,
                             .group = s->group,
                             .rows = each};
    const pkv_cpu_states to = {out->m + i * each, out->l + i * each,
                               out->acc + (int64_t)i * each * s->head_dim};
    ops->begin(scratch, &b);
    ops->attend(scratch, &b, s->begin, s->end);
    ops->save(scratch, &b, 0, each, to);
  }
}

static const pkv_cpu_isa_ops *table_of(int i) {
  static const pkv_isa isas[] = {PKV_ISA_REFERENCE, PKV_ISA_SCALAR, PKV_ISA_AVX2, PKV_ISA_AVX512,
                                 PKV_ISA_NEON};
  pkv_cpu_features have;
  pkv_cpu_detect(&have);
  return pkv_cpu_isa_table(isas[i], &have);
}
#define TABLES 5

/* In an emulator fewer nodes are enough; more with PKV_TEST_WHOLE (`./run neon`). */
#ifdef PKV_TEST_THIN
#define SMALL      (getenv("PKV_TEST_WHOLE") == NULL)
#define NODES      (SMALL ? 10 : 24)
#define RANKS_STEP (SMALL ? 13 : 5)
#else
#define NODES      160
#define RANKS_STEP 1
#endif

/* ---------------------------------------------------------------------------------- double */

typedef struct answer {
  double o[MAX_DIM], bound[MAX_DIM], lse, bound_lse;
  int64_t seen;
} answer;

static double logit_of(double *size, const node_case *c, const float *q, int32_t token) {
  const node_spec *s = &c->spec;
  const double scale = (double)c->params.scale * (double)c->params.cache.k_scale;
  const unsigned char *k = element_of(c, 0, token);
  double dot = 0.0, all = 0.0;
  for (int32_t i = 0; i < s->head_dim; i++) {
    const double x = (double)q[i] * (double)pkv_load(k, s->kv_dtype, i);
    dot += x;
    all += fabs(x);
  }
  *size = all * scale;
  const double cap = (double)s->soft_cap;
  return cap > 0.0 ? cap * tanh(dot * scale / cap) : dot * scale;
}

/* State i = (rank, t, g) by one softmax over all that it sees. */
static void answer_of(answer *a, const node_case *c, int32_t i) {
  const node_spec *s = &c->spec;
  const int32_t each = s->q_len * s->group;
  const pkv_tree_rank *rank = &c->ranks[i / each];
  const int32_t t = i % each / s->group, g = i % s->group;
  const int64_t at = ((int64_t)rank->row * s->q_len + t) * c->params.q_token_stride +
                     (HEAD * s->group + g) * c->params.q_head_stride;
  float q[MAX_DIM];
  double logits[TOKENS], biggest = 0.0, top = -INFINITY, sum = 0.0;
  for (int32_t j = 0; j < s->head_dim; j++)
    q[j] = pkv_load(c->q, s->q_dtype, at + j);
  const int32_t position = rank->length - s->q_len + t;
  int32_t lo = s->window > 0 && position + 1 > s->window ? position + 1 - s->window : 0;
  if (lo < s->begin) lo = s->begin;
  memset(a, 0, sizeof *a);
  a->lse = -INFINITY;
  if (lo >= s->end) return;
  a->seen = s->end - lo;
  for (int32_t token = lo; token < s->end; token++) {
    double size;
    logits[token] = logit_of(&size, c, q, token);
    if (size > biggest) biggest = size;
    if (logits[token] > top) top = logits[token];
  }
  const double error = U * (s->head_dim + 8) * biggest + U * 8 * (double)s->soft_cap;
  const double each_sum = 8 * U * sqrt((double)a->seen + 64);
  for (int32_t token = lo; token < s->end; token++) {
    const double p = exp(logits[token] - top);
    const unsigned char *v = element_of(c, 1, token);
    sum += p;
    for (int32_t j = 0; j < s->head_dim; j++) {
      const double value = (double)pkv_load(v, s->kv_dtype, j);
      a->o[j] += p * value;
      a->bound[j] += p * fabs(value) * (2 * error + each_sum);
    }
  }
  for (int32_t j = 0; j < s->head_dim; j++) {
    a->o[j] /= sum;
    a->bound[j] /= sum;
  }
  a->lse = top + log(sum);
  a->bound_lse = error + each_sum + 2 * U * fabs(a->lse);
}

/* Units of m: base 2, but natural in the reference. fp8: stored values are 1 / factor too small. */
static void check_state(const states *out, const node_case *c, const pkv_cpu_isa_ops *ops,
                        int32_t i) {
  const node_spec *s = &c->spec;
  char name[256];
  answer a;
  answer_of(&a, c, i);
  const double m = (double)out->m[i], l = (double)out->l[i];
  if (a.seen == 0) {
    if (out->m[i] != -INFINITY || out->l[i] != 0.0f)
      fail_msg("%s: state %d saw nothing, m %g l %g", spec_name(s, name, sizeof name), i, m, l);
    return;
  }
  const double lse = (ops->isa == PKV_ISA_REFERENCE ? m : m * log(2.0)) + log(l);
  if (!(fabs(lse - a.lse) <= a.bound_lse))
    fail_msg("%s %s: state %d has lse %.9g, double %.9g, bound %g", pkv_isa_name(ops->isa),
             spec_name(s, name, sizeof name), i, lse, a.lse, a.bound_lse);
  const bool small = s->kv_dtype == PKV_DTYPE_FP8_E4M3 && ops->isa >= PKV_ISA_AVX2;
  for (int32_t j = 0; j < s->head_dim; j++) {
    const double o = (double)out->acc[(int64_t)i * s->head_dim + j] / l * (small ? 256.0 : 1.0);
    if (!(fabs(o - a.o[j]) <= a.bound[j]))
      fail_msg("%s %s: state %d element %d is %.9g, double %.9g, bound %g", pkv_isa_name(ops->isa),
               spec_name(s, name, sizeof name), i, j, o, a.o[j], a.bound[j]);
  }
}

/* ---------------------------------------------------------------------------------- tests */

static void random_spec(node_spec *s, pkv_rng *rng) {
  static const int32_t groups[] = {1, 2, 3, 4, 5, 8, 16};
  static const int32_t dims[] = {64, 128, 8, 24, 40, 72, 80, 96, 136, 256};
  static const int32_t page[] = {1, 16, 32, 48, 64, 128};
  static const pkv_dtype qs[] = {PKV_DTYPE_F32, PKV_DTYPE_F16, PKV_DTYPE_BF16};
  memset(s, 0, sizeof *s);
  s->seed = pkv_rng_next(rng);
  s->kv_dtype = (pkv_dtype)pkv_rng_below(rng, 4);
  s->q_dtype = qs[pkv_rng_below(rng, COUNT(qs))];
  s->group = groups[pkv_rng_below(rng, COUNT(groups))];
  s->q_len = (int32_t)pkv_rng_range(rng, 1, 2);
  s->head_dim = dims[pkv_rng_below(rng, pkv_rng_below(rng, 2) ? 2 : COUNT(dims))];
  s->page_tokens = page[pkv_rng_below(rng, COUNT(page))];
  s->ranks = (int32_t)pkv_rng_range(rng, 1, MAX_STATES / (s->group * s->q_len));
  s->begin = 64 * (int32_t)pkv_rng_range(rng, 0, 3);
  s->end = 64 * (int32_t)pkv_rng_range(rng, s->begin / 64 + 1, TOKENS / 64);
  if (pkv_rng_below(rng, 3) == 0) s->window = (int32_t)pkv_rng_range(rng, 1, 600);
  if (pkv_rng_below(rng, 4) == 0) s->soft_cap = 5.0f;
}

static void assert_states(const states *a, const states *b, const node_case *c,
                          const pkv_cpu_isa_ops *ops) {
  char name[256];
  const int32_t d = c->spec.head_dim;
  for (int32_t i = 0; i < c->states; i++) {
    if (memcmp(&a->m[i], &b->m[i], 4) != 0 || memcmp(&a->l[i], &b->l[i], 4) != 0)
      fail_msg("%s %s: state %d has m %a l %a, in its own block m %a l %a", pkv_isa_name(ops->isa),
               spec_name(&c->spec, name, sizeof name), i, (double)a->m[i], (double)a->l[i],
               (double)b->m[i], (double)b->l[i]);
    for (int32_t j = 0; j < d; j++) {
      const float *x = &a->acc[i * d + j], *y = &b->acc[i * d + j];
      if (memcmp(x, y, 4) != 0)
        fail_msg("%s %s: state %d acc[%d] is %a, in its own block %a", pkv_isa_name(ops->isa),
                 spec_name(&c->spec, name, sizeof name), i, j, (double)*x, (double)*y);
    }
  }
}

static states together, alone;

/* Every table: batch-invariant bits, and both modes against double at a few states. */
static void test_random_nodes(void **state) {
  (void)state;
  pkv_rng rng;
  pkv_rng_init(&rng, 20261130);
  int run[TABLES] = {0};
  for (int n = 0; n < NODES; n++) {
    node_spec s;
    random_spec(&s, &rng);
    for (uint32_t flags = 0; flags <= PKV_PLAN_BATCH_INVARIANT; flags++) {
      node_case c;
      s.flags = flags;
      node_case_init(&c, &s);
      for (int i = 0; i < TABLES; i++) {
        const pkv_cpu_isa_ops *ops = table_of(i);
        if (ops == NULL || (i <= 1 && n % 8 != 0)) continue; /* slow, and one path */
        void *scratch = take((ops->scratch_bytes + 63) / 64 * 64);
        memset(scratch, 0xff, ops->scratch_bytes);
        attend(&together, &c, ops, scratch, 0, s.ranks);
        for (int32_t k = 0; k < 4; k++)
          check_state(&together, &c, ops, (int32_t)((int64_t)(c.states - 1) * k / 3));
        memset(scratch, 0xff, ops->scratch_bytes);
        attend_alone(&alone, &c, ops, scratch);
        if (flags != 0) assert_states(&together, &alone, &c, ops);
        free(scratch);
        run[i]++;
      }
      node_case_deinit(&c);
    }
  }
  for (int i = 0; i < TABLES; i++)
    if (run[i] == 0) print_message("table %d is not on this machine: skipped\n", i);
}

/* Any number of states in a block, so that every kernel of the wide path has its turn. */
static void test_any_number_of_states(void **state) {
  (void)state;
  node_spec s = {.seed = 5,
                 .kv_dtype = PKV_DTYPE_F16,
                 .q_dtype = PKV_DTYPE_F32,
                 .group = 1,
                 .q_len = 1,
                 .head_dim = 64,
                 .page_tokens = 16,
                 .end = 192,
                 .flags = PKV_PLAN_BATCH_INVARIANT};
  for (s.ranks = 1; s.ranks <= MAX_STATES; s.ranks += RANKS_STEP) {
    node_case c;
    s.head_dim = s.ranks % 2 ? 64 : 40;
    node_case_init(&c, &s);
    for (int i = 2; i < TABLES; i++) {
      const pkv_cpu_isa_ops *ops = table_of(i);
      if (ops == NULL) continue;
      void *scratch = take((ops->scratch_bytes + 63) / 64 * 64);
      memset(scratch, 0xff, ops->scratch_bytes);
      attend(&together, &c, ops, scratch, 0, s.ranks);
      attend_alone(&alone, &c, ops, scratch);
      assert_states(&together, &alone, &c, ops);
      free(scratch);
    }
    node_case_deinit(&c);
  }
}

/* A NaN key or value reaches the rows that see it, and no other. */
static void test_nan_stays_where_it_is_seen(void **state) {
  (void)state;
  node_spec s = {.seed = 6,
                 .kv_dtype = PKV_DTYPE_F16,
                 .q_dtype = PKV_DTYPE_F32,
                 .ranks = 40,
                 .group = 3,
                 .q_len = 1,
                 .head_dim = 64,
                 .page_tokens = 16,
                 .window = 400,
                 .end = TOKENS};
  for (int n = 0; n < 8; n++) {
    static const int32_t tokens[] = {70, 130, 131, 447};
    const int32_t token = tokens[n % 4];
    s.flags = n % 3 == 0 ? PKV_PLAN_BATCH_INVARIANT : 0u;
    node_case c;
    node_case_init(&c, &s);
    memset(element_of(&c, n / 4, token), 0xff, 2);
    for (int i = 0; i < TABLES; i++) {
      const pkv_cpu_isa_ops *ops = table_of(i);
      if (ops == NULL) continue;
      void *scratch = take((ops->scratch_bytes + 63) / 64 * 64);
      attend(&together, &c, ops, scratch, 0, s.ranks);
      int sees = 0;
      for (int32_t k = 0; k < c.states; k++) {
        const int32_t first = c.ranks[k / s.group].length - s.window;
        const float got = n / 4 ? together.acc[k * s.head_dim] : together.l[k];
        if (token >= first && (!isnan(got) || together.m[k] == -INFINITY))
          fail_msg("%s: token %d is NaN, state %d sees it and has m %g l %g acc %g",
                   pkv_isa_name(ops->isa), token, k, (double)together.m[k], (double)together.l[k],
                   (double)together.acc[k * s.head_dim]);
        if (token < first && !isfinite(got))
          fail_msg("%s: state %d does not see token %d, which is NaN, and has %g",
                   pkv_isa_name(ops->isa), k, token, (double)got);
        sees += token >= first;
      }
      assert_in_range(sees, 1, c.states);
      free(scratch);
    }
    node_case_deinit(&c);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_nodes),
      cmocka_unit_test(test_any_number_of_states),
      cmocka_unit_test(test_nan_stays_where_it_is_seen),
  };
  return cmocka_run_group_tests_name("attend_blocks", tests, NULL, NULL);
}
