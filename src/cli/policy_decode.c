/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/policy_decode.h"

#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "cli/route_times_device.h"

#define MOST_ROWS 64
#define MOST_OFF  6e-3 /* from double: outputs are f16, states f32 */

typedef struct decode {
  route_times *t;
  route_times_device g;
  pkv_trace *trace;
  bench_batch all; /* every request of the trace as a row, as long as it gets */
  bench_device_batch d;
  pkv_router *router[POLICY_DECODE_MOST];
  int32_t count, layers, divide;
  /* the step at hand */
  int32_t rows, request[MOST_ROWS], lengths[MOST_ROWS], placed[MOST_ROWS], placed_rows;
  void *table, *seq_len; /* device: [MOST_ROWS, all.max_pages], [MOST_ROWS] */
  void *out;             /* host */
  double *answer;
  float *exact, *values;
  size_t out_bytes, value_bytes;
} decode;

static int32_t divided(const decode *w, int32_t tokens) {
  return tokens / w->divide > 0 ? tokens / w->divide : 1;
}

/* Each request with all its tokens as a row. Divided lengths leave most of the trace's pages out:
   then pages are numbered anew. */
static pkv_status list_requests(decode *w, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  bench_batch *b = &w->all;
  const int32_t tokens = w->t->o.shape.page_tokens;
  const pkv_trace_request *r = pkv_trace_requests(w->trace, &b->rows);
  for (int32_t i = 0; i < b->rows; i++) {
    const int32_t pages = (divided(w, r[i].prompt_tokens + r[i].decode_tokens) - 1) / tokens + 1;
    if (pages > b->max_pages) b->max_pages = pages;
  }
  const size_t rows = (size_t)b->rows, entries = rows * (size_t)b->max_pages;
  b->lengths = pkv_alloc(&a, rows * sizeof(int32_t));
  b->borrowed = pkv_alloc_zeroed(&a, rows, sizeof(int32_t));
  b->ids = pkv_alloc(&a, entries * sizeof(int32_t));
  PKV_CHECK(err, b->lengths && b->borrowed && b->ids, PKV_E_NOMEM, "no memory for %zu pages",
            entries);
  int32_t next = 0;
  for (int32_t i = 0; i < b->rows; i++) {
    const int32_t *table = pkv_trace_table(w->trace, i);
    b->lengths[i] = divided(w, r[i].prompt_tokens + r[i].decode_tokens);
    b->tokens += b->lengths[i];
    const int32_t pages = (b->lengths[i] - 1) / tokens + 1;
    for (int32_t p = 0; p < b->max_pages; p++)
      b->ids[(int64_t)i * b->max_pages + p] = p >= pages ? -1 : w->divide > 1 ? next++ : table[p];
  }
  b->pages = w->divide > 1 ? next : pkv_trace_pages(w->trace);
  return PKV_OK;
}

static pkv_status open_trace(decode *w, const policy_trace *trace, pkv_error *err) {
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
  PKV_CHECK(err, trace->active >= 1 && trace->active <= MOST_ROWS, PKV_E_RANGE,
            "%d active rows, at most %d", trace->active, MOST_ROWS);
  w->divide = trace->divide;
  options.kind = trace->kind;
  options.seed = trace->seed;
  options.max_active = trace->active;
  options.page_tokens = trace->page_tokens;
  options.requests = trace->requests;
  PKV_TRY(pkv_trace_create(&w->trace, &options, err));
  return list_requests(w, err);
}

static pkv_status open_routers(decode *w, const pkv_router_options *options, int32_t count,
                               pkv_error *err) {
  for (; w->count < count; w->count++) {
    pkv_router_options o = options[w->count];
    o.flashinfer = w->g.flashinfer;
    PKV_TRY(pkv_router_create(&w->router[w->count], w->g.meter->executor, &w->t->o.shape, &o,
                              w->t->o.kv_dtype, MOST_ROWS, w->d.longest, err));
  }
  return PKV_OK;
}

