/* Files and mounts: what of the machine can be read, what can be written, what there is in /dev, ways out of the root. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "probe.h"

static const char *const readable[] = {
    "/proc/kcore", "/proc/kmem", "/proc/kallsyms", "/proc/keys", "/proc/key-users", "/proc/latency_stats", "/proc/timer_list",
    "/proc/sched_debug", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/kmsg", "/proc/vmallocinfo",
    "/proc/slabinfo", "/proc/pagetypeinfo", "/proc/iomem", "/proc/ioports", "/proc/modules", "/proc/mtrr", "/proc/interrupts",
    "/proc/config.gz", "/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/sda", "/dev/vda", "/dev/loop0", "/dev/net/tun",
};

static const char *const listable[] = {
    "/proc/scsi", "/proc/acpi", "/proc/asound", "/sys/kernel", "/sys/firmware", "/sys/kernel/debug", "/sys/kernel/tracing",
    "/sys/kernel/security", "/sys/fs/bpf", "/sys/fs/cgroup", "/sys/devices", "/sys/block",
};

static const char *const writable[] = {
    "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug",
    "/proc/sys/fs/binfmt_misc/register", "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/hostname", "/proc/sys/kernel/msgmni",
    "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/ping_group_range", "/proc/sys/user/max_user_namespaces", "/proc/irq/default_smp_affinity",
    "/proc/bus/pci/devices", "/proc/fs/nfs/exports", "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/fs/cgroup/release_agent",
    "/sys/fs/cgroup/cgroup.procs", "/proc/1/oom_score_adj", "/proc/1/uid_map", "/proc/self/attr/current",
};

/* Sockets of the machine that would be a way to rule it. */
static const char *const sockets[] = {
    "/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock", "/run/crio/crio.sock",
    "/run/dbus/system_bus_socket", "/run/systemd/private", "/run/user/0/bus", "/run/buildkit/buildkitd.sock", "/run/snapd.socket",
};

static void tell_readable(const char *path) {
    char key[96], byte;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    snprintf(key, sizeof key, "read.%s", path);
    if (fd < 0) {
        say(key, "%s", outcome(-1));
        return;
    }
    ssize_t got = read(fd, &byte, 1);
    say(key, "%s", got < 0 ? outcome(-1) : got == 0 ? "empty" : "data");
    close(fd);
}

static void tell_listable(const char *path) {
    char key[96];
    unsigned count = 0;
    DIR *directory = opendir(path);
    snprintf(key, sizeof key, "read.%s", path);
    if (directory == NULL) {
        say(key, "%s", outcome(-1));
        return;
    }
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) count += entry->d_name[0] != '.';
    say(key, "%s", count == 0 ? "empty" : "data");
    closedir(directory);
}

static void tell_dev(const char *path, int depth) {
    DIR *directory = opendir(path);
    if (directory == NULL) {
        say("dev", "%s %s", path, outcome(-1));
        return;
    }
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        char name[512];
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (lstat(name, &info) < 0) continue;
        char kind = S_ISCHR(info.st_mode) ? 'c' : S_ISBLK(info.st_mode) ? 'b' : S_ISDIR(info.st_mode) ? 'd' : S_ISLNK(info.st_mode) ? 'l' : 'f';
        say("dev", "%c %s", kind, name);
        if (kind == 'd' && depth > 0) tell_dev(name, depth - 1);
    }
    closedir(directory);
}

/* Attributes by which an overlay's layers speak: who could write those of the machine could make one say what it likes. */
static void tell_attributes(void) {
    static const char *const names[] = {"trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.overlay.metacopy", "security.capability"};
    char path[64], key[64];
    snprintf(path, sizeof path, "/.proctor-attributes-%d", (int)getpid());
    int made = mkdir(path, 0755);
    if (made < 0) { /* not ours to write in: another file system does as well */
        snprintf(path, sizeof path, "/dev/shm/.proctor-attributes-%d", (int)getpid());
        made = mkdir(path, 0755);
    }
    if (made < 0) {
        say("attribute", "%s", outcome(-1));
        return;
    }
    for (size_t i = 0; i < 3; i++) {
        snprintf(key, sizeof key, "attribute.%s", names[i]);
        say(key, "%s", outcome(setxattr(path, names[i], "y", 1, 0)));
    }
    rmdir(path);
}

