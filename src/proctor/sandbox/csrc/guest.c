/* Process 1 of a sandbox: one thread, one poll loop, fixed tables. It runs commands, moves their streams, kills and reaps.
 *
 * It is between two parties that it does not trust: the host's frames are checked one by one (a malformed one ends the
 * connection), and whatever its children do reaches it only as bytes in pipes, exit statuses and counts. */
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "attach.h"
#include "net.h"
#include "table.h"
#include "tell.h"

enum {
    WATCH_MAX = 5 + EXECS_MAX * 6 + KEPT_MAX * 4,
    TICK_MS = 2,
    KILLALL_MS = 20000,
};

enum watch_kind { WATCH_CHANNEL, WATCH_SIGNAL, WATCH_STATUS, WATCH_INPUT, WATCH_OUTPUT, WATCH_GROUP, WATCH_KEPT_PIPE, WATCH_KEPT_GROUP, WATCH_NET, WATCH_ATTACH };

struct watch {
    uint8_t kind, sub;
    uint16_t index;
};

struct channel guest_channel;
struct exec guest_execs[EXECS_MAX];
static struct kept kept_groups[KEPT_MAX];
static struct pollfd polls[WATCH_MAX];
static struct watch watches[WATCH_MAX];
static size_t watch_count;
static struct exec_setup setup;
static int signal_fd = -1, attach_fd = -1;
static uint32_t last_id;
static bool killing_all, kill_all_unasked; /* unasked: the host that wanted it has gone */
static int64_t kill_all_deadline;

static struct {
    uint32_t id; /* 0 = no request is being assembled */
    size_t length;
} request;
static _Alignas(4096) uint8_t request_bytes[REQUEST_MAX + 4096];
static uint8_t scratch[FRAME_PAYLOAD_MAX];

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

int send_u32(enum frame_type type, uint32_t stream, uint8_t sub, uint32_t value) {
    uint8_t payload[4];
    put_u32(payload, value);
    return channel_put(&guest_channel, type, stream, sub, payload, sizeof payload);
}

static struct exec *find_exec(uint32_t id) {
    for (size_t i = 0; i < EXECS_MAX; i++) {
        if (guest_execs[i].id == id) return &guest_execs[i];
    }
    return NULL;
}

/* ---- the life of an exec ------------------------------------------------------------------------------------------- */

static int keep_group(struct exec *exec) {
    for (size_t i = 0; i < KEPT_MAX; i++) {
        struct kept *kept = &kept_groups[i];
        if (kept->id != 0) continue;
        *kept = (struct kept){.id = exec->id, .group = exec->group, .pipes = {-1, -1, -1, -1}};
        for (int sub = SUB_STDOUT; sub < SUB_COUNT; sub++) {
            kept->pipes[sub] = exec->outputs[sub].fd;
            exec->outputs[sub].fd = -1;
        }
        return 0;
    }
    return -1;
}

static bool kept_full(void) {
    /* An exec that is about to be kept counts too. */
    size_t count = 0;
    for (size_t i = 0; i < KEPT_MAX; i++) count += kept_groups[i].id != 0;
    for (size_t i = 0; i < EXECS_MAX; i++) count += guest_execs[i].id != 0 && guest_execs[i].keeping;
    return count >= KEPT_MAX;
}

/* Moves an exec towards its end as far as it can go now. */
static int advance(struct exec *exec) {
    if (!exec->exited || exec->over) return 0;
    if (exec->emptying && !exec->empty) {
        int empty = group_is_empty(&exec->group);
        if (empty < 0) return -1;
        if (empty == 0) return 0;
        exec->empty = true;
        if (limit_outputs(exec) < 0) return -1;
    }
    for (uint8_t sub = SUB_STDOUT; sub < SUB_COUNT; sub++) {
        if (output_open(exec, sub)) return 0;
    }
    bool kept = exec->keeping;
    for (uint8_t sub = SUB_STDOUT; sub < SUB_COUNT && !kept; sub++) close_fd(&exec->outputs[sub].fd); /* a kept one that was killed */
    if ((kept ? keep_group(exec) : group_release(&exec->group, setup.config->cgroup_fd)) < 0) return -1;
    return tell_closed(exec, kept);
}

