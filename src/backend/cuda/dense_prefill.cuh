/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention of the new tokens of prompts over pages: causal, many query rows a request.
 *
 * A CTA takes 128 query rows of a request and KV head, row (token x head of the group), against all
 * tokens that they may see, in tiles of 128. The pieces are those of route shared's nodes
 * (node.cuh): a warp brings K and one V by tensor copies, a lane a page, two the query; two
 * warpgroups have 64 query rows each and take turns at the tensor cores, the softmax of a tile
 * beside the product of the last. Only tiles that reach past a query row's own token, or before its
 * window, are masked. Tokens past the row's end may hold anything: their rows of V become zeros in
 * shared memory. Grid (KV heads, requests, tiles of the longest), a request's last tile first: long
 * work begins early, and what a shorter request lacks ends at once.
 *
 * Shared memory (head_dim 128): query 32 KiB, 3 stages of 64 KiB, one CTA an SM; registers 40 and
 * 232. L2 bytes of a tile of 128 tokens: 4 * 128 * head_dim, for 4 * 128 * 128 * head_dim
 * operations.
 */
#ifndef PKV_CUDA_DENSE_PREFILL_CUH
#define PKV_CUDA_DENSE_PREFILL_CUH

#include "backend/cuda/dense_prefill.h"
#include "backend/cuda/node_hand.cuh"
#include "backend/cuda/node_state.cuh"

#define PKV_PREFILL_ZEROS 4 /* + warpgroup: named barriers of 128 threads */

#ifdef PKV_HAVE_WGMMA
/* What a CTA does. Query row i is token (first_row + i) / group of the request. */
struct pkv_prefill_job {
  int row, kv_head;
  int first_row, rows; /* of the request's query rows */
  int64_t first_token; /* of the request's, in q and out */
  int past;            /* tokens of the request before the new ones */
  int seq_len;
  int begin, end, tiles; /* tokens seen by any of the rows; begin is a multiple of 64 */
};

static __device__ __forceinline__ bool pkv_prefill_find(pkv_prefill_job *j,
                                                        const pkv_prefill_args &a) {
  const pkv_dense_prefill_params &p = a.p;
  j->kv_head = blockIdx.x;
  j->row = blockIdx.y;
  const int first = p.first[j->row], q_len = p.first[j->row + 1] - first;
  const int mine = (q_len * a.group + 127) / 128 - 1 - (int)blockIdx.z;
  /* an int: lengths are, and what the table cannot hold is not read */
  j->seq_len = (int)min((int64_t)p.seq_len[j->row], (int64_t)p.max_pages << a.page_shift);
  if (mine < 0 || first < 0 || first + q_len > p.tokens || j->seq_len < q_len) return false;
  j->first_row = mine * 128;
  j->rows = min(128, q_len * a.group - j->first_row);
  j->first_token = first;
  j->past = j->seq_len - q_len;
  const int first_t = j->first_row / a.group, last_t = (j->first_row + j->rows - 1) / a.group;
  j->end = j->past + last_t + 1;
  j->begin = p.window > 0 ? max(0, j->past + first_t - p.window + 1) & ~63 : 0;
  j->tiles = (j->end - j->begin + 127) / 128;
  return true;
}

/* All tiles of K or of V, by one warp; ids of pages are read two tiles ahead. full: [stages] full,
   [stages] free. */
template <int HD>
static __device__ void pkv_prefill_feed_tiles(const pkv_prefill_args &a, const pkv_prefill_job &j,
                                              const CUtensorMap *map, uint32_t ring, uint32_t full,
                                              int lane) {
  typedef pkv_node_config<HD> C;
  const pkv_cache &cache = a.p.cache;
  const int box = min(cache.page_tokens, PKV_CUDA_BOX_TOKENS), boxes = C::tokens / box;
  const int half = lane / boxes, outside = (int)cache.pages;
  const bool mine = half < C::blocks;
  const int32_t *table = a.p.block_table + (int64_t)j.row * a.p.block_table_stride;
  const uint32_t to = ring + (uint32_t)(half * C::kv_block + lane % boxes * box * 128);
  pkv_ring_at<C::stages> fill = {0, 1}; /* a stage that nobody has filled is free */
  /* Past the end, and where an id is none: zeros, from outside the pool. */
  auto id_of = [&](int token) {
    const int id = mine && token < j.end ? __ldg(table + (token >> a.page_shift)) : outside;
    return (uint32_t)id < (uint32_t)outside ? id : outside;
  };
  int token = j.begin + lane % boxes * box;
  int ids[2] = {id_of(token), id_of(token + C::tokens)};
  for (int i = 0; i < j.tiles; ++i, token += C::tokens) {
    const int page = ids[0];
    ids[0] = ids[1];
    ids[1] = id_of(token + 2 * C::tokens);
    pkv_barrier_wait(full + (C::stages + fill.slot) * 8, fill.lap);
    const uint32_t barrier = full + fill.slot * 8;
    if (lane == 0) pkv_barrier_expect(barrier, C::tile_bytes);
    __syncwarp();
    if (mine)
      pkv_tensor_copy(to + (uint32_t)(fill.slot * C::tile_bytes), map, barrier, half * 64,
                      token & (cache.page_tokens - 1), j.kv_head, page);
    fill.next();
  }
}

