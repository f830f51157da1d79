/* Frames of the guest protocol (docs/design/guest-protocol.md) over one stream socket, or a pair of non-blocking descriptors. */
#ifndef PROCTOR_FRAME_H
#define PROCTOR_FRAME_H

#include <stddef.h>
#include <stdint.h>

enum {
    PROTOCOL_VERSION = 2,
    FRAME_HEADER = 12,
    FRAME_PAYLOAD_MAX = 65536,
    WINDOW_INITIAL = 262144,
    REQUEST_MAX = 2 << 20,
};

enum frame_type {
    FRAME_HELLO = 1,
    FRAME_EXEC = 2,
    FRAME_STARTED = 3,
    FRAME_DATA = 4,
    FRAME_EOF = 5,
    FRAME_CREDIT = 6,
    FRAME_KILL = 7,
    FRAME_EXITED = 8,
    FRAME_FAILED = 9,
    FRAME_CLOSED = 10,
    FRAME_KILLALL = 11,
    FRAME_KILLED = 12,
    FRAME_PING = 13,
    FRAME_PONG = 14,
    FRAME_GONE = 15,
    FRAME_LISTEN = 16, /* 16 to 31: the carried network (net.c) */
    FRAME_LISTENING = 17,
    FRAME_UNLISTEN = 18,
    FRAME_UNLISTENED = 19,
    FRAME_ACCEPTED = 20,
    FRAME_CONNECT = 21,
    FRAME_CONNECTED = 22,
    FRAME_RESET = 23,
    FRAME_QUERY = 24,
    FRAME_REFUSED = 25,
    FRAME_NETWORK_LAST = 31,
    FRAME_RESIZE = 32,
    FRAME_RESUME = 33, /* 33 to 35: guests that outlive their host (tell.c) */
    FRAME_RESUMED = 34,
    FRAME_DONE = 35,
};

/* Streams that the guest numbers: connections and name queries of the carried network. */
#define GUEST_ID 0x80000000u

enum hello_flags { HELLO_GROUPS = 1, HELLO_DURABLE = 2, HELLO_RESUMED = 4 };

enum sub_stream { SUB_STDIN = 0, SUB_STDOUT = 1, SUB_STDERR = 2, SUB_REPORT = 3, SUB_COUNT = 4 };

enum {
    CHANNEL_IN = 4 * (FRAME_HEADER + FRAME_PAYLOAD_MAX),
    CHANNEL_OUT = 4 * (FRAME_HEADER + FRAME_PAYLOAD_MAX),
    /* Room that is never given to output data, so that every control frame that one turn of the event loop can
     * produce always fits: 128 execs and 256 kept groups, about 150 bytes each. */
    CHANNEL_RESERVE = 65536,
};

struct frame {
    uint32_t length, stream;
    uint8_t type, sub;
    const uint8_t *payload;
};

struct channel {
    int fd;
    int out_fd; /* 0 = `fd`, which then is a socket */
    size_t in_start, in_end, out_start, out_end;
    uint8_t in[CHANNEL_IN];
    uint8_t out[CHANNEL_OUT];
};

static inline void put_u32(uint8_t *to, uint32_t value) {
    for (int i = 0; i < 4; i++) to[i] = (uint8_t)(value >> (8 * i));
}
static inline void put_u64(uint8_t *to, uint64_t value) {
    for (int i = 0; i < 8; i++) to[i] = (uint8_t)(value >> (8 * i));
}
static inline uint32_t get_u32(const uint8_t *from) {
    return (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}
static inline uint64_t get_u64(const uint8_t *from) { return get_u32(from) | (uint64_t)get_u32(from + 4) << 32; }

/* Reads what is there. 1 = something came (or the buffer is full), 0 = nothing now, -1 = the other side has ended or failed. */
int channel_fill(struct channel *channel);

/* Takes one whole frame out of the input; its payload is valid until the next channel_fill. 1 = taken, 0 = not yet whole,
 * -1 = malformed. */
int channel_next(struct channel *channel, struct frame *frame);

/* Sends what it can. 0 = sent or would block, -1 = the other side has ended or failed. */
int channel_flush(struct channel *channel);

/* Bytes that can still be queued. */
size_t channel_room(const struct channel *channel);

/* Where frames go out. */
static inline int channel_out(const struct channel *channel) { return channel->out_fd > 0 ? channel->out_fd : channel->fd; }

static inline int channel_pending(const struct channel *channel) { return channel->out_start != channel->out_end; }

/* Queues one frame; without a host it is dropped. The caller has made sure that it fits (CHANNEL_RESERVE); -1 if it does not, which is a bug. */
int channel_put(struct channel *channel, enum frame_type type, uint32_t stream, uint8_t sub, const void *payload, uint32_t length);

/* For data that is read straight into the queue: where its payload goes (NULL when a whole frame beside the reserve does not
 * fit), and the call that completes the frame. */
uint8_t *channel_reserve(struct channel *channel);
void channel_commit(struct channel *channel, enum frame_type type, uint32_t stream, uint8_t sub, uint32_t length);

#endif
