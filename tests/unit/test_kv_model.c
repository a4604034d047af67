/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random operations on a pool and a table against a naive twin. The twin knows which pages each row
 * lists and which the test holds; owners are counted by looking through all of them. Each token of
 * each row carries a stamp in all layers, so that a write that another row could see is found.
 */
#include "kv/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "support/test_alloc.h"

enum { PAGES = 24, PAGE = 4, ROWS = 7, MAX_PAGES = 8, HEADS = 2, DIM = 8, LAYERS = 2, HELD = 40 };
enum { MAX_TOKENS = MAX_PAGES * PAGE };

typedef struct twin_row {
  int32_t length;
  int32_t pages[MAX_PAGES];
  uint64_t stamps[MAX_TOKENS];
} twin_row;

typedef struct twin {
  twin_row rows[ROWS];
  int32_t held[HELD]; /* pages the test owns itself, one entry an owner */
  int32_t held_count;
  int64_t peak, copies;
} twin;

typedef struct world {
  const char *name;
  uint64_t seed, next_stamp;
  int64_t step;
  pkv_rng rng;
  pkv_pool *pool;
  pkv_table *table;
  pkv_cache caches[LAYERS];
  twin t;
  int64_t done[12], refused[12]; /* by operation */
} world;

static pkv_error err;

#define WRONG(w, ...)                                                                              \
  do {                                                                                             \
    char text_[256];                                                                               \
    snprintf(text_, sizeof text_, __VA_ARGS__);                                                    \
    fail_msg("%s, seed %llu, step %lld: %s", (w)->name, (unsigned long long)(w)->seed,             \
             (long long)(w)->step, text_);                                                         \
  } while (0)

static int32_t below(world *w, int32_t n) {
  return (int32_t)pkv_rng_below(&w->rng, (uint64_t)n);
}

static int32_t pages_of(int32_t tokens) {
  return (tokens + PAGE - 1) / PAGE;
}

/* ---- the twin's view ---- */

static void count_owners(int32_t owners[PAGES], const twin *t) {
  memset(owners, 0, PAGES * sizeof owners[0]);
  for (int r = 0; r < ROWS; r++)
    for (int32_t i = 0; i < pages_of(t->rows[r].length); i++)
      owners[t->rows[r].pages[i]]++;
  for (int32_t i = 0; i < t->held_count; i++)
    owners[t->held[i]]++;
}

static int32_t free_pages(const int32_t owners[PAGES]) {
  int32_t n = 0;
  for (int p = 0; p < PAGES; p++)
    n += owners[p] == 0;
  return n;
}

/* ---- contents ---- */

static uint64_t mixed(uint64_t stamp, int layer, int is_v, int head) {
  return stamp * 16 + (uint64_t)(layer * 4 + is_v * 2 + head);
}

static unsigned char *vector(const pkv_cache *c, int is_v, int64_t slot, int head) {
  const int64_t page = slot / PAGE, token = slot % PAGE;
  if (is_v)
    return (unsigned char *)c->v + page * c->v_page_stride + token * c->v_token_stride +
           head * c->v_head_stride;
  return (unsigned char *)c->k + page * c->k_page_stride + token * c->k_token_stride +
         head * c->k_head_stride;
}

static void write_token(world *w, int64_t slot, uint64_t stamp) {
  for (int l = 0; l < LAYERS; l++)
    for (int v = 0; v < 2; v++)
      for (int h = 0; h < HEADS; h++) {
        const uint64_t x = mixed(stamp, l, v, h);
        memcpy(vector(&w->caches[l], v, slot, h), &x, sizeof x);
      }
}

static void check_token(world *w, int r, int32_t i, int64_t slot) {
  for (int l = 0; l < LAYERS; l++)
    for (int v = 0; v < 2; v++)
      for (int h = 0; h < HEADS; h++) {
        uint64_t x;
        memcpy(&x, vector(&w->caches[l], v, slot, h), sizeof x);
        const uint64_t expected = mixed(w->t.rows[r].stamps[i], l, v, h);
        if (x != expected)
          WRONG(w, "row %d token %d layer %d %c head %d: %llx, expected %llx", r, i, l,
                v ? 'v' : 'k', h, (unsigned long long)x, (unsigned long long)expected);
      }
}

static void check_row_contents(world *w, int r) {
  const twin_row *row = &w->t.rows[r];
  for (int32_t i = 0; i < row->length; i++)
    check_token(w, r, i, (int64_t)row->pages[i / PAGE] * PAGE + i % PAGE);
}

/* ---- checks ---- */

