/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model's chat format: its template, interpreted (src/template), and the tokens of what it
 * writes. What the template writes may spell control tokens; what a message says never does,
 * whatever filters it went through.
 *
 * A template sees what transformers shows it: messages, tools or none, documents as none,
 * add_generation_prompt, bos_token and eos_token, enable_thinking where the request has it, and
 * strftime_now in the machine's local time.
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
pkv_allocator pkv_chat_allocator(const pkv_chat_template *chat);
/* Whether the template looks at tools. */
bool pkv_chat_shows_tools(const pkv_chat_template *chat);

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

/* What a template is shown of a request; borrowed. */
typedef struct pkv_chat_view {
  pkv_template_value messages; /* a list of maps */
  pkv_template_value tools;    /* a list, or none */
  bool thinking_given, thinking;
  bool add_generation;
  int64_t now; /* as pkv_template_render has it */
} pkv_chat_view;

pkv_status pkv_chat_render_view(pkv_template_output *out, const pkv_chat_template *chat,
                                const pkv_chat_view *view, pkv_error *err);
/* As pkv_chat_tokenize_json says; now as in the view. */
pkv_status pkv_chat_render_json(pkv_template_output *out, const pkv_chat_template *chat,
                                const char *json, size_t bytes, int32_t add_generation, int64_t now,
                                pkv_error *err);
pkv_status pkv_chat_encode_json(int32_t *ids, size_t capacity, size_t *count,
                                const pkv_chat_template *chat, const pkv_tokenizer *tokenizer,
                                const char *json, size_t bytes, int32_t add_generation,
                                pkv_error *err);
/* Tokens of what a template wrote. */
pkv_status pkv_chat_encode_output(int32_t *ids, size_t capacity, size_t *count,
                                  const pkv_tokenizer *tokenizer, const pkv_template_output *text,
                                  pkv_error *err);
/* Seconds since 1970 as the wall clock here shows them. */
int64_t pkv_chat_now(void);

#endif
