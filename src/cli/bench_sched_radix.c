/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_radix.h"

#include <string.h>

#include "cli/bench_sched_memory.h"

#define NODES (2 * SCHED_CELL_BATCH + 4) /* leaves, places where two part, the root */
#define TABLE 1024
#define NONE  -1

typedef struct radix_node {
  int32_t prompt, from, to; /* its edge: these units of that prompt */
  int32_t parent, child, sibling;
  int32_t rows;   /* of the batch, below it */
  int32_t weight; /* waiting requests below it, of this pass */
  int32_t head;   /* that end in it, the youngest first */
} radix_node;

struct sched_radix {
  const sched_prompts *prompts;
  size_t unit; /* bytes of a token or a digest */
  int32_t units;
  radix_node nodes[NODES];
  int32_t free;
  int32_t table[TABLE];                       /* (parent, first unit) -> node */
  int32_t *older, *younger, oldest, youngest; /* waiting prompts by age */
  int32_t *next, *order;                      /* [requests] */
  int32_t count, at;
};

/* ---- units ---- */

static const unsigned char *unit_at(const sched_radix *r, int32_t prompt, int32_t at) {
  return (const unsigned char *)r->prompts->data +
         ((size_t)prompt * (size_t)r->units + (size_t)at) * r->unit;
}

static uint64_t value_at(const sched_radix *r, int32_t prompt, int32_t at) {
  uint64_t value = 0;
  memcpy(&value, unit_at(r, prompt, at), r->unit);
  return value;
}

/* Equal units of an edge and of a prompt from the edge's beginning on. */
static int32_t equal_units(const sched_radix *r, const radix_node *n, int32_t prompt) {
  enum { BLOCK = 256 };
  int32_t at = n->from;
  while (at < n->to) {
    const int32_t count = n->to - at < BLOCK ? n->to - at : BLOCK;
    if (memcmp(unit_at(r, n->prompt, at), unit_at(r, prompt, at), (size_t)count * r->unit) != 0)
      break;
    at += count;
  }
  while (at < n->to && value_at(r, n->prompt, at) == value_at(r, prompt, at))
    at++;
  return at - n->from;
}

/* ---- children ---- */

static size_t place(const sched_radix *r, int32_t parent, uint64_t first) {
  size_t at = (size_t)((first * UINT64_C(0x9e3779b97f4a7c15) +
                        (uint64_t)parent * UINT64_C(0xbf58476d1ce4e5b9)) >>
                       40) %
              TABLE;
  for (; r->table[at] != NONE; at = (at + 1) % TABLE) {
    const radix_node *n = &r->nodes[r->table[at]];
    if (n->parent == parent && value_at(r, n->prompt, n->from) == first) break;
  }
  return at;
}

static int32_t find_child(const sched_radix *r, int32_t parent, uint64_t first) {
  return r->table[place(r, parent, first)];
}

static void add_child(sched_radix *r, int32_t parent, int32_t x) {
  radix_node *n = &r->nodes[x];
  n->parent = parent;
  n->sibling = r->nodes[parent].child;
  r->nodes[parent].child = x;
  r->table[place(r, parent, value_at(r, n->prompt, n->from))] = x;
}

static void remove_child(sched_radix *r, int32_t x) {
  const radix_node n = r->nodes[x];
  int32_t *link = &r->nodes[n.parent].child;
  while (*link != x)
    link = &r->nodes[*link].sibling;
  *link = n.sibling;
  size_t at = place(r, n.parent, value_at(r, n.prompt, n.from));
  r->table[at] = NONE;
  for (at = (at + 1) % TABLE; r->table[at] != NONE; at = (at + 1) % TABLE) { /* close the gap */
    const int32_t moved = r->table[at];
    const radix_node *m = &r->nodes[moved];
    r->table[at] = NONE;
    r->table[place(r, m->parent, value_at(r, m->prompt, m->from))] = moved;
  }
}

static int32_t take_node(sched_radix *r, int32_t prompt, int32_t from, int32_t to) {
  const int32_t x = r->free;
  r->free = r->nodes[x].sibling;
  r->nodes[x] = (radix_node){prompt, from, to, NONE, NONE, NONE, 0, 0, NONE};
  return x;
}

/* ---- the tree ---- */

/* The last node whose edge the prompt begins, and how many units match; *part of its edge. */
static int32_t match(const sched_radix *r, int32_t prompt, int32_t *units, int32_t *part) {
  int32_t x = 0, at = 0;
  *part = 0;
  while (at < r->units) {
    const int32_t child = find_child(r, x, value_at(r, prompt, at));
    if (child == NONE) break;
    const radix_node *n = &r->nodes[child];
    *part = equal_units(r, n, prompt);
    at += *part;
    x = child;
    if (*part < n->to - n->from) break;
  }
  *units = at;
  return x;
}

int32_t sched_radix_match(const sched_radix *radix, int32_t prompt) {
  int32_t units, part;
  (void)match(radix, prompt, &units, &part);
  return units;
}

/* Cuts x's edge after `part` units; the new node above the cut. */
static int32_t split(sched_radix *r, int32_t x, int32_t part) {
  radix_node *n = &r->nodes[x];
  const int32_t parent = n->parent;
  remove_child(r, x);
  const int32_t upper = take_node(r, n->prompt, n->from, n->from + part);
  r->nodes[upper].rows = n->rows;
  n->from += part;
  add_child(r, parent, upper);
  add_child(r, upper, x);
  return upper;
}