static void check_always(world *w) {
  int32_t owners[PAGES];
  count_owners(owners, &w->t);
  int64_t shared = 0;
  for (int32_t p = 0; p < PAGES; p++) {
    shared += owners[p] > 1;
    if (pkv_pool_refcount(w->pool, p) != owners[p])
      WRONG(w, "page %d has %d owners, expected %d", p, pkv_pool_refcount(w->pool, p), owners[p]);
  }
  const int64_t in_use = PAGES - free_pages(owners);
  if (in_use > w->t.peak) w->t.peak = in_use;
  pkv_pool_stats s;
  pkv_pool_get_stats(&s, w->pool);
  if (s.pages_total != PAGES || s.pages_free + s.pages_in_use != s.pages_total ||
      s.pages_in_use != in_use || s.pages_shared != shared || s.copies != w->t.copies ||
      s.peak_in_use < w->t.peak || s.peak_in_use > PAGES)
    WRONG(w, "free %lld, in use %lld of %lld, shared %lld, copies %lld; expected %lld, %lld, %lld",
          (long long)s.pages_free, (long long)s.pages_in_use, (long long)s.pages_total,
          (long long)s.pages_shared, (long long)s.copies, (long long)in_use, (long long)shared,
          (long long)w->t.copies);
  for (int r = 0; r < ROWS; r++) {
    const twin_row *row = &w->t.rows[r];
    if (pkv_table_seq_len(w->table, r) != row->length)
      WRONG(w, "row %d holds %d, expected %d", r, pkv_table_seq_len(w->table, r), row->length);
    const int32_t *pages = pkv_table_row(w->table, r);
    for (int32_t i = 0; i < MAX_PAGES; i++) {
      const int32_t expected = i < pages_of(row->length) ? row->pages[i] : -1;
      if (pages[i] != expected)
        WRONG(w, "row %d entry %d is page %d, expected %d", r, i, pages[i], expected);
    }
  }
  check_row_contents(w, below(w, ROWS));
}

static void check_all(world *w) {
  for (int r = 0; r < ROWS; r++)
    check_row_contents(w, r);
  bool listed[PAGES] = {false};
  const pkv_pool *p = w->pool;
  if (p->fresh < 0 || p->fresh > PAGES || p->free_count < 0 || p->free_count > p->fresh)
    WRONG(w, "fresh %lld, free list %lld", (long long)p->fresh, (long long)p->free_count);
  for (int64_t i = 0; i < p->free_count; i++) {
    const int32_t page = p->free_ids[i];
    if (page < 0 || page >= p->fresh || listed[page] || p->refs[page] != 0)
      WRONG(w, "free list entry %lld is page %d", (long long)i, page);
    listed[page] = true;
  }
}

/* ---- operations; each returns whether the library accepted it ---- */

static bool expect(world *w, pkv_status got, pkv_status expected, const char *what) {
  if (got != expected)
    WRONG(w, "%s: %s, expected %s (%s)", what, pkv_status_name(got), pkv_status_name(expected),
          got == PKV_OK ? "" : err.text);
  return got == PKV_OK;
}

static bool op_alloc(world *w) {
  int32_t owners[PAGES], ids[6];
  count_owners(owners, &w->t);
  const int32_t n = below(w, 5);
  if (w->t.held_count + n > HELD) return false;
  const pkv_status expected = n <= free_pages(owners) ? PKV_OK : PKV_E_NO_PAGES;
  if (!expect(w, pkv_pool_alloc(ids, w->pool, n, &err), expected, "alloc")) return false;
  for (int32_t i = 0; i < n; i++) {
    if (ids[i] < 0 || ids[i] >= PAGES || owners[ids[i]] != 0) WRONG(w, "alloc gave %d", ids[i]);
    owners[ids[i]]++;
    w->t.held[w->t.held_count++] = ids[i];
    for (int64_t s = 0; s < PAGE; s++)
      write_token(w, ids[i] * PAGE + s, w->next_stamp++);
  }
  return true;
}

/* Random ids, mostly ones in use. */
static int32_t random_ids(world *w, int32_t *ids, int32_t most, const int32_t owners[PAGES]) {
  const int32_t n = below(w, most + 1);
  for (int32_t i = 0; i < n; i++) {
    ids[i] = below(w, PAGES);
    for (int k = 0; k < 20 && owners[ids[i]] == 0; k++)
      ids[i] = below(w, PAGES);
    if (below(w, 60) == 0) ids[i] = below(w, 2) ? -1 - below(w, 3) : PAGES + below(w, 3);
  }
  return n;
}

