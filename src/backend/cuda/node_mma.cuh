/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Route shared, the nodes' kernel (node.cuh) where the compiler has no wgmma: sm_80 to sm_89. One
 * CTA a part, 8 warps of 16 query rows each. All copy tiles of 64 tokens into one ring (cp.async),
 * and each multiplies its rows with all tokens, slice after slice as decode.cuh does (m16n8k16,
 * tokens or head dimensions on the M side). A warp without rows only copies. Checked on an H200,
 * measured nowhere.
 *
 * Shared memory (head_dim 128, 16 bits): 3 stages of 32 KiB. Bytes a tile and piece as in node.cuh.
 */
#ifndef PKV_CUDA_NODE_MMA_CUH
#define PKV_CUDA_NODE_MMA_CUH

#include "backend/cuda/private.cuh"

template <typename KV> struct pkv_node_ring {
  static constexpr int threads = 256, stages = 3, tokens = PKV_STEP_TOKENS, chunks = KV::chunks;
  static constexpr int slice_bytes = PKV_SLICE_TOKENS * chunks * 16;
  static constexpr int stage_bytes = 2 * tokens * chunks * 16; /* slices of K and of V in turn */
  static constexpr int bytes = stages * stage_bytes;
  static constexpr int a_turn = threads / chunks, turns = tokens / a_turn;
  static_assert(a_turn % PKV_SLICE_TOKENS == 0, "a turn is whole slices");
  static constexpr int turn_bytes = a_turn / PKV_SLICE_TOKENS * 2 * slice_bytes;
};

/* What copies a piece's tiles: a thread has a chunk of the head dimension, of `turns` tokens. */
template <typename KV> struct pkv_node_copier {
  typedef pkv_node_ring<KV> R;
  const pkv_cuda_decode_params &p;
  uint64_t policy;
  /* Where this thread's chunk of the next tile goes. It is moved on, not computed from the stage:
     of addresses that it knows to be uniform in part ptxas 13.0 makes copies that do not exist on
     sm_90a (LDGSTS [R + UR]). */
  uint32_t to;
  int stage;
  const int32_t *table;
  int row, head;
  int next, end; /* tokens: of the tile whose ids are in `ids`, and where the piece ends */
  int ids[R::turns];

  __device__ __forceinline__ pkv_node_copier(const pkv_cuda_decode_params &params, uint32_t memory,
                                             const pkv_node_piece &piece)
      : p(params), policy(pkv_read_once()), stage(0) {
    const int of = token_of(0), t = of % PKV_SLICE_TOKENS, c = threadIdx.x % R::chunks;
    to = memory + (uint32_t)(of / PKV_SLICE_TOKENS * 2 * R::slice_bytes +
                             (t * R::chunks + pkv_swizzle<R::chunks>(t, c)) * 16);
    table = p.block_table + (int64_t)piece.table_row * p.block_table_stride;
    row = piece.table_row;
    head = piece.kv_head;
    next = piece.unit_begin * p.unit_tokens;
    end = piece.unit_end * p.unit_tokens;
    look_up();
  }
  static __device__ __forceinline__ int token_of(int turn) {
    return (int)threadIdx.x / R::chunks + turn * R::a_turn;
  }
  __device__ __forceinline__ void look_up() {
    if (next >= end) return;
#pragma unroll
    for (int i = 0; i < R::turns; ++i)
      ids[i] = __ldg(table + min((next + token_of(i)) >> p.page_shift, p.max_pages - 1));
  }
  /* The next tile, if there is one, to the next stage; always a group of copies. */
  __device__ __forceinline__ void push() {
    typedef typename KV::element element;
    const int c = threadIdx.x % R::chunks;
    if (next < end) {
#pragma unroll
      for (int i = 0; i < R::turns; ++i) {
        const int in_page = (next + token_of(i)) & (p.cache.page_tokens - 1);
        const bool inside = (uint32_t)ids[i] < (uint64_t)p.cache.pages;
        if (!inside) atomicMax(p.fault, 1 + row);
        const int64_t page = inside ? ids[i] : 0;
        const element *k = (const element *)p.cache.k + page * p.cache.k_page_stride +
                           in_page * p.cache.k_token_stride + head * p.cache.k_head_stride;
        const element *v = (const element *)p.cache.v + page * p.cache.v_page_stride +
                           in_page * p.cache.v_token_stride + head * p.cache.v_head_stride;
        const uint32_t at = to + (uint32_t)(i * R::turn_bytes);
        pkv_copy16(at, k + c * (16 / KV::bytes), inside ? 16 : 0, policy);
        pkv_copy16(at + R::slice_bytes, v + c * (16 / KV::bytes), inside ? 16 : 0, policy);
      }
      next += R::tokens;
      look_up();
    }
    pkv_copy_commit();
    to += R::stage_bytes;
    if (++stage < R::stages) return;
    stage = 0;
    to -= R::bytes;
  }
};

