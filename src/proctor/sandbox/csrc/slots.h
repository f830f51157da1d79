/* Slots: processes made ahead of time that have everything a sandbox needs except its plan. */
#ifndef PROCTOR_SLOTS_H
#define PROCTOR_SLOTS_H

#include "cgroups.h"
#include "mounts.h"
#include "plan.h"

/* launcher → stocker */
struct slot_request {
    uint32_t count;
    uint32_t network; /* enum network_kind */
};

/* stocker → launcher, with three descriptors: control socket, pidfd, user namespace. On failure `error` is set, none come. */
struct slot_offer {
    char name[NAME_MAX_BYTES];
    int32_t pid;
    uint32_t uid_base;
    uint32_t network;
    int32_t error;
    char step[32];
};

/* slot → launcher, once. */
struct slot_reply {
    int32_t error;
    char step[32];
};

/* The guest's: among hundreds of busy processes in its sandbox's own cpu group it must still get its turn, or a fork bomb could
 * not be killed in time. The guest's children go back to 0 (exec.c). Launcher and stocker have it too: sandboxes can be made
 * on a machine that is busy with sandboxes. */
#define GUEST_NICE (-20)

struct stocker_setup {
    const struct config *config;
    const struct cgroups *cgroups;
    const struct template *template;
    int request_fd; /* SOCK_SEQPACKET to the launcher */
    int foreign[5]; /* the launcher's own descriptors, which the stocker must not keep alive */
};

/* Forks the stocker. Returns its pid, or -1. */
pid_t stocker_start(const struct stocker_setup *setup, struct failure *failure);

/* One packet with up to MESSAGE_FDS_MAX descriptors. Received descriptors are close-on-exec. Both return the number of
 * bytes, or -1; a packet that was cut is an error. */
long packet_send(int socket, const void *data, size_t size, const int *fds, unsigned fd_count);
long packet_receive(int socket, void *data, size_t size, int *fds, unsigned *fd_count);

#endif
