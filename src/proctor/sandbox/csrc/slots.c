/* The stocker and its slots (see docs/design/launcher.md).
 *
 * The stocker runs with all its capabilities but under the unprivileged uid of the guest that it makes, so what it forks has that
 * uid from birth: an id that no sandbox's map contains. It waits for requests of the launcher and for deaths of slots, nothing else.
 */
#include "slots.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "guest.h"
#include "hardened.h"
#include "room.h"
#include "sys.h"

#define RANGES_MAX 16384
#define FILES_MAX 16384 /* open files of a sandboxed process, if the Edge itself may have as many */

struct clone_arguments { /* struct clone_args of <linux/sched.h>, which clashes with <sched.h> in older C libraries */
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};
#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif
#ifndef CLONE_NEWCGROUP
#define CLONE_NEWCGROUP 0x02000000
#endif
#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x00001000
#endif

/* --- packets ------------------------------------------------------------------------------------------------------ */

union control {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int) * MESSAGE_FDS_MAX)];
};

long packet_send(int socket, const void *data, size_t size, const int *fds, unsigned fd_count) {
    union control control;
    struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = size};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd_count > MESSAGE_FDS_MAX) return errno = E2BIG, -1;
    if (fd_count > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        memset(control.bytes, 0, message.msg_controllen);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * fd_count);
    }
    long sent;
    do sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent;
}

long packet_receive(int socket, void *data, size_t size, int *fds, unsigned *fd_count) {
    union control control;
    struct iovec iov = {.iov_base = data, .iov_len = size};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control};
    *fd_count = 0;
    long received;
    do received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    while (received < 0 && errno == EINTR);
    if (received < 0) return -1;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header != NULL; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        unsigned count = (unsigned)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds + *fd_count, CMSG_DATA(header), count * sizeof(int));
        *fd_count += count;
    }
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        for (unsigned i = 0; i < *fd_count; i++) close(fds[i]);
        *fd_count = 0;
        return errno = EMSGSIZE, -1;
    }
    return received;
}

/* --- a slot ------------------------------------------------------------------------------------------------------- */

static int write_file(const char *path, const char *value) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t written = write(fd, value, strlen(value));
    int error = errno;
    close(fd);
    errno = error;
    return written < 0 ? -1 : 0;
}

static void default_signals(void) {
    sigset_t none;
    sigemptyset(&none);
    for (int signal_number = 1; signal_number < NSIG; signal_number++) signal(signal_number, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* Leaves open exactly `keep`, moved to consecutive numbers from 3; 0, 1 and 2 become /dev/null. */
static int keep_only(int *keep, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        keep[i] = fcntl(keep[i], F_DUPFD_CLOEXEC, 64);
        if (keep[i] < 0) return -1;
    }
    int null = open("/dev/null", O_RDWR);
    if (null < 0) return -1;
    for (int fd = 0; fd < 3; fd++) {
        if (null != fd && dup2(null, fd) < 0) return -1;
    }
    for (unsigned i = 0; i < count; i++) {
        if (dup3(keep[i], 3 + (int)i, O_CLOEXEC) < 0) return -1;
        keep[i] = 3 + (int)i;
    }
    return sys_close_range(3 + count, ~0u);
}

static unsigned char slot_message[MESSAGE_MAX];
static struct sock_filter slot_filter[SECCOMP_MAX];
static struct plan slot_plan;

/* Everything that needs no plan, done while the slot waits in the pool. */
static int slot_prepare(struct failure *failure) {
    const struct rlimit no_core = {NO_CORE, NO_CORE};
    struct rlimit files;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0) return fail(failure, "death-signal", errno);
    if (prctl(PR_SET_DUMPABLE, 0) < 0) return fail(failure, "dumpable", errno);
    if (hardened("core-limit") && setrlimit(RLIMIT_CORE, &no_core) < 0) return fail(failure, "core-limit", errno);
    if (getrlimit(RLIMIT_NOFILE, &files) < 0) return fail(failure, "files-limit", errno);
    if (files.rlim_max > FILES_MAX) files.rlim_max = FILES_MAX;
    files.rlim_cur = files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files) < 0) return fail(failure, "files-limit", errno);
    umask(022);
    /* Only now, inside its own groups: a cgroup namespace starts where its maker is. */
    if (hardened("cgroup-namespace") && unshare(CLONE_NEWCGROUP) < 0) return fail(failure, "cgroup-namespace", errno);
    if (mounts_stage(failure) < 0) return -1;
    prctl(PR_SET_NAME, "proctor-guest");
    return 0;
}

