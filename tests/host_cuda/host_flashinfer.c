/* SPDX-License-Identifier: Apache-2.0 */
/*
 * FlashInfer's interface (pkv/flashinfer.h) on the invented device: attention in double over host
 * memory, at an invented cost. So all that is around FlashInfer runs where no GPU is.
 */
#include "pkv/flashinfer.h"

#include <math.h>
#include <stdlib.h>

#include "base/dtype.h"
#include "cuda_runtime_api.h"

#define RUN_US 14.0

struct pkv_flashinfer {
  pkv_flashinfer_shape shape;
  int32_t rows;
  int32_t *lengths, *first, *ids;
};

static void destroy(pkv_flashinfer *h) {
  free(h->lengths);
  free(h->first);
  free(h->ids);
  free(h);
}

static const char *create(pkv_flashinfer **out, const pkv_flashinfer_shape *s) {
  pkv_flashinfer *h = calloc(1, sizeof *h);
  *out = NULL;
  if (h == NULL) return "out of memory";
  h->shape = *s;
  h->lengths = calloc((size_t)s->most_rows, sizeof(int32_t));
  h->first = calloc((size_t)s->most_rows + 1, sizeof(int32_t));
  h->ids = calloc((size_t)s->most_pages, sizeof(int32_t));
  if (h->lengths == NULL || h->first == NULL || h->ids == NULL ||
      (!s->tensor_cores && s->query_heads / s->kv_heads == 3)) {
    destroy(h);
    return "no kernel for this many query heads a KV head";
  }
  *out = h;
  return NULL;
}

static const char *plan(pkv_flashinfer *h, int32_t rows, const int32_t *seq_len, void *stream) {
  (void)stream;
  h->rows = 0;
  if (rows < 1 || rows > h->shape.most_rows) return "too many rows, or none";
  for (int32_t row = 0; row < rows; row++) {
    if (seq_len[row] < 1) return "a row without tokens";
    h->lengths[row] = seq_len[row];
    h->first[row + 1] = h->first[row] + (seq_len[row] - 1) / h->shape.page_tokens + 1;
    if (h->first[row + 1] > h->shape.most_pages) return "too many pages";
  }
  h->rows = rows;
  return NULL;
}

static const char *list(pkv_flashinfer *h, const int32_t *table, int64_t stride, int64_t pages,
                        void *stream) {
  (void)stream;
  for (int32_t row = 0; row < h->rows; row++)
    for (int32_t p = h->first[row]; p < h->first[row + 1]; p++) {
      const int32_t id = table[row * stride + p - h->first[row]];
      h->ids[p] = id >= 0 && id < pages ? id : 0;
    }
  return NULL;
}

/* One query head of a row. */
static void attend(const pkv_flashinfer *h, const pkv_flashinfer_call *c, int32_t row,
                   int32_t head) {
  const pkv_flashinfer_shape *s = &h->shape;
  const int32_t dim = s->head_dim, kv = head / (s->query_heads / s->kv_heads);
  const int64_t q = ((int64_t)row * s->query_heads + head) * dim;
  double most = -INFINITY, sum = 0, acc[256] = {0};
  for (int32_t t = 0; t < h->lengths[row]; t++) {
    const int64_t at = h->ids[h->first[row] + t / s->page_tokens] * c->page_stride +
                       t % s->page_tokens * c->token_stride + kv * c->head_stride;
    double score = 0;
    for (int32_t i = 0; i < dim; i++)
      score += (double)pkv_load(c->q, PKV_DTYPE_F16, q + i) *
               (double)pkv_load(c->k, PKV_DTYPE_F16, at + i);
    score *= (double)c->scale;
    const double next = score > most ? score : most;
    const double old = exp(most - next), weight = exp(score - next);
    sum = sum * old + weight;
    for (int32_t i = 0; i < dim; i++)
      acc[i] = acc[i] * old + weight * (double)pkv_load(c->v, PKV_DTYPE_F16, at + i);
    most = next;
  }
  for (int32_t i = 0; i < dim; i++)
    pkv_store(c->out, PKV_DTYPE_F16, q + i, (float)(acc[i] / sum));
}

static const char *run(pkv_flashinfer *h, const pkv_flashinfer_call *c, void *stream) {
  if (h->rows == 0) return "no plan";
  for (int32_t row = 0; row < h->rows; row++)
    for (int32_t head = 0; head < h->shape.query_heads; head++)
      attend(h, c, row, head);
  host_cuda_spend(stream, RUN_US);
  return NULL;
}

__attribute__((visibility("default"))) const pkv_flashinfer_api *pkv_flashinfer_module(void);

const pkv_flashinfer_api *pkv_flashinfer_module(void) {
  static const pkv_flashinfer_api api = {
      PKV_FLASHINFER_ABI, "invented", create, destroy, plan, list, run};
  return &api;
}
