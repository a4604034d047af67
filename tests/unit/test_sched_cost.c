/* SPDX-License-Identifier: Apache-2.0 */
/* The cost model of `pkv bench sched --simulate` against measured steps, and its walk over a plan
   against one that counts every window by itself. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>

#include <cmocka.h>

#include "cli/bench_sched_cost.h"

/* Attention of one layer on an H200, route balanced: groups of rows that share `prefix` tokens and
   have `own` more each (h200/2026-11-30-l2.csv, -l2-more.csv, -shared.csv). */
static const struct measured {
  int32_t groups, rows, prefix, own;
  double us;
} measured[] = {
    {1, 8, 2432, 32, 16.09},      {1, 32, 2432, 32, 42.58},     {1, 96, 2432, 32, 116.38},
    {1, 8, 4864, 32, 24.86},      {1, 32, 4864, 32, 75.81},     {1, 96, 4864, 32, 215.15},
    {1, 8, 7296, 32, 33.28},      {1, 32, 7296, 32, 109.07},    {1, 8, 9984, 32, 42.42},
    {1, 32, 9984, 32, 145.74},    {1, 8, 12224, 32, 50.02},     {1, 32, 12224, 32, 176.28},
    {1, 8, 14656, 32, 59.34},     {1, 32, 14656, 32, 211.04},   {1, 8, 18304, 32, 73.23},
    {1, 32, 18304, 32, 262.18},   {1, 8, 21952, 32, 86.56},     {1, 32, 21952, 32, 313.57},
    {1, 8, 29312, 32, 115.35},    {1, 32, 29312, 32, 418.68},   {8, 1, 0, 2560, 26.78},
    {16, 1, 0, 8192, 128.89},     {64, 1, 0, 10240, 607.94},    {2, 32, 4992, 32, 149.40},
    {2, 32, 7296, 32, 214.14},    {2, 32, 11008, 32, 319.90},   {2, 32, 14656, 32, 423.18},
    {4, 16, 1216, 32, 47.07},     {4, 16, 2496, 32, 85.11},     {4, 16, 3648, 32, 127.50},
    {4, 16, 7296, 32, 254.04},    {8, 12, 640, 32, 43.78},      {8, 12, 1280, 32, 70.75},
    {8, 12, 1856, 32, 98.05},     {8, 12, 2752, 32, 139.66},    {8, 12, 3648, 32, 182.82},
    {1, 192, 2432, 32, 226.55},   {1, 192, 4864, 32, 426.57},   {1, 192, 7296, 32, 625.08},
    {1, 192, 9984, 32, 852.45},   {1, 192, 14656, 32, 1252.24}, {1, 192, 21952, 32, 1877.07},
    {1, 384, 2432, 32, 446.81},   {1, 384, 4864, 32, 855.68},   {1, 384, 9984, 32, 1729.41},
    {2, 128, 2432, 32, 299.92},   {2, 128, 4992, 32, 608.78},   {2, 128, 7296, 32, 985.84},
    {2, 128, 11008, 32, 1584.24}, {4, 64, 1216, 32, 169.24},    {4, 64, 2496, 32, 340.95},
    {4, 64, 3648, 32, 555.48},    {4, 64, 5504, 32, 870.44},    {4, 64, 7296, 32, 1176.12},
    {8, 32, 640, 32, 106.07},     {8, 32, 1280, 32, 204.96},    {8, 32, 2048, 32, 389.38},
    {8, 32, 2752, 32, 561.86},    {8, 32, 3648, 32, 773.04},    {8, 100, 640, 32, 318.15},
    {8, 100, 1280, 32, 650.29},   {8, 100, 2432, 32, 1410.47},  {16, 16, 640, 32, 106.12},
    {16, 16, 1216, 32, 198.89},   {1, 8, 4096, 256, 22.83},     {1, 32, 4096, 256, 70.94},
    {1, 64, 8192, 512, 270.32},   {1, 100, 10240, 64, 521.39},  {1, 256, 2048, 256, 291.18},
    {8, 32, 2048, 256, 457.65},   {8, 100, 10240, 64, 7168.13},
};
#define MEASURED ((int32_t)(sizeof measured / sizeof *measured))

static sched_load load_of(const struct measured *m) {
  const double groups = m->groups, rows = groups * m->rows;
  return (sched_load){rows, rows * (m->prefix + m->own), groups * m->prefix + rows * m->own,
                      m->rows > 1 ? groups * m->prefix : 0};
}

static void measured_steps(void **state) {
  sched_device device;
  sched_reuse *reuse;
  pkv_error err = {0};
  int32_t within = 0;
  double sum = 0, most = 0;
  (void)state;
  assert_int_equal(sched_device_load(&device, "h200", &err), PKV_OK);
  assert_int_equal(sched_reuse_init(&reuse, (int32_t)device.parts, 8, &err), PKV_OK);
  for (int32_t i = 0; i < MEASURED; i++) {
    const sched_load load = load_of(&measured[i]);
    const double us =
        1e6 * sched_attention_s(&device, &sched_shapes[0], reuse, SCHED_ORDINARY, &load);
    const double off = fabs(us / measured[i].us - 1);
    sum += off;
    most = fmax(most, off);
    within += off <= 0.1;
  }
  print_message("%d of %d within 10 %%, mean %.1f %%, largest %.1f %%\n", (int)within,
                (int)MEASURED, 100 * sum / MEASURED, 100 * most);
  assert_true(within >= 69);
  assert_true(sum / MEASURED < 0.03);
  assert_true(most < 0.13);
  sched_reuse_free(reuse);
}

