/* SPDX-License-Identifier: Apache-2.0 */
/* Keywords, and what is said when a schema is refused. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "grammar/schema_parts.h"

/* Say nothing about what is valid. */
static const char *const notes[] = {
    "$schema",  "$id",           "$comment",    "title",     "description", "default",
    "examples", "deprecated",    "readOnly",    "writeOnly", "$defs",       "example",
    "strict",   "discriminator", "definitions", "$anchor",
};

static const char *const understood[] = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "uniqueItems",
};

static const char *const refused[] = {
    "not",
    "if",
    "then",
    "else",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contains",
    "minContains",
    "maxContains",
    "additionalItems",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "nullable",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$vocabulary",
    "id",
};

static const char *find(const char *const *list, size_t count, const char *word) {
  for (size_t i = 0; i < count; i++)
    if (strcmp(list[i], word) == 0) return list[i];
  return NULL;
}

#define FIND(list, word) find(list, sizeof(list) / sizeof *(list), word)

static size_t write_place(char *out, size_t size, const pkv_schema_place *at) {
  size_t used = 0;
  if (at == NULL) return 0;
  used = write_place(out, size, at->up);
  if (used >= size) return used;
  const int wrote = at->index >= 0
                        ? snprintf(out + used, size - used, "/%s[%d]", at->word, at->index)
                        : snprintf(out + used, size - used, "/%s", at->word);
  return used + (size_t)(wrote > 0 ? wrote : 0);
}

int32_t pkv_schema_refuse(pkv_schema_reader *r, const pkv_schema_place *at, pkv_status status,
                          const char *format, ...) {
  char where[96] = "", what[160];
  va_list args;
  (void)write_place(where, sizeof where, at);
  va_start(args, format);
  (void)vsnprintf(what, sizeof what, format, args);
  va_end(args);
  return pkv_syntax_fail(r->tree, status, "schema at #%s: %s", where, what);
}

int64_t pkv_schema_count(pkv_schema_reader *r, const pkv_schema_place *at, const json_t *schema,
                         const char *word, int64_t fallback, int64_t most) {
  const json_t *const value = json_object_get(schema, word);
  if (value == NULL) return fallback;
  const double number = json_number_value(value);
  if (!json_is_number(value) || number < 0.0 || floor(number) < number)
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "%s must be a whole number from 0 on", word);
  if (number > (double)most)
    return pkv_schema_refuse(r, at, PKV_E_LIMIT, "%s may be %lld at most", word, (long long)most);
  return (int64_t)number;
}

bool pkv_schema_is_note(const char *word) {
  return FIND(notes, word) != NULL || strncmp(word, "x-", 2) == 0;
}

bool pkv_schema_check_words(pkv_schema_reader *r, const json_t *schema,
                            const pkv_schema_place *at) {
  const char *word;
  json_t *value;
  int index = 0;
  json_object_foreach((json_t *)(uintptr_t)schema, word, value) {
    const char *const known = FIND(refused, word);
    if (known != NULL)
      (void)pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED, "%s is not supported", known);
    else if (!pkv_schema_is_note(word) && FIND(understood, word) == NULL)
      (void)pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                              "keyword %d here is none of JSON schema that is supported", index);
    index++;
  }
  if (json_is_true(json_object_get(schema, "uniqueItems")))
    (void)pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED, "uniqueItems is not supported");
  return !pkv_schema_failed(r);
}
