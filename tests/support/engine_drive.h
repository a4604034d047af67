/* SPDX-License-Identifier: Apache-2.0 */
/* Drives an engine for tests: submits requests, collects what each was answered, checks the rules
 * that every sequence of events obeys. */
#ifndef PKV_TEST_ENGINE_DRIVE_H
#define PKV_TEST_ENGINE_DRIVE_H

#include <stdbool.h>

#include "pkv/engine.h"
#include "support/small_llama.h"

#define DRIVE_TOKENS 1400

typedef struct drive_answer {
  int64_t id;
  int32_t count; /* events with a token */
  int32_t tokens[DRIVE_TOKENS];
  float logprobs[DRIVE_TOKENS];
  int32_t positions[DRIVE_TOKENS];
  uint64_t tops;         /* a hash of all best alternatives, bit by bit */
  int32_t prompt_events; /* how many of them echo the prompt */
  pkv_finish finish;
  int32_t choice, cached_tokens, preemptions, stop_index, stop_bytes; /* of the last event */
  struct drive_answer *choices;                                       /* of the request, [n] */
} drive_answer;

/* Fails the test with the error's text unless status is PKV_OK. */
void drive_ok(pkv_status status, const pkv_error *err, const char *what);
/* Opens a small model; *bytes hold it, and outlive it (gguf_build_drop). */
pkv_model *drive_model(unsigned char **bytes, const small_llama *t);
/* One that a device takes: heads of 64, F16, contexts of 256 tokens. */
small_llama drive_device_llama(int32_t layers, int32_t vocab);
pkv_engine *drive_engine(const pkv_model *model, const pkv_engine_options *options);
/* `count` random tokens below `vocab`. */
void drive_prompt(int32_t *tokens, int32_t count, int32_t vocab, uint64_t seed);
/* Submits; the answer is the request's user pointer. */
void drive_submit(pkv_engine *engine, const pkv_request *request, drive_answer *answer);
/* The same with an answer for each of `n` choices. */
void drive_submit_choices(pkv_engine *engine, const pkv_request *request, drive_answer *answers,
                          int32_t n);
/* One step, events sorted into their answers; returns their number. */
size_t drive_step(pkv_engine *engine);
/* A step that may fail; what it gave is sorted the same way. */
pkv_status drive_try_step(size_t *count, pkv_engine *engine, pkv_error *err);
/* Steps until nothing is pending; fails when that takes more than `limit`. Returns the steps. */
int64_t drive_all(pkv_engine *engine, int64_t limit);
/* Fails unless tokens, log-probabilities (bit by bit, alternatives too) and ends are equal. */
void drive_equal(const drive_answer *a, const drive_answer *b, const char *what);
/* The answer's text, with a zero behind it; its bytes. Fails where they do not fit. */
size_t drive_text(char *out, size_t size, const pkv_model *model, const drive_answer *answer);
/* Destroys the engine after checking that it is idle with every page free. */
void drive_finish(pkv_engine *engine);

#endif
