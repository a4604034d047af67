/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A walk over the pieces of work of one CTA. A piece is a run of tokens of one (row, KV head); the
 * walk moves through it in steps of 64. Two walks run over the same pieces: one for the arithmetic,
 * one for the copies, some steps ahead. All fields are uniform over the CTA.
 */
#ifndef PKV_CUDA_WALK_CUH
#define PKV_CUDA_WALK_CUH

#include "backend/cuda/cuda_params.h"

#define PKV_STEP_TOKENS 64

struct pkv_walk {
  int row, head; /* row -1: nothing is left */
  int at, end;   /* tokens of the step that is next, and where the piece ends */
  int len;       /* of the row */
};

/* Where a CTA's work starts and ends. Items are parts of one piece. */
struct pkv_work {
  pkv_plan_cursor begin, end;
};

static __device__ __forceinline__ int pkv_first_unit(const pkv_cuda_decode_params &p, int len) {
  const int token = p.window > 0 ? max(0, len - p.q_len + 1 - p.window) : 0;
  return token / p.unit_tokens;
}

/* Sets the piece of segment (w.row, w.head) that starts at `unit`. */
static __device__ __forceinline__ void pkv_walk_enter(pkv_walk &w, const pkv_cuda_decode_params &p,
                                                      const pkv_work &work, int unit) {
  const bool past =
      w.row > work.end.row ||
      (w.row == work.end.row &&
       (w.head > work.end.kv_head || (w.head == work.end.kv_head && work.end.unit <= unit)));
  if (past) {
    w.row = -1;
    return;
  }
  const int first = pkv_first_unit(p, w.len);
  const bool last = w.row == work.end.row && w.head == work.end.kv_head;
  w.at = (first + unit) * p.unit_tokens;
  w.end = last ? min(w.len, (first + work.end.unit) * p.unit_tokens) : w.len;
}

static __device__ __forceinline__ void pkv_walk_start(pkv_walk &w, const pkv_cuda_decode_params &p,
                                                      const pkv_work &work) {
  w.row = work.begin.row;
  w.head = work.begin.kv_head;
  w.len = work.begin.length;
  pkv_walk_enter(w, p, work, work.begin.unit);
}

static __device__ __forceinline__ void pkv_walk_next(pkv_walk &w, const pkv_cuda_decode_params &p,
                                                     const pkv_work &work) {
  if (++w.head == p.cache.kv_heads) {
    w.head = 0;
    ++w.row;
    w.len = w.row < p.rows ? p.seq_len[w.row] : 0;
  }
  pkv_walk_enter(w, p, work, 0);
}

#endif
