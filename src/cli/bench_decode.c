/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_decode.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/rng.h"
#include "base/sort.h"
#include "base/status.h"
#include "cli/command.h"

#define WAITS 8 /* steps that prompts may take beyond full chunks */

/* An engine for one cell, and how many tokens each of its sequences has got. */
typedef struct bench_driver {
  pkv_engine *engine;
  pkv_event *events; /* [rows] */
  int32_t *got;      /* [rows] */
  int64_t *ids;      /* [rows] requests */
  int32_t *prompt;   /* [prompt_tokens], random */
  int32_t rows, prompt_tokens;
  int64_t made; /* tokens since the counter was last cleared */
} bench_driver;

static void driver_close(bench_driver *d) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_engine_destroy(d->engine);
  pkv_free(&a, d->events, (size_t)d->rows * sizeof *d->events);
  pkv_free(&a, d->got, (size_t)d->rows * sizeof *d->got);
  pkv_free(&a, d->ids, (size_t)d->rows * sizeof *d->ids);
  pkv_free(&a, d->prompt, (size_t)d->prompt_tokens * sizeof *d->prompt);
}

/* An engine for `rows` sequences of up to `longest` tokens; close it also after a failure. */
static pkv_status driver_open(bench_driver *d, const bench_subject *s, int32_t rows, int64_t prompt,
                              int64_t longest, int64_t cache_tokens, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  memset(d, 0, sizeof *d);
  PKV_CHECK(err, longest <= s->context, PKV_E_LIMIT,
            "sequences of %lld tokens are asked for, the model's context is %d", (long long)longest,
            (int)s->context);
  d->rows = rows;
  d->prompt_tokens = (int32_t)prompt;
  d->events = pkv_alloc(&a, (size_t)rows * sizeof *d->events);
  d->got = pkv_alloc_zeroed(&a, (size_t)rows, sizeof *d->got);
  d->ids = pkv_alloc_zeroed(&a, (size_t)rows, sizeof *d->ids);
  d->prompt = pkv_alloc(&a, (size_t)prompt * sizeof *d->prompt);
  PKV_CHECK(err, d->events && d->got && d->ids && d->prompt, PKV_E_NOMEM,
            "no memory for %d sequences", (int)rows);
  pkv_engine_options options = s->options;
  options.max_rows = rows;
  options.max_requests = rows;
  options.max_seq_len = (int32_t)longest;
  options.cache_tokens = cache_tokens;
  return pkv_engine_create(&d->engine, s->model, &options, err);
}

static void draw_tokens(int32_t *to, int32_t count, const bench_subject *s, uint64_t stream) {
  pkv_rng rng;
  pkv_rng_init(&rng, s->seed + stream);
  for (int32_t i = 0; i < count; i++)
    to[i] = (int32_t)pkv_rng_below(&rng, (uint64_t)s->vocab);
}

static void draw_prompt(const bench_driver *d, const bench_subject *s, uint64_t stream) {
  draw_tokens(d->prompt, d->prompt_tokens, s, stream);
}

static pkv_status submit(bench_driver *d, int32_t row, int32_t answer, pkv_error *err) {
  pkv_request request = PKV_REQUEST_INIT;
  request.prompt = d->prompt;
  request.prompt_tokens = d->prompt_tokens;
  request.max_tokens = answer;
  request.ignore_end = 1;
  request.user = &d->got[row];
  d->got[row] = 0;
  return pkv_engine_submit(&d->ids[row], d->engine, &request, err);
}

static pkv_status step(bench_driver *d, pkv_error *err) {
  size_t count = 0;
  PKV_CHECK(err, !pkv_cli_interrupted(), PKV_E_STATE, "interrupted");
  PKV_TRY(pkv_engine_step(d->events, (size_t)d->rows, &count, d->engine, err));
  for (size_t i = 0; i < count; i++) {
    PKV_CHECK(err, d->events[i].finish != PKV_FINISH_ERROR, PKV_E_INTERNAL,
              "the model's output is not finite: damaged weights?");
    if (d->events[i].token < 0) continue;
    ++*(int32_t *)d->events[i].user;
    d->made++;
  }
  return PKV_OK;
}

/* Steps until sequence `row` has got `tokens`. */
static pkv_status step_until(bench_driver *d, int32_t row, int32_t tokens, pkv_error *err) {
  while (d->got[row] < tokens) {
    PKV_CHECK(err, pkv_engine_pending(d->engine) > 0, PKV_E_INTERNAL,
              "a sequence ended after %d of %d tokens", (int)d->got[row], (int)tokens);
    PKV_TRY(step(d, err));
  }
  return PKV_OK;
}

static pkv_status drain(bench_driver *d, pkv_error *err) {
  while (pkv_engine_pending(d->engine) > 0)
    PKV_TRY(step(d, err));
  return PKV_OK;
}

