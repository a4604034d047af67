/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/pattern.h"

#include <string.h>

#define PATTERN_DEPTH  64
#define PATTERN_RANGES 256
#define LONGEST        (INT64_C(1) << 40)

typedef struct reader {
  pkv_json_rules *rules;
  pkv_syntax *tree;
  const char *text;
  size_t size, at;
  int depth;
} reader;

typedef struct code_set {
  pkv_code_range ranges[PATTERN_RANGES];
  size_t count;
  bool negate, ascii; /* ascii: of the characters below 0x80 only */
} code_set;

static pkv_pattern read_either(reader *r);

static bool failed(const reader *r) {
  return r->tree->status != PKV_OK;
}

static pkv_pattern refuse(reader *r, pkv_status status, const char *what) {
  (void)pkv_syntax_fail(r->tree, status, "pattern, byte %zu: %s", r->at + 1, what);
  return (pkv_pattern){0, 0, 0};
}

static char peek(const reader *r) {
  return r->at < r->size ? r->text[r->at] : '\0';
}

static bool at_end(const reader *r) {
  return r->at >= r->size;
}

/* --- characters in a JSON string ----------------------------------------------------------- */

/* How one character is written where it cannot stand as it is. */
static int32_t escaped(pkv_syntax *t, uint32_t code) {
  static const char digits[] = "0123456789abcdef";
  static const char names[][2] = {{'"', '"'},  {'\\', '\\'}, {'\b', 'b'}, {'\f', 'f'},
                                  {'\n', 'n'}, {'\r', 'r'},  {'\t', 't'}};
  char text[6] = {'\\', 'u', '0', '0', digits[code >> 4 & 15], digits[code & 15]};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if ((uint32_t)(unsigned char)names[i][0] != code) continue;
    text[1] = names[i][1];
    return pkv_syntax_text(t, text, 2);
  }
  return pkv_syntax_text(t, text, 6);
}

static bool has(const code_set *set, uint32_t code) {
  bool found = false;
  for (size_t i = 0; i < set->count; i++)
    found = found || (code >= set->ranges[i].low && code <= set->ranges[i].high);
  return found != set->negate;
}

static int32_t set_node(reader *r, code_set *set) {
  pkv_syntax *const t = r->tree;
  static const pkv_code_range special[] = {{0, 0x1f}, {'"', '"'}, {'\\', '\\'}};
  int32_t node = pkv_syntax_none(t);
  for (uint32_t code = 1; code < 0x80; code++)
    if ((code < 0x20 || code == '"' || code == '\\') && has(set, code))
      node = pkv_syntax_either(t, node, escaped(t, code));
  if (set->negate) { /* without what has to be escaped */
    if (set->count + 4 > PATTERN_RANGES) return refuse(r, PKV_E_LIMIT, "a long class").node;
    memcpy(set->ranges + set->count, special, sizeof special);
    set->count += 3;
    if (set->ascii) set->ranges[set->count++] = (pkv_code_range){0x80, PKV_LAST_CODE};
    return pkv_syntax_either(t, node, pkv_syntax_class(t, set->ranges, set->count, true));
  }
  pkv_code_range plain[3 * PATTERN_RANGES];
  size_t count = 0;
  for (size_t i = 0; i < set->count; i++) {
    uint32_t low = set->ranges[i].low < 0x20 ? 0x20 : set->ranges[i].low;
    const uint32_t high = set->ranges[i].high;
    static const uint32_t cuts[] = {'"', '\\'};
    for (size_t k = 0; k < 2; k++) {
      if (cuts[k] < low || cuts[k] > high) continue;
      if (cuts[k] > low) plain[count++] = (pkv_code_range){low, cuts[k] - 1};
      low = cuts[k] + 1;
    }
    if (low <= high) plain[count++] = (pkv_code_range){low, high};
  }
  return pkv_syntax_either(t, node, pkv_syntax_class(t, plain, count, false));
}

static void add_range(reader *r, code_set *set, uint32_t low, uint32_t high) {
  if (set->count == PATTERN_RANGES)
    (void)refuse(r, PKV_E_LIMIT, "the class is too long");
  else
    set->ranges[set->count++] = (pkv_code_range){low, high};
}

/* The gaps between ASCII ranges, which are sorted. */
static void add_others(reader *r, code_set *set, const pkv_code_range *ranges, size_t count) {
  uint32_t next = 1;
  for (size_t i = 0; i < count; i++) {
    if (ranges[i].low > next) add_range(r, set, next, ranges[i].low - 1);
    next = ranges[i].high + 1;
  }
  add_range(r, set, next, 0x7f);
}

