#include "room.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mounts.h"
#include "sys.h"

#define STAGE "/stage"

/* gVisor mounts a file system in memory, without a limit, over a /tmp that is empty: so it is not empty until the guest runs. */
#define PLACEHOLDER ".proctor-placeholder"

static int make_file(const char *name, const void *bytes, size_t size) {
    char path[256];
    snprintf(path, sizeof path, STAGE "/%s", name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) return -1;
    ssize_t written = size > 0 ? write(fd, bytes, size) : 0;
    int error = errno;
    close(fd);
    errno = error;
    return written == (ssize_t)size ? 0 : -1;
}

static int attach_at(int mount, int root, const char *target) {
    int place = sys_openat2(root, target, O_PATH, INSIDE);
    if (place < 0) return -1;
    int bad = sys_move_mount(mount, "", place, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
    int error = errno;
    close(place);
    errno = error;
    return bad;
}

static int attach_tool(int mount, const struct plan_bind *bind) {
    char path[256];
    if (make_file(bind->target + 1, NULL, 0) < 0) return -1;
    snprintf(path, sizeof path, STAGE "%s", bind->target);
    return sys_move_mount(mount, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH);
}

/* With the ids of root inside, who alone can own anything in the upper. */
static int keep_tmp(int root) {
    if (mkdirat(root, "tmp", 0) == 0 && fchmodat(root, "tmp", 01777, 0) < 0) return -1;
    int tmp = sys_openat2(root, "/tmp", O_RDONLY | O_DIRECTORY, INSIDE);
    if (tmp < 0) return errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? 0 : -1;
    int file = openat(tmp, PLACEHOLDER, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    int error = errno;
    if (file >= 0) close(file);
    close(tmp);
    errno = error;
    return file < 0 ? -1 : 0;
}

static int become_root(void) {
    return setgroups(0, NULL) < 0 || setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0 ? -1 : 0;
}

static int fill_stage(const struct plan *plan, const int *binds) {
    static const char *const options[] = {"size", "4m", "nr_inodes", "1024", "mode", "0755", NULL, NULL};
    int stage = mount_new("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    if (stage < 0 || sys_move_mount(stage, "", AT_FDCWD, STAGE, MOVE_MOUNT_F_EMPTY_PATH) < 0) return -1;
    close(stage);
    if (mkdir(STAGE "/state", 0700) < 0) return -1;
    if (make_file(plan->file_name, plan->file, plan->file_size) < 0) return -1;
    for (unsigned i = 0; i < plan->bind_count; i++) {
        if (plan->binds[i].is_tool && attach_tool(binds[i], &plan->binds[i]) < 0) return -1;
    }
    return 0;
}

int room_enter(const struct plan *plan, int root, const int *binds, struct failure *failure) {
    static const char *const none[] = {NULL, NULL};
    if (become_root() < 0) return fail(failure, "room-ids", errno);
    if (sys_move_mount(root, "", AT_FDCWD, "/new", MOVE_MOUNT_F_EMPTY_PATH) < 0) return fail(failure, "attach-root", errno);
    for (unsigned i = 0; i < plan->bind_count; i++) {
        if (!plan->binds[i].is_tool && attach_at(binds[i], root, plan->binds[i].target) < 0) return fail(failure, "attach-bind", errno);
    }
    if (keep_tmp(root) < 0) return fail(failure, "room-tmp", errno);
    /* What the guest of a native sandbox would have is masked; the program needs a whole /proc, or it may mount none itself. */
    int proc = mount_new("proc", none, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    if (proc < 0 || sys_move_mount(proc, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH) < 0) return fail(failure, "room-proc", errno);
    close(proc);
    if (fill_stage(plan, binds) < 0) return fail(failure, "room-stage", errno);
    return 0;
}

void room_execute(const struct plan *plan, int channel, int log) {
    static char *const environment[] = {(char *)"PATH=" STAGE, NULL};
    char *argv[PROGRAM_WORDS_MAX + 1] = {NULL};
    const char *word = plan->program;
    for (unsigned i = 0; i < plan->program_words; i++, word += strlen(word) + 1) argv[i] = (char *)(uintptr_t)word;
    /* A change of ids takes the death signal away. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && dup2(channel, 0) == 0 && dup2(channel, 1) == 1 && dup2(log, 2) == 2 &&
        chdir(STAGE) == 0)
        execve(argv[0], argv, environment);
    dprintf(log, "cannot execute %s: %s\n", argv[0], strerror(errno));
}
