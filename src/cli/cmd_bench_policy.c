/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv bench policy`: how good the policies' choices are on batches that no fit has seen. Every
 * route is timed on steps of the seed's traces with its held-out seeds; a policy is charged what
 * its route took, against the fastest of the routes in the same run (regret).
 */
#include "cli/commands.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/text.h"
#include "cli/policy_batches.h"
#include "cli/policy_decode.h"
#include "cli/profile_file.h"
#include "cli/route_times.h"

#define SEEDS       PKV_TRACE_HELD_OUT_SEEDS
#define MOST_POINTS 4096
/* The seed's routes and FlashInfer, its fallback. */
#define SEED_KINDS                                                                                 \
  (1u << PKV_ROUTE_BUCKET_EXACT | 1u << PKV_ROUTE_BUCKET_PADDED | 1u << PKV_ROUTE_SPLIT |          \
   1u << PKV_ROUTE_WORKQUEUE | 1u << PKV_COST_WORKQUEUE_FUSED | 1u << PKV_ROUTE_FLASHINFER |       \
   1u << PKV_COST_FLASHINFER_CORES)

static const char *const device_choices[] = {"cpu", "cuda", NULL};
static const char *const trace_choices[] = {"all",     "bucketed", "homogeneous", "bimodal",
                                            "uniform", "zipf",     NULL};
enum { STATIC, ROOFLINE_SEED, ROOFLINE_HERE, CALIBRATED, CALIBRATED_SEED, POLICIES };
static const char *const policy_names[POLICIES] = {"static", "roofline, seed's", "roofline, here",
                                                   "calibrated", "calibrated, seed's"};

typedef struct policy_options {
  const char *profile, *csv, *commit, *flashinfer, *whole;
  int32_t device, threads, steps, seeds, divide, repeats, memory_mib, layers, cpu_time, most_rows;
  int32_t trace;
} policy_options;

#define O policy_options
static const pkv_option options_table[] = {
    PKV_REQUIRED(O, profile, 'p', "profile", "FILE", "what pkv calibrate wrote on this device"),
    PKV_CHOICE(O, device, 0, "device", device_choices, "cpu", "where to measure"),
    PKV_INT(O, threads, 't', "threads", "N", "0", 0, 1024, "CPU threads; 0 = all cores"),
    PKV_INT(O, steps, 0, "steps", "N", "2", 1, 64, "steps of each trace, evenly spread"),
    PKV_INT(O, seeds, 0, "seeds", "N", "5", 1, SEEDS, "held-out seeds, from 20260623 on"),
    PKV_INT(O, divide, 0, "divide", "N", "0", 0, 1024,
            "divide every length by this; 0 = 32, GPU 1"),
    PKV_TEXT(O, whole, 0, "whole", "LIST", NULL,
             "GPU: instead of single steps decode whole traces with so many rows (1,8) by each "
             "policy: tokens a second"),
    PKV_CHOICE(O, trace, 0, "trace", trace_choices, "all", "one of the traces only"),
    PKV_INT(O, most_rows, 0, "most-rows", "N", "64", 1, 64, "leave out larger batches"),
    PKV_INT(O, repeats, 0, "repeats", "N", "0", 0, 16, "repetitions; 0 = 3, GPU 5"),
    PKV_INT(O, layers, 0, "layers", "N", "32", 1, 1024, "layers that one plan serves"),
    PKV_INT(O, memory_mib, 0, "memory", "MIB", "0", 0, 1 << 20,
            "for K and V; 0 = 4096, GPU three quarters of what is free"),
    PKV_FLAG(O, cpu_time, 0, "cpu-time",
             "CPU time over threads instead of the clock, for a busy machine"),
    PKV_TEXT(O, flashinfer, 0, "flashinfer", "FILE", NULL,
             "FlashInfer's kernels (GPU); default: pkv_flashinfer.so beside the program"),
    PKV_TEXT(O, csv, 0, "csv", "FILE", NULL, "write a row for each batch and route"),
    PKV_TEXT(O, commit, 0, "commit", "TEXT", "unknown", "commit to name in the CSV"),
};
#undef O

/* One batch: what each kind took and was predicted to take, and what each policy named. */
typedef struct policy_point {
  int32_t trace, seed, rows;
  bool done[PKV_COST_KINDS];
  double step_us[PKV_COST_KINDS], attend_us[PKV_COST_KINDS], wall_us[PKV_COST_KINDS];
  double predicted_us[PKV_COST_KINDS];
  int32_t chosen[POLICIES]; /* kind */
} policy_point;

typedef struct policy_bench {
  const pkv_cli *cli;
  const policy_options *o;
  profile_file file;
  pkv_profile seed_profile; /* the model, for the seed's routes only */
  pkv_profile seed_device;  /* the seed's constants, the routes that are here */
  route_times times;
  policy_point *points;
  int32_t count, skipped;
  int32_t divide;
  int32_t whole[POLICY_ROWS], wholes; /* numbers of rows of --whole */
  FILE *csv;
} policy_bench;

/* Of flashinfer's two kinds the one that the policy predicts to be faster; else the route. */
static int32_t kind_of(const policy_point *p, pkv_route route) {
  if (route != PKV_ROUTE_FLASHINFER || !p->done[PKV_COST_FLASHINFER_CORES]) return (int32_t)route;
  return p->predicted_us[PKV_COST_FLASHINFER_CORES] < p->predicted_us[PKV_ROUTE_FLASHINFER]
             ? PKV_COST_FLASHINFER_CORES
             : PKV_ROUTE_FLASHINFER;
}

static pkv_status choose(const policy_bench *b, policy_point *point, const bench_batch *batch,
                         pkv_error *err) {
  const struct {
    pkv_policy policy;
    const pkv_profile *profile;
  } how[POLICIES] = {{PKV_POLICY_STATIC, &b->seed_device},
                     {PKV_POLICY_ROOFLINE, &b->seed_device},
                     {PKV_POLICY_ROOFLINE, &b->file.profile},
                     {PKV_POLICY_CALIBRATED, &b->file.profile},
                     {PKV_POLICY_CALIBRATED, &b->seed_profile}};
  for (int32_t i = 0; i < POLICIES; i++) {
    pkv_choice c = PKV_CHOICE_INIT;
    PKV_TRY(pkv_policy_choose(&c, how[i].policy, PKV_ROUTE_AUTO, &b->times.o.shape,
                              b->times.o.kv_dtype, batch->rows, batch->lengths, how[i].profile,
                              err));
    point->chosen[i] = c.kind > 0 ? c.kind : kind_of(point, c.route);
  }
  return PKV_OK;
}

static void write_rows(const policy_bench *b, const policy_point *p, const bench_batch *batch) {
  if (b->csv == NULL) return;
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    if (!p->done[kind]) continue;
    (void)fprintf(b->csv, "%s,\"%s\",\"%s\",%s,%u,%d,%lld,%s,%.3f,%.3f,%.3f,%.3f,%.3f,",
                  b->o->commit, b->times.device, b->times.driver,
                  pkv_trace_kind_name((pkv_trace_kind)p->trace),
                  PKV_TRACE_SEED_HELD_OUT + (unsigned)p->seed, p->rows, (long long)batch->tokens,
                  pkv_cost_kind_name(kind), p->attend_us[kind],
                  (p->step_us[kind] - p->attend_us[kind]) * b->o->layers, p->wall_us[kind],
                  p->step_us[kind], p->predicted_us[kind]);
    for (int32_t i = 0; i < POLICIES; i++)
      (void)fputc(p->chosen[i] == kind ? '1' : '0', b->csv);
    (void)fputc('\n', b->csv);
  }
}

static pkv_status one_batch(policy_bench *b, const policy_trace *trace, int32_t rows, int32_t step,
                            pkv_error *err) {
  route_time times[PKV_COST_KINDS];
  pkv_prediction predicted[PKV_COST_KINDS];
  bench_cell cell;
  pkv_status status = policy_trace_batch(&cell, trace, step, b->o->steps, err);
  if (status == PKV_OK) status = route_times_run(&b->times, times, cell.batches, err);
  if (status == PKV_E_LIMIT) {
    b->skipped++;
    bench_cell_free(&cell);
    return PKV_OK;
  }
  policy_point *p = &b->points[b->count];
  *p = (policy_point){.trace = (int32_t)trace->kind,
                      .seed = (int32_t)(trace->seed - PKV_TRACE_SEED_HELD_OUT),
                      .rows = rows};
  if (status == PKV_OK)
    status =
        pkv_policy_predict(predicted, &b->times.o.shape, b->times.o.kv_dtype, cell.batches->rows,
                           cell.batches->lengths, NULL, &b->file.profile, err);
  for (int32_t kind = 1; kind < PKV_COST_KINDS && status == PKV_OK; kind++) {
    p->done[kind] = times[kind].done;
    p->attend_us[kind] = times[kind].attend_us;
    p->wall_us[kind] = times[kind].wall_us;
    p->step_us[kind] = times[kind].attend_us + times[kind].plan_us / b->o->layers;
    p->predicted_us[kind] = predicted[kind].step_us;
  }
  if (status == PKV_OK) status = choose(b, p, cell.batches, err);
  if (status == PKV_OK) {
    write_rows(b, p, cell.batches);
    b->count++;
  }
  bench_cell_free(&cell);
  if (status == PKV_OK && pkv_cli_interrupted()) status = PKV_FAIL(err, PKV_E_STATE, "interrupted");
  return status;
}

static bool asked(const policy_bench *b, int32_t kind) {
  return b->o->trace == 0 || b->o->trace == kind + 1;
}

static pkv_status measure(policy_bench *b, pkv_error *err) {
  const int64_t start = pkv_clock_ns();
  for (int32_t r = 0; r < POLICY_ROWS; r++) {
    for (int32_t kind = 0; kind < POLICY_TRACES && policy_rows[r] <= b->o->most_rows; kind++)
      for (int32_t seed = 0; seed < b->o->seeds; seed++)
        for (int32_t step = 0; step < b->o->steps; step++) {
          const policy_trace trace = {.kind = (pkv_trace_kind)kind,
                                      .active = policy_rows[r],
                                      .page_tokens = b->times.o.shape.page_tokens,
                                      .divide = b->divide,
                                      .seed = PKV_TRACE_SEED_HELD_OUT + (uint64_t)seed};
          if (!asked(b, kind)) continue;
          PKV_TRY(one_batch(b, &trace, policy_rows[r], step, err));
        }
    (void)fprintf(stderr, "pkv bench policy: up to %d rows, %d batches, %.0f s\n", policy_rows[r],
                  b->count, (double)(pkv_clock_ns() - start) * 1e-9);
  }
  return PKV_OK;
}

/* The fastest of `kinds`; 0 = none. */
static int32_t best_of(const policy_point *p, uint32_t kinds) {
  int32_t best = 0;
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++)
    if ((kinds >> kind & 1u) && p->done[kind] && (best == 0 || p->step_us[kind] < p->step_us[best]))
      best = kind;
  return best;
}

/* Regret of `chosen` (one kind a point, by policy or fixed) over the points that match. */
static void regret(const policy_bench *b, const char *label, int32_t policy, int32_t fixed,
                   uint32_t kinds) {
  double sum = 0, worst = 0;
  int32_t n = 0, right = 0;
  for (int32_t i = 0; i < b->count; i++) {
    const policy_point *p = &b->points[i];
    const int32_t chosen = policy >= 0 ? p->chosen[policy] : fixed, best = best_of(p, kinds);
    if (best == 0 || !p->done[chosen] || (kinds >> chosen & 1u) == 0) continue;
    const double r = p->step_us[chosen] / p->step_us[best] - 1;
    sum += r;
    if (r > worst) worst = r;
    right += chosen == best;
    n++;
  }
  if (n > 0)
    (void)printf("  %-24s %6.2f%% %8.1f%% %7.0f%%  of %d\n", label, sum / n * 100, worst * 100,
                 100.0 * right / n, n);
}

static void print_regret(const policy_bench *b, const char *title, uint32_t kinds, bool all) {
  (void)printf("\nregret %s: mean, worst, best route named\n", title);
  for (int32_t i = 0; i < POLICIES; i++)
    if (all ? i != CALIBRATED_SEED : i != CALIBRATED) regret(b, policy_names[i], i, 0, kinds);
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    char label[40];
    (void)snprintf(label, sizeof label, "fixed:%s", pkv_cost_kind_name(kind));
    if (kinds >> kind & 1u) regret(b, label, -1, kind, kinds);
  }
}

/* Tokens a second through 32 layers of attention and their plans, over all batches of a seed. */
static void throughput(const policy_bench *b, const char *label, int32_t policy, int32_t fixed,
                       int32_t trace) {
  double mean = 0, square = 0;
  int32_t seeds = 0;
  for (int32_t seed = 0; seed < b->o->seeds; seed++) {
    double tokens = 0, us = 0;
    for (int32_t i = 0; i < b->count; i++) {
      const policy_point *p = &b->points[i];
      if (p->trace != trace || p->seed != seed) continue;
      const int32_t kind = policy >= 0 ? p->chosen[policy]
                           : fixed > 0 ? fixed
                                       : best_of(p, (1u << PKV_COST_KINDS) - 1);
      if (!p->done[kind]) return;
      tokens += p->rows;
      us += p->step_us[kind] * b->o->layers;
    }
    if (us == 0) continue;
    const double rate = tokens / us * 1e6;
    mean += rate;
    square += rate * rate;
    seeds++;
  }
  if (seeds == 0) return;
  mean /= seeds;
  const double spread = seeds > 1 ? (square - seeds * mean * mean) / (seeds - 1) : 0;
  (void)printf("  %-12s %-24s %10.1f +- %.1f\n", pkv_trace_kind_name((pkv_trace_kind)trace), label,
               mean, sqrt(spread > 0 ? spread : 0));
}

static void print_all(const policy_bench *b) {
  (void)printf("%s, %s; %d batches, lengths / %d, one plan for %d layers\n", b->times.device,
               b->times.driver, b->count, b->divide, b->o->layers);
  if (b->times.no_flashinfer[0] != '\0')
    (void)printf("flashinfer is not measured: %s\n", b->times.no_flashinfer);
  else
    (void)printf("flashinfer %s\n", b->times.flashinfer);
  print_regret(b, "among the seed's routes with FlashInfer", SEED_KINDS, false);
  print_regret(b, "among all routes", (1u << PKV_COST_KINDS) - 1, true);
  (void)printf("\nprediction: mean and worst |predicted / measured - 1| of a layer\n");
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    double sum = 0, worst = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < b->count; i++) {
      const policy_point *p = &b->points[i];
      if (!p->done[kind] || p->predicted_us[kind] <= 0) continue;
      const double off = fabs(p->predicted_us[kind] / p->step_us[kind] - 1);
      sum += off;
      if (off > worst) worst = off;
      n++;
    }
    if (n > 0)
      (void)printf("  %-24s %6.2f%% %8.1f%%\n", pkv_cost_kind_name(kind), sum / n * 100,
                   worst * 100);
  }
  (void)printf("\ntokens a second through the attention of %d layers, mean +- deviation of seeds\n",
               b->o->layers);
  for (int32_t trace = 0; trace < POLICY_TRACES; trace++) {
    throughput(b, "best in hindsight", -1, 0, trace);
    for (int32_t i = 0; i < POLICIES; i++)
      throughput(b, policy_names[i], i, 0, trace);
    for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++)
      throughput(b, pkv_cost_kind_name(kind), -1, kind, trace);
  }
  if (b->skipped > 0) (void)printf("\n%d batches did not fit into --memory\n", b->skipped);
}

/* --- whole traces ---------------------------------------------------------------------------- */

static const int32_t whole_policies[] = {STATIC, ROOFLINE_SEED, CALIBRATED};
enum {
  WHOLE_POLICIES = sizeof whole_policies / sizeof *whole_policies,
  WHOLE = WHOLE_POLICIES + 2
};

static const char *whole_name(int32_t i) {
  return i < WHOLE_POLICIES ? policy_names[whole_policies[i]]
                            : pkv_cost_kind_name(PKV_ROUTE_FLASHINFER + i - WHOLE_POLICIES);
}

/* The policies as routers, then FlashInfer's two where they are here; returns how many. */
static int32_t whole_contenders(pkv_router_options *o, const policy_bench *b) {
  static const pkv_policy how[] = {PKV_POLICY_STATIC, PKV_POLICY_ROOFLINE, PKV_POLICY_CALIBRATED};
  for (int32_t i = 0; i < WHOLE; i++) {
    o[i] = (pkv_router_options)PKV_ROUTER_OPTIONS_INIT;
    o[i].routes = b->file.profile.routes & ~(1u << PKV_ROUTE_SHARED);
    o[i].profile = &b->seed_device;
    if (i < WHOLE_POLICIES) {
      o[i].policy = how[i];
      if (how[i] == PKV_POLICY_CALIBRATED) o[i].profile = &b->file.profile;
      continue;
    }
    o[i].fixed = PKV_ROUTE_FLASHINFER;
    o[i].flashinfer_kind = PKV_ROUTE_FLASHINFER + i - WHOLE_POLICIES;
  }
  return b->times.no_flashinfer[0] == '\0' ? WHOLE : WHOLE_POLICIES;
}

static pkv_status whole_trace(policy_bench *b, int32_t rows, int32_t kind, pkv_error *err) {
  double rate[WHOLE][SEEDS];
  pkv_router_options options[WHOLE];
  const int32_t count = whole_contenders(options, b);
  const char *name = pkv_trace_kind_name((pkv_trace_kind)kind);
  for (int32_t seed = 0; seed < b->o->seeds; seed++) {
    policy_decoded done[WHOLE];
    const policy_trace trace = {.kind = (pkv_trace_kind)kind,
                                .active = rows,
                                .page_tokens = b->times.o.shape.page_tokens,
                                .divide = b->divide,
                                .seed = PKV_TRACE_SEED_HELD_OUT + (uint64_t)seed};
    PKV_TRY(policy_decode(done, &b->times, &trace, options, count, b->o->layers, err));
    for (int32_t i = 0; i < count; i++) {
      rate[i][seed] = (double)done[i].tokens / done[i].us * 1e6;
      if (b->csv)
        (void)fprintf(b->csv, "%s,\"%s\",\"%s\",%s,%u,%d,%d,\"%s\",%d,%lld,%.1f,%.2f,%.2e\n",
                      b->o->commit, b->times.device, b->times.driver, name, (unsigned)trace.seed,
                      rows, b->o->layers, whole_name(i), done[i].steps, (long long)done[i].tokens,
                      done[i].us, rate[i][seed], done[i].error);
    }
    b->count++;
  }
  for (int32_t i = 0; i < count; i++) {
    double mean = 0, square = 0;
    for (int32_t seed = 0; seed < b->o->seeds; seed++)
      mean += rate[i][seed] / b->o->seeds;
    for (int32_t seed = 0; seed < b->o->seeds; seed++)
      square += (rate[i][seed] - mean) * (rate[i][seed] - mean);
    (void)printf("  %-12s %4d  %-24s %10.1f +- %.1f\n", name, rows, whole_name(i), mean,
                 b->o->seeds > 1 ? sqrt(square / (b->o->seeds - 1)) : 0.0);
  }
  return PKV_OK;
}

/* "1,8": numbers of rows; nothing is measured before the last of them is read. */
static bool parse_whole(policy_bench *b) {
  const char *at = b->o->whole;
  for (bool more = true; more;) {
    char word[8];
    int64_t rows;
    const size_t size = strcspn(at, ",");
    if (size == 0 || size >= sizeof word || b->wholes == POLICY_ROWS) return false;
    memcpy(word, at, size);
    word[size] = '\0';
    if (!pkv_parse_i64(&rows, word, 1, 64)) return false;
    b->whole[b->wholes++] = (int32_t)rows;
    more = at[size] == ',';
    at += size + more;
  }
  return true;
}

static pkv_status whole_traces(policy_bench *b, pkv_error *err) {
  (void)printf(
      "%s, %s; lengths / %d\nwhole traces, tokens a second through the attention of %d layers; "
      "choice, plan and the wait for each step count; mean +- deviation of %d seeds\n",
      b->times.device, b->times.driver, b->divide, b->o->layers, b->o->seeds);
  for (int32_t i = 0; i < b->wholes; i++)
    for (int32_t kind = 0; kind < POLICY_TRACES; kind++)
      if (asked(b, kind)) PKV_TRY(whole_trace(b, b->whole[i], kind, err));
  return PKV_OK;
}

static pkv_status prepare(policy_bench *b, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const policy_options *o = b->o;
  const bool cuda = o->device == PKV_DEVICE_CUDA;
  PKV_TRY(profile_file_load(&b->file, o->profile, err));
  b->file.profile.layers = o->layers;
  b->divide = o->divide > 0 ? o->divide : cuda ? 1 : 32;
  const route_times_options t = {.cli = b->cli,
                                 .device = o->device,
                                 .threads = o->threads,
                                 .repeats = o->repeats > 0 ? o->repeats
                                            : cuda         ? 5
                                                           : 3,
                                 .memory_mib = o->memory_mib,
                                 .most_tokens = 64 * 65536 / b->divide,
                                 .shape = b->file.model.shape,
                                 .kv_dtype = b->file.model.kv_dtype,
                                 .cpu_time = o->cpu_time != 0,
                                 .flashinfer = o->flashinfer};
  PKV_TRY(route_times_open(&b->times, &t, err));
  PKV_CHECK(err, strcmp(b->times.device, b->file.model.device) == 0, PKV_E_INVALID,
            "the profile is of '%s', this is '%s'", b->file.model.device, b->times.device);
  b->file.profile.routes &= b->times.profile.routes;
  b->seed_device.routes = b->file.profile.routes;
  b->seed_profile = b->file.profile;
  b->seed_profile.routes &= SEED_KINDS & 0xffu;
  b->points = pkv_alloc_zeroed(&a, MOST_POINTS, sizeof *b->points);
  PKV_CHECK(err, b->points, PKV_E_NOMEM, "no memory for the points");
  PKV_CHECK(err, POLICY_ROWS * POLICY_TRACES * o->seeds * o->steps <= MOST_POINTS, PKV_E_LIMIT,
            "--steps %d times --seeds %d are too many batches", o->steps, o->seeds);
  if (o->csv == NULL) return PKV_OK;
  return route_csv_open(&b->csv, o->csv, &b->times, o,
                        o->whole ? "commit,device,driver,trace,seed,active,layers,contender,steps,"
                                   "tokens,us,tokens_s,error"
                                 : "commit,device,driver,trace,seed,active,tokens,route,attend_us,"
                                   "plan_us,wall_us,step_us,predicted_us,chosen",
                        err);
}

static int run(const pkv_cli *cli, const void *options) {
  const pkv_allocator a = pkv_allocator_default();
  policy_bench b = {.cli = cli, .o = options};
  pkv_error err = {PKV_OK, NULL, {0}};
  if (b.o->whole && b.o->device != PKV_DEVICE_CUDA)
    return pkv_cli_usage(cli, "--whole is for --device cuda");
  if (b.o->whole && !parse_whole(&b))
    return pkv_cli_usage(cli,
                         "--whole '%s': up to %d numbers of rows from 1 to 64 like 1,8 expected",
                         b.o->whole, POLICY_ROWS);
  if (b.o->device == PKV_DEVICE_CUDA && b.o->cpu_time)
    return pkv_cli_usage(cli, "--cpu-time is for the CPU, not for --device cuda");
  b.seed_device = (pkv_profile)PKV_PROFILE_INIT;
  pkv_status status = prepare(&b, &err);
  if (status == PKV_OK) status = b.o->whole ? whole_traces(&b, &err) : measure(&b, &err);
  if (!b.o->whole && b.count > 0 && (status == PKV_OK || pkv_cli_interrupted())) print_all(&b);
  if (b.csv && fclose(b.csv) != 0 && status == PKV_OK)
    status = PKV_FAIL(&err, PKV_E_IO, "cannot write %s", b.o->csv);
  pkv_free(&a, b.points, MOST_POINTS * sizeof *b.points);
  route_times_close(&b.times);
  if (status == PKV_OK) return PKV_EXIT_OK;
  (void)pkv_cli_fail(cli, &err);
  return pkv_cli_interrupted() ? PKV_EXIT_INTERRUPTED : PKV_EXIT_FAILURE;
}

const pkv_command pkv_command_bench_policy = {
    .name = "bench policy",
    .summary = "measure how good the policies' choices of a route are",
    .details =
        "Times every route on steps of the seed's five traces with its held-out seeds, 1 to 64 "
        "rows, and asks each policy which it would have taken. Regret is what the choice took over "
        "what the fastest route took in the same run, less one; a layer counts its attention and "
        "its share of the plan. Twice: among the seed's routes with FlashInfer, and among all.\n\n"
        "--profile must come from pkv calibrate on this device, whose seed and numbers of rows are "
        "others than those here.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(policy_options),
    .run = run,
};
