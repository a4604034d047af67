/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Paged decode attention.
 *
 * pkv_cuda_decode: one persistent launch over the parts of a `balanced` plan. Grid (parts, tiles
 * of 16
 * query rows), 4 warps a CTA. A step is 64 tokens of one (row, KV head); each warp takes 16 of them
 * with its own copy ring, softmax statistics and accumulator, so that the main loop has no
 * barrier: a
 * warp waits for its own copies only. The group's query rows are the M side of m16n8k16. At the
 * end of
 * a piece the warps' states are folded in warp order; of a cut segment the last piece to arrive
 * folds
 * all, in slot order.
 *
 * Copies run ahead across segments: the ring is refilled from a second walk some steps in front of
 * the
 * arithmetic, and the page ids of the step after that are already on their way, so that a short row
 * costs no bubble.
 *
 * Shared memory: 4 warps x stages x (K and V of 16 tokens), swizzled against bank conflicts, plus
 * the
 * fold area. Bytes read a token and KV head: 2 * head_dim * element bytes.
 *
 * pkv_cuda_decode_items: the seed's scheduling on the same slices: one CTA a task, a state a task.
 */
#ifndef PKV_CUDA_DECODE_CUH
#define PKV_CUDA_DECODE_CUH

#include "backend/cuda/fold.cuh"

template <typename KV, int HD> struct pkv_decode_config {
  static constexpr int slice_bytes = PKV_SLICE_TOKENS * KV::chunks * 16;
  static constexpr int ctas = HD * KV::bytes > 256 ? 1 : 2; /* an SM */
  static constexpr int ring_limit = (ctas == 1 ? 200 : 98) * 1024 / PKV_WARPS;
  static constexpr int stages_that_fit = ring_limit / (2 * slice_bytes);
  static constexpr int stages = stages_that_fit > 6 ? 6 : stages_that_fit;
  static constexpr int ring_bytes = stages * 2 * slice_bytes;
  static constexpr int shared_bytes =
      PKV_WARPS * ring_bytes + pkv_fold<HD>::bytes + pkv_fold<HD>::stats_bytes;
};

/* Announces `units` arrivals at a merge; true for the CTA that completes it, in all threads. */
static __device__ __forceinline__ bool pkv_arrive(uint32_t *counter, int units, int count,
                                                  int *shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const bool last = atomicAdd(counter, (uint32_t)units) + (uint32_t)units == (uint32_t)count;
    if (last) *counter = 0; /* ready for the next launch */
    __threadfence();
    *shared = last;
  }
  __syncthreads();
  return *shared;
}

/* The ring of one warp and the walk that fills it. */
template <typename KV, int HD> struct pkv_feed {
  typedef pkv_decode_config<KV, HD> C;
  pkv_walk walk;
  int page; /* of the step that `walk` stands at */
  int refill;
  uint32_t ring;

  __device__ __forceinline__ void skip(const pkv_cuda_decode_params &p, const pkv_work &work) {
    while (walk.row >= 0 && walk.at >= walk.end)
      pkv_walk_next(walk, p, work);
  }
  __device__ __forceinline__ void start(const pkv_walk &from, const pkv_cuda_decode_params &p,
                                        const pkv_work &work, uint32_t memory, int warp, int lane) {
    walk = from;
    skip(p, work);
    page = pkv_fetch_page(walk, p, warp, lane);
    refill = 0;
    ring = memory;
  }
  /* Issues the copies of the next step, and the page ids of the one after. */
  __device__ __forceinline__ void push(const pkv_cuda_decode_params &p, const pkv_work &work,
                                       int warp, int lane) {
    const pkv_walk at = walk;
    const int at_page = page;
    if (walk.row >= 0) {
      walk.at += PKV_STEP_TOKENS;
      if (walk.at >= walk.end) {
        skip(p, work);
        prefetch_q(p, lane);
      }
      page = pkv_fetch_page(walk, p, warp, lane);
    }
    pkv_copy_slice<KV>(at, p, at_page, ring + (uint32_t)(refill * 2 * C::slice_bytes), warp, lane);
    refill = refill + 1 == C::stages ? 0 : refill + 1;
  }
  /* Touches the query rows of the segment ahead, so that the arithmetic finds them in L1. */
  __device__ __forceinline__ void prefetch_q(const pkv_cuda_decode_params &p, int lane) {
    if (walk.row < 0) return;
    const int bytes = p.q_dtype == PKV_DTYPE_F32 ? 4 : 2,
              lines = (p.cache.head_dim * bytes + 127) / 128;
    for (int i = lane; i < min(PKV_CUDA_TILE_ROWS, p.q_len * p.group) * lines; i += 32) {
      const int m = i / lines, t = m / p.group, g = m - t * p.group;
      const char *at = (const char *)p.q +
                       bytes * (((int64_t)walk.row * p.q_len + t) * p.q_token_stride +
                                (int64_t)(walk.head * p.group + g) * p.q_head_stride) +
                       (i - m * lines) * 128;
      pkv_prefetch_l1(at);
    }
  }
};

