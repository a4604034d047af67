/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_sched_work.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/rng.h"
#include "base/text.h"
#include "cli/bench_sched_memory.h"
#include "pkv/trace.h"

#define FILE_BYTES     ((size_t)64 << 20)
#define MAX_PROMPT     (1 << 24)
#define MAX_OUTPUT     (1 << 20)
#define MOONCAKE_CHUNK 512

/* Makes room for one more job and `hashes` more hashes. */
static pkv_status reserve(sched_work *w, size_t hashes, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  PKV_CHECK(err, w->count < SCHED_MAX_WORK, PKV_E_LIMIT, "more than %d requests", SCHED_MAX_WORK);
  if (w->count == w->capacity) {
    const int32_t more = w->capacity > 0 ? 2 * w->capacity : 1024;
    void *const grown = pkv_realloc(&a, w->jobs, (size_t)w->capacity * sizeof *w->jobs,
                                    (size_t)more * sizeof *w->jobs);
    PKV_CHECK(err, grown, PKV_E_NOMEM, "no memory for %d requests", (int)more);
    w->jobs = grown;
    w->capacity = more;
  }
  if (w->hash_count + hashes > w->hash_capacity) {
    const size_t more = 2 * (w->hash_count + hashes) + 4096;
    void *const grown =
        pkv_realloc(&a, w->hashes, w->hash_capacity * sizeof *w->hashes, more * sizeof *w->hashes);
    PKV_CHECK(err, grown, PKV_E_NOMEM, "no memory for %zu hashes", more);
    w->hashes = grown;
    w->hash_capacity = more;
  }
  return PKV_OK;
}

void sched_work_free(sched_work *work) {
  sched_free(work->jobs, (size_t)work->capacity, sizeof *work->jobs);
  sched_free(work->hashes, work->hash_capacity, sizeof *work->hashes);
  memset(work, 0, sizeof *work);
}

static int by_arrival(const void *a, const void *b) {
  const sched_job *const x = a, *const y = b;
  if (x->arrival_s != y->arrival_s) return x->arrival_s < y->arrival_s ? -1 : 1;
  return (x->first_hash > y->first_hash) - (x->first_hash < y->first_hash);
}

/* ------------------------------------------------------------------------------------------
 * Drawn
 * ------------------------------------------------------------------------------------------ */

/* Only a prefix has hashes: the rest of a prompt is nobody else's. */
static pkv_status draw_one(sched_work *w, const sched_draw *d, pkv_rng *rng, double *now,
                           pkv_error *err) {
  const bool late = d->shift && w->count >= d->requests / 2;
  const bool alone = late || d->groups == 0;
  pkv_rng group_rng;
  const uint64_t group =
      alone ? UINT64_C(1000000) + (uint64_t)w->count : pkv_rng_below(rng, (uint64_t)d->groups);
  pkv_rng_init(&group_rng, d->seed * 1000003 + group + 1);
  const int32_t prefix = (int32_t)pkv_rng_range(&group_rng, d->prefix[0], d->prefix[1]);
  const int32_t hashes = alone ? 0 : prefix / d->chunk;
  if (d->rate > 0) *now -= log(1 - pkv_rng_uniform(rng)) / (late ? 4 * d->rate : d->rate);
  PKV_TRY(reserve(w, (size_t)hashes, err));
  w->jobs[w->count++] = (sched_job){
      .arrival_s = *now,
      .prompt = prefix + d->own,
      .output = (int32_t)pkv_rng_range(rng, d->decode[0], d->decode[1]),
      .hashes = hashes,
      .first_hash = w->hash_count,
  };
  for (int32_t i = 0; i < hashes; i++)
    w->hashes[w->hash_count++] = pkv_rng_next(&group_rng);
  return PKV_OK;
}

pkv_status sched_work_draw(sched_work *out, const sched_draw *draw, pkv_error *err) {
  pkv_rng rng;
  double now = 0;
  pkv_status status = PKV_OK;
  memset(out, 0, sizeof *out);
  out->chunk = draw->chunk;
  (void)snprintf(out->name, sizeof out->name, "%s%d groups prefix %d-%d own %d decode %d-%d",
                 draw->shift ? "shift " : "", (int)draw->groups, (int)draw->prefix[0],
                 (int)draw->prefix[1], (int)draw->own, (int)draw->decode[0], (int)draw->decode[1]);
  pkv_rng_init(&rng, draw->seed);
  while (status == PKV_OK && out->count < draw->requests)
    status = draw_one(out, draw, &rng, &now, err);
  if (status != PKV_OK) sched_work_free(out);
  return status;
}

/* ------------------------------------------------------------------------------------------
 * Files
 * ------------------------------------------------------------------------------------------ */

