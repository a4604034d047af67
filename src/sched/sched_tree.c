/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefix tree as a whole: what the other parts ask of it, and how a change at one node reaches
 * the root.
 *
 * Heavy children. No light child may have more than twice the requests of its node's heavy child;
 * it has then at most two thirds of those below the node, and a path to the root has at most
 * log(n) / log(1.5) light edges. Whether a path keeps to that, the slack of its root segment says
 * at once, whichever side has grown or shrunk. Where it does not, the largest light child becomes
 * the heavy one, in O(log n); one operation mends MOST_SWITCHES of them at most and leaves the rest
 * to the next. A child must gain or lose a third of its requests before it is due again, so that
 * on average there are far fewer.
 */
#include "sched/sched_tree.h"

#include <string.h>

#define NONE          PKV_SCHED_NONE
#define MOST_SWITCHES 8

/* ---- paths that hang from a node ---- */

static pkv_sched_key best_of(const pkv_tree *t, uint32_t path) {
  return t->nodes[t->paths[path].root].c0;
}

static pkv_sched_key size_key(uint32_t path, const pkv_tree_path *p) {
  return (pkv_sched_key){-((int64_t)p->active + p->waiting), 0, path};
}

void pkv_tree_link(pkv_tree *t, uint32_t path) {
  pkv_tree_path *p = &t->paths[path];
  const pkv_tree_node *root = &t->nodes[p->root];
  pkv_tree_node *u = &t->nodes[p->parent];
  p->active = root->sum_active;
  p->waiting = root->sum_waiting;
  u->active += p->active;
  u->waiting += p->waiting;
  t->by_m[path].k = root->m;
  pkv_sched_heap_insert(t->by_m, &u->paths_m, path);
  t->by_s[path].k = size_key(path, p);
  pkv_sched_heap_insert(t->by_s, &u->paths_s, path);
  if (p->active == 0) return;
  t->by_b[path].k = root->c0;
  pkv_sched_heap_insert(t->by_b, &u->paths_b, path);
}

void pkv_tree_unlink(pkv_tree *t, uint32_t path) {
  const pkv_tree_path *p = &t->paths[path];
  pkv_tree_node *u = &t->nodes[p->parent];
  u->active -= p->active;
  u->waiting -= p->waiting;
  pkv_sched_heap_remove(t->by_m, &u->paths_m, path);
  pkv_sched_heap_remove(t->by_s, &u->paths_s, path);
  if (p->active > 0) pkv_sched_heap_remove(t->by_b, &u->paths_b, path);
}

/* What the path is counted as in its parent becomes what it is; false when it is already. */
static bool relink(pkv_tree *t, uint32_t path) {
  pkv_tree_path *p = &t->paths[path];
  const pkv_tree_node *root = &t->nodes[p->root];
  pkv_tree_node *u = &t->nodes[p->parent];
  bool changed = p->active != root->sum_active || p->waiting != root->sum_waiting;
  const bool was_covered = p->active > 0, covered = root->sum_active > 0;
  u->active += root->sum_active - p->active;
  u->waiting += root->sum_waiting - p->waiting;
  p->active = root->sum_active;
  p->waiting = root->sum_waiting;
  const pkv_sched_key size = size_key(path, p);
  if (t->by_s[path].k.key != size.key) pkv_sched_heap_change(t->by_s, &u->paths_s, path, size);
  if (!pkv_sched_same_key(&t->by_m[path].k, &root->m)) {
    pkv_sched_heap_change(t->by_m, &u->paths_m, path, root->m);
    changed = true;
  }
  if (was_covered && !covered) {
    pkv_sched_heap_remove(t->by_b, &u->paths_b, path);
  } else if (covered && !was_covered) {
    t->by_b[path].k = root->c0;
    pkv_sched_heap_insert(t->by_b, &u->paths_b, path);
  } else if (covered && !pkv_sched_same_key(&t->by_b[path].k, &root->c0)) {
    pkv_sched_heap_change(t->by_b, &u->paths_b, path, root->c0);
    changed = true;
  }
  return changed;
}

void pkv_tree_promote(pkv_tree *t, uint32_t u, uint32_t path) {
  const uint32_t above = pkv_tree_path_of(t, u);
  const uint32_t root = t->paths[path].root;
  const uint32_t top = pkv_tree_path_top(t, path);
  pkv_tree_unlink(t, path);
  const uint32_t old = pkv_tree_path_cut(t, above, u);
  pkv_tree_path_append(t, above, root);
  t->nodes[u].heavy = top;
  if (old == NONE) {
    pkv_tree_path_free(t, path);
    return;
  }
  t->paths[path] = (pkv_tree_path){old, u, 0, 0};
  t->nodes[old].up = PKV_TREE_PATH | path;
  pkv_tree_link(t, path);
}