/* As many processors as the CPU limit allows, rounded up: programs start as many threads as they see processors, and with the
 * machine's number they would fill their memory with them. It is for show (root inside may widen it; the limit holds all the same), so
 * which ones must not matter: each sandbox begins with another, by its name, whose end is a running number. */
static int show_processors(const struct plan *named, struct failure *failure) {
    cpu_set_t all, some;
    uint64_t wanted = named->cpu_quota_us == 0 ? CPU_SETSIZE : (named->cpu_quota_us + named->cpu_period_us - 1) / named->cpu_period_us;
    if (sched_getaffinity(0, sizeof all, &all) < 0) return errno == EINVAL ? 0 : fail(failure, "affinity", errno); /* over 1,024 of them */
    unsigned count = (unsigned)CPU_COUNT(&all), first = 0, seen = 0;
    if (wanted >= count || !hardened("affinity")) return 0;
    for (const char *byte = named->name; *byte != '\0'; byte++) first += (unsigned char)*byte;
    CPU_ZERO(&some);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all)) continue;
        if ((seen++ + count - first % count) % count < wanted) CPU_SET(cpu, &some);
    }
    return sched_setaffinity(0, sizeof some, &some) < 0 ? fail(failure, "affinity", errno) : 0;
}

static int slot_become(int root, const int *binds, struct failure *failure) {
    if (slot_plan.program != NULL) return room_enter(&slot_plan, root, binds, failure);
    if (mounts_enter_root(&slot_plan, root, binds, failure) < 0) return -1;
    if (show_processors(&slot_plan, failure) < 0) return -1;
    if (!hardened("uts-namespace")) return 0;
    if (sethostname(slot_plan.hostname, strlen(slot_plan.hostname)) < 0 || setdomainname("", 0) < 0)
        return fail(failure, "hostname", errno);
    return 0;
}

static _Noreturn void slot_main(int control, const struct slot_groups *groups) {
    struct failure failure = {"", 0};
    struct slot_reply reply = {0};
    int fds[MESSAGE_FDS_MAX];
    unsigned fd_count = 0;
    int kept[2] = {control, groups->unified};
    char go;
    default_signals();
    int bad = cgroups_enter(groups, &failure);
    if (keep_only(kept, 2) < 0) _exit(1);
    control = kept[0];
    int cgroup = kept[1];
    /* The stocker says go when ids are mapped. */
    if (packet_receive(control, &go, 1, fds, &fd_count) != 1) _exit(1);
    if (!bad) bad = slot_prepare(&failure);
    long size = packet_receive(control, slot_message, sizeof slot_message, fds, &fd_count);
    if (size <= 0) _exit(0); /* the launcher is gone, or never needed this slot */
    if (!bad) bad = plan_parse(slot_message, (size_t)size, &slot_plan, &failure);
    /* The root, the channel, with PLAN_DURABLE the socket for the next channels, the binds, and a program's log. */
    const unsigned fixed = (slot_plan.flags & PLAN_DURABLE) != 0 ? 3 : 2;
    if (!bad && fd_count != slot_plan.bind_count + fixed + (slot_plan.program != NULL)) bad = fail(&failure, "descriptors", EBADMSG);
    if (!bad) bad = slot_become(fds[0], fds + fixed, &failure);
    if (bad) {
        reply.error = failure.error;
        snprintf(reply.step, sizeof reply.step, "%s", failure.step);
    }
    /* A program has its log where a guest has the directory of its groups. */
    const int second = !bad && slot_plan.program != NULL ? fds[fd_count - 1] : cgroup;
    int channel[4] = {fd_count > 1 ? fds[1] : -1, second, control, fixed == 3 && fd_count > 2 ? fds[2] : -1};
    if (!bad && keep_only(channel, fixed + 1) < 0) {
        bad = reply.error = errno;
        snprintf(reply.step, sizeof reply.step, "descriptors");
    }
    if (packet_send(channel[2], &reply, sizeof reply, NULL, 0) < 0 || bad) _exit(1);
    close(channel[2]);
    if (slot_plan.program != NULL) {
        room_execute(&slot_plan, channel[0], channel[1]);
        _exit(1);
    }
    memcpy(slot_filter, slot_plan.seccomp, slot_plan.seccomp_count * sizeof *slot_filter);
    const struct guest_config guest = {
        .cgroup_fd = channel[1],
        .seccomp = slot_filter,
        .seccomp_count = slot_plan.seccomp_count,
        .capability_mask = slot_plan.capabilities,
        .child_oom_score_adj = 500,
        .set_ids = 1,
        .is_init = 1,
        .attach_fd = fixed == 3 ? channel[3] : -1,
    };
    _exit(guest_main(channel[0], &guest));
}

