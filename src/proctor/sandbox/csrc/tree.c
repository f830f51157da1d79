#include "tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "frame.h"
#include "sys.h"

enum { LEVELS_MAX = (TREE_PATH_MAX + 1) / 2, PIECE_MAX = 4000 };

static uint8_t content[65536];

/* ---- pack ------------------------------------------------------------------------------------------------------------ */

/* The directories from the root of the tree down to the current one. Each keeps how far it was read, because one buffer of
 * entries serves them all. */
static struct {
    int fd;
    size_t path_length; /* of the directory itself */
    int64_t position;   /* the kernel's cookie of the last entry that was taken */
} levels[LEVELS_MAX];
static char pack_path[TREE_PATH_MAX + 1];

static int pack_content(int fd, uint64_t size) {
    uint8_t trailer[4];
    uint64_t left = size;
    int error = 0;
    while (left > 0) {
        size_t want = left < sizeof content ? (size_t)left : sizeof content;
        ssize_t got = error != 0 ? 0 : read(fd, content, want);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) { /* the length was promised: what is missing is zeros, and the trailer says so */
            if (error == 0) error = got < 0 ? errno : ESTALE;
            memset(content, 0, want);
            got = (ssize_t)want;
        }
        if (out_bytes(content, (size_t)got) < 0) return -1;
        left -= (uint64_t)got;
    }
    put_u32(trailer, (uint32_t)error);
    return out_bytes(trailer, sizeof trailer);
}

static int pack_skipped(const struct stat *info, int error, size_t length) {
    return out_record('S', info, (uint64_t)error, pack_path, length, NULL, 0);
}

static int pack_file(int directory, const char *name, const struct stat *seen, size_t length) {
    struct stat info;
    int fd = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) return pack_skipped(seen, errno, length);
    int failed = 0;
    if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode)) {
        failed = pack_skipped(seen, ESTALE, length); /* it was swapped for something else */
    } else {
        uint64_t size = (uint64_t)info.st_size;
        failed = out_record('F', &info, size, pack_path, length, NULL, 0) < 0 || pack_content(fd, size) < 0 ? -1 : 0;
    }
    close(fd);
    return failed;
}

static int pack_link(int directory, const char *name, const struct stat *info, size_t length) {
    char target[TREE_TARGET_MAX + 1];
    ssize_t got = readlinkat(directory, name, target, sizeof target);
    if (got < 0) return pack_skipped(info, errno, length);
    if (got > TREE_TARGET_MAX) return pack_skipped(info, ENAMETOOLONG, length);
    return out_record('L', info, 0, pack_path, length, target, (size_t)got);
}

/* Opens a directory as the next level. 1 = entered, 0 = skipped, -1 and errno. */
static int pack_enter(int directory, const char *name, size_t *depth, size_t length) {
    struct stat info;
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) < 0 ? 0 : pack_skipped(&info, errno, length);
    if (fstat(fd, &info) < 0 || out_record('D', &info, 0, pack_path, length, NULL, 0) < 0) {
        close(fd);
        return -1;
    }
    levels[*depth].fd = fd;
    levels[*depth].path_length = length;
    levels[*depth].position = 0;
    (*depth)++;
    return 1;
}

/* One entry. 1 = a directory was entered, 0 = done with it, -1 and errno. */
static int pack_entry(int directory, const char *name, size_t *depth, size_t length) {
    struct stat info;
    if (fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) < 0) return errno == ENOENT ? 0 : -1;
    switch (kind_of(info.st_mode)) {
    case 'D': return *depth == LEVELS_MAX ? pack_skipped(&info, ENAMETOOLONG, length) : pack_enter(directory, name, depth, length);
    case 'F': return pack_file(directory, name, &info, length);
    case 'L': return pack_link(directory, name, &info, length);
    default: return out_record(kind_of(info.st_mode), &info, 0, pack_path, length, NULL, 0);
    }
}

