/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chat formats behind one interface: a conversation becomes pieces of text, each marked as
 * template (may spell control
 * tokens) or content (never does). Today a small set of formats is recognised from the template's
 * own markers; a
 * template interpreter takes their place later without changing this interface.
 */
#ifndef PKV_MODEL_CHAT_H
#define PKV_MODEL_CHAT_H

#include "model/tokenizer.h"
#include "pkv/engine.h"

typedef struct pkv_chat_template pkv_chat_template; /* immutable */

/* source: tokenizer.chat_template, or empty. E_UNSUPPORTED when the format is not known. */
pkv_status pkv_chat_template_create(pkv_chat_template **out, pkv_span source,
                                    const pkv_tokenizer *tokenizer, const pkv_allocator *allocator,
                                    pkv_error *err);
void pkv_chat_template_destroy(pkv_chat_template *chat);
pkv_status pkv_chat_encode(int32_t *ids, size_t capacity, size_t *count,
                           const pkv_chat_template *chat, const pkv_tokenizer *tokenizer,
                           const pkv_message *messages, size_t message_count,
                           int32_t add_generation, pkv_error *err);

#endif