/* --- mounts and the root -------------------------------------------------------------------------------------------- */

static void tell_table(const char *path) {
    char line[4096];
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        say("mounts", "%s", outcome(-1));
        return;
    }
    while (fgets(line, sizeof line, file) != NULL) say("mount", "%s", line);
    fclose(file);
}

static int is_root(const struct stat *root) {
    struct stat info;
    return stat(".", &info) == 0 && info.st_dev == root->st_dev && info.st_ino == root->st_ino;
}

/* Upwards from a place, much further than it is deep: "root" when that ends at our root. */
static const char *climb(const struct stat *root) {
    for (int i = 0; i < 64; i++) {
        if (chdir("..") < 0) return outcome(-1);
    }
    return is_root(root) ? "root" : "elsewhere";
}

static struct stat root_info;
static char chroot_place[64];

/* The classic: a directory that stays open while the root moves below it. */
static long leave_chroot(const void *unused) {
    (void)unused;
    int fd = open("/", O_RDONLY | O_DIRECTORY);
    if (fd < 0 || mkdir(chroot_place, 0755) < 0) return -1;
    if (chroot(chroot_place) < 0 || fchdir(fd) < 0) return -1;
    if (strcmp(climb(&root_info), "root") == 0) return chroot(".");
    DIR *outside = opendir(".");
    unsigned count = 0;
    for (struct dirent *entry; outside != NULL && (entry = readdir(outside)) != NULL;) count += entry->d_name[0] != '.';
    errno = count > 0 || outside == NULL ? ENOTEMPTY : ENODATA; /* outside, and something is there, or nothing */
    return -1;
}

static void tell_ways_out(void) {
    static const char *const places[] = {"/proc", "/dev", "/dev/pts", "/dev/shm", "/sys", "/usr", "/etc", "/proc/sys"};
    char key[64];
    if (stat("/", &root_info) < 0) return;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        if (chdir(places[i]) < 0) continue;
        snprintf(key, sizeof key, "climb.%s", places[i]);
        say(key, "%s", climb(&root_info));
    }
    snprintf(chroot_place, sizeof chroot_place, "/.proctor-chroot-%d", (int)getpid());
    say("climb.chroot", "%s", apart(leave_chroot, NULL));
    rmdir(chroot_place);
    if (chdir("/") < 0) say("climb", "%s", outcome(-1));
    struct stat self, one;
    /* The root of process 1, where it can be seen at all, is ours. */
    if (stat("/proc/1/root/.", &one) == 0 && stat("/proc/self/root/.", &self) == 0)
        say("climb.one", "%s", one.st_ino == self.st_ino && one.st_dev == self.st_dev ? "root" : "elsewhere");
}

void tell_mounts(void) {
    tell_table("/proc/self/mountinfo");
    tell_ways_out();
}

void tell_files(void) {
    char key[96];
    for (size_t i = 0; i < sizeof readable / sizeof *readable; i++) tell_readable(readable[i]);
    for (size_t i = 0; i < sizeof listable / sizeof *listable; i++) tell_listable(listable[i]);
    for (size_t i = 0; i < sizeof writable / sizeof *writable; i++) {
        int fd = open(writable[i], O_WRONLY | O_CLOEXEC | O_NONBLOCK);
        snprintf(key, sizeof key, "write.%s", writable[i]);
        say(key, "%s", outcome(fd));
        if (fd >= 0) close(fd);
    }
    for (size_t i = 0; i < sizeof sockets / sizeof *sockets; i++) {
        snprintf(key, sizeof key, "path.%s", sockets[i]);
        say(key, "%s", outcome(access(sockets[i], F_OK)));
    }
    tell_dev("/dev", 1);
    tell_attributes();
}