static bool op_retain(world *w) {
  int32_t owners[PAGES], ids[5];
  count_owners(owners, &w->t);
  const int32_t n = random_ids(w, ids, 4, owners);
  if (w->t.held_count + n > HELD) return false;
  pkv_status expected = PKV_OK;
  for (int32_t i = 0; i < n && expected == PKV_OK; i++)
    expected = ids[i] < 0 || ids[i] >= PAGES ? PKV_E_RANGE
               : owners[ids[i]] == 0         ? PKV_E_STATE
                                             : PKV_OK;
  if (!expect(w, pkv_pool_retain(w->pool, ids, n, &err), expected, "retain")) return false;
  for (int32_t i = 0; i < n; i++)
    w->t.held[w->t.held_count++] = ids[i];
  return true;
}

/* Gives back some of what the test holds; now and then one more than a page has owners. */
static bool op_release(world *w) {
  int32_t owners[PAGES], ids[8], at[8];
  count_owners(owners, &w->t);
  int32_t n = below(w, 6), bad = 0;
  if (n > w->t.held_count) n = w->t.held_count;
  for (int32_t i = 0; i < n; i++) { /* distinct places: the first n of a partial shuffle */
    at[i] = i + below(w, w->t.held_count - i);
    const int32_t page = w->t.held[at[i]];
    w->t.held[at[i]] = w->t.held[i];
    w->t.held[i] = page;
    ids[i] = page;
  }
  if (n > 0 && below(w, 8) == 0) {
    const int32_t page = ids[below(w, n)];
    int32_t times = owners[page];
    for (int32_t i = 0; i < n; i++)
      times -= ids[i] == page;
    if (n + times + 1 <= 8) /* the page stands there once more than it has owners */
      for (bad = 1; times >= 0; times--)
        ids[n++] = page;
  }
  const pkv_status expected = bad ? PKV_E_STATE : PKV_OK;
  if (!expect(w, pkv_pool_release(w->pool, ids, n, &err), expected, "release")) return false;
  w->t.held_count -= n;
  memmove(w->t.held, w->t.held + n, (size_t)w->t.held_count * sizeof w->t.held[0]);
  return true;
}

static bool op_extend(world *w) {
  const int r = below(w, ROWS);
  twin_row *row = &w->t.rows[r];
  const int32_t n = below(w, 10) == 0 ? below(w, 40) : below(w, 7), old = row->length;
  int32_t owners[PAGES];
  count_owners(owners, &w->t);
  const int32_t have = pages_of(old), need = pages_of(old + n);
  const bool copy = n > 0 && old % PAGE != 0 && owners[row->pages[have - 1]] > 1;
  pkv_status expected = PKV_OK;
  if (n > 0 && old + n > MAX_TOKENS)
    expected = PKV_E_LIMIT;
  else if (need - have + copy > free_pages(owners))
    expected = PKV_E_NO_PAGES;
  if (!expect(w, pkv_table_extend(w->table, r, n, &err), expected, "extend")) return false;
  const int32_t *pages = pkv_table_row(w->table, r);
  w->t.copies += copy;
  /* Old pages stay, but for a copied last one; new ones were free. */
  for (int32_t i = have - copy; i < need; i++) {
    if (pages[i] < 0 || pages[i] >= PAGES || owners[pages[i]] != 0)
      WRONG(w, "extend: row %d entry %d became page %d, which had owners", r, i, pages[i]);
    owners[pages[i]]++;
    row->pages[i] = pages[i];
  }
  row->length = old + n;
  int64_t slots[MAX_TOKENS];
  expect(w, pkv_table_slots(slots, w->table, r, old, n, &err), PKV_OK, "slots");
  for (int32_t i = 0; i < n; i++) {
    const int32_t at = old + i;
    if (slots[i] != (int64_t)row->pages[at / PAGE] * PAGE + at % PAGE)
      WRONG(w, "slot of row %d token %d is %lld", r, at, (long long)slots[i]);
    row->stamps[at] = w->next_stamp++;
    write_token(w, slots[i], row->stamps[at]);
  }
  check_row_contents(w, r);
  return true;
}

static bool op_truncate(world *w) {
  const int r = below(w, ROWS);
  twin_row *row = &w->t.rows[r];
  int32_t to = below(w, 3) == 0 ? 0 : row->length - below(w, 6);
  if (below(w, 20) == 0) to = row->length + 1 + below(w, 3);
  const pkv_status expected = to < 0 || to > row->length ? PKV_E_RANGE : PKV_OK;
  if (!expect(w, pkv_table_truncate(w->table, r, to, &err), expected, "truncate")) return false;
  row->length = to;
  return true;
}

