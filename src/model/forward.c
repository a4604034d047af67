/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward pass of a model over a mixed batch: tables and scratch are taken at
 * creation, a run allocates nothing. Activations pass in chunks of rows, so that the scratch of the
 * wide layers does not grow with the batch; rows are independent, so the chunks never show in a
 * result.
 */
#include "model/model.h"

#include <math.h>
#include <string.h>

#include "base/arena.h"
#include "base/status.h"
#include "model/model_parts.h"

#define CHUNK_ROWS 256 /* rows of the batch that pass through a product together */

struct pkv_forward {
  pkv_allocator allocator;
  const pkv_model *model;
  pkv_executor *executor;
  pkv_forward_options options;
  void *block;
  size_t block_bytes;
  int32_t chunk;     /* rows of the chunk buffers */
  double *frequency; /* [tables, rope_dim / 2] radians a position */
  float *cos_sin;    /* [tables, max_positions, rope_dim / 2, 2], `angles` positions filled */
  int32_t tables;    /* of rotations: 2 where local layers have a base of their own */
  int32_t angles;
  float *x;             /* [max_tokens, width] the residual stream */
  float *q;             /* [max_tokens, query_heads * head_dim] */
  float *attended;      /* like q */
  float *last_x;        /* [max_logits, width] rows of x that need logits */
  float *last_attended; /* [max_logits, query_heads * head_dim] */
  float *normed;        /* [chunk, width] */
  float *k, *v;         /* [chunk, kv_heads * head_dim] */
  float *gate, *up;     /* [chunk, feed_forward] */
  void *scratch;        /* of the products */
  void *workspace;      /* of attention */
};

typedef struct widths {
  int64_t width, q, kv, ffn, vocab;
} widths;

static widths widths_of(const pkv_model *m) {
  const pkv_hparams *hp = &m->hp;
  return (widths){hp->width, (int64_t)hp->query_heads * hp->head_dim,
                  (int64_t)hp->kv_heads * hp->head_dim, hp->feed_forward, hp->vocab};
}

/* ---- creation ---------------------------------------------------------------------------- */

/* Two passes over the same list of parts: one adds them up, one hands them out. */
typedef struct layout {
  pkv_arena *arena; /* NULL: add up */
  size_t total;
  bool overflow;
} layout;

static void *take(layout *l, size_t count, size_t size) {
  size_t bytes = 0;
  if (l->arena) return count ? pkv_arena_take(l->arena, count, size) : NULL;
  if (!pkv_mul_size(&bytes, count, size) || !pkv_add_size(&bytes, bytes, PKV_CACHE_LINE) ||
      !pkv_add_size(&l->total, l->total, bytes))
    l->overflow = true;
  return NULL;
}

static size_t scratch_bytes(const pkv_forward *f, const widths *w) {
  const pkv_backend_ops *ops = f->executor->ops;
  int64_t widest = w->width > w->q ? w->width : w->q;
  if (w->ffn > widest) widest = w->ffn;
  const size_t layer = ops->matmul_scratch_bytes(f->chunk, widest);
  const size_t head = ops->matmul_scratch_bytes(f->options.max_logits, w->width);
  return layer > head ? layer : head;
}

static void take_parts(pkv_forward *f, layout *l) {
  const widths w = widths_of(f->model);
  const size_t tokens = (size_t)f->options.max_tokens, logits = (size_t)f->options.max_logits;
  const size_t chunk = (size_t)f->chunk, row = sizeof(float);
  f->frequency = take(l, (size_t)f->tables * (size_t)f->model->hp.rope_dim / 2, sizeof(double));
  f->cos_sin = take(l, (size_t)f->options.max_positions,
                    (size_t)f->tables * (size_t)f->model->hp.rope_dim * row);
  f->x = take(l, tokens, (size_t)w.width * row);
  f->q = take(l, tokens, (size_t)w.q * row);
  f->attended = take(l, tokens, (size_t)w.q * row);
  f->last_x = take(l, logits, (size_t)w.width * row);
  f->last_attended = take(l, logits, (size_t)w.q * row);
  f->normed = take(l, chunk, (size_t)w.width * row);
  f->k = take(l, chunk, (size_t)w.kv * row);
  f->v = take(l, chunk, (size_t)w.kv * row);
  f->gate = take(l, chunk, (size_t)w.ffn * row);
  f->up = take(l, chunk, (size_t)w.ffn * row);
  f->scratch = take(l, scratch_bytes(f, &w), 1);
  f->workspace = take(l, f->options.workspace_bytes, 1);
}