static double rate(int64_t tokens, int64_t since_ns) {
  const int64_t ns = pkv_clock_ns() - since_ns;
  return (double)tokens / ((double)(ns > 0 ? ns : 1) * 1e-9);
}

/* Repetition -1 is the unrecorded one. */
static void record(bench_figure *out, int32_t repetition, double value) {
  if (repetition >= 0) out->sample[out->count++] = value;
}

static void figure_init(bench_figure *out, const char *unit) {
  memset(out, 0, sizeof *out);
  out->unit = unit;
}

static pkv_status run_prefill(bench_figure *out, bench_driver *d, const bench_subject *s,
                              pkv_error *err) {
  for (int32_t i = -1; i < s->repeats; i++) {
    draw_prompt(d, s, (uint64_t)(i + 1));
    const int64_t begin = pkv_clock_ns();
    PKV_TRY(submit(d, 0, 1, err));
    PKV_TRY(drain(d, err));
    record(out, i, rate(d->prompt_tokens, begin));
  }
  return PKV_OK;
}

pkv_status bench_prefill(bench_figure *out, const bench_subject *subject, int32_t prompt,
                         pkv_error *err) {
  bench_driver d;
  figure_init(out, "tokens/s");
  (void)snprintf(out->cell, sizeof out->cell, "pp%d", (int)prompt);
  const int64_t longest = (int64_t)prompt + 1;
  pkv_status status = driver_open(&d, subject, 1, prompt, longest, longest, err);
  if (status == PKV_OK) status = run_prefill(out, &d, subject, err);
  driver_close(&d);
  return status;
}

/* A prompt of one token, whose step counts like the others. */
static pkv_status run_generate(bench_figure *out, bench_driver *d, const bench_subject *s,
                               int32_t tokens, pkv_error *err) {
  for (int32_t i = -1; i < s->repeats; i++) {
    draw_prompt(d, s, (uint64_t)(i + 1));
    const int64_t begin = pkv_clock_ns();
    PKV_TRY(submit(d, 0, tokens, err));
    PKV_TRY(drain(d, err));
    record(out, i, rate(tokens, begin));
  }
  return PKV_OK;
}

/*
 * The prompt is computed once: each repetition's sequence takes over the pages of the one before,
 * which has one token left to make when the next comes and ends in that step.
 */
static pkv_status run_deep(bench_figure *out, bench_driver *d, const bench_subject *s,
                           int32_t tokens, pkv_error *err) {
  draw_prompt(d, s, 0);
  PKV_TRY(submit(d, 1, 3, err));
  PKV_TRY(step_until(d, 1, 2, err)); /* the unrecorded run */
  for (int32_t i = 0; i < s->repeats; i++) {
    const int32_t row = i % 2;
    PKV_TRY(submit(d, row, tokens + 2, err));
    PKV_TRY(step_until(d, row, 1, err));
    PKV_CHECK(err, pkv_engine_pending(d->engine) == 1, PKV_E_INTERNAL,
              "%d sequences run where one should", (int)pkv_engine_pending(d->engine));
    const int64_t begin = pkv_clock_ns();
    PKV_TRY(step_until(d, row, tokens + 1, err));
    record(out, i, rate(tokens, begin));
  }
  return drain(d, err);
}

pkv_status bench_generate(bench_figure *out, const bench_subject *subject, int32_t tokens,
                          int32_t depth, pkv_error *err) {
  bench_driver d;
  pkv_status status;
  figure_init(out, "tokens/s");
  if (depth == 0) {
    const int64_t longest = (int64_t)tokens + 1;
    (void)snprintf(out->cell, sizeof out->cell, "tg%d", (int)tokens);
    status = driver_open(&d, subject, 1, 1, longest, longest, err);
    if (status == PKV_OK) status = run_generate(out, &d, subject, tokens, err);
  } else {
    const int64_t longest = (int64_t)depth + tokens + 2;
    /* Beside the prompt's: what two sequences add, and what admission keeps free. */
    const int64_t beside = 2 * (int64_t)tokens + 16 * (int64_t)subject->options.page_tokens;
    (void)snprintf(out->cell, sizeof out->cell, "tg%d@d%d", (int)tokens, (int)depth);
    status = driver_open(&d, subject, 2, depth, longest, longest + beside, err);
    if (status == PKV_OK) status = run_deep(out, &d, subject, tokens, err);
  }
  driver_close(&d);
  return status;
}

/* Prompt tokens that are computed: those of a group once. */
static int64_t crowd_prompts(const bench_crowd *c) {
  const bool grouped = c->groups > 0 && c->groups < c->sequences;
  const int64_t prompts = grouped ? c->groups : c->sequences;
  return prompts * c->prompt + (int64_t)c->sequences * c->suffix;
}

