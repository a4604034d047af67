/* SPDX-License-Identifier: Apache-2.0 */
#include "server/api_request.h"

#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/json_bounds.h"
#include "base/log.h"

#define MAX_MESSAGES    4096
#define MAX_JSON_VALUES 262144

/* The numeric fields. A field that is null is absent. */
typedef struct number_field {
  const char *name;
  bool whole;
  double low, high;
  bool open; /* `low` itself is refused */
} number_field;

enum {
  FIELD_MAX_TOKENS,
  FIELD_MAX_COMPLETION_TOKENS,
  FIELD_TEMPERATURE,
  FIELD_TOP_P,
  FIELD_TOP_K,
  FIELD_SEED,
  FIELD_N,
  FIELD_BEST_OF,
  FIELD_FREQUENCY_PENALTY,
  FIELD_PRESENCE_PENALTY,
  NUMBER_FIELDS
};

/* n and best_of: 1 is what happens. The penalties: 0 is. */
static const number_field number_fields[NUMBER_FIELDS] = {
    [FIELD_MAX_TOKENS] = {"max_tokens", true, 1, INT32_MAX, false},
    [FIELD_MAX_COMPLETION_TOKENS] = {"max_completion_tokens", true, 1, INT32_MAX, false},
    [FIELD_TEMPERATURE] = {"temperature", false, 0, 100, false},
    [FIELD_TOP_P] = {"top_p", false, 0, 1, true},
    [FIELD_TOP_K] = {"top_k", true, -1, INT32_MAX, false},
    [FIELD_SEED] = {"seed", true, -9223372036854775808.0, 9223372036854774784.0, false},
    [FIELD_N] = {"n", true, 1, 1, false},
    [FIELD_BEST_OF] = {"best_of", true, 1, 1, false},
    [FIELD_FREQUENCY_PENALTY] = {"frequency_penalty", false, 0, 0, false},
    [FIELD_PRESENCE_PENALTY] = {"presence_penalty", false, 0, 0, false},
};

typedef struct number_value {
  bool given;
  double real;
  int64_t whole;
} number_value;

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

static const json_t *field(const json_t *root, const char *name) {
  const json_t *const value = json_object_get(root, name);
  return value == NULL || json_is_null(value) ? NULL : value;
}

static bool read_number(number_value *out, pkv_api_error *error, const json_t *root,
                        const number_field *f) {
  const json_t *const value = field(root, f->name);
  *out = (number_value){false, 0.0, 0};
  if (value == NULL) return true;
  if (f->whole ? !json_is_integer(value) : !json_is_number(value))
    return pkv_api_refuse(error, 400, "invalid_type", f->name, "%s must be a %s", f->name,
                          f->whole ? "whole number" : "number");
  out->given = true;
  out->real = json_number_value(value);
  if (json_is_integer(value)) out->whole = (int64_t)json_integer_value(value);
  if (!(out->real >= f->low && out->real <= f->high) || (f->open && out->real <= f->low))
    return pkv_api_refuse(error, 400, "out_of_range", f->name, "%s must be from %.17g%s to %.17g",
                          f->name, f->low, f->open ? " (itself excluded)" : "", f->high);
  return true;
}

static bool read_flag(bool *out, pkv_api_error *error, const json_t *root, const char *name) {
  const json_t *const value = field(root, name);
  *out = false;
  if (value == NULL) return true;
  if (!json_is_boolean(value))
    return pkv_api_refuse(error, 400, "invalid_type", name, "%s must be true or false", name);
  *out = json_is_true(value);
  return true;
}

static bool add_stop(pkv_stops *stops, pkv_api_error *error, const json_t *value) {
  if (!json_is_string(value))
    return pkv_api_refuse(error, 400, "invalid_type", "stop",
                          "stop must be a string or a list of strings");
  const size_t bytes = json_string_length(value);
  if (bytes < 1 || bytes > PKV_STOP_BYTES)
    return pkv_api_refuse(error, 400, "out_of_range", "stop",
                          "a stop string must have 1 to %d bytes", PKV_STOP_BYTES);
  if (stops->count == PKV_MAX_STOPS)
    return pkv_api_refuse(error, 400, "out_of_range", "stop", "at most %d stop strings are taken",
                          PKV_MAX_STOPS);
  memcpy(stops->text[stops->count++], json_string_value(value), bytes + 1);
  return true;
}

static bool read_stops(pkv_stops *stops, pkv_api_error *error, const json_t *root) {
  const json_t *const value = field(root, "stop");
  size_t i;
  const json_t *item;
  stops->count = 0;
  if (value == NULL) return true;
  if (!json_is_array(value)) return add_stop(stops, error, value);
  json_array_foreach(value, i, item) if (!add_stop(stops, error, item)) return false;
  return true;
}

