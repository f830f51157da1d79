/* What of the network there is, and where packets get to. Everything is asked without waiting for an answer that may never come:
 * where there is no way, the kernel says so at once. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "probe.h"

enum { ANSWER_MS = 100 };

static const struct {
    const char *address;
    int port;
} dialled[] = {
    {"169.254.169.254", 80}, {"::ffff:169.254.169.254", 80}, {"fd00:ec2::254", 80}, {"100.100.100.200", 80}, {"10.0.0.1", 443},
    {"172.17.0.1", 2375},    {"192.168.0.1", 443},           {"100.64.0.1", 443},   {"1.1.1.1", 443},        {"8.8.8.8", 853},
    {"2606:4700:4700::1111", 443}, {"127.0.0.1", 22}, {"127.0.0.1", 2375}, {"127.0.0.1", 5432}, {"127.0.0.1", 6379}, {"127.0.0.1", 6443},
    {"127.0.0.1", 10250}, {"::1", 22},
};

static socklen_t address_of(const char *text, int port, struct sockaddr_storage *address) {
    struct sockaddr_in *four = (struct sockaddr_in *)address;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)address;
    memset(address, 0, sizeof *address);
    if (inet_pton(AF_INET, text, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons((uint16_t)port);
        return sizeof *four;
    }
    if (inet_pton(AF_INET6, text, &six->sin6_addr) != 1) return 0;
    six->sin6_family = AF_INET6;
    six->sin6_port = htons((uint16_t)port);
    return sizeof *six;
}

static const char *dial(const char *text, int port) {
    struct sockaddr_storage address;
    socklen_t size = address_of(text, port, &address);
    int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return outcome(-1);
    int result = connect(fd, (struct sockaddr *)&address, size);
    if (result < 0 && errno == EINPROGRESS) {
        struct pollfd one = {.fd = fd, .events = POLLOUT};
        int error = ETIMEDOUT;
        socklen_t length = sizeof error;
        if (poll(&one, 1, ANSWER_MS) == 1 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) < 0) error = errno;
        result = error == 0 ? 0 : -1;
        errno = error;
    }
    const char *text_of = outcome(result);
    close(fd);
    return text_of;
}

static const char *throw(const char *text, int port) {
    struct sockaddr_storage address;
    socklen_t size = address_of(text, port, &address);
    int fd = socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return outcome(-1);
    const char *text_of = outcome(sendto(fd, "x", 1, 0, (struct sockaddr *)&address, size));
    close(fd);
    return text_of;
}

/* Lines of a table of /proc/net below its heading, or -1. `visit` may look at each. */
static long each_line(const char *path, void (*visit)(char *line)) {
    char line[1024];
    long count = -1;
    FILE *file = fopen(path, "re");
    if (file == NULL) return -1;
    while (fgets(line, sizeof line, file) != NULL) {
        if (++count > 0 && visit != NULL) visit(line);
    }
    fclose(file);
    return count < 0 ? 0 : count;
}

static unsigned device_lines;

static void tell_device(char *line) {
    char *name = line + strspn(line, " "), *colon = strchr(name, ':');
    if (device_lines++ == 0 || colon == NULL) return; /* a second line of heading */
    *colon = '\0';
    say("device", "%s", name);
}

static void tell_listener(char *line) {
    char local[64];
    unsigned state = 0;
    if (sscanf(line, " %*s %63s %*s %x", local, &state) == 2 && state == 0x0A) say("listener", "%s", local);
}

static void tell_unix(char *line) {
    char *at = strchr(line, '@');
    if (at != NULL) say("abstract", "%s", at);
}

void tell_network(int whole) {
    char key[96];
    device_lines = 0;
    each_line("/proc/net/dev", tell_device);
    say("routes", "%ld", each_line("/proc/net/route", NULL));
    if (whole) say("listeners", "%s", each_line("/proc/net/tcp", tell_listener) >= 0 ? "1" : outcome(-1));
    if (whole) each_line("/proc/net/tcp6", tell_listener);
    each_line("/proc/net/unix", tell_unix);
    for (size_t i = 0; i < sizeof dialled / sizeof *dialled; i++) {
        snprintf(key, sizeof key, "dial.[%s]:%d", dialled[i].address, dialled[i].port);
        say(key, "%s", dial(dialled[i].address, dialled[i].port));
    }
    say("throw.dns", "%s", throw("8.8.8.8", 53));
    say("throw.quic", "%s", throw("1.1.1.1", 443));
    say("throw.quic6", "%s", throw("2606:4700:4700::1111", 443));
    say("throw.multicast", "%s", throw("224.0.0.251", 5353));
    say("throw.broadcast", "%s", throw("255.255.255.255", 67));
}
