/* The launcher: answers the Edge's requests with slots that the stocker keeps ready.
 *
 * One thread, one poll loop. A launch has two halves, and several launches may be between them: building the root as
 * detached mounts (here), and attaching it (in the slot, which then answers on its own socket).
 */
#include "launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/securebits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "attach.h"
#include "cgroups.h"
#include "hardened.h"
#include "held.h"
#include "mounts.h"
#include "plan.h"
#include "root.h"
#include "slots.h"
#include "sys.h"

#define POOL_MAX 256
#define FLIGHT_MAX 64
#define QUEUE_MAX 1024
#define FIXED_POLLS 5
#define SLOT_DEADLINE_MS 10000
#define RELEASE_PAUSE_MS 500
#define REFILL_PAUSE_MS 250 /* after the stocker could not make a slot */
#define QUIET_MS 4           /* without a launch, before the pool is filled up */

struct slot {
    struct slot_offer offer;
    int control, pidfd, userns;
};

/* A launch that its slot has not answered yet. */
struct flight {
    uint64_t request;
    struct slot slot;
    struct root_mounts mounts;
    int channel; /* the Edge's end */
    int attach;  /* durable: our end of the socket for the guest's next channels, otherwise -1 */
    uint64_t ends_ms;
    char name[NAME_MAX_BYTES];
    int64_t deadline_ms;
    struct words timings, facts;
};

/* A launch that waits for a slot. */
struct waiting {
    struct waiting *next;
    size_t size;
    int fds[MESSAGE_FDS_MAX];
    unsigned fd_count;
    uint32_t network;
    unsigned char data[];
};

struct launcher {
    int control, stocker;
    int parent; /* pidfd of the Edge's process; like `control` -1 while a durable launcher has no Edge */
    int listener, lock; /* where the next Edge knocks, and what says that we live; -1 when tied */
    int deaths;         /* readable when a sandbox that we hold has died; -1 when tied */
    int edge_is_lost;
    struct config config;
    struct cgroups cgroups;
    struct template template;
    struct slot pool[POOL_MAX];
    unsigned pool_count;
    uint32_t ordered[2]; /* slots asked of the stocker, by network kind */
    int64_t refill_ms;   /* no refill for the pool alone before this time */
    int64_t launched_ms; /* when the last launch began */
    int64_t release_ms;  /* when to look whether held mounts can go; 0: there are none */
    struct flight flights[FLIGHT_MAX];
    unsigned flight_count;
    struct waiting *first, **last;
    unsigned waiting_count;
};

static int64_t now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static uint64_t boot_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_BOOTTIME, &time);
    return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

static unsigned char inbox[MESSAGE_MAX];
static unsigned char config_bytes[MESSAGE_MAX];
static struct plan plan;

/* --- answers -------------------------------------------------------------------------------------------------------- */

struct launched {
    struct message_header header;
    int32_t error;
    uint32_t pid;
    uint32_t uid_base;
    char step[32];
    char slot[NAME_MAX_BYTES];
    char timings[768];
    char facts[768];
} __attribute__((packed));

/* 0, or -1 when a durable launcher has lost its Edge. */
static int answer(struct launcher *launcher, uint64_t request, const struct flight *flight, const struct failure *failure) {
    static struct launched message;
    memset(&message, 0, sizeof message);
    message.header = (struct message_header){PLAN_MAGIC, PLAN_VERSION, MESSAGE_LAUNCHED, request};
    int fds[3];
    unsigned fd_count = 0;
    if (failure != NULL) {
        message.error = failure->error != 0 ? failure->error : EIO;
        snprintf(message.step, sizeof message.step, "%s", failure->step);
    }
    if (flight != NULL) {
        snprintf(message.slot, sizeof message.slot, "%s", flight->slot.offer.name);
        memcpy(message.timings, flight->timings.text, sizeof message.timings);
        memcpy(message.facts, flight->facts.text, sizeof message.facts);
        message.pid = (uint32_t)flight->slot.offer.pid;
        message.uid_base = flight->slot.offer.uid_base;
    }
    if (failure == NULL && flight != NULL) {
        fds[fd_count++] = flight->slot.pidfd;
        fds[fd_count++] = flight->channel;
        fds[fd_count++] = flight->mounts.upper;
    }
    /* The Edge reads all the time; if it does not, it is gone or broken, and then nothing of ours may stay. */
    if (launcher->control >= 0 && packet_send(launcher->control, &message, sizeof message, fds, fd_count) >= 0) return 0;
    if (!launcher->config.is_durable) exit(1);
    launcher->edge_is_lost = 1;
    return -1;
}

