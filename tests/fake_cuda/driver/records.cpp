// CUPTI: the records from which torch's profiler makes its traces. They carry real times of the streams' threads.
#include "fake.h"

#include <pthread.h>
#include <set>
#include <time.h>

namespace fake {
static std::atomic<bool> enabled[128];
static std::atomic<uint32_t> correlation{1};
static CUpti_BuffersCallbackRequestFunc request = nullptr;
static CUpti_BuffersCallbackCompleteFunc complete = nullptr;
static CUpti_TimestampCallbackFunc profilers_clock = nullptr;

bool recorded(CUpti_ActivityKind kind) { return enabled[kind]; }
uint32_t next_correlation() { return correlation++; }
u64 now() {
  if (profilers_clock) return profilers_clock();
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return (u64)time.tv_sec * 1000000000ull + (u64)time.tv_nsec;
}

// ---- the buffer that the profiler lends, filled and handed back
static std::mutex mutex;
static uint8_t* buffer = nullptr;
static size_t buffer_bytes = 0, filled = 0;

static void hand_back() {  // the mutex is held
  if (buffer) complete(nullptr, 0, buffer, buffer_bytes, filled);
  buffer = nullptr;
}
static size_t padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

template <class Record>
static void add(const Record& record) {
  std::lock_guard<std::mutex> hold(mutex);
  if (!request) return;
  size_t bytes = padded(sizeof record), most;
  if (buffer && filled + bytes > buffer_bytes) hand_back();
  if (!buffer) request(&buffer, &buffer_bytes, &most), filled = 0;
  memcpy(buffer + filled, &record, sizeof record);
  filled += bytes;
}
static const char* kept(const std::string& name) {
  static std::set<std::string>& names = *new std::set<std::string>;
  std::lock_guard<std::mutex> hold(mutex);
  return names.insert(name).first->c_str();
}

// ---- which of torch's operators issued a call: the ids that the profiler pushes around them, by kind
static thread_local std::map<int, std::vector<uint64_t>> t_outside;

static void record_outside(uint32_t id) {
  if (!enabled[CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION]) return;
  for (auto& [kind, ids] : t_outside) {
    if (ids.empty()) continue;
    CUpti_ActivityExternalCorrelation record{};
    record.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
    record.externalKind = (CUpti_ExternalCorrelationKind)kind;
    record.externalId = ids.back();
    record.correlationId = id;
    add(record);
  }
}

void record_call(uint32_t id, u64 begin, CUpti_CallbackId call) {
  record_outside(id);
  if (!enabled[CUPTI_ACTIVITY_KIND_RUNTIME]) return;
  CUpti_ActivityAPI record{};
  record.kind = CUPTI_ACTIVITY_KIND_RUNTIME;
  record.cbid = call, record.start = begin, record.end = now();
  record.processId = (uint32_t)getpid(), record.threadId = (uint32_t)(u64)pthread_self();
  record.correlationId = id;
  add(record);
}
template <class Record>
static Record on_stream(CUpti_ActivityKind kind, Stream* stream, uint32_t id, u64 begin) {
  Record record;
  memset(&record, 0, sizeof record);
  record.kind = kind;
  record.start = begin, record.end = now();
  record.deviceId = (uint32_t)stream->device, record.contextId = 1, record.streamId = (uint32_t)stream->id;
  record.correlationId = id;
  return record;
}
void record_kernel(const std::string& name, Stream* stream, uint32_t id, u64 begin) {
  auto record = on_stream<KERNEL_RECORD>(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, stream, id, begin);
  record.name = kept(name);
  record.gridX = record.gridY = record.gridZ = record.blockX = record.blockY = record.blockZ = 1;
  add(record);
}
void record_copy(Stream* stream, uint32_t id, u64 begin, size_t bytes, CUpti_ActivityMemcpyKind kind) {
  auto record = on_stream<COPY_RECORD>(CUPTI_ACTIVITY_KIND_MEMCPY, stream, id, begin);
  record.copyKind = (uint8_t)kind, record.bytes = bytes;
  add(record);
}
void record_fill(Stream* stream, uint32_t id, u64 begin, size_t bytes) {
  auto record = on_stream<FILL_RECORD>(CUPTI_ACTIVITY_KIND_MEMSET, stream, id, begin);
  record.bytes = bytes;
  add(record);
}
static size_t bytes_of(CUpti_ActivityKind kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return padded(sizeof(KERNEL_RECORD));
    case CUPTI_ACTIVITY_KIND_RUNTIME: return padded(sizeof(CUpti_ActivityAPI));
    case CUPTI_ACTIVITY_KIND_MEMCPY: return padded(sizeof(COPY_RECORD));
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return padded(sizeof(CUpti_ActivityExternalCorrelation));
    default: return padded(sizeof(FILL_RECORD));
  }
}
}  // namespace fake
using namespace fake;

extern "C" {
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc r, CUpti_BuffersCallbackCompleteFunc c) {
  return request = r, complete = c, CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
  return profilers_clock = clock, CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) { return enabled[kind] = true, CUPTI_SUCCESS; }
CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) { return enabled[kind] = false, CUPTI_SUCCESS; }
CUptiResult cuptiActivityFlushAll(uint32_t) {
  std::lock_guard<std::mutex> hold(mutex);
  return hand_back(), CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
  return t_outside[kind].push_back(id), CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* last) {
  auto& ids = t_outside[kind];
  if (ids.empty()) return CUPTI_ERROR_QUEUE_EMPTY;
  if (last) *last = ids.back();
  return ids.pop_back(), CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t* begin, size_t bytes, CUpti_Activity** record) {
  uint8_t* next = *record ? (uint8_t*)*record + bytes_of((*record)->kind) : begin;
  if (next >= begin + bytes) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  return *record = (CUpti_Activity*)next, CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* n) { return *n = 0, CUPTI_SUCCESS; }
CUptiResult cuptiGetVersion(uint32_t* version) { return *version = CUPTI_API_VERSION, CUPTI_SUCCESS; }
CUptiResult cuptiGetResultString(CUptiResult, const char** text) { return *text = "fake_cuda", CUPTI_SUCCESS; }
CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain, uint32_t call, const char** name) {
  switch (call) {
    case CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000: *name = "cudaLaunchKernel_v7000"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020: *name = "cudaMemcpyAsync_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaMemsetAsync_v3020: *name = "cudaMemsetAsync_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_v3020: *name = "cudaStreamSynchronize_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaDeviceSynchronize_v3020: *name = "cudaDeviceSynchronize_v3020"; break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaEventSynchronize_v3020: *name = "cudaEventSynchronize_v3020"; break;
    default: *name = "cudaOther_v3020";
  }
  return CUPTI_SUCCESS;
}
}
