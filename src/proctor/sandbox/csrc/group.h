/* The processes of one exec, wherever they went: a cgroup (v2) below the sandbox's, entered at birth.
 *
 * Where there is no cgroup (gVisor, containers of other engines, guest-dev) a group is known by a mark that children inherit:
 * the value of a resource limit that has no effect there: RLIMIT_LOCKS, which Linux has ignored since 2.4.25, or RLIMIT_CORE
 * under gVisor, which writes no cores and lets no other one be set. A process could change its mark, so the filter that its
 * children get has to keep them from that (native/seccomp.py); under guest-dev nothing does. */
#ifndef PROCTOR_GROUP_H
#define PROCTOR_GROUP_H

#include <stdint.h>
#include <sys/types.h>

struct exec_group {
    uint32_t id;   /* the exec's */
    uint32_t name; /* of the directory: `e<name>` */
    int dir_fd;    /* -1 without a cgroup */
    int events_fd; /* cgroup.events: reports POLLPRI when it has changed since it was last read */
    int killed;    /* cgroup.kill was written */
};

/* The resource whose limit marks groups, in place of RLIMIT_LOCKS; 0 changes nothing. */
void group_mark_resource(int resource);

/* A fresh group, or an empty one that was used before: making and removing a directory costs more than a fork. 0, or -1 and
 * errno. Without a cgroup (`parent_fd` -1) it marks the calling process, so that the next fork inherits the mark. */
int group_create(struct exec_group *group, int parent_fd, uint32_t id);

/* Kills every member. 0, or -1 and errno. */
int group_kill(struct exec_group *group);

/* Members that are alive (zombies are not); -1 and errno. */
int group_count(const struct exec_group *group);

/* Whether no member is alive any more: 1 or 0, -1 and errno. Without a cgroup one has to ask again after a while. */
int group_is_empty(const struct exec_group *group);

/* Gives back an empty group. 0, or -1 and errno. */
int group_release(struct exec_group *group, int parent_fd);

/* Processes of the caller's pid namespace other than the caller that are alive. */
int processes_alive(void);

#endif
