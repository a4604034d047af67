/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers, plans and graphs of forward passes on a device; a batch up, tokens down. */
#include "model/device_forward.h"

#include <string.h>

#include "base/status.h"
#include "model/device_forward_parts.h"

#define ALIGNMENT 256

/* ---- buffers ---- */

/* Hands out parts of a block; a NULL base adds up. */
typedef struct layout {
  char *base;
  size_t at;
  bool overflow;
} layout;

static void *take(layout *l, int64_t count, int64_t width, size_t size) {
  size_t bytes = 0;
  char *const here = l->base ? l->base + l->at : NULL;
  if (!pkv_mul_size(&bytes, (size_t)count * size, (size_t)width) ||
      !pkv_add_size(&bytes, bytes, ALIGNMENT - 1) ||
      !pkv_add_size(&l->at, l->at, bytes & ~(size_t)(ALIGNMENT - 1)))
    l->overflow = true;
  return here;
}

static void take_inputs(pkv_device_inputs *in, layout *l, const pkv_device_forward_options *o) {
  in->slots = take(l, o->max_tokens, 1, sizeof *in->slots);
  in->sample_rows = take(l, o->max_logits, 1, sizeof *in->sample_rows);
  in->ids = take(l, o->max_tokens, 1, sizeof *in->ids);
  in->positions = take(l, o->max_tokens, 1, sizeof *in->positions);
  in->logit_rows = take(l, o->max_logits, 1, sizeof *in->logit_rows);
  for (int i = 0; i < PKV_DEVICE_CLASSES; i++)
    in->seq_len[i] = take(l, o->max_rows[i], 1, sizeof *in->seq_len[i]);
  in->first = take(l, o->max_rows[PKV_DEVICE_CLASSES - 1] + 1, 1, sizeof *in->first);
}

static void take_buffers(pkv_device_forward *f, layout *l) {
  const pkv_device_forward_options *o = &f->options;
  const pkv_hparams *hp = &f->model->hp;
  const size_t act = 2;
  f->device_inputs = take(l, (int64_t)f->input_bytes, 1, 1);
  layout inputs = {f->device_inputs, 0, false};
  take_inputs(&f->device, &inputs, o);
  for (int i = 0; i < PKV_DEVICE_CLASSES; i++)
    f->classes[i].table = take(l, o->max_rows[i], o->max_pages, sizeof *f->classes[i].table);
  f->x = take(l, o->max_tokens, hp->width, sizeof *f->x);
  const bool apart = f->model->gemma || f->divided;
  f->delta[0] = apart ? take(l, o->max_tokens, hp->width, sizeof *f->delta[0]) : NULL;
  f->delta[1] = f->divided ? take(l, o->max_tokens, hp->width, sizeof *f->delta[1]) : f->delta[0];
  f->normed = take(l, o->max_tokens, hp->width, act);
  f->qkv = take(l, o->max_tokens, f->qkv_width, act);
  f->attended = take(l, o->max_tokens, (int64_t)hp->query_heads * hp->head_dim, act);
  f->gate_up = take(l, o->max_tokens, 2 * (int64_t)hp->feed_forward, act);
  f->gated = take(l, o->max_tokens, hp->feed_forward, act);
  f->last = take(l, o->max_logits, hp->width, act);
  if (f->follows) return; /* the leader has the logits */
  f->logits = take(l, o->max_logits, f->logit_stride, sizeof *f->logits);
  f->sampled = take(l, o->max_logits, 1, sizeof *f->sampled);
  const size_t scratch =
      f->samples ? f->executor->dense->sample_bytes(o->max_logits, o->sampled_vocab) : 0;
  f->sample_scratch = take(l, (int64_t)scratch, 1, 1);
}

/* Bytes of all of them, SIZE_MAX = too many; knows input_bytes then. */
static size_t add_up(pkv_device_forward *f) {
  layout inputs = {NULL, 0, false}, sizes = {NULL, 0, false};
  take_inputs(&f->host, &inputs, &f->options);
  f->input_bytes = inputs.at;
  take_buffers(f, &sizes);
  return inputs.overflow || sizes.overflow ? SIZE_MAX : sizes.at;
}

static void set_shapes(pkv_device_forward *f, const pkv_model *model, pkv_executor *executor,
                       int32_t rank, int32_t ranks, const pkv_device_forward_options *options) {
  const pkv_layer *l = &model->layers[0];
  const pkv_dense_ops *dense = executor->dense;
  f->model = model;
  f->executor = executor;
  f->divided = ranks > 1;
  f->follows = rank > 0;
  f->options = *options;
  f->qkv_width = l->q.n + l->k.n + l->v.n;
  f->logit_stride = ((int64_t)model->hp.vocab + 7) / 8 * 8;
  f->samples = options->sampled_vocab <= PKV_DENSE_SAMPLED_VOCAB && dense->samples &&
               dense->samples(executor);
}

