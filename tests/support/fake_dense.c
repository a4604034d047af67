/* SPDX-License-Identifier: Apache-2.0 */
#include "support/fake_dense.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "backend/device_ops.h"
#include "base/dtype.h"
#include "base/status.h"
#include "engine/sampling.h"
#include "support/fake_device.h"
#include "support/weight_blocks.h"

/* ------------------------------------------------------------------ memory, streams, graphs */

static pkv_status fake_prepare(pkv_executor *executor, pkv_error *err) {
  (void)executor;
  return fake_counted("prepare", err);
}

static pkv_status fake_free_bytes(size_t *bytes, pkv_executor *executor, pkv_error *err) {
  (void)executor;
  *bytes = fake_device_state.free_bytes;
  return fake_counted("free_bytes", err);
}

static pkv_status fake_host_alloc(void **out, pkv_executor *executor, size_t bytes,
                                  pkv_error *err) {
  const size_t most = fake_device_state.pinned_bytes;
  *out = NULL;
  PKV_TRY(fake_counted("host_alloc", err));
  PKV_CHECK(err, most == 0 || bytes <= most, PKV_E_NOMEM, "no %zu bytes of pinned memory", bytes);
  return executor->device_ops->alloc(out, executor, bytes, err);
}

static void fake_host_free(pkv_executor *executor, void *ptr) {
  if (ptr != NULL) executor->device_ops->free(executor, ptr);
}

static pkv_status fake_stream_make(void **stream, pkv_executor *executor, pkv_error *err) {
  (void)executor;
  *stream = NULL;
  PKV_TRY(fake_counted("stream", err));
  *stream = fake_stream_create();
  fake_device_state.live++;
  return PKV_OK;
}

static void fake_stream_end(pkv_executor *executor, void *stream) {
  (void)executor;
  fake_device_state.live--;
  fake_stream_destroy(stream);
}

static pkv_status fake_graph_begin(pkv_executor *executor, void *stream, pkv_error *err) {
  (void)executor;
  PKV_TRY(fake_counted("graph_begin", err));
  fake_capture_begin(stream);
  return PKV_OK;
}

static pkv_status fake_graph_end(void **graph, pkv_executor *executor, void *stream,
                                 pkv_error *err) {
  fake_graph *const made = fake_capture_end(stream);
  (void)executor;
  *graph = NULL;
  const pkv_status status = fake_counted("graph_end", err);
  if (status != PKV_OK) {
    fake_graph_destroy(made);
    return status;
  }
  fake_device_state.live++;
  *graph = made;
  return PKV_OK;
}

static pkv_status fake_graph_run(pkv_executor *executor, void *graph, void *stream,
                                 pkv_error *err) {
  (void)executor;
  (void)stream;
  PKV_TRY(fake_counted("graph_launch", err));
  fake_device_state.graph_launches++;
  return fake_graph_launch(graph, err);
}

static void fake_graph_end_of(pkv_executor *executor, void *graph) {
  (void)executor;
  fake_device_state.live--;
  fake_graph_destroy(graph);
}

/* ------------------------------------------------------------------ weights */

static pkv_wtype fake_weight_type(pkv_executor *executor, pkv_wtype type, pkv_dtype act,
                                  int32_t rows) {
  (void)executor;
  if (rows <= fake_device_state.packs - 1 && !test_wtype_is_float(type)) return type;
  return act == PKV_DTYPE_F16 ? PKV_WTYPE_F16 : PKV_WTYPE_BF16;
}

static size_t fake_weight_bytes(const pkv_weight *w) {
  return (size_t)w->n * (size_t)w->row_bytes;
}

static pkv_status fake_weight_pack(pkv_executor *executor, const pkv_weight *w, int64_t first,
                                   const pkv_weight *host, pkv_error *err) {
  char *to;
  (void)executor;
  PKV_TRY(fake_counted("weight_pack", err));
  PKV_CHECK(err, host->type == w->type && host->k == w->k && host->row_bytes >= w->row_bytes,
            PKV_E_INTERNAL, "a matrix of type %d into one of type %d", (int)host->type,
            (int)w->type);
  memcpy(&to, &w->data, sizeof to);
  for (int64_t i = 0; i < host->n; i++)
    memcpy(to + (first + i) * w->row_bytes, (const char *)host->data + i * host->row_bytes,
           (size_t)w->row_bytes);
  return PKV_OK;
}

