/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two passes over the same list of tensors: one adds up what the device has to hold, one fills it.
 * Matrices of types that the device's kernels take go up as they lie in the file; others pass
 * through floats of the CPU's own dequantisation, in bounded chunks.
 */
#include "model/device_weights.h"

#include <math.h>
#include <string.h>

#include "backend/device_ops.h"
#include "base/dtype.h"
#include "base/status.h"
#include "model/model_parts.h"

#define ALIGNMENT   256
#define CHUNK_BYTES ((size_t)64 << 20) /* of floats on the way */

typedef struct uploader {
  pkv_device_weights *w;
  const pkv_model *m;
  bool filling; /* second pass */
  size_t at;    /* bytes taken */
  pkv_executor *cpu;
  float *floats; /* [CHUNK_BYTES], with `converted` behind them */
  uint16_t *converted;
  int32_t *ids;
  pkv_error *err;
} uploader;

/*
 * f16 carries three bits more than bf16, bf16 ten times the range: f16 where the file's own weights
 * have no more range than that. Gemma's activations leave f16's.
 */
static pkv_dtype act_of(const pkv_model *m) {
  const pkv_wtype type = m->layers[0].q.type;
  return m->gemma || type == PKV_WTYPE_BF16 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16;
}

static pkv_wtype own_type(pkv_dtype act) {
  return act == PKV_DTYPE_F16 ? PKV_WTYPE_F16 : PKV_WTYPE_BF16;
}

static void *take(uploader *u, size_t bytes) {
  char *const at = (char *)u->w->memory + u->at;
  u->at += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return u->filling ? at : NULL;
}

static pkv_status copy_up(uploader *u, void *to, const void *from, size_t bytes) {
  const pkv_device_ops *ops = u->w->executor->device_ops;
  if (!u->filling) return PKV_OK;
  PKV_TRY(ops->copy(u->w->executor, to, from, bytes, NULL, u->err));
  return ops->synchronize(u->w->executor, NULL, u->err);
}

/* ---- vectors ---- */

static pkv_status put_vector(uploader *u, const float **out, const float *from, int64_t count) {
  *out = NULL;
  if (!from) return PKV_OK;
  void *to = take(u, (size_t)count * sizeof *from);
  PKV_TRY(copy_up(u, to, from, (size_t)count * sizeof *from));
  *out = to;
  return PKV_OK;
}

/* The biases of q, k and v as one vector; those that are not there are 0, which `take` left. */
static pkv_status put_biases(uploader *u, const float **out, const pkv_layer *l) {
  const float *const parts[3] = {l->q_bias, l->k_bias, l->v_bias};
  const int64_t counts[3] = {l->q.n, l->k.n, l->v.n};
  *out = NULL;
  if (!parts[0] && !parts[1] && !parts[2]) return PKV_OK;
  float *to = take(u, (size_t)(counts[0] + counts[1] + counts[2]) * sizeof *to);
  int64_t at = 0;
  for (int i = 0; i < 3; i++) {
    if (parts[i] && to) PKV_TRY(copy_up(u, to + at, parts[i], (size_t)counts[i] * sizeof *to));
    at += counts[i];
  }
  *out = to;
  return PKV_OK;
}

/* ---- matrices ---- */

static pkv_status pack(uploader *u, const pkv_weight *to, int64_t first, const pkv_weight *from) {
  return u->w->executor->dense->weight_pack(u->w->executor, to, first, from, u->err);
}

typedef struct converting {
  const float *from;
  uint16_t *to;
  int64_t k;
  pkv_dtype act;
} converting;

static void convert_row(void *ctx, int64_t row, int32_t worker) {
  const converting *c = ctx;
  const float *from = c->from + row * c->k;
  uint16_t *to = c->to + row * c->k;
  (void)worker;
  for (int64_t i = 0; i < c->k; i++)
    to[i] = c->act == PKV_DTYPE_F16 ? pkv_f32_to_f16(from[i]) : pkv_f32_to_bf16(from[i]);
}

