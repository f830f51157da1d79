/* The root of one sandbox, built by the launcher as detached mounts: upper, layers, overlay, binds. It works in the initial user
 * namespace and never attaches what it builds (where the kernel allows that): a mount that nobody attached has no name
 * anywhere and disappears with its last descriptor, so a crash leaves nothing behind. */
#include "root.h"

#include <errno.h>
#include <linux/loop.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hardened.h"
#include "sys.h"

#define HELD_MAX 16384
#define ROOT_ATTRIBUTES ((hardened("root-nosuid") ? MOUNT_ATTR_NOSUID : 0) | (hardened("root-nodev") ? MOUNT_ATTR_NODEV : 0))

static int map_mount(int mount, int userns, uint64_t attributes) {
    struct mount_attr attr = {.attr_set = attributes | MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)userns};
    return sys_mount_setattr(mount, "", AT_EMPTY_PATH, &attr);
}

/* A free loop device bound to `path`, which frees itself when its last user goes. */
static int open_loop(const char *path, struct failure *failure) {
    int image = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (image < 0) return fail(failure, "upper-image", errno);
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    int loop = -1, error = control < 0 ? errno : EBUSY;
    for (int attempt = 0; control >= 0 && loop < 0 && attempt < 64; attempt++) {
        int number = ioctl(control, LOOP_CTL_GET_FREE);
        if (number < 0) {
            error = errno;
            break;
        }
        char name[32];
        snprintf(name, sizeof name, "/dev/loop%d", number);
        loop = open(name, O_RDWR | O_CLOEXEC);
        if (loop < 0) {
            error = errno;
            break;
        }
        struct loop_config config = {.fd = (uint32_t)image, .info = {.lo_flags = LO_FLAGS_AUTOCLEAR}};
        if (ioctl(loop, LOOP_CONFIGURE, &config) == 0) break;
        error = errno;
        close(loop);
        loop = -1;
        if (error != EBUSY) break; /* EBUSY: somebody else took this number between the two calls */
    }
    if (control >= 0) close(control);
    close(image);
    return loop < 0 ? fail(failure, "upper-loop", error) : loop;
}

