/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two ways to add up. NCCL behind dlopen sums in place, one call a rank in a group of calls, then
 * each rank norms. Where devices read each other's memory one kernel a rank does all of it, faster
 * (docs/notes/gpu-ranks.md).
 */
#include "backend/cuda/cuda_group.h"

#include <dlfcn.h>
#include <string.h>

#include "backend/cuda/cuda_state.h"
#include "backend/cuda/cuda_symbols.h"
#include "backend/cuda/dense_group.h"
#include "backend/cuda/dense_launch.h"
#include "backend/device_ops.h"
#include "base/clock.h"
#include "base/env.h"

/* NCCL's own numbers. */
#define NCCL_SUCCESS 0
#define NCCL_FLOAT32 7
#define NCCL_SUM     0

/* Ranks end a pass together. After so long alone a rank waits for work that another never got: a
   launch failed. NCCL's kernels would wait for ever. */
#define ALONE_NS 5000000000

typedef struct nccl {
  void *handle;
  int (*init_all)(void **comms, int count, const int *devices);
  int (*destroy)(void *comm);
  int (*abort)(void *comm); /* its kernels end, whatever they wait for */
  int (*begin)(void);
  int (*end)(void);
  int (*all_reduce)(const void *from, void *to, size_t count, int type, int op, void *comm,
                    cudaStream_t stream);
  const char *(*text)(int status);
} nccl;

typedef struct group {
  pkv_allocator allocator;
  int32_t count;
  pkv_executor *executors[PKV_DENSE_GROUP_RANKS];
  nccl lib; /* handle NULL: devices read each other's memory */
  void *comms[PKV_DENSE_GROUP_RANKS];
  int32_t ctas;
  int lost;                                                           /* a rank has failed */
  uint32_t *told[PKV_DENSE_GROUP_RANKS], *met[PKV_DENSE_GROUP_RANKS]; /* as dense_group.h */
} group;

static int device_of(const group *g, int32_t rank) {
  return pkv_cuda_state_of(g->executors[rank])->device;
}

/* ---- NCCL ---- */

static pkv_status load(nccl *lib, pkv_error *err) {
  const pkv_cuda_symbol symbols[] = {
      {"ncclCommInitAll", &lib->init_all}, {"ncclCommDestroy", &lib->destroy},
      {"ncclCommAbort", &lib->abort},      {"ncclGroupStart", &lib->begin},
      {"ncclGroupEnd", &lib->end},         {"ncclAllReduce", &lib->all_reduce},
      {"ncclGetErrorString", &lib->text}};
  /* It stays loaded: threads of its own may still end when the group does. */
  lib->handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  const char *why = lib->handle ? NULL : dlerror();
  PKV_CHECK(err, lib->handle, PKV_E_UNSUPPORTED,
            "devices that cannot read each other's memory need NVIDIA's libnccl.so.2 to add up: %s",
            why ? why : "not found");
  return pkv_cuda_symbols(lib->handle, "libnccl.so.2", symbols, sizeof symbols / sizeof symbols[0],
                          err);
}

#define NCCL(err, g, call)                                                                         \
  do {                                                                                             \
    const int nccl_status = (call);                                                                \
    PKV_CHECK(err, nccl_status == NCCL_SUCCESS, PKV_E_DEVICE, "NCCL: " #call ": %s",               \
              (g)->lib.text(nccl_status));                                                         \
  } while (0)

static pkv_status open_nccl(group *g, pkv_error *err) {
  int devices[PKV_DENSE_GROUP_RANKS];
  PKV_TRY(load(&g->lib, err));
  for (int32_t r = 0; r < g->count; r++)
    devices[r] = device_of(g, r);
  NCCL(err, g, g->lib.init_all(g->comms, g->count, devices));
  return PKV_OK;
}

/* A group of calls is ended whatever happens in it. */
static int reduce(group *g, const pkv_dense_norm_params *p, void *const *streams) {
  int status = g->lib.begin();
  if (status != NCCL_SUCCESS) return status;
  for (int32_t r = 0; r < g->count && status == NCCL_SUCCESS; r++) {
    float *delta;
    memcpy(&delta, &p[r].delta, sizeof delta);
    status = g->lib.all_reduce(delta, delta, (size_t)p[r].m * (size_t)p[r].n, NCCL_FLOAT32,
                               NCCL_SUM, g->comms[r], (cudaStream_t)streams[r]);
  }
  const int ended = g->lib.end();
  return status != NCCL_SUCCESS ? status : ended;
}

