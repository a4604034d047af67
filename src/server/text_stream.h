/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokens in, well-formed UTF-8 out. Bytes of a sequence that is not complete yet are held back;
 * bytes that can never be part of one come out as U+FFFD. What a stream has written in pieces is
 * what it would have written at once.
 */
#ifndef PKV_SERVER_TEXT_STREAM_H
#define PKV_SERVER_TEXT_STREAM_H

#include "base/text.h"
#include "pkv/engine.h"

typedef struct pkv_text_stream {
  const pkv_model *model;
  pkv_buffer text; /* everything so far, well-formed */
  size_t taken;    /* bytes of text that the caller has taken */
  char held[4];    /* the beginning of a sequence */
  size_t held_bytes;
  int32_t shown; /* a control token whose own text counts; -1 = none */
} pkv_text_stream;

void pkv_text_stream_init(pkv_text_stream *stream, const pkv_model *model, size_t limit);
void pkv_text_stream_deinit(pkv_text_stream *stream);
/* Adds a token's text; control tokens have none. */
pkv_status pkv_text_stream_token(pkv_text_stream *stream, int32_t token, pkv_error *err);
pkv_status pkv_text_stream_bytes(pkv_text_stream *stream, const char *bytes, size_t count,
                                 pkv_error *err);
/* Nothing more comes: what is held back becomes U+FFFD. */
pkv_status pkv_text_stream_end(pkv_text_stream *stream, pkv_error *err);
/* The text that is new since the last call; valid until the stream changes. */
const char *pkv_text_stream_take(pkv_text_stream *stream, size_t *bytes);

/* How an answer ended, as JSON output spells it: "stop", "length", ... */
const char *pkv_finish_text(pkv_finish finish);

#endif