/* Goes on with the deepest directory until it is done or a deeper one was entered. */
static int pack_level(size_t *depth) {
    static char batch[32768];
    const size_t own = *depth - 1;
    const size_t base = levels[own].path_length;
    if (lseek(levels[own].fd, levels[own].position, SEEK_SET) < 0) return -1;
    long got;
    while ((got = syscall(SYS_getdents64, levels[own].fd, batch, sizeof batch)) > 0) {
        for (long at = 0; at < got;) {
            const struct dirent64 *entry = (const void *)(batch + at);
            size_t name_length = strlen(entry->d_name), length = base + (base > 0) + name_length;
            at += entry->d_reclen;
            levels[own].position = entry->d_off;
            if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
            if (length > TREE_PATH_MAX) {
                if (pack_skipped(NULL, ENAMETOOLONG, base) < 0) return -1;
                continue;
            }
            if (base > 0) pack_path[base] = '/';
            memcpy(pack_path + length - name_length, entry->d_name, name_length);
            int entered = pack_entry(levels[own].fd, entry->d_name, depth, length);
            if (entered != 0) return entered < 0 ? -1 : 0;
        }
    }
    close(levels[own].fd);
    (*depth)--;
    return got < 0 ? -1 : 0;
}

int tree_pack(const char *path) {
    struct rlimit files;
    size_t depth = 0;
    if (getrlimit(RLIMIT_NOFILE, &files) < 0) return complain(path);
    files.rlim_cur = files.rlim_max; /* one descriptor for each level */
    if (setrlimit(RLIMIT_NOFILE, &files) < 0) return complain(path);
    struct stat info;
    if (fstatat(AT_FDCWD, path, &info, AT_SYMLINK_NOFOLLOW) < 0 || pack_entry(AT_FDCWD, path, &depth, 0) < 0) return complain(path);
    while (depth > 0) {
        if (pack_level(&depth) < 0) return complain(path);
    }
    return out_end() < 0 ? complain(path) : 0;
}

/* ---- unpack ---------------------------------------------------------------------------------------------------------- */

struct record {
    char kind;
    mode_t mode;
    struct timespec mtime;
    uint64_t size;
    size_t path_length, target_length;
    char path[TREE_PATH_MAX + 1], target[TREE_PATH_MAX + 1];
};

/* An open directory of the tree, and its path. */
struct place {
    int fd;
    size_t length;
    char path[TREE_PATH_MAX + 1];
};

static struct record record;
static struct place place = {.fd = -1};        /* the parent of the last record */
static struct place target_place = {.fd = -1}; /* the parent of the last hard link's target */

static int path_is_sound(const char *path, size_t length) {
    if (length == 0 || memchr(path, '\0', length) != NULL) return 0;
    for (size_t at = 0; at <= length;) {
        const char *slash = memchr(path + at, '/', length - at);
        size_t run = slash != NULL ? (size_t)(slash - path) - at : length - at;
        if (run == 0 || run > NAME_MAX || (run == 1 && path[at] == '.') || (run == 2 && path[at] == '.' && path[at + 1] == '.')) return 0;
        at += run + 1;
    }
    return 1;
}

/* Opens a directory below `from` without following a link. The path is sound. gVisor has no openat2(2), so there each component is
 * opened by itself. */
static int open_directory(int from, const char *path) {
    static char component[NAME_MAX + 1];
    int fd = sys_openat2(from, path, O_PATH | O_DIRECTORY, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS);
    if (fd >= 0 || errno != ENOSYS) return fd;
    fd = from;
    for (size_t at = 0; path[at] != '\0' && (fd >= 0);) {
        size_t run = strcspn(path + at, "/");
        memcpy(component, path + at, run);
        component[run] = '\0';
        int next = openat(fd, component, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), error = errno;
        if (fd != from) close(fd);
        errno = error;
        fd = next;
        at += run + (path[at + run] == '/');
    }
    return fd;
}

