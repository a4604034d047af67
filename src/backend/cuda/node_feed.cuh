/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Route shared, the feeding of the nodes' kernel (node.cuh): its shared memory, its barriers, and
 * the warps that bring tiles of K and V and the query rows. They walk over the pieces of their part
 * as the multiplying warpgroups do, as far ahead as the ring lets them.
 */
#ifndef PKV_CUDA_NODE_FEED_CUH
#define PKV_CUDA_NODE_FEED_CUH

#include "backend/cuda/private.cuh"
#include "backend/cuda/tensor_map.h"
#include "backend/cuda/wgmma.cuh"

/*
 * Barriers: full and free of K [stages each], of V, of the query. Matrices lie in blocks of 64 head
 * dimensions, 128 bytes a row. BYTES 1: K and V are e4m3; the copy engine brings them into rings of
 * their own, as they are, and one warpgroup more (node_widen.cuh) makes f16 of them.
 */
template <int HD, int BYTES = 2> struct pkv_node_config {
  static constexpr bool widens = BYTES == 1;
  static constexpr int head_dim = HD, tokens = 128, rows = 128, threads = (widens ? 4 : 3) * 128;
  static constexpr int stages = widens ? 2 : HD > 64 ? 3 : 5;
  static constexpr int blocks = HD / 64, q_block = rows * 128, kv_block = tokens * 128;
  static constexpr int tile_bytes = blocks * kv_block;
  static constexpr int k_at = blocks * q_block, v_at = k_at + stages * tile_bytes;
  static constexpr int raw_at = v_at + stages * tile_bytes, raw_stages = widens ? 2 : 0;
  static constexpr int sums_at = raw_at + 2 * raw_stages * tokens * HD; /* of a second half: m, l */
  static constexpr int barriers_at = sums_at + 512, tile_barriers = 4 * stages + 2;
  static constexpr int barriers = tile_barriers + 4 * raw_stages; /* those of e4m3 K and V behind */
  static constexpr int shared_bytes = 1024 + barriers_at + barriers * 8;
  static constexpr int v_barriers = 2 * stages * 8, q_barriers = 4 * stages * 8;
  static constexpr int raw_barriers = tile_barriers * 8;
  static constexpr int feeder_registers = 40, consumer_registers = widens ? 216 : 232;
  /* What the copy engine brings: a ring of `copy_stages` tiles of `copy_blocks` blocks. */
  static constexpr int copy_blocks = widens ? 1 : blocks, copy_row = widens ? HD : 128;
  static constexpr int copy_bytes = copy_blocks * tokens * copy_row;
  static constexpr int copy_stages = widens ? raw_stages : stages;
  static constexpr int copy_k_at = widens ? raw_at : k_at;
  static constexpr int copy_v_at = widens ? raw_at + raw_stages * copy_bytes : v_at;
  static constexpr int copy_barriers = widens ? raw_barriers : 0;
  static constexpr int copy_v_barriers = copy_barriers + 2 * copy_stages * 8;
};

/* A place in a ring, and the parity of its lap. */
template <int STAGES> struct pkv_ring_at {
  int slot;
  uint32_t lap;
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) {
      slot = 0;
      lap ^= 1;
    }
  }
};

/* Byte of 16-byte chunk c of row r in a block of 128-byte rows. */
static __device__ __forceinline__ uint32_t pkv_node_chunk(int r, int c) {
  return (uint32_t)(r * 128 + ((c ^ (r & 7)) << 4));
}

#ifdef PKV_HAVE_WGMMA
static __device__ __forceinline__ void pkv_tensor_prefetch(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}
static __device__ __forceinline__ void pkv_tensor_copy(uint32_t to, const CUtensorMap *map,
                                                       uint32_t barrier, int dim, int token,
                                                       int head, int page) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(to),
               "l"(map), "r"(barrier), "r"(dim), "r"(token), "r"(head), "r"(page)
               : "memory");
}
/* The same, for what nobody else reads. */
static __device__ __forceinline__ void pkv_tensor_copy(uint32_t to, const CUtensorMap *map,
                                                       uint32_t barrier, int dim, int token,
                                                       int head, int page, uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(to),
               "l"(map), "r"(barrier), "r"(dim), "r"(token), "r"(head), "r"(page), "l"(policy)
               : "memory");
}
/* All tiles of K or of V of a part, by one warp; ids of pages are read three tiles ahead. full:
   [copy_stages] full, [copy_stages] free. */
