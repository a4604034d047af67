/* SPDX-License-Identifier: Apache-2.0 */
/* Bodies into JSON, and JSON into tokens: prompts, ids, conversations. */
#include "server/api_fields.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/json_bounds.h"
#include "base/json_memory.h"

bool pkv_api_refuse(pkv_api_error *error, int http, const char *code, const char *param,
                    const char *format, ...) {
  va_list args;
  error->http = http;
  error->code = code;
  (void)snprintf(error->param, sizeof error->param, "%s", param);
  va_start(args, format);
  (void)vsnprintf(error->message, sizeof error->message, format, args);
  va_end(args);
  return false;
}

json_t *pkv_api_parse(pkv_api_error *error, const char *body, size_t bytes) {
  json_error_t where;
  memset(error, 0, sizeof *error);
  switch (pkv_json_check_bounds(body, bytes, PKV_API_VALUES)) {
  case PKV_JSON_TOO_DEEP:
    (void)pkv_api_refuse(error, 400, "json_too_deep", "", "the body nests deeper than %d",
                         PKV_JSON_DEPTH);
    return NULL;
  case PKV_JSON_TOO_MANY:
    (void)pkv_api_refuse(error, 400, "json_too_large", "", "the body has more than %d values",
                         PKV_API_VALUES);
    return NULL;
  case PKV_JSON_FITS:
    break;
  }
  bool lost;
  json_t *const root = pkv_json_load(&lost, body, bytes, JSON_REJECT_DUPLICATES, &where);
  if (root != NULL && json_is_object(root)) return root;
  if (root != NULL)
    (void)pkv_api_refuse(error, 400, "invalid_type", "", "the body must be a JSON object");
  else if (lost)
    (void)pkv_api_refuse(error, 503, "no_memory", "", "there is no memory for this body");
  else
    (void)pkv_api_refuse(error, 400, "invalid_json", "",
                         "the body is no JSON (in UTF-8, without duplicate keys): line %d, "
                         "column %d",
                         where.line, where.column);
  json_decref(root);
  return NULL;
}

const json_t *pkv_api_field(const json_t *root, const char *name) {
  const json_t *const value = json_object_get(root, name);
  return value == NULL || json_is_null(value) ? NULL : value;
}

bool pkv_api_flag(bool *out, pkv_api_error *error, const json_t *root, const char *name,
                  bool fallback) {
  const json_t *const value = pkv_api_field(root, name);
  *out = fallback;
  if (value == NULL) return true;
  if (!json_is_boolean(value))
    return pkv_api_refuse(error, 400, "invalid_type", name, "%s must be true or false", name);
  *out = json_is_true(value);
  return true;
}

/* What a model without one says of every text. */
static const char no_tokenizer[] = "the model's file has no tokenizer";

bool pkv_api_refuse_tokens(pkv_api_error *error, pkv_status status, const char *param,
                           const char *text) {
  /* The text may quote the request: it goes no further than the log. */
  pkv_log(PKV_LOG_DEBUG, "server", "a prompt is refused: %s", text);
  if (status == PKV_E_NOMEM)
    return pkv_api_refuse(error, 503, "no_memory", param, "there is no memory for this prompt");
  /* The template's own words: such a text holds no byte of the request. */
  if (strncmp(text, "chat template, ", 15) == 0)
    return pkv_api_refuse(error, 400, "invalid_value", param, "%s", text);
  if (strcmp(text, no_tokenizer) == 0)
    return pkv_api_refuse(error, 400, "unsupported", param, "%s", text);
  if (status == PKV_E_UNSUPPORTED)
    return pkv_api_refuse(error, 400, "unsupported", param,
                          "the model's chat format does not take this conversation");
  return pkv_api_refuse(error, 400, "invalid_value", param, "%s cannot be made into tokens", param);
}

