/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A conversation in the chat API's JSON, checked, brought into the form that templates expect, and
 * shown to one. Untrusted: errors name the path of a member and hold none of its text.
 */
#include "model/chat.h"

#include <string.h>

#include "base/json_bounds.h"
#include "base/json_memory.h"
#include "base/text.h"
#include "model/json_text.h"

#define MAX_VALUES 1048576u
/* Of what arguments spell, in all: they are texts, which no bound on the conversation counts. */
#define SPELT_VALUES 262144u
#define NAME         "the conversation"

static json_t *member(json_t *object, const char *key) {
  return json_object_get(object, key);
}

/* null counts as absent. */
static void drop_nulls(json_t *object) {
  const char *key;
  json_t *value;
  void *next;
  json_object_foreach_safe(object, next, key, value) {
    if (json_is_null(value)) (void)json_object_del(object, key);
  }
}

static void count_values(size_t *items, size_t *members, json_t *json) {
  size_t i;
  const char *key;
  json_t *value;
  json_array_foreach(json, i, value) {
    ++*items;
    count_values(items, members, value);
  }
  json_object_foreach(json, key, value) {
    ++*members;
    count_values(items, members, value);
  }
}

/* ---- messages ---- */

static pkv_status check_role(json_t *message, size_t i, pkv_error *err) {
  static const char *const roles[] = {"system", "user", "assistant", "tool"};
  const char *const role = json_string_value(member(message, "role"));
  PKV_CHECK(err, role != NULL, PKV_E_INVALID, "messages[%zu].role must be a string", i);
  for (size_t k = 0; k < sizeof roles / sizeof roles[0]; k++)
    if (strcmp(role, roles[k]) == 0) return PKV_OK;
  PKV_CHECK(err, strcmp(role, "developer") == 0, PKV_E_INVALID,
            "messages[%zu].role must be system, developer, user, assistant or tool", i);
  PKV_CHECK(err, json_object_set_new(message, "role", json_string("system")) == 0, PKV_E_NOMEM,
            "no memory for messages[%zu]", i);
  return PKV_OK;
}

/* Texts of a list of parts become one text: most templates know nothing else. */
static pkv_status join_parts(json_t *message, const json_t *list, size_t i, pkv_error *err) {
  pkv_buffer text;
  size_t k;
  json_t *part;
  pkv_status status = PKV_OK;
  pkv_buffer_init(&text, SIZE_MAX / 2, NULL);
  json_array_foreach(list, k, part) {
    const json_t *const said = member(part, "text");
    if (!pkv_json_says(part, "type", "text") || !json_is_string(said)) {
      status = PKV_FAIL(err, PKV_E_INVALID,
                        "messages[%zu].content[%zu] must be a part of type text", i, k);
      break;
    }
    status = pkv_buffer_append(&text, json_string_value(said), json_string_length(said), err);
    if (status != PKV_OK) break;
  }
  if (status == PKV_OK &&
      json_object_set_new(message, "content", json_stringn(text.size ? text.data : "", text.size)))
    status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for messages[%zu].content", i);
  pkv_buffer_deinit(&text);
  return status;
}

static pkv_status check_content(json_t *message, size_t i, pkv_error *err) {
  const json_t *const content = member(message, "content");
  if (json_is_string(content)) return PKV_OK;
  if (json_is_array(content)) return join_parts(message, content, i, err);
  PKV_CHECK(err, content == NULL && member(message, "tool_calls") != NULL, PKV_E_INVALID,
            "messages[%zu].content must be a string, or a list of parts of type text", i);
  /* Clients leave it out beside calls; templates look into it. */
  PKV_CHECK(err, json_object_set_new(message, "content", json_string("")) == 0, PKV_E_NOMEM,
            "no memory for messages[%zu]", i);
  return PKV_OK;
}

/* The API has arguments as a text, templates want what it spells: up to *left values. */
static pkv_status read_arguments(size_t *left, json_t *function, size_t i, size_t k,
                                 pkv_error *err) {
  const json_t *const text = member(function, "arguments");
  if (text == NULL || json_is_object(text)) return PKV_OK;
  PKV_CHECK(err, json_is_string(text), PKV_E_INVALID,
            "messages[%zu].tool_calls[%zu].function.arguments must be a string or an object", i, k);
  const char *const p = json_string_value(text);
  const size_t n = json_string_length(text);
  if (pkv_json_check_bounds(p, n, *left) != PKV_JSON_FITS) return PKV_OK;
  json_error_t where;
  bool lost;
  json_t *const spelt = pkv_json_load(&lost, p, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &where);
  if (!lost && !json_is_object(spelt)) { /* a model wrote it: it stays what it is */
    json_decref(spelt);
    return PKV_OK;
  }
  PKV_CHECK(err, !lost && json_object_set_new(function, "arguments", spelt) == 0, PKV_E_NOMEM,
            "no memory for messages[%zu].tool_calls[%zu]", i, k);
  size_t values = 1, members = 0;
  count_values(&values, &members, spelt);
  *left -= values + members <= *left ? values + members : *left;
  return PKV_OK;
}

