/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/program_check.h"

#include <string.h>

#include "base/status.h"

typedef struct checker {
  pkv_program *p;
  size_t count;
  int32_t *first, *users; /* of each node: who leads to it, users[first[i]] .. */
  int32_t *head, *link;   /* nodes that wait, by value */
  uint16_t *empty;        /* as need, of what comes to RET without a byte */
  uint8_t *mark;
  int32_t *order;
  int64_t *length;
} checker;

static bool is_byte(const pkv_program_node *n) {
  return n->kind == PKV_NODE_BYTE || n->kind == PKV_NODE_SET;
}

static int leads(const pkv_program_node *n, int32_t *to) {
  int count = 0;
  if (n->kind == PKV_NODE_RET || n->kind == PKV_NODE_DEAD) return 0;
  to[count++] = n->next;
  if (n->kind == PKV_NODE_SPLIT || n->kind == PKV_NODE_CALL) to[count++] = n->arg;
  return count;
}

static void find_users(checker *c) {
  const pkv_program *const p = c->p;
  int32_t to[2];
  memset(c->first, 0, (c->count + 1) * sizeof *c->first);
  for (size_t i = 0; i < c->count; i++)
    for (int k = leads(&p->nodes[i], to); k-- > 0;)
      c->first[to[k] + 1]++;
  for (size_t i = 0; i < c->count; i++)
    c->first[i + 1] += c->first[i];
  for (size_t i = 0; i < c->count; i++)
    for (int k = leads(&p->nodes[i], to); k-- > 0;)
      c->users[c->first[to[k]]++] = (int32_t)i;
  for (size_t i = c->count; i > 0; i--)
    c->first[i] = c->first[i - 1];
  c->first[0] = 0;
}

/* --- how many calls it takes --------------------------------------------------------------- */

static void wait_at(checker *c, int32_t node, int32_t value) {
  if (value > PKV_PROGRAM_STACK || c->mark[node] != 0) return;
  c->mark[node] = 1;
  c->link[node] = c->head[value];
  c->head[value] = node;
}

/* Node `u` leads to one that is known now: perhaps it is known, too. */
static void hear(checker *c, const uint16_t *value, int32_t u, int32_t now, bool bytes) {
  const pkv_program_node *const n = &c->p->nodes[u];
  if (is_byte(n)) {
    if (bytes) wait_at(c, u, now);
  } else if (n->kind == PKV_NODE_SPLIT) {
    wait_at(c, u, now); /* values come in rising order: the first is the least */
  } else if (value[n->arg] != PKV_NEED_NEVER && value[n->next] != PKV_NEED_NEVER) {
    const bool last = c->p->nodes[n->next].kind == PKV_NODE_RET; /* puts nothing on the stack */
    const int32_t inside = value[n->arg] + !last, after = value[n->next];
    wait_at(c, u, inside > after ? inside : after);
  }
}

/* The least number of open calls to come to RET, from all nodes: each is known once its parts are,
   in rising order. `bytes`: or without passing any. */
static void find_need(checker *c, uint16_t *value, bool bytes) {
  memset(c->mark, 0, c->count);
  for (int32_t k = 0; k <= PKV_PROGRAM_STACK; k++)
    c->head[k] = -1;
  for (size_t i = 0; i < c->count; i++) {
    value[i] = PKV_NEED_NEVER;
    if (c->p->nodes[i].kind == PKV_NODE_RET) wait_at(c, (int32_t)i, 0);
  }
  for (int32_t k = 0; k <= PKV_PROGRAM_STACK; k++) {
    while (c->head[k] >= 0) {
      const int32_t node = c->head[k];
      c->head[k] = c->link[node];
      value[node] = (uint16_t)k;
      for (int32_t i = c->first[node]; i < c->first[node + 1]; i++)
        hear(c, value, c->users[i], k, bytes);
    }
  }
}

/* --- left recursion ------------------------------------------------------------------------ */

