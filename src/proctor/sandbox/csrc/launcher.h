/* The launcher's entry: serves requests on a SOCK_SEQPACKET socket until it ends. */
#ifndef PROCTOR_LAUNCHER_H
#define PROCTOR_LAUNCHER_H

int launcher_main(int control_fd);

#endif
