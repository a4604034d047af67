/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rule    name ::= either, up to the end of the line; inside parentheses, behind ::= and behind |
 *         a line may end anywhere
 * items   "text" [class] [^class] . (either) name, each with * + ? {n} {n,} {n,m}
 * escapes \n \r \t \\ \" \[ \] \- \^ \xHH \uHHHH \UHHHHHHHH; comments from # to the line's end
 */
#include "grammar/grammar_text.h"

#include <string.h>

#include "base/hash.h"
#include "base/text.h"

#define TEXT_BYTES   4096 /* of one "text" */
#define CLASS_RANGES 512
#define NAME_BYTES   128

typedef struct name_slot {
  int32_t rule; /* -1: free */
  size_t at, bytes;
} name_slot;

typedef struct reader {
  pkv_syntax *tree;
  const char *text;
  size_t size, at;
  int depth;
  size_t counted; /* lines are counted up to here: places come in rising order */
  int32_t line;
  name_slot *names; /* [slots]: open addressing, never more than half full */
  size_t slots, used;
} reader;

static bool failed(const reader *r) {
  return r->tree->status != PKV_OK;
}

static int32_t line_of(reader *r, size_t at) {
  if (at < r->counted) r->line = 0, r->counted = 0; /* a failure that looks back: the last one */
  for (; r->counted < at; r->counted++)
    r->line += r->text[r->counted] == '\n';
  return r->line + 1;
}

static int32_t refuse(reader *r, pkv_status status, const char *what) {
  size_t start = r->at;
  while (start > 0 && r->text[start - 1] != '\n')
    start--;
  return pkv_syntax_fail(r->tree, status, "line %d, column %zu: %s", (int)line_of(r, r->at),
                         r->at - start + 1, what);
}

static char peek(const reader *r) {
  return r->at < r->size ? r->text[r->at] : '\0';
}

static bool at_end(const reader *r) {
  return r->at >= r->size;
}

static void skip_blanks(reader *r, bool lines) {
  while (!at_end(r)) {
    const char c = peek(r);
    if (c == '#') {
      while (!at_end(r) && peek(r) != '\n' && peek(r) != '\r')
        r->at++;
    } else if (c == ' ' || c == '\t' || (lines && (c == '\n' || c == '\r'))) {
      r->at++;
    } else {
      return;
    }
  }
}

static bool in_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_';
}

/* --- names --------------------------------------------------------------------------------- */

static name_slot *find_slot(const reader *r, const char *name, size_t bytes) {
  size_t i = (size_t)pkv_hash_bytes(name, bytes, 0) % r->slots;
  while (r->names[i].rule >= 0 &&
         (r->names[i].bytes != bytes || memcmp(r->text + r->names[i].at, name, bytes) != 0))
    i = (i + 1) % r->slots;
  return &r->names[i];
}

static bool grow_names(reader *r) {
  const pkv_allocator *const a = &r->tree->allocator;
  name_slot *const old = r->names;
  const size_t before = r->slots;
  if (before > 0 && r->used * 2 < before) return true;
  r->slots = before > 0 ? before * 2 : 64;
  r->names = pkv_alloc(a, r->slots * sizeof *r->names);
  if (r->names == NULL) {
    r->names = old;
    r->slots = before;
    (void)pkv_syntax_fail(r->tree, PKV_E_NOMEM, "no memory for the names of a grammar");
    return false;
  }
  for (size_t i = 0; i < r->slots; i++)
    r->names[i].rule = -1;
  for (size_t i = 0; i < before; i++)
    if (old[i].rule >= 0) *find_slot(r, r->text + old[i].at, old[i].bytes) = old[i];
  pkv_free(a, old, before * sizeof *old);
  return true;
}

/* The rule of the name that stands here; new where it is seen first. */
static int32_t read_name(reader *r) {
  const size_t from = r->at;
  while (!at_end(r) && in_name(peek(r)))
    r->at++;
  const size_t bytes = r->at - from;
  if (bytes == 0 || bytes > NAME_BYTES) {
    r->at = from;
    return refuse(r, PKV_E_FORMAT, bytes == 0 ? "a rule's name is expected" : "the name is long");
  }
  if (!grow_names(r)) return 0;
  name_slot *const slot = find_slot(r, r->text + from, bytes);
  if (slot->rule < 0) {
    *slot = (name_slot){pkv_syntax_new_rule(r->tree, line_of(r, from)), from, bytes};
    r->used++;
  }
  return slot->rule;
}

/* --- characters ---------------------------------------------------------------------------- */

static uint32_t read_hex(reader *r, int digits) {
  uint32_t value = 0;
  for (int i = 0; i < digits; i++, r->at++) {
    const char c = peek(r);
    const char lower = (char)(c | 0x20);
    if (c >= '0' && c <= '9')
      value = value << 4 | (uint32_t)(c - '0');
    else if (lower >= 'a' && lower <= 'f')
      value = value << 4 | (uint32_t)(lower - 'a' + 10);
    else
      return (uint32_t)refuse(r, PKV_E_FORMAT, "hexadecimal digits are expected");
  }
  if (value > PKV_LAST_CODE || (value >= 0xd800 && value <= 0xdfff))
    return (uint32_t)refuse(r, PKV_E_FORMAT, "this number is no character");
  return value;
}

