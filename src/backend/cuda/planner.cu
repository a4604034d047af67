/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device's planner: the same bytes as the host's pkv_plan_build for `balanced`, from lengths
 * that
 * only the device knows. One CTA of 512 threads, two scans (plan_core.h says over what); it also
 * zeroes the arrival counters, so that an aborted launch cannot poison the next step.
 */
#include <cub/block/block_scan.cuh>

#include "backend/cuda/cuda_launch.h"
#include "plan/plan_core.h"

#define PLANNER_THREADS     512
#define PLANNER_SHARED_ROWS 4096 /* row costs up to here are looked up in shared memory */

struct planner_args {
  struct pkv_plan header; /* as the host prepared it: all but what the lengths decide */
  struct pkv_plan *plan;
  const int32_t *seq_len;
  int32_t max_seq_len;
  uint32_t *counters;
  int64_t counter_count;
  int32_t *fault;
};

typedef cub::BlockScan<int64_t, PLANNER_THREADS> block_scan;

template <typename T>
static __device__ __forceinline__ T *array_at(struct pkv_plan *plan, int64_t at) {
  return (T *)((unsigned char *)plan + at);
}

/* seq_len and the exclusive prefix sums of the rows' costs; returns the total. */
static __device__ int64_t plan_rows(const planner_args &a, const pkv_plan_core &core,
                                    int32_t *seq_len, int64_t *row_cost, int64_t *shared_cost,
                                    block_scan::TempStorage &scratch) {
  const int each = (core.rows + PLANNER_THREADS - 1) / PLANNER_THREADS;
  const int from = min(core.rows, (int)threadIdx.x * each), to = min(core.rows, from + each);
  int64_t sum = 0, before = 0, total = 0;
  for (int row = from; row < to; ++row) {
    const int32_t len = min(max(0, a.seq_len[row]), a.max_seq_len);
    seq_len[row] = len;
    sum += core.kv_heads * pkv_core_segment(&core, pkv_core_units(&core, len));
  }
  block_scan(scratch).ExclusiveSum(sum, before, total);
  for (int row = from; row < to; ++row) {
    row_cost[row] = before;
    if (core.rows <= PLANNER_SHARED_ROWS) shared_cost[row] = before;
    before += core.kv_heads * pkv_core_segment(&core, pkv_core_units(&core, seq_len[row]));
  }
  if (threadIdx.x == 0) {
    row_cost[core.rows] = total;
    if (core.rows <= PLANNER_SHARED_ROWS) shared_cost[core.rows] = total;
  }
  __syncthreads();
  return total;
}

/* Cuts and segments of the marks in one number, so that one scan sums both. */
static __device__ __forceinline__ int64_t pack(const pkv_core_mark &m) {
  return m.cuts + (m.segments << 32);
}

/* Slots and merges of the cursors; returns the sums of all marks. */
static __device__ pkv_core_mark plan_cuts(const pkv_plan_core &core, const int32_t *seq_len,
                                          pkv_plan_cursor *cursors, pkv_plan_merge *merges,
                                          block_scan::TempStorage &scratch) {
  const int cuts = core.parts - 1, each = (cuts + PLANNER_THREADS - 1) / PLANNER_THREADS;
  const int from = 1 + min(cuts, (int)threadIdx.x * each), to = min(cuts + 1, from + each);
  int64_t sum = 0, units = 0, before, total, units_before = 0, units_total = 0;
  for (int p = from; p < to; ++p) {
    const pkv_core_mark mark = pkv_core_mark_of(&core, seq_len, &cursors[p - 1], &cursors[p]);
    sum += pack(mark);
    units += mark.units;
  }
  block_scan(scratch).ExclusiveSum(sum, before, total);
  if (core.batch_invariant) {
    __syncthreads();
    block_scan(scratch).ExclusiveSum(units, units_before, units_total);
  }
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
  for (int p = from; p < to; ++p) {
    const pkv_plan_cursor c = cursors[p];
    if (c.unit == 0 || pkv_core_same_segment(&c, &cursors[p + 1])) continue;
    merges[c.merge].count = core.batch_invariant ? pkv_core_units(&core, seq_len[c.row])
                                                 : c.slot - merges[c.merge].first_slot + 1;
  }
  return {total & 0xffffffff, total >> 32, units_total};
}

static __global__ void __launch_bounds__(PLANNER_THREADS)
    planner(const __grid_constant__ planner_args a) {
  __shared__ block_scan::TempStorage scratch;
  __shared__ int64_t shared_cost[PLANNER_SHARED_ROWS + 1];
  const pkv_plan_core core = pkv_plan_core_of(&a.header);
  struct pkv_plan *plan = a.plan;
  int32_t *seq_len = array_at<int32_t>(plan, a.header.seq_len_at);
  int64_t *row_cost = array_at<int64_t>(plan, a.header.row_cost_at);
  pkv_plan_cursor *cursors = array_at<pkv_plan_cursor>(plan, a.header.cursors_at);
  pkv_plan_merge *merges = array_at<pkv_plan_merge>(plan, a.header.merges_at);

  for (int64_t i = threadIdx.x; i < a.header.plan_bytes / 16; i += PLANNER_THREADS)
    ((uint4 *)plan)[i] = make_uint4(0, 0, 0, 0);
  for (int64_t i = threadIdx.x; i < a.counter_count; i += PLANNER_THREADS)
    a.counters[i] = 0;
  if (threadIdx.x == 0) *a.fault = 0;
  __syncthreads();
  const int64_t total = plan_rows(a, core, seq_len, row_cost, shared_cost, scratch);
  const int64_t *costs = core.rows <= PLANNER_SHARED_ROWS ? shared_cost : row_cost;
  for (int p = threadIdx.x; p <= core.parts; p += PLANNER_THREADS)
    pkv_core_cursor(&cursors[p], &core, costs, seq_len, p);
  __syncthreads();
  const pkv_core_mark sum = plan_cuts(core, seq_len, cursors, merges, scratch);
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

extern "C" cudaError_t pkv_cuda_launch_planner(const struct pkv_plan *header, void *plan,
                                               const int32_t *seq_len, int32_t max_seq_len,
                                               uint32_t *counters, int64_t counter_count,
                                               int32_t *fault, cudaStream_t stream) {
  planner_args args = {*header,  (struct pkv_plan *)plan, seq_len, max_seq_len,
                       counters, counter_count,           fault};
  planner<<<1, PLANNER_THREADS, 0, stream>>>(args);
  return cudaGetLastError();
}
