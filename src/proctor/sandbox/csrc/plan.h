/* What the Edge and the launcher say to each other, and the plan of one sandbox.
 *
 * One message is one SOCK_SEQPACKET packet: a header, then fields of `u16 tag, u32 length, bytes` (little-endian, no
 * padding). Unknown tags, short fields and trailing bytes are refused. native/plan.py is the other end of this file.
 */
#ifndef PROCTOR_PLAN_H
#define PROCTOR_PLAN_H

#include <linux/filter.h>
#include <stddef.h>
#include <stdint.h>

#define PLAN_MAGIC 0x43525031u /* "1PRC" in memory */
#define PLAN_VERSION 1
#define MESSAGE_MAX (128 * 1024)
#define MESSAGE_FDS_MAX 128
#define LAYERS_MAX 120
#define BINDS_MAX 64
#define SECCOMP_MAX 4096
#define NAME_MAX_BYTES 64
#define CGROUPS_MAX 8
#define PROGRAM_WORDS_MAX 64

enum message_type { MESSAGE_CONFIG = 1, MESSAGE_READY = 2, MESSAGE_LAUNCH = 3, MESSAGE_LAUNCHED = 4, MESSAGE_HELD = 5, MESSAGE_ADOPT = 6 };

struct message_header {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint64_t request;
} __attribute__((packed));

/* Where and why something failed. `step` is a constant string of ours, so the Edge can print it as it is. */
struct failure {
    const char *step;
    int error;
};

static inline int fail(struct failure *failure, const char *step, int error) {
    failure->step = step;
    failure->error = error;
    return -1;
}

enum upper_kind { UPPER_NONE = 0, UPPER_MEMORY = 1, UPPER_LOOP = 2 };
enum network_kind { NETWORK_NONE = 0, NETWORK_OPEN = 1 };
enum plan_flags { PLAN_FORCE_PATHS = 1, PLAN_DURABLE = 2 };

struct plan_layer {
    const char *path; /* NULL: the descriptor */
    uint32_t fd_index;
};

struct plan_bind {
    const char *source; /* NULL: an empty directory of the launcher's */
    const char *target; /* absolute inside; of a tool: a slash and its name in the room (room.h) */
    int is_tool;
};

struct plan {
    const char *name;
    const char *hostname;
    struct plan_layer layers[LAYERS_MAX]; /* lowest first */
    unsigned layer_count;
    struct plan_bind binds[BINDS_MAX];
    unsigned bind_count;
    enum upper_kind upper;
    uint64_t upper_bytes;
    uint64_t upper_inodes;
    const char *upper_path;
    uint64_t memory_bytes;
    uint64_t cpu_quota_us;
    uint64_t cpu_period_us;
    uint64_t pids;
    uint64_t capabilities;
    uint64_t shm_bytes;
    uint32_t flags;
    uint64_t deadline_ms; /* on CLOCK_BOOTTIME: when a durable sandbox without an Edge ends; 0: never */
    enum network_kind network;
    const struct sock_filter *seccomp;
    uint16_t seccomp_count;
    /* A program that the slot executes instead of becoming the guest (room.h); NULL: none. */
    const char *program; /* its words, one after the other, each with its zero */
    unsigned program_words;
    const char *file_name; /* a file that it finds in its room */
    const unsigned char *file;
    size_t file_size;
    uint32_t log_fd_index; /* where its errors go */
};

/* One cgroup directory of this Edge, in which every slot gets a directory of its own (or, if `shared`, none). */
struct config_cgroup {
    const char *controllers; /* "memory", "cpu", …; "unified" for the cgroup2 tree; "*" for one tree with controllers */
    const char *path;
};

struct config {
    const char *edge;
    struct config_cgroup cgroups[CGROUPS_MAX];
    unsigned cgroup_count;
    uint32_t pool;
    uint32_t uid_start;  /* ranges of 65,536 ids, one for each sandbox */
    uint32_t uid_ranges;
    uint32_t guest_uid;  /* as many ids for guests, one for each range */
    int is_durable;      /* it outlives its Edge; two descriptors come along: a listening socket, and a lock to be kept */
};

/* Both keep pointers into `data`, which must outlive the result. */
int plan_parse(const unsigned char *data, size_t size, struct plan *plan, struct failure *failure);
int config_parse(const unsigned char *data, size_t size, struct config *config, struct failure *failure);

/* A text of `name=value` words that grows until it is full; what does not fit is left out whole. */
struct words {
    char text[768];
    size_t used;
    uint64_t mark_ns;
};
void words_start(struct words *words);
void words_step(struct words *words, const char *name); /* adds `name=<µs since the last step>` */
void words_add(struct words *words, const char *name, const char *value);

#endif
