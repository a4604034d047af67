/* SPDX-License-Identifier: Apache-2.0 */
/* A prompt as the list of its tokens, from text or from a conversation. */
#ifndef PKV_SERVER_TOKEN_LIST_H
#define PKV_SERVER_TOKEN_LIST_H

#include "pkv/engine.h"

typedef struct pkv_tokens {
  int32_t *ids;
  size_t count;
} pkv_tokens;

/* Tokens of plain text; flags as in pkv_tokenize. What fails leaves nothing to free, as below. */
pkv_status pkv_tokens_from_text(pkv_tokens *out, const pkv_model *model, const char *text,
                                size_t bytes, uint32_t flags, pkv_error *err);
/* Tokens of a conversation that ends with the opening of an answer, as pkv_chat_tokenize_json takes
 * it. */
pkv_status pkv_tokens_from_chat_json(pkv_tokens *out, const pkv_model *model, const char *json,
                                     size_t bytes, pkv_error *err);
pkv_status pkv_tokens_from_chat(pkv_tokens *out, const pkv_model *model,
                                const pkv_message *messages, size_t count, pkv_error *err);
void pkv_tokens_free(pkv_tokens *tokens);

#endif
