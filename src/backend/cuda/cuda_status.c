/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/cuda_status.h"

#include <string.h>

#ifndef PKV_CUDA_TARGETS
#define PKV_CUDA_TARGETS "unknown targets"
#endif

int pkv_cuda_is_fatal(cudaError_t e) {
  switch (e) {
  case cudaErrorECCUncorrectable:
  case cudaErrorIllegalAddress:
  case cudaErrorLaunchTimeout:
  case cudaErrorContextIsDestroyed:
  case cudaErrorAssert:
  case cudaErrorHardwareStackError:
  case cudaErrorIllegalInstruction:
  case cudaErrorMisalignedAddress:
  case cudaErrorInvalidAddressSpace:
  case cudaErrorInvalidPc:
  case cudaErrorLaunchFailure:
    return 1;
  default:
    return 0;
  }
}

static pkv_status status_of(cudaError_t e) {
  switch (e) {
  case cudaErrorMemoryAllocation:
    return PKV_E_NOMEM;
  case cudaErrorNoDevice:
  case cudaErrorInsufficientDriver:
  case cudaErrorStubLibrary:
  case cudaErrorSystemNotReady:
  case cudaErrorSystemDriverMismatch:
  case cudaErrorCompatNotSupportedOnDevice:
  case cudaErrorDevicesUnavailable:
  case cudaErrorNoKernelImageForDevice:
  case cudaErrorUnsupportedPtxVersion:
  case cudaErrorJitCompilerNotFound:
    return PKV_E_UNSUPPORTED;
  default:
    return PKV_E_DEVICE;
  }
}

/* "cudaMalloc(&p, n)": its name has this many characters. */
static int name_length(const char *call) {
  return (int)strcspn(call, "(");
}

pkv_status pkv_cuda_describe(pkv_error *err, cudaError_t e, const char *call,
                             const pkv_cuda_facts *facts) {
  const pkv_status status = status_of(e);
  const int length = name_length(call);
  switch (e) {
  case cudaErrorInsufficientDriver:
  case cudaErrorStubLibrary:
    if (facts->driver == 0)
      return pkv_fail(err, status, "cuda", "%.*s: there is no CUDA driver (libcuda.so.1) here",
                      length, call);
    return pkv_fail(err, status, "cuda",
                    "%.*s: the driver is for CUDA %d.%d, older than this build's %d.%d: update it",
                    length, call, facts->driver / 1000, facts->driver % 1000 / 10,
                    facts->runtime / 1000, facts->runtime % 1000 / 10);
  case cudaErrorNoDevice:
    return pkv_fail(err, status, "cuda",
                    "%.*s: the driver sees no CUDA device (CUDA_VISIBLE_DEVICES may hide it)",
                    length, call);
  case cudaErrorNoKernelImageForDevice:
  case cudaErrorUnsupportedPtxVersion:
  case cudaErrorJitCompilerNotFound:
    return pkv_fail(err, status, "cuda",
                    "%.*s: the device is sm_%d%d, this build's kernels are for %s (%s)", length,
                    call, facts->major, facts->minor, facts->targets, cudaGetErrorName(e));
  case cudaErrorMemoryAllocation:
    if (facts->bytes == 0)
      return pkv_fail(err, status, "cuda",
                      "%.*s: out of memory: the device has no room for this process at all", length,
                      call);
    return pkv_fail(err, status, "cuda", "%.*s: out of memory, %zu of %zu bytes are free", length,
                    call, facts->free_bytes, facts->bytes);
  default:
    return pkv_fail(err, status, "cuda", "%.*s: %s (%s)%s", length, call, cudaGetErrorName(e),
                    cudaGetErrorString(e),
                    pkv_cuda_is_fatal(e) ? "; this process can use the device no more" : "");
  }
}

pkv_cuda_facts pkv_cuda_facts_now(void) {
  pkv_cuda_facts f = {.targets = PKV_CUDA_TARGETS};
  int device = 0;
  if (cudaDriverGetVersion(&f.driver) != cudaSuccess) f.driver = 0;
  if (cudaRuntimeGetVersion(&f.runtime) != cudaSuccess) f.runtime = 0;
  if (f.driver > 0 && cudaGetDevice(&device) == cudaSuccess) {
    if (cudaDeviceGetAttribute(&f.major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess)
      f.major = 0;
    if (cudaDeviceGetAttribute(&f.minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
      f.minor = 0;
    if (cudaMemGetInfo(&f.free_bytes, &f.bytes) != cudaSuccess) f.free_bytes = f.bytes = 0;
  }
  (void)cudaGetLastError();
  return f;
}

pkv_status pkv_cuda_fail(pkv_error *err, cudaError_t e, const char *call) {
  (void)cudaGetLastError();
  const pkv_cuda_facts facts = pkv_cuda_facts_now();
  return pkv_cuda_describe(err, e, call, &facts);
}
