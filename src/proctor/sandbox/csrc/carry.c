/* Connections of the carried network: a socket on one side, frames with credit on the other.
 *
 * Towards the host nothing is held: bytes go from the socket straight into the outgoing queue, as credit allows. From the host
 * a connection holds at most one window, and only what the program has not taken. */
#include "carry.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "net.h"
#include "table.h"

enum {
    SLOT_BITS = 9,        /* CONNECTIONS_MAX = 1 << SLOT_BITS */
    GENERATIONS = 1 << (31 - SLOT_BITS),
    EOF_CLOSE = 1,        /* sub of EOF: the host reads no more either, as after close(2) */
    FRAMES = 4,           /* towards the host in one turn */
    CREDIT_AT = WINDOW_INITIAL / 2,
    CONNECTION_CREDIT = 65536, /* the host gives more, up to a window, to whoever moves many bytes */
    SYN_RETRIES = 3,      /* a connect that nobody answers ends after 15 s */
};

_Static_assert(CONNECTIONS_MAX == 1 << SLOT_BITS, "a connection's id holds its slot");

struct connection {
    uint32_t id; /* 0 = free */
    uint32_t generation;
    uint32_t request; /* being dialled for it; 0 = made */
    int fd;
    bool readable; /* the socket may have bytes, or its end */
    bool hung_up;  /* the program has ended its direction, so an end will follow the bytes */
    bool queued;   /* in the ready queue */
    bool in_ended; /* the host knows that the program has ended its direction */
    bool out_ended, out_shut; /* the host has ended its direction; the program knows it */
    bool closing;             /* the host reads no more either */
    bool used_ring;
    uint32_t credit; /* what the host still takes */
    uint32_t window; /* what the host may still send */
    uint32_t owed;   /* taken by the program, not yet given back as credit */
    uint32_t start, used;
};

static struct connection connections[CONNECTIONS_MAX];
static size_t open_count, slot_next;
static uint16_t ready[CONNECTIONS_MAX];
static size_t ready_start, ready_count;
static uint8_t (*rings)[WINDOW_INITIAL];
static int poller = -1;

static uint8_t *ring_of(const struct connection *connection) { return rings[connection - connections]; }

int connections_prepare(int epoll_fd) {
    /* Address space, not memory: pages come when a program does not take what it is sent. Sandboxes without a network never
     * get here. */
    void *space = mmap(NULL, (size_t)CONNECTIONS_MAX * WINDOW_INITIAL, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return -1;
    (void)madvise(space, (size_t)CONNECTIONS_MAX * WINDOW_INITIAL, MADV_DONTFORK); /* forks are cheaper with it, where it exists */
    rings = space;
    poller = epoll_fd;
    return 0;
}

bool connections_full(void) { return open_count == CONNECTIONS_MAX; }
bool connections_ready(void) { return ready_count > 0; }

static struct connection *find(uint32_t id) {
    struct connection *connection = &connections[id % CONNECTIONS_MAX];
    return id != 0 && connection->id == id ? connection : NULL;
}

/* Bytes, or the end of them, that the host takes now. */
static bool has_input(const struct connection *connection) {
    return connection->readable && connection->credit > 0 && !connection->in_ended && !connection->closing;
}

static void make_ready(struct connection *connection) {
    if (connection->queued || connection->request != 0 || !has_input(connection)) return;
    connection->queued = true;
    ready[(ready_start + ready_count++) % CONNECTIONS_MAX] = (uint16_t)(connection - connections);
}

uint32_t connection_open(int fd, uint32_t request) {
    if (connections_full()) return errno = ENFILE, 0;
    int one = 1;
    struct connection *connection;
    do connection = &connections[slot_next++ % CONNECTIONS_MAX];
    while (connection->id != 0);
    uint32_t slot = (uint32_t)(connection - connections), generation = (connection->generation + 1) % GENERATIONS;
    uint32_t id = GUEST_ID | generation << SLOT_BITS | slot;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                                .data.u64 = (uint64_t)EVENT_CONNECTION << 56 | id};
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) < 0) return 0;
    bool queued = connection->queued; /* an older connection's place in the queue serves as well */
    *connection = (struct connection){.id = id, .generation = generation, .request = request, .fd = fd, .queued = queued,
                                      .credit = CONNECTION_CREDIT, .window = WINDOW_INITIAL};
    open_count++;
    return id;
}

