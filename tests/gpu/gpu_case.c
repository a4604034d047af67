/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/gpu_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device_ops.h"
#include "base/alloc.h"
#include "base/dtype.h"

const pkv_dtype gpu_kv_dtypes[3] = {PKV_DTYPE_F16, PKV_DTYPE_BF16, PKV_DTYPE_FP8_E4M3};

const char gpu_llama_8b[] =
    "{\"model_type\": \"llama\", \"hidden_size\": 4096, \"intermediate_size\": 14336,"
    " \"num_hidden_layers\": 32, \"num_attention_heads\": 32, \"num_key_value_heads\": 8,"
    " \"head_dim\": 128, \"vocab_size\": 128256, \"max_position_embeddings\": 131072,"
    " \"rope_theta\": 500000.0, \"rms_norm_eps\": 1e-5, \"hidden_act\": \"silu\","
    " \"tie_word_embeddings\": false}";

pkv_model *gpu_random_model(const char *config, int32_t on_device) {
  char path[] = "/tmp/pkv-config-XXXXXX";
  pkv_model *model = NULL;
  FILE *const file = fdopen(mkstemp(path), "w");
  assert_non_null(file);
  assert_true(fputs(config, file) >= 0);
  assert_int_equal(fclose(file), 0);
  OK(pkv_model_open_random(&model, path, on_device, NULL, err));
  assert_int_equal(remove(path), 0);
  return model;
}

double gpu_operand_u(pkv_dtype kv) {
  return kv == PKV_DTYPE_BF16 ? 1.0 / 256 : 1.0 / 2048;
}

int gpu_plan_options(pkv_plan_options options[GPU_PLANS]) {
  int n = 0;
  for (int i = 0; i < GPU_PLANS; i++)
    options[i] = (pkv_plan_options)PKV_PLAN_OPTIONS_INIT;
  n++; /* as many parts as fill the device */
  options[n++].parts = 7;
  options[n].flags = PKV_PLAN_BATCH_INVARIANT;
  options[n].parts = 13;
  options[n++].chunk_tokens = 64;
  options[n++].flags = PKV_PLAN_BATCH_INVARIANT;
  options[n++].route = PKV_ROUTE_BUCKET_EXACT;
  options[n].route = PKV_ROUTE_BUCKET_PADDED;
  options[n].splits = 5;
  options[n++].bucket_tokens = 128;
  options[n++].route = PKV_ROUTE_SPLIT;
  options[n++].route = PKV_ROUTE_WORKQUEUE;
  return n;
}

attn_spec gpu_spec(pkv_dtype kv, uint64_t seed, int32_t rows, const int32_t *seq_len) {
  attn_spec s = attn_spec_default();
  s.seed = seed;
  s.kv_dtype = kv;
  s.operand_u = gpu_operand_u(kv);
  s.q_dtype = s.out_dtype = kv == PKV_DTYPE_BF16 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16;
  if (kv == PKV_DTYPE_FP8_E4M3) {
    s.k_scale = 0.5f;
    s.v_scale = 0.25f;
  }
  s.rows = rows;
  s.seq_len = seq_len;
  return s;
}

void gpu_copy(void *to, const void *from, size_t bytes) {
  OK(pkv_device_copy(gpu, to, from, bytes, NULL, err));
}

void *gpu_up(const void *from, size_t bytes) {
  void *to = NULL;
  if (from == NULL || bytes == 0) return NULL;
  OK(pkv_device_alloc(&to, gpu, bytes, err));
  gpu_copy(to, from, bytes);
  return to;
}

void gpu_fill(void *device, int byte, size_t bytes) {
  if (bytes == 0) return;
  void *host = malloc(bytes);
  memset(host, byte, bytes);
  gpu_copy(device, host, bytes);
  OK(pkv_device_synchronize(gpu, NULL, err));
  free(host);
}