static void drop_slot(const struct launcher *launcher, struct slot *slot) {
    sys_pidfd_send_signal(slot->pidfd, SIGKILL);
    struct pollfd dead = {.fd = slot->pidfd, .events = POLLIN};
    /* Its groups can be removed once it is dead; a slot that takes longer is left to the sweep. */
    if (poll(&dead, 1, 200) == 1) cgroups_remove_slot(&launcher->cgroups, slot->offer.name);
    close(slot->control);
    close(slot->pidfd);
    if (slot->userns >= 0) close(slot->userns);
}

/* --- the pool --------------------------------------------------------------------------------------------------------- */

static void order_slots(struct launcher *launcher, uint32_t network, uint32_t count) {
    const struct slot_request request = {.count = count, .network = network};
    if (count == 0) return;
    if (packet_send(launcher->stocker, &request, sizeof request, NULL, 0) < 0) exit(1);
    launcher->ordered[network] += count;
}

/* Making a slot costs as much as a launch, so it is put off until launches pause, and then done one by one, so that the next
 * launch meets at most one in the making. Only what is needed to keep the pool from running dry is ordered at once. */
static void refill(struct launcher *launcher) {
    uint32_t full = launcher->config.pool + launcher->waiting_count;
    uint32_t low = launcher->config.pool * 3 / 8 + launcher->waiting_count;
    uint32_t coming = launcher->pool_count + launcher->ordered[NETWORK_NONE];
    int64_t now = now_ms();
    if (launcher->waiting_count == 0 && now < launcher->refill_ms) return;
    if (coming < low)
        order_slots(launcher, NETWORK_NONE, low - coming);
    else if (coming < full && launcher->ordered[NETWORK_NONE] == 0 && now >= launcher->launched_ms + QUIET_MS)
        order_slots(launcher, NETWORK_NONE, 1);
}

static int take_slot(struct launcher *launcher, struct slot *slot) {
    while (launcher->pool_count > 0) {
        *slot = launcher->pool[0];
        memmove(launcher->pool, launcher->pool + 1, --launcher->pool_count * sizeof *slot);
        struct pollfd dead = {.fd = slot->pidfd, .events = POLLIN};
        if (poll(&dead, 1, 0) == 0) return 1;
        drop_slot(launcher, slot);
    }
    return 0;
}

/* --- launching -------------------------------------------------------------------------------------------------------- */

static void close_all(const int *fds, unsigned count) {
    for (unsigned i = 0; i < count; i++) close(fds[i]);
}

/* `log`: where the errors of a plan's program go; -1 for a guest. */
static int hand_over(struct flight *flight, const unsigned char *body, size_t size, int is_durable, int log, struct failure *failure) {
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) < 0) return fail(failure, "channel", errno);
    flight->channel = sockets[0];
    int fds[BINDS_MAX + 4] = {flight->mounts.root, sockets[1]}, attach[2] = {-1, -1};
    unsigned count = 2;
    if (is_durable) {
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, attach) < 0) {
            close(sockets[1]);
            return fail(failure, "attach-socket", errno);
        }
        flight->attach = attach[0];
        fds[count++] = attach[1];
    }
    memcpy(fds + count, flight->mounts.binds, flight->mounts.bind_count * sizeof(int));
    count += flight->mounts.bind_count;
    if (log >= 0) fds[count++] = log;
    long sent = packet_send(flight->slot.control, body, size, fds, count);
    int error = errno;
    close(sockets[1]);
    if (attach[1] >= 0) close(attach[1]);
    return sent < 0 ? fail(failure, "hand-over", error) : 0;
}

