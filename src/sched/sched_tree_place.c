/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where requests hang: finding the place of a prompt, splitting an edge, merging what is left over.
 *
 * A child is found by (node, hash of its first chunk after the node); a comparison of the prompts
 * themselves decides, and says at once how far the new prompt follows the child's. It is compared
 * with a request at the end of the child's heavy path: where the two part, the new one leaves that
 * path, so that a path costs one comparison and one hash, however many nodes it has. A prompt that
 * shares nothing costs one hash of one chunk; no prompt is hashed or read beyond the chunk in which
 * it parts from all others. Collisions cost time and never change the tree.
 */
#include "sched/sched_tree.h"

#include <string.h>

#include "base/hash.h"

#define NONE PKV_SCHED_NONE

/* ---- prompts ---- */

static int32_t unequal_from(const int32_t *a, const int32_t *b, int32_t from, int32_t to) {
  enum { LARGE = 512, SMALL = 16 };
  if (a == b) return to;
  while (to - from >= LARGE && memcmp(a + from, b + from, LARGE * sizeof *a) == 0)
    from += LARGE;
  while (to - from >= SMALL && memcmp(a + from, b + from, SMALL * sizeof *a) == 0)
    from += SMALL;
  while (from < to && a[from] == b[from])
    from++;
  return from;
}

/* Tokens that the first `level` hashes of a request cover. */
static int32_t covered_by(const pkv_sched *s, const pkv_sched_req *r, int32_t level) {
  const int64_t tokens = (int64_t)level * s->o.chunk_tokens;
  return tokens < r->hashed ? (int32_t)tokens : r->hashed;
}

/* Hashes are cumulative: equal at one level, equal before. They are equal up to `from`. */
static int32_t common_hashes(const pkv_sched *s, const pkv_sched_req *a, const pkv_sched_req *b,
                             int32_t from) {
  const uint64_t *x = a->data, *y = b->data;
  const int32_t la = pkv_sched_chunks(s, a->hashed), lb = pkv_sched_chunks(s, b->hashed);
  int32_t low = from / s->o.chunk_tokens, high = la < lb ? la : lb;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (x[middle - 1] == y[middle - 1])
      low = middle;
    else
      high = middle - 1;
  }
  /* A partial block is no whole one, whatever the hashes say. */
  if (low > 0 && covered_by(s, a, low) != covered_by(s, b, low)) low--;
  const int32_t tokens = covered_by(s, a, low);
  return tokens > from ? tokens : from;
}

/* How far two prompts are equal in whole chunks, from a depth (whole chunks) where they are. */
static int32_t common(const pkv_sched *s, uint32_t i, uint32_t j, int32_t from) {
  const pkv_sched_req *a = &s->reqs[i], *b = &s->reqs[j];
  if (a->by_hash != b->by_hash) return from;
  if (a->by_hash) return common_hashes(s, a, b, from);
  const int32_t end = a->hashed < b->hashed ? a->hashed : b->hashed;
  const int32_t n = unequal_from(a->data, b->data, from, end);
  return n == a->hashed && n == b->hashed ? n : n / s->o.chunk_tokens * s->o.chunk_tokens;
}

/* Of the chunk that starts at token `at`, which the request has. */
static uint64_t chunk_hash(const pkv_sched *s, uint32_t slot, int32_t at) {
  const pkv_sched_req *r = &s->reqs[slot];
  if (r->by_hash) return ((const uint64_t *)r->data)[at / s->o.chunk_tokens];
  const int32_t left = r->hashed - at;
  const size_t bytes =
      (size_t)(left < s->o.chunk_tokens ? left : s->o.chunk_tokens) * sizeof(int32_t);
  const int32_t *tokens = (const int32_t *)r->data + at;
  return s->o.hash_fn != NULL ? s->o.hash_fn(s->o.hash_ctx, tokens, bytes, s->o.seed)
                              : pkv_hash_bytes(tokens, bytes, s->o.seed);
}

/* ---- references ---- */

static uint64_t edge_key(uint32_t parent, uint64_t first) {
  return first + pkv_sched_mix((uint64_t)parent + 1);
}

static uint64_t *first_of(pkv_sched *s, uint32_t ref) {
  return ref & PKV_TREE_NODE ? &s->tree->nodes[ref & ~PKV_TREE_NODE].first : &s->reqs[ref].first;
}

static void set_parent(pkv_sched *s, uint32_t ref, uint32_t parent) {
  if (ref & PKV_TREE_NODE)
    s->tree->nodes[ref & ~PKV_TREE_NODE].parent = parent;
  else
    s->reqs[ref].node = parent;
}

/* Some request below: at the end of the heavy path there is one, as no child node hangs there. */
static uint32_t some_request(const pkv_tree *t, uint32_t ref) {
  if (!(ref & PKV_TREE_NODE)) return ref;
  const uint32_t end = pkv_tree_path_end(t, pkv_tree_path_of(t, ref & ~PKV_TREE_NODE));
  PKV_ASSERT(t->nodes[end].reqs != NONE || t->nodes[end].side != NONE);
  return t->nodes[end].reqs != NONE ? t->nodes[end].reqs : t->nodes[end].side;
}

