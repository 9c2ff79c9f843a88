/* A fake libcuda for machines without a driver: no call succeeds but the question for its version, so that
   kvikio takes its POSIX path. It stands for nothing that a GPU does. */
#define NOT_INITIALIZED 3
#define CALL(name) int name(void) { return NOT_INITIALIZED; }

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }

CALL(cuInit) CALL(cuMemHostAlloc) CALL(cuMemFreeHost) CALL(cuMemHostRegister) CALL(cuMemHostRegister_v2)
CALL(cuMemHostUnregister) CALL(cuMemcpyHtoDAsync) CALL(cuMemcpyHtoDAsync_v2) CALL(cuMemcpyDtoHAsync)
CALL(cuMemcpyDtoHAsync_v2) CALL(cuMemcpyAsync) CALL(cuMemcpyBatchAsync) CALL(cuMemcpyBatchAsync_v2)
CALL(cuPointerGetAttribute) CALL(cuPointerGetAttributes) CALL(cuCtxPushCurrent) CALL(cuCtxPushCurrent_v2)
CALL(cuCtxPopCurrent) CALL(cuCtxPopCurrent_v2) CALL(cuCtxGetCurrent) CALL(cuCtxGetDevice) CALL(cuCtxGetId)
CALL(cuCtxCreate_v2) CALL(cuCtxCreate_v4) CALL(cuCtxDestroy_v2) CALL(cuMemGetAddressRange)
CALL(cuMemGetAddressRange_v2) CALL(cuGetErrorName) CALL(cuGetErrorString) CALL(cuDeviceGet)
CALL(cuDeviceGetCount) CALL(cuDeviceGetAttribute) CALL(cuDevicePrimaryCtxRetain)
CALL(cuDevicePrimaryCtxRelease) CALL(cuDevicePrimaryCtxRelease_v2) CALL(cuStreamSynchronize)
CALL(cuStreamCreate) CALL(cuStreamDestroy) CALL(cuStreamDestroy_v2) CALL(cuStreamGetCtx) CALL(cuLaunchHostFunc)
CALL(cuEventSynchronize) CALL(cuEventCreate) CALL(cuEventDestroy) CALL(cuEventDestroy_v2) CALL(cuEventRecord)
CALL(cuEventQuery) CALL(cuGetProcAddress) CALL(cuGetProcAddress_v2)
