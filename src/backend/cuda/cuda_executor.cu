/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA executor: finds the device, resolves parameters, launches. Host code only. Every
 * runtime call
 * is checked; a failure is converted to a status with the call's name, and the runtime's sticky
 * error
 * is cleared so that the next call starts clean.
 */
#include <cuda_runtime.h>

extern "C" {
#include "backend/device_ops.h"
#include "base/env.h"
#include "base/status.h"
}

#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/cuda_status.h"

struct cuda_state {
  int device, sms;
  int shared_bytes; /* of a multiprocessor */
  bool check;       /* PKV_CUDA_CHECK: synchronise after each launch */
};

#define PKV_CUDA(err, call)                                                                        \
  do {                                                                                             \
    const cudaError_t pkv_cuda_error = (call);                                                     \
    if (pkv_cuda_error != cudaSuccess) return pkv_cuda_fail((err), pkv_cuda_error, #call);         \
  } while (0)

static cuda_state *state_of(const pkv_executor *executor) {
  return (cuda_state *)executor->device_state;
}

/* After a launch: its own status, and with PKV_CUDA_CHECK that of its execution. */
static pkv_status launched(const pkv_executor *executor, cudaError_t e, const char *kernel,
                           cudaStream_t stream, pkv_error *err) {
  if (e != cudaSuccess) return pkv_cuda_fail(err, e, kernel);
  if (!state_of(executor)->check) return PKV_OK;
  e = cudaStreamSynchronize(stream);
  return e == cudaSuccess ? PKV_OK : pkv_cuda_fail(err, e, kernel);
}

static void device_free(pkv_executor *executor, void *ptr) {
  (void)executor;
  if (ptr && cudaFree(ptr) != cudaSuccess) (void)cudaGetLastError();
}

static pkv_status device_alloc(void **out, pkv_executor *executor, size_t bytes, pkv_error *err) {
  PKV_CUDA(err, cudaSetDevice(state_of(executor)->device));
  const cudaError_t e = cudaMalloc(out, bytes);
  if (e != cudaSuccess) {
    *out = NULL;
    /* a size beyond any memory is an invalid value to the runtime */
    if (e != cudaErrorMemoryAllocation && e != cudaErrorInvalidValue)
      return pkv_cuda_fail(err, e, "cudaMalloc");
    (void)cudaGetLastError();
    const pkv_cuda_facts facts = pkv_cuda_facts_now();
    return pkv_fail(err, PKV_E_NOMEM, "cudaMalloc",
                    "cudaMalloc: %zu bytes on the device, %zu of %zu are free", bytes,
                    facts.free_bytes, facts.bytes);
  }
  const cudaError_t zeroed = cudaMemset(*out, 0, bytes);
  if (zeroed != cudaSuccess) {
    device_free(executor, *out);
    *out = NULL;
    return pkv_cuda_fail(err, zeroed, "cudaMemset");
  }
  return PKV_OK;
}

static pkv_status device_copy(pkv_executor *executor, void *to, const void *from, size_t bytes,
                              void *stream, pkv_error *err) {
  (void)executor;
  PKV_CUDA(err, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, (cudaStream_t)stream));
  return PKV_OK;
}

static pkv_status device_synchronize(pkv_executor *executor, void *stream, pkv_error *err) {
  (void)executor;
  PKV_CUDA(err, cudaStreamSynchronize((cudaStream_t)stream));
  return PKV_OK;
}

static pkv_status ops_of(const pkv_cuda_decode_ops **out, pkv_dtype dtype, int32_t head_dim,
                         pkv_error *err) {
  *out = pkv_cuda_decode_ops_of(dtype, head_dim);
  PKV_CHECK(err, *out, PKV_E_UNSUPPORTED, "no CUDA kernel for a %s cache with head_dim %d",
            pkv_dtype_name(dtype), head_dim);
  return PKV_OK;
}

/* Raises the kernels' shared-memory limits, which every plan needs; CTAs a multiprocessor. */
static pkv_status prepare(int32_t *ctas, const pkv_cuda_decode_ops *ops, pkv_executor *executor,
                          pkv_dtype dtype, int32_t head_dim, pkv_error *err) {
  *ctas = 0;
  const cudaError_t e = ops->prepare(ctas);
  if (e == cudaErrorInvalidValue) (void)cudaGetLastError(); /* more than a block may have */
  if (e != cudaSuccess && e != cudaErrorInvalidValue) return pkv_cuda_fail(err, e, "prepare");
  PKV_CHECK(err, e == cudaSuccess && *ctas > 0, PKV_E_UNSUPPORTED,
            "the decode kernel of %s with head_dim %d does not fit this device's multiprocessors "
            "of %d bytes of shared memory",
            pkv_dtype_name(dtype), head_dim, state_of(executor)->shared_bytes);
  return PKV_OK;
}

