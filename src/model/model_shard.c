/* SPDX-License-Identifier: Apache-2.0 */
#include "model/model_shard.h"

#include "base/status.h"
#include "model/model_parts.h"

/* Rank's share of `count` things in order: as even as they divide. */
typedef struct share {
  int64_t first, count;
} share;

static share share_of(int64_t count, int32_t rank, int32_t ranks) {
  const int64_t first = count * rank / ranks;
  return (share){first, count * (rank + 1) / ranks - first};
}

typedef struct cut {
  int32_t rank, ranks;
  share heads, kv_heads, columns; /* of query, of K and V, of the feed-forward */
  bool divides_head;
  pkv_error *err;
} cut;

/* Elements that stay together where columns of w are divided. */
static int64_t block_of(const pkv_weight *w) {
  int64_t block = 1;
  (void)pkv_gguf_type_info((uint32_t)w->type, NULL, &block, NULL);
  return block;
}

static pkv_status cut_heads(cut *c, const pkv_hparams *hp) {
  const int32_t group = hp->query_heads / hp->kv_heads;
  if (c->ranks <= hp->kv_heads) {
    c->kv_heads = share_of(hp->kv_heads, c->rank, c->ranks);
    c->heads = (share){c->kv_heads.first * group, c->kv_heads.count * group};
    return PKV_OK;
  }
  const int32_t each = c->ranks / hp->kv_heads; /* ranks a KV head */
  PKV_CHECK(c->err, c->ranks % hp->kv_heads == 0 && group % each == 0, PKV_E_UNSUPPORTED,
            "%d KV heads with %d query heads each do not divide among %d devices",
            (int)hp->kv_heads, (int)group, (int)c->ranks);
  c->kv_heads = (share){c->rank / each, 1};
  c->heads = (share){(int64_t)c->rank * (group / each), group / each};
  return PKV_OK;
}

/* Whole blocks of down's weights, and multiples of 8 for the kernels. */
static pkv_status cut_columns(cut *c, const pkv_model *whole) {
  int64_t block = 8;
  for (int32_t i = 0; i < whole->hp.layers; i++)
    if (block_of(&whole->layers[i].down) > block) block = block_of(&whole->layers[i].down);
  const int64_t blocks = whole->hp.feed_forward / block;
  PKV_CHECK(c->err, whole->hp.feed_forward % block == 0 && blocks >= c->ranks, PKV_E_UNSUPPORTED,
            "feed_forward %d in blocks of %lld does not divide among %d devices",
            (int)whole->hp.feed_forward, (long long)block, (int)c->ranks);
  const share s = share_of(blocks, c->rank, c->ranks);
  c->columns = (share){s.first * block, s.count * block};
  return PKV_OK;
}

static pkv_weight rows_of(const pkv_weight *w, share s) {
  pkv_weight part = *w;
  part.n = s.count;
  if (w->data) part.data = (const char *)w->data + s.first * w->row_bytes;
  return part;
}

static pkv_status columns_of(pkv_weight *part, const pkv_weight *w, share s, const char *name,
                             pkv_error *err) {
  int64_t block = 1, bytes = 0;
  const char *type = "?";
  (void)pkv_gguf_type_info((uint32_t)w->type, &type, &block, &bytes);
  PKV_CHECK(err, s.first % block == 0 && s.count % block == 0, PKV_E_UNSUPPORTED,
            "%s: columns %lld to %lld of a rank are no whole blocks of %lld (%s)", name,
            (long long)s.first, (long long)(s.first + s.count), (long long)block, type);
  *part = *w;
  part->k = s.count;
  if (w->data) part->data = (const char *)w->data + s.first / block * bytes;
  return PKV_OK;
}

