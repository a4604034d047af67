/* SPDX-License-Identifier: Apache-2.0 */
/* One schema: references and combinations, constants, then by type. */
#include "grammar/schema.h"

#include <string.h>

#include "base/hash.h"
#include "base/json_bounds.h"
#include "base/text.h"
#include "base/json_memory.h"
#include "grammar/schema_parts.h"

static const json_t *get(const json_t *schema, const char *word) {
  return json_object_get(schema, word);
}

/* --- constants ----------------------------------------------------------------------------- */

int32_t pkv_schema_text(pkv_schema_reader *r, const json_t *value) {
  pkv_buffer text;
  pkv_buffer_init(&text, PKV_SCHEMA_BYTES, &r->allocator);
  int32_t node = 0;
  const pkv_status status = pkv_json_write(&text, value, JSON_ENCODE_ANY | JSON_COMPACT);
  if (status == PKV_OK)
    node = pkv_syntax_text(r->tree, text.data, text.size);
  else if (status == PKV_E_LIMIT)
    (void)pkv_syntax_fail(r->tree, PKV_E_LIMIT, "a constant of the schema is too large");
  else
    (void)pkv_schema_no_memory(r);
  pkv_buffer_deinit(&text);
  return node;
}

static bool is_whole(const json_t *value) {
  const double number = json_number_value(value);
  return json_is_integer(value) ||
         (json_is_real(value) && number >= -1e15 && number <= 1e15 &&
          (double)(int64_t)number >= number && (double)(int64_t)number <= number);
}

static bool has_type(const json_t *value, const char *type) {
  if (strcmp(type, "integer") == 0) return is_whole(value);
  if (strcmp(type, "number") == 0) return json_is_number(value);
  if (strcmp(type, "string") == 0) return json_is_string(value);
  if (strcmp(type, "boolean") == 0) return json_is_boolean(value);
  if (strcmp(type, "null") == 0) return json_is_null(value);
  if (strcmp(type, "array") == 0) return json_is_array(value);
  return strcmp(type, "object") == 0 && json_is_object(value);
}

static bool fits_type(const json_t *value, const json_t *type) {
  size_t i;
  const json_t *item;
  if (type == NULL) return true;
  if (json_is_string(type)) return has_type(value, json_string_value(type));
  json_array_foreach(type, i, item) {
    if (json_is_string(item) && has_type(value, json_string_value(item))) return true;
  }
  return false;
}

/* Keywords that would have to be checked against each constant. */
static bool constants_alone(pkv_schema_reader *r, const json_t *schema,
                            const pkv_schema_place *at) {
  const char *word;
  json_t *value;
  json_object_foreach((json_t *)(uintptr_t)schema, word, value) {
    if (pkv_schema_is_note(word) || strcmp(word, "type") == 0 || strcmp(word, "enum") == 0 ||
        strcmp(word, "const") == 0)
      continue;
    (void)pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                            "enum or const beside other keywords than type is not supported");
    return false;
  }
  return true;
}

static int32_t constants(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at) {
  const json_t *const list = get(schema, "enum"), *const one = get(schema, "const");
  const json_t *const type = get(schema, "type");
  int32_t node = pkv_syntax_none(r->tree);
  size_t i;
  const json_t *item;
  if (!constants_alone(r, schema, at)) return 0;
  if (list != NULL && !json_is_array(list))
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "enum must be a list");
  if (list == NULL) return fits_type(one, type) ? pkv_schema_text(r, one) : node;
  json_array_foreach(list, i, item) {
    const bool allowed = one == NULL || json_equal(one, item);
    if (allowed && fits_type(item, type))
      node = pkv_syntax_either(r->tree, node, pkv_schema_text(r, item));
  }
  return node;
}

/* --- types --------------------------------------------------------------------------------- */

static int32_t of_type(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at,
                       const char *type) {
  pkv_syntax *const t = r->tree;
  if (strcmp(type, "string") == 0) return pkv_schema_string(r, schema, at);
  if (strcmp(type, "integer") == 0) return pkv_schema_number(r, schema, at, true);
  if (strcmp(type, "number") == 0) return pkv_schema_number(r, schema, at, false);
  if (strcmp(type, "object") == 0) return pkv_schema_object(r, schema, at);
  if (strcmp(type, "array") == 0) return pkv_schema_array(r, schema, at);
  if (strcmp(type, "null") == 0) return pkv_syntax_string(t, "null");
  if (strcmp(type, "boolean") == 0)
    return pkv_syntax_either(t, pkv_syntax_string(t, "true"), pkv_syntax_string(t, "false"));
  return pkv_schema_refuse(r, at, PKV_E_INVALID,
                           "type must be string, number, integer, boolean, null, object or array");
}

