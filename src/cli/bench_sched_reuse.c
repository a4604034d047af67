/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_reuse.h"

#include <math.h>
#include <stdlib.h>

#include "base/sort.h"
#include "cli/bench_sched_memory.h"

#define ROWS 65536

typedef struct reuse_read {
  uint64_t key;
  double at;
} reuse_read;

typedef struct reuse_row {
  double tokens;
  int32_t end; /* of its places */
} reuse_row;

struct sched_reuse {
  int32_t parts, heads, rows, places;
  double spread, length; /* tokens of all rows */
  reuse_row *row;        /* [ROWS] */
  reuse_read *place;     /* [SCHED_REUSE_READS / heads] */
  reuse_read *read;      /* [SCHED_REUSE_READS] */
  double *gaps, *ends; /* [SCHED_REUSE_READS]: waits between two reads of a place; before the first
                            and behind the last, of places that are read twice or more */
};

pkv_status sched_reuse_init(sched_reuse **out, int32_t parts, int32_t heads, double spread,
                            pkv_error *err) {
  sched_reuse *const r = sched_alloc(1, sizeof *r);
  *out = r;
  PKV_CHECK(err, r, PKV_E_NOMEM, "no memory for the walk over a plan");
  r->parts = parts;
  r->heads = heads;
  r->spread = spread;
  r->row = sched_alloc(ROWS, sizeof *r->row);
  r->place = sched_alloc(SCHED_REUSE_READS, sizeof *r->place);
  r->read = sched_alloc(SCHED_REUSE_READS, sizeof *r->read);
  r->gaps = sched_alloc(SCHED_REUSE_READS, sizeof *r->gaps);
  r->ends = sched_alloc(SCHED_REUSE_READS, sizeof *r->ends);
  PKV_CHECK(err, r->row && r->place && r->read && r->gaps && r->ends, PKV_E_NOMEM,
            "no memory for the walk over a plan");
  return PKV_OK;
}

void sched_reuse_free(sched_reuse *r) {
  if (r == NULL) return;
  sched_free(r->row, ROWS, sizeof *r->row);
  sched_free(r->place, SCHED_REUSE_READS, sizeof *r->place);
  sched_free(r->read, SCHED_REUSE_READS, sizeof *r->read);
  sched_free(r->gaps, SCHED_REUSE_READS, sizeof *r->gaps);
  sched_free(r->ends, SCHED_REUSE_READS, sizeof *r->ends);
  sched_free(r, 1, sizeof *r);
}

void sched_reuse_begin(sched_reuse *r) {
  r->rows = r->places = 0;
  r->length = 0;
}

void sched_reuse_row(sched_reuse *r, double tokens) {
  if (r->rows == ROWS) return;
  r->row[r->rows++] = (reuse_row){tokens, r->places};
  r->length += tokens;
}

void sched_reuse_place(sched_reuse *r, uint64_t key, double at) {
  if (r->rows == 0 || (r->places + 1) * r->heads > SCHED_REUSE_READS) return;
  r->place[r->places++] = (reuse_read){key, at};
  r->row[r->rows - 1].end = r->places;
}

/* What a part takes over the fastest one, drawn from its number. */
static double slowness(const sched_reuse *r, double part) {
  const double x = sin(part * 12.9898) * 43758.5453;
  return 1 + r->spread * 2 * (x - floor(x));
}

/* When a place is read; its segment begins at `begin` and has `tokens`, parts have `part`. */
static double read_at(const sched_reuse *r, double part, double begin, double tokens, double at) {
  const double index = fmin(floor((begin + at) / part), r->parts - 1), first = index * part;
  const double start = fmax(first, begin), end = fmin(first + part, begin + tokens);
  return (first + part - end + begin + at - start) * slowness(r, index);
}

static int by_key_and_time(const void *a, const void *b) {
  const reuse_read *const x = a, *const y = b;
  if (x->key != y->key) return x->key < y->key ? -1 : 1;
  return (x->at > y->at) - (x->at < y->at);
}

/* Fills `read`, by key and time; keys of different heads differ. */
static size_t read_all(sched_reuse *r, double part) {
  size_t reads = 0;
  double begin = 0;
  for (int32_t row = 0, place = 0; row < r->rows; row++) {
    const double tokens = r->row[row].tokens;
    for (; place < r->row[row].end; place++)
      for (int32_t head = 0; head < r->heads; head++)
        r->read[reads++] =
            (reuse_read){r->place[place].key * (uint64_t)r->heads + (uint64_t)head,
                         read_at(r, part, begin + head * tokens, tokens, r->place[place].at)};
    begin += tokens * r->heads;
  }
  qsort(r->read, reads, sizeof *r->read, by_key_and_time);
  return reads;
}

/* Fills gaps and ends, sorted, of the places that are read twice or more; how many those are. */
static size_t collect(sched_reuse *r, size_t reads, double last, size_t *gaps, size_t *ends) {
  size_t places = 0;
  *gaps = *ends = 0;
  for (size_t i = 0, next; i < reads; i = next) {
    for (next = i + 1; next < reads && r->read[next].key == r->read[i].key; next++)
      r->gaps[(*gaps)++] = r->read[next].at - r->read[next - 1].at;
    if (next == i + 1) continue;
    r->ends[(*ends)++] = r->read[i].at;
    r->ends[(*ends)++] = fmax(0, last - r->read[next - 1].at);
    places++;
  }
  pkv_sort_doubles(r->gaps, *gaps);
  pkv_sort_doubles(r->ends, *ends);
  return places;
}

/* What of the waits lies beyond a window that only grows: *at of `count` are not longer. */
static double beyond(const double *waits, size_t count, double window, size_t *at, double *rest) {
  while (*at < count && waits[*at] <= window)
    *rest -= waits[(*at)++];
  return *rest - (double)(count - *at) * window;
}

static double sum_of(const double *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += values[i];
  return sum;
}

double sched_reuse_share(sched_reuse *r, double shared, double own, double l2) {
  const double part = r->length * r->heads / r->parts, last = part * (1 + 2 * r->spread);
  size_t gaps, ends, gap = 0, end = 0;
  const size_t reads = read_all(r, part), places = collect(r, reads, last, &gaps, &ends);
  if (gaps == 0) return 1;
  double gaps_rest = sum_of(r->gaps, gaps), ends_rest = sum_of(r->ends, ends), share = 0;
  for (size_t i = 0; i < gaps; i++) {
    /* a window sees nothing of a place where it lies whole within one wait of that place */
    const double window = fmin(r->gaps[i], 0.999 * last);
    const double untouched = beyond(r->gaps, gaps, window, &gap, &gaps_rest) +
                             beyond(r->ends, ends, window, &end, &ends_rest);
    const double touched = fmax(0, 1 - untouched / (last - window) / (double)places);
    const double footprint = shared * touched + own * window / last;
    share += footprint > l2 ? l2 / footprint : 1;
  }
  return share / (double)gaps;
}
