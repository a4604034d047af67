/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/calibrate_points.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"

#define F           PKV_COST_FEATURES
#define FILE_LIMIT  ((size_t)32 << 20)
#define LINE_BYTES  1024
#define MOST_POINTS (1 << 17)
#define NUMBER      "%.9g"
#define LEAST       12 /* points of a kind that are worth a fit */
/* Features of making a plan: it does not read the cache. */
#define PLAN_MASK                                                                                  \
  (1u << PKV_COST_ONE | 1u << PKV_COST_LAUNCHES | 1u << PKV_COST_TASKS | 1u << PKV_COST_MERGES |   \
   1u << PKV_COST_ROWS | 1u << PKV_COST_STATES)

static pkv_status keep(calibrate_points *p, const calibrate_point *point, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  if (p->count == p->capacity) {
    const int32_t capacity = p->capacity ? 2 * p->capacity : 256;
    PKV_CHECK(err, capacity <= MOST_POINTS, PKV_E_LIMIT, "more than %d points", MOST_POINTS);
    calibrate_point *more = pkv_alloc(&a, (size_t)capacity * sizeof *more);
    PKV_CHECK(err, more, PKV_E_NOMEM, "no memory for %d points", capacity);
    if (p->count > 0) memcpy(more, p->points, (size_t)p->count * sizeof *more);
    pkv_free(&a, p->points, (size_t)p->capacity * sizeof *more);
    p->points = more;
    p->capacity = capacity;
  }
  p->points[p->count++] = *point;
  return PKV_OK;
}

/* Words of a line, cut in place; returns how many, at most `most`. */
static int32_t cut(char *line, char **word, int32_t most) {
  int32_t count = 0;
  for (char *at = line; *at != '\0' && count < most;) {
    word[count++] = at;
    at += strcspn(at, " ");
    if (*at == ' ') *at++ = '\0';
  }
  return count;
}

static bool read_point(calibrate_point *out, char **word) {
  int64_t batch, rows;
  out->kind = 1;
  while (out->kind < PKV_COST_KINDS && strcmp(word[3], pkv_cost_kind_name(out->kind)) != 0)
    out->kind++;
  if (out->kind == PKV_COST_KINDS || !pkv_parse_i64(&batch, word[0], 0, MOST_POINTS) ||
      !pkv_parse_i64(&rows, word[2], 0, 1 << 20) ||
      !pkv_parse_f64(&out->attend_us, word[4], 1e-6, 1e12) ||
      !pkv_parse_f64(&out->plan_us, word[5], 0, 1e12))
    return false;
  for (int32_t i = 0; i < F; i++)
    if (!pkv_parse_f64(&out->features[i], word[6 + i], 0, 1e15)) return false;
  out->batch = (int32_t)batch;
  out->shares = strcmp(word[1], "shared") == 0;
  return true;
}

/* Points count once their batch's "done" line is there; *good is where the last of those ends. */
static pkv_status read_back(calibrate_points *p, size_t *good, const char *text, size_t bytes,
                            pkv_error *err) {
  int32_t sure = 0, number = 1;
  for (size_t at = *good; at < bytes;) {
    char line[LINE_BYTES], *word[F + 8];
    const char *stop = memchr(text + at, '\n', bytes - at);
    if (stop == NULL) break;
    const size_t size = (size_t)(stop - text) - at;
    int64_t index;
    calibrate_point point;
    number++;
    PKV_CHECK(err, size < sizeof line, PKV_E_FORMAT, "line %d has %zu bytes", number, size);
    memcpy(line, text + at, size);
    line[size] = '\0';
    at += size + 1;
    const int32_t words = cut(line, word, F + 8);
    if (words == 2 && strcmp(word[1], "done") == 0 &&
        pkv_parse_i64(&index, word[0], p->batches, p->batches)) {
      p->batches++;
      sure = p->count;
      *good = at;
      continue;
    }
    PKV_CHECK(err, words == F + 6 && read_point(&point, word) && point.batch == p->batches,
              PKV_E_FORMAT, "line %d is no point of batch %d", number, p->batches);
    PKV_TRY(keep(p, &point, err));
  }
  p->count = sure;
  return PKV_OK;
}

