/* System calls that older C libraries lack, as plain functions: -1 and errno on failure, like the rest. */
#ifndef PROCTOR_SYS_H
#define PROCTOR_SYS_H

#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* <sys/mount.h> and <linux/mount.h> cannot be included together before glibc 2.36; these are all we need of it. */
#ifndef MNT_DETACH
#define MNT_DETACH 2
#endif
int umount2(const char *target, int flags);

/* RLIMIT_CORE: too small for any file, and the one value that also keeps the kernel from starting a core_pattern helper (0 does
 * not: a helper is not limited by size). */
#define NO_CORE 1

static inline int sys_fsopen(const char *type) { return (int)syscall(SYS_fsopen, type, FSOPEN_CLOEXEC); }
static inline int sys_fsconfig(int fd, unsigned command, const char *key, const void *value, int aux) {
    return (int)syscall(SYS_fsconfig, fd, command, key, value, aux);
}
static inline int sys_fsmount(int fd, unsigned attributes) {
    return (int)syscall(SYS_fsmount, fd, FSMOUNT_CLOEXEC, attributes);
}
static inline int sys_open_tree(int at, const char *path, unsigned flags) {
    return (int)syscall(SYS_open_tree, at, path, flags | OPEN_TREE_CLOEXEC);
}
static inline int sys_move_mount(int from, const char *from_path, int to, const char *to_path, unsigned flags) {
    return (int)syscall(SYS_move_mount, from, from_path, to, to_path, flags);
}
static inline int sys_mount_setattr(int at, const char *path, unsigned flags, struct mount_attr *attr) {
    return (int)syscall(SYS_mount_setattr, at, path, flags, attr, sizeof *attr);
}
static inline int sys_openat2(int at, const char *path, uint64_t flags, uint64_t resolve) {
    struct open_how how = {.flags = flags | O_CLOEXEC, .resolve = resolve};
    return (int)syscall(SYS_openat2, at, path, &how, sizeof how);
}
static inline int sys_pivot_root(const char *root, const char *old) { return (int)syscall(SYS_pivot_root, root, old); }
static inline int sys_mount(const char *source, const char *target, const char *type, unsigned long flags, const char *data) {
    return (int)syscall(SYS_mount, source, target, type, flags, data);
}
static inline int sys_close_range(unsigned first, unsigned last) { return (int)syscall(SYS_close_range, first, last, 0u); }
static inline int sys_pidfd_open(pid_t pid) { return (int)syscall(SYS_pidfd_open, pid, 0u); }
static inline int sys_pidfd_send_signal(int pidfd, int signal) {
    return (int)syscall(SYS_pidfd_send_signal, pidfd, signal, NULL, 0u);
}

#endif
