/* System calls that must not work, made for real, with arguments that do no harm should they work after all. */
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/perf_event.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "probe.h"

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

struct attempt {
    const char *name;
    long number;
    long arguments[6];
};

static char scratch[4096];
static struct iovec piece = {scratch, sizeof scratch};
#define TEXT(value) ((long)(intptr_t)(value))
#define PLACE TEXT(scratch)

static long run(const void *argument) {
    const struct attempt *call = argument;
    const long *a = call->arguments;
    long result = syscall(call->number, a[0], a[1], a[2], a[3], a[4], a[5]);
    return result;
}

/* Each in a process of its own where success would change us (`alone`). */
static void try_all(const struct attempt *calls, size_t count, int alone) {
    for (size_t i = 0; i < count; i++) {
        char key[64];
        snprintf(key, sizeof key, "call.%s", calls[i].name);
        if (alone) {
            say(key, "%s", apart(run, &calls[i]));
            continue;
        }
        long result = run(&calls[i]);
        say(key, "%s", outcome(result));
    }
}

static long clone_flags(const void *argument) {
    const unsigned long *flags = argument;
    long pid = syscall(SYS_clone, *flags | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) _exit(0);
    return pid;
}

#if defined(__x86_64__)
static long call_32_bit(const void *unused) {
    (void)unused;
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(20L) : "memory", "r8", "r9", "r10", "r11"); /* getpid of i386 */
    if (result >= 0) return result;
    errno = (int)-result;
    return -1;
}

static void try_foreign(int whole) {
    if (whole) say("call.i386", "%s", apart(call_32_bit, NULL));
    say("call.x32", "%s", outcome(syscall(0x40000000L + SYS_getpid)));
}
#else
static void try_foreign(int whole) { (void)whole; }
#endif

static void try_families(void) {
    static const struct {
        const char *name;
        int family, type, protocol;
    } sockets[] = {
        {"packet", AF_PACKET, SOCK_RAW, 0x0300}, {"vsock", AF_VSOCK, SOCK_STREAM, 0}, {"alg", AF_ALG, SOCK_SEQPACKET, 0},
        {"netlink-generic", AF_NETLINK, SOCK_RAW, 16}, {"netlink-audit", AF_NETLINK, SOCK_RAW, 9}, {"bluetooth", AF_BLUETOOTH, SOCK_RAW, 1},
        {"can", AF_CAN, SOCK_RAW, 1}, {"key", AF_KEY, SOCK_RAW, 2}, {"tipc", AF_TIPC, SOCK_DGRAM, 0}, {"rds", AF_RDS, SOCK_SEQPACKET, 0},
        {"icmp-raw", AF_INET, SOCK_RAW, 1}, {"tcp-raw", AF_INET, SOCK_RAW, 6}, {"icmp6-raw", AF_INET6, SOCK_RAW, 58},
        {"sctp", AF_INET, SOCK_STREAM, 132}, {"udplite", AF_INET, SOCK_DGRAM, 136}, {"mptcp", AF_INET, SOCK_STREAM, 262},
    };
    for (size_t i = 0; i < sizeof sockets / sizeof *sockets; i++) {
        char key[64];
        int fd = socket(sockets[i].family, sockets[i].type | SOCK_CLOEXEC, sockets[i].protocol);
        snprintf(key, sizeof key, "socket.%s", sockets[i].name);
        say(key, "%s", outcome(fd));
        if (fd >= 0) close(fd);
    }
}

static void try_ioctls(void) {
    static const struct {
        const char *name;
        unsigned long number;
    } terminal[] = {{"TIOCSTI", 0x5412}, {"TIOCLINUX", 0x541C}, {"TIOCSETD", 0x5423}, {"TIOCCONS", 0x541D}},
      files[] = {{"FS_IOC_SETFLAGS", 0x40086602}, {"XFS_IOC_SWAPEXT", 0xc0c0586d}, {"XFS_IOC_FREEZE", 0xc0045877}, {"FICLONE_TYPE_94", 0x9499}};
    char key[64];
    int none = 0, pty = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC), file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    for (size_t i = 0; i < sizeof terminal / sizeof *terminal; i++) {
        snprintf(key, sizeof key, "ioctl.%s", terminal[i].name);
        say(key, "%s", pty < 0 ? outcome(pty) : outcome(ioctl(pty, terminal[i].number, &none)));
    }
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(key, sizeof key, "ioctl.%s", files[i].name);
        memset(scratch, 0, sizeof scratch);
        say(key, "%s", file < 0 ? outcome(file) : outcome(ioctl(file, files[i].number, scratch)));
    }
    if (pty >= 0) close(pty);
    if (file >= 0) close(file);
}

static void try_mknod(void) {
    static const struct {
        const char *name;
        mode_t kind;
        unsigned major, minor;
    } nodes[] = {{"disk 8:0", S_IFBLK, 8, 0}, {"mem 1:1", S_IFCHR, 1, 1}, {"fuse 10:229", S_IFCHR, 10, 229}, {"kvm 10:232", S_IFCHR, 10, 232}, {"null 1:3", S_IFCHR, 1, 3}};
    char key[64], path[64];
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        snprintf(path, sizeof path, "/.proctor-node-%d-%zu", (int)getpid(), i);
        int made = mknod(path, nodes[i].kind | 0600, makedev(nodes[i].major, nodes[i].minor));
        snprintf(key, sizeof key, "mknod.%s", nodes[i].name);
        say(key, "%s", outcome(made));
        if (made == 0) unlink(path);
    }
}