/* First half of a launch. `data` is a whole LAUNCH message; the slot is consumed in any case. */
static void launch(struct launcher *launcher, const struct slot *slot, const unsigned char *data, size_t size, const int *fds,
                   unsigned fd_count) {
    struct failure failure = {"", 0};
    struct flight *flight = &launcher->flights[launcher->flight_count];
    launcher->launched_ms = now_ms();
    const struct message_header *header = (const struct message_header *)(const void *)data;
    *flight = (struct flight){.request = header->request, .slot = *slot, .channel = -1, .attach = -1, .mounts = {.root = -1, .upper = -1}};
    words_start(&flight->timings);
    words_start(&flight->facts);
    words_add(&flight->facts, "devices", launcher->cgroups.confines_devices ? "filtered" : "nodev-mounts");
    const unsigned char *body = data + sizeof *header;
    size_t body_size = size - sizeof *header;
    int bad = plan_parse(body, body_size, &plan, &failure);
    int is_durable = !bad && (plan.flags & PLAN_DURABLE) != 0;
    if (is_durable && !launcher->config.is_durable) bad = fail(&failure, "durable", EINVAL);
    if (!bad) {
        flight->ends_ms = plan.deadline_ms;
        snprintf(flight->name, sizeof flight->name, "%s", plan.name);
    }
    if (!bad) bad = cgroups_limit(&launcher->cgroups, slot->offer.name, &plan, &failure);
    words_step(&flight->timings, "limits");
    if (!bad)
        bad = root_build(&launcher->template, &plan, fds, fd_count, slot->userns, slot->offer.uid_base, &flight->mounts,
                         &flight->timings, &flight->facts, &failure);
    if (launcher->release_ms == 0) launcher->release_ms = now_ms(); /* costs nothing where nothing is held */
    if (!bad && plan.program != NULL && plan.log_fd_index >= fd_count) bad = fail(&failure, "log-descriptor", EBADF);
    if (!bad) bad = hand_over(flight, body, body_size, is_durable, plan.program != NULL ? fds[plan.log_fd_index] : -1, &failure);
    words_step(&flight->timings, "handover");
    if (!bad) {
        flight->deadline_ms = now_ms() + SLOT_DEADLINE_MS;
        launcher->flight_count++;
        return;
    }
    root_close(&flight->mounts);
    if (flight->channel >= 0) close(flight->channel);
    if (flight->attach >= 0) close(flight->attach);
    drop_slot(launcher, &flight->slot);
    (void)answer(launcher, flight->request, flight, &failure);
}

/* Keeps what a later Edge needs of a sandbox that runs. 0, or -1: then nothing was taken. */
static int hold(const struct flight *flight) {
    struct held held = {.pid = flight->slot.offer.pid,
                        .uid_base = flight->slot.offer.uid_base,
                        .pidfd = flight->slot.pidfd,
                        .upper = -1,
                        .attach = flight->attach,
                        .deadline_ms = flight->ends_ms,
                        .is_durable = flight->attach >= 0};
    snprintf(held.slot, sizeof held.slot, "%s", flight->slot.offer.name);
    snprintf(held.name, sizeof held.name, "%s", flight->name);
    if (held.is_durable && (held.upper = fcntl(flight->mounts.upper, F_DUPFD_CLOEXEC, 3)) < 0) return -1;
    if (held_add(&held) == 0) return 0;
    if (held.upper >= 0) close(held.upper);
    return -1;
}

