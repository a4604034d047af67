/* SPDX-License-Identifier: Apache-2.0 */
#include "server/serving_times.h"

#include "base/status.h"

static const double first_bounds[] = {0.001, 0.005, 0.01, 0.02,  0.04,  0.06,  0.08, 0.1,
                                      0.25,  0.5,   0.75, 1.0,   2.5,   5.0,   7.5,  10.0,
                                      20.0,  40.0,  80.0, 160.0, 640.0, 2560.0};
static const double gap_bounds[] = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,  0.3,  0.4, 0.5,
                                    0.75, 1.0,   2.5,  5.0,   7.5, 10.0, 20.0, 40.0, 80.0};
static const double whole_bounds[] = {0.3,  0.5,   0.8,   1.0,   1.5,   2.0,    2.5,
                                      5.0,  10.0,  15.0,  20.0,  30.0,  40.0,   50.0,
                                      60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0};
static const double token_bounds[] = {1,   2,    5,    10,   20,    50,    100,   200,
                                      500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};
static const double row_bounds[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512};
static const double n_bounds[] = {1, 2, 5, 10, 20};
static const double step_bounds[] = {0, 1, 2, 3, 5};

#define BOUNDS(array) (array), (int)(sizeof(array) / sizeof *(array))

static const struct {
  const char *name, *help;
  const double *bounds;
  int count;
} measures[PKV_MEASURES] = {
    [PKV_MEASURE_TTFT] = {"time_to_first_token_seconds", "Arrival to first token",
                          BOUNDS(first_bounds)},
    [PKV_MEASURE_ITL] = {"inter_token_latency_seconds", "Between two tokens of an answer",
                         BOUNDS(gap_bounds)},
    [PKV_MEASURE_TPOT] = {"request_time_per_output_token_seconds",
                          "Mean time between the tokens of an answer", BOUNDS(gap_bounds)},
    [PKV_MEASURE_E2E] = {"e2e_request_latency_seconds", "Arrival to the end of an answer",
                         BOUNDS(whole_bounds)},
    [PKV_MEASURE_QUEUE] = {"request_queue_time_seconds", "Arrival to the first step that computes",
                           BOUNDS(whole_bounds)},
    [PKV_MEASURE_PREFILL] = {"request_prefill_time_seconds", "First step to first token",
                             BOUNDS(whole_bounds)},
    [PKV_MEASURE_INFERENCE] = {"request_inference_time_seconds", "First step to last token",
                               BOUNDS(whole_bounds)},
    [PKV_MEASURE_DECODE] = {"request_decode_time_seconds", "First token to last",
                            BOUNDS(whole_bounds)},
    [PKV_MEASURE_PROMPT_TOKENS] = {"request_prompt_tokens", "Prompt tokens of an ended answer",
                                   BOUNDS(token_bounds)},
    [PKV_MEASURE_GENERATION_TOKENS] = {"request_generation_tokens", "Generated tokens of an answer",
                                       BOUNDS(token_bounds)},
    [PKV_MEASURE_MAX_TOKENS] = {"request_params_max_tokens", "max_tokens of an ended answer",
                                BOUNDS(token_bounds)},
    [PKV_MEASURE_N] = {"request_params_n", "n of an ended request", BOUNDS(n_bounds)},
    [PKV_MEASURE_ITERATION_TOKENS] = {"iteration_tokens_total",
                                      "Prefill and decode tokens of a step", BOUNDS(token_bounds)},
    [PKV_MEASURE_DECODE_ROWS] = {"decode_rows_per_step", "Decoding rows of a step that has any",
                                 BOUNDS(row_bounds)},
    [PKV_MEASURE_CANCEL_STEPS] = {"cancel_steps",
                                  "Steps that began between a hang-up and its request's end",
                                  BOUNDS(step_bounds)},
};

void pkv_histogram_add(pkv_histograms *h, pkv_measure what, double value) {
  pkv_histogram *const one = &h->of[what];
  int i = 0;
  while (i < measures[what].count && value > measures[what].bounds[i])
    i++;
  one->counts[i]++;
  one->count++;
  one->sum += value;
}

const char *pkv_measure_name(pkv_measure what) {
  return measures[what].name;
}

const double *pkv_measure_bounds(int *count, pkv_measure what) {
  *count = measures[what].count;
  return measures[what].bounds;
}

pkv_status pkv_histograms_print(pkv_buffer *out, const pkv_histograms *h, pkv_error *err) {
  for (int m = 0; m < PKV_MEASURES; m++) {
    const pkv_histogram *const one = &h->of[m];
    const char *const name = measures[m].name;
    long long below = 0;
    PKV_TRY(pkv_buffer_printf(out, err, "# HELP pkv_%s %s\n# TYPE pkv_%s histogram\n", name,
                              measures[m].help, name));
    for (int i = 0; i < measures[m].count; i++) {
      below += one->counts[i];
      PKV_TRY(pkv_buffer_printf(out, err, "pkv_%s_bucket{le=\"%g\"} %lld\n", name,
                                measures[m].bounds[i], below));
    }
    PKV_TRY(pkv_buffer_printf(out, err,
                              "pkv_%s_bucket{le=\"+Inf\"} %lld\npkv_%s_sum %.15g\n"
                              "pkv_%s_count %lld\n",
                              name, (long long)one->count, name, one->sum, name,
                              (long long)one->count));
  }
  return PKV_OK;
}