void gpu_case_init(gpu_case *g, attn_case *c) {
  const attn_spec *s = &c->spec;
  const size_t heads = (size_t)(s->kv_heads * s->group);
  memset(g, 0, sizeof *g);
  g->host = c;
  g->storage = gpu_up(c->storage, c->storage_bytes);
  g->cache = c->cache;
  g->cache.k = (unsigned char *)g->storage + ((unsigned char *)c->cache.k - c->storage);
  g->cache.v = (unsigned char *)g->storage + ((unsigned char *)c->cache.v - c->storage);
  g->k_scale = gpu_up(c->cache.k_head_scale, (size_t)s->kv_heads * sizeof(float));
  g->v_scale = gpu_up(c->cache.v_head_scale, (size_t)s->kv_heads * sizeof(float));
  g->cache.k_head_scale = g->k_scale;
  g->cache.v_head_scale = g->v_scale;
  g->table = gpu_up(c->table, (size_t)(s->rows * c->table_stride) * sizeof(int32_t));
  g->q = gpu_up(c->q, c->q_bytes);
  g->out = gpu_up(c->out, c->out_bytes);
  g->lse = gpu_up(c->lse, c->lse_floats * sizeof(float));
  g->sinks = gpu_up(c->sinks, heads * sizeof(float));
  g->seq_len = gpu_up(s->seq_len, (size_t)s->rows * sizeof(int32_t));
  g->args = attn_case_args(c, NULL);
  g->args.cache = &g->cache;
  g->args.block_table = g->table;
  g->args.q = g->q;
  g->args.out = g->out;
  g->args.lse = g->lse;
  g->args.sinks = g->sinks;
}

void gpu_case_deinit(gpu_case *g) {
  void *all[] = {g->storage, g->table,   g->q,       g->out,    g->lse,
                 g->sinks,   g->k_scale, g->v_scale, g->seq_len};
  for (size_t i = 0; i < COUNT(all); i++)
    pkv_device_free(gpu, all[i]);
}

void gpu_case_refresh(gpu_case *g) {
  const attn_case *c = g->host;
  const size_t bytes = (size_t)(c->spec.rows * c->table_stride) * sizeof(int32_t);
  int32_t *table = malloc(bytes);
  memcpy(table, c->table, bytes);
  for (int32_t r = 0; r < c->spec.rows; r++) {
    const int64_t need = (c->spec.seq_len[r] + c->spec.page_tokens - 1) / c->spec.page_tokens;
    for (int64_t i = need; i < c->table_stride; i++)
      table[r * c->table_stride + i] = -1;
  }
  gpu_copy(g->table, table, bytes);
  free(table);
  gpu_copy(g->seq_len, c->spec.seq_len, (size_t)c->spec.rows * sizeof(int32_t));
}

static int32_t longest_of(const attn_spec *s) {
  int32_t longest = 0;
  for (int32_t r = 0; r < s->rows; r++)
    if (s->seq_len[r] > longest) longest = s->seq_len[r];
  return longest;
}

pkv_device_plan *gpu_plan(gpu_case *g, const pkv_plan_options *options, int32_t longest) {
  const attn_spec *s = &g->host->spec;
  const pkv_shape shape = attn_case_shape(g->host);
  pkv_device_plan *plan = NULL;
  if (longest == 0) longest = longest_of(s);
  OK(pkv_device_plan_create(&plan, gpu, &shape, options, s->kv_dtype, s->rows, longest, err));
  gpu_replan(g, plan, options);
  return plan;
}

void gpu_replan(gpu_case *g, pkv_device_plan *plan, const pkv_plan_options *options) {
  if (options->route == PKV_ROUTE_BALANCED) {
    OK(pkv_device_plan_build(plan, g->host->spec.rows, g->seq_len, NULL, err));
    return;
  }
  attn_plan host;
  attn_plan_init(&host, g->host, &plan->options); /* with the device's defaults filled in */
  assert_int_equal(host.status, PKV_OK);
  OK(pkv_device_plan_upload(plan, host.plan, NULL, err));
  OK(pkv_device_synchronize(gpu, NULL, err));
  attn_plan_deinit(&host);
}

#define POISON_BYTES ((size_t)16 << 20)

