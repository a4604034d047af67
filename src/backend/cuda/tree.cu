/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device's planner of `shared`: the bytes of pkv_plan_build_shared from tables and lengths that
 * only the device knows. Two or three kernels in the stream, each beginning while the one before it
 * ends (sm_90 on); no launch depends on lengths. The first writes the plan's headers and zeros, and
 * zeroes counters and the fault word; it runs beside the planner of `balanced`, where that is ahead
 * of it: it has waited for all that was before.
 *   keys     only where units' pages do not do (windows, pages below 16, more than 512 rows, or
 *            2,048 chained ones, no planner ahead): a block of 256 a row: sums of mixed page ids at
 *            each unit's end, transposed so that those of all rows at one depth are neighbours.
 *            Reads the table once (rows x pages x 4 bytes).
 *   levels   a block a unit, up to 264: a hash table in shared memory (41 KB at 1,024 rows) gives
 *            the first row with each key. Reads the unit's ids and the next's, or keys, then ids to
 *            confirm them. Beyond 2,048 rows `leaders` instead, a block a row with a 4-ary search
 *            over depth.
 *   plan     one block of 512, of 1,024 beyond 512 rows: ranks, nodes, parts in shared memory (203
 *            KB at 1,024 rows and 132 parts; beyond what the device has, in global memory). Most
 *            batches go the quick way of tree_quick.cuh; what follows here is for all others.
 * The phases are those of plan/tree_block_impl.h; here is what a block is.
 */
#include "backend/cuda/cuda_tree.h"
#include "backend/cuda/launch_kernel.cuh"
#include "backend/cuda/mma.cuh"

#define TREE_FN     static __device__ __forceinline__
#define TREE_INLINE static __device__ __forceinline__
#define TREE_FOR(i, count)                                                                         \
  PKV_ROLLED for (int32_t i = (int32_t)threadIdx.x, count_##i = (count); i < count_##i;            \
                  i += (int32_t)blockDim.x)
#define TREE_FOR_LAST(i, count)                                                                    \
  PKV_ROLLED for (int32_t i = (int32_t)(blockDim.x - 1 - threadIdx.x), count_##i = (count);        \
                  i < count_##i; i += (int32_t)blockDim.x)
#define TREE_ONE     (threadIdx.x == 0)
#define TREE_SYNC()  __syncthreads()
#define TREE_UNROLL  _Pragma("unroll")
#define TREE_ABREAST _Pragma("unroll 4")
#define TREE_SELDOM  static __device__ __noinline__

#define ALL_LANES 0xffffffffu

/* Every thread's value by way of its warp's: combine is a warp's reduction, neutral its start. */
template <typename T, typename F>
static __device__ __forceinline__ T tree_reduce(T x, T neutral, F combine) {
  __shared__ T warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = blockDim.x / 32;
  x = combine(x);
  if (lane == 0) warps[warp] = x;
  __syncthreads();
  x = combine(lane < count ? warps[lane] : neutral);
  __syncthreads();
  return x;
}

static __device__ __noinline__ int tree_any(int x) {
  return tree_reduce(x, 0, [](int y) { return (int)__reduce_or_sync(ALL_LANES, (unsigned)y); });
}
static __device__ __noinline__ int32_t tree_least32(int32_t x) {
  return tree_reduce(x, INT32_MAX, [](int32_t y) { return __reduce_min_sync(ALL_LANES, y); });
}
static __device__ __noinline__ int64_t tree_least64(int64_t x) {
  return tree_reduce(x, (int64_t)INT64_MAX, [](int64_t y) {
    PKV_ROLLED for (int step = 16; step > 0; step /= 2) {
      const int64_t other = __shfl_xor_sync(ALL_LANES, y, step);
      if (other < y) y = other;
    }
    return y;
  });
}

static __device__ __noinline__ int64_t tree_sum64(int64_t x) {
  return tree_reduce(x, (int64_t)0, [](int64_t y) {
    PKV_ROLLED for (int step = 16; step > 0; step /= 2) y += __shfl_xor_sync(ALL_LANES, y, step);
    return y;
  });
}

/* An array to be summed up, or, from a literal 0, none: all of that is left out. */
template <typename P> struct tree_lane {
  static __device__ __forceinline__ int at(P, int32_t) {
    return 0;
  }
  static __device__ __forceinline__ int up(int x, int) {
    return x;
  }
  static __device__ __forceinline__ int put(P, int32_t, int x) {
    return x;
  }
  typedef int sum;
};
template <typename T, typename U> struct tree_lane_of {
  static __device__ __forceinline__ U at(const T *x, int32_t i) {
    return (U)x[i];
  }
  static __device__ __forceinline__ U up(U x, int step) {
    return __shfl_up_sync(ALL_LANES, x, step);
  }
  static __device__ __forceinline__ U put(T *x, int32_t i, U before) {
    before += (U)x[i];
    x[i] = (T)before;
    return before;
  }
  typedef U sum;
};
template <> struct tree_lane<int32_t *> : tree_lane_of<int32_t, unsigned> {};
template <> struct tree_lane<int64_t *> : tree_lane_of<int64_t, unsigned long long> {};

template <typename A, typename B, typename C, typename D, typename E> struct tree_sums {
  typename tree_lane<A>::sum a;
  typename tree_lane<B>::sum b;
  typename tree_lane<C>::sum c;
  typename tree_lane<D>::sum d;
  typename tree_lane<E>::sum e;
  __device__ __forceinline__ tree_sums plus(const tree_sums &x) const {
    return {a + x.a, b + x.b, c + x.c, d + x.d, e + x.e};
  }
  __device__ __forceinline__ tree_sums minus(const tree_sums &x) const {
    return {a - x.a, b - x.b, c - x.c, d - x.d, e - x.e};
  }
  __device__ __forceinline__ tree_sums up(int step) const {
    return {tree_lane<A>::up(a, step), tree_lane<B>::up(b, step), tree_lane<C>::up(c, step),
            tree_lane<D>::up(d, step), tree_lane<E>::up(e, step)};
  }
  /* Inclusive sums over the lanes. */
  __device__ __forceinline__ tree_sums upto(int lane) const {
    tree_sums x = *this;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const tree_sums other = x.up(step);
      if (lane >= step) x = x.plus(other);
    }
    return x;
  }
};

