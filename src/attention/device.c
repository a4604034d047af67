/* SPDX-License-Identifier: Apache-2.0 */
/* device.h: checks what the host can see, keeps plan and workspace, calls the backend. */
#include "backend/device_ops.h"

#include <stdbool.h>
#include <string.h>

#include "attention/attention_check.h"
#include "attention/device_shared.h"
#include "base/status.h"
#include "kv/cache.h"
#include "pkv/device.h"
#include "plan/plan_prepare.h"
#include "policy/shape.h"

static pkv_status ops_of(const pkv_device_ops **ops, const pkv_executor *executor, pkv_error *err) {
  PKV_CHECK(err, executor, PKV_E_INVALID, "executor is NULL");
  PKV_CHECK(err, executor->device_ops, PKV_E_INVALID, "executor runs on the CPU, not on a device");
  *ops = executor->device_ops;
  return PKV_OK;
}

pkv_status pkv_device_alloc(void **out, pkv_executor *executor, size_t bytes, pkv_error *err) {
  const pkv_device_ops *ops = NULL;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_TRY(ops_of(&ops, executor, err));
  PKV_CHECK(err, bytes > 0, PKV_E_INVALID, "bytes is 0");
  return ops->alloc(out, executor, bytes, err);
}

void pkv_device_free(pkv_executor *executor, void *ptr) {
  if (executor && executor->device_ops && ptr) executor->device_ops->free(executor, ptr);
}

pkv_status pkv_device_copy(pkv_executor *executor, void *to, const void *from, size_t bytes,
                           void *stream, pkv_error *err) {
  const pkv_device_ops *ops = NULL;
  PKV_TRY(ops_of(&ops, executor, err));
  if (bytes == 0) return PKV_OK;
  PKV_CHECK(err, to && from, PKV_E_INVALID, "%s is NULL", to ? "from" : "to");
  return ops->copy(executor, to, from, bytes, stream, err);
}

pkv_status pkv_device_synchronize(pkv_executor *executor, void *stream, pkv_error *err) {
  const pkv_device_ops *ops = NULL;
  PKV_TRY(ops_of(&ops, executor, err));
  return ops->synchronize(executor, stream, err);
}

/* What the device's kernels read; f32 is the CPU's alone. */
static pkv_status check_kv_dtype(pkv_dtype dtype, pkv_error *err) {
  PKV_CHECK(err, pkv_dtype_bytes(dtype) != 0, PKV_E_INVALID, "kv_dtype is %d, known are 0 to 3",
            (int)dtype);
  PKV_CHECK(err, dtype != PKV_DTYPE_F32, PKV_E_UNSUPPORTED,
            "kv_dtype is f32: a device's caches are f16, bf16 or fp8_e4m3");
  return PKV_OK;
}

static pkv_status parts_of(int32_t *parts, pkv_executor *executor, const pkv_shape *shape,
                           pkv_dtype kv_dtype, pkv_error *err) {
  return executor->device_ops->parts(parts, executor, kv_dtype, shape->head_dim,
                                     shape->q_len * (shape->query_heads / shape->kv_heads), err);
}

pkv_status pkv_device_parts(int32_t *parts, pkv_executor *executor, const pkv_shape *shape,
                            pkv_dtype kv_dtype, pkv_error *err) {
  const pkv_device_ops *ops = NULL;
  PKV_CHECK(err, parts, PKV_E_INVALID, "parts is NULL");
  *parts = 0;
  PKV_TRY(ops_of(&ops, executor, err));
  PKV_CHECK_STRUCT(err, shape, pkv_shape);
  PKV_TRY(pkv_shape_check(shape, err));
  PKV_TRY(check_kv_dtype(kv_dtype, err));
  return parts_of(parts, executor, shape, kv_dtype, err);
}