static pkv_status open_memory(decode *w, pkv_error *err) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_executor *executor = w->g.meter->executor;
  const size_t entries = (size_t)MOST_ROWS * (size_t)w->all.max_pages;
  const size_t values =
      (size_t)MOST_ROWS * (size_t)w->t->o.shape.query_heads * (size_t)w->t->o.shape.head_dim;
  PKV_TRY(pkv_device_alloc(&w->table, executor, entries * sizeof(int32_t), err));
  PKV_TRY(pkv_device_alloc(&w->seq_len, executor, MOST_ROWS * sizeof(int32_t), err));
  w->out_bytes = values * pkv_dtype_bytes(w->d.q_dtype);
  w->value_bytes = values * sizeof(double);
  w->out = pkv_alloc(&a, w->out_bytes);
  w->answer = pkv_alloc(&a, w->value_bytes);
  w->exact = pkv_alloc(&a, w->value_bytes);
  w->values = pkv_alloc(&a, w->value_bytes);
  PKV_CHECK(err, w->out && w->answer && w->exact && w->values, PKV_E_NOMEM,
            "no memory for %zu outputs", values);
  return pkv_device_synchronize(executor, NULL, err); /* the allocations' zeroing */
}

static void close_all(decode *w) {
  const pkv_allocator a = pkv_allocator_default();
  for (int32_t i = 0; i < w->count; i++)
    pkv_router_destroy(w->router[i]);
  pkv_device_free(w->g.meter->executor, w->table);
  pkv_device_free(w->g.meter->executor, w->seq_len);
  bench_device_batch_deinit(&w->d);
  pkv_free(&a, w->out, w->out_bytes);
  pkv_free(&a, w->answer, w->value_bytes);
  pkv_free(&a, w->exact, w->value_bytes);
  pkv_free(&a, w->values, w->value_bytes);
  pkv_free(&a, w->all.ids, (size_t)w->all.rows * (size_t)w->all.max_pages * sizeof(int32_t));
  pkv_free(&a, w->all.lengths, (size_t)w->all.rows * sizeof(int32_t));
  pkv_free(&a, w->all.borrowed, (size_t)w->all.rows * sizeof(int32_t));
  pkv_trace_destroy(w->trace);
}

/* Lengths and table of the step's rows onto the device, not timed. */
static pkv_status place(decode *w, int32_t step, pkv_error *err) {
  pkv_meter *m = w->g.meter;
  const size_t row_bytes = (size_t)w->all.max_pages * sizeof(int32_t);
  w->rows = pkv_trace_step(w->request, w->lengths, w->trace, step);
  for (int32_t row = 0; row < w->rows; row++)
    w->lengths[row] = divided(w, w->lengths[row]);
  for (int32_t row = 0; row < w->rows; row++) {
    if (row < w->placed_rows && w->placed[row] == w->request[row]) continue;
    const unsigned char *from = (const unsigned char *)w->d.table;
    PKV_TRY(pkv_device_copy(m->executor, (unsigned char *)w->table + (size_t)row * row_bytes,
                            from + (size_t)w->request[row] * row_bytes, row_bytes, m->stream, err));
    w->placed[row] = w->request[row];
  }
  w->placed_rows = w->rows;
  PKV_TRY(pkv_device_copy(m->executor, w->seq_len, w->lengths, (size_t)w->rows * sizeof(int32_t),
                          m->stream, err));
  return pkv_device_synchronize(m->executor, m->stream, err);
}

static pkv_status run_layers(decode *w, int32_t which, int32_t layers, pkv_error *err) {
  for (int32_t layer = 0; layer < layers; layer++) {
    const pkv_cache cache = bench_device_batch_cache(&w->d, layer % w->d.layers);
    pkv_attention_args args = bench_device_batch_args(&w->d, &cache);
    args.block_table = w->table;
    pkv_router_set_overlap(w->router[which], layer > 0);
    PKV_TRY(pkv_router_attention(w->router[which], &args, w->g.meter->stream, err));
  }
  return PKV_OK;
}

static pkv_status plan(decode *w, int32_t which, pkv_error *err) {
  pkv_choice choice = PKV_CHOICE_INIT;
  return pkv_router_plan(&choice, w->router[which], w->rows, w->lengths, w->seq_len,
                         w->g.meter->stream, err);
}