void sched_radix_admit(sched_radix *radix, int32_t prompt) {
  sched_radix *r = radix;
  int32_t units, part;
  const int32_t older = r->older[prompt], younger = r->younger[prompt];
  *(older == NONE ? &r->oldest : &r->younger[older]) = younger;
  *(younger == NONE ? &r->youngest : &r->older[younger]) = older;
  int32_t x = match(r, prompt, &units, &part);
  if (x != 0 && part < r->nodes[x].to - r->nodes[x].from) x = split(r, x, part);
  if (units < r->units) {
    const int32_t leaf = take_node(r, prompt, units, r->units);
    add_child(r, x, leaf);
    x = leaf;
  }
  for (; x != NONE; x = r->nodes[x].parent)
    r->nodes[x].rows++;
}

static void give_node(sched_radix *r, int32_t x) {
  r->nodes[x].sibling = r->free;
  r->free = x;
}

/* A node where no row ends and nothing parts any more becomes one edge with what is below. */
static void join(sched_radix *r, int32_t x) {
  const radix_node n = r->nodes[x];
  const int32_t c = n.child;
  if (x == 0 || c == NONE || r->nodes[c].sibling != NONE || r->nodes[c].rows < n.rows) return;
  remove_child(r, c);
  remove_child(r, x);
  r->nodes[c].from = n.from;
  add_child(r, n.parent, c);
  give_node(r, x);
}

void sched_radix_finish(sched_radix *radix, int32_t prompt) {
  sched_radix *r = radix;
  int32_t units, part, last = NONE;
  for (int32_t x = match(r, prompt, &units, &part); x != NONE;) {
    const int32_t parent = r->nodes[x].parent;
    if (--r->nodes[x].rows == 0 && x != 0) {
      remove_child(r, x);
      give_node(r, x);
    } else if (last == NONE) {
      last = x;
    }
    x = parent;
  }
  join(r, last);
}

/* ---- the queue ---- */

void sched_radix_insert(sched_radix *radix, int32_t prompt) {
  sched_radix *r = radix;
  r->older[prompt] = r->youngest;
  r->younger[prompt] = NONE;
  *(r->youngest == NONE ? &r->oldest : &r->younger[r->youngest]) = prompt;
  r->youngest = prompt;
}

static void clear(sched_radix *r, int32_t x) {
  r->nodes[x].weight = 0;
  r->nodes[x].head = NONE;
  for (int32_t c = r->nodes[x].child; c != NONE; c = r->nodes[c].sibling)
    clear(r, c);
}

static int32_t weigh(sched_radix *r, int32_t x) {
  for (int32_t c = r->nodes[x].child; c != NONE; c = r->nodes[c].sibling)
    r->nodes[x].weight += weigh(r, c);
  return r->nodes[x].weight;
}

/* Children before their node, the heaviest first. */
static void depth_first(sched_radix *r, int32_t x) {
  int32_t children[NODES], count = 0;
  for (int32_t c = r->nodes[x].child; c != NONE; c = r->nodes[c].sibling) {
    int32_t at = count++;
    for (; at > 0 && r->nodes[children[at - 1]].weight < r->nodes[c].weight; at--)
      children[at] = children[at - 1];
    children[at] = c;
  }
  for (int32_t i = 0; i < count; i++)
    depth_first(r, children[i]);
  for (int32_t p = r->nodes[x].head; p != NONE; p = r->next[p])
    r->order[r->count++] = p;
}

int32_t sched_radix_pass(sched_radix *radix) {
  sched_radix *r = radix;
  int32_t units, part;
  clear(r, 0);
  for (int32_t p = r->youngest; p != NONE; p = r->older[p]) { /* so that the oldest comes first */
    radix_node *n = &r->nodes[match(r, p, &units, &part)];
    r->next[p] = n->head;
    n->head = p;
    n->weight++;
  }
  (void)weigh(r, 0);
  r->count = r->at = 0;
  depth_first(r, 0);
  return sched_radix_next(r);
}

int32_t sched_radix_next(sched_radix *radix) {
  return radix->at < radix->count ? radix->order[radix->at++] : NONE;
}

pkv_status sched_radix_create(sched_radix **out, const sched_prompts *prompts, pkv_error *err) {
  sched_radix *r = sched_alloc(1, sizeof *r);
  *out = r;
  PKV_CHECK(err, r, PKV_E_NOMEM, "no memory for a radix tree");
  const size_t count = (size_t)prompts->requests;
  r->prompts = prompts;
  r->unit = prompts->hashed ? sizeof(uint64_t) : sizeof(int32_t);
  r->units = prompts->hashed ? prompts->hashes : prompts->tokens;
  r->oldest = r->youngest = NONE;
  r->older = sched_alloc(count, sizeof *r->older);
  r->younger = sched_alloc(count, sizeof *r->younger);
  r->next = sched_alloc(count, sizeof *r->next);
  r->order = sched_alloc(count, sizeof *r->order);
  if (!r->older || !r->younger || !r->next || !r->order) {
    sched_radix_destroy(r);
    *out = NULL;
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory for a radix tree of %zu requests", count);
  }
  for (int32_t i = 0; i < TABLE; i++)
    r->table[i] = NONE;
  for (int32_t x = 0; x < NODES; x++)
    r->nodes[x].sibling = x + 1;
  r->free = 0;
  (void)take_node(r, 0, 0, 0); /* the root */
  return PKV_OK;
}

void sched_radix_destroy(sched_radix *radix) {
  if (radix == NULL) return;
  const size_t count = (size_t)radix->prompts->requests;
  sched_free(radix->older, count, sizeof *radix->older);
  sched_free(radix->younger, count, sizeof *radix->younger);
  sched_free(radix->next, count, sizeof *radix->next);
  sched_free(radix->order, count, sizeof *radix->order);
  sched_free(radix, 1, sizeof *radix);
}
