/* A stand-in for NVIDIA's libnvidia-ml.so.1: the entry points that melld uses, with the real signatures and structs.
 *
 * Owns nothing but a text file, named by FAKE_NVML_STATE and read at every call, so that a test can change the machine
 * under a running process.  Lines "key value":
 *
 *   count 2              GPUs in the machine
 *   init 9               nvmlInitWithFlags answers this error code
 *   0.uuid GPU-...       a value of GPU 0: uuid, name, total, free, used, power, temperature, utilisation
 *   0.process 123 4096   a process on GPU 0 and its bytes (any number of such lines)
 *   0.error 15           every call about GPU 0 answers this code; 0.power.error 3 does so for one value
 *   0.wait PATH          every call about GPU 0 first reads that file: a FIFO hangs until a test writes
 *   topology 20, read 0, nvlink 5     levels and statuses between any two GPUs; topology.error, ... as above
 *   topology.0.1 10                   the same between GPU 0 and GPU 1 alone
 *
 * Built with -DOLD_DRIVER it lacks nvmlDeviceGetTemperature, as an old driver's library lacks what is new.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct { int index; } device;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned int gpu, memory; } utilization;
typedef struct { unsigned int pid; unsigned long long bytes; unsigned int gpu_instance, compute_instance; } process;

static device devices[16];
static int started;

/* The nth value of `key` (0 is the first) into `value`; 0 when there is none. */
static int lookup(const char *key, int nth, char *value, size_t size)
{
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    size_t length = strlen(key);
    int found = 0;
    if (!file)
        return 0;
    while (!found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, key, length) == 0 && line[length] == ' ' && nth-- == 0) {
            snprintf(value, size, "%s", line + length + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

static int error_of(const char *key)
{
    char text[128], value[32];
    snprintf(text, sizeof text, "%s", key);
    return lookup(text, 0, value, sizeof value) ? atoi(value) : SUCCESS;
}

/* What every call about a GPU begins with: is the library up, does the GPU hang, is it lost. */
static int enter(const device *gpu)
{
    char key[64], path[256];
    if (!started)
        return UNINITIALIZED;
    snprintf(key, sizeof key, "%d.wait", gpu->index);
    if (lookup(key, 0, path, sizeof path)) {
        FILE *fifo = fopen(path, "r");
        if (fifo) {
            while (fgetc(fifo) != EOF) {}
            fclose(fifo);
        }
    }
    snprintf(key, sizeof key, "%d.error", gpu->index);
    return error_of(key);
}

static int text_of(const device *gpu, const char *what, char *value, size_t size)
{
    char key[64];
    int error = enter(gpu);
    if (error)
        return error;
    snprintf(key, sizeof key, "%d.%s.error", gpu->index, what);
    if ((error = error_of(key)))
        return error;
    snprintf(key, sizeof key, "%d.%s", gpu->index, what);
    return lookup(key, 0, value, size) ? SUCCESS : NOT_SUPPORTED;
}

static int number_of(const device *gpu, const char *what, unsigned long long *number)
{
    char value[64];
    int error = text_of(gpu, what, value, sizeof value);
    if (!error)
        *number = strtoull(value, NULL, 10);
    return error;
}

static int small_number_of(const device *gpu, const char *what, unsigned int *number)
{
    unsigned long long value = 0;
    int error = number_of(gpu, what, &value);
    if (!error)
        *number = (unsigned int)value;
    return error;
}

static int between(const device *first, const device *second, const char *what, int *answer)
{
    char key[64], value[32];
    int error = enter(first);
    if (!error)
        error = enter(second);
    snprintf(key, sizeof key, "%s.error", what);
    if (!error)
        error = error_of(key);
    if (error)
        return error;
    snprintf(key, sizeof key, "%s.%d.%d", what, first->index, second->index);
    if (!lookup(key, 0, value, sizeof value) && !lookup(what, 0, value, sizeof value))
        return NOT_SUPPORTED;
    *answer = atoi(value);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned int flags)
{
    int error = error_of("init");
    (void)flags;
    for (int i = 0; i < 16; i++)
        devices[i].index = i;
    started = error == SUCCESS;
    return error;
}

int nvmlShutdown(void) { started = 0; return SUCCESS; }

const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "some NVML error"; }

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    char value[32];
    if (!started)
        return UNINITIALIZED;
    *count = lookup("count", 0, value, sizeof value) ? (unsigned int)atoi(value) : 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device **handle)
{
    unsigned int count = 0;
    int error = nvmlDeviceGetCount_v2(&count);
    if (error)
        return error;
    if (index >= count)
        return INVALID_ARGUMENT;
    *handle = &devices[index];
    return enter(*handle);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device **handle)
{
    unsigned int count = 0;
    int error = nvmlDeviceGetCount_v2(&count);
    for (unsigned int i = 0; !error && i < count; i++) {
        char key[32], value[96];
        snprintf(key, sizeof key, "%u.uuid", i);
        if (lookup(key, 0, value, sizeof value) && strcmp(value, uuid) == 0) {
            *handle = &devices[i];
            return enter(*handle);
        }
    }
    return error ? error : NOT_FOUND;
}

int nvmlDeviceGetUUID(device *gpu, char *uuid, unsigned int size) { return text_of(gpu, "uuid", uuid, size); }
int nvmlDeviceGetName(device *gpu, char *name, unsigned int size) { return text_of(gpu, "name", name, size); }
int nvmlDeviceGetPowerUsage(device *gpu, unsigned int *milliwatts) { return small_number_of(gpu, "power", milliwatts); }

#ifndef OLD_DRIVER
int nvmlDeviceGetTemperature(device *gpu, int sensor, unsigned int *celsius)
{
    return sensor == 0 ? small_number_of(gpu, "temperature", celsius) : INVALID_ARGUMENT;
}
#endif

int nvmlDeviceGetMemoryInfo(device *gpu, memory *info)
{
    int error = number_of(gpu, "total", &info->total);
    if (!error)
        error = number_of(gpu, "free", &info->free);
    return error ? error : number_of(gpu, "used", &info->used);
}

int nvmlDeviceGetUtilizationRates(device *gpu, utilization *rates)
{
    rates->memory = 0;
    return small_number_of(gpu, "utilisation", &rates->gpu);
}

int nvmlDeviceGetComputeRunningProcesses_v3(device *gpu, unsigned int *count, process *processes)
{
    char key[32], value[64];
    unsigned int room = *count, there = 0;
    int error = enter(gpu);
    if (error)
        return error;
    snprintf(key, sizeof key, "%d.process.error", gpu->index);
    if ((error = error_of(key)))
        return error;
    snprintf(key, sizeof key, "%d.process", gpu->index);
    while (lookup(key, (int)there, value, sizeof value)) {
        if (there < room)
            sscanf(value, "%u %llu", &processes[there].pid, &processes[there].bytes);
        there++;
    }
    *count = there;
    return there > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(device *first, device *second, int *level)
{
    return between(first, second, "topology", level);
}

int nvmlDeviceGetP2PStatus(device *first, device *second, int capability, int *status)
{
    return between(first, second, capability == 2 ? "nvlink" : "read", status);
}
