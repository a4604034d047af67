/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two schemas at once as one. Parts that both have (a property, items) become an allOf of the two,
 * which is merged when it is come to: schemas that hold themselves do no harm here.
 */
#include <stdio.h>
#include <string.h>

#include "base/json_memory.h"
#include "base/text.h"
#include "grammar/schema_parts.h"

/* References to references. */
#define REFERENCES 32

static const json_t *get(const json_t *schema, const char *word) {
  return json_object_get(schema, word);
}

static json_t *editable(const json_t *value) {
  return (json_t *)(uintptr_t)value;
}

/* --- references ---------------------------------------------------------------------------- */

/* One step of a JSON pointer: *at stands behind the /. */
static const json_t *step(const json_t *from, const char **at) {
  char name[256];
  size_t bytes = 0;
  int64_t index = 0;
  for (; **at != '\0' && **at != '/'; ++*at) {
    char c = **at;
    if (c == '~') {
      ++*at;
      if (**at != '0' && **at != '1') return NULL;
      c = **at == '0' ? '~' : '/';
    }
    if (c == '%' || bytes + 1 >= sizeof name) return NULL;
    name[bytes++] = c;
  }
  name[bytes] = '\0';
  if (!json_is_array(from)) return json_object_get(from, name);
  if (!pkv_parse_i64(&index, name, 0, INT32_MAX)) return NULL;
  return json_array_get(from, (size_t)index);
}

const json_t *pkv_schema_target(pkv_schema_reader *r, const json_t *ref,
                                const pkv_schema_place *at) {
  const char *path = json_string_value(ref);
  const json_t *target = r->root;
  if (path == NULL || path[0] != '#' || (path[1] != '\0' && path[1] != '/')) {
    (void)pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                            "$ref must name a place in this schema: # or #/...");
    return NULL;
  }
  path++;
  while (target != NULL && *path == '/') {
    path++;
    target = step(target, &path);
  }
  if (target == NULL)
    (void)pkv_schema_refuse(r, at, PKV_E_INVALID, "there is nothing where $ref points");
  return target;
}

/* What a made schema holds counts as well: each copy of a long list is work, and memory. */
static int weight_of(const json_t *made) {
  static const char *const lists[] = {"properties", "required", "enum", "type"};
  size_t items = json_object_size(made);
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
    const json_t *const list = get(made, lists[i]);
    items += json_is_object(list) ? json_object_size(list) : json_array_size(list);
  }
  return 1 + (int)(items / 16);
}

static json_t *keep(pkv_schema_reader *r, json_t *made) {
  r->work += weight_of(made);
  if (r->work > PKV_SCHEMA_WORK)
    (void)pkv_syntax_fail(r->tree, PKV_E_LIMIT, "the schema comes to more than %d schemas",
                          PKV_SCHEMA_WORK);
  if (json_array_append_new(r->made, made) != 0) (void)pkv_schema_no_memory(r);
  return pkv_schema_failed(r) ? NULL : made;
}

const json_t *pkv_schema_flat(pkv_schema_reader *r, const json_t *schema,
                              const pkv_schema_place *at) {
  const json_t *const list = get(schema, "allOf"), *const ref = get(schema, "$ref");
  if (list == NULL && ref == NULL) return schema;
  if (list != NULL && (!json_is_array(list) || json_array_size(list) < 1)) {
    (void)pkv_schema_refuse(r, at, PKV_E_INVALID, "allOf must be a list of schemas");
    return NULL;
  }
  if (!pkv_schema_check_words(r, schema, at)) return NULL;
  if (r->depth + 1 >= PKV_SCHEMA_DEPTH) {
    (void)pkv_schema_refuse(r, at, PKV_E_LIMIT, "schemas lie in each other deeper than %d",
                            PKV_SCHEMA_DEPTH);
    return NULL;
  }
  r->depth++;
  json_t *const base = keep(r, pkv_json_copy(schema));
  const json_t *flat = base;
  if (base != NULL) {
    (void)json_object_del(base, "allOf");
    (void)json_object_del(base, "$ref");
  }
  if (flat != NULL && ref != NULL) {
    const json_t *const target = pkv_schema_target(r, ref, at);
    flat = target != NULL ? pkv_schema_merge(r, flat, target, at) : NULL;
  }
  for (size_t i = 0; flat != NULL && i < json_array_size(list); i++) {
    const pkv_schema_place one = {at, "allOf", (int)i};
    flat = pkv_schema_merge(r, flat, json_array_get(list, i), &one);
  }
  r->depth--;
  return flat;
}