/* Threads take neighbouring runs; sums wrap as unsigned ones do. Warps past the end do nothing. */
template <typename A, typename B, typename C, typename D, typename E>
static __device__ __noinline__ void tree_scan(A a, B b, C c, D d, E e, int32_t n) {
  typedef tree_sums<A, B, C, D, E> sums;
  __shared__ sums warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  const int32_t each = (n + (int32_t)blockDim.x - 1) / (int32_t)blockDim.x;
  const int32_t from = min(n, (int32_t)threadIdx.x * each), to = min(n, from + each);
  const bool works = warp * 32 * each < n;
  sums at = {0, 0, 0, 0, 0};
  if (works) {
    sums sum = {0, 0, 0, 0, 0};
    PKV_ROLLED for (int32_t i = from; i < to; i++) sum =
        sum.plus({tree_lane<A>::at(a, i), tree_lane<B>::at(b, i), tree_lane<C>::at(c, i),
                  tree_lane<D>::at(d, i), tree_lane<E>::at(e, i)});
    const sums upto = sum.upto(lane);
    if (lane == 31) warps[warp] = upto;
    at = upto.minus(sum);
  }
  __syncthreads();
  if (works) {
#pragma unroll 4
    for (int before = 0; before < warp; before++)
      at = at.plus(warps[before]);
    PKV_ROLLED for (int32_t i = from; i < to; i++) {
      at.a = tree_lane<A>::put(a, i, at.a);
      at.b = tree_lane<B>::put(b, i, at.b);
      at.c = tree_lane<C>::put(c, i, at.c);
      at.d = tree_lane<D>::put(d, i, at.d);
      at.e = tree_lane<E>::put(e, i, at.e);
    }
  }
  __syncthreads();
}

static __device__ void tree_sort(uint64_t *keys, int32_t n);

static __device__ __forceinline__ void tree_raise(uint64_t *to, uint64_t value) {
  atomicMax((unsigned long long *)to, (unsigned long long)value);
}
/* By whole warps: one lane of each key goes to the table. */
static __device__ __forceinline__ int32_t tree_claim(uint64_t *keys, int32_t *first, int32_t slots,
                                                     uint64_t key, int32_t row) {
  const unsigned peers = __match_any_sync(ALL_LANES, (unsigned long long)key);
  const int lane = threadIdx.x % 32, head = __ffs((int)peers) - 1;
  int32_t slot = 0;
  if (lane == head && row != INT32_MAX) {
    slot = (int32_t)((key ^ key >> 32) * 0x9e3779b1u >> 7) & (slots - 1);
    for (;;) {
      unsigned long long there = ((volatile unsigned long long *)keys)[slot];
      if (there == ~0ull)
        there = atomicCAS((unsigned long long *)&keys[slot], ~0ull, (unsigned long long)key);
      if (there == ~0ull || there == key) break;
      slot = (slot + 1) & (slots - 1);
    }
    atomicMin(&first[slot], row);
  }
  return __shfl_sync(ALL_LANES, slot, head);
}

