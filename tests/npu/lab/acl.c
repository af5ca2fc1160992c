/* Stand-in for the CANN runtime over host memory: enough for torch_npu to make devices, allocate, copy, order streams and
 * events, and book-keep ACL graphs. Everything happens at once and in the calling thread; no kernel runs here.
 *
 * Prototypes follow the acl headers as far as the values that a function writes; other arguments are left out. Functions
 * that only need to succeed are made by standins.py. Some are looked up by name at run time and are listed at the end. */
#include <malloc.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICES 16 /* the dies of one 910C node */
#define INVALID_PARAM 100000
#define INVALID_DEVICE 107001
#define OUT_OF_MEMORY 207001
#define INTERNAL_ERROR 500000

/* How often the host waited for the device, by the way it waited; traffic.py reads these counters. */
enum { WAIT_STREAM, WAIT_DEVICE, WAIT_EVENT, WAIT_COPY, WAITS };
unsigned long standin_waits[WAITS];

static void *capturing = NULL; /* the graph that is being captured; one at a time */

static int waited(int what) {
    if (capturing) return INTERNAL_ERROR; /* captured tasks do not run, so there is nothing to wait for */
    __atomic_add_fetch(&standin_waits[what], 1, __ATOMIC_RELAXED);
    return 0;
}

/* Identity */

const char *aclrtGetSocName(void) { return "Ascend910_9382"; }

#define CANN_VERSION "9.1.0"
int aclsysGetCANNVersion(int package, char *version) {
    (void)package;
    strcpy(version, CANN_VERSION);
    return 0;
}
int aclsysGetVersionStr(const char *package, char *version) {
    (void)package;
    strcpy(version, CANN_VERSION);
    return 0;
}
const char *aclGetRecentErrMsg(void) { return ""; }

/* Devices and contexts: a context is its device's number, and never null. */

static __thread int current_device = 0;

int aclrtGetDeviceCount(unsigned *count) {
    *count = DEVICES;
    return 0;
}
int aclrtSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
    current_device = device;
    return 0;
}
int aclrtGetDevice(int *device) {
    *device = current_device;
    return 0;
}
int aclrtGetCurrentContext(void **context) {
    *context = (void *)(intptr_t)(current_device + 1);
    return 0;
}
int aclrtSetCurrentContext(void *context) { return aclrtSetDevice((int)(intptr_t)context - 1); }
int aclrtGetPrimaryCtxState(int device, unsigned *flags, int *active) {
    (void)device;
    if (flags) *flags = 0;
    *active = 1;
    return 0;
}
/* 24 cube and 48 vector cores in a die */
int aclGetDeviceCapability(unsigned device, int what, int64_t *value) {
    (void)device, (void)what;
    *value = 24;
    return 0;
}
int aclrtGetDeviceInfo(unsigned device, int what, int64_t *value) { return aclGetDeviceCapability(device, what, value); }
int aclrtGetDeviceResLimit(int device, int kind, unsigned *cores) {
    (void)device;
    *cores = kind ? 48 : 24;
    return 0;
}
int aclrtGetStreamResLimit(void *stream, int kind, unsigned *cores) {
    (void)stream;
    return aclrtGetDeviceResLimit(0, kind, cores);
}
int aclGetCompileoptSize(int option) {
    (void)option;
    return 32;
}
int aclGetCompileopt(int option, char *value, size_t size) {
    (void)option;
    if (size) value[0] = 0;
    return 0;
}

/* Memory is that of the host. Kernels may write up to 32 bytes beyond the size they asked for. All devices of a process
 * share the memory of one die, or half of the host's memory if that is less. */

#define DIE_MEMORY ((size_t)64 << 30)
static size_t taken = 0;

