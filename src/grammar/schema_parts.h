/* SPDX-License-Identifier: Apache-2.0 */
/* What the files that read schemas share. */
#ifndef PKV_GRAMMAR_SCHEMA_PARTS_H
#define PKV_GRAMMAR_SCHEMA_PARTS_H

#include "grammar/schema.h"

typedef struct pkv_schema_memo {
  const json_t *schema;
  int32_t rule;
} pkv_schema_memo;

typedef struct pkv_schema_reader {
  pkv_json_rules *rules;
  pkv_syntax *tree;
  pkv_allocator allocator;
  const json_t *root;
  json_t *made;          /* a list: keeps what merging made */
  pkv_schema_memo *memo; /* [slots], open addressing; rule -1: free */
  size_t slots, used;
  int depth, work;
} pkv_schema_reader;

/* Where a schema stands, for what is said of it. */
typedef struct pkv_schema_place {
  const struct pkv_schema_place *up;
  const char *word; /* a keyword; static */
  int index;        /* in its list or object; -1 = none */
} pkv_schema_place;

static inline bool pkv_schema_failed(const pkv_schema_reader *r) {
  return r->tree->status != PKV_OK;
}

static inline int32_t pkv_schema_no_memory(pkv_schema_reader *r) {
  return pkv_syntax_fail(r->tree, PKV_E_NOMEM, "no memory for a schema");
}

/* Says where, then what. */
int32_t pkv_schema_refuse(pkv_schema_reader *r, const pkv_schema_place *at, pkv_status status,
                          const char *format, ...) __attribute__((format(printf, 4, 5)));
/* A whole number of 0 .. most, or `fallback` where the keyword is not there. */
int64_t pkv_schema_count(pkv_schema_reader *r, const pkv_schema_place *at, const json_t *schema,
                         const char *word, int64_t fallback, int64_t most);

/* schema.c */
/* A value as it is written, in one way. */
int32_t pkv_schema_text(pkv_schema_reader *r, const json_t *value);
int32_t pkv_schema_node(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at);
/* schema_words.c */
/* Every keyword is known, and none is one that is refused. */
bool pkv_schema_check_words(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at);
bool pkv_schema_is_note(const char *word); /* says nothing about what is valid */
/* schema_number.c: "integer" or "number" */
int32_t pkv_schema_number(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at,
                          bool whole);
/* schema_string.c */
int32_t pkv_schema_string(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at);
/* Any string but these keys of an object. */
int32_t pkv_schema_other_key(pkv_schema_reader *r, const json_t *keys);
/* schema_object.c */
int32_t pkv_schema_object(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at);
int32_t pkv_schema_array(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at);
/* schema_merge.c */
/* Both at once, as one schema without $ref and allOf on top; of r->made. NULL: refused. */
const json_t *pkv_schema_merge(pkv_schema_reader *r, const json_t *a, const json_t *b,
                               const pkv_schema_place *at);
/* The schema without $ref and allOf on top. */
const json_t *pkv_schema_flat(pkv_schema_reader *r, const json_t *schema,
                              const pkv_schema_place *at);
/* What a $ref names. */
const json_t *pkv_schema_target(pkv_schema_reader *r, const json_t *ref,
                                const pkv_schema_place *at);
/* No text satisfies two of these (flat) schemas. */
bool pkv_schema_apart(pkv_schema_reader *r, const json_t *list, const pkv_schema_place *at);

#endif
