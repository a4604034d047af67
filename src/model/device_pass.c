/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One pass on the stream: plans from the lengths that lie on the device, then the layers, the head
 * and the likeliest tokens. Nothing here waits or looks at a result: a pass can be captured.
 */
#include <math.h>

#include "base/status.h"
#include "model/device_forward_parts.h"

/* ---- attention ---- */

static pkv_sharing sharing_of(const pkv_device_forward *f) {
  pkv_sharing s = PKV_SHARING_INIT;
  s.flags = PKV_TABLE_CHAINED; /* equal pages have equal ones before them: the engine's word */
  s.block_table = f->classes[0].table;
  s.block_table_stride = f->options.max_pages;
  s.max_pages = f->options.max_pages;
  return s;
}

static bool is_chunked(const pkv_device_pass *pass, int index) {
  return index == PKV_DEVICE_CLASSES - 1 && pass->chunks > 0;
}

static pkv_status build_plans(pkv_device_forward *f, const pkv_device_pass *pass, pkv_error *err) {
  for (int i = 0; i < PKV_DEVICE_CLASSES; i++) {
    const pkv_device_class *c = &f->classes[i];
    const int32_t *seq_len = f->device.seq_len[i];
    const bool shared = i == 0 && pass->shared;
    /* Two steps behind: alone, the kernel ahead of attention writes each row's newest token only;
       in a mixed batch it may write any. */
    const int32_t overlap = pass->alone ? 2 : 1;
    if (pass->rows[i] == 0 || is_chunked(pass, i)) continue;
    if (shared) {
      const pkv_sharing sharing = sharing_of(f);
      PKV_TRY(pkv_device_plan_build_shared(c->shared_plan, pass->rows[i], seq_len, &sharing,
                                           f->stream, err));
      pkv_device_plan_set_overlap(c->shared_plan, overlap);
    } else {
      PKV_TRY(pkv_device_plan_build(c->plan, pass->rows[i], seq_len, f->stream, err));
      pkv_device_plan_set_overlap(c->plan, overlap);
    }
    if (!c->local_plan) continue;
    PKV_TRY(pkv_device_plan_build(c->local_plan, pass->rows[i], seq_len, f->stream, err));
    pkv_device_plan_set_overlap(c->local_plan, overlap);
  }
  return PKV_OK;
}

static char *at_row(void *base, int64_t row, int64_t width) {
  return (char *)base + row * width * 2;
}

pkv_dense_prefill_params pkv_device_pass_chunks(const pkv_device_forward *f, int32_t layer,
                                                const pkv_device_pass *pass) {
  const int last = PKV_DEVICE_CLASSES - 1;
  const pkv_hparams *hp = &f->model->hp;
  const int64_t width = (int64_t)hp->query_heads * hp->head_dim;
  pkv_dense_prefill_params p = {0};
  p.act = f->weights->act;
  p.rows = pass->chunks;
  p.tokens = pass->rows[last] << last;
  p.longest = pass->longest;
  p.first = f->device.first;
  p.seq_len = f->device.seq_len[last];
  p.cache = f->caches[layer];
  p.block_table = f->classes[last].table;
  p.block_table_stride = f->options.max_pages;
  p.max_pages = f->options.max_pages;
  p.query_heads = hp->query_heads;
  p.q = at_row(f->qkv, pass->first[last], f->qkv_width);
  p.q_stride = f->qkv_width;
  p.out = at_row(f->attended, pass->first[last], width);
  p.out_stride = width;
  p.scale = f->model->attn_scale > 0.0f ? f->model->attn_scale : 1.0f / sqrtf((float)hp->head_dim);
  p.window = f->model->layers[layer].local ? hp->window : 0;
  return p;
}

static pkv_status attend_chunks(pkv_device_forward *f, int32_t layer, const pkv_device_pass *pass,
                                pkv_error *err) {
  const pkv_dense_prefill_params p = pkv_device_pass_chunks(f, layer, pass);
  return f->executor->dense->prefill(f->executor, &p, f->stream, err);
}