static pkv_status device_parts(int32_t *parts, pkv_executor *executor, pkv_dtype dtype,
                               int32_t head_dim, pkv_error *err) {
  const pkv_cuda_decode_ops *ops;
  int32_t ctas;
  PKV_TRY(ops_of(&ops, dtype, head_dim, err));
  PKV_TRY(prepare(&ctas, ops, executor, dtype, head_dim, err));
  *parts = ctas * state_of(executor)->sms;
  return PKV_OK;
}

static pkv_status device_sizes(int64_t *slot_bytes, int32_t *tiles, pkv_executor *executor,
                               const pkv_shape *shape, pkv_dtype dtype, pkv_error *err) {
  const pkv_cuda_decode_ops *ops;
  int32_t ctas;
  PKV_TRY(ops_of(&ops, dtype, shape->head_dim, err));
  PKV_TRY(prepare(&ctas, ops, executor, dtype, shape->head_dim, err));
  const int64_t rows = (int64_t)(shape->query_heads / shape->kv_heads) * shape->q_len;
  const int64_t count = (rows + PKV_CUDA_TILE_ROWS - 1) / PKV_CUDA_TILE_ROWS;
  PKV_CHECK(err, count <= 65535, PKV_E_UNSUPPORTED,
            "shape: q_len %d times %d heads a KV head is too large", shape->q_len,
            shape->query_heads / shape->kv_heads);
  *tiles = (int32_t)count;
  *slot_bytes = (int64_t)ops->slot_floats * 4;
  return PKV_OK;
}

static pkv_status device_build(struct pkv_device_plan *plan, int32_t max_seq_len,
                               const int32_t *seq_len, void *stream, pkv_error *err) {
  const cudaError_t e =
      pkv_cuda_launch_planner(&plan->header, plan->plan, seq_len, max_seq_len, plan->counters,
                              plan->counter_count, plan->fault, (cudaStream_t)stream);
  return launched(plan->executor, e, "planner", (cudaStream_t)stream, err);
}

static pkv_status device_reset(struct pkv_device_plan *plan, void *stream, pkv_error *err) {
  PKV_CUDA(err, cudaMemsetAsync(plan->counters, 0, plan->counter_bytes, (cudaStream_t)stream));
  PKV_CUDA(err, cudaMemsetAsync(plan->fault, 0, sizeof *plan->fault, (cudaStream_t)stream));
  return PKV_OK;
}

static bool multiples_of_16(const pkv_cache *c) {
  const int64_t bytes = (int64_t)pkv_dtype_bytes(c->dtype);
  const int64_t all = c->k_page_stride | c->k_token_stride | c->k_head_stride | c->v_page_stride |
                      c->v_token_stride | c->v_head_stride;
  return all * bytes % 16 == 0 && (uintptr_t)c->k % 16 == 0 && (uintptr_t)c->v % 16 == 0;
}

/* bf16 caches are multiplied as bf16, the others as f16. */
static bool q_is_operand(const pkv_attention_params *a) {
  const pkv_dtype operand = a->cache.dtype == PKV_DTYPE_BF16 ? PKV_DTYPE_BF16 : PKV_DTYPE_F16;
  return a->q_dtype == operand && (a->q_token_stride | a->q_head_stride) % 2 == 0 &&
         (uintptr_t)a->q % 4 == 0;
}

static int log2_of(int32_t x) {
  return (x & (x - 1)) == 0 ? __builtin_ctz((unsigned)x) : -1;
}

template <typename T> static const T *array_at(const struct pkv_device_plan *plan, int64_t at) {
  return (const T *)((const unsigned char *)plan->plan + at);
}

static pkv_cuda_decode_params resolve(const struct pkv_device_plan *plan,
                                      const pkv_attention_params *a, const pkv_cuda_decode_ops *ops,
                                      int32_t tiles) {
  const struct pkv_plan *h = &plan->header;
  pkv_cuda_decode_params p = {};
  p.cursors = array_at<pkv_plan_cursor>(plan, h->cursors_at);
  p.items = array_at<pkv_plan_item>(plan, h->items_at);
  p.merges = array_at<pkv_plan_merge>(plan, h->merges_at);
  p.split_first = array_at<int32_t>(plan, h->split_first_at);
  p.seq_len = array_at<int32_t>(plan, h->seq_len_at);
  p.cache = a->cache;
  p.block_table = a->block_table;
  p.block_table_stride = a->block_table_stride;
  p.q = a->q;
  p.out = a->out;
  p.lse = a->lse;
  p.q_token_stride = a->q_token_stride;
  p.q_head_stride = a->q_head_stride;
  p.out_token_stride = a->out_token_stride;
  p.out_head_stride = a->out_head_stride;
  p.lse_token_stride = a->lse_token_stride;
  p.sinks = a->sinks;
  p.counters = plan->counters;
  p.slots = plan->slots;
  p.fault = plan->fault;
  p.slots_stride = (int64_t)(plan->slot_bytes / ((size_t)ops->slot_floats * 4)) / tiles;
  p.counters_stride = (int32_t)(plan->counter_count / tiles);
  p.scale = a->scale * a->cache.k_scale;
  p.v_scale = a->cache.v_scale;
  p.soft_cap = a->soft_cap;
  p.rows = h->rows;
  p.q_len = h->q_len;
  p.group = h->query_heads / h->kv_heads;
  p.window = h->window;
  p.unit_tokens = h->unit_tokens;
  p.page_shift = log2_of(h->page_tokens);
  p.aligned = multiples_of_16(&a->cache);
  p.q_is_operand = q_is_operand(a);
  p.q_dtype = a->q_dtype;
  p.out_dtype = a->out_dtype;
  p.lse_base2 = a->lse_base2;
  p.fused_merge = plan->fused_merge;
  p.slot_stride = h->slot_stride;
  return p;
}

