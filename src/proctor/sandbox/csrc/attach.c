#include "attach.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

union rights {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
};

int attach_receive(int socket) {
    union rights rights;
    char mark;
    int fd = -1;
    struct iovec iov = {.iov_base = &mark, .iov_len = 1};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = rights.bytes, .msg_controllen = sizeof rights.bytes};
    ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0) return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof fd))
        memcpy(&fd, CMSG_DATA(header), sizeof fd);
    errno = got == 0 ? 0 : EAGAIN;
    return fd;
}

int attach_send(int socket, int channel) {
    union rights rights;
    char mark = 'c';
    struct iovec iov = {.iov_base = &mark, .iov_len = 1};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = rights.bytes, .msg_controllen = sizeof rights.bytes};
    memset(&rights, 0, sizeof rights);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof channel);
    memcpy(CMSG_DATA(header), &channel, sizeof channel);
    return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == 1 ? 0 : -1;
}
