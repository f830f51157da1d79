#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "frame.h"
#include "tree.h"

static uint8_t out_buffer[65536];
static size_t out_used;
static uint64_t records;

/* ---- standard input and output -------------------------------------------------------------------------------------- */

static int write_all(int fd, const void *bytes, size_t length) {
    const uint8_t *at = bytes;
    while (length > 0) {
        ssize_t written = write(fd, at, length);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return -1;
        at += written;
        length -= (size_t)written;
    }
    return 0;
}

int out_flush(void) {
    size_t length = out_used;
    out_used = 0;
    return write_all(1, out_buffer, length);
}

int out_bytes(const void *bytes, size_t length) {
    if (length > sizeof out_buffer - out_used && out_flush() < 0) return -1;
    if (length > sizeof out_buffer) return write_all(1, bytes, length);
    if (length > 0) memcpy(out_buffer + out_used, bytes, length);
    out_used += length;
    return 0;
}

int out_record(char kind, const struct stat *info, uint64_t size, const char *path, size_t path_length, const char *target,
               size_t target_length) {
    uint8_t header[RECORD_HEADER] = {(uint8_t)kind, 0, (uint8_t)path_length, (uint8_t)(path_length >> 8)};
    if (info != NULL) {
        put_u32(header + 4, info->st_mode & 07777);
        put_u32(header + 8, info->st_uid);
        put_u32(header + 12, info->st_gid);
        put_u32(header + 16, (uint32_t)info->st_mtim.tv_nsec);
        put_u64(header + 24, (uint64_t)info->st_mtim.tv_sec);
    }
    put_u32(header + 20, (uint32_t)target_length);
    put_u64(header + 32, size);
    records++;
    return out_bytes(header, sizeof header) < 0 || out_bytes(path, path_length) < 0 || out_bytes(target, target_length) < 0 ? -1 : 0;
}

int out_end(void) { return out_record('E', NULL, records, NULL, 0, NULL, 0) < 0 ? -1 : out_flush(); }

int in_bytes(void *bytes, size_t length) {
    uint8_t *at = bytes;
    while (length > 0) {
        ssize_t got = read(0, at, length);
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) errno = EPROTO;
        if (got <= 0) return -1;
        at += got;
        length -= (size_t)got;
    }
    return 0;
}

int complain(const char *path) {
    int error = errno;
    const char *name = strerrorname_np(error);
    fprintf(stderr, "%d %s: %s: %s\n", error, name != NULL ? name : "E", path, strerror(error));
    return 1;
}

char kind_of(mode_t mode) {
    switch (mode & S_IFMT) {
    case S_IFDIR: return 'D';
    case S_IFREG: return 'F';
    case S_IFLNK: return 'L';
    case S_IFIFO: return 'P';
    case S_IFSOCK: return 'K';
    case S_IFCHR: return 'C';
    default: return 'B';
    }
}

/* ---- paths ---------------------------------------------------------------------------------------------------------- */

/* Cuts slashes off the end (but leaves "/"). */
static void trim(char *path) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') path[--length] = '\0';
}

/* Opens the directory that holds the last component, and names that component. -1 and errno. */
static int open_parent(char *path, const char **name) {
    char *slash = strrchr(path, '/');
    *name = slash != NULL ? slash + 1 : path;
    if (**name == '\0' || strcmp(*name, ".") == 0 || strcmp(*name, "..") == 0) {
        errno = EINVAL;
        return -1;
    }
    if (slash == NULL) return open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (slash == path) return open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    *slash = '\0';
    int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    *slash = '/';
    return fd;
}

int make_directories(char *path) {
    struct stat info;
    for (char *at = path + 1; *path != '\0' && *at != '\0'; at++) {
        if (*at != '/' || at[-1] == '/') continue;
        *at = '\0';
        int made = mkdir(path, 0755);
        *at = '/';
        if (made < 0 && errno != EEXIST && errno != EROFS && errno != EACCES) return -1;
    }
    if (mkdir(path, 0755) == 0) return 0;
    int error = errno;
    if (stat(path, &info) < 0) {
        errno = error;
        return -1;
    }
    errno = ENOTDIR;
    return S_ISDIR(info.st_mode) ? 0 : -1;
}

static int parse_number(const char *text, int base, uint64_t *value) {
    char *end = NULL;
    errno = 0;
    *value = strtoull(text, &end, base);
    if (errno == 0 && end != text && *end == '\0' && text[0] != '-') return 0;
    errno = EINVAL;
    return -1;
}

/* ---- the operations ------------------------------------------------------------------------------------------------- */

/* read PATH LIMIT: the first LIMIT bytes of a regular file. */
static int run_read(char **argv) {
    static uint8_t buffer[65536];
    struct stat info;
    uint64_t limit;
    if (parse_number(argv[1], 10, &limit) < 0) return complain(argv[1]);
    int fd = open(argv[0], O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 || fstat(fd, &info) < 0) return complain(argv[0]);
    if (!S_ISREG(info.st_mode)) {
        errno = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
        return complain(argv[0]);
    }
    while (limit > 0) {
        ssize_t got = read(fd, buffer, limit < sizeof buffer ? (size_t)limit : sizeof buffer);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return complain(argv[0]);
        if (got == 0) break;
        if (write_all(1, buffer, (size_t)got) < 0) return complain(argv[0]);
        limit -= (uint64_t)got;
    }
    return 0;
}