pkv_status pkv_device_reaches(int32_t *reaches, pkv_executor *const *executors, int32_t count,
                              pkv_error *err) {
  for (int32_t r = 0; r < count; r++)
    PKV_CHECK(err, executors[r]->dense, PKV_E_INVALID,
              "the executor runs on the CPU, not on a device");
  return executors[0]->dense->group_reaches(reaches, executors, count, err);
}

size_t pkv_device_forward_bytes(const pkv_model *model, pkv_executor *executor, int32_t rank,
                                int32_t ranks, const pkv_device_forward_options *options) {
  pkv_device_forward f = {0};
  set_shapes(&f, model, executor, rank, ranks, options);
  return add_up(&f);
}

static pkv_status create_buffers(pkv_device_forward *f, pkv_error *err) {
  const pkv_dense_ops *dense = f->executor->dense;
  const pkv_device_forward_options *o = &f->options;
  const size_t bytes = add_up(f);
  PKV_CHECK(err, bytes != SIZE_MAX, PKV_E_LIMIT,
            "buffers of %d tokens do not fit the address space", (int)o->max_tokens);
  size_t have = 0;
  PKV_TRY(dense->free_bytes(&have, f->executor, err));
  PKV_CHECK(err, bytes <= have, PKV_E_NOMEM,
            "buffers for %d tokens a step need %zu bytes on the device, %zu are free: %zu are "
            "missing",
            (int)o->max_tokens, bytes, have, bytes - have);
  PKV_TRY(f->executor->device_ops->alloc(&f->memory, f->executor, bytes, err));
  f->memory_bytes = bytes;
  layout parts = {f->memory, 0, false};
  take_buffers(f, &parts);
  PKV_TRY(dense->host_alloc(&f->host_inputs, f->executor, f->input_bytes, err));
  layout host = {f->host_inputs, 0, false};
  take_inputs(&f->host, &host, o);
  PKV_TRY(dense->host_alloc(&f->host_sampled, f->executor,
                            2 * (size_t)o->max_logits * sizeof *f->sampled, err));
  for (int i = 0; i < 2 && !f->divided; i++)
    PKV_TRY(f->executor->device_ops->event_create(&f->ended[i], f->executor, err));
  return PKV_OK;
}

/* ---- plans ---- */

static pkv_shape shape_of(const pkv_device_forward *f, int32_t q_len) {
  const pkv_hparams *hp = &f->model->hp;
  pkv_shape s = PKV_SHAPE_INIT;
  s.query_heads = hp->query_heads;
  s.kv_heads = hp->kv_heads;
  s.head_dim = hp->head_dim;
  s.page_tokens = f->options.page_tokens;
  s.q_len = q_len;
  return s;
}

static pkv_status create_class(pkv_device_forward *f, int index, pkv_error *err) {
  pkv_device_class *const c = &f->classes[index];
  const pkv_device_forward_options *o = &f->options;
  const int32_t rows = o->max_rows[index], window = f->model->hp.window;
  pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  pkv_shape shape = shape_of(f, 1 << index);
  void *known = NULL;
  if (rows == 0) return PKV_OK;
  PKV_TRY(f->executor->dense->host_alloc(
      &known, f->executor, (size_t)rows * (size_t)o->max_pages * sizeof *c->known, err));
  c->known = known;
  memset(c->known, 0, (size_t)rows * (size_t)o->max_pages * sizeof *c->known);
  PKV_TRY(pkv_device_plan_create(&c->plan, f->executor, &shape, &options, o->kv_dtype, rows,
                                 o->max_seq_len, err));
  if (index == 0 && o->shares) {
    options.route = PKV_ROUTE_SHARED;
    PKV_TRY(pkv_device_plan_create(&c->shared_plan, f->executor, &shape, &options, o->kv_dtype,
                                   rows, o->max_seq_len, err));
    options.route = PKV_ROUTE_BALANCED;
  }
  if (window == 0 || o->max_seq_len <= window) return PKV_OK;
  shape.window = window;
  return pkv_device_plan_create(&c->local_plan, f->executor, &shape, &options, o->kv_dtype, rows,
                                o->max_seq_len, err);
}

static void destroy_class(pkv_device_forward *f, int index) {
  pkv_device_class *const c = &f->classes[index];
  pkv_device_plan_destroy(c->plan);
  pkv_device_plan_destroy(c->local_plan);
  pkv_device_plan_destroy(c->shared_plan);
  f->executor->dense->host_free(f->executor, c->known);
}

/* ---- creation ---- */

static pkv_status create_parts(pkv_device_forward *f, pkv_error *err) {
  PKV_TRY(f->executor->dense->stream_create(&f->stream, f->executor, err));
  f->caches = pkv_alloc_zeroed(&f->allocator, (size_t)f->model->hp.layers, sizeof *f->caches);
  PKV_CHECK(err, f->caches, PKV_E_NOMEM, "no memory for the caches of %d layers",
            (int)f->model->hp.layers);
  PKV_TRY(create_buffers(f, err));
  for (int i = 0; i < PKV_DEVICE_CLASSES; i++)
    PKV_TRY(create_class(f, i, err));
  return PKV_OK;
}