/* Without a type, the types that the keywords speak of: all others would be valid, too. */
static int32_t by_keywords(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at) {
  static const struct {
    const char *word, *type;
  } list[] = {
      {"properties", "object"},
      {"required", "object"},
      {"additionalProperties", "object"},
      {"items", "array"},
      {"prefixItems", "array"},
      {"minItems", "array"},
      {"maxItems", "array"},
      {"uniqueItems", "array"},
      {"minLength", "string"},
      {"maxLength", "string"},
      {"pattern", "string"},
      {"format", "string"},
      {"minimum", "number"},
      {"maximum", "number"},
      {"exclusiveMinimum", "number"},
      {"exclusiveMaximum", "number"},
      {"multipleOf", "number"},
  };
  const char *last = NULL;
  int32_t node = pkv_syntax_none(r->tree);
  for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
    if (get(schema, list[i].word) == NULL || (last != NULL && strcmp(last, list[i].type) == 0))
      continue;
    last = list[i].type;
    node = pkv_syntax_either(r->tree, node, of_type(r, schema, at, last));
  }
  return last != NULL ? node : pkv_json_value(r->rules, PKV_FREE_LEVELS);
}

static int32_t by_type(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at) {
  const json_t *const type = get(schema, "type");
  int32_t node = pkv_syntax_none(r->tree);
  size_t i;
  const json_t *item;
  if (type == NULL) return by_keywords(r, schema, at);
  if (json_is_string(type)) return of_type(r, schema, at, json_string_value(type));
  if (!json_is_array(type) || json_array_size(type) < 1 || json_array_size(type) > 7)
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "type must be a string or a list of them");
  json_array_foreach(type, i, item) {
    const char *const name = json_string_value(item);
    if (name == NULL)
      return pkv_schema_refuse(r, at, PKV_E_INVALID, "type must be a string or a list of them");
    node = pkv_syntax_either(r->tree, node, of_type(r, schema, at, name));
  }
  return node;
}

/* --- combinations -------------------------------------------------------------------------- */

static int32_t any_of(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at,
                      const char *word) {
  const json_t *const list = get(schema, word);
  int32_t node = pkv_syntax_none(r->tree);
  const pkv_schema_place place = {at, word, -1};
  if (!json_is_array(list) || json_array_size(list) < 1)
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "%s must be a list of schemas", word);
  if (strcmp(word, "oneOf") == 0 && !pkv_schema_apart(r, list, &place))
    return pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                             "oneOf is supported where its schemas cannot be satisfied at once; "
                             "anyOf has no such bound");
  json_t *const base = pkv_json_copy(schema);
  if (json_array_append_new(r->made, base) != 0) return pkv_schema_no_memory(r);
  (void)json_object_del(base, word);
  bool bare = true;
  const char *key;
  json_t *value;
  json_object_foreach(base, key, value) bare = bare && pkv_schema_is_note(key);
  for (size_t i = 0; i < json_array_size(list) && !pkv_schema_failed(r); i++) {
    const pkv_schema_place one = {at, word, (int)i};
    const json_t *part = json_array_get(list, i);
    if (!bare) part = pkv_schema_merge(r, base, part, &one);
    if (part != NULL) node = pkv_syntax_either(r->tree, node, pkv_schema_node(r, part, &one));
  }
  return node;
}

static int32_t build(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at) {
  if (json_is_true(schema)) return pkv_json_value(r->rules, PKV_FREE_LEVELS);
  if (json_is_false(schema)) return pkv_syntax_none(r->tree);
  if (!json_is_object(schema))
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "a schema must be an object, true or false");
  if (!pkv_schema_check_words(r, schema, at)) return 0;
  if (get(schema, "$ref") != NULL || get(schema, "allOf") != NULL) {
    const json_t *target = NULL;
    bool bare = get(schema, "allOf") == NULL;
    const char *word;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)schema, word, value) bare =
        bare && (pkv_schema_is_note(word) || strcmp(word, "$ref") == 0);
    /* A bare reference is a rule's name: schemas may hold themselves. */
    target = bare ? pkv_schema_target(r, get(schema, "$ref"), at) : pkv_schema_flat(r, schema, at);
    return target != NULL ? pkv_schema_node(r, target, at) : 0;
  }
  if (get(schema, "anyOf") != NULL) return any_of(r, schema, at, "anyOf");
  if (get(schema, "oneOf") != NULL) return any_of(r, schema, at, "oneOf");
  if (get(schema, "enum") != NULL || get(schema, "const") != NULL) return constants(r, schema, at);
  return by_type(r, schema, at);
}

