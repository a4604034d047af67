/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of up to 16 rows with weights in 16 bits, at the rate at which the weights are read.
 *
 * Mapping: w is on the M side of a warpgroup's products, x on the N side. A tile is 64 rows of w, a
 * unit 64 elements of a tile; with a gate 8 of each 16 rows are of gate and 8 the rows of up that
 * belong to them, so that a thread has both sums. One warp copies units of w and x through a ring,
 * a warpgroup multiplies them. w does not depend on the kernel ahead: the ring is filled with it
 * before the grid-dependency wait, x is read after it.
 *
 * Many tiles: all units of all tiles, in order, are divided evenly among as many CTAs as there are
 * multiprocessors, so that none is idle whatever the shape. A CTA that begins inside a tile leaves
 * its sums in memory; the CTA with the tile's first unit adds them in order. Few tiles: a cluster
 * has one, and its CTAs a share of the units each; CTA j ends the columns 8 j .. 8 j + 7. Both
 * orders are fixed: results are the same each time.
 *
 * Shared memory: the ring, most of what there is; a cluster's slots, 2 KiB a CTA of it. Bytes read:
 * w once; of x columns / 64 of that, from L2.
 */
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/dense_common.cuh"
#include "backend/cuda/dense_stream.h"
#include "backend/cuda/node_feed.cuh"
#include "backend/cuda/wgmma_narrow.cuh"

#ifdef PKV_HAVE_WGMMA
/* A CTA's units: `count` in order from one of a tile on. */
struct stream_share {
  int tile, unit, count;
};

/* The first unit of a CTA where units are divided evenly. */
static __device__ __forceinline__ uint64_t stream_begin(const pkv_stream_args &a, uint32_t cta) {
  return (uint64_t)a.tiles * (uint64_t)a.units * cta / gridDim.x;
}

static __device__ __forceinline__ stream_share stream_share_here(const pkv_stream_args &a) {
  if (a.split > 1) {
    const int rank = (int)pkv_cluster_rank();
    const int first = a.units * rank / a.split, end = a.units * (rank + 1) / a.split;
    return {(int)blockIdx.x / a.split, first, end - first};
  }
  const uint64_t begin = stream_begin(a, blockIdx.x), end = stream_begin(a, blockIdx.x + 1);
  return {(int)(begin / (uint32_t)a.units), (int)(begin % (uint32_t)a.units), (int)(end - begin)};
}

/* Shared memory; barriers: full [stages], free [stages], then a cluster's. */
template <int COLUMNS> struct stream_shared {
  static constexpr int w_bytes = PKV_STREAM_ROWS * PKV_STREAM_K * 2;
  uint32_t ring, slots, barriers;
  int stages;

  __device__ __forceinline__ stream_shared(const pkv_stream_args &a, const void *memory) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(memory);
    stages = a.stages;
    ring = (at + 1023u) & ~1023u; /* swizzled tiles */
    slots = ring + (uint32_t)(stages * pkv_stream_stage_bytes(COLUMNS));
    barriers = slots + (uint32_t)pkv_stream_slot_bytes(a.split);
  }
  __device__ __forceinline__ uint32_t stage(int i) const {
    return ring + (uint32_t)(i * pkv_stream_stage_bytes(COLUMNS));
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return barriers + (uint32_t)i * 8;
  }
  __device__ __forceinline__ uint32_t freed(int i) const {
    return barriers + (uint32_t)(stages + i) * 8;
  }
  __device__ __forceinline__ uint32_t arrived() const {
    return barriers + (uint32_t)stages * 16;
  }
  __device__ __forceinline__ void init(int split) const {
    for (int i = 0; i < stages; ++i) {
      pkv_barrier_init(full(i), 1);
      pkv_barrier_init(freed(i), PKV_STREAM_WORKERS / 32);
    }
    if (split > 1) pkv_barrier_init(arrived(), (uint32_t)split - 1);
    pkv_barrier_open();
  }
};

/* A place in the ring. */
struct stream_slot {
  int at;
  uint32_t lap;
  __device__ __forceinline__ void next(int stages) {
    if (++at == stages) {
      at = 0;
      lap ^= 1;
    }
  }
};

static __device__ __forceinline__ void stream_copy_x(uint32_t to, const CUtensorMap *map,
                                                     uint32_t barrier, int element) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %4}], [%2];\n" ::"r"(to),
               "l"(map), "r"(barrier), "r"(element), "r"(0)
               : "memory");
}

