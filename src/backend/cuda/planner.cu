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
 *
 * Most plans take a quick way, planner_quick: where 31 bits hold the sum of costs, sums and
 * divisions are of 32 bits, a warp knows its cuts' neighbours without asking others, and five
 * barriers are left. What follows may be launched at once, and waits for the grid's end.
 */
#include "backend/cuda/cuda_launch.h"
#include "backend/cuda/launch_kernel.cuh"
#include "backend/cuda/mma.cuh"
#include "plan/plan_core.h"

#define PLANNER_THREADS 1024
#define PLANNER_ROWS    4096 /* of a plan that is made in shared memory */

/* Division of 31 bits by what the host knows: a product and a shift. */
struct planner_divisor {
  uint32_t factor, shift;
};

static planner_divisor divisor_of(uint32_t d) {
  planner_divisor by = {0, 31};
  while (by.shift < 63 && (UINT64_C(1) << (by.shift - 31)) < d)
    ++by.shift;
  by.factor = (uint32_t)((UINT64_C(1) << by.shift) / d + 1);
  return by;
}

static __device__ __forceinline__ uint32_t divide(uint32_t x, const planner_divisor &by) {
  return (uint32_t)((uint64_t)x * by.factor >> by.shift);
}

/* x / d for quotients below 2^20, of 31 bits each. All is rounded down: one too many would wrap. */
static __device__ __forceinline__ uint32_t divide_small(uint32_t x, uint32_t d) {
  uint32_t q =
      (uint32_t)__fmul_rz(__uint2float_rz(x), __frcp_rz(__uint2float_ru(d))); /* or 1 less */
  return x - q * d >= d ? q + 1 : q;
}

struct planner_args {
  struct pkv_plan header; /* as the host prepared it: all but what the lengths decide */
  struct pkv_plan *plan;
  const int32_t *seq_len;
  int32_t max_seq_len;
  pkv_cuda_workspace workspace;
  int32_t in_shared;        /* the plan's bytes are made in shared memory */
  uint32_t empty_cost;      /* of a segment without units */
  planner_divisor parts[3]; /* that may be cut, by the 32nds left empty: 0, 1, 5 */
  planner_divisor two_unit; /* twice the plan's unit_cost */
  int32_t fewer;            /* as pkv_plan_core */
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
  pkv_plan_core core = pkv_plan_core_of(&a.header);
  int32_t *seq_len = array_at<int32_t>(plan, a.header.seq_len_at);
  int64_t *row_cost = array_at<int64_t>(plan, a.header.row_cost_at);
  pkv_plan_cursor *cursors = array_at<pkv_plan_cursor>(plan, a.header.cursors_at);
  pkv_plan_merge *merges = array_at<pkv_plan_merge>(plan, a.header.merges_at);
  const int64_t total = plan_rows(a, core, seq_len, row_cost);
  core.used = pkv_core_used_parts(&core, row_cost);
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
    fill(a.workspace.zeros, a.workspace.zero_bytes, 0, from,
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

/* ------------------------------------------------------------------------------------------
 * The quick way: sums of 31 bits, tiles of 64 tokens, not batch-invariant
 * ---------------------------------------------------------------------------------------- */

#define QUICK_ROWS_A_THREAD 4
#define QUICK_CUTS          30 /* a warp's: its first and last lane have the cursors beside them */

static __device__ __forceinline__ uint32_t scan_warp(uint32_t x, int lane) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, x, i);
    if (lane >= i) x += other;
  }
  return x;
}

/* `inclusive` of this warp's lanes becomes that of all warps, whose sums lie in `sums`. */
static __device__ __forceinline__ uint32_t scan_warps(uint32_t *inclusive, const uint32_t *sums,
                                                      int warps, int warp, int lane) {
  const uint32_t all = scan_warp(lane < warps ? sums[lane] : 0, lane);
  const uint32_t before = __shfl_sync(0xffffffffu, all, max(warp - 1, 0));
  if (warp > 0) *inclusive += before;
  return __shfl_sync(0xffffffffu, all, 31);
}

static __device__ __forceinline__ uint32_t quick_units(const struct pkv_plan &h, int32_t len) {
  const int32_t first = h.window > 0 ? max(0, len - h.q_len + 1 - h.window) : 0;
  return (((uint32_t)len + 63) >> 6) - ((uint32_t)first >> 6);
}

static __device__ __forceinline__ uint32_t quick_segment(const planner_args &a, uint32_t units) {
  return units == 0 ? a.empty_cost : a.header.segment_cost + units * a.header.unit_cost;
}

/* The warps that cut meet; the others are copying. */
static __device__ __forceinline__ void cutters_meet(int cutters) {
  asm volatile("bar.sync 1, %0;\n" ::"r"(cutters * 32) : "memory");
}