/* The query rows, by two warps; zeros past the last. */
template <int HD>
static __device__ void pkv_prefill_feed_query(const pkv_prefill_args &a, const pkv_prefill_job &j,
                                              uint32_t q, uint32_t full, int thread) {
  typedef pkv_node_config<HD> C;
  constexpr int chunks = HD / 8;
#pragma unroll 4
  for (int at = thread; at < 128 * chunks; at += 64) {
    const int i = at / chunks, c = at % chunks, r = j.first_row + i, t = r / a.group;
    const int64_t head = j.kv_head * a.group + r - t * a.group;
    const uint16_t *from =
        (const uint16_t *)a.p.q + (j.first_token + t) * a.p.q_stride + head * HD + c * 8;
    const bool there = i < j.rows;
    pkv_copy16(q + (uint32_t)(c / 8 * C::q_block) + pkv_node_chunk(i, c & 7),
               there ? (const void *)from : a.p.q, there ? 16 : 0);
  }
  pkv_copy_commit();
  pkv_copy_wait<0>();
  pkv_wgmma_see_writes();
  pkv_barrier_arrive(full);
}

/* One multiplying warpgroup: 64 of the rows. */
template <typename MMA, int HD> struct pkv_prefill_consumer : pkv_node_hand<HD> {
  typedef pkv_node_config<HD> C;
  typedef pkv_node_hand<HD> hand;
  using hand::at, hand::barriers, hand::group, hand::k, hand::k_free, hand::k_wait, hand::memory,
      hand::my_turn, hand::stage, hand::thread, hand::v, hand::v_free, hand::v_wait,
      hand::your_turn;
  typedef pkv_node_state<MMA, HD> state_type;
  const pkv_prefill_args &a;
  const pkv_prefill_job &j;

  /* Query row h (0, 1) of the thread, and its token in the request. */
  __device__ __forceinline__ int row_of(int h) const {
    return group * 64 + thread / 32 * 16 + (thread & 31) / 4 + 8 * h;
  }
  __device__ __forceinline__ int token_of(int h) const {
    return (j.first_row + min(row_of(h), j.rows - 1)) / a.group;
  }
  /* Tokens after a row's own, and those before its window. */
  __device__ __forceinline__ void mask(state_type &state, const int last[2], int token) const {
#pragma unroll
    for (int i = 0; i < state_type::logits; ++i) {
      const int t = token + i / 4 * 8 + 2 * (thread & 3) + (i & 1), h = i >> 1 & 1;
      if (t > last[h] || t < state.from[h]) state.logit[i] = -CUDART_INF_F;
    }
  }
  /* In the last tile: V's rows of tokens that are none. Both warpgroups write all of them. */
  __device__ __forceinline__ void clear_values(int tile) const {
    const int token = j.begin + tile * C::tokens;
    if (token + C::tokens <= j.seq_len) return;
    unsigned char *const there = memory + C::v_at + v.slot * C::tile_bytes;
    const int first = (j.seq_len - token) * 8, end = C::tokens * 8; /* 16 bytes each */
    for (int b = 0; b < C::blocks; ++b)
      for (int i = first + thread; i < end; i += 128)
        *(uint4 *)(there + b * C::kv_block + i * 16) = make_uint4(0, 0, 0, 0);
    pkv_wgmma_see_writes();
    asm volatile("bar.sync %0, 128;\n" ::"r"(PKV_PREFILL_ZEROS + group) : "memory");
  }
  /* Row sums become factors: 0 where nothing was seen. */
  __device__ __forceinline__ void store(const state_type &state) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row_of(h) >= j.rows) continue;
      const int r = j.first_row + row_of(h), t = r / a.group;
      const float factor = state.l[h] > 0.0f ? 1.0f / state.l[h] : 0.0f;
      uint16_t *const to = (uint16_t *)a.p.out + (j.first_token + t) * a.p.out_stride +
                           (int64_t)(j.kv_head * a.group + r - t * a.group) * HD + 2 * (thread & 3);
