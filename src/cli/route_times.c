/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/route_times.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/rng.h"
#include "base/text.h"
#include "cli/bench_store.h"

#define COLD_BYTES (INT64_C(1) << 30)
#define CPU_MIB    4096
#define CPU_PARTS  16 /* balanced's default */
#define MOST_OFF   1e-4
#define MOST       16 /* repetitions */
/* Where the machine is not quiet, repetitions go on until the least time of each route has come
   SETTLED times within WITHIN; or there are MOST_MORE times as many as asked for. */
#define SETTLED   3
#define WITHIN    1.02
#define MOST_MORE 8
#define BESIDE    2.0 /* a route that takes so many times the least of all is not waited for */

typedef struct cpu_times {
  bench_store store;
  pkv_executor *executor, *oracle; /* oracle: double arithmetic, slow */
} cpu_times;

/* Memory of one batch on the CPU. */
typedef struct cpu_batch {
  float *q, *out[PKV_COST_KINDS], *exact;
  int32_t *checked; /* [rows] lengths of the rows that are compared with double arithmetic */
  int32_t *ids;
  void *plan, *workspace;
  size_t q_bytes, checked_bytes, ids_bytes, plan_bytes, workspace_bytes;
  pkv_plan_options options[PKV_COST_KINDS];
} cpu_batch;

bool route_batch_shares(const bench_batch *batch) {
  for (int32_t row = 0; row < batch->rows; row++)
    if (batch->borrowed[row] > 0) return true;
  return false;
}

double route_difference(const float *a, const float *b, int64_t count) {
  double most = 0, largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const double off = fabs((double)a[i] - (double)b[i]);
    if (!(off <= most)) most = off; /* NaN is not smaller */
    if (fabs((double)b[i]) > largest) largest = fabs((double)b[i]);
  }
  return largest > 0 ? most / largest : most;
}

void route_checked_rows(int32_t *lengths, const bench_batch *batch, int64_t budget) {
  int32_t longest = 0;
  memset(lengths, 0, (size_t)batch->rows * sizeof *lengths);
  for (int32_t row = 1; row < batch->rows; row++)
    if (batch->lengths[row] > batch->lengths[longest]) longest = row;
  lengths[longest] = batch->lengths[longest];
  for (int64_t left = budget - batch->lengths[longest]; left > 0;) {
    int32_t best = -1;
    for (int32_t row = 0; row < batch->rows; row++)
      if (lengths[row] == 0 && batch->lengths[row] > 0 &&
          (best < 0 || batch->lengths[row] < batch->lengths[best]))
        best = row;
    if (best < 0 || batch->lengths[best] > left) return;
    left -= lengths[best] = batch->lengths[best];
  }
}

double route_error(const float *out, const float *exact, const int32_t *lengths, int32_t rows,
                   int64_t a_row) {
  double most = 0, largest = 0;
  for (int64_t i = 0; i < rows * a_row; i++) {
    if (lengths[i / a_row] == 0) continue;
    const double off = fabs((double)out[i] - (double)exact[i]);
    if (!(off <= most)) most = off; /* NaN is not smaller */
    if (fabs((double)exact[i]) > largest) largest = fabs((double)exact[i]);
  }
  return largest > 0 ? most / largest : most;
}

pkv_status route_plan_options(pkv_plan_options *out, const route_times *t, int32_t kind,
                              const bench_batch *batch, pkv_error *err) {
  double unused[PKV_COST_FEATURES];
  *out = (pkv_plan_options)PKV_PLAN_OPTIONS_INIT;
  out->route = kind == PKV_COST_WORKQUEUE_FUSED ? PKV_ROUTE_WORKQUEUE : (pkv_route)kind;
  if (kind == PKV_ROUTE_BALANCED || kind == PKV_ROUTE_SHARED) return PKV_OK;
  out->splits = t->o.splits;
  if (out->splits > 0) return PKV_OK;
  return pkv_policy_features(unused, &out->splits, kind, &t->o.shape, t->o.kv_dtype, batch->rows,
                             batch->lengths, NULL, &t->profile, err);
}

