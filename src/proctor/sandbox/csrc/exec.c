#include "exec.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files.h"
#include "hardened.h"
#include "user.h"

static char *argv_items[REQUEST_ITEMS_MAX + 1];
static char *env_items[REQUEST_ITEMS_MAX + 5]; /* HOME, USER, LOGNAME and the end */

static int append(char **items, size_t *count, char *item) {
    if (*count == REQUEST_ITEMS_MAX) return -1;
    items[(*count)++] = item;
    return 0;
}

/* One field of a request; `text` holds no NUL and is terminated before the next field is looked at. */
static int take_field(struct exec_request *request, uint8_t tag, char *text, uint32_t length) {
    int number = tag == TAG_FLAGS || tag == TAG_REPORT || tag == TAG_TERMINAL;
    if (number && length != 4) return -1;
    if (!number && memchr(text, '\0', length) != NULL) return -1;
    uint32_t value = number ? get_u32((const uint8_t *)text) : 0;
    switch (tag) {
    case TAG_ARG: return append(argv_items, &request->argc, text);
    case TAG_ENV: return length > 0 && memchr(text + 1, '=', length - 1) != NULL ? append(env_items, &request->envc, text) : -1;
    case TAG_CWD: return request->cwd == NULL ? (request->cwd = text, 0) : -1;
    case TAG_USER: return request->user == NULL ? (request->user = text, 0) : -1;
    case TAG_BUILTIN: return request->builtin == NULL ? (request->builtin = text, 0) : -1;
    case TAG_FLAGS: request->flags = value; return (value & ~(uint32_t)EXEC_FLAGS_ALL) == 0 ? 0 : -1;
    case TAG_TERMINAL:
        request->terminal = (struct terminal_size){(uint16_t)value, (uint16_t)(value >> 16)};
        return (value & 0xffff) != 0 && value >> 16 != 0 ? 0 : -1;
    case TAG_REPORT: request->report_fd = (int)value; return value >= 3 && value <= REPORT_FD_MAX ? 0 : -1;
    default: return -1;
    }
}

int request_parse(uint8_t *bytes, size_t length, struct exec_request *request) {
    *request = (struct exec_request){.report_fd = -1, .argv = argv_items, .envp = env_items};
    size_t at = 0;
    while (at < length) {
        if (length - at < 5) return -1;
        uint8_t tag = bytes[at];
        uint32_t size = get_u32(bytes + at + 1);
        bytes[at] = '\0'; /* ends the field before this one */
        at += 5;
        if (size > length - at || take_field(request, tag, (char *)bytes + at, size) < 0) return -1;
        at += size;
    }
    bytes[length] = '\0';
    argv_items[request->argc] = NULL;
    env_items[request->envc] = NULL;
    if (request->terminal.rows != 0 && (request->flags & EXEC_STDIN) == 0) return -1; /* a terminal is written to as well */
    return request->argc > 0 || request->builtin != NULL ? 0 : -1;
}

/* ---- the child, from its birth to its program ------------------------------------------------------------------- */

struct child {
    const struct exec_setup *setup;
    const struct exec_request *request;
    int in, out, err, report, status;
};

static _Noreturn void fail(const struct child *child, const char *step) {
    uint8_t message[64];
    size_t length = strlen(step);
    put_u32(message, (uint32_t)errno);
    memcpy(message + 4, step, length);
    /* Nothing can be done about a failed report: the guest then sees a child that ended with 127. */
    ssize_t written = write(child->status, message, 4 + length);
    (void)written;
    _exit(127);
}

