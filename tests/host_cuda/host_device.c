/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A "CUDA" executor that is the CPU's: device memory is host memory, plans are built by
 * pkv_plan_build, attention is the CPU's. Each call costs invented time (host_cuda.c).
 * HOST_DEVICE_FAULT plants a fault, which the benchmark has to find:
 *   tail   `balanced` leaves out the last token of row 0
 *   page   `balanced` reads the first page of row 0 instead of its third
 *   needle the same, but only for the queries that look for a needle: a fault that random numbers
 *          do not show
 *   nan    `workqueue` writes NaN into the last element of its output
 *   alloc  there is no memory for anything larger than a mebibyte
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "backend/device_ops.h"
#include "base/dtype.h"
#include "base/status.h"
#include "cuda_runtime_api.h"

#define PLAN_US 3.0

typedef struct host_state {
  pkv_executor *cpu;
} host_state;

static bool fault(const char *name) {
  const char *planted = getenv("HOST_DEVICE_FAULT");
  return planted != NULL && strcmp(planted, name) == 0;
}

static pkv_status host_alloc(void **out, pkv_executor *executor, size_t bytes, pkv_error *err) {
  (void)executor;
  *out = NULL;
  PKV_CHECK(err, !fault("alloc") || bytes <= 1 << 20, PKV_E_NOMEM, "%zu bytes on the device",
            bytes);
  PKV_CHECK(err, posix_memalign(out, 256, bytes) == 0, PKV_E_NOMEM, "%zu bytes on the device",
            bytes);
  memset(*out, 0, bytes);
  return PKV_OK;
}

static void host_free(pkv_executor *executor, void *ptr) {
  (void)executor;
  free(ptr);
}

static pkv_status host_copy(pkv_executor *executor, void *to, const void *from, size_t bytes,
                            void *stream, pkv_error *err) {
  (void)executor;
  (void)stream;
  (void)err;
  memcpy(to, from, bytes);
  return PKV_OK;
}

static pkv_status host_synchronize(pkv_executor *executor, void *stream, pkv_error *err) {
  (void)executor;
  const cudaError_t e = cudaStreamSynchronize(stream);
  PKV_CHECK(err, e == cudaSuccess, PKV_E_DEVICE, "synchronize: %s", cudaGetErrorName(e));
  return PKV_OK;
}

static pkv_status host_parts(int32_t *parts, pkv_executor *executor, pkv_dtype dtype,
                             int32_t head_dim, int32_t query_rows, pkv_error *err) {
  (void)executor;
  (void)dtype;
  (void)head_dim;
  (void)query_rows;
  (void)err;
  *parts = 2 * HOST_CUDA_SMS;
  return PKV_OK;
}

static pkv_status host_sizes(int64_t *slot_bytes, struct pkv_device_plan *plan, pkv_error *err) {
  const pkv_shape *shape = &plan->shape;
  (void)err;
  plan->tiles = 1;
  plan->tile_rows = shape->query_heads / shape->kv_heads * shape->q_len;
  *slot_bytes = (int64_t)plan->tile_rows * (shape->head_dim + 2) * (int64_t)sizeof(float);
  return PKV_OK;
}

static pkv_status host_build(struct pkv_device_plan *plan, int32_t max_seq_len,
                             const int32_t *seq_len, void *stream, pkv_error *err) {
  const pkv_plan *built;
  (void)max_seq_len;
  host_cuda_spend(stream, PLAN_US);
  return pkv_plan_build(&built, plan->plan, plan->limits.plan_bytes, &plan->shape, &plan->options,
                        plan->header.rows, seq_len, err);
}

static pkv_status host_reset(struct pkv_device_plan *plan, void *stream, pkv_error *err) {
  (void)plan;
  (void)stream;
  (void)err;
  return PKV_OK;
}