/* Device memory of a plan whose limits are known. */
static pkv_status allocate(pkv_device_plan *plan, const pkv_device_ops *ops, int64_t slot_bytes,
                           pkv_error *err) {
  const int32_t tiles = plan->tiles;
  const int64_t merges = plan->limits.max_merges > 0 ? plan->limits.max_merges : 1;
  const int64_t slots = plan->limits.max_slots > 0 ? plan->limits.max_slots : 1;
  int64_t bytes;
  const bool over = __builtin_mul_overflow(merges, (int64_t)tiles, &plan->counter_count) ||
                    plan->counter_count > INT32_MAX ||
                    __builtin_mul_overflow(slots, slot_bytes, &bytes) ||
                    __builtin_mul_overflow(bytes, (int64_t)tiles, &bytes);
  PKV_CHECK(err, !over, PKV_E_RANGE,
            "the workspace is too large: %lld slots, %lld merges, %d tiles", (long long)slots,
            (long long)merges, tiles);
  void *memory;
  plan->counter_bytes = (size_t)plan->counter_count * sizeof(uint32_t);
  plan->slot_bytes = (size_t)bytes;
  PKV_TRY(ops->alloc(&plan->plan, plan->executor, plan->limits.plan_bytes, err));
  PKV_TRY(ops->alloc(&memory, plan->executor, plan->counter_bytes, err));
  plan->counters = memory;
  PKV_TRY(ops->alloc(&memory, plan->executor, sizeof(int32_t), err));
  plan->fault = memory;
  PKV_TRY(ops->alloc(&memory, plan->executor, plan->slot_bytes, err));
  plan->slots = memory;
  return PKV_OK;
}

/* What a segment costs against a tile of 8 on a GPU: docs/notes/cuda-decode.md. */
#define DEVICE_SEGMENT_COST 16

static pkv_status create(pkv_device_plan *plan, const pkv_device_ops *ops, pkv_error *err) {
  int64_t slot_bytes;
  if (plan->options.route == PKV_ROUTE_SHARED) return pkv_device_create_shared(plan, err);
  if (plan->options.segment_cost == 0 && plan->options.tile_cost == 0)
    plan->options.segment_cost = DEVICE_SEGMENT_COST;
  const bool own_parts = plan->options.parts == 0 && (plan->options.route == PKV_ROUTE_BALANCED ||
                                                      plan->options.route == PKV_ROUTE_AUTO);
  if (own_parts)
    PKV_TRY(parts_of(&plan->options.parts, plan->executor, &plan->shape, plan->kv_dtype, err));
  PKV_TRY(pkv_plan_bounds(&plan->limits.plan_bytes, &plan->limits.max_merges,
                          &plan->limits.max_slots, &plan->shape, &plan->options,
                          plan->limits.max_rows, plan->limits.max_seq_len, err));
  if (own_parts) plan->options.flags |= PKV_PLAN_FEWER_PARTS; /* the bounds are the same */
  PKV_TRY(ops->sizes(&slot_bytes, plan, err));
  plan->launch_room = 2 * plan->limits.max_rows + 2;
  plan->launch =
      pkv_alloc_zeroed(&plan->executor->allocator, (size_t)plan->launch_room, sizeof *plan->launch);
  PKV_CHECK(err, plan->launch, PKV_E_NOMEM, "%d launches of the plan", plan->launch_room);
  PKV_TRY(allocate(plan, ops, slot_bytes, err));
  PKV_TRY(ops->reset(plan, NULL, err));
  return ops->synchronize(plan->executor, NULL, err);
}

pkv_status pkv_device_plan_create(pkv_device_plan **out, pkv_executor *executor,
                                  const pkv_shape *shape, const pkv_plan_options *options,
                                  pkv_dtype kv_dtype, int32_t max_rows, int32_t max_seq_len,
                                  pkv_error *err) {
  const pkv_device_ops *ops = NULL;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_TRY(ops_of(&ops, executor, err));
  PKV_CHECK_STRUCT(err, shape, pkv_shape);
  PKV_CHECK_STRUCT(err, options, pkv_plan_options);
  PKV_TRY(pkv_shape_check(shape, err));
  PKV_TRY(check_kv_dtype(kv_dtype, err));
  PKV_CHECK(err, max_rows >= 0 && max_rows <= INT32_MAX / 4, PKV_E_RANGE, "max_rows is %d",
            max_rows);
  pkv_device_plan *plan = pkv_alloc_zeroed(&executor->allocator, 1, sizeof *plan);
  PKV_CHECK(err, plan, PKV_E_NOMEM, "%zu bytes for the plan", sizeof *plan);
  plan->executor = executor;
  plan->shape = *shape;
  plan->options = *options;
  plan->kv_dtype = kv_dtype;
  plan->limits.max_rows = max_rows;
  plan->limits.max_seq_len = max_seq_len;
  const pkv_status status = create(plan, ops, err);
  if (status != PKV_OK) {
    pkv_device_plan_destroy(plan);
    return status;
  }
  *out = plan;
  return PKV_OK;
}

void pkv_device_plan_destroy(pkv_device_plan *plan) {
  if (!plan) return;
  pkv_executor *executor = plan->executor;
  pkv_device_plan_destroy(plan->line);
  pkv_device_free(executor, plan->plan);
  pkv_device_free(executor, plan->counters);
  pkv_device_free(executor, plan->fault);
  pkv_device_free(executor, plan->slots);
  pkv_device_free(executor, plan->tree.memory);
  pkv_free(&executor->allocator, plan->launch, (size_t)plan->launch_room * sizeof *plan->launch);
  pkv_free(&executor->allocator, plan, sizeof *plan);
}

