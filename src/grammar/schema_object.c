/* SPDX-License-Identifier: Apache-2.0 */
/* Objects and arrays. */
#include <stdio.h>
#include <string.h>

#include "base/json_memory.h"
#include "grammar/schema_parts.h"

static const json_t *get(const json_t *schema, const char *word) {
  return json_object_get(schema, word);
}

/* --- objects ------------------------------------------------------------------------------- */

static int32_t pair(pkv_schema_reader *r, int32_t key, int32_t value) {
  const int32_t head = pkv_json_then(r->rules, key, pkv_syntax_string(r->tree, ":"));
  return pkv_json_then(r->rules, head, value);
}

/* The key as a JSON string. */
static int32_t key_node(pkv_schema_reader *r, const char *name) {
  json_t *const text = json_string(name);
  const int32_t node = pkv_schema_text(r, text);
  json_decref(text);
  return node;
}

static bool is_required(const json_t *required, const char *name) {
  size_t i;
  const json_t *item;
  json_array_foreach(required, i, item) {
    const char *const text = json_string_value(item);
    if (text != NULL && strcmp(text, name) == 0) return true;
  }
  return false;
}

static bool check_object(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at) {
  const json_t *const required = get(schema, "required");
  const json_t *const properties = get(schema, "properties");
  size_t i;
  const json_t *item;
  if (properties != NULL && !json_is_object(properties))
    (void)pkv_schema_refuse(r, at, PKV_E_INVALID, "properties must be an object");
  if (required != NULL && !json_is_array(required))
    (void)pkv_schema_refuse(r, at, PKV_E_INVALID, "required must be a list of strings");
  json_array_foreach(required, i, item) if (!json_is_string(item))(void)
      pkv_schema_refuse(r, at, PKV_E_INVALID, "required must be a list of strings");
  return !pkv_schema_failed(r);
}

/* What properties that are not named may be; NULL: there are none. */
static const json_t *others_of(const json_t *schema, bool named) {
  const json_t *const others = get(schema, "additionalProperties");
  if (others == NULL) return named ? NULL : json_true();
  return json_is_false(others) ? NULL : others;
}

/* Required properties that are not named are what others may be. */
static json_t *all_properties(const json_t *schema) {
  json_t *all = json_object();
  const json_t *const required = get(schema, "required");
  const json_t *others = get(schema, "additionalProperties");
  size_t i;
  const json_t *item;
  if (get(schema, "properties") != NULL &&
      json_object_update(all, (json_t *)(uintptr_t)get(schema, "properties")) != 0)
    pkv_json_set(&all, "", NULL);
  if (others == NULL) others = json_true();
  json_array_foreach(required, i, item) {
    const char *const name = json_string_value(item);
    if (json_object_get(all, name) == NULL)
      pkv_json_set(&all, name, json_incref((json_t *)(uintptr_t)others));
  }
  return all;
}

/*
 * Two rules for what may come from property i on: `first`, where nothing has come yet, and `later`,
 * where a comma is due. Built from the end.
 */
typedef struct tails {
  int32_t first, later;
} tails;

static int32_t after_comma(pkv_schema_reader *r, int32_t node) {
  const int32_t comma = pkv_json_then(r->rules, pkv_syntax_string(r->tree, ","), node);
  return pkv_syntax_join(r->tree, comma, pkv_json_blanks(r->rules));
}

static tails end_of(pkv_schema_reader *r, const json_t *others, const json_t *named,
                    const pkv_schema_place *at) {
  pkv_syntax *const t = r->tree;
  const pkv_schema_place place = {at, "additionalProperties", -1};
  const int32_t close = pkv_syntax_string(t, "}");
  if (others == NULL) return (tails){close, close};
  const int32_t value = pkv_schema_node(r, others, &place);
  const int32_t one = pkv_syntax_shared(t, pair(r, pkv_schema_other_key(r, named), value));
  const int32_t more = pkv_syntax_repeat(t, after_comma(r, one), 0, -1);
  const int32_t later = pkv_syntax_shared(t, pkv_syntax_join(t, more, close));
  const int32_t begun = pkv_json_then(r->rules, one, later);
  return (tails){pkv_syntax_shared(t, pkv_syntax_either(t, begun, close)), later};
}