static pkv_status check_calls(size_t *left, json_t *message, size_t i, pkv_error *err) {
  const json_t *const calls = member(message, "tool_calls");
  size_t k;
  json_t *call;
  if (calls == NULL) return PKV_OK;
  PKV_CHECK(err, json_is_array(calls), PKV_E_INVALID, "messages[%zu].tool_calls must be a list", i);
  PKV_CHECK(err, pkv_json_says(message, "role", "assistant"), PKV_E_INVALID,
            "messages[%zu].tool_calls: only an assistant makes calls", i);
  if (json_array_size(calls) == 0) {
    (void)json_object_del(message, "tool_calls");
    return PKV_OK;
  }
  json_array_foreach(calls, k, call) {
    json_t *const function = member(call, "function");
    PKV_CHECK(err, json_is_string(member(function, "name")), PKV_E_INVALID,
              "messages[%zu].tool_calls[%zu].function.name must be a string", i, k);
    PKV_TRY(read_arguments(left, function, i, k, err));
  }
  return PKV_OK;
}

static pkv_status check_turns(const json_t *root, pkv_error *err) {
  const json_t *const list = json_object_get(root, "messages");
  size_t i;
  json_t *message;
  size_t left = SPELT_VALUES;
  PKV_CHECK(err, json_is_array(list) && json_array_size(list) > 0, PKV_E_INVALID,
            "messages must be a list of at least one message");
  json_array_foreach(list, i, message) {
    PKV_CHECK(err, json_is_object(message), PKV_E_INVALID, "messages[%zu] must be an object", i);
    drop_nulls(message);
    PKV_TRY(check_role(message, i, err));
    PKV_TRY(check_calls(&left, message, i, err));
    PKV_TRY(check_content(message, i, err));
  }
  return PKV_OK;
}

/* ---- what else a request has ---- */

static pkv_status check_tools(json_t *root, const pkv_chat_template *chat, pkv_error *err) {
  const json_t *const tools = member(root, "tools");
  size_t i;
  json_t *tool;
  if (tools == NULL) return PKV_OK;
  PKV_CHECK(err, json_is_array(tools), PKV_E_INVALID, "tools must be a list");
  json_array_foreach(tools, i, tool) {
    PKV_CHECK(err, pkv_json_says(tool, "type", "function"), PKV_E_INVALID,
              "tools[%zu].type must be function", i);
    PKV_CHECK(err, json_is_string(member(member(tool, "function"), "name")), PKV_E_INVALID,
              "tools[%zu].function.name must be a string", i);
  }
  /* Templates ask whether there are tools by `is none`, too. */
  if (json_array_size(tools) == 0) {
    (void)json_object_del(root, "tools");
    return PKV_OK;
  }
  PKV_CHECK(err, pkv_chat_shows_tools(chat), PKV_E_UNSUPPORTED,
            "the model's chat format has no place for tools");
  return PKV_OK;
}

static pkv_status read_settings(pkv_chat_view *view, json_t *root, pkv_error *err) {
  json_t *const settings = member(root, "chat_template_kwargs");
  if (settings == NULL) return PKV_OK;
  PKV_CHECK(err, json_is_object(settings), PKV_E_INVALID, "chat_template_kwargs must be an object");
  drop_nulls(settings);
  const json_t *const thinking = member(settings, "enable_thinking");
  PKV_CHECK(err, json_object_size(settings) == (thinking != NULL), PKV_E_INVALID,
            "chat_template_kwargs: only enable_thinking is known");
  PKV_CHECK(err, thinking == NULL || json_is_boolean(thinking), PKV_E_INVALID,
            "chat_template_kwargs.enable_thinking must be true or false");
  view->thinking_given = thinking != NULL;
  view->thinking = json_is_true(thinking);
  return PKV_OK;
}

/* ---- JSON as variables of a template ---- */

typedef struct value_store {
  pkv_template_value *items; /* the next free ones */
  pkv_template_member *members;
} value_store;

