/* Listeners, connects and name queries of the carried network, and the event loop's view of all of it. The connections
 * themselves are in carry.c. */
#include "net.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "carry.h"
#include "table.h"

enum {
    EVENTS = 64,         /* taken from the kernel in one turn */
    ACCEPTS = 16,        /* in one turn */
    QUERIES = 32,        /* in one turn */
    BACKLOG = 256,
    REPORT_MS = 200,     /* between two reports of what was refused */
    QUERY_HEADER = 12,   /* bytes that every name query has (RFC 1035, 4.1.1) */
    LISTEN_NAMES = 1,    /* sub of LISTEN: name queries in datagrams instead of connections */
};

enum refusal { REFUSED_RATE, REFUSED_TABLE, REFUSED_MALFORMED, REFUSALS };

struct listener {
    uint32_t id; /* 0 = free, or parked */
    int fd;
    struct sockaddr_in address;
    bool parked;  /* of a host that is gone: it takes nothing, but keeps its address for the next one */
    bool names;   /* datagrams with queries; otherwise connections */
    bool waiting; /* something may be there to be taken */
};

struct query {
    uint32_t id; /* 0 = free */
    uint32_t generation;
    int listener;
    struct sockaddr_in from;
};

/* Tokens in thousandths, so that a millisecond is never too short to give one. */
struct bucket {
    int64_t level, at_ms;
    int rate, burst;
};

static struct listener listeners[LISTENERS_MAX];
static size_t listeners_end;   /* all listeners are below */
static size_t listener_next;   /* whose turn it is to be accepted from */
static size_t listeners_waiting;
static struct query queries[QUERIES_MAX];
static size_t query_next;
static struct bucket accepts = {.rate = ACCEPT_RATE, .burst = ACCEPT_BURST};
static struct bucket lookups = {.rate = QUERY_RATE, .burst = QUERY_BURST};
static uint32_t refused[REFUSALS];
static int64_t reported_ms;
static int poller = -1;

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void bucket_fill(struct bucket *bucket, int64_t now) {
    if (bucket->at_ms == 0) bucket->level = (int64_t)bucket->burst * 1000;
    else bucket->level += (now - bucket->at_ms) * bucket->rate;
    if (bucket->level > (int64_t)bucket->burst * 1000) bucket->level = (int64_t)bucket->burst * 1000;
    bucket->at_ms = now;
}

static bool bucket_take(struct bucket *bucket) {
    if (bucket->level < 1000) return false;
    bucket->level -= 1000;
    return true;
}

static int send_errno(enum frame_type type, uint32_t stream, int error) { return send_u32(type, stream, 0, (uint32_t)error); }

/* ---- listeners ----------------------------------------------------------------------------------------------------------- */

static struct sockaddr_in address_of(const uint8_t *payload) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(payload[4] | payload[5] << 8))};
    memcpy(&address.sin_addr, payload, 4);
    return address;
}

static void set_waiting(struct listener *listener, bool waiting) {
    if (listener->waiting == waiting) return;
    listener->waiting = waiting;
    if (waiting) listeners_waiting++;
    else listeners_waiting--;
}

