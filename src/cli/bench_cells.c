/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_cells.h"

#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "base/text.h"
#include "cli/bench_mooncake.h"
#include "pkv/trace.h"

typedef struct builtin {
  const char *name;
  const char *lengths; /* fixed lengths, or NULL: a trace */
  pkv_trace_kind kind;
  int32_t active, steps; /* steps the seed measured */
  bool usual;            /* part of a run that names no cells */
} builtin;

/* 16 rows between 1K and 64K, mixed so that neighbours differ. */
#define MIXED                                                                                      \
  "1024,65536,2048,24576,4096,16384,1500,32768,8192,3000,49152,1024,12288,6000,2048,40000"

static const builtin table[] = {
    {"1row_1k", "1024", PKV_TRACE_BUCKETED, 0, 0, true},
    {"1row_4k", "4096", PKV_TRACE_BUCKETED, 0, 0, true},
    {"1row_16k", "16384", PKV_TRACE_BUCKETED, 0, 0, true},
    {"1row_64k", "65536", PKV_TRACE_BUCKETED, 0, 0, true},
    {"16rows_mixed", MIXED, PKV_TRACE_BUCKETED, 0, 0, true},
    {"b1_bucketed", NULL, PKV_TRACE_BUCKETED, 1, 64, true},
    {"b4_bimodal", NULL, PKV_TRACE_BIMODAL, 4, 48, true},
    {"b8_bimodal", NULL, PKV_TRACE_BIMODAL, 8, 48, true},
    {"b8_uniform", NULL, PKV_TRACE_UNIFORM, 8, 48, true},
    {"b8_zipf", NULL, PKV_TRACE_ZIPF, 8, 48, true},
    {"b8_bucketed", NULL, PKV_TRACE_BUCKETED, 8, 48, false},
    {"b8_homogeneous", NULL, PKV_TRACE_HOMOGENEOUS, 8, 48, false},
    {"shared_64x8k", "1x64x8192+512", PKV_TRACE_BUCKETED, 0, 0, false},
    {"shared_8x32x2k", "8x32x2048+128", PKV_TRACE_BUCKETED, 0, 0, false},
    {"shared_tree", "1024/8x8x1024+256", PKV_TRACE_BUCKETED, 0, 0, false},
};
#define BUILTINS ((int32_t)(sizeof table / sizeof *table))

/* Built-in `index` of those the options name; NULL when there are fewer. *bad: an unknown word. */
static const builtin *named(const bench_cell_options *o, int32_t index, const char **bad) {
  const char *word = o->names;
  *bad = NULL;
  if (word == NULL) {
    if (o->lengths != NULL || o->trace_file != NULL || o->mooncake != NULL || o->list != NULL)
      return NULL;
    for (int32_t i = 0; i < BUILTINS; i++)
      if (table[i].usual && index-- == 0) return &table[i];
    return NULL;
  }
  while (*word != '\0') {
    const size_t length = strcspn(word, ",");
    const builtin *found = NULL;
    for (int32_t i = 0; i < BUILTINS && found == NULL; i++)
      if (strlen(table[i].name) == length && memcmp(table[i].name, word, length) == 0)
        found = &table[i];
    if (found == NULL) {
      *bad = word;
      return NULL;
    }
    if (index-- == 0) return found;
    word += length + (word[length] == ',');
  }
  return NULL;
}

/* Words with commas between them into rows[BENCH_MAX_ROWS]. */
static pkv_status parse_rows(bench_row *rows, int32_t *count, const char *text, pkv_error *err) {
  *count = 0;
  for (const char *at = text; *at != '\0';) {
    char word[64];
    const size_t size = strcspn(at, ",");
    PKV_CHECK(err, size > 0 && size < sizeof word, PKV_E_INVALID,
              "lengths '%s': a length like 4096 or 4096x3 expected at '%s'", text, at);
    memcpy(word, at, size);
    word[size] = '\0';
    PKV_TRY(bench_rows_word(rows, count, word, err));
    at += size + (at[size] == ',');
  }
  PKV_CHECK(err, *count > 0, PKV_E_INVALID, "lengths is empty");
  return PKV_OK;
}

/* Cells of --lengths, --trace and --mooncake: in this order behind all others. */
static int32_t behind(const bench_cell_options *o) {
  return (o->lengths != NULL) + (o->trace_file != NULL) + (o->mooncake != NULL);
}