/* Attends one chunk or piece: steps from w.at to `until`. */
template <typename KV, int HD>
static __device__ __forceinline__ void
pkv_attend_until(pkv_state<HD> &s, const uint32_t q[HD / 16][4], pkv_walk &w, int until,
                 pkv_feed<KV, HD> &feed, int &slot, const pkv_cuda_decode_params &p,
                 const pkv_work &work, float scale, int tile, int warp, int lane) {
  typedef pkv_decode_config<KV, HD> C;
  for (; w.at < until; w.at += PKV_STEP_TOKENS) {
    feed.push(p, work, warp, lane);
    pkv_copy_wait<C::stages - 1>();
    __syncwarp();
    pkv_slice_attend<KV, HD>(s, q, w, p, scale, feed.ring + (uint32_t)(slot * 2 * C::slice_bytes),
                             tile, warp, lane);
    __syncwarp();
    slot = slot + 1 == C::stages ? 0 : slot + 1;
  }
}

template <typename K, int HD, bool INVARIANT>
static __device__ __forceinline__ void pkv_decode_part(const pkv_cuda_decode_params &p) {
  typedef typename K::template of<HD> KV;
  typedef pkv_decode_config<KV, HD> C;
  typedef pkv_fold<HD> F;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ int last_arriver;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, tile = blockIdx.y;
  float *fold = (float *)(memory + PKV_WARPS * C::ring_bytes);
  float *stats = fold + F::bytes / 4;

  pkv_work work;
  work.begin = p.cursors[blockIdx.x];
  work.end = p.cursors[blockIdx.x + 1];
  const int rows = min(PKV_CUDA_TILE_ROWS, p.q_len * p.group - tile * PKV_CUDA_TILE_ROWS);

  pkv_walk now;
  pkv_feed<KV, HD> feed;
  pkv_walk_start(now, p, work);
  feed.start(now, p, work, (uint32_t)__cvta_generic_to_shared(memory + warp * C::ring_bytes), warp,
             lane);
  /* Before this line only plan and table are read: where launches overlap, the kernel before may
  still be
     writing q and the
     newest page. */
  pkv_grid_wait();
  pkv_grid_release();
#pragma unroll
  for (int i = 0; i < C::stages - 1; ++i)
    feed.push(p, work, warp, lane);

  int slot = 0;
  while (now.row >= 0) {
    const bool starts_cut =
        now.row == work.begin.row && now.head == work.begin.kv_head && work.begin.unit > 0;
    const bool ends_cut = now.row == work.end.row && now.head == work.end.kv_head;
    const bool whole = !starts_cut && !ends_cut;
    const int merge = starts_cut ? work.begin.merge : work.end.merge;
    int id = starts_cut ? work.begin.slot : INVARIANT ? work.end.slot : work.end.slot - 1;
    if (INVARIANT && starts_cut) id += work.begin.unit;

    uint32_t q[HD / 16][4];
    pkv_load_q<KV, HD>(q, p, now.row, now.head, tile, lane);
    float scale = p.scale * PKV_LOG2_E;
    if (p.cache.k_head_scale) scale *= p.cache.k_head_scale[now.head];

    pkv_item run[INVARIANT ? F::turns : 1][F::items];
    int units = 0;
    do {
      pkv_state<HD> s;
      pkv_state_reset(s);
      const int until =
          INVARIANT ? min(now.end, (now.at / p.unit_tokens + 1) * p.unit_tokens) : now.end;
      pkv_attend_until<KV, HD>(s, q, now, until, feed, slot, p, work, scale, tile, warp, lane);
      const bool done = !INVARIANT || now.at >= now.end;
      pkv_fold_warps<KV, HD>(
          s, rows, fold, stats, warp, lane,
          [&](int turn, int n, int m, int d, const pkv_item &item) {
            if (!whole) {
              pkv_item_to_slot<HD>(pkv_slot<HD>(p, tile, id + units), m, d, item);
              return;
            }
            pkv_item sum = item;
            if (INVARIANT) {
              if (units > 0) {
                sum = run[turn][n];
                pkv_item_fold(sum, item);
              }
              run[turn][n] = sum;
            }
            if (done) pkv_item_store(p, now.row, now.head, tile * PKV_CUDA_TILE_ROWS + m, d, sum);
          });
      ++units;
    } while (INVARIANT && now.at < now.end);

    if (!whole) {
      const pkv_plan_merge to = p.merges[merge];
      if (pkv_arrive(p.counters + tile * p.counters_stride + merge, INVARIANT ? units : 1, to.count,
                     &last_arriver))
        pkv_fold_slots<HD, INVARIANT>(p, now.row, now.head, tile, to.first_slot, to.count, 1, rows);
    }
    pkv_walk_next(now, p, work);
  }
  pkv_copy_wait<0>();
}

template <typename K, int HD>
__global__ void __launch_bounds__(PKV_THREADS,
                                  pkv_decode_config<typename K::template of<HD>, HD>::ctas)
    pkv_cuda_decode(const __grid_constant__ pkv_cuda_decode_params p) {
  pkv_decode_part<K, HD, false>(p);
}