static int allocate(void **out, size_t size) { return posix_memalign(out, 512, size + 32) ? OUT_OF_MEMORY : 0; }
static int take(void **out, size_t size) {
    if (allocate(out, size)) return OUT_OF_MEMORY;
    __atomic_add_fetch(&taken, malloc_usable_size(*out), __ATOMIC_RELAXED);
    return 0;
}
static size_t device_memory(void) {
    size_t half = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGE_SIZE) / 2;
    return half < DIE_MEMORY ? half : DIE_MEMORY;
}

int aclrtMalloc(void **out, size_t size) { return take(out, size); }
int aclrtMallocAlign32(void **out, size_t size) { return take(out, size); }
int aclrtMallocWithCfg(void **out, size_t size) { return take(out, size); }
int aclrtMallocHost(void **out, size_t size) { return allocate(out, size); }
int aclrtMallocHostWithCfg(void **out, uint64_t size) { return allocate(out, size); }
int aclrtFree(void *memory) {
    __atomic_sub_fetch(&taken, malloc_usable_size(memory), __ATOMIC_RELAXED);
    free(memory);
    return 0;
}
int aclrtFreeHost(void *memory) {
    free(memory);
    return 0;
}
int aclrtGetMemInfo(int kind, size_t *unused, size_t *total) {
    (void)kind;
    *total = device_memory();
    *unused = taken < *total ? *total - taken : 0;
    return 0;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size) {
    if (size > room) return INVALID_PARAM;
    memmove(to, from, size);
    return 0;
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size) {
    waited(WAIT_COPY);
    return aclrtMemcpyAsync(to, room, from, size);
}
int aclrtMemset(void *to, size_t room, int value, size_t size) {
    if (size > room) return INVALID_PARAM;
    memset(to, value, size);
    return 0;
}
int aclrtMemsetAsync(void *to, size_t room, int value, size_t size) { return aclrtMemset(to, room, value, size); }

/* Streams and events: handles, always finished. */

static int new_handle(void **out) {
    static intptr_t last = 0x10000;
    *out = (void *)__atomic_add_fetch(&last, 64, __ATOMIC_RELAXED);
    return 0;
}

int aclrtCreateStream(void **stream) { return new_handle(stream); }
int aclrtCreateStreamWithConfig(void **stream) { return new_handle(stream); }
int aclrtStreamQuery(void *stream, int *unfinished) {
    (void)stream;
    *unfinished = 0;
    return 0;
}
int aclrtStreamGetId(void *stream, int *id) {
    *id = (int)(intptr_t)stream;
    return 0;
}
int aclrtGetStreamAttribute(void *stream, int attribute, void *value) {
    (void)stream, (void)attribute;
    memset(value, 0, 8);
    return 0;
}
int aclrtCreateEvent(void **event) { return new_handle(event); }
int aclrtCreateEventWithFlag(void **event) { return new_handle(event); }
int aclrtCreateEventExWithFlag(void **event) { return new_handle(event); }
int aclrtQueryEventStatus(void *event, int *complete) {
    (void)event;
    *complete = 1;
    return 0;
}
int aclrtQueryEventWaitStatus(void *event, int *unfinished) {
    (void)event;
    *unfinished = 0;
    return 0;
}
int aclrtEventElapsedTime(float *milliseconds) {
    *milliseconds = 0;
    return 0;
}
int aclrtEventGetTimestamp(void *event, uint64_t *microseconds) {
    (void)event;
    *microseconds = 0;
    return 0;
}
int aclrtSynchronizeStream(void) { return waited(WAIT_STREAM); }
int aclrtSynchronizeStreamWithTimeout(void) { return waited(WAIT_STREAM); }
int aclrtSynchronizeDevice(void) { return waited(WAIT_DEVICE); }
int aclrtSynchronizeDeviceWithTimeout(void) { return waited(WAIT_DEVICE); }
int aclrtSynchronizeEvent(void) { return waited(WAIT_EVENT); }

/* Values in device memory, which events of captured graphs are: a wait is over when the value is there. During a capture,
 * nothing is written. */

unsigned long standin_values_written;

