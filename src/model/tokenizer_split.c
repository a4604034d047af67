/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pre-tokenizer patterns, and the walk that applies them with PCRE2.
 *
 * The patterns mean what the models' own tokenizer files say, in a form that cannot run away:
 * - Every repeat is possessive, or gives back at most one character (the blank before a word), so
 *   that a long run of one class costs linear time and a flat stack.
 * - Blanks are Unicode's White_Space set, written out: PCRE2's \s also takes U+180E.
 * - Letters and numbers are Unicode 16's, as in the tokenizers the models were made with: PCRE2
 *   brings the property of its own version, and what came after Unicode 14 (Debian 12's) is added
 *   as ranges. A newer PCRE2 only knows more characters of scripts that came later still.
 * - "(?i:'s)" is written out: ignoring case makes U+017F (long s) an s; no other letter of the
 *   contractions has such a third form.
 */
#include "model/tokenizer_split.h"

#include <stdatomic.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* Frames of the interpreter; the compiled code needs none. */
#define HEAP_LIMIT_KIB 4096u
/* Backtracking points of one word: the patterns need a handful, and one for each line of blanks. */
#define MATCH_LIMIT 1000000u

#define BLANK                                                                                      \
  "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"      \
  "\\x{205f}\\x{3000}"
#define BLANK_BUT_NEWLINE                                                                          \
  "\\x{9}\\x{b}\\x{c}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}" \
  "\\x{205f}\\x{3000}"
#define LETTER                                                                                     \
  "\\p{L}\\x{1c89}\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}"            \
  "\\x{10d4a}-\\x{10d65}\\x{10d6f}-\\x{10d85}\\x{10ec2}-\\x{10ec4}\\x{1123f}\\x{11240}"            \
  "\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}\\x{113d3}"   \
  "\\x{11bc0}-\\x{11be0}\\x{11f02}\\x{11f04}-\\x{11f10}\\x{11f12}-\\x{11f33}\\x{1342f}"            \
  "\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}\\x{16d40}-\\x{16d6c}"           \
  "\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}\\x{1e030}-\\x{1e06d}\\x{1e4d0}-\\x{1e4eb}"  \
  "\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}"
#define NUMBER                                                                                     \
  "\\p{N}\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11f50}-\\x{11f59}"     \
  "\\x{16130}-\\x{16139}\\x{16d70}-\\x{16d79}\\x{1ccf0}-\\x{1ccf9}\\x{1d2c0}-\\x{1d2d3}"           \
  "\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}"

/* A blank run that something follows leaves its last character to the next word. */
#define BLANKS "[" BLANK "]+(?![^" BLANK "])|[" BLANK "]++"

#define GPT2                                                                                       \
  "'(?:[stmd]|re|ve|ll)| ?[" LETTER "]++| ?[" NUMBER "]++| ?[^" BLANK LETTER NUMBER "]++|" BLANKS

/*
 * smollm cuts every number out first and splits what is between by GPT-2's rule. The two passes are
 * one pattern here: a number stands alone, and a blank run before a number is at the end of its
 * part, so it keeps its last character.
 */
#define SMOLLM                                                                                     \
  "[" NUMBER "]|'(?:[stmd]|re|ve|ll)| ?[" LETTER "]++| ?[^" BLANK LETTER NUMBER "]++|"             \
  "[" BLANK "]+(?![^" BLANK NUMBER "])|[" BLANK "]++"

/* The fifth alternative is \s*[\r\n]+ without its walk back: up to the last newline of the run. */
#define MODERN(number)                                                                             \
  "'(?:[sS\\x{17f}tTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\\r\\n" LETTER NUMBER "]?+[" LETTER        \
  "]++|" number "| ?[^" BLANK LETTER NUMBER "]++[\\r\\n]*+|(?:[" BLANK_BUT_NEWLINE                 \
  "]*+[\\r\\n]++)++|" BLANKS
#define LLAMA3 MODERN("[" NUMBER "]{1,3}+")
#define QWEN2  MODERN("[" NUMBER "]")

typedef struct rule_name {
  const char *name;
  pkv_split_rule rule;
} rule_name;

static const rule_name rules[] = {
    {"gpt-2", {"gpt-2", GPT2, false, false, false}},
    {"smollm", {"smollm", SMOLLM, false, false, false}},
    {"llama-bpe", {"llama-bpe", LLAMA3, true, true, false}},
    {"llama3", {"llama-bpe", LLAMA3, true, true, false}},
    {"llama-v3", {"llama-bpe", LLAMA3, true, true, false}},
    {"qwen2", {"qwen2", QWEN2, false, false, true}},
};

struct pkv_splitter {
  pkv_allocator allocator;
  /* An allocation of PCRE2's failed: tells a lack of memory from a machine without a compiler,
     which PCRE2 reports by one code. Relaxed: read by the thread that builds, before it shares.
     */
  atomic_bool starved;
  pcre2_general_context *general;
  pcre2_code *code;
};

struct pkv_split_cursor {
  const pkv_splitter *splitter;
  pcre2_match_data *match;
  pcre2_match_context *context;
  const char *text;
  size_t bytes;
  size_t at;    /* start of the next word */
  size_t valid; /* text[at .. valid) is well-formed */
};

const pkv_split_rule *pkv_split_rule_find(pkv_span name) {
  for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
    if (strlen(rules[i].name) == name.size && memcmp(rules[i].name, name.data, name.size) == 0)
      return &rules[i].rule;
  }
  return NULL;
}