static pkv_status take_buffers(pkv_forward *f, pkv_error *err) {
  layout sizes = {NULL, 0, false};
  take_parts(f, &sizes);
  PKV_CHECK(err, !sizes.overflow, PKV_E_LIMIT,
            "scratch of %d tokens and %d positions does not fit the address space",
            (int)f->options.max_tokens, (int)f->options.max_positions);
  f->block = pkv_alloc(&f->allocator, sizes.total);
  PKV_CHECK(err, f->block, PKV_E_NOMEM, "no memory for %zu bytes of scratch", sizes.total);
  f->block_bytes = sizes.total;
  pkv_arena arena;
  pkv_arena_init(&arena, f->block, sizes.total);
  layout parts = {&arena, 0, false};
  take_parts(f, &parts);
  return PKV_OK;
}

/* The pair, as a fraction of its number, that turns so many times within the original context. */
static double yarn_pair(const pkv_model *m, double turns) {
  const double tau = 2.0 * 3.14159265358979323846;
  return m->hp.rope_dim * log(m->yarn.original / (turns * tau)) /
         (2.0 * log((double)m->hp.rope_base));
}

/* What yarn divides the frequency of a pair by: 1 for those that turn often, factor for those that
   hardly turn, and a mean of both frequencies between. */
static double yarn_divisor(const pkv_model *m, int32_t pair) {
  if (m->yarn.factor == 0.0) return 1.0;
  const double low = fmax(floor(yarn_pair(m, m->yarn.fast)), 0.0);
  const double high = fmin(ceil(yarn_pair(m, m->yarn.slow)), m->hp.rope_dim - 1.0);
  const double ramp = fmin(fmax((pair - low) / fmax(high - low, 0.001), 0.0), 1.0);
  return 1.0 / ((1.0 - ramp) + ramp / m->yarn.factor);
}

int32_t pkv_rope_tables(const pkv_model *m) {
  return m->gemma ? 2 : 1;
}

void pkv_rope_frequencies(double *frequency, const pkv_model *m) {
  for (int32_t j = 0; j < m->hp.rope_dim / 2; j++) {
    frequency[j] = pow((double)m->hp.rope_base, -2.0 * j / m->hp.rope_dim);
    frequency[j] /= (double)m->rope_factor;
    frequency[j] /= yarn_divisor(m, j);
    if (m->rope_freqs) frequency[j] /= (double)m->rope_freqs[j];
    if (pkv_rope_tables(m) == 2)
      frequency[m->hp.rope_dim / 2 + j] = pow((double)m->local_base, -2.0 * j / m->hp.rope_dim);
  }
}

double pkv_rope_length(const pkv_model *m) {
  const double yarn = m->yarn.factor;
  return yarn > 1.0 ? 1.0 + 0.1 * log(yarn) : 1.0;
}

/*
 * The table grows with the positions that occur: a file that names a context of millions costs
 * address space, not memory and minutes. Angles in double: at position 8,000 a float angle would
 * be off by 2.4e-4.
 */
static void grow_cos_sin(pkv_forward *f, const pkv_forward_batch *b) {
  const int32_t half = f->model->hp.rope_dim / 2;
  const double length = pkv_rope_length(f->model);
  int32_t last = -1;
  for (int32_t i = 0; i < b->tokens; i++)
    last = b->positions[i] > last ? b->positions[i] : last;
  for (; f->angles <= last; f->angles++) {
    for (int32_t t = 0; t < f->tables; t++) {
      float *to = f->cos_sin + ((int64_t)t * f->options.max_positions + f->angles) * half * 2;
      const double *frequency = f->frequency + t * half;
      for (int32_t j = 0; j < half; j++) {
        to[2 * j] = (float)(length * cos((double)f->angles * frequency[j]));
        to[2 * j + 1] = (float)(length * sin((double)f->angles * frequency[j]));
      }
    }
  }
}

