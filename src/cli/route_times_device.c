/* SPDX-License-Identifier: Apache-2.0 */
/* route_times on a GPU: sections of one graph, as in bench_device.c. */
#include "cli/route_times_device.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"

#define WARMUPS      1
#define MOST_CALLS   24 /* layers of a section */
#define PLAN_CALLS   8
#define EVENT_LAYERS 32   /* of a step */
#define MOST         16   /* repetitions */
#define MOST_OFF     6e-3 /* from double: outputs are f16, states f32 */

typedef struct device_route {
  bool in; /* takes this batch */
  pkv_plan_options options;
  pkv_device_plan *plan;
  pkv_flashinfer *flashinfer;
  void *host_plan; /* of the seed's routes; shared: for its counters */
  size_t host_bytes;
} device_route;

typedef struct device_times {
  pkv_meter *meter;
  const pkv_flashinfer_api *flashinfer; /* or NULL */
  bench_device_pool pool;
  bench_options fake;
  bench_frame frame;
  bench_device_batch d;
  device_route route[PKV_COST_KINDS];
  void *out; /* host copy */
  float *values[2];
  float *exact; /* worked out in double */
  double *answer;
  int32_t *checked; /* [rows] lengths of rows that are compared with double arithmetic */
  size_t out_bytes, value_bytes;
} device_times;

typedef struct section_work {
  route_times *t;
  int32_t kind;
  bool plan;
} section_work;

static bool plans_on_device(int32_t kind) {
  return kind == PKV_ROUTE_BALANCED || kind == PKV_ROUTE_SHARED;
}

static bool is_flashinfer(int32_t kind) {
  return kind == PKV_ROUTE_FLASHINFER || kind == PKV_COST_FLASHINFER_CORES;
}

static pkv_status make_plan(route_times *t, int32_t kind, pkv_error *err) {
  device_times *g = t->state;
  device_route *r = &g->route[kind];
  const bench_batch *batch = g->d.batch;
  const pkv_plan *plan;
  if (is_flashinfer(kind)) {
    const char *why =
        g->flashinfer->plan(r->flashinfer, batch->rows, batch->lengths, g->meter->stream);
    PKV_CHECK(err, why == NULL, PKV_E_DEVICE, "%s: plan: %s", pkv_cost_kind_name(kind), why);
    return PKV_OK;
  }
  if (kind == PKV_ROUTE_BALANCED)
    return pkv_device_plan_build(r->plan, batch->rows, g->d.seq_len, g->meter->stream, err);
  if (kind == PKV_ROUTE_SHARED) {
    pkv_sharing sharing = PKV_SHARING_INIT;
    sharing.block_table = g->d.table;
    sharing.max_pages = batch->max_pages;
    return pkv_device_plan_build_shared(r->plan, batch->rows, g->d.seq_len, &sharing,
                                        g->meter->stream, err);
  }
  PKV_TRY(pkv_plan_build(&plan, r->host_plan, r->host_bytes, &t->o.shape, &r->options, batch->rows,
                         batch->lengths, err));
  return pkv_device_plan_upload(r->plan, plan, g->meter->stream, err);
}

static pkv_status attend(route_times *t, int32_t kind, int32_t layer, bool overlap,
                         pkv_error *err) {
  device_times *g = t->state;
  const pkv_cache cache = bench_device_batch_cache(&g->d, layer);
  const pkv_attention_args args = bench_device_batch_args(&g->d, &cache);
  if (is_flashinfer(kind)) {
    const pkv_flashinfer_call call = {.q = args.q,
                                      .out = args.out,
                                      .k = cache.k,
                                      .v = cache.v,
                                      .page_stride = cache.k_page_stride,
                                      .token_stride = cache.k_token_stride,
                                      .head_stride = cache.k_head_stride,
                                      .scale = 1.0f / sqrtf((float)cache.head_dim)};
    const char *why = g->flashinfer->run(g->route[kind].flashinfer, &call, g->meter->stream);
    PKV_CHECK(err, why == NULL, PKV_E_DEVICE, "%s: %s", pkv_cost_kind_name(kind), why);
    return PKV_OK;
  }
  pkv_device_plan_set_overlap(g->route[kind].plan, overlap);
  pkv_device_plan_set_fused(g->route[kind].plan, kind == PKV_COST_WORKQUEUE_FUSED);
  return pkv_device_attention(g->meter->executor, g->route[kind].plan, &args, g->meter->stream,
                              err);
}