static pkv_status fake_weight_random(pkv_executor *executor, const pkv_dense_random_params *p,
                                     void *stream, pkv_error *err) {
  (void)executor;
  (void)stream;
  PKV_TRY(fake_counted("weight_random", err));
  for (int64_t i = 0; i < p->n * p->k; i++) {
    const int64_t number = p->first + i / p->k * p->stride + i % p->k;
    pkv_store(p->data, p->act, i, pkv_random_weight(p->seed, (uint64_t)number, p->deviation));
  }
  return PKV_OK;
}

/* ------------------------------------------------------------------ a step */

static double weight_at(const pkv_weight *w, int64_t row, int64_t i) {
  const char *from = (const char *)w->data + row * w->row_bytes;
  if (!test_wtype_is_float(w->type))
    return test_weight_value((const unsigned char *)from, w->type, i);
  const pkv_dtype dtype = w->type == PKV_WTYPE_F32   ? PKV_DTYPE_F32
                          : w->type == PKV_WTYPE_F16 ? PKV_DTYPE_F16
                                                     : PKV_DTYPE_BF16;
  return (double)pkv_load(from, dtype, i);
}

static pkv_status run_embed(pkv_executor *executor, const void *params, pkv_error *err) {
  const pkv_dense_embed_params *p = params;
  (void)executor;
  (void)err;
  for (int64_t r = 0; r < p->m; r++)
    for (int64_t i = 0; i < p->w.k; i++) {
      const bool known = p->ids[r] >= 0 && p->ids[r] < p->w.n;
      p->y[r * p->w.k + i] = known ? (float)weight_at(&p->w, p->ids[r], i) * p->scale : 0.0f;
      if (known && p->ids[r] == fake_device_state.spoilt && p->ids[r] != 0)
        p->y[r * p->w.k + i] = NAN;
    }
  return PKV_OK;
}

static double dot(const pkv_dense_matmul_params *p, int64_t r, int64_t column) {
  double sum = 0.0;
  for (int64_t i = 0; i < p->w.k; i++)
    sum += (double)pkv_load(p->x, p->act, r * p->x_stride + i) * weight_at(&p->w, column, i);
  return sum;
}

static double gated(double gate, double up, pkv_dense_gate kind) {
  if (kind == PKV_DENSE_SILU) return gate / (1.0 + exp(-gate)) * up;
  return 0.5 * gate * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (gate + 0.044715 * pow(gate, 3.0)))) *
         up;
}

static pkv_status run_matmul(pkv_executor *executor, const void *params, pkv_error *err) {
  const pkv_dense_matmul_params *p = params;
  fake_note_product(executor, p);
  const int64_t columns = p->gate != PKV_DENSE_NO_GATE ? p->w.n / 2 : p->w.n;
  (void)executor;
  (void)err;
  for (int64_t r = 0; r < p->m; r++)
    for (int64_t c = 0; c < columns; c++) {
      const int64_t at = r * p->y_stride + c;
      const pkv_dtype out = p->y_f32 ? PKV_DTYPE_F32 : p->act;
      double y = dot(p, r, c);
      if (p->gate != PKV_DENSE_NO_GATE) y = gated(y, dot(p, r, columns + c), p->gate);
      if (p->accumulate) y += (double)pkv_load(p->y, out, at);
      pkv_store(p->y, out, at, (float)y);
    }
  return PKV_OK;
}

static double scale_of(const float *row, int32_t n, double eps) {
  double sum = 0.0;
  for (int32_t i = 0; i < n; i++)
    sum += (double)row[i] * (double)row[i];
  return 1.0 / sqrt(sum / n + eps);
}

static pkv_status run_norm(pkv_executor *executor, const void *params, pkv_error *err) {
  const pkv_dense_norm_params *p = params;
  float *row = malloc((size_t)p->n * sizeof *row);
  (void)executor;
  (void)err;
  for (int64_t r = 0; r < p->m; r++) {
    float *from = p->x + (p->rows ? p->rows[r] : r) * p->n;
    const float *delta = p->delta ? p->delta + r * p->n : NULL;
    const double by = p->delta_weight ? scale_of(delta, p->n, (double)p->eps) : 1.0;
    for (int32_t i = 0; i < p->n; i++) {
      row[i] = from[i] + (p->bias ? p->bias[i] : 0.0f);
      if (delta)
        row[i] += (float)((double)delta[i] * by * (p->delta_weight ? p->delta_weight[i] : 1.0f));
      if (!p->rows) from[i] = row[i];
    }
    const double scale = scale_of(row, p->n, (double)p->eps);
    for (int32_t i = 0; p->weight && i < p->n; i++)
      pkv_store(p->y, p->act, r * p->n + i, (float)((double)row[i] * scale * p->weight[i]));
  }
  free(row);
  return PKV_OK;
}