static pkv_status norm_by_nccl(group *g, const pkv_dense_norm_params *p, void *const *streams,
                               pkv_error *err) {
  NCCL(err, g, reduce(g, p, streams));
  for (int32_t r = 0; r < g->count; r++) {
    PKV_CUDA(err, cudaSetDevice(device_of(g, r)));
    /* Not dependent: what is ahead of it is NCCL's. */
    PKV_TRY(pkv_cuda_launched(g->executors[r],
                              pkv_dense_launch_norm(&p[r], 0, (cudaStream_t)streams[r]),
                              "dense_norm", (cudaStream_t)streams[r], err));
  }
  return PKV_OK;
}

/* ---- devices that read each other's memory ---- */

static pkv_status can_read(int32_t *can, pkv_executor *const *executors, int32_t count,
                           pkv_error *err) {
  *can = 1;
  for (int32_t r = 0; r < count; r++)
    for (int32_t o = 0; o < count; o++) {
      int here = 1;
      if (o != r)
        PKV_CUDA(err, cudaDeviceCanAccessPeer(&here, pkv_cuda_state_of(executors[r])->device,
                                              pkv_cuda_state_of(executors[o])->device));
      *can = *can && here;
    }
  return PKV_OK;
}

/* Rank's kernels reach the others' memory from now on. */
static pkv_status enable(pkv_executor *const *executors, int32_t count, int32_t rank,
                         pkv_error *err) {
  PKV_CUDA(err, cudaSetDevice(pkv_cuda_state_of(executors[rank])->device));
  for (int32_t o = 0; o < count; o++) {
    if (o == rank) continue;
    const cudaError_t e = cudaDeviceEnablePeerAccess(pkv_cuda_state_of(executors[o])->device, 0);
    if (e == cudaErrorPeerAccessAlreadyEnabled)
      (void)cudaGetLastError();
    else if (e != cudaSuccess)
      return pkv_cuda_fail(err, e, "cudaDeviceEnablePeerAccess");
  }
  return PKV_OK;
}

pkv_status pkv_cuda_group_reaches(int32_t *reaches, pkv_executor *const *executors, int32_t count,
                                  pkv_error *err) {
  const char *by = pkv_env_get(PKV_ENV_CUDA_SUM);
  *reaches = 0;
  if (by && strcmp(by, "nccl") == 0) return PKV_OK;
  PKV_TRY(can_read(reaches, executors, count, err));
  for (int32_t r = 0; r < count && *reaches; r++)
    PKV_TRY(enable(executors, count, r, err));
  return PKV_OK;
}

static pkv_status open_peers(group *g, int32_t rows, pkv_error *err) {
  g->ctas = rows;
  for (int32_t r = 0; r < g->count; r++) {
    /* One a multiprocessor fits however large rows are. */
    const int sms = pkv_cuda_state_of(g->executors[r])->sms;
    if (g->ctas > sms) g->ctas = sms;
  }
  for (int32_t r = 0; r < g->count; r++) {
    void *memory = NULL;
    const size_t ctas = (size_t)g->ctas;
    PKV_TRY(g->executors[r]->device_ops->alloc(
        &memory, g->executors[r], ctas * PKV_DENSE_GROUP_RANKS * sizeof(uint32_t), err));
    g->told[r] = memory;
    PKV_TRY(
        g->executors[r]->device_ops->alloc(&memory, g->executors[r], ctas * sizeof(uint32_t), err));
    g->met[r] = memory;
  }
  return PKV_OK;
}

/* What rank r's kernels are told; norms beside. */
static pkv_dense_group_params params_of(const group *g, int32_t rank) {
  pkv_dense_group_params q;
  memset(&q, 0, sizeof q);
  q.rank = rank;
  q.ranks = g->count;
  q.met = g->met[rank];
  memcpy(q.told, g->told, sizeof q.told);
  return q;
}

static pkv_status norm_by_peers(group *g, const pkv_dense_norm_params *p, void *const *streams,
                                pkv_error *err) {
  for (int32_t r = 0; r < g->count; r++) {
    const int32_t dependent = pkv_cuda_state_of(g->executors[r])->major >= 9;
    pkv_dense_group_params q = params_of(g, r);
    q.norm = p[r];
    for (int32_t o = 0; o < g->count; o++)
      q.deltas[o] = p[o].delta;
    PKV_CUDA(err, cudaSetDevice(device_of(g, r)));
    PKV_TRY(pkv_cuda_launched(
        g->executors[r],
        pkv_dense_launch_group_norm(&q, g->ctas, dependent, (cudaStream_t)streams[r]),
        "dense_group_norm", NULL, err));
  }
  return PKV_OK;
}

