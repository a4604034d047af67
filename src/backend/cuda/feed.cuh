/* SPDX-License-Identifier: Apache-2.0 */
/* The copy ring of one warp, and the walk that fills it. */
#ifndef PKV_CUDA_FEED_CUH
#define PKV_CUDA_FEED_CUH

#include "backend/cuda/fold.cuh"

template <typename KV, int HD> struct pkv_decode_config {
  static constexpr int slice_bytes = PKV_SLICE_TOKENS * KV::chunks * 16;
  static constexpr int stage_bytes = 2 * slice_bytes; /* of one warp */
  static constexpr int max_stages = 6;
  /* CTAs an SM of a kernel that takes so many tiles of 8 query rows together, where shared memory
     is large enough. Small slices are short reads: more warps wait for them, as registers last. */
  static constexpr __host__ __device__ int ctas(int tiles) {
    return (HD > 128 ? 1 : 2) + (KV::bytes == 1 && (HD <= 64 || tiles == 1));
  }
};

/* Of a CTA whose rings have so many stages. */
template <typename K, int HD> static int32_t pkv_decode_shared_bytes(int32_t stages) {
  typedef pkv_decode_config<typename K::template of<HD>, HD> C;
  return PKV_WARPS * stages * C::stage_bytes + pkv_fold<HD>::bytes;
}

/* The ring of one warp and the walk that fills it. */
template <typename KV, int HD, typename Walk = pkv_walk> struct pkv_feed {
  typedef pkv_decode_config<KV, HD> C;
  Walk walk;
  int pages, step; /* read ahead for `walk`, and which of them is its own (pkv_read_pages) */
  bool pages_read;
  int refill;
  uint32_t ring;
  uint64_t policy;

  /* To the next piece that has tokens. */
  template <typename P, typename Work>
  __device__ __forceinline__ void skip(const P &p, const Work &work) {
    while (walk.row >= 0 && walk.at >= walk.end)
      pkv_walk_next(walk, p, work);
  }
  template <typename P, typename Work>
  __device__ __forceinline__ void start(const Walk &from, const P &p, const Work &work,
                                        uint32_t memory, int warp, int lane) {
    refill = 0;
    ring = memory;
    policy = pkv_read_once();
    walk = from;
    skip(p, work);
    fetch(p, warp, lane);
  }
  /* Whether the next step holds no token that the kernel ahead may still be writing. */
  template <typename P> __device__ __forceinline__ bool is_old(const P &p) const {
    return pkv_runs(p) && walk.row >= 0 && walk.at + PKV_STEP_TOKENS <= walk.len - pkv_q_len(p);
  }
  template <typename P> __device__ __forceinline__ void fetch(const P &p, int warp, int lane) {
    pages_read = pkv_read_pages(pages, walk, p, warp, lane);
    step = 0;
  }
  /* Issues the copies of the next step, and the page ids of those after, if none are left. */
  template <typename P, typename Work>
  __device__ __forceinline__ void push(const P &p, const Work &work, int warp, int lane) {
    const Walk at = walk;
    if (step == 0) pages = pkv_checked_page(pages, pages_read, p, walk.row);
    const int page = __shfl_sync(0xffffffffu, pages, pkv_runs(p) ? step : step * 16 + (lane & 15));
    if (walk.row >= 0) {
      walk.at += walk.step();
      bool more = ++step < (pkv_runs(p) ? pkv_run_steps : pkv_token_steps);
      if (walk.at >= walk.end) {
        skip(p, work);
        more = false;
      }
      if (!more) fetch(p, warp, lane);
    }
    pkv_copy_slice<KV, HD>(at, p, page, ring + (uint32_t)(refill * C::stage_bytes), policy, warp,
                           lane);
    refill = refill + 1 == p.stages ? 0 : refill + 1;
  }
};

/* Waits for the oldest step in flight. */
static __device__ __forceinline__ void pkv_ring_wait(int stages) {
  switch (stages) {
  case 2:
    pkv_copy_wait<1>();
    break;
  case 3:
    pkv_copy_wait<2>();
    break;
  case 4:
    pkv_copy_wait<3>();
    break;
  case 5:
    pkv_copy_wait<4>();
    break;
  default:
    pkv_copy_wait<5>();
    break;
  }
}

template <typename P> static __device__ __forceinline__ float pkv_scale_of(const P &p, int head) {
  const float scale = p.scale * PKV_LOG2_E;
  return pkv_k_head_scale(p) ? scale * pkv_k_head_scale(p)[head] : scale;
}

#endif