static uint32_t read_escape(reader *r) {
  const char c = peek(r);
  r->at++;
  switch (c) {
  case 'n':
    return '\n';
  case 'r':
    return '\r';
  case 't':
    return '\t';
  case 'x':
    return read_hex(r, 2);
  case 'u':
    return read_hex(r, 4);
  case 'U':
    return read_hex(r, 8);
  case '\\':
  case '"':
  case '[':
  case ']':
  case '-':
  case '^':
    return (uint32_t)c;
  default:
    r->at--;
    return (uint32_t)refuse(r, PKV_E_FORMAT, "this escape is unknown");
  }
}

/* One character; the text is UTF-8 (checked before). */
static uint32_t read_character(reader *r) {
  const unsigned char c = (unsigned char)r->text[r->at++];
  if (c == '\\') return read_escape(r);
  if (c < 0x80) return c;
  const int more = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
  uint32_t code = c & (0x3fu >> more);
  for (int i = 0; i < more; i++)
    code = code << 6 | ((unsigned char)r->text[r->at++] & 0x3fu);
  return code;
}

static size_t encode(char *out, uint32_t code) {
  if (code < 0x80) {
    out[0] = (char)code;
    return 1;
  }
  const int more = code >= 0x10000 ? 3 : code >= 0x800 ? 2 : 1;
  static const unsigned char lead[] = {0, 0xc0, 0xe0, 0xf0};
  for (int i = more; i > 0; i--) {
    out[i] = (char)(0x80 | (code & 0x3f));
    code >>= 6;
  }
  out[0] = (char)(lead[more] | code);
  return (size_t)more + 1;
}

/* Kept out of the functions that call themselves: their frames stay small. */
__attribute__((noinline)) static int32_t read_quoted(reader *r) {
  char text[TEXT_BYTES];
  size_t bytes = 0;
  int32_t node = pkv_syntax_empty(r->tree);
  const size_t from = r->at++;
  while (!failed(r) && peek(r) != '"') {
    if (at_end(r) || peek(r) == '\n') {
      r->at = from;
      return refuse(r, PKV_E_FORMAT, "this text is not closed");
    }
    bytes += encode(text + bytes, read_character(r));
    if (bytes + 4 <= sizeof text) continue;
    node = pkv_syntax_join(r->tree, node, pkv_syntax_text(r->tree, text, bytes));
    bytes = 0;
  }
  r->at++;
  return pkv_syntax_join(r->tree, node, pkv_syntax_text(r->tree, text, bytes));
}

__attribute__((noinline)) static int32_t read_class(reader *r) {
  pkv_code_range ranges[CLASS_RANGES];
  size_t count = 0;
  const size_t from = r->at++;
  const bool negate = peek(r) == '^';
  r->at += negate;
  while (!failed(r) && peek(r) != ']') {
    if (at_end(r) || peek(r) == '\n') {
      r->at = from;
      return refuse(r, PKV_E_FORMAT, "this class is not closed");
    }
    if (count == CLASS_RANGES) return refuse(r, PKV_E_LIMIT, "this class is too long");
    pkv_code_range *const range = &ranges[count++];
    range->low = range->high = read_character(r);
    if (peek(r) != '-' || r->at + 1 >= r->size || r->text[r->at + 1] == ']') continue;
    r->at++;
    range->high = read_character(r);
    if (range->high < range->low) return refuse(r, PKV_E_FORMAT, "this range runs backwards");
  }
  r->at++;
  if (count == 0 && !negate) return refuse(r, PKV_E_FORMAT, "this class is empty");
  return pkv_syntax_class(r->tree, ranges, count, negate);
}

/* --- items --------------------------------------------------------------------------------- */

static int32_t read_either(reader *r);

static int32_t read_group(reader *r) {
  if (r->depth == PKV_GRAMMAR_DEPTH)
    return refuse(r, PKV_E_LIMIT, "parentheses nest deeper than 256");
  r->depth++;
  const size_t from = r->at++;
  skip_blanks(r, true);
  const int32_t node = read_either(r);
  r->depth--;
  if (!failed(r) && peek(r) != ')') {
    const bool cut = at_end(r);
    if (cut) r->at = from;
    return refuse(r, PKV_E_FORMAT, cut ? "this parenthesis is not closed" : "a ) is expected");
  }
  r->at++;
  return node;
}

/* -1: no number stands here. */
static int32_t read_count(reader *r) {
  const int32_t value = pkv_syntax_read_count(r->text, r->size, &r->at);
  if (value > PKV_GRAMMAR_REPEAT) return refuse(r, PKV_E_LIMIT, PKV_SYNTAX_MANY_TIMES);
  skip_blanks(r, r->depth > 0);
  return value;
}

