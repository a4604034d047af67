/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cells of `pkv bench attention` from files: rows under a name.
 *   text   one cell a line: NAME WORD WORD ..., words as in bench_rows.h; blank lines and lines
 *          from '#' on are skipped
 *   JSON   {"cells": {NAME: {"lens": [LENGTH, ...], PEER: {"gpu_us": MICROSECONDS, ...}, ...}}}:
 *          what others were measured at; cells without "lens" are skipped
 */
#ifndef PKV_CLI_BENCH_CELL_FILES_H
#define PKV_CLI_BENCH_CELL_FILES_H

#include <stdbool.h>

#include "base/alloc.h"
#include "cli/bench_rows.h"

#define BENCH_NAME_BYTES 48
#define BENCH_PEER_BYTES 768

typedef struct bench_listed {
  char name[BENCH_NAME_BYTES];
  char peers[BENCH_PEER_BYTES]; /* "anchor:PEER=MICROSECONDS;...", of another run; or "" */
  int32_t count;
  bench_row *rows; /* [count] */
} bench_listed;

typedef struct bench_cell_list {
  bench_listed *cells; /* [count] of [capacity] */
  int32_t count, capacity;
} bench_cell_list;

/* Both add to a zeroed or filled list; E_FORMAT and E_LIMIT name file, line or cell. Free the list
   also after a failure. */
pkv_status bench_cell_list_text(bench_cell_list *list, const char *path, pkv_error *err);
pkv_status bench_cell_list_anchors(bench_cell_list *list, const char *path, pkv_error *err);
/* Whether `name` is one of the words, which are separated by commas. */
bool bench_among(const char *words, const char *name);
void bench_cell_list_free(bench_cell_list *list);

#endif
