/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Heavy paths as AVL trees by depth, with segments that compose.
 *
 * A segment is a run of nodes of a path. Into its lower end comes what the nodes below it know: the
 * smallest waiting key m', whether anything is covered there, and the best candidate b'. Out of its
 * upper end comes the same for the whole. If something below is covered, so are all nodes of the
 * segment, and the best of the whole is min(b', c1, m' - w * depth of the lowest node): that last
 * term is never better than what the node itself offers below, so it needs no place here but as
 * part of the lower segment. If nothing below is covered, the nodes down to depth q are (the
 * deepest whose light part is), and what comes from further down counts from q:
 * min(c0, m' - w * q). For an upper segment T over a lower one B:
 *
 *   m  = min(T.m, B.m)      c1 = min(T.c1, B.c1)
 *   B has active requests:  c0 = min(T.c1, B.c0)               q = B.q
 *   it has none:            c0 = min(T.c0, B.m - w * T.q)      q = T.q
 *
 * Nodes less deep than share_min offer nothing themselves. Counts add up, and slack composes as
 * min(T.slack + requests of B, B.slack).
 */
#include "sched/sched_tree.h"

#define NONE PKV_SCHED_NONE

/* ---- segments ---- */

typedef struct segment {
  pkv_sched_key m, c1, c0;
  int32_t q, active, waiting, slack;
} segment;

static inline void least(pkv_sched_key *a, const pkv_sched_key *b) {
  if (pkv_sched_before(b, a)) *a = *b;
}

/* k as a candidate of a covered node at this depth. */
static inline pkv_sched_key from_depth(const pkv_tree *t, const pkv_sched_key *k, int32_t depth) {
  pkv_sched_key c = *k;
  if (c.slot != NONE) c.key -= t->weight * depth;
  return c;
}

/* Half of the requests below the largest light child, rounded up. */
static int32_t half_largest(const pkv_tree *t, const pkv_tree_node *n) {
  return n->paths_s == NONE ? 0 : (int32_t)((1 - t->by_s[n->paths_s].k.key) / 2);
}

static segment own_segment(const pkv_tree *t, uint32_t x) {
  const pkv_tree_node *n = &t->nodes[x];
  segment g;
  g.m = pkv_sched_heap_top(t->cells, n->reqs);
  const pkv_sched_key light_m = pkv_sched_heap_top(t->by_m, n->paths_m);
  least(&g.m, &light_m);
  const pkv_sched_key light_b = pkv_sched_heap_top(t->by_b, n->paths_b);
  g.c1 = light_b;
  g.c0 = light_b;
  g.q = -1;
  if (n->depth >= t->share_min) {
    const pkv_sched_key c = from_depth(t, &g.m, n->depth);
    least(&g.c1, &c);
    if (n->active > 0 || (t->absolute && x == PKV_TREE_ROOT)) {
      g.c0 = g.c1;
      g.q = n->depth;
    }
  }
  g.active = n->active;
  g.waiting = n->waiting;
  g.slack = -half_largest(t, n);
  return g;
}

static inline segment segment_at(const pkv_tree_node *n) {
  return (segment){n->m, n->c1, n->c0, n->q, n->sum_active, n->sum_waiting, n->slack};
}

/* a becomes a over b. */
static inline void compose(const pkv_tree *t, segment *a, const segment *b) {
  if (b->active > 0) {
    a->c0 = a->c1;
    least(&a->c0, &b->c0);
    a->q = b->q;
  } else if (a->q >= 0) {
    const pkv_sched_key c = from_depth(t, &b->m, a->q);
    least(&a->c0, &c);
  }
  least(&a->m, &b->m);
  least(&a->c1, &b->c1);
  a->active += b->active;
  a->waiting += b->waiting;
  a->slack += b->active + b->waiting;
  if (b->slack < a->slack) a->slack = b->slack;
}

static int32_t height(const pkv_tree *t, uint32_t x) {
  return x == NONE ? 0 : (int32_t)t->nodes[x].height;
}

void pkv_tree_pull(pkv_tree *t, uint32_t x) {
  pkv_tree_node *n = &t->nodes[x];
  segment g = own_segment(t, x);
  t->pulls++;
  if (n->right != NONE) {
    const segment lower = segment_at(&t->nodes[n->right]);
    compose(t, &g, &lower);
  }
  if (n->left != NONE) {
    segment upper = segment_at(&t->nodes[n->left]);
    compose(t, &upper, &g);
    g = upper;
  }
  n->m = g.m;
  n->c1 = g.c1;
  n->c0 = g.c0;
  n->q = g.q;
  n->sum_active = g.active;
  n->sum_waiting = g.waiting;
  n->slack = g.slack;
  const int32_t hl = height(t, n->left), hr = height(t, n->right);
  n->height = (uint32_t)((hl > hr ? hl : hr) + 1) & 0xffu;
}

/* ---- AVL trees ---- */

typedef enum side { LEFT = 0, RIGHT = 1 } side;

static inline uint32_t child(const pkv_tree *t, uint32_t x, side at) {
  return at == LEFT ? t->nodes[x].left : t->nodes[x].right;
}

static inline side other(side at) {
  return at == LEFT ? RIGHT : LEFT;
}

static void set_child(pkv_tree *t, uint32_t x, side at, uint32_t c) {
  if (at == LEFT)
    t->nodes[x].left = c;
  else
    t->nodes[x].right = c;
  if (c != NONE) t->nodes[c].up = x;
}

/* Lifts x's child on that side over x, pulls both, and returns it; its `up` is the caller's. */
static uint32_t lift(pkv_tree *t, uint32_t x, side from) {
  const uint32_t c = child(t, x, from);
  set_child(t, x, from, child(t, c, other(from)));
  pkv_tree_pull(t, x);
  set_child(t, c, other(from), x);
  pkv_tree_pull(t, c);
  return c;
}

/* Pulls x and restores its balance; the root of what stands in its place. */
static uint32_t balance(pkv_tree *t, uint32_t x) {
  const int32_t lean = height(t, t->nodes[x].left) - height(t, t->nodes[x].right);
  if (lean >= -1 && lean <= 1) {
    pkv_tree_pull(t, x);
    return x;
  }
  const side tall = lean > 0 ? LEFT : RIGHT;
  const uint32_t c = child(t, x, tall);
  if (height(t, child(t, c, tall)) < height(t, child(t, c, other(tall))))
    set_child(t, x, tall, lift(t, c, other(tall)));
  return lift(t, x, tall);
}

/* Puts `now`, NONE = nothing, where x stood below `up`, a node or a path. */
static void put_below(pkv_tree *t, uint32_t up, uint32_t x, uint32_t now) {
  if (now != NONE) t->nodes[now].up = up;
  if (up & PKV_TREE_PATH)
    t->paths[up & ~PKV_TREE_PATH].root = now;
  else if (t->nodes[up].left == x)
    t->nodes[up].left = now;
  else
    t->nodes[up].right = now;
}

uint32_t pkv_tree_pull_up(pkv_tree *t, uint32_t x) {
  for (;;) {
    const uint32_t up = t->nodes[x].up, now = balance(t, x);
    if (now != x) put_below(t, up, x, now);
    if (up & PKV_TREE_PATH) return up & ~PKV_TREE_PATH;
    x = up;
  }
}

/* Down the inner spine of the taller of two trees, to where k and the lower one go in. */
static uint32_t graft(pkv_tree *t, uint32_t tall, side inner, uint32_t k, uint32_t low) {
  const int32_t most = height(t, low) + 1;
  uint32_t above = NONE, x = tall;
  t->nodes[tall].up = NONE;
  while (height(t, x) > most) {
    above = x;
    x = child(t, x, inner);
  }
  set_child(t, k, other(inner), x);
  set_child(t, k, inner, low);
  set_child(t, above, inner, k);
  return tall;
}

/* l, then k, then r as one tree; the root's `up` is NONE. */
static uint32_t join(pkv_tree *t, uint32_t l, uint32_t k, uint32_t r) {
  const int32_t lean = height(t, l) - height(t, r);
  uint32_t root = k;
  if (lean > 1) {
    root = graft(t, l, RIGHT, k, r);
  } else if (lean < -1) {
    root = graft(t, r, LEFT, k, l);
  } else {
    set_child(t, k, LEFT, l);
    set_child(t, k, RIGHT, r);
    t->nodes[k].up = NONE;
  }
  for (uint32_t x = k; x != NONE;) {
    const uint32_t up = t->nodes[x].up;
    const bool was_left = up != NONE && t->nodes[up].left == x;
    const uint32_t now = balance(t, x);
    t->nodes[now].up = up;
    if (up == NONE)
      root = now;
    else if (was_left)
      t->nodes[up].left = now;
    else
      t->nodes[up].right = now;
    x = up;
  }
  return root;
}

/* What comes before x and after x in its tree; x stands alone. */
static void split(pkv_tree *t, uint32_t x, uint32_t *before, uint32_t *after) {
  uint32_t from = x, up = t->nodes[x].up;
  *before = t->nodes[x].left;
  *after = t->nodes[x].right;
  if (*before != NONE) t->nodes[*before].up = NONE;
  if (*after != NONE) t->nodes[*after].up = NONE;
  while (!(up & PKV_TREE_PATH)) { /* NONE has that bit too */
    pkv_tree_node *n = &t->nodes[up];
    const uint32_t k = up, l = n->left, r = n->right;
    up = n->up;
    if (r == from)
      *before = join(t, l, k, *before);
    else
      *after = join(t, *after, k, r);
    from = k;
  }
  t->nodes[x].left = t->nodes[x].right = NONE;
}

static uint32_t rightmost(const pkv_tree *t, uint32_t x) {
  while (t->nodes[x].right != NONE)
    x = t->nodes[x].right;
  return x;
}

static uint32_t leftmost(const pkv_tree *t, uint32_t x) {
  while (t->nodes[x].left != NONE)
    x = t->nodes[x].left;
  return x;
}

static uint32_t concat(pkv_tree *t, uint32_t l, uint32_t r) {
  uint32_t rest, nothing;
  if (l == NONE || r == NONE) return l == NONE ? r : l;
  const uint32_t k = rightmost(t, l);
  t->nodes[l].up = NONE;
  split(t, k, &rest, &nothing);
  return join(t, rest, k, r);
}

static void set_root(pkv_tree *t, uint32_t path, uint32_t root) {
  t->paths[path].root = root;
  if (root != NONE) t->nodes[root].up = PKV_TREE_PATH | path;
}

/* ---- paths ---- */

uint32_t pkv_tree_path_new(pkv_tree *t, uint32_t x, uint32_t parent) {
  uint32_t p = t->free_path;
  if (p != NONE)
    t->free_path = t->paths[p].root;
  else
    p = t->fresh_path++;
  PKV_ASSERT(p < t->path_capacity);
  t->path_count++;
  t->paths[p] = (pkv_tree_path){NONE, parent, 0, 0};
  t->nodes[x].left = t->nodes[x].right = NONE;
  pkv_tree_pull(t, x);
  set_root(t, p, x);
  return p;
}

void pkv_tree_path_free(pkv_tree *t, uint32_t path) {
  t->paths[path].root = t->free_path;
  t->free_path = path;
  t->path_count--;
}

void pkv_tree_path_put(pkv_tree *t, uint32_t path, uint32_t x, uint32_t below) {
  const uint32_t before = below != NONE ? t->nodes[below].left : t->paths[path].root;
  t->nodes[x].left = t->nodes[x].right = NONE;
  if (before != NONE)
    set_child(t, rightmost(t, before), RIGHT, x);
  else if (below != NONE)
    set_child(t, below, LEFT, x);
  else
    set_root(t, path, x);
}

uint32_t pkv_tree_path_cut_out(pkv_tree *t, uint32_t x) {
  const uint32_t l = t->nodes[x].left, r = t->nodes[x].right, up = t->nodes[x].up;
  uint32_t in = l != NONE ? l : r, from = in;
  if (l == NONE && r == NONE) {
    from = up & PKV_TREE_PATH ? NONE : up;
  } else if (l != NONE && r != NONE) { /* the next node takes its place */
    in = from = leftmost(t, r);
    if (in != r) {
      from = t->nodes[in].up;
      set_child(t, from, LEFT, t->nodes[in].right);
      set_child(t, in, RIGHT, r);
    }
    set_child(t, in, LEFT, l);
  }
  put_below(t, up, x, in);
  return from;
}

uint32_t pkv_tree_path_cut(pkv_tree *t, uint32_t path, uint32_t x) {
  uint32_t before, after;
  split(t, x, &before, &after);
  set_root(t, path, join(t, before, x, NONE));
  return after;
}

void pkv_tree_path_append(pkv_tree *t, uint32_t path, uint32_t more) {
  set_root(t, path, concat(t, t->paths[path].root, more));
}

/* ---- looking ---- */

uint32_t pkv_tree_path_of(const pkv_tree *t, uint32_t x) {
  uint32_t up = t->nodes[x].up;
  while (!(up & PKV_TREE_PATH))
    up = t->nodes[up].up;
  return up & ~PKV_TREE_PATH;
}

uint32_t pkv_tree_path_top(const pkv_tree *t, uint32_t path) {
  return leftmost(t, t->paths[path].root);
}

uint32_t pkv_tree_path_end(const pkv_tree *t, uint32_t path) {
  return rightmost(t, t->paths[path].root);
}

uint32_t pkv_tree_deepest(const pkv_tree *t, uint32_t path, int32_t depth) {
  uint32_t found = NONE;
  for (uint32_t x = t->paths[path].root; x != NONE;) {
    if (t->nodes[x].depth <= depth) {
      found = x;
      x = t->nodes[x].right;
    } else {
      x = t->nodes[x].left;
    }
  }
  return found;
}

static int32_t size_of(const pkv_tree *t, uint32_t x) {
  return x == NONE ? 0 : t->nodes[x].sum_active + t->nodes[x].sum_waiting;
}

uint32_t pkv_tree_top_heavy(const pkv_tree *t, uint32_t path) {
  int32_t below = 0;
  for (uint32_t x = t->paths[path].root; x != NONE;) {
    const pkv_tree_node *n = &t->nodes[x];
    if (n->right != NONE && t->nodes[n->right].slack + below < 0) {
      x = n->right;
      continue;
    }
    below += size_of(t, n->right);
    if (below < half_largest(t, n)) return x;
    below += n->active + n->waiting;
    x = n->left;
  }
  return NONE;
}

static int32_t sum_active(const pkv_tree *t, uint32_t x) {
  return x == NONE ? 0 : t->nodes[x].sum_active;
}

uint32_t pkv_tree_first_covered(const pkv_tree *t, uint32_t path) {
  uint32_t x = t->paths[path].root;
  while (x != NONE && t->nodes[x].sum_active > 0) {
    if (sum_active(t, t->nodes[x].left) > 0)
      x = t->nodes[x].left;
    else if (t->nodes[x].active > 0)
      return x;
    else
      x = t->nodes[x].right;
  }
  return NONE;
}

static uint32_t last_covered(const pkv_tree *t, uint32_t x) {
  while (x != NONE && t->nodes[x].sum_active > 0) {
    if (sum_active(t, t->nodes[x].right) > 0)
      x = t->nodes[x].right;
    else if (t->nodes[x].active > 0)
      return x;
    else
      x = t->nodes[x].left;
  }
  return NONE;
}

pkv_tree_spot pkv_tree_look(const pkv_tree *t, uint32_t x) {
  const pkv_tree_node *n = &t->nodes[x];
  pkv_tree_spot spot = {0, n->active, n->waiting, last_covered(t, n->left)};
  if (n->right != NONE) {
    spot.active += t->nodes[n->right].sum_active;
    spot.waiting += t->nodes[n->right].sum_waiting;
  }
  uint32_t from = x, up = n->up;
  while (!(up & PKV_TREE_PATH)) {
    const pkv_tree_node *p = &t->nodes[up];
    if (p->left == from) { /* p and its right subtree are below x on the path */
      spot.active += p->active;
      spot.waiting += p->waiting;
      if (p->right != NONE) {
        spot.active += t->nodes[p->right].sum_active;
        spot.waiting += t->nodes[p->right].sum_waiting;
      }
    } else if (spot.above == NONE) {
      spot.above = p->active > 0 ? up : last_covered(t, p->left);
    }
    from = up;
    up = p->up;
  }
  spot.path = up & ~PKV_TREE_PATH;
  return spot;
}