#pragma unroll
      for (int b = 0; b < HD / 8; ++b)
        *(uint32_t *)(to + b * 8) =
            MMA::pack(state.acc[4 * b + 2 * h] * factor, state.acc[4 * b + 2 * h + 1] * factor);
    }
  }
  __device__ __forceinline__ void attend() {
    const float raw = a.p.scale * PKV_LOG2_E, cap = a.p.soft_cap;
    const float scale = cap > 0.0f ? 1.0f : raw;
    const bool window = a.p.window > 0;
    /* The first token that some row of the CTA may not see, and the tile that holds it. */
    const int diagonal = (j.past + j.first_row / a.group + 1 - j.begin) / C::tokens;
    const uint64_t q_at = pkv_wgmma_matrix(at + group * 64 * 128, 0);
    const uint64_t k_at = pkv_wgmma_matrix(at + C::k_at, 0);
    const uint64_t v_at = pkv_wgmma_matrix(at + C::v_at, C::kv_block);
    state_type state;
    float shrink[2];
    int last[2];
    state.reset();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      last[h] = j.past + token_of(h);
      state.from[h] = window ? last[h] - a.p.window + 1 : 0;
    }
    pkv_barrier_wait(barriers + C::q_barriers, 0);
    k_wait();
    state.multiply_keys(q_at, k_at + stage(k.slot));
    state.template wait_logits<0>();
    k_free();
    if (cap > 0.0f) state.apply_cap(raw, cap);
    if (window || diagonal <= 0) mask(state, last, j.begin);
    state.softmax(shrink, scale);
    state.pack();
    for (int i = 1; i < j.tiles; ++i) {
      k_wait();
      my_turn();
      state.multiply_keys(q_at, k_at + stage(k.slot));
      v_wait();
      state.multiply_values(v_at + stage(v.slot));
      your_turn();
      state.template wait_logits<1>();
      k_free();
      if (cap > 0.0f) state.apply_cap(raw, cap);
      if (window || i >= diagonal) mask(state, last, j.begin + i * C::tokens);
      const bool grows = state.softmax(shrink, scale);
      state.stay_before_wait(at + C::sums_at);
      state.wait_values();
      v_free();
      if (grows) state.rescale(shrink);
      state.pack();
    }
    v_wait();
    clear_values(j.tiles - 1);
    state.multiply_values(v_at + stage(v.slot));
    state.wait_values();
    state.add_up();
    store(state);
  }
};
#endif

template <typename MMA, int HD>
__global__ void __launch_bounds__(pkv_node_config<HD>::threads, 1)
    dense_prefill(const __grid_constant__ pkv_prefill_args a,
                  const __grid_constant__ pkv_cuda_tensor_maps maps) {
#ifdef PKV_HAVE_WGMMA
  typedef pkv_node_config<HD> C;
  extern __shared__ __align__(128) unsigned char unaligned[];
  pkv_prefill_job job;
  if (!pkv_prefill_find(&job, a)) return;
  const uint32_t there = (uint32_t)__cvta_generic_to_shared(unaligned);
  const uint32_t memory = (there + 1023u) & ~1023u, barriers = memory + C::barriers_at;
  if (threadIdx.x < C::barriers) {
    const int i = threadIdx.x, query = 4 * C::stages;
    const bool full = i < query ? i % (2 * C::stages) < C::stages : i == query;
    pkv_barrier_init(barriers + i * 8, !full ? 2 * 4 : i == query ? 64 : 1);
    pkv_barrier_open();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < 4) {
    pkv_registers_less<C::feeder_registers>();
    if (warp < 2)
      pkv_prefill_feed_tiles<HD>(a, job, warp ? &maps.v : &maps.k,
                                 memory + (warp ? C::v_at : C::k_at),
                                 barriers + warp * C::v_barriers, threadIdx.x & 31);
    else
      pkv_prefill_feed_query<HD>(a, job, memory, barriers + C::q_barriers, threadIdx.x - 64);
  } else {
    pkv_registers_more<C::consumer_registers>();
    pkv_prefill_consumer<MMA, HD> consumer = {{unaligned + (memory - there),
                                               memory,
                                               barriers,
                                               warp / 4 - 1,
                                               (int)(threadIdx.x & 127),
                                               {0, 0},
                                               {0, 0}},
                                              a,
                                              job};
    if (consumer.group == 1) consumer.your_turn(); /* the first begins */
    consumer.attend();
  }
#endif
}

#define PKV_PREFILL_SET(name, MMA)                                                                 \
  extern "C" const pkv_prefill_set name[2];                                                        \
  const pkv_prefill_set name[2] = {                                                                \
      {(const void *)dense_prefill<MMA, 64>, pkv_node_config<64>::threads,                         \
       pkv_node_config<64>::shared_bytes},                                                         \
      {(const void *)dense_prefill<MMA, 128>, pkv_node_config<128>::threads,                       \
       pkv_node_config<128>::shared_bytes}};

#endif