/* --- one rule a schema --------------------------------------------------------------------- */

static pkv_schema_memo *find(const pkv_schema_reader *r, const json_t *schema) {
  const uintptr_t address = (uintptr_t)schema;
  size_t i = (size_t)pkv_hash_bytes(&address, sizeof address, 0) % r->slots;
  while (r->memo[i].rule >= 0 && r->memo[i].schema != schema)
    i = (i + 1) % r->slots;
  return &r->memo[i];
}

int32_t pkv_schema_node(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at) {
  if (pkv_schema_failed(r)) return 0;
  pkv_schema_memo *const memo = find(r, schema);
  if (memo->rule >= 0) return pkv_syntax_call(r->tree, memo->rule);
  if (r->depth >= PKV_SCHEMA_DEPTH)
    return pkv_schema_refuse(r, at, PKV_E_LIMIT, "schemas lie in each other deeper than %d",
                             PKV_SCHEMA_DEPTH);
  if (++r->work > PKV_SCHEMA_WORK || r->used * 2 >= r->slots)
    return pkv_schema_refuse(r, at, PKV_E_LIMIT, "the schema comes to more than %d schemas",
                             PKV_SCHEMA_WORK);
  const int32_t rule = pkv_syntax_new_rule(r->tree, 0);
  *memo = (pkv_schema_memo){schema, rule};
  r->used++;
  r->depth++;
  pkv_syntax_define(r->tree, rule, build(r, schema, at));
  r->depth--;
  return pkv_syntax_call(r->tree, rule);
}

int32_t pkv_schema_read(pkv_json_rules *rules, const json_t *schema, const pkv_allocator *a) {
  pkv_schema_reader r = {.rules = rules, .tree = rules->tree, .root = schema};
  r.allocator = pkv_allocator_or_default(a);
  r.slots = 2 * PKV_SCHEMA_WORK + 2;
  r.memo = pkv_alloc(&r.allocator, r.slots * sizeof *r.memo);
  r.made = json_array();
  int32_t node = 0;
  if (r.memo == NULL || r.made == NULL) {
    (void)pkv_syntax_fail(r.tree, PKV_E_NOMEM, "no memory for a schema");
  } else {
    for (size_t i = 0; i < r.slots; i++)
      r.memo[i].rule = -1;
    node = pkv_schema_node(&r, schema, NULL);
  }
  pkv_free(&r.allocator, r.memo, r.slots * sizeof *r.memo);
  json_decref(r.made);
  return node;
}

json_t *pkv_schema_parse(pkv_syntax *tree, const char *text, size_t bytes) {
  json_error_t where;
  bool lost;
  if (bytes > PKV_SCHEMA_BYTES) {
    (void)pkv_syntax_fail(tree, PKV_E_LIMIT, "the schema has %zu bytes, possible are %d", bytes,
                          PKV_SCHEMA_BYTES);
    return NULL;
  }
  if (pkv_json_check_bounds(text, bytes, PKV_SCHEMA_VALUES) != PKV_JSON_FITS) {
    (void)pkv_syntax_fail(tree, PKV_E_LIMIT,
                          "the schema nests deeper than %d or has more than %d values",
                          PKV_JSON_DEPTH, PKV_SCHEMA_VALUES);
    return NULL;
  }
  json_t *const root =
      pkv_json_load(&lost, text, bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &where);
  if (lost)
    (void)pkv_syntax_fail(tree, PKV_E_NOMEM, "no memory for a schema");
  else if (root == NULL && json_error_code(&where) == json_error_numeric_overflow)
    (void)pkv_syntax_fail(tree, PKV_E_UNSUPPORTED,
                          "the schema has a number that is too large: line %d, column %d",
                          where.line, where.column);
  else if (root == NULL)
    (void)pkv_syntax_fail(tree, PKV_E_FORMAT, "the schema is no JSON: line %d, column %d",
                          where.line, where.column);
  return root;
}
