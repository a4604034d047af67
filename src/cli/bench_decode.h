/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `pkv bench model` times: a model's prefill and decode through the engine, on random tokens,
 * and the start of a fresh process.
 *
 * Times are of whole engine steps: batch, forward, the choice of the likeliest token, events. What
 * comes before (opening the model, creating the engine, filling the cache to a depth) is not in
 * them, and one unrecorded run precedes the first repetition of a cell.
 */
#ifndef PKV_CLI_BENCH_DECODE_H
#define PKV_CLI_BENCH_DECODE_H

#include "pkv/engine.h"

#define PKV_BENCH_MAX_REPEATS 101

/* One row of the result: a figure and all its repetitions, in the order they were taken in. */
typedef struct bench_figure {
  char cell[48];
  const char *unit; /* "tokens/s", "s", "MB" */
  int32_t count;
  double sample[PKV_BENCH_MAX_REPEATS];
} bench_figure;

typedef struct bench_subject {
  const pkv_model *model;
  pkv_engine_options options; /* threads, types, page; sizes are set for each cell */
  int32_t vocab, context, repeats;
  uint64_t seed; /* of the tokens */
} bench_subject;

/* "pp512": a prompt of that many tokens, up to its first answer token. */
pkv_status bench_prefill(bench_figure *out, const bench_subject *subject, int32_t prompt,
                         pkv_error *err);
/* "tg64", "tg64@d2048": one sequence, so many tokens from an empty cache or behind that many. */
pkv_status bench_generate(bench_figure *out, const bench_subject *subject, int32_t tokens,
                          int32_t depth, pkv_error *err);
/* `sequences` prompts of `prompt` tokens, then `tokens` more for each of them together. Sequence i
   has the prompt of group i % groups, and `suffix` tokens of its own behind it. */
typedef struct bench_crowd {
  int32_t sequences, prompt, tokens;
  int32_t groups; /* 0: as many as there are sequences */
  int32_t suffix;
} bench_crowd;

/* Tokens that the longest sequence may have. */
int64_t bench_crowd_longest(const bench_crowd *crowd, const bench_subject *subject);
/*
 * Two rows: "pp128x8", prompt tokens a second until the last has its first token (a shared prompt
 * counts once), and "tg32x8", tokens of all a second from then on. One group adds "s" to either,
 * more groups "g" and their number.
 */
pkv_status bench_together(bench_figure out[2], const bench_subject *subject,
                          const bench_crowd *crowd, pkv_error *err);
/*
 * `pkv run` of `model` in a process of its own, `repeats` times: seconds from its start to the
 * first byte of the answer, and the most memory it held (the mapped weights it touched included).
 */
pkv_status bench_start(bench_figure out[2], const char *model, int32_t threads, int32_t repeats,
                       pkv_error *err);
/* The most memory that this process has held so far, in MB. */
double bench_peak_memory(void);

/* Of a figure's repetitions: the value with `share` of them below, between neighbours linearly. */
double bench_figure_quantile(const bench_figure *figure, double share);

#endif