/* Rows of the vocabulary by the 64: what is written of logits begins where kernels like it. */
static void cut_head(const cut *c, pkv_model *m, const pkv_model *whole) {
  const int64_t vocab = whole->output.n, rows = 64;
  const share s = share_of((vocab + rows - 1) / rows, c->rank, c->ranks);
  const int64_t first = s.first * rows, end = (s.first + s.count) * rows;
  const share head = {first, (end < vocab ? end : vocab) - first};
  if (c->divides_head)
    m->output = rows_of(&whole->output, head);
  else if (c->rank > 0)
    m->output.n = 0;
  if (c->divides_head) m->origin.vocab = head.first;
}

static const float *from(const float *vector, int64_t first) {
  return vector ? vector + first : NULL;
}

static pkv_status cut_layer(const cut *c, pkv_layer *l, const pkv_layer *whole, int32_t head_dim) {
  const share q = {c->heads.first * head_dim, c->heads.count * head_dim};
  const share kv = {c->kv_heads.first * head_dim, c->kv_heads.count * head_dim};
  *l = *whole;
  l->q = rows_of(&whole->q, q);
  l->k = rows_of(&whole->k, kv);
  l->v = rows_of(&whole->v, kv);
  l->q_bias = from(whole->q_bias, q.first);
  l->k_bias = from(whole->k_bias, kv.first);
  l->v_bias = from(whole->v_bias, kv.first);
  l->gate = rows_of(&whole->gate, c->columns);
  l->up = rows_of(&whole->up, c->columns);
  PKV_TRY(columns_of(&l->o, &whole->o, q, "the attention's output", c->err));
  return columns_of(&l->down, &whole->down, c->columns, "the feed-forward's output", c->err);
}

static pkv_status cut_all(pkv_model *m, const pkv_model *whole, cut *c) {
  PKV_TRY(cut_heads(c, &whole->hp));
  PKV_TRY(cut_columns(c, whole));
  m->hp.query_heads = (int32_t)c->heads.count;
  m->hp.kv_heads = (int32_t)c->kv_heads.count;
  m->hp.feed_forward = (int32_t)c->columns.count;
  m->origin = (pkv_model_origin){c->heads.first * whole->hp.head_dim,
                                 c->kv_heads.first * whole->hp.head_dim, c->columns.first, 0};
  cut_head(c, m, whole);
  for (int32_t i = 0; i < whole->hp.layers; i++)
    PKV_TRY(cut_layer(c, &m->layers[i], &whole->layers[i], whole->hp.head_dim));
  return PKV_OK;
}

pkv_status pkv_model_shard_create(pkv_model **out, const pkv_model *whole, int32_t rank,
                                  int32_t ranks, bool divides_head, const pkv_allocator *allocator,
                                  pkv_error *err) {
  *out = NULL;
  PKV_CHECK(err, whole->layers, PKV_E_STATE, "the model was opened for its tokenizer only");
  const pkv_allocator a = pkv_allocator_or_default(allocator);
  pkv_model *m = pkv_alloc_zeroed(&a, 1, sizeof *m);
  PKV_CHECK(err, m, PKV_E_NOMEM, "no memory for a part of a model");
  *m = *whole;
  m->allocator = a;
  m->layers = pkv_alloc_zeroed(&a, (size_t)whole->hp.layers, sizeof *m->layers);
  cut c = {.rank = rank, .ranks = ranks, .divides_head = divides_head, .err = err};
  const pkv_status status =
      m->layers ? cut_all(m, whole, &c)
                : PKV_FAIL(err, PKV_E_NOMEM, "no memory for %d layers", (int)whole->hp.layers);
  if (status != PKV_OK) {
    pkv_model_shard_destroy(m);
    return status;
  }
  *out = m;
  return PKV_OK;
}

void pkv_model_shard_destroy(pkv_model *shard) {
  if (!shard) return;
  const pkv_allocator a = shard->allocator;
  pkv_free(&a, shard->layers, (size_t)shard->hp.layers * sizeof *shard->layers);
  pkv_free(&a, shard, sizeof *shard);
}