/* The head's elements with bias, norm and rotation. */
static void turn_head(double *x, const pkv_dense_rope_params *p, int64_t token, int32_t head) {
  const int64_t at = token * p->stride + (int64_t)head * p->head_dim;
  const bool is_v = head >= p->query_heads + p->kv_heads;
  const float *weight = is_v ? NULL : head < p->query_heads ? p->q_norm : p->k_norm;
  double sum = 0.0;
  for (int32_t i = 0; i < p->head_dim; i++) {
    x[i] = (double)pkv_load(p->qkv, p->act, at + i);
    if (p->bias) x[i] += (double)p->bias[(int64_t)head * p->head_dim + i];
    sum += x[i] * x[i];
  }
  for (int32_t i = 0; weight && i < p->head_dim; i++)
    x[i] *= (double)weight[i] / sqrt(sum / p->head_dim + (double)p->eps);
  for (int32_t j = 0; !is_v && j < p->dims / 2; j++) {
    const int32_t a = p->adjacent ? 2 * j : j, b = p->adjacent ? 2 * j + 1 : j + p->dims / 2;
    const double angle = p->positions[token] * p->frequency[j];
    const double c = (double)p->length * cos(angle), s = (double)p->length * sin(angle);
    const double u = x[a], v = x[b];
    x[a] = u * c - v * s;
    x[b] = v * c + u * s;
  }
}

static void put_head(const double *x, const pkv_dense_rope_params *p, int64_t token, int32_t head) {
  const pkv_cache *c = &p->cache;
  const bool is_v = head >= p->query_heads + p->kv_heads;
  const int64_t slot = p->slots[token], page = slot / c->page_tokens, in = slot % c->page_tokens;
  if (head < p->query_heads) {
    for (int32_t i = 0; i < p->head_dim; i++)
      pkv_store(p->qkv, p->act, token * p->stride + (int64_t)head * p->head_dim + i, (float)x[i]);
    return;
  }
  if (slot < 0 || page >= c->pages) return;
  const int32_t h = (head - p->query_heads) % p->kv_heads;
  const float *scales = is_v ? c->v_head_scale : c->k_head_scale;
  const float scale = (is_v ? c->v_scale : c->k_scale) * (scales ? scales[h] : 1.0f);
  const int64_t at = is_v ? page * c->v_page_stride + in * c->v_token_stride + h * c->v_head_stride
                          : page * c->k_page_stride + in * c->k_token_stride + h * c->k_head_stride;
  for (int32_t i = 0; i < p->head_dim; i++)
    pkv_store(is_v ? c->v : c->k, c->dtype, at + i,
              c->dtype == PKV_DTYPE_FP8_E4M3 ? (float)x[i] / scale : (float)x[i]);
}

static pkv_status run_rope(pkv_executor *executor, const void *params, pkv_error *err) {
  const pkv_dense_rope_params *p = params;
  double x[2 * PKV_ROPE_PAIRS];
  (void)executor;
  (void)err;
  for (int64_t token = 0; token < p->m; token++)
    for (int32_t head = 0; head < p->query_heads + 2 * p->kv_heads; head++) {
      turn_head(x, p, token, head);
      put_head(x, p, token, head);
    }
  return PKV_OK;
}

static int32_t sample_row(const float *logits, int32_t vocab, const pkv_dense_sample_row *row) {
  const pkv_sampling how = {row->temperature, row->top_k,  row->top_p,
                            row->seed,        row->stream, row->min_p};
  const pkv_sampling_scratch scratch = {
      malloc((size_t)vocab * sizeof *scratch.candidates),
      malloc((size_t)vocab * sizeof *scratch.weights),
  };
  const int32_t id = pkv_sample(logits, vocab, &how, row->position, &scratch);
  free(scratch.candidates);
  free(scratch.weights);
  return id;
}

static int32_t fake_samples(pkv_executor *executor) {
  (void)executor;
  return fake_device_state.samples;
}