/* \d and its like, where c is one. */
static bool add_named(reader *r, code_set *set, char c) {
  static const pkv_code_range digits[] = {{'0', '9'}};
  static const pkv_code_range words[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
  static const pkv_code_range blanks[] = {{'\t', '\r'}, {' ', ' '}};
  /* Some readers count separators as blanks: neither they nor what is not blank may be these. */
  static const pkv_code_range wide[] = {{'\t', '\r'}, {0x1c, ' '}};
  const char lower = (char)(c | 0x20);
  const pkv_code_range *const some_blanks = (c == 'S') != set->negate ? wide : blanks;
  const pkv_code_range *const ranges = lower == 'd' ? digits : lower == 'w' ? words : some_blanks;
  const size_t count = lower == 'd' ? 1 : lower == 'w' ? 4 : 2;
  if (lower != 'd' && lower != 'w' && lower != 's') return false;
  set->ascii = true;
  if (c == lower)
    for (size_t i = 0; i < count; i++)
      add_range(r, set, ranges[i].low, ranges[i].high);
  else
    add_others(r, set, ranges, count);
  return true;
}

static uint32_t read_hex(reader *r, int digits) {
  uint32_t value = 0;
  for (int i = 0; i < digits; i++, r->at++) {
    const char c = peek(r), lower = (char)(c | 0x20);
    const bool digit = c >= '0' && c <= '9';
    if (!digit && (lower < 'a' || lower > 'f')) {
      (void)refuse(r, PKV_E_FORMAT, "hexadecimal digits are expected");
      return 0;
    }
    value = value << 4 | (uint32_t)(digit ? c - '0' : lower - 'a' + 10);
  }
  if (value >= 0xd800 && value <= 0xdfff)
    (void)refuse(r, PKV_E_UNSUPPORTED, "surrogates are not supported");
  return value;
}

/* One character, behind a \ where `escape`. */
static uint32_t read_code(reader *r, bool escape) {
  const unsigned char c = (unsigned char)r->text[r->at++];
  static const char names[] = "nrtfv0", codes[] = "\n\r\t\f\v";
  if (!escape && c >= 0x80) {
    const int more = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
    uint32_t code = c & (0x3fu >> more);
    for (int i = 0; i < more; i++)
      code = code << 6 | ((unsigned char)r->text[r->at++] & 0x3fu);
    return code;
  }
  if (!escape) return c;
  if (c == 'x') return read_hex(r, 2);
  if (c == 'u') return read_hex(r, 4);
  const char *const name = memchr(names, c, 5);
  if (name != NULL) return (unsigned char)codes[name - names];
  const bool letter = (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
  if (letter || (c >= '0' && c <= '9') || c >= 0x80) {
    r->at--;
    (void)refuse(r, PKV_E_UNSUPPORTED, "this escape is not supported");
  }
  return c;
}

__attribute__((noinline)) static pkv_pattern read_class(reader *r) {
  code_set set = {.count = 0};
  r->at++;
  set.negate = peek(r) == '^';
  r->at += set.negate;
  if (peek(r) == ']') return refuse(r, PKV_E_UNSUPPORTED, "an empty class is not supported");
  while (!failed(r) && peek(r) != ']') {
    uint32_t bounds[2];
    bool named = false;
    int have = 0;
    do { /* a character, or two with - between them */
      if (at_end(r)) return refuse(r, PKV_E_FORMAT, "a class is not closed");
      const bool escape = peek(r) == '\\';
      r->at += escape;
      if (at_end(r)) return refuse(r, PKV_E_FORMAT, "a class is not closed");
      named = escape && add_named(r, &set, peek(r));
      if (named && have > 0) return refuse(r, PKV_E_FORMAT, "a range ends with a class");
      if (named)
        r->at++;
      else if (escape && peek(r) == 'b') {
        bounds[have++] = '\b';
        r->at++;
      } else
        bounds[have++] = read_code(r, escape);
      if (failed(r) || named || have == 2 || peek(r) != '-' || r->at + 1 >= r->size ||
          r->text[r->at + 1] == ']')
        break;
      r->at++;
    } while (have < 2);
    if (failed(r) || named) continue;
    if (have == 2 && bounds[1] < bounds[0])
      return refuse(r, PKV_E_FORMAT, "a range runs backwards");
    add_range(r, &set, bounds[0], bounds[have - 1]);
  }
  r->at++;
  if (failed(r)) return (pkv_pattern){0, 0, 0};
  return (pkv_pattern){set_node(r, &set), 1, 1};
}

__attribute__((noinline)) static pkv_pattern read_one(reader *r) {
  code_set set = {.count = 0};
  const char c = peek(r);
  if (c == '.') {
    r->at++;
    set.negate = true;
    add_range(r, &set, '\n', '\n');
    add_range(r, &set, '\r', '\r');
    add_range(r, &set, 0x2028, 0x2029);
    return (pkv_pattern){set_node(r, &set), 1, 1};
  }
  const bool escape = c == '\\';
  r->at += escape;
  if (at_end(r)) return refuse(r, PKV_E_FORMAT, "there is nothing behind \\");
  if (escape && add_named(r, &set, peek(r))) {
    r->at++;
  } else {
    const uint32_t code = read_code(r, escape);
    if (code == 0) return refuse(r, PKV_E_UNSUPPORTED, "NUL is not supported");
    add_range(r, &set, code, code);
  }
  return (pkv_pattern){set_node(r, &set), 1, 1};
}

/* --- structure ----------------------------------------------------------------------------- */

static pkv_pattern read_group(reader *r) {
  if (++r->depth > PATTERN_DEPTH) return refuse(r, PKV_E_LIMIT, "groups nest too deep");
  r->at++;
  if (peek(r) == '?') {
    if (r->size - r->at < 2 || r->text[r->at + 1] != ':')
      return refuse(r, PKV_E_UNSUPPORTED, "of groups with ? only (?: is supported");
    r->at += 2;
  }
  const pkv_pattern inside = read_either(r);
  if (!failed(r) && peek(r) != ')') return refuse(r, PKV_E_FORMAT, "a group is not closed");
  r->at++;
  r->depth--;
  return inside;
}

static pkv_pattern read_item(reader *r) {
  const char c = peek(r);
  if (c == '(') return read_group(r);
  if (c == '[') return read_class(r);
  if (c == '^' || c == '$')
    return refuse(r, PKV_E_UNSUPPORTED, "anchors are supported at the ends only");
  if (c == '*' || c == '+' || c == '?' || c == '{')
    return refuse(r, PKV_E_FORMAT, "there is nothing to repeat");
  return read_one(r);
}

static int32_t read_count(reader *r) {
  const int32_t value = pkv_syntax_read_count(r->text, r->size, &r->at);
  if (value > PKV_GRAMMAR_REPEAT) (void)refuse(r, PKV_E_LIMIT, PKV_SYNTAX_MANY_TIMES);
  return value;
}

static int64_t times(int64_t a, int64_t b) {
  return a == 0 || b <= LONGEST / a ? a * b : LONGEST;
}

static pkv_pattern read_repeated(reader *r) {
  pkv_pattern p = read_item(r);
  int32_t least = 1, most = 1;
  const char c = peek(r);
  if (failed(r) || at_end(r) || (c != '*' && c != '+' && c != '?' && c != '{')) return p;
  r->at++;
  if (c != '{') {
    least = c == '+';
    most = c == '?' ? 1 : -1;
  } else {
    least = most = read_count(r);
    if (peek(r) == ',') {
      r->at++;
      most = read_count(r);
    }
    if (failed(r)) return p;
    if (least < 0 || peek(r) != '}') return refuse(r, PKV_E_FORMAT, "a bad repetition");
    if (most >= 0 && most < least) return refuse(r, PKV_E_FORMAT, "the counts run backwards");
    r->at++;
  }
  if (peek(r) == '?') r->at++; /* lazy: the same texts */
  if (!at_end(r) && strchr("*+?{", peek(r)) != NULL)
    return refuse(r, PKV_E_FORMAT, "there is nothing to repeat");
  p.node = pkv_syntax_repeat(r->tree, p.node, least, most);
  p.least = times(p.least, least);
  p.most = p.most == 0 || most == 0 ? 0 : p.most < 0 || most < 0 ? -1 : times(p.most, most);
  return p;
}

static pkv_pattern join(reader *r, pkv_pattern a, pkv_pattern b) {
  const int64_t most = a.most < 0 || b.most < 0 ? -1 : a.most + b.most;
  return (pkv_pattern){pkv_syntax_join(r->tree, a.node, b.node), a.least + b.least, most};
}

/* Anything, where an anchor lacks. */
static pkv_pattern anything(reader *r) {
  const int32_t one = pkv_json_character(r->rules);
  return (pkv_pattern){pkv_syntax_repeat(r->tree, one, 0, -1), 0, -1};
}

static pkv_pattern read_sequence(reader *r) {
  pkv_pattern p = {pkv_syntax_empty(r->tree), 0, 0};
  const bool outside = r->depth == 0;
  const bool begins = outside && peek(r) == '^';
  bool ends = false;
  r->at += begins;
  if (outside && !begins) p = anything(r);
  while (!failed(r) && !at_end(r) && peek(r) != '|' && (outside || peek(r) != ')')) {
    if (outside && peek(r) == ')') return refuse(r, PKV_E_FORMAT, "a ) without (");
    if (outside && peek(r) == '$' && (r->at + 1 == r->size || r->text[r->at + 1] == '|')) {
      r->at++;
      ends = true;
      break;
    }
    p = join(r, p, read_repeated(r));
  }
  return outside && !ends ? join(r, p, anything(r)) : p;
}

static pkv_pattern read_either(reader *r) {
  pkv_pattern p = read_sequence(r);
  while (!failed(r) && peek(r) == '|') {
    r->at++;
    const pkv_pattern q = read_sequence(r);
    p.node = pkv_syntax_either(r->tree, p.node, q.node);
    p.least = q.least < p.least ? q.least : p.least;
    p.most = p.most < 0 || q.most < 0 ? -1 : q.most > p.most ? q.most : p.most;
  }
  return p;
}

pkv_pattern pkv_pattern_read(pkv_json_rules *rules, const char *text, size_t bytes) {
  reader r = {rules, rules->tree, text, bytes, 0, 0};
  return read_either(&r);
}
