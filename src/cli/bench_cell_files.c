/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_cell_files.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

#define FILE_BYTES  ((size_t)16 << 20)
#define MOST_CELLS  4096
#define JSON_VALUES 2000000 /* commas and colons, before the parser sees them */

/* A name becomes a CSV field and a word of the command line. */
static bool good_name(const char *name) {
  const size_t size = strlen(name);
  return size > 0 && size < BENCH_NAME_BYTES && strpbrk(name, ", \t;=\"'\\") == NULL &&
         strspn(name, "-") == 0;
}

/* Room for one more cell of `count` rows, zeroed. */
static pkv_status add(bench_listed **out, bench_cell_list *list, const char *name, int32_t count,
                      pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  PKV_CHECK(err, list->count < MOST_CELLS, PKV_E_LIMIT, "more than %d cells", MOST_CELLS);
  for (int32_t i = 0; i < list->count; i++)
    PKV_CHECK(err, strcmp(list->cells[i].name, name) != 0, PKV_E_FORMAT, "cell %s comes twice",
              name);
  if (list->count == list->capacity) {
    const int32_t capacity = list->capacity > 0 ? 2 * list->capacity : 32;
    bench_listed *cells = pkv_realloc(&a, list->cells, (size_t)list->capacity * sizeof *cells,
                                      (size_t)capacity * sizeof *cells);
    PKV_CHECK(err, cells, PKV_E_NOMEM, "no memory for %d cells", capacity);
    list->cells = cells;
    list->capacity = capacity;
  }
  bench_listed *cell = &list->cells[list->count];
  memset(cell, 0, sizeof *cell);
  cell->rows = pkv_alloc_zeroed(&a, (size_t)count, sizeof(bench_row));
  PKV_CHECK(err, cell->rows, PKV_E_NOMEM, "no memory for %d rows", count);
  cell->count = count;
  (void)snprintf(cell->name, sizeof cell->name, "%s", name);
  list->count++;
  *out = cell;
  return PKV_OK;
}

/* One line without its end, cut into words in place. */
static pkv_status text_line(bench_cell_list *list, char *line, const char *path, int64_t number,
                            bench_row *rows, pkv_error *err) {
  static const char blanks[] = " \t\r";
  const char *name = NULL;
  int32_t count = 0;
  for (char *at = line + strspn(line, blanks); *at != '\0';) {
    char *const word = at;
    at += strcspn(at, blanks);
    if (*at != '\0') *at++ = '\0';
    at += strspn(at, blanks);
    if (name == NULL) {
      if (word[0] == '#') return PKV_OK;
      name = word;
      PKV_CHECK(err, good_name(name), PKV_E_FORMAT, "%s, line %lld: '%.60s' is no name of a cell",
                path, (long long)number, name);
      continue;
    }
    pkv_error bad = {PKV_OK, NULL, {0}};
    const pkv_status status = bench_rows_word(rows, &count, word, &bad);
    if (status == PKV_OK) continue;
    return PKV_FAIL(err, status == PKV_E_LIMIT ? status : PKV_E_FORMAT, "%s, line %lld: %s", path,
                    (long long)number, bad.text);
  }
  if (name == NULL) return PKV_OK;
  PKV_CHECK(err, count > 0, PKV_E_FORMAT, "%s, line %lld: cell %s has no lengths", path,
            (long long)number, name);
  bench_listed *cell;
  PKV_TRY(add(&cell, list, name, count, err));
  memcpy(cell->rows, rows, (size_t)count * sizeof *rows);
  return PKV_OK;
}

pkv_status bench_cell_list_text(bench_cell_list *list, const char *path, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  bench_row rows[BENCH_MAX_ROWS];
  pkv_buffer text;
  pkv_buffer_init(&text, FILE_BYTES, &a);
  pkv_status status = pkv_buffer_read_file(&text, path, err);
  if (status == PKV_OK && text.data != NULL && strlen(text.data) != text.size)
    status = PKV_FAIL(err, PKV_E_FORMAT, "%s holds a zero byte", path);
  char *at = text.data;
  for (int64_t number = 1; status == PKV_OK && at != NULL; number++) {
    char *const end = strchr(at, '\n');
    if (end != NULL) *end = '\0';
    status = text_line(list, at, path, number, rows, err);
    at = end != NULL ? end + 1 : NULL;
  }
  pkv_buffer_deinit(&text);
  return status;
}