pkv_status pkv_device_rank_select(const pkv_device_forward *rank, pkv_error *err) {
  return rank->divided ? rank->executor->dense->select(rank->executor, err) : PKV_OK;
}

static pkv_status create_rank(pkv_device_forward **out, const pkv_device_rank *parts, int32_t rank,
                              int32_t ranks, const pkv_device_forward_options *options,
                              pkv_error *err) {
  const pkv_allocator allocator = pkv_allocator_or_default(options->allocator);
  pkv_device_forward *f = pkv_alloc_zeroed(&allocator, 1, sizeof *f);
  *out = f;
  PKV_CHECK(err, f, PKV_E_NOMEM, "no memory for a device's forward pass");
  f->allocator = allocator;
  f->weights = parts[rank].weights;
  set_shapes(f, parts[rank].model, f->weights->executor, rank, ranks, options);
  PKV_TRY(pkv_device_rank_select(f, err));
  return create_parts(f, err);
}

static pkv_status create_group(pkv_device_forward *f, pkv_error *err) {
  pkv_executor *executors[PKV_MAX_RANKS];
  if (f->rank_count == 1) return PKV_OK;
  for (int32_t r = 0; r < f->rank_count; r++)
    executors[r] = f->ranks[r]->executor;
  return f->executor->dense->group_create(&f->group, executors, f->rank_count,
                                          f->options.max_tokens, err);
}

pkv_status pkv_device_forward_create(pkv_device_forward **out, const pkv_device_rank *ranks,
                                     int32_t count, const pkv_device_forward_options *options,
                                     pkv_error *err) {
  pkv_device_forward *leader = NULL;
  *out = NULL;
  PKV_CHECK(err, options->max_tokens >= 1 && options->max_logits >= 1 && options->max_pages >= 1,
            PKV_E_INVALID, "max_tokens is %d, max_logits %d, max_pages %d: at least 1 each",
            (int)options->max_tokens, (int)options->max_logits, (int)options->max_pages);
  PKV_CHECK(err, count >= 1 && count <= PKV_MAX_RANKS, PKV_E_RANGE,
            "%d ranks, possible are 1 to %d", (int)count, PKV_MAX_RANKS);
  pkv_status status = create_rank(&leader, ranks, 0, count, options, err);
  if (!leader) return status;
  leader->ranks[leader->rank_count++] = leader;
  for (int32_t r = 1; r < count && status == PKV_OK; r++) {
    pkv_device_forward *rank = NULL;
    status = create_rank(&rank, ranks, r, count, options, err);
    if (rank) leader->ranks[leader->rank_count++] = rank;
  }
  if (status == PKV_OK) status = create_group(leader, err);
  if (status != PKV_OK) {
    pkv_device_forward_destroy(leader);
    return status;
  }
  *out = leader;
  return PKV_OK;
}

bool pkv_device_forward_samples(const pkv_device_forward *f) {
  return f->samples;
}

static void destroy_rank(pkv_device_forward *f) {
  const pkv_allocator allocator = f->allocator;
  const pkv_dense_ops *dense = f->executor->dense;
  for (int i = 0; i < PKV_DEVICE_CLASSES; i++)
    destroy_class(f, i);
  dense->host_free(f->executor, f->host_inputs);
  dense->host_free(f->executor, f->host_sampled);
  for (int i = 0; i < 2; i++)
    if (f->ended[i]) f->executor->device_ops->event_destroy(f->executor, f->ended[i]);
  if (f->memory) f->executor->device_ops->free(f->executor, f->memory);
  if (f->stream) dense->stream_destroy(f->executor, f->stream);
  pkv_free(&allocator, f->caches, (size_t)f->model->hp.layers * sizeof *f->caches);
  pkv_free(&allocator, f, sizeof *f);
}

static void destroy_graphs(pkv_device_forward *f) {
  for (int32_t i = 0; i < f->graph_count; i++)
    for (int kind = 0; kind < 2; kind++)
      if (f->graphs[i].graph[kind])
        f->executor->dense->graph_destroy(f->executor, f->graphs[i].graph[kind]);
}

static pkv_status synchronize_all(const pkv_device_forward *f, pkv_error *err) {
  void *streams[PKV_MAX_RANKS];
  for (int32_t r = 0; r < f->rank_count; r++)
    streams[r] = f->ranks[r]->stream;
  if (f->group) return f->executor->dense->group_wait(f->group, streams, err);
  return f->stream ? f->executor->device_ops->synchronize(f->executor, f->stream, err) : PKV_OK;
}

