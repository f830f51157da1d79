/* Directories and values in cgroup trees. Every path is relative to a directory that the Edge made for itself. */
#include "cgroups.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "devices.h"
#include "hardened.h"
#include "sys.h"

/* Buffers of internet sockets may take one part in so many of the memory limit, beside it (v1 only). */
#define SOCKET_SHARE 8

static unsigned controller_bits(const char *names) {
    static const struct {
        const char *name;
        unsigned bits;
    } known[] = {
        {"memory", CONTROLS_MEMORY}, {"cpu", CONTROLS_CPU},         {"cpuacct", CONTROLS_CPUACCT}, {"pids", CONTROLS_PIDS},
        {"unified", IS_UNIFIED},
        {"*", IS_UNIFIED | CONTROLS_MEMORY | CONTROLS_CPU | CONTROLS_PIDS},
    };
    unsigned bits = 0;
    char copy[128];
    if (strlen(names) >= sizeof copy) return 0;
    strcpy(copy, names);
    char *rest = NULL;
    for (char *name = strtok_r(copy, ",", &rest); name != NULL; name = strtok_r(NULL, ",", &rest)) {
        unsigned found = 0;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
            if (strcmp(name, known[i].name) == 0) found = known[i].bits;
        }
        if (found == 0) return 0;
        bits |= found;
    }
    return bits;
}

