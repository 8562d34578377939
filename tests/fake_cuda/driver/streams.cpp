// Streams and events. A stream is a thread with a queue: work of one stream runs in order, work of two streams runs in
// any order that events do not forbid. That is what the rehearsal is for.
#include "fake.h"

namespace fake {
static std::mutex mutex;
static std::vector<Stream*>& streams = *new std::vector<Stream*>;
static std::map<int, Stream*>& defaults = *new std::map<int, Stream*>;

void Stream::run() {
  t_device = device;
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> hold(mutex);
      more.wait(hold, [&] { return !queue.empty(); });
      work = std::move(queue.front());
      queue.pop_front();
      busy = true;
    }
    work();
    work = nullptr;
    {
      std::lock_guard<std::mutex> hold(mutex);
      busy = false;
    }
    idle.notify_all();
  }
}
void Stream::put(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> hold(mutex);
    queue.push_back(std::move(work));
    if (!started) std::thread([this] { run(); }).detach();
    started = true;
  }
  more.notify_one();
}
void Stream::wait() {
  std::unique_lock<std::mutex> hold(mutex);
  idle.wait(hold, [&] { return queue.empty() && !busy; });
}
bool Stream::done() {
  std::lock_guard<std::mutex> hold(mutex);
  return queue.empty() && !busy;
}

static Stream* new_stream(int priority) {  // the mutex is held
  auto* made = new Stream;
  made->device = t_device, made->priority = priority, made->id = (int)streams.size() + 7;
  made->random.seed((u64)setting("SEED", 0) * 1000003 + (u64)physical(t_device) * 1009 + (u64)made->id);
  streams.push_back(made);
  return made;
}
Stream* stream_of(void* handle) {
  if ((u64)handle > 2) return (Stream*)handle;  // 1 and 2 are the default streams' other names
  std::lock_guard<std::mutex> hold(mutex);
  Stream*& own = defaults[t_device];
  return own ? own : own = new_stream(0);
}
std::vector<Stream*> all_streams() {
  std::lock_guard<std::mutex> hold(mutex);
  return streams;
}

// The `recorded`-th record of an event is done once `reached` has come to it.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  u64 recorded = 0, reached = 0, at_ns = 0;
  bool timed = true;

  void wait_for(u64 record) {
    std::unique_lock<std::mutex> hold(mutex);
    changed.wait(hold, [&] { return reached >= record; });
  }
  u64 last() {
    std::lock_guard<std::mutex> hold(mutex);
    return recorded;
  }
};
}  // namespace fake
using namespace fake;

extern "C" {
// What tests/fake_cuda/numbers.py computes with: calls `work(token)` on the stream's thread, in the stream's order.
void fake_cuda_run(void* stream, void (*work)(long), long token) {
  stream_of(stream)->put([=] { work(token); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  CONTEXT("cudaStreamCreateWithPriority");
  std::lock_guard<std::mutex> hold(mutex);
  return *stream = (cudaStream_t)new_stream(priority), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
  return *priority = stream_of(s)->priority, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  TOUCH("cudaDeviceGetStreamPriorityRange");
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
  TOUCH("cudaStreamQuery");
  return stream_of(s)->done() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  TOUCH("cudaStreamSynchronize");
  u64 begin = now();
  stream_of(s)->wait();
  record_call(next_correlation(), begin, CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_v3020);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  CONTEXT("cudaDeviceSynchronize");
  u64 begin = now();
  for (Stream* one : all_streams())
    if (one->device == t_device) one->wait();
  record_call(next_correlation(), begin, CUPTI_RUNTIME_TRACE_CBID_cudaDeviceSynchronize_v3020);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  return *s = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t fake_cuda_capture_info(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id)
    __asm__("cudaStreamGetCaptureInfo");
cudaError_t fake_cuda_capture_info(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id) {
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t fake_cuda_capture_info_v2(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id)
    __asm__("cudaStreamGetCaptureInfo_v2");
cudaError_t fake_cuda_capture_info_v2(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id) {
  return fake_cuda_capture_info(s, status, id);
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void* argument, unsigned) {
  return stream_of(s)->put([=] { call(s, cudaSuccess, argument); }), cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void* argument) {
  TOUCH("cudaLaunchHostFunc");
  static std::mutex& one_at_a_time = *new std::mutex;  // as the driver runs them
  stream_of(s)->put([=] {
    std::lock_guard<std::mutex> hold(one_at_a_time);
    call(argument);
  });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  CONTEXT("cudaEventCreateWithFlags");
  auto* made = new Event;  // never freed: work in a queue may still name it
  made->timed = !(flags & cudaEventDisableTiming);
  return *event = (cudaEvent_t)made, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned) {
  TOUCH("cudaEventRecord");
  auto* e = (Event*)event;
  u64 record;
  {
    std::lock_guard<std::mutex> hold(e->mutex);
    record = ++e->recorded;
  }
  stream_of(s)->put([=] {
    std::lock_guard<std::mutex> hold(e->mutex);
    e->reached = record, e->at_ns = now();
    e->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) { return cudaEventRecordWithFlags(event, s, 0); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned) {
  TOUCH("cudaStreamWaitEvent");
  auto* e = (Event*)event;
  u64 record = e->last();
  if (record) stream_of(s)->put([=] { e->wait_for(record); });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  TOUCH("cudaEventQuery");
  auto* e = (Event*)event;
  std::lock_guard<std::mutex> hold(e->mutex);
  return e->reached >= e->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  TOUCH("cudaEventSynchronize");
  u64 begin = now();
  auto* e = (Event*)event;
  e->wait_for(e->last());
  record_call(next_correlation(), begin, CUPTI_RUNTIME_TRACE_CBID_cudaEventSynchronize_v3020);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  auto *a = (Event*)from, *b = (Event*)to;
  if (!a->timed || !b->timed || !a->recorded || !b->recorded) return fail(cudaErrorInvalidResourceHandle);
  if (a->reached < a->recorded || b->reached < b->recorded) return fail(cudaErrorNotReady);
  return *ms = (float)(((double)b->at_ns - (double)a->at_ns) / 1e6), cudaSuccess;
}
cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t from, cudaEvent_t to) {
  return cudaEventElapsedTime(ms, from, to);
}

CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr at, cuuint32_t value, unsigned) {
  return stream_of(s)->put([=] { __atomic_store_n((uint32_t*)at, value, __ATOMIC_SEQ_CST); }), CUDA_SUCCESS;
}
CUresult cuStreamWaitValue32_v2(CUstream s, CUdeviceptr at, cuuint32_t value, unsigned) {
  stream_of(s)->put([=] {
    while ((int32_t)(__atomic_load_n((uint32_t*)at, __ATOMIC_SEQ_CST) - value) < 0) sleep_us(20);
  });
  return CUDA_SUCCESS;
}
CUresult cuLaunchHostFunc(CUstream s, CUhostFn call, void* argument) {
  return (CUresult)cudaLaunchHostFunc((cudaStream_t)s, call, argument);
}
}
