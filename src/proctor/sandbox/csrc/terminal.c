#include "terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <termios.h>
#include <unistd.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

enum { END_OF_TRANSMISSION = 4 };

union rights {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
};

static bool is_multiplexer(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && S_ISCHR(info.st_mode) && info.st_rdev == makedev(5, 2);
}

static int send_fd(int socket, int fd) {
    union rights rights;
    char mark = 't';
    struct iovec iov = {.iov_base = &mark, .iov_len = 1};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = rights.bytes, .msg_controllen = sizeof rights.bytes};
    memset(&rights, 0, sizeof rights);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    return sendmsg(socket, &message, MSG_NOSIGNAL) == 1 ? 0 : -1;
}

/* The other end of a terminal by its name, for gVisor, which cannot give it by the descriptor. It must be what it says: nobody is to
 * slip something else under that name. */
static int open_by_name(int ours) {
    char name[32];
    unsigned number;
    struct stat info;
    if (ioctl(ours, TIOCGPTN, &number) < 0) return -1;
    snprintf(name, sizeof name, "/dev/pts/%u", number);
    int theirs = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC | O_NOFOLLOW);
    if (theirs < 0) return -1;
    if (fstat(theirs, &info) == 0 && S_ISCHR(info.st_mode) && info.st_rdev == makedev(136, number)) return theirs;
    close(theirs);
    errno = ENOTTY;
    return -1;
}

int terminal_make(const struct terminal_size *size, int status) {
    const struct winsize window = {.ws_col = size->columns, .ws_row = size->rows};
    int unlocked = 0;
    setfsgid(0);
    setfsuid(0);
    /* A change of file system ids makes a process dumpable again where an administrator has chosen so. */
    if (prctl(PR_SET_DUMPABLE, 0) < 0) return -1;
    int ours = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (ours < 0) return -1;
    if (!is_multiplexer(ours)) { /* the image or the candidate has put something else there */
        close(ours);
        errno = ENOTTY;
        return -1;
    }
    int theirs = -1;
    if (ioctl(ours, TIOCSPTLCK, &unlocked) == 0 && ioctl(ours, TIOCSWINSZ, &window) == 0)
        theirs = ioctl(ours, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (theirs < 0 && errno == ENOTTY) theirs = open_by_name(ours);
    if (theirs >= 0 && send_fd(status, ours) < 0) {
        int error = errno;
        close(theirs);
        errno = error;
        theirs = -1;
    }
    int error = errno;
    close(ours);
    errno = error;
    return theirs;
}

int terminal_take(int fd, uid_t uid, bool change_owner) {
    if (ioctl(fd, TIOCSCTTY, 0) < 0) return -1;
    return change_owner ? fchown(fd, uid, (gid_t)-1) : 0;
}

ssize_t terminal_receive(int status, void *message, size_t size, int *terminal) {
    union rights rights;
    struct iovec iov = {.iov_base = message, .iov_len = size};
    struct msghdr packet = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = rights.bytes, .msg_controllen = sizeof rights.bytes};
    *terminal = -1;
    ssize_t got = recvmsg(status, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0) return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(terminal, CMSG_DATA(header), sizeof(int));
    if (*terminal >= 0 && (!is_multiplexer(*terminal) || fcntl(*terminal, F_SETFL, O_RDWR | O_NONBLOCK) < 0)) {
        close(*terminal);
        *terminal = -1;
    }
    return got;
}

int terminal_resize(int terminal, const struct terminal_size *size) {
    const struct winsize window = {.ws_col = size->columns, .ws_row = size->rows};
    return ioctl(terminal, TIOCSWINSZ, &window);
}

uint8_t terminal_end_mark(int terminal) {
    struct termios settings;
    if (tcgetattr(terminal, &settings) < 0 || settings.c_cc[VEOF] == 0) return END_OF_TRANSMISSION;
    return settings.c_cc[VEOF];
}

bool terminal_readable(int terminal) {
    struct pollfd poller = {.fd = terminal, .events = POLLIN};
    return poll(&poller, 1, 0) == 1 && (poller.revents & POLLIN) != 0;
}