pkv_status route_features(double *features, const route_times *t, int32_t kind,
                          const bench_batch *batch, const route_time *time, pkv_error *err) {
  int32_t splits;
  return pkv_policy_features(features, &splits, kind, &t->o.shape, t->o.kv_dtype, batch->rows,
                             batch->lengths, &time->stats, &t->profile, err);
}

static void cpu_batch_free(cpu_batch *b) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_free(&a, b->q, b->q_bytes);
  for (int32_t kind = 0; kind < PKV_COST_KINDS; kind++)
    pkv_free(&a, b->out[kind], b->q_bytes);
  pkv_free(&a, b->exact, b->q_bytes);
  pkv_free(&a, b->checked, b->checked_bytes);
  pkv_free(&a, b->ids, b->ids_bytes);
  pkv_free(&a, b->plan, b->plan_bytes);
  pkv_free(&a, b->workspace, b->workspace_bytes);
}

static pkv_status cpu_batch_init(cpu_batch *b, const route_times *t, const bench_batch *batch,
                                 uint32_t kinds, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const pkv_shape *s = &t->o.shape;
  int32_t longest = 0;
  memset(b, 0, sizeof *b);
  for (int32_t row = 0; row < batch->rows; row++)
    if (batch->lengths[row] > longest) longest = batch->lengths[row];
  b->workspace_bytes = 64;
  b->q_bytes = (size_t)batch->rows * (size_t)s->q_len * (size_t)s->query_heads *
               (size_t)s->head_dim * sizeof(float);
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    size_t plan, workspace;
    if ((kinds >> kind & 1u) == 0) continue;
    PKV_TRY(route_plan_options(&b->options[kind], t, kind, batch, err));
    PKV_TRY(pkv_plan_size(&plan, &workspace, s, &b->options[kind], batch->rows, longest, err));
    if (plan > b->plan_bytes) b->plan_bytes = plan;
    if (workspace > b->workspace_bytes) b->workspace_bytes = workspace;
    b->out[kind] = pkv_alloc(&a, b->q_bytes);
    PKV_CHECK(err, b->out[kind], PKV_E_NOMEM, "no memory for %d rows", batch->rows);
  }
  b->ids_bytes = (size_t)batch->rows * (size_t)batch->max_pages * sizeof(int32_t);
  b->checked_bytes = (size_t)batch->rows * sizeof(int32_t);
  b->q = pkv_alloc(&a, b->q_bytes);
  b->exact = pkv_alloc(&a, b->q_bytes);
  b->checked = pkv_alloc(&a, b->checked_bytes);
  b->ids = pkv_alloc(&a, b->ids_bytes);
  b->plan = pkv_alloc(&a, b->plan_bytes);
  b->workspace = pkv_alloc(&a, b->workspace_bytes);
  PKV_CHECK(err, b->q && b->exact && b->checked && b->ids && b->plan && b->workspace, PKV_E_NOMEM,
            "no memory for %d rows", batch->rows);
  pkv_rng rng;
  pkv_rng_init(&rng, 1);
  for (size_t i = 0; i < b->q_bytes / sizeof(float); i++)
    b->q[i] = (float)pkv_rng_normal(&rng);
  memset(b->workspace, 0xff, b->workspace_bytes);
  return PKV_OK;
}

static int64_t now_ns(const route_times *t, int32_t threads) {
  struct timespec used;
  if (!t->o.cpu_time || clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) != 0) return pkv_clock_ns();
  return ((int64_t)used.tv_sec * 1000000000 + used.tv_nsec) / threads;
}

