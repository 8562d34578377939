// The driver API as far as torch, NCCL's callers and fsdplab use it beside the runtime.
#include "fake.h"

#include <dlfcn.h>

using namespace fake;
#define DRIVER(call)                                                          \
  if (cudaError_t bad = touch(call))                                          \
  return bad == cudaErrorInsufficientDriver ? CUDA_ERROR_NO_DEVICE : CUDA_ERROR_NOT_INITIALIZED

static int does_nothing() { return 0; }

extern "C" {
CUresult cuInit(unsigned) {
  DRIVER("cuInit");
  return gpus() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
CUresult cuDriverGetVersion(int* version) { return *version = driver_version(), CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) {
  DRIVER("cuDeviceGetCount");
  return *count = gpus(), CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute what, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)what, device);  // the numbers are the same
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return *flags = 0, *active = has_context(device), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  t_device = device;
  *context = (CUcontext)1;
  return (CUresult)need_context();
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  return *text = cudaGetErrorString((cudaError_t)error), CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
    case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
    case CUDA_ERROR_NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    default: *name = "CUDA_ERROR_UNKNOWN";
  }
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *found = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*found) *found = dlsym(RTLD_DEFAULT, name);
  if (!*found) *found = (void*)does_nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(
    const char* name, void** found, unsigned long long flags, cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, found, 0, flags, result);
}
}
