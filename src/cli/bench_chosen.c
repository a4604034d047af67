/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_chosen.h"

#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "cli/profile_file.h"
#include "cli/route_times.h"

typedef struct chosen {
  const bench_frame *frame;
  pkv_policy policy;
  pkv_route fixed;
  profile_file file;
  pkv_profile profile; /* the file's or the seed's device; routes: what is here */
  route_times times;
  int32_t batches;
  double sum, worst; /* regret */
} chosen;

/* The choice's kind; of flashinfer's two, where the policy does not say, the faster one. */
static int32_t kind_of(const pkv_choice *c, const route_time *times) {
  const route_time *cores = &times[PKV_COST_FLASHINFER_CORES];
  if (c->kind > 0) return c->kind;
  if (c->route == PKV_ROUTE_FLASHINFER && cores->done &&
      (!times[c->route].done || cores->attend_us < times[c->route].attend_us))
    return PKV_COST_FLASHINFER_CORES;
  return (int32_t)c->route;
}

/* What one of 32 layers costs, as policies are judged. */
static double layer_us(const chosen *b, const route_time *time) {
  return time->attend_us + time->plan_us / (b->profile.layers > 0 ? b->profile.layers : 32);
}

static pkv_status run_batch(chosen *b, const char *cell, const bench_batch *batch, pkv_error *err) {
  route_time times[PKV_COST_KINDS];
  pkv_choice c = PKV_CHOICE_INIT;
  int32_t best = 0;
  PKV_TRY(pkv_policy_choose(&c, b->policy, b->fixed, &b->times.o.shape, b->times.o.kv_dtype,
                            batch->rows, batch->lengths, &b->profile, err));
  b->times.o.splits = c.splits;
  const pkv_status status = route_times_run(&b->times, times, batch, err);
  if (status == PKV_E_LIMIT) {
    (void)printf("%-14s %5d  skipped: %s\n", cell, batch->rows, err->text);
    return PKV_OK;
  }
  PKV_TRY(status);
  const int32_t kind = kind_of(&c, times);
  const route_time *mine = &times[kind];
  PKV_CHECK(err, mine->done, PKV_E_UNSUPPORTED, "%s does not take a batch of %s",
            pkv_cost_kind_name(kind), cell);
  for (int32_t i = 1; i < PKV_COST_KINDS; i++)
    if (times[i].done && (best == 0 || layer_us(b, &times[i]) < layer_us(b, &times[best])))
      best = i;
  const double regret = layer_us(b, mine) / layer_us(b, &times[best]) - 1;
  b->sum += regret;
  if (regret > b->worst) b->worst = regret;
  b->batches++;
  (void)printf("%-14s %5d  %-16s %10.1f %9.1f %10.1f  %-16s %10.1f %8.1f%%\n", cell, batch->rows,
               pkv_cost_kind_name(kind), mine->attend_us, mine->plan_us, mine->wall_us,
               pkv_cost_kind_name(best), layer_us(b, &times[best]), regret * 100);
  (void)printf("  %s\n", c.reason);
  return PKV_OK;
}

static pkv_status run_cells(chosen *b, pkv_error *err) {
  (void)printf("%s, %s\n", b->times.device, b->times.driver);
  if (b->times.no_flashinfer[0] != '\0')
    (void)printf("flashinfer is not here: %s\n", b->times.no_flashinfer);
  (void)printf("%-14s %5s  %-16s %10s %9s %10s  %-16s %10s %9s\n", "cell", "rows", "chosen",
               "attend us", "plan us", "wall us", "fastest", "layer us", "regret");
  for (int32_t i = 0; i < b->frame->cells; i++) {
    bench_cell cell;
    pkv_status status = bench_cell_make(&cell, &b->frame->cell_options, i, err);
    for (int32_t step = 0; step < cell.count && status == PKV_OK; step++) {
      status = run_batch(b, cell.name, &cell.batches[step], err);
      if (status == PKV_OK && pkv_cli_interrupted())
        status = PKV_FAIL(err, PKV_E_STATE, "interrupted");
    }
    bench_cell_free(&cell);
    PKV_TRY(status);
  }
  if (b->batches > 0)
    (void)printf("regret %.2f%% on average, %.1f%% at worst, of %d batches\n",
                 b->sum / b->batches * 100, b->worst * 100, b->batches);
  return PKV_OK;
}

static pkv_status prepare(chosen *b, pkv_error *err) {
  const bench_options *o = b->frame->o;
  int64_t threads = 0, most = 1;
  PKV_TRY(policy_from_word(&b->policy, &b->fixed, o->policy, err));
  PKV_CHECK(err, o->profile || b->policy != PKV_POLICY_CALIBRATED, PKV_E_INVALID,
            "policy calibrated needs --profile: see pkv calibrate");
  PKV_CHECK(err, pkv_parse_i64(&threads, o->threads, 0, 1024), PKV_E_INVALID,
            "--policy takes one number of --threads, not '%s'", o->threads);
  b->profile = (pkv_profile)PKV_PROFILE_INIT;
  if (o->profile) {
    PKV_TRY(profile_file_load(&b->file, o->profile, err));
    b->profile = b->file.profile;
  }
  for (int32_t i = 0; i < b->frame->cells; i++) {
    bench_cell cell;
    const pkv_status status = bench_cell_make(&cell, &b->frame->cell_options, i, err);
    const int64_t tokens = bench_cell_pages(&cell) * o->page_tokens;
    if (tokens > most) most = tokens;
    bench_cell_free(&cell);
    PKV_TRY(status);
  }
  const bool cuda = o->device == PKV_DEVICE_CUDA;
  const route_times_options t = {.cli = b->frame->cli,
                                 .device = o->device,
                                 .threads = (int32_t)threads,
                                 .repeats = o->repeats > 0 ? o->repeats
                                            : cuda         ? 5
                                                           : 3,
                                 .memory_mib = o->memory_mib,
                                 .most_tokens = most,
                                 .shape = b->frame->shape,
                                 .kv_dtype = (pkv_dtype)o->dtype,
                                 .cpu_time = o->cpu_time != 0,
                                 .flashinfer = o->flashinfer};
  PKV_TRY(route_times_open(&b->times, &t, err));
  b->profile.routes = b->profile.routes != 0 ? b->profile.routes & b->times.profile.routes
                                             : b->times.profile.routes;
  return PKV_OK;
}

pkv_status bench_chosen_run(const bench_frame *frame, pkv_error *err) {
  chosen b;
  memset(&b, 0, sizeof b);
  b.frame = frame;
  pkv_status status = prepare(&b, err);
  if (status == PKV_OK) status = run_cells(&b, err);
  route_times_close(&b.times);
  return status;
}