/* One plan and one call of a kind. */
static pkv_status cpu_once(const route_times *t, cpu_batch *b, int32_t kind,
                           const bench_batch *batch, route_time *time, double *attend_us,
                           pkv_error *err) {
  cpu_times *c = t->state;
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  pkv_sharing sharing = PKV_SHARING_INIT;
  bench_store_place(b->ids, &c->store, batch);
  sharing.block_table = b->ids;
  sharing.max_pages = batch->max_pages;
  const int32_t threads = pkv_executor_threads(c->executor);
  const int64_t begin = pkv_clock_ns();
  const int64_t start = now_ns(t, 1); /* the plan is built by this thread alone */
  if (kind == PKV_ROUTE_SHARED)
    PKV_TRY(pkv_plan_build_shared(&args.plan, b->plan, b->plan_bytes, &t->o.shape,
                                  &b->options[kind], batch->rows, batch->lengths, &sharing, err));
  else
    PKV_TRY(pkv_plan_build(&args.plan, b->plan, b->plan_bytes, &t->o.shape, &b->options[kind],
                           batch->rows, batch->lengths, err));
  const double plan = (double)(now_ns(t, 1) - start) * 1e-3;
  const int64_t planned = now_ns(t, threads);
  args.cache = &c->store.cache;
  args.block_table = b->ids;
  args.max_pages = batch->max_pages;
  args.q = b->q;
  args.out = b->out[kind];
  args.workspace = b->workspace;
  args.workspace_bytes = b->workspace_bytes;
  PKV_TRY(pkv_attention_run(c->executor, &args, err));
  const double attend = (double)(now_ns(t, threads) - planned) * 1e-3;
  const double wall = (double)(pkv_clock_ns() - begin) * 1e-3;
  *attend_us = attend;
  if (!time->done || attend < time->attend_us) time->attend_us = attend;
  if (!time->done || plan < time->plan_us) time->plan_us = plan;
  if (!time->done || wall < time->wall_us) time->wall_us = wall;
  time->done = true;
  time->stats = (pkv_plan_stats)PKV_PLAN_STATS_INIT;
  return pkv_plan_get_stats(&time->stats, args.plan, t->o.kv_dtype, err);
}

/* The checked rows by the reference executor, at the storage's current place. */
static pkv_status cpu_exact(const route_times *t, cpu_batch *b, const bench_batch *batch,
                            pkv_error *err) {
  cpu_times *c = t->state;
  pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
  route_checked_rows(b->checked, batch, ROUTE_CHECKED_CPU);
  PKV_TRY(pkv_plan_build(&args.plan, b->plan, b->plan_bytes, &t->o.shape,
                         &b->options[PKV_ROUTE_BALANCED], batch->rows, b->checked, err));
  bench_store_place(b->ids, &c->store, batch);
  args.cache = &c->store.cache;
  args.block_table = b->ids;
  args.max_pages = batch->max_pages;
  args.q = b->q;
  args.out = b->exact;
  args.workspace = b->workspace;
  args.workspace_bytes = b->workspace_bytes;
  return pkv_attention_run(c->oracle, &args, err);
}

/* The same place for all, so that their outputs can be compared. */
static pkv_status cpu_check(const route_times *t, cpu_batch *b, const bench_batch *batch,
                            uint32_t kinds, pkv_error *err) {
  cpu_times *c = t->state;
  const int64_t place = c->store.shift;
  const int64_t count = (int64_t)(b->q_bytes / sizeof(float));
  PKV_TRY(cpu_exact(t, b, batch, err));
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    route_time unused = {0};
    double ignored;
    if ((kinds >> kind & 1u) == 0) continue;
    c->store.shift = place;
    PKV_TRY(cpu_once(t, b, kind, batch, &unused, &ignored, err));
  }
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    if ((kinds >> kind & 1u) == 0) continue;
    const double off = route_difference(b->out[kind], b->out[PKV_ROUTE_BALANCED], count);
    PKV_CHECK(err, off <= MOST_OFF, PKV_E_INTERNAL, "%s differs from balanced by %g, at most %g",
              pkv_cost_kind_name(kind), off, MOST_OFF);
    const double wrong =
        route_error(b->out[kind], b->exact, b->checked, batch->rows, count / batch->rows);
    PKV_CHECK(err, wrong <= MOST_OFF, PKV_E_INTERNAL, "%s is wrong by %g, at most %g",
              pkv_cost_kind_name(kind), wrong, MOST_OFF);
  }
  return PKV_OK;
}