/* A child that was forked a moment ago may still hold a copy of the descriptor, so the poller is told. */
static void close_connection(struct connection *connection, bool abort) {
    const struct linger at_once = {.l_onoff = 1, .l_linger = 0};
    if (abort) (void)setsockopt(connection->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    (void)epoll_ctl(poller, EPOLL_CTL_DEL, connection->fd, NULL);
    close_fd(&connection->fd);
    if (connection->used_ring) madvise(ring_of(connection), WINDOW_INITIAL, MADV_DONTNEED);
    connection->id = 0;
    open_count--;
}

static int fail_connection(struct connection *connection, int error) {
    uint32_t id = connection->id;
    close_connection(connection, true);
    return send_u32(FRAME_RESET, id, 0, (uint32_t)error);
}

/* Both directions have ended, or the host has closed: the last frame of this connection. The kernel delivers what it holds
 * and answers what still comes with a reset. */
static int close_if_over(struct connection *connection) {
    uint32_t id = connection->id;
    if ((!connection->in_ended && !connection->closing) || !connection->out_shut) return 0;
    close_connection(connection, false);
    return channel_put(&guest_channel, FRAME_CLOSED, id, 0, NULL, 0);
}

/* ---- towards the host ------------------------------------------------------------------------------------------------------- */

/* One read of one connection, straight into the outgoing queue. */
static int pump(struct connection *connection) {
    uint8_t *payload = channel_reserve(&guest_channel);
    if (payload == NULL) return 0;
    size_t limit = connection->credit < FRAME_PAYLOAD_MAX ? connection->credit : FRAME_PAYLOAD_MAX;
    ssize_t got = recv(connection->fd, payload, limit, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) return 0;
    if (got < 0 && errno == EAGAIN) {
        connection->readable = false;
        return 0;
    }
    if (got < 0) return fail_connection(connection, errno);
    if (got == 0) {
        connection->in_ended = true;
        if (channel_put(&guest_channel, FRAME_EOF, connection->id, 0, NULL, 0) < 0) return -1;
        return close_if_over(connection);
    }
    channel_commit(&guest_channel, FRAME_DATA, connection->id, 0, (uint32_t)got);
    connection->credit -= (uint32_t)got;
    /* A short read has emptied the socket: what comes later is an event of its own. */
    if ((size_t)got < limit && !connection->hung_up) connection->readable = false;
    return 0;
}

int connections_pump(void) {
    for (int frames = 0; frames < FRAMES && ready_count > 0 && net_has_room(); frames++) {
        struct connection *connection = &connections[ready[ready_start]];
        ready_start = (ready_start + 1) % CONNECTIONS_MAX;
        ready_count--;
        connection->queued = false;
        if (connection->id == 0 || !has_input(connection)) continue;
        if (pump(connection) < 0) return -1;
        if (connection->id != 0) make_ready(connection);
    }
    return 0;
}

/* ---- from the host ------------------------------------------------------------------------------------------------------------ */

static int give_credit(struct connection *connection) {
    uint32_t credit = connection->owed;
    if (credit < CREDIT_AT || connection->out_ended) return 0;
    connection->window += credit;
    connection->owed = 0;
    return send_u32(FRAME_CREDIT, connection->id, 0, credit);
}

static int end_output(struct connection *connection) {
    if (!connection->out_ended || connection->used > 0) return 0;
    if (!connection->out_shut && shutdown(connection->fd, SHUT_WR) < 0) return fail_connection(connection, errno);
    connection->out_shut = true;
    return close_if_over(connection);
}

/* Gives the program what it takes of the ring. */
static int flush(struct connection *connection) {
    while (connection->used > 0) {
        uint32_t run = WINDOW_INITIAL - connection->start;
        if (run > connection->used) run = connection->used;
        ssize_t sent = send(connection->fd, ring_of(connection) + connection->start, run, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN) break;
        if (sent < 0) return fail_connection(connection, errno);
        connection->start = (connection->start + (uint32_t)sent) % WINDOW_INITIAL;
        connection->used -= (uint32_t)sent;
        connection->owed += (uint32_t)sent;
    }
    if (give_credit(connection) < 0) return -1;
    return end_output(connection);
}

static void hold(struct connection *connection, const uint8_t *bytes, uint32_t length) {
    uint8_t *ring = ring_of(connection);
    uint32_t at = (connection->start + connection->used) % WINDOW_INITIAL, first = WINDOW_INITIAL - at;
    if (first > length) first = length;
    memcpy(ring + at, bytes, first);
    memcpy(ring, bytes + first, length - first);
    connection->used += length;
    connection->used_ring = true;
}

static int take(struct connection *connection, const struct frame *frame) {
    if (frame->length == 0 || frame->length > connection->window || connection->out_ended) return -1;
    connection->window -= frame->length;
    uint32_t sent = 0;
    while (connection->used == 0 && sent < frame->length) {
        ssize_t count = send(connection->fd, frame->payload + sent, frame->length - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && errno == EAGAIN) break;
        if (count < 0) return fail_connection(connection, errno);
        sent += (uint32_t)count;
    }
    connection->owed += sent;
    if (sent < frame->length) hold(connection, frame->payload + sent, frame->length - sent);
    return give_credit(connection);
}

int connection_frame(const struct frame *frame) {
    struct connection *connection = find(frame->stream);
    if (frame->sub != 0 && (frame->type != FRAME_EOF || frame->sub != EOF_CLOSE)) return -1;
    if (connection == NULL) return 0; /* it is over already: the two crossed on the way */
    if (connection->request != 0) return -1;
    if (frame->type == FRAME_DATA) return take(connection, frame);
    if (frame->type == FRAME_EOF) {
        bool close = frame->sub == EOF_CLOSE;
        if (frame->length != 0 || connection->closing || (connection->out_ended && !close)) return -1;
        connection->out_ended = true;
        connection->closing = close;
        return end_output(connection);
    }
    if (frame->length != 4) return -1;
    uint32_t credit = get_u32(frame->payload);
    if (credit > WINDOW_INITIAL || connection->credit + credit > WINDOW_INITIAL) return -1;
    connection->credit += credit;
    make_ready(connection);
    return 0;
}

int connection_reset(uint32_t id) {
    struct connection *connection = find(id);
    if (connection == NULL) return 0;
    if (connection->request != 0) return -1;
    close_connection(connection, true);
    return channel_put(&guest_channel, FRAME_CLOSED, id, 0, NULL, 0);
}

/* ---- dialling ----------------------------------------------------------------------------------------------------------------- */

static int answer(uint32_t request, int error, uint32_t id) {
    uint8_t payload[8];
    put_u32(payload, (uint32_t)error);
    put_u32(payload + 4, error == 0 ? id : 0);
    return channel_put(&guest_channel, FRAME_CONNECTED, request, 0, payload, sizeof payload);
}

/* A port of the range that the kernel chooses from, with nobody behind it, can be answered by the very socket that dials it. */
static bool met_itself(int fd) {
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t size = sizeof here;
    if (getsockname(fd, (struct sockaddr *)&here, &size) < 0) return false;
    size = sizeof there;
    if (getpeername(fd, (struct sockaddr *)&there, &size) < 0) return false;
    return memcmp(&here, &there, size) == 0;
}

/* The outcome of a dial is known. */
static int dialled(struct connection *connection, int error) {
    uint32_t request = connection->request, id = connection->id;
    if (error == 0 && met_itself(connection->fd)) error = ECONNREFUSED;
    if (error != 0) {
        close_connection(connection, true);
        return answer(request, error, 0);
    }
    connection->request = 0;
    make_ready(connection);
    return answer(request, 0, id);
}

int connection_dial(uint32_t request, const struct sockaddr *address, socklen_t size) {
    int retries = SYN_RETRIES;
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return answer(request, errno, 0);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_SYNCNT, &retries, sizeof retries); /* not everywhere; the host has a deadline too */
    bool pending = connect(fd, address, size) < 0;
    uint32_t id = pending && errno != EINPROGRESS ? 0 : connection_open(fd, request);
    if (id == 0) {
        int error = errno;
        close(fd);
        return answer(request, error, 0);
    }
    return pending ? 0 : dialled(find(id), 0);
}

