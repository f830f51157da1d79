/* The processes of one exec, wherever they went: a cgroup (v2) below the sandbox's, entered at birth.
 *
 * Where there is no cgroup (guest-dev, kernels without one) a group is known by a mark that children inherit: the value
 * of RLIMIT_LOCKS, a limit that Linux has ignored since 2.4.25. A hostile process can change its mark, so this is for
 * development; a sandbox of the container backend always has a cgroup. */
#ifndef PROCTOR_GROUP_H
#define PROCTOR_GROUP_H

#include <stdint.h>
#include <sys/types.h>

struct exec_group {
    uint32_t id;
    int parent_fd;
    int dir_fd;    /* -1 without a cgroup */
    int events_fd; /* cgroup.events, once somebody waits for the group to become empty */
};

/* 0, or -1 and errno. Without a cgroup it marks the calling process, so that the next fork inherits the mark. */
int group_create(struct exec_group *group, int parent_fd, uint32_t id);

/* Kills every member. 0, or -1 and errno. */
int group_kill(struct exec_group *group);

/* Members that are alive (zombies are not); -1 and errno. */
int group_count(const struct exec_group *group);

/* Removes an empty group. 1 = removed, 0 = it still has members, -1 and errno. */
int group_remove(struct exec_group *group);

/* A descriptor that reports POLLPRI when the group may have become empty, or -1 where one has to ask again after a while. */
int group_watch(struct exec_group *group);

/* Processes of the caller's pid namespace other than the caller that are alive. */
int processes_alive(void);

#endif