/* --- keyword by keyword -------------------------------------------------------------------- */

/* Both, to be merged later. */
static json_t *both(const json_t *a, const json_t *b) {
  if (json_is_true(a)) return json_incref(editable(b));
  if (json_is_true(b)) return json_incref(editable(a));
  if (json_is_false(a) || json_is_false(b)) return json_false();
  return json_pack("{s:[O, O]}", "allOf", a, b);
}

/* `a` and what the other schema says of all that it does not name. */
static json_t *both_or(const json_t *a, const json_t *others) {
  return others == NULL ? json_incref(editable(a)) : both(a, others);
}

static json_t *merge_properties(const json_t *a, const json_t *b) {
  const json_t *const in_a = get(a, "properties"), *const in_b = get(b, "properties");
  const json_t *const others_a = get(a, "additionalProperties");
  const json_t *const others_b = get(b, "additionalProperties");
  json_t *all = json_object();
  const char *name;
  json_t *value;
  json_object_foreach(editable(in_a), name, value) {
    const json_t *const twin = json_object_get(in_b, name);
    pkv_json_set(&all, name, both_or(value, twin != NULL ? twin : others_b));
  }
  json_object_foreach(editable(in_b), name, value) {
    if (json_object_get(in_a, name) == NULL) pkv_json_set(&all, name, both_or(value, others_a));
  }
  return all;
}

static json_t *join_lists(const json_t *a, const json_t *b) {
  json_t *all = json_array();
  size_t i;
  json_t *item;
  json_array_foreach(a, i, item) pkv_json_add(&all, json_incref(item));
  json_array_foreach(b, i, item) pkv_json_add(&all, json_incref(item));
  return all;
}

static bool is_type(const json_t *item, const char *name) {
  return json_is_string(item) && strcmp(json_string_value(item), name) == 0;
}

static json_t *as_list(const json_t *type) {
  return json_is_array(type) ? json_incref(editable(type)) : json_pack("[O]", type);
}

/* A list; empty: nothing has both. An integer is a number. */
static json_t *merge_types(const json_t *a, const json_t *b) {
  json_t *const left = as_list(a), *const right = as_list(b);
  json_t *all = left != NULL && right != NULL ? json_array() : NULL;
  size_t i, k;
  json_t *x, *y;
  json_array_foreach(left, i, x) {
    json_array_foreach(right, k, y) {
      if (json_equal(x, y) || (is_type(x, "integer") && is_type(y, "number")))
        pkv_json_add(&all, json_incref(x));
      else if (is_type(x, "number") && is_type(y, "integer"))
        pkv_json_add(&all, json_incref(y));
    }
  }
  json_decref(left);
  json_decref(right);
  return all;
}

/* 1 and 1.0 are one value. */
static bool is_same(const json_t *a, const json_t *b) {
  if (!json_is_number(a) || !json_is_number(b)) return json_equal(a, b) != 0;
  const double x = json_number_value(a), y = json_number_value(b);
  return x <= y && x >= y;
}

static json_t *common_values(const json_t *a, const json_t *b) {
  json_t *all = json_array();
  size_t i, k;
  json_t *x, *y;
  json_array_foreach(a, i, x) {
    json_array_foreach(b, k, y) {
      if (!is_same(x, y)) continue;
      pkv_json_add(&all, json_incref(x));
      break;
    }
  }
  return all;
}