/* One thread: all copies of a CTA. */
template <int COLUMNS>
static __device__ __forceinline__ void
stream_feed(const pkv_stream_args &a, const stream_share &share, const stream_shared<COLUMNS> &s) {
  const int first = min(share.count, s.stages);
  int tile = share.tile, unit = share.unit, x_unit = share.unit;
  auto copy_w = [&](int stage) {
    pkv_barrier_expect(s.full(stage), pkv_stream_stage_bytes(COLUMNS));
    pkv_tensor_copy(s.stage(stage), &a.w, s.full(stage), unit * PKV_STREAM_K, 0, 0,
                    tile * (PKV_STREAM_ROWS / 16));
    if (++unit < a.units) return;
    unit = 0;
    ++tile;
  };
  auto copy_x = [&](int stage) {
    stream_copy_x(s.stage(stage) + s.w_bytes, &a.x, s.full(stage), x_unit * PKV_STREAM_K);
    if (++x_unit == a.units) x_unit = 0;
  };
  for (int i = 0; i < first; ++i)
    copy_w(i);
  pkv_grid_wait();
  for (int i = 0; i < first; ++i)
    copy_x(i);
  stream_slot slot = {0, 0};
  for (int i = first; i < share.count; ++i) {
    pkv_barrier_wait(s.freed(slot.at), slot.lap);
    copy_w(slot.at);
    copy_x(slot.at);
    slot.next(s.stages);
  }
}

/* d = the next `count` units of the ring. d[4 j ..]: rows r and r + 8 of the warp's 16, columns
   8 j + 2 (lane & 3) and the next. */
template <typename T, int COLUMNS>
static __device__ __forceinline__ void stream_multiply(float *d, const stream_shared<COLUMNS> &s,
                                                       stream_slot *slot, int count) {
  const bool tells = (threadIdx.x & 31) == 0;
  int before = -1; /* the stage whose product may still run */
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i)
    d[i] = 0.0f;
  for (int i = 0; i < count; ++i) {
    pkv_barrier_wait(s.full(slot->at), slot->lap);
    const uint64_t w = pkv_wgmma_matrix(s.stage(slot->at), 0);
    const uint64_t x = pkv_wgmma_matrix(s.stage(slot->at) + s.w_bytes, 0);
    pkv_wgmma_fence();
#pragma unroll
    for (int k = 0; k < PKV_STREAM_K / 16; ++k) /* 32 bytes on */
      pkv_narrow<T>::run(pkv_narrow_columns<COLUMNS>(), d, w + 2 * k, x + 2 * k);
    pkv_wgmma_commit();
    pkv_wgmma_wait<1>();
    if (before >= 0 && tells) pkv_barrier_arrive(s.freed(before));
    before = slot->at;
    slot->next(s.stages);
  }
  pkv_wgmma_wait<0>();
  if (before >= 0 && tells) pkv_barrier_arrive(s.freed(before));
}

/* The threads that multiply meet. */
static __device__ __forceinline__ void stream_meet() {
  asm volatile("bar.sync 1, %0;\n" ::"n"(PKV_STREAM_WORKERS) : "memory");
}

static __device__ __forceinline__ void stream_store(const pkv_stream_args &a, int64_t at, float v) {
  if (a.y_f32)
    ((float *)a.y)[at] = a.accumulate ? v + __ldcg((const float *)a.y + at) : v;
  else if (a.act == PKV_DTYPE_BF16)
    ((__nv_bfloat16 *)a.y)[at] = __float2bfloat16_rn(v);
  else
    ((__half *)a.y)[at] = __float2half_rn(v);
}

/* Sums of columns 8 j .. to y. */
static __device__ __forceinline__ void stream_put(const pkv_stream_args &a, int tile, int j,
                                                  float4 sums) {
  const int lane = (int)threadIdx.x & 31;
  const int place = tile * (PKV_STREAM_ROWS / 16) + (int)threadIdx.x / 32; /* of a group of 16 */
  const bool gated = a.gate != PKV_DENSE_NO_GATE;
  const int row = place * (gated ? 8 : 16) + lane / 4;
  const float low[2] = {sums.x, sums.y}, high[2] = {sums.z, sums.w};
  if (row >= (gated ? a.n / 2 : a.n)) return;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = 8 * j + 2 * (lane & 3) + c;
    const int64_t at = column * a.y_stride + row;
    if (column >= a.m) continue;
    if (gated) {
      stream_store(a, at, dense_gated(low[c], high[c], (pkv_dense_gate)a.gate));
    } else {
      stream_store(a, at, low[c]);
      stream_store(a, at + 8, high[c]);
    }
  }
}

static __device__ __forceinline__ float4 stream_four(const float *d, int j) {
  return make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
}
static __device__ __forceinline__ float4 stream_add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* ---- many tiles ---- */

static __device__ __forceinline__ uint32_t stream_see(const uint32_t *at) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(x) : "l"(at) : "memory");
  return x;
}
static __device__ __forceinline__ void stream_tell(uint32_t *at, uint32_t x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;\n" ::"l"(at), "r"(x) : "memory");
}

template <int COLUMNS>
static __device__ __forceinline__ float4 *stream_part(const pkv_stream_args &a, uint32_t cta,
                                                      int j) {
  const int64_t run = (int64_t)cta * (COLUMNS / 8) + j;
  return (float4 *)a.parts + run * PKV_STREAM_WORKERS + threadIdx.x;
}

/* For the CTA that ends the tile. */
template <int COLUMNS>
static __device__ __forceinline__ void stream_leave(const pkv_stream_args &a, const float *d) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
    __stcg(stream_part<COLUMNS>(a, blockIdx.x, j), stream_four(d, j));
  __threadfence();
  stream_meet();
  if (threadIdx.x == 0) stream_tell(a.ready + blockIdx.x, 1);
}