/* --- the walk, once more --------------------------------------------------------------------- */

#define PARTS  10
#define HEADS  2
#define PLACES 4

/* Times at which one place of one group and head is read, in segments; ascending. */
static void reads_of(double *at, int32_t rows, double part, int32_t first, double place) {
  for (int32_t i = 0; i < rows; i++) {
    const double segment = first + (double)i * HEADS, x = segment + place;
    double low = 0; /* where this place's part begins */
    while (low + part <= x + 1e-12 && low + part < PARTS * part - 1e-9)
      low += part;
    /* a part reads its segments from the last one on, each from its begin in this part */
    const double begin = fmax(low, segment), end = fmin(low + part, segment + 1);
    at[i] = (low + part - end) + (x - begin);
  }
  for (int32_t i = 1; i < rows; i++)
    for (int32_t k = i; k > 0 && at[k - 1] > at[k]; k--) {
      const double other = at[k];
      at[k] = at[k - 1];
      at[k - 1] = other;
    }
}

/* The part of all places that is read in a window, in the mean over where it begins. */
static double touched(const double *at, int32_t places, int32_t rows, double part, double window) {
  double untouched = 0;
  for (int32_t p = 0; p < places; p++)
    for (int32_t i = 0; i <= rows; i++) {
      const double from = i > 0 ? at[p * rows + i - 1] : 0, to = i < rows ? at[p * rows + i] : part;
      untouched += fmax(0, to - from - window);
    }
  return 1 - untouched / (part - window) / places;
}

static double share_by_hand(int32_t groups, int32_t rows, double shared, double own, double l2) {
  const double part = (double)groups * rows * HEADS / PARTS;
  const int32_t places = groups * HEADS * PLACES;
  double *const at = malloc((size_t)places * (size_t)rows * sizeof *at);
  double sum = 0;
  assert_non_null(at);
  for (int32_t p = 0; p < places; p++)
    reads_of(&at[p * rows], rows, part, p / PLACES / HEADS * rows * HEADS + p / PLACES % HEADS,
             (p % PLACES + 0.5) / PLACES);
  for (int32_t p = 0; p < places; p++)
    for (int32_t i = 1; i < rows; i++) {
      const double window = fmin(at[p * rows + i] - at[p * rows + i - 1], 0.999 * part);
      const double bytes = shared * touched(at, places, rows, part, window) + own * window / part;
      sum += fmin(1, l2 / fmax(1, bytes));
    }
  free(at);
  return sum / places / (rows - 1);
}

static void the_walk(void **state) {
  static const int32_t cells[][2] = {{1, 2}, {1, 7}, {2, 5}, {3, 4}, {4, 11}, {7, 13}, {2, 40}};
  sched_reuse *reuse;
  pkv_error err = {0};
  (void)state;
  assert_int_equal(sched_reuse_init(&reuse, PARTS, HEADS, &err), PKV_OK);
  for (size_t i = 0; i < sizeof cells / sizeof *cells; i++)
    for (double l2 = 5; l2 < 200; l2 *= 1.7) {
      const double ours = sched_reuse_share(reuse, cells[i][0], cells[i][1], 90, 30, l2);
      const double other = share_by_hand(cells[i][0], cells[i][1], 90, 30, l2);
      if (fabs(ours - other) > 0.03)
        fail_msg("%d groups of %d, %g: %g, by hand %g", (int)cells[i][0], (int)cells[i][1], l2,
                 ours, other);
    }
  sched_reuse_free(reuse);
}

/* Any counts; more tables than are kept. */
static void any_batch(void **state) {
  static const int32_t large[] = {1, 2, 3, 100, 65536, INT32_MAX};
  sched_reuse *reuse;
  pkv_error err = {0};
  (void)state;
  assert_int_equal(sched_reuse_init(&reuse, 264, 40, &err), PKV_OK);
  for (size_t g = 0; g < 6; g++)
    for (size_t r = 0; r < 6; r++) {
      const double share = sched_reuse_share(reuse, large[g], large[r], 1e8, 1e7, 3e7);
      assert_true(share > 0 && share <= 1);
      assert_true(sched_reuse_share(reuse, large[g], large[r], 1e8, 1e7, 6e7) >= share);
      assert_true(sched_reuse_share(reuse, large[g], large[r], 1e7, 1e6, 3e7) == 1);
    }
  sched_reuse_free(reuse);
  assert_int_equal(sched_reuse_init(&reuse, 8, 1, &err), PKV_OK);
  const double first = sched_reuse_share(reuse, 5, 9, 100, 10, 30);
  for (int32_t g = 1; g <= 70; g++)
    for (int32_t r = 2; r <= 72; r++)
      (void)sched_reuse_share(reuse, g, r, 100, 10, 30);
  assert_true(sched_reuse_share(reuse, 5, 9, 100, 10, 30) == first);
  sched_reuse_free(reuse);
  sched_reuse_free(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(measured_steps),
      cmocka_unit_test(the_walk),
      cmocka_unit_test(any_batch),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
