/* SPDX-License-Identifier: Apache-2.0 */
/*
 * JSON as grammar rules. Stricter than the format where that bounds a model: PKV_JSON_LEVELS
 * levels, PKV_JSON_BLANKS blanks in a row, PKV_JSON_DIGITS digits before and behind a point and
 * two of an exponent, no NUL, no unpaired surrogates, UTF-8 only.
 */
#ifndef PKV_GRAMMAR_JSON_RULES_H
#define PKV_GRAMMAR_JSON_RULES_H

#include "grammar/syntax.h"

#define PKV_JSON_LEVELS 64
#define PKV_JSON_BLANKS 20
#define PKV_JSON_DIGITS 15

typedef struct pkv_json_rules {
  pkv_syntax *tree;
  /* -1: not made yet */
  int32_t blanks, character, string, number, integer;
  int32_t object[PKV_JSON_LEVELS + 1], array[PKV_JSON_LEVELS + 1], value[PKV_JSON_LEVELS + 1];
} pkv_json_rules;

void pkv_json_rules_init(pkv_json_rules *rules, pkv_syntax *tree);

/* Each a node. Levels are what may be open at once below, the thing itself included. */
int32_t pkv_json_blanks(pkv_json_rules *rules);
int32_t pkv_json_character(pkv_json_rules *rules); /* of a string, escapes included */
int32_t pkv_json_string(pkv_json_rules *rules);
int32_t pkv_json_number(pkv_json_rules *rules);
int32_t pkv_json_integer(pkv_json_rules *rules);
int32_t pkv_json_object(pkv_json_rules *rules, int levels);
int32_t pkv_json_array(pkv_json_rules *rules, int levels);
int32_t pkv_json_value(pkv_json_rules *rules, int levels);

/* a, then blanks, then b, where both are something */
int32_t pkv_json_then(pkv_json_rules *rules, int32_t a, int32_t b);
/* open, then close or: item (, item)* close, with blanks in between */
int32_t pkv_json_list(pkv_json_rules *rules, const char *open, int32_t item, const char *close);

#endif