static pkv_template_value convert(value_store *s, json_t *json) {
  pkv_template_value v = {.kind = PKV_TEMPLATE_NONE};
  size_t i;
  const char *key;
  json_t *value;
  switch (json == NULL ? JSON_NULL : json_typeof(json)) {
  case JSON_NULL:
    break;
  case JSON_TRUE:
  case JSON_FALSE:
    v.kind = PKV_TEMPLATE_BOOL;
    v.as_int = json_is_true(json);
    break;
  case JSON_INTEGER:
    v.kind = PKV_TEMPLATE_INT;
    v.as_int = json_integer_value(json);
    break;
  case JSON_REAL:
    v.kind = PKV_TEMPLATE_REAL;
    v.as_real = json_real_value(json);
    break;
  case JSON_STRING:
    v = pkv_template_text(json_string_value(json), json_string_length(json), false);
    break;
  case JSON_ARRAY: {
    pkv_template_value *const items = s->items;
    s->items += json_array_size(json);
    json_array_foreach(json, i, value) items[i] = convert(s, value);
    v.kind = PKV_TEMPLATE_LIST;
    v.items = items;
    v.count = json_array_size(json);
    break;
  }
  case JSON_OBJECT: {
    pkv_template_member *const members = s->members;
    s->members += json_object_size(json);
    i = 0;
    json_object_foreach(json, key, value) members[i++] =
        (pkv_template_member){key, strlen(key), convert(s, value)};
    v.kind = PKV_TEMPLATE_MAP;
    v.members = members;
    v.count = json_object_size(json);
    break;
  }
  }
  return v;
}

/* Roles are of a closed list, so they count as the template's own text. */
static pkv_template_value convert_messages(value_store *s, json_t *list) {
  size_t i;
  json_t *message;
  pkv_template_value *const items = s->items;
  s->items += json_array_size(list);
  json_array_foreach(list, i, message) {
    pkv_template_member *const own = s->members; /* a map's members come before what they hold */
    items[i] = convert(s, message);
    for (size_t k = 0; k < items[i].count; k++)
      if (strcmp(own[k].key, "role") == 0) own[k].value.trusted = true;
  }
  return (pkv_template_value){
      .kind = PKV_TEMPLATE_LIST, .items = items, .count = json_array_size(list)};
}

static pkv_status show(pkv_template_output *out, const pkv_chat_template *chat, json_t *root,
                       pkv_chat_view *view, pkv_error *err) {
  const pkv_allocator a = pkv_chat_allocator(chat);
  json_t *const messages = member(root, "messages"), *const tools = member(root, "tools");
  size_t items = json_array_size(messages) + json_array_size(tools), members = 0;
  count_values(&items, &members, messages);
  count_values(&items, &members, tools);
  const size_t bytes = items * sizeof(pkv_template_value) + members * sizeof(pkv_template_member);
  pkv_template_value *const block = pkv_alloc(&a, bytes);
  PKV_CHECK(err, block != NULL, PKV_E_NOMEM, "no memory for %zu values of a conversation",
            items + members);
  value_store store = {block, (pkv_template_member *)(void *)(block + items)};
  view->messages = convert_messages(&store, messages);
  view->tools = convert(&store, tools);
  const pkv_status status = pkv_chat_render_view(out, chat, view, err);
  pkv_free(&a, block, bytes);
  return status;
}

static pkv_status check_and_show(pkv_template_output *out, const pkv_chat_template *chat,
                                 json_t *root, pkv_chat_view *view, pkv_error *err) {
  drop_nulls(root);
  PKV_TRY(check_turns(root, err));
  PKV_TRY(check_tools(root, chat, err));
  PKV_TRY(read_settings(view, root, err));
  return show(out, chat, root, view, err);
}

pkv_status pkv_chat_render_json(pkv_template_output *out, const pkv_chat_template *chat,
                                const char *json, size_t bytes, int32_t add_generation, int64_t now,
                                pkv_error *err) {
  json_t *root;
  pkv_chat_view view = {.add_generation = add_generation != 0, .now = now};
  *out = (pkv_template_output){0};
  PKV_CHECK(err, json != NULL, PKV_E_INVALID, "json is NULL");
  PKV_CHECK(err, pkv_json_check_bounds(json, bytes, MAX_VALUES) != PKV_JSON_TOO_MANY, PKV_E_LIMIT,
            NAME " has more than %u values", MAX_VALUES);
  PKV_TRY(pkv_json_parse(&root, NAME, json, bytes, err));
  const pkv_status status = check_and_show(out, chat, root, &view, err);
  json_decref(root);
  return status;
}

pkv_status pkv_chat_encode_json(int32_t *ids, size_t capacity, size_t *count,
                                const pkv_chat_template *chat, const pkv_tokenizer *tokenizer,
                                const char *json, size_t bytes, int32_t add_generation,
                                pkv_error *err) {
  pkv_template_output text;
  PKV_CHECK(err, count != NULL, PKV_E_INVALID, "count is NULL");
  *count = 0;
  PKV_TRY(pkv_chat_render_json(&text, chat, json, bytes, add_generation, pkv_chat_now(), err));
  const pkv_status status = pkv_chat_encode_output(ids, capacity, count, tokenizer, &text, err);
  pkv_template_output_free(&text);
  return status;
}
