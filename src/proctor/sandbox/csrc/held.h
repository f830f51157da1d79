/* What a launcher that outlives its Edge holds of each sandbox, so that a later Edge can have it. */
#ifndef PROCTOR_HELD_H
#define PROCTOR_HELD_H

#include "plan.h"

/* Takes ownership of the descriptors. A tied one (`is_durable` 0) has a pidfd only, to be killed when its Edge is gone. */
struct held {
    char slot[NAME_MAX_BYTES]; /* empty: this place is free */
    char name[NAME_MAX_BYTES]; /* the plan's */
    int32_t pid;
    uint32_t uid_base;
    int pidfd, upper, attach;
    uint64_t deadline_ms; /* CLOCK_BOOTTIME; 0: none */
    int is_durable, is_dead, is_expired;
};

/* Once. Returns a descriptor that is readable when one of them has died; -1 and errno. */
int held_open(void);

/* 0, or -1 when there is no place (the caller keeps the descriptors). */
int held_add(const struct held *held);

/* The living durable one in `slot`, or NULL. */
const struct held *held_find(const char *slot);

/* Takes note of deaths. With `forget` nothing is kept of the dead, otherwise their names are, for the next Edge. */
void held_reap(int forget);

/* An Edge is gone: kills what was tied to it. Returns how many durable ones live. */
unsigned held_end_tied(void);
unsigned held_living(void);

/* Kills those whose time is up. Returns the next deadline in milliseconds of CLOCK_BOOTTIME, 0 when there is none. */
uint64_t held_expire(uint64_t now_ms);

/* Tells a new Edge of every durable one, dead or alive, in one message each, and then of ourselves with an empty slot name.
 * The dead are forgotten. 0, or -1 when the Edge does not read. */
int held_announce(int control);

#endif
