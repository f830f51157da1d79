/* File systems of a slot: the template that all slots start from, and how a slot gets into its root (built in root.c). */
#ifndef PROCTOR_MOUNTS_H
#define PROCTOR_MOUNTS_H

#include "plan.h"

/* How targets inside a root are resolved: never out of it. */
#define INSIDE (RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)

/* Where the launcher attaches its scratch tmpfs in its own mount namespace. It has no more use for /sys: cgroup directories are
 * open already. */
#define SCRATCH "/sys"
#define EMPTY "empty" /* an empty directory in it */

/* One new file system as a detached mount. `options` are key, value, …, NULL; a NULL value is a flag. Its source, which
 * mountinfo shows, is its type unless the options name one. */
int mount_new(const char *type, const char *const *options, unsigned attributes);

/* Adds mount attributes (read-only, …). */
int mount_restrict(int mount, uint64_t attributes);

/* Built once by the launcher: a tmpfs that is the root of every slot until its plan arrives, and /dev. */
struct template {
    int root;    /* detached tmpfs: proc/ dev/ stage/ new/ empty/ */
    int dev;     /* detached tmpfs with device nodes, read-only */
    int scratch; /* tmpfs attached in the launcher's own mount namespace, for kernels that take overlay layers by path only */
};

int mounts_make_template(struct template *template, struct failure *failure);

/* Makes the template the only thing that the calling process, and all it forks, sees. */
int mounts_enter_template(const struct template *template, struct failure *failure);

/* In the slot, before its plan is known: /stage/proc (masked) and /stage/dev. */
int mounts_stage(struct failure *failure);

/* In the slot: attaches everything, pivots, leaves nothing of the old root. */
int mounts_enter_root(const struct plan *plan, int root, const int *binds, struct failure *failure);

#endif