/* Puts 0, 1, 2 and the report descriptor in their places; nothing else but the status pipe stays open. */
static int arrange_files(struct child *child) {
    int *all[] = {&child->in, &child->out, &child->err, &child->report, &child->status};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (*all[i] < 0) continue;
        *all[i] = fcntl(*all[i], F_DUPFD_CLOEXEC, REPORT_FD_MAX + 1); /* above every final place */
        if (*all[i] < 0) return -1;
    }
    int report = child->request->report_fd;
    if (dup2(child->in, 0) < 0 || dup2(child->out, 1) < 0 || dup2(child->err, 2) < 0) return -1;
    if (child->report >= 0 && dup2(child->report, report) < 0) return -1;
    unsigned keep[] = {child->report >= 0 ? (unsigned)report : (unsigned)child->status, (unsigned)child->status};
    unsigned from = 3;
    for (size_t i = 0; i < 2; i++) {
        if (keep[i] > from && syscall(SYS_close_range, from, keep[i] - 1, 0u) < 0) return -1;
        from = keep[i] + 1;
    }
    /* gVisor says EINVAL when nothing is open from there on. */
    if (!hardened("descriptors")) return dup(0) < 0 ? -1 : 0;
    return syscall(SYS_close_range, from, ~0u, 0u) < 0 && errno != EINVAL ? -1 : 0;
}

/* The guest is spared by the OOM killer, its children must not be. The files in /proc of a process that is not dumpable belong to
 * the machine's root, so the child has to be dumpable for this one write. Nothing can use that moment unless it has
 * CAP_SYS_PTRACE inside (the child still has a kernel uid that no process of the candidate can have). */
static int set_oom_score(const struct guest_config *config) {
    char text[16];
    int length = snprintf(text, sizeof text, "%d", config->child_oom_score_adj);
    if (config->set_ids && (config->capability_mask >> CAP_SYS_PTRACE & 1) != 0) return 0;
    if (prctl(PR_SET_DUMPABLE, 1) < 0) return -1;
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    ssize_t written = fd < 0 ? -1 : write(fd, text, (size_t)length);
    int error = errno;
    if (fd >= 0) close(fd);
    if (prctl(PR_SET_DUMPABLE, 0) < 0) return -1;
    errno = error;
    return written == length ? 0 : -1;
}

static int set_capabilities(uint64_t mask) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {0};
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted = (uint32_t)(mask >> (32 * i));
    return (int)syscall(SYS_capset, &header, data);
}

static const char *become(const struct exec_setup *setup, const struct user *user) {
    if (!setup->config->set_ids) return NULL; /* guest-dev: children stay who the caller is */
    if (setgroups(user->group_count, user->groups) < 0) return "setgroups";
    if (setresgid(user->gid, user->gid, user->gid) < 0) return "setgid";
    if (setresuid(user->uid, user->uid, user->uid) < 0) return "setuid";
    /* A change of ids sets this to fs.suid_dumpable, which an administrator may have raised. */
    if (prctl(PR_SET_DUMPABLE, 0) < 0) return "dumpable";
    /* The guest's uid was not 0, so the kernel's own rule that leaving uid 0 drops everything does not apply. */
    if (set_capabilities(user->uid == 0 ? setup->capabilities : 0) < 0) return "capset";
    return NULL;
}

