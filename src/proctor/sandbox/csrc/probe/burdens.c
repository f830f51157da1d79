/* Loads and oddities, each beyond a limit: the host looks at what became of the sandbox. */
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "probe.h"

static char block[1 << 16];

/* Children that stay, until the kernel refuses; how many there were is printed. */
static int forks(long most) {
    long made = 0;
    while (made < most) {
        pid_t pid = fork();
        if (pid < 0) break;
        if (pid == 0) {
            pause();
            _exit(0);
        }
        made++;
    }
    return printf("%ld %s\n", made, made < most ? outcome(-1) : "ok") < 0 || made < most;
}

static int memory(long megabytes) {
    for (long i = 0; i < megabytes; i++) {
        char *place = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (place == MAP_FAILED) return printf("%ld %s\n", i, outcome(-1)) < 0;
        memset(place, 1, 1 << 20);
    }
    return printf("%ld ok\n", megabytes) < 0;
}

/* Writes one file of `megabytes`, or as much of it as fits. */
static int fill(const char *path, long megabytes) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    long written = 0;
    memset(block, 'x', sizeof block);
    while (fd >= 0 && written < megabytes << 20) {
        ssize_t put = write(fd, block, sizeof block);
        if (put < 0) break;
        written += put;
    }
    int full = fd < 0 || written < megabytes << 20;
    return printf("%ld %s\n", written >> 20, full ? outcome(-1) : "ok") < 0 || full;
}

static int files(const char *folder, long most) {
    char path[512];
    long made = 0;
    if (mkdir(folder, 0755) < 0 && errno != EEXIST) return printf("0 %s\n", outcome(-1)) < 0;
    for (; made < most; made++) {
        snprintf(path, sizeof path, "%s/%ld", folder, made);
        int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0) break;
        close(fd);
    }
    return printf("%ld %s\n", made, made < most ? outcome(-1) : "ok") < 0 || made < most;
}

static int deep(long levels) {
    long made = 0;
    while (made < levels && mkdir("d", 0755) == 0 && chdir("d") == 0) made++;
    return printf("%ld %s\n", made, made < levels ? outcome(-1) : "ok") < 0 || made < levels;
}

static int spin(long milliseconds) {
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < milliseconds);
    return 0;
}

static int flood(long megabytes) {
    memset(block, 'y', sizeof block);
    for (long i = 0; i < megabytes << 4; i++) {
        if (write(1, block, sizeof block) < 0) return 1;
    }
    return 0;
}

static int odd_bytes(void) {
    static const char odd[] = "\0\xff\xfe\xc3(\xed\xa0\x80\x1b[2J\r\n";
    memset(block, 'l', sizeof block);
    for (int i = 0; i < 16; i++) {
        if (write(1, block, sizeof block) < 0) return 1;
    }
    return write(1, odd, sizeof odd - 1) < 0;
}

/* Ends nothing by itself: deaf to every signal that can be ignored, with children in sessions of their own. */
static int stubborn(void) {
    for (int i = 1; i < 65; i++) signal(i, SIG_IGN);
    for (int i = 0; i < 4; i++) {
        if (fork() == 0) {
            setsid();
            if (fork() > 0) _exit(0);
        }
    }
    for (;;) pause();
}

/* How many of each thing that the machine counts for everybody one sandbox may hold. */
static int hoard(void) {
    long files_open = 0, watches = 0, queues = 0, sets = 0, pipes = 0;
    char name[32];
    int notify = inotify_init1(IN_CLOEXEC), poller = epoll_create1(EPOLL_CLOEXEC);
    struct mq_attr attributes = {.mq_maxmsg = 10, .mq_msgsize = 8192};
    while (watches < 1 && notify >= 0 && inotify_add_watch(notify, "/", IN_CREATE) >= 0) watches++;
    for (; queues < 1000; queues++) {
        snprintf(name, sizeof name, "/q%ld", queues);
        if (mq_open(name, O_CREAT | O_RDWR, 0600, &attributes) == (mqd_t)-1) break;
    }
    say("queues", "%ld %s", queues, queues < 1000 ? outcome(-1) : "ok");
    time_t start = time(NULL); /* gVisor takes longer for each: there is no point in waiting for the last */
    int got = 0;
    while (sets < 100000 && time(NULL) - start < 3 && (got = semget(IPC_PRIVATE, 1, 0600)) >= 0) sets++;
    say("semaphores", "%ld %s", sets, sets == 100000 ? "ok" : got < 0 ? outcome(-1) : "in 3 s");
    int pair[2];
    while (pipes < 4000 && pipe2(pair, O_CLOEXEC) == 0) {
        if (fcntl(pair[0], F_SETPIPE_SZ, 1 << 20) < 0) break;
        pipes++;
    }
    say("pipes", "%ld %s", pipes, pipes < 4000 ? outcome(-1) : "ok");
    while (files_open < 2000000 && dup(2) >= 0) files_open++;
    say("files", "%ld %s", files_open, files_open < 2000000 ? outcome(-1) : "ok");
    (void)poller;
    return fflush(stdout) != 0;
}