/* Cells before --only: built-in ones, then those of files, then those behind. */
static pkv_status count_all(int32_t *count, const bench_cell_options *options, pkv_error *err) {
  const char *bad;
  bench_row rows[BENCH_MAX_ROWS];
  int32_t many;
  *count = 0;
  if (options->lengths != NULL) PKV_TRY(parse_rows(rows, &many, options->lengths, err));
  while (named(options, *count, &bad) != NULL)
    (*count)++;
  PKV_CHECK(err, bad == NULL, PKV_E_INVALID, "'%.*s' is no cell; there are " BENCH_CELL_NAMES,
            (int)strcspn(bad, ","), bad);
  if (options->list != NULL) *count += options->list->count;
  *count += behind(options);
  return PKV_OK;
}

/* Cell `index` of `count` is that of --mooncake, which comes last. */
static bool is_mooncake(const bench_cell_options *o, int32_t index, int32_t count) {
  return o->mooncake != NULL && index == count - 1;
}

static bool is_trace(const bench_cell_options *o, int32_t index, int32_t count) {
  return o->trace_file != NULL && index == count - 1 - (o->mooncake != NULL);
}

/* Where cell `index` of `count` comes from: a built-in one, one of a file, or neither. */
static void find(const builtin **cell, const bench_listed **listed, const char **name,
                 const bench_cell_options *o, int32_t index, int32_t count) {
  const char *bad;
  const int32_t of_files = o->list != NULL ? o->list->count : 0;
  const int32_t at = index - (count - behind(o) - of_files);
  *cell = named(o, index, &bad);
  *listed = *cell == NULL && at >= 0 && at < of_files ? &o->list->cells[at] : NULL;
  *name = *cell != NULL                  ? (*cell)->name
          : *listed != NULL              ? (*listed)->name
          : is_mooncake(o, index, count) ? "mooncake"
          : is_trace(o, index, count)    ? "trace_file"
                                         : "lengths";
}

static bool wanted(const bench_cell_options *o, int32_t index, int32_t count) {
  const builtin *cell;
  const bench_listed *listed;
  const char *name;
  find(&cell, &listed, &name, o, index, count);
  return o->only == NULL || bench_among(o->only, name);
}

pkv_status bench_cell_count(int32_t *count, const bench_cell_options *options, pkv_error *err) {
  int32_t all;
  *count = 0;
  PKV_TRY(count_all(&all, options, err));
  for (int32_t i = 0; i < all; i++)
    *count += wanted(options, i, all);
  PKV_CHECK(err, *count > 0, PKV_E_INVALID, "--only '%s' names none of the cells", options->only);
  return PKV_OK;
}

static int32_t pages_of(int32_t tokens, int32_t page_tokens) {
  return (tokens + page_tokens - 1) / page_tokens;
}

pkv_status bench_batch_alloc(bench_batch *b, int32_t rows, int32_t longest, int32_t page_tokens,
                             pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  b->rows = rows;
  b->max_pages = longest > 0 ? pages_of(longest, page_tokens) : 1;
  b->lengths = pkv_alloc_zeroed(&a, (size_t)rows, sizeof(int32_t));
  b->borrowed = pkv_alloc_zeroed(&a, (size_t)rows, sizeof(int32_t));
  b->ids = pkv_alloc_zeroed(&a, (size_t)rows * (size_t)b->max_pages, sizeof(int32_t));
  PKV_CHECK(err, b->lengths && b->borrowed && b->ids, PKV_E_NOMEM,
            "no memory for a batch of %d rows", rows);
  memset(b->ids, 0xff, (size_t)rows * (size_t)b->max_pages * sizeof(int32_t));
  return PKV_OK;
}

/* The rows in another order, each with its pages. */
static pkv_status permute_rows(bench_batch *b, uint64_t seed, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const size_t width = (size_t)b->max_pages;
  int32_t *row = pkv_alloc(&a, width * sizeof *row);
  PKV_CHECK(err, row, PKV_E_NOMEM, "no memory for %zu pages", width);
  pkv_rng rng;
  pkv_rng_init(&rng, seed + 7);
  for (int32_t i = b->rows - 1; i > 0; i--) {
    const int32_t j = (int32_t)pkv_rng_below(&rng, (uint64_t)i + 1);
    const int32_t length = b->lengths[i], borrowed = b->borrowed[i];
    int32_t *const x = b->ids + (size_t)i * width, *const y = b->ids + (size_t)j * width;
    b->lengths[i] = b->lengths[j];
    b->lengths[j] = length;
    b->borrowed[i] = b->borrowed[j];
    b->borrowed[j] = borrowed;
    memcpy(row, x, width * sizeof *row);
    memmove(x, y, width * sizeof *row);
    memcpy(y, row, width * sizeof *row);
  }
  pkv_free(&a, row, width * sizeof *row);
  return PKV_OK;
}