void pkv_device_forward_destroy(pkv_device_forward *f) {
  if (!f) return;
  (void)!synchronize_all(f, NULL);
  for (int32_t r = 0; r < f->rank_count; r++)
    destroy_graphs(f->ranks[r]);
  if (f->group) f->executor->dense->group_destroy(f->group);
  for (int32_t r = f->rank_count; r-- > 0;)
    destroy_rank(f->ranks[r]);
}

/* ---- inputs ---- */

static pkv_status send_inputs(pkv_device_forward *f, pkv_error *err) {
  return f->executor->device_ops->copy(f->executor, f->device_inputs, f->host_inputs,
                                       f->input_bytes, f->stream, err);
}

/* Rows that are none: they read nothing and write nothing. */
static void pad_inputs(pkv_device_forward *f, int32_t first, int32_t end, int32_t first_logit) {
  for (int32_t i = first; i < end; i++) {
    f->host.ids[i] = 0;
    f->host.positions[i] = 0;
    f->host.slots[i] = -1;
    f->host.seq_len[0][i] = 0;
  }
  for (int32_t i = first_logit; i < end; i++) {
    f->host.logit_rows[i] = 0;
    f->host.sample_rows[i] = (pkv_dense_sample_row){0};
  }
}

/* What changed of row `row`'s table; mostly nothing, or one page. */
static pkv_status send_table(pkv_device_forward *f, int index, int32_t row, const int32_t *now,
                             int32_t seq_len, pkv_error *err) {
  const pkv_device_class *c = &f->classes[index];
  int32_t *known = c->known + (int64_t)row * f->options.max_pages;
  int32_t first = 0, end = (seq_len + f->options.page_tokens - 1) / f->options.page_tokens;
  if (memcmp(known, now, (size_t)end * sizeof *now) == 0) return PKV_OK;
  while (first < end && known[first] == now[first])
    first++;
  while (end > first && known[end - 1] == now[end - 1])
    end--;
  memcpy(known + first, now + first, (size_t)(end - first) * sizeof *now);
  const pkv_status status = f->executor->device_ops->copy(
      f->executor, c->table + (int64_t)row * f->options.max_pages + first, known + first,
      (size_t)(end - first) * sizeof *now, f->stream, err);
  for (int32_t i = first; i < end && status != PKV_OK; i++)
    known[i] = -1; /* no page: they go up again */
  return status;
}

static pkv_status send_rows(pkv_device_forward *f, const pkv_forward_group *g, int index,
                            pkv_error *err) {
  memcpy(f->host.seq_len[index], g->seq_len, (size_t)g->rows * sizeof *g->seq_len);
  for (int32_t r = 0; r < g->rows; r++) {
    const int32_t *table = g->block_table + r * g->block_table_stride;
    if (g->changed != NULL && g->changed[r] == 0) continue;
    PKV_TRY(send_table(f, index, r, table, g->seq_len[r], err));
  }
  return PKV_OK;
}

/* Whether row r + 1 goes on where row r ends: the same page holds the newest token of r in both,
   and such a page is one request's alone. */
static bool goes_on(const pkv_device_forward *f, const pkv_forward_group *g, int32_t r) {
  const int32_t page = (g->seq_len[r] - 1) / f->options.page_tokens;
  return r + 1 < g->rows && g->seq_len[r + 1] == g->seq_len[r] + g->q_len &&
         g->block_table[r * g->block_table_stride + page] ==
             g->block_table[(r + 1) * g->block_table_stride + page];
}

/* Rows of one prompt in a row become one chunk. */
static pkv_status send_chunks(pkv_device_forward *f, const pkv_forward_group *g, int index,
                              pkv_device_pass *pass, pkv_error *err) {
  int32_t begin = 0;
  f->host.first[0] = 0;
  for (int32_t r = 0; r < g->rows; r++) {
    const int32_t tokens = (r + 1 - begin) * g->q_len;
    if (goes_on(f, g, r)) continue;
    f->host.seq_len[index][pass->chunks] = g->seq_len[r];
    PKV_TRY(send_table(f, index, pass->chunks, g->block_table + r * g->block_table_stride,
                       g->seq_len[r], err));
    f->host.first[++pass->chunks] = (r + 1) * g->q_len;
    if (tokens > pass->longest) pass->longest = tokens;
    begin = r + 1;
  }
  return PKV_OK;
}

/* ---- graphs ---- */

/* 1, 2, 4, 8, then four a doubling: at most a quarter of a batch's rows are padding. */
static int32_t next_bucket(int32_t rows, int32_t most) {
  int32_t power = 1;
  while (2 * power <= rows)
    power *= 2;
  const int32_t next = rows < 8 ? 2 * rows : rows + power / 4;
  return next < most ? next : most;
}

static pkv_device_pass decode_pass(int32_t rows, bool shared) {
  pkv_device_pass pass = {.tokens = rows, .logit_count = rows, .shared = shared, .alone = true};
  pass.rows[0] = rows;
  return pass;
}

