/* SPDX-License-Identifier: Apache-2.0 */
/* From the tree to nodes over bytes, built from their ends: what follows is known first. */
#include "grammar/grammar_program.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/status.h"
#include "grammar/program_check.h"

/* Words that begin alike share nodes from so many on. */
#define FEW_WORDS 2
#define SET_SLOTS (2 * PKV_PROGRAM_SETS)

/* Where a set of the program is found again. */
typedef struct set_slot {
  uint64_t hash;
  int32_t set; /* -1: free */
} set_slot;

typedef struct word {
  const char *bytes;
  int32_t count;
} word;

typedef struct builder {
  pkv_program *program;
  const pkv_syntax *tree;
  int32_t *starts;  /* of rules: a node that leads to the first one */
  int32_t *item_of; /* by tree node: the same of what is repeated, as a rule of its own, or -1 */
  int32_t *items;   /* [item_count]: tree nodes that are */
  int32_t item_count;
  set_slot *sets; /* [SET_SLOTS]: open addressing, never more than half full */
  int depth;
  pkv_status status;
  pkv_error *err;
} builder;

static int32_t build(builder *b, int32_t node, int32_t next);

static int32_t stop(builder *b, pkv_status status, const char *what) {
  if (b->status == PKV_OK) b->status = PKV_FAIL(b->err, status, "%s", what);
  return 0;
}

static int32_t emit(builder *b, pkv_program_kind kind, int32_t arg, int32_t next) {
  pkv_program *const p = b->program;
  if (b->status != PKV_OK) return 0;
  if (p->node_count == PKV_PROGRAM_NODES)
    return stop(b, PKV_E_LIMIT, "the grammar needs more than 262144 states");
  if (p->node_count == p->node_capacity) {
    const size_t grown = p->node_capacity < 256 ? 256 : p->node_capacity * 2;
    void *const moved = pkv_realloc(&p->allocator, p->nodes, p->node_capacity * sizeof *p->nodes,
                                    grown * sizeof *p->nodes);
    if (moved == NULL) return stop(b, PKV_E_NOMEM, "no memory for a grammar");
    p->nodes = moved;
    p->node_capacity = grown;
  }
  p->nodes[p->node_count] = (pkv_program_node){(uint8_t)kind, 0, PKV_NEED_NEVER, arg, next};
  return (int32_t)p->node_count++;
}

/* --- characters ---------------------------------------------------------------------------- */

/* Equal sets are one. */
static int32_t add_set(builder *b, const pkv_byte_set *set) {
  pkv_program *const p = b->program;
  const uint64_t hash = pkv_hash_bytes(set, sizeof *set, 0);
  if (b->status != PKV_OK) return 0;
  set_slot *at = &b->sets[hash % SET_SLOTS];
  while (at->set >= 0) {
    if (at->hash == hash && memcmp(&p->sets[at->set], set, sizeof *set) == 0) return at->set;
    at = at + 1 < b->sets + SET_SLOTS ? at + 1 : b->sets;
  }
  if (p->set_count == PKV_PROGRAM_SETS)
    return stop(b, PKV_E_LIMIT, "the grammar has too many different character classes");
  if (p->set_count == p->set_capacity) {
    const size_t grown = p->set_capacity < 64 ? 64 : p->set_capacity * 2;
    void *const moved = pkv_realloc(&p->allocator, p->sets, p->set_capacity * sizeof *p->sets,
                                    grown * sizeof *p->sets);
    if (moved == NULL) return stop(b, PKV_E_NOMEM, "no memory for a grammar");
    p->sets = moved;
    p->set_capacity = grown;
  }
  p->sets[p->set_count] = *set;
  *at = (set_slot){hash, (int32_t)p->set_count};
  return (int32_t)p->set_count++;
}

static void set_range(pkv_byte_set *set, int low, int high) {
  for (int i = low; i <= high; i++)
    set->bits[i >> 6] |= UINT64_C(1) << (i & 63);
}