static pkv_status run_sample(pkv_executor *executor, const void *params, pkv_error *err) {
  const pkv_dense_sample_params *p = params;
  (void)executor;
  (void)err;
  for (int64_t r = 0; r < p->m; r++) {
    const float *row = p->logits + r * p->stride;
    int32_t best = 0;
    if (p->rows != NULL && p->rows[r].temperature > 0.0f) {
      p->ids[r] = sample_row(row, p->vocab, &p->rows[r]);
      continue;
    }
    for (int32_t i = 0; i < p->vocab && best >= 0; i++) {
      if (!isfinite(row[i]))
        best = -1;
      else if (row[i] > row[best])
        best = i;
    }
    p->ids[r] = best;
  }
  return PKV_OK;
}

/* Row r's new token number t, head h: softmax over the keys that it sees, in double. */
static void attend_one(const pkv_dense_prefill_params *p, int32_t r, int32_t t, int32_t h) {
  const pkv_cache *c = &p->cache;
  const int32_t d = c->head_dim, kv = h / (p->query_heads / c->kv_heads);
  const int32_t fresh = p->first[r + 1] - p->first[r], last = p->seq_len[r] - fresh + t;
  const int32_t begin = p->window > 0 && last + 1 > p->window ? last + 1 - p->window : 0;
  const int64_t q = (p->first[r] + t) * p->q_stride + (int64_t)h * d;
  double out[2 * PKV_ROPE_PAIRS] = {0.0}, sum = 0.0;
  for (int32_t key = begin; key <= last; key++) {
    const int64_t page = p->block_table[r * p->block_table_stride + key / c->page_tokens];
    const int64_t in = key % c->page_tokens;
    const int64_t k = page * c->k_page_stride + in * c->k_token_stride + kv * c->k_head_stride;
    const int64_t v = page * c->v_page_stride + in * c->v_token_stride + kv * c->v_head_stride;
    double score = 0.0;
    for (int32_t i = 0; i < d; i++)
      score += (double)pkv_load(p->q, p->act, q + i) * (double)pkv_load(c->k, c->dtype, k + i);
    const double weight = exp(score * (double)p->scale); /* scores of tests are small */
    sum += weight;
    for (int32_t i = 0; i < d; i++)
      out[i] += weight * (double)pkv_load(c->v, c->dtype, v + i);
  }
  for (int32_t i = 0; i < d; i++)
    pkv_store(p->out, p->act, (p->first[r] + t) * p->out_stride + (int64_t)h * d + i,
              (float)(out[i] / sum));
}

static int32_t fake_prefill_takes(pkv_executor *executor, const pkv_dense_prefill_params *p) {
  (void)executor;
  return fake_device_state.prefills && p->cache.dtype == p->act;
}

static pkv_status run_prefill(pkv_executor *executor, const void *params, pkv_error *err) {
  const pkv_dense_prefill_params *p = params;
  (void)executor;
  (void)err;
  fake_device_state.chunks += p->rows;
  for (int32_t r = 0; r < p->rows; r++)
    for (int32_t t = 0; t < p->first[r + 1] - p->first[r]; t++)
      for (int32_t h = 0; h < p->query_heads; h++)
        attend_one(p, r, t, h);
  return PKV_OK;
}

