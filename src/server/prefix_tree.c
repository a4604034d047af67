/* SPDX-License-Identifier: Apache-2.0 */
#include "server/prefix_tree.h"

#include <stdlib.h>
#include <string.h>

#include "server/json_out.h"

#define ROWS  64
#define BYTES ((size_t)16 << 20) /* of prompts that are copied */

typedef struct tree_row {
  size_t at; /* in ids */
  int32_t count;
  const int32_t *ids;
} tree_row;

typedef struct tree {
  pkv_buffer ids;
  tree_row rows[ROWS];
  int32_t count, page;
  json_t *nodes;
} tree;

static void copy_row(void *user, uint64_t job, const int32_t *ids, int32_t count) {
  tree *const t = user;
  (void)job;
  if (t->count == ROWS) return;
  const size_t at = t->ids.size / sizeof *ids;
  if (pkv_buffer_append(&t->ids, ids, (size_t)count * sizeof *ids, NULL) == PKV_OK)
    t->rows[t->count++] = (tree_row){at, count, NULL};
}

static int32_t common(const tree_row *a, const tree_row *b) {
  const int32_t most = a->count < b->count ? a->count : b->count;
  int32_t n = 0;
  while (n < most && a->ids[n] == b->ids[n])
    n++;
  return n;
}

static int compare_rows(const void *a, const void *b) {
  const tree_row *const x = a, *const y = b;
  const int32_t n = common(x, y);
  if (n == x->count || n == y->count) return (x->count > y->count) - (x->count < y->count);
  return x->ids[n] < y->ids[n] ? -1 : 1;
}

/* Rows [low, high) agree up to `from`. Each level has fewer rows than the one above, so that the
 * depth is bounded by ROWS. */
static void add_node(tree *t, int32_t low, int32_t high, int32_t from, int parent) {
  const bool one = high - low == 1;
  int32_t to = one ? t->rows[low].count : common(&t->rows[low], &t->rows[high - 1]);
  if (!one) to -= to % t->page;
  int self = parent;
  if (to > from) {
    self = (int)json_array_size(t->nodes);
    pkv_json_add(&t->nodes, json_pack("{s:i, s:i, s:i, s:i}", "parent", parent, "from", from, "to",
                                      to, "rows", high - low));
  }
  for (int32_t first = low; !one && first < high;) {
    int32_t next = first + 1;
    while (next < high && common(&t->rows[next - 1], &t->rows[next]) >= to + t->page)
      next++;
    if (t->rows[first].count > to || next - first > 1) add_node(t, first, next, to, self);
    first = next;
  }
}

json_t *pkv_prefix_tree(pkv_loop *loop, int32_t page_tokens) {
  tree t;
  memset(&t, 0, sizeof t);
  t.page = page_tokens > 0 ? page_tokens : 16;
  t.nodes = json_array();
  pkv_buffer_init(&t.ids, BYTES, NULL);
  pkv_loop_visit_prompts(loop, copy_row, &t);
  for (int32_t i = 0; i < t.count; i++)
    t.rows[i].ids = (const int32_t *)(const void *)t.ids.data + t.rows[i].at;
  qsort(t.rows, (size_t)t.count, sizeof *t.rows, compare_rows);
  if (t.count > 0 && t.nodes != NULL) add_node(&t, 0, t.count, 0, -1);
  pkv_buffer_deinit(&t.ids);
  return t.nodes;
}
