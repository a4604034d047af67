/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps captured in a CUDA graph: plan and layers captured with one set of lengths, replayed with
 * others, other tables, fewer live rows, 1 to 131,072 tokens and back, two classes of layers with a
 * window each. A replay must equal the same calls made directly, bit by bit, and the answer.
 */
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

/* One step: for each class its plan, then two layers with it. */
typedef struct step {
  gpu_case *g;
  pkv_device_plan *plan[2];
  pkv_attention_args args[2]; /* outputs of each class lie apart */
  void *out[2], *lse[2];
  int classes;
} step;

static void step_init(step *p, gpu_case *g, const pkv_plan_options *options, const int32_t *windows,
                      int classes, int32_t limit) {
  const attn_spec *s = &g->host->spec;
  memset(p, 0, sizeof *p);
  p->g = g;
  p->classes = classes;
  for (int i = 0; i < classes; i++) {
    pkv_shape shape = attn_case_shape(g->host);
    shape.window = windows[i];
    OK(pkv_device_plan_create(&p->plan[i], gpu, &shape, options, s->kv_dtype, s->rows, limit, err));
    pkv_device_plan_set_overlap(p->plan[i], 2);
    OK(pkv_device_alloc(&p->out[i], gpu, g->host->out_bytes, err));
    OK(pkv_device_alloc(&p->lse[i], gpu, g->host->lse_floats * sizeof(float), err));
    p->args[i] = g->args;
    p->args[i].out = p->out[i];
    p->args[i].lse = p->lse[i];
  }
}

static void step_deinit(step *p) {
  for (int i = 0; i < p->classes; i++) {
    pkv_device_plan_destroy(p->plan[i]);
    pkv_device_free(gpu, p->out[i]);
    pkv_device_free(gpu, p->lse[i]);
  }
}

static void step_enqueue(step *p, void *stream) {
  for (int i = 0; i < p->classes; i++)
    OK(pkv_device_plan_build(p->plan[i], p->g->host->spec.rows, p->g->seq_len, stream, err));
  for (int layer = 0; layer < 2; layer++)
    for (int i = 0; i < p->classes; i++)
      OK(pkv_device_attention(gpu, p->plan[i], &p->args[i], stream, err));
}

static gpu_graph *step_capture(step *p, void *stream) {
  gpu_capture_begin(stream);
  step_enqueue(p, stream);
  return gpu_capture_end(stream);
}

/* Outputs marked; graph or direct calls; outputs fetched to out[class], lse[class]. */
static void step_run(step *p, gpu_graph *exec, void *stream, void *out[2], void *lse[2]) {
  const size_t out_bytes = p->g->host->out_bytes,
               lse_bytes = p->g->host->lse_floats * sizeof(float);
  for (int i = 0; i < p->classes; i++) {
    gpu_fill(p->out[i], 0x5a, out_bytes);
    gpu_fill(p->lse[i], 0x5a, lse_bytes);
  }
  gpu_wait();
  if (exec != NULL)
    gpu_graph_launch(exec, stream);
  else
    step_enqueue(p, stream);
  OK(pkv_device_synchronize(gpu, stream, err));
  for (int i = 0; i < p->classes; i++) {
    gpu_copy(out[i], p->out[i], out_bytes);
    gpu_copy(lse[i], p->lse[i], lse_bytes);
  }
  OK(pkv_device_synchronize(gpu, NULL, err));
}

/* A set of lengths to replay with; rows of the table are rotated by `turn`. */
typedef struct scene {
  const char *name;
  int32_t lens[8];
  int32_t turn;
  bool answer; /* against double, too: not where that takes too long */
} scene;

static void rotate_table(attn_case *c, int32_t turn) {
  const size_t row = (size_t)c->table_stride * sizeof(int32_t);
  const int32_t rows = c->spec.rows;
  int32_t *old = malloc((size_t)rows * row);
  memcpy(old, c->table, (size_t)rows * row);
  for (int32_t r = 0; r < rows; r++)
    memcpy(c->table + r * c->table_stride, old + (r + turn) % rows * c->table_stride, row);
  free(old);
}

static void swap_rows(attn_case *c, int32_t a, int32_t b) {
  for (int64_t i = 0; i < c->table_stride; i++) {
    int32_t *const x = c->table + a * c->table_stride + i, *const y =
                                                               c->table + b * c->table_stride + i;
    const int32_t swap = *x;
    *x = *y;
    *y = swap;
  }
  attn_case_forget(c);
}