/* ---- items of a node ---- */

void pkv_tree_attach(pkv_sched *s, uint32_t node, uint32_t slot) {
  pkv_tree_node *n = &s->tree->nodes[node];
  pkv_sched_cell *c = &s->cells[slot];
  s->reqs[slot].node = node;
  switch ((pkv_sched_place)s->reqs[slot].place) {
  case PKV_SCHED_IS_WAITING:
    pkv_sched_heap_insert(s->cells, &n->reqs, slot);
    n->waiting++;
    break;
  case PKV_SCHED_IS_HIDDEN:
    break;
  default:
    c->left = NONE;
    c->right = n->side;
    if (n->side != NONE) s->cells[n->side].left = slot;
    n->side = slot;
    n->active += s->reqs[slot].place == PKV_SCHED_IS_ACTIVE;
    break;
  }
}

void pkv_tree_detach(pkv_sched *s, uint32_t node, uint32_t slot) {
  pkv_tree_node *n = &s->tree->nodes[node];
  const pkv_sched_cell *c = &s->cells[slot];
  switch ((pkv_sched_place)s->reqs[slot].place) {
  case PKV_SCHED_IS_WAITING:
    pkv_sched_heap_remove(s->cells, &n->reqs, slot);
    n->waiting--;
    break;
  case PKV_SCHED_IS_HIDDEN:
    break;
  default:
    if (c->left != NONE)
      s->cells[c->left].right = c->right;
    else
      n->side = c->right;
    if (c->right != NONE) s->cells[c->right].left = c->left;
    n->active -= s->reqs[slot].place == PKV_SCHED_IS_ACTIVE;
    break;
  }
}

static uint32_t new_node(pkv_tree *t, int32_t depth, uint32_t parent) {
  uint32_t x = t->free_node;
  if (x != NONE)
    t->free_node = t->nodes[x].parent;
  else
    x = t->fresh_node++;
  PKV_ASSERT(x < t->node_capacity);
  t->node_count++;
  pkv_tree_node *n = &t->nodes[x];
  memset(n, 0, sizeof *n);
  n->depth = depth;
  n->parent = parent;
  n->heavy = n->reqs = n->side = n->paths_m = n->paths_b = n->paths_s = NONE;
  n->left = n->right = n->up = NONE;
  return x;
}

static void free_node(pkv_tree *t, uint32_t x) {
  t->nodes[x].parent = t->free_node;
  t->free_node = x;
  t->node_count--;
}

/* A request becomes an item of the node, by its next chunk if its prompt goes on. */
static void hang_at(pkv_sched *s, uint32_t node, uint32_t slot) {
  pkv_tree *t = s->tree;
  if (s->reqs[slot].hashed > t->nodes[node].depth) {
    const uint64_t first = chunk_hash(s, slot, t->nodes[node].depth);
    s->reqs[slot].first = first;
    pkv_sched_map_add(&t->children, edge_key(node, first), slot);
  }
  t->nodes[node].items++;
  pkv_tree_attach(s, node, slot);
}

/* Makes node z an item of v: its heavy child if it has none, a light one otherwise. */
static void adopt(pkv_tree *t, uint32_t v, uint32_t z) {
  if (t->nodes[v].heavy == NONE) {
    t->nodes[v].heavy = z;
    pkv_tree_path_put(t, pkv_tree_path_of(t, v), z, NONE);
  } else {
    pkv_tree_link(t, pkv_tree_path_new(t, z, v));
  }
}

/*
 * A new node at `depth` on the edge from v to its child y. `known` is a request below y. The new
 * node has y as its only item yet.
 */
static uint32_t split_edge(pkv_sched *s, uint32_t v, uint32_t y, int32_t depth, uint32_t known) {
  pkv_tree *t = s->tree;
  const uint32_t z = new_node(t, depth, v);
  const uint64_t first = *first_of(s, y);
  t->nodes[z].first = first;
  t->nodes[z].items = 1;
  pkv_sched_map_replace(&t->children, edge_key(v, first), y, z | PKV_TREE_NODE);
  if (s->reqs[known].hashed > depth) { /* else y is a request that ends at z */
    *first_of(s, y) = chunk_hash(s, known, depth);
    pkv_sched_map_add(&t->children, edge_key(z, *first_of(s, y)), y);
  }
  if (!(y & PKV_TREE_NODE)) {
    pkv_tree_detach(s, v, y); /* v is mended after z, as what hangs there will have changed */
    pkv_tree_attach(s, z, y);
    adopt(t, v, z);
    return z;
  }
  const uint32_t child = y & ~PKV_TREE_NODE;
  set_parent(s, y, z);
  t->nodes[z].heavy = child;
  if (t->nodes[v].heavy == child) t->nodes[v].heavy = z;
  pkv_tree_path_put(t, pkv_tree_path_of(t, child), z, child);
  return z;
}

/* ---- finding the place ---- */

/* The child of v that the request follows by one chunk at least, and how far it follows `known`, a
 * request below it. NONE = there is no such child. */
