/* SPDX-License-Identifier: Apache-2.0 */
/* Strings: lengths, patterns, formats, and keys that are not taken. */
#include <string.h>

#include "base/text.h"
#include "grammar/grammar_text.h"
#include "grammar/pattern.h"
#include "grammar/schema_parts.h"

/* --- formats ------------------------------------------------------------------------------- */

/* As grammars over their own text, none of which has to be escaped in JSON. Times are of RFC 3339,
   without leap seconds; February has 28 days in all years. */
#define DATE_RULES                                                                                 \
  "date ::= ([1-9] d d d | \"0\" [1-9] d d | \"00\" [1-9] d | \"000\" [1-9]) \"-\" month-day\n"    \
  "month-day ::= (\"0\" [13578] | \"1\" [02]) \"-\" day31 | (\"0\" [469] | \"11\") \"-\" day30"    \
  " | \"02-\" day28\n"                                                                             \
  "day28 ::= \"0\" [1-9] | \"1\" d | \"2\" [0-8]\n"                                                \
  "day30 ::= \"0\" [1-9] | [12] d | \"30\"\n"                                                      \
  "day31 ::= \"0\" [1-9] | [12] d | \"3\" [01]\n"
#define TIME_RULES                                                                                 \
  "time ::= hour \":\" sixty \":\" sixty (\".\" d{1,6})? zone\n"                                   \
  "zone ::= \"Z\" | [+-] hour \":\" sixty\n"                                                       \
  "hour ::= [01] d | \"2\" [0-3]\n"                                                                \
  "sixty ::= [0-5] d\n"
#define DIGIT_RULE "d ::= [0-9]\n"

static const struct {
  const char *name, *grammar;
} formats[] = {
    {"date", "root ::= date\n" DATE_RULES DIGIT_RULE},
    {"time", "root ::= time\n" TIME_RULES DIGIT_RULE},
    {"date-time", "root ::= date \"T\" time\n" DATE_RULES TIME_RULES DIGIT_RULE},
    {"uuid", "root ::= h{8} \"-\" h{4} \"-\" h{4} \"-\" h{4} \"-\" h{12}\nh ::= [0-9a-f]\n"},
};

/* The grammar's rules go into the tree; its root is not the tree's. */
static int32_t format_node(pkv_schema_reader *r, const pkv_schema_place *at, const char *name) {
  pkv_syntax *const t = r->tree;
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
    if (strcmp(formats[i].name, name) != 0) continue;
    const int32_t root = t->root;
    pkv_grammar_read(t, formats[i].grammar, strlen(formats[i].grammar));
    const int32_t node = pkv_syntax_call(t, t->root);
    t->root = root;
    return node;
  }
  return pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                           "of format only date, time, date-time and uuid are supported");
}

/* --- strings ------------------------------------------------------------------------------- */

static int32_t quoted(pkv_syntax *t, int32_t inside) {
  const int32_t open = pkv_syntax_join(t, pkv_syntax_string(t, "\""), inside);
  return pkv_syntax_join(t, open, pkv_syntax_string(t, "\""));
}

static int32_t pattern_node(pkv_schema_reader *r, const json_t *pattern, const pkv_schema_place *at,
                            int64_t least, int64_t most) {
  if (!json_is_string(pattern))
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "pattern must be a string");
  const pkv_pattern p =
      pkv_pattern_read(r->rules, json_string_value(pattern), json_string_length(pattern));
  if (p.least < least || (most >= 0 && (p.most < 0 || p.most > most)))
    return pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                             "pattern with minLength or maxLength is supported only where the "
                             "pattern keeps to them by itself");
  return quoted(r->tree, p.node);
}

int32_t pkv_schema_string(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at) {
  const json_t *const pattern = json_object_get(schema, "pattern");
  const json_t *const format = json_object_get(schema, "format");
  const int64_t least = pkv_schema_count(r, at, schema, "minLength", 0, PKV_GRAMMAR_REPEAT);
  const int64_t most = pkv_schema_count(r, at, schema, "maxLength", -1, PKV_GRAMMAR_REPEAT);
  if (most >= 0 && most < least)
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "minLength is above maxLength");
  if (format != NULL) {
    if (!json_is_string(format))
      return pkv_schema_refuse(r, at, PKV_E_INVALID, "format must be a string");
    if (pattern != NULL || least > 0 || most >= 0)
      return pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                               "format with pattern, minLength or maxLength is not supported");
    return quoted(r->tree, format_node(r, at, json_string_value(format)));
  }
  if (pattern != NULL) return pattern_node(r, pattern, at, least, most);
  if (least == 0 && most < 0) return pkv_json_string(r->rules);
  return quoted(r->tree, pkv_syntax_repeat(r->tree, pkv_json_character(r->rules), (int32_t)least,
                                           (int32_t)most));
}