pkv_status pkv_forward_create(pkv_forward **out, const pkv_model *model, pkv_executor *executor,
                              const pkv_forward_options *options, pkv_error *err) {
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, model && executor && options, PKV_E_INVALID, "%s is NULL",
            !model ? "model" : (!executor ? "executor" : "options"));
  PKV_CHECK(err, model->layers, PKV_E_STATE, "the model was opened for its tokenizer only");
  PKV_CHECK(err, model->embed.data, PKV_E_STATE,
            "the model's random weights are made on a device: the CPU has none");
  PKV_CHECK(err, options->max_tokens >= 1, PKV_E_INVALID, "max_tokens is %d, must be at least 1",
            (int)options->max_tokens);
  PKV_CHECK(err, options->max_logits >= 0, PKV_E_INVALID, "max_logits is %d, must not be negative",
            (int)options->max_logits);
  PKV_CHECK(err, options->max_positions >= 1, PKV_E_INVALID,
            "max_positions is %d, must be at least 1", (int)options->max_positions);
  const pkv_allocator allocator = pkv_allocator_or_default(options->allocator);
  pkv_forward *f = pkv_alloc_zeroed(&allocator, 1, sizeof *f);
  PKV_CHECK(err, f, PKV_E_NOMEM, "no memory for a forward pass");
  f->allocator = allocator;
  f->model = model;
  f->executor = executor;
  f->options = *options;
  f->tables = pkv_rope_tables(model);
  f->chunk = options->max_tokens < CHUNK_ROWS ? options->max_tokens : CHUNK_ROWS;
  const pkv_status status = take_buffers(f, err);
  if (status != PKV_OK) {
    pkv_forward_destroy(f);
    return status;
  }
  pkv_rope_frequencies(f->frequency, model);
  *out = f;
  return PKV_OK;
}

void pkv_forward_destroy(pkv_forward *f) {
  if (!f) return;
  const pkv_allocator allocator = f->allocator;
  pkv_free(&allocator, f->block, f->block_bytes);
  pkv_free(&allocator, f, sizeof *f);
}

/* ---- checks ------------------------------------------------------------------------------ */

static pkv_status check_plan(const pkv_forward *f, const struct pkv_plan *plan, int32_t window,
                             int32_t index, pkv_error *err) {
  const pkv_hparams *hp = &f->model->hp;
  PKV_CHECK(err, plan->magic == PKV_PLAN_MAGIC, PKV_E_INVALID, "groups[%d].plan is not a plan",
            (int)index);
  PKV_CHECK(err, plan->window == window, PKV_E_INVALID, "groups[%d]: a plan of window %d, not %d",
            (int)index, (int)plan->window, (int)window);
  PKV_CHECK(err,
            plan->query_heads == hp->query_heads && plan->kv_heads == hp->kv_heads &&
                plan->head_dim == hp->head_dim,
            PKV_E_INVALID,
            "groups[%d].plan is for %d query heads, %d KV heads of %d, the model has %d, %d of %d",
            (int)index, (int)plan->query_heads, (int)plan->kv_heads, (int)plan->head_dim,
            (int)hp->query_heads, (int)hp->kv_heads, (int)hp->head_dim);
  PKV_CHECK(err, (uint64_t)plan->workspace_bytes <= f->options.workspace_bytes, PKV_E_TOO_SMALL,
            "groups[%d].plan needs %lld bytes of workspace, workspace_bytes is %zu", (int)index,
            (long long)plan->workspace_bytes, f->options.workspace_bytes);
  return PKV_OK;
}

static pkv_status check_group(const pkv_forward *f, const pkv_forward_batch *b, int32_t index,
                              int64_t *next, pkv_error *err) {
  const pkv_forward_group *g = &b->groups[index];
  const pkv_hparams *hp = &f->model->hp;
  PKV_CHECK(err, g->plan, PKV_E_INVALID, "groups[%d].plan is NULL", (int)index);
  const struct pkv_plan *plan = g->plan;
  PKV_TRY(check_plan(f, plan, 0, index, err));
  if (g->local_plan) {
    PKV_TRY(check_plan(f, g->local_plan, hp->window, index, err));
    PKV_CHECK(err, g->local_plan->rows == plan->rows && g->local_plan->q_len == plan->q_len,
              PKV_E_INVALID, "groups[%d]: plan has %d rows of %d, local_plan %d of %d", (int)index,
              (int)plan->rows, (int)plan->q_len, (int)g->local_plan->rows,
              (int)g->local_plan->q_len);
  }
  PKV_CHECK(err, g->local_plan || hp->window == 0 || f->options.max_positions <= hp->window,
            PKV_E_INVALID,
            "groups[%d].local_plan is NULL, but max_positions is %d and local layers see %d",
            (int)index, (int)f->options.max_positions, (int)hp->window);
  PKV_CHECK(err, g->first_token == *next, PKV_E_INVALID,
            "groups[%d].first_token is %d, the groups before it end at %lld", (int)index,
            (int)g->first_token, (long long)*next);
  *next += (int64_t)plan->rows * plan->q_len;
  return PKV_OK;
}