/* Rows first .. of `to` from a matrix of any type. */
static pkv_status pack_converted(uploader *u, const pkv_weight *to, int64_t first,
                                 const pkv_weight *from) {
  const int64_t at_once = (int64_t)(CHUNK_BYTES / sizeof(float)) / from->k;
  PKV_CHECK(u->err, at_once >= 1, PKV_E_LIMIT, "rows of %lld elements are too long",
            (long long)from->k);
  for (int64_t row = 0; row < from->n; row += at_once) {
    const int64_t rows = from->n - row < at_once ? from->n - row : at_once;
    const pkv_weight some = {.type = to->type,
                             .n = rows,
                             .k = from->k,
                             .data = u->converted,
                             .row_bytes = from->k * (int64_t)sizeof(uint16_t)};
    converting c = {u->floats, u->converted, from->k, u->w->act};
    for (int64_t i = 0; i < rows; i++)
      u->ids[i] = (int32_t)(row + i);
    PKV_TRY(u->cpu->ops->embed(u->cpu, u->floats, from->k, from, u->ids, rows, 1.0f, u->err));
    pkv_workers_run(u->cpu->workers, convert_row, &c, rows);
    PKV_TRY(pack(u, to, first + row, &some));
  }
  return PKV_OK;
}

/* A matrix, and the number that its first element has among the random ones of its seed. */
typedef struct part {
  const pkv_weight *w;
  int64_t number;
} part;

static pkv_status fill_rows(uploader *u, const pkv_weight *to, int64_t first, const part *p) {
  const pkv_weight *from = p->w;
  char *data;
  if (from->data)
    return from->type == to->type ? pack(u, to, first, from) : pack_converted(u, to, first, from);
  memcpy(&data, &to->data, sizeof data);
  const int64_t stride = from->row_bytes / (int64_t)sizeof(uint16_t);
  const pkv_dense_random_params random = {.data = data + first * to->row_bytes,
                                          .act = u->w->act,
                                          .n = from->n,
                                          .k = from->k,
                                          .seed = (uint64_t)from->seed,
                                          .first = p->number,
                                          .stride = stride,
                                          .deviation = pkv_random_deviation(stride)};
  return u->w->executor->dense->weight_random(u->w->executor, &random, NULL, u->err);
}

/* Of a row without gaps. */
static int64_t row_bytes(pkv_wtype type, int64_t k) {
  int64_t block = 1, bytes = 0;
  (void)pkv_gguf_type_info((uint32_t)type, NULL, &block, &bytes);
  return k / block * bytes;
}

static pkv_wtype type_of(const uploader *u, const pkv_weight *w) {
  return u->w->executor->dense->weight_type(u->w->executor, w->type, u->w->act, u->w->rows);
}

/* Several matrices of the same k under each other; of different types: in the activations'. */
static pkv_status put_matrix(uploader *u, pkv_weight *out, const part *parts, int count, bool own) {
  const pkv_dense_ops *dense = u->w->executor->dense;
  pkv_wtype type = own ? own_type(u->w->act) : type_of(u, parts[0].w);
  int64_t n = 0, first = 0;
  for (int i = 0; i < count; i++) {
    n += parts[i].w->n;
    if (type_of(u, parts[i].w) != type) type = own_type(u->w->act);
  }
  *out = (pkv_weight){.type = type, .n = n, .k = parts[0].w->k};
  out->row_bytes = row_bytes(type, out->k);
  out->data = take(u, dense->weight_bytes(out));
  for (int i = 0; i < count && u->filling; i++) {
    PKV_TRY(fill_rows(u, out, first, &parts[i]));
    first += parts[i].w->n;
  }
  return PKV_OK;
}

/* q, k and v: files that mix types have another one for v, mostly. */
static pkv_status put_qkv(uploader *u, pkv_device_layer *out, const part parts[3]) {
  int first = 1;
  while (first < 3 && type_of(u, parts[first].w) == type_of(u, parts[0].w))
    first++;
  PKV_TRY(put_matrix(u, &out->qkv, parts, first, false));
  return first < 3 ? put_matrix(u, &out->qkv_rest, parts + first, 3 - first, false) : PKV_OK;
}