void gpu_poison_plan(pkv_device_plan *plan, int byte, uint64_t seed) {
  const struct {
    void *at;
    size_t bytes;
  } all[] = {{plan->plan, plan->limits.plan_bytes},
             {plan->counters, plan->counter_bytes},
             {plan->slots, plan->slot_bytes},
             {plan->fault, sizeof *plan->fault}};
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  OK(pkv_device_synchronize(gpu, NULL, err));
  for (size_t i = 0; i < COUNT(all); i++) {
    if (byte >= 0) {
      gpu_fill(all[i].at, byte, all[i].bytes);
      continue;
    }
    /* Bounds on slots go into gigabytes; what a plan uses lies at their front. */
    const size_t bytes = all[i].bytes < POISON_BYTES ? all[i].bytes : POISON_BYTES;
    uint64_t *noise = malloc(bytes + 8);
    for (size_t k = 0; k <= bytes / 8; k++)
      noise[k] = pkv_rng_next(&rng);
    gpu_copy(all[i].at, noise, bytes);
    OK(pkv_device_synchronize(gpu, NULL, err));
    free(noise);
  }
  if (plan->line) gpu_poison_plan(plan->line, byte, seed + 1);
}

void gpu_mark(gpu_case *g, int byte) {
  gpu_fill(g->out, byte, g->host->out_bytes);
  gpu_fill(g->lse, byte, g->host->lse_floats * sizeof(float));
}

void gpu_fetch(gpu_case *g) {
  attn_case *c = g->host;
  gpu_copy(c->out, g->out, c->out_bytes);
  gpu_copy(c->lse, g->lse, c->lse_floats * sizeof(float));
  OK(pkv_device_synchronize(gpu, NULL, err));
}

void gpu_run(gpu_case *g, pkv_device_plan *plan) {
  pkv_error err = {0};
  char name[256];
  gpu_mark(g, 0x5a);
  if (pkv_device_attention(gpu, plan, &g->args, NULL, &err) != PKV_OK)
    fail_msg("%s: %s", attn_case_name(g->host, name, sizeof name), err.text);
  gpu_fetch(g);
}

void gpu_run_routes(attn_case *c) {
  pkv_plan_options options[GPU_PLANS];
  const int n = gpu_plan_options(options);
  gpu_case g;
  if (c->want == NULL) attn_case_answer(c);
  gpu_case_init(&g, c);
  for (int i = 0; i < n; i++) {
    char what[64];
    pkv_device_plan *plan = gpu_plan(&g, &options[i], 0);
    const bool seed = options[i].route != PKV_ROUTE_BALANCED;
    for (int fused = 0; fused <= (seed ? 1 : 0); fused++) {
      pkv_device_plan_set_fused(plan, fused);
      for (int twice = 0; twice < 2; twice++) {
        gpu_run(&g, plan);
        snprintf(what, sizeof what, "%s plan %d fused %d run %d", pkv_route_name(options[i].route),
                 i, fused, twice);
        attn_check(c, what);
      }
    }
    int32_t fault = 0;
    OK(pkv_device_plan_fault(&fault, plan, NULL, err));
    assert_int_equal(fault, -1);
    pkv_device_plan_destroy(plan);
  }
  gpu_case_deinit(&g);
}

void gpu_fill_row(attn_case *c, int32_t row, uint64_t seed) {
  const attn_spec *s = &c->spec;
  const int64_t heads = (int64_t)s->kv_heads * s->group;
  pkv_rng rng;
  pkv_rng_init(&rng, seed);
  for (int32_t t = 0; t < s->seq_len[row]; t++)
    for (int32_t h = 0; h < s->kv_heads; h++)
      for (int v = 0; v < 2; v++)
        for (int32_t i = 0; i < s->head_dim; i++)
          pkv_store(attn_case_element(c, v != 0, row, t, h), s->kv_dtype, i,
                    (float)pkv_rng_normal(&rng));
  for (int32_t t = 0; t < s->q_len; t++) {
    const int64_t at = ((int64_t)row * s->q_len + t) * c->q_token;
    pkv_rng_init(&rng, seed * 1000003u + (uint64_t)(s->seq_len[row] - s->q_len + t));
    for (int64_t h = 0; h < heads; h++)
      for (int32_t i = 0; i < s->head_dim; i++)
        pkv_store(c->q, s->q_dtype, at + h * c->q_head + i, (float)pkv_rng_normal(&rng));
  }
}

const unsigned char *gpu_out_of(const attn_case *c, int32_t row, int32_t t, size_t *bytes) {
  const attn_spec *s = &c->spec;
  const size_t element = pkv_dtype_bytes(s->out_dtype);
  *bytes = (size_t)(s->kv_heads * s->group * s->head_dim) * element;
  return (const unsigned char *)c->out +
         (size_t)(((int64_t)row * s->q_len + t) * c->out_token) * element;
}
