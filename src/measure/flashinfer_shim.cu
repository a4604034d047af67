/* SPDX-License-Identifier: Apache-2.0 */
/*
 * FlashInfer's fa2 decode kernels, on CUDA cores and on tensor cores, with its planners. As its own
 * Python wrapper calls them: programmatic dependent launch on, no window, no soft cap, no position
 * encoding; plans without the graph mode's padding, since a plan is captured for its own lengths.
 */
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <flashinfer/utils.cuh>

/* PKV_FLASHINFER_OLD, for 0.2.5: other arguments, no dependent launch. */
#ifdef PKV_FLASHINFER_OLD
#define NEWER(...)
#else
#define NEWER(...) , __VA_ARGS__
#define FIRST      true,
#endif

/* Kernels for these group sizes only: each one more is a minute of compiling. */
#undef DISPATCH_GQA_GROUP_SIZE
#define DISPATCH_GQA_GROUP_SIZE(group_size, GROUP_SIZE, ...)                                       \
  if ((group_size) == 4) {                                                                         \
    constexpr size_t GROUP_SIZE = 4;                                                               \
    __VA_ARGS__                                                                                    \
  } else if ((group_size) == 8) {                                                                  \
    constexpr size_t GROUP_SIZE = 8;                                                               \
    __VA_ARGS__                                                                                    \
  } else if ((group_size) == 1) {                                                                  \
    constexpr size_t GROUP_SIZE = 1;                                                               \
    __VA_ARGS__                                                                                    \
  } else {                                                                                         \
    FLASHINFER_ERROR(std::string("group size"));                                                   \
  }

#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/page.cuh>

#include <string>
#include <vector>

#include "pkv/flashinfer.h"

namespace fi = flashinfer;

namespace {

constexpr uint32_t kHeadDim = 128;
constexpr size_t kFloatBytes = size_t{128} << 20, kIntBytes = size_t{8} << 20;
constexpr auto kNoRope = fi::PosEncodingMode::kNone;

using Variant = fi::DefaultAttention<false, false, false, false>;
using DecodeParams = fi::BatchDecodeParams<half, half, half, int32_t>;
using PrefillParams = fi::BatchPrefillPagedParams<half, half, half, int32_t>;
using Paged = fi::paged_kv_t<half, int32_t>;

#ifdef PKV_FLASHINFER_OLD
cudaError_t plan_tensor_cores(void *floats, void *ints, void *pinned, fi::PrefillPlanInfo &plan,
                              int32_t *q, int32_t *kv, const pkv_flashinfer_shape &s, int32_t rows,
                              cudaStream_t stream) {
  return fi::PrefillPlan<int32_t>(floats, kFloatBytes, ints, pinned, kIntBytes, plan, q, kv, rows,
                                  rows, s.query_heads, s.kv_heads, kHeadDim, kHeadDim,
                                  s.page_tokens, false, sizeof(half), stream);
}

cudaError_t attend_tensor_cores(const PrefillParams &p, half *v, float *s, cudaStream_t stream) {
  return fi::BatchPrefillWithPagedKVCacheDispatched<16, kHeadDim, kHeadDim, kNoRope, false,
                                                    fi::MaskMode::kNone, Variant>(p, v, s, stream);
}
#else
cudaError_t plan_tensor_cores(void *floats, void *ints, void *pinned, fi::PrefillPlanInfo &plan,
                              int32_t *q, int32_t *kv, const pkv_flashinfer_shape &s, int32_t rows,
                              cudaStream_t stream) {
  return fi::PrefillPlan<int32_t>(floats, kFloatBytes, ints, pinned, kIntBytes, plan, q, kv, rows,
                                  rows, s.query_heads, s.kv_heads, kHeadDim, kHeadDim,
                                  s.page_tokens, false, sizeof(half), -1, -1, false, 0, 0, false,
                                  stream, sizeof(half));
}

cudaError_t attend_tensor_cores(const PrefillParams &p, half *v, float *s, cudaStream_t stream) {
  return fi::BatchPrefillWithPagedKVCacheDispatched<true, 16, kHeadDim, kHeadDim, kNoRope, false,
                                                    fi::MaskMode::kNone, false, Variant>(
      p, v, s, true, stream);
}
#endif

} // namespace

