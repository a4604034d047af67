/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv bench paper persistentkv`: the tables of the seed's paper, measured here, each published
 * figure beside ours. Five clocks for each ratio: the attention alone, with the plan of one layer,
 * with the plan's share when it serves all layers of a step, event time of a step that the host
 * enqueues, and synchronized wall time of plan and one layer (what the seed published). Planning
 * counts on both sides.
 */
#include "cli/commands.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/policy_batches.h"
#include "cli/route_times.h"

#define SEEDS PKV_TRACE_HELD_OUT_SEEDS

static const char *const device_choices[] = {"cpu", "cuda", NULL};

typedef struct paper_options {
  int32_t device, threads, steps, seeds, divide, repeats, memory_mib, layers, cpu_time;
  const char *flashinfer, *csv, *commit;
} paper_options;

#define O paper_options
static const pkv_option options_table[] = {
    PKV_CHOICE(O, device, 0, "device", device_choices, "cpu", "where to measure"),
    PKV_INT(O, threads, 't', "threads", "N", "0", 0, 1024, "CPU threads; 0 = all cores"),
    PKV_INT(O, steps, 0, "steps", "N", "2", 1, 48, "steps of each trace, evenly spread"),
    PKV_INT(O, seeds, 0, "seeds", "N", "5", 1, SEEDS, "held-out seeds, from 20260623 on"),
    PKV_INT(O, divide, 0, "divide", "N", "0", 0, 1024,
            "divide every length by this; 0 = 32, GPU 1"),
    PKV_INT(O, repeats, 0, "repeats", "N", "0", 0, 16, "repetitions; 0 = 3, GPU 5"),
    PKV_INT(O, layers, 0, "layers", "N", "32", 1, 1024, "layers that one plan serves"),
    PKV_INT(O, memory_mib, 0, "memory", "MIB", "0", 0, 1 << 20,
            "for K and V; 0 = 4096, GPU three quarters of what is free"),
    PKV_FLAG(O, cpu_time, 0, "cpu-time",
             "CPU time over threads instead of the clock, for a busy machine"),
    PKV_TEXT(O, flashinfer, 0, "flashinfer", "FILE", NULL,
             "FlashInfer's kernels (GPU); default: pkv_flashinfer.so beside the program"),
    PKV_TEXT(O, csv, 0, "csv", "FILE", NULL, "write a row for each seed, trace and route"),
    PKV_TEXT(O, commit, 0, "commit", "TEXT", "unknown", "commit to name in the CSV"),
};
#undef O

/* The seed's policies as contenders, behind the kinds: its thresholds (v1), its roofline with its
   own constants (v2). */
enum { V1 = PKV_COST_KINDS, V2, CONTENDERS };
static const char *const policy_names[] = {"v1 policy", "v2 policy"};

static const char *contender_name(int32_t c) {
  return c < PKV_COST_KINDS ? pkv_cost_kind_name(c) : policy_names[c - PKV_COST_KINDS];
}

/* A trace of the paper and what it published for it: wall time of FlashInfer 0.2.5 over its own,
   one seed (v1) and mean and deviation over five (v2); 0 = none. */
typedef struct paper_trace {
  const char *name;
  pkv_trace_kind kind;
  int32_t active, requests, route;
  double v1, v2, v2_spread;
} paper_trace;

static const paper_trace traces[] = {
    {"B1 bucketed", PKV_TRACE_BUCKETED, 1, 16, PKV_ROUTE_SPLIT, 1.399, 1.403, 0.065},
    {"B4 bimodal", PKV_TRACE_BIMODAL, 4, 16, PKV_ROUTE_WORKQUEUE, 1.0, 0, 0},
    {"B8 bimodal", PKV_TRACE_BIMODAL, 8, 24, PKV_ROUTE_WORKQUEUE, 1.265, 1.080, 0.050},
    {"B8 uniform", PKV_TRACE_UNIFORM, 8, 24, PKV_ROUTE_WORKQUEUE, 1.082, 1.044, 0.022},
    {"B8 zipf", PKV_TRACE_ZIPF, 8, 24, PKV_ROUTE_WORKQUEUE, 1.063, 1.068, 0.028},
};
#define TRACES ((int32_t)(sizeof traces / sizeof *traces))

#define BIT(kind)   (1u << (unsigned)(kind))
#define FLASH_KINDS (BIT(PKV_ROUTE_FLASHINFER) | BIT(PKV_COST_FLASHINFER_CORES))
/* What the paper's policies may take, and what they are compared with. */
#define RATIO_KINDS                                                                                \
  (FLASH_KINDS | BIT(PKV_ROUTE_SPLIT) | BIT(PKV_ROUTE_WORKQUEUE) | BIT(PKV_COST_WORKQUEUE_FUSED))
#define CLOCKS       5
#define PAPER_STEPS  48 /* of a trace with 4 or 8 rows, the first ones */
#define SINGLE_STEPS 64 /* with one row */

/* Means of one seed over the steps. */
typedef struct paper_means {
  bool done[CONTENDERS];
  double attend[CONTENDERS], plan[CONTENDERS], wall[CONTENDERS], event[CONTENDERS];
  double launches[CONTENDERS], state_mib[CONTENDERS], useful_mib;
} paper_means;

typedef struct paper {
  const pkv_cli *cli;
  const paper_options *o;
  route_times times;
  int32_t divide;
  FILE *csv;
} paper;

/* splits 0: by the second policy's rules. Opened anew for another number of heads only. */
static pkv_status open_times(paper *p, int32_t query_heads, int32_t splits, uint32_t only,
                             pkv_error *err) {
  if (p->times.ops && p->times.o.shape.query_heads == query_heads) {
    p->times.o.splits = splits;
    p->times.o.only = only;
    return PKV_OK;
  }
  route_times_close(&p->times);
  const paper_options *o = p->o;
  const bool cuda = o->device == PKV_DEVICE_CUDA;
  route_times_options t = {.cli = p->cli,
                           .device = o->device,
                           .threads = o->threads,
                           .repeats = o->repeats > 0 ? o->repeats
                                      : cuda         ? 5
                                                     : 3,
                           .memory_mib = o->memory_mib,
                           .most_tokens = 8 * 65536 / p->divide,
                           .shape = PKV_SHAPE_INIT,
                           .kv_dtype = PKV_DTYPE_F16,
                           .cpu_time = o->cpu_time != 0,
                           .splits = splits,
                           .events = cuda,
                           .only = only,
                           .flashinfer = o->flashinfer};
  t.shape.query_heads = query_heads;
  t.shape.kv_heads = 8;
  t.shape.head_dim = 128;
  return route_times_open(&p->times, &t, err);
}

static void add(paper_means *out, int32_t at, const route_time *time, int32_t steps) {
  out->done[at] = time->done;
  out->attend[at] += time->attend_us / steps;
  out->plan[at] += time->plan_us / steps;
  out->wall[at] += time->wall_us / steps;
  out->event[at] += time->event_us / steps;
  out->launches[at] += (double)time->stats.launches / steps;
  out->state_mib[at] += (double)time->stats.merge_state_bytes / 1048576.0 / steps;
}

/* What the seed's policies take of a batch, with the splits that they name; of flashinfer's two the
   faster one. */
static pkv_status add_policies(paper_means *out, paper *p, const bench_batch *batch,
                               const route_time *times, int32_t steps, pkv_error *err) {
  static const pkv_policy policy[] = {PKV_POLICY_STATIC, PKV_POLICY_ROOFLINE};
  const uint32_t only = p->times.o.only;
  pkv_profile seed = PKV_PROFILE_INIT;
  seed.routes = p->times.profile.routes;
  for (int32_t i = 0; i < CONTENDERS - V1; i++) {
    pkv_choice c = PKV_CHOICE_INIT;
    route_time own[PKV_COST_KINDS];
    PKV_TRY(pkv_policy_choose(&c, policy[i], PKV_ROUTE_AUTO, &p->times.o.shape, PKV_DTYPE_F16,
                              batch->rows, batch->lengths, &seed, err));
    const route_time *time = &times[c.route], *cores = &times[PKV_COST_FLASHINFER_CORES];
    if (policy[i] == PKV_POLICY_STATIC && c.splits > 0) { /* not those of the rules */
      p->times.o.splits = c.splits;
      p->times.o.only = BIT(c.route);
      const pkv_status status = route_times_run(&p->times, own, batch, err);
      p->times.o.splits = 0;
      p->times.o.only = only;
      PKV_TRY(status);
      time = &own[c.route];
    }
    if (c.route == PKV_ROUTE_FLASHINFER && cores->done && cores->attend_us < time->attend_us)
      time = cores;
    add(out, V1 + i, time, steps);
  }
  return PKV_OK;
}

static void write_means(const paper *p, const paper_means *m, const char *table,
                        const paper_trace *trace, int32_t seed) {
  if (p->csv == NULL) return;
  for (int32_t at = 1; at < CONTENDERS; at++)
    if (m->done[at])
      (void)fprintf(p->csv,
                    "%s,\"%s\",\"%s\",%s,%s,%u,%d,%d,%d,%s,%.3f,%.3f,%.3f,%.3f,%.2f,%.4f,%.3f\n",
                    p->o->commit, p->times.device, p->times.driver, table, trace->name,
                    PKV_TRACE_SEED_HELD_OUT + (unsigned)seed, trace->active,
                    p->times.o.shape.query_heads / p->times.o.shape.kv_heads, p->times.o.splits,
                    contender_name(at), m->attend[at], m->plan[at], m->wall[at], m->event[at],
                    m->launches[at], m->state_mib[at], m->useful_mib);
}

/* `steps` of a trace with one seed; means over them, which also go into the CSV under `table`. */
static pkv_status run_seed(paper_means *out, paper *p, const char *table, const paper_trace *trace,
                           int32_t seed, int32_t steps, pkv_error *err) {
  const policy_trace t = {.kind = trace->kind,
                          .active = trace->active,
                          .requests = trace->requests,
                          .most_steps = trace->active > 1 ? PAPER_STEPS : SINGLE_STEPS,
                          .page_tokens = 16,
                          .divide = p->divide,
                          .seed = PKV_TRACE_SEED_HELD_OUT + (uint64_t)seed};
  memset(out, 0, sizeof *out);
  for (int32_t step = 0; step < steps; step++) {
    route_time times[PKV_COST_KINDS];
    bench_cell cell;
    pkv_status status = policy_trace_batch(&cell, &t, step, steps, err);
    if (status == PKV_OK) status = route_times_run(&p->times, times, cell.batches, err);
    if (status == PKV_OK && (p->times.o.only & RATIO_KINDS) == RATIO_KINDS)
      status = add_policies(out, p, cell.batches, times, steps, err);
    bench_cell_free(&cell);
    PKV_TRY(status);
    for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
      const route_time *time = &times[kind];
      add(out, kind, time, steps);
      if (kind == PKV_ROUTE_BALANCED)
        out->useful_mib += (double)time->stats.useful_kv_bytes / 1048576.0 / steps;
    }
    if (pkv_cli_interrupted()) return PKV_FAIL(err, PKV_E_STATE, "interrupted");
  }
  write_means(p, out, table, trace, seed);
  return PKV_OK;
}

/* The clocks, in the order of the table. */
static double clock_of(const paper_means *m, int32_t at, int32_t clock, int32_t layers) {
  const double by_clock[CLOCKS] = {m->attend[at], m->attend[at] + m->plan[at],
                                   m->attend[at] + m->plan[at] / layers, m->event[at], m->wall[at]};
  return by_clock[clock];
}

/* The better of FlashInfer's two by the clock at hand; where it is not here, exact buckets. */
static double rival(const paper_means *m, int32_t clock, int32_t layers) {
  double best = HUGE_VAL;
  for (int32_t kind = PKV_ROUTE_FLASHINFER; kind <= PKV_COST_FLASHINFER_CORES; kind++)
    if (m->done[kind] && clock_of(m, kind, clock, layers) < best)
      best = clock_of(m, kind, clock, layers);
  return isfinite(best) ? best : clock_of(m, PKV_ROUTE_BUCKET_EXACT, clock, layers);
}

static void mean_spread(double *mean, double *spread, const double *x, int32_t n) {
  *mean = *spread = 0;
  for (int32_t i = 0; i < n; i++)
    *mean += x[i] / n;
  for (int32_t i = 0; i < n; i++)
    *spread += n > 1 ? (x[i] - *mean) * (x[i] - *mean) / (n - 1) : 0;
  *spread = sqrt(*spread);
}

static void print_ratio(const paper *p, const paper_means *m, const char *name, int32_t kind) {
  (void)printf("  %-12s %-15s", name, contender_name(kind));
  for (int32_t c = 0; c < CLOCKS; c++) {
    double x[SEEDS], mean, spread;
    for (int32_t i = 0; i < p->o->seeds; i++)
      x[i] = rival(&m[i], c, p->o->layers) / clock_of(&m[i], kind, c, p->o->layers);
    mean_spread(&mean, &spread, x, p->o->seeds);
    if (isfinite(mean))
      (void)printf("  %6.3f +- %.3f", mean, spread);
    else
      (void)printf("  %15s", "-"); /* the CPU has no events */
  }
}

static pkv_status open_csv(paper *p, pkv_error *err) {
  if (p->o->csv == NULL) return PKV_OK;
  return route_csv_open(&p->csv, p->o->csv, &p->times, p->o,
                        "commit,device,driver,table,trace,seed,active,group,splits,route,attend_us,"
                        "plan_us,wall_us,event_us,launches,states_mib,useful_mib",
                        err);
}

static pkv_status ratios(paper *p, pkv_error *err) {
  char rival_name[96] = "bucket_exact";
  PKV_TRY(open_times(p, 32, 0, RATIO_KINDS, err));
  const bool there = p->times.no_flashinfer[0] == '\0';
  if (there)
    (void)snprintf(rival_name, sizeof rival_name, "FlashInfer %s, the better of its two",
                   p->times.flashinfer);
  else
    p->times.o.only = RATIO_KINDS | BIT(PKV_ROUTE_BUCKET_EXACT);
  PKV_TRY(open_csv(p, err));
  (void)printf("%s, %s; lengths / %d\n", p->times.device, p->times.driver, p->divide);
  if (!there)
    (void)printf("flashinfer is not measured: %s; ratios are over bucket_exact\n",
                 p->times.no_flashinfer);
  (void)printf("\nspeed-up over %s, mean +- deviation over %d seeds\n", rival_name, p->o->seeds);
  (void)printf("  %-12s %-15s  %-15s  %-15s  %-15s  %-15s  %-15s  %s\n", "trace", "route",
               "attention", "with its plan", "plan / layers", "event time", "wall, one layer",
               "published (wall, RTX 3060, 0.2.5)");
  for (int32_t i = 0; i < TRACES; i++) {
    paper_means m[SEEDS];
    const paper_trace *t = &traces[i];
    for (int32_t seed = 0; seed < p->o->seeds; seed++)
      PKV_TRY(run_seed(&m[seed], p, "speedup", t, seed, p->o->steps, err));
    print_ratio(p, m, t->name, t->route);
    if (t->v2 > 0)
      (void)printf("  v1 %.3f, v2 %.3f +- %.3f\n", t->v1, t->v2, t->v2_spread);
    else
      (void)printf("  v1 %.3f: it takes FlashInfer\n", t->v1);
    for (int32_t at = PKV_ROUTE_BALANCED; at < CONTENDERS; at++) {
      if (at != PKV_ROUTE_BALANCED && at < PKV_COST_WORKQUEUE_FUSED) continue;
      if (!m->done[at]) continue;
      print_ratio(p, m, "", at);
      (void)printf("\n");
    }
  }
  return PKV_OK;
}

/* Means of a route's plans over the paper's steps, at the lengths that were published. */
typedef struct paper_counters {
  double launches, states_mib, useful_mib;
} paper_counters;

static pkv_status add_plan(paper_counters *out, const pkv_shape *shape, pkv_plan_options options,
                           const bench_batch *batch, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_plan_stats stats = PKV_PLAN_STATS_INIT;
  const pkv_plan *plan;
  size_t bytes, workspace;
  int32_t longest = 0;
  for (int32_t row = 0; row < batch->rows; row++)
    if (batch->lengths[row] > longest) longest = batch->lengths[row];
  PKV_TRY(pkv_plan_size(&bytes, &workspace, shape, &options, batch->rows, longest, err));
  void *memory = pkv_alloc(&a, bytes);
  PKV_CHECK(err, memory, PKV_E_NOMEM, "no memory for a plan of %zu bytes", bytes);
  pkv_status status =
      pkv_plan_build(&plan, memory, bytes, shape, &options, batch->rows, batch->lengths, err);
  if (status == PKV_OK) status = pkv_plan_get_stats(&stats, plan, PKV_DTYPE_F16, err);
  pkv_free(&a, memory, bytes);
  out->launches += (double)stats.launches / PAPER_STEPS;
  out->states_mib += (double)stats.merge_state_bytes / 1048576.0 / PAPER_STEPS;
  out->useful_mib += (double)stats.useful_kv_bytes / 1048576.0 / PAPER_STEPS;
  return status;
}

/* Nothing is run for them: they are the planner's, on any machine. */
static pkv_status counters(paper *p, pkv_error *err) {
  const paper_trace *t = &traces[2];
  const policy_trace trace = {.kind = t->kind,
                              .active = t->active,
                              .requests = t->requests,
                              .most_steps = PAPER_STEPS,
                              .page_tokens = 16,
                              .divide = 1,
                              .seed = PKV_TRACE_SEED_HELD_OUT};
  const pkv_plan_options how[] = {
      {.struct_size = sizeof *how, .route = PKV_ROUTE_BUCKET_EXACT, .splits = 32},
      {.struct_size = sizeof *how, .route = PKV_ROUTE_WORKQUEUE, .splits = 20},
      {.struct_size = sizeof *how, .route = PKV_ROUTE_BALANCED, .parts = p->times.bare.parts}};
  paper_counters c[3] = {{0, 0, 0}};
  for (int32_t step = 0; step < PAPER_STEPS; step++) {
    bench_cell cell;
    pkv_status status = policy_trace_batch(&cell, &trace, step, PAPER_STEPS, err);
    for (int32_t i = 0; i < 3 && status == PKV_OK; i++)
      status = add_plan(&c[i], &p->times.o.shape, how[i], cell.batches, err);
    bench_cell_free(&cell);
    PKV_TRY(status);
  }
  for (int32_t i = 0; i < 3 && p->csv; i++)
    (void)fprintf(p->csv, "%s,\"%s\",\"%s\",counters,%s,%u,%d,%d,%d,%s,,,,,%.2f,%.4f,%.3f\n",
                  p->o->commit, p->times.device, p->times.driver, t->name, PKV_TRACE_SEED_HELD_OUT,
                  t->active, 4, how[i].splits, pkv_route_name(how[i].route), c[i].launches,
                  c[i].states_mib, c[i].useful_mib);
  const double saved = c[0].states_mib > 0 ? 1 - c[1].states_mib / c[0].states_mib : 0;
  (void)printf("\nB8 bimodal, counters of all %d steps, lengths as published\n"
               "                                           ours   published\n",
               PAPER_STEPS);
  (void)printf("  useful K and V, MiB                  %8.1f   550.5\n", c[0].useful_mib);
  (void)printf("  launches, exact buckets              %8.2f   16.00\n", c[0].launches);
  (void)printf("  launches, work queue                 %8.2f   2.00\n", c[1].launches);
  (void)printf("  states, exact buckets of 32, MiB     %8.2f   4.06\n", c[0].states_mib);
  (void)printf("  states, work queue of 20, MiB        %8.2f   2.54\n", c[1].states_mib);
  (void)printf("  states saved                         %7.1f%%   37%%\n", 100 * saved);
  (void)printf("  launches, balanced                   %8.2f   -\n", c[2].launches);
  (void)printf("  states, balanced, MiB                %8.2f   -\n", c[2].states_mib);
  return PKV_OK;
}

static pkv_status sensitivity(paper *p, pkv_error *err) {
  static const int32_t splits[] = {4, 8, 16, 20, 24, 32, 48};
  (void)printf(
      "\nB8 bimodal, attention by the number of splits, us a layer\n  %6s %12s %12s %12s\n", "S",
      "workqueue", "split", "bucket_exact");
  for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
    paper_means m;
    PKV_TRY(open_times(
        p, 32, splits[i],
        BIT(PKV_ROUTE_WORKQUEUE) | BIT(PKV_ROUTE_SPLIT) | BIT(PKV_ROUTE_BUCKET_EXACT), err));
    PKV_TRY(run_seed(&m, p, "splits", &traces[2], 0, 1, err));
    (void)printf("  %6d %12.1f %12.1f %12.1f\n", splits[i], m.attend[PKV_ROUTE_WORKQUEUE],
                 m.attend[PKV_ROUTE_SPLIT], m.attend[PKV_ROUTE_BUCKET_EXACT]);
  }
  return PKV_OK;
}

static pkv_status groups(paper *p, pkv_error *err) {
  static const int32_t sizes[] = {1, 4, 8};
  (void)printf("\nB8 bimodal, attention by query heads a KV head, us a layer\n"
               "  %6s %12s %12s %12s %16s\n",
               "group", "workqueue", "balanced", "flashinfer", "flashinfer_cores");
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    paper_means m;
    PKV_TRY(open_times(p, 8 * sizes[i], 0, FLASH_KINDS | BIT(PKV_ROUTE_WORKQUEUE), err));
    PKV_TRY(run_seed(&m, p, "groups", &traces[2], 0, 1, err));
    (void)printf("  %6d %12.1f %12.1f %12.1f %16.1f\n", sizes[i], m.attend[PKV_ROUTE_WORKQUEUE],
                 m.attend[PKV_ROUTE_BALANCED], m.attend[PKV_ROUTE_FLASHINFER],
                 m.attend[PKV_COST_FLASHINFER_CORES]);
  }
  return PKV_OK;
}

static int run(const pkv_cli *cli, const void *options) {
  paper p = {.cli = cli, .o = options};
  pkv_error err = {PKV_OK, NULL, {0}};
  const bool cuda = p.o->device == PKV_DEVICE_CUDA;
  if (strcmp(cli->operands[0], "persistentkv") != 0)
    return pkv_cli_usage(cli, "'%s' is no paper; there is persistentkv", cli->operands[0]);
  if (cuda && p.o->cpu_time)
    return pkv_cli_usage(cli, "--cpu-time is for the CPU, not for --device cuda");
  p.divide = p.o->divide > 0 ? p.o->divide : cuda ? 1 : 32;
  pkv_status status = ratios(&p, &err);
  if (status == PKV_OK) status = counters(&p, &err);
  if (status == PKV_OK) status = sensitivity(&p, &err);
  if (status == PKV_OK) status = groups(&p, &err);
  route_times_close(&p.times);
  if (p.csv && fclose(p.csv) != 0 && status == PKV_OK)
    status = PKV_FAIL(&err, PKV_E_IO, "cannot write %s", p.o->csv);
  if (status == PKV_OK) return PKV_EXIT_OK;
  (void)pkv_cli_fail(cli, &err);
  return pkv_cli_interrupted() ? PKV_EXIT_INTERRUPTED : PKV_EXIT_FAILURE;
}

const pkv_command pkv_command_bench_paper = {
    .name = "bench paper",
    .summary = "measure the tables of the seed's paper, with what it published beside them",
    .details =
        "persistentkv: speed-ups over FlashInfer on the traces and held-out seeds of the paper, by "
        "five clocks with planning on both sides; launches, bytes of partial states and useful "
        "bytes; the number of splits; query heads a KV head. Where FlashInfer is not here the "
        "ratios are over exact-length buckets, and that is said.",
    .operands = "persistentkv",
    .min_operands = 1,
    .max_operands = 1,
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(paper_options),
    .run = run,
};