static int kill_group(struct exec *exec) {
    exec->killed = exec->emptying = true;
    exec->keeping = false; /* a kept one was only waiting for the host to take its output */
    return group_kill(&exec->group);
}

/* Reads what the child said before its program ran: nothing (it runs, or ran), or the reason why it did not. */
static int read_status(struct exec *exec) {
    uint8_t message[sizeof exec->failed_step + 4];
    int terminal = -1;
    ssize_t got = exec->terminal ? terminal_receive(exec->status_fd, message, sizeof message - 1, &terminal)
                                 : read(exec->status_fd, message, sizeof message - 1);
    if (got < 0 && errno == EAGAIN && !exec->exited) return 0;
    if (got == 1 && exec->input.waiting && terminal >= 0) {
        if (connect_terminal(exec, terminal) < 0) return -1;
        return exec->exited ? read_status(exec) : 0;
    }
    close_fd(&terminal);
    close_fd(&exec->status_fd);
    if (got > 4) {
        exec->failed_errno = (int)get_u32(message);
        memcpy(exec->failed_step, message + 4, (size_t)got - 4);
        return 0;
    }
    return tell_started(exec);
}

/* 1 when as many processes ran as may, by a count of our own (guest.h): the host has none of its own then. */
static bool processes_at_limit(void) {
    char text[24];
    if (setup.config->count_enter_fd == 0) return false;
    ssize_t got = pread(setup.config->count_fd, text, sizeof text - 1, 0);
    if (got <= 0) return false;
    text[got] = '\0';
    /* The command's own process was one of them, and gVisor refuses at the limit or one above it. */
    return strtoull(text, NULL, 10) + 2 >= setup.config->count_max;
}

/* A child that never ran its program. */
static int fail_exec(struct exec *exec) {
    if (end_input(exec, false) < 0) return -1;
    for (uint8_t sub = SUB_STDOUT; sub < SUB_COUNT; sub++) close_fd(&exec->outputs[sub].fd);
    if (group_release(&exec->group, setup.config->cgroup_fd) < 0) return -1;
    return tell_failed(exec);
}

/* The main process has ended. What it left behind is counted and killed, or kept. */
static int exec_exited(struct exec *exec) {
    exec->exited = true;
    exec->at_limit = processes_at_limit();
    if (exec->status_fd >= 0 && read_status(exec) < 0) return -1;
    if (exec->failed_step[0] != '\0') return fail_exec(exec);
    if (exec->input.waiting) { /* killed before it had its terminal */
        exec->input.waiting = false;
        if (finish_output(exec, SUB_STDOUT, true) < 0) return -1;
    }
    if (end_input(exec, (exec->flags & EXEC_STDIN) != 0) < 0) return -1;
    int empty = group_is_empty(&exec->group);
    if (empty < 0) return -1;
    if (!empty && (exec->flags & EXEC_KEEP) != 0 && !exec->killed && !killing_all && !kept_full()) {
        exec->keeping = true;
        return tell_exited(exec, 0) < 0 || limit_outputs(exec) < 0 ? -1 : advance(exec);
    }
    int leftover = empty ? 0 : group_count(&exec->group);
    if (leftover < 0 || tell_exited(exec, (uint32_t)leftover) < 0) return -1;
    exec->emptying = true;
    exec->empty = empty;
    if (exec->empty) return limit_outputs(exec) < 0 ? -1 : advance(exec);
    return kill_group(exec) < 0 ? -1 : advance(exec);
}

