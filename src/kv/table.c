/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Block tables. A row of n tokens holds exactly ceil(n / page_tokens) pages, one reference each;
 * nothing else is remembered about it.
 */
#include "kv/pool.h"

#include <stdbool.h>
#include <string.h>

struct pkv_table {
  pkv_allocator allocator;
  pkv_pool *pool;
  int32_t rows, max_pages, page_tokens;
  int32_t *pages;   /* [rows, max_pages]; -1 past a row's last page */
  int32_t *seq_len; /* [rows] */
  uint64_t changes; /* of any row's pages ... */
  uint64_t *change; /* ... and the last one's number, [rows] */
};

static size_t entries(const pkv_table *t) {
  return (size_t)t->rows * (size_t)t->max_pages;
}

static int32_t *row_pages(const pkv_table *t, int32_t row) {
  return t->pages + (int64_t)row * t->max_pages;
}

static int32_t pages_for(const pkv_table *t, int64_t tokens) {
  return (int32_t)((tokens + t->page_tokens - 1) / t->page_tokens);
}

static void table_free(pkv_table *t) {
  const pkv_allocator a = t->allocator;
  pkv_free(&a, t->pages, entries(t) * sizeof *t->pages);
  pkv_free(&a, t->seq_len, (size_t)t->rows * sizeof *t->seq_len);
  pkv_free(&a, t->change, (size_t)t->rows * sizeof *t->change);
  pkv_free(&a, t, sizeof *t);
}

pkv_status pkv_table_create(pkv_table **out, pkv_pool *pool, int32_t rows, int32_t max_pages,
                            const pkv_allocator *allocator, pkv_error *err) {
  PKV_CHECK(err, out != NULL, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, pool != NULL, PKV_E_INVALID, "pool is NULL");
  PKV_CHECK(err, rows >= 1, PKV_E_INVALID, "rows is %d, at least 1 is needed", rows);
  PKV_CHECK(err, max_pages >= 1, PKV_E_INVALID, "max_pages is %d, at least 1 is needed", max_pages);
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_table *t = pkv_alloc_zeroed(&a, 1, sizeof *t);
  PKV_CHECK(err, t != NULL, PKV_E_NOMEM, "no memory for a table");
  t->allocator = a;
  t->pool = pool;
  t->rows = rows;
  t->max_pages = max_pages;
  t->page_tokens = pool->caches[0].page_tokens;
  t->pages = pkv_alloc(&a, entries(t) * sizeof *t->pages);
  if (t->pages != NULL) t->seq_len = pkv_alloc_zeroed(&a, (size_t)rows, sizeof *t->seq_len);
  if (t->seq_len != NULL) t->change = pkv_alloc_zeroed(&a, (size_t)rows, sizeof *t->change);
  if (t->change == NULL) {
    table_free(t);
    return PKV_FAIL(err, PKV_E_NOMEM, "no memory for %d rows of %d pages", rows, max_pages);
  }
  memset(t->pages, 0xff, entries(t) * sizeof *t->pages); /* -1 */
  pool->tables++;
  *out = t;
  return PKV_OK;
}

static void note_change(pkv_table *t, int32_t row) {
  t->change[row] = ++t->changes;
}

uint64_t pkv_table_change(const pkv_table *table, int32_t row) {
  return table->change[row];
}

/* Releases the row's pages from number `keep` on, last first: taken again, they come in order. */
static void drop_pages(pkv_table *t, int32_t row, int32_t keep) {
  int32_t *pages = row_pages(t, row);
  if (pages_for(t, t->seq_len[row]) > keep) note_change(t, row);
  for (int32_t i = pages_for(t, t->seq_len[row]); i-- > keep;) {
    pkv_pool_drop(t->pool, pages[i]);
    pages[i] = -1;
  }
}

void pkv_table_destroy(pkv_table *table) {
  if (table == NULL) return;
  for (int32_t row = 0; row < table->rows; row++)
    drop_pages(table, row, 0);
  table->pool->tables--;
  table_free(table);
}

static pkv_status check_row(const pkv_table *t, int32_t row, const char *name, pkv_error *err) {
  PKV_CHECK(err, t != NULL, PKV_E_INVALID, "table is NULL");
  PKV_CHECK(err, row >= 0 && row < t->rows, PKV_E_RANGE, "%s is %d, the table has rows 0 to %d",
            name, row, t->rows - 1);
  return PKV_OK;
}

static pkv_status check_empty(const pkv_table *t, int32_t row, const char *name, pkv_error *err) {
  PKV_TRY(check_row(t, row, name, err));
  PKV_CHECK(err, t->seq_len[row] == 0, PKV_E_STATE, "%s is %d, which holds %d tokens: not empty",
            name, row, t->seq_len[row]);
  return PKV_OK;
}