static void set_scene(gpu_case *g, const scene *x, int32_t most) {
  int32_t lens[8];
  for (int32_t r = 0; r < g->host->spec.rows; r++)
    lens[r] = x->lens[r] < most ? x->lens[r] : most;
  rotate_table(g->host, x->turn);
  attn_case_set_lengths(g->host, lens);
  gpu_case_refresh(g);
  OK(pkv_device_synchronize(gpu, NULL, err));
}

static void check_answer(gpu_case *g, const step *p, const int32_t *windows, void *out[2],
                         void *lse[2], const char *what) {
  attn_case *c = g->host;
  void *const own_out = c->out;
  float *const own_lse = c->lse;
  for (int i = 0; i < p->classes; i++) {
    c->spec.window = windows[i];
    attn_case_forget(c);
    attn_case_answer(c);
    c->out = out[i];
    c->lse = lse[i];
    attn_check(c, what);
    c->out = own_out;
    c->lse = own_lse;
  }
  c->spec.window = 0;
}

static const scene scenes[] = {
    {"all 1", {1, 1, 1, 1, 1, 1, 1, 1}, 0, true},
    {"all 131072", {131072, 131072, 131072, 131072, 131072, 131072, 131072, 131072}, 1, false},
    {"mixed", {3000, 1, 64, 700, 0, 129, 5000, 33}, 3, true},
    {"two live rows", {0, 0, 515, 0, 0, 0, 0, 2049}, 2, true},
    {"none", {0, 0, 0, 0, 0, 0, 0, 0}, 1, true},
    {"one of 131072", {1, 1, 1, 131072, 1, 1, 1, 1}, 5, false},
    {"back to few", {17, 2, 3, 1, 16, 15, 1, 64}, 0, true},
};

typedef struct matrix_case {
  pkv_dtype kv;
  uint32_t flags;
  int32_t windows[2];
  int classes, captured_at; /* index of the scene */
  int32_t most;             /* tokens of the longest row */
  int32_t parts;            /* 0: as many as the device has room for */
} matrix_case;

