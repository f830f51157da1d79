/* Talks to the carried network, for checks of its policy: raw DNS queries, and bytes to an address and back. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "probe.h"

enum { WAIT_MS = 5000 };

static size_t put_name(unsigned char *out, const char *name) {
    size_t used = 0;
    while (*name != '\0') {
        size_t length = strcspn(name, ".");
        out[used++] = (unsigned char)length;
        memcpy(out + used, name, length);
        used += length;
        name += length + (name[length] == '.');
    }
    out[used++] = 0;
    return used;
}

/* talk dns NAME TYPE: prints `rcode N answers N` and the first address, or what the kernel said. */
static int ask(const char *name, int type) {
    unsigned char query[600] = {0x12, 0x34, 1, 0, 0, 1}, reply[1500];
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons(53), .sin_addr.s_addr = inet_addr("127.0.0.53")};
    size_t size = 12;
    if (strlen(name) > 500) return 64;
    size += put_name(query + size, name);
    query[size + 1] = (unsigned char)type;
    query[size + 3] = 1;
    size += 4;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&server, sizeof server) < 0 || send(fd, query, size, 0) < 0) return printf("%s\n", outcome(-1)) < 0;
    struct pollfd one = {.fd = fd, .events = POLLIN};
    if (poll(&one, 1, WAIT_MS) != 1) return printf("no answer\n") < 0;
    ssize_t got = recv(fd, reply, sizeof reply, 0);
    if (got < 12) return printf("%s\n", got < 0 ? outcome(got) : "short") < 0;
    unsigned answers = (unsigned)reply[6] << 8 | reply[7];
    printf("rcode %d answers %u", reply[3] & 15, answers);
    /* One answer of ours is the question's name by reference, then 10 bytes, then the address. */
    if (answers > 0 && (size_t)got >= size + 16 && type == 1)
        printf(" %d.%d.%d.%d", reply[size + 12], reply[size + 13], reply[size + 14], reply[size + 15]);
    printf("\n");
    return 0;
}

/* talk tcp ADDRESS PORT: sends standard input, then prints at most 4 KiB of what comes back until the end. */
static int exchange(const char *text, int port) {
    char buffer[4096];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = inet_addr(text)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0) return printf("connect %s\n", outcome(-1)) < 0;
    for (ssize_t got; (got = read(0, buffer, sizeof buffer)) > 0;) {
        if (send(fd, buffer, (size_t)got, MSG_NOSIGNAL) != got) return printf("send %s\n", outcome(-1)) < 0;
    }
    shutdown(fd, SHUT_WR);
    size_t used = 0;
    while (used < sizeof buffer) {
        struct pollfd one = {.fd = fd, .events = POLLIN};
        if (poll(&one, 1, WAIT_MS) != 1) break;
        ssize_t got = recv(fd, buffer + used, sizeof buffer - used, 0);
        if (got < 0 && used == 0) return printf("receive %s\n", outcome(-1)) < 0;
        if (got <= 0) break;
        used += (size_t)got;
    }
    return fwrite(buffer, 1, used, stdout) != used || (used == 0 && printf("end\n") < 0);
}

int talk(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[0], "dns") == 0) return ask(argv[1], atoi(argv[2]));
    if (argc == 3 && strcmp(argv[0], "tcp") == 0) return exchange(argv[1], atoi(argv[2]));
    return 64;
}