typedef struct rule_graph {
  int32_t *rule_of; /* by node: the rule that starts there, or -1 */
  int32_t *start;   /* by rule */
  int32_t *first;   /* by rule: its edges are edge[first[r]] .. edge[first[r + 1] - 1] */
  int32_t *edge;    /* rules that it calls before any byte */
  int32_t *at;      /* by rule: the next edge to look at; -1 = not come to yet */
  int32_t *stack;
  int32_t rules;
} rule_graph;

/* The calls that a rule comes to without a byte. The nodes of a rule belong to it alone, so that
   all rules together look at each node once. */
static int32_t find_edges(checker *c, const rule_graph *g, int32_t rule, int32_t count) {
  int32_t waiting = 0;
  g->stack[waiting++] = g->start[rule];
  c->mark[g->start[rule]] = 1;
  while (waiting > 0) {
    const pkv_program_node *const n = &c->p->nodes[g->stack[--waiting]];
    int32_t to[2];
    int ways = 0;
    if (n->kind == PKV_NODE_SPLIT) ways = leads(n, to);
    if (n->kind == PKV_NODE_CALL) {
      g->edge[count++] = g->rule_of[n->arg];
      if (c->empty[n->arg] != PKV_NEED_NEVER) to[ways++] = n->next;
    }
    while (ways-- > 0) {
      if (c->mark[to[ways]] != 0) continue;
      c->mark[to[ways]] = 1;
      g->stack[waiting++] = to[ways];
    }
  }
  return count;
}

static void add_rule(rule_graph *g, int32_t node) {
  if (g->rule_of[node] >= 0) return;
  g->start[g->rules] = node;
  g->rule_of[node] = g->rules++;
}

static void find_graph(checker *c, rule_graph *g) {
  int32_t edges = 0;
  memset(c->mark, 0, c->count);
  for (size_t i = 0; i < c->count; i++)
    g->rule_of[i] = -1;
  add_rule(g, c->p->start);
  for (size_t i = 0; i < c->count; i++)
    if (c->p->nodes[i].kind == PKV_NODE_CALL) add_rule(g, c->p->nodes[i].arg);
  for (int32_t r = 0; r < g->rules; r++) {
    g->first[r] = edges;
    g->at[r] = -1;
    edges = find_edges(c, g, r, edges);
  }
  g->first[g->rules] = edges;
}

/* Depth first: an edge to a rule that is still open closes a circle. */
static bool has_circle(const rule_graph *g) {
  for (int32_t r = 0; r < g->rules; r++) {
    int32_t depth = 0;
    if (g->at[r] >= 0) continue;
    g->stack[depth++] = r;
    g->at[r] = g->first[r];
    while (depth > 0) {
      const int32_t top = g->stack[depth - 1];
      if (g->at[top] == g->first[top + 1]) {
        g->at[top]++; /* past its edges: done */
        depth--;
        continue;
      }
      const int32_t to = g->edge[g->at[top]++];
      if (g->at[to] >= 0 && g->at[to] <= g->first[to + 1]) return true;
      if (g->at[to] >= 0) continue;
      g->at[to] = g->first[to];
      g->stack[depth++] = to;
    }
  }
  return false;
}

static pkv_status check_recursion(checker *c, pkv_error *err) {
  const pkv_allocator *const a = &c->p->allocator;
  const size_t bytes = (c->count + 2) * sizeof(int32_t);
  int32_t *block[6] = {NULL};
  pkv_status status = PKV_OK;
  for (size_t i = 0; i < 6; i++) {
    block[i] = pkv_alloc(a, bytes);
    if (block[i] == NULL) status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for a grammar");
  }
  if (status == PKV_OK) {
    rule_graph g = {block[0], block[1], block[2], block[3], block[4], block[5], 0};
    find_graph(c, &g);
    if (has_circle(&g))
      status = PKV_FAIL(err, PKV_E_INVALID,
                        "the grammar is left recursive: a rule comes to itself before any byte");
  }
  for (size_t i = 0; i < 6; i++)
    pkv_free(a, block[i], bytes);
  return status;
}