static int open_listener(const struct sockaddr_in *address, bool names) {
    int fd = socket(AF_INET, (names ? SOCK_DGRAM : SOCK_STREAM) | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    int one = 1;
    /* Without SO_REUSEADDR a connection in TIME_WAIT would keep the port. Never for datagrams: there it would let a
     * program of the candidate share the port. */
    bool bad = (!names && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) < 0) ||
               bind(fd, (const struct sockaddr *)address, sizeof *address) < 0 || (!names && listen(fd, BACKLOG) < 0);
    if (!bad) return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Nothing may come in while there is no host: whoever tries is refused at once. Closing it instead would give the address away,
 * to whatever program of the sandbox binds it first, and not for sure: a child that was forked a moment ago still holds a copy. */
static int park(struct listener *listener) {
    static uint8_t dropped[QUERY_HEADER];
    const int zero = 0;
    const struct sockaddr *itself = (const struct sockaddr *)&listener->address;
    set_waiting(listener, false);
    epoll_ctl(poller, EPOLL_CTL_DEL, listener->fd, NULL);
    listener->id = 0;
    listener->parked = true;
    if (!listener->names) {
        if (setsockopt(listener->fd, SOL_SOCKET, SO_REUSEADDR, &zero, sizeof zero) < 0) return -1;
        return shutdown(listener->fd, SHUT_RDWR);
    }
    if (connect(listener->fd, itself, sizeof listener->address) < 0) return -1; /* then the kernel takes nobody else's datagrams */
    while (recv(listener->fd, dropped, sizeof dropped, MSG_DONTWAIT | MSG_TRUNC) >= 0 || errno != EAGAIN) continue;
    return 0;
}

static int unpark(struct listener *listener) {
    const int one = 1;
    const struct sockaddr nobody = {.sa_family = AF_UNSPEC};
    listener->parked = false;
    if (listener->names) return connect(listener->fd, &nobody, sizeof nobody);
    return setsockopt(listener->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) < 0 ? -1 : listen(listener->fd, BACKLOG);
}

static void drop_parked(struct listener *listener) {
    listener->parked = false;
    close_fd(&listener->fd);
}

static bool is_parked_at(const struct listener *listener, const struct sockaddr_in *address, bool names) {
    return listener->parked && listener->names == names && listener->address.sin_port == address->sin_port &&
           listener->address.sin_addr.s_addr == address->sin_addr.s_addr;
}

/* The parked one of that address, else a free place, else that of one whose address nobody has asked for again. NULL: none. */
static struct listener *find_place(const struct sockaddr_in *address, bool names) {
    struct listener *place = NULL;
    for (size_t i = 0; i < LISTENERS_MAX; i++) {
        struct listener *listener = &listeners[i];
        if (is_parked_at(listener, address, names)) return listener;
        if (listener->id == 0 && (place == NULL || (place->parked && !listener->parked))) place = listener;
        if (i >= listeners_end) break; /* from here on all are free */
    }
    return place;
}

static int add_listener(uint32_t id, const struct sockaddr_in *address, bool names) {
    struct listener *place = find_place(address, names);
    if (place == NULL) return ENFILE;
    if (place->parked && (!is_parked_at(place, address, names) || unpark(place) < 0)) drop_parked(place);
    size_t slot = (size_t)(place - listeners);
    if (place->fd <= 0) place->fd = open_listener(address, names);
    if (place->fd < 0) return errno;
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = (uint64_t)EVENT_LISTENER << 56 | slot << 32 | id};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, place->fd, &event) < 0) {
        int error = errno;
        close_fd(&place->fd);
        return error;
    }
    *place = (struct listener){.id = id, .fd = place->fd, .address = *address, .names = names};
    if (slot >= listeners_end) listeners_end = slot + 1;
    return 0;
}

static struct listener *find_listener(uint32_t id) {
    for (size_t i = 0; i < listeners_end; i++) {
        if (listeners[i].id == id) return &listeners[i];
    }
    return NULL;
}

/* Nothing is set up in a sandbox that has no network. */
static int prepare(void) {
    if (poller >= 0) return 0;
    poller = epoll_create1(EPOLL_CLOEXEC);
    return poller < 0 ? -1 : connections_prepare(poller);
}

static int on_listen(const struct frame *frame) {
    if (frame->length != 6 || frame->sub > LISTEN_NAMES || find_listener(frame->stream) != NULL || prepare() < 0) return -1;
    const struct sockaddr_in address = address_of(frame->payload);
    return send_errno(FRAME_LISTENING, frame->stream, add_listener(frame->stream, &address, frame->sub == LISTEN_NAMES));
}

static int on_unlisten(const struct frame *frame) {
    struct listener *listener = find_listener(frame->stream);
    if (frame->length != 0) return -1;
    /* One that could not be opened: the two crossed on the way. */
    if (listener == NULL) return channel_put(&guest_channel, FRAME_UNLISTENED, frame->stream, 0, NULL, 0);
    set_waiting(listener, false);
    epoll_ctl(poller, EPOLL_CTL_DEL, listener->fd, NULL);
    close_fd(&listener->fd);
    for (size_t i = 0; i < QUERIES_MAX && listener->names; i++) {
        if (queries[i].id != 0 && queries[i].listener == (int)(listener - listeners)) queries[i].listener = -1;
    }
    listener->id = 0;
    return channel_put(&guest_channel, FRAME_UNLISTENED, frame->stream, 0, NULL, 0);
}