/* ------------------------------------------------------------------------------------------
 * Memory for PCRE2: its free function does not tell sizes, so each block remembers its own.
 * ------------------------------------------------------------------------------------------ */

#define BLOCK_HEAD 16u

static void *regex_alloc(size_t size, void *user) {
  pkv_splitter *s = user;
  size_t total;
  if (!pkv_add_size(&total, size, BLOCK_HEAD)) return NULL;
  unsigned char *block = pkv_alloc(&s->allocator, total);
  if (block == NULL) {
    atomic_store_explicit(&s->starved, true, memory_order_relaxed);
    return NULL;
  }
  memcpy(block, &total, sizeof total);
  return block + BLOCK_HEAD;
}

static void regex_free(void *ptr, void *user) {
  const pkv_splitter *s = user;
  if (ptr == NULL) return;
  unsigned char *block = (unsigned char *)ptr - BLOCK_HEAD;
  size_t total;
  memcpy(&total, block, sizeof total);
  pkv_free(&s->allocator, block, total);
}

/* ------------------------------------------------------------------------------------------
 * Splitter and cursor
 * ------------------------------------------------------------------------------------------ */

static pkv_status compile(pkv_splitter *s, const pkv_split_rule *rule, bool compiled,
                          pkv_error *err) {
  s->general = pcre2_general_context_create(regex_alloc, regex_free, s);
  pcre2_compile_context *context =
      s->general != NULL ? pcre2_compile_context_create(s->general) : NULL;
  int code = 0;
  PCRE2_SIZE offset = 0;
  if (context != NULL) {
    s->code = pcre2_compile((PCRE2_SPTR)rule->pattern, PCRE2_ZERO_TERMINATED,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NO_AUTO_CAPTURE, &code,
                            &offset, context);
  }
  pcre2_compile_context_free(context);
  /* Where there is no compiler for this machine, the interpreter matches the same, only slower. */
  if (s->code != NULL && compiled) (void)pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE);
  PKV_CHECK(err, !atomic_load_explicit(&s->starved, memory_order_relaxed), PKV_E_NOMEM,
            "no memory for pre-tokenizer '%s'", rule->name);
  PKV_CHECK(err, s->code != NULL, PKV_E_INTERNAL, "pattern of pre-tokenizer '%s': error %d at %zu",
            rule->name, code, (size_t)offset);
  return PKV_OK;
}

pkv_status pkv_splitter_create(pkv_splitter **out, const pkv_split_rule *rule, bool compiled,
                               const pkv_allocator *allocator, pkv_error *err) {
  *out = NULL;
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_splitter *s = pkv_alloc_zeroed(&a, 1, sizeof *s);
  PKV_CHECK(err, s != NULL, PKV_E_NOMEM, "no memory for the pre-tokenizer");
  s->allocator = a;
  atomic_init(&s->starved, false);
  const pkv_status status = compile(s, rule, compiled, err);
  if (status != PKV_OK) {
    pkv_splitter_destroy(s);
    return status;
  }
  *out = s;
  return PKV_OK;
}