static pkv_status begin_capture(const pkv_device_forward *f, int32_t *begun, pkv_error *err) {
  for (*begun = 0; *begun < f->rank_count; (*begun)++) {
    const pkv_device_forward *rank = f->ranks[*begun];
    PKV_TRY(pkv_device_rank_select(rank, err));
    PKV_TRY(rank->executor->dense->graph_begin(rank->executor, rank->stream, err));
  }
  return PKV_OK;
}

/* Each rank has a graph of its own; those of one index are launched together. */
static pkv_status capture(pkv_device_forward *f, int32_t index, bool shared, pkv_error *err) {
  const pkv_device_pass pass = decode_pass(f->graphs[index].rows, shared);
  int32_t begun = 0;
  /* Once as it is: libraries load and choose outside of the capture. */
  PKV_TRY(pkv_device_pass_run(f, &pass, err));
  PKV_TRY(synchronize_all(f, err));
  pkv_status status = begin_capture(f, &begun, err);
  if (status == PKV_OK) status = pkv_device_pass_run(f, &pass, err);
  for (int32_t r = 0; r < begun; r++) {
    pkv_device_forward *const rank = f->ranks[r];
    const pkv_status selected = pkv_device_rank_select(rank, status == PKV_OK ? err : NULL);
    if (status == PKV_OK) status = selected;
    const pkv_status ended =
        rank->executor->dense->graph_end(&rank->graphs[index].graph[shared], rank->executor,
                                         rank->stream, status == PKV_OK ? err : NULL);
    if (status == PKV_OK) status = ended;
  }
  return status;
}

/* Route shared asks for more than plans can tell before a launch: where it does not run, rows are
   read one by one. */
static pkv_status drop_shared(pkv_device_forward *f, pkv_status status, pkv_error *err) {
  if (status != PKV_E_UNSUPPORTED) return status;
  PKV_TRY(synchronize_all(f, err));
  for (int32_t r = 0; r < f->rank_count; r++) {
    pkv_device_plan_destroy(f->ranks[r]->classes[0].shared_plan);
    f->ranks[r]->classes[0].shared_plan = NULL;
  }
  return PKV_OK;
}

static pkv_status capture_all(pkv_device_forward *f, pkv_error *err) {
  int32_t most = f->options.max_rows[0];
  if (most > f->options.max_logits) most = f->options.max_logits;
  for (int32_t r = 0; r < f->rank_count; r++) {
    pad_inputs(f->ranks[r], 0, most, 0);
    PKV_TRY(send_inputs(f->ranks[r], err));
  }
  for (int32_t rows = 1; f->graph_count < PKV_DEVICE_BUCKETS; rows = next_bucket(rows, most)) {
    const int32_t index = f->graph_count;
    for (int32_t r = 0; r < f->rank_count; r++)
      f->ranks[r]->graphs[f->ranks[r]->graph_count++].rows = rows;
    PKV_TRY(capture(f, index, false, err));
    if (f->classes[0].shared_plan && rows > 1)
      PKV_TRY(drop_shared(f, capture(f, index, true, err), err));
    if (rows == most) break;
  }
  return synchronize_all(f, err);
}

/* Whether all ranks have a kernel for chunks of prompts. */
static bool prefills(const pkv_device_forward *f) {
  const pkv_device_pass one = {.chunks = 1, .longest = 1 << (PKV_DEVICE_CLASSES - 1)};
  bool all = f->executor->dense->prefill_takes != NULL;
  for (int32_t r = 0; r < f->rank_count && all; r++) {
    const pkv_dense_prefill_params chunk = pkv_device_pass_chunks(f->ranks[r], 0, &one);
    all = f->executor->dense->prefill_takes(f->ranks[r]->executor, &chunk);
  }
  return all;
}

pkv_status pkv_device_forward_attach(pkv_device_forward *f, const pkv_cache *caches,
                                     pkv_error *err) {
  const int32_t layers = f->model->hp.layers;
  for (int32_t r = 0; r < f->rank_count; r++)
    memcpy(f->ranks[r]->caches, caches + (int64_t)r * layers, (size_t)layers * sizeof *caches);
  const bool all = prefills(f);
  for (int32_t r = 0; r < f->rank_count; r++)
    f->ranks[r]->prefills = all;
  if (f->options.max_rows[0] == 0 || !f->executor->dense->graph_begin) return PKV_OK;
  return capture_all(f, err);
}

/* The graph that takes this batch, or -1. */
static int32_t graph_of(const pkv_device_forward *f, const pkv_device_pass *pass) {
  for (int32_t i = 0; i < f->graph_count && pass->alone; i++)
    if (f->graphs[i].rows >= pass->tokens && f->graphs[i].rows >= pass->logit_count)
      return f->graphs[i].graph[pass->shared] ? i : -1;
  return -1;
}

/* ---- a batch ---- */

