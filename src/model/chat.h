/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chat formats behind one interface: a conversation becomes pieces of text, each marked as
 * template (may spell control tokens) or as content (never does). Today one format, ChatML, is
 * recognised by the template's own shape; a template interpreter takes its place later without
 * changing this interface.
 *
 * What is read from a ChatML template: that a turn is "<|im_start|>", role, newline, content,
 * "<|im_end|>", newline; the system message it inserts when a conversation starts without one;
 * whether content is trimmed; whether it writes the bos token. A template that names any other
 * control token of the vocabulary does more than that, and is refused.
 */
#ifndef PKV_MODEL_CHAT_H
#define PKV_MODEL_CHAT_H

#include "model/tokenizer.h"
#include "pkv/engine.h"

typedef struct pkv_chat_template pkv_chat_template; /* immutable */

/* source: tokenizer.chat_template, or empty; copied where needed. E_UNSUPPORTED when the format is
   not known, saying why. The tokenizer is only asked, not kept. */
pkv_status pkv_chat_template_create(pkv_chat_template **out, pkv_span source,
                                    const pkv_tokenizer *tokenizer, const pkv_allocator *allocator,
                                    pkv_error *err);
void pkv_chat_template_destroy(pkv_chat_template *chat);

/*
 * The conversation as pieces, in order. Texts are borrowed from chat and messages. *count is how
 * many there are; more than `capacity` gives E_TOO_SMALL. At most 5 * message_count + 8 are needed.
 * E_INVALID: no message, a role that is not system, user or assistant, or a NULL.
 */
pkv_status pkv_chat_render(pkv_text_piece *pieces, size_t capacity, size_t *count,
                           const pkv_chat_template *chat, const pkv_message *messages,
                           size_t message_count, int32_t add_generation, pkv_error *err);
/*
 * As pkv_chat_tokenize. One bos at the start and not two: the file's wish for a bos is met by the
 * one that the template writes, if it writes one. No eos is added: the conversation goes on.
 */
pkv_status pkv_chat_encode(int32_t *ids, size_t capacity, size_t *count,
                           const pkv_chat_template *chat, const pkv_tokenizer *tokenizer,
                           const pkv_message *messages, size_t message_count,
                           int32_t add_generation, pkv_error *err);

#endif