static int32_t read_braces(reader *r, int32_t item) {
  r->at++;
  skip_blanks(r, r->depth > 0);
  const int32_t least = read_count(r);
  int32_t most = least;
  if (least < 0) return refuse(r, PKV_E_FORMAT, "a number is expected behind {");
  if (peek(r) == ',') {
    r->at++;
    skip_blanks(r, r->depth > 0);
    most = read_count(r);
  }
  if (failed(r)) return 0;
  if (peek(r) != '}') return refuse(r, PKV_E_FORMAT, "a } is expected");
  if (most >= 0 && most < least) return refuse(r, PKV_E_FORMAT, "the counts run backwards");
  r->at++;
  return pkv_syntax_repeat(r->tree, item, least, most);
}

static int32_t read_suffixes(reader *r, int32_t item) {
  for (;;) {
    skip_blanks(r, r->depth > 0);
    if (failed(r)) return 0;
    const char c = peek(r);
    if (c == '*')
      item = pkv_syntax_repeat(r->tree, item, 0, -1);
    else if (c == '+')
      item = pkv_syntax_repeat(r->tree, item, 1, -1);
    else if (c == '?')
      item = pkv_syntax_optional(r->tree, item);
    else if (c == '{')
      item = read_braces(r, item);
    else
      return item;
    if (c != '{') r->at++;
  }
}

static int32_t read_item(reader *r, bool *found) {
  const char c = peek(r);
  *found = true;
  if (c == '"') return read_quoted(r);
  if (c == '[') return read_class(r);
  if (c == '(') return read_group(r);
  if (c == '.') {
    r->at++;
    return pkv_syntax_class(r->tree, NULL, 0, true);
  }
  if (c == '<' || c == '!')
    return refuse(r, PKV_E_UNSUPPORTED, "grammars over tokens (<...>) are not supported");
  if (in_name(c)) return pkv_syntax_call(r->tree, read_name(r));
  *found = false;
  return pkv_syntax_empty(r->tree);
}

static int32_t read_sequence(reader *r) {
  int32_t node = pkv_syntax_empty(r->tree);
  for (;;) {
    bool found = false;
    const int32_t item = read_item(r, &found);
    if (failed(r) || !found) return node;
    node = pkv_syntax_join(r->tree, node, read_suffixes(r, item));
    if (failed(r)) return node;
  }
}

static int32_t read_either(reader *r) {
  int32_t node = read_sequence(r);
  while (!failed(r) && peek(r) == '|') {
    r->at++;
    skip_blanks(r, true);
    node = pkv_syntax_either(r->tree, node, read_sequence(r));
  }
  return node;
}

static void read_rule(reader *r) {
  const size_t from = r->at;
  const int32_t rule = read_name(r);
  const bool root = r->at - from == 4 && memcmp(r->text + from, "root", 4) == 0;
  skip_blanks(r, false);
  if (failed(r)) return;
  if (r->size - r->at < 3 || memcmp(r->text + r->at, "::=", 3) != 0) {
    (void)refuse(r, PKV_E_FORMAT, "::= is expected");
    return;
  }
  if (r->tree->rules[rule].node >= 0) {
    r->at = from;
    (void)refuse(r, PKV_E_FORMAT, "this rule is there already");
    return;
  }
  r->at += 3;
  skip_blanks(r, true);
  pkv_syntax_define(r->tree, rule, read_either(r));
  if (root) r->tree->root = rule;
  if (!failed(r) && !at_end(r) && peek(r) != '\n' && peek(r) != '\r')
    (void)refuse(r, PKV_E_FORMAT, "this character cannot stand here");
  skip_blanks(r, true);
}

void pkv_grammar_read(pkv_syntax *tree, const char *text, size_t bytes) {
  reader r = {.tree = tree, .text = text, .size = bytes};
  const size_t first = tree->rule_count; /* the tree may hold others' rules */
  if (bytes > PKV_GRAMMAR_TEXT_BYTES) {
    (void)pkv_syntax_fail(tree, PKV_E_LIMIT, "the grammar has %zu bytes, possible are %d", bytes,
                          PKV_GRAMMAR_TEXT_BYTES);
    return;
  }
  if (!pkv_utf8_valid(text, bytes) || memchr(text, 0, bytes) != NULL) {
    (void)pkv_syntax_fail(tree, PKV_E_FORMAT, "the grammar is no text in UTF-8");
    return;
  }
  skip_blanks(&r, true);
  while (!failed(&r) && !at_end(&r))
    read_rule(&r);
  for (size_t i = first; !failed(&r) && i < tree->rule_count; i++)
    if (tree->rules[i].node < 0)
      (void)pkv_syntax_fail(tree, PKV_E_FORMAT, "line %d: a rule of this name is nowhere defined",
                            (int)tree->rules[i].line);
  if (!failed(&r) && tree->root < 0)
    (void)pkv_syntax_fail(tree, PKV_E_FORMAT, "there is no rule named root");
  pkv_free(&tree->allocator, r.names, r.slots * sizeof *r.names);
}