static int reap(void) {
    struct signalfd_siginfo info;
    while (read(signal_fd, &info, sizeof info) > 0) continue;
    for (;;) {
        struct rusage usage;
        int status;
        pid_t pid = wait4(-1, &status, WNOHANG, &usage);
        if (pid < 0 && errno == EINTR) continue;
        if (pid <= 0) return 0;
        for (size_t i = 0; i < EXECS_MAX; i++) {
            struct exec *exec = &guest_execs[i];
            if (exec->id == 0 || exec->exited || exec->pid != pid) continue;
            exec->wait_status = status;
            exec->usage = usage;
            if (exec_exited(exec) < 0) return -1;
        }
    }
}

/* ---- what the host asks for ---------------------------------------------------------------------------------------- */

static int start_exec(uint32_t id, struct exec_request *wanted) {
    struct exec *exec = find_exec(0);
    struct exec_pipes pipes = {.streams = {-1, -1, -1, -1}, .status = -1};
    const char *step = "table";
    if (killing_all) return tell_refused(id, EBUSY, "killall");
    if (exec == NULL) return tell_refused(id, EAGAIN, step);
    *exec = (struct exec){.flags = wanted->flags};
    if (group_create(&exec->group, setup.config->cgroup_fd, id) < 0) return tell_refused(id, errno, "cgroup");
    exec->pid = exec_spawn(&setup, wanted, &exec->group, &pipes, &step);
    if (exec->pid < 0) {
        int error = errno;
        if (group_release(&exec->group, setup.config->cgroup_fd) < 0) return -1;
        return tell_refused(id, error, step);
    }
    exec->id = id;
    exec->status_fd = pipes.status;
    exec->terminal = wanted->terminal.rows != 0;
    exec->input = (struct input){.fd = pipes.streams[SUB_STDIN], .window = WINDOW_INITIAL, .waiting = exec->terminal};
    for (int sub = 0; sub < SUB_COUNT; sub++) {
        int fd = sub == SUB_STDIN ? -1 : pipes.streams[sub];
        exec->outputs[sub] = (struct output){.fd = fd, .credit = WINDOW_INITIAL, .left = -1};
        if (fd >= 0 || (exec->terminal && sub == SUB_STDOUT)) exec->subs |= (uint8_t)(1 << sub);
    }
    return 0;
}

/* A request comes in one frame, or in several of which all but the last have sub 1. */
static int on_exec(const struct frame *frame) {
    struct exec_request wanted;
    if (frame->sub > 1) return -1;
    if (request.id == 0) {
        if (frame->stream <= last_id) return -1;
        last_id = request.id = frame->stream;
        request.length = 0;
    }
    if (frame->stream != request.id || frame->length > REQUEST_MAX - request.length) return -1;
    memcpy(request_bytes + request.length, frame->payload, frame->length);
    request.length += frame->length;
    if (frame->sub == 1) return 0;
    request.id = 0;
    if (request_parse(request_bytes, request.length, &wanted) < 0) return -1;
    int result = start_exec(frame->stream, &wanted);
    if (madvise(request_bytes, sizeof request_bytes, MADV_DONTNEED) < 0) return -1;
    return result;
}

static int on_kill(const struct frame *frame) {
    if (frame->length != 4) return -1;
    uint32_t signal = get_u32(frame->payload);
    if (signal > 64) return -1;
    struct exec *exec = find_exec(frame->stream);
    if (exec != NULL && !exec->over) {
        if (signal == 0) return kill_group(exec) < 0 ? -1 : advance(exec);
        if (!exec->exited && kill(exec->pid, (int)signal) < 0 && errno != ESRCH) return -1;
        return 0;
    }
    for (size_t i = 0; i < KEPT_MAX && signal == 0; i++) {
        if (kept_groups[i].id != frame->stream) continue;
        kept_groups[i].killed = true;
        return group_kill(&kept_groups[i].group);
    }
    return 0; /* it is over already: the two crossed on the way */
}