pkv_status calibrate_points_open(calibrate_points *out, const char *path, const char *setup,
                                 pkv_error *err) {
  pkv_buffer text;
  char head[512];
  memset(out, 0, sizeof *out);
  const int size = snprintf(head, sizeof head, "pkv-points 2 %s\n", setup);
  PKV_CHECK(err, size > 0 && (size_t)size < sizeof head, PKV_E_RANGE, "setup is too long");
  size_t good = (size_t)size;
  pkv_buffer_init(&text, FILE_LIMIT, NULL);
  const bool there = access(path, F_OK) == 0;
  pkv_status status = there ? pkv_buffer_read_file(&text, path, err) : PKV_OK;
  if (status == PKV_OK && text.size > 0) {
    if (text.size < good || memcmp(text.data, head, good) != 0)
      status = PKV_FAIL(err, PKV_E_STATE,
                        "%s is of another device, setup or version: remove it to start over", path);
    else
      status = read_back(out, &good, text.data, text.size, err);
  }
  const bool fresh = text.size == 0;
  pkv_buffer_deinit(&text);
  PKV_TRY(status);
  out->file = fopen(path, fresh ? "w" : "r+");
  PKV_CHECK(err, out->file, PKV_E_IO, "%s: %s", path, strerror(errno));
  bool ok = true;
  if (fresh)
    ok = fputs(head, out->file) >= 0 && fflush(out->file) == 0;
  else
    ok = ftruncate(fileno(out->file), (off_t)good) == 0 && fseek(out->file, 0, SEEK_END) == 0;
  PKV_CHECK(err, ok, PKV_E_IO, "%s: %s", path, strerror(errno));
  return PKV_OK;
}

void calibrate_points_close(calibrate_points *p) {
  const pkv_allocator a = pkv_allocator_default();
  if (p->file) (void)fclose(p->file);
  pkv_free(&a, p->points, (size_t)p->capacity * sizeof *p->points);
  memset(p, 0, sizeof *p);
}

/* As it stands in the file: a fit from what was read back is the same to the last digit. */
static double as_written(double value) {
  char text[40];
  double back = 0;
  (void)snprintf(text, sizeof text, NUMBER, value);
  (void)pkv_parse_f64(&back, text, 0, 1e15);
  return back;
}

pkv_status calibrate_points_add(calibrate_points *p, const route_times *t, const char *mix,
                                const bench_batch *batch, const route_time *times, pkv_error *err) {
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    calibrate_point point = {.batch = p->batches,
                             .kind = kind,
                             .shares = strcmp(mix, "shared") == 0,
                             .attend_us = as_written(times[kind].attend_us),
                             .plan_us = as_written(times[kind].plan_us)};
    if (!times[kind].done) continue;
    PKV_TRY(route_features(point.features, t, kind, batch, &times[kind], err));
    (void)fprintf(p->file, "%d %s %d %s " NUMBER " " NUMBER, p->batches, mix, batch->rows,
                  pkv_cost_kind_name(kind), point.attend_us, point.plan_us);
    for (int32_t i = 0; i < F; i++) {
      point.features[i] = as_written(point.features[i]);
      (void)fprintf(p->file, " " NUMBER, point.features[i]);
    }
    (void)fputc('\n', p->file);
    PKV_TRY(keep(p, &point, err));
  }
  const bool ok = fprintf(p->file, "%d done\n", p->batches) > 0 && fflush(p->file) == 0;
  PKV_CHECK(err, ok, PKV_E_IO, "cannot write the points: %s", strerror(errno));
  p->batches++;
  return PKV_OK;
}

double calibrate_predict(const pkv_route_cost *cost, const double *features) {
  double us = 0;
  for (int32_t i = 0; i < F; i++)
    us += cost->attend[i] * features[i];
  return us;
}

static pkv_status fit_kind(pkv_route_cost *cost, const calibrate_points *p, int32_t kind,
                           double *features, double *us, double *plan, pkv_error *err) {
  int32_t n = 0;
  memset(cost, 0, sizeof *cost);
  for (int32_t i = 0; i < p->count; i++) {
    const calibrate_point *point = &p->points[i];
    if (point->kind != kind || (point->shares && kind != PKV_ROUTE_SHARED)) continue;
    memcpy(features + (size_t)n * F, point->features, F * sizeof(double));
    us[n] = point->attend_us;
    plan[n++] = point->plan_us > 0.05 ? point->plan_us : 0.05;
  }
  if (n < LEAST) return PKV_OK;
  PKV_TRY(pkv_cost_fit(cost->attend, features, us, n, (1u << F) - 1, err));
  PKV_TRY(pkv_cost_fit(cost->plan, features, plan, n, PLAN_MASK, err));
  for (int32_t i = 0; i < n; i++) {
    const double off = fabs(calibrate_predict(cost, features + (size_t)i * F) - us[i]) / us[i];
    cost->error_mean += off / n;
    if (off > cost->error_worst) cost->error_worst = off;
  }
  cost->points = n;
  return PKV_OK;
}

pkv_status calibrate_fit(pkv_cost_model *model, const calibrate_points *p, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  const size_t many = (size_t)p->count + 1, bytes = many * (F + 2) * sizeof(double);
  double *memory = pkv_alloc(&a, bytes);
  PKV_CHECK(err, memory, PKV_E_NOMEM, "no memory for %d points", p->count);
  pkv_status status = PKV_OK;
  for (int32_t kind = 1; kind < PKV_COST_KINDS && status == PKV_OK; kind++)
    status = fit_kind(&model->cost[kind], p, kind, memory, memory + many * F,
                      memory + many * (F + 1), err);
  pkv_free(&a, memory, bytes);
  return status;
}