static pkv_status do_work(void *ctx, int32_t call, pkv_error *err) {
  const section_work *w = ctx;
  const device_times *g = w->t->state;
  if (w->plan) return make_plan(w->t, w->kind, err);
  return attend(w->t, w->kind, call % g->d.layers, call > 0, err);
}

/* Its list of pages is made once, and not timed. */
static pkv_status open_flashinfer(route_times *t, int32_t kind, pkv_error *err) {
  device_times *g = t->state;
  device_route *r = &g->route[kind];
  const bench_batch *b = g->d.batch;
  const int32_t tokens = t->o.shape.page_tokens;
  pkv_flashinfer_shape shape = {.tensor_cores = kind == PKV_ROUTE_FLASHINFER,
                                .query_heads = t->o.shape.query_heads,
                                .kv_heads = t->o.shape.kv_heads,
                                .head_dim = t->o.shape.head_dim,
                                .page_tokens = tokens,
                                .most_rows = b->rows};
  for (int32_t row = 0; row < b->rows; row++)
    shape.most_pages += (b->lengths[row] + tokens - 1) / tokens;
  const char *why = g->flashinfer->create(&r->flashinfer, &shape);
  r->in = why == NULL; /* else: no kernel for the shape, or no memory */
  if (!r->in) return PKV_OK;
  PKV_TRY(make_plan(t, kind, err));
  why = g->flashinfer->list(r->flashinfer, g->d.table, b->max_pages, g->d.first.pages,
                            g->meter->stream);
  PKV_CHECK(err, why == NULL, PKV_E_DEVICE, "%s: %s", pkv_cost_kind_name(kind), why);
  return PKV_OK;
}

/* The plan of one kind and, by the host, its counters. in = false where the kind refuses. */
static pkv_status open_route(route_times *t, int32_t kind, route_time *time, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  device_times *g = t->state;
  device_route *r = &g->route[kind];
  const bench_batch *batch = g->d.batch;
  const pkv_plan *plan;
  size_t workspace;
  if (is_flashinfer(kind)) return open_flashinfer(t, kind, err);
  PKV_TRY(route_plan_options(&r->options, t, kind, batch, err));
  pkv_error why = {PKV_OK, NULL, {0}};
  const pkv_status made =
      pkv_device_plan_create(&r->plan, g->meter->executor, &t->o.shape, &r->options, t->o.kv_dtype,
                             batch->rows, g->d.longest, &why);
  if (made == PKV_E_UNSUPPORTED || made == PKV_E_NOMEM || made == PKV_E_RANGE) return PKV_OK;
  PKV_CHECK(err, made == PKV_OK, made, "%s: %s", pkv_cost_kind_name(kind), why.text);
  if (kind == PKV_ROUTE_BALANCED) r->options.parts = t->bare.parts; /* the device's own choice */
  PKV_TRY(pkv_plan_size(&r->host_bytes, &workspace, &t->o.shape, &r->options, batch->rows,
                        g->d.longest, err));
  r->host_plan = pkv_alloc(&a, r->host_bytes);
  PKV_CHECK(err, r->host_plan, PKV_E_NOMEM, "no memory for a plan of %zu bytes", r->host_bytes);
  time->stats = (pkv_plan_stats)PKV_PLAN_STATS_INIT;
  pkv_sharing sharing = PKV_SHARING_INIT;
  sharing.block_table = batch->ids;
  sharing.max_pages = batch->max_pages;
  if (kind == PKV_ROUTE_SHARED)
    PKV_TRY(pkv_plan_build_shared(&plan, r->host_plan, r->host_bytes, &t->o.shape, &r->options,
                                  batch->rows, batch->lengths, &sharing, err));
  else
    PKV_TRY(pkv_plan_build(&plan, r->host_plan, r->host_bytes, &t->o.shape, &r->options,
                           batch->rows, batch->lengths, err));
  PKV_TRY(pkv_plan_get_stats(&time->stats, plan, t->o.kv_dtype, err));
  if (kind == PKV_COST_WORKQUEUE_FUSED) time->stats.launches = 1;
  PKV_TRY(make_plan(t, kind, err));
  r->in = true;
  return PKV_OK;
}