/* --- the stocker ---------------------------------------------------------------------------------------------------- */

struct stocker {
    const struct stocker_setup *setup;
    int deaths;       /* epoll of pidfds and of the request socket */
    int host_network; /* the network namespace that the launcher started in */
    uint32_t made;
    uint32_t next_range;
    int range_pidfd[RANGES_MAX]; /* 0 = free */
};

/* Loopback up, ports from 0 and unprivileged ping, in the calling process's own network namespace. The namespace belongs to
 * the initial user namespace, so root inside cannot change it. */
static int prepare_network(struct failure *failure) {
    if (!hardened("network-namespace")) return 0;
    if (unshare(CLONE_NEWNET) < 0) return fail(failure, "network-namespace", errno);
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return fail(failure, "network-socket", errno);
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int bad = ioctl(fd, SIOCSIFFLAGS, &request) < 0 ? fail(failure, "network-loopback", errno) : 0;
    close(fd);
    if (bad) return -1;
    if (write_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0") < 0 ||
        write_file("/proc/sys/net/ipv4/ping_group_range", "0 2147483647") < 0)
        return fail(failure, "network-sysctl", errno);
    return 0;
}

/* System V objects outlive their processes, and the memory they hold cannot be won back by killing: shared memory goes with
 * its last user, and the queues that a sandbox can leave behind hold 2 MB together. */
static int prepare_ipc(struct failure *failure) {
    if (!hardened("ipc-namespace")) return 0;
    if (unshare(CLONE_NEWIPC) < 0) return fail(failure, "ipc-namespace", errno);
    if (write_file("/proc/sys/kernel/shm_rmid_forced", "1") < 0 || write_file("/proc/sys/kernel/msgmni", "128") < 0)
        return fail(failure, "ipc-sysctl", errno);
    return 0;
}

static int write_maps(pid_t pid, uint32_t base, struct failure *failure) {
    char path[48], map[48];
    snprintf(map, sizeof map, "0 %u 65536\n", base);
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    if (write_file(path, map) < 0) return fail(failure, "uid-map", errno);
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    if (write_file(path, map) < 0) return fail(failure, "gid-map", errno);
    return 0;
}

static int open_user_namespace(pid_t pid) {
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    return open(path, O_RDONLY | O_CLOEXEC);
}

static int find_range(struct stocker *stocker, struct failure *failure) {
    uint32_t ranges = stocker->setup->config->uid_ranges;
    for (uint32_t i = 0; i < ranges; i++) {
        uint32_t range = (stocker->next_range + i) % ranges;
        if (stocker->range_pidfd[range] == 0) {
            stocker->next_range = range + 1;
            return (int)range;
        }
    }
    return fail(failure, "id-ranges", EAGAIN);
}

static void watch_range(struct stocker *stocker, uint32_t range, int pidfd) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = range};
    int copy = fcntl(pidfd, F_DUPFD_CLOEXEC, 3);
    if (copy < 0) _exit(1);
    if (epoll_ctl(stocker->deaths, EPOLL_CTL_ADD, copy, &event) < 0) _exit(1);
    stocker->range_pidfd[range] = copy;
}

static void forget_range(struct stocker *stocker, uint32_t range) {
    /* Copies of this pidfd live elsewhere, so closing it would not take it out of the epoll. */
    (void)epoll_ctl(stocker->deaths, EPOLL_CTL_DEL, stocker->range_pidfd[range], NULL);
    close(stocker->range_pidfd[range]);
    stocker->range_pidfd[range] = 0;
}

/* A slot in the making. */
struct draft {
    struct slot_offer offer;
    struct slot_groups groups;
    uint32_t range;
    int control[2]; /* the launcher's end, the slot's end */
    int pidfd;
};

