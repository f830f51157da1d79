/* Who we are: ids, capabilities, namespaces, limits, what we hold open; and what we may do to process 1. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "probe.h"

static void tell_status(void) {
    static const char *const wanted[] = {"Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"};
    char line[512], key[64];
    FILE *file = fopen("/proc/self/status", "re");
    if (file == NULL) {
        say("status", "%s", outcome(-1));
        return;
    }
    while (fgets(line, sizeof line, file) != NULL) {
        char *colon = strchr(line, ':');
        if (colon == NULL) continue;
        *colon = '\0';
        for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
            if (strcmp(line, wanted[i]) != 0) continue;
            snprintf(key, sizeof key, "status.%s", wanted[i]);
            say(key, "%s", colon + 1 + strspn(colon + 1, "\t "));
        }
    }
    fclose(file);
}

static void tell_text(const char *key, const char *path) {
    char text[1024] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (got < 0) say(key, "%s", outcome(-1));
    else say(key, "%.*s", (int)got, text);
    if (fd >= 0) close(fd);
}

static void tell_namespaces(void) {
    static const char *const kinds[] = {"user", "pid", "mnt", "net", "ipc", "uts", "cgroup", "time"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char path[48], key[32], link[64] = "";
        snprintf(path, sizeof path, "/proc/self/ns/%s", kinds[i]);
        snprintf(key, sizeof key, "ns.%s", kinds[i]);
        ssize_t got = readlink(path, link, sizeof link - 1);
        say(key, "%s", got < 0 ? outcome(got) : link);
    }
}

/* Found by number, not by /proc: what is hidden there is found all the same. */
static void tell_descriptors(void) {
    for (int fd = 3; fd < 1024; fd++) {
        struct stat info;
        if (fstat(fd, &info) == 0) say("descriptor", "%d mode %o", fd, info.st_mode);
    }
    char path[512];
    say("cwd", "%s", getcwd(path, sizeof path) != NULL ? path : outcome(-1));
}

static void tell_limits(void) {
    struct rlimit core = {0}, files = {0};
    struct statvfs shm;
    cpu_set_t cpus;
    getrlimit(RLIMIT_CORE, &core);
    getrlimit(RLIMIT_NOFILE, &files);
    say("limit.core", "%llu", (unsigned long long)core.rlim_max);
    say("limit.files", "%llu", (unsigned long long)files.rlim_max);
    if (sched_getaffinity(0, sizeof cpus, &cpus) == 0) say("cpus", "%d", CPU_COUNT(&cpus));
    if (statvfs("/dev/shm", &shm) == 0)
        say("shm", "%llu bytes %llu files", (unsigned long long)shm.f_blocks * shm.f_frsize, (unsigned long long)shm.f_files);
    struct sysinfo info;
    if (sysinfo(&info) == 0) {
        say("memory", "%llu", (unsigned long long)info.totalram * info.mem_unit);
        say("swap", "%llu", (unsigned long long)info.totalswap * info.mem_unit);
    }
}

void tell_identity(void) {
    char host[65] = "";
    tell_status();
    tell_text("uid_map", "/proc/self/uid_map");
    tell_text("gid_map", "/proc/self/gid_map");
    tell_text("setgroups", "/proc/self/setgroups");
    tell_text("cgroup", "/proc/self/cgroup");
    tell_namespaces();
    tell_descriptors();
    tell_limits();
    if (gethostname(host, sizeof host - 1) == 0) say("hostname", "%s", host);
    tell_text("boot_id", "/proc/sys/kernel/random/boot_id");
}

/* --- process 1 ------------------------------------------------------------------------------------------------------ */

static void tell_read(const char *key, const char *path, int flags) {
    char byte;
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        say(key, "%s", outcome(-1));
        return;
    }
    ssize_t got = flags & O_DIRECTORY ? 1 : read(fd, &byte, 1);
    say(key, "%s", got < 0 ? outcome(-1) : got == 0 ? "empty" : "data");
    close(fd);
}

static void tell_listing(const char *key, const char *path) {
    DIR *directory = opendir(path);
    unsigned count = 0;
    if (directory == NULL) {
        say(key, "%s", outcome(-1));
        return;
    }
    errno = 0;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) count += entry->d_name[0] != '.';
    say(key, count == 0 && errno != 0 ? "%s" : count == 0 ? "empty" : "data", outcome(-1));
    closedir(directory);
}

void tell_process_one(void) {
    static const char *const files[] = {"mem", "environ", "maps", "auxv", "stack", "syscall", "io", "pagemap", "numa_maps"};
    static const char *const links[] = {"exe", "cwd", "root", "ns/mnt", "ns/user"};
    char path[64], key[64], target[256];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "/proc/1/%s", files[i]);
        snprintf(key, sizeof key, "one.%s", files[i]);
        tell_read(key, path, O_RDONLY);
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        snprintf(path, sizeof path, "/proc/1/%s", links[i]);
        snprintf(key, sizeof key, "one.%s", links[i]);
        say(key, "%s", outcome(readlink(path, target, sizeof target)));
    }
    tell_listing("one.fd", "/proc/1/fd");
    tell_listing("one.map_files", "/proc/1/map_files");
    say("one.exe-write", "%s", outcome(open("/proc/1/exe", O_WRONLY | O_CLOEXEC)));
    say("one.ptrace", "%s", outcome(syscall(SYS_ptrace, PTRACE_SEIZE, 1, 0, 0)));
    struct rlimit files_limit; /* the one that we share with it: nothing changes if it works */
    getrlimit(RLIMIT_NOFILE, &files_limit);
    say("one.prlimit", "%s", outcome(syscall(SYS_prlimit64, 1, RLIMIT_NOFILE, &files_limit, NULL)));
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(0, &cpus);
    say("one.affinity", "%s", outcome(sched_setaffinity(1, sizeof cpus, &cpus)));
    int pidfd = (int)syscall(SYS_pidfd_open, 1, 0);
    say("one.getfd", "%s", pidfd < 0 ? outcome(-1) : outcome(syscall(SYS_pidfd_getfd, pidfd, 3, 0)));
    if (pidfd >= 0) close(pidfd);
    /* It is spared by the rule of pid namespaces: who is asked whether it lives has the answer. */
    say("one.kill", "%s", outcome(kill(1, SIGKILL)));
    say("one.alive", "%s", outcome(access("/proc/1/stat", F_OK)));
}