void pkv_device_plan_set_fused(pkv_device_plan *plan, int32_t fused) {
  if (plan) plan->fused_merge = fused != 0;
}

void pkv_device_plan_set_overlap(pkv_device_plan *plan, int32_t overlap) {
  if (plan) plan->overlap = overlap < 0 ? 0 : overlap > 2 ? 2 : overlap;
}

pkv_status pkv_device_plan_build(pkv_device_plan *plan, int32_t rows, const int32_t *seq_len,
                                 void *stream, pkv_error *err) {
  PKV_CHECK(err, plan, PKV_E_INVALID, "plan is NULL");
  PKV_CHECK(err, rows >= 0 && rows <= plan->limits.max_rows, PKV_E_RANGE,
            "rows is %d, the plan was created for 0 to %d", rows, plan->limits.max_rows);
  PKV_CHECK(err, seq_len || rows == 0, PKV_E_INVALID, "seq_len is NULL with %d rows", rows);
  PKV_CHECK(err, (uintptr_t)seq_len % sizeof(int32_t) == 0, PKV_E_INVALID,
            "seq_len is %p, not aligned to 4 bytes", (const void *)seq_len);
  PKV_TRY(pkv_plan_prepare(&plan->header, &plan->shape, &plan->options, rows, err));
  PKV_CHECK(err, plan->header.route == PKV_ROUTE_BALANCED, PKV_E_UNSUPPORTED,
            "route %s is planned on the host: use pkv_device_plan_upload",
            pkv_route_name((pkv_route)plan->header.route));
  plan->built = 0;
  PKV_TRY(plan->executor->device_ops->build(plan, plan->limits.max_seq_len, seq_len, stream, err));
  plan->built = 1;
  plan->fresh = 1;
  return PKV_OK;
}

/* An uploaded plan must be one that this handle's memory was sized for. */
static pkv_status check_upload(const pkv_device_plan *to, const struct pkv_plan *plan,
                               pkv_error *err) {
  const pkv_shape *s = &to->shape;
  PKV_CHECK(err, plan && (uintptr_t)plan % PKV_CACHE_LINE == 0 && plan->magic == PKV_PLAN_MAGIC,
            PKV_E_INVALID, "plan is not a built plan");
  PKV_CHECK(err,
            plan->query_heads == s->query_heads && plan->kv_heads == s->kv_heads &&
                plan->head_dim == s->head_dim && plan->page_tokens == s->page_tokens &&
                plan->q_len == s->q_len && plan->window == s->window,
            PKV_E_INVALID, "plan: another shape than this device plan was created for");
  const bool shared = plan->route == PKV_ROUTE_SHARED;
  PKV_CHECK(err, shared == (to->options.route == PKV_ROUTE_SHARED), PKV_E_INVALID,
            "plan is of route %s, the device plan was created for %s",
            pkv_route_name((pkv_route)plan->route), pkv_route_name(to->options.route));
  PKV_CHECK(err,
            (size_t)plan->plan_bytes <= to->limits.plan_bytes &&
                plan->rows <= to->limits.max_rows && plan->merges <= to->limits.max_merges &&
                plan->slots <= to->limits.max_slots && plan->launches <= to->launch_room,
            PKV_E_TOO_SMALL,
            "plan: %lld bytes, %d rows, %d merges, %d slots; room for %zu, %d, %lld, %lld",
            (long long)plan->plan_bytes, plan->rows, plan->merges, plan->slots,
            to->limits.plan_bytes, to->limits.max_rows, (long long)to->limits.max_merges,
            (long long)to->limits.max_slots);
  return PKV_OK;
}

/* A line is built on the device, where lengths beyond its limit are cut. */
static bool line_takes(const pkv_device_plan *to, const struct pkv_plan *plan) {
  const int32_t *const seq_len = pkv_plan_at(plan, plan->seq_len_at);
  for (int32_t row = 0; row < plan->rows; row++)
    if (seq_len[row] > to->limits.max_seq_len) return false;
  return true;
}

