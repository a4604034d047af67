/* SPDX-License-Identifier: Apache-2.0 */
/* What rows share, told by the caller: order and nodes are checked, then become ranks and gaps. */
#include "plan/tree_build.h"

#include <string.h>

/* Each row once. */
static pkv_status check_order(int32_t *seen, const int32_t *order, int32_t rows, pkv_error *err) {
  if (!order) return PKV_OK;
  for (int32_t i = 0; i < rows; i++)
    seen[i] = -1;
  for (int32_t i = 0; i < rows; i++) {
    PKV_CHECK(err, order[i] >= 0 && order[i] < rows, PKV_E_INVALID,
              "sharing->order[%d] is row %d of %d", i, order[i], rows);
    PKV_CHECK(err, seen[order[i]] < 0, PKV_E_INVALID, "sharing->order has row %d at %d and at %d",
              order[i], seen[order[i]], i);
    seen[order[i]] = i;
  }
  return PKV_OK;
}

/* A node in itself: its ranges, and its pages against the length of each of its rows. */
static pkv_status check_node(const pkv_tree_core *t, const pkv_sharing *sharing, int32_t id,
                             const int32_t *seq_len, pkv_error *err) {
  const pkv_prefix_node *n = &sharing->nodes[id];
  PKV_CHECK(err,
            n->first_row >= 0 && n->row_count >= 1 && n->first_row < t->core.rows &&
                n->row_count <= t->core.rows - n->first_row,
            PKV_E_INVALID, "sharing->nodes[%d]: rows %d + %d, there are %d", id, n->first_row,
            n->row_count, t->core.rows);
  PKV_CHECK(err,
            n->first_page >= 0 && n->page_count >= 1 && n->page_count <= INT32_MAX - n->first_page,
            PKV_E_INVALID, "sharing->nodes[%d]: pages %d + %d", id, n->first_page, n->page_count);
  const int32_t end = n->first_page + n->page_count;
  for (int32_t i = n->first_row; i < n->first_row + n->row_count; i++) {
    const int32_t row = sharing->order ? sharing->order[i] : i;
    const int64_t pages = pkv_core_div_up(seq_len[row], t->page_tokens);
    PKV_CHECK(err, end <= pages, PKV_E_INVALID,
              "sharing->nodes[%d] ends at page %d, row %d of %d tokens has %lld", id, end, row,
              seq_len[row], (long long)pages);
  }
  return PKV_OK;
}

/*
 * A node among the others. chain: the nodes that hold the present place, outermost first; *depth of
 * them. Siblings that overlap have a row twice.
 */
static pkv_status check_nesting(int32_t *chain, int32_t *depth, const pkv_prefix_node *nodes,
                                int32_t id, pkv_error *err) {
  const pkv_prefix_node *n = &nodes[id];
  const int32_t end = n->first_row + n->row_count;
  PKV_CHECK(err, id == 0 || n->first_row >= nodes[id - 1].first_row, PKV_E_INVALID,
            "sharing->nodes[%d] starts at row %d, before node %d at %d: not in preorder", id,
            n->first_row, id - 1, nodes[id - 1].first_row);
  while (*depth > 0) {
    const pkv_prefix_node *p = &nodes[chain[*depth - 1]];
    if (n->first_row < p->first_row + p->row_count) break;
    --*depth;
  }
  int32_t start = 0;
  if (*depth > 0) {
    const int32_t up = chain[*depth - 1];
    const pkv_prefix_node *p = &nodes[up];
    PKV_CHECK(err, end <= p->first_row + p->row_count, PKV_E_INVALID,
              "sharing->nodes[%d]: rows %d to %d lie partly in node %d, rows %d to %d", id,
              n->first_row, end, up, p->first_row, p->first_row + p->row_count);
    PKV_CHECK(err, n->row_count < p->row_count, PKV_E_INVALID,
              "sharing->nodes[%d] has the rows of node %d: rows twice, or one node in two", id, up);
    start = p->first_page + p->page_count;
  }
  PKV_CHECK(err, n->first_page == start, PKV_E_INVALID,
            "sharing->nodes[%d] starts at page %d, %s ends at %d", id, n->first_page,
            *depth > 0 ? "its parent" : "a root's table", start);
  chain[(*depth)++] = id;
  return PKV_OK;
}

static pkv_status check_pages(const pkv_sharing *sharing, int32_t id, int64_t stride,
                              pkv_error *err) {
  const pkv_prefix_node *n = &sharing->nodes[id];
  const int32_t end = n->first_page + n->page_count;
  PKV_CHECK(err, end <= sharing->max_pages, PKV_E_INVALID,
            "sharing->nodes[%d] ends at page %d, max_pages is %d", id, end, sharing->max_pages);
  const int32_t first = sharing->order ? sharing->order[n->first_row] : n->first_row;
  const int32_t *a = sharing->block_table + first * stride;
  for (int32_t i = n->first_row + 1; i < n->first_row + n->row_count; i++) {
    const int32_t row = sharing->order ? sharing->order[i] : i;
    const int32_t *b = sharing->block_table + row * stride;
    if (memcmp(a + n->first_page, b + n->first_page, (size_t)n->page_count * sizeof *a) == 0)
      continue;
    int32_t at = n->first_page;
    while (a[at] == b[at])
      at++;
    return PKV_FAIL(err, PKV_E_INVALID,
                    "sharing->nodes[%d]: index %d is page %d for row %d, page %d for row %d", id,
                    at, a[at], first, b[at], row);
  }
  return PKV_OK;
}

pkv_status pkv_tree_take(pkv_tree_rank *ranks, const pkv_tree_scratch *scratch,
                         const pkv_tree_core *t, const int32_t *seq_len, const pkv_sharing *sharing,
                         int64_t stride, pkv_error *err) {
  const int32_t rows = t->core.rows;
  int32_t *lcp = pkv_tree_array(scratch, PKV_TREE_LCP);
  int32_t *chain = pkv_tree_array(scratch, PKV_TREE_FREE), depth = 0;
  PKV_TRY(check_order(chain, sharing->order, rows, err));
  for (int32_t id = 0; id < sharing->node_count; id++) {
    PKV_TRY(check_node(t, sharing, id, seq_len, err));
    PKV_TRY(check_nesting(chain, &depth, sharing->nodes, id, err));
    if (sharing->block_table) PKV_TRY(check_pages(sharing, id, stride, err));
  }
  for (int32_t i = 0; i < rows; i++) {
    ranks[i].row = sharing->order ? sharing->order[i] : i;
    ranks[i].length = seq_len[ranks[i].row];
  }
  for (int32_t i = 0; i <= rows; i++)
    lcp[i] = 0;
  for (int32_t id = 0; id < sharing->node_count; id++) {
    const pkv_prefix_node *n = &sharing->nodes[id];
    const int64_t tokens = ((int64_t)n->first_page + n->page_count) * t->page_tokens;
    for (int32_t i = n->first_row + 1; i < n->first_row + n->row_count; i++) {
      const int32_t a = pkv_tree_shareable(&t->core, ranks[i - 1].length);
      const int32_t b = pkv_tree_shareable(&t->core, ranks[i].length);
      const int32_t least = a < b ? a : b;
      const int64_t units = tokens / t->core.unit_tokens;
      lcp[i] = units < least ? (int32_t)units : least;
    }
  }
  return PKV_OK;
}