static pkv_status put_layer(uploader *u, pkv_device_layer *out, const pkv_layer *l) {
  const pkv_hparams *hp = &u->m->hp;
  const pkv_model_origin *at = &u->m->origin;
  const int64_t q = at->q * hp->width, kv = at->kv * hp->width, ffn = at->feed_forward * hp->width;
  const part qkv[] = {{&l->q, q}, {&l->k, kv}, {&l->v, kv}}, o[] = {{&l->o, at->q}};
  const part gate_up[] = {{&l->gate, ffn}, {&l->up, ffn}}, down[] = {{&l->down, at->feed_forward}};
  PKV_TRY(put_qkv(u, out, qkv));
  PKV_TRY(put_matrix(u, &out->o, o, 1, false));
  PKV_TRY(put_matrix(u, &out->gate_up, gate_up, 2, false));
  PKV_TRY(put_matrix(u, &out->down, down, 1, false));
  PKV_TRY(put_biases(u, &out->qkv_bias, l));
  PKV_TRY(put_vector(u, &out->attn_norm, l->attn_norm, hp->width));
  PKV_TRY(put_vector(u, &out->ffn_norm, l->ffn_norm, hp->width));
  PKV_TRY(put_vector(u, &out->o_bias, l->o_bias, hp->width));
  PKV_TRY(put_vector(u, &out->q_norm, l->q_norm, hp->head_dim));
  PKV_TRY(put_vector(u, &out->k_norm, l->k_norm, hp->head_dim));
  PKV_TRY(put_vector(u, &out->attn_post_norm, l->attn_post_norm, hp->width));
  return put_vector(u, &out->ffn_post_norm, l->ffn_post_norm, hp->width);
}

static pkv_status put_frequencies(uploader *u) {
  double frequency[2 * PKV_ROPE_PAIRS];
  const size_t bytes =
      (size_t)pkv_rope_tables(u->m) * (size_t)(u->m->hp.rope_dim / 2) * sizeof *frequency;
  pkv_rope_frequencies(frequency, u->m);
  void *to = take(u, bytes + sizeof *frequency); /* of no rotation, too */
  if (bytes > 0) PKV_TRY(copy_up(u, to, frequency, bytes));
  u->w->frequency = to;
  return PKV_OK;
}

/* Whether the head is rows of the embedding. */
static bool is_tied(const pkv_model *m) {
  const char *rows = m->embed.data;
  if (rows) rows += m->origin.vocab * m->embed.row_bytes;
  return m->output.data == rows && m->output.seed == m->embed.seed;
}

static pkv_status put_all(uploader *u, bool filling) {
  const pkv_model *m = u->m;
  const int64_t first = m->origin.vocab;
  const part embed[] = {{&m->embed, 0}}, output[] = {{&m->output, first * m->hp.width}};
  u->filling = filling;
  u->at = 0;
  PKV_TRY(put_matrix(u, &u->w->embed, embed, 1, true));
  const bool tied = is_tied(m);
  u->w->output = u->w->embed;
  u->w->output.n = m->output.n;
  u->w->output.data = (const char *)u->w->embed.data + first * u->w->embed.row_bytes;
  if (m->output.n > 0 && (!tied || type_of(u, &m->output) != u->w->embed.type))
    PKV_TRY(put_matrix(u, &u->w->output, output, 1, false));
  PKV_TRY(put_vector(u, &u->w->output_norm, m->output_norm, m->hp.width));
  PKV_TRY(put_frequencies(u));
  for (int32_t i = 0; i < m->hp.layers; i++)
    PKV_TRY(put_layer(u, &u->w->layers[i], &m->layers[i]));
  return PKV_OK;
}

/* ---- creation ---- */

/* Rows of 16-bit elements begin at multiples of 16 bytes, which products and attention ask for. */
static pkv_status check_shape(const pkv_model *m, pkv_error *err) {
  const pkv_hparams *hp = &m->hp;
  PKV_CHECK(err, hp->width % 8 == 0 && hp->feed_forward % 8 == 0 && hp->head_dim % 8 == 0,
            PKV_E_UNSUPPORTED,
            "width %d, feed_forward %d, head_dim %d: on a device all are multiples of 8",
            (int)hp->width, (int)hp->feed_forward, (int)hp->head_dim);
  return PKV_OK;
}

static pkv_status check_room(const pkv_device_weights *w, size_t bytes, pkv_error *err) {
  size_t have = 0;
  PKV_TRY(w->executor->dense->free_bytes(&have, w->executor, err));
  PKV_CHECK(err, bytes <= have, PKV_E_NOMEM,
            "the weights need %zu bytes on the device, %zu are free: %zu are missing", bytes, have,
            bytes - have);
  return PKV_OK;
}