void pkv_tree_mend(pkv_tree *t, uint32_t v, bool sizes) {
  int switches = 0;
  while (v != NONE) {
    const uint32_t path = pkv_tree_pull_up(t, v);
    while (sizes && t->nodes[t->paths[path].root].slack < 0 && switches < MOST_SWITCHES) {
      const uint32_t x = pkv_tree_top_heavy(t, path);
      pkv_tree_promote(t, x, t->nodes[x].paths_s);
      (void)pkv_tree_pull_up(t, x);
      switches++;
    }
    v = t->paths[path].parent;
    if (v != NONE && !relink(t, path)) return;
  }
}

/* ---- the tree ---- */

pkv_status pkv_tree_create(pkv_sched *s, pkv_error *err) {
  pkv_tree *t = pkv_sched_take(s, 1, sizeof *t);
  PKV_CHECK(err, t, PKV_E_NOMEM, "no memory for a tree");
  memset(t, 0, sizeof *t);
  s->tree = t;
  t->node_capacity = s->capacity + 2;     /* a node fewer than requests, and the root */
  t->path_capacity = s->capacity / 2 + 4; /* two requests at the end of each */
  t->free_node = t->free_path = NONE;
  t->cells = s->cells;
  t->absolute = pkv_sched_fault(s, PKV_SCHED_FAULT_ABSOLUTE);
  t->weight = PKV_SCHED_UNIT + (t->absolute ? 0 : s->share8);
  t->share_min = t->absolute ? 0 : s->o.share_min_tokens;
  t->nodes = pkv_sched_take(s, t->node_capacity, sizeof *t->nodes);
  t->paths = pkv_sched_take(s, t->path_capacity, sizeof *t->paths);
  t->by_m = pkv_sched_take(s, t->path_capacity, sizeof *t->by_m);
  t->by_b = pkv_sched_take(s, t->path_capacity, sizeof *t->by_b);
  t->by_s = pkv_sched_take(s, t->path_capacity, sizeof *t->by_s);
  PKV_CHECK(err, t->nodes && t->paths && t->by_m && t->by_b && t->by_s, PKV_E_NOMEM,
            "no memory for a tree of %u requests", s->capacity);
  PKV_TRY(pkv_sched_map_init(&t->children, 2 * s->capacity + 2, &s->allocator, err));
  s->allocated += (int64_t)pkv_sched_map_bytes(&t->children);
  memset(&t->nodes[PKV_TREE_ROOT], 0, sizeof t->nodes[0]);
  pkv_tree_node *root = &t->nodes[PKV_TREE_ROOT];
  root->parent = root->heavy = root->reqs = root->side = root->paths_m = root->paths_b =
      root->paths_s = NONE;
  t->fresh_node = 1;
  t->node_count = 1;
  (void)pkv_tree_path_new(t, PKV_TREE_ROOT, NONE);
  return PKV_OK;
}

void pkv_tree_destroy(pkv_sched *s) {
  pkv_tree *t = s->tree;
  if (t == NULL) return;
  pkv_sched_map_deinit(&t->children, &s->allocator);
  pkv_sched_give(s, t->by_s, t->path_capacity, sizeof *t->by_s);
  pkv_sched_give(s, t->by_b, t->path_capacity, sizeof *t->by_b);
  pkv_sched_give(s, t->by_m, t->path_capacity, sizeof *t->by_m);
  pkv_sched_give(s, t->paths, t->path_capacity, sizeof *t->paths);
  pkv_sched_give(s, t->nodes, t->node_capacity, sizeof *t->nodes);
  pkv_sched_give(s, t, 1, sizeof *t);
}

void pkv_tree_insert(pkv_sched *s, uint32_t slot) {
  s->cells[slot].k.key =
      pkv_sched_base_key(s, slot, (int64_t)PKV_SCHED_UNIT * s->reqs[slot].prompt);
  s->cells[slot].k.slot = slot;
  pkv_tree_mend(s->tree, pkv_tree_hang(s, slot), true);
}

void pkv_tree_remove(pkv_sched *s, uint32_t slot) {
  pkv_tree_mend(s->tree, pkv_tree_unhang(s, slot), true);
}

void pkv_tree_move(pkv_sched *s, uint32_t slot, pkv_sched_place to) {
  const uint32_t node = s->reqs[slot].node;
  const bool sizes = to == PKV_SCHED_IS_PREEMPTED || s->reqs[slot].place == PKV_SCHED_IS_PREEMPTED;
  pkv_tree_detach(s, node, slot);
  s->reqs[slot].place = (uint8_t)to;
  pkv_tree_attach(s, node, slot);
  pkv_tree_mend(s->tree, node, sizes);
}

