/* The template that slots start from, and what a slot mounts and attaches in its own namespace. */
#include "mounts.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "hardened.h"
#include "sys.h"

#define MOVE_FDS (MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH)

/* The machine has 4,096 pseudo-terminals for everybody; without a bound one sandbox could hold them all. */
#define MAX_TERMINALS "128"

int mount_new(const char *type, const char *const *options, unsigned attributes) {
    int context = sys_fsopen(type);
    if (context < 0) return -1;
    int names_source = *options != NULL && strcmp(*options, "source") == 0;
    int bad = !names_source && sys_fsconfig(context, FSCONFIG_SET_STRING, "source", type, 0) < 0;
    for (; *options != NULL && !bad; options += 2)
        bad = sys_fsconfig(context, options[1] == NULL ? FSCONFIG_SET_FLAG : FSCONFIG_SET_STRING, options[0], options[1], 0) < 0;
    if (!bad) bad = sys_fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0;
    int mount = bad ? -1 : sys_fsmount(context, attributes);
    int error = errno;
    close(context);
    errno = error;
    return mount;
}

int mount_restrict(int mount, uint64_t attributes) {
    struct mount_attr attr = {.attr_set = attributes};
    return sys_mount_setattr(mount, "", AT_EMPTY_PATH, &attr);
}