static int32_t emit_range(builder *b, int low, int high, int32_t next) {
  pkv_byte_set set = {{0}};
  if (low == high) return emit(b, PKV_NODE_BYTE, low, next);
  set_range(&set, low, high);
  return emit(b, PKV_NODE_SET, add_set(b, &set), next);
}

/* The ways on from a lead byte, and the lead bytes of each: characters that end alike meet. */
typedef struct lead_group {
  uint32_t low[3], high[3]; /* of the following bytes */
  int following;
  pkv_byte_set leads;
} lead_group;

typedef struct class_parts {
  lead_group groups[192];
  int count;
  bool full;
} class_parts;

static void add_sequence(class_parts *parts, const uint8_t *low, const uint8_t *high, int bytes) {
  lead_group g;
  memset(&g, 0, sizeof g);
  g.following = bytes - 1;
  for (int i = 1; i < bytes; i++) {
    g.low[i - 1] = low[i];
    g.high[i - 1] = high[i];
  }
  for (int i = 0; i < parts->count; i++) {
    lead_group *const old = &parts->groups[i];
    if (old->following != g.following || memcmp(old->low, g.low, sizeof g.low) != 0 ||
        memcmp(old->high, g.high, sizeof g.high) != 0)
      continue;
    set_range(&old->leads, low[0], high[0]);
    return;
  }
  if (parts->count == (int)(sizeof parts->groups / sizeof *parts->groups)) {
    parts->full = true;
    return;
  }
  set_range(&g.leads, low[0], high[0]);
  parts->groups[parts->count++] = g;
}

static int encode(uint8_t *out, uint32_t code, int bytes) {
  static const uint8_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
  for (int i = bytes - 1; i > 0; i--) {
    out[i] = (uint8_t)(0x80 | (code & 0x3f));
    code >>= 6;
  }
  out[0] = (uint8_t)(lead[bytes] | code);
  return bytes;
}

/* Codes of one length in bytes, cut where their bytes are not independent ranges: at most one cut
   on each side for every byte. */
static void split_codes(class_parts *parts, uint32_t low, uint32_t high, int bytes) {
  uint8_t from[4], to[4];
  for (int i = 1; i < bytes; i++) {
    const uint32_t mask = (1u << (6 * i)) - 1;
    if ((low & ~mask) == (high & ~mask)) continue;
    if ((low & mask) != 0) {
      split_codes(parts, low, low | mask, bytes);
      split_codes(parts, (low | mask) + 1, high, bytes);
      return;
    }
    if ((high & mask) != mask) {
      split_codes(parts, low, (high & ~mask) - 1, bytes);
      split_codes(parts, high & ~mask, high, bytes);
      return;
    }
  }
  (void)encode(from, low, bytes);
  (void)encode(to, high, bytes);
  add_sequence(parts, from, to, bytes);
}

static int32_t build_class(builder *b, const pkv_code_range *ranges, int32_t count, int32_t next) {
  static const uint32_t last[] = {0, 0x7f, 0x7ff, 0xffff, PKV_LAST_CODE};
  class_parts parts;
  parts.count = 0;
  parts.full = false;
  for (int32_t i = 0; i < count; i++) {
    for (int bytes = 1; bytes <= 4; bytes++) {
      const uint32_t first = bytes == 1 ? 0 : last[bytes - 1] + 1;
      const uint32_t low = ranges[i].low > first ? ranges[i].low : first;
      const uint32_t high = ranges[i].high < last[bytes] ? ranges[i].high : last[bytes];
      if (low <= high) split_codes(&parts, low, high, bytes);
    }
  }
  if (parts.full) return stop(b, PKV_E_LIMIT, "a character class has too many parts");
  int32_t node = -1;
  for (int i = parts.count; i-- > 0;) {
    const lead_group *const g = &parts.groups[i];
    int32_t way = next;
    for (int k = g->following; k-- > 0;)
      way = emit_range(b, (int)g->low[k], (int)g->high[k], way);
    way = emit(b, PKV_NODE_SET, add_set(b, &g->leads), way);
    node = node < 0 ? way : emit(b, PKV_NODE_SPLIT, node, way);
  }
  return node;
}

