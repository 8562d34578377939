// Device memory: files without a name (memfd), so that another process can map them, as CUDA IPC does. It is ordinary
// memory of the host, which is why tests/fake_cuda/numbers.py can compute in it. Bytes are counted over all processes of
// a session in a small shared file, so that ranks on one GPU share its memory.
#include "fake.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

namespace fake {
struct Block { size_t bytes; int fd, device; };
static std::mutex mutex;
static std::map<u64, Block>& blocks = *new std::map<u64, Block>;
static std::map<u64, size_t>& host_blocks = *new std::map<u64, size_t>;

// ---- who has taken how much of which GPU
struct Taken { std::atomic<int> process; std::atomic<long> bytes[16]; };
static const int most_processes = 256;

static Taken* map_shares() {
  size_t size = sizeof(Taken) * most_processes;
  std::string folder = word("SESSION");
  int fd = folder.empty() ? -1 : open((folder + "/taken").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd >= 0 && ftruncate(fd, (off_t)size)) fd = -1;
  int flags = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
  return (Taken*)mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, 0);
}
static Taken* shares() {
  static Taken* all = map_shares();
  return all;
}
// A process that has ended has given its memory back, also while nobody has collected it (a zombie).
static bool lives(int process) {
  char path[32], line[512];
  if (!process) return false;
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE* file = fopen(path, "r");
  if (!file) return false;
  size_t read = fread(line, 1, sizeof line - 1, file);
  fclose(file);
  line[read] = 0;
  const char* name_end = strrchr(line, ')');
  return name_end && name_end[1] == ' ' && name_end[2] != 'Z' && name_end[2] != 'X';
}
static Taken* own_share() {
  static Taken* own = nullptr;
  for (int i = 0; !own && i < most_processes; i++) {
    Taken& one = shares()[i];
    int before = one.process;
    if (before != getpid() && lives(before)) continue;
    if (one.process.compare_exchange_strong(before, getpid())) {
      for (auto& bytes : one.bytes) bytes = 0;
      own = &one;
    }
  }
  return own;
}
static size_t used_bytes(int device) {
  long sum = setting_of_gpu("TAKEN_MB", physical(device), 0) << 20;  // by a process that is none of ours
  for (int i = 0; i < most_processes; i++)
    if (lives(shares()[i].process)) sum += shares()[i].bytes[physical(device)];
  return (size_t)sum;
}
bool take_bytes(int device, long bytes) {
  Taken* own = own_share();
  if (bytes > 0 && used_bytes(device) + bytes > total_bytes(device)) return false;
  own->bytes[physical(device)] += bytes;
  return true;
}

// ---- blocks
static const size_t page = 2 << 20;

static void* map_block(int fd, size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) return nullptr;
  std::lock_guard<std::mutex> hold(mutex);
  blocks[(u64)at] = {bytes, fd, t_device};
  return at;
}
static void* allocate(size_t bytes) {
  bytes = (bytes + page - 1) / page * page;
  if (!take_bytes(t_device, (long)bytes)) return nullptr;
  int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
  return ftruncate(fd, (off_t)bytes) ? nullptr : map_block(fd, bytes);
}
static bool release(void* at, bool own) {
  Block block;
  {
    std::lock_guard<std::mutex> hold(mutex);
    auto found = blocks.find((u64)at);
    if (found == blocks.end()) return false;
    block = found->second;
    blocks.erase(found);
  }
  if (own) take_bytes(block.device, -(long)block.bytes);
  munmap(at, block.bytes);
  close(block.fd);
  return true;
}
int device_of(const void* pointer) {
  std::lock_guard<std::mutex> hold(mutex);
  auto after = blocks.upper_bound((u64)pointer);
  if (after == blocks.begin()) return -1;
  --after;
  return (u64)pointer < after->first + after->second.bytes ? after->second.device : -1;
}
bool pinned(const void* pointer) {
  std::lock_guard<std::mutex> hold(mutex);
  auto after = host_blocks.upper_bound((u64)pointer);
  if (after == host_blocks.begin()) return false;
  --after;
  return (u64)pointer < after->first + after->second;
}

// ---- another process's block: its process, file descriptor and size
struct Handle { int process, fd, gpu; size_t bytes; };

static bool export_block(void* handle, size_t size, u64 at) {
  std::lock_guard<std::mutex> hold(mutex);
  auto found = blocks.find(at);
  if (found == blocks.end()) return false;
  Handle made{getpid(), found->second.fd, physical(found->second.device), found->second.bytes};
  memset(handle, 0, size);
  memcpy(handle, &made, sizeof made);
  return true;
}
static void* import_block(const void* handle) {
  Handle given;
  memcpy(&given, handle, sizeof given);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", given.process, given.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  return fd < 0 ? nullptr : map_block(fd, given.bytes);
}
static bool ipc_refused() { return word("IPC") == "refused"; }

