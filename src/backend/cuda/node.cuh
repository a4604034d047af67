/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Route shared, the nodes: one CTA a part, 2 warpgroups. A piece is up to 128 query rows of rows
 * that share a node, against a run of its tiles of 64 tokens. Each warpgroup has 64 query rows; K
 * and V of a tile are copied once for both, through a ring that runs some tiles ahead. While the
 * tensor cores multiply the weights of one tile by V, the softmax of the next is taken.
 *
 * A node's tokens are seen by all its queries: no causal mask, only a window's lower bound. The
 * reference of the softmax moves as in slice.cuh.
 *
 * Shared memory (head_dim 128): query 32 KiB, 5 stages of 32 KiB. L2 bytes a tile and piece: 2 * 64
 * * head_dim * 2; memory bytes: the same once a KV head and node.
 */
#ifndef PKV_CUDA_NODE_CUH
#define PKV_CUDA_NODE_CUH

#include "backend/cuda/private.cuh"
#include "backend/cuda/wgmma.cuh"

#define PKV_NODE_THREADS 256
#define PKV_NODE_ROWS    128
#define PKV_NODE_TOKENS  64

template <int HD> struct pkv_node_config {
  static constexpr int blocks = HD / 64; /* of 64 head dimensions: 128 bytes a row */
  static constexpr int q_block = PKV_NODE_ROWS * 128, kv_block = PKV_NODE_TOKENS * 128;
  static constexpr int q_bytes = blocks * q_block, stage_bytes = 2 * blocks * kv_block;
  static constexpr int stages = HD > 64 ? 5 : 8;
  static constexpr int shared_bytes = 1024 + q_bytes + stages * stage_bytes + stages * 16;
};

template <typename MMA> struct pkv_wgmma;
#ifdef PKV_HAVE_WGMMA
#define PKV_WGMMA_OF(type, space)                                                                  \
  template <> struct pkv_wgmma<type> {                                                             \
    static __device__ __forceinline__ void logits(float *d, uint64_t a, uint64_t b, int keep) {    \
      space::pkv_wgmma_ss_64(d, a, b, keep);                                                       \
    }                                                                                              \
    template <int HD>                                                                              \
    static __device__ __forceinline__ void values(float *d, const uint32_t *a, uint64_t b) {       \
      if (HD > 64)                                                                                 \
        space::pkv_wgmma_rs_128(d, a, b);                                                          \
      else                                                                                         \
        space::pkv_wgmma_rs_64(d, a, b);                                                           \
    }                                                                                              \
  };
PKV_WGMMA_OF(pkv_half_type, pkv_wgmma_f16)
PKV_WGMMA_OF(pkv_bf16_type, pkv_wgmma_bf16)
#endif

/* Byte of 16-byte chunk c of row r in a block of 128-byte rows. */
static __device__ __forceinline__ uint32_t pkv_node_chunk(int r, int c) {
  return (uint32_t)(r * 128 + ((c ^ (r & 7)) << 4));
}

/*
 * Copies of one piece's tiles. A thread has one 16-byte column of 4 (head_dim 64: 2) rows of each
 * tile. Pages hold 16 tokens or more, a power of two.
 */
