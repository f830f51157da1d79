#include "user.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 65536, FILE_MAX_BYTES = 16 << 20 };

typedef int line_visitor(char *line, void *context); /* 1 = found, stop */

/* Calls `visit` for each line of a regular file; lines that are too long are passed over. 1 = found, 0 = not, -1 and errno. */
static int each_line(const char *path, line_visitor *visit, void *context) {
    static char buffer[LINE_MAX_BYTES + 1];
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return errno == ENOENT ? 0 : -1;
    if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        errno = EINVAL;
        return -1;
    }
    size_t used = 0, total = 0;
    int skipping = 0, found = 0, ended = 0;
    while (!found && !ended && total < FILE_MAX_BYTES) {
        ssize_t got = read(fd, buffer + used, LINE_MAX_BYTES - used);
        if (got < 0) {
            found = -1;
            break;
        }
        ended = got == 0;
        total += (size_t)got;
        used += (size_t)got;
        if (ended && used > 0) buffer[used++] = '\n'; /* a last line without its end; there is one spare byte */
        size_t start = 0;
        char *end;
        while (!found && (end = memchr(buffer + start, '\n', used - start)) != NULL) {
            *end = '\0';
            if (!skipping) found = visit(buffer + start, context);
            skipping = 0;
            start = (size_t)(end - buffer) + 1;
        }
        memmove(buffer, buffer + start, used - start);
        used -= start;
        if (used == LINE_MAX_BYTES) {
            skipping = 1;
            used = 0;
        }
    }
    int error = errno;
    close(fd);
    errno = error;
    return found;
}

/* Splits at ':' in place into exactly `count` fields (the last one may not hold a ':'). */
static int split(char *line, char **fields, int count) {
    for (int i = 0; i < count; i++) {
        fields[i] = line;
        char *colon = strchr(line, ':');
        if ((colon == NULL) != (i == count - 1)) return -1;
        if (colon != NULL) {
            *colon = '\0';
            line = colon + 1;
        }
    }
    return 0;
}

static int parse_id(const char *text, uint32_t *id) {
    uint64_t value = 0;
    if (*text == '\0') return -1;
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9') return -1;
        value = value * 10 + (uint64_t)(*text - '0');
        if (value >= UINT32_MAX) return -1; /* the last id means "no change" to the kernel */
    }
    *id = (uint32_t)value;
    return 0;
}

struct passwd_search {
    const char *name; /* or, when NULL, by uid */
    struct user *user;
};

static int visit_passwd(char *line, void *context) {
    struct passwd_search *search = context;
    char *fields[7];
    uint32_t uid, gid;
    if (split(line, fields, 7) < 0 || parse_id(fields[2], &uid) < 0 || parse_id(fields[3], &gid) < 0) return 0;
    if (search->name != NULL ? strcmp(fields[0], search->name) != 0 : uid != search->user->uid) return 0;
    if (strlen(fields[0]) >= USER_TEXT_MAX || strlen(fields[5]) >= USER_TEXT_MAX) return 0;
    search->user->uid = uid;
    search->user->gid = gid;
    strcpy(search->user->name, fields[0]);
    strcpy(search->user->home, fields[5][0] != '\0' ? fields[5] : "/");
    return 1;
}

struct group_search {
    const char *name; /* a group of this name, or NULL */
    gid_t gid;
    struct user *user; /* collect the groups that list this user, or NULL */
};

static int visit_group(char *line, void *context) {
    struct group_search *search = context;
    char *fields[4];
    uint32_t gid;
    if (split(line, fields, 4) < 0 || parse_id(fields[2], &gid) < 0) return 0;
    if (search->name != NULL) {
        search->gid = gid;
        return strcmp(fields[0], search->name) == 0;
    }
    char *rest = fields[3], *member;
    while ((member = strsep(&rest, ",")) != NULL) {
        if (strcmp(member, search->user->name) != 0 || gid == search->user->gid) continue;
        if (search->user->group_count < USER_GROUPS_MAX) search->user->groups[search->user->group_count++] = gid;
        break;
    }
    return 0;
}

static int lookup_group(const char *text, gid_t *gid) {
    struct group_search search = {.name = text};
    int found = each_line("/etc/group", visit_group, &search);
    if (found == 1) *gid = search.gid;
    if (found == 0 && parse_id(text, gid) < 0) {
        errno = ENOENT;
        return -1;
    }
    return found < 0 ? -1 : 0;
}

int user_lookup(const char *text, struct user *user) {
    char name[USER_TEXT_MAX];
    const char *colon = strchr(text, ':');
    size_t length = colon != NULL ? (size_t)(colon - text) : strlen(text);
    memset(user, 0, sizeof *user);
    strcpy(user->home, "/");
    if (length == 0 || length >= sizeof name) {
        errno = EINVAL;
        return -1;
    }
    memcpy(name, text, length);
    name[length] = '\0';

    struct passwd_search search = {.name = name, .user = user};
    int found = each_line("/etc/passwd", visit_passwd, &search);
    if (found == 0 && parse_id(name, &user->uid) == 0) {
        search.name = NULL;
        found = each_line("/etc/passwd", visit_passwd, &search);
        if (found == 0) found = 2; /* a bare number */
    }
    if (strcmp(name, "root") == 0 && (found <= 0 || user->uid != 0)) {
        /* Root is id 0 whatever the disk says: an image need not have /etc/passwd, and who can write it must not
         * thereby take file operations away from the host. */
        memset(user, 0, sizeof *user);
        strcpy(user->name, "root");
        strcpy(user->home, "/root");
        found = 2;
    }
    if (found == 0) errno = ENOENT;
    if (found <= 0) return -1;
    if (found == 1) {
        struct group_search members = {.user = user};
        if (each_line("/etc/group", visit_group, &members) < 0 && user->uid != 0) return -1;
    }
    return colon != NULL ? lookup_group(colon + 1, &user->gid) : 0;
}
