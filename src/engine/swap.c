/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages of preempted requests in pinned host memory, of an engine on a device.
 *
 * Who loses its pages computes them again later, or has them copied to the host and back, whichever
 * is faster: a page's time is measured when the engine is made, a token's is that of the fastest
 * step so far that computed a prompt. Copies are in order with the passes, so nobody waits for
 * them: a page may be given to another as soon as its copy was asked for.
 *
 * Leading pages that other running requests hold stay where they are, and are taken from the prefix
 * cache again; if they have left it by then, what is on the host is given up. A page that another
 * preempted request has on the host already is there once for both.
 */
#include "engine/engine_state.h"

#include "base/cgroup.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"

#define TIMED_PAGES 16 /* copied each way at the start */

/* ---- creation ---- */

static size_t page_bytes(const pkv_engine *e) {
  size_t bytes = 0;
  for (int32_t r = 0; r < e->rank_count; r++)
    bytes += e->swap.page_bytes[r];
  return bytes;
}

/* Pages of what was asked for, never more than the cache holds. */
static pkv_status choose_size(int64_t *pages, const pkv_engine *e, pkv_error *err) {
  const int64_t asked = e->options.swap_bytes, host = pkv_host_memory();
  pkv_pool_stats pool;
  pkv_pool_get_stats(&pool, e->pool);
  *pages = asked / (int64_t)page_bytes(e);
  if (*pages > pool.pages_total) *pages = pool.pages_total;
  PKV_CHECK(err, *pages > 0, PKV_E_RANGE, "options->swap_bytes is %lld, one page of cache has %zu",
            (long long)asked, page_bytes(e));
  PKV_CHECK(err, host == 0 || *pages < host / (int64_t)page_bytes(e), PKV_E_NOMEM,
            "options->swap_bytes is %lld, this process may use %lld bytes of the host's memory",
            (long long)asked, (long long)host);
  return PKV_OK;
}

static void free_memory(pkv_engine *e) {
  for (int32_t r = 0; r < e->rank_count; r++) {
    if (e->swap.memory[r] != NULL)
      e->ranks[r].executor->dense->host_free(e->ranks[r].executor, e->swap.memory[r]);
    e->swap.memory[r] = NULL;
  }
}

static pkv_status allocate(pkv_engine *e, int64_t pages, pkv_error *err) {
  for (int32_t r = 0; r < e->rank_count; r++)
    PKV_TRY(e->ranks[r].executor->dense->host_alloc(&e->swap.memory[r], e->ranks[r].executor,
                                                    (size_t)pages * e->swap.page_bytes[r], err));
  return PKV_OK;
}

static pkv_status reserve(pkv_engine *e, int64_t pages, pkv_error *err) {
  pkv_error why = {PKV_OK, "", ""};
  const pkv_status status = allocate(e, pages, &why);
  if (status == PKV_OK) return PKV_OK;
  free_memory(e);
  return PKV_FAIL(err, status,
                  "options->swap_bytes: %lld pages of %zu bytes in the host's memory: %s",
                  (long long)pages, page_bytes(e), why.text);
}

static void places(void *out[PKV_MAX_RANKS], const pkv_engine *e, int32_t host) {
  for (int32_t r = 0; r < e->rank_count; r++)
    out[r] = (char *)e->swap.memory[r] + (size_t)host * e->swap.page_bytes[r];
}

static pkv_status copy_out(pkv_engine *e, int32_t host, int32_t page, pkv_error *err) {
  void *at[PKV_MAX_RANKS];
  places(at, e, host);
  return pkv_device_forward_store_page(e->device, at, page, err);
}

static pkv_status copy_in(pkv_engine *e, int32_t page, int32_t host, pkv_error *err) {
  void *at[PKV_MAX_RANKS];
  places(at, e, host);
  return pkv_device_forward_load_page(e->device, page, at, err);
}