static int confine(const struct guest_config *config) {
    if (config->seccomp == NULL || config->seccomp_count == 0) return 0;
    if (!hardened("seccomp") || !hardened("no-new-privs")) return 0; /* without the one the kernel takes no filter */
    const struct sock_fprog program = {.len = config->seccomp_count, .filter = (struct sock_filter *)config->seccomp};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

static const char *env_value(const struct exec_request *request, const char *name) {
    size_t length = strlen(name);
    for (size_t i = 0; i < request->envc; i++) {
        if (strncmp(request->envp[i], name, length) == 0 && request->envp[i][length] == '=') return request->envp[i] + length + 1;
    }
    return NULL;
}

static void add_login_env(const struct exec_request *request, const struct user *user) {
    static char texts[3][USER_TEXT_MAX + 16];
    const char *names[3] = {"HOME", "USER", "LOGNAME"};
    size_t count = request->envc;
    for (int i = 0; i < 3; i++) {
        const char *value = i == 0 ? user->home : user->name;
        if (value[0] == '\0' || env_value(request, names[i]) != NULL) continue;
        snprintf(texts[i], sizeof texts[i], "%s=%s", names[i], value);
        request->envp[count++] = texts[i];
    }
    request->envp[count] = NULL;
}

/* Executes a path; a file without a known format is a shell script, as execvp(3) has it. */
static void execute(const char *path, const struct exec_request *request) {
    execve(path, request->argv, request->envp);
    if (errno != ENOEXEC) return;
    static char *argv[REQUEST_ITEMS_MAX + 2];
    argv[0] = (char *)"/bin/sh";
    argv[1] = (char *)path;
    for (size_t i = 1; i <= request->argc; i++) argv[i + 1] = request->argv[i];
    execve(argv[0], argv, request->envp);
    errno = ENOEXEC;
}

/* execvpe(3), but with the PATH of the given environment. Returns with errno when nothing could be executed. */
static void execute_found(const struct exec_request *request) {
    char path[4096];
    const char *name = request->argv[0], *rest = env_value(request, "PATH");
    int denied = 0;
    errno = ENOENT;
    if (name[0] == '\0') return;
    if (strchr(name, '/') != NULL) {
        execute(name, request);
        return;
    }
    if (rest == NULL) rest = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    while (rest != NULL) {
        const char *colon = strchr(rest, ':');
        int length = colon != NULL ? (int)(colon - rest) : (int)strlen(rest);
        int used = snprintf(path, sizeof path, "%.*s/%s", length, length > 0 ? rest : ".", name);
        if (length == 0) used = snprintf(path, sizeof path, "./%s", name);
        rest = colon != NULL ? colon + 1 : NULL;
        if (used >= (int)sizeof path) continue;
        execute(path, request);
        if (errno == EACCES) denied = 1;
        if (errno != ENOENT && errno != ENOTDIR && errno != EACCES && errno != ELOOP && errno != ENAMETOOLONG) return;
    }
    errno = denied ? EACCES : ENOENT;
}

static _Noreturn void run_child(struct child *child) {
    static struct user user;
    const struct exec_request *request = child->request;
    const struct guest_config *config = child->setup->config;
    bool has_terminal = request->terminal.rows != 0;
    if (config->count_enter_fd != 0 && write(config->count_enter_fd, "0", 1) < 0) fail(child, "count");
    if (setsid() < 0) fail(child, "setsid");
    if (setpriority(PRIO_PROCESS, 0, 0) < 0) fail(child, "priority");
    if (set_oom_score(config) < 0) fail(child, "oom_score_adj");
    if (has_terminal) {
        child->in = child->out = child->err = terminal_make(&request->terminal, child->status);
        if (child->in < 0) fail(child, "terminal");
    }
    if (arrange_files(child) < 0) fail(child, "descriptors");
    if (user_lookup(request->user != NULL ? request->user : "root", &user) < 0) fail(child, "user");
    if (has_terminal && terminal_take(0, user.uid, config->set_ids) < 0) fail(child, "terminal");
    const char *step = become(child->setup, &user);
    if (step != NULL) fail(child, step);
    if (request->flags & EXEC_LOGIN_ENV) add_login_env(request, &user);
    if (chdir(request->cwd != NULL ? request->cwd : "/") < 0) fail(child, "chdir");
    umask(022);
    if (confine(config) < 0) fail(child, "seccomp");
    sigset_t none;
    sigemptyset(&none);
    if (sigprocmask(SIG_SETMASK, &none, NULL) < 0) fail(child, "signals");
    if (request->builtin != NULL) {
        if (!builtin_known(request->builtin)) {
            errno = ENOSYS;
            fail(child, "builtin");
        }
        close(child->status);
        _exit(builtin_main(request->builtin, request->argc, request->argv));
    }
    execute_found(request);
    fail(child, "exec");
}

/* ---- what all children inherit --------------------------------------------------------------------------------------- */

/* The guest never executes anything, so what takes effect at an execve, or only binds downwards, is done once in the guest
 * itself: bounding set, ambient set, no_new_privs, limits. */
int exec_prepare(struct exec_setup *setup, const struct guest_config *config) {
    const struct rlimit core = {1, 1}; /* 1, not 0: see NO_CORE */
    struct rlimit files;
    *setup = (struct exec_setup){.config = config, .null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC)};
    if (setup->null_fd < 0 || getrlimit(RLIMIT_NOFILE, &files) < 0) return -1;
    files.rlim_cur = files.rlim_max < FILES_SOFT ? files.rlim_max : FILES_SOFT;
    if (setrlimit(RLIMIT_NOFILE, &files) < 0) return -1;
    if (config->mark_resource != RLIMIT_CORE && hardened("core-limit") && setrlimit(RLIMIT_CORE, &core) < 0) return -1;
    if (hardened("no-new-privs") && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0) return -1;
    /* EINVAL: no such set, as under gVisor. */
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0 && errno != EINVAL) return -1;
    for (int cap = 0; cap < 64 && prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++) {
        if ((config->capability_mask >> cap & 1) != 0) setup->capabilities |= 1ULL << cap;
        else if (config->set_ids && hardened("bounding-set") && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) return -1;
    }
    return 0;
}