/* Second half: the slot has attached everything, or says why not, or died, or takes too long. */
static void land(struct launcher *launcher, unsigned index, int is_late) {
    struct flight *flight = &launcher->flights[index];
    struct slot_reply reply = {0};
    struct failure failure = {"slot-deadline", ETIMEDOUT};
    int good = 0;
    if (!is_late) {
        int fds[MESSAGE_FDS_MAX];
        unsigned fd_count;
        long size = packet_receive(flight->slot.control, &reply, sizeof reply, fds, &fd_count);
        good = size == sizeof reply && reply.error == 0;
        failure = size == sizeof reply ? (struct failure){reply.step, reply.error} : (struct failure){"slot-died", EPIPE};
    }
    words_step(&flight->timings, "slot");
    int is_held = good && launcher->config.is_durable;
    if (is_held && hold(flight) < 0) {
        failure = (struct failure){"hold", errno};
        good = is_held = 0;
    }
    /* A sandbox that its Edge did not hear of is nobody's. */
    if (answer(launcher, flight->request, flight, good ? NULL : &failure) < 0 && is_held)
        sys_pidfd_send_signal(flight->slot.pidfd, SIGKILL);
    root_close(&flight->mounts);
    close(flight->channel);
    if (flight->attach >= 0 && !is_held) close(flight->attach);
    if (good) {
        close(flight->slot.control);
        if (!is_held) close(flight->slot.pidfd);
        close(flight->slot.userns);
    } else {
        drop_slot(launcher, &flight->slot);
    }
    launcher->flights[index] = launcher->flights[--launcher->flight_count];
}

static void enqueue(struct launcher *launcher, const unsigned char *data, size_t size, const int *fds, unsigned fd_count,
                    uint32_t network) {
    struct waiting *waiting = launcher->waiting_count < QUEUE_MAX ? malloc(sizeof *waiting + size) : NULL;
    if (waiting == NULL) {
        const struct failure failure = {"queue", EAGAIN};
        answer(launcher, ((const struct message_header *)(const void *)data)->request, NULL, &failure);
        close_all(fds, fd_count);
        return;
    }
    *waiting = (struct waiting){.size = size, .fd_count = fd_count, .network = network};
    memcpy(waiting->data, data, size);
    memcpy(waiting->fds, fds, fd_count * sizeof *fds);
    *launcher->last = waiting;
    launcher->last = &waiting->next;
    launcher->waiting_count++;
}

static struct waiting *dequeue(struct launcher *launcher, uint32_t network) {
    for (struct waiting **link = &launcher->first; *link != NULL; link = &(*link)->next) {
        struct waiting *waiting = *link;
        if (waiting->network != network) continue;
        *link = waiting->next;
        if (launcher->last == &waiting->next) launcher->last = link;
        launcher->waiting_count--;
        return waiting;
    }
    return NULL;
}

static void launch_waiting(struct launcher *launcher, const struct slot *slot, struct waiting *waiting) {
    launch(launcher, slot, waiting->data, waiting->size, waiting->fds, waiting->fd_count);
    close_all(waiting->fds, waiting->fd_count);
    free(waiting);
}

/* Gives a sandbox that we hold to the present Edge: a new channel, whose other end goes to the guest. The message's body is the
 * name of its slot. */
static void adopt(struct launcher *launcher, uint64_t request, size_t size) {
    const char *slot = (const char *)inbox + sizeof(struct message_header);
    struct failure failure = {"adopt", ENOENT};
    int sockets[2] = {-1, -1};
    const struct held *held = size > 1 && slot[size - 1] == '\0' ? held_find(slot) : NULL;
    struct flight flight = {.channel = -1, .mounts = {.upper = -1}};
    int good = 0;
    if (held != NULL && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0) {
        good = attach_send(held->attach, sockets[1]) == 0;
        if (!good) failure.error = errno;
        flight.slot.offer.pid = held->pid;
        flight.slot.offer.uid_base = held->uid_base;
        snprintf(flight.slot.offer.name, sizeof flight.slot.offer.name, "%s", held->slot);
        flight.slot.pidfd = held->pidfd;
        flight.mounts.upper = held->upper;
        flight.channel = sockets[0];
    }
    (void)answer(launcher, request, good ? &flight : NULL, good ? NULL : &failure);
    close_all(sockets, held != NULL && sockets[0] >= 0 ? 2 : 0);
}

