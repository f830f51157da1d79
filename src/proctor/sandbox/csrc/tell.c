#include "tell.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { TOLD_STARTED = 1, TOLD_EXITED = 2, TOLD_LAST = 4, TOLD_END = 8 /* shifted by the sub-stream */, FACT_ROOM = 256 };
enum { RESUME_STARTED = 16, RESUME_INPUT = 32, RESUME_TERMINAL = 64 };

/* Output that was sent and is not acknowledged, or not sent yet. Untouched pages cost nothing. */
static _Alignas(4096) uint8_t output_rings[EXECS_MAX][SUB_COUNT - 1][WINDOW_INITIAL];
static bool durable;

void tell_prepare(bool is_durable) { durable = is_durable; }
bool tell_is_durable(void) { return durable; }

static uint8_t *ring_of(const struct exec *exec, uint8_t sub) { return output_rings[exec - guest_execs][sub - 1]; }

static void forget(struct exec *exec) {
    for (uint8_t sub = SUB_STDOUT; sub < SUB_COUNT && durable; sub++) madvise(ring_of(exec, sub), WINDOW_INITIAL, MADV_DONTNEED);
    exec->id = 0;
}

/* ---- single facts ------------------------------------------------------------------------------------------------- */

static int put_failed(uint32_t id, int error, const char *step) {
    uint8_t payload[4 + 60];
    size_t length = strnlen(step, 60);
    put_u32(payload, (uint32_t)error);
    memcpy(payload + 4, step, length);
    return channel_put(&guest_channel, FRAME_FAILED, id, 0, payload, (uint32_t)(4 + length));
}

static int put_exited(const struct exec *exec) {
    uint8_t payload[36];
    int status = exec->wait_status;
    const struct rusage *usage = &exec->usage;
    put_u32(payload, WIFEXITED(status) ? (uint32_t)WEXITSTATUS(status) : (uint32_t)-1);
    put_u32(payload + 4, WIFSIGNALED(status) ? (uint32_t)WTERMSIG(status) : 0);
    put_u64(payload + 8, (uint64_t)usage->ru_utime.tv_sec * 1000000 + (uint64_t)usage->ru_utime.tv_usec);
    put_u64(payload + 16, (uint64_t)usage->ru_stime.tv_sec * 1000000 + (uint64_t)usage->ru_stime.tv_usec);
    put_u64(payload + 24, (uint64_t)usage->ru_maxrss);
    put_u32(payload + 32, exec->leftover);
    return channel_put(&guest_channel, FRAME_EXITED, exec->id, exec->at_limit, payload, sizeof payload);
}

/* ---- durable: what is due ---------------------------------------------------------------------------------------------- */

static int tell_once(struct exec *exec, uint16_t mark, int (*put)(const struct exec *)) {
    if (exec->told & mark) return 0;
    if (channel_room(&guest_channel) < FACT_ROOM) return 0;
    exec->told |= mark;
    return put(exec);
}

static int put_started(const struct exec *exec) { return send_u32(FRAME_STARTED, exec->id, 0, (uint32_t)exec->pid); }
static int put_closed(const struct exec *exec) { return send_u32(FRAME_CLOSED, exec->id, 0, exec->kept); }
static int put_failure(const struct exec *exec) { return put_failed(exec->id, exec->failed_errno, exec->failed_step); }
static int put_input_end(const struct exec *exec) { return channel_put(&guest_channel, FRAME_EOF, exec->id, SUB_STDIN, NULL, 0); }

static int tell_output(struct exec *exec, uint8_t sub) {
    struct output *output = &exec->outputs[sub];
    const uint8_t *ring = ring_of(exec, sub);
    uint8_t *payload;
    while (output->held > output->sent && (payload = channel_reserve(&guest_channel)) != NULL) {
        uint32_t at = (output->start + output->sent) % WINDOW_INITIAL, count = output->held - output->sent;
        if (count > WINDOW_INITIAL - at) count = WINDOW_INITIAL - at;
        if (count > FRAME_PAYLOAD_MAX) count = FRAME_PAYLOAD_MAX;
        memcpy(payload, ring + at, count);
        channel_commit(&guest_channel, FRAME_DATA, exec->id, sub, count);
        output->sent += count;
    }
    uint16_t mark = (uint16_t)(TOLD_END << sub);
    if (!output->ended || output->held > output->sent || (exec->told & mark) || channel_room(&guest_channel) < FACT_ROOM) return 0;
    exec->told |= mark;
    return channel_put(&guest_channel, FRAME_EOF, exec->id, sub, NULL, 0);
}

static bool all_told(const struct exec *exec) {
    for (uint8_t sub = SUB_STDOUT; sub < SUB_COUNT; sub++) {
        if ((exec->subs >> sub & 1) && !(exec->told & TOLD_END << sub)) return false;
    }
    return (exec->told & TOLD_EXITED) != 0;
}

