/* Devices, memory, copies, kernels and matrix products. Each process's device is an H100 of 80 GB. */
#include "null_gpu.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

enum { NUM_DEVICES = 8, MOST_BLOCKS = 1 << 16, SMALL_COPY = 1 << 20, SMALL_DEVICE_COPY = 4096, MOST_KERNELS = 1 << 14 };
static const size_t TOTAL_BYTES = 85017493504ull; /* 79.18 GiB */

static __thread int device;
static size_t used_bytes;

/* ---- devices */

/* All of them, or as many as CUDA_VISIBLE_DEVICES names. */
PUBLIC cudaError_t cudaGetDeviceCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible ? visible[0] != '\0' : NUM_DEVICES;
    for (; visible && *visible; visible++) *count += *visible == ',';
    return *count ? 0 : cudaErrorNoDevice;
}
PUBLIC cudaError_t cudaGetDevice(int *number) {
    *number = device;
    return 0;
}
PUBLIC cudaError_t cudaSetDevice(int number) {
    if (number < 0 || number >= NUM_DEVICES) return cudaErrorInvalidDevice;
    device = number;
    return 0;
}
PUBLIC cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return 0;
}
PUBLIC cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return 0;
}
PUBLIC cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int number) {
    *properties = (struct cudaDeviceProp){.name = "NVIDIA H100 80GB HBM3",
                                          .totalGlobalMem = TOTAL_BYTES,
                                          .major = 9,
                                          .minor = 0,
                                          .multiProcessorCount = 132,
                                          .warpSize = 32,
                                          .maxThreadsPerBlock = 1024,
                                          .maxThreadsDim = {1024, 1024, 64},
                                          .maxGridSize = {2147483647, 65535, 65535},
                                          .maxThreadsPerMultiProcessor = 2048,
                                          .sharedMemPerBlock = 49152,
                                          .sharedMemPerBlockOptin = 232448,
                                          .sharedMemPerMultiprocessor = 233472,
                                          .regsPerBlock = 65536,
                                          .regsPerMultiprocessor = 65536,
                                          .totalConstMem = 65536,
                                          .l2CacheSize = 52428800,
                                          .textureAlignment = 512,
                                          .concurrentKernels = 1,
                                          .unifiedAddressing = 1,
                                          .asyncEngineCount = 3,
                                          .pciBusID = number};
    return 0;
}
static int attribute(int number) {
    switch (number) {
    case cudaDevAttrMaxThreadsPerBlock:
        return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        return 49152;
    case cudaDevAttrWarpSize:
        return 32;
    case cudaDevAttrMaxRegistersPerBlock:
        return 65536;
    case cudaDevAttrClockRate:
        return 1980000;
    case cudaDevAttrMultiProcessorCount:
        return 132;
    case cudaDevAttrMemoryClockRate:
        return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
        return 5120;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return 2048;
    case cudaDevAttrComputeCapabilityMajor:
        return 9;
    case cudaDevAttrComputeCapabilityMinor:
        return 0;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return 233472;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
        return 65536;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return 232448;
    default:
        return 1;
    }
}
PUBLIC cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr number, int of) {
    *value = attribute(number);
    return 0;
}
PUBLIC cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int number) {
    snprintf(text, size, "0000:%02x:00.0", number);
    return 0;
}
PUBLIC cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) {
    *can = 1;
    return 0;
}
PUBLIC const char *cudaGetErrorString(cudaError_t error) { return "error of the null GPU"; }
PUBLIC const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorNull"; }

/* ---- memory: address space that nobody writes to, but small copies */

struct block {
    char *at;
    size_t size;
    enum cudaMemoryType type;
};
static struct block blocks[MOST_BLOCKS];
static int num_blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add_block(char *at, size_t size, enum cudaMemoryType type) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < num_blocks && blocks[i].at) i++;
    if (i == num_blocks && ++num_blocks == MOST_BLOCKS)
        fprintf(stderr, "null GPU: too many blocks of memory\n"), abort();
    blocks[i] = (struct block){at, size, type};
    pthread_mutex_unlock(&lock);
}

static void *reserve(size_t size, enum cudaMemoryType type) {
    char *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return NULL;
    add_block(at, size, type);
    return at;
}

static struct block *block_at(const void *pointer) {
    for (int i = 0; i < num_blocks; i++)
        if (blocks[i].at && (char *)pointer >= blocks[i].at && (char *)pointer < blocks[i].at + blocks[i].size)
            return &blocks[i];
    return NULL;
}