/* A request of the Edge. Only its network kind is read before a slot is there; the plan is parsed once, with its slot. */
static void handle_request(struct launcher *launcher, size_t size, int *fds, unsigned fd_count) {
    const struct message_header *header = (const struct message_header *)(const void *)inbox;
    struct failure failure = {"", 0};
    struct slot slot;
    if (size <= sizeof *header || header->magic != PLAN_MAGIC || header->version != PLAN_VERSION ||
        (header->type != MESSAGE_LAUNCH && header->type != MESSAGE_ADOPT)) {
        if (!launcher->config.is_durable) exit(1);
        launcher->edge_is_lost = 1;
        close_all(fds, fd_count);
        return;
    }
    if (header->type == MESSAGE_ADOPT) {
        adopt(launcher, header->request, size - sizeof *header);
        close_all(fds, fd_count);
        return;
    }
    if (plan_parse(inbox + sizeof *header, size - sizeof *header, &plan, &failure) < 0) {
        answer(launcher, header->request, NULL, &failure);
        close_all(fds, fd_count);
        return;
    }
    uint32_t network = plan.network;
    if (network == NETWORK_NONE && launcher->first == NULL && launcher->flight_count < FLIGHT_MAX && take_slot(launcher, &slot)) {
        launch(launcher, &slot, inbox, size, fds, fd_count);
        close_all(fds, fd_count);
    } else {
        enqueue(launcher, inbox, size, fds, fd_count, network);
        if (network == NETWORK_OPEN) order_slots(launcher, network, 1);
    }
}

static void handle_offer(struct launcher *launcher) {
    struct slot slot = {.control = -1, .pidfd = -1, .userns = -1};
    int fds[MESSAGE_FDS_MAX];
    unsigned fd_count;
    long size = packet_receive(launcher->stocker, &slot.offer, sizeof slot.offer, fds, &fd_count);
    if (size != sizeof slot.offer) exit(1);
    if (launcher->ordered[slot.offer.network] > 0) launcher->ordered[slot.offer.network]--;
    struct waiting *waiting;
    if (slot.offer.error != 0 || fd_count != 3) {
        const struct failure failure = {slot.offer.step, slot.offer.error};
        close_all(fds, fd_count);
        launcher->refill_ms = now_ms() + REFILL_PAUSE_MS;
        /* One refusal answers one waiting launch, so a machine that cannot make slots says so instead of hanging. */
        if ((waiting = dequeue(launcher, slot.offer.network)) != NULL) {
            answer(launcher, ((struct message_header *)(void *)waiting->data)->request, NULL, &failure);
            close_all(waiting->fds, waiting->fd_count);
            free(waiting);
        }
        return;
    }
    slot.control = fds[0];
    slot.pidfd = fds[1];
    slot.userns = fds[2];
    if (launcher->control < 0) { /* ordered by an Edge that is gone */
        drop_slot(launcher, &slot);
        return;
    }
    if (launcher->flight_count < FLIGHT_MAX && (waiting = dequeue(launcher, slot.offer.network)) != NULL) {
        launch_waiting(launcher, &slot, waiting);
    } else if (slot.offer.network == NETWORK_NONE && launcher->pool_count < POOL_MAX) {
        launcher->pool[launcher->pool_count++] = slot;
    } else {
        drop_slot(launcher, &slot);
        if (slot.offer.network == NETWORK_OPEN) order_slots(launcher, NETWORK_OPEN, 1); /* its launch still waits */
    }
}

