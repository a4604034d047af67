/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The text of one answer: whole characters, ended by stop strings also where these span tokens.
 * Text that may be the beginning of a stop string is held back until that is decided.
 */
#ifndef PKV_SERVER_ANSWER_H
#define PKV_SERVER_ANSWER_H

#include "server/text_stream.h"

/* A whole answer ends with an error beyond this; one that is streamed may be longer. */
#define PKV_ANSWER_BYTES ((size_t)16 << 20)

typedef struct pkv_stops {
  int32_t count;
  char text[PKV_MAX_STOPS][PKV_MAX_STOP_BYTES + 1]; /* none is empty */
} pkv_stops;

typedef struct pkv_answer {
  pkv_text_stream stream;
  size_t taken, ready; /* bytes handed out; bytes that may be: of what `stream` still holds */
  size_t dropped;      /* bytes of the answer before that: handed out long ago */
  bool stopped;        /* a stop string came: `ready` is the end */
} pkv_answer;

void pkv_answer_init(pkv_answer *answer, const pkv_model *model);
void pkv_answer_deinit(pkv_answer *answer);
/* Adds a token. After `stopped` is set, nothing more is added. */
pkv_status pkv_answer_token(pkv_answer *answer, const pkv_stops *stops, int32_t token,
                            pkv_error *err);
/* Adds a token of an echoed prompt: its text is ready at once, and no stop string is looked for. */
pkv_status pkv_answer_prompt(pkv_answer *answer, int32_t token, pkv_error *err);
/* Nothing more comes: all text is ready. */
pkv_status pkv_answer_end(pkv_answer *answer, const pkv_stops *stops, pkv_error *err);
/* What has become ready since the last call; valid until the answer changes. */
const char *pkv_answer_take(pkv_answer *answer, size_t *bytes);
/* Bytes of the answer so far; those of them that are ready. */
size_t pkv_answer_size(const pkv_answer *answer);
size_t pkv_answer_ready(const pkv_answer *answer);

#endif