template <typename C>
static __device__ void pkv_node_feed_tiles(const pkv_cuda_shared_params &s, const CUtensorMap *map,
                                           uint32_t ring, uint32_t full, int lane) {
  const pkv_cuda_decode_params &p = s.base;
  const int box = min(p.cache.page_tokens, PKV_CUDA_BOX_TOKENS), boxes = C::tokens / box;
  const int half = lane / boxes, token_of = lane % boxes * box, outside = (int)p.cache.pages;
  const bool mine = half < C::copy_blocks;
  const uint32_t to = ring + (uint32_t)((half * C::tokens + token_of) * C::copy_row);
  pkv_ring_at<C::copy_stages> fill = {0, 1}; /* a stage that nobody has filled is free */
  bool waited = false;                       /* for the kernel ahead */
  const uint64_t policy = pkv_read_once();
  pkv_node_piece piece;
  pkv_node_cursor at = s.view.node_cursors[blockIdx.x];
  const pkv_node_cursor end = s.view.node_cursors[blockIdx.x + 1];
  while (pkv_tree_next_node_piece(&piece, &s.view, &at, &end)) {
    /* Tiles of a node of one tile of query rows are read once: plan, tables and states, which all
       layers read, stay in L2 instead. */
    const bool once = s.view.nodes[piece.node].tiles == 1;
    const int32_t *table = p.block_table + (int64_t)piece.table_row * p.block_table_stride;
    const int last = piece.unit_end * p.unit_tokens, first = piece.unit_begin * p.unit_tokens;
    const int odd = (last - first) % C::tokens; /* 0 or 64: of the first tile */
    const int missing = odd ? C::tokens - odd : 0;
    /* Boxes past a half tile's tokens read zeros. */
    auto id_of = [&](int token) {
      return mine && token < last ? __ldg(table + min(token >> p.page_shift, p.max_pages - 1))
                                  : outside;
    };
    int token = first + token_of; /* of tile 0; of tile 1: 128 on, less what is missing */
    const bool zeros = missing && token_of >= odd; /* in tile 0 */
    int ids[3] = {zeros ? outside : id_of(token), id_of(token + C::tokens - missing),
                  id_of(token + 2 * C::tokens - missing)};
    for (int tile = first - missing; tile < last; tile += C::tokens) {
      int page = ids[0];
      if ((uint32_t)page >= (uint32_t)outside && mine && !(zeros && tile < first)) {
        atomicMax(p.fault, 1 + piece.table_row);
        page = outside; /* the result is of no use any more */
      }
      /* All rows of the node reach up to `last`: their newest tokens lie at most q_len before. */
      if (!waited && (p.wait_tokens || tile + C::tokens + p.q_len > last)) {
        pkv_grid_wait();
        waited = true;
      }
      pkv_barrier_wait(full + (C::copy_stages + fill.slot) * 8, fill.lap);
      const uint32_t barrier = full + fill.slot * 8;
      if (lane == 0) pkv_barrier_expect(barrier, C::copy_bytes);
      __syncwarp();
      const uint32_t stage = to + (uint32_t)(fill.slot * C::copy_bytes);
      const int in_page = token & (p.cache.page_tokens - 1);
      if (mine && once)
        pkv_tensor_copy(stage, map, barrier, half * 64, in_page, piece.kv_head, page, policy);
      else if (mine)
        pkv_tensor_copy(stage, map, barrier, half * 64, in_page, piece.kv_head, page);
      fill.next();
      token += tile < first ? odd : C::tokens;
      ids[0] = ids[1];
      ids[1] = ids[2];
      ids[2] = id_of(token + 2 * C::tokens);
    }
  }
}