static pkv_status attend(pkv_device_forward *f, int32_t layer, const pkv_device_pass *pass,
                         pkv_error *err) {
  const pkv_hparams *hp = &f->model->hp;
  const int64_t width = (int64_t)hp->query_heads * hp->head_dim;
  const bool local = f->model->layers[layer].local;
  for (int i = PKV_DEVICE_CLASSES; i-- > 0;) {
    const pkv_device_class *c = &f->classes[i];
    if (pass->rows[i] == 0) continue;
    if (is_chunked(pass, i)) {
      PKV_TRY(attend_chunks(f, layer, pass, err));
      continue;
    }
    pkv_device_plan *plan = i == 0 && pass->shared ? c->shared_plan : c->plan;
    pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
    args.cache = &f->caches[layer];
    args.block_table = c->table;
    args.block_table_stride = f->options.max_pages;
    args.max_pages = f->options.max_pages;
    args.q_dtype = f->weights->act;
    args.out_dtype = f->weights->act;
    args.q = at_row(f->qkv, pass->first[i], f->qkv_width);
    args.q_token_stride = f->qkv_width;
    args.q_head_stride = hp->head_dim;
    args.out = at_row(f->attended, pass->first[i], width);
    args.scale = f->model->attn_scale;
    PKV_TRY(pkv_device_attention(f->executor, local && c->local_plan ? c->local_plan : plan, &args,
                                 f->stream, err));
  }
  return PKV_OK;
}

/* ---- layers ---- */

typedef struct product {
  const void *x;
  void *y;
  int64_t y_stride;
  int32_t m;
  bool adds; /* to the residual stream; else y is act's */
  bool gate;
} product;

static pkv_status multiply(pkv_device_forward *f, const pkv_weight *w, const product *a,
                           pkv_error *err) {
  pkv_dense_matmul_params p = {0};
  p.w = *w;
  p.act = f->weights->act;
  p.m = a->m;
  p.x = a->x;
  p.x_stride = w->k;
  p.y = a->y;
  p.y_stride = a->y_stride;
  p.y_f32 = a->adds;
  /* What is normed or summed before it is added comes out alone. */
  p.accumulate = a->adds && a->y == f->x;
  if (a->gate) {
    p.gate = f->model->gemma ? PKV_DENSE_GELU : PKV_DENSE_SILU;
    p.gate_scratch = f->gate_up;
  }
  return f->executor->dense->matmul(f->executor, &p, f->stream, err);
}

/* Of the residual stream, to `y`. */
static pkv_dense_norm_params norm_params(const pkv_device_forward *f, int32_t m,
                                         const float *weight, void *y) {
  return (pkv_dense_norm_params){.act = f->weights->act,
                                 .m = m,
                                 .n = f->model->hp.width,
                                 .eps = f->model->hp.norm_eps,
                                 .x = f->x,
                                 .weight = weight,
                                 .y = y};
}

pkv_status pkv_device_pass_rotate(pkv_device_forward *f, int32_t layer, int32_t m, pkv_error *err) {
  const pkv_hparams *hp = &f->model->hp;
  const pkv_device_layer *l = &f->weights->layers[layer];
  const bool local = pkv_rope_tables(f->model) == 2 && f->model->layers[layer].local;
  pkv_dense_rope_params p = {0};
  p.act = f->weights->act;
  p.m = m;
  p.query_heads = hp->query_heads;
  p.kv_heads = hp->kv_heads;
  p.head_dim = hp->head_dim;
  p.qkv = f->qkv;
  p.stride = f->qkv_width;
  p.bias = l->qkv_bias;
  p.q_norm = l->q_norm;
  p.k_norm = l->k_norm;
  p.eps = hp->norm_eps;
  p.dims = hp->rope_dim;
  p.adjacent = hp->rope_pairs_adjacent;
  p.frequency = f->weights->frequency + (local ? hp->rope_dim / 2 : 0);
  p.length = (float)pkv_rope_length(f->model);
  p.positions = f->device.positions;
  p.slots = f->device.slots;
  p.cache = f->caches[layer];
  return f->executor->dense->rope(f->executor, &p, f->stream, err);
}