pkv_status bench_batch_scatter(bench_batch *b, const bench_cell_options *o, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  int32_t *order = pkv_alloc_zeroed(&a, (size_t)b->pages + 1, sizeof *order);
  PKV_CHECK(err, order, PKV_E_NOMEM, "no memory for %lld pages", (long long)b->pages);
  pkv_rng rng;
  pkv_rng_init(&rng, o->seed);
  for (int64_t i = 0; i < b->pages; i++) { /* Fisher-Yates, from the inside out */
    const int64_t j = (int64_t)pkv_rng_below(&rng, (uint64_t)i + 1);
    order[i] = order[j];
    order[j] = (int32_t)i;
  }
  for (int64_t i = 0; i < (int64_t)b->rows * b->max_pages; i++)
    if (b->ids[i] >= 0) b->ids[i] = order[b->ids[i]];
  pkv_free(&a, order, ((size_t)b->pages + 1) * sizeof *order);
  return o->rows_permuted ? permute_rows(b, o->seed, err) : PKV_OK;
}

/* Page p of the row is that of an earlier row: which one; or -1. */
static int32_t lender(const bench_row *row, int32_t r, int32_t p, int32_t page_tokens) {
  if (p < row->root_tokens / page_tokens) return row->root_row < r ? row->root_row : -1;
  if (p < row->group_tokens / page_tokens) return row->group_row < r ? row->group_row : -1;
  return -1;
}

/* Lengths and pages 0, 1, 2, ... row by row, shared ones as they are with the row that has them. */
static void fill_batch(bench_batch *b, const bench_row *rows, int32_t page_tokens) {
  for (int32_t r = 0; r < b->rows; r++) {
    int32_t *const ids = b->ids + (int64_t)r * b->max_pages;
    b->lengths[r] = rows[r].length;
    b->tokens += rows[r].length;
    for (int32_t p = 0; p < pages_of(rows[r].length, page_tokens); p++) {
      const int32_t from = lender(&rows[r], r, p, page_tokens);
      if (from >= 0) b->borrowed[r] = p + 1;
      ids[p] = from >= 0 ? b->ids[(int64_t)from * b->max_pages + p] : (int32_t)b->pages++;
    }
  }
}

pkv_status bench_cell_rows(bench_cell *out, const bench_cell_options *o, const bench_row *rows,
                           int32_t count, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  int32_t longest = 0;
  for (int32_t r = 0; r < count; r++)
    if (rows[r].length > longest) longest = rows[r].length;
  out->batches = pkv_alloc_zeroed(&a, 1, sizeof *out->batches);
  PKV_CHECK(err, out->batches, PKV_E_NOMEM, "no memory for a cell");
  out->count = out->capacity = 1;
  bench_batch *b = out->batches;
  PKV_TRY(bench_batch_alloc(b, count, longest, o->page_tokens, err));
  fill_batch(b, rows, o->page_tokens);
  return bench_batch_scatter(b, o, err);
}

/* One step of a trace; its pages become 0 .. n-1 in the order of their ids: scattered as they were.
 */
static pkv_status make_step(bench_batch *b, const pkv_trace *trace, int32_t step,
                            int32_t page_tokens, int32_t *request, int32_t *lengths,
                            pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const int64_t all = pkv_trace_pages(trace);
  const int32_t rows = pkv_trace_step(request, lengths, trace, step);
  int32_t longest = 0;
  for (int32_t row = 0; row < rows; row++)
    if (lengths[row] > longest) longest = lengths[row];
  PKV_TRY(bench_batch_alloc(b, rows, longest, page_tokens, err));
  for (int32_t row = 0; row < rows; row++) {
    b->lengths[row] = lengths[row];
    b->tokens += lengths[row];
    b->pages += pages_of(lengths[row], page_tokens);
  }
  int32_t *rank = pkv_alloc_zeroed(&a, (size_t)all + 1, sizeof *rank);
  PKV_CHECK(err, rank, PKV_E_NOMEM, "no memory for %lld pages", (long long)all);
  for (int pass = 0; pass < 2; pass++) {
    for (int32_t row = 0; row < rows; row++) {
      const int32_t *ids = pkv_trace_table(trace, request[row]);
      for (int32_t p = 0; p < pages_of(lengths[row], page_tokens); p++) {
        if (pass == 0)
          rank[ids[p]] = 1;
        else
          b->ids[(int64_t)row * b->max_pages + p] = rank[ids[p]];
      }
    }
    int32_t next = 0;
    for (int64_t page = 0; page < all && pass == 0; page++)
      if (rank[page]) rank[page] = next++;
  }
  pkv_free(&a, rank, ((size_t)all + 1) * sizeof *rank);
  return PKV_OK;
}

