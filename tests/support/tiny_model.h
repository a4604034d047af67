/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A random llama model in memory: small enough that a test can afford thousands of steps, with any
 * shape, and with rows that are wrong on purpose.
 */
#ifndef PKV_TEST_TINY_MODEL_H
#define PKV_TEST_TINY_MODEL_H

#include "model/model.h"

typedef struct tiny_model_options {
  uint64_t seed;
  int32_t layers, query_heads, kv_heads, head_dim, feed_forward, vocab, context;
  int32_t eos;       /* end token, -1 = the file has no tokenizer */
  int32_t padding;   /* this many ids at the end of the vocabulary are unused (with a tokenizer) */
  int32_t nan_token; /* its embedding is NaN, -1 = none */
  float spread;      /* of the logits: larger is more certain */
  int32_t spelled;   /* 1: tokens spell text (TINY_SPELLED); else they are w0, w1, ... */
} tiny_model_options;
#define TINY_MODEL_INIT                                                                            \
  { 1, 2, 3, 1, 16, 64, 320, 2048, -1, 0, -1, 2.0f, 0 }

/* Of a vocabulary that spells: ids below are one character of ASCII ('!' on), the next two the
   bytes of an e with an acute accent; later ones are words as ever. */
#define TINY_SPELLED 94

typedef struct tiny_model {
  pkv_model *model;
  unsigned char *bytes;
} tiny_model;

/* A failure fails the test. */
void tiny_model_open(tiny_model *out, const tiny_model_options *options);
void tiny_model_close(tiny_model *model);

#endif
