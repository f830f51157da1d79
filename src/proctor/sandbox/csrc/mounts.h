/* File systems of a sandbox: the part the launcher prepares as detached mounts, and the part a slot attaches. */
#ifndef PROCTOR_MOUNTS_H
#define PROCTOR_MOUNTS_H

#include "plan.h"

/* Built once by the launcher: a tmpfs that is the root of every slot until its plan arrives, and /dev. */
struct template {
    int root; /* detached tmpfs: proc/ dev/ stage/ new/ empty/ */
    int dev;  /* detached tmpfs with device nodes, read-only */
    int scratch; /* tmpfs attached in the launcher's own mount namespace, for kernels that take overlay layers by path only */
};

int mounts_make_template(struct template *template, struct failure *failure);

/* Makes the template the only thing that the calling process, and all it forks, sees. */
int mounts_enter_template(const struct template *template, struct failure *failure);

/* What the launcher hands to a slot and to the Edge for one plan. */
struct root_mounts {
    int root;  /* detached overlay */
    int upper; /* directory that holds upper/ and work/, ids as stored */
    int binds[BINDS_MAX];
    unsigned bind_count;
};

int mounts_build_root(const struct template *template, const struct plan *plan, const int *fds, unsigned fd_count, int userns,
                      uint32_t uid_base, struct root_mounts *out, struct words *words, struct words *facts,
                      struct failure *failure);
void mounts_close(struct root_mounts *mounts);

/* Detaches the uppers that older kernels make us keep attached and that the Edge has closed. Returns how many are left. */
unsigned mounts_release_held(void);

/* In the slot, before its plan is known: /stage/proc (masked) and /stage/dev. */
int mounts_stage(struct failure *failure);

/* In the slot: attaches everything, pivots, leaves nothing of the old root. */
int mounts_enter_root(const struct plan *plan, int root, const int *binds, struct failure *failure);

#endif
