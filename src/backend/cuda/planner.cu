/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device's planner: the same bytes as the host's pkv_plan_build for `balanced`, from lengths
 * that only the device knows.
 *
 * CTA 0 plans: it reads the lengths once, and everything after that happens in shared memory (up
 * to PLANNER_ROWS rows): two scans, over the rows' costs and over the cuts' marks (plan_core.h says
 * over what), with a search between them; then the image of the plan goes out in one copy. More
 * rows go through the plan in global memory, by the same code. The other CTAs empty the workspace,
 * so that an aborted launch cannot poison the next step.
 */
#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/launch_kernel.cuh"
#include "backend/cuda/mma.cuh"
#include "plan/plan_core.h"

#define PLANNER_THREADS 1024
#define PLANNER_ROWS    4096 /* of a plan that is made in shared memory */

struct planner_args {
  struct pkv_plan header; /* as the host prepared it: all but what the lengths decide */
  struct pkv_plan *plan;
  const int32_t *seq_len;
  int32_t max_seq_len;
  pkv_cuda_workspace workspace;
  int32_t in_shared; /* the plan's bytes are made in shared memory */
};

/* Sums over the CTA: `before` of the threads before this one. Not inlined: what a step pays for is
   the code it fetches, once, from memory. All threads. */
static __device__ __noinline__ int64_t sum_before(int64_t x, int64_t *total) {
  __shared__ int64_t sums[PLANNER_THREADS / 32 + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  int64_t sum = x;
#pragma unroll 1
  for (int i = 1; i < 32; i *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, sum, i);
    if (lane >= i) sum += other;
  }
  __syncthreads(); /* the sums of the call before have been read */
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    const int64_t mine = sums[lane];
    int64_t all = mine;
#pragma unroll 1
    for (int i = 1; i < 32; i *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, all, i);
      if (lane >= i) all += other;
    }
    sums[lane] = all - mine;
    if (lane == 31) sums[32] = all;
  }
  __syncthreads();
  *total = sums[PLANNER_THREADS / 32];
  return sums[warp] + sum - x;
}

template <typename T>
static __device__ __forceinline__ T *array_at(struct pkv_plan *plan, int64_t at) {
  return (T *)((unsigned char *)plan + at);
}

static __device__ __noinline__ void fill(void *to, int64_t bytes, uint32_t word, int64_t from,
                                         int64_t step) {
  const uint4 x = make_uint4(word, word, word, word);
#pragma unroll 1
  for (int64_t i = from; i < bytes / 16; i += step)
    ((uint4 *)to)[i] = x;
#pragma unroll 1
  for (int64_t i = bytes / 16 * 4 + from; i < bytes / 4; i += step)
    ((uint32_t *)to)[i] = word;
}

/* seq_len and the exclusive prefix sums of the rows' costs; returns the total. */
static __device__ int64_t plan_rows(const planner_args &a, const pkv_plan_core &core,
                                    int32_t *seq_len, int64_t *row_cost) {
  const int each = (core.rows + PLANNER_THREADS - 1) / PLANNER_THREADS;
  const int from = min(core.rows, (int)threadIdx.x * each), to = min(core.rows, from + each);
  int64_t sum = 0, before, total;
#pragma unroll 1
  for (int row = from; row < to; ++row) {
    const int32_t len = min(max(0, a.seq_len[row]), a.max_seq_len);
    seq_len[row] = len;
    sum += core.kv_heads * pkv_core_segment(&core, pkv_core_units(&core, len));
  }
  before = sum_before(sum, &total);
#pragma unroll 1
  for (int row = from; row < to; ++row) {
    row_cost[row] = before;
    before += core.kv_heads * pkv_core_segment(&core, pkv_core_units(&core, seq_len[row]));
  }
  if (threadIdx.x == 0) row_cost[core.rows] = total;
  __syncthreads();
  return total;
}

/* Cuts and segments of the marks in one number, so that one scan sums both. */
static __device__ __forceinline__ int64_t pack(const pkv_core_mark &m) {
  return m.cuts + (m.segments << 32);
}