pkv_status pkv_table_extend(pkv_table *table, int32_t row, int32_t tokens, pkv_error *err) {
  PKV_TRY(check_row(table, row, "row", err));
  PKV_CHECK(err, tokens >= 0, PKV_E_INVALID, "tokens is %d, which is negative", tokens);
  if (tokens == 0) return PKV_OK;
  const int32_t old = table->seq_len[row];
  const int64_t length = (int64_t)old + tokens;
  const int64_t possible = (int64_t)table->max_pages * table->page_tokens;
  PKV_CHECK(err, length <= possible && length <= INT32_MAX, PKV_E_LIMIT,
            "tokens is %d: row %d of %d tokens would exceed %lld (max_pages %d)", tokens, row, old,
            (long long)(possible < INT32_MAX ? possible : INT32_MAX), table->max_pages);
  pkv_pool *pool = table->pool;
  int32_t *pages = row_pages(table, row);
  const int32_t have = pages_for(table, old), need = pages_for(table, length);
  const int32_t filled = old % table->page_tokens; /* tokens in a partly filled last page */
  const bool copy = filled != 0 && pool->refs[pages[have - 1]] > 1;
  PKV_CHECK(err, (int64_t)need - have + copy <= pkv_pool_free_pages(pool), PKV_E_NO_PAGES,
            "tokens is %d: row %d needs %lld more pages, %lld of %lld are free", tokens, row,
            (long long)need - have + copy, (long long)pkv_pool_free_pages(pool),
            (long long)pool->pages);
  if (copy) {
    int32_t page;
    pkv_pool_take(&page, pool, 1);
    pkv_pool_copy_page(pool, page, pages[have - 1], filled);
    pkv_pool_drop(pool, pages[have - 1]);
    pages[have - 1] = page;
  }
  if (copy || need > have) note_change(table, row);
  pkv_pool_take(pages + have, pool, need - have);
  table->seq_len[row] = (int32_t)length;
  return PKV_OK;
}

pkv_status pkv_table_truncate(pkv_table *table, int32_t row, int32_t tokens, pkv_error *err) {
  PKV_TRY(check_row(table, row, "row", err));
  PKV_CHECK(err, tokens >= 0 && tokens <= table->seq_len[row], PKV_E_RANGE,
            "tokens is %d, row %d holds %d", tokens, row, table->seq_len[row]);
  drop_pages(table, row, pages_for(table, tokens));
  table->seq_len[row] = tokens;
  return PKV_OK;
}

/* The empty row gets `count` pages that the pool has checked and retained. */
static void adopt(pkv_table *t, int32_t row, const int32_t *pages, int32_t count, int32_t tokens) {
  if (count > 0) memcpy(row_pages(t, row), pages, (size_t)count * sizeof *pages);
  t->seq_len[row] = tokens;
  note_change(t, row);
}

pkv_status pkv_table_fork(pkv_table *table, int32_t dst, int32_t src, int32_t tokens,
                          pkv_error *err) {
  PKV_TRY(check_empty(table, dst, "dst", err));
  PKV_TRY(check_row(table, src, "src", err));
  PKV_CHECK(err, tokens >= 0 && tokens <= table->seq_len[src], PKV_E_RANGE,
            "tokens is %d, row src = %d holds %d", tokens, src, table->seq_len[src]);
  if (tokens == 0) return PKV_OK;
  const int32_t count = pages_for(table, tokens);
  const int32_t *pages = row_pages(table, src);
  PKV_TRY(pkv_pool_retain(table->pool, pages, count, err));
  adopt(table, dst, pages, count, tokens);
  return PKV_OK;
}

pkv_status pkv_table_attach(pkv_table *table, int32_t row, const int32_t *pages, int32_t page_count,
                            int32_t tokens, pkv_error *err) {
  PKV_TRY(check_empty(table, row, "row", err));
  PKV_CHECK(err, tokens >= 0, PKV_E_INVALID, "tokens is %d, which is negative", tokens);
  PKV_CHECK(err, page_count == pages_for(table, tokens), PKV_E_INVALID,
            "page_count is %d, %d tokens lie in %d pages of %d", page_count, tokens,
            pages_for(table, tokens), table->page_tokens);
  PKV_CHECK(err, page_count <= table->max_pages, PKV_E_LIMIT, "page_count is %d, a row holds %d",
            page_count, table->max_pages);
  PKV_CHECK(err, pages != NULL || page_count == 0, PKV_E_INVALID, "pages is NULL");
  PKV_TRY(pkv_pool_retain(table->pool, pages, page_count, err));
  adopt(table, row, pages, page_count, tokens);
  return PKV_OK;
}

pkv_status pkv_table_slots(int64_t *slots, const pkv_table *table, int32_t row, int32_t first,
                           int32_t count, pkv_error *err) {
  PKV_TRY(check_row(table, row, "row", err));
  PKV_CHECK(err, count >= 0, PKV_E_INVALID, "count is %d, which is negative", count);
  PKV_CHECK(err, first >= 0 && (int64_t)first + count <= table->seq_len[row], PKV_E_RANGE,
            "first is %d and count %d, row %d holds %d tokens", first, count, row,
            table->seq_len[row]);
  PKV_CHECK(err, slots != NULL || count == 0, PKV_E_INVALID, "slots is NULL");
  const int32_t *pages = row_pages(table, row);
  const int64_t size = table->page_tokens;
  for (int32_t i = 0; i < count; i++) {
    const int64_t token = (int64_t)first + i;
    slots[i] = pages[token / size] * size + token % size;
  }
  return PKV_OK;
}

int32_t pkv_table_seq_len(const pkv_table *table, int32_t row) {
  return table != NULL && row >= 0 && row < table->rows ? table->seq_len[row] : -1;
}

const int32_t *pkv_table_row(const pkv_table *table, int32_t row) {
  return table != NULL && row >= 0 && row < table->rows ? row_pages(table, row) : NULL;
}

int64_t pkv_table_stride(const pkv_table *table) {
  return table != NULL ? table->max_pages : 0;
}