/* --- the template ---------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    unsigned major, minor;
} devices[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};

static const char *const device_links[][2] = {
    {"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"},
    {"pts/ptmx", "ptmx"},
};

static int fill_dev(int dev) {
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        if (mknodat(dev, devices[i].name, S_IFCHR | 0666, makedev(devices[i].major, devices[i].minor)) < 0) return -1;
    }
    for (size_t i = 0; i < sizeof device_links / sizeof *device_links; i++) {
        if (symlinkat(device_links[i][0], dev, device_links[i][1]) < 0) return -1;
    }
    return mkdirat(dev, "pts", 0755) < 0 || mkdirat(dev, "shm", 0755) < 0 || mkdirat(dev, "mqueue", 0755) < 0 ? -1 : 0;
}

static int fill_root(int root) {
    static const char *const names[] = {"proc", "dev", "new", "empty", "tmp", "stage", "stage/proc", "stage/dev"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (mkdirat(root, names[i], 0755) < 0) return -1;
    }
    return 0;
}

int mounts_make_template(struct template *template, struct failure *failure) {
    static const char *const options[] = {"size", "1m", "mode", "0755", NULL, NULL};
    mode_t mask = umask(0);
    template->root = mount_new("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    template->dev = mount_new("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
    template->scratch = mount_new("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    if (template->root < 0 || template->dev < 0 || template->scratch < 0) return fail(failure, "template-tmpfs", errno);
    if (fill_dev(template->dev) < 0) return fail(failure, "template-dev", errno);
    if (fill_root(template->root) < 0) return fail(failure, "template-root", errno);
    if (mkdirat(template->scratch, EMPTY, 0755) < 0) return fail(failure, "template-scratch", errno);
    umask(mask);
    if ((hardened("dev-readonly") && mount_restrict(template->dev, MOUNT_ATTR_RDONLY) < 0) ||
        mount_restrict(template->root, MOUNT_ATTR_RDONLY) < 0)
        return fail(failure, "template-readonly", errno);
    if (sys_move_mount(template->scratch, "", AT_FDCWD, SCRATCH, MOVE_MOUNT_F_EMPTY_PATH) < 0)
        return fail(failure, "template-scratch", errno);
    return 0;
}

int mounts_enter_template(const struct template *template, struct failure *failure) {
    static const char *const none[] = {NULL, NULL};
    if (unshare(CLONE_NEWNS) < 0) return fail(failure, "template-namespace", errno);
    if (sys_mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) return fail(failure, "template-private", errno);
    /* A fresh proc without anything mounted over it: the kernel lets a user namespace mount proc only where it sees one. */
    int proc = mount_new("proc", none, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    if (proc < 0) return fail(failure, "template-proc", errno);
    if (sys_move_mount(template->root, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH) < 0 || fchdir(template->root) < 0)
        return fail(failure, "template-attach", errno);
    if (sys_pivot_root(".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        return fail(failure, "template-pivot", errno);
    if (sys_move_mount(proc, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH) < 0 ||
        sys_move_mount(template->dev, "", AT_FDCWD, "/dev", MOVE_MOUNT_F_EMPTY_PATH) < 0)
        return fail(failure, "template-attach", errno);
    close(proc);
    return 0;
}

/* --- inside a slot ----------------------------------------------------------------------------------------------- */

static int bind_over(int source_at, const char *source, const char *target, uint64_t attributes) {
    int view = sys_open_tree(source_at, source, OPEN_TREE_CLONE);
    if (view < 0) return -1;
    struct mount_attr attr = {.attr_set = attributes};
    int bad = (attributes != 0 && sys_mount_setattr(view, "", AT_EMPTY_PATH, &attr) < 0) ||
              sys_move_mount(view, "", AT_FDCWD, target, MOVE_MOUNT_F_EMPTY_PATH) < 0;
    int error = errno;
    close(view);
    errno = error;
    return bad ? -1 : 0;
}

static const char *const masked[] = {
    "kcore", "kmem", "kallsyms", "keys", "key-users", "latency_stats", "timer_list", "sched_debug", "scsi", "kpagecgroup",
    "kpagecount", "kpageflags", "acpi", "asound", "interrupts", "vmallocinfo", "slabinfo", "pagetypeinfo", "iomem", "ioports",
    "modules", "mtrr", "sysrq-trigger", "config.gz", "kmsg",
};
static const char *const read_only[] = {"sys", "bus", "fs", "irq"};

static int mask_proc(void) {
    for (size_t i = 0; i < sizeof masked / sizeof *masked && hardened("proc-mask"); i++) {
        char path[64];
        struct stat info;
        snprintf(path, sizeof path, "/stage/proc/%s", masked[i]);
        if (lstat(path, &info) < 0) continue;
        if (bind_over(AT_FDCWD, S_ISDIR(info.st_mode) ? "/empty" : "/dev/null", path, MOUNT_ATTR_RDONLY) < 0) return -1;
    }
    for (size_t i = 0; i < sizeof read_only / sizeof *read_only && hardened("proc-readonly"); i++) {
        char path[64];
        struct stat info;
        snprintf(path, sizeof path, "/stage/proc/%s", read_only[i]);
        if (lstat(path, &info) < 0) continue;
        if (bind_over(AT_FDCWD, path, path, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC) < 0)
            return -1;
    }
    return 0;
}

int mounts_stage(struct failure *failure) {
    static const char *const none[] = {NULL, NULL};
    static const char *const devpts[] = {"newinstance", NULL, "gid", "5", "mode", "620", "ptmxmode", "666",
                                         "max", MAX_TERMINALS, NULL, NULL};
    if (sys_mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) return fail(failure, "private", errno);
    int proc = mount_new("proc", none, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    if (proc < 0 || sys_move_mount(proc, "", AT_FDCWD, "/stage/proc", MOVE_MOUNT_F_EMPTY_PATH) < 0)
        return fail(failure, "proc", errno);
    close(proc);
    if (mask_proc() < 0) return fail(failure, "proc-mask", errno);
    if (bind_over(AT_FDCWD, "/dev", "/stage/dev", 0) < 0) return fail(failure, "dev", errno);
    int pts = mount_new("devpts", devpts, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
    if (pts < 0 || sys_move_mount(pts, "", AT_FDCWD, "/stage/dev/pts", MOVE_MOUNT_F_EMPTY_PATH) < 0)
        return fail(failure, "devpts", errno);
    close(pts);
    return 0;
}

/* Attaches a mount at `target` of the new root. Fixed targets may not be reached through links that the image brings. */
static int attach(int mount, int from_at, const char *from, int root, const char *target, uint64_t resolve) {
    int place = sys_openat2(root, target, O_PATH, resolve);
    if (place < 0) return -1;
    int bad = mount >= 0 ? sys_move_mount(mount, "", place, "", MOVE_FDS)
                         : sys_move_mount(from_at, from, place, "", MOVE_MOUNT_T_EMPTY_PATH);
    int error = errno;
    close(place);
    errno = error;
    return bad;
}

static int attach_shm(const struct plan *plan, int root) {
    char size[24];
    snprintf(size, sizeof size, "%llu", hardened("shm-size") ? (unsigned long long)plan->shm_bytes : 1ULL << 40);
    const char *const options[] = {"size", size, "mode", "1777", "nr_inodes", "65536", "uid", "0", "gid", "0", NULL, NULL};
    int shm = mount_new("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    if (shm < 0) return -1;
    int bad = attach(shm, -1, NULL, root, "dev/shm", RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH);
    int error = errno;
    close(shm);
    errno = error;
    return bad;
}

int mounts_enter_root(const struct plan *plan, int root, const int *binds, struct failure *failure) {
    const uint64_t strict = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH;
    if (sys_move_mount(root, "", AT_FDCWD, "/new", MOVE_MOUNT_F_EMPTY_PATH) < 0) return fail(failure, "attach-root", errno);
    for (unsigned i = 0; i < plan->bind_count; i++) {
        if (attach(binds[i], -1, NULL, root, plan->binds[i].target, INSIDE) < 0) return fail(failure, "attach-bind", errno);
    }
    if (attach(-1, AT_FDCWD, "/stage/proc", root, "proc", strict) < 0) return fail(failure, "attach-proc", errno);
    if (attach(-1, AT_FDCWD, "/stage/dev", root, "dev", strict) < 0) return fail(failure, "attach-dev", errno);
    if (attach_shm(plan, root) < 0) return fail(failure, "attach-shm", errno);
    int empty = sys_open_tree(AT_FDCWD, "/empty", OPEN_TREE_CLONE);
    if (empty < 0 || (hardened("sys-empty") && attach(empty, -1, NULL, root, "sys", strict) < 0)) return fail(failure, "attach-sys", errno);
    close(empty);
    if (fchdir(root) < 0 || sys_pivot_root(".", ".") < 0) return fail(failure, "pivot", errno);
    if ((hardened("old-root") && umount2(".", MNT_DETACH) < 0) || chdir("/") < 0) return fail(failure, "detach-old-root", errno);
    if (!hardened("private") && sys_mount(NULL, "/", NULL, MS_REC | MS_SHARED, NULL) < 0) return fail(failure, "private", errno);
    return 0;
}
