/* What the guest knows of each command, and the parts of it that more than one file works on. */
#ifndef PROCTOR_TABLE_H
#define PROCTOR_TABLE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "exec.h"
#include "frame.h"
#include "group.h"

enum { EXECS_MAX = 128, KEPT_MAX = 256 };

struct output {
    int fd;          /* -1 = ended */
    uint32_t credit; /* what the host still takes */
    int64_t left;    /* bytes that still belong to this exec; -1 = all until end-of-file */
    bool ended;
    uint32_t start, held, sent; /* durable: the ring of what is not acknowledged, and how much of it this host was sent */
    uint64_t acknowledged;
};

struct input {
    int fd;          /* the child's stdin, or -1 */
    bool ended;      /* the host has sent EOF */
    bool waiting;    /* for the terminal that it goes to */
    bool gone;       /* the child takes no more, and the host did not end it */
    uint64_t taken;  /* from the host, all in all */
    uint32_t window; /* what the host may still send */
    uint32_t owed;   /* taken by the child, not yet given back as credit */
    uint32_t start, used;
};

struct exec {
    uint32_t id; /* 0 = this slot is free */
    pid_t pid;
    uint32_t flags;
    int status_fd;
    bool exited, killed, keeping, empty, emptying;
    bool terminal; /* one pseudo-terminal is input and output; it comes from the child a moment after its birth */
    bool started, over, kept; /* durable: one that is over has its place until the host has taken note */
    uint8_t subs;             /* bits of the sub-streams that it has */
    uint16_t told;
    uint32_t leftover;
    bool at_limit; /* no further process could have been started when it ended, by a count of our own (guest.h) */
    int wait_status, failed_errno;
    char failed_step[60]; /* why the program never ran */
    struct rusage usage;
    struct exec_group group;
    struct input input;
    struct output outputs[SUB_COUNT];
};

/* What an exec with EXEC_KEEP left behind. Its pipes are read and thrown away, so that a service neither blocks nor dies of SIGPIPE. */
struct kept {
    uint32_t id; /* 0 = free */
    bool killed;
    struct exec_group group;
    int pipes[SUB_COUNT];
};

extern struct channel guest_channel;
extern struct exec guest_execs[EXECS_MAX];

int send_u32(enum frame_type type, uint32_t stream, uint8_t sub, uint32_t value);
void close_fd(int *fd);

/* ---- streams.c: all return 0, or -1 when the connection has to end --------------------------------------------------- */

bool output_open(const struct exec *exec, uint8_t sub);

/* This is all. */
int finish_output(struct exec *exec, uint8_t sub, bool close_it);

/* The child has sent its terminal. */
int connect_terminal(struct exec *exec, int terminal);

/* One read of one stream, straight into the outgoing queue. */
int pump_output(struct exec *exec, uint8_t sub);

/* From now on a stream ends after what is in its pipe: nobody of this exec can write more, and whoever else holds the pipe
 * (a descriptor can be passed to another exec) cannot keep the host waiting. */
int limit_outputs(struct exec *exec);

/* The child takes no more input; with `tell` the host is told. */
int end_input(struct exec *exec, bool tell);

/* Writes what the child takes, and gives the host credit for it. */
int pump_input(struct exec *exec);

/* The host has no more input. */
int finish_input(struct exec *exec);

/* Input from the host. */
int take_input(struct exec *exec, const struct frame *frame);

#endif