/* Launches that waited while all flights were taken. */
static void drain_queue(struct launcher *launcher) {
    struct slot slot;
    struct waiting *waiting;
    while (launcher->flight_count < FLIGHT_MAX && launcher->pool_count > 0 &&
           (waiting = dequeue(launcher, NETWORK_NONE)) != NULL) {
        if (take_slot(launcher, &slot)) {
            launch_waiting(launcher, &slot, waiting);
        } else {
            enqueue(launcher, waiting->data, waiting->size, waiting->fds, waiting->fd_count, waiting->network);
            free(waiting);
            return;
        }
    }
}

/* Milliseconds until something is due without a message: the deadline of a flight, a refill that was put off, a look at held
 * mounts. -1: nothing. */
static int next_deadline(const struct launcher *launcher) {
    int64_t first = launcher->refill_ms > now_ms() ? launcher->refill_ms : INT64_MAX;
    if (launcher->pool_count + launcher->ordered[NETWORK_NONE] < launcher->config.pool && first == INT64_MAX)
        first = launcher->launched_ms + QUIET_MS;
    if (launcher->release_ms != 0 && launcher->release_ms < first) first = launcher->release_ms;
    if (launcher->control < 0) {
        uint64_t now = boot_ms(), next = held_expire(now);
        first = launcher->release_ms != 0 ? launcher->release_ms : INT64_MAX;
        if (next != 0 && now_ms() + (int64_t)(next - now) < first) first = now_ms() + (int64_t)(next - now);
    }
    for (unsigned i = 0; i < launcher->flight_count; i++) {
        if (launcher->flights[i].deadline_ms < first) first = launcher->flights[i].deadline_ms;
    }
    if (first == INT64_MAX) return -1;
    int64_t left = first - now_ms();
    return left < 0 ? 0 : (int)left + 1;
}

/* --- start and loop ------------------------------------------------------------------------------------------------------ */

static _Noreturn void refuse_start(int control, const struct failure *failure) {
    struct launcher launcher = {.control = control};
    answer(&launcher, 0, NULL, failure);
    exit(1);
}

static void configure(struct launcher *launcher, struct failure *failure) {
    int fds[MESSAGE_FDS_MAX];
    unsigned fd_count;
    long size = packet_receive(launcher->control, config_bytes, sizeof config_bytes, fds, &fd_count);
    const struct message_header *header = (const struct message_header *)(const void *)config_bytes;
    if (size <= 0) exit(0);
    launcher->listener = fd_count == 2 ? fds[0] : -1;
    launcher->lock = fd_count == 2 ? fds[1] : -1;
    if ((size_t)size <= sizeof *header || header->magic != PLAN_MAGIC || header->version != PLAN_VERSION ||
        header->type != MESSAGE_CONFIG) {
        fail(failure, "config-header", EPROTO);
        refuse_start(launcher->control, failure);
    }
    if (config_parse(config_bytes + sizeof *header, (size_t)size - sizeof *header, &launcher->config, failure) < 0 ||
        cgroups_open(&launcher->config, &launcher->cgroups, failure) < 0)
        refuse_start(launcher->control, failure);
    if (launcher->config.is_durable && (launcher->lock < 0 || (launcher->deaths = held_open()) < 0)) {
        fail(failure, "config-descriptors", EBADMSG);
        refuse_start(launcher->control, failure);
    }
    if (launcher->config.pool > POOL_MAX) {
        fail(failure, "config-pool", E2BIG);
        refuse_start(launcher->control, failure);
    }
}

static int enter_own_namespace(struct launcher *launcher, struct failure *failure) {
    if (unshare(CLONE_NEWNS) < 0) return fail(failure, "mount-namespace", errno);
    /* Slave, not private: what the machine mounts later (an image store) is seen, nothing of ours is seen outside. */
    if (sys_mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0) return fail(failure, "mount-propagation", errno);
    return mounts_make_template(&launcher->template, failure);
}

