/* SPDX-License-Identifier: Apache-2.0 */
/* The seeded traces, the placement of pages, and the steps. The definitions are in pkv/trace.h. */
#include "sched/trace_parts.h"

#include <math.h>
#include <string.h>

#include "sched/mt19937.h"

const char *pkv_trace_kind_name(pkv_trace_kind kind) {
  static const char *const names[] = {"bucketed", "homogeneous", "bimodal", "uniform", "zipf"};
  return (int)kind >= 0 && (int)kind < 5 ? names[kind] : "?";
}

pkv_status pkv_trace_begin(pkv_trace **out, const pkv_trace_options *options, pkv_error *err) {
  PKV_CHECK_STRUCT(err, options, pkv_trace_options);
  PKV_CHECK(err, options->requests >= 0 && options->requests <= PKV_TRACE_MAX_REQUESTS,
            PKV_E_INVALID, "options->requests is %d, possible: 0 to %d", options->requests,
            PKV_TRACE_MAX_REQUESTS);
  PKV_CHECK(err, options->max_active >= 0 && options->max_active <= PKV_TRACE_MAX_REQUESTS,
            PKV_E_INVALID, "options->max_active is %d, possible: 0 to %d", options->max_active,
            PKV_TRACE_MAX_REQUESTS);
  PKV_CHECK(err, options->page_tokens >= 0 && options->page_tokens <= 1024, PKV_E_INVALID,
            "options->page_tokens is %d, possible: 0 to 1024", options->page_tokens);
  PKV_CHECK(err, options->hole_fraction >= 0 && options->hole_fraction <= 0.99, PKV_E_INVALID,
            "options->hole_fraction is %g, possible: 0 to 0.99", options->hole_fraction);
  const pkv_allocator allocator = pkv_allocator_or_default(options->allocator);
  pkv_trace *trace = pkv_alloc_zeroed(&allocator, 1, sizeof *trace);
  PKV_CHECK(err, trace, PKV_E_NOMEM, "no memory for a trace");
  trace->allocator = allocator;
  trace->options = *options;
  if (options->max_active == 0) trace->options.max_active = 8;
  if (options->page_tokens == 0) trace->options.page_tokens = 16;
  if (options->seed == 0) trace->options.seed = PKV_TRACE_SEED_CALIBRATION;
  *out = trace;
  return PKV_OK;
}

void pkv_trace_destroy(pkv_trace *trace) {
  if (trace == NULL) return;
  const pkv_allocator allocator = trace->allocator;
  pkv_free(&allocator, trace->requests, (size_t)trace->capacity * sizeof *trace->requests);
  pkv_free(&allocator, trace->first_page, ((size_t)trace->count + 1) * sizeof *trace->first_page);
  pkv_free(&allocator, trace->pages, (size_t)trace->physical_pages * sizeof *trace->pages);
  pkv_free(&allocator, trace, sizeof *trace);
}

static pkv_status grow(pkv_trace *trace, pkv_error *err) {
  const int32_t capacity = trace->capacity ? 2 * trace->capacity : 64;
  pkv_trace_request *more = pkv_alloc_zeroed(&trace->allocator, (size_t)capacity, sizeof *more);
  PKV_CHECK(err, more, PKV_E_NOMEM, "no memory for %d requests", capacity);
  if (trace->count > 0) memcpy(more, trace->requests, (size_t)trace->count * sizeof *more);
  pkv_free(&trace->allocator, trace->requests, (size_t)trace->capacity * sizeof *more);
  trace->requests = more;
  trace->capacity = capacity;
  return PKV_OK;
}

pkv_status pkv_trace_add(pkv_trace *trace, int64_t prompt, int64_t decode, int64_t arrival,
                         pkv_error *err) {
  const int64_t page = trace->options.page_tokens;
  PKV_CHECK(err, trace->count < PKV_TRACE_MAX_REQUESTS, PKV_E_LIMIT, "more than %d requests",
            PKV_TRACE_MAX_REQUESTS);
  PKV_CHECK(err, prompt >= 1 && prompt <= PKV_TRACE_MAX_PROMPT, PKV_E_LIMIT,
            "request %d: prompt of %lld tokens, possible: 1 to %d", trace->count, (long long)prompt,
            PKV_TRACE_MAX_PROMPT);
  PKV_CHECK(err, decode >= 1 && decode <= PKV_TRACE_MAX_DECODE, PKV_E_LIMIT,
            "request %d: answer of %lld tokens, possible: 1 to %d", trace->count, (long long)decode,
            PKV_TRACE_MAX_DECODE);
  PKV_CHECK(err, arrival >= 0 && arrival <= PKV_TRACE_MAX_ARRIVAL, PKV_E_LIMIT,
            "request %d: arrival at step %lld, possible: 0 to %d", trace->count, (long long)arrival,
            PKV_TRACE_MAX_ARRIVAL);
  if (trace->count == trace->capacity) PKV_TRY(grow(trace, err));
  const int64_t rounded = (prompt + page - 1) / page * page;
  trace->requests[trace->count++] =
      (pkv_trace_request){(int32_t)rounded, (int32_t)decode, (int32_t)arrival,
                          (int32_t)((rounded + decode + page - 1) / page)};
  return PKV_OK;
}