template <int HD> struct pkv_node_feed {
  typedef pkv_node_config<HD> C;
  static constexpr int chunks = HD / 8, rows_a_turn = PKV_NODE_THREADS / chunks;
  static constexpr int turns = PKV_NODE_TOKENS / rows_a_turn;
  const int32_t *table;
  const uint16_t *k, *v; /* of this thread's column and row, in page 0 */
  int token, end;        /* this thread's first of the tile that is next; of the node */
  int page[turns];
  uint32_t to;       /* this thread's place in stage 0 */
  uint32_t barriers; /* [stages] full, [stages] free */
  int refill;
  uint32_t laps; /* parity of the phase in which the stage to be filled was last free */

  __device__ __forceinline__ void start(const pkv_cuda_decode_params &p,
                                        const pkv_node_piece &piece, uint32_t ring) {
    const int t = threadIdx.x / chunks, c = threadIdx.x % chunks;
    table = p.block_table + (int64_t)piece.table_row * p.block_table_stride;
    k = (const uint16_t *)p.cache.k + piece.kv_head * p.cache.k_head_stride + c * 8;
    v = (const uint16_t *)p.cache.v + piece.kv_head * p.cache.v_head_stride + c * 8;
    token = piece.unit_begin * p.unit_tokens + t;
    end = piece.unit_end * p.unit_tokens;
    to = ring + (uint32_t)(c / 8 * C::kv_block) + pkv_node_chunk(t, c & 7);
    fetch(p, piece.table_row);
  }
  __device__ __forceinline__ void fetch(const pkv_cuda_decode_params &p, int row) {
    if (token >= end) return;
    bool outside = false;
#pragma unroll
    for (int i = 0; i < turns; ++i) {
      const int index = min((token + i * rows_a_turn) >> p.page_shift, p.max_pages - 1);
      page[i] = __ldg(table + index);
      outside |= (uint32_t)page[i] >= (uint32_t)p.cache.pages;
    }
    if (!outside) return;
    atomicMax(p.fault, 1 + row);
#pragma unroll
    for (int i = 0; i < turns; ++i)
      page[i] = 0; /* the result is of no use any more */
  }
  __device__ __forceinline__ void push(const pkv_cuda_shared_params &s, int row) {
    const pkv_cuda_decode_params &p = s.base;
    if (token >= end) return;
    pkv_barrier_wait(barriers + (C::stages + refill) * 8, laps);
    const uint32_t at = to + (uint32_t)(refill * C::stage_bytes);
#pragma unroll
    for (int i = 0; i < turns; ++i) {
      const int in_page = (token + i * rows_a_turn) & (p.cache.page_tokens - 1);
      pkv_copy16(at + i * rows_a_turn * 128,
                 k + (int64_t)page[i] * s.k_page_stride + in_page * s.k_token_stride);
      pkv_copy16(at + i * rows_a_turn * 128 + C::blocks * C::kv_block,
                 v + (int64_t)page[i] * s.v_page_stride + in_page * s.v_token_stride);
    }
    pkv_barrier_arrive_copies(barriers + refill * 8);
    token += PKV_NODE_TOKENS;
    fetch(p, row);
    if (++refill == C::stages) {
      refill = 0;
      laps ^= 1;
    }
  }
};

/* The query rows of a piece: row i is rank first + i / states, state i % states. Zero past them. */
template <int HD>
static __device__ __forceinline__ void pkv_node_query(const pkv_cuda_shared_params &s,
                                                      const pkv_node_piece &piece, uint32_t to) {
  typedef pkv_node_config<HD> C;
  const pkv_cuda_decode_params &p = s.base;
  const int states = p.q_len * p.group, rows = piece.ranks * states;
  for (int i = threadIdx.x; i < PKV_NODE_ROWS * (HD / 8); i += PKV_NODE_THREADS) {
    const int r = i / (HD / 8), c = i % (HD / 8), rank = r / states, state = r - rank * states;
    const int t = state / p.group, g = state - t * p.group;
    const uint16_t *from = (const uint16_t *)p.q;
    if (r < rows) {
      const int row = s.view.ranks[piece.first_rank + rank].row;
      from += ((int64_t)row * p.q_len + t) * p.q_token_stride +
              (int64_t)(piece.kv_head * p.group + g) * p.q_head_stride + c * 8;
    }
    pkv_copy16(to + (uint32_t)(c / 8 * C::q_block) + pkv_node_chunk(r, c & 7), from,
               r < rows ? 16 : 0);
  }
}

