/* SPDX-License-Identifier: Apache-2.0 */
/* A conversation shown to the model's template, and what it writes made into tokens. */
#include "model/chat.h"

#include <string.h>
#include <time.h>

#include "base/alloc.h"

#define MAX_TURNS     1048576u
#define MAX_TOKEN     256 /* bytes of a bos or eos that a template may write */
#define MESSAGE_PARTS 2

struct pkv_chat_template {
  pkv_allocator allocator;
  pkv_template *template;
  char bos[MAX_TOKEN], eos[MAX_TOKEN];
  size_t bos_bytes, eos_bytes; /* 0 = there is none */
};

/* The text of a special token; none leaves it empty. */
static pkv_status read_token(char *out, size_t *bytes, const char *name, int32_t id,
                             const pkv_tokenizer *tokenizer, pkv_error *err) {
  const char *text;
  *bytes = 0;
  if (id < 0) return PKV_OK;
  PKV_TRY(pkv_tokenizer_text(&text, bytes, tokenizer, id, 1, err));
  PKV_CHECK(err, *bytes <= MAX_TOKEN, PKV_E_UNSUPPORTED,
            "the %s token has %zu bytes, a chat template may write %d", name, *bytes, MAX_TOKEN);
  memcpy(out, text, *bytes);
  return PKV_OK;
}

static pkv_status read_template(pkv_chat_template *chat, pkv_span source,
                                const pkv_tokenizer *tokenizer, pkv_error *err) {
  PKV_CHECK(err, source.size > 0, PKV_E_UNSUPPORTED, "the file has no chat template");
  PKV_TRY(
      read_token(chat->bos, &chat->bos_bytes, "bos", pkv_tokenizer_bos(tokenizer), tokenizer, err));
  PKV_TRY(
      read_token(chat->eos, &chat->eos_bytes, "eos", pkv_tokenizer_eos(tokenizer), tokenizer, err));
  return pkv_template_compile(&chat->template, source.data, source.size, &chat->allocator, err);
}

pkv_status pkv_chat_template_create(pkv_chat_template **out, pkv_span source,
                                    const pkv_tokenizer *tokenizer, const pkv_allocator *allocator,
                                    pkv_error *err) {
  *out = NULL;
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_chat_template *chat = pkv_alloc_zeroed(&a, 1, sizeof *chat);
  PKV_CHECK(err, chat != NULL, PKV_E_NOMEM, "no memory for the chat template");
  chat->allocator = a;
  const pkv_status status = read_template(chat, source, tokenizer, err);
  if (status != PKV_OK) {
    pkv_chat_template_destroy(chat);
    return status;
  }
  *out = chat;
  return PKV_OK;
}

void pkv_chat_template_destroy(pkv_chat_template *chat) {
  if (chat == NULL) return;
  const pkv_allocator a = chat->allocator;
  pkv_template_destroy(chat->template);
  pkv_free(&a, chat, sizeof *chat);
}

pkv_allocator pkv_chat_allocator(const pkv_chat_template *chat) {
  return chat->allocator;
}

bool pkv_chat_shows_tools(const pkv_chat_template *chat) {
  return pkv_template_names(chat->template, "tools");
}

/* ------------------------------------------------------------------------------------------
 * Rendering
 * ------------------------------------------------------------------------------------------ */

static bool known_role(const char *role) {
  return strcmp(role, "system") == 0 || strcmp(role, "user") == 0 || strcmp(role, "assistant") == 0;
}

static pkv_status check_messages(const pkv_message *messages, size_t count, pkv_error *err) {
  PKV_CHECK(err, messages != NULL && count > 0, PKV_E_INVALID, "there is no message");
  PKV_CHECK(err, count <= MAX_TURNS, PKV_E_LIMIT, "there are %zu messages, at most %u are allowed",
            count, MAX_TURNS);
  for (size_t i = 0; i < count; i++) {
    PKV_CHECK(err, messages[i].role != NULL && messages[i].content != NULL, PKV_E_INVALID,
              "messages[%zu] has no %s", i, messages[i].role == NULL ? "role" : "content");
    PKV_CHECK(err, known_role(messages[i].role), PKV_E_INVALID,
              "messages[%zu] has a role that is not system, user or assistant", i);
  }
  return PKV_OK;
}

/* One block: a value a message, then its members. */
typedef struct turn_table {
  pkv_template_value *turns; /* [count] */
  pkv_template_member *members;
  size_t bytes;
} turn_table;

