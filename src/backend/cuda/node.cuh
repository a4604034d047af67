/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Route shared, the nodes: one CTA a part, 3 warpgroups. A piece is up to 128 query rows of rows
 * that share a node, against a run of its units, in tiles of 128 tokens. One warpgroup feeds
 * (node_feed.cuh): a warp K and one V, whose lanes own a page each (or 64 tokens of a larger one)
 * and bring it by tensor copies, two the query. The others have 64 query rows each: the softmax of
 * a tile runs beside the product of the last weights with V, and the two take turns at the tensor
 * cores. Of a piece of 64 rows or fewer they take every other tile each, and the second hands its
 * state over to the first in the end.
 *
 * A node's tokens are seen by all its queries: no causal mask, only a window's lower bound. A piece
 * of an odd number of units begins with half a tile; the rest of that tile is read as zeros, from
 * outside the pool, and masked. The reference of the softmax moves as in slice.cuh.
 *
 * Shared memory (head_dim 128): query 32 KiB, 3 stages of 64 KiB. L2 bytes a tile and piece: 2 *
 * 128 * head_dim * 2; memory bytes: the same once a KV head and node.
 *
 * e4m3 K and V: half the bytes, 2 stages of 32 KiB as they are copied and 2 of 64 KiB as f16, which
 * a fourth warpgroup makes of them (node_widen.cuh); all else is the same.
 *
 * On other targets than sm_90a the kernel is that of node_mma.cuh.
 */
#ifndef PKV_CUDA_NODE_CUH
#define PKV_CUDA_NODE_CUH

#include "backend/cuda/node_hand.cuh"
#include "backend/cuda/node_mma.cuh"
#include "backend/cuda/node_state.cuh"
#include "backend/cuda/node_widen.cuh"

#ifdef PKV_HAVE_WGMMA
/* A warpgroup's share of a piece. Tile 0 starts at token `first` and has `odd` tokens where that is
   not 0, tile i at start + 128 i. It takes tiles begin, begin + step .. */
struct pkv_node_job {
  int rows, r; /* query rows of the piece; this thread's first */
  int first, odd, start, tiles, begin, step;
  float raw, scale; /* of the logits as multiplied, and after a cap */
  bool split;       /* the tiles are shared out, not the rows */
};

/* One multiplying warpgroup at the pieces of a part. */
template <typename MMA, int HD, int BYTES> struct pkv_node_consumer : pkv_node_hand<HD, BYTES> {
  typedef pkv_node_config<HD, BYTES> C;
  typedef pkv_node_hand<HD, BYTES> hand;
  using hand::at, hand::barriers, hand::group, hand::k, hand::k_free, hand::k_pass, hand::k_wait,
      hand::memory, hand::my_turn, hand::q_free, hand::stage, hand::thread, hand::v, hand::v_free,
      hand::v_pass, hand::v_wait, hand::your_turn;
  const pkv_cuda_shared_params &s;
  uint32_t q_lap;

  __device__ __forceinline__ pkv_node_job job_of(const pkv_node_piece &piece) const {
    const pkv_cuda_decode_params &p = s.base;
    pkv_node_job j;
    j.rows = piece.ranks * p.q_len * p.group;
    j.split = j.rows <= 64;
    j.r = (j.split ? 0 : group * 64) + thread / 32 * 16 + (thread & 31) / 4;
    j.first = piece.unit_begin * p.unit_tokens;
    const int tokens = piece.unit_end * p.unit_tokens - j.first;
    j.odd = tokens % C::tokens;
    j.start = j.first + (j.odd ? j.odd - C::tokens : 0);
    j.tiles = (tokens + C::tokens - 1) / C::tokens;
    j.begin = j.split ? group : 0;
    j.step = j.split ? 2 : 1;
    j.raw = pkv_scale_of(p, piece.kv_head);
    j.scale = p.soft_cap > 0.0f ? 1.0f : j.raw;
    return j;
  }
  /* The first token that each of the thread's rows may see. */
  __device__ __forceinline__ void windows(int from[2], const pkv_node_piece &piece,
                                          const pkv_node_job &j) const {
    const pkv_cuda_decode_params &p = s.base;
    const int states = p.q_len * p.group;
    from[0] = from[1] = INT_MIN;
    if (p.window > 0)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = min(j.r + 8 * h, j.rows - 1), rank = i / states;
        const int t = (i - rank * states) / p.group;
        from[h] = s.view.ranks[piece.first_rank + rank].length - p.q_len + t - p.window + 1;
      }
  }
  /* The warpgroup's tiles of a piece, all multiplied. */
  __device__ __forceinline__ void multiply(pkv_node_state<MMA, HD> &state, const pkv_node_job &j) {
    const float cap = s.base.soft_cap;
    const bool window = s.base.window > 0;
    const int lane = thread & 31;
    const uint64_t q_at = pkv_wgmma_matrix(at + (j.split ? 0 : group * 64 * 128), 0);
    const uint64_t k_at = pkv_wgmma_matrix(at + C::k_at, 0);
    const uint64_t v_at = pkv_wgmma_matrix(at + C::v_at, C::kv_block);
    float shrink[2];
    k_wait();
    state.multiply_keys(q_at, k_at + stage(k.slot));
    state.template wait_logits<0>();
    k_free();
    if (cap > 0.0f) state.apply_cap(j.raw, cap);
    const bool part = j.begin == 0 && j.odd;
    if (window || part)
      state.mask(part ? j.first : j.start + j.begin * C::tokens, part ? j.odd : C::tokens, lane);
    state.softmax(shrink, j.scale);
    state.pack();
    for (int i = j.begin + j.step; i < j.tiles; i += j.step) {
      if (j.split) k_pass();
      k_wait();
      if (!j.split) my_turn();
      state.multiply_keys(q_at, k_at + stage(k.slot));
      v_wait();
      state.multiply_values(v_at + stage(v.slot));
      if (!j.split) your_turn();
      state.template wait_logits<1>();
      k_free();
      if (cap > 0.0f) state.apply_cap(j.raw, cap);
      if (window) state.mask(j.start + i * C::tokens, C::tokens, lane);
      const bool grows = state.softmax(shrink, j.scale);
      state.stay_before_wait(at + C::sums_at);
      state.wait_values();
      v_free();
      if (j.split) v_pass();
      if (grows) state.rescale(shrink);
      state.pack();
    }
    if (!j.split) q_free();
    v_wait();
    state.multiply_values(v_at + stage(v.slot));
    state.wait_values();
    v_free();
  }
  __device__ __forceinline__ void attend(const pkv_node_piece &piece) {
    const pkv_node_job j = job_of(piece);
    pkv_barrier_wait(barriers + C::q_barriers, q_lap);
    q_lap ^= 1;
    pkv_node_state<MMA, HD> state;
    state.reset();
    windows(state.from, piece, j);
    if (j.begin > 0) {
      k_pass();
      v_pass();
    }
    if (j.begin < j.tiles) multiply(state, j);
    if (j.split && (j.tiles & 1) == group && j.begin < j.tiles) { /* the last is the other's */
      k_pass();
      v_pass();
    }
    state.add_up();
    if (j.split) {
      float *there = (float *)memory, *sums = (float *)(memory + C::sums_at);
      pkv_named_sync(PKV_NODE_MERGE); /* both are through with the query */
      if (group == 1) state.hand_over(there, sums, thread, j.r);
      pkv_named_sync(PKV_NODE_MERGE);
      if (group == 0) state.take_over(there, sums, thread, j.r);
      q_free();
      if (group == 1) return;
    }
    const int64_t states = s.base.q_len * s.base.group;
    state.store(s.node_slots + piece.slot * states * pkv_slot_row<HD>::floats, j.r, j.rows,
                thread & 31);
  }
};
#endif