pkv_status pkv_batch_check_counts(const pkv_forward_batch *b, int32_t max_tokens,
                                  int32_t max_logits, pkv_error *err) {
  PKV_CHECK(err, b->tokens >= 1 && b->tokens <= max_tokens, PKV_E_LIMIT,
            "tokens is %d, max_tokens is %d", (int)b->tokens, (int)max_tokens);
  PKV_CHECK(err, b->logit_count >= 0 && b->logit_count <= max_logits, PKV_E_LIMIT,
            "logit_count is %d, max_logits is %d", (int)b->logit_count, (int)max_logits);
  return PKV_OK;
}

pkv_status pkv_batch_check_tokens(const pkv_forward_batch *b, int32_t vocab, int32_t positions,
                                  const char *limit, pkv_error *err) {
  for (int32_t i = 0; i < b->tokens; i++) {
    PKV_CHECK(err, b->ids[i] >= 0 && b->ids[i] < vocab, PKV_E_RANGE,
              "ids[%d] is %d, the vocabulary is 0..%d", (int)i, (int)b->ids[i], (int)vocab - 1);
    PKV_CHECK(err, b->positions[i] >= 0 && b->positions[i] < positions, PKV_E_RANGE,
              "positions[%d] is %d, %s is %d", (int)i, (int)b->positions[i], limit, (int)positions);
  }
  for (int32_t i = 0; i < b->logit_count; i++)
    PKV_CHECK(err, b->logit_tokens[i] >= 0 && b->logit_tokens[i] < b->tokens, PKV_E_RANGE,
              "logit_tokens[%d] is %d, the batch has %d tokens", (int)i, (int)b->logit_tokens[i],
              (int)b->tokens);
  return PKV_OK;
}

static pkv_status check_batch(const pkv_forward *f, const pkv_cache *caches,
                              const pkv_forward_batch *b, pkv_error *err) {
  PKV_CHECK(err, f && caches && b, PKV_E_INVALID, "%s is NULL",
            !f ? "forward" : (!caches ? "caches" : "batch"));
  PKV_TRY(pkv_batch_check_counts(b, f->options.max_tokens, f->options.max_logits, err));
  PKV_CHECK(err, b->ids && b->positions && b->slots && b->groups && b->group_count >= 1,
            PKV_E_INVALID, "ids, positions, slots or groups of the batch is missing");
  PKV_CHECK(err, b->logit_count == 0 || (b->logit_tokens && b->logits), PKV_E_INVALID,
            "logit_count is %d, but %s is NULL", (int)b->logit_count,
            b->logit_tokens ? "logits" : "logit_tokens");
  int64_t next = 0;
  for (int32_t i = 0; i < b->group_count; i++)
    PKV_TRY(check_group(f, b, i, &next, err));
  PKV_CHECK(err, next == b->tokens, PKV_E_INVALID, "the groups have %lld tokens, the batch has %d",
            (long long)next, (int)b->tokens);
  for (int32_t i = 0; i < f->model->hp.layers; i++) {
    PKV_CHECK(err,
              caches[i].kv_heads == f->model->hp.kv_heads &&
                  caches[i].head_dim == f->model->hp.head_dim,
              PKV_E_INVALID, "caches[%d] has %d KV heads of %d, the model has %d of %d", (int)i,
              (int)caches[i].kv_heads, (int)caches[i].head_dim, (int)f->model->hp.kv_heads,
              (int)f->model->hp.head_dim);
  }
  return pkv_batch_check_tokens(b, f->model->hp.vocab, f->options.max_positions, "max_positions",
                                err);
}

/* ---- the pass ---------------------------------------------------------------------------- */

static pkv_matmul_params product(const pkv_forward *f, const pkv_weight *w, const float *bias,
                                 const float *x, int64_t m, float *y) {
  return (pkv_matmul_params){.w = *w,
                             .compute = f->options.compute,
                             .m = m,
                             .x = x,
                             .x_stride = w->k,
                             .y = y,
                             .y_stride = w->n,
                             .bias = bias,
                             .scratch = f->scratch};
}

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* The rotations of a layer. */
static const float *cos_sin_of(const pkv_forward *f, int32_t layer) {
  const bool local = f->tables == 2 && f->model->layers[layer].local;
  return f->cos_sin + (local ? (int64_t)f->options.max_positions * f->model->hp.rope_dim : 0);
}