void pkv_tree_set_ord(pkv_sched *s, uint32_t slot, uint32_t ord) {
  const uint32_t node = s->reqs[slot].node;
  pkv_tree_detach(s, node, slot);
  s->cells[slot].k.ord = ord;
  pkv_tree_attach(s, node, slot);
  pkv_tree_mend(s->tree, node, false);
}

uint32_t pkv_tree_choose(const pkv_sched *s) {
  return best_of(s->tree, 0).slot;
}

/* ---- what is shared ---- */

int32_t pkv_tree_shared(const pkv_sched *s, uint32_t slot, int32_t others) {
  const pkv_tree *t = s->tree;
  const int32_t least = others + (s->reqs[slot].place == PKV_SCHED_IS_ACTIVE);
  for (uint32_t x = s->reqs[slot].node; x != NONE;) {
    const pkv_tree_spot spot = pkv_tree_look(t, x);
    if (spot.active >= least) return t->nodes[x].depth;
    x = spot.above != NONE ? spot.above : t->paths[spot.path].parent;
  }
  return 0;
}

/* The other waiting requests below the first node under what is covered of this one's prompt. */
static int32_t peers(const pkv_sched *s, uint32_t slot, int32_t covered) {
  const pkv_tree *t = s->tree;
  const int32_t self = s->reqs[slot].place == PKV_SCHED_IS_WAITING;
  uint32_t x = s->reqs[slot].node, first = NONE;
  if (t->nodes[x].depth <= covered) return 0; /* it goes on alone */
  while (first == NONE) {
    const uint32_t path = pkv_tree_path_of(t, x);
    const uint32_t last = pkv_tree_deepest(t, path, covered);
    if (last != NONE) {
      first = t->nodes[last].heavy;
      break;
    }
    x = t->paths[path].parent;
    if (t->nodes[x].depth <= covered) first = pkv_tree_path_top(t, path);
  }
  return pkv_tree_look(t, first).waiting - self;
}

static int32_t all_active(const pkv_tree *t) {
  return t->nodes[t->paths[0].root].sum_active;
}

int32_t pkv_tree_chain(const pkv_sched *s) {
  const pkv_tree *t = s->tree;
  const int32_t active = all_active(t);
  uint32_t path = 0;
  if (active == 0) return 0;
  for (;;) {
    const uint32_t x = pkv_tree_first_covered(t, path);
    PKV_ASSERT(x != NONE);
    const pkv_tree_node *n = &t->nodes[x];
    if (n->active < active) return n->depth;
    if (n->paths_b != NONE && t->paths[n->paths_b].active == active) {
      path = n->paths_b;
      continue;
    }
    if (active > 1) return n->depth;
    uint32_t slot = n->side; /* the only active one; others here may be preempted */
    while (s->reqs[slot].place != PKV_SCHED_IS_ACTIVE)
      slot = s->cells[slot].right;
    return s->reqs[slot].hashed;
  }
}

void pkv_tree_view(pkv_sched_view *view, const pkv_sched *s, uint32_t slot) {
  const pkv_tree *t = s->tree;
  uint32_t x = s->reqs[slot].node;
  const int32_t self = s->reqs[slot].place == PKV_SCHED_IS_WAITING, active = all_active(t);
  pkv_tree_spot spot = pkv_tree_look(t, x);
  view->shared_tokens = pkv_tree_shared(s, slot, 1);
  view->peers = peers(s, slot, view->shared_tokens);
  view->chain_before = pkv_tree_chain(s);
  if (active == 0) {
    const int32_t whole = s->reqs[slot].hashed;
    view->chain_after = whole;
    view->sharers = t->nodes[x].depth == whole ? spot.waiting - self : 0;
  } else {
    while (t->nodes[t->paths[spot.path].root].sum_active < active) {
      x = t->paths[spot.path].parent;
      spot = pkv_tree_look(t, x);
    }
    const uint32_t first = pkv_tree_first_covered(t, spot.path);
    if (t->nodes[first].depth < t->nodes[x].depth) {
      x = first;
      spot = pkv_tree_look(t, x);
    }
    view->chain_after = t->nodes[x].depth;
    view->sharers = spot.waiting - self;
  }
}

size_t pkv_tree_used(const pkv_sched *s) {
  const pkv_tree *t = s->tree;
  const size_t map = pkv_sched_map_bytes(&t->children);
  const size_t held = (size_t)s->waiting + (size_t)s->active + (size_t)s->preempted;
  return t->node_count * sizeof *t->nodes +
         t->path_count * (sizeof *t->paths + 3 * sizeof *t->by_m) +
         (size_t)((double)map * (double)held / (double)s->capacity);
}

int32_t pkv_tree_nodes(const pkv_sched *s) {
  return (int32_t)s->tree->node_count - 1;
}