/* Each of a's schemas with one of b's. */
static json_t *spread(const json_t *a, const char *word, const json_t *b) {
  json_t *all = json_array();
  size_t i;
  json_t *one;
  json_array_foreach(a, i, one)
      pkv_json_add(&all, json_pack("{s:[O, {s:O}]}", "allOf", one, word, b));
  return all;
}

static bool is_one(const char *word, const char *const *list, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (strcmp(word, list[i]) == 0) return true;
  return false;
}

/* A keyword that both have, of which a's value is `x`; NULL: refused. */
static json_t *merge_word(pkv_schema_reader *r, const pkv_schema_place *at, const char *word,
                          const json_t *x, const json_t *y) {
  static const char *const lower[] = {"minLength", "minItems", "minimum", "exclusiveMinimum"};
  static const char *const upper[] = {"maxLength", "maxItems", "maximum", "exclusiveMaximum"};
  if (json_equal(x, y)) return json_incref(editable(x));
  if (strcmp(word, "type") == 0) return merge_types(x, y);
  if (strcmp(word, "required") == 0) return join_lists(x, y);
  if (strcmp(word, "additionalProperties") == 0 || strcmp(word, "items") == 0) return both(x, y);
  if (strcmp(word, "enum") == 0) return common_values(x, y);
  if (strcmp(word, "anyOf") == 0 || strcmp(word, "oneOf") == 0) return spread(x, word, y);
  const bool less = json_number_value(x) < json_number_value(y);
  if (is_one(word, lower, 4)) return json_incref(editable(less ? y : x));
  if (is_one(word, upper, 4)) return json_incref(editable(less ? x : y));
  if (strcmp(word, "uniqueItems") == 0) return json_true();
  (void)pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                          strcmp(word, "const") == 0
                              ? "two different const at once are satisfied by nothing"
                              : "two different values of one keyword cannot be merged here");
  return NULL;
}

/* Something is NULL: it was refused, or else there is no memory. */
static const json_t *no_schema(pkv_schema_reader *r) {
  if (!pkv_schema_failed(r)) (void)pkv_schema_no_memory(r);
  return NULL;
}

static const json_t *merge_flat(pkv_schema_reader *r, const json_t *a, const json_t *b,
                                const pkv_schema_place *at) {
  json_t *const all = keep(r, pkv_json_copy(a));
  const char *word;
  json_t *value;
  if (all == NULL) return NULL;
  if ((get(a, "prefixItems") != NULL || get(b, "prefixItems") != NULL) &&
      (get(a, "items") != NULL || get(b, "items") != NULL)) {
    (void)pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED, "prefixItems beside items cannot be merged");
    return NULL;
  }
  json_object_foreach(editable(b), word, value) {
    const json_t *const mine = get(a, word);
    if (pkv_schema_is_note(word) || strcmp(word, "properties") == 0) continue;
    json_t *const merged = mine == NULL ? json_incref(value) : merge_word(r, at, word, mine, value);
    if (json_object_set_new(all, word, merged) != 0) return no_schema(r);
  }
  if ((get(a, "properties") != NULL || get(b, "properties") != NULL) &&
      json_object_set_new(all, "properties", merge_properties(a, b)) != 0)
    return no_schema(r);
  if (json_array_size(get(all, "type")) == 0 && json_is_array(get(all, "type")))
    return keep(r, json_false());
  return all;
}

