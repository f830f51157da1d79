/* The carried network: TCP connections and name queries of the sandbox's own loopback, as frames (docs/design/guest-protocol.md).
 *
 * The guest decides nothing here. It listens where the host says, forwards bytes and raw queries, and keeps what it holds within
 * fixed tables. Ids of connections and queries are its own and have bit 31 set; ids of listeners and connects are the host's. */
#ifndef PROCTOR_NET_H
#define PROCTOR_NET_H

#include <stdbool.h>

#include "frame.h"

enum {
    LISTENERS_MAX = 4096,
    CONNECTIONS_MAX = 512,
    QUERIES_MAX = 128,
    QUERY_MAX = 4096, /* bytes of one name query */
    /* What may reach the host: a flood inside must not become one outside. Per second, and at once. */
    ACCEPT_RATE = 2000, ACCEPT_BURST = 1024,
    QUERY_RATE = 200, QUERY_BURST = 400,
};

/* Whether a frame of the host is for the network, and what it asks for. -1: it cannot be true, or we cannot go on. */
bool net_owns(const struct frame *frame);
int net_frame(const struct frame *frame);

/* One turn of the event loop: moves what can be moved within a budget. -1 when the connection to the host has to end. */
int net_turn(void);

/* The host is gone: every connection, listener and query ends. */
void net_forget(void);

/* For the event loop's poll: a descriptor that is readable when something has happened (-1: none, or the host has to read
 * first), and the milliseconds after which net_turn has work that no event announces (-1: none). */
int net_poll_fd(void);
int net_timeout(void);

#endif