void tell_calls(int whole) {
    memset(scratch, 0, sizeof scratch);
    static const unsigned long namespaces[] = {CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWPID};
    const struct perf_event_attr perf = {.type = PERF_TYPE_SOFTWARE, .size = sizeof perf, .config = PERF_COUNT_SW_DUMMY};
    const struct attempt plain[] = {
        {"fsopen", SYS_fsopen, {TEXT("tmpfs"), 0}},
        {"fsmount", SYS_fsmount, {-1, 0, 0}},
        {"fspick", SYS_fspick, {AT_FDCWD, TEXT("/"), 0}},
        {"open_tree", SYS_open_tree, {AT_FDCWD, TEXT("/"), 1}},
        {"move_mount", SYS_move_mount, {-1, TEXT(""), -1, TEXT(""), 0}},
        {"mount_setattr", SYS_mount_setattr, {AT_FDCWD, TEXT("/"), 0, PLACE, 32}},
        {"umount2", SYS_umount2, {TEXT("/nowhere"), 0}},
        {"pivot_root", SYS_pivot_root, {TEXT("/nowhere"), TEXT("/nowhere")}},
        {"kexec_load", SYS_kexec_load, {0, 0, 0, 0}},
        {"init_module", SYS_init_module, {PLACE, 0, TEXT("")}},
        {"finit_module", SYS_finit_module, {-1, TEXT(""), 0}},
        {"delete_module", SYS_delete_module, {TEXT("no_such_module"), O_NONBLOCK}},
        {"bpf", SYS_bpf, {BPF_MAP_CREATE, PLACE, 72}},
        {"perf_event_open", SYS_perf_event_open, {TEXT(&perf), 0, -1, -1, 0}},
        {"userfaultfd", SYS_userfaultfd, {O_CLOEXEC | 1}},
        {"io_uring_setup", SYS_io_uring_setup, {1, PLACE}},
        {"io_uring_enter", SYS_io_uring_enter, {-1, 0, 0, 0, 0, 0}},
        {"io_setup", SYS_io_setup, {1, TEXT(scratch + 1024)}},
        {"add_key", SYS_add_key, {TEXT("user"), TEXT("proctor"), TEXT("x"), 1, -3}},
        {"request_key", SYS_request_key, {TEXT("user"), TEXT("proctor-none"), 0, 0}},
        {"keyctl", SYS_keyctl, {0, -3, 1, 0, 0}},
        {"process_vm_readv", SYS_process_vm_readv, {getppid() > 0 ? getppid() : 1, TEXT(&piece), 1, TEXT(&piece), 1, 0}},
        {"process_vm_writev", SYS_process_vm_writev, {1, TEXT(&piece), 1, TEXT(&piece), 1, 0}},
        {"kcmp", SYS_kcmp, {getpid(), getpid(), 0, 0, 0}},
        {"name_to_handle_at", SYS_name_to_handle_at, {AT_FDCWD, TEXT("/"), PLACE, TEXT(scratch + 512), 0}},
        {"open_by_handle_at", SYS_open_by_handle_at, {AT_FDCWD, PLACE, 0}},
        {"fanotify_init", SYS_fanotify_init, {0, 0}},
        {"swapon", SYS_swapon, {TEXT("/nowhere"), 0}},
        {"swapoff", SYS_swapoff, {TEXT("/nowhere")}},
        {"reboot", SYS_reboot, {0, 0, 0, 0}},
        {"acct", SYS_acct, {TEXT("/nowhere")}},
        {"quotactl", SYS_quotactl, {0, TEXT("/nowhere"), 0, PLACE}},
        {"syslog", SYS_syslog, {3, PLACE, 16}},
        {"settimeofday", SYS_settimeofday, {TEXT(scratch + 2048), 0}},
        {"clock_settime", SYS_clock_settime, {99, PLACE}},
        {"move_pages", SYS_move_pages, {0, 0, 0, 0, 0, 0}},
        {"memfd_secret", SYS_memfd_secret, {0}},
    };
    const struct attempt alone[] = {
        {"mount", SYS_mount, {TEXT("none"), TEXT("/"), TEXT("tmpfs"), MS_BIND | MS_REMOUNT, 0}},
        {"unshare-user", SYS_unshare, {CLONE_NEWUSER}},
        {"unshare-mount", SYS_unshare, {CLONE_NEWNS}},
        {"unshare-time", SYS_unshare, {CLONE_NEWTIME}},
        {"setns", SYS_setns, {open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC), 0}},
        {"clone3", SYS_clone3, {PLACE, 64}},
        {"personality", SYS_personality, {READ_IMPLIES_EXEC}},
        {"sethostname", SYS_sethostname, {TEXT("probe"), 5}},
        {"setdomainname", SYS_setdomainname, {TEXT("probe"), 5}},
        {"vhangup", SYS_vhangup, {0}},
#if defined(__x86_64__)
        {"iopl", SYS_iopl, {3}},
        {"ioperm", SYS_ioperm, {0x80, 1, 1}},
        {"modify_ldt", SYS_modify_ldt, {0, PLACE, 16}},
#endif
    };
    try_all(plain, sizeof plain / sizeof *plain, 0);
    try_all(alone, sizeof alone / sizeof *alone, 1);
    close((int)alone[4].arguments[0]);
    for (size_t i = 0; i < sizeof namespaces / sizeof *namespaces; i++) {
        char key[64];
        snprintf(key, sizeof key, "call.clone-%lx", namespaces[i]);
        say(key, "%s", apart(clone_flags, &namespaces[i]));
    }
    try_foreign(whole);
    try_families();
    try_ioctls();
    try_mknod();
}