/* The SETTLED least times of each kind, the least first; 0 = not there yet. */
typedef struct least_times {
  double us[PKV_COST_KINDS][SETTLED];
} least_times;

static void keep_least(least_times *l, int32_t kind, double us) {
  for (int32_t i = 0; i < SETTLED; i++) {
    double *at = &l->us[kind][i];
    if (*at > 0 && us >= *at) continue;
    const double next = *at;
    *at = us;
    us = next;
    if (us == 0) return;
  }
}

static bool settled(const least_times *l) {
  double best = HUGE_VAL;
  for (int32_t kind = 0; kind < PKV_COST_KINDS; kind++)
    if (l->us[kind][0] > 0 && l->us[kind][0] < best) best = l->us[kind][0];
  for (int32_t kind = 0; kind < PKV_COST_KINDS; kind++) {
    const double *us = l->us[kind];
    if (us[0] == 0 || us[0] > BESIDE * best) continue;
    if (us[SETTLED - 1] == 0 || us[SETTLED - 1] > WITHIN * us[0]) return false;
  }
  return true;
}

static pkv_status cpu_run(route_times *t, route_time *times, const bench_batch *batch,
                          pkv_error *err) {
  cpu_times *c = t->state;
  cpu_batch b;
  uint32_t kinds = t->profile.routes;
  if (!route_batch_shares(batch)) kinds &= ~(1u << PKV_ROUTE_SHARED);
  if (t->o.only != 0) kinds &= t->o.only | 1u << PKV_ROUTE_BALANCED;
  PKV_CHECK(err, batch->pages <= c->store.cache.pages, PKV_E_LIMIT,
            "%lld pages, the storage has %lld", (long long)batch->pages,
            (long long)c->store.cache.pages);
  pkv_status status = cpu_batch_init(&b, t, batch, kinds, err);
  if (status == PKV_OK) status = cpu_check(t, &b, batch, kinds, err);
  least_times least = {{{0}}};
  pkv_rng rng;
  pkv_rng_init(&rng, (uint64_t)batch->tokens);
  for (int32_t n = 0; n < t->o.repeats || (n < MOST_MORE * t->o.repeats && !settled(&least)); n++) {
    /* else each route would have places of its own, over and over */
    c->store.shift += (int64_t)pkv_rng_below(&rng, (uint64_t)batch->pages + 1);
    c->store.shift %= c->store.cache.pages;
    for (int32_t i = 0; i < PKV_COST_KINDS && status == PKV_OK; i++) {
      const int32_t kind = (i + n) % PKV_COST_KINDS;
      double attend = 0;
      if ((kinds >> kind & 1u) == 0) continue;
      status = cpu_once(t, &b, kind, batch, &times[kind], &attend, err);
      keep_least(&least, kind, attend);
    }
  }
  cpu_batch_free(&b);
  return status;
}

static void cpu_close(route_times *t) {
  const pkv_allocator a = pkv_allocator_default();
  cpu_times *c = t->state;
  if (c == NULL) return;
  pkv_executor_destroy(c->executor);
  pkv_executor_destroy(c->oracle);
  bench_store_deinit(&c->store);
  pkv_free(&a, c, sizeof *c);
}

static const route_times_ops cpu_ops = {cpu_close, cpu_run};