pkv_status pkv_trace_finish(pkv_trace *trace, pkv_error *err) {
  int64_t pages = 0;
  for (int32_t i = 0; i < trace->count; i++)
    pages += trace->requests[i].pages;
  const double physical = ceil((double)pages / (1.0 - trace->options.hole_fraction));
  PKV_CHECK(err, physical <= PKV_TRACE_MAX_PAGES, PKV_E_LIMIT,
            "the trace needs %.0f pages of %d tokens, at most %d", physical,
            trace->options.page_tokens, PKV_TRACE_MAX_PAGES);
  trace->first_page =
      pkv_alloc_zeroed(&trace->allocator, (size_t)trace->count + 1, sizeof *trace->first_page);
  PKV_CHECK(err, trace->first_page, PKV_E_NOMEM, "no memory for %d requests", trace->count);
  for (int32_t i = 0; i < trace->count; i++)
    trace->first_page[i + 1] = trace->first_page[i] + trace->requests[i].pages;
  if (pages == 0) return PKV_OK;
  const int64_t all = (int64_t)physical;
  trace->pages = pkv_alloc(&trace->allocator, (size_t)all * sizeof *trace->pages);
  PKV_CHECK(err, trace->pages, PKV_E_NOMEM, "no memory for %lld pages", (long long)all);
  trace->physical_pages = all;
  pkv_mt19937 mt;
  pkv_mt19937_init(&mt, (uint32_t)(trace->options.seed + 99));
  for (int64_t i = 0; i < all; i++)
    trace->pages[i] = (int32_t)i;
  for (int64_t i = 0; i < all - 1; i++) {
    const int64_t j = i + pkv_mt19937_next(&mt) % (all - i);
    const int32_t page = trace->pages[i];
    trace->pages[i] = trace->pages[j];
    trace->pages[j] = page;
  }
  return PKV_OK;
}

/* lo .. hi; the bias of the modulo is the seed's. */
static int64_t uniform(pkv_mt19937 *mt, int64_t lo, int64_t hi) {
  return lo + pkv_mt19937_next(mt) % (hi - lo + 1);
}

/* Draws request `index` of a seeded kind. */
static void draw(int64_t *prompt, int64_t *decode, pkv_mt19937 *mt, pkv_trace_kind kind,
                 int32_t index) {
  switch (kind) {
  case PKV_TRACE_BUCKETED:
    *prompt = (int64_t)8192 << (index % 4);
    *decode = uniform(mt, 32, 96);
    break;
  case PKV_TRACE_HOMOGENEOUS:
    *prompt = 32768;
    *decode = uniform(mt, 32, 96);
    break;
  case PKV_TRACE_BIMODAL: {
    const int is_long = index % 4 == 0;
    *prompt = is_long ? uniform(mt, 24576, 65536) : uniform(mt, 2048, 12288);
    *decode = is_long ? uniform(mt, 32, 128) : uniform(mt, 8, 64);
    break;
  }
  case PKV_TRACE_UNIFORM:
    *prompt = uniform(mt, 4096, 32768);
    *decode = uniform(mt, 16, 96);
    break;
  case PKV_TRACE_ZIPF: {
    const double rank = (double)uniform(mt, 1, 32);
    const int64_t length = (int64_t)(2048.0 + 65536.0 / sqrt(rank)) + uniform(mt, -512, 512);
    *prompt = length < 1024 ? 1024 : length;
    *decode = uniform(mt, 8, 128);
    break;
  }
  }
}

pkv_status pkv_trace_create(pkv_trace **out, const pkv_trace_options *options, pkv_error *err) {
  pkv_trace *trace = NULL;
  pkv_status status = PKV_OK;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_TRY(pkv_trace_begin(&trace, options, err));
  const pkv_trace_options *o = &trace->options;
  const int32_t requests = o->requests > 0 ? o->requests : o->max_active >= 8 ? 24 : 16;
  if ((int)o->kind < PKV_TRACE_BUCKETED || (int)o->kind > PKV_TRACE_ZIPF) {
    status = PKV_FAIL(err, PKV_E_INVALID, "options->kind is %d, known: 0 to %d", (int)o->kind,
                      (int)PKV_TRACE_ZIPF);
    goto done;
  }
  pkv_mt19937 mt;
  pkv_mt19937_init(&mt, (uint32_t)o->seed);
  for (int32_t i = 0; i < requests && status == PKV_OK; i++) {
    int64_t prompt = 1, decode = 1;
    draw(&prompt, &decode, &mt, o->kind, i);
    status = pkv_trace_add(trace, prompt, decode, i / o->max_active, err);
  }
  if (status == PKV_OK) status = pkv_trace_finish(trace, err);
done:
  if (status != PKV_OK)
    pkv_trace_destroy(trace);
  else
    *out = trace;
  return status;
}

const pkv_trace_request *pkv_trace_requests(const pkv_trace *trace, int32_t *count) {
  *count = trace->count;
  return trace->requests;
}

int32_t pkv_trace_max_active(const pkv_trace *trace) {
  return trace->options.max_active;
}

int64_t pkv_trace_pages(const pkv_trace *trace) {
  return trace->physical_pages;
}

const int32_t *pkv_trace_table(const pkv_trace *trace, int32_t request) {
  if (request < 0 || request >= trace->count) return NULL;
  return trace->pages + trace->first_page[request];
}

int32_t pkv_trace_next_step(const pkv_trace *trace, int32_t from) {
  int32_t next = -1;
  for (int32_t i = 0; i < trace->count; i++) {
    const pkv_trace_request *r = &trace->requests[i];
    if (r->arrival + r->decode_tokens <= from) continue;
    const int32_t first = r->arrival > from ? r->arrival : from;
    if (next < 0 || first < next) next = first;
  }
  return next;
}

int32_t pkv_trace_step(int32_t *request, int32_t *seq_len, const pkv_trace *trace, int32_t step) {
  int32_t active = 0;
  for (int32_t i = 0; i < trace->count && active < trace->options.max_active; i++) {
    const pkv_trace_request *r = &trace->requests[i];
    if (step < r->arrival || step >= r->arrival + r->decode_tokens) continue;
    request[active] = i;
    seq_len[active++] = r->prompt_tokens + (step - r->arrival);
  }
  return active;
}