#include "plan/tree_block_impl.h"

/* So many threads of a block, whole warps, meet. */
#define TREE_MEET(count) asm volatile("bar.sync 1, %0;\n" ::"r"(count) : "memory")

#include "backend/cuda/tree_quick.cuh"

/* Where a key of a run comes when up to eight runs from `first` on are merged: behind all that are
   smaller. All runs are searched side by side. */
static __device__ __forceinline__ uint32_t tree_merge_place(const uint64_t *keys, uint32_t n,
                                                            uint32_t run, uint32_t at,
                                                            uint64_t key) {
  const uint32_t first = at & ~(8 * run - 1), runs = min(8u, (n - first) / run);
  uint32_t smaller[8] = {}, place = first;
  PKV_ROLLED for (uint32_t step = run / 2; step > 0; step /= 2) {
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
      if (i < runs && keys[first + i * run + smaller[i] + step - 1] < key) smaller[i] += step;
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; i++)
    if (i < runs) place += smaller[i] + (keys[first + i * run + smaller[i]] < key);
  return place;
}

/* KEYS keys a thread, blockDim apart: warps sort runs of 32 in registers, then runs are merged.
   All keys differ. */
template <int KEYS> static __device__ void tree_sort_runs(uint64_t *keys, int32_t n) {
  const uint32_t count = (uint32_t)n, threads = blockDim.x, lane = threadIdx.x % 32;
  uint64_t key[KEYS];
  uint32_t at[KEYS];
  for (int q = 0; q < KEYS; q++) {
    at[q] = threadIdx.x + q * threads;
    key[q] = at[q] < count ? keys[at[q]] : ~0ull;
  }
  PKV_ROLLED for (uint32_t k = 2; k <= 32; k *= 2) {
    PKV_ROLLED for (uint32_t j = k / 2; j > 0; j /= 2) {
      const bool smaller = ((lane & j) == 0) == ((lane & k) == 0);
      for (int q = 0; q < KEYS; q++) {
        const uint64_t other = __shfl_xor_sync(ALL_LANES, (unsigned long long)key[q], j);
        if ((other < key[q]) == smaller) key[q] = other;
      }
    }
  }
  for (int q = 0; q < KEYS; q++)
    if (at[q] < count) keys[at[q]] = key[q];
  __syncthreads();
  PKV_ROLLED for (uint32_t run = 32; run < count; run *= 8) {
    for (int q = 0; q < KEYS; q++)
      if (at[q] < count) at[q] = tree_merge_place(keys, count, run, at[q], key[q]);
    __syncthreads();
    for (int q = 0; q < KEYS; q++)
      if (at[q] < count) keys[at[q]] = key[q];
    __syncthreads();
  }
}

static __device__ void tree_sort(uint64_t *keys, int32_t n) {
  __syncthreads();
  if ((uint32_t)n <= blockDim.x) {
    tree_sort_runs<1>(keys, n);
    return;
  }
  if ((uint32_t)n <= 2 * blockDim.x) {
    tree_sort_runs<2>(keys, n);
    return;
  }
  PKV_ROLLED for (uint32_t k = 2; k <= (uint32_t)n; k *= 2) {
    PKV_ROLLED for (uint32_t j = k / 2; j > 0; j /= 2) {
      TREE_FOR(i, n)
        pkv_tree_exchange(keys, (uint32_t)i, j, k);
      __syncthreads();
    }
  }
}

#define ROW_THREADS  256
#define PLAN_THREADS 1024 /* beyond half as many rows; else half of them */
#define ROW_UNITS    1024 /* whose keys a block sums up at a time */
#define LOCAL_PAGE   16   /* least page whose ids a unit's block reads by itself ... */
#define LOCAL_ROWS   512  /* ... and of so many rows at most: beyond, keys are made once */

struct tree_zeros {
  uint64_t *plan;
  int64_t plan_words; /* of 8 bytes */
  uint32_t *counters;
  int64_t counter_count;
  int32_t *fault;
};