static int mount_upper(const struct plan *plan, struct failure *failure) {
    int mount;
    if (plan->upper == UPPER_MEMORY) {
        char bytes[24], inodes[24];
        snprintf(bytes, sizeof bytes, "%llu", hardened("disk-size") ? (unsigned long long)plan->upper_bytes : 1ULL << 40);
        snprintf(inodes, sizeof inodes, "%llu", hardened("disk-inodes") ? (unsigned long long)plan->upper_inodes : 1ULL << 40);
        const char *const options[] = {"size", bytes, "nr_inodes", inodes, "mode", "0700", NULL, NULL};
        mount = mount_new("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    } else {
        int loop = open_loop(plan->upper_path, failure);
        if (loop < 0) return -1;
        char source[48];
        snprintf(source, sizeof source, "/proc/self/fd/%d", loop);
        const char *const options[] = {"source", source, NULL, NULL};
        mount = mount_new("ext4", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOATIME);
        int error = errno;
        close(loop);
        errno = error;
    }
    if (mount < 0) return fail(failure, "upper-mount", errno);
    if ((mkdirat(mount, "upper", 0755) < 0 && errno != EEXIST) || (mkdirat(mount, "work", 0700) < 0 && errno != EEXIST)) {
        int error = errno;
        close(mount);
        return fail(failure, "upper-directories", error);
    }
    return mount;
}

/* Uppers that stay attached below the scratch tmpfs, for kernels before 6.15: those clone attached mounts only, and an upper
 * must be cloned now (to be mapped) and perhaps again later (as a layer of another sandbox). */
static unsigned held[HELD_MAX];
static unsigned held_count;

static void held_path(char *path, size_t size, unsigned number) { snprintf(path, size, SCRATCH "/held%u", number); }

unsigned root_release_held(void) {
    unsigned kept = 0;
    for (unsigned i = 0; i < held_count; i++) {
        char path[32];
        held_path(path, sizeof path, held[i]);
        /* Not lazily: the kernel says EBUSY as long as the Edge has the upper open, which is as long as it is of any use. */
        if (umount2(path, 0) < 0 && errno == EBUSY) {
            held[kept++] = held[i];
        } else {
            (void)rmdir(path);
        }
    }
    return held_count = kept;
}

static int hold(int mount) {
    static unsigned next;
    char path[32];
    if (held_count == HELD_MAX) return errno = ENOSPC, -1;
    held_path(path, sizeof path, ++next);
    if (mkdir(path, 0700) < 0 || sys_move_mount(mount, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH) < 0) return -1;
    held[held_count++] = next;
    return 0;
}

/* A second mount of the upper file system, to be mapped. */
static int clone_upper(int mount, int must_hold) {
    if (!must_hold) {
        int view = sys_open_tree(mount, "", OPEN_TREE_CLONE | AT_EMPTY_PATH);
        if (view >= 0 || errno != EINVAL) return view;
    }
    return hold(mount) < 0 ? -1 : sys_open_tree(mount, "", OPEN_TREE_CLONE | AT_EMPTY_PATH);
}

/* A read-only view of one layer with the sandbox's ids. */
static int map_layer(const struct plan_layer *layer, const int *fds, unsigned fd_count, int userns, struct failure *failure) {
    int view;
    if (layer->path != NULL) {
        view = sys_open_tree(AT_FDCWD, layer->path, OPEN_TREE_CLONE | AT_SYMLINK_NOFOLLOW);
    } else {
        if (layer->fd_index >= fd_count) return fail(failure, "layer-descriptor", EBADF);
        view = sys_open_tree(fds[layer->fd_index], "", OPEN_TREE_CLONE | AT_EMPTY_PATH);
    }
    if (view < 0) return fail(failure, "layer-open", errno);
    if (map_mount(view, userns, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV) < 0) {
        int error = errno;
        close(view);
        return fail(failure, "layer-idmap", error);
    }
    return view;
}

struct overlay {
    int layers[LAYERS_MAX]; /* lowest first */
    unsigned count;
    int upper; /* mapped view of the directory that holds upper/ and work/ */
    int is_volatile;
};

static int overlay_options(int context, int is_volatile) {
    static const char *const fixed[][2] = {
        {"xino", "off"}, {"index", "off"}, {"metacopy", "off"}, {"redirect_dir", "nofollow"}};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        if (sys_fsconfig(context, FSCONFIG_SET_STRING, fixed[i][0], fixed[i][1], 0) < 0) return -1;
    }
    /* Nothing in a sandbox has to survive a power cut, so its fsync need not reach the device. */
    if (sys_fsconfig(context, FSCONFIG_SET_STRING, "source", "overlay", 0) < 0) return -1;
    if (is_volatile && sys_fsconfig(context, FSCONFIG_SET_FLAG, "volatile", NULL, 0) < 0) return -1;
    return 0;
}