static uint32_t find_child(pkv_sched *s, uint32_t v, uint32_t slot, uint32_t *known,
                           int32_t *follows) {
  pkv_tree *t = s->tree;
  const int32_t depth = t->nodes[v].depth;
  const uint64_t first = chunk_hash(s, slot, depth), key = edge_key(v, first);
  for (uint32_t at = pkv_sched_map_first(&t->children, key); at != UINT32_MAX;
       at = pkv_sched_map_next(&t->children, key, at)) {
    const uint32_t y = t->children.entries[at].ref;
    const bool node = (y & PKV_TREE_NODE) != 0;
    const uint32_t parent = node ? t->nodes[y & ~PKV_TREE_NODE].parent : s->reqs[y].node;
    if (parent != v || *first_of(s, y) != first) continue;
    *known = some_request(t, y);
    *follows = common(s, slot, *known, depth);
    if (*follows > depth) return y;
    if (!s->reqs[slot].by_hash && !s->reqs[*known].by_hash) s->stats.collisions++;
  }
  return NONE;
}

uint32_t pkv_tree_hang(pkv_sched *s, uint32_t slot) {
  pkv_tree *t = s->tree;
  uint32_t v = PKV_TREE_ROOT, known = NONE;
  int32_t follows = 0;
  while (s->reqs[slot].hashed > t->nodes[v].depth) {
    const uint32_t y = find_child(s, v, slot, &known, &follows);
    if (y == NONE) break;
    const uint32_t child = y & ~PKV_TREE_NODE;
    if (!(y & PKV_TREE_NODE) || t->nodes[child].depth > follows) {
      v = split_edge(s, v, y, follows, known);
      break;
    }
    v = pkv_tree_deepest(t, pkv_tree_path_of(t, child), follows);
    const uint32_t next = t->nodes[v].heavy;
    /* Past v's depth on the way to the path's end: it parts on the edge to the next node. */
    if (next != NONE && follows > t->nodes[v].depth) {
      v = split_edge(s, v, next | PKV_TREE_NODE, follows, known);
      break;
    }
  }
  hang_at(s, v, slot);
  return v;
}

/* ---- leaving ---- */

/* The single request of node x goes to x's parent, and x goes. */
static uint32_t merge_request(pkv_sched *s, uint32_t x) {
  pkv_tree *t = s->tree;
  const pkv_tree_node n = t->nodes[x];
  const uint32_t u = n.parent, path = pkv_tree_path_of(t, x);
  const uint32_t y = n.reqs != NONE ? n.reqs : n.side;
  if (s->reqs[y].hashed > n.depth)
    pkv_sched_map_remove(&t->children, edge_key(x, s->reqs[y].first), y);
  pkv_sched_map_replace(&t->children, edge_key(u, n.first), x | PKV_TREE_NODE, y);
  s->reqs[y].first = n.first;
  pkv_tree_detach(s, x, y);
  if (t->paths[path].root == x && n.left == NONE) { /* alone on its path */
    pkv_tree_unlink(t, path);
    pkv_tree_path_free(t, path);
  } else {
    t->nodes[u].heavy = NONE; /* x was the end of u's path */
    const uint32_t from = pkv_tree_path_cut_out(t, x);
    PKV_ASSERT(from == u); /* in an AVL tree the last but one is next to the last */
    if (t->nodes[u].paths_s != NONE) {
      (void)pkv_tree_pull_up(t, from);
      pkv_tree_promote(t, u, t->nodes[u].paths_s);
    }
  }
  free_node(t, x);
  pkv_tree_attach(s, u, y);
  return u;
}

/* The single child node of x goes to x's parent, and x goes. What is to be pulled up from. */
static uint32_t merge_node(pkv_sched *s, uint32_t x) {
  pkv_tree *t = s->tree;
  if (t->nodes[x].heavy == NONE) pkv_tree_promote(t, x, t->nodes[x].paths_s);
  const pkv_tree_node n = t->nodes[x];
  const uint32_t u = n.parent, y = n.heavy;
  pkv_sched_map_remove(&t->children, edge_key(x, t->nodes[y].first), y | PKV_TREE_NODE);
  pkv_sched_map_replace(&t->children, edge_key(u, n.first), x | PKV_TREE_NODE, y | PKV_TREE_NODE);
  t->nodes[y].first = n.first;
  t->nodes[y].parent = u;
  if (t->nodes[u].heavy == x) t->nodes[u].heavy = y;
  const uint32_t from = pkv_tree_path_cut_out(t, x);
  free_node(t, x);
  return from;
}

uint32_t pkv_tree_unhang(pkv_sched *s, uint32_t slot) {
  pkv_tree *t = s->tree;
  const uint32_t x = s->reqs[slot].node;
  pkv_tree_detach(s, x, slot);
  if (s->reqs[slot].hashed > t->nodes[x].depth)
    pkv_sched_map_remove(&t->children, edge_key(x, s->reqs[slot].first), slot);
  t->nodes[x].items--;
  if (x == PKV_TREE_ROOT || t->nodes[x].items > 1) return x;
  return t->nodes[x].reqs != NONE || t->nodes[x].side != NONE ? merge_request(s, x)
                                                              : merge_node(s, x);
}
