/* SPDX-License-Identifier: Apache-2.0 */
#include "support/json_vars.h"

#include <stdlib.h>
#include <string.h>

static bool is_trusted(const char *key) {
  return key != NULL && (strcmp(key, "bos_token") == 0 || strcmp(key, "eos_token") == 0 ||
                         strcmp(key, "role") == 0);
}

static pkv_template_value convert(const json_t *json, const char *name) {
  pkv_template_value v = {.kind = PKV_TEMPLATE_NONE};
  if (json_is_boolean(json)) {
    v.kind = PKV_TEMPLATE_BOOL;
    v.as_int = json_is_true(json);
  } else if (json_is_integer(json)) {
    v.kind = PKV_TEMPLATE_INT;
    v.as_int = json_integer_value(json);
  } else if (json_is_real(json)) {
    v.kind = PKV_TEMPLATE_REAL;
    v.as_real = json_real_value(json);
  } else if (json_is_string(json)) {
    v = pkv_template_text(json_string_value(json), json_string_length(json), is_trusted(name));
  } else if (json_is_array(json)) {
    v.kind = PKV_TEMPLATE_LIST;
    v.count = json_array_size(json);
    pkv_template_value *items = calloc(v.count + 1, sizeof *items);
    for (size_t i = 0; items != NULL && i < v.count; i++)
      items[i] = convert(json_array_get(json, i), NULL);
    v.items = items;
  } else if (json_is_object(json)) {
    const char *key;
    json_t *value, *object = (json_t *)(uintptr_t)json;
    v.kind = PKV_TEMPLATE_MAP;
    pkv_template_member *members = calloc(json_object_size(json) + 1, sizeof *members);
    json_object_foreach(object, key, value) if (members != NULL) members[v.count++] =
        (pkv_template_member){key, strlen(key), convert(value, key)};
    v.members = members;
  }
  return v;
}

pkv_template_value json_vars(const json_t *json) {
  return convert(json, NULL);
}

void json_vars_free(pkv_template_value *v) {
  for (size_t i = 0; v->kind == PKV_TEMPLATE_LIST && i < v->count; i++)
    json_vars_free((pkv_template_value *)(uintptr_t)&v->items[i]);
  for (size_t i = 0; v->kind == PKV_TEMPLATE_MAP && i < v->count; i++)
    json_vars_free((pkv_template_value *)(uintptr_t)&v->members[i].value);
  free((void *)(uintptr_t)v->items);
  free((void *)(uintptr_t)v->members);
  *v = (pkv_template_value){.kind = PKV_TEMPLATE_NONE};
}
