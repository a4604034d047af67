/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/policy_batches.h"

#include <math.h>
#include <string.h>

#include "base/rng.h"

#define LEAST_TOKENS   256
#define MOST_ROW       131072
#define REQUESTS_A_ROW 3

const int32_t policy_rows[POLICY_ROWS] = {1, 2, 4, 8, 16, 32, 64};
/* None of policy_rows; 3 counts twice, as what is below it is judged, too. */
static const int32_t fit_rows[] = {3, 3, 5, 6, 10, 12, 20, 24, 40, 48, 96};
static const char *const mixes[] = {"equal", "uniform", "bimodal", "one_long", "zipf"};

/* How long a row is against the others. */
static double weight(pkv_rng *rng, int32_t mix, int32_t row) {
  const double u = pkv_rng_uniform(rng);
  switch (mix) {
  case 0:
    return 1;
  case 1:
    return 0.1 + 0.9 * u;
  case 2:
    return row % 4 == 0 ? 5 + 5 * u : 0.5 + u;
  case 3:
    return row == 0 ? 20 + 40 * u : 0.5 + 0.5 * u;
  default:
    return 0.2 + 1 / sqrt(1 + floor(32 * u));
  }
}

/* Groups of rows whose first part is the same. */
static void share(bench_row *rows, int32_t count, pkv_rng *rng, int32_t page_tokens) {
  const int32_t group = (int32_t)pkv_rng_range(rng, 2, count > 16 ? 16 : count);
  const double part = 0.3 + 0.6 * pkv_rng_uniform(rng);
  for (int32_t first = 0; first < count; first += group) {
    int32_t least = INT32_MAX;
    const int32_t end = first + group < count ? first + group : count;
    for (int32_t r = first; r < end; r++)
      if (rows[r].length < least) least = rows[r].length;
    const int32_t tokens = (int32_t)(least * part) / page_tokens * page_tokens;
    for (int32_t r = first; r < end; r++) {
      rows[r].group_row = first;
      rows[r].group_tokens = tokens;
    }
  }
}

pkv_status policy_fit_batch(bench_cell *out, const char **mix, int32_t index, int64_t most_tokens,
                            int32_t page_tokens, pkv_error *err) {
  const int32_t choices = (int32_t)(sizeof fit_rows / sizeof *fit_rows);
  bench_row rows[128] = {{0}};
  double weights[128], all = 0;
  pkv_rng rng;
  pkv_rng_init(&rng, PKV_TRACE_SEED_CALIBRATION + (uint64_t)index * 1000003u);
  const int32_t count = fit_rows[pkv_rng_below(&rng, (uint64_t)choices)];
  const int32_t kind = index % 5;
  const double least = LEAST_TOKENS + 32.0 * count;
  const double tokens =
      least * pow((double)most_tokens / least, pkv_rng_uniform(&rng)); /* log-uniform */
  for (int32_t r = 0; r < count; r++)
    all += weights[r] = weight(&rng, kind, r);
  for (int32_t r = 0; r < count; r++) {
    const double length = floor(tokens * weights[r] / all);
    rows[r].length = length < 1 ? 1 : length > MOST_ROW ? MOST_ROW : (int32_t)length;
    rows[r].root_row = rows[r].group_row = r;
  }
  *mix = mixes[kind];
  if (index % 4 == 3 && count > 1) {
    share(rows, count, &rng, page_tokens);
    *mix = "shared";
  }
  const bench_cell_options options = {.page_tokens = page_tokens,
                                      .seed = PKV_TRACE_SEED_CALIBRATION + (uint64_t)index};
  memset(out, 0, sizeof *out);
  return bench_cell_rows(out, &options, rows, count, err);
}

/* The number of steps that have rows. */
static int32_t steps_of(const pkv_trace *trace) {
  int32_t count = 0;
  for (int32_t step = pkv_trace_next_step(trace, 0); step >= 0;
       step = pkv_trace_next_step(trace, step + 1))
    count++;
  return count;
}

pkv_status policy_trace_batch(bench_cell *out, const policy_trace *t, int32_t step, int32_t steps,
                              pkv_error *err) {
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
  pkv_trace *trace = NULL;
  bench_row rows[64] = {{0}};
  int32_t request[64], lengths[64];
  memset(out, 0, sizeof *out);
  PKV_CHECK(err, t->active >= 1 && t->active <= 64, PKV_E_RANGE, "%d active rows", t->active);
  options.kind = t->kind;
  options.seed = t->seed;
  options.max_active = t->active;
  options.page_tokens = t->page_tokens;
  options.requests = t->requests > 0 ? t->requests : REQUESTS_A_ROW * t->active;
  PKV_TRY(pkv_trace_create(&trace, &options, err));
  int32_t all = steps_of(trace);
  if (t->most_steps > 0 && all > t->most_steps) all = t->most_steps;
  int32_t at = pkv_trace_next_step(trace, 0);
  for (int64_t skip = (2 * (int64_t)step + 1) * all / (2 * (int64_t)steps); skip > 0; skip--)
    at = pkv_trace_next_step(trace, at + 1);
  const int32_t count = pkv_trace_step(request, lengths, trace, at);
  pkv_trace_destroy(trace);
  for (int32_t r = 0; r < count; r++) {
    rows[r].length = lengths[r] / t->divide > 0 ? lengths[r] / t->divide : 1;
    rows[r].root_row = rows[r].group_row = r;
  }
  const bench_cell_options cell = {.page_tokens = t->page_tokens, .seed = t->seed};
  return bench_cell_rows(out, &cell, rows, count, err);
}