/* A page's seconds out, then the same ones' back; nobody has used the cache yet. */
static pkv_status time_pages(pkv_engine *e, int32_t count, pkv_error *err) {
  const int64_t begin = pkv_clock_ns();
  for (int32_t i = 0; i < count; i++)
    PKV_TRY(copy_out(e, i, i, err));
  PKV_TRY(pkv_device_forward_wait(e->device, err));
  const int64_t middle = pkv_clock_ns();
  for (int32_t i = 0; i < count; i++)
    PKV_TRY(copy_in(e, i, i, err));
  PKV_TRY(pkv_device_forward_wait(e->device, err));
  e->swap.out_seconds = (double)(middle - begin) * 1e-9 / count;
  e->swap.in_seconds = (double)(pkv_clock_ns() - middle) * 1e-9 / count;
  return PKV_OK;
}

static pkv_status create_lists(pkv_engine *e, int32_t pages, pkv_error *err) {
  pkv_swap *const w = &e->swap;
  w->pages = pages;
  w->free_ids = pkv_alloc_zeroed(&e->allocator, (size_t)pages, sizeof *w->free_ids);
  w->users = pkv_alloc_zeroed(&e->allocator, (size_t)pages, sizeof *w->users);
  PKV_CHECK(err, w->free_ids != NULL && w->users != NULL, PKV_E_NOMEM,
            "no memory for a list of %d pages", (int)pages);
  for (int32_t i = 0; i < pages; i++)
    w->free_ids[w->free_count++] = pages - 1 - i;
  return PKV_OK;
}

pkv_status pkv_swap_create(pkv_engine *engine, pkv_error *err) {
  pkv_engine *const e = engine;
  int64_t pages = 0;
  if (e->options.swap_bytes == 0) return PKV_OK;
  for (int32_t r = 0; r < e->rank_count; r++)
    e->swap.page_bytes[r] = pkv_device_forward_page_bytes(e->device, r);
  PKV_TRY(choose_size(&pages, e, err));
  PKV_TRY(reserve(e, pages, err));
  PKV_TRY(create_lists(e, (int32_t)pages, err));
  const int32_t timed = pages < TIMED_PAGES ? (int32_t)pages : TIMED_PAGES;
  for (int i = 0; i < 2; i++) /* the first copies are slower */
    PKV_TRY(time_pages(e, timed, err));
  e->stats.swap_bytes = (size_t)pages * page_bytes(e);
  pkv_log(PKV_LOG_INFO, "engine",
          "%lld MiB of the host's memory for pages of preempted requests; a page of %zu KiB takes "
          "%.0f us out and %.0f us in",
          (long long)(e->stats.swap_bytes >> 20), page_bytes(e) >> 10, e->swap.out_seconds * 1e6,
          e->swap.in_seconds * 1e6);
  return PKV_OK;
}

void pkv_swap_destroy(pkv_engine *engine) {
  pkv_swap *const w = &engine->swap;
  pkv_free(&engine->allocator, w->free_ids, (size_t)w->pages * sizeof *w->free_ids);
  pkv_free(&engine->allocator, w->users, (size_t)w->pages * sizeof *w->users);
  free_memory(engine);
}

/* ---- out ---- */

void pkv_swap_note_step(pkv_engine *engine, double seconds, int32_t tokens) {
  const double each = seconds / tokens;
  double *const least = &engine->swap.token_seconds;
  if (each > 0.0 && (*least == 0.0 || each < *least)) *least = each;
}

/* Leading pages that other running requests hold, too. */
static int32_t held_by_others(const pkv_engine *e, const pkv_seq *s) {
  const int32_t *const pages = pkv_table_row(e->table, s->row);
  pkv_prefix_entry entry;
  int32_t count = 0;
  while (count < s->locked && pkv_prefix_get(&entry, e->prefix, pages[count]) && entry.locks > 1)
    count++;
  return count;
}

/* Pages first .. of s that other preempted ones have on the host: one more user each. */
static void share_places(pkv_engine *e, pkv_seq *s, int32_t first, int32_t end) {
  const int32_t page = e->options.page_tokens;
  for (int32_t w = 0; w < e->waiting_count && e->prefix != NULL; w++) {
    const pkv_seq *const other = &e->seqs[e->waiting[w]];
    if (other->swapped == 0 || other == s) continue;
    int32_t common = pkv_seq_common_pages(e, s, other);
    if (common > other->swapped / page) common = other->swapped / page;
    if (common > end) common = end;
    for (int32_t i = first > other->swap_first ? first : other->swap_first; i < common; i++) {
      if (s->host[i] >= 0) continue;
      s->host[i] = other->host[i];
      e->swap.users[s->host[i]]++;
    }
  }
}