static __device__ __forceinline__ void copy_out(void *plan, const unsigned char *image,
                                                int64_t from, int64_t to, int thread, int threads) {
#pragma unroll 1
  for (int i = (int)from / 16 + thread; i < (int)to / 16; i += threads)
    ((uint4 *)plan)[i] = ((const uint4 *)image)[i];
}

static __device__ __forceinline__ void prefetch_l2(const void *at) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(at));
}

/* As quick_rows, where no thread has two rows. */
static __device__ __forceinline__ uint32_t quick_few_rows(const planner_args &a,
                                                          unsigned char *image, int warp,
                                                          int lane) {
  __shared__ uint32_t sums[32];
  const struct pkv_plan &h = a.header;
  uint2 *row_cost = (uint2 *)(image + h.row_cost_at);
  const int row = threadIdx.x;
  uint32_t cost = 0;
  if (row < h.rows) {
    const int32_t len = min(max(0, __ldcg(a.seq_len + row)), a.max_seq_len);
    ((int32_t *)(image + h.seq_len_at))[row] = len;
    cost = (uint32_t)h.kv_heads * quick_segment(a, quick_units(h, len));
  }
  uint32_t inclusive = scan_warp(cost, lane);
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  const uint32_t total = scan_warps(&inclusive, sums, blockDim.x / 32, warp, lane);
  if (row < h.rows) row_cost[row] = make_uint2(inclusive - cost, 0);
  if (row == 0) row_cost[h.rows] = make_uint2(total, 0);
  __syncthreads();
  return total;
}

/* Lengths and prefix sums into the image; returns the total. Ends with a barrier. */
static __device__ __forceinline__ uint32_t quick_rows(const planner_args &a, unsigned char *image,
                                                      int warp, int lane) {
  __shared__ uint32_t sums[32];
  const struct pkv_plan &h = a.header;
  int32_t *seq_len = (int32_t *)(image + h.seq_len_at);
  uint2 *row_cost = (uint2 *)(image + h.row_cost_at);
  const int threads = blockDim.x, each = (h.rows + threads - 1) / threads;
  int32_t len[QUICK_ROWS_A_THREAD];
#pragma unroll
  for (int i = 0; i < QUICK_ROWS_A_THREAD; ++i) {
    const int row = threadIdx.x + i * threads;
    len[i] = 0;
    if (row < h.rows) len[i] = __ldcg(a.seq_len + row);
  }
#pragma unroll
  for (int i = 0; i < QUICK_ROWS_A_THREAD; ++i) {
    const int row = threadIdx.x + i * threads;
    if (row < h.rows) seq_len[row] = min(max(0, len[i]), a.max_seq_len);
  }
  if (each > 1) __syncthreads();
  const int from = min(h.rows, (int)threadIdx.x * each), to = min(h.rows, from + each);
  uint32_t sum = 0;
#pragma unroll 1
  for (int row = from; row < to; ++row) {
    row_cost[row] = make_uint2(sum, 0);
    sum += (uint32_t)h.kv_heads * quick_segment(a, quick_units(h, seq_len[row]));
  }
  uint32_t inclusive = scan_warp(sum, lane);
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  const uint32_t total = scan_warps(&inclusive, sums, threads / 32, warp, lane);
#pragma unroll 1
  for (int row = from; row < to; ++row)
    row_cost[row].x += inclusive - sum;
  if (threadIdx.x == 0) row_cost[h.rows] = make_uint2(total, 0);
  __syncthreads();
  return total;
}

struct quick_cursor {
  uint32_t row, head, unit;
};

static __device__ __forceinline__ quick_cursor quick_cut(const planner_args &a,
                                                         const unsigned char *image, uint32_t total,
                                                         int used, const planner_divisor &by,
                                                         int p) {
  const struct pkv_plan &h = a.header;
  const uint2 *row_cost = (const uint2 *)(image + h.row_cost_at);
  const int32_t *seq_len = (const int32_t *)(image + h.seq_len_at);
  const uint32_t each = divide(total, by), rest = total - each * (uint32_t)used;
  const uint32_t c = p * each + divide(p * rest, by);
  int low = 0, high = h.rows;
#pragma unroll 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (row_cost[middle].x <= c)
      low = middle;
    else
      high = middle;
  }
  const uint32_t units = quick_units(h, seq_len[low]), in_row = c - row_cost[low].x;
  const uint32_t segment = quick_segment(a, units);
  uint32_t head = divide_small(in_row, segment), unit = 0;
  const int32_t x = (int32_t)(in_row - head * segment - h.segment_cost);
  if (x > 0) unit = divide(2 * (uint32_t)x + h.unit_cost, a.two_unit);
  if (unit > 0 && unit == units) {
    unit = 0;
    ++head;
  }
  if (head == (uint32_t)h.kv_heads) return {(uint32_t)low + 1, 0, unit};
  return {(uint32_t)low, head, unit};
}

