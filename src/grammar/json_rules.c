/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/json_rules.h"

void pkv_json_rules_init(pkv_json_rules *rules, pkv_syntax *tree) {
  rules->tree = tree;
  rules->blanks = rules->character = rules->string = rules->number = rules->integer = -1;
  for (int i = 0; i <= PKV_JSON_LEVELS; i++)
    rules->object[i] = rules->array[i] = rules->value[i] = -1;
}

/* The rule's node, made by `make` the first time. */
static int32_t once(pkv_json_rules *r, int32_t *rule, int32_t (*make)(pkv_syntax *t)) {
  if (*rule < 0) {
    *rule = pkv_syntax_new_rule(r->tree, 0);
    pkv_syntax_define(r->tree, *rule, make(r->tree));
  }
  return pkv_syntax_call(r->tree, *rule);
}

static int32_t class_of(pkv_syntax *t, const char *characters) {
  pkv_code_range ranges[32];
  size_t count = 0;
  for (; characters[count] != '\0'; count++)
    ranges[count].low = ranges[count].high = (unsigned char)characters[count];
  return pkv_syntax_class(t, ranges, count, false);
}

static int32_t make_blanks(pkv_syntax *t) {
  return pkv_syntax_repeat(t, class_of(t, " \t\n\r"), 0, PKV_JSON_BLANKS);
}

static int32_t hex(pkv_syntax *t, int32_t digits) {
  static const pkv_code_range ranges[] = {{'0', '9'}, {'a', 'f'}, {'A', 'F'}};
  return pkv_syntax_repeat(t, pkv_syntax_class(t, ranges, 3, false), digits, digits);
}

/* The four digits behind \u: no NUL, surrogates in pairs only. */
static int32_t make_unit(pkv_syntax *t) {
  static const pkv_code_range above_zero[] = {{'1', '9'}, {'a', 'f'}, {'A', 'F'}};
  static const pkv_code_range other[] = {
      {'1', '9'}, {'a', 'c'}, {'A', 'C'}, {'e', 'f'}, {'E', 'F'}};
  int32_t unit = pkv_syntax_join(t, pkv_syntax_class(t, other, 5, false), hex(t, 3));
  for (int32_t zeros = 1; zeros <= 3; zeros++) {
    int32_t one = pkv_syntax_text(t, "000", (size_t)zeros);
    one = pkv_syntax_join(t, one, pkv_syntax_class(t, above_zero, 3, false));
    unit = pkv_syntax_either(t, unit, zeros < 3 ? pkv_syntax_join(t, one, hex(t, 3 - zeros)) : one);
  }
  int32_t low = pkv_syntax_join(t, class_of(t, "dD"), class_of(t, "01234567"));
  unit = pkv_syntax_either(t, unit, pkv_syntax_join(t, low, hex(t, 2)));
  int32_t pair = pkv_syntax_join(t, class_of(t, "dD"), class_of(t, "89abAB"));
  pair = pkv_syntax_join(t, pkv_syntax_join(t, pair, hex(t, 2)), pkv_syntax_string(t, "\\u"));
  pair = pkv_syntax_join(t, pkv_syntax_join(t, pair, class_of(t, "dD")), class_of(t, "cdefCDEF"));
  return pkv_syntax_either(t, unit, pkv_syntax_join(t, pair, hex(t, 2)));
}

static int32_t make_character(pkv_syntax *t) {
  static const pkv_code_range not_plain[] = {{0, 0x1f}, {'"', '"'}, {'\\', '\\'}};
  int32_t escape = pkv_syntax_join(t, pkv_syntax_string(t, "u"), make_unit(t));
  escape = pkv_syntax_either(t, escape, class_of(t, "\"\\/bfnrt"));
  escape = pkv_syntax_join(t, pkv_syntax_string(t, "\\"), escape);
  return pkv_syntax_either(t, pkv_syntax_class(t, not_plain, 3, true), escape);
}

static int32_t make_integer(pkv_syntax *t) {
  int32_t digits = pkv_syntax_repeat(t, pkv_syntax_range(t, '0', '9'), 0, PKV_JSON_DIGITS - 1);
  digits = pkv_syntax_join(t, pkv_syntax_range(t, '1', '9'), digits);
  digits = pkv_syntax_either(t, digits, pkv_syntax_string(t, "0"));
  return pkv_syntax_join(t, pkv_syntax_optional(t, pkv_syntax_string(t, "-")), digits);
}