static void release(pkv_engine *e, const pkv_seq *s, int32_t first, int32_t end) {
  for (int32_t i = first; i < end; i++)
    if (s->host[i] >= 0 && --e->swap.users[s->host[i]] == 0)
      e->swap.free_ids[e->swap.free_count++] = s->host[i];
}

/* The pages of s that nobody has on the host; on failure some of them have places. */
static pkv_status copy_rest(pkv_engine *e, pkv_seq *s, int32_t first, int32_t end) {
  const int32_t *const pages = pkv_table_row(e->table, s->row);
  for (int32_t i = first; i < end; i++) {
    if (s->host[i] >= 0) continue;
    const int32_t host = e->swap.free_ids[--e->swap.free_count];
    s->host[i] = host;
    e->swap.users[host] = 1;
    PKV_TRY(copy_out(e, host, pages[i], NULL));
    e->stats.swap_pages_out++;
  }
  return PKV_OK;
}

/* Whether `copied` pages out and `loaded` in are faster than so many tokens of a prompt. */
static bool pays(const pkv_engine *e, int32_t copied, int32_t loaded, int32_t tokens) {
  return copied * e->swap.out_seconds + loaded * e->swap.in_seconds <
         tokens * e->swap.token_seconds;
}

void pkv_swap_out(pkv_engine *engine, int32_t slot) {
  pkv_engine *const e = engine;
  pkv_seq *const s = &e->seqs[slot];
  /* An echo computes its whole prompt itself. */
  if (e->swap.pages == 0 || s->computed == 0 || s->follows || s->echo) return;
  const int32_t first = held_by_others(e, s), end = pkv_pages_for(e, s->computed);
  int32_t missing = 0;
  pkv_seq_digest(e, s);
  for (int32_t i = first; i < end; i++)
    s->host[i] = -1;
  share_places(e, s, first, end);
  for (int32_t i = first; i < end; i++)
    missing += s->host[i] < 0;
  const bool fits = missing <= e->swap.free_count;
  const bool faster = pays(e, missing, end - first, s->computed - first * e->options.page_tokens);
  if (faster && !fits) e->stats.swap_full++;
  if (first == end || !faster || !fits || copy_rest(e, s, first, end) != PKV_OK) {
    release(e, s, first, end);
    return;
  }
  s->swapped = s->computed;
  s->swap_first = first;
  e->stats.swap_outs++;
}

/* ---- in ---- */

void pkv_swap_drop(pkv_engine *engine, pkv_seq *s) {
  if (s->swapped > 0) release(engine, s, s->swap_first, pkv_pages_for(engine, s->swapped));
  s->swapped = 0;
}

bool pkv_swap_continues(const pkv_engine *engine, const pkv_seq *s, int32_t pages) {
  return s->swapped > pages * engine->options.page_tokens && pages >= s->swap_first;
}

static bool load(pkv_engine *e, const pkv_seq *s, int32_t pages) {
  const int32_t *const row = pkv_table_row(e->table, s->row);
  for (int32_t i = pages; i < pkv_pages_for(e, s->swapped); i++)
    if (copy_in(e, row[i], s->host[i], NULL) != PKV_OK) return false;
  return true;
}

bool pkv_swap_in(pkv_engine *engine, pkv_seq *s, int32_t pages) {
  pkv_engine *const e = engine;
  const int32_t have = pages * e->options.page_tokens, more = s->swapped - have;
  bool loaded = pkv_engine_make_room(e, s->row, more) &&
                pkv_table_extend(e->table, s->row, more, NULL) == PKV_OK;
  if (loaded && !load(e, s, pages)) {
    loaded = false;
    (void)!pkv_table_truncate(e->table, s->row, have, NULL);
  }
  if (loaded) {
    s->computed = s->swapped;
    e->stats.swap_ins++;
    e->stats.swap_pages_in += pkv_pages_for(e, s->swapped) - pages;
  }
  pkv_swap_drop(e, s);
  return loaded;
}
