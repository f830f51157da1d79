/* What the host is told of each command.
 *
 * Tied: at once, and then it is forgotten. Durable: a command's news and the output that the host has not acknowledged are kept
 * and told again to every new host, until it has said DONE. Both ways use these calls; all return 0, or -1 when the
 * connection cannot go on. */
#ifndef PROCTOR_TELL_H
#define PROCTOR_TELL_H

#include "table.h"

/* Once, before anything else: whether this guest outlives its host. */
void tell_prepare(bool durable);
bool tell_is_durable(void);

int tell_started(struct exec *exec);
int tell_exited(struct exec *exec, uint32_t leftover);
int tell_end_of_output(struct exec *exec, uint8_t sub);
int tell_end_of_input(struct exec *exec);

/* The last news of an exec, whose place is free afterwards (durable: once the host has said DONE). */
int tell_failed(struct exec *exec);
int tell_closed(struct exec *exec, bool kept);
int tell_done(struct exec *exec);
bool tell_closed_told(const struct exec *exec);

/* An exec that never got a place. */
int tell_refused(uint32_t id, int error, const char *step);

/* ---- durable only --------------------------------------------------------------------------------------------------- */

/* Where output may be read to, and that it was. */
uint8_t *tell_room(struct exec *exec, uint8_t sub, size_t *room);
int tell_took(struct exec *exec, uint8_t sub, uint32_t count);

/* The host has taken so much in. */
int tell_acknowledged(struct exec *exec, uint8_t sub, uint32_t count);

/* Everything that is due and fits the queue. */
int tell_all(void);

/* A new host: what there is, from the beginning. */
int tell_again(uint32_t last_id);

#endif