/* Tokens asked for: no sequence may end while the last is being prefilled. */
static int64_t crowd_answer(const bench_crowd *c, const bench_subject *s) {
  const int64_t chunk = s->options.prefill_chunk > 0 ? s->options.prefill_chunk : 512;
  return c->tokens + crowd_prompts(c) / chunk + WAITS + c->groups;
}

int64_t bench_crowd_longest(const bench_crowd *c, const bench_subject *subject) {
  return (int64_t)c->prompt + c->suffix + crowd_answer(c, subject);
}

static void draw_crowd(const bench_driver *d, const bench_subject *s, const bench_crowd *c,
                       int32_t repetition, int32_t row) {
  const uint64_t first = (uint64_t)(repetition + 1) * 4096u;
  const int32_t group = c->groups > 0 ? row % c->groups : row;
  draw_tokens(d->prompt, c->prompt, s, first + (uint64_t)group);
  draw_tokens(d->prompt + c->prompt, c->suffix, s, first + 2048u + (uint64_t)row);
}

static pkv_status together_once(bench_figure out[2], bench_driver *d, const bench_subject *s,
                                const bench_crowd *crowd, int32_t answer, int32_t repetition,
                                pkv_error *err) {
  const int64_t begin = pkv_clock_ns();
  for (int32_t row = 0; row < crowd->sequences; row++) {
    draw_crowd(d, s, crowd, repetition, row);
    PKV_TRY(submit(d, row, answer, err));
  }
  for (int32_t row = 0; row < crowd->sequences; row++)
    PKV_TRY(step_until(d, row, 1, err));
  record(&out[0], repetition, rate(crowd_prompts(crowd), begin));
  d->made = 0;
  const int64_t decode_begin = pkv_clock_ns();
  for (int32_t i = 0; i < crowd->tokens; i++)
    PKV_TRY(step(d, err));
  const double speed = rate(d->made, decode_begin);
  PKV_CHECK(err, d->made == (int64_t)crowd->tokens * crowd->sequences, PKV_E_INTERNAL,
            "%d steps of %d sequences made %lld tokens", (int)crowd->tokens, (int)crowd->sequences,
            (long long)d->made);
  record(&out[1], repetition, speed);
  for (int32_t row = 0; row < crowd->sequences; row++)
    pkv_engine_cancel(d->engine, d->ids[row]); /* their answers go on past what is measured */
  return drain(d, err);
}

static void name_crowd(bench_figure *out, char kind, const bench_crowd *c) {
  char suffix[16] = "", groups[16] = "";
  if (c->suffix > 0) (void)snprintf(suffix, sizeof suffix, "+%d", (int)c->suffix);
  if (c->groups == 1) (void)snprintf(groups, sizeof groups, "s");
  if (c->groups > 1) (void)snprintf(groups, sizeof groups, "g%d", (int)c->groups);
  figure_init(out, "tokens/s");
  if (kind == 'p')
    (void)snprintf(out->cell, sizeof out->cell, "pp%d%sx%d%s", (int)c->prompt, suffix,
                   (int)c->sequences, groups);
  else
    (void)snprintf(out->cell, sizeof out->cell, "tg%dx%d%s", (int)c->tokens, (int)c->sequences,
                   groups);
}

pkv_status bench_together(bench_figure out[2], const bench_subject *subject,
                          const bench_crowd *crowd, pkv_error *err) {
  bench_driver d;
  const bench_crowd *const c = crowd;
  const int64_t answer = crowd_answer(c, subject);
  const int64_t page = subject->options.page_tokens, prompt = (int64_t)c->prompt + c->suffix;
  name_crowd(&out[0], 'p', c);
  name_crowd(&out[1], 't', c);
  const int64_t own = c->suffix + answer + 4 * page; /* of each */
  const int64_t cache = crowd_prompts(c) + c->sequences * own;
  pkv_status status = driver_open(&d, subject, c->sequences, prompt, prompt + answer, cache, err);
  for (int32_t i = -1; i < subject->repeats && status == PKV_OK; i++)
    status = together_once(out, &d, subject, c, (int32_t)answer, i, err);
  driver_close(&d);
  return status;
}

double bench_figure_quantile(const bench_figure *figure, double share) {
  double sorted[PKV_BENCH_MAX_REPEATS];
  if (figure->count == 0) return 0.0;
  memcpy(sorted, figure->sample, (size_t)figure->count * sizeof *sorted);
  pkv_sort_doubles(sorted, (size_t)figure->count);
  const double at = share * (figure->count - 1);
  const int32_t low = (int32_t)at;
  if (low + 1 >= figure->count) return sorted[figure->count - 1];
  return sorted[low] + (at - low) * (sorted[low + 1] - sorted[low]);
}
