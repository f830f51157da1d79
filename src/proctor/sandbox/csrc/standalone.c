/* Where the launcher hands everything over in memory, here all there is are a command line, three open descriptors and whatever
 * the container's maker has set up. The words of the command line:
 *
 *   caps=HEX      capabilities (bit mask) that a child may have as uid 0
 *   mark=N        the resource whose limit marks the processes of a command (group.h)
 *   filter=HEX    the children's seccomp program, struct sock_filter by struct sock_filter
 *   count=N       how many processes may run, counted by a group that we make ourselves in gVisor's own cgroup file system
 *   hide=1        what we hold open is shown to nobody: gVisor would show it to everybody
 *   self=PATH     where this binary is mounted, to be unmounted and removed: nobody else needs it
 *   placeholder=PATH  a file to be removed: it kept the container's maker from mounting something over its directory
 */
#include "standalone.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNTERS "/sys/fs/cgroup"

enum { FILTER_MAX = 4096 };

static struct sock_filter filter[FILTER_MAX];

static int hex_digit(char digit) {
    if (digit >= '0' && digit <= '9') return digit - '0';
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* Bytes of instructions, or -1. */
static long parse_filter(const char *text) {
    size_t length = strlen(text) / 2;
    unsigned char *bytes = (unsigned char *)filter;
    if (strlen(text) % 2 != 0 || length % sizeof *filter != 0 || length > sizeof filter) return -1;
    for (size_t i = 0; i < length; i++) {
        int high = hex_digit(text[2 * i]), low = hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0) return -1;
        bytes[i] = (unsigned char)(high << 4 | low);
    }
    return (long)length;
}

/* gVisor limits and counts processes by a cgroup of its own, which nobody but us is to see: the file system is mounted, a group is
 * made in it, its files are kept open, and it is unmounted. Under gVisor a limit of N lets N + 1 processes in. */
static int make_counter(struct guest_config *config) {
    char limit[24];
    int length = snprintf(limit, sizeof limit, "%llu", (unsigned long long)(config->count_max > 1 ? config->count_max - 1 : 1));
    if (mount("cgroup", COUNTERS, "cgroup", 0, "pids") < 0) return -1;
    int fd = mkdir(COUNTERS "/box", 0755) < 0 ? -1 : open(COUNTERS "/box/pids.max", O_WRONLY | O_CLOEXEC);
    ssize_t written = fd < 0 ? -1 : write(fd, limit, (size_t)length);
    if (fd >= 0) close(fd);
    config->count_enter_fd = open(COUNTERS "/box/cgroup.procs", O_WRONLY | O_CLOEXEC);
    config->count_fd = open(COUNTERS "/box/pids.current", O_RDONLY | O_CLOEXEC);
    int error = errno;
    if (umount2(COUNTERS, MNT_DETACH) < 0) return -1;
    errno = error;
    return written == length && config->count_enter_fd > 0 && config->count_fd > 0 ? 0 : -1;
}

/* gVisor shows what a process holds open to everybody, and lets them open it again: with that a process could write into the streams
 * of another command. So nobody gets there. */
static int hide_descriptors(void) {
    static const char *const places[] = {"/proc/1/fd", "/proc/1/fdinfo", "/proc/1/task"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        if (mount("none", places[i], "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0555,size=4k") < 0) return -1;
    }
    return 0;
}

static int take_word(struct guest_config *config, const char *word) {
    const char *value = strchr(word, '=');
    if (value == NULL) return -1;
    value++;
    if (strncmp(word, "caps=", 5) == 0) return config->capability_mask = strtoull(value, NULL, 16), 0;
    if (strncmp(word, "mark=", 5) == 0) return config->mark_resource = (int)strtol(value, NULL, 10), 0;
    if (strncmp(word, "count=", 6) == 0) return config->count_max = strtoull(value, NULL, 10), 0;
    if (strcmp(word, "hide=1") == 0) return hide_descriptors();
    if (strncmp(word, "self=", 5) == 0) return umount2(value, MNT_DETACH) < 0 || unlink(value) < 0 ? -1 : 0;
    if (strncmp(word, "placeholder=", 12) == 0) return unlink(value) < 0 && errno != ENOENT ? -1 : 0;
    if (strncmp(word, "filter=", 7) != 0) return -1;
    long length = parse_filter(value);
    config->seccomp = filter;
    config->seccomp_count = (uint16_t)(length / (long)sizeof *filter);
    return length < 0 ? -1 : 0;
}

static int stop_blocking(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? -1 : 0;
}

/* Frames leave their standard places: no child may ever inherit them, and 0 and 1 are /dev/null for the guest itself. */
static int move_away(int fd) {
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (moved < 0 || null < 0 || stop_blocking(moved) < 0 || dup2(null, fd) < 0) return -1;
    close(null);
    return moved;
}

int standalone_prepare(int count, char **words, struct guest_config *config, int *channel) {
    *config = (struct guest_config){.cgroup_fd = -1, .child_oom_score_adj = 500, .set_ids = 1, .is_init = getpid() == 1, .attach_fd = -1};
    for (int i = 0; i < count; i++) {
        if (take_word(config, words[i]) < 0) return 64;
    }
    umask(022);
    if (config->count_max > 0 && make_counter(config) < 0) {
        fprintf(stderr, "guest: cannot count processes: %s\n", strerror(errno));
        return 71;
    }
    *channel = move_away(0);
    config->channel_out_fd = move_away(1);
    if (*channel >= 0 && config->channel_out_fd >= 0) return 0;
    fprintf(stderr, "guest: cannot use its standard streams: %s\n", strerror(errno));
    return 71;
}
