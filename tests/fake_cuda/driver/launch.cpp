// Kernels, copies and fills. A kernel computes nothing: it has its name, its place in the stream's order, a record and a
// delay. Copies and fills are real. FAKE_CUDA_KERNEL_DELAY_US and FAKE_CUDA_COPY_DELAY_US are the most that a seeded random
// delay before each takes; FAKE_CUDA_COPY_US is a fixed time for each copy.
#include "fake.h"

#include <cxxabi.h>
#include <time.h>
#include <unordered_map>

namespace fake {
void sleep_us(long us) {
  if (us <= 0) return;
  timespec time{us / 1000000, us % 1000000 * 1000};
  nanosleep(&time, nullptr);
}
static void delay(Stream* stream, long most_us) {
  if (most_us > 0) sleep_us((long)(stream->random() % (u64)(most_us + 1)));
}
bool too_large(size_t bytes) {
  static long most = setting("LARGEST_COPY_MB", 1 << 20) << 20;
  return (long)bytes > most;
}

void launch(const std::string& name, Stream* stream, std::function<void()> work) {
  static long most_us = setting("KERNEL_DELAY_US", 0), takes_us = setting("KERNEL_US", 3);
  uint32_t correlation = next_correlation();
  u64 begin = now();
  bool on = recorded(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  stream->put([=] {
    delay(stream, most_us);
    u64 started = now();
    if (work) work();
    if (!on) return;
    while (now() < started + (u64)takes_us * 1000) {}
    record_kernel(name, stream, correlation, started);
  });
  record_call(correlation, begin, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000);
}

void copy(Stream* stream, void* to, const void* from, size_t bytes, CUpti_ActivityMemcpyKind kind) {
  static long most_us = setting("COPY_DELAY_US", 0), takes_us = setting("COPY_US", 0);
  uint32_t correlation = next_correlation();
  u64 begin = now();
  bool on = recorded(CUPTI_ACTIVITY_KIND_MEMCPY);
  stream->put([=] {
    delay(stream, most_us);
    u64 started = now();
    sleep_us(takes_us);
    if (!too_large(bytes)) memmove(to, from, bytes);
    if (on) record_copy(stream, correlation, started, bytes, kind);
  });
  record_call(correlation, begin, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020);
}

void fill(Stream* stream, void* to, int byte, size_t bytes) {
  uint32_t correlation = next_correlation();
  u64 begin = now();
  bool on = recorded(CUPTI_ACTIVITY_KIND_MEMSET);
  stream->put([=] {
    u64 started = now();
    if (!too_large(bytes)) memset(to, byte, bytes);
    if (on) record_fill(stream, correlation, started, bytes);
  });
  record_call(correlation, begin, CUPTI_RUNTIME_TRACE_CBID_cudaMemsetAsync_v3020);
}

// The host's address of a kernel -> its name, as the wheels register them when they are loaded.
static std::unordered_map<const void*, std::string>& names = *new std::unordered_map<const void*, std::string>;

static std::string readable(const std::string& mangled) {
  int status;
  char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string name = status ? mangled : text;
  free(text);
  return name;
}
// CUDA 13's wheels begin at capability 7.5, CUDA 12's at 5.0.
static bool has_kernels(int device) { return capability(device) >= (CUDART_VERSION >= 13000 ? 75 : 50); }

static cudaError_t launch_function(const void* function, void* stream) {
  CONTEXT("cudaLaunchKernel");
  if (!has_kernels(t_device)) return fail(cudaErrorNoKernelImageForDevice);
  auto found = names.find(function);
  launch(found == names.end() ? "unknown_kernel" : readable(found->second), stream_of(stream));
  return cudaSuccess;
}
struct Configuration { dim3 grid, block; size_t shared; void* stream; };
static thread_local Configuration t_configuration;
}  // namespace fake
using namespace fake;

extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  names[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  t_configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = t_configuration.grid, *block = t_configuration.block, *shared = t_configuration.shared;
  *(void**)stream = t_configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* f) { return *kernel = (cudaKernel_t)f, cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch_function(kernel, stream);
}
cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch_function(f, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch_function(f, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) {
  return launch_function(f, c->stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = gpus() ? capability(t_device) : 90;
  return has_kernels(t_device) ? cudaSuccess : fail(cudaErrorNoKernelImageForDevice);
}
cudaError_t cudaGetSymbolAddress(void** at, const void* symbol) { return *at = const_cast<void*>(symbol), cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  return *n = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  return *n = 2, cudaSuccess;
}
}
