/* SPDX-License-Identifier: Apache-2.0 */
/* The cost model of `pkv bench sched --simulate` against measured steps, and its walk over a plan
   against one that goes through the parts one by one and counts every window by itself. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "cli/bench_sched_cost.h"
#include "cli/bench_sched_reuse.h"

/* Attention of one layer on an H200, route balanced. Words: groups x rows x the tokens that the
   rows of a group share + those that each has behind them. */
typedef struct measured {
  const char *words;
  double us;
} measured;

/* What the model was fitted to: h200/2026-11-30-l2.csv, -l2-more.csv, -shared.csv. */
static const measured fitted[] = {
    {"1x8x2432+32", 16.09},      {"1x32x2432+32", 42.58},     {"1x96x2432+32", 116.38},
    {"1x8x4864+32", 24.86},      {"1x32x4864+32", 75.81},     {"1x96x4864+32", 215.15},
    {"1x8x7296+32", 33.28},      {"1x32x7296+32", 109.07},    {"1x8x9984+32", 42.42},
    {"1x32x9984+32", 145.74},    {"1x8x12224+32", 50.02},     {"1x32x12224+32", 176.28},
    {"1x8x14656+32", 59.34},     {"1x32x14656+32", 211.04},   {"1x8x18304+32", 73.23},
    {"1x32x18304+32", 262.18},   {"1x8x21952+32", 86.56},     {"1x32x21952+32", 313.57},
    {"1x8x29312+32", 115.35},    {"1x32x29312+32", 418.68},   {"8x1x0+2560", 26.78},
    {"16x1x0+8192", 128.89},     {"64x1x0+10240", 607.94},    {"2x32x4992+32", 149.40},
    {"2x32x7296+32", 214.14},    {"2x32x11008+32", 319.90},   {"2x32x14656+32", 423.18},
    {"4x16x1216+32", 47.07},     {"4x16x2496+32", 85.11},     {"4x16x3648+32", 127.50},
    {"4x16x7296+32", 254.04},    {"8x12x640+32", 43.78},      {"8x12x1280+32", 70.75},
    {"8x12x1856+32", 98.05},     {"8x12x2752+32", 139.66},    {"8x12x3648+32", 182.82},
    {"1x192x2432+32", 226.55},   {"1x192x4864+32", 426.57},   {"1x192x7296+32", 625.08},
    {"1x192x9984+32", 852.45},   {"1x192x14656+32", 1252.24}, {"1x192x21952+32", 1877.07},
    {"1x384x2432+32", 446.81},   {"1x384x4864+32", 855.68},   {"1x384x9984+32", 1729.41},
    {"2x128x2432+32", 299.92},   {"2x128x4992+32", 608.78},   {"2x128x7296+32", 985.84},
    {"2x128x11008+32", 1584.24}, {"4x64x1216+32", 169.24},    {"4x64x2496+32", 340.95},
    {"4x64x3648+32", 555.48},    {"4x64x5504+32", 870.44},    {"4x64x7296+32", 1176.12},
    {"8x32x640+32", 106.07},     {"8x32x1280+32", 204.96},    {"8x32x2048+32", 389.38},
    {"8x32x2752+32", 561.86},    {"8x32x3648+32", 773.04},    {"8x100x640+32", 318.15},
    {"8x100x1280+32", 650.29},   {"8x100x2432+32", 1410.47},  {"16x16x640+32", 106.12},
    {"16x16x1216+32", 198.89},   {"1x8x4096+256", 22.83},     {"1x32x4096+256", 70.94},
    {"1x64x8192+512", 270.32},   {"1x100x10240+64", 521.39},  {"1x256x2048+256", 291.18},
    {"8x32x2048+256", 457.65},   {"8x100x10240+64", 7168.13},
};

