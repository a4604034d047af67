/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefix tree, inside.
 *
 * A trie over chunks with unary paths compressed: a node is where prompts part, or where several
 * end; a request hangs from the deepest node on its prompt. Inner nodes other than the root have
 * two items at least (requests and child nodes together), so there are fewer of them than requests.
 *
 * A node is *covered* when an active request hangs below it. A waiting request's new tokens are its
 * length minus the depth of its deepest covered ancestor; as a deeper one always gives less, the
 * best is the minimum over covered nodes v of (smallest key below v) - weight * depth(v), and no
 * request is looked at when coverage changes.
 *
 * What a node knows of everything below it is a function of what hangs from it directly (its
 * *light* part: requests, light child nodes) and of its *heavy* child. So nodes are strung on heavy
 * paths, each kept as an AVL tree over its nodes by depth, whose every subtree (a *segment* of the
 * path) holds that function in constant size; sched_tree_chain.c says how. A node's light children
 * lie in three leftist heaps, its waiting requests in one more. An operation mends one position of
 * O(log n) paths at O(log n) each, whatever the depth of the trie: chains of prompts that branch at
 * every depth become one long path.
 */
#ifndef PKV_SCHED_TREE_H
#define PKV_SCHED_TREE_H

#include "sched/sched_parts.h"

#define PKV_TREE_NODE UINT32_C(0x80000000) /* in references: a node, not a request */
#define PKV_TREE_PATH UINT32_C(0x80000000) /* in `up`: a path, not a node */
#define PKV_TREE_ROOT 0u                   /* the root node; its path is path 0 */

typedef struct pkv_tree_node {
  /* Of the segment that this node roots in the AVL tree of its path. */
  pkv_sched_key m;  /* smallest key of a waiting request */
  pkv_sched_key c1; /* best of the segment when something below it is covered */
  pkv_sched_key c0; /* best of the segment when nothing below it is */
  int32_t q;        /* depth of the deepest node that its light part covers; -1 = none */
  int32_t sum_active, sum_waiting;
  /* Least over its nodes of (requests below the heavy child) - (half of those below the largest
     light child), nothing being below the segment. Negative for a whole path: some node's heavy
     child has become too small. */
  int32_t slack;
  uint32_t left, right, up;
  /* Of the node. */
  int32_t depth;           /* tokens */
  int32_t active, waiting; /* requests in the light part, whole subtrees of light children */
  uint32_t parent, heavy;  /* heavy is also the next node of the path */
  uint32_t reqs;           /* heap of waiting requests, in pkv_sched.cells */
  uint32_t side;           /* list of the others that hang here, by cells' left and right */
  /* Heaps of light children: all by m, covered ones by c0, all by size (the largest first). */
  uint32_t paths_m, paths_b, paths_s;
  uint32_t items : 24; /* requests and child nodes */
  uint32_t height : 8; /* of the segment, in the AVL tree */
  uint64_t first;      /* hash of the first chunk after the parent */
} pkv_tree_node;
_Static_assert(sizeof(pkv_tree_node) == 128, "two cache lines");

typedef struct pkv_tree_path {
  uint32_t root;           /* of the AVL tree; of unused records: the next one */
  uint32_t parent;         /* the node it hangs from, PKV_SCHED_NONE for the root's path */
  int32_t active, waiting; /* as counted in the parent */
} pkv_tree_path;

struct pkv_tree {
  pkv_tree_node *nodes;               /* [node_capacity] */
  pkv_tree_path *paths;               /* [path_capacity] */
  pkv_sched_cell *by_m, *by_b, *by_s; /* [path_capacity] */
  uint32_t node_capacity, path_capacity;
  uint32_t free_node, fresh_node, free_path, fresh_path;
  uint32_t node_count, path_count;
  pkv_sched_map children; /* (parent, hash of the first chunk) -> request or node */
  pkv_sched_cell *cells;  /* the requests' */
  int64_t weight;         /* of a covered token, in eighths */
  int32_t share_min;
  bool absolute;
  uint64_t pulls; /* since create: what operations cost, for tests */
};