int32_t pkv_schema_object(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at) {
  pkv_syntax *const t = r->tree;
  const char *name;
  json_t *value;
  if (!check_object(r, schema, at)) return 0;
  const json_t *const required = get(schema, "required");
  json_t *const all = all_properties(schema);
  const size_t count = json_object_size(all);
  if (json_array_append_new(r->made, all) != 0) return pkv_schema_no_memory(r);
  const json_t *const others = others_of(schema, count > 0);
  if (count == 0 && json_is_true(others)) return pkv_json_object(r->rules, PKV_FREE_LEVELS);
  const pkv_allocator *const a = &r->allocator;
  const char **const names = pkv_alloc(a, (count + 1) * sizeof *names);
  size_t n = 0;
  if (names == NULL) return pkv_syntax_fail(t, PKV_E_NOMEM, "no memory for a schema");
  json_object_foreach(all, name, value) names[n++] = name;
  tails tail = end_of(r, others, all, at);
  while (n-- > 0 && !pkv_schema_failed(r)) {
    const pkv_schema_place place = {at, "properties", (int)n};
    const bool must = is_required(required, names[n]);
    const json_t *const inside = json_object_get(all, names[n]);
    if (json_is_false(inside) && !must) continue; /* never there */
    const int32_t one =
        pkv_syntax_shared(t, pair(r, key_node(r, names[n]), pkv_schema_node(r, inside, &place)));
    int32_t later = pkv_syntax_join(t, after_comma(r, one), tail.later);
    int32_t first = pkv_json_then(r->rules, one, tail.later);
    if (!must) {
      later = pkv_syntax_either(t, later, tail.later);
      first = pkv_syntax_either(t, first, tail.first);
    }
    tail = (tails){pkv_syntax_shared(t, first), pkv_syntax_shared(t, later)};
  }
  pkv_free(a, names, (count + 1) * sizeof *names);
  return pkv_json_then(r->rules, pkv_syntax_string(t, "{"), tail.first);
}

/* --- arrays -------------------------------------------------------------------------------- */

/* How many of what lies behind the prefix. */
static int32_t rest_of(pkv_schema_reader *r, int32_t item, int64_t least, int64_t most,
                       bool begun) {
  pkv_syntax *const t = r->tree;
  const int32_t close = pkv_syntax_string(t, "]");
  if (most == 0) return close;
  const int32_t more = after_comma(r, item);
  const int64_t used = begun ? 0 : 1; /* the first one, without a comma */
  const int64_t low = least > used ? least - used : 0;
  int32_t node = pkv_syntax_repeat(t, more, (int32_t)low, most < 0 ? -1 : (int32_t)(most - used));
  node = pkv_syntax_join(t, node, close);
  if (begun) return node;
  node = pkv_json_then(r->rules, item, node);
  return least > 0 ? node : pkv_syntax_either(t, node, close);
}

int32_t pkv_schema_array(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at) {
  pkv_syntax *const t = r->tree;
  const json_t *const prefix = get(schema, "prefixItems"), *items = get(schema, "items");
  const int64_t least = pkv_schema_count(r, at, schema, "minItems", 0, PKV_GRAMMAR_REPEAT);
  int64_t most = pkv_schema_count(r, at, schema, "maxItems", -1, PKV_GRAMMAR_REPEAT);
  const pkv_schema_place place = {at, "items", -1};
  if (prefix != NULL && !json_is_array(prefix))
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "prefixItems must be a list");
  if (json_is_array(items))
    return pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                             "a list of items is not supported: prefixItems is");
  if (most >= 0 && most < least)
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "minItems is above maxItems");
  const int64_t count = (int64_t)json_array_size(prefix);
  if (pkv_schema_failed(r)) return 0;
  /* Behind a prefix others come only where they are asked for. */
  if (items == NULL && count > 0 && most < 0) most = least > count ? least : count;
  if (json_is_false(items) && (most < 0 || most > count)) most = count;
  if (most >= 0 && most < least)
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "minItems asks for more than items allows");
  const bool more = most < 0 || most > count;
  int32_t node = pkv_syntax_none(t);
  if (more) {
    const int32_t item = items == NULL ? pkv_json_value(r->rules, PKV_FREE_LEVELS)
                                       : pkv_syntax_shared(t, pkv_schema_node(r, items, &place));
    node = rest_of(r, item, least > count ? least - count : 0, most < 0 ? -1 : most - count,
                   count > 0);
  } else {
    node = pkv_syntax_string(t, "]");
  }
  for (int64_t i = (most >= 0 && most < count ? most : count); i-- > 0 && !pkv_schema_failed(r);) {
    const pkv_schema_place one = {at, "prefixItems", (int)i};
    const int32_t item = pkv_schema_node(r, json_array_get(prefix, (size_t)i), &one);
    node = i == 0 ? pkv_json_then(r->rules, item, node)
                  : pkv_syntax_join(t, after_comma(r, item), node);
    if (i >= least) node = pkv_syntax_either(t, node, pkv_syntax_string(t, "]"));
  }
  return pkv_json_then(r->rules, pkv_syntax_string(t, "["), node);
}