/* ---- the guest's side -------------------------------------------------------------------------------------------- */

static pid_t fork_into(const struct exec_group *group) {
    struct clone_args args = {.exit_signal = SIGCHLD};
    if (group->dir_fd >= 0) {
        args.flags = CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)group->dir_fd;
    }
    return (pid_t)syscall(SYS_clone3, &args, sizeof args);
}

static void close_pair(int pair[2]) {
    for (int i = 0; i < 2; i++) {
        if (pair[i] >= 0) close(pair[i]);
        pair[i] = -1;
    }
}

/* The guest's end of a pipe does not block, the child's does. */
static int make_pipe(int pair[2], int guest_end) {
    if (pipe2(pair, O_CLOEXEC) < 0) return -1;
    return fcntl(pair[guest_end], F_SETFL, O_NONBLOCK);
}

static int make_status(int pair[2], bool with_terminal) {
    if (!with_terminal) return make_pipe(pair, 0);
    return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair);
}

pid_t exec_spawn(const struct exec_setup *setup, const struct exec_request *request, const struct exec_group *group,
                 struct exec_pipes *pipes, const char **step) {
    enum { STATUS = SUB_COUNT, PIPES };
    int pairs[PIPES][2];
    const bool terminal = request->terminal.rows != 0;
    const int wanted[SUB_COUNT] = {(request->flags & EXEC_STDIN) != 0 && !terminal, !terminal,
                                   (request->flags & EXEC_MERGE) == 0 && !terminal, request->report_fd >= 0};
    int failed = 0, error = 0;
    pid_t pid = -1;
    for (int i = 0; i < PIPES; i++) pairs[i][0] = pairs[i][1] = -1;
    *step = "pipe";
    for (int i = 0; i < SUB_COUNT && !failed; i++) failed = wanted[i] && make_pipe(pairs[i], i == SUB_STDIN ? 1 : 0) < 0;
    if (!failed) failed = make_status(pairs[STATUS], terminal) < 0;
    if (!failed) {
        *step = "clone";
        pid = fork_into(group);
    }
    if (pid == 0) {
        struct child child = {
            .setup = setup,
            .request = request,
            .in = wanted[SUB_STDIN] ? pairs[SUB_STDIN][0] : setup->null_fd,
            .out = pairs[SUB_STDOUT][1],
            .err = wanted[SUB_STDERR] ? pairs[SUB_STDERR][1] : pairs[SUB_STDOUT][1],
            .report = pairs[SUB_REPORT][1],
            .status = pairs[STATUS][1],
        };
        run_child(&child);
    }
    error = errno;
    if (pid > 0) {
        for (int i = 0; i < SUB_COUNT; i++) {
            pipes->streams[i] = pairs[i][i == SUB_STDIN ? 1 : 0];
            pairs[i][i == SUB_STDIN ? 1 : 0] = -1;
        }
        pipes->status = pairs[STATUS][0];
        pairs[STATUS][0] = -1;
    }
    for (int i = 0; i < PIPES; i++) close_pair(pairs[i]);
    errno = error;
    return pid;
}
