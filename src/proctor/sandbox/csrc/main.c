/* proctor-init: one static binary, two roles, chosen by the first argument.
 *
 *   proctor-init launcher FD    make sandboxes on request (see docs/design/launcher.md)
 *   proctor-init guest-dev FD   serve the guest protocol outside any sandbox (tests of the guest alone)
 *   proctor-init --version
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "guest.h"
#include "launcher.h"

/* Used only when the guest's own sources are not part of the build. */
__attribute__((weak)) int guest_main(int channel_fd, const struct guest_config *config) {
    (void)channel_fd;
    (void)config;
    return 70;
}

static int parse_fd(const char *text) {
    char *end = NULL;
    long value = strtol(text, &end, 10);
    return (end == text || *end != '\0' || value < 0 || value > 1 << 20) ? -1 : (int)value;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        printf("proctor-init plan=%d guest=1\n", 1);
        return 0;
    }
    int fd = argc == 3 ? parse_fd(argv[2]) : -1;
    if (fd >= 0 && strcmp(argv[1], "launcher") == 0) return launcher_main(fd);
    if (fd >= 0 && strcmp(argv[1], "guest-dev") == 0) {
        const struct guest_config config = {.cgroup_fd = -1, .capability_mask = ~0ULL};
        return guest_main(fd, &config);
    }
    fprintf(stderr, "usage: proctor-init (launcher|guest-dev) FD | --version\n");
    return 64;
}
