/* SPDX-License-Identifier: Apache-2.0 */
/* Where a prompt comes from: the command line, a file or stdin; and its tokens. */
#ifndef PKV_CLI_PROMPT_TEXT_H
#define PKV_CLI_PROMPT_TEXT_H

#include "base/text.h"
#include "pkv/engine.h"

#define PKV_PROMPT_BYTES ((size_t)64 << 20)

/* Copies `plain` to *err with the path in front, unless it is in the text already; returns its
 * status. */
pkv_status pkv_fail_named(pkv_error *err, const pkv_error *plain, const char *path);
/* pkv_model_open, with the path in every message. */
pkv_status pkv_model_open_named(pkv_model **out, const char *path, const pkv_model_options *options,
                                pkv_error *err);
/* All of stdin, or of a file ("-" is stdin), into an initialised buffer. */
pkv_status pkv_prompt_read(pkv_buffer *text, const char *path, pkv_error *err);
/* Replaces \n \t \r \\ \" \' \xHH in place; E_FORMAT names what else follows a backslash. */
pkv_status pkv_prompt_unescape(pkv_buffer *text, pkv_error *err);

typedef struct pkv_tokens {
  int32_t *ids;
  size_t count;
} pkv_tokens;

/* Tokens of plain text; flags as in pkv_tokenize. */
pkv_status pkv_tokens_from_text(pkv_tokens *out, const pkv_model *model, const char *text,
                                size_t bytes, uint32_t flags, pkv_error *err);
/* Tokens of a conversation that ends with the opening of an answer. */
pkv_status pkv_tokens_from_chat(pkv_tokens *out, const pkv_model *model,
                                const pkv_message *messages, size_t count, pkv_error *err);
void pkv_tokens_free(pkv_tokens *tokens);

#endif