static pkv_status check_group(const pkv_device_forward *f, const pkv_forward_batch *b,
                              const pkv_forward_group *g, int *index, pkv_error *err) {
  *index = 0;
  while (*index < PKV_DEVICE_CLASSES && 1 << *index != g->q_len)
    (*index)++;
  PKV_CHECK(err, *index < PKV_DEVICE_CLASSES, PKV_E_INVALID, "rows of %d tokens", (int)g->q_len);
  PKV_CHECK(err, g->rows >= 1 && g->rows <= f->options.max_rows[*index], PKV_E_LIMIT,
            "%d rows of %d tokens, at most %d", (int)g->rows, (int)g->q_len,
            (int)f->options.max_rows[*index]);
  PKV_CHECK(err,
            g->first_token >= 0 && (int64_t)g->first_token + g->rows * g->q_len <= b->tokens &&
                g->max_pages <= f->options.max_pages,
            PKV_E_INVALID, "rows of %d tokens: tokens %d .. or %d pages outside the batch",
            (int)g->q_len, (int)g->first_token, (int)g->max_pages);
  for (int32_t r = 0; r < g->rows; r++)
    PKV_CHECK(err, g->seq_len[r] >= g->q_len && g->seq_len[r] <= f->options.max_seq_len,
              PKV_E_RANGE, "row %d has %d tokens, possible are %d to %d", (int)r,
              (int)g->seq_len[r], (int)g->q_len, (int)f->options.max_seq_len);
  return PKV_OK;
}

static pkv_status read_batch(pkv_device_forward *f, pkv_device_pass *pass,
                             const pkv_forward_batch *b, pkv_error *err) {
  *pass = (pkv_device_pass){.tokens = b->tokens, .logit_count = b->logit_count};
  for (int32_t i = 0; i < b->group_count; i++) {
    const pkv_forward_group *g = &b->groups[i];
    int index;
    PKV_TRY(check_group(f, b, g, &index, err));
    PKV_CHECK(err, pass->rows[index] == 0, PKV_E_INVALID, "two groups of rows of %d tokens",
              (int)g->q_len);
    pass->first[index] = g->first_token;
    pass->rows[index] = g->rows;
    if (index == 0) pass->shared = g->shares && f->classes[0].shared_plan;
    PKV_TRY(index == PKV_DEVICE_CLASSES - 1 && f->prefills ? send_chunks(f, g, index, pass, err)
                                                           : send_rows(f, g, index, err));
  }
  pass->alone = pass->rows[0] == pass->tokens;
  memcpy(f->host.ids, b->ids, (size_t)b->tokens * sizeof *b->ids);
  memcpy(f->host.positions, b->positions, (size_t)b->tokens * sizeof *b->positions);
  memcpy(f->host.slots, b->slots, (size_t)b->tokens * sizeof *b->slots);
  if (b->logit_count == 0) return PKV_OK;
  const size_t logits = (size_t)b->logit_count;
  PKV_CHECK(err, !b->sample_rows || f->samples, PKV_E_UNSUPPORTED, "the device does not sample");
  memcpy(f->host.logit_rows, b->logit_tokens, logits * sizeof *b->logit_tokens);
  if (b->sample_rows)
    memcpy(f->host.sample_rows, b->sample_rows, logits * sizeof *b->sample_rows);
  else
    memset(f->host.sample_rows, 0, logits * sizeof *b->sample_rows);
  return PKV_OK;
}

/* One right after the other: a rank whose graph runs alone waits for the others in vain. */
static pkv_status launch_graphs(pkv_device_forward *f, int32_t index, bool shared, pkv_error *err) {
  for (int32_t r = 0; r < f->rank_count; r++) {
    pkv_device_forward *const rank = f->ranks[r];
    PKV_TRY(pkv_device_rank_select(rank, err));
    PKV_TRY(rank->executor->dense->graph_launch(rank->executor, rank->graphs[index].graph[shared],
                                                rank->stream, err));
  }
  return PKV_OK;
}

static pkv_status launch(pkv_device_forward *f, const pkv_device_pass *pass, pkv_error *err) {
  const int32_t index = graph_of(f, pass);
  for (int32_t r = 0; r < f->rank_count; r++) {
    pkv_device_forward *const rank = f->ranks[r];
    if (index >= 0) pad_inputs(rank, pass->tokens, rank->graphs[index].rows, pass->logit_count);
    PKV_TRY(pkv_device_rank_select(rank, err));
    PKV_TRY(send_inputs(rank, err));
  }
  if (index < 0) return pkv_device_pass_run(f, pass, err);
  PKV_TRY(launch_graphs(f, index, pass->shared, err));
  if (f->rank_count > 1 || pass->logit_count != pass->tokens) return PKV_OK;
  f->last_rows = pass->tokens;
  f->last_graph = index;
  f->last_shared = pass->shared;
  return PKV_OK;
}