static bool op_fork(world *w) {
  const int dst = below(w, ROWS), src = below(w, ROWS);
  twin_row *to = &w->t.rows[dst], *from = &w->t.rows[src];
  const int32_t n = from->length - below(w, 2) * below(w, from->length + 2);
  pkv_status expected = PKV_OK;
  if (to->length != 0)
    expected = PKV_E_STATE;
  else if (n < 0 || n > from->length)
    expected = PKV_E_RANGE;
  if (!expect(w, pkv_table_fork(w->table, dst, src, n, &err), expected, "fork")) return false;
  if (dst != src) *to = *from;
  to->length = n;
  return true;
}

/* From pages that the test holds, or from those of another row. */
static bool op_attach(world *w) {
  const int dst = below(w, ROWS);
  twin_row *to = &w->t.rows[dst];
  int32_t owners[PAGES], pages[MAX_PAGES + 1];
  count_owners(owners, &w->t);
  const int32_t count = random_ids(w, pages, 4, owners);
  int32_t tokens = count * PAGE - (count > 0 ? below(w, PAGE) : 0);
  if (below(w, 20) == 0) tokens += below(w, 2) ? PAGE : -PAGE;
  pkv_status expected = PKV_OK;
  if (to->length != 0)
    expected = PKV_E_STATE;
  else if (tokens < 0 || pages_of(tokens) != count)
    expected = PKV_E_INVALID;
  for (int32_t i = 0; i < count && expected == PKV_OK; i++)
    expected = pages[i] < 0 || pages[i] >= PAGES ? PKV_E_RANGE
               : owners[pages[i]] == 0           ? PKV_E_STATE
                                                 : PKV_OK;
  if (!expect(w, pkv_table_attach(w->table, dst, pages, count, tokens, &err), expected, "attach"))
    return false;
  to->length = tokens;
  for (int32_t i = 0; i < count; i++)
    to->pages[i] = pages[i];
  for (int32_t i = 0; i < tokens; i++) { /* whatever stands there is now the row's */
    uint64_t x;
    memcpy(&x, vector(&w->caches[0], 0, (int64_t)pages[i / PAGE] * PAGE + i % PAGE, 0), sizeof x);
    to->stamps[i] = x / 16;
  }
  return true;
}

static bool op_slots(world *w) {
  const int r = below(w, ROWS);
  const twin_row *row = &w->t.rows[r];
  int64_t slots[MAX_TOKENS + 8];
  const int32_t first = below(w, row->length + 1), n = below(w, row->length - first + 2);
  const pkv_status expected = first + n <= row->length ? PKV_OK : PKV_E_RANGE;
  if (!expect(w, pkv_table_slots(slots, w->table, r, first, n, &err), expected, "slots"))
    return false;
  for (int32_t i = 0; i < n; i++)
    check_token(w, r, first + i, slots[i]);
  return true;
}

static const struct {
  const char *name;
  bool (*run)(world *w);
  int weight;
} operations[] = {
    {"alloc", op_alloc, 6},    {"retain", op_retain, 6},      {"release", op_release, 14},
    {"extend", op_extend, 34}, {"truncate", op_truncate, 18}, {"fork", op_fork, 10},
    {"attach", op_attach, 6},  {"slots", op_slots, 6},
};
#define OPERATIONS ((int)(sizeof operations / sizeof operations[0]))

static void run_world(world *w, int64_t steps, test_alloc *ta) {
  pkv_rng_init(&w->rng, w->seed);
  w->next_stamp = 1;
  for (int l = 0; l < LAYERS; l++)
    assert_int_equal(pkv_pool_cache(&w->caches[l], w->pool, l, &err), PKV_OK);
  for (int64_t slot = 0; slot < PAGES * PAGE; slot++)
    write_token(w, slot, w->next_stamp++);
  const int64_t calls = test_alloc_calls(ta);
  for (w->step = 0; w->step < steps; w->step++) {
    int32_t pick = below(w, 100);
    int o = 0;
    while (pick >= operations[o].weight)
      pick -= operations[o++].weight;
    if (operations[o].run(w))
      w->done[o]++;
    else
      w->refused[o]++;
    check_always(w);
    if (w->step % 1000 == 0) check_all(w);
  }
  assert_int_equal(test_alloc_calls(ta) - calls, 0); /* the step path allocates nothing */
  check_all(w);
  for (int o = 0; o < OPERATIONS; o++) {
    print_message("  %-8s done %8lld, refused or idle %8lld\n", operations[o].name,
                  (long long)w->done[o], (long long)w->refused[o]);
    assert_true(w->done[o] > steps / 500); /* each operation really happened, */
    assert_true(w->refused[o] > 0);        /* and each was refused */
  }
  print_message("  %s: %lld steps, %lld copies, peak %lld of %d pages\n", w->name, (long long)steps,
                (long long)w->t.copies, (long long)w->t.peak, PAGES);
  assert_true(w->t.copies > steps / 500);
  assert_int_equal(w->t.peak, PAGES);
}

