/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A multiplying warpgroup's hold on the shared memory of node_feed.cuh: the rings of K and V, whose
 * stages it waits for and frees, and the turns that two warpgroups take at the tensor cores.
 */
#ifndef PKV_CUDA_NODE_HAND_CUH
#define PKV_CUDA_NODE_HAND_CUH

#include "backend/cuda/node_feed.cuh"

/* Named barriers of the multiplying warpgroups; 0 is the CTA's. */
#define PKV_NODE_TURN  1 /* + warpgroup */
#define PKV_NODE_MERGE 3

#ifdef PKV_HAVE_WGMMA
template <int N> static __device__ __forceinline__ void pkv_registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void pkv_registers_less() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(N));
}
static __device__ __forceinline__ void pkv_named_sync(int id) {
  asm volatile("bar.sync %0, 256;\n" ::"r"(id) : "memory");
}
static __device__ __forceinline__ void pkv_named_arrive(int id) {
  asm volatile("bar.arrive %0, 256;\n" ::"r"(id) : "memory");
}

template <int HD, int BYTES = 2> struct pkv_node_hand {
  typedef pkv_node_config<HD, BYTES> C;
  unsigned char *memory;
  uint32_t at, barriers; /* of memory; of K, V, query */
  int group, thread;
  pkv_ring_at<C::stages> k, v;

  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if ((thread & 31) == 0) pkv_barrier_arrive(barrier);
  }
  __device__ __forceinline__ void k_wait() const {
    pkv_barrier_wait(barriers + k.slot * 8, k.lap);
  }
  __device__ __forceinline__ void v_wait() const {
    pkv_barrier_wait(barriers + C::v_barriers + v.slot * 8, v.lap);
  }
  __device__ __forceinline__ void k_free() {
    arrive(barriers + (C::stages + k.slot) * 8);
    k.next();
  }
  __device__ __forceinline__ void v_free() {
    arrive(barriers + C::v_barriers + (C::stages + v.slot) * 8);
    v.next();
  }
  __device__ __forceinline__ void q_free() const {
    arrive(barriers + C::q_barriers + 8);
  }
  /* Tiles that are not ours are waited for all the same: no wait is a lap ahead of its barrier. */
  __device__ __forceinline__ void k_pass() {
    k_wait();
    k_free();
  }
  __device__ __forceinline__ void v_pass() {
    v_wait();
    v_free();
  }
  /* Turns at the tensor cores: one multiplies while the other is at its softmax. */
  __device__ __forceinline__ void my_turn() const {
    pkv_named_sync(PKV_NODE_TURN + group);
  }
  __device__ __forceinline__ void your_turn() const {
    pkv_named_arrive(PKV_NODE_TURN + 1 - group);
  }
  static __device__ __forceinline__ uint64_t stage(int slot) {
    return (uint64_t)(uint32_t)(slot * (C::tile_bytes >> 4));
  }
};
#endif

#endif
