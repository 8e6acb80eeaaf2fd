/* A stand-in for NVIDIA's libcuda.so.1: the virtual memory calls that melld uses, with the signatures of cuda.h.
 *
 * A chunk of device memory is a memory file, so it outlives the process that made it, and is not zero at first, as a
 * device's may not be.  What a real driver refuses is refused: sizes and places off the granularity, a second mapping
 * over the first, access before mapping, properties that nobody should ask for.
 *
 *   FAKE_CUDA_BYTES 4194304      of the device; more is out of memory
 *   FAKE_CUDA_FAILS cuMemMap     that call answers 999
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, UNKNOWN = 999, GRANULARITY = 2 << 20 };

typedef struct { int type, id; } location;
typedef struct { int type, handle_types; location where; void *windows; unsigned char flags[8]; } properties;
typedef struct { location where; int flags; } permission;

static int started;
static size_t made;

static int refused(const char *call)
{
    const char *fails = getenv("FAKE_CUDA_FAILS");
    return !started ? NOT_INITIALIZED : fails && !strcmp(fails, call) ? UNKNOWN : OK;
}

#define BEGIN do { int error = refused(__func__); if (error) return error; } while (0)
#define WANT(fact) do { if (!(fact)) return INVALID_VALUE; } while (0)

static int plain(const properties *p)
{
    static const unsigned char none[8];
    return p->type == 1 && p->handle_types == 1 && p->where.type == 1 && p->where.id == 0 && !p->windows
        && !memcmp(p->flags, none, sizeof none);
}

int cuInit(unsigned int flags)
{
    started = flags == 0;
    return refused(__func__);
}

int cuGetErrorString(int error, const char **text)
{
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == INVALID_VALUE ? "invalid argument" : "unknown error";
    return OK;
}

int cuMemGetAllocationGranularity(size_t *granularity, const properties *p, int option)
{
    BEGIN;
    WANT(plain(p) && (option == 0 || option == 1));
    *granularity = GRANULARITY;
    return OK;
}

int cuMemCreate(unsigned long long *handle, size_t size, const properties *p, unsigned long long flags)
{
    const char *most = getenv("FAKE_CUDA_BYTES");
    int file;
    BEGIN;
    WANT(plain(p) && size && size % GRANULARITY == 0 && !flags);
    if (most && (made += size) > strtoull(most, NULL, 10))
        return OUT_OF_MEMORY;
    file = memfd_create("fake-device-memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size))
        return OUT_OF_MEMORY;
    for (size_t dirty = 0; dirty < size; dirty += GRANULARITY)
        if (pwrite(file, "\xff\xff\xff\xff", 4, (off_t)dirty) != 4)
            return OUT_OF_MEMORY;
    *handle = (unsigned long long)file + 1000;
    return OK;
}

int cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long flags)
{
    BEGIN;
    WANT(type == 1 && !flags);
    *(int *)out = dup((int)(handle - 1000));
    return *(int *)out < 0 ? UNKNOWN : OK;
}

int cuMemImportFromShareableHandle(unsigned long long *handle, void *descriptor, int type)
{
    int file = dup((int)(size_t)descriptor);
    BEGIN;
    WANT(type == 1 && file >= 0);
    *handle = (unsigned long long)file + 1000;
    return OK;
}

int cuMemAddressReserve(unsigned long long *address, size_t size, size_t alignment, unsigned long long at,
                        unsigned long long flags)
{
    char *found;
    BEGIN;
    WANT(size && size % GRANULARITY == 0 && !alignment && !at && !flags);
    found = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return OUT_OF_MEMORY;
    *address = ((unsigned long long)found + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    return OK;
}

int cuMemMap(unsigned long long at, size_t size, size_t offset, unsigned long long handle, unsigned long long flags)
{
    struct stat facts;
    int file = (int)(handle - 1000);
    BEGIN;
    WANT(at % GRANULARITY == 0 && size % GRANULARITY == 0 && !offset && !flags);
    WANT(!fstat(file, &facts) && (size_t)facts.st_size == size);
    return mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED ? UNKNOWN : OK;
}

int cuMemRelease(unsigned long long handle)
{
    BEGIN;
    WANT(!close((int)(handle - 1000)));
    return OK;
}

int cuMemSetAccess(unsigned long long at, size_t size, const permission *given, size_t count)
{
    BEGIN;
    WANT(count == 1 && given->where.type == 1 && given->where.id == 0 && given->flags == 3);
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}