bool pkv_api_read_ids(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                      const char *param, const json_t *list) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  size_t i;
  const json_t *item;
  pkv_model_get_info(&info, model);
  json_array_foreach(list, i, item) {
    if (!json_is_integer(item))
      return pkv_api_refuse(error, 400, "invalid_type", param,
                            "a list of token ids must hold whole numbers only");
    if (json_integer_value(item) < 0 || json_integer_value(item) >= info.vocab)
      return pkv_api_refuse(error, 400, "out_of_range", param,
                            "%s[%zu] must be a token from 0 to %d", param, i, (int)info.vocab - 1);
  }
  /* Their text could not be told. */
  const char *text = "";
  pkv_error err = {PKV_OK, "", ""};
  const pkv_status status = pkv_token_text(&text, &i, model, 0, 1, &err);
  if (status != PKV_OK) return pkv_api_refuse_tokens(error, status, param, err.text);
  out->count = json_array_size(list);
  out->ids = pkv_alloc_zeroed(&a, out->count + 1, sizeof *out->ids);
  if (out->ids == NULL) return pkv_api_refuse_tokens(error, PKV_E_NOMEM, param, "");
  json_array_foreach(list, i, item) out->ids[i] = (int32_t)json_integer_value(item);
  return true;
}

/* A string or a list of ids. */
static bool read_prompt(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                        const char *param, const json_t *prompt) {
  pkv_error err = {PKV_OK, "", ""};
  if (json_is_array(prompt)) return pkv_api_read_ids(out, error, model, param, prompt);
  if (!json_is_string(prompt))
    return pkv_api_refuse(error, 400, "invalid_type", param,
                          "%s must be a string, a list of token ids, or a list of these", param);
  const pkv_status status =
      pkv_tokens_from_text(out, model, json_string_value(prompt), json_string_length(prompt),
                           PKV_TEXT_ADD_SPECIAL, &err);
  if (status == PKV_OK) return true;
  pkv_tokens_free(out);
  return pkv_api_refuse_tokens(error, status, param, err.text);
}

bool pkv_api_read_prompts(pkv_tokens *out, int32_t *count, int32_t capacity, pkv_api_error *error,
                          const pkv_model *model, const char *param, const json_t *root) {
  const json_t *const prompt = pkv_api_field(root, param);
  size_t i;
  const json_t *item;
  *count = 0;
  if (prompt == NULL) return pkv_api_refuse(error, 400, "missing", param, "%s is missing", param);
  if (!json_is_array(prompt) || json_is_integer(json_array_get(prompt, 0))) {
    *count = 1;
    return read_prompt(&out[0], error, model, param, prompt);
  }
  const size_t size = json_array_size(prompt);
  if (size < 1 || size > (size_t)capacity)
    return pkv_api_refuse(error, 400, "out_of_range", param, "%s must be a list of 1 to %d prompts",
                          param, (int)capacity);
  json_array_foreach(prompt, i, item) {
    if (!read_prompt(&out[i], error, model, param, item)) {
      while (*count > 0)
        pkv_tokens_free(&out[--*count]);
      return false;
    }
    ++*count;
  }
  return true;
}

static bool bad_message(pkv_api_error *error, size_t index, const char *member, const char *must) {
  char param[48];
  (void)snprintf(param, sizeof param, "messages[%zu]%s", index, member);
  return pkv_api_refuse(error, 400, "invalid_value", param, "%s must be %s", param, must);
}

/* The buffer has its room already. */
static void join(pkv_buffer *joined, const char *text, size_t bytes) {
  const pkv_status status = pkv_buffer_append(joined, text, bytes, NULL);
  PKV_ASSERT(status == PKV_OK);
  (void)status;
}

