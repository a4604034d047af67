/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv calibrate`: times every route over a grid of batches, fits the cost model, writes the
 * profile. */
#include "cli/commands.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/text.h"
#include "cli/calibrate_points.h"
#include "cli/policy_batches.h"
#include "cli/profile_file.h"

#define CPU_BATCHES  90
#define GPU_BATCHES  220
#define CPU_TOKENS   32768
#define GPU_TOKENS   2097152
#define CPU_REPEATS  3
#define GPU_REPEATS  5
#define DETAILS_PATH 1024
#define SAY_SECONDS  5

static const char *const device_choices[] = {"cpu", "cuda", NULL};
static const char *const dtype_choices[] = {"f32", "f16", "bf16", "fp8_e4m3", NULL};

typedef struct calibrate_options {
  const char *out, *flashinfer;
  int32_t device, dtype, threads, query_heads, kv_heads, head_dim, page_tokens;
  int32_t batches, repeats, memory_mib, cpu_time;
  int64_t tokens;
} calibrate_options;

#define O calibrate_options
static const pkv_option options_table[] = {
    PKV_REQUIRED(O, out, 'o', "out", "FILE", "profile to write; points go to FILE.points"),
    PKV_CHOICE(O, device, 0, "device", device_choices, "cpu", "where to measure"),
    PKV_CHOICE(O, dtype, 0, "kv-dtype", dtype_choices, "f16", "element type of the cache"),
    PKV_INT(O, threads, 't', "threads", "N", "0", 0, 1024, "CPU threads; 0 = all cores"),
    PKV_INT(O, query_heads, 0, "query-heads", "N", "32", 1, 1024, "query heads"),
    PKV_INT(O, kv_heads, 0, "kv-heads", "N", "8", 1, 1024, "KV heads"),
    PKV_INT(O, head_dim, 0, "head-dim", "N", "128", 8, 256, "head dimension"),
    PKV_INT(O, page_tokens, 0, "page", "TOKENS", "16", 1, 1024, "tokens of a page"),
    PKV_INT(O, batches, 0, "batches", "N", "0", 0, 4096, "batches to time; 0 = 90, GPU 220"),
    PKV_INT(O, tokens, 0, "tokens", "N", "0", 0, 16777216,
            "most tokens of a batch; 0 = 32768, GPU 2097152"),
    PKV_INT(O, repeats, 0, "repeats", "N", "0", 0, 16, "repetitions; 0 = 3, GPU 5"),
    PKV_INT(O, memory_mib, 0, "memory", "MIB", "0", 0, 1 << 20,
            "for K and V; 0 = 4096, GPU three quarters of what is free"),
    PKV_FLAG(O, cpu_time, 0, "cpu-time",
             "CPU time over threads instead of the clock, for a busy machine"),
    PKV_TEXT(O, flashinfer, 0, "flashinfer", "FILE", NULL,
             "FlashInfer's kernels (GPU); default: pkv_flashinfer.so beside the program"),
};
#undef O

/* The command's work in hand. */
typedef struct calibration {
  const pkv_cli *cli;
  const calibrate_options *o;
  int32_t batches;
  int64_t tokens;
  route_times times;
  calibrate_points points;
  int32_t skipped;
  double said; /* seconds from the start to the last line of progress */
} calibration;

/* Every tenth batch, or after SAY_SECONDS. */
static void say(calibration *c, int64_t start, int32_t from) {
  const double seconds = (double)(pkv_clock_ns() - start) * 1e-9;
  const int32_t at = c->points.batches, done = at - from;
  if (at % 10 != 0 && at != c->batches && seconds < c->said + SAY_SECONDS) return;
  c->said = seconds;
  (void)fprintf(stderr, "pkv calibrate: %d of %d batches, %.0f s, about %.0f s left\n", at,
                c->batches, seconds, seconds / done * (c->batches - at));
}

static pkv_status measure(calibration *c, pkv_error *err) {
  const int64_t start = pkv_clock_ns();
  const int32_t from = c->points.batches;
  if (from > 0)
    (void)fprintf(stderr, "pkv calibrate: %d batches taken over from an interrupted run\n", from);
  while (c->points.batches < c->batches) {
    route_time times[PKV_COST_KINDS];
    bench_cell cell;
    const char *mix = "";
    pkv_status status =
        policy_fit_batch(&cell, &mix, c->points.batches, c->tokens, c->o->page_tokens, err);
    if (status == PKV_OK) status = route_times_run(&c->times, times, cell.batches, err);
    if (status == PKV_E_LIMIT) { /* counted as done, without points */
      memset(times, 0, sizeof times);
      c->skipped++;
      status = PKV_OK;
    }
    if (status == PKV_OK)
      status = calibrate_points_add(&c->points, &c->times, mix, cell.batches, times, err);
    bench_cell_free(&cell);
    PKV_TRY(status);
    say(c, start, from);
    if (pkv_cli_interrupted())
      return PKV_FAIL(err, PKV_E_STATE, "interrupted; the same command goes on from here");
  }
  return PKV_OK;
}

/*
 * The device's constants, for the roofline: what `balanced` reads at, the median of its batches
 * above the ramp (of all, where there are none), and its shortest call.
 */
static pkv_status constants(pkv_profile *profile, const calibrate_points *p, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const size_t bytes = ((size_t)p->count + 1) * sizeof(double);
  double *rates = pkv_alloc(&a, bytes);
  int32_t count = 0;
  PKV_CHECK(err, rates, PKV_E_NOMEM, "no memory for %d points", p->count);
  for (int32_t ramp = 1; ramp >= 0 && count == 0; ramp--)
    for (int32_t i = 0; i < p->count; i++) {
      const calibrate_point *point = &p->points[i];
      const double *f = point->features;
      if (point->kind != PKV_ROUTE_BALANCED) continue;
      if (profile->launch_us == 0 || point->attend_us < profile->launch_us)
        profile->launch_us = point->attend_us;
      if (ramp && f[PKV_COST_BYTES] <= f[PKV_COST_RAMP]) continue;
      rates[count++] = f[PKV_COST_BYTES] * 1e3 / point->attend_us; /* GB/s */
    }
  profile->read_gb_s = bench_median(rates, count);
  pkv_free(&a, rates, bytes);
  return PKV_OK;
}

static void print_model(const pkv_profile *profile, const pkv_cost_model *m) {
  (void)printf("%s, %s\nread %.4g GB/s, shortest call %.3g us, %d x %d slots\n", m->device,
               m->driver, profile->read_gb_s, profile->launch_us, profile->sms, profile->min_ctas);
  (void)printf("%-16s %6s %10s %10s  terms (us a unit)\n", "route", "points", "mean off",
               "worst off");
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    const pkv_route_cost *c = &m->cost[kind];
    if (c->points == 0) continue;
    (void)printf("%-16s %6d %9.1f%% %9.1f%% ", pkv_cost_kind_name(kind), c->points,
                 c->error_mean * 100, c->error_worst * 100);
    for (int32_t i = 0; i < PKV_COST_FEATURES; i++)
      if (c->attend[i] > 0) (void)printf(" %s %.3g", pkv_cost_feature_name(i), c->attend[i]);
    (void)printf("\n");
  }
}

static pkv_status finish(calibration *c, pkv_error *err) {
  pkv_cost_model model;
  pkv_profile profile = c->times.profile;
  const time_t now = time(NULL);
  struct tm utc;
  memset(&model, 0, sizeof model);
  model.struct_size = sizeof model;
  model.shape = c->times.o.shape;
  model.kv_dtype = c->times.o.kv_dtype;
  model.parts = c->times.bare.parts;
  (void)snprintf(model.device, sizeof model.device, "%s", c->times.device);
  (void)snprintf(model.driver, sizeof model.driver, "%s", c->times.driver);
  (void)snprintf(model.library, sizeof model.library, "%.15s", pkv_version());
  if (gmtime_r(&now, &utc) == NULL ||
      strftime(model.date, sizeof model.date, "%Y-%m-%dT%H:%M:%SZ", &utc) == 0)
    (void)snprintf(model.date, sizeof model.date, "unknown");
  PKV_TRY(calibrate_fit(&model, &c->points, err));
  PKV_CHECK(err, model.cost[PKV_ROUTE_BALANCED].points > 0, PKV_E_TOO_SMALL,
            "%d points are too few for a fit: more --batches", c->points.count);
  PKV_TRY(constants(&profile, &c->points, err));
  profile.model = &model;
  PKV_TRY(profile_file_save(c->o->out, &profile, err));
  print_model(&profile, &model);
  if (c->times.no_flashinfer[0] != '\0')
    (void)printf("flashinfer is not in the profile: %s\n", c->times.no_flashinfer);
  if (c->skipped > 0) (void)printf("%d batches did not fit into --memory\n", c->skipped);
  return PKV_OK;
}

static pkv_status calibrate(calibration *c, pkv_error *err) {
  char path[DETAILS_PATH], setup[400];
  const route_times_options *t = &c->times.o;
  const int size = snprintf(path, sizeof path, "%s.points", c->o->out);
  PKV_CHECK(err, size > 0 && (size_t)size < sizeof path, PKV_E_RANGE, "--out is too long");
  (void)snprintf(setup, sizeof setup,
                 "%s | %s | %s | %d/%dx%d p%d %s | slots %d parts %d | "
                 "tokens %lld repeats %d%s",
                 pkv_version(), c->times.device, c->times.driver, t->shape.query_heads,
                 t->shape.kv_heads, t->shape.head_dim, t->shape.page_tokens,
                 pkv_dtype_name(t->kv_dtype), c->times.profile.sms * c->times.profile.min_ctas,
                 c->times.bare.parts, (long long)c->tokens, t->repeats,
                 t->cpu_time ? " cpu-time" : "");
  PKV_TRY(calibrate_points_open(&c->points, path, setup, err));
  PKV_TRY(measure(c, err));
  return finish(c, err);
}

static int run(const pkv_cli *cli, const void *options) {
  const calibrate_options *o = options;
  calibration c = {.cli = cli, .o = o};
  pkv_error err = {PKV_OK, NULL, {0}};
  const bool cuda = o->device == PKV_DEVICE_CUDA;
  if (cuda && o->cpu_time)
    return pkv_cli_usage(cli, "--cpu-time is for the CPU, not for --device cuda");
  if (cuda && o->dtype == PKV_DTYPE_F32)
    return pkv_cli_usage(cli, "--kv-dtype f32 is for the CPU; a GPU has f16, bf16 and fp8_e4m3");
  c.batches = o->batches > 0 ? o->batches : cuda ? GPU_BATCHES : CPU_BATCHES;
  c.tokens = o->tokens > 0 ? o->tokens : cuda ? GPU_TOKENS : CPU_TOKENS;
  route_times_options t = {.cli = cli,
                           .device = o->device,
                           .threads = o->threads,
                           .repeats = o->repeats > 0 ? o->repeats
                                      : cuda         ? GPU_REPEATS
                                                     : CPU_REPEATS,
                           .memory_mib = o->memory_mib,
                           .most_tokens = c.tokens,
                           .cpu_time = o->cpu_time != 0,
                           .flashinfer = o->flashinfer,
                           .shape = PKV_SHAPE_INIT,
                           .kv_dtype = (pkv_dtype)o->dtype};
  t.shape.query_heads = o->query_heads;
  t.shape.kv_heads = o->kv_heads;
  t.shape.head_dim = o->head_dim;
  t.shape.page_tokens = o->page_tokens;
  pkv_status status = route_times_open(&c.times, &t, &err);
  if (status == PKV_OK) status = calibrate(&c, &err);
  calibrate_points_close(&c.points);
  route_times_close(&c.times);
  if (status == PKV_OK) return PKV_EXIT_OK;
  (void)pkv_cli_fail(cli, &err);
  return pkv_cli_interrupted() ? PKV_EXIT_INTERRUPTED : PKV_EXIT_FAILURE;
}

const pkv_command pkv_command_calibrate = {
    .name = "calibrate",
    .summary = "measure this device and fit the policy's cost model",
    .details =
        "Times every route over batches drawn with seed 20260622: five mixes of lengths, 3 to 96 "
        "rows, some with prefixes that rows share. Then a cost model is fitted to each route by "
        "non-negative least squares of relative errors, and the profile is written: coefficients, "
        "how far the fit is off on average and at worst, device, driver, version and date.\n\n"
        "Measured points are kept in FILE.points as they come. A run that was interrupted goes on "
        "from there when the same command is given again; with all points there, it only fits.\n\n"
        "pkv explain shows what a profile predicts; pkv bench policy measures how good its choices "
        "are on batches that it has not seen.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(calibrate_options),
    .run = run,
};
