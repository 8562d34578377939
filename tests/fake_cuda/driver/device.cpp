// The GPUs: how many, which, how large; what a process may do with them and when.
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

namespace fake {
long setting(const char* name, long otherwise) { return setting_of_gpu(name, 0, otherwise); }

std::string word(const char* name) {
  const char* value = getenv((std::string("FAKE_CUDA_") + name).c_str());
  return value ? value : "";
}

long setting_of_gpu(const char* name, int gpu, long otherwise) {
  std::string value = word(name);
  if (value.empty()) return otherwise;
  size_t at = 0;
  for (; gpu > 0; gpu--) {
    size_t comma = value.find(',', at);
    if (comma == std::string::npos) break;
    at = comma + 1;
  }
  return atol(value.c_str() + at);
}

static std::vector<int> visible() {
  std::vector<int> found;
  int all = (int)setting("GPUS", 1);
  const char* wanted = getenv("CUDA_VISIBLE_DEVICES");
  if (!wanted) {
    for (int i = 0; i < all; i++) found.push_back(i);
    return found;
  }
  for (const char* at = wanted; *at;) {  // as the driver does: the first number without a GPU ends the list
    char* end;
    long gpu = strtol(at, &end, 10);
    if (end == at || gpu < 0 || gpu >= all) break;
    found.push_back((int)gpu);
    at = *end == ',' ? end + 1 : end;
  }
  return found;
}

int gpus() { return (int)visible().size(); }
int physical(int device) { return visible().at(device); }
int capability(int device) { return (int)setting_of_gpu("CAPABILITY", physical(device), 90); }
int driver_version() { return (int)setting("DRIVER", CUDART_VERSION); }
size_t total_bytes(int device) { return (size_t)setting_of_gpu("MEMORY_MB", physical(device), 80000) << 20; }

thread_local int t_device = 0;
static thread_local cudaError_t t_last = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  if (error && error != cudaErrorNotReady) {
    t_last = error;
    if (setting("LOG", 0)) fprintf(stderr, "fake_cuda: process %d: error %d\n", getpid(), error);
  }
  return error;
}

static std::atomic<bool> touched{false}, spoilt{false};

cudaError_t touch(const char* call) {
  if (!touched.exchange(true)) {
    pthread_atfork(nullptr, nullptr, [] { spoilt = true; });
    if (setting("LOG", 0)) fprintf(stderr, "fake_cuda: process %d: first call %s\n", getpid(), call);
  }
  if (driver_version() / 1000 < CUDART_VERSION / 1000) return cudaErrorInsufficientDriver;
  return spoilt ? cudaErrorInitializationError : cudaSuccess;
}

// A name that only one process can hold, and that its end frees.
static bool take_alone(int gpu) {
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "fake_cuda/%s/%d", word("SESSION").c_str(), gpu);
  return bind(fd, (sockaddr*)&name, (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + n)) == 0;
}

static std::mutex contexts;
static std::map<int, cudaError_t>& made = *new std::map<int, cudaError_t>;

bool has_context(int device) {
  std::lock_guard<std::mutex> hold(contexts);
  auto found = made.find(device);
  return found != made.end() && !found->second;
}
cudaError_t need_context() {
  if (gpus() == 0) return cudaErrorNoDevice;
  if (has_context(t_device)) return cudaSuccess;
  std::lock_guard<std::mutex> hold(contexts);
  cudaError_t answer = cudaSuccess;
  if (word("COMPUTE_MODE") == "exclusive" && !take_alone(physical(t_device))) answer = cudaErrorDevicesUnavailable;
  else if (!take_bytes(t_device, setting("CONTEXT_MB", 400) << 20)) answer = cudaErrorMemoryAllocation;
  return made[t_device] = answer;
}

struct Model { int capability; const char* name; int processors; int shared_kb; };
static const Model models[] = {
    {60, "Tesla P100-PCIE-16GB", 56, 48},     {70, "Tesla V100-SXM2-16GB", 80, 96}, {75, "Tesla T4", 40, 64},
    {80, "NVIDIA A100-SXM4-80GB", 108, 163},  {86, "NVIDIA A10G", 80, 99},          {89, "NVIDIA L4", 58, 99},
    {90, "NVIDIA H100 80GB HBM3", 132, 227}, {100, "NVIDIA B200", 148, 227},
};
static Model model(int device) {
  for (const Model& one : models)
    if (one.capability == capability(device)) return one;
  return {capability(device), "NVIDIA GPU", 100, 99};
}
}  // namespace fake
using namespace fake;

extern "C" {
const char* fake_cuda_gpu_name(int device) { return model(device).name; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  TOUCH("cudaGetDeviceCount");
  *count = gpus();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
  TOUCH("cudaSetDevice");
  if (device < 0 || device >= gpus()) return fail(cudaErrorInvalidDevice);
  t_device = device;
  CONTEXT("cudaSetDevice");  // since CUDA 12
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  TOUCH("cudaGetDevice");
  *device = t_device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  TOUCH("cudaGetDeviceProperties");
  if (device < 0 || device >= gpus()) return fail(cudaErrorInvalidDevice);
  Model m = model(device);
  memset(p, 0, sizeof *p);
  strcpy(p->name, m.name);
  p->totalGlobalMem = total_bytes(device);
  p->major = m.capability / 10, p->minor = m.capability % 10;
  p->multiProcessorCount = m.processors;
  p->maxThreadsPerBlock = 1024, p->warpSize = 32, p->maxThreadsPerMultiProcessor = m.capability == 75 ? 1024 : 2048;
  p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = m.shared_kb << 10;
  p->sharedMemPerMultiprocessor = (m.shared_kb + 1) << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->maxBlocksPerMultiProcessor = 32;
  for (int i = 0; i < 3; i++) p->maxGridSize[i] = i ? 65535 : 2147483647, p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
  p->l2CacheSize = 40 << 20, p->memoryBusWidth = 5120, p->textureAlignment = 512;
  p->pciBusID = physical(device) + 1;
  p->uuid.bytes[0] = (char)(1 + physical(device));
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* p, int device) { return cudaGetDeviceProperties(p, device); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int device) {
  TOUCH("cudaDeviceGetAttribute");
  if (device < 0 || device >= gpus()) return fail(cudaErrorInvalidDevice);
  Model m = model(device);
  switch ((int)what) {
    case cudaDevAttrComputeCapabilityMajor: *value = m.capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = m.capability % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = m.processors; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = m.capability == 75 ? 1024 : 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = m.shared_kb << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrComputeMode: *value = word("COMPUTE_MODE") == "exclusive" ? 3 : 0; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* able, int, int) { return *able = 1, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int device) {
  return snprintf(text, n, "0000:%02x:00.0", physical(device) + 1), cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = driver_version(), cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetLastError() {
  cudaError_t last = t_last;
  t_last = cudaSuccess;
  return last;
}
cudaError_t cudaPeekAtLastError() { return t_last; }

struct Text { cudaError_t error; const char *name, *text; };
static const Text texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
};
static Text text_of(cudaError_t error) {
  for (const Text& one : texts)
    if (one.error == error) return one;
  return {error, "cudaErrorUnknown", "an error that the stand-in has no words for"};
}
const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }
const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
}
