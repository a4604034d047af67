/* SPDX-License-Identifier: Apache-2.0 */
/* The bodies of answers as OpenAI's clients read them, appended to a buffer. */
#ifndef PKV_SERVER_REPLY_TEXT_H
#define PKV_SERVER_REPLY_TEXT_H

#include "server/api_request.h"

/* What all bodies of one answer have in common. */
typedef struct pkv_reply {
  bool chat, include_usage;
  char id[48];
  const char *model; /* name; borrowed */
  int64_t created;   /* Unix seconds */
} pkv_reply;

/* {"error": {...}} */
pkv_status pkv_reply_error(pkv_buffer *out, const pkv_api_error *error, pkv_error *err);
/* A whole answer. `text` is well-formed UTF-8. */
pkv_status pkv_reply_whole(pkv_buffer *out, const pkv_reply *reply, const char *text, size_t bytes,
                           const pkv_job_state *state, pkv_error *err);
/* The event that opens a chat's stream; nothing for a completion. */
pkv_status pkv_reply_open(pkv_buffer *out, const pkv_reply *reply, pkv_error *err);
/* An event with new text. */
pkv_status pkv_reply_delta(pkv_buffer *out, const pkv_reply *reply, const char *text, size_t bytes,
                           pkv_error *err);
/* The events that close a stream: why it ended, usage when asked for, [DONE]; or an error. */
pkv_status pkv_reply_close(pkv_buffer *out, const pkv_reply *reply, const pkv_job_state *state,
                           pkv_error *err);
/* The list of the one model. */
pkv_status pkv_reply_models(pkv_buffer *out, const char *model, int64_t created, int32_t longest,
                            pkv_error *err);
/* Prometheus text. */
pkv_status pkv_reply_metrics(pkv_buffer *out, const pkv_loop_counters *counters,
                             int64_t connections, int64_t requests, pkv_error *err);

#endif