// ---- copies
static CUpti_ActivityMemcpyKind kind_of(bool to_device, bool from_device) {
  if (to_device && from_device) return CUPTI_ACTIVITY_MEMCPY_KIND_DTOD;
  return to_device ? CUPTI_ACTIVITY_MEMCPY_KIND_HTOD : CUPTI_ACTIVITY_MEMCPY_KIND_DTOH;
}
// From pageable memory the driver takes the bytes at once; into pageable memory the caller waits for them.
static void copy_in_order(void* to, const void* from, size_t bytes, Stream* stream) {
  bool to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
  CUpti_ActivityMemcpyKind kind = kind_of(to_device, from_device);
  if (!from_device && !pinned(from)) {
    auto* taken = new std::string((const char*)from, bytes);
    copy(stream, to, taken->data(), bytes, kind);
    stream->put([taken] { delete taken; });
  } else {
    copy(stream, to, from, bytes, kind);
  }
  if (!to_device && !pinned(to)) stream->wait();
}
}  // namespace fake
using namespace fake;

extern "C" {
cudaError_t cudaMalloc(void** at, size_t bytes) {
  CONTEXT("cudaMalloc");
  return (*at = allocate(bytes)) ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* at) {
  CONTEXT("cudaFree");
  if (!at) return cudaSuccess;
  cudaDeviceSynchronize();
  return release(at, true) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaMallocAsync(void** at, size_t bytes, cudaStream_t) { return cudaMalloc(at, bytes); }
cudaError_t cudaFreeAsync(void* at, cudaStream_t) { return cudaFree(at); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  CONTEXT("cudaMemGetInfo");
  *total = total_bytes(t_device);
  size_t used = used_bytes(t_device);
  *free = used < *total ? *total - used : 0;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  CONTEXT("cudaHostAlloc");
  if (posix_memalign(at, 4096, bytes ? bytes : 1)) return fail(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> hold(mutex);
  host_blocks[(u64)*at] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  CONTEXT("cudaHostRegister");
  std::lock_guard<std::mutex> hold(mutex);
  host_blocks[(u64)at] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* at) {
  std::lock_guard<std::mutex> hold(mutex);
  return host_blocks.erase((u64)at) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaFreeHost(void* at) {
  cudaHostUnregister(at);
  free(at);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* at) {
  TOUCH("cudaPointerGetAttributes");
  memset(a, 0, sizeof *a);
  int device = device_of(at);
  a->device = device < 0 ? t_device : device;
  a->type = device >= 0 ? cudaMemoryTypeDevice : pinned(at) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->devicePointer = a->hostPointer = const_cast<void*>(at);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  CONTEXT("cudaMemcpyAsync");
  return copy_in_order(to, from, bytes, stream_of(stream)), cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return stream_of(nullptr)->wait(), error;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream) {
  CONTEXT("cudaMemsetAsync");
  return fill(stream_of(stream), to, byte, bytes), cudaSuccess;
}
cudaError_t cudaMemset(void* to, int byte, size_t bytes) {
  cudaError_t error = cudaMemsetAsync(to, byte, bytes, nullptr);
  return stream_of(nullptr)->wait(), error;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* at) {
  CONTEXT("cudaIpcGetMemHandle");
  if (ipc_refused()) return fail(cudaErrorNotSupported);
  return export_block(handle, sizeof *handle, (u64)at) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaIpcOpenMemHandle(void** at, cudaIpcMemHandle_t handle, unsigned) {
  CONTEXT("cudaIpcOpenMemHandle");
  if (ipc_refused()) return fail(cudaErrorNotSupported);
  return (*at = import_block(&handle)) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaIpcCloseMemHandle(void* at) {
  cudaDeviceSynchronize();
  return release(at, false) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
// An event that another process may wait for: here the exporter waits itself, and the importer finds nothing to wait for.
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  memset(handle, 0, sizeof *handle);
  return cudaEventSynchronize(event);
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t) { return cudaEventCreate(event); }

CUresult cuMemAlloc_v2(CUdeviceptr* at, size_t bytes) {
  return cudaMalloc((void**)at, bytes) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr at) { return cudaFree((void*)at) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr at) {
  if (ipc_refused()) return CUDA_ERROR_NOT_SUPPORTED;
  return export_block(handle, sizeof *handle, at) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* at, CUipcMemHandle handle, unsigned) {
  if (ipc_refused()) return CUDA_ERROR_NOT_SUPPORTED;
  return (*at = (CUdeviceptr)import_block(&handle)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
  return cudaIpcCloseMemHandle((void*)at) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemHostRegister_v2(void* at, size_t bytes, unsigned) { return (CUresult)cudaHostRegister(at, bytes, 0); }
CUresult cuMemHostUnregister(void* at) { return (CUresult)cudaHostUnregister(at); }
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* at, unsigned) {
  return *device = (CUdeviceptr)at, CUDA_SUCCESS;
}
}
