/* A disk that fails at its nth write: preloaded into a process, it counts the calls that change a folder.

   Orders and counts are in a file that both processes map (helpers/faulty_disk.py). From the chosen call on a full disk
   refuses all that needs room, a read-only one every change; an I/O error comes once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

struct orders {
    int armed, at, error, count, used;
    char folder[1004];
    char log[1 << 20]; /* "call path" of each counted call, one a line */
};
static struct orders *orders;

__attribute__((constructor)) static void start(void) {
    const char *name = getenv("FAULTY_DISK");
    int file = name ? open(name, O_RDWR) : -1;
    if (file < 0) return;
    orders = mmap(NULL, sizeof *orders, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (orders == MAP_FAILED) orders = NULL;
    close(file);
}

enum kind { ROOM, CHANGE, REMOVAL };

/* Whether a call of this kind on a path fails; a removal is never counted, but fails on a read-only disk. */
static int fails(const char *call, const char *path, enum kind kind) {
    if (!orders || !orders->armed || strncmp(path, orders->folder, strlen(orders->folder))) return 0;
    int saved = errno, past = orders->at && orders->count >= orders->at;
    if (kind == REMOVAL) {
        errno = saved;
        return past && orders->error == EROFS ? (errno = EROFS, 1) : 0;
    }
    int number = __sync_add_and_fetch(&orders->count, 1);
    if (!orders->at) {
        int left = (int)sizeof orders->log - orders->used;
        int long_ = snprintf(orders->log + orders->used, left, "%s %s\n", call, path);
        if (long_ < left) orders->used += long_;
    }
    int hit = orders->at && (number == orders->at || (past && orders->error == EROFS) ||
                             (past && kind == ROOM && (orders->error == ENOSPC || orders->error == EDQUOT)));
    errno = hit ? orders->error : saved;
    return hit;
}

static int fails_fd(const char *call, int fd, enum kind kind) {
    char link[64], path[PATH_MAX];
    if (!orders || !orders->armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return fails(call, path, kind);
}

static int fails_at(const char *call, int dir, const char *path, enum kind kind) {
    char link[64], whole[2 * PATH_MAX];
    if (!orders || !orders->armed) return 0;
    if (path[0] == '/') return fails(call, path, kind);
    ssize_t size;
    if (dir == AT_FDCWD) {
        if (!getcwd(whole, PATH_MAX)) return 0;
        size = strlen(whole);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        if ((size = readlink(link, whole, PATH_MAX - 1)) < 0) return 0;
    }
    snprintf(whole + size, sizeof whole - size, "/%s", path);
    return fails(call, whole, kind);
}

#define REAL(name) (name##_real ? name##_real : (name##_real = (name##_type)dlsym(RTLD_NEXT, #name)))
#define DECLARE(name, result, ...)            \
    typedef result (*name##_type)(__VA_ARGS__); \
    static name##_type name##_real;

#define OPENAT(name)                                                                                     \
    DECLARE(name, int, int, const char *, int, ...)                                                      \
    int name(int dir, const char *path, int flags, ...) {                                                \
        va_list rest;                                                                                    \
        va_start(rest, flags);                                                                           \
        mode_t mode = va_arg(rest, mode_t);                                                              \
        va_end(rest);                                                                                    \
        int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;                                 \
        if (writes && fails_at("open", dir, path, ROOM)) return -1;                                      \
        return REAL(name)(dir, path, flags, mode);                                                       \
    }
#define OPEN(name)                                                                                       \
    DECLARE(name, int, const char *, int, ...)                                                           \
    int name(const char *path, int flags, ...) {                                                         \
        va_list rest;                                                                                    \
        va_start(rest, flags);                                                                           \
        mode_t mode = va_arg(rest, mode_t);                                                              \
        va_end(rest);                                                                                    \
        int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;                                 \
        if (writes && fails_at("open", AT_FDCWD, path, ROOM)) return -1;                                 \
        return REAL(name)(path, flags, mode);                                                            \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define FD(name, kind, result, parameters, arguments)                                     \
    typedef result(*name##_type) parameters;                                              \
    static name##_type name##_real;                                                       \
    result name parameters { return fails_fd(#name, fd, kind) ? -1 : REAL(name) arguments; }
FD(write, ROOM, ssize_t, (int fd, const void *data, size_t size), (fd, data, size))
FD(pwrite, ROOM, ssize_t, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
FD(pwrite64, ROOM, ssize_t, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
FD(writev, ROOM, ssize_t, (int fd, const struct iovec *parts, int count), (fd, parts, count))
FD(fsync, CHANGE, int, (int fd), (fd))
FD(fdatasync, CHANGE, int, (int fd), (fd))
FD(ftruncate, CHANGE, int, (int fd, off_t size), (fd, size))
FD(ftruncate64, CHANGE, int, (int fd, off64_t size), (fd, size))

#define PATHS(name, call, kind, parameters, arguments)                                         \
    typedef int(*name##_type) parameters;                                                      \
    static name##_type name##_real;                                                            \
    int name parameters { return call(#name, path, kind) ? -1 : REAL(name) arguments; }
#define here(call, path, kind) fails_at(call, AT_FDCWD, path, kind)
#define there(call, path, kind) fails_at(call, dir, path, kind)
#define new_folder(call, path, kind) (access(path, F_OK) != 0 && fails_at(call, AT_FDCWD, path, kind))
PATHS(mkdir, new_folder, ROOM, (const char *path, mode_t mode), (path, mode))
PATHS(rename, here, CHANGE, (const char *from, const char *path), (from, path))
PATHS(symlink, here, ROOM, (const char *to, const char *path), (to, path))
PATHS(link, here, ROOM, (const char *to, const char *path), (to, path))
PATHS(unlink, here, REMOVAL, (const char *path), (path))
PATHS(rmdir, here, REMOVAL, (const char *path), (path))
PATHS(unlinkat, there, REMOVAL, (int dir, const char *path, int flags), (dir, path, flags))