/* Where query row i of a piece begins: rank first + i / states, state i % states. NULL: none. */
static __device__ __forceinline__ const uint16_t *
pkv_node_query_row(const pkv_cuda_shared_params &s, const pkv_node_piece &piece, int i) {
  const pkv_cuda_decode_params &p = s.base;
  const int states = p.q_len * p.group, rank = i / states;
  const int t = (i - rank * states) / p.group, g = i - rank * states - t * p.group;
  if (rank >= piece.ranks) return NULL;
  const int row = __ldg(&s.view.ranks[piece.first_rank + rank].row);
  return (const uint16_t *)p.q + ((int64_t)row * p.q_len + t) * p.q_token_stride +
         (int64_t)(piece.kv_head * p.group + g) * p.q_head_stride;
}

static __device__ __forceinline__ void pkv_store_shared16(uint32_t shared, const uint32_t x[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
static __device__ __forceinline__ void pkv_load_shared16(uint32_t x[4], uint32_t shared) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}
/* Eight bf16 as f16, to shared memory. */
static __device__ __forceinline__ void pkv_node_narrow_query(uint32_t to, const uint16_t *from) {
  uint32_t x[4] = {0, 0, 0, 0}, y[4];
  if (from) *(uint4 *)x = __ldg((const uint4 *)from);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&x[i]));
    y[i] = pkv_half_type::pack(pair.x, pair.y);
  }
  pkv_store_shared16(to, y);
}

/* The query rows of all pieces, by two warps: a lane looks its rows up before there is room, then
   lanes copy row by row. Zeros past the rows. */
template <typename C>
static __device__ void pkv_node_feed_query(const pkv_cuda_shared_params &s, uint32_t q,
                                           uint32_t full, int thread) {
  constexpr int chunks = C::head_dim / 8, a_turn = 32 / chunks;
  const int lane = thread & 31, c = lane % chunks, first = thread & 32;
  uint32_t parity = 1;
  bool waited = false; /* for the kernel ahead, which may still be writing the query */
  pkv_node_piece piece;
  pkv_node_cursor at = s.view.node_cursors[blockIdx.x];
  const pkv_node_cursor end = s.view.node_cursors[blockIdx.x + 1];
  while (pkv_tree_next_node_piece(&piece, &s.view, &at, &end)) {
    const int halves = piece.ranks * s.base.q_len * s.base.group > 64 ? 2 : 1;
    uint64_t rows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      rows[h] = (uint64_t)pkv_node_query_row(s, piece, h * 64 + thread);
    if (!waited) {
      pkv_grid_wait();
      pkv_grid_release();
      waited = true;
    }
    pkv_barrier_wait(full + 8, parity);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (h == halves) break;
#pragma unroll 4
      for (int i = 0; i < 32; i += a_turn) {
        const int from = i + lane / chunks, r = h * 64 + first + from;
        const uint64_t row = __shfl_sync(0xffffffffu, rows[h], from);
        const uint32_t to = q + (uint32_t)(c / 8 * C::q_block) + pkv_node_chunk(r, c & 7);
        const uint16_t *const of = (const uint16_t *)row + c * 8;
        if (!C::widens || s.base.q_is_operand)
          pkv_copy16(to, row ? of : (const uint16_t *)s.base.q, row ? 16 : 0);
        else
          pkv_node_narrow_query(to, row ? of : NULL);
      }
    }
    pkv_copy_commit();
    pkv_copy_wait<0>();
    pkv_wgmma_see_writes();
    pkv_barrier_arrive(full);
    parity ^= 1;
  }
  if (waited) return;
  /* The kernel behind reads what the one ahead has written: all CTAs wait for that. Where nothing
     is shared it waits for this kernel's end before it does, and one CTA makes that late enough. */
  const bool nothing = pkv_shares_nothing(s);
  if (nothing) pkv_grid_release();
  if (!nothing || blockIdx.x == 0) pkv_grid_wait();
}
#endif

#endif