#ifdef PKV_HAVE_WGMMA
/* One warpgroup's softmax: this thread's rows r = lane / 4 and r + 8 of its warp's 16. */
template <typename MMA, int HD> struct pkv_node_state {
  float m[2], l[2];
  float acc[HD / 2];
  float logit[32];
  int from[2]; /* the first token that each row may see, with a window */

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < HD / 2; ++i)
      acc[i] = 0.0f;
    m[0] = m[1] = -CUDART_INF_F;
    l[0] = l[1] = 0.0f;
  }
  /* q, k, v: pkv_wgmma_matrix of the warpgroup's query rows and of a tile. */
  __device__ __forceinline__ void multiply_keys(uint64_t q, uint64_t k) {
    typedef pkv_node_config<HD> C;
    pkv_wgmma_fence();
#pragma unroll
    for (int i = 0; i < HD / 16; ++i)
      pkv_wgmma<MMA>::logits(logit, q + ((i / 4 * C::q_block + i % 4 * 32) >> 4),
                             k + ((i / 4 * C::kv_block + i % 4 * 32) >> 4), i > 0);
    pkv_wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values(const uint32_t weights[16], uint64_t v) {
    pkv_wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pkv_wgmma<MMA>::template values<HD>(acc, weights + 4 * i, v + (i * 2048 >> 4));
    pkv_wgmma_commit();
  }
  /* Cap, scale and window, where there are any: logits are then in base 2. */
  __device__ __noinline__ static void adjust(float *logit, const int *from, float scale, float cap,
                                             int token, int lane) {
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      float x = logit[i];
      x = cap > 0.0f ? tanhf(x * (scale / (cap * PKV_LOG2_E))) * (cap * PKV_LOG2_E) : x * scale;
      if (token + i / 4 * 8 + 2 * (lane & 3) + (i & 1) < from[i >> 1 & 1]) x = -CUDART_INF_F;
      logit[i] = x;
    }
  }
  /* logits to weights; shrink: what acc has to be multiplied by, once it is still. */
  __device__ __forceinline__ bool softmax(uint32_t weights[16], float shrink[2], float scale,
                                          float cap, bool window, int token, int lane) {
    if (cap > 0.0f || window) {
      float x[32];
      int lower[2] = {from[0], from[1]};
#pragma unroll
      for (int i = 0; i < 32; ++i)
        x[i] = logit[i];
      adjust(x, lower, scale, cap, token, lane);
#pragma unroll
      for (int i = 0; i < 32; ++i)
        logit[i] = x[i];
      scale = 1.0f;
    }
    float top[2] = {logit[0], logit[2]};
#pragma unroll
    for (int i = 0; i < 32; ++i)
      top[i >> 1 & 1] = fmaxf(top[i >> 1 & 1], logit[i]);
    top[0] *= scale;
    top[1] *= scale;
    const bool grows =
        __any_sync(0xffffffffu, top[0] > m[0] + PKV_HEADROOM || top[1] > m[1] + PKV_HEADROOM);
    shrink[0] = shrink[1] = 1.0f;
    if (grows)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float high = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], 1));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
        high = fmaxf(high, m[j]);
        shrink[j] = pkv_exp2(m[j] - (high == -CUDART_INF_F ? 0.0f : high));
        m[j] = high;
        l[j] *= shrink[j];
      }
    const float less[2] = {m[0] == -CUDART_INF_F ? 0.0f : -m[0],
                           m[1] == -CUDART_INF_F ? 0.0f : -m[1]};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      logit[i] = pkv_exp2(fmaf(logit[i], scale, less[i >> 1 & 1]));
      l[i >> 1 & 1] += logit[i];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i)
      weights[i] = MMA::pack(logit[2 * i], logit[2 * i + 1]);
    return grows;
  }
  __device__ __forceinline__ void rescale(const float shrink[2]) {
#pragma unroll
    for (int i = 0; i < HD / 2; ++i)
      acc[i] *= shrink[i >> 1 & 1];
  }
  /* The state of query rows r and r + 8 of the piece, which has `rows`, to its slot rows. */
  __device__ __forceinline__ void store(float *slot, int r, int rows, int lane) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      l[j] += __shfl_xor_sync(0xffffffffu, l[j], 1);
      l[j] += __shfl_xor_sync(0xffffffffu, l[j], 2);
      if (r + 8 * j >= rows) continue;
      float *to = slot + (int64_t)(r + 8 * j) * pkv_slot_row<HD>::floats;
#pragma unroll
      for (int b = 0; b < HD / 8; ++b)
        *(float2 *)(to + b * 8 + 2 * (lane & 3)) =
            make_float2(acc[4 * b + 2 * j], acc[4 * b + 2 * j + 1]);
      if ((lane & 3) == 0) *(float4 *)(to + HD) = make_float4(m[j], l[j], 0.0f, 0.0f);
    }
  }
};