/* Opens `path` below `from` without following a link, in pieces that the kernel takes. With `create`, missing directories are made. */
static int open_below(int from, char *path, size_t length, int create) {
    int fd = fcntl(from, F_DUPFD_CLOEXEC, 3);
    for (size_t at = 0; fd >= 0 && at < length;) {
        size_t end = length;
        if (create || length - at > PIECE_MAX) { /* a component at a time where one may have to be made */
            end = create ? at + 1 : at + PIECE_MAX;
            if (create) while (end < length && path[end] != '/') end++;
            else while (path[end] != '/') end--; /* there is one: no component is longer than NAME_MAX */
        }
        char saved = path[end];
        path[end] = '\0';
        int made = create ? mkdirat(fd, path + at, 0755) : 0;
        int next = made < 0 && errno != EEXIST ? -1
            : open_directory(fd, path + at);
        path[end] = saved;
        int error = errno;
        close(fd);
        errno = error;
        fd = next;
        at = end + 1;
    }
    return fd;
}

/* Opens the parent of `path` into `held` (which may hold it already, or a directory above it) and finds the last component. */
static const char *find_parent(struct place *held, int root, char *path, size_t length, int create) {
    size_t parent = length;
    while (parent > 0 && path[parent - 1] != '/') parent--;
    const char *name = path + parent;
    if (parent > 0) parent--; /* the slash */
    if (held->fd >= 0 && held->length == parent && memcmp(held->path, path, parent) == 0) return name;
    size_t from = 0;
    int start = root;
    if (held->fd >= 0 && held->length > 0 && held->length < parent && path[held->length] == '/' && memcmp(held->path, path, held->length) == 0) {
        from = held->length + 1;
        start = held->fd;
    }
    int fd = open_below(start, path + from, parent - from, 0);
    if (fd < 0 && errno == ENOENT && create) fd = open_below(start, path + from, parent - from, 1);
    if (fd < 0) return NULL;
    if (held->fd >= 0) close(held->fd);
    held->fd = fd;
    held->length = parent;
    memcpy(held->path, path, parent);
    return name;
}

static int read_record(void) {
    uint8_t header[RECORD_HEADER];
    if (in_bytes(header, sizeof header) < 0) return -1;
    record.kind = (char)header[0];
    record.path_length = (size_t)header[2] | (size_t)header[3] << 8;
    record.mode = get_u32(header + 4) & 01777;
    record.mtime = (struct timespec){.tv_sec = (time_t)get_u64(header + 24), .tv_nsec = (long)get_u32(header + 16)};
    record.target_length = get_u32(header + 20);
    record.size = get_u64(header + 32);
    if (record.target_length > TREE_PATH_MAX || record.mtime.tv_nsec > 999999999) {
        errno = EPROTO;
        return -1;
    }
    if (in_bytes(record.path, record.path_length) < 0 || in_bytes(record.target, record.target_length) < 0) return -1;
    record.path[record.path_length] = record.target[record.target_length] = '\0';
    int sound = record.kind == 'E' ? record.path_length == 0 : path_is_sound(record.path, record.path_length);
    if (record.kind == 'H') sound = sound && path_is_sound(record.target, record.target_length);
    if (record.kind == 'L') sound = sound && record.target_length > 0 && memchr(record.target, '\0', record.target_length) == NULL;
    if (sound) return 0;
    errno = EPROTO;
    return -1;
}

static int unpack_content(int fd) {
    uint8_t trailer[4];
    for (uint64_t left = record.size; left > 0;) {
        size_t want = left < sizeof content ? (size_t)left : sizeof content;
        if (in_bytes(content, want) < 0) return -1;
        for (size_t at = 0; at < want;) {
            ssize_t written = write(fd, content + at, want - at);
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) return -1;
            at += (size_t)written;
        }
        left -= want;
    }
    if (in_bytes(trailer, sizeof trailer) < 0) return -1;
    errno = EPROTO;
    return get_u32(trailer) == 0 ? 0 : -1;
}