/* A cgroup2 hierarchy can be mounted beside v1 controllers anywhere; only this process and its children see this one. */
static int open_private_unified(const char *edge) {
    int context = sys_fsopen("cgroup2");
    if (context < 0) return -1;
    int mount = sys_fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0 ? -1 : sys_fsmount(context, 0);
    close(context);
    if (mount < 0) return -1;
    char path[NAME_MAX_BYTES + 16];
    snprintf(path, sizeof path, "proctor/%s", edge);
    int made = (mkdirat(mount, "proctor", 0755) == 0 || errno == EEXIST) && (mkdirat(mount, path, 0755) == 0 || errno == EEXIST);
    int fd = made ? openat(mount, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    close(mount);
    return fd;
}

static int open_trees(const struct config *config, struct cgroups *cgroups, struct failure *failure) {
    *cgroups = (struct cgroups){.unified = -1};
    for (unsigned i = 0; i < config->cgroup_count; i++) {
        struct cgroup_tree *tree = &cgroups->trees[cgroups->count++];
        tree->controllers = controller_bits(config->cgroups[i].controllers);
        if (tree->controllers == 0) return fail(failure, "cgroup-controllers", EINVAL);
        tree->fd = open(config->cgroups[i].path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (tree->fd < 0) return fail(failure, "cgroup-open", errno);
        if (tree->controllers & IS_UNIFIED) cgroups->unified = tree->fd;
    }
    if (cgroups->unified >= 0) return 0;
    if (cgroups->count == CGROUPS_MAX) return fail(failure, "cgroup-trees", E2BIG);
    int fd = open_private_unified(config->edge);
    if (fd < 0) return fail(failure, "cgroup2-mount", errno);
    cgroups->trees[cgroups->count++] = (struct cgroup_tree){.controllers = IS_UNIFIED, .fd = fd};
    cgroups->unified = fd;
    return 0;
}

int cgroups_open(const struct config *config, struct cgroups *cgroups, struct failure *failure) {
    if (open_trees(config, cgroups, failure) < 0) return -1;
    cgroups->confines_devices = devices_confine(cgroups->unified) == 0;
    return 0;
}

static int write_at(int at, const char *slot, const char *file, const char *value) {
    char path[NAME_MAX_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", slot, file);
    int fd = openat(at, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t written = write(fd, value, strlen(value));
    int error = errno;
    close(fd);
    errno = error;
    return written < 0 ? -1 : 0;
}

static int write_number(int at, const char *slot, const char *file, uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    return write_at(at, slot, file, text);
}

static int open_tasks(int at, const char *slot) {
    char path[NAME_MAX_BYTES + 16];
    snprintf(path, sizeof path, "%s/tasks", slot);
    return openat(at, path, O_WRONLY | O_CLOEXEC);
}

int cgroups_make_slot(const struct cgroups *cgroups, const char *slot, uid_t owner, struct slot_groups *groups,
                      struct failure *failure) {
    *groups = (struct slot_groups){.unified = -1};
    for (unsigned i = 0; i < cgroups->count; i++) {
        const struct cgroup_tree *tree = &cgroups->trees[i];
        if (mkdirat(tree->fd, slot, 0755) < 0) return fail(failure, "cgroup-mkdir", errno);
        if (tree->controllers & IS_UNIFIED) continue;
        int fd = open_tasks(tree->fd, slot);
        if (fd < 0) {
            int error = errno;
            cgroups_close_slot(groups);
            return fail(failure, "cgroup-open", error);
        }
        groups->tasks[groups->count++] = fd;
    }
    groups->unified = openat(cgroups->unified, slot, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* Delegation as the kernel documents it: the directory and cgroup.procs, never the files that hold limits. */
    if (groups->unified < 0 || fchown(groups->unified, owner, owner) < 0 ||
        fchownat(groups->unified, "cgroup.procs", owner, owner, 0) < 0) {
        int error = errno;
        cgroups_close_slot(groups);
        return fail(failure, "cgroup-delegate", error);
    }
    return 0;
}

void cgroups_close_slot(struct slot_groups *groups) {
    for (unsigned i = 0; i < groups->count; i++) close(groups->tasks[i]);
    if (groups->unified >= 0) close(groups->unified);
    *groups = (struct slot_groups){.unified = -1};
}

int cgroups_enter(const struct slot_groups *groups, struct failure *failure) {
    /* "0" to `tasks` moves the calling thread and is the one form of attach that does not take the kernel's global
     * threadgroup lock (Linux 5.5): any other waits 9 to 25 ms for a grace period on an idle machine, and keeps everybody
     * who makes or enters a cgroup waiting with it. */
    for (unsigned i = 0; i < groups->count; i++) {
        if (write(groups->tasks[i], "0", 1) != 1) return fail(failure, "cgroup-attach", errno);
    }
    return 0;
}

static int limit_v1(const struct cgroup_tree *tree, const char *slot, const struct plan *plan, struct failure *failure) {
    if ((tree->controllers & CONTROLS_MEMORY) && hardened("memory-limit")) {
        if (write_number(tree->fd, slot, "memory.limit_in_bytes", plan->memory_bytes) < 0)
            return fail(failure, "limit-memory", errno);
        /* Exists only where swap is accounted; without swap accounting there is no swap to limit. */
        if (write_number(tree->fd, slot, "memory.memsw.limit_in_bytes", plan->memory_bytes) < 0 && errno != ENOENT)
            return fail(failure, "limit-swap", errno);
        /* v1 does not count the buffers of internet sockets as memory unless they have a limit of their own. ENOENT: built without. */
        if (write_number(tree->fd, slot, "memory.kmem.tcp.limit_in_bytes", plan->memory_bytes / SOCKET_SHARE) < 0 && errno != ENOENT)
            return fail(failure, "limit-sockets", errno);
    }
    if ((tree->controllers & CONTROLS_CPU) && hardened("cpu-limit")) {
        if (write_number(tree->fd, slot, "cpu.cfs_period_us", plan->cpu_period_us) < 0 ||
            (plan->cpu_quota_us != 0 && write_number(tree->fd, slot, "cpu.cfs_quota_us", plan->cpu_quota_us) < 0))
            return fail(failure, "limit-cpu", errno);
    }
    if ((tree->controllers & CONTROLS_PIDS) && hardened("pids-limit") && write_number(tree->fd, slot, "pids.max", plan->pids) < 0)
        return fail(failure, "limit-pids", errno);
    return 0;
}

static int limit_v2(const struct cgroup_tree *tree, const char *slot, const struct plan *plan, struct failure *failure) {
    if ((tree->controllers & CONTROLS_MEMORY) && hardened("memory-limit")) {
        if (write_number(tree->fd, slot, "memory.max", plan->memory_bytes) < 0) return fail(failure, "limit-memory", errno);
        if (write_number(tree->fd, slot, "memory.swap.max", 0) < 0 && errno != ENOENT) return fail(failure, "limit-swap", errno);
    }
    if ((tree->controllers & CONTROLS_CPU) && hardened("cpu-limit")) {
        char text[48];
        if (plan->cpu_quota_us == 0)
            snprintf(text, sizeof text, "max %llu", (unsigned long long)plan->cpu_period_us);
        else
            snprintf(text, sizeof text, "%llu %llu", (unsigned long long)plan->cpu_quota_us,
                     (unsigned long long)plan->cpu_period_us);
        if (write_at(tree->fd, slot, "cpu.max", text) < 0) return fail(failure, "limit-cpu", errno);
    }
    if ((tree->controllers & CONTROLS_PIDS) && hardened("pids-limit") && write_number(tree->fd, slot, "pids.max", plan->pids) < 0)
        return fail(failure, "limit-pids", errno);
    return 0;
}

int cgroups_limit(const struct cgroups *cgroups, const char *slot, const struct plan *plan, struct failure *failure) {
    for (unsigned i = 0; i < cgroups->count; i++) {
        const struct cgroup_tree *tree = &cgroups->trees[i];
        int bad = tree->controllers & IS_UNIFIED ? limit_v2(tree, slot, plan, failure) : limit_v1(tree, slot, plan, failure);
        if (bad < 0) return -1;
    }
    return 0;
}

void cgroups_remove_slot(const struct cgroups *cgroups, const char *slot) {
    for (unsigned i = 0; i < cgroups->count; i++) (void)unlinkat(cgroups->trees[i].fd, slot, AT_REMOVEDIR);
}
