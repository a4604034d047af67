/* SPDX-License-Identifier: Apache-2.0 */
/* The bodies of answers as OpenAI's and llama-server's clients read them, appended to a buffer. */
#ifndef PKV_SERVER_REPLY_TEXT_H
#define PKV_SERVER_REPLY_TEXT_H

#include "server/tool_parse.h"

/* What all bodies of one answer have in common. */
typedef struct pkv_reply {
  pkv_api_kind kind;
  bool include_usage, logprobs;
  char id[48];
  const char *name;       /* the model's, for clients; borrowed */
  const pkv_model *model; /* for the text of tokens */
  int64_t created;        /* Unix seconds */
  const pkv_stops *stops; /* the request's; borrowed */
  const pkv_tools *tools; /* NULL = none; borrowed */
} pkv_reply;

/* The parser of a choice's stream, where the reply has tools. */
void pkv_reply_parser(pkv_tool_parser *parser, const pkv_reply *reply, int32_t choice);

/* One choice of a whole answer. */
typedef struct pkv_whole {
  pkv_piece piece;
  pkv_choice_state state;
} pkv_whole;

/* {"error": {...}} */
pkv_status pkv_reply_error(pkv_buffer *out, const pkv_api_error *error, pkv_error *err);
/* A whole answer of `count` choices, `n` for each prompt. llama-server's kind has one. */
pkv_status pkv_reply_whole(pkv_buffer *out, const pkv_reply *reply, const pkv_whole *choices,
                           int32_t count, int32_t n, pkv_error *err);
/* The event that opens a choice of a chat's stream; nothing for others. */
pkv_status pkv_reply_open(pkv_buffer *out, const pkv_reply *reply, int32_t choice, pkv_error *err);
/* What is new of a choice. `parser`: of the choice, where the reply has tools. */
pkv_status pkv_reply_delta(pkv_buffer *out, const pkv_reply *reply, int32_t choice,
                           const pkv_piece *piece, pkv_tool_parser *parser, pkv_error *err);
/* The event that says why a choice ended; an error event where it failed. */
pkv_status pkv_reply_end(pkv_buffer *out, const pkv_reply *reply, int32_t choice,
                         const pkv_choice_state *state, pkv_tool_parser *parser, pkv_error *err);
/* What ends a stream: usage when asked for, [DONE]. */
pkv_status pkv_reply_close(pkv_buffer *out, const pkv_reply *reply, const pkv_choice_state *states,
                           int32_t count, int32_t n, pkv_error *err);
/* The list of the one model. */
pkv_status pkv_reply_models(pkv_buffer *out, const char *name, int64_t created, int32_t longest,
                            pkv_error *err);

#endif
