/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model without a file of weights: hyper-parameters from a config.json, matrices from a counter
 * (pkv_random_weight), norms of ones, no biases. On a device a matrix is known by its seed alone.
 */
#include <math.h>

#include "backend/device_dense.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/workers.h"
#include "model/folder_parts.h"
#include "model/model_parts.h"

typedef struct maker {
  pkv_model *m;
  bool on_device;
  int32_t seed; /* of the last matrix */
  pkv_workers *workers;
  pkv_error *err;
} maker;

static void *keep(pkv_model *m, size_t count, size_t size) {
  size_t bytes = 0;
  if (!pkv_mul_size(&bytes, count, size) || !pkv_add_size(&bytes, bytes, PKV_CACHE_LINE))
    return NULL;
  pkv_model_block *block = pkv_alloc_storage(&m->allocator, bytes);
  if (!block) return NULL;
  *block = (pkv_model_block){m->blocks, bytes};
  m->blocks = block;
  return (char *)block + PKV_CACHE_LINE;
}

static void fill_row(void *ctx, int64_t row, int32_t worker) {
  const pkv_weight *w = ctx;
  const float deviation = pkv_random_deviation(w->k);
  (void)worker;
  for (int64_t i = row * w->k; i < (row + 1) * w->k; i++)
    pkv_store((void *)(uintptr_t)w->data, PKV_DTYPE_BF16, i,
              pkv_random_weight((uint64_t)w->seed, (uint64_t)i, deviation));
}

static pkv_status make_matrix(maker *r, pkv_weight *out, int64_t inputs, int64_t outputs) {
  *out = (pkv_weight){.type = PKV_WTYPE_BF16, .seed = ++r->seed, .n = outputs, .k = inputs};
  out->row_bytes = inputs * (int64_t)sizeof(uint16_t);
  r->m->parameters += inputs * outputs;
  r->m->weight_bytes += outputs * out->row_bytes;
  if (r->on_device) return PKV_OK;
  out->data = keep(r->m, (size_t)outputs, (size_t)out->row_bytes);
  PKV_CHECK(r->err, out->data, PKV_E_NOMEM, "no memory for a matrix of %lld bytes",
            (long long)(outputs * out->row_bytes));
  pkv_workers_run(r->workers, fill_row, out, outputs);
  return PKV_OK;
}

static pkv_status make_layer(maker *r, pkv_layer *l, int32_t index, const float *ones) {
  const pkv_hparams *hp = &r->m->hp;
  const int64_t width = hp->width, ffn = hp->feed_forward;
  const int64_t q = (int64_t)hp->query_heads * hp->head_dim;
  const int64_t kv = (int64_t)hp->kv_heads * hp->head_dim;
  l->local = pkv_hparams_is_local(r->m, index);
  l->attn_norm = l->ffn_norm = ones;
  if (r->m->head_norms) l->q_norm = l->k_norm = ones;
  if (r->m->gemma) l->attn_post_norm = l->ffn_post_norm = ones;
  PKV_TRY(make_matrix(r, &l->q, width, q));
  PKV_TRY(make_matrix(r, &l->k, width, kv));
  PKV_TRY(make_matrix(r, &l->v, width, kv));
  PKV_TRY(make_matrix(r, &l->o, q, width));
  PKV_TRY(make_matrix(r, &l->gate, width, ffn));
  PKV_TRY(make_matrix(r, &l->up, width, ffn));
  return make_matrix(r, &l->down, ffn, width);
}

static pkv_status make_all(maker *r, const pkv_folder_config *parsed) {
  pkv_model *m = r->m;
  const int32_t longest = m->hp.width > m->hp.head_dim ? m->hp.width : m->hp.head_dim;
  float *ones = keep(m, (size_t)longest, sizeof *ones);
  m->layers = pkv_alloc_zeroed(&m->allocator, (size_t)m->hp.layers, sizeof *m->layers);
  PKV_CHECK(r->err, ones && m->layers, PKV_E_NOMEM, "no memory for %d layers", (int)m->hp.layers);
  for (int32_t i = 0; i < longest; i++)
    ones[i] = 1.0f;
  m->output_norm = ones;
  if (parsed->factors > 0) {
    float *factors = keep(m, (size_t)parsed->factors, sizeof *factors);
    PKV_CHECK(r->err, factors, PKV_E_NOMEM, "no memory for %d factors", (int)parsed->factors);
    for (int32_t i = 0; i < parsed->factors; i++)
      factors[i] = parsed->factor[i];
    m->rope_freqs = factors;
  }
  PKV_TRY(make_matrix(r, &m->embed, m->hp.width, m->hp.vocab));
  m->output = m->embed;
  if (!parsed->tied) PKV_TRY(make_matrix(r, &m->output, m->hp.width, m->hp.vocab));
  for (int32_t i = 0; i < m->hp.layers; i++)
    PKV_TRY(make_layer(r, &m->layers[i], i, ones));
  return PKV_OK;
}

pkv_status pkv_random_open(pkv_model *model, const char *config, bool on_device, pkv_error *err) {
  pkv_folder_config parsed;
  maker r = {.m = model, .on_device = on_device, .err = err};
  PKV_TRY(pkv_folder_open_config(&model->gguf, &parsed, config, &model->allocator, err));
  PKV_TRY(pkv_hparams_read(model, err));
  if (model->hp.vocab == 0) model->hp.vocab = parsed.vocab;
  PKV_ASSERT(model->hp.vocab >= 1); /* or the configuration is refused */
  if (!on_device) PKV_TRY(pkv_workers_create(&r.workers, 0, &model->allocator, err));
  const pkv_status status = make_all(&r, &parsed);
  pkv_workers_destroy(r.workers);
  return status;
}
