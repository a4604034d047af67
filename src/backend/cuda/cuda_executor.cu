/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA executor: finds the device, resolves parameters, launches. Host code only. Every
 * runtime call
 * is checked; a failure is converted to a status with the call's name, and the runtime's sticky
 * error
 * is cleared so that the next call starts clean.
 */
#include <cuda_runtime.h>
#include <stddef.h>

extern "C" {
#include "backend/device_ops.h"
#include "base/env.h"
#include "base/status.h"
#include "plan/plan_core.h"
}

#include "backend/cuda/cuda_advance.h"
#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/cuda_products.h"
#include "backend/cuda/cuda_state.h"
#include "backend/cuda/cuda_tree.h"

static void device_free(pkv_executor *executor, void *ptr) {
  (void)executor;
  if (ptr && cudaFree(ptr) != cudaSuccess) (void)cudaGetLastError();
}

static pkv_status device_alloc(void **out, pkv_executor *executor, size_t bytes, pkv_error *err) {
  PKV_CUDA(err, cudaSetDevice(pkv_cuda_state_of(executor)->device));
  const cudaError_t e = cudaMalloc(out, bytes);
  if (e != cudaSuccess) {
    *out = NULL;
    /* a size beyond any memory is an invalid value to the runtime */
    if (e != cudaErrorMemoryAllocation && e != cudaErrorInvalidValue)
      return pkv_cuda_fail(err, e, "cudaMalloc");
    (void)cudaGetLastError();
    const pkv_cuda_facts facts = pkv_cuda_facts_now();
    return pkv_fail(err, PKV_E_NOMEM, "cudaMalloc",
                    "cudaMalloc: %zu bytes on the device, %zu of %zu are free: %zu are missing",
                    bytes, facts.free_bytes, facts.bytes,
                    bytes > facts.free_bytes ? bytes - facts.free_bytes : 1);
  }
  /* A stream that does not wait for the default one may use it at once. */
  cudaError_t zeroed = cudaMemset(*out, 0, bytes);
  if (zeroed == cudaSuccess) zeroed = cudaStreamSynchronize(NULL);
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

/* One call, where the driver takes rows so far apart. */
static pkv_status device_copy_rows(pkv_executor *executor, void *to, size_t to_stride,
                                   const void *from, size_t from_stride, size_t bytes, int32_t rows,
                                   void *stream, pkv_error *err) {
  const size_t most = INT32_MAX;
  if (to_stride <= most && from_stride <= most) {
    PKV_CUDA(err, cudaMemcpy2DAsync(to, to_stride, from, from_stride, bytes, (size_t)rows,
                                    cudaMemcpyDefault, (cudaStream_t)stream));
    return PKV_OK;
  }
  for (int32_t i = 0; i < rows; i++)
    PKV_TRY(device_copy(executor, (char *)to + (size_t)i * to_stride,
                        (const char *)from + (size_t)i * from_stride, bytes, stream, err));
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

/* Query rows that a CTA of `balanced` takes together, of so many of a KV head. */
static int32_t tile_rows_of(int64_t query_rows) {
  return query_rows > 8 ? 16 : 8;
}

/* CTAs an SM that take so many query rows together, and the stages of their rings. */
static pkv_status prepare(int32_t *ctas, int32_t *stages, pkv_executor *executor, pkv_dtype dtype,
                          int32_t head_dim, int32_t tile_rows, pkv_error *err) {
  const pkv_cuda_decode_ops *ops;
  const pkv_cuda_shared_memory *memory = &pkv_cuda_state_of(executor)->shared_memory;
  PKV_TRY(ops_of(&ops, dtype, head_dim, err));
  PKV_CUDA(err, cudaSetDevice(pkv_cuda_state_of(executor)->device));
  PKV_CUDA(err, ops->prepare(ctas, stages, memory, tile_rows));
  PKV_CHECK(err, *ctas > 0, PKV_E_UNSUPPORTED,
            "decode for a %s cache with head_dim %d needs more shared memory than this device's %d "
            "bytes a CTA",
            pkv_dtype_name(dtype), head_dim, memory->a_cta);
  return PKV_OK;
}

static pkv_status device_parts(int32_t *parts, pkv_executor *executor, pkv_dtype dtype,
                               int32_t head_dim, int32_t query_rows, pkv_error *err) {
  int32_t ctas, stages;
  PKV_TRY(prepare(&ctas, &stages, executor, dtype, head_dim, tile_rows_of(query_rows), err));
  *parts = ctas * pkv_cuda_state_of(executor)->sms;
  return PKV_OK;
}

/* Limits of the kernels that plan, and of those of route shared where they run, so that no step
   sets them. */
static pkv_status prepare_planner(const struct pkv_device_plan *plan, pkv_error *err) {
  pkv_cuda_state *state = pkv_cuda_state_of(plan->executor);
  if (plan->options.route != PKV_ROUTE_SHARED) {
    PKV_CUDA(err, pkv_cuda_planner_prepare());
    return PKV_OK;
  }
  const pkv_cuda_shared_ops *ops = pkv_cuda_shared_ops_of(plan->kv_dtype, plan->shape.head_dim);
  PKV_CUDA(err, pkv_cuda_tree_prepare(&state->desk_bytes, &state->dependent));
  if (ops) PKV_CUDA(err, ops->prepare(&state->tensors, plan->stages, state->major));
  return PKV_OK;
}

static pkv_status device_sizes(int64_t *slot_bytes, struct pkv_device_plan *plan, pkv_error *err) {
  const pkv_cuda_decode_ops *ops;
  const pkv_shape *shape = &plan->shape;
  int32_t ctas;
  PKV_TRY(ops_of(&ops, plan->kv_dtype, shape->head_dim, err));
  const int64_t rows = (int64_t)(shape->query_heads / shape->kv_heads) * shape->q_len;
  const bool balanced =
      plan->options.route == PKV_ROUTE_BALANCED || plan->options.route == PKV_ROUTE_AUTO;
  plan->tile_rows = balanced ? tile_rows_of(rows) : 8;
  /* route shared has the rings of large tiles: its CTAs are as few (private.cuh) */
  PKV_TRY(prepare(&ctas, &plan->stages, plan->executor, plan->kv_dtype, shape->head_dim,
                  plan->options.route == PKV_ROUTE_SHARED ? 16 : plan->tile_rows, err));
  const int64_t count = (rows + plan->tile_rows - 1) / plan->tile_rows;
  PKV_CHECK(err, count <= 65535, PKV_E_UNSUPPORTED,
            "shape: q_len %d times %d heads a KV head is too large", shape->q_len,
            shape->query_heads / shape->kv_heads);
  plan->tiles = (int32_t)count;
  PKV_TRY(prepare_planner(plan, err));
  plan->clears_slots = balanced && !(plan->options.flags & PKV_PLAN_BATCH_INVARIANT);
  *slot_bytes = (plan->options.route == PKV_ROUTE_SHARED ? rows : plan->tile_rows) *
                (int64_t)pkv_cuda_slot_row(ops->head_dim) * 4;
  return PKV_OK;
}

static pkv_status device_build(struct pkv_device_plan *plan, int32_t max_seq_len,
                               const int32_t *seq_len, void *stream, pkv_error *err) {
  const pkv_cuda_workspace workspace = {plan->counters,
                                        plan->counter_count,
                                        plan->clears_slots ? plan->slots : NULL,
                                        (int64_t)plan->slot_bytes,
                                        plan->fault,
                                        plan->zeros,
                                        plan->zero_bytes};
  const cudaError_t e =
      pkv_cuda_launch_planner(&plan->header, plan->plan, seq_len, max_seq_len, &workspace,
                              pkv_cuda_state_of(plan->executor)->sms,
                              pkv_cuda_state_of(plan->executor)->major >= 9, (cudaStream_t)stream);
  return pkv_cuda_launched(plan->executor, e, "planner", (cudaStream_t)stream, err);
}

static pkv_status device_tree_parts(int32_t *parts, pkv_executor *executor, pkv_error *err) {
  (void)err;
  *parts = pkv_cuda_state_of(executor)->sms;
  return PKV_OK;
}

static pkv_status device_build_tree(struct pkv_device_plan *plan, const int32_t *seq_len,
                                    const pkv_sharing *sharing, void *stream, pkv_error *err) {
  pkv_cuda_tree_params p = {};
  p.desk_bytes = pkv_cuda_state_of(plan->executor)->desk_bytes;
  p.dependent = pkv_cuda_state_of(plan->executor)->dependent;
  p.input.header = plan->header;
  p.input.tree = plan->tree.header;
  p.input.plan = (struct pkv_plan *)plan->plan;
  p.input.seq_len = seq_len;
  p.input.block_table = sharing->block_table;
  p.input.block_table_stride = sharing->block_table_stride;
  const int64_t units =
      (int64_t)sharing->max_pages * plan->header.page_tokens / plan->header.unit_tokens;
  p.input.max_units = units < INT32_MAX ? (int32_t)units : INT32_MAX;
  p.input.max_seq_len = plan->limits.max_seq_len;
  p.input.chained = (sharing->flags & PKV_TABLE_CHAINED) != 0;
  p.memory = plan->tree.memory;
  p.beside_planner = p.dependent && plan->line != NULL;
  p.zeroed = plan->line != NULL && plan->line->clears_slots;
  p.most_units = plan->tree.most_units;
  p.counters = plan->counters;
  p.counter_count = plan->counter_count;
  p.fault = plan->fault;
  return pkv_cuda_launched(plan->executor, pkv_cuda_launch_tree(&p, (cudaStream_t)stream), "tree",
                           (cudaStream_t)stream, err);
}

static pkv_status device_reset(struct pkv_device_plan *plan, void *stream, pkv_error *err) {
  PKV_CUDA(err, cudaMemsetAsync(plan->counters, 0, plan->counter_bytes, (cudaStream_t)stream));
  PKV_CUDA(err, cudaMemsetAsync(plan->fault, 0, sizeof *plan->fault, (cudaStream_t)stream));
  if (plan->clears_slots)
    PKV_CUDA(err, cudaMemsetAsync(plan->slots, 0xff, plan->slot_bytes, (cudaStream_t)stream));
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

/* Four outputs at a multiple of four elements lie on a multiple of their bytes. */
static bool out_vectors(const pkv_attention_params *a) {
  const int64_t bytes = (int64_t)pkv_dtype_bytes(a->out_dtype);
  return (a->out_token_stride | a->out_head_stride) % 4 == 0 &&
         (uintptr_t)a->out % (uintptr_t)(4 * bytes) == 0;
}

static int log2_of(int32_t x) {
  return (x & (x - 1)) == 0 ? __builtin_ctz((unsigned)x) : -1;
}

template <typename T> static const T *array_at(const struct pkv_device_plan *plan, int64_t at) {
  return (const T *)((const unsigned char *)plan->plan + at);
}

static pkv_cuda_decode_params resolve(const struct pkv_device_plan *plan,
                                      const pkv_attention_params *a,
                                      const pkv_cuda_decode_ops *ops) {
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
  p.max_pages = a->max_pages;
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
  p.slots_stride = (int64_t)plan->slot_bytes / plan->tiles /
                   ((int64_t)plan->tile_rows * pkv_cuda_slot_row(ops->head_dim) * 4);
  p.counters_stride = (int32_t)(plan->counter_count / plan->tiles);
  p.scale = a->scale * a->cache.k_scale;
  p.v_scale = a->cache.v_scale;
  p.soft_cap = a->soft_cap;
  p.rows = h->rows;
  p.q_len = h->q_len;
  p.group = h->query_heads / h->kv_heads;
  p.window = h->window;
  p.unit_tokens = h->unit_tokens;
  p.tile_rows = plan->tile_rows;
  p.stages = plan->stages;
  p.wait_first = plan->fresh;
  p.wait_tokens = plan->overlap < 2;
  p.page_shift = log2_of(h->page_tokens);
  p.aligned = multiples_of_16(&a->cache);
  p.runs = p.aligned && p.page_shift >= 4 && a->cache.head_dim == ops->head_dim;
  p.out_vectors = out_vectors(a);
  p.k_head_scale = a->cache.k_head_scale;
  p.v_head_scale = a->cache.v_head_scale;
  p.invariant = (h->flags & PKV_PLAN_BATCH_INVARIANT) != 0;
  p.q_is_operand = q_is_operand(a);
  p.q_dtype = a->q_dtype;
  p.out_dtype = a->out_dtype;
  p.lse_base2 = a->lse_base2;
  p.fused_merge = plan->fused_merge;
  p.slot_stride = h->slot_stride;
  p.total_cost = array_at<int64_t>(plan, offsetof(struct pkv_plan, total_cost));
  p.alone_cost = h->parts * (h->segment_cost + PKV_CUDA_ALONE_UNITS * (int64_t)h->unit_cost);
  return p;
}

/* What pkv_plain_params says. */
static bool is_plain(const pkv_cuda_decode_params *p) {
  return p->q_len == 1 && p->group <= 8 && p->runs && p->q_is_operand && p->out_vectors &&
         !p->invariant && p->window == 0 && p->soft_cap == 0.0f && !p->sinks && !p->k_head_scale &&
         !p->v_head_scale;
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
    PKV_TRY(pkv_cuda_launched(plan->executor, e, merge ? "merge" : "decode_items", stream, err));
  }
  return PKV_OK;
}

/* The tree's arrays in device memory. */
static pkv_tree_view view_on_device(const struct pkv_device_plan *plan) {
  const struct pkv_plan *h = &plan->header;
  const pkv_plan_tree *t = &plan->tree.header;
  pkv_tree_view v = {};
  v.tree = array_at<pkv_plan_tree>(plan, h->tree_at);
  v.ranks = array_at<pkv_tree_rank>(plan, t->ranks_at);
  v.row_rank = array_at<int32_t>(plan, t->row_rank_at);
  v.nodes = array_at<pkv_tree_node>(plan, t->nodes_at);
  v.node_cursors = array_at<pkv_node_cursor>(plan, t->node_cursors_at);
  v.private_cursors = array_at<pkv_private_cursor>(plan, t->private_cursors_at);
  v.node_slot = array_at<int32_t>(plan, t->node_slot_at);
  v.private_slot = array_at<int32_t>(plan, t->private_slot_at);
  v.rows = h->rows;
  v.kv_heads = h->kv_heads;
  v.unit_tokens = h->unit_tokens;
  v.batch_invariant = (h->flags & PKV_PLAN_BATCH_INVARIANT) != 0;
  return v;
}

/* What the kernels of route shared ask for; the text says what is missing. */
static pkv_status check_shared(const struct pkv_device_plan *plan, const pkv_attention_params *a,
                               const pkv_cuda_decode_params *p, pkv_error *err) {
  const pkv_cache *c = &a->cache;
  PKV_CHECK(
      err, pkv_cuda_shared_ops_of(c->dtype, c->head_dim), PKV_E_UNSUPPORTED,
      "route shared on CUDA: a %s cache with head_dim %d; possible: f16 or bf16 with 64 or 128, "
      "fp8_e4m3 with 128",
      pkv_dtype_name(c->dtype), c->head_dim);
  PKV_CHECK(err, !p->invariant, PKV_E_UNSUPPORTED,
            "route shared on CUDA is not batch-invariant: its nodes use other instructions");
  PKV_CHECK(
      err, p->runs, PKV_E_UNSUPPORTED,
      "route shared on CUDA: pages of %d tokens; possible: powers of two from 16 on, addresses "
      "and strides that are multiples of 16 bytes",
      c->page_tokens);
  const bool fp8 = c->dtype == PKV_DTYPE_FP8_E4M3;
  PKV_CHECK(err,
            (p->q_is_operand || (fp8 && a->q_dtype == PKV_DTYPE_BF16)) &&
                (uintptr_t)a->q % 16 == 0 && (a->q_token_stride | a->q_head_stride) % 8 == 0,
            PKV_E_UNSUPPORTED, "route shared on CUDA: q must be %s at multiples of 16 bytes",
            fp8 ? "f16 or bf16" : pkv_dtype_name(c->dtype));
  return PKV_OK;
}

/* What `balanced` gets for the batch, where its kernel may serve it. */
static void resolve_line(pkv_cuda_shared_params *s, struct pkv_device_plan *plan,
                         const pkv_attention_params *a, const pkv_cuda_decode_ops *ops) {
  struct pkv_device_plan *line = plan->line;
  if (!line || !line->built || line->header.parts != 2 * s->parts) return;
  line->overlap = plan->overlap;
  line->fresh = plan->fresh;
  s->line = resolve(line, a, ops);
  s->line.fault = plan->fault;
  pkv_cuda_decode_params plain = s->line;
  if (a->cache.dtype == PKV_DTYPE_FP8_E4M3) plain.q_is_operand = 1; /* whatever type it has */
  s->has_line = is_plain(&plain);
}

/* Maps for the copy engine, where the device's kernel has it. */
static pkv_status encode_tensors(pkv_cuda_tensor_maps *maps, const pkv_cuda_state *state,
                                 const pkv_cache *cache, pkv_error *err) {
  *maps = {};
  if (!state->tensors) return PKV_OK;
  PKV_CHECK(err, state->tensor_encoder, PKV_E_UNSUPPORTED,
            "route shared on CUDA needs a driver with tensor maps (CUDA 12)");
  const int refused = pkv_cuda_encode_tensors(maps, state->tensor_encoder, cache);
  PKV_CHECK(err, refused == 0, PKV_E_UNSUPPORTED,
            "route shared on CUDA: the driver makes no tensor map of this cache (CUresult %d)",
            refused);
  return PKV_OK;
}

static pkv_status run_shared(struct pkv_device_plan *plan, const pkv_attention_params *a,
                             const pkv_cuda_decode_params *p, const pkv_cuda_decode_ops *decode,
                             cudaStream_t stream, pkv_error *err) {
  PKV_TRY(check_shared(plan, a, p, err));
  const pkv_cuda_shared_ops *ops = pkv_cuda_shared_ops_of(a->cache.dtype, a->cache.head_dim);
  pkv_cuda_shared_params s = {};
  s.base = *p;
  s.view = view_on_device(plan);
  s.node_slots = plan->slots;
  s.private_slots = plan->slots + plan->tree.max_node_slots * p->q_len * p->group *
                                      pkv_cuda_slot_row(a->cache.head_dim);
  s.parts = plan->header.parts;
  resolve_line(&s, plan, a, decode);
  const pkv_cuda_state *state = pkv_cuda_state_of(plan->executor);
  pkv_cuda_tensor_maps maps;
  PKV_TRY(encode_tensors(&maps, state, &a->cache, err));
  const cudaError_t e = ops->launch(&s, &maps, state->major, plan->overlap, stream);
  plan->fresh = 0;
  return pkv_cuda_launched(plan->executor, e, "shared", stream, err);
}

static pkv_status device_attention(struct pkv_device_plan *plan, const pkv_attention_params *a,
                                   void *stream, pkv_error *err) {
  const pkv_cuda_decode_ops *ops;
  PKV_TRY(ops_of(&ops, a->cache.dtype, a->cache.head_dim, err));
  pkv_cuda_decode_params p = resolve(plan, a, ops);
  if (plan->header.route == PKV_ROUTE_SHARED)
    return run_shared(plan, a, &p, ops, (cudaStream_t)stream, err);
  if (plan->header.route != PKV_ROUTE_BALANCED)
    return run_launches(plan, ops, p, (cudaStream_t)stream, err);
  /* a launch that waits for the kernel ahead before it reads anything may always begin early */
  const int32_t dependent =
      pkv_cuda_state_of(plan->executor)->major >= 9 && (plan->overlap || p.wait_first);
  const bool plain = is_plain(&p);
  const pkv_plan_core core = pkv_plan_core_of(&plan->header);
  p.many = plain && pkv_core_many(&core);
  if (!p.many && !p.invariant && (int64_t)p.rows * a->cache.kv_heads <= PKV_CUDA_FEW_SEGMENTS)
    p.few_rows = p.q_len * p.group < p.tile_rows ? p.q_len * p.group : p.tile_rows;
  const int32_t ctas = plan->header.parts + (p.few_rows > 0 ? p.few_rows - 1 : 0);
  const cudaError_t e = ops->launch(plain && !p.many ? PKV_CUDA_DECODE_PLAIN : PKV_CUDA_DECODE, &p,
                                    ctas, dependent, (cudaStream_t)stream);
  plan->fresh = 0;
  return pkv_cuda_launched(plan->executor, e, "decode", (cudaStream_t)stream, err);
}

static pkv_status device_append(pkv_executor *executor, const pkv_append_params *p, void *stream,
                                pkv_error *err) {
  return pkv_cuda_launched(executor, pkv_cuda_launch_append(p, (cudaStream_t)stream), "append",
                           (cudaStream_t)stream, err);
}

static pkv_status device_advance(pkv_executor *executor, const pkv_device_advance *p, void *stream,
                                 pkv_error *err) {
  return pkv_cuda_launched(executor, pkv_cuda_launch_advance(p, (cudaStream_t)stream), "advance",
                           (cudaStream_t)stream, err);
}

static pkv_status device_event_create(void **event, pkv_executor *executor, pkv_error *err) {
  cudaEvent_t made = NULL;
  *event = NULL;
  PKV_CUDA(err, cudaSetDevice(pkv_cuda_state_of(executor)->device));
  PKV_CUDA(err, cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
  *event = made;
  return PKV_OK;
}

static void device_event_destroy(pkv_executor *executor, void *event) {
  (void)executor;
  if (event && cudaEventDestroy((cudaEvent_t)event) != cudaSuccess) (void)cudaGetLastError();
}

static pkv_status device_event_record(pkv_executor *executor, void *event, void *stream,
                                      pkv_error *err) {
  (void)executor;
  PKV_CUDA(err, cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream));
  return PKV_OK;
}

static pkv_status device_event_wait(pkv_executor *executor, void *event, pkv_error *err) {
  (void)executor;
  PKV_CUDA(err, cudaEventSynchronize((cudaEvent_t)event));
  return PKV_OK;
}

static void device_products_maker(char maker[PKV_PRODUCT_MAKER], pkv_executor *executor) {
  maker[0] = '\0';
  if (pkv_cuda_state_of(executor)->products)
    pkv_cuda_products_maker(maker, pkv_cuda_state_of(executor)->products, executor);
}

static void device_products_take(pkv_executor *executor, const pkv_product_choice *choices,
                                 int32_t count) {
  if (pkv_cuda_state_of(executor)->products)
    pkv_cuda_products_take(pkv_cuda_state_of(executor)->products, choices, count);
}

static int32_t device_products_list(pkv_product_choice out[PKV_PRODUCT_CHOICES], int32_t *timed,
                                    pkv_executor *executor) {
  *timed = 0;
  if (!pkv_cuda_state_of(executor)->products) return 0;
  return pkv_cuda_products_list(out, timed, pkv_cuda_state_of(executor)->products);
}

static const pkv_device_ops cuda_device_ops = {
    device_alloc,        device_free,       device_copy,           device_synchronize,
    device_parts,        device_sizes,      device_build,          device_reset,
    device_attention,    device_append,     device_tree_parts,     device_build_tree,
    device_copy_rows,    device_advance,    device_event_create,   device_event_destroy,
    device_event_record, device_event_wait, device_products_maker, device_products_take,
    device_products_list};

static const pkv_backend_ops cuda_ops = {"cuda"};

pkv_status pkv_cuda_executor_init(pkv_executor *executor, int32_t index, pkv_error *err) {
  int count = 0;
  cudaDeviceProp properties;
  PKV_CUDA(err, cudaGetDeviceCount(&count));
  PKV_CHECK(err, count > 0, PKV_E_UNSUPPORTED, "no CUDA device");
  int device = index;
  PKV_CHECK(err, index < count, PKV_E_UNSUPPORTED,
            "device %d is asked for, this process sees %d (CUDA_VISIBLE_DEVICES may hide others)",
            index, count);
  if (index >= 0) PKV_CUDA(err, cudaSetDevice(index));
  PKV_CUDA(err, cudaGetDevice(&device));
  PKV_CUDA(err, cudaGetDeviceProperties(&properties, device));
  PKV_CHECK(err, properties.major >= 8, PKV_E_UNSUPPORTED,
            "device %d (%s) has compute capability %d.%d; 8.0 is needed", device, properties.name,
            properties.major, properties.minor);
  PKV_CUDA(err, pkv_cuda_kernels_load());
  pkv_cuda_state *state =
      (pkv_cuda_state *)pkv_alloc_zeroed(&executor->allocator, 1, sizeof *state);
  PKV_CHECK(err, state, PKV_E_NOMEM, "%zu bytes for the CUDA executor", sizeof *state);
  const char *check = pkv_env_get(PKV_ENV_CUDA_CHECK);
  state->device = device;
  state->sms = properties.multiProcessorCount;
  state->major = properties.major;
  state->shared_memory = {(int32_t)properties.sharedMemPerMultiprocessor,
                          (int32_t)properties.sharedMemPerBlockOptin,
                          (int32_t)properties.reservedSharedMemPerBlock};
  state->tensor_encoder = properties.major == 9 ? pkv_cuda_tensor_encoder() : NULL;
  state->check = check && check[0] == '1';
  executor->device_state = state;
  executor->ops = &cuda_ops;
  executor->device_ops = &cuda_device_ops;
  executor->dense = &pkv_cuda_dense_ops;
  return PKV_OK;
}

void pkv_cuda_executor_deinit(pkv_executor *executor) {
  pkv_cuda_dense_deinit(executor);
  pkv_free(&executor->allocator, executor->device_state, sizeof(pkv_cuda_state));
  executor->device_state = NULL;
}
