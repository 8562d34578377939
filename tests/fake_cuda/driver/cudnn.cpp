// cuDNN as far as attention, convolutions and batch normalization go: every question has one answer, and executing a
// plan of its graph API is a kernel.
#include "fake.h"

#include <cudnn.h>

using namespace fake;
struct Handle { void* stream; char room[64]; };

extern "C" {
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) { return *handle = (cudnnHandle_t) new Handle{}, CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  return ((Handle*)handle)->stream = stream, CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* made) {
  return *made = (cudnnBackendDescriptor_t)calloc(1, 64), CUDNN_STATUS_SUCCESS;
}
const char* cudnnGetErrorString(cudnnStatus_t) { return "CUDNN_STATUS_SUCCESS"; }
// How many engines, and which: one. Of lists with room for more (notes on an engine) there is nothing. Sizes are 0.
cudnnStatus_t cudnnBackendGetAttribute(
    cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t type, int64_t room,
    int64_t* count, void* values) {
  if (count) *count = room <= 1 ? 1 : 0;
  if (values && room == 1 && type == CUDNN_TYPE_INT64) *(int64_t*)values = 0;
  if (values && room == 1 && type == CUDNN_TYPE_INT32) *(int32_t*)values = 0;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return launch("cudnn_generated_fort_native_sdpa_sm90_flash_wgmma", stream_of(((Handle*)handle)->stream)),
         CUDNN_STATUS_SUCCESS;
}
// batch normalization needs no memory beside its tensors
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* bytes) {
  return *bytes = 0, CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t* bytes) {
  return *bytes = 0, CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnActivationDescriptor_t,
    const cudnnTensorDescriptor_t, size_t* bytes) {
  return *bytes = 0, CUDNN_STATUS_SUCCESS;
}
}
