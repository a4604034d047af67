/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/gpu_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"

pkv_executor *gpu_executor(void) {
  static int told;
  pkv_executor *executor = NULL;
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_error err = {0};
  options.device = PKV_DEVICE_CUDA;
  if (pkv_executor_create(&executor, &options, &err) != PKV_OK && !told) {
    printf("skip: %s\n", err.text);
    told = 1;
  }
  return executor;
}

static void *up(gpu_case *g, const void *from, size_t bytes) {
  pkv_error err = {0};
  void *to = NULL;
  if (from == NULL || bytes == 0) return NULL;
  if (pkv_device_alloc(&to, g->executor, bytes, &err) != PKV_OK) fail_msg("%s", err.text);
  if (pkv_device_copy(g->executor, to, from, bytes, NULL, &err) != PKV_OK) fail_msg("%s", err.text);
  return to;
}

void gpu_case_init(gpu_case *g, attn_case *c, pkv_executor *executor) {
  const attn_spec *s = &c->spec;
  const size_t heads = (size_t)(s->kv_heads * s->group);
  memset(g, 0, sizeof *g);
  g->host = c;
  g->executor = executor;
  g->storage = up(g, c->storage, c->storage_bytes);
  g->cache = c->cache;
  g->cache.k = (unsigned char *)g->storage + ((unsigned char *)c->cache.k - c->storage);
  g->cache.v = (unsigned char *)g->storage + ((unsigned char *)c->cache.v - c->storage);
  g->k_scale = up(g, c->cache.k_head_scale, (size_t)s->kv_heads * sizeof(float));
  g->v_scale = up(g, c->cache.v_head_scale, (size_t)s->kv_heads * sizeof(float));
  g->cache.k_head_scale = g->k_scale;
  g->cache.v_head_scale = g->v_scale;
  g->table = up(g, c->table, (size_t)(s->rows * c->table_stride) * sizeof(int32_t));
  g->q = up(g, c->q, c->q_bytes);
  g->out = up(g, c->out, c->out_bytes);
  g->lse = up(g, c->lse, c->lse_floats * sizeof(float));
  g->sinks = up(g, c->sinks, heads * sizeof(float));
  g->seq_len = up(g, s->seq_len, (size_t)s->rows * sizeof(int32_t));
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
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
    pkv_device_free(g->executor, all[i]);
}

pkv_device_plan *gpu_plan(gpu_case *g, const pkv_plan_options *options) {
  const attn_spec *s = &g->host->spec;
  const pkv_shape shape = attn_case_shape(g->host);
  int32_t longest = 0;
  for (int32_t r = 0; r < s->rows; r++)
    if (s->seq_len[r] > longest) longest = s->seq_len[r];
  pkv_device_plan *plan = NULL;
  pkv_error err = {0};
  pkv_status status = pkv_device_plan_create(&plan, g->executor, &shape, options, s->kv_dtype,
                                             s->rows, longest, &err);
  if (status != PKV_OK) fail_msg("create: %s", err.text);
  if (options->route == PKV_ROUTE_BALANCED) {
    status = pkv_device_plan_build(plan, s->rows, g->seq_len, NULL, &err);
    if (status != PKV_OK) fail_msg("build: %s", err.text);
    return plan;
  }
  attn_plan host;
  attn_plan_init(&host, g->host, options);
  assert_int_equal(host.status, PKV_OK);
  status = pkv_device_plan_upload(plan, host.plan, NULL, &err);
  if (status == PKV_OK) status = pkv_device_synchronize(g->executor, NULL, &err);
  if (status != PKV_OK) fail_msg("upload: %s", err.text);
  attn_plan_deinit(&host);
  return plan;
}

void gpu_run(gpu_case *g, pkv_device_plan *plan) {
  attn_case *c = g->host;
  pkv_error err = {0};
  memset(c->out, 0x5a, c->out_bytes);
  memset(c->lse, 0x5a, c->lse_floats * sizeof(float));
  pkv_status status = pkv_device_copy(g->executor, g->out, c->out, c->out_bytes, NULL, &err);
  if (status == PKV_OK)
    status =
        pkv_device_copy(g->executor, g->lse, c->lse, c->lse_floats * sizeof(float), NULL, &err);
  if (status == PKV_OK) status = pkv_device_attention(g->executor, plan, &g->args, NULL, &err);
  if (status == PKV_OK)
    status = pkv_device_copy(g->executor, c->out, g->out, c->out_bytes, NULL, &err);
  if (status == PKV_OK)
    status =
        pkv_device_copy(g->executor, c->lse, g->lse, c->lse_floats * sizeof(float), NULL, &err);
  if (status == PKV_OK) status = pkv_device_synchronize(g->executor, NULL, &err);
  char name[256];
  if (status != PKV_OK) fail_msg("%s: %s", attn_case_name(c, name, sizeof name), err.text);
}