/* Threads of the kernel that is compiled here. */
template <typename K, int HD> struct pkv_node_threads {
#ifdef PKV_HAVE_WGMMA
  static constexpr int count = pkv_node_config<HD, K::template of<HD>::bytes>::threads;
#else
  static constexpr int count = pkv_node_ring<typename K::template of<HD>>::threads;
#endif
};

template <typename K, int HD>
__global__ void __launch_bounds__(pkv_node_threads<K, HD>::count, 1)
    pkv_cuda_node(const __grid_constant__ pkv_cuda_shared_params s,
                  const __grid_constant__ pkv_cuda_tensor_maps maps) {
  typedef typename K::template of<HD> KV;
  extern __shared__ __align__(128) unsigned char unaligned[];
#ifdef PKV_HAVE_WGMMA
  constexpr int BYTES = KV::bytes;
  typedef typename KV::mma MMA;
  typedef pkv_node_config<HD, BYTES> C;
  const uint32_t there = (uint32_t)__cvta_generic_to_shared(unaligned);
  const uint32_t memory = (there + 1023u) & ~1023u, barriers = memory + C::barriers_at;
  if (threadIdx.x < C::barriers) {
    const int i = threadIdx.x, query = 4 * C::stages;
    const bool full = i < query ? i % (2 * C::stages) < C::stages : i == query;
    int count = !full ? 2 * 4 : i == query ? 64 : C::widens ? 4 : 1;
    if (C::widens && i >= C::tile_barriers) /* full by the copy engine, free by widening warps */
      count = (i - C::tile_barriers) % (2 * C::copy_stages) < C::copy_stages ? 1 : 4;
    pkv_barrier_init(barriers + i * 8, count);
    pkv_barrier_open();
  }
  if (threadIdx.x < 64 && threadIdx.x % 32 == 0)
    pkv_tensor_prefetch(threadIdx.x ? &maps.v : &maps.k);
  __syncthreads();
  /* Else the feeding warps wait: those of K and V before tokens that may still be written, those of
     the query before they read it. What comes out of it is stored later still. */
  if (s.base.wait_first) pkv_grid_wait();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < 4) {
    pkv_registers_less<C::feeder_registers>();
    if (warp < 2)
      pkv_node_feed_tiles<C>(
          s, warp ? &maps.v : &maps.k, memory + (warp ? C::copy_v_at : C::copy_k_at),
          barriers + (warp ? C::copy_v_barriers : C::copy_barriers), threadIdx.x & 31);
    else
      pkv_node_feed_query<C>(s, memory, barriers + C::q_barriers, threadIdx.x - 64);
  } else if (C::widens && warp < 8) {
    pkv_registers_less<C::feeder_registers>();
    pkv_node_widen<C>(s, memory, barriers, threadIdx.x & 127);
  } else {
    pkv_registers_more<C::consumer_registers>();
    pkv_node_consumer<MMA, HD, BYTES> consumer = {{unaligned + (memory - there),
                                                   memory,
                                                   barriers,
                                                   warp / 4 - (C::widens ? 2 : 1),
                                                   (int)(threadIdx.x & 127),
                                                   {0, 0},
                                                   {0, 0}},
                                                  s,
                                                  0};
    if (consumer.group == 1) consumer.your_turn(); /* the first begins */
    pkv_node_piece piece;
    pkv_node_cursor at = s.view.node_cursors[blockIdx.x];
    const pkv_node_cursor end = s.view.node_cursors[blockIdx.x + 1];
    while (pkv_tree_next_node_piece(&piece, &s.view, &at, &end))
      consumer.attend(piece);
  }
#else
  (void)maps;
  pkv_node_mma<KV, HD>(s, unaligned);
#endif
}

#endif
