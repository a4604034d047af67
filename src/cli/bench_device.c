/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv bench attention --device cuda`. For each batch: every route's output is checked (all rows
 * against the answer in double, then needles page after page; pages that no row owns, page tails
 * and workspaces hold NaN); only then it is timed.
 *
 * What is timed, one layer of several with caches of their own:
 *   gpu     a layer in a replayed graph of all layers; launches may overlap the one before
 *   wait    the same, no launch overlaps the one before
 *   plan    `balanced` and `shared`: (plan and layer) - wait in the same graph. Others: host clock
 *           of building and uploading
 *   null    the null read in the same graph, the fastest of four; pages that rows share once
 *   event   layers enqueued by the host, between two events
 *   wall    plan and one layer, called from here, and waited for
 *   launch  plan and one layer in a graph, launched and waited for
 *   step    plan and 32 layers: in the graph, by the host's clock where it plans
 */
#include "cli/bench_attention.h"

#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "cli/bench_device_batch.h"
#include "pkv/router.h"

#define REPEATS       25
#define WARMUPS       3
#define STEP_LAYERS   32
#define MOST_GRAPHS   64 /* of one layer each */
#define ROUTES        9
#define NEEDLE_SCORE  40.0
#define NULL_READS    2 /* with few blocks a multiprocessor, and with many */
#define READ_START_US 5.2
#define READ_BYTES_US 4.63e6 /* an H200: a cold read of N bytes takes START + N / BYTES_US */
#define FLOPS_US      600e6  /* and what its tensor cores can be had to do of shared pages */

static const int32_t null_waves[NULL_READS] = {4, 16};

typedef struct bench_contender {
  const char *name;
  pkv_route route;
  int32_t fused;
  int32_t kind; /* of FlashInfer's two; 0 = one of ours */
  bool out;     /* of this cell: its output is wrong, or it does not fit */
  pkv_plan_options options;
  pkv_device_plan *plan;
  pkv_router *router; /* flashinfer: instead of a plan */
  void *host_plan;
  size_t host_bytes;
  pkv_plan_stats stats;
  bench_result result;
} bench_contender;

typedef struct bench_device {
  bench_frame *frame;
  pkv_meter *meter;
  bench_device_pool pool;
  bench_device_batch d;
  bench_contender contender[ROUTES];
  const pkv_flashinfer_api *flashinfer; /* where its route is asked for */
  int32_t contenders, repeats;
  int32_t wrong; /* outputs of the whole run */
  double *expected;
  size_t expected_bytes;
} bench_device;

/* A section of the graph: a contender's layers in one of several ways, or a null read. */
typedef enum bench_way { WAY_GPU, WAY_WAIT, WAY_PLANNED, WAY_STEP, WAY_NULL } bench_way;

typedef struct bench_work {
  bench_device *b;
  bench_contender *c;
  bench_way way;
  int32_t waves;
} bench_work;

static bool plans_on_device(const bench_contender *c) {
  return c->route == PKV_ROUTE_BALANCED || c->route == PKV_ROUTE_SHARED;
}

/* --- one call -------------------------------------------------------------------------------- */

static pkv_status call(bench_device *b, const bench_contender *c, const pkv_attention_args *args,
                       int32_t overlap, pkv_error *err) {
  if (c->router) return pkv_router_attention(c->router, args, b->meter->stream, err);
  pkv_device_plan_set_overlap(c->plan, overlap);
  return pkv_device_attention(b->meter->executor, c->plan, args, b->meter->stream, err);
}

static pkv_status attend(bench_device *b, const bench_contender *c, int32_t layer, bool overlap,
                         pkv_error *err) {
  const pkv_cache cache = bench_device_batch_cache(&b->d, layer);
  const pkv_attention_args args = bench_device_batch_args(&b->d, &cache);
  return call(b, c, &args, overlap ? 2 : 0, err);
}

/* On the device, or here and then uploaded. */
static pkv_status make_plan(bench_device *b, const bench_contender *c, pkv_error *err) {
  const pkv_plan *plan;
  const bench_batch *batch = b->d.batch;
  pkv_choice choice = PKV_CHOICE_INIT;
  if (c->router)
    return pkv_router_plan(&choice, c->router, batch->rows, batch->lengths, b->d.seq_len,
                           b->meter->stream, err);
  if (c->route == PKV_ROUTE_SHARED) {
    pkv_sharing sharing = PKV_SHARING_INIT;
    sharing.flags = b->frame->o->chained ? PKV_TABLE_CHAINED : 0u;
    sharing.block_table = b->d.table;
    sharing.max_pages = batch->max_pages;
    return pkv_device_plan_build_shared(c->plan, batch->rows, b->d.seq_len, &sharing,
                                        b->meter->stream, err);
  }
  if (plans_on_device(c))
    return pkv_device_plan_build(c->plan, batch->rows, b->d.seq_len, b->meter->stream, err);
  PKV_TRY(pkv_plan_build(&plan, c->host_plan, c->host_bytes, &b->frame->shape, &c->options,
                         batch->rows, batch->lengths, err));
  return pkv_device_plan_upload(c->plan, plan, b->meter->stream, err);
}

static pkv_status do_work(void *ctx, int32_t call, pkv_error *err) {
  const bench_work *w = ctx;
  bench_device *b = w->b;
  const int32_t layer = call % b->d.layers;
  if (w->way == WAY_NULL) {
    const pkv_cache cache = bench_device_batch_cache(&b->d, layer);
    return b->meter->ops->null_read(b->meter, &cache, &b->d.view, w->waves, err);
  }
  if (w->way == WAY_PLANNED || (w->way == WAY_STEP && call == 0)) PKV_TRY(make_plan(b, w->c, err));
  const bool overlap = call > 0 && (w->way == WAY_GPU || w->way == WAY_STEP);
  return attend(b, w->c, layer, overlap, err);
}

/* --- checks ---------------------------------------------------------------------------------- */

static double most_error(const bench_device *b) {
  return b->d.q_dtype == PKV_DTYPE_BF16 ? 8e-3 : 1e-3;
}

static void tell_wrong(bench_device *b, bench_contender *c, const char *cell, const char *what,
                       double error, double most) {
  c->out = true;
  b->wrong++;
  pkv_cli_error(b->frame->cli, "%s on %s is wrong: %s %g, at most %g; not timed", c->name, cell,
                what, error, most);
}

/* Marks the output and the workspace, then runs layer 0. */
static pkv_status run_marked(bench_device *b, const bench_contender *c, const void *q,
                             pkv_error *err) {
  pkv_meter *m = b->meter;
  const pkv_cache cache = bench_device_batch_cache(&b->d, 0);
  pkv_attention_args args = bench_device_batch_args(&b->d, &cache);
  args.q = q;
  PKV_TRY(m->ops->set(m, b->d.out, 0xff, b->d.q_bytes, err));
  if (c->plan) PKV_TRY(m->ops->poison(m, c->plan, err));
  return call(b, c, &args, 0, err);
}

/* Relative l2 errors against b->expected: of everything, and of the worst row. */
static void compare(double *all, double *worst, const bench_device *b, const void *out) {
  const int64_t rows = b->d.batch->rows;
  const int64_t a_row = (int64_t)(b->d.q_bytes / pkv_dtype_bytes(b->d.q_dtype)) / rows;
  double off = 0, norm = 0;
  *worst = 0;
  for (int64_t row = 0; row < rows; row++) {
    double row_off = 0, row_norm = 0;
    for (int64_t i = row * a_row; i < (row + 1) * a_row; i++) {
      const double d = (double)pkv_load(out, b->d.q_dtype, i) - b->expected[i];
      row_off += d * d;
      row_norm += b->expected[i] * b->expected[i];
    }
    const double error = row_norm > 0 ? sqrt(row_off / row_norm) : sqrt(row_off);
    if (!(error <= *worst)) *worst = error; /* NaN is not smaller */
    off += row_off;
    norm += row_norm;
  }
  *all = norm > 0 ? sqrt(off / norm) : sqrt(off);
}

static pkv_status check_answer(bench_device *b, const char *cell, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_meter *m = b->meter;
  const pkv_cache cache = bench_device_batch_cache(&b->d, 0);
  void *out = pkv_alloc(&a, b->d.q_bytes);
  b->expected_bytes = b->d.q_bytes / pkv_dtype_bytes(b->d.q_dtype) * sizeof(double);
  b->expected = pkv_alloc(&a, b->expected_bytes);
  pkv_status status = PKV_OK;
  if (out == NULL || b->expected == NULL)
    status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for %zu bytes of answers", b->expected_bytes);
  if (status == PKV_OK)
    status = m->ops->answer(m, b->expected, &cache, &b->d.view, b->d.batch->lengths, b->d.q,
                            b->d.q_dtype, err);
  for (int32_t i = 0; i < b->contenders && status == PKV_OK; i++) {
    bench_contender *c = &b->contender[i];
    double all = 0, worst = 0;
    int32_t fault = -1;
    if (c->out) continue;
    status = run_marked(b, c, b->d.q, err);
    if (status == PKV_OK)
      status = pkv_device_copy(m->executor, out, b->d.out, b->d.q_bytes, m->stream, err);
    if (status == PKV_OK) status = pkv_device_synchronize(m->executor, m->stream, err);
    if (status == PKV_OK && c->plan)
      status = pkv_device_plan_fault(&fault, c->plan, m->stream, err);
    if (status != PKV_OK) break;
    compare(&all, &worst, b, out);
    if (!(all <= c->result.error)) c->result.error = all;
    if (!(all <= most_error(b)))
      tell_wrong(b, c, cell, "error", all, most_error(b));
    else if (!(worst <= 2 * most_error(b)))
      tell_wrong(b, c, cell, "error of one row", worst, 2 * most_error(b));
    else if (fault >= 0)
      tell_wrong(b, c, cell, "faults up to row", fault, -1);
  }
  pkv_free(&a, out, b->d.q_bytes);
  pkv_free(&a, b->expected, b->expected_bytes);
  b->expected = NULL;
  return status;
}

/* One key of huge score in a page of each row, page after page: the output is its V. */
static pkv_status check_needles(bench_device *b, const char *cell, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_meter *m = b->meter;
  const pkv_shape *shape = &b->frame->shape;
  const pkv_cache cache = bench_device_batch_cache(&b->d, 0);
  const double most = b->d.q_dtype == PKV_DTYPE_BF16 ? 0.1 : 0.02;
  const float value = (float)(NEEDLE_SCORE / sqrt((double)shape->head_dim));
  const size_t bytes = (size_t)b->d.batch->rows * sizeof(int32_t);
  const int32_t asked = b->frame->o->needles, pages = b->d.batch->max_pages;
  const int32_t rounds = asked < pages ? asked : pages;
  int32_t *position = pkv_alloc(&a, bytes);
  PKV_CHECK(err, position, PKV_E_NOMEM, "no memory for %zu bytes", bytes);
  pkv_status status = PKV_OK;
  for (int32_t round = 0; round < rounds && status == PKV_OK; round++) {
    bench_needle_positions(position, &b->d, shape, round, rounds);
    status = m->ops->needle(m, &cache, &b->d.view, position, value, b->d.seed, err);
    for (int32_t i = 0; i < b->contenders && status == PKV_OK; i++) {
      bench_contender *c = &b->contender[i];
      float error = 0.0f;
      if (c->out) continue;
      status = run_marked(b, c, b->d.needle_q, err);
      if (status == PKV_OK)
        status = m->ops->needle_error(m, &error, &cache, &b->d.view, position, b->d.out,
                                      b->d.q_dtype, err);
      if (status == PKV_OK && !((double)error <= most))
        tell_wrong(b, c, cell, "needle missed by", (double)error, most);
    }
    if (status == PKV_OK)
      status = m->ops->needle(m, &cache, &b->d.view, position, 0.0f, b->d.seed, err);
  }
  pkv_free(&a, position, bytes);
  return status;
}

/* --- time ------------------------------------------------------------------------------------ */

/* What is timed of the batch at hand: sections of the graph and whose they are. */
typedef struct bench_sections {
  pkv_meter_section section[2 * NULL_READS + 4 * ROUTES];
  bench_work work[2 * NULL_READS + 4 * ROUTES];
  int32_t count;
} bench_sections;

static void add_section(bench_sections *s, bench_device *b, bench_contender *c, bench_way way,
                        int32_t waves) {
  bench_work *work = &s->work[s->count];
  *work = (bench_work){b, c, way, waves};
  s->section[s->count++] =
      (pkv_meter_section){do_work, work, way == WAY_STEP ? STEP_LAYERS : b->d.layers};
}

static void list_sections(bench_sections *s, bench_device *b) {
  s->count = 0;
  for (int32_t i = 0; i < NULL_READS; i++)
    add_section(s, b, NULL, WAY_NULL, null_waves[i]);
  for (int32_t i = 0; i < b->contenders; i++) {
    bench_contender *c = &b->contender[i];
    if (c->out) continue;
    add_section(s, b, c, WAY_GPU, 0);
    if (!plans_on_device(c)) continue;
    add_section(s, b, c, WAY_WAIT, 0);
    add_section(s, b, c, WAY_PLANNED, 0);
    add_section(s, b, c, WAY_STEP, 0);
  }
  for (int32_t i = 0; i < NULL_READS; i++)
    add_section(s, b, NULL, WAY_NULL, null_waves[i]);
}

/* Keeps the repetitions, returns their median. */
static pkv_status take(double *median, bench_contender *c, const char *name, double *us,
                       int32_t repeats, double calls, pkv_error *err) {
  PKV_TRY(bench_result_raw(&c->result, name, us, repeats, calls, err));
  *median = bench_median(us, repeats) / calls;
  return PKV_OK;
}

/* The fastest null read of this graph, its repetitions into every result. */
static pkv_status take_null(double *best, bench_device *b, const bench_sections *s, double *us,
                            pkv_error *err) {
  int32_t at = -1;
  *best = -1;
  for (int32_t i = 0; i < s->count; i++) {
    double sorted[BENCH_MAX_REPEATS];
    if (s->work[i].way != WAY_NULL) continue;
    memcpy(sorted, us + (int64_t)i * b->repeats, (size_t)b->repeats * sizeof *sorted);
    const double median = bench_median(sorted, b->repeats) / s->section[i].calls;
    if (at < 0 || median < *best) {
      *best = median;
      at = i;
    }
  }
  for (int32_t i = 0; i < b->contenders; i++)
    if (!b->contender[i].out)
      PKV_TRY(bench_result_raw(&b->contender[i].result, "null", us + (int64_t)at * b->repeats,
                               b->repeats, s->section[at].calls, err));
  return PKV_OK;
}

/* Everything in one graph. */
static pkv_status measure_graph(bench_device *b, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  bench_sections s;
  list_sections(&s, b);
  const size_t bytes = (size_t)s.count * (size_t)b->repeats * sizeof(double);
  double *us = pkv_alloc(&a, bytes), null_us = 0;
  PKV_CHECK(err, us, PKV_E_NOMEM, "no memory for %zu bytes of times", bytes);
  pkv_status status = b->meter->ops->graph(b->meter, us, s.section, s.count,
                                           b->frame->o->graphs != 0, WARMUPS, b->repeats, err);
  if (status == PKV_OK) status = take_null(&null_us, b, &s, us, err);
  double wait = 0;
  for (int32_t i = 0; i < s.count && status == PKV_OK; i++) {
    static const char *const names[] = {"gpu", "wait", "planned", "step"};
    bench_contender *c = s.work[i].c;
    const bench_way way = s.work[i].way;
    double median = 0;
    if (way == WAY_NULL) continue;
    status = take(&median, c, names[way], us + (int64_t)i * b->repeats, b->repeats,
                  way == WAY_STEP ? 1.0 : s.section[i].calls, err);
    if (way == WAY_GPU) {
      c->result.attend_us += median;
      c->result.null_us += null_us;
    }
    if (way == WAY_WAIT) c->result.wait_us += (wait = median);
    if (way == WAY_PLANNED) c->result.plan_us += median - wait;
    if (way == WAY_STEP) c->result.step_us += median;
  }
  pkv_free(&a, us, bytes);
  return status;
}

/* Host clock of plan and `layers` layers, waited for; 0: the plan alone. */
static pkv_status host_times(double *us, bench_device *b, const bench_contender *c, int32_t layers,
                             pkv_error *err) {
  pkv_meter *m = b->meter;
  int32_t layer = 0;
  for (int32_t i = -WARMUPS; i < b->repeats; i++) {
    PKV_TRY(pkv_device_synchronize(m->executor, m->stream, err));
    const int64_t start = pkv_clock_ns();
    PKV_TRY(make_plan(b, c, err));
    for (int32_t n = 0; n < layers; n++)
      PKV_TRY(attend(b, c, layer++ % b->d.layers, n > 0, err));
    PKV_TRY(pkv_device_synchronize(m->executor, m->stream, err));
    if (i >= 0) us[i] = (double)(pkv_clock_ns() - start) * 1e-3;
  }
  return PKV_OK;
}

static pkv_status measure_host(bench_device *b, bench_contender *c, pkv_error *err) {
  pkv_meter *m = b->meter;
  bench_work gpu = {b, c, WAY_GPU, 0}, planned = {b, c, WAY_PLANNED, 0};
  const pkv_meter_section layers = {do_work, &gpu, b->d.layers};
  const int32_t graphs = b->d.layers < MOST_GRAPHS ? b->d.layers : MOST_GRAPHS;
  const pkv_meter_section plans = {do_work, &planned, graphs};
  double us[BENCH_MAX_REPEATS], median;
  PKV_TRY(m->ops->events(m, us, &layers, WARMUPS, b->repeats, err));
  PKV_TRY(take(&median, c, "event", us, b->repeats, b->d.layers, err));
  c->result.event_us += median;
  PKV_TRY(host_times(us, b, c, 1, err));
  PKV_TRY(take(&median, c, "wall", us, b->repeats, 1.0, err));
  c->result.wall_us += median;
  if (plans_on_device(c)) {
    PKV_TRY(m->ops->launches(m, us, &plans, WARMUPS, b->repeats, err));
    PKV_TRY(take(&median, c, "launch", us, b->repeats, 1.0, err));
    c->result.launch_us += median;
    return PKV_OK;
  }
  PKV_TRY(host_times(us, b, c, 0, err));
  PKV_TRY(take(&median, c, "plan", us, b->repeats, 1.0, err));
  c->result.plan_us += median;
  PKV_TRY(host_times(us, b, c, STEP_LAYERS, err));
  PKV_TRY(take(&median, c, "step", us, b->repeats, 1.0, err));
  c->result.step_us += median;
  return PKV_OK;
}

/* --- batches --------------------------------------------------------------------------------- */

static void drop_plans(bench_device *b) {
  const pkv_allocator a = pkv_allocator_default();
  for (int32_t i = 0; i < b->contenders; i++) {
    bench_contender *c = &b->contender[i];
    pkv_device_plan_destroy(c->plan);
    pkv_router_destroy(c->router);
    pkv_free(&a, c->host_plan, c->host_bytes);
    c->plan = NULL;
    c->router = NULL;
    c->host_plan = NULL;
  }
}

/* Launches and tasks are those of the model of its planner (profile.h). */
static pkv_status open_flashinfer(bench_device *b, bench_contender *c, pkv_error *err) {
  const bench_batch *batch = b->d.batch;
  const pkv_shape *shape = &b->frame->shape;
  const pkv_dtype dtype = b->d.first.dtype;
  pkv_router_options o = PKV_ROUTER_OPTIONS_INIT;
  pkv_profile profile = PKV_PROFILE_INIT;
  double features[PKV_COST_FEATURES];
  int32_t splits;
  o.fixed = PKV_ROUTE_FLASHINFER;
  o.routes = 1u << PKV_ROUTE_FLASHINFER;
  o.flashinfer = b->flashinfer;
  o.flashinfer_kind = c->kind;
  PKV_TRY(pkv_router_create(&c->router, b->meter->executor, shape, &o, dtype, batch->rows,
                            b->d.longest, err));
  const char *why = pkv_router_no_flashinfer(c->router);
  PKV_CHECK(err, why == NULL, PKV_E_UNSUPPORTED, "%s", why);
  for (int32_t row = 0; row < batch->rows; row++)
    PKV_CHECK(err, batch->lengths[row] > 0, PKV_E_UNSUPPORTED, "row %d is empty", row);
  profile.sms = b->meter->info.multiprocessors;
  PKV_TRY(pkv_policy_features(features, &splits, c->kind, shape, dtype, batch->rows, batch->lengths,
                              NULL, &profile, err));
  c->stats = (pkv_plan_stats)PKV_PLAN_STATS_INIT;
  c->stats.launches = (int32_t)features[PKV_COST_LAUNCHES] + 1;
  c->stats.tasks = (int64_t)(features[PKV_COST_TASKS] * 1e3 + 0.5);
  c->stats.merge_state_bytes = (int64_t)(features[PKV_COST_STATES] * 1e6 + 0.5);
  c->stats.useful_kv_bytes = b->d.useful_bytes;
  PKV_TRY(make_plan(b, c, err));
  return attend(b, c, 0, false, err); /* lists the pages */
}

/* The plan that the device makes, and its counters from a copy of it. */
static pkv_status plan_there(bench_device *b, bench_contender *c, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  PKV_TRY(make_plan(b, c, err));
  pkv_status status =
      pkv_device_plan_download(NULL, 0, &c->host_bytes, c->plan, b->meter->stream, err);
  PKV_CHECK(err, status == PKV_E_TOO_SMALL, PKV_E_INTERNAL, "a plan of no bytes");
  c->host_plan = pkv_alloc(&a, c->host_bytes);
  PKV_CHECK(err, c->host_plan, PKV_E_NOMEM, "no memory for a plan of %zu bytes", c->host_bytes);
  PKV_TRY(pkv_device_plan_download(c->host_plan, c->host_bytes, &c->host_bytes, c->plan,
                                   b->meter->stream, err));
  c->stats = (pkv_plan_stats)PKV_PLAN_STATS_INIT;
  return pkv_plan_get_stats(&c->stats, c->host_plan, b->d.first.dtype, err);
}

/* The plan that is made here and uploaded, and its counters. */
static pkv_status plan_here(bench_device *b, bench_contender *c, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const bench_batch *batch = b->d.batch;
  const pkv_shape *shape = &b->frame->shape;
  const pkv_plan *plan;
  size_t workspace;
  PKV_TRY(pkv_plan_size(&c->host_bytes, &workspace, shape, &c->options, batch->rows, b->d.longest,
                        err));
  c->host_plan = pkv_alloc(&a, c->host_bytes);
  PKV_CHECK(err, c->host_plan, PKV_E_NOMEM, "no memory for a plan of %zu bytes", c->host_bytes);
  PKV_TRY(pkv_plan_build(&plan, c->host_plan, c->host_bytes, shape, &c->options, batch->rows,
                         batch->lengths, err));
  c->stats = (pkv_plan_stats)PKV_PLAN_STATS_INIT;
  PKV_TRY(pkv_plan_get_stats(&c->stats, plan, b->d.first.dtype, err));
  return make_plan(b, c, err);
}

static pkv_status open_plan(bench_device *b, bench_contender *c, pkv_error *err) {
  if (c->kind > 0) return open_flashinfer(b, c, err);
  c->options = bench_plan_options(b->frame->o, c->route);
  PKV_TRY(pkv_device_plan_create(&c->plan, b->meter->executor, &b->frame->shape, &c->options,
                                 b->d.first.dtype, b->d.batch->rows, b->d.longest, err));
  pkv_device_plan_set_fused(c->plan, c->fused);
  return plans_on_device(c) ? plan_there(b, c, err) : plan_here(b, c, err);
}

static double larger(double a, double b) {
  return a > b ? a : b;
}

static void add_counters(const bench_device *b, bench_contender *c) {
  bench_result *r = &c->result;
  const bool shared = c->route == PKV_ROUTE_SHARED;
  const double bytes = (double)(shared ? c->stats.unique_kv_bytes : c->stats.useful_kv_bytes);
  const bool h200 = strstr(b->meter->info.device, "H200") != NULL;
  r->rows += b->d.batch->rows;
  r->launches += c->stats.launches;
  r->tasks += (double)c->stats.tasks;
  r->ctas_sm += (double)c->stats.tasks / b->meter->info.multiprocessors;
  r->kv_bytes += bytes;
  r->padded_bytes += (double)c->stats.padded_kv_bytes;
  r->state_bytes += (double)c->stats.merge_state_bytes;
  if (shared) {
    r->total_bytes += (double)c->stats.total_kv_bytes;
    r->nodes += (double)c->stats.nodes;
    r->tile_fill += c->stats.tile_fill;
  }
  r->floor_us = h200 ? r->floor_us + READ_START_US + bytes / READ_BYTES_US : -1;
  if (h200 && b->d.shared_flops > 0)
    r->limit_us += READ_START_US +
                   larger((double)b->d.unique_bytes / READ_BYTES_US, b->d.shared_flops / FLOPS_US);
}

/* Too large a cell, or one that this device or a route refuses, does not end the run. */
static bool passes_over(pkv_status status) {
  return status == PKV_E_LIMIT || status == PKV_E_NOMEM || status == PKV_E_UNSUPPORTED ||
         status == PKV_E_RANGE;
}

static pkv_status run_batch(bench_device *b, const char *cell, const bench_batch *batch,
                            pkv_error *err) {
  int32_t parts;
  pkv_status status = bench_device_batch_init(&b->d, b->meter, &b->pool, b->frame, batch, err);
  /* also where no route plans on the device: it makes the kernels ready */
  if (status == PKV_OK)
    status = pkv_device_parts(&parts, b->meter->executor, &b->frame->shape, b->d.first.dtype, err);
  for (int32_t i = 0; i < b->contenders && status == PKV_OK; i++) {
    bench_contender *c = &b->contender[i];
    if (c->out) continue;
    status = open_plan(b, c, err);
    if (passes_over(status)) {
      pkv_cli_error(b->frame->cli, "%s on %s skipped: %s", c->name, cell, err->text);
      c->out = true;
      status = PKV_OK;
    }
  }
  if (status == PKV_OK && b->frame->o->check_tokens > 0) {
    status = check_answer(b, cell, err);
    if (status == PKV_OK) status = check_needles(b, cell, err);
  }
  if (status == PKV_OK) status = measure_graph(b, err);
  for (int32_t i = 0; i < b->contenders && status == PKV_OK; i++) {
    if (b->contender[i].out) continue;
    status = measure_host(b, &b->contender[i], err);
    add_counters(b, &b->contender[i]);
  }
  if (status == PKV_OK && pkv_cli_interrupted()) status = PKV_FAIL(err, PKV_E_STATE, "interrupted");
  drop_plans(b);
  bench_device_batch_deinit(&b->d);
  return status;
}

static pkv_status report(bench_device *b, const bench_cell *cell, pkv_error *err) {
  double balanced_us = 0;
  for (int32_t i = 0; i < b->contenders; i++) {
    bench_result *r = &b->contender[i].result;
    double *const sums[] = {&r->rows,      &r->launches, &r->tasks,        &r->plan_us,
                            &r->attend_us, &r->null_us,  &r->wall_us,      &r->floor_us,
                            &r->wait_us,   &r->event_us, &r->launch_us,    &r->step_us,
                            &r->ctas_sm,   &r->kv_bytes, &r->padded_bytes, &r->state_bytes,
                            &r->limit_us,  &r->nodes,    &r->tile_fill,    &r->total_bytes};
    for (size_t n = 0; n < sizeof sums / sizeof *sums; n++)
      if (*sums[n] > 0) *sums[n] /= cell->count;
    if (!plans_on_device(&b->contender[i])) r->wait_us = r->launch_us = -1;
    if (b->contender[i].route == PKV_ROUTE_BALANCED && !b->contender[i].out)
      balanced_us = r->attend_us;
    if (b->contender[i].route == PKV_ROUTE_SHARED) r->balanced_us = balanced_us;
    if (!b->contender[i].out) PKV_TRY(bench_report(b->frame, r, err));
  }
  return PKV_OK;
}

static pkv_status run_cell(bench_device *b, const bench_cell *cell, pkv_error *err) {
  pkv_status status = PKV_OK;
  for (int32_t i = 0; i < b->contenders; i++) {
    b->contender[i].out = b->contender[i].route == PKV_ROUTE_SHARED &&
                          b->frame->o->route == BENCH_ROUTE_ALL && !bench_cell_shares(cell);
    bench_result_init(&b->contender[i].result, cell->name, b->contender[i].name);
    b->contender[i].result.peers = cell->peers;
  }
  for (int32_t step = 0; step < cell->count && status == PKV_OK; step++)
    status = run_batch(b, cell->name, &cell->batches[step], err);
  if (status == PKV_OK) status = report(b, cell, err);
  for (int32_t i = 0; i < b->contenders; i++)
    bench_result_deinit(&b->contender[i].result);
  return status;
}

static pkv_status run_cells(bench_device *b, pkv_error *err) {
  for (int32_t i = 0; i < b->frame->cells; i++) {
    bench_cell cell;
    pkv_status status = bench_cell_make(&cell, &b->frame->cell_options, i, err);
    if (status == PKV_OK) {
      status = run_cell(b, &cell, err);
      if (passes_over(status)) {
        pkv_cli_error(b->frame->cli, "%s skipped: %s", cell.name, err->text);
        b->frame->skipped++;
        status = PKV_OK;
      }
    }
    bench_cell_free(&cell);
    PKV_TRY(status);
  }
  PKV_CHECK(err, b->wrong == 0, PKV_E_INTERNAL, "%d outputs are wrong", b->wrong);
  return PKV_OK;
}

static void list_contenders(bench_device *b) {
  static const struct {
    const char *name;
    pkv_route route;
    int32_t fused, kind, choice;
  } all[ROUTES] = {
      {"bucket_exact", PKV_ROUTE_BUCKET_EXACT, 0, 0, PKV_ROUTE_BUCKET_EXACT},
      {"bucket_padded", PKV_ROUTE_BUCKET_PADDED, 0, 0, PKV_ROUTE_BUCKET_PADDED},
      {"split", PKV_ROUTE_SPLIT, 0, 0, PKV_ROUTE_SPLIT},
      {"workqueue", PKV_ROUTE_WORKQUEUE, 0, 0, PKV_ROUTE_WORKQUEUE},
      {"workqueue_fused", PKV_ROUTE_WORKQUEUE, 1, 0, BENCH_WORKQUEUE_FUSED},
      {"balanced", PKV_ROUTE_BALANCED, 0, 0, PKV_ROUTE_BALANCED},
      {"shared", PKV_ROUTE_SHARED, 0, 0, PKV_ROUTE_SHARED},
      {"flashinfer", PKV_ROUTE_FLASHINFER, 0, PKV_ROUTE_FLASHINFER, BENCH_FLASHINFER},
      {"flashinfer_cores", PKV_ROUTE_FLASHINFER, 0, PKV_COST_FLASHINFER_CORES,
       BENCH_FLASHINFER_CORES},
  };
  const int32_t chosen = b->frame->o->route;
  for (int32_t i = 0; i < ROUTES; i++) {
    const bool beside = chosen == PKV_ROUTE_SHARED && all[i].choice == PKV_ROUTE_BALANCED;
    if (chosen == BENCH_ROUTE_ALL ? all[i].kind > 0 : chosen != all[i].choice && !beside) continue;
    bench_contender *c = &b->contender[b->contenders++];
    memset(c, 0, sizeof *c);
    c->name = all[i].name;
    c->route = all[i].route;
    c->fused = all[i].fused;
    c->kind = all[i].kind;
  }
}

pkv_status bench_device_run(bench_frame *frame, pkv_error *err) {
  bench_device b;
  pkv_error why = {PKV_OK, NULL, {0}};
  memset(&b, 0, sizeof b);
  b.frame = frame;
  b.repeats = frame->o->repeats > 0 ? frame->o->repeats : REPEATS;
  if (frame->o->route >= BENCH_FLASHINFER)
    PKV_TRY(pkv_flashinfer_open(&b.flashinfer, frame->o->flashinfer, err));
  pkv_status status = pkv_meter_create(&b.meter, &why);
  PKV_CHECK(err, status == PKV_OK, status, "no CUDA device to measure: %s", why.text);
  bench_run_describe_device(&frame->run, b.meter->info.device, b.meter->info.driver);
  b.pool.limit = frame->o->memory_mib > 0 ? (int64_t)frame->o->memory_mib << 20
                                          : b.meter->info.free_bytes / 4 * 3;
  list_contenders(&b);
  if (!frame->o->json) bench_device_head(&frame->run);
  status = run_cells(&b, err);
  pkv_device_free(b.meter->executor, b.pool.memory);
  pkv_meter_destroy(b.meter);
  return status;
}