/* The output of layer 0 by `kind` into values[which]. */
static pkv_status answer(route_times *t, int32_t kind, int32_t which, pkv_error *err) {
  device_times *g = t->state;
  pkv_meter *m = g->meter;
  PKV_TRY(m->ops->set(m, g->d.out, 0xff, g->d.q_bytes, err));
  if (!is_flashinfer(kind)) PKV_TRY(m->ops->poison(m, g->route[kind].plan, err));
  PKV_TRY(attend(t, kind, 0, false, err));
  PKV_TRY(pkv_device_copy(m->executor, g->out, g->d.out, g->d.q_bytes, m->stream, err));
  PKV_TRY(pkv_device_synchronize(m->executor, m->stream, err));
  const int64_t count = (int64_t)(g->d.q_bytes / pkv_dtype_bytes(g->d.q_dtype));
  for (int64_t i = 0; i < count; i++)
    g->values[which][i] = pkv_load(g->out, g->d.q_dtype, i);
  return PKV_OK;
}

static pkv_status check(route_times *t, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  device_times *g = t->state;
  const int64_t count = (int64_t)(g->d.q_bytes / pkv_dtype_bytes(g->d.q_dtype));
  g->out_bytes = g->d.q_bytes;
  g->value_bytes = (size_t)count * sizeof(float);
  g->out = pkv_alloc(&a, g->out_bytes);
  for (int32_t i = 0; i < 2; i++)
    g->values[i] = pkv_alloc(&a, g->value_bytes);
  g->exact = pkv_alloc(&a, g->value_bytes);
  g->answer = pkv_alloc(&a, 2 * g->value_bytes);
  g->checked = pkv_alloc(&a, (size_t)g->d.batch->rows * sizeof(int32_t));
  PKV_CHECK(err, g->out && g->values[0] && g->values[1] && g->exact && g->answer && g->checked,
            PKV_E_NOMEM, "no memory for outputs");
  PKV_CHECK(err, g->route[PKV_ROUTE_BALANCED].in, PKV_E_UNSUPPORTED,
            "balanced takes no such batch");
  const pkv_cache cache = bench_device_batch_cache(&g->d, 0);
  const int32_t rows = g->d.batch->rows;
  route_checked_rows(g->checked, g->d.batch, ROUTE_CHECKED);
  PKV_TRY(g->meter->ops->answer(g->meter, g->answer, &cache, &g->d.view, g->checked, g->d.q,
                                g->d.q_dtype, err));
  for (int64_t i = 0; i < count; i++)
    g->exact[i] = (float)g->answer[i];
  PKV_TRY(answer(t, PKV_ROUTE_BALANCED, 0, err));
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    if (!g->route[kind].in) continue;
    PKV_TRY(answer(t, kind, 1, err));
    const double off = route_difference(g->values[1], g->values[0], count);
    PKV_CHECK(err, off <= MOST_OFF, PKV_E_INTERNAL, "%s differs from balanced by %g, at most %g",
              pkv_cost_kind_name(kind), off, MOST_OFF);
    const double wrong = route_error(g->values[1], g->exact, g->checked, rows, count / rows);
    PKV_CHECK(err, wrong <= MOST_OFF, PKV_E_INTERNAL, "%s is wrong by %g, at most %g",
              pkv_cost_kind_name(kind), wrong, MOST_OFF);
  }
  return PKV_OK;
}

/* Plans made by the host: build and upload, waited for. */
static pkv_status host_plan_us(double *median, route_times *t, int32_t kind, pkv_error *err) {
  device_times *g = t->state;
  double us[MOST];
  for (int32_t n = -1; n < t->o.repeats; n++) {
    const int64_t start = pkv_clock_ns();
    PKV_TRY(make_plan(t, kind, err));
    PKV_TRY(pkv_device_synchronize(g->meter->executor, g->meter->stream, err));
    if (n >= 0) us[n] = (double)(pkv_clock_ns() - start) * 1e-3;
  }
  *median = bench_median(us, t->o.repeats);
  return PKV_OK;
}

