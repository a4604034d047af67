/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regular expressions of JSON schemas, as what may stand between the quotes of a JSON string. The
 * part of ECMA 262 that means the same to every reader: characters, . [...] [^...] \d \w \s \D \W
 * \S (in ASCII), escapes, groups, | * + ? {n} {n,} {n,m} (also lazy), ^ at the beginning and $ at
 * the end. Where an anchor lacks, anything may stand.
 */
#ifndef PKV_GRAMMAR_PATTERN_H
#define PKV_GRAMMAR_PATTERN_H

#include "grammar/json_rules.h"

typedef struct pkv_pattern {
  int32_t node;
  int64_t least, most; /* characters; most -1: without end */
} pkv_pattern;

/* The failure stays with the tree. `text` is UTF-8. */
pkv_pattern pkv_pattern_read(pkv_json_rules *rules, const char *text, size_t bytes);

#endif