/* Not fitted: h200/2026-11-30-l2-phase.csv, rows side by side. */
static const measured later[] = {
    {"8x30x2048+32", 271.00},
    {"8x32x2048+32", 386.98},
    {"8x33x2048+32", 273.03},
    {"8x34x2048+32", 409.04},
    {"8x36x2048+32", 333.46},
    {"8x40x2048+32", 479.40},
    {"4x60x3648+32", 442.20},
    {"4x64x3648+32", 556.09},
    {"4x66x3648+32", 462.97},
    {"4x68x3648+32", 584.69},
    {"2x128x7296+32", 1003.45},
    {"2x132x7296+32", 888.58},
    {"8x62x2048+32", 722.91},
    {"8x64x2048+32", 751.64},
    {"8x66x2048+32", 547.57},
    {"8x70x2048+32", 810.69},
    {"8x99x2432+32", 945.25},
    {"8x100x2432+32", 1400.76},
    {"8x103x2432+32", 1459.77},
    {"16x32x1216+32", 526.87},
    {"16x33x1216+32", 350.43},
    {"8x16x2752+32", 276.88},
    {"8x17x2752+32", 297.75},
    {"4x33x5504+32", 339.58},
    {"4x34x5504+32", 452.70},
    {"2x66x10240+32", 621.24},
    {"2x60x10240+32", 548.62},
    {"1x100x10240+32", 504.83},
    {"2x50x10240+32", 587.45},
    {"1x95x10240+32 1x5x10240+32", 522.15},
    {"1x70x10240+32 1x30x10240+32", 631.19},
    {"1x70x10240+32 1x20x10240+32 2x5x10240+32", 687.22},
    {"1x150x2048+32 1x120x2048+32 1x90x2048+32 1x60x2048+32 1x40x2048+32 1x20x2048+32 2x10x2048+32",
     623.64},
    {"1x80x2048+32 1x64x2048+32 1x44x2048+32 1x32x2048+32 1x20x2048+32 1x10x2048+32 2x3x2048+32",
     294.54},
    {"4x33x2048+32 4x33x2048+200", 406.13},
    {"4x32x2048+32 4x32x2048+200", 331.69},
};

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))
#define LAYER        4096.0 /* bytes of a token */

/* The rows of the words into the walk; their tokens into *load. */
static void add_rows(sched_reuse *reuse, sched_load *load, const char *words) {
  int groups, rows, prefix, own, used;
  uint64_t group = 0;
  memset(load, 0, sizeof *load);
  sched_reuse_begin(reuse);
  for (; sscanf(words, " %dx%dx%d+%d%n", &groups, &rows, &prefix, &own, &used) == 4; words += used)
    for (int g = 0; g < groups; g++, group++) {
      for (int i = 0; i < rows; i++) {
        sched_reuse_row(reuse, prefix + own);
        for (uint64_t place = 0; place < 8 && rows > 1; place++)
          sched_reuse_place(reuse, group * 8 + place, ((double)place + 0.5) / 8 * prefix);
      }
      load->rows += rows;
      load->total += (double)rows * (prefix + own);
      load->unique += (double)prefix + (double)rows * own;
      load->shared += rows > 1 ? prefix : 0;
    }
}

static void check_steps(const measured *steps, int32_t count, int32_t least, double mean,
                        double most) {
  sched_device device;
  sched_reuse *reuse;
  sched_load load;
  pkv_error err = {PKV_OK, NULL, {0}};
  int32_t within = 0;
  double sum = 0, largest = 0;
  assert_int_equal(sched_device_load(&device, "h200", &err), PKV_OK);
  assert_int_equal(sched_reuse_init(&reuse, (int32_t)device.parts, 8, device.spread, &err), PKV_OK);
  for (int32_t i = 0; i < count; i++) {
    add_rows(reuse, &load, steps[i].words);
    load.held = sched_reuse_share(reuse, load.shared * LAYER, (load.unique - load.shared) * LAYER,
                                  device.l2_mb * 1e6);
    const double us = 1e6 * sched_attention_s(&device, &sched_shapes[0], SCHED_ORDINARY, &load);
    const double off = fabs(us / steps[i].us - 1);
    sum += off;
    largest = fmax(largest, off);
    within += off <= 0.1;
  }
  print_message("%d of %d within 10 %%, mean %.1f %%, largest %.1f %%\n", (int)within, (int)count,
                100 * sum / count, 100 * largest);
  assert_true(within >= least);
  assert_true(sum / count < mean);
  assert_true(largest < most);
  sched_reuse_free(reuse);
}