/* --- the longest text ---------------------------------------------------------------------- */

static int64_t length_of(const checker *c, const pkv_program_node *n) {
  const int64_t most = INT64_MAX / 4;
  const int64_t next = c->length[n->next];
  if (is_byte(n)) return next < 0 ? -1 : next + 1;
  const int64_t other = c->length[n->arg];
  if (n->kind == PKV_NODE_SPLIT) return next > other ? next : other;
  if (next < 0 || other < 0) return -1;
  return next + other < most ? next + other : most;
}

/* Nodes are known once all they lead to are; what leads into a circle never is: no longest text.
   length: -1 where no text comes to RET. */
static void find_longest(checker *c) {
  int32_t to[2];
  size_t known = 0, done = 0;
  uint8_t *const left = c->mark;
  for (size_t i = 0; i < c->count; i++) {
    const pkv_program_node *const n = &c->p->nodes[i];
    left[i] = (uint8_t)(n->need == PKV_NEED_NEVER ? 0 : leads(n, to));
    c->length[i] = n->need == PKV_NEED_NEVER ? -1 : 0;
    if (left[i] == 0) c->order[known++] = (int32_t)i;
  }
  while (done < known) {
    const int32_t node = c->order[done++];
    for (int32_t i = c->first[node]; i < c->first[node + 1]; i++) {
      const int32_t u = c->users[i];
      if (left[u] == 0 || --left[u] > 0) continue;
      c->length[u] = length_of(c, &c->p->nodes[u]);
      c->order[known++] = u;
    }
  }
  c->p->longest = left[c->p->start] == 0 ? c->length[c->p->start] : -1;
}

static pkv_status check(checker *c, pkv_error *err) {
  find_users(c);
  find_need(c, c->empty, false);
  PKV_TRY(check_recursion(c, err));
  find_need(c, c->empty, true);
  for (size_t i = 0; i < c->count; i++)
    c->p->nodes[i].need = c->empty[i];
  PKV_CHECK(err, c->p->nodes[c->p->start].need != PKV_NEED_NEVER, PKV_E_INVALID,
            "no text satisfies this");
  find_longest(c);
  return PKV_OK;
}

pkv_status pkv_program_check(pkv_program *program, pkv_error *err) {
  const pkv_allocator *const a = &program->allocator;
  const size_t n = program->node_count;
  const size_t heads = (PKV_PROGRAM_STACK + 1) * sizeof(int32_t);
  checker c = {.p = program, .count = n};
  c.first = pkv_alloc(a, (n + 1) * sizeof *c.first);
  c.users = pkv_alloc(a, 2 * n * sizeof *c.users);
  c.head = pkv_alloc(a, heads);
  c.link = pkv_alloc(a, n * sizeof *c.link);
  c.empty = pkv_alloc(a, n * sizeof *c.empty);
  c.mark = pkv_alloc(a, n);
  c.order = pkv_alloc(a, n * sizeof *c.order);
  c.length = pkv_alloc(a, n * sizeof *c.length);
  const bool there = c.first != NULL && c.users != NULL && c.head != NULL && c.link != NULL &&
                     c.empty != NULL && c.mark != NULL && c.order != NULL && c.length != NULL;
  const pkv_status status =
      there ? check(&c, err) : PKV_FAIL(err, PKV_E_NOMEM, "no memory for a grammar");
  pkv_free(a, c.first, (n + 1) * sizeof *c.first);
  pkv_free(a, c.users, 2 * n * sizeof *c.users);
  pkv_free(a, c.head, heads);
  pkv_free(a, c.link, n * sizeof *c.link);
  pkv_free(a, c.empty, n * sizeof *c.empty);
  pkv_free(a, c.mark, n);
  pkv_free(a, c.order, n * sizeof *c.order);
  pkv_free(a, c.length, n * sizeof *c.length);
  return status;
}