void pkv_splitter_destroy(pkv_splitter *s) {
  if (s == NULL) return;
  pcre2_code_free(s->code);
  pcre2_general_context_free(s->general);
  const pkv_allocator a = s->allocator;
  pkv_free(&a, s, sizeof *s);
}

pkv_status pkv_split_cursor_create(pkv_split_cursor **out, const pkv_splitter *splitter,
                                   pkv_error *err) {
  *out = NULL;
  pkv_split_cursor *c = pkv_alloc_zeroed(&splitter->allocator, 1, sizeof *c);
  PKV_CHECK(err, c != NULL, PKV_E_NOMEM, "no memory to split a text");
  c->splitter = splitter;
  c->match = pcre2_match_data_create(1, splitter->general);
  c->context = pcre2_match_context_create(splitter->general);
  if (c->match == NULL || c->context == NULL) {
    pkv_split_cursor_destroy(c);
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory to split a text");
  }
  pcre2_set_heap_limit(c->context, HEAP_LIMIT_KIB);
  *out = c;
  return PKV_OK;
}

void pkv_split_cursor_destroy(pkv_split_cursor *c) {
  if (c == NULL) return;
  pcre2_match_data_free(c->match);
  pcre2_match_context_free(c->context);
  pkv_free(&c->splitter->allocator, c, sizeof *c);
}

void pkv_split_cursor_reset(pkv_split_cursor *c, const char *text, size_t bytes) {
  c->text = text;
  c->bytes = bytes;
  c->at = 0;
  c->valid = 0;
  pcre2_set_match_limit(c->context, bytes < UINT32_MAX - MATCH_LIMIT ? (uint32_t)bytes + MATCH_LIMIT
                                                                     : UINT32_MAX);
}

/* Bytes of the well-formed character at p; 0 when there is none. No surrogates, no overlong forms,
   nothing above U+10FFFF: what PCRE2 would check. */
static size_t character_bytes(const unsigned char *p, size_t left) {
  const unsigned char c = p[0];
  if (c < 0x80) return 1;
  if (c < 0xc2 || c > 0xf4) return 0;
  const size_t need = c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
  if (left < need) return 0;
  const unsigned char low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
  if (p[1] < low || p[1] > high) return 0;
  for (size_t i = 2; i < need; i++) {
    if ((p[i] & 0xc0) != 0x80) return 0;
  }
  return need;
}

/* End of the well-formed stretch that starts at `at`. */
static size_t valid_until(const char *text, size_t at, size_t bytes) {
  while (at < bytes) {
    const size_t n = character_bytes((const unsigned char *)text + at, bytes - at);
    if (n == 0) break;
    at += n;
  }
  return at;
}

pkv_status pkv_split_next(size_t *start, size_t *bytes, pkv_split_cursor *c, pkv_error *err) {
  *start = c->at;
  *bytes = 0;
  if (c->at >= c->bytes) return PKV_OK;
  if (c->at >= c->valid) {
    c->valid = valid_until(c->text, c->at, c->bytes);
    if (c->valid == c->at) { /* an ill-formed byte is a word */
      c->at++;
      *bytes = 1;
      return PKV_OK;
    }
  }
  const int rc = pcre2_match(c->splitter->code, (PCRE2_SPTR)(c->text + c->at), c->valid - c->at, 0,
                             PCRE2_NO_UTF_CHECK, c->match, c->context);
  if (rc == PCRE2_ERROR_NOMEMORY)
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory to split the text at byte %zu", c->at);
  if (rc <= 0)
    return PKV_FAIL(err, PKV_E_LIMIT, "the text cannot be split at byte %zu (matcher error %d)",
                    c->at, rc);
  const PCRE2_SIZE *span = pcre2_get_ovector_pointer(c->match);
  if (span[0] != 0 || span[1] == 0 || span[1] > c->valid - c->at)
    return PKV_FAIL(err, PKV_E_INTERNAL, "an empty word at byte %zu", c->at);
  *bytes = span[1];
  c->at += span[1];
  return PKV_OK;
}
