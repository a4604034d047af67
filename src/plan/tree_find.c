/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What rows share, read from their block tables: leaders and ranks of `shared` on the host. Rows
 * are merge-sorted by their page ids, each comparison going on where the last one of the two rows
 * ended (so every shared page is looked at once or twice); leaders follow from the sorted
 * neighbours.
 */
#include "plan/tree_build.h"

#include <string.h>

typedef struct finder {
  const pkv_tree_core *t;
  const int32_t *seq_len;
  const int32_t *table;
  int64_t stride;
  bool chained;
  int32_t *pages; /* [rows]: pages that hold the shareable units */
} finder;

static const int32_t *row_of(const finder *f, int32_t row) {
  return f->table + row * f->stride;
}

/* First index from `from` on where two runs of ids differ, or n. */
static int32_t first_difference(const int32_t *a, const int32_t *b, int32_t from, int32_t n) {
  int32_t i = from;
  while (i + 16 <= n && memcmp(a + i, b + i, 16 * sizeof(int32_t)) == 0)
    i += 16;
  while (i < n && a[i] == b[i])
    i++;
  return i;
}

/* The same where equality at an index stands for all before it. */
static int32_t chained_difference(const int32_t *a, const int32_t *b, int32_t from, int32_t n) {
  int32_t low = from, high = n; /* equal before low, different at high and after it */
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (a[middle] == b[middle])
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/* Whether row a comes before row b, which are equal in *common pages; raises *common. */
static bool comes_before(const finder *f, int32_t a, int32_t b, int32_t *common) {
  const int32_t pages_a = f->pages[a], pages_b = f->pages[b];
  const int32_t n = pages_a < pages_b ? pages_a : pages_b;
  const int32_t *ids_a = row_of(f, a), *ids_b = row_of(f, b);
  if (*common < n)
    *common = f->chained ? chained_difference(ids_a, ids_b, *common, n)
                         : first_difference(ids_a, ids_b, *common, n);
  if (*common < n) return ids_a[*common] < ids_b[*common];
  if (pages_a != pages_b) return pages_a < pages_b;
  if (f->seq_len[a] != f->seq_len[b]) return f->seq_len[a] < f->seq_len[b];
  return a < b;
}

/* Merges sorted runs [begin, middle) and [middle, end) of rows into to; common: pages in common
   with the row before in the run. */
static void merge_runs(const finder *f, int32_t *to, int32_t *to_common, const int32_t *rows,
                       const int32_t *common, int32_t begin, int32_t middle, int32_t end) {
  int32_t a = begin, b = middle;
  int32_t common_a = 0, common_b = 0; /* of the runs' heads with the row put out last */
  for (int32_t i = begin; i < end; i++) {
    bool take_a = b == end;
    if (a < middle && b < end) {
      take_a = common_a > common_b;
      if (common_a == common_b) {
        int32_t both = common_a;
        take_a = comes_before(f, rows[a], rows[b], &both);
        *(take_a ? &common_b : &common_a) = both;
      }
    }
    to[i] = rows[take_a ? a : b];
    to_common[i] = take_a ? common_a : common_b;
    if (take_a)
      common_a = ++a < middle ? common[a] : 0;
    else
      common_b = ++b < end ? common[b] : 0;
  }
}

/* Sorts all rows; returns which of the two pairs of arrays holds the result. */
static int sort_rows(const finder *f, int32_t *rows[2], int32_t *common[2], int32_t count) {
  int from = 0;
  for (int32_t i = 0; i < count; i++) {
    rows[0][i] = i;
    common[0][i] = 0;
  }
  for (int64_t width = 1; width < count; width *= 2, from ^= 1) {
    for (int64_t begin = 0; begin < count; begin += 2 * width) {
      const int64_t middle = begin + width < count ? begin + width : count;
      const int64_t end = begin + 2 * width < count ? begin + 2 * width : count;
      merge_runs(f, rows[from ^ 1], common[from ^ 1], rows[from], common[from], (int32_t)begin,
                 (int32_t)middle, (int32_t)end);
    }
  }
  return from;
}

/* Units that two rows with `pages` common pages share. */
static int32_t units_in_common(const finder *f, int32_t a, int32_t b, int32_t pages) {
  const int32_t unit_tokens = f->t->core.unit_tokens;
  const int32_t units_a = pkv_tree_shareable(&f->t->core, f->seq_len[a]);
  const int32_t units_b = pkv_tree_shareable(&f->t->core, f->seq_len[b]);
  const int32_t least = units_a < units_b ? units_a : units_b;
  const int64_t units = (int64_t)pages * f->t->page_tokens / unit_tokens;
  return units < least ? (int32_t)units : least;
}

/*
 * d and p of every row. Taking rows out of the sorted list, the last index first, leaves the
 * smaller ones beside each: the nearer in sharing is in the leader's group, and the group's
 * smallest row is found by going on to leaders as long as they are led as deep.
 */
static void find_leaders(const finder *f, int32_t *leader, int32_t *units, const int32_t *rows,
                         const int32_t *common, int32_t *before, int32_t *after, int32_t *shared,
                         int32_t *place) {
  const int32_t count = f->t->core.rows;
  for (int32_t i = 0; i < count; i++) {
    before[i] = i - 1;
    after[i] = i + 1;
    place[rows[i]] = i;
    shared[i] = i > 0 ? units_in_common(f, rows[i - 1], rows[i], common[i]) : 0;
  }
  for (int32_t row = count - 1; row >= 0; row--) {
    const int32_t i = place[row], left = before[i], right = after[i];
    const int32_t with_left = left >= 0 ? shared[i] : 0;
    const int32_t with_right = right < count ? shared[right] : 0;
    units[row] = with_left > with_right ? with_left : with_right;
    leader[row] = units[row] == 0 ? -1 : rows[with_left >= with_right ? left : right];
    if (left >= 0) after[left] = right;
    if (right < count) {
      before[right] = left;
      shared[right] = with_left < with_right ? with_left : with_right;
    }
  }
  for (int32_t row = 0; row < count; row++)
    while (leader[row] >= 0 && units[leader[row]] >= units[row])
      leader[row] = leader[leader[row]];
}

static void sift(uint64_t *keys, int64_t at, int64_t count) {
  const uint64_t key = keys[at];
  for (int64_t child; (child = 2 * at + 1) < count; at = child) {
    if (child + 1 < count && keys[child + 1] > keys[child]) child++;
    if (keys[child] <= key) break;
    keys[at] = keys[child];
  }
  keys[at] = key;
}

static void sort_keys(uint64_t *keys, int64_t count) {
  for (int64_t i = count / 2 - 1; i >= 0; i--)
    sift(keys, i, count);
  for (int64_t i = count - 1; i > 0; i--) {
    const uint64_t last = keys[i];
    keys[i] = keys[0];
    keys[0] = last;
    sift(keys, 0, i);
  }
}

/* Ranks and lcp by walking the depth-first list. */
static void rank_rows(pkv_tree_rank *ranks, int32_t *lcp, const finder *f, const int32_t *leader,
                      const int32_t *units, uint64_t *keys, pkv_tree_link *links) {
  const int32_t count = f->t->core.rows;
  for (int32_t row = 0; row < count; row++) {
    keys[row] = pkv_tree_sort_key(row, leader[row], units[row]);
    pkv_tree_link_init(links, row);
  }
  sort_keys(keys, count);
  for (int32_t i = 0; i < count; i++)
    pkv_tree_link_sorted(links, keys, i, count);
  int32_t rank = 0, element = 2 * pkv_tree_key_row(keys[0]);
  for (;; element = links[element].next) {
    if (links[element].rows) {
      ranks[rank].row = element / 2;
      ranks[rank].length = f->seq_len[element / 2];
      lcp[rank++] = units[element / 2];
    }
    if (links[element].next == element) break;
  }
  lcp[count] = 0;
}

void pkv_tree_find(pkv_tree_rank *ranks, const pkv_tree_scratch *scratch, const pkv_tree_core *t,
                   const int32_t *seq_len, const int32_t *table, int64_t stride, bool chained) {
  int32_t *array[PKV_TREE_SCRATCH];
  for (int32_t i = 0; i < PKV_TREE_SCRATCH; i++)
    array[i] = pkv_tree_array(scratch, i);
  const finder f = {t, seq_len, table, stride, chained, array[PKV_TREE_FREE]};
  if (t->core.rows == 0) return;
  for (int32_t row = 0; row < t->core.rows; row++)
    f.pages[row] = pkv_tree_pages(t, pkv_tree_shareable(&t->core, seq_len[row]));
  int32_t *rows[2] = {array[4], array[5]}, *common[2] = {array[6], array[7]};
  const int sorted = sort_rows(&f, rows, common, t->core.rows);
  find_leaders(&f, array[PKV_TREE_LEADER], array[PKV_TREE_UNITS], rows[sorted], common[sorted],
               array[8], array[9], array[10], array[11]);
  /* Two words a key and four a row of links: even arrays lie at multiples of 8 bytes. */
  rank_rows(ranks, array[PKV_TREE_LCP], &f, array[PKV_TREE_LEADER], array[PKV_TREE_UNITS],
            (uint64_t *)(void *)array[4], (pkv_tree_link *)(void *)array[6]);
}