static int32_t *sampled_of(const pkv_device_forward *f, int32_t which) {
  return (int32_t *)f->host_sampled + (int64_t)which * f->options.max_logits;
}

/* The tokens of what is on the stream come down; one more pass is begun. */
static pkv_status send_back(pkv_device_forward *f, int32_t count, pkv_error *err) {
  const pkv_device_ops *ops = f->executor->device_ops;
  const int32_t which = (f->oldest + f->begun) % 2;
  PKV_TRY(pkv_device_rank_select(f, err));
  if (count > 0)
    PKV_TRY(ops->copy(f->executor, sampled_of(f, which), f->sampled,
                      (size_t)count * sizeof *f->sampled, f->stream, err));
  if (f->ended[which]) PKV_TRY(ops->event_record(f->executor, f->ended[which], f->stream, err));
  f->begun++;
  return PKV_OK;
}

static pkv_status fetch_logits(pkv_device_forward *f, const pkv_forward_batch *b, pkv_error *err) {
  const int64_t vocab = f->model->hp.vocab;
  /* One transfer, where rows lie as close as the host has them. */
  const int64_t at_once = f->logit_stride == vocab ? b->logit_count : 1;
  PKV_TRY(pkv_device_rank_select(f, err));
  for (int64_t i = 0; i < b->logit_count; i += at_once)
    PKV_TRY(f->executor->device_ops->copy(
        f->executor, b->logits + i * vocab, f->logits + i * f->logit_stride,
        (size_t)(at_once * vocab) * sizeof *b->logits, f->stream, err));
  return synchronize_all(f, err);
}

static pkv_status begin_batch(pkv_device_forward *f, const pkv_forward_batch *batch,
                              pkv_error *err) {
  pkv_device_pass pass = {0};
  f->last_rows = 0;
  PKV_TRY(pkv_batch_check_counts(batch, f->options.max_tokens, f->options.max_logits, err));
  PKV_TRY(pkv_batch_check_tokens(batch, f->model->hp.vocab, f->options.max_seq_len, "max_seq_len",
                                 err));
  /* Behind a pass that broke off sums may still be read, or a rank may be lost; and what the host
     is about to write may still be on its way up. */
  if (f->group || f->broken) PKV_TRY(synchronize_all(f, err));
  f->broken = true;
  for (int32_t r = 0; r < f->rank_count; r++)
    PKV_TRY(read_batch(f->ranks[r], &pass, batch, err));
  PKV_TRY(launch(f, &pass, err));
  PKV_TRY(send_back(f, batch->logit_count, err));
  f->broken = false;
  return PKV_OK;
}

pkv_status pkv_device_forward_begin(pkv_device_forward *f, const pkv_forward_batch *batch,
                                    pkv_error *err) {
  PKV_CHECK(err, f->begun == 0, PKV_E_STATE, "the pass before was not finished");
  return begin_batch(f, batch, err);
}

pkv_status pkv_device_forward_finish(pkv_device_forward *f, const pkv_forward_batch *b,
                                     pkv_error *err) {
  const int32_t which = f->oldest;
  PKV_CHECK(err, f->begun > 0, PKV_E_STATE, "no pass was begun");
  pkv_status status = f->ended[which]
                          ? f->executor->device_ops->event_wait(f->executor, f->ended[which], err)
                          : synchronize_all(f, err);
  /* A copy to memory that is not pinned waits for the stream, whatever that waits for. */
  if (status == PKV_OK && b->logits) status = fetch_logits(f, b, err);
  f->begun = status == PKV_OK ? f->begun - 1 : 0;
  f->oldest = !which;
  f->broken = f->broken || status != PKV_OK;
  PKV_TRY(status);
  if (b->sampled && b->logit_count > 0)
    memcpy(b->sampled, sampled_of(f, which), (size_t)b->logit_count * sizeof *b->sampled);
  return PKV_OK;
}

pkv_status pkv_device_forward_run(pkv_device_forward *f, const pkv_forward_batch *batch,
                                  pkv_error *err) {
  PKV_TRY(pkv_device_forward_begin(f, batch, err));
  return pkv_device_forward_finish(f, batch, err);
}

int32_t pkv_device_forward_goes_on(const pkv_device_forward *f) {
  return f->begun == 1 ? f->last_rows : 0;
}

static pkv_status go_on(pkv_device_forward *f, const pkv_forward_group *g, pkv_error *err) {
  const pkv_device_advance next = {.rows = g->rows,
                                   .chosen = f->sampled,
                                   .ids = f->device.ids,
                                   .positions = f->device.positions,
                                   .seq_len = f->device.seq_len[0],
                                   .slots = f->device.slots,
                                   .sample_rows = f->device.sample_rows,
                                   .table = f->classes[0].table,
                                   .table_stride = f->options.max_pages,
                                   .page_tokens = f->options.page_tokens};
  for (int32_t r = 0; r < g->rows; r++)
    if (g->changed == NULL || g->changed[r] != 0)
      PKV_TRY(send_table(f, 0, r, g->block_table + r * g->block_table_stride, g->seq_len[r], err));
  PKV_TRY(f->executor->device_ops->advance(f->executor, &next, f->stream, err));
  PKV_TRY(launch_graphs(f, f->last_graph, f->last_shared, err));
  return send_back(f, g->rows, err);
}