static pkv_status mooncake_line(sched_work *w, const char *line, size_t size, pkv_error *err) {
  json_error_t fault;
  json_t *const root = json_loadb(line, size, JSON_REJECT_DUPLICATES, &fault);
  const json_t *const ids = json_object_get(root, "hash_ids");
  const json_t *const at = json_object_get(root, "timestamp");
  const json_int_t prompt = json_integer_value(json_object_get(root, "input_length"));
  const json_int_t output = json_integer_value(json_object_get(root, "output_length"));
  /* The last block only where it is whole: others' may be longer. */
  const size_t blocks = json_array_size(ids),
               whole = (size_t)(prompt > 0 ? prompt : 0) / MOONCAKE_CHUNK;
  const size_t count = blocks < whole ? blocks : whole;
  pkv_status status = PKV_OK;
  bool whole_ids = json_is_array(ids);
  for (size_t i = 0; i < count && whole_ids; i++)
    whole_ids = json_is_integer(json_array_get(ids, i));
  if (!whole_ids || !json_is_number(at) || !(json_number_value(at) >= 0) || prompt < 1 ||
      prompt > MAX_PROMPT || output < 0 || output > MAX_OUTPUT || blocks > whole + 1)
    status = PKV_FAIL(err, PKV_E_FORMAT, "request %d is not one of Mooncake's", (int)w->count + 1);
  if (status == PKV_OK) status = reserve(w, count, err);
  if (status == PKV_OK) {
    w->jobs[w->count++] = (sched_job){.arrival_s = json_number_value(at) / 1e3,
                                      .prompt = (int32_t)prompt,
                                      .output = output > 0 ? (int32_t)output : 1,
                                      .hashes = (int32_t)count,
                                      .first_hash = w->hash_count};
    for (size_t i = 0; i < count; i++)
      w->hashes[w->hash_count++] = (uint64_t)json_integer_value(json_array_get(ids, i)) + 1;
  }
  json_decref(root);
  return status;
}

/* "2023-11-16 18:15:46.6805900,374,44"; days count from any one. */
static pkv_status azure_line(sched_work *w, const char *line, size_t size, pkv_error *err) {
  char text[96];
  int y, mo, d, h, mi, prompt, output, end = 0;
  double s;
  PKV_CHECK(err, size < sizeof text, PKV_E_FORMAT, "request %d is too long", (int)w->count + 1);
  memcpy(text, line, size);
  text[size] = '\0';
  text[strcspn(text, "\r")] = '\0';
  const int got = sscanf(text, "%4d-%2d-%2d %2d:%2d:%lf,%8d,%8d%n", &y, &mo, &d, &h, &mi, &s,
                         &prompt, &output, &end);
  PKV_CHECK(err,
            got == 8 && text[end] == '\0' && prompt >= 0 && prompt <= MAX_PROMPT && output >= 0 &&
                output <= MAX_OUTPUT && s >= 0 && s < 61,
            PKV_E_FORMAT, "request %d is not one of Azure's", (int)w->count + 1);
  PKV_TRY(reserve(w, 0, err));
  w->jobs[w->count++] = (sched_job){.arrival_s = ((d * 24 + h) * 60 + mi) * 60 + s,
                                    .prompt = prompt,
                                    .output = output > 0 ? output : 1};
  return PKV_OK;
}

static pkv_status from_lines(sched_work *w, const pkv_buffer *text, int32_t most, bool mooncake,
                             pkv_error *err) {
  const char *at = text->data, *const stop = text->data + text->size;
  bool head = !mooncake;
  while (at < stop && (most == 0 || w->count < most)) {
    const char *const line_end = memchr(at, '\n', (size_t)(stop - at));
    const char *const end = line_end != NULL ? line_end : stop;
    const size_t size = (size_t)(end - at);
    if (size > 1 && !head)
      PKV_TRY(mooncake ? mooncake_line(w, at, size, err) : azure_line(w, at, size, err));
    head = false;
    at = end + 1;
  }
  return PKV_OK;
}

static pkv_status from_trace(sched_work *w, const char *path, int32_t most, pkv_error *err) {
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
  pkv_trace *trace = NULL;
  int32_t count = 0;
  options.requests = most;
  options.page_tokens = 1;
  PKV_TRY(pkv_trace_load(&trace, path, &options, err));
  const pkv_trace_request *const requests = pkv_trace_requests(trace, &count);
  pkv_status status = PKV_OK;
  for (int32_t i = 0; i < count && status == PKV_OK; i++) {
    status = reserve(w, 0, err);
    if (status == PKV_OK)
      w->jobs[w->count++] = (sched_job){.arrival_s = requests[i].arrival / 1e3,
                                        .prompt = requests[i].prompt_tokens,
                                        .output = requests[i].decode_tokens};
  }
  pkv_trace_destroy(trace);
  return status;
}

pkv_status sched_work_load(sched_work *out, const char *path, int32_t most, pkv_error *err) {
  const char *const slash = strrchr(path, '/');
  pkv_buffer text;
  memset(out, 0, sizeof *out);
  out->chunk = MOONCAKE_CHUNK;
  (void)snprintf(out->name, sizeof out->name, "%.60s", slash != NULL ? slash + 1 : path);
  for (char *c = out->name; *c != '\0'; c++)
    if (*c == ',' || *c == '"' || (unsigned char)*c < ' ') *c = ' ';
  const pkv_allocator a = pkv_allocator_default();
  pkv_buffer_init(&text, FILE_BYTES, &a);
  pkv_status status = pkv_buffer_read_file(&text, path, err);
  if (status == PKV_OK && text.size > 0 && text.data[0] == '{')
    status = from_lines(out, &text, most, true, err);
  else if (status == PKV_OK && text.size > 9 && memcmp(text.data, "TIMESTAMP", 9) == 0)
    status = from_lines(out, &text, most, false, err);
  else if (status == PKV_OK)
    status = from_trace(out, path, most, err);
  pkv_buffer_deinit(&text);
  if (status == PKV_OK && out->count == 0)
    status = PKV_FAIL(err, PKV_E_FORMAT, "%s holds no request", path);
  if (status != PKV_OK) {
    sched_work_free(out);
    return status;
  }
  qsort(out->jobs, (size_t)out->count, sizeof *out->jobs, by_arrival);
  const double first = out->jobs[0].arrival_s;
  for (int32_t i = 0; i < out->count; i++)
    out->jobs[i].arrival_s -= first;
  return PKV_OK;
}
