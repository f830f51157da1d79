#include "group.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { IDLE_MAX = 16 };

static struct exec_group idle[IDLE_MAX]; /* empty groups, ready to be used again */
static unsigned idle_count;
static uint32_t last_name;

static __rlimit_resource_t mark_resource = RLIMIT_LOCKS;

void group_mark_resource(int resource) {
    if (resource != 0) mark_resource = (__rlimit_resource_t)resource;
}

/* Marks only ever go down: raising a hard limit would need a privilege. */
static rlim_t mark_of(uint32_t id) { return (rlim_t)1 << 40 | (UINT32_MAX - id); }

static int make_directory(struct exec_group *group, int parent_fd) {
    char name[16], events[32];
    group->name = ++last_name;
    snprintf(name, sizeof name, "e%u", group->name);
    snprintf(events, sizeof events, "%s/cgroup.events", name);
    if (mkdirat(parent_fd, name, 0755) < 0) return -1;
    group->dir_fd = openat(parent_fd, name, O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    group->events_fd = openat(parent_fd, events, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (group->dir_fd >= 0 && group->events_fd >= 0) return 0;
    int error = errno;
    if (group->dir_fd >= 0) close(group->dir_fd);
    unlinkat(parent_fd, name, AT_REMOVEDIR);
    errno = error;
    return -1;
}

int group_create(struct exec_group *group, int parent_fd, uint32_t id) {
    if (parent_fd < 0) {
        const struct rlimit mark = {.rlim_cur = mark_of(id), .rlim_max = mark_of(id)};
        *group = (struct exec_group){.id = id, .dir_fd = -1, .events_fd = -1};
        return setrlimit(mark_resource, &mark);
    }
    if (idle_count > 0) {
        *group = idle[--idle_count];
        group->id = id;
        return 0;
    }
    *group = (struct exec_group){.id = id};
    return make_directory(group, parent_fd);
}

int group_release(struct exec_group *group, int parent_fd) {
    char name[16];
    if (group->dir_fd < 0) return 0;
    /* Never one that was killed: the kernel (6.12 and later at least) compares the count of kills of the parent's group with that
     * of the group a child is cloned into, and where they differ it kills the child at birth. */
    if (!group->killed && idle_count < IDLE_MAX) {
        idle[idle_count++] = *group;
        return 0;
    }
    close(group->dir_fd);
    close(group->events_fd);
    snprintf(name, sizeof name, "e%u", group->name);
    return unlinkat(parent_fd, name, AT_REMOVEDIR);
}

/* 'R', 'S', 'Z', … of a process, or 0 when it is gone. */
static char process_state(pid_t pid) {
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return 0;
    text[got] = '\0';
    const char *name_end = strrchr(text, ')'); /* the name itself may hold anything */
    return name_end != NULL && name_end[1] == ' ' ? name_end[2] : 0;
}

static int is_alive(pid_t pid) {
    char state = process_state(pid);
    return state != 0 && state != 'Z' && state != 'X';
}

/* The mark of a process of another user, whom prlimit() does not show to us without CAP_SYS_RESOURCE. Everybody may read this. */
static rlim_t written_mark(pid_t pid) {
    char path[32], text[4096];
    snprintf(path, sizeof path, "/proc/%d/limits", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return 0;
    text[got] = '\0';
    const char *name = mark_resource == RLIMIT_LOCKS ? "Max file locks" : "Max core file size", *line = strstr(text, name);
    return line != NULL ? strtoull(line + strlen(name), NULL, 10) : 0;
}

static int has_mark(pid_t pid, uint32_t id) {
    struct rlimit limit;
    if (prlimit(pid, mark_resource, NULL, &limit) == 0) return limit.rlim_max == mark_of(id);
    return errno == EPERM && written_mark(pid) == mark_of(id);
}

/* Walks /proc: counts the living other processes, or those of one group only, and signals each when `signal` is not 0. */
static int walk_processes(const uint32_t *id, int signal) {
    static char batch[32768];
    int count = 0, fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return -1;
    for (;;) {
        long got = syscall(SYS_getdents64, fd, batch, sizeof batch);
        if (got <= 0) {
            int error = errno;
            close(fd);
            errno = error;
            return got == 0 ? count : -1;
        }
        for (long at = 0; at < got;) {
            const struct dirent64 *entry = (const void *)(batch + at);
            at += entry->d_reclen;
            if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
            pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
            if (pid == getpid() || (id != NULL && !has_mark(pid, *id)) || !is_alive(pid)) continue;
            count++;
            if (signal != 0 && kill(pid, signal) < 0 && errno != ESRCH) count = count > 0 ? count : 1;
        }
    }
}

int processes_alive(void) { return walk_processes(NULL, 0); }

int group_kill(struct exec_group *group) {
    group->killed = 1;
    if (group->dir_fd < 0) return walk_processes(&group->id, SIGKILL) < 0 ? -1 : 0;
    int fd = openat(group->dir_fd, "cgroup.kill", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t written = write(fd, "1", 1);
    int error = errno;
    close(fd);
    errno = error;
    return written == 1 ? 0 : -1;
}

int group_count(const struct exec_group *group) {
    static char text[65536];
    if (group->dir_fd < 0) return walk_processes(&group->id, 0);
    int count = 0, fd = openat(group->dir_fd, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t got;
    while ((got = read(fd, text, sizeof text)) > 0) {
        for (ssize_t i = 0; i < got; i++) count += text[i] == '\n';
    }
    int error = errno;
    close(fd);
    errno = error;
    return got == 0 ? count : -1;
}

int group_is_empty(const struct exec_group *group) {
    char text[128];
    if (group->dir_fd < 0) {
        int left = walk_processes(&group->id, 0);
        return left < 0 ? -1 : left == 0;
    }
    ssize_t got = pread(group->events_fd, text, sizeof text - 1, 0);
    if (got < 0) return -1;
    text[got] = '\0';
    return strstr(text, "populated 0") != NULL;
}