/* What the slot will inherit: namespaces that belong to the machine (so that root inside cannot change their settings), and
 * groups. Done with the effective uid 0, which owns those settings and must own the files that hold limits. */
static int prepare_surroundings(struct stocker *stocker, struct draft *draft, struct failure *failure) {
    const uid_t guest = hardened("guest-ids") ? stocker->setup->config->guest_uid + draft->range : draft->offer.uid_base;
    if (setresuid((uid_t)-1, 0, (uid_t)-1) < 0) return fail(failure, "stocker-ids", errno);
    int bad = draft->offer.network == NETWORK_OPEN
                  ? (setns(stocker->host_network, CLONE_NEWNET) < 0 ? fail(failure, "network-open", errno) : 0)
                  : prepare_network(failure);
    if (!bad) bad = prepare_ipc(failure);
    if (!bad) {
        bad = cgroups_make_slot(stocker->setup->cgroups, draft->offer.name, guest, &draft->groups, failure);
        if (bad) cgroups_remove_slot(stocker->setup->cgroups, draft->offer.name);
    }
    /* A uid for each guest, not one for all: the kernel also counts what a user namespace's processes lock, queue and fork
     * against the owner of that namespace, and sandboxes must not use up each other's share. */
    if (setresgid(guest, guest, guest) < 0 || setresuid(guest, guest, guest) < 0) _exit(1);
    return bad;
}

static int spawn(struct stocker *stocker, struct draft *draft, struct failure *failure) {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, draft->control) < 0) return fail(failure, "slot-socket", errno);
    struct clone_arguments arguments = {
        .flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | (hardened("uts-namespace") ? CLONE_NEWUTS : 0) | CLONE_PIDFD | CLONE_INTO_CGROUP,
        .pidfd = (uint64_t)(uintptr_t)&draft->pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = (uint64_t)draft->groups.unified,
    };
    pid_t pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
    if (pid == 0) slot_main(draft->control[1], &draft->groups);
    int error = errno;
    close(draft->control[1]);
    if (pid < 0) {
        close(draft->control[0]);
        return fail(failure, "slot-clone", error);
    }
    draft->offer.pid = pid;
    watch_range(stocker, draft->range, draft->pidfd);
    return 0;
}

/* Gives the slot its ids and the launcher its means to command it. Closes the draft's descriptors. */
static int introduce(struct stocker *stocker, struct draft *draft, struct failure *failure) {
    int bad = write_maps(draft->offer.pid, draft->offer.uid_base, failure), userns = -1;
    if (!bad && packet_send(draft->control[0], "g", 1, NULL, 0) < 0) bad = fail(failure, "go", errno);
    if (!bad && (userns = open_user_namespace(draft->offer.pid)) < 0) bad = fail(failure, "user-namespace", errno);
    const int fds[3] = {draft->control[0], draft->pidfd, userns};
    if (!bad && packet_send(stocker->setup->request_fd, &draft->offer, sizeof draft->offer, fds, 3) < 0) _exit(1);
    if (bad) sys_pidfd_send_signal(draft->pidfd, SIGKILL);
    close(draft->control[0]);
    close(draft->pidfd);
    if (userns >= 0) close(userns);
    return bad;
}

static int make_slot(struct stocker *stocker, uint32_t network, struct failure *failure) {
    struct draft draft = {.offer.network = network, .pidfd = -1};
    int range = find_range(stocker, failure);
    if (range < 0) return -1;
    draft.range = (uint32_t)range;
    draft.offer.uid_base = hardened("id-map") ? stocker->setup->config->uid_start + draft.range * 65536 : 0;
    snprintf(draft.offer.name, sizeof draft.offer.name, "s%06u", ++stocker->made);
    if (prepare_surroundings(stocker, &draft, failure) < 0) return -1;
    int bad = spawn(stocker, &draft, failure);
    cgroups_close_slot(&draft.groups);
    if (!bad) bad = introduce(stocker, &draft, failure);
    if (bad) cgroups_remove_slot(stocker->setup->cgroups, draft.offer.name);
    return bad;
}

static void serve_request(struct stocker *stocker, const struct slot_request *request) {
    for (uint32_t i = 0; i < request->count; i++) {
        struct failure failure = {"", 0};
        if (make_slot(stocker, request->network, &failure) == 0) continue;
        struct slot_offer refusal = {.error = failure.error, .network = request->network};
        snprintf(refusal.step, sizeof refusal.step, "%s", failure.step);
        if (packet_send(stocker->setup->request_fd, &refusal, sizeof refusal, NULL, 0) < 0) _exit(1);
    }
}

