#include "frame.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int channel_fill(struct channel *channel) {
    if (channel->in_start > 0) {
        memmove(channel->in, channel->in + channel->in_start, channel->in_end - channel->in_start);
        channel->in_end -= channel->in_start;
        channel->in_start = 0;
    }
    if (channel->in_end == CHANNEL_IN) return 1;
    uint8_t *to = channel->in + channel->in_end;
    size_t room = CHANNEL_IN - channel->in_end;
    ssize_t got = channel->out_fd > 0 ? read(channel->fd, to, room) : recv(channel->fd, to, room, MSG_DONTWAIT);
    if (got > 0) {
        channel->in_end += (size_t)got;
        return 1;
    }
    return got < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

int channel_next(struct channel *channel, struct frame *frame) {
    size_t have = channel->in_end - channel->in_start;
    if (have < FRAME_HEADER) return 0;
    const uint8_t *header = channel->in + channel->in_start;
    frame->length = get_u32(header);
    frame->stream = get_u32(header + 4);
    frame->type = header[8];
    frame->sub = header[9];
    if (frame->length > FRAME_PAYLOAD_MAX || header[10] != 0 || header[11] != 0) return -1;
    if (have < FRAME_HEADER + frame->length) return 0;
    frame->payload = header + FRAME_HEADER;
    channel->in_start += FRAME_HEADER + frame->length;
    return 1;
}

int channel_flush(struct channel *channel) {
    while (channel_pending(channel)) {
        const uint8_t *from = channel->out + channel->out_start;
        size_t left = channel->out_end - channel->out_start;
        ssize_t sent = channel->out_fd > 0 ? write(channel->out_fd, from, left) /* SIGPIPE is blocked in the guest */
                                           : send(channel->fd, from, left, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
        channel->out_start += (size_t)sent;
    }
    channel->out_start = channel->out_end = 0;
    return 0;
}

size_t channel_room(const struct channel *channel) { return CHANNEL_OUT - (channel->out_end - channel->out_start); }

/* Makes the free space contiguous when the end of the buffer is too near. */
static int make_room(struct channel *channel, size_t wanted) {
    if (CHANNEL_OUT - channel->out_end >= wanted) return 0;
    if (channel_room(channel) < wanted) return -1;
    memmove(channel->out, channel->out + channel->out_start, channel->out_end - channel->out_start);
    channel->out_end -= channel->out_start;
    channel->out_start = 0;
    return 0;
}

static void put_header(uint8_t *to, enum frame_type type, uint32_t stream, uint8_t sub, uint32_t length) {
    put_u32(to, length);
    put_u32(to + 4, stream);
    to[8] = (uint8_t)type;
    to[9] = sub;
    to[10] = to[11] = 0;
}

int channel_put(struct channel *channel, enum frame_type type, uint32_t stream, uint8_t sub, const void *payload, uint32_t length) {
    if (channel->fd < 0) return 0;
    if (length > FRAME_PAYLOAD_MAX || make_room(channel, FRAME_HEADER + length) < 0) return -1;
    put_header(channel->out + channel->out_end, type, stream, sub, length);
    if (length > 0) memcpy(channel->out + channel->out_end + FRAME_HEADER, payload, length);
    channel->out_end += FRAME_HEADER + length;
    return 0;
}

uint8_t *channel_reserve(struct channel *channel) {
    if (channel->fd < 0 || channel_room(channel) < CHANNEL_RESERVE + FRAME_HEADER + FRAME_PAYLOAD_MAX) return NULL;
    if (make_room(channel, FRAME_HEADER + FRAME_PAYLOAD_MAX) < 0) return NULL;
    return channel->out + channel->out_end + FRAME_HEADER;
}

void channel_commit(struct channel *channel, enum frame_type type, uint32_t stream, uint8_t sub, uint32_t length) {
    put_header(channel->out + channel->out_end, type, stream, sub, length);
    channel->out_end += FRAME_HEADER + length;
}