/* `missing` units of the tile lie with the CTAs behind. They wait for nobody before they leave
   theirs, so that this ends even where not all CTAs run at a time. */
template <int COLUMNS>
static __device__ __forceinline__ void stream_collect(const pkv_stream_args &a, float *d,
                                                      int missing) {
  for (uint32_t cta = blockIdx.x + 1; missing > 0; ++cta) {
    if (threadIdx.x == 0) {
      while (stream_see(a.ready + cta) == 0) {}
      a.ready[cta] = 0; /* for the next launch */
    }
    stream_meet();
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const float4 v = stream_add(stream_four(d, j), __ldcg(stream_part<COLUMNS>(a, cta, j)));
      d[4 * j] = v.x;
      d[4 * j + 1] = v.y;
      d[4 * j + 2] = v.z;
      d[4 * j + 3] = v.w;
    }
    missing -= (int)(stream_begin(a, cta + 1) - stream_begin(a, cta));
  }
}

template <typename T, int COLUMNS>
static __device__ __forceinline__ void stream_tiles(const pkv_stream_args &a, stream_share share,
                                                    const stream_shared<COLUMNS> &s) {
  stream_slot slot = {0, 0};
  float d[COLUMNS / 2];
  while (share.count > 0) {
    const int here = min(a.units - share.unit, share.count), behind = a.units - share.unit - here;
    stream_multiply<T, COLUMNS>(d, s, &slot, here);
    if (share.unit > 0) {
      stream_leave<COLUMNS>(a, d);
    } else {
      stream_collect<COLUMNS>(a, d, behind);
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
        stream_put(a, share.tile, j, stream_four(d, j));
    }
    share.count -= here;
    share.unit = 0;
    ++share.tile;
  }
}

/* ---- few tiles: clusters ---- */

static __device__ __forceinline__ uint32_t stream_at(uint32_t own, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(own), "r"(rank));
  return there;
}
static __device__ __forceinline__ void stream_give(uint32_t to, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}
static __device__ __forceinline__ float4 stream_take(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
static __device__ __forceinline__ void stream_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(barrier)
               : "memory");
}
/* Until all others of the cluster have arrived. */
static __device__ __forceinline__ void stream_wait(uint32_t barrier) {
  asm volatile("{\n.reg .pred p;\nPKV_AGAIN%=:\n"
               "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
               "@!p bra PKV_AGAIN%=;\n}\n" ::"r"(barrier)
               : "memory");
}

/* All wait for all, also those who end no columns: a CTA's shared memory is there until nobody
   writes to it. */
template <typename T, int COLUMNS>
static __device__ __forceinline__ void stream_cluster(const pkv_stream_args &a,
                                                      const stream_share &share,
                                                      const stream_shared<COLUMNS> &s) {
  const int rank = (int)pkv_cluster_rank(), thread = (int)threadIdx.x;
  auto place = [&](int from) {
    return s.slots + (uint32_t)(from * PKV_STREAM_WORKERS + thread) * 16;
  };
  stream_slot slot = {0, 0};
  float d[COLUMNS / 2];
  stream_multiply<T, COLUMNS>(d, s, &slot, share.count);
  float4 own = stream_four(d, 0), sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    if (j == rank)
      own = stream_four(d, j);
    else
      stream_give(stream_at(place(rank), j), stream_four(d, j));
  }
  stream_meet();
  if (thread < a.split && thread != rank) stream_arrive(stream_at(s.arrived(), thread));
  stream_wait(s.arrived());
  if (rank >= COLUMNS / 8) return;
  for (int from = 0; from < a.split; ++from)
    sum = stream_add(sum, from == rank ? own : stream_take(place(from)));
  stream_put(a, share.tile, rank, sum);
}
#endif

template <typename T, int COLUMNS>
__global__ void __launch_bounds__(PKV_STREAM_WORKERS + 32)
    dense_stream(const __grid_constant__ pkv_stream_args a) {
#ifdef PKV_HAVE_WGMMA
  extern __shared__ unsigned char memory[];
  const stream_shared<COLUMNS> s(a, memory);
  const stream_share share = stream_share_here(a);
  pkv_grid_release();
  if (threadIdx.x == 0) s.init(a.split);
  if (a.split > 1)
    pkv_cluster_sync();
  else
    __syncthreads();
  if (threadIdx.x == PKV_STREAM_WORKERS) stream_feed<COLUMNS>(a, share, s);
  if (threadIdx.x >= PKV_STREAM_WORKERS) return;
  pkv_grid_wait(); /* what lies in y and in the parts is there, and nobody reads it any more */
  if (a.split > 1)
    stream_cluster<T, COLUMNS>(a, share, s);
  else
    stream_tiles<T, COLUMNS>(a, share, s);
#endif
}

extern "C" const void *const pkv_stream_kernels[2][2] = {
    {(const void *)dense_stream<pkv_half_type, 8>, (const void *)dense_stream<pkv_bf16_type, 8>},
    {(const void *)dense_stream<pkv_half_type, 16>, (const void *)dense_stream<pkv_bf16_type, 16>}};