static int on_stream(const struct frame *frame) {
    struct exec *exec = find_exec(frame->stream);
    if (frame->type == FRAME_CREDIT) {
        if (frame->length != 4 || frame->sub < SUB_STDOUT || frame->sub >= SUB_COUNT) return -1;
        uint32_t credit = get_u32(frame->payload);
        if (exec == NULL) return 0;
        if (credit > WINDOW_INITIAL || exec->outputs[frame->sub].credit + credit > WINDOW_INITIAL) return -1;
        exec->outputs[frame->sub].credit += credit;
        return tell_is_durable() ? tell_acknowledged(exec, frame->sub, credit) : 0;
    }
    if (frame->sub != SUB_STDIN || (frame->type == FRAME_EOF && frame->length != 0)) return -1;
    if (exec == NULL || exec->over) return 0;
    if (frame->type == FRAME_DATA) return take_input(exec, frame);
    if ((exec->flags & EXEC_STDIN) == 0 || exec->input.ended) return -1;
    return finish_input(exec);
}

static int on_resize(const struct frame *frame) {
    if (frame->length != 4) return -1;
    uint32_t value = get_u32(frame->payload);
    const struct terminal_size size = {(uint16_t)value, (uint16_t)(value >> 16)};
    struct exec *exec = find_exec(frame->stream);
    if (size.columns == 0 || size.rows == 0) return -1;
    if (exec == NULL || !exec->terminal) return exec == NULL ? 0 : -1;
    int terminal = exec->outputs[SUB_STDOUT].fd;
    if (terminal >= 0) (void)terminal_resize(terminal, &size); /* one that is hung up has no size any more */
    return 0;
}

static int on_done(const struct frame *frame) {
    struct exec *exec = find_exec(frame->stream);
    if (frame->length != 0 || !tell_is_durable()) return -1;
    return exec == NULL ? 0 : tell_done(exec); /* NULL: one that never had a place */
}

static int on_killall(const struct frame *frame) {
    if (frame->stream != 0 || frame->length != 0 || (killing_all && !kill_all_unasked)) return -1;
    killing_all = true;
    kill_all_unasked = false;
    kill_all_deadline = now_ms() + KILLALL_MS;
    return 0;
}

static int on_frame(const struct frame *frame) {
    if (net_owns(frame)) return net_frame(frame);
    switch (frame->type) {
    case FRAME_EXEC: return frame->stream == 0 ? -1 : on_exec(frame);
    case FRAME_DATA:
    case FRAME_EOF:
    case FRAME_CREDIT: return frame->stream == 0 || frame->stream > last_id ? -1 : on_stream(frame);
    case FRAME_KILL: return frame->stream == 0 || frame->stream > last_id ? -1 : on_kill(frame);
    case FRAME_RESIZE: return frame->stream == 0 || frame->stream > last_id ? -1 : on_resize(frame);
    case FRAME_DONE: return frame->stream == 0 || frame->stream > last_id ? -1 : on_done(frame);
    case FRAME_KILLALL: return on_killall(frame);
    case FRAME_PING:
        if (frame->stream != 0 || frame->length != 8) return -1;
        return channel_put(&guest_channel, FRAME_PONG, 0, 0, frame->payload, 8);
    default: return -1;
    }
}

static int read_host(void) {
    struct frame frame;
    if (channel_fill(&guest_channel) < 0) return -1;
    for (;;) {
        if (channel_room(&guest_channel) < CHANNEL_RESERVE) return 0; /* the rest of the input waits until the host has read */
        int taken = channel_next(&guest_channel, &frame);
        if (taken <= 0) return taken;
        if (on_frame(&frame) < 0) return -1;
    }
}

/* ---- killing everything, and groups that outlived their exec ----------------------------------------------------- */

static int kept_advance(struct kept *kept) {
    if (kept->killed && kept->group.dir_fd < 0 && group_kill(&kept->group) < 0) return -1;
    int empty = group_is_empty(&kept->group);
    if (empty <= 0) return empty;
    if (group_release(&kept->group, setup.config->cgroup_fd) < 0) return -1;
    for (int sub = 0; sub < SUB_COUNT; sub++) close_fd(&kept->pipes[sub]);
    uint32_t id = kept->id;
    struct exec *exec = find_exec(id);
    kept->id = 0;
    if (exec != NULL && exec->over && exec->kept) { /* whoever is told of its end later is told that nothing lives on */
        exec->kept = false;
        if (!tell_closed_told(exec)) return 0;
    }
    return channel_put(&guest_channel, FRAME_GONE, id, 0, NULL, 0);
}

