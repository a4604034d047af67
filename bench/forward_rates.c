/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forward_rates: tokens a second of the forward pass alone (no tokenizer, no sampling): a prompt of
 * 512, then decoding 1, 4 and 16 sequences together. CPU time of the process by default, so that a
 * busy machine shows in it less than in wall time; times all threads, so use one with it.
 *
 *   forward_rates MODEL [threads [wall]]
 *
 * Built by hand against the static libraries and libtest_support.a.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "support/forward_runner.h"

#define PROMPT 512
#define STEPS  64
#define ROWS   16

static clockid_t clock_kind = CLOCK_PROCESS_CPUTIME_ID;

static double seconds(void) {
  struct timespec t;
  clock_gettime(clock_kind, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double prefill(forward_runner *r, const int32_t *ids, float *logits) {
  forward_runner_reset(r);
  const double start = seconds();
  forward_runner_feed(r, 0, ids, PROMPT, false, logits);
  return PROMPT / (seconds() - start);
}

static double decode(forward_runner *r, const int32_t *ids, float *logits, int32_t rows) {
  forward_runner_reset(r);
  for (int32_t i = 0; i < rows; i++)
    forward_runner_feed(r, i, ids + i, 4, false, logits);
  const double start = seconds();
  for (int32_t i = 0; i < STEPS; i++)
    forward_runner_step(r, ids + i, rows, logits);
  return STEPS * rows / (seconds() - start);
}

int main(int argc, char **argv) {
  pkv_model *model = NULL;
  pkv_error err = {0};
  int32_t ids[PROMPT];
  if (argc < 2 || pkv_model_open(&model, argv[1], NULL, &err) != PKV_OK) {
    fprintf(stderr, "forward_rates MODEL [threads [wall]] %s\n", err.text);
    return 1;
  }
  if (argc > 3 && strcmp(argv[3], "wall") == 0) clock_kind = CLOCK_MONOTONIC;
  const int32_t vocab = pkv_model_hparams(model)->vocab;
  const forward_runner_options options = {.threads =
                                              argc > 2 ? (int32_t)strtol(argv[2], NULL, 10) : 1,
                                          .compute = PKV_COMPUTE_I8,
                                          .kv_dtype = PKV_DTYPE_F16,
                                          .rows = ROWS,
                                          .max_seq_len = PROMPT,
                                          .max_tokens = PROMPT};
  forward_runner r;
  if (forward_runner_init(&r, model, &options) != 0) return 1;
  float *logits = malloc((size_t)ROWS * (size_t)vocab * sizeof *logits);
  for (int32_t i = 0; i < PROMPT; i++)
    ids[i] = i * 7919 % vocab;
  for (int round = 0; round < 3; round++) {
    printf("%s prompt %.1f decode %.1f", pkv_isa_name(pkv_executor_isa(r.executor)),
           prefill(&r, ids, logits), decode(&r, ids, logits, 1));
    printf(" of 4 %.1f of 16 %.1f tokens/s\n", decode(&r, ids, logits, 4),
           decode(&r, ids, logits, 16));
    fflush(stdout);
  }
  forward_runner_deinit(&r);
  pkv_model_close(model);
  free(logits);
  return 0;
}