/* The launcher is gone: kill every slot and stay until all are reaped, so that nothing is left to anybody else. */
static _Noreturn void end_all(struct stocker *stocker) {
    uint32_t ranges = stocker->setup->config->uid_ranges, alive = 0;
    alarm(10); /* a slot that the kernel holds dies with this process (its death signal), only later */
    (void)epoll_ctl(stocker->deaths, EPOLL_CTL_DEL, stocker->setup->request_fd, NULL);
    for (uint32_t range = 0; range < ranges; range++) {
        if (stocker->range_pidfd[range] == 0) continue;
        sys_pidfd_send_signal(stocker->range_pidfd[range], SIGKILL);
        alive++;
    }
    while (alive > 0) {
        struct epoll_event ready[64];
        int count = epoll_wait(stocker->deaths, ready, 64, -1);
        if (count < 0 && errno != EINTR) _exit(1);
        for (int i = 0; i < count; i++, alive--) forget_range(stocker, ready[i].data.u32);
    }
    _exit(0);
}

/* The first guest's uid with every capability kept; file system ids follow. */
static int take_identity(uint32_t id, struct failure *failure) {
    const unsigned long bits = SECBIT_NO_SETUID_FIXUP | SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_NOROOT | SECBIT_NOROOT_LOCKED;
    if (prctl(PR_SET_SECUREBITS, bits) < 0) return fail(failure, "stocker-securebits", errno);
    if (setgroups(0, NULL) < 0 || setresgid(id, id, id) < 0 || setresuid(id, id, id) < 0)
        return fail(failure, "stocker-ids", errno);
    return 0;
}

static _Noreturn void stocker_main(const struct stocker_setup *setup) {
    static struct stocker stocker;
    struct failure failure = {"", 0};
    stocker.setup = setup;
    for (unsigned i = 0; i < sizeof setup->foreign / sizeof *setup->foreign; i++) {
        if (setup->foreign[i] >= 0) close(setup->foreign[i]);
    }
    signal(SIGCHLD, SIG_IGN); /* slots are reaped by the kernel; pidfds tell of their deaths */
    prctl(PR_SET_NAME, "proctor-stocker");
    stocker.host_network = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    stocker.deaths = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = UINT32_MAX};
    int bad = stocker.host_network < 0 || stocker.deaths < 0 ||
              epoll_ctl(stocker.deaths, EPOLL_CTL_ADD, setup->request_fd, &event) < 0
                  ? fail(&failure, "stocker-start", errno)
                  : 0;
    if (!bad) bad = mounts_enter_template(setup->template, &failure);
    if (!bad) bad = take_identity(setup->config->guest_uid, &failure);
    if (!bad && prctl(PR_SET_DUMPABLE, 0) < 0) bad = fail(&failure, "dumpable", errno);
    struct slot_offer greeting = {.error = bad ? failure.error : 0};
    snprintf(greeting.step, sizeof greeting.step, "%s", failure.step);
    if (packet_send(setup->request_fd, &greeting, sizeof greeting, NULL, 0) < 0 || bad) _exit(1);
    for (;;) {
        struct epoll_event ready[16];
        int count = epoll_wait(stocker.deaths, ready, 16, -1);
        if (count < 0 && errno != EINTR) _exit(1);
        for (int i = 0; i < count; i++) {
            uint32_t range = ready[i].data.u32;
            if (range != UINT32_MAX) {
                forget_range(&stocker, range);
                continue;
            }
            struct slot_request request;
            int fds[MESSAGE_FDS_MAX];
            unsigned fd_count;
            if (packet_receive(setup->request_fd, &request, sizeof request, fds, &fd_count) != sizeof request) end_all(&stocker);
            serve_request(&stocker, &request);
        }
    }
}

pid_t stocker_start(const struct stocker_setup *setup, struct failure *failure) {
    if (setup->config->uid_ranges > RANGES_MAX) return fail(failure, "id-ranges", EINVAL);
    pid_t pid = fork();
    if (pid < 0) return fail(failure, "stocker-fork", errno);
    if (pid == 0) stocker_main(setup);
    return pid;
}