pkv_status pkv_device_plan_upload(pkv_device_plan *out, const pkv_plan *plan, void *stream,
                                  pkv_error *err) {
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  PKV_TRY(check_upload(out, plan, err));
  const pkv_device_ops *ops = out->executor->device_ops;
  out->built = 0;
  out->header = *plan;
  if (plan->route == PKV_ROUTE_SHARED) out->tree.header = *pkv_tree_view_of(plan).tree;
  memcpy(out->launch, pkv_plan_at(plan, plan->launches_at),
         (size_t)plan->launches * sizeof *out->launch);
  PKV_TRY(ops->copy(out->executor, out->plan, plan, (size_t)plan->plan_bytes, stream, err));
  PKV_TRY(ops->reset(out, stream, err));
  if (out->line) out->line->built = 0; /* then the tree serves batches that share nothing, too */
  if (out->line && line_takes(out, plan))
    PKV_TRY(pkv_device_plan_build(
        out->line, plan->rows,
        (const int32_t *)(const void *)((const unsigned char *)out->plan + plan->seq_len_at),
        stream, err));
  out->built = 1;
  out->fresh = 1;
  return PKV_OK;
}

pkv_status pkv_device_plan_download(void *memory, size_t capacity, size_t *bytes,
                                    pkv_device_plan *plan, void *stream, pkv_error *err) {
  PKV_CHECK(err, plan && bytes, PKV_E_INVALID, "%s is NULL", plan ? "bytes" : "plan");
  PKV_CHECK(err, plan->built, PKV_E_STATE, "the plan has not been built");
  const pkv_device_ops *ops = plan->executor->device_ops;
  *bytes = (size_t)plan->header.plan_bytes;
  PKV_CHECK(err, capacity >= *bytes && memory, PKV_E_TOO_SMALL,
            "memory: %zu bytes, the plan has %zu", capacity, *bytes);
  PKV_TRY(ops->copy(plan->executor, memory, plan->plan, *bytes, stream, err));
  return ops->synchronize(plan->executor, stream, err);
}

pkv_status pkv_device_plan_fault(int32_t *row, pkv_device_plan *plan, void *stream,
                                 pkv_error *err) {
  int32_t fault = 0;
  PKV_CHECK(err, row && plan, PKV_E_INVALID, "%s is NULL", row ? "plan" : "row");
  const pkv_device_ops *ops = plan->executor->device_ops;
  PKV_TRY(ops->copy(plan->executor, &fault, plan->fault, sizeof fault, stream, err));
  PKV_TRY(ops->synchronize(plan->executor, stream, err));
  *row = fault - 1;
  return PKV_OK;
}

pkv_status pkv_device_attention(pkv_executor *executor, pkv_device_plan *plan,
                                const pkv_attention_args *args, void *stream, pkv_error *err) {
  const pkv_device_ops *ops = NULL;
  pkv_attention_params p;
  PKV_TRY(ops_of(&ops, executor, err));
  PKV_CHECK(err, plan, PKV_E_INVALID, "plan is NULL");
  PKV_CHECK(err, plan->executor == executor, PKV_E_INVALID, "plan belongs to another executor");
  PKV_CHECK(err, plan->built, PKV_E_STATE, "the plan has not been built");
  PKV_CHECK_STRUCT(err, args, pkv_attention_args);
  PKV_CHECK(err, args->plan == NULL, PKV_E_INVALID,
            "args->plan is set; the device plan takes its place");
  PKV_TRY(pkv_attention_resolve(&p, args, &plan->header, 1, err));
  PKV_CHECK(err, args->block_table || plan->header.rows == 0 || plan->limits.max_seq_len == 0,
            PKV_E_INVALID, "args->block_table is NULL with %d rows", plan->header.rows);
  PKV_CHECK(err, args->cache->dtype == plan->kv_dtype, PKV_E_INVALID,
            "args->cache is %s, the plan was created for %s", pkv_dtype_name(args->cache->dtype),
            pkv_dtype_name(plan->kv_dtype));
  return ops->attention(plan, &p, stream, err);
}

pkv_status pkv_device_append(pkv_executor *executor, const pkv_append_args *args, void *stream,
                             pkv_error *err) {
  const pkv_device_ops *ops = NULL;
  pkv_append_params p;
  PKV_TRY(ops_of(&ops, executor, err));
  PKV_TRY(pkv_append_resolve(&p, args, 1, err));
  PKV_CHECK(err, p.tokens <= INT32_MAX, PKV_E_RANGE, "args->tokens is %lld, at most %d",
            (long long)p.tokens, INT32_MAX);
  PKV_CHECK(err, p.cache.kv_heads <= 1 << 20, PKV_E_UNSUPPORTED,
            "args->cache->kv_heads is %d, at most %d on a device", p.cache.kv_heads, 1 << 20);
  return ops->append(executor, &p, stream, err);
}
