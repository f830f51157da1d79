/* The guest as process 1 of a container that somebody else made: gVisor's runsc, or an engine like Docker. */
#ifndef PROCTOR_STANDALONE_H
#define PROCTOR_STANDALONE_H

#include "guest.h"

/* `words` are `name=value` (see standalone.c); frames come in by descriptor 0 and go out by descriptor 1. Fills `config` and `*channel`
 * for guest_main. 0, or an exit status: 64 for a word that it does not know, 71 where a system call failed. */
int standalone_prepare(int count, char **words, struct guest_config *config, int *channel);

#endif