const json_t *pkv_schema_merge(pkv_schema_reader *r, const json_t *a, const json_t *b,
                               const pkv_schema_place *at) {
  for (int i = 0; i < 2; i++) {
    const json_t *const one = i == 0 ? a : b;
    if (json_is_boolean(one)) continue;
    if (!json_is_object(one)) {
      (void)pkv_schema_refuse(r, at, PKV_E_INVALID, "a schema must be an object, true or false");
      return NULL;
    }
    if (!pkv_schema_check_words(r, one, at)) return NULL;
  }
  a = pkv_schema_flat(r, a, at);
  b = a != NULL ? pkv_schema_flat(r, b, at) : NULL;
  if (b == NULL) return NULL;
  if (json_is_boolean(a)) return json_is_true(a) ? b : a;
  if (json_is_boolean(b)) return json_is_true(b) ? a : b;
  return merge_flat(r, a, b, at);
}

/* --- oneOf --------------------------------------------------------------------------------- */

static bool types_meet(pkv_schema_reader *r, const json_t *a, const json_t *b) {
  if (get(a, "type") == NULL || get(b, "type") == NULL) return true;
  json_t *const all = merge_types(get(a, "type"), get(b, "type"));
  if (all == NULL) (void)no_schema(r);
  const bool meet = json_array_size(all) > 0;
  json_decref(all);
  return meet;
}

/* A schema's constants as a list to be released, or NULL. */
static json_t *constants_of(pkv_schema_reader *r, const json_t *schema) {
  const json_t *const one = get(schema, "const");
  if (one != NULL) {
    json_t *const list = json_pack("[O]", one);
    if (list == NULL) (void)no_schema(r);
    return list;
  }
  return json_is_array(get(schema, "enum")) ? json_incref(editable(get(schema, "enum"))) : NULL;
}

static bool constants_apart(pkv_schema_reader *r, const json_t *a, const json_t *b) {
  json_t *const x = constants_of(r, a), *const y = constants_of(r, b);
  bool apart = false;
  if (x != NULL && y != NULL) {
    json_t *const common = common_values(x, y);
    if (common == NULL) (void)no_schema(r);
    apart = json_array_size(common) == 0;
    json_decref(common);
  }
  json_decref(x);
  json_decref(y);
  return apart;
}

static bool requires(const json_t *schema, const char *name) {
  size_t i;
  json_t *item;
  json_array_foreach(get(schema, "required"), i, item) {
    if (json_is_string(item) && strcmp(json_string_value(item), name) == 0) return true;
  }
  return false;
}

/* Objects alone, that both must have a property whose constants are not the same. */
static bool marked_apart(pkv_schema_reader *r, const json_t *a, const json_t *b) {
  const char *name;
  json_t *value;
  if (!is_type(get(a, "type"), "object") || !is_type(get(b, "type"), "object")) return false;
  json_object_foreach(editable(get(a, "properties")), name, value) {
    const json_t *const twin = json_object_get(get(b, "properties"), name);
    if (twin != NULL && requires(a, name) && requires(b, name) && constants_apart(r, value, twin))
      return true;
  }
  return false;
}

bool pkv_schema_apart(pkv_schema_reader *r, const json_t *list, const pkv_schema_place *at) {
  const size_t count = json_array_size(list);
  json_t *const flat = keep(r, json_array());
  for (size_t i = 0; flat != NULL && i < count; i++) {
    const json_t *one = json_array_get(list, i);
    for (int k = 0;
         one != NULL && k < REFERENCES && get(one, "$ref") != NULL && json_object_size(one) == 1;
         k++)
      one = pkv_schema_target(r, get(one, "$ref"), at);
    if (json_array_append(flat, editable(one)) != 0) return no_schema(r) != NULL;
  }
  for (size_t i = 0; i < count; i++)
    for (size_t k = i + 1; k < count; k++) {
      const json_t *const a = json_array_get(flat, i), *const b = json_array_get(flat, k);
      if (++r->work > PKV_SCHEMA_WORK) return false;
      if (!json_is_object(a) || !json_is_object(b)) return false;
      if (types_meet(r, a, b) && !constants_apart(r, a, b) && !marked_apart(r, a, b)) return false;
    }
  return true;
}
