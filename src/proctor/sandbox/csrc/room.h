/* A slot that executes a program of ours (gVisor's runsc) instead of becoming the guest: the room is what that program sees. */
#ifndef PROCTOR_ROOM_H
#define PROCTOR_ROOM_H

#include "plan.h"

/* Builds the room in the slot's mount namespace: the sandbox's root at /new, the plan's tools and its file in /stage, a whole /proc.
 * `binds` are the views of plan->binds, in their order. */
int room_enter(const struct plan *plan, int root, const int *binds, struct failure *failure);

/* Becomes root of the sandbox's user namespace and executes the plan's program, its standard input and output connected to
 * `channel` and its errors to `log`. Returns only when that fails. */
void room_execute(const struct plan *plan, int channel, int log);

#endif