#define PUT(name, type)                                                                            \
  static pkv_status fake_##name(pkv_executor *executor, const type *p, void *stream,               \
                                pkv_error *err) {                                                  \
    PKV_TRY(fake_counted(#name, err));                                                             \
    return fake_put(stream, run_##name, executor, p, sizeof *p, err);                              \
  }
PUT(embed, pkv_dense_embed_params)
PUT(matmul, pkv_dense_matmul_params)
PUT(norm, pkv_dense_norm_params)
PUT(rope, pkv_dense_rope_params)
PUT(prefill, pkv_dense_prefill_params)

/* ------------------------------------------------------------------ several ranks */

typedef struct fake_group {
  fake_meeting meeting;
  const float *before; /* rank 0's delta of the call before */
} fake_group;

typedef struct group_call {
  fake_group *group;
  pkv_dense_norm_params p[FAKE_RANKS];
} group_call;

static pkv_status fake_select(pkv_executor *executor, pkv_error *err) {
  (void)executor;
  return fake_counted("select", err);
}

static pkv_status fake_group_create(void **out, pkv_executor *const *executors, int32_t count,
                                    int32_t rows, pkv_error *err) {
  (void)executors;
  (void)rows;
  *out = NULL;
  PKV_TRY(fake_counted("group_create", err));
  PKV_CHECK(err, count <= FAKE_RANKS, PKV_E_UNSUPPORTED, "%d ranks of %d", (int)count, FAKE_RANKS);
  fake_group *const group = calloc(1, sizeof *group);
  group->meeting.count = count;
  fake_device_state.live++;
  *out = group;
  return PKV_OK;
}

static void fake_group_destroy(void *group) {
  fake_device_state.live--;
  free(group);
}

/* What a rank's sums hold afterwards is undefined: NaN, here. */
static pkv_status run_group_norm(pkv_executor *executor, const void *params, pkv_error *err) {
  const group_call *c = params;
  const int ranks = c->group->meeting.count;
  const int64_t count = (int64_t)c->p[0].m * c->p[0].n;
  PKV_CHECK(err, c->p[0].delta != c->group->before, PKV_E_INTERNAL,
            "sums that others may still read");
  float *sum = calloc((size_t)count + 1, sizeof *sum);
  c->group->before = c->p[0].delta;
  fake_device_state.sums++;
  for (int r = 0; r < ranks; r++)
    for (int64_t i = 0; i < count; i++)
      sum[i] += c->p[r].delta[i];
  for (int r = 0; r < ranks; r++) {
    pkv_dense_norm_params own = c->p[r];
    own.delta = sum;
    PKV_TRY(run_norm(executor, &own, err));
    for (int64_t i = 0; i < count; i++)
      ((float *)(uintptr_t)c->p[r].delta)[i] = NAN;
  }
  free(sum);
  return PKV_OK;
}

static pkv_status fake_group_norm(void *group, const pkv_dense_norm_params *p, void *const *streams,
                                  pkv_error *err) {
  fake_group *const g = group;
  group_call call = {.group = g};
  PKV_TRY(fake_counted("group_norm", err));
  memcpy(call.p, p, (size_t)g->meeting.count * sizeof *p);
  return fake_put_all(&g->meeting, streams, run_group_norm, NULL, &call, sizeof call, err);
}

static pkv_status fake_group_reaches(int32_t *reaches, pkv_executor *const *executors,
                                     int32_t count, pkv_error *err) {
  (void)executors;
  (void)count;
  *reaches = fake_device_state.reaches;
  return fake_counted("group_reaches", err);
}

static pkv_status run_group_gather(pkv_executor *executor, const void *params, pkv_error *err) {
  (void)executor;
  (void)params;
  (void)err;
  fake_device_state.gathered++;
  return PKV_OK;
}

static pkv_status fake_group_gather(void *group, void *const *streams, pkv_error *err) {
  fake_group *const g = group;
  PKV_TRY(fake_counted("group_gather", err));
  return fake_put_all(&g->meeting, streams, run_group_gather, NULL, &g, sizeof g, err);
}

static pkv_status fake_group_wait(void *group, void *const *streams, pkv_error *err) {
  fake_group *const g = group;
  (void)streams;
  PKV_TRY(fake_counted("group_wait", err));
  for (int r = 0; r < g->meeting.count; r++)
    PKV_CHECK(err, !g->meeting.graph[r], PKV_E_DEVICE, "rank %d waits for others in vain", r);
  g->before = NULL; /* nobody reads any more */
  return PKV_OK;
}

static size_t fake_sample_bytes(int32_t m, int32_t vocab) {
  (void)m;
  (void)vocab;
  return 0;
}

static pkv_status fake_sample(pkv_executor *executor, const pkv_dense_sample_params *p,
                              void *stream, pkv_error *err) {
  PKV_TRY(fake_counted("sample", err));
  return fake_put(stream, run_sample, executor, p, sizeof *p, err);
}

const pkv_dense_ops fake_dense_ops = {
    .prepare = fake_prepare,
    .free_bytes = fake_free_bytes,
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
    .stream_create = fake_stream_make,
    .stream_destroy = fake_stream_end,
    .graph_begin = fake_graph_begin,
    .graph_end = fake_graph_end,
    .graph_launch = fake_graph_run,
    .graph_destroy = fake_graph_end_of,
    .weight_type = fake_weight_type,
    .weight_bytes = fake_weight_bytes,
    .weight_pack = fake_weight_pack,
    .weight_random = fake_weight_random,
    .embed = fake_embed,
    .matmul = fake_matmul,
    .norm = fake_norm,
    .rope = fake_rope,
    .prefill_takes = fake_prefill_takes,
    .prefill = fake_prefill,
    .samples = fake_samples,
    .sample_bytes = fake_sample_bytes,
    .sample = fake_sample,
    .select = fake_select,
    .group_create = fake_group_create,
    .group_destroy = fake_group_destroy,
    .group_norm = fake_group_norm,
    .group_wait = fake_group_wait,
    .group_reaches = fake_group_reaches,
    .group_gather = fake_group_gather,
};
