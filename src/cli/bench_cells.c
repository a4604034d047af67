/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_cells.h"

#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "base/text.h"
#include "pkv/trace.h"

#define MAX_ROWS   BENCH_MAX_ROWS
#define MAX_LENGTH BENCH_MAX_LENGTH

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
};
#define BUILTINS ((int32_t)(sizeof table / sizeof *table))

/* Built-in `index` of those the options name; NULL when there are fewer. *bad: an unknown word. */
static const builtin *named(const bench_cell_options *o, int32_t index, const char **bad) {
  const char *word = o->names;
  *bad = NULL;
  if (word == NULL) {
    if (o->lengths != NULL || o->trace_file != NULL || o->list != NULL) return NULL;
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

/* "1024,4096x3" into lengths[MAX_ROWS]. */
static pkv_status parse_lengths(int32_t *lengths, int32_t *rows, const char *text, pkv_error *err) {
  *rows = 0;
  for (const char *at = text; *at != '\0';) {
    char word[32];
    const size_t size = strcspn(at, ",");
    int64_t length = 0, times = 1;
    PKV_CHECK(err, size > 0 && size < sizeof word, PKV_E_INVALID,
              "lengths '%s': a length like 4096 or 4096x3 expected at '%s'", text, at);
    memcpy(word, at, size);
    word[size] = '\0';
    char *x = strchr(word, 'x');
    if (x != NULL) *x = '\0';
    PKV_CHECK(err,
              pkv_parse_i64(&length, word, 0, MAX_LENGTH) &&
                  (x == NULL || pkv_parse_i64(&times, x + 1, 1, MAX_ROWS)),
              PKV_E_INVALID, "lengths '%s': '%.*s' is not 0..%d, or that times x 1..%d", text,
              (int)size, at, MAX_LENGTH, MAX_ROWS);
    PKV_CHECK(err, *rows + times <= MAX_ROWS, PKV_E_LIMIT, "lengths: more than %d rows", MAX_ROWS);
    for (int64_t i = 0; i < times; i++)
      lengths[(*rows)++] = (int32_t)length;
    at += size + (at[size] == ',');
  }
  PKV_CHECK(err, *rows > 0, PKV_E_INVALID, "lengths is empty");
  return PKV_OK;
}

/* Cells before --only: built-in ones, then those of files, --lengths, --trace. */
static pkv_status count_all(int32_t *count, const bench_cell_options *options, pkv_error *err) {
  const char *bad;
  int32_t lengths[MAX_ROWS], rows;
  *count = 0;
  if (options->lengths != NULL) PKV_TRY(parse_lengths(lengths, &rows, options->lengths, err));
  while (named(options, *count, &bad) != NULL)
    (*count)++;
  PKV_CHECK(err, bad == NULL, PKV_E_INVALID, "'%.*s' is no cell; there are " BENCH_CELL_NAMES,
            (int)strcspn(bad, ","), bad);
  if (options->list != NULL) *count += options->list->count;
  *count += (options->lengths != NULL) + (options->trace_file != NULL);
  return PKV_OK;
}

/* Where cell `index` of `count` comes from: a built-in one, one of a file, or neither. */
static void find(const builtin **cell, const bench_listed **listed, const char **name,
                 const bench_cell_options *o, int32_t index, int32_t count) {
  const char *bad;
  const int32_t after = (o->lengths != NULL) + (o->trace_file != NULL);
  const int32_t of_files = o->list != NULL ? o->list->count : 0;
  const int32_t at = index - (count - after - of_files);
  *cell = named(o, index, &bad);
  *listed = *cell == NULL && at >= 0 && at < of_files ? &o->list->cells[at] : NULL;
  *name = *cell != NULL                                 ? (*cell)->name
          : *listed != NULL                             ? (*listed)->name
          : o->trace_file != NULL && index == count - 1 ? "trace_file"
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

static pkv_status batch_alloc(bench_batch *b, const int32_t *lengths, int32_t rows,
                              int32_t page_tokens, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  b->rows = rows;
  b->max_pages = 1;
  for (int32_t row = 0; row < rows; row++) {
    const int32_t pages = (lengths[row] + page_tokens - 1) / page_tokens;
    if (pages > b->max_pages) b->max_pages = pages;
    b->pages += pages;
    b->tokens += lengths[row];
  }
  b->lengths = pkv_alloc_zeroed(&a, (size_t)rows, sizeof(int32_t));
  b->ids = pkv_alloc_zeroed(&a, (size_t)rows * (size_t)b->max_pages, sizeof(int32_t));
  PKV_CHECK(err, b->lengths && b->ids, PKV_E_NOMEM, "no memory for a batch of %d rows", rows);
  memcpy(b->lengths, lengths, (size_t)rows * sizeof *lengths);
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
    const int32_t j = (int32_t)pkv_rng_below(&rng, (uint64_t)i + 1), length = b->lengths[i];
    int32_t *const x = b->ids + (size_t)i * width, *const y = b->ids + (size_t)j * width;
    b->lengths[i] = b->lengths[j];
    b->lengths[j] = length;
    memcpy(row, x, width * sizeof *row);
    memmove(x, y, width * sizeof *row);
    memcpy(y, row, width * sizeof *row);
  }
  pkv_free(&a, row, width * sizeof *row);
  return PKV_OK;
}

/* A cell of one batch; its pages are a random permutation. */
static pkv_status make_fixed(bench_cell *out, const bench_cell_options *o, const int32_t *lengths,
                             int32_t rows, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  out->batches = pkv_alloc_zeroed(&a, 1, sizeof *out->batches);
  PKV_CHECK(err, out->batches, PKV_E_NOMEM, "no memory for a cell");
  out->count = out->capacity = 1;
  bench_batch *b = out->batches;
  PKV_TRY(batch_alloc(b, lengths, rows, o->page_tokens, err));
  int32_t *order = pkv_alloc_zeroed(&a, (size_t)b->pages + 1, sizeof *order);
  PKV_CHECK(err, order, PKV_E_NOMEM, "no memory for %lld pages", (long long)b->pages);
  pkv_rng rng;
  pkv_rng_init(&rng, o->seed);
  for (int64_t i = 0; i < b->pages; i++) { /* Fisher-Yates, from the inside out */
    const int64_t j = (int64_t)pkv_rng_below(&rng, (uint64_t)i + 1);
    order[i] = order[j];
    order[j] = (int32_t)i;
  }
  int64_t next = 0;
  for (int32_t row = 0; row < rows; row++)
    for (int32_t p = 0; p < (lengths[row] + o->page_tokens - 1) / o->page_tokens; p++)
      b->ids[(int64_t)row * b->max_pages + p] = order[next++];
  pkv_free(&a, order, ((size_t)b->pages + 1) * sizeof *order);
  return o->rows_permuted ? permute_rows(b, o->seed, err) : PKV_OK;
}

/* One step of a trace; its pages become 0 .. n-1 in the order of their ids: scattered as they were.
 */
static pkv_status make_step(bench_batch *b, const pkv_trace *trace, int32_t step,
                            int32_t page_tokens, int32_t *request, int32_t *lengths,
                            pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const int64_t all = pkv_trace_pages(trace);
  const int32_t rows = pkv_trace_step(request, lengths, trace, step);
  PKV_TRY(batch_alloc(b, lengths, rows, page_tokens, err));
  int32_t *rank = pkv_alloc_zeroed(&a, (size_t)all + 1, sizeof *rank);
  PKV_CHECK(err, rank, PKV_E_NOMEM, "no memory for %lld pages", (long long)all);
  for (int pass = 0; pass < 2; pass++) {
    for (int32_t row = 0; row < rows; row++) {
      const int32_t *ids = pkv_trace_table(trace, request[row]);
      for (int32_t p = 0; p < (lengths[row] + page_tokens - 1) / page_tokens; p++) {
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
  int32_t lengths[MAX_ROWS], rows, count;
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
    return make_fixed(out, options, listed->lengths, listed->rows, err);
  }
  const char *text = cell != NULL ? cell->lengths : options->lengths;
  const bool traced = cell == NULL && options->trace_file != NULL && at == count - 1;
  if (traced || text == NULL) return make_trace(out, options, cell, err);
  PKV_TRY(parse_lengths(lengths, &rows, text, err));
  return make_fixed(out, options, lengths, rows, err);
}

void bench_cell_free(bench_cell *cell) {
  const pkv_allocator a = pkv_allocator_default();
  for (int32_t i = 0; i < cell->count; i++) {
    bench_batch *b = &cell->batches[i];
    pkv_free(&a, b->lengths, (size_t)b->rows * sizeof(int32_t));
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