/* --- words --------------------------------------------------------------------------------- */

static int32_t build_text(builder *b, const char *bytes, int32_t count, int32_t next) {
  for (int32_t i = count; i-- > 0;)
    next = emit(b, PKV_NODE_BYTE, (unsigned char)bytes[i], next);
  return next;
}

static int compare_words(const void *left, const void *right) {
  const word *const a = left, *const b = right;
  const int32_t least = a->count < b->count ? a->count : b->count;
  const int order = memcmp(a->bytes, b->bytes, (size_t)least);
  return order != 0 ? order : a->count - b->count;
}

/* Sorted words, all equal up to `from`. */
static int32_t build_words(builder *b, const word *w, int32_t count, int32_t from, int32_t next) {
  int32_t same = from, node = -1, i = 0;
  while (same < w[0].count && same < w[count - 1].count &&
         w[0].bytes[same] == w[count - 1].bytes[same])
    same++;                            /* of the first and the last, so of all: they are sorted */
  if (w[0].count == same) node = next; /* a word ends here */
  while (i < count && w[i].count == same)
    i++; /* the same word again */
  while (i < count && b->status == PKV_OK) {
    int32_t end = i + 1;
    while (end < count && w[end].bytes[same] == w[i].bytes[same])
      end++;
    const int32_t way = end - i == 1 ? build_text(b, w[i].bytes + same, w[i].count - same, next)
                                     : build_words(b, w + i, end - i, same, next);
    node = node < 0 ? way : emit(b, PKV_NODE_SPLIT, node, way);
    i = end;
  }
  return build_text(b, w[0].bytes + from, same - from, node);
}

/* --- alternatives and repetitions ---------------------------------------------------------- */

static int32_t build_either(builder *b, int32_t node, int32_t next) {
  const pkv_syntax *const t = b->tree;
  int32_t way = -1, words = 0, at = node;
  for (;; at = t->nodes[at].a) {
    const int32_t right = t->nodes[at].kind == PKV_SYNTAX_EITHER ? t->nodes[at].b : at;
    words += t->nodes[right].kind == PKV_SYNTAX_TEXT;
    if (t->nodes[at].kind != PKV_SYNTAX_EITHER) break;
  }
  word *list = NULL;
  const size_t bytes = (size_t)words * sizeof *list;
  if (words >= FEW_WORDS) {
    list = pkv_alloc(&b->program->allocator, bytes);
    if (list == NULL) return stop(b, PKV_E_NOMEM, "no memory for a grammar");
  }
  int32_t held = 0;
  for (at = node; b->status == PKV_OK; at = t->nodes[at].a) {
    const bool last = t->nodes[at].kind != PKV_SYNTAX_EITHER;
    const int32_t right = last ? at : t->nodes[at].b;
    const pkv_syntax_node n = t->nodes[right];
    if (list != NULL && n.kind == PKV_SYNTAX_TEXT) {
      list[held++] = (word){t->bytes + n.a, n.b};
    } else {
      const int32_t one = build(b, right, next);
      way = way < 0 ? one : emit(b, PKV_NODE_SPLIT, one, way);
    }
    if (last) break;
  }
  if (list != NULL && b->status == PKV_OK) {
    qsort(list, (size_t)held, sizeof *list, compare_words);
    const int32_t one = build_words(b, list, held, 0, next);
    way = way < 0 ? one : emit(b, PKV_NODE_SPLIT, one, way);
  }
  pkv_free(&b->program->allocator, list, bytes);
  return way;
}