/* Norms of single heads, where the model has them. */
static pkv_status norm_heads(const pkv_forward *f, const pkv_layer *l, float *q, int64_t rows,
                             pkv_error *err) {
  const pkv_backend_ops *ops = f->executor->ops;
  const pkv_hparams *hp = &f->model->hp;
  const int64_t dim = hp->head_dim;
  if (!l->q_norm) return PKV_OK;
  PKV_TRY(ops->rms_norm(f->executor, q, dim, q, dim, l->q_norm, rows * hp->query_heads, dim,
                        hp->norm_eps, err));
  return ops->rms_norm(f->executor, f->k, dim, f->k, dim, l->k_norm, rows * hp->kv_heads, dim,
                       hp->norm_eps, err);
}

/* Norm, q k v, rope, and the new K and V into their pages. */
static pkv_status attend_inputs(pkv_forward *f, int32_t layer, const pkv_cache *cache,
                                const pkv_forward_batch *b, pkv_error *err) {
  const pkv_layer *l = &f->model->layers[layer];
  const float *cos_sin = cos_sin_of(f, layer);
  const pkv_hparams *hp = &f->model->hp;
  const pkv_backend_ops *ops = f->executor->ops;
  const widths w = widths_of(f->model);
  for (int64_t first = 0; first < b->tokens; first += f->chunk) {
    const int64_t m = smaller(f->chunk, b->tokens - first);
    float *q = f->q + first * w.q;
    PKV_TRY(ops->rms_norm(f->executor, f->normed, w.width, f->x + first * w.width, w.width,
                          l->attn_norm, m, w.width, hp->norm_eps, err));
    const pkv_matmul_params qkv[3] = {product(f, &l->q, l->q_bias, f->normed, m, q),
                                      product(f, &l->k, l->k_bias, f->normed, m, f->k),
                                      product(f, &l->v, l->v_bias, f->normed, m, f->v)};
    PKV_TRY(ops->matmul_many(f->executor, qkv, 3, err));
    PKV_TRY(norm_heads(f, l, q, m, err));
    PKV_TRY(ops->rope(f->executor, q, w.q, m, hp->query_heads, hp->head_dim, hp->rope_dim,
                      hp->rope_pairs_adjacent, cos_sin, b->positions + first, err));
    PKV_TRY(ops->rope(f->executor, f->k, w.kv, m, hp->kv_heads, hp->head_dim, hp->rope_dim,
                      hp->rope_pairs_adjacent, cos_sin, b->positions + first, err));
    pkv_append_args append = PKV_APPEND_ARGS_INIT;
    append.cache = cache;
    append.tokens = m;
    append.slots = b->slots + first;
    append.k = f->k;
    append.v = f->v;
    PKV_TRY(pkv_append(f->executor, &append, err));
  }
  return PKV_OK;
}

static pkv_status attend(pkv_forward *f, int32_t layer, const pkv_cache *cache,
                         const pkv_forward_batch *b, pkv_error *err) {
  const bool local = f->model->layers[layer].local;
  const widths w = widths_of(f->model);
  for (int32_t i = 0; i < b->group_count; i++) {
    const pkv_forward_group *g = &b->groups[i];
    pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
    args.plan = local && g->local_plan ? g->local_plan : g->plan;
    args.cache = cache;
    args.block_table = g->block_table;
    args.block_table_stride = g->block_table_stride;
    args.max_pages = g->max_pages;
    args.q = f->q + g->first_token * w.q;
    args.out = f->attended + g->first_token * w.q;
    args.workspace = f->workspace;
    args.scale = f->model->attn_scale;
    args.workspace_bytes = f->options.workspace_bytes;
    PKV_TRY(pkv_attention_run(f->executor, &args, err));
  }
  return PKV_OK;
}

/* x += norm(y), in y's place; without a norm the product has added to x itself. */
static pkv_status back(const pkv_forward *f, float *x, float *y, const float *norm, int64_t rows,
                       pkv_error *err) {
  const pkv_backend_ops *ops = f->executor->ops;
  const int64_t width = f->model->hp.width;
  if (!norm) return PKV_OK;
  PKV_TRY(ops->rms_norm(f->executor, y, width, y, width, norm, rows, width, f->model->hp.norm_eps,
                        err));
  return ops->add(f->executor, x, y, rows * width, err);
}

