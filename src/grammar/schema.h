/* SPDX-License-Identifier: Apache-2.0 */
/*
 * JSON schemas (draft 2020-12) into a tree: of the texts that satisfy the schema those in which
 * properties come in the schema's order and numbers and blanks are bounded as in json_rules.h. What
 * is not understood is refused by name. docs/constraints.md is the list.
 */
#ifndef PKV_GRAMMAR_SCHEMA_H
#define PKV_GRAMMAR_SCHEMA_H

#include <jansson.h>

#include "base/limits.h"
#include "grammar/json_rules.h"

/* Levels of values that a schema leaves open. */
#define PKV_FREE_LEVELS 16

/* The texts of one schema. The failure stays with the tree; it names keywords of JSON schema and
   places by number, and holds no other byte of the schema. */
int32_t pkv_schema_read(pkv_json_rules *rules, const json_t *schema, const pkv_allocator *a);
/* The schema as text: JSON within bounds, or the failure stays with the tree: NULL. */
json_t *pkv_schema_parse(pkv_syntax *tree, const char *text, size_t bytes);

#endif