static int tell_due(struct exec *exec) {
    if (!durable || guest_channel.fd < 0) return 0;
    if (exec->over && exec->failed_step[0] != '\0') return tell_once(exec, TOLD_LAST, put_failure);
    if (exec->started && tell_once(exec, TOLD_STARTED, put_started) < 0) return -1;
    for (uint8_t sub = SUB_STDOUT; sub < SUB_COUNT; sub++) {
        if ((exec->subs >> sub & 1) && tell_output(exec, sub) < 0) return -1;
    }
    if (exec->input.gone && !exec->over && tell_once(exec, TOLD_END, put_input_end) < 0) return -1;
    if (exec->exited && tell_once(exec, TOLD_EXITED, put_exited) < 0) return -1;
    return exec->over && all_told(exec) ? tell_once(exec, TOLD_LAST, put_closed) : 0;
}

int tell_all(void) {
    for (size_t i = 0; i < EXECS_MAX && durable; i++) {
        if (guest_execs[i].id != 0 && tell_due(&guest_execs[i]) < 0) return -1;
    }
    return 0;
}

uint8_t *tell_room(struct exec *exec, uint8_t sub, size_t *room) {
    const struct output *output = &exec->outputs[sub];
    uint32_t at = (output->start + output->held) % WINDOW_INITIAL;
    *room = WINDOW_INITIAL - at < WINDOW_INITIAL - output->held ? WINDOW_INITIAL - at : WINDOW_INITIAL - output->held;
    return ring_of(exec, sub) + at;
}

int tell_took(struct exec *exec, uint8_t sub, uint32_t count) {
    exec->outputs[sub].held += count;
    return tell_due(exec);
}

int tell_acknowledged(struct exec *exec, uint8_t sub, uint32_t count) {
    struct output *output = &exec->outputs[sub];
    if (!(exec->subs >> sub & 1) || count > output->sent) return -1;
    output->start = (output->start + count) % WINDOW_INITIAL;
    output->held -= count;
    output->sent -= count;
    output->acknowledged += count;
    return 0;
}

static int tell_resume(const struct exec *exec) {
    uint8_t payload[40];
    uint32_t facts = exec->subs;
    facts |= exec->started ? RESUME_STARTED : 0u;
    facts |= (exec->flags & EXEC_STDIN) != 0 && !exec->input.gone && !exec->input.ended ? RESUME_INPUT : 0u;
    facts |= exec->terminal ? RESUME_TERMINAL : 0u;
    put_u32(payload, facts);
    put_u32(payload + 4, exec->input.window + exec->input.owed);
    put_u64(payload + 8, exec->input.taken);
    for (int sub = SUB_STDOUT; sub < SUB_COUNT; sub++) put_u64(payload + 8 + 8 * sub, exec->outputs[sub].acknowledged);
    return channel_put(&guest_channel, FRAME_RESUME, exec->id, 0, payload, sizeof payload);
}

int tell_again(uint32_t last_id) {
    for (size_t i = 0; i < EXECS_MAX; i++) {
        struct exec *exec = &guest_execs[i];
        if (exec->id == 0) continue;
        if (tell_resume(exec) < 0) return -1;
        /* The window that it was told includes what would have been given back later. */
        exec->input.window += exec->input.owed;
        exec->input.owed = 0;
        exec->told = exec->started ? TOLD_STARTED : 0;
        if (exec->input.gone || exec->input.ended) exec->told |= TOLD_END;
        for (int sub = SUB_STDOUT; sub < SUB_COUNT; sub++) exec->outputs[sub].sent = 0;
    }
    return send_u32(FRAME_RESUMED, 0, 0, last_id);
}

/* ---- both ways --------------------------------------------------------------------------------------------------------- */

int tell_started(struct exec *exec) {
    exec->started = (exec->flags & EXEC_STARTED) != 0;
    if (durable) return tell_due(exec);
    return exec->started ? put_started(exec) : 0;
}

int tell_exited(struct exec *exec, uint32_t leftover) {
    exec->leftover = leftover;
    return durable ? tell_due(exec) : put_exited(exec);
}

int tell_end_of_output(struct exec *exec, uint8_t sub) {
    exec->outputs[sub].ended = true;
    return durable ? tell_due(exec) : channel_put(&guest_channel, FRAME_EOF, exec->id, sub, NULL, 0);
}

int tell_end_of_input(struct exec *exec) {
    exec->input.gone = true;
    return durable ? tell_due(exec) : put_input_end(exec);
}

int tell_closed(struct exec *exec, bool kept) {
    exec->over = exec->empty = true;
    exec->keeping = false;
    exec->kept = kept;
    if (durable) return tell_due(exec);
    int result = put_closed(exec);
    forget(exec);
    return result;
}

int tell_failed(struct exec *exec) {
    exec->over = exec->empty = true;
    if (durable) return tell_due(exec);
    int result = put_failure(exec);
    forget(exec);
    return result;
}

bool tell_closed_told(const struct exec *exec) { return (exec->told & TOLD_LAST) != 0; }

int tell_done(struct exec *exec) {
    if (!durable || !(exec->told & TOLD_LAST)) return -1;
    forget(exec);
    return 0;
}

int tell_refused(uint32_t id, int error, const char *step) { return put_failed(id, error, step); }