static int copy_input(int fd) {
    static uint8_t buffer[65536];
    for (;;) {
        ssize_t got = read(0, buffer, sizeof buffer);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return (int)got;
        if (write_all(fd, buffer, (size_t)got) < 0) return -1;
    }
}

/* In place, where the directory cannot take a new file but the old one can be written. */
static int write_in_place(int parent, const char *name) {
    struct stat info;
    int fd = openat(parent, name, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 || fstat(fd, &info) < 0) return -1;
    if (!S_ISREG(info.st_mode)) {
        errno = EINVAL;
        return -1;
    }
    return ftruncate(fd, 0) < 0 || copy_input(fd) < 0 || close(fd) < 0 ? -1 : 0;
}

static int write_renamed(int parent, const char *name, const char *temporary, int fd, mode_t mode) {
    if (copy_input(fd) == 0 && fchmod(fd, mode) == 0 && close(fd) == 0 && renameat(parent, temporary, parent, name) == 0) return 0;
    int error = errno;
    unlinkat(parent, temporary, 0);
    errno = error;
    return -1;
}

/* write PATH MODE: a whole file from standard input; parents are made. MODE `-` keeps the mode of an old file (0644 for a new
 * one). A link is followed where it leads to something; a reader sees the old content or the new. */
static int run_write(char **argv) {
    char resolved[PATH_MAX], temporary[64];
    char *path = argv[0], *slash = strrchr(path, '/');
    const char *name;
    struct stat info;
    uint64_t mode = 0644;
    int keep_mode = strcmp(argv[1], "-") == 0;
    if (!keep_mode && parse_number(argv[1], 8, &mode) < 0) return complain(argv[1]);
    if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode) && realpath(path, resolved) != NULL) path = resolved;
    if (path != resolved && slash != NULL && slash != path) {
        *slash = '\0';
        if (make_directories(path) < 0) return complain(path);
        *slash = '/';
    }
    int parent = open_parent(path, &name);
    if (parent < 0) return complain(path);
    int exists = fstatat(parent, name, &info, AT_SYMLINK_NOFOLLOW) == 0;
    if (exists && !S_ISREG(info.st_mode) && !S_ISLNK(info.st_mode)) {
        errno = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
        return complain(path);
    }
    if (exists && keep_mode && S_ISREG(info.st_mode)) mode = info.st_mode & 0777;
    snprintf(temporary, sizeof temporary, ".proctor-write-%d", getpid());
    int fd = openat(parent, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int failed = fd >= 0 ? write_renamed(parent, name, temporary, fd, (mode_t)mode & 07777)
                         : !exists || S_ISLNK(info.st_mode) || write_in_place(parent, name) < 0;
    return failed ? complain(path) : 0;
}

static int out_entry(int directory, const char *name, const char *path, size_t path_length) {
    char target[TREE_TARGET_MAX + 1];
    struct stat info;
    ssize_t length = 0;
    if (fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) < 0) return -1;
    if (S_ISLNK(info.st_mode) && (length = readlinkat(directory, name, target, TREE_TARGET_MAX)) < 0) return -1;
    return out_record(kind_of(info.st_mode), &info, (uint64_t)info.st_size, path, path_length, target, (size_t)length);
}