/* The seed's routes: the launches as planned. Fused, a merge launch does the empty rows only. */
static pkv_status run_launches(struct pkv_device_plan *plan, const pkv_cuda_decode_ops *ops,
                               pkv_cuda_decode_params p, cudaStream_t stream, pkv_error *err) {
  const pkv_plan_item *items = p.items;
  const pkv_plan_merge *merges = p.merges;
  for (int32_t i = 0; i < plan->header.launches; i++) {
    const pkv_plan_launch *l = &plan->launch[i];
    const bool merge = l->kind == PKV_LAUNCH_MERGE;
    p.items = items + (merge ? 0 : l->first);
    p.merges = merges + (merge ? l->first : 0);
    const cudaError_t e =
        ops->launch(merge ? PKV_CUDA_MERGE : PKV_CUDA_DECODE_ITEMS, &p, l->count, 0, stream);
    PKV_TRY(launched(plan->executor, e, merge ? "merge" : "decode_items", stream, err));
  }
  return PKV_OK;
}

static pkv_status device_attention(struct pkv_device_plan *plan, const pkv_attention_params *a,
                                   void *stream, pkv_error *err) {
  const pkv_cuda_decode_ops *ops;
  int64_t slot_bytes;
  int32_t tiles;
  PKV_TRY(ops_of(&ops, a->cache.dtype, a->cache.head_dim, err));
  PKV_TRY(device_sizes(&slot_bytes, &tiles, plan->executor, &plan->shape, a->cache.dtype, err));
  const pkv_cuda_decode_params p = resolve(plan, a, ops, tiles);
  if (plan->header.route != PKV_ROUTE_BALANCED)
    return run_launches(plan, ops, p, (cudaStream_t)stream, err);
  const bool invariant = (plan->header.flags & PKV_PLAN_BATCH_INVARIANT) != 0;
  const cudaError_t e =
      ops->launch(invariant ? PKV_CUDA_DECODE_INVARIANT : PKV_CUDA_DECODE, &p, plan->header.parts,
                  plan->overlap && !plan->fresh, (cudaStream_t)stream);
  plan->fresh = 0;
  return launched(plan->executor, e, "decode", (cudaStream_t)stream, err);
}

static pkv_status device_append(pkv_executor *executor, const pkv_append_params *p, void *stream,
                                pkv_error *err) {
  return launched(executor, pkv_cuda_launch_append(p, (cudaStream_t)stream), "append",
                  (cudaStream_t)stream, err);
}

static const pkv_device_ops cuda_device_ops = {
    device_alloc, device_free,  device_copy,  device_synchronize, device_parts,
    device_sizes, device_build, device_reset, device_attention,   device_append};

static const pkv_backend_ops cuda_ops = {"cuda"};

pkv_status pkv_cuda_executor_init(pkv_executor *executor, const pkv_executor_options *options,
                                  pkv_error *err) {
  int count = 0;
  cudaDeviceProp properties;
  (void)options;
  PKV_CUDA(err, cudaGetDeviceCount(&count));
  PKV_CHECK(err, count > 0, PKV_E_UNSUPPORTED, "no CUDA device");
  int device = 0;
  PKV_CUDA(err, cudaGetDevice(&device));
  PKV_CUDA(err, cudaGetDeviceProperties(&properties, device));
  PKV_CHECK(err, properties.major >= 8, PKV_E_UNSUPPORTED,
            "device %d (%s) has compute capability %d.%d; 8.0 is needed", device, properties.name,
            properties.major, properties.minor);
  PKV_CUDA(err, pkv_cuda_kernels_load());
  cuda_state *state = (cuda_state *)pkv_alloc_zeroed(&executor->allocator, 1, sizeof *state);
  PKV_CHECK(err, state, PKV_E_NOMEM, "%zu bytes for the CUDA executor", sizeof *state);
  const char *check = pkv_env_get(PKV_ENV_CUDA_CHECK);
  state->device = device;
  state->sms = properties.multiProcessorCount;
  state->shared_bytes = (int)properties.sharedMemPerMultiprocessor;
  state->check = check && check[0] == '1';
  executor->device_state = state;
  executor->ops = &cuda_ops;
  executor->device_ops = &cuda_device_ops;
  return PKV_OK;
}

void pkv_cuda_executor_deinit(pkv_executor *executor) {
  pkv_free(&executor->allocator, executor->device_state, sizeof(cuda_state));
  executor->device_state = NULL;
}