/* Headers and zeros, by all threads of the grid that comes first. */
static __device__ __forceinline__ void tree_blank(const pkv_tree_input &in,
                                                  const tree_zeros &zeros) {
  const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t threads = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = thread; i < zeros.plan_words; i += threads)
    zeros.plan[i] = tree_blank_word(&in, i);
  for (int64_t i = thread; i < zeros.counter_count; i += threads)
    zeros.counters[i] = 0;
  if (thread == 0) *zeros.fault = 0;
}

static __global__ void __launch_bounds__(ROW_THREADS)
    tree_keys(const __grid_constant__ pkv_tree_input in, const __grid_constant__ tree_zeros zeros) {
  __shared__ int64_t sums[ROW_UNITS];
  const int64_t thread = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
  pkv_grid_release();
  tree_blank(in, zeros);
  for (int64_t i = thread; i <= in.header.rows; i += (int64_t)gridDim.x * ROW_THREADS)
    in.found[i] = 0;
  if ((int32_t)blockIdx.x < in.header.rows)
    tree_row_keys(&in, (int32_t)blockIdx.x, sums, ROW_UNITS);
  pkv_grid_wait(); /* the planner beside it: who waits for this kernel waits for both */
}

#define PROBES 3

static __global__ void __launch_bounds__(ROW_THREADS)
    tree_leaders(const __grid_constant__ pkv_tree_input in) {
  pkv_grid_release();
  pkv_grid_wait();
  tree_row_leader(&in, (int32_t)blockIdx.x, PROBES);
}

#define LEVEL_THREADS      512
#define LEVEL_BLOCKS       264
#define LEAST_LEVEL_BLOCKS 16 /* they also write zeros */

static __global__ void __launch_bounds__(LEVEL_THREADS)
    tree_levels(const __grid_constant__ pkv_tree_input in,
                const __grid_constant__ tree_zeros zeros) {
  extern __shared__ __align__(16) unsigned char level_memory[];
  const pkv_tree_core t = tree_core_of(&in);
  tree_level l;
  pkv_grid_release();
  const int32_t most = tree_level_init(&l, &in, &t, level_memory);
  tree_level_clear(&l);
  __syncthreads();
  if (in.local)
    tree_blank(in, zeros);
  else
    pkv_grid_wait();
  bool waited = !in.local; /* for what is found to be zero */
  for (int32_t unit = blockIdx.x; unit < most; unit += gridDim.x) {
    tree_level_enter(&l, &in, &t, unit);
    if (!waited) pkv_grid_wait();
    waited = true;
    __syncthreads();
    tree_level_raise(&l, &in, &t, unit);
    __syncthreads();
    if (unit + gridDim.x < most) tree_level_clear(&l);
    __syncthreads();
  }
  if (!waited) pkv_grid_wait();
}

/* SHARED: the desk is in shared memory, else at `desk`. */
template <bool SHARED>
static __global__ void __launch_bounds__(PLAN_THREADS)
    tree_plan(const __grid_constant__ pkv_tree_input in, void *desk) {
  extern __shared__ __align__(16) unsigned char shared_desk[];
  const pkv_tree_core t = tree_core_of(&in);
  pkv_tree_desk d;
  pkv_grid_release();
  pkv_tree_desk_init(&d, SHARED ? (void *)shared_desk : desk, &in, &t.core);
  tree_block_begin(&in, &t, &d);
  pkv_grid_wait();
  tree_block_plan(&in, &t, &d);
}

static __global__ void __launch_bounds__(PLAN_THREADS)
    tree_plan_quick(const __grid_constant__ pkv_tree_input in, tree_quick_bits bits) {
  extern __shared__ __align__(16) unsigned char shared_desk[];
  __shared__ tree_quick_memory memory;
  const pkv_tree_core t = tree_core_of(&in);
  pkv_tree_desk d;
  pkv_grid_release();
  pkv_tree_desk_init(&d, (void *)shared_desk, &in, &t.core);
  tree_block_begin(&in, &t, &d);
  pkv_grid_wait();
  quick_plan(&in, &t, &d, &memory, bits);
}

extern "C" cudaError_t pkv_cuda_tree_prepare(int32_t *desk_bytes, int32_t *dependent) {
  int device = 0, room = 0, major = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  room -= 8192; /* what the kernels have beside it */
  const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (e == cudaSuccess) e = cudaFuncSetAttribute(tree_plan<true>, limit, room);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(tree_plan_quick, limit, room);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(tree_levels, limit, room);
  *desk_bytes = room;
  *dependent = major >= 9;
  return e;
}