/* ---- sched_tree_chain.c: paths as AVL trees ---- */

/* Computes the segment of x from its light part and its subtrees. */
void pkv_tree_pull(pkv_tree *t, uint32_t x);
/* Pulls x and everything above it on its path, restores the balance there, and returns the path. */
uint32_t pkv_tree_pull_up(pkv_tree *t, uint32_t x);
uint32_t pkv_tree_path_of(const pkv_tree *t, uint32_t x);
/* The first node of the path, and the last. */
uint32_t pkv_tree_path_top(const pkv_tree *t, uint32_t path);
uint32_t pkv_tree_path_end(const pkv_tree *t, uint32_t path);
/* A path of the single node x; not yet hung anywhere. */
uint32_t pkv_tree_path_new(pkv_tree *t, uint32_t x, uint32_t parent);
void pkv_tree_path_free(pkv_tree *t, uint32_t path);
/* Puts x into the path right above `below`, or at its end (PKV_SCHED_NONE). The path is in order
 * again once the caller has pulled up from x. */
void pkv_tree_path_put(pkv_tree *t, uint32_t path, uint32_t x, uint32_t below);
/* Takes x out. What the caller pulls up from then; PKV_SCHED_NONE: the path is empty. */
uint32_t pkv_tree_path_cut_out(pkv_tree *t, uint32_t x);
/* Cuts the path below x; what was there, PKV_SCHED_NONE = nothing. */
uint32_t pkv_tree_path_cut(pkv_tree *t, uint32_t path, uint32_t x);
/* Appends an AVL tree of nodes. */
void pkv_tree_path_append(pkv_tree *t, uint32_t path, uint32_t more);

/* The deepest node of the path whose depth is at most `depth`; PKV_SCHED_NONE = none. */
uint32_t pkv_tree_deepest(const pkv_tree *t, uint32_t path, int32_t depth);
/* A node of a path of negative slack whose heavy child is too small. */
uint32_t pkv_tree_top_heavy(const pkv_tree *t, uint32_t path);
/* The first node of the path whose light part holds active requests. */
uint32_t pkv_tree_first_covered(const pkv_tree *t, uint32_t path);

typedef struct pkv_tree_spot {
  uint32_t path;
  int32_t active, waiting; /* in x's light part and everything below x */
  uint32_t above;          /* deepest node above x whose light part is covered */
} pkv_tree_spot;
pkv_tree_spot pkv_tree_look(const pkv_tree *t, uint32_t x);

/* ---- sched_tree_place.c: where requests hang ---- */

/* Hangs a request that waits; the caller mends from the node that it returns. */
uint32_t pkv_tree_hang(pkv_sched *s, uint32_t slot);
/* Takes a request off its node; nodes that are left with one item go. The same. */
uint32_t pkv_tree_unhang(pkv_sched *s, uint32_t slot);
/* From and to a node's heap of waiting requests, or its list of others. */
void pkv_tree_attach(pkv_sched *s, uint32_t node, uint32_t slot);
void pkv_tree_detach(pkv_sched *s, uint32_t node, uint32_t slot);

/* ---- sched_tree.c ---- */

/* Node v's light part has changed: mends it and everything above. `sizes`: the number of requests
 * too, so that heavy children are looked at. */
void pkv_tree_mend(pkv_tree *t, uint32_t v, bool sizes);
/* A path that hangs from a node begins, or ceases, to count there. */
void pkv_tree_link(pkv_tree *t, uint32_t path);
void pkv_tree_unlink(pkv_tree *t, uint32_t path);
/* A light child becomes the heavy one. The caller mends from u. */
void pkv_tree_promote(pkv_tree *t, uint32_t u, uint32_t path);

#endif