static size_t give_back(const void *pointer) {
    pthread_mutex_lock(&lock);
    struct block *block = block_at(pointer);
    size_t size = block ? block->size : 0;
    if (block) munmap(block->at, size), block->at = NULL;
    pthread_mutex_unlock(&lock);
    return size;
}

static int is_on_device(const void *pointer) {
    struct block *block = block_at(pointer);
    return block && block->type == cudaMemoryTypeDevice;
}

static int take(size_t size) {
    if (used_bytes + size > TOTAL_BYTES) return cudaErrorMemoryAllocation;
    __sync_fetch_and_add(&used_bytes, size);
    return 0;
}

PUBLIC cudaError_t cudaMalloc(void **pointer, size_t size) {
    __sync_fetch_and_add(&null_mallocs, 1);
    *pointer = NULL;
    if (take(size)) return cudaErrorMemoryAllocation;
    *pointer = reserve(size, cudaMemoryTypeDevice);
    return *pointer ? 0 : cudaErrorMemoryAllocation;
}
PUBLIC cudaError_t cudaFree(void *pointer) {
    __sync_fetch_and_sub(&used_bytes, give_back(pointer));
    return 0;
}
PUBLIC cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = TOTAL_BYTES, *free_bytes = TOTAL_BYTES - used_bytes;
    return 0;
}
PUBLIC cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    *pointer = reserve(size, cudaMemoryTypeHost);
    return *pointer ? 0 : cudaErrorMemoryAllocation;
}
PUBLIC cudaError_t cudaFreeHost(void *pointer) {
    give_back(pointer);
    return 0;
}
PUBLIC cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    if (block_at(pointer)) return cudaErrorHostMemoryAlreadyRegistered;
    add_block(pointer, size, cudaMemoryTypeHost);
    return 0;
}
PUBLIC cudaError_t cudaHostUnregister(void *pointer) {
    struct block *block = block_at(pointer);
    if (!block || block->at != pointer) return cudaErrorHostMemoryNotRegistered;
    block->at = NULL;
    return 0;
}
PUBLIC cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
    struct block *block = block_at(pointer);
    *out = (struct cudaPointerAttributes){block ? block->type : cudaMemoryTypeUnregistered, device, (void *)pointer,
                                          (void *)pointer};
    return 0;
}

/* The driver's virtual memory, of which the caching allocator makes expandable segments. */
PUBLIC int cuMemGetAllocationGranularity(size_t *size, const void *properties, int kind) {
    *size = 2 << 20;
    return 0;
}
PUBLIC int cuMemAddressReserve(uint64_t *pointer, size_t size, size_t alignment, uint64_t address, uint64_t flags) {
    *pointer = (uint64_t)reserve(size, cudaMemoryTypeDevice);
    return *pointer ? 0 : cudaErrorMemoryAllocation;
}
PUBLIC int cuMemAddressFree(uint64_t pointer, size_t size) {
    give_back((void *)pointer);
    return 0;
}
PUBLIC int cuMemCreate(uint64_t *handle, size_t size, const void *properties, uint64_t flags) {
    __sync_fetch_and_add(&null_mallocs, 1);
    *handle = size;
    return take(size);
}
PUBLIC int cuMemRelease(uint64_t handle) {
    __sync_fetch_and_sub(&used_bytes, handle);
    return 0;
}

/* ---- copies */

static cudaError_t copy(void *to, const void *from, size_t size) {
    count_call();
    if (size <= (is_on_device(to) && is_on_device(from) ? SMALL_DEVICE_COPY : SMALL_COPY)) memcpy(to, from, size);
    return 0;
}
PUBLIC cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    if (is_on_device(from) && !block_at(to)) __sync_fetch_and_add(&null_pageable_copies, 1);
    return copy(to, from, size);
}
PUBLIC cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    count_host_sync("cudaMemcpy");
    return copy(to, from, size);
}
PUBLIC cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    if (size <= SMALL_DEVICE_COPY) memset(to, value, size);
    return 0;
}
PUBLIC cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, 0); }

/* ---- kernels: the first launch of each loads it, for which the host waits until all that its device has begun is done
 * (CUDA C++ Programming Guide, "Lazy Loading") */

