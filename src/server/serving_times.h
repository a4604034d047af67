/* SPDX-License-Identifier: Apache-2.0 */
/* Histograms of what serving takes, with the bounds and meanings of vLLM's metrics. */
#ifndef PKV_SERVER_SERVING_TIMES_H
#define PKV_SERVER_SERVING_TIMES_H

#include "base/text.h"

#define PKV_BUCKETS 24

typedef enum pkv_measure {
  PKV_MEASURE_TTFT,      /* arrival to first token */
  PKV_MEASURE_ITL,       /* between two tokens of an answer */
  PKV_MEASURE_TPOT,      /* mean of those of one answer */
  PKV_MEASURE_E2E,       /* arrival to the end */
  PKV_MEASURE_QUEUE,     /* arrival to the first step that worked on it */
  PKV_MEASURE_PREFILL,   /* from there to the first token */
  PKV_MEASURE_INFERENCE, /* from there to the last token */
  PKV_MEASURE_DECODE,    /* first token to last */
  PKV_MEASURE_PROMPT_TOKENS,
  PKV_MEASURE_GENERATION_TOKENS,
  PKV_MEASURE_MAX_TOKENS,
  PKV_MEASURE_N,
  PKV_MEASURE_ITERATION_TOKENS, /* prefill and decode tokens of a step */
  PKV_MEASURE_DECODE_ROWS,      /* decoding rows of a step that has any */
  PKV_MEASURE_CANCEL_STEPS,     /* steps that began between a hang-up and its request's end */
  PKV_MEASURES
} pkv_measure;

typedef struct pkv_histogram {
  int64_t counts[PKV_BUCKETS + 1]; /* of each bucket alone; the last: above all bounds */
  int64_t count;
  double sum;
} pkv_histogram;

typedef struct pkv_histograms {
  pkv_histogram of[PKV_MEASURES];
} pkv_histograms;

void pkv_histogram_add(pkv_histograms *h, pkv_measure what, double value);
/* The name in metrics, without prefix. */
const char *pkv_measure_name(pkv_measure what);
/* Upper bounds in order, *count of them (at most PKV_BUCKETS). */
const double *pkv_measure_bounds(int *count, pkv_measure what);
/* Prometheus text of all. */
pkv_status pkv_histograms_print(pkv_buffer *out, const pkv_histograms *h, pkv_error *err);

#endif