/* Appends the text of a list of parts and a zero byte. */
static bool join_parts(pkv_buffer *joined, pkv_api_error *error, size_t index, const json_t *list) {
  size_t i;
  const json_t *part;
  json_array_foreach(list, i, part) {
    const char *const type = json_string_value(json_object_get(part, "type"));
    const json_t *const text = json_object_get(part, "text");
    if (type == NULL || strcmp(type, "text") != 0 || !json_is_string(text))
      return bad_message(error, index, ".content", "a string, or a list of parts of type text");
    join(joined, json_string_value(text), json_string_length(text));
  }
  join(joined, "", 1);
  return true;
}

static bool read_message(pkv_message *out, pkv_buffer *joined, pkv_api_error *error, size_t index,
                         const json_t *message) {
  static const char *const roles[] = {"system", "user", "assistant"};
  if (!json_is_object(message)) return bad_message(error, index, "", "an object");
  const char *role = json_string_value(json_object_get(message, "role"));
  const json_t *const content = json_object_get(message, "content");
  if (role != NULL && strcmp(role, "developer") == 0) role = "system";
  out->role = NULL;
  for (size_t i = 0; role != NULL && i < sizeof roles / sizeof *roles; i++)
    if (strcmp(role, roles[i]) == 0) out->role = roles[i];
  if (out->role == NULL)
    return bad_message(error, index, ".role", "system, developer, user or assistant");
  if (json_is_string(content)) {
    out->content = json_string_value(content);
    return true;
  }
  if (!json_is_array(content))
    return bad_message(error, index, ".content", "a string, or a list of parts of type text");
  const size_t from = joined->size;
  if (!join_parts(joined, error, index, content)) return false;
  out->content = joined->data + from;
  return true;
}

static bool tokenize_messages(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                              const json_t *list, pkv_message *messages, pkv_buffer *joined) {
  pkv_error err = {PKV_OK, "", ""};
  size_t i;
  const json_t *message;
  json_array_foreach(
      list, i, message) if (!read_message(&messages[i], joined, error, i, message)) return false;
  const pkv_status status = pkv_tokens_from_chat(out, model, messages, json_array_size(list), &err);
  if (status == PKV_OK) return true;
  pkv_tokens_free(out);
  return pkv_api_refuse_tokens(error, status, "messages", err.text);
}

bool pkv_api_read_messages(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                           const json_t *root, size_t body_bytes) {
  const pkv_allocator a = pkv_allocator_default();
  const json_t *const list = pkv_api_field(root, "messages");
  if (list == NULL) return pkv_api_refuse(error, 400, "missing", "messages", "messages is missing");
  const size_t count = json_array_size(list);
  if (!json_is_array(list) || count < 1 || count > PKV_API_MESSAGES)
    return pkv_api_refuse(error, 400, "invalid_type", "messages",
                          "messages must be a list of 1 to %d messages", PKV_API_MESSAGES);
  pkv_message *const messages = pkv_alloc_zeroed(&a, count, sizeof *messages);
  if (messages == NULL) return pkv_api_refuse_tokens(error, PKV_E_NOMEM, "messages", "");
  pkv_buffer joined;
  pkv_buffer_init(&joined, body_bytes + count, NULL);
  /* The joined parts are no longer than the body, so pointers into the buffer stay valid once it
     has grown to that; a conversation without lists needs none of it. */
  bool ok = true, lists = false;
  for (size_t i = 0; i < count; i++)
    lists = lists || json_is_array(json_object_get(json_array_get(list, i), "content"));
  if (lists) {
    char *const room = pkv_alloc_zeroed(&a, body_bytes + count, 1);
    ok = room != NULL && pkv_buffer_append(&joined, room, body_bytes + count, NULL) == PKV_OK;
    pkv_free(&a, room, body_bytes + count);
    pkv_buffer_clear(&joined);
  }
  ok = ok ? tokenize_messages(out, error, model, list, messages, &joined)
          : pkv_api_refuse_tokens(error, PKV_E_NOMEM, "messages", "");
  pkv_buffer_deinit(&joined);
  pkv_free(&a, messages, count * sizeof *messages);
  return ok;
}