/* Cursors to the plan; merges and header to the image and from there to it. The warps that cut. */
static __device__ __forceinline__ void quick_cuts(const planner_args &a, unsigned char *image,
                                                  uint32_t total, int cutters, int warp, int lane) {
  __shared__ uint32_t sums[32];
  const struct pkv_plan &h = a.header;
  pkv_plan_merge *merges = (pkv_plan_merge *)(image + h.merges_at);
  const int p = warp * QUICK_CUTS + lane;
  int spare = 0;
  if (a.fewer) {
    pkv_plan_core core = {};
    core.rows = h.rows;
    core.kv_heads = h.kv_heads;
    core.parts = h.parts;
    core.fewer = a.fewer;
    core.unit_cost = h.unit_cost;
    core.segment_cost = h.segment_cost;
    spare = pkv_core_spare(&core, total, ((const uint2 *)(image + h.row_cost_at))[1].x);
  }
  const int used_parts = h.parts - h.parts / 32 * spare;
  quick_cursor c = {0, 0, 0};
  if (p >= used_parts)
    c.row = (uint32_t)h.rows;
  else if (p > 0)
    c = quick_cut(a, image, total, used_parts, a.parts[min(spare, 2)], p);
  const uint32_t key = c.row * (uint32_t)h.kv_heads + c.head;
  const bool same = __shfl_up_sync(0xffffffffu, key, 1) == key;
  const bool last = __shfl_down_sync(0xffffffffu, key, 1) != key;
  const uint32_t unit_before = __shfl_up_sync(0xffffffffu, c.unit, 1);
  const bool mine = lane > 0 && lane < 31 && p < h.parts && c.unit > 0;
  const bool cut = mine && !(same && unit_before == c.unit);
  const bool opens = cut && !(same && unit_before > 0);
  uint32_t sum = scan_warp((cut ? 1u : 0u) + (opens ? 0x10000u : 0u), lane);
  if (lane == 31) sums[warp] = sum;
  cutters_meet(cutters);
  const uint32_t marks = scan_warps(&sum, sums, cutters, warp, lane);
  const int cuts = (int)(sum & 0xffff), segments = (int)(sum >> 16);
  const int merge = c.unit > 0 ? segments - 1 : -1;
  const int slot = c.unit > 0 ? cuts + segments - 1 : -1;
  if ((lane > 0 && lane < 31 && p <= h.parts) || p == 0 || p == h.parts) {
    int2 *out = (int2 *)((unsigned char *)a.plan + h.cursors_at) + p * 3;
    const int length =
        c.row < (uint32_t)h.rows ? ((const int32_t *)(image + h.seq_len_at))[c.row] : 0;
    out[0] = make_int2((int)c.row, (int)c.head);
    out[1] = make_int2((int)c.unit, slot);
    out[2] = make_int2(merge, length);
  }
  if (opens) merges[merge].first_slot = slot - 1;
  const int used = (int)(marks >> 16);
  if (threadIdx.x == 0) {
    struct pkv_plan *to = (struct pkv_plan *)image;
    to->total_cost = total;
    to->merges = used;
    to->slots = (int)(marks & 0xffff) + used;
    to->workspace_bytes = (used * 4 + 63) / 64 * 64 + to->slots * pkv_plan_slot_bytes(&h);
  }
  cutters_meet(cutters);
  const int thread = threadIdx.x, threads = cutters * 32;
  int4 *merges_out = (int4 *)((unsigned char *)a.plan + h.merges_at);
  if (mine && last) {
    const int first = merges[merge].first_slot;
    merges_out[merge] = make_int4((int)c.row, (int)c.head, first, slot - first + 1);
  }
#pragma unroll 1
  for (int i = used + thread; i < h.parts - 1; i += threads)
    merges_out[i] = make_int4(0, 0, 0, 0);
  const int64_t behind = h.cursors_at + (h.parts + 1) * (int64_t)sizeof(pkv_plan_cursor);
  if (thread < (int)(h.merges_at - behind) / 8) /* padding, less than a thread's each */
    ((int2 *)((unsigned char *)a.plan + behind))[thread] = make_int2(0, 0);
  copy_out(a.plan, image, 0, h.seq_len_at, thread, threads);
  copy_out(a.plan, image, h.merges_at + (h.parts - 1) * 16, h.plan_bytes, thread, threads);
}