static void run_matrix(const matrix_case *m) {
  const int32_t rows = 8, most = gpu_opt.small ? 2000 : m->most;
  const size_t count = COUNT(scenes);
  int32_t room[8];
  void *out[2], *lse[2], *want_out[2], *want_lse[2];
  for (int32_t r = 0; r < rows; r++)
    room[r] = most; /* any row may take any other's pages */
  attn_spec s = gpu_spec(m->kv, 21, rows, room);
  s.kv_heads = 1;
  s.group = 4;
  attn_case c;
  attn_case_init(&c, &s);
  gpu_case g;
  gpu_case_init(&g, &c);
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  options.flags = m->flags;
  options.parts = m->parts;
  if (m->flags) options.parts = 33; /* its workspace grows with parts times chunks */
  step graphed, direct;
  step_init(&graphed, &g, &options, m->windows, m->classes, most);
  step_init(&direct, &g, &options, m->windows, m->classes, most);
  for (int i = 0; i < 2; i++) {
    out[i] = malloc(c.out_bytes);
    want_out[i] = malloc(c.out_bytes);
    lse[i] = malloc(c.lse_floats * sizeof(float));
    want_lse[i] = malloc(c.lse_floats * sizeof(float));
  }
  void *const stream = gpu_stream_create();
  set_scene(&g, &scenes[m->captured_at], most);
  gpu_graph *exec = step_capture(&graphed, stream);
  for (size_t i = 0; i < 2 * count; i++) {
    const scene *x = &scenes[i % count];
    char what[128];
    snprintf(what, sizeof what, "captured at %s, replay %zu: %s", scenes[m->captured_at].name, i,
             x->name);
    set_scene(&g, x, most);
    step_run(&direct, NULL, stream, want_out, want_lse);
    step_run(&graphed, exec, stream, out, lse);
    for (int k = 0; k < m->classes; k++) {
      int32_t fault = 0;
      OK(pkv_device_plan_fault(&fault, graphed.plan[k], stream, err));
      assert_int_equal(fault, -1);
      if (memcmp(out[k], want_out[k], c.out_bytes) != 0 ||
          memcmp(lse[k], want_lse[k], c.lse_floats * sizeof(float)) != 0)
        fail_msg("%s: class %d differs from direct calls", what, k);
    }
    if (x->answer && i < count) check_answer(&g, &graphed, m->windows, out, lse, what);
  }
  gpu_graph_destroy(exec);
  gpu_stream_destroy(stream);
  for (int i = 0; i < 2; i++) {
    free(out[i]);
    free(want_out[i]);
    free(lse[i]);
    free(want_lse[i]);
  }
  step_deinit(&graphed);
  step_deinit(&direct);
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

static void run_cases(const matrix_case *cases, size_t count) {
  for (size_t i = 0; i < (gpu_opt.small ? 1 : count); i++)
    run_matrix(&cases[i]);
}

/* Complaints 17 and 18. */
static void test_c17_c18_replay_with_other_lengths(void **state) {
  (void)state;
  NEED_GPU();
  enum { LONG = 131072, SHORT = 9000 };
  static const matrix_case cases[] = {
      {PKV_DTYPE_F16, 0, {0, 0}, 1, 0, LONG, 0},
      {PKV_DTYPE_F16, 0, {0, 0}, 1, 1, LONG, 0},
      {PKV_DTYPE_F16, PKV_PLAN_BATCH_INVARIANT, {0, 0}, 1, 0, LONG, 0},
      {PKV_DTYPE_F16, 0, {0, 0}, 1, 2, SHORT, 0},
      {PKV_DTYPE_F16, PKV_PLAN_BATCH_INVARIANT, {0, 0}, 1, 1, SHORT, 0},
      {PKV_DTYPE_BF16, 0, {0, 0}, 1, 4, SHORT, 0},
      {PKV_DTYPE_FP8_E4M3, 0, {0, 0}, 1, 0, SHORT, 0},
  };
  run_cases(cases, COUNT(cases));
}

/* Many segments for the parts: the kernel with a way for short pieces takes long ones too. */
static void test_c17_many_segments(void **state) {
  (void)state;
  NEED_GPU();
  static const matrix_case cases[] = {
      {PKV_DTYPE_F16, 0, {0, 0}, 1, 0, 9000, 2},
      {PKV_DTYPE_FP8_E4M3, 0, {0, 0}, 1, 2, 9000, 2},
      {PKV_DTYPE_BF16, 0, {0, 0}, 1, 6, 9000, 1},
  };
  run_cases(cases, COUNT(cases));
}

/* Complaint 17: layers with a window between layers without, a plan each in one graph. */
static void test_c17_two_windows_in_one_graph(void **state) {
  (void)state;
  NEED_GPU();
  static const matrix_case cases[] = {
      {PKV_DTYPE_F16, 0, {0, 512}, 2, 0, 20000, 0},
      {PKV_DTYPE_F16, 0, {100, 1024}, 2, 1, 9000, 0},
      {PKV_DTYPE_BF16, PKV_PLAN_BATCH_INVARIANT, {0, 300}, 2, 2, 9000, 0},
  };
  run_cases(cases, COUNT(cases));
}

/* A graph of an uploaded plan replays that plan, with other tables. */
static void test_seed_routes_replay(void **state) {
  (void)state;
  NEED_GPU();
  static const pkv_route routes[] = {PKV_ROUTE_BUCKET_EXACT, PKV_ROUTE_BUCKET_PADDED,
                                     PKV_ROUTE_SPLIT, PKV_ROUTE_WORKQUEUE};
  static const int32_t lens[] = {700, 64, 700, 0, 129};
  for (size_t k = 0; k < COUNT(routes); k++)
    for (int fused = 0; fused < 2; fused++) {
      attn_spec s = gpu_spec(PKV_DTYPE_F16, 9, (int32_t)COUNT(lens), lens);
      attn_case c;
      attn_case_init(&c, &s);
      attn_case_answer(&c);
      gpu_case g;
      gpu_case_init(&g, &c);
      pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
      options.route = routes[k];
      pkv_device_plan *plan = gpu_plan(&g, &options, 0);
      pkv_device_plan_set_fused(plan, fused);
      void *const stream = gpu_stream_create();
      gpu_wait();
      gpu_capture_begin(stream);
      OK(pkv_device_attention(gpu, plan, &g.args, stream, err));
      gpu_graph *graph = gpu_capture_end(stream);
      for (int i = 0; i < 3; i++) {
        if (i == 2) {
          swap_rows(&c, 0, 2); /* of equal length */
          attn_case_answer(&c);
          gpu_case_refresh(&g);
        }
        gpu_mark(&g, 0x5a);
        gpu_wait();
        gpu_graph_launch(graph, stream);
        OK(pkv_device_synchronize(gpu, stream, err));
        gpu_fetch(&g);
        attn_check(&c, pkv_route_name(routes[k]));
      }
      gpu_graph_destroy(graph);
      gpu_stream_destroy(stream);
      pkv_device_plan_destroy(plan);
      gpu_case_deinit(&g);
      attn_case_deinit(&c);
    }
}

int gpu_suite_graphs(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_c17_c18_replay_with_other_lengths),
      cmocka_unit_test(test_c17_many_segments),
      cmocka_unit_test(test_c17_two_windows_in_one_graph),
      cmocka_unit_test(test_seed_routes_replay),
  };
  return cmocka_run_group_tests_name("graphs", tests, gpu_setup, gpu_teardown);
}
