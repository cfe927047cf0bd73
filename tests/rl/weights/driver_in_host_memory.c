/* The calls of libcuda that the transport makes, over POSIX shared memory: a process opens another
 * one's by its handle, as on a GPU, and none of its own. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST 64
#define LARGEST (1ull << 30)
typedef struct { unsigned char reserved[64]; } Handle;
static struct { uint64_t pointer; size_t nbytes; char name[64]; } mapped[MOST];
static int serial;

static int find(uint64_t pointer) {
    for (int i = 0; i < MOST; i++) if (mapped[i].pointer == pointer) return i;
    return -1;
}

static int map(uint64_t *pointer, int file, size_t nbytes, const char *name) {
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    int place = find(0);
    close(file);
    if (memory == MAP_FAILED || place < 0) return 2;
    *pointer = mapped[place].pointer = (uint64_t)memory;
    mapped[place].nbytes = nbytes;
    strcpy(mapped[place].name, name);
    return 0;
}

static int unmap(uint64_t pointer) {
    int place = find(pointer);
    if (!pointer || place < 0) return 1;
    munmap((void *)pointer, mapped[place].nbytes);
    mapped[place].pointer = 0;
    return 0;
}

int cuMemAlloc_v2(uint64_t *pointer, size_t nbytes) {
    char name[64];
    if (nbytes > LARGEST) return 2;
    snprintf(name, sizeof name, "/driver-in-host-memory.%d.%d", getpid(), serial++);
    int file = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)nbytes)) return 2;
    return map(pointer, file, nbytes, name);
}

int cuMemFree_v2(uint64_t pointer) {
    int place = find(pointer);
    if (!pointer || place < 0) return 1;
    shm_unlink(mapped[place].name);
    return unmap(pointer);
}

int cuIpcGetMemHandle(Handle *handle, uint64_t pointer) {
    int place = find(pointer);
    if (!pointer || place < 0) return 1;
    memset(handle, 0, sizeof *handle);
    strcpy((char *)handle->reserved, mapped[place].name);
    return 0;
}

int cuIpcOpenMemHandle_v2(uint64_t *pointer, Handle handle, unsigned flags) {
    char *name = (char *)handle.reserved;
    char mine[64];
    struct stat status;
    if (flags != 1) return 1;
    snprintf(mine, sizeof mine, "/driver-in-host-memory.%d.", getpid());
    if (!strncmp(name, mine, strlen(mine))) return 201;
    int file = shm_open(name, O_RDWR, 0);
    if (file < 0 || fstat(file, &status)) return 400;
    return map(pointer, file, (size_t)status.st_size, name);
}

int cuIpcCloseMemHandle(uint64_t pointer) { return unmap(pointer); }

int cuGetErrorString(int status, const char **text) {
    *text = status == 2 ? "out of memory" : status == 201 ? "invalid device context"
          : status == 400 ? "invalid resource handle" : NULL;
    return *text ? 0 : 1;
}