pkv_status pkv_device_forward_go_on(pkv_device_forward *f, const pkv_forward_group *group,
                                    pkv_error *err) {
  PKV_CHECK(err, f->begun == 1 && group->rows == f->last_rows, PKV_E_STATE,
            "%d rows go on from %d of %d passes", (int)group->rows, (int)f->last_rows,
            (int)f->begun);
  const pkv_status status = go_on(f, group, err);
  if (status == PKV_OK) return PKV_OK;
  f->last_rows = 0; /* the inputs may have gone on */
  f->broken = true;
  return status;
}

static pkv_status copy_page(pkv_device_forward *f, int32_t to, int32_t from, pkv_error *err) {
  for (int32_t i = 0; i < f->model->hp.layers; i++) {
    const pkv_cache *c = &f->caches[i];
    const size_t element = pkv_dtype_bytes(c->dtype);
    const size_t bytes =
        (size_t)c->page_tokens * (size_t)c->kv_heads * (size_t)c->head_dim * element;
    const int64_t k = c->k_page_stride * (int64_t)element, v = c->v_page_stride * (int64_t)element;
    PKV_TRY(f->executor->device_ops->copy(f->executor, (char *)c->k + to * k,
                                          (char *)c->k + from * k, bytes, f->stream, err));
    PKV_TRY(f->executor->device_ops->copy(f->executor, (char *)c->v + to * v,
                                          (char *)c->v + from * v, bytes, f->stream, err));
  }
  return PKV_OK;
}

pkv_status pkv_device_forward_copy_page(pkv_device_forward *f, int32_t to, int32_t from,
                                        pkv_error *err) {
  for (int32_t r = 0; r < f->rank_count; r++)
    PKV_TRY(copy_page(f->ranks[r], to, from, err));
  return PKV_OK;
}

/* ---- pages on the host ---- */

/* Of one layer's K, or V. */
static size_t part_bytes(const pkv_device_forward *f) {
  const pkv_cache *c = &f->caches[0];
  return (size_t)c->page_tokens * (size_t)c->kv_heads * (size_t)c->head_dim *
         pkv_dtype_bytes(c->dtype);
}

size_t pkv_device_forward_page_bytes(const pkv_device_forward *f, int32_t rank) {
  return part_bytes(f->ranks[rank]) * 2 * (size_t)f->model->hp.layers;
}

/* Bytes between a page's parts: K and V of layer 0, then of layer 1, ...; 0: not that way. */
static size_t part_stride(const pkv_device_forward *f) {
  const char *const first = f->caches[0].k;
  const ptrdiff_t stride = (const char *)f->caches[0].v - first;
  for (int32_t i = 0; i < f->model->hp.layers; i++) {
    const pkv_cache *c = &f->caches[i];
    if (c->k != first + 2 * i * stride || c->v != first + (2 * i + 1) * stride) return 0;
  }
  return stride > 0 ? (size_t)stride : 0;
}

/* Of one rank; a page's parts are rows. */
static pkv_status move_page(pkv_device_forward *f, int32_t page, void *host, bool store,
                            pkv_error *err) {
  const size_t bytes = part_bytes(f), stride = part_stride(f);
  const int32_t parts = 2 * f->model->hp.layers;
  char *const here = (char *)f->caches[0].k + (size_t)page * bytes;
  PKV_CHECK(err, stride > 0, PKV_E_UNSUPPORTED, "the caches of the layers are not one block");
  PKV_TRY(pkv_device_rank_select(f, err));
  return store ? f->executor->device_ops->copy_rows(f->executor, host, bytes, here, stride, bytes,
                                                    parts, f->stream, err)
               : f->executor->device_ops->copy_rows(f->executor, here, stride, host, bytes, bytes,
                                                    parts, f->stream, err);
}

pkv_status pkv_device_forward_store_page(pkv_device_forward *f, void *const *host, int32_t page,
                                         pkv_error *err) {
  for (int32_t r = 0; r < f->rank_count; r++)
    PKV_TRY(move_page(f->ranks[r], page, host[r], true, err));
  return PKV_OK;
}

pkv_status pkv_device_forward_load_page(pkv_device_forward *f, int32_t page, void *const *host,
                                        pkv_error *err) {
  for (int32_t r = 0; r < f->rank_count; r++)
    PKV_TRY(move_page(f->ranks[r], page, host[r], false, err));
  return PKV_OK;
}

pkv_status pkv_device_forward_wait(pkv_device_forward *f, pkv_error *err) {
  return synchronize_all(f, err);
}