/* `steps` of the trace's first `measured` steps that have rows. */
static pkv_status make_traced(bench_cell *out, const bench_cell_options *o, const pkv_trace *trace,
                              int32_t measured, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const int32_t steps = o->steps < measured ? o->steps : measured;
  const size_t active = (size_t)pkv_trace_max_active(trace);
  int32_t *request = pkv_alloc_zeroed(&a, 2 * active, sizeof *request);
  pkv_status status = PKV_OK;
  out->batches = pkv_alloc_zeroed(&a, (size_t)steps, sizeof *out->batches);
  if (request == NULL || out->batches == NULL)
    status = PKV_FAIL(err, PKV_E_NOMEM, "no memory for %d steps", steps);
  if (out->batches != NULL) out->capacity = steps;
  int32_t step = -1, index = 0; /* index counts the steps that have rows */
  for (; status == PKV_OK && out->count < steps && index < measured; index++) {
    step = pkv_trace_next_step(trace, step + 1);
    if (step < 0) break;
    if (index != (int64_t)out->count * measured / steps) continue;
    bench_batch *b = &out->batches[out->count++];
    status = make_step(b, trace, step, o->page_tokens, request, request + active, err);
    if (status == PKV_OK && o->rows_permuted) status = permute_rows(b, o->seed, err);
  }
  pkv_free(&a, request, 2 * active * sizeof *request);
  return status;
}

static pkv_status make_trace(bench_cell *out, const bench_cell_options *o, const builtin *cell,
                             pkv_error *err) {
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
  pkv_trace *trace = NULL;
  options.page_tokens = o->page_tokens;
  options.seed = o->seed;
  if (cell != NULL) {
    options.kind = cell->kind;
    options.max_active = cell->active;
    PKV_TRY(pkv_trace_create(&trace, &options, err));
  } else {
    options.max_active = o->active;
    PKV_TRY(pkv_trace_load(&trace, o->trace_file, &options, err));
  }
  const pkv_status status = make_traced(out, o, trace, cell != NULL ? cell->steps : o->steps, err);
  pkv_trace_destroy(trace);
  return status;
}

pkv_status bench_cell_make(bench_cell *out, const bench_cell_options *options, int32_t index,
                           pkv_error *err) {
  bench_row rows[BENCH_MAX_ROWS];
  int32_t many, count;
  const builtin *cell;
  const bench_listed *listed;
  const char *name;
  memset(out, 0, sizeof *out);
  PKV_TRY(count_all(&count, options, err));
  int32_t at = 0; /* among all */
  for (int32_t left = index; at < count; at++)
    if (wanted(options, at, count) && left-- == 0) break;
  PKV_CHECK(err, at < count, PKV_E_RANGE, "there is no cell %d", index);
  find(&cell, &listed, &name, options, at, count);
  (void)snprintf(out->name, sizeof out->name, "%s", name);
  if (listed != NULL) {
    (void)snprintf(out->peers, sizeof out->peers, "%s", listed->peers);
    return bench_cell_rows(out, options, listed->rows, listed->count, err);
  }
  if (cell == NULL && is_mooncake(options, at, count))
    return bench_mooncake_cell(out, options, err);
  const char *text = cell != NULL ? cell->lengths : options->lengths;
  const bool traced = cell == NULL && is_trace(options, at, count);
  if (traced || text == NULL) return make_trace(out, options, cell, err);
  PKV_TRY(parse_rows(rows, &many, text, err));
  return bench_cell_rows(out, options, rows, many, err);
}

void bench_cell_free(bench_cell *cell) {
  const pkv_allocator a = pkv_allocator_default();
  for (int32_t i = 0; i < cell->count; i++) {
    bench_batch *b = &cell->batches[i];
    pkv_free(&a, b->lengths, (size_t)b->rows * sizeof(int32_t));
    pkv_free(&a, b->borrowed, (size_t)b->rows * sizeof(int32_t));
    pkv_free(&a, b->ids, (size_t)b->rows * (size_t)b->max_pages * sizeof(int32_t));
  }
  pkv_free(&a, cell->batches, (size_t)cell->capacity * sizeof *cell->batches);
  memset(cell, 0, sizeof *cell);
}

int64_t bench_cell_pages(const bench_cell *cell) {
  int64_t most = 0;
  for (int32_t i = 0; i < cell->count; i++)
    if (cell->batches[i].pages > most) most = cell->batches[i].pages;
  return most;
}

bool bench_cell_shares(const bench_cell *cell) {
  for (int32_t i = 0; i < cell->count; i++)
    for (int32_t row = 0; row < cell->batches[i].rows; row++)
      if (cell->batches[i].borrowed[row] > 0) return true;
  return false;
}