static void drain_kept(struct kept *kept, int sub) {
    ssize_t got = read(kept->pipes[sub], scratch, sizeof scratch);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) close_fd(&kept->pipes[sub]);
}

/* One round of killing; returns how many processes remain. As process 1, kill(-1) reaches everything but us at one moment: a
 * fork that is under way then fails. */
static int kill_round(void) {
    bool is_init = setup.config->is_init && getpid() == 1;
    int left = 0;
    for (size_t i = 0; i < EXECS_MAX; i++) {
        if (guest_execs[i].id == 0 || guest_execs[i].empty) continue;
        if (kill_group(&guest_execs[i]) < 0) return -1;
        if (!is_init) left += group_count(&guest_execs[i].group);
    }
    for (size_t i = 0; i < KEPT_MAX; i++) {
        if (kept_groups[i].id == 0) continue;
        kept_groups[i].killed = true;
        if (group_kill(&kept_groups[i].group) < 0) return -1;
        if (!is_init) left += group_count(&kept_groups[i].group);
    }
    if (!is_init) return left;
    if (kill(-1, SIGKILL) < 0 && errno == ESRCH) return 0;
    left = processes_alive();
    return left > 0 ? left : 1; /* the last ones are zombies that their parents have not left to us yet */
}

/* Work that has no event of its own; returns the time until it is due again, -1 = never. */
static int tick(void) {
    int timeout = -1;
    for (size_t i = 0; i < EXECS_MAX; i++) {
        struct exec *exec = &guest_execs[i];
        if (exec->id == 0 || !exec->emptying || exec->empty || exec->group.dir_fd >= 0) continue;
        if (group_kill(&exec->group) < 0 || advance(exec) < 0) return -2;
        timeout = TICK_MS;
    }
    for (size_t i = 0; i < KEPT_MAX; i++) {
        if (kept_groups[i].id == 0 || kept_groups[i].group.dir_fd >= 0) continue;
        if (kept_advance(&kept_groups[i]) < 0) return -2;
        timeout = kept_groups[i].killed || timeout == TICK_MS ? TICK_MS : 100;
    }
    if (!killing_all) return timeout;
    int left = kill_round();
    if (left < 0) return -2;
    if (left > 0 && now_ms() < kill_all_deadline) return TICK_MS;
    killing_all = false;
    if (kill_all_unasked) return timeout;
    return send_u32(FRAME_KILLED, 0, 0, (uint32_t)left) < 0 ? -2 : timeout;
}

/* ---- hosts that come and go ---------------------------------------------------------------------------------------- */

static int say_hello(uint32_t more) {
    uint8_t hello[8];
    put_u32(hello, PROTOCOL_VERSION);
    put_u32(hello + 4, (setup.config->cgroup_fd >= 0 ? HELLO_GROUPS : 0u) | (tell_is_durable() ? HELLO_DURABLE : 0u) | more);
    return channel_put(&guest_channel, FRAME_HELLO, 0, 0, hello, sizeof hello);
}

/* The host has gone, or has lied. -1 unless another can come. */
static int hang_up(void) {
    if (attach_fd < 0) return -1;
    /* Whoever else holds a copy of it, the host shall see its end. */
    if (guest_channel.fd >= 0) (void)shutdown(guest_channel.fd, SHUT_RDWR);
    close_fd(&guest_channel.fd);
    guest_channel.in_start = guest_channel.in_end = guest_channel.out_start = guest_channel.out_end = 0;
    request.id = 0;
    kill_all_unasked = killing_all;
    net_forget();
    return 0;
}

static int listen_to_host(void) { return read_host() < 0 ? hang_up() : 0; }

static int speak(void) {
    if (guest_channel.fd < 0) return 0;
    if (channel_flush(&guest_channel) < 0) return hang_up();
    if (tell_all() < 0) return -1;
    return channel_flush(&guest_channel) < 0 ? hang_up() : 0;
}