/* Takes one connection. 1 = taken, 0 = none there, -1 = we cannot go on. */
static int accept_one(struct listener *listener) {
    struct sockaddr_in peer = {0};
    socklen_t size = sizeof peer;
    int fd = accept4(listener->fd, (struct sockaddr *)&peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        /* A connection that was gone before we took it is no reason to stop; anything else waits for the next event. */
        if (errno == ECONNABORTED || errno == EINTR || errno == EPROTO) return 1;
        set_waiting(listener, false);
        return 0;
    }
    uint8_t payload[10];
    put_u32(payload, listener->id);
    memcpy(payload + 4, &peer.sin_addr, 4);
    payload[8] = (uint8_t)ntohs(peer.sin_port);
    payload[9] = (uint8_t)(ntohs(peer.sin_port) >> 8);
    uint32_t id = connection_open(fd, 0);
    if (id == 0) {
        close(fd);
        return 1;
    }
    return channel_put(&guest_channel, FRAME_ACCEPTED, id, 0, payload, sizeof payload) < 0 ? -1 : 1;
}

/* One connection from each listener in turn, so that a busy one cannot starve the others. */
static int accept_some(void) {
    int taken = 0;
    for (size_t passed = 0; passed < listeners_end && taken < ACCEPTS && listeners_waiting > 0; passed++) {
        if (listener_next >= listeners_end) listener_next = 0;
        struct listener *listener = &listeners[listener_next++];
        if (listener->id == 0 || !listener->waiting || listener->names) continue;
        if (connections_full() || !net_has_room() || !bucket_take(&accepts)) return 0;
        int result = accept_one(listener);
        if (result < 0) return -1;
        if (result > 0) {
            taken++;
            passed = 0;
        }
    }
    return 0;
}

/* ---- name queries --------------------------------------------------------------------------------------------------------- */

static struct query *free_query(void) {
    for (size_t i = 0; i < QUERIES_MAX; i++) {
        struct query *query = &queries[query_next++ % QUERIES_MAX];
        if (query->id == 0) return query;
    }
    return NULL;
}

static void refuse(enum refusal why) {
    if (refused[why] < UINT32_MAX) refused[why]++;
}

static int forward_queries(struct listener *listener) {
    static uint8_t datagram[QUERY_MAX + 1];
    for (int i = 0; i < QUERIES; i++) {
        if (!net_has_room()) return 0;
        struct sockaddr_in from = {0};
        socklen_t size = sizeof from;
        ssize_t got = recvfrom(listener->fd, datagram, sizeof datagram, MSG_DONTWAIT, (struct sockaddr *)&from, &size);
        if (got < 0 && errno != EAGAIN) continue; /* an answer that could not be delivered, told here */
        if (got < 0) {
            set_waiting(listener, false);
            return 0;
        }
        if (got < QUERY_HEADER || got > QUERY_MAX) {
            refuse(REFUSED_MALFORMED);
            continue;
        }
        if (!bucket_take(&lookups)) {
            refuse(REFUSED_RATE);
            continue;
        }
        struct query *query = free_query();
        if (query == NULL) {
            refuse(REFUSED_TABLE);
            continue;
        }
        query->generation = (query->generation + 1) & 0xffffff;
        query->id = GUEST_ID | query->generation << 7 | (uint32_t)(query - queries);
        query->listener = (int)(listener - listeners);
        query->from = from;
        if (channel_put(&guest_channel, FRAME_QUERY, query->id, 0, datagram, (uint32_t)got) < 0) return -1;
    }
    return 0;
}

static int on_answer(const struct frame *frame) {
    struct query *query = &queries[frame->stream % QUERIES_MAX];
    if (query->id != frame->stream || frame->stream == 0) return -1; /* only the host can end a query */
    query->id = 0;
    if (query->listener < 0 || frame->length == 0) return 0;
    /* What cannot be delivered is lost, as datagrams are. */
    ssize_t sent = sendto(listeners[query->listener].fd, frame->payload, frame->length, MSG_DONTWAIT | MSG_NOSIGNAL,
                          (const struct sockaddr *)&query->from, sizeof query->from);
    (void)sent;
    return 0;
}

static int report_refusals(int64_t now) {
    uint8_t payload[4 * REFUSALS];
    bool any = false;
    for (int i = 0; i < REFUSALS; i++) {
        put_u32(payload + 4 * i, refused[i]);
        any |= refused[i] != 0;
    }
    if (!any || now - reported_ms < REPORT_MS) return 0;
    memset(refused, 0, sizeof refused);
    reported_ms = now;
    return channel_put(&guest_channel, FRAME_REFUSED, 0, 0, payload, sizeof payload);
}