/* One warp's 16 query rows of a piece, from `first` on: row i of the piece is state i % states of
   rank i / states. */
struct pkv_node_rows {
  int first, count, states; /* count: of the whole piece */
  __device__ __forceinline__ int rank(int i) const {
    return i / states;
  }
  /* The query token of row i. */
  __device__ __forceinline__ int token(int i, int group) const {
    return (i - rank(i) * states) / group;
  }
};

template <typename KV, int HD>
static __device__ __forceinline__ void
pkv_node_load_q(pkv_query<HD, 2> &q, const pkv_cuda_shared_params &s, const pkv_node_piece &piece,
                const pkv_node_rows &rows, int lane) {
  const pkv_cuda_decode_params &p = s.base;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int i = rows.first + n * 8 + lane / 4, t = rows.token(i, p.group);
    const bool there = i < rows.count;
    const int g = i - rows.rank(i) * rows.states - t * p.group;
    const int row = there ? __ldg(&s.view.ranks[piece.first_rank + rows.rank(i)].row) : 0;
    const int64_t at = ((int64_t)row * p.q_len + t) * p.q_token_stride +
                       (int64_t)(piece.kv_head * p.group + g) * p.q_head_stride;
#pragma unroll
    for (int k = 0; k < HD / 16; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = KV::q_pair(k, half, lane);
        uint32_t word = 0;
        if (there)
          word = p.q_is_operand ? pkv_load_ahead((const uint16_t *)p.q + at + d)
                                : pkv_q_convert<typename KV::mma>(p, at + d);
        q.word[n][k][half] = word;
      }
  }
}

/* One slice in shared memory at `from`, whose first token is `base`; see[n][j]: the first token
   that a lane's row may see. */
template <typename KV, int HD>
static __device__ __forceinline__ void
pkv_node_slice(pkv_state<HD, 2> &s, const pkv_query<HD, 2> &q, const pkv_cuda_decode_params &p,
               float scale, uint32_t from, int base, const int see[2][2], int lane) {
  typedef typename KV::mma MMA;
  float c[2][4] = {};
#pragma unroll
  for (int k = 0; k < HD / 16; ++k) {
    uint32_t a[4];
    KV::load_k(a, from, k, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n)
      MMA::mma(c[n], a, q.word[n][k][0], q.word[n][k][1]);
  }
  const float in = scale / (p.soft_cap * PKV_LOG2_E), out = p.soft_cap * PKV_LOG2_E;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      c[n][j] = p.soft_cap > 0.0f ? tanhf(c[n][j] * in) * out : c[n][j] * scale;
      if (base + j / 2 * 8 + lane / 4 < see[n][j & 1]) c[n][j] = -CUDART_INF_F;
    }
  pkv_softmax<HD, 2>(s, c);
  uint32_t weights[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      weights[n][half] = pkv_transpose8(MMA::pack(c[n][half * 2], c[n][half * 2 + 1]));
#pragma unroll
  for (int b = 0; b < HD / 16; ++b) {
    uint32_t a[4];
    KV::load_v(a, from + pkv_node_ring<KV>::slice_bytes, b, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n)
      MMA::mma(s.acc[n][b], a, weights[n][0], weights[n][1]);
  }
}

