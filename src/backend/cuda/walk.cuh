/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A walk over the pieces of work of one CTA. A piece is a run of tokens of one (row, KV head); the
 * walk moves through it in steps of 64 tokens. The pieces are taken from the last to the first: a
 * row that later CTAs go on with comes first, so that its states are there early, and a row that
 * this CTA ends, and whose states it folds, comes last. Two walks run over the same pieces: one for
 * the arithmetic, one for the copies, some steps ahead. All fields are uniform over the CTA.
 */
#ifndef PKV_CUDA_WALK_CUH
#define PKV_CUDA_WALK_CUH

#include "backend/cuda/cuda_params.h"

#define PKV_WARPS        4
#define PKV_SLICE_TOKENS 16 /* of a warp in a step */
#define PKV_STEP_TOKENS  (PKV_WARPS * PKV_SLICE_TOKENS)

/*
 * The parameters of a plain call, which most are: one query token a row, up to 8 query heads a KV
 * head of a head dimension that the kernel is made for, 16 tokens or more on a page, types and
 * strides as the products want them, and no window, cap, sinks, head scales or batch invariance. A
 * kernel for it is a third smaller, and a launch of 10 us pays for all the code it fetches: 1.5 us.
 */
struct pkv_plain_params : pkv_cuda_decode_params {};

#define PKV_PARAM(type, name, plain)                                                               \
  static __device__ __forceinline__ type pkv_##name(const pkv_cuda_decode_params &p) {             \
    return p.name;                                                                                 \
  }                                                                                                \
  static __device__ __forceinline__ constexpr type pkv_##name(const pkv_plain_params &) {          \
    return plain;                                                                                  \
  }
static __device__ __forceinline__ constexpr bool pkv_is_plain(const pkv_plain_params &) {
  return true;
}
static __device__ __forceinline__ constexpr bool pkv_is_plain(const pkv_cuda_decode_params &) {
  return false;
}
template <typename P> struct pkv_kind_of { static constexpr bool plain = false; };
template <> struct pkv_kind_of<pkv_plain_params> { static constexpr bool plain = true; };
PKV_PARAM(int, q_len, 1)
PKV_PARAM(int, window, 0)
PKV_PARAM(float, soft_cap, 0.0f)
PKV_PARAM(int, runs, 1)
PKV_PARAM(int, aligned, 1)
PKV_PARAM(int, q_is_operand, 1)
PKV_PARAM(int, out_vectors, 1)
PKV_PARAM(int, invariant, 0)
PKV_PARAM(const float *, sinks, nullptr)
PKV_PARAM(const float *, k_head_scale, nullptr)
PKV_PARAM(const float *, v_head_scale, nullptr)

struct pkv_walk {
  int row, head; /* row -1: nothing is left */
  int at, end;   /* tokens of the step that is next, and where the piece ends */
  int len;       /* of the row */
  int next_len;  /* of the row before, read ahead */

  /* Tokens that a step takes, and where this warp's share of them starts. */
  __device__ __forceinline__ int step() const {
    return PKV_STEP_TOKENS;
  }
  __device__ __forceinline__ int share(int warp) const {
    return warp * PKV_SLICE_TOKENS;
  }
};

/* Where a CTA's work starts and ends: from begin up to end, which lies after it on the line. */
struct pkv_work {
  pkv_plan_cursor begin, end;
};

static __device__ __forceinline__ bool pkv_same_segment(const pkv_walk &w,
                                                        const pkv_plan_cursor &c) {
  return w.row == c.row && w.head == c.kv_head;
}

template <typename P> static __device__ __forceinline__ int pkv_first_unit(const P &p, int len) {
  const int token = pkv_window(p) > 0 ? max(0, len - pkv_q_len(p) + 1 - pkv_window(p)) : 0;
  return token / p.unit_tokens;
}

/* Sets the piece of segment (w.row, w.head), or ends the walk where it lies before the work. */
template <typename P>
static __device__ __forceinline__ void pkv_walk_enter(pkv_walk &w, const P &p,
                                                      const pkv_work &work) {
  const bool first = pkv_same_segment(w, work.begin), last = pkv_same_segment(w, work.end);
  if (w.row < work.begin.row || (w.row == work.begin.row && w.head < work.begin.kv_head) ||
      (first && last && work.begin.unit >= work.end.unit)) {
    w.row = -1;
    return;
  }
  const int unit = pkv_first_unit(p, w.len);
  w.at = (unit + (first ? work.begin.unit : 0)) * p.unit_tokens;
  w.end = last ? min(w.len, (unit + work.end.unit) * p.unit_tokens) : w.len;
}

template <typename P>
static __device__ __forceinline__ void pkv_walk_read_ahead(pkv_walk &w, const P &p) {
  if (w.row > 0) w.next_len = __ldg(p.seq_len + w.row - 1);
}

template <typename P>
static __device__ __forceinline__ void pkv_walk_next(pkv_walk &w, const P &p,
                                                     const pkv_work &work) {
  if (--w.head < 0) {
    w.head = p.cache.kv_heads - 1;
    if (--w.row < 0) return;
    w.len = w.next_len;
    pkv_walk_read_ahead(w, p);
  }
  pkv_walk_enter(w, p, work);
}

template <typename P>
static __device__ __forceinline__ void pkv_walk_start(pkv_walk &w, const P &p,
                                                      const pkv_work &work) {
  w.row = work.end.row;
  w.head = work.end.kv_head;
  w.len = work.end.length;
  w.next_len = 0;
  pkv_walk_read_ahead(w, p);
  if (work.end.unit > 0)
    pkv_walk_enter(w, p, work);
  else
    pkv_walk_next(w, p, work);
}

#endif