/* From nothing to the output of one layer: plan, attention, waited for. Kinds in turn. */
static pkv_status walls(route_times *t, route_time *times, pkv_error *err) {
  device_times *g = t->state;
  double us[PKV_COST_KINDS][MOST];
  for (int32_t n = -1; n < t->o.repeats; n++)
    for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
      if (!g->route[kind].in) continue;
      const int64_t start = pkv_clock_ns();
      PKV_TRY(make_plan(t, kind, err));
      PKV_TRY(attend(t, kind, (n + 1) % g->d.layers, false, err));
      PKV_TRY(pkv_device_synchronize(g->meter->executor, g->meter->stream, err));
      if (n >= 0) us[kind][n] = (double)(pkv_clock_ns() - start) * 1e-3;
    }
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++)
    if (g->route[kind].in) times[kind].wall_us = bench_median(us[kind], t->o.repeats);
  return PKV_OK;
}

/* Plan and EVENT_LAYERS layers, enqueued by the host between two events; a layer of them. */
static pkv_status do_step(void *ctx, int32_t call, pkv_error *err) {
  const section_work *w = ctx;
  const device_times *g = w->t->state;
  if (call == 0) PKV_TRY(make_plan(w->t, w->kind, err));
  return attend(w->t, w->kind, call % g->d.layers, call > 0, err);
}

static pkv_status event_us(double *median, route_times *t, int32_t kind, pkv_error *err) {
  device_times *g = t->state;
  double us[MOST];
  section_work work = {t, kind, false};
  const pkv_meter_section section = {do_step, &work, EVENT_LAYERS};
  PKV_TRY(g->meter->ops->events(g->meter, us, &section, WARMUPS, t->o.repeats, err));
  *median = bench_median(us, t->o.repeats) / EVENT_LAYERS;
  return PKV_OK;
}

static pkv_status time_all(route_times *t, route_time *times, pkv_error *err) {
  device_times *g = t->state;
  pkv_meter_section section[2 * PKV_COST_KINDS];
  section_work work[2 * PKV_COST_KINDS];
  double us[2 * PKV_COST_KINDS * MOST];
  int32_t count = 0;
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++)
    for (int32_t plan = 0; plan < 2; plan++) {
      if (!g->route[kind].in || (plan && !plans_on_device(kind))) continue;
      const int32_t layers = g->d.layers < MOST_CALLS ? g->d.layers : MOST_CALLS;
      work[count] = (section_work){t, kind, plan != 0};
      section[count] = (pkv_meter_section){do_work, &work[count], plan ? PLAN_CALLS : layers};
      count++;
    }
  PKV_TRY(g->meter->ops->graph(g->meter, us, section, count, 0, WARMUPS, t->o.repeats, err));
  for (int32_t i = 0; i < count; i++) {
    route_time *time = &times[work[i].kind];
    const double median =
        bench_median(us + (int64_t)i * t->o.repeats, t->o.repeats) / section[i].calls;
    if (work[i].plan)
      time->plan_us = median;
    else
      time->attend_us = median;
    time->done = true;
  }
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++)
    if (g->route[kind].in && !plans_on_device(kind))
      PKV_TRY(host_plan_us(&times[kind].plan_us, t, kind, err));
  for (int32_t kind = 1; kind < PKV_COST_KINDS && t->o.events; kind++)
    if (g->route[kind].in) PKV_TRY(event_us(&times[kind].event_us, t, kind, err));
  return walls(t, times, err);
}

static void close_batch(device_times *g) {
  const pkv_allocator a = pkv_allocator_default();
  for (int32_t kind = 0; kind < PKV_COST_KINDS; kind++) {
    device_route *r = &g->route[kind];
    pkv_device_plan_destroy(r->plan);
    if (r->flashinfer) g->flashinfer->destroy(r->flashinfer);
    pkv_free(&a, r->host_plan, r->host_bytes);
    memset(r, 0, sizeof *r);
  }
  pkv_free(&a, g->out, g->out_bytes);
  for (int32_t i = 0; i < 2; i++) {
    pkv_free(&a, g->values[i], g->value_bytes);
    g->values[i] = NULL;
  }
  pkv_free(&a, g->exact, g->value_bytes);
  pkv_free(&a, g->answer, 2 * g->value_bytes);
  pkv_free(&a, g->checked, g->d.batch ? (size_t)g->d.batch->rows * sizeof(int32_t) : 0);
  g->out = NULL;
  g->exact = NULL;
  g->answer = NULL;
  g->checked = NULL;
  bench_device_batch_deinit(&g->d);
}