/* Slots and merges of the cursors; returns the sums of all marks. */
static __device__ pkv_core_mark plan_cuts(const pkv_plan_core &core, const int32_t *seq_len,
                                          pkv_plan_cursor *cursors, pkv_plan_merge *merges) {
  const int cuts = core.parts - 1, each = (cuts + PLANNER_THREADS - 1) / PLANNER_THREADS;
  const int from = 1 + min(cuts, (int)threadIdx.x * each), to = min(cuts + 1, from + each);
  int64_t sum = 0, units = 0, before, total, units_before = 0, units_total = 0;
#pragma unroll 1
  for (int p = from; p < to; ++p) {
    const pkv_core_mark mark = pkv_core_mark_of(&core, seq_len, &cursors[p - 1], &cursors[p]);
    sum += pack(mark);
    units += mark.units;
  }
  before = sum_before(sum, &total);
  if (core.batch_invariant) units_before = sum_before(units, &units_total);
#pragma unroll 1
  for (int p = from; p < to; ++p) {
    const pkv_core_mark mark = pkv_core_mark_of(&core, seq_len, &cursors[p - 1], &cursors[p]);
    before += pack(mark);
    units_before += mark.units;
    const pkv_core_mark here = {before & 0xffffffff, before >> 32, units_before};
    pkv_plan_cursor c = cursors[p];
    pkv_core_place(&c, &core, seq_len, &here);
    cursors[p].slot = c.slot;
    cursors[p].merge = c.merge;
    if (mark.segments) {
      merges[c.merge].row = c.row;
      merges[c.merge].kv_head = c.kv_head;
      merges[c.merge].first_slot = core.batch_invariant ? c.slot : c.slot - 1;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int p = from; p < to; ++p) {
    const pkv_plan_cursor c = cursors[p];
    if (c.unit == 0 || pkv_core_same_segment(&c, &cursors[p + 1])) continue;
    merges[c.merge].count = core.batch_invariant ? pkv_core_units(&core, seq_len[c.row])
                                                 : c.slot - merges[c.merge].first_slot + 1;
  }
  return {total & 0xffffffff, total >> 32, units_total};
}

/* All of the plan at `plan`, whose bytes are zero. */
static __device__ void make_plan(const planner_args &a, struct pkv_plan *plan) {
  const pkv_plan_core core = pkv_plan_core_of(&a.header);
  int32_t *seq_len = array_at<int32_t>(plan, a.header.seq_len_at);
  int64_t *row_cost = array_at<int64_t>(plan, a.header.row_cost_at);
  pkv_plan_cursor *cursors = array_at<pkv_plan_cursor>(plan, a.header.cursors_at);
  pkv_plan_merge *merges = array_at<pkv_plan_merge>(plan, a.header.merges_at);
  const int64_t total = plan_rows(a, core, seq_len, row_cost);
#pragma unroll 1
  for (int p = threadIdx.x; p <= core.parts; p += PLANNER_THREADS)
    pkv_core_cursor(&cursors[p], &core, row_cost, seq_len, p);
  __syncthreads();
  const pkv_core_mark sum = plan_cuts(core, seq_len, cursors, merges);
  if (threadIdx.x == 0) {
    struct pkv_plan header = a.header;
    header.total_cost = total;
    header.merges = (int32_t)sum.segments;
    header.slots = (int32_t)(core.batch_invariant ? sum.units : sum.cuts + sum.segments);
    header.launches = 1;
    header.workspace_bytes =
        pkv_plan_slots_at(&header) + header.slots * pkv_plan_slot_bytes(&header);
    *plan = header;
    *array_at<pkv_plan_launch>(plan, header.launches_at) = {PKV_LAUNCH_FUSED, 0, core.parts, 0};
  }
}

static __global__ void __launch_bounds__(PLANNER_THREADS)
    planner(const __grid_constant__ planner_args a) {
  extern __shared__ __align__(16) unsigned char image[];
  const int64_t bytes = a.header.plan_bytes;
  const bool plans = blockIdx.x == 0;
  struct pkv_plan *plan = a.in_shared ? (struct pkv_plan *)image : a.plan;
  if (plans && a.in_shared) fill(image, bytes, 0, threadIdx.x, PLANNER_THREADS);
  pkv_grid_wait(); /* the launches that still read the plan before, and what writes the lengths */
  pkv_grid_release();
  if (!plans) {
    const int64_t from = (blockIdx.x - 1) * PLANNER_THREADS + threadIdx.x;
    fill(a.workspace.slots, a.workspace.slot_bytes, PKV_CUDA_EMPTY, from,
         (int64_t)(gridDim.x - 1) * PLANNER_THREADS);
    return;
  }
  if (!a.in_shared) fill(plan, bytes, 0, threadIdx.x, PLANNER_THREADS);
  fill(a.workspace.counters, a.workspace.counter_count * 4, 0, threadIdx.x, PLANNER_THREADS);
  if (threadIdx.x == 0) *a.workspace.fault = 0;
  __syncthreads();
  make_plan(a, plan);
  if (!a.in_shared) return;
  __syncthreads();
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < bytes / 16; i += PLANNER_THREADS)
    ((uint4 *)a.plan)[i] = ((const uint4 *)image)[i];
}

/* Shared memory for a plan: what the smallest target has, the sums' own left aside. */
static const int image_limit = 88 * 1024;

extern "C" cudaError_t pkv_cuda_planner_prepare(void) {
  return cudaFuncSetAttribute(planner, cudaFuncAttributeMaxDynamicSharedMemorySize, image_limit);
}

extern "C" cudaError_t pkv_cuda_launch_planner(const struct pkv_plan *header, void *plan,
                                               const int32_t *seq_len, int32_t max_seq_len,
                                               const pkv_cuda_workspace *workspace, int32_t sms,
                                               int32_t dependent, cudaStream_t stream) {
  const bool in_shared = header->rows <= PLANNER_ROWS && header->plan_bytes <= image_limit;
  planner_args args = {*header,  (struct pkv_plan *)plan, seq_len, max_seq_len, *workspace,
                       in_shared};
  void *arguments[] = {&args};
  return pkv_cuda_launch_kernel((const void *)planner, dim3(workspace->slots ? (unsigned)sms : 1),
                                PLANNER_THREADS, in_shared ? (size_t)header->plan_bytes : 0,
                                dependent, arguments, stream);
}