/* One node in the program wherever it stands. */
static bool is_small(const pkv_syntax *t, int32_t node) {
  const pkv_syntax_node n = t->nodes[node];
  if (n.kind == PKV_SYNTAX_TEXT) return n.b == 1;
  if (n.kind == PKV_SYNTAX_CLASS) return t->ranges[n.a + n.b - 1].high < 0x80;
  return n.kind == PKV_SYNTAX_RULE || n.kind == PKV_SYNTAX_EMPTY || n.kind == PKV_SYNTAX_NONE;
}

/* An item that is repeated: itself where it is one node, else a call. */
static int32_t build_item(builder *b, int32_t node, int32_t next) {
  if (is_small(b->tree, node)) return build(b, node, next);
  if (b->item_of[node] < 0) {
    b->item_of[node] = emit(b, PKV_NODE_SPLIT, -1, -1); /* leads to it once it is built */
    b->items[b->item_count++] = node;
  }
  return emit(b, PKV_NODE_CALL, b->item_of[node], next);
}

static int32_t build_repeat(builder *b, const pkv_syntax_node *n, int32_t next) {
  int32_t way = next;
  const bool once = n->b + (n->c < 0 ? 1 : n->c - n->b) <= 1;
  if (n->c < 0) {
    way = emit(b, PKV_NODE_SPLIT, next, -1);
    const int32_t item = once ? build(b, n->a, way) : build_item(b, n->a, way);
    if (b->status == PKV_OK) b->program->nodes[way].next = item;
  }
  for (int32_t i = n->b; i < n->c && b->status == PKV_OK; i++)
    way = emit(b, PKV_NODE_SPLIT, next, once ? build(b, n->a, way) : build_item(b, n->a, way));
  for (int32_t i = 0; i < n->b && b->status == PKV_OK; i++)
    way = once ? build(b, n->a, way) : build_item(b, n->a, way);
  return way;
}

static int32_t build(builder *b, int32_t node, int32_t next) {
  const pkv_syntax *const t = b->tree;
  if (++b->depth > 2048) return stop(b, PKV_E_LIMIT, "the grammar nests too deep");
  while (b->status == PKV_OK && t->nodes[node].kind == PKV_SYNTAX_JOIN) {
    next = build(b, t->nodes[node].b, next);
    node = t->nodes[node].a;
  }
  const pkv_syntax_node *const n = &t->nodes[node];
  int32_t at = next;
  if (b->status != PKV_OK) return 0;
  switch (n->kind) {
  case PKV_SYNTAX_EMPTY:
  case PKV_SYNTAX_JOIN:
    break;
  case PKV_SYNTAX_NONE:
    at = emit(b, PKV_NODE_DEAD, 0, 0);
    break;
  case PKV_SYNTAX_TEXT:
    at = build_text(b, t->bytes + n->a, n->b, next);
    break;
  case PKV_SYNTAX_CLASS:
    at = build_class(b, t->ranges + n->a, n->b, next);
    break;
  case PKV_SYNTAX_EITHER:
    at = build_either(b, node, next);
    break;
  case PKV_SYNTAX_REPEAT:
    at = build_repeat(b, n, next);
    break;
  case PKV_SYNTAX_RULE:
    at = emit(b, PKV_NODE_CALL, b->starts[n->a], next);
    break;
  }
  b->depth--;
  return at;
}

/* A rule's first node hangs behind the node that stands for it. */
static void build_rule(builder *b, int32_t node, int32_t stand) {
  const int32_t first = build(b, node, emit(b, PKV_NODE_RET, 0, 0));
  if (b->status != PKV_OK) return;
  b->program->nodes[stand].arg = b->program->nodes[stand].next = first;
}

