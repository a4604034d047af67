/* SPDX-License-Identifier: Apache-2.0 */
#include "server/api_constraint.h"

#include <string.h>

#include "server/json_out.h"

#define SCHEMA_BYTES ((size_t)1 << 20) /* of one written again; the engine's bound is lower */

typedef struct maker {
  pkv_constraint **out;
  pkv_api_error *error;
  const pkv_model *model;
  pkv_constraint_cache *cache;
  const char *param; /* the field that was taken */
} maker;

static bool refuse_memory(maker *m, const char *param) {
  return pkv_api_refuse(m->error, 503, "no_memory", param, "there is no memory for %s", param);
}

/* The engine's words: they name places by number and keywords by name, and quote nothing. */
static bool make(maker *m, const char *param, pkv_constraint_kind kind, const char *text,
                 size_t bytes) {
  pkv_error err = {PKV_OK, "", ""};
  if (*m->out != NULL)
    return pkv_api_refuse(m->error, 400, "invalid_value", param,
                          "%s and %s cannot be asked for at once", m->param, param);
  m->param = param;
  const pkv_status status =
      pkv_constraint_cache_get(m->out, m->cache, m->model, kind, text, bytes, &err);
  if (status == PKV_OK) return true;
  if (status == PKV_E_NOMEM) return refuse_memory(m, param);
  return pkv_api_refuse(m->error, 400,
                        status == PKV_E_UNSUPPORTED ? "unsupported" : "invalid_value", param, "%s",
                        err.text);
}

static bool make_schema(maker *m, const char *param, const json_t *schema) {
  pkv_buffer text;
  if (!json_is_object(schema) && !json_is_boolean(schema))
    return pkv_api_refuse(m->error, 400, "invalid_type", param,
                          "%s must hold a JSON schema: an object", param);
  pkv_buffer_init(&text, SCHEMA_BYTES, NULL);
  json_t *const borrowed = json_incref((json_t *)(uintptr_t)schema);
  const pkv_status written = pkv_json_append(&text, borrowed, NULL);
  const bool made = written == PKV_OK ? make(m, param, PKV_CONSTRAINT_SCHEMA, text.data, text.size)
                    : written == PKV_E_NOMEM ? refuse_memory(m, param)
                                             : pkv_api_refuse(m->error, 400, "out_of_range", param,
                                                              "%s is too large", param);
  pkv_buffer_deinit(&text);
  return made;
}

bool pkv_api_use_schema(pkv_constraint **out, pkv_api_error *error, const pkv_model *model,
                        pkv_constraint_cache *cache, const char *param, const json_t *schema) {
  maker m = {out, error, model, cache, ""};
  return schema != NULL ? make_schema(&m, param, schema) : refuse_memory(&m, param);
}

/* OpenAI's, and llama-server's json_object with a schema. */
static bool read_format(maker *m, const json_t *root) {
  static const char name[] = "response_format";
  const json_t *const format = pkv_api_field(root, name);
  const char *const type = json_string_value(json_object_get(format, "type"));
  const json_t *const schema = pkv_api_field(format, "schema");
  if (format == NULL) return true;
  if (type == NULL)
    return pkv_api_refuse(m->error, 400, "invalid_type", name,
                          "response_format must be an object with a type");
  if (strcmp(type, "text") == 0) return true;
  if (strcmp(type, "json_object") == 0)
    return schema != NULL ? make_schema(m, name, schema)
                          : make(m, name, PKV_CONSTRAINT_JSON, "", 0);
  if (strcmp(type, "json_schema") != 0)
    return pkv_api_refuse(m->error, 400, "unsupported", name,
                          "response_format.type may be text, json_object or json_schema");
  const json_t *const inside = pkv_api_field(format, "json_schema");
  const json_t *const nested = pkv_api_field(inside, "schema");
  return make_schema(m, name, nested != NULL ? nested : schema);
}

/* A schema, also as text that spells one (vLLM's clients send either). */
static bool read_schema(maker *m, const json_t *root, const char *name) {
  const json_t *const value = pkv_api_field(root, name);
  if (value == NULL || (json_is_object(value) && json_object_size(value) == 0)) return true;
  if (!json_is_string(value)) return make_schema(m, name, value);
  if (json_string_length(value) == 0) return true;
  return make(m, name, PKV_CONSTRAINT_SCHEMA, json_string_value(value), json_string_length(value));
}

static bool read_grammar(maker *m, const json_t *root, const char *name) {
  const json_t *const value = pkv_api_field(root, name);
  if (value == NULL) return true;
  if (!json_is_string(value))
    return pkv_api_refuse(m->error, 400, "invalid_type", name, "%s must be a string", name);
  if (json_string_length(value) == 0) return true; /* llama-server's clients send it so */
  return make(m, name, PKV_CONSTRAINT_GRAMMAR, json_string_value(value), json_string_length(value));
}

bool pkv_api_read_constraint(pkv_constraint **out, pkv_api_error *error, const pkv_model *model,
                             pkv_constraint_cache *cache, const json_t *root) {
  maker m = {out, error, model, cache, ""};
  *out = NULL;
  if (read_format(&m, root) && read_grammar(&m, root, "grammar") &&
      read_grammar(&m, root, "guided_grammar") && read_schema(&m, root, "json_schema") &&
      read_schema(&m, root, "guided_json"))
    return true;
  pkv_constraint_destroy(*out);
  *out = NULL;
  return false;
}
