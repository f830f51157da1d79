/* The connections of the carried network; used by net.c alone. All that return int: 0, or -1 when we cannot go on. */
#ifndef PROCTOR_CARRY_H
#define PROCTOR_CARRY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "frame.h"

/* The high byte of an epoll event's data. */
enum { EVENT_CONNECTION = 0, EVENT_LISTENER = 1 };

int connections_prepare(int epoll_fd);
bool connections_full(void);

/* A place for `fd`; with `request` the connection is still being made for that request of the host. Returns its id; 0 and errno:
 * there is none (the caller keeps `fd`). */
uint32_t connection_open(int fd, uint32_t request);

/* Dials for a request of the host, answered by CONNECTED now or later; gives such a request up. */
int connection_dial(uint32_t request, const struct sockaddr *address, socklen_t size);
int connection_cancel(uint32_t request);

/* Resets all. */
void connections_forget(void);

/* What the kernel says, what the host says. */
int connection_event(uint32_t id, uint32_t events);
int connection_frame(const struct frame *frame);
int connection_reset(uint32_t id);

/* Moves bytes towards the host, a few frames from whoever has some, in turn. */
int connections_pump(void);
bool connections_ready(void);

/* net.c: whether the queue to the host takes a data frame and what else one turn may say. */
bool net_has_room(void);

#endif