template <typename K, int HD>
__global__ void __launch_bounds__(PKV_THREADS,
                                  pkv_decode_config<typename K::template of<HD>, HD>::ctas)
    pkv_cuda_decode_invariant(const __grid_constant__ pkv_cuda_decode_params p) {
  pkv_decode_part<K, HD, true>(p);
}

/* One task of the seed's routes: grid (items, tiles of 16 query rows). */
template <typename K, int HD>
__global__ void __launch_bounds__(PKV_THREADS,
                                  pkv_decode_config<typename K::template of<HD>, HD>::ctas)
    pkv_cuda_decode_items(const __grid_constant__ pkv_cuda_decode_params p) {
  typedef typename K::template of<HD> KV;
  typedef pkv_decode_config<KV, HD> C;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ int last_arriver;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, tile = blockIdx.y;
  float *fold = (float *)(memory + PKV_WARPS * C::ring_bytes);
  float *stats = fold + pkv_fold<HD>::bytes / 4;
  const pkv_plan_item item = p.items[blockIdx.x];
  const int rows = min(PKV_CUDA_TILE_ROWS, p.q_len * p.group - tile * PKV_CUDA_TILE_ROWS);

  /* One piece: no other follows. Units of items are counted from the row's start. */
  pkv_work work;
  work.begin.row = work.end.row = item.row;
  work.begin.kv_head = work.end.kv_head = item.kv_head;
  work.begin.unit = work.end.unit = 0;
  pkv_walk now;
  now.row = item.row;
  now.head = item.kv_head;
  now.len = p.seq_len[item.row];
  now.at = item.unit_begin * p.unit_tokens;
  now.end = item.unit_end * p.unit_tokens;
  /* a unit past the row's last is padding, which is read; a unit that holds the row's end is not */
  if (now.end - p.unit_tokens < now.len) now.end = min(now.end, now.len);
  if (now.len == 0) now.end = now.at;

  pkv_feed<KV, HD> feed;
  feed.start(now, p, work, (uint32_t)__cvta_generic_to_shared(memory + warp * C::ring_bytes), warp,
             lane);
  pkv_grid_wait();
  pkv_grid_release();
#pragma unroll
  for (int i = 0; i < C::stages - 1; ++i)
    feed.push(p, work, warp, lane);
  uint32_t q[HD / 16][4];
  pkv_load_q<KV, HD>(q, p, now.row, now.head, tile, lane);
  float scale = p.scale * PKV_LOG2_E;
  if (p.cache.k_head_scale) scale *= p.cache.k_head_scale[now.head];
  pkv_state<HD> s;
  pkv_state_reset(s);
  int slot = 0;
  pkv_attend_until<KV, HD>(s, q, now, now.end, feed, slot, p, work, scale, tile, warp, lane);
  const int id = (p.split_first[item.row] + item.split) * p.cache.kv_heads + item.kv_head;
  pkv_fold_warps<KV, HD>(s, rows, fold, stats, warp, lane,
                         [&](int, int, int m, int d, const pkv_item &x) {
                           pkv_item_to_slot<HD>(pkv_slot<HD>(p, tile, id), m, d, x);
                         });
  pkv_copy_wait<0>();
  if (!p.fused_merge) return;
  const int count = p.split_first[item.row + 1] - p.split_first[item.row];
  if (pkv_arrive(p.counters + tile * p.counters_stride + item.row * p.cache.kv_heads + item.kv_head,
                 1, count, &last_arriver))
    pkv_fold_slots<HD, false>(p, item.row, item.kv_head, tile,
                              p.split_first[item.row] * p.cache.kv_heads + item.kv_head, count,
                              p.cache.kv_heads, rows);
}

/* The seed's second launch: grid (merges, tiles of 16 query rows). */
template <int HD>
__global__ void __launch_bounds__(PKV_THREADS)
    pkv_cuda_merge(const __grid_constant__ pkv_cuda_decode_params p) {
  pkv_grid_wait();
  pkv_grid_release();
  const pkv_plan_merge to = p.merges[blockIdx.x];
  const int rows =
      min(PKV_CUDA_TILE_ROWS, p.q_len * p.group - (int)blockIdx.y * PKV_CUDA_TILE_ROWS);
  if (to.count > 0 && p.fused_merge) return; /* its last task has merged it */
  if (to.count > 0) {
    pkv_fold_slots<HD, false>(p, to.row, to.kv_head, blockIdx.y, to.first_slot, to.count,
                              p.slot_stride, rows);
    return;
  }
  const pkv_item none = {-CUDART_INF_F, 0.0f, make_float4(0, 0, 0, 0)};
  for (int i = threadIdx.x; i < rows * (HD / 4); i += PKV_THREADS)
    pkv_item_store(p, to.row, to.kv_head, blockIdx.y * PKV_CUDA_TILE_ROWS + i / (HD / 4),
                   i % (HD / 4) * 4, none);
}

#endif
