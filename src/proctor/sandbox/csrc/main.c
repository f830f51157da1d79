/* proctor-init: one static binary, two roles, chosen by the first argument.
 *
 *   proctor-init launcher FD    make sandboxes on request (see docs/design/launcher.md)
 *   proctor-init guest WORD…    be the guest of a container that somebody else made (standalone.c)
 *   proctor-init guest-dev FD [CGROUP_FD|- [ATTACH_FD]]
 *                               serve the guest protocol outside any sandbox (tests of the guest alone)
 *   proctor-init --version
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "frame.h"
#include "guest.h"
#include "hardened.h"
#include "launcher.h"
#include "plan.h"
#include "standalone.h"

#ifdef PROCTOR_WEAKEN
const char *weakened_step;
#endif

static int parse_fd(const char *text) {
    char *end = NULL;
    long value = strtol(text, &end, 10);
    return (end == text || *end != '\0' || value < 0 || value > 1 << 20) ? -1 : (int)value;
}

/* Sandboxes can read the command line of their process 1, which never executes another program: it must not tell where
 * this binary lives. The kernel lays the arguments out one after the other. */
static void hide_arguments(int argc, char **argv) {
    static const char title[] = "proctor-init";
    char *end = argv[argc - 1] + strlen(argv[argc - 1]);
    size_t size = (size_t)(end - argv[0]);
    memset(argv[0], 0, size);
    memcpy(argv[0], title, size < sizeof title ? size : sizeof title);
}

int main(int argc, char **argv) {
#ifdef PROCTOR_WEAKEN
    const char *step = strstr(argv[0], "--");
    if (step != NULL) weakened_step = strdup(step + 2);
#endif
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        printf("proctor-init plan=%d guest=%d\n", PLAN_VERSION, PROTOCOL_VERSION);
        return 0;
    }
    int fd = argc >= 3 ? parse_fd(argv[2]) : -1;
    if (fd >= 0 && argc == 3 && strcmp(argv[1], "launcher") == 0) {
        hide_arguments(argc, argv);
        return launcher_main(fd);
    }
    if (fd >= 0 && argc <= 5 && strcmp(argv[1], "guest-dev") == 0) {
        const struct guest_config config = {.cgroup_fd = argc >= 4 ? parse_fd(argv[3]) : -1,
                                            .capability_mask = ~0ULL,
                                            .is_init = getpid() == 1,
                                            .attach_fd = argc == 5 ? parse_fd(argv[4]) : -1};
        return guest_main(fd, &config);
    }
    if (argc >= 2 && strcmp(argv[1], "guest") == 0) {
        struct guest_config config;
        int channel, status = standalone_prepare(argc - 2, argv + 2, &config, &channel);
        hide_arguments(argc, argv);
        return status != 0 ? status : guest_main(channel, &config);
    }
    fprintf(stderr, "usage: proctor-init (launcher|guest-dev) FD [CGROUP_FD|- [ATTACH_FD]] | guest WORD... | --version\n");
    return 64;
}