pkv_status pkv_device_pass_norm(pkv_device_forward *f, int32_t m, const float *weight,
                                pkv_error *err) {
  const pkv_dense_norm_params p = norm_params(f, m, weight, f->normed);
  return f->executor->dense->norm(f->executor, &p, f->stream, err);
}

/* Where what a half of a layer adds goes: to the stream itself, unless something is to be done with
   it first. */
static float *sum_of(const pkv_device_forward *f, int half, const float *post_norm) {
  return f->divided || post_norm ? f->delta[half] : f->x;
}

static pkv_status run_attention(pkv_device_forward *f, int32_t layer, const pkv_device_pass *pass,
                                pkv_error *err) {
  const pkv_device_layer *l = &f->weights->layers[layer];
  const int32_t m = pass->tokens, width = f->model->hp.width;
  const product qkv = {f->normed, f->qkv, f->qkv_width, m, false, false};
  const product rest = {f->normed, at_row(f->qkv, 1, l->qkv.n), f->qkv_width, m, false, false};
  const product o = {f->attended, sum_of(f, 0, l->attn_post_norm), width, m, true, false};
  PKV_TRY(multiply(f, &l->qkv, &qkv, err));
  if (l->qkv_rest.n > 0) PKV_TRY(multiply(f, &l->qkv_rest, &rest, err));
  PKV_TRY(pkv_device_pass_rotate(f, layer, m, err));
  PKV_TRY(attend(f, layer, pass, err));
  return multiply(f, &l->o, &o, err);
}

static pkv_status run_feed_forward(pkv_device_forward *f, int32_t layer, int32_t m,
                                   pkv_error *err) {
  const pkv_device_layer *l = &f->weights->layers[layer];
  const pkv_hparams *hp = &f->model->hp;
  const product gate = {f->normed, f->gated, hp->feed_forward, m, false, true};
  const product down = {f->gated, sum_of(f, 1, l->ffn_post_norm), hp->width, m, true, false};
  PKV_TRY(multiply(f, &l->gate_up, &gate, err));
  return multiply(f, &l->down, &down, err);
}

/* The norm ahead of a layer's attention (half 0; of the layer behind the last one: what is left to
   be added) or of its feed-forward (half 1), with what the half ahead of it adds. */
static pkv_dense_norm_params norm_ahead(const pkv_device_forward *f, int32_t layer, int half,
                                        int32_t m) {
  const pkv_device_layer *l = &f->weights->layers[layer];
  const bool behind = layer == f->weights->layer_count, first = layer == 0 && half == 0;
  const float *weight = behind ? NULL : half ? l->ffn_norm : l->attn_norm;
  const float *post = first ? NULL : half ? l->attn_post_norm : (l - 1)->ffn_post_norm;
  pkv_dense_norm_params p = norm_params(f, m, weight, f->normed);
  p.bias = half ? l->o_bias : NULL;
  p.delta = !first && (f->divided || post) ? f->delta[!half] : NULL;
  p.delta_weight = post;
  return p;
}

static pkv_status run_norm(pkv_device_forward *f, int32_t layer, int half, int32_t m,
                           pkv_error *err) {
  pkv_dense_norm_params p[PKV_MAX_RANKS];
  void *streams[PKV_MAX_RANKS];
  for (int32_t r = 0; r < f->rank_count; r++) {
    p[r] = norm_ahead(f->ranks[r], layer, half, m);
    streams[r] = f->ranks[r]->stream;
  }
  if (f->rank_count > 1 && p[0].delta)
    return f->executor->dense->group_norm(f->group, p, streams, err);
  for (int32_t r = 0; r < f->rank_count; r++) {
    PKV_TRY(pkv_device_rank_select(f->ranks[r], err));
    PKV_TRY(f->executor->dense->norm(f->ranks[r]->executor, &p[r], streams[r], err));
  }
  return PKV_OK;
}

