/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_reuse.h"

#include <math.h>
#include <string.h>

#include "base/sort.h"
#include "cli/bench_sched_memory.h"

#define PLACES 4         /* of a prefix that are looked at; 16 give the same fit */
#define READS  (1 << 17) /* of a walk at most */
#define BINS   32        /* of a table: as many waits in each */
#define TABLES 4096      /* kept, a power of two; emptied when three quarters are used */

/* Waits between two reads of one place, ascending, as means of BINS equal parts of them. */
typedef struct reuse_table {
  int32_t groups, rows; /* 0 = unused */
  float window[BINS];   /* of the layer's time */
  float touched[BINS];  /* of the prefixes' bytes, read in such a time */
} reuse_table;

struct sched_reuse {
  int32_t parts, heads, used;
  double *gaps, *ends; /* [READS], [2 * READS]: waits before a read, and before the first, after
                          the last one; times are of one segment */
  double *at;          /* [READS] of one place */
  reuse_table *tables; /* [TABLES] */
};

pkv_status sched_reuse_init(sched_reuse **out, int32_t parts, int32_t heads, pkv_error *err) {
  sched_reuse *const r = sched_alloc(1, sizeof *r);
  *out = r;
  PKV_CHECK(err, r, PKV_E_NOMEM, "no memory for the walk over a plan");
  r->parts = parts;
  r->heads = heads;
  r->gaps = sched_alloc(READS, sizeof *r->gaps);
  r->ends = sched_alloc(2 * READS, sizeof *r->ends);
  r->at = sched_alloc(READS, sizeof *r->at);
  r->tables = sched_alloc(TABLES, sizeof *r->tables);
  PKV_CHECK(err, r->gaps && r->ends && r->at && r->tables, PKV_E_NOMEM,
            "no memory for the walk over a plan");
  return PKV_OK;
}

void sched_reuse_free(sched_reuse *r) {
  if (r == NULL) return;
  sched_free(r->gaps, READS, sizeof *r->gaps);
  sched_free(r->ends, 2 * READS, sizeof *r->ends);
  sched_free(r->at, READS, sizeof *r->at);
  sched_free(r->tables, TABLES, sizeof *r->tables);
  sched_free(r, 1, sizeof *r);
}

/* When a place (0 .. 1) of a segment is read, parts being `part` segments long. */
static double read_at(const sched_reuse *r, double part, double segment, double place) {
  const double at = segment + place;
  const double first = fmin(floor(at / part), r->parts - 1) * part;
  const double start = fmax(first, segment), end = fmin(first + part, segment + 1);
  return first + part - end + at - start;
}

/* Fills gaps and ends, sorted; what both hold is in *gaps and *ends. */
static void collect(sched_reuse *r, int32_t groups, int32_t rows, double part, size_t *gaps,
                    size_t *ends) {
  *gaps = *ends = 0;
  for (int32_t g = 0; g < groups; g++)
    for (int32_t head = 0; head < r->heads; head++)
      for (int32_t place = 0; place < PLACES; place++) {
        for (int32_t i = 0; i < rows; i++)
          r->at[i] =
              read_at(r, part, ((double)g * rows + i) * r->heads + head, (place + 0.5) / PLACES);
        pkv_sort_doubles(r->at, (size_t)rows);
        for (int32_t i = 1; i < rows; i++)
          r->gaps[(*gaps)++] = r->at[i] - r->at[i - 1];
        r->ends[(*ends)++] = r->at[0];
        r->ends[(*ends)++] = part - r->at[rows - 1];
      }
  pkv_sort_doubles(r->gaps, *gaps);
  pkv_sort_doubles(r->ends, *ends);
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

/* A window sees nothing of a place where it lies whole within one wait of that place. */
static void walk(sched_reuse *r, reuse_table *out) {
  const int32_t groups = out->groups, rows = out->rows;
  const double part = (double)groups * rows * r->heads / r->parts;
  const double places = (double)groups * r->heads * PLACES;
  size_t gaps, ends, gap = 0, end = 0;
  collect(r, groups, rows, part, &gaps, &ends);
  double gaps_rest = sum_of(r->gaps, gaps), ends_rest = sum_of(r->ends, ends);
  double window_sum[BINS] = {0}, touched_sum[BINS] = {0}, count[BINS] = {0};
  for (size_t i = 0; i < gaps; i++) {
    const double window = fmin(r->gaps[i], 0.999 * part);
    const double untouched = beyond(r->gaps, gaps, window, &gap, &gaps_rest) +
                             beyond(r->ends, ends, window, &end, &ends_rest);
    const size_t bin = i * BINS / gaps;
    window_sum[bin] += window / part;
    touched_sum[bin] += fmin(1, fmax(0, 1 - untouched / (part - window) / places));
    count[bin]++;
  }
  for (size_t i = 0, last = 0; i < BINS; i++) {
    if (count[i] > 0) last = i; /* fewer waits than bins: some stand for two */
    out->window[i] = (float)(window_sum[last] / count[last]);
    out->touched[i] = (float)(touched_sum[last] / count[last]);
  }
}

static const reuse_table *table_of(sched_reuse *r, int32_t groups, int32_t rows) {
  const uint32_t hash = ((uint32_t)groups * 40503u + (uint32_t)rows) * 2654435761u;
  if (r->used > TABLES / 4 * 3) {
    memset(r->tables, 0, TABLES * sizeof *r->tables);
    r->used = 0;
  }
  for (uint32_t i = hash >> 20;; i++) {
    reuse_table *const table = &r->tables[i & (TABLES - 1)];
    if (table->groups == groups && table->rows == rows) return table;
    if (table->groups != 0) continue;
    table->groups = groups;
    table->rows = rows;
    r->used++;
    walk(r, table);
    return table;
  }
}

double sched_reuse_share(sched_reuse *r, int32_t groups, int32_t rows, double shared, double own,
                         double l2) {
  const int32_t most = READS / PLACES / r->heads;
  groups = groups < most / 2 ? groups : most / 2;
  groups = groups > 1 ? groups : 1;
  rows = rows < most / groups ? rows : most / groups;
  rows = rows > 2 ? rows : 2;
  const reuse_table *const table = table_of(r, groups, rows);
  double share = 0;
  for (int32_t i = 0; i < BINS; i++) {
    const double footprint = shared * (double)table->touched[i] + own * (double)table->window[i];
    share += footprint > l2 ? l2 / footprint : 1;
  }
  return share / BINS;
}
