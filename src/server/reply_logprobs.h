/* SPDX-License-Identifier: Apache-2.0 */
/* Log-probabilities as OpenAI's clients read them. */
#ifndef PKV_SERVER_REPLY_LOGPROBS_H
#define PKV_SERVER_REPLY_LOGPROBS_H

#include <jansson.h>

#include "server/reply_text.h"

/* {"content": [...]} of a chat's piece. */
json_t *pkv_logprobs_chat(const pkv_reply *reply, const pkv_piece *piece);
/* {"tokens", "token_logprobs", "top_logprobs", "text_offset"}. */
json_t *pkv_logprobs_legacy(const pkv_reply *reply, const pkv_piece *piece);
/* llama-server's list "completion_probabilities". */
json_t *pkv_logprobs_llama(const pkv_reply *reply, const pkv_piece *piece);

#endif
