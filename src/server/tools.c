/* SPDX-License-Identifier: Apache-2.0 */
#include "server/tools.h"

#include <stdio.h>
#include <string.h>

#include "base/json_bounds.h"
#include "base/status.h"
#include "server/api_fields.h"
#include "server/json_out.h"

#define MAX_CALLS     8 /* of one answer, where they are demanded */
#define PROMPT_BYTES  ((size_t)32 << 20)
#define SCHEMA_LEVELS 64

static const char *const markers[] = {
    [PKV_TOOLS_TAGGED] = "<tool_call>",
    [PKV_TOOLS_MISTRAL] = "[TOOL_CALLS]",
    [PKV_TOOLS_SHOWN] = NULL,
};

static json_t *editable(const json_t *value) {
  return (json_t *)(uintptr_t)value;
}

static const char *name_of(const json_t *tool) {
  return json_string_value(json_object_get(json_object_get(tool, "function"), "name"));
}

/* --- the request's fields ------------------------------------------------------------------ */

static bool good_name(const char *name) {
  const size_t bytes = name != NULL ? strlen(name) : 0;
  static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
  return bytes >= 1 && bytes <= PKV_TOOL_NAME && strspn(name, allowed) == bytes;
}

bool pkv_tools_have(const pkv_tools *tools, const char *name) {
  size_t i;
  const json_t *tool;
  json_array_foreach(tools->list, i, tool) {
    if (strcmp(name_of(tool), name) == 0) return true;
  }
  return false;
}

static bool check_tools(pkv_api_error *error, const json_t *list) {
  size_t i;
  const json_t *tool;
  if (!json_is_array(list) || json_array_size(list) > PKV_API_TOOLS)
    return pkv_api_refuse(error, 400, "invalid_type", "tools",
                          "tools must be a list of at most %d tools", PKV_API_TOOLS);
  json_array_foreach(list, i, tool) {
    const char *const type = json_string_value(json_object_get(tool, "type"));
    const json_t *const function = json_object_get(tool, "function");
    const json_t *const parameters = pkv_api_field(function, "parameters");
    if (type == NULL || strcmp(type, "function") != 0 || !json_is_object(function))
      return pkv_api_refuse(error, 400, "invalid_value", "tools",
                            "tools[%zu] must be of type function, with a function", i);
    if (!good_name(name_of(tool)))
      return pkv_api_refuse(error, 400, "invalid_value", "tools",
                            "tools[%zu].function.name must be 1 to %d letters, digits, _, - or .",
                            i, PKV_TOOL_NAME);
    if (parameters != NULL && !json_is_object(parameters))
      return pkv_api_refuse(error, 400, "invalid_type", "tools",
                            "tools[%zu].function.parameters must be a JSON schema: an object", i);
  }
  return true;
}

static bool read_choice(pkv_tools *out, pkv_api_error *error, const json_t *root, bool *none) {
  static const char name[] = "tool_choice";
  const json_t *const choice = pkv_api_field(root, name);
  const char *const word = json_string_value(choice);
  *none = false;
  if (choice == NULL) return true;
  if (word != NULL) {
    *none = strcmp(word, "none") == 0;
    out->demanded = strcmp(word, "required") == 0;
    if (*none || out->demanded || strcmp(word, "auto") == 0) return true;
  }
  const char *const called = name_of(choice);
  if (called == NULL)
    return pkv_api_refuse(error, 400, "invalid_value", name,
                          "tool_choice must be none, auto, required, or name a function");
  if (!pkv_tools_have(out, called))
    return pkv_api_refuse(error, 400, "invalid_value", name,
                          "tool_choice names a function that is not among the tools");
  out->demanded = true;
  memcpy(out->only, called, strlen(called) + 1); /* as long as a tool's name */
  return true;
}

