/* What the kernel alone takes for the parts of a sandbox: bare system calls, one after another, as root.
 * Usage: floor ROUNDS CGROUP_DIRECTORY...; prints one line a part: name, median microseconds. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS_MAX 10000

static char **groups;
static int group_count;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void must(int good, const char *what) {
    if (good) return;
    perror(what);
    exit(1);
}

static void child_of(unsigned long flags) {
    pid_t pid = (pid_t)syscall(SYS_clone, flags | SIGCHLD, NULL, NULL, NULL, NULL);
    must(pid >= 0, "clone");
    if (pid == 0) _exit(0);
    must(waitpid(pid, NULL, 0) == pid, "waitpid");
}

static void bare_process(void) { child_of(0); }
static void user_and_pid(void) { child_of(CLONE_NEWUSER | CLONE_NEWPID); }
static void mounts(void) { child_of(CLONE_NEWNS); }
static void network(void) { child_of(CLONE_NEWNET); }
static void ipc_and_uts(void) { child_of(CLONE_NEWIPC | CLONE_NEWUTS); }
static void all_namespaces(void) {
    child_of(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP);
}

static void control_groups(void) {
    char path[512];
    for (int i = 0; i < group_count; i++) {
        snprintf(path, sizeof path, "%s/floor", groups[i]);
        must(mkdir(path, 0755) == 0, path);
    }
    for (int i = 0; i < group_count; i++) {
        snprintf(path, sizeof path, "%s/floor", groups[i]);
        must(rmdir(path) == 0, path);
    }
}

static void tmpfs(void) {
    int context = (int)syscall(SYS_fsopen, "tmpfs", 1);
    must(context >= 0 && syscall(SYS_fsconfig, context, 6, NULL, NULL, 0) == 0, "fsconfig");
    int mount = (int)syscall(SYS_fsmount, context, 1, 0);
    must(mount >= 0, "fsmount");
    close(mount);
    close(context);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *name, void (*part)(void), int rounds) {
    static double taken[ROUNDS_MAX];
    for (int i = 0; i < rounds; i++) {
        double begin = now_us();
        part();
        taken[i] = now_us() - begin;
    }
    qsort(taken, (size_t)rounds, sizeof *taken, compare);
    printf("%s\t%.0f\n", name, taken[rounds / 2]);
    fflush(stdout);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 0;
    must(rounds > 0 && rounds <= ROUNDS_MAX, "rounds");
    groups = argv + 2;
    group_count = argc - 2;
    report("a process", bare_process, rounds);
    report("with user and pid namespace", user_and_pid, rounds);
    report("with mount namespace", mounts, rounds);
    report("with network namespace", network, rounds);
    report("with ipc and uts namespace", ipc_and_uts, rounds);
    report("with all namespaces", all_namespaces, rounds);
    report("control groups, made and removed", control_groups, rounds);
    report("a tmpfs", tmpfs, rounds);
    return 0;
}