static int take_channel(void) {
    int fd = attach_receive(attach_fd);
    if (fd < 0 && errno != 0) return 0;
    if (fd < 0) { /* the launcher has ended, so nobody will come any more */
        close_fd(&attach_fd);
        return guest_channel.fd < 0 ? -1 : 0;
    }
    if (hang_up() < 0) return -1;
    guest_channel.fd = fd;
    if (say_hello(HELLO_RESUMED) < 0) return -1;
    for (size_t i = 0; i < KEPT_MAX; i++) {
        if (kept_groups[i].id != 0 && channel_put(&guest_channel, FRAME_RESUME, kept_groups[i].id, 0, NULL, 0) < 0) return -1;
    }
    return tell_again(last_id);
}

/* ---- the loop ------------------------------------------------------------------------------------------------------ */

static void watch(enum watch_kind kind, size_t index, uint8_t sub, int fd, short events) {
    if (fd < 0 || watch_count == WATCH_MAX) return;
    polls[watch_count] = (struct pollfd){.fd = fd, .events = events};
    watches[watch_count++] = (struct watch){.kind = (uint8_t)kind, .sub = sub, .index = (uint16_t)index};
}

static void watch_everything(void) {
    size_t room = channel_room(&guest_channel);
    watch_count = 0;
    watch(WATCH_ATTACH, 0, 0, attach_fd, POLLIN);
    short out = channel_pending(&guest_channel) ? POLLOUT : 0, in = room >= CHANNEL_RESERVE ? POLLIN : 0;
    bool apart = channel_out(&guest_channel) != guest_channel.fd;
    watch(WATCH_CHANNEL, 0, 0, guest_channel.fd, (short)(apart ? in : in | out));
    if (apart && out != 0) watch(WATCH_CHANNEL, 0, 0, channel_out(&guest_channel), out);
    if (room < CHANNEL_RESERVE) return; /* first the host has to read */
    watch(WATCH_SIGNAL, 0, 0, signal_fd, POLLIN);
    watch(WATCH_NET, 0, 0, net_poll_fd(), POLLIN);
    bool data_fits = tell_is_durable() || room >= CHANNEL_RESERVE + FRAME_HEADER + FRAME_PAYLOAD_MAX;
    for (size_t i = 0; i < EXECS_MAX; i++) {
        const struct exec *exec = &guest_execs[i];
        if (exec->id == 0) continue;
        if (exec->flags & EXEC_STARTED || exec->terminal) watch(WATCH_STATUS, i, 0, exec->status_fd, POLLIN);
        if (exec->input.used > 0) watch(WATCH_INPUT, i, 0, exec->input.fd, POLLOUT);
        for (uint8_t sub = SUB_STDOUT; sub < SUB_COUNT && data_fits; sub++) {
            if (exec->outputs[sub].credit > 0 && output_open(exec, sub)) watch(WATCH_OUTPUT, i, sub, exec->outputs[sub].fd, POLLIN);
        }
        if (exec->emptying && !exec->empty) watch(WATCH_GROUP, i, 0, exec->group.events_fd, POLLPRI);
    }
    for (size_t i = 0; i < KEPT_MAX; i++) {
        const struct kept *kept = &kept_groups[i];
        if (kept->id == 0) continue;
        for (uint8_t sub = SUB_STDOUT; sub < SUB_COUNT; sub++) watch(WATCH_KEPT_PIPE, i, sub, kept->pipes[sub], POLLIN);
        watch(WATCH_KEPT_GROUP, i, 0, kept->group.events_fd, POLLPRI);
    }
}