/* Each row's leader. dependent: on the launch ahead. */
static cudaError_t launch_search(const pkv_cuda_tree_params *p, void **arguments, int32_t rows,
                                 int32_t units, bool dependent, cudaStream_t stream) {
  const int64_t bytes = pkv_tree_level_bytes(rows);
  if (rows > PKV_TREE_LEVEL_ROWS || bytes > p->desk_bytes)
    return pkv_cuda_launch_kernel((const void *)tree_leaders, dim3((unsigned)rows), ROW_THREADS, 0,
                                  dependent, arguments, stream);
  const unsigned blocks = units < LEAST_LEVEL_BLOCKS ? LEAST_LEVEL_BLOCKS
                          : units < LEVEL_BLOCKS     ? (unsigned)units
                                                     : LEVEL_BLOCKS;
  return pkv_cuda_launch_kernel((const void *)tree_levels, dim3(blocks),
                                rows <= LEVEL_THREADS / 2 ? LEVEL_THREADS / 2 : LEVEL_THREADS,
                                (size_t)bytes, dependent, arguments, stream);
}

static int32_t bits_of(uint32_t most) {
  return most == 0 ? 0 : 32 - __builtin_clz(most);
}

/* Whether the quick way takes this plan: what a key holds, and threads. */
static bool is_quick(tree_quick_bits *bits, unsigned *threads, const pkv_tree_input *in) {
  const int32_t rows = in->header.rows, parts = in->header.parts;
  const int64_t cursors = quick_private_thread(parts) + 2 * (int64_t)parts + 1;
  const int64_t units = ((int64_t)in->max_seq_len + 63) / 64;
  if (rows < 1 || rows > QUICK_ROWS || cursors > QUICK_ROWS || in->header.window > 0 ||
      (in->header.flags & PKV_PLAN_BATCH_INVARIANT) || rows * units * PKV_TREE_ENOUGH > INT32_MAX)
    return false;
  bits->row = bits_of((uint32_t)rows - 1);
  bits->units = bits_of((uint32_t)in->max_units);
  *threads = rows <= QUICK_ROWS / 2 && cursors <= QUICK_ROWS / 2 ? QUICK_ROWS / 2 : QUICK_ROWS;
  return 2 * bits->row + bits->units <= 32 && bits->row + bits->units < 32;
}

extern "C" cudaError_t pkv_cuda_launch_tree(const pkv_cuda_tree_params *p, cudaStream_t stream) {
  pkv_tree_input in = p->input;
  const int32_t rows = in.header.rows;
  void *desk = pkv_tree_memory_init(&in, p->memory, p->most_units);
  const tree_zeros zeros = {(uint64_t *)in.plan, in.header.plan_bytes / 8, p->counters,
                            p->counter_count, p->fault};
  const pkv_plan_core core = pkv_plan_core_of(&in.header);
  const int64_t bytes = pkv_tree_desk_bytes(&core);
  const bool fits = bytes <= p->desk_bytes;
  void *of_keys[] = {&in, (void *)&zeros};
  cudaError_t e = cudaSuccess;
  in.local = p->zeroed && rows > 0 && in.header.window == 0 &&
             (in.chained ? rows <= PKV_TREE_LEVEL_ROWS
                         : rows <= LOCAL_ROWS && in.header.page_tokens >= LOCAL_PAGE) &&
             pkv_tree_level_bytes(rows) <= p->desk_bytes;
  if (!in.local)
    e = pkv_cuda_launch_kernel((const void *)tree_keys, dim3(rows > 0 ? (unsigned)rows : 1u),
                               ROW_THREADS, 0, p->beside_planner, of_keys, stream);
  if (e == cudaSuccess && rows > 0)
    e = launch_search(p, of_keys, rows, in.max_units, in.local ? p->beside_planner : p->dependent,
                      stream);
  tree_quick_bits bits = {0, 0};
  unsigned threads;
  if (fits && is_quick(&bits, &threads, &in)) {
    void *of_quick[] = {&in, &bits};
    if (e == cudaSuccess)
      e = pkv_cuda_launch_kernel((const void *)tree_plan_quick, dim3(1), threads, (size_t)bytes,
                                 p->dependent, of_quick, stream);
    return e;
  }
  void *of_plan[] = {&in, &desk};
  if (e == cudaSuccess)
    e = pkv_cuda_launch_kernel(fits ? (const void *)tree_plan<true>
                                    : (const void *)tree_plan<false>,
                               dim3(1), rows > PLAN_THREADS / 2 ? PLAN_THREADS : PLAN_THREADS / 2,
                               fits ? (size_t)bytes : 0, p->dependent, of_plan, stream);
  return e;
}