/* The states of the warp's rows to the piece's slots. */
template <typename KV, int HD>
static __device__ __forceinline__ void pkv_node_leave(pkv_state<HD, 2> &state, float *slots,
                                                      const pkv_node_rows &rows, int lane) {
  pkv_state_finish(state);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = rows.first + n * 8 + 2 * (lane & 3) + j;
      float *to = slots + (int64_t)i * pkv_slot_row<HD>::floats;
      if (i >= rows.count) continue;
#pragma unroll
      for (int b = 0; b < HD / 16; ++b)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          to[KV::dim_of(b, half, lane)] = state.acc[n][b][half * 2 + j];
      if (lane < 4) *(float4 *)(to + HD) = make_float4(state.m[n][j], state.l[n][j], 0.0f, 0.0f);
    }
}

/* A piece by all warps. The ring is free before, and after. */
template <typename KV, int HD>
static __device__ __forceinline__ void pkv_node_attend(const pkv_cuda_shared_params &s,
                                                       const pkv_node_piece &piece, uint32_t ring,
                                                       int warp, int lane) {
  typedef pkv_node_ring<KV> R;
  const pkv_cuda_decode_params &p = s.base;
  const int states = p.q_len * p.group;
  const pkv_node_rows rows = {warp * 16, piece.ranks * states, states};
  pkv_node_copier<KV> copier(p, ring, piece);
#pragma unroll
  for (int i = 0; i < R::stages - 1; ++i)
    copier.push();
  pkv_query<HD, 2> q;
  pkv_node_load_q<KV, HD>(q, s, piece, rows, lane);
  int see[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = min(rows.first + n * 8 + 2 * (lane & 3) + j, rows.count - 1);
      see[n][j] = INT_MIN;
      if (p.window > 0)
        see[n][j] = s.view.ranks[piece.first_rank + rows.rank(i)].length - p.q_len +
                    rows.token(i, p.group) - p.window + 1;
    }
  pkv_state<HD, 2> state;
  pkv_state_reset(state);
  const float scale = pkv_scale_of(p, piece.kv_head);
  const int end = piece.unit_end * p.unit_tokens;
  int slot = 0;
  for (int at = piece.unit_begin * p.unit_tokens; at < end; at += R::tokens) {
    pkv_copy_wait<R::stages - 2>();
    __syncthreads(); /* the tile is there, and all are through with the one before it */
    copier.push();
    if (rows.first < rows.count)
#pragma unroll 1
      for (int i = 0; i < R::tokens / PKV_SLICE_TOKENS; ++i)
        pkv_node_slice<KV, HD>(state, q, p, scale,
                               ring + (uint32_t)(slot * R::stage_bytes + i * 2 * R::slice_bytes),
                               at + i * PKV_SLICE_TOKENS, see, lane);
    slot = slot + 1 == R::stages ? 0 : slot + 1;
  }
  pkv_copy_wait<0>();
  __syncthreads();
  pkv_node_leave<KV, HD>(
      state, s.node_slots + (int64_t)piece.slot * states * pkv_slot_row<HD>::floats, rows, lane);
}

/* The kernel. */
template <typename KV, int HD>
static __device__ __forceinline__ void pkv_node_mma(const pkv_cuda_shared_params &s,
                                                    unsigned char *memory) {
  pkv_grid_wait();
  pkv_grid_release();
  if (pkv_shares_nothing(s)) return;
  pkv_node_piece piece;
  pkv_node_cursor at = s.view.node_cursors[blockIdx.x];
  const pkv_node_cursor end = s.view.node_cursors[blockIdx.x + 1];
  const uint32_t ring = (uint32_t)__cvta_generic_to_shared(memory);
  while (pkv_tree_next_node_piece(&piece, &s.view, &at, &end))
    pkv_node_attend<KV, HD>(s, piece, ring, threadIdx.x / 32, threadIdx.x & 31);
}

#endif
