/* The streams of commands: pipes on one side, frames with credit on the other. Neither side can make the guest hold more than
 * one window for each stream. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "table.h"
#include "tell.h"

enum {
    CREDIT_STEP = 65536,
    TERMINAL_MAX = 131072, /* more than a terminal holds on its way from its writers to us */
};

static _Alignas(4096) uint8_t input_rings[EXECS_MAX][WINDOW_INITIAL];

static uint8_t *ring_of(const struct exec *exec) { return input_rings[exec - guest_execs]; }

int finish_output(struct exec *exec, uint8_t sub, bool close_it) {
    struct output *output = &exec->outputs[sub];
    if (close_it) close_fd(&output->fd);
    output->left = 0;
    return tell_end_of_output(exec, sub);
}

bool output_open(const struct exec *exec, uint8_t sub) {
    return exec->outputs[sub].fd >= 0 && exec->outputs[sub].left != 0;
}

int pump_output(struct exec *exec, uint8_t sub) {
    struct output *output = &exec->outputs[sub];
    size_t limit = FRAME_PAYLOAD_MAX;
    uint8_t *payload = tell_is_durable() ? tell_room(exec, sub, &limit) : channel_reserve(&guest_channel);
    if (payload == NULL || output->credit == 0) return 0;
    if (limit > output->credit) limit = output->credit;
    if (output->left >= 0 && (uint64_t)output->left < limit) limit = (size_t)output->left;
    ssize_t got = read(output->fd, payload, limit);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return output->left < 0 ? 0 : finish_output(exec, sub, !exec->keeping);
    }
    if (got <= 0) return finish_output(exec, sub, true);
    output->credit -= (uint32_t)got;
    if (!tell_is_durable())
        channel_commit(&guest_channel, FRAME_DATA, exec->id, sub, (uint32_t)got);
    else if (tell_took(exec, sub, (uint32_t)got) < 0)
        return -1;
    if (output->left > 0) output->left -= got;
    if (exec->terminal && output->left > 0 && !terminal_readable(output->fd)) output->left = 0;
    return output->left == 0 ? finish_output(exec, sub, !exec->keeping) : 0;
}

int limit_outputs(struct exec *exec) {
    for (uint8_t sub = SUB_STDOUT; sub < SUB_COUNT; sub++) {
        int waiting = 0;
        if (!output_open(exec, sub)) continue;
        if (exec->terminal && sub == SUB_STDOUT)
            waiting = terminal_readable(exec->outputs[sub].fd) ? TERMINAL_MAX : 0;
        else if (ioctl(exec->outputs[sub].fd, FIONREAD, &waiting) < 0)
            waiting = 0;
        if (exec->outputs[sub].left < 0 || exec->outputs[sub].left > waiting) exec->outputs[sub].left = waiting;
        if (waiting == 0 && finish_output(exec, sub, !exec->keeping) < 0) return -1;
    }
    return 0;
}

int end_input(struct exec *exec, bool tell) {
    struct input *input = &exec->input;
    if (input->fd < 0) return 0;
    close_fd(&input->fd);
    input->used = 0;
    /* The pages held a command's input; they are given back and zeroed. */
    madvise(ring_of(exec), WINDOW_INITIAL, MADV_DONTNEED);
    return tell ? tell_end_of_input(exec) : 0;
}

int pump_input(struct exec *exec) {
    struct input *input = &exec->input;
    while (input->fd >= 0 && input->used > 0) {
        uint32_t run = WINDOW_INITIAL - input->start;
        if (run > input->used) run = input->used;
        ssize_t written = write(input->fd, ring_of(exec) + input->start, run);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0 && errno == EAGAIN) break;
        if (written < 0) return end_input(exec, true);
        input->start = (input->start + (uint32_t)written) % WINDOW_INITIAL;
        input->used -= (uint32_t)written;
        input->owed += (uint32_t)written;
    }
    if (input->fd >= 0 && input->used == 0 && input->ended) return end_input(exec, false);
    if (input->ended || input->fd < 0 || input->owed == 0 || (input->owed < CREDIT_STEP && input->used > 0)) return 0;
    uint32_t credit = input->owed;
    input->window += credit;
    input->owed = 0;
    return send_u32(FRAME_CREDIT, exec->id, SUB_STDIN, credit);
}

int take_input(struct exec *exec, const struct frame *frame) {
    struct input *input = &exec->input;
    if ((exec->flags & EXEC_STDIN) == 0 || input->ended || frame->length > input->window) return -1;
    input->window -= frame->length;
    input->taken += frame->length;
    if (input->fd < 0 && !input->waiting) return 0; /* the child no longer reads; the host will learn it from our EOF */
    uint8_t *ring = ring_of(exec);
    uint32_t at = (input->start + input->used) % WINDOW_INITIAL, first = WINDOW_INITIAL - at;
    if (first > frame->length) first = frame->length;
    memcpy(ring + at, frame->payload, first);
    memcpy(ring, frame->payload + first, frame->length - first);
    input->used += frame->length;
    return pump_input(exec);
}

/* A terminal is not ended by closing it, as long as somebody has it open: its reader is told by a character, as by a person. */
int finish_input(struct exec *exec) {
    struct input *input = &exec->input;
    input->ended = true;
    if (exec->terminal && input->fd >= 0 && input->used < WINDOW_INITIAL) {
        ring_of(exec)[(input->start + input->used) % WINDOW_INITIAL] = terminal_end_mark(input->fd);
        input->used++;
    }
    return pump_input(exec);
}

int connect_terminal(struct exec *exec, int terminal) {
    exec->input.waiting = false;
    exec->outputs[SUB_STDOUT].fd = terminal;
    exec->input.fd = fcntl(terminal, F_DUPFD_CLOEXEC, 0);
    if (exec->input.fd < 0) return end_input(exec, true);
    return exec->input.ended ? finish_input(exec) : pump_input(exec);
}