static void start_stocker(struct launcher *launcher, struct failure *failure) {
    int sockets[2], fds[MESSAGE_FDS_MAX];
    unsigned fd_count;
    struct slot_offer greeting = {0};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0) {
        fail(failure, "stocker-socket", errno);
        refuse_start(launcher->control, failure);
    }
    const struct stocker_setup setup = {
        .config = &launcher->config,
        .cgroups = &launcher->cgroups,
        .template = &launcher->template,
        .request_fd = sockets[1],
        .foreign = {launcher->control, sockets[0], launcher->template.scratch, launcher->listener, launcher->lock},
    };
    launcher->stocker = sockets[0];
    if (stocker_start(&setup, failure) < 0) refuse_start(launcher->control, failure);
    close(sockets[1]);
    if (packet_receive(launcher->stocker, &greeting, sizeof greeting, fds, &fd_count) != sizeof greeting)
        greeting = (struct slot_offer){.error = EPIPE, .step = "stocker-died"};
    if (greeting.error != 0) {
        fail(failure, greeting.step, greeting.error);
        refuse_start(launcher->control, failure);
    }
}

/* The Edge is gone or has closed its end. The stocker hears of it by the end of its socket, kills and reaps all slots. */
static _Noreturn void stop(struct launcher *launcher) {
    alarm(15);
    close(launcher->stocker);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR) continue;
    exit(0);
}

/* The Edge is gone. Tied: so is everything else. Durable: what was made for it alone ends, and the rest waits for the next. */
static void lose_edge(struct launcher *launcher) {
    if (!launcher->config.is_durable) stop(launcher);
    launcher->edge_is_lost = 0;
    if (launcher->control >= 0) close(launcher->control);
    if (launcher->parent >= 0) close(launcher->parent);
    launcher->control = launcher->parent = -1;
    while (launcher->flight_count > 0) {
        struct flight *flight = &launcher->flights[--launcher->flight_count];
        root_close(&flight->mounts);
        close(flight->channel);
        if (flight->attach >= 0) close(flight->attach);
        drop_slot(launcher, &flight->slot);
    }
    for (struct waiting *waiting; (waiting = launcher->first) != NULL; launcher->waiting_count--) {
        launcher->first = waiting->next;
        close_all(waiting->fds, waiting->fd_count);
        free(waiting);
    }
    launcher->last = &launcher->first;
    while (launcher->pool_count > 0) drop_slot(launcher, &launcher->pool[--launcher->pool_count]);
    held_end_tied();
}

static int say_ready(const struct launcher *launcher) {
    const struct message_header ready = {PLAN_MAGIC, PLAN_VERSION, MESSAGE_READY, 0};
    return packet_send(launcher->control, &ready, sizeof ready, &launcher->cgroups.unified, 1) < 0 ? -1 : 0;
}

