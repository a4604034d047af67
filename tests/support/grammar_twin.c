/* SPDX-License-Identifier: Apache-2.0 */
#include "support/grammar_twin.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* --- soundness ----------------------------------------------------------------------------- */

typedef struct facts {
  bool productive[256], empty[256]; /* of rules */
} facts;

/* Whether the node has a text; with `blank`: the empty one. */
static bool holds(const pkv_syntax *t, const facts *f, int32_t node, bool blank) {
  const pkv_syntax_node n = t->nodes[node];
  switch (n.kind) {
  case PKV_SYNTAX_EMPTY:
    return true;
  case PKV_SYNTAX_NONE:
    return false;
  case PKV_SYNTAX_TEXT:
  case PKV_SYNTAX_CLASS:
    return !blank;
  case PKV_SYNTAX_JOIN:
    return holds(t, f, n.a, blank) && holds(t, f, n.b, blank);
  case PKV_SYNTAX_EITHER:
    return holds(t, f, n.a, blank) || holds(t, f, n.b, blank);
  case PKV_SYNTAX_REPEAT:
    return n.b == 0 || holds(t, f, n.a, blank);
  default:
    return blank ? f->empty[n.a] : f->productive[n.a];
  }
}

/* The rules that a node comes to before any byte. */
static void first_calls(const pkv_syntax *t, const facts *f, int32_t node, bool *calls) {
  const pkv_syntax_node n = t->nodes[node];
  if (n.kind == PKV_SYNTAX_RULE) calls[n.a] = true;
  if (n.kind == PKV_SYNTAX_JOIN || n.kind == PKV_SYNTAX_EITHER) {
    first_calls(t, f, n.a, calls);
    if (n.kind == PKV_SYNTAX_EITHER || holds(t, f, n.a, true)) first_calls(t, f, n.b, calls);
  }
  if (n.kind == PKV_SYNTAX_REPEAT) first_calls(t, f, n.a, calls);
}

bool twin_is_sound(const pkv_syntax *tree, bool *left_recursive) {
  static bool reach[256][256];
  facts f = {{false}, {false}};
  const size_t rules = tree->rule_count;
  assert_true(rules <= 256);
  for (size_t round = 0; round <= rules; round++)
    for (size_t i = 0; i < rules; i++) {
      f.productive[i] = holds(tree, &f, tree->rules[i].node, false);
      f.empty[i] = holds(tree, &f, tree->rules[i].node, true);
    }
  memset(reach, 0, sizeof reach);
  for (size_t i = 0; i < rules; i++)
    first_calls(tree, &f, tree->rules[i].node, reach[i]);
  for (size_t k = 0; k < rules; k++)
    for (size_t i = 0; i < rules; i++)
      for (size_t j = 0; j < rules; j++)
        reach[i][j] = reach[i][j] || (reach[i][k] && reach[k][j]);
  bool sound = true;
  *left_recursive = false;
  for (size_t i = 0; i < rules; i++) {
    sound = sound && f.productive[i];
    *left_recursive = *left_recursive || reach[i][i];
  }
  return sound && !*left_recursive;
}

/* --- matching ------------------------------------------------------------------------------ */

typedef uint32_t ends; /* bit i: the match ends before byte i */

typedef struct matcher {
  const pkv_syntax *t;
  const char *text;
  size_t bytes;
  bool hit_end; /* something more was wanted where the text ends */
  ends memo[4096][TWIN_BYTES + 1];
  bool known[4096][TWIN_BYTES + 1];
} matcher;

static ends match(matcher *m, int32_t node, size_t at);

static ends match_text(matcher *m, const char *want, int32_t count, size_t at) {
  for (int32_t i = 0; i < count; i++, at++) {
    if (at == m->bytes) {
      m->hit_end = true;
      return 0;
    }
    if (m->text[at] != want[i]) return 0;
  }
  return 1u << at;
}

/* By the code points that can begin with the bytes there are. */
static ends match_class(matcher *m, const pkv_syntax_node *n, size_t at) {
  static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  if (at == m->bytes) {
    m->hit_end = true;
    return 0;
  }
  const unsigned char lead = (unsigned char)m->text[at];
  const size_t length = lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead >= 0x80 && (lead < 0xc0 || lead > 0xf7)) return 0;
  uint32_t low = length == 1 ? lead : lead & (0x7fu >> length);
  size_t have = 1;
  for (; have < length && at + have < m->bytes; have++) {
    const unsigned char c = (unsigned char)m->text[at + have];
    if ((c & 0xc0) != 0x80) return 0;
    low = low << 6 | (c & 0x3fu);
  }
  const uint32_t open = 6 * (uint32_t)(length - have);
  low <<= open;
  uint32_t high = low | ((1u << open) - 1);
  if (low < least[length]) low = least[length];
  if (high < low) return 0;
  for (int32_t i = 0; i < n->b; i++) {
    const pkv_code_range r = m->t->ranges[n->a + i];
    if (r.high < low || r.low > high) continue;
    if (have == length) return 1u << (at + length);
    m->hit_end = true;
  }
  return 0;
}

static ends each(matcher *m, ends from, int32_t node) {
  ends all = 0;
  for (size_t i = 0; i <= m->bytes; i++)
    if ((from >> i & 1) != 0) all |= match(m, node, i);
  return all;
}

static ends match_repeat(matcher *m, const pkv_syntax_node *n, size_t at) {
  ends now = 1u << at, all = n->b == 0 ? now : 0, before = 0;
  for (int32_t i = 1; n->c < 0 || i <= n->c; i++) {
    now = each(m, now, n->a);
    if (i >= n->b) all |= now;
    if (now == 0 || (i > n->b && (all | now) == before && i > (int32_t)m->bytes)) break;
    before = all | now;
  }
  return all;
}

static ends match(matcher *m, int32_t node, size_t at) {
  const pkv_syntax_node *const n = &m->t->nodes[node];
  assert_true(node < 4096);
  if (m->known[node][at]) return m->memo[node][at];
  ends all = 0;
  switch (n->kind) {
  case PKV_SYNTAX_EMPTY:
    all = 1u << at;
    break;
  case PKV_SYNTAX_NONE:
    break;
  case PKV_SYNTAX_TEXT:
    all = match_text(m, m->t->bytes + n->a, n->b, at);
    break;
  case PKV_SYNTAX_CLASS:
    all = match_class(m, n, at);
    break;
  case PKV_SYNTAX_JOIN:
    all = each(m, match(m, n->a, at), n->b);
    break;
  case PKV_SYNTAX_EITHER:
    all = match(m, n->a, at) | match(m, n->b, at);
    break;
  case PKV_SYNTAX_REPEAT:
    all = match_repeat(m, n, at);
    break;
  case PKV_SYNTAX_RULE:
    all = match(m, m->t->rules[n->a].node, at);
    break;
  }
  m->known[node][at] = true;
  m->memo[node][at] = all;
  return all;
}

grammar_verdict twin_check(const pkv_syntax *tree, const char *text, size_t bytes) {
  static matcher m;
  assert_true(bytes <= TWIN_BYTES);
  memset(&m, 0, sizeof m);
  m.t = tree;
  m.text = text;
  m.bytes = bytes;
  const ends all = match(&m, tree->rules[tree->root].node, 0);
  const bool whole = (all >> bytes & 1) != 0;
  if (!whole) return m.hit_end ? GRAMMAR_BEGUN : GRAMMAR_DEAD;
  return m.hit_end ? GRAMMAR_WHOLE : GRAMMAR_DONE;
}