static bool read_tools(pkv_tools *out, pkv_api_error *error, const pkv_model *model,
                       const json_t *root) {
  const json_t *const list = pkv_api_field(root, "tools");
  bool none = false;
  memset(out, 0, sizeof *out);
  if (list != NULL && !check_tools(error, list)) return false;
  out->list = json_array_size(list) > 0 ? json_incref(editable(list)) : NULL;
  const bool good = read_choice(out, error, root, &none) &&
                    pkv_api_flag(&out->parallel, error, root, "parallel_tool_calls", true);
  if (good && out->demanded && out->list == NULL) {
    (void)pkv_api_refuse(error, 400, "invalid_value", "tool_choice",
                         "tool_choice demands a call, and there are no tools");
    return false;
  }
  if (!good || none) pkv_tools_free(out);
  out->style = pkv_model_tool_style(model);
  return good;
}

void pkv_tools_free(pkv_tools *tools) {
  json_decref(tools->list);
  tools->list = NULL;
  tools->demanded = false;
}

/* --- what a call has to be ----------------------------------------------------------------- */

/* Members of a schema whose own members are names, each of a schema. */
static bool holds_names(const char *key) {
  static const char *const keys[] = {"properties", "patternProperties", "$defs", "definitions",
                                     "dependentSchemas"};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
    if (strcmp(key, keys[i]) == 0) return true;
  return false;
}

/* Members of a schema that hold any value, not schemas. */
static bool holds_data(const char *key) {
  return strcmp(key, "enum") == 0 || strcmp(key, "const") == 0 || strcmp(key, "default") == 0 ||
         strcmp(key, "examples") == 0;
}

/* References inside a tool's schema, which stands in another one now. `names`: the members of this
   value are names, whatever they spell. */
static json_t *moved(const json_t *value, const char *to, bool names, int level) {
  const char *key;
  size_t i;
  json_t *item;
  if (level > SCHEMA_LEVELS) return json_null();
  if (json_is_array(value)) {
    json_t *copy = json_array();
    json_array_foreach(value, i, item) pkv_json_add(&copy, moved(item, to, false, level + 1));
    return copy;
  }
  if (!json_is_object(value)) return json_incref(editable(value));
  json_t *copy = json_object();
  json_object_foreach(editable(value), key, item) {
    const char *const ref = !names && strcmp(key, "$ref") == 0 ? json_string_value(item) : NULL;
    const bool path = ref != NULL && ref[0] == '#' && (ref[1] == '/' || ref[1] == '\0');
    json_t *const inside = path ? json_sprintf("%s%s", to, ref + 1)
                           : !names && holds_data(key)
                               ? json_incref(item)
                               : moved(item, to, !names && holds_names(key), level + 1);
    pkv_json_set(&copy, key, inside);
  }
  return copy;
}

static json_t *call_schema(json_t **schemas, const pkv_tools *tools, const json_t *tool, size_t i) {
  const json_t *const parameters = pkv_api_field(json_object_get(tool, "function"), "parameters");
  const char *const word = tools->style == PKV_TOOLS_LLAMA ? "parameters" : "arguments";
  char number[24], to[32];
  (void)snprintf(number, sizeof number, "%zu", i);
  (void)snprintf(to, sizeof to, "#/$defs/%zu", i);
  json_t *const inside = parameters != NULL && json_object_size(parameters) > 0
                             ? moved(parameters, to, false, 0)
                             : json_pack("{s:s, s:b}", "type", "object", "additionalProperties", 0);
  pkv_json_set(schemas, number, inside);
  return json_pack("{s:s, s:{s:{s:s}, s:{s:s}}, s:[s, s], s:b}", "type", "object", "properties",
                   "name", "const", name_of(tool), word, "$ref", to, "required", "name", word,
                   "additionalProperties", 0);
}