/* ---- connects: into the sandbox --------------------------------------------------------------------------------------------- */

static int on_connect(const struct frame *frame) {
    enum { IPV4 = 4 + 2, IPV6 = 16 + 2 };
    if ((frame->length != IPV4 && frame->length != IPV6) || frame->sub != 0 || prepare() < 0) return -1;
    if (frame->length == IPV4) {
        const struct sockaddr_in address = address_of(frame->payload);
        return connection_dial(frame->stream, (const struct sockaddr *)&address, sizeof address);
    }
    struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)(frame->payload[16] | frame->payload[17] << 8))};
    memcpy(&address.sin6_addr, frame->payload, 16);
    return connection_dial(frame->stream, (const struct sockaddr *)&address, sizeof address);
}

/* ---- the event loop ---------------------------------------------------------------------------------------------------------- */

bool net_owns(const struct frame *frame) {
    return (frame->type >= FRAME_LISTEN && frame->type <= FRAME_NETWORK_LAST) || (frame->stream & GUEST_ID) != 0;
}

int net_frame(const struct frame *frame) {
    bool ours = (frame->stream & GUEST_ID) != 0;
    if (frame->stream == 0) return -1;
    switch (frame->type) {
    case FRAME_LISTEN: return ours ? -1 : on_listen(frame);
    case FRAME_UNLISTEN: return ours ? -1 : on_unlisten(frame);
    case FRAME_CONNECT: return ours ? -1 : on_connect(frame);
    case FRAME_QUERY: return ours ? on_answer(frame) : -1;
    case FRAME_RESET: return frame->length != 0 ? -1 : ours ? connection_reset(frame->stream) : connection_cancel(frame->stream);
    case FRAME_DATA:
    case FRAME_EOF:
    case FRAME_CREDIT: return ours ? connection_frame(frame) : -1;
    default: return -1;
    }
}

bool net_has_room(void) { return channel_room(&guest_channel) >= CHANNEL_RESERVE + FRAME_HEADER + FRAME_PAYLOAD_MAX; }

static int take_events(void) {
    struct epoll_event events[EVENTS];
    int count = epoll_wait(poller, events, EVENTS, 0);
    if (count < 0) return errno == EINTR ? 0 : -1;
    for (int i = 0; i < count; i++) {
        uint32_t id = (uint32_t)events[i].data.u64;
        if (events[i].data.u64 >> 56 == EVENT_LISTENER) {
            struct listener *listener = &listeners[(events[i].data.u64 >> 32) % LISTENERS_MAX];
            if (listener->id == id) set_waiting(listener, true);
        } else if (connection_event(id, events[i].events) < 0) {
            return -1;
        }
    }
    return 0;
}

int net_turn(void) {
    if (poller < 0 || !net_has_room()) return 0;
    int64_t now = now_ms();
    bucket_fill(&accepts, now);
    bucket_fill(&lookups, now);
    if (take_events() < 0 || report_refusals(now) < 0) return -1;
    for (size_t i = 0; i < listeners_end && listeners_waiting > 0; i++) {
        if (listeners[i].id != 0 && listeners[i].names && listeners[i].waiting && forward_queries(&listeners[i]) < 0) return -1;
    }
    if (listeners_waiting > 0 && accept_some() < 0) return -1;
    return connections_pump();
}

void net_forget(void) {
    for (size_t i = 0; i < listeners_end; i++) {
        if (listeners[i].id != 0 && park(&listeners[i]) < 0) drop_parked(&listeners[i]);
    }
    for (size_t i = 0; i < QUERIES_MAX; i++) queries[i].id = 0;
    connections_forget();
}

int net_poll_fd(void) { return net_has_room() ? poller : -1; }

int net_timeout(void) {
    if (poller < 0 || !net_has_room()) return -1;
    if (connections_ready()) return 0;
    int timeout = -1;
    for (int i = 0; i < REFUSALS; i++) {
        if (refused[i] != 0) timeout = REPORT_MS;
    }
    for (size_t i = 0; i < listeners_end && listeners_waiting > 0; i++) {
        if (listeners[i].id == 0 || !listeners[i].waiting) continue;
        if (listeners[i].names || (!connections_full() && accepts.level >= 1000)) return 0;
        if (!connections_full()) timeout = 1; /* tokens come by the millisecond */
    }
    return timeout;
}