/* Somebody knocks. There is one Edge at a time, and it has our uid. */
static void admit_edge(struct launcher *launcher) {
    const struct timeval patience = {.tv_sec = 5};
    struct ucred peer;
    socklen_t size = sizeof peer;
    int control = accept4(launcher->listener, NULL, NULL, SOCK_CLOEXEC);
    if (control < 0) return;
    if (launcher->control >= 0 || getsockopt(control, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || peer.uid != getuid() ||
        setsockopt(control, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) < 0) {
        close(control);
        return;
    }
    launcher->control = control;
    launcher->parent = sys_pidfd_open(peer.pid); /* -1 for one that has ended, which its socket tells as well */
    held_reap(0);
    if (say_ready(launcher) < 0 || held_announce(control) < 0) launcher->edge_is_lost = 1;
}

static _Noreturn void serve(struct launcher *launcher) {
    for (;;) {
        if (launcher->edge_is_lost) lose_edge(launcher);
        if (launcher->control < 0 && held_living() == 0) stop(launcher);
        drain_queue(launcher);
        if (launcher->control >= 0) refill(launcher);
        if (launcher->release_ms != 0 && launcher->release_ms <= now_ms())
            launcher->release_ms = root_release_held() > 0 ? now_ms() + RELEASE_PAUSE_MS : 0;
        struct pollfd polled[FIXED_POLLS + FLIGHT_MAX] = {{.fd = launcher->control, .events = POLLIN},
                                                          {.fd = launcher->stocker, .events = POLLIN},
                                                          {.fd = launcher->parent, .events = POLLIN},
                                                          {.fd = launcher->listener, .events = POLLIN},
                                                          {.fd = launcher->deaths, .events = POLLIN}};
        unsigned flights = launcher->flight_count;
        for (unsigned i = 0; i < flights; i++)
            polled[FIXED_POLLS + i] = (struct pollfd){.fd = launcher->flights[i].slot.control, .events = POLLIN};
        if (poll(polled, FIXED_POLLS + flights, next_deadline(launcher)) < 0) {
            if (errno == EINTR) continue;
            exit(1);
        }
        if (polled[4].revents != 0) held_reap(launcher->control >= 0);
        if (polled[2].revents != 0) {
            lose_edge(launcher);
            continue;
        }
        /* From the last to the first: land() moves the last flight into the freed place. */
        for (unsigned i = flights; i > 0; i--) {
            if (polled[FIXED_POLLS + i - 1].revents != 0)
                land(launcher, i - 1, 0);
            else if (launcher->flights[i - 1].deadline_ms < now_ms())
                land(launcher, i - 1, 1);
        }
        if (polled[0].revents != 0) {
            int fds[MESSAGE_FDS_MAX];
            unsigned fd_count;
            long size = packet_receive(launcher->control, inbox, sizeof inbox, fds, &fd_count);
            if (size <= 0) {
                lose_edge(launcher);
                continue;
            }
            handle_request(launcher, (size_t)size, fds, fd_count);
        }
        if (polled[1].revents != 0) handle_offer(launcher);
        if (polled[3].revents != 0) admit_edge(launcher);
    }
}

int launcher_main(int control_fd) {
    static struct launcher launcher;
    struct failure failure = {"", 0};
    const struct rlimit no_core = {NO_CORE, NO_CORE};
    /* A session of its own: the Edge's terminal must not be the one behind /dev/tty of a sandbox. Fails if it has one. */
    (void)setsid();
    /* Changing file system ids (mounts.c) must not cost capabilities. */
    if ((hardened("core-limit") && setrlimit(RLIMIT_CORE, &no_core) < 0) || prctl(PR_SET_DUMPABLE, 0) < 0 ||
        prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) < 0)
        return 1;
    if (control_fd != 3 && (dup2(control_fd, 3) < 0)) return 1;
    if (sys_close_range(4, ~0u) < 0 || fcntl(3, F_SETFD, FD_CLOEXEC) < 0) return 1;
    prctl(PR_SET_NAME, "proctor-launch");
    signal(SIGCHLD, SIG_IGN);
    signal(SIGINT, SIG_IGN); /* Ctrl-C is for the Edge, which ends this process in its own time */
    (void)setpriority(PRIO_PROCESS, 0, GUEST_NICE); /* no privilege, no haste */
    launcher.control = 3;
    launcher.listener = launcher.lock = launcher.deaths = -1;
    launcher.last = &launcher.first;
    /* Both ends are watched: a forked copy of the Edge may hold its socket open after the Edge itself has died. */
    if ((launcher.parent = sys_pidfd_open(getppid())) < 0) return 1;
    configure(&launcher, &failure);
    if (enter_own_namespace(&launcher, &failure) < 0) refuse_start(launcher.control, &failure);
    start_stocker(&launcher, &failure);
    if (say_ready(&launcher) < 0) return 1;
    serve(&launcher);
}