/* One piece. `feed` and (slot, lap), where the ring is read, go on from piece to piece. */
template <typename MMA, int HD>
static __device__ __forceinline__ void
pkv_node_attend(const pkv_cuda_shared_params &s, const pkv_node_piece &piece, uint32_t q,
                uint32_t ring, pkv_node_feed<HD> &feed, int &slot, uint32_t &lap) {
  typedef pkv_node_config<HD> C;
  const pkv_cuda_decode_params &p = s.base;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 & 3, lane = threadIdx.x & 31;
  const int states = p.q_len * p.group, rows = piece.ranks * states;
  const int r = group * 64 + warp * 16 + lane / 4;
  const bool busy = group * 64 < rows; /* uniform over the warpgroup */
  const float scale = pkv_scale_of(p, piece.kv_head);
  const int first = piece.unit_begin * p.unit_tokens;
  const int tiles = (piece.unit_end * p.unit_tokens - first) / PKV_NODE_TOKENS;

  __syncthreads(); /* all are through with the query before */
  pkv_node_query<HD>(s, piece, q);
  pkv_copy_commit();
  feed.start(p, piece, ring);
  for (int i = 0; i < C::stages - 1; ++i)
    feed.push(s, piece.table_row);

  pkv_node_state<MMA, HD> state;
  state.reset();
  state.from[0] = state.from[1] = 0;
  if (p.window > 0)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = min(r + 8 * j, rows - 1), rank = i / states, t = (i - rank * states) / p.group;
      const int len = s.view.ranks[piece.first_rank + rank].length;
      state.from[j] = len - p.q_len + t - p.window + 1;
    }
  const uint64_t q_at = pkv_wgmma_matrix(q + (uint32_t)(group * 64 * 128), 0);
  const uint64_t k_at = pkv_wgmma_matrix(ring, 0);
  const uint64_t v_at = pkv_wgmma_matrix(ring + C::blocks * C::kv_block, C::kv_block);
  uint32_t weights[16], next[16];
  float shrink[2];
  auto stage = [](int i) { return (uint64_t)(uint32_t)(i * (C::stage_bytes >> 4)); };
  auto tile_is_there = [&](int i, uint32_t parity) {
    pkv_barrier_wait(feed.barriers + i * 8, parity);
    pkv_wgmma_see_writes();
  };
  auto tile_is_free = [&](int i) {
    __syncwarp();
    if (lane == 0) pkv_barrier_arrive(feed.barriers + (C::stages + i) * 8);
  };

  pkv_copy_wait<0>();
  pkv_wgmma_see_writes();
  __syncthreads(); /* the query is there */
  tile_is_there(slot, lap);
  if (busy) {
    state.multiply_keys(q_at, k_at + stage(slot));
    pkv_wgmma_wait<0>();
    state.softmax(weights, shrink, scale, p.soft_cap, p.window > 0, first, lane);
    pkv_wgmma_hold(weights);
  }
  for (int i = 1; i < tiles; ++i) {
    const int after = slot + 1 == C::stages ? 0 : slot + 1;
    if (after == 0) lap ^= 1;
    feed.push(s, piece.table_row);
    tile_is_there(after, lap);
    if (busy) {
      state.multiply_keys(q_at, k_at + stage(after));
      state.multiply_values(weights, v_at + stage(slot));
      pkv_wgmma_wait<1>();
      const bool grows = state.softmax(next, shrink, scale, p.soft_cap, p.window > 0,
                                       first + i * PKV_NODE_TOKENS, lane);
      pkv_wgmma_hold(next); /* the softmax is done by here, beside the product */
      pkv_wgmma_wait<0>();
      pkv_wgmma_hold(weights); /* they were read until now */
      if (grows) state.rescale(shrink);
#pragma unroll
      for (int j = 0; j < 16; ++j)
        weights[j] = next[j];
      pkv_wgmma_hold(weights);
    }
    tile_is_free(slot);
    slot = after;
  }
  if (busy) {
    state.multiply_values(weights, v_at + stage(slot));
    pkv_wgmma_wait<0>();
    state.store(s.node_slots + (int64_t)piece.slot * states * pkv_slot_row<HD>::floats, r, rows,
                lane);
  }
  tile_is_free(slot);
  if (++slot == C::stages) {
    slot = 0;
    lap ^= 1;
  }
}
#endif

template <typename MMA, int HD>
__global__ void __launch_bounds__(PKV_NODE_THREADS, 1)
    pkv_cuda_node(const __grid_constant__ pkv_cuda_shared_params s) {
  pkv_grid_wait();
  pkv_grid_release();
#ifdef PKV_HAVE_WGMMA
  typedef pkv_node_config<HD> C;
  extern __shared__ __align__(128) unsigned char memory[];
  const uint32_t q = ((uint32_t)__cvta_generic_to_shared(memory) + 1023u) & ~1023u;
  const uint32_t ring = q + C::q_bytes;
  pkv_node_cursor at = s.view.node_cursors[blockIdx.x];
  const pkv_node_cursor end = s.view.node_cursors[blockIdx.x + 1];
  pkv_node_feed<HD> feed;
  feed.barriers = ring + C::stages * C::stage_bytes;
  feed.refill = 0;
  feed.laps = 1; /* a stage that nobody has filled is free */
  if (threadIdx.x < C::stages) {
    pkv_barrier_init(feed.barriers + threadIdx.x * 8, PKV_NODE_THREADS);
    pkv_barrier_init(feed.barriers + (C::stages + threadIdx.x) * 8, PKV_NODE_THREADS / 32);
  }
  __syncthreads();
  pkv_node_piece piece;
  int slot = 0;
  uint32_t lap = 0;
  while (pkv_tree_next_node_piece(&piece, &s.view, &at, &end))
    pkv_node_attend<MMA, HD>(s, piece, q, ring, feed, slot, lap);
#endif
}

#endif