static pkv_status anchor_lengths(bench_listed *cell, const json_t *lens, const char *path,
                                 pkv_error *err) {
  for (int32_t row = 0; row < cell->count; row++) {
    const json_t *value = json_array_get(lens, (size_t)row);
    const json_int_t length = json_integer_value(value);
    PKV_CHECK(err, json_is_integer(value) && length >= 0 && length <= BENCH_MAX_LENGTH,
              PKV_E_FORMAT, "%s: cell %s: length %d is not a whole number from 0 to %d", path,
              cell->name, row, BENCH_MAX_LENGTH);
    cell->rows[row] = (bench_row){(int32_t)length, row, 0, row, 0};
  }
  return PKV_OK;
}

/* What others were measured at, as far as there is room. */
static void anchor_peers(bench_listed *cell, json_t *entry) {
  const char *name;
  json_t *peer;
  size_t used = 0;
  json_object_foreach(entry, name, peer) {
    const json_t *us = json_object_get(peer, "gpu_us");
    char text[BENCH_PEER_BYTES];
    if (!json_is_number(us) || !good_name(name)) continue;
    const int size = snprintf(text, sizeof text, "%sanchor:%s=%.2f", used > 0 ? ";" : "", name,
                              json_number_value(us));
    if (size < 0 || used + (size_t)size >= sizeof cell->peers) return;
    memcpy(cell->peers + used, text, (size_t)size + 1);
    used += (size_t)size;
  }
}

static pkv_status anchors(bench_cell_list *list, json_t *root, const char *path, pkv_error *err) {
  json_t *cells = json_object_get(root, "cells"), *entry;
  const char *name;
  PKV_CHECK(err, json_is_object(cells), PKV_E_FORMAT, "%s: no object \"cells\"", path);
  json_object_foreach(cells, name, entry) {
    const json_t *lens = json_object_get(entry, "lens");
    if (!json_is_array(lens)) continue;
    const size_t rows = json_array_size(lens);
    PKV_CHECK(err, good_name(name), PKV_E_FORMAT, "%s: '%.60s' is no name of a cell", path, name);
    PKV_CHECK(err, rows > 0 && rows <= BENCH_MAX_ROWS, PKV_E_LIMIT,
              "%s: cell %s has %zu rows, there may be 1 to %d", path, name, rows, BENCH_MAX_ROWS);
    bench_listed *cell;
    PKV_TRY(add(&cell, list, name, (int32_t)rows, err));
    PKV_TRY(anchor_lengths(cell, lens, path, err));
    anchor_peers(cell, entry);
  }
  PKV_CHECK(err, list->count > 0, PKV_E_FORMAT, "%s: no cell has \"lens\"", path);
  return PKV_OK;
}

/* Depth and number of values are bounded before the parser, which recurses, sees them. */
static pkv_status check_json(const pkv_buffer *text, const char *path, pkv_error *err) {
  int32_t depth = 0, deepest = 0, values = 0;
  for (size_t i = 0; i < text->size; i++) {
    const char c = text->data[i];
    if (c == '{' || c == '[') depth++;
    if (c == '}' || c == ']') depth--;
    if (c == ',' || c == ':') values++;
    if (depth > deepest) deepest = depth;
  }
  PKV_CHECK(err, deepest <= 64 && values <= JSON_VALUES, PKV_E_LIMIT,
            "%s: JSON of depth %d with %d values; at most 64 and %d", path, deepest, values,
            JSON_VALUES);
  return PKV_OK;
}

pkv_status bench_cell_list_anchors(bench_cell_list *list, const char *path, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_buffer text;
  json_error_t bad;
  json_t *root = NULL;
  pkv_buffer_init(&text, FILE_BYTES, &a);
  pkv_status status = pkv_buffer_read_file(&text, path, err);
  if (status == PKV_OK) status = check_json(&text, path, err);
  if (status == PKV_OK) {
    root = json_loadb(text.data, text.size, JSON_REJECT_DUPLICATES, &bad);
    status = root == NULL
                 ? PKV_FAIL(err, PKV_E_FORMAT, "%s, line %d: %.80s", path, bad.line, bad.text)
                 : anchors(list, root, path, err);
  }
  json_decref(root);
  pkv_buffer_deinit(&text);
  return status;
}

bool bench_among(const char *words, const char *name) {
  for (const char *at = words; *at != '\0';) {
    const size_t size = strcspn(at, ",");
    if (strlen(name) == size && memcmp(at, name, size) == 0) return true;
    at += size + (at[size] == ',');
  }
  return false;
}

void bench_cell_list_free(bench_cell_list *list) {
  const pkv_allocator a = pkv_allocator_default();
  for (int32_t i = 0; i < list->count; i++)
    pkv_free(&a, list->cells[i].rows, (size_t)list->cells[i].count * sizeof(bench_row));
  pkv_free(&a, list->cells, (size_t)list->capacity * sizeof *list->cells);
  memset(list, 0, sizeof *list);
}
