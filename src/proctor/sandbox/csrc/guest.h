/* What the launcher hands to the guest: the one seam between the two roles of this binary. */
#ifndef PROCTOR_GUEST_H
#define PROCTOR_GUEST_H

#include <linux/filter.h>
#include <stdint.h>

struct guest_config {
    /* The cgroup2 directory of this sandbox, open for mkdirat() of one group per exec, or -1 where there is none
     * (then a group of processes is known by session and parentage only). Root inside cannot reach it. */
    int cgroup_fd;

    /* Seccomp program for every exec child (installed after no_new_privs); NULL or 0 = none (guest-dev only). */
    const struct sock_filter *seccomp;
    uint16_t seccomp_count;

    /* Capabilities (bit mask) that a child may have in its bounding, permitted and effective set when it runs as uid 0. */
    uint64_t capability_mask;

    /* oom_score_adj of exec children: the guest itself has -999 and its children must be preferred. */
    int child_oom_score_adj;

    /* 1 when children must take the uid and gid they run as with setresgid/setgroups/setresuid: the guest itself has a
     * kernel uid that the sandbox's map does not contain. 0 under guest-dev: children stay who the caller is. */
    int set_ids;

    /* 0 for one stream socket in both directions; otherwise frames come in by `channel_fd` and go out by this one, and both are
     * non-blocking pipes, sockets or whatever a runtime gives a container for its standard streams. */
    int channel_out_fd;

    /* Where there is no cgroup: the resource whose limit marks the processes of an exec (group.h). */
    int mark_resource;

    /* Where processes are counted by a group that the guest itself has made (standalone.h): children enter it by writing to
     * `count_enter_fd` (0 = there is none), `count_fd` says how many there are, and `count_max` how many there may be. */
    int count_enter_fd, count_fd;
    uint64_t count_max;

    /* 1 when the guest is pid 1 of a pid namespace made for it (all other processes in it are descendants of execs). */
    int is_init;

    /* A socket over which the launcher passes a new channel when the host has changed, or -1: then the guest ends with its
     * channel. */
    int attach_fd;
};

/* Serves one host over `channel_fd` (a stream socket) until it ends, then returns an exit status. The process has
 * every other descriptor closed but those named in `config`, all signals at their defaults and none blocked. */
int guest_main(int channel_fd, const struct guest_config *config);

#endif