/* list PATH: one record for each entry of a directory. */
static int run_list(char **argv) {
    static char batch[32768];
    int fd = open(argv[0], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return complain(argv[0]);
    for (;;) {
        long got = syscall(SYS_getdents64, fd, batch, sizeof batch);
        if (got < 0) return complain(argv[0]);
        if (got == 0) break;
        for (long at = 0; at < got;) {
            const struct dirent64 *entry = (const void *)(batch + at);
            at += entry->d_reclen;
            if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
            /* One that is gone by now is not in the list. */
            if (out_entry(fd, entry->d_name, entry->d_name, strlen(entry->d_name)) < 0 && errno != ENOENT) return complain(argv[0]);
        }
    }
    return out_end() < 0 ? complain(argv[0]) : 0;
}

/* stat PATH: one record; a final link is not followed. */
static int run_stat(char **argv) {
    return out_entry(AT_FDCWD, argv[0], "", 0) < 0 || out_end() < 0 ? complain(argv[0]) : 0;
}

/* mkdir PATH MODE: with its parents; it is fine when it is there already. */
static int run_mkdir(char **argv) {
    uint64_t mode;
    struct stat info;
    if (parse_number(argv[1], 8, &mode) < 0) return complain(argv[1]);
    trim(argv[0]);
    int existed = stat(argv[0], &info) == 0;
    if (make_directories(argv[0]) < 0) return complain(argv[0]);
    return !existed && chmod(argv[0], (mode_t)mode & 07777) < 0 ? complain(argv[0]) : 0;
}

/* ---- remove --------------------------------------------------------------------------------------------------------- */

struct level {
    dev_t device;
    ino_t inode;
};

/* Where a removal stands: an open directory, and what its parents were. Depth is bounded by memory only; going up is
 * through `..`, checked against the directory that was left. */
struct descent {
    int fd;
    size_t depth, capacity;
    struct level *levels;
};

static int descend(struct descent *descent, const char *name) {
    struct stat info;
    if (descent->depth == descent->capacity) {
        size_t capacity = descent->capacity == 0 ? 256 : descent->capacity * 2;
        struct level *levels = realloc(descent->levels, capacity * sizeof *levels);
        if (levels == NULL) return -1;
        descent->levels = levels;
        descent->capacity = capacity;
    }
    if (fstat(descent->fd, &info) < 0) return -1;
    int child = openat(descent->fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (child < 0) return -1;
    descent->levels[descent->depth++] = (struct level){info.st_dev, info.st_ino};
    close(descent->fd);
    descent->fd = child;
    return 0;
}

static int ascend(struct descent *descent) {
    struct stat info;
    int parent = openat(descent->fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0 || fstat(parent, &info) < 0) return -1;
    const struct level *left = &descent->levels[--descent->depth];
    if (info.st_dev != left->device || info.st_ino != left->inode) {
        errno = ESTALE; /* somebody moved the directory away under us */
        return -1;
    }
    close(descent->fd);
    descent->fd = parent;
    return 0;
}

/* Removes what can be removed of the current directory. 0 = it is empty, 1 = went down into `name`d one, -1 and errno. */
static int clear_directory(struct descent *descent) {
    static char batch[32768];
    int removed = 1;
    while (removed) {
        removed = 0;
        if (lseek(descent->fd, 0, SEEK_SET) < 0) return -1;
        long got;
        while ((got = syscall(SYS_getdents64, descent->fd, batch, sizeof batch)) > 0) {
            for (long at = 0; at < got;) {
                const struct dirent64 *entry = (const void *)(batch + at);
                at += entry->d_reclen;
                if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
                removed = 1;
                if (unlinkat(descent->fd, entry->d_name, 0) == 0 || errno == ENOENT) continue;
                if (errno != EISDIR) return -1;
                if (unlinkat(descent->fd, entry->d_name, AT_REMOVEDIR) == 0 || errno == ENOENT) continue;
                if (errno != ENOTEMPTY && errno != EEXIST) return -1;
                return descend(descent, entry->d_name) < 0 ? -1 : 1;
            }
        }
        if (got < 0) return -1;
    }
    return 0;
}

static int remove_tree(int parent, const char *name) {
    struct descent descent = {.fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)};
    if (descent.fd < 0) return -1;
    for (;;) {
        int went_down = clear_directory(&descent);
        if (went_down < 0) return -1;
        if (went_down) continue;
        if (descent.depth == 0) break;
        if (ascend(&descent) < 0) return -1;
    }
    return unlinkat(parent, name, AT_REMOVEDIR);
}

/* remove PATH 0|1: a file, a link or an empty directory; with 1 also a directory with all it holds. */
static int run_remove(char **argv) {
    const char *name;
    trim(argv[0]);
    int parent = open_parent(argv[0], &name);
    if (parent < 0) return complain(argv[0]);
    if (unlinkat(parent, name, 0) == 0) return 0;
    if (errno != EISDIR) return complain(argv[0]);
    if (unlinkat(parent, name, AT_REMOVEDIR) == 0) return 0;
    if ((errno != ENOTEMPTY && errno != EEXIST) || strcmp(argv[1], "1") != 0) return complain(argv[0]);
    return remove_tree(parent, name) < 0 ? complain(argv[0]) : 0;
}

static int run_pack(char **argv) {
    trim(argv[0]);
    return tree_pack(argv[0]);
}

static int run_unpack(char **argv) {
    trim(argv[0]);
    return tree_unpack(argv[0]);
}

static const struct {
    const char *name;
    size_t argc;
    int (*run)(char **argv);
} builtins[] = {
    {"read", 2, run_read},   {"write", 2, run_write}, {"list", 1, run_list}, {"stat", 1, run_stat},
    {"remove", 2, run_remove}, {"mkdir", 2, run_mkdir}, {"pack", 1, run_pack}, {"unpack", 1, run_unpack},
};

int builtin_known(const char *name) {
    for (size_t i = 0; i < sizeof builtins / sizeof *builtins; i++) {
        if (strcmp(builtins[i].name, name) == 0) return 1;
    }
    return 0;
}

int builtin_main(const char *name, size_t argc, char **argv) {
    for (size_t i = 0; i < sizeof builtins / sizeof *builtins; i++) {
        if (strcmp(builtins[i].name, name) == 0 && builtins[i].argc == argc) return builtins[i].run(argv);
    }
    errno = EINVAL;
    return complain(name);
}
