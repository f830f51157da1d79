#include "held.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "slots.h"
#include "sys.h"

#define HELD_MAX 16384

/* launcher → Edge */
struct announcement {
    struct message_header header;
    char slot[NAME_MAX_BYTES];
    char name[NAME_MAX_BYTES];
    uint32_t pid;
    uint32_t uid_base;
    uint32_t is_dead;
    uint32_t is_expired;
} __attribute__((packed));

static struct held table[HELD_MAX];
static unsigned table_end, living;
static int deaths = -1;

int held_open(void) { return deaths = epoll_create1(EPOLL_CLOEXEC); }

int held_add(const struct held *held) {
    unsigned index = 0;
    while (index < table_end && table[index].slot[0] != '\0') index++;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = index};
    if (index == HELD_MAX) return errno = ENFILE, -1;
    if (epoll_ctl(deaths, EPOLL_CTL_ADD, held->pidfd, &event) < 0) return -1;
    table[index] = *held;
    if (index >= table_end) table_end = index + 1;
    living += held->is_durable != 0;
    return 0;
}

const struct held *held_find(const char *slot) {
    for (unsigned i = 0; i < table_end; i++) {
        if (strcmp(table[i].slot, slot) == 0 && table[i].is_durable && !table[i].is_dead) return &table[i];
    }
    return NULL;
}

static void close_one(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static void bury(struct held *held, int forget) {
    (void)epoll_ctl(deaths, EPOLL_CTL_DEL, held->pidfd, NULL); /* copies of it live elsewhere */
    close_one(&held->pidfd);
    close_one(&held->upper);
    close_one(&held->attach);
    living -= held->is_durable != 0;
    held->is_dead = 1;
    if (forget || !held->is_durable) held->slot[0] = '\0';
}

void held_reap(int forget) {
    struct epoll_event ready[64];
    int count = epoll_wait(deaths, ready, 64, 0);
    for (int i = 0; i < count; i++) bury(&table[ready[i].data.u32], forget);
}

unsigned held_end_tied(void) {
    for (unsigned i = 0; i < table_end; i++) {
        if (table[i].slot[0] != '\0' && !table[i].is_durable) sys_pidfd_send_signal(table[i].pidfd, SIGKILL);
    }
    return living;
}

unsigned held_living(void) { return living; }

uint64_t held_expire(uint64_t now_ms) {
    uint64_t next = 0;
    for (unsigned i = 0; i < table_end; i++) {
        struct held *held = &table[i];
        if (held->slot[0] == '\0' || held->is_dead || held->is_expired || held->deadline_ms == 0) continue;
        if (held->deadline_ms <= now_ms) {
            held->is_expired = 1;
            sys_pidfd_send_signal(held->pidfd, SIGKILL);
        } else if (next == 0 || held->deadline_ms < next) {
            next = held->deadline_ms;
        }
    }
    return next;
}

static int announce(int control, const struct held *held) {
    struct announcement message = {.header = {PLAN_MAGIC, PLAN_VERSION, MESSAGE_HELD, 0}};
    snprintf(message.slot, sizeof message.slot, "%s", held->slot);
    snprintf(message.name, sizeof message.name, "%s", held->name);
    message.pid = (uint32_t)held->pid;
    message.uid_base = held->uid_base;
    message.is_dead = (uint32_t)held->is_dead;
    message.is_expired = (uint32_t)held->is_expired;
    return packet_send(control, &message, sizeof message, NULL, 0) < 0 ? -1 : 0;
}

int held_announce(int control) {
    const struct held self = {.pid = (int32_t)getpid()};
    for (unsigned i = 0; i < table_end; i++) {
        if (table[i].slot[0] != '\0' && table[i].is_durable && announce(control, &table[i]) < 0) return -1;
    }
    if (announce(control, &self) < 0) return -1;
    for (unsigned i = 0; i < table_end; i++) {
        if (table[i].is_dead) table[i].slot[0] = '\0';
    }
    return 0;
}
