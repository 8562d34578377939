// cuBLAS: handles with a stream, and products that are kernels without an effect.
#include "fake.h"

using namespace fake;
struct Handle { void* stream; char room[64]; };
static void product(void* handle, const char* name) { launch(name, stream_of(((Handle*)handle)->stream)); }

#define PRODUCT(name)                                                         \
  int fake_##name(void* handle) __asm__(#name);                               \
  int fake_##name(void* handle) {                                             \
    product(handle, "sm" "80_xmma_gemm_" #name);                              \
    return 0;                                                                 \
  }

extern "C" {
cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  return *handle = (cublasHandle_t) new Handle{}, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  return ((Handle*)handle)->stream = stream, CUBLAS_STATUS_SUCCESS;
}
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t found[], int* count) {
  memset(found, 0, sizeof *found);
  return *count = 1, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t, cudaDataType_t) {
  return *made = (cublasLtMatmulDesc_t)malloc(64), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType, uint64_t, uint64_t, int64_t) {
  return *made = (cublasLtMatrixLayout_t)malloc(64), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  return *made = (cublasLtMatmulPreference_t)malloc(64), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t, const void*,
    cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t,
    const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  return launch("sm80_xmma_gemm_cublasLt", stream_of(stream)), CUBLAS_STATUS_SUCCESS;
}
}