int connection_cancel(uint32_t request) {
    for (size_t i = 0; i < CONNECTIONS_MAX; i++) {
        if (connections[i].id != 0 && connections[i].request == request) return dialled(&connections[i], ECANCELED);
    }
    return 0;
}

/* ---- what the kernel says -------------------------------------------------------------------------------------------------------- */

int connection_event(uint32_t id, uint32_t events) {
    struct connection *connection = find(id);
    if (connection == NULL) return 0;
    int error = 0;
    socklen_t size = sizeof error;
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) connection->hung_up = true;
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) connection->readable = true;
    /* A reset comes after the bytes before it, so the reader meets it, unless reading is over. */
    if (connection->request != 0 || (connection->in_ended && (events & EPOLLERR))) {
        if (getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0) error = errno;
    }
    if (connection->request != 0) {
        if (error == 0 && !(events & (EPOLLOUT | EPOLLHUP))) return 0;
        return dialled(connection, error);
    }
    if (error != 0) return fail_connection(connection, error);
    make_ready(connection);
    return (events & EPOLLOUT) && connection->used > 0 ? flush(connection) : 0;
}

void connections_forget(void) {
    for (size_t i = 0; i < CONNECTIONS_MAX; i++) {
        if (connections[i].id != 0) close_connection(&connections[i], true);
    }
}