json_t *pkv_tools_schema(const pkv_tools *tools) {
  json_t *schemas = json_object(), *any = json_array();
  size_t i;
  const json_t *tool;
  json_array_foreach(tools->list, i, tool) {
    if (tools->only[0] == '\0' || strcmp(tools->only, name_of(tool)) == 0)
      pkv_json_add(&any, call_schema(&schemas, tools, tool, i));
  }
  if (tools->style != PKV_TOOLS_MISTRAL)
    return json_pack("{s:o, s:o}", "anyOf", any, "$defs", schemas);
  return json_pack("{s:s, s:{s:o}, s:i, s:i, s:o}", "type", "array", "items", "anyOf", any,
                   "minItems", 1, "maxItems",
                   tools->parallel && tools->only[0] == '\0' ? MAX_CALLS : 1, "$defs", schemas);
}

/* --- the prompt ---------------------------------------------------------------------------- */

/* Whether the conversation has to be read as JSON: it has tools, or turns that speak of them. */
static bool concern(const pkv_tools *tools, const json_t *root) {
  const json_t *const list = pkv_api_field(root, "messages");
  size_t i;
  const json_t *message;
  if (tools->list != NULL) return true;
  json_array_foreach(list, i, message) {
    const char *const role = json_string_value(json_object_get(message, "role"));
    if (pkv_api_field(message, "tool_calls") != NULL || (role != NULL && strcmp(role, "tool") == 0))
      return true;
  }
  return false;
}

/* For templates that show no tools: told in the system's words. */
static json_t *explain(const pkv_tools *tools) {
  json_t *text = NULL;
  pkv_buffer list;
  pkv_buffer_init(&list, PROMPT_BYTES, NULL);
  if (pkv_json_append(&list, json_incref(tools->list), NULL) == PKV_OK)
    text = json_sprintf("You may call these functions:\n%s\nTo call one, answer with nothing but "
                        "a JSON object {\"name\": its name, \"arguments\": its arguments}.",
                        list.data);
  pkv_buffer_deinit(&list);
  return text;
}

/* What arguments spell, if that is no larger than a body may be; else they stay a string. False:
   there is no memory. */
static bool spell_out(json_t **out, const json_t *arguments) {
  const char *const text = json_string_value(arguments);
  const size_t bytes = json_string_length(arguments);
  json_error_t error;
  bool lost;
  *out = NULL;
  if (text == NULL || pkv_json_check_bounds(text, bytes, PKV_API_VALUES) != PKV_JSON_FITS)
    return true;
  *out = pkv_json_load(&lost, text, bytes, JSON_REJECT_DUPLICATES, &error);
  return !lost;
}

/* A call as a model writes it: arguments that spell an object are that object. */
static json_t *plain_call(const json_t *call) {
  const json_t *const function = json_object_get(call, "function");
  json_t *spelled, *copy = pkv_json_copy(function);
  if (!spell_out(&spelled, json_object_get(function, "arguments")))
    pkv_json_set(&copy, "arguments", NULL);
  else if (json_is_object(spelled))
    pkv_json_set(&copy, "arguments", json_incref(spelled));
  json_decref(spelled);
  return copy;
}

/* Whether they are calls by the rules that every conversation is checked by afterwards. */
static bool are_calls(const json_t *message, const json_t *calls) {
  const char *const role = json_string_value(json_object_get(message, "role"));
  size_t i;
  const json_t *call;
  if (!json_is_array(calls) || role == NULL || strcmp(role, "assistant") != 0) return false;
  json_array_foreach(calls, i, call) {
    const json_t *const function = json_object_get(call, "function");
    const json_t *const arguments = json_object_get(function, "arguments");
    if (!json_is_string(json_object_get(function, "name")) ||
        (arguments != NULL && !json_is_string(arguments) && !json_is_object(arguments)))
      return false;
  }
  return true;
}