/* One step of one contender. */
static pkv_status run_step(policy_decoded *out, decode *w, int32_t which, pkv_error *err) {
  pkv_meter *m = w->g.meter;
  const int64_t start = pkv_clock_ns();
  PKV_TRY(plan(w, which, err));
  PKV_TRY(run_layers(w, which, w->layers, err));
  PKV_TRY(pkv_device_synchronize(m->executor, m->stream, err));
  out->us += (double)(pkv_clock_ns() - start) * 1e-3;
  out->tokens += w->rows;
  out->steps++;
  return PKV_OK;
}

/* The step's layer 0 by every contender against double arithmetic; also the warm-up. */
static pkv_status check(policy_decoded *out, decode *w, pkv_error *err) {
  pkv_meter *m = w->g.meter;
  const pkv_cache cache = bench_device_batch_cache(&w->d, 0);
  const int64_t a_row = (int64_t)w->t->o.shape.query_heads * w->t->o.shape.head_dim;
  const size_t bytes = (size_t)(w->rows * a_row) * pkv_dtype_bytes(w->d.q_dtype);
  int32_t checked[MOST_ROWS];
  pkv_meter_batch view = w->d.view;
  const bench_batch step = {.rows = w->rows, .lengths = w->lengths};
  view.rows = w->rows;
  view.table = w->table;
  view.seq_len = w->seq_len;
  route_checked_rows(checked, &step, ROUTE_CHECKED);
  PKV_TRY(m->ops->answer(m, w->answer, &cache, &view, checked, w->d.q, w->d.q_dtype, err));
  for (int64_t i = 0; i < w->rows * a_row; i++)
    w->exact[i] = (float)w->answer[i];
  for (int32_t which = 0; which < w->count; which++) {
    PKV_TRY(m->ops->set(m, w->d.out, 0xff, bytes, err));
    PKV_TRY(plan(w, which, err));
    PKV_TRY(run_layers(w, which, 1, err));
    PKV_TRY(pkv_device_copy(m->executor, w->out, w->d.out, bytes, m->stream, err));
    PKV_TRY(pkv_device_synchronize(m->executor, m->stream, err));
    for (int64_t i = 0; i < w->rows * a_row; i++)
      w->values[i] = pkv_load(w->out, w->d.q_dtype, i);
    out[which].error = route_error(w->values, w->exact, checked, w->rows, a_row);
    PKV_CHECK(err, out[which].error <= MOST_OFF, PKV_E_INTERNAL,
              "contender %d is wrong by %g, at most %g", which, out[which].error, MOST_OFF);
  }
  return PKV_OK;
}

static pkv_status run(policy_decoded *out, decode *w, const policy_trace *trace,
                      const pkv_router_options *options, int32_t count, pkv_error *err) {
  bool first = true;
  PKV_TRY(open_trace(w, trace, err));
  PKV_TRY(bench_device_batch_init(&w->d, w->g.meter, w->g.pool, w->g.frame, &w->all, err));
  PKV_TRY(open_routers(w, options, count, err));
  PKV_TRY(open_memory(w, err));
  for (int32_t step = pkv_trace_next_step(w->trace, 0); step >= 0;
       step = pkv_trace_next_step(w->trace, step + 1)) {
    PKV_TRY(place(w, step, err));
    if (first) PKV_TRY(check(out, w, err));
    first = false;
    for (int32_t i = 0; i < count; i++) {
      const int32_t which = (i + step) % count;
      PKV_TRY(run_step(&out[which], w, which, err));
    }
    if (pkv_cli_interrupted()) return PKV_FAIL(err, PKV_E_STATE, "interrupted");
  }
  return PKV_OK;
}

pkv_status policy_decode(policy_decoded *out, route_times *t, const policy_trace *trace,
                         const pkv_router_options *options, int32_t count, int32_t layers,
                         pkv_error *err) {
  decode w;
  PKV_CHECK(err, t->o.device == PKV_DEVICE_CUDA, PKV_E_UNSUPPORTED,
            "whole traces are decoded on --device cuda");
  PKV_CHECK(err, count <= POLICY_DECODE_MOST, PKV_E_LIMIT, "%d contenders", count);
  memset(out, 0, (size_t)count * sizeof *out);
  memset(&w, 0, sizeof w);
  w.t = t;
  w.g = route_times_device_of(t);
  w.layers = layers;
  const pkv_status status = run(out, &w, trace, options, count, err);
  close_all(&w);
  return status;
}