/* Everything goes back: rows by the table, the rest by the test. */
static void end_world(world *w) {
  pkv_pool_stats s;
  pkv_table_destroy(w->table);
  assert_int_equal(pkv_pool_release(w->pool, w->t.held, w->t.held_count, &err), PKV_OK);
  pkv_pool_get_stats(&s, w->pool);
  assert_int_equal(s.pages_free, PAGES);
  assert_int_equal(s.pages_in_use, 0);
  assert_int_equal(s.pages_shared, 0);
  pkv_pool_destroy(w->pool);
}

static void owned(const char *name, pkv_layout layout, uint64_t seed, int64_t steps) {
  static world w;
  memset(&w, 0, sizeof w);
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator a = test_alloc_allocator(&ta);
  pkv_pool_options o = PKV_POOL_OPTIONS_INIT;
  o.dtype = PKV_DTYPE_FP8_E4M3; /* a vector of 8 is then one stamp */
  o.layout = layout;
  o.layers = LAYERS;
  o.kv_heads = HEADS;
  o.head_dim = DIM;
  o.page_tokens = PAGE;
  o.pages = PAGES;
  o.allocator = &a;
  w.name = name;
  w.seed = seed;
  assert_int_equal(pkv_pool_create(&w.pool, &o, &err), PKV_OK);
  assert_int_equal(pkv_table_create(&w.table, w.pool, ROWS, MAX_PAGES, &a, &err), PKV_OK);
  run_world(&w, steps, &ta);
  end_world(&w);
  test_alloc_finish(&ta);
}

static void owned_hnd(void **state) {
  (void)state;
  owned("HND", PKV_LAYOUT_HND, 1, 1000000);
}

static void owned_nhd(void **state) {
  (void)state;
  owned("NHD", PKV_LAYOUT_NHD, 2, 200000);
}

/* K and V interleaved head by head, odd strides, gaps that nobody may touch. */
static void wrapped_interleaved(void **state) {
  (void)state;
  enum { KV = 9, HEAD = 19, TOKEN = 37, PAGE_STRIDE = 151, LAYER = PAGES * PAGE_STRIDE + 5 };
  static unsigned char buffer[LAYERS * LAYER];
  static bool owned_byte[LAYERS * LAYER];
  static world w;
  memset(&w, 0, sizeof w);
  memset(buffer, 0xee, sizeof buffer);
  test_alloc ta;
  test_alloc_init(&ta);
  const pkv_allocator a = test_alloc_allocator(&ta);
  pkv_cache caches[LAYERS];
  for (int l = 0; l < LAYERS; l++) {
    pkv_cache c = PKV_CACHE_INIT;
    c.dtype = PKV_DTYPE_FP8_E4M3;
    c.k = buffer + l * LAYER;
    c.v = buffer + l * LAYER + KV;
    c.k_page_stride = c.v_page_stride = PAGE_STRIDE;
    c.k_token_stride = c.v_token_stride = TOKEN;
    c.k_head_stride = c.v_head_stride = HEAD;
    c.pages = PAGES;
    c.page_tokens = PAGE;
    c.kv_heads = HEADS;
    c.head_dim = DIM;
    caches[l] = c;
  }
  w.name = "wrapped";
  w.seed = 3;
  assert_int_equal(pkv_pool_wrap(&w.pool, caches, LAYERS, &a, &err), PKV_OK);
  assert_int_equal(pkv_table_create(&w.table, w.pool, ROWS, MAX_PAGES, &a, &err), PKV_OK);
  run_world(&w, 200000, &ta);
  for (int l = 0; l < LAYERS; l++)
    for (int64_t slot = 0; slot < PAGES * PAGE; slot++)
      for (int v = 0; v < 2; v++)
        for (int h = 0; h < HEADS; h++)
          memset(owned_byte + (vector(&w.caches[l], v, slot, h) - buffer), 1, DIM);
  for (size_t i = 0; i < sizeof buffer; i++)
    if (!owned_byte[i] && buffer[i] != 0xee) fail_msg("byte %zu between vectors was written", i);
  end_world(&w);
  test_alloc_finish(&ta);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(owned_hnd),
      cmocka_unit_test(owned_nhd),
      cmocka_unit_test(wrapped_interleaved),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
