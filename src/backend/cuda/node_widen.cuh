/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Route shared, e4m3 K and V: the warpgroup of the nodes' kernel (node.cuh) that makes f16 tiles of
 * what the copy engine brought. The products take V across tokens, and only 16-bit types are taken
 * so; f16 holds every e4m3 exactly. It walks over the pieces as the others do.
 *
 * Bytes of shared memory a tile of 128 tokens and side: 16 KiB read, 32 KiB written (head_dim 128),
 * a third of what the products read of it.
 */
#ifndef PKV_CUDA_NODE_WIDEN_CUH
#define PKV_CUDA_NODE_WIDEN_CUH

#include "backend/cuda/node_feed.cuh"

#ifdef PKV_HAVE_WGMMA
/* One tile by 128 threads: 16 elements become two 16-byte chunks of a row's swizzled blocks. Eight
   threads read 128 bytes in a row; those of upper chunks write their second half first, so that
   the eight meet no bank twice. */
template <typename C>
static __device__ __forceinline__ void pkv_node_widen_tile(uint32_t to, uint32_t from, int thread) {
  constexpr int chunks = C::head_dim / 16, count = C::tokens * chunks / 128, batch = 4;
#pragma unroll 1
  for (int i = 0; i < count; i += batch) {
    uint32_t x[batch][4];
#pragma unroll
    for (int b = 0; b < batch; ++b)
      pkv_load_shared16(x[b], from + (uint32_t)(((i + b) * 128 + thread) * 16));
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      const int at = (i + b) * 128 + thread, r = at / chunks, c = at % chunks * 2;
      const bool upper = c >= 8;
      const uint32_t block = to + (uint32_t)(c / 8 * C::kv_block);
      uint32_t lo[4], hi[4];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        pkv_e4m3_to_half(lo[2 * w], lo[2 * w + 1], x[b][w]);
        pkv_e4m3_to_half(hi[2 * w], hi[2 * w + 1], x[b][2 + w]);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t first = upper ? hi[w] : lo[w];
        hi[w] = upper ? lo[w] : hi[w];
        lo[w] = first;
      }
      pkv_store_shared16(block + pkv_node_chunk(r, (c & 7) + upper), lo);
      pkv_store_shared16(block + pkv_node_chunk(r, (c & 7) + !upper), hi);
    }
  }
}

/* One side, K or V: from its ring of the copy engine to its ring of the products. */
template <typename C> struct pkv_node_widener {
  uint32_t from, to;        /* rings */
  uint32_t copied, widened; /* barriers: [stages] full, [stages] free */
  pkv_ring_at<C::copy_stages> in;
  pkv_ring_at<C::stages> out;

  __device__ __forceinline__ void next(int thread) {
    pkv_barrier_wait(copied + in.slot * 8, in.lap);
    pkv_barrier_wait(widened + (C::stages + out.slot) * 8, out.lap ^ 1);
    pkv_node_widen_tile<C>(to + (uint32_t)(out.slot * C::tile_bytes),
                           from + (uint32_t)(in.slot * C::copy_bytes), thread);
    pkv_wgmma_see_writes();
    __syncwarp();
    if ((thread & 31) == 0) {
      pkv_barrier_arrive(widened + out.slot * 8);
      pkv_barrier_arrive(copied + (C::copy_stages + in.slot) * 8);
    }
    in.next();
    out.next();
  }
};

/* All tiles of a part, by 128 threads. */
template <typename C>
static __device__ void pkv_node_widen(const pkv_cuda_shared_params &s, uint32_t memory,
                                      uint32_t barriers, int thread) {
  pkv_node_widener<C> k = {memory + C::copy_k_at,
                           memory + C::k_at,
                           barriers + C::copy_barriers,
                           barriers,
                           {0, 0},
                           {0, 0}};
  pkv_node_widener<C> v = {
      memory + C::copy_v_at,    memory + C::v_at, barriers + C::copy_v_barriers,
      barriers + C::v_barriers, {0, 0},           {0, 0}};
  pkv_node_piece piece;
  pkv_node_cursor at = s.view.node_cursors[blockIdx.x];
  const pkv_node_cursor end = s.view.node_cursors[blockIdx.x + 1];
  while (pkv_tree_next_node_piece(&piece, &s.view, &at, &end)) {
    const int tokens = (piece.unit_end - piece.unit_begin) * s.base.unit_tokens;
    for (int i = 0; i < tokens; i += C::tokens) {
      k.next(thread);
      v.next(thread);
    }
  }
}
#endif

#endif