static pkv_status take_host(uploader *u) {
  const pkv_allocator *a = &u->w->allocator;
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  options.allocator = a;
  PKV_TRY(pkv_executor_create(&u->cpu, &options, u->err));
  u->floats = pkv_alloc(a, CHUNK_BYTES);
  u->converted = pkv_alloc(a, CHUNK_BYTES / 2);
  u->ids = pkv_alloc(a, CHUNK_BYTES / sizeof(float) * sizeof *u->ids);
  PKV_CHECK(u->err, u->floats && u->converted && u->ids, PKV_E_NOMEM,
            "no memory for weights on their way to the device");
  return PKV_OK;
}

static void free_host(uploader *u) {
  const pkv_allocator *a = &u->w->allocator;
  pkv_free(a, u->floats, CHUNK_BYTES);
  pkv_free(a, u->converted, CHUNK_BYTES / 2);
  pkv_free(a, u->ids, CHUNK_BYTES / sizeof(float) * sizeof *u->ids);
  pkv_executor_destroy(u->cpu);
}

static pkv_status upload(pkv_device_weights *w, const pkv_model *m, size_t keep, pkv_error *err) {
  uploader u = {.w = w, .m = m, .err = err};
  size_t have = 0;
  PKV_TRY(put_all(&u, false));
  PKV_TRY(w->executor->dense->free_bytes(&have, w->executor, err));
  if (keep > have || u.at > have - keep) { /* as small as it can be, then */
    w->rows = 0;
    PKV_TRY(put_all(&u, false));
  }
  PKV_TRY(check_room(w, u.at, err));
  PKV_TRY(w->executor->device_ops->alloc(&w->memory, w->executor, u.at, err));
  w->bytes = u.at;
  pkv_status status = take_host(&u);
  if (status == PKV_OK) status = put_all(&u, true);
  if (status == PKV_OK) status = w->executor->device_ops->synchronize(w->executor, NULL, err);
  free_host(&u);
  return status;
}

pkv_status pkv_device_weights_create(pkv_device_weights **out, const pkv_model *model,
                                     pkv_executor *executor, int32_t rows, size_t keep,
                                     const pkv_allocator *allocator, pkv_error *err) {
  *out = NULL;
  PKV_CHECK(err, model->layers, PKV_E_STATE, "the model was opened for its tokenizer only");
  PKV_CHECK(err, executor->device_ops && executor->dense, PKV_E_INVALID,
            "the executor runs on the CPU, not on a device");
  PKV_TRY(check_shape(model, err));
  PKV_TRY(executor->dense->select(executor, err));
  PKV_TRY(executor->dense->prepare(executor, err));
  PKV_TRY(pkv_gguf_check_unchanged(model->gguf, err));
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_device_weights *w = pkv_alloc_zeroed(&a, 1, sizeof *w);
  PKV_CHECK(err, w, PKV_E_NOMEM, "no memory for a device's weights");
  w->allocator = a;
  w->executor = executor;
  w->act = act_of(model);
  w->rows = rows;
  w->layer_count = model->hp.layers;
  w->layers = pkv_alloc_zeroed(&a, (size_t)w->layer_count, sizeof *w->layers);
  pkv_status status =
      w->layers ? upload(w, model, keep, err)
                : PKV_FAIL(err, PKV_E_NOMEM, "no memory for %d layers", (int)w->layer_count);
  if (status != PKV_OK) {
    pkv_device_weights_destroy(w);
    return status;
  }
  *out = w;
  return PKV_OK;
}

pkv_status pkv_device_weights_room(size_t *bytes, const pkv_device_weights *w, pkv_error *err) {
  return w->executor->dense->free_bytes(bytes, w->executor, err);
}

void pkv_device_weights_destroy(pkv_device_weights *w) {
  if (!w) return;
  const pkv_allocator a = w->allocator;
  if (w->memory) w->executor->device_ops->free(w->executor, w->memory);
  pkv_free(&a, w->layers, (size_t)w->layer_count * sizeof *w->layers);
  pkv_free(&a, w, sizeof *w);
}