/* Fields that may only say what happens anyway. */
static bool refuse_unserved(pkv_api_error *error, const json_t *root) {
  static const char *const names[] = {"logit_bias", "tools",        "functions", "tool_choice",
                                      "logprobs",   "top_logprobs", "echo",      "suffix"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    const json_t *const value = field(root, names[i]);
    if (value == NULL || json_is_false(value)) continue;
    if ((json_is_array(value) && json_array_size(value) == 0) ||
        (json_is_object(value) && json_object_size(value) == 0) ||
        (json_is_string(value) &&
         (json_string_length(value) == 0 || strcmp(json_string_value(value), "none") == 0)))
      continue;
    return pkv_api_refuse(error, 400, "unsupported", names[i], "%s is not supported", names[i]);
  }
  const json_t *const format = field(root, "response_format");
  const char *const type = json_string_value(json_object_get(format, "type"));
  if (format != NULL && (type == NULL || strcmp(type, "text") != 0))
    return pkv_api_refuse(error, 400, "unsupported", "response_format",
                          "response_format may only be of type text");
  return true;
}

static bool read_stream(pkv_api_request *out, pkv_api_error *error, const json_t *root) {
  const json_t *const options = field(root, "stream_options");
  if (!read_flag(&out->stream, error, root, "stream")) return false;
  out->include_usage = false;
  if (options == NULL) return true;
  if (!json_is_object(options))
    return pkv_api_refuse(error, 400, "invalid_type", "stream_options",
                          "stream_options must be an object");
  if (!out->stream)
    return pkv_api_refuse(error, 400, "invalid_value", "stream_options",
                          "stream_options needs stream to be true");
  return read_flag(&out->include_usage, error, options, "include_usage");
}

static bool read_settings(pkv_api_request *out, pkv_api_error *error, const json_t *root) {
  number_value v[NUMBER_FIELDS];
  bool ignore_end;
  pkv_request request = PKV_REQUEST_INIT;
  const json_t *const model = field(root, "model");
  if (model != NULL && !json_is_string(model))
    return pkv_api_refuse(error, 400, "invalid_type", "model", "model must be a string");
  for (int i = 0; i < NUMBER_FIELDS; i++)
    if (!read_number(&v[i], error, root, &number_fields[i])) return false;
  if (!read_flag(&ignore_end, error, root, "ignore_eos")) return false;
  if (!read_stream(out, error, root)) return false;
  if (!read_stops(&out->job.stops, error, root)) return false;
  if (!refuse_unserved(error, root)) return false;
  /* What OpenAI's completions take when max_tokens is absent; a chat goes on to the end. */
  request.max_tokens = out->chat ? INT32_MAX : 16;
  if (v[FIELD_MAX_TOKENS].given) request.max_tokens = (int32_t)v[FIELD_MAX_TOKENS].whole;
  if (v[FIELD_MAX_COMPLETION_TOKENS].given)
    request.max_tokens = (int32_t)v[FIELD_MAX_COMPLETION_TOKENS].whole;
  request.temperature = v[FIELD_TEMPERATURE].given ? (float)v[FIELD_TEMPERATURE].real : 1.0f;
  request.top_p = v[FIELD_TOP_P].given ? (float)v[FIELD_TOP_P].real : 1.0f;
  request.top_k = v[FIELD_TOP_K].whole > 0 ? (int32_t)v[FIELD_TOP_K].whole : 0;
  request.seed = v[FIELD_SEED].given ? (uint64_t)v[FIELD_SEED].whole : (uint64_t)pkv_clock_ns();
  request.ignore_end = ignore_end;
  out->job.request = request;
  return true;
}

static bool refuse_tokens(pkv_api_error *error, pkv_status status, const char *param,
                          const char *text) {
  /* The text may quote the request: it goes no further than the log. */
  pkv_log(PKV_LOG_DEBUG, "server", "a prompt is refused: %s", text);
  if (status == PKV_E_NOMEM)
    return pkv_api_refuse(error, 503, "no_memory", param, "there is no memory for this prompt");
  if (status == PKV_E_UNSUPPORTED)
    return pkv_api_refuse(error, 400, "unsupported", param,
                          "the model's chat format does not take this conversation");
  return pkv_api_refuse(error, 400, "invalid_value", param, "%s cannot be made into tokens", param);
}

static bool read_ids(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                     const json_t *list) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_model_info info = PKV_MODEL_INFO_INIT;
  size_t i;
  const json_t *item;
  pkv_model_get_info(&info, model);
  json_array_foreach(list, i, item) {
    if (!json_is_integer(item))
      return pkv_api_refuse(error, 400, "invalid_type", "prompt",
                            "prompt must be a string, or one list of token ids");
    if (json_integer_value(item) < 0 || json_integer_value(item) >= info.vocab)
      return pkv_api_refuse(error, 400, "out_of_range", "prompt",
                            "prompt[%zu] must be a token from 0 to %d", i, (int)info.vocab - 1);
  }
  out->count = json_array_size(list);
  out->ids = pkv_alloc_zeroed(&a, out->count + 1, sizeof *out->ids);
  if (out->ids == NULL) return refuse_tokens(error, PKV_E_NOMEM, "prompt", "");
  json_array_foreach(list, i, item) out->ids[i] = (int32_t)json_integer_value(item);
  return true;
}

