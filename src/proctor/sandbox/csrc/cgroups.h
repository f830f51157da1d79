/* Resource groups of slots, for cgroup v1 trees, a cgroup2 tree without controllers beside them, or cgroup2 alone. */
#ifndef PROCTOR_CGROUPS_H
#define PROCTOR_CGROUPS_H

#include <sys/types.h>

#include "plan.h"

/* The Edge's own directory in each tree (the Edge made them); slots get one directory below each. */
struct cgroup_tree {
    unsigned controllers; /* bits below */
    int fd;
};

enum {
    CONTROLS_MEMORY = 1,
    CONTROLS_CPU = 2,
    CONTROLS_CPUACCT = 4,
    CONTROLS_PIDS = 8,
    IS_UNIFIED = 16, /* cgroup2: entered at birth, not by a write */
};

struct cgroups {
    struct cgroup_tree trees[CGROUPS_MAX];
    unsigned count;
    int unified; /* fd of the Edge's cgroup2 directory */
    int confines_devices;
};

/* Opens the trees that the configuration names. Where it names no cgroup2 tree, one is mounted privately. */
int cgroups_open(const struct config *config, struct cgroups *cgroups, struct failure *failure);

/* The groups of one slot, open. */
struct slot_groups {
    int unified;            /* its cgroup2 directory: the slot is born in it, the guest makes groups for commands below it */
    int tasks[CGROUPS_MAX]; /* the `tasks` files of its v1 groups: the slot enters them itself */
    unsigned count;
};

/* Makes the directories of a slot; `owner` may make groups below its cgroup2 one. On failure nothing is open. */
int cgroups_make_slot(const struct cgroups *cgroups, const char *slot, uid_t owner, struct slot_groups *groups,
                      struct failure *failure);
void cgroups_close_slot(struct slot_groups *groups);

/* Moves the calling, single-threaded process into the v1 groups. */
int cgroups_enter(const struct slot_groups *groups, struct failure *failure);

int cgroups_limit(const struct cgroups *cgroups, const char *slot, const struct plan *plan, struct failure *failure);

/* Removes what can be removed now; the Edge's sweep takes the rest. */
void cgroups_remove_slot(const struct cgroups *cgroups, const char *slot);

#endif