/* --- other keys ---------------------------------------------------------------------------- */

typedef struct key {
  const char *text;
  size_t bytes;
} key;

/* What a key that is plain text may go on with, so that it is none of those with this beginning:
   anything else, or one of their next bytes and so on. UTF-8 is cut between characters only. */
static int32_t unlike(pkv_schema_reader *r, const key *keys, size_t count, size_t at);

static size_t character_bytes(const char *text) {
  const unsigned char c = (unsigned char)*text;
  return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

static uint32_t code_of(const char *text, size_t bytes) {
  const unsigned char first = (unsigned char)*text;
  uint32_t code = bytes == 1 ? first : first & (0xffu >> (bytes + 1));
  for (size_t i = 1; i < bytes; i++)
    code = code << 6 | ((unsigned char)text[i] & 0x3fu);
  return code;
}

#define MOST_KEYS 1024

static int32_t unlike(pkv_schema_reader *r, const key *keys, size_t count, size_t at) {
  static const pkv_code_range special[] = {{0, 0x1f}, {'"', '"'}, {'\\', '\\'}};
  pkv_syntax *const t = r->tree;
  if (++r->depth > PKV_SCHEMA_DEPTH * 4)
    return pkv_syntax_fail(t, PKV_E_LIMIT, "the schema has long properties beside others");
  const pkv_allocator *const a = &r->allocator;
  pkv_code_range *const taken = pkv_alloc(a, (count + 3) * sizeof *taken);
  key *const same = pkv_alloc(a, (count + 1) * sizeof *same);
  bool ends = true; /* the key may end here */
  size_t groups = 0;
  int32_t node = pkv_syntax_none(t);
  if (taken == NULL || same == NULL)
    (void)pkv_syntax_fail(t, PKV_E_NOMEM, "no memory for a schema");
  for (size_t i = 0; i < count && !pkv_schema_failed(r); i++) {
    if (keys[i].bytes == at) {
      ends = false;
      continue;
    }
    const size_t bytes = character_bytes(keys[i].text + at);
    const uint32_t code = code_of(keys[i].text + at, bytes);
    bool seen = false;
    for (size_t k = 0; k < groups; k++)
      seen = seen || taken[k].low == code;
    if (seen) continue;
    size_t alike = 0;
    for (size_t k = i; k < count; k++)
      if (keys[k].bytes >= at + bytes && memcmp(keys[k].text + at, keys[i].text + at, bytes) == 0)
        same[alike++] = keys[k];
    taken[groups++] = (pkv_code_range){code, code};
    const int32_t rest = unlike(r, same, alike, at + bytes);
    const bool plain = code >= 0x20 && code != '"' && code != '\\';
    if (plain) /* the others are never written: their escapes are not used here */
      node = pkv_syntax_either(
          t, node, pkv_syntax_join(t, pkv_syntax_text(t, keys[i].text + at, bytes), rest));
  }
  if (!pkv_schema_failed(r)) {
    memcpy(taken + groups, special, sizeof special);
    const int32_t other = pkv_syntax_class(t, taken, groups + 3, true);
    const int32_t free_rest = pkv_syntax_repeat(t, pkv_json_character(r->rules), 0, -1);
    node = pkv_syntax_either(t, node, pkv_syntax_join(t, other, free_rest));
    if (ends) node = pkv_syntax_either(t, node, pkv_syntax_empty(t));
  }
  pkv_free(a, taken, (count + 3) * sizeof *taken);
  pkv_free(a, same, (count + 1) * sizeof *same);
  r->depth--;
  return node;
}

int32_t pkv_schema_other_key(pkv_schema_reader *r, const json_t *keys) {
  const size_t count = json_object_size(keys);
  key all[MOST_KEYS];
  const char *name;
  json_t *value;
  size_t i = 0;
  if (count == 0) return pkv_json_string(r->rules);
  if (count > MOST_KEYS)
    return pkv_syntax_fail(r->tree, PKV_E_LIMIT,
                           "additionalProperties beside more than %d properties", MOST_KEYS);
  json_object_foreach((json_t *)(uintptr_t)keys, name, value) all[i++] = (key){name, strlen(name)};
  return quoted(r->tree, unlike(r, all, count, 0));
}