static bool read_prompt(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                        const json_t *root) {
  const json_t *prompt = field(root, "prompt");
  pkv_error err = {PKV_OK, "", ""};
  if (prompt == NULL) return pkv_api_refuse(error, 400, "missing", "prompt", "prompt is missing");
  if (json_is_array(prompt) && json_array_size(prompt) == 1 &&
      !json_is_integer(json_array_get(prompt, 0)))
    prompt = json_array_get(prompt, 0);
  if (json_is_array(prompt)) return read_ids(out, error, model, prompt);
  if (!json_is_string(prompt))
    return pkv_api_refuse(error, 400, "invalid_type", "prompt",
                          "prompt must be a string, or one list of token ids");
  const pkv_status status =
      pkv_tokens_from_text(out, model, json_string_value(prompt), json_string_length(prompt),
                           PKV_TEXT_ADD_SPECIAL, &err);
  if (status == PKV_OK) return true;
  pkv_tokens_free(out);
  return refuse_tokens(error, status, "prompt", err.text);
}

static bool bad_message(pkv_api_error *error, size_t index, const char *member, const char *must) {
  char param[48];
  (void)snprintf(param, sizeof param, "messages[%zu]%s", index, member);
  return pkv_api_refuse(error, 400, "invalid_value", param, "%s must be %s", param, must);
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
    if (pkv_buffer_append(joined, json_string_value(text), json_string_length(text), NULL) !=
        PKV_OK)
      return pkv_api_refuse(error, 503, "no_memory", "messages", "there is no memory for this");
  }
  if (pkv_buffer_append(joined, "", 1, NULL) != PKV_OK)
    return pkv_api_refuse(error, 503, "no_memory", "messages", "there is no memory for this");
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
  out->content = joined->data + from; /* the buffer has its room already */
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
  return refuse_tokens(error, status, "messages", err.text);
}

static bool read_messages(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                          const json_t *root, size_t body_bytes) {
  const pkv_allocator a = pkv_allocator_default();
  const json_t *const list = field(root, "messages");
  if (list == NULL) return pkv_api_refuse(error, 400, "missing", "messages", "messages is missing");
  const size_t count = json_array_size(list);
  if (!json_is_array(list) || count < 1 || count > MAX_MESSAGES)
    return pkv_api_refuse(error, 400, "invalid_type", "messages",
                          "messages must be a list of 1 to %d messages", MAX_MESSAGES);
  pkv_message *const messages = pkv_alloc_zeroed(&a, count, sizeof *messages);
  if (messages == NULL) return refuse_tokens(error, PKV_E_NOMEM, "messages", "");
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
          : refuse_tokens(error, PKV_E_NOMEM, "messages", "");
  pkv_buffer_deinit(&joined);
  pkv_free(&a, messages, count * sizeof *messages);
  return ok;
}

static bool check_length(const pkv_tokens *prompt, pkv_api_error *error, int32_t longest,
                         const char *param) {
  if (prompt->count < 1)
    return pkv_api_refuse(error, 400, "invalid_value", param, "%s is empty", param);
  if (prompt->count >= (size_t)longest)
    return pkv_api_refuse(error, 400, "context_length_exceeded", param,
                          "%s has %zu tokens; with an answer at most %d fit", param, prompt->count,
                          (int)longest);
  return true;
}

static bool read_root(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                      int32_t longest, const json_t *root, size_t body_bytes) {
  if (!json_is_object(root))
    return pkv_api_refuse(error, 400, "invalid_type", "", "the body must be a JSON object");
  if (!read_settings(out, error, root)) return false;
  if (!(out->chat ? read_messages(&out->job.prompt, error, model, root, body_bytes)
                  : read_prompt(&out->job.prompt, error, model, root)))
    return false;
  if (check_length(&out->job.prompt, error, longest, out->chat ? "messages" : "prompt"))
    return true;
  pkv_tokens_free(&out->job.prompt);
  return false;
}

bool pkv_api_read(pkv_api_request *out, pkv_api_error *error, const pkv_model *model,
                  int32_t longest, bool chat, const char *body, size_t bytes) {
  json_error_t where;
  memset(out, 0, sizeof *out);
  memset(error, 0, sizeof *error);
  out->chat = chat;
  switch (pkv_json_check_bounds(body, bytes, MAX_JSON_VALUES)) {
  case PKV_JSON_TOO_DEEP:
    return pkv_api_refuse(error, 400, "json_too_deep", "", "the body nests deeper than %d",
                          PKV_JSON_DEPTH);
  case PKV_JSON_TOO_MANY:
    return pkv_api_refuse(error, 400, "json_too_large", "", "the body has more than %d values",
                          MAX_JSON_VALUES);
  case PKV_JSON_FITS:
    break;
  }
  json_t *const root = json_loadb(body, bytes, JSON_REJECT_DUPLICATES, &where);
  if (root == NULL)
    return pkv_api_refuse(error, 400, "invalid_json", "",
                          "the body is no JSON (in UTF-8, without duplicate keys): line %d, "
                          "column %d",
                          where.line, where.column);
  const bool ok = read_root(out, error, model, longest, root, bytes);
  json_decref(root);
  return ok;
}