pkv_status pkv_cuda_group_gather(void *opaque, void *const *streams, pkv_error *err) {
  group *const g = opaque;
  PKV_CHECK(err, !g->lib.handle, PKV_E_STATE, "the devices do not reach each other's memory");
  for (int32_t r = 0; r < g->count; r++) {
    const pkv_dense_group_params q = params_of(g, r);
    PKV_CUDA(err, cudaSetDevice(device_of(g, r)));
    PKV_TRY(pkv_cuda_launched(g->executors[r], pkv_dense_launch_meet(&q, (cudaStream_t)streams[r]),
                              "dense_meet", NULL, err));
  }
  return PKV_OK;
}

/* ---- groups ---- */

static pkv_status open_group(group *g, int32_t rows, pkv_error *err) {
  int32_t reaches = 0;
  PKV_TRY(pkv_cuda_group_reaches(&reaches, g->executors, g->count, err));
  return reaches ? open_peers(g, rows, err) : open_nccl(g, err);
}

pkv_status pkv_cuda_group_create(void **out, pkv_executor *const *executors, int32_t count,
                                 int32_t rows, pkv_error *err) {
  *out = NULL;
  PKV_CHECK(err, count <= PKV_DENSE_GROUP_RANKS, PKV_E_UNSUPPORTED,
            "%d devices; together at most %d compute", (int)count, PKV_DENSE_GROUP_RANKS);
  group *g = pkv_alloc_zeroed(&executors[0]->allocator, 1, sizeof *g);
  PKV_CHECK(err, g, PKV_E_NOMEM, "no memory for a group of %d devices", (int)count);
  g->allocator = executors[0]->allocator;
  g->count = count;
  memcpy(g->executors, executors, (size_t)count * sizeof *executors);
  /* Who waits for one rank's work alone waits for the others', which is not there yet. */
  for (int32_t r = 0; r < count; r++)
    pkv_cuda_state_of(executors[r])->check = 0;
  const pkv_status status = open_group(g, rows, err);
  if (status != PKV_OK) {
    pkv_cuda_group_destroy(g);
    return status;
  }
  *out = g;
  return PKV_OK;
}

void pkv_cuda_group_destroy(void *opaque) {
  group *const g = opaque;
  const pkv_allocator allocator = g->allocator;
  for (int32_t r = 0; r < g->count; r++) {
    if (g->comms[r]) (void)(g->lost ? g->lib.abort : g->lib.destroy)(g->comms[r]);
    g->executors[r]->device_ops->free(g->executors[r], g->told[r]);
    g->executors[r]->device_ops->free(g->executors[r], g->met[r]);
  }
  if (g->lib.handle) (void)dlclose(g->lib.handle);
  pkv_free(&allocator, g, sizeof *g);
}

pkv_status pkv_cuda_group_norm(void *opaque, const pkv_dense_norm_params *p, void *const *streams,
                               pkv_error *err) {
  group *const g = opaque;
  PKV_CHECK(err, p[0].n % 4 == 0 && p[0].n <= PKV_DENSE_MOST_WIDTH, PKV_E_UNSUPPORTED,
            "rows of %d elements: possible on CUDA are multiples of 4 up to %d", (int)p[0].n,
            PKV_DENSE_MOST_WIDTH);
  return g->lib.handle ? norm_by_nccl(g, p, streams, err) : norm_by_peers(g, p, streams, err);
}

/* How many streams have nothing left to do. */
static pkv_status count_ended(int32_t *count, group *g, void *const *streams, pkv_error *err) {
  *count = 0;
  for (int32_t r = 0; r < g->count; r++) {
    const cudaError_t e = cudaStreamQuery((cudaStream_t)streams[r]);
    g->lost = e != cudaSuccess && e != cudaErrorNotReady;
    if (g->lost) return pkv_cuda_fail(err, e, "cudaStreamQuery");
    *count += e == cudaSuccess;
  }
  (void)cudaGetLastError(); /* that one is not ready is no error */
  return PKV_OK;
}

pkv_status pkv_cuda_group_wait(void *opaque, void *const *streams, pkv_error *err) {
  group *const g = opaque;
  int64_t since = 0;
  PKV_CHECK(err, !g->lost, PKV_E_DEVICE, "a device of the group has failed");
  for (;;) {
    int32_t ended = 0;
    PKV_TRY(count_ended(&ended, g, streams, err));
    if (ended == g->count) return PKV_OK;
    if (ended == 0) continue;
    const int64_t now = pkv_clock_ns();
    if (since == 0) since = now;
    g->lost = now - since > ALONE_NS;
    PKV_CHECK(err, !g->lost, PKV_E_DEVICE, "%d of %d devices have ended, the others wait in vain",
              (int)ended, (int)g->count);
  }
}