/* A launch that overlaps the one before costs less, as on a device. */
static double attention_us(const struct pkv_device_plan *plan) {
  if (plan->header.route == PKV_ROUTE_SHARED) return 9.0;
  if (plan->header.route != PKV_ROUTE_BALANCED) return plan->fused_merge ? 16.0 : 20.0;
  return plan->overlap && !plan->fresh ? 11.0 : 12.0;
}

static pkv_status host_attention(struct pkv_device_plan *plan, const pkv_attention_params *a,
                                 void *stream, pkv_error *err) {
  host_state *s = plan->executor->device_state;
  pkv_attention_params p = *a;
  struct pkv_plan *made = plan->plan;
  int32_t *length = (int32_t *)((unsigned char *)made + made->seq_len_at);
  int32_t *table = (int32_t *)a->block_table, kept = 0;
  const bool balanced = made->route == PKV_ROUTE_BALANCED;
  const float q = pkv_load(a->q, a->q_dtype, 0);
  const bool tail = balanced && fault("tail");
  const bool page = balanced && (fault("page") || (fault("needle") && q * q == 1.0f));
  const size_t bytes = (size_t)made->workspace_bytes + 64;
  void *workspace;
  PKV_CHECK(err, posix_memalign(&workspace, 64, bytes) == 0, PKV_E_NOMEM, "no workspace");
  memset(workspace, 0xff, bytes);
  p.plan = made;
  p.workspace = workspace;
  if (tail) length[0]--;
  if (page) kept = table[2];
  if (page) table[2] = table[0];
  host_cuda_spend(stream, attention_us(plan));
  const pkv_status status = s->cpu->ops->attention(s->cpu, &p, err);
  plan->fresh = 0;
  if (tail) length[0]++;
  if (page) table[2] = kept;
  if (fault("nan") && made->route == PKV_ROUTE_WORKQUEUE) {
    const int64_t tokens = (int64_t)made->rows * made->q_len;
    const int64_t last = (tokens - 1) * p.out_token_stride +
                         (made->query_heads - 1) * p.out_head_stride + made->head_dim - 1;
    memset((unsigned char *)p.out + (size_t)last * pkv_dtype_bytes(p.out_dtype), 0xff,
           pkv_dtype_bytes(p.out_dtype));
  }
  free(workspace);
  return status;
}

static pkv_status host_tree_parts(int32_t *parts, pkv_executor *executor, pkv_error *err) {
  (void)executor;
  (void)err;
  *parts = HOST_CUDA_SMS;
  return PKV_OK;
}

static pkv_status host_build_tree(struct pkv_device_plan *plan, const int32_t *seq_len,
                                  const pkv_sharing *sharing, void *stream, pkv_error *err) {
  const pkv_plan *built;
  host_cuda_spend(stream, PLAN_US);
  return pkv_plan_build_shared(&built, plan->plan, plan->limits.plan_bytes, &plan->shape,
                               &plan->options, plan->header.rows, seq_len, sharing, err);
}

static const pkv_device_ops device_ops = {
    .alloc = host_alloc,
    .free = host_free,
    .copy = host_copy,
    .synchronize = host_synchronize,
    .parts = host_parts,
    .tree_parts = host_tree_parts,
    .build_tree = host_build_tree,
    .sizes = host_sizes,
    .build = host_build,
    .reset = host_reset,
    .attention = host_attention,
};
static const pkv_backend_ops backend_ops = {.name = "host"};

pkv_status pkv_cuda_executor_init(pkv_executor *executor, int32_t index, pkv_error *err) {
  static host_state state;
  pkv_executor_options cpu = PKV_EXECUTOR_OPTIONS_INIT;
  (void)index;
  cpu.threads = 1;
  PKV_TRY(pkv_executor_create(&state.cpu, &cpu, err));
  executor->device_state = &state;
  executor->ops = &backend_ops;
  executor->device_ops = &device_ops;
  return PKV_OK;
}

void pkv_cuda_executor_deinit(pkv_executor *executor) {
  pkv_executor_destroy(((host_state *)executor->device_state)->cpu);
}