/* What follows attention in a layer, for `rows` rows of x and of the heads' outputs. */
static pkv_status feed_forward(pkv_forward *f, const pkv_layer *l, float *x, const float *attended,
                               int64_t rows, pkv_error *err) {
  const pkv_backend_ops *ops = f->executor->ops;
  const widths w = widths_of(f->model);
  for (int64_t first = 0; first < rows; first += f->chunk) {
    const int64_t m = smaller(f->chunk, rows - first);
    float *xc = x + first * w.width;
    pkv_matmul_params o = product(f, &l->o, l->o_bias, attended + first * w.q, m, xc);
    o.accumulate = l->attn_post_norm == NULL;
    if (l->attn_post_norm) o.y = f->normed;
    PKV_TRY(ops->matmul(f->executor, &o, err));
    PKV_TRY(back(f, xc, f->normed, l->attn_post_norm, m, err));
    PKV_TRY(ops->rms_norm(f->executor, f->normed, w.width, xc, w.width, l->ffn_norm, m, w.width,
                          f->model->hp.norm_eps, err));
    const pkv_matmul_params two[2] = {product(f, &l->gate, NULL, f->normed, m, f->gate),
                                      product(f, &l->up, NULL, f->normed, m, f->up)};
    PKV_TRY(ops->matmul_many(f->executor, two, 2, err));
    PKV_TRY((f->model->gemma ? ops->geglu : ops->swiglu)(f->executor, f->gate, f->gate, f->up,
                                                         m * w.ffn, err));
    pkv_matmul_params down = product(f, &l->down, NULL, f->gate, m, xc);
    down.accumulate = l->ffn_post_norm == NULL;
    if (l->ffn_post_norm) down.y = f->normed;
    PKV_TRY(ops->matmul(f->executor, &down, err));
    PKV_TRY(back(f, xc, f->normed, l->ffn_post_norm, m, err));
  }
  return PKV_OK;
}

/* Only rows whose logits are wanted go through the rest of the last layer and the output head. */
static pkv_status finish(pkv_forward *f, const pkv_layer *last, const pkv_forward_batch *b,
                         pkv_error *err) {
  const pkv_backend_ops *ops = f->executor->ops;
  const pkv_hparams *hp = &f->model->hp;
  const widths w = widths_of(f->model);
  if (b->logit_count == 0) return PKV_OK;
  for (int64_t i = 0; i < b->logit_count; i++) {
    const int64_t token = b->logit_tokens[i];
    memcpy(f->last_x + i * w.width, f->x + token * w.width, (size_t)w.width * sizeof(float));
    memcpy(f->last_attended + i * w.q, f->attended + token * w.q, (size_t)w.q * sizeof(float));
  }
  PKV_TRY(feed_forward(f, last, f->last_x, f->last_attended, b->logit_count, err));
  PKV_TRY(ops->rms_norm(f->executor, f->last_x, w.width, f->last_x, w.width, f->model->output_norm,
                        b->logit_count, w.width, hp->norm_eps, err));
  const pkv_matmul_params head =
      product(f, &f->model->output, NULL, f->last_x, b->logit_count, b->logits);
  return ops->matmul(f->executor, &head, err);
}

pkv_status pkv_forward_run(pkv_forward *f, const pkv_cache *caches, const pkv_forward_batch *batch,
                           pkv_error *err) {
  PKV_TRY(check_batch(f, caches, batch, err));
  const pkv_model *m = f->model;
  grow_cos_sin(f, batch);
  /* One fstat a pass: a model file cut short is an error, not a SIGBUS (but for a race). */
  PKV_TRY(pkv_gguf_check_unchanged(m->gguf, err));
  PKV_TRY(f->executor->ops->embed(f->executor, f->x, m->hp.width, &m->embed, batch->ids,
                                  batch->tokens, m->embed_scale, err));
  for (int32_t i = 0; i < m->hp.layers; i++) {
    const pkv_layer *l = &m->layers[i];
    PKV_TRY(attend_inputs(f, i, &caches[i], batch, err));
    PKV_TRY(attend(f, i, &caches[i], batch, err));
    if (i + 1 < m->hp.layers)
      PKV_TRY(feed_forward(f, l, f->x, f->attended, batch->tokens, err));
    else
      PKV_TRY(finish(f, l, batch, err));
  }
  return PKV_OK;
}