static int32_t make_number(pkv_syntax *t) {
  int32_t behind = pkv_syntax_repeat(t, pkv_syntax_range(t, '0', '9'), 1, PKV_JSON_DIGITS);
  behind = pkv_syntax_join(t, pkv_syntax_string(t, "."), behind);
  int32_t power = pkv_syntax_join(t, class_of(t, "eE"), pkv_syntax_optional(t, class_of(t, "+-")));
  power = pkv_syntax_join(t, power, pkv_syntax_repeat(t, pkv_syntax_range(t, '0', '9'), 1, 2));
  const int32_t whole = pkv_syntax_join(t, make_integer(t), pkv_syntax_optional(t, behind));
  return pkv_syntax_join(t, whole, pkv_syntax_optional(t, power));
}

int32_t pkv_json_blanks(pkv_json_rules *rules) {
  return once(rules, &rules->blanks, make_blanks);
}

int32_t pkv_json_character(pkv_json_rules *rules) {
  return once(rules, &rules->character, make_character);
}

int32_t pkv_json_number(pkv_json_rules *rules) {
  return once(rules, &rules->number, make_number);
}

int32_t pkv_json_integer(pkv_json_rules *rules) {
  return once(rules, &rules->integer, make_integer);
}

/* Its characters stand in the loop itself: most bytes of most answers are theirs. */
static int32_t make_string(pkv_syntax *t) {
  const int32_t all = pkv_syntax_repeat(t, make_character(t), 0, -1);
  const int32_t open = pkv_syntax_join(t, pkv_syntax_string(t, "\""), all);
  return pkv_syntax_join(t, open, pkv_syntax_string(t, "\""));
}

int32_t pkv_json_string(pkv_json_rules *rules) {
  return once(rules, &rules->string, make_string);
}

int32_t pkv_json_then(pkv_json_rules *rules, int32_t a, int32_t b) {
  return pkv_syntax_join(rules->tree, pkv_syntax_join(rules->tree, a, pkv_json_blanks(rules)), b);
}

int32_t pkv_json_list(pkv_json_rules *rules, const char *open, int32_t item, const char *close) {
  pkv_syntax *const t = rules->tree;
  const int32_t more = pkv_json_then(rules, pkv_json_then(rules, pkv_syntax_string(t, ","), item),
                                     pkv_syntax_empty(t));
  int32_t some = pkv_json_then(rules, item, pkv_syntax_repeat(t, more, 0, -1));
  some = pkv_syntax_join(t, some, pkv_syntax_string(t, close));
  return pkv_json_then(rules, pkv_syntax_string(t, open),
                       pkv_syntax_either(t, some, pkv_syntax_string(t, close)));
}

int32_t pkv_json_object(pkv_json_rules *rules, int levels) {
  pkv_syntax *const t = rules->tree;
  int32_t *const rule = &rules->object[levels];
  if (*rule < 0) {
    *rule = pkv_syntax_new_rule(t, 0);
    int32_t pair = pkv_json_then(rules, pkv_json_string(rules), pkv_syntax_string(t, ":"));
    pair = pkv_json_then(rules, pair, pkv_json_value(rules, levels - 1));
    pkv_syntax_define(t, *rule, pkv_json_list(rules, "{", pkv_syntax_shared(t, pair), "}"));
  }
  return pkv_syntax_call(t, *rule);
}

int32_t pkv_json_array(pkv_json_rules *rules, int levels) {
  pkv_syntax *const t = rules->tree;
  int32_t *const rule = &rules->array[levels];
  if (*rule < 0) {
    *rule = pkv_syntax_new_rule(t, 0);
    pkv_syntax_define(t, *rule, pkv_json_list(rules, "[", pkv_json_value(rules, levels - 1), "]"));
  }
  return pkv_syntax_call(t, *rule);
}

int32_t pkv_json_value(pkv_json_rules *rules, int levels) {
  pkv_syntax *const t = rules->tree;
  int32_t *const rule = &rules->value[levels];
  if (*rule < 0) {
    *rule = pkv_syntax_new_rule(t, 0);
    int32_t node = pkv_syntax_either(t, pkv_json_string(rules), pkv_json_number(rules));
    node = pkv_syntax_either(t, node, pkv_syntax_string(t, "true"));
    node = pkv_syntax_either(t, node, pkv_syntax_string(t, "false"));
    node = pkv_syntax_either(t, node, pkv_syntax_string(t, "null"));
    if (levels > 0) {
      node = pkv_syntax_either(t, node, pkv_json_object(rules, levels));
      node = pkv_syntax_either(t, node, pkv_json_array(rules, levels));
    }
    pkv_syntax_define(t, *rule, node);
  }
  return pkv_syntax_call(t, *rule);
}
