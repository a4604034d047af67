/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model's chat format: its template, interpreted (src/template), and the tokens of what it
 * writes. What the template writes may spell control tokens; what a message says never does,
 * whatever filters it went through.
 *
 * A template sees what transformers shows it: messages (each a role and a content),
 * add_generation_prompt, bos_token and eos_token, tools and documents as none, strftime_now in the
 * machine's local time.
 */
#ifndef PKV_MODEL_CHAT_H
#define PKV_MODEL_CHAT_H

#include "model/tokenizer.h"
#include "pkv/engine.h"
#include "template/template.h"

typedef struct pkv_chat_template pkv_chat_template; /* immutable */

/* source: tokenizer.chat_template, or empty; copied. E_UNSUPPORTED when it is empty, else as
   pkv_template_compile. The tokenizer is only asked, not kept. */
pkv_status pkv_chat_template_create(pkv_chat_template **out, pkv_span source,
                                    const pkv_tokenizer *tokenizer, const pkv_allocator *allocator,
                                    pkv_error *err);
void pkv_chat_template_destroy(pkv_chat_template *chat);

/*
 * The conversation as text in runs; free it with pkv_template_output_free. Roles count as the
 * template's own text, because they are of a closed list. E_INVALID: no message, a role that is not
 * system, user or assistant, or a NULL; else as pkv_template_render.
 */
pkv_status pkv_chat_render(pkv_template_output *out, const pkv_chat_template *chat,
                           const pkv_message *messages, size_t message_count,
                           int32_t add_generation, pkv_error *err);
/*
 * As pkv_chat_tokenize. One bos at the start and not two: the file's wish for a bos is met by the
 * one that the template writes, if it writes one. No eos is added: the conversation goes on.
 */
pkv_status pkv_chat_encode(int32_t *ids, size_t capacity, size_t *count,
                           const pkv_chat_template *chat, const pkv_tokenizer *tokenizer,
                           const pkv_message *messages, size_t message_count,
                           int32_t add_generation, pkv_error *err);

#endif