/* What a host that copies files out has to deal with, below `folder`. */
static int hostile_tree(const char *folder) {
    static const char *const names[] = {"new\nline", "\xff\xfe", "-rf", " ", "tab\there", "\x1b[31m"};
    char path[512];
    if (mkdir(folder, 0755) < 0 || chdir(folder) < 0) return 1;
    int bad = symlink("/etc/shadow", "link-out") < 0 || symlink("../../../../etc/passwd", "link-up") < 0 || symlink("loop", "loop") < 0;
    int fd = open("plain", O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    bad |= fd < 0 || write(fd, "plain", 5) != 5 || link("plain", "hard") < 0;
    bad |= chmod("plain", 06755) < 0 || mkfifo("fifo", 0600) < 0;
    int sparse = open("sparse", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    bad |= sparse < 0 || ftruncate(sparse, 1LL << 40) < 0;
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "socket"};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    bad |= listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) < 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) bad |= mkdir(names[i], 0755) < 0;
    memset(path, 'n', 255);
    path[255] = '\0';
    bad |= mkdir(path, 0755) < 0;
    return bad;
}

/* A copy of this program with the bits that would make it root, run as somebody else: prints the ids that it got. */
static int gain(const char *self) {
    const char *copy = "/.proctor-gain";
    int from = open(self, O_RDONLY | O_CLOEXEC), to = open(copy, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0755), status = 0;
    ssize_t got = 0;
    while (from >= 0 && to >= 0 && (got = read(from, block, sizeof block)) > 0) {
        if (write(to, block, (size_t)got) != got) got = -1;
        if (got < 0) break;
    }
    if (from < 0 || to < 0 || got < 0 || fchmod(to, 06755) < 0) return printf("%s\n", outcome(-1)) < 0;
    close(to);
    pid_t pid = fork();
    if (pid == 0) {
        if (setgid(65534) < 0 || setuid(65534) < 0) _exit(1);
        execl(copy, copy, "ids", (char *)NULL);
        _exit(1);
    }
    int lost = pid < 0 || waitpid(pid, &status, 0) != pid;
    unlink(copy);
    return lost || status != 0;
}

/* Calls a directory opaque by the name that overlays of unprivileged users believe. */
static int forge(const char *folder) {
    return printf("%s\n", outcome(setxattr(folder, "user.overlay.opaque", "y", 1, 0))) < 0;
}

int burden(int argc, char **argv) {
    const char *name = argv[0];
    long number = argc >= 2 ? atol(argv[argc - 1]) : 0;
    if (strcmp(name, "forks") == 0 && argc == 2) return forks(number);
    if (strcmp(name, "memory") == 0 && argc == 2) return memory(number);
    if (strcmp(name, "fill") == 0 && argc == 3) return fill(argv[1], number);
    if (strcmp(name, "files") == 0 && argc == 3) return files(argv[1], number);
    if (strcmp(name, "deep") == 0 && argc == 2) return deep(number);
    if (strcmp(name, "spin") == 0 && argc == 2) return spin(number);
    if (strcmp(name, "flood") == 0 && argc == 2) return flood(number);
    if (strcmp(name, "odd-bytes") == 0 && argc == 1) return odd_bytes();
    if (strcmp(name, "stubborn") == 0 && argc == 1) return stubborn();
    if (strcmp(name, "hoard") == 0 && argc == 1) return hoard();
    if (strcmp(name, "hostile-tree") == 0 && argc == 2) return hostile_tree(argv[1]);
    if (strcmp(name, "forge") == 0 && argc == 2) return forge(argv[1]);
    if (strcmp(name, "gain") == 0 && argc == 2) return gain(argv[1]);
    return 64;
}