struct pkv_flashinfer {
  pkv_flashinfer_shape shape;
  int32_t rows; /* of the plan */
  void *float_space, *int_space, *pinned;
  cudaEvent_t uploaded; /* the last plan's copies from the host are over */
  int32_t *indices, *indptr, *last, *q_indptr;
  std::vector<int32_t> host_indptr, host_last, host_q;
  fi::DecodePlanInfo decode;
  fi::PrefillPlanInfo prefill;
};

namespace {

/* An error is handed on once: the next look at the last error does not find it again. */
const char *text_of(cudaError_t e) {
  if (e == cudaSuccess) return nullptr;
  (void)cudaGetLastError();
  return cudaGetErrorString(e);
}

#define TRY_CUDA(call)                                                                             \
  do {                                                                                             \
    if (const char *text_ = text_of(call)) return text_;                                           \
  } while (0)

void destroy(pkv_flashinfer *h) {
  if (!h) return;
  void *const blocks[] = {h->float_space, h->int_space, h->indices,
                          h->indptr,      h->last,      h->q_indptr};
  for (void *block : blocks)
    (void)cudaFree(block);
  (void)cudaFreeHost(h->pinned);
  if (h->uploaded) (void)cudaEventDestroy(h->uploaded);
  delete h;
}

const char *allocate(pkv_flashinfer *h) {
  const size_t rows = static_cast<size_t>(h->shape.most_rows);
  const size_t page_bytes = static_cast<size_t>(h->shape.most_pages) * sizeof(int32_t);
  TRY_CUDA(cudaMalloc(&h->float_space, kFloatBytes));
  TRY_CUDA(cudaMalloc(&h->int_space, kIntBytes));
  TRY_CUDA(cudaMallocHost(&h->pinned, kIntBytes));
  TRY_CUDA(cudaMalloc(reinterpret_cast<void **>(&h->indptr), (rows + 1) * sizeof(int32_t)));
  TRY_CUDA(cudaMalloc(reinterpret_cast<void **>(&h->q_indptr), (rows + 1) * sizeof(int32_t)));
  TRY_CUDA(cudaMalloc(reinterpret_cast<void **>(&h->last), rows * sizeof(int32_t)));
  TRY_CUDA(cudaMalloc(reinterpret_cast<void **>(&h->indices), page_bytes));
  TRY_CUDA(cudaMemset(h->float_space, 0, kFloatBytes));
  TRY_CUDA(cudaEventCreateWithFlags(&h->uploaded, cudaEventDisableTiming));
  h->host_indptr.resize(rows + 1);
  h->host_q.resize(rows + 1);
  h->host_last.resize(rows);
  for (size_t row = 0; row <= rows; row++)
    h->host_q[row] = static_cast<int32_t>(row);
  TRY_CUDA(cudaMemcpy(h->q_indptr, h->host_q.data(), (rows + 1) * sizeof(int32_t),
                      cudaMemcpyHostToDevice));
  return text_of(cudaStreamSynchronize(nullptr)); /* no other stream waits for this one */
}

const char *create(pkv_flashinfer **out, const pkv_flashinfer_shape *s) {
  *out = nullptr;
  if (s->head_dim != static_cast<int32_t>(kHeadDim)) return "head_dim is not 128";
  if (s->most_rows < 1 || s->most_pages < 1) return "no rows or no pages";
  if (s->kv_heads < 1 || s->query_heads % s->kv_heads != 0 || s->page_tokens < 1)
    return "heads or page_tokens make no sense";
  const int32_t group = s->query_heads / s->kv_heads;
  if (s->tensor_cores ? group > 16 : group != 1 && group != 4 && group != 8)
    return "no kernel for this many query heads a KV head";
  auto *h = new (std::nothrow) pkv_flashinfer();
  if (!h) return "out of memory";
  h->shape = *s;
  const char *text = allocate(h);
  if (text)
    destroy(h);
  else
    *out = h;
  return text;
}

/* A block a row. */
__global__ void list_pages(int32_t *indices, const int32_t *indptr, const int32_t *table,
                           int64_t stride, int64_t pages) {
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t first = indptr[row], count = indptr[row + 1] - first;
  for (int32_t p = static_cast<int32_t>(threadIdx.x); p < count; p += blockDim.x) {
    const int32_t id = table[row * stride + p];
    indices[first + p] = id >= 0 && id < pages ? id : 0;
  }
}

const char *list(pkv_flashinfer *h, const int32_t *table, int64_t stride, int64_t pages,
                 void *stream) {
  if (h->rows == 0) return "a list of pages before the plan";
  list_pages<<<h->rows, 256, 0, static_cast<cudaStream_t>(stream)>>>(h->indices, h->indptr, table,
                                                                     stride, pages);
  return text_of(cudaGetLastError());
}

template <uint32_t GROUP> cudaError_t estimate_and_plan(pkv_flashinfer *h, cudaStream_t stream) {
  const pkv_flashinfer_shape &s = h->shape;
  auto estimate = fi::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<GROUP, kHeadDim, kNoRope,
                                                                          Variant, DecodeParams>;
  return fi::DecodePlan<kHeadDim, kNoRope, Variant, DecodeParams>(
      h->float_space, kFloatBytes, h->int_space, h->pinned, kIntBytes, h->decode,
      h->host_indptr.data(), h->rows, s.query_heads, s.page_tokens, false, stream, estimate);
}

const char *make_plan(pkv_flashinfer *h, int32_t rows, const int32_t *seq_len,
                      cudaStream_t stream) {
  const pkv_flashinfer_shape &s = h->shape;
  const size_t count = static_cast<size_t>(rows);
  if (rows < 1 || rows > s.most_rows) return "more rows than the handle was made for, or none";
  for (int32_t row = 0; row < rows; row++) {
    if (seq_len[row] < 1) return "a row without tokens";
    const int32_t pages = (seq_len[row] - 1) / s.page_tokens + 1;
    if (h->host_indptr[row] > s.most_pages - pages)
      return "more pages than the handle was made for";
    h->host_indptr[row + 1] = h->host_indptr[row] + pages;
    h->host_last[row] = seq_len[row] - (pages - 1) * s.page_tokens;
  }
  h->rows = rows;
  TRY_CUDA(cudaMemcpyAsync(h->indptr, h->host_indptr.data(), (count + 1) * sizeof(int32_t),
                           cudaMemcpyHostToDevice, stream));
  TRY_CUDA(cudaMemcpyAsync(h->last, h->host_last.data(), count * sizeof(int32_t),
                           cudaMemcpyHostToDevice, stream));
  if (s.tensor_cores)
    return text_of(plan_tensor_cores(h->float_space, h->int_space, h->pinned, h->prefill,
                                     h->host_q.data(), h->host_indptr.data(), s, rows, stream));
  switch (s.query_heads / s.kv_heads) {
  case 1:
    return text_of(estimate_and_plan<1>(h, stream));
  case 4:
    return text_of(estimate_and_plan<4>(h, stream));
  default:
    return text_of(estimate_and_plan<8>(h, stream));
  }
}

const char *caught_plan(pkv_flashinfer *h, int32_t rows, const int32_t *seq_len,
                        cudaStream_t stream) {
  try {
    return make_plan(h, rows, seq_len, stream);
  } catch (...) {
    return "FlashInfer's planner refused";
  }
}

/*
 * The planner writes into pinned memory and leaves a copy of it on its way: what the plan before
 * left there must have been read. A captured copy would read at each replay what is there then.
 */
const char *plan(pkv_flashinfer *h, int32_t rows, const int32_t *seq_len, void *stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture;
  h->rows = 0;
  TRY_CUDA(cudaStreamIsCapturing(s, &capture));
  if (capture != cudaStreamCaptureStatusNone) return "a plan is not captured: make it before";
  TRY_CUDA(cudaEventSynchronize(h->uploaded));
  const char *text = caught_plan(h, rows, seq_len, s);
  const char *late = text_of(cudaEventRecord(h->uploaded, s)); /* a refused one may copy, too */
  if (text == nullptr) text = late;
  if (text != nullptr) h->rows = 0;
  return text;
}

Paged paged(const pkv_flashinfer *h, const pkv_flashinfer_call *c) {
  const pkv_flashinfer_shape &s = h->shape;
  const bool hnd = c->token_stride < c->head_stride;
  const int64_t strides[] = {c->page_stride, hnd ? c->head_stride : c->token_stride,
                             hnd ? c->token_stride : c->head_stride};
  return Paged(s.kv_heads, s.page_tokens, kHeadDim, h->rows,
               hnd ? fi::QKVLayout::kHND : fi::QKVLayout::kNHD, static_cast<half *>(c->k),
               static_cast<half *>(c->v), strides, h->indices, h->indptr, h->last);
}

template <typename Params>
void common(Params *p, const pkv_flashinfer *h, const pkv_flashinfer_call *c) {
  p->q = static_cast<half *>(const_cast<void *>(c->q));
  p->o = static_cast<half *>(c->out);
  p->paged_kv = paged(h, c);
  p->num_qo_heads = h->shape.query_heads;
  p->q_stride_n = h->shape.query_heads * h->shape.head_dim;
  p->q_stride_h = h->shape.head_dim;
  p->window_left = -1;
  p->sm_scale = c->scale;
}

template <typename T> T *at(void *base, int64_t offset) {
  return fi::GetPtrFromBaseOffset<T>(base, offset);
}

const char *run_cores(pkv_flashinfer *h, const pkv_flashinfer_call *c, cudaStream_t stream) {
  const fi::DecodePlanInfo &i = h->decode;
  DecodeParams p;
  common(&p, h, c);
  p.request_indices = at<int32_t>(h->int_space, i.request_indices_offset);
  p.kv_tile_indices = at<int32_t>(h->int_space, i.kv_tile_indices_offset);
  p.o_indptr = at<int32_t>(h->int_space, i.o_indptr_offset);
  p.kv_chunk_size_ptr = at<int32_t>(h->int_space, i.kv_chunk_size_ptr_offset);
  p.padded_batch_size = static_cast<uint32_t>(i.padded_batch_size);
  half *v = i.split_kv ? at<half>(h->float_space, i.v_offset) : nullptr;
  float *s = i.split_kv ? at<float>(h->float_space, i.s_offset) : nullptr;
  return text_of(fi::BatchDecodeWithPagedKVCacheDispatched<kHeadDim, kNoRope, Variant>(
      p, v, s NEWER(true), stream));
}

const char *run_tensor_cores(pkv_flashinfer *h, const pkv_flashinfer_call *c, cudaStream_t stream) {
  const fi::PrefillPlanInfo &i = h->prefill;
  PrefillParams p;
  common(&p, h, c);
  if (i.cta_tile_q != 16) return "a tile of query rows that is not 16";
  p.q_indptr = h->q_indptr;
  p.group_size = fi::uint_fastdiv(h->shape.query_heads / h->shape.kv_heads);
  p.request_indices = at<int32_t>(h->int_space, i.request_indices_offset);
  p.qo_tile_indices = at<int32_t>(h->int_space, i.qo_tile_indices_offset);
  p.kv_tile_indices = at<int32_t>(h->int_space, i.kv_tile_indices_offset);
  p.o_indptr = at<int32_t>(h->int_space, i.o_indptr_offset);
  p.kv_chunk_size_ptr = at<int32_t>(h->int_space, i.kv_chunk_size_ptr_offset);
  p.padded_batch_size = static_cast<uint32_t>(i.padded_batch_size);
  p.max_total_num_rows = static_cast<uint32_t>(i.total_num_rows);
  half *v = nullptr;
  float *s = nullptr;
  if (i.split_kv) {
    p.merge_indptr = at<int32_t>(h->int_space, i.merge_indptr_offset);
    v = at<half>(h->float_space, i.v_offset);
    s = at<float>(h->float_space, i.s_offset);
  }
  return text_of(attend_tensor_cores(p, v, s, stream));
}

const char *run(pkv_flashinfer *h, const pkv_flashinfer_call *c, void *stream) {
  try {
    return h->shape.tensor_cores ? run_tensor_cores(h, c, static_cast<cudaStream_t>(stream))
                                 : run_cores(h, c, static_cast<cudaStream_t>(stream));
  } catch (...) {
    return "FlashInfer refused the call";
  }
}

const pkv_flashinfer_api api = {
    PKV_FLASHINFER_ABI, PKV_FLASHINFER_VERSION, create, destroy, plan, list, run};

} // namespace

extern "C" __attribute__((visibility("default"))) const pkv_flashinfer_api *
pkv_flashinfer_module(void) {
  return &api;
}