static int dispatch(const struct watch *watch, short events) {
    struct exec *exec = &guest_execs[watch->index < EXECS_MAX ? watch->index : 0];
    struct kept *kept = &kept_groups[watch->index < KEPT_MAX ? watch->index : 0];
    switch ((enum watch_kind)watch->kind) {
    case WATCH_CHANNEL: return events & (POLLIN | POLLHUP | POLLERR) ? listen_to_host() : 0;
    case WATCH_ATTACH: return take_channel();
    case WATCH_SIGNAL: return reap();
    case WATCH_STATUS: return exec->id != 0 && exec->status_fd >= 0 && !exec->exited ? read_status(exec) : 0;
    case WATCH_INPUT: return exec->id != 0 ? pump_input(exec) : 0;
    case WATCH_OUTPUT:
        if (exec->id == 0 || !output_open(exec, watch->sub)) return 0;
        return pump_output(exec, watch->sub) < 0 ? -1 : advance(exec);
    case WATCH_GROUP: return exec->id != 0 ? advance(exec) : 0;
    case WATCH_KEPT_PIPE:
        if (kept->id != 0 && kept->pipes[watch->sub] >= 0) drain_kept(kept, watch->sub);
        return 0;
    case WATCH_KEPT_GROUP: return kept->id != 0 ? kept_advance(kept) : 0;
    case WATCH_NET: return 0; /* net_turn looks in every turn */
    }
    return -1;
}

/* One turn. The channel comes last: what it starts must not meet the events of an older exec in the same slot. */
static int turn(void) {
    static bool net_first;
    int timeout = tick();
    if (timeout == -2 || speak() < 0) return -1;
    watch_everything();
    /* Frames may wait in the input buffer because the queue was full when they came. */
    if (guest_channel.in_end - guest_channel.in_start >= FRAME_HEADER && channel_room(&guest_channel) >= CHANNEL_RESERVE) {
        size_t before = guest_channel.in_start;
        if (listen_to_host() < 0) return -1;
        if (guest_channel.in_start != before) timeout = 0;
        watch_everything();
    }
    int net = net_timeout();
    if (net >= 0 && (timeout < 0 || net < timeout)) timeout = net;
    if (poll(polls, watch_count, timeout) < 0) return errno == EINTR ? 0 : -1;
    /* Commands and connections share the queue to the host: who comes first changes, so neither starves the other. */
    net_first = !net_first;
    if (net_first && net_turn() < 0) return -1;
    for (size_t i = watch_count; i-- > 0;) {
        if (polls[i].revents != 0 && dispatch(&watches[i], polls[i].revents) < 0) return -1;
    }
    return net_first ? 0 : net_turn();
}

static int prepare(int channel_fd, const struct guest_config *config) {
    sigset_t all;
    if (prctl(PR_SET_DUMPABLE, 0) < 0 || exec_prepare(&setup, config) < 0) return -1;
    if (!config->is_init && prctl(PR_SET_CHILD_SUBREAPER, 1) < 0) return -1;
    for (int signal = 1; signal < NSIG; signal++) {
        struct sigaction action = {.sa_handler = SIG_DFL};
        sigaction(signal, &action, NULL); /* fails for those that cannot be changed, which is as good */
    }
    sigfillset(&all);
    if (sigprocmask(SIG_SETMASK, &all, NULL) < 0) return -1;
    sigemptyset(&all);
    sigaddset(&all, SIGCHLD);
    signal_fd = signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK);
    guest_channel.fd = channel_fd;
    attach_fd = config->attach_fd;
    tell_prepare(attach_fd >= 0);
    guest_channel.out_fd = config->channel_out_fd;
    group_mark_resource(config->mark_resource);
    if (signal_fd < 0 || fcntl(channel_fd, F_SETFD, FD_CLOEXEC) < 0) return -1;
    return say_hello(0);
}

int guest_main(int channel_fd, const struct guest_config *config) {
    if (prepare(channel_fd, config) < 0) return 71;
    while (turn() == 0) continue;
    /* The host has gone, or has lied, or we cannot go on: nothing of the sandbox may survive. */
    int64_t deadline = now_ms() + KILLALL_MS;
    while (kill_round() > 0 && now_ms() < deadline) {
        reap();
        poll(NULL, 0, TICK_MS);
    }
    return 0;
}