int aclrtValueWrite(void *memory, uint64_t value) {
    if (!memory) return INVALID_PARAM;
    if (capturing) return 0;
    *(uint64_t *)memory = value;
    __atomic_add_fetch(&standin_values_written, 1, __ATOMIC_RELAXED);
    return 0;
}
int aclrtValueWait(void *memory) { return memory ? 0 : INVALID_PARAM; }

/* ACL graphs; capture.py records and replays what they hold. */

int aclmdlRICaptureBegin(void) { return new_handle(&capturing); }
int aclmdlRICaptureGetInfo(void *stream, int *status, void **graph) {
    (void)stream;
    *status = capturing != NULL;
    if (graph) *graph = capturing;
    return 0;
}
int aclmdlRICaptureEnd(void *stream, void **graph) {
    (void)stream;
    *graph = capturing;
    capturing = NULL;
    return 0;
}
int aclmdlRIGetId(void *graph, unsigned *id) {
    *id = (unsigned)(intptr_t)graph;
    return 0;
}
int aclmdlRICaptureTaskGrpEnd(void *stream, void **group) {
    (void)stream;
    return new_handle(group);
}

/* Host functions in a stream run at once. */

int aclrtLaunchCallback(void (*function)(void *), void *data) {
    function(data);
    return 0;
}
int aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    (void)stream;
    function(data);
    return 0;
}

/* Bounds-checked versions of libc functions, which CANN provides; without them, C++ error messages are empty. */

int vsnprintf_s(char *out, size_t room, size_t count, const char *format, va_list values) {
    (void)count;
    return vsnprintf(out, room, format, values);
}
int snprintf_s(char *out, size_t room, size_t count, const char *format, ...) {
    va_list values;
    va_start(values, format);
    int length = vsnprintf_s(out, room, count, format, values);
    va_end(values);
    return length;
}
int strcpy_s(char *to, size_t room, const char *from) {
    if (strlen(from) >= room) return 34;
    strcpy(to, from);
    return 0;
}
int memcpy_s(void *to, size_t room, const void *from, size_t size) { return aclrtMemcpyAsync(to, room, from, size) ? 34 : 0; }

/* torch_npu looks these up by name at run time, so a missing one would not be noticed at build time. */

#define SUCCEEDS(name) \
    int name(void) { return 0; }
#define GIVES(name, type, constant)        \
    int name(int option, type *value) {    \
        (void)option;                      \
        *value = constant;                 \
        return 0;                          \
    }
int aclrtGetDeviceSatMode(int *mode) {
    *mode = 1;
    return 0;
}
GIVES(aclrtGetSysParamOpt, int64_t, 0)
GIVES(aclrtCtxGetSysParamOpt, int64_t, 0)
SUCCEEDS(aclmdlRICaptureTaskGrpBegin)
SUCCEEDS(aclmdlRICaptureTaskUpdateBegin)
SUCCEEDS(aclmdlRICaptureTaskUpdateEnd)
SUCCEEDS(aclmdlRICaptureThreadExchangeMode)
SUCCEEDS(aclmdlRIDestroy)
SUCCEEDS(aclmdlRIExecuteAsync)
SUCCEEDS(aclrtCtxSetSysParamOpt)
SUCCEEDS(aclrtDestroyStreamForce)
SUCCEEDS(aclrtResetStreamResLimit)
SUCCEEDS(aclrtSetDeviceSatMode)
SUCCEEDS(aclrtSetOpExecuteTimeOut)
SUCCEEDS(aclrtSetStreamAttribute)
SUCCEEDS(aclrtSetStreamResLimit)
SUCCEEDS(aclrtSetSysParamOpt)
SUCCEEDS(aclrtSubscribeReport)
SUCCEEDS(aclrtUnSubscribeReport)
SUCCEEDS(aclrtUnuseStreamResInCurrentThread)
SUCCEEDS(aclrtUseStreamResInCurrentThread)
