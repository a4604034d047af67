/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_mooncake.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "cli/bench_sched_work.h"

/* Blocks that two requests have in common from the start on. */
static int32_t common_blocks(const sched_work *w, const sched_job *a, const sched_job *b) {
  const uint64_t *const x = w->hashes + a->first_hash, *const y = w->hashes + b->first_hash;
  const int32_t most = a->hashes < b->hashes ? a->hashes : b->hashes;
  int32_t n = 0;
  while (n < most && x[n] == y[n])
    n++;
  return n;
}

/* Prompt, and half of the output. */
static int32_t length_of(const sched_job *job) {
  return job->prompt + job->output / 2;
}

/* Row r's pages: those of the earlier row with which it has most in common, then its own. */
static void fill_row(bench_batch *b, const sched_work *w, const sched_job *jobs, int32_t r,
                     int32_t page_tokens) {
  int32_t *const ids = b->ids + (int64_t)r * b->max_pages;
  const int32_t pages = (b->lengths[r] + page_tokens - 1) / page_tokens;
  int32_t lender = 0, blocks = 0;
  for (int32_t other = 0; other < r; other++) {
    const int32_t n = common_blocks(w, &jobs[other], &jobs[r]);
    if (n > blocks) lender = other;
    if (n > blocks) blocks = n;
  }
  b->borrowed[r] = blocks * (w->chunk / page_tokens);
  if (b->borrowed[r] > 0)
    memcpy(ids, b->ids + (int64_t)lender * b->max_pages, (size_t)b->borrowed[r] * sizeof *ids);
  for (int32_t p = b->borrowed[r]; p < pages; p++)
    ids[p] = (int32_t)b->pages++;
}

static pkv_status fill_batch(bench_batch *b, const sched_work *w, int32_t first,
                             const bench_cell_options *o, pkv_error *err) {
  const sched_job *const jobs = w->jobs + first;
  int32_t longest = 0;
  for (int32_t r = 0; r < o->active; r++)
    if (length_of(&jobs[r]) > longest) longest = length_of(&jobs[r]);
  PKV_TRY(bench_batch_alloc(b, o->active, longest, o->page_tokens, err));
  for (int32_t r = 0; r < o->active; r++) {
    b->lengths[r] = length_of(&jobs[r]);
    b->tokens += b->lengths[r];
    fill_row(b, w, jobs, r, o->page_tokens);
  }
  return bench_batch_scatter(b, o, err);
}

static pkv_status fill_cell(bench_cell *out, const sched_work *w, const bench_cell_options *o,
                            pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const int32_t places = w->count - o->active + 1;
  PKV_CHECK(err, w->chunk % o->page_tokens == 0, PKV_E_INVALID,
            "pages of %d tokens do not fill a block of %d", o->page_tokens, w->chunk);
  PKV_CHECK(err, places > 0, PKV_E_INVALID, "%s has %d requests, %d were asked for", o->mooncake,
            w->count, o->active);
  out->batches = pkv_alloc_zeroed(&a, (size_t)o->steps, sizeof *out->batches);
  PKV_CHECK(err, out->batches, PKV_E_NOMEM, "no memory for %d steps", o->steps);
  out->capacity = o->steps;
  while (out->count < o->steps) { /* counted before it is filled: what it holds is freed then */
    const int32_t first = (int32_t)((int64_t)out->count * places / o->steps);
    PKV_TRY(fill_batch(&out->batches[out->count++], w, first, o, err));
  }
  return PKV_OK;
}

pkv_status bench_mooncake_cell(bench_cell *out, const bench_cell_options *options, pkv_error *err) {
  sched_work work;
  PKV_TRY(sched_work_load(&work, options->mooncake, 0, err));
  work.name[strcspn(work.name, ". ")] = '\0';
  (void)snprintf(out->name, sizeof out->name, "%.32s_%d", work.name, options->active);
  const pkv_status status = fill_cell(out, &work, options, err);
  sched_work_free(&work);
  return status;
}
