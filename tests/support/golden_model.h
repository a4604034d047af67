/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real model against the golden data of tests/golden, by the rules that its README states: the
 * exact mode against an independent float32 reference, the fast mode within what quantised
 * activations may cost.
 */
#ifndef PKV_TEST_GOLDEN_MODEL_H
#define PKV_TEST_GOLDEN_MODEL_H

#include <jansson.h>

#include "support/forward_runner.h"

#define GOLDEN_MOST_TOKENS 640

/* True under a sanitizer or without optimisation: one prompt then. */
extern const bool golden_few;

typedef struct golden_model {
  const char *path;
  int32_t most_tokens; /* at most GOLDEN_MOST_TOKENS */
  pkv_model *model;    /* NULL: not here */
  json_t *golden;
  int32_t vocab;
  float *logits; /* [most_tokens, vocab] */
} golden_model;

/* 0, also where the model file is not there; -1 when something else fails. */
int golden_model_open(golden_model *g, const char *path, const char *golden, int32_t most_tokens);
void golden_model_close(golden_model *g);
/* Skips the test where the model file is not there. */
void golden_model_need(const golden_model *g);
/* A runner for most_tokens tokens in two rows. */
void golden_model_start(forward_runner *r, const golden_model *g, pkv_compute compute, pkv_dtype kv,
                        int32_t chunk);
/*
 * A prompt with the reference's continuation behind it, in one pass; returns the steps.
 * *prompt_tokens is how many of ids [GOLDEN_MOST_TOKENS] are the prompt's; logits row
 * prompt_tokens - 1 + s belongs to step s.
 */
int32_t golden_model_forced(const golden_model *g, forward_runner *r, const json_t *item,
                            int32_t *ids, int32_t *prompt_tokens);

/* The tests, for every prompt. */
void golden_model_exact(golden_model *g);
void golden_model_fast(golden_model *g);

#endif
