/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of tools in the text of an answer, as it comes. Only names of the request's own tools make
 * a call: everything else stays text.
 */
#ifndef PKV_SERVER_TOOL_PARSE_H
#define PKV_SERVER_TOOL_PARSE_H

#include "server/tools.h"

typedef struct pkv_tool_parser {
  const pkv_tools *tools; /* borrowed */
  int mode;               /* tool_parse.c */
  pkv_buffer held;        /* text that is not decided yet; in a call, all of it so far */
  pkv_buffer arguments;   /* that wait for the name, or for their end where they are a string */
  int depth, marks;       /* of the call's object; strings that begin at depth 1 */
  size_t word_at;         /* in `held`: where the latest string begins */
  bool quoted, escaped, in_value, named, text_value, argued;
  bool begun; /* of the arguments, a byte that is not blank was seen */
  char key[16], name[PKV_TOOL_NAME + 1];
  int32_t calls;   /* told so far */
  bool wrote;      /* content that is not blank */
  uint64_t number; /* of the answer, for the calls' ids */
} pkv_tool_parser;

/* What came out of a piece of text. */
typedef struct pkv_tool_news {
  pkv_buffer content;
  json_t *deltas; /* a list of OpenAI's */
} pkv_tool_news;

void pkv_tool_parser_init(pkv_tool_parser *parser, const pkv_tools *tools, uint64_t number);
void pkv_tool_parser_deinit(pkv_tool_parser *parser);
pkv_status pkv_tool_parser_feed(pkv_tool_news *news, pkv_tool_parser *parser, const char *text,
                                size_t bytes);
/* Nothing more comes: what is held was text, or a call that was cut. */
pkv_status pkv_tool_parser_end(pkv_tool_news *news, pkv_tool_parser *parser);

/* The deltas of a whole answer as its tool_calls, to be released. */
json_t *pkv_tool_calls(const json_t *deltas);

#endif