/* Behind what a turn says, be that a text or parts; false: there is no memory. */
static bool add_text(json_t *turn, const char *between, const char *text) {
  json_t *const content = json_object_get(turn, "content");
  const char *const said = json_string_value(content);
  if (said != NULL || content == NULL || json_is_null(content))
    return json_object_set_new(turn, "content",
                               json_sprintf("%s%s%s", said != NULL ? said : "",
                                            json_string_length(content) > 0 ? between : "",
                                            text)) == 0;
  if (!json_is_array(content)) return true; /* refused where all contents are checked */
  json_t *const parts = pkv_json_copy(content);
  json_t *const more = json_sprintf("%s%s", json_array_size(content) > 0 ? between : "", text);
  const bool good =
      json_array_append_new(parts, json_pack("{s:s, s:o}", "type", "text", "text", more)) == 0;
  return json_object_set_new(turn, "content", parts) == 0 && good;
}

/* Each on a line of its own. */
static bool add_calls(json_t *turn, const json_t *calls) {
  pkv_buffer text;
  size_t i;
  const json_t *call;
  bool good = true;
  pkv_buffer_init(&text, PROMPT_BYTES, NULL);
  json_array_foreach(calls, i, call) {
    if (good && i > 0) good = pkv_buffer_append(&text, "\n", 1, NULL) == PKV_OK;
    good = good && pkv_json_append(&text, plain_call(call), NULL) == PKV_OK;
  }
  good = good && (text.size == 0 || add_text(turn, "\n", text.data));
  pkv_buffer_deinit(&text);
  return good && json_object_del(turn, "tool_calls") == 0;
}

/* A turn with calls as the text that the model wrote, a tool's result as the user's text. What is
   wrong stays as it is, to be refused where conversations are checked. NULL: there is no memory. */
static json_t *plain_turn(const json_t *message) {
  const json_t *const calls = pkv_api_field(message, "tool_calls");
  const char *const role = json_string_value(json_object_get(message, "role"));
  json_t *const turn = pkv_json_copy(message);
  bool good = turn != NULL;
  if (good && calls != NULL && are_calls(message, calls))
    good = add_calls(turn, calls);
  else if (good && calls == NULL && role != NULL && strcmp(role, "tool") == 0)
    good = json_object_set_new(turn, "role", json_string("user")) == 0;
  if (good) return turn;
  json_decref(turn);
  return NULL;
}

/* Tells of the tools in the first turn, or in one before it. */
static bool tell(json_t *turns, json_t *first, json_t *told) {
  const char *const role = json_string_value(json_object_get(first, "role"));
  if (role != NULL && strcmp(role, "system") == 0)
    return add_text(first, "\n\n", json_string_value(told));
  return json_array_append_new(turns, json_pack("{s:s, s:O}", "role", "system", "content", told)) ==
         0;
}

/* NULL: there is no memory. */
static json_t *plain_conversation(const pkv_tools *tools, const json_t *root) {
  json_t *const turns = json_array();
  size_t i;
  const json_t *message;
  json_t *const told = tools->list != NULL ? explain(tools) : NULL;
  bool good = tools->list == NULL || told != NULL;
  json_array_foreach(pkv_api_field(root, "messages"), i, message) {
    json_t *const turn = good ? plain_turn(message) : NULL;
    good = turn != NULL && (i > 0 || told == NULL || tell(turns, turn, told));
    if (good)
      good = json_array_append_new(turns, turn) == 0;
    else
      json_decref(turn);
  }
  json_decref(told);
  if (good) return json_pack("{s:o}", "messages", turns);
  json_decref(turns);
  return NULL;
}

static json_t *conversation(const pkv_tools *tools, const json_t *root) {
  if (tools->style == PKV_TOOLS_PLAIN) return plain_conversation(tools, root);
  json_t *whole = json_pack("{s:O}", "messages", pkv_api_field(root, "messages"));
  const json_t *const settings = pkv_api_field(root, "chat_template_kwargs");
  if (tools->list != NULL) pkv_json_set(&whole, "tools", json_incref(tools->list));
  if (settings != NULL)
    pkv_json_set(&whole, "chat_template_kwargs", json_incref(editable(settings)));
  return whole;
}