static void measured_steps(void **state) {
  (void)state;
  check_steps(fitted, COUNT(fitted), 69, 0.025, 0.12);
}

static void later_steps(void **state) {
  (void)state;
  check_steps(later, COUNT(later), 32, 0.05, 0.19);
}

/* Without a walk: all is held while it fits, or while no part has two segments; then less. */
static void estimates(void **state) {
  sched_device device;
  pkv_error err = {PKV_OK, NULL, {0}};
  sched_load load = {200, 200 * 2048, 2048, 2048, -1}, same = load;
  (void)state;
  assert_int_equal(sched_device_load(&device, "h200", &err), PKV_OK);
  same.held = 1;
  const sched_shape *const shape = &sched_shapes[0];
  assert_true(sched_attention_s(&device, shape, SCHED_ORDINARY, &load) ==
              sched_attention_s(&device, shape, SCHED_ORDINARY, &same));
  load.unique = load.shared = same.unique = same.shared = 20480;
  load.total = same.total = 200 * 20480.0;
  assert_true(sched_attention_s(&device, shape, SCHED_ORDINARY, &load) >
              sched_attention_s(&device, shape, SCHED_ORDINARY, &same));
  load.rows = same.rows = 33;
  assert_true(sched_attention_s(&device, shape, SCHED_ORDINARY, &load) ==
              sched_attention_s(&device, shape, SCHED_ORDINARY, &same));
}

/* --- the walk, once more --------------------------------------------------------------------- */

enum { PARTS = 12, HEADS = 2, PLACES = 5, ROWS = 40, GROUPS = 6 };
#define SPREAD 0.04

typedef struct batch {
  int32_t rows, groups, group[ROWS];
  double prefix[GROUPS], tokens[ROWS], length; /* of all segments */
} batch;

static void draw(batch *b, pkv_rng *rng) {
  b->rows = 1 + (int32_t)pkv_rng_below(rng, ROWS);
  b->groups = 1 + (int32_t)pkv_rng_below(rng, GROUPS);
  b->length = 0;
  for (int32_t g = 0; g < b->groups; g++)
    b->prefix[g] = 100 + (double)pkv_rng_below(rng, 900);
  for (int32_t i = 0; i < b->rows; i++) {
    b->group[i] = (int32_t)pkv_rng_below(rng, (uint64_t)b->groups);
    b->tokens[i] = b->prefix[b->group[i]] + 1 + (double)pkv_rng_below(rng, 200);
    b->length += b->tokens[i] * HEADS;
  }
}

/* When each place is read: every part, its segments from the last one on. at[row][head][place]. */
static void follow(double at[ROWS][HEADS][PLACES], const batch *b) {
  const double part = b->length / PARTS;
  for (int32_t p = 0; p < PARTS; p++) {
    const double low = p * part, high = low + part;
    const double noise = sin(p * 12.9898) * 43758.5453;
    double time = 0, end = b->length;
    for (int32_t segment = b->rows * HEADS - 1; segment >= 0; segment--) {
      const int32_t row = segment / HEADS, head = segment % HEADS;
      const double begin = end - b->tokens[row];
      const double from = fmax(begin, low), to = fmin(end, high);
      end = begin;
      if (to <= from) continue;
      for (int32_t i = 0; i < PLACES; i++) {
        const double x = begin + (i + 0.5) / PLACES * b->prefix[b->group[row]];
        if (x >= from && x < to)
          at[row][head][i] = (time + x - from) * (1 + 2 * SPREAD * (noise - floor(noise)));
      }
      time += to - from;
    }
  }
}

/* The times of one place of a group, ascending; how many. */
static int32_t times_of(double times[ROWS], double at[ROWS][HEADS][PLACES], const batch *b,
                        int32_t group, int32_t head, int32_t place) {
  int32_t count = 0;
  for (int32_t row = 0; row < b->rows; row++) {
    if (b->group[row] != group) continue;
    int32_t k = count++;
    for (; k > 0 && times[k - 1] > at[row][head][place]; k--)
      times[k] = times[k - 1];
    times[k] = at[row][head][place];
  }
  return count;
}