static pkv_status build_all(builder *b) {
  const pkv_syntax *const t = b->tree;
  for (size_t i = 0; i < t->rule_count; i++)
    b->starts[i] = emit(b, PKV_NODE_SPLIT, -1, -1);
  for (size_t i = 0; i < t->node_count; i++)
    b->item_of[i] = -1;
  for (size_t i = 0; i < SET_SLOTS; i++)
    b->sets[i].set = -1;
  for (size_t i = 0; i < t->rule_count && b->status == PKV_OK; i++)
    build_rule(b, t->rules[i].node, b->starts[i]);
  for (int32_t i = 0; i < b->item_count && b->status == PKV_OK; i++) /* items may add items */
    build_rule(b, b->items[i], b->item_of[b->items[i]]);
  b->program->start = b->starts[t->root];
  return b->status;
}

/* Cuts every class that the set divides. */
static void divide(uint8_t *of, int *count, const pkv_byte_set *set) {
  int moved[256];
  bool outside[256] = {false};
  for (int i = 0; i < 256; i++) {
    moved[i] = -1;
    if (!pkv_set_has(set, i)) outside[of[i]] = true;
  }
  for (int i = 0; i < 256; i++) {
    const uint8_t old = of[i];
    if (!pkv_set_has(set, i) || !outside[old]) continue;
    if (moved[old] < 0) moved[old] = (*count)++;
    of[i] = (uint8_t)moved[old];
  }
}

/* Bytes that belong to the same sets everywhere, single ones included. */
static void find_classes(pkv_program *p) {
  pkv_byte_set singles = {{0}};
  int count = 1;
  for (size_t s = 0; s < p->set_count; s++)
    divide(p->class_of, &count, &p->sets[s]);
  for (size_t i = 0; i < p->node_count; i++)
    if (p->nodes[i].kind == PKV_NODE_BYTE) set_range(&singles, p->nodes[i].arg, p->nodes[i].arg);
  for (int i = 0; i < 256; i++) {
    pkv_byte_set single = {{0}};
    if (!pkv_set_has(&singles, i)) continue;
    set_range(&single, i, i);
    divide(p->class_of, &count, &single);
  }
  p->class_count = count;
  for (int i = 255; i >= 0; i--)
    p->example[p->class_of[i]] = (uint8_t)i;
}

pkv_status pkv_program_create(pkv_program *out, const pkv_syntax *tree,
                              const pkv_allocator *allocator, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  memset(out, 0, sizeof *out);
  out->allocator = a;
  PKV_CHECK(err, tree->status == PKV_OK, tree->status, "%s", tree->error.text);
  builder b = {.program = out, .tree = tree, .status = PKV_OK, .err = err};
  const size_t rules = tree->rule_count * sizeof(int32_t);
  const size_t nodes = tree->node_count * sizeof(int32_t);
  b.starts = pkv_alloc(&a, rules);
  b.item_of = pkv_alloc(&a, nodes);
  b.items = pkv_alloc(&a, nodes);
  b.sets = pkv_alloc(&a, SET_SLOTS * sizeof *b.sets);
  if (b.starts == NULL || b.item_of == NULL || b.items == NULL || b.sets == NULL)
    (void)stop(&b, PKV_E_NOMEM, "no memory for a grammar");
  if (b.status == PKV_OK) (void)build_all(&b);
  if (b.status == PKV_OK) find_classes(out);
  if (b.status == PKV_OK) b.status = pkv_program_check(out, err);
  pkv_free(&a, b.starts, rules);
  pkv_free(&a, b.item_of, nodes);
  pkv_free(&a, b.items, nodes);
  pkv_free(&a, b.sets, SET_SLOTS * sizeof *b.sets);
  if (b.status != PKV_OK) pkv_program_deinit(out);
  return b.status;
}

void pkv_program_deinit(pkv_program *program) {
  pkv_program *const p = program;
  pkv_free(&p->allocator, p->nodes, p->node_capacity * sizeof *p->nodes);
  pkv_free(&p->allocator, p->sets, p->set_capacity * sizeof *p->sets);
  p->nodes = NULL;
  p->sets = NULL;
  p->node_count = p->node_capacity = p->set_count = p->set_capacity = 0;
}
