/* The root of one sandbox, as the launcher prepares it. */
#ifndef PROCTOR_ROOT_H
#define PROCTOR_ROOT_H

#include "mounts.h"
#include "plan.h"

/* What the launcher hands to a slot and to the Edge for one plan. */
struct root_mounts {
    int root;  /* detached overlay */
    int upper; /* directory that holds upper/ and work/, ids as stored */
    int binds[BINDS_MAX];
    unsigned bind_count;
};

/* Builds everything for `plan` with the ids of the user namespace `userns`, whose root is `uid_base` outside. `fds` are the layer
 * descriptors that came with the plan. On failure nothing is left open. */
int root_build(const struct template *template, const struct plan *plan, const int *fds, unsigned fd_count, int userns,
               uint32_t uid_base, struct root_mounts *out, struct words *words, struct words *facts, struct failure *failure);
void root_close(struct root_mounts *mounts);

/* Detaches the uppers that older kernels make us keep attached and that the Edge has closed. Returns how many are left. */
unsigned root_release_held(void);

#endif