static __global__ void __launch_bounds__(PLANNER_THREADS)
    planner_quick(const __grid_constant__ planner_args a) {
  extern __shared__ __align__(16) unsigned char image[];
  const struct pkv_plan &h = a.header;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, threads = blockDim.x;
  if (blockIdx.x > 0) {
    pkv_grid_wait();
    pkv_grid_release();
    const int64_t from = (blockIdx.x - 1) * threads + threadIdx.x;
    fill(a.workspace.zeros, a.workspace.zero_bytes, 0, from, (int64_t)(gridDim.x - 1) * threads);
    fill(a.workspace.slots, a.workspace.slot_bytes, PKV_CUDA_EMPTY, from,
         (int64_t)(gridDim.x - 1) * threads);
    return;
  }
  fill(image, h.plan_bytes, 0, threadIdx.x, threads);
  if ((int)threadIdx.x * 32 < h.rows) prefetch_l2(a.seq_len + threadIdx.x * 32);
  __syncthreads();
  if (threadIdx.x < sizeof h / 4)
    ((uint32_t *)image)[threadIdx.x] = ((const uint32_t *)&h)[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    ((struct pkv_plan *)image)->launches = 1;
    *(pkv_plan_launch *)(image + h.launches_at) = {PKV_LAUNCH_FUSED, 0, h.parts, 0};
  }
  pkv_grid_wait();
  pkv_grid_release(); /* what comes next may be launched, and waits for this grid's end */
  const int cutters = h.parts / QUICK_CUTS + 1;
  const uint32_t total =
      h.rows <= threads ? quick_few_rows(a, image, warp, lane) : quick_rows(a, image, warp, lane);
  if (warp < cutters) {
    quick_cuts(a, image, total, cutters, warp, lane);
    return;
  }
  const int thread = threadIdx.x - cutters * 32, helpers = threads - cutters * 32;
  copy_out(a.plan, image, h.seq_len_at, h.cursors_at, thread, helpers);
  fill(a.workspace.counters, a.workspace.counter_count * 4, 0, thread, helpers);
  if (thread == 0) *a.workspace.fault = 0;
}

/* Shared memory for a plan: what the smallest target has, the sums' own left aside. */
static const int image_limit = 88 * 1024;

extern "C" cudaError_t pkv_cuda_planner_prepare(void) {
  const cudaError_t e =
      cudaFuncSetAttribute(planner, cudaFuncAttributeMaxDynamicSharedMemorySize, image_limit);
  if (e != cudaSuccess) return e;
  return cudaFuncSetAttribute(planner_quick, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              image_limit);
}

/* Whether the quick way takes this plan; the threads of a CTA. */
static bool is_quick(int *threads, const struct pkv_plan *h, int32_t max_seq_len) {
  const int64_t units = max_seq_len > 0 ? ((int64_t)max_seq_len + 63) / 64 : 1;
  const double most =
      (double)h->rows * h->kv_heads * (h->segment_cost + (double)units * h->unit_cost);
  const int cutters = h->parts / QUICK_CUTS + 1;
  *threads = h->rows <= 512 ? 512 : PLANNER_THREADS;
  return h->rows > 0 && h->kv_heads < 1 << 20 && !(h->flags & PKV_PLAN_BATCH_INVARIANT) &&
         h->unit_tokens == 64 && most < 0x7fffffff &&
         (double)units * 2 * h->unit_cost < 0x7fffffff && cutters < *threads / 32;
}

extern "C" cudaError_t pkv_cuda_launch_planner(const struct pkv_plan *header, void *plan,
                                               const int32_t *seq_len, int32_t max_seq_len,
                                               const pkv_cuda_workspace *workspace, int32_t sms,
                                               int32_t dependent, cudaStream_t stream) {
  const bool in_shared = header->rows <= PLANNER_ROWS && header->plan_bytes <= image_limit;
  const pkv_plan_core core = pkv_plan_core_of(header);
  planner_args args = {*header,   (struct pkv_plan *)plan,  seq_len, max_seq_len, *workspace,
                       in_shared, (uint32_t)core.empty_cost};
  void *arguments[] = {&args};
  int threads;
  const bool quick = is_quick(&threads, header, max_seq_len) && in_shared;
  if (quick) {
    static const int spare[3] = {0, 1, 5};
    for (int i = 0; i < 3; i++)
      args.parts[i] = divisor_of((uint32_t)(header->parts - header->parts / 32 * spare[i]));
    args.fewer = core.fewer;
    args.two_unit = divisor_of(2 * header->unit_cost);
  }
  return pkv_cuda_launch_kernel(
      quick ? (const void *)planner_quick : (const void *)planner,
      dim3(workspace->slots ? (unsigned)sms : 1), (unsigned)(quick ? threads : PLANNER_THREADS),
      in_shared ? (size_t)header->plan_bytes : 0, dependent, arguments, stream);
}