static pkv_status device_run(route_times *t, route_time *times, const bench_batch *batch,
                             pkv_error *err) {
  device_times *g = t->state;
  uint32_t kinds = t->profile.routes;
  if (!route_batch_shares(batch)) kinds &= ~(1u << PKV_ROUTE_SHARED);
  if (kinds >> PKV_ROUTE_WORKQUEUE & 1u) kinds |= 1u << PKV_COST_WORKQUEUE_FUSED;
  if (g->flashinfer) kinds |= 1u << PKV_ROUTE_FLASHINFER | 1u << PKV_COST_FLASHINFER_CORES;
  if (t->o.only != 0) kinds &= t->o.only | 1u << PKV_ROUTE_BALANCED;
  pkv_status status = bench_device_batch_init(&g->d, g->meter, &g->pool, &g->frame, batch, err);
  for (int32_t kind = 1; kind < PKV_COST_KINDS && status == PKV_OK; kind++)
    if (kinds >> kind & 1u) status = open_route(t, kind, &times[kind], err);
  if (status == PKV_OK) status = check(t, err);
  if (status == PKV_OK) status = time_all(t, times, err);
  close_batch(g);
  return status;
}

static void device_close(route_times *t) {
  const pkv_allocator a = pkv_allocator_default();
  device_times *g = t->state;
  if (g == NULL) return;
  if (g->meter) pkv_device_free(g->meter->executor, g->pool.memory);
  pkv_meter_destroy(g->meter);
  pkv_free(&a, g, sizeof *g);
}

static const route_times_ops device_ops = {device_close, device_run};

static void find_flashinfer(route_times *out, device_times *g) {
  pkv_error why = {PKV_OK, NULL, {0}};
  const pkv_shape *s = &out->o.shape;
  if (out->o.kv_dtype != PKV_DTYPE_F16 || s->head_dim != 128 || s->q_len != 1 || s->window != 0)
    (void)snprintf(out->no_flashinfer, sizeof out->no_flashinfer,
                   "its kernels are built for f16, head_dim 128 and one query token");
  else if (pkv_flashinfer_open(&g->flashinfer, out->o.flashinfer, &why) != PKV_OK)
    (void)snprintf(out->no_flashinfer, sizeof out->no_flashinfer, "%s", why.text);
  else {
    (void)snprintf(out->flashinfer, sizeof out->flashinfer, "%s", g->flashinfer->version);
    out->profile.routes |= 1u << PKV_ROUTE_FLASHINFER;
  }
}

pkv_status route_times_open_device(route_times *out, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_error why = {PKV_OK, NULL, {0}};
  device_times *g = pkv_alloc_zeroed(&a, 1, sizeof *g);
  PKV_CHECK(err, g, PKV_E_NOMEM, "no memory for the measurement");
  out->state = g;
  out->ops = &device_ops;
  const pkv_status status = pkv_meter_create(&g->meter, &why);
  PKV_CHECK(err, status == PKV_OK, status, "no CUDA device to measure: %s", why.text);
  const pkv_meter_info *info = &g->meter->info;
  (void)snprintf(out->device, sizeof out->device, "%s", info->device);
  (void)snprintf(out->driver, sizeof out->driver, "%s", info->driver);
  g->pool.limit =
      out->o.memory_mib > 0 ? (int64_t)out->o.memory_mib << 20 : info->free_bytes / 4 * 3;
  g->fake.dtype = (int32_t)out->o.kv_dtype;
  g->fake.seed = 1;
  g->frame = (bench_frame){.cli = out->o.cli, .o = &g->fake, .shape = out->o.shape};
  PKV_TRY(
      pkv_device_parts(&out->bare.parts, g->meter->executor, &out->o.shape, out->o.kv_dtype, err));
  out->profile.sms = info->multiprocessors;
  out->profile.min_ctas = out->bare.parts / info->multiprocessors;
  if (out->profile.min_ctas < 1) out->profile.min_ctas = 1;
  out->profile.routes = 0x7eu;
  find_flashinfer(out, g);
  return PKV_OK;
}

route_times_device route_times_device_of(route_times *t) {
  device_times *g = t->state;
  return (route_times_device){g->meter, g->flashinfer, &g->pool, &g->frame};
}