static pkv_status open_cpu(route_times *out, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const route_times_options *o = &out->o;
  const int64_t page_bytes = 2 * (int64_t)o->shape.kv_heads * o->shape.head_dim *
                             o->shape.page_tokens * (int64_t)pkv_dtype_bytes(o->kv_dtype);
  const int64_t limit = ((int64_t)(o->memory_mib > 0 ? o->memory_mib : CPU_MIB) << 20) / page_bytes;
  int64_t pages = o->most_tokens / o->shape.page_tokens + 4096 + COLD_BYTES / page_bytes;
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  bench_run run;
  cpu_times *c = pkv_alloc_zeroed(&a, 1, sizeof *c);
  PKV_CHECK(err, c, PKV_E_NOMEM, "no memory for the measurement");
  out->state = c;
  out->ops = &cpu_ops;
  options.threads = o->threads;
  PKV_TRY(pkv_executor_create(&c->executor, &options, err));
  options.isa = PKV_ISA_REFERENCE;
  PKV_TRY(pkv_executor_create(&c->oracle, &options, err));
  bench_run_describe(&run, pkv_isa_name(pkv_executor_isa(c->executor)));
  (void)snprintf(out->device, sizeof out->device, "%s", run.device);
  (void)snprintf(out->driver, sizeof out->driver, "%s", run.driver);
  out->profile.sms = pkv_executor_threads(c->executor);
  out->profile.min_ctas = 1;
  out->profile.routes = 0x7eu; /* bucket_exact .. shared */
  out->bare.parts = CPU_PARTS;
  (void)snprintf(out->no_flashinfer, sizeof out->no_flashinfer, "FlashInfer has no CPU kernels");
  if (pages > limit) pages = limit;
  PKV_CHECK(err, pages >= 1, PKV_E_TOO_SMALL, "--memory does not hold a page of %lld bytes",
            (long long)page_bytes);
  return bench_store_init(&c->store, &o->shape, o->kv_dtype, PKV_LAYOUT_HND, pages, false, 1, err);
}

pkv_status route_times_open(route_times *out, const route_times_options *options, pkv_error *err) {
  memset(out, 0, sizeof *out);
  out->o = *options;
  if (out->o.repeats > MOST) out->o.repeats = MOST;
  out->profile = (pkv_profile)PKV_PROFILE_INIT;
  out->bare.struct_size = sizeof out->bare;
  out->profile.model = &out->bare;
  return options->device == PKV_DEVICE_CUDA ? route_times_open_device(out, err)
                                            : open_cpu(out, err);
}

void route_times_close(route_times *t) {
  if (t->ops) t->ops->close(t);
  memset(t, 0, sizeof *t);
}

pkv_status route_times_run(route_times *t, route_time *times, const bench_batch *batch,
                           pkv_error *err) {
  memset(times, 0, PKV_COST_KINDS * sizeof *times);
  return t->ops->run(t, times, batch, err);
}

pkv_status route_csv_open(FILE **out, const char *path, const route_times *t, const void *options,
                          const char *head, pkv_error *err) {
  pkv_buffer command;
  *out = NULL;
  pkv_buffer_init(&command, (size_t)1 << 20, NULL);
  pkv_status status =
      pkv_options_text(&command, t->o.cli->command, options, "csv,commit,flashinfer,profile", err);
  if (status == PKV_OK && (*out = fopen(path, "we")) == NULL)
    status = PKV_FAIL(err, PKV_E_IO, "%s: %s", path, strerror(errno));
  if (status == PKV_OK) {
    (void)fprintf(*out, "# command: pkv %s", command.data);
    for (int i = 0; i < t->o.cli->operand_count; i++)
      (void)fprintf(*out, " %s", t->o.cli->operands[i]);
    (void)fputc('\n', *out);
    if (t->no_flashinfer[0] == '\0') (void)fprintf(*out, "# flashinfer %s\n", t->flashinfer);
    (void)fprintf(*out, "%s\n", head);
  }
  pkv_buffer_deinit(&command);
  return status;
}