static pkv_status run_layer(pkv_device_forward *f, int32_t layer, const pkv_device_pass *pass,
                            pkv_error *err) {
  PKV_TRY(run_norm(f, layer, 0, pass->tokens, err));
  for (int32_t r = 0; r < f->rank_count; r++) {
    PKV_TRY(pkv_device_rank_select(f->ranks[r], err));
    PKV_TRY(run_attention(f->ranks[r], layer, pass, err));
  }
  PKV_TRY(run_norm(f, layer, 1, pass->tokens, err));
  for (int32_t r = 0; r < f->rank_count; r++) {
    PKV_TRY(pkv_device_rank_select(f->ranks[r], err));
    PKV_TRY(run_feed_forward(f->ranks[r], layer, pass->tokens, err));
  }
  return PKV_OK;
}

/* ---- head ---- */

/* A rank's columns of the leader's logits. */
static pkv_status run_head(pkv_device_forward *f, float *logits, int32_t rows, pkv_error *err) {
  const pkv_dense_ops *dense = f->executor->dense;
  pkv_dense_norm_params picked = norm_params(f, rows, f->weights->output_norm, f->last);
  picked.rows = f->device.logit_rows;
  PKV_TRY(pkv_device_rank_select(f, err));
  PKV_TRY(dense->norm(f->executor, &picked, f->stream, err));
  pkv_dense_matmul_params head = {0};
  head.w = f->weights->output;
  head.act = f->weights->act;
  head.m = rows;
  head.x = f->last;
  head.x_stride = head.w.k;
  head.y = logits + f->model->origin.vocab;
  head.y_stride = f->logit_stride;
  head.y_f32 = 1;
  return dense->matmul(f->executor, &head, f->stream, err);
}

static pkv_status run_heads(pkv_device_forward *f, int32_t rows, pkv_error *err) {
  void *streams[PKV_MAX_RANKS];
  bool apart = false; /* logits that come from another device */
  for (int32_t r = 0; r < f->rank_count; r++) {
    streams[r] = f->ranks[r]->stream;
    if (f->ranks[r]->model->output.n == 0) continue;
    PKV_TRY(run_head(f->ranks[r], f->logits, rows, err));
    apart = apart || r > 0;
  }
  return apart ? f->executor->dense->group_gather(f->group, streams, err) : PKV_OK;
}

static pkv_status finish(pkv_device_forward *f, const pkv_device_pass *pass, pkv_error *err) {
  const int32_t layers = f->weights->layer_count, rows = pass->logit_count;
  const bool left = f->divided || f->weights->layers[layers - 1].ffn_post_norm;
  /* Of ranks always: who has waited for the others here may write to its sums again. */
  if (left && (rows > 0 || f->divided)) PKV_TRY(run_norm(f, layers, 0, pass->tokens, err));
  if (rows == 0) return PKV_OK;
  PKV_TRY(run_heads(f, rows, err));
  const pkv_dense_sample_params sample = {.m = rows,
                                          .vocab = f->options.sampled_vocab,
                                          .logits = f->logits,
                                          .stride = f->logit_stride,
                                          .rows = f->samples ? f->device.sample_rows : NULL,
                                          .ids = f->sampled,
                                          .scratch = f->sample_scratch};
  PKV_TRY(pkv_device_rank_select(f, err));
  return f->executor->dense->sample(f->executor, &sample, f->stream, err);
}

static pkv_status begin(pkv_device_forward *f, const pkv_device_pass *pass, pkv_error *err) {
  const pkv_dense_embed_params embed = {.w = f->weights->embed,
                                        .act = f->weights->act,
                                        .m = pass->tokens,
                                        .ids = f->device.ids,
                                        .y = f->x,
                                        .scale = f->model->embed_scale};
  PKV_TRY(pkv_device_rank_select(f, err));
  PKV_TRY(build_plans(f, pass, err));
  return f->executor->dense->embed(f->executor, &embed, f->stream, err);
}

pkv_status pkv_device_pass_run(pkv_device_forward *f, const pkv_device_pass *pass, pkv_error *err) {
  for (int32_t r = 0; r < f->rank_count; r++)
    PKV_TRY(begin(f->ranks[r], pass, err));
  for (int32_t i = 0; i < f->weights->layer_count; i++)
    PKV_TRY(run_layer(f, i, pass, err));
  return finish(f, pass, err);
}