static int overlay_by_fd(const struct overlay *overlay) {
    int context = sys_fsopen("overlay");
    if (context < 0) return -1;
    int bad = overlay_options(context, overlay->is_volatile) < 0;
    for (unsigned i = overlay->count; i > 0 && !bad; i--)
        bad = sys_fsconfig(context, FSCONFIG_SET_FD, "lowerdir+", NULL, overlay->layers[i - 1]) < 0;
    int upper = openat(overlay->upper, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int work = openat(overlay->upper, "work", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bad = bad || upper < 0 || work < 0 || sys_fsconfig(context, FSCONFIG_SET_FD, "upperdir", NULL, upper) < 0 ||
          sys_fsconfig(context, FSCONFIG_SET_FD, "workdir", NULL, work) < 0 ||
          sys_fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0;
    int mount = bad ? -1 : sys_fsmount(context, ROOT_ATTRIBUTES);
    int error = errno;
    if (upper >= 0) close(upper);
    if (work >= 0) close(work);
    close(context);
    errno = error;
    return mount;
}

/* The same where the kernel takes layers by path only: attach them below the private scratch tmpfs, give their names
 * relative to it (so that the options shown inside tell nothing), detach them again. */
static int overlay_by_path(const struct template *template, const struct overlay *overlay) {
    char lower[LAYERS_MAX * 5 + 1];
    size_t used = 0;
    int mount = -1, error = 0;
    unsigned attached = 0;
    int context = sys_fsopen("overlay");
    if (context < 0 || fchdir(template->scratch) < 0) error = errno;
    for (unsigned i = 0; i <= overlay->count && error == 0; i++) {
        char name[12];
        snprintf(name, sizeof name, "%u", i);
        int source = i < overlay->count ? overlay->layers[i] : overlay->upper;
        if ((mkdirat(template->scratch, name, 0700) < 0 && errno != EEXIST) ||
            sys_move_mount(source, "", template->scratch, name, MOVE_MOUNT_F_EMPTY_PATH) < 0)
            error = errno;
        else
            attached++;
    }
    for (unsigned i = overlay->count; i > 0; i--)
        used += (size_t)snprintf(lower + used, sizeof lower - used, used ? ":%u" : "%u", i - 1);
    char upper[16], work[16];
    snprintf(upper, sizeof upper, "%u/upper", overlay->count);
    snprintf(work, sizeof work, "%u/work", overlay->count);
    if (error == 0 && (overlay_options(context, overlay->is_volatile) < 0 ||
                       sys_fsconfig(context, FSCONFIG_SET_STRING, "lowerdir", lower, 0) < 0 ||
                       sys_fsconfig(context, FSCONFIG_SET_STRING, "upperdir", upper, 0) < 0 ||
                       sys_fsconfig(context, FSCONFIG_SET_STRING, "workdir", work, 0) < 0 ||
                       sys_fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0))
        error = errno;
    if (error == 0 && (mount = sys_fsmount(context, ROOT_ATTRIBUTES)) < 0) error = errno;
    for (unsigned i = 0; i < attached; i++) {
        char name[12];
        snprintf(name, sizeof name, "%u", i);
        if (umount2(name, MNT_DETACH) < 0 && error == 0) error = errno;
    }
    if (context >= 0) close(context);
    if (chdir("/") < 0 && error == 0) error = errno;
    if (error != 0 && mount >= 0) {
        close(mount);
        mount = -1;
    }
    errno = error;
    return mount;
}

/* Makes one more component of a path exist: `path` is absolute and resolved inside the new root, its parent exists. */
static int make_component(int root, char *path, int is_directory) {
    int found = sys_openat2(root, path, O_PATH, INSIDE);
    if (found >= 0) return close(found);
    if (errno != ENOENT) return -1;
    char *slash = strrchr(path, '/');
    *slash = '\0';
    int parent = sys_openat2(root, slash == path ? "/" : path, O_PATH | O_DIRECTORY, INSIDE);
    *slash = '/';
    if (parent < 0) return -1;
    int made = is_directory ? mkdirat(parent, slash + 1, 0755) : mknodat(parent, slash + 1, S_IFREG | 0644, 0);
    int error = errno;
    close(parent);
    errno = error;
    return made;
}

/* Makes `path` exist as a directory or a file to mount on. */
static int make_target(int root, const char *path, int is_directory) {
    int found = sys_openat2(root, path, O_PATH, INSIDE);
    if (found >= 0) return close(found);
    char part[4096];
    size_t length = strlen(path);
    if (length >= sizeof part) return errno = ENAMETOOLONG, -1;
    memcpy(part, path, length + 1);
    while (length > 1 && part[length - 1] == '/') part[--length] = '\0';
    for (char *slash = strchr(part + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        int bad = slash[-1] != '/' && make_component(root, part, 1) < 0;
        *slash = '/';
        if (bad) return -1;
    }
    return make_component(root, part, is_directory);
}

static int make_targets(const struct plan *plan, const struct root_mounts *mounts, struct failure *failure) {
    static const char *const fixed[] = {"/proc", "/dev", "/sys"};
    int error = 0;
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed && error == 0; i++) {
        if (make_target(mounts->root, fixed[i], 1) < 0) error = errno;
    }
    for (unsigned i = 0; i < plan->bind_count && error == 0; i++) {
        struct stat info;
        if (plan->binds[i].is_tool) continue;
        if (fstat(mounts->binds[i], &info) < 0 || make_target(mounts->root, plan->binds[i].target, S_ISDIR(info.st_mode)) < 0)
            error = errno;
    }
    return error == 0 ? 0 : fail(failure, "mount-points", error);
}

/* A read-only view of a host directory or file. File systems that cannot be id-mapped are shown with ids unmapped. */
static int bind_view(const struct template *template, const struct plan_bind *bind, int userns, struct words *facts,
                     struct failure *failure) {
    const uint64_t attributes = (hardened("bind-readonly") ? MOUNT_ATTR_RDONLY : 0) | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
    int view = bind->source != NULL ? sys_open_tree(AT_FDCWD, bind->source, OPEN_TREE_CLONE)
                                    : sys_open_tree(template->scratch, EMPTY, OPEN_TREE_CLONE);
    if (view < 0) return fail(failure, "bind-open", errno);
    if (map_mount(view, userns, attributes) == 0) return view;
    if ((errno == EINVAL || errno == EPERM) && mount_restrict(view, attributes) == 0) {
        words_add(facts, "unmapped", bind->target);
        return view;
    }
    int error = errno;
    close(view);
    return fail(failure, "bind-idmap", error);
}

void root_close(struct root_mounts *mounts) {
    if (mounts->root >= 0) close(mounts->root);
    if (mounts->upper >= 0) close(mounts->upper);
    for (unsigned i = 0; i < mounts->bind_count; i++) close(mounts->binds[i]);
    *mounts = (struct root_mounts){.root = -1, .upper = -1};
}

static int build_overlay(const struct template *template, const struct plan *plan, const struct overlay *overlay,
                         struct words *facts, struct failure *failure) {
    int mount = -1;
    if (!(plan->flags & PLAN_FORCE_PATHS)) {
        mount = overlay_by_fd(overlay);
        if (mount < 0 && errno != EINVAL) return fail(failure, "overlay", errno);
        if (mount >= 0) words_add(facts, "overlay", "descriptors");
    }
    if (mount < 0) {
        mount = overlay_by_path(template, overlay);
        if (mount < 0) return fail(failure, "overlay-by-path", errno);
        words_add(facts, "overlay", "paths");
    }
    return mount;
}

int root_build(const struct template *template, const struct plan *plan, const int *fds, unsigned fd_count, int userns,
               uint32_t uid_base, struct root_mounts *out, struct words *words, struct words *facts, struct failure *failure) {
    *out = (struct root_mounts){.root = -1, .upper = -1};
    struct overlay overlay = {.upper = -1, .is_volatile = plan->upper == UPPER_LOOP};
    int result = -1;
    out->upper = mount_upper(plan, failure);
    if (out->upper < 0) return -1;
    words_step(words, "upper");
    overlay.upper = clone_upper(out->upper, plan->flags & PLAN_FORCE_PATHS);
    if (overlay.upper < 0 || map_mount(overlay.upper, userns, 0) < 0) {
        fail(failure, "upper-idmap", errno);
        goto done;
    }
    for (; overlay.count < plan->layer_count; overlay.count++) {
        int view = map_layer(&plan->layers[overlay.count], fds, fd_count, userns, failure);
        if (view < 0) goto done;
        overlay.layers[overlay.count] = view;
    }
    words_step(words, "layers");
    /* From here on with the file system ids of the sandbox's root: the overlay keeps the ids of its maker and writes to the
     * upper layer with them, and only mapped ids can own anything there. Mount points made below belong to root inside. */
    setfsgid(uid_base);
    setfsuid(uid_base);
    out->root = build_overlay(template, plan, &overlay, facts, failure);
    if (out->root < 0) goto done;
    words_step(words, "overlay");
    for (; out->bind_count < plan->bind_count; out->bind_count++) {
        int view = bind_view(template, &plan->binds[out->bind_count], userns, facts, failure);
        if (view < 0) goto done;
        out->binds[out->bind_count] = view;
    }
    if (make_targets(plan, out, failure) < 0) goto done;
    words_step(words, "binds");
    result = 0;
done:
    setfsuid(0);
    setfsgid(0);
    for (unsigned i = 0; i < overlay.count; i++) close(overlay.layers[i]);
    if (overlay.upper >= 0) close(overlay.upper);
    if (result < 0) root_close(out);
    return result;
}
