// What the files of the stand-in share: settings, the life of the process, streams, launches and CUPTI records.
#pragma once
// The half-precision headers need a real nvcc; no function here uses more of these types than their size.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
struct __half { unsigned short x; };
struct __nv_bfloat16 { unsigned short x; };
struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __half half;
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti.h>
#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace fake {
using u64 = unsigned long long;

// ---- settings (device.cpp): environment variables that begin with FAKE_CUDA_
long setting(const char* name, long otherwise);               // setting("GPUS", 1)
long setting_of_gpu(const char* name, int gpu, long otherwise);  // one number for all, or "0,78000": one a GPU
std::string word(const char* name);                           // "" where it is not set

// ---- the GPUs (device.cpp)
int gpus();                    // those that CUDA_VISIBLE_DEVICES leaves
int physical(int device);      // the number of a visible one among all
int capability(int device);    // 90
int driver_version();          // 13000
size_t total_bytes(int device);
extern thread_local int t_device;

// The first call of a process. A child that was forked afterwards gets an error for ever, as from the real driver.
cudaError_t touch(const char* call);
// A context on the current GPU: it takes memory, and where the compute mode is exclusive only one process gets it.
cudaError_t need_context();
bool has_context(int device);
cudaError_t fail(cudaError_t error);  // remembers the error for cudaGetLastError

#define TOUCH(call) if (cudaError_t bad = fake::touch(call)) return fake::fail(bad)
#define CONTEXT(call) TOUCH(call); if (cudaError_t bad = fake::need_context()) return fake::fail(bad)

// ---- memory (memory.cpp)
int device_of(const void* pointer);   // -1: not device memory
bool pinned(const void* pointer);
bool take_bytes(int device, long bytes);  // accounts for memory over all processes; negative gives it back

// ---- streams (streams.cpp): one thread each, which runs what was put on it in order
struct Stream {
  int device, priority, id;
  std::mutex mutex;
  std::condition_variable more, idle;
  std::deque<std::function<void()>> queue;
  bool busy = false, started = false;
  std::mt19937_64 random;

  void put(std::function<void()> work);
  void wait();
  bool done();

 private:
  void run();
};
Stream* stream_of(void* handle);  // null: the default stream of the current GPU
std::vector<Stream*> all_streams();

// ---- launches (launch.cpp)
// Puts a kernel on a stream: a record, a seeded delay, then `work`.
void launch(const std::string& name, Stream* stream, std::function<void()> work = nullptr);
void copy(Stream* stream, void* to, const void* from, size_t bytes, CUpti_ActivityMemcpyKind kind);
void fill(Stream* stream, void* to, int byte, size_t bytes);
void sleep_us(long us);
bool too_large(size_t bytes);  // more than LARGEST_COPY_MB: memory stays as it is

// ---- records for the profiler (records.cpp)
bool recorded(CUpti_ActivityKind kind);
u64 now();
uint32_t next_correlation();
void record_call(uint32_t correlation, u64 begin, CUpti_CallbackId call);
void record_kernel(const std::string& name, Stream* stream, uint32_t correlation, u64 begin);
void record_copy(Stream* stream, uint32_t correlation, u64 begin, size_t bytes, CUpti_ActivityMemcpyKind kind);
void record_fill(Stream* stream, uint32_t correlation, u64 begin, size_t bytes);
}  // namespace fake