/* Appends tokens of a text that may be a control token's. */
static pkv_status append_tokens(pkv_tokens *tokens, const pkv_model *model, const char *text,
                                pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_tokens more;
  PKV_TRY(pkv_tokens_from_text(&more, model, text, strlen(text), PKV_TEXT_PARSE_SPECIAL, err));
  const size_t count = tokens->count + more.count;
  int32_t *const ids = pkv_alloc_zeroed(&a, count + 1, sizeof *ids);
  if (ids != NULL) {
    memcpy(ids, tokens->ids, tokens->count * sizeof *ids);
    memcpy(ids + tokens->count, more.ids, more.count * sizeof *ids);
    pkv_tokens_free(tokens);
    *tokens = (pkv_tokens){ids, count};
  }
  pkv_tokens_free(&more);
  PKV_CHECK(err, ids != NULL, PKV_E_NOMEM, "no memory for a prompt");
  return PKV_OK;
}

static bool read_conversation(pkv_tokens *out, pkv_api_error *error, const pkv_model *model,
                              const pkv_tools *tools, const json_t *root) {
  pkv_error err = {PKV_OK, "", ""};
  pkv_buffer text;
  *out = (pkv_tokens){NULL, 0};
  const size_t count = json_array_size(pkv_api_field(root, "messages")); /* no list: 0 */
  if (count < 1 || count > PKV_API_MESSAGES)
    return pkv_api_refuse(error, 400, "invalid_type", "messages",
                          "messages must be a list of 1 to %d messages", PKV_API_MESSAGES);
  pkv_buffer_init(&text, PROMPT_BYTES, NULL);
  pkv_status status = pkv_json_append(&text, conversation(tools, root), &err);
  if (status == PKV_OK) status = pkv_tokens_from_chat_json(out, model, text.data, text.size, &err);
  pkv_buffer_deinit(&text);
  if (status == PKV_OK && tools->demanded && tools->style == PKV_TOOLS_TAGGED)
    status = append_tokens(out, model, "<tool_call>\n", &err);
  if (status == PKV_OK && tools->demanded && tools->style == PKV_TOOLS_MISTRAL)
    status = append_tokens(out, model, "[TOOL_CALLS]", &err);
  if (status == PKV_OK) return true;
  pkv_tokens_free(out);
  if (status == PKV_E_INVALID) /* its text names places and quotes nothing */
    return pkv_api_refuse(error, 400, "invalid_value", "messages", "%s", err.text);
  return pkv_api_refuse_tokens(error, status, "messages", err.text);
}

bool pkv_tools_read_prompt(pkv_tokens *out, pkv_tools *tools, pkv_api_error *error,
                           const pkv_model *model, const json_t *root, size_t body_bytes) {
  if (!read_tools(tools, error, model, root)) return false;
  const bool read = concern(tools, root)
                        ? read_conversation(out, error, model, tools, root)
                        : pkv_api_read_messages(out, error, model, root, body_bytes);
  if (!read) pkv_tools_free(tools);
  return read;
}

pkv_status pkv_tools_marker(int32_t *out, const pkv_tools *tools, const pkv_model *model) {
  pkv_tokens tokens;
  const char *const text =
      tools->list != NULL && (size_t)tools->style < sizeof markers / sizeof *markers
          ? markers[tools->style]
          : NULL;
  *out = -1;
  if (text == NULL) return PKV_OK;
  const pkv_status status =
      pkv_tokens_from_text(&tokens, model, text, strlen(text), PKV_TEXT_PARSE_SPECIAL, NULL);
  if (status == PKV_OK && tokens.count == 1) *out = tokens.ids[0];
  pkv_tokens_free(&tokens);
  return status == PKV_E_NOMEM ? status : PKV_OK; /* no such token: it is text by itself */
}