static pkv_status fill_turns(turn_table *out, const pkv_allocator *a, const pkv_message *messages,
                             size_t count, pkv_error *err) {
  out->bytes = count * (sizeof *out->turns + MESSAGE_PARTS * sizeof *out->members);
  out->turns = pkv_alloc(a, out->bytes);
  PKV_CHECK(err, out->turns != NULL, PKV_E_NOMEM, "no memory for %zu messages", count);
  out->members = (pkv_template_member *)(out->turns + count);
  for (size_t i = 0; i < count; i++) {
    const pkv_message *const m = &messages[i];
    pkv_template_member *const parts = &out->members[MESSAGE_PARTS * i];
    parts[0] = (pkv_template_member){"role", 4, pkv_template_text(m->role, strlen(m->role), true)};
    parts[1] = (pkv_template_member){"content", 7,
                                     pkv_template_text(m->content, strlen(m->content), false)};
    out->turns[i] =
        (pkv_template_value){.kind = PKV_TEMPLATE_MAP, .members = parts, .count = MESSAGE_PARTS};
  }
  return PKV_OK;
}

int64_t pkv_chat_now(void) {
  struct tm local;
  const time_t now = time(NULL);
  if (now == (time_t)-1 || localtime_r(&now, &local) == NULL) return -1;
  return (int64_t)now + (int64_t)local.tm_gmtoff;
}

static pkv_template_value flag(bool value) {
  return (pkv_template_value){.kind = PKV_TEMPLATE_BOOL, .as_int = value};
}

pkv_status pkv_chat_render_view(pkv_template_output *out, const pkv_chat_template *chat,
                                const pkv_chat_view *view, pkv_error *err) {
  const pkv_template_value none = {.kind = PKV_TEMPLATE_NONE};
  const pkv_template_member members[] = {
      {"messages", 8, view->messages},
      {"tools", 5, view->tools},
      {"documents", 9, none},
      {"add_generation_prompt", 21, flag(view->add_generation)},
      {"bos_token", 9, pkv_template_text(chat->bos, chat->bos_bytes, true)},
      {"eos_token", 9, pkv_template_text(chat->eos, chat->eos_bytes, true)},
      {"enable_thinking", 15, flag(view->thinking)},
  };
  const size_t all = sizeof members / sizeof members[0];
  const pkv_template_value variables = {
      .kind = PKV_TEMPLATE_MAP, .members = members, .count = view->thinking_given ? all : all - 1};
  return pkv_template_render(out, chat->template, &variables, view->now, NULL, err);
}

pkv_status pkv_chat_render(pkv_template_output *out, const pkv_chat_template *chat,
                           const pkv_message *messages, size_t message_count,
                           int32_t add_generation, pkv_error *err) {
  turn_table table;
  *out = (pkv_template_output){0};
  PKV_TRY(check_messages(messages, message_count, err));
  PKV_TRY(fill_turns(&table, &chat->allocator, messages, message_count, err));
  const pkv_chat_view view = {
      .messages = {.kind = PKV_TEMPLATE_LIST, .items = table.turns, .count = message_count},
      .tools = {.kind = PKV_TEMPLATE_NONE},
      .add_generation = add_generation != 0,
      .now = pkv_chat_now()};
  const pkv_status status = pkv_chat_render_view(out, chat, &view, err);
  pkv_free(&chat->allocator, table.turns, table.bytes);
  return status;
}

pkv_status pkv_chat_encode_output(int32_t *ids, size_t capacity, size_t *count,
                                  const pkv_tokenizer *tokenizer, const pkv_template_output *text,
                                  pkv_error *err) {
  const size_t room = (text->run_count + 1) * sizeof(pkv_text_piece);
  pkv_text_piece *const pieces = pkv_alloc(&text->allocator, room);
  PKV_CHECK(err, pieces != NULL, PKV_E_NOMEM, "no memory for %zu pieces of a chat",
            text->run_count);
  size_t at = 0;
  for (size_t i = 0; i < text->run_count; at += text->runs[i++].bytes)
    pieces[i] = (pkv_text_piece){text->text + at, text->runs[i].bytes, text->runs[i].trusted};
  const pkv_status status = pkv_tokenizer_encode_pieces(ids, capacity, count, tokenizer, pieces,
                                                        text->run_count, true, false, err);
  pkv_free(&text->allocator, pieces, room);
  return status;
}

pkv_status pkv_chat_encode(int32_t *ids, size_t capacity, size_t *count,
                           const pkv_chat_template *chat, const pkv_tokenizer *tokenizer,
                           const pkv_message *messages, size_t message_count,
                           int32_t add_generation, pkv_error *err) {
  PKV_CHECK(err, count != NULL && chat != NULL && tokenizer != NULL, PKV_E_INVALID,
            "count, chat or tokenizer is NULL");
  *count = 0;
  pkv_template_output text;
  PKV_TRY(pkv_chat_render(&text, chat, messages, message_count, add_generation, err));
  const pkv_status status = pkv_chat_encode_output(ids, capacity, count, tokenizer, &text, err);
  pkv_template_output_free(&text);
  return status;
}