/* The part of the shared places that a window sees, in the mean over where it begins. */
static double touched(double at[ROWS][HEADS][PLACES], const batch *b, double last, double window) {
  double times[ROWS], untouched = 0;
  int32_t places = 0;
  for (int32_t which = 0; which < b->groups * HEADS * PLACES; which++) {
    const int32_t n =
        times_of(times, at, b, which / PLACES / HEADS, which / PLACES % HEADS, which % PLACES);
    if (n < 2) continue;
    places++;
    for (int32_t i = 0; i <= n; i++) {
      const double from = i > 0 ? times[i - 1] : 0, to = i < n ? times[i] : last;
      untouched += fmax(0, to - from - window);
    }
  }
  return 1 - untouched / (last - window) / places;
}

static double share_by_hand(const batch *b, double shared, double own, double l2) {
  static double at[ROWS][HEADS][PLACES];
  const double last = b->length / PARTS * (1 + 2 * SPREAD);
  double times[ROWS], sum = 0;
  int32_t count = 0;
  follow(at, b);
  for (int32_t which = 0; which < b->groups * HEADS * PLACES; which++) {
    const int32_t n =
        times_of(times, at, b, which / PLACES / HEADS, which / PLACES % HEADS, which % PLACES);
    for (int32_t i = 1; i < n; i++, count++) {
      const double window = fmin(times[i] - times[i - 1], 0.999 * last);
      sum += fmin(1, l2 / fmax(1e-9, shared * touched(at, b, last, window) + own * window / last));
    }
  }
  return count > 0 ? sum / count : 1;
}

static void the_walk(void **state) {
  sched_reuse *reuse;
  pkv_error err = {PKV_OK, NULL, {0}};
  pkv_rng rng;
  (void)state;
  pkv_rng_init(&rng, 7);
  assert_int_equal(sched_reuse_init(&reuse, PARTS, HEADS, SPREAD, &err), PKV_OK);
  for (int32_t n = 0; n < 60; n++) {
    batch b;
    draw(&b, &rng);
    const double l2 = 5 + (double)pkv_rng_below(&rng, 80);
    sched_reuse_begin(reuse);
    for (int32_t i = 0; i < b.rows; i++) {
      sched_reuse_row(reuse, b.tokens[i]);
      for (int32_t place = 0; place < PLACES; place++)
        sched_reuse_place(reuse, (uint64_t)(b.group[i] * PLACES + place),
                          (place + 0.5) / PLACES * b.prefix[b.group[i]]);
    }
    const double ours = sched_reuse_share(reuse, 90, 30, l2), other = share_by_hand(&b, 90, 30, l2);
    if (fabs(ours - other) > 1e-6)
      fail_msg("batch %d, %d rows: %g, by hand %g", (int)n, (int)b.rows, ours, other);
  }
  sched_reuse_free(reuse);
}

/* More rows and places than are kept; nothing at all. */
static void limits(void **state) {
  sched_reuse *reuse;
  pkv_error err = {PKV_OK, NULL, {0}};
  (void)state;
  assert_int_equal(sched_reuse_init(&reuse, 264, 40, 0.03, &err), PKV_OK);
  sched_reuse_begin(reuse);
  sched_reuse_place(reuse, 1, 1); /* of no row */
  assert_true(sched_reuse_share(reuse, 0, 0, 1) == 1);
  for (int32_t i = 0; i < 70000; i++) {
    sched_reuse_row(reuse, 100);
    sched_reuse_place(reuse, (uint64_t)i % 3, 50);
  }
  const double share = sched_reuse_share(reuse, 1e8, 1e7, 3e7);
  assert_true(share > 0 && share <= 1);
  assert_true(sched_reuse_share(reuse, 1e8, 1e7, 6e7) >= share);
  assert_true(sched_reuse_share(reuse, 1e8, 1e7, 1e9) == 1);
  sched_reuse_free(reuse);
  sched_reuse_free(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(measured_steps), cmocka_unit_test(later_steps), cmocka_unit_test(estimates),
      cmocka_unit_test(the_walk),       cmocka_unit_test(limits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