/* What is in the way of a new name goes, unless it is a directory. */
static int make_way(int directory, const char *name) { return unlinkat(directory, name, 0) < 0 && errno != ENOENT ? -1 : 0; }

static int set_times(int directory, const char *name) {
    const struct timespec times[2] = {record.mtime, record.mtime};
    return utimensat(directory, name, times, AT_SYMLINK_NOFOLLOW);
}

static int unpack_file(int directory, const char *name) {
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    if (make_way(directory, name) < 0) return -1;
    int fd = openat(directory, name, flags, 0600);
    if (fd < 0) return -1;
    const struct timespec times[2] = {record.mtime, record.mtime};
    int failed = unpack_content(fd) < 0 || fchmod(fd, record.mode & 0777) < 0 || futimens(fd, times) < 0;
    int error = errno;
    if (close(fd) < 0 && !failed) return -1;
    errno = error;
    return failed ? -1 : 0;
}

static int unpack_directory(int directory, const char *name) {
    struct stat info;
    if (mkdirat(directory, name, 0700 | (record.mode & 0777)) == 0) return 0;
    if (errno != EEXIST || fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) < 0) return -1;
    if (S_ISDIR(info.st_mode)) return 0;
    return make_way(directory, name) < 0 ? -1 : mkdirat(directory, name, 0700 | (record.mode & 0777));
}

/* A directory's own mode and time, when it is complete. One that belongs to somebody else was there before and stays as it is. */
static int finish_directory(int directory, const char *name) {
    struct stat info;
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) < 0) return -1;
    const struct timespec times[2] = {record.mtime, record.mtime};
    int foreign = info.st_uid != geteuid();
    int failed = !foreign && (fchmod(fd, record.mode) < 0 || futimens(fd, times) < 0);
    int error = errno;
    close(fd);
    errno = error;
    return failed ? -1 : 0;
}

static int unpack_link(int directory, const char *name) {
    if (make_way(directory, name) < 0 || symlinkat(record.target, directory, name) < 0) return -1;
    return set_times(directory, name);
}

static int unpack_hard_link(int root, int directory, const char *name) {
    struct stat info;
    const char *first = find_parent(&target_place, root, record.target, record.target_length, 0);
    if (first == NULL || fstatat(target_place.fd, first, &info, AT_SYMLINK_NOFOLLOW) < 0) return -1;
    if (!S_ISREG(info.st_mode)) {
        errno = EINVAL;
        return -1;
    }
    if (make_way(directory, name) < 0) return -1;
    return linkat(target_place.fd, first, directory, name, 0);
}

static int unpack_record(int root) {
    const char *name = find_parent(&place, root, record.path, record.path_length, 1);
    if (name == NULL) return -1;
    switch (record.kind) {
    case 'D': return unpack_directory(place.fd, name);
    case 'd': return finish_directory(place.fd, name);
    case 'F': return unpack_file(place.fd, name);
    case 'L': return unpack_link(place.fd, name);
    case 'H': return unpack_hard_link(root, place.fd, name);
    default: errno = EPROTO; return -1;
    }
}

int tree_unpack(const char *target) {
    char path[4096];
    size_t length = strlen(target);
    if (length >= sizeof path) errno = ENAMETOOLONG;
    if (length >= sizeof path) return complain(target);
    memcpy(path, target, length + 1);
    if (make_directories(path) < 0) return complain(target);
    int root = open(target, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return complain(target);
    umask(0);
    for (uint64_t count = 0;; count++) {
        if (read_record() < 0) return complain("tree stream");
        if (record.kind == 'E') {
            errno = EPROTO;
            return record.size == count ? 0 : complain("tree stream");
        }
        if (unpack_record(root) < 0) return complain(record.path);
    }
}
