// NVML: what torch and fsdplab ask about GPUs without touching CUDA.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

static const char* word(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}
static int gpus() { return *word("FAKE_CUDA_GPUS") ? atoi(word("FAKE_CUDA_GPUS")) : 1; }
static int driver() { return *word("FAKE_CUDA_DRIVER") ? atoi(word("FAKE_CUDA_DRIVER")) : FAKE_CUDA_VERSION; }
static const int not_supported = 3, not_found = 6;

extern "C" {
int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = (unsigned)gpus(), 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if ((int)index >= gpus()) return not_found;
  return *handle = (void*)(long)(index + 1), 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** handle) {
  return *handle = (void*)strtol(std::string(bus).substr(5, 2).c_str(), nullptr, 16), 0;  // "0000:01:00.0"
}
int nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
  return snprintf(text, size, "GPU-0000000%ld-0000-0000-0000-000000000000", (long)handle), 0;
}
int nvmlDeviceGetComputeMode(void*, int* mode) {
  return *mode = strcmp(word("FAKE_CUDA_COMPUTE_MODE"), "exclusive") ? 0 : 3, 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType() { return not_supported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return not_supported; }
int nvmlDeviceGetGpuFabricInfoV() { return not_supported; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = driver(), 0; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) { return snprintf(text, size, "580.0 (fake_cuda)"), 0; }
}