static int is_new(uint64_t kernel) {
    static uint64_t seen[MOST_KERNELS];
    for (uint64_t i = kernel * 0x9E3779B97F4A7C15ull >> 50;; i = (i + 1) % MOST_KERNELS) {
        if (seen[i] == kernel) return 0;
        if (__sync_bool_compare_and_swap(&seen[i], 0, kernel)) return 1;
    }
}
static int launch(const void *kernel) {
    __sync_fetch_and_add(&null_kernels, 1);
    count_call();
    if (is_new((uint64_t)kernel)) host_waits("the loading of a kernel", NULL);
    return 0;
}
PUBLIC cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    return launch(kernel);
}
PUBLIC cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    return launch(kernel);
}
PUBLIC cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return launch(kernel);
}
PUBLIC int cuLaunchKernel(void *kernel) { return launch(kernel); }
PUBLIC int cuLaunchKernelEx(void *config, void *kernel) { return launch(kernel); }
PUBLIC cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    *attributes =
        (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .binaryVersion = 90, .ptxVersion = 90, .numRegs = 32};
    return 0;
}
PUBLIC cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int size,
                                                                          size_t shared, unsigned flags) {
    *blocks = 2;
    return 0;
}
PUBLIC void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}
PUBLIC cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return 0;
}
PUBLIC cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char memory[1 << 16];
    *pointer = memory;
    return 0;
}

/* ---- the driver, for Triton and the allocator */

static long nothing(void) { return 0; }
PUBLIC cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *found) {
    if (found) *found = 0;
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void *)nothing;
    return 0;
}
PUBLIC int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, void *found) {
    return cudaGetDriverEntryPointByVersion(name, function, version, flags, NULL);
}
PUBLIC int cuDevicePrimaryCtxGetState(int number, unsigned *flags, int *is_active) {
    *flags = 0, *is_active = 1;
    return 0;
}
PUBLIC int cuGetErrorString(int error, const char **text) {
    *text = "error of the null GPU";
    return 0;
}
PUBLIC int cuDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return 0;
}
PUBLIC int cuDeviceGetCount(int *count) {
    *count = NUM_DEVICES;
    return 0;
}
PUBLIC int cuDeviceGet(int *handle, int number) {
    *handle = number;
    return 0;
}
PUBLIC int cuDeviceGetAttribute(int *value, int number, int of) {
    *value = attribute(number);
    return 0;
}
PUBLIC int cuCtxGetCurrent(void **context) {
    *context = (void *)1;
    return 0;
}
PUBLIC int cuCtxGetDevice(int *number) {
    *number = device;
    return 0;
}
PUBLIC int cuModuleLoadData(void **module, const void *image) {
    *module = malloc(8);
    return 0;
}
PUBLIC int cuModuleLoadDataEx(void **module, const void *image) { return cuModuleLoadData(module, image); }
PUBLIC int cuModuleLoad(void **module, const char *path) { return cuModuleLoadData(module, path); }
PUBLIC int cuModuleGetFunction(void **kernel, void *module, const char *name) {
    *kernel = malloc(8);
    return 0;
}
PUBLIC int cuFuncGetAttribute(int *value, int number, void *kernel) {
    *value = number == 4 ? 32 : 0; /* registers */
    return 0;
}
PUBLIC int cuPointerGetAttribute(void *value, int number, uint64_t pointer) {
    *(uint64_t *)value = pointer;
    return 0;
}
PUBLIC int cuOccupancyMaxActiveClusters(int *count) {
    *count = 1;
    return 0;
}

/* ---- matrix products */

#define PRODUCT(name)                                                                                                  \
    PUBLIC int name(void) {                                                                                            \
        __sync_fetch_and_add(&null_products, 1);                                                                       \
        count_call();                                                                                                  \
        if (is_new((uint64_t)name)) host_waits("the loading of a kernel", NULL);                                       \
        return 0;                                                                                                      \
    }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasLtMatmul)
PUBLIC int cublasCreate_v2(void **handle) {
    *handle = calloc(1, 256);
    return 0;
}
PUBLIC int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}
PUBLIC int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}
PUBLIC int cublasLtMatmulDescCreate(void **description, int compute, int scale) {
    *description = calloc(1, 256);
    return 0;
}
PUBLIC int cublasLtMatmulDescDestroy(void *description) {
    free(description);
    return 0;
}
PUBLIC int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *layout = calloc(1, 256);
    return 0;
}
PUBLIC int cublasLtMatrixLayoutDestroy(void *layout) {
    free(layout);
    return 0;
}
PUBLIC int cublasLtMatmulPreferenceCreate(void **preference) {
    *preference = calloc(1, 256);
    return 0;
}
PUBLIC int cublasLtMatmulPreferenceDestroy(void *preference) {
    free(preference);
    return 0;
}
PUBLIC int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d,
                                          void *preference, int wanted, void *results, int *found) {
    memset(results, 0, 96);
    *found = 1;
    return 0;
}
