/* A guest that outlives its host: how it comes to a new channel. */
#ifndef PROCTOR_ATTACH_H
#define PROCTOR_ATTACH_H

/* Takes the next channel that the launcher passes over `socket`. The descriptor; -1 and errno (EAGAIN: none is there); -1 and 0
 * when nobody can pass one any more. */
int attach_receive(int socket);

/* Passes a channel to the guest at the other end of `socket`. 0, or -1 and errno. */
int attach_send(int socket, int channel);

#endif
